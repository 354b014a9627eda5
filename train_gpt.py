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
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
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
# Shards become one stream of tokens, the stream becomes rows. A document begins at its mark, the id eod_id. A
# row is row_tokens inputs with their targets. A piece is what a row holds of one document; the model calls it
# a segment, and none sees another. Adjoining pieces of a row are one span (start, stop) of the stream.
# Everything here takes plain numbers.

SHARD_MAGIC = 20_240_520                     # of FineWeb's shards of 16-bit tokens
WIDE_SHARD_MAGIC = 20_240_801                # of shards of 32-bit tokens, which are not read here
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024                    # 256 int32: magic, version, number of tokens, unused
SCAN_TOKENS = 2 ** 20                        # searched at once, so that they and their copies fit a cache

def shard_tokens(path: str) -> int:
    """Number of tokens of a shard in FineWeb's format: a header, then uint16 tokens. Raises Refusal."""
    again = "delete the file and download or make it again"
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(SHARD_HEADER_BYTES)
    except OSError as error:
        raise Refusal(f"{path}: can't be read ({error.strerror})") from None
    if len(header) < SHARD_HEADER_BYTES:
        is_pointer = header.startswith(b"version https")
        hint = ", looks like the pointer text of a large-file store" if is_pointer else ""
        raise Refusal(f"{path}: {size} bytes, too short to hold a shard header of 1,024 bytes{hint}; {again}")
    magic, version, count = (int.from_bytes(header[at:at + 4], "little", signed=True) for at in (0, 4, 8))
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        hint = "a header begins with magic, version, number of tokens as int32; raw tokens have none"
        if magic == WIDE_SHARD_MAGIC:
            hint = "this is the 32-bit-token format, tokenize again with data/text.py"
        raise Refusal(f"{path}: found magic/version {magic}/{version}, "
                      f"expected {SHARD_MAGIC}/{SHARD_VERSION} ({hint})")
    expected_size = SHARD_HEADER_BYTES + 2 * count
    if count <= 0 or size != expected_size:
        raise Refusal(f"{path}: header says {count:,} tokens ({expected_size:,} bytes), "
                      f"found {size:,} bytes, expected as many and at least one token; {again}")
    return count


def matching_files(pattern: str, what: str) -> list[str]:
    """What one pattern means: the file or folder of that very name, else a glob. Of a folder: its shards."""
    for text in (pattern, pattern.strip(), os.path.expanduser(pattern.strip())):
        folder, name = os.path.split(text)
        if os.path.isdir(text):
            found = glob.glob(os.path.join(glob.escape(text), f"*{what}*.bin"))
        elif os.path.lexists(text):
            found = [text]
        else:                                    # brackets of an existing folder are no pattern
            found = glob.glob(os.path.join(glob.escape(folder), name)) or glob.glob(text)
        if found:
            return found
    return []


def find_shards(patterns: str, what: str) -> list[str]:
    """Files of comma-separated patterns, sorted by name, each once. what: train or val. Raises Refusal when
    there are none. A comma may belong to a name: all in one, else the fewest that match, are one pattern."""
    texts, names = patterns.split(","), set()
    while texts:
        for count in (len(texts), *range(1, len(texts))):
            found = matching_files(",".join(texts[:count]), what)
            if found:
                break
        else:
            count = 1                            # it matches nothing, whatever follows it
        names.update(map(os.path.abspath, found))
        texts = texts[count:]
    first_name_of = {os.path.realpath(name): name for name in sorted(names, reverse=True)}      # links
    paths = sorted(first_name_of.values())
    for path in paths:
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise Refusal(f"{path}: no file that can be read; "
                          f"restore it, or name others with --{what}_files=PATTERN")
    if not paths:
        looked = ", ".join(os.path.abspath(os.path.expanduser(text.strip())) for text in patterns.split(","))
        raise Refusal(f"no {what} shards match {patterns:.200} (looked for {looked:.300}; in a folder: "
                      f"*{what}*.bin): name others with --{what}_files=PATTERN, or make some: python "
                      "data/cached_fineweb10B.py, or data/text.py --builtin --tokenizer=bytes, or --help")
    return paths


def dataset_card(paths: list[str]) -> dict | None:
    """The dataset.json beside the shards, if there is one. Raises Refusal when it can't be used."""
    card = Path(paths[0]).parent / "dataset.json"
    if not os.path.lexists(card):
        return None
    try:
        text = card.read_text(encoding="utf-8-sig") if card.is_file() else "no file"  # -sig: BOM or not
        found = json.loads(text)
        vocab_size, eod_id, tokenizer = found["vocab_size"], found["eod_id"], found.get("tokenizer")
        are_whole = type(vocab_size) is int and type(eod_id) is int
        if not are_whole or not 0 <= eod_id < vocab_size <= 65_536:
            raise ValueError("expected 0 <= eod_id < vocab_size <= 65536, "
                             f"found {eod_id!r:.40} and {vocab_size!r:.40}")
        return dict(tokenizer=tokenizer and str(tokenizer), vocab_size=vocab_size, eod_id=eod_id)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{card}: not a usable dataset card ({error!r:.200}); "
                      "make it again with data/text.py") from None


def as_int16(token_id: int) -> int:
    """The int16 with the same 16 bits: torch hardly computes with uint16, so shards are mapped as int16."""
    return token_id - 65_536 if token_id > 32_767 else token_id


