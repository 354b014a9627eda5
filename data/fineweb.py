"""Tokenize raw FineWeb (or any corpus of its form) into shards like those of FineWeb10B.

    # the 10-billion-token sample from the hub: 29 GB, hours
    python data/fineweb.py
    python data/fineweb.py --files=1                    # only its first file
    python data/fineweb.py dump/*.parquet more.jsonl    # files that are here: parquet, .jsonl(.gz), text

Documents keep their order. The first shard, fineweb_val_000000.bin, is validation (whole documents, so it may
end a little short of --shard-tokens); training shards follow from fineweb_train_000001.bin on. Exact copies
of validation documents are dropped from train and counted. A corpus of less than two such shards is split as
text.py does. Formats, tokenizers and guarantees are those of data/text.py, which does the work; parquet needs
pyarrow.

From the hub, each file is fetched to OUT/raw while the one before it is tokenized, checked against the hub's
sha256, and removed when it has been read (--keep-raw keeps them). A run that breaks off starts over with the
tokens, not with the files that lie there whole.
"""
import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub
import sources
import text

REPO = "HuggingFaceFW/fineweb"
PART = "sample/10BT"


def list_files(repo, part):
    """[(path, bytes)] of the data files below `part` of the hub's repository, sorted. Raises HubError."""
    if hub.is_offline():
        raise hub.HubError("HF_HUB_OFFLINE is set: name the files that are here as inputs")
    hub.connect(f"{repo}/{part}")
    api = hub.client().HfApi()
    tree = hub.retry(f"{repo}/{part}", lambda: list(api.list_repo_tree(repo, part, recursive=True,
                                                                        repo_type="dataset")))
    files = sorted((x.path, x.size) for x in tree if getattr(x, "size", None) is not None
                   and sources.kind_of(x.path) in ("parquet", "jsonl"))
    if not files:
        raise hub.HubError(f"{repo}/{part}: no .parquet or .jsonl file there; check --repo and --part")
    return files


def hub_documents(repo, files, folder, field, keep, meter):
    """Documents of the hub's `files` [(path, bytes)], fetched one ahead of the reading.

    Raises HubError, InputError.
    """
    def get(path):
        remote = hub.Remote(repo, path, path)
        if not hub.is_whole(folder / path, remote):
            hub.fetch(remote, hub.facts_of(remote), folder)
        return folder / path

    pool = ThreadPoolExecutor(1)
    with hub.partial_folder(folder):
        try:
            coming = pool.submit(get, files[0][0])
            for index in range(len(files)):
                path = coming.result()
                if index + 1 < len(files):
                    coming = pool.submit(get, files[index + 1][0])
                yield from sources.read_file(path, sources.kind_of(path), "file", field, meter)
                if not keep:
                    path.unlink()
                    hub.memory_of(path).unlink(missing_ok=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main(argv):
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(prog="fineweb.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help="files, folders, patterns; none: fetch from the hub")
    text.add_common_arguments(parser, here / "fineweb")
    parser.add_argument("--repo", default=REPO, help=f"dataset repository on the hub ({REPO})")
    parser.add_argument("--part", default=PART, help=f"folder of the repository ({PART})")
    parser.add_argument("--files", type=text.whole(1, 10**6), help="take only the first so many files of the "
                                                                   "hub")
    parser.add_argument("--keep-raw", action="store_true", help="keep what was fetched, in OUT/raw")
    args = parser.parse_args(argv)
    meter = sources.Meter()
    source = "disk"
    try:
        if args.inputs:
            documents = sources.read_inputs(args.inputs, meter, "file", args.field)
        else:
            text.check_free(args.out, args.overwrite)       # before anything is fetched
            files = list_files(args.repo, args.part)[:args.files]
            meter.total_bytes = sum(size for _, size in files)
            source = {"repo": args.repo, "files": [path for path, _ in files]}
            documents = hub_documents(args.repo, files, args.out / "raw", args.field, args.keep_raw, meter)

        def split(keys, lengths):
            return text.split_first_tokens(keys, lengths, args.shard_tokens, 0.03)

        how = {"argv": argv, "seed": 0, "split": "first shard, whole documents", "source": source}
        return text.build_and_tell(
            documents, args, args.out, meter, how=how, split=split, seed=0, hash_order=False,
            train_name=lambda index: f"fineweb_train_{index + 1:06d}.bin",
            val_name="fineweb_val_{:06d}.bin".format)
    except hub.HubError as error:
        hub.say(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(text.run_main(main, sys.argv[1:]))
