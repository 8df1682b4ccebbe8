"""The page of `bench report`: who leads and who shares a rank, nothing from outside runs, and it works in a browser."""

import base64
import csv
import hashlib
import html.parser
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_results import EVIL, made_checkpoint, made_leaderboard, made_metrics, made_result, save_result
from PIL import Image
from scipy.special import expit, logit
from scipy.stats import permutation_test, spearmanr
from shown_results import result
from small_exports import make_export

from bench.leaderboards.files import write_leaderboard
from bench.leaderboards.ranks import mean_ranks, spearman
from bench.leaderboards.tables import read_leaderboard
from bench.reporting.contents import contents, grounds, headline, merged_notes, networks_of, provenance, verdict
from bench.reporting.figures import (
    INK,
    board_styles,
    log_of,
    pareto,
    points_of,
    robustness_figures,
    scatter_figures,
    shifted_accuracies,
    svg_of,
    sweep_figures,
    training_figure,
)
from bench.reporting.page import figures_of, packed, page_of, report_page
from bench.reporting.site import merged_results, site_pages
from bench.reporting.views import image_view
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed, Result
from bench.run.runner import arrays_of, metric_records
from bench.sharing.groups import Publication
from bench.sharing.record import check_record, write_record
from bench.statistics.compare import compare
from bench.statistics.intervals import LEVEL
from bench.statistics.paired import holm
from bench.statistics.significance import _letters_of, p_value_cache, ties_with_best
from checkpoints.export import ViTExport, spec_in
from checkpoints.flops import forward_flops
from checkpoints.training_cost import TrainingCost
from engine.tasks import Metric, Outcome
from imagesets.sets import open_set

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def report_of(results, ties=None):
    return contents(replace(made_leaderboard(results), ties=ties or {}))


def page(results, ties=None) -> str:
    found = report_of(results, ties)
    return page_of(found, figures_of(found), {})


def level_of(*checkpoints: CheckpointUsed) -> dict:
    return {("digits/knn@dino", "top1"): frozenset((each.name, each.digest) for each in checkpoints)}


def test_checkpoints_that_are_level_share_a_rank():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc", 1))
    floor = made_checkpoint("raw", 4, method="pixels")
    results = [result(c, 60.0), result(a, 80.0), result(b, 79.5), result(floor, 70.0)]
    (table,) = report_of(results, level_of(a, b)).tables
    assert [(row.name, row.rank, row.kind) for row in table.rows] == [
        ("a", "1-2", "measured"),
        ("b", "1-2", "measured"),
        ("raw (floor)", "", "floor"),
        ("c", "3", "measured"),
    ]
    assert [row.numbers[0].first for row in table.rows] == [True, True, False, False]
    assert [row.numbers[0].level for row in table.rows] == [True, True, False, False]
    assert verdict(table) == (
        "a and b lead on 500 validation images; a paired test on the same images does not tell them apart (5 %, Holm)."
    )
    (table,) = report_of(results, level_of(a)).tables
    assert [row.rank for row in table.rows] == ["1", "2", "", "3"] and verdict(table).startswith("a leads on 500")
    (table,) = report_of(results[:1]).tables
    assert verdict(table) == "c alone was measured, on 500 validation images."


def test_a_lower_number_leads_where_lower_is_better():
    quick, slow = made_checkpoint("quick", 1), made_checkpoint("slow", 2)
    seconds = {"seconds": MetricRecord(value=3.0, unit="s", higher_is_better=False)}
    results = [
        result(slow, 1.0, metrics={"seconds": replace(seconds["seconds"], value=9.0)}),
        result(quick, 1.0, metrics=seconds),
    ]
    (table,) = report_of(results).tables
    assert [(row.name, row.rank) for row in table.rows] == [("quick", "1"), ("slow", "2")]
    assert "there is no paired test" in verdict(table)


def test_the_headline_says_what_paired_tests_support():
    a, b = made_checkpoint("a", 1), made_checkpoint("b", 2)
    other = DataUsed(name="cifar10", url="cifar10:x")
    results = [result(a, 80.0), result(b, 70.0), result(a, 50.0, data=other), result(b, 60.0, data=other)]
    both = frozenset((used.name, used.digest) for used in (a, b))
    board = level_of(a) | {("cifar10/knn@dino", "top1"): both}
    told = headline(report_of(results, board))
    assert "a in 1 of 2 protocols" in told and "level with the best, most often: a, in 2" in told
    told = headline(report_of(results, dict.fromkeys(board, both)))
    assert told.startswith("No network is significantly better") and "most often: a and b, in 2" in told
    found = report_of(results[:1])
    assert "nothing to compare" in headline(found) and grounds(found) == []


def test_a_number_that_no_paired_test_compares_wins_nothing(tmp_path):
    metrics = [{"rankme": MetricRecord(value=value, unit="")} for value in (9.0, 3.0)]
    results = [result(made_checkpoint(name, at), 1.0, metrics=metrics[at]) for at, name in enumerate("ab")]
    board = made_leaderboard(results)
    assert board.best and ties_with_best(board.columns, board.best, board.results, p_value_cache(tmp_path)) == {}
    found = report_of(results)
    assert not any(row.numbers[0].first for row in found.tables[0].rows) and not any(row.rank for row in found.overview)
    assert "there is no paired test" in verdict(found.tables[0]) and "nothing to compare" in headline(found)


