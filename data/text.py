"""Make token shards from text: files, folders, globs, standard input, or the English that Python itself carries.

    python data/text.py --builtin --tokenizer=bytes --out=data/builtin      # a demo corpus, nothing to download
    python data/text.py my_notes/ "more/**/*.jsonl.gz" --out=data/mine      # GPT-2 tokens
    zcat dump.gz | python data/text.py - --tokenizer=bytes --out=data/dump  # one document per line

What is one document:
    .txt .md (or any other name given)   the file; with --documents=paragraph or line, each paragraph or line of it.
                                         When one text file is all there is, its paragraphs (blank lines part them), or
                                         its lines if there is no blank line. Blank lines are never documents there.
    .jsonl .ndjson                       each line: a JSON object whose --field ("text") holds the text, or a string
    .parquet                             each row: the column --field (needs pyarrow)
    - (standard input)                   each non-blank line of text, or of JSON with --stdin=jsonl
Names may end in .gz besides. Folders are searched for these suffixes, at any depth; hidden files are left out. Text is
UTF-8, and bytes that are not become U+FFFD. Special tokens written in a text are plain text.

Output: train_%06d.bin, val_%06d.bin and dataset.json (see data/README.md). The split goes by a hash of each document's
content, so equal documents never lie on both sides. All files get their names at the very end: a run that fails leaves
nothing. The result depends on the inputs and the seed alone, not on the machine or the number of threads.
"""
import argparse
import ast
import codecs
import collections
import glob
import gzip
import hashlib
import inspect
import json
import os
import platform
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing: pip install -r requirements.txt")

import shards

PIECE_CHARS = 1 << 20           # longer documents are read and encoded in pieces of about this size
BATCH_CHARS = 1 << 20           # characters per unit of work of a thread
BATCH_PIECES = 4096
BLOCK_TOKENS = 1 << 22          # documents are held back, put in hash order and written in blocks of this size
BLOCK_DOCUMENTS = 1 << 17
DEFAULT_SHARD_TOKENS = 100_000_000
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson")
FOREIGN_SUFFIXES = (".json", ".zip", ".tar", ".tgz", ".tar.gz", ".zst", ".xz", ".bz2", ".bin", ".pdf", ".docx")
TIKTOKEN_SECONDS = 60
DROPPED = "dropped"


class InputError(Exception):
    """Bad usage or bad input; str() is one readable line (exit 2)."""


class Meter:
    """What the reading side has seen, for the progress bar and the last lines."""

    def __init__(self):
        self.total_bytes = 0            # of all inputs on disk; 0 = unknown
        self.done_bytes = 0
        self.replaced = 0               # pieces with U+FFFD
        self.replaced_first = None
        self.notes = []                 # lines for the user about how the input was read

    def look(self, text, name):
        if "\ufffd" in text:
            self.replaced += 1
            self.replaced_first = self.replaced_first or name


# ----------------------------------------------------------------------------------------------------------------------
# tokenizers: text -> uint16 ids


