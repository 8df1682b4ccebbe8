"""Networks for frozen evaluation: a ViT-export, or a network of the user's own.

Tasks on frozen features use only what the two have in common: of the spec `size`, `patch_size`, `grid`, `width`,
`depth`, `has_class_token` and `label`; of the export `preparation`, `digest`, `facts`, `parameters` and `build()`, a
module that maps (B, 3, H, W) to tokens (B, P+L, D) for each layer, P prefix tokens before L patches. Tasks that need
a ViT call `vit_spec`, which refuses other networks.

A network of the user's own is `module:PACKAGE:FUNCTION`, or a module in a Python program. FUNCTION() returns an
nn.Module with attributes that define how its images are prepared (`image_size`, `mean`, `std`; optionally `crop` and
`interpolation`). It maps (B, 3, H, W) to one vector (B, D), or to a class token (B, D) or None, patch tokens
(B, h*w, D), (B, h, w, D) or (B, D, h, w), and their grid (h, w). docs/your-own-network.md has an example. This is the
only kind of reference that runs code from outside.

On a CPU several threads extract features. As a forward pass may change state in the network, as hooks do, threads take
turns, unless the network has the attribute `thread_safe = True`.
"""

import copy
import hashlib
import importlib
import inspect
import marshal
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.spec import FinalNorm, ImageGrid, Preparation, PreparesImages, ViTSpec
from engine.files import digest
from engine.work import count_flops

SCHEME = "module"
FORM = "write module:PACKAGE:FUNCTION, as in module:mynets:resnet18"
RETURNS = (
    "it has to return one vector (B, D), or class token (B, D) or None, patch tokens, and their grid (rows, columns)"
)
FRESH = (
    "its weights are random: the function returned different ones when it was called again, so every run and process "
    "would measure another network; load weights in it, or draw them from a seed"
)
HELD = f"{SCHEME}:memory:"  # prefix of references to networks in a Python program
Forward = Callable[[nn.Module, Tensor], Any]  # network, images (B, 3, H, W) -> what a network may return


@dataclass(frozen=True, kw_only=True)
class OwnSpec(ImageGrid):
    """Sizes of a network of the user's own, as measured. It counts as one layer without registers or final norm."""

    reference: str  # module:PACKAGE:FUNCTION
    label: str  # name of its class
    image_size: int | tuple[int, int]  # side in pixels, or height and width
    patch_size: int  # side of a patch in pixels; 0: the network returns one vector and no patches
    width: int  # D
    class_token: bool  # whether it returns a class token; a single vector counts as one
    parameters: int  # number of values in it
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
    """Adapter that gives the user's module the interface of a ViT: images -> tokens (B, P+L, D) of its one layer."""

    def __init__(self, network: nn.Module, spec: OwnSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        safe = getattr(network, "thread_safe", False)
        self.turn: AbstractContextManager[Any] = nullcontext() if safe else threading.Lock()

    def forward(self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = True) -> list[Tensor]:
        """Tokens for each requested layer. ValueError, in one line, if the network fails or returns other shapes."""
        if any(layer not in (-1, 0) for layer in layers):
            raise ValueError(f"{self.spec.reference} has only one layer: use layer=-1")
        with self.turn:
            tokens, grid = network_tokens(self.network, images, self.spec.reference)
        expected = self.spec.grid_of(images.shape[-2:])
        if grid != expected or tokens.shape[1:] != (self.spec.prefix + grid[0] * grid[1], self.spec.width):
            raise ValueError(
                f"{self.spec.reference} returns {tuple(tokens.shape[1:])} tokens on a grid of {grid} for images of "
                f"{tuple(images.shape[-2:])} px, but patches of {self.spec.patch_size} px make a grid of {expected}"
            )
        return [tokens] * len(layers)

    def normalise(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """The tokens unchanged: a final norm is part of the user's network."""
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
    files: Mapping[str, str]  # name of each source file of the network, or piece of code -> SHA-256
    package: str = ""  # installed package that FUNCTION is from, with its version
    name: str = ""  # in results, where the reference does not say it
    assumed: tuple[str, ...] = ()  # what nobody said

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
        """Hex SHA-256 over parameters, buffers, preparation and source files: what features depend on."""
        facts = digest([asdict(self.spec), asdict(self.preparation), dict(self.files)])
        return digest([facts, digest_of_tensors(_tensors(self.network))])

    def build(self, drop_path: float = 0.0) -> OwnNetwork:
        """A copy of the network, on the CPU."""
        return OwnNetwork(copy.deepcopy(self.network), self.spec).eval()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self.spec.reference} is a network of your own, without the {name} of a ViT-export")


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


_held: WeakValueDictionary[str, OwnExport] = WeakValueDictionary()  # reference -> network that a program holds


class WithForward(nn.Module):
    """A network whose features a function of the user's reads: `forward(network, images)`."""

    def __init__(self, network: nn.Module, function: Forward) -> None:
        super().__init__()
        self.network, self.function = network, function
        self.thread_safe = getattr(network, "thread_safe", False)

    def forward(self, images: Tensor) -> Any:
        return self.function(self.network, images)


def held_network(
    network: nn.Module,
    forward: Forward | None = None,
    image_size: int | tuple[int, int] | None = None,
    statistics: Preparation | None = None,
) -> OwnExport:
    """A copy of a module in memory, as a frozen network. The program has to hold the answer while it is evaluated.

    forward: reads the features; by default the module itself, of timm's models what its classifier would read.
    image_size, statistics: as in the attributes of the module (`image_size`, `mean`, `std`), or in timm's
    `pretrained_cfg`, where it has them. Digests cover weights, structure and the code of classes and functions outside
    of installed packages. ValueError says in one line what is wrong.
    """
    name = type(network).__name__
    of_timm = type(network).__module__.startswith("timm.") and hasattr(network, "pretrained_cfg")
    attributes: dict[str, Any] = {}
    if of_timm:
        known = network.pretrained_cfg
        attributes = {"image_size": known["input_size"][1:], "crop": known["crop_pct"]}
        attributes |= {key: known[key] for key in ("mean", "std", "interpolation")}
        name = known["architecture"]
    attributes |= {"image_size": image_size} if image_size is not None else {}
    attributes |= {"mean": statistics.mean, "std": statistics.std} if statistics else {}
    attributes = _attributes(network) | attributes
    code, package = _code_of(network, forward), _distribution(type(network).__module__)
    try:
        network = copy.deepcopy(network).cpu().float().eval().requires_grad_(False)
    except Exception as error:  # of any type: the module decides
        raise ValueError(f"{name} cannot be copied, and so not be evaluated ({_message(error)})") from error
    if of_timm or type(network).__module__.startswith("torchvision."):
        network.thread_safe = True
    if forward or of_timm:
        network = WithForward(network, forward or _before_classifier)
    preparation, size = _preparation(attributes, name)
    # What the digest has to cover before there is a name that says it.
    key = digest([code, asdict(preparation), size, digest_of_tensors(_tensors(network))])[:8]
    reference = f"{HELD}{name}-{key}"
    spec = replace(_measure_spec(network, reference, preparation, size), label=name)
    export = OwnExport(
        spec=spec,
        preparation=preparation,
        network=network,
        files=code,
        package=package,
        name=name,
        assumed=() if forward else _classifier_in(network, spec.width),
    )
    return _held.setdefault(reference, export)


def _classifier_in(network: nn.Module, width: int) -> tuple[str, ...]:
    """The assumption to note where the features seem to be a classifier's output."""
    last = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1:]
    return tuple(
        f"its layer {name} ({module.in_features} -> {width}) is no classifier; if it is, put torch.nn.Identity() there"
        for name, module in last
        if module.out_features == width and name.partition(".")[0] in ("fc", "head", "heads", "classifier", "linear")
    )


