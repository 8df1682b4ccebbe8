"""Static pages of one or several records, for any host: an overview, and a page for each checkpoint and protocol.

They are made from records alone, each of which is checked first, so that every number follows from a result file. No
page makes a request; links and anchors depend on names and digests, so that they can be cited.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.leaderboards.tables import Leaderboard, cell_text, leaderboard_of, with_ties
from bench.reporting.contents import ReportContents, ReportTable, competing, contents, networks_of
from bench.reporting.figures import board_styles, log_of, svg_of, training_figure
from bench.reporting.page import figures_of, packed, rendered
from bench.results.record import CheckpointUsed, read_result, result_files
from bench.results.store import StoredResult
from bench.sharing.card import CardSubject, read_config
from bench.sharing.record import check_record, publication_of, rerun_script
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import CARD
from engine.files import digest, folder_atomic, write_atomic
from engine.printing import printable

ABOUT = "site.json"  # marks a folder that may be replaced


def write_site(records: Sequence[Path], out: Path, title: str) -> int:
    """Write the pages of records into `out`, in one step; how many there are.

    ValueError for a record that does not agree with its results, and where `out` holds something else than a site.
    """
    if out.exists() and not (out / ABOUT).is_file() and (not out.is_dir() or any(out.iterdir())):
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
        write_atomic(temporary / ABOUT, json.dumps(about, indent=1) + "\n")
    return len(pages)


def site_pages(records: Sequence[Path], title: str) -> dict[str, str]:
    """Path in the site -> HTML."""
    results, places = merged_results(records)
    cache: PairedTestCache[float] = PairedTestCache(Path(os.devnull), float)  # nothing that was kept is believed
    leaderboard = with_ties(leaderboard_of(stored.result for stored in results), results, cache)
    report = contents(leaderboard, networks_of(leaderboard, cache))
    links = {leaderboard.names[used]: f"checkpoints/{slug(*used.key)}.html" for used in leaderboard.rows}
    links |= {table.group: f"protocols/{slug(table.group)}.html" for table in report.tables}
    confirmed = {
        leaderboard.names[used]: url
        for used in leaderboard.rows
        if used.key in places and (url := publication_of(places[used.key]).verified_by.get(used.name))
    }
    shared = {
        "report": report,
        "confirmed": confirmed,
        "records": [record.resolve().name for record in records],
        "links": links,
        "figures": {},
        "root": "",
    }

    def page(kind: str, heading: str, **values: Any) -> str:
        numbers = [
            {name: printable(value) for name, value in result.items()}
            for result in values.pop("results", report.results)
        ]
        return rendered("site.html", **shared | {"kind": kind, "title": heading, "results": packed(numbers)} | values)

    logs = {
        leaderboard.names[used]: lines
        for used in leaderboard.rows
        if used.key in places and (lines := log_of(places[used.key] / "checkpoints" / used.unique_name / "log.jsonl"))
    }
    pages = {"index.html": page("index", title, figures=figures_of(report, logs))}
    upwards = {name: f"../{link}" for name, link in links.items()}
    for table in report.tables:
        shown, own = with_own_results(table, report)
        pages[links[table.group]] = page("protocol", table.group, table=shown, results=own, links=upwards, root="../")
    for used in leaderboard.rows:
        values = checkpoint_page(leaderboard, used, report, places[used.key])
        name = leaderboard.names[used]
        training = training_figure({name: logs[name]}, board_styles(report)) if name in logs else None
        values["figures"] = {"Pretraining": svg_of(training, "curves of the pretraining")} if training else {}
        pages[links[name]] = page("checkpoint", name, **values, links=upwards, root="../")
    return pages


def merged_results(records: Sequence[Path]) -> tuple[list[StoredResult], dict[Key, Path]]:
    """Results of all records, the newest of those that measured the same, and the record that holds each checkpoint."""
    newest: dict[tuple[Any, ...], StoredResult] = {}
    places: dict[Key, Path] = {}
    for record in records:
        for path in result_files(record):
            stored = StoredResult(path=path, result=read_result(path))
            result = stored.result
            places.setdefault(result.checkpoint.key, record)
            same = (result.checkpoint.key, result.group, result.seed, result.status)
            if same not in newest or newest[same].result.date < result.date:
                newest[same] = stored
    return list(newest.values()), places


def with_own_results(table: ReportTable, report: ReportContents) -> tuple[ReportTable, list[Mapping[str, object]]]:
    """A table whose numbers point into a list of its own results alone, and that list."""
    used = sorted({at for row in table.rows for number in row.numbers for at in number.results})
    places = {at: place for place, at in enumerate(used)}
    rows = tuple(
        replace(
            row,
            numbers=tuple(
                replace(number, results=tuple(places[at] for at in number.results)) for number in row.numbers
            ),
        )
        for row in table.rows
    )
    return replace(table, rows=rows), [report.results[at] for at in used]


def checkpoint_page(
    leaderboard: Leaderboard, used: CheckpointUsed, report: ReportContents, record: Path
) -> dict[str, Any]:
    """What the page of a checkpoint holds: its numbers, what it is, its card and the commands that measured it."""
    name = leaderboard.names[used]
    good = [stored.result for stored in leaderboard.results if stored.result.status == "ok"]
    own = [at for at, result in enumerate(good) if result.checkpoint.key == used.key]
    cells, protocols = leaderboard.rows[used].items(), []
    for table in report.tables:
        if row := next((row for row in table.rows if row.name == name), None):
            protocols.append(
                {
                    "group": table.group,
                    "rank": f"rank {row.rank} of {len(competing(table))}" if row.rank else "",
                    "numbers": [(metric, cell_text(cell)) for (group, metric), cell in cells if group == table.group],
                    "results": [place for place, at in enumerate(own) if good[at].group == table.group],
                }
            )
    folder = record / "checkpoints" / used.unique_name
    config = read_config(folder) if (folder / "config.json").is_file() else None
    card = record / "cards" / used.unique_name / CARD
    facts = next(facts for facts in report.checkpoints if facts["name"] == name)
    told = {key: value for key, value in facts.items() if key not in ("name", "kind", "cost") and value}
    return {
        "protocols": protocols,
        "results": [report.results[at] for at in own],
        "facts": told,
        "card": card.read_text(encoding="utf-8") if card.is_file() else "",
        "commands": rerun_script([good[at] for at in own], {used.key: CardSubject(used=used, config=config)}),
        "anchor": slug,
        "multiline": _multiline,
    }


def slug(*words: str) -> str:
    """A name for a file or an anchor that differs where the words do: `digits-knn@dino-3f2a91bc`."""
    readable = re.sub(r"[^A-Za-z0-9._@-]+", "-", words[0]).strip("-.")[:60]
    return f"{readable}-{digest(list(words))[:8]}"


def _multiline(text: str) -> Any:
    """Escaped lines, each printable."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(printable(line)) for line in text.split("\n"))
