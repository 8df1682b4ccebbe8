"""One tiny checkpoint per importer, laid out as the official code saves it, with the outputs recorded of that code.

The recorded outputs are those of tests/golden. BYOL, MST and DINOv2 have no recording of
their own: their layouts carry DINO's recorded weights and activations, of which they are supersets.
"""

from collections.abc import Mapping
from math import isqrt

import torch
from masked_examples import cae, cae_finetuned, can, maskfeat, maskfeat_finetuned
from recent_examples import aimv2, capi, franca, ijepa, pixio
from recorded_example import Example, Pairs, encode, masked_latent, network_of, visible
from recordings import depth_of, facts, matches, tensors, under
from reference import plain_vit_tokens
from rotary_examples import dinov3, dinov3_gated
from torch import Tensor
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions


def dino() -> Example:
    record, config = tensors("dino/golden.safetensors"), facts("dino/config.json")
    tree = under(record, "student0/", "student.") | under(record, "teacher0/", "teacher.")
    tree["dino_loss.center"] = record["center0"]
    options = ImportOptions(heads=config["heads"])

    def recorded(export: ViTExport) -> Pairs:
        return dino_teacher(export) + dino_logits(export, "teacher")

    return Example(importer="dino", options=options, tree=tree, recorded=recorded)


def dino_probes(export: ViTExport, branch: str) -> Pairs:
    """Features and attention recorded of one branch."""
    record, pairs = tensors("dino/golden.safetensors"), []
    for probe in matches(rf"probe/{branch}_(cls|last_attention)_of_crop(\d+)", record):
        images = record[f"step0/crop{probe[2]}"].double()
        ours = encode(export, images)[:, 0] if probe[1] == "cls" else network_of(export).attention(images)
        pairs.append((ours, record[probe[0]]))
    return pairs


def dino_teacher(export: ViTExport) -> Pairs:
    return dino_probes(export, "teacher")


def dino_logits(export: ViTExport, branch: str) -> Pairs:
    """Logits of all crops that the branch saw, by the kept projector and the recorded prototypes."""
    record, config = tensors("dino/golden.safetensors"), facts("dino/config.json")
    crops = [record[f"step0/crop{number}"] for number in range(2 + (config["nloc"] if branch == "student" else 0))]
    values = torch.cat([encode(export, crop)[:, 0] for crop in crops])
    layers = sorted(name for name, tensor in export.extra.items() if tensor.ndim == 2)
    for name in layers:
        if name != layers[0]:
            values = F.gelu(values)
        weight, bias = (export.extra[name.replace("weight", kind)].double() for kind in ("weight", "bias"))
        values = F.linear(values, weight, bias)
    rows = F.normalize(record[f"{branch}0/head.last_layer.weight_v"].double(), dim=1)
    logits = F.normalize(values, dim=1) @ (record[f"{branch}0/head.last_layer.weight_g"].double() * rows).T
    return [(logits, record[f"step0/{branch}_out"])]


def dino_student(export: ViTExport) -> Pairs:
    """The recorded local crop is smaller than the model's image: the position rule decides its features."""
    return dino_probes(export, "student") + dino_logits(export, "student")


def dino_student_example() -> Example:
    options = ImportOptions(heads=facts("dino/config.json")["heads"], branch="student")
    return Example(importer="dino", options=options, tree=dino().tree, recorded=dino_student)


def dinov2() -> Example:
    """DINO's network is DINOv2's with layer scale at one."""
    weights = under(tensors("dino/golden.safetensors"), "teacher0/backbone.")
    width = weights["cls_token"].shape[-1]
    scale = {f"blocks.{i}.ls{j}.gamma": torch.ones(width) for i in range(depth_of(weights)) for j in (1, 2)}
    tree = weights | scale | {"mask_token": torch.zeros(1, width)}
    options = ImportOptions(heads=facts("dino/config.json")["heads"])
    return Example(importer="dinov2", options=options, tree=tree, recorded=dino_teacher)


def mst() -> Example:
    example = dino()
    tree = {name: tensor for name, tensor in example.tree.items() if not name.startswith("dino_loss")}
    width = facts("dino/config.json")["dim"]
    tree |= {"student.decoder.0.weight": torch.zeros(width, 8, 4, 4), "student.mask_token": torch.zeros(1, width)}
    return Example(importer="mst", options=example.options, tree=tree, recorded=dino_teacher)


