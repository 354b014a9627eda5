"""Writes small synthetic logs in the trainer's format, for tests of the records tools and for trying the plots."""

import hashlib
import json
import math
import random
from pathlib import Path

FENCE = "=" * 100
RULE = "# " + "-" * 118
SOURCE = f'''"""A stand-in for the trainer."""
{RULE}
# 0. Door
import sys
{RULE}
# 1. Configuration
LEARNING_RATE = 0.02
{RULE}
# 3. Kernels
def kernel(x):
    return x + 1
'''
VAL_PRINT = "aaaabbbbccccdddd"


def header_for(seed=1, source=SOURCE, /, **changes) -> dict:
    """A header as the trainer writes it; `changes` replace whole keys, config_<key>= single configuration values."""
    config = dict(preset="sprint", target_loss=3.48, batch_tokens=524288, num_steps=40, val_tokens=2097152, seed=seed)
    config |= {key.removeprefix("config_"): changes.pop(key) for key in list(changes) if key.startswith("config_")}
    files = [dict(file="train_000001.bin", bytes=200001024, tokens=100000000, fingerprint="1111222233334444")]
    val_files = [dict(file="val_000000.bin", bytes=20001024, tokens=10000000, fingerprint=VAL_PRINT)]
    header = dict(
        format=1, run_id=f"run-{seed}", name="sprint", started=f"2026-12-01T10:{seed % 60:02d}:00", config=config,
        overrides={"seed": seed}, argv=[f"--seed={seed}"], source_sha256=hashlib.sha256(source.encode()).hexdigest(),
        seed=seed, versions=dict(python="3.12.3", torch="2.11.0", cuda="13.0", triton="3.6.0"),
        devices=["NVIDIA H100 80GB HBM3"], world_size=1,
        data=dict(train=dict(files=files, tokens=100000000), val=dict(files=val_files, tokens=10000000)),
        git=dict(commit="0123abc", dirty=False), resumed_from=None, parameters=dict(total=124000000, matmul=85000000))
    return header | changes


def loss_curve(step: float, num_steps: int, final: float) -> float:
    """A curve that starts at 10.8 and reaches `final` at num_steps, bent like a training run's."""
    share = step / num_steps
    return final + (10.8258 - final) * (math.exp(-9 * share) + 0.12 * (1 - share)) / 1.12 * (1 - share ** 6)


def log_text(seed=1, val_loss=3.475, step_ms=950.0, num_steps=40, source=SOURCE, slow=(), result=None, header=None,
             val_every=10, val_tokens=2097152) -> str:
    """The text of one log. `result` changes keys of the result line, `header` is passed to header_for."""
    rng = random.Random(seed)
    head = header_for(seed, source, **({"config_num_steps": num_steps} | (header or {})))
    times = [round(step_ms * (1 + 0.09 * i / num_steps) * (1 + rng.gauss(0, 0.002)), 1) for i in range(num_steps)]
    for step, ms in dict(slow).items():
        times[step - 1] = ms
    lines, elapsed = [], 0.0
    for step in range(num_steps + 1):
        elapsed += times[step - 1] if step else 0.0
        loss = loss_curve(step, num_steps, val_loss)
        if step and step % 10 == 0:
            lines.append(f"step:{step}/{num_steps} train_loss:{loss + rng.gauss(0, 0.02):.4f} "
                         f"train_time:{elapsed:.0f}ms step_avg:{elapsed / step:.2f}ms tokens_per_s:551882 mfu:0.391 "
                         "lr:1.0000")
        if step % val_every == 0 or step == num_steps:
            average = elapsed / step if step else math.nan
            lines.append(f"step:{step}/{num_steps} val_loss:{loss:.4f} train_time:{elapsed:.0f}ms "
                         f"step_avg:{average:.2f}ms")
    total = dict(status="finished", reason="", step=num_steps, num_steps=num_steps, val_loss=val_loss,
                 val_tokens=val_tokens, train_time_ms=elapsed, step_avg_ms=elapsed / num_steps,
                 time_to_first_step_s=80.5, tokens_trained=num_steps * head["config"].get("batch_tokens", 0), mfu=0.39,
                 peak_memory_mib=31000, resumed=False)
    lines += ["note: predicted total time 280 s", f"step_times_ms:{json.dumps(times)}",
              f"result:{json.dumps(total | (result or {}))}"]
    smi = "| NVIDIA-SMI 570.1 |\n|" + "=" * 98 + "|"
    return f"{source}{FENCE}\n{json.dumps(head)}\n{smi}\n{FENCE}\n" + "\n".join(lines) + "\n"


def write_log(folder, seed=1, **kwargs) -> Path:
    """Write one synthetic log into `folder` (made if missing) and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"run-{seed}.txt"
    path.write_text(log_text(seed, **kwargs), encoding="utf-8")
    return path
