"""iBOT (Zhou et al. 2022): the teacher's backbone, from a full checkpoint or an extracted `state_dict`.

The teacher's projection head is kept as `projector.*` for the semi-supervised recipe, which fine-tunes from its first
layer (evaluation/semi_supervised/eval_cls.py:207-256).
"""

from checkpoints.importers import dino
from checkpoints.reading import ForeignFile
from checkpoints.recognition import ANY_PREFIX, LAYER, TRUNK_PREFIXES, is_bare_vit

SOURCE = "bytedance/ibot da316d8, main_ibot.py, extract_backbone_weights.py:27-41"
BRANCHES = {"teacher": ("teacher.backbone.", *TRUNK_PREFIXES), "student": ("student.backbone.",)}
HEAD = r"((student|teacher|state_dict|model)\.)?head"
DROPPED = {
    rf"(student\.backbone\.|{ANY_PREFIX})masked_embed": "mask token",
    rf"{HEAD}\.mlp\.\d\.{LAYER}": "projection head",
    rf"{HEAD}\.last_layer2?\.(weight_g|weight_v)": "prototypes",
    rf"{HEAD}\.last_layer2?\.parametrizations\.weight\.original[01]": "prototypes",
    r"ibot_loss\.center2?": "loss state",
    r"state_dict\.head\.(weight|bias)": "classifier",
}
convert = dino.convert  # main_ibot.py adds 1 to the epoch, too


def recognise(file: ForeignFile) -> bool:
    is_full = "student.backbone.masked_embed" in file.tensors or "ibot_loss.center2" in file.tensors
    return is_full or is_bare_vit(file)
