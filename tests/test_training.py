"""Room 9: the loop. Gradients and losses don't depend on ranks or memory, state survives warm-up, runs end honestly."""
import contextlib
import gzip
import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_helpers import (EOD, blocks, by_parameter, hide_gpus, learnable_tokens, record_gradients, replaced,
                           small_batches, small_options, small_run, without_launcher, write_small_shards)
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


def main_as_rank(rank, size, argv, log_dir):
    hide_gpus()
    answer = call_main(argv, log_dir)
    return answer.code, answer.out, answer.err


# ---- ranks, micro-batches, gradients ---------------------------------------------------------------------------------


def three_steps(rank, size, files, micro_rows):
    """Everything that must not depend on the split: gradients of step 1, losses, validation, weights."""
    if size > 1:
        hide_gpus()
    tg = load_train_gpt()
    world = tg.init_world() if size > 1 else tg.World()
    run = small_run(files, world, micro_rows=micro_rows)
    gradients, losses, norms, validation = record_gradients(run), [], [], [tg.evaluate(run, 0)]
    for step, batch in enumerate(small_batches(run)):
        stats = tg.train_step(run, step, batch)
        losses.append(float(stats[0]))
        norms.append(stats[1:].tolist())
    validation.append(tg.evaluate(run, 3))
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    tg.close_world(world)
    return dict(gradients=gradients[0], losses=losses, norms=norms, validation=validation, weights=weights)


@pytest.fixture(scope="module")
def alone(files):
    """One process, the whole batch of 12 rows in one forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        without_launcher(patch)
        return three_steps(0, 1, files, 12)


SPLITS = [(1, 5), (1, 1), (2, 6), (3, 2)]          # processes, micro_rows


@pytest.fixture(scope="module", params=SPLITS, ids=[f"{size}_ranks_{micro}_micro_rows" for size, micro in SPLITS])
def split(request, files, run_ranks):
    size, micro_rows = request.param
    return [three_steps(0, 1, files, micro_rows)] if size == 1 else run_ranks(size, three_steps, files, micro_rows)


def gathered(files, results):
    run = small_run(files)
    return by_parameter(run, {bank.group.name: [r["gradients"][bank.group.name] for r in results]
                              for bank in run.optimizer.banks})


def assert_same_gradients(found, wanted, tolerance):
    families = {}
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() / gradient.norm() < 20 * tolerance, name
        families.setdefault(re.sub(r"\d+", "*", name), []).append((found[name], gradient))
    assert len(families) == 11
    for name, pairs in families.items():
        got, gradient = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs))
        assert (got - gradient).norm() / gradient.norm() < tolerance, name


def test_gradients_do_not_depend_on_ranks_or_micro_rows(files, alone, split):
    """To 1e-6 for each family; single scalars whose gradients cancel out to almost nothing have it less exact."""
    assert_same_gradients(gathered(files, split), gathered(files, [alone]), 1e-6)


def test_losses_over_three_steps_do_not_depend_on_ranks_or_micro_rows(alone, split):
    for result in split:
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert result["losses"] == split[0]["losses"]
        for a, b in zip(result["norms"], alone["norms"]):
            assert a == pytest.approx(b, rel=1e-3)
    assert max(alone["losses"]) - min(alone["losses"]) > 0.01          # it did move


def test_weights_after_three_steps_are_the_same_bytes_on_all_ranks_and_near_those_of_one(alone, split):
    """Newton-Schulz amplifies small directions up to 485 times, hence the tolerance: 2% of three steps of 0.05."""
    for name, weight in alone["weights"].items():
        for result in split:
            assert torch.equal(result["weights"][name], split[0]["weights"][name]), name
            assert (result["weights"][name] - weight).abs().max() < 3e-3, name


def test_validation_does_not_depend_on_ranks(alone, split):
    for result in split:
        assert result["validation"] == pytest.approx(alone["validation"], abs=1e-5)


def test_the_gradient_is_that_of_the_mean_loss_over_the_whole_batch(tg, files, alone):
    run = small_run(files)
    batch = next(small_batches(run))
    hidden = run.model.hidden(batch.inputs, blocks(tg.window_blocks_at(run.config, 0)))
    z = 15 * torch.tanh(hidden @ run.model.head.T / 15)
    loss = F.cross_entropy(z.flatten(0, 1), batch.targets.flatten().long())          # a mean over 12 x 64 targets
    assert alone["losses"][0] == pytest.approx(float(loss.detach()), rel=1e-6)
    names, params = zip(*run.model.named_parameters())
    found = gathered(files, [alone])
    assert_same_gradients(found, dict(zip(names, torch.autograd.grad(loss, params))), 2e-6)
    squares = {name: float(g.square().sum()) for name, g in found.items()}
    for bank, norm in zip(run.optimizer.banks, alone["norms"][0]):
        assert norm == pytest.approx(sum(squares[name] for name in bank.group.params), rel=1e-5)


@pytest.mark.parametrize("micro_rows, parts", [(12, [12]), (100, [12]), (6, [6] * 2), (5, [4] * 3), (1, [1] * 12)])
def test_micro_batches_are_equal_and_at_most_micro_rows(tg, files, micro_rows, parts):
    run = small_run(files, micro_rows=micro_rows)
    rows = torch.arange(12 * 64).view(12, 64)
    found = list(tg.micro_batches(run, rows))
    assert [len(part) for part in found] == parts and torch.equal(torch.cat(found), rows)


@pytest.mark.slow
def test_compiled_training_gives_the_gradients_and_losses_of_the_uncompiled(tg, files):
    """With the fused head, which is the compiled path. Weights after a step aren't compared: see above."""
    if tg.find_compiler() is None:
        pytest.skip("no C compiler here")
    found, losses = [], []
    for switch in ("off", "on"):
        run = small_run(files, compile=switch)
        gradients, batch = record_gradients(run), next(small_batches(run))
        losses.append([tg.evaluate(run, 0), float(tg.train_step(run, 0, batch)[0])])
        found.append(by_parameter(run, {name: [shard] for name, shard in gradients[0].items()}))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert_same_gradients(found[1], found[0], 1e-5)


