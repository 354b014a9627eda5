"""The Triton kernels of room 3 against the references beside them: on a GPU, or by Triton's interpreter on a CPU."""
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import load_train_gpt

SOFTCAP = (23.0, 5.0, 7.5)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(IS_INTERPRETED, reason="is the test that starts this process")
def test_the_interpreter_finds_the_kernels_right():
    """In a process of its own, because triton must know of it when it is first imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "cpu"]
    answer = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
                            capture_output=True, text=True, timeout=250)
    assert answer.returncode == 0, answer.stdout[-3000:]


@pytest.fixture(params=["cpu" if IS_INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def tg(device, monkeypatch):
    module = load_train_gpt()
    if device == "cpu":                                  # the interpreter knows no instructions of a GPU
        import triton
        import triton.language
        monkeypatch.setitem(globals(), "tl", triton.language)
        monkeypatch.setattr(module, "hardware_tanh", triton.jit(plain_tanh))
    return module


def plain_tanh(x):
    return 1 - 2 / (1 + tl.exp(2 * x))                    # noqa: F821, a kernel's own tl


def sorted_ids(count, num_ids, device):
    """Sorted ids of which one has half of the places, and where each stood; gradients have a place there."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_ids, (count,), generator=generator)
    ids[::2] = num_ids // 2
    return ids.to(device).sort(stable=True)


def normal(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("count, width, num_ids", [(200, 64, 40), (333, 40, 3), (31, 1300, 1), (64, 16, 1000)])
def test_sums_of_runs(tg, device, count, width, num_ids):
    ordered, place = sorted_ids(count, num_ids, device)
    grads = normal(count, width, device=device)
    wanted = tg.run_sums(ordered, place, grads)
    torch.testing.assert_close(tg.fast_run_sums(ordered, place, grads), wanted, rtol=1e-5, atol=1e-5)
    exact = torch.zeros(num_ids, width, dtype=torch.float64, device=device)
    exact.index_add_(0, ordered, grads.double()[place])
    table = normal(num_ids, width + 8, seed=1, device=device)
    found = table.clone()
    tg.fast_run_sums(ordered.int(), place, grads, found[:, 8:])
    torch.testing.assert_close((found - table)[:, 8:].double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:, :8], table[:, :8])


def test_sums_of_runs_in_bf16_are_near_and_the_same_bits_each_time(tg, device):
    if device == "cpu":
        pytest.skip("the interpreter has no bf16")
    ordered, place = sorted_ids(20_000, 5000, device)
    grads = normal(20_000, 768, device=device, dtype=torch.bfloat16)
    found = [tg.fast_run_sums(ordered, place, grads) for _ in range(3)]
    torch.testing.assert_close(found[0], tg.run_sums(ordered, place, grads), rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_embedding_that_adds_its_gradient_in_place(tg, device):
    weight = normal(50, 24, device=device).requires_grad_()
    weight.grad = torch.ones_like(weight)
    tokens = torch.randint(50, (3, 40), generator=torch.Generator().manual_seed(2), dtype=torch.int32).to(device)
    y = tg.FastEmbedding.apply(weight, tokens, slice(8, 24), tokens.flatten().sort(stable=True))
    upstream = normal(3, 40, 16, seed=3, device=device)
    y.backward(upstream)
    plain = weight.detach().clone().requires_grad_()
    wanted = F.embedding(tokens, plain)[..., 8:]
    assert torch.equal(y, wanted)
    wanted.backward(upstream)
    torch.testing.assert_close(weight.grad - 1, plain.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_targets", (1, 3))
def test_the_gradient_by_logits(tg, device, num_targets):
    T, V = 64, 256
    logits, (log_lm, log_copy) = 5 * normal(T, V, device=device), normal(2, T, seed=1, device=device)
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(-40, V, (num_targets, T), generator=generator).clamp(min=-1).to(device)
    targets[-1, ::3] = targets[0, ::3]
    weights = torch.tensor([0.5, 0.25], device=device) if num_targets == 3 else None
    _, logsumexp, shares = tg.softmax_losses(logits, targets, log_lm, log_copy, SOFTCAP, weights)
    wanted = tg.logits_gradient(logits, logsumexp, targets, shares, SOFTCAP)
    grad, grad_t = tg.fast_logits_gradient(logits, logsumexp, targets, shares, SOFTCAP, 3.0, torch.float32)
    assert float((grad / 3 - wanted).norm() / wanted.norm()) < (1e-5 if device == "cpu" else 5e-3)
    assert torch.equal(grad.t(), grad_t)
