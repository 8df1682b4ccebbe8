"""A report as one HTML file without network access or further files; names, messages and other input are escaped."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.reports.contents import (
    ReportContents,
    ReportTable,
    compared_with_pixels,
    contents,
    headline,
    provenance,
    verdict,
)
from bench.reports.details import details_by_table
from bench.reports.drawing import svg_of
from bench.reports.figures import TrainingLog, curve_figures, training_logs, updates_in
from bench.reports.leaderboard import Leaderboard, cell_text, quantity, read_leaderboard, troubles
from bench.results.record import CheckpointUsed, end_text
from bench.statistics.significance import paired_tests
from engine.printing import html_template, printable

HERE = Path(__file__).parent
MAX_WITH_STARTS = 3  # up to so many trained networks, rows of initial weights are shown from the beginning


def report_page(out: Path, published: bool = False, pictures: bool = True, introduction: str = "") -> str:
    """The HTML report on all results in a folder.

    published: add rows with papers' numbers of the same protocols. pictures: add validation images that are on this
    machine. introduction: a paragraph below the title.
    """
    leaderboard = read_leaderboard(out, published)
    logs = training_logs(leaderboard)
    report = contents_of(leaderboard, updates_in(logs))
    details = details_by_table(report, out / "cache", pictures)
    return page_of(report, figures_of(report, logs), details, introduction=introduction)


def contents_of(leaderboard: Leaderboard, updates: Mapping[str, int] | None = None) -> ReportContents:
    """The contents of a report on the leaderboard of a folder; earlier paired tests are read from OUT/cache."""
    cache = paired_tests(leaderboard.folder.parent)
    report = contents(leaderboard, cache, updates=updates)
    cache.save({stored.identity for stored in leaderboard.results})
    return report


def figures_of(report: ReportContents, logs: Mapping[str, TrainingLog]) -> dict[str, str]:
    """Heading -> SVG of each figure of a report below its tables. logs: name -> log of its training."""
    figures = curve_figures(report, logs)
    return {name[:1].upper() + name[1:]: svg_of(figure, name) for name, figure in figures.items()}


def page_of(
    report: ReportContents,
    figures: Mapping[str, str] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    title: str = "How good are these checkpoints?",
    introduction: str = "",
    record: str = "",
    back: str = "",
) -> str:
    """The HTML of a report.

    Args:
        report: its contents.
        figures: heading -> SVG (`figures_of`).
        details: anchor of a table -> what is shown below it (`details_by_table`).
        title: of the page.
        introduction: a paragraph below the title.
        record: name of the record that the page was made from.
        back: address of the page that links here.
    """
    from markupsafe import Markup

    def results_button(group: str, used: CheckpointUsed, text: str) -> Any:
        """A number as a button that shows the provenance of its results."""
        indices = report.sources.get((group, used.key))
        button = Markup('<button type="button" data-results="{}">{}</button>')
        return button.format(" ".join(map(str, indices)), printable(text)) if indices else text

    # The page's content security policy allows no style or script but its own. `svg` marks figures as safe: matplotlib
    # escapes their texts.
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    functions = (cell_text, compared_with_pixels, end_text, headline, quantity, results_button, set_spans, verdict)
    results = [{name: printable(value) for name, value in provenance(result).items()} for result in report.results]
    return html_template((HERE / "page.html").read_text(encoding="utf-8"), HERE).render(
        **{function.__name__: function for function in functions},
        svg=Markup,
        style=Markup(style),
        script=Markup(script),
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        report=report,
        board=report.board,
        troubles=troubles(report.board),
        facts={checkpoint["name"]: checkpoint for checkpoint in report.checkpoints},
        costs=list(dict.fromkeys(name for checkpoint in report.checkpoints for name in checkpoint["cost"])),
        shows_starts=list(report.board.kinds.values()).count("measured") <= MAX_WITH_STARTS,
        initials={used for used, kind in report.board.kinds.items() if kind == "initial"},
        drawn=[table for table in report.tables if table.has_intervals and table.networks],
        results=packed(results),
        details_by_table=details or {},
        figures=figures or {},
        title=title,
        introduction=introduction,
        record=record,
        back=back,
    )


def tables_page(leaderboard: Leaderboard) -> str:
    """The page of a leaderboard without figures of curves, for notebooks and as one of its formats."""
    return page_of(contents_of(leaderboard))


def set_spans(tables: Sequence[ReportTable]) -> list[tuple[str, int]]:
    """Image set and number of tables of each run of tables of one set."""
    return [(name, len(list(run))) for name, run in groupby(table.result.data.name for table in tables)]


def policy_hash(text: str) -> Any:
    """Hash of a script or style for the page's content security policy."""
    from markupsafe import Markup

    return Markup("sha256-" + b64encode(sha256(text.encode()).digest()).decode())


def packed(results: Sequence[Mapping[str, str]]) -> dict[str, list]:
    """Results with the same keys in a compact form, an eighth of the bytes for 500 checkpoints under ten protocols.

    Returns:
        names: the keys. texts: the distinct values. rows: for each result and key, the index of its value in `texts`.
    """
    names = list(results[0]) if results else []
    indices: dict[str, int] = {}
    rows = [[indices.setdefault(result[name], len(indices)) for name in names] for result in results]
    return {"names": names, "texts": list(indices), "rows": rows}
