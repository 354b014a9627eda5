"""Check token shards: header, size, ids, checksum, and that no validation document lies in train.

    python data/verify.py data/fineweb10B                       # a folder: every .bin in it
    python data/verify.py "data/mine/*.bin" other/val_000000.bin

Prints a table and exits 1 when anything is wrong (2 when nothing matches). Checksums are compared with
dataset.json or with <file>.json, which the downloader keeps; a file that neither knows shows "-". The
vocabulary is that of dataset.json, else GPT-2's (50,257 ids, end of document 50256). Files with "val" in
their name are validation, all others train.

Overlap: the first 64 tokens of each validation document (256 for bytes) are looked up in train. A document
that then equals the train document to its end, or to where a file cuts either of them off, is a copy: a
fault. One that only begins alike is counted and printed. Sets from the hub may hold up to 1% of copies (the
web repeats itself); text.py makes sets without any. --no-overlap leaves this part out.
"""
import argparse
import glob
import hashlib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing: pip install -r requirements.txt")

import hub
import shards

GPT2_VOCAB_SIZE, GPT2_EOD = 50257, 50256
OPENING_TOKENS = 64
# share of validation documents that may be in train, in a set that came from the hub
HUB_COPIES = 0.01
CHUNK_TOKENS = 1 << 20
MAX_DOCUMENT_TOKENS = 1_000_000     # fewer marks than one in so many tokens: the wrong mark is looked for


@dataclass
class Report:
    """What is known about one file. faults holds readable lines; empty = fine."""
    path: Path
    tokens: int | None = None
    documents: int | None = None
    out_of_range: int | None = None
    checksum: str = "-"
    faults: list = field(default_factory=list)
    vocab_size: int = GPT2_VOCAB_SIZE
    eod_id: int = GPT2_EOD
    opening: int = OPENING_TOKENS
    from_hub: bool = False
    starts: np.ndarray | None = None        # index of every end-of-document token (tokens,)


def find_files(patterns):
    """Sorted paths of all patterns, folders and files. Raises ShardError for one that matches nothing."""
    found = {}
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths = glob.glob(os.path.join(glob.escape(pattern), "*.bin"))
        else:
            paths = [x for x in glob.glob(pattern) if os.path.isfile(x)]
            if os.path.exists(pattern):
                paths = [pattern]
        if not paths:
            raise shards.ShardError(f"{pattern}: no shard matches; get some with data/cached_fineweb10B.py, "
                                    "or make some with data/text.py")
        for path in paths:
            # not by the file: validation may be a link to train
            found.setdefault(os.path.abspath(path), Path(path))
    return sorted(found.values())


def check_ids(report, tokens):
    """Count documents and ids that the vocabulary doesn't have."""
    starts, bad, first = [], 0, None
    for low in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[low:low + CHUNK_TOKENS])
        starts.append(np.flatnonzero(chunk == report.eod_id) + low)
        if report.vocab_size < shards.MAX_VOCAB_SIZE and chunk.max() >= report.vocab_size:
            where = np.flatnonzero(chunk >= report.vocab_size)
            if first is None:
                first = (low + int(where[0]), int(chunk[where[0]]))
            bad += len(where)
    report.starts = np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)
    report.documents, report.out_of_range = len(report.starts), bad
    if bad:
        report.faults.append(f"{report.path}: {bad:,} ids out of range, first at position {first[0]}: id "
                             f"{first[1]}; the vocabulary has {report.vocab_size:,} ids "
                             f"(0..{report.vocab_size - 1}); wrong tokenizer, or damaged: make or download "
                             "it again")


def check_sum(report, dataset, size):
    """Compare with dataset.json or <file>.json."""
    name, stored = report.path.name, hub.recall(report.path)
    expected = source = None
    if dataset:
        known = {shard["file"]: shard for side in ("train", "val") for shard in dataset[side]["shards"]}
        if name in known:
            expected, source = known[name], shards.DATASET_FILE
        else:
            report.faults.append(f"{report.path}: {shards.DATASET_FILE} beside it doesn't name this file; a "
                                 "shard of another data set? move it elsewhere")
            report.checksum = "unknown"
            return
    elif stored:
        report.from_hub = True
        expected, source = stored, name + ".json"
        if stored["size"] != size:
            report.faults.append(f"{report.path}: {size:,} bytes, {source} says {stored['size']:,}: "
                                 f"{shards.AGAIN}")
            report.checksum = "wrong"
            return
    if not expected or not expected.get("sha256"):
        return
    found = shards.sha256_file(report.path)
    report.checksum = "ok" if found == expected["sha256"] else "wrong"
    if report.checksum == "wrong":
        report.faults.append(f"{report.path}: sha256 is {found[:16]}.., {source} says "
                             f"{expected['sha256'][:16]}..: {shards.AGAIN}")


