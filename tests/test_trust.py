"""Fail fast and say why; can the numbers be believed; more than one machine."""
import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from model_helpers import hide_gpus
from rank_helpers import load_train_gpt
from run_helpers import byte_run, changed, checkpoints_in, facts_of, losses_of, run_here, start, wait_for


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


def small_memory(run, rows):
    """A model that runs out of memory with more than so many rows at once."""
    forward = run.model.forward

    def limited(tokens, targets, view):
        if tokens.size(0) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return forward(tokens, targets, view)
    run.model.forward = limited


def test_out_of_memory_names_the_rows_that_may_fit(tg, tmp_path):
    run, log = built(tg, byte_run(tmp_path))
    small_memory(run, 1)
    with pytest.raises(tg.Failure, match="with 2 rows of 64 tokens at once: use --micro_rows=1, or auto"):
        tg.fit_memory(run, log)
    small_memory(run, 0)
    run.micro_rows = 1
    with pytest.raises(tg.Failure, match="use a smaller --row_tokens"):
        tg.fit_memory(run, log)


def test_auto_finds_rows_that_fit_and_keeps_the_curve(tg, tmp_path, capsys):
    argv = changed(byte_run(tmp_path), "--micro_rows=auto")
    run, log = built(tg, argv)
    small_memory(run, 3)
    tg.fit_memory(run, log)
    assert run.micro_rows == 2 and "trying micro_rows=2" in capsys.readouterr().out
    curves = [losses_of(run_here(0, 1, changed(argv, f"--micro_rows={n}"))[2]) for n in ("auto", "2")]
    for place, loss in curves[0].items():
        assert abs(float(loss) - float(curves[1][place])) < 1e-3


def test_out_of_memory_later_is_one_line(tg, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    monkeypatch.setattr(tg, "train_step", full)
    assert tg.main(byte_run(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "out of memory; use a smaller --micro_rows, or auto" in said and len(said.splitlines()) == 1


def test_a_shard_that_goes_away_is_one_line(tg, tmp_path, monkeypatch, capsys):
    argv = byte_run(tmp_path, num_steps=60)                # 60 steps need the second shard, opened when it is reached
    monkeypatch.setattr(tg, "self_check", lambda run, log: (tmp_path / "train_2.bin").unlink())
    assert tg.main(argv) == 2
    said = capsys.readouterr().err
    assert "train_2.bin" in said and len(said.splitlines()) == 1, said


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


def sees_the_next_token(segments, window, block):
    mask = load_train_gpt().dense_mask(segments, window, block)
    return mask._replace(dense=mask.dense | mask.dense.roll(1, -1))


def sees_all_documents(segments, window, block):
    return load_train_gpt().dense_mask(torch.zeros_like(segments), window, block)


def sees_nothing_but_itself(segments, window, block):
    mask = load_train_gpt().dense_mask(segments, window, block)
    return mask._replace(dense=mask.dense & torch.eye(segments.size(1), dtype=torch.bool))


@pytest.mark.parametrize("build_mask, named", [
    (sees_the_next_token, "later tokens changed"), (sees_all_documents, "another document changed"),
])
def test_self_check_catches_a_leak(tg, tmp_path, build_mask, named):
    run, log = built(tg, byte_run(tmp_path))
    run.model.build_mask = build_mask
    with pytest.raises(tg.Failure, match=f"self-check: {named}"):
        tg.self_check(run, log)


def test_self_check_catches_a_smear_over_the_next_position(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    hidden = run.model.hidden
    monkeypatch.setattr(run.model, "hidden", lambda *args: hidden(*args) + 0.01 * hidden(*args).roll(-1, 1))
    with pytest.raises(tg.Failure, match="self-check: later tokens changed"):
        tg.self_check(run, log)


@pytest.mark.parametrize("spoil, named", [
    (lambda real, tokens, *rest: real(tokens.roll(-1, 1), *rest), "later tokens changed"),
    (lambda real, tokens, segments, *rest: real(tokens, torch.zeros_like(segments), *rest), "another document changed"),
])
def test_self_check_catches_ngrams_of_what_may_not_be_seen(tg, tmp_path, monkeypatch, spoil, named):
    run, log = built(tg, byte_run(tmp_path))
    real = tg.ngram_ids
    monkeypatch.setattr(tg, "ngram_ids", lambda *args: spoil(real, *args))
    with pytest.raises(tg.Failure, match=f"self-check: {named}"):
        tg.self_check(run, log)


def test_self_check_catches_a_model_that_ignores_its_input(tg, tmp_path, monkeypatch):
    run, log = built(tg, byte_run(tmp_path))
    monkeypatch.setattr(run.model, "hidden", lambda tokens, *_: torch.ones(*tokens.shape, 32))
    with pytest.raises(tg.Failure, match="self-check: their own context changed"):
        tg.self_check(run, log)


def test_self_check_catches_shared_text(tg, tmp_path):
    argv = byte_run(tmp_path)
    train, val = (tmp_path / "train_1.bin").read_bytes(), tmp_path / "val_1.bin"
    val.write_bytes(val.read_bytes()[:1024] + train[1024:1024 + 1400])
    run, log = built(tg, argv)
    with pytest.raises(tg.Failure, match=r"validation documents begin like one of .*train_1.bin"):
        tg.self_check(run, log)


def check_unequal_ranks(rank, size, argv):
    tg = load_train_gpt()
    config, overrides = tg.parse_config(argv)
    world = tg.init_world()
    tg.join_group(world)
    run, log = tg.build(config, world, overrides), tg.RunLog(config.log_dir, world)
    if rank == 1:
        run.model.head.data[3, 4] += 1e-3
    try:
        tg.self_check(run, log)
    except tg.Failure as error:
        return str(error)
    return "passed"


def test_self_check_catches_ranks_with_different_weights(run_ranks, tmp_path):
    messages = run_ranks(2, check_unequal_ranks, byte_run(tmp_path))
    assert messages == [f"rank {rank}: self-check: the ranks hold different weights in head" for rank in (0, 1)]


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
def test_two_agents_with_a_rendezvous_reach_the_losses_of_one_process(tmp_path):
    """Two machines as two torchrun agents on this one, one process each."""
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = byte_run(tmp_path)
    agents = [start(argv, ["--nnodes=2", "--nproc_per_node=1", "--rdzv_id=7", "--rdzv_backend=c10d",
                           f"--rdzv_endpoint=127.0.0.1:{port}"]) for _ in range(2)]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
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
    """main() where rank 1's head is another one at the end of training."""
    hide_gpus()
    tg, said = load_train_gpt(), io.StringIO()
    loop = tg.loop

    def drifting(run, *more):
        result = loop(run, *more)
        run.model.head.data[0, 0] += rank
        return result
    tg.loop = drifting
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        return tg.main(argv), said.getvalue()


def test_ranks_that_drift_apart_fail_the_run(run_ranks, tmp_path):
    for code, said in run_ranks(2, drift_apart, byte_run(tmp_path)):
        assert code == 1 and "after the last step: the ranks hold different weights in head" in said
