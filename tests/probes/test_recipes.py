"""Recipes of trained probes against their sources' code and commands."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_exports import export_of_size, workspace

from probes.finetune.classifier import Classifier
from probes.finetune.trainer import Training
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.linear import PROTOCOLS as LINEAR
from probes.tasks.semi import PROTOCOLS as SEMI

IMAGENET, TENTH = 1_281_167, 128_116  # training images; SimCLR's 10 %
SPACE = workspace(Path("unused"), "digits:", batch_size=None)


def test_peak_rates_and_mixed_groups_of_fine_tuning():
    """Values derived from the settings, whose digests are in tests/golden/protocols.json."""
    for name, lr, mixed in [
        ("mae", 2e-3, 32),
        ("mae_H", 4e-3, 16),
        ("lut", 1e-3, 32),
        ("deit", 1e-3, 256),
        ("simmim", 5e-3, 128),
        ("ibot_transfer", 1.125e-5, 96),
    ]:
        task = FINETUNE[f"finetune@{name}"].task
        plan, _ = task.plan(IMAGENET, SPACE)
        assert task.peak == pytest.approx(lr) and plan.group == mixed


@pytest.mark.parametrize(
    ("protocol", "rates", "head", "tokens"),
    [
        ("semi@ibot_10percent", [1e-6, 1e-6, 2.8e-6, 4.6e-6, 6.4e-6, 8.2e-6, 1e-5], 0.02, 0.05),
        ("semi@extrema_10percent", [0.0, 4e-6, 8e-6, 1.2e-5, 1.6e-5, 2e-5, 2e-5], 2e-5, 0.0),
    ],
)
def test_semi_supervised_training(protocol, rates, head, tokens):
    """Rates at the start of the first epochs, the head's deviation and the tokens' weight decay, behind a projector.

    iBOT: timm's scheduler, stepped after each epoch (eval_cls.py:860), from 1e-6 on; a head that is not scaled down
    (:166); weight decay of all parameters that are no vectors. ExtreMA has no code; its rates are BEiT's table.
    """
    task, export = SEMI[protocol].task, export_of_size(16)
    layer = {"projector.mlp.0.weight": torch.zeros(2048, 32), "projector.mlp.0.bias": torch.zeros(2048)}
    classifier = Classifier(replace(export, extra=layer), 1000, task, seed=0)
    plan, micro_batch_size = task.plan(TENTH, SPACE)
    training = Training(classifier, task, SPACE, plan=plan, micro_batch_size=micro_batch_size, folder=SPACE.cache)
    assert plan.steps_per_epoch == 125 and training.steps == 125_000
    ours = [training.schedule.at(task.peak, replace(training.progress, step=125 * epoch)) for epoch in range(7)]
    assert ours == pytest.approx(rates, rel=1e-2, abs=1e-9)
    assert classifier.head.weight.std().item() == pytest.approx(head, rel=0.03)
    decays = {name: group["weight_decay"] for group in training.optimizer.param_groups for name in group["names"]}
    assert decays["cls_token"] == decays["pos_embed"] == tokens
    assert decays["head.weight"] == decays["entry.0.weight"] == 0.05 and decays["norm.weight"] == 0


def test_every_recipe_that_selects_on_val_has_a_paper_protocol():
    recipes = FINETUNE | LINEAR | SEMI
    with_paper = {name for name, protocol in recipes.items() if protocol.reported}
    plain = {name for name in recipes if not name.endswith(("_cached", "@layers", "@smoke"))}
    assert plain - with_paper == {"finetune@moca", "finetune@moca_L", "linear_sgd@moca_readme"}
    assert recipes["linear_sgd@moca_readme"].task.select == "val"
