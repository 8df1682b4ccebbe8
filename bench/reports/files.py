"""The files of a leaderboard, rebuilt from all results of a folder: CSV, Markdown, LaTeX, HTML and Parquet.

The Markdown page has a table with intervals for each group of comparable results. LaTeX has a booktabs table per
group, for `\\input`, with mean and standard deviation over seeds; it compiles with pdfLaTeX, XeLaTeX and LuaLaTeX, and
names and messages are escaped, so that no character of them acts as a command. Parquet has one row for every metric of
every result file, for DuckDB, pandas and the like.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from bench.reports.tables import Cell, Leaderboard, cell_text, cost_rows, fact_rows, read_leaderboard, troubles
from bench.results.record import COST_UNITS, CheckpointUsed, decimals, number_text
from bench.results.store import StoredResult, stamps
from engine.files import write_atomic
from engine.optional import require
from engine.printing import html_template, in_csv, in_markdown, markdown_table, printable

CellWriter = Callable[[Cell, bool], str]  # a cell, and whether it is bold -> markup


def group_rows(
    leaderboard: Leaderboard, group: str, escaped: Callable[[object], str], cell_in: CellWriter
) -> list[list[str]]:
    """The table of a group in a markup language: a header, and a row for each checkpoint.

    escaped: escapes text for the markup. cell_in: writes a cell in the markup.
    """
    metrics = leaderboard.groups[group]
    rows = [[escaped(text) for text in ("checkpoint", *metrics)]]
    for checkpoint in leaderboard.checkpoints_in(group):
        row = [escaped(leaderboard.names[checkpoint])]
        for metric in metrics:
            cell = leaderboard.rows[checkpoint].get((group, metric))
            row.append(cell_in(cell, leaderboard.is_best(checkpoint, (group, metric))) if cell else "")
        rows.append(row)
    return rows


HEADER = r"""% Rebuilt by bench leaderboard --format latex. Needs \usepackage{booktabs}.
% Numbers are means over seeds with their standard deviation (population). Bold: the best of a column and all that a
% paired test on the same images cannot tell from it (5 %, Holm over the column).
"""
# LaTeX's special characters; characters that its old encoding OT1 sets as others; and [ ] *, which LaTeX would read as
# an argument of the \\ before them at the start of a row.
ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"''",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}
LETTERS = {chr(code) for code in range(0xC0, 0x100)} - set("\xd0\xd7\xde\xf0\xf7\xfe")  # accented, in every encoding


def to_latex(leaderboard: Leaderboard) -> str:
    """The leaderboard as LaTeX tables."""
    lines = [HEADER]
    for group, metrics in leaderboard.groups.items():
        header, *rows = [" & ".join(cells) + r" \\" for cells in group_rows(leaderboard, group, in_latex, _latex_cell)]
        caption = " ".join([f"{in_latex(group)}.", *map(in_latex, leaderboard.caveats[group])])
        lines += [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    return "\n".join(lines)


def in_latex(text: object) -> str:
    """Text escaped for a cell or a caption; `[U+4E2D]` for a character that pdfLaTeX lacks."""
    return re.sub("-(?=-)", "-{}", "".join(map(_escaped, printable(text))))  # two hyphens would become a dash


def _escaped(character: str) -> str:
    if character.isascii() or character in LETTERS:
        return ESCAPES.get(character, character)
    return f"{{[}}U+{ord(character):04X}{{]}}"


def _latex_cell(cell: Cell, bold: bool) -> str:
    text = re.sub("^-", "$-$", in_latex(number_text(cell.mean, cell.unit)))
    spread = rf" $\pm$ {cell.std:.{decimals(cell.mean, cell.unit)}f}" if cell.seeds > 1 else ""
    return (rf"\textbf{{{text}}}" if bold else text) + spread


LARGEST = 2**63 - 1  # value that a column of integers can hold
SPLIT = "val"  # all metrics are measured on it
TEXT, REAL, WHOLE, FLAG = "string", "float64", "int64", "bool"
# Column -> its type, and the attribute of the result or metric that it holds; "": computed in `_parquet_rows`.
COLUMNS = {
    "checkpoint": (TEXT, "checkpoint.name"),
    "digest": (TEXT, "checkpoint.digest"),
    "method": (TEXT, "checkpoint.method"),
    "recipe": (TEXT, "checkpoint.recipe"),
    "branch": (TEXT, "checkpoint.branch"),
    "architecture": (TEXT, "checkpoint.architecture"),
    "parameters": (WHOLE, "checkpoint.parameters"),
    "source": (TEXT, "checkpoint.source"),
    "checkpoint_plugin": (TEXT, "checkpoint.plugin"),
    "training_hours": (REAL, "checkpoint.training_cost.hours"),
    "data": (TEXT, "data.name"),
    "url": (TEXT, "data.url"),
    "split": (TEXT, ""),
    "images": (WHOLE, ""),
    "fingerprint": (TEXT, ""),
    "task": (TEXT, "task"),
    "protocol": (TEXT, "protocol.name"),
    "version": (WHOLE, "protocol.version"),
    "protocol_source": (TEXT, "protocol.source"),
    "plugin": (TEXT, "protocol.plugin"),
    "changes": (TEXT, "protocol.changes"),
    "group": (TEXT, "group"),
    "metric": (TEXT, ""),
    "value": (REAL, "metric.value"),
    "unit": (TEXT, "metric.unit"),
    "higher_is_better": (FLAG, "metric.higher_is_better"),
    "low": (REAL, ""),
    "high": (REAL, ""),
    "interval_method": (TEXT, "interval_method"),
    "chosen_on_val": (FLAG, "metric.chosen_on_val"),
    "deviation_of": (TEXT, "metric.deviation_of"),
    "seed": (WHOLE, "seed"),
    "random": (FLAG, "random"),
    "limit": (WHOLE, "limit"),
    "precision": (TEXT, "precision"),
    "decode": (TEXT, "decode"),
    "skipped": (WHOLE, "skipped"),
    "status": (TEXT, "status"),
    "message": (TEXT, "message"),
    "settings": (TEXT, "settings"),
    "facts": (TEXT, "facts"),
    "device": (TEXT, "device"),
    "compiled": (FLAG, "compiled"),
    "processes": (WHOLE, "processes"),
    "seconds": (REAL, "seconds"),
    "images_per_second": (REAL, "images_per_second"),
    "date": (TEXT, "date"),
    "versions": (TEXT, "versions"),
    "hardware": (TEXT, "hardware"),
    "file": (TEXT, ""),
}


def to_parquet(leaderboard: Leaderboard) -> bytes:
    """All results as a Parquet table. ValueError if pyarrow is not installed."""
    require("pyarrow")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    rows = [row for stored in leaderboard.results for row in _parquet_rows(stored, leaderboard.folder)]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, (kind, _) in COLUMNS.items()])
    buffer = io.BytesIO()
    write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def _parquet_rows(stored: StoredResult, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each metric; a single row without numbers for a result that has none."""
    result, data = stored.result, stored.result.data
    shared = {
        "split": SPLIT,
        "images": data.images.get(SPLIT),
        "fingerprint": data.fingerprints.get(SPLIT),
        "file": str(stored.path.relative_to(folder)),
    }
    metric_columns = {}
    for column, (_, attribute) in COLUMNS.items():
        if attribute.startswith("metric."):
            metric_columns[column] = attribute.removeprefix("metric.")
        elif attribute:
            shared[column] = attrgetter(attribute)(result)
    shared = {column: _in_parquet(value) for column, value in shared.items()}
    if not result.metrics:
        yield {**dict.fromkeys(COLUMNS), **shared}
    for name, metric in result.metrics.items():
        low, high = metric.interval or (None, None)
        numbers = {column: _in_parquet(getattr(metric, attribute)) for column, attribute in metric_columns.items()}
        yield {**shared, **numbers, "metric": printable(name), "low": low, "high": high}