def test_each_step_takes_rate_momentum_and_window_from_the_schedules(tg, files):
    run, calls, windows = small_run(files, num_steps=12), [], []
    forward = run.model.forward

    def note(lr_scale, momentum):
        calls.append((lr_scale, momentum))
        return torch.zeros(len(run.optimizer.banks))

    def seen(inputs, targets, window):
        windows.append(int(window))
        return forward(inputs, targets, window)
    run.optimizer.step, run.model.forward = note, seen
    batch, c = next(small_batches(run)), run.config
    for step in range(12):
        tg.train_step(run, step, batch)
    assert calls == [(tg.lr_scale_at(c, step), tg.momentum_at(c, step)) for step in range(12)]
    assert windows == [tg.window_blocks_at(c, step) for step in range(12)]
    assert len(set(calls)) > 10 and windows[0] == 1 and windows[-1] == 4


# ---- validation ------------------------------------------------------------------------------------------------------


def test_the_validation_loss_is_the_mean_over_exactly_val_tokens_targets(tg, files):
    run = small_run(files)                       # 500 targets in slices of 64
    stream, losses = run.val_stream, []
    tokens = torch.empty(501, dtype=torch.int32)
    stream.read(0, 501, tokens)
    with torch.no_grad():
        for a in range(0, 500, 64):
            part = tokens[a:min(a + 64, 500)]
            z = run.model(F.pad(part, (0, 64 - len(part)), value=EOD)[None], None, blocks(1))[0, :len(part)]
            losses.append(F.cross_entropy(z, tokens[a + 1:a + 1 + len(part)].long(), reduction="none"))
    losses = torch.cat(losses)
    assert len(losses) == 500
    assert tg.evaluate(run, 0) == pytest.approx(float(losses.mean()), rel=1e-6)
    kept = tokens[1:] != EOD
    assert 0 < int(kept.sum()) < 500
    assert tg.evaluate(run, 0, leave_out=EOD) == pytest.approx(float(losses[kept].mean()), rel=1e-6)


