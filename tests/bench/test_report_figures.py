"""Figures of a report show the numbers of logs and tables, in one style per checkpoint."""

import json
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_checkpoint, made_metrics, made_result
from PIL import Image
from scipy.special import expit, logit
from shown_results import report_of, result

from bench.reports.contents import verdict
from bench.reports.drawing import INK, svg_of
from bench.reports.figures import (
    board_styles,
    figure_styles,
    pareto,
    points_of,
    read_log,
    robustness_figures,
    scatter_figures,
    shifted_accuracies,
    sweep_figures,
    training_figure,
)
from bench.results.record import MetricRecord, ProtocolUsed, TrainingCost

LOG = [{"epoch": 0.0, "loss": 2.0}, {"epoch": 1.0, "loss": 1.0}]


def test_a_log_with_an_incomplete_last_line_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0.5, "loss": 2.0, "note": "x"}\n{"epoch": 1.0, "loss": 1.0}\n{"epoch": 1.5, "lo')
    assert read_log(path) == [{"epoch": 0.5, "loss": 2.0}, {"epoch": 1.0, "loss": 1.0}]
    assert read_log(tmp_path / "none.jsonl") == []
    logs = {"$a_1$": read_log(path), "_b": read_log(path)}
    figure = svg_of(training_figure(logs), "t")
    assert "$a_1$" in figure and "_b" in figure and figure == svg_of(training_figure(logs), "t")


def test_curves_of_a_pretraining_have_the_points_of_its_log(tmp_path):
    """Lines of the k-NN monitor have a step but no epoch."""
    common = {"updates": 1, "images_per_second": 8}
    lines = [common | {"step": step, "epoch": (step - 1) / 4, "loss": 9.0 - step} for step in (1, 4, 8)]
    lines += [{"step": 4, "knn_top1": 30.0}, {"step": 8, "knn_top1": 50.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"batch": 16}}))
    log = read_log(tmp_path / "log.jsonl")
    assert points_of(log, "knn_top1") == [(0.75, 30.0), (1.75, 50.0)]
    assert points_of(log, "loss", "images") == [(16, 8.0), (64, 5.0), (128, 1.0)]
    assert [1800 * hours for hours, _ in points_of(log, "loss", "hours")] == pytest.approx([1.0, 2.0, 3.0])
    panels = training_figure({"run": log}).axes
    points = {axes.get_title(): [tuple(point) for point in axes.lines[0].get_xydata().tolist()] for axes in panels}
    assert points["loss"] == [(0.0, 8.0), (0.75, 5.0), (1.75, 1.0)]
    assert points["k-NN top-1, %"] == [(0.75, 30), (1.75, 50)]


def swept_report(count=14):
    """Networks of different sizes and training times under k-NN at three k, and raw pixels."""
    results = []
    for number in range(count + 1):
        metrics = {
            f"top1_k{k}": MetricRecord(value=20.0 + 4 * number - k / 10, interval=(19.0, 95.0)) for k in (10, 20, 200)
        }
        checkpoint = made_checkpoint(
            f"n{number:02}",
            number,
            method="pixels" if number == count else "mae",
            parameters=0 if number == count else 10**6 * (1 + number),
            training_cost=TrainingCost(hours=0.5 * 2**number, gflop_per_image=1 + number / 50),
        )
        results.append(result(checkpoint, 1.0, metrics=metrics))
    return report_of(results)


