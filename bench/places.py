"""Whether the files are there that image URLs and references to checkpoints name, without opening them."""

from pathlib import Path

from checkpoints.resolve import TIMM_SCHEMES
from engine.extensions import extensions


def absent_images(url: str) -> Path | None:
    """The path in `SCHEME:PATH` of images where nothing is there; None where there is something, or no path."""
    scheme, _, place = url.partition(":")
    return _absent(place) if any(scheme in extensions(kind) for kind in ("imagesets", "layouts")) else None


def absent_file(reference: str) -> Path | None:
    """The path in a reference to a checkpoint, PATH or IMPORTER:PATH, where nothing is there; None as above."""
    scheme, colon, place = reference.partition(":")
    if colon and scheme in TIMM_SCHEMES:
        return None
    return _absent(place if colon and scheme in extensions("importers") else reference)


def _absent(place: str) -> Path | None:
    path = Path(place).expanduser()
    return path if place and not path.exists() else None
