"""Room 5: what each position may see, that each technique of the model matters, the tables of layers and parameters.

Every test of visibility fills all weights first: a fresh model is zero in its output projections and could hide a leak.
"""
import math

import pytest
import torch
import torch.nn.functional as F
from model_helpers import EOD, blocks, random_tokens, randomise, small_config, small_model
from torch import nn

WIDE = blocks(100)


def logits(model, tokens, window=WIDE):
    with torch.no_grad():
        return model(tokens, None, window)


def changed_positions(model, tokens, at, window=WIDE, row=0):
    """Positions [rows, T] whose logits move when the token at `at` of `row` changes (no mark either way)."""
    other = tokens.clone()
    other[row, at] = (int(tokens[row, at]) + 1) % EOD
    assert EOD not in (int(tokens[row, at]), int(other[row, at]))
    moved = (logits(model, tokens, window) - logits(model, other, window)).abs().amax(-1)
    return moved > 1e-7


# ---- who sees whom ---------------------------------------------------------------------------------------------------


def test_nothing_sees_the_future_another_document_or_another_row():
    model, tokens = randomise(small_model()), random_tokens(3, 64, every=12)
    tokens[:, 0] = torch.tensor([EOD, 5, EOD])
    segments = (tokens == EOD).cumsum(1)
    for row, at in ((0, 1), (0, 30), (1, 0), (1, 63), (2, 20)):
        if int(tokens[row, at]) == EOD:
            tokens[row, at] = 7
            segments = (tokens == EOD).cumsum(1)
        moved = changed_positions(model, tokens, at, row=row)
        allowed = torch.zeros_like(moved)
        allowed[row, at:] = segments[row, at:] == segments[row, at]
        assert not bool((moved & ~allowed).any())
        assert bool(moved[row, at])
        assert torch.equal(moved, allowed)                       # and everything allowed is really seen


def test_a_document_mark_belongs_to_the_document_that_it_opens():
    model, tokens = randomise(small_model()), random_tokens(1, 64, every=10 ** 9)
    tokens[0, 20] = EOD
    other = tokens.clone()
    other[0, 20] = 3
    moved = (logits(model, tokens) - logits(model, other)).abs().amax(-1)[0] > 1e-7
    assert not bool(moved[:20].any()) and bool(moved[20:].all())


def test_rows_give_the_same_whatever_stands_beside_them():
    model, tokens = randomise(small_model()), random_tokens(4, 64)
    together = logits(model, tokens)
    for row in range(4):
        torch.testing.assert_close(together[row:row + 1], logits(model, tokens[row:row + 1]), rtol=0, atol=1e-5)