def _in_parquet(value: Any) -> Any:
    """A value as a cell holds it: printable text, mappings as JSON, None for an integer beyond 64 bits."""
    if isinstance(value, Mapping):
        value = json.dumps(msgspec.to_builtins(value))
    if isinstance(value, str):
        return printable(value)
    is_whole_number = isinstance(value, int) and not isinstance(value, bool)
    return None if is_whole_number and abs(value) > LARGEST else value  # the result's JSON file still has the number


INTRODUCTION = """# Leaderboard

Rebuilt by `bench leaderboard`; every number is in leaderboard.csv. In brackets: 95 % interval over validation images.
Bold: the best of a column and all that a paired test on the same images cannot tell from it (5 %, Holm over the
column; `bench compare` has the numbers). Without per-image results the best alone is bold. Floor: raw pixels.
"""


def to_markdown(leaderboard: Leaderboard) -> str:
    """The leaderboard as Markdown."""
    lines = [
        *INTRODUCTION.split("\n"),
        *markdown_table([map(in_markdown, row) for row in fact_rows(leaderboard)], "---"),
    ]
    if costs := cost_rows(leaderboard):
        lines += ["", "## Cost of pretraining", "", *markdown_table([map(in_markdown, row) for row in costs], "---:")]
    for group in leaderboard.groups:
        lines += ["", f"## {in_markdown(group)}", ""]
        lines += [f"> {in_markdown(caveat)}\n" for caveat in leaderboard.caveats[group]]
        lines += markdown_table(group_rows(leaderboard, group, in_markdown, _markdown_cell), "---:")
    if notes := troubles(leaderboard):
        lines += ["", "## Failed or unreadable", ""] + [f"- {in_markdown(note)}" for note in notes]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Cell, bold: bool) -> str:
    text = in_markdown(cell_text(cell))
    return f"**{text}**" if bold else text


