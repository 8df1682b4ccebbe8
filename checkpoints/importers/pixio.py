"""Pixio (Yang et al. 2025): MAE's encoder with several class tokens, 8 in all releases, each with a position.

Their mean is the feature of an image, as in the official k-NN (evaluation/eval_knn.py:95) and in transformers' pooler.
An export stores the class tokens after the first as registers.
"""

from checkpoints.importing import BranchTensors, Conversion, plain_vit, split_class_tokens
from checkpoints.reading import ForeignFile
from checkpoints.recognition import TRUNK_PREFIXES, has_class_tokens, position_kind, trunk_of

SOURCE = "facebookresearch/pixio b83555d, pixio/pixio.py"
BRANCHES = {"encoder": TRUNK_PREFIXES}
DROPPED: dict[str, str] = {}
HEADS = {768: 12, 1024: 16, 1280: 16, 1536: 24, 3072: 32}  # width -> heads, pixio.py:126-214


def recognise(file: ForeignFile) -> bool:
    return has_class_tokens(trunk_of(file, r"optimizer\..*"))


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    class_tokens = split_class_tokens(branch, tensors)
    spec = plain_vit(branch, tensors, HEADS, position=position_kind(tensors), **class_tokens)
    return Conversion(spec=spec, tensors=tensors)
