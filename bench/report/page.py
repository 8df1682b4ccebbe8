"""A report as one HTML file: no network, no other file; everything from outside is escaped."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.leaderboard.files import level_in
from bench.published.rows import with_published
from bench.report.contents import ReportContents, ShownTable, contents
from bench.report.figures import cost_figure, log_of, training_figure
from bench.report.images import ImageView, image_view, on_this_machine
from bench.results.board import board_of, group_of
from bench.statistics.matching import Measured, read_measured
from checkpoints.training_cost import COST_UNITS
from engine.printing import printable

BEST = 8  # checkpoints of a table whose accuracy by class is shown
HERE = Path(__file__).parent
COSTS = ("hours", "gflop_per_image", "memory_gib")  # of a pretraining, the first that two checkpoints have is drawn


def report_page(out: Path, published: bool = False, pictures: bool = True) -> str:
    """The page of all results in a folder.

    published: with papers' numbers of the same protocols, marked. pictures: with validation images, where they are on
    this machine.
    """
    measured, problems = read_measured(out)
    results = [each.result for each in measured]
    board = board_of(results, problems)
    level = level_in(out, board, measured)
    found = contents(with_published(board, results) if published else board, measured, level)
    views = views_of(found, measured) if pictures else {}
    return page_of(found, figures_of(found), views)


def views_of(report: ReportContents, measured: Sequence[Measured]) -> dict[str, ImageView]:
    """Anchor of a table -> what can be seen of its images: of the first seed of its eight best checkpoints."""
    by_place: dict[tuple[str, str], Measured] = {}
    for each in measured:
        if each.result.status == "ok":
            by_place.setdefault((group_of(each.result), each.result.checkpoint.digest), each)
    digests = {each["name"]: str(each["digest"]) for each in report.checkpoints}
    opened, found = on_this_machine(), {}
    for table in report.tables:
        rows = [row.name for row in table.rows if row.kind != "published"][:BEST]
        own = {name: by_place[table.group, digests[name]] for name in rows if (table.group, digests[name]) in by_place}
        views = (image_view(own, metric, opened) for metric in table.metrics) if own else ()
        if view := next(filter(None, views), None):  # of the first metric that is kept for each image
            found[table.anchor] = view
    return found


def figures_of(report: ReportContents) -> dict[str, str]:
    """Heading -> SVG of what is drawn besides tables: cost against accuracy, curves of trainings found on this disk."""
    found = {}
    for table in report.tables:
        for cost in COSTS:
            points = _costs(report, table, cost)
            if len(points) > 1:
                title = f"{table.group}: {table.metrics[0]} against the cost of pretraining"
                found[title] = cost_figure(points, COST_UNITS[cost], table.metrics[0])
                break
    logs = {
        str(each["name"]): lines
        for each in report.checkpoints
        if (lines := log_of(Path(str(each["source"])).parent / "log.jsonl"))
    }
    if curves := training_figure(logs) if logs else "":
        found["Pretraining"] = curves
    return found


def _costs(report: ReportContents, table: ShownTable, cost: str) -> dict[str, tuple[float, float]]:
    spent = {each["name"]: each["cost"].get(cost) for each in report.checkpoints}  # type: ignore[attr-defined]
    numbers = {row.name: row.numbers[0].value for row in table.rows}
    return {
        name: (spent[name], value)
        for name, value in numbers.items()
        if spent.get(name) is not None and value is not None
    }


def page_of(report: ReportContents, figures: Mapping[str, str], views: Mapping[str, ImageView]) -> str:
    """HTML of a report. figures: SVG by heading. views: of images, by the anchor of their table."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    return environment.get_template("page.html").render(
        report=report,
        results=[{name: printable(value) for name, value in each.items()} for each in report.results],
        views=views,
        figures={title: Markup(svg) for title, svg in figures.items()},
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
    )
