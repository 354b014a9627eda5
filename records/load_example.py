"""python records/load_example.py MODEL.safetensors "text": the five likeliest next tokens, by export.py's file."""
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt  # noqa: E402


def load(path):
    """-> (the model, the file's metadata)."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata["config"])
    config = train_gpt.Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
    model = train_gpt.GPT(config).eval()
    model.load_state_dict({name: t.float() for name, t in load_file(path).items()})
    return model, metadata


@torch.no_grad()
def next_probabilities(model, tokens):
    """Probability of each id after the tokens; rows are filled up to whole blocks with end-of-document tokens.
    The model gives log probabilities with copies mixed in; the softmax takes the padding's share away."""
    c = model.config
    row = torch.tensor([tokens + [c.eod_id] * (-len(tokens) % c.block_tokens)], dtype=torch.int32)
    return model(row, None, train_gpt.View(c.val_window_blocks))[0, len(tokens) - 1, :c.vocab_size].softmax(-1)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python records/load_example.py MODEL.safetensors TEXT")
    model, metadata = load(sys.argv[1])
    text = list(sys.argv[2].encode())            # for metadata["tokenizer"] == "bytes"; else tiktoken's encoding of it
    best = next_probabilities(model, [model.config.eod_id] + text).topk(5)
    print([(int(i), round(float(p), 4)) for p, i in zip(*best)])