def test_the_window_limits_the_view_by_blocks():
    """One attention layer, so that its reach is the model's: n blocks, the own one included."""
    model = randomise(small_model(num_layers=2, no_attention_layers=(1,), long_layers=(0,), num_value_tables=0))
    tokens = random_tokens(1, 64, every=10 ** 9)
    for window in (1, 2, 5):
        moved = changed_positions(model, tokens, 9, blocks(window))[0]
        last = min(64, 8 * (9 // 8 + window))                    # end of the last block that still sees block 1
        assert bool(moved[9:last].all()) and not bool(moved[last:].any()) and not bool(moved[:9].any())


def test_short_layers_see_half_of_the_window_and_at_least_one_block():
    model = randomise(small_model(num_layers=2, no_attention_layers=(1,), long_layers=(), num_value_tables=0))
    tokens = random_tokens(1, 64, every=10 ** 9)
    for window, half in ((1, 1), (2, 1), (3, 1), (4, 2), (6, 3)):
        moved = changed_positions(model, tokens, 9, blocks(window))[0]
        last = 8 * (1 + half)
        assert bool(moved[9:last].all()) and not bool(moved[last:].any())


# ---- rotary ----------------------------------------------------------------------------------------------------------


def test_rotary_turns_the_lower_half_of_the_pairs_by_geometric_frequencies(tg):
    cos, sin = tg.rotary_tables(16, 128, 1024.0, torch.zeros(1))
    frequencies = [1024 ** (-i / 31) for i in range(32)] + [0.0] * 32
    angle = torch.arange(16).double()[:, None] * torch.tensor(frequencies).double()
    assert cos.shape == sin.shape == (16, 1, 64)
    torch.testing.assert_close(cos[:, 0].double(), angle.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[:, 0].double(), angle.sin(), rtol=0, atol=1e-5)
    x = torch.randn(1, 16, 2, 128)
    y = tg.rotate(x, (cos, sin))
    for j in (0, 5, 31, 40):                    # pair (j, j + 64) as a complex number, turned clockwise
        pair = torch.complex(x[..., j], x[..., j + 64]) * torch.polar(torch.ones(16), -angle[:, j].float())[:, None]
        torch.testing.assert_close(torch.complex(y[..., j], y[..., j + 64]), pair, rtol=0, atol=1e-5)
    assert torch.equal(y[..., 32:64], x[..., 32:64]) and torch.equal(y[..., 96:], x[..., 96:])     # half-truncated


def test_rotary_makes_scores_depend_on_distance_alone(tg):
    tables = tg.rotary_tables(40, 16, 1024.0, torch.zeros(1))
    q, k = (torch.randn(16).expand(1, 40, 1, 16) for _ in range(2))
    scores = tg.rotate(q, tables)[0, :, 0] @ tg.rotate(k, tables)[0, :, 0].T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        assert diagonal.max() - diagonal.min() < 1e-4
    assert scores.diagonal(-1)[0] != pytest.approx(float(scores.diagonal(-7)[0]), abs=1e-3)


def test_rotary_tables_are_cached_in_the_precision_of_the_weights(tg):
    cos, sin = tg.rotary_tables(8, 16, 1024.0, torch.zeros(1, dtype=torch.bfloat16))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert tg.rotate(torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16), (cos, sin)).dtype == torch.bfloat16
    model = small_model()
    first = logits(model, random_tokens(1, 64))
    kept = model.rotary[64]
    assert torch.equal(first, logits(model, random_tokens(1, 64))) and model.rotary[64] is kept
    assert list(model.rotary) == [64]


def test_positions_restart_at_every_row_and_order_within_a_row_matters():
    model, tokens = randomise(small_model()), random_tokens(1, 64, every=10 ** 9)
    twice = logits(model, tokens.repeat(2, 1))
    torch.testing.assert_close(twice[0], twice[1], rtol=0, atol=1e-5)
    swapped = tokens.clone()
    swapped[0, [3, 4]] = tokens[0, [4, 3]]
    assert int(tokens[0, 3]) != int(tokens[0, 4])
    assert (logits(model, tokens) - logits(model, swapped))[0, 20:].abs().max() > 1e-4


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_by_hand(layer, x, ve, mask, tables, c, qk_norm=True, scale=None):
    """One head at a time, from the separate Q, K and V thirds of the merged weight."""
    B, T, _ = x.shape
    q, k, v = (F.linear(x, w).view(B, T, c.num_heads, c.head_dim) for w in layer.qkv)
    if qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + torch.finfo(t.dtype).eps).sqrt() for t in (q, k))
    cos, sin = tables

    def turn(t):
        a, b = t[..., :c.head_dim // 2], t[..., c.head_dim // 2:]
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)
    q, k = turn(q), turn(k)
    v = layer.value_mix[0] * v
    if ve is not None:
        v = v + layer.value_mix[1] * ve.view_as(v)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (c.attention_scale if scale is None else scale)
    y = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)
    return F.linear(y.reshape(B, T, -1), layer.out)


@pytest.mark.parametrize("with_ve", [True, False])
def test_attention_is_merged_qkv_qk_norm_rotary_and_scale_012(tg, with_ve):
    c = small_config()
    layer = randomise(tg.Attention(c, tg.Layer("long", 0 if with_ve else None, None), torch.float32))
    assert layer.qkv.shape == (3, c.num_heads * c.head_dim, c.model_dim) and c.attention_scale == 0.12
    x = torch.randn(2, 32, c.model_dim)
    ve = torch.randn(2, 32, c.num_heads * c.head_dim) if with_ve else None
    mask = tg.dense_mask(tg.segment_ids(random_tokens(2, 32), EOD), blocks(3), 8)
    tables = tg.rotary_tables(32, c.head_dim, c.rotary_base, x)
    with torch.no_grad():
        got, dense = layer(x, ve, mask, tables), mask.dense
        torch.testing.assert_close(got, attention_by_hand(layer, x, ve, dense, tables, c), rtol=0, atol=1e-5)
        for other in (dict(qk_norm=False), dict(scale=c.head_dim ** -0.5)):       # it would show
            assert (got - attention_by_hand(layer, x, ve, dense, tables, c, **other)).abs().max() > 1e-3


