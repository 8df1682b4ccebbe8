"""Collectives of one process, and of two that gloo connects through torchrun's variables."""

import os
import socket
from pathlib import Path

import pytest
from elsewhere import PATIENCE, started, together

from engine.distributed import World, current_world, start_world


def test_one_process_needs_no_connection():
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


def check_collectives(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with start_world("cpu") as world:
        assert (world.rank, world.size, world.is_rank0) == (rank, 2, rank == 0)
        assert world.gather_objects(f"from {rank}") == ["from 0", "from 1"]
        with start_world("cpu") as inner:
            assert inner == world
        assert world.gather_results(lambda: rank * 10) == [0, 10]  # still connected
        with pytest.raises(ValueError, match="failure of rank 1"):
            world.gather_results(lambda: fail_on_rank1(world))
        for collective in (world.on_rank0, world.on_all_ranks):
            raises_here = collective == world.on_all_ranks or world.is_rank0
            with pytest.raises(OSError if raises_here else RuntimeError) as error:
                collective(fail)
            assert error.value.reported_by == 0
        assert world.on_rank0(lambda: rank) == 0 and world.on_all_ranks(lambda: object()) is not None
        assert world.first_on_each_machine(lambda: existed(folder / "shared")) == (not world.is_rank0)
        world.barrier()
    assert current_world() == World()
    (folder / str(rank)).touch()


def existed(path: Path) -> bool:
    """Whether the file existed; it does now."""
    before = path.exists()
    path.touch()
    return before


def fail() -> int:
    raise OSError("no such disk")


def fail_on_rank1(world: World) -> int:
    if not world.is_rank0:
        raise ValueError("failure of rank 1")
    return 1


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    port = free_port()
    processes = [started(check_collectives, rank, port, tmp_path) for rank in range(2)]
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "shared"]


def fail_together(world: World) -> None:
    world.on_all_ranks(lambda: fail_on_rank1(world))


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_on_all_and_they_end_in_order():
    assert together(fail_together) == [("error", "failure of rank 1", 1)] * 2
