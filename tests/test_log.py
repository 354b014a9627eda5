"""Room 8: a log carries its source and facts, survives a full disk, and its clock tells the truth."""
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from model_helpers import small_options, without_launcher, write_small_shards

ROOT = Path(__file__).resolve().parent.parent
FACTS = dict(versions=dict(cuda=None))


@pytest.fixture(scope="module")
def logs():
    """records/logs.py, the parser that all tools share."""
    if "train_gpt_logs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_gpt_logs", ROOT / "records" / "logs.py")
        sys.modules["train_gpt_logs"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_gpt_logs"]


@pytest.fixture
def real_log(tg, tmp_path, monkeypatch, capfd):
    """(path, printed text, options) of a run of the small model."""
    without_launcher(monkeypatch)
    files = write_small_shards(tmp_path)
    options = small_options(**files, log_dir=tmp_path / "logs", num_steps=12, val_every_steps=5, seed=7, target_loss=0)
    assert tg.main(options) == 0
    [path] = (tmp_path / "logs").iterdir()
    return path, capfd.readouterr().out, options


def test_a_real_log_is_accepted_by_the_parser_with_all_its_fields(tg, logs, real_log):
    path, printed, options = real_log
    log = logs.parse_log(path)
    header = log.header
    assert log.sha_matches and log.source.decode() == tg.SOURCE == Path(tg.__file__).read_text()
    for key in ("format", "run_id", "name", "started", "config", "overrides", "argv", "source_sha256", "seed",
                "versions", "devices", "world_size", "resumed_from", "kernels", "data", "git",
                "parameters"):
        assert key in header, key
    assert header["run_id"] == path.stem and header["argv"] == options and header["seed"] == 7
    assert header["config"]["num_steps"] == header["overrides"]["num_steps"] == 12
    assert header["versions"]["torch"] == torch.__version__ and len(header["devices"]) == header["world_size"] == 1
    assert [entry["tokens"] for entry in header["data"]["train"]["files"]] == [3000, 3001]
    for entry in header["data"]["train"]["files"] + header["data"]["val"]["files"]:
        assert entry["bytes"] == 1024 + 2 * entry["tokens"] and len(entry["fingerprint"]) == 16
    assert header["parameters"]["total"] == sum(
        v for k, v in header["parameters"].items() if k not in ("total", "matmul"))
    assert 0 < header["parameters"]["matmul"] < header["parameters"]["total"]
    assert set(header["git"]) == {"commit", "dirty"}
    assert [point.step for point in log.validation] == [0, 5, 10, 12]
    assert [point.step for point in log.training] == [1, 10]
    assert {"train_time", "step_avg", "tokens_per_s", "lr", "tokens"} <= set(log.training[0].fields)
    assert log.training[1].fields["tokens"] == (3 * 6 + 6 * 12 + 24) * 64
    assert len(log.step_times_ms) == 12 and all(ms > 0 for ms in log.step_times_ms)
    assert log.finished and not log.resumed and log.val_loss == pytest.approx(log.validation[-1].loss, abs=1e-4)
    result = log.result
    assert (result["step"], result["num_steps"], result["val_tokens"]) == (12, 12, 500)
    assert result["tokens_trained"] == (3 * 6 + 6 * 12 + 3 * 24) * 64 and result["time_to_first_step_s"] > 0
    assert result["step_avg_ms"] == pytest.approx(result["train_time_ms"] / 12, rel=1e-3)
    assert {"peak_memory_mib", "status", "reason"} <= set(result)
    assert sum(log.step_times_ms) <= result["train_time_ms"] * 1.001 + 1
    assert any(ms != round(ms) for ms in log.step_times_ms)
    for point in log.validation[1:]:
        assert point.fields["step_avg"] * point.step == pytest.approx(point.fields["train_time"], abs=1)    # whole ms
    for line in path.read_text().splitlines()[-20:]:
        if line.startswith(("step:", "result:", "note:")):
            assert line in printed.splitlines()


def test_a_tampered_source_is_seen(tg, real_log, logs):
    path = real_log[0]
    text = path.read_text()
    path.write_text(text.replace("lr_matrix: float = setting(0.0", "lr_matrix: float = setting(0.1", 1))
    assert not logs.parse_log(path).sha_matches


@pytest.mark.parametrize("source", ["x = 1\n", "x = '\u00fc'\n\n", "\n"])
def test_any_source_makes_the_round_trip(tg, tmp_path, source):
    log = tg.RunLog(str(tmp_path), tg.World())
    log.header(source, FACTS)
    log.event("note: hello")
    log.close()
    assert log.path.read_text().partition("\n" + tg.FENCE + "\n")[0] + "\n" == source


def test_a_script_without_a_newline_at_its_end_still_makes_a_readable_log(tg, tmp_path):
    path = tmp_path / "hacked.py"
    path.write_text(Path(tg.__file__).read_text().rstrip("\n"))
    spec = importlib.util.spec_from_file_location("hacked_train_gpt", path)
    sys.modules[spec.name] = hacked = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(hacked)
    finally:
        del sys.modules[spec.name]
    assert hacked.SOURCE == path.read_text() + "\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_source_with_a_line_like_the_fence_is_refused(tg, tmp_path, end):
    log = tg.RunLog(str(tmp_path), tg.World())
    with pytest.raises(tg.Refusal, match="line 2 of this script is 100 times '='"):
        log.header(f"x = 1{end}{tg.FENCE}{end}", FACTS)
    log.header(f"x = 1\n#{tg.FENCE}\n", FACTS)
    log.close()


def test_two_runs_started_at_once_do_not_clash(tg, tmp_path):
    first, second = (tg.RunLog(str(tmp_path / "a" / "b"), tg.World()) for _ in range(2))
    first.event("first")
    second.event("second")
    first.close()
    second.close()
    assert first.path.read_text() == "first\n" and second.path.read_text() == "second\n"


def test_only_rank_0_writes_and_prints(tg, tmp_path, capsys):
    log = tg.RunLog(str(tmp_path / "logs"), tg.World(1, 2))
    log.event("note: hello")
    log.close()
    assert not (tmp_path / "logs").exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere", "/dev/null/logs"])
def test_a_log_folder_that_cannot_be_written_is_refused(tg, tmp_path, place):
    if place == "a file":
        place = str(tmp_path / "file")
        Path(place).write_text("")
    with pytest.raises(tg.Refusal, match="--log_dir=.*can't be written") as caught:
        tg.RunLog(place, tg.World())
    assert place in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_training_goes_on(tg, tmp_path, capsys):
    log = tg.RunLog(str(tmp_path), tg.World())
    log.file.close()
    log.file = open("/dev/full", "w")
    for i in range(3):
        log.event(f"step:{i}")
    log.close()
    out, err = capsys.readouterr()
    assert out == "step:0\nstep:1\nstep:2\n"
    assert err.count("log lost (No space left on device); training goes on") == 1 and err.count("\n") == 1


CONSOLES = """
import sys
sys.path.insert(0, "tests")
import rank_helpers
tg = rank_helpers.load_train_gpt()
log = tg.RunLog(sys.argv[1], tg.World())
for step in range(3):
    log.event(f"step:{step}")
    tg.say("to stderr", sys.stderr)
sys.stdout.write("of another library")
log.close()
"""


def console_case(kind, folder):
    """-> (exit code, text of the log) of a process whose console is gone, or goes after a few bytes."""
    import resource
    import subprocess
    out, limit = None, None
    if kind == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    elif kind == "pipe":
        read, out = os.pipe()
        os.close(read)
    elif kind == "terminal":
        master, out = os.openpty()
        os.close(master)
    elif kind == "file":
        out = os.open(folder / "console", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(out, b"x" * 100_000)
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    elif kind == "closed":
        out = os.open(os.devnull, os.O_RDONLY)
    done = subprocess.run([sys.executable, "-c", CONSOLES, str(folder / "logs")], stdout=out, stderr=out, cwd=ROOT,
                          preexec_fn=limit)
    os.close(out)
    return done.returncode, next((folder / "logs").glob("*.txt")).read_text()


@pytest.mark.parametrize("kind", ["full", "pipe", "terminal", "file", "closed"])
def test_a_console_that_is_gone_costs_nothing_but_what_it_would_have_shown(tmp_path, kind):
    assert console_case(kind, tmp_path) == (0, "step:0\nstep:1\nstep:2\n")


def test_what_a_console_cannot_show_is_escaped(tg):
    import io
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    tg.say("Universit\u00e4t \udc80", console)
    assert console.buffer.getvalue() == b"Universit\\xe4t \\udc80\n"


def test_every_event_is_on_disk_at_once(tg, tmp_path):
    log = tg.RunLog(str(tmp_path), tg.World())
    log.event("step:1")
    assert log.path.read_text() == "step:1\n"
    log.close()


def test_the_clock_counts_what_lies_between_resume_and_pause(tg):
    clock = tg.Clock(torch.device("cpu"))
    for _ in range(2):
        clock.resume()
        time.sleep(0.03)
        clock.step_done()
        clock.pause()
        time.sleep(0.5)                          # validation
    assert 60 <= clock.total_ms < 900            # generous: other processes may hold the cores
    assert clock.elapsed_ms() == clock.total_ms
    assert len(clock.step_ms) == 2 and all(30 <= ms < 480 for ms in clock.step_ms)
    clock.resume()
    time.sleep(0.01)
    assert clock.elapsed_ms() >= clock.total_ms + 10


def test_step_times_do_not_hold_the_pause_before_them(tg):
    clock = tg.Clock(torch.device("cpu"))
    clock.resume()
    clock.step_done()
    clock.pause()
    time.sleep(0.5)
    clock.resume()
    clock.step_done()
    clock.collect(keep=1)
    assert len(clock.step_ms) == 1
    clock.collect()
    assert len(clock.step_ms) == 2 and clock.step_ms[1] < 400


def progress(tg, tmp_path, **changes):
    c = tg.Config(**{**dict(num_steps=100, log_every_steps=10), **changes})
    clock = tg.Clock(torch.device("cpu"))
    clock.resume()
    log = tg.RunLog(str(tmp_path), tg.World())
    header = dict(devices=["NVIDIA H100 80GB HBM3"], world_size=1, parameters=dict(matmul=10 ** 9))
    return tg.Progress(c, log, clock, ["embed"], header), clock, log


def test_train_lines_come_one_step_late_every_ten_steps(tg, tmp_path):
    watch, clock, log = progress(tg, tmp_path)
    for step in range(31):
        clock.step_done()
        watch.push(step, 64, 1.0, torch.tensor([3.0 + step, 0.1, 0.0]))
        lines = log.path.read_text().splitlines()
        assert sum(line.startswith("step:") for line in lines) == (step >= 1) + step // 10
        assert len(clock.step_ms) == step        # the newest step's time is left alone: a GPU would be waited for
    log.close()
    lines = [line for line in log.path.read_text().splitlines() if line.startswith("step:")]
    assert [line.split()[:2] for line in lines] == [
        [f"step:{n}/100", f"train_loss:{2 + n:.4f}"] for n in (1, 10, 20, 30)]
    assert lines[1].endswith("tokens:640") and watch.tokens == 31 * 64
    fields = dict(field.split(":") for field in lines[1].split())
    mfu = 6 * 1e9 * float(fields["tokens_per_s"]) / 989e12
    assert float(fields["mfu"]) == pytest.approx(mfu, rel=0.02, abs=6e-4)
    assert watch.mfu(1e6, 1e3) == pytest.approx(6 * 1e9 * 1e6 / 989e12)


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA B200", 2250),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA L40S", 362), ("NVIDIA T4", None), ("x86_64", None)])
def test_utilisation_is_that_of_all_devices_at_their_dense_bf16_peak(tg, tmp_path, name, tflops):
    watch, _, log = progress(tg, tmp_path)
    log.close()
    watch.header = dict(devices=[name] * 4, world_size=4, parameters=dict(matmul=10 ** 9, total=10 ** 10))
    wanted = tflops and pytest.approx(6 * 1e9 * 1e6 / 0.5 / (4 * tflops * 1e12))
    assert watch.mfu(1e6, 500.0) == wanted


