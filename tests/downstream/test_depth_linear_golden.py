"""Linear depth against recordings of DINOv3's and DINOv2's codes: tests/golden/depth_linear."""

from typing import Any

import numpy as np
import pytest
import torch
from recordings import ROOT, absent, facts, matches, tensors, under
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from torch.nn import functional as F

from downstream.frozen.task import normalise
from downstream.tasks import depth_linear as official
from downstream.tasks.depth_linear import DepthHead
from engine.training.schedules import FallingOneCycle, TrainProgress

FOLDER = "depth_linear"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVALUATIONS = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("depth_eval*.safetensors"))
DINOV2 = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("depth_dinov2*.safetensors"))
NAMES = {"a1": "delta1", "a2": "delta2", "a3": "delta3", "log_10": "log10"}


def schedule_of(config: dict[str, Any]) -> FallingOneCycle:
    return FallingOneCycle(
        warmup=config["warmup_iters"],
        division=config["final_div_factor"],
        momenta=(config["base_momentum"], config["max_momentum"]),
    )


def progress_at(step: int, steps: int) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=steps, epochs=1)


def test_learning_rates_and_momenta():
    recorded, config = (read(f"{FOLDER}/depth_schedule.safetensors") for read in (tensors, facts))
    schedule, steps = schedule_of(config), config["total_iter"]
    rates = [schedule.at(config["lr"], progress_at(step, steps)) for step in range(len(recorded["lr"]))]
    betas = [schedule.beta1_at(progress_at(step, steps)) for step in range(len(recorded["lr"]))]
    assert np.allclose(rates, recorded["lr"].numpy(), rtol=1e-9, atol=0)
    assert np.allclose(betas, recorded["beta1"].numpy(), rtol=0, atol=1e-9)


def test_depths_from_bins():
    recorded, config = (read(f"{FOLDER}/depth_bins.safetensors") for read in (tensors, facts))
    limits = config["min_depth"], config["max_depth"]
    for match in matches(r"depth\.(\w+)\.(\w+)", recorded):
        depths = official.logits_to_depth(recorded["in.logits"].double(), *limits, *match.groups())
        assert torch.allclose(depths, recorded[match[0]], rtol=0, atol=1e-9), match[0]
    depths = official.logits_to_depth(recorded["in.regression"].double(), *limits)
    assert torch.allclose(depths, recorded["depth.regression"], rtol=0, atol=1e-9)


def loss_of(name: str, predicted: torch.Tensor, truth: torch.Tensor, mask: torch.Tensor, warmup: int) -> torch.Tensor:
    """The loss that a recording calls `name`."""
    kind, _, rest = name.partition(".")
    valid = torch.ones_like(mask) if rest == "nomask" else mask
    if kind == "sigloss":
        with_variance = (
            int(rest.removeprefix("call")) > warmup if rest.startswith("call") else True
        )  # nomask: without warm-up
        return official.scale_invariant_loss(predicted, truth, valid, with_variance=with_variance)
    if kind in ("gradient_loss", "gradient_log_loss"):
        return official.gradient_loss(predicted, truth, valid, axes=(-2, -1), log=kind == "gradient_log_loss")
    if kind == "multi":
        gradient = official.gradient_loss(predicted, truth, valid, axes=(-2, -1))
        return official.scale_invariant_loss(predicted, truth, valid, with_variance=False) + 0.5 * gradient
    return (predicted - truth)[valid].abs().mean()


def test_losses_and_their_gradients():
    recorded, config = (read(f"{FOLDER}/depth_loss.safetensors") for read in (tensors, facts))
    truth, mask = recorded["gt"].double(), recorded["mask"].bool()
    for match in matches(r"loss\.(.+)", recorded):
        predicted = recorded["pred"].double().requires_grad_()
        loss = loss_of(match[1], predicted, truth, mask, config["warm_iter"])
        (gradient,) = torch.autograd.grad(loss, predicted)
        assert loss.item() == pytest.approx(recorded[match[0]].item(), abs=1e-8), match[0]
        assert torch.allclose(gradient, recorded[f"grad.{match[1]}"], rtol=0, atol=1e-8), match[0]


