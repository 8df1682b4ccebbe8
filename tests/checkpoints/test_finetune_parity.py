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
    """A classifier with the recorded head, the images it saw, and what the official one computed of them."""

    classifier: Classifier
    images: Tensor
    logits: Tensor
    features: Tensor | None = None


def recorded(classifier: Classifier, record: Mapping[str, Tensor], images: str, logits: str, features: str) -> Case:
    """The case with what a recording has under these names."""
    return Case(classifier=classifier, images=record[images], logits=record[logits], features=record[features])


def imported(name: str, tree: dict[str, Tensor] | None = None, **options) -> ViTExport:
    """The example's export; of another recorded `tree` of weights, and with other import options, where given."""
    example = EXAMPLES[name]()
    example = replace(example, tree=tree or example.tree, options=replace(example.options, **options))
    return import_file(load_extension("importers", example.importer), example.file(), example.options)


def changed(export: ViTExport, tensors: dict[str, Tensor]) -> ViTExport:
    """The export with some of its tensors replaced."""
    return replace(export, tensors=dict(export.tensors) | {k: v for k, v in tensors.items() if k in export.tensors})


def build(export: ViTExport, settings: FinetuneSettings, given: dict[str, Tensor]) -> Classifier:
    """A classifier with recorded `head.*`, and `fc_norm.*` where there is one."""
    classifier = Classifier(export, len(given["head.weight"]), settings, seed=0)
    with torch.no_grad():
        for name, parameter in classifier.timm_parameters():
            if name in given and name.startswith(("head.", "fc_norm.")):
                parameter.copy_(given[name])
    return classifier.double().eval()


def mae_gap() -> Case:
    record = tensors("mae/mae_finetune.safetensors")
    given = under(record, "gap.vit.")
    export = changed(imported("mae"), given).at_size(record["gap.in.image"].shape[-1])
    assert torch.allclose(export.tensors["pos_embed"], record["gap.pos_embed"], atol=1e-6)
    classifier = build(export, AVERAGE, given)
    return recorded(classifier, record, "gap.in.image", "gap.out.logits", "gap.out.features")


def mae_cls() -> Case:
    record = tensors("mae/mae_finetune.safetensors")
    given = {"head.weight": record["lin.head0.1.weight"], "head.bias": record["lin.head0.1.bias"]}
    classifier = build(imported("mae"), FinetuneSettings(pool="cls", drop_path=0.0), given)
    return recorded(classifier, record, "cls.in.image", "cls.out.logits", "cls.out.features")


def lut() -> Case:
    record = tensors("lut/lut_finetune.safetensors")
    given = under(record, "vit.")
    export = changed(imported("lut").at_size(record["in.image"].shape[-1]), given)
    return recorded(build(export, AVERAGE, given), record, "in.image", "out.logits", "out.features")


def simmim(window: str) -> Case:
    record = tensors("simmim/simmim_finetune.safetensors")
    weight = record[f"{window}.head.weight"]
    given = {"head.weight": weight, "head.bias": torch.zeros(len(weight))}
    trained = under(tensors("simmim/simmim_step.safetensors"), "model_end.", "model.")
    export = imported("simmim", tree=trained).at_size(record[f"{window}.in.image"].shape[-1])
    classifier = build(export, AVERAGE, given)
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
    given = under(record, "finetune.norm.", "fc_norm.") | under(record, "finetune.head.projection.", "head.")
    classifier = build(imported("maskfeat"), AVERAGE, given)
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
    export = imported("extrema")
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(extrema_images().double())
    extra = {name: tensor.double() for name, tensor in export.extra.items()}
    values = F.linear(values, extra["projector.3.weight"], extra["projector.3.bias"])
    values = F.gelu(F.layer_norm(values, values.shape[1:], extra["projector.4.weight"], extra["projector.4.bias"]))
    values = F.linear(values, extra["projector.6.weight"], extra["projector.6.bias"])
    official = tensors("extrema/cases.safetensors")[f"{extrema_case()[1]}/teacher/projection"]
    assert (values - official).abs().max() <= TOLERANCE * official.abs().max()


def with_batch_statistics(export: ViTExport, given: Tensor) -> ViTExport:
    """The export with the statistics of `given` (B, D) in its projector's first batch norm, as in training mode."""
    statistics = {"running_mean": given.mean(0), "running_var": given.var(0, correction=0)}
    extra = {f"projector.1.{name}": value.float() for name, value in statistics.items()}
    return replace(export, extra={**export.extra, **extra})


@torch.no_grad()
def test_msn_projector_layer():
    """Recorded in training mode: with the statistics of that batch in place of the running ones."""
    record, export = tensors("msn/golden.safetensors"), imported("msn")
    images = record["step0/view0"].double()
    given = F.linear(encode(export, images)[:, 0], *(record[f"target0/fc.fc1.{kind}"].double() for kind in PAIR))
    has_norms = "target0/fc.bn1.weight" in record
    export = with_batch_statistics(export, given) if has_norms else export
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(images)
    for number in (2, 3):
        values = F.linear(values, *(record[f"target0/fc.fc{number}.{kind}"].double() for kind in PAIR))
        if number == 2:
            norm = (record[f"target0/fc.bn2.{kind}"].double() for kind in PAIR if has_norms)
            values = F.gelu(F.batch_norm(values, None, None, *norm, training=True) if has_norms else values)
    official = record["step0/target_h"]
    assert (values - official).abs().max() <= TOLERANCE * official.abs().max()


