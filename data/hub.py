"""Fetch files of a dataset repository from the Hugging Face hub, whole or not at all.

The hub client (huggingface_hub) does the transfers: endpoint, credentials, proxies, its cache, its Xet
protocol, waiting when it is throttled, going on where a connection broke. Done here: files arrive in a folder
.partial beside their final places; size and sha256 are checked against the hub's metadata; then the file gets
its name, and <file>.json keeps what was checked. What the client gives up is tried again. A process that ends
loses the files that were under way, not those that were whole.

HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT and the proxy
variables are honoured, by the client.
"""
import contextlib
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import shards

PARTIAL = ".partial"                    # folder of what is not yet whole
CONNECT_SECONDS = 5
WAITS_SECONDS = (1, 2, 4, 8, 16)        # before each further try
LONGEST_WAIT_SECONDS = 300
DAMAGED_TRIES = 3                       # bytes that are not what the hub promised, so often in a row: it lies


class HubError(Exception):
    """A file can't be had; str() is one readable line."""


class Damaged(Exception):
    """Received bytes are not what the metadata says; worth another try."""


@dataclass(frozen=True)
class Remote:
    """One file of a dataset repository and the name it gets here (a path relative to the folder)."""
    repo: str
    path: str
    name: str
    revision: str = "main"


@dataclass(frozen=True)
class Facts:
    """What the hub says about a file: bytes, ETag, commit, and sha256 if the ETag is one, else None."""
    size: int
    etag: str
    commit: str
    sha256: str | None


