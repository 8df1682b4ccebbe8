"""DINOv2 (Oquab et al. 2024; registers: Darcet et al. 2024): backbone files and teacher checkpoints; Web-DINO's too.

Without registers positions are resized with DINO's +0.1; with them exactly and antialiased (hub/backbones.py,
interpolate_offset and interpolate_antialias). Register models get their class token's position added here, as timm
keeps positions for patches only.
"""

from dataclasses import replace

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BARE, WITHIN, is_bare_vit

SOURCE = "facebookresearch/dinov2, models/vision_transformer.py, hub/backbones.py; facebookresearch/webssl, dinov2/"
BRANCHES = {"teacher": ("teacher.backbone.", *BARE), "student": ("student.backbone.",)}
DROPPED = {
    rf"((student|teacher)\.backbone\.|{WITHIN})mask_token": "mask token",
    r"(student|teacher)\.(dino_head|ibot_head)\..*": "projection heads",
}
RENAMES = {
    r"^blocks\.\d+\.(\d+)\.": r"blocks.\1.",  # training groups blocks into chunks for FSDP
    r"\.mlp\.w12\.": ".mlp.fc1.",  # SwiGLU of the giant model
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^register_tokens$": "reg_token",
}


def recognise(file: ForeignFile) -> bool:
    scaled = any(name.endswith("ls1.gamma") for name in file.tensors)
    own = any(name.endswith(("mask_token", "register_tokens")) for name in file.tensors)
    full = "teacher.backbone.cls_token" in file.tensors
    if any(name.endswith(("rope_embed.periods", "storage_tokens")) for name in file.tensors):
        return False  # DINOv3's
    if is_of_franca(file):
        return False
    return (scaled and (own or full)) or is_bare_vit(file, scaled=True)


def is_of_franca(file: ForeignFile) -> bool:
    """Whether a file of this layout has the marks of Franca's: a bare trunk under `teacher`, or a RASA head."""
    bare = {"teacher.cls_token", "teacher.blocks.0.ls1.gamma"} <= file.tensors.keys()
    chunked = {"teacher.cls_token", "teacher.blocks.0.0.ls1.gamma"} <= file.tensors.keys()
    return bare or chunked or any(".rasa_head." in name for name in file.tensors)


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    giant = any(".mlp.w12." in name for name in branch.names)
    spec = plain_vit(
        branch,
        tensors,
        architecture="vit_giant_patch14_dinov2" if giant else "vit_base_patch14_dinov2",
        layer_scale=True,
        position_resize="bicubic_offset",
    )
    if "reg_token" in tensors:
        spec = replace(
            spec, registers=tensors["reg_token"].shape[1], class_position=False, position_resize="bicubic_antialias"
        )
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    return Conversion(spec=spec, tensors=tensors)
