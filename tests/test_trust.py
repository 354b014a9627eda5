"""Fail fast and say why; can the numbers be believed; more than one machine."""
import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import hide_gpus
from rank_helpers import load_train_gpt
from run_helpers import byte_run, changed, checkpoints_in, facts_of, losses_of, run_here, start, wait_for
from shard_helpers import raw_shard


def result_of(text):
    """The result line of a log or an output."""
    return json.loads(text[text.index("\nresult:") + 8:].splitlines()[0])


# ---- numbers that are not finite -------------------------------------------------------------------------------------


def spoil_loss(tg, rank, at_rank, at_call):
    """Wrap the model's training forward: its at_call-th call on at_rank returns NaN."""
    forward, calls = tg.GPT.forward, [0]

    def spoiled(self, tokens, targets, view):
        loss = forward(self, tokens, targets, view)
        if view.training and rank == at_rank:
            calls[0] += 1
            loss = loss * float("nan") if calls[0] == at_call else loss
        return loss
    tg.GPT.forward = spoiled
    return forward


def run_with_nan(rank, size, argv, at_rank, at_call):
    tg = load_train_gpt()
    forward = spoil_loss(tg, rank, at_rank, at_call)
    try:
        run_here(rank, size, argv)
    except tg.Failure as error:
        return str(error)
    finally:
        tg.GPT.forward = forward
    return "finished"


def test_a_nan_keeps_the_last_good_checkpoint(tmp_path):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2")
    message = run_with_nan(0, 1, argv, 0, 9)          # micro-steps: 1 + 1 + 2 + 2 + 2, then the sixth step
    assert message.startswith("step 6: not a finite number: loss, gradient of embed")
    assert [facts_of(path)["step"] for path in checkpoints_in(tmp_path)] == [2, 4]


