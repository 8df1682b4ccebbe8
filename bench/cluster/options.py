"""`--cluster` and the options that say where its jobs run: one value, checked, out of the command line.

Importing this takes no time, as `bench run --help` needs it.
"""

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from bench.cli.settings import positive_integer

DAY = 24 * 60  # minutes
YEAR = 365 * DAY
# As sbatch takes them: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
SLURM_ALONE = ("partition", "account", "qos", "mem", "cpus", "slurm", "nodes")  # not of --cluster local
PREFIX = "cluster_"  # of the names under which argparse keeps these options


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where the jobs of a command run."""

    kind: Literal["slurm", "local"]
    gpus: int = 0  # of a job on each node
    processes: int = 1  # of a job on each node: as many as GPUs, where there are any
    nodes: int = 1  # of a job
    jobs: int | None = None  # that run at once, at most; none: as many as the cluster starts
    minutes: int = DAY  # that a job may take until it is stopped and queued again
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    mem: str | None = None  # of a job on each node, as sbatch takes it
    cpus: int | None = None  # of each process
    slurm: tuple[str, ...] = ()  # KEY=VALUE, further options of sbatch


def add_cluster(parser: argparse.ArgumentParser, jobs: bool) -> None:
    """The options; `--jobs` where a command has several."""
    group = parser.add_argument_group("on a cluster (docs/cluster.md)")

    def add(name: str, **settings: object) -> None:
        group.add_argument(f"--{name}", dest=PREFIX + name, **settings)  # type: ignore[arg-type]

    group.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="slurm: submit the work as jobs, which go on by themselves; local: as jobs on this machine",
    )
    add("partition", metavar="P", help="of SLURM")
    add("gpus", type=positive_integer, metavar="G", help="GPUs of a job on each node, a process for each")
    add("processes", type=positive_integer, metavar="N", help="processes of a job on each node (one for each GPU)")
    add("nodes", type=positive_integer, metavar="N", help="nodes of a job (1)")
    if jobs:
        add("jobs", type=positive_integer, metavar="N", help="jobs that run at once, at most (slurm: all; local: 1)")
    add("time", type=minutes_of, metavar="T", help="of a job, as sbatch takes it, until it is queued again (1-00)")
    add("account", metavar="A", help="of SLURM")
    add("qos", metavar="Q", help="of SLURM")
    add("mem", metavar="M", help="memory of a job on each node, such as 200G")
    add("cpus", type=positive_integer, metavar="N", help="CPUs of each process, for its loaders")
    add("slurm", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="further options of sbatch")


def minutes_of(text: str) -> int:
    """SLURM's ways to write a time, as whole minutes, rounded up."""
    match = TIME.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected minutes, H:MM:SS or D-HH:MM:SS, not {text!r}")
    days, *parts = (int(part or 0) for part in match.groups())
    first, second, third = parts
    if match["days"] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif match["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    if not seconds:
        raise argparse.ArgumentTypeError("expected a time above 0")
    return -(-seconds // 60)


def cluster_of(arguments: argparse.Namespace) -> ClusterOptions | None:
    """The options of `--cluster`, None without `--cluster`. ValueError for those that go with another one."""
    options = {name.removeprefix(PREFIX): value for name, value in vars(arguments).items() if name.startswith(PREFIX)}
    options = {name: value for name, value in options.items() if value not in (None, [])}
    if not arguments.cluster:
        _refuse(options, options.keys(), "without --cluster: add --cluster slurm, or leave it")
        return None
    if arguments.cluster == "local":
        _refuse(options, SLURM_ALONE, "is of --cluster slurm, not of local: leave it")
        options = {"jobs": 1, "time": YEAR} | options
    for text in options.get("slurm", ()):
        if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
            raise ValueError(f"--slurm {text}: write KEY=VALUE as sbatch knows it, such as constraint=a100")
    gpus = options.get("gpus", 0)
    return ClusterOptions(
        kind=arguments.cluster,
        minutes=options.pop("time", DAY),
        processes=options.pop("processes", gpus or 1),
        **options | {"slurm": tuple(options.get("slurm", ()))},
    )


def _refuse(given: Collection[str], names: Collection[str], why: str) -> None:
    if wrong := [name for name in given if name in names]:
        raise ValueError(f"--{wrong[0]} {why}")
