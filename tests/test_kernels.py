"""Room 3: every fast path against the plain formula beside it, and that formula against the textbook."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from model_helpers import EOD, blocks, random_tokens, small_model

FP32 = torch.float32


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- orthogonalisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 64, 256), (3, 256, 64), (2, 96, 200)])
def test_orthogonalised_matrices_keep_their_directions_and_get_singular_values_near_one(tg, shape):
    G = normal(*shape)
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    X = tg.orthogonalize(G, FP32).double()
    inside = U.mT @ X @ Vh.mT                   # diagonal when the directions are those of G
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < values.min() and values.max() < 1.25
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
    assert (X - U @ inside @ Vh).abs().max() < 1e-4         # nothing outside the span of G


def test_orthogonalisation_is_its_quintics_applied_to_the_singular_values(tg):
    G = normal(1, 16, 40)
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = S / (1.02 * S.square().sum(-1, keepdim=True).sqrt())
    for a, b, c in tg.POLAR_EXPRESS:
        s = a * s + b * s ** 3 + c * s ** 5
    torch.testing.assert_close(tg.orthogonalize(G, FP32).double(), U @ torch.diag_embed(s) @ Vh, rtol=0, atol=1e-5)


@pytest.mark.recipe
def test_the_quintics_are_those_of_polar_express(tg):
    """Between singular values of 0.002 and 1 they err by 0.1411 at most, to both sides alike, as the best ones do."""
    s = torch.logspace(math.log10(0.002), 0, 2000, dtype=torch.float64)
    at = torch.tensor([0.0003, 0.001, 0.01, 0.1, 0.5], dtype=torch.float64)
    for a, b, c in tg.POLAR_EXPRESS:
        s, at = (x * (a + b * x ** 2 + c * x ** 4) for x in (s, at))
    assert (float(s.min()), float(s.max())) == (pytest.approx(0.8589, abs=1e-4), pytest.approx(1.1411, abs=1e-4))
    torch.testing.assert_close(at, at.new_tensor([0.2931, 0.8589, 1.0271, 1.0592, 0.9106]), rtol=0, atol=1e-4)


def test_a_batch_of_matrices_equals_one_by_one(tg):
    G = normal(5, 24, 48)
    one_by_one = torch.cat([tg.orthogonalize(g[None], FP32) for g in G])
    torch.testing.assert_close(tg.orthogonalize(G, FP32), one_by_one, rtol=0, atol=1e-6)


def test_the_transposed_input_gives_the_transposed_output(tg):
    G = normal(2, 24, 48)
    torch.testing.assert_close(tg.orthogonalize(G.mT, FP32), tg.orthogonalize(G, FP32).mT, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e-9, 1e-3, 1e6, 1e20, 1e30, 1e38])
def test_orthogonalisation_is_free_of_scale(tg, size):
    """From the smallest normal numbers of fp32 to the largest: squares of most of these sizes are 0 or infinite."""
    G = normal(2, 32, 64)
    G = G / G.abs().max()
    torch.testing.assert_close(tg.orthogonalize(G * size, FP32), tg.orthogonalize(G, FP32), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [0, -100, -60, -7, 3, 60, 120])
def test_bringing_the_largest_entry_near_one_changes_no_bit(tg, exponent):
    """The formula without that step, on an ordinary input, against any power of two of it."""
    G = normal(2, 32, 64)
    plain = G / (1.02 * G.norm(dim=(-2, -1), keepdim=True))
    for a, b, c in tg.POLAR_EXPRESS:
        A = plain @ plain.mT
        plain = torch.baddbmm(plain, torch.baddbmm(A, A, A, beta=b, alpha=c), plain, beta=a)
    assert torch.equal(tg.orthogonalize(G * 2.0 ** exponent, FP32), plain)


def test_rows_of_very_different_tiny_sizes_stay_finite(tg):
    """What momentum leaves of a layer whose gradient has stopped: a norm that underflows, entries that do not."""
    G = normal(2, 16, 32) * torch.logspace(-23, -30, 16)[:, None]
    X = tg.orthogonalize(G, FP32)
    exact = G.double() / G.double().norm(dim=(-2, -1), keepdim=True)
    assert bool(X.isfinite().all()) and float(torch.linalg.matrix_norm(X, 2).max()) < 1.25
    torch.testing.assert_close(X, tg.orthogonalize(exact.float(), FP32), rtol=0, atol=1e-5)


def test_a_zero_matrix_stays_zero_and_a_broken_one_keeps_to_itself(tg):
    G = normal(5, 16, 32)
    G[0], G[2], G[3, 0, 0], G[4] = 0, math.nan, math.inf, G[1] * 1e-37
    X = tg.orthogonalize(G, FP32)
    assert bool((X[0] == 0).all()) and bool(X[2:4].isnan().all())
    for i in (1, 4):
        torch.testing.assert_close(X[i:i + 1], tg.orthogonalize(G[1:2], FP32), rtol=0, atol=1e-5)


def test_orthogonalisation_compiles_into_one_graph_and_gives_the_same(tg):
    G = normal(2, 16, 32) * torch.tensor([1e-30, 0.0])[:, None, None]
    compiled = torch.compile(tg.orthogonalize, backend="aot_eager", dynamic=False, fullgraph=True)
    torch.testing.assert_close(compiled(G, FP32), tg.orthogonalize(G, FP32), rtol=0, atol=1e-6)


def test_orthogonalisation_in_bf16_is_near_that_in_fp32(tg):
    G = normal(2, 64, 128)
    exact, rough = tg.orthogonalize(G, FP32), tg.orthogonalize(G, torch.bfloat16)
    assert rough.dtype == torch.bfloat16 and exact.dtype == FP32
    assert (rough.float() - exact).norm() / exact.norm() < 0.03


# ---- the head's loss and its candidates -----------------------------------------------------------------------------


SOFTCAP = (23.0, 5.0, 7.5)        # cap, shift, width
tg_no_match = -1e4


def head_case(dtype=FP32, T=48, K=64, V=256):
    """x, w, targets [1, T], and the logarithms of the softmax's share and of what is copied."""
    x = F.rms_norm(normal(T, K), (K,)).to(dtype)
    w = (0.05 * normal(V, K, seed=1)).to(dtype)
    targets = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    targets[0, ::5], targets[0, 1] = -1, 0                   # the first id is a target like others
    share = torch.rand(T, generator=torch.Generator().manual_seed(3)).clamp(0.05, 0.95)
    log_copy = (1 - share).log() - normal(T, seed=4).abs()
    log_copy[1::4] = tg_no_match                       # nothing to copy
    return x, w, targets, share.log(), log_copy


