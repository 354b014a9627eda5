"""Small runs of the trainer that finish in a second or two: byte shards, their options, and whole runs in any place."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rank_helpers import ROOT, load_train_gpt, train_gpt_path
from shard_helpers import raw_shard

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))       # the tools in records/ are imported as records.NAME


def byte_tokens(count, seed):
    """count tokens: documents of 20 to 400 lower-case letters with a rhythm to learn, each after a 256."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < count:
        word = [rng.randrange(97, 123) for _ in range(rng.randrange(3, 9))] + [32]
        length = rng.randrange(20, 400)
        tokens += [256] + [letter if rng.random() < 0.9 else rng.randrange(97, 123)
                           for letter in (word * (length // len(word) + 1))[:length]]
    return tokens[:count]


def byte_run(folder, *more, num_steps=6):
    """Make shards in folder; -> options of a run of num_steps steps of up to 8 rows of 64 bytes on them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train_1", 9000, 1), ("train_2", 9000, 2), ("val_1", 700, 3)):
        if not (folder / f"{name}.bin").exists():
            (folder / f"{name}.bin").write_bytes(raw_shard(np.array(byte_tokens(count, seed))))
    return ["--preset=tiny", f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin",
            "--vocab_size=257", "--eod_id=256", f"--num_steps={num_steps}", "--batch_tokens=512", "--row_tokens=64",
            "--micro_rows=2", "--val_tokens=0", "--val_overlap=16", "--model_dim=32", "--num_heads=2",
            "--head_dim=16", "--qk_dim=16", "--mlp_dim=64", "--max_epochs=100", "--deterministic=on",
            "--log_every_steps=1",
            f"--log_dir={folder}/logs", f"--checkpoint_dir={folder}/checkpoints", *more]


def changed(argv, *more):
    """argv with the options in more in place of those of the same name."""
    names = {word.split("=")[0] for word in more}
    return [word for word in argv if word.split("=")[0] not in names] + list(more)


def run_here(rank, size, argv):
    """Train in this process, as one of the launcher's ranks when size > 1. -> (result, weights by name, lines said)."""
    import contextlib
    import io

    import torch
    tg = load_train_gpt()
    config, overrides = tg.parse_config(argv)
    torch.use_deterministic_algorithms(config.deterministic == "on")
    world = tg.init_world() if size > 1 else tg.World()
    tg.join_group(world)
    kept, build, said = [], tg.build, io.StringIO()
    tg.build = lambda *args: kept.append(build(*args)) or kept[0]
    log = tg.RunLog(config.log_dir, world)
    try:
        with contextlib.redirect_stdout(said):
            result = tg.train(config, world, log, overrides, argv)
    finally:
        tg.build = build
        log.close()
        tg.close_world()
    weights = {name: p.detach().float().numpy().copy() for name, p in kept[0].model.named_parameters()}
    return result, weights, said.getvalue().splitlines()


def losses_of(lines):
    """{(step, kind): loss as printed} of the step lines."""
    found = {}
    for line in lines:
        if line.startswith("step:"):
            place, loss = line.split()[:2]
            found[place, loss.split(":")[0]] = loss.split(":")[1]
    return found


def checkpoints_in(folder):
    """Whole checkpoints under folder, oldest first."""
    found = Path(folder).glob("checkpoints/*/step_*/checkpoint.json")
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def facts_of(checkpoint):
    return json.loads((Path(checkpoint) / "checkpoint.json").read_bytes().partition(b"\n")[2])


def start(argv, torchrun=(), **popen):
    """The trainer as a process of its own (or under torchrun with these options), output as text through a pipe."""
    launcher = [sys.executable, *(["-m", "torch.distributed.run", *torchrun] if torchrun else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*launcher, str(train_gpt_path()), *argv], stdout=subprocess.PIPE, cwd=ROOT, text=True,
                            stderr=subprocess.STDOUT, env=environment, **popen)


def wait_for(process, text, timeout_s=60.0):
    """Read lines until one holds text; -> the lines. Raises AssertionError when the process ends first."""
    lines, end = [], time.monotonic() + timeout_s
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
        assert time.monotonic() < end, lines
    raise AssertionError(f"ended without {text!r}: {lines}")


def stop(process, number=signal.SIGTERM, timeout_s=60.0):
    """Send a signal; -> (exit code, rest of the output, seconds until it ended)."""
    began = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=timeout_s)
    return process.returncode, rest, time.monotonic() - began
