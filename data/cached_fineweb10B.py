"""Download FineWeb10B, tokenized with GPT-2's tokenizer: the validation shard and N training shards.

    # N = 1..103 training shards of 100M tokens (200 MB) each, default 9
    python data/cached_fineweb10B.py [N]

Files go to data/fineweb10B/, each with a .json that keeps what the hub says about it. Run again to go on
after a break; whole files are not fetched again. Exit code 0 only if every file asked for is there and whole.
What the environment decides (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) is listed in data/hub.py.

The data set is kjj0/fineweb10B-gpt2 on the Hugging Face hub (by Keller Jordan, from HuggingFaceFW/fineweb).
"""
import argparse
import os
import signal
import sys
from pathlib import Path

import hub
import shards

REPO = "kjj0/fineweb10B-gpt2"
LAST_SHARD = 103


def remotes(count):
    """The validation shard and training shards 1..count."""
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{index:06d}.bin" for index in range(1, count + 1)]
    return [hub.Remote(REPO, name, name) for name in names]


def parse(argv):
    def count(text):
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= LAST_SHARD:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of shards from 1 to "
                                             f"{LAST_SHARD}")
        return int(text)

    def jobs(text):
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 32:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected 1 to 32")
        return int(text)

    parser = argparse.ArgumentParser(prog="cached_fineweb10B.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=count, default=9, metavar="N", help="training shards (9)")
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=shards.folder_name, default=here / "fineweb10B",
                        help="folder (data/fineweb10B)")
    parser.add_argument("--jobs", type=jobs, default=4, help="files at a time (4)")
    return parser.parse_args(argv)


def main(argv):
    args = parse(argv)
    wanted = remotes(args.count)
    missing = hub.fetch_all(wanted, args.out, args.jobs, check=shards.read_header)
    if missing:
        hub.say(f"error: {missing} of {len(wanted)} files are missing in {args.out}; run again to go on")
        return 1
    shards.tell(f"{args.out}: all {len(wanted)} files are there (validation + {args.count} training shards)")
    return 0


def run(argv):
    """main as a command: one line per error, quiet Ctrl-C."""
    def stop(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    shards.open_console()
    try:
        code = main(argv)
    except (hub.HubError, shards.ShardError, OSError) as error:
        hub.say(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        hub.say("stopped; run again to get what is missing")
        code = 130
    # threads may still wait for the network; what they had is on disk and is checked next time
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