def plain_head(x, w, targets, log_lm, log_copy):
    """Loss and the four gradients by autograd in fp64, from the mixture's probabilities."""
    x, w, log_lm, log_copy = (t.double().requires_grad_() for t in (x, w, log_lm, log_copy))
    p = (23 / (1 + torch.exp(-(x @ w.T + 5) / 7.5))).softmax(1)[torch.arange(len(x)), targets[0].clamp(min=0).long()]
    loss = -(log_lm.exp() * p + log_copy.exp()).log()[targets[0] >= 0].sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, w, log_lm, log_copy))


def error(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def test_without_copies_the_head_is_the_cross_entropy_of_capped_logits(tg):
    x, w, targets, _, _ = head_case()
    z = 23 * torch.sigmoid((x @ w.T + 5) / 7.5)
    wanted = F.cross_entropy(z, targets[0].long(), ignore_index=-1, reduction="sum")
    got = tg.mixed_cross_entropy(x, w, targets, torch.zeros(48), torch.full((48,), tg.NO_MATCH), SOFTCAP)
    assert got.dtype == FP32 and float(got) == pytest.approx(float(wanted), rel=1e-6)


def test_the_reference_equals_the_formula_in_double_precision(tg):
    case = head_case()
    assert tg.NO_MATCH == tg_no_match
    assert error(tg.mixed_cross_entropy(*case, SOFTCAP), plain_head(*case)[0]) < 1e-6
    bare = tg.mixed_cross_entropy(*case[:4], torch.full((48,), tg.NO_MATCH), SOFTCAP)
    assert float(bare - plain_head(*case)[0]) > 1                # copies count


def test_the_head_in_one_pass_equals_autograd(tg):
    x, w, *rest = head_case()
    for w_scale in (1.0, 40.0):                # the second saturates the softcap
        case = x, w * w_scale, *rest
        found = tg.head_gradients(*case, SOFTCAP, None, False)
        for got, wanted in zip(found, plain_head(*case), strict=True):
            assert error(got, wanted) < 3e-6
        assert all(bool((t[rest[0][0] < 0] == 0).all()) for t in (found[1], found[3], found[4]))


def further_case(T=48, V=256):
    """Further targets [2, T], of which some are missing and some equal each other, and their weights."""
    further = torch.randint(-40, V, (2, T), generator=torch.Generator().manual_seed(5), dtype=torch.int32).clamp(min=-1)
    further[1, ::7] = further[0, ::7]
    return further, torch.tensor([0.5, 0.25])


def test_further_targets_add_their_weighted_cross_entropies(tg):
    x, w, targets, *logs = head_case()
    further, weights = further_case()
    further[0, 1] = targets[0, 1]
    all_targets = torch.cat((targets, further))
    z = 23 * torch.sigmoid((x @ w.T + 5) / 7.5)
    wanted = tg.mixed_cross_entropy(x, w, targets, *logs, SOFTCAP)
    for t, weight in zip(further, weights):
        wanted = wanted + weight * F.cross_entropy(z, t.long(), ignore_index=-1, reduction="sum")
    leaves = [t.requires_grad_() for t in (x, w, *logs)]
    loss = tg.mixed_cross_entropy(x, w, all_targets, *logs, SOFTCAP, weights)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    found = tg.head_gradients(x, w, all_targets, *logs, SOFTCAP, weights, False)
    for got, exact in zip(found, (loss, *torch.autograd.grad(loss, leaves)), strict=True):
        assert error(got, exact) < 3e-6


def test_the_head_in_bf16_is_near_the_exact_one(tg):
    case = head_case(torch.bfloat16)
    loss, dx, dw, d_lm, d_copy = tg.head_gradients(*case, SOFTCAP, None, False)
    wanted = plain_head(*case)
    assert loss.dtype == d_lm.dtype == d_copy.dtype == FP32 and dx.dtype == dw.dtype == torch.bfloat16
    assert error(loss, wanted[0]) < 1e-3 and error(dx, wanted[1]) < 1e-2 and error(dw, wanted[2]) < 1e-2


def test_the_head_in_fp8_is_near_the_one_in_bf16(tg):
    case = head_case(torch.bfloat16)
    loss, dx, dw, *_ = tg.head_gradients(*case, SOFTCAP, None, True)
    wanted = tg.head_gradients(*case, SOFTCAP, None, False)
    assert error(loss, wanted[0]) < 2e-3
    # e5m2 has two bits of mantissa, e4m3 three: roundings of up to 1/8 and 1/16, 0.072 and 0.036 in the square mean
    assert 1e-3 < error(dx, wanted[1]) < 0.09 and 1e-3 < error(dw, wanted[2]) < 0.09


def test_fp8_scales_do_not_overflow(tg):
    """At the extremes of each operand: a normed x, gradients as large as they get, weights far larger than trained."""
    K = 768
    x = torch.zeros(16, K, dtype=torch.bfloat16)
    x[:, 0] = K ** 0.5                                           # the largest entry that RMSNorm lets through
    w = torch.full((128, K), 0.01, dtype=torch.bfloat16)
    w[0, 0], w[1, 0] = 10.0, -10.0
    targets, none = torch.ones(1, 16, dtype=torch.int32), torch.full((16,), tg.NO_MATCH)
    loss, dx, dw, *_ = tg.head_gradients(x, w, targets, torch.zeros(16), none, SOFTCAP, None, True)
    assert loss.isfinite() and bool(dx.isfinite().all()) and bool(dw.isfinite().all())
    steepest = 23 / 7.5 / 4                                      # the softcap's largest slope
    assert steepest < 0.8 and tg.G_SCALE * steepest <= torch.finfo(torch.float8_e5m2).max
    assert tg.X_SCALE * K ** 0.5 <= torch.finfo(torch.float8_e4m3fn).max
    w[1] = 0
    w[1, 0] = -5 / K ** 0.5                                      # half of the cap, the steepest place, and 3 targets
    dx, dw = tg.head_gradients(x, w, targets.expand(3, -1), torch.zeros(16), none, SOFTCAP,
                               torch.tensor([0.5, 0.25]), True)[1:3]
    assert bool(dx.isfinite().all()) and bool(dw.isfinite().all())
    assert float(dw[1, 0]) == pytest.approx(-1.75 * steepest * 16 * K ** 0.5, rel=0.1)
    # one row of small gradients is not flushed to zero either: 1 / V of a probability still has a value in e5m2
    assert float(torch.tensor(tg.G_SCALE / 50304).to(torch.float8_e5m2)) > 0


def test_fp8_keeps_small_weights(tg):
    x, targets = torch.ones(16, 64, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.int32)
    w = torch.full((128, 64), 1e-4, dtype=torch.bfloat16)
    none = torch.full((16,), tg.NO_MATCH)
    _, dx, *_ = tg.head_gradients(x, -w, targets, torch.zeros(16), none, SOFTCAP, None, True)
    assert bool((dx != 0).any())


def test_the_head_loss_scales_its_gradients_by_what_comes_from_above(tg):
    x, w, targets, *logs = head_case()
    leaves = [t.requires_grad_() for t in (x, w, *logs)]
    loss = tg.HeadLoss.apply(tg.head_gradients, x, w, targets, *logs, SOFTCAP, None, False)
    (loss / 96).backward()
    for leaf, wanted in zip(leaves, plain_head(*(t.detach() for t in (x, w, targets, *logs)))[1:]):
        assert error(leaf.grad, wanted / 96) < 3e-6


@pytest.mark.parametrize("count", (128, 256, 384))
@pytest.mark.parametrize("start", (0, 5, 100_000))
def test_candidates_are_all_targets_then_negatives_each_once(tg, count, start):
    targets = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(start), dtype=torch.int32)
    targets[1:, ::5], targets[0, 0] = -1, 0
    ids, columns = tg.candidate_set(targets, 384, count, start)
    wanted = targets[targets >= 0].unique().long()
    assert ids.shape == (count,) and len(ids.unique()) == count
    assert set(ids[:len(wanted)].tolist()) == set(wanted.tolist())
    assert torch.equal(ids[columns[ids]], ids) and int((columns >= 0).sum()) == count
    walk = [(start + j) * 20_011 % 384 for j in range(384)]
    others = [i for i in walk if i not in set(wanted.tolist())]
    assert ids[len(wanted):].tolist() == others[:count - len(wanted)]


