"""CAN beside its recordings: what is seen and asked for, NT-Xent by its formula, two processes, mistakes."""

from dataclasses import replace

import torch
from elsewhere import together
from small_trainings import forward_pass
from toys import SMALL, progress, views_of

from engine.distributed import World
from pretrain.method import Method
from pretrain.methods.can import METHOD, RECIPES
from pretrain.parts.losses import nt_xent
from pretrain.parts.masking import order_of, patchify, take
from pretrain.recipe import SINCOS

SPEC = replace(SMALL, **SINCOS)
SETTINGS = RECIPES["smoke"].settings


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def logs_of(method: Method, views: dict) -> dict:
    return dict(forward_pass(method, views, progress()).logs)


def test_nt_xent_by_its_formula():
    """- log (exp(cos(a, its other view) / T) / sum of exp(cos(a, b) / T) over all b but a), mean over all a."""
    torch.manual_seed(0)
    rows, losses = torch.randn(6, 5), []
    for number, row in enumerate(rows):
        ratios = (torch.cosine_similarity(row, rows) / 0.2).exp()
        losses.append(-(ratios[(number + 3) % 6] / (ratios.sum() - ratios[number])).log())
    torch.testing.assert_close(nt_xent(rows, 0.2), torch.stack(losses).mean())
    exact = nt_xent(rows, 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nt_xent(rows, 0.2), exact)
    assert nt_xent(rows[:2], 0.2) == 0 and METHOD.min_batch == 2  # one image has no negatives


def gradient_of_a_share(world: World) -> torch.Tensor:
    """Of this process's rows, the mean over processes: 2 of 4 images each."""
    torch.manual_seed(0)
    views = torch.randn(2, 4, 5, dtype=torch.float64).requires_grad_()
    share = views[:, 2 * world.rank : 2 * world.rank + 2] if world.size > 1 else views
    (gradient,) = torch.autograd.grad(nt_xent(share.flatten(0, 1), 0.2) / world.size, views)
    return gradient


def test_processes_share_negatives_and_their_gradient():
    first, second = together(gradient_of_a_share)
    torch.testing.assert_close(first + second, gradient_of_a_share(World()))


def test_what_is_seen_and_what_is_asked_for():
    method = method_of(norm_pixels=False)
    views = views_of(method)
    drawn = {name: both.transpose(0, 1).flatten(0, 1) for name, both in views.items()}
    ids, visible = order_of(drawn["noise"]), method.autoencoder.visible
    assert visible == 8
    images = drawn["image"].requires_grad_()
    latent = method.autoencoder.encode(images, ids)
    (seen,) = torch.autograd.grad(latent.square().sum(), images)
    touched = patchify(seen, 4).abs().sum(-1) > 0
    assert torch.equal(touched, torch.zeros_like(touched).scatter_(1, ids[:, :visible], True))
    added = torch.randn_like(images)
    decoded = method.decode(latent, drawn["level"], ids).detach()
    pixels, residue = method.errors(decoded, images, added, ids)
    error = decoded - take(patchify(images, 4), ids)
    torch.testing.assert_close(pixels, error[:, visible:].square().mean())
    error = decoded - take(patchify(added, 4), ids)
    torch.testing.assert_close(residue, error[:, :visible].square().mean())


def test_weights_of_the_losses():
    method = method_of(contrast_weight=0.5, pixel_weight=2.0, noise_weight=3.0)
    step = forward_pass(method, views_of(method), progress())
    expected = 0.5 * step.logs["contrast"] + 2.0 * step.logs["pixels"] + 3.0 * step.logs["noise"]
    torch.testing.assert_close(step.loss.detach(), expected)


def test_what_the_settings_change():
    """Only the loss that they are about."""
    views = views_of(method_of())
    plain = logs_of(method_of(), views)
    for changes, touched in (
        ({"noisy_target": True}, {"pixels"}),
        ({"norm_pixels": False}, {"pixels"}),
        ({"pooled": "all"}, {"contrast"}),
        ({"temperature": 0.5}, {"contrast"}),
    ):
        found = logs_of(method_of(**changes), views)
        assert {name for name in plain if not torch.isclose(found[name], plain[name], rtol=1e-9)} == touched
    silent = logs_of(method_of(noise_std=0.0), views)
    assert not torch.isclose(silent["noise"], plain["noise"])
    assert torch.equal(silent["pixels"], logs_of(method_of(noise_std=0.0, noisy_target=True), views)["pixels"])


def test_the_decoder_is_told_the_noise_level():
    method = method_of()
    views = views_of(method)
    drawn = {name: both.transpose(0, 1).flatten(0, 1) for name, both in views.items()}
    ids = order_of(drawn["noise"])
    latent = method.autoencoder.encode(drawn["image"], ids)
    quiet, loud = (method.decode(latent, level.expand(len(ids)), ids) for level in torch.tensor([0.0, 0.5]).double())
    assert not torch.isclose(quiet, loud).all(dim=-1).any()


def test_views_of_an_image_differ_in_all_that_is_drawn():
    for name, both in views_of(method_of()).items():
        assert both.shape[:2] == (6, 2)
        assert all(not torch.equal(first, second) for first, second in both), name
