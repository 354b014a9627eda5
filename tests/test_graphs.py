"""Recorder (room 3), with a stand-in for CUDA graphs: it records each ATen call with the very tensors and numbers that
the call got, and replays the calls on these. So it freezes what a real graph freezes."""
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from model_helpers import small_batches, small_run, take_step, write_small_shards
from rank_helpers import load_train_gpt
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph:
    def __init__(self):
        self.calls = []

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, results in self.calls:
            for old, new in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.overwritten = graph, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for t in tree_leaves((args, kwargs)):
                if isinstance(t, torch.Tensor) and t.numel():
                    self.overwritten.setdefault(id(t), (t, t.clone()))
        results = function(*args, **kwargs)
        self.graph.calls.append((function, args, kwargs, tree_leaves(results)))
        return results


@contextlib.contextmanager
def fake_capture(graph, pool, stream, mode):
    with Recording(graph) as recording:
        yield
    for t, before in recording.overwritten.values():         # a real capture runs nothing
        t.data.copy_(before)


@pytest.fixture
def fake_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    for name in ("graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_small_shards(tmp_path_factory.mktemp("shards"))


def losses(tg, files, recorded, steps=16, **faults):
    """Mean losses of the steps of a small run: all stages (further targets in the first ones, whose weights change at
    each step), three passes in the last step. faults replace functions."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in faults.items():
            patch.setattr(tg, name, function)
        run = small_run(files, num_steps=steps, micro_rows=8, stages="record")
        run.forward_backward.is_recording = recorded
        return [float(take_step(run, step, batch)[0]) for step, batch in zip(range(steps), small_batches(run))]


def test_recorded_passes_give_the_losses_of_plain_ones_in_every_stage(tg, files, fake_graphs):
    assert losses(tg, files, True) == losses(tg, files, False)


def row_as_number(tg):
    class Faulty(tg.Recorder):
        def __call__(self, constants, inputs, targets, row, weights):
            self.row = getattr(self, "row", row)
            return super().__call__(constants, inputs, targets, self.row, weights)
    return dict(Recorder=Faulty)


def weights_of_the_first_step(tg):
    class Faulty(tg.Recorder):
        def __call__(self, constants, inputs, targets, row, weights):
            self.weights = getattr(self, "weights", weights)
            return super().__call__(constants, inputs, targets, row, self.weights)
    return dict(Recorder=Faulty)


def results_not_cloned(tg):
    def step(run, step, batch, lr_scale, stop=0):
        with pytest.MonkeyPatch.context() as patch:
            clone = torch.Tensor.clone
            patch.setattr(torch.Tensor, "clone", lambda t: t if t.ndim >= 3 else clone(t))
            return original(run, step, batch, lr_scale, stop)
    original = tg.train_step
    return dict(train_step=step)


def inputs_not_copied(tg):
    class Faulty(tg.Recorder):
        def __call__(self, constants, *inputs):
            key = constants, *(t.shape for t in inputs)
            if self.graphs.get(key):
                inputs = self.graphs[key][1]
            return super().__call__(constants, *inputs)
    return dict(Recorder=Faulty)


@pytest.mark.parametrize("fault", [row_as_number, weights_of_the_first_step, results_not_cloned, inputs_not_copied])
def test_the_stand_in_catches(tg, files, fake_graphs, fault):
    assert losses(tg, files, True, **fault(tg)) != losses(tg, files, False)


def test_a_recorder_replays_on_new_inputs_and_freezes_python_numbers(tg, fake_graphs):
    calls = []
    def add(number, x, factor):
        calls.append(number)
        return x * factor + number
    recorder = tg.Recorder(add, torch.device("cpu"), is_recording=True)
    def call(number, x, factor):
        return recorder((number,), torch.full((3,), x), torch.tensor(factor)).tolist()
    assert [call(1, 2.0, 3.0), call(1, 4.0, 3.0), call(1, 5.0, -1.0), call(1, 6.0, 0.5)] == [
        [7.0] * 3, [13.0] * 3, [-4.0] * 3, [4.0] * 3]
    assert calls == [1, 1]                                    # once plain, once recorded
    assert call(2, 1.0, 1.0) == [3.0] * 3 and calls == [1, 1, 2]


def test_graphs_are_refused_where_they_cannot_be(tg):
    assert not tg.choose_kernels(torch.device("cpu")).graphs
    with pytest.raises(tg.Refusal, match="--graphs=on"):
        tg.choose_kernels(torch.device("cpu"), graphs="on")


# ---- real graphs -----------------------------------------------------------------------------------------------------


def print_losses_without_and_with_graphs():
    """As a rank of torchrun: two lines, the losses of the same 60 steps without and with graphs."""
    tg = load_train_gpt()
    world = tg.init_world(True)
    tg.join_group(world)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        run = small_run(write_small_shards(Path(folder)), world, False, num_steps=60, stages="sprint", num_layers=3,
                        batch_tokens=4 * 512, row_tokens=512, micro_rows=2 if world.size == 1 else 1, block_tokens=128,
                        val_overlap=128, model_dim=128, head_dim=64, qk_dim=64, copy_dim=64, mlp_dim=256,
                        long_layers=(1,), value_layers=(1,), max_epochs=10 ** 6)
        state = [t for bank in run.optimizer.banks for t in (*bank.tensors(), bank.weight)]
        before, found = [t.clone() for t in state], []
        for recorded in (False, True):
            for t, was in zip(state, before):
                t.copy_(was)
            for bank in run.optimizer.banks:
                bank.steps = 0
            run.forward_backward.is_recording, run.forward_backward.graphs = recorded, {}
            found.append([float(take_step(run, step, batch)[0]) for step, batch in enumerate(small_batches(run))])
        graphs = [record for record in run.forward_backward.graphs.values() if record]
        if world.rank == 0:
            print(json.dumps([len(graphs), *found]))
    tg.close_world()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (1, 2))
def test_graphs_change_no_digit_of_60_losses_on_gpus(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stderr[-3000:]
    graphs, plain, recorded = json.loads(answer.stdout.splitlines()[-1])
    assert graphs == 4 and recorded == plain and len(plain) == 60 and plain[-1] < plain[0] - 0.5


if __name__ == "__main__":
    print_losses_without_and_with_graphs()