def test_too_many_targets_leave_some_out_and_never_repeat(tg):
    ids, columns = tg.candidate_set(torch.arange(300)[None], 384, 128, 7)
    assert len(ids.unique()) == 128 and int((columns >= 0).sum()) == 128 and bool((ids < 300).all())


# ---- masks -----------------------------------------------------------------------------------------------------------


def naive_mask(tokens, window_blocks, block):
    """bool [T, T] by the words of the rule: earlier or same, same document of the row, at most so many blocks back."""
    T, seen = len(tokens), [0]
    for token in tokens:
        seen.append(seen[-1] + (token == EOD))
    document = seen[1:]
    return torch.tensor([[j <= i and document[i] == document[j] and i // block - j // block < window_blocks
                          for j in range(T)] for i in range(T)])


CASES = [(every, window, block, seed) for seed, (every, window, block) in enumerate([
    (11, 1, 8), (11, 3, 8), (40, 4, 8), (40, 8, 8), (1000, 2, 8), (1000, 8, 8), (3, 2, 16), (24, 3, 16), (64, 100, 4)])]


@pytest.mark.parametrize("every, window, block, seed", CASES)
def test_the_dense_mask_is_the_naive_one(tg, every, window, block, seed):
    tokens = random_tokens(2, 64, seed, every=every)
    mask = tg.dense_mask(tg.segment_ids(tokens, EOD), blocks(window), block)
    assert mask.blocks is None and mask.dense.shape == (2, 1, 64, 64)
    for row in range(2):
        assert torch.equal(mask.dense[row, 0], naive_mask(tokens[row].tolist(), window, block))