class BytesTokenizer:
    """UTF-8 bytes as ids 0..255, end of document 256. Needs no file and no package."""
    name, vocab_size, eod_id = "bytes", 257, 256
    packages = ()

    def encode(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2")


class TiktokenTokenizer:
    """A tiktoken encoding; special tokens in the text are encoded as plain text."""
    packages = ("tiktoken",)

    def __init__(self, encoding):
        self.encoding = encoding
        self.name, self.vocab_size, self.eod_id = encoding.name, encoding.n_vocab, encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2")


def _tiktoken_files(name):
    """(URL, cache file name) of what tiktoken needs for the encoding `name`; empty when not known here."""
    base = "https://openaipublic.blob.core.windows.net/"
    urls = {"gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
            "p50k_edit": ("encodings/p50k_base.tiktoken",)}.get(name, (f"encodings/{name}.tiktoken",))
    return [(base + url, hashlib.sha1((base + url).encode()).hexdigest()) for url in urls]


def load_tokenizer(name):
    """The tokenizer `name`, "bytes" or a tiktoken encoding. Raises InputError, also when tiktoken's download hangs."""
    if name == "bytes":
        return BytesTokenizer()
    try:
        import tiktoken
    except ImportError as error:
        raise InputError(f"--tokenizer={name}: the package tiktoken is missing (pip install tiktoken), "
                         "or use --tokenizer=bytes") from error
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise InputError(f"--tokenizer={name}: not known; expected bytes or one of {', '.join(names)}")
    if name in ("cl100k_base", "o200k_base", "o200k_harmony"):
        raise InputError(f"--tokenizer={name}: its vocabulary has more than {shards.MAX_VOCAB_SIZE:,} ids and shards "
                         "hold 16-bit ids; use gpt2, r50k_base, p50k_base or bytes")
    result = []

    def load():
        try:
            result.append(tiktoken.get_encoding(name))
        except Exception as error:      # requests' errors, wrong hash, unwritable cache: all end in one line below
            result.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(TIKTOKEN_SECONDS)
    outcome = result[0] if result else f"no answer within {TIKTOKEN_SECONDS} s"
    if not isinstance(outcome, tiktoken.Encoding):
        wanted = " and ".join(f"{url} as {file}" for url, file in _tiktoken_files(name))
        reason = type(outcome).__name__ if isinstance(outcome, Exception) else outcome
        where = os.environ.get("TIKTOKEN_CACHE_DIR")
        where = f"TIKTOKEN_CACHE_DIR={where}" if where else "a folder named by TIKTOKEN_CACHE_DIR"
        raise InputError(f"--tokenizer={name}: tiktoken could not get its files ({reason}); without a network put "
                         f"{wanted} into {where}, or use --tokenizer=bytes")
    if outcome.n_vocab > shards.MAX_VOCAB_SIZE:
        raise InputError(f"--tokenizer={name}: {outcome.n_vocab:,} ids, but shards hold 16-bit ids; use gpt2 or bytes")
    return TiktokenTokenizer(outcome)


# ----------------------------------------------------------------------------------------------------------------------
# documents: every source yields (text, begins) pieces; begins is False for a further piece of the same document


_SAFE_CUT = re.compile(r"[^\W_](?=[ \n])")


def safe_cut(text):
    """The last place in `text` where cutting changes no token, 0 if there is none.

    Between a letter or digit and a following blank or line feed no pattern of tiktoken's encodings for 16-bit ids
    reaches across, and none looks back.
    """
    for low in range(len(text) - 1, 0, -4096):
        ends = [match.end() for match in _SAFE_CUT.finditer(text, max(0, low - 4096), low + 1)]
        if ends:
            return ends[-1]
    return 0


def cut_document(blocks):
    """Yield (text, begins) pieces of one document that arrives as an iterable of strings."""
    begins, held = True, ""
    for block in blocks:
        held += block
        while len(held) > PIECE_CHARS:
            at = safe_cut(held[:PIECE_CHARS]) or safe_cut(held)
            if not at:
                if len(held) < 16 * PIECE_CHARS:
                    break                       # no blank for a million characters: wait for one
                at = len(held)
            yield held[:at], begins
            begins, held = False, held[at:]
    if held or begins:
        yield held, begins


def _open_input(path):
    """(raw file, unpacked binary stream) of a file that may be gzip-packed."""
    try:
        raw = open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from error
    return raw, (gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw)


def refuse_utf16(start, path):
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InputError(f"{path}: UTF-16 text, expected UTF-8: convert it (iconv -f UTF-16 -t UTF-8)")


def _raw_blocks(path, meter):
    """Byte blocks of a file; refuses UTF-16, counts what was read for the progress bar."""
    raw, stream = _open_input(path)
    before = meter.done_bytes
    with raw:
        try:
            first = True
            while block := stream.read(1 << 20):
                if first:
                    refuse_utf16(block, path)
                yield block.removeprefix(codecs.BOM_UTF8) if first else block
                first = False
                meter.done_bytes = before + raw.tell()
        except (OSError, EOFError) as error:
            raise InputError(f"{path}: reading failed ({error}); is the file whole?") from error
    meter.done_bytes = before + os.path.getsize(path)


def _text_blocks(path, meter):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for block in _raw_blocks(path, meter):
        text = decoder.decode(block)
        meter.look(text, path)
        yield text
    rest = decoder.decode(b"", True)
    meter.look(rest, path)
    yield rest


def _lines(blocks):
    """Lines (bytes, without line end) of a stream of byte blocks."""
    held = []
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            if held:
                line, held = b"".join(held) + line, []
            yield line.removesuffix(b"\r")
        if rest:
            held.append(rest)
    if held:
        yield b"".join(held).removesuffix(b"\r")


def _decode(line, name, meter):
    text = line.decode("utf-8", "replace")
    meter.look(text, name)
    return text


def read_text(path, unit, meter):
    """Documents of a text file: the whole file, its paragraphs or its lines."""
    if unit == "file":
        yield from cut_document(_text_blocks(path, meter))
    else:
        yield from split_text(_raw_blocks(path, meter), unit, path, meter)


def split_text(blocks, unit, name, meter):
    """Paragraphs or lines of byte blocks, as documents; blank lines only separate."""
    paragraph = []
    for line in _lines(blocks):
        blank = not line.strip()
        if unit == "line":
            if not blank:
                yield from cut_document([_decode(line, name, meter)])
        elif not blank:
            paragraph.append(line)
        elif paragraph:
            yield from cut_document([_decode(b"\n".join(paragraph), name, meter)])
            paragraph = []
    if paragraph:
        yield from cut_document([_decode(b"\n".join(paragraph), name, meter)])


def read_jsonl(blocks, field, name):
    """Documents of JSON lines, one each; blank lines are left out."""
    for number, line in enumerate(_lines(blocks), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"{name}: line {number:,} is not JSON ({error})") from error
        if isinstance(value, dict):
            if field not in value:
                raise InputError(f"{name}: line {number:,} has no field {field!r}, only {', '.join(map(repr, value))}; "
                                 "name the one that holds the text with --field")
            value = value[field]
        if not isinstance(value, str):
            raise InputError(f"{name}: line {number:,} holds {type(value).__name__} where text was expected "
                             f"(field {field!r})")
        yield from cut_document([value])


def read_parquet(path, field, meter):
    """Documents of a parquet file, one per row."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    before, size = meter.done_bytes, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                there = ", ".join(map(repr, file.schema_arrow.names))
                raise InputError(f"{path}: no column {field!r}, only {there}; name the one that holds the text with "
                                 "--field")
            rows, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    done += 1
                    if not isinstance(value, str):
                        raise InputError(f"{path}: row {done:,} holds {type(value).__name__} where text was expected "
                                         f"(column {field!r})")
                    yield from cut_document([value])
                meter.done_bytes = before + size * done // rows
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    meter.done_bytes = before + size


def read_file(path, kind, unit, field, meter):
    """Documents of one file of the given kind (see kind_of); unit is file, paragraph or line, for text."""
    if kind == "text":
        return read_text(path, unit, meter)
    if kind == "jsonl":
        return read_jsonl(_raw_blocks(path, meter), field, path)
    return read_parquet(path, field, meter)


def kind_of(path):
    """text, jsonl or parquet by name; None for a name that folders are not searched for."""
    name = str(path).lower().removesuffix(".gz")
    if name.endswith(JSON_SUFFIXES):
        return "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    return "text" if name.endswith(TEXT_SUFFIXES) else None


def find_inputs(names):
    """[(path, kind)] of what the command line names, in sorted order per name, each file once. Raises InputError."""
    found, seen = [], set()
    for name in names:
        if os.path.isdir(name):
            paths = []
            for folder, folders, files in os.walk(name):
                folders[:] = sorted(x for x in folders if not x.startswith("."))
                paths += [os.path.join(folder, x) for x in files if not x.startswith(".") and kind_of(x)]
            if not paths:
                raise InputError(f"{name}: no file with {' '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} .parquet (.gz) in it")
        elif os.path.exists(name):
            paths = [name]
        else:
            paths = [x for x in glob.glob(name, recursive=True) if os.path.isfile(x)]
            if not paths:
                raise InputError(f"{name}: no such file or folder, and no file matches it as a pattern")
        for path in sorted(paths):
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            kind = kind_of(path)
            if kind is None and path.lower().endswith(FOREIGN_SUFFIXES):
                raise InputError(f"{path}: this kind of file can't be read; expected text, .jsonl or .parquet (.gz)")
            if kind == "parquet" and path.lower().endswith(".gz"):
                raise InputError(f"{path}: a packed parquet file can't be read; unpack it first")
            found.append((path, kind or "text"))
    return found


def _has_blank_line(path):
    _, stream = _open_input(path)
    with stream:
        try:
            start = stream.read(1 << 20)
        except (OSError, EOFError) as error:
            raise InputError(f"{path}: reading failed ({error}); is the file whole?") from error
    refuse_utf16(start, path)
    return re.search(rb"\n[ \t\r]*\n", start.strip()) is not None


def read_inputs(names, meter, unit="auto", field="text", stdin="lines", order_seed=None):
    """Documents of all inputs. Files are visited in sorted order, or shuffled by order_seed. Raises InputError."""
    if "-" in names:
        if len(names) > 1:
            raise InputError("-: standard input can't be mixed with files")
        blocks = iter(lambda: sys.stdin.buffer.read1(1 << 20), b"")
        if stdin == "jsonl":
            return read_jsonl(blocks, field, "standard input")
        return split_text(blocks, "paragraph" if unit == "paragraph" else "line", "standard input", meter)
    found = find_inputs(names)
    if unit == "auto":
        unit = "file"
        if len(found) == 1 and found[0][1] == "text":
            unit = "paragraph" if _has_blank_line(found[0][0]) else "line"
            meter.notes.append(f"one text file, so each {unit} is a document (choose with --documents)")
    meter.total_bytes = sum(os.path.getsize(path) for path, _ in found)
    if order_seed is not None:
        random.Random(order_seed).shuffle(found)

    return (piece for path, kind in found for piece in read_file(path, kind, unit, field, meter))


NO_PROSE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3",
            "turtledemo", "ensurepip", "pydoc_data"}


def _docstrings(node, name):
    """(qualified name, docstring) of a module, class or function and everything defined in it, in source order."""
    text = ast.get_docstring(node, clean=False)
    if text and text.strip():
        yield name, inspect.cleandoc(text)
    stack = list(reversed(getattr(node, "body", [])))
    while stack:
        child = stack.pop()
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            inner = child.body + getattr(child, "handlers", []) + getattr(child, "orelse", [])
            stack.extend(reversed([x for x in inner if not isinstance(x, ast.ExceptHandler)]))


def builtin_documents():
    """The English that every Python carries: each topic of the language reference, each module's docstrings.

    Sources are parsed, never imported. Order: topics by name, then modules by path. About 2 to 3 MB.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    for _, text in sorted(topics.items()):
        yield text, True
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - NO_PROSE)
        parts = Path(folder).relative_to(root).parts
        for file in sorted(files):
            if not file.endswith(".py"):
                continue
            name = ".".join((*parts, file.removesuffix(".py"))).removesuffix(".__init__")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(Path(folder, file).read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue                # a template or a file of another version: no prose from it
            found = [f"{owner}\n\n{text}" for owner, text in _docstrings(tree, name)]
            if found:
                yield "\n\n".join(found) + "\n", True


PIECE_BYTES = 512       # of a training document of the builtin corpus


def builtin_split(fraction, seed):
    """(documents, bytes of validation text with its marks): whole documents for validation first, then short pieces.

    The corpus is small and its documents are long: a batch of a small model would see one document at a time. So those
    for training are cut at line ends into pieces of about PIECE_BYTES, which then stand in the order of their hashes.
    """
    whole = [text for text, _ in builtin_documents()]
    whole.sort(key=lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest())
    wanted, held, n = fraction * sum(len(text.encode()) for text in whole), 0, 0
    while held < wanted:
        held, n = held + len(whole[n].encode()) + 1, n + 1

    def documents():
        yield from ((text, True) for text in whole[:n])
        for text in whole[n:]:
            piece = ""
            for line in text.splitlines(keepends=True):
                piece += line
                if len(piece) >= PIECE_BYTES:
                    yield piece, True
                    piece = ""
            if piece:
                yield piece, True
    return documents(), held


# ----------------------------------------------------------------------------------------------------------------------
# documents -> shards


class HashSplit:
    """A document is validation when the seeded hash of its content falls below `fraction`."""

    def __init__(self, fraction):
        self.fraction, self.dropped = fraction, 0
        self._bound = int(fraction * 2**64)

    def side(self, key, tokens):
        return "val" if key < self._bound else "train"

    def is_fair(self, val_tokens, tokens):
        return self.fraction / 3 < val_tokens / tokens < min(0.5, self.fraction * 3)


class FirstSplit:
    """The first documents are validation, up to `val_tokens`; exact copies of them that come later are dropped.

    `fraction` is for a corpus so small that split_small divides it.
    """

    def __init__(self, val_tokens, fraction):
        self.val_tokens, self.fraction, self.dropped = val_tokens, fraction, 0
        self._held, self._open, self._keys = 0, True, set()

    def side(self, key, tokens):
        if self._open and tokens is not None and self._held + tokens <= self.val_tokens:
            self._held += tokens
            self._keys.add(key)
            return "val"
        if self._held:
            self._open = False          # whole documents only: the first that doesn't fit ends the validation shard
        if key in self._keys:
            self.dropped += 1
            return DROPPED
        return "train"

    def is_fair(self, val_tokens, tokens):
        return 0 < 2 * val_tokens < tokens


def split_small(documents, fraction):
    """Keys of the validation documents of a small corpus; documents: [(key, tokens)].

    Equal documents stay together. In hash order, groups are taken until validation holds about `fraction` of the
    tokens, none of them larger than twice that; if there is none so small, the smallest group alone. Raises InputError
    when that would leave train no larger than validation.
    """
    groups = collections.Counter()
    for key, tokens in documents:
        groups[key] += tokens
    total = sum(groups.values())
    wanted = fraction * total
    taken, held = set(), 0
    for key, tokens in sorted(groups.items()):
        if held >= wanted:
            break
        if held + tokens <= 2 * wanted and 2 * (held + tokens) < total:
            taken.add(key)
            held += tokens
    if not taken:
        held, key = min((tokens, key) for key, tokens in groups.items())
        taken.add(key)
    if 2 * held >= total:
        raise InputError(f"{len(documents):,} documents ({len(groups):,} different ones) with {total:,} tokens, end "
                         "marks included: no room for a train split that is larger than the validation split; add "
                         "text, or cut it finer (--documents=paragraph or line)")
    return taken


class Builder:
    """Receives encoded documents in order, splits them, writes both sides under temporary names.

    Memory is flat: at most one block of documents is held. A corpus that ends within the first block is split exactly
    (split_small); a longer one by `split`, document by document, and once more by split_small if that came out unfair,
    as it may with few documents.
    """

    def __init__(self, folder, train_name, val_name, shard_tokens, split, hash_order):
        self.writers = {"train": shards.ShardWriter(folder, train_name, shard_tokens),
                        "val": shards.ShardWriter(folder, val_name, shard_tokens)}
        self.documents = {"train": 0, "val": 0}
        self.split, self.hash_order = split, hash_order
        self.names, self.folder, self.shard_tokens = {"train": train_name, "val": val_name}, folder, shard_tokens
        self._block, self._tokens, self._flushed = [], 0, False
        self._written = []              # [key, tokens, side] of each document written, while they are few
        self._direct = None             # side (or DROPPED) of a document longer than a block, written as it comes

    def add(self, ids, key):
        """One encoded piece: uint16 ids; key is the content hash of a document's first piece, None for further ones."""
        if key is None and self._direct:
            if self._direct != DROPPED:
                self.writers[self._direct].append(ids)
                if self._written:
                    self._written[-1][1] += len(ids)
            return
        self._direct = None
        if key is not None and (self._tokens >= BLOCK_TOKENS or len(self._block) >= BLOCK_DOCUMENTS):
            self._flush()
        if key is None:
            self._block[-1][1].append(ids)
        else:
            self._block.append((key, [ids]))
        self._tokens += len(ids)
        if self._tokens > 2 * BLOCK_TOKENS:
            long_document = self._block.pop()
            self._flush()
            self._direct = self._write(*long_document, self.split.side(long_document[0], None))

    def _flush(self):
        block, self._block, self._tokens, self._flushed = self._block, [], 0, True
        if self.hash_order:
            block.sort(key=lambda document: document[0])
        for key, parts in block:
            self._write(key, parts, self.split.side(key, sum(map(len, parts))))

    def _write(self, key, parts, side):
        if side != DROPPED:
            self.documents[side] += 1
            for ids in parts:
                self.writers[side].append(ids)
            if self._written is not None:
                self._written.append([key, sum(map(len, parts)), side])
                if len(self._written) > BLOCK_DOCUMENTS:
                    self._written = None
        return side

    def _split_again(self):
        """Divide what is written by split_small."""
        val_keys = split_small([(key, tokens) for key, tokens, _ in self._written], self.split.fraction)
        old, back = self.writers, {}
        for side, writer in old.items():
            back[side] = writer.read_back([tokens for _, tokens, its_side in self._written if its_side == side])
        self.writers = {side: shards.ShardWriter(self.folder, self.names[side], self.shard_tokens,
                                                 ".again" + shards.TEMP_SUFFIX) for side in old}
        try:
            self.documents = {"train": 0, "val": 0}
            for key, _, side in self._written:
                new_side = "val" if key in val_keys else "train"
                self.documents[new_side] += 1
                for ids in next(back[side]):
                    for low in range(0, len(ids), BLOCK_TOKENS):
                        self.writers[new_side].append(ids[low:low + BLOCK_TOKENS])
        finally:
            for writer in old.values():
                writer.discard()

    def finish(self):
        """Write what is held. Raises InputError when either side would be empty or validation the larger one."""
        if not self._flushed and not self._block:
            raise InputError("no document found: nothing to write")
        if not self._flushed:
            val_keys = split_small([(key, sum(map(len, parts))) for key, parts in self._block], self.split.fraction)
            block, self._block = self._block, []
            if self.hash_order:
                block.sort(key=lambda document: document[0])
            for key, parts in block:
                self._write(key, parts, "val" if key in val_keys else "train")
        else:
            self._flush()
            train, val = self._finished()
            if self._written and not self.split.is_fair(val.tokens, train.tokens + val.tokens):
                self._split_again()
        train, val = self._finished()
        if not val.tokens or train.tokens <= val.tokens:
            raise InputError(f"the split gave {train.tokens:,} train and {val.tokens:,} validation tokens in "
                             f"{sum(self.documents.values()):,} documents: choose another --seed or --val-fraction, or "
                             "cut the text finer (--documents=paragraph or line)")

    def _finished(self):
        for writer in self.writers.values():
            writer.finish()
        return self.writers["train"], self.writers["val"]

    def discard(self):
        for writer in self.writers.values():
            writer.discard()


def encode_batch(pieces, tokenizer, salt):
    """A thread's unit of work: [(text, begins)] -> (UTF-8 bytes of all, [(ids, key)])."""
    raw, encoded = [], []
    for text, begins in pieces:
        try:
            data = text.encode()
        except UnicodeEncodeError:      # lone surrogates, which JSON may hold
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            data = text.encode()
        ids, key = tokenizer.encode(text), None
        if begins:
            ids = np.concatenate((np.array([tokenizer.eod_id], dtype="<u2"), ids))
            key = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=salt).digest(), "big")
            raw.append(b"\0")
        raw.append(data)
        encoded.append((ids, key))
    return b"".join(raw), encoded


