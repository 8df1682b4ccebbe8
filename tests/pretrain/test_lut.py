"""LUT beyond its recorded steps: both bases, visible patches, crossed contexts, micro-batches."""

from dataclasses import replace

import pytest
import torch
from small_trainings import forward_pass
from toys import SMALL, progress, views_of

from pretrain.loop.updates import Updates
from pretrain.method import Method
from pretrain.methods import mae, simmim
from pretrain.methods.lut import BASE_SETTINGS, METHOD, RECIPES, Settings
from pretrain.parts.losses import byol_loss
from pretrain.parts.masking import order_of, patchify
from pretrain.recipe import RELATIVE, SINCOS

SPECS = {"mae": replace(SMALL, **SINCOS), "simmim": replace(SMALL, **RELATIVE)}
SETTINGS = {
    "mae": Settings(head_hidden=24, decoder_width=16, decoder_depth=1, decoder_heads=2, crop_padding=2),
    "simmim": Settings(base="simmim", head_hidden=24, mask_patch=4, drop_path=0.0, crop_padding=2),
}
BASES = pytest.mark.parametrize("base", ["mae", "simmim"])


def method_of(base: str = "mae", **changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPECS[base], replace(SETTINGS[base], **changes)).double()


def updates_of(method: Method) -> Updates:
    return Updates(method, replace(RECIPES["smoke"], spec=method.spec, settings=method.settings, batch=6))


def used_patches(method: Method, number: int) -> torch.Tensor:
    """(6, L) bool: the patches of view `number` that the student's output for it depends on."""
    views = views_of(method)
    images = torch.cat([views["view1"], views["view2"]]).requires_grad_()
    order = order_of(views["noise"])
    orders = torch.cat([order, order.roll(-method.base.visible, dims=1)])
    context = method.base.context(method.base.encode(images, orders), orders).chunk(2)[number]
    (gradient,) = torch.autograd.grad(context.square().sum(), images)
    return patchify(gradient.chunk(2)[number], method.spec.patch_size).abs().sum(-1) > 0


@pytest.mark.parametrize(("base", "visible"), [("mae", 4), ("simmim", 6)])
def test_the_views_show_different_patches(base, visible):
    method = method_of(base, mask_ratio=0.75 if base == "mae" else 0.6)
    first, second = used_patches(method, 0), used_patches(method, 1)
    assert (first.sum(1) == visible).all() and (second.sum(1) == visible).all()
    assert not (first & second).any()


@BASES
def test_the_loss_is_that_of_the_base_and_of_crossed_contexts(base):
    method = method_of(base, head_norm="ln", w_mim=0.5)
    views = views_of(method)
    step = forward_pass(method, views, progress())
    order = order_of(views["noise"])
    orders = (order, order.roll(-method.base.visible, dims=1))
    predictions = [
        method.predictor(method.projector(method.base.context(method.base.encode(view, ids), ids)))
        for view, ids in zip((views["view1"], views["view2"]), orders, strict=True)
    ]
    targets = [method.teacher_targets(views[name]) for name in ("view1", "view2")]
    context = 0.5 * (byol_loss(predictions[1], targets[0]) + byol_loss(predictions[0], targets[1]))
    mim = method.base.loss(method.base.encode(views["view1"], order), views["view1"], order)
    torch.testing.assert_close(step.loss, 0.5 * mim + 0.25 * context)
    torch.testing.assert_close((step.logs["mim"], step.logs["context"]), (mim.detach(), context.detach()))


def test_without_context_the_loss_is_that_of_the_base():
    """With w_bc=0 the loss of view 1 is that of MAE or SimMIM with the same weights."""
    for base, module in (("mae", mae), ("simmim", simmim)):
        method = method_of(base, w_bc=0.0, mask_ratio=0.6)
        shared = {"mask_ratio", *BASE_SETTINGS[base]} & module.Settings.__dataclass_fields__.keys()
        settings = module.Settings(**{name: getattr(method.settings, name) for name in shared})
        base_method = module.METHOD(SPECS[base], settings).double()
        getattr(base_method, "autoencoder" if base == "mae" else "predictor").load_state_dict(method.base.state_dict())
        views = views_of(method)
        expected = forward_pass(base_method, {"image": views["view1"], "noise": views["noise"]}, progress()).loss
        torch.testing.assert_close(forward_pass(method, views, progress()).loss, expected)


@BASES
def test_without_batch_norm_micro_batches_have_the_loss_of_the_batch(base):
    losses = []
    for parts in (1, 3):
        method = method_of(base, head_norm="ln", teacher_momentum=1.0)
        assert not method.batch_statistics and method_of(base).batch_statistics
        updates = updates_of(method)
        for step in range(2):
            batch = views_of(method)
            plan = [{name: tensor[i::parts] for name, tensor in batch.items()} for i in range(parts)]
            logs = updates.run(plan, progress(step, parts=parts))
        losses.append(logs["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)  # SimMIM adds 1e-5 to the number of pixels of each part
