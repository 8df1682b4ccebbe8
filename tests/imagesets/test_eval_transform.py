"""The evaluation transform and normalisation equal torchvision's bit for bit."""

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

from imagesets.names import PackedNames
from imagesets.sets import FileImages, ImageSet, MemoryImages, open_set
from imagesets.transforms import EvalTransform, normalise

# Landscape, portrait, square, odd, already resized, smaller than the crop, extreme, and 4096 px (16 times down).
SIZES = [
    *[(500, 375), (375, 500), (333, 333), (256, 256), (257, 255), (341, 256), (256, 341), (512, 1024), (768, 512)],
    *[(30, 20), (7, 9), (1, 1), (1, 40), (40, 1), (3, 90), (640, 97), (1281, 1023), (4096, 300), (255, 1999)],
]
MODES = {
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
    "lanczos": InterpolationMode.LANCZOS,
}


def noise(width: int, height: int) -> ImageSet:
    """One image of full-range noise, in which any difference between filters shows."""
    pixels = np.random.RandomState(width * height).randint(0, 256, (1, height, width, 3), np.uint8)
    images = MemoryImages(names=PackedNames.pack(["noise"]), pixels=pixels)
    return ImageSet(url="noise:", split="val", classes=("a",), labels=np.zeros(1, np.int64), images=images)


def official(short: int, crop: int, mode: InterpolationMode):
    steps = [transforms.Resize(short, mode), transforms.CenterCrop(crop), transforms.PILToTensor()]
    return transforms.Compose(steps)


def set_of(folder, *names: str) -> ImageSet:
    facts = np.zeros((3, len(names)), np.int64)
    images = FileImages(root=str(folder), names=PackedNames.pack(names), sizes=facts[0], changed=facts[1:].T)
    return ImageSet(url="folder:x", split="val", classes=("a",), labels=np.zeros(len(names), np.int64), images=images)


@pytest.mark.parametrize(("side", "crop"), [(224, 0.875), (224, 0.9), (64, 1.0), (21, 0.6)])
def test_exact_equals_torchvision_bit_for_bit(side, crop):
    for size in SIZES:
        image_set, transform = noise(*size), EvalTransform(size=side, crop=crop)
        expected = official(transform.resize, side, MODES["bicubic"])(image_set.image(0))
        assert torch.equal(transform(image_set, 0), expected), size


@pytest.mark.parametrize("name", ["bilinear", "lanczos"])
def test_other_filters_equal_torchvision_bit_for_bit(name):
    for size in SIZES[:12]:
        image_set = noise(*size)
        expected = official(256, 224, MODES[name])(image_set.image(0))
        assert torch.equal(EvalTransform(interpolation=name)(image_set, 0), expected), size


@pytest.fixture
def files(tmp_path, encode):
    """JPEGs of odd sizes, a grey one, a CMYK one, and a PNG."""
    contents = {
        "wide.jpg": encode(width=301, height=200),
        "tall.jpg": encode(width=200, height=333, seed=1),
        "small.jpg": encode(width=20, height=31, seed=2),
        "thin.jpg": encode(width=1, height=60, seed=3),
        "progressive.jpg": encode(width=150, height=80, seed=4, progressive=True),
        "grey.jpg": encode(mode="L", width=200, height=120, seed=5),
        "cmyk.jpg": encode(mode="CMYK", width=200, height=120, seed=6),
        "alpha.png": encode("PNG", mode="RGBA", width=120, height=200, seed=7),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return set_of(tmp_path, *contents)


def test_exact_equals_torchvision_on_pillow_images_of_files(files):
    transform = EvalTransform()
    for index in range(len(files)):
        ours = transform(files, index)
        with Image.open(files.path(index)) as image:
            expected = official(256, 224, MODES["bicubic"])(image.convert("RGB"))
        assert ours.dtype == torch.uint8 and ours.is_contiguous() and torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["bicubic", "bilinear"])
def test_fast_equals_torchvision_on_tensors(files, name):
    transform = EvalTransform(decode="fast", interpolation=name)
    expected = v2.Compose([v2.Resize(256, MODES[name], antialias=True), v2.CenterCrop(224)])
    for index in range(len(files)):
        ours = transform(files, index)
        assert ours.shape == (3, 224, 224) and ours.dtype == torch.uint8 and ours.is_contiguous()
        if "cmyk" not in files.path(index):  # torchvision converts CMYK by another formula than Pillow
            pixels = decode_image(
                torch.frombuffer(bytearray(files.encoded(index)), dtype=torch.uint8), ImageReadMode.RGB
            )
            assert torch.equal(ours, expected(pixels))


def test_fast_is_within_two_grey_levels_of_exact(files):
    exact, fast = EvalTransform(), EvalTransform(decode="fast")
    for index in range(len(files)):
        gap = (exact(files, index).int() - fast(files, index).int()).abs()
        assert gap.max() <= 2 and gap.float().mean() < 0.05, files.path(index)


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_images_in_memory_are_transformed_as_files_are(decode):
    image_set = open_set("tiny:", "val")
    transform = EvalTransform(size=24, crop=0.75, decode=decode)
    expected = official(32, 24, MODES["bicubic"])(image_set.image(4))
    assert torch.equal(transform(image_set, 4), expected)  # 32 px stay 32 px: no resize, so both decoders agree


@pytest.mark.parametrize(
    ("settings", "name", "resize"),
    [
        ({}, "resize256-bicubic_crop224_exact", 256),
        ({"decode": "fast", "interpolation": "bilinear"}, "resize256-bilinear_crop224_fast", 256),
        ({"size": 224, "crop": 0.9, "interpolation": "lanczos"}, "resize248-lanczos_crop224_exact", 248),
        ({"size": 384, "crop": 1.0}, "resize384-bicubic_crop384_exact", 384),
        ({"size": 96}, "resize109-bicubic_crop96_exact", 109),
    ],
)
def test_the_name_states_resize_filter_crop_and_decoder(settings, name, resize):
    transform = EvalTransform(**settings)
    assert transform.name == name and transform.resize == resize


@pytest.mark.parametrize(
    "settings",
    [{"size": 0}, {"crop": 1.1}, {"interpolation": "nearest"}, {"interpolation": "lanczos", "decode": "fast"}],
)
def test_settings_out_of_range_are_refused(settings):
    refusal(EvalTransform, **settings)


@pytest.mark.parametrize(
    ("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
)
def test_normalise_equals_torchvision_bit_for_bit(mean, std):
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    expected = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    image = Image.fromarray(levels[0].permute(1, 2, 0).numpy())
    ours = normalise(levels, mean, std)
    assert ours.dtype == torch.float32 and levels.dtype == torch.uint8
    assert torch.equal(ours[0], expected(image)) and torch.equal(ours[1], ours[0])
