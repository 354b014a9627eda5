"""Runs n seeds of a script into one folder, one after another or one per GPU at a time, and sums them up.

    python records/seeds.py --n=6                                 seeds 1..6 of train_gpt.py, each on all GPUs
    python records/seeds.py --n=6 --nproc=1 attempts/my_idea.py --preset=sprint    (the sprint is for one GPU)
    python records/seeds.py --n=6 --gpus attempts/my_idea.py    one seed per GPU at a time (--gpus=0,2 names them)
    python records/seeds.py --n=6 --baseline=train_gpt.py attempts/my_idea.py
                                                                each seed of the baseline right after the idea's

Own options: --n, --first=1 (first seed), --out=FOLDER (default logs/seeds_<script>), --gpus, --nproc (ranks
per run), --baseline=SCRIPT (its logs go to FOLDER/baseline/). Every other --key=value goes to the script,
which is also given --seed and --log_dir.

A seed that already has a finished log of the same source and arguments in the folder is skipped, so a stopped
campaign goes on where it was. Logs of runs that did not finish move to FOLDER/unfinished/ and their seeds run
again. A campaign locks FOLDER/seeds.lock, so none other writes there meanwhile. With --gpus several runs start
at once, so a record claim, whose arms take turns, is made without it. The exit status is 0 only when every seed
of every arm has a finished log (130: interrupted).
"""

import argparse
import fcntl
import glob
import hashlib
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records import check  # noqa: E402
from records.logs import HARMLESS_OVERRIDES, Log, LogError, logs_in, parse_log  # noqa: E402
from records.replay import exit_on_sigterm, key_of, launch_command, visible_gpus  # noqa: E402

_LOG_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{8}\.txt")    # a run id, as the trainer names logs


class SeedsError(Exception):
    """One readable line about why the campaign can't start."""


@dataclass(frozen=True)
class Arm:
    """One script with its arguments, and the folder that its logs go to."""
    name: str
    script: Path
    args: tuple[str, ...]
    folder: Path

    def finished(self) -> dict[int, Log]:
        """{seed: log} of its finished runs."""
        return {log.seed: log for log in logs_in(self.folder)[0] if log.finished and not log.resumed}

    def prepare(self) -> None:
        """Move what did not finish out of the way. Raises SeedsError when the folder holds runs of something
        else."""
        sha256 = hashlib.sha256(self.script.read_bytes()).hexdigest()
        our_args, finished = telling(self.args), self.finished()
        for log in finished.values():
            their_args, what = telling(map(str, log.header["argv"])), ""
            if their_args != our_args:
                what = f"other arguments ({' '.join(sorted(their_args)) or 'none'})"
            elif log.source_sha256 != sha256:
                what = "another source"
            if what:
                raise SeedsError(f"{self.folder} holds a run of {what}, {log.path.name}: choose another --out")
        whole = {log.path for log in finished.values()}
        for path in sorted(self.folder.glob("*.txt")):
            if path not in whole and is_log(path):
                target = self.folder / "unfinished" / path.name
                target.parent.mkdir(exist_ok=True)
                while target.exists():
                    target = target.with_name(f"again_{target.name}")
                path.rename(target)
                print(f"seeds: {path.name} is no finished run: moved to {target.parent.name}/", flush=True)


def is_log(path: Path) -> bool:
    """Whether a run wrote this file: by its name, also when it broke off early, or by what it holds."""
    try:
        return bool(_LOG_NAME.fullmatch(path.name) or parse_log(path))
    except LogError:
        return False


@contextmanager
def locked(arms: list[Arm]):
    """Make the folders and keep other campaigns out of them in this block. Raises SeedsError when one runs
    there."""
    with ExitStack() as files:
        for arm in arms:
            try:
                arm.folder.mkdir(parents=True, exist_ok=True)
                file = files.enter_context(open(arm.folder / "seeds.lock", "w"))
            except OSError as error:
                raise SeedsError(f"{arm.folder} can't be written to ({error.strerror})") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SeedsError(f"another seeds.py runs into {arm.folder}: wait until it is over, or choose "
                                 "another --out") from None
            except OSError as error:     # a file system without locks
                print(f"seeds: note: {arm.folder} can't be locked ({error.strerror}): start no second campaign "
                      "there", flush=True)
        yield


