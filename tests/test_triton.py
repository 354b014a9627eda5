"""The Triton kernels of room 3 against the references beside them: on a GPU, or by Triton's interpreter on a CPU."""
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from rank_helpers import load_train_gpt

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
def tg(device):
    return load_train_gpt()


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
    wanted = tg.sums_by_id(ordered, place, grads)
    torch.testing.assert_close(tg.fast_sums_by_id(ordered, place, grads), wanted, rtol=1e-5, atol=1e-5)


def test_sums_of_runs_in_bf16_are_near_and_the_same_bits_each_time(tg, device):
    if device == "cpu":
        pytest.skip("the interpreter has no bf16")
    ordered, place = sorted_ids(20_000, 5000, device)
    grads = normal(20_000, 768, device=device, dtype=torch.bfloat16)
    found = [tg.fast_sums_by_id(ordered, place, grads) for _ in range(3)]
    torch.testing.assert_close(found[0], tg.sums_by_id(ordered, place, grads), rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
