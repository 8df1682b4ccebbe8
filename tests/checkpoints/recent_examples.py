"""Tiny checkpoints of Franca, I-JEPA, AIMv2, Web-SSL and CAPI, laid out as their codes save them.

The weights are random; names and shapes are those of the official modules (each importer names their file); the
expected outputs are those of reference.py, written from the papers; CAPI's are recorded.
"""

from math import isqrt

import torch
from recorded_example import Example, Pairs, encode, network_of
from recordings import absent, facts, tensors, under
from reference import aimv2_tokens, plain_vit_tokens
from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.fingerprint import synthetic_image
from checkpoints.import_options import ImportOptions
from checkpoints.positions import sincos_positions

WIDTH, HEADS, PATCH, HIDDEN, GRID = 32, 2, 4, 48, 4
IMAGES = torch.cat([synthetic_image((16, 16)), synthetic_image((16, 16)).flip(-1)]) - 0.5
TABLE = sincos_positions((GRID, GRID), WIDTH, "column")
OPTIONS = ImportOptions(heads=HEADS)


def draw_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors; scales (norms, layer scale) are around one."""
    generator = torch.Generator().manual_seed(seed)
    scales = ("norm1.weight", "norm2.weight", "norm.weight", "norm_1.weight", "norm_2.weight", "gamma")
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + float(name.endswith(scales))
        for name, shape in shapes.items()
    }


def layer(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def vit(
    gated: bool = False, scaled: bool = False, class_token: bool = True, seed: int = 0, depth: int = 1
) -> dict[str, Tensor]:
    """A plain ViT; gated, scaled: DINOv2's SwiGLU and layer scale."""
    shapes = {"pos_embed": (1, GRID**2 + class_token, WIDTH), "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH)}
    shapes |= {"patch_embed.proj.bias": (WIDTH,), **norm("norm")} | (
        {"cls_token": (1, 1, WIDTH)} if class_token else {}
    )
    for block in (f"blocks.{number}" for number in range(depth)):
        shapes |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        shapes |= layer(f"{block}.attn.qkv", 3 * WIDTH, WIDTH) | layer(f"{block}.attn.proj", WIDTH, WIDTH)
        first, last = ("w12", "w3") if gated else ("fc1", "fc2")
        shapes |= layer(f"{block}.mlp.{first}", HIDDEN * (1 + gated), WIDTH)
        shapes |= layer(f"{block}.mlp.{last}", WIDTH, HIDDEN)
        shapes |= {f"{block}.ls{part}.gamma": (WIDTH,) for part in (1, 2) if scaled}
    return draw_tensors(shapes, seed)


def under_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def plain(importer: str, trunk: dict[str, Tensor], tree: dict[str, Tensor], **settings) -> Example:
    """A file whose network is `trunk`, by the names of a plain ViT."""

    def recorded(export: ViTExport) -> Pairs:
        return [(encode(export, IMAGES), plain_vit_tokens(trunk, "", HEADS, IMAGES))]

    return Example(importer=importer, options=OPTIONS, tree=tree, recorded=recorded, **settings)


def franca() -> Example:
    """As scripts/prepare_release_checkpoints.py writes it, with the RASA head that trainings keep."""
    trunk = vit(gated=True, scaled=True)
    head = draw_tensors({f"rasa_head.{name}.weight": (2, WIDTH) for name in ("pos_pred", "pre_pos_layers.0")})
    return plain("franca", trunk, under_prefix(trunk | head | draw_tensors({"mask_token": (1, WIDTH)}), "teacher."))


def web_dino() -> Example:
    """The plain state dict, blocks in chunks for FSDP as trainings have them (vision_transformer.py, block_chunks)."""
    trunk = vit(gated=True, scaled=True, depth=2)
    tree = {
        name.replace("blocks.1.", "blocks.1.1.").replace("blocks.0.", "blocks.0.0."): t for name, t in trunk.items()
    }
    return plain("dinov2", trunk, tree | draw_tensors({"mask_token": (1, WIDTH)}))


def web_mae() -> Example:
    """timm's model with its unused classifier (mae/mae.py)."""
    trunk = vit() | {"pos_embed": sincos_positions((GRID, GRID), WIDTH, "column", prefix=1)}
    return plain("mae", trunk, trunk | draw_tensors(layer("head", 10, WIDTH)))


def ijepa() -> Example:
    trunk = vit(class_token=False) | {"pos_embed": TABLE}
    tree = under_prefix(trunk, "target_encoder.") | under_prefix(vit(class_token=False, seed=1), "encoder.")
    tree |= {"encoder.pos_embed": TABLE, "predictor.predictor_pos_embed": TABLE}
    inner = {
        name.replace("blocks.", "predictor_blocks."): t for name, t in vit().items() if name.startswith("blocks.0.")
    }
    shapes = {"mask_token": (1, 1, WIDTH), **norm("predictor_norm"), **layer("predictor_proj", WIDTH, WIDTH)}
    tree |= under_prefix(inner | draw_tensors(shapes | layer("predictor_embed", WIDTH, WIDTH)), "predictor.")
    return plain("ijepa", trunk, tree)


def aimv2_tree() -> dict[str, Tensor]:
    shapes = {
        "preprocessor.pos_embed": (1, GRID**2, WIDTH),
        "preprocessor.patchifier.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "preprocessor.patchifier.proj.bias": (WIDTH,),
        "preprocessor.patchifier.norm.weight": (WIDTH,),
        "trunk.post_trunk_norm.weight": (WIDTH,),
    }
    for block in ("trunk.blocks.0", "trunk.blocks.1"):
        shapes |= {f"{block}.norm_{part}.weight": (WIDTH,) for part in (1, 2)}
        shapes |= {f"{block}.attn.qkv.weight": (3 * WIDTH, WIDTH), f"{block}.attn.proj.weight": (WIDTH, WIDTH)}
        shapes |= {f"{block}.mlp.fc{part}.weight": (HIDDEN, WIDTH) for part in (1, 3)}
        shapes |= {f"{block}.mlp.fc2.weight": (WIDTH, HIDDEN)}
    return draw_tensors(shapes)


def aimv2() -> Example:
    """The encoder of a LiT file beside parts that are dropped."""
    tree = aimv2_tree()
    head = {"head.cls_token": (1, 1, WIDTH), "head.k.weight": (WIDTH, WIDTH), **layer("head.linear", WIDTH, WIDTH)}
    other_parts = draw_tensors(
        {"text_encoder.trunk.post_trunk_norm.weight": (8,), "image_projector.weight": (8, WIDTH)}
    )

    def recorded(export: ViTExport) -> Pairs:
        table = tree["preprocessor.pos_embed"]
        return [(encode(export, IMAGES), aimv2_tokens(tree, "", HEADS, IMAGES, table))]

    lit_file = (
        under_prefix(tree | draw_tensors(head), "image_encoder.") | other_parts | {"log_logit_scale": torch.tensor(2.0)}
    )
    return Example(importer="aimv2", options=OPTIONS, tree=lit_file, recorded=recorded)


def aimv2_native() -> Example:
    """Without a position table: positions are computed for the requested image size."""
    tree = {name: tensor for name, tensor in aimv2_tree().items() if name != "preprocessor.pos_embed"}

    def recorded(export: ViTExport) -> Pairs:
        return [(encode(export, IMAGES), aimv2_tokens(tree, "", HEADS, IMAGES, TABLE))]

    options = ImportOptions(heads=HEADS, image_size=PATCH * isqrt(TABLE.shape[1]))
    return Example(importer="aimv2", options=options, tree=tree, recorded=recorded)


def pixio() -> Example:
    """The state dict of the release."""
    record, config = tensors("pixio/golden.safetensors"), facts("pixio/config.json")

    def recorded(export: ViTExport) -> Pairs:
        pairs = []
        for size in ("native", "larger"):
            images, count = record[f"{size}/images"], config["n_cls_tokens"]
            class_tokens, patches = encode(export, images).tensor_split([count], dim=1)
            pairs += [(class_tokens, record[f"{size}/cls_tokens_norm"]), (patches, record[f"{size}/patch_tokens_norm"])]
            raw = network_of(export)(images.double(), layers=(0, 1), norm=False)
            pairs.append((raw[0][:, count:], record[f"{size}/block0_patch_tokens"]))
            pairs.append((export.spec.class_feature(raw[1]), record[f"{size}/knn_feature"]))
        return pairs

    options = ImportOptions(heads=config["num_heads"])
    return Example(importer="pixio", options=options, tree=under(record, "model/"), recorded=recorded)


def capi() -> Example:
    """As train_capi.py writes it for evaluations: student or teacher, with the head."""
    cases = facts("capi/config.json")["cases"]
    case = next((name for name, c in cases.items() if c["reg_coords"] == "edge" and c["scale_reg"]), None)
    config = cases[case or absent("registers where released models have them")]
    record = under(tensors("capi/golden.safetensors"), f"{case}/")
    images = record[f"step{config['steps'] - 1}/images"][:2].double()

    def recorded(export: ViTExport) -> Pairs:
        registers, patches = encode(export, images).tensor_split([config["registers"]], dim=1)
        return [(registers, record["eval/registers"]), (patches, record["eval/map"].flatten(1, 2))]

    options = ImportOptions(image_size=config["img"])
    return Example(importer="capi", options=options, tree=under(record, "student_end/"), recorded=recorded)
