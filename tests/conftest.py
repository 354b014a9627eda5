"""What all tests share: the module under test (`tg`), small shards, ranks, and which tests run where."""
from pathlib import Path
from typing import NamedTuple

import pytest

try:
    import torch
except Exception as error:
    torch, torch_fault = None, f"{type(error).__name__}: {error}"

import rank_helpers


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


def pytest_configure(config):
    if torch is None:  # one readable line instead of a traceback per test file
        raise pytest.UsageError(f"torch does not import here: {torch_fault}")
    torch.set_num_threads(1)  # waiting threads spin: two per process on a busy machine are many times slower than one


def pytest_report_header(config):
    return f"file under test: {rank_helpers.train_gpt_path()}, torch {torch.__version__}"


def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    too_slow = pytest.mark.skip(reason="slow: run with --all")
    has_gpu = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--all"):
            item.add_marker(too_slow)


@pytest.fixture(scope="session")
def tg():
    """The training script as a module: $TRAIN_GPT, else train_gpt.py of this repository."""
    return rank_helpers.load_train_gpt()


@pytest.fixture(scope="session")
def run_ranks():
    """rank_helpers.run_ranks: call a module-level function as N gloo ranks, get the list of results."""
    return rank_helpers.run_ranks


class TinyShards(NamedTuple):
    """A folder with two training shards of 5,000 tokens, a validation shard of 10,001, and patterns that find them."""
    folder: Path
    train_files: str
    val_files: str

    @property
    def overrides(self):
        """The two options that point the script at them."""
        return [f"--train_files={self.train_files}", f"--val_files={self.val_files}"]


@pytest.fixture
def tiny_shards(tmp_path):
    """TRAIN_A, TRAIN_B and VAL_10001 of shard_helpers, in a folder of their own."""
    from shard_helpers import put_shard
    folder = tmp_path / "tiny_shards"
    folder.mkdir()
    put_shard(folder, "TRAIN_A", "fineweb_train_000001.bin")
    put_shard(folder, "TRAIN_B", "fineweb_train_000002.bin")
    put_shard(folder, "VAL_10001", "fineweb_val_000000.bin")
    return TinyShards(folder, str(folder / "fineweb_train_*.bin"), str(folder / "fineweb_val_*.bin"))
