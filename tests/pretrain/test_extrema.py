"""ExtreMA beside its recordings: masks, augmentations, the three designs, moving the teacher, exports, mistakes."""

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
from pretrain.methods.extrema import AVERAGE, CLASS_ATTENTION, CLASS_TOKEN, METHOD, RECIPES, Settings, visible
from pretrain.parts.losses import byol_loss, info_nce

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


def test_masks_of_one_draw_are_disjoint_and_differ_between_images():
    ids = visible(torch.rand(5, 1, 16, generator=torch.Generator().manual_seed(0)), masks=4, keep=4)
    assert torch.equal(ids.flatten(1).sort(dim=1).values, torch.arange(16).expand(5, -1))
    assert len({tuple(image.tolist()) for image in ids.flatten(1)}) == 5


def test_masks_with_replacement_have_a_draw_each():
    noise = torch.rand(5, 3, 16, generator=torch.Generator().manual_seed(0))
    ids = visible(noise, masks=3, keep=10)  # more than fits into the image without
    for mask in range(3):
        assert torch.equal(ids[:, mask], noise[:, mask].argsort(dim=1)[:, :10])


def test_nothing_masked_is_the_whole_image():
    method = method_of(mask_ratio=0.0, masks=1).eval()
    views = views_of(method, 2)
    whole = method.predictor(method.online(method.online.place(views["student"])))
    torch.testing.assert_close(method.encode_masked(views["student"], views["noise"])[0], whole)


@pytest.mark.parametrize("replacement", [False, True])
def test_each_mask_is_what_it_would_be_alone(replacement):
    method = method_of(replacement=replacement)
    views = views_of(method)
    together = method.encode_masked(views["student"], views["noise"])
    placed = method.online.place(views["student"])
    for mask, ids in enumerate(visible(views["noise"], method.settings.masks, method.keep).unbind(1)):
        for image in range(BATCH):
            alone = method.predictor(method.online(placed[image : image + 1, ids[image]]))
            torch.testing.assert_close(together[mask, image], alone[0])


def likeness(views: dict[str, Tensor]) -> float:
    """Lowest correlation of both branches' pixels over the images; 1 for the same piece of the picture."""
    student, teacher = (views[branch][:, 0].flatten(1) for branch in ("student", "teacher"))
    return min(torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in zip(student, teacher, strict=True))


# Table 4: none, the three rows of one augmentation, the four of two.
ONE = [("none", "none"), ("none", "shared"), ("shared", "none"), ("shared", "shared")]
TWO = [("none", "independent"), ("independent", "none"), ("independent", "independent"), ("shared", "independent")]


@pytest.mark.parametrize(("crop", "colour"), ONE + TWO)
def test_augmentations(crop, colour):
    method = method_of(crop=crop, colour=colour)
    views = views_of(method)
    assert views["student"].shape == (BATCH, 3, 16, 16) and views["noise"].shape == (BATCH, 1, 16)
    assert ("teacher" in views) == ((crop, colour) in TWO)
    if "teacher" in views:
        assert not torch.equal(views["student"], views["teacher"])
        assert (likeness(views) > 0.9) == (crop != "independent")
    centre = views_of(method_of(crop="none", colour="none"))["student"]
    again = views_of(method)["student"]
    assert torch.equal(views["student"], again)
    assert torch.equal(views["student"], centre) == ((crop, colour) == ("none", "none"))
    assert views_of(method_of(replacement=True))["noise"].shape == (BATCH, 3, 16)


def test_both_branches_see_their_own_view():
    method = method_of()
    views = views_of(method)
    loss = forward_pass(method, views, progress()).loss
    predictions = method.encode_masked(views["student"], views["noise"])
    torch.testing.assert_close(loss, byol_loss(predictions, method.teacher_targets(views["teacher"])))
    assert not torch.isclose(loss, byol_loss(predictions, method.teacher_targets(views["student"])))


def test_losses_against_their_formulas():
    generator = torch.Generator().manual_seed(0)
    predictions, targets = torch.randn(3, 5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    cosines = torch.cosine_similarity(predictions, targets, dim=-1)
    torch.testing.assert_close(byol_loss(predictions, targets), (2 - 2 * cosines).mean())
    logits = torch.cosine_similarity(predictions.unsqueeze(2), targets, dim=-1) / 0.2  # (M, B, B)
    own = torch.diagonal(logits, dim1=1, dim2=2) - logits.logsumexp(dim=2)
    torch.testing.assert_close(info_nce(predictions, targets, 0.2), -own.mean() * 2 * 0.2)


@pytest.mark.parametrize("loss", ["byol", "infonce"])
def test_batch_statistics_says_whether_the_loss_of_halves_is_that_of_all(loss):
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


def test_teacher_moves_once_an_update_from_the_weights_before_it():
    method = method_of(teacher_momentum=0.9)
    updates = updates_of(method)
    for parameter in method.predictor.parameters():
        parameter.data.add_(0.1)
    updates.run([views_of(method)], progress(0))
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    halves = [{name: tensor[i::2] for name, tensor in views_of(method).items()} for i in range(2)]
    updates.run(halves, progress(1, parts=2))
    momentum = method.teacher_momentum.at(0.9, progress(1))
    for name, parameter in method.momentum.named_parameters():
        moved = momentum * before[f"momentum.{name}"] + (1 - momentum) * before[f"online.{name}"]
        torch.testing.assert_close(parameter, moved, rtol=1e-12, atol=1e-12, msg=name)


def test_fixed_positions_do_not_drift():
    method = method_of().float()
    table = method.momentum.vit.trunk.pos_embed.clone()
    updates = updates_of(method)
    batch = {name: tensor.float() for name, tensor in views_of(method).items()}
    for step in range(4):
        updates.run([batch], progress(step))
    assert torch.equal(method.momentum.vit.trunk.pos_embed, table)
    assert torch.equal(method.online.vit.trunk.pos_embed, table)


def test_drop_path_is_the_students_own_and_each_row_has_its_draw():
    method = method_of(drop_path=0.5)
    views = views_of(method)
    assert torch.equal(method.teacher_targets(views["student"]), method.teacher_targets(views["student"]))
    same = method.online.place(views["student"])[:1, :4].repeat(16, 1, 1)  # 16 masks that keep the same patches
    projections = method.online(same).round(decimals=9)
    assert len(projections.unique(dim=0)) == 4  # of the last block, either branch, both or none are left out


@pytest.mark.parametrize("design", DESIGNS)
def test_exports_give_the_instance_representation(design, tmp_path):
    method = method_of(design).float()
    for parameter in method.online.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    images = views_of(method)["student"].float()
    encoders = method.encoders()
    assert list(encoders) == ["momentum", "online"]
    for network, encoder in zip((method.momentum, method.online), encoders.values(), strict=True):
        export = ViTExport.load(exported(method, encoder).save(tmp_path / design / str(id(network))))
        found = Backbone(export).views(images, [(-1, True)])[-1, True]
        instance = found.avg if export.spec.pool == "avg" else found.cls
        with torch.no_grad():
            ours = network.instance(network.vit.encode(network.place(images), norm=False)[0])
        torch.testing.assert_close(instance, ours, rtol=1e-4, atol=1e-5)
