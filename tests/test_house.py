"""run.sh with a fake torch, a fake pip and stub scripts in a copy of the house; and the helper that starts ranks.

The interpreter is the real one without its site-packages, on a PATH that holds it and nothing else: no gcc, no
torchrun, no git, no coreutils. A fake torch package (and its metadata) on PYTHONPATH says how many GPUs there are.
"""
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_helpers import run_ranks

ROOT = Path(__file__).resolve().parent.parent

# Scripts of the copied house print what they were given: "NAME [arguments] OMP=n".
STUB = ("import os, sys\n"
        "if __name__ == '__main__':\n"
        "    print({name!r}, sys.argv[1:], 'OMP=' + os.environ.get('OMP_NUM_THREADS', '-'))\n")

# What run.sh asks the trainer before it starts it: which files a run reads, and how many tokens it takes.
CONFIG_STUB = """
class Config:
    def __init__(self, preset, options):
        fineweb = preset in ("record", "sprint")
        self.train_files = "data/fineweb10B/fineweb_train_*.bin" if fineweb else "data/builtin/train_*.bin"
        self.num_steps, self.batch_tokens = {"record": (1216, 524288)}.get(preset, (1230, 65536))
        self.row_tokens = 16384
        for option in options:
            if option.startswith("--train_files="):
                self.train_files = option.partition("=")[2]
            elif "nonsense" in option:
                raise ValueError(option)
def rows_at(config, step):
    return config.batch_tokens // config.row_tokens
print("a script that prints when it is imported", file=sys.stderr if __name__ == "__main__" else sys.stdout)
def parse_config(argv, default):
    presets = [option.partition("=")[2] for option in argv if option.startswith("--preset=")]
    return Config(presets[0] if presets else default, argv), {}
"""

# The demo's script is named by TRAIN_GPT; this one runs it as a stub of its own.
DEMO_STUB = ("import os, runpy\n"
             "print('demo of', end=' ', flush=True)\n"
             "runpy.run_path(os.environ['TRAIN_GPT'], run_name='__main__')\n")

RUN_SCRIPT = ("import runpy, sys; del sys.argv[0]\n"
              "runpy.run_path(sys.argv[0], run_name='__main__')\n")

FAKE_PIP = """#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then
    echo "pip" >>"$FAKE_LOG"
    echo "Collecting torch"
    case ${FAKE_PIP:-} in
        fail) echo "ERROR: No matching distribution found for torch"; exit 1 ;;
        hang) : >"$FAKE_LOG.hanging"; while :; do read -rt 0.1 <> <(:) || true; done ;;
    esac
    echo "Installing collected packages: torch"
    exit 0
fi
"""