def test_qk_norm_makes_attention_blind_to_the_size_of_queries_and_keys(tg):
    model, tokens = randomise(small_model()), random_tokens(1, 64)
    before = logits(model, tokens)
    with torch.no_grad():
        for block in model.blocks:
            if block.attention is not None:
                block.attention.qkv[:2] *= 7.0
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=2e-4)


# ---- shortcuts -------------------------------------------------------------------------------------------------------


def test_every_scalar_changes_what_the_model_says():
    """x0 injection, value embeddings and U-net skips are live in every layer that has them."""
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    before, scalars = logits(model, tokens), []
    for name, p in model.named_parameters():
        if p.ndim > 1:
            continue
        for i in range(p.numel()):
            if name == "blocks.0.mix":
                continue                        # there x is x0: both scalars are only a factor
            with torch.no_grad():
                p.view(-1)[i] += 0.25
                assert (logits(model, tokens) - before).abs().max() > 1e-4, (name, i)
                p.view(-1)[i] -= 0.25
            scalars.append(name)
    mixes, values = [n for n in scalars if n.endswith(".mix")], [n for n in scalars if n.endswith("value_mix")]
    assert len(mixes) == 10 and len(values) == 4 * 2 + 1         # layer 3 has no attention, layer 2 no table
    assert [n for n in scalars if n.endswith("skip_weight")] == [f"blocks.{i}.skip_weight" for i in (3, 4, 5)]


def test_each_table_and_matrix_changes_what_the_model_says():
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    before = logits(model, tokens)
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        saved = p.detach().clone()
        with torch.no_grad():
            p.add_(0.3 * torch.randn(p.shape, generator=generator) * (1 if "embed" in name else p.size(-1) ** -0.5))
            assert (logits(model, tokens) - before).abs().max() > 1e-3, name
            p.copy_(saved)


def test_the_forward_pass_is_the_stated_formula(tg):
    """The whole network again, in plain words: embeddings, skips, x0, value tables, blocks, norm, head, softcap."""
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    c, table = model.config, tg.layer_table(model.config)
    segments = tg.segment_ids(tokens, EOD)
    masks = {"long": tg.dense_mask(segments, blocks(4), 8).dense, "short": tg.dense_mask(segments, blocks(2), 8).dense}
    rotary = tg.rotary_tables(64, c.head_dim, c.rotary_base, model.embed)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    with torch.no_grad():
        bigrams, trigrams = tg.ngram_ids(tokens, segments, c.ngram_rows, EOD)
        x0 = rms(model.embed[tokens.long()] + model.ngrams[0][bigrams] + model.ngrams[1][trigrams])
        x, outputs = x0, []
        for layer, block in zip(table, model.blocks):
            if layer.skip_from is not None:
                x = x + block.skip_weight * outputs[layer.skip_from]
            x = block.mix[0] * x + block.mix[1] * x0
            if layer.attention:
                ve = None if layer.value_table is None else model.value_embeds[layer.value_table][tokens.long()]
                x = x + attention_by_hand(block.attention, rms(x), ve, masks[layer.attention], rotary, c)
            x = x + (rms(x) @ block.mlp.up.T).clamp(min=0) ** 2 @ block.mlp.down.T           # ReLU^2
            outputs.append(x)
        z = rms(x) @ model.head.T
        wanted = 15 * torch.tanh(z / 15)
    torch.testing.assert_close(logits(model, tokens, blocks(4)), wanted, rtol=0, atol=1e-4)
    targets = random_tokens(2, 64, seed=4)
    targets[0, :5] = -1
    loss = F.cross_entropy(wanted.flatten(0, 1), targets.flatten().long(), ignore_index=-1, reduction="sum")
    with torch.no_grad():
        assert float(model(tokens, targets, blocks(4))) == pytest.approx(float(loss), rel=1e-5)


def test_training_with_the_fused_head_gives_the_gradients_of_the_plain_one(tg):
    """The path of a GPU, uncompiled: HeadLoss over head_gradients instead of plain_loss."""
    model, tokens, targets = randomise(small_model()), random_tokens(2, 64), random_tokens(2, 64, seed=4)
    found = []
    for fused in (False, True):
        model.kernels = tg.Kernels(compile=fused)
        loss = model(tokens, targets, WIDE) / 128
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    for a, b in zip(*found):
        assert (a - b).norm() <= 2e-5 * a.norm() + 1e-9
    asked = []

    def look(x, w, targets, softcap, fp8):
        asked.append(fp8)
        return tg.head_gradients(x, w, targets, softcap, False)
    model.head_gradients = look
    for fp8 in (True, False):                   # training takes fp8 where the device has it
        model.kernels = tg.Kernels(compile=True, fp8=fp8)
        model(tokens, targets, WIDE)
    assert asked == [True, False]
    model.eval()
    model.head_gradients = None                 # evaluation uses the plain one
    assert float(model(tokens, targets, WIDE).detach() / 128) == pytest.approx(float(found[0][0]), rel=1e-6)


