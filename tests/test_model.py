"""Room 5: what each position may see, that each technique of the model matters, the tables of layers and banks.

Every test of visibility fills all weights first: a fresh model is zero in its projections and could hide a leak.
"""
import math

import pytest
import torch
import torch.nn.functional as F
from model_helpers import EOD, blocks, random_tokens, randomise, small_config, small_model, view
from torch import nn


def logits(model, tokens, window=100):
    with torch.no_grad():
        return model(tokens, None, view(window))


def changed_positions(model, tokens, at, window=100, row=0):
    """Positions [rows, T] whose logits move when the token at `at` of `row` changes (no mark either way)."""
    other = tokens.clone()
    other[row, at] = (int(tokens[row, at]) + 1) % EOD
    assert EOD not in (int(tokens[row, at]), int(other[row, at]))
    return (logits(model, tokens, window) - logits(model, other, window)).abs().amax(-1) > 1e-7


# ---- who sees whom ---------------------------------------------------------------------------------------------------


def test_nothing_sees_the_future_another_document_or_another_row():
    model, tokens = randomise(small_model()), random_tokens(3, 64, every=12)
    tokens[:, 0] = torch.tensor([EOD, 5, EOD])
    segments = (tokens == EOD).cumsum(1)
    for row, at in [(0, 1), (0, 30), (2, 20)] + [(1, at) for at in range(64)]:      # a document's last token among them
        if int(tokens[row, at]) == EOD:
            continue
        moved = changed_positions(model, tokens, at, row=row)
        allowed = torch.zeros_like(moved)
        allowed[row, at:] = segments[row, at:] == segments[row, at]
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


