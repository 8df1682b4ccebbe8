"""Measure how far a protocol's number depends on each of its settings, for the same weights."""

from dataclasses import dataclass
from pathlib import Path

from bench.names import check_names
from bench.options import CheckpointOptions, EvaluationOptions, Positional, options_from
from engine.errors import UserError, option
from engine.settings import NonNegativeInt, PositiveInt

EPILOG = """\
A variation is FIELD=VALUE, as for --set. FIELD is a setting of the task; precision, decode or seed; or statistics,
image_size (pixels, or a multiple of the network's own, 1.5x) or positions, the rule by which position embeddings are
interpolated. Several variations in one argument, separated by spaces, are applied together.

examples:
  bench sensitivity knn@dino --checkpoint a.pth b.pth --data cifar10=folder:/data/cifar10 --out sensitivity
  bench sensitivity linear_sgd@ibot_base_cached --checkpoint a.pth --data in1k=imagenet:/data --out sensitivity
  bench sensitivity knn@dino --checkpoint a.pth --data x=digits: --out s --vary pool=avg "k=20 crop=1.0"

Writes sensitivity-PROTOCOL.csv next to the results: the change of each network, unrounded.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    """Options of `bench sensitivity`."""

    protocol: Positional[str]  # PROTOCOL: such as knn@dino
    # X: export folder, checkpoint file, folder of a pretraining, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE
    checkpoint: tuple[str, ...] = ()
    data: tuple[str, ...] = ()  # NAME=URL: one image set
    out: Path | None = None  # DIR: folder of results
    vary: tuple[str, ...] = ()  # V: variations instead of the task's own
    seed: NonNegativeInt = 0  # N: seed of everything random in a task (0)
    limit: PositiveInt | None = None  # N: at most N images of each split
    set: tuple[str, ...] = ()  # TASK.FIELD=VALUE: change a setting in all runs


def run(options: Options) -> int:
    """0: the variations are measured; those that could not be are listed with the reason."""
    if not (options.checkpoint and options.out):
        raise ValueError(f"give {option('checkpoint')} X, {option('data')} NAME=URL and {option('out')} DIR")
    if len(options.data) != 1:
        raise UserError("data", f"give one image set, not {len(options.data)}")
    check_names(options.checkpoint, options.protocol, options.data)
    from bench.sensitivity import sensitivity, table_rows, to_csv
    from engine.files import write_atomic
    from engine.printing import say, table

    evaluation = options_from(options, EvaluationOptions, suite=options.protocol, seed=(options.seed,))
    title, effects, left_out = sensitivity(evaluation, options.vary)
    path = options.out / f"sensitivity-{options.protocol}.csv"
    write_atomic(path, to_csv(effects))
    say("", title, "", *table(table_rows(effects)), "", *(f"left out: {line}" for line in left_out))
    say(f"written: {path}")
    return 0
