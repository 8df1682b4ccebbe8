"""Other processes that start fast: functions, connected functions, and programs.

They are forked from a server that has imported once what all of them need; importing it takes a fresh program 5 to 9
CPU seconds. The server is a process of its own, since the test has threads and must not fork.
"""

import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, BinaryIO

from engine.distributed import World, start_world

PATIENCE = 120  # seconds before a process counts as hanging
# Before Python 3.12.8 the server does not see the folder of the tests, so that it can import no module of theirs.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "bench.run.runner",
        "faiss",
        "mmengine.runner",
        "pretrain.loop.trainer",
        "probes.tasks.finetune",
        "probes.tasks.linear",
        "probes.tasks.lowshot",
        "sklearn.datasets",
        "timm.data",
        "torch.utils.tensorboard",
    ]
)


def started(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A started process that calls `work`, a function of a module."""
    process = CONTEXT.Process(target=_call, args=(work, *arguments))
    process.start()
    return process


def _call(work: Callable[..., None], *arguments: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as in a program of its own
    work(*arguments)


class Program:
    """A started program, with the part of subprocess.Popen's interface that tests need."""

    def __init__(self, process: BaseProcess, output: BinaryIO, errors: BinaryIO) -> None:
        self.process, self.output, self.errors, self.pid = process, output, errors, process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Wait for its end: standard output and errors. Raises subprocess.TimeoutExpired."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return _text(self.output), _text(self.errors)

    def end(self) -> str:
        """Wait for its end, which must be a success: its standard output."""
        output, errors = self.communicate()
        assert self.returncode == 0, errors
        return output

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def program(*words: object, environment: Mapping[str, str] | None = None, merged: bool = False) -> Program:
    """Start `python WORDS` in a session of its own; words: a file or `-m MODULE`, and arguments.

    environment: variables beside those of the test. merged: errors go to the output.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the Program)
    errors = output if merged else tempfile.TemporaryFile()  # noqa: SIM115
    variables = dict(os.environ) | dict(environment or {})
    process = CONTEXT.Process(
        target=_run_program, args=(list(map(str, words)), variables, _Handle(output), _Handle(errors))
    )
    process.start()
    return Program(process, output, errors)


def ranks(size: int, *words: object, **options: Any) -> list[Program]:
    """Start a program in `size` processes that connect as those of torchrun do."""
    shared = dict(options.pop("environment", {})) | {"WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    variables = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [program(*words, environment=environment, **options) for environment in variables]


class _Handle:
    """An open file; the process that it is sent to receives its file descriptor."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return _detach, (DupFd(self.file.fileno()),)


def _detach(handle: Any) -> int:
    return handle.detach()


def _run_program(words: list[str], environment: dict[str, str], output: int, errors: int) -> None:
    import torch

    multiprocessing.set_start_method("fork", force=True)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def together(work: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """What `work(world, *arguments)` returns in each of `size` connected processes.

    An error is returned as ("error", its text, the rank that reported it).
    """
    port, processes = _free_port(), []
    for rank in range(size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        processes.append((receiver, started(_work_on_rank, rank, size, port, sender, work, arguments)))
        sender.close()
    outcomes = [_receive(receiver) for receiver, _ in processes]
    for _, process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0, process.exitcode
    return outcomes


def in_processes(count: int, work: Callable[..., None], folder: Path) -> None:
    """Run `work(world, folder)`, which writes its results to the folder, in `count` processes of one thread each."""
    outcomes = together(_on_one_thread, work, folder, size=count)
    assert outcomes == [None] * count, outcomes


def _on_one_thread(world: World, work: Callable[..., None], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    work(world, folder)


def _work_on_rank(
    rank: int, size: int, port: int, sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with start_world("cpu") as world:
            outcome = work(world, *arguments)
    except Exception as error:  # any: the test says which it expects
        outcome = "error", str(error), getattr(error, "reported_by", None)
    sender.send_bytes(pickle.dumps(outcome))  # `send` would leave tensors in the memory of this process, which ends


def _receive(receiver: Connection) -> Any:
    return pickle.loads(receiver.recv_bytes()) if receiver.poll(PATIENCE) else ("error", "hangs", None)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
