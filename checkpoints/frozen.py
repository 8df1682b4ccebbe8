"""Networks for frozen evaluation: a ViT-export, or a network of the user's own.

Tasks on frozen features use only what these have in common: `size`, `patch_size`, `grid`, `width`, `depth`,
`has_class_token` and `label` of the spec; `preparation`, `digest`, `facts`, `parameters` and `build()` of the export.
`build()` returns a module that maps images (B, 3, H, W) to tokens (B, P+L, D) for each layer, P prefix tokens before L
patches. Tasks that need a ViT call `vit_spec`, which refuses other networks.

A network of the user's own is `module:PACKAGE:FUNCTION`, or a module in a Python program. FUNCTION() returns an
nn.Module with attributes that say how its images are prepared: `image_size`, `mean` and `std`, optionally `crop` and
`interpolation`. The module maps (B, 3, H, W) to one vector (B, D); or to a class token (B, D) or None, patch tokens
(B, h*w, D), (B, h, w, D) or (B, D, h, w), and their grid (h, w). docs/your-own-network.md has an example. No other kind
of reference runs code from outside.

On a CPU, features are extracted by several threads. Only one at a time calls the network, because a forward pass may
change state in it, as hooks do, unless the network has the attribute `thread_safe = True`.
"""

import copy
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.own_code import (
    Forward,
    code_digests,
    hooks,
    is_own_code,
    package_of,
    parameters_and_buffers,
    source_file,
    structure_digest,
)
from checkpoints.spec import MAX_GRID, FinalNorm, ImageGrid, Preparation, PreparesImages, ViTSpec
from engine.files import digest
from engine.work import count_flops

SCHEME = "module"
REFERENCE_ADVICE = "write module:PACKAGE:FUNCTION, as in module:mynets:resnet18"
OUTPUT_ADVICE = (
    "it has to return one vector (B, D), or class token (B, D) or None, patch tokens, and their grid (rows, columns), "
    "all of real numbers"
)
RANDOM_WEIGHTS = (
    "its weights are random: the function returned different ones when it was called again, so every run and process "
    "would measure another network; load weights in it, or draw them from a seed"
)
MAX_SIDE = 16 * MAX_GRID  # pixels; of the images of a network
MAX_CHANGE = 0.02  # of features in another batch, as a share of the largest value; far above bfloat16's rounding
MEMORY_PREFIX = f"{SCHEME}:memory:"  # of references to networks in a Python program
PREPARATION_ATTRIBUTES = ("image_size", "mean", "std", "crop", "interpolation")  # of a network; the last two optional


@dataclass(frozen=True, kw_only=True)
class OwnSpec(ImageGrid):
    """Measured sizes of a network of the user's own, which counts as one layer without registers or final norm."""

    reference: str  # module:PACKAGE:FUNCTION
    label: str  # name of its class
    image_size: int | tuple[int, int]  # side in pixels, or height and width
    patch_size: int  # side of a patch in pixels; 0: the network returns one vector and no patches
    width: int  # D
    class_token: bool  # it returns a class token; a single vector counts as one
    parameters: int  # number of values
    flops: int  # floating-point operations for one image
    depth: ClassVar[int] = 1
    registers: ClassVar[int] = 0
    class_attention: ClassVar[int] = 0
    final_norm: ClassVar[FinalNorm] = "none"

    @property
    def has_class_token(self) -> bool:
        return self.class_token

    @property
    def prefix(self) -> int:
        return int(self.class_token)


