"""Fetch files of a dataset repository from the Hugging Face hub, whole or not at all.

The hub client (huggingface_hub) supplies endpoint, credentials, session, metadata and error texts. What it does not do
(seen on 2.4.0: no resume after the process ends, no retry of a 503 on GET, no look at the content) is done here: bytes
go to <file>.<etag>.part beside the final name and later runs go on from there; size and sha256 are checked against the
hub's own metadata; then the file gets its name, and <file>.json keeps what was checked. So the disk holds each file
once. A copy that lies in the hub cache (HF_HOME) is linked instead of fetched.

HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT and the proxy variables are
honoured. Transfers are plain HTTPS with ranges; the hub's Xet protocol is not used.
"""
import contextlib
import email.utils
import errno
import json
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import shards

PROBE_SECONDS = 4.0
FAILURES = 6                    # in a row without one new byte, then the file is given up
LONGEST_WAIT_SECONDS = 300.0


class HubError(Exception):
    """A file can't be had; str() is one readable line."""


class Damaged(Exception):
    """Received bytes are not what the metadata says; worth another try."""


class Stopped(Exception):
    """The user stopped the run."""


@dataclass(frozen=True)
class Remote:
    """One file of a dataset repository and the name it gets here (a path relative to the folder)."""
    repo: str
    path: str
    name: str
    revision: str = "main"


@dataclass(frozen=True)
class Facts:
    """What the hub says about a file: size in bytes, ETag, commit, and sha256 where the ETag is one, else None."""
    size: int
    etag: str
    commit: str
    sha256: str | None


