"""Room 4: the update rules against torch's own, the bank's views and shards, one rank against several."""
import pytest
import torch
from model_helpers import hide_gpus
from rank_helpers import load_train_gpt
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scalar(value):
    return torch.tensor(value)


# ---- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(FP32, 1e-3), (BF16, 0.04)])
@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)])
def test_muon_equals_torch_optim_muon(tg, monkeypatch, shape, dtype, tolerance):
    """torch's always orthogonalises in bf16, where each rounding moves the result by 1-2%: that is the tolerance. Made
    to do it in fp32 (its only use of Tensor.bfloat16), it agrees tightly."""
    if dtype == FP32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    start = normal(*shape)
    ours, theirs = start[None].clone(), nn.Parameter(start.clone())
    buffer, lr = torch.zeros_like(ours), 0.05
    reference = torch.optim.Muon([theirs], lr=lr, momentum=0.9, nesterov=True, weight_decay=0.0, ns_steps=5,
                                 ns_coefficients=(3.4445, -4.7750, 2.0315), adjust_lr_fn="original")
    for step in range(4):
        theirs.grad = normal(*shape, seed=10 + step)
        tg.muon_update(ours, theirs.grad[None], buffer, scalar(lr), scalar(0.9), dtype)
        reference.step()
        moved = (theirs.detach() - start).norm()
        assert (ours[0] - theirs.detach()).norm() / moved < tolerance
    torch.testing.assert_close(buffer[0], reference.state[theirs]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_muon_is_nesterov_momentum_then_an_orthogonal_step_of_the_stated_size(tg):
    G1, G2, mu, lr = normal(2, 64, 16), normal(2, 64, 16, seed=1), 0.9, 0.1
    weight, buffer = torch.zeros(2, 64, 16), torch.zeros(2, 64, 16)
    tg.muon_update(weight, G1, buffer, scalar(lr), scalar(mu), FP32)
    M = 0.1 * G1
    torch.testing.assert_close(buffer, M)
    wanted = -lr * 4 ** 0.5 * tg.orthogonalize(0.1 * G1 + 0.9 * M, FP32)        # sqrt(64 / 16) = 2
    torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-6)
    tg.muon_update(weight, G2, buffer, scalar(lr), scalar(mu), FP32)
    M = 0.9 * M + 0.1 * G2
    wanted = wanted - lr * 2 * tg.orthogonalize(0.1 * G2 + 0.9 * M, FP32)
    torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-6)
    plain = tg.orthogonalize(M, FP32)                                           # what it would be without Nesterov
    assert (tg.orthogonalize(0.1 * G2 + 0.9 * M, FP32) - plain).norm() / plain.norm() > 0.05


@pytest.mark.parametrize("shape, factor", [((64, 16), 2.0), ((16, 64), 1.0), ((32, 32), 1.0)])
def test_muon_steps_scale_with_the_square_root_of_rows_over_columns(tg, shape, factor):
    weight, G = torch.zeros(1, *shape), normal(1, *shape)
    tg.muon_update(weight, G, torch.zeros_like(G), scalar(0.05), scalar(0.0), FP32)
    torch.testing.assert_close(weight, -0.05 * factor * tg.orthogonalize(G, FP32), rtol=0, atol=1e-6)


