"""train_gpt: one file that trains a GPT-2-class language model to a target validation loss, fast.

Claim: none yet for 8xH100 and FineWeb; records/README.md lists what was measured, on which machine and data, with logs.

    torchrun --standalone --nproc_per_node=8 train_gpt.py           the record recipe on 8 GPUs
    python train_gpt.py --preset=sprint --train_files='data/x/*.bin' --val_files='data/y/*.bin'    one GPU, minutes
    ./run.sh                                                        whatever this machine can do, from laptop to 8 GPUs
    python train_gpt.py --help                                      every key, its default and what it means

The rooms, in the order in which names flow (a room uses only rooms above it):
    0 Door   1 Configuration   2 World   3 Kernels   4 Optimizer   5 Model   6 Data   7 Schedules
    8 Log and checkpoint   9 Training   10 Front door
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
import json
import math
import os
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
from typing import Callable, Iterable, Iterator, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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

    preset: str = "record"                 # name of the preset these values started from
    # Data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"    # comma-separated patterns, read in sorted order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    max_epochs: int = 1                    # passes over the training shards that the schedule may take
    vocab_size: int = 50_257               # ids in use; a dataset.json beside the shards overrides it
    eod_id: int = 50_256                   # the token that stands before every document
    # Length and batch
    num_steps: int = 1393
    batch_tokens: int = 524_288            # tokens of a full-size step over all ranks and micro-steps
    row_tokens: int = 16_384               # the atom of data: documents are packed into rows, nothing crosses rows
    micro_rows: int = 4                    # at most this many rows in one forward pass (memory only; 0 = find out)
    stages: str = "record20"               # which table of stages: batch, window, document clip, rate
    # Validation
    val_tokens: int = 10_485_760           # targets scored: the first of the validation files; 0 = all there are
    val_row_tokens: int = 65_536           # context of validation
    val_every_steps: int = 125             # 0 = only at the end
    target_loss: float = 3.28              # stop and say so when validation reaches it; 0 = run to the end
    # Model
    model_dim: int = 768
    num_layers: int = 12
    num_heads: int = 6
    head_dim: int = 128
    mlp_dim: int = 3072
    long_layers: tuple[int, ...] = (0, 4, 11)       # layers that see the whole window; others see half of it
    no_attention_layers: tuple[int, ...] = (7,)
    ngram_rows: tuple[int, ...] = ()       # hashed embeddings of the last 2, 3, .. tokens: rows of each table
    num_value_tables: int = 3              # value embeddings, shared by the first and the last so many layers
    window_tokens: int = 1792              # largest attention window; grows to it along the stages
    block_tokens: int = 128                # granularity of windows and block masks
    attention_scale: float = 0.12
    rotary_base: float = 1024.0
    softcap: float = 15.0                  # logits z become softcap * tanh(z / softcap)
    # Optimizer
    lr_matrix: float = 0.05                # Muon, hidden matrices
    lr_embed: float = 0.6                  # Adam, token and value embeddings
    lr_ngram: float = 0.2                  # Adam, n-gram tables
    lr_head: float = 0.008                 # Adam, output head
    lr_scalar: float = 0.04                # Adam, mixing scalars
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    adam_eps: float = 1e-10                # zero-initialised heads need it this small
    momentum_start: float = 0.85
    momentum_end: float = 0.95
    momentum_warmup_steps: int = 300
    cooldown_frac: float = 0.4             # last part of the run with a linearly falling rate
    lr_floor: float = 0.1                  # the rate it falls to, relative
    # Machine
    seed: int = 0
    compile: str = "auto"                  # auto (on with a GPU) | on | off
    attention: str = "auto"                # auto | flex (FlexAttention) | dense (reference)
    fp8: str = "auto"                      # auto (where the device has it) | on | off: output head in training
    deterministic: str = "off"             # on: same seed, same hardware, same losses, bit for bit; slower
    # Output
    log_dir: str = "logs"
    log_every_steps: int = 10
    profile_steps: int = 0                 # so many steps (from step 5 on) into a Chrome trace beside the log
    sample_tokens: int = 0                 # so many generated tokens at the end (byte vocabularies only)
    # Trust
    checkpoint_every_steps: int = 0        # and once at the end; 0 = only when SIGTERM or SIGINT stops the run
    checkpoint_dir: str = "checkpoints"    # each run gets a folder of its own in it, with its last two checkpoints
    resume: str = ""                       # folder of a checkpoint, or latest: the newest one in checkpoint_dir
    self_check: str = "on"                 # before the clock starts: causality, isolation, equal ranks, disjoint data

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 128) * 128

    @property
    def batch_rows(self) -> int:
        return self.batch_tokens // self.row_tokens


PRESETS: dict[str, dict] = {
    "record": {},
    "sprint": dict(num_steps=290, target_loss=3.48, val_tokens=2_097_152, max_epochs=2, micro_rows=4),
    "demo": dict(
        train_files="data/builtin/train_*.bin", val_files="data/builtin/val_*.bin", max_epochs=100,
        vocab_size=257, eod_id=256, num_steps=200, batch_tokens=4096, row_tokens=256, micro_rows=16, stages="flat",
        val_tokens=0, val_row_tokens=256, val_every_steps=25, target_loss=0.0, model_dim=128, num_layers=4,
        num_heads=2, head_dim=64, mlp_dim=512, long_layers=(0, 3), no_attention_layers=(), num_value_tables=2,
        ngram_rows=(8192, 32_768, 32_768), window_tokens=256, block_tokens=32, attention_scale=0.3, sample_tokens=400),
    "tiny": dict(
        num_steps=3, batch_tokens=1024, row_tokens=128, micro_rows=8, val_tokens=10_000, val_row_tokens=128,
        val_every_steps=0, target_loss=0.0, model_dim=64, num_layers=2, num_heads=2, head_dim=32, mlp_dim=128,
        long_layers=(0,), no_attention_layers=(), num_value_tables=1, window_tokens=64, block_tokens=16,
        momentum_warmup_steps=10),
}
CHOICES = dict(preset=tuple(PRESETS), compile=("auto", "on", "off"), attention=("auto", "flex", "dense"),
               fp8=("auto", "on", "off"), deterministic=("on", "off"), self_check=("on", "off"))
LIMITS = {key: limits for keys, *limits in (          # smallest and largest value, else 0 and 2^63 - 1
    ("num_layers", 1, 1000), ("num_steps", 1, 10 ** 6), ("vocab_size", 1, 2 ** 16), ("batch_tokens", 1, 2 ** 26),
    ("row_tokens block_tokens window_tokens num_heads mlp_dim", 1, 2 ** 24), ("ngram_rows", 1, 2 ** 31),
    ("val_row_tokens model_dim head_dim", 4, 2 ** 24), ("max_epochs log_every_steps", 1, 2 ** 63 - 1),
    ("softcap rotary_base", 1e-6, 2 ** 63 - 1), ("cooldown_frac", 0, 1),
    ("adam_beta1 adam_beta2 momentum_start momentum_end", 0, 0.999999)) for key in keys.split()}
SWITCH_WORDS = {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}
HARMLESS_KEYS = ("seed", "log_dir", "micro_rows", "train_files", "val_files",     # overrides that change no curve
                 "checkpoint_every_steps", "checkpoint_dir", "self_check")
RESUME_MAY_CHANGE = set(HARMLESS_KEYS[1:]) | {          # what a resumed run may set anew; the data itself is compared
    "preset", "resume", "max_epochs", "val_tokens", "val_row_tokens", "val_every_steps", "target_loss", "compile",
    "attention", "fp8", "deterministic", "log_every_steps", "profile_steps", "sample_tokens"}


def parse_value(key: str, kind: type, text: str):
    """Text of --key=text as a value of the field's type; raises Refusal with one line."""
    try:
        if kind in (int, float):
            return 0 if (key, text) == ("micro_rows", "auto") else kind(text)
        if kind is str:
            text = SWITCH_WORDS.get(text.lower(), text) if "on" in CHOICES.get(key, ()) else text
            if key in CHOICES and text not in CHOICES[key]:
                raise ValueError
            return text
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        wanted = "one of " + ", ".join(CHOICES[key]) if key in CHOICES else \
            {int: "a whole number", float: "a number"}.get(kind, "whole numbers with commas, as 0,4,11")
        raise Refusal(f"--{key}={text:.99}: expected {wanted}") from None


def help_text() -> str:
    lines = [f"  --{f.name}={getattr(Config(), f.name)}" for f in dataclasses.fields(Config)]
    return __doc__ + "\nPresets: " + ", ".join(PRESETS) + ". Keys with the record's values:\n" + "\n".join(lines)