def test_a_nan_in_the_very_step_of_a_checkpoint_is_not_saved(tmp_path):
    message = run_with_nan(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=2"), 0, 5)
    assert message.startswith("step 4: not a finite number: loss")
    assert [facts_of(path)["step"] for path in checkpoints_in(tmp_path)] == [2]


def test_a_nan_on_rank_1_stops_both(run_ranks, tmp_path):
    first, second = run_ranks(2, run_with_nan, byte_run(tmp_path, "--checkpoint_every_steps=2"), 1, 5)
    assert first == second and first.startswith("step 5: not a finite number: loss")
    assert [facts_of(path)["step"] for path in checkpoints_in(tmp_path)] == [2, 4]


def test_absurd_rates_are_refused_at_the_start(tg, tmp_path):
    with pytest.raises(tg.Refusal, match=r"--lr_matrix=1e\+38: expected a finite number"):
        run_here(0, 1, byte_run(tmp_path, "--lr_matrix=1e38", "--checkpoint_every_steps=1"))


def test_state_that_is_not_finite_is_not_saved(tg, tmp_path, monkeypatch):
    """Loss and gradients still look well, the checkpoint would not."""
    step = tg.train_step

    def poisoned(run, number, *args):
        stats = step(run, number, *args)
        if number == 3:
            run.optimizer.banks[0].state["exp_avg"][5] = float("inf")
        return stats
    monkeypatch.setattr(tg, "train_step", poisoned)
    with pytest.raises(tg.Failure, match="step 4: not a finite number: embed/exp_avg"):
        run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=2"))
    assert [facts_of(path)["step"] for path in checkpoints_in(tmp_path)] == [2]


# ---- memory, files, folders ------------------------------------------------------------------------------------------


def built(tg, argv):
    config, overrides = tg.parse_config(argv)
    return tg.build(config, tg.World(), overrides), tg.RunLog(config.log_dir, tg.World())


def test_out_of_memory_later_is_one_line(tg, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    monkeypatch.setattr(tg, "train_step", full)
    assert tg.main(byte_run(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "out of memory; use a smaller --micro_rows, or auto" in said and len(said.splitlines()) == 1


def test_a_shard_that_is_deleted_later_does_no_harm(tg, tmp_path, monkeypatch):
    argv = byte_run(tmp_path, num_steps=60)        # 60 steps need the second shard; all are mapped at the start
    monkeypatch.setattr(tg, "self_check", lambda run, log: (tmp_path / "train_2.bin").unlink())
    assert tg.main(argv) == 0


def test_a_read_only_log_folder_is_refused(tg, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tg.main(changed(byte_run(tmp_path), f"--log_dir={tmp_path}/file/logs")) == 2
    said = capsys.readouterr().err
    assert "--log_dir=" in said and "can't be written" in said and len(said.splitlines()) == 1


# ---- self-check ------------------------------------------------------------------------------------------------------


def test_self_check_passes_says_its_cost_and_changes_nothing(tg, tmp_path, capsys):
    run, log = built(tg, byte_run(tmp_path))
    before = {key: t.clone() for key, t in run.optimizer.gathered()}
    state = torch.get_rng_state()
    tg.self_check(run, log)
    said = capsys.readouterr().out
    assert "self-check passed in" in said and " s: causal, documents isolated, ranks equal, 0 of" in said
    assert all((t == before[key]).all() for key, t in run.optimizer.gathered())
    assert all((p == before[f"{name}/weight"]).all() for name, p in run.model.named_parameters())
    assert (state == torch.get_rng_state()).all() and run.model.training


def next_too(mask):
    """The mask with the next position of the same document added."""
    segments = mask.segments_BT
    i = torch.arange(segments.size(1))
    same = segments[:, :, None] == segments[:, None, :]
    return mask._replace(dense=mask.dense | ((i[:, None] + 1 == i) & same)[:, None])


def group_means(x, size):
    """Each position gets a tenth of the mean over its group of so many positions."""
    return x + 0.1 * x.unflatten(1, (-1, size)).mean(2, keepdim=True).expand(-1, -1, size, -1).flatten(1, 2)


class LeakyLinear:
    """torch.nn.functional, but a projection onto so many outputs reads the next position."""

    def __init__(self, functional, outputs):
        self.functional, self.outputs = functional, outputs

    def __getattr__(self, name):
        return getattr(self.functional, name)

    def linear(self, x, weight):
        leaks = x.ndim == 3 and weight.size(0) == self.outputs
        return self.functional.linear(x.roll(-1, 1) if leaks else x, weight)


def leak_in_dense_mask(patch, tg, run, change):
    patch.setattr(run.model, "build_mask", lambda *args: change(tg.dense_mask(*args)))


def leak_at_alignment(patch, tg, run, group, place):
    def change(mask):
        here = torch.arange(mask.dense.size(2)) % group == place
        return mask._replace(dense=torch.where(here[:, None], next_too(mask).dense, mask.dense))
    leak_in_dense_mask(patch, tg, run, change)


def leak_in_whole_blocks(patch, tg, run):
    def change(mask):
        block, i = run.config.block_tokens, torch.arange(mask.dense.size(2))
        same = mask.segments_BT[:, :, None] == mask.segments_BT[:, None, :]
        return mask._replace(dense=mask.dense | (same & (i[:, None] // block == i // block))[:, None])
    leak_in_dense_mask(patch, tg, run, change)


def leak_of_far_tokens(patch, tg, run):
    """Queries see the key 20 positions ahead, and nothing between."""
    def change(mask):
        i = torch.arange(mask.dense.size(2))
        same = mask.segments_BT[:, :, None] == mask.segments_BT[:, None, :]
        return mask._replace(dense=mask.dense | (same & (i[:, None] + 20 == i))[:, None])
    leak_in_dense_mask(patch, tg, run, change)


def leak_in_shift(patch, tg, run, ndim):
    real = tg.shift
    patch.setattr(tg, "shift", lambda x, *more, **kinds: x.roll(-1, 1) if x.ndim == ndim else real(x, *more, **kinds))


def leak_in_pointer(patch, tg, run):
    real = tg.copy_logsumexps
    patch.setattr(tg, "copy_logsumexps", lambda q, k, tokens, targets, mask, block: real(
        q, k, tokens, targets, next_too(mask), block))


def leak_in_copied_tokens(patch, tg, run):
    real = tg.copy_logsumexps
    patch.setattr(tg, "copy_logsumexps", lambda q, k, tokens, *more: real(q, k, tokens.roll(-1, 1), *more))


def leak_in_value_embeddings(patch, tg, run):
    for block in run.model.blocks:
        patch.setattr(block, "forward", lambda x, x0, ve, *more, real=block.forward: real(
            x, x0, None if ve is None else ve.roll(-1, 1), *more))


def leak_in_gates(patch, tg, run, outputs):
    patch.setattr(tg, "F", LeakyLinear(tg.F, outputs))


def leak_in_ngrams(patch, tg, run):
    real = tg.ngram_ids
    patch.setattr(tg, "ngram_ids", lambda tokens, *more: real(tokens.roll(-1, 1), *more))


def leak_in_inputs(patch, tg, run):
    real = run.model.input_states
    patch.setattr(run.model, "input_states", lambda e, *more: real(e + 0.1 * e.roll(-1, 1), *more))


def leak_in_states(patch, tg, run, change):
    hidden = run.model.hidden
    patch.setattr(run.model, "hidden", lambda *args: change(hidden(*args)))


LEAKS = {
    "next token, attention": lambda *args: leak_in_dense_mask(*args, next_too),
    **{f"next token, attention, position {n} of 16": lambda *args, n=n: leak_at_alignment(*args, 16, n)
       for n in (0, 7, 15)},
    "whole blocks": leak_in_whole_blocks,
    "20 tokens ahead": leak_of_far_tokens,
    "key offset": lambda *args: leak_in_shift(*args, 4),
    "state before a copied token": lambda *args: leak_in_shift(*args, 3),
    "copy pointer": leak_in_pointer,
    "copied tokens": leak_in_copied_tokens,
    "value embeddings": leak_in_value_embeddings,
    "gates": lambda *args: leak_in_gates(*args, 2),
    "sentinel": lambda *args: leak_in_gates(*args, 1),
    "n-grams": leak_in_ngrams,
    "inputs": leak_in_inputs,
    "final states": lambda *args: leak_in_states(*args, lambda x: x + 0.01 * x.roll(-1, 1)),
    **{f"mean over {n}": lambda *args, n=n: leak_in_states(*args, lambda x: group_means(x, n)) for n in (2, 8, 16)},
}


@pytest.mark.parametrize("path", LEAKS)
def test_self_check_catches_a_leak_in_each_path(tg, tmp_path, monkeypatch, path):
    run, log = built(tg, byte_run(tmp_path))
    LEAKS[path](monkeypatch, tg, run)
    with pytest.raises(tg.Failure, match="self-check: .*(another document|later tokens) changed"):      # either is one
        tg.self_check(run, log)


SCALED_DOWN = ["--model_dim=32", "--num_heads=2", "--head_dim=16", "--qk_dim=16", "--copy_dim=16", "--mlp_dim=64",
               "--table_rows=1021", "--val_tokens=0", "--vocab_size=257", "--eod_id=256", "--max_epochs=10000000"]


@pytest.mark.parametrize("preset", ["tiny", "demo", "sprint", "mile", "record"])
def test_self_check_passes_in_each_presets_shape_and_catches_leaks_there(tg, tmp_path, monkeypatch, preset):
    """Its layers, window and blocks; narrower, and with smaller rows for those that want a GPU."""
    rows = ["--row_tokens=256", "--micro_rows=16", "--val_overlap=128", "--batch_tokens=4096"]
    files = [word for word in byte_run(tmp_path) if "_files=" in word or "_dir=" in word]
    run, _ = built(tg, [f"--preset={preset}", *files, *SCALED_DOWN, *(rows if preset not in ("tiny", "demo") else [])])
    assert tg.probe(run) == []
    for path in ("copy pointer", "20 tokens ahead"):
        with monkeypatch.context() as patch:
            LEAKS[path](patch, tg, run)
            assert tg.probe(run), path


@pytest.mark.slow
def test_self_check_sees_a_leak_in_compiled_evaluation(tg, tmp_path, monkeypatch):
    argv = byte_run(tmp_path, "--compile=on")
    assert tg.probe(built(tg, argv)[0]) == []
    torch._dynamo.reset()
    leak_in_pointer(monkeypatch, tg, None)
    assert any("later tokens changed" in fault for fault in tg.probe(built(tg, argv)[0]))
    torch._dynamo.reset()


def sees_all_documents(segments, window, block):
    return load_train_gpt().dense_mask(torch.zeros_like(segments), window, block)


def test_self_check_catches_attention_to_other_documents(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    monkeypatch.setattr(run.model, "build_mask", sees_all_documents)
    with pytest.raises(tg.Failure, match="self-check: another document changed"):
        tg.self_check(run, log)


def test_self_check_catches_ngrams_of_other_documents(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    real = tg.ngram_ids
    monkeypatch.setattr(tg, "ngram_ids", lambda tokens, segments, *more: real(tokens, segments * 0, *more))
    with pytest.raises(tg.Failure, match="self-check: another document changed"):
        tg.self_check(run, log)


def test_self_check_catches_a_model_that_ignores_its_context(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    monkeypatch.setattr(run.model, "hidden", lambda tokens, *_: torch.ones(*tokens.shape, 32))
    monkeypatch.setattr(tg, "copy_logsumexps", lambda q, *_: (q[..., 0], q[..., 0]))
    with pytest.raises(tg.Failure, match="self-check: their own context changed"):
        tg.self_check(run, log)


def test_self_check_takes_a_loss_that_is_no_number_for_a_fault(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    monkeypatch.setattr(run.model, "forward", lambda tokens, targets, view: torch.tensor(math.nan))
    with pytest.raises(tg.Failure, match="self-check: another document changed, and the loss moved by nan"):
        tg.self_check(run, log)


def test_self_check_catches_shared_text(tg, tmp_path):
    argv = byte_run(tmp_path)
    train, val = (tmp_path / "train_1.bin").read_bytes(), tmp_path / "val_1.bin"
    val.write_bytes(val.read_bytes()[:1024] + train[1024:1024 + 1400])
    run, log = built(tg, argv)
    with pytest.raises(tg.Failure, match=r"validation documents begin like one of .*train_1.bin"):
        tg.self_check(run, log)


@pytest.mark.parametrize("known, passes", [(5, True), (6, False)])
def test_self_check_allows_a_twentieth_of_validation_to_be_known(tg, tmp_path, known, passes):
    argv = byte_run(tmp_path)
    rng = np.random.default_rng(4)
    documents = [np.concatenate(([256], rng.integers(97, 123, 70))) for _ in range(150)]
    (tmp_path / "val_1.bin").write_bytes(raw_shard(np.concatenate(documents[:100])))
    (tmp_path / "train_1.bin").write_bytes(raw_shard(np.concatenate(documents[:known] + documents[100:])))
    run, log = built(tg, argv)
    with contextlib.nullcontext() if passes else pytest.raises(tg.Failure, match=f"{known} of 100 validation"):
        tg.self_check(run, log)


def test_self_check_looks_beyond_the_first_training_file_and_says_how_far(tg, tmp_path, monkeypatch):
    argv = byte_run(tmp_path)
    (tmp_path / "train_2.bin").write_bytes((tmp_path / "val_1.bin").read_bytes())
    (tmp_path / "train_2.bin").write_bytes(raw_shard(np.concatenate(
        [np.fromfile(tmp_path / "val_1.bin", np.uint16)[512:].astype(int), [256, 97, 98]])))
    run, log = built(tg, argv)
    with pytest.raises(tg.Failure, match=r"documents begin like one of .*train_1.bin \(2 shards looked at\), "
                                         "expected at most 5%"):
        tg.self_check(run, log)
    monkeypatch.setattr(tg, "SAMPLE_TOKENS", 9000)
    run, log = built(tg, argv)
    tg.self_check(run, log)
    assert "0 of" in log.path.read_text() and "(1 of 2 shards looked at)" in log.path.read_text()


def test_self_check_looks_into_every_validation_file(tg, tmp_path):
    argv, rng = byte_run(tmp_path), np.random.default_rng(4)
    documents = [np.concatenate(([256], rng.integers(97, 123, 70))) for _ in range(30)]
    for name, part in (("val_1", documents[:10]), ("val_2", documents[10:20]), ("train_1", documents[10:])):
        (tmp_path / f"{name}.bin").write_bytes(raw_shard(np.concatenate(part)))
    run, log = built(tg, argv)
    with pytest.raises(tg.Failure, match="10 of 20 validation documents begin like one of"):
        tg.self_check(run, log)


@pytest.mark.parametrize("moved, faults", [
    ((0, 0, 1), 0), ((5e-9, -5e-9, 5e-8), 0), ((2e-8, 0, 1), 1), ((0, -2e-8, 1), 1), ((0, 0, 5e-9), 1), ((1, 1, 0), 3)])
def test_the_probe_sees_a_loss_move_by_two_parts_in_a_hundred_million(tg, tmp_path, monkeypatch, moved, faults):
    run, _ = built(tg, byte_run(tmp_path))
    losses = iter([loss for share in moved for loss in (1000.0, 1000.0 * (1 + share))])
    monkeypatch.setattr(run.model, "forward", lambda *args: torch.tensor(next(losses), dtype=torch.float64))
    assert len(tg.probe(run)) == faults


def check_unequal_ranks(rank, size, argv):
    tg = load_train_gpt()
    config, overrides = tg.parse_config(argv)
    world = tg.init_world()
    tg.join_group(world)
    run, log = tg.build(config, world, overrides), tg.RunLog(config.log_dir, world)
    if rank == 1:
        run.model.embed.data[3, 4] += 1e-3
    try:
        tg.self_check(run, log)
    except tg.Failure as error:
        return str(error)
    return "passed"


def test_self_check_catches_ranks_with_different_weights(run_ranks, tmp_path):
    messages = run_ranks(2, check_unequal_ranks, byte_run(tmp_path))
    assert messages == [f"rank {rank}: self-check: the ranks hold different weights in embed" for rank in (0, 1)]


def test_comparing_ranks_copies_no_weights(tg, tmp_path):
    run, _ = built(tg, byte_run(tmp_path, "--table_rows=20011"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert tg.unequal_ranks(run) == []
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most < run.model.ngrams.nbytes / 100            # a table of gigabytes leaves no room for another


def test_a_failing_self_check_ends_the_run(tg, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tg, "dense_mask", lambda segments, window, block, real=tg.dense_mask: real(
        segments * 0, window, block))
    assert tg.main(byte_run(tmp_path)) == 1
    assert "self-check: another document changed" in capsys.readouterr().err
    assert tg.main(byte_run(tmp_path, "--self_check=off")) == 0


# ---- what a header and a checkpoint hold -----------------------------------------------------------------------------


def test_the_header_names_versions_stages_and_commit(tg, tmp_path, monkeypatch):
    run, _ = built(tg, byte_run(tmp_path))
    asked = []
    monkeypatch.setattr(tg, "run_quietly", lambda *command: asked.append(command) or "# branch.oid 0123abc\n1 .M x")
    header = tg.facts(run, {}, [])
    assert set(header["versions"]) >= {"torch", "triton", "nccl", "cuda"}
    assert header["git"] == dict(commit="0123abc", dirty=True) and "--no-optional-locks" in asked[0]
    assert [stage["window"] for stage in header["stages"]] == list(dict.fromkeys(
        tg.stage_at(run.config, step).window for step in range(6)))
    multiplied = ("embed", "copy_qk", "qk", "value_out", "mlp_up", "mlp_down")
    assert header["parameters"]["matmul"] == sum(header["parameters"][name] for name in multiplied)
    run.world, asked[:] = tg.World(1, 2), []
    assert len(tg.facts(run, {}, [])["devices"]) == 2
    assert not asked                                       # one rank is enough
    run.world = tg.World()
    monkeypatch.setattr(tg, "run_quietly", lambda *command: "")
    assert tg.facts(run, {}, [])["git"] == dict(commit="unknown", dirty="unknown")


def test_git_tells_a_clean_folder_from_a_changed_one_without_writing(tg, tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words], check=True,
                       capture_output=True)
    script = tmp_path / "train_gpt.py"
    assert tg.git_state(str(tmp_path)) == dict(commit="unknown", dirty="unknown")
    git("init")
    script.write_text("1\n")
    git("add", "-A")
    git("commit", "-m", "one")
    git("tag", "v1")
    os.utime(script, (1, 1))                               # the index would like to note this
    index = (tmp_path / ".git/index").read_bytes()
    clean = tg.git_state(str(tmp_path))
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    assert (tmp_path / ".git/index").read_bytes() == index
    script.write_text("2\n")
    assert tg.git_state(str(tmp_path)) == dict(commit=clean["commit"], dirty=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_keeps_its_stages(tg, tmp_path, monkeypatch, stage):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=3", "--self_check=off")
    run_here(0, 1, argv)
    facts = tg.facts

    def of_another_table(*args):
        header = facts(*args)
        header["stages"][stage - 1]["window"] += 1
        return header
    monkeypatch.setattr(tg, "facts", of_another_table)
    with pytest.raises(tg.Refusal, match=f"stage {stage} differs: .*window.* in the checkpoint"):
        run_here(0, 1, [*argv, f"--resume={checkpoints_in(tmp_path)[0]}"])


@pytest.mark.recipe
def test_only_these_settings_may_change_when_a_run_is_resumed(tg):
    assert tg.RESUME_MAY_CHANGE == {
        "preset", "log_dir", "micro_rows", "train_files", "val_files", "checkpoint_every_steps", "checkpoint_dir",
        "resume", "self_check", "max_epochs", "val_tokens", "val_overlap", "val_window_blocks", "val_every_steps",
        "target_loss", "compile", "attention", "fp8", "graphs", "deterministic", "log_every_steps", "profile_steps"}


# ---- any number of ranks ---------------------------------------------------------------------------------------------


def exact_losses(rank, size, argv):
    """All digits of a run's training losses and of its last validation."""
    tg = load_train_gpt()
    hide_gpus()
    step, losses = tg.train_step, []

    def noting(*args):
        stats = step(*args)
        losses.append(float(stats[0]))
        return stats
    tg.train_step = noting
    try:
        result = run_here(rank, size, argv)[0]
    finally:
        tg.train_step = step
    return [*losses, result["val_loss"]]


@pytest.fixture(scope="module")
def curve_of_one(tmp_path_factory):
    """Options of six steps of 2, 4, 4, 8, 8, 8 rows, and the losses of one process."""
    argv = byte_run(tmp_path_factory.mktemp("any_ranks"))
    return argv, exact_losses(0, 1, argv)


@pytest.mark.parametrize("size", [3, 5, 7, pytest.param(16, marks=pytest.mark.slow)])
def test_any_number_of_ranks_has_the_curve_of_one(run_ranks, curve_of_one, size):
    argv, alone = curve_of_one
    assert len(alone) == 7
    for losses in run_ranks(size, exact_losses, argv, timeout_s=600):
        assert losses == pytest.approx(alone, abs=1e-5)


def test_a_run_of_three_ranks_goes_on_with_two_and_back(run_ranks, curve_of_one, tmp_path):
    argv, alone = curve_of_one
    argv = changed(argv, f"--checkpoint_dir={tmp_path}/checkpoints")

    def losses_after(size, steps, *more):
        assert run_ranks(size, exact_losses, [*argv, *more])[0] == pytest.approx(alone[steps:], abs=1e-5)
        return f"--resume={checkpoints_in(tmp_path)[-2]}"
    step_4 = losses_after(3, 0, "--checkpoint_every_steps=2")
    step_5 = losses_after(2, 4, "--checkpoint_every_steps=1", step_4)
    losses_after(3, 5, step_5)


def test_an_empty_row_gives_no_loss_no_gradient_and_touches_no_row_of_the_table(tg, tmp_path):
    run, _ = built(tg, byte_run(tmp_path))
    for p in run.model.parameters():
        p.data.normal_()
    tokens = torch.full((1, 64), 256, dtype=torch.int32)
    loss = run.model(tokens, torch.full_like(tokens, -1), tg.train_view(run, 0))
    loss.backward()
    ids, rows = run.model.looked_up
    assert float(loss) == 0 and bool((ids == len(run.model.ngrams) - 1).all()) and not rows.grad.any()
    assert not any(bank.grad.any() for bank in run.optimizer.banks if bank.group.kind != "rows")


@pytest.mark.parametrize("size, text", [
    (1, "0.0% of the rows are padding"), (2, "0.0% of the rows are padding"),
    (3, "20.0% of the rows are padding; 3 ranks for 4 rows: 1 idle in 50% of the steps"),
    (8, "25.0% of the rows are padding; 8 ranks for 4 rows: 4 idle in 50% of the steps")])
def test_padding_and_idle_ranks_are_said(tg, tmp_path, monkeypatch, size, text):
    """Steps of 4 rows and of 8: three ranks compute 6 and 9, eight compute 8 and 8."""
    monkeypatch.setitem(tg.STAGES, "record", (tg.Stage(0.5, 0, 3, 0.0, 0.5), tg.Stage(1.0, 0, 3, 0.0, 1.0)))
    config = tg.Config(num_steps=10, batch_tokens=8 * 64, row_tokens=64, block_tokens=16, val_overlap=0)
    assert tg.padding_in_words(config, size) == text
    config, overrides = tg.parse_config(byte_run(tmp_path))
    run = tg.build(config, tg.World(0, size), overrides)
    assert tg.padding_in_words(run.config, size) in run.notes


# ---- determinism, several machines -----------------------------------------------------------------------------------


def test_same_seed_same_losses(tmp_path):
    argv = byte_run(tmp_path)
    first, second = run_here(0, 1, argv), run_here(0, 1, argv)
    assert losses_of(first[2]) == losses_of(second[2]) and first[0]["val_loss"] == second[0]["val_loss"]
    other = run_here(0, 1, changed(argv, "--seed=1"))
    assert losses_of(other[2]) != losses_of(first[2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_one_rank_killed_ends_all_soon(tmp_path):
    """Under torchrun, as users start it: no hang, exit code not 0."""
    argv = byte_run(tmp_path, "--self_check=off", num_steps=4000)
    process = start(argv, ["--standalone", "--nproc_per_node=2"])
    wait_for(process, "step:3/4000 train_loss")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 8])
def test_two_agents_with_a_rendezvous_reach_the_losses_of_one_process(tmp_path, per_host):
    """Two machines as two torchrun agents on this one; with eight processes each, half of 16 ranks have no row."""
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = byte_run(tmp_path)
    agents = [start(argv, ["--nnodes=2", f"--nproc_per_node={per_host}", "--rdzv_id=7", "--rdzv_backend=c10d",
                           f"--rdzv_endpoint=127.0.0.1:{port}"]) for _ in range(2)]
    outputs = [agent.communicate(timeout=600)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    found = losses_of("".join(outputs).splitlines())
    expected = losses_of(run_here(0, 1, argv)[2])
    assert found.keys() == expected.keys()
    assert all(abs(float(found[place]) - float(expected[place])) < 2e-4 for place in expected)
    assert result_of("\n" + "".join(outputs))["status"] == "finished"


def test_two_jobs_in_one_folder_keep_apart(run_ranks, tmp_path):
    """Two processes of one rank each, at the same time."""
    run_ranks(2, alone, byte_run(tmp_path, "--checkpoint_every_steps=3"))
    assert len(list((tmp_path / "logs").glob("*.txt"))) == 2 and len(checkpoints_in(tmp_path)) == 4


def alone(rank, size, argv):
    assert run_here(0, 1, argv)[0]["status"] == "finished"


def drift_apart(rank, size, argv):
    """main() where rank 1's embedding is another one at the end of training."""
    hide_gpus()
    tg, said = load_train_gpt(), io.StringIO()
    loop = tg.loop

    def drifting(run, *more):
        result = loop(run, *more)
        run.model.embed.data[0, 0] += rank
        return result
    tg.loop = drifting
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        return tg.main(argv), said.getvalue()


def test_ranks_that_drift_apart_fail_the_run(run_ranks, tmp_path):
    for code, said in run_ranks(2, drift_apart, byte_run(tmp_path)):
        assert code == 1 and "after the last step: the ranks hold different weights in embed" in said