def test_muon_on_a_stack_equals_muon_on_each_matrix(tg):
    weight, G, buffer = normal(3, 16, 48), normal(3, 16, 48, seed=1), normal(3, 16, 48, seed=2)
    together = weight.clone()
    tg.muon_update(together, G, buffer.clone(), scalar(0.05), scalar(0.9), FP32)
    for i in range(3):
        alone = weight[i:i + 1].clone()
        tg.muon_update(alone, G[i:i + 1], buffer[i:i + 1].clone(), scalar(0.05), scalar(0.9), FP32)
        torch.testing.assert_close(together[i:i + 1], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("eps, size", [(1e-10, 1.0), (1e-10, 1e-9), (1e-3, 1e-3)])
def test_adam_equals_torch_optim_adam(tg, eps, size):
    """Also where the gradients are no larger than eps."""
    ours, theirs = normal(7, 5), nn.Parameter(normal(7, 5))
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    reference = torch.optim.Adam([theirs], lr=0.01, betas=(0.8, 0.95), eps=eps)
    for step in range(1, 7):
        theirs.grad = size * normal(7, 5, seed=step)
        bias = scalar(1 - 0.8 ** step), scalar(1 - 0.95 ** step)
        tg.adam_update(ours, theirs.grad, first, second, scalar(0.01), *bias, 0.8, 0.95, eps)
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second, reference.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=0)


# ---- banks -----------------------------------------------------------------------------------------------------------


def make_params(seed=0, dtype=FP32):
    """A Muon group of a merged [3, 8, 16] and two single matrices, and an Adam group of odd shapes."""
    shapes = {"qkv": (3, 8, 16), "out": (8, 16), "other": (8, 16), "table": (9, 7), "mix": (2,), "scale": ()}
    return {name: nn.Parameter(normal(*shape, seed=seed + i, dtype=dtype))
            for i, (name, shape) in enumerate(shapes.items())}


def make_groups(tg, params):
    names = list(params)
    return [tg.Group("matrices", "muon", {n: params[n] for n in names[:3]}, 0.05),
            tg.Group("rest", "adam", {n: params[n] for n in names[3:]}, 0.01)]


def test_parameters_become_views_of_their_bank_and_keep_their_values(tg):
    params = make_params()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32)
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
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32)
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
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32)
    adam = torch.optim.Adam([expected[n] for n in ("table", "mix", "scale")], lr=0.005, betas=(0.8, 0.95), eps=1e-10)
    matrices = torch.cat([expected[n].detach().view(-1, 8, 16) for n in ("qkv", "out", "other")])
    buffer = torch.zeros_like(matrices)
    for step in range(3):
        grads = {name: p.detach().clone() for name, p in make_params(seed=50 + step).items()}
        for name, p in params.items():
            p.grad.copy_(grads[name])
            expected[name].grad = grads[name]
        norms = optimizer.step(0.5, 0.9)
        G = torch.cat([grads[n].view(-1, 8, 16) for n in ("qkv", "out", "other")])
        rest = sum(float(grads[n].square().sum()) for n in ("table", "mix", "scale"))
        assert norms.tolist() == pytest.approx([float(G.square().sum()), rest], rel=1e-5)
        tg.muon_update(matrices, G, buffer, scalar(0.025), scalar(0.9), FP32)
        adam.step()
    torch.testing.assert_close(torch.cat([params[n].view(-1, 8, 16) for n in ("qkv", "out", "other")]), matrices,
                               rtol=0, atol=1e-6)
    for name in ("table", "mix", "scale"):
        torch.testing.assert_close(params[name], expected[name], rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_is_harmless(tg):
    params = make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32)
    before = {name: p.detach().clone() for name, p in params.items()}
    (params["qkv"].sum() + (params["mix"] * torch.tensor([1.0, -2.0])).sum()).backward()
    optimizer.step(1.0, 0.9)
    for name, p in params.items():
        assert bool(p.isfinite().all())
        assert torch.equal(p, before[name]) == (name not in ("qkv", "mix")), name


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_banks_are_padded_to_the_ranks_and_shards_tile_them(tg, size):
    params = make_params()
    values = {name: p.detach().clone() for name, p in params.items()}
    for kind, number in (("muon", 5), ("adam", 3 * 128)):
        total = None
        for rank in range(size):
            group = next(g for g in make_groups(tg, params) if g.kind == kind)
            bank = tg.Bank(group, tg.World(rank, size))
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
    bank = tg.Optimizer([tg.Group("g", "adam", {"p": p}, 1e-4)], tg.World(), False, BF16)
    for _ in range(100):
        p.grad.fill_(1.0)
        bank.step(1.0, 0.9)
    assert bank.banks[0].master.dtype == FP32
    torch.testing.assert_close(bank.banks[0].master, torch.full((256,), 0.99), rtol=0, atol=1e-5)
    assert torch.equal(p.detach(), bank.banks[0].master.bfloat16()) and float(p[0].detach()) < 1.0