class OwnNetwork(nn.Module):
    """Adapter that gives the user's module the interface of a ViT with one layer."""

    def __init__(self, network: nn.Module, spec: OwnSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        is_thread_safe = getattr(network, "thread_safe", False)
        self.lock: AbstractContextManager[Any] = nullcontext() if is_thread_safe else threading.Lock()

    def forward(self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = True) -> list[Tensor]:
        """Tokens (B, P+L, D) of images (B, 3, H, W), for each of `layers`, which may be 0 or -1.

        Raises a one-line ValueError if the network fails or returns other shapes.
        """
        if any(layer not in (-1, 0) for layer in layers):
            raise ValueError(f"{self.spec.reference} has only one layer: use layer=-1")
        with self.lock:
            tokens, grid = network_tokens(self.network, images, self.spec.reference)
        expected = self.spec.grid_of(images.shape[-2:])
        if grid != expected or tokens.shape[1:] != (self.spec.prefix + grid[0] * grid[1], self.spec.width):
            raise ValueError(
                f"{self.spec.reference} returns {tuple(tokens.shape[1:])} tokens on a grid of {grid} for images of "
                f"{tuple(images.shape[-2:])} px, but patches of {self.spec.patch_size} px make a grid of {expected}"
            )
        return [tokens] * len(layers)

    def normalise(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """The tokens unchanged, because a final norm is part of the user's network."""
        return tokens

    def train(self, mode: bool = True) -> "OwnNetwork":
        """Keep evaluation mode, even if a surrounding module is set to training."""
        return super().train(False)


@dataclass(frozen=True, kw_only=True)
class OwnExport(PreparesImages):
    """A network of the user's own in place of a ViTExport, for frozen evaluation."""

    spec: OwnSpec
    preparation: Preparation
    network: nn.Module = field(repr=False)
    files: Mapping[str, str]  # name of a source file, class or function of the network -> SHA-256
    package: str = ""  # name and version of the installed package that it comes from, if any
    name: str = ""  # for results, if the reference does not contain it
    assumed: tuple[str, ...] = ()  # assumptions that the user should check

    @property
    def parameters(self) -> int:
        return self.spec.parameters

    @property
    def facts(self) -> dict[str, Any]:
        """Provenance for results: method, source with the digests of its code, package."""
        code = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in self.files.items())
        facts = {"method": SCHEME, "source": f"{self.spec.reference} ({code})", "plugin": self.package}
        optional = {"name": self.name, "assumed": list(self.assumed)}
        return facts | {name: value for name, value in optional.items() if value}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over all that features depend on: parameters, buffers, preparation, source code."""
        facts = digest([asdict(self.spec), asdict(self.preparation), dict(self.files)])
        return digest([facts, digest_of_tensors(parameters_and_buffers(self.network))])

    def build(self, drop_path: float = 0.0, any_size: bool = False) -> OwnNetwork:
        """A copy of the network, on the CPU. The arguments, those of ViTExport's, have no effect."""
        return OwnNetwork(copy.deepcopy(self.network), self.spec).eval()

    @property
    def evaluation_size(self) -> int | tuple[int, int]:
        """As ViTExport's: the size of the network's images."""
        return self.spec.image_size

    def evaluated_at(self, image_size: int | tuple[int, int]) -> "OwnExport":
        """The same network for images of another size, measured anew. Raises ValueError if it cannot process them."""
        if image_size == self.spec.image_size:
            return self
        spec = _measure_spec(self.network, self.spec.reference, self.preparation, image_size)
        return replace(self, spec=replace(spec, label=self.spec.label))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self.spec.reference} is a network of your own, without the {name} of a ViT-export")


class WithForward(nn.Module):
    """A network whose features are read by a function: `function(network, images)`."""

    def __init__(self, network: nn.Module, function: Forward) -> None:
        super().__init__()
        self.network, self.function = network, function
        self.thread_safe = getattr(network, "thread_safe", False)

    def forward(self, images: Tensor) -> Any:
        return self.function(self.network, images)


_exports_in_memory: WeakValueDictionary[str, OwnExport] = WeakValueDictionary()  # by reference


