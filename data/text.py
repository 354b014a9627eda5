"""Make token shards from text: files, folders, globs, standard input, or the English that Python carries.

    # a demo corpus, nothing to download
    python data/text.py --builtin --tokenizer=bytes --out=data/builtin
    python data/text.py my_notes/ "more/**/*.jsonl.gz" --out=data/mine      # GPT-2 tokens
    zcat dump.gz | python data/text.py - --tokenizer=bytes --out=data/dump  # one document per line

What is one document:
    .txt .md (or any other name given)   the file; with --documents=paragraph or line, each of those.
                                         When one text file is all there is, its paragraphs (blank lines part
                                         them), or its lines if there is no blank line. Blank lines are never
                                         documents there.
    .jsonl .ndjson                       each line: a string, or an object whose --field ("text") is one
    .parquet                             each row: the column --field (needs pyarrow)
    - (standard input)                   each non-blank line of text, or of JSON with --stdin=jsonl
Names may end in .gz besides. Folders are searched for these suffixes, at any depth and through links; hidden
files are left out, other suffixes are left out and counted. Rows that hold null are left out and counted.
Text is UTF-8; a byte that is not becomes U+FFFD, and a file that is full of them is refused. Special tokens
written in a text are plain text.

Output: train_%06d.bin, val_%06d.bin and dataset.json (see data/README.md). The split goes by a hash of each
document's content, so equal documents never lie on both sides. All files get their names at the very end: a
run that fails leaves nothing. --overwrite replaces the files that the folder's dataset.json lists, and no
others. The result depends on the inputs and the seed alone, not on the machine or the number of threads. One
run at a time writes into a folder: another one is refused, or, with --builtin, waits and takes what is there.
"""
import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import signal
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing: pip install -r requirements.txt")

import shards
from sources import InputError, Meter, builtin_pieces, read_inputs

BATCH_CHARS = 1 << 22           # documents that are encoded side by side hold about so many characters
BATCH_DOCUMENTS = 4096
BLOCK_TOKENS = 1 << 22          # documents are put in hash order within blocks of this size
DEFAULT_SHARD_TOKENS = 100_000_000
MANY_BYTES = 50_000_000         # input that takes more than a few seconds
FEW_VAL_TOKENS = 1000           # a loss over fewer tokens is known to about 0.1 at best: worth a note
SPOOL = "tokens.bin" + shards.TEMP_SUFFIX
LOCK = "lock.bin" + shards.TEMP_SUFFIX          # in the folder while a run writes there
OWN_TEMP = re.compile(r"((fineweb_)?(train|val)_\d{6}|tokens)\.bin" + re.escape(shards.TEMP_SUFFIX))
TIKTOKEN_SECONDS = 60
TOO_MANY_IDS = ("cl100k_base", "o200k_base", "o200k_harmony")      # tiktoken's, 16 bits can't hold them


# ------------------------------------------------------------------------------------------------------------
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
    """The tokenizer `name`, "bytes" or a tiktoken encoding.

    Raises InputError, also when tiktoken's download hangs.
    """
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
        raise InputError(f"--tokenizer={name}: its vocabulary has more than {shards.MAX_VOCAB_SIZE:,} ids "
                         "and shards hold 16-bit ids; use gpt2, r50k_base, p50k_base or bytes")
    result = [f"no answer within {TIKTOKEN_SECONDS} s"]

    def load():
        try:
            result.append(tiktoken.get_encoding(name))
        except Exception as error:      # of requests, wrong hash, unwritable cache: one line below for all
            result.append(type(error).__name__)

    thread = threading.Thread(target=load, daemon=True)     # tiktoken's download has no time limit of its own
    thread.start()
    thread.join(TIKTOKEN_SECONDS)
    if isinstance(result[-1], str):
        raise InputError(f"--tokenizer={name}: tiktoken could not get its files ({result[-1]}); without a "
                         "network set TIKTOKEN_CACHE_DIR to a folder that holds them (data/README.md), or "
                         "use --tokenizer=bytes")
    return TiktokenTokenizer(result[-1])


# ------------------------------------------------------------------------------------------------------------
# the split: keys (uint64 hash of each document's content) and lengths (its tokens) -> (is_val, is_dropped),
# both bool