def parse_config(argv: list[str], default_preset: str = "record") -> tuple[Config, dict]:
    """argv (without the program) -> (Config, overrides given by hand). Raises Refusal on anything it can't use."""
    kinds = {f.name: f.type if isinstance(f.type, type) else tuple for f in dataclasses.fields(Config)}
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
    def need(ok: bool, text: str) -> None:
        if not ok:
            raise Refusal(text)

    own = dict(eod_id=(0, c.vocab_size - 1, "vocab_size - 1"), num_value_tables=(0, c.num_layers // 2, "num_layers/2"),
               **dict.fromkeys(("long_layers", "no_attention_layers"), (0, c.num_layers - 1, "num_layers - 1")))
    for f in dataclasses.fields(c):
        value, (low, high, *name) = getattr(c, f.name), (LIMITS | own).get(f.name, (0, 2 ** 63 - 1))
        for number in () if isinstance(value, str) else value if isinstance(value, tuple) else (value,):
            need(low <= number <= high, f"--{f.name}={value!s:.99}: expected a finite number from {low} to "
                 + " = ".join([*name, str(high)]))
    for key, unit in (("batch", "row"), ("row", "block"), ("val_row", "block"), ("window", "block")):
        value, size = getattr(c, f"{key}_tokens"), getattr(c, f"{unit}_tokens")
        need(value % size == 0, f"--{key}_tokens={value}: expected a multiple of {unit}_tokens={size}")
    need(c.head_dim % 4 == 0, f"--head_dim={c.head_dim}: expected a multiple of 4 (rotary turns half of each head)")
    need(len(c.ngram_rows) <= min(c.row_tokens, c.val_row_tokens),
         f"--ngram_rows={str(c.ngram_rows):.99}: expected no more tables than row_tokens and val_row_tokens")
    params = c.model_dim * (2 * c.padded_vocab + sum(c.ngram_rows) + 2 * c.num_layers * c.mlp_dim) \
        + c.num_heads * c.head_dim * (4 * c.num_layers * c.model_dim + c.num_value_tables * c.padded_vocab)
    need(params <= 10 ** 10, f"--model_dim={c.model_dim} with num_layers, num_heads, head_dim, mlp_dim, vocab_size, "
         f"ngram_rows and num_value_tables: {params:,} parameters, expected at most {10 ** 10:,}")


# ----------------------------------------------------------------------------------------------------------------------
# 2. World
# Which process this is among how many, and on which device. The only room that reads or sets environment variables.


@dataclass(frozen=True)
class World:
    """rank of size processes, on device. World() is one CPU process without a process group."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def init_world(deterministic: bool = False, join: bool = True) -> World:
    """Read the launcher's variables (torchrun's), take the device and join the group, now or later. Raises Refusal."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 11):
        raise Refusal(f"torch {torch.__version__} found, expected 2.11 or newer: pip install -r requirements.txt")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")     # varying shapes without fragmentation
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        rank, size, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    except ValueError as error:
        raise Refusal(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error}); start with torchrun") from None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local >= count:
            raise Refusal(f"local rank {local} has no GPU: {count} found; start with --nproc_per_node={count} or fewer")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    world = World(rank, size, device)
    if join:
        join_group(world)
    return world


def join_group(world: World) -> None:
    """Meet the other ranks. Raises Refusal when the launcher's variables don't say where."""
    if world.size > 1:
        try:
            dist.init_process_group("nccl" if world.is_cuda else "gloo", timeout=datetime.timedelta(minutes=10),
                                    device_id=world.device if world.is_cuda else None)
        except ValueError as error:
            raise Refusal(f"WORLD_SIZE={world.size}, but no meeting point ({error}); start with torchrun") from None


def find_compiler() -> str | None:
    """Path of the C compiler that torch.compile would call on a CPU, if there is one."""
    return next(filter(None, map(shutil.which, [os.environ.get("CC", ""), "cc", "gcc", "clang", "c++", "g++"])), None)