def to_html(leaderboard: Leaderboard) -> str:
    """The leaderboard as one page."""
    from markupsafe import Markup

    def cell_in(cell: Cell, bold: bool) -> str:
        text = printable(cell_text(cell))
        return Markup("<strong>{}</strong>").format(text) if bold else text

    costs = cost_rows(leaderboard)
    sections = [
        ("Checkpoints", fact_rows(leaderboard), ()),
        *([("Cost of pretraining", costs, ())] if costs else []),
        *(
            (group, group_rows(leaderboard, group, printable, cell_in), leaderboard.caveats[group])
            for group in leaderboard.groups
        ),
    ]
    template = html_template((Path(__file__).parent / "leaderboard.html").read_text(encoding="utf-8"))
    return template.render(sections=sections, troubles=troubles(leaderboard))


FACTS = ("name", "method", "architecture", "parameters", "digest")
COSTS = (*COST_UNITS, "devices")  # fields of checkpoint.training_cost; columns only if known for some checkpoint


def to_csv(leaderboard: Leaderboard) -> str:
    """All measured numbers as CSV with a header: plain decimal numbers, and empty cells for missing ones."""
    rows = {used: cells for used, cells in leaderboard.rows.items() if used not in leaderboard.published}
    columns = [column for group in leaderboard.groups for column in _csv_columns(leaderboard, group, rows)]
    names = [in_csv(f"{group}:{metric}{suffix}") for group, metric, suffix in columns]
    costs = [name for name in COSTS if any(getattr(used.training_cost, name) for used in rows)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*FACTS, *costs, *names, "failed"])
    for used, row in rows.items():
        facts = [in_csv(getattr(used, fact)) for fact in FACTS]
        spent = [in_csv(getattr(used.training_cost, name) or "") for name in costs]
        numbers = [_number(row.get((group, metric)), suffix) for group, metric, suffix in columns]
        writer.writerow([*facts, *spent, *numbers, in_csv("; ".join(leaderboard.failed.get(used, ())))])
    return buffer.getvalue()


def _csv_columns(
    leaderboard: Leaderboard, group: str, checkpoints: Iterable[CheckpointUsed]
) -> Iterator[tuple[str, str, str]]:
    """Group, metric and suffix of each column of a group: the numbers, and intervals and spreads if a cell has one."""
    rows = [leaderboard.rows[checkpoint] for checkpoint in checkpoints]
    for metric in leaderboard.groups[group]:
        cells = [row[group, metric] for row in rows if (group, metric) in row]
        yield group, metric, ""
        if any(cell.interval for cell in cells):
            yield from ((group, metric, suffix) for suffix in (":low", ":high"))
        if any(cell.seeds > 1 for cell in cells):
            yield from ((group, metric, suffix) for suffix in (":std", ":n"))


def _number(cell: Cell | None, suffix: str) -> float | int | str:
    """The part of a cell for the CSV column with this suffix; "" if there is none."""
    if cell is None:
        return ""
    low, high = cell.interval or ("", "")
    return {"": cell.mean, ":low": low, ":high": high, ":std": cell.std, ":n": cell.seeds}[suffix]


# Name of a format -> its file, and the function that writes it. The bytes of these depend on the results and this
# tool's version, not on a library's.
TEXT_FORMATS: dict[str, tuple[str, Callable[[Leaderboard], str]]] = {
    "csv": ("leaderboard.csv", to_csv),
    "markdown": ("leaderboard.md", to_markdown),
    "latex": ("leaderboard.tex", to_latex),
    "html": ("leaderboard.html", to_html),
}
FORMATS: dict[str, tuple[str, Callable[[Leaderboard], str | bytes]]] = {
    **TEXT_FORMATS,
    "parquet": ("results.parquet", to_parquet),
}
ALWAYS = ("csv", "markdown")


def write_leaderboard(out: Path, published: bool = False, formats: Iterable[str] = ()) -> Leaderboard:
    """Rebuild leaderboard.csv, leaderboard.md and the files of other `formats`; return the leaderboard.

    Only result files that changed are read, and only pairs of changed results are tested again; the rest comes from
    OUT/cache. Two processes may run this at the same time: each checks after writing whether result files have changed
    since, and starts over if so, so that the last one to write has seen every file.

    Args:
        out: the folder given to `bench run --out`.
        published: whether leaderboard.md, .tex and .html get rows with published numbers of the same protocols;
            leaderboard.csv and results.parquet hold only measured numbers.
        formats: further keys of FORMATS to write.
    """
    while True:
        before = stamps(out)
        leaderboard = read_leaderboard(out, published)
        files = {key: out / FORMATS[key][0] for key in (*ALWAYS, *formats)}
        for key, path in files.items():
            write_atomic(path, FORMATS[key][1](leaderboard))
        if stamps(out) == before:
            return replace(leaderboard, files=files)