def test_neither_raw_pixels_nor_initial_weights_win():
    a, b = made_checkpoint("a", 1), made_checkpoint("b", 2)
    start, floor = made_checkpoint("a-start", 3, source="/runs/a/start"), made_checkpoint("raw", 4, method="pixels")
    results = [result(a, 60.0), result(b, 50.0), result(start, 70.0), result(floor, 80.0)]
    found = report_of(results, level_of(floor, start))
    assert [row.kind for row in found.tables[0].rows] == ["floor", "initial", "measured", "measured"]
    assert not any(row.numbers[0].first for row in found.tables[0].rows if row.kind != "measured")
    assert [row.name for row in found.overview] == ["a", "b", "raw (floor)", "a-start"]
    told = headline(found) + verdict(found.tables[0])
    assert "raw (floor)" not in told and "a-start" not in told
    assert "In 1 of 1 no network is shown to be better than raw pixels" in told
    found = report_of(results, level_of(a))
    assert "better than raw pixels" not in headline(found)
    only = report_of([result(floor, 80.0), result(start, 70.0)], level_of(floor))
    assert "nothing to compare" in headline(only) and verdict(only.tables[0]).startswith("No trained network")


def test_numbers_chosen_on_the_validation_images_are_told():
    a, b = made_checkpoint("a", 1), made_checkpoint("b", 2)
    results = [result(a, 80.0), result(b, 70.0)]
    assert "No number was chosen" in " ".join(grounds(report_of(results, level_of(a))))
    top1 = replace(results[0].metrics["top1"], chosen_on_val=True)
    found = report_of([replace(results[0], metrics={"top1": top1}), results[1]], level_of(a))
    assert "1 of 1 tables report numbers that were chosen on the validation images" in " ".join(grounds(found))


def test_notes_of_several_checkpoints_are_one():
    notes = ("a: no class token.", "Computed in bfloat16.", "b: no class token.", "c: unlike others.")
    names = ["a", "b", "c (floor)"]
    merged = merged_notes(notes, names)
    assert merged == ("a and b: no class token.", "Computed in bfloat16.", "c (floor): unlike others.")
    assert merged_notes(("a: x", "b: x"), ["a", "b"]) == ("all checkpoints: x",)


def test_numbers_lie_where_they_belong_on_their_axis():
    (table,) = report_of([result(made_checkpoint("a", 1), 80.0), result(made_checkpoint("b", 2), 99.9)]).tables
    for row in table.rows:
        low, value, high = row.numbers[0].place
        assert 0 <= low < value < high
    assert table.axis == ("76.81", "100.00")


