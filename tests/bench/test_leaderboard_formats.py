"""Every format of the leaderboard, over generated results: it can be parsed, runs no code, and is deterministic."""

import csv
import html.parser
import io
import re
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import get_args, get_type_hints

import pyarrow.parquet
import pytest
from made_results import (
    EVIL,
    SIGNS,
    any_board,
    any_text,
    harmless,
    made_checkpoint,
    made_leaderboard,
    made_metrics,
    made_result,
    save_result,
)
from markdown_it import MarkdownIt

from bench.commands.leaderboard import Options
from bench.reports.contents import contents
from bench.reports.leaderboard import FORMATS, Leaderboard, in_latex, to_terminal
from bench.reports.page import page_of
from bench.results.record import ProtocolUsed, TrainingCost
from bench.statistics.significance import Ties
from engine.printing import printable

BOARDS = 24  # generated leaderboards, of which every format is checked


def content_of(board: Leaderboard, name: str) -> bytes:
    content = FORMATS[name][1](replace(board, drawn_by=lambda board: page_of(contents(board))))
    return content if isinstance(content, bytes) else content.encode()


def shape(board: Leaderboard) -> list[tuple[int, int]]:
    """Rows and columns of the table of each group, without the header and the names."""
    rows = [len(board.checkpoints_in(group)) for group in board.groups]
    return [(count, len(metrics)) for count, metrics in zip(rows, board.groups.values(), strict=True)]


def tables_before(board: Leaderboard) -> list[tuple[int, int]]:
    """The shapes of the tables of facts and of costs, which some formats have before those of the groups."""
    costs = sum(checkpoint.training_cost != TrainingCost() for checkpoint in board.rows)
    return [(len(board.rows), 4), *([(costs, 6)] if costs else [])]


def check_csv(board: Leaderboard) -> None:
    text = harmless(content_of(board, "csv").decode())
    header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert len(rows) == len(board.rows) and {len(row) for row in rows} <= {len(header)}
    for cell in (cell for row in (header, *rows) for cell in row if cell[:1] in ("=", "+", "-", "@")):
        float(cell)
    for row, cells in zip(rows, board.rows.values(), strict=True):
        assert Counter(str(cell.mean) for cell in cells.values()) <= Counter(row)


def check_markdown(board: Leaderboard) -> None:
    text = harmless(content_of(board, "markdown").decode())
    if len(board.results) > 100:  # too long for the parser
        cells = Counter(len(re.split(r"(?<!\\)\|", line)) - 3 for line in text.split("\n") if line.startswith("|"))
        assert cells == {4: 502 + 15 * 502}
        return
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    kinds = [token.type for token in tokens] + [child.type for token in tokens for child in token.children or ()]
    assert not {"html_block", "html_inline", "link_open", "image", "fence", "code_block"} & set(kinds)
    sizes, cells = [], 0
    for token in tokens:
        cells += token.type == "td_open"
        if token.type == "table_open":
            sizes.append([0, 0])
        elif token.type == "tr_open":
            sizes[-1][0] += 1
        elif token.type == "th_open":
            sizes[-1][1] += 1
    ranked = [bool(board.ranks((group, metrics[0]))) for group, metrics in board.groups.items()]
    tables = [(rows, columns + rank) for (rows, columns), rank in zip(shape(board), ranked, strict=True)]
    expected = tables_before(board) + tables
    assert [(rows - 1, columns - 1) for rows, columns in sizes] == expected
    assert cells == sum(rows * (columns + 1) for rows, columns in expected)
    assert kinds.count("list_item_open") == len(board.problems) + sum(map(len, board.failed.values()))