def test_validation_sees_the_window_of_its_step_and_changes_nothing(tg, files):
    run = small_run(files)
    before = {name: t.clone() for name, t in run.optimizer.tensors().items()}
    state = torch.get_rng_state()
    assert abs(tg.evaluate(run, 0) - tg.evaluate(run, 3)) > 1e-4
    assert run.model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], t) for name, t in run.optimizer.tensors().items())


# ---- warm-up ---------------------------------------------------------------------------------------------------------


def test_warm_up_restores_every_byte_and_runs_every_shape(tg, files, tmp_path, monkeypatch):
    stages = (tg.Stage(0.5, batch=0.5, window=(0.0, 1.0)), tg.Stage(1.0))
    monkeypatch.setitem(tg.STAGES, "two", stages)
    runs = [small_run(files, stages="two", num_steps=4) for _ in range(2)]
    loaders = [small_batches(run) for run in runs]
    for run, loader in zip(runs, loaders):          # from the middle of a run: momenta and step counts are not zero
        for step in range(2):
            tg.train_step(run, step, next(loader))
    run, shapes, step_of = runs[0], [], tg.train_step

    def noisy_step(run, step, batch):
        torch.rand(3)
        shapes.append(tuple(batch.inputs.shape))
        return step_of(run, step, batch)
    monkeypatch.setattr(tg, "train_step", noisy_step)
    before = {name: t.clone() for name, t in run.optimizer.tensors().items()}
    params = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    counts, position, rng = [bank.steps for bank in run.optimizer.banks], run.position, torch.get_rng_state()
    log = tg.RunLog(str(tmp_path), tg.World(), console=False)
    tg.warmup(run, log)
    log.close()
    assert set(shapes) == {(6, 64), (12, 64)}
    assert torch.equal(rng, torch.get_rng_state())
    for name, t in run.optimizer.tensors().items():
        assert torch.equal(before[name], t), name
    for name, p in run.model.named_parameters():
        assert torch.equal(params[name], p), name
        assert p.grad is not None and bool((p.grad == 0).all())
    assert counts == [bank.steps for bank in run.optimizer.banks] and position == run.position and run.model.training
    for step in (2, 3):                             # and both go on alike, bit for bit
        found = [step_of(run, step, next(loader)) for run, loader in zip(runs, loaders)]
        assert torch.equal(*found)


# ---- endings ---------------------------------------------------------------------------------------------------------


def nan_on_one_rank(rank, size, argv, log_dir):
    """main() where rank 1's fifth training loss is NaN."""
    tg, calls = load_train_gpt(), []
    plain_loss = tg.GPT.plain_loss

    def poisoned(self, x, targets):
        loss = plain_loss(self, x, targets)
        if self.training:
            calls.append(1)
            if rank == size - 1 and len(calls) == 5:
                return loss * math.nan
        return loss
    tg.GPT.plain_loss = poisoned
    return main_as_rank(rank, size, argv, log_dir) + (len(calls),)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(run_ranks, files, tmp_path):
    options = small_options(**files, num_steps=40, val_every_steps=20)
    answers = run_ranks(2, nan_on_one_rank, options, str(tmp_path))
    assert [code for code, *_ in answers] == [1, 1]
    assert "step 5: not a finite number: loss" in answers[0][2] and answers[0][2].count("\n") == 1
    assert answers[1][2] == "" and [calls for *_, calls in answers] == [6, 6]       # seen one step late
    [log] = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert "nan" not in log.rpartition("=" * 100)[2].lower().replace("step_avg:nan", "")
    assert json.loads(log.rpartition("result:")[2])["status"] == "failed"


def test_rates_that_blow_up_stop_at_the_first_number_that_is_not_finite(files, tmp_path):
    """FIELD-CASES 7. With 1e38 for every rate the options are refused; one for the scalars overflows (large rates for
    head or matrices only silence the model: softcap and norms keep its loss finite)."""
    rates = dict.fromkeys(("lr_matrix", "lr_embed", "lr_head", "lr_scalar"), 1e38)
    answer = call_main(small_options(**files, **rates), tmp_path)
    assert answer.code == 2 and "--lr_matrix=1e+38" in answer.err and answer.logs == []
    answer = call_main(small_options(**files, num_steps=40, val_every_steps=5, lr_scalar=1e18), tmp_path)
    assert answer.code == 1 and re.search(r"step \d: .*not a finite number", answer.err)
    assert answer.err.count("\n") == 1 and answer.result["status"] == "failed"
    bad = [line for line in answer.events.splitlines() if re.search(r"loss:(nan|inf)", line)]
    assert len(bad) <= 1


