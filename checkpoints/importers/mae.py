"""MAE (He et al. 2022): the encoder of a release, a pretraining file or a fine-tuned file.

The published encoder files hold nothing but a ViT under `model`, just as MOCA's extracted teachers do; say `mae:PATH`.
"""

from checkpoints.importing import BLOCK, Branch, Conversion, plain_vit
from checkpoints.reading import ForeignFile

SOURCE = "facebookresearch/mae efb2a80, models_mae.py, util/misc.py:302"
BRANCHES = {"encoder": ("model.",)}
DROPPED = {
    r"model\.mask_token": "mask token",
    rf"model\.decoder_{BLOCK}": "decoder",
    r"model\.decoder_(embed|norm|pred)\.(weight|bias)": "decoder",
    r"model\.decoder_pos_embed": "decoder",
    r"model\.head\.(weight|bias)": "classifier",
}


def recognise(file: ForeignFile) -> bool:
    names = file.tensors
    others = ("model.predictor.", "model.encoder.", "model.lm_head.", "model.rel_pos_bias.")
    return "model.pos_embed" in names and not any(name.startswith(others) for name in names)


def convert(branch: Branch) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, position="sincos_column_first")
    return Conversion(spec=spec, tensors=tensors)