def split_by_hash(keys, lengths, fraction):
    """Validation gets the documents with the smallest hashes, about `fraction` of the tokens; nothing is
    dropped.

    Equal documents stay together. A group with more than twice the wanted tokens always goes to train, and
    does not count in what is wanted: one giant document must not send all others to validation. If all are so
    large, the smallest alone is validation. Raises InputError when train would be no larger than validation.
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
        raise InputError(f"{len(keys):,} documents ({len(groups):,} different ones) with {total:,} tokens, "
                         "end marks included: no room for a train split that is larger than the validation "
                         "split; add text, or cut it finer (--documents=paragraph or line)")
    is_val = np.isin(group_of, taken)
    return is_val, np.zeros_like(is_val)


def split_at(keys, num_val):
    """Validation gets the first num_val documents; exact copies of them that come later are dropped."""
    is_val = np.arange(len(keys)) < num_val
    return is_val, ~is_val & np.isin(keys, keys[is_val])


def split_first_tokens(keys, lengths, val_tokens, fraction):
    """Validation gets the first documents that fit into val_tokens; too small a corpus is split by hash."""
    num_val = int(np.searchsorted(np.cumsum(lengths), val_tokens, side="right"))
    if 0 < 2 * lengths[:num_val].sum() < lengths.sum():
        return split_at(keys, num_val)
    return split_by_hash(keys, lengths, fraction)


# ------------------------------------------------------------------------------------------------------------
# documents -> shards


def encode_all(documents, tokenizer, threads):
    """(text, its ids) of each document, in order.

    Threads suffice: tiktoken works outside the interpreter's lock.
    """
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
    """A function of the tokens so far that redraws a bar; it does nothing without tqdm or a terminal."""
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
    """Names of the files in the folder `out` that a new data set replaces: `own`, and what its dataset.json
    lists.

    Raises InputError when there are any but `own` and `overwrite` is not set, and for shards that are
    neither.
    """
    there = sorted(x.name for x in out.glob("*.bin"))
    dataset = shards.read_dataset(out)
    listed = []
    if dataset:
        listed = [shard["file"] for side in ("train", "val") for shard in dataset[side]["shards"]]
    if not overwrite and not own and (dataset or there):
        raise InputError(f"--out={out}: holds {(there + [shards.DATASET_FILE])[0]} already; choose another "
                         "folder, or --overwrite to replace the files that its dataset.json lists")
    strangers = [name for name in there if name not in (*listed, *own)]
    if strangers:
        raise InputError(f"--out={out}: {strangers[0]} is not listed in a dataset.json there, so it is not "
                         "replaced; choose another folder, or move it away")
    return [*listed, *own]


def take_lock(out, wait):
    """The lock file of the folder `out`, open and locked; while another run has it, waits or is refused."""
    while True:
        lock = open(out / LOCK, "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                lock.close()
                raise InputError(f"--out={out}: another run writes there; wait for it or take another "
                                 "--out") from error
            shards.tell(f"note: {out}: another run writes there; waiting for it", sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return lock                 # this file system has no locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(out / LOCK)):
                return lock
        lock.close()                    # the run that had it removed it: not the one that others will find


@contextlib.contextmanager
def locked_folder(out, wait=False):
    """Make the output folder, for one run at a time; clear temporary files of an earlier one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out, wait)
    except OSError as error:
        raise InputError(f"--out={out}: can't be made or written ({error.strerror or error})") from error
    with lock:
        try:
            for temp in out.iterdir():
                if OWN_TEMP.fullmatch(temp.name):
                    temp.unlink()
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


def is_made(out, how):
    """True when the folder `out` holds a whole data set that was made in just this way."""
    dataset = shards.read_dataset(out)
    if not dataset or dataset.get("how") != how:
        return False
    files = {out / x["file"]: x["sha256"] for side in ("train", "val") for x in dataset[side]["shards"]}
    return all(path.is_file() and shards.sha256_file(path) == sha256 for path, sha256 in files.items())


