"""timm: any VisionTransformer or Beit by name (`timm:NAME`, `hf-hub:ID`, `local-dir:FOLDER`).

Nothing is downloaded unless the reference names the hub or a pretrained timm model.
"""

import hashlib
from pathlib import Path

import timm
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer

from checkpoints.importing import Branch, Conversion
from checkpoints.reading import ForeignFile
from checkpoints.spec import Preparation, ViTSpec

SOURCE = "huggingface/pytorch-image-models 1.0.31"
BRANCHES = {"model": ("",)}
DROPPED = {
    r"head\.(weight|bias)": "classifier",
    r"attn_pool\..*": "pooling head",
}


def recognise(file: ForeignFile) -> bool:
    return False  # timm models come by name, never as a bare file


def open_model(reference: str) -> ForeignFile:
    """Create the pretrained model that timm calls `reference` and lay out its tensors and facts like a file's."""
    try:
        model = timm.create_model(reference, pretrained=True)
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        raise ValueError(f"timm cannot load {reference!r}: {str(error).splitlines()[0]}") from error
    if type(model) not in (VisionTransformer, Beit):
        raise ValueError(f"{reference} is a {type(model).__name__}; timm's VisionTransformer and Beit can be imported")
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    facts = {"spec": _spec(model, reference), "preparation": _preparation(model)}
    facts |= {"licence": model.pretrained_cfg.get("license")}
    return ForeignFile(path=Path(reference), sha256=total.hexdigest(), tensors=tensors, facts=facts)


def convert(branch: Branch) -> Conversion:
    facts = branch.file.facts
    return Conversion(spec=facts["spec"], tensors=branch.take_trunk(), preparation=facts["preparation"])


def _spec(model: VisionTransformer | Beit, reference: str) -> ViTSpec:
    height, width = model.patch_embed.img_size
    patch, across = model.patch_embed.patch_size
    if height != width or patch != across:
        raise ValueError(f"{reference}: only square images and patches can be imported, not {height} x {width} px")
    block, beit = model.blocks[0], isinstance(model, Beit)
    normed = not isinstance(model.norm, torch.nn.Identity)
    pooled = not isinstance(model.fc_norm, torch.nn.Identity)
    class_token = model.cls_token is not None
    rows = 0 if model.pos_embed is None else model.pos_embed.shape[1] - model.patch_embed.num_patches
    relative = "none"
    if beit:
        relative = "shared" if model.rel_pos_bias is not None else "per_block"
    return ViTSpec(
        architecture=model.pretrained_cfg["architecture"],
        image_size=height,
        patch_size=patch,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        mlp_hidden=block.mlp.fc1.out_features,
        class_token=class_token,
        registers=getattr(model, "num_reg_tokens", 0),
        qkv_bias=block.attn.qkv.bias is not None or getattr(block.attn, "q_bias", None) is not None,
        layer_scale=getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma"),
        norm_eps=block.norm1.eps,
        position="none" if model.pos_embed is None else "learned",
        class_position=rows > 0,
        relative_position=relative,
        position_resize="relative_spline" if beit else "bicubic_antialias",
        final_norm="all" if normed else "pooled" if pooled else "none",
        pool="cls" if class_token and model.global_pool in ("token", "", "map") else "avg",
    )


def _preparation(model: VisionTransformer | Beit) -> Preparation:
    given = model.pretrained_cfg
    return Preparation(
        mean=tuple(given["mean"]), std=tuple(given["std"]), interpolation=given["interpolation"], crop=given["crop_pct"]
    )
