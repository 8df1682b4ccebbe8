"""Processes on this machine, connected as torchrun would connect them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing

from engine.distributed import World, start_world

Work = Callable[[World, Path], None]


def in_two_processes(work: Work, folder: Path) -> None:
    """Run `work`, a function of a test's file, in both; its results are what it writes to `folder`."""
    in_processes(2, work, folder)


def in_processes(count: int, work: Work, folder: Path) -> None:
    """The same in `count` processes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    torch.multiprocessing.spawn(_member, args=(count, port, work, folder), nprocs=count)


def _member(rank: int, count: int, port: int, work: Work, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with start_world("cpu") as world:
        work(world, folder)
