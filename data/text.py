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
Names may end in .gz besides. Folders are searched for these suffixes, at any depth and through links; hidden files are
left out, other suffixes are left out and counted. Rows that hold null are left out and counted. Text is UTF-8; a byte
that is not becomes U+FFFD, and a file that is full of them is refused. Special tokens written in a text are plain text.

Output: train_%06d.bin, val_%06d.bin and dataset.json (see data/README.md). The split goes by a hash of each document's
content, so equal documents never lie on both sides. All files get their names at the very end: a run that fails leaves
nothing. --overwrite replaces the files that the folder's dataset.json lists, and no others. The result depends on the
inputs and the seed alone, not on the machine or the number of threads.
"""
import argparse
import ast
import codecs
import collections
import contextlib
import glob
import gzip
import hashlib
import inspect
import io
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
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing: pip install -r requirements.txt")

import shards

MAX_DOCUMENT_CHARS = 1 << 28    # a document lies in memory as a whole: about 1 GB for the largest
BATCH_CHARS = 1 << 22           # documents that are encoded side by side hold about so many characters
BATCH_DOCUMENTS = 4096
BLOCK_TOKENS = 1 << 22          # documents are put in hash order within blocks of this size
DEFAULT_SHARD_TOKENS = 100_000_000
MANY_BYTES = 50_000_000         # input that takes more than a few seconds
FEW_VAL_TOKENS = 1000           # a loss over fewer tokens is known to about 0.1 at best: worth a note
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson")
FOREIGN_SUFFIXES = (".json", ".zip", ".tar", ".tgz", ".tar.gz", ".zst", ".xz", ".bz2", ".bin", ".pdf", ".docx")
FOREIGN_STARTS = ((b"\x1f\x8b", "gzip data"), (b"BZh", "bzip2 data"), (b"\xfd7zXZ", "xz data"), (b"PAR1", "parquet"),
                  (b"\x28\xb5\x2f\xfd", "zstd data"), (b"PK\x03\x04", "a zip archive"), (b"%PDF", "a PDF"))
LOOK_BYTES = 1 << 16            # the start of an input, by which it is judged to be text or not
SPOOL = "tokens.bin" + shards.TEMP_SUFFIX
OWN_TEMP = re.compile(r"((fineweb_)?(train|val)_\d{6}|tokens)\.bin" + re.escape(shards.TEMP_SUFFIX))
TIKTOKEN_SECONDS = 60
TOO_MANY_IDS = ("cl100k_base", "o200k_base", "o200k_harmony")      # tiktoken's encodings that 16 bits can't hold


class InputError(Exception):
    """Bad usage or bad input; str() is one readable line (exit 2)."""


class Meter:
    """What the reading side has seen, for the progress bar, the notes and the last line."""

    def __init__(self):
        self.total_bytes = 0            # of all inputs on disk; 0 = unknown
        self.finished_bytes = 0
        self.raw = None                 # the file being read, whose position counts too
        self.replaced = 0               # documents with U+FFFD
        self.replaced_first = None
        self.nulls = 0                  # rows that hold null
        self.notes = []                 # lines for the user about how the input was read

    def done_bytes(self):
        return self.finished_bytes + (self.raw.tell() if self.raw else 0)

    def document(self, text, name):
        """`text`, counted and checked for its size. Raises InputError."""
        if len(text) > MAX_DOCUMENT_CHARS:
            raise InputError(f"{name}: a document of more than {MAX_DOCUMENT_CHARS:,} characters: cut it finer "
                             "(--documents=paragraph or line)")
        if "\ufffd" in text:
            self.replaced += 1
            self.replaced_first = self.replaced_first or name
        return text


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
    if name in TOO_MANY_IDS:
        raise InputError(f"--tokenizer={name}: its vocabulary has more than {shards.MAX_VOCAB_SIZE:,} ids and shards "
                         "hold 16-bit ids; use gpt2, r50k_base, p50k_base or bytes")
    result = [f"no answer within {TIKTOKEN_SECONDS} s"]

    def load():
        try:
            result.append(tiktoken.get_encoding(name))
        except Exception as error:      # requests' errors, wrong hash, unwritable cache: all end in one line below
            result.append(type(error).__name__)

    thread = threading.Thread(target=load, daemon=True)     # tiktoken's download has no time limit of its own
    thread.start()
    thread.join(TIKTOKEN_SECONDS)
    if isinstance(result[-1], str):
        raise InputError(f"--tokenizer={name}: tiktoken could not get its files ({result[-1]}); without a network set "
                         "TIKTOKEN_CACHE_DIR to a folder that holds them (data/README.md), or use --tokenizer=bytes")
    return TiktokenTokenizer(result[-1])


# ----------------------------------------------------------------------------------------------------------------------
# documents: every source is an iterator of strings, one a document


def check_start(head, name, meter, hint=""):
    """Refuse input whose first bytes `head` are no UTF-8 text; note what looks like a table or like JSON.

    hint: what to do if it is JSON lines; empty when JSON is expected. Raises InputError.
    """
    for start, kind in FOREIGN_STARTS:
        if head.startswith(start):
            raise InputError(f"{name}: {kind}, expected UTF-8 text; unpack or convert it first (gzip: a name ending in "
                             ".gz, or zcat)")
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InputError(f"{name}: UTF-16 text, expected UTF-8: convert it (iconv -f UTF-16 -t UTF-8)")
    if b"\0" in head:
        raise InputError(f"{name}: holds NUL bytes, so it is no UTF-8 text (a binary file, or UTF-16?)")
    text = head.decode("utf-8", "replace")
    damaged = text.count("\ufffd") - head.count("\ufffd".encode())
    if damaged >= 3 and damaged > len(head) / 200:          # prose in Latin-1: 1 byte in 30 (French) to 70 (German)
        raise InputError(f"{name}: {damaged:,} of the first {len(head):,} bytes are not UTF-8; another encoding? "
                         "convert it (iconv -f LATIN1 -t UTF-8)")
    lines = text.splitlines()[:5]
    if hint and lines and re.fullmatch(r"\s*\{.*\}\s*", lines[0]):
        meter.notes.append(f"{name}: looks like JSON lines, taken as plain text; {hint} reads them")
    for mark in ",;\t":
        counts = {line.count(mark) for line in lines}
        if hint and len(lines) >= 3 and len(counts) == 1 and max(counts) >= (1 if mark == "\t" else 2):
            meter.notes.append(f"{name}: looks like a table (CSV), taken as plain text with all its columns")


@contextlib.contextmanager
def open_input(path, meter, hint=""):
    """The file as a text stream, unpacked when its name ends in .gz. Trouble while reading becomes an InputError."""
    try:
        with open(path, "rb") as raw:
            meter.raw = raw
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw, LOOK_BYTES)
            check_start(stream.peek(LOOK_BYTES), path, meter, hint)
            yield io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="\n")
            meter.raw = None
            meter.finished_bytes += os.path.getsize(path)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: reading failed ({error}); is the file whole?") from error


def lines_of(stream, name):
    """(number, line without its end) of a text stream. Raises InputError for a line longer than a document may be."""
    for number, line in enumerate(iter(partial(stream.readline, MAX_DOCUMENT_CHARS + 1), ""), 1):
        if len(line) > MAX_DOCUMENT_CHARS:
            raise InputError(f"{name}: line {number:,} has more than {MAX_DOCUMENT_CHARS:,} characters")
        yield number, line.removesuffix("\n").removesuffix("\r")


def read_text(stream, unit, name, meter):
    """Documents of a text stream: the whole (unit "file"), its paragraphs or its lines. Blank lines only separate."""
    def document(text):
        if "\0" in text:
            raise InputError(f"{name}: holds NUL bytes, so it is no UTF-8 text (a binary file, or UTF-16?)")
        return meter.document(text, name)

    if unit == "file":
        yield document(stream.read(MAX_DOCUMENT_CHARS + 1))
        return
    paragraph, chars = [], 0
    for _, line in lines_of(stream, name):
        is_blank = not line.strip()
        if unit == "line" and not is_blank:
            yield document(line)
        elif unit == "paragraph" and not is_blank and chars <= MAX_DOCUMENT_CHARS:
            paragraph.append(line)
            chars += len(line)
        elif paragraph:
            yield document("\n".join(paragraph))
            paragraph, chars = [], 0
    if paragraph:
        yield document("\n".join(paragraph))


def read_jsonl(stream, field, name, meter):
    """Documents of JSON lines, one each; blank lines and nulls are left out."""
    for number, line in lines_of(stream, name):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:       # also: numbers of thousands of digits, brackets without end
            raise InputError(f"{name}: line {number:,} is not JSON ({error})") from error
        if isinstance(value, dict):
            if field not in value:
                raise InputError(f"{name}: line {number:,} has no field {field!r}, only {', '.join(map(repr, value))}; "
                                 "name the one that holds the text with --field")
            value = value[field]
        if value is None:
            meter.nulls += 1
            continue
        if not isinstance(value, str):
            raise InputError(f"{name}: line {number:,} holds {type(value).__name__} where text was expected "
                             f"(field {field!r})")
        if "\\u" in line:       # JSON may hold half of a surrogate pair, which is no text
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield meter.document(value, f"{name}: line {number:,}")


def read_parquet(path, field, meter):
    """Documents of a parquet file, one per row; nulls are left out."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                there = ", ".join(map(repr, file.schema_arrow.names))
                raise InputError(f"{path}: no column {field!r}, only {there}; name the one that holds the text with "
                                 "--field")
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for scalar in batch.column(0):
                    row += 1
                    value = scalar.as_py()
                    if value is None:
                        meter.nulls += 1
                        continue
                    if not isinstance(value, str):
                        raise InputError(f"{path}: row {row:,} holds {type(value).__name__} where text was expected "
                                         f"(column {field!r})")
                    yield meter.document(value, f"{path}: row {row:,}")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: row {row:,} holds text that is not UTF-8 (column {field!r}: {error})") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    meter.finished_bytes += os.path.getsize(path)