def byol() -> Example:
    """The layout of docs/export-format.md, on DINO's weights."""
    record, config = tensors("dino/golden.safetensors"), facts("dino/config.json")
    tree = under(record, "teacher0/backbone.", "model.online.trunk.")
    tree |= under(record, "student0/backbone.", "model.target.trunk.")
    width = config["dim"]
    spec = dict(architecture="vit_base_patch16_224", image_size=config["img"], patch_size=config["patch"], width=width)
    hidden = len(record["teacher0/backbone.blocks.0.mlp.fc1.weight"])
    spec |= dict(depth=config["depth"], heads=config["heads"], mlp_hidden=hidden, position_resize="bicubic_offset")
    method_and_spec = {"method": "byol"} | {f"spec.{name}": value for name, value in spec.items()}
    return Example(importer="byol", options=ImportOptions(), tree=tree, recorded=dino_teacher, facts=method_and_spec)


def ibot_head(extra: Mapping[str, Tensor], values: Tensor, start: int = -1) -> Tensor:
    """Outputs of the kept layers of iBOT's head after number `behind`, of tokens (..., D) or of the first layer's
    activations. A batch norm uses the statistics of the batch."""
    numbers = sorted({int(name.split(".")[2]) for name, tensor in extra.items() if tensor.ndim == 2})
    for number in [number for number in numbers if number > start]:
        if number not in (numbers[0], next(after for after in numbers if after > start)):
            values = F.gelu(ibot_norm(extra, values, numbers[0] + 1))
        weight, bias = (extra[f"projector.mlp.{number}.{kind}"].double() for kind in ("weight", "bias"))
        values = F.linear(values, weight, bias)
    return values


def ibot_norm(extra: Mapping[str, Tensor], values: Tensor, number: int) -> Tensor:
    """The norm with this number, or the values unchanged if the layer is not a norm."""
    if f"projector.mlp.{number}.weight" not in extra:
        return values
    pair = [extra[f"projector.mlp.{number}.{kind}"].double() for kind in ("weight", "bias")]
    if f"projector.mlp.{number}.running_mean" not in extra:
        return F.layer_norm(values, values.shape[-1:], *pair)
    return F.batch_norm(values.flatten(0, -2), None, None, *pair, training=True).view_as(values)


def ibot_prototypes(layer: str) -> Tensor:
    """(K, d) of the recorded teacher: of class tokens, or of patches."""
    record = under(tensors("ibot/golden.safetensors"), f"teacher0/head.{layer}.")
    return record["weight_g"].double() * F.normalize(record["weight_v"].double(), dim=1)