class House:
    """A copy of run.sh in a folder with a space in its name, and a machine around it."""

    def __init__(self, folder):
        self.root = folder / "my house"
        self.bin = folder / "bin"
        self.packages = folder / "packages"
        for path in (self.root / "data", self.root / "records", self.bin, self.packages):
            path.mkdir(parents=True)
        for name in ("run.sh", "requirements.txt", "requirements-dev.txt", "data/survey.py"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("train_gpt.py", "data/text.py", "data/cached_fineweb10B.py"):
            (self.root / name).write_text(STUB.format(name=name))
        (self.root / "train_gpt.py").write_text(STUB.format(name="train_gpt.py") + CONFIG_STUB)
        (self.root / "records/demo.py").write_text(DEMO_STUB)
        self.log = folder / "log"
        self.environment = {"PATH": str(self.bin), "PYTHONPATH": str(self.packages), "FAKE_LOG": str(self.log),
                            "HOME": str(folder), "FAKE_GPUS": "0"}
        self.python("python3")
        self.package("numpy", "2.4.6")

    def python(self, name, version=None, lacks="nothing_at_all"):
        """Put an interpreter on the PATH: of another version, or lacking a module; its `-m venv` makes a fake .venv."""
        prelude = f"import sys; sys.modules[{lacks!r}] = None\n"
        if version:
            prelude += f"sys.version_info = {version!r}\n"
        venv_python = self.log.parent / "venv_python"
        venv_python.write_text(f'{FAKE_PIP}exec "{sys.executable}" -S "$@"\n')
        venv_python.chmod(0o755)
        path = self.bin / name
        path.write_text(f"""#!/bin/bash
if [ "$1 $2" = "-m venv" ]; then
    "{sys.executable}" -S -c 'import os, shutil, sys
os.makedirs(sys.argv[2] + "/bin", exist_ok=True)
shutil.copy(sys.argv[1], sys.argv[2] + "/bin/python")' "{venv_python}" "$3"
    exit
fi
if [ "$1" = -c ]; then
    code=$2
    shift 2
    exec "{sys.executable}" -S -c {shell_quote(prelude)}"$code" "$@"
fi
if [ "$1" = data/survey.py ]; then
    exec "{sys.executable}" -S -c {shell_quote(prelude + RUN_SCRIPT)} "$@"
fi
exec "{sys.executable}" -S "$@"
""")
        path.chmod(0o755)

    def package(self, name, version, files=()):
        folder = self.packages / name
        folder.mkdir(exist_ok=True)
        for file, text in (("__init__.py", ""), *files):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        metadata = self.packages / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def torch(self, version="2.13.0+cpu", gpus=0, init=None):
        body = init or "import os\nclass cuda:\n    device_count = staticmethod(lambda: int(os.environ['FAKE_GPUS']))\n"
        self.package("torch", version, [("__init__.py", body), ("distributed/__init__.py", ""),
                                        ("distributed/run.py", STUB.format(name="launcher"))])
        self.environment["FAKE_GPUS"] = str(gpus)

    def shards(self):
        (self.root / "data/fineweb10B").mkdir()
        (self.root / "data/fineweb10B/fineweb_train_000001.bin").touch()

    def run(self, *arguments, cwd=None, **environment):
        return subprocess.run([self.root / "run.sh", *arguments], cwd=cwd or self.root, text=True, capture_output=True,
                              env=self.environment | environment, timeout=60)


def shell_quote(text):
    return "'" + text.replace("'", "'\\''") + "'"


def complaint(result):
    """The single readable line of a run that refused."""
    assert result.returncode == 1, result
    lines = result.stderr.strip().splitlines()
    assert lines and "Traceback" not in result.stderr, result.stderr
    assert lines[-1].startswith("run.sh: ")
    return lines[-1]


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


# ---- training --------------------------------------------------------------------------------------------------------


def test_without_gpus_it_makes_the_text_and_trains_the_demo(house):
    house.torch()
    result = house.run("--seed=3")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert lines[0].startswith("data/text.py ['--builtin', '--tokenizer=bytes', '--out=data/builtin']")
    assert lines[1].startswith("demo of train_gpt.py ['--preset=demo', '--seed=3'] OMP=")
    assert int(lines[1].rpartition("=")[2]) >= 1
    assert "no GPU" in result.stderr and "FineWeb" in result.stderr


def test_the_text_is_made_once_and_threads_are_the_users_choice(house):
    house.torch()
    (house.root / "data/builtin").mkdir()
    (house.root / "data/builtin/dataset.json").write_text("{}")
    assert house.run(OMP_NUM_THREADS="7").stdout == "demo of train_gpt.py ['--preset=demo'] OMP=7\n"


def test_the_demo_trains_with_the_users_script(house):
    house.torch()
    (house.root / "data/builtin").mkdir()
    (house.root / "data/builtin/dataset.json").write_text("{}")
    (house.root / "idea.py").write_text(STUB.format(name="idea"))
    assert house.run("idea.py", "--seed=3").stdout.startswith("demo of idea ['--preset=demo', '--seed=3'] OMP=")


@pytest.mark.parametrize("option", ["--preset=tiny", "--train_files=x.bin"])
def test_the_users_preset_and_files_pass_through(house, option):
    house.torch()
    assert house.run(option).stdout.startswith(f"train_gpt.py ['{option}'] OMP=")


def test_one_gpu_runs_plain_python_and_many_the_launcher(house):
    house.torch(gpus=1)
    house.shards()
    assert house.run("--seed=1").stdout == "train_gpt.py ['--seed=1'] OMP=-\n"
    script = str(house.root / "train_gpt.py")
    assert house.run("--seed=1", FAKE_GPUS="8").stdout == \
        f"launcher {['--standalone', '--nproc_per_node=8', script, '--seed=1']} OMP=1\n"


def test_NPROC_overrides_the_count_on_a_cpu_too(house):
    house.torch(gpus=8)
    house.shards()
    assert "'--nproc_per_node=4'" in house.run(NPROC="4").stdout
    assert house.run(NPROC="1").stdout.startswith("train_gpt.py []")
    on_cpu = house.run("--preset=tiny", NPROC="2", FAKE_GPUS="0").stdout
    assert "'--nproc_per_node=2'" in on_cpu and on_cpu.endswith("OMP=1\n")
    assert house.run("--preset=tiny", NPROC="2", OMP_NUM_THREADS="3").stdout.endswith("OMP=3\n")
    for wrong in ("two", "0"):
        assert f"NPROC={wrong}" in complaint(house.run(NPROC=wrong))


FETCH_STUB = ("import os, sys\nos.mkdir('data/fineweb10B')\n"
              "open('data/fineweb10B/fineweb_train_000001.bin', 'w')\nprint('fetched', sys.argv[1:])\n")


@pytest.mark.parametrize("gpus, options, shards, size", [
    (1, [], 9, "2.0"), (1, ["--preset=sprint"], 2, "0.6"), (0, ["--preset=sprint"], 2, "0.6"),
    (0, ["--preset=tiny", "--train_files=data/fineweb10B/fineweb_train_*.bin"], 2, "0.6"),
    (1, ["--train_files=data/mine/*.bin"], 0, ""), (1, ["--preset=demo"], 0, ""), (1, ["--nonsense"], 0, "")])
def test_shards_that_the_run_would_read_and_that_are_missing_are_fetched_first(house, gpus, options, shards, size):
    house.torch(gpus=gpus)
    (house.root / "data/cached_fineweb10B.py").write_text(FETCH_STUB)
    result = house.run(*options)
    lines = result.stdout.splitlines()
    assert lines[-1].startswith(f"train_gpt.py {options} OMP=")
    assert lines[:-1] == ([f"fetched ['{shards}']"] if shards else [])
    told = f"fetching {shards} shards of 100M tokens and the validation shard, {size} GB"
    assert (told in result.stderr) == bool(shards)
    assert "fetched" not in house.run(*options).stdout      # they are there now


def test_a_named_preset_whose_shards_can_not_be_had_is_left_to_the_trainer(house):
    house.torch(gpus=1)
    (house.root / "data/cached_fineweb10B.py").write_text("raise SystemExit(1)\n")
    assert house.run("--preset=sprint").stdout == "train_gpt.py ['--preset=sprint'] OMP=-\n"


def test_without_shards_and_network_it_says_so_and_trains_the_demo_uncompiled(house):
    house.torch(gpus=8)
    (house.root / "data/cached_fineweb10B.py").write_text("raise SystemExit(1)\n")
    result = house.run("--seed=2")
    assert result.stdout.splitlines()[-1] == \
        "demo of train_gpt.py ['--preset=demo', '--compile=off', '--seed=2'] OMP=-"
    given = house.run("--compile=on").stdout
    assert given.splitlines()[-1] == "demo of train_gpt.py ['--preset=demo', '--compile=on'] OMP=-"
    assert "without those shards: running the demo" in result.stderr and "cached_fineweb10B.py 9" in result.stderr


@pytest.fixture
def survey(monkeypatch):
    """data/survey.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "data")
    import survey
    return survey


@pytest.mark.parametrize("allowed, quota, cores", [
    (range(8), "max 100000", 4), (range(4), "max 100000", 2), ([0, 2, 4], "max 100000", 3),
    (range(8), "250000 100000", 2), (range(8), "50000 100000", 1), (range(2), "800000 100000", 1), (range(8), None, 4)])
def test_cores_are_physical_ones_that_affinity_and_control_group_leave(survey, monkeypatch, allowed, quota, cores):
    """A machine of 4 cores with 2 threads each: 0 and 1 are one core, 2 and 3, .."""
    def read(path):
        if "cpu.max" in path:
            if quota is None:
                raise FileNotFoundError(path)
            return io.StringIO(quota + "\n")
        cpu = int(re.search(r"cpu(\d+)/topology", path)[1])
        return io.StringIO(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    monkeypatch.setattr(survey, "open", read, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert survey.cores() == cores


@pytest.mark.parametrize("rows, shards", [(1, 1), (76, 1), (77, 2), (7692, 100), (10_000, 103)])
def test_shards_hold_three_tenths_more_than_steps_take_and_there_are_103(survey, tmp_path, monkeypatch, rows, shards):
    """Rows of a million tokens, shards of a hundred."""
    (tmp_path / "script.py").write_text(
        f"from types import SimpleNamespace\ndef parse_config(argv, preset):\n"
        "    files = 'data/fineweb10B/fineweb_train_*.bin'\n"
        "    return SimpleNamespace(train_files=files, num_steps=1, row_tokens=10**6), {}\n"
        f"def rows_at(config, step):\n    return {rows}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "train_gpt", None)
    assert survey.shards_needed("script.py", [], "record") == shards


@pytest.mark.recipe
@pytest.mark.parametrize("options, shards", [([], 0), (["--preset=record"], 6), (["--preset=sprint"], 2),
                                             (["--preset=tiny"], 1), (["--preset=demo"], 0), (["--no=1"], 0),
                                             (["--preset=tiny", "--train_files=data/mine/*.bin"], 0)])
def test_the_shards_that_the_real_trainer_needs_are_told_by_its_own_settings(tmp_path, options, shards):
    command = [sys.executable, ROOT / "data/survey.py", "machine", ROOT / "train_gpt.py", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    gpus, cores, needed = said.stdout.split()
    assert (gpus, needed) == ("0", str(shards)) and int(cores) >= 1


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | :"])
def test_a_console_that_is_gone_does_not_stop_the_run(house, where):
    house.torch()
    (house.root / "train_gpt.py").write_text("open('trained', 'w')\n")
    done = subprocess.run(["/bin/bash", "-o", "pipefail", "-c", f'"{house.root}/run.sh" --preset=tiny {where}'],
                          env=house.environment, capture_output=True, timeout=60)
    assert done.returncode == 0 and (house.root / "trained").exists()


def test_a_python_without_numpy_trains_but_makes_no_text(house):
    house.torch()
    shutil.rmtree(house.packages / "numpy-2.4.6.dist-info")
    assert house.run("--preset=tiny").returncode == 0
    assert "lacks numpy, which data/text.py needs" in complaint(house.run(PYTHON="python3"))
    assert not house.log.exists()
    result = house.run()
    assert "python3 lacks numpy: using .venv" in result.stderr and result.stdout.count("train_gpt.py") == 1
    assert house.log.read_text() == "pip\n"


def test_an_interrupted_download_ends_the_run(house):
    house.torch(gpus=1)
    (house.root / "data/cached_fineweb10B.py").write_text("raise SystemExit(130)\n")
    result = house.run()
    assert (result.returncode, result.stdout) == (130, "")


def test_a_gpu_that_torch_cannot_use_is_pointed_out(house):
    house.torch(gpus=0)
    (house.bin / "nvidia-smi").write_text("#!/bin/bash\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    (house.bin / "nvidia-smi").chmod(0o755)
    assert "NVIDIA GPU that torch" in house.run().stderr
    assert "NVIDIA GPU that torch" not in house.run(CUDA_VISIBLE_DEVICES="").stderr  # hidden on purpose


def test_an_nvidia_smi_that_hangs_costs_five_seconds_and_a_line(house):      # L4
    house.torch(gpus=0)
    (house.bin / "nvidia-smi").write_text("#!/bin/bash\nwhile :; do read -rt 1 <> <(:) || true; done\n")
    (house.bin / "nvidia-smi").chmod(0o755)
    began = time.monotonic()
    result = house.run("--preset=tiny")
    assert result.returncode == 0 and "nvidia-smi gave no answer within 5 s" in result.stderr
    assert 5 <= time.monotonic() - began < 15


def test_it_tells_at_its_end_which_python_it_used(house):
    house.torch()
    said = house.run("--preset=tiny").stderr.splitlines()
    python = house.bin / "python3"
    assert said[-1] == f"run.sh: python is {python}; its torchrun is: {python} -m torch.distributed.run"
    assert said[0] == "run.sh: looking for Python, torch and GPUs: some seconds"
    house.python("python3", version=(3, 9, 2, "final", 0))
    (house.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(house.log.parent / "venv_python", house.root / ".venv/bin/python")
    assert house.run("--preset=tiny").stderr.splitlines()[-1] == \
        f"run.sh: python and torchrun in this shell: source {house.root}/.venv/bin/activate"


def test_a_read_only_checkout_says_how_to_run_elsewhere(house):     # L12
    house.torch()
    house.root.chmod(0o555)
    user = []
    if os.access(house.root, os.W_OK):                  # root may write everywhere
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere, and there is no setpriv")
        user = [shutil.which("setpriv"), "--bounding-set=-dac_override"]
    result, with_logs_elsewhere = (
        subprocess.run([*user, house.root / "run.sh", *options], env=house.environment, text=True, capture_output=True,
                       timeout=60) for options in ([], ["--preset=tiny", "--log_dir=/elsewhere"]))
    house.root.chmod(0o755)
    assert with_logs_elsewhere.stdout.startswith("train_gpt.py ['--preset=tiny', '--log_dir=/elsewhere']")
    message = complaint(result)
    assert "is read-only" in message and f"cp -r '{house.root}' ~/train_gpt && ~/train_gpt/run.sh" in message
    assert result.stdout == ""


@pytest.mark.parametrize("code", [2, 77])
def test_exit_codes_pass_through(house, code):
    house.torch()
    (house.root / "train_gpt.py").write_text(f"raise SystemExit({code})\n")
    assert house.run().returncode == code
    assert house.run("--preset=tiny").returncode == code


def test_a_failing_text_script_ends_the_run(house):
    house.torch()
    (house.root / "data/text.py").write_text("raise SystemExit(5)\n")
    result = house.run()
    assert (result.returncode, result.stdout) == (5, "")


SIGNAL_STUB = ("import signal, sys, time\n"
               "def end(number, frame):\n    time.sleep(1)\n    sys.exit(100 + number)\n"
               "if __name__ == '__main__':\n"
               "    for number in (1, 2, 10, 12, 15):\n        signal.signal(number, end)\n"
               "    print('training', flush=True)\n    time.sleep(30)\n")


def default_sigint():
    signal.signal(signal.SIGINT, signal.SIG_DFL)        # whoever started the tests may ignore it


@pytest.mark.parametrize("name, to_all", [("SIGINT", True), ("SIGTERM", False), ("SIGTERM", True), ("SIGHUP", True),
                                          ("SIGUSR1", False), ("SIGUSR2", False)])
def test_signals_reach_the_trainer_which_ends_in_its_own_time(house, name, to_all):
    """From a terminal (to the whole group) or to run.sh alone, as a batch system does."""
    house.torch()
    (house.root / "train_gpt.py").write_text(SIGNAL_STUB)
    process = subprocess.Popen([house.root / "run.sh", "--preset=tiny"], env=house.environment, text=True,
                               stdout=subprocess.PIPE, start_new_session=True, preexec_fn=default_sigint)
    assert process.stdout.readline() == "training\n"
    number = signal.Signals[name]
    (os.killpg if to_all else os.kill)(process.pid, number)
    assert process.wait(20) == 100 + number
    process.stdout.close()


def test_a_script_is_found_from_where_the_user_stands_or_in_the_house(house, tmp_path):
    house.torch()
    (tmp_path / "idea.py").write_text(STUB.format(name="idea"))
    (house.root / "attempts").mkdir()
    (house.root / "attempts/idea.py").write_text(STUB.format(name="attempt"))
    assert house.run("idea.py", "--preset=tiny", cwd=tmp_path).stdout.startswith("idea ['--preset=tiny']")
    assert house.run(str(tmp_path / "idea.py"), "--preset=tiny", cwd="/").stdout.startswith("idea ['--preset=tiny']")
    assert house.run("attempts/idea.py", "--preset=tiny", cwd=tmp_path).stdout.startswith("attempt ['--preset=tiny']")
    assert complaint(house.run("nothing.py")) == "run.sh: no such script: nothing.py"


# ---- which Python ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", [9, 10])
def test_an_old_python_is_one_line(house, minor):
    house.torch()
    house.python("python3", version=(3, minor, 2, "final", 0))
    message = complaint(house.run())
    assert f"Python 3.11 or newer is needed (found 3.{minor})" in message
    assert not (house.root / ".venv").exists()


def test_no_python_is_one_line(house):
    (house.bin / "python3").unlink()
    assert "Python 3.11 or newer is needed: install it" in complaint(house.run())


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_one_line(house, module):
    house.python("python3", lacks=module)
    message = complaint(house.run())
    assert f"sudo apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in message
    assert not (house.root / ".venv").exists()


def test_a_newer_python_elsewhere_on_the_path_makes_the_venv(house):
    house.python("python3", version=(3, 9, 2, "final", 0))
    house.python("python3.12", version=(3, 12, 1, "final", 0))
    house.run()
    assert house.log.read_text() == "pip\n"


@pytest.mark.parametrize("version, accepted", [("2.10.1", False), ("2.11.0a0+git1", True), ("2.14.1", True),
                                               ("2.15.0", False), ("3.0.0", False)])
def test_torch_at_hand_is_used_from_2_11_to_2_14(house, version, accepted):
    house.torch(version)
    result = house.run("--preset=tiny")
    assert house.log.exists() != accepted  # the log tells that pip was asked to install another
    if not accepted:
        assert f"has torch {version}, 2.11 to 2.14 is needed" in result.stderr


def test_a_torch_that_does_not_import_is_one_line(house):
    house.torch(init="raise OSError('libcudart.so.13: cannot open shared object file')\n")
    message = complaint(house.run())
    assert "OSError: libcudart.so.13: cannot open shared object file" in message
    assert str(house.bin / "python3") in message


def test_the_PYTHON_variable_decides_and_is_never_installed_into(house, tmp_path):
    house.python("other")
    assert "no such interpreter" in complaint(house.run(PYTHON="nonsense"))
    assert "PYTHON=other has no torch" in complaint(house.run(PYTHON="other"))
    house.torch()
    assert house.run("--preset=tiny", PYTHON="../bin/other").returncode == 0
    assert house.run("--preset=tiny", PYTHON="bin/other", cwd=tmp_path).returncode == 0
    assert not house.log.exists()


# ---- .venv -----------------------------------------------------------------------------------------------------------


def test_the_venv_is_made_once_and_again_when_the_pins_change(house):
    house.run()
    stamp = house.root / ".venv/requirements.txt.installed"
    assert stamp.read_text() == (house.root / "requirements.txt").read_text()
    house.run()
    assert house.log.read_text() == "pip\n"
    left = house.root / ".venv/left"
    left.touch()
    with open(house.root / "requirements.txt", "a") as pins:
        pins.write("another==1.0\n")
    house.run()
    assert house.log.read_text() == "pip\npip\n"
    assert left.exists()  # a complete .venv is updated, not made anew
    assert stamp.read_text() == (house.root / "requirements.txt").read_text()


def test_a_failed_update_makes_the_venv_anew(house):
    house.run()
    with open(house.root / "requirements.txt", "a") as pins:
        pins.write("another==1.0\n")
    complaint(house.run(FAKE_PIP="fail"))
    (house.root / ".venv/half").mkdir()
    house.run()
    assert house.log.read_text() == "pip\n" * 3
    assert not (house.root / ".venv/half").exists()


def test_a_failed_installation_is_one_line_and_is_not_taken_as_complete(house):
    result = house.run(FAKE_PIP="fail")
    assert "No matching distribution found for torch" in result.stderr and "package index" in complaint(result)
    (house.root / ".venv/half").mkdir()
    house.run()
    assert house.log.read_text() == "pip\npip\n"
    assert not (house.root / ".venv/half").exists()  # emptied first: what pip left half done could look complete


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_installation_is_begun_anew(house, how):
    process = subprocess.Popen([house.root / "run.sh"], env=house.environment | {"FAKE_PIP": "hang"},
                               start_new_session=True, stderr=subprocess.PIPE, text=True)
    hanging = Path(f"{house.log}.hanging")
    end = time.monotonic() + 20
    while not hanging.exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    assert f"process {process.pid} is installing" in complaint(house.run())
    os.killpg(process.pid, how)
    process.communicate(timeout=20)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    (house.root / ".venv/half").mkdir()
    house.run()
    assert house.log.read_text() == "pip\npip\n"
    assert not (house.root / ".venv/half").exists()


def test_a_venv_that_others_made_is_used_or_refused_but_never_changed(house):
    (house.root / ".venv/bin").mkdir(parents=True)
    assert "did not make it" in complaint(house.run())
    shutil.copy(house.bin / "python3", house.root / ".venv/bin/python")
    assert "has no torch and run.sh did not make it" in complaint(house.run())
    house.torch("2.12.0")
    house.python("python3", version=(3, 9, 2, "final", 0))
    assert house.run("--preset=tiny").stdout.startswith("train_gpt.py")
    assert not house.log.exists()


# ---- ./run.sh test ---------------------------------------------------------------------------------------------------


def add_test_tools(house, ruff=0, pytest_code=0):
    """All required packages in name, ruff and pytest as stubs that exit as told."""
    for file in ("requirements.txt", "requirements-dev.txt"):
        for line in (house.root / file).read_text().splitlines():
            name = line.split("#")[0].split("==")[0].strip()
            if name and name not in ("torch", "numpy", "ruff", "pytest"):
                house.package(name, "1.0")
    for name, code in (("ruff", ruff), ("pytest", pytest_code)):
        house.package(name, "1.0", [("__main__.py", STUB.format(name=name) + f"sys.exit({code})\n")])


def test_tests_run_ruff_then_pytest_with_the_users_arguments(house):
    house.torch()
    add_test_tools(house)
    result = house.run("test", "--all", "-k", "a b", cwd="/")
    assert "6 to 10 minutes on two cores; with --all" in result.stderr
    lines = result.stdout.splitlines()
    assert lines == ["ruff ['check', '--quiet', '.'] OMP=-", "pytest ['--all', '-k', 'a b'] OMP=-"]


@pytest.mark.parametrize("ruff, pytest_code, expected", [(0, 0, 0), (0, 1, 1), (0, 5, 5), (1, 0, 1)])
def test_either_tools_failure_fails_the_tests(house, ruff, pytest_code, expected):
    house.torch()
    add_test_tools(house, ruff, pytest_code)
    result = house.run("test")
    assert result.returncode == expected
    assert "pytest []" in result.stdout  # lint faults do not hide the tests' result
    assert ("ruff found faults" in result.stderr) == (ruff != 0)


def test_a_python_without_test_packages_is_left_alone(house):
    house.torch()
    result = house.run("test")
    assert "lacks" in result.stderr and "pytest" in result.stderr and "using .venv" in result.stderr
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert (house.root / f".venv/{name}.installed").read_text() == (house.root / name).read_text()
    assert "lacks" in complaint(house.run("test", PYTHON="python3"))
    assert house.log.read_text() == "pip\n"


def test_ci_runs_the_tests_with_one_thread_from_anywhere(house):
    house.torch()
    add_test_tools(house)
    (house.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", house.root / ".ci/run")
    result = subprocess.run([house.root / ".ci/run"], cwd="/", env=house.environment, text=True, capture_output=True,
                            timeout=60)
    assert result.stdout.splitlines()[-1] == "pytest [] OMP=1"


# ---- ranks (tests/rank_helpers.py) -----------------------------------------------------------------------------------


def sum_over_ranks(rank, world_size, factor):
    import torch
    torch.distributed.init_process_group("gloo")
    value = torch.tensor([float(rank + 1) * factor])
    torch.distributed.all_reduce(value)
    return value, int(os.environ["LOCAL_RANK"]), torch.get_num_threads()


def fail_on_rank_1(rank, world_size):
    if rank == 1:
        raise ValueError("a fault of rank one")
    time.sleep(60)


def die_on_rank_0(rank, world_size):
    if rank == 0:
        os._exit(7)


def sleep_long(rank, world_size):
    time.sleep(60)


def test_ranks_share_a_process_group_and_return_their_results():
    results = run_ranks(2, sum_over_ranks, 10.0)
    assert [(value.item(), rank, threads) for value, rank, threads in results] == [(30.0, 0, 1), (30.0, 1, 1)]
    assert run_ranks(1, "test_house:sum_over_ranks", 2.0)[0][0].item() == 2.0


def test_a_failing_rank_shows_its_traceback_and_ends_the_others(monkeypatch):
    monkeypatch.setattr("rank_helpers.GRACE_S", 0.5)
    with pytest.raises(RuntimeError, match="(?s)rank 0.*was ended.*in fail_on_rank_1.*rank 1.*raised.*of rank one"):
        run_ranks(2, fail_on_rank_1)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 died without a word \(exit code 7\)"):
        run_ranks(2, die_on_rank_0)


def test_a_hanging_rank_is_ended_and_says_where_it_was():
    with pytest.raises(RuntimeError, match="(?s)was not back after 3 s.*in sleep_long"):
        run_ranks(1, sleep_long, timeout_s=3)
