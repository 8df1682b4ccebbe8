"""Recordings of DINOv2's and SimDINOv2's training loops, in the layout that their READMEs describe."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, count, doubled
from recordings import facts, tensors, under
from torch import Tensor

from pretrain.method import TrainProgress
from pretrain.schedules import CosineTo, cosine

PARTS = {"dino_head.": "head.", "ibot_head.": "patch_head.", "backbone.": "vit.trunk."}
RENAMES = {
    r"blocks\.\d+\.(\d+)\.": r"blocks.\1.",  # chunks
    r"mlp\.w12\.": "mlp.fc1.",
    r"mlp\.w3\.": "mlp.fc2.",
    r"register_tokens": "reg_token",
}


def renamed(name: str) -> str:
    for pattern, ours in RENAMES.items():
        name = re.sub(pattern, ours, name)
    return name


def image_major(rows: Tensor, crops: int) -> Tensor:
    """(V B, ...) of the recording -> (B, V, ...)."""
    return rows.unflatten(0, (crops, -1)).transpose(0, 1)


def mask_order(rows: Tensor, masks: Tensor) -> Tensor:
    """Rows (m, ...) of the patches that masks (B, G, L) hide -> in the order of the recording, crop by crop."""
    all_rows = rows.new_zeros(*masks.shape, *rows.shape[1:])
    all_rows[masks] = rows
    return all_rows.transpose(0, 1)[masks.transpose(0, 1)]


class RecordedMasked(RecordedTraining):
    """A case of `folder`; options that our encoders do not have are refused."""

    folder: ClassVar[str]
    case: ClassVar[str]
    LOSS, NORM, END = 1e-9, 1e-8, 1e-7
    start, end, norm, gradient = "model0/", "model_end/", "gradnorm{}/", "grad{}/"
    unrecorded = r"(?!student\.|teacher\.).*"
    draws: list[Tensor]  # permutations of the images for stochastic depth to draw

    def __init_subclass__(cls) -> None:
        if "case" not in vars(cls):
            return
        config = facts(f"{cls.folder}/config.json")["cases"][cls.case]
        cls.config = config | {"batch": config["B"], "wd": config["wd"][0], "wd_end": config["wd"][1]}
        recorded = doubled(under(tensors(f"{cls.folder}/golden.safetensors"), f"{cls.case}/"))
        recorded = {renamed(name): tensor for name, tensor in recorded.items()}
        cls.steps, cls.steps_per_epoch = count(recorded, "step{}/global"), config["epoch_len"]
        for when in ("0", "_end"):
            for network in ("student", "teacher"):
                recorded |= under(recorded, f"{network}{when}/", f"model{when}/{network}.")
        for step in range(cls.steps):
            for kind in ("grad", "gradnorm"):
                recorded |= under(recorded, f"step{step}/{kind}/", f"{kind}{step}/student.")
            recorded |= cls.totals(under(recorded, f"step{step}/"), f"step{step}/")
        cls.data = recorded
        cls.design = cls.encoder()

    @classmethod
    def totals(cls, step: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Losses of one step as our method logs them."""
        raise NotImplementedError

    @classmethod
    def encoder(cls) -> dict[str, Any]:
        config, rules = cls.config, {(True, 0.0): "bicubic_antialias", (False, 0.0): "bicubic", (False, 0.1): None}
        rule = rules[config.get("antialias", True), config.get("offset", 0.0)] or "bicubic_offset"
        gated = dict(architecture="vit_giant_patch14_dinov2") if config["ffn"].startswith("swiglu") else {}
        return dict(layer_scale=bool(config["ls"]), position_resize=rule, registers=config["registers"], **gated)

    def recipe(self):
        config = self.config
        schedule = CosineTo(end=config["wd_end"])
        return replace(super().recipe(), weight_decay_schedule=schedule, layer_decay=config["decay"])

    def shared_settings(self) -> dict[str, Any]:
        config = self.config
        return dict(
            head_layers=config["dino"]["layers"],
            head_hidden=config["dino"]["hidden"],
            bottleneck=config["dino"]["bott"],
            teacher_momentum=config["mom"][0],
            teacher_momentum_end=config["mom"][1],
            cls_weight=config["dino"]["w"],
            patch_weight=config["ibot"]["w"],
            koleo_weight=config["koleo"],
            local_size=config["local"],
            local_crops=config["nloc"],
            patch_lr=config["patch_mult"],
            drop_path=config["drop"],
            drop_path_uniform=config["uniform"],
            separate_head=config["separate"],
            patch_bottleneck=config["ibot"]["bott"],
            patch_head_hidden=config["ibot"]["hidden"],
            patch_head_layers=config["ibot"]["layers"],
        )

    def our_name(self, official):
        network, _, name = official.partition(".")
        if name == "backbone.mask_token":
            return "mask_token" if network == "student" else None
        part = next(part for part in PARTS if name.startswith(part))
        return f"{network}.{PARTS[part]}{renamed(name.removeprefix(part))}"

    def layout(self, official, tensor):
        """Our table has rows for the registers, which stay zero; our mask token has one more axis."""
        if official.endswith("mask_token"):
            return tensor.unsqueeze(0)
        registers = self.config["registers"]
        if not official.endswith("pos_embed") or not registers:
            return tensor
        return torch.cat([tensor[:, :1], tensor.new_zeros(1, registers, tensor.shape[-1]), tensor[:, 1:]], dim=1)

    def first_state(self, method):
        return method.state_dict() | self.named(self.start)

    def progress(self, step):
        config = self.config
        return TrainProgress(step=config["first"] + step, steps_per_epoch=config["epoch_len"], epochs=config["epochs"])

    def views(self, forward):
        """Also set what stochastic depth draws. Officially a block draws for the global and the local crops before
        the next block does; ours encode the global crops with all blocks first."""
        data, crops = under(self.data, f"step{forward}/"), {"global": 2, "local": self.config["nloc"]}
        permutations = [data[f"drop/{number:02d}"] for number in range(count(data, "drop/{:02d}"))]
        images = self.config["B"]
        self.draws = [
            perm % images * number + perm // images
            for kind, number in enumerate(crops.values())
            for perm in permutations[kind::2]
        ]
        views = {name: image_major(data[name], number) for name, number in crops.items() if number}
        return {**views, "mask": image_major(data["masks"], 2)}

    @pytest.fixture(autouse=True)
    def recorded_draws(self, monkeypatch):
        monkeypatch.setattr(torch, "randperm", lambda images, device=None: self.draws.pop(0))

    def check_rates(self, updates, progress, step):
        assert_close(updates.rates(progress)[0], self.data["sched/lr"][progress.step], EXACT, f"learning rate {step}")

    def check_update(self, updates, logs, step):
        """Compare the norm of each part's gradient before it was clipped by itself."""
        assert not self.draws
        parts = {"backbone": "vit", "dino_head": "head", "ibot_head": "patch_head"}
        norms = under(self.data, f"step{step}/clipnorm/")
        assert norms
        for name, norm in norms.items():
            names = [n for g in updates.groups if g.clipped_with == parts[name] for n in g.parameters]
            gradients = [updates.raw[parameter].norm() for parameter in names if parameter in updates.raw]
            assert_close(torch.stack(gradients).norm(), norm, self.NORM, f"{name} {step}")

    def test_decayed_parameters(self):
        """The rates of all groups are compared too."""
        ours = {
            name: (group.lr_scale, 0.0 if group.weight_decay == 0 else 1.0, group.zero_lr_epochs > 0)
            for group in self.begin().groups
            for name in group.parameters
        }
        recorded = {
            self.our_name(f"student.{name}"): (group["lr_multiplier"], group["wd_multiplier"], self.is_frozen(group))
            for group in self.config["groups"]
            for name in group["names"]
        }
        assert ours.keys() == recorded.keys()
        for name, values in recorded.items():
            assert ours[name] == pytest.approx(values, rel=1e-12), name

    def is_frozen(self, group) -> bool:
        return group["is_last_layer"] and self.config.get("freeze", 0) > 0

    def test_momentum(self):
        steps = self.config["epochs"] * self.config["epoch_len"]
        for step in range(steps):
            assert_close(cosine(*self.config["mom"], step / steps), self.data["sched/momentum"][step], EXACT, f"{step}")