@pytest.mark.parametrize("window", (1, 2, 3, 7))
def test_windows_limit_the_view_by_blocks_and_short_layers_see_half(window):
    """One attention layer, so that its reach is the model's (the key offset of one token stays within the blocks)."""
    for long_layers, reach in (((0,), window), ((), max(1, window // 2))):
        model = randomise(small_model(num_layers=1, long_layers=long_layers, value_layers=(), table_rows=1))
        with torch.no_grad():
            model.ngrams.zero_()
            model.pointer.copy_scales[1] = 100.0                 # no copies
        moved = changed_positions(model, random_tokens(1, 64, every=10 ** 9), 9, window)[0]
        last = min(64, 8 * (1 + reach))                          # end of the last block that still sees block 1
        assert bool(moved[9:last].all()) and not bool(moved[last:].any()) and not bool(moved[:9].any())


# ---- rotary ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", (1, 2, 3))
def test_probabilities_and_loss_see_the_same_window(window):
    """Copies too; and rows of another length have tables of their own."""
    model = randomise(small_model())
    for length in (64, 32):
        tokens, targets = random_tokens(2, length), random_tokens(2, length, seed=9)
        by_hand = -logits(model, tokens, window).gather(2, targets.long()[..., None]).sum()
        assert float(model(tokens, targets, view(window)).detach()) == pytest.approx(float(by_hand), rel=1e-5)


def test_rotary_turns_the_lower_half_of_the_pairs_by_geometric_frequencies(tg):
    tables = tg.rotary_tables(16, 128, torch.zeros(1))
    frequencies = [1024 ** (-i / 31) for i in range(32)] + [0.0] * 32
    angle = torch.arange(16).double()[:, None] * torch.tensor(frequencies).double()
    assert tables[0].shape == tables[1].shape == (16, 1, 128)
    for half, sign in ((slice(0, 64), 1), (slice(64, 128), -1)):
        torch.testing.assert_close(tables[0][:, 0, half].double(), angle.cos(), rtol=0, atol=1e-5)
        torch.testing.assert_close(tables[1][:, 0, half].double(), sign * angle.sin(), rtol=0, atol=1e-5)
    x = torch.randn(1, 16, 2, 128)
    y = tg.rotate(x, tables)
    for j in (0, 5, 31, 40):                    # pair (j, j + 64) as a complex number, turned clockwise
        pair = torch.complex(x[..., j], x[..., j + 64]) * torch.polar(torch.ones(16), -angle[:, j].float())[:, None]
        torch.testing.assert_close(torch.complex(y[..., j], y[..., j + 64]), pair, rtol=0, atol=1e-5)
    assert torch.equal(y[..., 32:64], x[..., 32:64]) and torch.equal(y[..., 96:], x[..., 96:])     # half-truncated


def test_rotary_makes_scores_depend_on_distance_alone(tg):
    tables = tg.rotary_tables(40, 16, torch.zeros(1))
    q, k = (torch.randn(16).expand(1, 40, 1, 16) for _ in range(2))
    scores = tg.rotate(q, tables)[0, :, 0] @ tg.rotate(k, tables)[0, :, 0].T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        assert diagonal.max() - diagonal.min() < 1e-4
    assert scores.diagonal(-1)[0] != pytest.approx(float(scores.diagonal(-7)[0]), abs=1e-3)


def test_rotary_tables_are_cached_in_the_precision_of_the_weights(tg):
    tables = tg.rotary_tables(8, 16, torch.zeros(1, dtype=torch.bfloat16))
    assert tables[0].dtype == tables[1].dtype == torch.bfloat16
    assert tg.rotate(torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16), tables).dtype == torch.bfloat16
    model, tokens = randomise(small_model()), random_tokens(1, 64)
    first = logits(model, tokens)
    kept = model.rotary[64]
    assert torch.equal(first, logits(model, tokens)) and model.rotary[64] is kept and list(model.rotary) == [64]


def test_positions_restart_at_every_row_and_order_within_a_row_matters():
    model, tokens = randomise(small_model()), random_tokens(1, 64, every=10 ** 9)
    twice = logits(model, tokens.repeat(2, 1))
    torch.testing.assert_close(twice[0], twice[1], rtol=0, atol=1e-5)
    swapped = tokens.clone()
    swapped[0, [3, 4]] = tokens[0, [4, 3]]
    assert int(tokens[0, 3]) != int(tokens[0, 4])
    assert (logits(model, tokens) - logits(model, swapped))[0, 20:].abs().max() > 1e-4


# ---- the formula -----------------------------------------------------------------------------------------------------


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def attention_by_hand(layer, x, ve, mask, previous, tables, c, qk_norm=True, scale=None):
    """The formula of one attention layer, one step at a time. mask bool [B, 1, T, T]; previous bool [B, T]."""
    B, T, _ = x.shape
    q, k = (F.linear(x, w).view(B, T, c.num_heads, c.qk_dim)
            for w in layer.qk.reshape(2, c.num_heads * c.qk_dim, c.model_dim))
    v = layer.scales[0] * F.linear(x, layer.value).view(B, T, c.num_heads, c.head_dim)
    if qk_norm:
        q, k = rms(q), rms(k)
    cos, sin = (t[..., :c.qk_dim // 2] for t in tables)

    def turn(t):
        a, b = t[..., :c.qk_dim // 2], t[..., c.qk_dim // 2:]
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)
    q, k = turn(q), turn(k)
    quarter = c.qk_dim // 4
    for b in range(B):                                           # half of each key from the token before
        for t in range(T - 1, 0, -1):
            if previous[b, t]:
                for part in (slice(quarter, 2 * quarter), slice(3 * quarter, 4 * quarter)):
                    k[b, t, :, part] = k[b, t - 1, :, part]
    if ve is not None:
        v = v + ve.view_as(v)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (c.attention_scale if scale is None else scale)
    y = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)
    y = y * 2 * (x[..., :16] @ layer.gates.T).sigmoid()[..., None]
    return y.reshape(B, T, -1) @ layer.out * layer.scales[1]


@pytest.mark.recipe
@pytest.mark.parametrize("with_ve, offset", [(True, True), (False, True), (True, False)])
def test_attention_is_its_formula(tg, with_ve, offset):
    c = small_config()
    layer = randomise(tg.Attention(c, torch.float32))
    x = torch.randn(2, 32, c.model_dim)
    ve = torch.randn(2, 32, c.num_heads * c.head_dim) if with_ve else None
    segments = tg.segment_ids(random_tokens(2, 32), EOD)
    mask = tg.dense_mask(segments, blocks(3), 8)._replace(offset_keys=torch.tensor(offset))
    tables = tg.rotary_tables(32, c.qk_dim, x)
    with torch.no_grad():
        got = layer(x, ve, mask, tables)
        told = layer, x, ve, mask.dense, tg.same_document(segments, 1) & offset, tables, c
        torch.testing.assert_close(got, attention_by_hand(*told), rtol=0, atol=1e-5)
        for other in (dict(qk_norm=False), dict(scale=0.25)):                      # it would show
            assert (got - attention_by_hand(*told, **other)).abs().max() > 1e-3


def copies_by_hand(pointer, x, tokens, mask, before, vocab):
    """Share of the softmax [B, T] and copied probability of every id [B, T, V], key by key."""
    q, k, k_before = (x @ w.T for w in pointer.copy_qk)
    older = torch.cat((torch.zeros_like(k_before[:, :1]), k_before[:, :-1]), 1) * before[..., None]
    q, k = rms(q) * pointer.copy_scales[0], rms(k + older)
    own = (x @ pointer.sentinel_gates[0] + pointer.copy_scales[1]).exp()
    weights = (q @ k.mT / q.size(-1) ** 0.5).exp() * mask[:, 0]
    total = weights.sum(-1) + own
    copied = torch.zeros(*tokens.shape, vocab)
    for j in range(tokens.size(1)):
        for b in range(len(tokens)):
            copied[b, :, int(tokens[b, j])] += weights[b, :, j] / total[b]
    return own / total, copied


@pytest.mark.recipe
def test_the_forward_pass_is_the_stated_formula(tg):
    """The whole network again, in plain words: x0, n-grams, value embeddings, blocks with and without attention, the
    embedding as head, copies."""
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    c, table = model.config, tg.layer_table(model.config)
    assert {layer.attention for layer in table} == {"long", "short", "none"}
    segments = tg.segment_ids(tokens, EOD)
    masks = {"long": tg.dense_mask(segments, blocks(4), 8).dense, "short": tg.dense_mask(segments, blocks(2), 8).dense}
    before = tg.same_document(segments, 1)
    previous = {"long": before, "short": torch.zeros_like(before)}
    rotary = tg.rotary_tables(64, c.qk_dim, model.embed)
    with torch.no_grad():
        e = model.embed[tokens.long()]
        ids, signs = tg.ngram_ids(tokens, segments, c.table_orders, c.table_rows)
        ngram = sum(model.ngrams[ids[j]] * model.sign_pool[signs[j]] for j in range(2))
        x = x0 = rms(e) + model.ngram_mix * ngram
        ves = model.value_embeds[tokens.long()].view(2, 64, 2, -1)
        for layer, block in zip(table, model.blocks):
            x = block.mix[0] * x + block.mix[1] * x0
            ve = None if layer.value_table is None else ves[:, :, layer.value_table]
            if layer.attention != "none":
                x = x + attention_by_hand(block.attention, rms(x), ve, masks[layer.attention],
                                          previous[layer.attention], rotary, c)
            x = x + (rms(x) @ block.up.T).clamp(min=0) ** 2 @ block.down * block.mlp_scale
        z = 23 / (1 + torch.exp(-(rms(x) @ model.embed.T + 5) / 7.5))
        share, copied = copies_by_hand(model.pointer, rms(x), tokens, masks["long"], before, 384)
        wanted = share[..., None] * z.softmax(-1) + copied
    torch.testing.assert_close(wanted.sum(-1), torch.ones(2, 64), rtol=0, atol=1e-5)
    assert float(copied.sum(-1).mean()) > 0.1
    torch.testing.assert_close(logits(model, tokens, 4).exp(), wanted, rtol=1e-4, atol=1e-6)
    targets = random_tokens(2, 64, seed=4)
    targets[0, :5] = -1
    loss = F.nll_loss(wanted.log().flatten(0, 1), targets.flatten().long(), ignore_index=-1, reduction="sum")
    for training in (False, True):
        found = model(tokens, targets, view(4, training=training))
        assert float(found.detach()) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.recipe
def test_gates_begin_neutral(tg):
    """At init, attention is softmax(qk) v with the whole value embedding and no output gate."""
    model = small_model()
    block, c = model.blocks[1], model.config
    x, ve = torch.randn(1, 16, 32), torch.randn(1, 16, 32)
    mask = model.masks(torch.zeros(1, 16, dtype=torch.int32), 100)["short"]
    tables = tg.rotary_tables(16, c.qk_dim, x)
    with torch.no_grad():
        found = block.attention(x, ve, mask, tables)
        q, k = F.linear(x, block.attention.qk.flatten(0, 1)).view(1, 16, 2, 2, 8).unbind(2)
        v = 0.5 * F.linear(x, block.attention.value).view(1, 16, 2, 16) + ve.view(1, 16, 2, 16)
        q, k = (tg.rotate(tg.norm(t), tables) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=0.1)
        torch.testing.assert_close(found, y.transpose(1, 2).flatten(2) @ block.attention.out, rtol=1e-4, atol=1e-5)
    gates = [name for name, p in model.named_parameters() if name.endswith("gates") and p.any()]
    assert not gates


def test_qk_norm_makes_attention_blind_to_the_size_of_queries_and_keys():
    model, tokens = randomise(small_model()), random_tokens(1, 64)
    before = logits(model, tokens)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".qk"):
                p *= 7.0
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=2e-4)


def test_every_number_of_every_parameter_kind_changes_what_the_model_says():
    """Each scalar by itself, each matrix and table as a whole: no path is dead."""
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    before, generator = logits(model, tokens), torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        saved = p.detach().clone()
        for i in range(p.numel()) if p.ndim < 2 else [None]:
            with torch.no_grad():
                if i is None:
                    noise = torch.randn(p.shape, generator=generator)
                    p.add_(0.3 * noise * (1 if name in ("value_embeds", "ngrams") else p.size(-1) ** -0.5))
                else:
                    p.view(-1)[i] += 0.25
                assert (logits(model, tokens) - before).abs().max() > 1e-4, (name, i)
                p.copy_(saved)


def test_long_layers_take_half_of_each_key_from_the_token_before(tg):
    model = small_model()
    tokens = torch.tensor([[EOD, 1, 2, EOD, 3, 4, 5, 6]], dtype=torch.int32)
    masks = model.masks(tg.segment_ids(tokens, EOD), 2)
    assert masks["long"].same_document_BT.tolist() == [[False, True, True, False, True, True, True, True]]
    assert masks["long"].offset_keys.tolist() is True and masks["short"].offset_keys.tolist() is False


# ---- n-grams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", [(2, 3), (2, 3, 4)])
def test_ngram_ids_depend_on_the_last_n_tokens_of_the_document_alone(tg, orders):
    tokens = random_tokens(3, 64, every=9)
    ids, signs = tg.ngram_ids(tokens, tg.segment_ids(tokens, EOD), orders, 500)
    segments, seen = (tokens == EOD).cumsum(1), {}
    for j, order in enumerate(orders):
        for b in range(3):
            for t in range(64):
                if t < order - 1 or segments[b, t - order + 1] != segments[b, t]:
                    assert ids[j, b, t] == len(orders) * 500
                else:
                    assert j * 500 <= ids[j, b, t] < (j + 1) * 500
                    key, found = (j, *tokens[b, t - order + 1:t + 1].tolist()), (int(ids[j, b, t]), int(signs[j, b, t]))
                    assert seen.setdefault(key, found) == found                     # the same tokens, the same row
    assert len(set(seen.values())) > 0.9 * len(seen)                                # other tokens, another row


@pytest.mark.recipe
def test_hashes_and_signs_are_those_of_checkpoints_that_are_there(tg):
    """A table is worth nothing to a trainer that looks up other rows or gives them other signs, whatever the seed."""
    tokens = torch.tensor([[50_256, 464, 3797, 3332, 50_000, 9]])
    ids, signs = tg.ngram_ids(tokens, tg.segment_ids(tokens, 50_256), (2, 3, 4), 4_194_301)
    assert ids[:, 0, 3:].tolist() == [[1138099, 2028027, 912989], [7751395, 5593288, 6915079],
                                      [8656706, 10836100, 11202682]]
    assert signs[:, 0, 3:].tolist() == [[1118, 1426, 2290], [5296, 5208, 2790], [7867, 5090, 7367]]
    for seed in (0, 1):
        torch.manual_seed(seed)
        pool = tg.GPT(tg.parse_config(["--preset=tiny"])[0]).sign_pool
        assert pool.shape == (8191, 64) and pool.sum() == 552 and pool.abs().min() == 1
        assert "".join("+-"[sign < 0] for sign in pool[0, :16]) == "++--+++++--+-++-"


# ---- the loss --------------------------------------------------------------------------------------------------------


def loss_and_gradients(model, tokens, targets, asked):
    model.zero_grad()
    loss = model(tokens, targets, asked._replace(training=True))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found["ngrams"] = model.looked_up[1].grad.clone()
    return loss.item(), found


def test_a_sample_of_the_whole_vocabulary_is_the_full_softmax():
    model = randomise(small_model())
    tokens, targets = random_tokens(4, 64), random_tokens(4, 64, seed=5)
    asked = view(4)
    full, wanted = loss_and_gradients(model, tokens, targets, asked)
    sampled, found = loss_and_gradients(model, tokens, targets, asked._replace(candidates=384, first_row=3))
    assert sampled == pytest.approx(full, rel=1e-6)
    assert "ngrams" in found
    for name, g in wanted.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max() + 1))