def held_network(
    network: nn.Module,
    forward: Forward | None = None,
    image_size: int | tuple[int, int] | None = None,
    statistics: Preparation | None = None,
) -> OwnExport:
    """An export of a copy of a module in memory. Its reference is valid as long as the program holds the export.

    The digest covers weights, structure, attributes, and the source of classes and functions outside of installed
    packages, with the values that these functions read.

    Args:
        network: The module. It is not changed.
        forward: Reads the features; by default the output of the module, or for a timm model the classifier's input.
        image_size: Side in pixels, or height and width; by default the module's attribute, or timm's `pretrained_cfg`.
        statistics: Mean and std of images; the same default.

    Raises:
        ValueError: One line, if the module cannot be copied, lacks attributes, fails, or returns other shapes.
    """
    name = type(network).__name__
    is_timm = type(network).__module__.startswith("timm.") and hasattr(network, "pretrained_cfg")
    attributes = _preparation_attributes(network)
    if is_timm:
        config = network.pretrained_cfg
        attributes |= {"image_size": config["input_size"][1:], "crop": config["crop_pct"]}
        attributes |= {key: config[key] for key in ("mean", "std", "interpolation")}
        name = config["architecture"]
    if image_size is not None:
        attributes["image_size"] = image_size
    if statistics:
        attributes |= {"mean": statistics.mean, "std": statistics.std}
    code, package = code_digests(network, forward), package_of(type(network).__module__)
    try:
        copied = copy.deepcopy(network).cpu().float().eval().requires_grad_(False)
    except Exception as error:  # a module may raise any type
        raise ValueError(f"{name} cannot be copied, and so not be evaluated ({_one_line(error)})") from error
    is_known = is_timm or type(network).__module__.startswith("torchvision.")
    if is_known and not forward and not any(hooks(part) or is_own_code(type(part)) for part in copied.modules()):
        copied.thread_safe = True
    network = WithForward(copied, forward or _timm_classifier_input) if forward or is_timm else copied
    preparation, size = _preparation(attributes, name)
    spec = _measure_spec(network, name, preparation, size)
    code["structure"] = structure_digest(network, _measuring_image(preparation, size), copied, forward)
    # Identifies the network in its reference, which the digest of the export includes.
    key = digest([code, asdict(preparation), size, digest_of_tensors(parameters_and_buffers(network))])[:8]
    reference = f"{MEMORY_PREFIX}{name}-{key}"
    spec = replace(spec, reference=reference, label=name)
    export = OwnExport(
        spec=spec,
        preparation=preparation,
        network=network,
        files=code,
        package=package,
        name=name,
        assumed=() if forward else _assumption_on_classifier(network, spec.width),
    )
    return _exports_in_memory.setdefault(reference, export)


def _assumption_on_classifier(network: nn.Module, width: int) -> tuple[str, ...]:
    """A sentence if features of this width seem to be the output of a classifier; else ()."""
    linear_layers = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear_layers:
        return ()
    name, layer = linear_layers[-1]
    has_classifier_name = name.partition(".")[0] in ("fc", "head", "heads", "classifier", "linear")
    if layer.out_features != width or not has_classifier_name:
        return ()
    return (
        f"its layer {name} ({layer.in_features} -> {width}) is no classifier; if it is, put torch.nn.Identity() there",
    )


def _timm_classifier_input(network: nn.Module, images: Tensor) -> Tensor:
    """The input (B, D) of a timm model's classifier for images (B, 3, H, W)."""
    return network.forward_head(network.forward_features(images), pre_logits=True)


def own_network(reference: str) -> OwnExport:
    """The export of the network that FUNCTION of PACKAGE returns, or of one in memory.

    Raises a one-line ValueError if import or call fails, or as `held_network`.
    """
    if reference.startswith(MEMORY_PREFIX):
        if reference not in _exports_in_memory:
            raise ValueError(f"{reference} is a network that another Python program held; give the module again")
        return _exports_in_memory[reference]
    function, random_state = _import_function(reference), torch.get_rng_state()
    network = _call_function(function, reference)
    has_random_weights = False
    if not torch.equal(random_state, torch.get_rng_state()):  # the function drew random numbers
        weights = digest_of_tensors(parameters_and_buffers(network))
        second_network = _call_function(function, reference)
        has_random_weights = weights != digest_of_tensors(parameters_and_buffers(second_network))
    preparation, size = _preparation(_preparation_attributes(network), reference)
    spec = _measure_spec(network, reference, preparation, size)
    modules = dict.fromkeys([function.__module__, type(network).__module__])
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in map(source_file, modules) if file}
    files["structure"] = structure_digest(network, _measuring_image(preparation, size), network)
    return OwnExport(
        spec=spec,
        preparation=preparation,
        network=network,
        files=files,
        package=package_of(function.__module__),
        assumed=((RANDOM_WEIGHTS,) if has_random_weights else ()) + _assumption_on_classifier(network, spec.width),
    )


def _call_function(function: Callable[[], Any], reference: str) -> nn.Module:
    """The module that FUNCTION returns, on the CPU and frozen. Raises ValueError if it fails or returns no module."""
    try:
        network = function()
    except Exception as error:
        raise ValueError(f"{reference}: the function raised an error: {_one_line(error)}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{reference} returns a {type(network).__name__}; it has to return an nn.Module")
    return network.cpu().eval().requires_grad_(False)