def test_a_checkpoint_has_one_colour_and_marker_in_all_figures():
    report = swept_report()
    styles = board_styles(report)
    looks = {(style["color"], style.get("marker")) for style in styles.values()}
    assert len(looks) == len(styles) == 15
    large_report = swept_report(60)  # of many checkpoints, figures show 13 in different styles
    shown_styles = list(figure_styles(large_report).values())
    assert len({(style["color"], style.get("marker")) for style in shown_styles}) == len(shown_styles) == 13
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
        drawn_looks = {(line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines}
        assert {look for look in drawn_looks if look[0] != INK and look[1] not in ("_", "|")} <= looks
    more, fewer = (board_styles(swept_report(count)) for count in (12, 11))
    assert {name: style for name, style in fewer.items() if name != "n11 (floor)"}.items() <= more.items()


def test_numbers_of_an_axis_do_not_overlap():
    report = swept_report()
    for width in (3.25, 9.0):
        for figure in [*sweep_figures(report, width).values(), *scatter_figures(report, width).values()]:
            figure.draw_without_rendering()
            for axes in figure.axes:
                labels = [label.get_window_extent() for label in axes.get_xticklabels(which="both") if label.get_text()]
                ends = sorted(box.x0 for box in labels), sorted(box.x1 for box in labels)
                assert len(labels) > 1 and all(end < start for end, start in zip(ends[1], ends[0][1:], strict=False))


def test_sweeps_show_the_numbers_of_the_table_and_pareto_fronts_their_best():
    report = swept_report(3)
    (figure,) = sweep_figures(report).values()
    lines = {tuple(point[1] for point in line.get_xydata().tolist()) for line in figure.axes[0].lines}
    assert {tuple(number.value for number in row.numbers) for row in report.tables[0].rows} <= lines
    points = {"a": (1.0, 50.0), "b": (2.0, 40.0), "c": (2.0, 60.0), "d": (3.0, 60.0), "e": (4.0, 70.0)}
    assert pareto(points) == [(1.0, 50.0), (2.0, 60.0), (4.0, 70.0)]
    assert pareto(points, higher_is_better=False) == [(1.0, 50.0), (2.0, 40.0)]


def test_robustness_is_drawn_against_clean_accuracy_with_the_distance_from_the_line():
    """All networks but one lie on a line in logits; corruptions are shown by their mean accuracy."""
    accuracies = {"a": 50.0, "b": 60.0, "c": 70.0, "d": 80.0}
    results = []
    for number, (name, clean) in enumerate((accuracies | {"odd": 65.0}).items()):
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
    pixels = [replace(result, checkpoint=replace(result.checkpoint, method="pixels")) for result in results[:1]]
    assert len(robustness_figures(report_of(pixels))) == 1  # without networks: points, but no line


def test_accuracies_of_blocks_are_a_curve_and_the_best_block_is_named():
    """A network of three blocks beside one of two."""
    deep_accuracies = {"top1_k10": 40.0, "top1_k10_block1": 30.0, "top1_k10_block2": 45.5}
    values = {"deep": deep_accuracies, "flat": {"top1_k10": 20.0, "top1_k10_block1": 10.0}}
    results = [
        result(made_checkpoint(name, number), 1.0, metrics=made_metrics(accuracies))
        for number, (name, accuracies) in enumerate(values.items())
    ]
    report = report_of(results)
    axes = sweep_figures(report)["accuracy over blocks"].axes[0]
    curves = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata())]
    assert [[1, 30], [2, 45.5], [3, 40]] in curves and [[1, 10], [2, 20]] in curves
    assert "deep 2 of 3 (the last is 5.5 worse), flat 2 of 2 (the last)." in verdict(report.tables[0])


def test_figures_for_a_paper(compared, bench, refused, tmp_path):
    """In several formats: the same bytes twice, embedded fonts, the width of --width."""
    options = ["--results", compared, "--format", "pdf", "png", "svg"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    for folder in ("a", "b"):
        to = ("--width", 3.25, "--out", tmp_path / folder)
        assert bench("visualize", "curves", *options, "--checkpoint", run, *to)[0] == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["pretraining.pdf", "pretraining.png", "pretraining.svg"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert b"/FontFile2" in (tmp_path / "a" / "pretraining.pdf").read_bytes()
    with Image.open(tmp_path / "a" / "pretraining.png") as image:
        assert image.width == 975
    refused("visualize", "scatter", "--out", tmp_path, named="--results")
    refused("visualize", "curves", *options, "--along", "weeks", "--out", tmp_path, named="weeks | hours")
    refused("visualize", "pca", "--checkpoint", "x", "--out", tmp_path, named="--images")