def test_fewer_candidates_give_a_smaller_loss_and_move_no_row_but_theirs_and_those_of_the_inputs(tg):
    model = randomise(small_model())
    tokens, targets = random_tokens(4, 64), random_tokens(4, 64, seed=5)
    full, wanted = loss_and_gradients(model, tokens, targets, view(4))
    sampled, found = loss_and_gradients(model, tokens, targets, view(4, candidates=128, first_row=7))
    assert sampled < full
    used = set(tokens.flatten().tolist())
    for i in range(4):
        used |= set(tg.candidate_set(targets[i], 384, 128, (7 + i) * 129)[0].tolist())
    touched = set(found["embed"].abs().sum(1).nonzero().flatten().tolist())
    assert touched == used and len(used) < 384 == int((wanted["embed"].abs().sum(1) > 0).sum())


def test_further_targets_are_those_of_later_positions_of_the_segment(tg):
    targets = torch.tensor([[10, 11, 12, 13, 14, -1], [20, 21, 22, 23, 24, 25]])
    segments = torch.tensor([[1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1]])
    wanted = [[[11, 12, -1, 14, -1, -1], [12, -1, -1, -1, -1, -1]],
              [[-1, 22, 23, 24, 25, -1], [-1, 23, 24, 25, -1, -1]]]
    for num_further in range(3):
        found = tg.all_targets(targets, segments, num_further)
        assert torch.equal(found[:, 0], targets)
        assert found[:, 1:].tolist() == [rows[:num_further] for rows in wanted]


