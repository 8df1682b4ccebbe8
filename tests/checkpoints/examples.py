"""One tiny checkpoint for every importer, laid out as the official code saves it, and what that code computed with it.

The numbers are recorded outputs of the official modules (tests/golden). BYOL, MST and DINOv2 have no recording of
their own: their layouts carry DINO's recorded weights and activations, of which they are supersets.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from reference import plain_vit_tokens
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.importing import ImportOptions
from checkpoints.reading import ForeignFile

GOLDEN = Path(os.environ.get("GOLDEN_ROOT", Path(__file__).parents[1] / "golden"))
Pairs = list[tuple[Tensor, Tensor]]  # ours, recorded


@dataclass(frozen=True, kw_only=True)
class Example:
    """tree: dotted official name -> tensor. recorded: our values beside the official ones, in float64."""

    importer: str
    options: ImportOptions
    tree: dict[str, Tensor]
    recorded: Callable[[ViTExport], Pairs]
    facts: dict[str, Any] = field(default_factory=dict)

    def file(self, **changes: Tensor | None) -> ForeignFile:
        """As the reader would return it; `changes` replace tensors, None removes one."""
        tree = {name: tensor for name, tensor in (self.tree | changes).items() if tensor is not None}
        return ForeignFile(path=Path(f"{self.importer}.pth"), sha256="0" * 64, tensors=tree, facts=self.facts)


@cache
def golden(path: str) -> dict[str, Tensor]:
    with safe_open(GOLDEN / path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


@cache
def settings(path: str) -> dict[str, Any]:
    """Options of a recording: a config.json, or the JSON in a file's own metadata."""
    if path.endswith(".json"):
        return json.loads((GOLDEN / path).read_text())
    with safe_open(GOLDEN / path, "pt") as file:
        return json.loads(file.metadata()["config"])