def batches(documents):
    batch, chars = [], 0
    for text, begins in documents:
        batch.append((text, begins))
        chars += len(text)
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_all(documents, tokenizer, seed, threads):
    """Yield encode_batch results in order. Threads suffice: tiktoken works outside the interpreter lock (measured: two
    threads with numpy output 1.7 times as fast as tiktoken's own batch call)."""
    salt = str(seed).encode()[:64]
    waiting = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in batches(documents):
                waiting.append(pool.submit(encode_batch, batch, tokenizer, salt))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Progress:
    """A tqdm bar over the input's bytes with documents/s and tokens/s; silent without tqdm or a terminal."""

    def __init__(self, meter, show=None):
        self.meter, self.start, self.documents, self.tokens = meter, time.monotonic(), 0, 0
        self.bar = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self.bar = tqdm(total=meter.total_bytes or None, unit="B", unit_scale=True, mininterval=0.5,
                        disable=None if show is None else not show)

    def add(self, documents, tokens):
        self.documents += documents
        self.tokens += tokens
        if self.bar is not None and not self.bar.disable:
            seconds = max(1e-9, time.monotonic() - self.start)
            self.bar.set_postfix_str(f"{self.documents / seconds:,.0f} documents/s, "
                                     f"{self.tokens / seconds:,.0f} tokens/s", refresh=False)
            self.bar.update(self.meter.done_bytes - self.bar.n)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def check_free(out, overwrite):
    """Raise InputError when the folder `out` holds a data set already."""
    there = [x.name for x in (*sorted(Path(out).glob("*.bin")), *Path(out).glob(shards.DATASET_FILE))]
    if there and not overwrite:
        raise InputError(f"--out={out}: holds {there[0]} already; choose another folder, or --overwrite to replace its "
                         f"{len(there)} files")