@pytest.mark.parametrize("candidates", (0, 384))
def test_the_loss_of_further_targets_is_added_with_their_weights(tg, candidates):
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    asked, weights = view(training=True, candidates=candidates), torch.tensor([0.5, 0.25])
    plain = model(tokens, targets, asked)
    both = model(tokens, targets, asked._replace(further_weights=weights))
    segments = tg.segment_ids(tokens, EOD)
    x = model.hidden(tokens, segments, model.masks(segments, 100), False)
    log_p = (23 * torch.sigmoid((x @ model.embed.T + 5) / 7.5)).log_softmax(-1)
    wanted = 0.0
    for k, weight in enumerate(weights):
        t = tg.all_targets(targets, segments, 2)[:, 1 + k]
        wanted -= weight * log_p.gather(2, t.clamp(min=0).long()[..., None])[..., 0][t >= 0].sum()
    assert float(both - plain) == pytest.approx(float(wanted), rel=1e-4) and float(wanted) > 10


@pytest.mark.parametrize("vocab, wanted", [(61, math.log(128)), (50_257, 10.8258)])
@pytest.mark.parametrize("training", (True, False))
def test_the_loss_at_initialisation_is_about_the_log_of_the_padded_vocabulary(vocab, wanted, training):
    """Logits begin small, here about 0.005 sqrt(32) = 0.03 large, so the mean over 64 targets is 0.01 off at most. It
    is exact with equal logits and a sentinel that leaves nothing to copies: at first one part in ten million for each
    token in view."""
    model = small_model(vocab_size=vocab)
    tokens, targets = random_tokens(1, 64), random_tokens(1, 64, seed=1)

    def loss():
        return model(tokens, targets, view(training=training)).item() / 64
    assert loss() == pytest.approx(wanted, abs=0.01)
    with torch.no_grad():
        model.embed.zero_()
        assert loss() == pytest.approx(wanted, abs=2e-3)
        model.pointer.copy_scales[1] = 100.0
    assert loss() == pytest.approx(wanted, abs=5e-5)


