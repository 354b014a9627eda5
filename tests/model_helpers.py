"""Small models, batches and runs that tests share: a few thousand parameters, yet every kind of layer.

Fresh models are zero in every output projection, so a test on them could not see half of the paths: `randomise` first.
"""
import dataclasses

import numpy as np
import torch
from rank_helpers import load_train_gpt
from shard_helpers import raw_shard

EOD = 60
SMALL = dict(       # 5 layers: long, short and no attention, value embeddings, n-grams, copies
    vocab_size=300, eod_id=EOD, num_steps=3, batch_tokens=24 * 64, stages="plain", row_tokens=64, micro_rows=24,
    val_tokens=500, val_overlap=16, val_window_blocks=8, val_every_steps=0, target_loss=0.0, model_dim=32,
    num_layers=5, num_heads=2, head_dim=16, qk_dim=8, copy_dim=8, mlp_dim=64, long_layers=(1, 4),
    no_attention_layers=(2,), value_layers=(1, 4), table_rows=500, block_tokens=8, max_epochs=100,
    lr_matrix=0.039, lr_embed=0.0113, lr_value=0.85, lr_scalar=0.056, lr_table=1.2)


def small_config(**changes):
    """A Config of the small model; `changes` replace single values."""
    return load_train_gpt().Config(**{**SMALL, **changes})


def small_options(**changes):
    """The same as command line options over --preset=tiny."""
    def text(value):
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return ["--preset=tiny"] + [f"--{key}={text(value)}" for key, value in {**SMALL, **changes}.items()]


def small_model(**changes):
    """A GPT of small_config(**changes) on the CPU, initialised as the script does it."""
    torch.manual_seed(0)
    return load_train_gpt().GPT(small_config(**changes))


@torch.no_grad()
def randomise(model, seed=1):
    """Fill every parameter, in place and in order of names: matrices near 1 / sqrt(fan in), the embedding too (it is
    read normed, and is the output head), other tables near 1, scalars near 1/2. The n-gram table's last row is
    nobody's and stays zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if name in ("value_embeds", "ngrams"):
            p.copy_(noise)
        elif p.ndim >= 2:
            p.copy_(noise * p.size(-1) ** -0.5)
        else:
            p.copy_(0.5 + 0.2 * noise)
        if name == "ngrams":
            p[-1] = 0
    return model


def random_tokens(rows, length, seed=0, vocab=EOD, every=11):
    """int32 [rows, length], with an end-of-document id at about one position in `every`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length), generator=generator, dtype=torch.int32)
    marks = torch.rand(rows, length, generator=generator) < 1 / every
    return tokens.masked_fill(marks, EOD)


def view(window=100, **more):
    """What a forward pass is asked for, with a window of so many blocks."""
    return load_train_gpt().View(window, **more)


def blocks(n):
    """A window of n blocks as masks want it."""
    return torch.full((), n, dtype=torch.int32)


def learnable_tokens(count, seed, mark_every=37):
    """uint16 tokens below EOD that a model can learn (a noisy walk), with document marks."""
    rng = np.random.default_rng(seed)
    tokens = np.cumsum(rng.choice([1, 2, 7], count)) % EOD
    tokens[rng.random(count) < 1 / mark_every] = EOD
    tokens[0] = EOD
    return tokens


def write_small_shards(folder):
    """Two training shards and a validation shard for small_config; returns the two options that point at them."""
    for name, count, seed in (("train_0", 3000, 1), ("train_1", 3001, 2), ("val_0", 1001, 3)):
        (folder / f"{name}.bin").write_bytes(raw_shard(learnable_tokens(count, seed)))
    return dict(train_files=str(folder / "train_*.bin"), val_files=str(folder / "val_*.bin"))


def small_run(files, world=None, random_weights=True, **changes):
    """A Run on the shards of write_small_shards; with random_weights no path is silent."""
    tg = load_train_gpt()
    config = small_config(**files, **changes)
    run = tg.build(config, world or tg.World(), {})
    if random_weights:
        randomise(run.model)
    return run


def small_batches(run):
    """The run's loader, as the training loop makes it."""
    tg, c = load_train_gpt(), run.config
    plan = [(tg.rows_at(c, step), tg.stage_at(c, step).max_doc_tokens) for step in range(c.num_steps)]
    return tg.batches(tg.Planner(run.train_stream, c.eod_id), plan, c.row_tokens, run.world.rank, run.world.size)


def take_step(run, step, batch):
    """train_step at the rate of the schedule."""
    tg = load_train_gpt()
    return tg.train_step(run, step, batch, tg.lr_scale_at(run.config, step))


def record_gradients(run):
    """From now on run.optimizer.step() appends {bank: this rank's shard of the summed gradients} to the result; of the
    n-gram table (all ranks' ids, this rank's columns of all gradients)."""
    kept, update = [], run.optimizer.update

    def recording(bank, lr_scale, momentum):
        if bank is run.optimizer.banks[0]:
            kept.append({})
        rows = bank.group.kind == "rows"
        kept[-1][bank.group.name] = (bank.ids.clone(), bank.grads.clone()) if rows else bank.grad_shard.clone()
        update(bank, lr_scale, momentum)
    run.optimizer.update = recording
    return kept


def by_parameter(run, shards):
    """{bank: [shard of rank 0, 1, ..]} -> {parameter: tensor}, padding left out."""
    out = {}
    for bank in run.optimizer.banks:
        if bank.group.kind == "rows":
            ids, columns = zip(*shards[bank.group.name])
            grads = torch.cat(columns, 1)[:, :bank.weight.size(1)]
            out["ngrams"] = torch.zeros(bank.weight.shape).index_add_(0, ids[0], grads)
            continue
        whole = torch.cat(shards[bank.group.name])
        out |= {name: bank.view_of(whole, name) for name in bank.slices}
    return out


def hide_gpus():
    """In a process of run_ranks: be a CPU rank on a machine with GPUs too."""
    torch.cuda.is_available = lambda: False


def without_launcher(monkeypatch):
    """No variable of a launcher in the environment, none left behind by the script, and no GPU to be seen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(key, raising=False)


def replaced(config, **changes):
    return dataclasses.replace(config, **changes)