def test_the_step_average_is_that_of_the_steps_since_the_last_line(tg, tmp_path):
    watch, clock, log = progress(tg, tmp_path)
    for step in range(21):
        clock.step_ms.append(step + 1.0)
        watch.push(step, 64, 0.12344, torch.tensor([3.0, 0.1, 0.0]))
    log.close()
    lines = [line for line in log.path.read_text().splitlines() if line.startswith("step:")]
    times = [float(line.split("step_avg:")[1].split("ms")[0]) for line in lines]
    assert all(" lr:0.1234 tokens:" in line for line in lines)
    assert times == [1.5, 6.5, 16.5]        # the clock of this test is one step ahead of the lines


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_with_its_step(tg, tmp_path, bad):
    watch, clock, log = progress(tg, tmp_path)
    clock.step_done()
    watch.push(4, 64, 1.0, torch.tensor([3.0, bad, 0.0]))
    clock.step_done()
    with pytest.raises(tg.Failure, match="^step 5: not a finite number: gradient of embed. Lower the"):
        watch.push(5, 64, 1.0, torch.tensor([3.0, 1.0, 0.0]))
    watch.push(5, 64, 1.0, torch.tensor([bad, 1.0, 0.0]))
    with pytest.raises(tg.Failure, match="^step 6: not a finite number: loss. Lower the"):
        watch.report_waiting()
    watch.report_waiting()
    log.close()


