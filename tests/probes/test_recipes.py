"""The numbers of the recipes that train, against what their sources' code and commands say."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from toy_exports import export_of_size, workspace

from engine.training.schedules import TrainProgress
from probes.finetune.classifier import Classifier
from probes.finetune.trainer import Training
from probes.linear.batches import EpochPlan
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.linear import PROTOCOLS as LINEAR
from probes.tasks.semi import PROTOCOLS as SEMI

IMAGENET, TENTH = 1_281_167, 128_116  # training images; SimCLR's 10 %
BEITS = dict(
    policy="rand-m9-mstd0.5-inc1",
    crop_scale=0.08,
    flip=0.5,
    erase=0.25,
    mixup=0.8,
    cutmix=1.0,
    smoothing=0.1,
    train_interpolation="bicubic",
)


SPACE = workspace(Path("unused"), "digits:", batch_size=None)


@pytest.mark.parametrize(
    ("name", "lr", "epochs", "decay", "drop_path", "pool", "mixed", "evaluated"),
    [
        ("mae", 2e-3, 100, 0.65, 0.1, "avg", 32, "bicubic"),
        ("mae_L", 4e-3, 50, 0.75, 0.2, "avg", 32, "bicubic"),
        ("mae_H", 4e-3, 50, 0.75, 0.3, "avg", 16, "bicubic"),
        ("extrema_S", 4e-3, 200, 0.75, 0.1, "avg", 128, "bicubic"),
        ("extrema", 4e-3, 100, 0.75, 0.1, "avg", 128, "bicubic"),
        ("extrema_22k", 2e-3, 100, 0.65, 0.2, "avg", 128, "bicubic"),
        ("lut_S", 2e-3, 300, 0.75, 0.1, "avg", 32, "bicubic"),
        ("lut", 1e-3, 100, 0.65, 0.1, "avg", 32, "bicubic"),
        ("lut_L", 4e-3, 50, 0.65, 0.1, "avg", 32, "bicubic"),
        ("extrema_22k_S", 2e-3, 200, 0.65, 0.1, "avg", 128, "bicubic"),
        ("lut_docs", 4e-3, 100, 0.75, 0.1, "avg", 32, "bicubic"),
        ("moca", 4e-3, 100, 0.65, 0.2, "avg", 128, "bicubic"),
        ("moca_L", 4e-3, 100, 0.65, 0.2, "avg", 128, "bicubic"),
        ("deit", 1e-3, 150, 1.0, 0.1, "cls", 256, "bicubic"),
        ("deit_S", 1e-3, 300, 1.0, 0.1, "cls", 256, "bicubic"),
        ("cae", 8e-3, 100, 0.65, 0.1, "avg", 128, "bicubic"),
        ("cae_L", 2e-3, 50, 0.75, 0.2, "avg", 64, "bicubic"),
        ("maskfeat", 8e-3, 100, 0.65, 0.1, "avg", 64, "bicubic"),
        ("maskfeat_L", 8e-3, 50, 0.75, 0.1, "avg", 32, "bicubic"),
        ("ibot_transfer", 1.125e-5, 1000, 1.0, 0.1, "cls", 96, "bicubic"),
        ("ibot_S", 4e-3, 200, 0.75, 0.1, "cls", 128, "bilinear"),
        ("ibot", 4e-3, 100, 0.65, 0.2, "cls", 128, "bilinear"),
        ("ibot_L", 4e-3, 50, 0.75, 0.4, "cls", 64, "bilinear"),
        ("simmim", 5e-3, 100, 0.65, 0.1, "avg", 128, "bicubic"),
        ("beit", 4e-3, 100, 0.65, 0.1, "avg", 128, "bicubic"),
        ("beit_L", 1e-3, 50, 0.75, 0.2, "avg", 64, "bicubic"),
        ("data2vec", 4e-3, 100, 0.65, 0.2, "avg", 128, "bicubic"),
        ("data2vec_L", 5e-3, 50, 0.65, 0.25, "avg", 64, "bicubic"),
    ],
)
def test_fine_tuning(name, lr, epochs, decay, drop_path, pool, mixed, evaluated):
    task = FINETUNE[f"finetune@{name}"].task
    plan, _ = task.plan(IMAGENET, SPACE)
    assert task.peak == pytest.approx(lr) and plan.group == mixed
    assert (task.epochs, task.layer_decay, task.drop_path, task.pool) == (epochs, decay, drop_path, pool)
    assert {each: getattr(task, each) for each in BEITS} == BEITS and task.interpolation == evaluated
    assert task.batch == {"simmim": 2048, "cae": 4096, "cae_L": 4096, "ibot_transfer": 768}.get(
        name, 2048 if name.startswith("maskfeat") else 1024
    )


@pytest.mark.parametrize(
    ("protocol", "rates", "head", "tokens"),
    [
        ("semi@ibot_10percent", [1e-6, 1e-6, 2.8e-6, 4.6e-6, 6.4e-6, 8.2e-6, 1e-5], 0.02, 0.05),
        ("semi@extrema_10percent", [0.0, 4e-6, 8e-6, 1.2e-5, 1.6e-5, 2e-5, 2e-5], 2e-5, 0.0),
    ],
)
def test_semi_supervised_training(protocol, rates, head, tokens):
    """Rates when the first epochs begin, the head's deviation and the tokens' weight decay, behind a projector.

    iBOT: timm's scheduler, told an epoch once it is over (eval_cls.py:860), from 1e-6 on; a head that is not scaled
    down (:166); weight decay of all that are no vectors. ExtreMA has no code; its rates are BEiT's table.
    """
    task, export = SEMI[protocol].task, export_of_size(16)
    layer = {"projector.mlp.0.weight": torch.zeros(2048, 32), "projector.mlp.0.bias": torch.zeros(2048)}
    classifier = Classifier(replace(export, extra=layer), 1000, task, seed=0)
    plan, part = task.plan(TENTH, SPACE)
    training = Training(classifier, task, SPACE, plan=plan, micro_batch_size=part, folder=SPACE.cache)
    assert plan.steps_per_epoch == 125 and training.steps == 125_000
    found = [training.schedule.at(task.peak, replace(training.progress, step=125 * epoch)) for epoch in range(7)]
    assert found == pytest.approx(rates, rel=1e-2, abs=1e-9)
    assert classifier.head.weight.std().item() == pytest.approx(head, rel=0.03)
    decays = {name: group["weight_decay"] for group in training.optimizer.param_groups for name in group["names"]}
    assert decays["cls_token"] == decays["pos_embed"] == tokens
    assert decays["head.weight"] == decays["entry.0.weight"] == 0.05 and decays["norm.weight"] == 0


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("linear_lars@mae", 78),
        ("linear_lars@extrema", 313),
        ("linear@dino", 1252),
        ("linear_sgd@ibot", 1252),
        ("linear_sgd@moca", 1251),
        ("linear@msn", 156),
    ],
)
@pytest.mark.parametrize("ending", ["", "_cached"])
def test_steps_of_an_epoch_of_imagenet(name, steps, ending):
    """As many as the source's loader makes batches; those of MAE, MOCA and MSN leave out what does not fill one."""
    task = LINEAR[name + ending].task
    assert EpochPlan(rows=IMAGENET, asked=task.batch, drop_last=task.drop_last, seed=0).count == steps


