"""Measures a trained model.

    python records/evaluate.py CHECKPOINT                          loss on the run's own validation shards
    python records/evaluate.py CHECKPOINT --files='data/x/*.bin'   on any shards of the same tokenizer
    python records/evaluate.py CHECKPOINT --slices='a=data/x/val_*.bin,b=data/y/*.bin'    what parts are worth
    python records/evaluate.py CHECKPOINT --choices=FILE.jsonl     multiple choice in the manner of HellaSwag

The loss is the trainer's: targets 1..N of the files, each scored once, in rows of --row_tokens that begin
--overlap tokens before their first target, nats per token, of the mixture of the softmax over all ids and
copies. Bits per byte divide by the bytes of the targets' text (end-of-document tokens cost bits and have no
bytes).

--slices gives the loss on each named slice three times: with everything on, with the rows of the n-gram table
zeroed, and with the copy pointer off. First it makes sure that the probabilities of all ids sum to 1 and that
the loss is theirs. A table for people, then one line of JSON.

A line of FILE.jsonl is {"ctx": "...", "endings": ["...", ...], "label": 0}. An ending is scored by the
log-probability of its tokens after the context (copies from it count), in sum (acc) and per byte of the
ending (acc_norm); the largest is the model's answer. A context that does not fit into a row loses its begin;
an ending that does not is refused.
"""

import contextlib
import itertools
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402

POINTER_OFF = 1e4           # a sentinel's score that leaves no share for copies in fp32, and no NaN
CHECKED_TOKENS = 1024       # so many predictions must sum to 1 before a slice is scored
MAX_MASS_ERROR = 1e-3       # of a sum of probabilities in fp32 over bf16 logits
MAX_LOSS_ERROR = 1e-2       # relative, of the loss against these probabilities: two ways through bf16


# ---- loss --------------------------------------------------------------------------------------------------

def find_shards(files: str) -> list[str]:
    """The trainer's find_shards. Raises Refusal that names this tool's options."""
    tg = checkpoints.import_trainer()
    try:
        return tg.find_shards(files, "val")
    except tg.Refusal:
        raise tg.Refusal(f"no val shards match {files:.200} from {Path.cwd()} (in a folder: *val*.bin): name "
                         "others with --files=PATTERN, or in --slices") from None


def run_files(loaded) -> str:
    """The run's own validation files, looked for from here, then from the repository's root, where its
    relative patterns may begin. Raises Refusal when they are not there or are others than the run's."""
    tg, entries = checkpoints.import_trainer(), loaded.facts["run"]["data"]["val"]["files"]
    absent = foreign = None
    for folder in (Path.cwd(), checkpoints.ROOT):
        try:
            with contextlib.chdir(folder):
                paths = find_shards(loaded.config.val_files)
        except tg.Refusal as error:
            absent = absent or error
            continue
        for path, entry in itertools.zip_longest(paths, entries):
            found, then = tg.fingerprint(path) if path else "missing", entry["fingerprint"] if entry else "none"
            if found != then:
                foreign = tg.Refusal(f"{path or entry['file']}: its fingerprint is {found}, in the run it was "
                                     f"{then}: not the run's validation files; name files with --files=PATTERN")
                break
        else:
            return ",".join(paths)
    raise foreign or absent


def open_shards(loaded, files: str):
    """The token stream of the files. Raises Refusal unless they were made with the model's own tokenizer."""
    tg, c = checkpoints.import_trainer(), loaded.config
    stream = tg.TokenStream(find_shards(files), c.vocab_size)
    own = (checkpoints.tokenizer_name(loaded), c.vocab_size, c.eod_id)
    for folder in sorted({Path(path).parent for path in stream.paths}):
        card = tg.dataset_card([str(folder / "any.bin")])
        found = own if card is None else (card["tokenizer"], card["vocab_size"], card["eod_id"])
        if found != (own[0] or found[0], *own[1:]):
            raise tg.Refusal(f"{folder}/dataset.json: tokenizers differ: these shards are "
                             f"{_tokenizer_text(*found)}, the model was trained on {_tokenizer_text(*own)}")
    # This search refuses ids out of range, too.
    marks = [len(stream.document_starts(k, c.eod_id)) for k in range(len(stream.paths))]
    if not any(marks):
        raise tg.Refusal(f"{files}: no end-of-document id {c.eod_id} in them: made with another tokenizer, "
                         "and their dataset.json left behind?")
    return stream