def spool_tokens(documents, tokenizer, path, seed, threads, meter):
    """Tokenize everything into the file `path`. Returns (keys, lengths, sha256 of the texts).

    keys: uint64 (documents,), a seeded hash of the content; lengths: int64 (documents,), with the mark.
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
    """Append the documents of `tokens` (all of them) to writers["train"] and ["val"], in their new order."""
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


def build(documents, tokenizer, out, *, split, train_name, val_name, shard_tokens, seed, hash_order, threads,
          meter, how, replaced=()):
    """Tokenize `documents` (iterable of strings) into shards and dataset.json in the folder `out`.

    split(keys, lengths) says where each goes (see above); `replaced` names the files of an old data set to
    remove. Returns (dataset, number of dropped documents). On any failure nothing is left behind. Raises
    InputError, ShardError, OSError.
    """
    writers = {"train": shards.ShardWriter(out, train_name, shard_tokens),
               "val": shards.ShardWriter(out, val_name, shard_tokens)}
    spool = out / SPOOL
    try:
        keys, lengths, text_sha256 = spool_tokens(documents, tokenizer, spool, seed, threads, meter)
        if not len(keys):
            raise InputError("no document found: nothing to write")
        is_val, is_dropped = split(keys, lengths)
        num_val, num_train = int(lengths[is_val].sum()), int(lengths[~is_val & ~is_dropped].sum())
        if num_train <= num_val:
            raise InputError(f"{num_train:,} training tokens would be left beside {num_val:,} of validation, "
                             f"{int(is_dropped.sum()):,} documents dropped as exact copies of validation "
                             "documents; add text, or make validation smaller (--help)")
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
    dataset = {"format": shards.DATASET_FORMAT, "tokenizer": tokenizer.name,
               "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id}
    for side, is_there in (("train", ~is_val & ~is_dropped), ("val", is_val)):
        writer = writers[side]
        dataset[side] = {"documents": int(is_there.sum()), "tokens": writer.tokens, "shards": writer.shards}
    dataset["text_sha256"] = text_sha256
    dataset["how"] = how
    shards.write_dataset(out, dataset)
    longest = int(lengths.max())
    if 2 * longest > lengths.sum():
        meter.notes.append(f"one document holds {longest:,} of the {lengths.sum():,} tokens; "
                           "--documents=paragraph or line cuts text finer")
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
    line = (f"{out}: {documents:,} documents ({val['documents']:,} validation), {tokens:,} tokens "
            f"({val['tokens']:,} validation), {len(train['shards'])} + {len(val['shards'])} shards; "
            f"the last, {last['file']}, holds "
            f"{last['tokens']:,} of {shard_tokens:,} tokens; text sha256 {dataset['text_sha256'][:16]}; "
            f"{seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if num_dropped:
        line += f"; {num_dropped:,} documents dropped, exact copies of validation documents"
    if meter.nulls:
        line += f"; {meter.nulls:,} rows left out, they hold null"
    if meter.replaced:
        line += f"; {meter.replaced:,} texts hold U+FFFD (not UTF-8), first {meter.replaced_first}"
    return line


# ------------------------------------------------------------------------------------------------------------
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
    parser.add_argument("--tokenizer", default="gpt2", help="bytes, or a tiktoken encoding for 16-bit ids "
                                                            "(gpt2)")
    parser.add_argument("--out", type=shards.folder_name, default=out,
                        help=f"folder for the shards (default {out})")
    parser.add_argument("--field", default="text", help="JSON field or parquet column that holds the text "
                                                        "(text)")
    parser.add_argument("--shard-tokens", type=whole(1, shards.MAX_SHARD_TOKENS),
                        default=DEFAULT_SHARD_TOKENS, help="tokens per shard (100,000,000)")
    parser.add_argument("--threads", type=whole(1, 1024), default=cores(), help="encoding threads (all "
                                                                                "cores)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the files that the dataset.json in the folder lists")


def build_and_tell(documents, args, out, meter, *, how, **options):
    """build() with the command line's common arguments, the notes and the last line. Returns 0."""
    start = time.monotonic()

    def say_notes():
        for note in meter.notes:
            shards.tell(f"note: {note}", sys.stderr)
        meter.notes.clear()

    tokenizer = load_tokenizer(args.tokenizer)
    how |= versions("numpy", *tokenizer.packages)
    is_builtin = how.get("builtin", False)
    with locked_folder(out, wait=is_builtin):
        # a builtin corpus can be made again at any time
        replaced = check_free(out, args.overwrite, builtin_files(out) if is_builtin else ())
        if is_builtin and not args.overwrite and is_made(out, how):
            shards.tell(f"{out}: is there already, whole (--overwrite makes it again)")
            return 0
        if meter.total_bytes > MANY_BYTES:      # else they come at the end, so that a refusal is one line
            say_notes()
            shards.tell(f"reading {meter.total_bytes / 1e6:,.0f} MB with {args.threads} threads", sys.stderr)
        dataset, num_dropped = build(documents, tokenizer, out, shard_tokens=args.shard_tokens,
                                     threads=args.threads, meter=meter, how=how, replaced=replaced, **options)
    num_val = dataset["val"]["tokens"]
    if num_val < FEW_VAL_TOKENS:
        meter.notes.append(f"validation holds only {num_val:,} tokens, so its loss will say little; add "
                           "text, or raise --val-fraction")
    say_notes()
    shards.tell(summary(dataset, out, args.shard_tokens, meter, num_dropped, time.monotonic() - start))
    return 0


def run_main(main, argv):
    """Run main(argv) as a command: errors become a line and an exit code, signals to stop clean up."""
    shards.open_console()

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:       # as nohup asks
            signal.signal(number, stop)
    switch_interval = sys.getswitchinterval()
    # encoders wait for the lock after each document: 5 ms would cost a fifth
    sys.setswitchinterval(1e-4)
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
    parser.add_argument("--stdin", choices=("lines", "jsonl"), default="lines", help="what standard input "
                                                                                     "holds")
    parser.add_argument("--val-fraction", type=open_fraction, default=0.03, help="share of validation (0.03)")
    parser.add_argument("--seed", type=whole(0, 2**63), default=0, help="decides split and order (0)")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the input's order")
    args = parser.parse_args(argv)
    if args.builtin == bool(args.inputs):
        raise InputError("name files, folders, patterns or - as inputs, or use --builtin alone (--help tells "
                         "more)")
    out = args.out or here / ("builtin" if args.builtin else "text")
    meter = Meter()
    if args.builtin:
        documents, num_val = builtin_pieces(args.val_fraction, args.seed)
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
    return build_and_tell(documents, args, out, meter, how=how, split=split, seed=args.seed,
                          train_name="train_{:06d}.bin".format, val_name="val_{:06d}.bin".format,
                          hash_order=not args.no_shuffle)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
