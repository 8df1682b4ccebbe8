"""CAN (Mishra et al. 2022) in its first author's PyTorch code: MAE's layout with two more networks.

The weights of the published numbers were never released. A file without the two networks, such as a fine-tuned one,
looks like MAE's; say `can:PATH`.
"""

from checkpoints.importers import mae
from checkpoints.reading import ForeignFile

SOURCE = "shlokk/mae-contrastive 12d2ba5, models_mae.py, util/misc.py"
BRANCHES = mae.BRANCHES
DROPPED = mae.DROPPED | {
    r"model\.projection_head\.[02]\.(weight|bias)": "projection head",
    r"model\.noise_pe_mlp\.[02]\.(weight|bias)": "embedding of the noise level",
}
VIT, EPOCH = mae.VIT, mae.EPOCH


def recognise(file: ForeignFile) -> bool:
    return {"model.pos_embed", "model.decoder_pos_embed", "model.projection_head.0.weight"} <= {*file.tensors}
