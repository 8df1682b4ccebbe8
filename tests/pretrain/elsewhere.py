"""Functions in other processes: one that is to be killed, or several that are connected as torchrun would."""

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from engine.distributed import start_world

PATIENCE = 120  # seconds before a process counts as hanging
# The server imports once what all processes need; they are forked from it, and not from a test that holds threads. It
# does not know the folder of the tests before Python 3.12.8.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pretrain.loop.trainer", "timm", "torch.utils.tensorboard", "sklearn.datasets"])


def started(work: Callable[..., None], *given: Any) -> BaseProcess:
    """A process that does `work`, a function of a module."""
    process = CONTEXT.Process(target=_forking, args=(work, *given))
    process.start()
    return process


def _forking(work: Callable[..., None], *given: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as in a program of its own
    work(*given)


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


def _member(
    rank: int, size: int, port: int, answer: Connection, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with start_world("cpu") as world:
            found = work(world, *given)
    except Exception as error:  # of any kind: the test says which it expects
        found = "error", str(error), getattr(error, "told_by", None)
    answer.send_bytes(pickle.dumps(found))  # `send` would leave tensors with this process, which ends now


def _answer(ours: Connection) -> Any:
    return pickle.loads(ours.recv_bytes()) if ours.poll(PATIENCE) else ("error", "hangs", None)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
