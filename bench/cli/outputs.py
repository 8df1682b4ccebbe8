"""`--out`, checked before the work: that it can be written, and that nobody else's files are there."""

from pathlib import Path
from tempfile import TemporaryFile

from bench.cli.messages import in_one_line


def check_writable(out: Path) -> None:
    """Make the folder, if need be, and write into it. ValueError, naming the option, where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _naming(out, error) from error


def _naming(out: Path, error: OSError) -> ValueError:
    return ValueError(f"--out: {in_one_line(OSError(error.errno, error.strerror, str(out)))}")


def check_new_export(out: Path) -> None:
    """ValueError, naming the option, where an export folder `out` could not be written; nothing is left behind."""
    try:
        others = out.exists() and any(out.iterdir())
        nearest = next(place for place in (out, *out.absolute().parents) if place.exists())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _naming(out, error) from error
    if others and not (out / "config.json").exists():
        raise ValueError(f"--out {out}: this folder is not empty and not an export: choose a new one")
