"""LUT (supplementary S2) on MAE: the student encoder, which the authors evaluate, or the EMA teacher.

`head.*` and `predictor.*` are LUT's projector and predictor, never a classifier.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BLOCK, LAYER

SOURCE = "naver-ai/lut 4420a27, models/models_lut.py, util/misc.py:386-438, main_finetune.py:281-287"
BRANCHES = {"student": ("model.",), "teacher": ("model_ema.ema.", "model_ema.")}
NETWORK = r"(model|model_ema|model_ema\.ema)"
DROPPED = {
    rf"{NETWORK}\.mask_token": "mask token",
    rf"{NETWORK}\.decoder_{BLOCK}": "decoder",
    rf"{NETWORK}\.decoder_(embed|norm|pred)\.(weight|bias)": "decoder",
    rf"{NETWORK}\.decoder_pos_embed": "decoder",
    rf"{NETWORK}\.(head|predictor)\.\d+\.{LAYER}": "projector",
}
VIT = partial(plain_vit, position="sincos_column_first")
EPOCH = "last"  # util/misc.py, save_dict


def recognise(file: ForeignFile) -> bool:
    has_predictor = any(name.startswith("model.predictor.") for name in file.tensors)
    return has_predictor and "model.pos_embed" in file.tensors
