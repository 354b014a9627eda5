"""Lets a trained model write.

    python records/sample.py CHECKPOINT "Once upon a time"        CHECKPOINT: a folder checkpoints/RUN/step_N
    python records/sample.py CHECKPOINT "..." --tokens=256 --temperature=0.8 --top_k=50 --seed=0

The prompt is put behind an end-of-document token, as documents are in training. The same seed gives the same text on
the same machine. Each token costs one pass over the whole context; ids that only pad the vocabulary are never drawn.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402


def sample(loaded, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The prompt and what follows it."""
    trainer, tokenizer = checkpoints.import_trainer(), checkpoints.tokenizer_of(loaded)
    tokens = [loaded.config.eod_id, *tokenizer.encode(prompt)]
    return tokenizer.decode(trainer.generate(loaded.model, tokens, num_tokens, seed, temperature, top_k))


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
