"""Results that were never measured, for tests of what is made of result files: by hand, and generated from a seed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from bench.leaderboards.tables import Leaderboard, leaderboard_of
from bench.results.record import (
    CheckpointUsed,
    DataUsed,
    MetricRecord,
    ProtocolUsed,
    Result,
    TrainingCost,
    result_path,
    result_stem,
    write_result,
)
from bench.results.store import StoredResult
from engine.tasks import Workspace

EVIL = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "$x_1$ & 'quotes', commas",
    "{{ 7 * 7 }}{% raw %}",
    "l\u00ednea \u202e\x1b[31m\nFORGED\r\x00 \udcff \U0001f600",
    "_hidden",
)

SIGNS = (
    *("=1+1", "@SUM(A1)", "+1", "-1", "--", "a|b", "[x]: javascript:alert(1)", "[x](javascript:alert(1))", "]("),
    *("\\input{x}", "\\", "{", "}", "%", "# $x^2$ ~ _", "[1cm]", "*", '"', "``", "&amp;", "\u2028", "\u4e2d\u6587"),
)
ROOT = Path("/folder/results")  # where generated results would lie


def made_checkpoint(name: str = "alpha", number: int = 0, **others) -> CheckpointUsed:
    """A checkpoint. number: what its digest is made of."""
    fields = dict(digest=f"{number:064x}", architecture="ViT-S/16", parameters=22_000_000)
    return CheckpointUsed(name=name, **fields | others)


def made_metrics(values: Mapping[str, float], intervals=None, **others) -> dict[str, MetricRecord]:
    """Metrics of these values, with intervals where they are given."""
    ends = intervals or {}
    return {name: MetricRecord(value=value, interval=ends.get(name), **others) for name, value in values.items()}


def made_result(checkpoint: CheckpointUsed, metrics: Mapping[str, MetricRecord], **others) -> Result:
    """A result of k-NN on the digits, unless `others` say something else."""
    fields = dict(
        status="ok",
        task="knn",
        protocol=ProtocolUsed(name="knn@dino", version=1, source="eval_knn.py"),
        metrics=dict(metrics),
        checkpoint=checkpoint,
        data=DataUsed(name="digits", url="digits:", images={"train": 1297, "val": 500}),
        seed=0,
        date="2026-01-02T03:04:05+00:00",
    )
    return Result(**fields | others)


def save_result(
    out: Path, found: Result, arrays: Mapping[str, np.ndarray] | None = None, log: str = ""
) -> StoredResult:
    """Write it to where a run writes it."""
    space = Workspace(
        cache=out, data="", seed=found.seed, limit=found.limit, precision=found.precision, decode=found.decode
    )
    path = result_path(out, found.checkpoint, found.data.name, result_stem(found.protocol, found.settings, space))
    write_result(path, found, arrays or {}, log)
    return StoredResult(path=path, result=found)


def any_text(draw: Random) -> str:
    """A text that harms somewhere, or any signs, those that are no text among them."""
    signs = [chr(draw.choice((draw.randrange(128), draw.randrange(0x110000)))) for _ in range(draw.randrange(8))]
    return draw.choice((draw.choice(EVIL), draw.choice(SIGNS), "".join(signs)))


def any_metric(draw: Random) -> MetricRecord:
    value = draw.choice((draw.uniform(0, 100), draw.uniform(-1e6, 1e6), 0.0, -0.0, 5e-324, 1e300))
    return MetricRecord(
        value=value,
        unit=draw.choice(("%", "", any_text(draw))),
        interval=draw.choice((None, (value - 1, value + 1))),
        higher_is_better=draw.choice((True, False, None)),
        deviation_of=draw.choice((None, any_text(draw))),
    )


def any_board(draw: Random) -> Leaderboard:
    """Some results of a few checkpoints under a few protocols, each with any metrics or none; any text is hostile."""
    names, columns = ([any_text(draw) for _ in range(draw.randint(1, 3))] for _ in range(2))
    results = []
    for number in range(draw.randrange(7)):
        metrics = {name: any_metric(draw) for name in columns if draw.random() < 0.7}
        place, text = draw.randrange(len(names)), any_text(draw)
        cost = TrainingCost(hours=draw.choice((None, draw.uniform(0, 1e4))), devices=draw.choice(("", any_text(draw))))
        used = made_checkpoint(names[place], place, method=text, source=text, architecture=text, training_cost=cost)
        results.append(
            made_result(
                used,
                metrics,
                status="ok" if metrics else "failed",
                message="" if metrics else text,
                protocol=ProtocolUsed(name=draw.choice(names), version=1, changes=draw.choice(({}, {text: text}))),
                data=DataUsed(name=draw.choice(names), url=text, images={"val": 2**70}),
                seed=number,
                facts={"warnings": [text, any_text(draw)], text: text},
                settings={text: [text, 1, None]},
            )
        )
    problems = [f"{result.message}: unreadable" for result in results[:1]]
    return made_leaderboard(results, problems, tied=draw.random() < 0.5)


def made_leaderboard(results: Sequence[Result], problems: Sequence[str] = (), tied: bool = False) -> Leaderboard:
    """The leaderboard of results below ROOT. tied: whether all checkpoints share the first place of every column."""
    leaderboard = leaderboard_of(results, problems)
    everyone = frozenset(checkpoint.key for checkpoint in leaderboard.rows)
    stored = [StoredResult(path=ROOT / f"{number}.json", result=result) for number, result in enumerate(results)]
    ties = dict.fromkeys(leaderboard.columns, everyone) if tied else {}
    return replace(leaderboard, ties=ties, results=stored, folder=ROOT)


def harmless(*texts: str) -> str:
    """The texts, after a look at every sign and line of them."""
    text = "".join(texts)
    assert not [sign for sign in text if not sign.isprintable() and sign != "\n"]
    assert not re.search(r"^([-|>#] ?)*FORGED", text, re.MULTILINE)
    return text
