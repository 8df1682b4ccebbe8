"""The suite `quick`: what its protocols share, what a run says before it computes, and advice for small image sets."""

import re

import bench
from bench.run import calibration, forecast
from bench.run.suites import catalogue
from tests.probes.toy_exports import varied_export


def test_quick_reads_the_images_once_for_each_crop_and_says_so_first(tmp_path, monkeypatch):
    monkeypatch.setitem(forecast.ANNOUNCED_FROM, "cpu", 0.0)
    lines: list[str] = []
    shared = dict(limit=60, out=tmp_path, progress=lines.append)
    results = bench.evaluate_suite(varied_export(), "quick", "digits=digits:", **shared)
    assert {result.protocol.name for result in results} == {*catalogue().suites["quick"]}
    crops = {result.protocol.name: result.facts["val"]["transform"] for result in results}
    assert len({*crops.values()}) == 2 and crops["logreg@dinov2"].startswith("resize16-")
    views = 60 * 10  # of health@val
    assert sum(result.cost["forwards"] for result in results) == 2 * (60 + 60) + views
    (said,) = [line for line in lines if "through the network" in line]
    assert re.search(r"4 jobs: 840 images .* TFLOP, about [\d.]+ (s|min)", said)
    assert lines.index(said) < next(index for index, line in enumerate(lines) if "[1/4]" in line)


def test_a_linear_probe_with_few_steps_points_to_logistic_regression(tmp_path):
    words = dict(limit=60, out=tmp_path, settings={"epochs": 3, "lrs": (0.1,), "batch": 32})
    result = bench.evaluate(varied_export(), "linear_sgd@ibot_base_cached", "digits=digits:", **words)
    assert any("6 optimiser steps" in text and "logreg@dinov2" in text for text in result.facts["warnings"])


def test_networks_of_one_architecture_are_timed_once_in_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(forecast.ANNOUNCED_FROM, "cpu", 0.0)
    measured: list[object] = []
    monkeypatch.setattr(calibration, "network_rate", lambda export, *_, **__: measured.append(export.spec) or 1e9)
    lines: list[str] = []
    options = dict(names=["a", "b"], limit=60, out=tmp_path, progress=lines.append)
    bench.evaluate_suite([varied_export(), varied_export(collapsed=True)], "knn@dino", "digits=digits:", **options)
    assert len([line for line in lines if "through the network" in line]) == 2 and len(measured) == 1
