"""Measures a trained model.

    python records/evaluate.py CHECKPOINT                          loss on the run's own validation shards
    python records/evaluate.py CHECKPOINT --files='data/x/*.bin'   on any shards of the same tokenizer
    python records/evaluate.py CHECKPOINT --choices=FILE.jsonl     multiple choice in the manner of HellaSwag

The loss is the trainer's: targets 1..N of the files, each scored once, in rows of --row_tokens that begin --overlap
tokens before their first target, nats per token, of the mixture of the softmax over all ids and copies. Bits per byte
divide by the bytes of the targets' text (end-of-document tokens cost bits and have no bytes).

A line of FILE.jsonl is {"ctx": "...", "endings": ["...", ...], "label": 0}. An ending is scored by the log-probability
of its tokens after the context (copies from it count), in sum (acc) and per byte of the ending (acc_norm); the largest
is the model's answer.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402


@torch.no_grad()
def loss_on(loaded, files: str, num_targets: int = 0, row_tokens: int = 0, overlap: int = -1,
            leave_out: int = -1) -> dict:
    """Nats per token over the first num_targets (0: all) targets of the shards, those equal to leave_out left out; bits
    per byte if the text is known."""
    tg, c, device = checkpoints.import_trainer(), loaded.config, loaded.model.embed.device
    stream = tg.TokenStream(tg.find_shards(files, "val"), c.vocab_size)
    for k in range(len(stream.paths)):
        stream.document_starts(k, c.eod_id)                          # raises on ids out of range
    num_targets = min(num_targets or stream.num_tokens - 1, stream.num_tokens - 1)
    nats, size, targets_in_all = 0.0, 0, 0
    try:
        lengths = torch.tensor(checkpoints.tokenizer_of(loaded).lengths())
    except tg.Refusal:
        lengths = None
    row_tokens, overlap = row_tokens or c.row_tokens, overlap if overlap >= 0 else c.val_overlap
    for inputs, targets in tg.validation_rows(stream, num_targets, row_tokens, overlap, 1, c.eod_id, 0, 1):
        targets = targets.masked_fill(targets == leave_out, -1)
        nats += float(loaded.model(inputs.to(device), targets.to(device), loaded.view))
        scored = targets[targets >= 0].long()
        targets_in_all += len(scored)
        size += int(lengths[scored].sum()) if lengths is not None else 0
    return dict(loss=nats / targets_in_all, targets=targets_in_all,
                bits_per_byte=nats / math.log(2) / size if size else None)


def read_items(path) -> list[dict]:
    """The items of a JSONL file. Raises Refusal that names the line."""
    tg, items = checkpoints.import_trainer(), []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise tg.Refusal(f"{path}: can't be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                item = json.loads(line)
                ctx, endings, label = item["ctx"], item["endings"], int(item["label"])
                if not (isinstance(ctx, str) and all(isinstance(e, str) and e for e in endings)
                        and 0 <= label < len(endings)):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise tg.Refusal(f'{path}: line {number} is not {{"ctx": text, "endings": [texts], "label": index}}'
                                 ) from None
            items.append(dict(ctx=ctx, endings=endings, label=label))
    if not items:
        raise tg.Refusal(f"{path}: no items")
    return items


@torch.no_grad()
def log_probability(loaded, context: list[int], ending: list[int]) -> float:
    """Of the ending's tokens after the context; a context that is too long loses its begin."""
    tg, c = checkpoints.import_trainer(), loaded.config
    tokens = (context + ending)[-c.row_tokens - 1:]
    inputs, length = tokens[:-1], tg.round_up(len(tokens) - 1, c.block_tokens)
    row = torch.tensor([inputs + [c.eod_id] * (length - len(inputs))], dtype=torch.int32)
    log_p = loaded.model(row.to(loaded.model.embed.device), None, loaded.view)[0, :len(inputs)]
    scores = log_p[range(len(inputs)), tokens[1:]]
    return float(scores[-len(ending):].sum())


def choose(loaded, items: list[dict]) -> dict:
    """Accuracy over the items, by the sum and by the mean per byte."""
    tokenizer, right, right_norm = checkpoints.tokenizer_of(loaded), 0, 0
    for item in items:
        context = [loaded.config.eod_id, *tokenizer.encode(item["ctx"])]
        endings = [" " + ending.lstrip(" ") for ending in item["endings"]]
        scores = [log_probability(loaded, context, tokenizer.encode(ending)) for ending in endings]
        by_byte = [score / len(ending.encode()) for score, ending in zip(scores, endings)]
        right += max(range(len(scores)), key=scores.__getitem__) == item["label"]
        right_norm += max(range(len(scores)), key=by_byte.__getitem__) == item["label"]
    return dict(items=len(items), acc=right / len(items), acc_norm=right_norm / len(items))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--files", help="comma-separated patterns; default: the run's own validation files")
    parser.add_argument("--tokens", type=int, default=-1, help="targets; 0: all; default: the run's, all with --files")
    parser.add_argument("--row_tokens", type=int, default=0, help="context; default: the run's row_tokens")
    parser.add_argument("--overlap", type=int, default=-1, help="context before a row; default: the run's val_overlap")
    parser.add_argument("--choices", help="multiple-choice items, one JSON object a line")
    args = parser.parse_args()
    loaded = checkpoints.load_model(args.checkpoint)
    c = loaded.config
    if args.row_tokens % c.block_tokens or args.row_tokens < 0:
        parser.error(f"--row_tokens={args.row_tokens}: expected a multiple of {c.block_tokens}")
    if max(args.overlap, c.val_overlap if args.overlap < 0 else 0) >= (args.row_tokens or c.row_tokens):
        parser.error("the overlap must be smaller than a row: name another one with --overlap")
    if args.choices:
        found = choose(loaded, read_items(args.choices))
        print(f"{found['items']} items: acc {found['acc']:.4f}, acc_norm {found['acc_norm']:.4f}")
    if args.files or not args.choices:
        tokens = args.tokens if args.tokens >= 0 else 0 if args.files else c.val_tokens
        found = loss_on(loaded, args.files or c.val_files, tokens, args.row_tokens, args.overlap)
        bits = f", {found['bits_per_byte']:.4f} bits per byte" if found["bits_per_byte"] else ""
        print(f"{found['loss']:.4f} nats per token over {found['targets']:,} targets{bits}")
    return 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
