"""One process alone, and two connected by gloo through torchrun's variables."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from elsewhere import PATIENCE, started

from engine.distributed import World, current_world, start_world


def test_alone():
    with start_world("cpu") as world:
        assert world == World() == current_world()
        world.barrier()
        assert world.is_rank0 and world.gather_objects("a") == ["a"]
        assert world.gather_results(lambda: 3) == [3]
        assert world.first_on_each_machine(lambda: 4) == 4


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def in_two_processes(work: Callable[[int, int, str], None], folder: Path) -> None:
    """Run `work(rank, port, folder)` in two processes, which end well and leave a file each."""
    port = free_port()
    processes = [started(work, rank, port, str(folder)) for rank in range(2)]
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


def member(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with start_world("cpu") as world:
        assert (world.rank, world.size, world.is_rank0) == (rank, 2, rank == 0)
        assert world.gather_objects(f"from {rank}") == ["from 0", "from 1"]
        with start_world("cpu") as inner:
            assert inner == world
        assert world.gather_results(lambda: rank * 10) == [0, 10]  # still connected
        with pytest.raises(ValueError, match="only the second one fails"):
            world.gather_results(lambda: fail_in_the_second(world))
        for work in (world.on_rank0, world.on_all_ranks):
            own = work == world.on_all_ranks or world.is_rank0
            with pytest.raises(OSError if own else RuntimeError) as failed:
                work(fail)
            assert failed.value.reported_by == 0
        assert world.on_rank0(lambda: rank) == 0 and world.on_all_ranks(lambda: object()) is not None
        assert world.first_on_each_machine(lambda: was_there(f"{folder}/0")) == (not world.is_rank0)
        world.barrier()
    assert current_world() == World()
    with open(f"{folder}/{rank}", "w") as file:
        file.write("ended well")


def was_there(path: str) -> bool:
    there = os.path.exists(path)
    open(path, "w").close()
    return there


def fail() -> int:
    raise OSError("no such disk")


def fail_in_the_second(world: World) -> int:
    if not world.is_rank0:
        raise ValueError("only the second one fails")
    return 1


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    in_two_processes(member, tmp_path)


def failing_member(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(ValueError, match="only the second one fails") as failed, start_world("cpu") as world:
        world.on_all_ranks(lambda: fail_in_the_second(world))
    assert failed.value.reported_by == 1
    with open(f"{folder}/{rank}", "w") as file:
        file.write("ended well")


@pytest.mark.slow
def test_a_common_failure_ends_every_process_in_order(tmp_path):
    in_two_processes(failing_member, tmp_path)
