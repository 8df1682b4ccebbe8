"""Examples of CAN, CAE and MaskFeat, pretrained and fine-tuned."""

from collections.abc import Callable

import torch
from recorded_example import Example, Pairs, masked_latent, network_of, visible
from recordings import depth_of, facts, tensors, under
from torch import Tensor
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.vit import ViT
from pretrain.parts.masking import with_mask_tokens


def can() -> Example:
    record, config = tensors("can/can_step.safetensors"), facts("can/can_step.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        level = config["std"] * record["in0.level"].double().view(-1, 1, 1, 1)
        images = torch.cat([record["in0.view1"], record["in0.view2"]]).double() + level * record["in0.gauss"]
        keep = visible(record["in0.mask_noise"], config["mask_ratio"])
        return [(masked_latent(export, images, keep), record["out0.latent_before_noise_embedding"])]

    tree, options = under(record, "model0.", "model."), ImportOptions(heads=config["heads"])
    return Example(importer="can", options=options, tree=tree, recorded=recorded)


def cae() -> Example:
    """Linear probe and pretraining encoder of the official code on the same file."""
    record, config = tensors("cae/cae_encoder.safetensors"), facts("cae/cae_encoder.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        masked = record["in.mask"].flatten(1).bool()
        keep = (~masked).nonzero()[:, 1].reshape(len(masked), -1)
        pairs = [(masked_latent(export, record["in.image"], keep), record["masked.out.encoder"])]
        return pairs + blocks_and_outputs(export, record, "probe", lambda vit, raw: {"norm": vit.trunk.norm(raw)})

    tree, options = under(record, "ckpt.", "model."), ImportOptions(heads=config["heads"])
    return Example(importer="cae", options=options, tree=tree, recorded=recorded)


def cae_finetuned() -> Example:
    """The official fine-tuned model: the norm after the mean of the patches, relative positions in every block."""
    record = tensors("cae/cae_encoder.safetensors")
    trunk = {
        name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: tensor
        for name, tensor in under(record, "ckpt.encoder.").items()
    }
    for number in range(depth_of(trunk)):
        trunk[f"blocks.{number}.attn.relative_position_bias_table"] = record[f"finetune_rel.table{number}"]
        trunk[f"blocks.{number}.attn.relative_position_index"] = record["finetune_rel.index"]
    tree = under(trunk, "", "model.") | under(record, "finetune.head.", "model.head.")

    def recorded(export: ViTExport) -> Pairs:
        return blocks_and_outputs(export, record, "finetune_rel", pooled_features)

    return Example(importer="cae", options=ImportOptions(), tree=tree, recorded=recorded)


def maskfeat() -> Example:
    record, config = tensors("maskfeat/maskfeat_encoder.safetensors"), facts("maskfeat/maskfeat_encoder.safetensors")

    def recorded(export: ViTExport) -> Pairs:
        pairs = blocks_and_outputs(export, record, "full", lambda vit, raw: {"pred_head_norm": vit.trunk.norm(raw)})
        vit, masked = network_of(export), record["in.mask"].flatten(1).bool()
        patches = with_mask_tokens(vit.project(record["in.image"].double()), masked, record["ckpt.mask_token"])
        tokens = vit.encode(vit.add_positions(patches, vit.spec.grid))[0]
        head = (record[f"ckpt.pred_head.projections.0.{kind}"].double() for kind in ("weight", "bias"))
        return [*pairs, (F.linear(tokens[:, 1:], *head), record["masked.out.pred_all"])]

    tree, options = under(record, "ckpt.", "model_state."), ImportOptions(heads=config["heads"])
    return Example(importer="maskfeat", options=options, tree=tree, recorded=recorded)


def maskfeat_finetuned() -> Example:
    """As SlowFast saves its MViT: the pretrained trunk, a new norm and a classifier."""
    record, config = tensors("maskfeat/maskfeat_encoder.safetensors"), facts("maskfeat/maskfeat_encoder.safetensors")
    trunk_names = (name for name in under(record, "ckpt.") if not name.startswith(("mask_token", "pred_head", "hogs")))
    tree = {f"model_state.{name}": record[f"ckpt.{name}"] for name in trunk_names}
    for part in ("norm", "head"):
        tree |= under(record, f"finetune.{part}.", f"model_state.{part}.")

    def recorded(export: ViTExport) -> Pairs:
        return blocks_and_outputs(export, record, "finetune", pooled_features)

    options = ImportOptions(heads=config["heads"])
    return Example(importer="maskfeat", options=options, tree=tree, recorded=recorded)


def pooled_features(vit: ViT, raw: Tensor) -> dict[str, Tensor]:
    return {"features": vit.trunk.fc_norm(raw[:, 1:].mean(dim=1))}


def blocks_and_outputs(
    export: ViTExport, record: dict[str, Tensor], case: str, extra_outputs: Callable[[ViT, Tensor], dict[str, Tensor]]
) -> Pairs:
    """Every block's output on unmasked images and `extra_outputs` of the last one, paired with those of a case."""
    vit = network_of(export)
    outputs = vit(record["in.image"].double(), layers=range(vit.spec.depth), norm=False)
    ours = {f"block{number}": tokens for number, tokens in enumerate(outputs)} | extra_outputs(vit, outputs[-1])
    return [(tokens, record[f"{case}.out.{name}"]) for name, tokens in ours.items()]