def client():
    """The package huggingface_hub, imported when first needed (it reads HF_* then). Raises HubError."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise HubError("the package huggingface_hub is missing: pip install -r requirements.txt") from error
    return huggingface_hub


def say(line):
    shards.tell(line, sys.stderr)


def is_offline():
    return client().constants.is_offline_mode()


def connect(name):
    """Raise HubError unless the hub answers at all, in seconds; `name` is the file that is wanted first."""
    hf = client()
    session = hf.get_session()
    session.timeout = 2 * CONNECT_SECONDS       # the client's own questions would wait for ever
    try:
        session.head(hf.constants.ENDPOINT, timeout=CONNECT_SECONDS, follow_redirects=False)
    except Exception as error:                  # transport, proxy, or an HF_ENDPOINT that is no URL
        raise HubError(f"{name}: no connection to {hf.constants.ENDPOINT} ({_one_line(error)}); check the "
                       "network, set HF_ENDPOINT to a mirror, or copy the file here") from error


def _one_line(error):
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 100 else text[:100] + ".."


def retry(name, action):
    """action() until it returns, a few times. Raises HubError, and OSError of the disk."""
    errors = client().errors
    damaged = 0
    for wait in (*WAITS_SECONDS, None):
        try:
            return action()
        except Damaged as error:
            reason = str(error)
            damaged += 1
            if damaged == DAMAGED_TRIES:
                raise HubError(f"{name}: {reason}, {damaged} times: not kept") from error
        except (errors.HTTPError, OSError) as error:
            if error.__cause__ and isinstance(error, errors.LocalEntryNotFoundError):
                error = error.__cause__         # the client's "can't locate the file" hides what happened
            if getattr(error, "errno", None):
                raise                           # of the disk, not of the hub
            reason = f"connection lost ({type(error).__name__}: {_one_line(error)})"
            response = getattr(error, "response", None)
            if response is not None:
                reason = f"the hub answers {response.status_code}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    hint = "; set HF_TOKEN, or ask for access" if response.status_code in (401, 403) else ""
                    raise HubError(f"{name}: {reason} ({type(error).__name__}){hint}") from error
                asked = response.headers.get("Retry-After", "")
                if wait and asked.isdigit():
                    wait = max(wait, int(asked))
        if wait is None or wait > LONGEST_WAIT_SECONDS:
            asks = f", and asks to wait {wait:,} s" if wait else ""
            raise HubError(f"{name}: given up ({reason}{asks}); run again later")
        say(f"{name}: {reason}; again in {wait} s")
        time.sleep(wait)


def facts_of(remote):
    """What the hub says about the file (Facts). Raises HubError."""
    hf = client()
    url = hf.hf_hub_url(remote.repo, remote.path, repo_type="dataset", revision=remote.revision)
    data = retry(remote.name, lambda: hf.get_hf_file_metadata(url))
    if data.size is None or not data.etag:
        raise HubError(f"{remote.name}: {url} answers without size or ETag, so nothing can be checked; is "
                       "HF_ENDPOINT a hub?")
    sha256 = data.etag.lower()
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        sha256 = None
    return Facts(data.size, data.etag, data.commit_hash or remote.revision, sha256)


def fetch(remote, facts, folder, check=None):
    """Get the file whole, then name it. check(path) may raise ShardError. Raises HubError, OSError."""
    folder = Path(folder)
    target = folder / remote.name

    def once():
        arrived = Path(client().hf_hub_download(remote.repo, remote.path, repo_type="dataset",
                                                revision=facts.commit, local_dir=folder / PARTIAL))
        size, found = arrived.stat().st_size, shards.sha256_file(arrived)
        if size == facts.size and found == (facts.sha256 or found):
            return arrived
        arrived.unlink()
        if size != facts.size:
            raise Damaged(f"{size:,} of {facts.size:,} bytes came")
        raise Damaged(f"sha256 is {found[:16]}.., the hub says {facts.sha256[:16]}..")

    arrived = retry(remote.name, once)
    checked(check, arrived, remote)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(arrived, "rb") as file:
        os.fsync(file.fileno())
    os.replace(arrived, target)
    shards.sync_folder(target.parent)
    remember(target, remote, facts)


def checked(check, path, remote):
    """check(path), if there is a check; what it refuses becomes a HubError."""
    try:
        if check:
            check(path)
    except shards.ShardError as error:
        reason = str(error).replace(str(path), "it")
        raise HubError(f"{remote.name}: the hub's own file is no good: {reason}") from error


def take_offline(remote, folder, check):
    """HF_HUB_OFFLINE: the file out of the hub's cache, or the one that is here; `check` looks into it."""
    target = folder / remote.name
    cached = client().try_to_load_from_cache(remote.repo, remote.path, repo_type="dataset",
                                             revision=remote.revision)
    if isinstance(cached, str):
        arrived = folder / PARTIAL / target.name
        arrived.parent.mkdir(exist_ok=True)
        shutil.copyfile(cached, arrived)
        checked(check, arrived, remote)
        os.replace(arrived, target)
    elif target.is_file():
        checked(check, target, remote)
    else:
        raise HubError(f"{remote.name}: neither here nor in the hub cache, and HF_HUB_OFFLINE is set")
    shards.tell(f"{target}: taken without a checksum (HF_HUB_OFFLINE is set)")


# ------------------------------------------------------------------------------------------------------------
# <file>.json: what was checked when the file came


def memory_of(path):
    return path.with_name(path.name + ".json")


def remember(path, remote, facts):
    stat = path.stat()
    data = {"repo": remote.repo, "path": remote.path, "commit": facts.commit, "etag": facts.etag,
            "size": stat.st_size, "sha256": facts.sha256, "mtime_ns": stat.st_mtime_ns}
    shards.write_bytes(memory_of(path), (json.dumps(data, indent=1) + "\n").encode())


def recall(path):
    """The stored metadata of a file (dict), None when there is none or it can't be used."""
    memory = memory_of(Path(path))
    try:
        # a pipe would wait
        data = json.loads(memory.read_text(encoding="utf-8")) if memory.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    usable = (isinstance(data, dict) and type(data.get("size")) is int and isinstance(data.get("repo"), str)
              and isinstance(data.get("sha256") or "", str))
    return data if usable else None


