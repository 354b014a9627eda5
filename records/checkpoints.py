"""A checkpoint as a model that can be used: what sample.py, evaluate.py and export.py share.

A checkpoint is a folder step_N of weights.pt, a dict of tensors as torch.save writes it, and checkpoint.json.
Tensors are whole, keyed "PARAMETER/KIND", as in "blocks.0.attention.qk/weight". Kinds: weight (exact in fp32;
ngrams in the precision of the run); momentum and second (a variance for each neuron) of Muon's; exp_avg and
exp_avg_sq of Adam's; ema, the average over the end of the run, of embed and Muon's; second and seen (its last
update) of ngrams' rows. checkpoint.json is the sha256 of its rest, a newline, and JSON: step, tokens, position in
the data, times, steps of each bank, the header of the run's log under "run", and under "files" the sha256 of
weights.pt. Tools open checkpoints through train_gpt.read_checkpoint and in no other way: a file that holds more
than tensors is refused there and runs no code (torch.load's weights_only).

Called without targets, the model gives no logits but log probabilities [B, T, padded vocabulary] of the
mixture of softmax and copies (train_gpt.Pointer); they sum to 1 over all ids, the padding included.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Callable, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
NAMES_BY_VOCABULARY = {50_257: "gpt2", 257: "bytes"}     # of the tokenizer, where no dataset.json named it


def import_trainer():
    """$TRAIN_GPT, else train_gpt.py of this repository, as the module train_gpt; imported once."""
    if "train_gpt" not in sys.modules:
        path = Path(os.environ.get("TRAIN_GPT") or ROOT / "train_gpt.py")
        path = path if path.exists() else ROOT / path
        if not path.is_file():
            sys.exit(f"TRAIN_GPT={os.environ.get('TRAIN_GPT')}: no such file")
        spec = importlib.util.spec_from_file_location("train_gpt", path)
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


def config_from(settings: dict, where):
    """A run's settings, as JSON has them, as a Config. Raises Refusal when another version of the trainer
    wrote them; where: the file that the message names."""
    tg = import_trainer()
    strange = sorted(settings.keys() ^ tg.Config.__dataclass_fields__.keys())
    if strange:
        raise tg.Refusal(f"{where}: made by another version of the trainer (it differs in "
                         f"{', '.join(strange)}); name its source with TRAIN_GPT=FILE (its log begins with it: "
                         "records/replay.py LOG --write FILE)")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return tg.Config(**values)


def load_model(folder, device: str | None = None, compile: str = "auto") -> Loaded:
    """Read a checkpoint into a model. Raises the trainer's Refusal for one that is damaged or does not
    fit."""
    tg = import_trainer()
    facts, whole = tg.read_checkpoint(folder)
    try:
        settings, _, _ = facts["run"]["config"], facts["run"]["data"], facts["step"]
    except (KeyError, TypeError) as error:
        raise tg.Refusal(f"{folder}/checkpoint.json: lacks {error}; take another checkpoint") from None
    config = config_from(settings, folder)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device(where):
        model = tg.GPT(config, tg.choose_kernels(where, compile, "auto", "off", config.fits_flex))
    weights = {f"{name}/weight": p for name, p in model.named_parameters() if p.numel()}     # no empty ones
    wanted = {key: tuple(p.shape) for key, p in weights.items()}
    found = {key: tuple(t.shape) for key, t in whole.items() if key.endswith("/weight")}
    for key in [*wanted, *found]:
        if wanted.get(key) != found.get(key):
            raise tg.Refusal(f"{folder}: {key} is {found.get(key, 'missing')}, this model wants "
                             f"{wanted.get(key)}")
    with torch.no_grad():
        for key, p in weights.items():
            p.copy_(whole[key])
    return Loaded(config, model.requires_grad_(False), facts)


def tokenizer_name(loaded: Loaded) -> str | None:
    """Name of the training data's tokenizer: as its dataset.json says, else by the size of the vocabulary."""
    return loaded.facts["run"]["data"].get("tokenizer") or NAMES_BY_VOCABULARY.get(loaded.config.vocab_size)


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The tokenizer of the training data. Raises Refusal when there is none to be had."""
    return load_tokenizer(tokenizer_name(loaded), loaded.config.vocab_size, loaded.config.eod_id)


def load_tokenizer(name: str | None, vocab_size: int, eod_id: int) -> Tokenizer:
    """The tokenizer of that name: bytes, or one of tiktoken's. Raises Refusal when there is none to be
    had."""
    tg = import_trainer()
    if not name:
        raise tg.Refusal(f"no tokenizer is known for a vocabulary of {vocab_size:,} ids: no dataset.json "
                         "beside the shards named one")
    if name == "bytes":
        def to_text(ids):
            return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        return Tokenizer(name, encode=lambda text: list(utf8(text)), decode=to_text,
                         lengths=lambda: [1] * 256 + [0] * (vocab_size - 256))
    try:
        import tiktoken
    except ImportError:
        raise tg.Refusal(f"the tokenizer {name} needs the package tiktoken: pip install tiktoken") from None
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise tg.Refusal(f"the data was made with the tokenizer {name!r} (dataset.json), which is neither "
                         f"bytes nor one of tiktoken's ({', '.join(known)}): it can't be loaded here")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:       # no network, no cache, a damaged file: all the same to the user
        why = textwrap.shorten(f"{type(error).__name__}: {error}".splitlines()[0], 150, placeholder=" ...")
        raise tg.Refusal(f"tokenizer {name} is not to be had ({why}); without a network, set "
                         "TIKTOKEN_CACHE_DIR to a folder that holds its files") from None
    special = {eod_id, *range(encoding.n_vocab, vocab_size)}

    def to_ids(text):
        utf8(text)
        return encoding.encode_ordinary(text)

    def lengths():
        return [0 if i in special else len(encoding.decode_single_token_bytes(i)) for i in range(vocab_size)]
    return Tokenizer(name, to_ids, lambda ids: encoding.decode([i for i in ids if i not in special]), lengths)


def utf8(text: str) -> bytes:
    """The text's bytes. Raises Refusal for text that has none: so arguments arrive that were no UTF-8."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise import_trainer().Refusal(f"the text is no UTF-8: character {error.start + 1} is "
                                       f"{ascii(text[error.start])}; expected UTF-8") from None


class Arguments(argparse.ArgumentParser):
    """Reads a tool's command line; says in one line what is wrong with it. Its help keeps the lines of the
    text."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def drop_dead_output() -> None:
    """Standard output and error go nowhere from here on, if they can't be written any more: so does what
    Python still holds for them, and would fail to write at its end."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def run_tool(main: Callable[[], int]) -> None:
    """Call main and exit with its status; a Refusal is one line and status 2, and so is what ends a run: one
    line, or none where whoever read the output has left."""
    tg, name = import_trainer(), Path(sys.argv[0]).name
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")    # a console that only knows ASCII shows \u00e4
    try:
        try:
            status = main()
        except SystemExit as leaving:                        # argparse: --help, or a usage error
            status = leaving.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except (tg.Refusal, tg.Failure) as error:
        print(f"{name}: {error}", file=sys.stderr)
        status = 2 if isinstance(error, tg.Refusal) else 1
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except OSError as error:
        with contextlib.suppress(OSError):
            is_output = error.errno and not error.filename   # a file that can't be opened names itself
            what = f"the output can't be written ({error.strerror})" if is_output else error
            print(f"{name}: {what}", file=sys.stderr)
        status = 1
    drop_dead_output()
    sys.exit(status)
