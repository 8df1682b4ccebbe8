"""`bench record --check` finds edits of a record that contradict the rest of it, even where all checksums fit."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_results import made_result, save_result

from bench.results.record import DataUsed, ProtocolUsed, read_result, result_files
from bench.results.store import StoredResult
from bench.run.checkpoints import describe
from bench.run.runner import arrays_of, metric_records
from bench.run.suites import catalogue
from bench.sharing.contradictions import contradictions
from bench.sharing.record import check_record
from bench.statistics.intervals import bootstrap_interval, of_mean
from checkpoints.export import ViTExport
from downstream.metrics.scores import scores, weighted_scores
from engine.tasks import Metric, Outcome, resampled, settings_of

IMAGES = 12  # of the scenes
LINEAR = "linear_sgd@ibot_base_cached"


def save_scenes(out: Path, checkpoint, seed: int) -> None:
    """Save a segmentation result of two trainings on random areas, as the task would."""
    generator = np.random.default_rng(seed)
    labelled = np.random.default_rng(9).integers(50, 100, (IMAGES, 4))  # the same for every checkpoint
    areas = []
    for _ in range(2):
        correct = (labelled * generator.random((IMAGES, 4))).astype(int)
        predicted = correct + generator.integers(0, 40, (IMAGES, 4))
        areas.append(np.stack([correct, predicted, labelled], -1).astype(np.int32))
    trainings = [scores(training_areas) for training_areas in areas]
    resamples = resampled(lambda weights: weighted_scores(areas, weights), IMAGES)
    metrics = {
        name: Metric(value=float(np.mean([training[name] for training in trainings])), resampled=resamples[name])
        for name in trainings[0]
    }
    spread = float(np.std([training["mIoU"] for training in trainings], ddof=1))
    metrics["mIoU_std"] = Metric(value=spread, higher_is_better=None, deviation_of="mIoU")
    arrays = {f"areas_{number}": training_areas for number, training_areas in enumerate(areas)}
    evaluations = [{"30": training} for training in trainings]
    facts = {"evaluations": evaluations, "reported_step": [30, 30], "chosen_on": []}
    outcome = Outcome(metrics=metrics, arrays=arrays, facts=facts)
    records, interval_method = metric_records(outcome, IMAGES)
    chosen = catalogue().protocols["segmenter_linear@smoke"]
    result = made_result(
        checkpoint,
        records,
        task=chosen.key,
        protocol=ProtocolUsed(name=chosen.name, version=chosen.protocol.version),
        settings=settings_of(chosen.task),
        data=DataUsed(name="scenes", url="tiny-cityscapes:", images={"val": IMAGES}, fingerprints={"val": "e" * 64}),
        facts=facts,
        arrays=tuple(arrays),
        interval_method=interval_method,
    )
    save_result(out, result, arrays_of(outcome))


@pytest.fixture(scope="module")
def original(exports, tmp_path_factory) -> Path:
    """A record of real results on frozen features, one of them with a limit, and of scenes; not to be edited."""
    from bench.__main__ import main

    out, to = (tmp_path_factory.mktemp(name) / name for name in ("out", "record"))
    words = ["run", "--checkpoint", *map(str, exports), "--out", str(out), "--data", "digits=digits:", "--suite"]
    assert main([*words, f"knn@dino,{LINEAR},lowshot@bench", "--limit", "200", "--precision", "bfloat16"]) == 0
    assert main([*words, "knn@dino"]) == 0
    assert main([*words, "knn@dino", "--set", "knn.k=5", "knn.temperature=0.1,0.2"]) == 0
    for seed, folder in enumerate(exports):
        export = ViTExport.load(folder)
        shutil.copytree(folder, out / "exports" / f"{folder.name}-{export.digest[:8]}")
        save_scenes(out, describe(export, folder.name, str(folder)), seed)
    assert main(["record", str(out), "--to", str(to)]) == 0
    assert list(check_record(to)) == []
    return to


@pytest.fixture
def record(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "record"))


class Edited:
    """A result of a record, to be edited."""

    def __init__(self, folder: Path, stem: str, checkpoint: str = "first") -> None:
        self.path = next(folder.glob(f"results/{checkpoint}-*/*/{stem}.json"))
        self.json = json.loads(self.path.read_text())
        with np.load(self.path.with_suffix(".npz")) as arrays:
            self.arrays = dict(arrays)

    def write(self, path: Path | None = None) -> None:
        for suffix in (".json", ".npz"):
            self.path.with_suffix(suffix).unlink()
        self.path = path or self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.json))
        np.savez_compressed(self.path.with_suffix(".npz"), **self.arrays)

    def value(self, metric: str, field: str = "value"):
        return self.json["metrics"][metric][field]

    def set(self, metric: str, **fields) -> None:
        self.json["metrics"][metric] |= fields

    def recompute(self, metric: str) -> None:
        """Set the value and the interval that follow from the array."""
        values = self.arrays[metric]
        self.set(metric, value=100 * float(np.nanmean(values)), interval=list(of_mean(values, "%")[0]))


KNN, SHORT, SWEEP, SCENES = "knn@dino-seed0", "lowshot@bench-*", "knn@dino-????????-seed0", "segmenter*"
LIMITED = "knn@dino-limit*"
FEWER_IMAGES = {"data": {"images": {"val": 400}}}


def call_wrong_predictions_right(edited: Edited) -> None:
    values = edited.arrays["top1_k10"]
    values[np.flatnonzero(values == 0)[:100]] = 1
    edited.arrays["top5_k10"] = np.maximum(values, edited.arrays["top5_k10"])
    edited.recompute("top1_k10")
    edited.recompute("top5_k10")


def remove_array(edited: Edited) -> None:
    edited.set("top1_k10", value=99.0, interval=None, array=None)
    del edited.arrays["top1_k10"]


def shift_resamples(edited: Edited) -> None:
    edited.arrays["mIoU_resampled"] += 5
    edited.set("mIoU", interval=list(bootstrap_interval(edited.arrays["mIoU_resampled"], IMAGES)))


def change_labels(edited: Edited) -> None:
    for name in ("areas_0", "areas_1"):
        edited.arrays[name][0, 0, 1:] += 500


def call_all_top5_wrong(edited: Edited) -> None:
    edited.arrays["top5_k10"] = 0 * edited.arrays["top5_k10"]
    edited.recompute("top5_k10")


def cut_array(edited: Edited) -> None:
    edited.arrays["top1_k10"] = edited.arrays["top1_k10"][:400]
    edited.recompute("top1_k10")


def top1(**fields) -> dict:
    """Changes of the fields of the metric top1_k10."""
    return {"metrics": {"top1_k10": fields}}


# Edit -> results, their changes as a function of Edited or as values to set in the JSON, what the contradiction says.
EDITS = {
    "value": (KNN, lambda edited: edited.set("top1_k10", value=edited.value("top1_k10") + 5), "not the mean"),
    "interval": (KNN, top1(interval=[98.0, 99.0]), "another interval"),
    "interval gone": (KNN, top1(interval=None), "no interval|an interval"),
    "array set to null": (KNN, top1(value=99.0, interval=None, array=None), "belongs to no metric"),
    "array gone": (KNN, remove_array, "no values that it could follow from"),
    "as a deviation": (
        KNN,
        lambda edited: [remove_array(edited), edited.set("top1_k10", deviation_of="top1_k20", higher_is_better=None)],
        "not the name of a deviation",
    ),
    "array edited": (KNN, call_wrong_predictions_right, "has another class than in"),
    "top5 below top1": (KNN, call_all_top5_wrong, "for which top5_k10 is wrong"),
    "array added": (KNN, lambda edited: edited.arrays.update(extra=np.ones(3)), "array extra: belongs to no metric"),
    "fewer values": (KNN, cut_array, "400 images, expected 500"),
    "number of images": (KNN, FEWER_IMAGES, "500 images, expected 400"),
    "count of a fingerprint": (KNN, FEWER_IMAGES, "400 with the same fingerprint"),
    "worse is better": (KNN, top1(higher_is_better=False), "described differently"),
    "unit": (KNN, top1(unit="s"), "not the mean"),
    "method": (KNN, {"interval_method": "ours"}, "intervals were not computed by"),
    "settings": (KNN, {"settings": {"crop": 1.0}}, "setting crop is 1.0"),
    "version": (KNN, {"protocol": {"version": 2}}, "its content belongs to"),
    "seed": (KNN, {"seed": 1}, "its content belongs to"),
    "limit": (LIMITED, {"limit": None}, "its content belongs to"),
    "precision": (KNN, {"precision": "bfloat16"}, "another precision"),
    "image set": (KNN, {"data": {"name": "cifar10"}}, "its content belongs to"),
    "fingerprint": (KNN, {"data": {"fingerprints": {"val": "0" * 64}}}, "other images than data"),
    "status": (KNN, {"status": "failed"}, "numbers and a message"),
    "speed": (KNN, {"images_per_second": 1e6}, "images_per_second"),
    "method of checkpoint": (KNN, {"checkpoint": {"method": "mae"}}, "config.json: method"),
    "parameters": (KNN, {"checkpoint": {"parameters": 7}}, "config.json: parameters"),
    "plugin": (KNN, {"protocol": {"plugin": "toys 1.0"}}, "is a protocol of knn"),
    "task": (KNN, {"task": "linear"}, "is a protocol of knn"),
    "chosen": (
        SWEEP,
        lambda edited: [edited.set(name, chosen_on_val=False) for name in edited.json["metrics"]],
        "chosen on the validation images",
    ),
    "changes": (
        SWEEP,
        {"protocol": {"changes": {}, "modified": False}},
        "setting k is .5., but knn@dino version 1 has",
    ),
    "deviation": (SHORT, {"metrics": {"top1_1shot_std": {"value": 0.01}}}, "not the value in its facts"),
    "mIoU": (SCENES, {"metrics": {"mIoU": {"value": 80.0}}}, "not what the areas or detections give"),
    "its deviation": (SCENES, {"metrics": {"mIoU_std": {"value": 0.1}}}, "not the deviation of its trainings"),
    "resamples": (SCENES, shift_resamples, "mIoU_resampled is not what"),
    "labels": (SCENES, change_labels, "labels differ"),
    "areas": (SCENES, lambda edited: edited.arrays["areas_0"].__imul__(3), "labels differ"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_contradicts_the_record_is_found(edit, record):
    stem, change, message = EDITS[edit]
    edited = Edited(record, stem)
    merge(edited.json, change) if isinstance(change, dict) else change(edited)
    edited.write()
    assert_found(record, message, stem)


def merge(values: dict, changes: dict) -> None:
    """Set values of nested dictionaries."""
    for key, change in changes.items():
        if isinstance(change, dict) and change:
            merge(values[key], change)
        else:
            values[key] = change


def assert_found(record: Path, message: str, stem: str = "*") -> None:
    """Check results of this stem alone, because computing the intervals of all takes long."""
    results = [
        StoredResult(path=path, result=read_result(path)) for path in result_files(record) if path.match(f"{stem}.json")
    ]
    lines = list(contradictions(record, results))
    assert any(re.search(message, line) for line in lines), lines
    assert all(line.startswith(("results/", "checkpoints/")) for line in lines), lines


def test_swapped_results_are_found(record):
    first, second = (Edited(record, KNN, checkpoint) for checkpoint in ("first", "second"))
    first.json, second.json, first.arrays, second.arrays = second.json, first.json, second.arrays, first.arrays
    first.write()
    second.write()
    assert_found(record, "its content belongs to results/", KNN)


def test_a_result_of_few_images_in_place_of_the_full_one_is_found(record):
    edited = Edited(record, LIMITED)
    edited.path.with_name("knn@dino-seed0.json").unlink()
    edited.path.with_name("knn@dino-seed0.npz").unlink()
    edited.json |= {"limit": None, "precision": "float32"}
    edited.write(edited.path.with_name("knn@dino-seed0.json"))
    assert_found(record, "has values for 200 images, expected 500")


@pytest.mark.parametrize("key", ["digest", "mean", "method"])
def test_an_edited_config_is_found(key, record):
    path = next(record.glob("checkpoints/first-*/config.json"))
    config = json.loads(path.read_text())
    if key == "mean":
        config["pretrained_cfg"]["mean"] = [0.1, 0.2, 0.3]
    else:
        config["vit_export"][key] = "0" * 64
    path.write_text(json.dumps(config))
    assert_found(record, {"mean": "pretrained_cfg.mean is"}.get(key, f"config.json: {key}"), KNN)


def test_results_of_another_digest_are_found(record):
    """Also where folders are renamed: the export still has the digest of its weights."""
    for stem in (KNN, LIMITED, SWEEP, SHORT, SCENES, f"{LINEAR}*"):
        edited = Edited(record, stem)
        edited.json["checkpoint"]["digest"] = "1" * 64
        edited.write(record / "results" / "first-11111111" / edited.path.parent.name / edited.path.name)
    folder = next(record.glob("checkpoints/first-*"))
    folder.rename(folder.with_name("first-11111111"))
    assert_found(record, "config.json: digest")


@pytest.mark.parametrize("facts", [{"evaluations": 3, "reported_step": [1]}, {"fits": [{"top1": "x"}]}])
def test_facts_of_another_form_are_found(facts, record):
    edited = Edited(record, KNN)
    edited.json["facts"] = facts
    edited.write()
    assert_found(record, "its facts do not fit its task", KNN)