@pytest.mark.parametrize("every, window, block, seed", CASES)
def test_block_lists_cover_the_mask_exactly(tg, every, window, block, seed):
    """A pair of blocks is full where the mask is all true, partial where it is mixed, absent where it is all false."""
    tokens = random_tokens(3, 64, seed + 100, every=every)
    segments, n = tg.segment_ids(tokens, EOD), 64 // block
    lists = tg.block_mask(segments, blocks(window), block).blocks
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in lists)
    kinds = {}
    for name, num, index in zip(("partial", "full", "partial_q", "full_q"), lists[::2], lists[1::2]):
        assert num.shape == (3, 1, n) and index.shape == (3, 1, n, n)
        assert int(index.min()) >= 0 and int(index.max()) < n
        kinds[name] = [[index[b, 0, i, :int(num[b, 0, i])].tolist() for i in range(n)] for b in range(3)]
    for b in range(3):
        tiles = naive_mask(tokens[b].tolist(), window, block).view(n, block, n, block)
        whole, some = tiles.all(3).all(1), tiles.any(3).any(1)
        for name, wanted in (("full", whole), ("partial", some & ~whole)):
            for i in range(n):
                assert sorted(kinds[name][b][i]) == wanted[i].nonzero().flatten().tolist()
                assert sorted(kinds[name + "_q"][b][i]) == wanted[:, i].nonzero().flatten().tolist()


