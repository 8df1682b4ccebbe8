"""Texts without the folders of the machine that they come from, for what is published."""

import re
from pathlib import PurePosixPath
from typing import Any

from engine.files import digest

# An absolute path of two parts or more; not the path of a URL, and not the second half of a word, as in ViT-S/16.
ABSOLUTE = re.compile(r"(?<![\w/~.\\-])/(?!/)(?:[^\s/:'\"`,;|()<>\[\]{}?&]+/)+[^\s/:'\"`,;|()<>\[\]{}?&]*")
LOCAL = re.compile(r"file://(?=/)")


def without_folders(value: Any) -> Any:
    """A JSON value in which absolute paths keep their last part alone: `path-3f2a91bc/cifar10`.

    The eight digits are of the SHA-256 of the folder before it, so that different folders stay different.
    """
    if isinstance(value, str):
        return ABSOLUTE.sub(_shortened, LOCAL.sub("", value))
    if isinstance(value, dict):
        return {without_folders(key): without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each) for each in value]
    return value


def _shortened(found: re.Match[str]) -> str:
    path = PurePosixPath(found[0])
    return f"path-{digest(str(path.parent))[:8]}/{path.name}"
