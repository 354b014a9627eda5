"""Run a function as N ranks on the CPU (gloo), cheaply: the processes fork from a server that has imported torch once.

    def losses(rank, world_size, steps):            # module level, in a test file
        tg = load_train_gpt()
        ...
        return [1.0, 2.0]                           # anything that pickles

    per_rank = run_ranks(2, losses, 3)              # list of results, index = rank
"""
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 5.0  # how long the other ranks may go on after one has failed: they often hang in a collective

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.attention.flex_attention"])


def train_gpt_path():
    """The file under test: $TRAIN_GPT (from the current directory, else from the repository), else train_gpt.py."""
    named = os.environ.get("TRAIN_GPT")
    if not named:
        return ROOT / "train_gpt.py"
    return Path(named).resolve() if Path(named).exists() else ROOT / named


def load_train_gpt(name="train_gpt"):
    """The file under test as a module, imported once per process."""
    if name not in sys.modules:
        path = train_gpt_path()
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up while it is being executed
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def run_ranks(world_size, fn, *args, timeout_s=120.0):
    """Call `fn(rank, world_size, *args)` in `world_size` processes and return the list of their results.

    `fn` is a module-level function, or its name as "module:function". Each process sees the variables that torchrun
    would set (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and those of its store) and has
    one torch thread, but no process group until `fn` makes one. Raises RuntimeError with the traceback of every rank
    that raised, when one raises, dies or is not back within `timeout_s` (then with the place where it was).
    """
    from torch.distributed import TCPStore
    # As under torchrun, the store lives in the parent, on a port that it holds: no race for a free one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        stacks = [os.path.join(folder, f"stack{rank}") for rank in range(world_size)]
        processes, receivers = [], []
        for rank in range(world_size):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
                "TRAIN_GPT": str(train_gpt_path()),
            }
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, daemon=True,
                                       args=(sender, stacks[rank], environment, rank, world_size, fn, args))
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            results, faults = _collect(processes, receivers, stacks, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for receiver in receivers:
                receiver.close()
    if faults:
        raise RuntimeError("\n".join(f"rank {rank} of {world_size} {faults[rank]}" for rank in sorted(faults)))
    return [results[rank] for rank in range(world_size)]


def _collect(processes, receivers, stacks, timeout_s):
    """(results, faults) by rank; ends early when a rank has failed and the others do not follow within GRACE_S."""
    results, faults = {}, {}
    end = time.monotonic() + timeout_s
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending:
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        if not ready:
            why = "was ended because another rank had failed" if faults else f"was not back after {timeout_s:g} s"
            for rank in pending.values():
                os.kill(processes[rank].pid, signal.SIGUSR1)  # faulthandler writes where the process is
            time.sleep(0.3)
            for rank in pending.values():
                place = Path(stacks[rank])
                faults[rank] = f"{why}\n{place.read_text() if place.exists() else ''}"
            break
        for receiver in ready:
            rank = pending.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                processes[rank].join(GRACE_S)
                faults[rank] = f"died without a word (exit code {processes[rank].exitcode})"
            else:
                if succeeded:
                    results[rank] = value
                else:
                    faults[rank] = f"raised\n{value}"
        if faults:
            end = min(end, time.monotonic() + GRACE_S)
    return results, faults


def _child(sender, stack_file, environment, rank, world_size, fn, args):
    os.environ.update(environment)
    import torch
    torch.set_num_threads(1)
    with open(stack_file, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            if isinstance(fn, str):
                module_name, function_name = fn.split(":")
                fn = getattr(importlib.import_module(module_name), function_name)
            # Plain pickle: torch's own reductions would share memory that is gone when this process ends.
            answer = pickle.dumps((True, fn(rank, world_size, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        sender.send_bytes(answer)
        sender.close()
        faulthandler.unregister(signal.SIGUSR1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