def client():
    """The package huggingface_hub, imported when first needed (it reads HF_* then). Raises HubError."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise HubError("the package huggingface_hub is missing: pip install -r requirements.txt") from error
    return huggingface_hub


def _transport_errors():
    try:
        import httpx2 as httpx      # what huggingface_hub 2 is built on
    except ImportError:
        import httpx
    return (httpx.TransportError, httpx.StreamError, httpx.DecodingError)


def endpoint():
    client()
    from huggingface_hub import constants
    return constants.ENDPOINT


def is_offline():
    client()
    from huggingface_hub import constants
    return constants.is_offline_mode()


def probe(url):
    """Raise HubError unless something accepts connections at `url` (or at the proxy that leads there), in seconds."""
    parts = urllib.parse.urlsplit(url)
    target = parts
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
        target = urllib.parse.urlsplit(proxy if "//" in proxy else "//" + proxy)
    if not target.hostname:
        raise HubError(f"HF_ENDPOINT={url}: not a URL with a host")
    result = []

    def connect():
        try:
            port = target.port or (80 if target.scheme == "http" else 443)
            socket.create_connection((target.hostname, port), timeout=PROBE_SECONDS).close()
            result.append(None)
        except (OSError, ValueError) as error:
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)      # name lookup has no timeout of its own
    thread.start()
    thread.join(PROBE_SECONDS + 0.5)
    if not result or result[0] is not None:
        reason = str(result[0]) if result else f"no answer within {PROBE_SECONDS:.0f} s"
        via = f" through the proxy {target.hostname}" if target is not parts else ""
        raise HubError(f"no connection to {url}{via} ({reason}): check the network, or set HF_ENDPOINT to a mirror, or "
                       "copy the files here from another machine")


def _retry_after(response):
    """Seconds that a Retry-After header asks for (number or date), None without one."""
    text = response.headers.get("Retry-After")
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


class Fetcher:
    """Metadata and downloads for one folder; thread-safe. `say(line)` tells the user about retries."""

    def __init__(self, folder, say, stop=None, bar=None):
        self.folder, self.say, self.bar = Path(folder), say, bar
        self.stop = stop or threading.Event()
        self._counted = set()

    def retry(self, name, action):
        """action() until it returns; new bytes reset the count of failures. Raises HubError, Stopped."""
        errors = client().errors
        failures, damages = 0, 0
        while True:
            before = self.received(name)
            try:
                return action()
            except errors.HfHubHTTPError as error:
                status = error.response.status_code
                if status not in (408, 429) and status < 500:
                    hint = {401: "; set HF_TOKEN", 403: "; set HF_TOKEN or ask for access"}.get(status, "")
                    raise HubError(f"{name}: the hub answers {status} ({type(error).__name__}){hint}") from error
                reason, wait = f"the hub answers {status}", _retry_after(error.response)
            except _transport_errors() as error:
                reason, wait = f"connection lost ({type(error).__name__}: {error})", None
            except Damaged as error:
                reason, wait = str(error), None
                damages += 1
                if damages >= 3:
                    raise HubError(f"{name}: {reason}, {damages} times: not kept") from error
            failures = 1 if self.received(name) > before else failures + 1
            if failures >= FAILURES:
                raise HubError(f"{name}: given up after {failures} tries without a new byte ({reason}); run again")
            if wait is not None and wait > LONGEST_WAIT_SECONDS:
                raise HubError(f"{name}: {reason} and asks to wait {wait:,.0f} s; run again later")
            if wait is None:
                wait = min(30.0, 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
            self.say(f"{name}: {reason}; again in {wait:.1f} s")
            if self.stop.wait(wait):
                raise Stopped

    def received(self, name):
        """Bytes of the unfinished file that are here."""
        total = 0
        for part in self._parts(name):
            with contextlib.suppress(OSError):
                total += part.stat().st_size
        return total

    def _parts(self, name):
        target = self.folder / name
        pattern = re.compile(re.escape(target.name) + r"\.[0-9a-zA-Z]*\.part")
        return [x for x in target.parent.glob("*.part") if pattern.fullmatch(x.name)] if target.parent.is_dir() else []

    def facts(self, remote):
        """What the hub says about the file (Facts). Raises HubError, Stopped."""
        hf = client()
        url = hf.hf_hub_url(remote.repo, remote.path, repo_type="dataset", revision=remote.revision)
        data = self.retry(remote.name, lambda: hf.get_hf_file_metadata(url))
        if data.size is None or not data.etag:
            raise HubError(f"{remote.name}: {url} answers without size or ETag, so nothing can be checked; is "
                           "HF_ENDPOINT a hub?")
        etag = data.etag.lower()
        return Facts(data.size, data.etag, data.commit_hash or "", etag if re.fullmatch("[0-9a-f]{64}", etag) else None)

    def fetch(self, remote, facts, check=None):
        """Get the file whole, then name it. check(path) may raise ShardError. Raises HubError, OSError, Stopped."""
        target = self.folder / remote.name
        target.parent.mkdir(parents=True, exist_ok=True)
        short = re.sub(r"[^0-9a-zA-Z]", "", facts.etag)[:12]
        part = target.with_name(f"{target.name}.{short}.part")
        for other in self._parts(remote.name):
            if other != part:
                other.unlink()                  # of another version of the file
        if not self._from_cache(remote, facts, part):
            self.retry(remote.name, lambda: self._download(remote, facts, part))
        if check:
            try:
                check(part)
            except shards.ShardError as error:
                part.unlink()
                reason = str(error).replace(str(part), "it")
                raise HubError(f"{remote.name}: the hub's own file is no good: {reason}") from error
        os.replace(part, target)
        shards.sync_folder(target.parent)
        remember(target, remote, facts)

    def _from_cache(self, remote, facts, part):
        """Link (else copy) the file from the hub cache, if a good copy lies there."""
        cached = client().try_to_load_from_cache(remote.repo, remote.path, repo_type="dataset", revision=facts.commit)
        if not isinstance(cached, str):
            return False
        cached = os.path.realpath(cached)
        if os.path.getsize(cached) != facts.size or (facts.sha256 and shards.sha256_file(cached) != facts.sha256):
            return False
        part.unlink(missing_ok=True)
        try:
            os.link(cached, part)
        except OSError:
            shutil.copyfile(cached, part)
        self._count(facts.size)
        return True

    def _count(self, size):
        if self.bar is not None:
            self.bar.update(size)

    def _download(self, remote, facts, part):
        """One try: go on where the part ends, then check. Raises Damaged and the client's errors."""
        hf = client()
        from huggingface_hub import constants
        url = hf.hf_hub_url(remote.repo, remote.path, repo_type="dataset", revision=facts.commit or remote.revision)
        with open(part, "ab") as file:
            held = file.tell()
            if held > facts.size:
                file.truncate(0)
                held = 0
            if remote.name not in self._counted:        # bytes of an earlier run
                self._counted.add(remote.name)
                self._count(held)
            if held < facts.size:
                headers = hf.utils.build_hf_headers()
                headers["Accept-Encoding"] = "identity"
                if held:
                    headers["Range"] = f"bytes={held}-"
                with hf.get_session().stream("GET", url, headers=headers,
                                                 timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
                    if response.status_code == 416:
                        self._restart(file)
                        raise Damaged("the hub can't go on from there")
                    hf.utils.hf_raise_for_status(response)
                    if held and not response.headers.get("Content-Range", "").startswith(f"bytes {held}-"):
                        self._restart(file)     # the whole file comes instead of its rest
                    self._receive(response, file, facts)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if size != facts.size:
            raise Damaged(f"{size:,} of {facts.size:,} bytes came")
        if facts.sha256 and (found := shards.sha256_file(part)) != facts.sha256:
            part.unlink()
            self._count(-size)
            raise Damaged(f"sha256 is {found[:16]}.., the hub says {facts.sha256[:16]}..")

    def _receive(self, response, file, facts):
        for block in response.iter_bytes():
            if self.stop.is_set():
                raise Stopped
            file.write(block)
            self._count(len(block))
            if file.tell() > facts.size:
                self._restart(file)
                raise Damaged(f"more than {facts.size:,} bytes came")

    def _restart(self, file):
        self._count(-file.tell())
        file.seek(0)
        file.truncate()


# ----------------------------------------------------------------------------------------------------------------------
# <file>.json: what was checked when the file came


def memory_of(path):
    return path.with_name(path.name + ".json")


def remember(path, remote, facts):
    stat = path.stat()
    data = {"repo": remote.repo, "path": remote.path, "commit": facts.commit, "etag": facts.etag, "size": stat.st_size,
            "sha256": facts.sha256, "mtime_ns": stat.st_mtime_ns}
    shards.write_bytes(memory_of(path), (json.dumps(data, indent=1) + "\n").encode())


def recall(path):
    """The stored metadata of a file (dict), None when there is none or it can't be used."""
    memory = memory_of(Path(path))
    try:
        data = json.loads(memory.read_text(encoding="utf-8")) if memory.is_file() else None     # a pipe would wait
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(data, dict) and type(data.get("size")) is int and isinstance(data.get("repo"), str) and isinstance(
            data.get("sha256") or "", str):
        return data
    return None


def is_whole(path, remote):
    """True when `path` is what was checked earlier; bytes are read again only if the file was touched since."""
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


# ----------------------------------------------------------------------------------------------------------------------
# many files


@contextlib.contextmanager
def only_one(folder):
    """Refuse a second run that writes into the same folder (where the system has flock)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise HubError(f"{folder}: another download is writing into this folder; wait for it") from error
    try:
        yield
    finally:
        os.close(handle)


def _parallel(jobs, action, items, stop):
    """Yield (item, result or exception) in order of completion; Ctrl-C sets `stop` and is passed on."""
    pool = ThreadPoolExecutor(jobs)
    futures = {pool.submit(action, item): item for item in items}
    try:
        for future in as_completed(futures):
            yield futures[future], future.exception() or future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def fetch_all(remotes, folder, jobs=4, check=None):
    """Get all `remotes` into `folder`, several at a time. Prints what happens; returns the number of missing files.

    Files that are whole are not fetched again (nor is the network touched when all are). Raises HubError when there is
    nothing to connect to, or no room.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder):
        wanted = [remote for remote in remotes if not is_whole(folder / remote.name, remote)]
        if len(remotes) > len(wanted):
            print(f"{folder}: {len(remotes) - len(wanted)} of {len(remotes)} files are whole already")
        if not wanted:
            return 0
        if is_offline():
            return _offline(wanted, folder, check)
        probe(endpoint())
        return _fetch_wanted(wanted, folder, jobs, check)


