"""Images of more than 8 bits are read as their 8-bit version, or refused if no white value is defined."""

import struct
from pathlib import Path

import numpy as np
import pytest
from deep_images import BY_HEADER, DEEP_COLOUR, GREY, SCALED, WITHOUT_WHITE, deep_grey_png, encoded
from PIL import Image

from imagesets.check import check_image_set, render
from imagesets.decoding import EIGHT_BIT_MODES, UnreadableImage, as_rgb, decode_rgb
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform

DOCUMENTED = Path(__file__).parents[2] / "docs" / "images.md"


def write_folder(tmp_path: Path, content: bytes, copies: int = 1) -> str:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            path = tmp_path / split / name
            path.mkdir(parents=True)
            for number in range(copies):
                (path / f"{number}.png").write_bytes(content)  # Pillow goes by the content
    return f"folder:{tmp_path}"


@pytest.mark.parametrize("name", [*SCALED, *BY_HEADER])
def test_grey_of_more_bits_equals_its_8_bit_version(name, tmp_path):
    content = (SCALED | BY_HEADER)[name]
    pixels = np.asarray(decode_rgb(content, name))
    # Pillow rounds 12 bits of a PGM to 16 before the lower 8 are cut off.
    assert np.abs(pixels.astype(int) - GREY[:, :, None]).max() <= (name in BY_HEADER)
    image_set = open_set(write_folder(tmp_path, content), "val")
    exact, fast = (EvalTransform(size=12, crop=1.0, decode=decode)(image_set, 0) for decode in ("exact", "fast"))
    assert np.array_equal(exact, fast) and np.array_equal(exact, pixels[:, 2:14].transpose(2, 0, 1))


@pytest.mark.parametrize("decode", ["exact", "fast"])
@pytest.mark.parametrize("name", WITHOUT_WHITE)
def test_pixels_without_a_white_value_are_refused_with_a_fix(name, decode, tmp_path):
    image_set = open_set(write_folder(tmp_path, WITHOUT_WHITE[name]), "train")
    with pytest.raises(UnreadableImage, match=r"save it as 8-bit PNG, scaled to 0\.\.255\); replace the file") as error:
        EvalTransform(size=8, crop=1.0, decode=decode)(image_set, 1)
    assert str(error.value).startswith(f"{tmp_path}/train/bee/0.png: ") and "\n" not in str(error.value)


def test_every_mode_of_pillow_is_documented_and_converted_or_refused():
    for mode in Image.MODES:
        image = Image.new(mode, (4, 4))
        assert f"`{mode}`" in DOCUMENTED.read_text()
        if mode in EIGHT_BIT_MODES:
            assert as_rgb(image).tobytes() == image.convert("RGB").tobytes()
        else:  # not from a file whose format would define white
            with pytest.raises(ValueError, match=f"Pillow's mode {mode}: nothing says which value is white"):
                as_rgb(image)


def test_a_check_notes_that_the_upper_8_of_16_bits_are_read(tmp_path):
    report = check_image_set(write_folder(tmp_path, SCALED["png"]), workers=1)
    assert "note: 2 16-bit images, of which the upper 8 bits are read" in render(report)
    assert not any("16-bit" in problem for problem in report.problems)


@pytest.mark.parametrize("name", [*DEEP_COLOUR, "grey.png"])
def test_a_check_finds_12_bits_in_files_of_16(name, tmp_path):
    twelve, sixteen = ((DEEP_COLOUR | {"grey.png": deep_grey_png})[name](bits) for bits in (12, 16))
    report = check_image_set(write_folder(tmp_path / "low", twelve), workers=1)
    problems = [problem for problem in report.problems if "16-bit" in problem]
    assert len(problems) == 2 and "none of the 2 16-bit images in train" in problems[0]
    assert "scale them up to 16" in problems[0] and not report.ok
    report = check_image_set(write_folder(tmp_path / "full", sixteen), workers=1)
    assert "2 16-bit images, of which the upper 8 bits" in render(report) and "scale them" not in render(report)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM", "JPEG", "WEBP", "JPEG2000", "GIF"])
def test_images_of_8_bits_are_not_taken_for_deep_ones(form, tmp_path):
    content = encoded(Image.new("RGB", (16, 12), (9, 9, 9)), form)
    assert "16-bit" not in render(check_image_set(write_folder(tmp_path, content), workers=1))


def test_a_bitmap_of_16_bits_a_pixel_is_not_taken_for_a_deep_one(tmp_path):
    """5, 6 and 5 bits of red, green and blue."""
    header = struct.pack("<IiiHHIIiiII", 40, 16, 12, 1, 16, 3, 16 * 12 * 2, 0, 0, 0, 0)
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    start = 14 + len(header) + len(masks)
    content = struct.pack("<2sIHHI", b"BM", start + 16 * 12 * 2, 0, 0, start) + header + masks + bytes(16 * 12 * 2)
    report = check_image_set(write_folder(tmp_path, content), workers=1)
    assert not any(split.unreadable for split in report.splits) and "16-bit" not in render(report)


def test_a_check_lists_images_without_a_white_value(tmp_path):
    report = check_image_set(write_folder(tmp_path, WITHOUT_WHITE["float.tif"]), workers=1)
    assert [len(split.unreadable) for split in report.splits] == [2, 2]
    assert "floating-point pixels, Pillow's mode F" in render(report)
