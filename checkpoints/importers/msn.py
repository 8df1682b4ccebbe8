"""MSN (Assran et al. 2022): the target encoder. MSN's own probes read the class token before the final norm.

Its projection head is kept as `projector.*`, layers numbered as in nn.Sequential, for semi-supervised fine-tuning that
starts from its first layer (as for MSN in ExtreMA, Wu et al. 2022, table 10).
"""

from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import LAYER

SOURCE = "facebookresearch/msn 4388dc1, src/msn_train.py:284-295, src/deit.py:266-305"
BRANCHES = {"target": ("target_encoder.",), "anchor": ("encoder.",)}
DROPPED = {
    rf"(target_encoder|encoder)\.fc\.(fc[123]|bn[12])\.{LAYER}": "projection head",
    r"prototypes": "prototypes",
}
LAYERS = ("fc1", "bn1", "gelu1", "fc2", "bn2", "gelu2", "fc3")


def recognise(file: ForeignFile) -> bool:
    return "target_encoder.cls_token" in file.tensors


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, position_resize="bicubic")  # src/deit.py: to the exact size of the grid
    extra = projector(branch)
    return Conversion(spec=spec, tensors=tensors, extra=extra, epochs=branch.epochs())  # src/msn_train.py adds 1


def projector(branch: BranchTensors) -> dict[str, Tensor]:
    """Tensors of the projection head (src/msn_train.py:491-502) without batch counters; {} if the file has no head."""
    has_norms = any(name.startswith("fc.bn") for name in branch.names)
    layers = [layer for layer in LAYERS if has_norms or not layer.startswith("bn")]
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        layer_tensors = branch.take(rf"fc\.{layer}\.(weight|bias|running_mean|running_var)", rf"projector.{index}.\1")
        if layer.startswith("bn") and len(layer_tensors) != 4:
            raise ValueError(f"{branch.file.path}: {branch.prefix}fc.{layer} is no batch norm with its statistics")
        tensors |= layer_tensors
    return tensors