def is_own_builtin(out):
    """True when `out` holds nothing but an earlier builtin corpus, or what a kill left of one."""
    names = {x.name for x in Path(out).glob("*.bin")}
    if not names <= {"train_000000.bin", "val_000000.bin"}:
        return False
    dataset = shards.read_dataset(out)
    how = dataset.get("how") if dataset else {"builtin": Path(out).name == "builtin"}
    return isinstance(how, dict) and bool(how.get("builtin"))


def prepare_folder(out, overwrite):
    """Make the output folder, unless it holds a data set already; clear temporary files of an earlier run."""
    out = Path(out)
    check_free(out, overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={out}: can't be made ({error.strerror or error})") from error
    for temp in out.glob("*.bin*" + shards.TEMP_SUFFIX):
        temp.unlink()
    return out


def build(documents, tokenizer, out, *, split, train_name, val_name, shard_tokens, seed, hash_order, threads, meter,
          how, show_progress=None):
    """Tokenize `documents` (iterable of (text, begins)) into shards and dataset.json in the folder `out`.

    Returns the dataset (dict). On any failure nothing is left behind. Raises InputError, ShardError, OSError.
    """
    builder = Builder(out, train_name, val_name, shard_tokens, split, hash_order)
    progress = Progress(meter, show_progress)
    digest = hashlib.sha256()
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)         # encoders wait for the lock after each document: 5 ms would cost a fifth
    try:
        for raw, encoded in encode_all(documents, tokenizer, seed, threads):
            digest.update(raw)
            for ids, key in encoded:
                builder.add(ids, key)
            progress.add(sum(key is not None for _, key in encoded), sum(len(ids) for ids, _ in encoded))
        builder.finish()
        for old in [out / shards.DATASET_FILE, *out.glob("*.bin")]:
            old.unlink(missing_ok=True)
        for writer in builder.writers.values():
            writer.commit()
    except BaseException:
        builder.discard()
        raise
    finally:
        sys.setswitchinterval(switch_interval)
        progress.close()
    dataset = {"format": shards.DATASET_FORMAT, "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
               "eod_id": tokenizer.eod_id}
    for side in ("train", "val"):
        writer = builder.writers[side]
        dataset[side] = {"documents": builder.documents[side], "tokens": writer.tokens, "shards": writer.shards}
    dataset["text_sha256"] = digest.hexdigest()
    dataset["how"] = how
    shards.write_dataset(out, dataset)
    return dataset