def read_file(path, kind, unit, field, meter):
    """Documents of one file of the given kind (see kind_of); unit is file, paragraph or line, for text."""
    if kind == "parquet":
        yield from read_parquet(path, field, meter)
    elif kind == "jsonl":
        with open_input(path, meter) as stream:
            yield from read_jsonl(stream, field, path, meter)
    else:
        with open_input(path, meter, "a name ending in .jsonl") as stream:
            yield from read_text(stream, unit, path, meter)


def kind_of(path):
    """text, jsonl or parquet by name; None for a name that folders are not searched for."""
    name = str(path).lower().removesuffix(".gz")
    if name.endswith(JSON_SUFFIXES):
        return "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    return "text" if name.endswith(TEXT_SUFFIXES) else None


def search_folder(top, meter):
    """Files below the folder `top` that kind_of knows; links to folders are followed, each folder is read once."""
    def refuse(error):
        raise InputError(f"{error.filename}: can't be read ({error.strerror})")

    def is_new(folder):
        real = os.path.realpath(folder)
        above = Path(os.path.realpath(top)).is_relative_to(real)        # a link upwards would lead out of `top`
        new = real not in visited and not above
        visited.add(real)
        return new

    paths, left_out, visited = [], collections.Counter(), set()
    for folder, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        folders[:] = [x for x in sorted(folders) if not x.startswith(".") and is_new(os.path.join(folder, x))]
        for file in files:
            path = os.path.join(folder, file)
            if file.startswith("."):
                continue
            if not os.path.isfile(path):
                left_out["no plain file"] += 1              # a pipe would wait for a writer
            elif kind_of(path) is None:
                left_out[Path(file).suffix or "without suffix"] += 1
            else:
                paths.append(path)
    what = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common())
    if not paths:
        raise InputError(f"{top}: no file with {' '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} .parquet (.gz) in it"
                         f"{', only ' + what if what else ''}")
    if what:
        meter.notes.append(f"{top}: {sum(left_out.values()):,} files left out: {what}")
    return paths


