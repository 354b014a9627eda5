"""Tests of the fast draft: every piece against a plain reference, and the contracts of the rooms it touches.

    python -m pytest records/drafts/test_fast.py
"""
import dataclasses
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))
os.environ["TRAIN_GPT"] = str(HERE / "fast.py")      # ranks and helpers load this file too

from model_helpers import EOD, learnable_tokens, random_tokens  # noqa: E402
from rank_helpers import load_train_gpt, run_ranks  # noqa: E402
from shard_helpers import raw_shard  # noqa: E402

torch.set_num_threads(1)
tg = load_train_gpt()
SMALL = dict(       # 5 layers: long, short, none, value tables, a skip, late attention, both n-gram tables
    vocab_size=300, eod_id=EOD, num_steps=4, batch_tokens=16 * 64, row_tokens=64, micro_rows=16, pool_rows=2,
    val_tokens=500, val_row_tokens=64, val_window_blocks=8, val_every_steps=0, target_loss=0.0, model_dim=32,
    num_layers=5, num_heads=2, head_dim=16, qk_dim=8, mlp_dim=64, long_layers=(1, 4), no_attention_layers=(2,),
    value_layers=(1, 4), skip=(0, 2), late_source=2, table_rows=500, block_tokens=8, max_epochs=100)
WIDE = tg.View(100)


def small_config(**changes):
    return tg.Config(**{**SMALL, **changes})


def small_model(random_weights=True, **changes):
    config = small_config(**changes)
    torch.manual_seed(0)
    model = tg.GPT(config)
    tg.init_weights(config, model)
    return randomise(model) if random_weights else model