def check_file(path, dataset):
    """Report on one file. dataset is the folder's dataset.json (dict), None, or the ShardError it raised."""
    report = Report(path)
    if isinstance(dataset, shards.ShardError):
        report.faults.append(str(dataset))
        dataset = None
    if dataset:
        report.vocab_size, report.eod_id = dataset["vocab_size"], dataset["eod_id"]
        report.opening *= 4 if dataset["tokenizer"] == "bytes" else 1
    try:
        tokens = shards.read_tokens(path)
        report.tokens = len(tokens)
        with ThreadPoolExecutor(1) as pool:             # hashing and scanning, side by side
            summing = pool.submit(check_sum, report, dataset, path.stat().st_size)
            check_ids(report, tokens)
            summing.result()
        if not len(tokens):
            report.faults.append(f"{path}: holds no tokens, and the trainer refuses such a shard: "
                                 f"{shards.AGAIN}")
        too_few = report.documents < len(tokens) / MAX_DOCUMENT_TOKENS
        if too_few and report.checksum != "ok":         # else it may lie inside one long document
            remedy = "make the shard with that token before each document"
            if not dataset:
                remedy = f"was {shards.DATASET_FILE} left behind, which names another? else {remedy}"
            report.faults.append(f"{path}: {report.documents:,} end-of-document tokens ({report.eod_id}) in "
                                 f"{report.tokens:,} tokens: {remedy}")
        if dataset:
            for side in ("train", "val"):
                for shard in dataset[side]["shards"]:
                    if shard["file"] == path.name and shard["tokens"] != report.tokens:
                        report.faults.append(f"{path}: {report.tokens:,} tokens, {shards.DATASET_FILE} says "
                                             f"{shard['tokens']:,}; make the data set again")
    except (shards.ShardError, OSError) as error:
        report.faults.append(str(error))
    return report


# ------------------------------------------------------------------------------------------------------------
# overlap


