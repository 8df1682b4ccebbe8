"""I-JEPA (Assran et al. 2023): the target encoder, of whose patch tokens the paper evaluates the mean.

No class token; fixed sines and cosines, as MAE's. The official resizing of positions takes the first patch for a class
token and fails on other grids, so their rule is MAE's.
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
