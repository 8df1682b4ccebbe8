"""DINO (Caron et al. 2021): the teacher's backbone, from a full checkpoint or a backbone file.

A file that holds only a ViT could also be iBOT's; say `dino:PATH`. The layers of the projection head before its
prototypes are kept as `projector.*`, for semi-supervised recipes that start from the first one. Positions are resized
by DINO's rule, which adds 0.1 to the sides of the grid (vision_transformer.py:174-194).
"""

from dataclasses import replace

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import LAYER, TRUNK_PREFIXES, is_bare_vit

SOURCE = "facebookresearch/dino 7c446df, main_dino.py:278-287"
BRANCHES = {"teacher": ("teacher.backbone.", *TRUNK_PREFIXES), "student": ("student.backbone.",)}
HEAD = r"((student|teacher|state_dict|model)\.)?head"
DROPPED = {
    rf"{HEAD}\.mlp\.\d\.{LAYER}": "projection head",
    rf"{HEAD}\.last_layer\.(weight_g|weight_v)": "projection head",
    rf"{HEAD}\.last_layer\.parametrizations\.weight\.original[01]": "projection head",
    r"dino_loss\.center": "loss state",
}


def recognise(file: ForeignFile) -> bool:
    has_teacher = "teacher.backbone.cls_token" in file.tensors
    is_other_method = any(
        name.startswith(("ibot_loss.", "student.decoder.", "student.backbone.mask")) or name.endswith("ls1.gamma")
        for name in file.tensors
    )
    return (has_teacher and not is_other_method) or is_bare_vit(file)


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, position_resize="bicubic_offset")
    head = replace(branch, prefix=branch.prefix.replace("backbone.", "head."))
    extra = head.take(r"(mlp\.\d\.(?:weight|bias|running_mean|running_var))", r"projector.\1")
    return Conversion(spec=spec, tensors=tensors, extra=extra, epochs=branch.epochs())  # main_dino.py:282 adds 1
