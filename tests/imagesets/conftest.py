"""Fixtures that make small images, encoded files and folders of images."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def photo() -> Callable[..., Image.Image]:
    """(width, height, seed) -> a smooth random RGB image: compressible, and different at every pixel."""

    def make(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
        coarse = np.random.RandomState(seed).randint(0, 256, (5, 6, 3), np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    return make


@pytest.fixture
def encode(photo) -> Callable[..., bytes]:
    """(format, mode, ...) -> the bytes of an image file."""

    def make(
        kind: str = "JPEG", mode: str = "RGB", width: int = 40, height: int = 30, seed: int = 0, **options
    ) -> bytes:
        file = io.BytesIO()
        photo(width, height, seed).convert(mode).save(file, kind, **options)
        return file.getvalue()

    return make


@pytest.fixture
def tree(encode) -> Callable[..., Path]:
    """(root, names) -> root, with a different small JPEG under every relative name."""

    def make(root: Path, *names: str) -> Path:
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(seed=zlib.crc32(name.encode())))
        return root

    return make
