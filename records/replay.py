"""Cuts the source out of a log and runs it again, or only writes it.

    python records/replay.py LOG                          run it with the log's overrides, on as many ranks as then
    python records/replay.py LOG -- --seed=7 --key=value  further arguments, which win over the log's
    python records/replay.py LOG --nproc=1                another number of ranks
    python records/replay.py LOG --write attempts/it.py   only write the source

The source's sha256 must be the one in the header. To run, it is written to attempts/replay_<sha>.py
(git-ignored), and exactly that file is started, in the root of the repository. The exit status is the run's
own (2: nothing was run).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records.logs import Log, LogError, parse_log  # noqa: E402

NOT_REPLAYED = ("log_dir",)   # a replay's log belongs with new logs, not into the folder of the old one


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one for each GPU that a child process would see: those in
    CUDA_VISIBLE_DEVICES if it is set, else what nvidia-smi lists. Imports no torch and starts nothing on a
    device."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def launch_command(script, num_ranks: int, args: list[str]) -> list[str]:
    """The command line that runs `script` on `num_ranks` ranks of this machine."""
    if num_ranks == 1:
        return [sys.executable, str(script), *args]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}",
            str(script), *args]


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an interrupt, so that what is started here is stopped too."""
    def interrupt(number, frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupt)


def key_of(argument: str) -> str:
    """'--key=value' -> 'key'."""
    return argument.removeprefix("--").split("=", 1)[0]


def arguments_of(log: Log, further: list[str]) -> list[str]:
    """The command line arguments of the logged run: its preset, also where that was the default of the
    machine, and its overrides as they were typed where the header's argv has them; `further` arguments win
    over them."""
    words = map(str, log.header["argv"])
    typed = {key_of(word): word for word in words if word.startswith("--") and "=" in word}
    given = {"preset": f"--preset={log.config['preset']}"} if "preset" in log.config else {}
    given |= {key: typed.get(key, f"--{key}={value}") for key, value in log.header["overrides"].items()}
    new = {key_of(item) for item in further}
    return [item for key, item in given.items() if key not in new and key not in NOT_REPLAYED] + further


def write_source(log: Log, path: Path) -> None:
    """Write the log's source to `path`, byte for byte. Raises LogError when its sha is wrong or `path` holds
    something else."""
    if not log.sha_matches:
        raise LogError(f"{log.path.name}: the embedded source is not the one that its header names (sha256 "
                       f"{log.source_sha256[:12]}, header {str(log.header['source_sha256'])[:12]})")
    try:
        if path.exists() and path.read_bytes() != log.source:
            raise LogError(f"{path} is there and holds something else: not overwritten")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(log.source)
    except OSError as error:
        raise LogError(f"{path} can't be written ({error.strerror})") from None


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    own, further = argv[:cut], argv[cut + 1:]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", metavar="LOG")
    parser.add_argument("--write", metavar="FILE", type=Path, help="only write the source to FILE")
    parser.add_argument("--nproc", type=int,
                        help="number of ranks (default: the log's, if that many GPUs are here)")
    options = parser.parse_args(own)
    try:
        log = parse_log(options.log)
        if options.write:
            write_source(log, options.write)
            print(f"wrote {options.write} ({len(log.source):,} bytes, sha256 {log.source_sha256[:12]})")
            return 0
        script = ROOT / "attempts" / f"replay_{log.source_sha256[:12]}.py"
        write_source(log, script)
    except LogError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    wanted = options.nproc or log.header["world_size"]
    if not options.nproc and wanted > 1 and len(visible_gpus()) < wanted:
        print(f"replay: the log ran on {wanted} ranks, {len(visible_gpus())} GPUs are here: choose with --nproc=N",
              file=sys.stderr)
        return 2
    if log.resumed:
        print("replay: note: the logged run was resumed from a checkpoint; this one starts from the beginning",
              file=sys.stderr)
    command = launch_command(script, wanted, arguments_of(log, further))
    print("replay:", shlex.join(command), flush=True)
    child = subprocess.Popen(command, cwd=ROOT)
    try:
        code = child.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        return 130


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