def _tokenizer_text(name, vocab_size: int, eod_id: int) -> str:
    return f"{name} ({vocab_size} ids, end of document {eod_id})"


@torch.no_grad()
def loss_on(loaded, files: str, num_targets: int = 0, row_tokens: int = 0, overlap: int | None = None,
            leave_out: int = -1) -> dict:
    """Nats per token over the first num_targets (0: all) targets of the shards, those equal to leave_out left
    out; bits per byte if the text is known. row_tokens 0 and overlap None: the run's own."""
    tg, c, device = checkpoints.import_trainer(), loaded.config, loaded.model.embed.device
    stream = open_shards(loaded, files)
    num_targets = min(num_targets or stream.num_tokens - 1, stream.num_tokens - 1)
    row_tokens = row_tokens or c.row_tokens
    overlap = c.val_overlap if overlap is None else overlap
    try:
        lengths = torch.tensor(checkpoints.tokenizer_of(loaded).lengths())
    except tg.Refusal:
        lengths = None
    nats, num_bytes, num_scored = 0.0, 0, 0
    for inputs, targets in tg.validation_rows(stream, num_targets, row_tokens, overlap, 1, c.eod_id, 0, 1):
        targets = targets.masked_fill(targets == leave_out, -1)
        nats += float(loaded.model(inputs.to(device), targets.to(device), loaded.view))
        scored = targets[targets >= 0].long()
        num_scored += len(scored)
        num_bytes += 0 if lengths is None else int(lengths[scored].sum())
    if not num_scored:
        raise tg.Refusal(f"{files}: no target is left to score")
    return dict(loss=nats / num_scored, targets=num_scored,
                bits_per_byte=nats / math.log(2) / num_bytes if num_bytes else None)


# ---- slices ------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def replaced(parameter, numbers):
    """In this block the parameter holds these numbers; after it, its own again."""
    own = parameter.data
    parameter.data = numbers
    try:
        yield
    finally:
        parameter.data = own


def everything_on(model):
    return contextlib.nullcontext()


def table_zeroed(model):
    """Every row of the n-gram table reads as zero. All are one row in memory: the table may be half of a
    GPU's."""
    return replaced(model.ngrams, torch.zeros_like(model.ngrams[:1]).expand_as(model.ngrams))


def pointer_off(model):
    """The sentinel takes the copy pointer's whole share; the softmax is untouched."""
    scales = model.pointer.copy_scales.detach().clone()
    scales[1] = POINTER_OFF
    return replaced(model.pointer.copy_scales, scales)


VARIANTS = {"all on": everything_on, "table zeroed": table_zeroed, "pointer off": pointer_off}


@torch.no_grad()
def check_mixture(loaded, files: str) -> None:
    """Raises Failure unless the probabilities of all ids sum to 1 at each of the first tokens of the files,
    and the loss of these tokens is that of these probabilities."""
    tg, c, device = checkpoints.import_trainer(), loaded.config, loaded.model.embed.device
    stream = open_shards(loaded, files)
    count = min(CHECKED_TOKENS, c.row_tokens, stream.num_tokens - 1)
    rows = tg.validation_rows(stream, count, tg.round_up(count, c.block_tokens), 0, 1, c.eod_id, 0, 1)
    inputs, targets = (tokens.to(device) for tokens in next(iter(rows)))
    log_p = loaded.model(inputs, None, loaded.view)[0, :count].float()
    mass_error = float((log_p.exp().sum(-1) - 1).abs().max())
    by_hand = -float(log_p.gather(1, targets[0, :count, None].long()).sum())
    loss = float(loaded.model(inputs, targets, loaded.view))
    if not mass_error <= MAX_MASS_ERROR:
        raise tg.Failure(f"{files}: the probabilities of all ids sum to 1 only within {mass_error:.2g}: "
                         "a loss of them would mean nothing")
    if not abs(loss - by_hand) <= MAX_LOSS_ERROR * abs(by_hand):
        raise tg.Failure(f"{files}: the loss of the first {count} tokens is {loss / count:.4f}, by their "
                         f"probabilities it is {by_hand / count:.4f}")