def test_reaching_the_target_stops_and_says_so(files, tmp_path):
    options = small_options(**files, num_steps=60, val_every_steps=4, target_loss=4.5)
    answer = call_main(options, tmp_path)
    result = answer.result
    assert answer.code == 0 and result["status"] == "target_reached" and "4.5" in result["reason"]
    assert 0 < result["step"] < 60 and result["step"] % 4 == 0 and result["val_loss"] <= 4.5
    assert result["tokens_trained"] == result["step"] * 768
    losses = [float(x) for x in re.findall(r"val_loss:(\S+)", answer.events)]
    assert all(loss > 4.5 for loss in losses[:-1]) and losses[-1] <= 4.5
    assert '"target_reached"' in answer.out


def test_a_target_met_at_the_last_step_is_a_finished_run(files, tmp_path):
    answer = call_main(small_options(**files, num_steps=2, target_loss=100.0, val_every_steps=0), tmp_path)
    assert answer.code == 0 and answer.result["status"] == "finished" and answer.result["step"] == 2


def test_validation_does_not_count_as_training_time(tg, files, tmp_path, monkeypatch):
    evaluate = tg.evaluate

    def slow(run, step, leave_out=-1):
        time.sleep(0.5)
        return evaluate(run, step, leave_out)
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
def test_the_tiny_preset_trains_on_1024_tokens_a_step_whatever_the_ranks(run_ranks, tmp_path, size):
    """FIELD-CASES 3. Two processes with a small vocabulary are in the next test."""
    options = tiny_options(tmp_path)
    if size == 1:
        answer = call_main(options, tmp_path / "logs")
    else:
        answer = Answer(*run_ranks(size, main_as_rank, options, str(tmp_path / "logs"))[0], tmp_path / "logs")
    assert answer.code == 0, answer.err
    assert answer.result["val_tokens"] == 300 and answer.result["tokens_trained"] == 3072
    assert re.findall(r" tokens:(\d+)", answer.events) == ["1024", "2048", "3072"]
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
    assert one["tokens_trained"] == two["tokens_trained"] == 768 and second == (0, "", "")
    assert one["val_loss"] == pytest.approx(two["val_loss"], abs=1e-5)


@pytest.mark.parametrize("size", [3, 6])
def test_process_counts_that_do_not_divide_the_rows_are_refused_with_the_legal_ones(run_ranks, tmp_path, size):
    answers = run_ranks(size, main_as_rank, tiny_options(tmp_path), str(tmp_path))
    assert [code for code, _, _ in answers] == [2] * size
    assert "1024 / 128" in answers[0][2] and "1, 2, 4, 8" in answers[0][2] and answers[0][2].count("\n") == 1
    assert all(err == "" for _, _, err in answers[1:])


def test_twelve_rows_run_on_three_and_six_processes(tg, run_ranks, files, tmp_path):
    """FIELD-CASES 3. Three here for real; six, which would only take longer, as far as the building of it."""
    options = small_options(**files, log_every_steps=1, num_steps=1, val_tokens=64)
    answers = run_ranks(3, main_as_rank, options, str(tmp_path))
    assert [code for code, _, _ in answers] == [0, 0, 0] and "tokens:768" in answers[0][1]
    config = tg.parse_config(options)[0]
    run = tg.build(config, tg.World(5, 6), {})
    assert all(len(bank.weight) == 6 * len(bank.weight_shard) for bank in run.optimizer.banks)
    with pytest.raises(tg.Refusal, match="1, 2, 3, 4, 6, 12"):
        tg.build(config, tg.World(0, 5), {})


