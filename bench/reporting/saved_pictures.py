"""Pictures of `bench visualize` in a folder of results: what each says of itself, and those that a report shows.

A PNG of `bench visualize` holds its record as a text, with the digests of the checkpoints that it shows, so that a
picture and what it is of cannot be parted.
"""

import base64
import contextlib
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from PIL import Image

from bench.reporting.contents import ReportContents
from bench.results.record import Result
from downstream.data.scenes import layout_of
from imagesets.decoding import open_image

KEY = "bench visualize"  # of the PNG's text that holds the record
OTHERS = ("cache", "exports", "removed", "results")  # folders of results without pictures
DEPTH = 2  # folders below that of the results in which pictures are looked for
FILES = 500  # PNG files that are looked at
PAGE = 6 << 20  # bytes of a page that pictures take, at most
SMALL = 100_000  # bytes of a PNG that stays as it is
QUALITY = 82  # of the others, as WebP
CSS_DPI = 96  # pixels of an inch in a browser
ASKED = 3  # checkpoints of the command that makes pictures


@dataclass(frozen=True, kw_only=True)
class PictureRecord:
    """What a picture says of itself. checkpoints: digest -> name in the picture; none for what needs no weights."""

    kind: str
    note: str
    checkpoints: Mapping[str, str]

    @property
    def text(self) -> str:
        return json.dumps(vars(self))


@dataclass(frozen=True, kw_only=True)
class ShownPicture:
    """A picture of a report. of: the board's checkpoints in it. width: as drawn, in CSS pixels."""

    kind: str
    note: str
    of: tuple[str, ...]
    file: str  # below the folder of results
    url: str  # data:
    width: int


@dataclass(frozen=True, kw_only=True)
class ReportPictures:
    """What a report says of pictures. left_out: files for which there is no room. command: that makes some, in lines;
    none where there are some."""

    shown: tuple[ShownPicture, ...] = ()
    left_out: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def report_pictures(out: Path, report: ReportContents, results: Sequence[Result]) -> ReportPictures:
    """The pictures below a folder of results that show checkpoints of its board, or need none."""
    names = {str(each["digest"]): str(each["name"]) for each in report.checkpoints}
    shown: list[ShownPicture] = []
    left_out: list[str] = []
    room, seen = PAGE, set[bytes]()
    for path in picture_files(out):
        read = _read(path, out, names)
        if read is None or read[0] in seen:
            continue
        seen.add(read[0])
        room -= len(read[1].url)
        if room < 0:
            left_out.append(read[1].file)
        else:
            shown.append(read[1])
    command = () if shown or left_out else drawing_command(out, report, results)
    return ReportPictures(shown=tuple(shown), left_out=tuple(left_out), command=command)


def picture_files(out: Path) -> list[Path]:
    """PNG files of a folder of results and the folders below it, FILES at most, in the order of their names."""

    def below(folder: Path, depth: int) -> Iterator[Path]:
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            return
        yield from (path for path in entries if path.suffix == ".png" and path.is_file())
        for path in entries if depth else ():
            if path.is_dir() and not path.is_symlink() and not (folder == out and path.name in OTHERS):
                yield from below(path, depth - 1)

    return list(islice(below(out, DEPTH), FILES))


def _read(path: Path, out: Path, names: Mapping[str, str]) -> tuple[bytes, ShownPicture] | None:
    # The file's bytes, and the picture; None where it is none of `bench visualize`, or of other checkpoints.
    with contextlib.suppress(OSError, ValueError, SyntaxError):  # what Pillow raises of a damaged file
        data = path.read_bytes()
        image = open_image(data)
        record = record_in(str(image.info.get(KEY, "")))
        if image.format != "PNG" or record is None:
            return None
        of = tuple(
            names[digest] if name == names[digest] else f"{names[digest]} (here {name})"
            for digest, name in record.checkpoints.items()
            if digest in names
        )
        if record.checkpoints and not of:
            return None
        dots = float(image.info.get("dpi", (CSS_DPI,))[0]) or CSS_DPI
        file = path.relative_to(out).as_posix()
        width = round(image.width * CSS_DPI / dots)
        url = embedded(data, image)
        return data, ShownPicture(kind=record.kind, note=record.note, of=of, file=file, url=url, width=width)
    return None


def record_in(text: str) -> PictureRecord | None:
    """The record that a text holds; None for any other text."""
    try:
        found = json.loads(text)
        kind, note, checkpoints = (found[name] for name in ("kind", "note", "checkpoints"))
        return PictureRecord(
            kind=str(kind), note=str(note), checkpoints={str(digest): str(name) for digest, name in checkpoints.items()}
        )
    except (ValueError, KeyError, TypeError, AttributeError):
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


def drawing_command(out: Path, report: ReportContents, results: Sequence[Result]) -> tuple[str, ...]:
    """The command that draws what the best checkpoints see of the measured images, in lines; none where nothing can be
    drawn."""
    facts = {each["name"]: each for each in report.checkpoints}
    named = {name for name, each in facts.items() if each["kind"] == "measured" and _can_be_named(each)}
    tables = [[row.name for row in table.rows if row.name in named][:ASKED] for table in report.tables]
    best = next(filter(None, tables), [])
    images = next((each.data.url for each in results if each.status == "ok" and not layout_of(each.data.url)), "")
    if not best or not images:
        return ()
    references = [_reference(out, facts[name]) for name in best]
    lines = [
        ["bench", "visualize", "pca"],
        ["--checkpoint", *references],
        ["--name", *best],
        ["--images", images],
        ["--out", str(out / "pictures")],
    ]
    return tuple(shlex.join(line) for line in lines)


def _can_be_named(facts: Mapping[str, object]) -> bool:
    """Whether a command can say which network it means: one that a Python program held has no reference."""
    return bool(facts["source"]) and not str(facts["source"]).startswith("module:memory:")


def _reference(out: Path, facts: Mapping[str, object]) -> str:
    saved = out / "exports" / f"{facts['name']}-{str(facts['digest'])[:8]}"
    return str(saved) if saved.is_dir() else str(facts["source"])
