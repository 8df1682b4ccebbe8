"""DINO (Caron et al. 2021): the teacher's backbone, from a full checkpoint or a backbone file.

A file that holds nothing but a ViT could be iBOT's as well; say `dino:PATH`.
Positions for other sizes follow DINO's own rule, which adds 0.1 to the grid (vision_transformer.py:174-194).
"""

from checkpoints.importing import LAYER, Branch, Conversion, is_bare_vit, plain_vit
from checkpoints.reading import ForeignFile

SOURCE = "facebookresearch/dino 7c446df, main_dino.py:278-287"
BRANCHES = {"teacher": ("teacher.backbone.", "", "state_dict."), "student": ("student.backbone.",)}
DROPPED = {
    rf"(student|teacher)\.head\.mlp\.\d\.{LAYER}": "projection head",
    r"(student|teacher)\.head\.last_layer\.(weight_g|weight_v)": "projection head",
    r"(student|teacher)\.head\.last_layer\.parametrizations\.weight\.original[01]": "projection head",
    r"dino_loss\.center": "loss state",
}


def recognise(file: ForeignFile) -> bool:
    full = "teacher.backbone.cls_token" in file.tensors and not any(
        name.startswith(("ibot_loss.", "student.decoder.", "student.backbone.mask")) for name in file.tensors
    )
    return full or is_bare_vit(file)


def convert(branch: Branch) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, position_resize="bicubic_offset")
    return Conversion(spec=spec, tensors=tensors)
