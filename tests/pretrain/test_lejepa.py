"""LeJEPA beyond its recorded steps: crops, two processes, directions, clipping, a collapsed encoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from elsewhere import together
from small_trainings import forward_pass
from torch import Tensor
from torchvision import transforms
from toys import picture, progress

from engine.distributed import World
from pretrain.methods.lejepa import METHOD, RECIPES, LeJepa, epps_pulley, random_directions

SPEC, SETTINGS = RECIPES["smoke"].spec, RECIPES["smoke"].settings
PHOTO = picture(0, 50, 40)
GAUSSIAN = torch.randn(256, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def lejepa(**changes) -> LeJepa:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def crops(count: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(count, 2, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"global": large, "local": torch.randn(count, 3, 3, 8, 8, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("key", "kernel"), [("vit_s", 23), ("vit_b", 23), ("vit_l", 23), ("imagenette", 7), ("imagenette_vit_s16", 23)]
)
def test_published_recipes_crop_and_blur_by_torchvision_as_both_codes(key, kernel):
    """Their RandomResizedCrop is bilinear by default."""
    settings = replace(RECIPES[key].settings, local_crops=2, local_size=12, blur=1.0, projector_hidden=(8,))
    for maker in METHOD(SPEC, settings).views().makers.values():
        crop, *_, colours = maker.makers[0].steps
        crops = []
        for make in (crop, transforms.RandomResizedCrop(crop.size, crop.scale)):
            torch.manual_seed(0)
            crops.append(np.asarray(make(PHOTO)))
        assert np.array_equal(*crops) and colours.draw().kernel == kernel
    assert RECIPES["32px"].settings.interpolation == "bicubic"  # ours, as before


def test_directions_below_the_clip_value_count_as_zero():
    views, method = crops(), lejepa(local_crops=3, global_crops=2)
    statistics = method.epps_pulley(method.project(views))
    limit = statistics.median().item()
    clipped = forward_pass(lejepa(local_crops=3, global_crops=2, clip_value=limit), views, progress()).logs["sigreg"]
    kept = statistics[statistics >= limit]
    assert 0 < len(kept) < statistics.numel()
    torch.testing.assert_close(clipped, kept.sum() / statistics.numel())


def gradient_of_a_share(world: World) -> tuple[Tensor, Tensor]:
    """Statistic and gradient of a process's half of the samples; gradients of parameters are means over processes."""
    samples = GAUSSIAN[:8].clone().requires_grad_()
    share = samples[4 * world.rank : 4 * world.rank + 4] if world.size > 1 else samples
    value = epps_pulley(share @ random_directions(8, 16, seed=0).double(), 3.0, 17).mean()
    return value.detach(), torch.autograd.grad(value / world.size, samples)[0]


def test_two_processes_have_the_statistic_of_all_samples():
    (first, first_gradient), (second, second_gradient) = together(gradient_of_a_share)
    value, gradient = gradient_of_a_share(World())
    torch.testing.assert_close(torch.stack([first, second]), torch.stack([value, value]), rtol=1e-12, atol=0)
    torch.testing.assert_close(first_gradient + second_gradient, gradient, rtol=1e-12, atol=1e-15)


def test_directions_change_with_every_update_and_not_within_it():
    method, directions = lejepa(), []
    for step, part in ((0, 0), (0, 1), (1, 0), (0, 0)):
        method.before_forward(replace(progress(), step=step, micro_batch=part, micro_batches=2))
        directions.append(method.directions)
    assert (
        torch.equal(directions[0], directions[1])
        and torch.equal(directions[0], directions[3])
        and not torch.equal(directions[1], directions[2])
    )
    torch.testing.assert_close(directions[0].norm(dim=0), torch.ones(SETTINGS.directions))


def test_a_collapsed_encoder_has_the_baseline_loss():
    views = {name: view.new_zeros(view.shape) for name, view in crops().items()}
    method = lejepa(local_crops=3)
    method.projector[1][-1].weight.data.zero_(), method.projector[1][-1].bias.data.zero_()
    loss = forward_pass(method, views, progress()).loss
    torch.testing.assert_close(loss.float(), method.baseline_loss(views)["loss"])