def test_training_with_the_fused_head_gives_the_gradients_of_the_plain_one(tg):
    """The path of a GPU, uncompiled: HeadLoss over head_gradients instead of the reference."""
    model, tokens, targets = randomise(small_model()), random_tokens(2, 64), random_tokens(2, 64, seed=4)
    asked, found = view(training=True, further_weights=torch.tensor([0.5, 0.25])), []
    for fused in (False, True):
        model.kernels = tg.Kernels(compile=fused)
        loss, gradients = loss_and_gradients(model, tokens, targets, asked)
        found.append((torch.tensor(loss), *gradients.values()))
    for a, b in zip(*found):
        assert (a - b).norm() <= 2e-5 * a.norm() + 1e-6
    seen = []

    def look(*inputs_and_fp8):
        *inputs, fp8 = inputs_and_fp8
        seen.append(fp8)
        return tg.head_gradients(*inputs, False)
    model.head_gradients = look
    for fp8 in (True, False):                   # training takes fp8 where the device has it
        model.kernels = tg.Kernels(compile=True, fp8=fp8)
        model(tokens, targets, asked)
    assert seen == [True, True, False, False]                                      # one call for each of the two rows
    model.head_gradients = None                 # validation uses the plain one
    model(tokens, targets, view())


@pytest.mark.recipe
def test_the_products_of_an_mlp_are_fp8_where_the_kernels_say_so_each_in_its_range(tg):
    """The first one takes entries of a normed x as small as 1e-3, the second one hidden values beyond 448."""
    c, found = small_config(model_dim=64, mlp_dim=16), []
    x = torch.full((1, 16, 64), 9e-4 / 8, dtype=torch.bfloat16)
    x[..., 0] = 1.0                                                  # norm makes it 8, and the others 9e-4
    for fp8 in (False, True):
        block = tg.Block(c, tg.Kernels(fp8=fp8, dtype=torch.bfloat16), has_attention=False)
        with torch.no_grad():
            block.mix.copy_(torch.tensor([1.0, 0.0]))
            for p in (block.up, block.down):
                p.zero_()
            block.up[0, 1:], block.down[0, 1] = 13.0, 1.1            # of the small entries
            block.up[1, 0], block.down[1, 2] = 5.3, 1.1              # hidden: (8 x 5.3)^2 = 1,798
        y = block(x, x, None, None, None) - x
        y.sum().backward()
        found.append([y[0, 0, 1].detach(), y[0, 0, 2].detach(), block.up.grad[0, 0], block.up.grad[1, 0]])
    for exact, in_fp8 in zip(*found, strict=True):
        assert exact != 0 and exact != in_fp8
        torch.testing.assert_close(in_fp8, exact, rtol=0.25, atol=0)