# ---- tables, initialisation, parameters ------------------------------------------------------------------------------


def test_the_topology_of_record_20(tg):
    table = tg.layer_table(tg.Config())
    assert [layer.attention for layer in table] == [
        "long", "short", "short", "short", "long", "short", "short", None, "short", "short", "short", "long"]
    assert [layer.value_table for layer in table] == [0, 1, 2] + [None] * 6 + [0, 1, 2]
    assert [layer.skip_from for layer in table] == [None] * 6 + [5, 4, 3, 2, 1, 0]


def test_topologies_of_other_depths_keep_the_pattern(tg):
    def table(**changes):
        return tg.layer_table(tg.Config(**{**dict(long_layers=(), no_attention_layers=()), **changes}))
    assert [layer.skip_from for layer in table(num_layers=5, num_value_tables=2)] == [None, None, None, 1, 0]
    assert [layer.value_table for layer in table(num_layers=5, num_value_tables=2)] == [0, 1, None, 0, 1]
    assert [layer.skip_from for layer in table(num_layers=1, num_value_tables=0)] == [None]
    assert [layer.value_table for layer in table(num_layers=3, num_value_tables=0)] == [None] * 3
    assert table(num_layers=4, num_value_tables=1, no_attention_layers=(0,))[0].value_table is None


@pytest.mark.parametrize("vocab, wanted", [(61, math.log(128)), (50_257, 10.8258)])
def test_the_loss_at_initialisation_is_the_log_of_the_padded_vocabulary(vocab, wanted):
    model = small_model(vocab_size=vocab)
    tokens, targets = random_tokens(1, 64), random_tokens(1, 64, seed=1)
    with torch.no_grad():
        assert float(model(tokens, targets, WIDE)) / 64 == pytest.approx(wanted, abs=5e-5)


def test_output_projections_and_head_begin_at_zero_and_the_rest_within_its_bounds():
    model = small_model(model_dim=64, mlp_dim=256)
    for name, p in model.named_parameters():
        p = p.detach()
        if name.endswith((".out", ".down", "head")) or name.startswith("ngrams"):
            assert bool((p == 0).all()), name
        elif name.endswith((".qkv", ".up")):
            bound = 3 ** 0.5 * 0.5 / p.size(-1) ** 0.5
            assert p.abs().max() <= bound and p.std() == pytest.approx(0.5 / p.size(-1) ** 0.5, rel=0.05), name
        elif "embed" in name:
            assert float(p.std()) == pytest.approx(1.0, rel=0.05) and abs(p.mean()) < 0.05, name
        elif name.endswith("value_mix"):
            assert p.tolist() == [0.5] * p.numel(), name
        elif name.endswith(".mix"):
            assert p.tolist() == [1.0, 0.0], name
        else:
            assert name.endswith("skip_weight") and float(p) == 1.0, name


def test_head_and_embedding_are_untied():
    model, tokens = randomise(small_model()), random_tokens(1, 64)
    assert model.head.untyped_storage().data_ptr() != model.embed.untyped_storage().data_ptr()
    hidden = model.hidden(tokens, WIDE)
    with torch.no_grad():
        model.head.add_(1.0)
    assert torch.equal(model.hidden(tokens, WIDE), hidden)


def test_the_embedding_is_normed_before_the_first_block():
    model, tokens = randomise(small_model()), random_tokens(1, 64)
    before = logits(model, tokens)
    with torch.no_grad():
        for table in (model.embed, *model.ngrams):
            table.mul_(10.0)
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=1e-4)


