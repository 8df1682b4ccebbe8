"""MSN beside its recording: which patches are dropped, me-max, Sinkhorn, what is clipped, exports, mistakes."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from PIL import Image
from small_trainings import small_recipe
from torch import Tensor

from checkpoints.spec import ViTSpec
from pretrain.loop.exporting import exports_of
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.msn import METHOD, RECIPES, Msn
from pretrain.parts.losses import mean_entropy_loss
from pretrain.parts.teachers import sinkhorn
from pretrain.schedules import CosineTo, CountedCosine
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
    found = {
        name: torch.randn(IMAGES, *count, 3, side, side, generator=generator).double()
        for name, (side, *count) in sizes.items()
        if 0 not in count
    }
    noise = torch.rand(IMAGES, settings.random_views, PATCHES, generator=generator).double()
    return found | {"noise": noise}


class TestMasks:
    def test_each_view_loses_patches_of_its_own(self):
        method = msn(mask_ratio=0.3, random_views=2)
        keep = method.keep(views(method)["noise"])
        assert keep.shape == (IMAGES * 2, int(PATCHES * 0.7))
        assert len({tuple(sorted(ids.tolist())) for ids in keep}) == len(keep)
        assert all(len(set(ids.tolist())) == keep.shape[1] for ids in keep)

    def test_or_the_same_are_lost_by_all(self):
        method = msn(mask_ratio=0.3, random_views=2, shared_mask=True)
        keep = method.keep(views(method)["noise"])
        assert keep.shape == (IMAGES * 2, int(PATCHES * 0.7)) and (keep == keep[0]).all()

    def test_dropped_patches_are_not_seen_and_focal_views_keep_theirs(self):
        method = msn(mask_ratio=0.5, head_norm="none")
        seen = views(method)
        lost = set(range(PATCHES)) - set(method.keep(seen["noise"])[0].tolist())
        row, column = divmod(lost.pop(), SPEC.grid[1])
        side, changed = SPEC.patch_size, {name: view.clone() for name, view in seen.items()}
        changed["random"][0, 0, :, row * side : (row + 1) * side, column * side : (column + 1) * side] += 1.0
        changed["focal"][0, 1, 0, 0, 0] += 1.0
        before, after = method.anchor_vectors(seen), method.anchor_vectors(changed)
        assert torch.equal(before[0, :2], after[0, :2]) and not torch.equal(before[0, 2], after[0, 2])
        assert torch.equal(before[1:], after[1:])

    def test_without_a_mask_all_patches_are_seen(self):
        assert msn(mask_ratio=0.0).keep(torch.rand(IMAGES, 1, PATCHES)) is None


class TestRegularisers:
    def test_me_max_is_zero_where_prototypes_are_used_alike_and_log_k_where_one_is(self):
        sure = torch.eye(8, dtype=torch.float64)
        assert mean_entropy_loss(sure.view(4, 2, 8)).item() == pytest.approx(0.0, abs=1e-12)
        assert mean_entropy_loss(sure[:1].expand(5, 8)).item() == pytest.approx(log(8))

    def test_sinkhorn_evens_out_prototypes_and_keeps_images(self):
        shares = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(3).softmax(1)
        uses = [sinkhorn(shares, rounds).sum(dim=0) for rounds in (0, 3, 300)]
        spreads = [float(use.max() / use.min()) for use in uses]
        assert spreads[0] > spreads[1] > spreads[2] and spreads[2] == pytest.approx(1.0)
        torch.testing.assert_close(sinkhorn(shares).sum(dim=1), torch.ones(40, dtype=torch.float64))

    @pytest.mark.parametrize("changes", [{"memax_weight": 5.0, "sinkhorn": False}, {"entropy_weight": 2.0}])
    def test_the_loss_is_the_weighted_sum(self, changes):
        method = msn(**changes)
        loss, logs, _ = method(views(method))
        settings = method.settings
        wanted = logs["ce"] + settings.memax_weight * logs["memax"] + settings.entropy_weight * logs["entropy"]
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)

    def test_targets_do_not_move_the_prototypes(self):
        """Without anchors' gradients there are none."""
        method = msn()
        assert not method.targets(views(method)["target"]).requires_grad
        loss, _, _ = method(views(method))
        loss.backward()
        assert method.prototypes.grad.any() and all(p.grad is None for p in method.target.parameters())