def test_shifts_move_along_rows_and_neighbours_share_a_document(tg):
    x = torch.tensor([[1, 2, 3, 4]])
    assert tg.shift(x).tolist() == [[0, 1, 2, 3]] and tg.shift(x, 3, fill=-1).tolist() == [[-1, -1, -1, 1]]
    assert torch.equal(tg.shift(x[..., None].expand(1, 4, 2), 2)[..., 1], torch.tensor([[0, 0, 1, 2]]))
    segments = torch.tensor([[0, 1, 1, 2]])
    assert tg.same_document(segments, 1).tolist() == [[False, False, True, False]]
    assert tg.same_document(segments, 0).all() and not tg.same_document(segments, 2).any()


def test_segments_count_document_starts_within_their_row(tg):
    tokens = torch.tensor([[5, EOD, 6, EOD, EOD, 7], [EOD, 1, 2, 3, 4, 5]], dtype=torch.int32)
    assert tg.segment_ids(tokens, EOD).tolist() == [[0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1]]


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_case(B=2, T=128, H=2, D=16, dtype=FP32, device="cpu"):
    return [normal(B, T, H, D, seed=s).to(device, dtype).requires_grad_() for s in range(3)]


def naive_attention(q, k, v, mask, scale):
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -math.inf).softmax(-1), v.double())


