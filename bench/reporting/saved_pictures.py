"""Pictures of `bench visualize` in a folder of results: those that a report shows, and the command that draws some.

A PNG of `bench visualize` holds a record as a text: its kind, its note and the digests of the checkpoints that it
shows, so that a picture and what it is of cannot be parted.
"""

import base64
import contextlib
import io
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import msgspec
from PIL import Image

from bench.reporting.contents import ReportContents
from bench.reporting.panels import RECORD
from downstream.data.scenes import layout_of
from imagesets.decoding import open_image

OTHERS = ("cache", "exports", "removed", "results")  # folders of results without pictures
PLACES = ("*.png", "*/*.png", "*/*/*.png")  # below the folder of results
FILES = 500  # PNG files that are looked at
PAGE = 6 << 20  # bytes of a page that pictures take, at most
SMALL = 100_000  # bytes of a PNG that stays as it is
QUALITY = 82  # of the others, as WebP
CSS_DPI = 96  # pixels of an inch in a browser
BEST = 3  # checkpoints of the command that makes pictures


def report_pictures(out: Path, report: ReportContents) -> dict[str, Any]:
    """The pictures below a folder of results that show checkpoints of its board, or need none.

    shown: a dictionary each (`shown_picture`). left_out: files for which there is no room. commands: that draw some
    (`drawing_commands`); none where there are some.
    """
    names = {str(checkpoint["digest"]): str(checkpoint["name"]) for checkpoint in report.checkpoints}
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    room, seen = PAGE, set[bytes]()
    for path in picture_files(out):
        with contextlib.suppress(OSError, ValueError, SyntaxError):  # what Pillow raises of a damaged file
            data = path.read_bytes()
            picture = None if data in seen else shown_picture(data, path.relative_to(out).as_posix(), names)
            if picture is None:
                continue
            seen.add(data)
            room -= len(picture["url"])
            if room < 0:
                left_out.append(picture["file"])
            else:
                shown.append(picture)
    commands = [] if shown or left_out else drawing_commands(out, report)
    return {"shown": shown, "left_out": left_out, "commands": commands}


def picture_files(out: Path) -> list[Path]:
    """PNG files of a folder of results and the folders below it, FILES at most, in the order of their names."""
    paths = (path for pattern in PLACES for path in out.glob(pattern))
    return sorted(path for path in paths if path.relative_to(out).parts[0] not in OTHERS)[:FILES]


def shown_picture(data: bytes, file: str, names: Mapping[str, str]) -> dict[str, Any] | None:
    """kind, note, file; of: the board's checkpoints in the picture; url (data:); width as drawn, in CSS pixels.

    None for a file that `bench visualize` did not draw, or drew of other checkpoints. names: digest -> name.
    """
    image = open_image(data)
    record = record_in(str(image.info.get(RECORD, "")))
    if image.format != "PNG" or record is None:
        return None
    checkpoints = [
        names[digest] if name == names[digest] else f"{names[digest]} (here {name})"
        for digest, name in record["checkpoints"].items()
        if digest in names
    ]
    if record["checkpoints"] and not checkpoints:
        return None
    dots = float(image.info.get("dpi", (CSS_DPI,))[0]) or CSS_DPI
    width = round(image.width * CSS_DPI / dots)
    return {**record, "of": checkpoints, "file": file, "url": embedded(data, image), "width": width}


class PictureRecord(TypedDict):
    """What a PNG says of itself."""

    kind: str
    note: str
    checkpoints: dict[str, str]  # digest -> name


def record_in(text: str) -> PictureRecord | None:
    """The record that a text holds; None for any other text."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=PictureRecord)
    return None


def embedded(data: bytes, image: Image.Image) -> str:
    """A PNG as a data: URL; a large one as WebP, where that is smaller."""
    form = "png"
    if len(data) > SMALL:
        buffer = io.BytesIO()
        with contextlib.suppress(OSError, ValueError):  # more than 16 383 pixels a side
            image.convert("RGB").save(buffer, "WEBP", quality=QUALITY)
        if 0 < len(buffer.getvalue()) < len(data):
            data, form = buffer.getvalue(), "webp"
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"


def drawing_commands(out: Path, report: ReportContents) -> list[list[str]]:
    """Commands, in lines each, that draw what the best checkpoints see of the measured images, and what each task on
    frozen patches predicts."""
    from bench.reporting.kinds.predictions import PROTOCOLS

    checkpoints = {c["name"]: c for c in report.checkpoints if c["kind"] == "measured" and has_reference(c)}
    commands: dict[str, list[list[str]]] = {}
    for table in report.tables:
        best = [row.name for row in table.rows if row.name in checkpoints][:BEST]
        result, kind, of = table.result, ["pca"], ""
        if layout_of(result.data.url):
            own = result.protocol.name in PROTOCOLS and not result.protocol.changes
            best, of = best if own else [], result.task
            settings = f"protocol={result.protocol.name}", f"results={out}", f"precision={result.precision}"
            kind = ["predictions", "--set", *settings]
        saved = {name: out / "exports" / f"{name}-{str(checkpoints[name]['digest'])[:8]}" for name in best}
        references = [str(saved[name] if saved[name].is_dir() else checkpoints[name]["source"]) for name in best]
        lines = [["bench", "visualize", *kind], ["--checkpoint", *references], ["--name", *best]]
        if best:
            commands.setdefault(of, [*lines, ["--images", result.data.url], ["--out", str(out / "pictures")]])
    return [[shlex.join(line) for line in lines] for lines in commands.values()]


def has_reference(checkpoint: Mapping[str, object]) -> bool:
    """Whether a command can name the network: one that a Python program held has no reference."""
    return bool(checkpoint["source"]) and not str(checkpoint["source"]).startswith("module:memory:")
