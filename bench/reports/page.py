"""A report as one HTML file without network access or further files; names, messages and other input are escaped."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.reports.contents import ReportContents, ReportTable, common_notes, evidence, headline, read_contents, verdict
from bench.reports.details import details_by_table
from bench.reports.drawing import svg_of
from bench.reports.figures import (
    NOTES,
    TrainingLog,
    board_styles,
    robustness_figures,
    scatter_figures,
    sweep_figures,
    training_figure,
    training_logs,
)
from bench.reports.leaderboard import Leaderboard, read_leaderboard
from bench.results.record import end_text, time_unit
from bench.statistics.significance import LETTERS
from engine.printing import html_template, printable

HERE = Path(__file__).parent


def report_page(out: Path, published: bool = False, pictures: bool = True, introduction: str = "") -> str:
    """The HTML report on all results in a folder.

    published: add rows with papers' numbers of the same protocols. pictures: add validation images that are on this
    machine. introduction: a paragraph below the title.
    """
    leaderboard = read_leaderboard(out, published)
    report = read_contents(leaderboard, out)
    details = details_by_table(report, leaderboard.results, out / "cache", pictures)
    return page_of(report, figures_of(report), details, introduction=introduction)


def figures_of(report: ReportContents, logs: Mapping[str, TrainingLog] | None = None) -> dict[str, str]:
    """Heading -> SVG of each figure of a report: sweeps, accuracy against cost, robustness, pretraining curves.

    logs: name -> log of its training; None: those on this machine.
    """
    figures = sweep_figures(report) | scatter_figures(report) | robustness_figures(report)
    svgs = {capitalized(name): svg_of(figure, capitalized(name)) for name, figure in figures.items()}
    if training := training_figure(training_logs(report) if logs is None else logs, board_styles(report)):
        svgs["Pretraining"] = svg_of(training, "curves of the pretrainings")
    return svgs


def capitalized(text: str) -> str:
    """The text with its first letter in upper case; unlike str.capitalize, other letters keep their case."""
    return text[:1].upper() + text[1:]


def page_of(
    report: ReportContents,
    figures: Mapping[str, str] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    title: str = "How good are these checkpoints?",
    texts: Mapping[str, Mapping[str, str]] | None = None,
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
        texts: checkpoint -> heading -> text that is shown with its facts.
        introduction: a paragraph below the title.
        record: name of the record that the page was made from.
        back: address of the page that links here.
    """
    from markupsafe import Markup

    # The page's content security policy allows no style or script but its own. `svg` marks figures as safe: matplotlib
    # escapes their texts.
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    functions = (common_notes, end_text, evidence, headline, letter_ranges, set_spans, time_unit, verdict)
    results = [{name: printable(value) for name, value in result.items()} for result in report.results]
    return html_template((HERE / "page.html").read_text(encoding="utf-8"), HERE).render(
        **{function.__name__: function for function in functions},
        svg=Markup,
        style=Markup(style),
        script=Markup(script),
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        report=report,
        results=packed(results),
        details_by_table=details or {},
        figures=figures or {},
        notes={capitalized(name): note for name, note in NOTES.items()},
        title=title,
        texts=texts or {},
        introduction=introduction,
        record=record,
        back=back,
    )


def tables_page(leaderboard: Leaderboard) -> str:
    """The page of a leaderboard without figures, for notebooks and as one of its formats."""
    return page_of(read_contents(leaderboard, leaderboard.folder.parent))


def set_spans(tables: Sequence[ReportTable]) -> list[tuple[str, int]]:
    """Image set and number of tables of each run of tables of one set."""
    return [(name, len(list(run))) for name, run in groupby(table.result.data.name for table in tables)]


def letter_ranges(letters: str) -> str:
    """Letters with runs of three or more abbreviated: `abcf` -> `a-cf`."""
    runs: list[str] = []
    for letter in letters:
        if runs and LETTERS.index(letter) == LETTERS.index(runs[-1][-1]) + 1:
            runs[-1] += letter
        else:
            runs.append(letter)
    return "".join(run if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs)


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
