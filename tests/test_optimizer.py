"""Room 4: the update rules against torch's own, the bank's views and shards, one rank against several."""
import pytest
import torch
import torch.nn.functional as F
from model_helpers import hide_gpus
from rank_helpers import load_train_gpt
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32
MUON = dict(betas=(None, 0.9))
ADAM = dict(betas=(0.8, 0.95), eps=1e-10)


def normal(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scalar(value):
    return torch.tensor(value)


# ---- the rules -------------------------------------------------------------------------------------------------------


def moments(shape):
    """A second moment for each neuron of a stack, as a bank makes it."""
    n, R, C = shape
    return torch.zeros(n, R, 1) if R >= C else torch.zeros(n, 1, C)


def muon(tg, weight, grad, buffer, second, lr=0.05, momentum=0.9, beta2=0.9, decay=0.0):
    tg.muon_update(weight, grad, buffer, second, *map(scalar, (lr, momentum, beta2, decay)))


@pytest.mark.parametrize("shape", [(2, 12, 6), (2, 6, 12), (2, 8, 8)])
def test_normuon_is_its_formula(tg, shape):
    R, C = shape[1:]
    weight, buffer, g = normal(*shape), 0.1 * normal(*shape, seed=1), normal(*shape, seed=2)
    second = normal(*moments(shape).shape, seed=3).square()
    w, m, v = (t.clone() for t in (weight, buffer, second))
    muon(tg, weight, g, buffer, second, lr=0.02, momentum=0.9, beta2=0.8, decay=1.5)
    m = 0.9 * m + 0.1 * g
    update = tg.orthogonalize(0.1 * g + 0.9 * m, FP32)                          # Nesterov's
    plain = tg.orthogonalize(m, FP32)
    assert (update - plain).norm() / plain.norm() > 0.02
    v = 0.8 * v + 0.2 * (update ** 2).mean(2 if R >= C else 1, keepdim=True)
    scaled = update / v.sqrt()
    for i in range(2):
        scaled[i] *= update[i].norm() / scaled[i].norm()
    rate = 0.02 * max(1, R / C) ** 0.5
    decayed = torch.where(scaled * w > 0, w * 1.5 * 0.02 * rate, 0)
    torch.testing.assert_close(weight, w - rate * scaled - decayed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buffer, m)
    torch.testing.assert_close(second, v)


def test_a_neuron_with_a_tiny_gradient_gets_a_step_as_large_as_the_others(tg):
    weight, grad = torch.zeros(1, 8, 8), normal(1, 8, 8)
    grad[0, 0] *= 1e-8
    muon(tg, weight, grad, torch.zeros(1, 8, 8), moments((1, 8, 8)))
    sizes = weight.norm(dim=-1)
    torch.testing.assert_close(sizes, sizes.mean().expand(1, 8), rtol=1e-3, atol=0)


def test_without_variance_and_decay_it_is_muon(tg, monkeypatch):
    """Against torch's own, made to orthogonalise in fp32 (its only use of Tensor.bfloat16), ours with its quintics and
    with a second moment that is the same for all neurons."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    monkeypatch.setattr(tg, "POLAR_EXPRESS", ((3.4445, -4.7750, 2.0315),) * 5)
    monkeypatch.setattr(torch.Tensor, "square", lambda t: torch.ones_like(t))     # every O^2 is 1
    start = normal(48, 32)
    ours, theirs = start[None].clone(), nn.Parameter(start.clone())
    buffer, second = torch.zeros_like(ours), torch.ones(1, 48, 1)
    reference = torch.optim.Muon([theirs], lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0, ns_steps=5,
                                 ns_coefficients=(3.4445, -4.7750, 2.0315), adjust_lr_fn="original")
    for step in range(4):
        theirs.grad = normal(48, 32, seed=10 + step)
        muon(tg, ours, theirs.grad[None], buffer, second)
        reference.step()
        # the norm by which we divide first is 2% larger: the quintics then end elsewhere within their band
        assert (ours[0] - theirs.detach()).norm() / (theirs.detach() - start).norm() < 0.06
    torch.testing.assert_close(buffer[0], reference.state[theirs]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_muon_on_a_stack_equals_muon_on_each_matrix(tg):
    weight, G, buffer = normal(3, 16, 48), normal(3, 16, 48, seed=1), normal(3, 16, 48, seed=2)
    together, second = weight.clone(), moments(weight.shape)
    muon(tg, together, G, buffer.clone(), second, decay=1.0)
    for i in range(3):
        alone, own = weight[i:i + 1].clone(), moments((1, 16, 48))
        muon(tg, alone, G[i:i + 1], buffer[i:i + 1].clone(), own, decay=1.0)
        torch.testing.assert_close(together[i:i + 1], alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(second[i:i + 1], own, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [0.0, 1e-15, 1e-9, 1.0, 1e12])
def test_gradients_of_any_size_give_steps_of_one_size(tg, size):
    """Zero gives none."""
    weight, G = torch.zeros(1, 24, 48), normal(1, 24, 48)
    muon(tg, weight, G * size, torch.zeros_like(G), moments(G.shape))
    assert bool(weight.isfinite().all())
    wanted = torch.zeros_like(G)
    muon(tg, wanted, G, torch.zeros_like(G), moments(G.shape))
    assert torch.equal(weight, torch.zeros_like(G)) if not size else torch.allclose(weight, wanted, atol=2e-3)


@pytest.mark.parametrize("eps, size", [(1e-10, 1.0), (1e-10, 1e-9), (1e-3, 1e-3)])
def test_adam_equals_torch_optim_adam(tg, eps, size):
    """Also where the gradients are no larger than eps."""
    ours, theirs = normal(7, 5), nn.Parameter(normal(7, 5))
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    reference = torch.optim.Adam([theirs], lr=0.01, betas=(0.8, 0.95), eps=eps)
    for step in range(1, 7):
        theirs.grad = size * normal(7, 5, seed=step)
        bias = scalar(1 - 0.8 ** step), scalar(1 - 0.95 ** step)
        tg.adam_update(ours, theirs.grad, first, second, scalar(0.01), *bias, 0.8, 0.95, eps, scalar(0.0))
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second, reference.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_adam_decays_only_where_the_step_shrinks_the_weight(tg):
    weight, zero = torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.zeros(4)
    scalars = [scalar(t) for t in (0.1, 1 - 0.5, 1 - 0.9, 0.5, 0.9, 1e-10, 2.0)]
    tg.adam_update(weight, torch.tensor([1.0, 1.0, -1.0, 0.0]), zero.clone(), zero.clone(), *scalars)
    torch.testing.assert_close(weight, torch.tensor([1.0 - 0.1 - 2 * 0.01, -1.0 - 0.1, 2.0 + 0.1, 3.0]))


def test_a_layer_whose_gradient_stops_early_stays_finite(tg):
    """For 2,000 steps its momentum decays, through denormal numbers, to the smallest there are or to zero."""
    p = nn.Parameter(normal(2, 8, 4))
    optimizer = tg.Optimizer([tg.Group("g", "muon", "", 1e-3, **MUON, params={"p": p})], tg.World(), False)
    for step in range(2003):
        if step < 3:
            p.grad.copy_(normal(2, 8, 4, seed=step))
        optimizer.step(1.0, 0.9)
    assert all(bool(t.isfinite().all()) for t in (p, *optimizer.banks[0].state.values()))


@pytest.mark.parametrize("message, kind, shape, cells", [
    ("group g: rule adam reads beta1, found None: write a number", "adam", (2, 8, 4), dict(betas=(None, 0.9))),
    ("group g: rule adam reads eps, found 0.0: .*eps: above 0", "adam", (2, 8, 4), dict(betas=(0.9, 0.9), eps=0.0)),
    ("group g: rule muon reads beta2, found None: write a number", "muon", (2, 8, 4), dict(eps=1e-10)),
    ("group g: kind is muno, expected one of muon, adam, rows", "muno", (2, 8, 4), MUON),
    ("group g: rule muon takes matrices .* found .*4.*; make a group for each shape", "muon", (4,), MUON),
    ("group g: rule rows takes one table, without ema", "rows", (8, 4), dict(ADAM, ema=True))])
def test_a_group_without_what_its_rule_needs_is_refused(tg, message, kind, shape, cells):
    params = {"p": nn.Parameter(normal(*shape))}
    with pytest.raises(ValueError, match=message):
        tg.Optimizer([tg.Group("g", kind, "", 0.1, **cells, params=params)], tg.World(), False)


# ---- rows of a table -------------------------------------------------------------------------------------------------


def test_merged_rows_are_distinct_ids_and_their_sums(tg):
    ids, grads = torch.randint(0, 20, (100,), generator=torch.Generator().manual_seed(0)), normal(100, 8)
    distinct, sums = tg.merge_rows(ids, grads, 50, tg.sums_by_id)
    assert distinct.shape == (100,) and sums.shape == (100, 8)
    used = distinct < 50
    assert distinct[used].tolist() == sorted(set(ids.tolist())) and bool((distinct[~used] == 50).all())
    torch.testing.assert_close(sums[used], torch.zeros(51, 8).index_add_(0, ids, grads)[distinct[used]])
    assert not sums[~used].any()


def make_table(tg, rows, width, **more):
    """A table of zeros, and an optimizer that holds it alone."""
    table = nn.Parameter(torch.zeros(rows, width), requires_grad=False)
    table.touched = []
    cells = dict(lr=0.1, betas=(None, 0.9), eps=1e-15) | more
    group = tg.Group("table", "rows", "", **cells, params={"table": table})
    return table, tg.Optimizer([group], tg.World(), False)


def look_up(table, ids, factor):
    """One micro-step: the looked-up rows get the gradient factor."""
    rows = F.embedding(ids, table).requires_grad_()
    (rows * factor).sum().backward()
    table.touched.append((ids, rows.grad))


def test_the_row_optimizer_is_a_dense_one_that_skips_untouched_rows(tg):
    table, optimizer = make_table(tg, 31, 8, decay=3.0)
    table.data[:-1] = normal(30, 8)
    weight, second, seen = table.detach().clone().double(), torch.zeros(31).double(), torch.zeros(31)
    for step in range(1, 5):
        gradient = torch.zeros(31, 8).double()
        for micro in range(2):
            ids = torch.randint(0, 31, (2, 6), generator=torch.Generator().manual_seed(10 * step + micro))
            factor = normal(2, 6, 8, seed=10 * step + micro)
            look_up(table, ids, factor)
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


def test_nobodys_row_stays_zero_even_without_free_slots(tg):
    """A free slot would write the old value over it: with as many distinct ids as slots, nothing hides an update."""
    table, optimizer = make_table(tg, 8, 4)
    look_up(table, torch.arange(8), torch.ones(8, 4))
    optimizer.step(1.0, 0.9)
    assert table[:7].all() and not table[7].any()
    assert optimizer.banks[0].state["second"][:7].all() and optimizer.banks[0].state["second"][7] == 0


def test_at_rate_zero_the_table_keeps_its_bytes(tg):
    table, optimizer = make_table(tg, 8, 4, decay=3.0)
    table.data[:7] = normal(7, 4)
    before = table.detach().clone().view(torch.int32)
    look_up(table, torch.arange(6), normal(6, 4))
    optimizer.step(0.0, 0.9)
    assert torch.equal(table.detach().view(torch.int32), before) and optimizer.banks[0].state["second"][:6].all()


# ---- banks -----------------------------------------------------------------------------------------------------------


def make_params(seed=0, dtype=FP32):
    """A Muon group of a merged [3, 8, 16] and two single matrices, and an Adam group of odd shapes."""
    shapes = {"qkv": (3, 8, 16), "out": (8, 16), "other": (8, 16), "table": (9, 7), "mix": (2,), "scale": ()}
    return {name: nn.Parameter(normal(*shape, seed=seed + i, dtype=dtype))
            for i, (name, shape) in enumerate(shapes.items())}


def make_groups(tg, params):
    names = list(params)
    return [tg.Group("matrices", "muon", "", 0.05, **MUON, params={n: params[n] for n in names[:3]}),
            tg.Group("rest", "adam", "", 0.01, **ADAM, params={n: params[n] for n in names[3:]})]


def test_parameters_become_views_of_their_bank_and_keep_their_values(tg):
    params = make_params()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False)
    for bank in optimizer.banks:
        storage = bank.weight.untyped_storage().data_ptr(), bank.grad.untyped_storage().data_ptr()
        for name, p in bank.group.params.items():
            assert torch.equal(p, before[name]) and p.is_contiguous()
            assert (p.untyped_storage().data_ptr(), p.grad.untyped_storage().data_ptr()) == storage
            assert bool((p.grad == 0).all())
    bank.weight.fill_(3.0)
    assert all(bool((p == 3.0).all()) for p in bank.group.params.values())


def test_autograd_accumulates_into_the_bank_and_a_step_empties_it(tg):
    params = make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False)
    places = {name: p.grad.data_ptr() for name, p in params.items()}
    for _ in range(2):
        sum((p * p).sum() / 2 for p in params.values()).backward()
    bank = optimizer.banks[0]
    torch.testing.assert_close(bank.grad[:3], 2 * params["qkv"].detach())
    torch.testing.assert_close(bank.grad[4], 2 * params["other"].detach())
    assert places == {name: p.grad.data_ptr() for name, p in params.items()}
    optimizer.step(1.0, 0.9)
    assert all(bool((bank.grad == 0).all()) for bank in optimizer.banks)
    assert places == {name: p.grad.data_ptr() for name, p in params.items()}


def test_step_returns_squared_gradient_norms_and_applies_each_rule_with_the_scaled_rate(tg):
    params, expected = make_params(), make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False)
    adam = torch.optim.Adam([expected[n] for n in ("table", "mix", "scale")], lr=0.005, betas=(0.8, 0.95), eps=1e-10)
    matrices = torch.cat([expected[n].detach().view(-1, 8, 16) for n in ("qkv", "out", "other")])
    buffer, second = torch.zeros_like(matrices), moments(matrices.shape)
    for step in range(3):
        grads = {name: p.detach().clone() for name, p in make_params(seed=50 + step).items()}
        for name, p in params.items():
            p.grad.copy_(grads[name])
            expected[name].grad = grads[name]
        norms = optimizer.step(0.5, 0.9)
        G = torch.cat([grads[n].view(-1, 8, 16) for n in ("qkv", "out", "other")])
        rest = sum(float(grads[n].square().sum()) for n in ("table", "mix", "scale"))
        assert norms.tolist() == pytest.approx([float(G.square().sum()), rest], rel=1e-5)
        muon(tg, matrices, G, buffer, second, lr=0.025)
        adam.step()
    torch.testing.assert_close(torch.cat([params[n].view(-1, 8, 16) for n in ("qkv", "out", "other")]), matrices,
                               rtol=0, atol=1e-6)
    for name in ("table", "mix", "scale"):
        torch.testing.assert_close(params[name], expected[name], rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_is_harmless(tg):
    params = make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False)
    before = {name: p.detach().clone() for name, p in params.items()}
    (params["qkv"].sum() + (params["mix"] * torch.tensor([1.0, -2.0])).sum()).backward()
    optimizer.step(1.0, 0.9)
    for name, p in params.items():
        assert bool(p.isfinite().all())
        assert torch.equal(p, before[name]) == (name not in ("qkv", "mix")), name


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 16])
def test_banks_are_padded_to_the_ranks_and_shards_tile_them(tg, size):
    params = make_params()
    values = {name: p.detach().clone() for name, p in params.items()}
    for kind, number in (("muon", 5), ("adam", 3 * 128)):
        total = None
        for rank in range(size):
            group = next(g for g in make_groups(tg, params) if g.kind == kind)
            bank = tg.DenseBank(group, tg.World(rank, size))
            total = len(bank.weight)
            assert total % size == 0 and number <= total < number + size * (128 if kind == "adam" else 1)
            assert bank.weight_shard.data_ptr() == bank.weight[rank * total // size:].data_ptr()
            assert len(bank.weight_shard) == len(bank.grad_shard) == len(bank.master) == total // size
            for name, p in group.params.items():
                assert torch.equal(p, values[name])
        used = sum(p.numel() for p in group.params.values())
        assert int((bank.weight != 0).sum()) == used


def test_bf16_weights_have_an_exact_fp32_master(tg):
    """Updates far below a bf16 step are not lost: 100 of them add up."""
    p = nn.Parameter(torch.ones(256, dtype=BF16))
    bank = tg.Optimizer([tg.Group("g", "adam", "", 1e-4, **ADAM, params={"p": p})], tg.World(), False)
    for _ in range(100):
        p.grad.fill_(1.0)
        bank.step(1.0, 0.9)
    assert bank.banks[0].master.dtype == FP32
    torch.testing.assert_close(bank.banks[0].master, torch.full((256,), 0.99), rtol=0, atol=1e-5)
    assert torch.equal(p.detach(), bank.banks[0].master.bfloat16()) and float(p[0].detach()) < 1.0


def test_fp32_weights_are_their_own_master(tg):
    optimizer = tg.Optimizer(make_groups(tg, make_params()), tg.World(), False)
    assert all(bank.master is bank.weight_shard for bank in optimizer.banks)


def test_tensors_lists_everything_that_a_step_changes(tg):
    params = make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False)
    tensors = [t for bank in optimizer.banks for t in bank.tensors()]
    saved = [t.clone() for t in tensors]

    def three_steps():
        for bank in optimizer.banks:
            bank.steps = 0
        for step in range(3):
            for i, p in enumerate(params.values()):
                p.grad.copy_(normal(*p.shape, seed=step * 10 + i))
            optimizer.step(1.0, 0.9)
        return {name: p.detach().clone() for name, p in params.items()}
    first = three_steps()
    for t, was in zip(tensors, saved):
        t.copy_(was)
    second = three_steps()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_average_is_blended_into_the_weights_of_banks_that_have_one(tg):
    matrix, flat, plain = (nn.Parameter(normal(*s)) for s in ((2, 4, 6), (10,), (5,)))
    groups = [tg.Group("m", "muon", "", 0.1, **MUON, ema=True, params={"m": matrix}),
              tg.Group("f", "adam", "", 0.1, **ADAM, ema=True, params={"f": flat}),
              tg.Group("p", "adam", "", 0.1, **ADAM, params={"p": plain})]
    optimizer = tg.Optimizer(groups, tg.World(), False)
    first = [p.detach().clone() for p in (matrix, flat)]
    optimizer.average(1.0)
    for i, p in enumerate((matrix, flat, plain)):
        p.data += normal(*p.shape, seed=20 + i)
    last = [p.detach().clone() for p in (matrix, flat, plain)]
    optimizer.average(0.25, 0.5)
    for i, p in enumerate((matrix, flat)):
        mixed = 0.5 * last[i] + 0.5 * (0.75 * first[i] + 0.25 * last[i])
        torch.testing.assert_close(p.detach(), mixed)
    assert torch.equal(plain.detach(), last[2])


def test_communication_overlaps_the_updates(tg, monkeypatch):
    """All reductions are started before the first update, each gather before the next one, and awaited at the end."""
    params = make_params()
    optimizer, events = tg.Optimizer(make_groups(tg, params), tg.World(), False), []

    class Work:
        def __init__(self, what):
            self.what = what
            events.append(f"start {what}")

        def wait(self):
            events.append(f"wait {self.what}")
    for bank in optimizer.banks:
        name = bank.group.name
        monkeypatch.setattr(bank, "reduce", lambda name=name: [Work(f"reduce {name}")])
        monkeypatch.setattr(bank, "gather", lambda name=name: [Work(f"gather {name}")])
    monkeypatch.setattr(optimizer, "update", lambda bank, lr, mu: events.append(f"update {bank.group.name}"))
    optimizer.step(1.0, 0.9)
    assert events == ["start reduce matrices", "start reduce rest",
                      "wait reduce matrices", "update matrices", "start gather matrices",
                      "wait reduce rest", "update rest", "start gather rest",
                      "wait gather matrices", "wait gather rest"]


# ---- several ranks, checkpoints --------------------------------------------------------------------------------------


def ranked_groups(tg, params, table):
    """Every kind of bank: with an average of the weights of both kinds, a table."""
    matrices, rest = make_groups(tg, params)
    return [matrices._replace(ema=True), rest._replace(ema=True),
            tg.Group("table_rows", "rows", "", 0.1, (None, 0.9), 1e-15, params={"rows": table})]


def one_step(tg, optimizer, params, table, step, dtype):
    """The ranks' parts add up to the same gradient for any number of ranks; each looks up its share of 12 rows."""
    rank, size = optimizer.banks[0].world.rank, optimizer.banks[0].world.size
    for i, p in enumerate(params.values()):
        whole = normal(*p.shape, seed=100 * step + i)
        p.grad += (whole * (0.7 + rank) / sum(0.7 + r for r in range(size))).to(dtype)
    empty = -12 % size                                # look-ups of nobody's row, until the ranks have equal shares
    ids = F.pad(torch.arange(12) * (step + 1) % 17, (0, empty), value=17)
    factor = F.pad(normal(12, 4, seed=step), (0, 0, 0, empty))
    look_up(table, ids.chunk(size)[rank], factor.chunk(size)[rank])
    norms = optimizer.step(1.0, 0.9)
    optimizer.average(1.0 if step == 0 else 0.25, 0.5 if step == 4 else 0.0)
    return norms


def several_steps(rank, size, dtype, stop=None):
    """Five steps, or up to a stop: (weights, squared norms of all ranks, what a checkpoint would hold)."""
    if size > 1:
        hide_gpus()
    tg = load_train_gpt()
    world = tg.init_world() if size > 1 else tg.World()
    tg.join_group(world)
    params, table = make_params(dtype=dtype), nn.Parameter(torch.zeros(18, 4), requires_grad=False)
    table.touched = []
    optimizer = tg.Optimizer(ranked_groups(tg, params, table), world, False)
    norms, begin = [], 0
    if isinstance(stop, dict):                       # go on from there
        begin = stop["step"]
        optimizer.load(stop["tensors"], begin)
    for step in range(begin, stop if isinstance(stop, int) else 5):
        got = one_step(tg, optimizer, params, table, step, dtype)[:2]
        if size > 1:
            torch.distributed.all_reduce(got)
        norms.append(got.tolist())
    tensors = {key: t.clone() for key, t in optimizer.gathered()}
    tg.close_world()
    return {**{name: p.detach().clone() for name, p in params.items()}, "rows": table.detach().clone()}, norms, tensors


@pytest.mark.parametrize("size", [2, 3, 5, 7, pytest.param(16, marks=pytest.mark.slow)])
def test_several_ranks_give_the_weights_of_one(run_ranks, size):
    alone, norms, _ = several_steps(0, 1, FP32)
    ranks = run_ranks(size, several_steps, FP32)
    for weights, found, _ in ranks:
        for name, p in weights.items():
            assert torch.equal(p, ranks[0][0][name])              # all ranks hold the same bytes
            torch.testing.assert_close(p, alone[name], rtol=0, atol=1e-4 if name == "rows" else 2e-5)
        for a, b in zip(found, norms):
            assert a == pytest.approx(b, rel=1e-5)


def test_a_checkpoint_has_every_number_once_without_padding():
    _, _, tensors = several_steps(0, 1, FP32, stop=3)
    shapes = {"qkv": (3, 8, 16), "out": (8, 16), "other": (8, 16), "table": (9, 7), "mix": (2,), "scale": ()}
    wanted = {f"{name}/{kind}": shape for name, shape in shapes.items() if len(shape) > 1 and name != "table"
              for kind in ("weight", "momentum", "ema")}
    wanted |= {f"{name}/{kind}": shapes[name] for name in ("table", "mix", "scale")
               for kind in ("weight", "exp_avg", "exp_avg_sq", "ema")}
    wanted |= {"qkv/second": (3, 1, 16), "out/second": (1, 16), "other/second": (1, 16),
               "rows/weight": (18, 4), "rows/second": (18,), "rows/seen": (18,)}
    assert {key: tuple(t.shape) for key, t in tensors.items()} == wanted


@pytest.mark.parametrize("stop", [2, 3])
def test_stopped_and_gone_on_is_the_same_bit_for_bit(stop):
    straight, norms, last = several_steps(0, 1, FP32)
    tensors = several_steps(0, 1, FP32, stop=stop)[2]
    weights, more, again = several_steps(0, 1, FP32, stop=dict(step=stop, tensors=tensors))
    assert all(torch.equal(weights[name], straight[name]) for name in straight) and more == norms[stop:]
    assert last.keys() == again.keys() and all(torch.equal(last[key], again[key]) for key in last)


def test_a_checkpoint_of_one_rank_goes_on_on_two_and_back(run_ranks):
    straight = several_steps(0, 1, FP32)[0]
    one = several_steps(0, 1, FP32, stop=3)[2]
    for weights, _, _ in run_ranks(2, several_steps, FP32, dict(step=3, tensors=one)):
        for name, p in weights.items():
            torch.testing.assert_close(p, straight[name], rtol=0, atol=1e-4 if name == "rows" else 2e-5)
    two = run_ranks(2, several_steps, FP32, 3)[0][2]
    assert two.keys() == one.keys()
    for key, t in two.items():
        torch.testing.assert_close(t, one[key], rtol=1e-4, atol=2e-5, msg=key)