def find_inputs(names, meter):
    """[(path, kind)] of what the command line names, in sorted order per name, each file once. Raises InputError."""
    found, seen = [], set()
    for name in names:
        if os.path.isdir(name):
            paths = search_folder(name, meter)
        elif os.path.exists(name):
            paths = [name]
        else:
            paths = [x for x in glob.glob(name, recursive=True) if not os.path.isdir(x)]
            if not paths:
                raise InputError(f"{name}: no such file or folder, and no file matches it as a pattern")
        for path in sorted(paths):
            real, kind = os.path.realpath(path), kind_of(path)
            if real in seen:
                continue
            seen.add(real)
            if not os.path.isfile(path):
                raise InputError(f"{path}: a pipe or a device, not a file; pipe it in instead: ... | text.py -")
            if kind is None and path.lower().endswith(FOREIGN_SUFFIXES):
                raise InputError(f"{path}: this kind of file can't be read; expected text, .jsonl or .parquet (.gz)")
            if kind == "parquet" and path.lower().endswith(".gz"):
                raise InputError(f"{path}: a packed parquet file can't be read; unpack it first")
            found.append((path, kind or "text"))
    return found


def read_standard_input(unit, field, stdin, meter):
    """Documents of standard input, which holds "lines" or "jsonl". Raises InputError, also when it is closed."""
    name = "standard input"
    if sys.stdin is None:
        raise InputError("-: standard input is closed; pipe text into it")
    check_start(sys.stdin.buffer.peek(LOOK_BYTES), name, meter, "--stdin=jsonl" if stdin == "lines" else "")
    stream = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="replace", newline="\n")
    if stdin == "jsonl":
        return read_jsonl(stream, field, name, meter)
    return read_text(stream, "paragraph" if unit == "paragraph" else "line", name, meter)


