"""What a kept head predicts: for images of a program (`load_head`), or for a folder or an image set (`bench predict`).

OUT/predictions.csv has a row for each image, in the order of the set: the most probable classes; or the files of its
mask and overlay, or of its depth. OUT/predictions.json says by which head, and of which images. A prediction that was
killed goes on after the last complete row.
"""

import csv
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.options import Options, ready_device
from bench.results.heads import HeadFile
from bench.run.suites import catalogue
from checkpoints.export import read_tensors
from checkpoints.frozen import FrozenExport
from downstream.data.overlays import class_colours, tinted
from engine.errors import UserError
from engine.files import json_bytes, locked_or_refused, open_regular, read_json, write_atomic
from engine.printing import csv_text, say
from engine.progress import Progress
from engine.tasks import Emit, Head, Task, Workspace
from imagesets.decoding import as_rgb, decode_rgb, read_bytes
from imagesets.sets import FileImages, ImageSet, contents_differ

TABLE, STATE = "predictions.csv", "predictions.json"
RANKED = 5  # classes of an image in the table
NAMED_COLOURS = 7  # first classes, whose colours are far apart (downstream/data/overlays.py)
MILLIMETRES = 1000.0  # in a metre
MAX_DEPTH = 65.535  # metres that 16 bits of millimetres hold
OF_THE_EVALUATION = ("precision", "compiled", "decode")  # options that a prediction takes from the evaluation


