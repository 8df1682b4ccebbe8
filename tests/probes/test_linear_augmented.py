"""Training on augmented images: the crops, their independence of workers, and what the heads are given."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import hflip, pil_to_tensor, resized_crop
from toy_exports import export_of_size, workspace

from checkpoints.backbone import Backbone
from imagesets.decoding import UnreadableImage
from imagesets.random_crops import OwnDraws, RandomResizedCrop
from imagesets.sets import open_set
from probes.features.readouts import kinds_of
from probes.holdout import held_out
from probes.linear.augmented import AugmentedBatches, TrainTransform, chunked
from probes.linear.batches import EpochPlan
from probes.tasks.linear import Linear

SMALL = Linear(lrs=(1.0, 10.0), readouts=("avg", "cls2"), epochs=4, batch=64)
TORCHVISION = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@pytest.fixture(scope="module")
def export():
    return export_of_size(16)


@pytest.mark.parametrize("interpolation", TORCHVISION)
def test_pixels_are_torchvisions_of_the_same_window(interpolation):
    images = open_set("tiny:", "train")
    names = np.arange(len(images))
    transform = TrainTransform(size=16, interpolation=interpolation, rule="torchvision", seed=3, epoch=2, names=names)
    flipped = 0
    for index in range(20):
        image = images.image(index)
        draws = OwnDraws(np.random.RandomState([3, 2, index]))
        crop = RandomResizedCrop(size=16, interpolation=interpolation, draws=draws)
        left, top, right, bottom = crop.window(*image.size)
        expected = resized_crop(image, top, left, bottom - top, right - left, [16, 16], TORCHVISION[interpolation])
        ours, plain, mirrored = transform(images, index), pil_to_tensor(expected), pil_to_tensor(hflip(expected))
        assert torch.equal(ours, plain) or torch.equal(ours, mirrored)
        flipped += not torch.equal(ours, plain)
    assert 3 < flipped < 17


def batches_of(export, images, rows, workers=1, skip_bad=False, seed=0):
    return AugmentedBatches(
        image_set=images,
        rows=rows,
        backbone=Backbone(export),
        readouts={name: kinds_of(name, norm=True) for name in ("avg", "cls2")},
        plan=EpochPlan(rows=len(rows), asked=20, drop_last=False, seed=seed),
        interpolation="bilinear",
        rule="torchvision",
        chunk=7,
        skip_bad=skip_bad,
        workers=workers,
    )


def seen(batches, epoch=0):
    found = []
    batches.run(epoch, lambda number, *batch: found.append(batch))
    return found


def test_heads_are_given_every_image_once_in_the_order_of_the_epoch(export):
    images = open_set("digits:", "train")
    rows = np.arange(0, 100, 2)
    batches = batches_of(export, images, rows)
    found = seen(batches, epoch=3)
    order = rows[batches.plan.order(3)]
    assert sorted(order) == list(rows) and list(order) != list(rows)
    assert [len(labels) for _, labels in found] == [20, 20, 10]
    assert torch.cat([labels for _, labels in found]).tolist() == images.labels[order].tolist()
    transform = TrainTransform(
        size=16, interpolation="bilinear", rule="torchvision", seed=0, epoch=3, names=np.arange(len(images))
    )
    pixels = torch.stack([transform(images, index) for index in order])
    backbone = Backbone(export)
    layers = backbone.views(backbone.prepare(pixels), [(-1, True), (-2, True)])
    last, before = layers[-1, True], layers[-2, True]
    torch.testing.assert_close(torch.cat([features["avg"] for features, _ in found]), last.avg, rtol=1e-4, atol=1e-5)
    expected = torch.cat([before.cls, last.cls], dim=1)
    torch.testing.assert_close(torch.cat([features["cls2"] for features, _ in found]), expected, rtol=1e-4, atol=1e-5)


def test_workers_change_no_bit(export):
    images, rows = open_set("digits:", "train"), np.arange(60)
    one, three = (seen(batches_of(export, images, rows, workers)) for workers in (1, 3))
    for (features, labels), (other, others_labels) in zip(one, three, strict=True):
        assert torch.equal(labels, others_labels)
        assert all(torch.equal(value, other[name]) for name, value in features.items())


def test_epochs_and_seeds_differ(export):
    images, rows = open_set("digits:", "train"), np.arange(20)
    values = {
        (seed, epoch): float(seen(batches_of(export, images, rows, seed=seed), epoch)[0][0]["avg"][0, 0])
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(values.values())) == 4


def test_chunks_do_not_cross_batches():
    assert chunked(10, 6, 4) == [[range(0, 4), range(4, 6)], [range(6, 10)]]


def write_folder(root):
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 8)):
        for colour in range(3):
            folder = root / split / f"class{colour}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 60, (16, 16, 3), dtype=np.uint8)
                pixels[..., colour] += 150
                Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    return f"folder:{root}"


def test_a_separable_set_is_solved(export, tmp_path):
    outcome = SMALL.run(export, workspace(tmp_path, write_folder(tmp_path / "set")))
    assert outcome.numbers["top1"] == 100.0
    assert (outcome.facts["training_images"], outcome.facts["selection_images"]) == (54, 6)
    assert outcome.cost["augmented_forwards"] == 4 * 54
    sizes = SMALL.sizes(export.spec, {"train": 60, "val": 24})
    assert sizes["steps"] == SMALL.epochs * outcome.facts["steps_per_epoch"] and sizes["epochs"] == SMALL.epochs
    assert sizes["heads"] == len(outcome.facts["grid"]) and sizes["batch"] == outcome.facts["batch"]
    assert sizes["forward passes"] == outcome.cost["augmented_forwards"] + outcome.cost["forwards"]


def test_an_unreadable_image_stops_or_is_left_out(export, tmp_path):
    space = workspace(tmp_path, write_folder(tmp_path / "set"))
    task = replace(SMALL, select="val")
    broken = sorted((tmp_path / "set" / "train").rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UnreadableImage, match=broken.name):
        task.run(export, space)
    outcome = task.run(export, replace(space, skip_bad=True))
    assert outcome.numbers["top1"] == 100.0
    assert outcome.cost["augmented_forwards"] == 4 * 60
    assert list(outcome.facts["train"]["skipped"]) == [str(broken)]


def test_unreadable_images_that_choose_are_counted_too(export, tmp_path):
    space = workspace(tmp_path, write_folder(tmp_path / "set"), skip_bad=True)
    train = open_set(space.data, "train")
    held = held_out(train, SMALL.holdout, space.seed)
    trained_on = np.setdiff1d(np.arange(len(train)), held)
    broken = [train.path(index) for index in (trained_on[7], held[1])]
    for path in map(Path, broken):
        path.write_bytes(path.read_bytes()[:60])
    assert list(SMALL.run(export, space).facts["train"]["skipped"]) == broken
