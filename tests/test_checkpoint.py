"""Checkpoint and resume: the same run as never having stopped, or a refusal that names what does not fit."""
import contextlib
import gzip
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from model_helpers import without_launcher
from run_helpers import byte_run, changed, checkpoints_in, facts_of, losses_of, run_here, start, stop, wait_for


def same_weights(left, right):
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(folder, options, result, weights, lines) of an undisturbed run of 6 steps with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    argv = byte_run(folder, "--checkpoint_every_steps=2")
    return folder, argv, *run_here(0, 1, argv)


@pytest.fixture
def refused(tg, straight):
    """Call with a checkpoint and changed options: the text of the refusal; nothing may have been written."""
    def call(checkpoint, *more):
        before = checkpoints_in(straight[0])
        with pytest.raises(tg.Refusal) as info:
            run_here(0, 1, changed(straight[1], f"--resume={checkpoint}", *more))
        assert checkpoints_in(straight[0]) == before
        assert "\n" not in str(info.value)
        return str(info.value)
    return call


# ---- the same run ----------------------------------------------------------------------------------------------------


def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(straight, tmp_path):
    folder, argv, result, weights, lines = straight
    kept = checkpoints_in(folder)
    assert [path.name for path in kept] == ["step_000004", "step_000006"]      # the last two
    again, weights_again, said = run_here(0, 1, changed(argv, f"--resume={kept[0]}", f"--checkpoint_dir={tmp_path}"))
    assert same_weights(weights, weights_again)
    assert again["val_loss"] == result["val_loss"] and again["tokens_trained"] == result["tokens_trained"]
    expected, found = losses_of(lines), losses_of(said)
    assert found == {key: loss for key, loss in expected.items() if int(key[0][5:].split("/")[0]) > 4}
    assert again["resumed"] and not result["resumed"]
    assert any("resumed from" in line and "at step 4" in line for line in said)
    assert again["train_time_ms"] > facts_of(kept[0])["total_ms"]              # the clock goes on
    assert [path.name for path in tmp_path.glob("*/step_*")] == ["step_000006"]      # that of its start is there


def test_a_resumed_run_foretells_its_end_after_as_many_steps_of_its_own(tg, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "PACE_STEPS", 1)
    monkeypatch.setattr(tg.Clock, "elapsed_ms", lambda self: 10_000.0)
    folder, argv = straight[:2]
    said = run_here(0, 1, changed(argv, f"--resume={checkpoints_in(folder)[0]}", f"--checkpoint_dir={tmp_path}"))[2]
    config = tg.parse_config(argv)[0]
    rows = [tg.rows_at(config, step) for step in range(6)]
    at = [i for i, line in enumerate(said) if "at this pace" in line]
    assert [said[i].split()[-2] for i in at] == [f"{10 * sum(rows) / sum(rows[:6]):.0f}"]
    assert any(line.startswith("step:5/6 train_loss") for line in said[:at[0]])


def test_a_resumed_run_goes_on_counting_what_clipping_drops(tg, tmp_path, monkeypatch):
    monkeypatch.setitem(tg.STAGES, "plain", (tg.Stage(1.0, 50, 3, 0.0),))
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2", num_steps=4)
    runs = [run_here(0, 1, argv)[2], run_here(0, 1, [*argv, f"--resume={checkpoints_in(tmp_path)[0]}"])[2]]
    first, again = ([line for line in lines if "tokens clipped" in line] for lines in runs)
    assert first == again and int(first[0].split(",", 1)[1].split()[0].replace(",", "")) > 1000


