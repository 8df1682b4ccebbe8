"""Kept heads with their backbones, ready to predict images in memory, folders and image sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.names import ready_device
from bench.results.heads import HeadFile, read_head
from bench.run.suites import catalogue
from checkpoints.export import read_tensors
from checkpoints.frozen import FrozenExport
from engine.errors import UserError
from engine.printing import say
from engine.tasks import Emit, Head, Task, Workspace
from imagesets.decoding import as_rgb, decode_rgb, read_bytes


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
        self.apply(ImageList(images), predictions.__setitem__)
        values = [predictions[index] for index in range(len(images))]
        return [probabilities(row) for row in values] if self.file.predicts == "classes" else values


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of logits (C,), float32."""
    import torch

    return torch.from_numpy(logits).softmax(0).numpy()


def load_head(
    path: Path,
    export: FrozenExport,
    device: str = "auto",
    skip_bad: bool = False,
    batch_size: int | None = None,
    workers: int | None = None,
) -> LoadedHead:
    """A kept head with its backbone. UserError for another backbone than the one it was trained on.

    Precision, decoder and, unless given, batch size are those of the evaluation.
    """
    file = read_head(path)
    result, used = file.result, file.result.protocol
    if export.digest != result.checkpoint.digest:
        trained_on = f"{result.checkpoint.name} (digest {result.checkpoint.digest[:8]})"
        text = f"it was trained on {trained_on}, and this checkpoint has digest {export.digest[:8]}: give that one"
        raise UserError("head", text, path)
    cautions = [*result.facts.get("warnings", ()), *([f"trained with limit={result.limit}"] if result.limit else [])]
    say(*(f"{path.name}: {caution}" for caution in cautions), errors=True)
    chosen = catalogue(suite=used.name).protocols.get(used.name)
    if chosen is None:
        fix = f"install {used.plugin}" if used.plugin else "use the version of ssl-vit-bench that kept the head"
        raise UserError("head", f"there is no protocol {used.name} here: {fix}", path)
    space = Workspace(
        cache=Path(),
        data="",
        device=ready_device(device, result.compiled),
        precision=result.precision,  # type: ignore[arg-type]
        compiled=result.compiled,
        decode=result.decode,  # type: ignore[arg-type]
        skip_bad=skip_bad,
        batch_size=batch_size or file.batch_size,
        workers=workers,
    )
    return LoadedHead(
        file=file,
        tensors=read_tensors(path.with_suffix(".safetensors")),
        task=type(chosen.task)(**result.settings),
        export=export.evaluated_at(result.image_size) if result.image_size else export,
        space=space,
    )