def is_whole(path, remote):
    """True when `path` is what was checked earlier; it is read again only if it was touched since."""
    data = recall(path)
    if not data or not path.is_file() or (data["repo"], data.get("path")) != (remote.repo, remote.path):
        return False
    stat = path.stat()
    if stat.st_size != data["size"]:
        return False
    if stat.st_mtime_ns == data.get("mtime_ns"):
        return True
    return bool(data.get("sha256")) and shards.sha256_file(path) == data["sha256"]


def matches(path, facts):
    """True when a file that came in some other way is what the hub has; without a sha256 it can't be told."""
    return (path.is_file() and path.stat().st_size == facts.size and facts.sha256 is not None
            and shards.sha256_file(path) == facts.sha256)


# ------------------------------------------------------------------------------------------------------------
# many files


@contextlib.contextmanager
def partial_folder(folder):
    """The folder for what is not yet whole, for one process at a time; gone at the end. Raises HubError."""
    client()
    import filelock                     # comes with the hub client
    partial = folder / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(partial / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise HubError(f"{folder}: another download is writing into this folder; wait for it") from error
    with lock:
        for left in partial.iterdir():          # by a process that was killed
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != "lock":
                left.unlink()
        yield
        shutil.rmtree(partial)


def in_parallel(jobs, action, items):
    """Yield (item, its result or its error) as they come.

    Threads that still wait when this is left are let go.
    """
    pool = ThreadPoolExecutor(jobs)
    futures = {pool.submit(action, item): item for item in items}
    try:
        for future in as_completed(futures):
            error = future.exception()
            if error and not isinstance(error, (HubError, OSError, shards.ShardError)):
                raise error
            yield futures[future], error or future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def fetch_all(remotes, folder, jobs=4, check=None):
    """Get all `remotes` into `folder`, several at a time. Prints what happens; returns the number of missing
    files.

    Files that are whole are not fetched again (nor is the network touched when all are). Raises HubError when
    there is nothing to connect to, or no room.
    """
    folder = Path(folder)
    wanted = [remote for remote in remotes if not is_whole(folder / remote.name, remote)]
    if len(remotes) > len(wanted):
        shards.tell(f"{folder}: {len(remotes) - len(wanted)} of {len(remotes)} files are whole already")
    if not wanted:
        return 0
    with partial_folder(folder):
        if is_offline():
            results = in_parallel(1, lambda remote: take_offline(remote, folder, check), wanted)
            return sum(failed(result) for _, result in results)
        connect(wanted[0].name)
        facts, missing = {}, 0
        for remote, result in in_parallel(8, facts_of, wanted):
            if failed(result):
                missing += 1
            elif matches(folder / remote.name, result):
                remember(folder / remote.name, remote, result)
                shards.tell(f"{folder / remote.name}: whole already, sha256 as the hub says")
            else:
                facts[remote] = result
        need, free = sum(x.size for x in facts.values()), shutil.disk_usage(folder).free
        if need > free:
            raise HubError(f"{folder}: {need / 1e9:,.1f} GB to fetch, {free / 1e9:,.1f} GB free; ask for "
                           "fewer files or make room")
        say(f"{folder}: fetching {len(facts)} files, {need / 1e9:,.2f} GB")
        fetched = 0
        results = in_parallel(jobs, lambda remote: fetch(remote, facts[remote], folder, check), facts)
        for remote, result in results:
            if failed(result):
                missing += 1
                continue
            fetched += 1
            how = "sha256 as the hub says" if facts[remote].sha256 else "size as the hub says"
            say(f"{folder / remote.name}: {facts[remote].size:,} bytes, {how} ({fetched} of {len(facts)})")
        return missing


def failed(result):
    """True for an error, which is told."""
    if isinstance(result, Exception):
        say(f"error: {result}")
    return isinstance(result, Exception)
