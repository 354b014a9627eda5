"""Room 10: exit codes and messages. 0 done, 1 failed, 2 refused; a refusal is one line on stderr, never a traceback."""
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_helpers import hide_gpus, small_options, without_launcher, write_small_shards
from rank_helpers import load_train_gpt, train_gpt_path
from shard_helpers import put_shard


@pytest.fixture(autouse=True)
def fresh_place(monkeypatch, tmp_path):
    """No launcher's variables, and a working folder without shards."""
    without_launcher(monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def refused(tg, capfd, *argv):
    """The one line that main prints when it refuses."""
    assert tg.main(list(argv)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("train_gpt: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_what_goes_wrong_with_a_file_is_a_refusal_that_names_it_its_reason_and_what_to_do(tg):
    """Of a long reason the first sentence, and no more than 200 characters."""
    for reason, said in (("no room. Some advice", "no room"), ("no room\nmore", "no room"), ("x" * 300, "x" * 200)):
        with pytest.raises(tg.Refusal) as caught, tg.reading(Path("a.bin"), "make it again"):
            raise OSError(reason)
        assert str(caught.value) == f"a.bin: can't be read ({said}); make it again"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--preset=tiny", "--help"]])
def test_help_lists_every_key_and_starts_nothing(tg, capfd, monkeypatch, argv):
    for name in ("init_world", "RunLog", "train"):
        monkeypatch.setattr(tg, name, None)
    assert tg.main(argv) == 0
    out, err = capfd.readouterr()
    assert err == "" and f"--num_steps={tg.Config().num_steps} " in out
    assert "torchrun --standalone" in out and "sprint" in out


@pytest.mark.parametrize("argv, part", [
    (["--steps=3"], "num_steps"), (["--num_steps=three"], "a whole number"), (["--seed=1", "--seed=2"], "twice"),
    (["train"], "--key=value"), (["--compile=fast"], "auto, on, off"), (["--batch_tokens=1000"], "multiple"),
    (["--preset=huge"], "one of record")])
def test_what_cannot_be_used_ends_with_exit_code_2_and_leaves_nothing(tg, capfd, argv, part):
    assert part in refused(tg, capfd, *argv)
    assert os.listdir() == []


def test_without_shards_the_message_names_pattern_and_download_command(tg, capfd, tmp_path):
    """FIELD-CASES 4c. A machine without a GPU starts from the demo, one with a GPU from the record."""
    err = refused(tg, capfd, f"--log_dir={tmp_path}/logs")
    assert "data/builtin/train_*.bin" in err
    err = refused(tg, capfd, "--preset=record", f"--log_dir={tmp_path}/logs")
    assert "data/fineweb10B/fineweb_train_*.bin" in err and "python data/cached_fineweb10B.py" in err
    files = write_small_shards(tmp_path)
    err = refused(tg, capfd, f"--train_files={files['train_files']}", f"--log_dir={tmp_path}/logs")
    assert "no val shards match data/builtin/val_*.bin" in err and "--val_files=PATTERN" in err


@pytest.mark.parametrize("sizes_gib, argv, preset, said", [
    ((80, 80), [], "record", ""), ((80, 23.6), [], "small", "preset small, as a GPU here has less than the"),
    ((23.6,), ["--preset=record"], "record", ""), ((), [], "demo", ""), ((80,), ["--preset=small"], "small", ""),
    (("just enough", 80), [], "record", ""),
    (("too little", 80), [], "small", "preset small, as a GPU here has less than the")])
def test_without_a_preset_the_memory_of_the_smallest_gpu_decides(tg, capfd, monkeypatch, tmp_path, sizes_gib, argv,
                                                                 preset, said):
    """No GPU is asked for anything else here: the run would then be a CPU's."""
    taken, named = [], {"just enough": tg.RECORD_GIB, "too little": tg.RECORD_GIB - 0.1}
    sizes_gib = [named.get(size, size) for size in sizes_gib]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(sizes_gib))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes_gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda i: SimpleNamespace(total_memory=int(sizes_gib[i] * 2 ** 30)))
    monkeypatch.setattr(tg, "init_world", lambda deterministic: tg.World())
    monkeypatch.setattr(tg, "train", lambda config, *more: taken.append(config.preset) or dict(
        status="finished", checkpoint_failed=False))
    assert tg.main([*argv, f"--log_dir={tmp_path}/logs", f"--checkpoint_dir={tmp_path}"]) == 0
    out = capfd.readouterr().out
    assert taken == [preset] and said in out and bool(out) == bool(said)
    assert not said or f"the {tg.RECORD_GIB} GiB of memory that the record needs" in out


def test_a_log_folder_that_cannot_be_written_is_refused(tg, capfd):
    assert "--log_dir=/dev/null/x" in refused(tg, capfd, "--log_dir=/dev/null/x")


def test_a_failure_ends_with_exit_code_1(tg, capfd, monkeypatch, tmp_path):
    def fail(*args):
        raise tg.Failure("step 3: it broke")
    monkeypatch.setattr(tg, "train", fail)
    assert tg.main([f"--log_dir={tmp_path}/logs"]) == 1
    assert capfd.readouterr().err == "train_gpt: step 3: it broke\n"
    [log] = (tmp_path / "logs").iterdir()
    assert log.read_text() == 'result:{"status": "failed", "reason": "step 3: it broke"}\n'


def test_the_log_of_a_refused_run_says_why(tg, capfd, tmp_path):
    err = refused(tg, capfd, "--train_files=nothing.bin", f"--log_dir={tmp_path}/logs")
    [log] = (tmp_path / "logs").iterdir()
    result = json.loads(log.read_text().removeprefix("result:"))
    assert result == dict(status="refused", reason=err.removeprefix("train_gpt: ").removesuffix("\n"))


@pytest.mark.parametrize("result, code", [
    (dict(status="finished", checkpoint_failed=False), 0), (dict(status="finished", checkpoint_failed=True), 1),
    (dict(status="target_reached", checkpoint_failed=False), 0), (dict(status="stopped", signal=15), 143),
    (dict(status="stopped", signal=1), 129)])
def test_the_exit_code_is_that_of_the_runs_end(tg, monkeypatch, tmp_path, result, code):
    monkeypatch.setattr(tg, "train", lambda *args: result)
    assert tg.main([f"--log_dir={tmp_path}/logs", f"--checkpoint_dir={tmp_path}"]) == code


@pytest.mark.parametrize("local, one_rank, said", [(0, False, 1), (1, False, 0), (1, True, 1)])
def test_what_all_ranks_say_is_printed_once_a_host_and_what_one_says_by_itself(tg, capfd, monkeypatch, tmp_path, local,
                                                                               one_rank, said):
    def fail(*args):
        raise tg.Failure("it broke", one_rank=one_rank)
    monkeypatch.setattr(tg, "train", fail)
    monkeypatch.setattr(tg, "join_group", lambda world: None)
    for key, value in (("RANK", local), ("LOCAL_RANK", local), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(key, str(value))
    assert tg.main([f"--log_dir={tmp_path}/logs"]) == 1
    assert capfd.readouterr().err.count("train_gpt: it broke") == said


def test_running_out_of_memory_is_a_failure_that_names_the_rank(tg, capfd, monkeypatch, tmp_path):
    def fail(*args):
        raise torch.OutOfMemoryError("no 2 GiB")
    monkeypatch.setattr(tg, "train", fail)
    monkeypatch.setattr(tg, "join_group", lambda world: None)
    for rank in (0, 3):
        for key, value in (("RANK", rank), ("LOCAL_RANK", rank % 2), ("WORLD_SIZE", 4)):
            monkeypatch.setenv(key, str(value))
        assert tg.main([f"--log_dir={tmp_path}/logs"]) == 1
        wanted = rf"train_gpt: rank {rank}: out of memory; .*--micro_rows.*\(no 2 GiB\)\n"
        assert re.fullmatch(wanted, capfd.readouterr().err)


def test_the_home_folder_is_meant_by_a_tilde(tg, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    monkeypatch.setattr(tg, "train", lambda config, *more: seen.append(config) or dict(status="finished",
                                                                                       checkpoint_failed=False))
    assert tg.main(["--preset=tiny", "--log_dir=~/logs", "--checkpoint_dir=~/c", "--checkpoint_every_steps=1",
                    "--resume=~/c/run/step_1", "--train_files=~root/*.bin"]) == 0
    assert (tmp_path / "logs").is_dir() and (tmp_path / "c").is_dir()
    [config] = seen
    assert (config.log_dir, config.checkpoint_dir) == (str(tmp_path / "logs"), str(tmp_path / "c"))
    assert config.resume == str(tmp_path / "c/run/step_1")
    assert config.train_files == "~root/*.bin"               # left to find_shards, which tries the name as it is first


def test_running_out_of_memory_before_the_rank_is_known_is_one_line_too(tg, capfd, monkeypatch, tmp_path):
    def full(*args):
        raise torch.OutOfMemoryError("no context")
    monkeypatch.setattr(tg, "init_world", full)
    assert tg.main([f"--log_dir={tmp_path}/logs"]) == 1
    assert re.fullmatch(r"train_gpt: out of memory; .*\(no context\)\n", capfd.readouterr().err)


def test_a_bug_is_not_dressed_up_as_a_refusal(tg, monkeypatch, tmp_path):
    def broken(config, world, log, overrides, argv):
        log.event("note: started")
        raise KeyError("bug")
    monkeypatch.setattr(tg, "train", broken)
    closed = []
    monkeypatch.setattr(tg, "close_world", lambda: closed.append(True))
    with pytest.raises(KeyError):
        tg.main([f"--log_dir={tmp_path}/logs"])
    assert len(closed) == 1


def test_compiling_without_a_compiler_is_refused_before_anything_is_built(tg, capfd, monkeypatch, tmp_path):
    """FIELD-CASES 10."""
    files = write_small_shards(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(tg, "GPT", None)
    err = refused(tg, capfd, *small_options(**files, log_dir=tmp_path / "logs", compile="on"))
    assert "no C compiler was found" in err and "--compile=off" in err


def test_the_script_runs_with_nothing_but_python(tmp_path):
    """FIELD-CASES 10: five steps with neither a compiler, a launcher nor a home on the path."""
    for name, shard in (("t.bin", "TRAIN_A"), ("v.bin", "VAL_10001")):
        put_shard(tmp_path, shard, name)
    (tmp_path / "empty").mkdir()
    environment = dict(PATH=str(tmp_path / "empty"), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, str(train_gpt_path()), "--preset=tiny", "--compile=off", "--num_steps=5", "--batch_tokens=256",
         "--val_tokens=100", "--train_files=t.bin", "--val_files=v.bin"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(r"^step:5/5 val_loss:\d", done.stdout, re.M) and len(list((tmp_path / "logs").iterdir())) == 1


def test_the_exit_code_of_a_refusal_reaches_the_shell(tmp_path):
    done = subprocess.run([sys.executable, str(train_gpt_path()), "--num_steps=x"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert list(Path(tmp_path).iterdir()) == [tmp_path / "here"]


def main_and_after(rank, size, argv):
    hide_gpus()
    tg, err = load_train_gpt(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = tg.main(argv)
    return code, err.getvalue(), torch.distributed.is_initialized()


def test_a_refusal_on_several_ranks_is_said_once_and_leaves_no_group(run_ranks, tmp_path):
    answers = run_ranks(2, main_and_after, [f"--log_dir={tmp_path}/logs", "--train_files=nothing.bin"])
    assert [code for code, _, _ in answers] == [2, 2] and not any(group for _, _, group in answers)
    assert "nothing.bin" in answers[0][1] and answers[1][1] == ""


def test_the_first_rank_of_another_host_says_its_refusal_too(tg, capfd, monkeypatch, tmp_path):
    """Rank 8 of 16, first on its host, whose folder of data is empty; rank 9 beside it stays silent."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tg, "join_group", lambda world: None)
    for rank, local in ((8, 0), (9, 1)):
        for key, value in (("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", 16)):
            monkeypatch.setenv(key, str(value))
        assert tg.main([f"--log_dir={tmp_path}", "--train_files=nothing.bin"]) == 2
        assert ("nothing.bin" in capfd.readouterr().err) == (local == 0)


def test_deterministic_mode_is_switched_on(tg, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    files = write_small_shards(tmp_path)
    seen = []
    train = tg.train

    def look(*args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8" or not seen[-1]
        return train(*args)
    monkeypatch.setattr(tg, "train", look)
    try:
        for switch in ("on", "off"):
            assert tg.main(small_options(**files, log_dir=tmp_path / "logs", deterministic=switch, num_steps=1)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True, False]


def test_a_run_that_does_not_compile_never_imports_the_compiler(tmp_path):
    """It takes a second or two; and on a GPU the second process starts before it."""
    argv = small_options(**write_small_shards(tmp_path), log_dir=tmp_path / "logs", num_steps=1)
    code = (f"import sys; from rank_helpers import load_train_gpt; load_train_gpt().main({argv!r}); "
            "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])")
    answer = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                            timeout=120, env=os.environ | dict(CUDA_VISIBLE_DEVICES=""))
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.splitlines()[-1] == "[]"