def _import_function(reference: str) -> Callable[[], Any]:
    """FUNCTION of a reference. Raises ValueError if PACKAGE cannot be imported or has no such function."""
    package, colon, name = reference.removeprefix(f"{SCHEME}:").partition(":")
    if not (package and colon and name.isidentifier()):
        raise ValueError(f"{reference}: {REFERENCE_ADVICE}")
    if (working_folder := os.getcwd()) not in sys.path:
        sys.path.append(working_folder)  # at the end, so that its files hide no installed package
    try:
        module = importlib.import_module(package)
    except Exception as error:
        raise ValueError(
            f"{reference}: {package} cannot be imported ({_one_line(error)}); PACKAGE is an installed one or a file of "
            f"{working_folder}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{reference}: {package} has no function {name!r}")
    return function


def _preparation_attributes(network: nn.Module) -> dict[str, Any]:
    """Those of PREPARATION_ATTRIBUTES that a network has."""
    return {name: getattr(network, name) for name in PREPARATION_ATTRIBUTES if hasattr(network, name)}


def _preparation(attributes: Mapping[str, Any], reference: str) -> tuple[Preparation, int | tuple[int, int]]:
    """Preparation and image size from PREPARATION_ATTRIBUTES. Raises ValueError for missing or invalid values."""
    if missing := [name for name in PREPARATION_ATTRIBUTES[:3] if name not in attributes]:
        in_python = "; or bench.load(network, image_size=..., statistics=...)" if ":" not in reference else ""
        raise ValueError(
            f"{reference}: the network has no attribute {', '.join(missing)}; set image_size (pixels a side, or height "
            f"and width) and mean and std of its images (three numbers each, of pixels from 0 to 1){in_python}"
        )
    optional = {name: attributes[name] for name in PREPARATION_ATTRIBUTES[3:] if name in attributes}
    try:
        sides = [float(side) for side in torch.as_tensor(attributes["image_size"], dtype=torch.float64).flatten()]
        mean, std = (tuple(map(float, torch.as_tensor(attributes[name]).flatten())) for name in ("mean", "std"))
        is_size = len(sides) in (1, 2) and all(side.is_integer() and 1 <= side <= MAX_SIDE for side in sides)
        if not is_size or len(mean) != 3 or len(std) != 3:
            raise ValueError(
                f"image_size={attributes['image_size']}, mean={mean}, std={std}: give whole pixels and three "
                f"numbers each, at most {MAX_SIDE} pixels"
            )
        size = [int(side) for side in sides]
        preparation = Preparation(mean=mean, std=std, **optional)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{reference}: {_one_line(error)}") from error
    return preparation, size[0] if len({*size}) == 1 else (size[0], size[1])