def test_fine_tuning_of_mocov3_is_deits():
    """timm's schedule told by epoch, three repeats of an image, a head of the usual deviation, tokens without decay."""
    task = FINETUNE["finetune@deit"].task
    rates, per_epoch = task.rates(), task.plan(IMAGENET, SPACE)[0].steps_per_epoch
    start = TrainProgress(step=0, steps_per_epoch=per_epoch, epochs=150)
    found = [rates.at(1e-3, replace(start, step=epoch * per_epoch)) for epoch in (0, 1, 2, 5, 149)]
    warm = [1e-6, 1e-6, 1e-6 + (1e-3 - 1e-6) / 5, 1e-6 + 4 * (1e-3 - 1e-6) / 5]
    assert found[:4] == pytest.approx(warm, rel=1e-9) and 1e-5 < found[4] < 1.05e-5
    assert (task.repeats, task.head_std, task.head_scale, task.decay_tokens) == (3, 0.02, 1.0, False)


PAPERS = [name for tasks in (FINETUNE, LINEAR, SEMI) for name in tasks if name.endswith("_paper")]


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_protocol_differs_by_what_its_source_reports(name):
    """Selection on the validation images, the published list of a part of the images; what a paper's table has."""
    protocols = FINETUNE | LINEAR | SEMI
    ours, theirs = asdict(protocols[name.removesuffix("_paper")].task), asdict(protocols[name].task)
    changes = {key: value for key, value in theirs.items() if value != ours[key]}
    expected = {"select": "val"} | ({"lists": "published"} if name.startswith("semi") else {})
    own = {"linear_sgd@moca_paper": {"lrs": (0.04,)}, "finetune@extrema_22k_paper": {"drop_path": 0.1}}
    assert changes == expected | own.get(name, {})


def test_every_recipe_that_reports_its_best_epoch_on_val_has_a_protocol_that_does():
    recipes = FINETUNE | LINEAR | SEMI
    reported = {name for name in recipes if f"{name}_paper" in recipes}
    plain = {name for name in recipes if not name.endswith(("_paper", "_cached", "@layers", "@smoke"))}
    assert plain - reported == {"finetune@moca", "finetune@moca_L", "linear_sgd@moca_readme"}
    assert recipes["linear_sgd@moca_readme"].task.select == "val"


@pytest.mark.parametrize(
    ("name", "lr", "batch", "epochs", "readout", "norm", "pace", "judged"),
    [
        ("linear@mocov3", 3.0, 1024, 90, "cls1", True, "epoch", "bilinear"),
        ("linear_lars@mae_L", 0.1, 16384, 50, "cls1", True, "iteration", "bicubic"),
        ("linear_lars@extrema_avg", 0.1, 4096, 90, "avg", False, "iteration", "bilinear"),
        ("linear_lars@simmim", 0.1, 16384, 90, "avg@8", False, "iteration", "bicubic"),
        ("linear_lars@lut", 0.1, 16384, 90, "cls1", True, "iteration", "bicubic"),
        ("linear_lars@cae", 0.1, 16384, 90, "cls1", True, "iteration", "bicubic"),
    ],
)
def test_linear_probes_of_other_networks(name, lr, batch, epochs, readout, norm, pace, judged):
    task = LINEAR[name].task
    assert (task.lrs, task.batch, task.epochs, task.readouts) == ((lr,), batch, epochs, (readout,))
    assert (task.norm, task.pace, task.interpolation, task.weight_decays) == (norm, pace, judged, (0.0,))


@pytest.mark.parametrize("part", ["1percent", "10percent"])
def test_networks_without_a_projector_are_fine_tuned_on_few_images(part):
    """ExtreMA's table 10 has MAE and BEiT: only what the head reads differs."""
    ours, theirs = (asdict(SEMI[f"semi@extrema{kind}_{part}"].task) for kind in ("", "_avg"))
    assert {key: value for key, value in theirs.items() if value != ours[key]} == {"pool": "avg", "projector": False}
