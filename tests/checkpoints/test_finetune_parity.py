"""The fine-tuning classifier against recorded features, logits, layer-decay tables and schedules of the official codes.

In float64; 1e-6 of the largest recorded value, as for the importers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import cos, pi

import pytest
import torch
from examples import EXAMPLES, extrema_case, extrema_images, ibot_head, ibot_prototypes
from recorded_example import encode
from recordings import facts, steps_per_epoch, tensors, under
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.importing import import_file
from engine.extensions import load_extension
from engine.optimisers import layer_groups
from engine.training.schedules import TableCosine, TimmCosine, TrainProgress, WarmupCosine
from probes.finetune.classifier import Classifier
from probes.finetune.settings import FinetuneSettings
from probes.tasks.finetune import PROTOCOLS as FINETUNE

TOLERANCE = 1e-6
PAIR = ("weight", "bias")
# SlowFast's names of the classifier and the norm in front of it -> ours.
OURS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in (("norm", "fc_norm"), ("head.projection", "head"))
    for kind in PAIR
}
AVERAGE = FinetuneSettings(pool="avg", drop_path=0.0)
PROJECTED = FinetuneSettings(pool="cls", projector=True, drop_path=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A classifier with the recorded head, its images, and the official features and logits."""

    classifier: Classifier
    images: Tensor
    logits: Tensor
    features: Tensor | None = None


def recorded(classifier: Classifier, record: Mapping[str, Tensor], images: str, logits: str, features: str) -> Case:
    """The case with the tensors of a recording under these names."""
    return Case(classifier=classifier, images=record[images], logits=record[logits], features=record[features])


def imported(name: str, tree: dict[str, Tensor] | None = None, **options) -> ViTExport:
    """The example's export, optionally with another recorded `tree` of weights and other import options."""
    example = EXAMPLES[name]()
    example = replace(example, tree=tree or example.tree, options=replace(example.options, **options))
    return import_file(load_extension("importers", example.importer), example.file(), example.options)


def with_tensors(export: ViTExport, tensors: dict[str, Tensor]) -> ViTExport:
    """The export with some of its tensors replaced."""
    return replace(export, tensors=dict(export.tensors) | {k: v for k, v in tensors.items() if k in export.tensors})


def build(export: ViTExport, settings: FinetuneSettings, weights: dict[str, Tensor]) -> Classifier:
    """A classifier with recorded `head.*`, and `fc_norm.*` where there is one."""
    classifier = Classifier(export, len(weights["head.weight"]), settings, seed=0)
    with torch.no_grad():
        for name, parameter in classifier.timm_parameters():
            if name in weights and name.startswith(("head.", "fc_norm.")):
                parameter.copy_(weights[name])
    return classifier.double().eval()


def mae_gap() -> Case:
    record = tensors("mae/mae_finetune.safetensors")
    weights = under(record, "gap.vit.")
    export = with_tensors(imported("mae"), weights).at_size(record["gap.in.image"].shape[-1])
    assert torch.allclose(export.build().trunk.pos_embed, record["gap.pos_embed"], atol=1e-6)
    classifier = build(export, AVERAGE, weights)
    return recorded(classifier, record, "gap.in.image", "gap.out.logits", "gap.out.features")


def mae_cls() -> Case:
    record = tensors("mae/mae_finetune.safetensors")
    weights = {"head.weight": record["lin.head0.1.weight"], "head.bias": record["lin.head0.1.bias"]}
    classifier = build(imported("mae"), FinetuneSettings(pool="cls", drop_path=0.0), weights)
    return recorded(classifier, record, "cls.in.image", "cls.out.logits", "cls.out.features")


def lut() -> Case:
    record = tensors("lut/lut_finetune.safetensors")
    weights = under(record, "vit.")
    export = with_tensors(imported("lut"), weights)
    spec = replace(export.spec, image_size=record["in.image"].shape[-1])  # for which the table was recorded
    export = replace(export, spec=spec)
    return recorded(build(export, AVERAGE, weights), record, "in.image", "out.logits", "out.features")


def simmim(window: str) -> Case:
    record = tensors("simmim/simmim_finetune.safetensors")
    weight = record[f"{window}.head.weight"]
    weights = {"head.weight": weight, "head.bias": torch.zeros(len(weight))}
    trained = under(tensors("simmim/simmim_step.safetensors"), "model_end.", "model.")
    export = imported("simmim", tree=trained).at_size(record[f"{window}.in.image"].shape[-1])
    classifier = build(export, AVERAGE, weights)
    table = dict(classifier.timm_parameters())["blocks.0.attn.relative_position_bias_table"]
    assert torch.allclose(table.float(), record[f"{window}.rpb_table_block0"], atol=1e-6)
    return recorded(classifier, under(record, f"{window}."), "in.image", "out.logits", "out.features")


def moca() -> Case:
    record = tensors("moca/eval.safetensors")
    return Case(
        classifier=build(imported("moca"), AVERAGE, under(record, "finetune.")),
        images=tensors("moca/inputs.safetensors")["batch0.x1"],
        logits=record["finetune.logits_fc_norm"],
    )


