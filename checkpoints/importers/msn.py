"""MSN (Assran et al. 2022): the target encoder. MSN's own probes read the class token before the final norm."""

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import LAYER

SOURCE = "facebookresearch/msn 4388dc1, src/msn_train.py:284-295, src/deit.py:266-305"
BRANCHES = {"target": ("target_encoder.",), "anchor": ("encoder.",)}
DROPPED = {
    rf"(target_encoder|encoder)\.fc\.(fc[123]|bn[12])\.{LAYER}": "projection head",
    r"prototypes": "prototypes",
}


def recognise(file: ForeignFile) -> bool:
    return "target_encoder.cls_token" in file.tensors


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(
        branch, tensors, position_resize="bicubic"
    )  # by the square root of the patch ratio: the exact size
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs())  # src/msn_train.py adds 1
