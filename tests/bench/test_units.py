"""A task with an error rate, seconds and megabytes: units and directions are kept by every command."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from toy_packages import install
from written import rows_of

from bench.results.record import decimals, number_text, number_with_interval, read_arrays, result_files
from bench.run.outcomes import checked
from checkpoints.export import ViTExport
from engine.tasks import Metric, Outcome

TASK = '''"""A toy depth estimator: how often it is wrong, how long an image takes, how much memory it needs."""

from dataclasses import dataclass

import numpy as np

from engine.tasks import Metric, Outcome, Protocol, Task


@dataclass(frozen=True, kw_only=True)
class Depth(Task):
    images: int = 200  # validation images

    def run(self, export, space):
        skill = 0.5 if export.digest == FIRST else 0.25  # the first export errs less, and takes more time and memory
        wrong = np.arange(self.images) < self.images * (1 - skill)
        wave = np.sin(np.arange(self.images)) ** 2  # mean 0.5, standard deviation 0.35
        seconds = 0.002 + 0.001 * skill + 0.0005 * wave * (1 + skill)
        seconds[:4] = np.nan
        scale = 1 + skill * wave
        wrong = wrong.astype(np.float32)
        metrics = {
            "wrong": Metric(value=100 * float(wrong.mean()), higher_is_better=False, per_image=wrong),
            "time": Metric(value=float(np.nanmean(seconds)), unit="s", higher_is_better=False, per_image=seconds),
            "memory": Metric(value=1412 + 4 * skill, unit="MB", higher_is_better=False),
            "scale": Metric(value=float(scale.mean()), unit="", higher_is_better=None, per_image=scale),
        }
        return Outcome(metrics=metrics, arrays={"depths": np.ones((4, 2))})


FIRST = "DIGEST"
PROTOCOLS = {"depth@toy": Protocol(task=Depth(), version=1, source="a paper, table 1")}
SUITES = {"smoke": ("depth@toy",)}
'''


@pytest.fixture
def run(bench, exports, tmp_path, use_packages):
    """`code, out, err = run()` evaluates both exports into tmp_path / "out"."""
    text = TASK.replace("DIGEST", ViTExport.load(exports[0]).digest)
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "toydepth", "1.0", {"depth": text}, {"bench.probes": {"depth": "toydepth.depth"}})
    use_packages(tmp_path / "site")
    words = ("--checkpoint", *exports, "--suite", "depth@toy", "--data", "tiny=tiny:", "--out", tmp_path / "out")
    return lambda *options: bench("run", *words, *options)


def test_result_files_record_units_directions_and_intervals(run, tmp_path):
    code, output, err = run()
    assert code == 0, err
    assert "wrong 50.00, time 0.00288 s, memory 1414 MB and 1 more" in output
    for path in result_files(tmp_path / "out"):
        metrics, arrays = json.loads(path.read_text())["metrics"], read_arrays(path)
        fields = ("unit", "higher_is_better", "array")
        described = {name: [metric[field] for field in fields] for name, metric in metrics.items()}
        assert described == {
            "wrong": ["%", False, "wrong"],
            "time": ["s", False, "time"],
            "memory": ["MB", False, None],
            "scale": ["", None, "scale"],
        }
        assert set(arrays) == {"wrong", "time", "scale", "depths"}
        assert metrics["memory"]["interval"] is None
        for name in ("wrong", "time"):
            low, high = metrics[name]["interval"]
            assert low < metrics[name]["value"] < high
        low, high = metrics["time"]["interval"]
        assert 3e-5 < (high - low) / 2 < 4e-5  # 1.97 standard deviations of 0.22 or 0.27 ms by the root of 196


@pytest.mark.slow
def test_lower_is_better_where_declared_and_units_are_shown(run, bench, tmp_path):
    output = run()[1]
    assert "0.00288 s" in output and "1414 MB" in output
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    first, second = (re.search(rf"^\| {name} \| \D*\d.*\[.*", text, re.MULTILINE)[0] for name in ("first", "second"))
    assert first.startswith("| first | 1 | **50.00 [43.1, 56.9]** | 0.00288 s [0.00284, 0.00291] | 1414 MB | 1.25 [")
    assert second.startswith("| second | 2 | 75.00 [68.6, 80.6] | **0.00256 s [0.00253, 0.00259]** | 1413 MB | 1.12 [")
    columns = list(rows_of(tmp_path / "out")[0])
    assert [name.removeprefix("tiny/depth@toy:") for name in columns[5:-1]] == [
        *("wrong", "wrong:low", "wrong:high", "time", "time:low", "time:high", "memory"),
        *("scale", "scale:low", "scale:high"),
    ]
    numbers = tmp_path / "compare.json"
    text = bench("compare", "first", "second", "--out", tmp_path / "out", "--metric", "all", "--json", numbers)[1]
    assert "first is better than second on tiny/depth@toy wrong by 25.0 points [" in text
    for name, sentence in (("time", "second is better than first"), ("scale", "first is higher than second")):
        of_one = bench("compare", "first", "second", "--out", tmp_path / "out", "--metric", name)[1]
        assert f"{sentence} on tiny/depth@toy {name} by 0." in of_one
    assert "kept as numbers alone, not for each image: memory" in text
    assert "196 images; paired bootstrap; effect" in text
    comparisons = {comparison["metric"]: comparison for comparison in json.loads(numbers.read_text())["comparisons"]}
    better = {name: comparison["better"] for name, comparison in comparisons.items()}
    assert better == {"wrong": "first", "time": "second", "scale": ""}
    time = comparisons["time"]
    assert time["difference"] == pytest.approx(time["accuracy_first"] - time["accuracy_second"], abs=1e-9)
    assert time["p"] < 0.01 and 0.00029 < time["low"] < time["difference"] < time["high"] < 0.00033


PLAIN = Metric(value=50.0)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(metrics={"time": Metric(value=1.0, unit="s", per_image=np.ones(3) / 2)}), "per image .*: time"),
        (Outcome(metrics={"top1": Metric(value=50.0, per_image=50 * np.ones(3))}), "per image .*: top1"),
        (Outcome(metrics={"top1": 50.0}), "not an engine.tasks.Metric: top1"),
        (
            Outcome(metrics={"spread": replace(PLAIN, higher_is_better=None, deviation_of="top1")}),
            "deviation_of is not a metric: spread",
        ),
        (
            Outcome(metrics={"top1": replace(PLAIN, per_image=np.ones(2) / 2)}, arrays={"top1": np.ones(2)}),
            "two .* top1",
        ),
    ],
)
def test_a_contradictory_outcome_is_refused(outcome, message):
    with pytest.raises(ValueError, match=message):
        checked(outcome)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(per_image=np.ones(2), resampled=np.ones(2)), "values per image or resampled values, not both"),
        (dict(deviation_of="top1"), "the deviation of top1 is neither better"),
    ],
)
def test_a_contradictory_metric_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Metric(value=1.0, **settings)


def test_equality_of_metrics_compares_arrays():
    first = Metric(value=50.0, per_image=np.array([1.0, 0.0, np.nan]))
    assert first == Metric(value=50.0, per_image=np.array([1.0, 0.0, np.nan]))
    assert first != Metric(value=50.0, per_image=np.array([0.0, 1.0, np.nan])) and first != Metric(value=50.0)
    assert first != Metric(value=50.0, unit="s", per_image=first.per_image)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (97.2, "%", "97.20"),
        (0.0312, "%", "0.0312"),
        (99.998, "%", "99.9980"),
        (100.0, "%", "100.00"),
        (0.0, "%", "0.00"),
        (0.002741, "s", "0.00274 s"),
        (12345.6, "MB", "12346 MB"),
        (0.7309, "", "0.731"),
        (-1.5, "", "-1.50"),
        (0.0, "s", "0.00 s"),
    ],
)
def test_numbers_are_written_with_their_unit(value, unit, text):
    assert number_text(value, unit) == text and decimals(value, unit) == len(text.split()[0].partition(".")[2])


def test_a_network_with_errors_is_not_shown_as_perfect():
    """As 49,999 of 50,000 images."""
    assert number_with_interval(99.998, "%", (99.9889, 99.99995)) == "99.9980 [99.989, 100.000]"
    assert number_with_interval(0.004, "%", (0.0005, 0.0144)) == "0.0040 [0.001, 0.014]"
    assert number_with_interval(100.0, "%", (99.9, 100.0)) == "100.00 [99.9, 100.0]"