def close_world(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


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


def choose_kernels(device: torch.device, compile: str = "auto", attention: str = "auto", fp8: str = "auto") -> Kernels:
    """Fast paths where the device has them, references elsewhere. Raises Refusal for what it can't do."""
    cuda = device.type == "cuda"
    compiled = cuda if compile == "auto" else compile == "on"
    has_fp8 = cuda and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if fp8 == "on" and not has_fp8:
        raise Refusal("--fp8=on: this device has no fp8 matrix units (compute capability 8.9 or newer); use --fp8=off")
    if attention == "flex" and not (cuda and compiled):
        raise Refusal("--attention=flex: FlexAttention trains only on a GPU and compiled; use --attention=dense")
    flex = cuda and compiled and attention != "dense"
    dtype = torch.bfloat16 if cuda else torch.float32
    return Kernels(compiled, flex, has_fp8 and compiled and fp8 != "off", dtype)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5     # Keller Jordan's quintic: slope at 0 maximal, ends near [0.7, 1.2]


def orthogonalize(G_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest semi-orthogonal matrix of each G, up to singular values in about [0.7, 1.2]. [N, R, C] -> same, dtype.

    X <- aX + (bA + cA^2)X with A = XX^T, five times, from X = G / |G|_F, on the smaller side (Bernstein; Jordan).
    The norm is taken in fp32 without a visible epsilon, so that gradients of any size give the same answer.
    """
    X = G_NRC.float()
    X = (X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)).to(dtype)
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, softcap: float) -> Tensor:
    """Sum of cross-entropies in fp32. logits [T, V]; targets [T], negative ones are left out. -> scalar.

    2s sigmoid(2z / s) = s tanh(z / s) + s: the same softmax as the tanh form (Gemma 2) at one operation less.
    """
    z = 2 * softcap * torch.sigmoid(logits.float() * (2 / softcap))
    return F.cross_entropy(z, targets.long(), ignore_index=-1, reduction="sum")


def fp8_matmul(a8: Tensor, b8: Tensor, scale: float, fast: bool) -> Tensor:
    """a8 [M, K] row-major times b8 [K, N] column-major, the only layouts the hardware takes, times scale -> bf16."""
    one, scale = (torch.full((), s, dtype=torch.float32, device=a8.device) for s in (1.0, scale))
    return torch._scaled_mm(a8, b8, scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


X_SCALE, W_SCALE, G_SCALE = 2.0, 32.0, 8192.0     # constants: every micro-batch sees the same scales


def head_gradients(x: Tensor, w: Tensor, targets: Tensor, softcap: float, fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss and its gradients by x [T, K] and w [V, K], in one go: no second look at the [T, V] logits.

    z lies in (0, 2s), so exp needs no maximum; the gradient is (softmax - onehot) 4 sigmoid (1 - sigmoid), at most 1.
    With fp8: e4m3 forward, e5m2 gradient (record 19 of the public race). Reference: plain autograd of GPT.plain_loss.
    """
    if fp8:
        x8, w8 = (x * X_SCALE).to(torch.float8_e4m3fn), (w * W_SCALE).to(torch.float8_e4m3fn)
        logits = fp8_matmul(x8, w8.t(), 1 / (X_SCALE * W_SCALE), True)
    else:
        logits = F.linear(x, w)
    half = torch.sigmoid(logits.float() * (2 / softcap))
    lse = (2 * softcap * half - softcap).exp().sum(1, keepdim=True).log() + softcap
    counts, targets = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    at_target = 2 * softcap * torch.sigmoid(logits.gather(1, targets.long()).float() * (2 / softcap))
    loss = ((lse - at_target) * counts).sum()
    onehot = torch.arange(w.size(0), device=w.device, dtype=targets.dtype) == targets
    grad = ((2 * softcap * half - lse).exp() - onehot.float()) * (4 * half * (1 - half)) * counts
    if not fp8:
        grad = grad.to(x.dtype)
        return loss, grad @ w, grad.t() @ x
    g8 = (grad * G_SCALE).to(torch.float8_e5m2)
    dx = fp8_matmul(g8, w8.t().contiguous().t(), 1 / (G_SCALE * W_SCALE), False)
    dw = fp8_matmul(g8.t().contiguous(), x8.t().contiguous().t(), 1 / (G_SCALE * X_SCALE), False)
    return loss, dx, dw


class HeadLoss(torch.autograd.Function):
    """head_gradients as a differentiable scalar; gradients (a compiled head_gradients) does the work in forward."""

    @staticmethod
    def forward(ctx, x, w, targets, softcap, fp8, gradients):
        loss, dx, dw = gradients(x, w, targets, softcap, fp8)
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        dx, dw = ctx.saved_tensors
        return dx * upstream.to(dx.dtype), dw * upstream.to(dw.dtype), None, None, None, None


class Mask(NamedTuple):
    """Who sees whom: causal, same segment, and at most so many blocks back. One of dense and blocks is set."""

    segments_BT: Tensor
    dense: Tensor | None = None                  # [B, 1, T, T], True where attention is allowed
    blocks: tuple[Tensor, ...] | None = None     # FlexAttention's lists: partial, full, and both transposed


def segment_ids(tokens_BT: Tensor, eod_id: int) -> Tensor:
    """Number of document starts up to each position of its row: the one rule of what belongs together. int32 [B, T]."""
    return (tokens_BT == eod_id).cumsum(1, dtype=torch.int32)


def dense_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """Reference mask: query i sees key j <= i of its segment, at most window_blocks blocks (own one included) back."""
    i = torch.arange(segments_BT.size(1), device=segments_BT.device)
    near = (i[:, None] >= i) & (i[:, None] // block - i // block < window_blocks)
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    return Mask(segments_BT, dense=(near & same)[:, None])


def block_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """The same rule as lists of blocks, built on the device without a search, sort or dense mask.

    Segment ids only grow along a row, so everything a block of queries i sees is one run of key blocks [low, i], and
    what it sees wholly is the run [full_low, i - 1]; likewise for the queries [j, high] that see a block of keys j.
    """
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
    segments = mask.segments_BT

    def rule(b, h, i, j):
        return (i >= j) & (segments[b, i] == segments[b, j])

    kv_num, kv, q_num, qs, full_kv_num, full_kv, full_q_num, full_q = mask.blocks
    lists = BlockMask((q.size(2), q.size(2)), kv_num, kv, full_kv_num, full_kv, q_num, qs, full_q_num, full_q,
                      BLOCK_SIZE=(block, block), mask_mod=rule)
    return flex_attention(q, k, v, block_mask=lists, scale=scale).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Optimizer
# Pure update rules, and one class that shards them over the ranks: reduce gradients, update a shard, gather weights.
# It knows groups of parameters and nothing of models, layers or schedules. With one rank the collectives vanish.


reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)      # the new names of torch 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Group(NamedTuple):
    """Parameters that share one rule and one rate. kind: muon (matrices [.., R, C] of one shape) | adam (any)."""

    name: str
    kind: str
    params: dict[str, nn.Parameter]
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10


def muon_update(weight: Tensor, grad: Tensor, momentum_buffer: Tensor, lr: Tensor, momentum: Tensor,
                dtype: torch.dtype) -> None:
    """Muon (Jordan et al. 2024) on a stack [N, R, C]: Nesterov momentum, orthogonalised. In place: weight, buffer.

    M <- mu M + (1 - mu) G;  W <- W - lr sqrt(max(1, R/C)) orth((1 - mu) G + mu M).
    """
    grad = grad.float()
    momentum_buffer.mul_(momentum).add_(grad * (1 - momentum))
    update = orthogonalize(grad * (1 - momentum) + momentum_buffer * momentum, dtype)
    weight.sub_(update.float() * (lr * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5))


def adam_update(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: Tensor, bias1: Tensor,
                bias2: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor) -> None:
    """Adam (Kingma & Ba 2015), bias-corrected, any shape. bias = 1 - beta^step. In place: weight and both averages."""
    grad = grad.float()
    exp_avg.mul_(beta1).add_(grad * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(grad * grad * (1 - beta2))
    weight.sub_(lr / bias1 * exp_avg / ((exp_avg_sq / bias2).sqrt() + eps))


class Bank:
    """A group's parameters as views of one padded buffer, so that one collective and one batched kernel serve all.

    Muon banks are [N, R, C], Adam banks flat. Each rank owns 1/size of the first dimension: its shard has an exact
    fp32 master copy (the weights themselves where these are fp32) and the optimizer state.
    """

    def __init__(self, group: Group, world: World):
        self.group, self.world, self.steps = group, world, 0
        params = list(group.params.values())
        unit = params[0].shape[-2:] if group.kind == "muon" else ()
        align = 1 if group.kind == "muon" else 128       # keeps every view 256-byte aligned
        counts = [round_up(p.numel() // math.prod(unit), align) for p in params]
        total = round_up(sum(counts), align * world.size)
        self.weight = torch.zeros(total, *unit, dtype=params[0].dtype, device=world.device)
        self.grad = torch.zeros_like(self.weight)
        self.offsets = {}
        start = 0
        for (name, p), count in zip(group.params.items(), counts):
            self.offsets[name] = start
            self.part(self.weight, name).copy_(p.data)
            p.data, p.grad = self.part(self.weight, name), self.part(self.grad, name)
            start += count
        size = total // world.size
        self.weight_shard = self.weight[world.rank * size:(world.rank + 1) * size]
        self.grad_shard = self.grad if world.size == 1 else torch.zeros_like(self.weight_shard)
        self.master = self.weight_shard if self.weight.dtype == torch.float32 else self.weight_shard.float()
        names = ("momentum",) if group.kind == "muon" else ("exp_avg", "exp_avg_sq")
        self.state = {name: torch.zeros_like(self.master) for name in names}

    def exact(self) -> dict[str, Tensor]:
        """This rank's shards of what a checkpoint keeps: exact weights and state."""
        return {"weight": self.master, **self.state}

    def part(self, full: Tensor, name: str) -> Tensor:
        """The parameter's view of a buffer of the whole bank."""
        p, start = self.group.params[name], self.offsets[name]
        return full[start:start + p.numel() // math.prod(full.shape[1:])].view(p.shape)

    def reduce(self):
        """Start summing gradients over the ranks into this rank's shard."""
        if self.world.size > 1:
            return reduce_scatter(self.grad_shard, self.grad, op=dist.ReduceOp.SUM, async_op=True)

    def gather(self):
        """Start collecting all ranks' new weights."""
        if self.master is not self.weight_shard:
            self.weight_shard.copy_(self.master)
        if self.world.size > 1:
            return all_gather(self.weight, self.weight_shard, async_op=True)


class Optimizer:
    """All groups. step() overlaps each bank's communication with its neighbours' updates."""

    def __init__(self, groups: list[Group], world: World, compile: bool, dtype: torch.dtype):
        self.world, self.dtype = world, dtype
        self.banks = [Bank(group, world) for group in groups]
        self.muon_update, self.adam_update = muon_update, adam_update
        if compile:                                       # one Adam graph for flat banks of all lengths
            self.muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True)
            self.adam_update = torch.compile(adam_update, dynamic=True, fullgraph=True)

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """One update of everything; zeroes the gradients. -> squared gradient norm of each bank's shard, [banks]."""
        pending = [bank.reduce() for bank in self.banks]
        gathers, norms = [], []
        for bank, work in zip(self.banks, pending):
            if work is not None:
                work.wait()
            norms.append(torch.linalg.vector_norm(bank.grad_shard, dtype=torch.float32).square())
            self.update(bank, lr_scale, momentum)
            gathers.append(bank.gather())
        for bank, work in zip(self.banks, gathers):
            if work is not None:
                work.wait()
            bank.grad.zero_()
        return torch.stack(norms)

    def update(self, bank: Bank, lr_scale: float, momentum: float) -> None:
        bank.steps += 1
        # 0-D CPU tensors: new values don't recompile, and no number is baked into the compiler's cache on disk, which
        # with dynamic=True hands the graph of one beta to a run with another (torch 2.13).
        group, scalar = bank.group, torch.tensor
        lr = scalar(group.lr * lr_scale)
        if group.kind == "muon":
            self.muon_update(bank.master, bank.grad_shard, bank.state["momentum"], lr, scalar(momentum), self.dtype)
        else:
            bias1, bias2 = (scalar(1 - beta ** bank.steps) for beta in group.betas)
            self.adam_update(bank.master, bank.grad_shard, bank.state["exp_avg"], bank.state["exp_avg_sq"], lr,
                             bias1, bias2, *map(scalar, group.betas), scalar(group.eps))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by name: what warm-up must restore and a checkpoint must hold."""
        out = {}
        for bank in self.banks:
            changing = dict(weight=bank.weight, grad=bank.grad, master=bank.master, **bank.state)
            out |= {f"{bank.group.name}.{key}": value for key, value in changing.items()}
        return out

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """("PARAMETER/KIND", tensor): exact weights and state, whole and unpadded, on every rank; all must iterate."""
        for bank in self.banks:
            for kind, shard in bank.exact().items():
                full = shard
                if self.world.size > 1:
                    full = shard.new_empty(bank.weight.shape)
                    all_gather(full, shard)
                yield from ((f"{name}/{kind}", bank.part(full, name)) for name in bank.offsets)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
        """Take over what gathered() gave, on any number of ranks; steps by bank."""
        for bank in self.banks:
            bank.steps = steps[bank.group.name]
            for kind, shard in bank.exact().items():
                full = shard.new_zeros(bank.weight.shape)
                for name in bank.offsets:
                    bank.part(full, name).copy_(tensors[f"{name}/{kind}"])
                shard.copy_(full.chunk(self.world.size)[self.world.rank])
                if kind == "weight":
                    bank.weight.copy_(full)


# ----------------------------------------------------------------------------------------------------------------------
# 5. Model
# A GPT of rows of tokens. Topology is a table with one row per layer; parameters are a table with one row per family.
# Shapes: B rows, T positions, H heads, D head width, E model width. No collectives, files, clocks or environment.


class Layer(NamedTuple):
    """One row of the topology table."""

    attention: str | None        # "long" (whole window), "short" (half of it), None
    value_table: int | None      # which value embedding is mixed into the values
    skip_from: int | None        # U-net: add the output of this earlier layer to the input


def layer_table(c: Config) -> list[Layer]:
    """Record 20's topology at any depth: shared value tables at both ends, mirrored skips, few long layers."""
    table = []
    for i in range(c.num_layers):
        mirrored = c.num_layers - 1 - i
        attention = None if i in c.no_attention_layers else "long" if i in c.long_layers else "short"
        from_end = c.num_value_tables - 1 - mirrored
        value = i if i < c.num_value_tables else from_end if from_end >= 0 else None
        table.append(Layer(attention, value if attention else None, mirrored if mirrored < i else None))
    return table


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def ngram_ids(tokens_BT: Tensor, segments_BT: Tensor, rows: tuple[int, ...], eod_id: int) -> list[Tensor]:
    """Row [B, T] of each table for the 2, 3, .. tokens that end here. History stops where the segment begins."""
    hashed, ids = tokens_BT.long(), []
    for back, num_rows in enumerate(rows, 1):
        older, segment = (F.pad(t, (back, -back), value=-1) for t in (tokens_BT, segments_BT))
        hashed = (hashed * 1_000_003 + torch.where(segment == segments_BT, older, eod_id) + 1) % 2_147_483_647
        ids.append(hashed % num_rows)
    return ids


def add_skip(x: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    return x + weight * skip


def rotary_tables(num_positions: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2], kept in like's precision. The upper half of the pairs stands still (half-truncated)."""
    quarter = head_dim // 4
    freq = (1 / base) ** torch.linspace(0, 1, quarter, dtype=torch.float32, device=like.device)
    angle = torch.arange(num_positions, dtype=torch.float32, device=like.device)[:, None] * F.pad(freq, (0, quarter))
    return angle.cos().to(like.dtype)[:, None], angle.sin().to(like.dtype)[:, None]


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (j, j + D/2) by their position's angle (RoPE, Su et al. 2021)."""
    cos, sin = (t.float() for t in rotary)
    a, b = x_BTHD.float().chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).type_as(x_BTHD)


class Attention(nn.Module):
    """Merged QKV, QK-norm, rotary, values mixed with a value embedding."""

    def __init__(self, c: Config, layer: Layer, dtype: torch.dtype):
        super().__init__()
        self.config = c
        width = c.num_heads * c.head_dim
        self.qkv = nn.Parameter(torch.empty(3, width, c.model_dim, dtype=dtype))
        self.out = nn.Parameter(torch.empty(c.model_dim, width, dtype=dtype))
        self.value_mix = nn.Parameter(torch.empty(1 if layer.value_table is None else 2))

    def forward(self, x_BTE: Tensor, ve_BTE: Tensor | None, mask: Mask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        B, T, _ = x_BTE.shape
        q, k, v = F.linear(x_BTE, self.qkv.flatten(0, 1)).view(B, T, 3, c.num_heads, c.head_dim).unbind(2)
        q, k = rotate(norm(q), rotary), rotate(norm(k), rotary)
        v = self.value_mix[0] * v
        if ve_BTE is not None:
            v = v + self.value_mix[1] * ve_BTE.view_as(v)
        y = attend(q, k, v, mask, c.attention_scale, c.block_tokens)
        return F.linear(y.reshape(B, T, -1), self.out)


class MLP(nn.Module):
    """W2 relu(W1 x)^2 (So et al. 2021)."""

    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.up = nn.Parameter(torch.empty(c.mlp_dim, c.model_dim, dtype=dtype))
        self.down = nn.Parameter(torch.empty(c.model_dim, c.mlp_dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.up)).square(), self.down)


class Block(nn.Module):
    """x <- a x + b x0; x <- x + attention(norm x); x <- x + mlp(norm x)."""

    def __init__(self, c: Config, layer: Layer, dtype: torch.dtype):
        super().__init__()
        self.attention = Attention(c, layer, dtype) if layer.attention else None
        self.mlp = MLP(c, dtype)
        self.mix = nn.Parameter(torch.empty(2))
        self.skip_weight = None if layer.skip_from is None else nn.Parameter(torch.empty(()))

    def forward(self, x, x0, ve, mask, rotary):
        x = self.mix[0] * x + self.mix[1] * x0
        if self.attention is not None:
            x = x + self.attention(norm(x), ve, mask, rotary)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """tokens [B, T] -> logits, or the summed loss when targets are given. Rows and documents don't see each other."""

    def __init__(self, c: Config, kernels: Kernels = Kernels()):
        super().__init__()
        self.config, self.kernels, self.table = c, kernels, layer_table(c)
        dtype = kernels.dtype
        self.embed = nn.Parameter(torch.empty(c.padded_vocab, c.model_dim, dtype=dtype))
        tables = torch.empty(c.num_value_tables, c.padded_vocab, c.num_heads * c.head_dim, dtype=dtype)
        self.value_embeds = nn.ParameterList(nn.Parameter(table) for table in tables)
        self.ngrams = nn.ParameterList(nn.Parameter(torch.empty(n, c.model_dim, dtype=dtype)) for n in c.ngram_rows)
        self.blocks = nn.ModuleList(Block(c, layer, dtype) for layer in self.table)
        self.head = nn.Parameter(torch.empty(c.padded_vocab, c.model_dim, dtype=dtype))
        self.head_gradients, self.cross_entropy = head_gradients, self.plain_loss
        self.build_mask, self.add_skip = block_mask if kernels.flex else dense_mask, add_skip
        self.rotary: dict[int, tuple[Tensor, Tensor]] = {}      # by row length; not saved
        if kernels.compile:             # by the block: equal layers share one graph, so that a cold start takes seconds
            for block in self.blocks:
                block.compile(dynamic=False, fullgraph=True)
            self.add_skip = torch.compile(add_skip, dynamic=False, fullgraph=True)
            self.head_gradients = torch.compile(head_gradients, dynamic=False, fullgraph=True)
            self.cross_entropy = torch.compile(self.plain_loss, dynamic=False, fullgraph=True)
            self.build_mask = torch.compile(self.build_mask, dynamic=False, fullgraph=True)

    def hidden(self, tokens_BT: Tensor, window_blocks: Tensor) -> Tensor:
        """Final normed states [B, T, E]. window_blocks: 0-D integer tensor, the long window in blocks."""
        c, T = self.config, tokens_BT.size(1)
        if T not in self.rotary:
            self.rotary[T] = rotary_tables(T, c.head_dim, c.rotary_base, self.embed)
        segments = segment_ids(tokens_BT, c.eod_id)
        masks = {"long": self.build_mask(segments, window_blocks, c.block_tokens),
                 "short": self.build_mask(segments, (window_blocks // 2).clamp(min=1), c.block_tokens)}
        x0 = F.embedding(tokens_BT, self.embed)
        for table, ids in zip(self.ngrams, ngram_ids(tokens_BT, segments, c.ngram_rows, c.eod_id)):
            x0 = x0 + F.embedding(ids, table)                    # record 62 of the public race, more than bigrams
        x0 = norm(x0)
        x = x0.clone()                       # "x is x0" would be a graph of its own
        ves = [F.embedding(tokens_BT, table) for table in self.value_embeds]
        outputs = []
        for layer, block in zip(self.table, self.blocks):
            if layer.skip_from is not None:      # outside of the block: fewer kinds of blocks, fewer graphs to compile
                x = self.add_skip(x, outputs[layer.skip_from], block.skip_weight)
            ve = None if layer.value_table is None else ves[layer.value_table]
            x = block(x, x0, ve, masks.get(layer.attention), self.rotary[T])
            outputs.append(x)
        return norm(x)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None, window_blocks: Tensor) -> Tensor:
        x = self.hidden(tokens_BT, window_blocks)
        if targets_BT is None:
            logits = F.linear(x, self.head).float()
            return self.config.softcap * torch.tanh(logits / self.config.softcap)
        x, targets = x.flatten(0, 1), targets_BT.flatten()
        if self.training and self.kernels.compile:
            return HeadLoss.apply(x, self.head, targets, self.config.softcap, self.kernels.fp8, self.head_gradients)
        return self.cross_entropy(x, targets)

    def plain_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Reference of the head: [T, E] -> summed loss. Also what validation uses."""
        return softcapped_cross_entropy(F.linear(x, self.head), targets, self.config.softcap)


class Family(NamedTuple):
    """One row of the parameter table: which names, how they begin, how they learn. Rows of one bank share its rule."""

    name: str
    pattern: str
    init: Callable[[Tensor], object]
    bank: str
    kind: str
    lr: float


def fan_in_uniform(w: Tensor) -> None:
    """Half the standard deviation of 1 / sqrt(fan_in), uniform."""
    bound = 0.5 * 3 ** 0.5 * w.size(-1) ** -0.5
    w.uniform_(-bound, bound)


def constant(*values: float) -> Callable[[Tensor], object]:
    return lambda w: w.copy_(torch.tensor(values if len(values) > 1 else values * w.numel()).view(w.shape))


def families(c: Config) -> list[Family]:
    return [
        #      name             pattern                         init              bank            kind    lr
        Family("embed",         r"embed",                       Tensor.normal_,   "embed",        "adam", c.lr_embed),
        Family("value_embeds",  r"value_embeds\.\d+",           Tensor.normal_,   "value_embeds", "adam", c.lr_embed),
        Family("ngrams",        r"ngrams\.\d+",                 Tensor.zero_,     "ngrams",       "adam", c.lr_ngram),
        Family("head",          r"head",                        Tensor.zero_,     "head",         "adam", c.lr_head),
        Family("block_mix",     r"blocks\.\d+\.mix",           constant(1., 0.), "scalars",      "adam", c.lr_scalar),
        Family("value_mix",     r".*\.value_mix",               constant(0.5),    "scalars",      "adam", c.lr_scalar),
        Family("skip_weight",   r"blocks\.\d+\.skip_weight",   constant(1.),     "scalars",      "adam", c.lr_scalar),
        Family("qkv",           r".*\.attention\.qkv",          fan_in_uniform,   "attention",    "muon", c.lr_matrix),
        Family("attention_out", r".*\.attention\.out",          Tensor.zero_,     "attention",    "muon", c.lr_matrix),
        Family("mlp_up",        r".*\.mlp\.up",                 fan_in_uniform,   "mlp_up",       "muon", c.lr_matrix),
        Family("mlp_down",      r".*\.mlp\.down",               Tensor.zero_,     "mlp_down",     "muon", c.lr_matrix),
    ]


def claimed(c: Config, model: nn.Module) -> list[tuple[Family, dict[str, nn.Parameter]]]:
    """Each family with its parameters; raises ValueError unless every parameter has exactly one family."""
    rows = [(family, {}) for family in families(c)]
    for name, p in model.named_parameters():
        owners = [row for row in rows if re.fullmatch(row[0].pattern, name)]
        if len(owners) != 1:
            raise ValueError(f"parameter {name} has {len(owners)} rows in families(), expected exactly 1")
        owners[0][1][name] = p
    return [row for row in rows if row[1]]


@torch.no_grad()
def init_weights(c: Config, model: nn.Module) -> None:
    for family, params in claimed(c, model):
        for p in params.values():
            family.init(p)


def param_groups(c: Config, model: nn.Module) -> list[dict]:
    """The split Adam groups and the Muon groups, in the order in which their gradients are reduced."""
    groups: dict[str, dict] = {}
    for family, params in claimed(c, model):
        rule = dict(name=family.bank, kind=family.kind, params={}, lr=family.lr, betas=(c.adam_beta1, c.adam_beta2),
                    eps=c.adam_eps)
        groups.setdefault(family.bank, rule)["params"].update(params)
    return list(groups.values())


@torch.no_grad()
def generate(model: GPT, prompt: list[int], num_tokens: int, seed: int = 0, temperature: float = 0.8, top_k: int = 50
             ) -> list[int]:
    """prompt + num_tokens sampled tokens. The whole context is computed anew each time; padded ids are never drawn."""
    c, tokens = model.config, list(prompt)
    device, generator = model.embed.device, torch.Generator().manual_seed(seed)
    window = torch.full((), c.window_tokens // c.block_tokens, dtype=torch.int32, device=device)
    for _ in range(num_tokens):
        context = tokens[-c.row_tokens:]
        length = round_up(len(context), c.block_tokens)
        row = torch.tensor([context + [c.eod_id] * (length - len(context))], dtype=torch.int32, device=device)
        logits = model(row, None, window)[0, len(context) - 1, :c.vocab_size].float().cpu() / max(temperature, 1e-6)
        best = logits.topk(min(top_k, c.vocab_size))
        tokens.append(int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)]))
    return tokens


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
    names = sorted({os.path.abspath(p) for pattern in patterns.split(",") for p in glob.glob(pattern.strip())})
    paths = sorted({os.path.realpath(name): name for name in names[::-1]}.values())     # a file may have several names
    for path in paths:
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise Refusal(f"{path}: no file that can be read; restore it, or name others with --{what}_files=PATTERN")
    if not paths:
        raise Refusal(f"no {what} shards match {patterns:.300}. FineWeb: python data/cached_fineweb10B.py; the demo's "
                      "text: python data/text.py --builtin --tokenizer=bytes; your own: python data/text.py --help; or "
                      f"name shards with --{what}_files=PATTERN")
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
        self.starts = [0]
        for path in paths:
            self.starts.append(self.starts[-1] + shard_tokens(path))
        self.num_tokens = self.starts[-1]
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
                ids = part.int() & 0xFFFF
                bad = int((ids >= self.vocab_size).nonzero()[0])
                raise Refusal(f"{self.paths[k]}: token {int(ids[bad])} at position {a + bad} is outside the vocabulary "
                              f"of {self.vocab_size}; were these shards made with another tokenizer?")
            starts += ((part == eod).nonzero().flatten() + (self.starts[k] + a)).tolist()
        self.indexed[k, eod_id] = starts
        return starts

    def document_hashes(self, k: int, eod_id: int, length: int = 64) -> Tensor:
        """A number for the first tokens of each document of shard k that is longer than length."""
        starts = torch.tensor(self.document_starts(k, eod_id), dtype=torch.int64) - self.starts[k]
        ends = torch.cat((starts[1:], torch.tensor([len(self.shard(k))])))
        starts = starts[ends - starts > length]
        odd = torch.randint(-2 ** 62, 2 ** 62, (length,), generator=torch.Generator().manual_seed(0)) * 2 + 1
        return (self.shard(k)[starts[:, None] + 1 + torch.arange(length)] * odd).sum(1)


def documents(stream: TokenStream, eod_id: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    """(start, stop) of each document from position begin on, for one epoch. Indexes the next shard in the background.

    What stands before the first eod_id counts as a document; one may run on into the next shard. The stream's last
    token is nobody's input, as it has no successor.
    """
    pending, last = begin, stream.num_tokens - 1
    first, shards = max(0, bisect.bisect_right(stream.starts, begin) - 1), len(stream.paths)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(stream.document_starts, first, eod_id)
        for k in range(first, shards):
            found = ahead.result()
            if k + 1 < shards:
                ahead = pool.submit(stream.document_starts, k + 1, eod_id)
            for start in found:
                if start > pending:
                    yield pending, min(start, last)
                    pending = start
    if pending < last:
        yield pending, last


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
        self.docs = documents(stream, eod_id, position.next_document)

    def next_document(self) -> tuple[int, int]:
        found = next(self.docs, None)
        if found is None:                    # the epoch is over
            self.position = self.position._replace(epoch=self.position.epoch + 1)
            self.docs = documents(self.stream, self.eod_id)
            found = next(self.docs)
        return found

    def rows(self, num_rows: int, row_tokens: int, max_doc_tokens: int = 0) -> list[list[tuple[int, int]]]:
        """The next rows, each a list of (start, stop) with row_tokens in all.

        Documents in order, each clipped to max_doc_tokens (0: not at all); one that a row's end cuts goes on in the
        next row. Pieces that follow each other in the stream are joined.
        """
        rows = []
        for _ in range(num_rows):
            row, free = [], row_tokens
            while free:
                p = self.position
                if p.start == p.stop:
                    start, end = self.next_document()
                    stop = min(end, start + max_doc_tokens) if max_doc_tokens else end
                    p = self.position = Position(self.position.epoch, start, stop, end, p.dropped_tokens + end - stop)
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
    at = 0
    for start, stop in spans:
        stream.read(start, stop, inputs[at:at + stop - start])
        stream.read(start + 1, stop + 1, targets[at:at + stop - start])
        at += stop - start


def batches(planner: Planner, plan: Iterable[tuple[int, int]], row_tokens: int, rank: int, size: int,
            pinned: bool = False, ahead: int = 3) -> Iterator[Batch]:
    """One Batch for each (rows over all ranks, max_doc_tokens) of the plan, prepared ahead by a thread.

    Row i of n goes to rank i // (n / size). Errors of the thread are raised here.
    """
    def prepare(num_rows: int, max_doc_tokens: int) -> Batch:
        rows = planner.rows(num_rows, row_tokens, max_doc_tokens)
        mine = rows[rank * num_rows // size:(rank + 1) * num_rows // size]
        both = torch.empty(2, len(mine), row_tokens, dtype=torch.int32, pin_memory=pinned)
        for i, spans in enumerate(mine):
            fill_row(planner.stream, spans, both[0, i], both[1, i])
        return Batch(both[0], both[1], planner.position)

    with ThreadPoolExecutor(1) as pool:
        waiting: deque = deque()
        for item in plan:
            waiting.append(pool.submit(prepare, *item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def validation_rows(stream: TokenStream, num_targets: int, row_tokens: int, eod_id: int, rank: int, size: int
                    ) -> Iterator[tuple[Tensor, Tensor]]:
    """Targets 1..num_targets of the stream, each once, in contiguous slices [1, T]; slice i goes to rank i % size.

    The last slice is filled up with eod_id and targets -1, which no loss counts.
    """
    for begin in range(rank * row_tokens, num_targets, size * row_tokens):
        stop = min(begin + row_tokens, num_targets)
        inputs, targets = torch.full((2, 1, row_tokens), eod_id, dtype=torch.int32)
        targets.fill_(-1)
        fill_row(stream, [(begin, stop)], inputs[0, :stop - begin], targets[0, :stop - begin])
        yield inputs, targets


# ----------------------------------------------------------------------------------------------------------------------
# 7. Schedules
# Tables of stages and pure functions of the step. No tensors, no devices.


class Stage(NamedTuple):
    """A part of the run. until is the fraction of num_steps at which it ends."""

    until: float
    batch: float = 1.0                # of batch_tokens
    max_doc_tokens: int = 0           # documents are clipped to it; 0: not
    window: tuple[float, float] = (1.0, 1.0)     # of window_tokens, at its begin and end
    lr: float = 1.0                   # times every rate


STAGES: dict[str, tuple[Stage, ...]] = {
    "record20": (Stage(1.0, window=(0.0, 1.0)),),
    "flat": (Stage(1.0),),
}


def stage_at(c: Config, step: int) -> tuple[Stage, float]:
    """The stage of a step and how far it has come, in [0, 1]. Past the end: the last stage, 1.0."""
    begin = 0.0
    for stage in STAGES[c.stages]:
        if step < stage.until * c.num_steps:
            return stage, (step / c.num_steps - begin) / (stage.until - begin)
        begin = stage.until
    return stage, 1.0


def rows_at(c: Config, step: int) -> int:
    return max(1, round(c.batch_rows * stage_at(c, step)[0].batch))


def window_blocks_at(c: Config, step: int) -> int:
    """Long window in blocks, rounded up, at least one."""
    stage, done = stage_at(c, step)
    fraction = stage.window[0] + (stage.window[1] - stage.window[0]) * done
    return max(1, math.ceil(fraction * c.window_tokens / c.block_tokens - 1e-9))


def lr_scale_at(c: Config, step: int) -> float:
    """Flat, then linear over the last cooldown_frac of the run to lr_floor; times the stage's own factor."""
    left = 1 - step / c.num_steps
    cooled = min(1.0, left / c.cooldown_frac) if c.cooldown_frac else 1.0
    return stage_at(c, step)[0].lr * (cooled + (1 - cooled) * c.lr_floor)


def momentum_at(c: Config, step: int) -> float:
    warm = min(1.0, step / c.momentum_warmup_steps) if c.momentum_warmup_steps else 1.0
    return c.momentum_start + (c.momentum_end - c.momentum_start) * warm


# ----------------------------------------------------------------------------------------------------------------------
# 8. Log and checkpoint
# The log is the record: source, header, events. The clock that times it. Rank 0 writes, the others stay silent.
# A checkpoint is a folder: torch.distributed.checkpoint's files, and checkpoint.json with the facts and all checksums.

FENCE = "=" * 100


class RunLog:
    """Writes log_dir/<run_id>.txt on rank 0 and mirrors events to the console. A full disk is said once."""

    def __init__(self, log_dir: str, world: World, console: bool = True):
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.run_id, self.path, self.file = f"{stamp}_{uuid.uuid4().hex[:8]}", None, None
        self.console = console and world.rank == 0
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
        """Source, fence, facts as one JSON line, nvidia-smi, fence."""
        self.write(source + FENCE + "\n" + json.dumps({"format": 1, "run_id": self.run_id, **facts}))
        if facts["versions"]["cuda"]:
            self.write(run_quietly("nvidia-smi"))
        self.write(FENCE)

    def event(self, text: str) -> None:
        self.write(text)
        if self.console:
            print(text, flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def fingerprint(path: str) -> str:
    """First 16 hex digits of the sha256 over header, first and last MiB: cheap, and any other file differs."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(1024 + 2 ** 20))
        file.seek(max(0, os.path.getsize(path) - 2 ** 20))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def source_of(log: str | Path) -> str:
    """The source that a log embeds, verbatim. Raises Refusal when its sha256 is not the header's."""
    source, fence, rest = Path(log).read_text(encoding="utf-8").partition("\n" + FENCE + "\n")
    source += "\n"
    try:
        wanted = json.loads(rest.partition("\n")[0])["source_sha256"]
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"{log}: not a log of this trainer") from None
    if hashlib.sha256(source.encode()).hexdigest() != wanted:
        raise Refusal(f"{log}: the embedded source was changed after the run")
    return source


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
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()


class Clock:
    """Honest time: starts and pauses with a device synchronisation; steps are timed by events, read one step late."""

    def __init__(self, device: torch.device):
        self.cuda, self.device = device.type == "cuda", device
        self.total_ms, self.since, self.last = 0.0, None, None
        self.step_ms: list[float] = []
        self.open: list[tuple] = []

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
        self.since = self.synchronize()
        self.last = self.stamp()

    def pause(self) -> None:
        now = self.synchronize()
        self.collect()
        self.total_ms, self.since = self.total_ms + 1e3 * (now - self.since), None

    def step_done(self) -> None:
        now = self.stamp()
        self.open.append((self.last, now))
        self.last = now

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
    """Writes folder/step_N in the background, under another name until it is whole, and keeps the last two. For rank 0.

    What can't be written (full disk, no permission) is said in one line, and training goes on.
    """

    def __init__(self, folder: Path, log: RunLog):
        self.folder, self.log, self.last = folder, log, None
        self.pool, self.pending = ThreadPoolExecutor(1), []

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict) -> None:
        """Write tensors (on the CPU, no one else's) while training goes on, once the write before has ended."""
        self.finish()
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


PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "4090": 165, "L40S": 362}    # dense bf16


class Progress:
    """Train lines from numbers that are copied off the device and read one step late, so that no step waits."""

    def __init__(self, c: Config, world: World, log: RunLog, clock: Clock, names: list[str], matmul_parameters: int):
        self.config, self.log, self.clock, self.names = c, log, clock, names
        self.waiting, self.tokens, self.stopping = None, 0, False
        device = torch.cuda.get_device_name(world.device) if world.is_cuda else ""
        peak = next((1e12 * t for key, t in PEAK_TFLOPS.items() if key in device), None)
        self.flops_per_token = 6 * matmul_parameters / peak / world.size if peak else None      # in units of the peak

    def push(self, step: int, tokens: int, lr: float, stats: Tensor) -> str | None:
        """Start copying this step's stats (loss, squared gradient norms, stop); look at the step before."""
        self.tokens += tokens
        on_cpu = stats.to("cpu", non_blocking=True)
        before, self.waiting = self.waiting, (step, tokens, self.tokens, lr, on_cpu, self.clock.last)
        return self.look(before)

    def flush(self) -> str | None:
        before, self.waiting = self.waiting, None
        return self.look(before)

    def mfu(self, tokens: float, ms: float) -> float | None:
        """Model FLOP/s utilisation: 6 x matmul parameters x tokens / time / dense bf16 peak."""
        return self.flops_per_token * tokens / ms * 1e3 if self.flops_per_token else None

    def look(self, item) -> str | None:
        """Write the step's line when it is due. -> what is not finite in it, or None."""
        if item is None:
            return None
        step, tokens, so_far, lr, stats, event = item
        if self.clock.cuda:
            event.synchronize()
        if not bool(stats.isfinite().all()):
            bad = [name for name, value in zip(self.names, stats.tolist()) if not math.isfinite(value)]
            return f"step {step + 1}: not a finite number: {', '.join(bad)}"
        self.stopping = bool(stats[-1])
        self.clock.collect(keep=1)
        c, done = self.config, step + 1
        if done % c.log_every_steps == 0 or done == 1:
            times = self.clock.step_ms[-c.log_every_steps:] or [math.nan]
            ms = sum(times) / len(times)
            mfu = self.mfu(tokens, ms)
            self.log.event(f"step:{done}/{c.num_steps} train_loss:{stats[0]:.4f} "
                           f"train_time:{self.clock.elapsed_ms():.0f}ms step_avg:{ms:.2f}ms "
                           f"tokens_per_s:{tokens / ms * 1e3:.0f} " + (f"mfu:{mfu:.3f} " if mfu else "")
                           + f"lr:{lr:.4f} tokens:{so_far}")
        if done == 20 and c.num_steps > 40:
            mean = sum(self.clock.step_ms) / len(self.clock.step_ms)
            self.log.event(f"note: at this pace {c.num_steps} steps take about {mean * c.num_steps / 1e3:.0f} s")
        return None


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
    cards = [dataset_card(train), dataset_card(val)]
    if cards[0] and cards[1] and cards[0] != cards[1]:
        raise Refusal(f"train and validation shards were made differently: {cards[0]} and {cards[1]}")
    same = set(train) & set(val) or {fingerprint(p) for p in train} & {fingerprint(p) for p in val}
    if same:
        raise Refusal(f"train_files and val_files overlap ({', '.join(sorted(same))}): such a loss would mean nothing")
    card = cards[0] or cards[1] or {}
    for key in ("vocab_size", "eod_id"):
        if key in card and overrides.get(key, card[key]) != card[key]:
            raise Refusal(f"--{key}={overrides[key]}: the dataset.json beside the shards says {card[key]}")
    c = dataclasses.replace(c, **{key: card[key] for key in ("vocab_size", "eod_id") if key in card})
    check_config(c)
    return c


def build(c: Config, world: World, overrides: dict) -> Run:
    """Check everything that can be checked cheaply, then make model and optimizer. Raises Refusal."""
    train_paths, val_paths = find_shards(c.train_files, "train"), find_shards(c.val_files, "val")
    c = adopt_dataset(c, overrides, train_paths, val_paths)
    train_stream, val_stream = TokenStream(train_paths, c.vocab_size), TokenStream(val_paths, c.vocab_size)
    for stream, what in ((train_stream, "train"), (val_stream, "val")):
        if stream.num_tokens < 2:
            raise Refusal(f"the {what} shards ({stream.paths[0]}) hold 1 token: expected 2, an input and its target")
    c = dataclasses.replace(c, val_tokens=c.val_tokens or val_stream.num_tokens - 1)
    if val_stream.num_tokens <= c.val_tokens:
        raise Refusal(f"--val_tokens={c.val_tokens}: validation shards hold {val_stream.num_tokens:,} tokens, at most "
                      f"{val_stream.num_tokens - 1:,} targets; expected --val_tokens=0 (all) or fewer")
    if c.stages not in STAGES:
        raise Refusal(f"--stages={c.stages}: expected one of {', '.join(STAGES)}")
    rows = {rows_at(c, step) for step in range(c.num_steps)}
    if any(n % world.size for n in rows):
        legal = [n for n in range(1, math.gcd(*rows) + 1) if math.gcd(*rows) % n == 0]
        raise Refusal(f"{world.size} processes can't share {sorted(rows)} rows a step evenly (rows = batch_tokens / "
                      f"row_tokens = {c.batch_tokens} / {c.row_tokens}); legal counts: {', '.join(map(str, legal))} "
                      "(--nproc_per_node, or NPROC=n ./run.sh)")
    for k in range(len(val_paths)):
        val_stream.document_starts(k, c.eod_id)          # raises on ids out of range
    train_stream.document_starts(0, c.eod_id)
    kernels = choose_kernels(world.device, c.compile, c.attention, c.fp8)
    if kernels.compile and not world.is_cuda and not find_compiler():
        raise Refusal("--compile=on: a C compiler is needed for compilation and none was found; install one (gcc) "
                      "or use --compile=off")
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(c.seed)
    with torch.device(world.device):
        model = GPT(c, kernels)
    init_weights(c, model)
    groups = [Group(**row) for row in param_groups(c, model)]
    optimizer = Optimizer(groups, world, kernels.compile and world.is_cuda, kernels.dtype)
    return Run(c, world, kernels, model, optimizer, train_stream, val_stream, c.micro_rows or c.batch_rows)


def matmul_parameters(run: Run) -> int:
    """Parameters that multiply every token: hidden matrices and the head (not embeddings)."""
    return sum(p.numel() for family, params in claimed(run.config, run.model) for p in params.values()
               if family.kind == "muon" or family.name == "head")


def budget(run: Run) -> str:
    """Tokens needed against tokens there; raises Refusal when max_epochs doesn't suffice."""
    c, stream = run.config, run.train_stream
    starts = stream.document_starts(0, c.eod_id)
    lengths = [b - a for a, b in zip(starts, starts[1:])] or [stream.starts[1]]
    kept, needed = {}, 0.0
    for step in range(c.num_steps):
        clip = stage_at(c, step)[0].max_doc_tokens
        if clip not in kept:
            kept[clip] = sum(min(n, clip) for n in lengths) / sum(lengths) if clip else 1.0
        needed += rows_at(c, step) * c.row_tokens / kept[clip]
    there = stream.num_tokens - 1
    epochs = needed / there
    text = f"data: the schedule needs about {needed:,.0f} tokens (clipped tails included), {there:,} are there"
    if epochs > c.max_epochs:
        more = math.ceil((needed - there * c.max_epochs) / c.max_epochs / 100e6)
        raise Refusal(f"{text}: {epochs:.2f} epochs, allowed {c.max_epochs}. Add about {more} shard(s) of 100M tokens "
                      f"(python data/cached_fineweb10B.py) or allow repetition with --max_epochs={math.ceil(epochs)}")
    return f"{text}: {'enough' if epochs <= 1 else f'wraps, {epochs:.2f} epochs'}"


def window_tensor(run: Run, step: int) -> Tensor:
    return torch.full((), window_blocks_at(run.config, step), dtype=torch.int32, device=run.world.device)


def micro_batches(run: Run, rows: Tensor) -> Iterator[Tensor]:
    """This rank's rows in equal micro-batches of at most run.micro_rows."""
    n = max(m for m in range(1, min(run.micro_rows, len(rows)) + 1) if len(rows) % m == 0)
    return (part.to(run.world.device, non_blocking=True) for part in rows.split(n))


def train_step(run: Run, step: int, batch: Batch, stop: int = 0) -> Tensor:
    """Gradients over all micro-batches, one update. -> [1 + banks + 1]: mean loss, squared gradient norms, the sum of
    all ranks' stop (not 0: a signal came)."""
    c, window = run.config, window_tensor(run, step)
    loss = torch.zeros((), device=run.world.device)
    for inputs, targets in zip(micro_batches(run, batch.inputs), micro_batches(run, batch.targets)):
        # Divided by the constant batch: the sum over micro-batches and ranks is then the mean over all rows.
        part = run.model(inputs, targets, window) / (rows_at(c, step) * c.row_tokens)
        part.backward()
        loss += part.detach()
    norms = run.optimizer.step(lr_scale_at(c, step), momentum_at(c, step))
    stats = torch.cat((loss[None], norms, loss.new_full((1,), float(stop))))
    if run.world.size > 1:
        dist.all_reduce(stats)
    return stats


@torch.no_grad()
def evaluate(run: Run, step: int, leave_out: int = -1) -> float:
    """Mean loss over the val_tokens targets, the same on all ranks. Targets equal to leave_out don't count."""
    c, world = run.config, run.world
    run.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    rows = validation_rows(run.val_stream, c.val_tokens, c.val_row_tokens, c.eod_id, world.rank, world.size)
    for inputs, targets in rows:
        targets = targets.masked_fill(targets == leave_out, -1)
        count = (targets >= 0).sum()
        loss = run.model(inputs.to(world.device), targets.to(world.device), window_tensor(run, step))
        totals += torch.stack((loss.double(), count.to(world.device).double()))
    if world.size > 1:
        dist.all_reduce(totals)
    run.model.train()
    return float(totals[0] / totals[1])


def warmup(run: Run, log: RunLog) -> None:
    """Compile and run every shape of the schedule on random tokens, then restore every byte of state."""
    c, device = run.config, run.world.device
    tensors = run.optimizer.tensors()
    saved = {name: t.clone() for name, t in tensors.items()}
    steps = [bank.steps for bank in run.optimizer.banks]
    rng = torch.get_rng_state(), torch.cuda.get_rng_state(device) if run.world.is_cuda else None
    generator = torch.Generator().manual_seed(1)
    fit_memory(run, log)
    shapes = {rows_at(c, step): step for step in range(c.num_steps)}
    for num_rows, step in shapes.items():
        shape = num_rows // run.world.size, c.row_tokens
        tokens = torch.randint(0, c.vocab_size, shape, generator=generator, dtype=torch.int32)
        for _ in range(2):
            train_step(run, step, Batch(tokens, tokens, run.position))
            log.event(f"note: warm-up with {num_rows} rows, {process_age_s():.1f} s after the start")
    with torch.no_grad():
        run.model.eval()
        tokens = tokens.flatten()[:1].expand(1, c.val_row_tokens).contiguous().to(device)
        run.model(tokens, tokens, window_tensor(run, 0))
        run.model.train()
    for name, t in tensors.items():
        t.copy_(saved[name])
    for bank, count in zip(run.optimizer.banks, steps):
        bank.steps = count
    torch.set_rng_state(rng[0])
    if run.world.is_cuda:
        torch.cuda.set_rng_state(rng[1], device)


def fit_memory(run: Run, log: RunLog) -> None:
    """Forward and backward of the largest micro-batch. Out of memory: --micro_rows=auto takes fewer rows at once, for
    the same curve; else a Failure names the number that may fit. Leaves gradients behind."""
    c, device = run.config, run.world.device
    rows = max(rows_at(c, step) for step in range(c.num_steps)) // run.world.size
    for n in [n for n in range(run.micro_rows, 0, -1) if rows % n == 0]:
        tokens, full = torch.zeros((n, c.row_tokens), dtype=torch.int32, device=device), torch.zeros((), device=device)
        try:
            run.model(tokens, tokens, window_tensor(run, c.num_steps)).backward()
        except torch.OutOfMemoryError:
            full += 1
        if run.world.size > 1:
            dist.all_reduce(full)
        if not full:
            run.micro_rows = n
            return
        fewer = max((m for m in range(1, n) if rows % m == 0), default=0)
        if c.micro_rows or not fewer:
            advice = f"use --micro_rows={fewer}, or --micro_rows=auto" if fewer else "use a smaller --row_tokens"
            raise Failure(f"out of memory with {n} rows of {c.row_tokens} tokens at once: {advice}")
        log.event(f"note: {n} rows at once don't fit in memory, trying micro_rows={fewer}")


MAX_KNOWN_SHARE = 0.05             # of validation documents that begin (64 tokens) like a training document
SELF_CHECK_TOLERANCE = 1e-5        # relative: what can't be seen takes no part in a sum, so numerics leave no trace


@torch.no_grad()
def probe(run: Run) -> dict[str, float]:
    """How much the loss of the first tokens of a second document moves, relatively, when other tokens are changed.

    The validation pass (compiled as it will be), on shaken weights, as fresh ones attend to nothing; then restored.
    """
    c, device, weights = run.config, run.world.device, [bank.weight for bank in run.optimizer.banks]
    saved, generator = [weight.clone() for weight in weights], torch.Generator(device).manual_seed(1)
    for p in run.model.parameters():
        p.add_(torch.randn(p.shape, generator=generator, device=device), alpha=0.05)
    T, middle, n = c.val_row_tokens, c.val_row_tokens // 2, max(2, min(16, c.val_row_tokens // 4))
    row, other, targets = torch.randint(c.vocab_size, (3, 1, T), generator=generator, device=device, dtype=torch.int32)
    for tokens in (row, other):
        tokens[tokens == c.eod_id] = (c.eod_id + 1) % c.vocab_size
        tokens[:, (0, middle)] = c.eod_id
    targets[:, :middle], targets[:, middle + n:] = -1, -1
    losses = {}
    run.model.eval()
    for what, a, b in (("", 0, 0), ("later tokens", middle + n, T), ("another document", 1, middle),
                       ("their own context", middle + 1, middle + n)):
        spoiled = torch.cat((row[:, :a], other[:, a:b], row[:, b:]), dim=1)
        losses[what] = float(run.model(spoiled, targets, window_tensor(run, c.num_steps)))
    run.model.train()
    for weight, was in zip(weights, saved):
        weight.copy_(was)
    base = losses.pop("")
    return {what: abs(loss / base - 1) for what, loss in losses.items()}


def self_check(run: Run, log: RunLog) -> None:
    """Would the numbers of this run mean anything? Raises Failure. Leaves all state as it was."""
    began, c, train, val = time.perf_counter(), run.config, run.train_stream, run.val_stream
    faults = [f"{what} changed, and the loss moved by {moved:.2g} of itself" for what, moved in probe(run).items()
              if (moved == 0 if what == "their own context" else not moved <= SELF_CHECK_TOLERANCE)]
    sums = torch.stack([bank.weight.view(torch.int16 if bank.weight.element_size() == 2 else torch.int32).sum()
                        for bank in run.optimizer.banks])
    extremes = torch.stack((sums, -sums))
    if run.world.size > 1:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    faults += [f"the ranks hold different weights in {bank.group.name}"
               for bank, high, low in zip(run.optimizer.banks, *extremes.tolist()) if high != -low]
    held_out = torch.cat([val.document_hashes(k, c.eod_id) for k in range(len(val.paths))])
    known = int(torch.isin(held_out, train.document_hashes(0, c.eod_id)).sum())
    if known > MAX_KNOWN_SHARE * len(held_out):
        faults.append(f"{known} of {len(held_out)} validation documents begin like one of {train.paths[0]}")
    if faults:
        raise Failure("self-check: " + "; ".join(faults))
    log.event(f"note: self-check passed in {time.perf_counter() - began:.2f} s: causal, documents isolated (within "
              f"{SELF_CHECK_TOLERANCE:g}), ranks equal, {known} of {len(held_out)} validation documents begin like one "
              "of the first training shard")


def bigram_loss(run: Run) -> float:
    """Nats a target of the add-one-smoothed bigram table of the training shards on the validation targets."""
    c = run.config
    def pairs(stream: TokenStream, count: int) -> Tensor:
        tokens = torch.empty(count + 1, dtype=torch.int32)
        stream.read(0, count + 1, tokens)
        return tokens[:-1].long() * c.vocab_size + tokens[1:]
    counts = torch.bincount(pairs(run.train_stream, run.train_stream.num_tokens - 1), minlength=c.vocab_size ** 2)
    logp = (counts.view(c.vocab_size, -1) + 1).double().log()
    logp = (logp - logp.logsumexp(1, keepdim=True)).flatten()
    found = pairs(run.val_stream, c.val_tokens)
    return -float(logp[found[found % c.vocab_size != c.eod_id]].mean())


def facts(run: Run, overrides: dict, argv: list[str]) -> dict:
    """The log's header: everything needed to judge and repeat the run."""
    def files(stream: TokenStream) -> dict:
        rows = [dict(file=os.path.basename(p), bytes=os.path.getsize(p), tokens=b - a, fingerprint=fingerprint(p))
                for p, a, b in zip(stream.paths, stream.starts, stream.starts[1:])]
        return dict(files=rows, tokens=stream.num_tokens)
    here, world = str(Path(__file__).parent), run.world
    device = torch.cuda.get_device_name(world.device) if world.is_cuda else platform.processor() or platform.machine()
    sizes = {family.name: sum(p.numel() for p in params.values()) for family, params in claimed(run.config, run.model)}
    return dict(
        name=run.config.preset, started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        config=dataclasses.asdict(run.config), overrides=overrides, argv=argv, seed=run.config.seed,
        source_sha256=hashlib.sha256(SOURCE.encode()).hexdigest(),
        versions=dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                      hip=torch.version.hip, os=platform.platform(), threads=torch.get_num_threads()),
        devices=[device] * world.size, world_size=world.size, micro_rows=run.micro_rows, resumed_from=None,
        kernels={k: str(v) for k, v in run.kernels._asdict().items()},
        data=dict(train=files(run.train_stream), val=files(run.val_stream),
                  tokenizer=(dataset_card(run.train_stream.paths) or {}).get("tokenizer")),
        git=dict(commit=run_quietly("git", "-C", here, "rev-parse", "HEAD"),
                 dirty=bool(run_quietly("git", "-C", here, "status", "--porcelain", "--untracked-files=no"))),
        parameters={**sizes, "total": sum(sizes.values()), "matmul": matmul_parameters(run)})


def stop_if(problem: str | None) -> None:
    if problem:
        raise Failure(f"{problem}. Lower the learning rates, or look at the data")


def identity(header: dict, tensors: dict[str, Iterable[int]]) -> dict:
    """What a checkpoint and the run that resumes from it must have in common, in JSON's types."""
    same = {f"setting {k}": v for k, v in header["config"].items() if k not in RESUME_MAY_CHANGE}
    for split in ("train", "val"):
        same |= {f"{split} file {number}": f"{file['file']} ({file['fingerprint']}, {file['tokens']} tokens)"
                 for number, file in enumerate(header["data"][split]["files"], 1)}
    return json.loads(json.dumps(same | {f"shape of {key}": list(shape) for key, shape in tensors.items()}))


def save_checkpoint(run: Run, store: Store, step: int, progress: Progress, header: dict) -> None:
    """Start a checkpoint of this moment. Raises Failure, on all ranks, when a number of it is not finite."""
    stop_if(progress.flush())
    progress.clock.collect()
    tensors, finite = {}, torch.ones((), dtype=torch.bool, device=run.world.device)
    for key, t in run.optimizer.gathered():
        finite &= t.isfinite().all()
        if run.world.rank == 0:
            tensors[key] = t.to("cpu", copy=True)
    stop_if(None if finite else f"step {step}: weights or optimizer state are not finite numbers")
    tensors["rng/cpu"] = torch.get_rng_state()
    if run.world.is_cuda:
        tensors["rng/cuda"] = torch.cuda.get_rng_state(run.world.device)
    if run.world.rank == 0:
        store.save(step, tensors, dict(
            format=1, step=step, tokens=progress.tokens, position=run.position, total_ms=progress.clock.elapsed_ms(),
            step_ms=list(progress.clock.step_ms), run=header,
            bank_steps={bank.group.name: bank.steps for bank in run.optimizer.banks}))


def load_checkpoint(run: Run, header: dict) -> dict:
    """Take over the checkpoint that --resume names, and note it in the header. -> its facts.

    Raises Refusal, before anything is changed, for the first thing in it that does not fit this run.
    """
    path = find_checkpoint(run.config.resume, run.config.checkpoint_dir)
    saved, tensors = read_checkpoint(path)
    random_states = {key: tensors.pop(key) for key in list(tensors) if key.startswith("rng/")}
    there = identity(saved["run"], {key: t.shape for key, t in tensors.items()})
    here = identity(header, {f"{name}/{kind}": p.shape for bank in run.optimizer.banks
                             for name, p in bank.group.params.items() for kind in bank.exact()})
    for key in [*there, *here]:
        if there.get(key) != here.get(key):
            raise Refusal(f"--resume={path}: {key} differs: {there.get(key, 'nothing')} in the checkpoint, "
                          f"{here.get(key, 'nothing')} in this run")
    run.optimizer.load(tensors, saved["bank_steps"])
    run.position = Position(*saved["position"])
    torch.set_rng_state(random_states["rng/cpu"])
    if run.world.is_cuda and "rng/cuda" in random_states:
        torch.cuda.set_rng_state(random_states["rng/cuda"], run.world.device)
    header["resumed_from"] = str(path)
    return saved


def train(config: Config, world: World, log: RunLog, overrides: dict, argv: list[str]) -> dict:
    """The whole run. -> the result that the log's last line holds. Raises Refusal or Failure."""
    run = build(config, world, overrides)
    c, clock, header = run.config, Clock(world.device), facts(run, overrides, argv)
    header["run_id"] = log.run_id
    saved = load_checkpoint(run, header) if c.resume else None
    log.header(SOURCE, header)
    log.event("note: " + budget(run))
    count = sum(p.numel() for p in run.model.parameters())
    choices = ", ".join(f"{k}={v}" for k, v in run.kernels._asdict().items())
    log.event(f"note: {world.size} x {world.device.type}, {count:,} parameters, {choices}")
    if saved:
        log.event(f"note: resumed from {header['resumed_from']} at step {saved['step']}"
                  + ("" if saved["run"]["source_sha256"] == header["source_sha256"] else ", written by another source"))
    if world.is_cuda:
        warmup(run, log)
    if c.self_check == "on":
        self_check(run, log)
    names = ["loss"] + [f"gradient of {bank.group.name}" for bank in run.optimizer.banks]
    progress = Progress(c, world, log, clock, names, matmul_parameters(run))
    if saved:
        clock.total_ms, clock.step_ms, progress.tokens = saved["total_ms"], saved["step_ms"], saved["tokens"]
    store = Store(Path(c.checkpoint_dir) / log.run_id, log)
    clock.synchronize()
    started = round(process_age_s(), 2)
    log.event(f"note: time_to_first_step_s:{started}")
    with stop_signals() as signals:
        try:
            result = loop(run, progress, store, signals, header, saved["step"] if saved else 0)
        finally:
            store.finish()                               # whatever happened: the last good checkpoint is whole
    times = clock.step_ms
    slowest = sorted(range(len(times)), key=times.__getitem__)[-5:][::-1]
    log.event("note: slowest steps: " + ", ".join(f"{i + 1} ({times[i]:.1f} ms)" for i in slowest))
    log.event(f"note: data at epoch {run.position.epoch}, {run.position.dropped_tokens:,} tokens dropped by clipping")
    step_avg_ms = round(clock.total_ms / max(1, result["step"]), 3)
    result |= dict(train_time_ms=round(clock.total_ms, 1), step_avg_ms=step_avg_ms, time_to_first_step_s=started,
                   tokens_trained=progress.tokens, mfu=progress.mfu(progress.tokens, clock.total_ms),
                   peak_memory_mib=torch.cuda.max_memory_allocated() // 2 ** 20 if world.is_cuda else None)
    log.write("step_times_ms:" + json.dumps([round(t, 2) for t in times]))
    log.event("result:" + json.dumps(result))
    if result["status"] != "stopped":
        closing_words(run, result, log)
    return result


def loop(run: Run, progress: Progress, store: Store, signals: list[int], header: dict, first: int) -> dict:
    """Steps first.. of the schedule, on the clock, with validation off it. -> status, step and last validation."""
    c, world, log, clock = run.config, run.world, progress.log, progress.clock
    plan = [(rows_at(c, step), stage_at(c, step)[0].max_doc_tokens) for step in range(first, c.num_steps)]
    planner = Planner(run.train_stream, c.eod_id, run.position)
    loader = batches(planner, plan, c.row_tokens, world.rank, world.size, world.is_cuda)
    result = dict(status="finished", reason="", num_steps=c.num_steps, resumed=bool(c.resume))
    profiler = contextlib.nullcontext()
    clock.resume()
    for step in range(first, c.num_steps + 1):
        last = step == c.num_steps
        if last or (c.val_every_steps and step % c.val_every_steps == 0):
            clock.pause()
            stop_if(progress.flush())
            loss = evaluate(run, step)
            log.event(f"step:{step}/{c.num_steps} val_loss:{loss:.4f} train_time:{clock.total_ms:.0f}ms "
                      f"step_avg:{clock.total_ms / step if step else math.nan:.2f}ms")
            result |= dict(step=step, val_loss=loss, val_tokens=c.val_tokens)
            if not math.isfinite(loss):
                raise Failure(f"step {step}: the validation loss is not a finite number")
            if c.target_loss and loss <= c.target_loss and not last:
                result |= dict(status="target_reached", reason=f"validation loss {loss:.4f} <= {c.target_loss}")
                last = True
            if last:
                if c.checkpoint_every_steps:
                    save_checkpoint(run, store, step, progress, header)
                break
            clock.resume()
        if c.profile_steps and step == min(5, c.num_steps - 1):
            profiler = torch.profiler.profile(with_stack=False)
            profiler.start()
        try:
            batch = next(loader)
        except Refusal as error:
            raise Refusal(f"rank {world.rank}, step {step + 1}: {error}") from None
        run.position = batch.position
        stats = train_step(run, step, batch, len(signals))
        clock.step_done()
        stop_if(progress.push(step, rows_at(c, step) * c.row_tokens, lr_scale_at(c, step), stats))
        if c.profile_steps and step == min(5 + c.profile_steps, c.num_steps) - 1:
            clock.synchronize()
            profiler.stop()
            if log.path:
                profiler.export_chrome_trace(str(log.path.with_suffix(".trace.json.gz")))
        if progress.stopping:                             # of the step before, so all ranks stop after the same step
            clock.pause()
            began, number = time.perf_counter(), signals[0] if signals else signal.SIGTERM
            save_checkpoint(run, store, step + 1, progress, header)
            store.finish()
            result |= dict(status="stopped", step=step + 1, val_loss=None, signal=number,
                           reason=f"{signal.Signals(number).name}; go on with --resume={store.last}")
            log.event(f"note: {result['reason']} (checkpoint took {time.perf_counter() - began:.2f} s)")
            break
        if c.checkpoint_every_steps and (step + 1) % c.checkpoint_every_steps == 0 and step + 1 < c.num_steps:
            save_checkpoint(run, store, step + 1, progress, header)
    loader.close()
    return result


def closing_words(run: Run, result: dict, log: RunLog) -> None:
    """For byte vocabularies with sample_tokens set (the demo): what the numbers mean, and what the model writes."""
    c = run.config
    if not c.sample_tokens or c.vocab_size != 257:
        return
    nats, bigram = evaluate(run, c.num_steps, leave_out=c.eod_id), bigram_loss(run)
    for name, loss in (("this model", nats), ("a bigram table", bigram)):
        log.event(f"note: {name}: {loss:.4f} nats/byte, {loss / math.log(2):.4f} bits/byte on held-out text")
    prompt = list(b"\n\nThe ")
    text = bytes(t for t in generate(run.model, [c.eod_id] + prompt, c.sample_tokens, c.seed) if t < 256)
    log.event("note: a sample of what it writes:")
    log.event("\n".join("    | " + line for line in text.decode("utf-8", "replace").splitlines()))
    log.event(f"note: {result['tokens_trained'] / result['train_time_ms'] * 1e3:,.0f} tokens/s on this machine; a GPU "
              "would train the real thing: ./run.sh on one to eight H100s with FineWeb shards")
    if log.path:
        log.event(f"note: the log is {log.path}")


# ----------------------------------------------------------------------------------------------------------------------
# 10. Front door
# Parse, enter the world, train, leave. Exit codes: 0 done, 1 failed, 2 refused, 128 + signal stopped with a checkpoint.


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(help_text())
        return 0
    log = world = None
    try:
        config, overrides = parse_config(argv, "record" if torch.cuda.is_available() else "demo")
        if config.deterministic == "on":
            torch.use_deterministic_algorithms(True)
        world = init_world(config.deterministic == "on", join=False)
        log = RunLog(config.log_dir, world)              # before the ranks meet: a refusal of rank 0 then ends all
        join_group(world)
        result = train(config, world, log, overrides, argv)
        return 128 + result["signal"] if result["status"] == "stopped" else 0
    except (Refusal, Failure, torch.OutOfMemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            error = Failure(f"rank {world.rank}: out of memory; use a smaller --micro_rows, or auto ({error})")
        if world is None or world.rank == 0 or str(error).startswith("rank"):       # what all ranks say is said once
            print(f"train_gpt: {error}", file=sys.stderr, flush=True)
        if log is not None:
            status = "refused" if isinstance(error, Refusal) else "failed"
            log.write("result:" + json.dumps(dict(status=status, reason=str(error))))
        return 2 if isinstance(error, Refusal) else 1
    finally:
        if log is not None:
            log.close()
        if world is not None:
            close_world(world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
