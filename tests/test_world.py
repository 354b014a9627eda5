"""Room 2: who this process is, from the launcher's variables; one process needs none of them."""
import re
import socket
import stat
from types import SimpleNamespace

import pytest
import torch
from model_helpers import hide_gpus, without_launcher
from rank_helpers import load_train_gpt


def test_without_a_launcher_the_world_is_one_process(tg, monkeypatch):
    without_launcher(monkeypatch)
    world = tg.init_world()
    assert world == tg.World() and world.size == 1 and not world.is_cuda
    assert not torch.distributed.is_initialized()
    tg.close_world()


def join_and_leave(rank, size):
    hide_gpus()
    tg = load_train_gpt()
    world = tg.init_world()
    assert not torch.distributed.is_initialized()
    tg.join_group(world)
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    tg.close_world()
    return world.rank, world.size, world.device.type, float(total), torch.distributed.is_initialized()


def test_rank_and_size_come_from_the_launcher(tg, run_ranks):
    assert run_ranks(2, join_and_leave) == [(0, 2, "cpu", 3.0, False), (1, 2, "cpu", 3.0, False)]


@pytest.mark.parametrize("found, legal", [("2.10.1", False), ("2.9.0+cpu", False), ("2.11.0", True), ("3.0.0a0", True)])
def test_versions_of_torch_before_2_11_are_refused(tg, monkeypatch, found, legal):
    without_launcher(monkeypatch)
    monkeypatch.setattr(torch, "__version__", found)
    if legal:
        assert tg.init_world().size == 1
        return
    with pytest.raises(tg.Refusal, match="2.11 or newer") as caught:
        tg.init_world()
    assert found in str(caught.value)


def test_a_rank_without_a_gpu_of_its_own_is_refused(tg, monkeypatch):
    without_launcher(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(tg.Refusal, match="local rank 2.*2 found"):
        tg.init_world()


def test_a_rank_takes_the_gpu_of_its_number_on_this_host_and_a_stream_of_its_own(tg, monkeypatch):
    without_launcher(monkeypatch)
    for name, value in dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1").items():
        monkeypatch.setenv(name, value)
    taken, gpu = {}, torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "its own")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.update(device=device))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: taken.update(stream=stream))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert tg.init_world() == tg.World(3, 4, gpu, 1) and tg.World(3, 4, gpu, 1).is_cuda
    assert taken == dict(device=gpu, stream="its own") and torch.backends.cuda.matmul.allow_tf32


def test_a_compiler_is_found_on_the_path_or_named_by_cc(tg, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert tg.find_compiler() is None
    for name in ("gcc", "cc", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o700 | stat.S_IXUSR)
        assert tg.find_compiler() == str(tmp_path / name.replace("my-compiler", "cc"))
    monkeypatch.setenv("CC", "my-compiler")
    assert tg.find_compiler() == str(tmp_path / "my-compiler")


def test_launcher_variables_that_make_no_sense_are_refused(tg, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(tg.Refusal, match="whole numbers.*torchrun"):
        tg.init_world()
    for rank, size in (("1", "1"), ("2", "2"), ("0", "0"), ("-1", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(tg.Refusal, match=f"rank < size, found {rank} of {size}.*torchrun"):
            tg.init_world()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(tg.Refusal, match="expected whole numbers.*found 0 of 2, one on its host"):
        tg.init_world()
    monkeypatch.delenv("LOCAL_RANK")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = tg.init_world()
    with pytest.raises(tg.Refusal, match="WORLD_SIZE=2, but no meeting point.*torchrun"):
        tg.join_group(world)


def test_a_port_in_use_is_one_line(tg, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                                MASTER_PORT=str(taken.getsockname()[1])).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(tg.Refusal, match="WORLD_SIZE=2, but no meeting point.*torchrun") as refused:
            tg.join_group(tg.init_world())
    assert len(str(refused.value).splitlines()) == 1


def wait_for_the_others(rank, size):
    """Rank 0 comes at once, rank 1 a second later; -> what rank 0 says."""
    import contextlib
    import io
    import time
    hide_gpus()
    tg, err = load_train_gpt(), io.StringIO()
    tg.WAIT_S = 0.3
    if rank == 1:
        time.sleep(1.0)
    with contextlib.redirect_stderr(err):
        tg.join_group(tg.init_world())
        time.sleep(0.5)                             # a timer that still runs would speak now
    tg.close_world()
    return err.getvalue()


def test_a_rank_says_for_whom_it_waits_and_where(run_ranks):
    first, late = run_ranks(2, wait_for_the_others)
    assert first.count("\n") == 1 and "rank 0 of 2" in first and "for rank 1;" in first
    assert re.search(r"waits at 127\.0\.0\.1:\d+ for", first), first
    assert late == "" and 5 <= load_train_gpt().WAIT_S <= 15


def test_tasks_of_slurm_without_a_launcher_are_refused_and_a_lone_one_is_not(tg, monkeypatch):
    without_launcher(monkeypatch)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(tg.Refusal, match="SLURM_NTASKS=2, but no RANK.*torchrun.*RANK=0"):
        tg.init_world()
    monkeypatch.setenv("RANK", "0")                 # as the message advises, and as torchrun does
    assert tg.init_world() == tg.World()
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert tg.init_world() == tg.World()
