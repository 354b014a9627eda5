"""Lets a trained model write.

    python records/sample.py CHECKPOINT "Once upon a time"        CHECKPOINT: a folder checkpoints/RUN/step_N
    python records/sample.py CHECKPOINT "..." --tokens=256 --temperature=0.8 --top_k=50 --seed=0

The prompt is put behind an end-of-document token, as documents are in training, and the text ends where the
model ends its document, or after --tokens. Tokens are drawn from the mixture of softmax and copies, whose log
probabilities the model gives; temperature and top_k act on these. The same seed gives the same text on the
same machine. Each token costs one pass over the whole context and is shown at once; ids that only pad are
never drawn.
"""

import math
import sys
from pathlib import Path
from typing import Iterable, Iterator

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402

LOWEST_TEMPERATURE = 1e-6      # temperature 0 is this one: the likeliest token always wins
MAX_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has at most 4 bytes, and a token at least one


@torch.no_grad()
def generate(loaded, prompt: list[int], num_tokens: int, seed: int = 0, temperature: float = 0.8,
             top_k: int = 50) -> Iterator[int]:
    """The tokens that follow the prompt, at most num_tokens of them, each from at most the last row_tokens
    before it; ends before the first end-of-document token that is drawn."""
    c, model, view, tokens = loaded.config, loaded.model, loaded.view, list(prompt)
    device, generator = model.embed.device, torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        context = tokens[-c.row_tokens:]
        filled = context + [c.eod_id] * (-len(context) % c.block_tokens)
        row = torch.tensor([filled], dtype=torch.int32, device=device)
        log_p = model(row, None, view)[0, len(context) - 1, :c.vocab_size].float().cpu()
        best = (log_p / max(temperature, LOWEST_TEMPERATURE)).topk(min(top_k, c.vocab_size))
        token = int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)])
        if token == c.eod_id:
            return
        tokens.append(token)
        yield token


def as_text(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of the tokens, piece by piece as they come; a character that is cut off waits for its rest."""
    waiting = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd") or len(waiting) >= MAX_TOKENS_OF_A_CHARACTER:
            yield text
            waiting = []
    yield tokenizer.decode(waiting)


def sample(loaded, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
    """The prompt and what follows it, in pieces. Raises Refusal for a prompt that the tokenizer can't
    take."""
    tokenizer = checkpoints.tokenizer_of(loaded)
    tokens = [loaded.config.eod_id, *tokenizer.encode(prompt)]
    yield prompt
    yield from as_text(tokenizer, generate(loaded, tokens, num_tokens, seed, temperature, top_k))


def main() -> int:
    parser = checkpoints.Arguments(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for key, fits, expected in (
            ("tokens", args.tokens >= 0, "0 or more"), ("top_k", args.top_k >= 1, "1 or more"),
            ("temperature", 0 <= args.temperature < math.inf, "a finite number of at least 0"),
            ("seed", 0 <= args.seed < 2 ** 63, "a whole number from 0 to 2^63 - 1")):
        if not fits:
            parser.error(f"--{key}={getattr(args, key)}: expected {expected}")
    checkpoints.utf8(args.prompt)                            # refused before a large model is loaded
    loaded = checkpoints.load_model(args.checkpoint, compile="off")
    for piece in sample(loaded, args.prompt, args.tokens, args.temperature, args.top_k, args.seed):
        print(piece, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