def test_each_resolution_has_batch_statistics_of_its_own():
    """As the official code, which concatenates views of one size only."""
    method = msn()
    seen = views(method)
    before = method.anchor_vectors(seen)
    after = method.anchor_vectors(seen | {"focal": seen["focal"] * 3.0 + 1.0})
    torch.testing.assert_close(after[:, :1], before[:, :1])
    assert not torch.allclose(after[:, 1:], before[:, 1:])


def test_clipping_leaves_the_prototypes_alone():
    """And the anchor's gradient is scaled by its own norm, not that with the prototypes'."""
    updates = Updates(msn(), replace(small_recipe("msn"), clip=1e-3))
    updates.method(views(updates.method)).loss.backward()
    prototypes, anchor = updates.method.prototypes, list(updates.method.anchor.parameters())
    before, scale = prototypes.grad.clone(), 1e-3 / torch.stack([p.grad.norm() for p in anchor]).norm()
    total = torch.stack([p.grad.norm() for p in [*anchor, prototypes]]).norm()
    assert updates.clip_gradients() == pytest.approx(total.item())
    assert torch.equal(prototypes.grad, before) and before.any()
    assert torch.stack([p.grad.norm() for p in anchor]).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert scale < 1


def test_views_are_of_the_sizes_asked_for():
    method = msn(random_views=2, focal_views=3)
    image = Image.fromarray(np.random.RandomState(0).randint(0, 255, (40, 50, 3), dtype=np.uint8))
    made = method.views()(image)
    sizes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    assert sizes == {"target": (3, 16, 16), "random": (2, 3, 16, 16), "focal": (3, 3, 8, 8), "noise": (2, 16)}
    assert not torch.equal(made["target"], made["random"][0])
    assert set(msn(focal_views=0).views()(image)) == {"target", "random", "noise"}


@pytest.mark.parametrize("norm", ["bn", "ln", "none"])
def test_exports_carry_the_head_from_whose_first_layer_fine_tuning_starts(norm):
    """In evaluation mode: with the statistics that training left."""
    method = msn(head_norm=norm)
    method(views(method))
    (name, export), (other, _) = exports_of(method, {})
    assert (name, other, export.facts["branch"]) == ("export", "export-anchor", "target")
    vectors, first = torch.randn(3, SPEC.width), method.target.head[: 2 if norm == "none" else 3].float().eval()
    torch.testing.assert_close(projector_layer(export)(vectors), first(vectors), rtol=1e-5, atol=1e-6)


def test_rates_of_the_published_recipe():
    """Appendix A.1: from 0.0002 to 0.001 in 15 epochs; the cosines are made for 1.25 times the epochs."""
    recipe = RECIPES["vit_s"]
    first, peak, last = (
        TrainProgress(step=step, steps_per_epoch=1251, epochs=800) for step in (0, 15 * 1251 - 1, 800 * 1251 - 1)
    )
    rates = [recipe.schedule.at(recipe.peak, at) for at in (first, peak, last)]
    assert rates[0] == pytest.approx(2e-4, rel=1e-3) and rates[1] == pytest.approx(1e-3, rel=1e-9)
    assert rates[2] == pytest.approx(1e-4, rel=0.1)
    decay = recipe.weight_decay_schedule.at(recipe.weight_decay, last)
    assert recipe.weight_decay == 0.04 and 0.36 < decay < 0.4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CountedCosine(warmup=1, start=0.2, stretch=0.5),
            r"schedule.stretch=0.5: must be a number of at least 1",
        ),
        (lambda: CosineTo(end=0.4, stretch=0.5), r"weight_decay_schedule.stretch=0.5"),
        (lambda: CosineTo(end=0.4, first=2), r"first=2"),
    ],
)
def test_schedules_that_would_turn_back_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