def ibot() -> Example:
    record, config = tensors("ibot/golden.safetensors"), facts("ibot/config.json")
    tree = under(record, "student0/", "student.") | under(record, "teacher0/", "teacher.")
    tree |= {"ibot_loss.center": record["center0/cls"], "ibot_loss.center2": record["center0/patch"]}

    def recorded(export: ViTExport) -> Pairs:
        images = torch.cat([record["step0/crop0"], record["step0/crop1"]])
        vectors = F.normalize(ibot_head(export.extra, encode(export, images)), dim=-1)
        logits = [vectors @ ibot_prototypes(layer).T for layer in ("last_layer", "last_layer2")]
        return [(logits[0][:, 0], record["step0/teacher_cls"]), (logits[1][:, 1:], record["step0/teacher_patch"])]

    return Example(importer="ibot", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def batch_norm(values: Tensor, affine: dict[str, Tensor] | None, name: str) -> Tensor:
    weight, bias = (affine.get(f"{name}.{kind}") for kind in ("weight", "bias"))
    weight, bias = (None if t is None else t.double() for t in (weight, bias))
    return F.batch_norm(values, None, None, weight, bias, training=True)


# MSN and MoCo-v3 recorded outputs after a batch norm, which removes the final norm's bias: the encoder's own output
# is compared with an independent ViT as well, and MSN's head in evaluation mode with the recorded one.


def msn() -> Example:
    record, config = tensors("msn/golden.safetensors"), facts("msn/config.json")
    tree = under(record, "encoder0/", "encoder.") | under(record, "target0/", "target_encoder.")
    tree["prototypes"] = record["prototypes0"]

    theirs = {name: tensor.double() for name, tensor in under(record, "target0/fc.").items()}
    norms = "bn1.weight" in theirs
    layers = ["fc1", "bn1", "", "fc2", "bn2", "", "fc3"] if norms else ["fc1", "", "fc2", "", "fc3"]

    def recorded(export: ViTExport) -> Pairs:
        tokens = encode(export, record["step0/view0"])
        independent = plain_vit_tokens(record, "target0/", config["heads"], record["step0/view0"])
        named = {tuple(name.split(".")[1:]): tensor.double() for name, tensor in export.extra.items()}
        ours = {f"{layers[int(number)]}.{kind}": tensor for (number, kind), tensor in named.items()}
        outputs = [msn_head(tokens[:, 0], ours, training) for training in (True, False)]
        return [
            (outputs[0], record["step0/target_h"]),
            (outputs[1], msn_head(tokens[:, 0], theirs, training=False)),
            (tokens, independent),
        ]

    return Example(importer="msn", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def msn_head(values: Tensor, head: dict[str, Tensor], training: bool) -> Tensor:
    """MSN's projection of class tokens (B, D) by a head of official names, in float64."""
    for number in (1, 2, 3):
        values = F.linear(values, head[f"fc{number}.weight"], head[f"fc{number}.bias"])
        if f"bn{number}.weight" in head:
            statistics = [None if training else head[f"bn{number}.running_{kind}"] for kind in ("mean", "var")]
            values = F.batch_norm(values, *statistics, head[f"bn{number}.weight"], head[f"bn{number}.bias"], training)
        values = F.gelu(values) if number < 3 else values
    return values


def mocov3() -> Example:
    record, config = tensors("mocov3/golden.safetensors"), facts("mocov3/config.json")
    tree = under(record, "model0/", "state_dict.")

    def recorded(export: ViTExport) -> Pairs:
        tokens = encode(export, record["step0/x1"])
        values = tokens[:, 0]
        independent = plain_vit_tokens(record, "model0/base_encoder.", config["heads"], record["step0/x1"])
        heads = (("projector", export.extra, (0, 3, 6)), ("model0/predictor", record, (0, 3)))
        for head, weights, numbers in heads:
            for number in numbers:
                values = F.linear(values, weights[f"{head}.{number}.weight"].double())
                values = batch_norm(values, weights, f"{head}.{number + 1}")
                values = F.relu(values) if number != numbers[-1] else values
        # Batch norms of a training do not read their running statistics.
        kept = {name: tensor for name, tensor in export.extra.items() if "running" in name}
        official = under(record, "model0/base_encoder.head.", "projector.")
        statistics = [(1 + tensor.double(), 1 + official[name].double()) for name, tensor in kept.items()]
        return [(values, record["step0/q1"]), (tokens, independent), *statistics]

    return Example(importer="mocov3", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def mae() -> Example:
    record, config = tensors("mae/mae_step.safetensors"), facts("mae/mae_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        keep = visible(record["in0.noise"], config["mask_ratio"])
        return [(masked_latent(export, record["in0.image"], keep), record["out0.latent"])]

    tree, options = under(record, "model0.", "model."), ImportOptions(heads=config["heads"])
    return Example(importer="mae", options=options, tree=tree, recorded=recorded)


def lut() -> Example:
    record, config = tensors("lut/lut_step.safetensors"), facts("lut/lut_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        keep = visible(record["in0.noise"], config["mask_ratio"])
        return [(masked_latent(export, record["in0.view1"], keep), record["out0.latent1"])]

    tree = under(record, "student0.", "model.") | under(record, "ema0.", "model_ema.ema.")
    return Example(importer="lut", options=ImportOptions(heads=config["heads"]), tree=tree, recorded=recorded)


def moca() -> Example:
    record, config = tensors("moca/eval.safetensors"), facts("moca/cases.json")["tiny_config"]
    images = tensors("moca/inputs.safetensors")["batch0.x1"]

    def recorded(export: ViTExport) -> Pairs:
        tokens, raw = encode(export, images), encode(export, images, norm=False)
        return [
            (F.normalize(tokens[:, 1:].mean(dim=1), dim=1), record["knn.feature_avg_l2"]),
            (F.normalize(tokens[:, 0], dim=1), record["knn.feature_cls_l2"]),
            (encode(export, images, layers=(-2,))[:, 0], record["linear.n2.avgpool0"][:, : config["embed_dim"]]),
            (raw[:, 1:].mean(dim=1), record["lowshot.feature_remove_norm"]),
        ]

    tree = under(tensors("moca/init_state.safetensors"), "", "model.")
    return Example(importer="moca", options=ImportOptions(heads=config["num_heads"]), tree=tree, recorded=recorded)


def relative(folder: str, model: str, head: str, output: str, tree_prefix: str) -> Example:
    """BEiT and data2vec: masked patches are replaced, then a linear head reads the normed patches."""
    record = tensors(f"{folder}/{folder}_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        vit, mask = network_of(export), record["in0.mask"].flatten(1).unsqueeze(-1)
        patches = vit.project(record["in0.image"].double())
        patches = torch.where(mask.bool(), record[f"{model}.mask_token"].double(), patches)
        tokens = vit.encode(vit.add_positions(patches, vit.spec.grid))[0][:, 1:]
        weight, bias = (record[f"{model}.{head}.{kind}"].double() for kind in ("weight", "bias"))
        return [(F.linear(tokens[mask[..., 0].bool()], weight, bias), record[output])]

    tree = under(record, f"{model}.", tree_prefix)
    options = ImportOptions(statistics="imagenet")
    return Example(importer=folder, options=options, tree=tree, recorded=recorded)


def simmim() -> Example:
    record = tensors("simmim/simmim_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        vit, mask = network_of(export), record["in0.mask"].flatten(1).unsqueeze(-1).bool()
        patches = vit.project(record["in0.image"].double())
        patches = torch.where(mask, record["model0.encoder.mask_token"].double(), patches)
        tokens = vit.encode(vit.add_positions(patches, vit.spec.grid))[0][:, 1:]
        side = isqrt(tokens.shape[1])
        return [(tokens.transpose(1, 2).unflatten(2, (side, side)), record["out0.encoder"])]

    return Example(
        importer="simmim", options=ImportOptions(), tree=under(record, "model0.", "model."), recorded=recorded
    )


def extrema_case() -> tuple[str, str]:
    """A model whose moved momentum encoder is completely recorded, and its case with the most recorded outputs."""
    weights, data = tensors("extrema/weights.safetensors"), tensors("extrema/cases.safetensors")
    meta = facts("extrema/meta.json")
    for model in (name for name, entry in meta.items() if isinstance(entry, dict) and "patch" in entry):
        moved = under(weights, f"{model}_after_ema/momentum_encoder.")
        if moved and moved.keys() == under(weights, f"{model}/momentum_encoder.").keys():
            cases = [case for case in meta["cases"] if case.startswith(model)]
            return model, max(cases, key=lambda case: len(under(data, f"{case}/teacher/")))
    raise AssertionError("no such model in extrema/weights.safetensors")


def extrema_images() -> Tensor:
    """The teacher's images in that case: the second view where there is one."""
    model, case = extrema_case()
    view = facts("extrema/meta.json")["cases"][case]["views"]
    return tensors("extrema/cases.safetensors")[f"{model}/images{view}_u8"].float() / 64 - 2


def extrema() -> Example:
    weights, (model, case) = tensors("extrema/weights.safetensors"), extrema_case()
    tree = under(weights, f"{model}/", "state_dict.") | under(weights, f"{model}_after_ema/", "state_dict.")

    def recorded(export: ViTExport) -> Pairs:
        images, last = extrema_images(), export.spec.class_attention - 1
        tokens, raw = encode(export, images), encode(export, images, norm=False)
        values = tokens[:, 0]
        for number in (0, 1, 3, 4, 6):
            weight, bias = (export.extra[f"projector.{number}.{kind}"].double() for kind in ("weight", "bias"))
            if number in (1, 4):
                values = F.gelu(F.layer_norm(values, values.shape[1:], weight, bias))
            else:
                values = F.linear(values, weight, bias)
        teacher = under(tensors("extrema/cases.safetensors"), f"{case}/teacher/")
        ours = {
            f"ca{last}": raw[:, 0],
            "instance_prenorm": raw[:, 0],
            "instance": tokens[:, 0],
            "distributed": tokens[:, 1:],
            "projection": values,
        }
        return [(ours[name], teacher[name]) for name in ours if name in teacher]

    options = ImportOptions(heads=facts("extrema/meta.json")[model]["heads"])
    return Example(importer="extrema", options=options, tree=tree, recorded=recorded)


EXAMPLES = {
    "dino": dino,
    "dino_student": dino_student_example,
    "dinov2": dinov2,
    "dinov3": dinov3,
    "dinov3_gated": dinov3_gated,
    "franca": franca,
    "ijepa": ijepa,
    "aimv2": aimv2,
    "capi": capi,
    "pixio": pixio,
    "ibot": ibot,
    "msn": msn,
    "mocov3": mocov3,
    "byol": byol,
    "mst": mst,
    "mae": mae,
    "can": can,
    "cae": cae,
    "cae_finetuned": cae_finetuned,
    "maskfeat": maskfeat,
    "maskfeat_finetuned": maskfeat_finetuned,
    "lut": lut,
    "moca": moca,
    "extrema": extrema,
    "simmim": simmim,
    "data2vec": lambda: relative("data2vec", "student0", "lm_head", "out0.student_masked", "model."),
    "beit": lambda: relative("beit", "model0", "lm_head", "out0.logits_masked", "model."),
}