class TokenStream:
    """The tokens of several shards as one memory-mapped sequence: reads them, finds documents, checks ids."""
    def __init__(self, paths: list[str], vocab_size: int):
        self.paths, self.vocab_size = paths, vocab_size
        self.starts = [0, *itertools.accumulate(map(shard_tokens, paths))]  # of each shard; the stream's end
        self.num_tokens = self.starts[-1]
        if self.num_tokens < 2:
            raise Refusal(f"{paths[0]}: holds 1 token; expected 2, an input and its target")
        self.maps: dict[int, Tensor] = {}
        self.indexed: dict[tuple[int, int], list[int]] = {}      # a shard is searched once, however many ask

    def shard(self, k: int) -> Tensor:
        """Tokens of shard k as int16 (the bits of uint16). Raises Refusal."""
        if k not in self.maps:
            header_words = SHARD_HEADER_BYTES // 2
            words = header_words + self.starts[k + 1] - self.starts[k]
            try:
                whole_file = torch.from_file(self.paths[k], shared=False, size=words, dtype=torch.int16)
            except RuntimeError as error:
                raise Refusal(f"{self.paths[k]}: can't be read any more ({error})") from None
            self.maps[k] = whole_file[header_words:]
        return self.maps[k]

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy tokens start..stop-1 into out (int32), over the borders of shards."""
        k = bisect.bisect_right(self.starts, start) - 1
        filled = 0
        while start < stop:
            stop_here = min(stop, self.starts[k + 1])
            length = stop_here - start
            offset = start - self.starts[k]
            out[filled:filled + length] = self.shard(k)[offset:offset + length]
            start, filled, k = stop_here, filled + length, k + 1
        out &= 0xFFFF                            # back from int16's negative numbers to ids

    def document_starts(self, k: int, eod_id: int) -> list[int]:
        """Positions in the stream of the marks (eod_id) of shard k. Raises Refusal on ids out of range."""
        if (k, eod_id) in self.indexed:
            return self.indexed[k, eod_id]
        tokens, starts = self.shard(k), []
        for begin in range(0, len(tokens), SCAN_TOKENS):
            chunk = tokens[begin:begin + SCAN_TOKENS]
            sign_flipped = chunk ^ -32_768       # so that int16 has the order that the ids have as uint16
            largest_id = int(sign_flipped.max()) + 32_768
            if largest_id >= self.vocab_size:
                ids = chunk.int() & 0xFFFF
                at = int((ids >= self.vocab_size).nonzero()[0])
                raise Refusal(f"{self.paths[k]}: token {ids[at]} at position {begin + at} is outside the "
                              f"vocabulary of {self.vocab_size}; were these made with another tokenizer?")
            marks = (chunk == as_int16(eod_id)).nonzero().flatten()
            starts += (marks + (self.starts[k] + begin)).tolist()
        self.indexed[k, eod_id] = starts
        return starts

    def marks(self, eod_id: int, first_shard: int = 0) -> Iterator[int]:
        """Positions of the marks from first_shard on; a shard is searched when its first mark is wanted."""
        for k in range(first_shard, len(self.paths)):
            yield from self.document_starts(k, eod_id)

    def document_hashes(self, k: int, eod_id: int, length: int = 64) -> Tensor:
        """int64 [documents]: a hash of the first length tokens after the mark, for each document of shard k
        that has so many: the sum of all tokens, each times a random odd number that belongs to its place,
        modulo 2^64. Equal texts have equal hashes, others practically never (Carter and Wegman 1979)."""
        tokens = self.shard(k)
        starts = torch.tensor(self.document_starts(k, eod_id), dtype=torch.int64) - self.starts[k]
        lengths = starts.diff(append=torch.tensor([len(tokens)]))       # with the mark
        starts = starts[lengths >= 1 + length]
        generator = torch.Generator().manual_seed(0)
        odd_numbers = torch.randint(-2 ** 62, 2 ** 62, (length,), generator=generator) * 2 + 1
        texts = tokens[starts[:, None] + 1 + torch.arange(length)]      # [documents, length]
        return (texts * odd_numbers).sum(1)


def need_documents(stream: TokenStream, eod_id: int) -> None:
    """Raises Refusal when shards without a dataset.json hardly hold a mark: another tokenizer made them."""
    marks = len(stream.document_starts(0, eod_id))
    if dataset_card(stream.paths) is None and marks * 10 ** 6 < stream.starts[1]:
        raise Refusal(f"no end-of-document id {eod_id} in {stream.paths[0]} (or fewer than one in a million "
                      "tokens); was dataset.json left behind?")


class Position(NamedTuple):
    """Where the data stands between two steps: what is left of a cut document, where the next one begins."""
    epoch: int = 0
    start: int = 0                           # of the piece carried over; start == stop: none
    stop: int = 0
    next_document: int = 0
    dropped_tokens: int = 0                  # cut off by clipping, so far


class Planner:
    """Which spans of the stream stand in which row, from the stream alone: the same for any number of ranks.

        stream   = document document ..      after its end it goes on from its first mark: another epoch
        document = the tokens from one mark to the next; clipping to max_doc_tokens drops a longer one's tail
        row      = piece piece ..            row_tokens in all
        piece    = a document, or as much of it as its row has room for

    What a row's end cuts off a document is the next row's first piece; self.position carries it there."""
    def __init__(self, stream: TokenStream, eod_id: int, position: Position = Position()):
        self.stream, self.eod_id, self.position = stream, eod_id, position
        self.docs = self.documents(position.epoch, position.next_document)

    def documents(self, epoch: int, begin: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, stop) of each document from position begin on, without end."""
        last = self.stream.num_tokens - 1        # has no successor, so it is a target and never an input
        while True:
            first_shard = bisect.bisect_right(self.stream.starts, begin) - 1
            for mark in self.stream.marks(self.eod_id, first_shard):
                if mark > begin:
                    yield epoch, begin, min(mark, last)
                    begin = mark
            if begin < last:
                yield epoch, begin, last
            first_mark = next(self.stream.marks(self.eod_id), 0)
            epoch, begin = epoch + 1, first_mark if first_mark < last else 0

    def begin_document(self, max_doc_tokens: int) -> None:
        """Move on to the next document, clipped to max_doc_tokens (0: not at all)."""
        epoch, start, end = next(self.docs)
        stop = min(end, start + max_doc_tokens) if max_doc_tokens else end
        dropped_tokens = self.position.dropped_tokens + end - stop
        self.position = Position(epoch, start, stop, end, dropped_tokens)

    def rows(self, num_rows: int, row_tokens: int, max_doc_tokens: int = 0) -> list[list[tuple[int, int]]]:
        """The next rows, each a list of spans (start, stop) that hold row_tokens in all."""
        rows = []
        for _ in range(num_rows):
            spans, free = [], row_tokens
            while free:
                if self.position.start == self.position.stop:
                    self.begin_document(max_doc_tokens)
                start = self.position.start
                stop = min(self.position.stop, start + free)
                if spans and spans[-1][1] == start:
                    spans[-1] = spans[-1][0], stop
                else:
                    spans.append((start, stop))
                free -= stop - start
                self.position = self.position._replace(start=stop)
            rows.append(spans)
        return rows


class Batch(NamedTuple):
    """This rank's rows of one step, int32 [rows, T], and where the data stands after it."""
    inputs: Tensor
    targets: Tensor
    position: Position


def fill_row(stream: TokenStream, spans: list[tuple[int, int]], inputs: Tensor, targets: Tensor) -> None:
    """Write the spans' tokens into inputs, and into targets their true successors in the stream."""
    filled = 0
    tokens = torch.empty(len(inputs) + 1, dtype=torch.int32)
    for start, stop in spans:
        length = stop - start
        stream.read(start, stop + 1, tokens[:length + 1])
        inputs[filled:filled + length] = tokens[:length]
        targets[filled:filled + length] = tokens[1:length + 1]
        filled += length


def rows_per_rank(num_rows: int, size: int) -> int:
    """Rows of a step that each of size ranks gets. Where they don't divide, the last ranks get empty ones."""
    return -(-num_rows // size)


def batches(planner: Planner, plan: Iterable[tuple[int, int]], row_tokens: int, rank: int, size: int,
            pinned: bool = False, ahead: int = 32) -> Iterator[Batch]:
    """One Batch for each (rows over all ranks, max_doc_tokens) of the plan, prepared ahead by a thread, whose
    errors are raised here. Row i goes to rank i // rows_per_rank. Empty rows are eod_id, with targets -1."""
    def prepare(num_rows: int, max_doc_tokens: int) -> Batch:
        rows = planner.rows(num_rows, row_tokens, max_doc_tokens)
        per_rank = rows_per_rank(num_rows, size)
        own_rows = rows[rank * per_rank:(rank + 1) * per_rank]
        inputs, targets = torch.empty(2, per_rank, row_tokens, dtype=torch.int32, pin_memory=pinned)
        for i, spans in enumerate(own_rows):
            fill_row(planner.stream, spans, inputs[i], targets[i])
        inputs[len(own_rows):] = planner.eod_id
        targets[len(own_rows):] = -1
        return Batch(inputs, targets, planner.position)
    with ThreadPoolExecutor(1) as pool:
        futures = (pool.submit(prepare, num_rows, max_doc_tokens) for num_rows, max_doc_tokens in plan)
        waiting = deque(itertools.islice(futures, ahead + 1))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(futures, 1))