def test_fp32_weights_are_their_own_master(tg):
    optimizer = tg.Optimizer(make_groups(tg, make_params()), tg.World(), False, FP32)
    assert all(bank.master is bank.weight_shard for bank in optimizer.banks)


def test_tensors_lists_everything_that_a_step_changes(tg):
    params = make_params()
    optimizer = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32)
    saved = {name: t.clone() for name, t in optimizer.tensors().items()}

    def three_steps():
        for bank in optimizer.banks:
            bank.steps = 0
        for step in range(3):
            for i, p in enumerate(params.values()):
                p.grad.copy_(normal(*p.shape, seed=step * 10 + i))
            optimizer.step(1.0, 0.9)
        return {name: p.detach().clone() for name, p in params.items()}
    first = three_steps()
    for name, t in optimizer.tensors().items():
        t.copy_(saved[name])
    second = three_steps()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_communication_overlaps_the_updates(tg, monkeypatch):
    """All reductions are started before the first update, each gather before the next one, and awaited at the end."""
    params = make_params()
    optimizer, events = tg.Optimizer(make_groups(tg, params), tg.World(), False, FP32), []

    class Work:
        def __init__(self, what):
            self.what = what
            events.append(f"start {what}")

        def wait(self):
            events.append(f"wait {self.what}")
    for bank in optimizer.banks:
        name = bank.group.name
        monkeypatch.setattr(bank, "reduce", lambda name=name: Work(f"reduce {name}"))
        monkeypatch.setattr(bank, "gather", lambda name=name: Work(f"gather {name}"))
    monkeypatch.setattr(optimizer, "update", lambda bank, lr, mu: events.append(f"update {bank.group.name}"))
    optimizer.step(1.0, 0.9)
    assert events == ["start reduce matrices", "start reduce rest",
                      "wait reduce matrices", "update matrices", "start gather matrices",
                      "wait reduce rest", "update rest", "start gather rest",
                      "wait gather matrices", "wait gather rest"]


# ---- several ranks ---------------------------------------------------------------------------------------------------


def several_steps(rank, size, dtype):
    if size > 1:
        hide_gpus()
    tg = load_train_gpt()
    world = tg.init_world() if size > 1 else tg.World()
    params = make_params(dtype=dtype)
    optimizer = tg.Optimizer(make_groups(tg, params), world, False, FP32)
    norms = []
    for step in range(3):
        for i, p in enumerate(params.values()):       # the ranks' parts add up to the same gradient for any size
            whole = normal(*p.shape, seed=100 * step + i)
            parts = [whole * (0.7 + r) for r in range(size)]
            p.grad.copy_((parts[rank] * (1 / sum(0.7 + r for r in range(size)))).to(dtype))
        got = optimizer.step(1.0, 0.9)
        if size > 1:
            torch.distributed.all_reduce(got)
        norms.append(got.tolist())
    tg.close_world(world)
    return {name: p.detach().clone() for name, p in params.items()}, norms


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_give_the_weights_of_one(run_ranks, size):
    alone, norms = several_steps(0, 1, FP32)
    ranks = run_ranks(size, several_steps, FP32)
    for weights, found in ranks:
        for name, p in weights.items():
            assert torch.equal(p, ranks[0][0][name])              # all ranks hold the same bytes
            torch.testing.assert_close(p, alone[name], rtol=0, atol=1e-5)
        for a, b in zip(found, norms):
            assert a == pytest.approx(b, rel=1e-5)