def _offline(wanted, folder, check):
    """HF_HUB_OFFLINE: take what the hub cache has; the cache knows no checksums, so only `check` looks at the bytes."""
    missing = 0
    for remote in wanted:
        target = folder / remote.name
        cached = client().try_to_load_from_cache(remote.repo, remote.path, repo_type="dataset",
                                                  revision=remote.revision)
        source = cached if isinstance(cached, str) else target
        try:
            if not os.path.isfile(source):
                raise HubError(f"{remote.name}: neither here nor in the hub cache, and HF_HUB_OFFLINE is set")
            if check:
                check(source)
        except (HubError, shards.ShardError) as error:
            print(f"error: {error}", file=sys.stderr)
            missing += 1
            continue
        if source != target:
            part = target.with_name(target.name + ".part")
            part.unlink(missing_ok=True)
            try:
                os.link(os.path.realpath(source), part)
            except OSError:
                shutil.copyfile(source, part)
            os.replace(part, target)
        print(f"{target}: taken without a checksum (HF_HUB_OFFLINE is set)")
    return missing


def _fetch_wanted(wanted, folder, jobs, check):
    stop = threading.Event()
    try:
        from tqdm import tqdm
        bar = tqdm(total=0, unit="B", unit_scale=True, mininterval=0.2, disable=None, leave=False)
        say = tqdm.write
    except ImportError:
        bar, say = None, print
    fetcher = Fetcher(folder, lambda line: say(line, file=sys.stderr), stop, bar)
    failed, facts, got = 0, {}, 0

    def complain(error):
        if not isinstance(error, (HubError, OSError, shards.ShardError)):
            raise error
        say(f"error: {error}", file=sys.stderr)

    try:
        for remote, result in _parallel(max(jobs, 8), fetcher.facts, wanted, stop):
            if isinstance(result, BaseException):
                complain(result)
                failed += 1
            elif matches(folder / remote.name, result):
                remember(folder / remote.name, remote, result)
                print(f"{folder / remote.name}: whole already, sha256 as the hub says")
            else:
                facts[remote] = result
        need = sum(x.size - fetcher.received(remote.name) for remote, x in facts.items())
        free = shutil.disk_usage(folder).free
        if need > free:
            raise HubError(f"{folder}: {need / 1e9:,.1f} GB to fetch, {free / 1e9:,.1f} GB free; ask for fewer files "
                           "or make room")
        if bar is not None:
            bar.total = sum(x.size for x in facts.values())
        todo = [remote for remote in wanted if remote in facts]
        for remote, result in _parallel(jobs, lambda remote: fetcher.fetch(remote, facts[remote], check), todo, stop):
            if isinstance(result, BaseException):
                complain(result)
                failed += 1
            else:
                got += 1
                how = "sha256 as the hub says" if facts[remote].sha256 else "size as the hub says, no sha256 there"
                say(f"{folder / remote.name}: {facts[remote].size:,} bytes, {how} ({got} of {len(todo)})")
    finally:
        if bar is not None:
            bar.close()
    return failed
