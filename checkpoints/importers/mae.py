"""MAE (He et al. 2022): the encoder of a release, a pretraining file or a fine-tuned file; Web-MAE's too.

The published encoder files hold nothing but a ViT under `model`, just as MOCA's extracted teachers do; say `mae:PATH`.
Web-MAE's (facebookresearch/webssl, mae/mae.py) are those of timm's model, with a classifier that nothing trained.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BARE, BLOCK, CLASSIFIER, WITHIN, is_bare_vit, is_plain, kind_in, trunk_of

SOURCE = "facebookresearch/mae efb2a80, models_mae.py, util/misc.py:302"
BRANCHES = {"encoder": BARE}
DROPPED = {
    r"model\.mask_token": "mask token",
    rf"model\.decoder_{BLOCK}": "decoder",
    r"model\.decoder_(embed|norm|pred)\.(weight|bias)": "decoder",
    r"model\.decoder_pos_embed": "decoder",
    rf"{WITHIN}{CLASSIFIER}": "classifier",
}
VIT = partial(plain_vit, position="sincos_column_first")
EPOCH = "last"  # util/misc.py, save_model


def recognise(file: ForeignFile) -> bool:
    names = file.tensors
    full = {"model.pos_embed", "model.decoder_pos_embed"} <= {*names}
    if full or is_bare_vit(file, "sincos_column_first"):
        other_methods = ("model.predictor.", "model.projection_head.")  # LUT's and CAN's
        return not any(name.startswith(other_methods) for name in names)
    tuned = trunk_of(file, rf"{CLASSIFIER}|optimizer\..*")
    return ("fc_norm.weight" in tuned or is_plain(tuned)) and kind_in(tuned) == "sincos_column_first"
