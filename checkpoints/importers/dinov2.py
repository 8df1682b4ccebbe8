"""DINOv2 (Oquab et al. 2024; registers: Darcet et al. 2024): backbone files and teacher checkpoints; also Web-DINO.

Positions are resized with DINO's offset of 0.1, those of models with registers to the exact size with antialiasing
(hub/backbones.py, interpolate_offset and interpolate_antialias). In models with registers timm has positions only for
patches, so that of the class token is added to the token here.
"""

from dataclasses import replace

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import ANY_PREFIX, TRUNK_PREFIXES, is_bare_vit

SOURCE = "facebookresearch/dinov2, models/vision_transformer.py, hub/backbones.py; facebookresearch/webssl, dinov2/"
BRANCHES = {"teacher": ("teacher.backbone.", *TRUNK_PREFIXES), "student": ("student.backbone.",)}
DROPPED = {
    rf"((student|teacher)\.backbone\.|{ANY_PREFIX})mask_token": "mask token",
    r"(student|teacher)\.(dino_head|ibot_head)\..*": "projection heads",
}
RENAMES = {
    r"^blocks\.\d+\.(\d+)\.": r"blocks.\1.",  # training groups blocks into chunks for FSDP
    r"\.mlp\.w12\.": ".mlp.fc1.",  # SwiGLU of the giant model
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^register_tokens$": "reg_token",
}


def recognise(file: ForeignFile) -> bool:
    is_dinov3 = any(name.endswith(("rope_embed.periods", "storage_tokens")) for name in file.tensors)
    if is_dinov3 or is_franca(file):
        return False
    has_layer_scale = any(name.endswith("ls1.gamma") for name in file.tensors)
    has_own_tokens = any(name.endswith(("mask_token", "register_tokens")) for name in file.tensors)
    has_teacher = "teacher.backbone.cls_token" in file.tensors
    return (has_layer_scale and (has_own_tokens or has_teacher)) or is_bare_vit(file, scaled=True)


def is_franca(file: ForeignFile) -> bool:
    """Whether a file in DINOv2's layout is Franca's: it has a trunk directly under `teacher`, or a RASA head."""
    has_trunk = {"teacher.cls_token", "teacher.blocks.0.ls1.gamma"} <= file.tensors.keys()
    has_chunked_trunk = {"teacher.cls_token", "teacher.blocks.0.0.ls1.gamma"} <= file.tensors.keys()
    return has_trunk or has_chunked_trunk or any(".rasa_head." in name for name in file.tensors)


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    is_giant = any(".mlp.w12." in name for name in branch.names)
    spec = plain_vit(
        branch,
        tensors,
        architecture="vit_giant_patch14_dinov2" if is_giant else "vit_base_patch14_dinov2",
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
