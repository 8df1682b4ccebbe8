"""MaskFeat (Wei et al. 2022) on images: SlowFast's ViT, of a pretraining file or a fine-tuned one.

The pretrained trunk has no norm of its own. The norm of its prediction head, which reads all tokens, becomes the
trunk's, so that frozen features are those that the head was trained on; fine-tuning puts a new one behind the mean of
the patches (slowfast/models/video_model_builder.py).
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
    names = [name.removeprefix("model_state.") for name in file.tensors if name.startswith("model_state.")]
    return CLASSIFIER in file.tensors and all(PLAIN.fullmatch(n) or n.startswith("head.projection.") for n in names)


def convert(branch: BranchTensors) -> Conversion:
    tuned = CLASSIFIER in branch.file.tensors
    tensors = branch.take_trunk({r"^norm\.": "fc_norm."} if tuned else {f"^{HEAD_NORM}": "norm."})
    spec = plain_vit(branch, tensors, position_resize="bilinear", pool="avg")
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs(last=True))  # utils/checkpoint.py:131
