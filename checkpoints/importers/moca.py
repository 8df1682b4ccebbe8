"""MOCA (Gidaris et al. 2024): the teacher encoder, from a full checkpoint or an extracted one.

util/extract_teacher_from_checkpoint.py writes {'model': teacher}, which looks like a release of MAE; say `moca:PATH`.
All of MOCA's protocols read the mean of the teacher's patch tokens.
"""

from functools import partial

from checkpoints.importing import plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BLOCK, LAYER, TRUNK_PREFIXES, is_bare_vit

SOURCE = "valeoai/MOCA, util/model_utils.py:74-144, models_vit.py:33-61"
BRANCHES = {"teacher": ("model.encoder_teacher.", *TRUNK_PREFIXES), "student": ("model.encoder.",)}
GENERATOR = r"layers_w\.\d+\.(generator\.b\d+_(fc|bn|last_layer)|skip)"
DROPPED = {
    r"model\.mask_token(_cls_pt)?": "mask token",
    rf"model\.decoder_({BLOCK}|{BLOCK.replace('blocks', 'blocks_cls_pt')})": "decoder",
    r"model\.(decoder_embed|decoder_norm|norm)_cls_pt\.(weight|bias)": "decoder",
    r"model\.decoder_pos_embed": "decoder",
    rf"model\.(encoder|decoder)_pred\.({GENERATOR}\.{LAYER}|scale)": "prototype generators",
    r"model\.bow_extractor\.bow_extractor\.\d+\._"
    r"(dist_norm|dist_norm_prev|embedding|embedding_ptr|track_num_batches)": "codebook",
}
VIT = partial(plain_vit, position="sincos_column_first", pool="avg")
EPOCH = "last"  # util/misc.py, save_model


def recognise(file: ForeignFile) -> bool:
    return "model.encoder_teacher.cls_token" in file.tensors or is_bare_vit(file, "sincos_column_first")
