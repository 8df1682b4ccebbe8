"""`bench predict`: what a kept head predicts for a folder or an image set of any size, written as it is computed.

OUT/predictions.csv has a row for each image, in the order of the set: the most probable classes; or the files of its
mask and overlay, or of its depth. Every few seconds the rows are flushed to disk, and OUT/predictions.json records how
many there are; a prediction that was killed goes on after them.
"""

import io
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from bench.heads import LoadedHead, probabilities
from bench.results.heads import HeadFile
from downstream.data.overlays import class_colours, tinted
from engine.errors import UserError
from engine.files import locked_or_refused, read_json, write_atomic
from engine.printing import csv_text
from engine.progress import Progress
from engine.training.interruptions import Timer
from imagesets.sets import FileImages, ImageSet

TABLE, STATE = "predictions.csv", "predictions.json"
SAVE_EVERY = 5.0  # seconds of work that a kill may cost
RANKED = 5  # classes of an image in the table
NAMED_COLOURS = 7  # first classes, whose colours are far apart (downstream/data/overlays.py)
MILLIMETRES = 1000.0  # in a metre
MAX_DEPTH = 65.535  # metres that 16 bits of millimetres hold


def write_predictions(head: LoadedHead, images: ImageSet, out: Path) -> Path:
    """Predict all images into the folder `out`, or those that an earlier call left; returns the path of the table.

    UserError if `out` holds something else. Raises UnreadableImage unless `skip_bad`: its rows say what is wrong.
    """
    with locked_or_refused(out / ".lock", f"{out}: another bench predict writes to this folder"):
        state_path, table = out / STATE, out / TABLE
        state: dict[str, Any] = {
            "head": head.file.sha256,
            "images": images.fingerprint,
            "count": len(images),
            "done": 0,
            "bytes": 0,
        }
        if state_path.exists():
            earlier = read_json(state_path, type=dict[str, Any])
            if any(earlier.get(name) != state[name] for name in ("head", "images")):
                raise UserError("out", "it has predictions by another head, or of other images: choose a new one", out)
            state = earlier
        size = table.stat().st_size if table.exists() else 0
        if size < state["bytes"] or (size and not state["bytes"]):
            raise UserError("out", f"its {TABLE} is not as bench predict left it: choose a new folder", out)
        check_depth(head.file, head.task)
        table.touch()
        os.truncate(table, state["bytes"])
        progress = Progress(f"predicting {images.url}", len(images))
        with open(table, "ab") as file, progress:
            progress.resume(state["done"])
            rows = Rows(head.file, images, out, file, state, progress)
            rows.save()
            try:
                head.apply(images, rows.emit, state["done"])
            finally:
                rows.save()
    return table


def check_depth(file: HeadFile, task: Any) -> None:
    """UserError if the head can predict a depth that the files cannot hold."""
    if file.predicts == "depth" and task.depths[1] > MAX_DEPTH:
        raise UserError("head", f"it predicts up to {task.depths[1]:g} m, and the files hold up to {MAX_DEPTH} m")