def read_inputs(names, meter, unit="auto", field="text", stdin="lines", order_seed=None):
    """Documents of all inputs. Files are visited in sorted order, or shuffled by order_seed. Raises InputError."""
    if "-" in names:
        if len(names) > 1:
            raise InputError("-: standard input can't be mixed with files")
        return read_standard_input(unit, field, stdin, meter)
    found = find_inputs(names, meter)
    if unit == "auto":
        unit = "file"
        if len(found) == 1 and found[0][1] == "text":
            with open_input(found[0][0], Meter()) as stream:
                has_blank_line = re.search(r"\n[ \t\r]*\n", stream.read(1 << 20).strip()) is not None
            unit = "paragraph" if has_blank_line else "line"
            meter.notes.append(f"one text file, so each {unit} is a document (choose with --documents)")
    meter.total_bytes = sum(os.path.getsize(path) for path, _ in found)
    if order_seed is not None:
        random.Random(order_seed).shuffle(found)

    return (text for path, kind in found for text in read_file(path, kind, unit, field, meter))


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
        yield text
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
                yield "\n\n".join(found) + "\n"


PIECE_CHARS = 512       # of a training document of the builtin corpus


def builtin_pieces(fraction, seed):
    """(documents, how many of them are validation): whole documents for validation first, then short pieces.

    The corpus is small and its documents are long: a batch of a small model would see one document at a time. So those
    for training are cut at line ends into pieces of about PIECE_CHARS, which then stand in the order of their hashes.
    """
    whole_texts = sorted(builtin_documents(), key=lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest())
    wanted, held, num_val = fraction * sum(len(text.encode()) for text in whole_texts), 0, 0
    while held < wanted:
        held += len(whole_texts[num_val].encode()) + 1
        num_val += 1
    documents = whole_texts[:num_val]
    for text in whole_texts[num_val:]:
        piece = ""
        for line in text.splitlines(keepends=True):
            piece += line
            if len(piece) >= PIECE_CHARS:
                documents.append(piece)
                piece = ""
        if piece:
            documents.append(piece)
    return documents, num_val


# ----------------------------------------------------------------------------------------------------------------------
# the split: keys (uint64 hash of each document's content) and lengths (its tokens) -> (is_val, is_dropped), both bool


