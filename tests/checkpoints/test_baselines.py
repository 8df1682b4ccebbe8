"""Raw pixels as an export: its feature is the image, and it has no weight."""

from dataclasses import replace

import pytest
import torch

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.resolve import load
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT


def images_of(side: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def as_a_network(side: int) -> ViTExport:
    """The same features as earlier versions exported them: a timm network with the identity as patch embedding."""
    spec = replace(load(f"pixels:{side}").spec, architecture="vit_base_patch16_224")
    vit = ViT(spec)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.zero_()
        vit.trunk.patch_embed.proj.weight.copy_(torch.eye(spec.width).view(spec.width, 3, side, side))
    return ViTExport.from_vit(vit, Preparation(crop=1.0), {"name": f"pixels-{side}", "method": "pixels"})


def test_feature_is_the_normalised_image():
    export = load("pixels:8")
    backbone = Backbone(export)
    prepared = backbone.prepare(images_of(8))
    assert torch.equal(backbone.views(prepared, [(-1, True)])[-1, True].avg, prepared.flatten(1))
    assert export.verify() == []


def test_there_is_nothing_to_compute():
    export = load("pixels:32")
    assert export.parameters == 0 and not list(export.build().parameters())


@pytest.mark.parametrize("norm", [True, False])
def test_features_are_those_of_the_network_that_stood_for_them(norm, tmp_path):
    """Exports of that network are still on disks, and load."""
    old = load(as_a_network(8).save(tmp_path / "old"))
    assert old.verify() == [] and old.spec.family == "vit"
    new = load("pixels:8")
    prepared = Backbone(new).prepare(images_of(8))
    before, now = (Backbone(export).views(prepared, [(-1, norm)])[-1, norm] for export in (old, new))
    assert now.cls is None and torch.equal(now.avg, before.avg) and torch.equal(now.patches, before.patches)


def test_it_is_saved_and_proved_like_any_export(tmp_path):
    export = load("pixels:8")
    again = load(export.save(tmp_path / "pixels"))
    assert again == replace(export, tensors=again.tensors) and again.digest == export.digest
    assert again.verify() == []


def test_larger_images_are_patches_of_pixels():
    """Dense tasks encode images of any size: a patch's feature is its own pixels."""
    backbone = Backbone(load("pixels:4").at_size(12))
    prepared = backbone.prepare(images_of(12))
    found = backbone.views(prepared, [(-1, True)])[-1, True]
    assert found.patches.shape == (3, 3, 3, 48)
    assert torch.equal(found.patches[:, 1, 2], prepared[:, :, 4:8, 8:12].flatten(1))


@pytest.mark.parametrize(
    "changes", [{"width": 96, "heads": 1}, {"depth": 2}, {"class_token": True}, {"final_norm": "all"}, {"registers": 1}]
)
def test_facts_of_a_network_do_not_fit_pixels(changes):
    spec = load("pixels:8").spec
    with pytest.raises(ValueError, match=r"architecture='pixels' has no network; set .*final_norm='none'"):
        replace(spec, **changes)


def test_label_and_family():
    spec: ViTSpec = load("pixels:8").spec
    assert (spec.family, spec.label, spec.has_class_token) == ("pixels", "raw pixels", False)


@pytest.mark.parametrize("reference", ["pixels:0", "pixels:49", "pixels:big"])
def test_other_sides_are_one_line(reference):
    with pytest.raises(ValueError, match="give a side of 1 to 48 pixels"):
        load(reference)
