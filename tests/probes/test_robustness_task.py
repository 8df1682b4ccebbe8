"""Shifted test sets in their layouts: found beside ImageNet and scored by their own rules."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import RandomState
from PIL import Image
from refusals import refusal
from toy_exports import varied_export

from bench.results.record import skipped_paths
from engine.tasks import Workspace, resampled
from probes.finetune.trainer import Training
from probes.shifted import ALEXNET, mce, mce_metric, objectnet_counterparts, open_class_folders, real_labels
from probes.tasks.finetune import Finetune
from probes.tasks.linear import Linear
from probes.tasks.robustness import Robustness
from probes.tasks.robustness_finetune import RobustnessFinetune

WNIDS = [f"n{number:08d}" for number in range(1, 13)]
COLOURS = {name: np.array(np.unravel_index(5 + number, (3, 3, 3))) * 110 for number, name in enumerate(WNIDS)}
TASK = Robustness(readouts=("cls1",), lrs=(0.5, 1.0), augment=False, epochs=60, batch=64, corruptions=("contrast",))


def paint(path, name, seed, side=24):
    noise = RandomState(seed).normal(0, 12, (side, side, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(COLOURS[name] + noise, 0, 255).astype(np.uint8)).save(path)


def folder(root, names, count=3, folders=None, extension="png", side=24):
    """`count` images of each class in its folder."""
    for index, (name, subfolder) in enumerate(zip(names, folders or names, strict=True)):
        for number in range(count):
            paint(root / subfolder / f"{number}.{extension}", name, [index, number], side)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """ImageNet with twelve classes, and all its shifted sets beside it."""
    root = tmp_path_factory.mktemp("sets")
    folder(root / "imagenet/train", WNIDS, 6)
    for number, name in enumerate(WNIDS, 1):  # named as ImageNet's own files are
        paint(root / f"imagenet/val/{name}/ILSVRC2012_val_{number:08d}.png", name, [number, 7])
    labels = [[number, 11 - number] for number in range(12)]
    labels[0], labels[1] = [], [5]  # one image without a label, and one of another class
    (root / "imagenet/real.json").write_text(json.dumps(labels))
    folder(root / "imagenetv2-matched-frequency-format-val", WNIDS, 2, [str(number) for number in range(12)])
    folder(
        root / "imagenet-a", [WNIDS[7]], 2, [WNIDS[2]]
    )  # looks like a class outside of A, so it is correct only among A's classes
    folder(root / "imagenet-r", WNIDS[:4])
    folder(root / "sketch", WNIDS, 1, extension="JPEG")
    objects = ["chair", "lamp_(desk)", "spoon"]  # the first two have counterparts
    folder(root / "objectnet-1.0/images", WNIDS[:3], 2, objects)
    for name in objects:
        for path in (root / "objectnet-1.0/images" / name).iterdir():
            pixels = np.array(Image.open(path))
            framed = np.full((28, 28, 3), (255, 0, 0), np.uint8)
            framed[2:-2, 2:-2] = pixels
            Image.fromarray(framed).save(path)
    mappings = {
        "folder_to_objectnet_label.json": {"chair": "Chair", "lamp_(desk)": "Lamp", "spoon": "Spoon"},
        "objectnet_to_imagenet_1k.json": {"Chair": "zero", "Lamp": "one; seven"},
        "pytorch_to_imagenet_2012_id.json": {str(number): 11 - number for number in range(12)},
    }
    (root / "objectnet-1.0/mappings").mkdir()
    for name, content in mappings.items():
        (root / "objectnet-1.0/mappings" / name).write_text(json.dumps(content))
    titles = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    (root / "objectnet-1.0/mappings/imagenet_to_label_2012_v2").write_text("\n".join(titles[::-1]) + "\n")
    for corruption in ("contrast", "fog"):
        for level in range(1, 6):
            folder(root / f"imagenet-c/{corruption}/{level}", WNIDS, 1, side=16)
    (root / "frost").mkdir()  # named like a corruption, but not a part of imagenet-c
    return root


@pytest.fixture(scope="module")
def outcome(imagenet, tmp_path_factory):
    space = Workspace(cache=tmp_path_factory.mktemp("cache"), data=f"imagenet:{imagenet / 'imagenet'}")
    return TASK.run(varied_export(), space)


def test_every_set_is_scored_by_its_own_rule(outcome):
    numbers = outcome.numbers
    assert numbers["top1"] == 100 and next(iter(numbers)) == "real_top1"
    for name in ("v2", "a", "r", "sketch", "objectnet"):
        assert numbers[f"{name}_top1"] == 100, name
    assert numbers["real_top1"] == pytest.approx(
        100 * 10 / 11
    )  # of twelve images one has no label and one another class
    errors = outcome.arrays["c_errors"]
    alexnet = [np.mean(ALEXNET[name]) for name in ("fog", "contrast")]  # in the order of the benchmark
    assert errors.shape == (2, 5) and numbers["c_mce_of2"] == pytest.approx(100 * np.mean(errors.mean(1) / alexnet))


def test_the_mean_corruption_error_varies_with_the_images_it_is_measured_on(outcome):
    """All corruptions of a drawn image count as often as the image; of other images per set there is no interval."""
    wrong = {name: (np.random.default_rng(0).random((5, 30)) < 0.4).astype(float) for name in ("fog", "contrast")}
    wrong["fog"][2, 7] = np.nan
    metric = mce_metric(wrong)
    weights = resampled(lambda weights: {"": weights}, 30, 100)[""][99]
    images = np.repeat(np.arange(30), weights.astype(int))
    drawn = {name: [np.nanmean(values[images]) for values in sets] for name, sets in wrong.items()}
    assert metric.resampled[99] == pytest.approx(mce(drawn)) and metric.resampled_units == 30
    assert mce_metric(wrong | {"snow": np.ones((5, 29))}).resampled is None
    assert outcome.metrics["c_mce_of2"].resampled_units == 12


def test_clean_numbers_equal_those_of_the_linear_probe(imagenet, outcome, tmp_path):
    data = f"imagenet:{imagenet / 'imagenet'}"
    linear = TASK.plain(Linear).run(varied_export(), Workspace(cache=tmp_path, data=data))
    assert linear.numbers.items() <= outcome.numbers.items()


def test_missing_corruptions_are_generated_and_named_so(tmp_path):
    outcome = TASK.run(varied_export(), Workspace(cache=tmp_path, data="tiny:"))
    assert {name for name in outcome.numbers if "error" in name or "mce" in name} == {
        "generated_mce_of1",
        "generated_contrast_error",
    }
    assert outcome.arrays["generated_errors"].shape == (1, 5)
    assert any("generated_mce_of1" in warning and "AlexNet" in warning for warning in outcome.facts["warnings"])


def test_unreadable_images_of_shifted_sets_are_recorded(imagenet, tmp_path):
    """A result without them is marked, and a run without --skip-bad does not take it for complete."""
    (tmp_path / "imagenet").symlink_to(imagenet / "imagenet")
    broken = [f"imagenet-r/{WNIDS[0]}/0.png", f"imagenet-c/fog/3/{WNIDS[1]}/0.png"]
    for path, name in zip(broken, ("imagenet-r", "imagenet-c"), strict=True):
        shutil.copytree(imagenet / name, tmp_path / name)
        (tmp_path / path).write_bytes(b"no image")
    space = Workspace(cache=tmp_path / "cache", data=f"imagenet:{tmp_path / 'imagenet'}", skip_bad=True)
    facts = replace(TASK, epochs=1).run(varied_export(), space).facts
    assert skipped_paths(facts) == {str(tmp_path / path) for path in broken}


def test_the_noise_of_a_corruption_depends_on_no_other(tmp_path):
    """Its features are stored without the list of corruptions, for runs with another list."""
    names = ("shot_noise", "gaussian_noise")
    errors = []
    for cache, corruptions in (("one", names), ("one", names[::-1]), ("two", names[::-1]), ("three", names[1:])):
        task = replace(TASK, epochs=1, corruptions=corruptions)
        outcome = task.run(varied_export(), Workspace(cache=tmp_path / cache, data="tiny:"))
        errors.append(outcome.arrays["generated_errors"][corruptions.index("gaussian_noise")].tolist())
    assert errors == [errors[0]] * 4 and len(set(errors[0])) > 1


def test_classes_with_numbers_for_names_are_found_by_these(tmp_path):
    """Folders "0" to "11" have another order than their numbers, 0, 1, 10, 11, 2, ...; "1" to "12" are no numbers."""
    for start in (0, 1):
        names = [str(number) for number in range(start, start + 12)]
        for split, count in (("train", 6), ("val", 2)):
            folder(tmp_path / f"{start}/{split}", WNIDS, count, names)
        outcome = TASK.run(varied_export(), Workspace(cache=tmp_path, data=f"folder:{tmp_path / str(start)}"))
        assert outcome.numbers["top5"] == 100 and outcome.arrays["generated_errors"][0, 0] < 0.2, start


def test_class_folders_unknown_to_the_head_are_refused(imagenet, tmp_path):
    (tmp_path / "imagenet").symlink_to(imagenet / "imagenet")
    folder(tmp_path / "imagenet-r", ["n00000001"], 1, ["n99999999"])
    space = Workspace(cache=tmp_path / "cache", data=f"imagenet:{tmp_path / 'imagenet'}")
    assert "'n99999999'" in refusal(replace(TASK, epochs=1).run, varied_export(), space)


FINETUNING = dict(lr=3e-3, lr_rule="absolute", batch=16, epochs=3, warmup_epochs=1, drop_path=0.0, mixed_together=16)


@pytest.mark.parametrize(
    "changes",
    [pytest.param(dict(select="last"), marks=pytest.mark.exhaustive), dict(select="val", average=0.5, pool="cls")],
)
def test_a_fine_tuned_network_is_trained_once_and_scored_as_in_its_training(changes, tmp_path, monkeypatch):
    folder(tmp_path / "imagenet/train", WNIDS, 4)
    for index, name in enumerate(WNIDS):
        for number in range(3):  # one in three images shows another class
            paint(tmp_path / f"imagenet/val/{name}/{number}.png", WNIDS[index - number % 2], [index, number, 7])
    shutil.copytree(tmp_path / "imagenet/val", tmp_path / "sketch")
    task = RobustnessFinetune(**FINETUNING, corruptions=("contrast",), **changes)
    space = Workspace(cache=tmp_path / "cache", data=f"imagenet:{tmp_path / 'imagenet'}")
    updates, update = [], Training.update
    monkeypatch.setattr(Training, "update", lambda *arguments: (updates.append(1), update(*arguments))[1])
    plain = task.plain(Finetune).run(varied_export(), space)
    outcome = task.run(varied_export(), space)
    assert len(updates) == 3 * 3 and plain.numbers.items() <= outcome.numbers.items()
    assert outcome.numbers["sketch_top1"] == pytest.approx(outcome.numbers["top1"])
    assert 10 < outcome.numbers["top1"] < 100
    assert outcome.arrays["generated_errors"].shape == (1, 5)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [(["1.png"], "1.png"), (["n_val_3.png"], "n_val_3.png"), (["n_val_1.png", "n_x_1.png"], "n_x_1.png")],
)
def test_images_without_an_entry_in_real_are_refused(names, wrong, tmp_path):
    (tmp_path / "real.json").write_text(json.dumps([[0], [1]]))
    for number, name in enumerate(names):
        paint(tmp_path / "val/n0" / name, WNIDS[0], number)
    images = open_class_folders("a:", str(tmp_path / "val"))
    with pytest.raises(ValueError, match=f"has 2 entries, and none for .*{wrong}"):
        real_labels(str(tmp_path / "real.json"), images, 12)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[[0], [0.7]]", "$[1][0]"),
        ("[[0], [12]]", "$[1]"),
        ('{"0": [0]}', "array"),
        ("[" * 200_000, ""),
    ],
)
def test_other_values_than_classes_are_refused_in_real(content, place, tmp_path):
    (tmp_path / "real.json").write_text(content)
    paint(tmp_path / "val/n0/n_val_1.png", WNIDS[0], 1)
    message = refusal(real_labels, str(tmp_path / "real.json"), open_class_folders("a:", str(tmp_path / "val")), 12)
    assert "real.json" in message and place in message


PLACES, MATCHES, TITLES = (
    f"{name}.json" for name in ("pytorch_to_imagenet_2012_id", "objectnet_to_imagenet_1k", "folder_to_objectnet_label")
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (PLACES, '{"300000000": 0, "1": 1}'),  # a table of all classes up to this one would take 2.4 GB
        (PLACES, '{"12": 0}'),  # the head has twelve classes
        (PLACES, '{"0": 3, "1": 3}'),
        (PLACES, '{"0": 3}'),
        (MATCHES, '{"Other": "zero"}'),
        (TITLES, '{"chair": ["x"]}'),
        (TITLES, "[" * 200_000),
        (TITLES, None),
        ("imagenet_to_label_2012_v2", None),
    ],
)
def test_mappings_that_do_not_fit_are_refused(imagenet, tmp_path, name, content):
    shutil.copytree(imagenet / "objectnet-1.0/mappings", tmp_path / "mappings")
    images = open_class_folders("objectnet:", str(imagenet / "objectnet-1.0/images"))
    assert objectnet_counterparts(str(tmp_path), images, 12) == {0: 0, 1: 1, 7: 1}
    (tmp_path / "mappings" / name).unlink()
    if content is None:
        os.mkfifo(tmp_path / "mappings" / name)
    else:
        (tmp_path / "mappings" / name).write_text(content)
    message = refusal(objectnet_counterparts, str(tmp_path), images, 12)
    assert name in message or (content == '{"0": 3}' and PLACES in message)


def test_all_shifted_sets_are_read(imagenet, tmp_path):
    space = Workspace(cache=tmp_path, data=f"imagenet:{imagenet / 'imagenet'}")
    mappings = {f"objectnet-1.0/{path.name}" for path in (imagenet / "objectnet-1.0/mappings").iterdir()}
    folders = {path.name for path in imagenet.iterdir()} - {"imagenet", "frost"}
    assert TASK.reads(space).keys() == {"real.json", *folders, *mappings}
    assert RobustnessFinetune(**FINETUNING).reads(space).keys() == TASK.reads(space).keys()


@pytest.mark.parametrize("name", ["imagenet-a", "ImageNet-A", "imagenet-c", "imagenet-c/Fog", "imagenet-c/fog"])
def test_shifted_sets_that_would_be_ignored_are_refused(imagenet, tmp_path, name):
    (tmp_path / "imagenet").symlink_to(imagenet / "imagenet")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == "imagenet-a":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    assert name.partition("/")[0] in refusal(
        TASK.reads, Workspace(cache=tmp_path, data=f"imagenet:{tmp_path}/imagenet")
    )


def test_two_folders_of_one_class_are_refused(imagenet, tmp_path):
    (tmp_path / "imagenet").symlink_to(imagenet / "imagenet")
    folder(tmp_path / "imagenetv2-matched-frequency-format-val", WNIDS[:3], 1, ["1", "01", "2"])
    message = refusal(TASK.reads, Workspace(cache=tmp_path, data=f"imagenet:{tmp_path}/imagenet"))
    assert "'01', '1'" in message and "'2'" not in message
