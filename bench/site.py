"""`bench site`: static pages of one or several records: an overview, and a page for each checkpoint and protocol.

Pages are made from records alone, each of which is checked first, so that every number follows from a result file. They
make no network requests. Links and anchors depend on names and digests only, so that they can be cited.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.record import check_record, rerun_script
from bench.reports.card import CardSubject, read_config
from bench.reports.contents import ReportContents, ReportTable, competing, contents, networks_of
from bench.reports.drawing import svg_of
from bench.reports.figures import board_styles, training_figure
from bench.reports.leaderboard import Leaderboard, cell_text, leaderboard_of, with_ties
from bench.reports.page import figures_of, packed, rendered
from bench.reports.training_logs import TrainingLog, read_log
from bench.results.record import CheckpointUsed, read_result, result_files
from bench.results.store import StoredResult
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import CARD
from engine.files import digest, folder_atomic, read_text, write_atomic
from engine.printing import printable

SITE_FILE = "site.json"  # marks a folder as a site, which a later site may replace


def write_site(records: Sequence[Path], out: Path, title: str) -> int:
    """Write the pages of records into `out`, which has either the old or the new site; returns the number of pages.

    ValueError for a record that does not agree with its results, and if `out` contains anything but a site.
    """
    if out.exists() and not (out / SITE_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something that is not a site: choose a new folder for --out")
    for record in records:
        if differences := list(check_record(record)):
            raise ValueError(
                f"{record}: {len(differences)} differences from what its results give, first: {differences[0]}; "
                f"bench record --check {record} lists them"
            )
    pages = site_pages(records, title)
    about = {"title": title, "records": [record.name for record in records], "pages": sorted(pages)}
    with folder_atomic(out) as temporary:
        for path, text in pages.items():
            write_atomic(temporary / path, text)
        write_atomic(temporary / SITE_FILE, json.dumps(about, indent=1) + "\n")
    return len(pages)


def site_pages(records: Sequence[Path], title: str) -> dict[str, str]:
    """Path in the site -> HTML."""
    results, record_of_checkpoint = merged_results(records)
    cache = PairedTestCache()  # every test is computed anew
    leaderboard = with_ties(leaderboard_of(stored.result for stored in results), results, cache)
    report = contents(leaderboard, networks_of(leaderboard, cache))
    links = {leaderboard.names[used]: f"checkpoints/{slug(*used.key)}.html" for used in leaderboard.rows}
    links |= {table.group: f"protocols/{slug(table.group)}.html" for table in report.tables}
    shared_values = {
        "report": report,
        "records": [record.resolve().name for record in records],
        "links": links,
        "figures": {},
        "root": "",
    }

    def page(kind: str, heading: str, **values: Any) -> str:
        results = [
            {name: printable(value) for name, value in result.items()}
            for result in values.pop("results", report.results)
        ]
        page_values = {"kind": kind, "title": heading, "results": packed(results)}
        return rendered("site.html", **shared_values | page_values | values)

    logs = {
        leaderboard.names[used]: lines
        for used in leaderboard.rows
        if used.key in record_of_checkpoint and (lines := training_log(record_of_checkpoint[used.key], used))
    }
    pages = {"index.html": page("index", title, figures=figures_of(report, logs))}
    links_from_folder = {name: f"../{link}" for name, link in links.items()}
    for table in report.tables:
        own_table, own_results = with_own_results(table, report)
        pages[links[table.group]] = page(
            "protocol", table.group, table=own_table, results=own_results, links=links_from_folder, root="../"
        )
    for used in leaderboard.rows:
        values = checkpoint_values(leaderboard, used, report, record_of_checkpoint[used.key])
        name = leaderboard.names[used]
        training = training_figure({name: logs[name]}, board_styles(report)) if name in logs else None
        values["figures"] = {"Pretraining": svg_of(training, "curves of the pretraining")} if training else {}
        pages[links[name]] = page("checkpoint", name, **values, links=links_from_folder, root="../")
    return pages


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


def with_own_results(table: ReportTable, report: ReportContents) -> tuple[ReportTable, list[Mapping[str, object]]]:
    """A table whose numbers index a list of only its own results, and this list."""
    indices = sorted({index for row in table.rows for number in row.numbers for index in number.results})
    new_index = {index: new for new, index in enumerate(indices)}
    rows = []
    for row in table.rows:
        numbers = [
            replace(number, results=tuple(new_index[index] for index in number.results)) for number in row.numbers
        ]
        rows.append(replace(row, numbers=tuple(numbers)))
    return replace(table, rows=tuple(rows)), [report.results[index] for index in indices]


def checkpoint_values(
    leaderboard: Leaderboard, used: CheckpointUsed, report: ReportContents, record: Path
) -> dict[str, Any]:
    """The template's values for the page of a checkpoint: numbers, facts, card and the commands that measured it."""
    name = leaderboard.names[used]
    results = [stored.result for stored in leaderboard.results if stored.result.status == "ok"]
    own_indices = [index for index, result in enumerate(results) if result.checkpoint.key == used.key]
    cells, protocols = leaderboard.rows[used].items(), []
    for table in report.tables:
        if row := next((row for row in table.rows if row.name == name), None):
            protocols.append(
                {
                    "group": table.group,
                    "rank": f"rank {row.rank} of {len(competing(table))}" if row.rank else "",
                    "numbers": [(metric, cell_text(cell)) for (group, metric), cell in cells if group == table.group],
                    "results": [
                        number for number, index in enumerate(own_indices) if results[index].group == table.group
                    ],
                }
            )
    folder = record / "checkpoints" / used.unique_name
    config = read_config(folder) if (folder / "config.json").is_file() else None
    card = record / "cards" / used.unique_name / CARD
    facts = next(facts for facts in report.checkpoints if facts["name"] == name)
    return {
        "protocols": protocols,
        "results": [report.results[index] for index in own_indices],
        "facts": {key: value for key, value in facts.items() if key not in ("name", "kind", "cost") and value},
        "card": read_text(card) if card.is_file() else "",
        "commands": rerun_script(
            [results[index] for index in own_indices], {used.key: CardSubject(used=used, config=config)}
        ),
        "anchor": slug,
        "multiline": _multiline,
    }


def slug(*words: str) -> str:
    """A name for a file or an anchor, unique for these words by their digest: `digits-knn@dino-3f2a91bc`."""
    readable = re.sub(r"[^A-Za-z0-9._@-]+", "-", words[0]).strip("-.")[:60]
    return f"{readable}-{digest(list(words))[:8]}"


def _multiline(text: str) -> Any:
    """Text for HTML: escaped, unprintable characters replaced, line breaks kept."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(printable(line)) for line in text.split("\n"))
