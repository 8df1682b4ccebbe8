"""SimDINO and SimDINOv2 against recorded steps of their official training loops (RobinWu218/SimDINO 8149fc4) and values
of their loss, in float64."""

from dataclasses import replace

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, case_classes, count, doubled
from recorded_distillation import crop_major
from recorded_masked import RecordedMasked, mask_order
from recordings import facts, tensors, under
from torch.nn import functional as F

from pretrain.method import TrainProgress
from pretrain.methods import simdino, simdinov2
from pretrain.methods.dino import POSITIONS
from pretrain.methods.dinov2 import patch_head
from pretrain.methods.simdino import CodingRateSettings, agreement, simdino_loss
from pretrain.schedules import CosineTo, TableCosine, WarmupCosine, cosine

DATA, CONFIG = doubled(tensors("simdino/golden.safetensors")), facts("simdino/config.json")
EXPANSION = {0: "student", 1: "mean"}


def loss_settings(config):
    return dict(eps=config["eps"], compression_weight=config["coeff"], expansion_of=EXPANSION[config["expa_type"]])


class RecordedSimDino(RecordedTraining):
    """The first version, whose recorded epoch is the second of several."""

    method, design = simdino.METHOD, POSITIONS
    LOSS, NORM, END = 1e-9, 1e-8, 1e-7
    start, end, norm, gradient = "model0/", "model_end/", "gradnorm{}/", "grad{}/"
    losses = {"loss": "step{}/loss", "compression": "step{}/comp_loss", "expansion": "step{}/expa_loss"}
    test_decayed_parameters = None

    def __init_subclass__(cls) -> None:
        config, recorded = CONFIG["cases"][cls.case], under(DATA, f"{cls.case}/")
        cls.config = config | {"batch": config["B"], "wd": config["wd"][0], "wd_end": config["wd"][1]}
        cls.steps = cls.steps_per_epoch = config["steps"]
        for network in ("student", "teacher"):
            for when in ("0", "_end"):
                recorded |= under(recorded, f"{network}{when}/", f"model{when}/{network}.")
        for step in range(cls.steps):
            for kind in ("grad", "gradnorm"):
                recorded |= under(recorded, f"step{step}/{kind}/", f"{kind}{step}/student.")
        cls.data = recorded

    def our_name(self, official):
        return official.replace("backbone.", "vit.trunk.", 1)

    def settings(self):
        config, layers = self.config, [t for n, t in self.data.items() if n.startswith("model0/student.head.mlp.")]
        return CodingRateSettings(
            **loss_settings(config),
            head_layers=sum(tensor.ndim == 2 for tensor in layers),
            head_hidden=config["hidden"],
            bottleneck=config["bott"],
            teacher_momentum=config["mom"],
            local_size=config["local"],
            local_crops=config["nloc"],
            drop_path=0.0,
        )

    def schedule(self):
        return TableCosine(warmup=self.config["warm"], floor=self.config["min_lr"])

    def recipe(self):
        return replace(super().recipe(), weight_decay_schedule=CosineTo(end=self.config["wd_end"]), clip_each=True)

    def progress(self, step):
        first = self.steps if self.config["epochs"] > 1 else 0
        return TrainProgress(step=first + step, steps_per_epoch=self.steps, epochs=self.config["epochs"])

    def views(self, forward):
        crops = [self.data[f"step{forward}/crop{number}"] for number in range(2 + self.config["nloc"])]
        views = {"global": torch.stack(crops[:2], dim=1)}
        return {**views, "local": torch.stack(crops[2:], dim=1)} if self.config["nloc"] else views

    def check_rates(self, updates, progress, step):
        assert_close(updates.rates(progress)[0], self.data["sched/lr"][progress.step], EXACT, f"rate {step}")

    def outputs(self, method, step):
        views = self.views(step)
        student = torch.cat([crop_major(vectors) for vectors in method.student(views).values()])
        yield f"step{step}/student_out", student, self.NORM
        yield f"step{step}/teacher_out", crop_major(method.teacher({"global": views["global"]})["global"]), self.NORM

    def test_momentum(self):
        recorded = self.data["sched/momentum"]
        for step, momentum in enumerate(recorded):
            assert_close(cosine(self.config["mom"], 1.0, step / len(recorded)), momentum, EXACT, f"momentum {step}")