class ImageList:
    """Images of a Python program, paths or PIL images, with the methods of an ImageSet that read images."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, str | PathLike) else f"image {index}"

    def encoded(self, index: int) -> bytes | None:
        is_path = isinstance(self.images[index], str | PathLike)
        return read_bytes(self.path(index)) if is_path else None

    def image(self, index: int) -> Image.Image:
        encoded = self.encoded(index)
        return as_rgb(self.images[index]) if encoded is None else decode_rgb(encoded, self.path(index))


@dataclass(frozen=True, kw_only=True)
class LoadedHead:
    """A kept head with its backbone, ready to predict."""

    file: HeadFile
    tensors: Mapping[str, Any]
    task: Task
    export: FrozenExport
    space: Workspace

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes by number; empty for depth."""
        return self.file.classes

    def apply(self, images: Any, emit: Emit, first: int = 0) -> None:
        """`Task.apply_head` on an ImageSet or ImageList."""
        head = Head(tensors=self.tensors, classes=self.classes, facts=self.file.facts)
        self.task.apply_head(head, self.export, images, self.space, emit, first)

    def predict(self, images: Sequence["str | PathLike | Image.Image"]) -> list[np.ndarray]:
        """What the head predicts for images, given as paths or PIL images, in memory.

        Probabilities of the classes (C,) float32; masks, the class of each pixel (H, W) uint8; or depth in metres
        (H, W) float32. ValueError, naming the file, for an image that cannot be read.
        """
        predictions: dict[int, Any] = {}
        strict = replace(self, space=replace(self.space, skip_bad=False))
        strict.apply(ImageList(images), predictions.__setitem__)
        values = [predictions[index] for index in range(len(images))]
        return [probabilities(row) for row in values] if self.file.predicts == "classes" else values


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of logits (C,), float32."""
    import torch

    return torch.from_numpy(logits).softmax(0).numpy()


def with_backbone(file: HeadFile, path: Path, export: FrozenExport, options: Options) -> LoadedHead:
    """A kept head, read from `path`, with its backbone. UserError for another one than that it was trained on."""
    result, used = file.result, file.result.protocol
    if export.digest != result.checkpoint.digest:
        trained_on = f"{result.checkpoint.name} (digest {result.checkpoint.digest[:8]})"
        text = f"it was trained on {trained_on}, and this checkpoint has digest {export.digest[:8]}: give that one"
        raise UserError("head", text, path)
    for name in OF_THE_EVALUATION:
        if (value := getattr(options, name)) != getattr(Options(), name):
            raise UserError("options", f"{name} is that of the evaluation: leave it out", value)
    cautions = [*result.facts.get("warnings", ()), *([f"trained with limit={result.limit}"] if result.limit else [])]
    say(*(f"{path.name}: {caution}" for caution in cautions), errors=True)
    chosen = catalogue(suite=used.name).protocols.get(used.name)
    if chosen is None:
        fix = f"install {used.plugin}" if used.plugin else "use the version of ssl-vit-bench that kept the head"
        raise UserError("head", f"there is no protocol {used.name} here: {fix}", path)
    space = Workspace(
        cache=Path(),
        data="",
        device=ready_device(options.device, result.compiled),
        precision=result.precision,  # type: ignore[arg-type]
        compiled=result.compiled,
        decode=result.decode,  # type: ignore[arg-type]
        skip_bad=options.skip_bad,
        batch_size=options.batch_size or file.batch_size,
        workers=options.workers,
    )
    return LoadedHead(
        file=file,
        tensors=read_tensors(path.with_suffix(".safetensors")),
        task=type(chosen.task)(**result.settings),
        export=export.evaluated_at(result.image_size) if result.image_size else export,
        space=space,
    )


def write_predictions(head: LoadedHead, images: ImageSet, out: Path) -> Path:
    """Predict all images into the folder `out`, or those that an earlier call left; returns the path of the table.

    UserError if `out` holds something else. Raises UnreadableImage unless `skip_bad`: its rows say what is wrong.
    """
    table, state = out / TABLE, out / STATE
    identity = {"head": head.file.sha256, "images": images.fingerprint}
    if head.file.predicts == "depth" and head.task.depths[1] > MAX_DEPTH:  # type: ignore[attr-defined]
        farthest = f"{head.task.depths[1]:g} m"  # type: ignore[attr-defined]
        raise UserError("head", f"it predicts up to {farthest}, and the files hold up to {MAX_DEPTH} m")
    with locked_or_refused(out / ".lock", f"{out}: another bench predict writes to this folder"):
        before = read_json(state, type=dict[str, Any]) if state.exists() else identity
        contents = before.pop("contents", "")  # earlier versions did not record it
        if before != identity or contents_differ(contents, images.contents):
            raise UserError("out", "it has predictions by another head, or of other images: choose a new folder", out)
        if table.exists() and not state.exists():
            raise UserError("out", f"its {TABLE} is not by bench predict: choose a new folder", out)
        write_atomic(state, json_bytes({**identity, "contents": contents or images.contents}) + b"\n")
        rows = Rows(head.file, images, out)
        complete = complete_rows(table, rows.header)
        done_before = [row[0] for row in complete[1:]]
        expected = [name_of(images, index) for index in range(min(len(done_before), len(images)))]
        is_changed = isinstance(images.images, FileImages) and done_before != expected  # others' names have their place
        if complete[0] != rows.header or is_changed:
            raise UserError("out", f"the rows of its {TABLE} were changed since: choose a new folder", out)
        write_atomic(table, in_bytes(complete))
        with open(table, "ab") as file, Progress(f"predicting {images.url}", len(images)) as progress:
            done = len(complete) - 1
            progress.resume(done)
            waiting: dict[int, np.ndarray | str] = {}  # predictions of later images than the next one
            lock = threading.Lock()

            def emit(index: int, prediction: "np.ndarray | str") -> None:
                nonlocal done
                with lock:
                    waiting[index] = prediction
                    while done in waiting:
                        file.write(in_bytes([rows.row(done, waiting.pop(done))]))
                        file.flush()
                        done += 1
                        progress.advance(1)

            head.apply(images, emit, done)
    return table


def in_bytes(rows: Sequence[Sequence[Any]]) -> bytes:
    """CSV of rows; names of files need not be UTF-8."""
    return csv_text(rows).encode(errors="surrogateescape")


def complete_rows(table: Path, header: list[str]) -> list[list[str]]:
    """The rows of a table, its header first, without a last one that a kill cut off."""
    if not table.exists():
        return [header]
    with open_regular(table) as file:
        text = file.read().decode(errors="surrogateescape")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if rows and not (text.endswith("\n") and len(rows[-1]) == len(header)):
        rows.pop()
    return rows or [header]


class Rows:
    """What the table says of each image; writes the files that it names."""

    def __init__(self, head: HeadFile, images: ImageSet, out: Path) -> None:
        self.head, self.images, self.out = head, images, out
        self.ranked = min(RANKED, len(head.classes))
        columns: Sequence[str] = ["depth"]
        if head.predicts == "classes":
            numbers = ["", *range(2, self.ranked + 1)]
            columns = [f"{name}{number}" for number in numbers for name in ("class", "probability")]
        else:
            self.file_name = file_names(images)
        if head.predicts == "mask":
            columns = ["mask", "overlay"]
            self.colours = class_colours(Counter(range(min(NAMED_COLOURS, len(head.classes)))), len(head.classes))
            hexes = [f"#{colour.tobytes().hex()}" for colour in self.colours]
            classes = zip(range(len(hexes)), head.classes, hexes, strict=False)
            write_atomic(out / "classes.csv", csv_text([("number", "class", "colour"), *classes]))
        self.header = ["image", *columns, "error"]

    def row(self, index: int, prediction: "np.ndarray | str") -> list[Any]:
        """The row of an image. prediction: the reason if it cannot be read."""
        name = name_of(self.images, index)
        if isinstance(prediction, str):
            return [name, *[""] * (len(self.header) - 2), prediction]
        return [name, *self.values(index, prediction), ""]

    def values(self, index: int, prediction: np.ndarray) -> list[Any]:
        if self.head.predicts == "classes":
            best, shares = np.argsort(-prediction, kind="stable")[: self.ranked], probabilities(prediction)
            return [value for number in best for value in (self.head.classes[number], f"{shares[number]:.6g}")]
        name = self.file_name(index)
        if self.head.predicts == "depth":
            depth = Image.fromarray(np.rint(prediction * MILLIMETRES).astype(np.uint16))
            return [self.write_image(depth, f"depth/{name}.png", "PNG")]
        mask = Image.fromarray(prediction)
        mask.putpalette(self.colours[:256].tobytes())
        overlay = tinted(self.images.image(index), prediction, self.colours)
        return [
            self.write_image(mask, f"masks/{name}.png", "PNG"),
            self.write_image(overlay, f"overlays/{name}.jpg", "JPEG"),
        ]

    def write_image(self, image: Image.Image, name: str, form: str) -> str:
        """Write an image to OUT/NAME; returns NAME."""
        buffer = io.BytesIO()
        image.save(buffer, form)
        write_atomic(self.out / name, buffer.getvalue())
        return name


def name_of(images: ImageSet, index: int) -> str:
    """The path of an image below the folder of its set, or its name in messages if it is in no file of its own."""
    return images.images.names[index] if isinstance(images.images, FileImages) else images.path(index)


def file_names(images: ImageSet) -> Callable[[int], str]:
    """Index of an image -> the name, a relative path, of the files about it; never that of another image.

    It is the image's name without its suffix; with the suffix if names differ in that alone, as a.jpg and a.png; and
    with the image's number if they are still the same on some system, as a:b and a-b, or A and a.
    """

    def name(index: int, form: int) -> str:
        parts = [re.sub(r"[\0:\\]", "-", part) for part in name_of(images, index).split("/")]
        whole = "/".join(part for part in parts if part not in ("", ".", ".."))
        return (os.path.splitext(whole)[0], whole, f"{whole}-{index}")[form]

    for form in (0, 1):
        if len({hash(name(index, form).casefold()) for index in range(len(images))}) == len(images):
            break
    else:
        form = 2
    return lambda index: name(index, form)