def test_a_resumed_log_says_so_and_is_no_record(straight, tmp_path):
    from records.logs import parse_log
    folder, argv = straight[:2]
    run_here(0, 1, changed(argv, f"--resume={checkpoints_in(folder)[0]}", f"--checkpoint_dir={tmp_path}/c",
                           f"--log_dir={tmp_path}/logs"))
    log, = map(parse_log, (tmp_path / "logs").glob("*.txt"))
    assert log.resumed and log.header["resumed_from"].endswith("step_000004")
    assert len(log.step_times_ms) == 6 and sum(log.step_times_ms) <= 1000 * log.train_time_s + 1
    assert not parse_log(min((folder / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)).resumed


def test_a_checkpoint_holds_every_parameter_once_without_padding(tg, straight):
    facts, whole = tg.read_checkpoint(checkpoints_in(straight[0])[-1])
    settings = facts["run"]["config"]
    config = tg.Config(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
    shapes = {name: tuple(p.shape) for name, p in tg.GPT(config).named_parameters()}
    for name, shape in shapes.items():
        kinds = {key.rpartition("/")[2] for key in whole if key.rpartition("/")[0] == name}
        assert kinds in ({"weight", "momentum", "second", "ema"}, {"weight", "exp_avg", "exp_avg_sq", "ema"},
                         {"weight", "exp_avg", "exp_avg_sq"}, {"weight", "exp_avg", "exp_avg_sq", "grad"},
                         {"weight", "second", "seen"})
        for kind in kinds - {"second", "seen"}:
            assert whole[f"{name}/{kind}"].shape == shape
        if "second" in kinds:                                     # a number for each neuron, or each row of the table
            assert whole[f"{name}/second"].numel() == (shape[0] if name == "ngrams" else
                                                       math.prod(shape[:-2]) * max(shape[-2:]))
        assert (whole[f"{name}/weight"].numpy() == straight[3][name]).all()
    assert {key.rpartition("/")[0] for key in whole} == {*shapes}
    assert facts["step"] == 6


def test_latest_finds_the_newest_checkpoint(tg, straight, tmp_path):
    assert tg.find_checkpoint("latest", f"{straight[0]}/checkpoints") == checkpoints_in(straight[0])[-1]
    with pytest.raises(tg.Refusal, match="no checkpoint there"):
        tg.find_checkpoint("latest", str(tmp_path))


def test_latest_is_the_newest_that_fits_and_a_refusal_names_what_there_is(tg, straight, tmp_path):
    folder, (older, newer) = f"{straight[0]}/checkpoints", checkpoints_in(straight[0])

    def only_step_4(facts):
        return "" if facts["step"] == 4 else "another num_steps"
    assert tg.find_checkpoint("latest", folder, only_step_4) == older
    for resume, misfit in (("latest", lambda facts: "too big"), (str(tmp_path), lambda facts: "")):
        with pytest.raises(tg.Refusal, match="no checkpoint there that fits") as info:
            tg.find_checkpoint(resume, folder, misfit)
        assert str(older) in str(info.value) and str(newer) in str(info.value)
        assert f"{newer} ({'too big' if resume == 'latest' else 'fits'})" in str(info.value)


def test_of_equally_old_checkpoints_the_one_of_more_steps_is_the_newest(tg, straight, tmp_path):
    shutil.copytree(f"{straight[0]}/checkpoints", tmp_path / "c")
    for file in (tmp_path / "c").glob("*/*/checkpoint.json"):
        os.utime(file, (1e9, 1e9))
    assert tg.find_checkpoint("latest", str(tmp_path / "c")).name == checkpoints_in(straight[0])[-1].name


def test_a_checkpoint_that_vanishes_or_has_odd_facts_does_not_hide_the_others(tg, straight, tmp_path, monkeypatch):
    folder, odd = tmp_path / "c", tmp_path / "c/other/step_000009/checkpoint.json"
    shutil.copytree(f"{straight[0]}/checkpoints", folder)
    newest = tg.find_checkpoint("latest", str(folder))
    odd.parent.mkdir(parents=True)
    odd.symlink_to(tmp_path / "gone")
    assert tg.find_checkpoint("latest", str(folder)) == newest
    odd.unlink()
    body = json.dumps(dict.fromkeys(tg.CHECKPOINT_FACTS, {})).encode()
    odd.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert tg.find_checkpoint("latest", str(folder), lambda facts: facts["run"].get("no", "")) == odd.parent
    assert tg.find_checkpoint("latest", str(folder), lambda facts: "" if facts["run"]["data"] else "no") == newest


def test_what_a_user_copies_into_a_runs_folder_stays(tmp_path):
    process = start(byte_run(tmp_path, "--checkpoint_every_steps=40", num_steps=200))
    wait_for(process, "step:50/200 train_loss")
    [first, *_] = checkpoints_in(tmp_path)
    shutil.copytree(first, first.with_name(first.name + "_best"))
    process.communicate(timeout=60)
    assert first.with_name(first.name + "_best").is_dir()
    assert [path.name for path in checkpoints_in(tmp_path)[-2:]] == ["step_000160", "step_000200"]


def test_a_resumed_run_can_be_profiled(straight, tmp_path):
    """Also when less than five steps are left; the trace lies beside its log."""
    argv = changed(straight[1], f"--resume={checkpoints_in(straight[0])[0]}", "--profile_steps=2",
                   f"--log_dir={tmp_path}", f"--checkpoint_dir={tmp_path}/checkpoints")
    assert run_here(0, 1, argv)[0]["val_loss"] == straight[2]["val_loss"]
    [trace] = tmp_path.glob("*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_two_ranks_resume_bit_for_bit(run_ranks, tmp_path):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2")
    whole = run_ranks(2, run_here, argv)
    assert same_weights(whole[0][1], whole[1][1])
    again = run_ranks(2, run_here, [*argv, f"--resume={checkpoints_in(tmp_path)[0]}"])
    assert same_weights(whole[0][1], again[0][1]) and whole[0][0]["val_loss"] == again[0][0]["val_loss"]


def test_one_two_one_ranks_agree_with_one(run_ranks, straight, tmp_path):
    import numpy as np
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2")
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "one")
    run_ranks(2, run_here, [*argv, f"--resume={next((tmp_path / 'one').glob('*/step_000004'))}"])
    two = checkpoints_in(tmp_path)[-1]
    weights = run_here(0, 1, [*argv, f"--resume={two}"])[1]
    for name, value in weights.items():
        np.testing.assert_allclose(value, straight[3][name], rtol=2e-3, atol=2e-5, err_msg=name)


# ---- what does not fit is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, named", [
    ("--model_dim=64", "setting model_dim differs: 32 in the checkpoint, 64 in this run"),
    ("--vocab_size=300", "setting vocab_size differs"),
    ("--num_steps=8", "setting num_steps differs: 6 in the checkpoint, 8 in this run"),
    ("--seed=1", "setting seed differs"),
    ("--lr_matrix=0.01", "setting lr_matrix differs"),
    ("--batch_tokens=1024", "setting batch_tokens differs"),
])
def test_another_setting_is_refused_by_name(straight, refused, change, named):
    assert named in refused(checkpoints_in(straight[0])[0], change)


