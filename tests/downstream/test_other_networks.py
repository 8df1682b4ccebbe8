"""A network of the user's own, and one of images that are not square, under the frozen dense tasks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from own_networks import write_networks
from toy_scenes import PLAIN, export_of, workspace

from checkpoints.frozen import OwnExport
from checkpoints.positions import resize_positions
from checkpoints.resolve import load_frozen
from downstream.models.operators import quiet_libraries
from downstream.tasks.maskrcnn_coco import PROTOCOLS as COCO
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE
from engine.work import Scale

with quiet_libraries():
    from downstream.models.backbone import DenseBackbone, default_taps, dense_network

QUICK = dict(crop=32, stride=32, batch=2)
LINEAR = replace(
    CITY["segmenter_linear@smoke"].task, **QUICK, images=4, splits=(1,), lr=(0.1,), epochs=1, judge_every=1
)
MAPS = replace(ADE["ade_linear@smoke"].task, **QUICK, steps=2, warmup=1)
NEED_A_VIT = {
    "mask transformer": CITY["segmenter_mask@smoke"].task,
    "UPerNet": ADE["upernet@smoke"].task,
    "detectors": next(protocol.task for name, protocol in COCO.items() if "smoke" in name),
}


@pytest.fixture
def own(tmp_path, monkeypatch) -> OwnExport:
    monkeypatch.syspath_prepend(str(tmp_path))
    write_networks(tmp_path)
    return load_frozen("module:toynets:rows")


def test_its_maps_are_what_it_gives(own):
    backbone = DenseBackbone(dense_network(own, 32, 0.1), default_taps(1), norm=True, frozen=True)
    images = torch.randn(2, 3, 32, 48)
    maps = backbone(images)
    assert [found.shape for found in maps] == [(2, 12, 4, 6)] * 4
    assert torch.equal(maps[0], own.network.project(images))
    assert not any(parameter.requires_grad for parameter in backbone.parameters()) and not backbone.train().training


@pytest.mark.parametrize(("task", "data"), [(LINEAR, "tiny-cityscapes:"), (MAPS, "tiny-ade20k:")])
def test_frozen_dense_tasks_run(task, data, own, tmp_path):
    outcome = task.run(own, workspace(tmp_path, data))
    assert np.isfinite(outcome.numbers["mIoU"])
    work = task.cost(Scale(spec=own.spec, images={"train": 8, "val": 8}, classes=19))
    assert work.memory > 0 and task.model_flops(own.spec, 19)["evaluation"] > 0


@pytest.mark.parametrize(("task", "data"), [(LINEAR, "tiny-cityscapes:"), (MAPS, "tiny-ade20k:")])
def test_one_vector_of_an_image_is_refused(task, data, own, tmp_path):
    export = load_frozen("module:toynets:vector")
    for ask in (lambda: task.check_network(export.spec), lambda: task.run(export, workspace(tmp_path, data))):
        with pytest.raises(ValueError, match=r"toynets:vector returns one vector per image, .* reads patch tokens"):
            ask()


@pytest.mark.parametrize("name", NEED_A_VIT)
def test_what_trains_the_network_needs_a_vit(name, own, tmp_path):
    task = NEED_A_VIT[name]
    images = {"train": 8, "val": 8}
    for ask in (
        lambda: task.run(own, workspace(tmp_path, "none:")),
        lambda: task.summary(own.spec, images),
        lambda: task.cost(Scale(spec=own.spec, images=images, classes=19)),
        lambda: task.model_flops(own.spec, 19),
    ):
        with pytest.raises(ValueError, match=f"frozen network of your own, and .*{name}.* trained with"):
            ask()


def test_images_that_are_not_square(tmp_path):
    """Position tables of a 4 x 2 grid, resized for square crops, beside those of a square grid."""
    export = export_of(replace(PLAIN, image_size=(32, 16)))
    outcome = LINEAR.run(export, workspace(tmp_path, "tiny-cityscapes:"))
    assert np.isfinite(outcome.numbers["mIoU"])
    network = dense_network(export, 32, 0.0)
    assert network.spec.grid == (4, 4)
    expected = resize_positions(export.tensors["pos_embed"], (4, 2), (4, 4), PLAIN.position_resize, prefix=1)
    assert torch.equal(network.trunk.pos_embed, expected)
