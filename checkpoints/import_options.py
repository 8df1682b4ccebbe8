"""What users say about a checkpoint: its reference, and facts that its tensors do not show. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.spec import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, Preparation
from engine.errors import UserError
from engine.extensions import source_files
from engine.printing import closest, did_you_mean
from engine.settings import ImageShape, PositiveInt

TIMM_SCHEMES = ("timm", "hf-hub", "local-dir")
OTHER_SCHEMES = (*TIMM_SCHEMES, "pixels", "module")  # schemes that are not importers of files
Channels = tuple[float, float, float]
STATISTICS = {"imagenet": (IMAGENET_MEAN, IMAGENET_STD), "half": (HALF, HALF), "clip": (CLIP_MEAN, CLIP_STD)}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Facts about a checkpoint that its file may not hold. None: read from the file, or an error if it lacks it."""

    # S: mean and std of the pretraining images, for checkpoint files that do not state them: imagenet, half, clip, or
    # six numbers M,M,M,S,S,S
    statistics: str | None = None
    branch: str | None = None  # B: network in the file: student, teacher, ...; the choices depend on its format
    prefix: str | None = None  # P: prefix of the network's tensor names, for files of other training code
    heads: PositiveInt | None = None  # N: attention heads, if the tensors do not determine them
    # N: resize the position embeddings for images of N pixels, or of HxW, height and width
    image_size: PositiveInt | ImageShape | None = None
    architecture: str | None = None  # NAME: timm's name of the model, for a file of its weights

    def __post_init__(self) -> None:
        _ = self.preparation  # raises ValueError for invalid statistics

    @property
    def preparation(self) -> Preparation:
        """Preparation with the requested statistics, by default ImageNet's. Raises ValueError for invalid ones."""
        name = self.statistics or "imagenet"
        mean, std = STATISTICS.get(name) or _six_numbers(name)
        return Preparation(mean=mean, std=std)


def _six_numbers(text: str) -> tuple[Channels, Channels]:
    """Mean and std of three channels from six numbers, separated by commas. Raises ValueError for anything else."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) != 6 or not are_statistics(numbers[:3], numbers[3:]):
        raise UserError(
            "statistics",
            f"give {', '.join(STATISTICS)}, or mean and std of red, green and blue pixels from 0 "
            "to 1, such as 0.4914,0.4822,0.4465,0.2470,0.2435,0.2616",
            text,
        )
    return numbers[:3], numbers[3:]


def are_statistics(mean: Any, std: Any) -> bool:
    """Whether two values are mean and std of three channels of pixels from 0 to 1."""
    are_triples = all(isinstance(values, list | tuple) and len(values) == 3 for values in (mean, std))
    return are_triples and all(isinstance(n, int | float) and 0 <= n <= 1 for n in (*mean, *std)) and 0 not in std


def file_importers() -> list[str]:
    """Keys of the importers, all of which read a file."""
    return list(source_files("importers"))


def check_reference(reference: str) -> None:
    """Raise ValueError for a reference that neither begins with a known scheme nor names an existing file or folder."""
    scheme, colon, rest = reference.partition(":")
    path = Path(reference).expanduser()
    if path.exists() or (colon and scheme in (*OTHER_SCHEMES, *file_importers())):
        return
    if colon:
        suggestion = did_you_mean(scheme, [*OTHER_SCHEMES, *file_importers()], "`bench list importers`", f":{rest}")
        raise ValueError(f"no checkpoint {reference!r}: {scheme!r} is no importer{suggestion}")
    raise ValueError(
        f"no checkpoint {reference!r}: no such file or folder, nor timm:NAME, hf-hub:ID or IMPORTER:PATH"
        f"{_suggestion(path)}"
    )


def _suggestion(path: Path) -> str:
    """`; did you mean FILE?` if a file next to a missing path has a similar name; advice for `pixels`; else ""."""
    if str(path) == "pixels":
        return "; raw pixels are pixels:SIDE, such as pixels:32"
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = closest(path.name, siblings)
    return f"; did you mean {path.parent / similar}?" if similar else ""