def part(tensors: dict[str, Tensor], prefix: str, new: str = "") -> dict[str, Tensor]:
    return {new + name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def encode(export: ViTExport, images: Tensor, **how: Any) -> Tensor:
    return export.build().double()(images.double(), **how)[0]


def dino() -> Example:
    record, config = golden("dino/golden.safetensors"), settings("dino/config.json")
    tree = part(record, "student0/", "student.") | part(record, "teacher0/", "teacher.")
    tree["dino_loss.center"] = record["center0"]
    options = ImportOptions(heads=config["heads"])
    return Example(importer="dino", options=options, tree=tree, recorded=dino_teacher)


def dino_teacher(export: ViTExport) -> Pairs:
    record = golden("dino/golden.safetensors")
    images = record["step0/crop0"]
    attention = export.build().double().attention(images.double())
    return [
        (encode(export, images)[:, 0], record["probe/teacher_cls_of_crop0"]),
        (attention, record["probe/teacher_last_attention_of_crop0"]),
    ]


def dino_student(export: ViTExport) -> Pairs:
    """The recorded local crop is smaller than the model's image: the position rule decides its features."""
    record = golden("dino/golden.safetensors")
    return [(encode(export, record["step0/crop2"])[:, 0], record["probe/student_cls_of_crop2"])]


def dino_student_example() -> Example:
    options = ImportOptions(heads=settings("dino/config.json")["heads"], branch="student")
    return Example(importer="dino", options=options, tree=dino().tree, recorded=dino_student)


def dinov2() -> Example:
    """DINO's network is DINOv2's with layer scale at one."""
    weights = part(golden("dino/golden.safetensors"), "teacher0/backbone.")
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    width = weights["cls_token"].shape[-1]
    scale = {f"blocks.{i}.ls{j}.gamma": torch.ones(width) for i in range(depth) for j in (1, 2)}
    tree = weights | scale | {"mask_token": torch.zeros(1, width)}
    options = ImportOptions(heads=settings("dino/config.json")["heads"])
    return Example(importer="dinov2", options=options, tree=tree, recorded=dino_teacher)


def mst() -> Example:
    example = dino()
    tree = {name: tensor for name, tensor in example.tree.items() if not name.startswith("dino_loss")}
    tree |= {"student.decoder.0.weight": torch.zeros(32, 8, 4, 4), "student.mask_token": torch.zeros(1, 32)}
    return Example(importer="mst", options=example.options, tree=tree, recorded=dino_teacher)


def byol() -> Example:
    """The layout of docs/export-format.md, on DINO's weights."""
    record, config = golden("dino/golden.safetensors"), settings("dino/config.json")
    tree = part(record, "teacher0/backbone.", "model.online.trunk.")
    tree |= part(record, "student0/backbone.", "model.target.trunk.")
    width = config["dim"]
    spec = dict(architecture="vit_base_patch16_224", image_size=config["img"], patch_size=config["patch"], width=width)
    spec |= dict(depth=config["depth"], heads=config["heads"], mlp_hidden=4 * width, position_resize="bicubic_offset")
    facts = {"method": "byol"} | {f"spec.{name}": value for name, value in spec.items()}
    return Example(importer="byol", options=ImportOptions(), tree=tree, recorded=dino_teacher, facts=facts)


def ibot() -> Example:
    record, config = golden("ibot/golden.safetensors"), settings("ibot/config.json")
    tree = part(record, "student0/", "student.") | part(record, "teacher0/", "teacher.")
    tree |= {"ibot_loss.center": record["center0/cls"], "ibot_loss.center2": record["center0/patch"]}

    def recorded(export: ViTExport) -> Pairs:
        images = torch.cat([record["step0/crop0"], record["step0/crop1"]])
        tokens = encode(export, images)
        for number in (0, 2, 4):
            weight, bias = (export.extra[f"projector.mlp.{number}.{kind}"].double() for kind in ("weight", "bias"))
            tokens = F.linear(tokens if number == 0 else F.gelu(tokens), weight, bias)
        rows = F.normalize(record["teacher0/head.last_layer.weight_v"].double(), dim=1)
        logits = F.normalize(tokens, dim=-1) @ (record["teacher0/head.last_layer.weight_g"].double() * rows).T
        return [(logits[:, 0], record["step0/teacher_cls"]), (logits[:, 1:], record["step0/teacher_patch"])]

    return Example(importer="ibot", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def batch_norm(values: Tensor, affine: dict[str, Tensor] | None, name: str) -> Tensor:
    weight, bias = (affine.get(f"{name}.{kind}") for kind in ("weight", "bias"))
    weight, bias = (None if t is None else t.double() for t in (weight, bias))
    return F.batch_norm(values, None, None, weight, bias, training=True)


# MSN and MoCo-v3 recorded outputs behind batch norm, which cannot see the final norm's bias: the encoder's own output
# is compared with an independent ViT as well.


def msn() -> Example:
    record, config = golden("msn/golden.safetensors"), settings("msn/config.json")
    tree = part(record, "encoder0/", "encoder.") | part(record, "target0/", "target_encoder.")
    tree["prototypes"] = record["prototypes0"]

    def recorded(export: ViTExport) -> Pairs:
        tokens = encode(export, record["step0/view0"])
        values, independent = tokens[:, 0], plain_vit_tokens(record, "target0/", config["heads"], record["step0/view0"])
        for number in (1, 2, 3):
            weight, bias = (record[f"target0/fc.fc{number}.{kind}"].double() for kind in ("weight", "bias"))
            values = F.linear(values, weight, bias)
            if number < 3:
                values = F.gelu(batch_norm(values, record, f"target0/fc.bn{number}"))
        return [(values, record["step0/target_h"]), (tokens, independent)]

    return Example(importer="msn", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def mocov3() -> Example:
    record, config = golden("mocov3/golden.safetensors"), settings("mocov3/config.json")
    tree = part(record, "model0/", "state_dict.")

    def recorded(export: ViTExport) -> Pairs:
        tokens = encode(export, record["step0/x1"])
        values = tokens[:, 0]
        independent = plain_vit_tokens(record, "model0/base_encoder.", config["heads"], record["step0/x1"])
        for head, numbers in (("base_encoder.head", (0, 3, 6)), ("predictor", (0, 3))):
            for number in numbers:
                values = F.linear(values, record[f"model0/{head}.{number}.weight"].double())
                values = batch_norm(values, record, f"model0/{head}.{number + 1}")
                values = F.relu(values) if number != numbers[-1] else values
        return [(values, record["step0/q1"]), (tokens, independent)]

    return Example(importer="mocov3", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def visible(noise: Tensor, mask_ratio: float) -> Tensor:
    """MAE's kept patches: the first int(L * (1 - ratio)) of the noise in ascending order."""
    return noise.argsort(dim=1)[:, : int(noise.shape[1] * (1 - mask_ratio))]


def masked_latent(export: ViTExport, images: Tensor, keep: Tensor) -> Tensor:
    vit = export.build().double()
    return vit.encode(vit.place(vit.project(images.double()), vit.spec.grid), keep=keep)[0]


def mae() -> Example:
    record, config = golden("mae/mae_step.safetensors"), settings("mae/mae_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        keep = visible(record["in0.noise"], config["mask_ratio"])
        return [(masked_latent(export, record["in0.image"], keep), record["out0.latent"])]

    tree, options = part(record, "model0.", "model."), ImportOptions(heads=config["heads"])
    return Example(importer="mae", options=options, tree=tree, recorded=recorded)


def lut() -> Example:
    record, config = golden("lut/lut_step.safetensors"), settings("lut/lut_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        keep = visible(record["in0.noise"], config["mask_ratio"])
        return [(masked_latent(export, record["in0.view1"], keep), record["out0.latent1"])]

    tree = part(record, "student0.", "model.") | part(record, "ema0.", "model_ema.ema.")
    return Example(importer="lut", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def moca() -> Example:
    record, config = golden("moca/eval.safetensors"), settings("moca/cases.json")["tiny_config"]
    images = golden("moca/inputs.safetensors")["batch0.x1"]

    def recorded(export: ViTExport) -> Pairs:
        tokens, raw = encode(export, images), encode(export, images, norm=False)
        return [
            (F.normalize(tokens[:, 1:].mean(dim=1), dim=1), record["knn.feature_avg_l2"]),
            (F.normalize(tokens[:, 0], dim=1), record["knn.feature_cls_l2"]),
            (encode(export, images, layers=(-2,))[:, 0], record["linear.n2.avgpool0"][:, : config["embed_dim"]]),
            (raw[:, 1:].mean(dim=1), record["lowshot.feature_remove_norm"]),
        ]

    tree = part(golden("moca/init_state.safetensors"), "", "model.")
    return Example(importer="moca", options=ImportOptions(heads=config["num_heads"]), tree=tree, recorded=recorded)


def relative(folder: str, model: str, head: str, output: str, tree_prefix: str) -> Example:
    """BEiT and data2vec: masked patches are replaced, then a linear head reads the normed patches."""
    record = golden(f"{folder}/{folder}_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        vit, mask = export.build().double(), record["in0.mask"].flatten(1).unsqueeze(-1)
        patches = vit.project(record["in0.image"].double())
        patches = torch.where(mask.bool(), record[f"{model}.mask_token"].double(), patches)
        tokens = vit.encode(vit.place(patches, vit.spec.grid))[0][:, 1:]
        weight, bias = (record[f"{model}.{head}.{kind}"].double() for kind in ("weight", "bias"))
        return [(F.linear(tokens[mask[..., 0].bool()], weight, bias), record[output])]

    tree = part(record, f"{model}.", tree_prefix)
    options = ImportOptions(statistics="imagenet")
    return Example(importer=folder, options=options, tree=tree, recorded=recorded)


def simmim() -> Example:
    record = golden("simmim/simmim_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        vit, mask = export.build().double(), record["in0.mask"].flatten(1).unsqueeze(-1).bool()
        patches = vit.project(record["in0.image"].double())
        patches = torch.where(mask, record["model0.encoder.mask_token"].double(), patches)
        tokens = vit.encode(vit.place(patches, vit.spec.grid))[0][:, 1:]
        side = isqrt(tokens.shape[1])
        return [(tokens.transpose(1, 2).unflatten(2, (side, side)), record["out0.encoder"])]

    return Example(
        importer="simmim", options=ImportOptions(), tree=part(record, "model0.", "model."), recorded=recorded
    )


def extrema() -> Example:
    weights, record = golden("extrema/weights.safetensors"), golden("extrema/cases.safetensors")
    tree = part(weights, "grid/", "state_dict.") | part(weights, "grid_after_ema/", "state_dict.")

    def recorded(export: ViTExport) -> Pairs:
        images = record["grid/images2_u8"].float() / 64 - 2
        tokens, raw = encode(export, images), encode(export, images, norm=False)
        values = tokens[:, 0]
        for number in (0, 1, 3, 4, 6):
            weight, bias = (export.extra[f"projector.{number}.{kind}"].double() for kind in ("weight", "bias"))
            if number in (1, 4):
                values = F.gelu(F.layer_norm(values, values.shape[1:], weight, bias))
            else:
                values = F.linear(values, weight, bias)
        return [
            (raw[:, 0], record["grid_byol_m2/teacher/ca0"]),
            (tokens[:, 0], record["grid_byol_m2/teacher/instance"]),
            (tokens[:, 1:], record["grid_byol_m2/teacher/distributed"]),
            (values, record["grid_byol_m2/teacher/projection"]),
        ]

    options = ImportOptions(heads=settings("extrema/meta.json")["grid"]["heads"])
    return Example(importer="extrema", options=options, tree=tree, recorded=recorded)


EXAMPLES = {
    "dino": dino,
    "dino_student": dino_student_example,
    "dinov2": dinov2,
    "ibot": ibot,
    "msn": msn,
    "mocov3": mocov3,
    "byol": byol,
    "mst": mst,
    "mae": mae,
    "lut": lut,
    "moca": moca,
    "extrema": extrema,
    "simmim": simmim,
    "data2vec": lambda: relative("data2vec", "student0", "lm_head", "out0.student_masked", "model."),
    "beit": lambda: relative("beit", "model0", "lm_head", "out0.logits_masked", "model."),
}