class RecordedSimDinoV2(RecordedMasked):
    folder, method = "simdino", simdinov2.METHOD
    test_decayed_parameters = None  # the groups are DINOv2's
    losses = {name: f"step{{}}/{name}" for name in ("loss", "compression", "expansion", "patch")}

    @classmethod
    def totals(cls, step, prefix):
        names = {
            "total_loss": "loss",
            "dino_mcr_comp_loss": "compression",
            "dino_mcr_expa_loss": "expansion",
            "ibot_comp_loss": "patch",
        }
        return {f"{prefix}{ours}": step[official] for official, ours in names.items()}

    def settings(self):
        config = self.config
        ends = dict(eps_end=config["eps_end"], compression_weight_end=config["coeff_end"], end_epoch=config["expa_end"])
        ends = {name: max(0, end) for name, end in ends.items()}  # officially -1 leaves a value as it is
        return simdinov2.Settings(
            **self.shared_settings(), **loss_settings(config), **ends, layer_scale_init=config["ls"]
        )

    def recipe(self):
        return replace(super().recipe(), clip_end=max(0, self.config["clip_end"]))

    def schedule(self):
        config = self.config
        return WarmupCosine(warmup=config["warm"], floor=config["min_lr"], start=config["min_lr"] / config["lr"])

    def outputs(self, method, step):
        views, head = self.views(step), method.student.head
        method.before_forward(self.progress(step))
        classes, local, patches = method.student_tokens(views)
        rows = [classes] if local is None else [classes, local]
        yield f"step{step}/student_cls", torch.cat([crop_major(head(tokens)) for tokens in rows]), self.NORM
        yield (
            f"step{step}/student_patch",
            mask_order(patch_head(method.student)(patches[views["mask"]]), views["mask"]),
            self.NORM,
        )
        classes, patches = method.teacher_tokens(views["global"], views["mask"])
        yield f"step{step}/teacher_cls", crop_major(method.teacher.head(classes)), self.NORM
        yield f"step{step}/teacher_patch", mask_order(patch_head(method.teacher)(patches), views["mask"]), self.NORM

    def test_scheduled_weights_equal_the_recorded_ones(self):
        method, recipe, data = self.begin().method, self.recipe(), self.data
        for step in range(self.config["epochs"] * self.config["epoch_len"]):
            now = replace(self.progress(0), step=step)
            method.before_forward(now)
            assert_close(method.coding_rate.eps, data["sched/eps"][step], EXACT, f"eps {step}")
            assert_close(method.coding_rate.compression_weight, data["sched/coeff"][step], EXACT, f"weight {step}")
            assert_close(recipe.clip_at(now), data["sched/clip"][step], EXACT, f"clip {step}")


V2_CASES = [case for case, options in CONFIG["cases"].items() if "chunks" in options]
globals().update(case_classes(RecordedSimDino, [case for case in CONFIG["cases"] if case not in V2_CASES]))
globals().update(case_classes(RecordedSimDinoV2, V2_CASES))


@pytest.mark.parametrize("case", range(count(DATA, "loss/case{}/student")))
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_loss_equals_the_recorded_one(case, version):
    """The first version compresses by cosines and the second by products; both expand the vectors as they are."""
    crops, _, _, eps, coeff, expa_type, _ = CONFIG["losses"][case]
    data = under(DATA, f"loss/case{case}/")
    student, teacher = data["student"].clone().requires_grad_(), data["teacher"]
    weights = loss_settings({"eps": eps, "coeff": coeff, "expa_type": expa_type})
    vectors, targets = student.transpose(0, 1), teacher.transpose(0, 1)
    parts = [vectors[:, :2], vectors[:, 2:] if crops > 2 else None, targets]
    loss, logs = simdino_loss(*parts, CodingRateSettings(**weights))
    if version == "v1":
        unit = [None if part is None else F.normalize(part, dim=-1) for part in parts]
        expansion, _ = simdino_loss(*parts, CodingRateSettings(**weights | {"compression_weight": 0.0}))
        compression = agreement(*unit)
        loss, logs["compression"] = expansion - coeff * compression, compression
    assert_close(logs["compression"], data[f"{version}_comp_loss"], 1e-9, "compression")
    assert_close(logs["expansion"], data[f"{version}_expa_loss"], 1e-9, "expansion")
    assert_close(loss, data[f"{version}_loss"], 1e-9, "loss")
    loss.backward()
    assert_close(student.grad, data[f"{version}_grad"], 1e-9, "gradient")
