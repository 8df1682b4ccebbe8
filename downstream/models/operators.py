"""How mmseg, mmdet, mmengine and mmcv are imported: quietly, and with a stand-in for compiled operators.

Importing them takes four seconds and prints notes about optional packages. Everything that imports them does so inside
`with quiet_libraries():`, in a task that runs, never when tasks are listed.

An ordinary pip install gives an mmcv without `mmcv._ext`. Segmentation needs none of its operators, Mask R-CNN and
Cascade need two, NMS and RoIAlign, which torchvision computes alike. N boxes, K of them kept, R regions, C channels,
h x w cells of a region.
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

NAME = "mmcv._ext"
AVERAGE = 1  # mmcv's pool_mode; 0 is the maximum

Which = Literal["compiled", "torchvision"]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices (K,) of the boxes (N, 4) to keep, best first; of equal scores (N,) the earlier box comes first.

    offset: 1 where x2 and y2 are the last pixels inside a box, 0 where they are its edges. The threshold counts in
    single precision, as in mmcv: an overlap of 3/5 is not above one of 0.6.
    """
    from torchvision.ops import nms as keep_best

    order = scores.argsort(descending=True, stable=True)
    places = torch.arange(len(order), 0, -1, device=boxes.device, dtype=boxes.dtype)  # the same order without ties
    edges = boxes + boxes.new_tensor([0, 0, offset, offset])
    threshold = torch.tensor(iou_threshold, dtype=torch.float32).item()
    return order[keep_best(edges[order], places, threshold)]


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **options: Any
) -> None:
    """Fill `output` (R, C, h, w) with averages of `input` (B, C, H, W) over `rois` (R, 5): image, x1, y1, x2, y2."""
    from torchvision.ops import roi_align

    size, scale, sampling, aligned = _roi_options(**options)
    wide = to_float32(input)  # torchvision has no RoIAlign of bfloat16
    output.copy_(roi_align(wide, rois.to(wide), size, scale, sampling, aligned))


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor, grad_input: Tensor, **options: Any
) -> None:
    """Add to `grad_input` (B, C, H, W) the gradient of `roi_align_forward` for `grad_output` (R, C, h, w)."""
    import torchvision  # noqa: F401 (registers the operator)

    size, scale, sampling, aligned = _roi_options(**options)
    backward, wide = torch.ops.torchvision._roi_align_backward, to_float32(grad_output)
    grad_input += backward(wide, rois.to(wide), scale, *size, *grad_input.shape, sampling, aligned)


def _roi_options(
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> tuple[tuple[int, int], float, int, bool]:
    """mmcv's options of RoIAlign as torchvision's: height and width of the output, scale, samples, aligned."""
    if pool_mode != AVERAGE:
        _not_covered("roi_align with pool_mode='max'")
    return (aligned_height, aligned_width), spatial_scale, sampling_ratio, bool(aligned)


class StandIn(ModuleType):
    """`mmcv._ext` with two operators; mmcv may ask for any other, and is refused when it calls one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_not_covered, name)


def install() -> Which:
    """Make `import mmcv.ops` work, and say by which operators. To be called before anything imports mmcv.ops.

    ImportError where mmcv is missing, or its compiled operators are there and cannot be loaded.
    """
    if sys.modules.get(NAME) is None:
        try:
            importlib.import_module(NAME)
        except ModuleNotFoundError as error:
            if error.name != NAME:
                raise
            _put_in_place()
    return "torchvision" if isinstance(sys.modules[NAME], StandIn) else "compiled"


def which() -> Which | None:
    """Whose operators this process uses; None before `install`."""
    return install() if sys.modules.get(NAME) else None


def _put_in_place() -> None:
    module = StandIn(NAME, __doc__)
    module.__spec__ = ModuleSpec(NAME, None)
    for operator in (nms, roi_align_forward, roi_align_backward):
        setattr(module, operator.__name__, operator)
    sys.modules[NAME] = module
    package, _, name = NAME.rpartition(".")
    setattr(sys.modules[package], name, module)


def _not_covered(name: str, *values: Any, **settings: Any) -> NoReturn:
    raise NotImplementedError(
        f"mmcv's operator {name} is not among those that torchvision stands in for (nms, roi_align); "
        "install an mmcv with compiled operators to use it"
    )


PACKAGES = ("mmengine", "mmcv", "mmseg", "mmdet")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """A block in which the mm libraries find operators and print nothing, nor do loggers that they make in it."""
    require(*PACKAGES, "faster_coco_eval")
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install()
        yield


def libraries_used() -> dict[str, str]:
    """Package -> version, and which operators mmcv computes with, as facts of a result."""
    versions = {"mmcv operators": str(which())}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[OPTIONAL[package][0]] = version(OPTIONAL[package][0])
    return versions
