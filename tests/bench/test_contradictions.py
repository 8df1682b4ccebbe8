"""`bench record --check` finds every edit of a record that the rest of it disproves, whatever the sums say."""

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


def save_scenes(out: Path, used, seed: int) -> None:
    """A segmentation result of two trainings on made-up areas, as the task would give it."""
    draw, label = np.random.default_rng(seed), np.random.default_rng(9)
    labelled = label.integers(50, 100, (IMAGES, 4))
    parts = []
    for _ in range(2):
        right = (labelled * draw.random((IMAGES, 4))).astype(int)
        parts.append(np.stack([right, right + draw.integers(0, 40, (IMAGES, 4)), labelled], -1).astype(np.int32))
    each = [scores(part) for part in parts]
    drawn = resampled(lambda weights: weighted_scores(parts, weights), IMAGES)
    metrics = {
        name: Metric(value=float(np.mean([one[name] for one in each])), resampled=drawn[name]) for name in each[0]
    }
    spread = float(np.std([one["mIoU"] for one in each], ddof=1))
    metrics["mIoU_std"] = Metric(value=spread, higher_is_better=None, deviation_of="mIoU")
    arrays = {f"areas_{number}": part for number, part in enumerate(parts)}
    evaluations = [{"30": one} for one in each]
    facts = {"evaluations": evaluations, "reported_step": [30, 30], "chosen_on": []}
    outcome = Outcome(metrics=metrics, arrays=arrays, facts=facts)
    records, interval_method = metric_records(outcome, IMAGES)
    chosen = catalogue().protocols["segmenter_linear@smoke"]
    result = made_result(
        used,
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
def written(exports, tmp_path_factory) -> Path:
    """The record of real results on frozen features, of a limited one among them, and of scenes."""
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
def record(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "record"))


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

    def recomputed(self, metric: str) -> None:
        """Value and interval that follow from the array, as one would who edits it."""
        values = self.arrays[metric]
        self.set(metric, value=100 * float(np.nanmean(values)), interval=list(of_mean(values, "%")[0]))


KNN, SHORT, SWEEP, SCENES = "knn@dino-seed0", "lowshot@bench-*", "knn@dino-????????-seed0", "segmenter*"
LIMITED = "knn@dino-limit*"


def more_right(each: Edited) -> None:
    """Predictions that were wrong are called right, with all that follows from them."""
    values = each.arrays["top1_k10"]
    values[np.flatnonzero(values == 0)[:100]] = 1
    each.arrays["top5_k10"] = np.maximum(values, each.arrays["top5_k10"])
    each.recomputed("top1_k10")
    each.recomputed("top5_k10")


def no_array(each: Edited) -> None:
    each.set("top1_k10", value=99.0, interval=None, array=None)
    del each.arrays["top1_k10"]


def wider(each: Edited) -> None:
    each.arrays["mIoU_resampled"] += 5
    each.set("mIoU", interval=list(bootstrap_interval(each.arrays["mIoU_resampled"], IMAGES)))


def other_labels(each: Edited) -> None:
    for name in ("areas_0", "areas_1"):
        each.arrays[name][0, 0, 1:] += 500


def fewer_images(each: Edited) -> None:
    each.json["data"]["images"]["val"] = 400


