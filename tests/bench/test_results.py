"""Result files are read back equal; unknown fields are ignored, anything else wrong is refused."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from bench.results.record import (
    CheckpointUsed,
    DataUsed,
    MetricRecord,
    ProtocolUsed,
    Result,
    TrainingCost,
    read_arrays,
    read_result,
    result_stem,
    time_text,
    write_result,
)
from bench.results.store import StoredResult
from engine.tasks import ADDED, Task, Workspace
from tools import result_fields

RESULT = Result(
    status="ok",
    task="knn",
    protocol=ProtocolUsed(name="knn@dino", version=1, source="Caron et al. 2021"),
    metrics={"top1_k20": MetricRecord(value=97.5, interval=(95.5, 98.75), array="top1_k20")},
    checkpoint=CheckpointUsed(name="small", digest="ab" * 32, parameters=5),
    data=DataUsed(name="digits", url="digits:", fingerprints={"val": "cd"}, images={"val": 500}),
    seed=3,
    settings={"k": [20]},
    facts={"images": [1, 2]},
    versions={"torch": "2.11.0"},
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "knn@dino-seed3.json"


def test_a_result_is_read_back_equal(path):
    result = replace(RESULT, arrays=("correct",))
    write_result(path, result, {"correct": np.array([True, False])})
    assert replace(read_result(path), arrays_sha256="") == result
    assert np.load(path.with_suffix(".npz"))["correct"].tolist() == [True, False]
    assert [entry.suffix for entry in sorted(path.parent.iterdir())] == [".json", ".npz"]


def test_the_same_arrays_give_the_same_bytes(path, tmp_path):
    write_result(path, RESULT, {"correct": np.arange(5)})
    write_result(tmp_path / "again.json", RESULT, {"correct": np.arange(5)})
    assert path.with_suffix(".npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None])
def test_missing_or_damaged_arrays_are_refused(path, damage):
    write_result(path, RESULT, {"correct": np.arange(2)})
    assert read_arrays(path)["correct"].tolist() == [0, 1]
    path.with_suffix(".npz").write_bytes(damage) if damage is not None else path.with_suffix(".npz").unlink()
    with pytest.raises(ValueError, match="its arrays cannot be read; make the result again with rerun=True"):
        read_arrays(path)


def test_arrays_of_another_result_are_refused(path):
    """As a kill between the two files leaves them, or a copy of one of them alone."""
    write_result(path, RESULT, {"correct": np.arange(2)})
    before = path.read_text()
    write_result(path, RESULT, {"correct": np.arange(3)})
    current = read_result(path).arrays_sha256
    assert read_arrays(path, current)["correct"].tolist() == [0, 1, 2]
    path.write_text(before)
    with pytest.raises(ValueError, match=r"arrays of another result .* rerun=True"):
        StoredResult(path=path, result=read_result(path)).arrays  # noqa: B018
    earlier = StoredResult(path=path, result=RESULT)  # of a version that recorded no sum
    assert earlier.arrays["correct"].tolist() == [0, 1, 2]


def test_logs_and_arrays_of_an_earlier_result_are_removed(path):
    write_result(path, replace(RESULT, status="failed", message="no"), {}, log="Traceback ...")
    assert path.with_suffix(".log").read_text() == "Traceback ..."
    write_result(path, RESULT, {"correct": np.arange(2)})
    assert not path.with_suffix(".log").exists()
    write_result(path, RESULT, {})
    assert not path.with_suffix(".npz").exists()


def test_unknown_keys_are_ignored(path):
    write_result(path, RESULT, {})
    value = json.loads(path.read_text())
    value["colour"] = "red"
    value["checkpoint"]["mood"] = "good"
    path.write_text(json.dumps(value))
    assert read_result(path) == RESULT


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"status": "ok"}', '{"schema": 1}', "\x00\x01"])
def test_a_damaged_file_is_refused_in_one_line(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="not a result file") as error:
        read_result(path)
    assert "\n" not in str(error.value)


NEWEST = json.loads(RESULT.to_json())
WRONG = [("status", "great"), ("metrics", {"top1": 97.5}), ("checkpoint", "small"), ("seed", "3"), ("protocol", {})]
WRONG += [("metrics", {"top1": {"value": 1, "interval": ends}}) for ends in ([1, 2, 3], 5, ["a", "b"])]
WRONG += [("metrics", {"top1": {"value": "high"}}), ("metrics", {"top1": {"unit": "s"}}), ("arrays", "areas")]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_of_the_wrong_type_is_named(path, key, value):
    path.write_text(json.dumps(NEWEST | {key: value}))
    with pytest.raises(ValueError, match=rf"^{path}: not a result file: [^\n]*`\$\.{key}"):
        read_result(path)


def test_numpy_numbers_are_written_as_numbers(path):
    write_result(path, replace(RESULT, facts={"rate": np.float64(0.1), "pair": (1, 2)}), {})
    assert read_result(path).facts == {"rate": 0.1, "pair": [1, 2]}
    with pytest.raises(ValueError, match="knn@dino: a fact is not a JSON value: object is not JSON"):
        replace(RESULT, facts={"file": object()}).to_json()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_infinite_numbers_are_refused(value):
    with pytest.raises(ValueError):
        replace(RESULT, metrics={"top1": MetricRecord(value=value)}).to_json()


SPACE = Workspace(cache=Path("cache"), data="digits:")


@pytest.mark.parametrize(
    ("protocol", "space", "expected"),
    [
        ({}, {}, "knn@dino-seed0"),
        ({}, {"seed": 4, "limit": 100}, "knn@dino-limit100-seed4"),
        ({"version": 2}, {}, "knn@dino-v2-seed0"),
        ({}, {"precision": "bfloat16", "decode": "fast"}, "knn@dino-bfloat16-fast-seed0"),
        ({}, {"device": "cuda", "batch_size": 7, "workers": 3}, "knn@dino-seed0"),
    ],
)
def test_file_names_differ_where_numbers_do(protocol, space, expected):
    assert result_stem(replace(RESULT.protocol, **protocol), RESULT.settings, replace(SPACE, **space)) == expected


def test_changed_settings_have_file_names_of_their_own():
    modified = replace(RESULT.protocol, modified=True)
    names = {result_stem(modified, settings, SPACE) for settings in ({"k": [20]}, {"k": [10]})}
    assert len(names) == 2
    assert all(len(name) == len("knn@dino-12345678-seed0") for name in names)


def test_the_documented_table_of_fields_is_up_to_date():
    """If this fails, run python -m tools.result_fields"""
    text = result_fields.PAGE.read_text(encoding="ascii")
    assert result_fields.with_table(text) == text
    rows = result_fields.table()
    assert "| `metrics.<name>.interval` | array of 2 numbers or null | low and high end" in rows
    assert "| `status` | `failed` or `ok` |" in rows and "| `limit` | integer or null |" in rows
    assert rows.count("\n") == 2 + sum(
        len(kind.__dataclass_fields__)
        for kind in (Result, ProtocolUsed, MetricRecord, CheckpointUsed, TrainingCost, DataUsed)
    )


def test_training_costs_are_written_with_times_and_devices():
    assert TrainingCost(hours=0.0002201, devices="1 x CPU").text == "0.792 s on 1 x CPU"
    assert TrainingCost(hours=0.5, seconds_per_epoch=722).text == "30 min, 722 s an epoch"
    assert TrainingCost(hours=60.2).text == "60.2 h" and TrainingCost().text == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.4, "59.4 s"), (60, "1 min"), (96.84, "1.61 min"), (3600, "1 h"), (36e6, "10,000 h"), (0, "0 s")],
)
def test_times_are_written_in_the_largest_unit_not_above_them(seconds, text):
    assert time_text(seconds / 3600) == text


@dataclass(frozen=True, kw_only=True)
class Grown(Task):
    ks: tuple[int, ...] = (1, 2)
    new: int = field(default=0, metadata=ADDED)


def test_settings_that_changed_since_a_result_are_found_also_those_that_were_added():
    result = replace(RESULT, settings={"ks": [1, 2], "gone": 3})
    assert not result.changed_since(Grown())
    assert result.changed_since(Grown(ks=(1,), new=5)) == {"new": (0, 5), "ks": ([1, 2], [1])}
    assert replace(RESULT, settings={"new": 5}).changed_since(Grown()) == {"new": (5, 0)}