def test_one_small_shard_is_enough_for_three_steps_and_refused_for_fifty(tg, files, tmp_path):
    """FIELD-CASES 4 a, b; what the repetition option that the message names then does."""
    one = {**files, "train_files": files["train_files"].replace("*", "1")}
    assert call_main(small_options(**one, max_epochs=1), tmp_path / "a").code == 0
    put_shard(tmp_path, "TRAIN_A", "t_1.bin")
    put_shard(tmp_path, "VAL_10001", "v_0.bin")
    options = [*TINY, f"--train_files={tmp_path}/t_*.bin", f"--val_files={tmp_path}/v_*.bin", "--val_tokens=300"]
    answer = call_main([*options, "--num_steps=50"], tmp_path / "b")
    assert answer.code == 2 and answer.err.count("\n") == 1
    for part in ("51,200", "4,999", "1 shard(s) of 100M", "python data/cached_fineweb10B.py", "--max_epochs=11"):
        assert part in answer.err
    run = tg.build(tg.parse_config([*options, "--num_steps=50", "--max_epochs=11"])[0], tg.World(), {})
    assert "wraps, 10.24 epochs" in tg.budget(run)


def test_epochs_are_counted_in_the_log(files, tmp_path):
    answer = call_main(small_options(**files, num_steps=10), tmp_path)           # 7,680 of 6,000 tokens
    assert answer.code == 0 and "note: data at epoch 1, 0 tokens dropped by clipping" in answer.events


def test_the_budget_counts_clipped_tails_and_names_the_shards_to_add(tg, files, monkeypatch):
    monkeypatch.setitem(tg.STAGES, "clipped", (tg.Stage(1.0, max_doc_tokens=10),))
    run = small_run(files, stages="clipped", max_epochs=2)
    starts = run.train_stream.document_starts(0, EOD)
    lengths = [b - a for a, b in zip(starts, starts[1:])]
    needed = 3 * 768 * sum(lengths) / sum(min(n, 10) for n in lengths)
    assert f"needs about {needed:,.0f} tokens" in tg.budget(run) and needed > 1.5 * 3 * 768
    run.config = replaced(run.config, num_steps=1_000_000)
    more = math.ceil((needed / 3 * 1e6 - 2 * 6000) / 2 / 1e8)              # they too may be seen twice
    assert more == 16
    with pytest.raises(tg.Refusal, match=f"allowed 2. Add about {more} shard"):
        tg.budget(run)


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


def test_a_bad_token_in_a_later_shard_ends_the_run_when_it_is_reached(files, tmp_path):
    tokens = learnable_tokens(3000, 5)
    (tmp_path / "train_0.bin").write_bytes(raw_shard(tokens))
    tokens[1234] = 61
    (tmp_path / "train_1.bin").write_bytes(raw_shard(tokens))
    options = small_options(**{**files, "train_files": f"{tmp_path}/train_*.bin"}, num_steps=6)
    answer = call_main(options, tmp_path / "logs")
    assert answer.code == 2 and "train_1.bin: token 61 at position 1234" in answer.err


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_shard_of_one_token_is_refused(files, tmp_path, which):
    (tmp_path / f"{which}_0.bin").write_bytes(raw_shard([EOD]))
    options = small_options(**{**files, f"{which}_files": f"{tmp_path}/{which}_*.bin", "val_tokens": 0})
    answer = call_main(options, tmp_path / "logs")
    assert answer.code == 2 and which in answer.err and answer.err.count("\n") == 1


def test_too_few_validation_tokens_are_refused_with_the_possible_number(files, tmp_path):
    answer = call_main(small_options(**files, val_tokens=1001), tmp_path)
    assert answer.code == 2 and "1,001 tokens, at most 1,000 targets" in answer.err
    answer = call_main(small_options(**files, val_tokens=0), tmp_path / "all")
    assert answer.code == 0 and answer.result["val_tokens"] == 1000


def test_training_on_the_validation_tokens_is_refused(tg, files, tmp_path):
    copy = tmp_path / "copy.bin"
    copy.write_bytes(Path(files["val_files"].replace("*", "0")).read_bytes())
    for train in (files["val_files"], str(copy)):
        answer = call_main(small_options(**{**files, "train_files": train}), tmp_path / "logs")
        assert answer.code == 2 and "overlap" in answer.err


