"""A report as one HTML file without network access or further files; names, messages and other input are escaped."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.leaderboards.tables import Leaderboard, read_leaderboard
from bench.reporting.contents import ReportContents, common_notes, contents, grounds, headline, networks_of, verdict
from bench.reporting.figures import (
    ALONG,
    NOTES,
    board_styles,
    log_of,
    robustness_figures,
    scatter_figures,
    styles_of,
    svg_of,
    sweep_figures,
    training_figure,
    training_logs,
)
from bench.reporting.saved_pictures import report_pictures
from bench.reporting.views import views_of
from bench.results.record import end_text, time_unit
from bench.statistics.significance import LETTERS, p_value_cache
from engine.printing import did_you_mean, html_template, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent


def report_page(out: Path, published: bool = False, pictures: bool = True) -> str:
    """The HTML report on all results in a folder.

    published: add rows with papers' numbers of the same protocols. pictures: add validation images that are on this
    machine, and pictures that `bench visualize` drew of the same checkpoints into this folder.
    """
    leaderboard = read_leaderboard(out, published)
    report = read_contents(leaderboard, out)
    drawn = report_pictures(out, report) if pictures else None
    views = views_of(report, leaderboard.results, out / "cache", pictures)
    return page_of(report, figures_of(report), views, drawn)


def read_contents(leaderboard: Leaderboard, out: Path) -> ReportContents:
    """The contents of a report on the leaderboard of a folder; earlier paired tests come from OUT/cache."""
    cache = p_value_cache(out)
    networks = networks_of(leaderboard, cache)
    cache.save({stored.identity for stored in leaderboard.results})
    return contents(leaderboard, networks)


def paper_figures(
    kind: Literal["curves", "scatter"],
    out: Path | None,
    runs: Sequence[str] = (),
    along: str = "epoch",
    width: float = 6.75,
) -> "dict[str, Figure]":
    """The figures of a report in a width for a paper.

    Args:
        kind: "curves": k-NN over k, low-shot over shots, trainings over `along`; "scatter": accuracy against the costs
            of networks, and robustness against clean accuracy.
        out: folder of results.
        runs: folders of further pretrainings.
        along: x-axis of the training curves, a key of ALONG.
        width: in inches.

    Returns:
        Name -> figure. ValueError if there is nothing to draw.
    """
    if along not in ALONG:
        raise ValueError(f"--along {along}{did_you_mean(along, list(ALONG))}")
    report = read_contents(read_leaderboard(out), out) if out else None
    if kind == "scatter":
        figures = scatter_figures(report, width) | robustness_figures(report, width) if report else {}
    else:
        figures = sweep_figures(report, width) if report else {}
        trained = {Path(run): log_of(Path(run) / "log.jsonl") for run in runs}
        if missing := [run for run, lines in trained.items() if not lines]:
            problem = "has no log.jsonl" if missing[0].exists() else "does not exist"
            raise ValueError(f"{missing[0]} {problem}: name folders of `bench pretrain --out`")
        logs = (training_logs(report) if report else {}) | {run.name: lines for run, lines in trained.items()}
        styles_on_board = board_styles(report) if report else {}
        new_names = [name for name in logs if name not in styles_on_board]
        styles = styles_of([*styles_on_board, *new_names]) | styles_on_board
        training = training_figure(logs, styles, along, width)
        figures |= {"pretraining": training} if training else {}
    if not figures:
        raise ValueError(f"nothing to draw for {kind}: give --results with two networks, or runs of `bench pretrain`")
    return figures


def figures_of(
    report: ReportContents, logs: Mapping[str, Sequence[Mapping[str, float]]] | None = None
) -> dict[str, str]:
    """Heading -> SVG of each figure of a report: sweeps, accuracy against cost, robustness, pretraining curves.

    logs: name -> lines of its training's log; None: those found on this disk.
    """
    figures = sweep_figures(report) | scatter_figures(report) | robustness_figures(report)
    drawings = {capitalized(name): svg_of(figure, capitalized(name)) for name, figure in figures.items()}
    training = training_figure(training_logs(report) if logs is None else logs, board_styles(report))
    return drawings | ({"Pretraining": svg_of(training, "curves of the pretrainings")} if training else {})


def capitalized(text: str) -> str:
    """The text with its first letter in upper case; the others stay as they are."""
    return text[:1].upper() + text[1:]


def page_of(
    report: ReportContents,
    figures: Mapping[str, str],
    views: Mapping[str, Mapping[str, Any]],
    pictures: Mapping[str, Any] | None = None,
) -> str:
    """HTML of a report. figures: SVG by heading. views: details below a table (`views_of`), by its anchor. pictures:
    those of `bench visualize` (`report_pictures`)."""
    return rendered(
        "page.html",
        report=report,
        results=_printable_results(report),
        views=views,
        figures=figures,
        notes={capitalized(name): note for name, note in NOTES.items()},
        pictures=pictures or {"shown": (), "left_out": (), "commands": ()},
        links={},
    )


def overview_frame(leaderboard: Leaderboard) -> str:
    """The overview for a notebook: a page in an iframe, so that its style does not affect the notebook."""
    from html import escape

    report = read_contents(leaderboard, leaderboard.folder.parent)
    page = rendered("notebook.html", report=report, results=_printable_results(report))
    height = 540 + 36 * len(report.overview)
    return f'<iframe title="Leaderboard" width="100%" height="{height}" srcdoc="{escape(page)}"></iframe>'


def _printable_results(report: ReportContents) -> dict[str, list]:
    return packed([{name: printable(value) for name, value in result.items()} for result in report.results])


def rendered(template: str, **values: Any) -> str:
    """Render a template of this folder. The page's content security policy allows no style or script but its own.

    `svg` in a template marks figures as safe: matplotlib escapes their texts.
    """
    from markupsafe import Markup

    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    policy = {"style_hash": policy_hash(style), "script_hash": policy_hash(script)}
    page = html_template((HERE / template).read_text(encoding="utf-8"), HERE)
    functions = (common_notes, end_text, grounds, headline, letter_ranges, time_unit, verdict)
    named = {function.__name__: function for function in functions}
    return page.render(style=Markup(style), script=Markup(script), svg=Markup, **named, **policy, **values)


def letter_ranges(letters: str) -> str:
    """Letters with runs of three or more abbreviated: `abcf` -> `a-cf`."""
    ranges: list[str] = []
    for letter in letters:
        if ranges and LETTERS.index(letter) == LETTERS.index(ranges[-1][-1]) + 1:
            ranges[-1] += letter
        else:
            ranges.append(letter)
    return "".join(run if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in ranges)


def policy_hash(text: str) -> Any:
    """Hash of a script or style for the page's content security policy."""
    from markupsafe import Markup

    return Markup("sha256-" + b64encode(sha256(text.encode()).digest()).decode())


def packed(results: Sequence[Mapping[str, str]]) -> dict[str, list]:
    """Results with the same keys in a compact form: names (keys), texts (distinct values), and rows (for each result,
    indices into texts). This takes an eighth of the bytes for 500 checkpoints under ten protocols."""
    names = list(results[0]) if results else []
    indices: dict[str, int] = {}
    rows = [[indices.setdefault(result[name], len(indices)) for name in names] for result in results]
    return {"names": names, "texts": list(indices), "rows": rows}