class Page(html.parser.HTMLParser):
    """Rows and columns of each table in the body of a page; all elements must be closed."""

    VOID = ("meta", "input", "br", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.names, self.tables = [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(name for name, _ in attrs)}
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append(0)
        elif tag in ("td", "th"):
            self.tables[-1][-1] += 1

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_html(board: Leaderboard) -> None:
    """Each group is a table below the overview, with ranks where there are paired tests."""
    page = Page(harmless(content_of(board, "html").decode()))
    assert not page.names & {"img", "iframe", "object", "link", "src", "style="}
    assert not any(name.startswith("on") for name in page.names)
    groups = page.tables[1 : 1 + len(board.groups)]
    for table, (rows, columns) in zip(groups, shape(board), strict=True):
        assert len(table) == rows + 1 and len({*table}) == 1 and 1 + columns <= table[0] <= 2 + columns


COMMANDS = {
    **{name: "" for name in ("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "textbf")},
    **{"\\": "\n", "pm": "+-", "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"},
    **{"textless": "<", "textgreater": ">", "textbar": "|", "textasciigrave": "`"},
    **{sign: sign for sign in "{}$&#%_"},
}
TOKEN = re.compile(r"\\([a-zA-Z]+|.)|([{}$&])|(.)", re.DOTALL)


def untypeset(text: str) -> str:
    """The text that a fragment of LaTeX typesets. AssertionError if a command, brace or sign does anything else."""
    typeset, depth, in_math = "", 0, False
    for command, mark, sign in TOKEN.findall(text):
        if command:
            assert command in COMMANDS, command
            typeset += COMMANDS[command]
        elif mark in ("{", "}"):
            depth += 1 if mark == "{" else -1
            assert depth >= 0
        elif mark == "$":
            in_math = not in_math
        else:
            assert (mark or sign) not in '#^~_%"<>|\\`' and (sign.isascii() or "\xc0" <= sign <= "\xff")
            typeset += mark or sign
    assert depth == 0 and not in_math
    return typeset


def in_latin1(text: object) -> str:
    """A text as LaTeX tables show it: signs beyond ASCII and accented letters by their code points."""
    is_allowed = re.compile("[\x20-\x7e\xc0-\xcf\xd1-\xd6\xd8-\xdd\xdf-\xef\xf1-\xf6\xf8-\xfd\xff]").match
    signs = (sign if is_allowed(sign) else f"[U+{ord(sign):04X}]" for sign in printable(text))
    return "".join(signs).replace('"', "''")


def check_latex(board: Leaderboard) -> None:
    text = content_of(board, "latex").decode()
    lines = text.split("\n")[3:]
    assert text.count("%") == text.count("\\%") + 4  # three lines of comments, one of which names a percentage
    assert not re.search(r"(\\\\|rule)\s*[\[*]", text), "a row would begin with an option"
    blocks = re.findall(r"\\begin\{table\}\[t\]\n(.*?)\\end\{table\}\n", "\n".join(lines), re.DOTALL)
    sizes = []
    for group, block in zip(board.groups, blocks, strict=True):
        caption, columns, header, body = re.fullmatch(
            r"\\centering\n\\caption\{(.*)\}\n\\begin\{tabular\}\{l(r*)\}\n\\toprule\n(.*)\n\\midrule\n(.*)\\bottomrule\n\\end\{tabular\}\n",
            block,
            re.DOTALL,
        ).groups()
        assert untypeset(caption).startswith(in_latin1(group))
        rows = [re.split(r"(?<!\\) & ", row.removesuffix(r" \\")) for row in (header, *body.rstrip("\n").split("\n"))]
        assert {len(row) for row in rows} == {1 + len(columns)}
        assert [untypeset(cell) for cell in rows[0][1:]] == [in_latin1(name) for name in board.groups[group]]
        names = {in_latin1(checkpoint.name) for checkpoint in board.rows}
        assert all(untypeset(row[0]).startswith(tuple(names)) for row in rows[1:])
        assert all(re.fullmatch(r"(\+-|[-\d. ])*.*", untypeset(cell)) for row in rows[1:] for cell in row[1:])
        sizes.append((len(rows) - 1, len(columns)))
    assert sizes == shape(board)


def check_parquet(board: Leaderboard) -> None:
    table = pyarrow.parquet.read_table(io.BytesIO(content_of(board, "parquet")))
    results = [stored.result for stored in board.results]
    expected = [(index, name) for index, result in enumerate(results) for name in result.metrics or [None]]
    assert table.num_rows == len(expected)
    columns = table.to_pydict()
    for column in columns.values():
        assert all(value.isprintable() for value in column if isinstance(value, str))
    for row, (index, name) in enumerate(expected):
        result = results[index]
        metric = result.metrics.get(name)
        assert columns["checkpoint"][row] == printable(result.checkpoint.name)
        assert columns["metric"][row] == (None if name is None else printable(name))
        assert columns["value"][row] == (None if metric is None else metric.value)
        assert (columns["low"][row], columns["high"][row]) == ((metric and metric.interval) or (None, None))
        assert columns["file"][row] == f"{index}.json" and columns["images"][row] in (None, 500)


CHECKS = {
    "csv": check_csv,
    "markdown": check_markdown,
    "latex": check_latex,
    "html": check_html,
    "parquet": check_parquet,
}


def test_every_format_has_a_check():
    choices, _ = get_args(get_type_hints(Options)["format"])
    assert list(CHECKS) == list(FORMATS) == list(get_args(choices))


@pytest.fixture(scope="module")
def generated() -> list[Leaderboard]:
    return [any_board(Random(seed)) for seed in range(BOARDS)]


def test_generated_boards_differ(generated):
    sizes = [shape(board) for board in generated]
    assert [] in sizes and max(map(len, sizes)) > 3 and len(set(map(str, sizes))) > BOARDS / 3


@pytest.mark.parametrize("name", FORMATS)
def test_no_result_breaks_a_format(name, generated):
    for board in generated:
        CHECKS[name](board)
        assert content_of(board, name) == content_of(deepcopy(board), name) and harmless(to_terminal(board, 80))


@pytest.fixture(scope="module")
def large() -> Leaderboard:
    """500 checkpoints, 15 protocols of four metrics."""
    return made_leaderboard(
        [
            made_result(
                made_checkpoint(f"c{number}_{EVIL[number % len(EVIL)]}", number),
                made_metrics({f"top{k}": (number * 37 + k) % 100 + 0.25 for k in range(4)}, {"top0": (1.0, 99.0)}),
                protocol=ProtocolUsed(name=f"p@{protocol}", version=1),
            )
            for number in range(500)
            for protocol in range(15)
        ]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_500_rows_of_60_columns(name, large):
    CHECKS[name](large)


def test_latex_shows_every_text_unchanged():
    generator = Random(0)
    for text in [*EVIL, *SIGNS, *(any_text(generator) for _ in range(500))]:
        assert untypeset(in_latex(text)) == in_latin1(text)


def test_latex_shows_deviations_and_ties_in_bold():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc"))
    results = [made_result(a, made_metrics({"top1": value}), seed=seed) for seed, value in ((0, 90.0), (1, 92.0))]
    results += [made_result(b, made_metrics({"top1": 90.5})), made_result(c, made_metrics({"top1": -1.5}))]
    ties = {("digits/knn@dino", "top1"): Ties(frozenset((a.key, b.key)), frozenset((a.key, b.key, c.key)))}
    text = content_of(replace(made_leaderboard(results), ties=ties), "latex").decode()
    for row in (r"a & \textbf{91.00} $\pm$ 1.41 \\", r"b & \textbf{90.50} \\", r"c & $-$1.50 \\"):
        assert row in text


def test_the_command_writes_the_formats_of_its_option(bench, refused, tmp_path):
    for number, value in enumerate((80.0, 70.0)):
        save_result(tmp_path, made_result(made_checkpoint(f"c{number}", number), made_metrics({"top1": value})))
    code, _, err = bench("leaderboard", "--out", tmp_path, "--format", "latex", "html", "parquet", "csv")
    names = ["leaderboard.csv", "leaderboard.html", "leaderboard.md", "leaderboard.tex", "results.parquet"]
    assert code == 0 and all(name in err for name in names)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == names
    columns = pyarrow.parquet.read_table(tmp_path / "results.parquet").to_pydict()
    assert columns["checkpoint"] == ["c0", "c1"] and columns["value"] == [80.0, 70.0]
    assert columns["file"] == [f"c{number}-{0:08x}/digits/knn@dino-seed0.json" for number in range(2)]
    assert "invalid choice: 'pdf'" in refused("leaderboard", "--out", tmp_path, "--format", "pdf")


def test_parquet_without_pyarrow_is_refused_with_the_fix(refused, tmp_path, monkeypatch):
    save_result(tmp_path, made_result(made_checkpoint(), made_metrics({"top1": 1.0})))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'ssl-vit-bench[tables]'" in refused("leaderboard", "--out", tmp_path, "--format", "parquet")
