"""Decoding as the official ImageFolder loader does it, in every pixel format, and refusal of damaged files."""

import io
import os
import pickle
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image, ImageFile
from torchvision.datasets.folder import pil_loader

from imagesets import decoding
from imagesets.decoding import UnreadableImage, decode_rgb, read_bytes
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform


def test_pixels_are_the_official_loaders(tmp_path, encode):
    for kind, mode, options in [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "LA", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "1", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("TIFF", "CMYK", {}),
        ("TIFF", "PA", {}),
        ("TIFF", "LAB", {}),
        ("BMP", "RGB", {}),
    ]:
        path = tmp_path / "image"
        path.write_bytes(encode(kind, mode, **options))
        image = decode_rgb(read_bytes(str(path)), str(path))
        assert image.mode == "RGB" and image.tobytes() == pil_loader(path).tobytes()


def test_exif_orientation_is_not_applied(photo, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    photo(40, 30).save(tmp_path / "turned.jpg", exif=exif)
    assert decode_rgb((tmp_path / "turned.jpg").read_bytes(), "turned.jpg").size == (40, 30)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


DAMAGED = {
    "zero bytes": lambda encode: b"",
    "text": lambda encode: b"<html>404 not found</html>",
    "jpeg magic only": lambda encode: b"\xff\xd8\xff",
    "jpeg half": lambda encode: encode(width=200, height=200)[:2000],
    "jpeg without its last byte": lambda encode: encode(width=200, height=200)[:-1],
    "jpeg header": lambda encode: encode()[:100],
    "progressive jpeg half": lambda encode: encode(width=200, height=200, progressive=True)[:2000],
    "grey jpeg half": lambda encode: encode(mode="L", width=200, height=200)[:1500],
    "png half": lambda encode: encode("PNG", width=60, height=60)[:3000],
    "png with a wrong checksum": lambda encode: flipped(encode("PNG", width=60, height=60)),
    "png magic only": lambda encode: b"\x89PNG\r\n\x1a\n",
    "bmp half": lambda encode: encode("BMP")[:500],
    "tiff half": lambda encode: encode("TIFF")[:500],
    "webp half": lambda encode: encode("WEBP")[:60],
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_stop_both_decoders_with_their_path(tree, tmp_path, encode, what):
    root = tree(tmp_path, "train/ant/a.jpg", "train/ant/b.jpg", "val/ant/c.jpg")
    (root / "train/ant/b.jpg").write_bytes(DAMAGED[what](encode))
    image_set = open_set(f"folder:{root}", "train")
    for decode in ("exact", "fast"):
        transform = EvalTransform(size=16, crop=1.0, decode=decode)
        assert transform(image_set, 0).shape == (3, 16, 16)
        with pytest.raises(UnreadableImage) as error:
            transform(image_set, 1)
        assert error.value.path == str(root / "train/ant/b.jpg") and error.value.reason
        assert str(error.value).startswith(error.value.path) and "skip_bad=True" in str(error.value)
        assert "\n" not in str(error.value) and "BytesIO" not in str(error.value)


def test_truncated_files_are_refused_even_if_pillow_is_set_to_accept_them(encode, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(UnreadableImage, match="truncated"):
        decode_rgb(encode(width=200, height=200)[:2000], "half.jpg")


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(UnreadableImage("a/b.jpg", "truncated")))
    assert (error.path, error.reason) == ("a/b.jpg", "truncated") and isinstance(error, ValueError)


@pytest.mark.parametrize("make", ["missing", "folder"])
def test_a_missing_file_or_a_folder_is_unreadable(tmp_path, make):
    with pytest.raises(UnreadableImage, match="No such file" if make == "missing" else "Is a directory"):
        read_bytes(str(tmp_path if make == "folder" else tmp_path / "gone.jpg"))


def test_errors_of_the_machine_are_not_reported_as_an_unreadable_image(monkeypatch):
    def no_more_files(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.open", no_more_files)
    with pytest.raises(OSError, match="Too many open files") as error:
        read_bytes("a.jpg")
    assert not isinstance(error.value, UnreadableImage)


def test_large_images_are_read_without_changing_pillows_limit(monkeypatch, encode):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # 40 x 30 is above twice this, where Pillow refuses
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_rgb(encode(), "large.jpg").size == (40, 30)
    assert Image.MAX_IMAGE_PIXELS == 500


def test_images_above_the_limit_are_refused(monkeypatch, encode):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    monkeypatch.setattr("imagesets.decoding.MAX_PIXELS", 1000)
    with pytest.raises(UnreadableImage, match="exceeds limit"):
        decode_rgb(encode(), "bomb.png")


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/dev/tty0")]
)
def test_pipes_and_devices_are_refused(tree, tmp_path, make):
    root = tree(tmp_path, "train/ant/a.jpg", "val/ant/c.jpg")
    make(root / "train/ant/b.jpg")
    image_set = open_set(f"folder:{root}", "train")
    with pytest.raises(
        UnreadableImage, match=r"b\.jpg: cannot be read as an image \((a pipe|Permission denied|No such)"
    ):
        image_set.image(1)


def test_a_file_beyond_the_limit_is_not_read(tree, tmp_path):
    root = tree(tmp_path, "train/ant/a.jpg", "val/ant/c.jpg")
    os.truncate(root / "train/ant/a.jpg", 1 << 42)
    with pytest.raises(UnreadableImage, match="4,398,046,511,104 bytes, more than the limit"):
        open_set(f"folder:{root}", "train").image(0)


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_threads_decode_large_images_within_a_memory_limit(tree, tmp_path, monkeypatch, decode):
    root = tree(tmp_path, *(f"train/ant/{number}.jpg" for number in range(8)), "val/ant/c.jpg")
    image_set, transform = open_set(f"folder:{root}", "train"), EvalTransform(size=16, crop=1.0, decode=decode)
    monkeypatch.setattr(decoding, "LARGE_IMAGE", 1000)  # each has 40 x 30 pixels
    monkeypatch.setattr(decoding, "MAX_LARGE_PIXELS", 2500)
    pixels_in_use, all_at_once = [], threading.Barrier(4)
    original = decoding.wait_for_room

    def wait(image):
        all_at_once.wait(10) if image.size == (40, 30) and len(pixels_in_use) < 4 else None
        original(image)
        time.sleep(0.05)  # for the others to come in, if they may
        pixels_in_use.append(sum(decoding._large_pixels.values()))

    monkeypatch.setattr(decoding, "wait_for_room", wait)
    monkeypatch.setattr("imagesets.transforms.wait_for_room", wait)
    with ThreadPoolExecutor(4) as pool:
        pixels = list(pool.map(lambda index: transform(image_set, index), range(4)))
    assert len(pixels) == 4 and max(pixels_in_use) == 2400 and not decoding._large_pixels
    monkeypatch.setattr(decoding, "MAX_LARGE_PIXELS", 10)
    pixels_in_use[:] = [0] * 4
    transform(image_set, 0)  # larger than the limit: decoded alone
    assert pixels_in_use[-1] == 1200
