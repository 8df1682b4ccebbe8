"""Other processes that begin in a moment: functions, connected ones, and whole programs.

They are forked from a server that has imported once what all of them need, which takes a program of its own 5 to 9 CPU
seconds. The server is not the test itself, which holds threads.
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
# It does not know the folder of the tests before Python 3.12.8.
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


def started(work: Callable[..., None], *given: Any) -> BaseProcess:
    """A process that does `work`, a function of a module."""
    process = CONTEXT.Process(target=_forking, args=(work, *given))
    process.start()
    return process


def _forking(work: Callable[..., None], *given: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as in a program of its own
    work(*given)


class Program:
    """A program that was started. Used as subprocess.Popen, as far as tests need it."""

    def __init__(self, process: BaseProcess, output: BinaryIO, errors: BinaryIO) -> None:
        self.process, self.output, self.errors, self.pid = process, output, errors, process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Its standard output and errors, once it has ended. subprocess.TimeoutExpired where it has not by then."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return _text(self.output), _text(self.errors)

    def end(self) -> str:
        """Its standard output; it must end well."""
        output, errors = self.communicate()
        assert self.returncode == 0, errors
        return output

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def program(*words: object, environment: Mapping[str, str] | None = None, merged: bool = False) -> Program:
    """Start `python WORDS`: a file or `-m MODULE`, and arguments, in a session of its own.

    environment: variables beside those of the test. merged: errors go to the output, too.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 (gone with the Program)
    errors = output if merged else tempfile.TemporaryFile()  # noqa: SIM115
    given = (list(map(str, words)), dict(os.environ) | dict(environment or {}))
    process = CONTEXT.Process(target=_run, args=(*given, _Handle(output), _Handle(errors)))
    process.start()
    return Program(process, output, errors)


def ranks(size: int, *words: object, **options: Any) -> list[Program]:
    """Start a program in `size` processes, which find each other as torchrun's do."""
    shared = dict(options.pop("environment", {})) | {"WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [program(*words, environment=shared | own, **options) for own in each]


class _Handle:
    """An open file, which becomes its number in the process that it is sent to."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return _detached, (DupFd(self.file.fileno()),)


def _detached(handle: Any) -> int:
    return handle.detach()


def _run(words: list[str], environment: dict[str, str], output: int, errors: int) -> None:
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


def together(work: Callable[..., Any], *given: Any, size: int = 2) -> list[Any]:
    """What `work(world, *given)` returns in each of `size` processes; an error as ("error", its text, whose it is)."""
    port, members = _free_port(), []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        members.append((ours, started(_member, rank, size, port, theirs, work, given)))
        theirs.close()
    answers = [_answer(ours) for ours, _ in members]
    for _, process in members:
        process.join(PATIENCE)
        assert process.exitcode == 0, process.exitcode
    return answers


def in_processes(count: int, work: Callable[..., None], folder: Path) -> None:
    """Run `work(world, folder)`, a function of a test's file, in `count` connected processes of one thread each.

    Its results are what it writes to the folder.
    """
    answers = together(_on_one_thread, work, folder, size=count)
    assert answers == [None] * count, answers


def _on_one_thread(world: World, work: Callable[..., None], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    work(world, folder)


def _member(
    rank: int, size: int, port: int, answer: Connection, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with start_world("cpu") as world:
            found = work(world, *given)
    except Exception as error:  # of any kind: the test says which it expects
        found = "error", str(error), getattr(error, "reported_by", None)
    answer.send_bytes(pickle.dumps(found))  # `send` would leave tensors with this process, which ends now


def _answer(ours: Connection) -> Any:
    return pickle.loads(ours.recv_bytes()) if ours.poll(PATIENCE) else ("error", "hangs", None)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
