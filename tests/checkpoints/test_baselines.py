"""Raw pixels as an export: the feature is the image, and there are no weights."""

from dataclasses import replace

import pytest
import torch

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.resolve import load
from checkpoints.spec import Preparation
from checkpoints.vit import ViT


def images_of(side: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def pixels_as_network(side: int) -> ViTExport:
    """The form in which earlier versions exported raw pixels: a timm network with an identity patch embedding."""
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


def test_raw_pixels_have_no_parameters():
    export = load("pixels:32")
    assert export.parameters == 0 and not list(export.build().parameters())


@pytest.mark.parametrize("norm", [True, False])
def test_exports_of_earlier_versions_load_with_the_same_features(norm, tmp_path):
    old = load(pixels_as_network(8).save(tmp_path / "old"))
    assert old.verify() == [] and old.spec.family == "vit"
    new = load("pixels:8")
    prepared = Backbone(new).prepare(images_of(8))
    old_features, new_features = (Backbone(export).views(prepared, [(-1, norm)])[-1, norm] for export in (old, new))
    assert (
        new_features.cls is None
        and torch.equal(new_features.avg, old_features.avg)
        and torch.equal(new_features.patches, old_features.patches)
    )


def test_raw_pixels_are_saved_and_verified_as_any_export(tmp_path):
    export = load("pixels:8")
    again = load(export.save(tmp_path / "pixels"))
    assert again == replace(export, tensors=again.tensors) and again.digest == export.digest
    assert again.verify() == []


def test_larger_images_are_patches_of_pixels():
    """Dense tasks encode images of any size; a patch's feature is its pixels."""
    backbone = Backbone(load("pixels:4").at_size(12))
    prepared = backbone.prepare(images_of(12))
    features = backbone.views(prepared, [(-1, True)])[-1, True]
    assert features.patches.shape == (3, 3, 3, 48)
    assert torch.equal(features.patches[:, 1, 2], prepared[:, :, 4:8, 8:12].flatten(1))


@pytest.mark.parametrize(
    "changes", [{"width": 96, "heads": 1}, {"depth": 2}, {"class_token": True}, {"final_norm": "all"}, {"registers": 1}]
)
def test_settings_of_a_network_are_refused_for_pixels(changes):
    spec = load("pixels:8").spec
    with pytest.raises(ValueError, match=r"architecture='pixels' has no network; set .*final_norm='none'"):
        replace(spec, **changes)


@pytest.mark.parametrize("reference", ["pixels:0", "pixels:49", "pixels:big"])
def test_wrong_sides_are_refused(reference):
    with pytest.raises(ValueError, match="give a side of 1 to 48 pixels"):
        load(reference)
