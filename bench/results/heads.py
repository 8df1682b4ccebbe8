"""Kept heads: the trained head of a result, as safetensors with a JSON file beside it.

`bench run --keep-heads DIR` writes DIR/<checkpoint>-<digest8>/<data name>/<stem>.safetensors and .json, named as the
result's file. The JSON file has all that a prediction depends on besides the backbone, which its digest identifies, and
the result itself. A task rebuilds its head (`Task.apply_head`); nothing in the files is executed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save

from bench.results.record import DataUsed, Result
from checkpoints.frozen import FrozenExport
from engine.errors import UserError, in_one_line
from engine.files import plain, read_json, sha256_of_file, write_atomic
from engine.tasks import Head, Predicts, Task, Workspace

FORMAT = 1
MAX_NAMED = 3  # heads that a message lists


@dataclass(frozen=True, kw_only=True)
class HeadFile:
    """The JSON file of a head."""

    format: int = FORMAT
    predicts: Predicts  # classes, mask or depth
    classes: tuple[str, ...]  # names by number; empty for depth
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the task, such as the readout that was chosen
    image_size: int | tuple[int, int]  # of the export that the head was trained on, in pixels
    mean: tuple[float, ...]  # statistics that images are normalised with
    std: tuple[float, ...]
    batch_size: int | None = None  # at most so many images in a forward pass, if --batch-size was given
    sha256: str  # of the file with the tensors
    result: Result  # protocol with settings, checkpoint with digest, images, metrics


def write_head(path: Path, head: Head, task: Task, export: FrozenExport, space: Workspace, result: Result) -> None:
    """Write the head of a result to `path`, whose suffix is .json, and its tensors beside it."""
    tensors = path.with_suffix(".safetensors")
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in head.tensors.items()}
    write_atomic(tensors, save(content, metadata={"format": "pt"}))
    file = HeadFile(
        predicts=task.predicts,
        classes=head.classes,
        facts=head.facts,
        image_size=export.spec.image_size,
        mean=export.mean,
        std=export.std,
        batch_size=space.batch_size,
        sha256=sha256_of_file(tensors),
        result=result,
    )
    write_atomic(path, json.dumps(msgspec.to_builtins(file, enc_hook=plain), indent=1) + "\n")


def read_head(path: Path) -> HeadFile:
    """The JSON file of a head, given by either of its files. UserError if it is none, or its tensors differ."""
    if path.is_dir():
        heads = sorted(str(file) for file in path.rglob("*.safetensors") if file.with_suffix(".json").is_file())
        text = "a folder; a head is a .safetensors with a .json beside it, as bench run --keep-heads DIR writes them: "
        raise UserError("head", text + (" or ".join(heads[:MAX_NAMED]) or "there is none here"), path)
    try:
        file = read_json(path.with_suffix(".json"), type=dict[str, Any])
        if "format" not in file or "predicts" not in file:
            raise ValueError("not a head that `bench run --keep-heads` wrote")
        if file["format"] > FORMAT:
            raise ValueError(f"written in format {file['format']}, this version reads {FORMAT}: upgrade ssl-vit-bench")
        head = msgspec.convert(file, HeadFile)
        if sha256_of_file(path.with_suffix(".safetensors")) != head.sha256:
            raise ValueError(f"{path.with_suffix('.safetensors').name} is not the file that was written with it")
    except (OSError, ValueError) as error:
        raise UserError("head", in_one_line(error).removeprefix(f"{path.with_suffix('.json')}: "), path) from error
    return head


def is_kept(path: Path, data: DataUsed, task: Task) -> bool:
    """Whether a head that was trained on these images with the settings of this task is at `path`."""
    try:
        result = read_head(path).result
    except UserError:
        return False
    is_on_images = result.data.fingerprints == data.fingerprints and not data.differ_from(result.data)
    return is_on_images and not result.changed_since(task)
