"""Curves of a report show the numbers of logs and tables, in one style per checkpoint."""

import json
import re

from made_results import made_checkpoint, made_metrics
from shown_results import report_of, result

from bench.reports.drawing import INK, svg_of
from bench.reports.figures import curve_figures, points_of, read_log, training_figure, updates_in
from bench.results.record import MetricRecord

LOG = [{"epoch": 0.0, "loss of mae": 2.0, "images": 0}, {"epoch": 1.0, "loss of mae": 1.0, "images": 64, "step": 9}]


def test_a_log_with_an_incomplete_last_line_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0.5, "loss": 2.0, "note": "x"}\n{"epoch": 1.0, "loss": 1.0}\n{"epoch": 1.5, "lo')
    assert read_log(path) == [{"epoch": 0.5, "loss of ": 2.0}, {"epoch": 1.0, "loss of ": 1.0}]
    assert read_log(tmp_path / "none.jsonl") == []
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"batch": 2}}))
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    logs = dict.fromkeys(("$a_1$", "_b", "<script>alert(1)</script>", "]]><img src=x>", "\x1b[31m"), read_log(path))
    figure = svg_of(training_figure(logs), '"><b>')
    assert "$a_1$" in figure and "_b" in figure and figure == svg_of(training_figure(logs), '"><b>')
    assert not re.search("<script|<img|<b>|\x1b", figure)


def test_curves_of_a_pretraining_have_the_points_of_its_log(tmp_path):
    """Lines of the k-NN monitor have a step, too."""
    lines = [{"step": step, "loss": 9.0 - step} for step in (1, 4, 8)]
    lines += [{"step": 4, "knn_top1": 30.0}, {"step": 8, "knn_top1": 50.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"method": "mae", "settings": {"batch": 16}}))
    log = read_log(tmp_path / "log.jsonl")
    assert points_of(log, "knn_top1") == [(64, 30.0), (128, 50.0)]
    assert updates_in({"run": log}) == {"run": 8}
    panels = training_figure({"run": log}).axes
    points = {axes.get_title(): [tuple(point) for point in axes.lines[0].get_xydata().tolist()] for axes in panels}
    assert points == {"loss": [(16, 8.0), (64, 5.0), (128, 1.0)], "k-NN top-1, %": [(64, 30), (128, 50)]}
    other = [{"images": 1, "loss of dino": 7.0, "knn_top1": 3.0}]
    titles = [axes.get_title() for axes in training_figure({"run": log, "other": other}).axes]
    assert titles == ["k-NN top-1, %"], "losses of different methods are not comparable"


def swept_report(count=14):
    """Networks under k-NN at three k, and raw pixels."""
    results = []
    for number in range(count + 1):
        metrics = {
            f"top1_k{k}": MetricRecord(value=20.0 + 4 * number - k / 10, interval=(19.0, 95.0)) for k in (10, 20, 200)
        }
        method = "pixels" if number == count else "mae"
        results.append(result(made_checkpoint(f"n{number:02}", number, method=method), 1.0, metrics=metrics))
    return report_of(results)


def test_a_checkpoint_has_one_colour_and_marker_in_all_figures():
    for count in (14, 40):
        figures = curve_figures(swept_report(count), {"n03": LOG, "n01": LOG, "n00": LOG})
        assert list(figures) == ["accuracy over k", "pretraining"]
        looks: dict[str, set] = {}
        for figure in figures.values():
            for line, text in zip(figure.legends[0].get_lines(), figure.legends[0].get_texts(), strict=True):
                looks.setdefault(text.get_text(), set()).add((line.get_color(), line.get_marker()))
        assert all(len(own) == 1 for own in looks.values())
        assert len(set.union(*looks.values())) == len(looks) == 13, "twelve networks and raw pixels"
        drawn = {line.get_color() for figure in figures.values() for axes in figure.axes for line in axes.lines}
        assert drawn <= {color for own in looks.values() for color, _ in own} | {INK}


def test_numbers_of_an_axis_do_not_overlap():
    for figure in curve_figures(swept_report(), {}).values():
        figure.draw_without_rendering()
        for axes in figure.axes:
            labels = [label.get_window_extent() for label in axes.get_xticklabels(which="both") if label.get_text()]
            ends = sorted(box.x0 for box in labels), sorted(box.x1 for box in labels)
            assert len(labels) > 1 and all(end < start for end, start in zip(ends[1], ends[0][1:], strict=False))


def test_sweeps_show_the_numbers_of_the_table():
    report = swept_report(3)
    (figure,) = curve_figures(report, {}).values()
    lines = {tuple(point[1] for point in line.get_xydata().tolist()) for line in figure.axes[0].lines}
    assert {tuple(cell.mean for cell in cells.values()) for cells in report.board.rows.values()} <= lines


def test_accuracies_of_blocks_are_a_curve():
    """A network of three blocks beside one of two."""
    deep_accuracies = {"top1_k10": 40.0, "top1_k10_block1": 30.0, "top1_k10_block2": 45.5}
    values = {"deep": deep_accuracies, "flat": {"top1_k10": 20.0, "top1_k10_block1": 10.0}}
    results = [
        result(made_checkpoint(name, number), 1.0, metrics=made_metrics(accuracies))
        for number, (name, accuracies) in enumerate(values.items())
    ]
    axes = curve_figures(report_of(results), {})["accuracy over blocks"].axes[0]
    curves = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata())]
    assert [[1, 30], [2, 45.5], [3, 40]] in curves and [[1, 10], [2, 20]] in curves
