"""The fine-tuning classifier against recorded features, logits, layer-decay tables and schedules of the official codes.

In float64; 1e-6 of the largest recorded value, as for the importers.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from examples import EXAMPLES, golden, part, settings
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.importing import import_file
from engine.extensions import load_extension
from engine.layer_decay import layer_groups
from engine.step_rates import StepRates
from probes.finetune.classifier import Classifier, HeadRecipe

TOLERANCE = 1e-6
AVERAGE = HeadRecipe(pool="avg")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A classifier with the recorded head, the images it saw, and what the official one computed of them."""

    classifier: Classifier
    images: Tensor
    logits: Tensor
    features: Tensor | None = None


def imported(name: str, tree: dict[str, Tensor] | None = None, **options) -> ViTExport:
    """The example's export; of another recorded `tree` of weights, and with other import options, where given."""
    example = EXAMPLES[name]()
    example = replace(example, tree=tree or example.tree, options=replace(example.options, **options))
    return import_file(load_extension("importers", example.importer), example.file(), example.options)


def changed(export: ViTExport, tensors: dict[str, Tensor]) -> ViTExport:
    """The export with some of its tensors replaced."""
    return replace(export, tensors=dict(export.tensors) | {k: v for k, v in tensors.items() if k in export.tensors})


def build(export: ViTExport, recipe: HeadRecipe, given: dict[str, Tensor]) -> Classifier:
    """A classifier with recorded `head.*`, and `fc_norm.*` where there is one."""
    classifier = Classifier(export, len(given["head.weight"]), recipe, drop_path=0.0, seed=0)
    with torch.no_grad():
        for name, parameter in classifier.timm_parameters():
            if name in given and name.startswith(("head.", "fc_norm.")):
                parameter.copy_(given[name])
    return classifier.double().eval()


def mae_gap() -> Case:
    record = golden("mae/mae_finetune.safetensors")
    given = part(record, "gap.vit.")
    export = changed(imported("mae"), given).at_size(record["gap.in.image"].shape[-1])
    assert torch.allclose(export.tensors["pos_embed"], record["gap.pos_embed"], atol=1e-6)
    return Case(
        classifier=build(export, AVERAGE, given),
        images=record["gap.in.image"],
        features=record["gap.out.features"],
        logits=record["gap.out.logits"],
    )


def mae_cls() -> Case:
    record = golden("mae/mae_finetune.safetensors")
    given = {"head.weight": record["lin.head0.1.weight"], "head.bias": record["lin.head0.1.bias"]}
    return Case(
        classifier=build(imported("mae"), HeadRecipe(pool="cls"), given),
        images=record["cls.in.image"],
        features=record["cls.out.features"],
        logits=record["cls.out.logits"],
    )


def lut() -> Case:
    record = golden("lut/lut_finetune.safetensors")
    given = part(record, "vit.")
    export = changed(imported("lut").at_size(record["in.image"].shape[-1]), given)
    return Case(
        classifier=build(export, AVERAGE, given),
        images=record["in.image"],
        features=record["out.features"],
        logits=record["out.logits"],
    )


def simmim(window: str) -> Case:
    record = golden("simmim/simmim_finetune.safetensors")
    weight = record[f"{window}.head.weight"]
    given = {"head.weight": weight, "head.bias": torch.zeros(len(weight))}
    trained = part(golden("simmim/simmim_step.safetensors"), "model_end.", "model.")
    export = imported("simmim", tree=trained).at_size(record[f"{window}.in.image"].shape[-1])
    classifier = build(export, AVERAGE, given)
    table = dict(classifier.timm_parameters())["blocks.0.attn.relative_position_bias_table"]
    assert torch.allclose(table.float(), record[f"{window}.rpb_table_block0"], atol=1e-6)
    return Case(
        classifier=classifier,
        images=record[f"{window}.in.image"],
        features=record[f"{window}.out.features"],
        logits=record[f"{window}.out.logits"],
    )


def moca() -> Case:
    record = golden("moca/eval.safetensors")
    return Case(
        classifier=build(imported("moca"), AVERAGE, part(record, "finetune.")),
        images=golden("moca/inputs.safetensors")["batch0.x1"],
        logits=record["finetune.logits_fc_norm"],
    )


def extrema() -> Case:
    weights, record = golden("extrema/weights.safetensors"), golden("extrema/cases.safetensors")
    heads = settings("extrema/meta.json")["main"]["heads"]
    export = imported("extrema", tree=part(weights, "main/", "state_dict."), heads=heads, branch="online")
    return Case(
        classifier=build(export, AVERAGE, part(record, "finetune/")),
        images=record["main/images1_u8"].float() / 64 - 2,
        features=record["finetune/features"],
        logits=record["finetune/logits"],
    )