EDITS = {
    "value": (KNN, lambda each: each.set("top1_k10", value=each.value("top1_k10") + 5), "not the mean"),
    "interval": (KNN, lambda each: each.set("top1_k10", interval=[98.0, 99.0]), "another interval"),
    "interval gone": (KNN, lambda each: each.set("top1_k10", interval=None), "no interval|an interval"),
    "array set to null": (
        KNN,
        lambda each: each.set("top1_k10", value=99.0, interval=None, array=None),
        "belongs to no metric",
    ),
    "array gone": (KNN, no_array, "no values that it could follow from"),
    "as a deviation": (
        KNN,
        lambda each: [no_array(each), each.set("top1_k10", deviation_of="top1_k20", higher_is_better=None)],
        "not the name of a deviation",
    ),
    "array edited": (KNN, more_right, "has another class than in"),
    "top5 below top1": (
        KNN,
        lambda each: [each.arrays.__setitem__("top5_k10", 0 * each.arrays["top5_k10"]), each.recomputed("top5_k10")],
        "for which top5_k10 is wrong",
    ),
    "array added": (KNN, lambda each: each.arrays.update(extra=np.ones(3)), "array extra: belongs to no metric"),
    "fewer values": (
        KNN,
        lambda each: [each.arrays.update(top1_k10=each.arrays["top1_k10"][:400]), each.recomputed("top1_k10")],
        "400 images, expected 500",
    ),
    "number of images": (KNN, fewer_images, "500 images, expected 400"),
    "count of a fingerprint": (KNN, fewer_images, "400 with the same fingerprint"),
    "worse is better": (KNN, lambda each: each.set("top1_k10", higher_is_better=False), "described differently"),
    "unit": (KNN, lambda each: each.set("top1_k10", unit="s"), "not the mean"),
    "method": (KNN, lambda each: each.json.update(interval_method="ours"), "intervals were not computed by"),
    "settings": (KNN, lambda each: each.json["settings"].update(crop=1.0), "setting crop is 1.0"),
    "version": (KNN, lambda each: each.json["protocol"].update(version=2), "its content belongs to"),
    "seed": (KNN, lambda each: each.json.update(seed=1), "its content belongs to"),
    "limit": (LIMITED, lambda each: each.json.update(limit=None), "its content belongs to"),
    "precision": (KNN, lambda each: each.json.update(precision="bfloat16"), "another precision"),
    "image set": (KNN, lambda each: each.json["data"].update(name="cifar10"), "its content belongs to"),
    "fingerprint": (KNN, lambda each: each.json["data"]["fingerprints"].update(val="0" * 64), "other images than data"),
    "status": (KNN, lambda each: each.json.update(status="failed"), "numbers and a message"),
    "speed": (KNN, lambda each: each.json.update(images_per_second=1e6), "images_per_second"),
    "method of checkpoint": (KNN, lambda each: each.json["checkpoint"].update(method="mae"), "config.json: method"),
    "parameters": (KNN, lambda each: each.json["checkpoint"].update(parameters=7), "config.json: parameters"),
    "plugin": (KNN, lambda each: each.json["protocol"].update(plugin="toys 1.0"), "is a protocol of knn"),
    "task": (KNN, lambda each: each.json.update(task="linear"), "is a protocol of knn"),
    "chosen": (
        SWEEP,
        lambda each: [each.set(name, chosen_on_val=False) for name in each.json["metrics"]],
        "chosen on the validation images",
    ),
    "changes": (
        SWEEP,
        lambda each: each.json["protocol"].update(changes={}, modified=False),
        "setting k is .5., but knn@dino version 1 has",
    ),
    "deviation": (SHORT, lambda each: each.set("top1_1shot_std", value=0.01), "not the value in its facts"),
    "mIoU": (SCENES, lambda each: each.set("mIoU", value=80.0), "not what the areas or detections give"),
    "its deviation": (SCENES, lambda each: each.set("mIoU_std", value=0.1), "not the deviation of its trainings"),
    "resamples": (SCENES, wider, "mIoU_resampled is not what"),
    "labels": (SCENES, other_labels, "labels differ"),
    "areas": (SCENES, lambda each: each.arrays["areas_0"].__imul__(3), "labels differ"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_the_record_disproves_is_found(edit, record):
    stem, change, message = EDITS[edit]
    each = Edited(record, stem)
    change(each)
    each.write()
    assert_found(record, message, stem)


def assert_found(record: Path, message: str, stem: str = "*") -> None:
    """By the results of that stem of both checkpoints: intervals of all others need not be computed again."""
    measured = [
        StoredResult(path=path, result=read_result(path)) for path in result_files(record) if path.match(f"{stem}.json")
    ]
    lines = list(contradictions(record, measured))
    assert any(re.search(message, line) for line in lines), lines
    assert all(line.startswith(("results/", "checkpoints/")) for line in lines), lines


def test_swapped_results_are_found(record):
    one, other = (Edited(record, KNN, checkpoint) for checkpoint in ("first", "second"))
    one.json, other.json, one.arrays, other.arrays = other.json, one.json, other.arrays, one.arrays
    one.write()
    other.write()
    assert_found(record, "its content belongs to results/", KNN)


def test_a_hidden_limit_is_found_even_under_another_name(record):
    each = Edited(record, LIMITED)
    each.path.with_name("knn@dino-seed0.json").unlink()
    each.path.with_name("knn@dino-seed0.npz").unlink()
    each.json |= {"limit": None, "precision": "float32"}
    each.write(each.path.with_name("knn@dino-seed0.json"))
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


def test_another_digest_is_found(record):
    """Of a result, with its place and the checkpoint's folder: the export still says which weights it had."""
    for stem in (KNN, LIMITED, SWEEP, SHORT, SCENES, f"{LINEAR}*"):
        each = Edited(record, stem)
        each.json["checkpoint"]["digest"] = "1" * 64
        each.write(record / "results" / "first-11111111" / each.path.parent.name / each.path.name)
    old = next(path for path in record.glob("checkpoints/first-*"))
    old.rename(old.with_name("first-11111111"))
    assert_found(record, "config.json: digest")


def test_odd_facts_get_a_line(record):
    for odd in ({"evaluations": 3, "reported_step": [1]}, {"fits": [{"top1": "x"}]}, {"history": {}, "epoch": 1}):
        each = Edited(record, KNN)
        each.json["facts"] = odd
        each.write()
        if "history" not in odd:
            assert_found(record, "its facts do not fit its task", KNN)
        assert read_result(each.path).facts == odd
