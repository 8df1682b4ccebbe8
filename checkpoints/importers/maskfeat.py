"""MaskFeat (Wei et al. 2022) on images: SlowFast's ViT from a pretraining file or a fine-tuned file.

The pretrained trunk has no final norm. That of its prediction head, which reads all tokens, takes this role here, so
that frozen features are the input of the trained head. Fine-tuning adds a new norm after the mean of the patches
(slowfast/models/video_model_builder.py).
"""

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import PLAIN

SOURCE = "facebookresearch/SlowFast 287ec00, slowfast/models/masked.py, slowfast/utils/checkpoint.py:113-145"
BRANCHES = {"encoder": ("model_state.",)}
HEAD_NORM = r"pred_head\.transforms\.0\.0\."
DROPPED = {
    r"model_state\.mask_token": "mask token",
    r"model_state\.pred_head\.projections\.0\.(weight|bias)": "prediction head",
    r"model_state\.hogs\.0\.weight_[xy]": "filters of the HOG features",
    r"model_state\.head\.projection\.(weight|bias)": "classifier",
}
CLASSIFIER = "model_state.head.projection.weight"


def recognise(file: ForeignFile) -> bool:
    if "model_state.pos_embed" not in file.tensors:
        return False
    if "model_state.pred_head.transforms.0.0.weight" in file.tensors:
        return "model_state.decoder_embed.weight" not in file.tensors  # MAE's in the same code
    if CLASSIFIER not in file.tensors:
        return False
    names = [name.removeprefix("model_state.") for name in file.tensors if name.startswith("model_state.")]
    return all(PLAIN.fullmatch(name) or name.startswith("head.projection.") for name in names)


def convert(branch: BranchTensors) -> Conversion:
    is_fine_tuned = CLASSIFIER in branch.file.tensors
    tensors = branch.take_trunk({r"^norm\.": "fc_norm."} if is_fine_tuned else {f"^{HEAD_NORM}": "norm."})
    spec = plain_vit(branch, tensors, position_resize="bilinear", pool="avg")
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs(last=True))  # utils/checkpoint.py:131