def test_other_data_is_refused_by_name(straight, refused, tmp_path):
    byte_run(tmp_path)
    blob = bytearray((tmp_path / "train_2.bin").read_bytes())
    blob[2000] ^= 1
    (tmp_path / "train_2.bin").write_bytes(blob)
    message = refused(checkpoints_in(straight[0])[0], f"--train_files={tmp_path}/train_*.bin")
    assert "train file 2 differs: train_2.bin" in message
    blob = bytearray((tmp_path / "val_1.bin").read_bytes())
    blob[1030] ^= 1
    (tmp_path / "val_1.bin").write_bytes(blob)
    message = refused(checkpoints_in(straight[0])[0], f"--val_files={tmp_path}/val_*.bin")
    assert "val file 1 differs: val_1.bin" in message
    message = refused(checkpoints_in(straight[0])[0], f"--train_files={tmp_path}/train_1.bin")
    assert "train file 2 differs" in message and "nothing in this run" in message


def rewrite(tg, checkpoint, target, change):
    """A copy of a checkpoint, edited by `change`, with right checksums: as another source would write it."""
    facts, whole = tg.read_checkpoint(checkpoint)
    change(facts, whole)
    log = tg.RunLog(str(target / "logs"), tg.World())
    store = tg.Store(target, log)
    store.save(facts["step"], whole, {key: value for key, value in facts.items() if key != "files"})
    store.close()
    return store.last


