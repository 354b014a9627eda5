"""train_gpt: one file that trains a GPT-2-class language model to a target validation loss, fast.

Claim: none yet for 8xH100 and FineWeb. On one H100 and other English prose: loss 3.48 in 55.5 s, where the
recipe of January 2025's record takes 275 s (n = 6; records/2026-11-28_SprintFourHeads_1xH100).

    torchrun --standalone --nproc_per_node=8 train_gpt.py      the record recipe on 8 GPUs
    python train_gpt.py --preset=sprint --train_files='data/x/*.bin' --val_files='data/y/*.bin'
                                                               one GPU, minutes
    ./run.sh                                                   what this machine can do, from laptop to 8 GPUs
    python train_gpt.py --help                                 every key and its default

A room uses only rooms above it: 0 Door, 1 Configuration, 2 World, 3 Kernels, 4 Optimizer, 5 Model, 6 Data,
7 Schedules, 8 Log and checkpoint, 9 Training, 10 Front door.
"""
# ----------------------------------------------------------------------------------------------------------------------
# 0. Door
# Keeps the text of this very file for the log, before slow imports give anyone time to edit it; then imports.
# Importing has no side effects: no device, thread or environment. Here an attempt changes only the claim.

from pathlib import Path

# Byte for byte (read_text would change \r\n to \n), and with a last line end, which the log's fence needs
SOURCE = Path(__file__).read_bytes().decode("utf-8").removesuffix("\n") + "\n"

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
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import Callable, Iterable, Iterator, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

try:
    import triton
    import triton.language as tl
except ImportError:                        # comes with torch for GPUs only
    triton = None


class RunError(Exception):
    """Ends a run. Its text is one readable message; one_rank: it concerns this rank only, which prints it."""
    def __init__(self, text: str, one_rank: bool = False):
        super().__init__(text)
        self.one_rank = one_rank


class Refusal(RunError):
    """Bad input. The text says what was found, what was expected, what to do. Exit code 2."""


class Failure(RunError):
    """A run that can't go on: non-finite numbers, no memory. Exit code 1."""


def refuse_if(is_wrong: bool, text: str) -> None:
    if is_wrong:
        raise Refusal(text)


@contextlib.contextmanager
def reading(file: str | Path, advice: str) -> Iterator[None]:
    """While it is open, any error becomes a Refusal that names the file, what is wrong and what to do."""
    try:
        yield
    except Exception as error:
        reason = re.split(r"\n|\. ", str(error))[0]      # torch goes on with advice to read without a guard
        raise Refusal(f"{file}: can't be read ({reason:.200}); {advice}") from None


# ----------------------------------------------------------------------------------------------------------------------
# 1. Configuration
# The settings of a run with limits and meanings (which --help prints), presets, and how the command line is
# read and checked. Defaults are the record. Two kinds of numbers stand in tables where they are used: decays
# and moments in param_groups (room 5), the parts of a run in STAGES (room 7). A new setting is one line here.

def setting(default, meaning: str, low=0, high: int | str = 2 ** 63 - 1):
    """A field of Config. low, high: limits of its number(s); high may name a key that must be larger."""
    return dataclasses.field(default=default, metadata=dict(meaning=meaning, low=low, high=high))


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. Units are in the names; token counts are per step over all ranks."""
    # Data
    preset: str = setting("record", "name of the preset these values started from")
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "comma-separated patterns, sorted")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "the same for validation")
    max_epochs: int = setting(1, "passes over the training shards that the schedule may take", low=1)
    vocab_size: int = setting(50_257, "ids in use; dataset.json beside the shards overrides it", 1, 2 ** 16)
    eod_id: int = setting(50_256, "the token that stands before every document", high="vocab_size")
    # Length and batch
    num_steps: int = setting(2500, "updates of the weights", 1, 999_999)
    batch_tokens: int = setting(262_144, "tokens of the largest step over all ranks", 1, 2 ** 26)
    stages: str = setting("record", "table in room 7: batch, window and more over the run")
    row_tokens: int = setting(16_384, "documents are packed into rows of so many", 8, 2 ** 24)
    micro_rows: int = setting(4, "rows in one forward pass at most; auto = what memory allows")
    # Validation
    val_tokens: int = setting(10_485_760, "number of targets scored, from the files' start; 0 = all")
    val_overlap: int = setting(2048, "context of a validation row before its first target", high="row_tokens")
    val_window_blocks: int = setting(20, "long window, wider than any in training", 1, 2 ** 24)
    val_every_steps: int = setting(0, "steps between validations; 0 = only at the end")
    target_loss: float = setting(3.28, "stop and say so when validation reaches it; 0 = run to the end")
    # Model
    model_dim: int = setting(768, "width of the residual stream", 16, 2 ** 24)
    num_layers: int = setting(11, "blocks of attention and an MLP", 1, 1000)
    num_heads: int = setting(6, "of attention", 1, 2 ** 24)
    head_dim: int = setting(128, "of the values", 8, 2 ** 24)
    qk_dim: int = setting(128, "of queries and keys", 8, 2 ** 24)
    mlp_dim: int = setting(3072, "width of the hidden layer of an MLP", 1, 2 ** 24)
    long_layers: tuple[int, ...] = setting((3, 10), "see the whole window; others half", high="num_layers")
    no_attention_layers: tuple[int, ...] = setting((4, 6, 8), "layers of an MLP only", high="num_layers")
    value_layers: tuple[int, ...] = setting((1, 2, 9, 10), "layers with a value embedding", high="num_layers")
    copy_dim: int = setting(128, "of the copy pointer's queries and keys", 8, 2 ** 24)
    table_rows: int = setting(4_194_301, "hashed rows for each order, prime; 1 = one for all n-grams", low=1)
    table_orders: tuple[int, ...] = setting((2, 3), "n of the n-grams in the hashed table", 1, 4)
    block_tokens: int = setting(128, "granularity of windows and block masks", 1, 2 ** 24)
    attention_scale: float = setting(0.1, "factor of query times key before the softmax")
    softcap: tuple[float, ...] = setting((23.0, 5.0, 7.5), "cap, shift, width of the logits' softcap")
    # Optimizer; more in the table of param_groups, and momentum_at in room 7
    lr_matrix: float = setting(0.031, "NorMuon, hidden matrices")
    lr_embed: float = setting(0.008, "Adam, token embeddings, which are the output head too, and gates")
    lr_value: float = setting(0.6, "Adam, value embeddings")
    lr_scalar: float = setting(0.04, "Adam, mixing scalars")
    lr_table: float = setting(0.85, "row-wise RMS steps, hashed n-gram table")
    cooldown_frac: float = setting(0.8, "last part of the run with a linearly falling rate", high=1)
    lr_floor: float = setting(0.3, "the rate it falls to, relative")
    ema_frac: float = setting(0.25, "last part of the run, whose weights are averaged", high=1)
    ema_blend: float = setting(0.7, "share of the average in the final weights; 0 = none", high=1)
    # Machine
    seed: int = setting(0, "of the initial weights")
    compile: str = setting("auto", "auto = on with a GPU")
    attention: str = setting("auto", "flex = FlexAttention, dense = reference")
    fp8: str = setting("auto", "MLPs, and the output head in training; auto = where the device has it")
    graphs: str = setting("auto", "CUDA graphs in training; auto = with an NVIDIA GPU and compilation")
    deterministic: str = setting("off", "on: same seed, same hardware, same losses, bit for bit; slower")
    # Output
    log_dir: str = setting("logs", "each run writes one file into it")
    log_every_steps: int = setting(10, "steps between lines about the training loss", low=1)
    profile_steps: int = setting(0, "so many steps, after the first, into a Chrome trace beside the log")
    # Trust
    checkpoint_every_steps: int = setting(0, "and at the end; 0 = only if a signal stops the run")
    checkpoint_dir: str = setting("checkpoints", "each run keeps its last two in a folder of its own there")
    resume: str = setting("", "folder of a checkpoint, or latest: the newest one in checkpoint_dir")
    self_check: str = setting("on", "first test causality, isolation, equal ranks, disjoint data")
    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128
    @property
    def fits_flex(self) -> bool:           # what FlexAttention's kernels ask for
        return self.block_tokens % 128 == 0 and min(self.head_dim, self.qk_dim, self.copy_dim) >= 16


SECTIONS = dict(preset="Data", num_steps="Length and batch", val_tokens="Validation", model_dim="Model",
                lr_matrix="Optimizer", seed="Machine", log_dir="Output", checkpoint_every_steps="Trust")
SPRINT = dict(                 # small batches of one size, and rates to match
    num_steps=1230, batch_tokens=65_536, stages="sprint", row_tokens=32_768, micro_rows=2, val_tokens=2 ** 21,
    target_loss=3.48, num_layers=4, num_heads=4, long_layers=(1, 3), no_attention_layers=(), ema_blend=0.5,
    value_layers=(3,), lr_matrix=0.0195, lr_embed=0.0057, lr_value=0.424, lr_scalar=0.028, lr_table=0.6)
PRESETS: dict[str, dict] = {
    "record": {},
    "sprint": SPRINT,
    "mile": SPRINT | dict(     # three minutes of one GPU
        num_steps=2670, val_tokens=2 ** 22, target_loss=0.0, num_layers=9, long_layers=(3, 8),
        no_attention_layers=(4, 6), value_layers=(1, 7, 8), ema_blend=0.7, lr_matrix=0.0146, lr_embed=0.0043,
        lr_value=0.318),
    "small": SPRINT | dict(    # for a card of 24 GB
        num_steps=1330, row_tokens=16_384, micro_rows=1, num_layers=5, long_layers=(1, 4), value_layers=(4,),
        table_rows=1_048_573),
    "demo": dict(              # bytes of English prose, two minutes on a CPU
        train_files="data/builtin/train_*.bin", val_files="data/builtin/val_*.bin", max_epochs=1000,
        vocab_size=257, eod_id=256, num_steps=300, batch_tokens=4096, stages="plain", row_tokens=256,
        micro_rows=16, val_tokens=0, val_overlap=0, val_window_blocks=8, val_every_steps=50, target_loss=0.0,
        model_dim=128, num_layers=4, num_heads=4, head_dim=32, qk_dim=32, copy_dim=64, mlp_dim=512,
        long_layers=(1, 3), no_attention_layers=(), value_layers=(0, 2, 3), table_rows=65_521,
        table_orders=(2, 3, 4), block_tokens=32, softcap=(30.0, 0.0, 7.5), lr_matrix=0.0566, lr_embed=0.04,
        lr_value=0.85, lr_scalar=0.056, lr_table=0.8, checkpoint_every_steps=10 ** 6),
    "tiny": dict(              # three steps of a model for tests
        num_steps=3, batch_tokens=1024, stages="plain", row_tokens=128, micro_rows=8, val_tokens=10_000,
        val_overlap=32, val_window_blocks=4, target_loss=0.0, model_dim=64, num_layers=3, num_heads=2,
        head_dim=32, qk_dim=32, copy_dim=32, mlp_dim=128, long_layers=(0,), no_attention_layers=(1,),
        value_layers=(0, 2), table_rows=1021, block_tokens=16,
        lr_matrix=0.039, lr_embed=0.0113, lr_value=0.85, lr_scalar=0.056, lr_table=1.2)}
CHOICES: dict[str, tuple[str, ...]] = dict(
    preset=tuple(PRESETS), stages=("record", "sprint", "plain"),     # the names of STAGES, in room 7
    compile=("auto", "on", "off"), attention=("auto", "flex", "dense"), fp8=("auto", "on", "off"),
    graphs=("auto", "on", "off"), deterministic=("on", "off"), self_check=("on", "off"))
RESUME_MAY_CHANGE = {         # by a resumed run; the data itself is compared
    "preset", "train_files", "val_files", "max_epochs", "micro_rows", "val_tokens", "val_overlap",
    "val_window_blocks", "val_every_steps", "target_loss", "compile", "attention", "fp8", "graphs", "log_dir",
    "deterministic", "log_every_steps", "profile_steps", "checkpoint_every_steps", "checkpoint_dir", "resume",
    "self_check"}
PATH_SETTINGS = {"train_files", "val_files", "log_dir", "checkpoint_dir", "resume"}

def parse_value(f: dataclasses.Field, text: str):
    """Text of --key=text as a value of the field's type. Raises Refusal."""
    if f.name == "micro_rows" and text == "auto":
        return 0
    try:
        if f.type in (int, float):
            return f.type(text)
        if f.type is not str:
            [number_type, _] = get_args(f.type)           # of tuple[int, ...]
            return tuple(number_type(part) for part in text.split(",") if part)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}.get(f.type, "numbers with commas, as 0,4,11")
        raise Refusal(f"--{f.name}={text:.99}: expected {expected}") from None
    if f.name in CHOICES and text not in CHOICES[f.name]:
        raise Refusal(f"--{f.name}={text:.99}: expected one of {', '.join(CHOICES[f.name])}")
    return text


def parts_of(value) -> tuple:
    """The value itself where it is a tuple, else a tuple that holds it."""
    return value if isinstance(value, tuple) else (value,)


def help_text() -> str:
    """The file's docstring, then each key with the record's value, as one would type it, and its meaning."""
    lines = [__doc__, f"Presets: {', '.join(PRESETS)}. Keys with the record's values:"]
    for f in dataclasses.fields(Config):
        if f.name in SECTIONS:                 # the first key of a section
            lines.append(f"  {SECTIONS[f.name]}")
        option = f"--{f.name}={','.join(map(str, parts_of(f.default)))}"
        choices = f" ({' | '.join(CHOICES[f.name])})" if f.name in CHOICES else ""
        lines.append(f"    {option:<33} {f.metadata['meaning']}{choices}")
    return "\n".join(lines)


def parse_config(argv: list[str], default_preset: str = "record") -> tuple[Config, dict]:
    """argv (without the program) -> (Config, what was given by hand). Raises Refusal on what it can't use."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    overrides = {}
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        is_switch = "on" in CHOICES.get(key, ())                 # --deterministic means --deterministic=on
        is_complete = arg.startswith("--") and (equals or is_switch)
        if not is_complete or not arg.isprintable():
            raise Refusal(f"{ascii(arg)[1:-1]:.99}: expected --key=value, all printable (see --help)")
        if key not in fields:
            near = [name for name in fields if key and (key in name or name in key or name[:4] == key[:4])]
            raise Refusal(f"--{key:.99}: no such key; near it: {', '.join(near) or 'none'} (see --help)")
        refuse_if(key in overrides, f"--{key}: given twice, expected once")
        overrides[key] = parse_value(fields[key], text if equals else "on")
    preset = overrides.pop("preset", default_preset)
    config = Config(**{"preset": preset, **PRESETS[preset], **overrides})
    check_config(config)
    return config, overrides


def num_parameters(c: Config) -> int:
    """How many parameters the model has, but for the few of gates, scalars, copy pointer and padding."""
    # Token embeddings, which are the output head too, and value embeddings
    embeddings = c.padded_vocab * (c.model_dim + len(c.value_layers) * c.num_heads * c.head_dim)
    ngram_table = len(c.table_orders) * c.table_rows * c.model_dim
    num_attentions = c.num_layers - len(set(c.no_attention_layers))
    attention = 2 * c.model_dim * c.num_heads * (c.qk_dim + c.head_dim)
    mlp = 2 * c.model_dim * c.mlp_dim
    return embeddings + ngram_table + num_attentions * attention + c.num_layers * mlp


def check_config(c: Config) -> None:
    """Raises Refusal when settings can't work, alone or together."""
    def need(ok: bool, key: str, expected: str) -> None:
        refuse_if(not ok, f"--{key}={getattr(c, key)!s:.99}: expected {expected}")

    for f in dataclasses.fields(c):
        low, high, shown = f.metadata["low"], f.metadata["high"], f.metadata["high"]
        if isinstance(high, str):
            high = getattr(c, high) - 1
            shown += f" - 1 = {high}"
        if f.type is not str:
            for number in parts_of(getattr(c, f.name)):
                need(low <= number <= high, f.name, f"a finite number from {low} to {shown}")
    need(c.batch_tokens % c.row_tokens == 0, "batch_tokens", f"a multiple of row_tokens={c.row_tokens}")
    need(c.row_tokens % c.block_tokens == 0, "row_tokens", f"a multiple of block_tokens={c.block_tokens}")
    need(c.val_overlap % c.block_tokens == 0, "val_overlap", f"a multiple of block_tokens={c.block_tokens}")
    # Rotary turns pairs in half of each head; fp8's matrix units take 16 numbers
    for key, divisor in (("qk_dim", 4), ("model_dim", 16), ("mlp_dim", 16), ("row_tokens", 16)):
        need(getattr(c, key) % divisor == 0, key, f"a multiple of {divisor}")
    for key in ("long_layers", "value_layers"):
        need(set(c.no_attention_layers).isdisjoint(getattr(c, key)), key, "none of no_attention_layers")
    need(len(c.table_orders) > 0, "table_orders", "at least one number")
    need(len(c.softcap) == 3, "softcap", "three numbers: cap, shift, width")
    cap, _, width = c.softcap
    fits = 0 < cap <= min(80, 16 * width)        # 80: exp stays in fp32; 16: cap / (4 width) <= 4 (G_SCALE)
    need(fits, "softcap", "cap, shift, width with a cap more than 0, at most 80 and at most 16 widths")


# ----------------------------------------------------------------------------------------------------------------------
# 2. World
# Finds out which process this is among how many and on which device, then lets the processes (ranks) meet.
# This is the only room that reads or sets environment variables.

WAIT_S = 10                                # after so long a rank says for whom it waits

@dataclasses.dataclass(frozen=True)
class World:
    """rank of size processes, on device. World() is one CPU process without a process group."""
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    local: int = 0                         # the rank's number on its own host
    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"
    def reduced(self, t: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        """t summed over all ranks, or combined by another op. Works in place."""
        if self.size > 1:
            dist.all_reduce(t, op)
        return t


def read_launcher() -> tuple[int, int, int]:
    """-> rank, size, number on this host: the variables that torchrun sets, else 0, 1, 0. Raises Refusal."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in os.environ and tasks != "1" and "RANK" not in os.environ:
        raise Refusal(f"SLURM_NTASKS={tasks}, but no RANK: each task would be a run of its own; start one "
                      "torchrun a node (srun --ntasks-per-node=1 torchrun ..), or set RANK=0 for a lone run")
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_RANK", "0")
    if not (rank.isdecimal() and size.isdecimal() and local.isdecimal() and int(rank) < int(size)):
        raise Refusal("RANK, WORLD_SIZE, LOCAL_RANK: expected whole numbers, rank < size, found "
                      f"{rank} of {size}, {local} on its host; start with torchrun")
    return int(rank), int(size), int(local)


def init_world(deterministic: bool = False) -> World:
    """Read the launcher's variables and take the device; join_group comes later. Raises Refusal."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 11):
        raise Refusal(f"torch {torch.__version__}: expected 2.11 or newer; pip install -r requirements.txt")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank, size, local = read_launcher()
    if not torch.cuda.is_available():
        return World(rank, size, local=local)
    count = torch.cuda.device_count()
    if local >= count:
        raise Refusal(f"local rank {local} has no GPU: {count} found; use --nproc_per_node={count} or fewer")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())          # for all work: the default one can't be recorded
    torch.backends.cuda.matmul.allow_tf32 = True
    return World(rank, size, device, local)


