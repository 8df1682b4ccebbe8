"""What a user may say of a checkpoint: its reference, and what no tensor of its file shows. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from checkpoints.spec import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, Preparation
from engine.extensions import source_files
from engine.printing import closest, did_you_mean
from engine.settings import PositiveInt

TIMM_SCHEMES = ("timm", "hf-hub", "local-dir")
OTHER_SCHEMES = (*TIMM_SCHEMES, "pixels", "module")  # than those of importers, which read a file
ImageShape = Annotated[tuple[PositiveInt, PositiveInt], Meta(description="height x width, such as 384x512")]
Channels = tuple[float, float, float]
STATISTICS = {"imagenet": (IMAGENET_MEAN, IMAGENET_STD), "half": (HALF, HALF), "clip": (CLIP_MEAN, CLIP_STD)}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What a user may say that a file does not: None means find out, or stop."""

    # S: imagenet, half, clip, or six numbers M,M,M,S,S,S: mean and std that the source trained with, of checkpoint
    # files that do not name them
    statistics: str | None = None
    branch: str | None = None  # B: student, teacher, ...: whichever the format has
    prefix: str | None = None  # P: what the names of the network's tensors begin with, in a file of other training code
    heads: PositiveInt | None = None  # N: attention heads, where no tensor tells them
    # N: resize the position tables to N pixels, or to HxW, height and width
    image_size: PositiveInt | ImageShape | None = None
    architecture: str | None = None  # NAME: timm's name of the model, for a file of its weights

    def __post_init__(self) -> None:
        _ = self.preparation  # refuses statistics that there are not

    @property
    def preparation(self) -> Preparation:
        """Image statistics as asked for; ImageNet's by default. ValueError for none that there are."""
        asked = self.statistics or "imagenet"
        mean, std = STATISTICS.get(asked) or _six(asked)
        return Preparation(mean=mean, std=std)


def _six(text: str) -> tuple[Channels, Channels]:
    """Mean and std of three channels, pixels being 0 to 1, as six numbers with commas between them."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) != 6 or not all(0 <= number <= 1 for number in numbers) or 0 in numbers[3:]:
        raise ValueError(
            f"--statistics {text}: give {', '.join(STATISTICS)}, or mean and std of red, green and blue pixels from 0 "
            "to 1, such as 0.4914,0.4822,0.4465,0.2470,0.2435,0.2616"
        )
    return numbers[:3], numbers[3:]


def file_importers() -> list[str]:
    """Keys of the importers, all of which read a file."""
    return list(source_files("importers"))


def check_reference(reference: str) -> None:
    """ValueError where a reference begins with no scheme and names no file or folder."""
    scheme, colon, rest = reference.partition(":")
    path = Path(reference).expanduser()
    if path.exists() or (colon and scheme in (*OTHER_SCHEMES, *file_importers())):
        return
    if colon:
        schemes = did_you_mean(scheme, [*OTHER_SCHEMES, *file_importers()], "`bench list importers`", f":{rest}")
        raise ValueError(f"no checkpoint {reference!r}: {scheme!r} is no importer{schemes}")
    raise ValueError(
        f"no checkpoint {reference!r}: no such file or folder, nor timm:NAME, hf-hub:ID or IMPORTER:PATH{_beside(path)}"
    )


def _beside(path: Path) -> str:
    """`; did you mean F?` where something beside the path that does not exist has nearly its name; raw pixels too."""
    if str(path) == "pixels":
        return "; raw pixels are pixels:SIDE, such as pixels:32"
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = closest(path.name, siblings)
    return f"; did you mean {path.parent / near}?" if near else ""