def versions(*packages):
    """How-made entries of dataset.json: Python's version and those of the packages that shaped the tokens."""
    from importlib import metadata
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {"python": platform.python_version(), "packages": found}


def summary(dataset, out, shard_tokens, meter, split, seconds):
    """The last line: documents, tokens, shards, what the last shard holds."""
    train, val = dataset["train"], dataset["val"]
    last = train["shards"][-1]
    documents, tokens = (train[what] + val[what] for what in ("documents", "tokens"))
    line = (f"{out}: {documents:,} documents ({val['documents']:,} validation), {tokens:,} tokens ({val['tokens']:,} "
            f"validation), {len(train['shards'])} + {len(val['shards'])} shards; the last, {last['file']}, holds "
            f"{last['tokens']:,} of {shard_tokens:,} tokens; text sha256 {dataset['text_sha256'][:16]}; "
            f"{seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if split.dropped:
        line += f"; {split.dropped:,} documents dropped, exact copies of validation documents"
    if meter.replaced:
        line += f"; {meter.replaced:,} texts hold U+FFFD (bytes that are not UTF-8), first {meter.replaced_first}"
    return line


# ----------------------------------------------------------------------------------------------------------------------
# command line


def whole(low, high):
    def parse(text):
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number") from error
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"found {value:,}, expected {low:,} to {high:,}")
        return value
    return parse