@pytest.mark.parametrize("what, named", [
    (lambda facts, whole: whole.pop("embed/exp_avg"), "shape of embed/exp_avg differs: nothing in the checkpoint"),
    (lambda facts, whole: whole.update({"ema/weight": whole["embed/weight"]}),
     "shape of ema/weight differs: [384, 32] in the checkpoint, nothing in this run"),
    (lambda facts, whole: whole.update({"embeds/weight": whole.pop("embed/weight")}), "shape of embeds/weight differs"),
    (lambda facts, whole: whole.update({"embed/weight": whole["embed/weight"][1:]}),
     "shape of embed/weight differs: [383, 32] in the checkpoint, [384, 32] in this run"),
    (lambda facts, whole: whole.update({"embed/exp_avg": whole["embed/exp_avg"].T.contiguous()}),
     "embed/exp_avg differs"),
])
def test_missing_renamed_extra_and_cut_keys_are_refused_by_name(tg, straight, refused, tmp_path, what, named):
    assert named in refused(rewrite(tg, checkpoints_in(straight[0])[0], tmp_path / "run", what))


def test_another_source_is_said_not_refused(tg, straight, tmp_path):
    def change(facts, whole):
        facts["run"]["source_sha256"] = "0" * 64
    checkpoint = rewrite(tg, checkpoints_in(straight[0])[0], tmp_path / "run", change)
    said = run_here(0, 1, changed(straight[1], f"--resume={checkpoint}", f"--checkpoint_dir={tmp_path}"))[2]
    assert any("written by another source" in line for line in said)


def corrupt(folder, rng):
    """Spoil one file of a checkpoint: flip, cut, lengthen, empty or remove. -> what was done."""
    path = rng.choice(sorted(Path(folder).iterdir()))
    blob = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "cut", "longer", "zeros", "empty", "remove"])
    if kind == "remove":
        path.unlink()
        return kind, path.name
    if kind == "flip":
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del blob[rng.randrange(len(blob)):]
    elif kind == "longer":
        blob += bytes(rng.randrange(1, 100))
    elif kind == "zeros":
        begin = rng.randrange(len(blob))
        if not any(blob[begin:begin + 50]):
            blob[begin] = 1
        else:
            blob[begin:begin + 50] = bytes(len(blob[begin:begin + 50]))
    else:
        blob.clear()
    path.write_bytes(blob)
    return kind, path.name