class Elements(html.parser.HTMLParser):
    """Names of the elements of a page, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs


def evil_results() -> list[Result]:
    found = []
    for number, text in enumerate(EVIL):
        cost = TrainingCost(hours=number + 1.0)
        checkpoint = made_checkpoint(text, number, source=text, recipe=text, training_cost=cost)
        found.append(
            result(
                checkpoint,
                50.0 + number,
                protocol=ProtocolUsed(name="knn@dino", version=1, source=text),
                settings={text: text},
                facts={"warnings": [text]},
            )
        )
    return [*found, result(made_checkpoint("broken"), 1.0, status="failed", metrics={}, message=EVIL[0])]


def test_nothing_in_a_result_becomes_markup_or_script():
    harmless, hostile = Elements(), Elements()
    hostile.feed(page(evil_results()))
    plain = [
        replace(each, checkpoint=replace(each.checkpoint, name=f"n{at}")) for at, each in enumerate(evil_results())
    ]
    harmless.feed(page(plain))
    assert hostile.names.count("script") == harmless.names.count("script") == 2
    assert not {"img", "iframe", "object"} & set(hostile.names)
    assert {name for name, _ in hostile.attributes if name.startswith("on")} == set()
    text = page(evil_results())
    assert all(sign not in text for sign in ("\x1b", "\x00", "\u202e", "\udcff"))
    json.loads(re.search(r'id="results">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("count", [0, 1, 60])
def test_the_same_results_give_the_same_bytes(count):
    results = [result(made_checkpoint(f"c{number}", number), 40.0 + number / 2) for number in range(count)]
    first = page(results)
    assert first == page(list(results)) and first.encode() and "</html>" in first
    assert ("There are no results yet" in first) == (count == 0)


def test_missing_metrics_leave_empty_cells():
    whole, part = result(made_checkpoint("a", 1), 80.0), result(made_checkpoint("b", 2), 70.0)
    part = replace(part, metrics={"top1": part.metrics["top1"]})
    (table,) = report_of([whole, part]).tables
    assert [row.numbers[1].text for row in table.rows] == ["20.0 s", ""]
    assert table.rows[1].numbers[1].value is None


def test_provenance_names_everything_that_a_number_rests_on():
    found = provenance(result(made_checkpoint("a", 1, source="/runs/a"), 80.0, limit=100, seed=3))
    assert found["from"] == "/runs/a" and found["limit"] == 100 and found["seed"] == 3
    assert found["protocol"] == "knn@dino, version 1" and "digits=digits:" in found["images"]


def test_curves_are_read_from_a_log_with_a_torn_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0.5, "loss": 2.0, "note": "x"}\n{"epoch": 1.0, "loss": 1.0}\n{"epoch": 1.5, "lo')
    assert log_of(path) == [{"epoch": 0.5, "loss": 2.0}, {"epoch": 1.0, "loss": 1.0}]
    assert log_of(tmp_path / "none.jsonl") == []
    logs = {"$a_1$": log_of(path), "_b": log_of(path)}
    figure = svg_of(training_figure(logs), "t")
    assert "$a_1$" in figure and "_b" in figure and figure == svg_of(training_figure(logs), "t")


def test_curves_of_a_pretraining_have_the_points_of_its_log(tmp_path):
    """Lines of the k-NN monitor hold an update and no epoch."""
    lines = [
        {"step": n, "updates": 1, "epoch": (n - 1) / 4, "loss": 9.0 - n, "images_per_second": 8} for n in (1, 4, 8)
    ]
    lines += [{"step": 4, "knn_top1": 30.0}, {"step": 8, "knn_top1": 50.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"batch": 16}}))
    read = log_of(tmp_path / "log.jsonl")
    assert points_of(read, "knn_top1") == [(0.75, 30.0), (1.75, 50.0)]
    assert points_of(read, "loss", "images") == [(16, 8.0), (64, 5.0), (128, 1.0)]
    assert [1800 * hours for hours, _ in points_of(read, "loss", "hours")] == pytest.approx([1.0, 2.0, 3.0])
    panels = training_figure({"run": read}).axes
    drawn = {axes.get_title(): [tuple(point) for point in axes.lines[0].get_xydata().tolist()] for axes in panels}
    assert drawn["loss"] == [(0.0, 8.0), (0.75, 5.0), (1.75, 1.0)] and drawn["k-NN top-1, %"] == [
        (0.75, 30),
        (1.75, 50),
    ]


def swept_report(count=14):
    """Networks of different sizes and hours under k-NN at three k, and raw pixels."""
    results = []
    for number in range(count + 1):
        metrics = {
            f"top1_k{k}": MetricRecord(value=20.0 + 4 * number - k / 10, interval=(19.0, 95.0)) for k in (10, 20, 200)
        }
        used = made_checkpoint(
            f"n{number:02}",
            number,
            method="pixels" if number == count else "mae",
            parameters=0 if number == count else 10**6 * (1 + number),
            training_cost=TrainingCost(hours=0.5 * 2**number, gflop_per_image=1 + number / 100),
        )
        results.append(result(used, 1.0, metrics=metrics))
    return report_of(results)


def test_a_checkpoint_has_one_colour_and_marker_in_all_figures():
    report = swept_report()
    styles = board_styles(report)
    looks = {(style["color"], style.get("marker")) for style in styles.values()}
    assert len(looks) == len(styles) == 15
    figures = {
        **sweep_figures(report),
        **scatter_figures(report),
        "t": training_figure({"n03": LOG, "n01": LOG}, styles),
    }
    assert len(figures) == 5
    for figure in figures.values():
        for line, text in zip(figure.legends[0].get_lines(), figure.legends[0].get_texts(), strict=True):
            style = styles[text.get_text()]
            assert line.get_color() == style["color"] and line.get_marker() == style.get("marker", "None")
        drawn = {(line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines}
        assert {look for look in drawn if look[0] != INK and look[1] not in ("_", "|")} <= looks
    fewer = swept_report(13)
    assert {
        name: style for name, style in board_styles(fewer).items() if name != "n13 (floor)"
    }.items() <= styles.items()


LOG = [{"epoch": 0.0, "loss": 2.0}, {"epoch": 1.0, "loss": 1.0}]


def test_numbers_of_an_axis_do_not_overlap():
    report = swept_report()
    for width in (3.25, 9.0):
        for figure in [*sweep_figures(report, width).values(), *scatter_figures(report, width).values()]:
            figure.draw_without_rendering()
            for axes in figure.axes:
                labels = [label.get_window_extent() for label in axes.get_xticklabels(which="both") if label.get_text()]
                inside = sorted(box.x0 for box in labels), sorted(box.x1 for box in labels)
                assert len(labels) > 1 and all(
                    end < start for end, start in zip(inside[1], inside[0][1:], strict=False)
                )


def test_sweeps_and_fronts_hold_the_numbers_of_the_table():
    report = swept_report(3)
    (figure,) = sweep_figures(report).values()
    lines = {tuple(point[1] for point in line.get_xydata().tolist()) for line in figure.axes[0].lines}
    assert {tuple(number.value for number in row.numbers) for row in report.tables[0].rows} <= lines
    points = {"a": (1.0, 50.0), "b": (2.0, 40.0), "c": (2.0, 60.0), "d": (3.0, 60.0), "e": (4.0, 70.0)}
    assert pareto(points) == [(1.0, 50.0), (2.0, 60.0), (4.0, 70.0)]
    assert pareto(points, higher_is_better=False) == [(1.0, 50.0), (2.0, 40.0)]


def test_robustness_is_drawn_against_clean_accuracy_with_the_distance_from_the_line():
    """Networks that lie on one line in logits, but for one; of two corruptions the mean accuracy."""
    line = {"a": 50.0, "b": 60.0, "c": 70.0, "d": 80.0}
    results = []
    for number, (name, clean) in enumerate((line | {"odd": 65.0}).items()):
        shifted = 100 * float(expit(logit(clean / 100) - 0.5)) + (10 if name == "odd" else 0)
        values = {"top1": clean, "v2_top1": shifted, "c_fog_error": 60.0, "c_snow_error": 100 - clean}
        results.append(
            made_result(
                made_checkpoint(name, number),
                made_metrics(values, {"top1": (clean - 1, clean + 1)}),
                task="robustness",
                protocol=ProtocolUsed(name="robustness@cached", version=1, source="s"),
            )
        )
    report = report_of(results)
    first, second = robustness_figures(report)["robustness against clean accuracy"].axes
    assert (first.get_ylabel(), second.get_ylabel()) == ("top1 on v2, %", "top1 on c corruptions, %")
    assert shifted_accuracies(report.tables[0])["c corruptions"]["b"][1].value == (40 + 60) / 2
    clean = np.array([50, 60, 70, 80, 65]) / 100
    fit = np.polyfit(logit(clean), logit(np.append(expit(logit(clean[:4]) - 0.5), expit(logit(0.65) - 0.5) + 0.1)), 1)
    above = 100 * (expit(logit(0.65) - 0.5) + 0.1 - expit(np.polyval(fit, logit(0.65))))
    assert 7 < above < 9 and first.get_title().endswith(f"odd {above:+.1f}")
    assert [49, 51] in [np.asarray(line.get_xdata()).tolist() for line in first.lines]
    pixels = [replace(one, checkpoint=replace(one.checkpoint, method="pixels")) for one in results[:1]]
    assert len(robustness_figures(report_of(pixels))) == 1  # a board without networks has points and no line


def test_a_forward_pass_is_counted_from_the_export_of_the_same_digest(tmp_path):
    folder = make_export(tmp_path / "export", 0)
    small_export = ViTExport.load(folder)
    assert spec_in(folder, small_export.digest) == small_export.spec
    assert spec_in(folder, "0" * 64) is None and spec_in(tmp_path, small_export.digest) is None
    used = [made_checkpoint(name, n, source=str(folder)) for n, name in enumerate("ab")]
    report = report_of([result(replace(used[0], digest=small_export.digest), 1.0), result(used[1], 2.0)])
    costs = [row["cost"].get("forward_gflop") for row in report.checkpoints]
    assert sorted(costs, key=bool) == [None, forward_flops(small_export.spec) / 1e9]


def test_blocks_are_a_curve_that_ends_with_the_last_and_the_best_is_named():
    """A network of three blocks beside one of two."""
    deep = {"top1_k10": 40.0, "top1_k10_block1": 30.0, "top1_k10_block2": 45.5}
    values = {"deep": deep, "flat": {"top1_k10": 20.0, "top1_k10_block1": 10.0}}
    results = [
        result(made_checkpoint(name, number), 1.0, metrics={key: MetricRecord(value=v) for key, v in numbers.items()})
        for number, (name, numbers) in enumerate(values.items())
    ]
    report = report_of(results)
    axes = sweep_figures(report)["accuracy over blocks"].axes[0]
    drawn = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata())]
    assert [[1, 30], [2, 45.5], [3, 40]] in drawn and [[1, 10], [2, 20]] in drawn
    assert "deep 2 of 3 (the last is 5.5 worse), flat 2 of 2 (the last)." in verdict(report.tables[0])


def test_figures_for_a_paper(compared, bench, tmp_path):
    """One command, several formats: the same bytes twice, fonts in the PDF, the width that was asked for."""
    wide = ["--results", compared, "--format", "pdf", "png", "svg"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    for folder in ("a", "b"):
        found = bench("visualize", "curves", *wide, "--checkpoint", run, "--width", 3.25, "--out", tmp_path / folder)
        assert found[0] == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["pretraining.pdf", "pretraining.png", "pretraining.svg"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert b"/FontFile2" in (tmp_path / "a" / "pretraining.pdf").read_bytes()
    with Image.open(tmp_path / "a" / "pretraining.png") as image:
        assert image.width == 975
    code, _, told = bench("visualize", "scatter", "--out", tmp_path)
    assert code == 2 and "--results" in told
    code, _, told = bench("visualize", "curves", *wide, "--along", "weeks", "--out", tmp_path)
    assert code == 2 and "weeks" in told and "hours" in told
    code, _, told = bench("visualize", "pca", "--checkpoint", "x", "--out", tmp_path)
    assert code == 2 and "--images" in told


@pytest.fixture
def board(tmp_path):
    """Results of two checkpoints on the digits: the first is right but for two images, the second on none."""
    images = open_set("digits:", "val")
    prints = {split: open_set("digits:", split).fingerprint for split in ("train", "val")}
    data = DataUsed(name="digits", url="digits:", fingerprints=prints, images={"val": len(images)})
    right = np.ones(len(images), bool)
    right[[7, 300]] = False
    for number, correct in ((1, right), (2, np.zeros(len(images), bool))):
        value = 100 * float(correct.mean())
        arrays = {"predicted": np.where(correct, images.labels, 9 - images.labels).astype(np.int32)}
        arrays |= {"confidence": np.full(len(images), 0.75, np.float16), "neighbours_of": np.arange(2)}
        arrays |= {"neighbours": np.arange(6).reshape(2, 3), "similarities": np.full((2, 3), 0.5, np.float32)}
        found = result(made_checkpoint(f"c{number}", number), value, data=data, arrays=tuple(arrays))
        save_result(tmp_path, found, {**arrays, "top1": correct})
    return tmp_path


def test_the_hardest_images_and_classes(board):
    from bench.results.store import comparable_results

    measured, _ = comparable_results(board)
    images = open_set("digits:", "val")
    named = {each.result.checkpoint.name: each for each in measured}
    view = image_view(named, "top1", {}, images)
    assert [image["path"] for image in view["hardest"][:2]] == [images.path(7), images.path(300)]
    assert [image["right"] for image in view["hardest"]] == [0, 0, *[1] * 10]
    assert {image["of"] for image in view["hardest"]} == {2}
    assert len(view["classes"]) == view["all_classes"] == 10 and view["classes"][0]["accuracies"][1] == 0
    wrong = {images.labels[7], images.labels[300]}
    assert {entry["name"] for entry in view["classes"] if entry["accuracies"][0] < 100} == {
        images.classes[label] for label in wrong
    }
    assert image_view(named, "top1", {}, images.limited(100)) is None, "other images than those measured"
    assert image_view(named, "seconds", {}, images) is None


def test_a_folder_of_results_becomes_one_file(board, bench):
    assert bench("report", "--out", board)[0] == 0
    text = (board / "report.html").read_text()
    assert 'src="data:image/jpeg;base64,' in text and "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", text)
    assert bench("report", "--out", board, "--no-pictures", "--to", board / "b.html")[0] == 0
    assert "data:image" not in (board / "b.html").read_text().replace("img-src data:", "")


def test_no_script_runs_but_its_own(board):
    """The policy names the one script by its hash, so that nothing runs that a name in a result might smuggle in."""
    text = report_page(board)
    assert 'style="' not in text and "unsafe-inline" not in text
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    (own,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert f"style-src '{hash_of(style)}';" in policy and text.count("<style") == 1
    assert f"script-src '{hash_of(own)}';" in policy and not re.search(r"<[^>]* on\w+=", text.replace(own, ""))


DRIVER = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
</script>
"""
STEPS = """
<script>
(async () => {
  const found = {};
  const [overview, table] = document.querySelectorAll("table");
  const rows = () => [...table.tBodies[0].rows];
  const names = () => rows().filter((row) => !row.hidden).map((row) => row.dataset.name);
  const heads = [...table.querySelectorAll("thead button")];
  const press = (text) => heads.find((button) => button.textContent === text).click();
  found.before = names();
  press("top1"); found.falling = names();
  press("top1"); found.rising = names();
  press("checkpoint"); found.named = names();
  const main = overview.querySelectorAll("thead button")[3];
  main.click(); main.click(); found.overview = [...overview.tBodies[0].rows].map((row) => row.dataset.name);
  overview.querySelector("[data-note] button").focus();
  found.note = document.getElementById("note").hidden ? "" : document.getElementById("note").textContent;
  found.sort = table.querySelector("th[aria-sort]").getAttribute("aria-sort");
  const filter = document.getElementById("filter");
  filter.value = "c1"; filter.dispatchEvent(new Event("input")); found.filtered = names();
  filter.value = ""; filter.dispatchEvent(new Event("input"));
  document.querySelector("button[data-results]").click();
  found.open = document.getElementById("provenance").open;
  found.provenance = document.getElementById("provenance-body").textContent;
  document.getElementById("provenance").close();
  const ground = () => getComputedStyle(document.body).backgroundColor;
  found.light = ground(); document.getElementById("theme").click(); found.dark = ground();
  found.wide = document.documentElement.scrollWidth > innerWidth;
  found.requests = performance.getEntriesByType("resource").filter((entry) => !entry.name.startsWith("data:")).length;
  for (const part of document.querySelectorAll("details")) part.open = true;
  found.wideOpen = document.documentElement.scrollWidth > innerWidth;
  found.pictures = document.images.length;
  if (window.axe) {
    const serious = [];
    for (const scheme of ["light", "dark"]) {
      document.documentElement.dataset.theme = scheme;
      const answer = await axe.run(document, { resultTypes: ["violations"] });
      const bad = answer.violations.filter((each) => ["serious", "critical"].includes(each.impact));
      serious.push(...bad.map((each) => `${scheme}: ${each.id} ${each.nodes[0].html}`));
    }
    found.axe = serious;
  }
  found.errors = errors;
  found.at = innerWidth;
  parent.postMessage([location.pathname.split("/").pop(), found], "*");
})();
</script>
"""
FRAMES = """<!doctype html>
<style>body { margin: 0; display: flex; } iframe { border: 0; flex: none; height: 900px; }</style>
<script>
const answers = {};
addEventListener("message", ({ data: [name, found] }) => {
  answers[name] = found;
  if (Object.keys(answers).length < document.querySelectorAll("iframe").length) return;
  const answer = document.createElement("pre");
  answer.id = "answer"; answer.textContent = JSON.stringify(answers);
  document.body.append(answer);
});
</script>
"""