def open_fraction(text):
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number") from error
    if not 0 < value < 0.5:
        raise argparse.ArgumentTypeError(f"found {text}, expected more than 0 and less than 0.5")
    return value


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_common_arguments(parser, out):
    parser.add_argument("--tokenizer", default="gpt2", help="bytes, or a tiktoken encoding for 16-bit ids (gpt2)")
    parser.add_argument("--out", default=out, help=f"folder for the shards (default {out})")
    parser.add_argument("--field", default="text", help="JSON field or parquet column that holds the text (text)")
    parser.add_argument("--shard-tokens", type=whole(1, shards.MAX_SHARD_TOKENS), default=DEFAULT_SHARD_TOKENS,
                        help="tokens per shard (100,000,000)")
    parser.add_argument("--threads", type=whole(1, 1024), default=cores(), help="encoding threads (all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace a data set that is already in the folder")


def build_and_tell(documents, args, out, split, meter, *, how, **options):
    """build() with the common arguments of the command line, then the last line; returns the exit code 0."""
    start = time.monotonic()
    tokenizer = load_tokenizer(args.tokenizer)
    out = prepare_folder(out, args.overwrite)
    for note in meter.notes:
        print(f"note: {note}", file=sys.stderr)
    how |= versions("numpy", *tokenizer.packages)
    dataset = build(documents, tokenizer, out, split=split, shard_tokens=args.shard_tokens, threads=args.threads,
                    meter=meter, how=how, **options)
    print(summary(dataset, out, args.shard_tokens, meter, split, time.monotonic() - start))
    return 0