def openings(tokens, starts, length):
    """(hash, starts) of the first `length` tokens after each document's mark; shorter documents whole, empty
    ones not.

    hash: uint64 (documents,), a polynomial over the ids and the number of tokens, computed for all documents
    at once.
    """
    ends = np.append(starts[1:], len(tokens))
    keep = ends - starts > 1
    starts, ends = starts[keep], ends[keep]
    sizes = np.minimum(ends - starts - 1, length)
    value = sizes.astype(np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(length):
            at = np.minimum(starts + 1 + offset, len(tokens) - 1)
            step = np.where(offset < sizes, tokens[at].astype(np.uint64) + np.uint64(1), np.uint64(0))
            value = (value ^ step) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
    return value, starts


def document_at(tokens, starts, start):
    """(tokens of the document whose mark lies at `start`, whether the file cuts it off)."""
    index = int(np.searchsorted(starts, start))
    last = index + 1 == len(starts)
    end = len(tokens) if last else int(starts[index + 1])
    return tokens[start + 1:end], last


def same_document(one, other):
    """True when two (tokens, cut) are equal, as far as they go if a file cuts one of them off."""
    (a, a_cut), (b, b_cut) = one, other
    size = min(len(a), len(b))
    if len(a) != len(b) and not (a_cut if len(a) < len(b) else b_cut):
        return False
    return np.array_equal(a[:size], b[:size])


def content_hash(tokens):
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def find_overlap(val, train):
    """(validation documents, copies in train, others that begin alike, example line) over two lists of
    Report.
    """
    val_tokens = [np.asarray(shards.read_tokens(report.path)) for report in val]
    hashes, places = [], []
    for number, report in enumerate(val):
        value, starts = openings(val_tokens[number], report.starts, report.opening)
        hashes.append(value)
        places.append(np.stack((np.full(len(starts), number), starts), axis=1))
    hashes, places = np.concatenate(hashes), np.concatenate(places)
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    copies, is_alike, example = set(), np.zeros(len(hashes), dtype=bool), None
    groups = {}         # opening hash: (content hash: places; places that a file cuts off; all places)

    def val_document(place):
        number, start = places[place]
        return document_at(val_tokens[number], val[number].starts, start)

    def group_of(value):
        if value not in groups:
            low, high = (int(np.searchsorted(hashes, value, side)) for side in ("left", "right"))
            same, cut = {}, []
            for place in range(low, high):
                document, is_cut = val_document(place)
                same.setdefault(content_hash(document), []).append(place)
                if is_cut:
                    cut.append(place)
            groups[value] = same, cut, range(low, high)
        return groups[value]

    for report in train:
        tokens = np.asarray(shards.read_tokens(report.path))
        value, starts = openings(tokens, report.starts, report.opening)
        is_alike |= np.isin(hashes, value)
        for hit in np.flatnonzero(np.isin(value, hashes)):
            same, cut, members = group_of(value[hit])
            document, is_cut = document_at(tokens, report.starts, starts[hit])
            found = same.pop(content_hash(document), [])
            # token by token only where a file cuts one of the two off
            found += [place for place in (members if is_cut else cut)
                      if place not in copies and same_document(val_document(place), (document, is_cut))]
            copies.update(found)
            if found and not example:
                number, start = places[found[0]]
                example = (f"the document at position {start:,} of {val[number].path} is the one at "
                           f"{int(starts[hit]):,} of {report.path}")
    return len(hashes), len(copies), int(is_alike.sum()) - len(copies), example


def is_validation(path):
    return re.search(r"(^|[^a-z])val", path.name.lower()) is not None


def check_overlap(reports):
    """Faults and notes (two lists of lines) about documents that lie in both splits."""
    groups, faults, notes = {}, [], []
    for report in reports:
        if report.starts is not None:       # files with different tokenizers can't be compared
            groups.setdefault((report.vocab_size, report.eod_id, report.opening), []).append(report)
    for (_, _, opening), group in groups.items():
        val = [x for x in group if is_validation(x.path)]
        train = [x for x in group if not is_validation(x.path)]
        if not val or not train:
            notes.append("overlap: not looked for, it takes a train and a validation file")
            continue
        documents, copies, alike, example = find_overlap(val, train)
        line = (f"overlap: {copies:,} of {documents:,} validation documents are in train, {alike:,} more "
                f"begin with the same {opening} tokens")
        allowed = HUB_COPIES * documents if all(x.from_hub for x in group) else 0
        if copies > allowed:
            faults.append(f"{line}; {example}: make train and validation disjoint (data/text.py does)")
        else:
            notes.append(line)
    return faults, notes


# ------------------------------------------------------------------------------------------------------------
# command line


def table(reports):
    """The lines of the table."""
    def number(value):
        return "-" if value is None else f"{value:,}"

    rows = [("file", "tokens", "documents", "out of range", "checksum", "verdict")]
    for x in reports:
        rows.append((str(x.path), number(x.tokens), number(x.documents), number(x.out_of_range), x.checksum,
                     "FAULT" if x.faults else "ok"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        counts = [cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)]
        yield "  ".join((row[0].ljust(widths[0]), *counts, row[4].ljust(widths[4]), row[5])).rstrip()


def main(argv):
    parser = argparse.ArgumentParser(prog="verify.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="+", metavar="PATTERN", help="shards, patterns, or folders of "
                                                                       "shards")
    parser.add_argument("--no-overlap", action="store_true", help="don't look for copies in train")
    args = parser.parse_args(argv)
    shards.open_console()
    try:
        paths = find_files(args.patterns)
    except shards.ShardError as error:
        shards.tell(f"error: {error}", sys.stderr)
        return 2
    datasets = {}
    for folder in {path.parent for path in paths}:
        try:
            datasets[folder] = shards.read_dataset(folder)
        except shards.ShardError as error:
            datasets[folder] = error
    reports = [check_file(path, datasets[path.parent]) for path in paths]
    faults, notes = ([], []) if args.no_overlap else check_overlap(reports)
    for folder, dataset in datasets.items():
        if isinstance(dataset, dict) and folder in map(Path, args.patterns):
            for side in ("train", "val"):
                missing = [x["file"] for x in dataset[side]["shards"] if not (folder / x["file"]).exists()]
                faults += [f"{folder / name}: named by {shards.DATASET_FILE}, but not there; make the data "
                           "set again" for name in missing]
    for line in table(reports):
        shards.tell(line)
    for line in notes:
        shards.tell(line)
    faults = list(dict.fromkeys([line for report in reports for line in report.faults] + faults))
    for line in faults:
        shards.tell(f"fault: {line}", sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
