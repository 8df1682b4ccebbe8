"""`bench list NAME`: whatever has a name is described, settings by the comments beside their fields."""

from dataclasses import dataclass, fields, make_dataclass

import pytest

from engine.printing import table
from engine.settings import meanings


@dataclass(frozen=True, kw_only=True)
class Base:
    """A docstring with `lines: of its own`."""

    KEY = "no field"  # not a setting

    rate: float = 0.5  # first words; and more, with a # in it
    # Above, in one line,
    # and in another.
    names: tuple[str, ...] = ("#", "b")
    plain: int = 1
    sizes: tuple[int, ...] = (
        1,  # inside
        2,
    )  # at the end
    both: int = 2  # beside

    def unused(self):
        inner: int = 3  # of no field
        return inner


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    rate: float = 0.1
    plain: int = 4  # of the derived one
    other: str = ""  # its own


def test_settings_are_described_by_the_comment_beside_or_above_the_field():
    assert meanings(Base) == {
        "rate": "first words; and more, with a # in it",
        "names": "Above, in one line, and in another.",
        "sizes": "at the end",
        "both": "beside",
    }


def test_descriptions_are_inherited_unless_the_subclass_has_its_own():
    assert meanings(Derived) == meanings(Base) | {"plain": "of the derived one", "other": "its own"}


def test_a_class_without_source_has_no_descriptions():
    assert meanings(make_dataclass("Made", [("k", int, 1)])) == {}


def test_a_protocol_is_listed_with_all_its_settings(bench):
    from probes.tasks.linear import PROTOCOLS

    code, output, _ = bench("list", "linear_sgd@ibot")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "protocol linear_sgd@ibot, version 2, of task linear"
    assert "bytedance/ibot evaluation/eval_linear_multi.py" in output and "  suites    everything" in lines
    names = [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]
    assert names == [field.name for field in fields(PROTOCOLS["linear_sgd@ibot"].task)]
    row = next(line for line in lines if line.startswith("    batch "))
    assert row.split(maxsplit=2)[1:] == ["1024", "images of a step; all training images if they are fewer"]
    assert any(line.split()[:2] == ["pace", "epoch"] and line.endswith("[epoch, iteration]") for line in lines)
    (_, values, _) = next(line for line in lines if line.startswith("    lrs ")).split(maxsplit=2)
    assert values == ",".join(map(str, PROTOCOLS["linear_sgd@ibot"].task.lrs))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("frozen", ["suite frozen: ", "  knn@dino ", "  linear_sgd@ibot_base_cached  task linear"]),
        ("semi", ["task semi\n", "  semi@ibot_1percent ", "  settings of a protocol: bench list semi@"]),
        ("toy", ["task toy\n", "plugin    of the package benchtoys 1.0", "toy@two  another paper"]),
        ("upernet@mae", [", on scenes: --data ade20k=ade20k:ROOT\n", "    steps            160000 "]),
        ("timm", ["importer timm: bench import timm:PATH", "  branches  model, ema; the first unless"]),
        (
            "mae",
            ["importer mae: ", "method mae: bench pretrain mae --recipe NAME", " 800 (vit_b, vit_l, vit_h)"],
        ),
        ("mae", ["share of patches that are hidden (figure 5)", "[random, block, grid]"]),
        ("suites", ["frozen: ", "smoke: ", "paper:moca: 11 protocols; to list them: bench list paper:moca"]),
        ("tiny-ade20k", ["tiny-ade20k: is a tiny generated set of this", "scene layout ade20k: ", "tasks     "]),
        ("tiny-coco:", ["tiny-coco: is a tiny generated set of this", "scene layout coco: "]),
        ("paper:mst", ["suite paper:mst: ", "  knn@mst ", "  linear_sgd@mst_paper"]),
    ],
)
def test_list_describes_whatever_has_a_name(name, expected, bench, toys):
    code, output, _ = bench("list", name)
    assert code == 0
    assert not [text for text in expected if text not in output]


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_escape_control_characters_and_show_markup_as_it_is(terminal, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("a\x1b[2J", 1.5, "[red]b[/red] :smile:"), ("bb", 22.25, "line\nbreak")]
    assert table(rows, right=(1,), indent=2) == [
        "  a\\x1b[2J    1.5  [red]b[/red] :smile:",
        "  bb        22.25  line\\nbreak",
    ]


def test_a_wide_cell_does_not_shift_other_rows_in_a_pipe():
    rows = [("lr", "0.1", "rate"), ("corruptions", "x" * 200, "which"), ("floor", "1e-06", "rate at the end")]
    first, wide, last = table(rows, wrapped={1: 20})
    assert wide.split() == ["corruptions", "x" * 200, "which"]
    assert first.index("rate") == last.index("rate at") == len("corruptions") + 2 + 20 + 2


def test_wide_cells_wrap_on_a_terminal(monkeypatch):
    rows = [("lrs", ",".join(["0.001"] * 9), "x " * 30)]
    (piped,) = table(rows)
    assert ",".join(["0.001"] * 9) in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = table(rows, wrapped={1: 20})
    assert len(lines) > 2 and max(map(len, lines)) <= 60
    assert all(word == "0.001" for line in lines for word in line[5:25].replace(",", " ").split())
    assert table([]) == []