def extrema() -> Case:
    weights, record = tensors("extrema/weights.safetensors"), tensors("extrema/cases.safetensors")
    facts_of = facts("extrema/meta.json")
    main = next(name for name, entry in facts_of.items() if isinstance(entry, dict) and "patch" in entry)
    tree = under(weights, f"{main}/", "state_dict.")
    export = imported("extrema", tree=tree, heads=facts_of[main]["heads"], branch="online")
    case = recorded(
        build(export, AVERAGE, under(record, "finetune/")),
        record,
        f"{main}/images1_u8",
        "finetune/logits",
        "finetune/features",
    )
    return replace(case, images=case.images.float() / 64 - 2)


def cae() -> Case:
    """Tables of zeros that are added to every block, and the encoder's norm behind the mean of the patches."""
    record = tensors("cae/cae_encoder.safetensors")
    settings = replace(AVERAGE, tables="fresh", train_positions=False, pooled_norm="pretrained")
    classifier = build(imported("cae"), settings, under(record, "finetune.head.", "head."))
    return recorded(classifier, record, "in.image", "finetune.out.logits", "finetune.out.features")


def maskfeat() -> Case:
    record = tensors("maskfeat/maskfeat_encoder.safetensors")
    weights = under(record, "finetune.norm.", "fc_norm.") | under(record, "finetune.head.projection.", "head.")
    classifier = build(imported("maskfeat"), AVERAGE, weights)
    return recorded(classifier, record, "in.image", "finetune.out.train_output", "finetune.out.features")


CASES = {
    "cae": cae,
    "maskfeat": maskfeat,
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
def test_features_and_logits_equal_the_official_ones(name):
    case = CASES[name]()
    features = case.classifier.features(case.images.double())
    if case.features is not None:
        assert_official(features, case.features)
    assert_official(case.classifier(case.images.double()), case.logits)


def assert_official(ours: Tensor, official: Tensor) -> None:
    assert ours.shape == official.shape
    assert (ours - official).abs().max() <= TOLERANCE * official.abs().max()


@torch.no_grad()
def test_extremas_projection_equals_the_recorded_one():
    """Computed from the layer that the semi-supervised head reads."""
    export = imported("extrema")
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(extrema_images().double())
    extra = {name: tensor.double() for name, tensor in export.extra.items()}
    values = F.linear(values, extra["projector.3.weight"], extra["projector.3.bias"])
    values = F.gelu(F.layer_norm(values, values.shape[1:], extra["projector.4.weight"], extra["projector.4.bias"]))
    values = F.linear(values, extra["projector.6.weight"], extra["projector.6.bias"])
    assert_official(values, tensors("extrema/cases.safetensors")[f"{extrema_case()[1]}/teacher/projection"])


def with_batch_statistics(export: ViTExport, values: Tensor) -> ViTExport:
    """The export with the statistics of `values` (B, D) in its projector's first batch norm, as in training mode."""
    statistics = {"running_mean": values.mean(0), "running_var": values.var(0, correction=0)}
    extra = {f"projector.1.{name}": statistic.float() for name, statistic in statistics.items()}
    return replace(export, extra={**export.extra, **extra})


@torch.no_grad()
def test_msns_projection_equals_the_recorded_one():
    """Recorded in training mode, so with the statistics of that batch."""
    record, export = tensors("msn/golden.safetensors"), imported("msn")
    images = record["step0/view0"].double()
    hidden = F.linear(encode(export, images)[:, 0], *(record[f"target0/fc.fc1.{kind}"].double() for kind in PAIR))
    has_norms = "target0/fc.bn1.weight" in record
    export = with_batch_statistics(export, hidden) if has_norms else export
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(images)
    for number in (2, 3):
        values = F.linear(values, *(record[f"target0/fc.fc{number}.{kind}"].double() for kind in PAIR))
        if number == 2:
            norm = (record[f"target0/fc.bn2.{kind}"].double() for kind in PAIR if has_norms)
            values = F.gelu(F.batch_norm(values, None, None, *norm, training=True) if has_norms else values)
    assert_official(values, record["step0/target_h"])


@torch.no_grad()
def test_mocov3s_predictions_equal_the_recorded_ones():
    """Computed from the layer that the head reads (no bias, batch norm, ReLU), in training mode."""
    record, export = tensors("mocov3/golden.safetensors"), imported("mocov3")
    images, extra = record["step0/x1"].double(), {name: tensor.double() for name, tensor in export.extra.items()}
    hidden = F.linear(encode(export, images)[:, 0], extra["projector.0.weight"])
    classifier = Classifier(with_batch_statistics(export, hidden), 5, PROJECTED, seed=0).double().eval()
    values = F.linear(classifier.features(images), extra["projector.3.weight"])
    values = F.relu(F.batch_norm(values, None, None, extra["projector.4.weight"], extra["projector.4.bias"], True))
    values = F.batch_norm(F.linear(values, extra["projector.6.weight"]), None, None, training=True)
    head = {name: tensor.double() for name, tensor in record.items() if name.startswith("model0/predictor.")}
    values = F.linear(values, head["model0/predictor.0.weight"])
    weight, bias = (head[f"model0/predictor.1.{kind}"] for kind in ("weight", "bias"))
    values = F.relu(F.batch_norm(values, None, None, weight, bias, True))
    values = F.batch_norm(F.linear(values, head["model0/predictor.3.weight"]), None, None, training=True)
    assert_official(values, record["step0/q1"])


@torch.no_grad()
def test_ibots_logits_equal_the_recorded_ones():
    record, export = tensors("ibot/golden.safetensors"), imported("ibot")
    if any(name.endswith("running_mean") for name in export.extra):
        pytest.skip("the recorded head's batch norms normalised all tokens, of which this test has the class tokens")
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(torch.cat([record["step0/crop0"], record["step0/crop1"]]).double())
    logits = F.normalize(ibot_head(export.extra, values, start=0), dim=1) @ ibot_prototypes("last_layer").T
    assert_official(logits, record["step0/teacher_cls"])


@pytest.mark.parametrize(
    ("name", "path", "decays_tokens"),
    [
        ("cae", "cae/cae_encoder.safetensors", False),
        ("mae_gap", "mae/mae_finetune.safetensors", False),
        ("maskfeat", "maskfeat/maskfeat_encoder.safetensors", True),
        ("lut", "lut/lut_finetune.safetensors", False),
        ("simmim_same", "simmim/simmim_finetune.safetensors", False),
    ],
)
def test_layer_decay_and_weight_decay_equal_the_official_tables(name, path, decays_tokens):
    config, classifier = facts(path), CASES[name]().classifier
    official = config.get("lr_scale_and_wd") or config["finetune_lr_scale_and_wd"]
    official = {OURS.get(name, name): pair for name, pair in official.items()}
    decay = max(scale for scale, _ in official.values() if scale < 1)  # the last block's scale
    groups = layer_groups(classifier.timm_parameters(), classifier.vit.spec.depth, decay, config["wd"], decays_tokens)
    ours = {name: [group["lr_scale"], group["weight_decay"]] for group in groups for name in group["names"]}
    assert ours == {name: pytest.approx(pair, rel=1e-12) for name, pair in official.items()}
    if name in ("cae", "maskfeat"):
        assert FINETUNE[f"finetune@{name}"].task.decay_tokens == decays_tokens


def progress(step: int, steps_per_epoch: int, epochs: int) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=steps_per_epoch, epochs=epochs)


