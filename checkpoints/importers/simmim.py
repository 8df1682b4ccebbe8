"""SimMIM (Xie et al. 2022) with a ViT: shared relative position bias, layer scale, no absolute positions."""

from checkpoints.importing import relative_vit
from checkpoints.reading import ForeignFile

SOURCE = "microsoft/SimMIM d3e29bc, models/vision_transformer.py, models/simmim.py, utils.py:98-284"
BRANCHES = {"encoder": ("model.encoder.", "model.")}
DROPPED = {
    r"model\.encoder\.mask_token": "mask token",
    r"model\.decoder\.0\.(weight|bias)": "pixel head",
    r"model\.(encoder\.)?(rel_pos_bias|blocks\.\d+\.attn)\.relative_position_index": "made from the window size",
    r"model\.head\.(weight|bias)": "classifier",
}
VIT = relative_vit
EPOCH = "last"  # utils.py, save_checkpoint


def recognise(file: ForeignFile) -> bool:
    return "model.encoder.mask_token" in file.tensors and "model.decoder.0.weight" in file.tensors
