"""The k-NN task on image sets so small that the outcome is known."""

from dataclasses import replace

import numpy as np
import pytest
from toy_exports import coloured_folder, workspace

from imagesets.decoding import UnreadableImage
from probes.tasks.knn import Knn
from probes.tasks.linear import Linear

SMALL = Knn(k=(1, 5), temperature=(0.07,), pool="avg")


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_a_separable_set_is_solved(export, tmp_path, backend):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set"))
    outcome = replace(SMALL, backend=backend).run(export, space)
    assert outcome.numbers == {"top1_k1": 100.0, "top5_k1": 100.0, "top1_k5": 100.0, "top5_k5": 100.0}
    assert outcome.metrics["top1_k5"].per_image.tolist() == [1.0] * 24
    assert outcome.arrays["predicted"].tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert (outcome.arrays["confidence"] == 1).all()
    facts = outcome.facts
    assert (facts["train"]["images"], facts["val"]["images"], outcome.cost["forwards"]) == (36, 24, 60)
    assert facts["train"]["fingerprint"] != facts["val"]["fingerprint"]
    assert facts["train"]["transform"] == "resize18-bicubic_crop16_exact"


def test_a_second_run_has_the_same_numbers_without_a_forward_pass(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=100)
    first, again = (Knn(k=(5,)).run(export, space) for _ in range(2))
    assert first.metrics == again.metrics
    assert first.cost["forwards"] == 200 and again.cost["forwards"] == 0
    assert first.facts == again.facts


def test_a_temperature_sweep_is_reported_under_another_name(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=200)
    outcome = replace(SMALL, temperature=(0.01, 0.07, 1.0)).run(export, space)
    assert set(outcome.metrics) == {f"top{n}_k{k}_bestT" for n in (1, 5) for k in (1, 5)}
    assert all(metric.chosen_on_val for metric in outcome.metrics.values())
    rows = outcome.facts["per_temperature"]["k5"]
    assert [row["T"] for row in rows] == [0.01, 0.07, 1.0]
    assert outcome.numbers["top1_k5_bestT"] == max(row["top1"] for row in rows)
    for row in rows:
        alone = replace(SMALL, temperature=(row["T"],)).run(export, space).numbers
        assert alone["top1_k5"] == row["top1"] and alone["top5_k5"] == row["top5"]


def test_k_beyond_the_gallery_is_left_out_with_a_warning(export, tmp_path):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set"))
    outcome = replace(SMALL, k=(10, 36, 100, 200)).run(export, space)
    assert set(outcome.metrics) == {"top1_k10", "top5_k10", "top1_k36", "top5_k36"}
    assert outcome.facts["k_beyond_the_gallery"] == [100, 200]
    (warning,) = outcome.facts["warnings"]
    assert "k=100, 200" in warning and "36" in warning
    alone = replace(SMALL, k=(200,)).run(export, space)
    assert set(alone.metrics) == {"top1_k36", "top5_k36"} and alone.facts["k_beyond_the_gallery"] == [200]
    (warning,) = alone.facts["warnings"]
    assert "k=200" in warning and "k=36" in warning
    assert not {"warnings", "k_beyond_the_gallery"} & set(replace(SMALL, k=(36,)).run(export, space).facts)


def test_a_fraction_of_the_gallery_is_drawn_by_the_seed(export, tmp_path):
    space = workspace(tmp_path, "digits:")
    task = replace(SMALL, fraction=0.1)
    first, other = task.run(export, space), task.run(export, replace(space, seed=1))
    assert 100 < first.facts["gallery"] < 150
    assert first.facts["train"]["fingerprint"] != other.facts["train"]["fingerprint"]
    assert task.run(export, space).metrics == first.metrics


def test_skipped_images_are_recorded_and_the_others_keep_their_rows(export, tmp_path):
    url = coloured_folder(tmp_path / "set")
    space = workspace(tmp_path, url)
    broken = sorted((tmp_path / "set" / "val").rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UnreadableImage, match=broken.name):
        SMALL.run(export, space)
    outcome = SMALL.run(export, replace(space, skip_bad=True))
    assert list(outcome.facts["val"]["skipped"]) == [str(broken)]
    predicted, labels = outcome.arrays["predicted"], np.repeat(np.arange(3), 8)
    assert predicted[5] == -1 and np.array_equal(np.delete(predicted, 5), np.delete(labels, 5))
    neighbours = outcome.arrays["neighbours"] // 12  # 12 training images of each class
    assert (neighbours == labels[outcome.arrays["neighbours_of"]][:, None]).all() and neighbours.shape == (8, 5)
    correct = outcome.metrics["top1_k1"].per_image
    assert np.flatnonzero(np.isnan(correct)).tolist() == [5] and len(correct) == 24
    assert outcome.numbers["top1_k1"] == 100.0


@pytest.mark.parametrize("task", [SMALL, Linear(augment=False, epochs=1)], ids=["knn", "linear"])
def test_one_class_and_a_class_without_training_images_are_refused(task, export, tmp_path):
    with pytest.raises(ValueError, match="only one class"):
        task.run(export, workspace(tmp_path, coloured_folder(tmp_path / "one", classes=1)))
    url = coloured_folder(tmp_path / "set")
    for path in (tmp_path / "set" / "train" / "class1").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no training image \(class1\)"):
        task.run(export, workspace(tmp_path, url, skip_bad=True))


def test_all_blocks_are_evaluated_from_one_pass(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=300)
    all_blocks = replace(SMALL, layers="all").run(export, space)
    assert all_blocks.cost["forwards"] == 600 and export.spec.depth == 2
    last, first = (replace(SMALL, layer=layer).run(export, replace(space, cache=tmp_path / "b")) for layer in (-1, 0))
    assert all_blocks.numbers == last.numbers | {"top1_k1_block1": first.numbers["top1_k1"]}
    assert np.array_equal(all_blocks.metrics["top1_k1_block1"].per_image, first.metrics["top1_k1"].per_image)
    assert not np.array_equal(last.metrics["top1_k1"].per_image, first.metrics["top1_k1"].per_image)
    with pytest.raises(ValueError, match="layers=all, layer=0"):
        replace(SMALL, layers="all", layer=0)