def test_steps_of_the_head():
    recorded, config = (read(f"{FOLDER}/depth_step.safetensors") for read in (tensors, facts))
    limits = config["min_depth"], config["max_depth"]
    head = DepthHead(config["channels"], config["n_bins"], limits).double()
    head.load_state_dict(under(recorded, "init."))
    optimiser = torch.optim.AdamW(head.parameters(), weight_decay=config["weight_decay"])
    schedule = schedule_of(config["scheduler"])
    for step in range(config["steps"]):
        progress = progress_at(step, config["total_iter"])
        group = optimiser.param_groups[0]
        group["lr"] = schedule.at(config["lr"], progress)
        group["betas"] = schedule.beta1_at(progress), config["beta2"]
        assert group["lr"] == pytest.approx(recorded["lr"][step].item(), rel=1e-9)
        assert group["betas"][0] == pytest.approx(recorded["beta1"][step].item(), abs=1e-9)
        truth = recorded["in.depth"][step].double()
        predicted = F.interpolate(
            head([recorded["in.features"][step].double()]), size=truth.shape[-2:], mode="bilinear"
        )
        loss = official.scale_invariant_loss(predicted, truth, truth > 0, step >= config["sigloss_warm_iter"])
        optimiser.zero_grad()
        loss.backward()
        if step == 0:
            for name, parameter in head.named_parameters():
                assert torch.allclose(parameter.grad, recorded[f"grad0.{name}"], rtol=0, atol=1e-9), name
        assert loss.item() == pytest.approx(recorded["loss"][step].item(), abs=1e-9)
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), config["gradient_clip"])
        assert norm.item() == pytest.approx(recorded["gradnorm"][step].item(), abs=1e-9)
        optimiser.step()
    final = under(recorded, "end.")
    for name in final.keys() - {"batchnorm_layer.num_batches_tracked"}:  # never read
        assert torch.allclose(head.state_dict()[name], final[name], rtol=1e-7, atol=1e-12), name
    depths = head.eval()([recorded["in.features"][0].double()])
    assert torch.allclose(depths, recorded["eval.depth"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", EVALUATIONS)
def test_evaluation(path):
    recorded, config = tensors(path), facts(path)
    if not matches(r"in\d+\.pred", recorded):
        absent(path)
    limits = tuple(config["eval_range"])
    for number in range(len(recorded["metrics"])):
        low, repeat = recorded[f"in{number}.depth_low"][0, 0].double(), config["repeat"]
        truth = low.repeat_interleave(repeat, 0).repeat_interleave(repeat, 1)
        valid = official.evaluation_mask(truth, limits, eigen=config["eval_mask"] == "NYU_EIGEN")
        assert valid.sum() == recorded["valid_count"][number]
        predictions = recorded[f"in{number}.pred"].double().split(1)
        mirrored = predictions[1] if config["use_tta"] else None
        align_to = (truth, valid) if config["align_least_squares"] else None
        depth = official.final_depth(predictions[0], mirrored, truth.shape, limits, align_to)
        metrics = official.depth_metrics(depth[valid], truth[valid])
        for name, value in zip(config["metrics"], recorded["metrics"][number].tolist(), strict=True):
            assert metrics[NAMES.get(name, name)] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        assert metrics["rmse"] == pytest.approx(root_mean_squared_error(truth[valid], depth[valid]), abs=1e-9)
        assert metrics["mae"] == pytest.approx(mean_absolute_error(truth[valid], depth[valid]), abs=1e-9)


def augmentation_of(draws: list[list[Any]]) -> dict[str, Any]:
    """Recorded random draws of a training image as keyword arguments of `augment`."""
    by_name = {name: value for name, value in draws if name not in ("rand", "uniform")}
    colours = [value for name, value in draws if name == "uniform"]
    return {
        "angle": by_name["rotation"]["angle"] if "rotation" in by_name else None,
        "flip": by_name["flip"],
        "corner": (by_name["crop"]["top"], by_name["crop"]["left"]),
        "colours": tuple(colours) if colours else None,
    }


def test_training_and_evaluation_images():
    recorded, config = (read(f"{FOLDER}/depth_augment.safetensors") for read in (tensors, facts))
    for number, draws in enumerate(config["draws"]):
        pixels = recorded[f"in{number}.image"].permute(2, 0, 1)
        depth = recorded[f"in{number}.depth"].float() / config["normalization"]
        window = (slice(None), slice(None))
        if config["fixed_crop"] == "NYU":
            window = official.scale_crop(official.NYU_CROP, depth.shape)
        image, target = official.augment(
            pixels[:, *window], depth[window], tuple(config["crop"]), **augmentation_of(draws)
        )
        assert torch.equal(target, recorded[f"train{number}.depth"][0]), number
        expected = recorded[f"train{number}.image"].float()
        # The limit is relative to the largest value: by MKL's AVX-512 product the rotation's grid is off by 1 ulp.
        limit = 1e-5 * max(1.0, expected.abs().max().item())
        assert torch.allclose(normalise(255 * image, MEAN, STD), expected, rtol=0, atol=limit), number
    evaluated = normalise(recorded["in0.image"].permute(2, 0, 1), MEAN, STD)
    assert torch.allclose(evaluated, recorded["eval0.image0"], rtol=0, atol=1e-5)
    assert torch.allclose(evaluated.flip(-1), recorded["eval0.image1"], rtol=0, atol=1e-5)


def test_centred_padding():
    recorded, config = (read(f"{FOLDER}/depth_augment.safetensors") for read in (tensors, facts))
    patch, height, width = (
        int(value) for value in matches(r"(\d+), input (\d+)x(\d+).*", [config["padding"]])[0].groups()
    )
    image = torch.arange(1, 1 + 3 * height * width, dtype=torch.float32).reshape(1, 3, height, width)
    if recorded["padding"].max() < image.max():
        image = image - 1
    assert torch.equal(official.pad_centred(image, patch), recorded["padding"])


@pytest.mark.parametrize("path", DINOV2)
def test_heads_on_one_and_four_layers(path):
    recorded, config = tensors(path), facts(path)
    layers = []
    for layer in range(config["layers"]):
        patches, token = recorded[f"in.layer{layer}.patch"].double(), recorded[f"in.layer{layer}.cls"].double()
        layers.append(torch.cat([patches, token[..., None, None].expand_as(patches)], dim=1))
    width, limits = sum(layer.shape[1] for layer in layers), (config["min_depth"], config["max_depth"])
    head = DepthHead(width, config["n_bins"], limits, norm=False, upsample=config["upsample"]).double()
    head.load_state_dict(under(recorded, "head."))
    depth, truth = head(layers), recorded["in.depth"].double()
    assert torch.allclose(depth, recorded["depth"], rtol=0, atol=1e-9)
    enlarged = F.interpolate(depth, size=truth.shape[-2:], mode="bilinear")
    valid = (truth > 0) & (truth <= limits[1])
    losses = {
        f"sigloss.call{call}": config["sigloss_weight"]
        * official.scale_invariant_loss(enlarged, truth, valid, call > 100)
        for call in (1, 101)
    }
    losses["gradient"] = config["gradient_weight"] * official.gradient_loss(enlarged, truth, valid, axes=(0, 1))
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(recorded[f"loss.{name}"].item(), abs=1e-9), name
    (losses["sigloss.call101"] + losses["gradient"]).backward()
    for name, parameter in head.named_parameters():
        assert torch.allclose(parameter.grad, recorded[f"grad.{name}"], rtol=0, atol=1e-9), name