def read_slices(text: str) -> dict[str, str]:
    """'a=x/*.bin,y/*.bin,b=z.bin' -> {name: patterns}: a part without '=' belongs to the name before it.
    Raises Refusal."""
    tg, slices, name = checkpoints.import_trainer(), {}, None
    for part in text.split(","):
        before, equals, pattern = part.partition("=")
        if equals:
            name = before.strip()
            if not name or name in slices:
                raise tg.Refusal(f"--slices: the name {name!r} is empty or comes twice")
            slices[name] = pattern
        elif name is None:
            raise tg.Refusal(f"--slices={text:.99}: expected name=pattern,name2=pattern")
        else:
            slices[name] += "," + part
    return slices


def measure_slices(loaded, slices: dict[str, str], num_targets: int = 0, row_tokens: int = 0,
                   overlap: int | None = None) -> dict:
    """{name: {targets, files, bits_per_byte, loss: {variant: nats per token}}}. Raises Refusal and
    Failure."""
    tg, found = checkpoints.import_trainer(), {}
    for files in slices.values():
        open_shards(loaded, files)                           # a bad one is refused before hours of scoring
    for name, files in slices.items():
        losses, bits_per_byte = {}, None
        for variant, change in VARIANTS.items():
            with change(loaded.model):
                check_mixture(loaded, files)
                score = loss_on(loaded, files, num_targets, row_tokens, overlap)
            losses[variant] = score["loss"]
            if variant == "all on":
                bits_per_byte = score["bits_per_byte"]
        shards = [dict(file=Path(path).name, fingerprint=tg.fingerprint(path))
                  for path in tg.find_shards(files, "val")]
        found[name] = dict(targets=score["targets"], files=shards, bits_per_byte=bits_per_byte, loss=losses)
    return found


def slices_table(found: dict) -> list[str]:
    """The losses as lines of a table, with differences to everything on."""
    width = max(len(name) for name in [*found, "slice"])
    titles = ("targets", "all on", "table zeroed", "pointer off", "bits/byte")
    lines = [f"{'slice':<{width}}" + "".join(f"{title:>18}" for title in titles)]
    for name, row in found.items():
        losses = row["loss"]
        cells = [f"{row['targets']:,}", f"{losses['all on']:.4f}"]
        for variant in ("table zeroed", "pointer off"):
            cells.append(f"{losses[variant]:.4f} ({losses[variant] - losses['all on']:+.4f})")
        cells.append(f"{row['bits_per_byte']:.4f}" if row["bits_per_byte"] else "-")
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


# ---- multiple choice ---------------------------------------------------------------------------------------