def run_main(main, argv):
    """Run main(argv) as a command: errors become one line and an exit code, Ctrl-C is quiet, stop signals clean up."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")       # file names must not crash an ASCII terminal

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return main(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (shards.ShardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was left half-written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv):
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(prog="text.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help="files, folders, patterns, or - for standard input")
    parser.add_argument("--builtin", action="store_true", help="use the text that this Python carries")
    add_common_arguments(parser, None)
    parser.add_argument("--documents", choices=("auto", "file", "paragraph", "line"), default="auto",
                        help="what one document of a text file is (see above)")
    parser.add_argument("--stdin", choices=("lines", "jsonl"), default="lines", help="what standard input holds")
    parser.add_argument("--val-fraction", type=open_fraction, default=0.03, help="share of validation (0.03)")
    parser.add_argument("--seed", type=whole(0, 2**63), default=0, help="decides split and order (0)")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the input's order")
    args = parser.parse_args(argv)
    if args.builtin == bool(args.inputs):
        raise InputError("name files, folders, patterns or - as inputs, or use --builtin alone (--help tells more)")
    out = args.out or here / ("builtin" if args.builtin else "text")
    meter = Meter()
    split, how = HashSplit(args.val_fraction), f"by hash of content, fraction {args.val_fraction}"
    if args.builtin:
        documents, held = builtin_split(args.val_fraction, args.seed)
        split, how = FirstSplit(held, args.val_fraction), f"by hash of whole documents, fraction {args.val_fraction}"
    else:
        documents = read_inputs(args.inputs, meter, args.documents, args.field, args.stdin,
                                None if args.no_shuffle else args.seed)
    if args.builtin and not args.overwrite:
        args.overwrite = is_own_builtin(out)        # it can be made again at any time
    return build_and_tell(documents, args, out, split, meter,
                          train_name="train_{:06d}.bin".format, val_name="val_{:06d}.bin".format, seed=args.seed,
                          hash_order=not args.no_shuffle, how={
                              "argv": argv, "builtin": args.builtin, "seed": args.seed,
                              "split": how})


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