def split_by_hash(keys, lengths, fraction):
    """Validation gets the documents with the smallest hashes, about `fraction` of the tokens; nothing is dropped.

    Equal documents stay together. A group with more than twice the wanted tokens always goes to train, and
    does not count in what is wanted: one giant document must not send all others to validation. If all are so large,
    the smallest alone is validation. Raises InputError when train would be no larger than validation.
    """
    groups, group_of = np.unique(keys, return_inverse=True)
    tokens = np.bincount(group_of, weights=lengths).astype(np.int64)
    total = int(tokens.sum())
    small = np.flatnonzero(tokens <= 2 * fraction * total)
    wanted = fraction * int(tokens[small].sum())
    taken, held = [], 0
    for index in small:
        if held >= wanted:
            break
        if held + tokens[index] <= 2 * wanted:
            taken.append(index)
            held += int(tokens[index])
    if not taken:
        taken = [int(tokens.argmin())]
        held = int(tokens.min())
    if 2 * held >= total:
        raise InputError(f"{len(keys):,} documents ({len(groups):,} different ones) with {total:,} tokens, end "
                         "marks included: no room for a train split that is larger than the validation split; add "
                         "text, or cut it finer (--documents=paragraph or line)")
    is_val = np.isin(group_of, taken)
    return is_val, np.zeros_like(is_val)


def split_at(keys, num_val):
    """Validation gets the first num_val documents; exact copies of them that come later are dropped."""
    is_val = np.arange(len(keys)) < num_val
    return is_val, ~is_val & np.isin(keys, keys[is_val])


def split_first_tokens(keys, lengths, val_tokens, fraction):
    """Validation gets the first documents that fit into val_tokens; a corpus too small for that is split by hash."""
    num_val = int(np.searchsorted(np.cumsum(lengths), val_tokens, side="right"))
    if 0 < 2 * lengths[:num_val].sum() < lengths.sum():
        return split_at(keys, num_val)
    return split_by_hash(keys, lengths, fraction)


# ----------------------------------------------------------------------------------------------------------------------
# documents -> shards


def encode_all(documents, tokenizer, threads):
    """(text, its ids) of each document, in order. Threads suffice: tiktoken works outside the interpreter's lock."""
    with ThreadPoolExecutor(threads) as pool:
        batch, chars = [], 0
        for text in documents:
            batch.append(text)
            chars += len(text)
            if chars >= BATCH_CHARS or len(batch) >= BATCH_DOCUMENTS:
                yield from zip(batch, pool.map(tokenizer.encode, batch))
                batch, chars = [], 0
        yield from zip(batch, pool.map(tokenizer.encode, batch))


