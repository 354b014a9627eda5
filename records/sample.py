"""Lets a trained model write.

    python records/sample.py CHECKPOINT "Once upon a time"        CHECKPOINT: a folder checkpoints/RUN/step_N
    python records/sample.py CHECKPOINT "..." --tokens=256 --temperature=0.8 --top_k=50 --seed=0

The prompt is put behind an end-of-document token, as documents are in training. Tokens are drawn from the mixture of
softmax and copies, whose log probabilities the model gives; temperature and top_k act on these. The same seed gives the
same text on the same machine. Each token costs one pass over the whole context; ids that only pad are never drawn.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402


@torch.no_grad()
def generate(loaded, prompt: list[int], num_tokens: int, seed: int = 0, temperature: float = 0.8, top_k: int = 50
             ) -> list[int]:
    """prompt + num_tokens sampled tokens, from at most the last row_tokens of them."""
    c, model, view, tokens = loaded.config, loaded.model, loaded.view, list(prompt)
    device, generator = model.embed.device, torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        context = tokens[-c.row_tokens:]
        row = torch.tensor([context + [c.eod_id] * (-len(context) % c.block_tokens)], dtype=torch.int32, device=device)
        log_p = model(row, None, view)[0, len(context) - 1, :c.vocab_size].float().cpu() / max(temperature, 1e-6)
        best = log_p.topk(min(top_k, c.vocab_size))
        tokens.append(int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)]))
    return tokens


def sample(loaded, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The prompt and what follows it."""
    tokenizer = checkpoints.tokenizer_of(loaded)
    tokens = [loaded.config.eod_id, *tokenizer.encode(prompt)]
    return tokenizer.decode(generate(loaded, tokens, num_tokens, seed, temperature, top_k))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tokens < 0 or args.temperature < 0 or args.top_k < 1:
        parser.error("expected --tokens and --temperature of at least 0, and --top_k of at least 1")
    loaded = checkpoints.load_model(args.checkpoint, compile="off")
    print(sample(loaded, args.prompt, args.tokens, args.temperature, args.top_k, args.seed))
    return 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
