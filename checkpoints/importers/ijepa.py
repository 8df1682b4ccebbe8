"""I-JEPA (Assran et al. 2023): the target encoder. The paper evaluates the mean of its patch tokens.

It has no class token, and MAE's fixed sine-cosine positions. The official code for resizing positions mistakes the
first patch for a class token and fails on other grids, so MAE's rule is used.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BLOCK

SOURCE = "facebookresearch/ijepa 52c1ae9, src/models/vision_transformer.py, src/train.py"
BRANCHES = {"target": ("target_encoder.",), "context": ("encoder.",)}
DROPPED = {
    rf"predictor\.predictor_{BLOCK}": "predictor",
    r"predictor\.predictor_(embed|norm|proj)\.(weight|bias)": "predictor",
    r"predictor\.(predictor_pos_embed|mask_token)": "predictor",
}
VIT = partial(plain_vit, class_token=False, class_position=False, position="sincos_column_first", pool="avg")
EPOCH = "finished"  # src/train.py, save_checkpoint(epoch + 1)


def recognise(file: ForeignFile) -> bool:
    names = file.tensors
    return "target_encoder.pos_embed" in names and "predictor.predictor_pos_embed" in names
