"""A checkpoint as a model that can be used: what sample.py, evaluate.py and export.py share.

A checkpoint is a folder step_N of weights.pt, a dict of tensors as torch.save writes it, and checkpoint.json.
Tensors are whole, keyed "PARAMETER/KIND", as in "blocks.0.attention.qk/weight". Kinds: weight (exact in fp32; ngrams in
the precision of the run); momentum and second (a variance for each neuron) of Muon's; exp_avg and exp_avg_sq of Adam's;
ema, the average over the end of the run, of embed, head and Muon's; second and seen (its last update) of ngrams' rows.
checkpoint.json is the sha256 of its rest, a newline, and JSON: step, tokens, position in the data, times, steps of each
bank, the header of the run's log under "run", and under "files" the sha256 of weights.pt. A file that holds more than
tensors is refused and runs no code (torch.load's weights_only).

Called without targets, the model gives no logits but log probabilities [B, T, padded vocabulary] of the mixture of
softmax and copies (train_gpt.Pointer); they sum to 1 over all ids, the padding included.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Callable, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]


def import_trainer():
    """$TRAIN_GPT, else train_gpt.py of this repository, as the module train_gpt; imported once."""
    if "train_gpt" not in sys.modules:
        path = Path(os.environ.get("TRAIN_GPT") or ROOT / "train_gpt.py")
        spec = importlib.util.spec_from_file_location("train_gpt", path if path.exists() else ROOT / path)
        sys.modules["train_gpt"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_gpt"]


class Tokenizer(NamedTuple):
    """name, text -> ids, ids -> text, and bytes of each id (the end-of-document id has none)."""
    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    lengths: Callable[[], list[int]]


class Loaded(NamedTuple):
    """A model on its device, and what is known about it. facts: checkpoint.json."""
    config: object
    model: torch.nn.Module
    facts: dict

    @property
    def view(self):
        """What the run's own validation asked of the model at this step."""
        return import_trainer().View(self.config.val_window_blocks)


def load_model(folder, device: str | None = None, compile: str = "auto") -> Loaded:
    """Read a checkpoint into a model. Raises the trainer's Refusal for one that is damaged or does not fit."""
    tg = import_trainer()
    facts, whole = tg.read_checkpoint(folder)
    settings = facts["run"]["config"]
    known = tg.Config.__dataclass_fields__
    strange = sorted(settings.keys() ^ known.keys())
    if strange:
        raise tg.Refusal(f"{folder}: made by another version of the trainer (it differs in {', '.join(strange)}); name "
                         "its source with TRAIN_GPT=FILE (its log begins with it: records/replay.py LOG --write FILE)")
    config = tg.Config(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device(where):
        model = tg.GPT(config, tg.choose_kernels(where, compile, "auto", "off", config.fits_flex))
    weights = {f"{name}/weight": p for name, p in model.named_parameters() if p.numel()}     # without empty ones
    wanted = {key: tuple(p.shape) for key, p in weights.items()}
    found = {key: tuple(t.shape) for key, t in whole.items() if key.endswith("/weight")}
    for key in [*wanted, *found]:
        if wanted.get(key) != found.get(key):
            raise tg.Refusal(f"{folder}: {key} is {found.get(key, 'missing')}, this model wants {wanted.get(key)}")
    with torch.no_grad():
        for key, p in weights.items():
            p.copy_(whole[key])
    return Loaded(config, model.requires_grad_(False), facts)


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The tokenizer of the training data: bytes, or one of tiktoken's. Raises Refusal when there is none to be had."""
    tg, c = import_trainer(), loaded.config
    name = loaded.facts["run"]["data"].get("tokenizer") or {50_257: "gpt2", 257: "bytes"}.get(c.vocab_size)
    if name == "bytes":
        return Tokenizer(name, lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256).decode(
            "utf-8", "replace"), lambda: [1] * 256 + [0] * (c.vocab_size - 256))
    try:
        import tiktoken
        encoding = tiktoken.get_encoding(name or "none")
    except Exception as error:       # no package, no such encoding, no network for its files: all the same to the user
        why = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        raise tg.Refusal(f"tokenizer {name} is not to be had ({why}); install tiktoken and, without a network, set "
                         "TIKTOKEN_CACHE_DIR") from None
    special = {c.eod_id, *range(encoding.n_vocab, c.vocab_size)}

    def lengths():
        return [0 if i in special else len(encoding.decode_single_token_bytes(i)) for i in range(c.vocab_size)]
    return Tokenizer(name, encoding.encode_ordinary, lambda ids: encoding.decode([i for i in ids if i not in special]),
                     lengths)


def run_tool(main: Callable[[], int]) -> None:
    """Call main and exit with its status; a Refusal is one line and status 2."""
    try:
        sys.exit(main())
    except import_trainer().Refusal as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
