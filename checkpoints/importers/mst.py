"""MST (Li et al. 2021): the teacher's backbone, from this project's training file or a DINO-style one.

No official code was published; the DINO-style layout is DINO's with a `decoder` and a mask token on the student.
"""

from checkpoints.importing import Branch, Conversion, own_vit, plain_vit
from checkpoints.reading import ForeignFile

SOURCE = "MST appendix, algorithm 1, in this project's layout or that of facebookresearch/dino"
BRANCHES = {
    "teacher": ("model.teacher.trunk.", "teacher.backbone."),
    "student": ("model.student.trunk.", "student.backbone."),
}
DROPPED = {
    r"(model\.)?(student|teacher)\.head\..*": "projection head",
    r"(model\.)?(student\.)?decoder\..*": "image decoder",
    r"(model\.)?(student\.)?(mask_token|masked_embed)": "mask token",
    r"(model|dino_loss|mst_loss)\.center": "loss state",
}


def recognise(file: ForeignFile) -> bool:
    own = file.facts.get("method") == "mst" and "model.teacher.trunk.cls_token" in file.tensors
    decoder = any(name.startswith(("student.decoder.", "decoder.")) for name in file.tensors)
    return own or (decoder and "teacher.backbone.cls_token" in file.tensors)


def convert(branch: Branch) -> Conversion:
    tensors = branch.take_trunk()
    own = branch.prefix.startswith("model.")
    spec = own_vit(branch) if own else plain_vit(branch, tensors, position_resize="bicubic_offset")
    return Conversion(spec=spec, tensors=tensors)