def validation_rows(stream: TokenStream, num_targets: int, row_tokens: int, overlap: int, num_rows: int,
                    eod_id: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (inputs, targets), int32 [num_rows, T], that score targets 1..num_targets of the stream, each
    once. Batch i goes to rank i % size. A row begins overlap tokens before its first input that counts;
    targets before that, and of what is filled up, are -1."""
    firsts = range(0, num_targets, row_tokens - overlap)           # of each row, the first input that counts
    for k in range(rank * num_rows, len(firsts), size * num_rows):
        inputs = torch.full((num_rows, row_tokens), eod_id, dtype=torch.int32)
        targets = torch.full((num_rows, row_tokens), -1, dtype=torch.int32)
        for i, first in enumerate(firsts[k:k + num_rows]):
            start = max(0, first - overlap)
            stop = min(first + firsts.step, num_targets)
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
# The log is the record; rank 0 writes it, and the console is a copy that may go away. The clock. Checkpoints:
# files of torch.distributed.checkpoint, facts as JSON beside them. Signals that stop a run. Train lines.

FENCE = "=" * 100                        # a line of its own, before and after the header
COMMAND_TIMEOUT_S = 5                    # for nvidia-smi and git, which may hang
CHECKPOINT_FACTS = ("step", "tokens", "position", "total_ms", "step_ms", "run", "bank_steps", "files")
METADATA_NAMES = {                       # module: names that the .metadata of plain tensors is made of
    "torch": ("Size",), "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING")}

def say(text: str, stream=None, end: str = "\n") -> None:
    """Print text, on standard output unless another stream is named. The console is optional: once it is gone
    (a closed terminal or pipe, a full disk), what should go there is lost, and nothing else."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    printable = text.encode(encoding, "backslashreplace").decode(encoding)       # also on an ASCII terminal
    try:
        print(printable, end=end, file=stream, flush=True)
    except (OSError, ValueError):                # ValueError: the stream is closed
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())     # or Python's last flush fails


class RunLog:
    """Writes log_dir/<run_id>.txt on rank 0 and mirrors events to the console. A full disk is said once."""
    def __init__(self, log_dir: str, world: World):
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.run_id, self.path, self.file = f"{stamp}_{uuid.uuid4().hex[:8]}", None, None
        if world.rank == 0:
            try:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
                self.path = Path(log_dir) / f"{self.run_id}.txt"
                self.file = self.path.open("w", encoding="utf-8", newline="\n")
            except OSError as error:
                raise Refusal(f"--log_dir={log_dir}: can't be written ({error.strerror}); "
                              "name another one") from None

    def write(self, text: str) -> None:
        """Add text to the log only."""
        if self.file is not None:
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except OSError as error:
                self.file = None
                say(f"warn: {self.path}: log lost ({error.strerror}); training goes on", sys.stderr)

    def header(self, source: str, facts: dict) -> None:
        """Source, fence, facts as one JSON line, nvidia-smi where there is one, fence. Raises Refusal."""
        lines = [line.rstrip("\r") for line in source.split("\n")]
        if FENCE in lines:
            raise Refusal(f"line {lines.index(FENCE) + 1} of this script is {len(FENCE)} times '=', which in "
                          "a log ends the source; change that line")
        self.write(source + FENCE + "\n" + json.dumps({"format": 1, "run_id": self.run_id, **facts}))
        if smi := run_quietly("nvidia-smi"):
            self.write(smi)
        self.write(FENCE)

    def event(self, text: str) -> None:
        """Add a line to the log, and show it."""
        self.write(text)
        if self.path:
            say(text)

    def close(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
        for stream in (sys.stdout, sys.stderr):  # what others have printed
            say("", stream, end="")


def fingerprint(path: str) -> str:
    """16 hex digits of the sha256 over header, first and last MiB: names a file; data/verify.py checks it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(1024 + 2 ** 20))
        file.seek(max(0, os.path.getsize(path) - 2 ** 20))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def run_quietly(*command: str) -> str:
    """Standard output of a command; an empty text when it fails, can't run or takes more than 5 s."""
    try:
        child = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True,
                                 errors="replace", start_new_session=True)
        output, _ = child.communicate(timeout=COMMAND_TIMEOUT_S)
    except OSError:
        return ""
    except subprocess.TimeoutExpired:            # not waited for: what hangs in a driver can't be killed
        os.killpg(child.pid, signal.SIGKILL)
        say(f"warn: {command[0]}: no answer within {COMMAND_TIMEOUT_S} s; going on without it", sys.stderr)
        return ""
    return output.strip() if child.returncode == 0 else ""


def git_state(folder: str) -> dict:
    """A folder's commit and whether tracked files differ from it, as far as git can tell. Writes nothing."""
    lines = run_quietly("git", "--no-optional-locks", "-C", folder, "status", "--porcelain=v2", "--branch",
                        "--untracked-files=no").splitlines()
    if not lines:
        return dict(commit="unknown", dirty=None)
    dirty = any(not line.startswith("#") for line in lines)
    return dict(commit=lines[0].removeprefix("# branch.oid "), dirty=dirty)


