"""What run.sh asks of a Python: whether it will do, what the machine has, which shards a run needs. Prints
the answers.

    python data/survey.py why_not [FILE ...]           why this Python will not do; nothing if it will
    python data/survey.py machine SCRIPT [OPTION ...]  "GPUs cores shards", or why torch does not import
    python data/survey.py empty_venv PID               make .venv an empty folder that is marked as run.sh's

why_not runs on any Python, however old, so that it can say that it is too old.
"""
import os
import re
import sys


def why_not(*files):
    """Prints why this Python can't run the trainer: its version, torch's, or a package of the requirement
    `files`.

    It reads the packages' metadata only, as importing torch takes seconds.
    """
    if sys.version_info < (3, 11):
        print("is Python %d.%d, 3.11 or newer is needed" % tuple(sys.version_info[:2]))
        return
    from importlib import metadata

    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    lines = [line for file in files for line in open(file)]
    names = [re.match("[A-Za-z0-9_.-]*", line).group() for line in lines]
    missing = [name for name in names if name and name != "torch" and version(name) is None]
    torch = version("torch")
    if torch is None:
        print("has no torch")
    elif not (2, 11) <= tuple(map(int, re.findall("[0-9]+", torch)[:2])) <= (2, 14):
        print("has torch %s, 2.11 to 2.14 is needed" % torch)
    elif missing:
        print("lacks " + ", ".join(missing))


def cores():
    """Physical cores that this process may use, by its affinity and its control group."""
    count = os.cpu_count() or 1
    try:
        siblings = set()
        for cpu in os.sched_getaffinity(0):
            with open("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list" % cpu) as file:
                siblings.add(file.read())
        count = len(siblings)
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = max(1, min(count, int(quota) // int(period)))
    except (OSError, AttributeError, ValueError):
        pass                            # no Linux, or no control group: what is known so far
    return count


def shards_needed(script, options, default_preset):
    """How many shards of FineWeb10B the run of `script` needs; 0 if they are there, or if it reads other
    files.

    Also 0 when the script does not import or refuses its options: it will say so itself.
    """
    import glob
    import importlib.util
    import math
    with open(script, encoding="utf-8", errors="replace") as file:
        if "\ndef parse_config(" not in file.read():
            return 0                    # no trainer of ours, and importing it might run it
    spec = importlib.util.spec_from_file_location("train_gpt", script)
    try:
        sys.modules["train_gpt"] = trainer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(trainer)
        config, _ = trainer.parse_config(list(options), default_preset)
        fineweb = config.train_files.startswith("data/fineweb10B/fineweb_train_")
        if not fineweb or glob.glob(config.train_files):
            return 0
        rows = sum(trainer.rows_at(config, step) for step in range(config.num_steps))
        tokens = 1.3 * rows * config.row_tokens                     # the tails of long documents are dropped
        return min(103, math.ceil(tokens / 100e6))
    except (Exception, SystemExit):
        return 0


def machine(script, *options):
    """Prints the number of GPUs, of cores, and of shards that are needed and not there."""
    try:
        import torch
        gpus = torch.cuda.device_count()
    except Exception as error:
        print("%s: %s" % (type(error).__name__, " ".join(str(error).split())[:300]))
        return
    print(gpus, cores(), shards_needed(script, options, "record" if gpus else "demo"))


def empty_venv(installer):
    """Makes .venv empty but for the file that marks it as run.sh's and holds the process id of the installer.

    An interrupted pip can leave packages that look installed, so what was not completed is made anew.
    """
    import pathlib
    import shutil
    folder = pathlib.Path(".venv")
    folder.mkdir(exist_ok=True)
    (folder / "made-by-run.sh").write_text(installer)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != "made-by-run.sh":
            entry.unlink()


if __name__ == "__main__":
    {"why_not": why_not, "machine": machine, "empty_venv": empty_venv}[sys.argv[1]](*sys.argv[2:])