def test_validation_runs_with_gradients_on_and_keeps_nothing():
    """The same modes as training, so that no graph is compiled for it; no row is recorded, the loss has no graph."""
    model, tokens = randomise(small_model()), random_tokens(2, 64)
    modes = []
    block = model.blocks[0]
    block.register_forward_hook(lambda *args: modes.append((torch.is_grad_enabled(), args[2][0].requires_grad)))
    loss = model(tokens, tokens, view())
    assert not loss.requires_grad and model.looked_up is None
    model(tokens, tokens, view(training=True)).backward()
    assert len(model.looked_up) == 2 and modes == [(True, True)] * 2 and model.training


def test_no_memory_grows_through_validation():
    """A forward pass for its loss alone leaves nothing on the model: no graph, no cache beyond one table a length."""
    import gc
    model, tokens = randomise(small_model()), random_tokens(1, 64)

    def tensors():
        model(tokens, tokens, view(3))
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    tensors()
    assert tensors() == tensors()


# ---- tables, initialisation, parameters ------------------------------------------------------------------------------


@pytest.mark.recipe
def test_the_topology_of_the_record(tg):
    table = tg.layer_table(tg.Config())
    assert [row.value_table for row in table] == [None, 0, 1, None, None, None, None, None, None, 2, 3]
    assert [i for i, row in enumerate(table) if row.attention == "long"] == [3, 10]
    assert [i for i, row in enumerate(table) if row.attention == "none"] == [4, 6, 8]


