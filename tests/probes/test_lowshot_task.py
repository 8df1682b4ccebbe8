"""Low-shot evaluation on image sets so small that the outcome is known: subsets, lists, metrics, warnings, errors."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from toy_exports import coloured_folder, workspace

from imagesets.sets import open_set
from probes.features.extract import extract, transform_of
from probes.lowshot import blocks, fitting
from probes.lowshot.blocks import PreparedRows, prepare_rows
from probes.lowshot.shots import PUBLISHED_LISTS, draw_share, draw_subsets
from probes.tasks import lowshot
from probes.tasks.finetune import SMOKE, Finetune
from probes.tasks.knn import Knn
from probes.tasks.lowshot import PROTOCOLS, LowShot

SMALL = LowShot(shots=(1, 2), fractions=(0.5,), lambdas=(0.0025,))
FIELDS = ("lambda", "lambda_effective", "lambda_convention", "objective", "gap", "iterations", "images")

write_set = partial(coloured_folder, train=6, name="n{label}/n{label}_{number:04d}.png")  # file names as in ImageNet


def write_lists(folder, train, counts=(1, 2, 5), misnamed=True):
    """MSN's folders of lists for a set of `write_set`, with nested random subsets."""
    for split in range(3):
        subfolder = folder / f"imagenet_subsets{split + 1}"
        subfolder.mkdir(parents=True)
        order = np.random.default_rng(split).permutation(len(train))
        for count in counts:
            chosen = [i for label in range(3) for i in order[train.labels[order] == label][:count]]
            name = "3imgs_class.txt" if misnamed and (split, count) == (2, 5) else f"{count}imgs_class.txt"
            (subfolder / name).write_text("".join(train.path(i).rpartition("/")[2] + "\n" for i in chosen))
    shutil.copy(folder / "imagenet_subsets1" / "2imgs_class.txt", folder / "imagenet_subsets1" / "1percent.txt")
    return str(folder)


def paths(images):
    return [images.path(i) for i in range(len(images))]


def test_metrics_facts_and_per_image(export, tmp_path):
    outcome = SMALL.run(export, workspace(tmp_path, write_set(tmp_path / "set")))
    accuracies = ["top1_1shot", "top1_1shot_std", "top1_2shot", "top1_2shot_std", "top1_50percent"]
    assert list(outcome.metrics) == [*accuracies, "nll"]
    assert outcome.numbers["top1_50percent"] == 100.0 and outcome.numbers["top1_2shot"] > 90
    fits = outcome.facts["fits"]
    assert [(fit["subset"], fit["split"]) for fit in fits] == [
        *[("1shot", 0), ("1shot", 1), ("1shot", 2), ("2shot", 0), ("2shot", 1), ("2shot", 2), ("50percent", 0)]
    ]
    assert all(field in fit for field in FIELDS for fit in fits)
    for fit in fits:
        assert fit["lambda"] == 0.0025 and fit["lambda_convention"] == "divided by n"
        assert fit["lambda_effective"] == 0.0025 / fit["images"] and fit["gap"] <= 1e-6
    assert [fit["images"] for fit in fits] == [3, 3, 3, 6, 6, 6, 9]
    for shot in ("1shot", "2shot"):
        values = [fit["top1"] for fit in fits if fit["subset"] == shot]
        assert outcome.numbers[f"top1_{shot}"] == pytest.approx(np.mean(values))
        assert outcome.numbers[f"top1_{shot}_std"] == pytest.approx(np.std(values))
        assert 100 * outcome.metrics[f"top1_{shot}"].per_image.mean() == pytest.approx(np.mean(values), abs=1e-4)
        assert len(outcome.metrics[f"top1_{shot}"].per_image) == 24
    correct = outcome.arrays["predicted"] == np.repeat(np.arange(3), 8)
    assert 100 * correct.mean() == pytest.approx(fits[0]["top1"]) and outcome.facts["predictions"] == "1shot of split 0"
    assert 1 / 3 < outcome.arrays["confidence"].min() <= outcome.arrays["confidence"].max() <= 1
    nll = outcome.metrics["nll"]
    assert len(nll.per_image) == 24 and 0 < outcome.numbers["nll"] < np.log(3) and not nll.higher_is_better
    assert outcome.numbers["nll"] == pytest.approx(nll.per_image.mean())
    json.dumps(outcome.facts, allow_nan=False)
    assert outcome.facts["warnings"] == []