def from_here(word: str) -> str:
    """Of --train_files and --val_files: relative patterns that match something in the caller's folder become
    absolute, for runs start in the root of the repository."""
    key, equals, patterns = word.partition("=")
    if key_of(word) not in ("train_files", "val_files") or Path.cwd() == ROOT:
        return word
    parts = [patterns] if os.path.exists(patterns) else patterns.split(",")
    return key + equals + ",".join(
        os.path.abspath(part.strip()) if os.path.exists(part.strip()) or glob.glob(part.strip()) else part
        for part in parts)


def telling(words) -> set[str]:
    """The --key=value words that change what a run computes."""
    return {word for word in words if word.startswith("--") and key_of(word) not in HARMLESS_OVERRIDES}


class Campaign:
    """Runs jobs on one or several slots (a slot is the environment of one run at a time) and remembers what
    failed."""

    def __init__(self, jobs: list[tuple[Arm, int]], slots: list[dict[str, str]], num_ranks: int):
        self.jobs, self.slots, self.num_ranks = queue.SimpleQueue(), slots, num_ranks
        self.failed: list[str] = []
        self.children: set[subprocess.Popen] = set()
        self.stopping = False
        self.lock = threading.Lock()   # no child starts once stopping is set
        for job in jobs:
            self.jobs.put(job)

    def run(self) -> None:
        """Run all jobs; on an interrupt stop the children, then raise again."""
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in self.slots]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        finally:
            with self.lock:
                self.stopping = True
                left = list(self.children)
            for child in left:
                child.terminate()
            for child in left:
                try:
                    child.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    child.kill()

    def _work(self, slot: dict[str, str]) -> None:
        while not self.stopping:
            try:
                arm, seed = self.jobs.get_nowait()
            except queue.Empty:
                return
            self._run_one(arm, seed, slot)

    def _run_one(self, arm: Arm, seed: int, slot: dict[str, str]) -> None:
        where = "".join(f" on GPU {name}" for name in slot.values())
        command = launch_command(arm.script, self.num_ranks,
                                 [*arm.args, f"--seed={seed}", f"--log_dir={arm.folder}"])
        # Several runs at once would mix their lines on the terminal: there each writes to a file of its own.
        output = arm.folder / f"output_seed_{seed}.tmp" if len(self.slots) > 1 else None
        started = time.monotonic()
        with open(output, "wb") if output else nullcontext() as sink:
            with self.lock:
                if self.stopping:
                    return
                print(f"seeds: {arm.name} seed {seed}{where}: {shlex.join(command)}", flush=True)
                child = subprocess.Popen(command, cwd=ROOT, env=os.environ | slot, stdout=sink,
                                         stderr=subprocess.STDOUT if output else None)
                self.children.add(child)
            code = child.wait()
            self.children.discard(child)
        if self.stopping:
            return
        log = arm.finished().get(seed)
        seconds = f"after {time.monotonic() - started:.0f} s"
        if code == 0 and log:
            if output:
                output.unlink()
            print(f"seeds: {arm.name} seed {seed}: val_loss {log.val_loss:.4f}, {log.train_time_s:.2f} s "
                  f"timed, done {seconds}", flush=True)
            return
        why = f"exit status {code}" if code else f"no finished log for this seed in {arm.folder}"
        if output:
            tail = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or [""]
            why += f", last line: {tail[0][:200]} (all in {output})"
        self.failed.append(f"{arm.name} seed {seed}: {why} {seconds}")
        print(f"seeds: {self.failed[-1]}", file=sys.stderr, flush=True)


