"""MST (Li et al. 2021): the teacher's backbone, from a file in DINO's layout with a decoder and a mask token.

There is no official code. Files of other implementations are assumed to have the layout of DINO, on which MST builds;
`bench pretrain mst` writes exports.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile

SOURCE = "MST appendix, algorithm 1, in the layout of facebookresearch/dino 7c446df"
BRANCHES = {"teacher": ("teacher.backbone.",), "student": ("student.backbone.",)}
DROPPED = {
    r"(student|teacher)\.head\..*": "projection head",
    r"(student\.)?decoder\..*": "image decoder",
    r"(student\.)?(mask_token|masked_embed)": "mask token",
    r"(dino_loss|mst_loss)\.center": "loss state",
}
VIT = partial(plain_vit, position_resize="bicubic_offset")
EPOCH = "finished"  # as DINO counts


def recognise(file: ForeignFile) -> bool:
    has_decoder = any(name.startswith(("student.decoder.", "decoder.")) for name in file.tensors)
    return has_decoder and "teacher.backbone.cls_token" in file.tensors
