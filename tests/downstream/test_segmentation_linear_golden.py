"""Linear segmentation against recordings of DINOv3's code: tests/golden/segmentation_linear."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recordings import absent, facts, matches, tensors, under
from sklearn.metrics import jaccard_score
from torch.nn import functional as F

from downstream.data.listing import IGNORED
from downstream.layouts.ade20k import CLASS_OF_VALUE
from downstream.metrics.scores import scores
from downstream.tasks import segmentation_linear as official
from downstream.tasks.segmentation_linear import SegmentationHead
from engine.training.schedules import FallingOneCycle, TrainProgress

FOLDER = "segmentation_linear"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SLIDES = [f"{FOLDER}/seg_slide.safetensors", f"{FOLDER}/seg_slide_tta.safetensors"]


class ReplayedRandom:
    """A random state that returns recorded values in order; a call other than the recorded one fails."""

    def __init__(self, draws: list[list[Any]]) -> None:
        self.draws = iter(draws)

    def __getattr__(self, name: str):
        def draw(*values: float) -> float:
            method, arguments, value = next(self.draws)
            assert (name, list(values)) == (method, arguments)
            return int(value) if name == "randint" else value

        return draw


def schedule_of(config: dict[str, Any]) -> FallingOneCycle:
    return FallingOneCycle(
        warmup=config["warmup_iters"],
        start=config["warmup_ratio"],
        division=float(config["final_div_factor"]),
        delayed=True,
        momenta=(0.85, 0.95) if config.get("use_beta1") else None,
    )


def progress_at(step: int, steps: int) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=steps, epochs=1)


def test_learning_rates():
    recorded, config = (read(f"{FOLDER}/seg_schedule.safetensors") for read in (tensors, facts))
    schedule = schedule_of(config)
    rates = [schedule.at(config["lr"], progress_at(step, config["total_iter"])) for step in range(len(recorded["lr"]))]
    assert np.allclose(rates, recorded["lr"].numpy(), rtol=1e-9, atol=0)


def test_steps_of_the_head():
    recorded, config = (read(f"{FOLDER}/seg_step.safetensors") for read in (tensors, facts))
    head = SegmentationHead(config["channels"], config["classes"], config["dropout"]).double()
    head.load_state_dict(under(recorded, "init."))
    optimiser = torch.optim.AdamW(
        head.parameters(), lr=config["lr"], betas=tuple(config["betas"]), weight_decay=config["weight_decay"]
    )
    schedule = schedule_of(config["scheduler"])
    for step in range(config["steps"]):
        optimiser.param_groups[0]["lr"] = schedule.at(config["lr"], progress_at(step, config["total_iter"]))
        if schedule.momenta:
            beta1 = schedule.beta1_at(progress_at(step, config["total_iter"]))
            optimiser.param_groups[0]["betas"] = beta1, config["betas"][1]
        assert optimiser.param_groups[0]["lr"] == pytest.approx(recorded["lr"][step].item(), rel=1e-9)
        logits = head(recorded["in.features"][step].double(), recorded["drops"][step])
        loss = official.segmentation_loss(logits, recorded["in.labels"][step, :, 0])
        optimiser.zero_grad()
        loss.backward()
        if step == 0:
            assert torch.allclose(logits, recorded["logits0"], rtol=0, atol=1e-9)
            for name, parameter in head.named_parameters():
                assert torch.allclose(parameter.grad, recorded[f"grad0.{name}"], rtol=0, atol=1e-9), name
        assert loss.item() == pytest.approx(recorded["loss"][step].item(), abs=1e-9)
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), float(config["gradient_clip"]))
        assert norm.item() == pytest.approx(recorded["gradnorm"][step].item(), abs=1e-9)
        optimiser.step()
    final = under(recorded, "end.")
    for name in final.keys() - {"batchnorm_layer.num_batches_tracked"}:  # never read
        tensor = head.state_dict()[name]
        assert torch.allclose(tensor, final[name], rtol=1e-7, atol=1e-12), name
    logits = head.eval()(recorded["in.features"][0].double())
    enlarged = F.interpolate(logits, size=tuple(config["crop"]), mode="bilinear")
    assert torch.allclose(logits, recorded["eval.logits"], rtol=0, atol=1e-9)
    assert torch.allclose(enlarged, recorded["eval.predict"], rtol=0, atol=1e-9)


def test_training_and_evaluation_images():
    recorded, config = (read(f"{FOLDER}/seg_augment.safetensors") for read in (tensors, facts))
    table = np.array(CLASS_OF_VALUE, np.uint8)
    for number, draws in enumerate(config["draws"]):
        image = Image.fromarray(recorded[f"in{number}.image"].numpy())
        labels = table[recorded[f"in{number}.label"].numpy()]
        (crop, _), ratios = config["crop"], tuple(config["ratio"])
        random = ReplayedRandom(draws)
        chances = config["flip_prob"], config["cat_max_ratio"]
        cropped_image, cropped_labels = official.training_crop(
            image, labels, crop, config["img_size"], ratios, random, *chances
        )
        assert next(random.draws, None) is None
        pixels, target = official.pad_crop(official.normalise(cropped_image, MEAN, STD), cropped_labels, crop)
        assert torch.equal(target, recorded[f"train{number}.label"][0])
        assert torch.allclose(pixels, recorded[f"train{number}.image"], rtol=0, atol=1e-5)
        resized = official.resize_bilinear(image, official.resized_size(*labels.shape, config["img_size"]))
        assert torch.allclose(normalise_image(resized), recorded[f"eval{number}.image"], rtol=0, atol=1e-5)
        assert np.array_equal(recorded[f"eval{number}.label"][0], recorded[f"in{number}.label"])


def normalise_image(image: Image.Image) -> torch.Tensor:
    return official.normalise(torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), MEAN, STD)


def test_views_of_test_time_augmentation():
    recorded, config = (read(f"{FOLDER}/seg_augment.safetensors") for read in (tensors, facts))
    image = Image.fromarray(recorded["in0.image"].numpy())
    sides = official.evaluation_sizes(image.height, image.width, config["img_size"], config["tta_ratios"])
    views = [normalise_image(official.resize_bilinear(image, size)) for size in sides]
    for number, view in enumerate([*views, *(view.flip(-1) for view in views)]):
        assert torch.allclose(view, recorded[f"tta0.image{number}"], rtol=0, atol=1e-5), number


def assert_areas(areas: np.ndarray, recorded: dict[str, torch.Tensor]) -> None:
    """Areas (N, K, 3) of intersections, predictions and labels are the recorded ones, which include unions."""
    intersection, predicted_area, label_area = np.moveaxis(areas, -1, 0)
    union = predicted_area + label_area - intersection
    assert np.array_equal(np.stack([intersection, union, predicted_area, label_area], axis=1), recorded["areas"])


@pytest.mark.parametrize("path", SLIDES)
def test_sliding_windows_and_scores(path):
    if not matches(r"in\d+\.gt", tensors(path)):
        absent(path)
    recorded, config = tensors(path), facts(path)
    head = SegmentationHead(config["channels"], config["classes"], 0.1).double().eval()
    head.load_state_dict({**head.state_dict(), **under(recorded, "head.")})
    patch, weight = config["patch"], recorded["patch.weight"].double()

    def logits_of(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return head(torch.tanh(F.conv2d(official.pad_to_patches(images, patch), weight, stride=patch)))

    areas = []
    for number in range(len(matches(r"in\d+\.gt", recorded))):
        labels = recorded[f"in{number}.gt"][0, 0].numpy()
        view_names = sorted(matches(rf"in{number}\.image(\d+)", recorded), key=lambda match: int(match[1]))
        views = [recorded[match[0]].double() for match in view_names]
        logits = []
        for view in views:
            size = tuple(view.shape[-2:])
            windows = official.sliding_windows(size, config["crop"], config["stride"])
            window_logits = torch.cat([logits_of(view[..., rows, columns]) for rows, columns in windows])
            logits.append(official.merge_windows(window_logits, windows, size))
        flipped = [config["tta"] and view >= len(views) // 2 for view in range(len(views))]
        probabilities = official.mean_probabilities(logits, flipped, labels.shape)
        first_probabilities = official.mean_probabilities(logits[:1], [False], labels.shape)
        assert torch.allclose(logits[0], recorded[f"out{number}.slide"], rtol=0, atol=1e-9)
        assert torch.allclose(first_probabilities, recorded[f"out{number}.probabilities"][0], rtol=0, atol=1e-9)
        predicted = probabilities.argmax(0).numpy()
        assert np.array_equal(predicted, recorded[f"out{number}.prediction"][0])
        areas.append(official.class_areas(predicted, np.array(CLASS_OF_VALUE, np.uint8)[labels], config["classes"]))
    assert_areas(np.stack(areas), recorded)
    metrics, rounded = scores(np.stack(areas)), config["results"]
    for ours, theirs in (("mIoU", "mIoU"), ("aAcc", "aAcc"), ("mAcc", "acc")):
        assert round(metrics[ours], 2) == pytest.approx(rounded[theirs], abs=0.0051)


def test_scores():
    """Also against scikit-learn, which cannot ignore pixels and gives absent classes a score of its own."""
    recorded, config = (read(f"{FOLDER}/seg_metrics.safetensors") for read in (tensors, facts))
    predicted, labels = recorded["prediction"].numpy(), np.array(CLASS_OF_VALUE, np.uint8)[recorded["label"].numpy()]
    classes = config["classes"]
    areas = np.stack([official.class_areas(*pair, classes) for pair in zip(predicted, labels, strict=True)])
    assert_areas(areas, recorded)
    metrics, expected = scores(areas), dict(zip(config["metrics"], recorded["metrics"].tolist(), strict=True))
    for ours, theirs in (("mIoU", "mIoU"), ("aAcc", "aAcc"), ("mAcc", "acc")):
        assert metrics[ours] == pytest.approx(100 * expected[theirs], abs=1e-5)
    labelled = labels != IGNORED
    iou = jaccard_score(labels[labelled], predicted[labelled], labels=np.arange(classes), average=None, zero_division=0)
    iou[~np.isin(np.arange(classes), [*labels[labelled], *predicted[labelled]])] = np.nan
    assert np.allclose(iou, recorded["iou"], rtol=0, atol=1e-9, equal_nan=True)
    assert metrics["mIoU"] == pytest.approx(100 * np.nanmean(iou), abs=1e-9)
