"""Supervised training: labels of images and of the loss, repeated augmentation, refused image sets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_trainings import batches, digits, plan, small_recipe, trainer, updates
from timm.optim import create_optimizer_v2
from torch.nn import functional as F

from checkpoints.export import ViTExport
from imagesets.sets import ImageSet, open_set
from pretrain.loop.images import BatchPlan, MicroBatches
from pretrain.methods.supervised import METHOD, RECIPES

PLAIN = dict(policy="", crop_scale=(1.0, 1.0), erase=0.0, mixup=0.0, cutmix=0.0, repeated=1)


def plain_recipe(**changes):
    return small_recipe("supervised", settings=replace(RECIPES["smoke"].settings, **PLAIN, **changes))


def micro_batches(images: ImageSet, batch_plan: BatchPlan) -> MicroBatches:
    views, steps = updates("supervised", plain_recipe()).method.views(), range(batch_plan.steps_per_epoch)
    return MicroBatches(image_set=images, views=views, plan=batch_plan, rank=0, steps=steps, labelled=True)


def test_labels_are_those_of_the_images():
    """Without augmentation a view is the image itself, by which its label can be looked up."""
    images, batch_plan = digits(), plan()
    make_views = updates("supervised", plain_recipe()).method.views()
    label_of = {
        make_views(images.image(index))["image"].numpy().tobytes(): images.labels[index] for index in range(len(images))
    }
    assert len(label_of) == len(images)
    for part in (micro_batches(images, batch_plan)[step] for step in range(batch_plan.steps_per_epoch)):
        expected = [label_of[view.numpy().tobytes()] for view in part.views["image"]]
        assert part.views["label"].dtype == torch.int64 and part.views["label"].tolist() == expected


def test_the_loss_is_the_cross_entropy_with_smoothed_labels():
    method = updates("supervised", plain_recipe()).method
    (views,) = batches(method, plan())
    logits = method.head(method.vit(views["image"])[0][:, 0])
    expected = F.cross_entropy(logits, views["label"], label_smoothing=method.settings.smoothing)
    torch.testing.assert_close(method(views).loss, expected)


def test_an_unreadable_image_is_replaced_with_its_label(tmp_path):
    for split in ("train", "val"):
        for name, readable in (("a", False), ("b", True)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            digits().image(0).save(folder / "0.png") if readable else (folder / "0.png").write_bytes(b"broken")
    images = open_set(f"folder:{tmp_path}", "train")
    part = micro_batches(images, BatchPlan(count=2, batch=2, processes=1, micro_batches=1, seed=0))[0]
    assert part.views["label"].tolist() == [1, 1] and len(part.unreadable) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_repeated_augmentation_shows_images_three_times_in_different_views(world):
    """DeiT samplers.py: each image three times in an epoch, in different processes if there are three."""
    repeated = BatchPlan(count=24, batch=12, processes=world, micro_batches=1, seed=0, repeats=3)
    steps = [[repeated.places(step, rank, 0) for rank in range(world)] for step in range(repeated.steps_per_epoch)]
    counts = np.unique(np.concatenate([np.concatenate(shares) for shares in steps]), return_counts=True)[1]
    assert counts.tolist() == [3] * 8
    if world == 3:
        assert all(len(set(share)) == len(share) for shares in steps for share in shares)
        assert all(set(share) == set(shares[0]) for shares in steps for share in shares)
    views = METHOD(RECIPES["smoke"].spec, RECIPES["smoke"].settings).views()
    parts = MicroBatches(image_set=digits(), views=views, plan=repeated, rank=0, steps=range(1), labelled=True)
    first, second = parts.sample(5, 0, 0, {}), parts.sample(5, 1, 0, {})
    assert torch.equal(first["label"], second["label"]) and not torch.equal(first["image"], second["image"])


def test_a_training_repeats_images_and_records_that_it_used_labels(tmp_path):
    training = trainer("supervised", tmp_path)
    assert training.plan.repeats == 3
    assert training.train() == "finished"
    for name in ("start", "export"):
        assert ViTExport.load(tmp_path / name).facts["uses_labels"] is True
    other = trainer("mae", tmp_path / "mae")
    assert "uses_labels" not in other.identity()


def test_images_without_labels_are_refused(tmp_path):
    digits().image(0).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"^images:[^\n]* has no labels, which this method learns from[^\n]*$"):
        trainer("supervised", tmp_path / "run", images=open_set(f"images:{tmp_path}", "train"))
    assert not Path(tmp_path / "run").exists()


def test_another_number_of_classes_is_refused(tmp_path):
    recipe = {"settings": replace(RECIPES["smoke"].settings, classes=3)}
    with pytest.raises(ValueError, match=r"^classes=3, but digits:[^\n]* has 10; add settings=.*classes"):
        trainer("supervised", tmp_path / "run", recipe=recipe)


def test_weight_decay_spares_the_same_parameters_as_timm():
    method = updates("supervised", small_recipe("supervised")).method
    ours = {name for group in method.groups() if group.weight_decay == 0.0 for name in group.parameters}
    theirs = create_optimizer_v2(method.vit.trunk, opt="adamw", weight_decay=0.05)
    spared_by_timm = {id(p) for group in theirs.param_groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert {name for name, p in method.vit.named_parameters() if id(p) in spared_by_timm} == {
        name.removeprefix("vit.") for name in ours if name.startswith("vit.")
    }
    assert "head.bias" in ours and "head.weight" not in ours