def process_age_s() -> float:
    """Seconds since this process started (Linux; elsewhere the CPU time it took)."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_ticks = int(after_name[19])        # proc(5): field 22, starttime, since the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


class Clock:
    """Honest time: starts and pauses with a device synchronisation; steps are timed by events, which are read
    one step late."""
    def __init__(self, device: torch.device):
        self.cuda, self.device = device.type == "cuda", device
        self.total_ms = 0.0                              # up to the last pause
        self.resumed_at, self.last = None, None          # seconds; the stamp at the end of the last step
        self.step_ms, self.unread = [], []               # finished steps; (stamp, stamp) of the others

    def synchronize(self) -> float:
        """Wait for the device. -> seconds on this process's clock."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def stamp(self) -> float | torch.cuda.Event:
        """This moment: as seconds on a CPU, as an event in a GPU's queue, which no one waits for."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resume(self) -> None:
        self.resumed_at, self.last = self.synchronize(), self.stamp()

    def pause(self) -> None:
        now = self.synchronize()
        self.collect()
        self.total_ms += 1e3 * (now - self.resumed_at)
        self.resumed_at = None

    def step_done(self) -> None:
        before, self.last = self.last, self.stamp()
        self.unread.append((before, self.last))

    def collect(self, keep: int = 0) -> None:
        """Move the times of finished steps into step_ms, all but the last keep; waits for the device."""
        while len(self.unread) > keep:
            begin, end = self.unread.pop(0)
            if self.cuda:
                end.synchronize()
                self.step_ms.append(begin.elapsed_time(end))
            else:
                self.step_ms.append(1e3 * (end - begin))

    def elapsed_ms(self) -> float:
        if self.resumed_at is None:
            return self.total_ms
        return self.total_ms + 1e3 * (time.perf_counter() - self.resumed_at)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_cause(error: BaseException) -> str:
    """What went wrong, in a line. A CheckpointException has failures = {rank: (exception, traceback)}."""
    failures = getattr(error, "failures", None)
    if failures:
        error, _ = next(iter(failures.values()))
    lines = str(error).splitlines() or [repr(error)]
    return getattr(error, "strerror", None) or lines[0]


class Store:
    """Writes folder/step_N in the background, named so when whole; keeps two. A failure is said and training
    goes on; failed says whether the latest attempt was one."""
    def __init__(self, folder: Path, log: RunLog):
        self.folder, self.log = folder, log
        self.last: Path | None = None                    # the newest checkpoint that is whole
        self.failed = False
        self.pool, self.writing = ThreadPoolExecutor(1), None

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict) -> None:
        """Write tensors (on the CPU, no one else's) while training goes on, once the last write has ended."""
        self.finish()
        name = f"step_{step:06d}"
        if self.last != self.folder / name:      # the target may be met right after a checkpoint
            self.writing = self.pool.submit(self.write, name, tensors, facts)

    def finish(self) -> None:
        """Wait until what is being written is whole."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def write(self, name: str, tensors: dict[str, Tensor], facts: dict) -> None:
        from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
        unfinished, whole = self.folder / f"writing_{name}", self.folder / name
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        try:
            save(tensors, storage_writer=FileSystemWriter(unfinished), no_dist=True)
            digests = {file.name: sha256_of(file) for file in sorted(unfinished.iterdir())}
            body = json.dumps(facts | dict(files=digests))
            with (unfinished / "checkpoint.json").open("w", encoding="ascii") as file:
                file.write(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)
                file.flush()
                os.fsync(file.fileno())
            self.last, self.failed = unfinished.rename(whole), False
            for old in sorted(self.folder.glob("step_*"))[:-2]:
                shutil.rmtree(old, ignore_errors=True)
        except (Exception, CheckpointException) as error:        # the latter is no Exception
            self.failed = True
            self.log.event(f"warn: {whole}: checkpoint not written ({first_cause(error)}); "
                           f"the last good one is {self.last}")
            shutil.rmtree(unfinished, ignore_errors=True)


def need_writable(folder: str) -> None:
    """Raises Refusal when checkpoints can't be written into the folder, which is made when it is missing."""
    trial = Path(folder) / f"trial_{uuid.uuid4().hex[:8]}"
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        raise Refusal(f"--checkpoint_dir={folder}: can't be written ({error.strerror}); "
                      "name another one") from None


def find_checkpoint(resume: str, folder: str, misfit=lambda facts: "") -> Path:
    """The folder that --resume names; for latest the newest in folder/*/ that fits: misfit(facts) says why
    it doesn't, or nothing. Raises Refusal that names what there is."""
    if resume != "latest" and (Path(resume) / "checkpoint.json").is_file():
        return Path(resume)
    found = [file for file in Path(folder).glob("*/step_*/checkpoint.json") if file.is_file()]
    found.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    there = [str(file.parent) for file in found]
    for number, path in enumerate(there if resume == "latest" else ()):
        try:
            reason = misfit(read_facts(path))
        except Refusal as error:
            reason = str(error)
        if not reason:
            return Path(path)
        there[number] += f" ({reason})"
    raise Refusal(f"--resume={resume}: no checkpoint there that fits (a folder step_N with checkpoint.json); "
                  f"in {folder}/*/: {', '.join(there[:3]) or 'none'}")


def read_facts(folder: str | Path) -> dict:
    """checkpoint.json, whose first line is the sha256 of its rest. Raises Refusal."""
    place = Path(folder) / "checkpoint.json"
    try:
        digest, _, body = place.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise Refusal(f"{place}: damaged (its checksum differs); take another checkpoint")
        facts = json.loads(body)
        missing = [key for key in CHECKPOINT_FACTS if key not in facts]
    except OSError as error:
        raise Refusal(f"{place}: can't be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal(f"{place}: no facts of a checkpoint ({error!r:.99})") from None
    if missing:
        raise Refusal(f"{place}: lacks {', '.join(missing)}; take another checkpoint")
    return facts


def need_bank_steps(folder: str | Path, facts: dict, banks: list[str]) -> None:
    """Raises Refusal that names the banks whose number of steps the checkpoint does not say."""
    missing = [bank for bank in banks if type(facts["bank_steps"].get(bank)) is not int]
    if missing:
        raise Refusal(f"{folder}: its bank_steps lack {', '.join(missing)}; take another checkpoint")


class MetadataUnpickler(pickle.Unpickler):
    """Reads a checkpoint's .metadata. A pickle may call anything; this one gets METADATA_NAMES and dtypes."""
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"its metadata asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_checkpoint(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors by "PARAMETER/KIND"). Raises Refusal that names the file when a byte is wrong."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
    facts = read_facts(folder)
    for name, digest in facts["files"].items():
        place = Path(folder) / name
        try:
            digest_found = sha256_of(place)
        except OSError as error:
            raise Refusal(f"{place}: can't be read ({error.strerror})") from None
        if digest_found != digest:
            raise Refusal(f"{place}: damaged (its checksum differs); take another checkpoint")
    try:
        with (Path(folder) / ".metadata").open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        tensors = {key: torch.empty(info.size, dtype=info.properties.dtype)
                   for key, info in metadata.state_dict_metadata.items()}
        reader = FileSystemReader(folder)
        reader.read_metadata = lambda *_, **__: metadata   # its own unpickles without a list
        with warnings.catch_warnings(action="ignore"):     # "no process group": each rank reads for itself
            load(tensors, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise Refusal(f"{folder}: can't be read as a checkpoint ({first_cause(error):.200})") from None
    return facts, tensors


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The list that the signals enter which stop a run. After the first, SIGTERM and SIGINT act as before;
    SIGHUP and SIGUSR1 don't: one cause may send them twice (kernel and shell, SLURM and launcher)."""
    received: list[int] = []
    handlers_before = {}
    def restore(*numbers: int) -> None:
        for number in handlers_before.keys() & set(numbers):
            signal.signal(number, handlers_before.pop(number))
    def on_signal(number: int, frame) -> None:
        received.append(number)
        restore(signal.SIGTERM, signal.SIGINT)
    with contextlib.suppress(ValueError):                  # only the main thread may install handlers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            handlers_before[number] = signal.signal(number, on_signal)
        # nohup has its way, but not in torchrun's ranks (leaders of sessions): it kills them after a SIGHUP
        if handlers_before[signal.SIGHUP] == signal.SIG_IGN and os.getsid(0) != os.getpid():
            restore(signal.SIGHUP)
    try:
        yield received
    finally:
        restore(*handlers_before)


def need_finite(where: str, values: dict[str, float]) -> None:
    """Raises Failure that names the values which are no finite numbers."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise Failure(f"{where}: not a finite number: {', '.join(bad)}. "
                      "Lower the learning rates, or look at the data")


class StepNumbers(NamedTuple):
    """What is known of a step before the device has done it, and where its numbers will arrive."""
    step: int                                # counted from 0
    tokens: int                              # of all ranks in this step
    tokens_so_far: int
    lr: float                                # relative to the rates of the groups
    stats: Tensor                            # on the CPU: loss, each bank's squared gradient norm, stop
    arrived: float | torch.cuda.Event        # the clock's stamp after which stats may be read


PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "4090": 165, "L40S": 362}    # dense bf16
class Progress:
    """Train lines from numbers that are copied off the device and read one step late, so that no step waits.
    A bank is a group of parameters that the optimizer updates as one; banks: their names."""
    def __init__(self, c: Config, log: RunLog, clock: Clock, banks: list[str], header: dict):
        self.config, self.log, self.clock, self.banks = c, log, clock, banks
        self.waiting: StepNumbers | None = None
        self.tokens, self.stopping = 0, False
        device = header["devices"][0]
        peaks = [1e12 * tflops for name, tflops in PEAK_TFLOPS.items() if name in device]      # of one device
        flops_per_token = 6 * header["parameters"]["matmul"]
        self.peak_seconds_per_token = flops_per_token / peaks[0] / header["world_size"] if peaks else None

    def push(self, step: int, tokens: int, lr: float, stats: Tensor) -> None:
        """Note a step whose stats (StepNumbers) arrive before clock.last; write the line of the last one."""
        self.tokens += tokens
        self.look(StepNumbers(step, tokens, self.tokens, lr, stats, self.clock.last))

    def mfu(self, tokens: float, ms: float) -> float | None:
        """Model FLOP/s utilisation: 6 x matmul parameters x tokens / time / dense bf16 peak."""
        if self.peak_seconds_per_token is None:
            return None
        return self.peak_seconds_per_token * tokens / ms * 1e3

    def look(self, new: StepNumbers | None = None) -> None:
        """Write the line of the step that waits, if due. Raises Failure for what is not finite in it."""
        item, self.waiting = self.waiting, new
        if item is None:
            return
        if self.clock.cuda:
            item.arrived.synchronize()
        c, done = self.config, item.step + 1
        loss, *squared_norms, stop = item.stats.tolist()
        gradients = {f"gradient of {bank}": norm for bank, norm in zip(self.banks, squared_norms)}
        need_finite(f"step {done}", {"loss": loss} | gradients)
        self.stopping = bool(stop)
        self.clock.collect(keep=1)
        if done % c.log_every_steps == 0 or done == 1:
            times = self.clock.step_ms[-c.log_every_steps:] or [math.nan]
            ms = sum(times) / len(times)
            mfu = self.mfu(item.tokens, ms)
            mfu_text = "" if mfu is None else f"mfu:{mfu:.3f} "
            self.log.event(
                f"step:{done}/{c.num_steps} train_loss:{loss:.4f} train_time:{self.clock.elapsed_ms():.0f}ms "
                f"step_avg:{ms:.2f}ms tokens_per_s:{item.tokens / ms * 1e3:.0f} {mfu_text}lr:{item.lr:.4f} "
                f"tokens:{item.tokens_so_far}")


# ----------------------------------------------------------------------------------------------------------------------
# 9. Training
# Build, warm up, evaluate, step, loop. The timed region is what stands between clock.resume() and clock.pause().

@dataclass
class Run:
    """All that a run holds. train_stream and val_stream are memory-mapped; position is where the data stands."""
    config: Config
    world: World
    kernels: Kernels
    model: GPT
    optimizer: Optimizer
    train_stream: TokenStream
    val_stream: TokenStream
    micro_rows: int
    position: Position = Position()


def adopt_dataset(c: Config, overrides: dict, train: list[str], val: list[str]) -> Config:
    """Vocabulary and end-of-document id as the shards' dataset.json says. Raises Refusal on any contradiction."""
    cards = [card for card in map(dataset_card, (train, val)) if card]
    if cards and cards[0] != cards[-1]:
        raise Refusal(f"train and validation shards were made differently: {cards[0]} and {cards[1]}")
    same = set(train) & set(val) or {fingerprint(p) for p in train} & {fingerprint(p) for p in val}
    if same:
        raise Refusal(f"train_files and val_files overlap ({', '.join(sorted(same))}): such a loss would mean nothing")
    given = {key: cards[0][key] for key in ("vocab_size", "eod_id")} if cards else {}
    for key, value in given.items():
        if overrides.get(key, value) != value:
            raise Refusal(f"--{key}={overrides[key]}: the dataset.json beside the shards says {value}")
    c = dataclasses.replace(c, **given)
    check_config(c)
    return c


def build(c: Config, world: World, overrides: dict) -> Run:
    """Check everything that can be checked cheaply, then make model and optimizer. Raises Refusal."""
    paths = [find_shards(c.train_files, "train"), find_shards(c.val_files, "val")]
    c = adopt_dataset(c, overrides, *paths)
    train_stream, val_stream = (TokenStream(p, c.vocab_size) for p in paths)
    there = val_stream.num_tokens - 1
    if c.val_tokens > there:
        raise Refusal(f"--val_tokens={c.val_tokens}: validation shards hold {there + 1:,} tokens, at most {there:,} "
                      "targets; expected --val_tokens=0 (all) or fewer")
    c = dataclasses.replace(c, val_tokens=c.val_tokens or there)
    rows = {rows_at(c, step) for step in range(c.num_steps + 1)}       # validation has the last stage's shape
    if (most := math.gcd(*rows)) % world.size:
        legal = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise Refusal(f"{world.size} processes can't share {sorted(rows)} rows (batch_tokens / row_tokens ="
                      f" {c.batch_tokens} / {c.row_tokens}) evenly; legal counts: {legal} (--nproc_per_node or NPROC)")
    for k in range(len(val_stream.paths)):
        val_stream.document_starts(k, c.eod_id)          # raises on ids out of range
    for stream in (train_stream, val_stream):
        need_documents(stream, c.eod_id)
    kernels = choose_kernels(world.device, c.compile, c.attention, c.fp8, c.fits_flex)
    if kernels.compile and not world.is_cuda and not find_compiler():
        raise Refusal("--compile=on: no C compiler was found, which it needs; install one (gcc) or use --compile=off")
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(c.seed)
    with torch.device(world.device):
        model = GPT(c, kernels)
    groups = [Group(**group) for group in param_groups(c, model)]
    optimizer = Optimizer(groups, world, kernels.compile and world.is_cuda, kernels.dtype)
    return Run(c, world, kernels, model, optimizer, train_stream, val_stream, c.micro_rows or max(rows))


def budget(run: Run) -> str:
    """Tokens needed against tokens there; raises Refusal when max_epochs doesn't suffice."""
    c, there = run.config, run.train_stream.num_tokens - 1
    starts = run.train_stream.document_starts(0, c.eod_id)
    lengths = [b - a for a, b in zip(starts, [*starts[1:], run.train_stream.starts[1]])] or [there]
    kept = {clip: sum(min(n, clip or n) for n in lengths) / sum(lengths)
            for clip in {stage.max_doc_tokens for stage in STAGES}}
    needed = sum(rows_at(c, k) * c.row_tokens / kept[stage_at(c, k).max_doc_tokens] for k in range(c.num_steps))
    text = f"data: the schedule needs about {needed:,.0f} tokens (clipped tails included), {there:,} are there"
    epochs = needed / there
    if epochs > c.max_epochs:
        more = math.ceil((needed - there * c.max_epochs) / c.max_epochs / 100e6)
        raise Refusal(f"{text}: {epochs:.2f} epochs, allowed {c.max_epochs}. Add about {more} shard(s) of 100M tokens "
                      f"(python data/cached_fineweb10B.py) or allow repetition with --max_epochs={math.ceil(epochs)}")
    return f"{text}: {'enough' if epochs <= 1 else f'wraps, {epochs:.2f} epochs'}"


def train_view(run: Run, step: int) -> View:
    """What the step asks of the model, for this rank's first rows. Rows are numbered over all steps and ranks."""
    c, world = run.config, run.world
    first = step * (c.batch_tokens // c.row_tokens + 1) + world.rank * rows_at(c, step) // world.size
    return View(stage_at(c, step).window, candidates_at(c, step), first, training=True)


def rows_at_once(run: Run, step: int) -> int:
    """Rows of a micro-batch: this rank's rows in equal parts, at most run.micro_rows."""
    rows = rows_at(run.config, step) // run.world.size
    return max(n for n in range(1, min(run.micro_rows, rows) + 1) if rows % n == 0)


def train_step(run: Run, step: int, batch: Batch, lr_scale: float, stop: int = 0) -> Tensor:
    """All micro-batches, one update. -> mean loss (over candidates), squared gradient norms, sum of all ranks' stop."""
    c, world, view, n = run.config, run.world, train_view(run, step), rows_at_once(run, step)
    loss = torch.zeros((), device=world.device)
    for rows in zip(batch.inputs.split(n), batch.targets.split(n)):
        inputs, targets = (part.to(world.device, non_blocking=True) for part in rows)
        part = run.model(inputs, targets, view) / (rows_at(c, step) * c.row_tokens)      # so parts add up to the mean
        part.backward()
        loss += part.detach()
        view = view._replace(row=view.row + n)
    norms = run.optimizer.step(lr_scale, momentum_at(c, step))
    if ema_rate_at(c, step):
        run.optimizer.average(ema_rate_at(c, step), c.ema_blend if step == c.num_steps - 1 else 0.0)
    return world.reduced(torch.cat((loss[None], norms, loss.new_full((1,), float(stop)))))


def evaluate(run: Run) -> float:
    """Mean loss over the val_tokens targets, on all ranks. Shapes and graphs are those of the last stage."""
    c, world = run.config, run.world
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for inputs, targets in validation_rows(run.val_stream, c.val_tokens, c.row_tokens, c.val_overlap,
                                           rows_at_once(run, c.num_steps), c.eod_id, world.rank, world.size):
        inputs, targets = inputs.to(world.device), targets.to(world.device)
        loss, count = run.model(inputs, targets, View(c.val_window_blocks)), (targets >= 0).sum()
        totals += torch.stack((loss.double(), count.double()))
    return float(torch.div(*world.reduced(totals)))


HELPER = """import os, sys, threading; threading.Thread(None, lambda: os._exit(len(os.read(0, 1))), daemon=True).start()
sys.path.insert(0, {!r}); __import__({!r}[:-3]).compile_beside({!r})"""      # ends when its standard input closes
def compile_beside(argv: list[str]) -> None:
    """In a process of its own while warmup compiles the blocks: bring pointer, head and optimizer into the compiler's
    cache on disk, where warmup then finds them. What goes wrong here is compiled there."""
    config, overrides = parse_config(argv)
    run = build(dataclasses.replace(config, table_rows=min(config.table_rows, 1021)), init_world(), overrides)
    c, model, device = run.config, run.model, run.world.device
    for step in {candidates_at(c, step): step for step in range(c.num_steps)}.values():
        tokens, targets = torch.zeros(2, rows_at_once(run, step), c.row_tokens, dtype=torch.int32, device=device)
        x = torch.randn(*tokens.shape, c.model_dim, dtype=run.kernels.dtype, device=device, requires_grad=True)
        mask = model.masks(segment_ids(tokens, c.eod_id), 1)["long"]
        model.loss(x, tokens, targets, mask, train_view(run, step)).backward()
    with torch.no_grad():
        for bank in run.optimizer.banks:
            bank.ids, bank.grads, bank.world = tokens[0].long(), x[0], World()      # without collectives
            run.optimizer.update(bank, 0.0, 0.9)


def warmup(run: Run, log: RunLog) -> None:
    """Compile and run every shape of the schedule and of validation, at rate 0, then restore every byte."""
    c, world, banks = run.config, run.world, run.optimizer.banks
    saved, steps = [(t, t.clone()) for bank in banks for t in bank.tensors()], [bank.steps for bank in banks]
    fit_memory(run, log)
    for (num_rows, _), step in {(rows_at(c, k), candidates_at(c, k)): k for k in range(c.num_steps)}.items():
        tokens = torch.arange(num_rows // world.size * c.row_tokens).view(-1, c.row_tokens).int() % c.vocab_size
        for _ in range(2):
            train_step(run, step, Batch(tokens, tokens, run.position), 0.0)
            log.event(f"note: warm-up with {num_rows} rows, {process_age_s():.1f} s after the start")
    tokens = torch.zeros(rows_at_once(run, c.num_steps), c.row_tokens, dtype=torch.int32, device=world.device)
    run.model(tokens, tokens.clone(), View(c.val_window_blocks))
    for t, was in saved:
        t.copy_(was)
    for bank, count in zip(banks, steps):
        bank.steps = count


def fit_memory(run: Run, log: RunLog) -> None:
    """Forward and backward of the largest micro-batch. Out of memory: fewer rows at once (auto), or a Failure."""
    c, device, full = run.config, run.world.device, True
    while full:
        last = max(range(c.num_steps, -1, -1), key=lambda step: rows_at_once(run, step))
        n, full = rows_at_once(run, last), torch.zeros((), device=device)
        tokens = torch.zeros((n, c.row_tokens), dtype=torch.int32, device=device)
        try:
            run.model(tokens, tokens.clone(), train_view(run, last)).backward()       # one tensor twice: another graph
        except torch.OutOfMemoryError:
            full += 1
        if run.world.reduced(full):
            run.micro_rows = n - 1
            run.micro_rows = fewer = rows_at_once(run, last) if run.micro_rows else 0
            text = f"out of memory with {n} rows of {c.row_tokens} tokens at once: "
            if c.micro_rows or not fewer:
                raise Failure(text + (f"use --micro_rows={fewer}, or auto" if fewer else "use a smaller --row_tokens"))
            log.event(f"note: {text}trying micro_rows={fewer}")
        for bank in run.optimizer.banks:
            bank.zero_grad()


MAX_KNOWN_SHARE = 0.05             # of validation documents that begin (64 tokens) like a training document
SELF_CHECK_TOLERANCE = 1e-5        # relative: what can't be seen takes no part in a sum, so numerics leave no trace
def probe(run: Run) -> dict[str, float]:
    """How much the loss of the first tokens of a second document moves, relatively, when other tokens are changed.
    The validation pass (compiled as it will be), on shaken weights, as fresh ones attend to nothing; then restored."""
    c, T, device, table = run.config, run.config.row_tokens, run.world.device, run.model.ngrams
    generator, middle, few = torch.Generator(device).manual_seed(1), T // 2, max(2, min(16, T // 4))
    row, other, targets = torch.randint(c.vocab_size, (3, T), generator=generator, device=device, dtype=torch.int32)
    for tokens in (row, other):
        tokens[tokens == c.eod_id] = (c.eod_id + 1) % c.vocab_size
        tokens[[0, middle]] = c.eod_id
    targets[:middle], targets[middle + few:] = -1, -1
    cases = {"": (0, 0), "later tokens": (middle + few, T), "another document": (1, middle),
             "their own context": (middle + 1, middle + few)}
    rows = [torch.cat((row[:a], other[a:b], row[b:])).expand(rows_at_once(run, c.num_steps), T).contiguous()
            for a, b in cases.values()]
    places = [(bank.weight, slice(None)) for bank in run.optimizer.banks if bank.group.kind != "rows"]
    ids = torch.cat([ngram_ids(t, segment_ids(t, c.eod_id), c.table_orders, c.table_rows)[0] for t in rows])
    places.append((table.data, ids[ids < len(table) - 1].unique()))      # of the large table the rows looked up
    saved = [(weight, place, weight[place].clone()) for weight, place in places]
    for weight, place, was in saved:
        weight[place] = was + 0.2 * torch.randn(was.shape, generator=generator, device=device).to(was.dtype)
    targets, view = targets.expand_as(rows[0]).contiguous(), View(c.val_window_blocks)
    base, *losses = [float(run.model(tokens, targets, view)) for tokens in rows]
    for weight, place, was in saved:
        weight[place] = was
    return {what: abs(loss / base - 1) for what, loss in zip([*cases][1:], losses)}


def unequal_ranks(run: Run) -> list[str]:
    sums = torch.stack([bank.weight.view(torch.int64).sum() for bank in run.optimizer.banks])     # summed uncopied
    extremes = run.world.reduced(torch.stack((sums, -sums)), dist.ReduceOp.MAX)
    return [f"the ranks hold different weights in {bank.group.name}"
            for bank, high, low in zip(run.optimizer.banks, *extremes.tolist()) if high != -low]


def self_check(run: Run, log: RunLog) -> None:
    """Would the numbers of this run mean anything? Raises Failure. Leaves all state as it was."""
    began, c, train, val = time.perf_counter(), run.config, run.train_stream, run.val_stream
    faults = [f"{what} changed, and the loss moved by {moved:.2g} of itself" for what, moved in probe(run).items()
              if (moved == 0 if what == "their own context" else not moved <= SELF_CHECK_TOLERANCE)]
    faults += unequal_ranks(run)
    held_out = torch.cat([val.document_hashes(k, c.eod_id) for k in range(len(val.paths))])
    known = int(torch.isin(held_out, train.document_hashes(0, c.eod_id)).sum())
    if known > MAX_KNOWN_SHARE * len(held_out):
        faults.append(f"{known} of {len(held_out)} validation documents begin like one of {train.paths[0]}")
    if faults:
        raise Failure(f"rank {run.world.rank}: self-check: " + "; ".join(faults))
    log.event(f"note: self-check passed in {time.perf_counter() - began:.2f} s: causal, documents isolated, ranks "
              f"equal, {known} of {len(held_out)} validation documents begin like one of the first training shard")


def facts(run: Run, overrides: dict, argv: list[str]) -> dict:
    """The log's header: everything needed to judge and repeat the run (what fits into memory is found later)."""
    c, world = run.config, run.world
    data = {split: dict(tokens=stream.num_tokens, files=[
        dict(file=os.path.basename(p), bytes=os.path.getsize(p), tokens=b - a, fingerprint=fingerprint(p))
        for p, a, b in zip(stream.paths, stream.starts, stream.starts[1:])])
        for split, stream in (("train", run.train_stream), ("val", run.val_stream))}
    device = torch.cuda.get_device_name(world.device) if world.is_cuda else platform.processor() or platform.machine()
    sizes = {b.group.name: sum(p.numel() for p in b.group.params.values()) for b in run.optimizer.banks}
    matmul = sum(sizes[b.group.name] for b in run.optimizer.banks if b.group.kind == "muon" or b.group.name == "head")
    return dict(
        name=c.preset, started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"), seed=c.seed,
        config=dataclasses.asdict(c), overrides=overrides, argv=argv, devices=[device] * world.size,
        source_sha256=hashlib.sha256(SOURCE.encode()).hexdigest(), world_size=world.size, resumed_from=None,
        versions=dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                      hip=torch.version.hip, os=platform.platform(), threads=torch.get_num_threads()),
        micro_rows=run.micro_rows, kernels={k: str(v) for k, v in run.kernels._asdict().items()},
        data=data | dict(tokenizer=(dataset_card(run.train_stream.paths) or {}).get("tokenizer")),
        git=git_state(str(Path(__file__).parent)) if world.rank == 0 else {},
        parameters=sizes | dict(total=sum(sizes.values()), matmul=matmul))


def identity(header: dict, tensors: Iterable[tuple[str, Tensor]]) -> dict:
    """What a checkpoint and the run that resumes from it must have in common, in JSON's types."""
    same = {f"setting {k}": v for k, v in header["config"].items() if k not in RESUME_MAY_CHANGE}
    for split in ("train", "val"):
        same |= {f"{split} file {number}": f"{file['file']} ({file['fingerprint']}, {file['tokens']} tokens)"
                 for number, file in enumerate(header["data"][split]["files"], 1)}
    return json.loads(json.dumps(same | {f"shape of {key}": list(t.shape) for key, t in tensors}))


def save_checkpoint(run: Run, store: Store, step: int, progress: Progress, header: dict) -> None:
    """Start a checkpoint of this moment. Raises Failure, on all ranks, when a number of it is not finite."""
    progress.clock.collect()
    progress.look()
    tensors = {}
    for key, t in run.optimizer.gathered():
        need_finite(f"step {step}", {key: float(t.sum(dtype=torch.float32))})          # without a copy of the table
        if run.world.rank == 0:
            tensors[key] = t.to("cpu", copy=True)
    if run.world.rank == 0:
        store.save(step, tensors, dict(
            format=1, step=step, tokens=progress.tokens, position=run.position, total_ms=progress.clock.elapsed_ms(),
            step_ms=list(progress.clock.step_ms), run=header,
            bank_steps={bank.group.name: bank.steps for bank in run.optimizer.banks}))


def load_checkpoint(run: Run, header: dict) -> dict:
    """Take over the checkpoint that --resume names. -> its facts. Raises Refusal, before anything is changed."""
    settings = identity(header, ())
    def misfit(facts: dict) -> str:
        differ = [key for key, value in identity(facts["run"], ()).items() if settings.get(key) != value]
        return f"{differ[0]} differs" if differ else ""
    path = find_checkpoint(run.config.resume, run.config.checkpoint_dir, misfit)
    saved, tensors = read_checkpoint(path)
    need_bank_steps(path, saved, [bank.group.name for bank in run.optimizer.banks])
    there, here = identity(saved["run"], tensors.items()), identity(header, run.optimizer.gathered())
    for key in [*there, *here]:
        if there.get(key) != here.get(key):
            raise Refusal(f"--resume={path}: {key} differs: {there.get(key, 'nothing')} in the checkpoint, "
                          f"{here.get(key, 'nothing')} in this run")
    run.optimizer.load(tensors, saved["bank_steps"])
    run.position, header["resumed_from"] = Position(*saved["position"]), str(path)
    return saved


def train(config: Config, world: World, log: RunLog, overrides: dict, argv: list[str]) -> dict:
    """The whole run. -> the result that the log's last line holds. Raises Refusal or Failure."""
    run = build(config, world, overrides)
    c, clock, header = run.config, Clock(world.device), {"run_id": log.run_id, **facts(run, overrides, argv)}
    saved = load_checkpoint(run, header) if c.resume else None
    log.header(SOURCE, header)
    log.event("note: " + budget(run))
    log.event(f"note: {world.size} x {world.device.type}, {header['parameters']['total']:,} parameters, {run.kernels}")
    if saved:
        log.event(f"note: resumed from {header['resumed_from']} at step {saved['step']}"
                  + ("" if saved["run"]["source_sha256"] == header["source_sha256"] else ", written by another source"))
    if world.is_cuda:
        alone = (run.kernels.compile, world.local, c.deterministic) == (True, 0, "off")
        help = alone and 0 < 3 * 2 ** 33 * c.micro_rows < torch.cuda.mem_get_info()[0]     # 0: to be found out
        helper = [sys.executable, "-c", HELPER.format(*os.path.split(os.path.abspath(__file__)), argv)]
        with subprocess.Popen(helper, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL) if help else contextlib.nullcontext():
            warmup(run, log)
    if c.self_check == "on":
        self_check(run, log)
    progress = Progress(c, log, clock, [bank.group.name for bank in run.optimizer.banks], header)
    if saved:
        clock.total_ms, clock.step_ms, progress.tokens = saved["total_ms"], saved["step_ms"], saved["tokens"]
    store = Store(Path(c.checkpoint_dir) / log.run_id, log)
    clock.synchronize()
    started = round(process_age_s(), 2)
    log.event(f"note: time_to_first_step_s:{started}")
    with stop_signals() as signals, contextlib.ExitStack() as profiling:
        try:
            result = loop(run, progress, store, signals, profiling, header, saved["step"] if saved else 0)
        finally:
            store.finish()                               # whatever happened: the last good checkpoint is whole
    log.event(f"note: data at epoch {run.position.epoch}, {run.position.dropped_tokens:,} tokens dropped by clipping")
    if c.self_check == "on" and (faults := unequal_ranks(run)):
        raise Failure(f"rank {world.rank}, after the last step: " + "; ".join(faults))
    ms, tokens, memory = clock.total_ms, progress.tokens, torch.cuda.max_memory_allocated() // 2 ** 20 or None
    result |= dict(train_time_ms=round(ms, 1), step_avg_ms=round(ms / max(1, result["step"]), 3), tokens_trained=tokens,
                   peak_memory_mib=memory, time_to_first_step_s=started, mfu=progress.mfu(tokens, ms),
                   checkpoint_failed=store.failed)
    log.write("step_times_ms:" + json.dumps([round(t, 2) for t in clock.step_ms]))
    if store.last:
        log.event(f"note: let it write: python records/sample.py {store.last} 'Once upon a time'")
    log.event("result:" + json.dumps(result))
    return result


def loop(run: Run, progress: Progress, store: Store, signals: list[int], profiling: contextlib.ExitStack, header: dict,
         first: int) -> dict:
    """Steps first.. of the schedule, on the clock, with validation off it. -> status, step and last validation.
    profiling holds the profiler while it runs: whoever closes it, also because the run ends, writes the trace."""
    c, world, log, clock = run.config, run.world, progress.log, progress.clock
    plan = [(rows_at(c, step), stage_at(c, step).max_doc_tokens) for step in range(first, c.num_steps)]
    planner = Planner(run.train_stream, c.eod_id, run.position)
    loader = batches(planner, plan, c.row_tokens, world.rank, world.size, world.is_cuda)
    result = dict(status="finished", reason="", num_steps=c.num_steps, resumed=bool(c.resume))
    clock.resume()
    for step in range(first, c.num_steps + 1):
        last = step == c.num_steps
        if last or (c.val_every_steps and step % c.val_every_steps == 0):
            clock.pause()
            progress.look()
            loss = evaluate(run)
            log.event(f"step:{step}/{c.num_steps} val_loss:{loss:.4f} train_time:{clock.total_ms:.0f}ms "
                      f"step_avg:{clock.total_ms / step if step else math.nan:.2f}ms")
            result |= dict(step=step, val_loss=loss, val_tokens=c.val_tokens)
            need_finite(f"step {step}", {"the validation loss": loss})
            if c.target_loss and loss <= c.target_loss and not last:
                result |= dict(status="target_reached", reason=f"validation loss {loss:.4f} <= {c.target_loss}")
                last = True
            if last:
                if c.checkpoint_every_steps:
                    save_checkpoint(run, store, step, progress, header)
                break
            clock.resume()
        if c.profile_steps and log.path and step == min(first + 5, c.num_steps - 1):
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
        if step == first + 20 < c.num_steps - 20:
            to_go = clock.elapsed_ms() / progress.tokens * sum(n for n, _ in plan[21:]) * c.row_tokens
            log.event(f"note: at this pace the training takes about {(clock.elapsed_ms() + to_go) / 1e3:.0f} s")
        if c.profile_steps and log.path and step == min(first + 5 + c.profile_steps, c.num_steps) - 1:
            profiling.close()
        if progress.stopping:                             # of the step before, so all ranks stop after the same step
            clock.pause()
            began, number = time.perf_counter(), signals[0] if signals else signal.SIGTERM
            save_checkpoint(run, store, step + 1, progress, header)
            store.finish()
            if world.size > 1:
                dist.barrier()                            # a launcher kills the others soon after the first has left
            result |= dict(status="stopped", step=step + 1, val_loss=None, signal=number,
                           reason=f"{signal.Signals(number).name}; "
                           + (f"go on with --resume={store.last}" if store.last else "no checkpoint was written"))
            log.event(f"note: {result['reason']} (checkpoint took {time.perf_counter() - began:.2f} s)")
            break
        if c.checkpoint_every_steps and (step + 1) % c.checkpoint_every_steps == 0 and step + 1 < c.num_steps:
            save_checkpoint(run, store, step + 1, progress, header)
    loader.close()
    return result


# ----------------------------------------------------------------------------------------------------------------------
# 10. Front door
# Parse, enter the world, train, leave. Exit codes: 0 done, 1 failed, 2 refused, 128 + signal stopped by it.

def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        say(help_text())
        return 0
    log = world = None
    try:
        config, overrides = parse_config(argv, "record" if torch.cuda.is_available() else "demo")
        if config.deterministic == "on":
            torch.use_deterministic_algorithms(True)
        world = init_world(config.deterministic == "on")
        log = RunLog(config.log_dir, world)              # before the ranks meet: a refusal of rank 0 then ends all
        if config.checkpoint_every_steps and world.rank == 0:
            need_writable(config.checkpoint_dir)
        join_group(world)
        result = train(config, world, log, overrides, argv)
        if result["status"] == "stopped":
            return 128 + result["signal"]
        return 1 if result["checkpoint_failed"] else 0
    except (Refusal, Failure, torch.OutOfMemoryError) as error:
        status = "refused" if isinstance(error, Refusal) else "failed"
        if isinstance(error, torch.OutOfMemoryError):
            error = Failure(f"rank {world.rank}: out of memory; use a smaller --micro_rows, or auto ({error})")
        if world is None or world.local == 0 or str(error).startswith("rank"):      # what all ranks say: once a host
            say(f"train_gpt: {error}", sys.stderr)
        if log is not None:
            log.write("result:" + json.dumps(dict(status=status, reason=str(error))))
        return 2 if status == "refused" else 1
    finally:
        if log is not None:
            log.close()
        close_world()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
