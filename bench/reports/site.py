"""`bench site`: the report of each of one or several records, as pages for any web host.

They are made from records alone, each of which is checked first, so that every number follows from a result file. Two
records never share a table: their budgets, images and trainings differ. Anchors depend on names and digests only, so
that they can be cited.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from bench.reports.contents import contents
from bench.reports.figures import TrainingLog, read_log, updates_in
from bench.reports.leaderboard import leaderboard_with_ties
from bench.reports.page import figures_of, page_of
from bench.reports.record import check_record, recorded_results
from bench.results.record import CheckpointUsed
from bench.statistics.significance import PairedTestCache
from engine.errors import UserError
from engine.files import read_json, read_text, write_atomic

MADE_BY = "Made by bench site"  # in the last sentence of a page (page.html)


def write_site(records: Sequence[Path], out: Path, title: str = "", back: str = "") -> list[Path]:
    """Write a page for each record into `out`, and return their paths: index.html for one record, else NAME.html.

    ValueError for a record that does not agree with its results, and for a file that is no such page.

    title: of the pages; "" for that of the record's text (`about`). back: address of the page that links to these.
    """
    names = [record.resolve().name for record in records]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError("records", f"two are called {twice}: rename one")
    pages = {
        out / ("index.html" if len(records) == 1 else f"{name}.html"): record
        for name, record in zip(names, records, strict=True)
    }
    for path in pages:
        if path.exists() and MADE_BY not in read_text(path):
            raise UserError("out", f"its {path.name} is not a page of bench site: choose a new folder", out)
    for record in records:
        if differences := list(check_record(record)):
            text = f"{len(differences)} differences from what its results give, first: {differences[0]}"
            raise UserError("records", f"{text}; bench record --check {record} lists them", record)
    for path, record in pages.items():
        write_atomic(path, site_page(record, title, back))
    return list(pages)


def about(record: Path) -> tuple[str, str]:
    """Title and first paragraph of the text beside a record, RECORD.md, as plain text; the record's name without it."""
    path = record.resolve().with_suffix(".md")
    if not path.is_file():
        return record.resolve().name, ""
    title, _, text = read_text(path).strip().partition("\n\n")
    paragraph = text.partition("\n\n")[0].replace("\n", " ")
    return title.removeprefix("# "), re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)


def site_page(record: Path, title: str = "", back: str = "") -> str:
    """The HTML of a record's page."""
    cache = PairedTestCache()  # every test is computed anew
    leaderboard = leaderboard_with_ties(recorded_results(record)[0], cache)
    logs = {name: log for used, name in leaderboard.names.items() if (log := training_log(record, used))}
    report = contents(leaderboard, cache, starts_of(record), updates_in(logs))
    own_title, introduction = about(record)
    return page_of(
        report,
        figures_of(report, logs),
        title=title or own_title,
        introduction=introduction,
        record=record.resolve().name,
        back=back,
    )


def starts_of(record: Path) -> dict[str, str]:
    """Network -> its initial weights by name, from the file beside a record, RECORD.json; empty without it."""
    path = record.resolve().with_suffix(".json")
    return dict(read_json(path).get("starts", {})) if path.is_file() else {}


def training_log(record: Path, used: CheckpointUsed) -> TrainingLog:
    """The log of a checkpoint's training in a record; empty if the record has none."""
    return read_log(record / "checkpoints" / used.unique_name / "log.jsonl")