def corruptions(tg, checkpoint, folder, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        broken = folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(checkpoint, broken)
        done = corrupt(broken, rng)
        with pytest.raises(tg.Refusal) as info:
            tg.read_checkpoint(tg.find_checkpoint(str(broken), ""))
        said = str(info.value)
        assert "\n" not in said and (done[1] in said or "checkpoint.json" in said), (done, said)


def test_random_corruptions_are_refused(tg, straight, tmp_path):
    corruptions(tg, checkpoints_in(straight[0])[-1], tmp_path, 30, 0)


class Evil:
    """Its pickle makes a file when it is read."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def sealed(folder, change):
    """Change a checkpoint's facts and give it right checksums."""
    facts = facts_of(folder)
    facts["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in facts["files"]}
    change(facts)
    body = json.dumps(facts).encode()
    (folder / "checkpoint.json").write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


@pytest.mark.parametrize("what", ["evil among tensors", "evil alone", "evil, by pickle", "text", "a list", "a number"])
def test_weights_that_are_more_than_tensors_are_refused_and_run_no_code(tg, straight, tmp_path, what):
    import torch
    folder, trap = tmp_path / "step_1", tmp_path / "trap"
    shutil.copytree(checkpoints_in(straight[0])[0], folder)
    weights = folder / "weights.pt"
    if what == "text":
        weights.write_text("hello")
    elif what == "evil, by pickle":
        weights.write_bytes(pickle.dumps(Evil(trap)))
    else:
        torch.save({"evil among tensors": {"embed/weight": torch.zeros(2), "x": Evil(trap)}, "evil alone": Evil(trap),
                    "a list": [torch.zeros(2)], "a number": {"embed/weight": 1}}[what], weights)
    sealed(folder, lambda facts: None)
    with pytest.raises(tg.Refusal, match="weights.pt: .*; take another checkpoint") as info:
        tg.read_checkpoint(folder)
    said = str(info.value)
    assert said.isprintable() and not trap.exists() and "weights_only" not in said        # torch advises to do without


def test_weights_are_read_when_they_are_used(tg, straight):
    """A table of 13 GB must not be in memory twice: the tensors lie in the file."""
    checkpoint = checkpoints_in(straight[0])[0]
    whole = tg.read_checkpoint(checkpoint)[1]
    places = Path("/proc/self/maps").read_text()
    assert str(checkpoint / "weights.pt") in places and all(t.device.type == "cpu" for t in whole.values())


@pytest.mark.parametrize("change, named", [
    (lambda facts: facts.pop("position"), "lacks position"), (lambda facts: facts.pop("files"), "lacks files"),
    (lambda facts: facts.clear(), "lacks step, tokens, position, total_ms, step_ms, run, files"),
    (lambda facts: facts["files"].clear(), "weights.pt: can't be read")])
def test_facts_that_lack_something_are_refused_by_name(tg, straight, tmp_path, change, named):
    shutil.copytree(checkpoints_in(straight[0])[0], tmp_path / "step_1")
    sealed(tmp_path / "step_1", change)
    with pytest.raises(tg.Refusal, match=named):
        tg.read_checkpoint(tmp_path / "step_1")


def test_every_bank_counts_on_from_the_step_of_the_checkpoint(tg, straight):
    facts, whole = tg.read_checkpoint(checkpoints_in(straight[0])[0])
    config, overrides = tg.parse_config(straight[1])
    optimizer = tg.build(config, tg.World(), overrides).optimizer
    optimizer.load(whole, facts["step"])
    assert facts["step"] == 4 and {bank.steps for bank in optimizer.banks} == {4}


@pytest.mark.slow
def test_a_thousand_random_corruptions_are_refused(tg, straight, tmp_path):
    corruptions(tg, checkpoints_in(straight[0])[-1], tmp_path, 1000, 1)


# ---- what can't be written -------------------------------------------------------------------------------------------


def test_an_unwritable_checkpoint_folder_is_said_and_training_goes_on(straight, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    result, weights, lines = run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=3"))
    assert result["status"] == "finished" and same_weights(weights, straight[3])
    warnings = [line for line in lines if line.startswith("warn:")]
    assert len(warnings) == 2 and all("checkpoint not written" in line for line in warnings), lines


def test_a_checkpoint_folder_that_cannot_be_written_is_refused(tg, tmp_path):
    tg.need_writable("checkpoint_dir", str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "/proc/nowhere"):
        with pytest.raises(tg.Refusal, match="--checkpoint_dir=.*can't be written"):
            tg.need_writable("checkpoint_dir", place)


def test_a_run_that_asks_for_checkpoints_is_refused_where_they_cannot_be_written(tg, monkeypatch, tmp_path, capsys):
    without_launcher(monkeypatch)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    assert tg.main(byte_run(tmp_path, "--checkpoint_every_steps=3")) == 2
    assert "--checkpoint_dir=" in capsys.readouterr().err


def test_a_store_knows_whether_its_latest_attempt_failed(tg, tmp_path):
    import torch
    log = tg.RunLog(str(tmp_path / "logs"), tg.World())
    store = tg.Store(tmp_path / "run", log)
    for step, fails in ((1, True), (2, False), (3, True)):
        if fails:
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / f"writing_step_{step:06d}").write_text("in the way")
        store.save(step, {"a": torch.zeros(2)}, {})
        store.close()
        assert store.failed is fails and (store.last is not None) == (step > 1)
    log.close()


def test_a_store_writes_beside_training_and_one_checkpoint_after_the_other(tg, tmp_path, monkeypatch):
    import threading

    import torch
    log, save, may_write = tg.RunLog(str(tmp_path / "logs"), tg.World()), torch.save, threading.Event()
    store = tg.Store(tmp_path / "run", log)
    whole = [tmp_path / "run" / f"step_{step:06d}" for step in (1, 2, 3)]
    (tmp_path / "run" / "writing_step_000001").mkdir(parents=True)        # left by a failure that could not clean up
    monkeypatch.setattr(torch, "save", lambda *args: may_write.wait(20) and save(*args))
    store.save(1, {"a": torch.zeros(2)}, {})
    assert not whole[0].exists() and store.last is None                   # it goes on while the disk is slow
    threading.Timer(0.2, may_write.set).start()
    store.save(2, {"a": torch.ones(2)}, {})
    assert whole[0].exists()                                              # and waits before it writes the next
    store.close()
    may_write.clear()
    store.save(3, {"a": torch.ones(2)}, {})
    threading.Timer(0.2, may_write.set).start()
    store.close()
    assert [path.exists() for path in whole] == [False, True, True] and store.last == whole[2] and not store.failed
    log.close()


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path):
    """A limit on the size of files stands for a full disk: writing beyond it fails in the same place."""
    import resource
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2")
    process = start(argv, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert output.count("checkpoint not written (") == 3 and "Traceback" not in output, output
    assert "File too large" in output, output                  # the reason, not only where torch met it
    assert not checkpoints_in(tmp_path) and not list(tmp_path.glob("checkpoints/*/*"))


def test_a_stop_without_a_checkpoint_does_not_name_one(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    process = start(byte_run(tmp_path, num_steps=250))
    wait_for(process, "step:20/250 train_loss")
    code, rest, _ = stop(process)
    assert code == 143 and "SIGTERM; no checkpoint was written" in rest and "--resume" not in rest, rest


def test_a_target_met_right_after_a_checkpoint_needs_no_second_one(tmp_path):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2", "--val_every_steps=2")
    lines = run_here(0, 1, argv)[2]
    loss = next(float(line.split("val_loss:")[1].split()[0]) for line in lines if line.startswith("step:4/6 val_loss"))
    result, _, lines = run_here(0, 1, changed(argv, f"--target_loss={loss + 1e-4}"))
    assert (result["status"], result["step"]) == ("target_reached", 4)
    assert not [line for line in lines if line.startswith("warn:")], lines


def test_the_line_of_a_step_with_a_checkpoint_has_its_own_time(tmp_path):
    lines = run_here(0, 1, byte_run(tmp_path, "--checkpoint_every_steps=1"))[2]
    times = [line.split("step_avg:")[1].split("ms")[0] for line in lines if "train_loss" in line]
    log = next((tmp_path / "logs").glob("*.txt")).read_text()
    listed = json.loads(log[log.index("\nstep_times_ms:") + 15:].splitlines()[0])
    assert [float(t) for t in times] == pytest.approx(listed, abs=0.011)


def test_an_unfinished_checkpoint_is_never_taken(tg, straight, tmp_path):
    run = tmp_path / "checkpoints" / "run"
    shutil.copytree(checkpoints_in(straight[0])[0], run / "step_000004")
    shutil.copytree(checkpoints_in(straight[0])[1], run / "writing_step_000006")
    (run / "writing_step_000006" / "checkpoint.json").unlink()
    assert tg.find_checkpoint("latest", str(tmp_path / "checkpoints")).name == "step_000004"
    with pytest.raises(tg.Refusal):
        tg.find_checkpoint(str(run / "writing_step_000006"), "")


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_sigterm_writes_a_checkpoint_and_a_later_run_ends_as_if_undisturbed(tmp_path):
    argv = byte_run(tmp_path, num_steps=250)
    process = start(argv)
    wait_for(process, "step:20/250 train_loss")
    code, rest, seconds = stop(process)
    assert code == 143 and seconds < 10 and "Traceback" not in rest, rest
    checkpoint, = checkpoints_in(tmp_path)
    result = json.loads(rest[rest.index("result:") + 7:].splitlines()[0])
    assert result["status"] == "stopped" and result["signal"] == signal.SIGTERM and str(checkpoint) in result["reason"]
    assert result["step"] == facts_of(checkpoint)["step"]
    resumed = run_here(0, 1, [*argv, "--resume=latest"])
    assert same_weights(resumed[1], run_here(0, 1, argv)[1])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_hang_up_and_slurms_warning_write_a_checkpoint_too(tmp_path, number):
    process = start(byte_run(tmp_path, num_steps=250))
    wait_for(process, "step:20/250 train_loss")
    process.send_signal(number)                  # a shell that ends sends it twice
    code, rest, _ = stop(process, number)
    assert code == 128 + number and len(checkpoints_in(tmp_path)) == 1 and number.name in rest, rest


def ignore_hang_up():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_under_nohup_goes_on(tmp_path):
    process = start(byte_run(tmp_path, num_steps=60), preexec_fn=ignore_hang_up)
    wait_for(process, "step:20/60 train_loss")
    code, rest, _ = stop(process, signal.SIGHUP)
    assert code == 0 and '"status": "finished"' in rest, rest


def test_a_launcher_that_is_hung_up_under_nohup_gets_a_checkpoint(tmp_path):
    process = start(byte_run(tmp_path, num_steps=1000), torchrun=["--standalone", "--nproc_per_node=2"],
                    preexec_fn=ignore_hang_up)
    wait_for(process, "step:20/1000 train_loss")
    code, rest, _ = stop(process, signal.SIGHUP)
    assert code != 0 and len(checkpoints_in(tmp_path)) == 1, rest


def test_ranks_that_get_sigterm_from_slurm_and_from_their_launcher_write_a_checkpoint(tmp_path):
    process = start(byte_run(tmp_path, num_steps=1000), torchrun=["--standalone", "--nproc_per_node=2"])
    wait_for(process, "step:20/1000 train_loss")
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(ranks) == 2
    for rank in ranks:
        os.kill(int(rank), signal.SIGTERM)
    code, rest, _ = stop(process, signal.SIGTERM)
    assert code != 0 and len(checkpoints_in(tmp_path)) == 1, rest


@pytest.mark.parametrize("leads_session", [False, True])
def test_an_ignored_hang_up_counts_only_where_a_launcher_made_a_session_for_the_rank(tg, leads_session):
    """nohup ignores it for good; torchrun, which passes it on, kills a rank that goes on."""
    child = os.fork()
    if child == 0:
        try:
            if leads_session:
                os.setsid()
            ignore_hang_up()
            with tg.stop_signals() as received:
                signal.raise_signal(signal.SIGHUP)
            os._exit(len(received))
        finally:
            os._exit(9)                 # no test goes on in the child
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == leads_session


def test_signals_act_as_before_when_the_run_is_over(tg):
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    with tg.stop_signals() as received:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number, ends", [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGHUP, False),
                                          (signal.SIGUSR1, False)])
def test_only_a_later_sigterm_or_sigint_ends_a_run_at_once(tg, monkeypatch, number, ends):
    """SLURM signals all processes of a step, and torchrun its ranks besides: two at once are one request."""
    class Ended(Exception):
        pass

    def end(number, frame):
        raise Ended
    before = signal.signal(number, end)
    now = [100.0]
    monkeypatch.setattr(tg.time, "monotonic", lambda: now[0])
    try:
        with tg.stop_signals() as received:
            signal.raise_signal(signal.SIGUSR1)      # a warning long before is no impatience
            now[0] += 60
            for seconds in (0, tg.SAME_CAUSE_S):
                now[0] += seconds
                signal.raise_signal(number)
            assert received == [signal.SIGUSR1, number, number]
            now[0] += 0.1
            with pytest.raises(Ended) if ends else contextlib.nullcontext():
                signal.raise_signal(number)
            assert received == [signal.SIGUSR1, number, number, number]
        assert signal.getsignal(number) == end
    finally:
        signal.signal(number, before)


def test_a_signal_while_profiling_leaves_checkpoint_and_trace(tmp_path):
    process = start(byte_run(tmp_path, "--profile_steps=200", num_steps=250))
    wait_for(process, "step:20/250 train_loss")
    code, rest, _ = stop(process)
    assert code == 143 and len(checkpoints_in(tmp_path)) == 1, rest
    [trace] = tmp_path.glob("logs/*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_signal_on_one_rank_stops_all_after_the_same_step(run_ranks, tmp_path):
    results = run_ranks(2, stop_rank_one, byte_run(tmp_path, num_steps=50))
    assert [result["step"] for result, _, _ in results] == [7, 7]
    assert all(result["status"] == "stopped" for result, _, _ in results)
    assert [result["signal"] for result, _, _ in results] == [signal.SIGTERM, signal.SIGINT]      # rank 0 got none
    assert facts_of(checkpoints_in(tmp_path)[-1])["step"] == 7


def stop_rank_one(rank, size, argv):
    import os

    from rank_helpers import load_train_gpt
    tg = load_train_gpt()
    step = tg.train_step

    def interrupted(run, number, batch, lr_scale, stop=0):
        if rank == 1 and number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run, number, batch, lr_scale, stop)
    tg.train_step = interrupted
    return run_here(rank, size, argv)


def kill_and_resume(folder, moments, rng):
    """A run that is killed so many times at random moments and resumed; -> its last checkpoint."""
    argv = byte_run(folder, "--checkpoint_every_steps=3", "--self_check=off", num_steps=60)
    killed = 0
    while True:
        resume = ["--resume=latest"] if checkpoints_in(folder) else []
        process = start([*argv, *resume])
        if killed < moments:
            wait_for(process, "time_to_first_step_s")
            try:
                process.wait(rng.uniform(0.05, 1.2))
            except subprocess.TimeoutExpired:
                stop(process, signal.SIGKILL)
                killed += 1
                continue
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        if killed >= moments:
            return checkpoints_in(folder)[-1]
        for path in checkpoints_in(folder)[1:]:      # finished before it was killed: begin earlier
            shutil.rmtree(path)


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_with_the_same_weights(tg, tmp_path, moments):
    last = kill_and_resume(tmp_path, moments, random.Random(moments))
    weights = run_here(0, 1, byte_run(tmp_path, num_steps=60))[1]
    whole = tg.read_checkpoint(last)[1]
    assert all((whole[f"{name}/weight"].numpy() == value).all() for name, value in weights.items())


def in_half_precision(rank, size, argv):
    """run_here with bfloat16 weights, as on a GPU: the exact weights are then a copy that only their rank holds."""
    import torch
    from rank_helpers import load_train_gpt
    tg = load_train_gpt()
    choose = tg.choose_kernels
    tg.choose_kernels = lambda *args: tg.Kernels(dtype=torch.bfloat16)
    try:
        return run_here(rank, size, argv)
    finally:
        tg.choose_kernels = choose


def test_exact_weights_beside_bfloat16_ones_are_kept(tg, run_ranks, tmp_path):
    argv = byte_run(tmp_path, "--checkpoint_every_steps=2", num_steps=4)
    straight = run_ranks(2, in_half_precision, argv)
    first, last = checkpoints_in(tmp_path)
    resumed = in_half_precision(0, 1, changed(argv, f"--resume={first}", f"--checkpoint_dir={tmp_path}/one"))
    assert straight[0][0]["val_loss"] == pytest.approx(resumed[0]["val_loss"], abs=2e-3)
    again = run_ranks(2, in_half_precision, changed(argv, f"--resume={first}", f"--checkpoint_dir={tmp_path}/two"))
    assert same_weights(straight[0][1], again[0][1])
    whole = tg.read_checkpoint(last)[1]
    exact, rounded = whole["embed/weight"], straight[0][1]["embed"]
    assert exact.dtype.itemsize == 4 and (exact.bfloat16().float().numpy() == rounded).all()
    assert (exact.numpy() != rounded).any()
