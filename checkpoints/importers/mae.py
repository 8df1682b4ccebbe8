"""MAE (He et al. 2022): the encoder of a release, a pretraining file or a fine-tuned file; also Web-MAE.

The published encoder files hold only a ViT under `model`, as MOCA's extracted teachers do; say `mae:PATH`. Files of
Web-MAE (facebookresearch/webssl, mae/mae.py) are those of timm's model, with an untrained classifier.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import (
    ANY_PREFIX,
    BLOCK,
    CLASSIFIER,
    TRUNK_PREFIXES,
    is_bare_vit,
    is_plain,
    position_kind,
    trunk_of,
)

SOURCE = "facebookresearch/mae efb2a80, models_mae.py, util/misc.py:302"
BRANCHES = {"encoder": TRUNK_PREFIXES}
DROPPED = {
    r"model\.mask_token": "mask token",
    rf"model\.decoder_{BLOCK}": "decoder",
    r"model\.decoder_(embed|norm|pred)\.(weight|bias)": "decoder",
    r"model\.decoder_pos_embed": "decoder",
    rf"{ANY_PREFIX}{CLASSIFIER}": "classifier",
}
VIT = partial(plain_vit, position="sincos_column_first")
EPOCH = "last"  # util/misc.py, save_model


def recognise(file: ForeignFile) -> bool:
    has_decoder = {"model.pos_embed", "model.decoder_pos_embed"} <= {*file.tensors}
    if has_decoder or is_bare_vit(file, "sincos_column_first"):
        other_methods = ("model.predictor.", "model.projection_head.")  # LUT and CAN
        return not any(name.startswith(other_methods) for name in file.tensors)
    trunk = trunk_of(file, rf"{CLASSIFIER}|optimizer\..*")  # of a fine-tuned file
    return ("fc_norm.weight" in trunk or is_plain(trunk)) and position_kind(trunk) == "sincos_column_first"
