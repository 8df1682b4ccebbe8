"""data2vec for vision (Baevski et al. 2022): the student encoder or its EMA teacher; also fine-tuned files.

Pretraining used ImageNet's statistics (README's --imagenet_default_mean_and_std).
"""

from checkpoints.importing import relative_vit
from checkpoints.reading import ForeignFile

SOURCE = "facebookresearch/data2vec_vision af9a363, beit/modeling_cyclical.py, engine_for_cyclical.py"
BRANCHES = {"student": ("model.", ""), "teacher": ("model_ema.",)}
NETWORK = r"((model|model_ema)\.)?"
DROPPED = {
    rf"{NETWORK}mask_token": "mask token",
    rf"{NETWORK}lm_head\.(weight|bias)": "prediction head",
    rf"{NETWORK}head\.(weight|bias)": "classifier",
    rf"{NETWORK}(rel_pos_bias|blocks\.\d+\.attn)\.relative_position_index": "made from the window size",
}
VIT = relative_vit
EPOCH = "last"  # beit/utils.py, save_model


def recognise(file: ForeignFile) -> bool:
    head = file.tensors.get("model.lm_head.weight")
    return head is not None and head.ndim == 2 and head.shape[0] == head.shape[1]  # predicts features; BEiT token ids
