"""MoCo-v3 (Chen et al. 2021): the base encoder. Its ViT-S has 12 heads, other ViT-S have 6.

The encoder's projection head is kept as `projector.*`, for semi-supervised recipes that start from its first layer.
"""

from torch import Tensor

from checkpoints.export import short_text
from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import LAYER, TRUNK_PREFIXES, is_bare_vit

SOURCE = "facebookresearch/moco-v3 c349e6e, vits.py:53-69 and 115-120, convert_to_deit.py"
BRANCHES = {"base": ("state_dict.base_encoder.", *TRUNK_PREFIXES), "momentum": ("state_dict.momentum_encoder.",)}
HEADS = {384: 12, 768: 12}  # vits.py:115-128
DROPPED = {
    rf"state_dict\.(base_encoder|momentum_encoder)\.head\.\d\.{LAYER}": "projection head",
    rf"state_dict\.predictor\.\d\.{LAYER}": "prediction head",
}
STATISTICS = ("running_mean", "running_var")
# Three linear layers without bias, each with a batch norm, the last of which has no parameters (moco/builder.py:36-61,
# 112-122)
PROJECTOR = {f"projector.{layer}.weight" for layer in (0, 1, 3, 4, 6)} | {"projector.1.bias", "projector.4.bias"}
PROJECTOR |= {f"projector.{layer}.{kind}" for layer in (1, 4, 7) for kind in STATISTICS}


def recognise(file: ForeignFile) -> bool:
    has_encoder = "state_dict.base_encoder.cls_token" in file.tensors
    is_extrema = any(".blocks_token." in name for name in file.tensors)
    # convert_to_deit.py writes a bare ViT; no other source has such a position table.
    return (has_encoder and not is_extrema) or is_bare_vit(file, "sincos_row_first")


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, heads=HEADS, position="sincos_row_first")
    epochs = branch.epochs()  # main_moco.py adds 1
    return Conversion(spec=spec, tensors=tensors, extra=projector(branch, spec.width), epochs=epochs)


def projector(branch: BranchTensors, width: int) -> dict[str, Tensor]:
    """Tensors of the projection head; {} if the file has no head.

    width: of the encoder, the head's input. Raises ValueError for an incomplete head, or layers that do not fit.
    """
    tensors = branch.take(r"head\.([036]\.weight)", r"projector.\1", biased=False)
    tensors |= branch.take(rf"head\.([147]\.(?:weight|bias|{'|'.join(STATISTICS)}))", r"projector.\1")
    if not tensors:
        return {}
    if missing := PROJECTOR - tensors.keys():
        path = branch.file.path
        raise ValueError(f"{path}: the projection head lacks {short_text(sorted(missing))}; the file is not complete")
    inputs = width
    for layer in (0, 3, 6):
        weight, norm = tensors[f"projector.{layer}.weight"], f"projector.{layer + 1}."
        norm_shapes = {tensor.shape for name, tensor in tensors.items() if name.startswith(norm)}
        if weight.shape[1:] != (inputs,) or norm_shapes != {weight.shape[:1]}:
            raise ValueError(f"{branch.file.path}: layer {layer} of the projection head does not fit those beside it")
        inputs = len(weight)
    return tensors
