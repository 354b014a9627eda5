"""Says whether a held-out slice shares text with the training shards, and can write the part that does not.

    python records/slices.py --train='data/x/train_*.bin' --slice='data/y/val_*.bin'
    python records/slices.py --train=.. --slice=.. --out=data/y/val_clean.bin    its documents that share nothing

A document of the slice is known when train holds the same document, token by token (by its hash), or when
more than --max_share of its 13-grams stand anywhere in train: 13 tokens in a row, 52 for bytes, never across
documents. Exit status 0: no document is known; 1: some are; 2: it can't be said.
"""

import hashlib
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402

GRAM_TOKENS = 13              # so GPT-3's authors looked for test sets in their corpus (2020; 13 words)
TOKENS_OF_A_BPE_TOKEN = 4     # bytes: about so many letters stand in one token of GPT-2's
CHUNK_TOKENS = 2 ** 22
GPT2 = dict(tokenizer="gpt2", vocab_size=50_257, eod_id=50_256)


class Overlap(NamedTuple):
    """What a slice shares with train. known: numbers of the documents that count as known."""
    num_documents: int
    same_documents: int
    grams: int
    shared_grams: int
    known: list[int]


def open_both(train: str, held_out: str):
    """-> (train stream, slice stream, the card of both). Raises Refusal when they were made differently."""
    tg, cards, streams = checkpoints.import_trainer(), [], []
    for files, what in ((train, "train"), (held_out, "val")):
        paths = tg.find_shards(files, what)
        card = tg.dataset_card(paths)
        cards.append(GPT2 if card is None else card)
        streams.append(tg.TokenStream(paths, cards[-1]["vocab_size"]))
    if cards[0] != cards[1]:
        raise tg.Refusal(f"tokenizers differ: train is {cards[0]}, the slice {cards[1]}")
    return *streams, cards[0]


def documents(stream, eod_id: int) -> list[tuple[int, int]]:
    """[(first, stop)] of the documents that are not empty, without their end-of-document tokens."""
    marks = [-1]                                             # text before the first mark is a document too
    for k in range(len(stream.paths)):
        marks += stream.document_starts(k, eod_id)
    stops = [*marks[1:], stream.num_tokens]
    return [(mark + 1, stop) for mark, stop in zip(marks, stops) if stop > mark + 1]


def digest(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()


def gram_hashes(tokens: Tensor, length: int) -> Tensor:
    """A number of 64 bits for each `length` tokens in a row, [T - length + 1]."""
    factors = torch.randint(-2 ** 62, 2 ** 62, (length,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    count = max(0, len(tokens) - length + 1)
    hashes = torch.zeros(count, dtype=torch.int64)
    for k, factor in enumerate(factors.tolist()):
        hashes += (tokens[k:k + count].long() + 1) * factor  # wraps around, as it should
    return hashes


def train_grams(stream, length: int) -> Iterator[Tensor]:
    for first in range(0, stream.num_tokens, CHUNK_TOKENS):
        stop = min(first + CHUNK_TOKENS + length - 1, stream.num_tokens)
        yield gram_hashes(stream.read(first, stop), length)


def find_overlap(train, held_out, eod_id: int, length: int, max_share: float = 0.0) -> Overlap:
    """Compare two streams; length: tokens of a gram."""
    spans = documents(held_out, eod_id)
    digests = [digest(held_out.read(*span)) for span in spans]
    wanted, lengths = set(digests), {stop - first for first, stop in spans}
    in_train = {digest(train.read(first, stop)) for first, stop in documents(train, eod_id)
                if stop - first in lengths} & wanted
    grams = [gram_hashes(held_out.read(*span), length) for span in spans]
    distinct, place = torch.cat(grams or [torch.zeros(0, dtype=torch.int64)]).unique(return_inverse=True)
    found = torch.zeros(len(distinct), dtype=torch.bool)
    for hashes in train_grams(train, length) if len(distinct) else ():
        near = torch.searchsorted(distinct, hashes).clamp(max=len(distinct) - 1)
        found[near[distinct[near] == hashes]] = True
    shared = [int(part.sum()) for part in found[place].split([len(part) for part in grams])]
    known = [i for i, hashes in enumerate(grams)
             if digests[i] in in_train or shared[i] > max_share * len(hashes)]
    same = sum(one in in_train for one in digests)
    return Overlap(len(spans), same, sum(map(len, grams)), sum(shared), known)


def write_shard(path: Path, stream, spans, eod_id: int) -> int:
    """Write these documents as a shard, each behind its mark; -> tokens. Raises Refusal."""
    tg = checkpoints.import_trainer()
    mark = torch.tensor([eod_id], dtype=torch.int32)
    parts = [part for span in spans for part in (mark, stream.read(*span))]
    if not parts:
        raise tg.Refusal(f"{path}: no document is left to write")
    if path.exists():
        raise tg.Refusal(f"{path}: is there: not overwritten")
    tokens = torch.cat(parts).numpy().astype("<u2")
    head = torch.zeros(tg.SHARD_HEADER_BYTES // 4, dtype=torch.int32)
    head[:3] = torch.tensor([tg.SHARD_MAGIC, tg.SHARD_VERSION, len(tokens)])
    try:
        path.write_bytes(head.numpy().astype("<i4").tobytes() + tokens.tobytes())
    except OSError as error:
        raise tg.Refusal(f"{path}: can't be written ({error.strerror})") from None
    return len(tokens)


def main() -> int:
    parser = checkpoints.Arguments(description=__doc__)
    parser.add_argument("--train", required=True, help="patterns of the training shards")
    parser.add_argument("--slice", required=True, help="patterns of the held-out shards")
    parser.add_argument("--max_share", type=float, default=0.0,
                        help="of a document's 13-grams that train may hold")
    parser.add_argument("--out", type=Path, help="a shard to write, of the documents that are not known")
    args = parser.parse_args()
    if not 0 <= args.max_share <= 1:
        parser.error(f"--max_share={args.max_share}: expected 0 to 1")
    train, held_out, card = open_both(args.train, args.slice)
    length = GRAM_TOKENS * (TOKENS_OF_A_BPE_TOKEN if card["tokenizer"] == "bytes" else 1)
    found = find_overlap(train, held_out, card["eod_id"], length, args.max_share)
    print(f"{found.num_documents:,} documents in the slice: {found.same_documents:,} stand in train as they "
          f"are, {len(found.known):,} are known ({length}-grams: {found.shared_grams:,} of {found.grams:,} in "
          "train)")
    if args.out:
        known, spans = set(found.known), documents(held_out, card["eod_id"])
        clean = [span for i, span in enumerate(spans) if i not in known]
        num_tokens = write_shard(args.out, held_out, clean, card["eod_id"])
        print(f"{args.out}: {num_tokens:,} tokens, {len(clean):,} documents")
    return 1 if found.known else 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