def read_items(path) -> list[dict]:
    """The items of a JSONL file. Raises Refusal that names the line."""
    tg, items = checkpoints.import_trainer(), []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise tg.Refusal(f"{path}: can't be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            ctx, endings, label = item["ctx"], item["endings"], int(item["label"])
            are_texts = isinstance(ctx, str) and all(isinstance(ending, str) and ending for ending in endings)
            is_index = type(item["label"]) in (int, str) and 0 <= label < len(endings)     # not 0.9, not true
            if not (are_texts and isinstance(endings, list) and is_index):
                raise ValueError
            "".join([ctx, *endings]).encode()                # half a surrogate pair is no text
        except (ValueError, KeyError, TypeError, RecursionError):
            raise tg.Refusal(f'{path}: line {number} is not {{"ctx": text, "endings": [texts], "label": '
                             'index}') from None
        items.append(dict(ctx=ctx, endings=endings, label=label, line=number))
    if not items:
        raise tg.Refusal(f"{path}: no items")
    return items


@torch.no_grad()
def log_probability(loaded, context: list[int], ending: list[int]) -> float:
    """Of the ending's tokens after the context; a context that is too long loses its begin. Raises Refusal
    when the ending alone does not fit into a row."""
    tg, c = checkpoints.import_trainer(), loaded.config
    if len(ending) > c.row_tokens:
        raise tg.Refusal(f"an ending of {len(ending)} tokens: a row of this model holds {c.row_tokens}, so "
                         "only a part of it would be scored")
    tokens = (context + ending)[-c.row_tokens - 1:]          # the last one is a target only
    inputs, length = tokens[:-1], tg.round_up(len(tokens) - 1, c.block_tokens)
    row = torch.tensor([inputs + [c.eod_id] * (length - len(inputs))], dtype=torch.int32)
    log_p = loaded.model(row.to(loaded.model.embed.device), None, loaded.view)[0, :len(inputs)]
    scores = log_p[range(len(inputs)), tokens[1:]]
    return float(scores[-len(ending):].sum())


def choose(loaded, items: list[dict]) -> dict:
    """Accuracy over the items, by the sum and by the mean per byte. Raises Refusal for an item that can't be
    scored whole."""
    tg, tokenizer, right, right_norm = checkpoints.import_trainer(), checkpoints.tokenizer_of(loaded), 0, 0
    for item in items:
        context = [loaded.config.eod_id, *tokenizer.encode(item["ctx"])]
        endings = [" " + ending.lstrip(" ") for ending in item["endings"]]
        try:
            scores = [log_probability(loaded, context, tokenizer.encode(ending)) for ending in endings]
        except tg.Refusal as error:
            raise tg.Refusal(f"line {item['line']}: {error}") from None
        by_byte = [score / len(ending.encode()) for score, ending in zip(scores, endings)]
        right += max(range(len(scores)), key=scores.__getitem__) == item["label"]
        right_norm += max(range(len(scores)), key=by_byte.__getitem__) == item["label"]
    return dict(items=len(items), acc=right / len(items), acc_norm=right_norm / len(items))


# ---- command line ------------------------------------------------------------------------------------------

def main() -> int:
    parser = checkpoints.Arguments(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--files", help="comma-separated patterns; default: the run's own validation files")
    parser.add_argument("--tokens", type=int, help="targets, 0: all; default: all with --files and --slices, "
                                                   "else as many as the run")
    parser.add_argument("--row_tokens", type=int, help="context; default: the run's row_tokens")
    parser.add_argument("--overlap", type=int, help="context before a row; default: the run's val_overlap")
    parser.add_argument("--slices", help="name=pattern,name2=pattern: what table and pointer are worth there")
    parser.add_argument("--choices", help="multiple-choice items, one JSON object a line")
    args = parser.parse_args()
    slices = read_slices(args.slices) if args.slices else {}
    items = read_items(args.choices) if args.choices else []
    loaded = checkpoints.load_model(args.checkpoint)
    c = loaded.config
    row_tokens = c.row_tokens if args.row_tokens is None else args.row_tokens
    overlap = c.val_overlap if args.overlap is None else args.overlap
    if args.tokens is not None and args.tokens < 0:
        parser.error(f"--tokens={args.tokens}: expected 0 (all) or more")
    if row_tokens % c.block_tokens or not 0 < row_tokens <= 2 ** 24:
        parser.error(f"--row_tokens={row_tokens}: expected a multiple of {c.block_tokens} up to {2 ** 24}")
    if not 0 <= overlap < row_tokens:
        parser.error(f"--overlap={overlap}: expected 0 or more, smaller than a row of {row_tokens} tokens")
    if items:
        found = choose(loaded, items)
        print(f"{found['items']} items: acc {found['acc']:.4f}, acc_norm {found['acc_norm']:.4f}")
    if slices:
        found = measure_slices(loaded, slices, args.tokens or 0, row_tokens, overlap)
        print("\n".join(slices_table(found)))
        run = loaded.facts["run"]
        print(json.dumps(dict(
            run_id=run["run_id"], source_sha256=run["source_sha256"], step=loaded.facts["step"],
            row_tokens=row_tokens, overlap=overlap, parameters=run["parameters"], slices=found)))
    if args.files or not (items or slices):
        if args.tokens is not None:
            num_targets = args.tokens
        else:
            num_targets = 0 if args.files else c.val_tokens
        found = loss_on(loaded, args.files or run_files(loaded), num_targets, row_tokens, overlap)
        bits = f", {found['bits_per_byte']:.4f} bits per byte" if found["bits_per_byte"] else ""
        print(f"{found['loss']:.4f} nats per token over {found['targets']:,} targets{bits}")
    return 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