def hash_of(script: str) -> str:
    """As a page's content security policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def in_browser(folder: Path, pages: dict[str, tuple[int, str]]) -> dict[str, dict]:
    """What the steps above find on pages, each as wide as said, side by side in a browser without a window. Frames may
    be narrower than a browser's window can be."""
    spec = importlib.util.find_spec("axe_core_python")
    axe = (Path(spec.origin).parent / "axe.min.js").read_text() if spec else ""
    frames = FRAMES
    for name, (width, text) in pages.items():
        head, body = text.split("<body>", 1)
        own = [script.removeprefix("\n<script>").removesuffix("</script>\n") for script in (DRIVER, STEPS)]
        allowed = " ".join(f"'{hash_of(script)}'" for script in (*own, axe))
        head = head.replace("script-src ", f"script-src {allowed} ")
        steps = f"<script>{axe}</script>{STEPS}</body>"
        (folder / name).write_text(head + "<body>" + DRIVER + body.replace("</body>", steps))
        frames += f'<iframe src="{name}" style="width: {width}px"></iframe>'
    (folder / "frames.html").write_text(frames)
    window = sum(width for width, _ in pages.values())
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={window},900", "--dump-dom"]
    run = subprocess.run(
        [*command, "--virtual-time-budget=20000", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = re.search(r'<pre id="answer">(.*?)</pre>', run.stdout, re.DOTALL)
    assert answer, run.stderr[-2000:]
    return json.loads(answer[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium; apt-get install chromium")
def test_in_a_browser(board, tmp_path):
    """On a wide screen, a narrow one and that of a small phone; and a page whose names are hostile."""
    text = report_page(board)
    pages = {f"{width}.html": (width, text) for width in (1280, 500, 360)}
    answers = in_browser(tmp_path, {**pages, "hostile.html": (800, page(evil_results()))})
    hostile = answers.pop("hostile.html")
    assert hostile["errors"] == [] and hostile["requests"] == 0
    for name, found in answers.items():
        assert found["at"] == pages[name][0]
        assert found["before"] == found["falling"] == ["c1", "c2"] and found["rising"] == ["c2", "c1"]
        assert found["named"] == ["c1", "c2"] and found["sort"] == "ascending" and found["filtered"] == ["c1"]
        assert found["overview"] == ["c2", "c1"] and "c2, digits/knn@dino top1: 0.00 [" in found["note"]
        assert "500 images" in found["note"] and found["open"] and "knn@dino, version 1" in found["provenance"]
        assert found["light"] == "rgb(255, 255, 255)" != found["dark"]
        assert not found["wide"] and not found["wideOpen"], f"{name} is wider than its screen"
        assert found["requests"] == 0 and found["errors"] == []
        assert found["pictures"] == 2 + 6 + 12, "two asked for, three neighbours of each, the hardest"
        assert found.get("axe", []) == [], name
    assert len(answers) == 3


@pytest.fixture(scope="module")
def record(compared, tmp_path_factory):
    """A record of it."""
    folder = tmp_path_factory.mktemp("records") / "mine"
    write_record(compared, folder, Publication())
    assert list(check_record(folder)) == []
    return folder


def test_a_site_of_records_is_whole_and_makes_no_requests(record, bench, tmp_path):
    """A page for each checkpoint and protocol; every link leads somewhere; the same bytes twice."""
    assert bench("site", record, "--out", tmp_path / "a", "--title", "Our <ViTs>")[::2] == (0, "")
    assert bench("site", record, "--out", tmp_path / "a", "--title", "Our <ViTs>")[0] == 0, "an older one is replaced"
    pages = {path.relative_to(tmp_path / "a").as_posix(): path for path in (tmp_path / "a").rglob("*.html")}
    assert sorted(name.split("/")[0] for name in pages) == [*["checkpoints"] * 5, "index.html", *["protocols"] * 2]
    assert "<h1>Our &lt;ViTs&gt;</h1>" in pages["index.html"].read_text()
    for path in pages.values():
        text, elements = path.read_text(), Elements()
        elements.feed(text)
        links = [value for name, value in elements.attributes if name in ("href", "src") and value != "#"]
        assert 'style="' not in text and "default-src 'none'" in text and "unsafe-inline" not in text
        for link in links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.is_file() and (not anchor or f'id="{anchor}"' in target.read_text()), link
    (first,) = [path.read_text() for name, path in pages.items() if name.startswith("checkpoints/n0-")]
    assert "bench run --checkpoint" in first and "near@x" in first
    assert site_pages([record], "Our <ViTs>")["index.html"] == pages["index.html"].read_text()


def test_two_records_are_one_site_with_the_newest_of_each_number(compared, record, tmp_path):
    pages = site_pages([record], "t")
    again = tmp_path / "again"
    write_record(compared, again, Publication())
    assert site_pages([record, again], "t").keys() == pages.keys()
    assert len(merged_results([record, again])[0]) == len(merged_results([record])[0])


def test_a_row_that_its_authors_confirm_is_marked(compared, bench, tmp_path):
    where = "https://example.org/pull/1#comment=2"
    assert bench("record", compared, "--to", tmp_path / "r", "--verified-by", f"n1={where}")[0] == 0
    assert list(check_record(tmp_path / "r")) == []
    pages = site_pages([tmp_path / "r"], "t")
    (own,) = [text for name, text in pages.items() if name.startswith("checkpoints/n1-")]
    assert pages["index.html"].count(f'href="{where}"') == 1 and f'href="{where}"' in own
    for wrong in ("n9=https://example.org", "n1=yes"):
        code, _, told = bench("record", compared, "--to", tmp_path / "x", "--verified-by", wrong)
        assert code == 2 and "--verified-by n" in told and not (tmp_path / "x").exists()


def test_a_record_that_was_changed_makes_no_site(record, bench, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(record, changed)
    (changed / "leaderboard.md").write_text("better numbers")
    code, _, told = bench("site", changed, "--out", tmp_path / "site")
    assert code == 2 and "leaderboard.md" in told and "--check" in told and not (tmp_path / "site").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    code, _, told = bench("site", record, "--out", tmp_path / "mine")
    assert code == 2 and "no site" in told and (tmp_path / "mine" / "thesis.tex").exists()


def test_the_documentation_shows_the_numbers_of_records(record, monkeypatch, tmp_path):
    """Pages of methods hold the numbers and curves of records, linked to a board that is built from them."""
    pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install -e '.[dev]'")
    from tools import site

    monkeypatch.setattr(site, "RECORDS", tmp_path / "records")
    without = site.reference_pages()
    assert "## Measured" not in without["methods/mae.md"] and "href" not in without["board.md"]
    mine = tmp_path / "records" / "mine"
    shutil.copytree(record, mine)
    site.on_post_build(SimpleNamespace(site_dir=tmp_path / "site"))
    pages = site.reference_pages()
    links = re.findall(r'href="(?:\.\./)?([^"]*)"', pages["methods/mae.md"] + pages["board.md"])
    assert len(links) == 2 and all((tmp_path / "site" / link).is_file() for link in links)
    leaderboard = {line["name"]: line for line in csv.DictReader((mine / "leaderboard.csv").read_text().splitlines())}
    for protocol in ("near@x", "linear@x"):
        (row,) = [text for text in pages["methods/mae.md"].splitlines() if f"`digits/{protocol}`" in text]
        for name in ("n0", "n1", "n2", "n3"):
            assert f"| {float(leaderboard[name][f'digits/{protocol}:top1']):.2f} [" in row
    assert "<svg" not in pages["methods/mae.md"] and "## Measured" not in pages["methods/dino.md"]
    log = "".join(json.dumps({"step": step, "epoch": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3))
    folder = mine / "checkpoints" / made_checkpoint("n0", 0).unique_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text(log)
    assert "<svg" in site.reference_pages()["methods/mae.md"]
    with pytest.raises(Exception, match="bench record --check"):  # the log is none of the record's files
        site.on_post_build(SimpleNamespace(site_dir=tmp_path / "site"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Results of four networks and of raw pixels on the same images under two protocols: two networks are level."""
    out, random = tmp_path_factory.mktemp("compared"), np.random.RandomState(0)
    hard = random.rand(400)
    for number, skill in enumerate((0.8, 0.8, 0.5, 0.2, 0.95)):
        used = made_checkpoint(f"n{number}", number, method="pixels" if number == 4 else "mae")
        for protocol in ("near@x", "linear@x"):
            right = hard + 0.2 * random.rand(400) < skill
            outcome = Outcome(metrics={"top1": Metric(value=100 * float(right.mean()), per_image=right)})
            metrics, method = metric_records(outcome, 400)
            data = DataUsed(name="digits", url="digits:", images={"val": 400}, fingerprints={"val": "f" * 64})
            protocol_used = ProtocolUsed(name=protocol, version=1, source="")
            found = made_result(used, metrics, task="other", protocol=protocol_used, data=data, interval_method=method)
            save_result(out, found, arrays_of(outcome))
    return out


def overview_of(out: Path):
    leaderboard = read_leaderboard(out)
    return contents(leaderboard, networks_of(leaderboard, p_value_cache(out)))


def test_the_overview_has_the_numbers_of_the_table(compared):
    write_leaderboard(compared)
    (header, *lines) = csv.reader((compared / "leaderboard.csv").read_text().splitlines())
    found = overview_of(compared)
    rows = {row.name.removesuffix(" (floor)"): row for row in found.overview}
    for line in lines:
        cells = dict(zip(header, line, strict=True))
        expected = [float(cells[f"{table.group}:{table.metrics[0]}"]) for table in found.tables]
        assert [number.value for number in rows[cells["name"]].numbers] == expected
    assert len(lines) == len(rows) == 5 and found.overview[-1].kind == "floor"


def test_ties_are_those_of_bench_compare(compared):
    """Among networks alone, although raw pixels lead: Holm over the leader's comparisons."""
    found = overview_of(compared)
    for table in found.tables:
        networks = [row for row in table.rows if row.kind == "measured"]
        leader, others = networks[0].name, [row.name for row in networks[1:]]
        protocol = table.result.protocol.name
        p = [compare(compared, [leader, other], protocol=protocol).found[0].paired.p for other in others]
        level = {leader} | {name for name, corrected in zip(others, holm(p), strict=True) if corrected > LEVEL}
        assert {row.name for row in table.rows if row.numbers[0].first} == level
        assert {"n0", "n1"} <= level and not {"n2", "n3"} & level and table.beats_pixels is False


def test_networks_share_a_letter_where_bench_compare_cannot_tell_them_apart(compared):
    """Comparisons with the leader are corrected together, and all others are."""
    for table in overview_of(compared).tables:
        networks = [row for row in table.rows if row.kind == "measured"]
        p = {
            pair: compare(compared, [row.name for row in pair], protocol=table.result.protocol.name).found[0].paired.p
            for pair in combinations(networks, 2)
        }
        leaders = [pair for pair in p if pair[0] is networks[0]]
        for family in (leaders, [pair for pair in p if pair not in leaders]):
            for pair, corrected in zip(family, holm([p[pair] for pair in family]), strict=True):
                first, second = ({*row.numbers[0].letters} for row in pair)
                assert bool(first & second) == (corrected > LEVEL)


def test_letters_are_the_largest_groups_that_are_level():
    keys = [(name, "") for name in "pqrst"]
    p, q, r, s, t = keys
    assert _letters_of(keys, [(p, q), (q, r), (r, s), (q, s)]) == {p: "a", q: "ab", r: "b", s: "b", t: ""}
    assert _letters_of(keys, []) == dict.fromkeys(keys, "")


def test_mean_ranks_have_intervals_from_the_same_resamples(compared):
    networks = networks_of(read_leaderboard(compared), p_value_cache(compared))
    ranked = mean_ranks(networks)
    (first, level, third, last) = sorted(ranked.means, key=lambda key: key[0])
    assert ranked.means[last] == 4.0 and ranked.means[third] == 3.0 and ranked.columns == 2
    assert ranked.text(last) == "4.00 [4.00, 4.00]" and ranked.drawn.sum(1) == pytest.approx(1 + 2 + 3 + 4)
    assert "no overall winner" in ranked.sentence({key: key[0] for key in ranked.means})
    few = replace(networks, rows={used: cells for used, cells in networks.rows.items() if used.key != level})
    assert mean_ranks(few).sentence({first: "n0", third: "n2", last: "n3"}).startswith("n0 has the lowest mean rank")
    numbers = [sorted(values, reverse=True).index(values[at]) + 1 for at in range(3) for values in [[80.0, 70.0, 60.0]]]
    assert list(mean_ranks(few).means.values()) == numbers


def health_board(rankme, alignment, accuracies):
    """Networks with two health metrics, one of them at an earlier block too, and a linear accuracy; raw pixels last."""
    results = []
    for number, (rank, aligned, top1) in enumerate(zip(rankme, alignment, accuracies, strict=True)):
        used = made_checkpoint(f"n{number}", number, method="pixels" if number == len(rankme) - 1 else "mae")
        health = made_metrics({"rankme": rank, "alignment": aligned, "rankme_block1": top1})
        protocols = (("health", "health@val", health), ("linear", "linear@dino", made_metrics({"top1": top1})))
        results += [
            made_result(used, metrics, task=task, protocol=ProtocolUsed(name=name, version=1, source="s"))
            for task, name, metrics in protocols
        ]
    return report_of(results)


def test_how_well_health_ranks_networks_by_accuracy():
    """Five networks: p of the one best order of 120 and of its reverse, after Holm over two metrics; raw pixels, which
    would turn it round, are none of them."""
    report = health_board([1, 2, 3, 4, 5, 99], [3, 1, 2, 5, 4, 0], [10, 20, 30, 40, 50, 0])
    first, second = report.correlations
    assert (first.metric, first.networks, first.probe) == ("rankme", 5, "linear@dino")
    assert (first.rho, first.p) == (pytest.approx(1), pytest.approx(2 * 2 / 120))
    expected = spearmanr([3, 1, 2, 5, 4], [1, 2, 3, 4, 5]).statistic
    assert second.metric == "alignment" and second.rho == pytest.approx(expected)
    assert "+1.00" in page_of(report, {}, {})
    few = health_board([1, 2, 3, 4, 99], [3, 1, 2, 5, 0], [10, 20, 30, 40, 0])
    assert few.correlations == () and 'id="health"' not in page_of(few, {}, {})
    level = health_board([7] * 6, [1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 0])
    assert [row.metric for row in level.correlations] == ["alignment"]


def test_p_of_a_rank_correlation_is_exact_and_by_random_orders_of_more():
    random = np.random.default_rng(0)
    for count, tolerance in ((6, 1e-12), (12, 0.03)):
        x, y = random.integers(0, 6, count), random.normal(size=count)  # with ties
        rho, p = spearman(x, y)
        test = permutation_test(
            (x,), lambda x, y=y: spearmanr(x, y).statistic, permutation_type="pairings", n_resamples=5000, rng=1
        )
        assert rho == pytest.approx(test.statistic)
        exact = (np.abs(test.null_distribution) >= abs(rho) - 1e-9).mean()
        assert p == pytest.approx(exact, abs=tolerance)


def test_each_text_of_the_provenance_is_kept_once():
    rows = [{"a": "x", "b": "y"}, {"a": "x", "b": "x"}]
    assert packed(rows) == {"names": ["a", "b"], "texts": ["x", "y"], "rows": [[0, 1], [0, 0]]}
    assert packed([]) == {"names": [], "texts": [], "rows": []}
