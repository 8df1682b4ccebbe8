"""MSN beyond its recorded steps: dropped patches, weights of the losses, views, exports."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toys import picture

from checkpoints.spec import ViTSpec
from pretrain.loop.exporting import exports_of
from pretrain.methods.msn import METHOD, RECIPES, Msn
from probes.finetune.classifier import projector_layer

SMOKE = RECIPES["smoke"]
SPEC: ViTSpec = SMOKE.spec
IMAGES, PATCHES = 6, 16


def msn(**changes) -> Msn:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SMOKE.settings, **changes)).double()


def views(method: Msn) -> dict[str, Tensor]:
    generator, settings = torch.Generator().manual_seed(1), method.settings
    sizes = {
        "target": (SPEC.image_size,),
        "random": (SPEC.image_size, settings.random_views),
        "focal": (settings.focal_size, settings.focal_views),
    }
    crops = {
        name: torch.randn(IMAGES, *count, 3, side, side, generator=generator).double()
        for name, (side, *count) in sizes.items()
        if 0 not in count
    }
    noise = torch.rand(IMAGES, settings.random_views, PATCHES, generator=generator).double()
    return crops | {"noise": noise}


@pytest.mark.parametrize(("shared", "masks"), [(False, 2 * IMAGES), (True, 1)])
def test_views_drop_different_patches_or_the_same_ones(shared, masks):
    method = msn(mask_ratio=0.3, random_views=2, shared_mask=shared)
    keep = method.visible_ids(views(method)["noise"])
    assert keep.shape == (2 * IMAGES, int(PATCHES * 0.7))
    assert len({tuple(sorted(ids.tolist())) for ids in keep}) == masks
    assert all(len(set(ids.tolist())) == keep.shape[1] for ids in keep)


def test_without_a_mask_all_patches_are_encoded():
    assert msn(mask_ratio=0.0).visible_ids(torch.rand(IMAGES, 1, PATCHES)) is None


@pytest.mark.parametrize("changes", [{"memax_weight": 5.0, "sinkhorn": False}, {"entropy_weight": 2.0}])
def test_the_loss_is_the_weighted_sum(changes):
    method = msn(**changes)
    loss, logs, _ = method(views(method))
    settings = method.settings
    expected = logs["ce"] + settings.memax_weight * logs["memax"] + settings.entropy_weight * logs["entropy"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_views_have_the_sizes_of_the_settings():
    method = msn(random_views=2, focal_views=3)
    image = picture(0, 50, 40)
    image_views = method.views()(image)
    sizes = {name: tuple(tensor.shape) for name, tensor in image_views.items()}
    assert sizes == {"target": (3, 16, 16), "random": (2, 3, 16, 16), "focal": (3, 3, 8, 8), "noise": (2, 16)}
    assert not torch.equal(image_views["target"], image_views["random"][0])
    assert set(msn(focal_views=0).views()(image)) == {"target", "random", "noise"}


@pytest.mark.parametrize("norm", ["bn", "ln", "none"])
def test_exports_keep_the_head_whose_first_layer_starts_fine_tuning(norm):
    """In evaluation mode, with the running statistics of training."""
    method = msn(head_norm=norm)
    method(views(method))
    (name, export), (other, _) = exports_of(method, {})
    assert (name, other, export.facts["branch"]) == ("export", "export-anchor", "target")
    vectors, first = torch.randn(3, SPEC.width), method.target.head[: 2 if norm == "none" else 3].float().eval()
    torch.testing.assert_close(projector_layer(export)(vectors), first(vectors), rtol=1e-5, atol=1e-6)
