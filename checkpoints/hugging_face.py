"""Checkpoints of Hugging Face: folders that transformers wrote, weights in several files, and the hub.

Such a folder holds config.json, weights in one file or several, and how images are prepared. Weights go through
reading.py like every foreign file; of the JSON files only values are taken. Where the hub cannot be reached, its cache
alone is used.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download

from checkpoints.dotted import split
from checkpoints.reading import ForeignFile, read_foreign
from checkpoints.sniffing import INDEX_FILES
from engine.files import digest

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in transformers' order of preference
PREPARATION = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # of version 5 on: the same under "image_processor", beside a tokenizer


def is_transformers(folder: Path) -> bool:
    """Whether a folder's config.json names one of transformers' kinds of models."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config and "architecture" not in config


def read_folder(folder: Path) -> ForeignFile:
    """Tensors of all files; facts `config.*` and `preparation.*`. ValueError names what is missing or held twice."""
    tree: dict[str, Any] = {"config": _json(folder / "config.json")}
    if (folder / PREPARATION).exists():
        tree["preparation"] = _json(folder / PREPARATION)
    elif (folder / PROCESSOR).exists():
        tree["preparation"] = _json(folder / PROCESSOR).get("image_processor")
    return _joined(folder, _files(folder), split(tree)[1])


def is_in_parts(path: Path) -> bool:
    """Whether a path is the index of a checkpoint in several files, or its folder, and none of transformers'."""
    folder = path.parent if path.name in INDEX_FILES else path
    return not (folder / "config.json").exists() and any((folder / name).is_file() for name in INDEX_FILES)


def read_parts(path: Path) -> ForeignFile:
    """Tensors of all files that an index lists. ValueError as for `read_folder`."""
    folder = path.parent if path.name in INDEX_FILES else path
    return _joined(folder, _files(folder), {})


def _joined(folder: Path, names: list[str], facts: dict[str, Any]) -> ForeignFile:
    files = [read_foreign(folder / name, part=len(names) > 1) for name in names]
    tensors: dict[str, Any] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise ValueError(f"{file.path} holds {min(twice)!a} a second time")
        tensors |= file.tensors
    return ForeignFile(path=folder, sha256=digest([file.sha256 for file in files]), tensors=tensors, facts=facts)


def _files(folder: Path) -> list[str]:
    """Names of the weight files: one, or those that an index lists."""
    if weights := next((name for name in WEIGHTS if (folder / name).exists()), None):
        return [weights]
    index = next((name for name in INDEX_FILES if (folder / name).exists()), None)
    if index is None:
        raise ValueError(f"there is no {' or '.join((*WEIGHTS, *INDEX_FILES))} in {folder}")
    listed = _json(folder / index).get("weight_map")
    names = set(listed.values()) if isinstance(listed, dict) else set()
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ValueError(f"{folder / index} lists no files of this folder")
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise ValueError(f"{folder / index} lists {missing[0]}, which is not there; download it as well")
    return sorted(names)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings by name")
    return content


FILES = ["config.json", PREPARATION, PROCESSOR, "*.safetensors", "*.safetensors.index.json"]


def transformers_snapshot(place: str) -> Path | None:
    """Folder of a hub repository, `user/name` or `user/name@revision`, that transformers wrote; None for any other.

    Weights are fetched as safetensors alone. Raises ValueError where there is no way to the hub.
    """
    name, _, revision = place.partition("@")
    try:
        with cache_alone_if_unreachable():
            config = Path(hf_hub_download(name, "config.json", revision=revision or None))
            if not is_transformers(config.parent):
                return None
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=FILES))
    except ConnectionError as error:
        raise ValueError(f"hf-hub:{place} cannot be fetched: {error}") from error
    except (OSError, ValueError, RuntimeError):  # what is wrong with the name is for timm to say
        return None


@contextmanager
def cache_alone_if_unreachable() -> Iterator[None]:
    """Where there is no way to the hub, only what its cache holds is taken: its client would try for minutes.

    Raises ConnectionError for what is not there.
    """
    if constants.HF_HUB_OFFLINE or _is_reachable():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"there is no connection to {constants.ENDPOINT}, and its cache {constants.HF_HUB_CACHE} does not hold the "
            "weights; connect, or name a file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of any type: they are those of the hub's own client
        return False
    return True
