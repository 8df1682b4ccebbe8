"""Every file of the leaderboard, over generated results: it parses back, nothing in it runs, its bytes are the same."""

import csv
import html.parser
import io
import re
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
from bench.leaderboards.files import FORMATS, in_latex
from bench.leaderboards.tables import Leaderboard, to_terminal
from bench.results.record import ProtocolUsed, TrainingCost
from engine.printing import printable

BOARDS = 40  # generated ones, of which every file is checked


def written(found: Leaderboard, name: str) -> bytes:
    content = FORMATS[name][1](found)
    return content if isinstance(content, bytes) else content.encode()


def shape(found: Leaderboard) -> list[tuple[int, int]]:
    """Rows and columns of the table of each group, without header and name."""
    rows = [len(found.checkpoints_in(group)) for group in found.groups]
    return [(count, len(metrics)) for count, metrics in zip(rows, found.groups.values(), strict=True)]


def tables_before(found: Leaderboard) -> list[tuple[int, int]]:
    """Those of facts and costs, which stand before the groups in some files."""
    spent = sum(checkpoint.training_cost != TrainingCost() for checkpoint in found.rows)
    return [(len(found.rows), 4), *([(spent, 7)] if spent else [])]


def check_csv(found: Leaderboard) -> None:
    text = harmless(written(found, "csv").decode())
    header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert len(rows) == len(found.rows) and {len(row) for row in rows} <= {len(header)}
    for cell in (cell for row in (header, *rows) for cell in row if cell[:1] in ("=", "+", "-", "@")):
        float(cell)
    for row, cells in zip(rows, found.rows.values(), strict=True):
        assert Counter(str(cell.mean) for cell in cells.values()) <= Counter(row)


def check_markdown(found: Leaderboard) -> None:
    text = harmless(written(found, "markdown").decode())
    if len(found.results) > 100:  # too long for the parser
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
    expected = tables_before(found) + shape(found)
    assert [(rows - 1, columns - 1) for rows, columns in sizes] == expected
    assert cells == sum(rows * (columns + 1) for rows, columns in expected)
    assert kinds.count("list_item_open") == len(found.problems) + sum(map(len, found.failed.values()))