def plan(argv: list[str]) -> tuple[list[Arm], list[int], list[dict[str, str]], int]:
    """Command line -> (arms, seeds, slots, ranks per run). Raises SeedsError."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, required=True, help="number of seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--out", type=Path, help="folder for the logs")
    parser.add_argument("--gpus", nargs="?", const="all",
                        help="one seed per GPU at a time; --gpus=0,2 names them")
    parser.add_argument("--nproc", type=int, help="ranks per run (default: all GPUs, or 1)")
    parser.add_argument("--baseline", type=Path, help="script of a second arm, run in turn with the first")
    # `--gpus SCRIPT` would swallow the script: without '=' the option stands alone.
    options, rest = parser.parse_known_args(["--gpus=all" if item == "--gpus" else item for item in argv])
    scripts = [item for item in rest if not item.startswith("--")]
    args = [from_here(item) for item in rest if item.startswith("--")]
    if len(scripts) > 1:
        raise SeedsError(f"one script at a time, not {' '.join(scripts)} (options are --key=value)")
    given = {key_of(item) for item in args}
    if given & {"seed", "log_dir"}:
        raise SeedsError("seeds are --n and --first, the folder is --out: no --seed or --log_dir")
    if options.n < 1:
        raise SeedsError(f"--n={options.n}: at least one seed")
    script = Path(scripts[0]).resolve() if scripts else ROOT / "train_gpt.py"
    baseline = options.baseline.expanduser().resolve() if options.baseline else None
    for path in filter(None, (script, baseline)):
        if not path.is_file():
            raise SeedsError(f"no script {path}")
    folder = (options.out or ROOT / "logs" / f"seeds_{script.stem}").expanduser().resolve()
    arms = [Arm(script.stem, script, tuple(args), folder)]
    if baseline:
        arms.append(Arm(f"baseline {baseline.stem}", baseline, tuple(args), folder / "baseline"))
    gpus = visible_gpus()
    if options.gpus:
        names = gpus if options.gpus == "all" else options.gpus.split(",")
        if not names:
            raise SeedsError("--gpus: no GPU is here")
        if options.nproc not in (None, 1):
            raise SeedsError("--gpus runs each seed on one GPU: no --nproc")
        slots, num_ranks = [{"CUDA_VISIBLE_DEVICES": name} for name in names], 1
    else:
        slots, num_ranks = [{}], options.nproc or max(1, len(gpus))
    return arms, list(range(options.first, options.first + options.n)), slots, num_ranks


def report(arms: list[Arm], seeds: list[int]) -> list[str]:
    """Print what the logs say, through the checker's own functions; return one line for each thing that is
    missing."""
    missing, found = [], {}
    for arm in arms:
        logs = arm.finished()
        missing += [f"{arm.name} seed {seed} has no finished log" for seed in seeds if seed not in logs]
        found[arm.name] = [logs[seed] for seed in sorted(logs)]
    for name, logs in found.items():
        if logs:
            lines = check.describe_arm(logs, name) + [f"  note: {note}" for note in check.arm_notes(logs)]
            problems = check.twice_refusals(logs) + check.mixed_refusals(logs, name)
            problems += check.same_refusals(logs, "between the runs")
            lines += [f"  problem: {line}" for line in problems]
            print("\n".join(lines))
    if len(arms) == 2 and all(found.values()):
        runs, baseline = ([log.train_time_s for log in logs] for logs in found.values())
        point, low, high = check.ratio(runs, baseline)
        print(f"ratio of mean times to the baseline: {point:.4f} {check.format_interval(low, high, 4)}")
    return missing


def main(argv=None) -> int:
    try:
        arms, seeds, slots, num_ranks = plan(sys.argv[1:] if argv is None else list(argv))
        with locked(arms):
            for arm in arms:
                arm.prepare()
            return run_all(arms, seeds, slots, num_ranks)
    except SeedsError as error:
        print(f"seeds: {error}", file=sys.stderr)
        return 2


def run_all(arms: list[Arm], seeds: list[int], slots: list[dict[str, str]], num_ranks: int) -> int:
    """Run what is missing and sum it up; -> the exit status."""
    if len(arms) == 2 and len(slots) > 1:
        print("seeds: note: with --gpus several runs start at once: the arms don't take turns, so these logs "
              "can't be a record claim", flush=True)
    done = {arm.name: arm.finished() for arm in arms}
    jobs = [(arm, seed) for seed in seeds for arm in arms if seed not in done[arm.name]]
    skipped = len(seeds) * len(arms) - len(jobs)
    already = f", {skipped} are there already" if skipped else ""
    print(f"seeds: {len(jobs)} runs into {arms[0].folder}{already}", flush=True)
    campaign = Campaign(jobs, slots, num_ranks)
    try:
        campaign.run()
    except KeyboardInterrupt:
        print("seeds: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    try:
        missing = report(arms, seeds)
    except check.NeedsScipy as error:
        print(f"seeds: all runs are over, but the summary {error}", file=sys.stderr)
        missing = [f"{arm.name} seed {seed} has no finished log" for arm in arms for seed in seeds
                   if seed not in arm.finished()]
    for line in missing:
        print(f"seeds: {line}", file=sys.stderr)
    return 1 if missing or campaign.failed else 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