def progress_bar(meter):
    """A function of the tokens so far that redraws a tqdm bar of bytes; it does nothing without tqdm or a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda count: None
    bar = tqdm(total=meter.total_bytes or None, unit="B", unit_scale=True, mininterval=0.5, disable=None)

    def show(count):
        if not bar.disable:
            bar.set_postfix_str(f"{count:,} tokens", refresh=False)
            with contextlib.suppress(OSError):      # the terminal may have gone away
                bar.update(meter.done_bytes() - bar.n)
    return show


def builtin_files(out):
    """Names of an earlier builtin corpus in the folder `out` or what a kill left of one; else empty."""
    dataset = shards.read_dataset(out)
    how = dataset.get("how") if dataset else {"builtin": out.name == "builtin"}
    is_builtin = isinstance(how, dict) and how.get("builtin")
    return ["train_000000.bin", "val_000000.bin"] if is_builtin else []


def check_free(out, overwrite, own=()):
    """Names of the files in the folder `out` that a new data set replaces: `own`, and what its dataset.json lists.

    Raises InputError when there are any but `own` and `overwrite` is not set, and for shards that are neither.
    """
    there = sorted(x.name for x in out.glob("*.bin"))
    dataset = shards.read_dataset(out)
    listed = [shard["file"] for side in ("train", "val") for shard in dataset[side]["shards"]] if dataset else []
    if not overwrite and not own and (dataset or there):
        raise InputError(f"--out={out}: holds {(there + [shards.DATASET_FILE])[0]} already; choose another folder, or "
                         "--overwrite to replace the files that its dataset.json lists")
    strangers = [name for name in there if name not in (*listed, *own)]
    if strangers:
        raise InputError(f"--out={out}: {strangers[0]} is not listed in a dataset.json there, so it is not replaced; "
                         "choose another folder, or move it away")
    return [*listed, *own]


def prepare_folder(out, overwrite, own=()):
    """Make the output folder; clear temporary files of an earlier run. Returns the names that will be replaced."""
    replaced = check_free(out, overwrite, own)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={out}: can't be made ({error.strerror or error})") from error
    for temp in out.iterdir():
        if OWN_TEMP.fullmatch(temp.name):
            temp.unlink()
    return replaced


def spool_tokens(documents, tokenizer, path, seed, threads, meter):
    """Tokenize everything into the file `path`. Returns (keys, lengths, sha256 of the texts).

    keys: uint64 (documents,), a seeded hash of the content; lengths: int64 (documents,), tokens with the mark.
    """
    keys, lengths, digest, salt = array("Q"), array("q"), hashlib.sha256(), str(seed).encode()[:64]
    mark = np.array([tokenizer.eod_id], dtype="<u2").tobytes()
    show, num_tokens = progress_bar(meter), 0
    with open(path, "wb") as spool:
        for text, ids in encode_all(documents, tokenizer, threads):
            data = text.encode()
            digest.update(b"\0" + data)
            keys.append(int.from_bytes(hashlib.blake2b(data, digest_size=8, key=salt).digest(), "big"))
            lengths.append(1 + len(ids))
            spool.write(mark + ids.tobytes())
            num_tokens += 1 + len(ids)
            show(num_tokens)
    return np.array(keys, dtype=np.uint64), np.array(lengths, dtype=np.int64), digest.hexdigest()


def write_sides(tokens, keys, lengths, is_val, is_dropped, hash_order, writers):
    """Append the documents of `tokens` (all, one after another) to writers["train"] and ["val"], in their new order."""
    starts = np.cumsum(lengths) - lengths
    order = np.arange(len(keys))
    if hash_order:
        order = np.lexsort((keys, starts // BLOCK_TOKENS))      # by block, then by hash: reading stays local
    for index in order:
        if not is_dropped[index]:
            writer = writers["val" if is_val[index] else "train"]
            writer.append(tokens[starts[index]:starts[index] + lengths[index]])
    for writer in writers.values():
        writer.finish()


def build(documents, tokenizer, out, *, split, train_name, val_name, shard_tokens, seed, hash_order, threads, meter,
          how, replaced=()):
    """Tokenize `documents` (iterable of strings) into shards and dataset.json in the folder `out`.

    split(keys, lengths) says where each goes (see above); `replaced` names the files of an old data set to remove.
    Returns (dataset, number of dropped documents). On any failure nothing is left behind. Raises InputError,
    ShardError, OSError.
    """
    writers = {"train": shards.ShardWriter(out, train_name, shard_tokens),
               "val": shards.ShardWriter(out, val_name, shard_tokens)}
    spool = out / SPOOL
    try:
        keys, lengths, text_sha256 = spool_tokens(documents, tokenizer, spool, seed, threads, meter)
        if not len(keys):
            raise InputError("no document found: nothing to write")
        is_val, is_dropped = split(keys, lengths)
        write_sides(np.memmap(spool, "<u2", "r"), keys, lengths, is_val, is_dropped, hash_order, writers)
        for name in [shards.DATASET_FILE, *replaced]:
            (out / name).unlink(missing_ok=True)
        for writer in writers.values():
            writer.commit()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    finally:
        spool.unlink(missing_ok=True)
    dataset = {"format": shards.DATASET_FORMAT, "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
               "eod_id": tokenizer.eod_id}
    for side, is_there in (("train", ~is_val & ~is_dropped), ("val", is_val)):
        writer = writers[side]
        dataset[side] = {"documents": int(is_there.sum()), "tokens": writer.tokens, "shards": writer.shards}
    dataset["text_sha256"] = text_sha256
    dataset["how"] = how
    shards.write_dataset(out, dataset)
    longest = int(lengths.max())
    if 2 * longest > lengths.sum():
        meter.notes.append(f"one document holds {longest:,} of the {lengths.sum():,} tokens; --documents=paragraph or "
                           "line cuts text finer")
    return dataset, int(is_dropped.sum())


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


def summary(dataset, out, shard_tokens, meter, num_dropped, seconds):
    """The last line: documents, tokens, shards, what the last shard holds, what was left out."""
    train, val = dataset["train"], dataset["val"]
    last = train["shards"][-1]
    documents, tokens = (train[what] + val[what] for what in ("documents", "tokens"))
    line = (f"{out}: {documents:,} documents ({val['documents']:,} validation), {tokens:,} tokens ({val['tokens']:,} "
            f"validation), {len(train['shards'])} + {len(val['shards'])} shards; the last, {last['file']}, holds "
            f"{last['tokens']:,} of {shard_tokens:,} tokens; text sha256 {dataset['text_sha256'][:16]}; "
            f"{seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if num_dropped:
        line += f"; {num_dropped:,} documents dropped, exact copies of validation documents"
    if meter.nulls:
        line += f"; {meter.nulls:,} rows left out, they hold null"
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
    parser.add_argument("--out", type=Path, default=out, help=f"folder for the shards (default {out})")
    parser.add_argument("--field", default="text", help="JSON field or parquet column that holds the text (text)")
    parser.add_argument("--shard-tokens", type=whole(1, shards.MAX_SHARD_TOKENS), default=DEFAULT_SHARD_TOKENS,
                        help="tokens per shard (100,000,000)")
    parser.add_argument("--threads", type=whole(1, 1024), default=cores(), help="encoding threads (all cores)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the files that the dataset.json in the folder lists")


def build_and_tell(documents, args, out, meter, *, how, own=(), **options):
    """build() with the common arguments of the command line, its notes, the last line; returns the exit code 0."""
    start = time.monotonic()

    def say_notes():
        for note in meter.notes:
            shards.tell(f"note: {note}", sys.stderr)
        meter.notes.clear()

    tokenizer = load_tokenizer(args.tokenizer)
    replaced = prepare_folder(out, args.overwrite, own)
    if meter.total_bytes > MANY_BYTES:          # else they come at the end, so that a refusal is one line
        say_notes()
        shards.tell(f"reading {meter.total_bytes / 1e6:,.0f} MB with {args.threads} threads", sys.stderr)
    how |= versions("numpy", *tokenizer.packages)
    dataset, num_dropped = build(documents, tokenizer, out, shard_tokens=args.shard_tokens, threads=args.threads,
                                 meter=meter, how=how, replaced=replaced, **options)
    num_val = dataset["val"]["tokens"]
    if num_val < FEW_VAL_TOKENS:
        meter.notes.append(f"validation holds only {num_val:,} tokens, so its loss will say little; add text, or raise "
                           "--val-fraction")
    say_notes()
    shards.tell(summary(dataset, out, args.shard_tokens, meter, num_dropped, time.monotonic() - start))
    return 0


def run_main(main, argv):
    """Run main(argv) as a command: errors become one line and an exit code, Ctrl-C is quiet, stop signals clean up."""
    shards.open_console()

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:       # as nohup asks
            signal.signal(number, stop)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)         # encoders wait for the lock after each document: 5 ms would cost a fifth
    try:
        return main(argv)
    except InputError as error:
        shards.tell(f"error: {error}", sys.stderr)
        return 2
    except (shards.ShardError, OSError) as error:
        shards.tell(f"error: {error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        shards.tell("stopped; nothing was left half-written", sys.stderr)
        return 130
    finally:
        sys.setswitchinterval(switch_interval)
        for number, handler in before.items():
            signal.signal(number, handler)


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
    meter, own = Meter(), ()
    if args.builtin:
        documents, num_val = builtin_pieces(args.val_fraction, args.seed)
        own = builtin_files(out)        # they can be made again at any time
        what = "whole documents"

        def split(keys, lengths):
            return split_at(keys, num_val)
    else:
        order_seed = None if args.no_shuffle else args.seed
        documents = read_inputs(args.inputs, meter, args.documents, args.field, args.stdin, order_seed)
        what = "content"

        def split(keys, lengths):
            return split_by_hash(keys, lengths, args.val_fraction)
    how = {"argv": argv, "builtin": args.builtin, "seed": args.seed,
           "split": f"by hash of {what}, fraction {args.val_fraction}"}
    return build_and_tell(documents, args, out, meter, how=how, own=own, split=split, seed=args.seed,
                          train_name="train_{:06d}.bin".format, val_name="val_{:06d}.bin".format,
                          hash_order=not args.no_shuffle)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