def test_predictions_and_losses_equal_softmax_regression(monkeypatch):
    monkeypatch.setattr(blocks, "READ_ROWS", 2)
    random = np.random.default_rng(0)
    rows, weights = random.normal(size=(5, 4)).astype(np.float32), random.normal(size=(4, 3))
    source, labels = PreparedRows(features=rows, preprocess="none", device="cpu"), np.array([0, 2, 1, 1, 0])
    predicted, confidence, nll = fitting.predictions_and_losses(source, labels, torch.from_numpy(weights))
    scores = np.exp(rows @ weights)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    assert np.array_equal(predicted, scores.argmax(axis=1))
    np.testing.assert_allclose(confidence, probabilities.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(nll, -np.log(probabilities[np.arange(5), labels]), rtol=1e-5)


def test_subsets_are_nested_balanced_and_differ_between_splits_and_seeds():
    train = open_set("digits:", "train")
    subsets = {
        (subset.name, subset.split): subset.images for subset in draw_subsets(train, (1, 2, 5), (0.01,), 3, seed=0)
    }
    for split in range(3):
        one, two, five = (set(paths(subsets[f"{count}shot", split])) for count in (1, 2, 5))
        assert one < two < five and len(five) == 50
        assert np.bincount(subsets["5shot", split].labels).tolist() == [5] * 10
    drawn = [frozenset(paths(subsets["5shot", split])) for split in range(3)]
    drawn += [frozenset(paths(subset.images)) for subset in draw_subsets(train, (5,), (), 3, seed=1)]
    assert len(set(drawn)) == 6


def test_few_of_the_images_are_extracted_alone_with_the_same_numbers(export, tmp_path, monkeypatch):
    task = LowShot(shots=(1, 2), fractions=(), lambdas=(0.0025,), splits=2)
    partial = task.run(export, workspace(tmp_path / "a", "digits:"))
    monkeypatch.setattr(lowshot, "EXTRACT_ALL_FROM", 0.0)
    full = task.run(export, workspace(tmp_path / "b", "digits:"))
    assert full.facts["train"]["images"] == 1297 and partial.facts["train"]["images"] < 41
    assert partial.numbers == pytest.approx(full.numbers, abs=0.5)
    monkeypatch.undo()
    again = task.run(export, workspace(tmp_path / "b", "digits:"))
    assert again.facts["train"]["images"] == 1297 and again.cost["forwards"] == 0


def test_msns_lists_are_read_including_the_misnamed_one(export, tmp_path):
    url = write_set(tmp_path / "set")
    train = open_set(url, "train")
    lists = write_lists(tmp_path / "lists", train)
    subsets = draw_subsets(train, (1, 2, 5), (0.01,), 3, 0, lists)
    images = {(subset.name, subset.split): subset.images for subset in subsets}
    listed = (tmp_path / "lists" / "imagenet_subsets3" / "3imgs_class.txt").read_text().split()
    assert [path.rpartition("/")[2] for path in paths(images["5shot", 2])] == listed
    assert len(images["1percent", 0]) == 6
    outcome = replace(SMALL, fractions=(0.01,), lists=lists).run(export, workspace(tmp_path, url))
    assert [fit["images"] for fit in outcome.facts["fits"]] == [3, 3, 3, 6, 6, 6, 6]
    reads = replace(SMALL, lists=lists).reads(workspace(tmp_path, url))
    assert "imagenet_subsets3/3imgs_class.txt" in reads and SMALL.reads(workspace(tmp_path, url)) == {}
    assert Finetune(lists=lists, fraction=0.1).reads(workspace(tmp_path, url)) == reads


def test_missing_and_wrong_lists_are_refused(tmp_path):
    train = open_set(write_set(tmp_path / "set"), "train")
    lists = write_lists(tmp_path / "lists", train)
    with pytest.raises(ValueError, match=r"imagenet_subsets1/3imgs_class\.txt: no such list"):
        draw_subsets(train, (3,), (), 3, 0, lists)
    with pytest.raises(ValueError, match=r"imagenet_subsets1/10percent\.txt: no such list"):
        draw_subsets(train, (), (0.1,), 3, 0, lists)
    with pytest.raises(ValueError, match=r"no such list.*facebookresearch/msn"):
        draw_subsets(train, (1,), (), 3, 0, str(tmp_path / "nowhere"))
    path = tmp_path / "lists" / "imagenet_subsets2" / "1imgs_class.txt"
    path.write_text("\n".join(path.read_text().split()[1:]))
    with pytest.raises(ValueError, match="lists 0 images of class 'n0', 1 expected"):
        draw_subsets(train, (1,), (), 3, 0, lists)


def test_a_lambda_so_large_that_nothing_is_fitted_is_a_warning(export, tmp_path):
    space = workspace(tmp_path, write_set(tmp_path / "set"))
    outcome = replace(SMALL, lambda_convention="as is", lambdas=(10.0,)).run(export, space)
    assert len(outcome.facts["warnings"]) == 3  # one per metric
    assert "top1_1shot: nothing was fitted: the objective ends at 1.0" in outcome.facts["warnings"][0]
    assert "ln 3 = 1.0986" in outcome.facts["warnings"][0] and "divide lambda by n" in outcome.facts["warnings"][0]
    assert all(fit["lambda_effective"] == 10.0 for fit in outcome.facts["fits"])
    assert replace(SMALL, lambdas=(0.0025,)).run(export, space).facts["warnings"] == []


@pytest.mark.parametrize("solver", ["lbfgs", "cyanure"])
def test_a_gap_above_tolerance_is_an_error(export, tmp_path, solver):
    space = workspace(tmp_path, "digits:", limit=200)
    task = LowShot(shots=(2,), fractions=(), lambdas=(1e-5,), solver=solver, max_iterations=1, tolerance=1e-9)
    with pytest.raises(ValueError, match=r"2shot of split 0: the optimum for lambda 1e-05 .* was not reached: gap"):
        task.run(export, space)


def test_a_fit_that_its_iterations_leave_above_tolerance_goes_on_to_the_same_optimum(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=200)
    task = LowShot(shots=(2,), fractions=(), lambdas=(1e-2,))
    (whole,) = task.run(export, space).facts["fits"][:1]
    short = max(1, whole["iterations"] // 2)
    (continued,) = replace(task, max_iterations=short).run(export, space).facts["fits"][:1]
    assert continued["iterations"] > short and continued["gap"] <= 1e-6
    assert continued["objective"] == pytest.approx(whole["objective"], rel=2e-6)


def test_the_lambda_is_chosen_on_held_out_training_images(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=500)
    task = LowShot(shots=(), fractions=(1.0,), lambdas=(1e4, 1e-3, 1e-2), holdout=0.2, preprocess="none", norm=True)
    outcome = task.run(export, space)
    (fit,) = outcome.facts["fits"]
    accuracies = {entry["lambda"]: entry["top1"] for entry in fit["holdout"]}
    assert accuracies[fit["lambda"]] == max(accuracies.values()) > accuracies[1e4]
    assert list(outcome.metrics) == ["top1_100percent", "nll"] and fit["images"] == 500
    assert task.run(export, space).facts["fits"] == outcome.facts["fits"]
    with pytest.raises(ValueError, match=r"holding out 0\.2 of 10 images .* settings=.*lowshot\.holdout"):
        replace(task, shots=(1,), fractions=()).run(export, space)


def test_a_task_that_draws_nothing_is_not_random(export, tmp_path):
    """Otherwise several seeds repeat one number, and its deviation over them is 0."""
    expected = {"logreg@ibot": False, "logreg@dinov2": True, "lowshot@mieb": True, "lowshot@msn": True}
    assert {name: PROTOCOLS[name].task.is_random for name in expected} == expected
    listed = PROTOCOLS["lowshot@msn"].reported
    assert listed and not listed.task.is_random and replace(listed.task, holdout=0.1).is_random
    task = replace(PROTOCOLS["logreg@ibot"].task, lambdas=(0.01,))
    data = coloured_folder(tmp_path)
    outcomes = [task.run(export, workspace(tmp_path, data, seed=seed)) for seed in (0, 1)]
    assert outcomes[0].numbers == outcomes[1].numbers


def test_constant_features_are_set_to_zero_and_counted(export, tmp_path):
    rows = np.array([[3.3, 3.3, 3.3], [0, 0, 0], [1, 2, 4]], np.float32)
    centred, count = prepare_rows(rows, "centre_and_normalise")
    assert count == 2 and not centred[:2].any()
    np.testing.assert_allclose(np.linalg.norm(centred[2]), 1, rtol=1e-6)
    assert abs(centred[2].mean()) < 1e-7
    scaled, count = prepare_rows(rows, "normalise")
    assert count == 1 and not scaled[1].any() and np.allclose(scaled[0], 3**-0.5)
    kept, count = prepare_rows(rows, "none")
    assert count == 0 and np.array_equal(kept, rows) and kept is not rows


def test_shots_that_a_class_does_not_have_are_left_out_with_a_warning(export, tmp_path):
    url = write_set(tmp_path / "set", train=6)
    for path in sorted((tmp_path / "set/train/n1").iterdir())[1:]:
        path.unlink()
    space = workspace(tmp_path, url)
    outcome, alone = (replace(SMALL, shots=shots).run(export, space) for shots in ((1, 2, 5), (1,)))
    assert outcome.numbers == alone.numbers
    assert list(outcome.metrics) == ["top1_1shot", "top1_1shot_std", "top1_50percent", "nll"]
    (warning,) = set(outcome.facts["warnings"]) - set(alone.facts["warnings"])
    assert "2 and 5 images per class" in warning and "'n1' has 1" in warning
    chosen = LowShot(shots=(), fractions=(1.0,), lambdas=(1e-3, 1e-2), holdout=0.4)
    outcome = chosen.run(export, space)
    assert "'n1'" in outcome.facts["warnings"][0] and len(outcome.facts["fits"][0]["holdout"]) == 2


def test_a_share_or_number_of_images_that_was_not_taken_is_a_warning(export, tmp_path):
    """20 images are no 16 of each of four classes; one of each class is a fifth of them, not 1 %."""
    space = workspace(tmp_path, coloured_folder(tmp_path, train=(5, 5, 4, 6), val=2, classes=4))
    (few,) = PROTOCOLS["lowshot@mieb"].task.run(export, space).facts["warnings"]
    assert "16 images per class: 4 of 4 classes have fewer, 'class2' 4" in few
    share = "% of 20 images is less than one of each class: 4 images were taken, one of each, 20 %"
    outcome = replace(SMALL, shots=(1,), fractions=(0.01, 0.5)).run(export, space)
    assert [text for text in outcome.facts["warnings"] if "images were" in text] == [f"1 {share}"]
    assert f"5 {share}" in Knn(k=(1,), fraction=0.05).run(export, space).facts["warnings"]
    task = replace(SMOKE, fraction=0.1, batch=2, epochs=1, warmup_epochs=0)
    assert f"10 {share}" in task.run(export, space).facts["warnings"]


def test_a_class_with_too_few_or_no_images_is_named(export, tmp_path):
    url = write_set(tmp_path / "set", train=4)
    with pytest.raises(ValueError, match=r"'n0' has 4 .*settings=.*lowshot\.shots"):
        replace(SMALL, shots=(5,), fractions=()).run(export, workspace(tmp_path, url))
    with pytest.raises(ValueError, match="class 'n0' has no training image"):
        SMALL.run(export, workspace(tmp_path, url, limit=1))
    for path in (tmp_path / "set" / "train" / "n1").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no image of class 'n1' can be read"):
        SMALL.run(export, workspace(tmp_path, url, skip_bad=True))
    with pytest.raises(ValueError, match="only one class"):
        SMALL.run(export, workspace(tmp_path, write_set(tmp_path / "one", classes=1)))


def test_published_lists_are_found_beside_the_images(export, tmp_path):
    """MSN's folders and SimCLR's 10 % in the root of the image set are found without a setting."""
    url = write_set(tmp_path / "images", train=10)
    train = open_set(url, "train")
    write_lists(tmp_path / "lists", train)
    write_lists(tmp_path / "images", train)
    from_folder, published = (
        draw_subsets(train, (1, 2, 5), (0.01,), 3, 0, lists) for lists in (str(tmp_path / "lists"), PUBLISHED_LISTS)
    )
    assert [subset.images.fingerprint for subset in from_folder] == [subset.images.fingerprint for subset in published]
    outcome = replace(SMALL, shots=(1, 2, 5), fractions=(0.01,), lists=PUBLISHED_LISTS).run(
        export, workspace(tmp_path, url)
    )
    assert len(outcome.facts["fits"]) == len(from_folder)
    names = [Path(train.path(index)).name for index in range(3)]
    (tmp_path / "images/imagenet_subsets").mkdir()
    (tmp_path / "images/imagenet_subsets/10percent.txt").write_text("\n".join(names))
    listed = draw_share(train.subset(np.arange(20), "x"), 0.1, 0, PUBLISHED_LISTS)
    assert [Path(listed.path(index)).name for index in range(len(listed))] == names
    with pytest.raises(ValueError, match=r"^digits:: the published lists"):
        draw_subsets(open_set("digits:", "train"), (1,), (), 3, 0, PUBLISHED_LISTS)


def test_mieb_equals_scikit_learn_on_the_same_features(export, tmp_path):
    """Each draw by a generator of seed 42 that shuffles the order of the draw before; mean and sample deviation."""
    space = replace(workspace(tmp_path, "digits:"), limit=300)
    outcome = PROTOCOLS["lowshot@mieb"].task.run(export, space)
    task = PROTOCOLS["lowshot@mieb"].task
    transform = transform_of(export, space, task)
    train, val = (
        extract(export, space.images(split, open_set), [task.kind], space, transform) for split in ("train", "val")
    )
    order, accuracies = list(range(len(train.labels))), []
    for _ in range(5):
        np.random.RandomState(42).shuffle(order)
        counts, rows = dict.fromkeys(range(10), 0), []
        for row in order:
            if counts[train.labels[row]] < 16:
                counts[train.labels[row]] += 1
                rows.append(row)
        model = LogisticRegression(max_iter=100).fit(train.features[rows].astype(np.float64), train.labels[rows])
        accuracies.append(100 * model.score(val.features.astype(np.float64), val.labels))
    assert outcome.numbers["top1_16shot"] == pytest.approx(np.mean(accuracies), abs=1e-9)
    assert outcome.numbers["top1_16shot_std"] == pytest.approx(np.std(accuracies, ddof=1), abs=1e-9)
    assert [fit["images"] for fit in outcome.facts["fits"]] == [160] * 5