def test_the_dataset_card_sets_the_vocabulary_and_contradictions_are_refused(tg, tmp_path):
    files = write_small_shards(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps(dict(tokenizer="own", vocab_size=200, eod_id=60)))
    config, overrides = tg.parse_config(["--preset=tiny", *(f"--{k}={v}" for k, v in files.items())])
    run = tg.build(replaced(config, val_tokens=0), tg.World(), overrides)
    assert (run.config.vocab_size, run.config.eod_id, run.config.padded_vocab) == (200, 60, 256)
    assert run.model.head.shape[0] == 256 and run.config.val_tokens == 1000
    with pytest.raises(tg.Refusal, match="--vocab_size=61: the dataset.json beside the shards says 200"):
        tg.build(config, tg.World(), dict(vocab_size=61))
    other = tmp_path / "other"
    other.mkdir()
    files |= dict(val_files=write_small_shards(other)["val_files"])
    (other / "dataset.json").write_text(json.dumps(dict(tokenizer="own", vocab_size=201, eod_id=60)))
    with pytest.raises(tg.Refusal, match="made differently"):
        tg.build(replaced(config, **files), tg.World(), overrides)


def test_an_unknown_table_of_stages_is_refused(files, tmp_path):
    answer = call_main(small_options(**files, stages="fast"), tmp_path)
    assert answer.code == 2 and "--stages=fast" in answer.err and "record20" in answer.err


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


def test_the_demo_learns_and_ends_with_what_its_numbers_mean(tg, builtin, tmp_path):
    """Thirty half-size steps of it: below the loss of a table of letter frequencies, from ln(384) at the start."""
    answer = call_main(["--preset=demo", f"--train_files={builtin}/train_*.bin", f"--val_files={builtin}/val_*.bin",
                        "--num_steps=30", "--batch_tokens=2048", "--val_tokens=5000", "--sample_tokens=20"], tmp_path)
    assert answer.code == 0
    train, val = (shard_tokens(next(builtin.glob(f"{name}_*.bin"))) for name in ("train", "val"))
    frequency = (np.bincount(train, minlength=257) + 1) / (len(train) + 257)
    unigram = -np.log(frequency[val[1:5001]]).mean()
    losses = [float(x) for x in re.findall(r"val_loss:(\S+)", answer.events)]
    assert losses[0] == pytest.approx(math.log(384), abs=1e-3)
    assert answer.result["val_loss"] < unigram - 0.3 and 2.5 < unigram < 3.6
    notes = re.findall(r"note: (this model|a bigram table): (\S+) nats/byte, (\S+) bits/byte", answer.events)
    assert [name for name, _, _ in notes] == ["this model", "a bigram table"]
    for _, nats, bits in notes:
        assert float(bits) == pytest.approx(float(nats) / math.log(2), abs=2e-4)
    assert "a sample of what it writes" in answer.out and "tokens/s on this machine" in answer.out
    assert "note: the log is " in answer.out


def test_the_bigram_baseline_is_the_smoothed_table_without_document_marks(tg, files):
    run = small_run(files)
    train = np.concatenate([shard_tokens(path) for path in run.train_stream.paths])
    val = shard_tokens(run.val_stream.paths[0])[:501]
    counts = np.ones((61, 61))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    logp = np.log(counts / counts.sum(1, keepdims=True))
    found = [logp[a, b] for a, b in zip(val[:-1], val[1:]) if b != EOD]
    assert tg.bigram_loss(run) == pytest.approx(-np.mean(found), rel=1e-6)


def test_the_small_model_learns_its_walk_nearly_to_its_entropy(tg, files):
    """Three equally likely moves and a mark now and then: ln 3 plus a little. All techniques at work at once."""
    run = small_run(files, random_weights=False, num_steps=40)
    first = last = None
    for step, batch in enumerate(small_batches(run)):
        last = float(tg.train_step(run, step, batch)[0])
        first = first or last
    assert first == pytest.approx(math.log(128), abs=1e-3) and last < 2.2
