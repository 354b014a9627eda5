"""python records/load_example.py MODEL.safetensors "text": the five likeliest next tokens, by export's file."""
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402


def load(path):
    """-> (the model, the file's metadata). The model's code is $TRAIN_GPT's, else train_gpt.py's."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name).float() for name in file.keys()}
    model = checkpoints.import_trainer().GPT(checkpoints.config_from(json.loads(metadata["config"]), path))
    model.load_state_dict(tensors)
    return model.eval(), metadata


@torch.no_grad()
def next_probabilities(model, tokens):
    """Probability of each id after the tokens; the row is filled to whole blocks, padding ids get no share."""
    c, view = model.config, checkpoints.import_trainer().View(model.config.val_window_blocks)
    row = torch.tensor([tokens + [c.eod_id] * (-len(tokens) % c.block_tokens)], dtype=torch.int32)
    return model(row, None, view)[0, len(tokens) - 1, :c.vocab_size].softmax(-1)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: python records/load_example.py MODEL.safetensors TEXT")
    model, metadata = load(sys.argv[1])
    c = model.config
    tokenizer = checkpoints.load_tokenizer(metadata["tokenizer"], c.vocab_size, c.eod_id)
    best = next_probabilities(model, [c.eod_id, *tokenizer.encode(sys.argv[2])]).topk(5)
    print([(int(i), round(float(p), 4)) for p, i in zip(*best)])


if __name__ == "__main__":
    checkpoints.run_tool(main)