@pytest.mark.recipe
def test_blocks_of_one_kind_share_a_graph(tg, monkeypatch):
    """A kind is what makes a graph of its own: with or without attention and a value embedding; the first block too."""
    graphs, compile_module, compile_function = [], nn.Module.compile, torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compile_module(self, backend=count, **how))
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_function(f, **how) if "backend" in how else f)
    torch._dynamo.reset()
    model, tokens = tg.GPT(small_config(value_layers=(4,)), tg.Kernels(compile=True)), random_tokens(2, 64)
    for _ in range(2):
        model(tokens, random_tokens(2, 64, seed=3), view(4, training=True)).backward()
    assert len(model.blocks) > 4 and len(graphs) == 4                      # three kinds of blocks, and the pointer


@pytest.mark.parametrize("heads, shape", [(2, (2, 16, 32)), (4, (4, 16, 32)), (3, (6, 8, 32))])
def test_queries_and_keys_are_orthogonalised_by_pairs_of_heads(heads, shape):
    """The layout that records/export.py promises."""
    found = small_model(num_heads=heads).named_parameters()
    assert {tuple(p.shape) for name, p in found if name.endswith(".qk")} == {shape}


@pytest.mark.recipe
def test_each_family_begins_where_it_should():
    """Parameters that are not named here may begin where they like."""
    model, seen = small_model(model_dim=64, mlp_dim=256, vocab_size=1000), set()
    wanted = {"mix": [1.1, 0.2], "ngram_mix": [0.05], "scales": [0.5, 1.0], "mlp_scale": [1.0],
              "copy_scales": [1.0, 16.0]}
    for name, p in model.named_parameters():
        p, last = p.detach(), name.split(".")[-1]
        seen.add(last)
        if last in wanted:
            assert p.flatten().tolist() == pytest.approx(wanted[last]), name
        elif last in ("down", "ngrams") or last.endswith("gates"):
            assert not p.any(), name
        elif last in ("qk", "copy_qk", "value", "out", "up"):
            bound = 3 ** 0.5 * 0.5 / p.size(-1) ** 0.5
            assert p.abs().max() <= bound and p.std() == pytest.approx(0.5 / p.size(-1) ** 0.5, rel=0.05), name
        elif last in ("embed", "value_embeds"):
            assert float(p.std()) == pytest.approx({"embed": 0.005, "value_embeds": 0.01}[name], rel=0.05)
            assert abs(float(p.mean())) < 0.05 * float(p.std())
    assert seen > wanted.keys() and seen > {"down", "ngrams", "gates", "qk", "up", "embed", "value_embeds"}


