"""Documents out of text files, folders, standard input, or Python itself: what data/text.py reads.

Every source is an iterator of strings, one a document, in a fixed order. What is no readable text is refused
with an InputError that names the file and the line or row; what is left out is counted by the Meter, which
the caller shows.
"""
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
import random
import re
import sys
import sysconfig
import warnings
import zlib
from functools import partial
from pathlib import Path

MAX_DOCUMENT_CHARS = 1 << 28    # a document lies in memory as a whole: about 1 GB for the largest
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson")
FOREIGN_SUFFIXES = (".json", ".zip", ".tar", ".tgz", ".tar.gz", ".zst", ".xz", ".bz2", ".bin", ".pdf",
                    ".docx")
FOREIGN_STARTS = ((b"\x1f\x8b", "gzip data"), (b"BZh", "bzip2 data"), (b"\xfd7zXZ", "xz data"),
                  (b"PAR1", "parquet"), (b"\x28\xb5\x2f\xfd", "zstd data"), (b"PK\x03\x04", "a zip archive"),
                  (b"%PDF", "a PDF"))
LOOK_BYTES = 1 << 16            # the start of an input, by which it is judged to be text or not


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
            raise InputError(f"{name}: a document of more than {MAX_DOCUMENT_CHARS:,} characters: cut it "
                             "finer (--documents=paragraph or line)")
        if "\ufffd" in text:
            self.replaced += 1
            self.replaced_first = self.replaced_first or name
        return text


# ------------------------------------------------------------------------------------------------------------
# files and standard input


def check_start(head, name, meter, hint=""):
    """Refuse input whose first bytes `head` are no UTF-8 text; note what looks like a table or like JSON.

    hint: what to do if it is JSON lines; empty when JSON is expected. Raises InputError.
    """
    for start, kind in FOREIGN_STARTS:
        if head.startswith(start):
            raise InputError(f"{name}: {kind}, expected UTF-8 text; unpack or convert it first (gzip: a name "
                             "ending in .gz, or zcat)")
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InputError(f"{name}: UTF-16 text, expected UTF-8: convert it (iconv -f UTF-16 -t UTF-8)")
    if b"\0" in head:
        raise InputError(f"{name}: holds NUL bytes, so it is no UTF-8 text (a binary file, or UTF-16?)")
    text = head.decode("utf-8", "replace")
    damaged = text.count("\ufffd") - head.count("\ufffd".encode())
    # prose in Latin-1: 1 byte in 30 (French) to 70 (German)
    if damaged >= 3 and damaged > len(head) / 200:
        raise InputError(f"{name}: {damaged:,} of the first {len(head):,} bytes are not UTF-8; another "
                         "encoding? convert it (iconv -f LATIN1 -t UTF-8)")
    lines = text.splitlines()[:5]
    if hint and lines and re.fullmatch(r"\s*\{.*\}\s*", lines[0]):
        meter.notes.append(f"{name}: looks like JSON lines, taken as plain text; {hint} reads them")
    for mark in ",;\t":
        counts = {line.count(mark) for line in lines}
        if hint and len(lines) >= 3 and len(counts) == 1 and max(counts) >= (1 if mark == "\t" else 2):
            meter.notes.append(f"{name}: looks like a table (CSV), taken as plain text with all its columns")


@contextlib.contextmanager
def open_input(path, meter, hint=""):
    """The file as a text stream, unpacked when its name ends in .gz.

    Trouble while reading becomes an InputError.
    """
    try:
        with open(path, "rb") as raw:
            meter.raw = raw
            unpacked = gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw
            stream = io.BufferedReader(unpacked, LOOK_BYTES)
            check_start(stream.peek(LOOK_BYTES), path, meter, hint)
            yield io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="\n")
            meter.raw = None
            meter.finished_bytes += os.path.getsize(path)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: reading failed ({error}); is the file whole?") from error


def lines_of(stream, name):
    """(number, line without its end) of a text stream.

    Raises InputError for a line longer than a document may be.
    """
    for number, line in enumerate(iter(partial(stream.readline, MAX_DOCUMENT_CHARS + 1), ""), 1):
        if len(line) > MAX_DOCUMENT_CHARS:
            raise InputError(f"{name}: line {number:,} has more than {MAX_DOCUMENT_CHARS:,} characters")
        yield number, line.removesuffix("\n").removesuffix("\r")


