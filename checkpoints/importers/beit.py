"""BEiT (Bao et al. 2022): pretrained and fine-tuned encoders.

Image statistics depend on the training: ImageNet's with --imagenet_default_mean_and_std (ImageNet-1k), 0.5 without (the
ImageNet-22k releases). A file that holds the arguments says which; otherwise users have to.
"""

from dataclasses import replace

from checkpoints.importing import BranchTensors, Conversion, relative_vit
from checkpoints.reading import ForeignFile
from engine.errors import option

SOURCE = "microsoft/unilm 768a3c8, beit/modeling_pretrain.py, run_beit_pretraining.py"
BRANCHES = {"encoder": ("model.", "")}
DROPPED = {
    r"(model\.)?mask_token": "mask token",
    r"(model\.)?lm_head\.(weight|bias)": "token head",
    r"(model\.)?head\.(weight|bias)": "classifier",
    r"(model\.)?(rel_pos_bias|blocks\.\d+\.attn)\.relative_position_index": "made from the window size",
}


def recognise(file: ForeignFile) -> bool:
    head = file.tensors.get("model.lm_head.weight", file.tensors.get("lm_head.weight"))
    if head is None or head.ndim != 2 or head.shape[0] == head.shape[1]:
        return False  # data2vec predicts features
    return any("q_bias" in name for name in file.tensors)


def convert(branch: BranchTensors) -> Conversion:
    options, imagenet_flag = branch.options, branch.file.facts.get("args.imagenet_default_mean_and_std")
    if options.statistics is None and imagenet_flag is None:
        raise ValueError(
            f"{branch.file.path}: BEiT was trained with two sets of image statistics and the file does not say which; "
            f"use {option('statistics', 'half')} (ImageNet-22k releases) or {option('statistics', 'imagenet')} "
            f"(ImageNet-1k runs)"
        )
    if options.statistics is None:
        options = replace(options, statistics="imagenet" if imagenet_flag else "half")
    tensors = branch.take_trunk()
    return Conversion(
        spec=relative_vit(branch, tensors),
        tensors=tensors,
        preparation=options.preparation,
        epochs=branch.epochs(last=True),  # beit/utils.py, save_model
    )
