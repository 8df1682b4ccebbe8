"""SimMIM (Xie et al. 2022) with a ViT: shared relative position bias, layer scale, no absolute positions."""

from checkpoints.importing import BranchTensors, Conversion, relative_vit
from checkpoints.reading import ForeignFile

SOURCE = "microsoft/SimMIM d3e29bc, models/vision_transformer.py, models/simmim.py, utils.py:98-284"
BRANCHES = {"encoder": ("model.encoder.", "model.")}
DROPPED = {
    r"model\.encoder\.mask_token": "mask token",
    r"model\.decoder\.0\.(weight|bias)": "pixel head",
    r"model\.(encoder\.)?(rel_pos_bias|blocks\.\d+\.attn)\.relative_position_index": "made from the window size",
    r"model\.head\.(weight|bias)": "classifier",
}


def recognise(file: ForeignFile) -> bool:
    return "model.encoder.mask_token" in file.tensors and "model.decoder.0.weight" in file.tensors


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = relative_vit(branch, tensors)
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs(last=True))  # utils.py, save_checkpoint
