"""iBOT beyond its recorded steps: equality with DINO without masks, weights of losses, other heads, views."""

from dataclasses import replace

import pytest
import torch
from recorded_distillation import RecordedDino
from small_trainings import forward_pass
from test_dino import progress, random_views
from torch import Tensor
from toy_dino import SPEC, recipe
from toys import picture

from engine.seeding import AUGMENT, seeded
from pretrain.methods.ibot import METHOD, Ibot, Settings


def ibot(**changes) -> Ibot:
    torch.manual_seed(0)
    training = recipe(Settings, **changes)
    return METHOD(training.spec, training.settings).double()


def masked_views(share: float = 0.5) -> dict[str, Tensor]:
    views, generator = random_views(), torch.Generator().manual_seed(2)
    views["mask"] = torch.rand((*views.pop("noise").shape[:2], 16), generator=generator) < share
    return views


class WithoutMasks(RecordedDino):
    """iBOT on DINO's recorded crops, with empty masks."""

    method, options = METHOD, Settings

    def views(self, forward):
        patches = (self.config["img"] // self.config["patch"]) ** 2
        return super().views(forward) | {"mask": torch.zeros(self.config["B"], 2, patches, dtype=torch.bool)}


def test_without_masks_ibot_equals_dino():
    case = WithoutMasks()
    case.run(case.begin())


def test_masks_are_used_from_their_epoch_on():
    """Until then masks in the views are ignored, and the patches' temperature stays at its start."""
    method, views = ibot(mask_start=2), masked_views()
    first, second = (forward_pass(method, views, progress(epoch)) for epoch in (1, 2))
    unmasked = forward_pass(method, views | {"mask": torch.zeros_like(views["mask"])}, progress(1))
    assert first.loss == unmasked.loss and first.logs["patch"] == 0 < second.logs["patch"]
    assert method.patch_temperature == method.settings.patch_temperature_start
    assert first.logs["cls"] != second.logs["cls"], "the class token depends on the masks"
    method.before_forward(progress(0))
    assert list(method.baseline_loss(views)) == ["cls"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"local_crops": 0}, {"cls_weight": 0.5, "patch_weight": 2.0}, {"shared_head": False, "head_norm": "bn"}],
)
def test_the_loss_is_the_weighted_sum(changes):
    method, views = ibot(**changes), masked_views()
    views = {name: view for name, view in views.items() if name != "local" or method.settings.local_crops}
    step = forward_pass(method, views, progress(0))
    weights = {"cls": method.settings.cls_weight, "patch": method.settings.patch_weight}
    assert step.loss.item() == pytest.approx(sum(weight * step.logs[name] for name, weight in weights.items()).item())
    step.loss.backward()
    assert method.mask_token.grad.any()


@pytest.mark.parametrize("teacher", [True, False])
def test_patches_may_have_separate_prototypes(teacher):
    """The teacher's follow the student's, unless the teacher's head is shared; then the student's are independent."""
    method = ibot(shared_head=False, shared_head_teacher=teacher, teacher_momentum=0.0, head_norm="ln")
    assert method.student.head.mlp[1] is method.student.head.mlp[4]  # models/head.py:69-87
    heads = {branch: dict(getattr(method, branch).head.named_parameters()) for branch in ("student", "teacher")}
    assert [any("last_layer2" in name for name in heads[branch]) for branch in heads] == [True, not teacher]
    with torch.no_grad():
        for parameter in heads["student"].values():
            parameter.add_(1.0)
    method.after_update(progress(0))
    assert all(torch.equal(values, heads["student"][name]) for name, values in heads["teacher"].items())
    forward_pass(method, masked_views(), progress(0)).loss.backward()
    method.before_update(progress(0))
    assert [name for name, values in heads["student"].items() if values.grad is None and values.requires_grad] == [
        "last_layer.weight_v",
        "last_layer2.weight_v",
    ]


def test_half_of_the_crops_stay_unmasked():
    views = METHOD(SPEC, replace(ibot().settings, mask_shape="random")).views()
    image = picture(0, 50, 40)
    with seeded(AUGMENT, 0):
        masks = torch.stack([views(image)["mask"] for _ in range(100)]).flatten(0, 1)
    assert masks.shape == (200, 16) and masks.dtype == torch.bool
    shares = masks.float().mean(dim=1)
    assert 0.35 < (shares > 0).float().mean() < 0.65
    assert shares[shares > 0].min() >= 1 / 16 and shares.max() <= 0.5