CASES = {
    "mae_gap": mae_gap,
    "mae_cls": mae_cls,
    "lut": lut,
    "simmim_same": lambda: simmim("same"),
    "simmim_larger": lambda: simmim("larger"),
    "moca": moca,
    "extrema": extrema,
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_features_and_logits_are_the_official_ones(name):
    case = CASES[name]()
    features = case.classifier.features(case.images.double())
    for ours, official in ((features, case.features), (case.classifier(case.images.double()), case.logits)):
        if official is not None:
            assert ours.shape == official.shape
            assert (ours - official).abs().max() <= TOLERANCE * official.abs().max()


@torch.no_grad()
def test_extrema_projector_layer():
    """The recorded projection, from the layer that the semi-supervised head reads."""
    record, export = golden("extrema/cases.safetensors"), imported("extrema")
    classifier = Classifier(export, 5, HeadRecipe(pool="cls", projector=True), 0.0, seed=0).double().eval()
    values = classifier.features((record["grid/images2_u8"].float() / 64 - 2).double())
    extra = {name: tensor.double() for name, tensor in export.extra.items()}
    values = F.linear(values, extra["projector.3.weight"], extra["projector.3.bias"])
    values = F.gelu(F.layer_norm(values, values.shape[1:], extra["projector.4.weight"], extra["projector.4.bias"]))
    values = F.linear(values, extra["projector.6.weight"], extra["projector.6.bias"])
    official = record["grid_byol_m2/teacher/projection"]
    assert (values - official).abs().max() <= TOLERANCE * official.abs().max()


@torch.no_grad()
def test_ibot_projector_layer():
    record, export = golden("ibot/golden.safetensors"), imported("ibot")
    classifier = Classifier(export, 5, HeadRecipe(pool="cls", projector=True), 0.0, seed=0).double().eval()
    values = classifier.features(torch.cat([record["step0/crop0"], record["step0/crop1"]]).double())
    extra = {name: tensor.double() for name, tensor in export.extra.items()}
    values = F.gelu(F.linear(values, extra["projector.mlp.2.weight"], extra["projector.mlp.2.bias"]))
    values = F.normalize(F.linear(values, extra["projector.mlp.4.weight"], extra["projector.mlp.4.bias"]), dim=1)
    rows = F.normalize(record["teacher0/head.last_layer.weight_v"].double(), dim=1)
    logits = values @ (record["teacher0/head.last_layer.weight_g"].double() * rows).T
    official = record["step0/teacher_cls"]
    assert (logits - official).abs().max() <= TOLERANCE * official.abs().max()


@pytest.mark.parametrize(
    ("name", "path", "decay"),
    [
        ("mae_gap", "mae/mae_finetune.safetensors", 0.75),
        ("lut", "lut/lut_finetune.safetensors", 0.65),
        ("simmim_same", "simmim/simmim_finetune.safetensors", 0.65),
    ],
)
def test_rate_scales_and_weight_decays_are_the_official_ones(name, path, decay):
    config, classifier = settings(path), CASES[name]().classifier
    groups = layer_groups(
        classifier.timm_parameters(), classifier.vit.spec.depth, config.get("layer_decay", decay), config["wd"]
    )
    found = {name: [group["lr_scale"], group["weight_decay"]] for group in groups for name in group["names"]}
    assert found == {name: pytest.approx(pair, rel=1e-12) for name, pair in config["lr_scale_and_wd"].items()}


def test_mae_rates():
    record, config = golden("mae/mae_step.safetensors"), settings("mae/mae_step.safetensors")
    steps = 1000  # the recorded epochs are fractions; any grid that holds them will do
    rates = StepRates(
        family="mae",
        lr=config["lr"],
        epochs=config["epochs"],
        warmup_epochs=config["warmup"],
        steps_per_epoch=steps,
        floor=config["min_lr"],
    )
    held = [(e, r) for e, r in zip(record["sched.epoch"].tolist(), record["sched.lr"].tolist(), strict=True)]
    close = [(round(e * steps), r) for e, r in held if abs(e * steps - round(e * steps)) < 1e-6]
    assert len(close) > 5
    assert [rates.at(step) for step, _ in close] == pytest.approx([rate for _, rate in close], rel=1e-9)


def test_beit_rates():
    """tests/golden/extrema/README.md: peak 4e-3, floor 1e-6, 10 epochs of 7 steps, 2 warm-up epochs."""
    record = golden("extrema/cases.safetensors")["schedule/finetune_lr"].double().tolist()
    rates = StepRates(family="beit", lr=4e-3, epochs=10, warmup_epochs=2, steps_per_epoch=7, floor=1e-6)
    assert rates.steps == len(record)
    assert [rates.at(step) for step in range(rates.steps)] == pytest.approx(record, rel=1e-6)


def test_simmim_rates():
    """Row t: every group's rate after the scheduler was told t, which is used by the next update."""
    config = settings("simmim/simmim_finetune.safetensors")
    record = golden("simmim/simmim_finetune.safetensors")["sched.cosine_groups"]
    scales = [config["lr_scale_and_wd"][name][0] for name in ("cls_token", "blocks.0.gamma_1", "blocks.1.gamma_1")]
    rates = StepRates(
        family="simmim",
        lr=config["lr"],
        epochs=config["epochs"],
        warmup_epochs=config["warmup"],
        steps_per_epoch=len(record) // config["epochs"],
        floor=config["min_lr"],
        start=config["warm_lr"],
    )
    for told in range(len(record)):
        ours = [rates.at(told + 1, scale) for scale in (*scales, 1.0)]
        assert ours == pytest.approx(record[told, ::2].tolist(), rel=1e-9)
    assert rates.at(0) == config["warm_lr"]


def test_deit_rates():
    """timm's scheduler told every epoch once it is over, as DeiT and iBOT's semi-supervised training do."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=30, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    rates = StepRates(family="deit", lr=3e-3, epochs=30, warmup_epochs=5, steps_per_epoch=4, floor=1e-5, start=1e-6)
    for epoch in range(rates.epochs):
        used = optimizer.param_groups[0]["lr"]
        assert [rates.at(4 * epoch + step) for step in range(4)] == pytest.approx([used] * 4, rel=1e-12)
        scheduler.step(epoch)
