"""Dense tasks on a user's own frozen network, and on a ViT of non-square images."""

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

FAST = dict(crop=32, stride=32, batch=2)
SEGMENTER_LINEAR = replace(
    CITY["segmenter_linear@smoke"].task, **FAST, images=4, splits=(1,), lr=(0.1,), epochs=1, judge_every=1
)
ADE_LINEAR = replace(ADE["ade_linear@smoke"].task, **FAST, steps=2, warmup=1)
NEED_VIT = {
    "mask transformer": CITY["segmenter_mask@smoke"].task,
    "UPerNet": ADE["upernet@smoke"].task,
    "detectors": next(protocol.task for name, protocol in COCO.items() if "smoke" in name),
}


@pytest.fixture
def user_network(tmp_path, monkeypatch) -> OwnExport:
    monkeypatch.syspath_prepend(str(tmp_path))
    write_networks(tmp_path)
    return load_frozen("module:toynets:rows")


def test_feature_maps_are_the_networks_outputs(user_network):
    backbone = DenseBackbone(dense_network(user_network, 32, 0.1), default_taps(1), norm=True, frozen=True)
    images = torch.randn(2, 3, 32, 48)
    maps = backbone(images)
    assert [feature_map.shape for feature_map in maps] == [(2, 12, 4, 6)] * 4
    assert torch.equal(maps[0], user_network.network.project(images))
    assert not any(parameter.requires_grad for parameter in backbone.parameters()) and not backbone.train().training


@pytest.mark.parametrize(
    ("task", "data"),
    [
        pytest.param(SEGMENTER_LINEAR, "tiny-cityscapes:", marks=pytest.mark.exhaustive),
        (ADE_LINEAR, "tiny-ade20k:"),
    ],
)
def test_frozen_dense_tasks_run(task, data, user_network, tmp_path):
    outcome = task.run(user_network, workspace(tmp_path, data))
    assert np.isfinite(outcome.numbers["mIoU"])
    work = task.cost(Scale(spec=user_network.spec, images={"train": 8, "val": 8}, classes=19))
    assert work.memory > 0 and task.model_flops(user_network.spec, 19)["evaluation"] > 0


@pytest.mark.parametrize(("task", "data"), [(SEGMENTER_LINEAR, "tiny-cityscapes:"), (ADE_LINEAR, "tiny-ade20k:")])
def test_a_network_of_one_vector_per_image_is_refused(task, data, user_network, tmp_path):
    export = load_frozen("module:toynets:vector")
    for call in (lambda: task.check_network(export.spec), lambda: task.run(export, workspace(tmp_path, data))):
        with pytest.raises(ValueError, match="toynets:vector"):
            call()


@pytest.mark.parametrize("name", NEED_VIT)
def test_tasks_that_train_the_network_need_a_vit(name, user_network, tmp_path):
    task = NEED_VIT[name]
    images = {"train": 8, "val": 8}
    for call in (
        lambda: task.run(user_network, workspace(tmp_path, "none:")),
        lambda: task.cost(Scale(spec=user_network.spec, images=images, classes=19)),
        lambda: task.model_flops(user_network.spec, 19),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_position_tables_of_non_square_images_are_resized_for_square_crops(tmp_path):
    export = export_of(replace(PLAIN, image_size=(32, 16)))
    outcome = SEGMENTER_LINEAR.run(export, workspace(tmp_path, "tiny-cityscapes:"))
    assert np.isfinite(outcome.numbers["mIoU"])
    network = dense_network(export, 32, 0.0)
    assert network.spec.grid == (4, 4)
    expected = resize_positions(export.tensors["pos_embed"], (4, 2), (4, 4), PLAIN.position_resize, prefix=1)
    assert torch.equal(network.trunk.pos_embed, expected)
