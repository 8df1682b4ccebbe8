"""Label-free health as a task: a collapsed network is told from a healthy one, and features are shared."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace
from probes.tasks.health import Health, spectrum_metrics, view_metrics
from probes.tasks.knn import Knn

TASK = Health(images=6, views=3)


def export(collapsed: bool = False) -> ViTExport:
    torch.manual_seed(0)
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_hidden=64
    )
    vit = ViT(spec)
    torch.nn.init.normal_(vit.trunk.patch_embed.proj.weight, std=0.2)
    if collapsed:  # the final norm lets one direction through, the same for all images
        torch.nn.init.constant_(vit.trunk.norm.weight, 1e-6)
        torch.nn.init.normal_(vit.trunk.norm.bias)
    return ViTExport.from_vit(vit, Preparation(crop=1.0))


def test_a_collapsed_network_is_told_by_every_rank_and_a_warning(tmp_path):
    healthy, collapsed = (
        TASK.run(export(is_collapsed), Workspace(cache=tmp_path, data="tiny:")) for is_collapsed in (False, True)
    )
    assert collapsed.numbers["rankme"] < 1.1 < 5 < healthy.numbers["rankme"]
    assert collapsed.numbers["uniformity"] > healthy.numbers["uniformity"]
    assert any("have collapsed" in line for line in collapsed.facts["warnings"]) and not healthy.facts["warnings"]
    assert healthy.numbers["lidar"] > 1 and 0 <= healthy.numbers["alignment"] < 2


def test_every_block_has_its_own_numbers_and_the_last_ones_are_those_of_the_last_block(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    last, every = TASK.run(export(), space), replace(TASK, layers="all").run(export(), space)
    assert last.numbers.items() <= every.numbers.items()
    assert every.numbers["rankme_block1"] != every.numbers["rankme"]


def test_features_of_other_tasks_are_not_extracted_again(tmp_path):
    space, network = Workspace(cache=tmp_path, data="tiny:"), export()
    Knn().run(network, space)
    assert TASK.run(network, space).cost["forwards"] == TASK.images * TASK.views
    assert TASK.run(network, space).cost["forwards"] == 0


def test_constant_features_have_no_number_that_flatters_them():
    names = dict(spectrum_metrics(np.ones((20, 8), np.float32)))
    assert names["rankme"].value == pytest.approx(1, abs=1e-4) and names["dead_dimensions"].value == 100
    assert "rankme_variance" not in names and "alpha_req" not in names
    assert "lidar" not in dict(view_metrics(np.ones((5, 3, 8), np.float32)))