def _before_classifier(network: nn.Module, images: Tensor) -> Tensor:
    """(B, D) what the classifier of a timm model would read."""
    return network.forward_head(network.forward_features(images), pre_logits=True)


def _code_of(network: nn.Module, forward: Forward | None) -> dict[str, str]:
    """Names of the user's classes and functions in a network -> SHA-256 of their source; "structure": of its repr."""
    hashes = {"structure": hashlib.sha256(repr(network).encode()).hexdigest()}
    items: list[Any] = [*dict.fromkeys(map(type, network.modules())), *([forward] if forward else [])]
    for item in items:
        if _is_installed(getattr(item, "__module__", "")):
            continue
        try:
            source = inspect.getsource(item).encode()
        except (OSError, TypeError):  # typed at a prompt
            codes = [getattr(member, "__code__", None) for member in (item, *getattr(item, "__dict__", {}).values())]
            source = b"".join(marshal.dumps(code) for code in codes if code)
        hashes[getattr(item, "__qualname__", type(item).__name__)] = hashlib.sha256(source).hexdigest()
    return hashes


def own_network(reference: str) -> OwnExport:
    """Import PACKAGE, call FUNCTION and look at what it gives. ValueError says in one line what is wrong."""
    if reference.startswith(HELD):
        if reference not in _held:
            raise ValueError(f"{reference} is a network that another Python program held; give the module again")
        return _held[reference]
    function, drawn = _function(reference), torch.get_rng_state()
    network = _call_function(function, reference)
    weights = digest_of_tensors(_tensors(network))
    is_fresh = not torch.equal(drawn, torch.get_rng_state()) and weights != digest_of_tensors(
        _tensors(_call_function(function, reference))
    )
    preparation, size = _preparation(_attributes(network), reference)
    spec = _measure_spec(network, reference, preparation, size)
    modules = dict.fromkeys([function.__module__, type(network).__module__])
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in map(_source, modules) if file}
    package = _distribution(function.__module__)
    return OwnExport(
        spec=spec,
        preparation=preparation,
        network=network,
        files=files,
        package=package,
        assumed=(FRESH,) if is_fresh else (),
    )


