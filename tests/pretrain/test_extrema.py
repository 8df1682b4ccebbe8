"""ExtreMA beyond its recorded steps: no masks, augmentations, batch statistics, exports of the three designs."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from small_trainings import forward_pass
from torch import Tensor
from toys import SMALL, exported, progress
from toys import views_of as views_of_pictures

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from pretrain.loop.updates import Updates
from pretrain.method import Method
from pretrain.methods.extrema import AVERAGE, CLASS_ATTENTION, CLASS_TOKEN, METHOD, RECIPES, Settings

SETTINGS = Settings(mask_ratio=0.75, masks=3, projector_hidden=24, projector_width=8, drop_path=0.0)
DESIGNS = {"class attention": CLASS_ATTENTION, "class token": CLASS_TOKEN, "average": AVERAGE}
BATCH = 6


def method_of(design: str = "class attention", **changes) -> Method:
    torch.manual_seed(0)
    return METHOD(replace(SMALL, **DESIGNS[design]), replace(SETTINGS, **changes)).double()


def picture(seed: int) -> Image.Image:
    """Coarse grey squares: two crops of it look different, two colourings alike but for brightness and contrast."""
    coarse = torch.randint(40, 216, (6, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(coarse.numpy()).resize((48, 48), Image.Resampling.BICUBIC).convert("RGB")


def views_of(method: Method, count: int = BATCH) -> dict[str, Tensor]:
    return views_of_pictures(method, count, picture=picture)


def updates_of(method: Method) -> Updates:
    return Updates(method, replace(RECIPES["smoke"], spec=method.spec, settings=method.settings, batch=BATCH))


def test_without_masks_the_complete_image_is_encoded():
    method = method_of(mask_ratio=0.0, masks=1).eval()
    views = views_of(method, 2)
    expected = method.predictor(method.online(method.online.embed_patches(views["student"])))
    torch.testing.assert_close(method.encode_masked(views["student"], views["noise"])[0], expected)


def correlation(views: dict[str, Tensor]) -> float:
    """Lowest correlation of both branches' pixels over the images; 1 for the same region of the picture."""
    student, teacher = (views[branch][:, 0].flatten(1) for branch in ("student", "teacher"))
    return min(torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in zip(student, teacher, strict=True))


# Table 4: no augmentation and three rows with one for both branches; four rows with one per branch.
ONE = [("none", "none"), ("none", "shared"), ("shared", "none"), ("shared", "shared")]
TWO = [("none", "independent"), ("independent", "none"), ("independent", "independent"), ("shared", "independent")]


@pytest.mark.parametrize(("crop", "colour"), ONE + TWO)
def test_branches_share_augmentations_as_set(crop, colour):
    method = method_of(crop=crop, colour=colour)
    views = views_of(method)
    assert views["student"].shape == (BATCH, 3, 16, 16) and views["noise"].shape == (BATCH, 1, 16)
    assert ("teacher" in views) == ((crop, colour) in TWO)
    if "teacher" in views:
        assert not torch.equal(views["student"], views["teacher"])
        assert (correlation(views) > 0.9) == (crop != "independent")
    centre = views_of(method_of(crop="none", colour="none"))["student"]
    again = views_of(method)["student"]
    assert torch.equal(views["student"], again)
    assert torch.equal(views["student"], centre) == ((crop, colour) == ("none", "none"))
    assert views_of(method_of(replacement=True))["noise"].shape == (BATCH, 3, 16)


@pytest.mark.parametrize("loss", ["byol", "infonce"])
def test_batch_statistics_is_set_if_the_loss_of_halves_differs_from_that_of_the_batch(loss):
    method = method_of(loss=loss)
    views = views_of(method)
    halves = [
        {name: view[half] for name, view in views.items()} for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH))
    ]
    shares = [len(half["student"]) / BATCH for half in halves]
    parts = sum(
        share * forward_pass(method, half, progress(step=1)).loss for share, half in zip(shares, halves, strict=True)
    )
    assert method.batch_statistics == (not torch.isclose(parts, forward_pass(method, views, progress(step=1)).loss))


def test_fixed_positions_do_not_change():
    method = method_of().float()
    table = method.momentum.vit.trunk.pos_embed.clone()
    updates = updates_of(method)
    batch = {name: tensor.float() for name, tensor in views_of(method).items()}
    for step in range(4):
        updates.run([batch], progress(step))
    assert torch.equal(method.momentum.vit.trunk.pos_embed, table)
    assert torch.equal(method.online.vit.trunk.pos_embed, table)


@pytest.mark.parametrize("design", DESIGNS)
def test_exports_compute_the_instance_representation(design, tmp_path):
    method = method_of(design).float()
    for parameter in method.online.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    images = views_of(method)["student"].float()
    encoders = method.encoders()
    assert list(encoders) == ["momentum", "online"]
    for network, encoder in zip((method.momentum, method.online), encoders.values(), strict=True):
        export = ViTExport.load(exported(method, encoder).save(tmp_path / design / str(id(network))))
        features = Backbone(export).views(images, [(-1, True)])[-1, True]
        instance = features.avg if export.spec.pool == "avg" else features.cls
        with torch.no_grad():
            expected = network.instance(network.vit.encode(network.embed_patches(images), norm=False)[0])
        torch.testing.assert_close(instance, expected, rtol=1e-4, atol=1e-5)
