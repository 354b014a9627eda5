"""train_gpt: one file that trains a GPT-2-class language model to a target validation loss, fast.

Claim: none yet for 8xH100 and FineWeb; on one GPU and another corpus 0.20 of the January 2025 record's time (records/).

    torchrun --standalone --nproc_per_node=8 train_gpt.py           the record recipe on 8 GPUs
    python train_gpt.py --preset=sprint --train_files='data/x/*.bin' --val_files='data/y/*.bin'    one GPU, minutes
    ./run.sh                                                        whatever this machine can do, from laptop to 8 GPUs
    python train_gpt.py --help                                      every key and its default

The rooms, in the order in which names flow (a room uses only rooms above it): 0 Door   1 Configuration   2 World
    3 Kernels   4 Optimizer   5 Model   6 Data   7 Schedules   8 Log and checkpoint   9 Training   10 Front door
"""
# ----------------------------------------------------------------------------------------------------------------------
# 0. Door
# Imports and the text of this very file. Importing has no side effects: no device, no thread, no environment.

import bisect
import contextlib
import dataclasses
import datetime
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Iterable, Iterator, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

SOURCE = Path(__file__).read_text(encoding="utf-8")
SOURCE += "" if SOURCE.endswith("\n") else "\n"      # the log's fence needs a line of its own


class Refusal(Exception):
    """Bad input. Its text is one readable message: what was found, what was expected, what to do. Exit code 2."""


class Failure(Exception):
    """A run that can't go on: non-finite numbers, no memory. Its text is one readable message. Exit code 1."""


# ----------------------------------------------------------------------------------------------------------------------
# 1. Configuration
# Every number of a run lives here once. The defaults are the record; presets change a few; --key=value changes one.

@dataclass(frozen=True)
class Config:
    """All settings of a run. Units are in the names; token counts are per step over all ranks."""
    # Data
    preset: str = "record"                 # name of the preset these values started from
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"    # comma-separated patterns, read in sorted order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    max_epochs: int = 1                    # passes over the training shards that the schedule may take
    vocab_size: int = 50_257               # ids in use; a dataset.json beside the shards overrides it
    eod_id: int = 50_256                   # the token that stands before every document
    # Length and batch
    num_steps: int = 1216
    batch_tokens: int = 524_288            # tokens of the largest step over all ranks and micro-steps
    batch_shares: tuple[float, ...] = (0.25, 0.5, 1.0)    # of it, stage by stage; rates fall with the square root
    row_tokens: int = 16_384               # the atom of data: documents are packed into rows, nothing crosses rows
    micro_rows: int = 1                    # rows in one forward pass at most (memory, shapes to compile; 0 = find out)
    # Validation
    val_tokens: int = 10_485_760           # targets scored: the first of the validation files; 0 = all there are
    val_overlap: int = 2048                # tokens of context that a row of validation has before its first target
    val_window_blocks: int = 20            # long window of validation, wider than any in training
    val_every_steps: int = 0               # 0 = only at the end
    target_loss: float = 3.28              # stop and say so when validation reaches it; 0 = run to the end
    # Model
    model_dim: int = 768
    num_layers: int = 11
    num_heads: int = 6
    head_dim: int = 128                    # of the values
    qk_dim: int = 128                      # of queries and keys
    mlp_dim: int = 3072
    long_layers: tuple[int, ...] = (3, 10)          # layers that see the whole window; others see half of it
    value_layers: tuple[int, ...] = (1, 2, 8, 9, 10)     # layers with a value embedding, each of its own
    copy_dim: int = 128                    # of the copy pointer's queries and keys
    table_rows: int = 4_194_301            # hashed rows for each order of n-grams, a prime; 1 is as good as none
    table_orders: tuple[int, ...] = (2, 3)          # n of the n-grams, up to 4
    block_tokens: int = 128                # granularity of windows and block masks
    attention_scale: float = 0.1
    softcap: tuple[float, ...] = (23.0, 5.0, 7.5)    # cap, shift, width: logits become cap sigmoid((z + shift) / width)
    # Optimizer; betas and decays stand in the table of param_groups
    lr_matrix: float = 0.039               # NorMuon, hidden matrices
    lr_embed: float = 0.85                 # Adam, token and value embeddings
    lr_head: float = 0.0113                # Adam, output head and gates
    lr_scalar: float = 0.056               # Adam, mixing scalars
    lr_table: float = 1.2                  # row-wise RMS steps, hashed n-gram table
    cooldown_frac: float = 0.8             # last part of the run with a linearly falling rate
    lr_floor: float = 0.3                  # the rate it falls to, relative
    ema_frac: float = 0.25                # last part of the run whose weights are averaged (time constant: a third)
    ema_blend: float = 0.5                # share of the average in the final weights; 0 = none
    # Machine
    seed: int = 0
    compile: str = "auto"                  # auto (on with a GPU) | on | off
    attention: str = "auto"                # auto | flex (FlexAttention) | dense (reference)
    fp8: str = "auto"                      # auto (where the device has it) | on | off: output head in training
    deterministic: str = "off"             # on: same seed, same hardware, same losses, bit for bit; slower
    # Output
    log_dir: str = "logs"
    log_every_steps: int = 10
    profile_steps: int = 0                 # so many steps (after five steps) into a Chrome trace beside the log
    # Trust
    checkpoint_every_steps: int = 0        # and once at the end; 0 = only when SIGTERM or SIGINT stops the run
    checkpoint_dir: str = "checkpoints"    # each run gets a folder of its own in it, with its last two checkpoints
    resume: str = ""                       # folder of a checkpoint, or latest: the newest one in checkpoint_dir
    self_check: str = "on"                 # before the clock starts: causality, isolation, equal ranks, disjoint data
    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 128) * 128
    @property
    def fits_flex(self) -> bool:           # what FlexAttention's kernels ask for
        return self.block_tokens % 128 == 0 and min(self.head_dim, self.qk_dim, self.copy_dim) >= 16


PRESETS: dict[str, dict] = {
    "record": {},
    "sprint": dict(            # small batches of one size, and rates to match
        num_steps=1230, batch_tokens=65_536, batch_shares=(1.0,), row_tokens=32_768, micro_rows=2, target_loss=3.48,
        val_tokens=2 ** 21, num_layers=4, num_heads=4, long_layers=(1, 3), value_layers=(3,), lr_matrix=0.0195,
        lr_embed=0.424, lr_head=0.0057, lr_scalar=0.028, lr_table=0.6),
    "demo": dict(
        train_files="data/builtin/train_*.bin", val_files="data/builtin/val_*.bin", max_epochs=1000,
        vocab_size=257, eod_id=256, num_steps=300, batch_tokens=4096, row_tokens=256, micro_rows=16,
        val_tokens=0, val_overlap=0, val_window_blocks=8, val_every_steps=50, target_loss=0.0, model_dim=128,
        num_layers=4, num_heads=4, head_dim=32, qk_dim=32, copy_dim=64, mlp_dim=512, long_layers=(1, 3),
        value_layers=(0, 2, 3), table_rows=65_521, table_orders=(2, 3, 4), block_tokens=32,
        softcap=(30.0, 0.0, 7.5), lr_matrix=0.0566, lr_head=0.0283, lr_table=0.8, checkpoint_every_steps=10 ** 6),
    "tiny": dict(
        max_epochs=1, num_steps=3, batch_tokens=1024, row_tokens=128, micro_rows=8, val_tokens=10_000, val_overlap=32,
        val_window_blocks=4, target_loss=0.0, model_dim=64, num_layers=3, num_heads=2, head_dim=32, qk_dim=32,
        copy_dim=32, mlp_dim=128, long_layers=(0,), value_layers=(0, 2), table_rows=1021, block_tokens=16),
}
CHOICES = dict(preset=tuple(PRESETS), compile=("auto", "on", "off"), attention=("auto", "flex", "dense"),
               fp8=("auto", "on", "off"), deterministic=("on", "off"), self_check=("on", "off"))
LIMITS = {key: limits for keys, *limits in (          # smallest and largest value, else 0 and 2^63 - 1
    ("num_layers", 1, 1000), ("num_steps", 1, 10 ** 6 - 1), ("vocab_size", 1, 2 ** 16), ("batch_tokens", 1, 2 ** 26),
    ("block_tokens num_heads mlp_dim val_window_blocks", 1, 2 ** 24), ("table_orders", 1, 4),
    ("head_dim qk_dim copy_dim row_tokens", 8, 2 ** 24), ("cooldown_frac ema_frac ema_blend", 0, 1),
    ("batch_shares", 2 ** -10, 1),
    ("model_dim", 16, 2 ** 24), ("max_epochs log_every_steps table_rows", 1, 2 ** 63 - 1)) for key in keys.split()}
RESUME_MAY_CHANGE = set("""preset log_dir micro_rows train_files val_files checkpoint_every_steps checkpoint_dir resume
    self_check max_epochs val_tokens val_overlap val_window_blocks val_every_steps target_loss compile attention fp8
    deterministic log_every_steps profile_steps""".split())       # by a resumed run; the data itself is compared

def parse_value(key: str, kind: type, text: str):
    """Text of --key=text as a value of the field's type; raises Refusal with one line."""
    try:
        if kind in (int, float):
            return 0 if (key, text) == ("micro_rows", "auto") else kind(text)
        if kind is str:
            if key in CHOICES and text not in CHOICES[key]:
                raise ValueError
            return text
        return tuple(kind.__args__[0](part) for part in text.split(",") if part)
    except ValueError:
        wanted = "one of " + ", ".join(CHOICES[key]) if key in CHOICES else \
            {int: "a whole number", float: "a number"}.get(kind, "numbers with commas, as 0,4,11")
        raise Refusal(f"--{key}={text:.99}: expected {wanted}") from None


def help_text() -> str:
    fields = SOURCE.partition("class Config:")[2].partition("    @property")[0].partition("\n    #")[2]
    return f"{__doc__}\nPresets: {', '.join(PRESETS)}. Keys, the record's values, what they mean:\n    #" + re.sub(
        r"(?m)^    (\w+): [^=]*= ", r"  --\1=", fields)


def parse_config(argv: list[str], default_preset: str = "record") -> tuple[Config, dict]:
    """argv (without the program) -> (Config, overrides given by hand). Raises Refusal on anything it can't use."""
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    texts = {}
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not arg.startswith("--") or not arg.isprintable() or (not equals and "on" not in CHOICES.get(key, ())):
            raise Refusal(f"{ascii(arg)[1:-1]:.99}: expected --key=value in printable characters (see --help)")
        if key not in kinds:
            near = ", ".join(k for k in kinds if key and (key in k or k in key or k[:4] == key[:4]))
            raise Refusal(f"--{key:.99}: no such key; " + (f"did you mean {near}?" if near else "see --help"))
        if key in texts:
            raise Refusal(f"--{key}: given twice, expected once")
        texts[key] = text if equals else "on"
    overrides = {key: parse_value(key, kinds[key], text) for key, text in texts.items()}
    preset = overrides.pop("preset", default_preset)
    config = Config(**{"preset": preset, **PRESETS[preset], **overrides})
    check_config(config)
    return config, overrides


def check_config(c: Config) -> None:
    """Raises Refusal when settings can't work together."""
    def need(ok: bool, key: str, expected: str) -> None:
        if not ok:
            raise Refusal(f"--{key}={getattr(c, key)!s:.99}: expected {expected}")
    own = dict(eod_id=(0, c.vocab_size - 1, "vocab_size - 1"), val_overlap=(0, c.row_tokens - 1, "row_tokens - 1"),
               **dict.fromkeys(("long_layers", "value_layers"), (0, c.num_layers - 1, "num_layers - 1")))
    for f in dataclasses.fields(c):
        value, (low, high, *name) = getattr(c, f.name), (LIMITS | own).get(f.name, (0, 2 ** 63 - 1))
        for number in () if isinstance(value, str) else value if isinstance(value, tuple) else (value,):
            need(low <= number <= high, f.name, f"a finite number from {low} to " + " = ".join([*name, str(high)]))
    for key, unit in (("batch_tokens", "row_tokens"), ("row_tokens", "block_tokens"), ("val_overlap", "block_tokens")):
        need(getattr(c, key) % getattr(c, unit) == 0, key, f"a multiple of {unit}={getattr(c, unit)}")
    for key, unit in (("qk_dim", 4), ("model_dim", 16), ("row_tokens", 16)):       # rotary turns half of each head; fp8
        need(getattr(c, key) % unit == 0, key, f"a multiple of {unit}")
    for key in ("table_orders", "batch_shares"):
        need(len(getattr(c, key)) > 0, key, "at least one number")
    need(len(c.softcap) == 3 and min(c.softcap[::2]) > 0 and c.softcap[0] <= min(80, 28 * c.softcap[2]), "softcap",
         "cap, shift, width; cap and width more than 0, cap at most 80 (fp32's exp) and 28 widths (fp8's gradients)")
    params = c.model_dim * (2 * c.padded_vocab + len(c.table_orders) * c.table_rows + 2 * c.num_layers * c.mlp_dim) \
        + c.num_heads * (2 * c.num_layers * c.model_dim * (c.qk_dim + c.head_dim)
                         + len(c.value_layers) * c.padded_vocab * c.head_dim)
    need(params <= 10 ** 10, "model_dim", f"at most {10 ** 10:,} parameters: {params:,} with num_layers, num_heads, "
         "qk_dim, head_dim, mlp_dim, vocab_size, value_layers, table_rows and table_orders")


# ----------------------------------------------------------------------------------------------------------------------
# 2. World
# Which process this is among how many, and on which device. The only room that reads or sets environment variables.