@torch.no_grad()
def randomise(model, seed=1):
    """No path is silent: matrices near 1 / sqrt(fan in), tables near 1, scalars near 1/2."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        scale = 1.0 if "embed" in name or name == "ngrams" else p.size(-1) ** -0.5 if p.ndim >= 2 else 0.2
        p.copy_(noise * scale + (0.5 if p.ndim < 2 else 0.0))
        if name == "ngrams":
            p[-1] = 0                                     # nobody's row
    return model


def logits(model, tokens, view=WIDE):
    with torch.no_grad():
        return model(tokens, None, view)


# ---- sampled softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", (128, 256, 384))
@pytest.mark.parametrize("start", (0, 5, 100_000))
def test_candidates_are_all_targets_then_negatives_each_once(count, start):
    targets = torch.randint(0, 384, (3, 40), dtype=torch.int32)
    targets[1:, ::5] = -1
    ids, columns, n = tg.candidate_set(targets, 384, count, start)
    wanted = targets[targets >= 0].unique().long()
    assert ids.shape == (count,) and len(ids.unique()) == count and int(n) == len(wanted)
    assert set(ids[:int(n)].tolist()) == set(wanted.tolist())
    assert torch.equal(ids[columns[ids]], ids) and int((columns >= 0).sum()) == count
    walk = [(start + j) * 20_011 % 384 for j in range(384)]
    others = [i for i in walk if i not in set(wanted.tolist())]
    assert ids[int(n):].tolist() == others[:count - int(n)]


def test_too_many_targets_leave_some_out_and_never_repeat():
    ids, columns, n = tg.candidate_set(torch.arange(300)[None], 384, 128, 7)
    assert len(ids.unique()) == 128 and int(n) == 300 and int((columns >= 0).sum()) == 128 and bool((ids < 300).all())


def loss_and_gradients(model, tokens, targets, view):
    model.zero_grad()
    loss = model(tokens, targets, view)
    loss.backward()
    model.ngrams.touched.clear()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("correction", (0.0, 1.0))
def test_a_sample_of_the_whole_vocabulary_is_the_full_softmax(correction):
    model = small_model(negatives_correction=correction)
    tokens, targets = random_tokens(4, 64), random_tokens(4, 64, seed=5)
    view = tg.View(4, weights=(1.0, 0.5, 0.25))
    full, wanted = loss_and_gradients(model, tokens, targets, view)
    sampled, found = loss_and_gradients(model, tokens, targets, view._replace(candidates=384, pool=3))
    assert sampled == pytest.approx(full, rel=1e-6)
    for name, g in wanted.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max() + 1))


def test_the_correction_makes_the_normaliser_right_on_average():
    """Mean of the corrected sum of exponentials over all starts of the walk = the sum over the vocabulary."""
    z, targets = torch.randn(384), torch.tensor([3, 4, 5, 200])
    sums = []
    for start in range(384):
        ids, _, n = tg.candidate_set(targets, 384, 128, start)
        bias = torch.where(torch.arange(128) < n, 0.0, math.log((384 - int(n)) / (128 - int(n))))
        sums.append(float((z[ids] + bias).exp().sum()))
    assert sum(sums) / 384 == pytest.approx(float(z.exp().sum()), rel=0.01)


def test_gradients_in_one_go_are_those_of_autograd():
    torch.manual_seed(0)
    x, w = torch.randn(50, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    bias, targets = torch.rand(40), torch.randint(-1, 40, (3, 50), dtype=torch.int32)
    weights = tuple(map(torch.tensor, (1.0, 0.5, 0.25)))
    squash = tg.Squash(23.0, 5.0, 7.5)
    loss = tg.further_cross_entropy(F.linear(x, w), bias, targets, weights, squash)
    loss.backward()
    for run in (tg.head_gradients, None):
        if run is None:
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            found = tg.HeadLoss.apply(a, b, bias, targets, weights, squash, False, tg.head_gradients)
            found.backward()
            found = found, a.grad, b.grad
        else:
            found = run(x.detach(), w.detach(), bias, targets, weights, squash, False)
        for one, other in zip(found, (loss, x.grad, w.grad)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_loss_at_init_is_that_of_a_uniform_guess():
    model, tokens = small_model(False), random_tokens(4, 64)
    targets = tokens.roll(-1, 1)
    for training in (True, False):
        loss = model.train(training)(tokens, targets, tg.View(4)).item()
        assert loss / 256 == pytest.approx(math.log(384), rel=1e-6)


def test_further_targets_end_with_the_segment():
    tokens = torch.tensor([[EOD, 1, 2, EOD, 3, 4, 5, 6]], dtype=torch.int32)
    targets = torch.tensor([[1, 2, EOD, 3, 4, 5, 6, 7]], dtype=torch.int32)
    rows = tg.further_targets(targets, tg.segment_ids(tokens, EOD), 3)[:, 0]
    assert torch.equal(rows[0], targets[0])
    assert rows[1].tolist() == [2, EOD, -1, 4, 5, 6, 7, -1]       # the successor of a segment's last token counts
    assert rows[2].tolist() == [EOD, -1, -1, 5, 6, 7, -1, -1]


# ---- hashed n-gram rows ----------------------------------------------------------------------------------------------


def test_ngram_ids_depend_on_the_last_n_tokens_of_the_document_alone():
    tokens = random_tokens(3, 64, every=9)
    ids, signs = tg.ngram_ids(tokens, tg.segment_ids(tokens, EOD), (2, 3), 500)
    segments = (tokens == EOD).cumsum(1)
    seen = {}
    for j, order in enumerate((2, 3)):
        for b in range(3):
            for t in range(64):
                if t < order - 1 or segments[b, t - order + 1] != segments[b, t]:
                    assert ids[j, b, t] == 1000
                else:
                    assert j * 500 <= ids[j, b, t] < (j + 1) * 500
                    key, found = (j, *tokens[b, t - order + 1:t + 1].tolist()), (int(ids[j, b, t]), int(signs[j, b, t]))
                    assert seen.setdefault(key, found) == found
    assert len({v for v in seen.values()}) > 0.9 * len(seen)


def test_merged_rows_are_distinct_ids_and_their_sums():
    torch.manual_seed(0)
    ids, grads = torch.randint(0, 20, (100,)), torch.randn(100, 8)
    distinct, sums = tg.merge_rows(ids, grads, 50)
    assert distinct.shape == (100,) and sums.shape == (100, 8)
    wanted = torch.zeros(51, 8).index_add_(0, ids, grads)
    n = len(ids.unique())
    assert distinct[:n].tolist() == sorted(set(ids.tolist())) and bool((distinct[n:] == 50).all())
    torch.testing.assert_close(sums[:n], wanted[distinct[:n]])
    assert not sums[n:].any()


def test_the_row_optimizer_is_a_dense_one_that_skips_untouched_rows():
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(31, 8), requires_grad=False)
    with torch.no_grad():
        table[-1] = 0
    table.touched = []
    group = tg.Group("table", "rows", {"table": table}, lr=0.1, betas=(0.0, 0.9), eps=1e-15, decay=3.0)
    optimizer = tg.Optimizer([group], tg.World(), False, torch.float32)
    weight, second, seen = table.detach().clone().double(), torch.zeros(31).double(), torch.zeros(31)
    for step in range(1, 5):
        gradient = torch.zeros(31, 8).double()
        for _ in range(2):                                             # two micro-steps
            ids = torch.randint(0, 31, (2, 6))
            rows = F.embedding(ids, table).requires_grad_()
            factor = torch.randn_like(rows)
            (rows * factor).sum().backward()
            table.touched.append((ids, rows))
            gradient.index_add_(0, ids.flatten(), factor.flatten(0, 1).double())
        optimizer.step(0.5, 0.9)
        touched = gradient.abs().sum(1) > 0
        touched[-1] = False
        second = torch.where(touched, second * 0.9 ** (step - seen) + 0.1 * gradient.square().mean(1), second)
        move = 0.05 * gradient / second.clamp(min=1e-30).sqrt()[:, None]
        move += 3.0 * 0.05 ** 2 * weight * (move * weight > 0)
        weight = torch.where(touched[:, None], weight - move, weight)
        seen = torch.where(touched, torch.tensor(float(step)), seen)
        torch.testing.assert_close(table.data.double(), weight, rtol=1e-5, atol=1e-6)
        assert not table.touched and not table[-1].any()


def test_nobodys_row_stays_zero_even_without_free_slots():
    """A free slot would write the old value over it: with as many distinct ids as slots, nothing hides an update."""
    table = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    table.touched = []
    optimizer = tg.Optimizer([tg.Group("table", "rows", {"table": table}, 0.1)], tg.World(), False, torch.float32)
    rows = F.embedding(torch.arange(8), table).requires_grad_()
    rows.sum().backward()
    table.touched.append((torch.arange(8), rows))
    optimizer.step(1.0, 0.9)
    assert table[:7].all() and not table[7].any()


def test_rows_that_nobody_touched_keep_their_bits():
    run = small_run(DATA, random_weights=True)
    before = run.model.ngrams.detach().clone()
    loader = small_batches(run)
    batch = next(loader)
    ids, _ = tg.ngram_ids(batch.inputs, tg.segment_ids(batch.inputs, EOD), (2, 3), 500)
    tg.train_step(run, 0, batch)
    loader.close()
    changed = (run.model.ngrams != before).any(1)
    assert set(changed.nonzero().flatten().tolist()) == set(ids.unique().tolist()) - {1000}


# ---- dense rules -----------------------------------------------------------------------------------------------------


def test_polar_express_ends_near_one_for_any_size():
    torch.manual_seed(0)
    for shape in ((2, 12, 24), (1, 48, 16), (1, 16, 48)):       # a square one has a direction near zero
        G = torch.randn(shape)
        for size in (1.0, 1e-9):
            values = torch.linalg.svdvals(tg.orthogonalize(G * size, torch.float32))
            assert 0.6 < float(values.min()) and float(values.max()) < 1.25


@pytest.mark.parametrize("shape", ((2, 12, 6), (2, 6, 12), (2, 8, 8)))
def test_normuon_is_its_formula(shape):
    torch.manual_seed(0)
    R, C = shape[1:]
    weight, buffer = torch.randn(shape), torch.randn(shape) * 0.1
    second = torch.rand(2, R, 1) if R >= C else torch.rand(2, 1, C)
    w, m, v, g = (t.clone() for t in (weight, buffer, second, torch.randn(shape)))
    scalar = torch.tensor
    tg.muon_update(weight, g, buffer, second, scalar(0.02), scalar(0.9), scalar(0.8), scalar(1.5), torch.float32)
    m = 0.9 * m + 0.1 * g
    update = tg.orthogonalize(0.1 * g + 0.9 * m, torch.float32)
    v = 0.8 * v + 0.2 * (update ** 2).mean(2 if R >= C else 1, keepdim=True)
    scaled = update / v.sqrt()
    for i in range(2):
        scaled[i] *= update[i].norm() / scaled[i].norm()
    rate = 0.02 * max(1, R / C) ** 0.5
    decayed = torch.where(scaled * w > 0, w * 1.5 * 0.02 * rate, 0)
    torch.testing.assert_close(weight, w - rate * scaled - decayed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buffer, m)
    torch.testing.assert_close(second, v)


def test_adam_decays_only_where_the_step_shrinks_the_weight():
    weight = torch.tensor([1.0, -1.0, 2.0])
    zero = torch.zeros(3)
    scalars = [torch.tensor(t) for t in (0.1, 1 - 0.5, 1 - 0.9, 0.5, 0.9, 1e-10, 2.0)]
    tg.adam_update(weight, torch.tensor([1.0, 1.0, -1.0]), zero.clone(), zero.clone(), *scalars)
    torch.testing.assert_close(weight, torch.tensor([1.0 - 0.1 - 2 * 0.01, -1.0 - 0.1, 2.0 + 0.1]))


def test_a_bank_that_waits_uses_the_gradients_of_all_its_steps():
    p = torch.nn.Parameter(torch.ones(4))
    group = tg.Group("slow", "adam", {"p": p}, 0.1, (0.0, 0.0), every=2)
    optimizer = tg.Optimizer([group], tg.World(), False, torch.float32)
    p.grad += 1.0
    assert not optimizer.step(1.0, 0.9).any()
    assert torch.equal(p.detach(), torch.ones(4))
    p.grad += 2.0
    assert float(optimizer.step(1.0, 0.9)) == 4 * 9
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.9))
    assert not p.grad.any()


def test_the_tail_blends_an_average_and_keeps_the_norm():
    torch.manual_seed(0)
    matrix, flat, plain = (torch.nn.Parameter(torch.randn(s)) for s in ((2, 4, 6), (10,), (5,)))
    groups = [tg.Group("m", "muon", {"m": matrix}, 0.1, tail=True), tg.Group("f", "adam", {"f": flat}, 0.1, tail=True),
              tg.Group("p", "adam", {"p": plain}, 0.1)]
    optimizer = tg.Optimizer(groups, tg.World(), False, torch.float32)
    first = [p.detach().clone() for p in (matrix, flat)]
    optimizer.average(1.0)
    for p in (matrix, flat, plain):
        p.data += torch.randn_like(p)
    last = [p.detach().clone() for p in (matrix, flat, plain)]
    optimizer.average(0.25, 0.5)
    for i, p in enumerate((matrix, flat)):
        mixed = 0.5 * last[i] + 0.5 * (0.75 * first[i] + 0.25 * last[i])
        dims = (1, 2) if i == 0 else (0,)
        mixed *= last[i].norm(dim=dims, keepdim=True) / mixed.norm(dim=dims, keepdim=True)
        torch.testing.assert_close(p.detach(), mixed)
    assert torch.equal(plain.detach(), last[2])


def test_tables_are_never_averaged():
    config = small_config()
    tails = {name for name, rule in tg.rules(config).items() if rule["tail"]}
    assert tails == {"embed", "head", "qk", "value_out", "mlp_up", "mlp_down"}


# ---- model -----------------------------------------------------------------------------------------------------------


def test_nothing_sees_the_future_another_document_or_another_row():
    model, tokens = small_model(), random_tokens(3, 64, every=12)
    tokens[:, 0] = torch.tensor([EOD, 5, EOD])
    for row, at in [(0, 1), (0, 30), (2, 20)] + [(1, at) for at in range(64)]:      # a document's last token among them
        if int(tokens[row, at]) == EOD:
            continue
        segments = (tokens == EOD).cumsum(1)
        other = tokens.clone()
        other[row, at] = (int(tokens[row, at]) + 1) % EOD
        moved = (logits(model, tokens) - logits(model, other)).abs().amax(-1) > 1e-7
        allowed = torch.zeros_like(moved)
        allowed[row, at:] = segments[row, at:] == segments[row, at]
        assert torch.equal(moved, allowed)                             # and everything allowed is really seen


@pytest.mark.parametrize("window", (1, 2, 3, 7))
def test_windows_limit_the_view_by_blocks_and_short_layers_see_half(window):
    """One attention layer, so that its reach (and one token of key offset in a long one) is the model's."""
    for long_layers, reach in (((1,), window), ((), max(1, window // 2))):
        model = small_model(num_layers=2, no_attention_layers=(0,), long_layers=long_layers, value_layers=(), skip=(),
                            late_source=0, table_rows=0)
        tokens = random_tokens(1, 64, every=10 ** 9)
        with torch.no_grad():
            model.smear.zero_()
        other = tokens.clone()
        other[0, 9] = (int(tokens[0, 9]) + 1) % EOD
        one, two = (logits(model, t, tg.View(window)) for t in (tokens, other))
        moved = ((one - two).abs().amax(-1) > 1e-7)[0]
        last = min(64, 8 * (1 + reach))
        assert bool(moved[9:last].all()) and not bool(moved[last:].any()) and not bool(moved[:9].any())


def test_gates_begin_neutral():
    """At init, attention is softmax(qk) v with the whole value embedding, no own-value correction, no output gate."""
    model = small_model(False)
    block, c = model.blocks[1], model.config
    x, ve = torch.randn(1, 16, 32), torch.randn(1, 16, 32)
    segments = torch.zeros(1, 16, dtype=torch.int32)
    mask = model.masks(segments, 100)["short"]
    tables = tg.rotary_tables(16, c.qk_dim, c.rotary_base, 24, 1.0, x)
    with torch.no_grad():
        found = block.attention(x, ve, mask, tables)
        q, k = F.linear(x, block.attention.qk.flatten(0, 1)).view(1, 16, 2, 2, 8).unbind(2)
        v = 0.5 * F.linear(x, block.attention.value).view(1, 16, 2, 16) + ve.view(1, 16, 2, 16)
        q, k = (tg.rotate(tg.norm(t), tables) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=0.1)
        torch.testing.assert_close(found, y.transpose(1, 2).flatten(2) @ block.attention.out, rtol=1e-4, atol=1e-5)
    gates = [name for name, p in model.named_parameters() if name.endswith("gates") and p.any()]
    assert not gates and not model.smear.any()


@pytest.mark.parametrize("name", ("smear", "skip_weights", "ngram_mix", "gates", "value_gates", "skip_gates", "ngrams",
                                  "value_embeds", "scales", "mix", "smear_gates"))
def test_every_piece_matters(name):
    model, tokens = small_model(), random_tokens(1, 64)
    before = logits(model, tokens)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if parameter.split(".")[-1] == name:
                p.add_(0.3 * torch.randn(p.shape))
    assert (logits(model, tokens) - before).abs().max() > 1e-3


def test_long_layers_take_half_of_each_key_from_the_token_before():
    model = small_model()
    tokens = torch.tensor([[EOD, 1, 2, EOD, 3, 4, 5, 6]], dtype=torch.int32)
    masks = model.masks(tg.segment_ids(tokens, EOD), 2)
    assert masks["long"].previous_BT.tolist() == [[False, True, True, False, True, True, True, True]]
    assert not masks["short"].previous_BT.any()


def test_late_attention_reads_one_layer():
    table = tg.layer_table(tg.Config())
    assert [row.source for row in table] == [None] * 8 + [7] * 3
    assert [row.value_table for row in table] == [None, 0, 1, None, None, None, None, None, 2, 3, 4]
    kinds = ["short"] * 3 + ["long"] + ["short"] * 2 + [None] + ["short"] * 3 + ["long"]
    assert [row.attention for row in table] == kinds
    assert [row.skip_from for row in table] == [None] * 6 + [3] + [None] * 4


def test_few_kinds_of_blocks_are_compiled():
    """A kind is what makes a graph of its own: attention or not, value embedding or not."""
    kinds = {(row.attention is not None, row.value_table is not None) for row in tg.layer_table(tg.Config())}
    assert len(kinds) == 3


def test_rotary_tables_stretch_slow_frequencies_only():
    like = torch.zeros(1)
    plain = tg.rotary_tables(2048, 128, 1024.0, 384, 1.0, like)
    angle = torch.arange(2048)[:, None] * torch.tensor([1024 ** (-i / 31) for i in range(32)])
    torch.testing.assert_close(plain[0][:, 0, :32], angle.cos(), rtol=0, atol=2e-4)
    assert torch.equal(plain[0][:, 0, 32:], torch.ones(2048, 32))
    cos, sin = tg.rotary_tables(2048, 128, 1024.0, 384, 4.0, like)
    size = (1 + 0.2 * math.log(4)) ** 0.5
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, size ** 2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.atan2(sin, cos)[1, 0, [0, 31]],
                               torch.tensor([1.0, 1 / 1024 / 4]), rtol=0.02, atol=1e-6)


def test_all_parameters_have_one_family_and_banks_have_rules():
    config, model = small_config(), small_model(False)
    names = [name for _, params in tg.claimed(config, model) for name in params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {family.bank for family in tg.families()} == set(tg.rules(config))


@pytest.mark.parametrize("changes", (dict(table_rows=0), dict(value_layers=()), dict(skip=()), dict(qk_dim=16),
                                     dict(table_orders=(2,)), dict(late_source=4), dict(num_heads=1, head_dim=32)))
def test_pieces_can_be_taken_out_by_a_number(changes):
    run = small_run(DATA, random_weights=False, **changes)
    loader = small_batches(run)
    assert math.isfinite(float(tg.train_step(run, 0, next(loader))[0]))
    loader.close()


# ---- schedules -------------------------------------------------------------------------------------------------------


def test_the_sprint_takes_about_71_million_tokens_in_three_sizes_of_steps():
    c = tg.Config(**{"preset": "sprint", **tg.PRESETS["sprint"]})
    rows = [tg.rows_at(c, step) for step in range(c.num_steps)]
    assert sorted(set(rows)) == [4, 8, 16] and 70e6 < sum(rows) * c.row_tokens < 72e6
    assert tg.candidates_at(c, 0) == 10_112 and tg.candidates_at(c, c.num_steps - 1) == 0
    full = sum(n for step, n in enumerate(rows) if not tg.candidates_at(c, step)) / sum(rows)
    assert 0.08 < full < 0.15
    assert tg.target_weights_at(c, 0) == (1.0, 0.5, 0.25)
    assert tg.target_weights_at(c, c.num_steps - 1) == (1.0, 0.0, 0.0)
    assert tg.lr_scale_at(c, 0) == 0.71 and tg.lr_scale_at(c, c.num_steps) == pytest.approx(1.41 * 0.3)
    assert tg.momentum_at(c, 0) == 0.85 and tg.momentum_at(c, 300) == pytest.approx(0.95)
    assert tg.momentum_at(c, c.num_steps) == pytest.approx(0.85)


def test_the_tail_begins_with_a_copy_and_has_a_third_of_its_length_as_time_constant():
    c = tg.Config(num_steps=400)
    rates = [tg.tail_rate_at(c, step) for step in range(400)]
    assert rates[:299] == [0.0] * 299 and rates[299] == 1.0 and rates[300:] == [3 / 100] * 100
    assert not any(tg.tail_rate_at(dataclasses.replace(c, tail_blend=0.0), step) for step in range(400))


# ---- ranks, memory, warm-up ------------------------------------------------------------------------------------------


DATA = {}


@pytest.fixture(autouse=True, scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, count, seed in (("train_0", 3000, 1), ("train_1", 3001, 2), ("val_0", 1001, 3)):
        (folder / f"{name}.bin").write_bytes(raw_shard(learnable_tokens(count, seed)))
    DATA.update(train_files=str(folder / "train_*.bin"), val_files=str(folder / "val_*.bin"))


def small_run(files, world=None, random_weights=True, **changes):
    run = tg.build(small_config(**files, **changes), world or tg.World(), {})
    if random_weights:
        randomise(run.model)
    return run


def small_batches(run):
    c = run.config
    plan = [(tg.rows_at(c, step), tg.stage_at(c, step)[0].max_doc_tokens) for step in range(c.num_steps)]
    return tg.batches(tg.Planner(run.train_stream, c.eod_id), plan, c.row_tokens, run.world.rank, run.world.size)


def train_losses(rank, size, files, changes):
    """(losses of 4 steps and of validation, the n-gram table) of one rank."""
    torch.cuda.is_available = lambda: False
    world = tg.init_world() if size > 1 else tg.World()
    run = small_run(files, world, random_weights=True, **changes)
    losses = [float(tg.train_step(run, step, batch)[0]) for step, batch in enumerate(small_batches(run))]
    return losses + [tg.evaluate(run, 4)], run.model.ngrams.detach().numpy()


def test_micro_batches_do_not_change_the_curve():
    whole, table = train_losses(0, 1, DATA, {})
    parts, other = train_losses(0, 1, DATA, dict(micro_rows=2))
    assert parts == pytest.approx(whole, abs=1e-5)
    torch.testing.assert_close(torch.from_numpy(other), torch.from_numpy(table), rtol=0, atol=0.2)


def test_two_ranks_do_what_one_does_and_their_tables_are_equal_bit_for_bit():
    whole, _ = train_losses(0, 1, DATA, {})
    (first, table), (second, other) = run_ranks(2, train_losses, dict(DATA), dict(micro_rows=4))
    assert first == second and first == pytest.approx(whole, abs=1e-5)
    assert (table == other).all()


def test_pools_must_be_whole():
    with pytest.raises(tg.Refusal, match="pool"):
        tg.build(small_config(**DATA, batch_tokens=4 * 64), tg.World(), {})


def test_warm_up_restores_every_byte(tmp_path):
    run = small_run(DATA)
    before = {name: t.clone() for name, t in run.optimizer.tensors().items()}
    log = tg.RunLog(str(tmp_path), tg.World(), console=False)
    tg.warmup(run, log)
    log.close()
    after = run.optimizer.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before) and not run.model.ngrams.touched
    assert all(bank.steps == 0 for bank in run.optimizer.banks)


def test_the_demo_learns_to_the_end(tmp_path):
    log = tg.RunLog(str(tmp_path), tg.World(), console=False)
    config = small_config(**DATA, vocab_size=61, num_steps=30)
    result = tg.train(config, tg.World(), log, {}, [])
    log.close()
    assert result["val_loss"] < 3.4 < math.log(61)
    assert re.search(r"step:30/30 val_loss", log.path.read_text())