def test_the_wish_to_stop_is_seen_one_step_late(tg, tmp_path):
    watch, clock, log = progress(tg, tmp_path)
    for stop, seen in ((0.0, False), (1.0, False), (0.0, True)):
        clock.step_done()
        watch.push(0, 64, 1.0, torch.tensor([3.0, 0.1, stop]))
        assert watch.stopping is seen
    log.close()


def test_the_fingerprint_sees_begin_and_end_of_a_file(tg, tmp_path):
    path, data = tmp_path / "x.bin", bytearray(3 * 2 ** 20)
    path.write_bytes(data)
    first = tg.fingerprint(str(path))
    assert first == tg.fingerprint(str(path)) and len(first) == 16
    for at in (0, 1023, 2 ** 20, 3 * 2 ** 20 - 1, 2 * 2 ** 20):
        changed = bytearray(data)
        changed[at] = 1
        path.write_bytes(changed)
        assert tg.fingerprint(str(path)) != first, at
    path.write_bytes(data[:100])
    assert tg.fingerprint(str(path)) != first


def test_the_age_of_this_process_grows_in_seconds(tg):
    first = tg.process_age_s()
    time.sleep(0.05)
    assert 0 < first < 86_400 and 0.03 < tg.process_age_s() - first < 5


def test_the_age_is_that_of_the_process_and_not_of_its_parent_or_the_machine(tg):
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(tg.process_age_s() > 5))
        finally:
            os._exit(2)                 # no test goes on in the child
    assert os.waitpid(child, 0)[1] == 0