def test_every_parameter_is_claimed_once_and_routed_by_its_role(tg):
    c, model = small_config(lr_matrix=0.1, lr_embed=0.2, lr_head=0.3, lr_scalar=0.4, lr_ngram=0.5), small_model()
    groups = tg.param_groups(c, model)
    names = [name for group in groups for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        for name, p in group["params"].items():
            if name == "head":
                wanted = ("head", "adam", 0.3)
            elif name == "embed" or name.startswith("value_embeds"):
                wanted = (name.partition(".")[0], "adam", 0.2)
            elif name.startswith("ngrams"):
                wanted = ("ngrams", "adam", 0.5)
            elif p.ndim < 2:
                wanted = ("scalars", "adam", 0.4)
            else:
                wanted = (group["name"], "muon", 0.1)
            assert (group["name"], group["kind"], group["lr"]) == wanted, name
        assert group["betas"] == (c.adam_beta1, c.adam_beta2) and group["eps"] == c.adam_eps
        if group["kind"] == "muon":
            assert len({p.shape[-2:] for p in group["params"].values()}) == 1         # one batched kernel


def test_a_parameter_without_a_row_or_with_two_raises(tg, monkeypatch):
    c, model = small_config(), small_model()
    model.blocks[1].gate = nn.Parameter(torch.zeros(3))
    for use in (tg.param_groups, tg.init_weights):
        with pytest.raises(ValueError, match="blocks.1.gate has 0 rows"):
            use(c, model)
    del model.blocks[1].gate
    tg.param_groups(c, model)
    rows = tg.families(c)
    monkeypatch.setattr(tg, "families", lambda c: rows + [rows[0]._replace(pattern="head|embed")])
    with pytest.raises(ValueError, match="embed has 2 rows"):
        tg.param_groups(c, model)


def test_no_memory_grows_through_validation():
    """A forward pass without gradients leaves nothing on the model: no graph, no cache beyond one table a length."""
    import gc
    model, tokens = randomise(small_model()).eval(), random_tokens(1, 64)

    def tensors():
        with torch.no_grad():
            model(tokens, tokens, blocks(3))
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    tensors()
    assert tensors() == tensors()


# ---- generation ------------------------------------------------------------------------------------------------------


class FixedLogits:
    """Stands for a model: padded ids first by far, then ids in falling order."""

    def __init__(self, config):
        self.config, self.embed, self.calls = config, torch.zeros(1), []

    def __call__(self, row, targets, window):
        self.calls.append((row.clone(), int(window)))
        z = torch.linspace(5, 0, self.config.padded_vocab)
        z[self.config.vocab_size:] = 100
        return z.expand(*row.shape, -1)


def test_generation_never_draws_padded_ids(tg):
    model = FixedLogits(small_config(vocab_size=61))
    drawn = tg.generate(model, [EOD, 3], 60, seed=3)[2:]
    assert max(drawn) < 61 and len(set(drawn)) > 5
    assert all(window == model.config.window_tokens // model.config.block_tokens for _, window in model.calls)
    assert all(row.size(1) % 8 == 0 and row.size(1) <= 64 for row, _ in model.calls)
    assert set(tg.generate(model, [1], 40, top_k=2)[1:]) == {0, 1}
    assert tg.generate(model, [1], 5, temperature=0.0)[1:] == [0] * 5


def test_generation_reads_the_logits_of_the_last_token_and_repeats_with_its_seed(tg):
    model = randomise(small_model()).eval()
    prompt = [EOD, 5, 9]
    text = tg.generate(model, prompt, 3, temperature=0.0)
    for n in (3, 4, 5):
        row = torch.tensor([text[:n]], dtype=torch.int32)
        assert text[n] == int(logits(model, F.pad(row, (0, 8 - n), value=7))[0, n - 1, :61].argmax())
    assert tg.generate(model, prompt, 20, seed=1) == tg.generate(model, prompt, 20, seed=1)
    assert tg.generate(model, prompt, 20, seed=1) != tg.generate(model, prompt, 20, seed=2)
    assert len(tg.generate(model, prompt, 80)) == 83            # past the length of a row


def test_ngram_rows_hash_the_last_tokens_of_the_segment(tg):
    tokens = random_tokens(2, 40, vocab=4)
    segments = tg.segment_ids(tokens, EOD)
    bigrams, trigrams = tg.ngram_ids(tokens, segments, (1009, 10_007), EOD)
    for ids, length, rows in ((bigrams, 2, 1009), (trigrams, 3, 10_007)):
        assert int(ids.min()) >= 0 and int(ids.max()) < rows
        seen = {}
        for b in range(2):
            for t in range(40):
                history = tuple(int(tokens[b, t - k]) if t >= k and segments[b, t - k] == segments[b, t] else EOD
                                for k in range(length))
                assert seen.setdefault(history, int(ids[b, t])) == int(ids[b, t])       # the same tokens, the same row
        assert len(set(seen.values())) > 0.9 * len(seen)                                # other tokens, another row
