"""Warnings of trainings that do not learn, and the baselines and statistics that they are based on."""

import math
from dataclasses import replace

import pytest
import torch
from small_trainings import digits, trainer
from written import lines_of

from pretrain.loop.exporting import exports_in
from pretrain.loop.learning import spread_and_rank
from pretrain.parts.losses import assignment_baseline, byol_loss, direction_baseline, patch_baseline
from pretrain.schedules import WarmupCosine

pytestmark = pytest.mark.slow

LR = 3e-3
MIN_UPDATES = 80  # enough to assess so small a network


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """A function that trains for a number of updates of 16 images, assessed at the end."""

    def train(name: str, lr: float, updates: int = MIN_UPDATES):
        monkeypatch.setattr("pretrain.loop.learning.MIN_UPDATES", updates)
        recipe = {"batch": 16, "epochs": updates // 2, "lr": lr}
        training = trainer(name, tmp_path, images=digits(32), recipe=recipe)
        assert training.train() == "finished"
        return training

    return train


def test_a_training_that_learns_gives_no_warning(trained, tmp_path, capsys):
    training = trained("mae", LR)
    assert training.learning.means["loss"] < 0.95 * lines_of(tmp_path)[-1]["trivial_loss"]
    assert training.learning.warnings == {} and "warning" not in capsys.readouterr().err
    assert not any("warnings" in line for line in lines_of(tmp_path))
    assert "warnings" not in training.first_export().facts


@pytest.mark.parametrize(
    ("name", "lr", "updates"),
    [
        ("mae", 1e-9, 10),
        pytest.param("mae", 100 * LR, MIN_UPDATES, marks=pytest.mark.exhaustive),
        pytest.param("dino", 1e-9, 50, marks=pytest.mark.exhaustive),
    ],
)
def test_a_bad_learning_rate_gives_one_recorded_warning(name, lr, updates, trained, tmp_path, capsys):
    """A rate of nearly zero, or a hundred times one at which the network learns."""
    training = trained(name, lr, updates)
    (warning,) = training.learning.warnings.values()
    assert (
        warning.startswith("the loss is ")
        and "nothing is learned; try lr (peak now " in warning
        and "\n" not in warning
    )
    console = capsys.readouterr().err
    assert console.count("warning") == console.count(f"warning: epoch {updates // 2}: {warning}\n") == 1
    assert [line["step"] for line in lines_of(tmp_path) if line.get("warnings") == [warning]] == [training.step]
    assert training.first_export().facts["warnings"] == [warning]
    assert next(exports_in(tmp_path))[1].facts["warnings"] == [warning]


def test_a_collapsed_encoder_gives_a_warning(tmp_path):
    training = trainer("mae", tmp_path)
    training.learning.means = {"loss": 0.1}
    views = next(training.micro_batches(range(1))).views
    progress = replace(training.progress(), step=200)
    for parameter in training.method.autoencoder.vit.trunk.blocks.parameters():
        torch.nn.init.zeros_(parameter)  # the class token passes through them unchanged
    training.learning.assess(training.method, training.recipe, views, progress, "float32")
    (warning,) = training.learning.warnings.values()
    assert (
        warning.startswith("the features of all images are the same, to ")
        and "the encoder has collapsed; try" in warning
    )


@pytest.mark.parametrize(
    ("step", "images", "warmup", "subjects"),
    [(200, 8, 1, ["loss"]), (199, 8, 1, []), (200, 7, 1, []), (200, 8, 67, []), (201, 8, 67, ["loss"])],
)
def test_there_is_no_warning_after_few_updates_in_a_warm_up_or_for_few_images(step, images, warmup, subjects, tmp_path):
    training = trainer("mae", tmp_path, recipe={"epochs": 100, "schedule": WarmupCosine(warmup=warmup)})
    training.learning.means = {"loss": 5.0}
    views = {name: view[:images] for name, view in next(training.micro_batches(range(1))).views.items()}
    progress = replace(training.progress(), step=step)
    measured = training.learning.assess(training.method, training.recipe, views, progress, "float32")
    assert list(training.learning.warnings) == subjects and bool(measured) == (images == 8)


def test_spread_and_rank_of_known_distributions():
    torch.manual_seed(0)
    same = torch.randn(1, 16).expand(32, 16)
    assert spread_and_rank(same)[0] == pytest.approx(0.0, abs=1e-7)
    spread, rank = spread_and_rank(torch.randn(20_000, 16))
    assert spread == pytest.approx(1.0, abs=1e-2) and rank == pytest.approx(16.0, rel=1e-2)
    line = torch.linspace(-1, 1, 9).unsqueeze(1) * torch.randn(16)
    assert spread_and_rank(line + 3.0 * torch.ones(16))[1] == pytest.approx(1.0)
    assert spread_and_rank(torch.zeros(4, 3)) == (0.0, 1.0)


@pytest.mark.parametrize("loss", ["l1", "l2", "smooth_l1"])
def test_the_pixel_baseline_is_the_loss_of_the_best_constant(loss):
    """Within the sampling error of 512 patches of 2 values."""
    torch.manual_seed(0)
    targets = torch.rand(8, 64, 2).square()
    losses = {"l1": torch.nn.L1Loss(), "l2": torch.nn.MSELoss(), "smooth_l1": torch.nn.SmoothL1Loss()}
    best = 0.0
    for values in targets.unbind(-1):  # the best constant of each value contributes independently
        best += min(losses[loss](guess.expand_as(values), values).item() for guess in torch.linspace(0, 1, 201)) / 2
    assert patch_baseline(targets, loss).item() == pytest.approx(best, rel=1e-3)


def test_the_direction_baseline_is_the_loss_of_the_best_constant():
    torch.manual_seed(0)
    centre = torch.nn.functional.normalize(torch.randn(32), dim=0)
    directions = centre + 0.1 * torch.randn(100_000, 32)
    expected = byol_loss(directions.mean(dim=0).expand_as(directions), directions).item()
    batches = torch.stack([direction_baseline(batch) for batch in directions[:8000].split(8)])
    assert batches.mean().item() == pytest.approx(expected, rel=0.02)
    assert direction_baseline(torch.randn(1, 32)).item() == 2.0
    assert direction_baseline(centre.expand(9, 32)).item() == pytest.approx(0.0, abs=1e-6)


def test_the_assignment_baseline_is_the_loss_of_the_best_constant():
    torch.manual_seed(0)
    shares = (3 * torch.randn(64, 5)).softmax(dim=1)

    def divergence(guess):
        return (shares * (shares.log() - guess.log())).sum(dim=1).mean().item()

    baseline = assignment_baseline(shares).item()
    assert baseline == pytest.approx(divergence(shares.mean(dim=0)), rel=1e-5)
    assert all(divergence(torch.rand(5).softmax(dim=0)) > baseline for _ in range(50))
    assert assignment_baseline(torch.eye(4)).item() == pytest.approx(math.log(4))