class Page(html.parser.HTMLParser):
    """Elements that are open, their attributes, and the text of each cell of each row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.attributes, self.tables = [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def check_html(found: Leaderboard) -> None:
    text = harmless(written(found, "html").decode())
    page = Page(text)
    assert page.attributes == {"lang", "charset", "name", "content", "http-equiv", *(["scope"] if page.tables else [])}
    assert set(re.findall(r"<(\w+)", text)) <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "ul", "li", "strong"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    sizes = [(len(table) - 1, {len(row) - 1 for row in table}) for table in page.tables]
    assert sizes == [(rows, {columns}) for rows, columns in tables_before(found) + shape(found)]
    methods = [row[1] for row in page.tables[0][1:]]
    assert methods == [printable(checkpoint.method) for checkpoint in found.rows]


COMMANDS = {
    **{name: "" for name in ("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "textbf")},
    **{"\\": "\n", "pm": "+-", "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"},
    **{"textless": "<", "textgreater": ">", "textbar": "|", "textasciigrave": "`"},
    **{sign: sign for sign in "{}$&#%_"},
}
TOKEN = re.compile(r"\\([a-zA-Z]+|.)|([{}$&])|(.)", re.DOTALL)


def untypeset(text: str) -> str:
    """What a fragment of LaTeX sets as text. AssertionError for a command, brace or sign that does more than that."""
    shown, depth, inside = "", 0, False
    for command, mark, sign in TOKEN.findall(text):
        if command:
            assert command in COMMANDS, command
            shown += COMMANDS[command]
        elif mark in ("{", "}"):
            depth += 1 if mark == "{" else -1
            assert depth >= 0
        elif mark == "$":
            inside = not inside
        else:
            assert (mark or sign) not in '#^~_%"<>|\\`' and (sign.isascii() or "\xc0" <= sign <= "\xff")
            shown += mark or sign
    assert depth == 0 and not inside
    return shown


def spelled(text: object) -> str:
    """A text as the tables spell it."""
    is_kept = re.compile("[\x20-\x7e\xc0-\xcf\xd1-\xd6\xd8-\xdd\xdf-\xef\xf1-\xf6\xf8-\xfd\xff]").match
    kept = "".join(sign if is_kept(sign) else f"[U+{ord(sign):04X}]" for sign in printable(text))
    return kept.replace('"', "''")


def check_latex(found: Leaderboard) -> None:
    text = written(found, "latex").decode()
    lines = text.split("\n")[3:]
    assert text.count("%") == text.count("\\%") + 4  # three lines of comments, which name a percentage
    assert not re.search(r"(\\\\|rule)\s*[\[*]", text), "a row would begin with an option"
    blocks = re.findall(r"\\begin\{table\}\[t\]\n(.*?)\\end\{table\}\n", "\n".join(lines), re.DOTALL)
    sizes = []
    for group, block in zip(found.groups, blocks, strict=True):
        caption, columns, header, body = re.fullmatch(
            r"\\centering\n\\caption\{(.*)\}\n\\begin\{tabular\}\{l(r*)\}\n\\toprule\n(.*)\n\\midrule\n(.*)\\bottomrule\n\\end\{tabular\}\n",
            block,
            re.DOTALL,
        ).groups()
        assert untypeset(caption).startswith(spelled(group))
        rows = [re.split(r"(?<!\\) & ", row.removesuffix(r" \\")) for row in (header, *body.rstrip("\n").split("\n"))]
        assert {len(row) for row in rows} == {1 + len(columns)}
        assert [untypeset(cell) for cell in rows[0][1:]] == [spelled(name) for name in found.groups[group]]
        names = {spelled(checkpoint.name) for checkpoint in found.rows}
        assert all(untypeset(row[0]).startswith(tuple(names)) for row in rows[1:])
        assert all(re.fullmatch(r"(\+-|[-\d. ])*.*", untypeset(cell)) for row in rows[1:] for cell in row[1:])
        sizes.append((len(rows) - 1, len(columns)))
    assert sizes == shape(found)


def check_parquet(found: Leaderboard) -> None:
    table = pyarrow.parquet.read_table(io.BytesIO(written(found, "parquet")))
    results = [each.result for each in found.results]
    expected = [(at, name) for at, each in enumerate(results) for name in each.metrics or [None]]
    assert table.num_rows == len(expected)
    columns = table.to_pydict()
    for column in columns.values():
        assert all(value.isprintable() for value in column if isinstance(value, str))
    for row, (at, name) in enumerate(expected):
        result = results[at]
        metric = result.metrics.get(name)
        assert columns["checkpoint"][row] == printable(result.checkpoint.name)
        assert columns["metric"][row] == (None if name is None else printable(name))
        assert columns["value"][row] == (None if metric is None else metric.value)
        assert (columns["low"][row], columns["high"][row]) == ((metric and metric.interval) or (None, None))
        assert columns["file"][row] == f"{at}.json" and columns["images"][row] in (None, 500)


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
    sizes = [shape(found) for found in generated]
    assert [] in sizes and max(map(len, sizes)) > 3 and len(set(map(str, sizes))) > BOARDS / 3


@pytest.mark.parametrize("name", FORMATS)
def test_no_result_breaks_a_file(name, generated):
    for found in generated:
        CHECKS[name](found)
        assert written(found, name) == written(deepcopy(found), name) and harmless(to_terminal(found, 80))


@pytest.fixture(scope="module")
def many() -> Leaderboard:
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


@pytest.mark.parametrize("name", FORMATS)
def test_500_rows_of_60_columns(name, many):
    CHECKS[name](many)


def test_latex_sets_a_text_as_it_is():
    draw = Random(0)
    for text in [*EVIL, *SIGNS, *(any_text(draw) for _ in range(500))]:
        assert untypeset(in_latex(text)) == spelled(text)


def test_latex_shows_deviations_and_ties_in_bold():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc"))
    results = [made_result(a, made_metrics({"top1": value}), seed=seed) for seed, value in ((0, 90.0), (1, 92.0))]
    results += [made_result(b, made_metrics({"top1": 90.5})), made_result(c, made_metrics({"top1": -1.5}))]
    found = made_leaderboard(results)
    ties = {("digits/knn@dino", "top1"): frozenset((a.key, b.key))}
    text = written(replace(found, ties=ties), "latex").decode()
    assert (
        r"a & \textbf{91.00} $\pm$ 1.00 \\" in text and r"b & \textbf{90.50} \\" in text and r"c & $-$1.50 \\" in text
    )


def test_the_command_writes_what_is_asked_for(bench, refused, tmp_path):
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


def test_parquet_without_its_library(refused, tmp_path, monkeypatch):
    save_result(tmp_path, made_result(made_checkpoint(), made_metrics({"top1": 1.0})))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'ssl-vit-bench[tables]'" in refused("leaderboard", "--out", tmp_path, "--format", "parquet")
