"""A report as one HTML file: no network, no other file; everything from outside is escaped."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.leaderboards.tables import read_leaderboard
from bench.reporting.contents import ReportContents, ReportTable, contents, grounds, headline, networks_of, verdict
from bench.reporting.figures import cost_figure, in_unit, log_of, training_figure
from bench.reporting.saved_pictures import report_pictures
from bench.reporting.views import views_of
from bench.statistics.significance import p_value_cache
from checkpoints.training_cost import COST_UNITS
from engine.printing import html_template, printable

HERE = Path(__file__).parent
COSTS = ("hours", "gflop_per_image", "memory_gib")  # of a pretraining, the first that two checkpoints have is drawn


def report_page(out: Path, published: bool = False, pictures: bool = True) -> str:
    """The page of all results in a folder.

    published: with papers' numbers of the same protocols, marked. pictures: with validation images, where they are on
    this machine, and with what `bench visualize` drew of the same checkpoints into this folder.
    """
    leaderboard = read_leaderboard(out, published)
    cache = p_value_cache(out)
    networks = networks_of(leaderboard, cache)
    cache.save({stored.identity for stored in leaderboard.results})
    report, results = contents(leaderboard, networks), [stored.result for stored in leaderboard.results]
    drawn = report_pictures(out, report, results) if pictures else None
    views = views_of(report, leaderboard.results, out / "cache", pictures)
    return page_of(report, figures_of(report), views, drawn)


def figures_of(report: ReportContents) -> dict[str, str]:
    """Heading -> SVG of what is drawn besides tables: cost against accuracy, curves of trainings found on this disk."""
    figures = {}
    for table in report.tables:
        for cost in COSTS:
            points = _costs(report, table, cost)
            if len(points) > 1:
                title = f"{table.group}: {table.metrics[0]} against the cost of pretraining"
                figures[title] = cost_figure(
                    points, f"pretraining, {COST_UNITS[cost]}", in_unit(table.metrics[0], table.unit)
                )
                break
    logs = {
        str(checkpoint["name"]): lines
        for checkpoint in report.checkpoints
        if checkpoint["kind"] == "measured" and (lines := log_of(Path(str(checkpoint["source"])).parent / "log.jsonl"))
    }
    if curves := training_figure(logs) if logs else "":
        figures["Pretraining"] = curves
    return figures


def _costs(report: ReportContents, table: ReportTable, cost: str) -> dict[str, tuple[float, float]]:
    spent = {c["name"]: c["cost"].get(cost) for c in report.checkpoints}  # type: ignore[attr-defined]
    numbers = {row.name: row.numbers[0].value for row in table.rows}
    return {
        name: (spent[name], value)
        for name, value in numbers.items()
        if spent.get(name) is not None and value is not None
    }


def page_of(
    report: ReportContents,
    figures: Mapping[str, str],
    views: Mapping[str, Mapping[str, Any]],
    pictures: Mapping[str, Any] | None = None,
) -> str:
    """HTML of a report. figures: SVG by heading. views: what is beside a table, by its anchor. pictures: those of
    `bench visualize` (`report_pictures`)."""
    from markupsafe import Markup

    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    template = html_template((HERE / "page.html").read_text(encoding="utf-8"), HERE)
    return template.render(
        report=report,
        headline=headline(report),
        grounds=grounds(report),
        verdict=verdict,
        results=packed([{name: printable(value) for name, value in result.items()} for result in report.results]),
        views=views,
        figures=figures,
        pictures=pictures or {"shown": (), "left_out": (), "command": ()},
        svg=Markup,  # of figures, whose texts matplotlib escapes
        style=Markup(style),
        style_hash=policy_hash(style),  # no other style counts, and no other script runs
        script=Markup(script),
        script_hash=policy_hash(script),
    )


def policy_hash(text: str) -> Any:
    """A script or style as a page's content security policy names it."""
    from markupsafe import Markup

    return Markup("sha256-" + b64encode(sha256(text.encode()).digest()).decode())


def packed(results: Sequence[Mapping[str, str]]) -> dict[str, list]:
    """Texts under the same names, each different text once: names, texts, and the places of each result's texts. For
    500 checkpoints under ten protocols an eighth of the bytes."""
    names = list(results[0]) if results else []
    places: dict[str, int] = {}
    rows = [[places.setdefault(result[name], len(places)) for name in names] for result in results]
    return {"names": names, "texts": list(places), "rows": rows}