def test_learning_rates_equal_maes():
    record, config = tensors("mae/mae_step.safetensors"), facts("mae/mae_step.safetensors")
    epochs, rates = record["sched.epoch"].tolist(), record["sched.lr"].tolist()
    steps = steps_per_epoch(epochs)
    schedule = WarmupCosine(warmup=config["warmup"], floor=config["min_lr"])
    ours = [schedule.at(config["lr"], progress(round(epoch * steps), steps, config["epochs"])) for epoch in epochs]
    assert ours == pytest.approx(rates, rel=1e-9)


def test_learning_rates_equal_beits():
    """Peak, floor and warm-up are read off the table: the warm-up ends with the peak, with which the cosine begins."""
    record = tensors("extrema/cases.safetensors")["schedule/finetune_lr"].double().tolist()
    peak, warmup = max(record), record.index(max(record)) + 1
    remaining = (1 + cos(pi * (1 - 1 / (len(record) - warmup)))) / 2  # share of peak - floor at the last step
    floor = (record[-1] - remaining * peak) / (1 - remaining)
    schedule = TableCosine(warmup=warmup, floor=floor)
    assert record[warmup] == peak and floor > 0
    ours = [schedule.at(peak, progress(step, 1, len(record))) for step in range(len(record))]
    assert ours == pytest.approx(record, rel=1e-6)


def test_learning_rates_equal_simmims():
    """Row t: every group's rate after the scheduler's step t, which the next update uses."""
    config = facts("simmim/simmim_finetune.safetensors")
    record = tensors("simmim/simmim_finetune.safetensors")["sched.cosine_groups"]
    names = ["cls_token", *(f"blocks.{block}.gamma_1" for block in range(config["depth"]))]
    scales = [config["lr_scale_and_wd"][name][0] for name in names]
    lr, start, length = config["lr"], config["warm_lr"], (len(record) // config["epochs"], config["epochs"])
    schedule = TimmCosine(warmup=config["warmup"], floor=config["min_lr"], start=start, told="update")
    for step in range(len(record)):
        ours = [schedule.at(lr, progress(step + 1, *length), scale) for scale in (*scales, 1.0)]
        assert ours == pytest.approx(record[step, ::2].tolist(), rel=1e-9)
    assert schedule.at(lr, progress(0, *length)) == start


def test_learning_rates_equal_deits():
    """timm's scheduler is stepped after every epoch, as in DeiT and iBOT's semi-supervised training."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=30, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    schedule = TimmCosine(warmup=5, floor=1e-5, start=1e-6, told="epoch")
    for epoch in range(30):
        ours = [schedule.at(3e-3, progress(4 * epoch + step, 4, 30)) for step in range(4)]
        assert ours == pytest.approx([optimizer.param_groups[0]["lr"]] * 4, rel=1e-12)
        scheduler.step(epoch)