@torch.no_grad()
def test_mocov3_projector_layer():
    """The recorded predictions, from the layer that the head reads: no bias, batch norm, ReLU; in training mode."""
    record, export = tensors("mocov3/golden.safetensors"), imported("mocov3")
    images, extra = record["step0/x1"].double(), {name: tensor.double() for name, tensor in export.extra.items()}
    given = F.linear(encode(export, images)[:, 0], extra["projector.0.weight"])
    classifier = Classifier(with_batch_statistics(export, given), 5, PROJECTED, seed=0).double().eval()
    values = F.linear(classifier.features(images), extra["projector.3.weight"])
    values = F.relu(F.batch_norm(values, None, None, extra["projector.4.weight"], extra["projector.4.bias"], True))
    values = F.batch_norm(F.linear(values, extra["projector.6.weight"]), None, None, training=True)
    head = {name: tensor.double() for name, tensor in record.items() if name.startswith("model0/predictor.")}
    values = F.linear(values, head["model0/predictor.0.weight"])
    weight, bias = (head[f"model0/predictor.1.{kind}"] for kind in ("weight", "bias"))
    values = F.relu(F.batch_norm(values, None, None, weight, bias, True))
    values = F.batch_norm(F.linear(values, head["model0/predictor.3.weight"]), None, None, training=True)
    official = record["step0/q1"]
    assert (values - official).abs().max() <= TOLERANCE * official.abs().max()


@torch.no_grad()
def test_ibot_projector_layer():
    record, export = tensors("ibot/golden.safetensors"), imported("ibot")
    if any(name.endswith("running_mean") for name in export.extra):
        pytest.skip("the recorded head's batch norms saw all tokens, of which it reads the class tokens")
    classifier = Classifier(export, 5, PROJECTED, seed=0).double().eval()
    values = classifier.features(torch.cat([record["step0/crop0"], record["step0/crop1"]]).double())
    logits = F.normalize(ibot_head(export.extra, values, behind=0), dim=1) @ ibot_prototypes("last_layer").T
    official = record["step0/teacher_cls"]
    assert (logits - official).abs().max() <= TOLERANCE * official.abs().max()


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
def test_rate_scales_and_weight_decays_are_the_official_ones(name, path, decays_tokens):
    config, classifier = facts(path), CASES[name]().classifier
    official = config.get("lr_scale_and_wd") or config["finetune_lr_scale_and_wd"]
    official = {OURS.get(name, name): pair for name, pair in official.items()}
    decay = max(scale for scale, _ in official.values() if scale < 1)  # the last block's scale
    groups = layer_groups(classifier.timm_parameters(), classifier.vit.spec.depth, decay, config["wd"], decays_tokens)
    found = {name: [group["lr_scale"], group["weight_decay"]] for group in groups for name in group["names"]}
    assert found == {name: pytest.approx(pair, rel=1e-12) for name, pair in official.items()}
    if name in ("cae", "maskfeat"):
        assert FINETUNE[f"finetune@{name}"].task.decay_tokens == decays_tokens


def progress(step: int, steps_per_epoch: int, epochs: int) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=steps_per_epoch, epochs=epochs)


def test_mae_rates():
    record, config = tensors("mae/mae_step.safetensors"), facts("mae/mae_step.safetensors")
    epochs, rates = record["sched.epoch"].tolist(), record["sched.lr"].tolist()
    steps = steps_per_epoch(epochs)
    schedule = WarmupCosine(warmup=config["warmup"], floor=config["min_lr"])
    now = [progress(round(epoch * steps), steps, config["epochs"]) for epoch in epochs]
    assert [schedule.at(config["lr"], each) for each in now] == pytest.approx(rates, rel=1e-9)


def test_beit_rates():
    """Peak, floor and warm-up are read off the table: the warm-up ends with the peak, with which the cosine begins."""
    record = tensors("extrema/cases.safetensors")["schedule/finetune_lr"].double().tolist()
    peak, warmup = max(record), record.index(max(record)) + 1
    left = (1 + cos(pi * (1 - 1 / (len(record) - warmup)))) / 2  # of the way to the floor, at the last step
    floor = (record[-1] - left * peak) / (1 - left)
    schedule = TableCosine(warmup=warmup, floor=floor)
    assert record[warmup] == peak and floor > 0
    ours = [schedule.at(peak, progress(step, 1, len(record))) for step in range(len(record))]
    assert ours == pytest.approx(record, rel=1e-6)


def test_simmim_rates():
    """Row t: every group's rate after the scheduler was told t, which is used by the next update."""
    config = facts("simmim/simmim_finetune.safetensors")
    record = tensors("simmim/simmim_finetune.safetensors")["sched.cosine_groups"]
    names = ["cls_token", *(f"blocks.{block}.gamma_1" for block in range(config["depth"]))]
    scales = [config["lr_scale_and_wd"][name][0] for name in names]
    lr, start, length = config["lr"], config["warm_lr"], (len(record) // config["epochs"], config["epochs"])
    schedule = TimmCosine(warmup=config["warmup"], floor=config["min_lr"], start=start, told="update")
    for told in range(len(record)):
        ours = [schedule.at(lr, progress(told + 1, *length), scale) for scale in (*scales, 1.0)]
        assert ours == pytest.approx(record[told, ::2].tolist(), rel=1e-9)
    assert schedule.at(lr, progress(0, *length)) == start


def test_deit_rates():
    """timm's scheduler told every epoch once it is over, as DeiT and iBOT's semi-supervised training do."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=30, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    schedule = TimmCosine(warmup=5, floor=1e-5, start=1e-6, told="epoch")
    for epoch in range(30):
        used = optimizer.param_groups[0]["lr"]
        assert [schedule.at(3e-3, progress(4 * epoch + step, 4, 30)) for step in range(4)] == pytest.approx(
            [used] * 4, rel=1e-12
        )
        scheduler.step(epoch)
