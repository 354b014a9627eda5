"""Token shards: the FineWeb .bin format, and dataset.json beside it.

A shard is 256 little-endian int32 (1,024 bytes: [0] magic 20240520, [1] version 1, [2] token count, rest 0),
then the tokens as little-endian uint16. The format is that of llm.c (A. Karpathy) and of the public
FineWeb10B-GPT2 shards. Every document is preceded by the end-of-document id.

Only numpy is needed. Whatever is wrong with a file raises ShardError, whose text is one readable line: file,
found, expected, what to do.
"""
import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_BYTES = 2
MAX_VOCAB_SIZE = 1 << 16        # ids are uint16
GPT2_MAX_ID = 50256
MAX_SHARD_TOKENS = 2**31 - 1    # the count is an int32
DATASET_FORMAT = 1
DATASET_FILE = "dataset.json"
TEMP_SUFFIX = ".tmp"

AGAIN = "delete and download again (or make it again)"


class ShardError(ValueError):
    """A shard or a dataset.json that can't be used; str() is one readable line."""


def open_console():
    """Let sys.stdout and sys.stderr take any line: file names in ASCII, and nowhere when they are closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")


def tell(line, stream=None):
    """Print a line on `stream` (sys.stdout). A console that is closed, full or gone is no reason to stop."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        # else Python fails at its end, when it flushes once more
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ------------------------------------------------------------------------------------------------------------
# reading


def _explain_foreign(path, head, size):
    """What a file of `size` bytes that begins with `head` is instead of a shard; None if it may be one."""
    text = head.lstrip()
    if text.startswith(b"version https://git-lfs"):
        return (f"{path}: {size:,} bytes, too short to hold a header of {HEADER_BYTES:,} bytes; it looks "
                "like the pointer text of a large-file store (git-lfs), not the data: fetch the real file "
                "(git lfs pull) or download again")
    if text[:1] == b"<" or text[:1] == b"{":
        kind = "a web page" if text[:1] == b"<" else "a JSON text"
        return f"{path}: {size:,} bytes that look like {kind}, not a token shard: {AGAIN}"
    archives = ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ", "xz"), (b"PK\x03\x04", "zip"),
                (b"\x28\xb5\x2f\xfd", "zstd"))
    for start, kind in archives:
        if head.startswith(start):
            return f"{path}: a {kind} archive, not a token shard: unpack it first"
    for start, kind in ((b"PAR1", "parquet file"), (b"\x93NUMPY", "numpy .npy file")):
        if head.startswith(start):
            return f"{path}: a {kind}, not a token shard: make shards from it (data/text.py, data/shards.py)"
    return None


def check_header(path, head, size):
    """Token count promised by `head` (a file's first 1,024 bytes or fewer) of a file of `size` bytes.

    Raises ShardError for anything but a whole shard: too short, foreign, other magic or version, a count that
    doesn't fit the size. A file with bytes too many is refused as well: it was not written by a healthy
    process.
    """
    foreign = _explain_foreign(path, head, size)
    if foreign:
        raise ShardError(foreign)
    if size < HEADER_BYTES or len(head) < HEADER_BYTES:
        raise ShardError(f"{path}: {size:,} bytes, too short to hold a header of {HEADER_BYTES:,} bytes: "
                         f"{AGAIN}")
    header = np.frombuffer(head[:HEADER_BYTES], dtype="<i4")
    magic, version, tokens = (int(x) for x in header[:3])
    if (magic, version) != (MAGIC, VERSION):
        found = f"{path}: magic/version {magic}/{version}, expected {MAGIC}/{VERSION}"
        if (magic, version) == (20240801, 7):
            raise ShardError(f"{found}: this is the 32-bit-token format (Llama 3 ids); make 16-bit shards "
                             "instead")
        if magic == MAGIC:
            raise ShardError(f"{found}: another version of the format; make the shards again with "
                             "data/text.py or data/fineweb.py")
        if int(np.frombuffer(head[:4], dtype=">i4")[0]) == MAGIC:
            raise ShardError(f"{found}: byte order is big-endian; write little-endian shards")
        if np.frombuffer(head[:HEADER_BYTES], dtype="<u2").max() <= GPT2_MAX_ID:
            raise ShardError(f"{found}: raw 16-bit tokens without a header? data/README.md says how to add "
                             "one")
        raise ShardError(f"{found}: not a token shard; check the file name or pattern")
    expected = HEADER_BYTES + TOKEN_BYTES * tokens
    if tokens < 0:
        raise ShardError(f"{path}: header says {tokens:,} tokens, a count can't be negative: {AGAIN}")
    if size != expected:
        gap = f"{size - expected:,} bytes too many"
        if size < expected:
            gap = f"{expected - size:,} bytes missing"
        raise ShardError(f"{path}: header says {tokens:,} tokens ({expected:,} bytes), but the file has "
                         f"{size:,} bytes ({gap}): {AGAIN}")
    return tokens