@dataclass(frozen=True)
class World:
    """rank of size processes, on device. World() is one CPU process without a process group."""
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    local: int = 0                         # its number on its own host
    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"
    def reduced(self, t: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """t, with what the other ranks have of it: summed, or by another op. In place."""
        if self.size > 1:
            dist.all_reduce(t, op)
        return t


def init_world(deterministic: bool = False) -> World:
    """Read the launcher's variables (torchrun's) and take the device; join_group comes later. Raises Refusal."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 11):
        raise Refusal(f"torch {torch.__version__} found, expected 2.11 or newer: pip install -r requirements.txt")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")     # varying shapes without fragmentation
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        rank, size, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        if not (0 <= rank < size and local >= 0):
            raise ValueError(f"{rank} of {size}, {local} on its host")
    except ValueError as error:
        raise Refusal(f"RANK, WORLD_SIZE, LOCAL_RANK: expected whole numbers, rank < size, found {error}; start with "
                      "torchrun") from None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local >= count:
            raise Refusal(f"local rank {local} has no GPU: {count} found; start with --nproc_per_node={count} or fewer")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    return World(rank, size, device, local)


def join_group(world: World) -> None:
    """Meet the other ranks. Raises Refusal when the launcher's variables don't say where."""
    if world.size > 1:
        try:
            dist.init_process_group("nccl" if world.is_cuda else "gloo", timeout=datetime.timedelta(minutes=10),
                                    device_id=world.device if world.is_cuda else None)
        except (ValueError, dist.DistNetworkError, dist.DistStoreError) as error:
            raise Refusal(f"WORLD_SIZE={world.size}, but no meeting point ({error}); start with torchrun") from None
        dist.barrier()               # a rank that refuses and leaves must not shut out one that is still connecting


def close_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def find_compiler() -> str | None:
    """Path of the C compiler that torch.compile would call on a CPU, if there is one."""
    return next(filter(None, map(shutil.which, [os.environ.get("CC", ""), "cc", "gcc", "clang", "c++", "g++"])), None)


# ----------------------------------------------------------------------------------------------------------------------
# 3. Kernels
# The mathematics that hardware cares about: a plain reference for each, at most one fast path, and one switch.
# Shapes: B rows, T positions, H heads, D head width, V padded vocabulary, N matrices, R x C their sides.

class Kernels(NamedTuple):
    """The switch: what this device runs. dtype is that of weights and activations."""
    compile: bool = False
    flex: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32


def choose_kernels(device: torch.device, compile="auto", attention="auto", fp8="auto", fits_flex=True) -> Kernels:
    """Fast paths where the device has them, references elsewhere. Raises Refusal for what it can't do."""
    cuda = device.type == "cuda"
    compiled = cuda if compile == "auto" else compile == "on"
    has_fp8 = cuda and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if fp8 == "on" and not (has_fp8 and compiled):
        raise Refusal("--fp8=on: it needs compilation, and fp8 matrix units (compute capability 8.9 or newer); use "
                      "--fp8=off")
    if attention == "flex" and not (cuda and compiled and fits_flex):
        raise Refusal("--attention=flex: it needs a GPU, compilation, block_tokens=128, and head_dim, qk_dim and "
                      "copy_dim from 16 on; use --attention=dense")
    flex, fp8 = cuda and compiled and fits_flex and attention != "dense", has_fp8 and compiled and fp8 != "off"
    return Kernels(compiled, flex, fp8, torch.bfloat16 if cuda else torch.float32)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


POLAR_EXPRESS = (       # quintic maps, each the best for what the one before leaves (Amsel et al. 2025)
    (8.1565545, -22.483293, 15.87877), (4.04293, -2.8089175, 0.5000178), (3.8916678, -2.772484, 0.50606482),
    (3.2857537, -2.3681295, 0.46449024), (2.3465413, -1.7097828, 0.4232355))

def orthogonalize(G_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest semi-orthogonal matrix of each G, of any size, up to singular values near 1. [N, R, C] -> same, in dtype.
    X <- aX + (bA + cA^2)X with A = XX^T, five times, from X = G / (1.02 |G|_F), on the smaller side (Jordan)."""
    X = G_NRC.float()
    X = (X / (1.02 * X.norm(dim=(-2, -1), keepdim=True)).clamp(min=1e-30)).to(dtype)
    X = X.mT if (tall := X.size(-2) > X.size(-1)) else X
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def softcap(z: Tensor, shape: tuple[float, float, float]) -> Tensor:
    """Logits z become cap * sigmoid((z + shift) / width): a softcap that lets right answers stand out (record 54)."""
    cap, shift, width = shape
    return cap * torch.sigmoid((z.float() + shift) / width)


def mixed_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, log_lm: Tensor, log_copy: Tensor, shape: tuple):
    """Sum of -log(e^log_lm softmax(squashed logits)[target] + e^log_copy), fp32 (see Pointer). Also for validation.
    Logits are x [T, E] w^T [E, P]; targets, log_lm, log_copy are [T]; negative targets are left out. -> scalar."""
    logits = softcap(F.linear(x, w), shape)
    logp = logits.gather(1, targets.clamp(min=0).long()[:, None])[:, 0] - logits.logsumexp(1)
    return -(torch.logaddexp(log_lm + logp, log_copy) * (targets >= 0)).sum()


def fp8_matmul(a8: Tensor, b8: Tensor, scale: float, fast: bool) -> Tensor:
    """a8 [M, K] row-major times b8 [K, N] column-major, the only layouts the hardware takes, times scale -> bf16."""
    one, scale = (torch.full((), s, dtype=torch.float32, device=a8.device) for s in (1.0, scale))
    return torch._scaled_mm(a8, b8, scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


X_SCALE, W_SCALE, G_SCALE = 2.0, 32.0, 8192.0     # constants: every micro-batch sees the same scales
def head_gradients(x: Tensor, w: Tensor, targets: Tensor, log_lm: Tensor, log_copy: Tensor, shape: tuple, fp8: bool):
    """mixed_cross_entropy and its gradients by x, w, log_lm and log_copy, without a second look at the logits.
    Squashed logits lie in (0, cap), so exp needs no maximum. Gradient by logits: (softmax - onehot) cap / width
    sigmoid (1 - sigmoid), times the softmax's part in the mixture. fp8: e4m3 forward, e5m2 gradient (record 19)."""
    if fp8:
        x8, w8 = (x * X_SCALE).to(torch.float8_e4m3fn), (w * W_SCALE).to(torch.float8_e4m3fn)
        logits = fp8_matmul(x8, w8.t(), 1 / (X_SCALE * W_SCALE), True)
    else:
        logits = F.linear(x, w)
    z, cap, width = softcap(logits, shape), shape[0], shape[2]
    lse = (z - cap).exp().sum(1, keepdim=True).log() + cap
    targets, log_lm, log_copy = targets[:, None], log_lm[:, None], log_copy[:, None]
    counts = (targets >= 0).float()
    log_lm = log_lm + softcap(logits.gather(1, targets.clamp(min=0).long()), shape) - lse
    log_p = torch.logaddexp(log_lm, log_copy)
    part = (log_lm - log_p).exp() * counts
    onehot = torch.arange(w.size(0), device=w.device, dtype=targets.dtype) == targets
    grad = ((z - lse).exp() - onehot.float()) * part * z * (1 - z / cap) / width
    loss, d_lm, d_copy = -(log_p * counts).sum(), -part[:, 0], (part - counts)[:, 0]
    if not fp8:
        grad = grad.to(x.dtype)
        return loss, grad @ w, grad.t() @ x, d_lm, d_copy
    g8 = (grad * G_SCALE).to(torch.float8_e5m2)
    dx = fp8_matmul(g8, w8.t().contiguous().t(), 1 / (G_SCALE * W_SCALE), False)
    dw = fp8_matmul(g8.t().contiguous(), x8.t().contiguous().t(), 1 / (G_SCALE * X_SCALE), False)
    return loss, dx, dw, d_lm, d_copy


class HeadLoss(torch.autograd.Function):
    """head_gradients as a differentiable scalar; gradients (a compiled head_gradients) does the work in forward."""
    @staticmethod
    def forward(ctx, x, w, targets, log_lm, log_copy, shape, fp8, gradients):
        loss, *saved = gradients(x, w, targets, log_lm, log_copy, shape, fp8)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        dx, dw, d_lm, d_copy = (t * upstream.to(t.dtype) for t in ctx.saved_tensors)
        return dx, dw, None, d_lm, d_copy, None, None, None


def candidate_set(targets: Tensor, vocab: int, count: int, start: int) -> tuple[Tensor, Tensor]:
    """count ids for a softmax over a sample: all distinct targets, then others as a fixed walk over all ids finds them.
    -> ids [count], each once; column of each id [vocab], -1 where it is left out.
    The walk visits (start + j) * 20011 mod vocab: moving windows reach every id equally often (record 92). No sort, no
    host synchronisation. Targets beyond count are left out."""
    stride = next(s for s in (20_011, 10_007, 7919, 1) if math.gcd(s, vocab) == 1)
    walk = (torch.arange(vocab, device=targets.device) + start % vocab) * stride % vocab
    targets = torch.where(targets < 0, vocab, targets).flatten().long()
    found = torch.zeros(vocab + 1, dtype=torch.int32, device=targets.device).scatter_(0, targets, 1)[walk]
    order = torch.where(found > 0, found.cumsum(0) - 1, found.sum() + (1 - found).cumsum(0) - 1).clamp(max=count)
    ids = torch.zeros(count + 1, dtype=torch.long, device=targets.device).scatter_(0, order, walk)[:count]
    columns = torch.empty(vocab, dtype=torch.long, device=targets.device).scatter_(0, walk, order)
    return ids, columns.masked_fill(columns == count, -1)


def shift(x_BT: Tensor, distance: int = 1, fill: float = 0) -> Tensor:
    """x [B, T, ..] moved later by distance positions along each row."""
    return F.pad(x_BT, (0, 0) * (x_BT.ndim - 2) + (distance, 0), value=fill)[:, :x_BT.size(1)]


class Mask(NamedTuple):
    """Who sees whom: causal, same segment, and at most so many blocks back. One of dense and blocks is set."""
    segments_BT: Tensor
    previous_BT: Tensor | None = None            # where keys take a half from the token before (partial key offset)
    dense: Tensor | None = None                  # [B, 1, T, T], True where attention is allowed
    blocks: tuple[Tensor, ...] | None = None     # FlexAttention's lists: partial, full, and both transposed


def segment_ids(tokens_BT: Tensor, eod_id: int) -> Tensor:
    """Number of document starts up to each position of its row: the one rule of what belongs together. int32 [B, T]."""
    return (tokens_BT == eod_id).cumsum(1, dtype=torch.int32)


def neighbour(segments_BT: Tensor, distance: int) -> Tensor:
    """Whether the token distance places before is of the same segment, [B, T]: the one rule again."""
    return shift(segments_BT, distance, fill=-1) == segments_BT


def dense_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """Reference mask: query i sees key j <= i of its segment, at most window_blocks blocks (own one included) back."""
    i = torch.arange(segments_BT.size(1), device=segments_BT.device)
    near = (i[:, None] >= i) & (i[:, None] // block - i // block < window_blocks)
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    return Mask(segments_BT, dense=(near & same)[:, None])


def block_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """The same rule as lists of blocks, built on the device without a search, sort or dense mask.
    Segment ids only grow along a row, so everything a block of queries i sees is one run of key blocks [low, i], and
    what it sees wholly is the run [full_low, i - 1]; likewise for the queries [j, high] that see a block of keys j."""
    first, last = segments_BT[:, ::block], segments_BT[:, block - 1::block]
    n = first.size(1)
    i = torch.arange(n, device=first.device)
    farthest, latest = i - window_blocks + 1, i + window_blocks - 1
    def count(condition: Tensor) -> Tensor:
        return condition.sum(-1, dtype=torch.int32)
    low = torch.maximum(count(last[:, None, :] < first[:, :, None]), farthest).clamp(min=0)
    full_low = torch.minimum(torch.maximum(count(first[:, None, :] < last[:, :, None]), low), i)
    high = torch.minimum(count(first[:, None, :] <= last[:, :, None]) - 1, latest)
    full_high = torch.maximum(torch.minimum(count(last[:, None, :] <= first[:, :, None]) - 1, latest), i)
    lists = []
    for num, begin, own in ((full_low - low + 1, low, "last"),          # partial keys: [low, full_low - 1], then i
                            (high - full_high + 1, full_high, "first"),   # partial queries: i, [full_high + 1, high]
                            (i - full_low, full_low, None),               # full keys: [full_low, i - 1]
                            (full_high - i, i + 1, None)):                # full queries: [i + 1, full_high]
        run = begin.expand_as(low)[:, :, None] + i                        # [B, blocks, blocks]: the first num count
        if own:
            run = torch.where(i == (num[:, :, None] - 1 if own == "last" else 0), i[:, None], run)
        lists += [t.to(torch.int32)[:, None].contiguous() for t in (num, run.clamp(max=n - 1))]
    return Mask(segments_BT, blocks=tuple(lists))


def attend(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Mask, scale: float, block: int) -> Tensor:
    """softmax(scale * q.k) v under the mask: FlexAttention over the block lists, or SDPA over the dense mask."""
    q, k, v = (t.transpose(1, 2) for t in (q_BTHD, k_BTHD, v_BTHD))
    if mask.blocks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, scale=scale).transpose(1, 2)
    return flex_attention(q, k, v, block_mask=flex_lists(mask, block), scale=scale).transpose(1, 2)


def flex_lists(mask: Mask, block: int) -> BlockMask:
    segments, T = mask.segments_BT, mask.segments_BT.size(1)
    def rule(b, h, i, j):
        return (i >= j) & (segments[b, i] == segments[b, j])
    kv_num, kv, q_num, qs, full_kv_num, full_kv, full_q_num, full_q = mask.blocks
    return BlockMask((T, T), kv_num, kv, full_kv_num, full_kv, q_num, qs, full_q_num, full_q,
                     BLOCK_SIZE=(block, block), mask_mod=rule)


NO_MATCH = -1e4                    # a score that leaves nothing of a key, without NaN where no key is left
def dense_scores(q_BTD: Tensor, k_BTD: Tensor, dense: Tensor) -> Tensor:
    """q.k / sqrt(D) in fp32, [B, T, T]; -inf where the mask [B, 1, T, T] lets a query not see a key."""
    return (q_BTD.size(-1) ** -0.5 * (q_BTD @ k_BTD.mT).float()).masked_fill(~dense[:, 0], -math.inf)


def attention_mass(q_BTD: Tensor, k_BTD: Tensor, tokens_BT: Tensor, targets_BT: Tensor, mask: Mask, block: int):
    """Two logsumexps of q.k / sqrt(D), [B, T]: over the keys that a query sees, and over those that are its target."""
    if mask.blocks is None:
        scores = dense_scores(q_BTD, k_BTD, mask.dense)
        match = (tokens_BT[:, None, :] == targets_BT[:, :, None]) & mask.dense[:, 0]
        return scores.logsumexp(-1), torch.where(match, scores, NO_MATCH).logsumexp(-1)
    q, k = (torch.stack((t, t), 1) for t in (q_BTD, k_BTD))          # a head for either: one kernel instead of two
    def matching(score, b, h, i, j):
        return torch.where((h == 0) | (tokens_BT[b, j] == targets_BT[b, i]), score, NO_MATCH)
    y, aux = flex_attention(q, k, torch.zeros_like(k[..., :16]), score_mod=matching, scale=q.size(-1) ** -0.5,
                            block_mask=flex_lists(mask, block), return_aux=AuxRequest(lse=True))
    # + 0 y: the backward pass can't do without a gradient of the output (torch 2.11)
    return (aux.lse.float() + 0.0 * y[..., 0].float()).unbind(1)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Optimizer
# Pure update rules, and one class that shards them over ranks: reduce, update a shard, gather. It knows but groups.

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)      # the new names of torch 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

class Group(NamedTuple):
    """Parameters that share one rule and one rate.
    kind: muon (matrices [.., R, C] of one shape) | adam (any) | rows (one table [R, C] that is looked up by row).
    A rows parameter has no .grad but .touched: a list of (ids [..], looked-up rows [.., C] whose .grad is wanted)."""
    name: str
    kind: str
    params: dict[str, nn.Parameter]
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    decay: float = 0.0           # cautious: only where the step goes towards zero anyway
    ema: bool = False           # whether the final weights are blended with an average over the tail of the run


def cautious_step(weight: Tensor, step: Tensor, decay: Tensor) -> None:
    """W <- W - step - decay W where the step shrinks W (cautious weight decay, Chen et al. 2025). In place."""
    weight.sub_(step + decay * weight * (step * weight > 0))


def muon_update(weight, grad, momentum_buffer, second, lr, momentum, beta2, decay, dtype: torch.dtype) -> None:
    """NorMuon (Li et al. 2025) on a stack [N, R, C]: Muon with a variance for each of the max(R, C) neurons.
    M <- mu M + (1 - mu) G;  O = orth((1 - mu) G + mu M);  v <- b v + (1 - b) mean over the short side of O^2
    O <- O / sqrt(v), rescaled to its old norm;  W <- W - lr sqrt(max(1, R/C)) O, decayed by decay lr^2 ..
    In place: weight, momentum_buffer, second (v, [N, R, 1] or [N, 1, C])."""
    grad = grad.float()
    momentum_buffer.mul_(momentum).add_(grad * (1 - momentum))
    update = orthogonalize(grad * (1 - momentum) + momentum_buffer * momentum, dtype).float()
    side = -1 if second.size(-1) == 1 else -2
    second.mul_(beta2).add_(update.square().mean(side, keepdim=True) * (1 - beta2))
    scaled = update * second.clamp(min=1e-20).rsqrt()
    before, after = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, scaled))
    scaled = scaled * (before / after.clamp(min=1e-20))
    rate = lr * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
    cautious_step(weight, rate * scaled, decay * lr * rate)