def _call_function(function: Callable[[], Any], reference: str) -> nn.Module:
    """The module that FUNCTION returns, on the CPU and frozen. ValueError where it fails or returns something else."""
    try:
        network = function()
    except Exception as error:
        raise ValueError(f"{reference}: the function raised an error: {_message(error)}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{reference} returns a {type(network).__name__}; it has to return an nn.Module")
    return network.cpu().eval().requires_grad_(False)


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
        raise ValueError(f"{reference}: {package} cannot be imported ({_message(error)}); {where}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{reference}: {package} has no function {name!r}")
    return function


PREPARED = ("image_size", "mean", "std", "crop", "interpolation")


def _attributes(network: nn.Module) -> dict[str, Any]:
    """The attributes by which a network says how its images are prepared."""
    return {name: getattr(network, name) for name in PREPARED if hasattr(network, name)}


def _preparation(attributes: Mapping[str, Any], reference: str) -> tuple[Preparation, int | tuple[int, int]]:
    """Preparation and image size from attributes under the names of PREPARED. ValueError names what is missing."""
    if lacking := [name for name in PREPARED[:3] if name not in attributes]:
        in_python = "; or bench.load(network, image_size=..., statistics=...)" if ":" not in reference else ""
        raise ValueError(
            f"{reference}: the network has no attribute {', '.join(lacking)}; set image_size (pixels a side, or height "
            f"and width) and mean and std of its images (three numbers each, of pixels from 0 to 1){in_python}"
        )
    optional = {name: attributes[name] for name in PREPARED[3:] if name in attributes}
    try:
        size = [int(side) for side in torch.as_tensor(attributes["image_size"]).flatten()]
        mean, std = (tuple(map(float, torch.as_tensor(attributes[name]).flatten())) for name in ("mean", "std"))
        if len(size) not in (1, 2) or min(size) < 1 or len(mean) != 3 or len(std) != 3:
            raise ValueError(f"image_size={size}, mean={mean}, std={std}: give whole pixels and three numbers each")
        preparation = Preparation(mean=mean, std=std, **optional)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{reference}: {_message(error)}") from error
    return preparation, size[0] if len({*size}) == 1 else (size[0], size[1])


def _measure_spec(network: nn.Module, reference: str, preparation: Preparation, size: int | tuple[int, int]) -> OwnSpec:
    """The spec of a network, from two passes over a synthetic image. ValueError unless both give the same features."""
    height, width = size if isinstance(size, tuple) else (size, size)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preparation.mean, preparation.std))
    image = (synthetic_image((height, width)).float() - mean) / std
    with torch.inference_mode():
        (tokens, grid), flops = count_flops(lambda: network_tokens(network, image, reference))
        if not torch.equal(network_tokens(network, image, reference)[0], tokens):
            raise ValueError(f"{reference} gives other features when asked twice: switch off what it draws at random")
    vector, patch = grid == (0, 0), height // grid[0] if grid[0] else 0
    if not vector and (not patch or (grid[0] * patch, grid[1] * patch) != (height, width)):
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


def network_tokens(network: nn.Module, images: Tensor, reference: str) -> tuple[Tensor, tuple[int, int]]:
    """Tokens (B, P+L, D), a class token in front where there is one, and their grid; of one vector (B, D) that as the
    class token, L = 0. ValueError as in `OwnNetwork`."""
    try:
        output = network(images)
    except Exception as error:
        raise ValueError(f"{reference} fails on images {tuple(images.shape)}: {_message(error)}") from error
    if isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(images):
        return output.unsqueeze(1), (0, 0)
    if not (isinstance(output, tuple | list) and len(output) == 3):
        shape = f" {tuple(output.shape)} for {len(images)} images" if isinstance(output, Tensor) else ""
        maps = isinstance(output, Tensor) and output.ndim == 4
        hint = "; of maps (B, D, h, w) return their mean over h and w, or (None, maps, maps.shape[-2:])" if maps else ""
        raise ValueError(f"{reference} returns a {type(output).__name__}{shape}; {RETURNS}{hint}")
    token, patches, grid = output
    try:
        height, width = map(int, grid)
        patches = _in_rows(patches, len(images), (height, width))
        if token is not None:
            patches = torch.cat([token.unsqueeze(1), patches], dim=1)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in output]
        problem = f"{shapes} for {len(images)} images ({_message(error)})"
        raise ValueError(f"{reference} returns {problem}; {RETURNS}") from error
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
    if not _is_installed(module):
        return ""
    names = packages_distributions().get(module.partition(".")[0], [])  # takes a second
    return f"{names[0]} {version(names[0])}" if names else ""


def _is_installed(module: str) -> bool:
    file = _source(module)
    return file is not None and bool({"site-packages", "dist-packages"} & {*file.parts})


def _message(error: BaseException) -> str:
    name = "" if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:200]


FrozenSpec = ViTSpec | OwnSpec
FrozenExport = ViTExport | OwnExport
FROZEN = "what reads frozen features can be run, such as k-NN, linear, low-shot, segmenter_linear and ade_linear"


def vit_spec(spec: FrozenSpec, why: str) -> ViTSpec:
    """The spec, if it is a ViT's. ValueError for a network of the user's own; why: what the task needs a ViT for."""
    if isinstance(spec, ViTSpec):
        return spec
    raise ValueError(f"{spec.reference} is a frozen network of your own, and {why}; {FROZEN}")