def read_text(stream, unit, name, meter):
    """Documents of a text stream: the whole (unit "file"), its paragraphs or its lines.

    Blank lines only separate.
    """
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


def is_text(value, place, source, meter):
    """Whether a value of a record is text; a null is counted and left out. Raises InputError for others."""
    if value is None:
        meter.nulls += 1
        return False
    if not isinstance(value, str):
        raise InputError(f"{place} holds {type(value).__name__} where text was expected ({source})")
    return True


def read_jsonl(stream, field, name, meter):
    """Documents of JSON lines, one each; blank lines and nulls are left out."""
    for number, line in lines_of(stream, name):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        # also: numbers of thousands of digits, brackets without end
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: line {number:,} is not JSON ({error})") from error
        if isinstance(value, dict):
            if field not in value:
                raise InputError(f"{name}: line {number:,} has no field {field!r}, only "
                                 f"{', '.join(map(repr, value))}; name the one that holds the text with "
                                 "--field")
            value = value[field]
        if not is_text(value, f"{name}: line {number:,}", f"field {field!r}", meter):
            continue
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
                raise InputError(f"{path}: no column {field!r}, only {there}; name the one that holds the "
                                 "text with --field")
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for scalar in batch.column(0):
                    row += 1
                    value = scalar.as_py()
                    if is_text(value, f"{path}: row {row:,}", f"column {field!r}", meter):
                        yield meter.document(value, f"{path}: row {row:,}")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: row {row:,} holds text that is not UTF-8 (column {field!r}: "
                         f"{error})") from error
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
    """Files below the folder `top` that kind_of knows; links are followed, each folder is read once."""
    def refuse(error):
        raise InputError(f"{error.filename}: can't be read ({error.strerror})")

    def is_new(folder):
        real = os.path.realpath(folder)
        # a link upwards would lead out of `top`
        above = Path(os.path.realpath(top)).is_relative_to(real)
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
    """[(path, kind)] of what the command line names, in sorted order per name, each file once.

    Raises InputError.
    """
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
                raise InputError(f"{path}: a pipe or a device, not a file; pipe it in instead: ... | text.py "
                                 "-")
            if kind is None and path.lower().endswith(FOREIGN_SUFFIXES):
                raise InputError(f"{path}: this kind of file can't be read; expected text, .jsonl or "
                                 ".parquet (.gz)")
            if kind == "parquet" and path.lower().endswith(".gz"):
                raise InputError(f"{path}: a packed parquet file can't be read; unpack it first")
            found.append((path, kind or "text"))
    return found


def read_standard_input(unit, field, stdin, meter):
    """Documents of standard input, which holds "lines" or "jsonl".

    Raises InputError, also when it is closed.
    """
    name = "standard input"
    if sys.stdin is None:
        raise InputError("-: standard input is closed; pipe text into it")
    check_start(sys.stdin.buffer.peek(LOOK_BYTES), name, meter, "--stdin=jsonl" if stdin == "lines" else "")
    stream = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="replace", newline="\n")
    if stdin == "jsonl":
        return read_jsonl(stream, field, name, meter)
    return read_text(stream, "paragraph" if unit == "paragraph" else "line", name, meter)


def read_inputs(names, meter, unit="auto", field="text", stdin="lines", order_seed=None):
    """Documents of all inputs. Files are visited in sorted order, or shuffled by order_seed.

    Raises InputError.
    """
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


# ------------------------------------------------------------------------------------------------------------
# the English that Python carries

NO_PROSE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib",
            "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}


def _docstrings(node, name):
    """(qualified name, docstring) of a module, class or function and all that is defined in it, in order."""
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

    The corpus is small and its documents are long: a batch of a small model would see one document at a time.
    So those for training are cut at line ends into pieces of about PIECE_CHARS, which then stand in the order
    of their hashes.
    """
    def seeded_hash(text):
        return hashlib.sha256(f"{seed} {text}".encode()).digest()

    whole_texts = sorted(builtin_documents(), key=seeded_hash)
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
