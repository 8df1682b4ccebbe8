"""`module:PACKAGE:FUNCTION`: a network of the user's own, frozen. The only reference by which code of others runs.

FUNCTION() returns an nn.Module that says how its images are prepared (`image_size`, `mean`, `std`; optionally `crop`
and `interpolation`) and maps (B, 3, H, W) to a class token (B, D) or None, patch tokens (B, h*w, D), (B, h, w, D) or
(B, D, h, w), and their grid (h, w). docs/your-own-network.md has an example.

On a CPU several threads extract features. A pass may leave things behind in the network, as hooks do, so threads take
turns, unless the network says `thread_safe = True`.
"""

import copy
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from checkpoints.export import digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.spec import FinalNorm, ImageGrid, Preparation, PreparesImages
from engine.files import digest
from engine.flops import counted

SCHEME = "module"
FORM = "write module:PACKAGE:FUNCTION, as in module:mynets:resnet18"
RETURNS = "it has to return class token (B, D) or None, patch tokens, and their grid (rows, columns)"


@dataclass(frozen=True, kw_only=True)
class OwnSpec(ImageGrid):
    """What a network of the user's own turned out to be. The constants say what it has not: it is one layer."""

    reference: str  # module:PACKAGE:FUNCTION
    label: str  # name of its class
    image_size: int | tuple[int, int]  # side in pixels, or height and width
    patch_size: int  # pixels a side that a patch token stands for
    width: int  # D
    class_token: bool  # whether it gives one
    parameters: int  # numbers in it
    flops: int  # floating-point operations of an image
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
    """The user's module as evaluations call a network: images -> tokens (B, P+L, D) of its one layer."""

    def __init__(self, network: nn.Module, spec: OwnSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        safe = getattr(network, "thread_safe", False)
        self.turn: AbstractContextManager[Any] = nullcontext() if safe else threading.Lock()

    def forward(self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = True) -> list[Tensor]:
        """ValueError, in one line, where the network fails or gives something else than it promised."""
        if any(layer not in (-1, 0) for layer in layers):
            raise ValueError(f"{self.spec.reference} gives one layer: leave layer=-1")
        with self.turn:
            tokens, grid = tokens_given(self.network, images, self.spec.reference)
        expected = tuple(side // self.spec.patch_size for side in images.shape[-2:])
        if grid != expected or tokens.shape[1:] != (self.spec.prefix + grid[0] * grid[1], self.spec.width):
            raise ValueError(
                f"{self.spec.reference} gives {tuple(tokens.shape[1:])} tokens on a grid of {grid} for images of "
                f"{tuple(images.shape[-2:])} px, where patches of {self.spec.patch_size} px make {expected}"
            )
        return [tokens] * len(layers)

    def normalise(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """As they are: a final norm is the user's affair."""
        return tokens

    def train(self, mode: bool = True) -> "OwnNetwork":
        """Stays in evaluation mode."""
        return super().train(False)


@dataclass(frozen=True, kw_only=True)
class OwnExport(PreparesImages):
    """Stands where a ViTExport does, for frozen evaluation."""

    spec: OwnSpec
    preparation: Preparation
    network: nn.Module = field(repr=False)
    files: Mapping[str, str]  # name of each source file of the network -> SHA-256
    package: str = ""  # installed package that FUNCTION is from, with its version

    @property
    def parameters(self) -> int:
        return self.spec.parameters

    @property
    def facts(self) -> dict[str, Any]:
        """What results say of it."""
        code = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in self.files.items())
        return {"method": SCHEME, "source": f"{self.spec.reference} ({code})", "plugin": self.package}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over parameters, buffers, preparation and source files: what features depend on."""
        facts = digest([asdict(self.spec), asdict(self.preparation), dict(self.files)])
        tensors = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        return digest([facts, digest_of_tensors({name: tensor.detach().cpu() for name, tensor in tensors.items()})])

    def build(self, drop_path: float = 0.0) -> OwnNetwork:
        """A copy of the network, on the CPU."""
        return OwnNetwork(copy.deepcopy(self.network), self.spec).eval()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self.spec.reference} is a network of your own, without the {name} of a ViT-export")


def own_network(reference: str) -> OwnExport:
    """Import PACKAGE, call FUNCTION and look at what it gives. ValueError says in one line what is wrong."""
    function = _function(reference)
    try:
        network = function()
    except Exception as error:
        raise ValueError(f"{reference} fails: {_said(error)}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{reference} returns a {type(network).__name__}; it has to return an nn.Module")
    network = network.cpu().eval().requires_grad_(False)
    preparation, size = _preparation(network, reference)
    spec = _looked_at(network, reference, preparation, size)
    modules = dict.fromkeys([function.__module__, type(network).__module__])
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in map(_source, modules) if file}
    package = _distribution(function.__module__)
    return OwnExport(spec=spec, preparation=preparation, network=network, files=files, package=package)


def _function(reference: str) -> Callable[[], Any]:
    package, colon, name = reference.removeprefix(f"{SCHEME}:").partition(":")
    if not (package and colon and name.isidentifier()):
        raise ValueError(f"{reference}: {FORM}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # behind all others: a file of the working folder hides no installed package
    try:
        module = importlib.import_module(package)
    except Exception as error:
        where = f"PACKAGE is an installed one or a file of {here}"
        raise ValueError(f"{reference}: {package} cannot be imported ({_said(error)}); {where}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{reference}: {package} has no function {name!r}")
    return function


def _preparation(network: nn.Module, reference: str) -> tuple[Preparation, int | tuple[int, int]]:
    """What the network says of its images."""
    lacking = [name for name in ("image_size", "mean", "std") if not hasattr(network, name)]
    if lacking:
        raise ValueError(
            f"{reference}: the network has no attribute {', '.join(lacking)}; set image_size (pixels a side, or height "
            "and width) and mean and std of its images (three numbers each, of pixels from 0 to 1)"
        )
    more = {name: getattr(network, name) for name in ("crop", "interpolation") if hasattr(network, name)}
    try:
        size = [int(side) for side in torch.as_tensor(network.image_size).flatten()]
        mean, std = (tuple(map(float, torch.as_tensor(getattr(network, name)).flatten())) for name in ("mean", "std"))
        if len(size) not in (1, 2) or min(size) < 1 or len(mean) != 3 or len(std) != 3:
            raise ValueError(f"image_size={size}, mean={mean}, std={std}: give whole pixels and three numbers each")
        preparation = Preparation(mean=mean, std=std, **more)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{reference}: {_said(error)}") from error
    return preparation, size[0] if len({*size}) == 1 else (size[0], size[1])


def _looked_at(network: nn.Module, reference: str, preparation: Preparation, size: int | tuple[int, int]) -> OwnSpec:
    """Its sizes, from passes over a synthetic image."""
    height, width = size if isinstance(size, tuple) else (size, size)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preparation.mean, preparation.std))
    image = (synthetic_image((height, width)).float() - mean) / std
    with torch.inference_mode():
        (tokens, grid), flops = counted(lambda: tokens_given(network, image, reference))
        if not torch.equal(tokens_given(network, image, reference)[0], tokens):
            raise ValueError(f"{reference} gives other features when asked twice: switch off what it draws at random")
    patch = height // grid[0] if grid[0] else 0
    if not patch or (grid[0] * patch, grid[1] * patch) != (height, width):
        raise ValueError(
            f"{reference} gives a grid of {grid[0]} x {grid[1]} for images of {height} x {width} px: patches must be "
            "square and fill the image; give another image_size"
        )
    return OwnSpec(
        reference=reference,
        label=type(network).__name__,
        image_size=size,
        patch_size=patch,
        width=tokens.shape[2],
        class_token=tokens.shape[1] > grid[0] * grid[1],
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        flops=flops,
    )


def tokens_given(network: nn.Module, images: Tensor, reference: str) -> tuple[Tensor, tuple[int, int]]:
    """Tokens (B, P+L, D), a class token in front where there is one, and their grid. ValueError as in `OwnNetwork`."""
    try:
        found = network(images)
    except Exception as error:
        raise ValueError(f"{reference} fails on images {tuple(images.shape)}: {_said(error)}") from error
    if not (isinstance(found, tuple | list) and len(found) == 3):
        raise ValueError(f"{reference} returns a {type(found).__name__}; {RETURNS}")
    token, patches, grid = found
    try:
        height, width = map(int, grid)
        patches = _in_rows(patches, len(images), (height, width))
        if token is not None:
            patches = torch.cat([token.unsqueeze(1), patches], dim=1)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in found]
        what = f"{shapes} for {len(images)} images ({_said(error)})"
        raise ValueError(f"{reference} returns {what}; {RETURNS}") from error
    return patches, (height, width)


def _in_rows(patches: Tensor, count: int, grid: tuple[int, int]) -> Tensor:
    """Patch tokens (B, L, D), row by row."""
    if patches.ndim == 3 and patches.shape[:2] == (count, grid[0] * grid[1]):
        return patches
    last, first = (patches.ndim == 4 and patches.shape[at : at + 2] == grid for at in (1, 2))
    if len(patches) != count or last == first:
        raise ValueError(f"patch tokens that are not, or doubly, on a grid of {grid[0]} x {grid[1]}")
    return (patches if last else patches.permute(0, 2, 3, 1)).flatten(1, 2)


def _source(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def _distribution(module: str) -> str:
    """`mynets 1.0`, if the module is of an installed package."""
    file = _source(module)
    if not file or not {"site-packages", "dist-packages"} & {*file.parts}:
        return ""
    names = packages_distributions().get(module.partition(".")[0], [])  # takes a second
    return f"{names[0]} {version(names[0])}" if names else ""


def _said(error: BaseException) -> str:
    name = "" if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:200]