@pytest.mark.recipe
def test_embedding_and_head_are_one_matrix_that_gets_the_gradients_of_both_uses():
    model, tokens, targets = randomise(small_model()), random_tokens(1, 64), random_tokens(1, 64, seed=3)
    assert [name for name, p in model.named_parameters() if p.shape == (384, 32)] == ["embed"]
    input_states, cross_entropy = model.input_states, model.cross_entropy

    def gradient():
        return loss_and_gradients(model, tokens, targets, view(4))[1]["embed"]
    both = gradient()
    model.input_states = lambda embedded, *rest: input_states(embedded.detach(), *rest)
    of_head = gradient()
    model.input_states, model.cross_entropy = input_states, lambda x, w, *rest: cross_entropy(x, w.detach(), *rest)
    of_input = gradient()
    torch.testing.assert_close(both, of_input + of_head, rtol=1e-4, atol=1e-5)
    assert of_head.abs().sum(1).all()                                   # the softmax is over all ids
    assert set(of_input.abs().sum(1).nonzero().flatten().tolist()) == set(tokens.flatten().tolist())


def test_every_parameter_is_in_one_group_that_its_rule_accepts(tg):
    model = small_model()
    groups = tg.param_groups(small_config(), model)
    names = [name for group in groups for name in group.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        tg.check_group(group)


@pytest.mark.recipe
def test_parameters_learn_by_their_role(tg):
    c, model = small_config(lr_matrix=0.1, lr_embed=0.2, lr_value=0.3, lr_scalar=0.4, lr_table=0.5), small_model()
    groups = tg.param_groups(c, model)
    for group in groups:
        for name, p in group.params.items():
            last = name.split(".")[-1]
            if last == "embed" or last.endswith("gates"):
                wanted = ("embed" if last == "embed" else "gates", "adam", 0.2)
            elif last == "value_embeds":
                wanted = ("value_embeds", "adam", 0.3)
            elif last == "ngrams":
                wanted = ("ngrams", "rows", 0.5)
            elif p.ndim < 2:
                wanted = ("scalars", "adam", 0.4)
            else:
                bank = {"up": "mlp_up", "down": "mlp_down", "qk": "qk", "copy_qk": "copy_qk"}.get(last, "value_out")
                wanted = (bank, "muon", 0.2 if last == "down" else 0.1)
            assert (group.name, group.kind, group.lr) == wanted, name
    tails = {group.name for group in groups if group.ema}
    assert tails == {"embed", "copy_qk", "qk", "value_out", "mlp_up", "mlp_down"}          # no large tables
    assert {group.name for group in groups if group.matmul} == tails


@pytest.mark.recipe
def test_betas_epsilons_and_decays_are_those_of_the_recipe(tg):
    muon = ((None, .95), None, 1.2)
    assert {group.name: (group.betas, group.eps, group.decay)
            for group in tg.param_groups(small_config(), small_model())} == {
        "embed": ((.5, .99), 1e-10, .75), "value_embeds": ((.75, .99), 1e-10, .025),
        "scalars": ((.9, .99), 1e-10, 0), "gates": ((.9, .99), 1e-10, .005), "ngrams": ((None, .95), 1e-15, .025),
        "copy_qk": muon, "qk": muon, "value_out": muon, "mlp_up": muon, "mlp_down": muon}


def test_a_parameter_of_no_bank_raises(tg):
    c, model = small_config(), small_model()
    model.blocks[1].other = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="blocks.1.other belongs to 0 groups: add it to a pattern in param_groups"):
        tg.param_groups(c, model)
    del model.blocks[1].other
    model.head_scale = nn.Parameter(torch.zeros(3))
    assert tg.param_groups(c, model)                                # named like a scalar: it finds its group itself


@pytest.mark.parametrize("changes", (dict(table_rows=1), dict(value_layers=()), dict(qk_dim=16),
                                     dict(table_orders=(2,)), dict(copy_dim=16), dict(num_heads=1, head_dim=32)))
def test_pieces_can_be_changed_by_a_number(tg, changes):
    model, tokens = small_model(**changes), random_tokens(2, 64)
    groups = tg.param_groups(model.config, model)
    assert sum(len(group.params) for group in groups) >= len(list(model.parameters())) - 1
    loss = model(tokens, tokens, view(training=True))
    loss.backward()
    assert math.isfinite(loss.item())