def _measuring_image(preparation: Preparation, size: int | tuple[int, int]) -> Tensor:
    """A prepared synthetic image (1, 3, H, W) of a size in pixels."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preparation.mean, preparation.std))
    return (synthetic_image(size if isinstance(size, tuple) else (size, size)).float() - mean) / std


def _measure_spec(network: nn.Module, reference: str, preparation: Preparation, size: int | tuple[int, int]) -> OwnSpec:
    """The spec of a network, measured on a synthetic image of a size in pixels.

    Raises ValueError if the network fails, returns other shapes, or other features when called a second time or for a
    batch of two.
    """
    image = _measuring_image(preparation, size)
    height, width = image.shape[-2:]
    with torch.inference_mode():
        (tokens, grid), flops = count_flops(lambda: network_tokens(network, image, reference))
        if not torch.equal(network_tokens(network, image, reference)[0], tokens):
            raise ValueError(f"{reference} gives other features when asked twice: switch off what it draws at random")
        alone = tokens.float()
        beside_another = network_tokens(network, torch.cat([image, image.flip(-1)]), reference)[0][:1].float()
        is_same_shape = beside_another.shape == alone.shape
        if not (is_same_shape and (beside_another - alone).abs().max() <= MAX_CHANGE * alone.abs().max()):
            raise ValueError(
                f"{reference} gives an image other features beside another: they must not depend on the batch (batch "
                "norms need running statistics and evaluation mode)"
            )
    is_vector = grid == (0, 0)
    patch_size = height // grid[0] if grid[0] else 0
    if not is_vector and (not patch_size or (grid[0] * patch_size, grid[1] * patch_size) != (height, width)):
        raise ValueError(
            f"{reference} gives a grid of {grid[0]} x {grid[1]} for images of {height} x {width} px: patches must be "
            "square and fill the image; give another image_size"
        )
    return OwnSpec(
        reference=reference,
        label=type(network).__name__,
        image_size=size,
        patch_size=patch_size,
        width=tokens.shape[2],
        class_token=tokens.shape[1] > grid[0] * grid[1],
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        flops=flops,
    )


def network_tokens(network: nn.Module, images: Tensor, reference: str) -> tuple[Tensor, tuple[int, int]]:
    """Tokens (B, P+L, D) and grid (h, w) from the output of a network for images (B, 3, H, W).

    P = 1 if there is a class token, which comes first. A single vector (B, D) becomes the class token, with L = 0 and a
    grid of (0, 0). Raises a one-line ValueError if the network fails or returns other shapes.
    """
    try:
        output = network(images)
    except Exception as error:
        raise ValueError(f"{reference} fails on images {tuple(images.shape)}: {_one_line(error)}") from error
    for part in output if isinstance(output, tuple | list) else (output,):
        if isinstance(part, Tensor) and (part.is_complex() or not part.numel()):
            raise ValueError(f"{reference} returns {tuple(part.shape)} values of {part.dtype}; {OUTPUT_ADVICE}")
    if isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(images):
        return output.unsqueeze(1), (0, 0)
    if not (isinstance(output, tuple | list) and len(output) == 3):
        shape, hint = "", ""
        if isinstance(output, Tensor):
            shape = f" {tuple(output.shape)} for {len(images)} images"
            if output.ndim == 4:
                hint = "; of maps (B, D, h, w) return their mean over h and w, or (None, maps, maps.shape[-2:])"
        raise ValueError(f"{reference} returns a {type(output).__name__}{shape}; {OUTPUT_ADVICE}{hint}")
    class_token, patches, grid = output
    try:
        height, width = map(int, grid)
        tokens = _flatten_patches(patches, len(images), (height, width))
        if class_token is not None:
            tokens = torch.cat([class_token.unsqueeze(1), tokens], dim=1)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in output]
        problem = f"{shapes} for {len(images)} images ({_one_line(error)})"
        raise ValueError(f"{reference} returns {problem}; {OUTPUT_ADVICE}") from error
    return tokens, (height, width)


def _flatten_patches(patches: Tensor, count: int, grid: tuple[int, int]) -> Tensor:
    """Patch tokens (B, h*w, D), row by row, from (B, h*w, D), (B, h, w, D) or (B, D, h, w).

    count: B. grid: (h, w). Raises ValueError for other shapes, and if both axes orders would fit.
    """
    if patches.ndim == 3 and patches.shape[:2] == (count, grid[0] * grid[1]):
        return patches
    is_channels_last = patches.ndim == 4 and patches.shape[1:3] == grid
    is_channels_first = patches.ndim == 4 and patches.shape[2:4] == grid
    if len(patches) != count or is_channels_last == is_channels_first:
        raise ValueError(f"patch tokens that are not, or doubly, on a grid of {grid[0]} x {grid[1]}")
    return (patches if is_channels_last else patches.permute(0, 2, 3, 1)).flatten(1, 2)


def _one_line(error: BaseException) -> str:
    """Message of an exception in one line, with its type unless that is ValueError."""
    name = "" if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:200]


FrozenSpec = ViTSpec | OwnSpec
FrozenExport = ViTExport | OwnExport


def vit_spec(spec: FrozenSpec, reason: str) -> ViTSpec:
    """The spec, if it is a ViT's. Raises ValueError for a network of the user's own.

    reason: why the task needs a ViT, as a main clause.
    """
    if isinstance(spec, ViTSpec):
        return spec
    raise ValueError(
        f"{spec.reference} is a frozen network of your own, and {reason}; what reads frozen features can be run, such "
        "as k-NN, linear, low-shot, segmenter_linear and ade_linear"
    )
