"""`bench site`: the report of one or several records, as a page for any web host.

It is made from records alone, each of which is checked first, so that every number follows from a result file. Its
anchors depend on names and digests only, so that they can be cited.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import check_record, rerun_script
from bench.reports.card import CardSubject, read_config
from bench.reports.contents import contents, networks_of
from bench.reports.figures import TrainingLog, read_log
from bench.reports.leaderboard import leaderboard_of, with_ties
from bench.reports.page import figures_of, page_of
from bench.results.record import CheckpointUsed, read_result, result_files
from bench.results.store import StoredResult
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import CARD
from engine.files import read_text, write_atomic

MADE_BY = "Made by bench site"  # in the last sentence of the page (page.html)


def write_site(records: Sequence[Path], out: Path, title: str) -> Path:
    """Write the page of records to index.html in `out`, and return its path.

    ValueError for a record that does not agree with its results, and for an index.html that is no such page.
    """
    path = out / "index.html"
    if path.exists() and MADE_BY not in read_text(path):
        raise ValueError(f"{path} is not a page of bench site: choose a new folder for --out")
    for record in records:
        if differences := list(check_record(record)):
            raise ValueError(
                f"{record}: {len(differences)} differences from what its results give, first: {differences[0]}; "
                f"bench record --check {record} lists them"
            )
    write_atomic(path, site_page(records, title))
    return path


def site_page(records: Sequence[Path], title: str) -> str:
    """The HTML of a site."""
    results, record_of_checkpoint = merged_results(records)
    cache = PairedTestCache()  # every test is computed anew
    leaderboard = with_ties(leaderboard_of(stored.result for stored in results), results, cache)
    logs, texts = {}, {}
    for used, name in leaderboard.names.items():
        record = record_of_checkpoint[used.key]
        own_results = [
            stored.result
            for stored in results
            if stored.result.status == "ok" and stored.result.checkpoint.key == used.key
        ]
        folder = record / "checkpoints" / used.unique_name
        config = read_config(folder) if (folder / "config.json").is_file() else None
        subject = CardSubject(used=used, config=config)
        texts[name] = {"Commands that reproduce these numbers": rerun_script(own_results, {used.key: subject})}
        if (card := record / "cards" / used.unique_name / CARD).is_file():
            texts[name]["Model card"] = read_text(card)
        if lines := training_log(record, used):
            logs[name] = lines
    report = contents(leaderboard, networks_of(leaderboard, cache))
    names = [record.resolve().name for record in records]
    return page_of(report, figures_of(report, logs), title=title, texts=texts, records=names)


def merged_results(records: Sequence[Path]) -> tuple[list[StoredResult], dict[Key, Path]]:
    """The results of all records, and the record that holds each checkpoint.

    Of results with the same checkpoint, group and seed only the newest is returned.
    """
    newest: dict[tuple[Any, ...], StoredResult] = {}
    record_of_checkpoint: dict[Key, Path] = {}
    for record in records:
        for path in result_files(record):
            stored = StoredResult(path=path, result=read_result(path))
            result = stored.result
            record_of_checkpoint.setdefault(result.checkpoint.key, record)
            identity = (result.checkpoint.key, result.group, result.seed, result.status)
            if identity not in newest or newest[identity].result.date < result.date:
                newest[identity] = stored
    return list(newest.values()), record_of_checkpoint


def training_log(record: Path, used: CheckpointUsed) -> TrainingLog:
    """The log of a checkpoint's training in a record; empty if the record has none."""
    return read_log(record / "checkpoints" / used.unique_name / "log.jsonl")
