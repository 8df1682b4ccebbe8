"""Pictures of `bench visualize` in a folder of results: those that a report shows, and the commands that draw some.

A PNG of `bench visualize` contains a record as a text: its kind, its note and the digests of the checkpoints that it
shows. So a picture that is moved or renamed is still recognised.
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

from bench.reports.contents import ReportContents
from bench.reports.panels import RECORD
from downstream.data.scenes import layout_of
from imagesets.decoding import open_image, read_bytes

FOLDERS_WITHOUT_PICTURES = ("cache", "exports", "removed", "results")  # in a folder of results
PATTERNS = ("*.png", "*/*.png", "*/*/*.png")  # of pictures in a folder of results
MAX_FILES = 500  # PNG files that are opened
MAX_PAGE_BYTES = 6 << 20  # of the pictures of a page
MAX_PNG_BYTES = 100_000  # a larger PNG is embedded as WebP
WEBP_QUALITY = 82
CSS_DPI = 96  # CSS pixels of an inch
MAX_CHECKPOINTS = 3  # in a command that draws pictures


def report_pictures(out: Path, report: ReportContents) -> dict[str, Any]:
    """The pictures below a folder of results that show checkpoints of its report, or need none.

    Returns:
        shown: a dictionary for each picture (`shown_picture`). left_out: files beyond MAX_PAGE_BYTES. commands: those
        that draw pictures (`drawing_commands`), if there are none.
    """
    names = {str(checkpoint["digest"]): str(checkpoint["name"]) for checkpoint in report.checkpoints}
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    page_bytes, copies = 0, set[bytes]()
    for path in picture_files(out):
        with contextlib.suppress(OSError, ValueError, SyntaxError):  # raised by Pillow for a damaged file
            data = read_bytes(str(path))
            picture = None if data in copies else shown_picture(data, path.relative_to(out).as_posix(), names)
            if picture is None:
                continue
            copies.add(data)
            page_bytes += len(picture["url"])
            if page_bytes > MAX_PAGE_BYTES:
                left_out.append(picture["file"])
            else:
                shown.append(picture)
    commands = [] if shown or left_out else drawing_commands(out, report)
    return {"shown": shown, "left_out": left_out, "commands": commands}


def picture_files(out: Path) -> list[Path]:
    """The first MAX_FILES PNG files in a folder of results and the folders in it, sorted by path."""
    paths = (path for pattern in PATTERNS for path in out.glob(pattern))
    return sorted(path for path in paths if path.relative_to(out).parts[0] not in FOLDERS_WITHOUT_PICTURES)[:MAX_FILES]


def shown_picture(data: bytes, file: str, names: Mapping[str, str]) -> dict[str, Any] | None:
    """A picture that `bench visualize` drew of checkpoints of the report; None for any other file.

    Args:
        data: the bytes of the file.
        file: its path, as shown.
        names: digest -> name of each checkpoint of the report.

    Returns:
        kind, note and checkpoints: of `PictureRecord`. of: names of the checkpoints. file: its path. url: a data: URL.
        width: in CSS pixels, at which the picture has the size that it was drawn for.
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
    dpi = float(image.info.get("dpi", (CSS_DPI,))[0]) or CSS_DPI
    width = round(image.width * CSS_DPI / dpi)
    return {**record, "of": checkpoints, "file": file, "url": embedded(data, image), "width": width}


class PictureRecord(TypedDict):
    """The description that `bench visualize` stores in a PNG."""

    kind: str
    note: str
    checkpoints: dict[str, str]  # digest -> name


def record_in(text: str) -> PictureRecord | None:
    """The record in a text of a PNG; None for any other text."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(text, type=PictureRecord)
    return None


def embedded(data: bytes, image: Image.Image) -> str:
    """A PNG as a data: URL; a large one as WebP, if that is smaller. data: the bytes of the image."""
    media_type = "image/png"
    if len(data) > MAX_PNG_BYTES:
        buffer = io.BytesIO()
        with contextlib.suppress(OSError, ValueError):  # more than 16 383 pixels a side
            image.convert("RGB").save(buffer, "WEBP", quality=WEBP_QUALITY)
        if 0 < len(buffer.getvalue()) < len(data):
            data, media_type = buffer.getvalue(), "image/webp"
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def drawing_commands(out: Path, report: ReportContents) -> list[list[str]]:
    """Commands, each as lines, that draw pictures of the best checkpoints of a report.

    One draws a PCA of the patches of the measured images; another, for each task on frozen patches, its predictions.
    """
    from bench.reports.kinds.predictions import PROTOCOLS

    checkpoints = {
        checkpoint["name"]: checkpoint
        for checkpoint in report.checkpoints
        if checkpoint["kind"] == "measured" and has_reference(checkpoint)
    }
    commands: dict[str, list[list[str]]] = {}  # task of predictions, "" for the PCA -> words of each line
    for table in report.tables:
        result, protocol = table.result, table.result.protocol
        best = [row.name for row in table.rows if row.name in checkpoints][:MAX_CHECKPOINTS]
        if not best:
            continue
        if not layout_of(result.data.url):
            task, kind = "", ["pca"]
        elif protocol.name in PROTOCOLS and not protocol.changes:
            settings = f"protocol={protocol.name}", f"results={out}", f"precision={result.precision}"
            task, kind = result.task, ["predictions", "--set", *settings]
        else:
            continue
        saved = {name: out / "exports" / f"{name}-{str(checkpoints[name]['digest'])[:8]}" for name in best}
        references = [str(saved[name] if saved[name].is_dir() else checkpoints[name]["source"]) for name in best]
        lines = [
            ["bench", "visualize", *kind],
            ["--checkpoint", *references],
            ["--name", *best],
            ["--images", result.data.url],
            ["--out", str(out / "pictures")],
        ]
        commands.setdefault(task, lines)  # the first table of a task
    return [[shlex.join(line) for line in lines] for lines in commands.values()]


def has_reference(checkpoint: Mapping[str, object]) -> bool:
    """Whether a command can name the network; one that was only in the memory of a Python program has no reference."""
    return bool(checkpoint["source"]) and not str(checkpoint["source"]).startswith("module:memory:")