def say_waiting(world: World) -> None:
    """One line on the console of a rank that the others keep waiting."""
    others = ", ".join(str(rank) for rank in range(world.size) if rank != world.rank)
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print(f"train_gpt: rank {world.rank} of {world.size} on {platform.node()} waits at {place} for rank "
          f"{others}; a rank that prints no such line has not come", file=sys.stderr, flush=True)


def join_group(world: World) -> None:
    """Meet the others. Raises Refusal when the launcher's variables don't say where, or one never comes."""
    if world.size == 1:
        return
    waiting = threading.Timer(WAIT_S, say_waiting, [world])
    waiting.start()
    try:
        backend, device = ("nccl", world.device) if world.is_cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10), device_id=device)
        dist.barrier()         # a rank that refuses and leaves must not shut out one that is still connecting
    except (ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise Refusal(f"WORLD_SIZE={world.size}, but no meeting point ({reason}); use torchrun") from None
    finally:
        waiting.cancel()


def close_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def find_compiler() -> str | None:
    """Path of the C compiler that torch.compile would call on a CPU, if there is one."""
    names = os.environ.get("CC", ""), "cc", "gcc", "clang", "c++", "g++"
    return next(filter(None, map(shutil.which, names)), None)


# ----------------------------------------------------------------------------------------------------------------------
# 3. Kernels
# The mathematics that hardware cares about: each piece has a plain reference, at most one fast path, and one
# switch (Kernels). In order: the switch, CUDA graphs, orthogonalisation (for Muon), the output head's loss,
# products in fp8, the sample of ids for that loss, sums of gradients by id, masks, attention. Usually
# changed: orthogonalisation, softcap, what a query may see.

# Shapes: B rows, T positions, H heads, D head width, E model width, V padded vocabulary,
#         N matrices with sides R x C, n blocks in a row.
# row: one packed sequence of T tokens.  segment: a document, or the piece of one that stands in a row.
# block: so many consecutive tokens of a row (128 on a GPU), the unit of windows and of FlexAttention's lists.
# "Record 54" and the like are entries of the public race's list (github.com/KellerJordan/modded-nanogpt).

class Kernels(NamedTuple):
    """The switch: what this device runs.

    What recompiles: a compiled function is compiled again, which takes seconds to minutes, when
    - a Python number that it gets (int, float or bool) has a new value,
    - a tensor has a new shape or dtype, or newly asks for a gradient,
    - two of its inputs are one tensor, and were not before.
    So numbers that change during a run are passed as 0-D tensors, and no tensor is passed twice. Numbers that
    never change may be Python's, except in functions compiled with dynamic=True: see Optimizer.update."""
    compile: bool = False
    flex: bool = False                       # FlexAttention over lists of blocks instead of a dense mask
    fp8: bool = False                        # the MLPs' products; those of the output head in training
    graphs: bool = False                     # CUDA graphs of forward and backward (Recorder)
    dtype: torch.dtype = torch.float32       # of weights and activations
    small_tiles: bool = False                # of FlexAttention, for GPUs with little shared memory (4090)


def choose_kernels(device: torch.device, compilation: str = "auto", attention: str = "auto",
                   fp8: str = "auto", fits_flex: bool = True, graphs: str = "auto") -> Kernels:
    """Fast paths where the device has them, references elsewhere. Raises Refusal for what can't be done.
    Words are those of Config; fits_flex says whether FlexAttention takes the model's sizes."""
    on_gpu = device.type == "cuda"
    on_nvidia = on_gpu and torch.version.hip is None
    compiled = compilation == "on" or (compilation == "auto" and on_gpu)
    major, minor = torch.cuda.get_device_capability(device) if on_nvidia else (0, 0)
    refuse_if(on_nvidia and major < 8,
              f"{device}: compute capability {major}.{minor} has no bf16 matrix units, expected 8.0 or newer "
              "(A100, 3090); CUDA_VISIBLE_DEVICES= trains on the CPU")
    small_tiles = False
    if on_nvidia:
        shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        small_tiles = shared_memory < USUAL_TILES_BYTES

    def chosen(key: str, asked: str, reference: str, is_available: bool, needs: str) -> bool:
        """Whether to take a fast path: where it is available, unless the reference is asked for."""
        refuse_if(asked not in ("auto", reference) and not is_available,
                  f"--{key}={asked}: it needs {needs}; use --{key}={reference}")
        return is_available and asked != reference

    return Kernels(
        compile=compiled, dtype=torch.bfloat16 if on_gpu else torch.float32, small_tiles=small_tiles,
        flex=chosen("attention", attention, "dense", on_gpu and compiled and fits_flex, "a GPU, compilation, "
                    "block_tokens=128, and head_dim, qk_dim and copy_dim from 16 on"),
        fp8=chosen("fp8", fp8, "off", compiled and (major, minor) >= (8, 9),
                   "compilation and fp8 matrix units (compute capability 8.9 or newer)"),
        graphs=chosen("graphs", graphs, "off", compiled and on_nvidia, "an NVIDIA GPU and compilation"))


class Recorder:
    """Calls function(*constants, *inputs) as one CUDA graph: the host launches that instead of 400 kernels.
    constants are plain values, inputs tensors. For each combination of constants and shapes the first call
    runs as it is (it compiles), the second is recorded; that one and all later ones copy their inputs into
    the graph's own and replay it. Results are the same tensors each time, with new contents: who needs them
    after the next call clones them. A graph freezes each address and each Python number. So all else that
    function reads and writes (weights, gradients, tables) must stay at its address, and a number that changes
    from call to call must be an input, a 0-D tensor. Not allowed in function: reading a tensor's value
    (.item(), if on a tensor), collectives, random numbers."""
    def __init__(self, function: Callable, device: torch.device, is_recording: bool):
        self.function, self.device, self.is_recording = function, device, is_recording
        self.graphs = {}                  # None: called once; then (graph, its inputs, its results)
        self.pool = torch.cuda.graph_pool_handle() if is_recording else None     # of memory, for all graphs

    def __call__(self, constants: tuple, *inputs: Tensor):
        key = constants, *(t.shape for t in inputs)
        if not self.is_recording or key not in self.graphs:
            self.graphs[key] = None
            return self.function(*constants, *(t.to(self.device, non_blocking=True) for t in inputs))
        if self.graphs[key] is None:
            graph = torch.cuda.CUDAGraph()
            own_inputs = [torch.zeros_like(t, device=self.device) for t in inputs]
            # thread_local: other threads (the loader, NCCL's watchdog) may go on calling CUDA
            with torch.cuda.graph(graph, self.pool, torch.cuda.current_stream(), "thread_local"):
                results = self.function(*constants, *own_inputs)
            self.graphs[key] = graph, own_inputs, results
        graph, own_inputs, results = self.graphs[key]
        for own, t in zip(own_inputs, inputs):
            own.copy_(t, non_blocking=True)
        graph.replay()
        return results


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


POLAR_EXPRESS = (       # quintic maps, each the best for what the one before leaves (Amsel et al. 2025)
    (8.1565545, -22.483293, 15.87877), (4.04293, -2.8089175, 0.5000178), (3.8916678, -2.772484, 0.50606482),
    (3.2857537, -2.3681295, 0.46449024), (2.3465413, -1.7097828, 0.4232355))
NORM_MARGIN = 1.02      # the maps are made for singular values up to 1: room for bf16's roundings

def orthogonalize(G_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest semi-orthogonal matrix of each G, with singular values near 1 (Muon, Jordan 2024).
    X <- aX + (bA + cA^2)X with A = XX^T, five times, from X = G / (1.02 |G|_F), on the smaller side.
    [N, R, C] -> the same, in dtype. G may be of any finite size. Zero gives zero; NaN, infinity give NaN."""
    X = G_NRC.float()
    # Squares of 1e-30 or 1e30 leave fp32's range, so first bring the largest entry near 1. A division by a
    # power of two changes no digit; up to exponents of 126 the power and its inverse are normal numbers.
    exponent = X.abs().amax(dim=(-2, -1), keepdim=True).log2().floor().clamp(min=-126, max=126)
    X = X / torch.exp2(exponent)
    size = X.norm(dim=(-2, -1), keepdim=True)
    X = (X / (NORM_MARGIN * size).clamp(min=1e-30)).to(dtype)        # the clamp is for zero matrices
    is_tall = X.size(-2) > X.size(-1)
    X = X.mT if is_tall else X
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        polynomial = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, polynomial, X, beta=a)
    return X.mT if is_tall else X


def softcap(logits: Tensor, cap_shift_width: tuple[float, float, float]) -> Tensor:
    """Logit softcap, fp32: cap * sigmoid((logits + shift) / width). It lies between 0 and cap and lets right
    answers stand out (record 54). What depends on it: softcap_slope and by it G_SCALE; softmax_losses, for
    which its largest value is cap; check_config's limits."""
    cap, shift, width = cap_shift_width
    return cap * torch.sigmoid((logits.float() + shift) / width)


def softcap_slope(z: Tensor, cap_shift_width: tuple[float, float, float]) -> Tensor:
    """dz / dlogits of z = softcap(logits), at most cap / (4 width)."""
    cap, _, width = cap_shift_width
    return z * (1 - z / cap) / width


def mixed_cross_entropy(x: Tensor, w: Tensor, targets_KT: Tensor, log_lm: Tensor, log_copy: Tensor,
                        cap_shift_width: tuple[float, float, float],
                        further_weights: Tensor | None = None) -> Tensor:
    """Summed loss of a softmax mixed with copies: -log(e^log_lm softmax(z)[target] + e^log_copy), where
    z = softcap(x w^T) for x [T, E], w [V, E]. Negative targets are left out. -> fp32 scalar.
    log_lm [T]: log of the share of probability that goes to the softmax (lm: the language model proper).
    log_copy [T]: log of the probability that the copy pointer (room 5) gives to the target.
    targets [K, T]: those of the next position, then K - 1 further ones, which add
    weight * -log softmax(z)[target] (multi-token prediction, Gloeckle et al. 2024, here by one head).
    It is the reference, and what validation uses everywhere."""
    logits = F.linear(x, w)
    losses, *_ = softmax_losses(logits, targets_KT, log_lm, log_copy, cap_shift_width, further_weights)
    return losses.sum()


def softmax_losses(logits: Tensor, targets: Tensor, log_lm: Tensor, log_copy: Tensor,
                   cap_shift_width: tuple[float, float, float], further_weights: Tensor | None):
    """Losses of mixed_cross_entropy [T]; what logits_gradient wants besides the logits [T, V]: logsumexp [T]
    and blame [K, T]. targets: [K, T], K - 1 further ones. Per position, with p = softmax(softcap(logits)):
        P = e^log_lm p[target] + e^log_copy    L = -log P    blame = e^log_lm p[target] / P = -dL/dlog_lm
    blame is the softmax's part of the target's probability, by which its gradient is multiplied. A further
    target's blame is its weight, a missing one's 0."""
    cap = cap_shift_width[0]
    # softcap lies in 0 .. cap <= 80, so cap can stand for the maximum that a logsumexp takes out
    logsumexp = (softcap(logits, cap_shift_width) - cap).exp().sum(1).log() + cap
    target_logits = logits.gather(1, targets.clamp(min=0).long().t()).t()
    log_p, has_target = softcap(target_logits, cap_shift_width) - logsumexp, (targets >= 0).float()
    log_mixture = torch.logaddexp(log_lm + log_p[0], log_copy)
    losses = -log_mixture * has_target[0]
    blame = (log_lm + log_p[0] - log_mixture).exp()[None]
    if len(targets) > 1:
        losses = losses - (further_weights[:, None] * log_p[1:] * has_target[1:]).sum(0)
        blame = torch.cat((blame, further_weights[:, None].expand_as(log_p[1:])))
    return losses, logsumexp, blame * has_target


def fp8_matmul(a8: Tensor, b8: Tensor, scale: float, fast_sums: bool = False) -> Tensor:
    """scale * a8 [M, K] b8 [K, N] -> bf16. a8 row-major, b8 column-major: the hardware takes no other."""
    one = torch.ones((), dtype=torch.float32, device=a8.device)
    return torch._scaled_mm(a8, b8, scale * one, one, out_dtype=torch.bfloat16, use_fast_accum=fast_sums)


# fp8 scales. All are constants but that of a token in an MLP (fp8_product). e4m3 ends at 448, e5m2 at 57,344.
X_SCALE = 2.0           # e4m3 holds x up to 224; a normed x is at most sqrt(model_dim), 28 for 768
W_SCALE = 32.0          # e4m3 holds weights up to 14, far more than trained ones have, and from 6e-5 on
# e5m2 holds |dL / dlogits| up to 57,344 / 8192 = 7 = (1 + 0.75) x 4. 0.75: the most that the weights of
# further targets may sum to (see Stage). 4: the steepest softcap, cap / (4 width), that check_config allows
G_SCALE = 8192.0

def fp8_product(x: Tensor, w: Tensor) -> Tensor:
    """x [.., K] w^T for w [N, K], in e4m3 -> bf16 [.., N]. Each token is scaled by its own largest entry:
    hidden states of some are a hundred times those of others, and gradients change in size over a run."""
    scale = 448 / x.abs().amax(-1, keepdim=True).clamp(min=1e-30)        # the clamp is for tokens of zeros
    x8, w8 = (x * scale).to(torch.float8_e4m3fn), (w * W_SCALE).to(torch.float8_e4m3fn)
    y = fp8_matmul(x8.flatten(0, -2), w8.contiguous().t(), 1 / W_SCALE, fast_sums=True)
    return y.unflatten(0, x.shape[:-1]) / scale


class Fp8Linear(torch.autograd.Function):
    """F.linear, the product and its gradient by x in fp8. Rounding counts as the identity."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return fp8_product(x, w)

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return fp8_product(upstream, w.t()), upstream.flatten(0, -2).t() @ x.flatten(0, -2)


def logits_gradient(logits: Tensor, logsumexp: Tensor, targets: Tensor, blame: Tensor,
                    cap_shift_width: tuple[float, float, float]) -> Tensor:
    """fp32 [T, V]: with z = softcap(logits), the sum of blame (softmax(z) - onehot(target)) over the targets
    [K, T], times dz/dlogits."""
    z, ids = softcap(logits, cap_shift_width), torch.arange(logits.size(1), device=logits.device)
    grad = (z - logsumexp[:, None]).exp() * blame.sum(0)[:, None]
    for target, its_blame in zip(targets, blame):
        grad = grad - torch.where(ids == target[:, None], its_blame[:, None], 0.0)
    return grad * softcap_slope(z, cap_shift_width)


def head_gradients(x: Tensor, w: Tensor, targets_KT: Tensor, log_lm: Tensor, log_copy: Tensor,
                   cap_shift_width: tuple[float, float, float], further_weights: Tensor | None, fp8: bool):
    """mixed_cross_entropy and its gradients by x, w, log_lm and log_copy, from logits that are made once.
    fp8 (record 19): operands are e4m3, gradients by logits e5m2, products bf16."""
    if fp8:
        x8, w8 = (x * X_SCALE).to(torch.float8_e4m3fn), (w * W_SCALE).to(torch.float8_e4m3fn)
        logits = fp8_matmul(x8, w8.t(), 1 / (X_SCALE * W_SCALE), fast_sums=True)
    else:
        logits = F.linear(x, w)
    losses, logsumexp, blame = softmax_losses(logits, targets_KT, log_lm, log_copy, cap_shift_width,
                                              further_weights)
    grad = logits_gradient(logits, logsumexp, targets_KT, blame, cap_shift_width)
    if fp8:
        g8 = (grad * G_SCALE).to(torch.float8_e5m2)
        dx = fp8_matmul(g8, w8.t().contiguous().t(), 1 / (G_SCALE * W_SCALE))
        dw = fp8_matmul(g8.t().contiguous(), x8.t().contiguous().t(), 1 / (G_SCALE * X_SCALE))
    else:
        grad = grad.to(x.dtype)
        dx, dw = grad @ w, grad.t() @ x
    # dL/dlog_copy = -e^log_copy / P = blame - 1; both are 0 where there is no target
    d_lm, d_copy = -blame[0], blame[0] - (targets_KT[0] >= 0).float()
    return losses.sum(), dx, dw, d_lm, d_copy


class HeadLoss(torch.autograd.Function):
    """head_gradients as a differentiable scalar. gradients is head_gradients, compiled or not. The forward
    pass does all the work; the backward pass only multiplies by the gradient from above."""
    @staticmethod
    def forward(ctx, gradients, x, w, targets_KT, log_lm, log_copy, cap_shift_width, further_weights, fp8):
        loss, *saved = gradients(x, w, targets_KT, log_lm, log_copy, cap_shift_width, further_weights, fp8)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        dx, dw, d_lm, d_copy = (t * upstream.to(t.dtype) for t in ctx.saved_tensors)
        return None, dx, dw, None, d_lm, d_copy, None, None, None


def candidate_set(targets: Tensor, vocab: int, count: int, start: int | Tensor) -> tuple[Tensor, Tensor]:
    """Candidates, the ids of a sampled softmax: all distinct targets, then negatives out of a fixed walk.
    targets: any shape, -1 for none; where more than count are distinct, some are left out.
    -> ids [count], each once; place_of_id [vocab]: where in ids each id stands, -1 where it is left out.
    The walk visits (start + j) * 20011 mod vocab (record 92). start differs from row to row (row_loss), so
    that every id is a negative now and then. It needs no sort and no host synchronisation."""
    stride = next(s for s in (20_011, 10_007, 7919, 1) if math.gcd(s, vocab) == 1)
    device = targets.device
    walk = (torch.arange(vocab, device=device) + start % vocab) * stride % vocab        # every id once
    slots = torch.where(targets < 0, vocab, targets).flatten().long()      # slot `vocab` collects targets -1
    is_target_id = torch.zeros(vocab + 1, dtype=torch.int32, device=device).scatter_(0, slots, 1)
    is_target = is_target_id[walk]       # of the j-th id of the walk, as all places below
    # Where the j-th id goes: targets first, then the others, both in the walk's order
    place_of_target = is_target.cumsum(0) - 1
    place_of_other = is_target.sum() + (1 - is_target).cumsum(0) - 1
    place = torch.where(is_target > 0, place_of_target, place_of_other).clamp(max=count)
    # At place `count` is the rest, which is left out
    ids = torch.zeros(count + 1, dtype=torch.long, device=device).scatter_(0, place, walk)[:count]
    place_of_id = torch.empty(vocab, dtype=torch.long, device=device).scatter_(0, walk, place)
    return ids, place_of_id.masked_fill(place_of_id == count, -1)


def sums_by_id(ordered: Tensor, place: Tensor, grads: Tensor) -> Tensor:
    """Sums of gradients that belong to the same id, for tables that are looked up by row (RowBank, room 4).
    ordered [M]: the ids, sorted; place [M]: where in grads [M, C] each one's gradient stands.
    -> [M, C]: the sum at the first of each id, zeros elsewhere."""
    is_first = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
    first = torch.where(is_first, torch.arange(len(ordered), device=ordered.device), 0).cummax(0).values
    sums = torch.zeros(grads.shape, dtype=torch.float32, device=grads.device)
    return sums.index_add_(0, first, grads.float()[place]).to(grads.dtype)


if triton is not None:
    @triton.jit
    def sums_by_id_kernel(ordered, place, grads, out, M, C, grads_stride, ROWS: tl.constexpr,
                          COLUMNS: tl.constexpr):
        """A program looks at one place in ordered, and if an id begins there, sums COLUMNS columns of its
        gradients, ROWS at a time. It goes on while all ROWS belonged to the id."""
        position = tl.program_id(0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_row = column < C
        this_id = tl.load(ordered + position)
        is_first = (position == 0) | (tl.load(ordered + position - 1, position > 0, 0) != this_id)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        here = position + tl.arange(0, ROWS)
        count = tl.where(is_first, ROWS, 0)         # 0: no id begins here, so nothing is summed
        while count == ROWS:
            belongs = tl.load(ordered + here, here < M, -1) == this_id
            row = tl.load(place + here, belongs, 0)
            mask = belongs[:, None] & in_row[None, :]
            total += tl.load(grads + row[:, None] * grads_stride + column[None, :], mask, 0.0).to(tl.float32)
            here += ROWS
            count = tl.sum(belongs.to(tl.int32), 0)
        target = out + position.to(tl.int64) * C + column
        tl.store(target, tl.sum(total, 0).to(out.dtype.element_ty), in_row)


def fast_sums_by_id(ordered: Tensor, place: Tensor, grads: Tensor) -> Tensor:
    """sums_by_id on a GPU, for short runs: most n-grams of a step come once. (A token that comes a thousand
    times would keep one program busy while the others are done: records/LOG.md.)"""
    (M, C), out = grads.shape, torch.empty_like(grads)
    columns = min(1024, triton.next_power_of_2(C))
    sums_by_id_kernel[M, triton.cdiv(C, columns)](ordered, place, grads, out, M, C, grads.stride(0),
                                                  ROWS=4, COLUMNS=columns)
    return out


def shift(x_BT: Tensor, distance: int = 1, fill: float = 0) -> Tensor:
    """x [B, T, ..] moved later by distance positions along each row; the first positions get fill."""
    pad = (0, 0) * (x_BT.ndim - 2) + (distance, 0)        # F.pad counts dimensions from the last one
    return F.pad(x_BT, pad, value=fill)[:, :x_BT.size(1)]


class Mask(NamedTuple):
    """Who sees whom: a query sees itself and earlier keys of its segment, at most so many blocks back.
    One of dense and blocks is set."""
    segments_BT: Tensor
    same_document_BT: Tensor                     # bool: the token before is of the same segment
    # 0-D bool: long layers take a part of each key from the token before (see Attention). It travels with the
    # mask, as a tensor, so that long and short layers share one compiled graph (see Kernels)
    offset_keys: Tensor | None = None
    dense: Tensor | None = None                  # [B, 1, T, T], True where attention is allowed
    blocks: tuple[Tensor, ...] | None = None     # FlexAttention's lists, see block_mask
    small_tiles: bool = False                    # see SMALL_TILES


def segment_ids(tokens_BT: Tensor, eod_id: int) -> Tensor:
    """Document starts up to each position of its row, int32 [B, T]: the one rule of what belongs together."""
    return (tokens_BT == eod_id).cumsum(1, dtype=torch.int32)


def same_document(segments_BT: Tensor, distance: int) -> Tensor:
    """Whether the token distance places before is of the same segment, bool [B, T]: the one rule again."""
    return shift(segments_BT, distance, fill=-1) == segments_BT


def dense_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """Reference mask: query i sees keys j <= i of its segment in the last window_blocks blocks, its own block
    included. segments [B, T], window_blocks 0-D, block in tokens. Who changes what a query may see changes
    block_mask and flex_attend too."""
    i = torch.arange(segments_BT.size(1), device=segments_BT.device)
    causal = i[:, None] >= i
    near = i[:, None] // block - i // block < window_blocks
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    return Mask(segments_BT, same_document(segments_BT, 1), dense=((causal & near) & same)[:, None])


def block_mask(segments_BT: Tensor, window_blocks: Tensor, block: int) -> Mask:
    """The same rule as FlexAttention's lists of blocks, made without a search, a sort or a dense mask.
    Segment ids only grow along a row. So the key blocks that block i of queries sees are one run, low to i,
    and the full ones of them (each query sees each key, so no mask is applied there) are a run within it:

        0 ..          low ..      full_low ..   i           i + 1 ..
        unseen        partial     full          partial     unseen

    Block i itself is partial: causality cuts it. Likewise the blocks of queries that see block i of keys:

        0 ..          i           i + 1 ..      full_high + 1 ..    high + 1 ..
        unseen        partial     full          partial             unseen"""
    first, last = segments_BT[:, ::block], segments_BT[:, block - 1::block]   # of each block's tokens, [B, n]
    n = first.size(1)
    i = torch.arange(n, device=first.device)
    farthest_key, farthest_query = i - window_blocks + 1, i + window_blocks - 1

    def blocks_where(condition: Tensor) -> Tensor:
        """How many blocks j fulfil it, [B, i, j] -> [B, i]. It holds up to some j and not after it."""
        return condition.sum(-1, dtype=torch.int32)

    def counted_from(begin: Tensor) -> Tensor:
        """For each block i the list begin, begin + 1, ..: [B, n] -> [B, n, n]. Not all of it counts."""
        return (begin[:, :, None] + i).clamp(max=n - 1)

    def with_diagonal(lists: Tensor, place: Tensor) -> Tensor:
        """The same lists with i itself at a place [B, n] of the list of block i."""
        return torch.where(i == place[:, :, None], i[:, None], lists)

    # For block i of queries: blocks of unseen keys end before its first segment; those from full_low on begin
    # in its last. If it holds two segments itself, no earlier block begins in its last: then none is full.
    low = torch.maximum(blocks_where(last[:, None, :] < first[:, :, None]), farthest_key).clamp(min=0)
    full_low = torch.maximum(blocks_where(first[:, None, :] < last[:, :, None]), low)
    full_low = torch.minimum(full_low, i)
    # For block i of keys: query blocks up to high begin in its last segment, up to full_high end in its first
    high = torch.minimum(blocks_where(first[:, None, :] <= last[:, :, None]) - 1, farthest_query)
    full_high = torch.minimum(blocks_where(last[:, None, :] <= first[:, :, None]) - 1, farthest_query)
    full_high = torch.maximum(full_high, i)
    num_partial_keys, num_partial_queries = full_low - low + 1, high - full_high + 1
    # In turn: how many count, and the list; in the order of BlockMask's arguments
    lists = (num_partial_keys, with_diagonal(counted_from(low), num_partial_keys - 1),
             i - full_low, counted_from(full_low),
             # place 0, where full_high stands, is given to i; full_high + 1 .. follow
             num_partial_queries, with_diagonal(counted_from(full_high), torch.zeros_like(high)),
             full_high - i, counted_from((i + 1).expand_as(full_high)))
    lists = tuple(t.to(torch.int32)[:, None].contiguous() for t in lists)    # [B, 1, n], [B, 1, n, n] in turn
    return Mask(segments_BT, same_document(segments_BT, 1), blocks=lists)


# What FlexAttention's kernels hold at once, for GPUs with less shared memory (3090, 4090, L4: 99 KiB) than a
# pipeline of three of the usual tiles takes: queries [128, 128] and thrice keys and values [64, 128] in bf16.
USUAL_TILES_BYTES = 2 * (128 * 128 + 3 * 2 * 64 * 128)
SMALL_TILES = dict(fwd_BLOCK_M=64, fwd_BLOCK_N=64, fwd_num_stages=2, bwd_num_stages=1,
                   bwd_BLOCK_M1=32, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=32)

def flex_attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Mask, block: int, **more):
    """FlexAttention over the lists of block_mask."""
    segments, T = mask.segments_BT, mask.segments_BT.size(1)
    def allowed(b, h, i, j):
        return (i >= j) & (segments[b, i] == segments[b, j])
    lists = flex.BlockMask((T, T), *mask.blocks, BLOCK_SIZE=(block, block), mask_mod=allowed)
    tiles = SMALL_TILES if mask.small_tiles else None
    return flex.flex_attention(q_BHTD, k_BHTD, v_BHTD, block_mask=lists, kernel_options=tiles, **more)


def attend(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Mask, scale: float, block: int) -> Tensor:
    """softmax(scale * q.k) v under the mask: FlexAttention over lists of blocks or SDPA over a dense mask."""
    q, k, v = (t.transpose(1, 2) for t in (q_BTHD, k_BTHD, v_BTHD))
    if mask.blocks is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, scale=scale)
    else:
        y = flex_attend(q, k, v, mask, block, scale=scale)
    return y.transpose(1, 2)


NO_MATCH = -1e4        # score of a key that doesn't match: its exp is 0, without a NaN where no key matches

def dense_scores(q_BTD: Tensor, k_BTD: Tensor, dense: Tensor) -> Tensor:
    """q.k / sqrt(D) in fp32, [B, T, T]; -inf where the mask [B, 1, T, T] lets a query not see a key."""
    scores = q_BTD.size(-1) ** -0.5 * (q_BTD @ k_BTD.mT).float()
    return scores.masked_fill(~dense[:, 0], -math.inf)


def copy_logsumexps(q_BTD: Tensor, k_BTD: Tensor, tokens_BT: Tensor, targets_BT: Tensor, mask: Mask,
                    block: int) -> tuple[Tensor, Tensor]:
    """Two logsumexps of q.k / sqrt(D), fp32 [B, T] each: over all keys that a query sees, and over those
    whose token is the query's target (near NO_MATCH: none is). Their difference: log p(a copy is the target).
    Fast path: FlexAttention is used for its logsumexp only, its output is thrown away. Two heads have
    the same q and k: head 0 sums over all keys, head 1 over the keys that are the target."""
    if mask.blocks is None:
        scores = dense_scores(q_BTD, k_BTD, mask.dense)
        is_target = (tokens_BT[:, None, :] == targets_BT[:, :, None]) & mask.dense[:, 0]
        return scores.logsumexp(-1), torch.where(is_target, scores, NO_MATCH).logsumexp(-1)
    def all_or_targets(score, b, h, i, j):
        return torch.where((h == 0) | (tokens_BT[b, j] == targets_BT[b, i]), score, NO_MATCH)
    q, k = torch.stack((q_BTD, q_BTD), 1), torch.stack((k_BTD, k_BTD), 1)
    no_values = torch.zeros_like(k[..., :16])        # 16: the narrowest that the kernel takes
    y, aux = flex_attend(q, k, no_values, mask, block, score_mod=all_or_targets, scale=q.size(-1) ** -0.5,
                         return_aux=flex.AuxRequest(lse=True))
    # + 0 y: the backward pass can't be compiled without a gradient of the output (torch 2.11)
    return (aux.lse.float() + 0.0 * y[..., 0].float()).unbind(1)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Optimizer
# A group is parameters that learn alike: one rule, one rate. A bank holds a group's parameters as views of a
# padded buffer; a shard is a rank's equal part of it, a master the same weights in fp32. (A RowBank holds one
# table as it is, and a rank's part are some columns.) A step sums gradients over the ranks into shards
# (reduce), applies the rule to the own shard (update), collects all new weights (gather). For another rule,
# write a function that updates weights and state in place, put it into RULES, name it in room 5's table; a
# number that no rule has read before goes into rule_inputs.

# The new names came with torch 2.13.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

class Group(NamedTuple):
    """Parameters that share one rule and one rate: a row of room 5's table. None: the rule doesn't read it.
    A parameter of kind "rows" is a table [R, C] that is looked up by row. It has .touched instead of .grad:
    a list with (ids [..], gradients [.., C] of these rows) for each pass."""
    name: str
    kind: str                    # the rule, by its name in RULES: muon | adam | rows
    pattern: str                 # a regular expression for the whole names of its parameters
    lr: float
    betas: tuple[float | None, float | None] = (None, None)
    eps: float | None = None
    # Cautious decay: where a step shrinks W, W also loses decay x lr^2 of itself (tall matrices of muon
    # sqrt(R / C) times that). lr is this step's, so the decay falls with its square.
    decay: float = 0.0
    ema: bool = False            # the final weights are blended with their average over the end of the run
    matmul: bool = False         # these are matrices that multiply activations: utilisation counts them
    params: dict[str, nn.Parameter] = {}      # by name: what param_groups found for the pattern


def cautious_step(weight: Tensor, step: Tensor, decay: Tensor) -> None:
    """W <- W - step - decay W where the step shrinks W (cautious decay, Chen et al. 2025). In place."""
    weight.sub_(step + decay * weight * (step * weight > 0))


def short_side(shape: torch.Size) -> int:
    """The dimension of a matrix [.., R, C] that NorMuon averages over, so that max(R, C) numbers are left."""
    return -1 if shape[-2] >= shape[-1] else -2


def muon_update(weight, grad, momentum_buffer, second, lr, momentum, beta2, decay) -> None:
    """NorMuon (Li et al. 2025) on a stack [N, R, C]: Muon (Jordan et al. 2024), a variance for each neuron.
    M <- mu M + (1 - mu) G;  O = orth((1 - mu) G + mu M);  v <- b v + (1 - b) mean over the short side of O^2
    O <- O / sqrt(v), rescaled to its old norm;  W <- W - lr sqrt(max(1, R/C)) O, decayed (see Group).
    The dtype of the gradients is that of the matrix products in orth.
    In place: weight, momentum_buffer, second (v, [N, R, 1] or [N, 1, C])."""
    dtype, grad = grad.dtype, grad.float()
    momentum_buffer.mul_(momentum).add_(grad * (1 - momentum))
    update = orthogonalize(grad * (1 - momentum) + momentum_buffer * momentum, dtype).float()
    mean_square = update.square().mean(short_side(weight.shape), keepdim=True)
    second.mul_(beta2).add_(mean_square * (1 - beta2))
    scaled = update * second.clamp(min=1e-20).rsqrt()
    before = update.norm(dim=(-2, -1), keepdim=True)
    after = scaled.norm(dim=(-2, -1), keepdim=True)
    scaled = scaled * (before / after.clamp(min=1e-20))
    rate = lr * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
    cautious_step(weight, rate * scaled, decay * lr * rate)


def muon_state(master: Tensor) -> dict[str, Tensor]:
    """Momentum, and a second moment for each neuron: [N, R, 1] for tall matrices, [N, 1, C] for wide ones."""
    shape = list(master.shape)
    shape[short_side(master.shape)] = 1
    return {"momentum": torch.zeros_like(master), "second": master.new_zeros(shape)}


def adam_update(weight, grad, exp_avg, exp_avg_sq, lr, bias1, bias2, beta1, beta2, eps, decay) -> None:
    """Adam (Kingma & Ba 2015) with bias correction, for any shape, decayed (see Group).
    In place: weight, exp_avg and exp_avg_sq."""
    grad = grad.float()
    exp_avg.mul_(beta1).add_(grad * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(grad * grad * (1 - beta2))
    cautious_step(weight, lr / bias1 * exp_avg / ((exp_avg_sq / bias2).sqrt() + eps), decay * lr * lr)


def adam_state(master: Tensor) -> dict[str, Tensor]:
    """The averages of gradients and of their squares."""
    return {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}


def merge_rows(ids: Tensor, grads: Tensor, unused: int, sum_by_id: Callable) -> tuple[Tensor, Tensor]:
    """Sums the gradients [M, C] of equal ids [M] by sums_by_id or fast_sums_by_id. -> ids [M], sorted, all
    but the first of equal ones replaced by unused; their sums [M, C], zeros where replaced."""
    ordered, place = ids.sort(stable=True)
    is_repeated = F.pad(ordered[1:] == ordered[:-1], (1, 0))
    return ordered.masked_fill(is_repeated, unused), sum_by_id(ordered, place, grads)


def rows_update(rows, grad, mean_square, second, age, is_row, lr, beta2, eps, decay) -> tuple[Tensor, Tensor]:
    """Row-wise RMS steps without momentum for this rank's columns [M, width] of M rows, decayed (see Group).
    From record 92 of the public race.
    v <- b^age v + (1 - b) mean of G^2, age: updates since the row's last one;  p <- p - lr G / sqrt(v)
    Without bias correction a row's first step is lr / sqrt(1 - b), 4.5 lr for 0.95: rare rows learn at once.
    second [M]: v; mean_square [M]: over all ranks' columns, so it comes from outside; is_row [M]: false for
    slots that hold none. -> new columns and v, which RowBank.update writes: these are copies of its own."""
    weight, grad = rows.float(), grad.float() * is_row[:, None]
    second = second * beta2 ** age + (1 - beta2) * mean_square * is_row
    cautious_step(weight, lr * grad / (second.sqrt() + eps)[:, None], decay * lr * lr)
    return weight.to(rows.dtype), second


def rows_state(table: Tensor) -> dict[str, Tensor]:
    """For each row its second moment, and the number of the update in which it was last touched."""
    second = torch.zeros(len(table), device=table.device)
    return {"second": second, "seen": second.int()}


class Rule(NamedTuple):
    """How a bank learns. A group's kind names one."""
    update: Callable             # update(master, grad, *state, **numbers); of a table: see RowBank.update
    reads: tuple[str, ...]       # the numbers that update takes: see rule_inputs
    state: Callable              # master -> {name: zeros}, in update's order; of a table: see RowBank.update
    layout: str                  # of a bank: "matrices" [N, R, C] | "flat" [N] | "table": one parameter


RULES = {
    "muon": Rule(muon_update, ("lr", "momentum", "beta2", "decay"), muon_state, "matrices"),
    "adam": Rule(adam_update, ("lr", "beta1", "beta2", "bias1", "bias2", "eps", "decay"), adam_state, "flat"),
    "rows": Rule(rows_update, ("lr", "beta2", "eps", "decay"), rows_state, "table")}

def rule_inputs(group: Group, steps: int, lr_scale: float, momentum: float) -> dict[str, float | None]:
    """All that a rule may read in update number steps (1, 2, ..). bias1, bias2: Adam's bias corrections."""
    beta1, beta2 = group.betas
    bias1, bias2 = (None if beta is None else 1 - beta ** steps for beta in group.betas)
    return dict(lr=group.lr * lr_scale, momentum=momentum, beta1=beta1, beta2=beta2, bias1=bias1, bias2=bias2,
                eps=group.eps, decay=group.decay)


def check_group(group: Group) -> None:
    """Raises ValueError for a group that its rule can't update."""
    if group.kind not in RULES:
        raise ValueError(f"group {group.name}: kind is {group.kind}, expected one of {', '.join(RULES)}")
    rule, numbers = RULES[group.kind], rule_inputs(group, 1, 1.0, 0.0)
    for cell in rule.reads:
        if numbers[cell] is None or (cell == "eps" and numbers[cell] <= 0):      # an eps of 0 gives 0 / 0
            raise ValueError(f"group {group.name}: rule {group.kind} reads {cell}, found {numbers[cell]}: "
                             "write a number into that cell (eps: above 0)")
    shapes = {tuple(p.shape[-2:]) for p in group.params.values()}
    if rule.layout == "matrices" and (len(shapes) > 1 or len(min(shapes)) < 2):
        raise ValueError(f"group {group.name}: rule {group.kind} takes matrices [.., R, C] of one shape, "
                         f"found {sorted(shapes)}; make a group for each shape")
    if rule.layout == "table" and (group.ema or len(group.params) > 1):
        raise ValueError(f"group {group.name}: rule {group.kind} takes one table, without ema")


class Bank:
    """What Optimizer asks of a bank, be it a DenseBank or a RowBank:
    reduce()                  starts to sum the gradients over the ranks -> communication to wait for
    update(function, numbers) applies the rule's function (compiled or not) to this rank's shard
    gather()                  starts to collect all ranks' new weights -> communication to wait for
    zero_grad()               forgets the gradients
    tensors()                 -> every tensor that a step at rate 0 may change: warmup puts them back
    gathered()                -> ("PARAMETER/KIND", tensor): exact weights and state, whole, without padding
    load(tensors)             takes over what gathered() gave, on any number of ranks
    It has group, world, steps (updates so far), weight (whole), master (what this rank updates, exact), state
    (by name) and, after reduce, grad_shard, of which a step reports the norm (a RowBank's: this rank's
    gradients before equal ids are summed)."""
    def state_to_save(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as this rank has it."""
        return {"weight": self.master, **self.state}


class DenseBank(Bank):
    """Parameters with dense gradients, as views of one buffer, so that one collective and one batched kernel
    serve them all. Zeros at its end make it divide evenly among any number of ranks."""
    def __init__(self, group: Group, world: World):
        self.group, self.world, self.steps = group, world, 0
        rule, params = RULES[group.kind], list(group.params.values())
        unit, align = torch.Size(), 128          # counts numbers; a parameter begins at a multiple of 128
        if rule.layout == "matrices":
            unit, align = params[0].shape[-2:], 1
        self.slices, num_units = {}, 0           # parameter -> its part of the first dimension
        for name, p in group.params.items():
            count = p.numel() // math.prod(unit)
            self.slices[name] = slice(num_units, num_units + count)
            num_units += round_up(count, align)
        num_units = round_up(num_units, align * world.size)
        self.weight = torch.zeros(num_units, *unit, dtype=params[0].dtype, device=world.device)
        self.grad = torch.zeros_like(self.weight)
        for name, p in group.params.items():
            self.view_of(self.weight, name).copy_(p.data)
            p.data, p.grad = self.view_of(self.weight, name), self.view_of(self.grad, name)
        shard_len = num_units // world.size
        self.shard_slice = slice(world.rank * shard_len, (world.rank + 1) * shard_len)
        self.weight_shard = self.weight[self.shard_slice]
        self.grad_shard = self.grad if world.size == 1 else torch.zeros_like(self.weight_shard)
        self.master = self.weight_shard.float()          # the shard itself where that is fp32
        self.state = rule.state(self.master)
        if group.ema:
            self.state["ema"] = torch.zeros_like(self.master)

    def view_of(self, whole: Tensor, name: str) -> Tensor:
        """A parameter's part of a tensor of the whole bank: of weights [N, R, C] its own [K, R, C]; of a
        state with a number for each neuron, [N, R, 1], the [K, R, 1] that belongs to it."""
        shape, unit = self.group.params[name].shape, whole.shape[1:]
        num_leading = len(shape) - len(unit)
        return whole[self.slices[name]].view(shape[:num_leading] + unit)

    def reduce(self) -> list:
        return [reduce_scatter(self.grad_shard, self.grad, async_op=True)] if self.world.size > 1 else []

    def update(self, function: Callable, numbers: dict[str, Tensor]) -> None:
        state = [tensor for name, tensor in self.state.items() if name != "ema"]
        function(self.master, self.grad_shard, *state, **numbers)

    def gather(self) -> list:
        self.weight_shard.copy_(self.master)     # does nothing to fp32 weights, which are their own master
        return [all_gather(self.weight, self.weight_shard, async_op=True)] if self.world.size > 1 else []

    def zero_grad(self) -> None:
        self.grad.zero_()

    def tensors(self) -> list[Tensor]:
        return [self.weight, self.grad, self.master, *self.state.values()]

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for kind, shard in self.state_to_save().items():
            whole = shard
            if self.world.size > 1:
                whole = shard.new_empty(len(self.weight), *shard.shape[1:])
                all_gather(whole, shard)
            for name in self.slices:
                yield f"{name}/{kind}", self.view_of(whole, name)

    def load(self, tensors: dict[str, Tensor]) -> None:
        for kind, shard in self.state_to_save().items():
            whole = shard.new_zeros(len(self.weight), *shard.shape[1:])
            for name in self.slices:
                self.view_of(whole, name).copy_(tensors[f"{name}/{kind}"])
            shard.copy_(whole[self.shard_slice])
            if kind == "weight":
                self.weight.copy_(whole)


class RowBank(Bank):
    """A table of which a step touches few rows. Every rank holds all of it and updates some columns of them.
    The last row is nobody's and stays as it is: look-ups without an answer and free slots point there."""
    def __init__(self, group: Group, world: World, sum_by_id: Callable):
        [(self.name, self.table)] = group.params.items()
        self.group, self.world, self.steps, self.sum_by_id = group, world, 0, sum_by_id
        self.weight = self.master = self.table.data
        self.state = RULES[group.kind].state(self.weight)
        self.width = round_up(self.table.size(1), world.size) // world.size     # of a rank's columns

    def reduce(self) -> list:
        """Starts to collect all ranks' ids [M] and this rank's columns [M, width] of all ranks' gradients."""
        size = self.world.size
        ids = torch.cat([ids.flatten() for ids, _ in self.table.touched])
        grads = torch.cat([grads.flatten(0, -2) for _, grads in self.table.touched])
        self.ids, self.grads, self.grad_shard = ids, grads, grads
        if size == 1:
            return []
        # [size M, width]: part r holds rank r's columns of this rank's gradients
        columns_by_rank = torch.cat(F.pad(grads, (0, size * self.width - grads.size(1))).chunk(size, 1))
        self.ids, self.grads = ids.new_empty(size * len(ids)), torch.empty_like(columns_by_rank)
        return [all_gather(self.ids, ids, async_op=True),
                dist.all_to_all_single(self.grads, columns_by_rank, async_op=True)]

    def update(self, function: Callable, numbers: dict[str, Tensor]) -> None:
        """Sums gradients by row, updates this rank's columns of these rows, and writes them on all ranks."""
        nobody = len(self.weight) - 1
        ids, grads = merge_rows(self.ids, self.grads, nobody, self.sum_by_id)
        sum_of_squares = torch.linalg.vector_norm(grads, dim=1, dtype=torch.float32).square()
        mean_square = self.world.reduced(sum_of_squares) / self.table.size(1)
        second, seen = self.state["second"], self.state["seen"]
        age = self.steps - seen[ids]
        is_row = ids < nobody
        rows, moments = function(self.read(ids), grads, mean_square, second[ids], age, is_row, **numbers)
        second[ids] = moments
        seen[ids] = torch.full_like(age, self.steps)
        self.write(ids, rows)

    def read(self, ids: Tensor) -> Tensor:
        """This rank's columns of rows, [M, width]; the last ranks' are padded with zeros."""
        if self.world.size == 1:
            return self.weight[ids]
        begin = self.world.rank * self.width
        columns = self.weight[:, begin:begin + self.width][ids]
        return F.pad(columns, (0, self.width - columns.size(1)))

    def write(self, ids: Tensor, columns: Tensor) -> None:
        """Puts all ranks' columns of the rows into every rank's table."""
        rows = columns
        if self.world.size > 1:
            parts = columns.new_empty(self.world.size * len(columns), self.width)
            all_gather(parts, columns)
            rows = torch.cat(parts.chunk(self.world.size), 1)[:, :self.table.size(1)]
        # As int64, one index moves four bf16 at once (two fp32 on a CPU).
        self.weight.view(torch.int64)[ids] = rows.contiguous().view(torch.int64)

    def gather(self) -> list:
        """Does nothing: write has already collected the new rows."""
        return []

    def zero_grad(self) -> None:
        self.table.touched.clear()
        self.ids = self.grads = self.grad_shard = None

    def tensors(self) -> list[Tensor]:
        return list(self.state.values())         # rate 0 writes the table's rows back as they were

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for kind, tensor in self.state_to_save().items():
            yield f"{self.name}/{kind}", tensor

    def load(self, tensors: dict[str, Tensor]) -> None:
        for key, tensor in self.gathered():
            tensor.copy_(tensors[key])


class Optimizer:
    """All banks. step() overlaps each bank's communication with its neighbours' updates."""
    def __init__(self, groups: list[Group], world: World, compiled: bool):
        self.banks, self.updates = [], {}
        for group in groups:
            check_group(group)
            if RULES[group.kind].layout == "table":
                bank = RowBank(group, world, fast_sums_by_id if compiled else sums_by_id)
            else:
                bank = DenseBank(group, world)
            self.banks.append(bank)
        for kind, rule in RULES.items():
            self.updates[kind] = rule.update
            if compiled:
                dynamic = rule.layout != "matrices"      # one graph for all lengths; else one for each shape
                self.updates[kind] = torch.compile(rule.update, dynamic=dynamic, fullgraph=True)

    @torch.no_grad()
    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """Updates all banks, zeroes the gradients. -> squared gradient norm of each bank's shard, [banks]."""
        reductions = [bank.reduce() for bank in self.banks]
        gathers, norms = [], []
        for bank, works in zip(self.banks, reductions):
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
        """Applies the bank's rule, at lr_scale times the group's rate. Only muon reads momentum."""
        bank.steps += 1
        kind, available = bank.group.kind, rule_inputs(bank.group, bank.steps, lr_scale, momentum)
        # As 0-D CPU tensors: a float becomes part of the compiled graph. A new value then compiles a new
        # one or, with dynamic=True (torch 2.13), gets one from the cache on disk with another script's value.
        numbers = {name: torch.tensor(available[name]) for name in RULES[kind].reads}
        bank.update(self.updates[kind], numbers)

    @torch.no_grad()
    def average(self, rate: float, share: float = 0.0) -> None:
        """average += rate (weights - average): a rate of 1 copies; weights += share (average - weights)."""
        for bank in self.banks:
            if bank.group.ema:
                bank.state["ema"].lerp_(bank.master, rate)
            if bank.group.ema and share:
                bank.master.lerp_(bank.state["ema"], share)
                for work in bank.gather():
                    work.wait()

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """("PARAMETER/KIND", tensor) for all banks, the same on every rank; all ranks must iterate."""
        for bank in self.banks:
            yield from bank.gathered()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Takes over what gathered() gave after so many steps, on any number of ranks."""
        for bank in self.banks:
            bank.steps = steps
            bank.load(tensors)


# ----------------------------------------------------------------------------------------------------------------------
# 5. Model
# A GPT: layers are a table (layer_table), and how parameters learn is another (param_groups). In order: the
# layers, the input states, rotary, Attention, Block, the copy Pointer, GPT and its loss, param_groups.
# Usually changed: Attention, Block, a column of Layer, a new parameter (it needs a pattern in param_groups).

# Shapes: as in room 3, and J orders of n-grams.  x0: the input states, which every layer mixes in again.
# copy pointer: attention whose result is not a state but a copy of an earlier token as the next one.

class Layer(NamedTuple):
    """What tells one layer from another: a row of layer_table."""
    attention: str               # "long" (the whole window, offset keys), "short" (half of it) or "none"
    value_table: int | None      # number of the value embedding that is mixed into its values


def layer_table(c: Config) -> list[Layer]:
    """The layers, the first one first."""
    numbers = range(c.num_layers)
    attention = dict.fromkeys(numbers, "short") | dict.fromkeys(c.long_layers, "long")
    attention |= dict.fromkeys(c.no_attention_layers, "none")
    value_tables = {layer: table for table, layer in enumerate(c.value_layers)}
    return [Layer(attention[i], value_tables.get(i)) for i in numbers]


class View(NamedTuple):
    """What one pass is asked for besides its tokens. Another window or row compiles nothing."""
    window: int                  # long window, in blocks; masks() makes a tensor of it
    candidates: int = 0          # ids in the training softmax, 0 = all
    training: bool = False       # whether gradients and looked-up rows are wanted, or only the loss
    # What changes from step to step: tensors in training, so that a Recorder can record the pass
    first_row: int | Tensor = 0  # 0-D, number of this pass's first row in the run: it picks candidates
    further_weights: Tensor | None = None      # of the losses of further targets, one for each


def all_targets(targets_BT: Tensor, segments_BT: Tensor, num_further: int) -> Tensor:
    """The targets [B, T] and further ones, those of positions t + 1, t + 2, .. of the same segment (else -1):
    [B, 1 + num_further, T]."""
    found = [targets_BT]
    for distance in range(1, 1 + num_further):
        targets = targets_BT.masked_fill(~same_document(segments_BT, distance), -1)
        found.append(F.pad(targets[:, distance:], (0, distance), value=-1))
    return torch.stack(found, 1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def input_states(token_embeddings_BTE, rows_JBTE, signs_JBT, sign_pool, mix) -> Tensor:
    """x0 [B, T, E]: normed token embeddings, plus n-gram rows, each times a vector of signs out of a pool:
    two n-grams that share a row by accident of the hash have different signs."""
    return norm(token_embeddings_BTE) + mix * (rows_JBTE * sign_pool[signs_JBT]).sum(0)


# Random odd numbers: factors[k] multiplies the token k places back
ROW_FACTORS = (36_313, 27_191, 14_563, 51_977)
SIGN_FACTORS = (25_391, 44_203, 17_489, 30_631)
SIGN_POOL = 8191        # vectors of signs, a prime

def hash_ngrams(tokens_BT: Tensor, order: int, factors: tuple[int, ...]) -> Tensor:
    """The last `order` tokens of each position, each times its factor, joined by exclusive or: [B, T]."""
    hashed = tokens_BT * factors[0]
    for back in range(1, order):
        hashed = hashed ^ (shift(tokens_BT, back) * factors[back])
    return hashed


def ngram_ids(tokens_BT: Tensor, segments_BT: Tensor, orders: tuple[int, ...],
              num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids [J, B, T] of rows of the n-gram table [J num_rows + 1, E] and of signs in the pool: hashes of the
    last n tokens, n in orders. Where a document is shorter so far: the table's last row, which is zero."""
    tokens, rows, signs = tokens_BT.long(), [], []
    zero_row = len(orders) * num_rows
    for j, order in enumerate(orders):
        row = hash_ngrams(tokens, order, ROW_FACTORS) % num_rows + j * num_rows
        is_complete = same_document(segments_BT, order - 1)
        rows.append(torch.where(is_complete, row, zero_row))
        signs.append(hash_ngrams(tokens, order, SIGN_FACTORS) % SIGN_POOL)
    return torch.stack(rows), torch.stack(signs)


Rotary = tuple[Tensor, Tensor]        # factors of x, and of x with its halves swapped

def rotary_tables(T: int, qk_dim: int, like: Tensor) -> Rotary:
    """Both factors, [T, 1, D], on like's device and in its precision. Half of the pairs stands still."""
    quarter = qk_dim // 4
    turning = (1 / 1024) ** torch.linspace(0, 1, quarter, dtype=torch.float32, device=like.device)
    frequencies = F.pad(turning, (0, quarter))
    angle = torch.arange(T, dtype=torch.float32, device=like.device)[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).to(like.dtype)[:, None], torch.cat((sin, -sin), 1).to(like.dtype)[:, None]


def rotate(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (j, j + D/2) by their position's angle (RoPE, Su et al. 2021)."""
    x = x_BTHD.float()
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)     # faster than a concatenation of halves
    return (x * rotary[0] + swapped * rotary[1]).type_as(x_BTHD)


def matrix(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uniform, with a standard deviation of 0.5 / sqrt(last dimension)."""
    bound = 0.5 * 3 ** 0.5 * shape[-1] ** -0.5
    return nn.Parameter(torch.empty(shape, dtype=dtype).uniform_(-bound, bound))


def scalars(*values: float) -> nn.Parameter:
    """A parameter of these numbers: 1-D, or 0-D for a single one."""
    return nn.Parameter(torch.tensor(values if len(values) > 1 else values[0]))


GATE_DIMS = 16        # gates look at so many channels of x

class Attention(nn.Module):
    """QK-norm, rotary, values with a value embedding added, and an output that each head gates."""
    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.config = c
        heads_per_matrix = 2 if c.num_heads % 2 == 0 else 1     # orthogonalised by pairs of heads (record 80)
        num_matrices = 2 * c.num_heads // heads_per_matrix      # those of queries, then those of keys
        # [H, 2 qk_dim, E]: H / 2 pairs of queries, then H / 2 pairs of keys
        self.qk = matrix(num_matrices, heads_per_matrix * c.qk_dim, c.model_dim, dtype=dtype)
        self.value = matrix(c.num_heads * c.head_dim, c.model_dim, dtype=dtype)
        # out is stored transposed, so that value and out have one shape and are orthogonalised in one batch
        self.out = matrix(c.num_heads * c.head_dim, c.model_dim, dtype=dtype)
        self.scales = scalars(0.5, 1.0)     # of values and output; on weights, where they cost nothing
        self.gates = nn.Parameter(torch.zeros(c.num_heads, GATE_DIMS, dtype=dtype))

    def forward(self, x_BTE: Tensor, ve_BTE: Tensor | None, mask: Mask, rotary: Rotary) -> Tensor:
        c, H = self.config, self.config.num_heads
        widths = H * c.qk_dim, H * c.qk_dim, H * c.head_dim
        weight = torch.cat((self.qk.flatten(0, 1), self.value * self.scales[0]))
        q, k, v = (t.unflatten(-1, (H, -1)) for t in F.linear(x_BTE, weight).split(widths, -1))
        q, k = rotate(norm(q), rotary), rotate(norm(k), rotary)
        # Partial key offset: channels that rotary leaves still come from the token before (record 49)
        stands_still = torch.arange(c.qk_dim, device=k.device) % (c.qk_dim // 2) >= c.qk_dim // 4
        may_offset = mask.same_document_BT & mask.offset_keys
        k = torch.where(may_offset[:, :, None, None] & stands_still, shift(k), k)
        if ve_BTE is not None:
            v = v + ve_BTE.view_as(v)
        y = attend(q, k, v, mask, c.attention_scale, c.block_tokens)
        y = y * 2 * torch.sigmoid(F.linear(x_BTE[..., :GATE_DIMS], self.gates))[..., None]      # record 28
        return y.flatten(2) @ (self.out * self.scales[1])


class Block(nn.Module):
    """x <- a x + b x0; x <- x + attention(norm x); x <- x + W2 relu(W1 norm x)^2 (So et al. 2021).
    Deep models do without attention in some layers: the time buys more steps (record 92)."""
    def __init__(self, c: Config, kernels: Kernels, has_attention: bool):
        super().__init__()
        dtype, self.fp8 = kernels.dtype, kernels.fp8
        self.attention = Attention(c, dtype) if has_attention else None
        self.up = matrix(c.mlp_dim, c.model_dim, dtype=dtype)
        self.down = nn.Parameter(torch.zeros(c.mlp_dim, c.model_dim, dtype=dtype))      # stored transposed
        self.mlp_scale = scalars(1.0)       # of W2
        self.mix = scalars(1.1, 0.2)        # a and b

    def forward(self, x, x0, ve, mask, rotary):
        x = self.mix[0] * x + self.mix[1] * x0
        if self.attention is not None:
            x = x + self.attention(norm(x), ve, mask, rotary)
        linear = Fp8Linear.apply if self.fp8 else F.linear
        hidden = F.relu(linear(norm(x), self.up)).square()
        return x + linear(hidden, (self.down * self.mlp_scale).t())


class Pointer(nn.Module):
    """A mixture of softmax and copies (pointer sentinel, Merity et al. 2016): attention gives earlier tokens
    a share of the next one's probability; a sentinel, one more key, gives the rest to the softmax.
    key_j = K x_j + K' x_(j-1): of a token and of what it followed."""
    def __init__(self, c: Config, dtype: torch.dtype):
        super().__init__()
        self.block = c.block_tokens
        # The ends of these names, _qk, _gates and _scales, choose their groups: see param_groups
        self.copy_qk = matrix(3, c.copy_dim, c.model_dim, dtype=dtype)      # queries, keys, keys before
        self.sentinel_gates = nn.Parameter(torch.zeros(1, c.model_dim, dtype=dtype))
        self.copy_scales = scalars(1.0, 16.0)      # of queries; bias of the sentinel, large: no copies yet

    def project(self, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, D], the sentinel's score [B, T]."""
        q, k, k_before = F.linear(x, self.copy_qk.flatten(0, 1)).unflatten(-1, (3, -1)).unbind(2)
        k = k + shift(k_before) * mask.same_document_BT[..., None]
        sentinel = F.linear(x, self.sentinel_gates)[..., 0].float() + self.copy_scales[1]
        return norm(q) * self.copy_scales[0].to(q.dtype), norm(k), sentinel

    def forward(self, x: Tensor, tokens: Tensor, targets: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """log_lm and log_copy of mixed_cross_entropy, [B, T] each: the softmax's share, what is copied."""
        q, k, sentinel = self.project(x, mask)
        log_all, log_target = copy_logsumexps(q, k, tokens, targets, mask, self.block)
        total = torch.logaddexp(log_all, sentinel)
        return sentinel - total, log_target - total

    def mix(self, x: Tensor, tokens: Tensor, log_p: Tensor, mask: Mask) -> Tensor:
        """log_p of the softmax -> log probabilities of the mixture, [B, T, V]. The mask is a dense one."""
        q, k, sentinel = self.project(x, mask)
        scores = dense_scores(q, k, mask.dense)
        total = torch.logaddexp(scores.logsumexp(-1), sentinel)[..., None]
        copies, p = (scores - total).exp(), (sentinel[..., None] - total + log_p).exp()
        copied_ids = tokens.long()[:, None].expand_as(copies)
        return p.scatter_add(2, copied_ids, copies).log()


class GPT(nn.Module):
    """tokens [B, T] -> log probabilities [B, T, V], or their summed loss where targets are given."""
    def __init__(self, c: Config, kernels: Kernels = Kernels()):
        super().__init__()
        self.config, self.kernels, self.layers = c, kernels, layer_table(c)
        dtype, values_dim = kernels.dtype, len(c.value_layers) * c.num_heads * c.head_dim
        # One matrix embeds tokens and is the output head; value embeddings of all layers stand side by side
        self.embed = nn.Parameter(0.005 * torch.randn(c.padded_vocab, c.model_dim, dtype=dtype))
        self.value_embeds = nn.Parameter(0.01 * torch.randn(c.padded_vocab, values_dim, dtype=dtype))
        num_rows = len(c.table_orders) * c.table_rows + 1
        self.ngrams = nn.Parameter(torch.zeros(num_rows, c.model_dim, dtype=dtype), requires_grad=False)
        self.ngrams.touched = []        # in place of .grad: see Group
        self.looked_up: tuple[Tensor, Tensor] | None = None       # by the last pass: ids, rows
        generator = torch.Generator().manual_seed(1)    # whatever the seed: checkpoints don't hold the signs
        signs = torch.randint(0, 2, (SIGN_POOL, c.model_dim), generator=generator, device="cpu")
        self.register_buffer("sign_pool", (2 * signs - 1).to(self.embed), persistent=False)
        self.ngram_mix = scalars(0.05)
        self.pointer = Pointer(c, dtype)
        self.blocks = nn.ModuleList(Block(c, kernels, layer.attention != "none") for layer in self.layers)
        self.rotary: dict[int, Rotary] = {}        # by row length; not saved
        self.input_states = input_states
        self.head_gradients, self.cross_entropy = head_gradients, mixed_cross_entropy
        self.build_mask = block_mask if kernels.flex else dense_mask
        if kernels.compile:
            # By the block, not as a whole: equal layers share one graph, so that a cold start takes seconds
            for module in (*self.blocks, self.pointer):
                module.compile(dynamic=False, fullgraph=True)
            for name in ("input_states", "head_gradients", "cross_entropy", "build_mask"):
                setattr(self, name, torch.compile(getattr(self, name), dynamic=False, fullgraph=True))

    def masks(self, segments: Tensor, window: int) -> dict[str, Mask]:
        """{Layer.attention: mask}. Long layers see window blocks and offset keys, short ones half as many."""
        long_window = torch.full_like(segments[0, 0], window)
        masks = {}
        for layers, limit in (("long", long_window), ("short", (long_window // 2).clamp(min=1))):
            mask = self.build_mask(segments, limit, self.config.block_tokens)
            offset_keys = torch.full_like(limit, layers == "long", dtype=torch.bool)
            masks[layers] = mask._replace(offset_keys=offset_keys, small_tiles=self.kernels.small_tiles)
        return masks

    def look_up(self, tokens: Tensor, segments: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """Rows [J, B, T, E] of the n-gram table, noted for the optimizer if training; their signs' ids."""
        ids, signs = ngram_ids(tokens, segments, self.config.table_orders, self.config.table_rows)
        rows = F.embedding(ids, self.ngrams).requires_grad_()
        # train_step puts ids and rows.grad into ngrams.touched
        self.looked_up = (ids, rows) if training else None
        return rows, signs

    def hidden(self, tokens: Tensor, segments: Tensor, masks: dict[str, Mask], training: bool) -> Tensor:
        """Final normed states [B, T, E]."""
        c, T = self.config, tokens.size(1)
        if T not in self.rotary:
            self.rotary[T] = rotary_tables(T, c.qk_dim, self.embed)
        rows, signs = self.look_up(tokens, segments, training)
        x0 = self.input_states(F.embedding(tokens, self.embed), rows, signs, self.sign_pool, self.ngram_mix)
        value_embeddings = F.embedding(tokens, self.value_embeds).chunk(max(1, len(c.value_layers)), -1)
        x = x0.view_as(x0)        # not x0 itself: the first block would get one tensor twice (see Kernels)
        for layer, block in zip(self.layers, self.blocks):
            ve = None if layer.value_table is None else value_embeddings[layer.value_table]
            x = block(x, x0, ve, masks.get(layer.attention), self.rotary[T])
        return norm(x)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None, view: View) -> Tensor:
        segments = segment_ids(tokens_BT, self.config.eod_id)
        masks = self.masks(segments, view.window)
        x = self.hidden(tokens_BT, segments, masks, view.training)
        if targets_BT is not None:
            return self.loss(x, tokens_BT, targets_BT, masks["long"], view)
        log_p = softcap(F.linear(x, self.embed), self.config.softcap).log_softmax(-1)
        window = torch.full_like(segments[0, 0], view.window)
        return self.pointer.mix(x, tokens_BT, log_p, dense_mask(segments, window, self.config.block_tokens))

    def loss(self, x: Tensor, tokens: Tensor, targets: Tensor, mask: Mask, view: View) -> Tensor:
        """Summed loss of final states [B, T, E], row by row."""
        log_lm, log_copy = self.pointer(x, tokens, targets, mask)
        num_further = 0 if view.further_weights is None else len(view.further_weights)
        targets_BKT = all_targets(targets, mask.segments_BT, num_further)
        # Not earlier: blocks and pointer would be compiled once more. So validation runs these with gradients
        with torch.set_grad_enabled(view.training):
            # unbind: its backward pass stacks the rows' gradients once; x[i] would add up B padded copies
            rows = zip(x.unbind(), targets_BKT.unbind(), log_lm.unbind(), log_copy.unbind())
            return sum(self.row_loss(*row, view, view.first_row + i) for i, row in enumerate(rows))

    def row_loss(self, x_TE: Tensor, targets_KT: Tensor, log_lm: Tensor, log_copy: Tensor, view: View,
                 row: int | Tensor) -> Tensor:
        """Loss of one row: [T, E], [K, T], [T] twice -> scalar, over all ids or candidates of its own."""
        w = self.embed
        if view.candidates:
            # + 1: else the walk would begin at few places if candidates and vocabulary have common factors
            start = row * (view.candidates + 1)
            ids, place_of_id = candidate_set(targets_KT[0], len(w), view.candidates, start)
            w = w.index_select(0, ids)
            # Further targets are targets of later positions of this row, so they are candidates too
            targets_KT = torch.where(targets_KT < 0, -1, place_of_id[targets_KT.clamp(min=0).long()])
        inputs = x_TE, w, targets_KT, log_lm, log_copy, self.config.softcap, view.further_weights
        if view.training and self.kernels.compile:
            return HeadLoss.apply(self.head_gradients, *inputs, self.kernels.fp8)
        return self.cross_entropy(*inputs)


def param_groups(c: Config, model: nn.Module) -> list[Group]:
    """How parameters learn (see Group), in the order of reduction. A muon group's matrices have one shape.
    Raises ValueError for a parameter that no pattern or more than one matches."""
    # table (tests/test_rooms.py lets these lines be wider than others)
    table = (
        #     name            kind    pattern              lr               betas        eps    decay  ema   matmul
        Group("embed",        "adam", r"embed",            c.lr_embed,      (.5, .99),   1e-10, .75,  True,  True),
        Group("value_embeds", "adam", r"value_embeds",     c.lr_value,      (.75, .99),  1e-10, .025, False, False),
        Group("scalars",      "adam", r".*(mix|scales?)",  c.lr_scalar,     (.9, .99),   1e-10, 0.,   False, False),
        Group("gates",        "adam", r".*gates",          c.lr_embed,      (.9, .99),   1e-10, .005, False, False),
        Group("copy_qk",      "muon", r".*copy_qk",        c.lr_matrix,     (None, .95), None,  1.2,  True,  True),
        Group("qk",           "muon", r".*\.qk",           c.lr_matrix,     (None, .95), None,  1.2,  True,  True),
        Group("value_out",    "muon", r".*\.(value|out)",  c.lr_matrix,     (None, .95), None,  1.2,  True,  True),
        Group("mlp_up",       "muon", r".*\.up",           c.lr_matrix,     (None, .95), None,  1.2,  True,  True),
        Group("mlp_down",     "muon", r".*\.down",         2 * c.lr_matrix, (None, .95), None,  1.2,  True,  True),
        Group("ngrams",       "rows", r"ngrams",           c.lr_table,      (None, .95), 1e-15, .025, False, False))
    # end of table
    groups, owners = [], Counter()
    for row in table:
        params = {name: p for name, p in model.named_parameters() if re.fullmatch(row.pattern, name)}
        owners.update(params.keys())
        if any(p.numel() for p in params.values()):
            groups.append(row._replace(params=params))
    for name, _ in model.named_parameters():
        if owners[name] != 1:
            raise ValueError(f"parameter {name} belongs to {owners[name]} groups: add it to a pattern in "
                             "param_groups, and to no more than one")
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# 6. Data
# Shards become one stream of tokens, the stream becomes rows. A document begins at its mark, the id eod_id. A
# row is row_tokens inputs with their targets. A piece is what a row holds of one document; the model calls it
# a segment, and none sees another. Adjoining pieces of a row are one span (start, stop) of the stream.

SHARD_MAGIC = 20_240_520                     # of FineWeb's shards of 16-bit tokens
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024                    # 256 int32: magic, version, number of tokens, unused
SCAN_TOKENS = 2 ** 14                        # searched at once: so few that torch takes one thread for them
HASHED_TOKENS = 64                           # documents that begin with the same ones count as the same
MAX_MEAN_LENGTH = 10 ** 6                    # of documents, in tokens: no text has longer ones
SAMPLE_TOKENS = 10 ** 8                      # of training data, looked at before a run

def open_shard(path: str) -> Tensor:
    """The tokens of a shard in FineWeb's format, a header and then uint16, memory-mapped. Raises Refusal."""
    with reading(path, "delete it and download or make it again, or name others: --train_files, --val_files"):
        refuse_if(not os.path.isfile(path), "no file")               # to open a pipe would wait for a writer
        with open(path, "rb") as file:
            header = file.read(SHARD_HEADER_BYTES)
        size = os.path.getsize(path)
        refuse_if(size < SHARD_HEADER_BYTES,
                  f"{size} bytes, too short to hold a shard header: the pointer text of a file store?")
        magic, version, count = (int.from_bytes(header[at:at + 4], "little", signed=True) for at in (0, 4, 8))
        refuse_if((magic, version) != (SHARD_MAGIC, SHARD_VERSION),
                  f"found magic/version {magic}/{version}, expected {SHARD_MAGIC}/{SHARD_VERSION}; raw "
                  "tokens have none, 20240801 is the 32-bit-token format")
        expected_size = SHARD_HEADER_BYTES + 2 * count
        refuse_if(count <= 0 or size != expected_size,
                  f"header says {count:,} tokens ({expected_size:,} bytes), found {size:,} bytes")
        whole_file = torch.from_file(path, shared=False, size=size // 2, dtype=torch.uint16)
        return whole_file[SHARD_HEADER_BYTES // 2:]


def matching_files(pattern: str, what: str) -> list[str]:
    """What one pattern means: the file or folder of that very name, else a glob. Of a folder: its shards."""
    for text in (pattern, os.path.expanduser(pattern.strip(" ,"))):
        if os.path.isdir(text):
            text = os.path.join(glob.escape(text), f"*{what}*.bin")
        folder, name = os.path.split(text)       # [ and ] in the name of a folder that exists are no pattern
        for attempt in (glob.escape(text), os.path.join(glob.escape(folder), name), text):
            found = glob.glob(attempt)
            if found:
                return found
    return []


def find_shards(patterns: str, what: str) -> list[str]:
    """Files of comma-separated patterns, sorted, each once. what: train or val. Raises Refusal for a pattern
    without files. A comma may belong to a name: if a of "a,b.bin" matches nothing, "a,b.bin" is tried."""
    texts = [patterns] if matching_files(patterns, what) else patterns.split(",")
    names, unmatched = [], ""
    for text in texts:
        unmatched += text
        found = matching_files(unmatched, what)
        names += map(os.path.abspath, found)
        unmatched = "" if found else unmatched + ","
    if unmatched.strip(" ,") or not names:
        looked = ", ".join(os.path.abspath(os.path.expanduser(text.strip())) for text in patterns.split(","))
        raise Refusal(f"no {what} shards match {patterns:.200} (looked for {looked:.300}; in a folder: "
                      f"*{what}*.bin): name others with --{what}_files=PATTERN, or make some: python "
                      "data/cached_fineweb10B.py, or data/text.py --builtin --tokenizer=bytes, or --help")
    # Of several names of one file (links) the first counts
    first_name_of = {os.path.realpath(name): name for name in sorted(names, reverse=True)}
    return sorted(first_name_of.values())


def dataset_card(paths: list[str]) -> dict | None:
    """The dataset.json beside the shards, if there is one. Raises Refusal when it can't be used, or when
    those of two folders differ."""
    cards = []
    for card in sorted({Path(path).parent / "dataset.json" for path in paths}):
        if not os.path.lexists(card):
            continue
        with reading(card, "make this dataset card again with data/text.py"):
            refuse_if(not card.is_file(), "no file")
            found = json.loads(card.read_text(encoding="utf-8-sig"))         # -sig: of Windows
            vocab_size, eod_id, tokenizer = found["vocab_size"], found["eod_id"], found.get("tokenizer")
            whole_numbers = {type(vocab_size), type(eod_id)} == {int}
            refuse_if(not whole_numbers or not 0 <= eod_id < vocab_size <= 2 ** 16,
                      f"0 <= eod_id < vocab_size <= 65536 isn't {eod_id!r:.40}, {vocab_size!r:.40}")
        tokenizer = str(tokenizer) if tokenizer else None
        cards.append(dict(tokenizer=tokenizer, vocab_size=vocab_size, eod_id=eod_id))
        refuse_if(cards[-1] != cards[0], f"{card}: {cards[-1]}, but another folder's has {cards[0]}; a run's "
                  "shards must have been made alike")
    return cards[0] if cards else None


def fingerprint(path: str) -> str:
    """16 hex digits of the sha256 over header, first and last MiB: names a file; data/verify.py checks it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(SHARD_HEADER_BYTES + 2 ** 20))
        file.seek(max(0, os.path.getsize(path) - 2 ** 20))
        digest.update(file.read())
    return digest.hexdigest()[:16]


class TokenStream:
    """The tokens of several shards as one memory-mapped sequence: reads them, finds documents, checks ids.
    card: what dataset_card found. files: what the log says of each shard."""
    def __init__(self, paths: list[str], vocab_size: int, card: dict | None = None):
        self.paths, self.vocab_size, self.card = paths, vocab_size, card
        self.shards = [open_shard(path) for path in paths]       # uint16, with which torch hardly computes
        self.files = [dict(file=os.path.basename(path), bytes=os.path.getsize(path), tokens=len(shard),
                           fingerprint=fingerprint(path)) for path, shard in zip(paths, self.shards)]
        self.starts = [0, *itertools.accumulate(map(len, self.shards))]      # of each shard; the stream's end
        self.num_tokens = self.starts[-1]
        # Where looking at all takes too long: the first shards, of SAMPLE_TOKENS at most (one at least)
        self.sample = range(max(1, bisect.bisect_right(self.starts, SAMPLE_TOKENS) - 1))
        refuse_if(self.num_tokens < 2, f"{paths[0]}: holds 1 token; expected 2, an input and its target")
        self.indexed: dict[tuple[int, int], list[int]] = {}              # what document_starts has found

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop-1, int32, over the borders of shards."""
        first, last = (bisect.bisect_right(self.starts, place) - 1 for place in (start, stop))
        shards = zip(self.shards[first:last + 1], self.starts[first:])
        return torch.cat([shard[max(0, start - begin):max(0, stop - begin)].int() for shard, begin in shards])

    def document_starts(self, k: int, eod_id: int) -> list[int]:
        """Positions in the stream of the marks (eod_id) of shard k. Raises Refusal on ids out of range."""
        if (k, eod_id) in self.indexed:
            return self.indexed[k, eod_id]
        starts, begin = [], 0
        for chunk in self.shards[k].split(SCAN_TOKENS):
            ids = chunk.int()
            if int(ids.max()) >= self.vocab_size:
                at = int((ids >= self.vocab_size).nonzero()[0])
                raise Refusal(f"{self.paths[k]}: token {ids[at]} at position {begin + at} is outside the "
                              f"vocabulary of {self.vocab_size}; were these made with another tokenizer?")
            marks = (ids == eod_id).nonzero().flatten()
            starts += (marks + (self.starts[k] + begin)).tolist()
            begin += len(ids)
        self.indexed[k, eod_id] = starts
        return starts

    def marks(self, eod_id: int, first_shard: int = 0) -> Iterator[int]:
        """Positions of the marks from first_shard on; a shard is searched when its first mark is wanted."""
        for k in range(first_shard, len(self.paths)):
            yield from self.document_starts(k, eod_id)

    def document_hashes(self, k: int, eod_id: int) -> Tensor:
        """int64 [documents]: a hash of the first HASHED_TOKENS after the mark, of each document of shard k
        that has so many: the sum of tokens times odd random numbers (Carter and Wegman 1979)."""
        tokens = self.shards[k]
        starts = torch.tensor(self.document_starts(k, eod_id), dtype=torch.int64) - self.starts[k]
        lengths = starts.diff(append=torch.tensor([len(tokens)]))       # with the mark
        starts = starts[lengths >= 1 + HASHED_TOKENS]
        generator = torch.Generator().manual_seed(0)
        odd_numbers = torch.randint(-2 ** 62, 2 ** 62, (HASHED_TOKENS,), generator=generator) * 2 + 1
        texts = tokens[starts[:, None] + 1 + torch.arange(HASHED_TOKENS)]
        return (texts.long() * odd_numbers).sum(1)

    def need_documents(self, eod_id: int) -> None:
        """Raises Refusal when shards without a card hardly hold a mark: another tokenizer made them."""
        marks = len(self.document_starts(0, eod_id))
        refuse_if(self.card is None and marks * MAX_MEAN_LENGTH < len(self.shards[0]),
                  f"no end-of-document id {eod_id} in {self.paths[0]} (or fewer than one in "
                  f"{MAX_MEAN_LENGTH:,} tokens); was dataset.json left behind?")


class Position(NamedTuple):
    """Where the data stands between two steps: what is left of a cut document, where the next one begins."""
    epoch: int = 0
    start: int = 0                           # of the piece carried over; start == stop: none
    stop: int = 0
    next_document: int = 0
    dropped_tokens: int = 0                  # cut off by clipping, so far


class Planner:
    """Which spans of the stream stand in which row, from the stream alone: the same for any number of ranks.
    A document ends before the next mark, or where it is clipped. The part of a document that a row's end cuts
    off begins the next row; self.position carries it. After the stream's end comes its first mark again."""
    def __init__(self, stream: TokenStream, eod_id: int, position: Position = Position()):
        self.stream, self.eod_id, self.position = stream, eod_id, position
        self.docs = self.documents(position.epoch, position.next_document)

    def documents(self, epoch: int, begin: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, stop) of each document from position begin on, without end."""
        last = self.stream.num_tokens - 1        # has no successor, so it is a target and never an input
        while True:
            first_shard = bisect.bisect_right(self.stream.starts, begin) - 1
            for end in itertools.chain(self.stream.marks(self.eod_id, first_shard), [last]):
                if begin < end:
                    yield epoch, begin, end
                    begin = end
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


def fill_rows(stream: TokenStream, rows: list[list[tuple[int, int]]], shape: tuple[int, int], eod_id: int,
              pinned: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs, int32 of this shape [rows, T], with the tokens of each row's spans, and targets, their true
    successors in the stream. What is left is empty: eod_id, with targets -1."""
    inputs = torch.full(shape, eod_id, dtype=torch.int32, pin_memory=pinned)
    targets = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
    for i, spans in enumerate(rows):
        length = sum(stop - start for start, stop in spans)
        inputs[i, :length] = torch.cat([stream.read(start, stop) for start, stop in spans])
        targets[i, :length] = torch.cat([stream.read(start + 1, stop + 1) for start, stop in spans])
    return inputs, targets


def rows_per_rank(num_rows: int, size: int) -> int:
    """Rows of a step that each of size ranks gets. Where they don't divide, the last ranks get empty ones."""
    return math.ceil(num_rows / size)


def batches(planner: Planner, plan: Iterable[tuple[int, int]], row_tokens: int, rank: int, size: int,
            pinned: bool = False, ahead: int = 32) -> Iterator[Batch]:
    """One Batch for each (rows over all ranks, max_doc_tokens) of the plan, prepared ahead by a thread. Row i
    goes to rank i // rows_per_rank."""
    def prepare(num_rows: int, max_doc_tokens: int) -> Batch:
        rows = planner.rows(num_rows, row_tokens, max_doc_tokens)
        per_rank = rows_per_rank(num_rows, size)
        rows = rows[rank * per_rank:(rank + 1) * per_rank]
        filled = fill_rows(planner.stream, rows, (per_rank, row_tokens), planner.eod_id, pinned)
        return Batch(*filled, planner.position)
    with ThreadPoolExecutor(1) as pool:
        futures = (pool.submit(prepare, *step) for step in plan)       # submitted when islice takes them
        waiting = deque(itertools.islice(futures, ahead + 1))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(futures, 1))


def validation_rows(stream: TokenStream, num_targets: int, row_tokens: int, overlap: int, num_rows: int,
                    eod_id: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (inputs, targets), int32 [num_rows, T], that score targets 1..num_targets of the stream once
    each; batch i goes to rank i % size. A row begins with overlap tokens of context, whose targets are -1."""
    firsts = range(0, num_targets, row_tokens - overlap)           # of each row, the first input that counts
    for k in range(rank * num_rows, len(firsts), size * num_rows):
        chosen = firsts[k:k + num_rows]
        rows = [[(max(0, first - overlap), min(first + firsts.step, num_targets))] for first in chosen]
        inputs, targets = fill_rows(stream, rows, (num_rows, row_tokens), eod_id)
        for i, first in enumerate(chosen):
            targets[i, :min(first, overlap)] = -1
        yield inputs, targets


# ----------------------------------------------------------------------------------------------------------------------
# 7. Schedules
# Says what changes from step to step: first the table of stages (parts of the run), then pure functions of
# the step. Usually changed: a row, a new table (name it in CHOICES too), the shape of cooldown_at.

class Stage(NamedTuple):
    """A part of the run, up to where the next one begins."""
    until: float                      # fraction of num_steps at which the stage ends
    max_doc_tokens: int               # documents are clipped to it; 0 = not clipped
    window: int                       # of long layers, in blocks
    candidates: float                 # share of the vocabulary in the training softmax; 0 = full softmax
    batch_share: float = 1.0          # share of batch_tokens in a step, at most 1
    # Multi-token prediction: weights of the losses of the second, third, .. next token as the stage begins.
    # They move linearly to those of the next stage. Their sum is at most 0.75: see G_SCALE
    further_weights: tuple[float, ...] = ()


RECORD = (
    #     until  clip  window candidates share  further_weights
    Stage(0.200, 1024, 3,     0.2,       0.5,   (0.5, 0.25)),
    Stage(0.667, 2048, 7,     0.2,       0.5,   (0.5,)),
    Stage(0.920, 2048, 11,    0.2,       1.0),
    Stage(1.000, 2048, 13,    0.0,       1.0))
STAGES: dict[str, tuple[Stage, ...]] = {
    "record": RECORD,
    "sprint": tuple(stage._replace(batch_share=1.0) for stage in RECORD),
    "plain": tuple(stage._replace(batch_share=share, further_weights=())
                   for stage, share in zip(RECORD, (0.25, 0.5, 1.0, 1.0), strict=True))}

def stage_at(c: Config, step: int) -> Stage:
    """The stage of a step; past the end: the last one."""
    for stage in STAGES[c.stages]:
        if step < stage.until * c.num_steps:
            return stage
    return STAGES[c.stages][-1]


def rows_at(c: Config, step: int) -> int:
    """Rows of row_tokens in the step's batch, over all ranks."""
    return max(1, round(c.batch_tokens // c.row_tokens * stage_at(c, step).batch_share))


def candidates_at(c: Config, step: int) -> int:
    """Ids in the step's training softmax, a multiple of 128; 0 = full softmax."""
    share = stage_at(c, step).candidates
    return math.ceil(share * c.padded_vocab / 128) * 128


def further_weights_at(c: Config, step: int) -> tuple[float, ...]:
    """Weights of the losses of further targets, as many as the stage begins with. They move linearly
    to those of the next stage, or to 0."""
    stages, stage = STAGES[c.stages], stage_at(c, step)
    i = stages.index(stage)
    begin = stages[i - 1].until if i > 0 else 0.0
    done = (step / c.num_steps - begin) / (stage.until - begin)
    following = stages[min(i + 1, len(stages) - 1)].further_weights + (0.0,) * len(stage.further_weights)
    return tuple(first + (last - first) * done for first, last in zip(stage.further_weights, following))


def cooldown_at(c: Config, step: int) -> float:
    """The shape of the learning rate: 1, then linearly to lr_floor over the last cooldown_frac of the run."""
    if c.cooldown_frac == 0:
        return 1.0
    above_floor = min(1.0, (1 - step / c.num_steps) / c.cooldown_frac)
    return above_floor + (1 - above_floor) * c.lr_floor


def lr_scale_at(c: Config, step: int) -> float:
    """Factor of all learning rates: cooldown times the square root of the step's share of batch_tokens."""
    batch_share = rows_at(c, step) * c.row_tokens / c.batch_tokens
    return batch_share ** 0.5 * cooldown_at(c, step)


def momentum_at(c: Config, step: int) -> float:
    """From 0.85 to 0.95 over the first quarter of the run, and back over its last 4%."""
    done = step / c.num_steps
    return 0.85 + 0.1 * min(1.0, done / 0.25, (1 - done) / 0.04)


def ema_rate_at(c: Config, step: int) -> float:
    """How far the exponential moving average (EMA) of the weights moves towards them after a step: 1 (a copy)
    just before the last ema_frac of the run, 0 before that; in it 3 / (its steps), so that it looks back over
    about a third of them."""
    length = c.ema_frac * c.num_steps
    copy_step = max(0.0, c.num_steps - 1 - length)       # in the record 1874, and 625 steps follow
    if c.ema_blend == 0 or step < copy_step:
        return 0.0
    return 1.0 if step < copy_step + 1 else min(1.0, 3 / length)


# ----------------------------------------------------------------------------------------------------------------------
# 8. Log and checkpoint
# The log is the record; rank 0 writes it, and the console is a copy that may go away. The clock. Checkpoints:
# tensors as torch.save writes them, facts as JSON beside them. Signals that stop a run. Train lines.

FENCE = "=" * 100                        # a line of its own, before and after the header
COMMAND_TIMEOUT_S = 5                    # for nvidia-smi and git, which may hang
WEIGHTS = "weights.pt"                   # a dict of tensors by "PARAMETER/KIND"
CHECKPOINT_FACTS = ("step", "tokens", "position", "total_ms", "step_ms", "run", "files")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_CAUSE_S = 3                         # seconds between signals of one cause, at most
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "4090": 165, "L40S": 362}    # dense bf16

def say(text: str, stream=None, end: str = "\n") -> None:
    """Print text. The console is optional: once it is gone (a closed terminal), only text is lost."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    printable = text.encode(encoding, "backslashreplace").decode(encoding)       # also on an ASCII terminal
    try:
        print(printable, end=end, file=stream, flush=True)
    except (OSError, ValueError):                # ValueError: the stream is closed
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())     # or Python's last flush fails


def need_writable(option: str, folder: str) -> None:
    """Raises Refusal when files can't be made in the folder that an option names. Makes it when missing."""
    trial = Path(folder) / f"trial_{uuid.uuid4().hex[:8]}"
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        raise Refusal(f"--{option}={folder}: can't be written ({error.strerror}); name another one") from None


class RunLog:
    """Writes log_dir/<run_id>.txt on rank 0 and mirrors events to the console. A full disk is said once."""
    def __init__(self, log_dir: str, world: World):
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.run_id, self.path, self.file = f"{stamp}_{uuid.uuid4().hex[:8]}", None, None
        if world.rank == 0:
            need_writable("log_dir", log_dir)
            self.path = Path(log_dir) / f"{self.run_id}.txt"
            self.file = self.path.open("w", encoding="utf-8", newline="\n")

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
        for number, line in enumerate(source.split("\n"), 1):
            refuse_if(line.rstrip("\r") == FENCE,
                      f"line {number} of this script is 100 times '=', which in a log ends it; change it")
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
            self.file.close()
        for stream in (sys.stdout, sys.stderr):  # what others have printed
            say("", stream, end="")


def run_quietly(*command: str) -> str:
    """Standard output of a command; an empty text when it fails, can't run or takes more than 5 s."""
    try:
        child = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True,
                                 errors="replace")
        output, _ = child.communicate(timeout=COMMAND_TIMEOUT_S)
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        child.kill()                             # and not waited for: what hangs in a driver can't be killed
        say(f"warn: {command[0]}: no answer within {COMMAND_TIMEOUT_S} s; going on without it", sys.stderr)
        return ""
    return output.strip() if child.returncode == 0 else ""


def git_state(folder: str) -> dict:
    """A folder's commit and whether tracked files differ from it, as far as git can tell. Writes nothing."""
    lines = run_quietly("git", "--no-optional-locks", "-C", folder, "status", "--porcelain=v2", "--branch",
                        "--untracked-files=no").splitlines()
    if not lines:
        return dict(commit="unknown", dirty="unknown")
    return dict(commit=lines[0].removeprefix("# branch.oid "), dirty=any(line[:1] != "#" for line in lines))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def process_age_s() -> float:
    """Seconds since this process started (Linux; elsewhere the CPU time it took)."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_ticks = int(after_name[19])        # proc(5): field 22, starttime, since the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


class Clock:
    """Honest time: starts and pauses wait for the device; steps are timed by events, read one step late."""
    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.total_ms = 0.0              # up to the last pause
        self.resumed_at = None           # when the clock was started, in seconds; None while it stands
        self.step_ms = []                # of the steps whose times were read
        self.stamps = deque()            # the end of the last of these, and the ends of the steps after it

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def stamp(self) -> float | torch.cuda.Event:
        """This moment: as seconds on a CPU, as an event in a GPU's queue, which no one waits for."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resume(self) -> None:
        self.synchronize()
        self.resumed_at, self.stamps = time.perf_counter(), deque([self.stamp()])

    def pause(self) -> None:
        self.synchronize()
        self.total_ms, self.resumed_at = self.elapsed_ms(), None
        self.collect()

    def step_done(self) -> None:
        self.stamps.append(self.stamp())

    def collect(self, keep: int = 0) -> None:
        """Move the times of finished steps into step_ms, all but the last keep; waits for the device."""
        while len(self.stamps) > 1 + keep:
            begin, end = self.stamps.popleft(), self.stamps[0]
            if self.cuda:
                end.synchronize()
                self.step_ms.append(begin.elapsed_time(end))
            else:
                self.step_ms.append(1e3 * (end - begin))

    def elapsed_ms(self) -> float:
        running_s = 0.0 if self.resumed_at is None else time.perf_counter() - self.resumed_at
        return self.total_ms + 1e3 * running_s


class Store:
    """Writes folder/step_N in the background, named so when whole; keeps two. Failures end nothing."""
    def __init__(self, folder: Path, log: RunLog):
        self.folder, self.log = folder, log
        self.last: Path | None = None                    # the newest checkpoint that is whole
        self.written: list[Path] = []                    # those that are kept, of this run
        self.failed = False                              # whether the latest attempt did
        self.writing = threading.Thread()                # none at first

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict) -> None:
        """Write tensors (on the CPU, no one else's) while training goes on, once the last write has ended."""
        self.close()
        self.writing = threading.Thread(target=self.write, args=(f"step_{step:06d}", tensors, facts))
        self.writing.start()

    def close(self) -> None:
        """Wait until what is being written is whole."""
        if self.writing.is_alive():
            self.writing.join()

    def write(self, name: str, tensors: dict[str, Tensor], facts: dict) -> None:
        unfinished, whole = self.folder / f"writing_{name}", self.folder / name
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            with (unfinished / WEIGHTS).open("wb") as file:
                torch.save(tensors, file)
                os.fsync(file.fileno())
            body = json.dumps(facts | dict(files={WEIGHTS: sha256_of(unfinished / WEIGHTS)})).encode()
            digest = hashlib.sha256(body).hexdigest().encode()           # so that a truncated file is refused
            (unfinished / "checkpoint.json").write_bytes(digest + b"\n" + body)
            self.last, self.failed = unfinished.rename(whole), False
            self.written.append(whole)
            while len(self.written) > 2:
                shutil.rmtree(self.written.pop(0), ignore_errors=True)
        except Exception as error:
            self.failed = True
            self.log.event(f"warn: {whole}: checkpoint not written ({error.__context__ or error!r:.200}); "
                           f"the last good one is {self.last}")
            shutil.rmtree(unfinished, ignore_errors=True)


def find_checkpoint(resume: str, folder: str, misfit=lambda facts: "") -> Path:
    """The folder that --resume names; for latest the newest in folder/*/ that fits: misfit(facts) says why
    it doesn't, or nothing. Raises Refusal that names what there is."""
    if resume != "latest" and (Path(resume) / "checkpoint.json").is_file():
        return Path(resume)
    seen, found = [], []
    for file in Path(folder).glob("*/step_*/checkpoint.json"):
        with contextlib.suppress(OSError):               # another run may delete it just now
            found.append((file.stat().st_mtime, file))
    for _, file in sorted(found, reverse=True):
        try:
            reason = misfit(read_facts(file.parent))
        except (Refusal, KeyError, TypeError) as error:
            reason = str(error)
        if resume == "latest" and not reason:
            return file.parent
        seen.append(f"{file.parent} ({reason or 'fits'})")
    raise Refusal(f"--resume={resume}: no checkpoint there that fits (a folder step_N with checkpoint.json); "
                  f"in {folder}/*/: {', '.join(seen[:3]) or 'none'}")


def read_facts(folder: str | Path) -> dict:
    """checkpoint.json, whose first line is the sha256 of its rest. Raises Refusal."""
    file = Path(folder) / "checkpoint.json"
    with reading(file, "take another checkpoint"):
        digest, _, body = file.read_bytes().partition(b"\n")
        refuse_if(hashlib.sha256(body).hexdigest().encode() != digest, "damaged: its checksum differs")
        facts = json.loads(body)
        missing = [key for key in CHECKPOINT_FACTS if key not in facts]
        refuse_if(missing != [], f"lacks {', '.join(missing)}")
    return facts


def read_checkpoint(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors by "PARAMETER/KIND", read from disk when used). Raises Refusal that names the file when
    a byte is wrong, or when it holds more than tensors: its pickle then runs nothing."""
    facts, file = read_facts(folder), Path(folder) / WEIGHTS
    with reading(file, "take another checkpoint"):
        refuse_if(sha256_of(file) != facts["files"][WEIGHTS], "damaged: its checksum differs")
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        refuse_if(not all(type(t) is Tensor for t in tensors.values()), "it holds more than tensors")
    return facts, tensors


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yields a list, to which each signal that asks the run to stop adds its number. One cause may send two
    (SLURM and torchrun); a SIGTERM or SIGINT SAME_CAUSE_S after the first of them ends the run at once."""
    received, moments = [], []
    handlers_before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    def on_signal(number: int, frame) -> None:
        received.append(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            moments.append(time.monotonic())
            if moments[-1] - moments[0] > SAME_CAUSE_S:
                signal.signal(number, handlers_before[number])
                signal.raise_signal(number)
    # Under nohup SIGHUP stays ignored. Not in torchrun's ranks, of which each leads a session: torchrun does
    # not ignore it and kills its ranks then, so they must save
    keeps_hang_up = handlers_before[signal.SIGHUP] == signal.SIG_IGN and os.getsid(0) != os.getpid()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or not keeps_hang_up:
            signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def need_finite(where: str, values: dict[str, float | Tensor]) -> None:
    """Raises Failure that names the numbers or tensors that are not finite. Sums need no copy of a table."""
    sums = {name: float(torch.as_tensor(value).sum(dtype=torch.float32)) for name, value in values.items()}
    if bad := ", ".join(name for name, total in sums.items() if not math.isfinite(total)):
        raise Failure(f"{where}: not a finite number: {bad}. Lower the learning rates, or look at the data")


class Progress:
    """Train lines from numbers that are copied off the device and read one step late, so that no step waits.
    banks: names of the groups of parameters whose gradients are looked at; header: the log's."""
    def __init__(self, c: Config, log: RunLog, clock: Clock, banks: list[str], header: dict):
        self.config, self.log, self.clock, self.header = c, log, clock, header
        self.names = ["loss", *(f"gradient of {bank}" for bank in banks)]
        self.waiting: tuple | None = None        # what push noted of the step whose numbers are not read yet
        self.tokens, self.stopping = 0, False

    def mfu(self, tokens: float, ms: float) -> float | None:
        """Model FLOP/s utilisation: 6 x matmul parameters x tokens / time / dense bf16 peak, if known."""
        for name, tflops in PEAK_TFLOPS.items():
            if name in self.header["devices"][0]:
                flops = 6 * self.header["parameters"]["matmul"] * tokens
                return flops / (ms / 1e3) / (tflops * 1e12 * self.header["world_size"])
        return None

    def push(self, step: int, tokens: int, lr: float, stats: Tensor) -> None:
        """Note a step (counted from 0; tokens of all ranks) and look at the one before. stats (loss, each
        bank's squared gradient norm, stop) reach the CPU before the step is done."""
        self.report_waiting(newer_steps=1)
        self.waiting = step + 1, tokens, lr, stats
        self.tokens += tokens

    def report_waiting(self, newer_steps: int = 0) -> None:
        """Write the waiting step's line, if due. newer_steps: those queued after it, which nobody waits for.
        Raises Failure for numbers that are not finite."""
        if self.waiting is None:
            return
        (done, tokens, lr, stats), self.waiting = self.waiting, None
        self.clock.collect(newer_steps)                 # waits until the stats have arrived
        c = self.config
        *numbers, stop = stats.tolist()
        need_finite(f"step {done}", dict(zip(self.names, numbers)))
        loss, self.stopping = numbers[0], bool(stop)
        if done % c.log_every_steps == 0 or done == 1:
            times = self.clock.step_ms[-c.log_every_steps:] or [math.nan]
            ms = sum(times) / len(times)
            mfu = self.mfu(tokens, ms)
            mfu_text = "" if mfu is None else f"mfu:{mfu:.3f} "
            self.log.event(
                f"step:{done}/{c.num_steps} train_loss:{loss:.4f} train_time:{self.clock.elapsed_ms():.0f}ms "
                f"step_avg:{ms:.2f}ms tokens_per_s:{tokens / ms * 1e3:.0f} {mfu_text}lr:{lr:.4f} "
                f"tokens:{self.tokens}")


# ----------------------------------------------------------------------------------------------------------------------
# 9. Training
# Build, warm up, train, evaluate; then the guards. The timed region stands between clock.resume() and
# clock.pause().

@dataclasses.dataclass
class Run:
    """All that a run holds. The streams are memory-mapped; position is where the data stands."""
    config: Config
    world: World
    kernels: Kernels
    model: GPT
    optimizer: Optimizer
    train_stream: TokenStream
    val_stream: TokenStream
    micro_rows: int
    forward_backward: Recorder
    notes: list[str]             # what the log says of data and ranks
    position: Position = Position()


def build(c: Config, world: World, overrides: dict) -> Run:
    """Check everything that can be checked cheaply, then make model and optimizer. Raises Refusal."""
    c, train_stream, val_stream = open_data(c, overrides)
    notes = [budget(c, train_stream), padding_in_words(c, world.size)]
    kernels = choose_kernels(world.device, c.compile, c.attention, c.fp8, c.fits_flex, c.graphs)
    refuse_if(kernels.compile and not world.is_cuda and not find_compiler(),
              "--compile=on: no C compiler was found, which it needs; install gcc or use --compile=off")
    check_memory(c, world, kernels)
    if kernels.compile:
        torch._dynamo.config.recompile_limit = 64    # graphs of one function, of which stages ask for many
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # cache Fp8Linear too
    torch.manual_seed(c.seed)
    with torch.device(world.device):
        model = GPT(c, kernels)
    optimizer = Optimizer(param_groups(c, model), world, kernels.compile and world.is_cuda)
    recorder = Recorder(partial(forward_backward, model), world.device, kernels.graphs)
    micro_rows = c.micro_rows or c.batch_tokens            # auto: no limit, until fit_memory lowers it
    return Run(c, world, kernels, model, optimizer, train_stream, val_stream, micro_rows, recorder, notes)


def plan_from(c: Config, first: int) -> list[tuple[int, int]]:
    """What the steps from first on consume: (rows over all ranks, max_doc_tokens) of each."""
    return [(rows_at(c, step), stage_at(c, step).max_doc_tokens) for step in range(first, c.num_steps)]


def last_steps(c: Config) -> list[int]:
    """The last step of each stage: together they have all shapes of the training."""
    return list({stage_at(c, step): step for step in range(c.num_steps)}.values())     # later ones overwrite


def train_view(run: Run, step: int) -> View:
    """What the step asks of the model, for this rank's first rows. Rows are numbered over all steps, whatever
    the number of ranks."""
    c, world = run.config, run.world
    most_rows = c.batch_tokens // c.row_tokens              # of any step
    first_row = step * most_rows + world.rank * rows_per_rank(rows_at(c, step), world.size)
    # filled on the device: a copy from the host would wait for it
    row, *weights = (torch.full((), number, device=world.device)
                     for number in (first_row, *further_weights_at(c, step)))
    return View(stage_at(c, step).window, candidates_at(c, step), training=True,
                first_row=row, further_weights=torch.stack(weights) if weights else row.new_empty(0))


def rows_at_once(run: Run, step: int) -> int:
    """Rows of a micro-batch: this rank's rows in equal parts, at most run.micro_rows."""
    rows = rows_per_rank(rows_at(run.config, step), run.world.size)
    return max(n for n in range(1, min(run.micro_rows, rows) + 1) if rows % n == 0)


def forward_backward(model: GPT, view: View, step_tokens: int, inputs: Tensor, targets: Tensor, row: Tensor,
                     further_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One pass, which adds to the parameters' gradients: what a Recorder may record of a step.
    step_tokens: of all passes and ranks, so that parts add up to the mean; row: View's first_row.
    -> this pass's part of the loss, ids of n-gram rows looked up [J, B, T], their gradients [J, B, T, E]."""
    loss = model(inputs, targets, view._replace(first_row=row, further_weights=further_weights)) / step_tokens
    loss.backward()
    ids, rows = model.looked_up
    return loss.detach(), ids, rows.grad


def train_step(run: Run, step: int, batch: Batch, lr_scale: float, stop: int = 0) -> Tensor:
    """All micro-batches, one update. -> mean loss (over candidates, and with further targets where a stage
    has them, so losses of two stages don't compare; empty rows don't count), squared gradient norms, sum of
    all ranks' stop."""
    c, world = run.config, run.world
    view, rows, step_tokens = train_view(run, step), rows_at_once(run, step), rows_at(c, step) * c.row_tokens
    constants = view._replace(first_row=0, further_weights=None), step_tokens    # all but its tensors
    loss, touched = torch.zeros((), device=world.device), run.model.ngrams.touched
    for first in range(0, len(batch.inputs), rows):
        inputs, targets = batch.inputs[first:first + rows], batch.targets[first:first + rows]
        part_loss, ids, grads = run.forward_backward(constants, inputs, targets, view.first_row + first,
                                                     view.further_weights)
        loss += part_loss
        if first + rows < len(batch.inputs):             # the next pass replays into the same tensors
            ids, grads = ids.clone(), grads.clone()
        touched.append((ids, grads))
    norms = run.optimizer.step(lr_scale, momentum_at(c, step))
    ema_rate, is_last = ema_rate_at(c, step), step == c.num_steps - 1
    if ema_rate:
        run.optimizer.average(ema_rate, c.ema_blend if is_last else 0.0)
    return world.reduced(torch.cat((loss[None], norms, loss.new_full((1,), float(stop)))))


def evaluate(run: Run) -> float:
    """Mean loss over the val_tokens targets, on all ranks, in the last stage's shape, already compiled."""
    c, world = run.config, run.world
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs, targets in validation_rows(run.val_stream, c.val_tokens, c.row_tokens, c.val_overlap,
                                           rows_at_once(run, c.num_steps), c.eod_id, world.rank, world.size):
        inputs, targets = inputs.to(world.device), targets.to(world.device)
        loss_sum += run.model(inputs, targets, View(c.val_window_blocks))
    return float(world.reduced(loss_sum) / c.val_tokens)


def warmup(run: Run, log: RunLog) -> None:
    """Compile and run every shape of the schedule and of validation, at rate 0, then restore every byte."""
    c, world, banks = run.config, run.world, run.optimizer.banks
    saved = [(t, t.clone()) for bank in banks for t in bank.tensors()]
    saved_steps = [bank.steps for bank in banks]
    fit_memory(run, log)
    for step in last_steps(c):
        num_rows = rows_at(c, step)
        tokens = torch.zeros(rows_per_rank(num_rows, world.size), c.row_tokens, dtype=torch.int32)
        for _ in range(2):       # the first step compiles, the second records; a Recorder copies its inputs
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
    with compiler_beside(config, world, argv):       # on a GPU a second process compiles meanwhile
        run = build(config, world, overrides)
        c, clock, banks = run.config, Clock(world.device), run.optimizer.banks
        header = {"run_id": log.run_id, **facts(run, overrides, argv)}
        progress = Progress(c, log, clock, [bank.group.name for bank in banks], header)
        need_equal_hosts(world, header)
        first = load_checkpoint(run, progress) if c.resume else 0
        log.header(SOURCE, header)
        log.event(f"note: {world.size} x {world.device.type}, {header['parameters']['total']:,} parameters, "
                  f"{run.kernels}")
        for note in run.notes:
            log.event("note: " + note)
        if world.is_cuda:
            warmup(run, log)
    if c.self_check == "on":
        self_check(run, log)
    store = Store(Path(c.checkpoint_dir) / log.run_id, log)
    clock.synchronize()
    time_to_first_step_s = round(process_age_s(), 2)
    log.event(f"note: time_to_first_step_s:{time_to_first_step_s}")
    with stop_signals() as signals, profiler_of(c, log) as profiler, contextlib.closing(store):
        result = loop(run, progress, store, signals, profiler, first)
    if result["status"] == "stopped":
        if world.size > 1:
            dist.barrier()               # a launcher kills the others soon after the first has left
        advice = f"go on with --resume={store.last}" if store.last else "no checkpoint was written"
        result["reason"] = f"{signal.Signals(result['signal']).name}; {advice}"
        log.event("note: " + result["reason"])
    data, step, ms = run.position, result["step"], clock.total_ms
    log.event(f"note: data: epoch {data.epoch + 1} of {c.max_epochs}, {data.dropped_tokens:,} tokens clipped")
    need_finite(f"step {step}", {f"the weights of {bank.group.name}": bank.weight for bank in banks})
    if c.self_check == "on":
        need_no_faults(run, "after the last step", unequal_ranks(run))
    result |= dict(
        train_time_ms=round(ms, 1), step_avg_ms=round(ms / max(1, step), 3), tokens_trained=progress.tokens,
        peak_memory_mib=torch.cuda.max_memory_allocated() // 2 ** 20 or None,
        time_to_first_step_s=time_to_first_step_s, mfu=progress.mfu(progress.tokens, ms),
        checkpoint_failed=store.failed)
    log.write("step_times_ms:" + json.dumps([round(t, 2) for t in clock.step_ms]))
    if store.last:
        log.event(f"note: let it write: python records/sample.py {store.last} 'Once upon a time'")
    log.event("result:" + json.dumps(result))
    return result


PACE_STEPS = 20                    # after so many steps the log predicts the time that the training takes

def loop(run: Run, progress: Progress, store: Store, signals: list[int], profiler, first: int) -> dict:
    """Steps first.. of the schedule, on the clock, with validation off it. -> status, step and last
    validation. profiler: of torch, or None."""
    c, world, log, clock = run.config, run.world, progress.log, progress.clock
    planner = Planner(run.train_stream, c.eod_id, run.position)
    loader = batches(planner, plan_from(c, first), c.row_tokens, world.rank, world.size, world.is_cuda)
    result = dict(status="", reason="", num_steps=c.num_steps, resumed=bool(c.resume))
    clock.resume()                                        # the timed region begins
    for step in range(first, c.num_steps + 1):            # step: how many have been done
        is_last = step == c.num_steps
        if progress.stopping:            # known of the step before, so all ranks stop after the same step
            clock.pause()
            stopped_by = signals[0] if signals else signal.SIGTERM
            result |= dict(status="stopped", step=step, val_loss=None, signal=stopped_by)
        elif is_last or (c.val_every_steps and step % c.val_every_steps == 0):
            clock.pause()                                 # validation is not timed
            progress.report_waiting()
            loss = evaluate(run)
            log.event(f"step:{step}/{c.num_steps} val_loss:{loss:.4f} train_time:{clock.total_ms:.0f}ms "
                      f"step_avg:{clock.total_ms / step if step else math.nan:.2f}ms")
            need_finite(f"step {step}", {"the validation loss": loss})
            result |= dict(step=step, val_loss=loss, val_tokens=c.val_tokens)
            has_reached = c.target_loss > 0 and loss <= c.target_loss
            if has_reached:
                result["reason"] = f"validation loss {loss:.4f} <= {c.target_loss}"
            if is_last or has_reached:
                result["status"] = "finished" if is_last else "target_reached"
            else:
                clock.resume()
        ended, every = result["status"], c.checkpoint_every_steps
        is_due = every > 0 and (ended != "" or (step > first and step % every == 0))     # also at the end
        if is_due or ended == "stopped":
            save_checkpoint(run, store, step, progress)
        if ended:
            break
        try:
            batch = next(loader)
        except Refusal as error:
            raise Refusal(f"rank {world.rank}, step {step + 1}: {error}", one_rank=True) from None
        run.position, lr_scale = batch.position, lr_scale_at(c, step)
        stats = train_step(run, step, batch, lr_scale, len(signals)).to("cpu", non_blocking=True)
        clock.step_done()                                 # its event also says that the copy has arrived
        progress.push(step, rows_at(c, step) * c.row_tokens, lr_scale, stats)
        if step == first + PACE_STEPS:
            all_tokens = sum(rows_at(c, i) for i in range(c.num_steps)) * c.row_tokens
            seconds = clock.elapsed_ms() / 1e3 * all_tokens / progress.tokens
            log.event(f"note: at this pace the training takes about {seconds:.0f} s")
        if profiler:
            profiler.step()
    loader.close()
    return result


# What follows only guards and keeps: a reader who wants to change what is trained, or how, needs none of it.

def profiler_of(c: Config, log: RunLog):
    """A context: on rank 0 torch's profiler, of profile_steps steps after the first one. Else None."""
    if not c.profile_steps or not log.path:
        return contextlib.nullcontext()
    trace = str(log.path.with_suffix(".trace.json.gz"))
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=c.profile_steps, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(trace))


def open_data(c: Config, overrides: dict) -> tuple[Config, TokenStream, TokenStream]:
    """-> config with what the shards' dataset.json says, training and validation stream. Raises Refusal."""
    paths = find_shards(c.train_files, "train"), find_shards(c.val_files, "val")
    cards = [dataset_card(names) for names in paths]
    refuse_if(None not in cards and cards[0] != cards[1],
              f"train and validation shards were made differently: {cards}")
    for card in filter(None, cards):
        for key in ("vocab_size", "eod_id"):
            asked = overrides.get(key, card[key])
            refuse_if(asked != card[key],
                      f"--{key}={asked}: the dataset.json beside the shards says {card[key]}")
        c = dataclasses.replace(c, vocab_size=card["vocab_size"], eod_id=card["eod_id"])
    check_config(c)
    train, val = (TokenStream(names, c.vocab_size, card) for names, card in zip(paths, cards))
    in_training = {file["fingerprint"] for file in train.files}
    overlap = [path for path, file in zip(val.paths, val.files) if file["fingerprint"] in in_training]
    refuse_if(overlap != [], f"train_files and val_files overlap ({overlap}): such a loss would mean nothing")
    available = val.num_tokens - 1
    refuse_if(c.val_tokens > available,
              f"--val_tokens={c.val_tokens}: validation shards hold {available + 1:,} tokens, at most "
              f"{available:,} targets; expected --val_tokens=0 (all) or fewer")
    list(val.marks(c.eod_id))                            # raises on ids out of range
    train.need_documents(c.eod_id)
    val.need_documents(c.eod_id)
    return dataclasses.replace(c, val_tokens=c.val_tokens or available), train, val


def budget(c: Config, stream: TokenStream) -> str:
    """Tokens needed against tokens there, in words. Raises Refusal when max_epochs doesn't suffice. What
    clipping drops is estimated from a sample of the shards."""
    available = stream.num_tokens - 1
    borders = [mark for k in stream.sample for mark in stream.document_starts(k, c.eod_id)]
    borders.append(stream.starts[len(stream.sample)])
    lengths = [stop - start for start, stop in itertools.pairwise(borders)] or [available]
    needed = 0.0
    for (rows, clip), steps in Counter(plan_from(c, 0)).items():
        kept_fraction = sum(min(length, clip or length) for length in lengths) / sum(lengths)
        needed += steps * rows * c.row_tokens / kept_fraction
    epochs = needed / available
    text = (f"data: the schedule needs about {needed:,.0f} tokens (clipped tails included), {available:,} "
            f"are there: {epochs:.2f} epochs")
    more = math.ceil((needed / c.max_epochs - available) / 100e6)
    refuse_if(epochs > c.max_epochs,
              f"{text}, allowed {c.max_epochs}. Add about {more} shard(s) of 100M tokens (python "
              f"data/cached_fineweb10B.py) or allow repetition with --max_epochs={math.ceil(epochs)}")
    return text


def padding_in_words(c: Config, size: int) -> str:
    """Share of empty rows where size ranks can't share each step's rows evenly, and who gets nothing else."""
    num_rows = [rows for rows, _ in plan_from(c, 0)]
    share = 1 - sum(num_rows) / sum(size * rows_per_rank(rows, size) for rows in num_rows)
    text = f"{share:.1%} of the rows are padding"
    for rows, steps in Counter(num_rows).items():
        if idle := size - math.ceil(rows / rows_per_rank(rows, size)):
            text += f"; {size} ranks for {rows} rows: {idle} idle in {steps / c.num_steps:.0%} of the steps"
    return text


def check_memory(c: Config, world: World, kernels: Kernels) -> None:
    """Raises Refusal when model and optimizer can't fit, before a byte of it is allocated. Counts the least:
    weights and, of all but the table, gradients and (shared by the ranks) 8 bytes of averages."""
    count, table = num_parameters(c), len(c.table_orders) * c.table_rows * c.model_dim
    item = kernels.dtype.itemsize
    needed = table * item + (count - table) * (2 * item + 8 / world.size)
    if world.is_cuda:
        there = torch.cuda.mem_get_info()[0]
    else:
        import resource
        of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        of_process, _ = resource.getrlimit(resource.RLIMIT_AS)           # ulimit -v
        there = of_machine if of_process == resource.RLIM_INFINITY else min(of_machine, of_process)
    if needed > there:
        raise Refusal(f"{count:,} parameters need {needed / 1e9:.1f} GB on each rank, {there / 1e9:.1f} are "
                      f"there{'' if world.is_cuda else ' (torch finds no GPU)'}; use a smaller --table_rows, "
                      "--model_dim or --num_layers", one_rank=True)


def fit_memory(run: Run, log: RunLog) -> None:
    """Forward and backward of the largest micro-batch. Where a rank has no memory for it: fewer rows at once
    if micro_rows is auto, else a Failure that names what would do."""
    c, world = run.config, run.world
    while True:
        # Of equal micro-batches the last stage's: a softmax over all ids takes the most
        step = max(last_steps(c), key=lambda step: (rows_at_once(run, step), step))
        rows, out_of_memory = rows_at_once(run, step), torch.zeros((), device=world.device)
        tokens = torch.zeros(rows, c.row_tokens, dtype=torch.int32, device=world.device)
        try:
            run.model(tokens, tokens.clone(), train_view(run, step)).backward()      # a clone: see Kernels
        except torch.OutOfMemoryError:
            out_of_memory += 1
        for bank in run.optimizer.banks:
            bank.zero_grad()
        if not world.reduced(out_of_memory):
            return
        text = f"out of memory with {rows} rows of {c.row_tokens} tokens at once"
        if rows == 1:
            raise Failure(f"{text}: use a smaller --row_tokens")
        if c.micro_rows:
            raise Failure(f"{text}: use --micro_rows={rows - 1} or auto")
        log.event(f"note: {text}: trying {rows - 1}")
        run.micro_rows = rows - 1


# By how much of itself the loss may move when unseen tokens change. 0 but for the order of a GPU's sums
SELF_CHECK_TOLERANCE = {"cpu": 1e-8, "cuda": 1e-6}
SHORT_DOCUMENT = 13                # tokens; odd, so that documents begin at every offset modulo 2, 4, 8, ..

def probe_documents(num_tokens: int, block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Documents that fill so many tokens: half of it short ones, a quarter 2.5 blocks long, one for the rest.
    -> of each position: is it a start, is it in every other document, is it in the second half of its own."""
    medium = 5 * block // 2
    lengths = [SHORT_DOCUMENT] * (num_tokens // 2 // SHORT_DOCUMENT) + [medium] * (num_tokens // 4 // medium)
    lengths = torch.tensor([*lengths, num_tokens - sum(lengths)], device=device)
    ends, position = lengths.cumsum(0), torch.arange(num_tokens, device=device)
    document = torch.searchsorted(ends, position, right=True)
    place = position - (ends - lengths)[document]        # in its document
    return place == 0, document % 2 == 1, place >= (lengths // 2)[document]


@contextlib.contextmanager
def random_weights(run: Run, tokens: Tensor, generator: torch.Generator) -> Iterator[None]:
    """While it is open, all parameters are random, of order one; of the table, the rows for these tokens."""
    c, table = run.config, run.model.ngrams
    ids, _ = ngram_ids(tokens, segment_ids(tokens, c.eod_id), c.table_orders, c.table_rows)
    rows = ids[ids < len(table) - 1].unique()            # the last one is nobody's
    places = [(p.data, rows if p is table else ...) for p in run.model.parameters()]
    saved = [p[place].clone() for p, place in places]
    for (p, place), before in zip(places, saved):
        values = torch.empty_like(before).normal_(generator=generator)
        if p.ndim < 2:
            values = 0.2 * values + 0.5
        elif place is not rows:
            values *= max(1, p.size(-1)) ** -0.5
        p[place] = values
    yield
    for (p, place), before in zip(places, saved):
        p[place] = before


def probe(run: Run) -> list[str]:
    """What is wrong with the validation pass. Three cases: changes in other documents and in later tokens may
    not move the loss, changes in the own context must.
    With random weights nothing is zero or saturated: any way from a changed token to a prediction moves it.
    Ids are drawn as text has them (Zipf's law), so that both copies and the softmax decide losses."""
    c, device = run.config, run.world.device
    if c.vocab_size < 3:
        return []                                        # no token can be changed into another
    num_rows = rows_at_once(run, c.num_steps)
    if not run.kernels.compile:          # any shape: half are short documents, which begin all over a block
        num_rows = math.ceil(2 * SHORT_DOCUMENT * c.block_tokens / c.row_tokens)
    shape, generator = (num_rows, c.row_tokens), torch.Generator(device).manual_seed(1)
    documents = probe_documents(num_rows * c.row_tokens, c.block_tokens, device)
    is_start, is_odd, is_later = (t.view(shape) for t in documents)
    ids = torch.randperm(c.vocab_size, generator=generator, device=device).int()
    ids = ids[ids != c.eod_id]
    index = (len(ids) ** torch.rand(shape, generator=generator, device=device)).long() - 1
    other_index = index + torch.randint(1, len(ids), shape, generator=generator, device=device)
    base, other = (ids[i % len(ids)].masked_fill(is_start, c.eod_id) for i in (index, other_index))
    true_next, faults = base.flatten().roll(-1).view(shape), []
    with random_weights(run, base, generator):
        for what, is_changed, is_scored, must_move in (
                ("another document", is_odd, ~is_odd, False), ("later tokens", is_later, ~is_later, False),
                ("their own context", ~is_later, is_later, True)):
            targets, changed = torch.where(is_scored, true_next, -1), torch.where(is_changed, other, base)
            before, after = (float(run.model(tokens, targets, View(c.val_window_blocks)))
                             for tokens in (base, changed))
            moved = abs(after / before - 1)
            if must_move == (moved <= SELF_CHECK_TOLERANCE[device.type]):       # a NaN counts as moved
                faults.append(f"{what} changed, and the loss moved by {moved:.2g} of itself")
    return faults


def unequal_ranks(run: Run) -> list[str]:
    """Banks whose weights differ between the ranks. Bits are summed as integers, which copies no table."""
    sums = torch.stack([bank.weight.view(torch.int64).sum() for bank in run.optimizer.banks])
    highest, minus_lowest = run.world.reduced(torch.stack((sums, -sums)), dist.ReduceOp.MAX).tolist()
    return [f"the ranks hold different weights in {bank.group.name}"
            for bank, high, minus_low in zip(run.optimizer.banks, highest, minus_lowest)
            if high != -minus_low]


MAX_KNOWN_SHARE = 0.05             # of validation documents that begin (64 tokens) like a training document

def need_no_faults(run: Run, when: str, faults: list[str]) -> None:
    if faults:
        raise Failure(f"rank {run.world.rank}: {when}: " + "; ".join(faults), one_rank=True)


def self_check(run: Run, log: RunLog) -> None:
    """Would the numbers of this run mean anything? Raises Failure. Leaves all state as it was."""
    began, c, train, val = time.perf_counter(), run.config, run.train_stream, run.val_stream
    faults = probe(run) + unequal_ranks(run)
    held_out = torch.cat([val.document_hashes(k, c.eod_id) for k in range(len(val.paths))])
    sample = torch.cat([train.document_hashes(k, c.eod_id) for k in train.sample])
    known = int(torch.isin(held_out, sample).sum())
    if known > MAX_KNOWN_SHARE * len(held_out):
        faults.append(f"{known} of {len(held_out)} validation documents begin like one of {train.paths[0]} "
                      f"({len(train.sample)} shards looked at), expected at most {MAX_KNOWN_SHARE:.0%}")
    need_no_faults(run, "self-check", faults)
    log.event(f"note: self-check passed in {time.perf_counter() - began:.2f} s: causal, documents isolated, "
              f"ranks equal, {known} of {len(held_out)} validation documents begin like training documents "
              f"({len(train.sample)} of {len(train.paths)} shards looked at)")


def facts(run: Run, overrides: dict, argv: list[str]) -> dict:
    """The log's header: all that is needed to judge and repeat the run (what fits memory is found later)."""
    c, world, groups = run.config, run.world, [bank.group for bank in run.optimizer.banks]
    train, val = run.train_stream, run.val_stream
    device = torch.cuda.get_device_name(world.device) if world.is_cuda else platform.machine()
    nccl = torch.cuda.nccl.version() if world.is_cuda and dist.is_nccl_available() else None
    sizes = {group.name: sum(p.numel() for p in group.params.values()) for group in groups}
    matmul = sum(sizes[group.name] for group in groups if group.matmul)
    return dict(
        name=c.preset, started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        seed=c.seed, config=dataclasses.asdict(c), overrides=overrides, argv=argv, resumed_from=None,
        stages=[stage_at(c, step)._asdict() for step in last_steps(c)], devices=[device] * world.size,
        world_size=world.size, source_sha256=hashlib.sha256(SOURCE.encode()).hexdigest(),
        kernels={key: str(value) for key, value in run.kernels._asdict().items()},
        versions=dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                      hip=torch.version.hip, triton=getattr(triton, "__version__", None), nccl=nccl,
                      os=platform.platform(), threads=torch.get_num_threads()),
        data=dict(train=dict(tokens=train.num_tokens, files=train.files),
                  val=dict(tokens=val.num_tokens, files=val.files),
                  tokenizer=train.card["tokenizer"] if train.card else None),
        git=git_state(str(Path(__file__).parent)) if world.rank == 0 else {},
        parameters=sizes | dict(total=sum(sizes.values()), matmul=matmul))


def identity(header: dict, tensors: Iterable[tuple[str, Tensor]] = (), but_for=RESUME_MAY_CHANGE) -> dict:
    """What a checkpoint and the run that resumes from it must share, as JSON. but_for: what need not."""
    same = {f"setting {key}": value for key, value in header["config"].items() if key not in but_for}
    same |= {f"stage {number}": stage for number, stage in enumerate(header.get("stages", []), 1)}
    for split in ("train", "val"):
        same |= {f"{split} file {number}": f"{file['file']} ({file['fingerprint']}, {file['tokens']} tokens)"
                 for number, file in enumerate(header["data"][split]["files"], 1)}
    same |= {f"shape of {key}": list(t.shape) for key, t in tensors}
    return json.loads(json.dumps(same))


def difference(then: dict, now: dict) -> tuple | None:
    """The first key under which two dicts hold different values, with both values; None if there is none."""
    for key in then | now:
        old, new = then.get(key, "nothing"), now.get(key, "nothing")
        if old != new:
            return key, old, new


def need_equal_hosts(world: World, header: dict) -> None:
    """Raises Refusal, on all ranks, where one (of another host) has other settings, data or source."""
    mine = identity(header, but_for=PATH_SETTINGS) | {"the source": header["source_sha256"]}
    found = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(found, mine)
    for rank, its in enumerate(found):
        if different := difference(found[0], its):
            key, first, other = different
            raise Refusal(f"{key} differs: {first} on rank 0, {other} on rank {rank}; give all hosts one")


def save_checkpoint(run: Run, store: Store, step: int, progress: Progress) -> None:
    """Start a checkpoint of this moment. Raises Failure, on all ranks, when a number of it is not finite."""
    progress.report_waiting()
    tensors = {}
    for key, t in run.optimizer.gathered():
        need_finite(f"step {step}", {key: t})
        if run.world.rank == 0:
            tensors[key] = t.to("cpu", copy=True)
    if run.world.rank == 0:
        store.save(step, tensors, dict(
            format=1, step=step, tokens=progress.tokens, position=run.position, run=progress.header,
            total_ms=progress.clock.elapsed_ms(), step_ms=list(progress.clock.step_ms)))


def load_checkpoint(run: Run, progress: Progress) -> int:
    """Take over the checkpoint that --resume names. -> its step. Raises Refusal before anything changes."""
    header = progress.header
    def misfit(facts: dict) -> str:
        different = difference(identity(facts["run"]), identity(header))
        return f"{different[0]} differs" if different else ""
    path = find_checkpoint(run.config.resume, run.config.checkpoint_dir, misfit)
    saved, tensors = read_checkpoint(path)
    now = identity(header, run.optimizer.gathered())
    if different := difference(identity(saved["run"], tensors.items()), now):
        key, old, new = different
        raise Refusal(f"--resume={path}: {key} differs: {old} in the checkpoint, {new} in this run")
    run.optimizer.load(tensors, saved["step"])
    run.position, header["resumed_from"] = Position(*saved["position"]), str(path)
    progress.clock.total_ms, progress.clock.step_ms = saved["total_ms"], saved["step_ms"]
    progress.tokens, step = saved["tokens"], saved["step"]
    run.notes.append(f"resumed from {path} at step {step}")
    if saved["run"]["source_sha256"] != header["source_sha256"]:
        run.notes.append("the checkpoint was written by another source")
    return step


COMPILER_BYTES_PER_TOKEN = 3 * 2 ** 18    # measured: training with so many at once, and the helper beside it
COMPILE_BESIDE = "compile-beside"        # the word behind the file's name that makes a process such a helper

@contextlib.contextmanager
def compiler_beside(c: Config, world: World, argv: list[str]) -> Iterator[None]:
    """While it is open, a second process of each host compiles what follows the blocks (they share a cache on
    disk), if the GPU has memory for both. Not if deterministic (other graphs) or micro_rows is auto (0)."""
    is_wanted = c.compile != "off" and world.local == 0 and c.deterministic == "off" and c.micro_rows > 0
    relative_size = max(1.0, c.num_layers * c.model_dim / (11 * 768))       # 1 up to the record's size
    needed = COMPILER_BYTES_PER_TOKEN * c.micro_rows * c.row_tokens * relative_size
    needed += 2 * num_parameters(c)                      # the weights, in bf16
    if not (world.is_cuda and is_wanted) or torch.cuda.mem_get_info()[0] < needed:
        yield
        return
    options = [f"--preset={c.preset}", *(word for word in argv if not word.startswith("--preset="))]
    command = [sys.executable, os.path.abspath(__file__), COMPILE_BESIDE, *options]
    with subprocess.Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL) as helper:
        try:
            yield
        finally:
            helper.kill()


def compile_beside(argv: list[str]) -> int:
    """In a process of its own while warmup compiles the blocks: compile pointer, head and optimizer."""
    config, overrides = parse_config(argv)
    small_table = min(config.table_rows, 1021)           # a graph doesn't depend on the number of rows
    run = build(dataclasses.replace(config, table_rows=small_table), init_world(), overrides)
    c, model, device = run.config, run.model, run.world.device
    for step in last_steps(c)[::-1]:                     # the last one first, as in warmup
        shape = rows_at_once(run, step), c.row_tokens
        tokens, targets = torch.zeros(2, *shape, dtype=torch.int32, device=device)
        x = torch.randn(*shape, c.model_dim, dtype=run.kernels.dtype, device=device, requires_grad=True)
        mask = model.masks(segment_ids(tokens, c.eod_id), 1)["long"]
        model.loss(x, tokens, targets, mask, train_view(run, step)).backward()
    with torch.no_grad():
        # Not in warmup's order. Of Adam's banks the largest first: the kernel is made for its size
        for bank in sorted(run.optimizer.banks, key=lambda b: (b.group.kind == "adam", -b.weight.numel())):
            bank.world = World()                                   # without collectives
            bank.ids, bank.grads = tokens[0].long(), x[0]       # as RowBank.reduce would set them
            run.optimizer.update(bank, 0.0, 0.9)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# 10. Front door
# Parses the command line, enters the world, trains and leaves, with one message if it didn't end as planned.
# Exit codes: 0 done, 1 failed, 2 refused, 128 + signal if one stopped it. An attempt changes nothing here.

RECORD_GIB = 60                    # of GPU memory that the record needs: 43 on one H200, and gaps besides

def default_preset() -> str:
    """The preset of a run that names none."""
    if not torch.cuda.is_available():
        return "demo"
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return "record" if min(sizes) >= RECORD_GIB * 2 ** 30 else "small"


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        say(help_text())
        return 0
    if argv[:1] == [COMPILE_BESIDE]:
        return compile_beside(argv[1:])
    log = world = None
    try:
        preset = default_preset()
        config, overrides = parse_config(argv, preset)
        # A shell leaves the ~ of --log_dir=~/x; find_shards sees to its own
        keys = "log_dir", "checkpoint_dir", "resume"
        config = dataclasses.replace(config, **{k: os.path.expanduser(getattr(config, k)) for k in keys})
        if torch.are_deterministic_algorithms_enabled() != (config.deterministic == "on"):
            torch.use_deterministic_algorithms(config.deterministic == "on")     # it imports the compiler
        world = init_world(config.deterministic == "on")
        log = RunLog(config.log_dir, world)      # before the ranks meet: a refusal of rank 0 then ends all
        if config.checkpoint_every_steps and world.rank == 0:
            need_writable("checkpoint_dir", config.checkpoint_dir)
        if preset == config.preset == "small" and world.rank == 0:
            say(f"note: preset small, as a GPU here has less than the {RECORD_GIB} GiB of memory that the "
                "record needs (--preset=record tries it)")
        join_group(world)
        result = train(config, world, log, overrides, argv)
        if result["status"] == "stopped":
            return 128 + result["signal"]
        return 1 if result["checkpoint_failed"] else 0
    except (RunError, torch.OutOfMemoryError) as error:
        return report(error, world, log)
    finally:
        if log is not None:
            log.close()
        close_world()


def report(error: Exception, world: World | None, log: RunLog | None) -> int:
    """Say on console (once a host, where all ranks say it) and in the log why a run ended. -> exit code."""
    if isinstance(error, torch.OutOfMemoryError):
        rank = "" if world is None else f"rank {world.rank}: "
        error = Failure(f"{rank}out of memory; use a smaller --micro_rows, or auto ({error})", one_rank=True)
    if world is None or world.local == 0 or error.one_rank:
        say(f"train_gpt: {error}", sys.stderr)
    status, exit_code = ("refused", 2) if isinstance(error, Refusal) else ("failed", 1)
    if log is not None:
        log.write("result:" + json.dumps(dict(status=status, reason=str(error))))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