def adam_update(weight, grad, exp_avg, exp_avg_sq, lr, bias1, bias2, beta1, beta2, eps, decay) -> None:
    """Adam (Kingma & Ba 2015), bias-corrected, any shape, decayed by decay lr^2. In place: weight and both averages."""
    grad = grad.float()
    exp_avg.mul_(beta1).add_(grad * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(grad * grad * (1 - beta2))
    cautious_step(weight, lr / bias1 * exp_avg / ((exp_avg_sq / bias2).sqrt() + eps), decay * lr * lr)


def merge_rows(ids: Tensor, grads: Tensor, unused: int) -> tuple[Tensor, Tensor]:
    """Sums of the gradients [M, C] of equal ids [M] -> as many slots: distinct ids in order, then unused; their sums.
    Static shapes, no host synchronisation; sums in an order that follows from ids alone: the same bits on all ranks."""
    ordered, place = ids.sort(stable=True)
    slot = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    distinct = torch.full_like(ids, unused).scatter_(0, slot, ordered)
    slots = torch.empty_like(slot).scatter_(0, place, slot)
    return distinct, torch.ops.aten.embedding_dense_backward(grads, slots, len(ids), -1, False)


def rows_update(rows, grad, square, second, age, used, lr, beta2, eps, decay) -> tuple[Tensor, Tensor]:
    """Row-wise RMS steps without momentum (record 92): columns of new rows [M, ..] and second moments [M].
    v <- b^age v + (1 - b) mean of G^2, age being the updates since the row's last one;  p <- p - lr G / sqrt(v)."""
    weight, grad = rows.float(), grad.float() * used[:, None]
    second = second * beta2 ** age + (1 - beta2) * square * used
    cautious_step(weight, lr * grad / (second.sqrt() + eps)[:, None], decay * lr * lr)
    return weight.to(rows.dtype), second


class Bank:
    """A group's parameters as views of one padded buffer, so that one collective and one batched kernel serve all.
    Muon banks are [N, R, C], Adam banks flat. Each rank has fp32 masters and state of 1/size of the first dimension."""
    def __init__(self, group: Group, world: World):
        self.group, self.world, self.steps, self.slices = group, world, 0, {}
        params = list(group.params.values())
        unit = params[0].shape[-2:] if group.kind == "muon" else ()
        align = 1 if group.kind == "muon" else 128       # keeps every view 256-byte aligned
        counts = [p.numel() // math.prod(unit) for p in params]
        total = round_up(sum(round_up(count, align) for count in counts), align * world.size)
        self.weight = torch.zeros(total, *unit, dtype=params[0].dtype, device=world.device)
        self.grad, start = torch.zeros_like(self.weight), 0
        for (name, p), count in zip(group.params.items(), counts):
            self.slices[name] = slice(start, start + count)
            self.part(self.weight, name).copy_(p.data)
            p.data, p.grad = self.part(self.weight, name), self.part(self.grad, name)
            start += round_up(count, align)
        size = total // world.size
        self.mine = slice(world.rank * size, (world.rank + 1) * size)
        self.weight_shard = self.weight[self.mine]
        self.grad_shard = self.grad if world.size == 1 else torch.zeros_like(self.weight_shard)
        self.master = self.weight_shard if self.weight.dtype == torch.float32 else self.weight_shard.float()
        self.state = {name: torch.zeros_like(self.master) for name in {
            "muon": ("momentum",), "adam": ("exp_avg", "exp_avg_sq")}[group.kind] + ("ema",) * group.ema}
        if group.kind == "muon":                         # a number for each neuron, along the long side
            self.state["second"] = self.master.new_zeros(size, *((unit[0], 1) if unit[0] >= unit[1] else (1, unit[1])))

    def part(self, full: Tensor, name: str) -> Tensor:
        """The parameter's view of a buffer of the whole bank: in its shape, or with a number for each neuron."""
        shape = self.group.params[name].shape
        return full[self.slices[name]].view(shape[:len(shape) + 1 - full.ndim] + full.shape[1:])

    def reduce(self):
        """Start summing gradients over the ranks into this rank's shard. -> what to wait for."""
        return [reduce_scatter(self.grad_shard, self.grad, async_op=True)] if self.world.size > 1 else []

    def gather(self):
        """Start collecting all ranks' new weights. -> what to wait for."""
        self.weight_shard.copy_(self.master)             # where they are one tensor: nothing happens
        return [all_gather(self.weight, self.weight_shard, async_op=True)] if self.world.size > 1 else []

    def zero_grad(self) -> None:
        self.grad.zero_()

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step at rate 0 may change."""
        return [self.weight, self.grad, self.master, *self.state.values()]

    def exact(self) -> dict[str, Tensor]:
        """This rank's shards of what a checkpoint keeps."""
        return {"weight": self.master, **self.state}

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for kind, full in self.exact().items():
            if len(full) < len(self.weight):
                shard, full = full, full.new_empty(len(self.weight), *full.shape[1:])
                all_gather(full, shard)
            yield from ((f"{name}/{kind}", self.part(full, name)) for name in self.slices)

    def load(self, tensors: dict[str, Tensor]) -> None:
        for kind, shard in self.exact().items():
            full = shard if len(shard) == len(self.weight) else shard.new_zeros(len(self.weight), *shard.shape[1:])
            for name in self.slices:
                self.part(full, name).copy_(tensors[f"{name}/{kind}"])
            shard.copy_(full[self.mine])
            if kind == "weight":
                self.weight.copy_(full)


class RowBank(Bank):
    """A table of which a step touches few rows. Every rank holds all of it, and updates some columns of touched rows.
    The last row belongs to nobody and stays as it is: lookups without an answer and free slots point there."""
    def __init__(self, group: Group, world: World):
        (name, self.table), = group.params.items()
        self.group, self.world, self.steps = group, world, 0
        self.weight = self.master = self.table.data
        self.mine, self.slices, self.width = slice(None), {name: slice(None)}, -(-self.table.size(1) // world.size)
        second = torch.zeros(len(self.weight), device=world.device)
        self.state = dict(second=second, seen=second.int())

    def part(self, full: Tensor, name: str) -> Tensor:
        return full

    def reduce(self):
        """Start collecting all ranks' ids [M] and this rank's columns of all ranks' gradients [M, width]."""
        self.ids, size = torch.cat([ids.flatten() for ids, _ in self.table.touched]), self.world.size
        self.grads = self.grad_shard = torch.cat([rows.grad.flatten(0, -2) for _, rows in self.table.touched])
        if size == 1:
            return []
        ids, parts = self.ids, torch.cat(F.pad(self.grads, (0, -self.grads.size(1) % size)).chunk(size, 1))
        self.ids, self.grads = ids.new_empty(size * len(ids)), torch.empty_like(parts)
        return [all_gather(self.ids, ids, async_op=True), dist.all_to_all_single(self.grads, parts, async_op=True)]

    def look_up(self, ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's columns of rows [M, width]; mean squares [M] of whole gradients."""
        square = torch.linalg.vector_norm(grads, dim=1, dtype=torch.float32).square()
        square = self.world.reduced(square) / self.table.size(1)
        if self.world.size == 1:
            return self.weight[ids], square
        rows = self.weight[:, self.world.rank * self.width:(self.world.rank + 1) * self.width][ids]
        return F.pad(rows, (0, self.width - rows.size(1))), square

    def write(self, ids: Tensor, rows: Tensor) -> None:
        if self.world.size > 1:
            parts = rows.new_empty(self.world.size * len(rows), self.width)
            all_gather(parts, rows)
            rows = torch.cat(parts.chunk(self.world.size), 1)[:, :self.table.size(1)]
        self.weight.view(torch.int64)[ids] = rows.contiguous().view(torch.int64)       # four bf16 at once

    def gather(self):
        """Nothing: write has done it."""
        return []

    def zero_grad(self) -> None:
        self.table.touched.clear()
        self.ids = self.grads = self.grad_shard = None

    def tensors(self) -> list[Tensor]:
        return list(self.state.values())


class Optimizer:
    """All groups. step() overlaps each bank's communication with its neighbours' updates."""
    def __init__(self, groups: list[Group], world: World, compile: bool, dtype: torch.dtype):
        self.dtype = dtype
        self.banks = [(RowBank if group.kind == "rows" else Bank)(group, world) for group in groups]
        self.muon_update, self.adam_update, self.rows_update = muon_update, adam_update, rows_update
        if compile:                         # one graph for flat banks of all lengths, one for all numbers of rows
            self.muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True)
            self.adam_update = torch.compile(adam_update, dynamic=True, fullgraph=True)
            self.rows_update = torch.compile(rows_update, dynamic=True, fullgraph=True)

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """One update of everything; zeroes the gradients. -> squared gradient norm of each bank's shard, [banks]."""
        pending = [bank.reduce() for bank in self.banks]
        gathers, norms = [], []
        for bank, works in zip(self.banks, pending):
            for work in works:
                work.wait()
            norms.append(torch.linalg.vector_norm(bank.grad_shard, dtype=torch.float32).square())
            self.update(bank, lr_scale, momentum)
            gathers.append(bank.gather())
        for bank, works in zip(self.banks, gathers):
            for work in works:
                work.wait()
            bank.zero_grad()
        return torch.stack(norms)

    def update(self, bank: Bank, lr_scale: float, momentum: float) -> None:
        bank.steps += 1      # rates and betas are 0-D CPU tensors: floats would recompile, or meet a cache's old ones
        group, scalar = bank.group, torch.tensor
        lr, (beta1, beta2), decay = scalar(group.lr * lr_scale), map(scalar, group.betas), scalar(group.decay)
        if group.kind == "muon":
            self.muon_update(bank.master, bank.grad_shard, bank.state["momentum"], bank.state["second"], lr,
                             scalar(momentum), beta2, decay, self.dtype)
        elif group.kind == "adam":
            bias1, bias2 = (scalar(1 - beta ** bank.steps) for beta in group.betas)
            self.adam_update(bank.master, bank.grad_shard, bank.state["exp_avg"], bank.state["exp_avg_sq"], lr,
                             bias1, bias2, beta1, beta2, scalar(group.eps), decay)
        else:
            ids, grads = merge_rows(bank.ids, bank.grads, unused := len(bank.weight) - 1)
            age = bank.steps - bank.state["seen"][ids]
            rows, square = bank.look_up(ids, grads)
            rows, second = self.rows_update(rows, grads, square, bank.state["second"][ids], age, ids < unused, lr,
                                            beta2, scalar(group.eps), decay)
            bank.state["second"][ids], bank.state["seen"][ids] = second, torch.full_like(age, bank.steps)
            bank.write(ids, rows)

    @torch.no_grad()
    def average(self, rate: float, share: float = 0.0) -> None:
        """Move the average over the tail by rate towards the weights (1 begins it); a share > 0 ships it, mixed in."""
        for bank in [bank for bank in self.banks if bank.group.ema]:
            bank.state["ema"].lerp_(bank.master, rate)
            if share:
                bank.master.lerp_(bank.state["ema"], share)
                for work in bank.gather():
                    work.wait()

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """("PARAMETER/KIND", tensor): exact weights and state, whole and unpadded, on every rank; all must iterate."""
        for bank in self.banks:
            yield from bank.gathered()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
        """Take over what gathered() gave, on any number of ranks; steps by bank."""
        for bank in self.banks:
            bank.steps = steps[bank.group.name]
            bank.load(tensors)


# ----------------------------------------------------------------------------------------------------------------------
# 5. Model
# A GPT: layers are a table, and how parameters learn is one. No collectives, files, clocks, environment. E model width.

class Layer(NamedTuple):
    """One row of the topology table."""
    attention: str               # "long" (whole window), "short" (half of it)
    value_table: int | None      # which value embedding is mixed into the values


def layer_table(c: Config) -> list[Layer]:
    return [Layer("long" if i in c.long_layers else "short", c.value_layers.index(i) if i in c.value_layers else None)
            for i in range(c.num_layers)]


class View(NamedTuple):
    """What a forward pass is asked for besides its tokens. A step changes these numbers, never the graph."""
    window: int                            # long window, in blocks
    candidates: int = 0                    # ids in the training softmax, 0 = all
    row: int = 0                           # running number of this batch's first row: where its negatives start
    training: bool = False                 # gradients and looked-up rows are wanted; else only the loss


GATE_DIMS, Rotary = 16, tuple[Tensor, Tensor]        # gates look at so many channels; see rotary_tables

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def stem(e, rows_JBTE, signs_JBT, sign_pool, mix) -> Tensor:
    """Token embeddings, n-gram rows and their signs (against accidents of the hash) -> x0 [B, T, E]."""
    return norm(e) + mix * (rows_JBTE * sign_pool[signs_JBT]).sum(0)


NGRAM_FACTORS = ((36_313, 27_191, 14_563, 51_977), (25_391, 44_203, 17_489, 30_631))    # of row, sign; for each token
SIGN_POOL = 8191

def ngram_ids(tokens_BT: Tensor, segments_BT: Tensor, orders: tuple[int, ...], num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows of a table [len(orders) num_rows + 1, E] and signs of the pool, [J, B, T], by hashes of the last n tokens.
    A position whose document has fewer tokens gets the table's last row, which is zero."""
    tokens, rows, signs = tokens_BT.long(), [], []
    for j, order in enumerate(orders):
        row, sign = (tokens * factors[0] for factors in NGRAM_FACTORS)
        for back in range(1, order):
            row, sign = (h ^ shift(tokens, back) * f[back] for h, f in zip((row, sign), NGRAM_FACTORS))
        complete = neighbour(segments_BT, order - 1)
        rows.append(torch.where(complete, row % num_rows + j * num_rows, len(orders) * num_rows))
        signs.append(sign % SIGN_POOL)
    return torch.stack(rows), torch.stack(signs)


def rotary_tables(T: int, head_dim: int, like: Tensor) -> Rotary:
    """Factors of x and of x with its halves swapped, [T, 1, D], in like's precision. Half of the pairs stands still."""
    quarter = head_dim // 4
    freq = F.pad((1 / 1024) ** torch.linspace(0, 1, quarter, dtype=torch.float32, device=like.device), (0, quarter))
    angle = torch.arange(T, dtype=torch.float32, device=like.device)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).to(like.dtype)[:, None], torch.cat((sin, -sin), 1).to(like.dtype)[:, None]


def rotate(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (j, j + D/2) by their position's angle (RoPE, Su et al. 2021)."""
    x = x_BTHD.float()               # halves are swapped by a flip: concatenation makes slow kernels
    return (x * rotary[0] + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * rotary[1]).type_as(x_BTHD)


def matrix(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uniform, with half of the standard deviation 1 / sqrt(last dimension)."""
    bound = 0.5 * 3 ** 0.5 * shape[-1] ** -0.5
    return nn.Parameter(torch.empty(shape, dtype=dtype).uniform_(-bound, bound))


def scalars(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values if len(values) > 1 else values[0]))


class Attention(nn.Module):
    """QK-norm, rotary, values with a value embedding added, output gated by the head."""
    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.config = c
        pair = c.qk_dim * (2 - c.num_heads % 2)           # orthogonalised by pairs of heads (record 80)
        self.qk = matrix(2 * c.num_heads * c.qk_dim // pair, pair, c.model_dim, dtype=dtype)
        self.value, self.out = (matrix(c.num_heads * c.head_dim, c.model_dim, dtype=dtype) for _ in range(2))
        self.scales = scalars(0.5, 1.0)                    # of values and output; on weights, where they cost nothing
        self.gates = nn.Parameter(torch.zeros(c.num_heads, GATE_DIMS, dtype=dtype))

    def forward(self, x_BTE: Tensor, ve_BTE: Tensor | None, mask: Mask, rotary: Rotary) -> Tensor:
        c, H = self.config, self.config.num_heads
        widths = H * c.qk_dim, H * c.qk_dim, H * c.head_dim
        weight = torch.cat((self.qk.flatten(0, 1), self.value * self.scales[0]))
        q, k, v = (t.unflatten(-1, (H, -1)) for t in F.linear(x_BTE, weight).split(widths, -1))
        q, k = rotate(norm(q), rotary), rotate(norm(k), rotary)
        still = torch.arange(c.qk_dim, device=k.device) % (c.qk_dim // 2) >= c.qk_dim // 4
        k = torch.where(mask.previous_BT[:, :, None, None] & still, shift(k), k)      # partial key offset (record 49)
        if ve_BTE is not None:
            v = v + ve_BTE.view_as(v)
        y = attend(q, k, v, mask, c.attention_scale, c.block_tokens)
        y = y * 2 * torch.sigmoid(F.linear(x_BTE[..., :GATE_DIMS], self.gates))[..., None]      # record 28
        return y.flatten(2) @ (self.out * self.scales[1])         # out is stored transposed


class Block(nn.Module):
    """x <- a x + b x0; x <- x + attention(norm x); x <- x + W2 relu(W1 norm x)^2 (So et al. 2021)."""
    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.attention = Attention(c, dtype)
        self.up = matrix(c.mlp_dim, c.model_dim, dtype=dtype)
        self.down = nn.Parameter(torch.zeros(c.mlp_dim, c.model_dim, dtype=dtype))       # transposed
        self.mlp_scale, self.mix = scalars(1.0), scalars(1.1, 0.2)

    def forward(self, x, x0, ve, mask, rotary):
        x = self.mix[0] * x + self.mix[1] * x0
        x = x + self.attention(norm(x), ve, mask, rotary)
        return x + F.relu(F.linear(norm(x), self.up)).square() @ (self.down * self.mlp_scale)


class Pointer(nn.Module):
    """Mixture of softmax and copies (pointer sentinel, Merity et al. 2016). Attention gives earlier tokens a share of
    the next one's probability, a sentinel the rest to the softmax. A key knows its token and the state before it."""
    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.block, self.copy_qk = c.block_tokens, matrix(3, c.copy_dim, c.model_dim, dtype=dtype)
        self.sentinel_gates = nn.Parameter(torch.zeros(1, c.model_dim, dtype=dtype))
        self.copy_scales = scalars(1.0, 16.0)              # of queries; bias of the sentinel: at first no copies

    def project(self, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, D], the sentinel's score [B, T]."""
        q, k, before = F.linear(x, self.copy_qk.flatten(0, 1)).unflatten(-1, (3, -1)).unbind(2)
        own = F.linear(x, self.sentinel_gates)[..., 0].float() + self.copy_scales[1]
        return norm(q) * self.copy_scales[0].to(q.dtype), norm(k + shift(before) * mask.previous_BT[..., None]), own

    def forward(self, x: Tensor, tokens: Tensor, targets: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Logarithms of the softmax's share and of what is copied from where the target stands, [B, T] each."""
        q, k, own = self.project(x, mask)
        every, found = attention_mass(q, k, tokens, targets, mask, self.block)
        z = torch.logaddexp(every, own)
        return own - z, found - z

    def mix(self, x: Tensor, tokens: Tensor, log_p: Tensor, mask: Mask, dense: Tensor) -> Tensor:
        """Log probabilities [B, T, V] of the whole mixture from those of the softmax; dense: the mask [B, 1, T, T]."""
        q, k, own = self.project(x, mask)
        scores = dense_scores(q, k, dense)
        z = torch.logaddexp(scores.logsumexp(-1), own)[..., None]
        copies, p = (scores - z).exp(), (own[..., None] - z + log_p).exp()
        return p.scatter_add(2, tokens.long()[:, None].expand_as(copies), copies).log()


class GPT(nn.Module):
    """tokens [B, T] -> log probabilities [B, T, V], or with targets their summed loss. Documents see but themselves."""
    def __init__(self, c: Config, kernels: Kernels = Kernels()):
        super().__init__()
        self.config, self.kernels, self.table = c, kernels, layer_table(c)
        dtype, width = kernels.dtype, c.num_heads * c.head_dim
        self.embed = nn.Parameter(torch.randn(c.padded_vocab, c.model_dim, dtype=dtype))
        self.value_embeds = nn.Parameter(0.01 * torch.randn(c.padded_vocab, len(c.value_layers) * width, dtype=dtype))
        num_rows = len(c.table_orders) * c.table_rows + 1
        self.ngrams = nn.Parameter(torch.zeros(num_rows, c.model_dim, dtype=dtype), requires_grad=False)
        self.ngrams.touched = []                          # in place of .grad: see Group
        signs = torch.randint(0, 2, (SIGN_POOL, c.model_dim), generator=torch.Generator().manual_seed(1), device="cpu")
        self.register_buffer("sign_pool", (2 * signs - 1).to(self.embed), persistent=False)
        self.ngram_mix, self.pointer = scalars(0.05), Pointer(c, dtype)
        self.blocks = nn.ModuleList(Block(c, dtype) for _ in self.table)
        self.head = nn.Parameter(torch.zeros(c.padded_vocab, c.model_dim, dtype=dtype))
        self.head_gradients, self.cross_entropy = head_gradients, mixed_cross_entropy
        self.build_mask, self.stem = block_mask if kernels.flex else dense_mask, stem
        self.rotary: dict[int, Rotary] = {}             # by row length; not saved
        if kernels.compile:             # by the block: equal layers share one graph, so that a cold start takes seconds
            for module in (*self.blocks, self.pointer):
                module.compile(dynamic=False, fullgraph=True)
            for name in ("stem", "head_gradients", "cross_entropy", "build_mask"):
                setattr(self, name, torch.compile(getattr(self, name), dynamic=False, fullgraph=True))

    def masks(self, segments: Tensor, window: int) -> dict[str, Mask]:
        """Long layers see window blocks and offset keys, short ones see half of it."""
        block, previous = self.config.block_tokens, neighbour(segments, 1)
        wide = torch.full_like(segments[0, 0], window)
        return {"long": self.build_mask(segments, wide, block)._replace(previous_BT=previous),
                "short": self.build_mask(segments, (wide // 2).clamp(min=1), block)._replace(
                    previous_BT=torch.zeros_like(previous))}

    def look_up(self, tokens: Tensor, segments: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """n-gram rows and signs, [J, B, T, ..]. In training the rows are leaves whose gradients the optimizer wants."""
        ids, signs = ngram_ids(tokens, segments, self.config.table_orders, self.config.table_rows)
        rows = F.embedding(ids, self.ngrams).requires_grad_()
        if training:
            self.ngrams.touched.append((ids, rows))
        return rows, signs

    def hidden(self, tokens: Tensor, segments: Tensor, masks: dict[str, Mask], training: bool) -> Tensor:
        """Final normed states [B, T, E]."""
        c, T = self.config, tokens.size(1)
        if T not in self.rotary:
            self.rotary[T] = rotary_tables(T, c.qk_dim, self.embed)
        rows, signs = self.look_up(tokens, segments, training)
        x0 = self.stem(F.embedding(tokens, self.embed), rows, signs, self.sign_pool, self.ngram_mix)
        x = x0.view_as(x0)                                # one tensor in two places would be another graph
        ves = F.embedding(tokens, self.value_embeds).chunk(max(1, len(c.value_layers)), -1)     # one gather for all
        for layer, block in zip(self.table, self.blocks):
            ve = None if layer.value_table is None else ves[layer.value_table]
            x = block(x, x0, ve, masks[layer.attention], self.rotary[T])
        return norm(x)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None, view: View) -> Tensor:
        segments = segment_ids(tokens_BT, self.config.eod_id)
        masks = self.masks(segments, view.window)
        x = self.hidden(tokens_BT, segments, masks, view.training)
        if targets_BT is None:
            log_p = softcap(F.linear(x, self.head), self.config.softcap).log_softmax(-1)
            dense = dense_mask(segments, torch.full_like(segments[0, 0], view.window), self.config.block_tokens)
            return self.pointer.mix(x, tokens_BT, log_p, masks["long"], dense.dense)
        return self.loss(x, tokens_BT, targets_BT, masks["long"], view)

    def loss(self, x: Tensor, tokens: Tensor, targets: Tensor, mask: Mask, view: View) -> Tensor:
        """Summed loss of final states [B, T, E], row by row."""
        rows = x, targets, *self.pointer(x, tokens, targets, mask)
        with torch.set_grad_enabled(view.training):      # validation runs training's graphs up to here
            parts = zip(*((t if view.training else t.detach()).unbind() for t in rows))
            return sum(self.row_loss(*part, view, view.row + i) for i, part in enumerate(parts))

    def row_loss(self, x: Tensor, targets: Tensor, log_lm: Tensor, log_copy: Tensor, view: View, row: int) -> Tensor:
        """Loss of one row: [T, E], [T] thrice -> scalar, over all ids or over candidates of its own."""
        c, w = self.config, self.head
        if view.candidates:
            ids, columns = candidate_set(targets, len(w), view.candidates, row * view.candidates)
            targets, w = torch.where(targets < 0, -1, columns[targets.clamp(min=0).long()]), w.index_select(0, ids)
        if view.training and self.kernels.compile:
            return HeadLoss.apply(x, w, targets, log_lm, log_copy, c.softcap, self.kernels.fp8, self.head_gradients)
        return self.cross_entropy(x, w, targets, log_lm, log_copy, c.softcap)


def param_groups(c: Config, model: nn.Module) -> list[dict]:
    """How each bank learns, in the order of reduction. ValueError unless the patterns name each parameter once."""
    table = (
        # name          kind    parameters         rate             betas       epsilon decay  ema
        ("embed",        "adam", r"embed",          c.lr_embed,      (.75, .98), 1e-10,  .025,  True),
        ("value_embeds", "adam", r"value_embeds",   c.lr_embed,      (.75, .98), 1e-10,  .025,  False),
        ("head",         "adam", r"head",           c.lr_head,       (.5, .98),  1e-10,  .75,   True),
        ("scalars",      "adam", r".*(mix|scales?)", c.lr_scalar, (.9, .99), 1e-10, 0.,   False),
        ("gates",        "adam", r".*gates",        c.lr_head,       (.9, .99),  1e-10,  .005,  False),
        ("copy_qk",      "muon", r".*copy_qk",      c.lr_matrix,     (.0, .9),   0.,     1.2,   True),
        ("qk",           "muon", r".*\.qk",         c.lr_matrix,     (.0, .9),   0.,     1.2,   True),
        ("value_out",    "muon", r".*\.(value|out)", c.lr_matrix,    (.0, .9),   0.,     1.2,   True),
        ("mlp_up",       "muon", r".*\.up",         c.lr_matrix,     (.0, .9),   0.,     1.2,   True),
        ("mlp_down",     "muon", r".*\.down",       2 * c.lr_matrix, (.0, .9),   0.,     1.2,   True),
        ("ngrams",       "rows", r"ngrams",         c.lr_table,      (.0, .95),  1e-15,  .025,  False))
    groups = [dict(zip("name kind params lr betas eps decay ema".split(), row)) | {"params": {}} for row in table]
    for name, p in model.named_parameters():
        owners = [group for row, group in zip(table, groups) if re.fullmatch(row[2], name)]
        if len(owners) != 1:
            raise ValueError(f"parameter {name} belongs to {len(owners)} banks, expected exactly 1")
        owners[0]["params"][name] = p
    return [group for group in groups if any(p.numel() for p in group["params"].values())]


# ----------------------------------------------------------------------------------------------------------------------
# 6. Data
# Token shards, the planner that says which span goes into which row, and the batch generator. Takes plain numbers.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20_240_520, 1, 1024

def shard_tokens(path: str) -> int:
    """Token count of a FineWeb-format shard: 256 int32 (magic, version, count), then uint16. Raises Refusal."""
    again = "delete the file and download or make it again"
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(SHARD_HEADER_BYTES)
    except OSError as error:
        raise Refusal(f"{path}: can't be read ({error.strerror})") from None
    if len(head) < SHARD_HEADER_BYTES:
        pointer = ", looks like the pointer text of a large-file store" if head.startswith(b"version https") else ""
        raise Refusal(f"{path}: {size} bytes, too short to hold a shard header of 1,024 bytes{pointer}; {again}")
    magic, version, count = (int.from_bytes(head[i:i + 4], "little", signed=True) for i in (0, 4, 8))
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        hint = " (this is the 32-bit-token format, tokenize again with data/text.py)" if magic == 20_240_801 else ""
        raise Refusal(f"{path}: found magic/version {magic}/{version}, expected {SHARD_MAGIC}/{SHARD_VERSION}{hint}")
    if count <= 0 or size != SHARD_HEADER_BYTES + 2 * count:
        raise Refusal(f"{path}: header says {count:,} tokens ({SHARD_HEADER_BYTES + 2 * count:,} bytes), "
                      f"found {size:,} bytes, expected as many and at least one token; {again}")
    return count


def find_shards(patterns: str, what: str) -> list[str]:
    """Files of comma-separated glob patterns, sorted and without repetition. Raises Refusal when there are none."""
    names = {os.path.abspath(p) for pattern in patterns.split(",") for p in glob.glob(pattern.strip())}
    paths = sorted({os.path.realpath(name): name for name in sorted(names, reverse=True)}.values())     # each file once
    for path in paths:
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise Refusal(f"{path}: no file that can be read; restore it, or name others with --{what}_files=PATTERN")
    if not paths:
        raise Refusal(f"no {what} shards match {patterns:.300}: name others with --{what}_files=PATTERN, or make some: "
                      "python data/cached_fineweb10B.py, or data/text.py --builtin --tokenizer=bytes, or --help")
    return paths


def dataset_card(paths: list[str]) -> dict | None:
    """The dataset.json beside the shards, if there is one. Raises Refusal when it can't be used."""
    card = Path(paths[0]).parent / "dataset.json"
    if not os.path.lexists(card):
        return None
    try:
        found = json.loads(card.read_text(encoding="utf-8") if card.is_file() else "no file")
        vocab, eod = found["vocab_size"], found["eod_id"]
        if not (type(vocab) is type(eod) is int and 0 <= eod < vocab <= 65_536):
            raise ValueError(f"expected 0 <= eod_id < vocab_size <= 65536, found {eod!r:.40} and {vocab!r:.40}")
        return dict(tokenizer=str(found["tokenizer"]), vocab_size=vocab, eod_id=eod)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{card}: not a usable dataset card ({error!r:.200}); make it again with data/text.py") from None


class TokenStream:
    """The tokens of several shards as one sequence, memory-mapped. Reading and indexing, nothing else."""
    def __init__(self, paths: list[str], vocab_size: int):
        self.paths, self.vocab_size = paths, vocab_size
        self.starts = [0, *itertools.accumulate(map(shard_tokens, paths))]
        self.num_tokens = self.starts[-1]
        if self.num_tokens < 2:
            raise Refusal(f"{paths[0]}: holds 1 token; expected 2, an input and its target")
        self.maps: dict[int, Tensor] = {}
        self.indexed: dict[tuple[int, int], list[int]] = {}      # a shard is searched once, however many ask

    def shard(self, k: int) -> Tensor:
        """Tokens of shard k as int16 (the bits of uint16)."""
        if k not in self.maps:
            words = SHARD_HEADER_BYTES // 2 + self.starts[k + 1] - self.starts[k]
            try:
                self.maps[k] = torch.from_file(self.paths[k], False, words, dtype=torch.int16)[SHARD_HEADER_BYTES // 2:]
            except RuntimeError as error:
                raise Refusal(f"{self.paths[k]}: can't be read any more ({error})") from None
        return self.maps[k]

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy tokens start..stop-1 into out (int32)."""
        k, done = bisect.bisect_right(self.starts, start) - 1, 0
        while start < stop:
            upto = min(stop, self.starts[k + 1])
            out[done:done + upto - start] = self.shard(k)[start - self.starts[k]:upto - self.starts[k]]
            start, done, k = upto, done + upto - start, k + 1
        out &= 0xFFFF

    def document_starts(self, k: int, eod_id: int) -> list[int]:
        """Positions of eod_id in shard k, counted from the stream's begin. Raises Refusal on ids out of range."""
        if (k, eod_id) in self.indexed:
            return self.indexed[k, eod_id]
        tokens, starts = self.shard(k), []
        eod, step = eod_id - 65_536 * (eod_id > 32_767), 2 ** 20
        for a in range(0, len(tokens), step):
            part = tokens[a:a + step]
            if self.vocab_size < 65_536 and int((part ^ -32_768).max()) + 32_768 >= self.vocab_size:
                bad = int((part.int() & 0xFFFF >= self.vocab_size).nonzero()[0])
                raise Refusal(f"{self.paths[k]}: token {int(part[bad]) & 0xFFFF} at position {a + bad} is outside the "
                              f"vocabulary of {self.vocab_size}; were these shards made with another tokenizer?")
            starts += ((part == eod).nonzero().flatten() + (self.starts[k] + a)).tolist()
        self.indexed[k, eod_id] = starts
        return starts

    def document_hashes(self, k: int, eod_id: int, length: int = 64) -> Tensor:
        """A number for the first tokens of each document of shard k that is longer than length."""
        starts = torch.tensor(self.document_starts(k, eod_id), dtype=torch.int64) - self.starts[k]
        starts = starts[starts.diff(append=torch.tensor([len(self.shard(k))])) > length]
        odd = torch.randint(-2 ** 62, 2 ** 62, (length,), generator=torch.Generator().manual_seed(0)) * 2 + 1
        return (self.shard(k)[starts[:, None] + 1 + torch.arange(length)] * odd).sum(1)


class Position(NamedTuple):
    """Where the data stands between two steps: what is left of a cut document, and where the next one starts."""
    epoch: int = 0
    start: int = 0                           # of the piece carried over; start == stop: none
    stop: int = 0
    next_document: int = 0
    dropped_tokens: int = 0                  # cut off by clipping, so far


class Planner:
    """Which spans of the stream go into which row, from the stream alone: the same for any number of ranks."""
    def __init__(self, stream: TokenStream, eod_id: int, position: Position = Position()):
        self.stream, self.eod_id, self.position = stream, eod_id, position
        self.docs = self.documents(position.epoch, position.next_document)

    def documents(self, epoch: int, pending: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, stop) of each document from position pending on. Later passes begin at an eod_id, if any."""
        starts, last = self.stream.starts, self.stream.num_tokens - 1      # the last token has no successor
        while True:
            for k in range(max(0, bisect.bisect_right(starts, pending) - 1), len(starts) - 1):
                for start in self.stream.document_starts(k, self.eod_id):
                    if start > pending:
                        yield epoch, pending, min(start, last)
                        pending = start
            if pending < last:
                yield epoch, pending, last
            first = next((a for k in range(len(starts) - 1) for a in self.stream.document_starts(k, self.eod_id)), 0)
            epoch, pending = epoch + 1, first % last               # else it would go on from the end of this pass

    def rows(self, num_rows: int, row_tokens: int, max_doc_tokens: int = 0) -> list[list[tuple[int, int]]]:
        """The next rows, each a list of (start, stop) with row_tokens in all: documents in order, each clipped to
        max_doc_tokens (0: not at all); one that a row's end cuts goes on in the next row."""
        rows = []
        for _ in range(num_rows):
            row, free = [], row_tokens
            while free:
                p = self.position
                if p.start == p.stop:
                    epoch, start, end = next(self.docs)
                    stop = min(end, start + max_doc_tokens) if max_doc_tokens else end
                    p = self.position = Position(epoch, start, stop, end, p.dropped_tokens + end - stop)
                upto = min(p.stop, p.start + free)
                if row and row[-1][1] == p.start:
                    row[-1] = row[-1][0], upto
                else:
                    row.append((p.start, upto))
                free -= upto - p.start
                self.position = p._replace(start=upto)
            rows.append(row)
        return rows


class Batch(NamedTuple):
    """This rank's rows of one step, int32 [rows, T], and where the data stands after it."""
    inputs: Tensor
    targets: Tensor
    position: Position


def fill_row(stream: TokenStream, spans: list[tuple[int, int]], inputs: Tensor, targets: Tensor) -> None:
    """Inputs are the spans' tokens, targets their true successors in the stream."""
    at, both = 0, torch.empty(len(inputs) + 1, dtype=torch.int32)
    for start, stop in spans:
        length = stop - start
        stream.read(start, stop + 1, both[:length + 1])
        inputs[at:at + length], targets[at:at + length] = both[:length], both[1:length + 1]
        at += length


def batches(planner: Planner, plan: Iterable[tuple[int, int]], row_tokens: int, rank: int, size: int,
            pinned: bool = False, ahead: int = 32) -> Iterator[Batch]:
    """One Batch for each (rows over all ranks, max_doc_tokens) of the plan, prepared ahead by a thread.
    Row i of n goes to rank i // (n / size). Errors of the thread are raised here."""
    def prepare(num_rows: int, max_doc_tokens: int) -> Batch:
        rows = planner.rows(num_rows, row_tokens, max_doc_tokens)
        mine = rows[rank * num_rows // size:(rank + 1) * num_rows // size]
        both = torch.empty(2, len(mine), row_tokens, dtype=torch.int32, pin_memory=pinned)
        for i, spans in enumerate(mine):
            fill_row(planner.stream, spans, both[0, i], both[1, i])
        return Batch(both[0], both[1], planner.position)
    with ThreadPoolExecutor(1) as pool:
        futures = (pool.submit(prepare, *item) for item in plan)
        waiting = deque(itertools.islice(futures, ahead + 1))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(futures, 1))


def validation_rows(stream: TokenStream, num_targets: int, row_tokens: int, overlap: int, num_rows: int, eod_id: int,
                    rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Targets 1..num_targets of the stream, each once, in batches [num_rows, T]; batch i goes to rank i % size.
    A row begins overlap tokens before its first target that counts; targets there and in what is filled up are -1."""
    firsts = range(0, num_targets, row_tokens - overlap)
    for k in range(rank * num_rows, len(firsts), size * num_rows):
        inputs, targets = torch.full((2, num_rows, row_tokens), eod_id, dtype=torch.int32)
        targets.fill_(-1)
        for i, first in enumerate(firsts[k:k + num_rows]):
            start, stop = max(0, first - overlap), min(first + firsts.step, num_targets)
            fill_row(stream, [(start, stop)], inputs[i, :stop - start], targets[i, :stop - start])
            targets[i, :first - start] = -1
        yield inputs, targets


# ----------------------------------------------------------------------------------------------------------------------
# 7. Schedules
# Tables of stages and pure functions of the step. No tensors, no devices.

class Stage(NamedTuple):
    """A part of the run. until is the fraction of num_steps at which it ends."""
    until: float
    max_doc_tokens: int               # documents are clipped to it; 0: not
    window: int                       # long window, in blocks
    candidates: float                 # share of the vocabulary in the training softmax; 0: full softmax


STAGES = (
    #     until  clip  window candidates
    Stage(0.200, 896,  3,     0.2),
    Stage(0.667, 2048, 7,     0.2),
    Stage(0.920, 2048, 11,    0.2),
    Stage(1.000, 2048, 13,    0.0),
)

def stage_at(c: Config, step: int) -> Stage:
    """The stage of a step; past the end: the last one."""
    return next((stage for stage in STAGES if step < stage.until * c.num_steps), STAGES[-1])


def rows_at(c: Config, step: int) -> int:
    """Rows of the stage's share of batch_tokens; where fewer shares are given than there are stages, the last stays."""
    share = c.batch_shares[min(STAGES.index(stage_at(c, step)), len(c.batch_shares) - 1)]
    return max(1, round(c.batch_tokens // c.row_tokens * share))


def candidates_at(c: Config, step: int) -> int:
    share = stage_at(c, step).candidates
    return min(c.padded_vocab, math.ceil(share * c.padded_vocab / 128) * 128)


def lr_scale_at(c: Config, step: int) -> float:
    """Flat, then linear over the last cooldown_frac of the run to lr_floor; times the square root of the batch."""
    cooled = min(1.0, (1 - step / c.num_steps) / c.cooldown_frac) if c.cooldown_frac else 1.0
    return (rows_at(c, step) * c.row_tokens / c.batch_tokens) ** 0.5 * (cooled + (1 - cooled) * c.lr_floor)


def momentum_at(c: Config, step: int) -> float:
    """From 0.85 to 0.95 over the first quarter of the run, and back over its last 4%."""
    done = step / c.num_steps
    return 0.85 + 0.1 * min(1.0, done / 0.25, (1 - done) / 0.04)


def ema_rate_at(c: Config, step: int) -> float:
    """How far the average of the tail moves towards the weights after a step: 0 before the tail, 1 at its begin."""
    length = c.ema_frac * c.num_steps
    into = step - max(0.0, c.num_steps - 1 - length)
    return 0.0 if not c.ema_blend or into < 0 else 1.0 if into < 1 else min(1.0, 3 / length)


# ----------------------------------------------------------------------------------------------------------------------
# 8. Log and checkpoint
# The log is the record, written by rank 0. Clock. Checkpoints: files of torch.distributed.checkpoint, facts as JSON.

FENCE = "=" * 100

class RunLog:
    """Writes log_dir/<run_id>.txt on rank 0 and mirrors events to the console. A full disk is said once."""
    def __init__(self, log_dir: str, world: World):
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.run_id, self.path, self.file = f"{stamp}_{uuid.uuid4().hex[:8]}", None, None
        if world.rank == 0:
            try:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
                self.path = Path(log_dir) / f"{self.run_id}.txt"
                self.file = self.path.open("w", encoding="utf-8")
            except OSError as error:
                raise Refusal(f"--log_dir={log_dir}: can't be written ({error.strerror}); name another one") from None

    def write(self, text: str) -> None:
        if self.file is not None:
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except OSError as error:
                self.file = None
                print(f"warn: {self.path}: log lost ({error.strerror}); training goes on", file=sys.stderr)

    def header(self, source: str, facts: dict) -> None:
        """Source, fence, facts as one JSON line, nvidia-smi where there is one, fence."""
        self.write(source + FENCE + "\n" + json.dumps({"format": 1, "run_id": self.run_id, **facts}))
        if smi := run_quietly("nvidia-smi"):
            self.write(smi)
        self.write(FENCE)

    def event(self, text: str) -> None:
        self.write(text)
        if self.path:
            with contextlib.suppress(BrokenPipeError):           # train_gpt.py | head
                print(text, flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def fingerprint(path: str) -> str:
    """First 16 hex digits of the sha256 over header, first and last MiB: names a file, for data/verify.py to check."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(1024 + 2 ** 20))
        file.seek(max(0, os.path.getsize(path) - 2 ** 20))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def run_quietly(*command: str) -> str:
    """Standard output of a command, or an empty text when it can't run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def process_age_s() -> float:
    """Seconds since this process started (Linux; elsewhere the CPU time it took)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


class Clock:
    """Honest time: starts and pauses with a device synchronisation; steps are timed by events, read one step late."""
    def __init__(self, device: torch.device):
        self.cuda, self.device = device.type == "cuda", device
        self.total_ms, self.since, self.last = 0.0, None, None
        self.step_ms, self.open = [], []                 # finished steps; (event, event) of the others

    def synchronize(self) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def stamp(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resume(self) -> None:
        self.since, self.last = self.synchronize(), self.stamp()

    def pause(self) -> None:
        now = self.synchronize()
        self.collect()
        self.total_ms, self.since = self.total_ms + 1e3 * (now - self.since), None

    def step_done(self) -> None:
        before, self.last = self.last, self.stamp()
        self.open.append((before, self.last))

    def collect(self, keep: int = 0) -> None:
        """Move finished step times into step_ms, all but the last keep; waits for the device where it must."""
        while len(self.open) > keep:
            a, b = self.open.pop(0)
            if self.cuda:
                b.synchronize()
            self.step_ms.append(a.elapsed_time(b) if self.cuda else 1e3 * (b - a))

    def elapsed_ms(self) -> float:
        return self.total_ms + (1e3 * (time.perf_counter() - self.since) if self.since is not None else 0.0)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """Writes folder/step_N in the background, named so when whole; keeps two. A failure is said; training goes on."""
    def __init__(self, folder: Path, log: RunLog):
        self.folder, self.log, self.last, self.pool, self.pending = folder, log, None, ThreadPoolExecutor(1), []

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict) -> None:
        """Write tensors (on the CPU, no one else's) while training goes on, once the write before has ended."""
        self.finish()
        if self.last != self.folder / f"step_{step:06d}":      # the target may be met right after a checkpoint
            self.pending.append(self.pool.submit(self.write, f"step_{step:06d}", tensors, facts))

    def finish(self) -> None:
        while self.pending:
            self.pending.pop().result()

    def write(self, name: str, tensors: dict[str, Tensor], facts: dict) -> None:
        from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
        part, whole = self.folder / f"writing_{name}", self.folder / name
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            save(tensors, storage_writer=FileSystemWriter(part), no_dist=True)
            body = json.dumps(facts | dict(files={file.name: sha256_of(file) for file in sorted(part.iterdir())}))
            with (part / "checkpoint.json").open("w", encoding="ascii") as file:
                file.write(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)
                file.flush()
                os.fsync(file.fileno())
            self.last = part.rename(whole)
            for old in sorted(self.folder.glob("step_*"))[:-2]:
                shutil.rmtree(old, ignore_errors=True)
        except (Exception, CheckpointException) as error:
            cause = next(iter(getattr(error, "failures", {0: (error,)}).values()))[0]
            why = getattr(cause, "strerror", None) or (str(cause).splitlines() or [repr(cause)])[0]
            self.log.event(f"warn: {whole}: checkpoint not written ({why}); the last good one is {self.last}")
            shutil.rmtree(part, ignore_errors=True)


def find_checkpoint(resume: str, folder: str) -> Path:
    """The folder that --resume names. Raises Refusal when there is none."""
    found = Path(folder).glob("*/step_*/checkpoint.json") if resume == "latest" else [Path(resume) / "checkpoint.json"]
    found = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise Refusal(f"--resume={resume}: no checkpoint there (a folder step_N with checkpoint.json; in {folder}/*/)")
    return found[-1].parent


def read_checkpoint(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors by "PARAMETER/KIND"). Raises Refusal that names the file when a byte is wrong."""
    from torch.distributed.checkpoint import FileSystemReader, load
    place = Path(folder) / "checkpoint.json"
    try:
        digest, _, body = place.read_bytes().partition(b"\n")
        facts = json.loads(body) if hashlib.sha256(body).hexdigest().encode() == digest else None
        for name in facts["files"] if facts else [""]:
            place = Path(folder) / name if facts else place
            if not facts or sha256_of(place) != facts["files"][name]:
                raise Refusal(f"{place}: damaged (its checksum differs); take another checkpoint")
    except OSError as error:
        raise Refusal(f"{place}: can't be read ({error.strerror})") from None
    reader = FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(info.size, dtype=info.properties.dtype) for key, info in found.items()}
    with warnings.catch_warnings(action="ignore"):         # "no process group": each rank reads for itself
        load(tensors, storage_reader=reader, no_dist=True)
    return facts, tensors


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The list that the first SIGTERM or SIGINT enters; a second one acts as it did before."""
    seen, before = [], {}
    def restore(*number_and_frame) -> None:
        seen.extend(number_and_frame[:1])
        while before:
            signal.signal(*before.popitem())
    with contextlib.suppress(ValueError):                  # only the main thread may install handlers
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, restore)
    try:
        yield seen
    finally:
        restore()


def need_finite(where: str, values: dict[str, float]) -> None:
    if bad := [name for name, value in values.items() if not math.isfinite(value)]:
        raise Failure(f"{where}: not a finite number: {', '.join(bad)}. Lower the learning rates, or look at the data")


PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "4090": 165, "L40S": 362}    # dense bf16
class Progress:
    """Train lines from numbers that are copied off the device and read one step late, so that no step waits."""
    def __init__(self, c: Config, log: RunLog, clock: Clock, banks: list[str], header: dict):
        self.config, self.log, self.clock = c, log, clock
        peak = next((1e12 * t for key, t in PEAK_TFLOPS.items() if key in header["devices"][0]), None)
        self.flops_per_token = peak and 6 * header["parameters"]["matmul"] / peak / header["world_size"]  # of the peak
        self.names = ["loss", *(f"gradient of {bank}" for bank in banks)]
        self.waiting, self.tokens, self.stopping = None, 0, False

    def push(self, step: int, tokens: int, lr: float, stats: Tensor) -> None:
        """Keep this step's stats (loss, squared norms, stop), copied before clock.last; look at the step before."""
        self.tokens += tokens
        self.look((step, tokens, self.tokens, lr, stats, self.clock.last))

    def mfu(self, tokens: float, ms: float) -> float | None:
        """Model FLOP/s utilisation: 6 x matmul parameters x tokens / time / dense bf16 peak."""
        return self.flops_per_token * tokens / ms * 1e3 if self.flops_per_token else None

    def look(self, new: tuple | None = None) -> None:
        """Write the line of the step that waits, when it is due. Raises Failure for what is not finite in it."""
        item, self.waiting = self.waiting, new
        if item is None:
            return
        step, tokens, so_far, lr, stats, event = item
        if self.clock.cuda:
            event.synchronize()
        need_finite(f"step {step + 1}", dict(zip(self.names, stats.tolist())))
        self.stopping = bool(stats[-1])
        self.clock.collect(keep=1)
        c, done = self.config, step + 1
        if done % c.log_every_steps == 0 or done == 1:
            times = self.clock.step_ms[-c.log_every_steps:] or [math.nan]
            ms = sum(times) / len(times)
            mfu = f"mfu:{self.mfu(tokens, ms):.3f} " if self.flops_per_token else ""
            self.log.event(
                f"step:{done}/{c.num_steps} train_loss:{stats[0]:.4f} train_time:{self.clock.elapsed_ms():.0f}ms "
                f"step_avg:{ms:.2f}ms tokens_per_s:{tokens / ms * 1e3:.0f} {mfu}lr:{lr:.4f} tokens:{so_far}")


# ----------------------------------------------------------------------------------------------------------------------
# 9. Training
# Build, warm up, train, evaluate; then the guards. The timed region stands between clock.resume() and
# clock.pause().

@dataclass
class Run:
    """All that a run holds. train_stream and val_stream are memory-mapped; position is where the data
    stands."""
    config: Config
    world: World
    kernels: Kernels
    model: GPT
    optimizer: Optimizer
    train_stream: TokenStream
    val_stream: TokenStream
    micro_rows: int
    position: Position = Position()


def build(c: Config, world: World, overrides: dict) -> Run:
    """Check everything that can be checked cheaply, then make model and optimizer. Raises Refusal."""
    c, train_stream, val_stream = open_data(c, overrides)
    # validation has the last stage's shape
    row_counts = {rows_at(c, step) for step in range(c.num_steps + 1)}
    divisor = math.gcd(*row_counts)
    if divisor % world.size != 0:
        legal = ", ".join(str(n) for n in range(1, divisor + 1) if divisor % n == 0)
        raise Refusal(f"{world.size} processes can't share {sorted(row_counts)} rows "
                      "(batch_tokens / row_tokens ="
                      f" {c.batch_tokens} / {c.row_tokens}) evenly; legal counts: {legal} "
                      "(--nproc_per_node or NPROC)")
    budget(c, train_stream)
    kernels = choose_kernels(world.device, c.compile, c.attention, c.fp8, c.fits_flex)
    if kernels.compile and not world.is_cuda and not find_compiler():
        raise Refusal("--compile=on: no C compiler was found, which it needs; install one (gcc) or use "
                      "--compile=off")
    check_memory(c, world, kernels)
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(c.seed)
    with torch.device(world.device):
        model = GPT(c, kernels)
    groups = [Group(**group) for group in param_groups(c, model)]
    optimizer = Optimizer(groups, world, kernels.compile and world.is_cuda, kernels.dtype)
    return Run(c, world, kernels, model, optimizer, train_stream, val_stream, c.micro_rows or max(row_counts))


def train_view(run: Run, step: int) -> View:
    """What the step asks of the model, for this rank's first rows. Rows are numbered over all steps and
    ranks; the spare number keeps steps apart that round their rows up."""
    c, world = run.config, run.world
    rows_per_step = c.batch_tokens // c.row_tokens + 1
    first_row = step * rows_per_step + world.rank * rows_at(c, step) // world.size
    return View(stage_at(c, step).window, candidates_at(c, step), first_row, training=True)


def rows_at_once(run: Run, step: int) -> int:
    """Rows of a micro-batch: this rank's rows in equal parts, at most run.micro_rows."""
    rows = rows_at(run.config, step) // run.world.size
    return max(n for n in range(1, min(run.micro_rows, rows) + 1) if rows % n == 0)


def train_step(run: Run, step: int, batch: Batch, lr_scale: float, stop: int = 0) -> Tensor:
    """All micro-batches, one update. -> mean loss (over candidates), squared gradient norms, sum of all
    ranks' stop."""
    c, world = run.config, run.world
    view, rows = train_view(run, step), rows_at_once(run, step)
    # of all ranks, so that parts add up to the mean
    step_tokens = rows_at(c, step) * c.row_tokens
    loss = torch.zeros((), device=world.device)
    for inputs, targets in zip(batch.inputs.split(rows), batch.targets.split(rows)):
        inputs = inputs.to(world.device, non_blocking=True)
        targets = targets.to(world.device, non_blocking=True)
        part = run.model(inputs, targets, view) / step_tokens
        part.backward()
        loss += part.detach()
        view = view._replace(row=view.row + rows)
    norms = run.optimizer.step(lr_scale, momentum_at(c, step))
    ema_rate, is_last = ema_rate_at(c, step), step == c.num_steps - 1
    if ema_rate:
        run.optimizer.average(ema_rate, c.ema_blend if is_last else 0.0)
    return world.reduced(torch.cat((loss[None], norms, loss.new_full((1,), float(stop)))))


def evaluate(run: Run) -> float:
    """Mean loss over the val_tokens targets, on all ranks. Shapes and graphs are those of the last
    stage."""
    c, world = run.config, run.world
    # sum of losses, number of targets
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for inputs, targets in validation_rows(run.val_stream, c.val_tokens, c.row_tokens, c.val_overlap,
                                           rows_at_once(run, c.num_steps), c.eod_id, world.rank, world.size):
        inputs, targets = inputs.to(world.device), targets.to(world.device)
        loss, count = run.model(inputs, targets, View(c.val_window_blocks)), (targets >= 0).sum()
        totals += torch.stack((loss.double(), count.double()))
    loss_sum, count = world.reduced(totals)
    return float(loss_sum / count)


def warmup(run: Run, log: RunLog) -> None:
    """Compile and run every shape of the schedule and of validation, at rate 0, then restore every byte."""
    c, world, banks = run.config, run.world, run.optimizer.banks
    saved = [(t, t.clone()) for bank in banks for t in bank.tensors()]
    saved_steps = [bank.steps for bank in banks]
    fit_memory(run, log)
    last_step_of_shape = {(rows_at(c, step), candidates_at(c, step)): step for step in range(c.num_steps)}
    for (num_rows, _), step in last_step_of_shape.items():
        num_tokens = num_rows // world.size * c.row_tokens
        tokens = (torch.arange(num_tokens).int() % c.vocab_size).view(-1, c.row_tokens)
        # the first step compiles; the second shows that nothing is left to
        for _ in range(2):
            train_step(run, step, Batch(tokens, tokens, run.position), 0.0)
            log.event(f"note: warm-up with {num_rows} rows, {process_age_s():.1f} s after the start")
    tokens = torch.zeros(rows_at_once(run, c.num_steps), c.row_tokens, dtype=torch.int32, device=world.device)
    run.model(tokens, tokens.clone(), View(c.val_window_blocks))
    for t, before in saved:
        t.copy_(before)
    for bank, steps in zip(banks, saved_steps):
        bank.steps = steps


def train(config: Config, world: World, log: RunLog, overrides: dict, argv: list[str]) -> dict:
    """The whole run. -> the result that the log's last line holds. Raises Refusal or Failure."""
    run = build(config, world, overrides)
    c, clock, banks = run.config, Clock(world.device), run.optimizer.banks
    header = {"run_id": log.run_id, **facts(run, overrides, argv)}
    saved = load_checkpoint(run, header) if c.resume else None
    log.header(SOURCE, header)
    log.event("note: " + budget(c, run.train_stream))
    num_parameters = header["parameters"]["total"]
    log.event(f"note: {world.size} x {world.device.type}, {num_parameters:,} parameters, {run.kernels}")
    if saved:
        same_source = saved["run"]["source_sha256"] == header["source_sha256"]
        log.event(f"note: resumed from {header['resumed_from']} at step {saved['step']}"
                  + ("" if same_source else ", written by another source"))
    if world.is_cuda:
        with compiler_beside(argv) if may_compile_beside(run) else contextlib.nullcontext():
            warmup(run, log)
    if c.self_check == "on":
        self_check(run, log)
    progress = Progress(c, log, clock, [bank.group.name for bank in banks], header)
    if saved:
        clock.total_ms, clock.step_ms, progress.tokens = saved["total_ms"], saved["step_ms"], saved["tokens"]
    store = Store(Path(c.checkpoint_dir) / log.run_id, log)
    clock.synchronize()
    time_to_first_step_s = round(process_age_s(), 2)
    log.event(f"note: time_to_first_step_s:{time_to_first_step_s}")
    with stop_signals() as signals, contextlib.ExitStack() as profiling:
        try:
            result = loop(run, progress, store, signals, profiling, header, saved["step"] if saved else 0)
        finally:
            # whatever happened: the last good checkpoint is whole
            store.finish()
    log.event(f"note: data at epoch {run.position.epoch}, {run.position.dropped_tokens:,} tokens dropped by "
              "clipping")
    need_finite(f"step {result['step']}", {f"the weights of {bank.group.name}": finite_sum(bank.weight)
                                           for bank in banks})
    faults = unequal_ranks(run) if c.self_check == "on" else []
    if faults:
        raise Failure(f"rank {world.rank}, after the last step: " + "; ".join(faults))
    ms = clock.total_ms
    result |= dict(
        train_time_ms=round(ms, 1), step_avg_ms=round(ms / max(1, result["step"]), 3),
        tokens_trained=progress.tokens,
        peak_memory_mib=torch.cuda.max_memory_allocated() // 2 ** 20 or None,
        time_to_first_step_s=time_to_first_step_s, mfu=progress.mfu(progress.tokens, ms))
    log.write("step_times_ms:" + json.dumps([round(t, 2) for t in clock.step_ms]))
    if store.last:
        log.event(f"note: let it write: python records/sample.py {store.last} 'Once upon a time'")
    log.event("result:" + json.dumps(result))
    return result


PACE_STEPS = 20                    # after so many steps the log predicts the time that the training takes
PROFILE_AFTER_STEPS = 5            # the first steps are not typical: caches are cold

def loop(run: Run, progress: Progress, store: Store, signals: list[int], profiling: contextlib.ExitStack,
         header: dict, first: int) -> dict:
    """Steps first.. of the schedule, on the clock, with validation off it. -> status, step and last
    validation. profiling holds the profiler while it runs: whoever closes it, also because the run ends,
    writes the trace."""
    c, world, log, clock = run.config, run.world, progress.log, progress.clock
    plan = [(rows_at(c, step), stage_at(c, step).max_doc_tokens) for step in range(first, c.num_steps)]
    planner = Planner(run.train_stream, c.eod_id, run.position)
    loader = batches(planner, plan, c.row_tokens, world.rank, world.size, world.is_cuda)
    is_profiled = c.profile_steps > 0 and log.path is not None
    profile_first = min(first + PROFILE_AFTER_STEPS, c.num_steps - 1)
    profile_last = min(first + PROFILE_AFTER_STEPS + c.profile_steps, c.num_steps) - 1
    result = dict(status="finished", reason="", num_steps=c.num_steps, resumed=bool(c.resume))
    clock.resume()                                        # the timed region begins
    for step in range(first, c.num_steps + 1):
        is_last = step == c.num_steps
        if is_last or (c.val_every_steps and step % c.val_every_steps == 0):
            clock.pause()                                 # validation is not timed
            progress.look()
            loss = evaluate(run)
            log.event(f"step:{step}/{c.num_steps} val_loss:{loss:.4f} train_time:{clock.total_ms:.0f}ms "
                      f"step_avg:{clock.total_ms / step if step else math.nan:.2f}ms")
            result |= dict(step=step, val_loss=loss, val_tokens=c.val_tokens)
            need_finite(f"step {step}", {"the validation loss": loss})
            if c.target_loss and loss <= c.target_loss and not is_last:
                reason = f"validation loss {loss:.4f} <= {c.target_loss}"
                result |= dict(status="target_reached", reason=reason)
                is_last = True
            if is_last:
                if c.checkpoint_every_steps:
                    save_checkpoint(run, store, step, progress, header)
                break
            clock.resume()
        if is_profiled and step == profile_first:
            profiling.enter_context(torch.profiler.profile(
                on_trace_ready=lambda p: p.export_chrome_trace(str(log.path.with_suffix(".trace.json.gz")))))
        try:
            batch = next(loader)
        except Refusal as error:
            raise Refusal(f"rank {world.rank}, step {step + 1}: {error}") from None
        run.position, lr_scale = batch.position, lr_scale_at(c, step)
        stats = train_step(run, step, batch, lr_scale, len(signals)).to("cpu", non_blocking=True)
        clock.step_done()                                 # its event also says that the copy has arrived
        progress.push(step, rows_at(c, step) * c.row_tokens, lr_scale, stats)
        if step == first + PACE_STEPS < c.num_steps - PACE_STEPS:
            tokens_to_go = sum(rows for rows, _ in plan[PACE_STEPS + 1:]) * c.row_tokens
            ms_to_go = clock.elapsed_ms() / progress.tokens * tokens_to_go
            seconds = (clock.elapsed_ms() + ms_to_go) / 1e3
            log.event(f"note: at this pace the training takes about {seconds:.0f} s")
        if is_profiled and step == profile_last:
            profiling.close()
        # of the step before, so all ranks stop after the same step
        if progress.stopping:
            clock.pause()
            result |= save_and_stop(run, progress, store, signals, header, step + 1)
            break
        if c.checkpoint_every_steps and (step + 1) % c.checkpoint_every_steps == 0 and step + 1 < c.num_steps:
            save_checkpoint(run, store, step + 1, progress, header)
    loader.close()
    return result


def save_and_stop(run: Run, progress: Progress, store: Store, signals: list[int], header: dict,
                  step: int) -> dict:
    """A signal came, to this rank or another: save a checkpoint. -> what the result then says."""
    began, number = time.perf_counter(), signals[0] if signals else signal.SIGTERM
    save_checkpoint(run, store, step, progress, header)
    store.finish()
    if run.world.size > 1:
        # a launcher kills the others soon after the first has left
        dist.barrier()
    advice = f"go on with --resume={store.last}" if store.last else "no checkpoint was written"
    reason = f"{signal.Signals(number).name}; {advice}"
    progress.log.event(f"note: {reason} (checkpoint took {time.perf_counter() - began:.2f} s)")
    return dict(status="stopped", step=step, val_loss=None, signal=number, reason=reason)


# What follows only guards and keeps: data, memory, self-check, header, checkpoints, the compiler's helper.
# A reader who wants to change what is trained, or how, needs none of it.

def open_data(c: Config, overrides: dict) -> tuple[Config, TokenStream, TokenStream]:
    """-> config with what the data says, training stream, validation stream. Raises Refusal."""
    train_paths, val_paths = find_shards(c.train_files, "train"), find_shards(c.val_files, "val")
    c = adopt_dataset(c, overrides, train_paths, val_paths)
    train_stream, val_stream = TokenStream(train_paths, c.vocab_size), TokenStream(val_paths, c.vocab_size)
    available = val_stream.num_tokens - 1
    if c.val_tokens > available:
        raise Refusal(f"--val_tokens={c.val_tokens}: validation shards hold {available + 1:,} tokens, at most "
                      f"{available:,} targets; expected --val_tokens=0 (all) or fewer")
    for k in range(len(val_paths)):
        val_stream.document_starts(k, c.eod_id)          # raises on ids out of range
    train_stream.document_starts(0, c.eod_id)
    return dataclasses.replace(c, val_tokens=c.val_tokens or available), train_stream, val_stream


def adopt_dataset(c: Config, overrides: dict, train: list[str], val: list[str]) -> Config:
    """Vocabulary and end-of-document id as the shards' dataset.json says. Raises Refusal on any
    contradiction."""
    cards = [card for card in map(dataset_card, (train, val)) if card]
    if cards and cards[0] != cards[-1]:
        raise Refusal(f"train and validation shards were made differently: {cards[0]} and {cards[1]}")
    same = set(train) & set(val) or {fingerprint(p) for p in train} & {fingerprint(p) for p in val}
    if same:
        raise Refusal(f"train_files and val_files overlap ({', '.join(sorted(same))}): such a loss would mean "
                      "nothing")
    given = {key: cards[0][key] for key in ("vocab_size", "eod_id")} if cards else {}
    for key, value in given.items():
        if overrides.get(key, value) != value:
            raise Refusal(f"--{key}={overrides[key]}: the dataset.json beside the shards says {value}")
    c = dataclasses.replace(c, **given)
    check_config(c)
    return c


def budget(c: Config, stream: TokenStream) -> str:
    """Tokens needed against tokens there, in words. Raises Refusal when max_epochs doesn't suffice.
    What clipping drops is estimated from the documents of the first shard."""
    available = stream.num_tokens - 1
    starts = stream.document_starts(0, c.eod_id)
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], stream.starts[1]])] or [available]
    clips = {stage_at(c, step).max_doc_tokens for step in range(c.num_steps)}
    kept_fraction = {clip: sum(min(n, clip or n) for n in lengths) / sum(lengths) for clip in clips}
    needed = sum(rows_at(c, step) * c.row_tokens / kept_fraction[stage_at(c, step).max_doc_tokens]
                 for step in range(c.num_steps))
    text = f"data: the schedule needs about {needed:,.0f} tokens (clipped tails included), " \
           f"{available:,} are there"
    epochs = needed / available
    if epochs > c.max_epochs:
        shard_tokens = 100e6
        more = math.ceil((needed - available * c.max_epochs) / c.max_epochs / shard_tokens)
        raise Refusal(f"{text}: {epochs:.2f} epochs, allowed {c.max_epochs}. Add about {more} shard(s) of "
                      "100M tokens (python data/cached_fineweb10B.py) or allow repetition with "
                      f"--max_epochs={math.ceil(epochs)}")
    verdict = "enough" if epochs <= 1 else f"wraps, {epochs:.2f} epochs"
    return f"{text}: {verdict}"


# numbers in its largest part: not counted, as counting costs a CPU run a second
SMALL_MODEL = 10 ** 8

def check_memory(c: Config, world: World, kernels: Kernels) -> None:
    """Raises Refusal when model and optimizer certainly don't fit, before a byte of them is allocated.
    Parameters are counted on the meta device. Each takes its weight, its gradient and, shared by the ranks,
    8 bytes of averages; a row of the table its weights and 8 bytes. Activations come on top."""
    largest = max(len(c.table_orders) * c.table_rows, (2 + len(c.value_layers)) * c.vocab_size,
                  c.num_layers * c.mlp_dim)
    if c.model_dim * largest < SMALL_MODEL:
        return
    with torch.device("meta"):
        model = GPT(c, Kernels(dtype=kernels.dtype))
    table = model.ngrams
    dense = [p for p in model.parameters() if p is not table]
    needed = table.nbytes + 8 * len(table) + sum(2 * p.nbytes + 8 * p.numel() / world.size for p in dense)
    free = free_bytes(world)
    if needed > free:
        count = table.numel() + sum(p.numel() for p in dense)
        raise Refusal(f"--preset={c.preset}: {count:,} parameters need at least {needed / 1e9:.1f} GB on each "
                      f"rank, {free / 1e9:.1f} are free; use a smaller --table_rows, --model_dim or --num_layers")


def free_bytes(world: World) -> float:
    """What this rank may still allocate: on its GPU, else in main memory. Infinite where the system doesn't
    say."""
    if world.is_cuda:
        return torch.cuda.mem_get_info()[0]
    free = math.inf
    with contextlib.suppress(OSError, ImportError, TypeError):
        import resource                                   # Unix only
        meminfo, statm = Path("/proc/meminfo").read_text(), Path("/proc/self/statm").read_text()
        free = 1024 * int(re.search(r"MemAvailable: *(\d+)", meminfo)[1])
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]               # ulimit -v
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - int(statm.split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return free


def fit_memory(run: Run, log: RunLog) -> None:
    """Forward and backward of the largest micro-batch. Out of memory: fewer rows at once (auto), or a
    Failure."""
    c = run.config
    step = max(range(c.num_steps, -1, -1), key=lambda step: rows_at_once(run, step))
    rows_of_rank = rows_at(c, step) // run.world.size
    divisors = [n for n in range(rows_at_once(run, step), 0, -1) if rows_of_rank % n == 0]
    for rows, fewer in zip(divisors, [*divisors[1:], None]):
        run.micro_rows = rows
        if fits(run, step):
            return
        found = f"out of memory with {rows} rows of {c.row_tokens} tokens at once"
        if c.micro_rows or fewer is None:
            break
        log.event(f"note: {found}: trying micro_rows={fewer}")
    advice = "use a smaller --row_tokens" if fewer is None else f"use --micro_rows={fewer}, or auto"
    raise Failure(f"{found}: {advice}")


def fits(run: Run, step: int) -> bool:
    """Whether all ranks have memory for forward and backward of one micro-batch of the step."""
    device = run.world.device
    out_of_memory = torch.zeros((), device=device)
    tokens = torch.zeros((rows_at_once(run, step), run.config.row_tokens), dtype=torch.int32, device=device)
    try:
        # one tensor twice would be another graph
        run.model(tokens, tokens.clone(), train_view(run, step)).backward()
    except torch.OutOfMemoryError:
        out_of_memory += 1
    for bank in run.optimizer.banks:
        bank.zero_grad()
    return not run.world.reduced(out_of_memory)


# relative: what can't be seen takes no part in a sum, so numerics leave no trace
SELF_CHECK_TOLERANCE = 1e-6
SHORT_DOCUMENT = 13                # tokens; odd, so that all alignments to groups of 2^n tokens are met

class Case(NamedTuple):
    """An experiment on all documents of a micro-batch at once; masks over its rows * T positions."""
    what: str                      # is changed
    changed: Tensor
    scored: Tensor                 # whose losses are summed; each is of the true next token before the change
    must_move: bool                # this sum has to move; else it may not


def probe_cases(num_tokens: int, block: int, offset: int,
                generator: torch.Generator) -> tuple[Tensor, list[Case]]:
    """-> where documents start [num_tokens], and the cases. Each document has a cut: a position before
    which nothing may be seen of what stands from there on. The first half of the tokens goes to short
    documents, with cuts at all alignments; a quarter to documents of several blocks; the rest to one that
    spans many."""
    blocks = 5 * block // 2 + 1
    gaps = [SHORT_DOCUMENT] * (num_tokens // 2 // SHORT_DOCUMENT) + [blocks] * (num_tokens // 4 // blocks)
    gaps = torch.tensor([*gaps, num_tokens // 8], device=generator.device)             # between cuts
    cuts = 1 + offset + F.pad(gaps.cumsum(0), (1, 0))
    prefixes = 1 + torch.rand(len(gaps), generator=generator, device=generator.device) * (gaps - 1)
    starts = cuts[1:] - prefixes.long()                  # each between the cut before and its own
    position = torch.arange(num_tokens, device=generator.device)
    document = torch.searchsorted(starts, position, right=True)
    is_start, is_later, is_odd = torch.isin(position, starts), position >= cuts[document], document % 2 == 1
    return is_start, [Case("another document", is_odd & ~is_start, ~is_odd, False),
                      Case("later tokens", is_later, ~is_later, False),
                      Case("their own context", ~is_later & ~is_start, is_later, True)]


def open_all_paths(run: Run, batches_of_tokens: list[Tensor], generator: torch.Generator) -> list[tuple]:
    """Makes all parameters random and of order one, of the table the rows that the model looks up for these
    tokens. -> (weight, place in it, what stood there) of all that was changed."""
    model, table, eod_id = run.model, run.model.ngrams, run.config.eod_id
    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    for tokens in batches_of_tokens:
        model.look_up(tokens, segment_ids(tokens, eod_id), True)
    nobody = len(table) - 1
    rows = torch.cat([ids.flatten() for ids, _ in table.touched]).unique()
    rows = rows[rows < nobody]
    table.touched.clear()
    places = [(bank.weight, slice(None)) for bank in run.optimizer.banks if bank.group.kind != "rows"]
    places.append((table.data, rows))
    saved = [(weight, place, weight[place].clone()) for weight, place in places]
    for p in model.parameters():
        if p is not table:
            p.data.copy_(random(p) * p.size(-1) ** -0.5 if p.ndim > 1 else 0.5 + 0.2 * random(p))
    table.data[rows] = random(table[rows])
    return saved


def probe(run: Run) -> list[str]:
    """What is wrong with the validation pass (compiled as it will be): predictions move that may not, or
    none does. No path can be missed, because none is looked for. Whatever way leads from a changed token to
    a prediction, the prediction moves, unless something on that way is zero or saturated: so all parameters
    are made random and of order one, whichever the model has. Ids are drawn as text has them, a few often
    and many seldom, so that both copies and the softmax decide losses. The last case shows that the eye is
    open. Weights are restored."""
    c, device = run.config, run.world.device
    num_rows = rows_at_once(run, c.num_steps)
    num_tokens = num_rows * c.row_tokens
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randperm(c.vocab_size, generator=generator, device=device).int()
    ids = ids[ids != c.eod_id]
    if len(ids) < 2:
        return []                                        # no token can be changed into another
    faults = {}
    rounds = min(SHORT_DOCUMENT, math.ceil(4 * SHORT_DOCUMENT * c.block_tokens / num_tokens))
    # several where a micro-batch has too few short documents
    for offset in range(rounds):
        is_start, cases = probe_cases(num_tokens, c.block_tokens, offset, generator)
        # Zipf's law
        index = (len(ids) ** torch.rand(num_tokens, generator=generator, device=device)).long() - 1
        other = index + torch.randint(1, len(ids), (num_tokens,), generator=generator, device=device)
        base, other = (ids[which % len(ids)].masked_fill(is_start, c.eod_id) for which in (index, other))
        changed = [torch.where(case.changed, other, base) for case in cases]
        base, *changed = [tokens.view(num_rows, c.row_tokens) for tokens in (base, *changed)]
        saved = open_all_paths(run, [base, *changed], generator)
        for case, tokens in zip(cases, changed):
            targets = torch.where(case.scored, base.flatten().roll(-1), -1).view_as(base)
            before, after = (float(run.model(t, targets, View(c.val_window_blocks))) for t in (base, tokens))
            moved = abs(after / before - 1)
            has_moved = not moved <= SELF_CHECK_TOLERANCE          # so that a NaN counts as moved
            if has_moved != case.must_move:
                faults[case.what] = f"{case.what} changed, and the loss moved by {moved:.2g} of itself"
        for weight, place, was in saved:
            weight[place] = was
    return list(faults.values())


def unequal_ranks(run: Run) -> list[str]:
    """Banks whose weights differ between the ranks. Bits are summed as integers, which takes no copy of a
    table."""
    sums = torch.stack([bank.weight.view(torch.int64).sum() for bank in run.optimizer.banks])
    highest, minus_lowest = run.world.reduced(torch.stack((sums, -sums)), dist.ReduceOp.MAX).tolist()
    return [f"the ranks hold different weights in {bank.group.name}"
            for bank, high, minus_low in zip(run.optimizer.banks, highest, minus_lowest) if high != -minus_low]


MAX_KNOWN_SHARE = 0.05             # of validation documents that begin (64 tokens) like a training document

def self_check(run: Run, log: RunLog) -> None:
    """Would the numbers of this run mean anything? Raises Failure. Leaves all state as it was."""
    began, c, train, val = time.perf_counter(), run.config, run.train_stream, run.val_stream
    faults = probe(run) + unequal_ranks(run)
    held_out = torch.cat([val.document_hashes(k, c.eod_id) for k in range(len(val.paths))])
    known = int(torch.isin(held_out, train.document_hashes(0, c.eod_id)).sum())
    if known > MAX_KNOWN_SHARE * len(held_out):
        faults.append(f"{known} of {len(held_out)} validation documents begin like one of {train.paths[0]}")
    if faults:
        raise Failure(f"rank {run.world.rank}: self-check: " + "; ".join(faults))
    log.event(f"note: self-check passed in {time.perf_counter() - began:.2f} s: causal, documents isolated, "
              f"ranks equal, {known} of {len(held_out)} validation documents begin like one of the first "
              "training shard")


def facts(run: Run, overrides: dict, argv: list[str]) -> dict:
    """The log's header: everything needed to judge and repeat the run (what fits into memory is found
    later)."""
    c, world = run.config, run.world
    def files_of(stream: TokenStream) -> dict:
        files = [dict(file=os.path.basename(path), bytes=os.path.getsize(path), tokens=stop - start,
                      fingerprint=fingerprint(path))
                 for path, start, stop in zip(stream.paths, stream.starts, stream.starts[1:])]
        return dict(tokens=stream.num_tokens, files=files)
    card = dataset_card(run.train_stream.paths) or {}
    processor = platform.processor() or platform.machine()
    device = torch.cuda.get_device_name(world.device) if world.is_cuda else processor
    groups = [bank.group for bank in run.optimizer.banks]
    sizes = {group.name: sum(p.numel() for p in group.params.values()) for group in groups}
    matmul = sum(sizes[group.name] for group in groups if group.kind == "muon" or group.name == "head")
    stages = dict.fromkeys(stage_at(c, step) for step in range(c.num_steps))
    return dict(
        name=c.preset, started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        seed=c.seed,
        config=dataclasses.asdict(c), stages=[stage._asdict() for stage in stages], overrides=overrides,
        argv=argv,
        devices=[device] * world.size, world_size=world.size, resumed_from=None,
        source_sha256=hashlib.sha256(SOURCE.encode()).hexdigest(), versions=software_versions(world),
        micro_rows=run.micro_rows, kernels={key: str(value) for key, value in run.kernels._asdict().items()},
        data=dict(train=files_of(run.train_stream), val=files_of(run.val_stream),
                  tokenizer=card.get("tokenizer")),
        git=git_state() if world.rank == 0 else {},
        parameters=sizes | dict(total=sum(sizes.values()), matmul=matmul))


def software_versions(world: World) -> dict:
    from importlib import metadata
    triton = nccl = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        triton = metadata.version("triton")
    if world.is_cuda and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda, triton=triton,
                nccl=nccl, hip=torch.version.hip, os=platform.platform(), threads=torch.get_num_threads())


def git_state() -> dict:
    """Commit, and whether tracked files differ from it; "unknown" where git says nothing. Writes nothing
    into .git."""
    state = run_quietly("git", "-C", str(Path(__file__).parent), "--no-optional-locks", "status", "--porcelain=v2",
                        "--branch", "--untracked-files=no").splitlines()
    commits = [line.split()[-1] for line in state if line.startswith("# branch.oid ")]
    if not commits:
        return dict(commit="unknown", dirty="unknown")
    return dict(commit=commits[0], dirty=any(not line.startswith("#") for line in state))


def identity(header: dict, tensors: Iterable[tuple[str, Tensor]]) -> dict:
    """What a checkpoint and the run that resumes from it must have in common, in JSON's types."""
    settings = {key: value for key, value in header["config"].items() if key not in RESUME_MAY_CHANGE}
    same = {f"setting {key}": value for key, value in settings.items()}
    same |= {f"stage {number}": stage for number, stage in enumerate(header.get("stages", []), 1)}
    for split in ("train", "val"):
        same |= {f"{split} file {number}": f"{file['file']} ({file['fingerprint']}, {file['tokens']} tokens)"
                 for number, file in enumerate(header["data"][split]["files"], 1)}
    same |= {f"shape of {key}": list(t.shape) for key, t in tensors}
    return json.loads(json.dumps(same))


def finite_sum(t: Tensor) -> float:
    """The sum, which is finite where all of t is, without a copy of the table."""
    return float(t.sum(dtype=torch.float32))


def save_checkpoint(run: Run, store: Store, step: int, progress: Progress, header: dict) -> None:
    """Start a checkpoint of this moment. Raises Failure, on all ranks, when a number of it is not
    finite."""
    progress.clock.collect()
    progress.look()
    tensors = {}
    for key, t in run.optimizer.gathered():
        need_finite(f"step {step}", {key: finite_sum(t)})
        if run.world.rank == 0:
            tensors[key] = t.to("cpu", copy=True)
    if run.world.rank == 0:
        store.save(step, tensors, dict(
            format=1, step=step, tokens=progress.tokens, position=run.position, run=header,
            total_ms=progress.clock.elapsed_ms(), step_ms=list(progress.clock.step_ms),
            bank_steps={bank.group.name: bank.steps for bank in run.optimizer.banks}))


def load_checkpoint(run: Run, header: dict) -> dict:
    """Take over the checkpoint that --resume names. -> its facts. Raises Refusal, before anything is
    changed."""
    path = find_checkpoint(run.config.resume, run.config.checkpoint_dir)
    saved, tensors = read_checkpoint(path)
    then, now = identity(saved["run"], tensors.items()), identity(header, run.optimizer.gathered())
    for key in [*then, *now]:
        if then.get(key) != now.get(key):
            raise Refusal(f"--resume={path}: {key} differs: {then.get(key, 'nothing')} in the checkpoint, "
                          f"{now.get(key, 'nothing')} in this run")
    run.optimizer.load(tensors, saved["bank_steps"])
    run.position, header["resumed_from"] = Position(*saved["position"]), str(path)
    return saved


# measured: training with a row at once, and the helper beside it
COMPILER_BYTES_PER_ROW = 24 * 2 ** 30
# the word behind the file's name that makes a process such a helper
COMPILE_BESIDE = "compile-beside"

def may_compile_beside(run: Run) -> bool:
    """Whether a second process shall compile what follows the blocks while this one compiles the blocks.
    One on each host does, as they share a cache on disk. Not in a deterministic run, whose graphs are
    others. The helper holds a model of its own on the same GPU, so there must be memory for both; a run
    whose micro_rows are still to be found out (0) does without, as the helper would take the memory that is
    being measured."""
    needed = COMPILER_BYTES_PER_ROW * run.config.micro_rows
    is_wanted = run.kernels.compile and run.world.local == 0 and run.config.deterministic == "off"
    return is_wanted and needed > 0 and torch.cuda.mem_get_info()[0] > needed


def compiler_beside(argv: list[str]) -> subprocess.Popen:
    """Start this very file as the helper. As a context: leaving it closes the helper's input, which ends
    it."""
    command = [sys.executable, os.path.abspath(__file__), COMPILE_BESIDE, *argv]
    return subprocess.Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)


def exit_when_input_closes() -> None:
    """Ends this process, whatever it is doing, once nobody holds its standard input: the warm-up that
    started it is over, or the trainer is dead, be it by SIGKILL."""
    os.read(sys.stdin.fileno(), 1)       # sys.stdin.read() would hold a lock that Python needs when it ends
    os._exit(0)


def compile_beside(argv: list[str]) -> int:
    """In a process of its own while warmup compiles the blocks: bring pointer, head and optimizer into the
    compiler's cache on disk, where warmup then finds them. What goes wrong here is compiled there."""
    threading.Thread(target=exit_when_input_closes, daemon=True).start()
    config, overrides = parse_config(argv)
    small_table = min(config.table_rows, 1021)           # a graph doesn't depend on the number of rows
    run = build(dataclasses.replace(config, table_rows=small_table), init_world(), overrides)
    c, model, device = run.config, run.model, run.world.device
    last_step_of_shape = {candidates_at(c, step): step for step in range(c.num_steps)}
    for step in last_step_of_shape.values():
        tokens, targets = torch.zeros(2, rows_at_once(run, step), c.row_tokens, dtype=torch.int32, device=device)
        x = torch.randn(*tokens.shape, c.model_dim, dtype=run.kernels.dtype, device=device, requires_grad=True)
        mask = model.masks(segment_ids(tokens, c.eod_id), 1)["long"]
        model.loss(x, tokens, targets, mask, train_view(run, step)).backward()
    with torch.no_grad():
        for bank in run.optimizer.banks:
            bank.ids, bank.grads, bank.world = tokens[0].long(), x[0], World()      # without collectives
            run.optimizer.update(bank, 0.0, 0.9)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# 10. Front door
# Parse, enter the world, train, leave. Exit codes: 0 done, 1 failed, 2 refused, 128 + signal stopped by it.

def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(help_text())
        return 0
    if argv[:1] == [COMPILE_BESIDE]:
        return compile_beside(argv[1:])
    log = world = None
    try:
        config, overrides = parse_config(argv, "record" if torch.cuda.is_available() else "demo")
        if config.deterministic == "on":
            torch.use_deterministic_algorithms(True)
        world = init_world(config.deterministic == "on")
        log = RunLog(config.log_dir, world)              # before the ranks meet: a refusal of rank 0 then ends all
        join_group(world)
        result = train(config, world, log, overrides, argv)
        return 128 + result["signal"] if result["status"] == "stopped" else 0
    except (Refusal, Failure, torch.OutOfMemoryError) as error:
        status = "refused" if isinstance(error, Refusal) else "failed"
        if isinstance(error, torch.OutOfMemoryError):
            error = Failure(f"rank {world.rank}: out of memory; use a smaller --micro_rows, or auto ({error})")
        if world is None or world.local == 0 or str(error).startswith("rank"):      # what all ranks say: once a host
            print(f"train_gpt: {error}", file=sys.stderr, flush=True)
        if log is not None:
            log.write("result:" + json.dumps(dict(status=status, reason=str(error))))
        return 2 if status == "refused" else 1
    finally:
        if log is not None:
            log.close()
        close_world()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
