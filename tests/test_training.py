"""Room 9: the loop. Gradients and losses don't depend on ranks or memory, state survives warm-up, runs end honestly."""
import contextlib
import dataclasses
import glob
import gzip
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_helpers import (EOD, by_parameter, hide_gpus, learnable_tokens, record_gradients, replaced, small_batches,
                           small_options, small_run, take_step, without_launcher, write_small_shards)
from rank_helpers import load_train_gpt
from shard_helpers import put_shard, raw_shard

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_small_shards(tmp_path_factory.mktemp("small_shards"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    without_launcher(monkeypatch)


class Answer:
    """What a call of main() left: exit code, printed text, log files."""

    def __init__(self, code, out, err, folder):
        self.code, self.out, self.err = code, out, err
        self.logs = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]

    @property
    def result(self):
        """The result line of the only log."""
        [log] = self.logs
        [line] = [line for line in log.splitlines() if line.startswith("result:")]
        return json.loads(line.removeprefix("result:"))

    @property
    def events(self):
        return self.logs[0].rpartition("=" * 100 + "\n")[2]


def call_main(argv, log_dir):
    tg, out, err = load_train_gpt(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = tg.main([*argv, f"--log_dir={log_dir}"])
    return Answer(code, out.getvalue(), err.getvalue(), log_dir)


def tokens_of(config, steps):
    """Tokens of the first steps of the schedule."""
    tg = load_train_gpt()
    return sum(tg.rows_at(config, step) for step in range(steps)) * config.row_tokens


def main_as_rank(rank, size, argv, log_dir):
    hide_gpus()
    answer = call_main(argv, log_dir)
    return answer.code, answer.out, answer.err


# ---- ranks, micro-batches, gradients ---------------------------------------------------------------------------------


def three_steps(rank, size, files, micro_rows, more=None):
    """Everything that must not depend on the split: gradients of step 1, losses, validation, weights."""
    if size > 1:
        hide_gpus()
    tg = load_train_gpt()
    world = tg.init_world() if size > 1 else tg.World()
    tg.join_group(world)
    run = small_run(files, world, micro_rows=micro_rows, **(more or {}))
    gradients, losses, norms, validation = record_gradients(run), [], [], [tg.evaluate(run)]
    for step, batch in enumerate(small_batches(run)):
        stats = take_step(run, step, batch)
        losses.append(float(stats[0]))
        norms.append(stats[1:].tolist())
    validation.append(tg.evaluate(run))
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    tg.close_world()
    return dict(gradients=gradients[0], losses=losses, norms=norms, validation=validation, weights=weights)


@pytest.fixture(scope="module")
def alone(files):
    """One process, the whole batch of up to 12 rows in one forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        without_launcher(patch)
        return three_steps(0, 1, files, 24)


SPLITS = [(1, 5), (1, 1), (2, 6), (3, 2)]          # processes, micro_rows


@pytest.fixture(scope="module", params=SPLITS, ids=[f"{size}_ranks_{micro}_micro_rows" for size, micro in SPLITS])
def split(request, files, run_ranks):
    size, micro_rows = request.param
    return [three_steps(0, 1, files, micro_rows)] if size == 1 else run_ranks(size, three_steps, files, micro_rows)


def gathered(files, results):
    """{parameter: gradient of step 1}."""
    shards = {name: [r["gradients"][name] for r in results] for name in results[0]["gradients"]}
    return by_parameter(small_run(files), shards)


def assert_same_gradients(found, wanted, tolerance):
    families = {}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() / gradient.norm() < 500 * tolerance, name
        families.setdefault(re.sub(r"\d+", "*", name), []).append((found[name], gradient))
    assert len(families) == 16
    for name, pairs in families.items():
        got, gradient = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs))
        assert (got - gradient).norm() / gradient.norm() < tolerance, name


def test_gradients_do_not_depend_on_ranks_or_micro_rows(files, alone, split):
    """To 2e-6 for each family; single scalars whose gradients cancel out to almost nothing have it less exact."""
    assert_same_gradients(gathered(files, split), gathered(files, [alone]), 2e-6)


def test_losses_over_three_steps_do_not_depend_on_ranks_or_micro_rows(alone, split):
    for result in split:
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert result["losses"] == split[0]["losses"]
        for a, b in zip(result["norms"], alone["norms"]):
            assert a == pytest.approx(b, rel=1e-3)
    assert max(alone["losses"]) - min(alone["losses"]) > 0.01          # it did move


def test_weights_after_three_steps_are_the_same_bytes_on_all_ranks_and_near_those_of_one(alone, split):
    """Orthogonalisation amplifies small directions hundreds of times, and a table's row takes a step of one size
    whatever its gradient, hence the tolerances: 2% of what three steps can move a weight."""
    for name, weight in alone["weights"].items():
        for result in split:
            assert torch.equal(result["weights"][name], split[0]["weights"][name]), name
            assert (result["weights"][name] - weight).abs().max() < (0.06 if name == "ngrams" else 3e-3), name


def test_validation_does_not_depend_on_ranks(alone, split):
    for result in split:
        assert result["validation"] == pytest.approx(alone["validation"], abs=1e-5)


def test_the_gradient_is_that_of_the_mean_loss_over_the_whole_batch(tg, files, alone):
    """Of the training loss by hand: each row by its own candidates, mixed with its copies."""
    run = small_run(files)
    batch, asked, model = next(small_batches(run)), tg.train_view(run, 0), run.model
    assert 0 < asked.candidates < 384
    segments = tg.segment_ids(batch.inputs, EOD)
    masks = model.masks(segments, asked.window)
    hidden = model.hidden(batch.inputs, segments, masks, True)
    log_lm, log_copy = model.pointer(hidden, batch.inputs, batch.targets, masks["long"])
    loss = 0.0
    for row in range(6):
        start = (asked.first_row + row) * (asked.candidates + 1)
        ids = tg.candidate_set(batch.targets[row], 384, asked.candidates, start)[0]
        logp = (23 * torch.sigmoid((hidden[row] @ model.embed[ids].T + 5) / 7.5)).log_softmax(-1)
        for t, target in enumerate(batch.targets[row].tolist()):
            p = log_lm[row, t].exp() * logp[t, ids.tolist().index(target)].exp() + log_copy[row, t].exp()
            loss = loss - p.log() / (6 * 64)
    assert alone["losses"][0] == pytest.approx(float(loss.detach()), rel=1e-6)
    names, params = zip(*(item for item in model.named_parameters() if item[0] != "ngrams"))
    ids, rows = model.looked_up
    *grads, looked_up = torch.autograd.grad(loss, [*params, rows])
    wanted = dict(zip(names, grads))
    wanted["ngrams"] = torch.zeros(model.ngrams.shape).index_add_(0, ids.flatten(), looked_up.flatten(0, -2))
    found = gathered(files, [alone])
    assert_same_gradients(found, wanted, 2e-6)
    for bank, norm in zip(run.optimizer.banks, alone["norms"][0]):
        if bank.group.kind != "rows":                # there of each looked-up row by itself
            total = sum(float(found[name].square().sum()) for name in bank.group.params)
            assert norm == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("micro_rows, wanted", [
    (24, (6, 12)), (100, (6, 12)), (6, (6, 6)), (5, (3, 4)), (1, (1, 1)), (0, (6, 12))])
def test_micro_batches_are_equal_and_at_most_micro_rows(tg, files, micro_rows, wanted):
    run = small_run(files, micro_rows=micro_rows)
    assert (tg.rows_at_once(run, 0), tg.rows_at_once(run, 1)) == wanted


def test_rows_are_numbered_over_steps_and_ranks(tg, files):
    """No two rows of neighbouring steps draw the same negatives, and ranks have those of one process."""
    run = small_run(files, batch_tokens=32 * 64)
    first = [tg.train_view(run, step).first_row for step in range(3)]
    sizes = [tg.rows_at(run.config, step) for step in range(3)]
    assert all(first[i] + sizes[i] <= first[i + 1] for i in range(2))
    for rank in range(5):
        run.world = tg.World(rank, 5)
        assert [tg.train_view(run, step).first_row for step in range(3)] == [
            a + rank * -(-n // 5) for a, n in zip(first, sizes)]


@pytest.mark.slow
def test_compiled_training_gives_the_gradients_and_losses_of_the_uncompiled(tg, files):
    """With the fused head, which is the compiled path. Weights after a step aren't compared: see above."""
    if tg.find_compiler() is None:
        pytest.skip("no C compiler here")
    found, losses = [], []
    for switch in ("off", "on"):
        run = small_run(files, compile=switch)
        gradients, batch = record_gradients(run), next(small_batches(run))
        losses.append([tg.evaluate(run), float(take_step(run, 0, batch)[0])])
        found.append(by_parameter(run, {name: [shard] for name, shard in gradients[0].items()}))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert_same_gradients(found[1], found[0], 1e-5)


@pytest.mark.recipe
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_start_finds_the_blocks_graphs_with_fp8_in_the_compilers_cache(tg, files, tmp_path):
    """torch leaves graphs that hold a function with a backward pass of its own out of one of its caches, unless asked.
    Another backward pass is not taken for it."""
    if tg.find_compiler() is None:
        pytest.skip("no C compiler here")
    source, product, found = Path(tg.__file__).read_text(), "fp8_product(upstream, w.t())", []
    library, front, _ = source.partition("if __name__ ==")
    assert library.count(product) == 1 and front
    for factor in (1, 1, 3):
        attempt = tmp_path / "attempt.py"
        attempt.write_text(library.replace(product, f"{factor} * {product}") + f"""
from torch._dynamo.utils import counters
config, overrides = parse_config({small_options(**files, compile="on")!r})
run = build(config, World(), overrides)
torch.manual_seed(0)
block = Block(run.config, Kernels(compile=True, fp8=True, dtype=torch.bfloat16), has_attention=False)
block.down.data.normal_(std=0.02)
block.compile(dynamic=False, fullgraph=True)
x = torch.randn(1, 64, run.config.model_dim, dtype=torch.bfloat16, requires_grad=True)
block(x, x.detach().clone().requires_grad_(), None, None, None).sum().backward()
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"], float(x.grad.float().norm())]))
""")
        environment = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        answer = subprocess.run([sys.executable, attempt], capture_output=True, text=True, timeout=280, env=environment)
        assert answer.returncode == 0, answer.stderr[-3000:]
        found.append(json.loads(answer.stdout.splitlines()[-1]))
    (first_hits, first), (second_hits, second), (other_hits, other) = found
    assert (first_hits, second_hits, other_hits) == (0, 1, 0)
    assert first == second and other > 1.05 * first


def test_validation_compiles_nothing_but_its_loss(tg, files, monkeypatch):
    """After a training step of the same shape there is one new graph: the softmax over all ids, without gradients."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: compile(*args, **more, backend="aot_eager"))
    monkeypatch.setattr(tg, "find_compiler", lambda: "not needed")
    run = small_run(files, compile="on", num_steps=8)
    step = 4                                             # 12 rows, candidates; the last stage has 24
    run.micro_rows = 12
    batches = list(small_batches(run))
    take_step(run, step, batches[step])
    before = counters["stats"]["unique_graphs"]
    assert before > 5
    tg.evaluate(run)
    assert counters["stats"]["unique_graphs"] == before + 1
    tg.evaluate(run)
    take_step(run, step, batches[step])
    assert counters["stats"]["unique_graphs"] == before + 1
    torch._dynamo.reset()


def test_each_step_takes_rate_momentum_and_view_from_the_schedules(tg, files):
    run, calls, views = small_run(files, num_steps=12), [], []
    forward = run.model.forward

    def note(lr_scale, momentum):
        calls.append((lr_scale, momentum))
        for bank in run.optimizer.banks:
            bank.zero_grad()
        return torch.zeros(len(run.optimizer.banks))

    def seen(inputs, targets, view):
        views.append(plain(view))
        return forward(inputs, targets, view)

    def plain(view):
        return view._replace(first_row=view.first_row.tolist(), further_weights=view.further_weights.tolist())
    run.optimizer.step, run.model.forward = note, seen
    c = run.config
    for step, batch in enumerate(small_batches(run)):
        take_step(run, step, batch)
    assert calls == [(tg.lr_scale_at(c, step), tg.momentum_at(c, step)) for step in range(12)]
    assert views == [plain(tg.train_view(run, step)) for step in range(12)] and all(view.training for view in views)
    assert [view.window for view in views] == [3] * 3 + [7] * 6 + [11] * 3
    assert len(set(calls)) > 10


def test_the_average_of_the_tail_ends_in_the_weights_of_the_last_step(tg, files):
    run, calls = small_run(files, num_steps=12), []
    run.optimizer.average = lambda rate, share: calls.append((rate, share))
    for step, batch in enumerate(small_batches(run)):
        take_step(run, step, batch)
    assert calls[0] == (1.0, 0.0) and len(calls) == 4 and calls[-1] == (1.0, run.config.ema_blend)
    assert [share for _, share in calls[:-1]] == [0.0] * 3


# ---- validation ------------------------------------------------------------------------------------------------------


def test_the_validation_loss_is_the_mean_over_exactly_val_tokens_targets(tg, files):
    """500 targets, in rows of 64 that begin 16 tokens before the first of their 48 targets."""
    run = small_run(files)
    stream, losses, view = run.val_stream, [], tg.View(run.config.val_window_blocks)
    tokens = stream.read(0, 501)
    with torch.no_grad():
        for a in range(0, 500, 48):
            start, stop = max(0, a - 16), min(a + 48, 500)
            part = tokens[start:stop]
            z = run.model(F.pad(part, (0, 64 - len(part)), value=EOD)[None], None, view)[0, a - start:len(part)]
            losses.append(F.nll_loss(z, tokens[a + 1:stop + 1].long(), reduction="none"))
    losses = torch.cat(losses)
    assert len(losses) == 500
    assert tg.evaluate(run) == pytest.approx(float(losses.mean()), rel=1e-6)


def test_more_context_before_a_row_helps_a_trained_model(tg, files):
    run = small_run(files, random_weights=False, num_steps=100, lr_embed=0.05, table_rows=1, value_layers=())
    for step, batch in enumerate(small_batches(run)):       # without the tables that learn these few tokens by heart
        take_step(run, step, batch)
    losses = []
    for overlap in (0, 16, 48):
        run.config = replaced(run.config, val_overlap=overlap)
        losses.append(tg.evaluate(run))
    assert losses[0] > losses[2]


def test_validation_sees_its_own_window_and_changes_nothing(tg, files):
    run = small_run(files)
    take_step(run, 0, next(small_batches(run)))
    before = {key: t.clone() for key, t in run.optimizer.gathered()}
    state = torch.get_rng_state()
    wide = tg.evaluate(run)
    run.config = replaced(run.config, val_window_blocks=1)
    assert abs(tg.evaluate(run) - wide) > 1e-4
    assert run.model.training and torch.equal(state, torch.get_rng_state()) and not run.model.ngrams.touched
    assert all(torch.equal(before[key], t) for key, t in run.optimizer.gathered())
    assert not any(bank.grad.any() for bank in run.optimizer.banks if bank.group.kind != "rows")


# ---- warm-up ---------------------------------------------------------------------------------------------------------


def test_warm_up_restores_every_byte_and_runs_every_shape(tg, files, tmp_path, monkeypatch):
    runs = [small_run(files, num_steps=4, ema_frac=0.5) for _ in range(2)]
    loaders = [small_batches(run) for run in runs]
    for run, loader in zip(runs, loaders):   # from the middle of a run: no state is zero
        for step in range(3):
            take_step(run, step, next(loader))
    run, shapes, forward = runs[0], [], runs[0].model.forward

    def seen(tokens, targets, view):
        assert tokens is not targets          # one tensor twice would compile a graph that no step ever runs
        shapes.append((tuple(tokens.shape), view.candidates, view.training))
        return forward(tokens, targets, view)
    monkeypatch.setattr(run.model, "forward", seen)
    before = {key: t.clone() for key, t in run.optimizer.gathered()}
    assert before["embed/ema"].any() and before["ngrams/weight"].any()
    counts, position, rng = [bank.steps for bank in run.optimizer.banks], run.position, torch.get_rng_state()
    log = tg.RunLog(str(tmp_path), tg.World())
    tg.warmup(run, log)
    log.close()
    assert set(shapes) == {((6, 64), 128, True), ((12, 64), 128, True), ((24, 64), 128, True), ((24, 64), 0, False)}
    assert torch.equal(rng, torch.get_rng_state())
    for key, t in run.optimizer.gathered():
        assert before[key].numpy().tobytes() == t.numpy().tobytes(), key
    assert all(torch.equal(bank.weight, other.weight) and torch.equal(bank.grad, other.grad)
               for bank, other in zip(run.optimizer.banks, runs[1].optimizer.banks) if bank.group.kind != "rows")
    assert counts == [bank.steps for bank in run.optimizer.banks] and position == run.position
    assert not run.model.ngrams.touched
    monkeypatch.undo()
    found = [take_step(run, 3, next(loader)) for run, loader in zip(runs, loaders)]       # and both go on alike
    assert torch.equal(*found)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*(run.optimizer.gathered() for run in runs)))


def test_a_second_process_compiles_what_follows_the_blocks(tg, files, monkeypatch):
    """compile_beside must ask for just the shapes that a run then asks for, else its work is lost."""
    asked = dict(main=set(), beside=set())
    options = small_options(**files, num_steps=13)
    runs = [small_run(files, num_steps=13) for _ in range(2)]

    def note(who):
        loss, update = tg.GPT.loss, tg.Optimizer.update

        def noting_loss(self, x, tokens, targets, mask, view):
            kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (x, tokens, targets))
            asked[who].add(("loss", kinds, view.candidates, view.training, len(view.further_weights)))
            assert tokens is not targets
            return loss(self, x, tokens, targets, mask, view)

        def noting_update(self, bank, lr_scale, momentum):
            rows = (bank.ids.dtype, bank.grads.dtype, bank.grads.shape[1:]) if bank.group.kind == "rows" else ()
            asked[who].add((bank.group.name, *rows))
            update(self, bank, lr_scale, momentum)
        monkeypatch.setattr(tg.GPT, "loss", noting_loss)
        monkeypatch.setattr(tg.Optimizer, "update", noting_update)
    note("main")
    for step, batch in enumerate(small_batches(runs[0])):
        take_step(runs[0], step, batch)
        if step == 12:
            break
    monkeypatch.undo()
    note("beside")
    built, build = [], tg.build
    monkeypatch.setattr(tg, "build", lambda *args: built.append(build(*args)) or runs[1])
    tg.compile_beside(options)
    assert dataclasses.replace(built[0].config, preset=runs[0].config.preset) == runs[0].config
    assert asked["beside"] == asked["main"]
    assert len([a for a in asked["beside"] if a[0] == "loss"]) == 4                # stages


@pytest.mark.parametrize("change, local, device, started", [
    ({}, 0, "cuda", True), ({}, 0, "cpu", False), (dict(compile="off"), 0, "cuda", False), ({}, 1, "cuda", False),
    (dict(deterministic="on"), 0, "cuda", False), (dict(micro_rows=4), 0, "cuda", False),
    (dict(micro_rows=0), 0, "cuda", False), (dict(num_layers=14, model_dim=768), 0, "cuda", False)])
def test_the_second_process_is_started_only_where_it_helps_and_fits_and_ended_with_the_warm_up(
        tg, files, tmp_path, monkeypatch, change, local, device, started):
    """Free is enough for the model and 200 tokens at once: three rows of 64, not four, nor three of a larger model."""
    copy = tmp_path / "my-idea 2.py"                         # no name for an import statement
    copy.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(tg, "__file__", str(copy))
    config = replaced(small_run(files, micro_rows=3).config, **change)
    world = tg.World(local=local, device=torch.device(device))
    free = 200 * 3 * 2 ** 18 + 2 * tg.num_parameters(config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2 ** 30))
    processes, popen = [], subprocess.Popen

    def noting(*args, **more):
        processes.append(popen(*args, **more))
        return processes[0]
    monkeypatch.setattr(tg.subprocess, "Popen", noting)
    with pytest.raises(KeyError), tg.compiler_beside(config, world, []):
        assert [process.poll() for process in processes] == [None] * started
        raise KeyError("warm-up failed")
    assert [process.returncode for process in processes] == [-9] * started


def test_the_second_process_is_this_very_file_with_another_first_word(tg, files, monkeypatch):
    seen = []
    monkeypatch.setattr(tg, "warmup", lambda run, log: pytest.fail("no training"))
    monkeypatch.setattr(tg, "compile_beside", lambda argv: seen.append(argv) or 0)
    assert tg.main([tg.COMPILE_BESIDE, "--num_steps=3"]) == 0 and seen == [["--num_steps=3"]]


@pytest.mark.parametrize("size", [1, 8])
def test_the_second_process_reaches_every_bank_on_any_number_of_ranks(tg, files, monkeypatch, size):
    options, updated, update = small_options(**files, batch_tokens=32 * 64, micro_rows=1), [], tg.Optimizer.update

    def noting(self, bank, lr_scale, momentum):
        update(self, bank, lr_scale, momentum)
        updated.append(bank.group.name)
    monkeypatch.setattr(tg.Optimizer, "update", noting)
    monkeypatch.setattr(tg, "init_world", lambda *args: tg.World(0, size))
    tg.compile_beside(options)
    assert len(set(updated)) == len(updated) == 10
    assert set(updated[-4:]) == {"embed", "value_embeds", "scalars", "gates"}
    assert updated[-4:-2] == ["value_embeds", "embed"]               # Adam's kernel is made for the first one's size


def test_warm_up_makes_no_second_copy_of_the_table(tg, files, tmp_path, monkeypatch):
    run, copied, clone = small_run(files, table_rows=50_000), [], torch.Tensor.clone

    def noting(t, *args, **more):
        copied.append(t.numel())
        return clone(t, *args, **more)
    monkeypatch.setattr(torch.Tensor, "clone", noting)
    log = tg.RunLog(str(tmp_path), tg.World())
    tg.warmup(run, log)
    tg.self_check(run, log)
    log.close()
    assert copied and max(copied) < run.model.ngrams.numel() / 5


# ---- pace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_rows, most, said, wanted", [
    (0, 12, [], 12), (0, 11, [12], 6), (0, 5, [12, 6], 4), (0, 1, [12, 6, 4, 3, 2], 1), (12, 12, [], 12),
    (0, 0, [12, 6, 4, 3, 2], "use a smaller --row_tokens"), (6, 5, [], "use --micro_rows=5 or auto"),
    (1, 0, [], "use a smaller --row_tokens")])
def test_rows_that_do_not_fit_are_fewer_where_that_is_auto_and_refused_where_not(tg, files, tmp_path, micro_rows, most,
                                                                              said, wanted):
    """A GPU that holds `most` rows at once; the largest step has 12."""
    run, log = small_run(files, micro_rows=micro_rows), tg.RunLog(str(tmp_path), tg.World())
    forward = run.model.forward

    def limited(tokens, *more):
        if len(tokens) > most:
            raise torch.OutOfMemoryError("full")
        return forward(tokens, *more)
    run.model.forward = limited
    if isinstance(wanted, str):
        with pytest.raises(tg.Failure, match=f"out of memory with . rows of 64 tokens at once: {wanted}$"):
            tg.fit_memory(run, log)
    else:
        tg.fit_memory(run, log)
        assert tg.rows_at_once(run, 2) == wanted
    log.close()
    lines = log.path.read_text().splitlines()
    assert [int(re.search(r"memory with (\d+) rows", line)[1]) for line in lines] == said
    assert all(f"trying {rows - 1}" in line for rows, line in zip(said, lines))
    assert not any(bank.grad.any() for bank in run.optimizer.banks if bank.group.kind != "rows")


def test_rows_are_made_to_fit_in_all_stages(tg, files, tmp_path):
    """Nine rows don't fit, nor do four. The last stage then takes three at once, and one before it four of four."""
    run, log = small_run(files, micro_rows=0, batch_tokens=9 * 64, num_steps=13), tg.RunLog(str(tmp_path), tg.World())
    forward = run.model.forward

    def limited(tokens, *more):
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("full")
        return forward(tokens, *more)
    run.model.forward = limited
    tg.fit_memory(run, log)
    log.close()
    assert [tg.rows_at_once(run, step) for step in tg.last_steps(run.config)] == [2, 2, 3, 3]
    assert [int(n) for n in re.findall(r"memory with (\d+) rows", log.path.read_text())] == [9, 4]


@pytest.mark.parametrize("steps", [20, 21, 60])
def test_after_twenty_steps_the_log_says_how_long_the_run_takes(tg, files, tmp_path, monkeypatch, steps):
    """Tokens to come at the pace of the tokens so far, as later steps are larger."""
    monkeypatch.setattr(tg.Clock, "elapsed_ms", lambda self: 33_000.0)
    options = small_options(**files, num_steps=steps, val_tokens=64)
    answer, config = call_main(options, tmp_path), tg.parse_config(options)[0]
    rows = [tg.rows_at(config, step) for step in range(steps)]
    said = [int(line.split()[-2]) for line in answer.events.splitlines() if "at this pace" in line]
    assert said == [round(33 * sum(rows) / sum(rows[:21]))] * (steps > 20)
    assert steps < 60 or said[0] > 33 * steps / 21


# ---- endings ---------------------------------------------------------------------------------------------------------


def nan_on_one_rank(rank, size, argv, log_dir):
    """main() where the training loss of rank 1's fifth step is NaN."""
    tg, calls = load_train_gpt(), []
    reference = tg.mixed_cross_entropy

    def poisoned(x, w, *more):
        loss = reference(x, w, *more)
        if len(w) == 128:                                # training, over candidates: 3 rows a step on each rank
            calls.append(1)
            if rank == size - 1 and len(calls) == 13:
                return loss * math.nan
        return loss
    tg.mixed_cross_entropy = poisoned
    return main_as_rank(rank, size, argv, log_dir) + (len(calls),)


def main_with_more(rank, size, argv, log_dir, more):
    """main() where rank 1, as if on another host, has one option that differs."""
    kept = [word for word in argv if not rank or word.split("=")[0] != more.split("=")[0]]
    return main_as_rank(rank, size, kept + [more] * rank, log_dir)


@pytest.mark.parametrize("more, said", [
    ("--lr_matrix=0.5", "setting lr_matrix differs: 0.039 on rank 0, 0.5 on rank 1"),
    ("--val_tokens=30", "setting val_tokens differs: .* on rank 0, 30 on rank 1"),
    ("--num_steps=9", "setting num_steps differs: 3 on rank 0, 9 on rank 1"),
    ("--val_files=OTHER", "val file 1 differs: .* on rank 0, .* on rank 1")])
def test_hosts_that_differ_are_refused_before_the_first_step(run_ranks, files, tmp_path, more, said):
    """Their losses would be summed over other targets, or their collectives would not match."""
    other = tmp_path / "other_val_0.bin"
    other.write_bytes(raw_shard(learnable_tokens(1000, 77)))
    more = more.replace("OTHER", str(other))
    options = small_options(**files, num_steps=3)
    for code, _, err in run_ranks(2, main_with_more, options, tmp_path / "logs", more):
        assert code == 2 and (re.search(said, err) or not err), err
    assert len(list((tmp_path / "logs").glob("*.txt"))) == 1


def main_of_another_source(rank, size, argv, log_dir):
    tg = load_train_gpt()
    tg.SOURCE += "# stale\n" * rank
    return main_as_rank(rank, size, argv, log_dir)


def test_a_host_with_another_source_is_refused(run_ranks, files, tmp_path):
    [(code, _, err), _] = run_ranks(2, main_of_another_source, small_options(**files), tmp_path)
    assert code == 2 and "the source differs: " in err and "rank 1" in err


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(run_ranks, files, tmp_path):
    options = small_options(**files, num_steps=40, val_every_steps=20)
    answers = run_ranks(2, nan_on_one_rank, options, str(tmp_path))
    assert [code for code, *_ in answers] == [1, 1]
    assert "step 5: not a finite number: loss" in answers[0][2] and answers[0][2].count("\n") == 1
    assert answers[1][2] == "" and [calls for *_, calls in answers] == [18, 18]     # seen one step late
    [log] = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert "nan" not in log.rpartition("=" * 100)[2].lower().replace("step_avg:nan", "")
    assert json.loads(log.rpartition("result:")[2])["status"] == "failed"


def test_rates_that_blow_up_stop_at_the_first_number_that_is_not_finite(files, tmp_path):
    """FIELD-CASES 7. With 1e38 for every rate the options are refused; one for the scalars overflows (large rates for
    embeddings or matrices only silence the model: softcap and norms keep its loss finite)."""
    rates = dict.fromkeys(("lr_matrix", "lr_embed", "lr_value", "lr_scalar"), 1e38)
    answer = call_main(small_options(**files, **rates), tmp_path)
    assert answer.code == 2 and "--lr_matrix=1e+38" in answer.err and answer.logs == []
    answer = call_main(small_options(**files, num_steps=40, val_every_steps=5, lr_scalar=1e18), tmp_path)
    assert answer.code == 1 and re.search(r"step \d: .*not a finite number", answer.err)
    assert answer.err.count("\n") == 1 and answer.result["status"] == "failed"
    bad = [line for line in answer.events.splitlines() if re.search(r"loss:(nan|inf)", line)]
    assert len(bad) <= 1


def test_a_validation_loss_that_is_not_finite_fails_the_run(tg, files, tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "evaluate", lambda run: math.nan)
    answer = call_main(small_options(**files, val_every_steps=1), tmp_path)
    assert answer.code == 1 and answer.err.count("\n") == 1
    assert "step 0: not a finite number: the validation loss" in answer.err


@pytest.mark.parametrize("bank", [0, -1])
def test_a_run_that_ends_with_weights_that_are_not_finite_never_says_finished(tg, files, tmp_path, monkeypatch, bank):
    """One row that validation never looks up is enough."""
    loop = tg.loop

    def spoiling(run, *more):
        result = loop(run, *more)
        run.optimizer.banks[bank].weight.view(-1)[-1] = math.nan
        return result
    monkeypatch.setattr(tg, "loop", spoiling)
    answer = call_main(small_options(**files), tmp_path)
    name = ("embed", "ngrams")[bank]
    assert answer.code == 1 and f"step 3: not a finite number: the weights of {name}" in answer.err
    assert answer.result["status"] == "failed" and '"finished"' not in answer.events


@pytest.mark.parametrize("loss, status", [(2.5, "target_reached"), (2.5000001, "finished")])
def test_a_loss_that_equals_the_target_has_reached_it(tg, files, tmp_path, monkeypatch, loss, status):
    monkeypatch.setattr(tg, "evaluate", lambda run: loss)
    answer = call_main(small_options(**files, num_steps=4, val_every_steps=2, target_loss=2.5), tmp_path)
    assert (answer.result["status"], answer.result["step"]) == (status, 0 if status == "target_reached" else 4)
    assert (answer.result["reason"] == "") == (status == "finished")


def test_reaching_the_target_stops_and_says_so(tg, files, tmp_path, monkeypatch):
    monkeypatch.setitem(tg.PEAK_TFLOPS, platform.machine(), 0.25)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * 2 ** 20 - 1)
    options = small_options(**files, num_steps=60, val_every_steps=4, target_loss=4.5, val_overlap=0)
    answer = call_main(options, tmp_path)
    result = answer.result
    assert answer.code == 0 and result["status"] == "target_reached" and "4.5" in result["reason"]
    assert 0 < result["step"] < 60 and result["step"] % 4 == 0 and result["val_loss"] <= 4.5
    config = load_train_gpt().parse_config(options)[0]
    assert result["tokens_trained"] == tokens_of(config, result["step"])
    losses = [float(x) for x in re.findall(r"val_loss:(\S+)", answer.events)]
    assert all(loss > 4.5 for loss in losses[:-1]) and losses[-1] <= 4.5
    assert '"target_reached"' in answer.out
    header = json.loads(answer.logs[0].split("=" * 100 + "\n")[1].splitlines()[0])
    flops = 6 * header["parameters"]["matmul"] * result["tokens_trained"]
    assert result["mfu"] == pytest.approx(flops / (result["train_time_ms"] / 1e3) / 0.25e12, rel=0.02)
    assert result["step_avg_ms"] == pytest.approx(result["train_time_ms"] / result["step"], rel=0.02)
    assert result["peak_memory_mib"] == 4


def test_a_target_met_at_the_last_step_is_a_finished_run(files, tmp_path):
    answer = call_main(small_options(**files, num_steps=2, target_loss=100.0, val_every_steps=0), tmp_path)
    assert answer.code == 0 and answer.result["status"] == "finished" and answer.result["step"] == 2
    assert answer.result["reason"] == f"validation loss {answer.result['val_loss']:.4f} <= 100.0"


def test_validation_does_not_count_as_training_time(tg, files, tmp_path, monkeypatch):
    evaluate = tg.evaluate

    def slow(run):
        time.sleep(0.5)
        return evaluate(run)
    monkeypatch.setattr(tg, "evaluate", slow)
    begin = time.perf_counter()
    answer = call_main(small_options(**files, num_steps=4, val_every_steps=1), tmp_path)
    elapsed_ms = 1e3 * (time.perf_counter() - begin)
    assert answer.code == 0 and elapsed_ms > 2500 + answer.result["train_time_ms"]
    [line] = [line for line in answer.events.splitlines() if line.startswith("step_times_ms:")]
    assert sum(json.loads(line.partition(":")[2])) <= answer.result["train_time_ms"] + 1


def test_the_same_seed_gives_the_same_losses_and_another_one_others(files, tmp_path):
    def losses(seed, folder):
        answer = call_main(small_options(**files, seed=seed, log_every_steps=1), tmp_path / folder)
        return re.findall(r"(?:train|val)_loss:(\S+)", answer.events), answer.result["val_loss"]
    first = losses(3, "a")
    assert first == losses(3, "b") and first != losses(4, "c") and len(first[0]) >= 4


def test_profile_steps_writes_a_trace_beside_the_log(files, tmp_path):
    answer = call_main(small_options(**files, num_steps=8, profile_steps=2), tmp_path)
    assert answer.code == 0
    [trace] = tmp_path.glob("*.trace.json.gz")
    assert trace.name.partition(".")[0] == next(tmp_path.glob("*.txt")).stem
    names = {event.get("name") for event in json.loads(gzip.open(trace).read())["traceEvents"]}
    assert {name for name in names if str(name).startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
    assert "aten::scaled_dot_product_attention" in names


# ---- inputs of the field ---------------------------------------------------------------------------------------------


TINY = ["--preset=tiny", "--micro_rows=4"]


def tiny_options(folder):
    """The tiny preset on TRAIN_A, TRAIN_B and VAL_10001."""
    put_shard(folder, "TRAIN_A", "t_1.bin")
    put_shard(folder, "TRAIN_B", "t_2.bin")
    put_shard(folder, "VAL_10001", "v_0.bin")
    return [*TINY, f"--train_files={folder}/t_*.bin", f"--val_files={folder}/v_*.bin", "--log_every_steps=1",
            "--val_tokens=300"]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_tiny_preset_trains_on_the_same_tokens_whatever_the_ranks(run_ranks, tmp_path, size):
    """FIELD-CASES 3. Two processes with a small vocabulary are in the next test."""
    options = tiny_options(tmp_path)
    if size == 1:
        answer = call_main(options, tmp_path / "logs")
    else:
        answer = Answer(*run_ranks(size, main_as_rank, options, str(tmp_path / "logs"))[0], tmp_path / "logs")
    assert answer.code == 0, answer.err
    config = load_train_gpt().parse_config(options)[0]
    tokens = [tokens_of(config, steps) for steps in (1, 2, 3)]
    assert answer.result["val_tokens"] == 300 and answer.result["tokens_trained"] == tokens[-1]
    assert re.findall(r" tokens:(\d+)", answer.events) == [str(count) for count in tokens]
    assert json.loads(answer.logs[0].split("=" * 100 + "\n")[1].splitlines()[0])["world_size"] == size


def test_validation_of_10000_targets_is_exact_on_one_and_two_processes(files, run_ranks, tmp_path):
    """FIELD-CASES 5: 10,000 targets of 10,001 tokens, no multiple of anything here."""
    (tmp_path / "v.bin").write_bytes(raw_shard(learnable_tokens(10_001, 9)))
    options = small_options(**{**files, "val_files": f"{tmp_path}/v.bin"}, num_steps=1)
    options = [option for option in options if "val_tokens" not in option]         # the preset's 10,000
    one = call_main(options, tmp_path / "one").result
    [first, second] = run_ranks(2, main_as_rank, options, str(tmp_path / "two"))
    two = Answer(*first, tmp_path / "two").result
    assert one["val_tokens"] == two["val_tokens"] == 10_000
    assert one["tokens_trained"] == two["tokens_trained"] == 384 and second == (0, "", "")
    assert one["val_loss"] == pytest.approx(two["val_loss"], abs=1e-5)


def test_one_small_shard_is_enough_for_three_steps_and_refused_for_fifty(tg, files, tmp_path):
    """FIELD-CASES 4 a, b; what the repetition option that the message names then does."""
    one = {**files, "train_files": files["train_files"].replace("*", "1")}
    assert call_main(small_options(**one, max_epochs=1), tmp_path / "a").code == 0
    put_shard(tmp_path, "TRAIN_A", "t_1.bin")
    put_shard(tmp_path, "VAL_10001", "v_0.bin")
    options = [*TINY, f"--train_files={tmp_path}/t_*.bin", f"--val_files={tmp_path}/v_*.bin", "--val_tokens=300"]
    answer = call_main([*options, "--num_steps=50"], tmp_path / "b")
    assert answer.code == 2 and answer.err.count("\n") == 1
    config = tg.parse_config([*options, "--num_steps=50", "--max_epochs=99"])[0]
    needed = tokens_of(config, 50)
    for part in (f"{needed:,}", "4,999", "1 shard(s) of 100M", "python data/cached_fineweb10B.py",
                 f"--max_epochs={math.ceil(needed / 4999)}"):
        assert part in answer.err
    with pytest.raises(tg.Refusal, match=f"allowed {math.ceil(needed / 4999) - 1}[.]"):
        tg.build(replaced(config, max_epochs=math.ceil(needed / 4999) - 1), tg.World(), {})
    run = tg.build(replaced(config, max_epochs=math.ceil(needed / 4999)), tg.World(), {})
    assert f"there: {needed / 4999:.2f} epochs" in tg.budget(run.config, run.train_stream)


def test_epochs_are_counted_in_the_log(files, tmp_path):
    answer = call_main(small_options(**files, num_steps=12), tmp_path)           # 8,448 of 6,000 tokens
    assert answer.code == 0 and "note: data: epoch 2 of 100, 0 tokens clipped" in answer.events


def test_the_budget_counts_clipped_tails_and_names_the_shards_to_add(tg, files, monkeypatch):
    monkeypatch.setitem(tg.STAGES, "plain", (tg.Stage(1.0, 10, 3, 0.0),))
    run = small_run(files, max_epochs=4)
    starts = list(run.train_stream.marks(EOD))
    lengths = [b - a for a, b in zip(starts, [*starts[1:], run.train_stream.num_tokens])]
    needed = 3 * 1536 * sum(lengths) / sum(min(n, 10) for n in lengths)
    said = tg.budget(run.config, run.train_stream)
    assert f"needs about {needed:,.0f} tokens" in said and needed > 1.5 * 3 * 1536
    run.config = replaced(run.config, num_steps=1_000_000)
    more = math.ceil((needed / 3 * 1e6 - 4 * 6000) / 4 / 1e8)              # they too may be seen four times
    assert more == 16
    with pytest.raises(tg.Refusal, match=f"allowed 4. Add about {more} shard"):
        tg.budget(run.config, run.train_stream)


def test_the_budget_sees_a_document_that_fills_many_shards(tg, tmp_path):
    """Each shard alone looks like a short document; of the whole one, clipping leaves a tenth."""
    tokens = np.array([EOD, *[7] * 19_999])
    for k, part in enumerate(np.split(tokens, 20)):
        (tmp_path / f"t_{k:02}.bin").write_bytes(raw_shard(part))
    (tmp_path / "v_0.bin").write_bytes(raw_shard(tokens[:50]))
    files = dict(train_files=f"{tmp_path}/t_*.bin", val_files=f"{tmp_path}/v_0.bin")
    with pytest.raises(tg.Refusal, match="epochs, allowed 1"):
        small_run(files, num_steps=13, val_tokens=20, max_epochs=1)


@pytest.mark.parametrize("lengths", [(10, 5990), (3000,)])
def test_the_budget_counts_the_last_document_of_the_first_shard(tg, tmp_path, lengths):
    """It has no mark behind it in that shard, and may be all that the shard holds."""
    tokens = np.concatenate([np.array([EOD, *[7] * (n - 1)]) for n in lengths])
    for k in range(2):
        (tmp_path / f"t_{k}.bin").write_bytes(raw_shard(tokens))
    (tmp_path / "v_0.bin").write_bytes(raw_shard(tokens[:-1]))
    clip, needed = max(stage.max_doc_tokens for stage in tg.STAGES["record"]), 0
    run = small_run(dict(train_files=f"{tmp_path}/t_*.bin", val_files=f"{tmp_path}/v_*.bin"), max_epochs=99)
    assert clip < max(lengths)
    for step in range(run.config.num_steps):
        cut = tg.stage_at(run.config, step).max_doc_tokens
        tokens_taken = tg.rows_at(run.config, step) * run.config.row_tokens
        needed += tokens_taken * sum(lengths) / sum(min(n, cut) for n in lengths)
    assert f"needs about {needed:,.0f} tokens" in tg.budget(run.config, run.train_stream)


def test_what_cannot_fit_is_refused_before_a_byte_of_it_is_allocated(tg, files, monkeypatch):
    """Tokens are counted first, then bytes: those of weights and optimizer are the least that is needed."""
    config, overrides = tg.parse_config(small_options(**files, table_rows=4_194_301, max_epochs=1))
    with monkeypatch.context() as patch:
        patch.setattr(tg, "GPT", None)
        patch.setattr(tg.os, "sysconf", lambda name: 10 ** 9 if name == "SC_PHYS_PAGES" else 1)
        with pytest.raises(tg.Refusal, match="parameters need 1.1 GB on each rank, 1.0 are there"):
            tg.build(config, tg.World(), overrides)
        with pytest.raises(tg.Refusal, match="epochs, allowed 1"):
            tg.build(replaced(config, num_steps=100), tg.World(), overrides)
    with monkeypatch.context() as patch:         # a slip that no machine has memory for
        patch.setattr(tg, "GPT", None)
        for change in (dict(model_dim=1_000_000), dict(table_rows=2 ** 40)):
            with pytest.raises(tg.Refusal, match="parameters need .* use a smaller --table_rows, --model_dim"):
                tg.build(replaced(config, **change), tg.World(), overrides)
    run = small_run(files, ema_blend=0.0, table_rows=10_007)
    held = sum({t.data_ptr(): t.nbytes for bank in run.optimizer.banks
                for t in (bank.weight, *bank.tensors())}.values())
    asked = []
    for share in (0.5, 1.0):
        monkeypatch.setattr(tg.os, "sysconf", lambda name, share=share: held * share if name == "SC_PHYS_PAGES" else 1)
        with contextlib.suppress(tg.Refusal):
            tg.check_memory(run.config, run.world, run.kernels)
            asked.append(share)
    assert asked == [1.0]


@pytest.mark.parametrize("size, bytes_each", [(1, 16), (2, 12), (8, 9)])
def test_weights_gradients_and_shared_averages_are_what_is_needed(tg, files, monkeypatch, size, bytes_each):
    """In fp32: 4 bytes each, and 8 of averages among the ranks; the table has weights alone."""
    import resource
    run = small_run(files, table_rows=10_007)
    table = run.model.ngrams.numel()
    needed = 4 * table + bytes_each * (tg.num_parameters(run.config) - table)
    machine, process = [0], [resource.RLIM_INFINITY]
    monkeypatch.setattr(tg.os, "sysconf", lambda name: machine[0] if name == "SC_PHYS_PAGES" else 1)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (process[0], process[0]))
    for machine[0], process[0], fits in ((1.01, None, True), (0.98, None, False), (9, 1.01, True), (9, 0.98, False),
                                         (0.98, 9, False)):
        machine[0], process[0] = machine[0] * needed, process[0] * needed if process[0] else resource.RLIM_INFINITY
        with contextlib.nullcontext() if fits else pytest.raises(tg.Refusal, match="parameters need"):
            tg.check_memory(run.config, tg.World(size - 1, size), run.kernels)


BROKEN = ["TRUNC", "ODD", "EXTRA", b"", bytes(500), "FMT32", "LFS", "OOV"]


@pytest.mark.parametrize("what", ["train", "val"])
@pytest.mark.parametrize("content", BROKEN, ids=lambda content: content if isinstance(content, str) else len(content))
def test_broken_shards_end_the_run_before_it_starts(tg, tmp_path, monkeypatch, content, what):
    """FIELD-CASES 1, 2, 6; as validation shards too. What the messages hold is told with room 6."""
    monkeypatch.setattr(tg, "GPT", None)         # nothing is built
    for name, good in (("train", "TRAIN_A"), ("val", "VAL_10001")):
        put_shard(tmp_path, good, f"{name}_0.bin")
    path = tmp_path / f"{what}_0.bin"
    path.write_bytes(content) if isinstance(content, bytes) else put_shard(tmp_path, content, path.name)
    answer = call_main([*TINY, f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin",
                        "--val_tokens=1000"], tmp_path / "logs")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1 and str(path) in answer.err
    assert answer.result == dict(status="refused", reason=answer.err.removeprefix("train_gpt: ").rstrip("\n"))
    assert "val_loss" not in answer.logs[0]


def test_a_bad_token_in_a_later_shard_ends_the_run_when_it_is_reached(tg, files, tmp_path, monkeypatch):
    """Shards within the first SAMPLE_TOKENS are searched before the run; these stand for later ones."""
    monkeypatch.setattr(tg, "SAMPLE_TOKENS", 3000)
    tokens = learnable_tokens(3000, 5)
    (tmp_path / "train_0.bin").write_bytes(raw_shard(tokens))
    tokens[1234] = 300
    (tmp_path / "train_1.bin").write_bytes(raw_shard(tokens))
    options = small_options(**{**files, "train_files": f"{tmp_path}/train_*.bin"}, num_steps=8)
    answer = call_main(options, tmp_path / "logs")
    assert answer.code == 2 and "train_1.bin: token 300 at position 1234" in answer.err
    config = tg.parse_config(options)[0]                 # the first step whose rows reach beyond the first shard
    step = next(step for step in range(1, 9) if tokens_of(config, step) > 3000)
    assert f"rank 0, step {step}: " in answer.err


def test_a_bad_token_in_any_validation_shard_is_refused_at_the_start(tg, files, tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "GPT", None)
    for k in range(2):
        tokens = learnable_tokens(1000, 5)
        tokens[900] = 300 if k else 1
        (tmp_path / f"val_{k}.bin").write_bytes(raw_shard(tokens))
    answer = call_main(small_options(**{**files, "val_files": f"{tmp_path}/val_*.bin"}, val_tokens=100), tmp_path / "l")
    assert answer.code == 2 and "val_1.bin: token 300 at position 900" in answer.err


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_shard_of_one_token_is_refused(files, tmp_path, which):
    (tmp_path / f"{which}_0.bin").write_bytes(raw_shard([EOD]))
    options = small_options(**{**files, f"{which}_files": f"{tmp_path}/{which}_*.bin", "val_tokens": 0})
    answer = call_main(options, tmp_path / "logs")
    assert answer.code == 2 and which in answer.err and answer.err.count("\n") == 1


@pytest.mark.parametrize("which", ["train", "val"])
def test_shards_without_a_document_mark_are_refused(files, tmp_path, which):
    (tmp_path / f"{which}_0.bin").write_bytes(raw_shard([EOD - 1] * 3000))
    answer = call_main(small_options(**{**files, f"{which}_files": f"{tmp_path}/{which}_*.bin"}), tmp_path / "logs")
    assert answer.code == 2 and f"no end-of-document id {EOD} in {tmp_path}/{which}_0.bin" in answer.err


def test_too_few_validation_tokens_are_refused_with_the_possible_number(files, tmp_path):
    answer = call_main(small_options(**files, val_tokens=1001), tmp_path)
    assert answer.code == 2 and "1,001 tokens, at most 1,000 targets" in answer.err
    answer = call_main(small_options(**files, val_tokens=0), tmp_path / "all")
    assert answer.code == 0 and answer.result["val_tokens"] == 1000


def test_training_on_the_validation_tokens_is_refused(tg, files, tmp_path):
    copy = tmp_path / "copy.bin"
    copy.write_bytes(Path(files["val_files"].replace("*", "0")).read_bytes())
    for train in (files["val_files"], str(copy), f"{files['train_files']},{copy}", f"{copy},{files['train_files']}"):
        answer = call_main(small_options(**{**files, "train_files": train}), tmp_path / "logs")
        assert answer.code == 2 and "overlap" in answer.err
    first, *_ = sorted(glob.glob(files["train_files"]))                        # one of two
    answer = call_main(small_options(**{**files, "val_files": f"{files['val_files']},{first}"}), tmp_path / "logs")
    assert answer.code == 2 and f"overlap (['{first}'])" in answer.err


def test_the_dataset_card_sets_the_vocabulary_and_contradictions_are_refused(tg, tmp_path):
    files = write_small_shards(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps(dict(tokenizer="own", vocab_size=200, eod_id=60)))
    config, overrides = tg.parse_config(["--preset=tiny", *(f"--{k}={v}" for k, v in files.items())])
    run = tg.build(replaced(config, val_tokens=0), tg.World(), overrides)
    assert (run.config.vocab_size, run.config.eod_id, run.config.padded_vocab) == (200, 60, 256)
    assert run.model.embed.shape[0] == 256 and run.config.val_tokens == 1000
    assert tg.facts(run, overrides, [])["data"]["tokenizer"] == "own"          # which sample.py and others then take
    with pytest.raises(tg.Refusal, match="--vocab_size=61: the dataset.json beside the shards says 200"):
        tg.build(config, tg.World(), dict(vocab_size=61))
    other = tmp_path / "other"
    other.mkdir()
    files |= dict(val_files=write_small_shards(other)["val_files"])
    with pytest.raises(tg.Refusal, match="--eod_id=61: the dataset.json beside the shards says 60"):
        tg.build(config, tg.World(), dict(eod_id=61))
    tg.build(replaced(config, val_tokens=0), tg.World(), dict(eod_id=60, vocab_size=200))
    run = tg.build(replaced(config, **files, val_tokens=0), tg.World(), overrides)          # one card is enough
    assert (run.config.vocab_size, run.config.eod_id) == (200, 60)
    both = files["train_files"] + "," + write_small_shards(other)["train_files"]             # also within one split
    assert tg.build(replaced(config, **files | dict(train_files=both), val_tokens=0), tg.World(), {}).train_stream.card
    (other / "dataset.json").write_text(json.dumps(dict(tokenizer="bytes", vocab_size=200, eod_id=61)))
    with pytest.raises(tg.Refusal, match="other/dataset.json: .*'eod_id': 61.* but another folder's has .*: 60"):
        tg.build(replaced(config, **files | dict(train_files=both), val_tokens=0), tg.World(), {})
    for card in (dict(tokenizer="own", vocab_size=201, eod_id=60), dict(tokenizer="own", vocab_size=200, eod_id=61),
                 dict(tokenizer="other", vocab_size=200, eod_id=60)):
        (other / "dataset.json").write_text(json.dumps(card))
        with pytest.raises(tg.Refusal, match="made differently"):
            tg.build(replaced(config, **files), tg.World(), overrides)


# ---- the demo --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def builtin(tmp_path_factory):
    """The text that every Python carries, as byte tokens."""
    folder = tmp_path_factory.mktemp("builtin") / "builtin"
    subprocess.run([sys.executable, str(ROOT / "data" / "text.py"), "--builtin", "--tokenizer=bytes",
                    f"--out={folder}"], check=True, capture_output=True)
    return folder


def shard_tokens(path):
    return np.fromfile(path, dtype="<u2")[512:].astype(np.int64)


def test_the_demo_learns(builtin, tmp_path):
    """Thirty half-size steps of it: below the loss of a table of letter frequencies, from ln(384) at the start."""
    answer = call_main(["--preset=demo", f"--train_files={builtin}/train_*.bin", f"--val_files={builtin}/val_*.bin",
                        "--num_steps=30", "--batch_tokens=4096", "--val_tokens=5000", "--val_every_steps=10",
                        f"--checkpoint_dir={tmp_path}/checkpoints"], tmp_path)
    assert answer.code == 0
    train, val = (shard_tokens(next(builtin.glob(f"{name}_*.bin"))) for name in ("train", "val"))
    frequency = (np.bincount(train, minlength=257) + 1) / (len(train) + 257)
    unigram = -np.log(frequency[val[1:5001]]).mean()
    losses = [float(x) for x in re.findall(r"val_loss:(\S+)", answer.events)]
    assert losses[0] == pytest.approx(math.log(384), abs=0.1)      # logits begin about 0.06 large, letters are few
    assert answer.result["val_loss"] < unigram - 0.3 and 2.5 < unigram < 3.6
    [checkpoint] = tmp_path.glob("checkpoints/*/step_000030")
    assert f"python records/sample.py {checkpoint} " in answer.out


def test_the_small_model_learns_its_walk_nearly_to_its_entropy(tg, files):
    """Three equally likely moves and a mark now and then: ln 3 plus a little. All techniques at work at once."""
    run = small_run(files, random_weights=False, num_steps=100, lr_embed=0.05)
    first = last = None
    for step, batch in enumerate(small_batches(run)):
        last = float(take_step(run, step, batch)[0])
        first = first or last
    assert tg.candidates_at(run.config, 99) == 0                    # the full softmax at the end
    assert first == pytest.approx(math.log(128), abs=0.01) and last < 1.5