def read_header(path):
    """Token count of the shard `path`, checked against the file's size.

    Raises ShardError (also if unreadable).
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):      # opening a pipe would wait for a writer
            raise ShardError(f"{path}: can't be read (no plain file, or a link to nothing): {AGAIN}")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise ShardError(f"{path}: can't be read ({reason}); check the name and the rights") from error
    return check_header(path, head, size)


def read_tokens(path):
    """All tokens of the shard `path`: read-only memory-mapped uint16 array (tokens,). Raises ShardError."""
    tokens = read_header(path)
    if tokens == 0:
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(tokens,))


def sha256_file(path):
    """Hex sha256 of a whole file, header included."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------
# writing: a final name appears only when its content is whole and on disk


def make_header(tokens):
    """The 1,024 header bytes of a shard of `tokens` tokens."""
    if not 0 <= tokens <= MAX_SHARD_TOKENS:
        raise ShardError(f"a shard can't hold {tokens:,} tokens: the format counts 0 to {MAX_SHARD_TOKENS:,}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def as_ids(tokens):
    """`tokens` (any integer sequence) as little-endian uint16; ids outside 0..65535 raise ShardError."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.zeros(0, dtype="<u2")
    if array.dtype.kind not in "iu":
        raise ShardError(f"token ids must be integers, found {array.dtype}")
    if array.dtype.itemsize > 2 or array.dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= MAX_VOCAB_SIZE:
            raise ShardError(f"token ids must be in 0..{MAX_VOCAB_SIZE - 1}, found "
                             f"{low if low < 0 else high}")
    return array.astype("<u2", copy=False)


def folder_name(text):
    """The Path that a flag such as --out=~/x names: bash leaves a ~ after = as it is."""
    return Path(os.path.expanduser(text))


def sync_folder(folder):
    """Make renames in `folder` durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def write_bytes(path, data):
    """Write a whole file atomically: temporary name, fsync, rename."""
    path = Path(path)
    temp = path.with_name(path.name + TEMP_SUFFIX)
    try:
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_shard(path, tokens):
    """Write one whole shard atomically; returns its hex sha256."""
    ids = as_ids(tokens)
    data = make_header(len(ids)) + ids.tobytes()
    write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


class ShardWriter:
    """Append tokens without end; they land in shards of `shard_tokens` tokens, all under temporary names.

    name(index) gives the final file name of shard 0, 1, 2, ... `finish()` closes the last one, `commit()`
    gives the final names, `discard()` removes everything that has none yet. Memory: what one append brings.
    """

    def __init__(self, folder, name, shard_tokens):
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise ShardError(f"shard size {shard_tokens:,} tokens, expected 1 to {MAX_SHARD_TOKENS:,}")
        self.folder, self.name, self.shard_tokens = Path(folder), name, shard_tokens
        self.shards = []                # rows of dataset.json: file, tokens, sha256
        self.tokens = 0
        self._file, self._held = None, 0

    def _temp(self, name):
        return self.folder / (name + TEMP_SUFFIX)

    def append(self, tokens):
        ids = as_ids(tokens)
        while len(ids):
            if self._file is None:
                self._file = open(self._temp(self.name(len(self.shards))), "w+b")
                self._file.write(make_header(0))
                self._held = 0
            part = ids[:self.shard_tokens - self._held]
            self._file.write(part.tobytes())
            self._held += len(part)
            self.tokens += len(part)
            ids = ids[len(part):]
            if self._held == self.shard_tokens:
                self._close()

    def _close(self):
        file, name = self._file, self.name(len(self.shards))
        file.seek(0)
        file.write(make_header(self._held))
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._file = None
        self.shards.append({"file": name, "tokens": self._held, "sha256": sha256_file(self._temp(name))})

    def finish(self):
        if self._file is not None:
            self._close()
        return self.shards

    def commit(self):
        for shard in self.finish():
            os.replace(self._temp(shard["file"]), self.folder / shard["file"])
        sync_folder(self.folder)

    def discard(self):
        if self._file is not None:
            with contextlib.suppress(OSError):      # a full disk: closing writes what is still held
                self._file.close()
            self._temp(self.name(len(self.shards))).unlink(missing_ok=True)
            self._file = None
        for shard in self.shards:
            self._temp(shard["file"]).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------
# dataset.json


def check_dataset(dataset, path):
    """`dataset` (parsed from `path`), or ShardError when it breaks the contract of data/README.md."""
    def wrong(what):
        what = what if len(what) < 200 else what[:200] + ".."
        return ShardError(f"{path}: {what}; make the data set again (data/text.py) or remove {DATASET_FILE}")

    def count(value, what, low, high=None):
        if type(value) is not int or value < low or (high is not None and value > high):
            bound = f"an integer of at least {low:,}" if high is None else f"an integer in {low:,}..{high:,}"
            raise wrong(f"{what} is {value!r}, expected {bound}")
        return value

    if not isinstance(dataset, dict):
        raise wrong("not a JSON object")
    if dataset.get("format") != DATASET_FORMAT:
        raise wrong(f"format is {dataset.get('format')!r}, expected {DATASET_FORMAT}")
    if not isinstance(dataset.get("tokenizer"), str):
        raise wrong(f"tokenizer is {dataset.get('tokenizer')!r}, expected a name")
    vocab = count(dataset.get("vocab_size"), "vocab_size", 2, MAX_VOCAB_SIZE)
    count(dataset.get("eod_id"), "eod_id", 0, vocab - 1)
    for split in ("train", "val"):
        part = dataset.get(split)
        if not isinstance(part, dict) or not isinstance(part.get("shards"), list):
            raise wrong(f"{split} is {type(part).__name__}, expected an object with documents, tokens and "
                        "shards")
        count(part.get("documents"), f"{split}.documents", 0)
        count(part.get("tokens"), f"{split}.tokens", 0)
        for shard in part["shards"]:
            if not isinstance(shard, dict) or not isinstance(shard.get("file"), str):
                raise wrong(f"{split}.shards holds {shard!r}, expected file, tokens and sha256")
            if not shard["file"] or os.path.basename(shard["file"]) != shard["file"]:
                raise wrong(f"{split}.shards names {shard['file']!r}, expected a file name without folders")
            count(shard.get("tokens"), f"tokens of {shard['file']}", 0)
            if not isinstance(shard.get("sha256"), str) or len(shard["sha256"]) != 64:
                raise wrong(f"sha256 of {shard['file']} is {shard.get('sha256')!r}, expected 64 hex digits")
        total = sum(shard["tokens"] for shard in part["shards"])
        if total != part["tokens"]:
            raise wrong(f"{split}.tokens is {part['tokens']:,}, but its shards hold {total:,}")
    return dataset


def read_dataset(folder):
    """The checked dataset.json of `folder`, or None when there is none. Raises ShardError."""
    path = Path(folder) / DATASET_FILE
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise ShardError(f"{path}: can't be read (no plain file, or a link to nothing); make the data "
                             "set again or remove it")
        text = path.read_text(encoding="utf-8-sig")         # editors on Windows put a byte order mark first
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"{path}: can't be read ({error})") from error
    try:
        dataset = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{path}: not JSON ({error}); make the data set again or remove the file") from error
    return check_dataset(dataset, path)


def write_dataset(folder, dataset):
    """Check `dataset` and write it as `folder`/dataset.json, atomically."""
    path = Path(folder) / DATASET_FILE
    check_dataset(dataset, path)
    write_bytes(path, (json.dumps(dataset, indent=1) + "\n").encode())
