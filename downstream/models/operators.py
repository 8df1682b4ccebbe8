"""How mmseg, mmdet, mmengine and mmcv are imported: without output, and with replacements of compiled operators.

Importing them takes four seconds and prints notes on optional packages. All code that imports them does so within
`with quiet_libraries():` while a task runs, never while tasks are listed.

An ordinary pip install gives an mmcv without `mmcv._ext`. Segmentation needs no operator of it; Mask R-CNN and Cascade
R-CNN need NMS and RoIAlign, which torchvision has too. N boxes, R regions, C channels, h x w cells of a region.
"""

import contextlib
import importlib
import io
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from engine.optional import OPTIONAL, require
from engine.precision import to_float32

PACKAGES = ("mmengine", "mmcv", "mmseg", "mmdet")
EXTENSION = "mmcv._ext"  # mmcv's module of compiled operators
AVERAGE = 1  # mmcv's pool_mode; 0 is the maximum

OperatorSource = Literal["compiled", "torchvision"]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes (N, 4) that non-maximum suppression keeps, by falling score (N,), then by index.

    offset: 1 if x2 and y2 are the last pixels inside of a box, 0 if they are its edges. As in mmcv, the threshold is in
    single precision: an overlap of 3/5 does not exceed a threshold of 0.6.
    """
    from torchvision.ops import nms as torchvision_nms

    order = scores.argsort(descending=True, stable=True)
    ranks = torch.arange(len(order), 0, -1, device=boxes.device, dtype=boxes.dtype)  # scores of this order without ties
    edges = boxes + boxes.new_tensor([0, 0, offset, offset])
    threshold = torch.tensor(iou_threshold, dtype=torch.float32).item()
    return order[torchvision_nms(edges[order], ranks, threshold)]


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **options: Any
) -> None:
    """Fill `output` (R, C, h, w) with averages of `input` (B, C, H, W) in `rois` (R, 5): image, x1, y1, x2, y2."""
    from torchvision.ops import roi_align

    size, scale, sampling, aligned = _roi_options(**options)
    input32 = to_float32(input)  # torchvision has no RoIAlign for bfloat16
    output.copy_(roi_align(input32, rois.to(input32), size, scale, sampling, aligned))


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor, grad_input: Tensor, **options: Any
) -> None:
    """Add to `grad_input` (B, C, H, W) the gradient of `roi_align_forward` for `grad_output` (R, C, h, w)."""
    import torchvision  # noqa: F401 (registers the operator)

    size, scale, sampling, aligned = _roi_options(**options)
    grad32 = to_float32(grad_output)
    grad_input += torch.ops.torchvision._roi_align_backward(
        grad32, rois.to(grad32), scale, *size, *grad_input.shape, sampling, aligned
    )


def _roi_options(
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> tuple[tuple[int, int], float, int, bool]:
    """mmcv's options of RoIAlign as torchvision's: output size (height, width), scale, sampling ratio, aligned."""
    if pool_mode != AVERAGE:
        _not_covered("roi_align with pool_mode='max'")
    return (aligned_height, aligned_width), spatial_scale, sampling_ratio, bool(aligned)


class TorchvisionOperators(ModuleType):
    """Replacement of `mmcv._ext` with the operators above. mmcv may look up any other; calling one raises an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_not_covered, name)


def _not_covered(name: str, *values: Any, **settings: Any) -> NoReturn:
    raise NotImplementedError(
        f"mmcv's operator {name} is not among those that torchvision stands in for (nms, roi_align); "
        "install an mmcv with compiled operators to use it"
    )


def install_operators() -> OperatorSource:
    """Make `import mmcv.ops` work, and return the source of its operators. Call this before anything imports mmcv.ops.

    Raises:
        ImportError: mmcv is missing, or it has compiled operators that cannot be loaded.
    """
    if sys.modules.get(EXTENSION) is None:
        try:
            importlib.import_module(EXTENSION)
        except ModuleNotFoundError as error:
            if error.name != EXTENSION:
                raise
            module = TorchvisionOperators(EXTENSION, __doc__)
            module.__spec__ = ModuleSpec(EXTENSION, None)
            for operator in (nms, roi_align_forward, roi_align_backward):
                setattr(module, operator.__name__, operator)
            sys.modules[EXTENSION] = module
            package, _, name = EXTENSION.rpartition(".")
            setattr(sys.modules[package], name, module)
    return "torchvision" if isinstance(sys.modules[EXTENSION], TorchvisionOperators) else "compiled"


def operators_in_use() -> OperatorSource | None:
    """The source of the operators in this process; None before `install_operators`."""
    return install_operators() if sys.modules.get(EXTENSION) else None


def require_libraries() -> None:
    """Raise ValueError if a library of dense tasks is not installed."""
    require(*PACKAGES, "faster_coco_eval")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let the mm libraries find operators, and silence them and the loggers that they create."""
    require_libraries()
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install_operators()
        yield


def libraries_used() -> dict[str, str]:
    """Versions of the mm libraries by package, and the source of mmcv's operators, for the facts of a result."""
    versions = {"mmcv operators": str(operators_in_use())}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[OPTIONAL[package][0]] = version(OPTIONAL[package][0])
    return versions
