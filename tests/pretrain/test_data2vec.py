"""data2vec beyond its recorded steps: other norms and losses, stochastic depth, momentum, initial weights."""

from dataclasses import replace

import pytest
import torch
from small_trainings import forward_pass
from torch.nn import functional as F
from toys import SMALL, progress, views_of

from pretrain.method import Method, TrainProgress
from pretrain.methods.data2vec import METHOD, RECIPES
from pretrain.recipe import RELATIVE

SPEC = replace(SMALL, **RELATIVE)
SETTINGS = replace(RECIPES["smoke"].settings, target_layers=(0, 1))


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_batch_and_instance_norms_of_the_targets():
    """Batch norms and instance norms see all patches, hidden or not (engine_for_cyclical.py:66-99)."""
    method = method_of(
        target_batch_norm=True,
        target_instance_norm=True,
        target_layer_norm_last=False,
        post_target_layer_norm=False,
        post_target_instance_norm=True,
    )
    views = views_of(method)
    mask, outputs = views["mask"].bool(), method.teacher(views["image"], layers=(0, 1), norm=False)
    channels = [F.batch_norm(tokens[:, 1:].transpose(1, 2), None, None, training=True) for tokens in outputs]
    expected = F.instance_norm(sum(F.instance_norm(maps) for maps in channels) / 2).transpose(1, 2)[mask]
    torch.testing.assert_close(method.targets(views["image"], mask), expected)


def test_squared_error_and_variance_penalty():
    """The penalty is for channels that hardly vary over the hidden patches."""
    method = method_of(l2_loss=True, var_w0=0.5, var_margin0=2.0)
    views = views_of(method)
    mask = views["mask"].bool()
    prediction, targets = method.predict(views["image"], mask), method.targets(views["image"], mask)
    penalty = (2.0 - (prediction.var(dim=0) + 1e-6).sqrt()).clamp(min=0).mean()
    step = forward_pass(method, views, progress())
    torch.testing.assert_close(step.loss, (prediction - targets).square().mean() + 0.5 * penalty)
    assert penalty > 0 and step.logs["variance"] == penalty


def test_the_student_drops_paths_and_the_teacher_does_not():
    method = method_of(drop_path=0.5, attn_drop=0.5)
    views = views_of(method)
    mask = views["mask"].bool()
    assert torch.equal(method.targets(views["image"], mask), method.targets(views["image"], mask))
    for changes in ({"drop_path": 0.5}, {"attn_drop": 0.5}):
        method = method_of(**changes)
        assert not torch.equal(method.predict(views["image"], mask), method.predict(views["image"], mask))
    method = method_of()
    assert torch.equal(method.predict(views["image"], mask), method.predict(views["image"], mask))


def test_the_teachers_momentum_ramps_up():
    """Two updates an epoch. The ramp's last value stays to the end of its epoch (engine_for_cyclical.py:42, 53-54)."""

    def momenta(**changes) -> list[float]:
        method = method_of(ema_decay_init=0.5, ema_decay=0.8, **changes)
        return [method.momentum(TrainProgress(step=step, steps_per_epoch=2, epochs=4)) for step in range(6)]

    assert momenta(ema_start_at=0) == [0.8] * 6
    assert momenta(ema_start_at=3) == pytest.approx([0.5, 0.6, 0.7, 0.7, 0.8, 0.8])
    assert momenta(ema_start_at=4) == pytest.approx([0.5, 0.575, 0.65, 0.725, 0.8, 0.8])


def test_initial_weights_follow_the_official_code():
    method = METHOD(SPEC, replace(SETTINGS, layer_scale_start=0.3))
    for tensor in (method.mask_token, method.lm_head.weight):
        assert 0.015 < tensor.abs().max() <= 0.02  # cut off at one standard deviation
    assert (method.lm_head.bias == 0).all() and (method.student.trunk.blocks[1].gamma_2 == 0.3).all()
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(method.teacher.parameters(), method.student.parameters(), strict=True)
    )