def test_dense_attention_is_the_softmax_formula(tg):
    q, k, v = attention_case(T=64)
    mask = tg.dense_mask(tg.segment_ids(random_tokens(2, 64), EOD), blocks(3), 8)
    got = tg.attend(q, k, v, mask, 0.12, 8)
    torch.testing.assert_close(got.double(), naive_attention(q, k, v, mask.dense, 0.12), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_over_the_block_lists_equals_dense_attention(tg, monkeypatch):
    """Eagerly on the CPU, past FlexAttention's refusal to train there. Eager FlexAttention looks at the rule alone and
    not at the lists, so the window is the whole row here; the lists have their own test, and one on a GPU."""
    import torch.nn.attention.flex_attention as flex
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    segments = tg.segment_ids(random_tokens(2, 128, every=30), EOD)
    upstream, found = normal(2, 128, 2, 16, seed=9), []
    for build in (tg.dense_mask, tg.block_mask):
        qkv = attention_case()
        y = tg.attend(*qkv, build(segments, blocks(8), 16), 0.12, 16)
        found.append((y, *torch.autograd.grad(y, qkv, upstream)))
    for dense, fast in zip(*found):
        torch.testing.assert_close(fast, dense, rtol=0, atol=1e-5)


def mass_case(T=64, D=16, dtype=FP32, device="cpu"):
    """q, k (leaves), tokens, targets, segments for copy_logsumexps: few tokens, so that many keys match."""
    tokens = random_tokens(2, T, seed=7, vocab=6, every=T // 3).to(device)
    q, k = (3 * normal(2, T, D, seed=seed) for seed in (5, 6))
    return *((t.to(device, dtype).requires_grad_()) for t in (q, k)), tokens, tokens.roll(-1, 1), tg_segments(tokens)


def tg_segments(tokens):
    return (tokens == EOD).cumsum(1, dtype=torch.int32)


def mass_and_gradients(copy_logsumexps, q, k, tokens, targets, mask, block):
    """The two masses, and the gradients of a weighted sum of all that is finite in them."""
    every, found = copy_logsumexps(q, k, tokens, targets, mask, block)
    there = found > -100
    weights = normal(2, q.size(1), seed=8).to(q.device)
    total = (every * weights).sum() + (found.where(there, 0) * weights.flip(0)).sum()
    return every, found.where(there, -1e4), there.float(), *torch.autograd.grad(total, (q, k))


def test_the_mass_of_attention_is_its_formula(tg):
    q, k, tokens, targets, segments = mass_case()
    mask = tg.dense_mask(segments, blocks(3), 8)
    every, found, there = (t.detach() for t in mass_and_gradients(
        tg.copy_logsumexps, q, k, tokens, targets, mask, 8)[:3])
    scores = torch.einsum("bid,bjd->bij", q.double(), k.double()) / 4
    for b in range(2):
        for i in range(64):
            seen = mask.dense[b, 0, i]
            same = seen & (tokens[b] == targets[b, i])
            assert float(every[b, i]) == pytest.approx(float(scores[b, i][seen].logsumexp(0)), abs=1e-5)
            assert bool(there[b, i]) == bool(same.any())
            if same.any():
                assert float(found[b, i]) == pytest.approx(float(scores[b, i][same].logsumexp(0)), abs=1e-5)
    assert 0.2 < float(there.mean()) < 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mass_by_flex_attention_equals_the_dense_one(tg, monkeypatch):
    """Eagerly on the CPU, with a window of the whole row, as for attention above."""
    import torch.nn.attention.flex_attention as flex
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    q, k, tokens, targets, segments = mass_case(T=128)
    found = [mass_and_gradients(tg.copy_logsumexps, q, k, tokens, targets, build(segments, blocks(8), 16), 16)
             for build in (tg.dense_mask, tg.block_mask)]
    for dense, fast in zip(*found):
        torch.testing.assert_close(fast, dense, rtol=0, atol=2e-5)


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_a_cpu_runs_the_references_in_fp32(tg):
    cpu = torch.device("cpu")
    assert tg.choose_kernels(cpu) == tg.Kernels(compile=False, flex=False, fp8=False, dtype=FP32)
    assert tg.choose_kernels(cpu, "on").compile
    with pytest.raises(tg.Refusal, match="--fp8=on"):
        tg.choose_kernels(cpu, fp8="on")
    with pytest.raises(tg.Refusal, match="--attention=flex.*dense"):
        tg.choose_kernels(cpu, "on", "flex")


def stand_in(monkeypatch, capability, shared_kib=227):
    """A GPU of this compute capability that gives a block so much shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("shared_kib, small", [       # H100, A100, what the usual tiles take, less, 4090
    (227, False), (163, False), (128, False), (127, True), (99, True)])
def test_flexattention_takes_small_tiles_where_shared_memory_is_little(tg, monkeypatch, shared_kib, small):
    kernels = tg.choose_kernels(stand_in(monkeypatch, (8, 6), shared_kib))
    assert kernels.flex and kernels.small_tiles is small
    model = small_model()
    model.kernels = kernels
    masks = model.masks(torch.zeros(1, 64, dtype=torch.int32), 3)
    assert [mask.small_tiles for mask in masks.values()] == [small] * 2


@pytest.mark.parametrize("capability, fp8", [((9, 0), True), ((8, 9), True), ((8, 0), False)])
def test_a_gpu_runs_the_fast_paths_that_it_has(tg, monkeypatch, capability, fp8):
    gpu, bf16 = stand_in(monkeypatch, capability), torch.bfloat16
    assert tg.choose_kernels(gpu) == tg.Kernels(True, True, fp8, True, bf16)
    assert tg.choose_kernels(gpu, fp8="off") == tg.Kernels(True, True, False, True, bf16)
    assert tg.choose_kernels(gpu, attention="dense") == tg.Kernels(True, False, fp8, True, bf16)
    assert tg.choose_kernels(gpu, compilation="off") == tg.Kernels(False, False, False, False, bf16)
    assert tg.choose_kernels(gpu, fits_flex=False) == tg.Kernels(True, False, fp8, True, bf16)
    with pytest.raises(tg.Refusal, match="--fp8=on: it needs compilation"):
        tg.choose_kernels(gpu, compilation="off", fp8="on")
    with pytest.raises(tg.Refusal, match="--attention=flex.*block_tokens=128"):
        tg.choose_kernels(gpu, attention="flex", fits_flex=False)
    if not fp8:
        with pytest.raises(tg.Refusal, match="--fp8=on"):
            tg.choose_kernels(gpu, fp8="on")


def test_a_gpu_of_another_maker_has_no_graphs_and_no_fp8(tg, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    gpu = torch.device("cuda", 0)
    assert tg.choose_kernels(gpu) == tg.Kernels(True, True, False, False, torch.bfloat16)
    for word in ("graphs", "fp8"):
        with pytest.raises(tg.Refusal, match=f"--{word}=on"):
            tg.choose_kernels(gpu, **{word: "on"})


def test_a_gpu_without_bf16_matrix_units_is_refused(tg, monkeypatch):
    with pytest.raises(tg.Refusal, match="cuda:0: compute capability 7.5 has no bf16.*expected 8.0"):
        tg.choose_kernels(stand_in(monkeypatch, (7, 5)))


@pytest.mark.recipe
def test_small_presets_take_dense_attention_on_a_gpu_too(tg):
    """FlexAttention's kernels there want blocks of 128 and heads of 16 at least."""
    fits = {name: tg.parse_config([f"--preset={name}"])[0].fits_flex for name in tg.PRESETS}
    assert fits == dict(record=True, sprint=True, mile=True, small=True, demo=False, tiny=False)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("small_tiles", [False, True])
def test_compiled_flex_attention_equals_dense_attention_on_a_gpu(tg, small_tiles):
    segments = tg.segment_ids(random_tokens(2, 1024, every=200), EOD).cuda()
    upstream, found = normal(2, 1024, 2, 128, seed=9).cuda().bfloat16(), []
    for build, attend in ((tg.dense_mask, tg.attend), (tg.block_mask, torch.compile(tg.attend, dynamic=False))):
        qkv = attention_case(T=1024, D=128, dtype=torch.bfloat16, device="cuda")
        mask = build(segments, blocks(3).cuda(), 128)._replace(small_tiles=small_tiles)
        y = attend(*qkv, mask, 0.12, 128)
        found.append((y, *torch.autograd.grad(y, qkv, upstream)))
    for dense, fast in zip(*found):
        assert error(fast, dense) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("small_tiles", [False, True])
def test_the_mass_by_compiled_flex_attention_equals_the_dense_one_on_a_gpu(tg, small_tiles):
    q, k, tokens, targets, segments = mass_case(T=1024, D=128, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(tg.copy_logsumexps, dynamic=False, fullgraph=True)
    masks = [build(segments, blocks(3).cuda(), 128) for build in (tg.dense_mask, tg.block_mask)]
    found = [mass_and_gradients(run, q, k, tokens, targets, mask._replace(small_tiles=small_tiles), 128)
             for run, mask in zip((tg.copy_logsumexps, compiled), masks)]
    for dense, fast in zip(*found):
        assert error(fast, dense) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("num_further", (0, 2))
def test_the_fp8_head_is_near_the_one_in_bf16_on_a_gpu(tg, num_further):
    """By the kernel, and (for a number of rows that it doesn't take) by the reference."""
    if not tg.choose_kernels(torch.device("cuda", 0)).fp8:
        pytest.skip("this GPU has no fp8")
    compiled = torch.compile(tg.head_gradients, dynamic=False, fullgraph=True)
    for T, run in ((512, tg.head_gradients), (512, compiled), (528, tg.head_gradients)):
        case = [t.cuda() for t in head_case(torch.bfloat16, T=T, K=256, V=1024)]
        weights = None
        if num_further:
            further, weights = (t.cuda() for t in further_case(T, 1024))
            case[2] = torch.cat((case[2], further))
        loss, dx, dw, *_ = run(*case, SOFTCAP, weights, True)
        wanted = tg.head_gradients(*case, SOFTCAP, weights, False)
        assert error(loss, wanted[0]) < 2e-3 and error(dx, wanted[1]) < 0.09 and error(dw, wanted[2]) < 0.09


@pytest.mark.gpu
def test_a_compiled_block_mask_does_not_recompile_when_the_window_changes(tg):
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("inductor")
    build = torch.compile(tg.block_mask, backend=counter, dynamic=False, fullgraph=True)
    segments = tg.segment_ids(random_tokens(1, 2048, every=200), EOD).cuda()
    for window in range(1, 15):
        lists = build(segments, blocks(window).cuda(), 128).blocks
        for got, wanted in zip(lists, tg.block_mask(segments, blocks(window).cuda(), 128).blocks):
            assert torch.equal(got, wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_product_in_fp8_and_its_gradients_are_near_those_in_bf16(tg, device, is_transposed):
    """Whatever the size of a token's entries. is_transposed: the weight is a view of its transpose, as the second
    matrix of an MLP is."""
    fp8_linear = tg.Fp8Linear.apply
    if device == "cuda":
        if not tg.choose_kernels(torch.device("cuda", 0)).fp8:
            pytest.skip("this GPU has no fp8")
        fp8_linear = torch.compile(lambda x, w: tg.Fp8Linear.apply(x, w), dynamic=False, fullgraph=True)
    x, w, upstream = (normal(*shape, seed=seed).to(device, torch.bfloat16)
                      for seed, shape in enumerate([(2, 128, 64), (48, 64), (2, 128, 48)]))
    w = w.t().contiguous().t() if is_transposed else w
    sizes = torch.logspace(-12, 6, 128, dtype=torch.bfloat16, device=device)[:, None]      # of the tokens
    found = []
    for linear in (F.linear, fp8_linear):
        inputs = [t.clone().requires_grad_() for t in (x * sizes, w)]
        y = linear(*inputs)
        y.backward(upstream / sizes)
        found.append(((y / sizes).detach().float(), inputs[0].grad.float() * sizes, inputs[1].grad.float()))
    for exact, quantised, tolerance in zip(*found, (0.06, 0.06, 1e-3)):     # e4m3 rounds by up to 1/16
        assert quantised.shape == exact.shape
        assert (quantised - exact).norm() < tolerance * exact.norm()
    for exact, quantised in list(zip(*found))[:2]:
        assert ((quantised - exact).norm(dim=-1) < 0.2 * exact.norm(dim=-1)).all() and not torch.equal(quantised, exact)


def test_fp8_holds_any_token_and_says_what_is_not_finite(tg):
    x, w = torch.zeros(16, 16, dtype=torch.bfloat16), torch.eye(16, dtype=torch.bfloat16)
    largest = torch.finfo(torch.bfloat16).max
    x[1], x[2, 0], x[3, 5], x[4] = 1e-35, 94_720.0, -largest / 2, largest / 4
    x[5, 0], x[6, 0] = math.inf, math.nan
    y = tg.Fp8Linear.apply(x, w)
    assert torch.equal(y[0], x[0]) and (y[1].abs() <= 1e-30).all()
    assert ((y[2:5] - x[2:5]).abs() <= x[2:5].abs() / 16).all()
    assert y[:5].isfinite().all() and not y[5].isfinite().all() and not y[6].isfinite().all()


def test_large_hidden_states_of_one_token_cost_the_others_nothing(tg):
    """A mile with products in bf16 ended with relu^2 up to 7,648 in its first layer. Cut off at 448 they grew to 94,720
    within one run, since a gradient doesn't see the cut; with one scale for all of them, small ones would be lost."""
    hidden = F.relu(2.6 * normal(64, 3072, seed=1)).square()           # rows of W1 have norms of 2.6
    hidden[0, 0] = 94_720.0
    hidden[1:8] /= 1000
    hidden, down = hidden.to(torch.bfloat16), normal(64, 3072, seed=2).to(torch.bfloat16)
    exact = F.linear(hidden, down).float()
    errors = (tg.Fp8Linear.apply(hidden, down) - exact).norm(dim=1) / exact.norm(dim=1)
    assert (errors < 0.05).all()
