"""Fits of several subsets and lambdas that the processes of a run share.

A unit is a subset with a chain of lambdas. All processes together make a large one, which they share by rows; each of
the others is made by one process. Who makes what changes no number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from engine.distributed import World
from engine.progress import Progress
from probes.lowshot.fitting import Fitted, Fitter, Tried

Result = TypeVar("Result")


class Unit(NamedTuple):
    """Work on one subset. part: its number."""

    part: int
    lambdas: Sequence[float]


def fits_of_subsets(
    fitter: Fitter, names: Sequence[str], rows: Sequence[np.ndarray], world: World
) -> list[list[Fitted]]:
    """For every subset, called by a name and given by its rows (n,): a fit for every lambda, or for the best one.

    All processes call it and get the same. ValueError for a fit that is not certified, as in Fitter.
    """
    units = [Unit(part, chain) for part in range(len(rows)) for chain in fitter.chains()]
    total = len(units) + (len(rows) if fitter.holdout else 0)
    with Progress("logistic regression", total, "fits", quiet=not world.is_rank0) as progress:
        division = Division(fitter, rows, world, progress.advance)
        tried: list[list[Tried]] = [[] for _ in rows]
        if fitter.holdout:
            tried = division.joined(
                units, lambda unit, team: fitter.try_out(names[unit.part], rows[unit.part], unit.lambdas, team)
            )
            best = world.on_rank0(lambda: [fitter.choose(*each) for each in zip(names, rows, tried, strict=True)])
            units = [Unit(part, (raw,)) for part, raw in enumerate(best)]
        return division.joined(
            units,
            lambda unit, team: fitter.fit(names[unit.part], rows[unit.part], unit.lambdas, tried[unit.part], team),
        )


@dataclass(frozen=True)
class Division:
    """Who makes which unit. advance: told of every unit that is done."""

    fitter: Fitter
    rows: Sequence[np.ndarray]
    world: World
    advance: Callable[[int], None]

    def joined(self, units: Sequence[Unit], work: Callable[[Unit, World], list[Result]]) -> list[list[Result]]:
        """What `work` gives for all units of each subset, in their order, in every process.

        Large units come first. An error in one process is raised in all.
        """
        found = {unit: self.done(unit, work, self.world) for unit in units if self.is_large(unit)}
        sizes = [(unit, self.size(unit)) for unit in units if unit not in found]
        mine = even_shares(sizes, self.world.size)[self.world.rank]
        for part in self.world.gather_results(lambda: {unit: self.done(unit, work, World()) for unit in mine}):
            found |= part
        return [
            [result for unit in units if unit.part == part for result in found[unit]] for part in range(len(self.rows))
        ]

    def done(self, unit: Unit, work: Callable[[Unit, World], list[Result]], team: World) -> list[Result]:
        result = work(unit, team)
        self.advance(1)
        return result

    def is_large(self, unit: Unit) -> bool:
        return self.fitter.is_large(len(self.rows[unit.part]))

    def size(self, unit: Unit) -> int:
        return len(self.rows[unit.part]) * len(unit.lambdas)


def even_shares(sizes: Sequence[tuple[Unit, int]], processes: int) -> list[list[Unit]]:
    """The units of each process: the largest first, each to the process that has least so far."""
    found: list[list[Unit]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for unit, size in sorted(sizes, key=lambda entry: -entry[1]):
        least = loads.index(min(loads))
        found[least].append(unit)
        loads[least] += size
    return found
