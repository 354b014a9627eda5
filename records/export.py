"""Writes a trained model's weights as one safetensors file.

    python records/export.py CHECKPOINT OUT.safetensors [--dtype=float32|bfloat16]

Layout: one tensor for each parameter, under the name and in the shape that it has in train_gpt.py's GPT:
    embed                               [padded vocabulary, model_dim], the output head too; rows from vocab_size
                                        on only pad
    value_embeds                        [padded vocabulary, value layers * heads * head_dim]
    ngrams                              [orders * table_rows + 1, model_dim]; the last row is zero
    ngram_mix                           []: of the n-grams in x0
    pointer.copy_qk                     [3, copy_dim, model_dim]: queries, keys, keys by the state one token before
    pointer.sentinel_gates              [1, model_dim]
    pointer.copy_scales                 [2]: of the queries; bias of the sentinel
    blocks.N.attention.qk               [heads, 2 * qk_dim, model_dim]: two heads a matrix, all queries, then all
                                        keys; [2 * heads, qk_dim, model_dim] if the number of heads is odd
    blocks.N.attention.value, .out      [heads * head_dim, model_dim]; out is transposed
    blocks.N.attention.scales           [2]: of values and output
    blocks.N.attention.gates            [heads, 16]: of the output
    blocks.N.up, .down                  [mlp_dim, model_dim]; down is transposed
    blocks.N.mlp_scale, .mix            [], [2]: of x and x0
The record has 6.71 billion numbers, 6.44 of them in ngrams: 26.8 GB in float32, 13.4 GB in bfloat16. The signs
of the n-grams are no parameter: GPT draws them with seed 1.
Metadata (text): format ("pt"), config (JSON of train_gpt.Config), tokenizer, step, run_id, source_sha256.
load_example.py reads it.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints  # noqa: E402


def export(checkpoint, out, dtype: torch.dtype = torch.float32) -> dict:
    """Write the file, whole or not at all; -> {name: tensor}. Raises Refusal."""
    tg = checkpoints.import_trainer()
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise tg.Refusal("the package safetensors is needed: pip install safetensors") from None
    loaded = checkpoints.load_model(checkpoint, device="cpu", compile="off")
    tensors = {name: p.detach().to(dtype).clone().contiguous() for name, p in loaded.model.named_parameters()}
    run = loaded.facts["run"]
    metadata = dict(format="pt", config=json.dumps(run["config"]),
                    tokenizer=checkpoints.tokenizer_name(loaded) or "", step=str(loaded.facts["step"]),
                    run_id=run["run_id"], source_sha256=run["source_sha256"])
    part = Path(f"{out}.tmp")
    try:
        save_file(tensors, part, metadata=metadata)
        part.replace(out)
    except Exception as error:                           # the library has errors of its own beside OSError
        part.unlink(missing_ok=True)
        raise tg.Refusal(f"{out}: can't be written ({error})") from None
    return tensors


def main() -> int:
    parser = checkpoints.Arguments(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    tensors = export(args.checkpoint, args.out, getattr(torch, args.dtype))
    print(f"{args.out}: {len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} numbers")
    return 0


if __name__ == "__main__":
    checkpoints.run_tool(main)
