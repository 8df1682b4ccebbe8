"""Results that were never measured, for tests of whatever reads results: chosen by hand, or generated from a seed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from bench.reports.leaderboard import Leaderboard, leaderboard_of
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
from bench.statistics.significance import Ties
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


def made_checkpoint(name: str = "alpha", number: int = 0, **fields) -> CheckpointUsed:
    """A checkpoint whose digest is `number` in hexadecimal."""
    defaults = dict(digest=f"{number:064x}", architecture="ViT-S/16", parameters=22_000_000)
    return CheckpointUsed(name=name, **defaults | fields)


def made_metrics(values: Mapping[str, float], intervals=None, **fields) -> dict[str, MetricRecord]:
    """Metrics by name; `intervals` may lack some."""
    ends = intervals or {}
    return {name: MetricRecord(value=value, interval=ends.get(name), **fields) for name, value in values.items()}


def made_result(checkpoint: CheckpointUsed, metrics: Mapping[str, MetricRecord], **fields) -> Result:
    """A result, of k-NN on the digits unless `fields` say otherwise."""
    defaults = dict(
        status="ok",
        task="knn",
        protocol=ProtocolUsed(name="knn@dino", version=1, source="eval_knn.py"),
        metrics=dict(metrics),
        checkpoint=checkpoint,
        data=DataUsed(name="digits", url="digits:", images={"train": 1297, "val": 500}),
        seed=0,
        date="2026-01-02T03:04:05+00:00",
    )
    return Result(**defaults | fields)


def save_result(
    out: Path, result: Result, arrays: Mapping[str, np.ndarray] | None = None, log: str = ""
) -> StoredResult:
    """Write a result to the file where a run would write it."""
    space = Workspace(
        cache=out, data="", seed=result.seed, limit=result.limit, precision=result.precision, decode=result.decode
    )
    path = result_path(out, result.checkpoint, result.data.name, result_stem(result.protocol, result.settings, space))
    write_result(path, result, arrays or {}, log)
    return StoredResult(path=path, result=result)


def any_text(rng: Random) -> str:
    """A hostile text, or any code points, also those that are not printable."""
    signs = [chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(8))]
    return rng.choice((rng.choice(EVIL), rng.choice(SIGNS), "".join(signs)))


def any_metric(rng: Random) -> MetricRecord:
    value = rng.choice((rng.uniform(0, 100), rng.uniform(-1e6, 1e6), 0.0, -0.0, 5e-324, 1e300))
    return MetricRecord(
        value=value,
        unit=rng.choice(("%", "", any_text(rng))),
        interval=rng.choice((None, (value - 1, value + 1))),
        higher_is_better=rng.choice((True, False, None)),
        deviation_of=rng.choice((None, any_text(rng))),
    )


def any_board(rng: Random) -> Leaderboard:
    """Some results of a few checkpoints under a few protocols, with any metrics or none; every text may be hostile."""
    names, columns = ([any_text(rng) for _ in range(rng.randint(1, 3))] for _ in range(2))
    results = []
    for number in range(rng.randrange(7)):
        metrics = {name: any_metric(rng) for name in columns if rng.random() < 0.7}
        index, text = rng.randrange(len(names)), any_text(rng)
        cost = TrainingCost(hours=rng.choice((None, rng.uniform(0, 1e4))), devices=rng.choice(("", any_text(rng))))
        checkpoint = made_checkpoint(
            names[index], index, method=text, source=text, architecture=text, training_cost=cost
        )
        results.append(
            made_result(
                checkpoint,
                metrics,
                status="ok" if metrics else "failed",
                message="" if metrics else text,
                protocol=ProtocolUsed(name=rng.choice(names), version=1, changes=rng.choice(({}, {text: text}))),
                data=DataUsed(name=rng.choice(names), url=text, images={"val": 2**70}),
                seed=number,
                facts={"warnings": [text, any_text(rng)], text: text},
                settings={text: [text, 1, None]},
            )
        )
    problems = [f"{result.message}: unreadable" for result in results[:1]]
    return made_leaderboard(results, problems, tied=rng.random() < 0.5)


def made_leaderboard(results: Sequence[Result], problems: Sequence[str] = (), tied: bool = False) -> Leaderboard:
    """The leaderboard of results below ROOT. tied: whether all checkpoints share the first place of every column."""
    leaderboard = leaderboard_of(results, problems)
    everyone = frozenset(checkpoint.key for checkpoint in leaderboard.rows)
    stored = [StoredResult(path=ROOT / f"{number}.json", result=result) for number, result in enumerate(results)]
    ties = dict.fromkeys(leaderboard.candidates, Ties(everyone, everyone)) if tied else {}
    return replace(leaderboard, ties=ties, results=stored, folder=ROOT)


def harmless(*texts: str) -> str:
    """The texts joined. AssertionError if they hold a control character or a line that text of a result began."""
    text = "".join(texts)
    assert not [sign for sign in text if not sign.isprintable() and sign != "\n"]
    assert not re.search(r"^([-|>#] ?)*FORGED", text, re.MULTILINE)
    return text