def test_a_command_that_fails_or_is_missing_gives_an_empty_text(tg):
    assert tg.run_quietly("this-command-does-not-exist") == ""
    for code in (1, 3):
        assert tg.run_quietly(sys.executable, "-c", f"import sys; print(1); sys.exit({code})") == ""
    assert tg.run_quietly(sys.executable, "-c", "print(' 1 ')") == "1"


def test_a_command_that_hangs_is_left_after_a_moment(tg, monkeypatch, capsys):
    """Also what it has started and what holds its output."""
    monkeypatch.setattr(tg, "COMMAND_TIMEOUT_S", 0.5)
    began = time.monotonic()
    assert tg.run_quietly("sh", "-c", "echo 1; sleep 30 & sleep 30") == ""
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err == "warn: sh: no answer within 0.5 s; going on without it\n"


def test_commands_have_five_seconds(tg):
    assert tg.COMMAND_TIMEOUT_S <= 5


def test_the_state_of_a_git_folder_is_read_without_writing_or_unknown(tg, tmp_path):
    import subprocess
    assert tg.git_state(str(tmp_path)) == dict(commit="unknown", dirty="unknown")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    (tmp_path / "file").write_text("1")             # its time differs: git would like to note that
    (tmp_path / "other").write_text("untracked")
    before = (tmp_path / ".git" / "index").read_bytes()
    assert tg.git_state(str(tmp_path)) == dict(commit=commit, dirty=False)
    (tmp_path / "file").write_text("2")
    assert tg.git_state(str(tmp_path)) == dict(commit=commit, dirty=True)
    assert (tmp_path / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize("smi", ["", "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100"])
def test_nvidia_smi_is_in_the_header_where_there_is_one(tg, tmp_path, monkeypatch, smi):
    """A torch built for CUDA on a machine without a GPU must leave no empty line."""
    monkeypatch.setattr(tg, "run_quietly", lambda *command: smi if command == ("nvidia-smi",) else "")
    log = tg.RunLog(str(tmp_path), tg.World())
    log.header("source\n", dict(versions=dict(cuda="13.0")))
    log.close()
    lines = log.path.read_text().splitlines()
    assert lines[:2] == ["source", tg.FENCE] and lines[3:] == [*smi.splitlines(), tg.FENCE]


def test_the_logs_header_is_one_line_of_json(tg, real_log):
    lines = real_log[0].read_text().splitlines()
    fences = [i for i, line in enumerate(lines) if line == tg.FENCE]
    assert len(fences) == 2 and fences[1] == fences[0] + 2       # no GPU here, so no nvidia-smi between
    assert json.loads(lines[fences[0] + 1])["format"] == 1