class Rows:
    """The rows of the table, written in the order of the images, in whatever order they are predicted."""

    def __init__(
        self,
        file: HeadFile,
        images: ImageSet,
        out: Path,
        table: io.BufferedWriter,
        state: dict[str, Any],
        bar: Progress,
    ) -> None:
        self.head, self.images, self.out, self.table, self.state, self.bar = file, images, out, table, state, bar
        self.waiting: dict[int, np.ndarray | str] = {}  # predictions of later images than the next one
        self.lock, self.timer = threading.Lock(), Timer(SAVE_EVERY)
        self.ranked = min(RANKED, len(file.classes))
        self.colours = class_colours(Counter(range(min(NAMED_COLOURS, len(file.classes)))), len(file.classes))
        self.keep_suffix = file.predicts != "classes" and share_stems(images)
        if not state["bytes"]:
            self.write(["image", *self.columns, "error"])
            state["bytes"] = table.tell()
            if file.predicts == "mask":
                write_classes(out / "classes.csv", file.classes, self.colours)

    @property
    def columns(self) -> Sequence[str]:
        """The columns between those of the image and of the error."""
        if self.head.predicts == "classes":
            numbers = ["", *range(2, self.ranked + 1)]
            return [f"{name}{number}" for number in numbers for name in ("class", "probability")]
        return ("mask", "overlay") if self.head.predicts == "mask" else ("depth",)

    def write(self, row: Sequence[Any]) -> None:
        self.table.write(csv_text([row]).encode(errors="surrogateescape"))

    def emit(self, index: int, prediction: "np.ndarray | str") -> None:
        """Take the prediction of an image, and write those whose turn it is."""
        with self.lock:
            if index >= self.state["done"]:
                self.waiting[index] = prediction
            while (number := self.state["done"]) in self.waiting:
                prediction = self.waiting.pop(number)
                if isinstance(prediction, str):
                    values, reason = [""] * len(self.columns), prediction
                else:
                    values, reason = self.values(number, prediction), ""
                self.write([name_of(self.images, number), *values, reason])
                self.state |= {"done": number + 1, "bytes": self.table.tell()}
                self.bar.advance(1)
                if self.timer.is_due():
                    self.save()

    def save(self) -> None:
        """Flush the rows to disk, then record how many there are."""
        with self.timer:
            self.table.flush()
            os.fsync(self.table.fileno())
            write_atomic(self.out / STATE, msgspec.json.encode(self.state) + b"\n")

    def values(self, index: int, prediction: np.ndarray) -> list[Any]:
        """The columns of an image; writes its files."""
        if self.head.predicts == "classes":
            best, shares = np.argsort(-prediction, kind="stable")[: self.ranked], probabilities(prediction)
            return [value for number in best for value in (self.head.classes[number], f"{shares[number]:.6g}")]
        name = safe_path(name_of(self.images, index), self.keep_suffix)
        if self.head.predicts == "depth":
            depth = Image.fromarray(np.rint(prediction * MILLIMETRES).astype(np.uint16))
            return [self.write_image(depth, f"depth/{name}.png", "PNG")]
        mask = Image.fromarray(prediction)
        mask.putpalette(self.colours[:256].tobytes())
        overlay = tinted(self.images.image(index), prediction, self.colours)
        masks, overlays = f"masks/{name}.png", f"overlays/{name}.jpg"
        return [self.write_image(mask, masks, "PNG"), self.write_image(overlay, overlays, "JPEG")]

    def write_image(self, image: Image.Image, name: str, form: str) -> str:
        """Write an image to OUT/NAME; returns NAME."""
        buffer = io.BytesIO()
        image.save(buffer, form)
        write_atomic(self.out / name, buffer.getvalue())
        return name


def name_of(images: ImageSet, index: int) -> str:
    """The path of an image below the folder of its set, or its name in messages if it is in no file of its own."""
    return images.images.names[index] if isinstance(images.images, FileImages) else images.path(index)


def safe_path(name: str, keep_suffix: bool) -> str:
    """A relative path, without a suffix unless it is kept, for the files about the image of this name."""
    parts = [re.sub(r"[\0:\\]", "-", part) for part in name.split("/") if part not in ("", ".", "..")]
    return "/".join(parts) if keep_suffix else os.path.splitext("/".join(parts))[0]


def share_stems(images: ImageSet) -> bool:
    """Whether two images differ only in the suffix of their names, as a.jpg and a.png."""
    stems = {hash(safe_path(name_of(images, index), False)) for index in range(len(images))}
    return len(stems) < len(images)


def write_classes(path: Path, classes: Sequence[str], colours: np.ndarray) -> None:
    """A table of the numbers of classes in masks, their names and colours."""
    rows = ((number, name, "#" + bytes(colours[number]).hex()) for number, name in enumerate(classes))
    write_atomic(path, csv_text([("number", "class", "colour"), *rows]))
