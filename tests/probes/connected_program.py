"""Run as a program in connected processes: evaluate a toy export on digits, and print how often they were connected.

connected_program.py FOLDER PROTOCOLS   prints connections, metrics and digests as JSON, one line for each process
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from torch import distributed
from toy_exports import export_of_size, workspace

from engine import neighbours
from engine.distributed import start_world
from engine.files import digest
from probes.lowshot import blocks, fitting
from probes.tasks import attentive, knn, lowshot

PROTOCOLS = attentive.PROTOCOLS | knn.PROTOCOLS | lowshot.PROTOCOLS


@contextmanager
def small_blocks() -> Iterator[None]:
    """Small enough that a search of 300 x 300 has several tiles, and a fit to 300 images several blocks."""
    with (
        mock.patch.multiple(neighbours, TILE_ROWS=128, TILE_QUERIES=64),
        mock.patch.object(blocks, "BLOCK_ROWS", 64),
        mock.patch.object(fitting, "MAX_IN_MEMORY", 200 * 32),
    ):
        yield


def run_probes(folder: Path, protocols: str) -> dict:
    """By protocol, metrics and a digest of everything that must not depend on the number of processes."""
    records = {}
    with small_blocks(), start_world("cpu") as world:
        space = workspace(folder, "digits:", limit=300, world=world)
        for protocol in protocols.split(","):
            outcome = PROTOCOLS[protocol].task.run(export_of_size(16), space)
            arrays = {name: metric.per_image for name, metric in outcome.metrics.items()}
            per_image = {name: values.tolist() for name, values in arrays.items() if values is not None}
            seen = digest({"facts": outcome.facts, "per_image": per_image})
            records[protocol] = {"metrics": outcome.numbers, "digest": seen}
    return records


if __name__ == "__main__":
    connect, connections = distributed.init_process_group, []
    distributed.init_process_group = lambda *args, **options: (connections.append(1), connect(*args, **options))
    record = run_probes(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.write(json.dumps({"connections": len(connections)} | record) + "\n")
