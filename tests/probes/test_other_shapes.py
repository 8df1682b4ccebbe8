"""Networks for images that are not square: crops, and every frozen probe."""

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from PIL import Image
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import CenterCrop, Compose, PILToTensor
from toy_exports import export_of_size, workspace

from imagesets.random_crops import GeneratorDraws, RandomResizedCrop
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform
from probes.features.extract import extract, transform_of
from probes.features.kinds import FeatureKind
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.knn import Knn
from probes.tasks.linear import Linear
from probes.tasks.lowshot import PROTOCOLS as LOWSHOT

SIZE = (16, 40)  # height, width


@pytest.fixture(scope="module")
def export():
    return export_of_size(SIZE)


@pytest.mark.parametrize("crop", [1.0, 0.875, 0.6])
@pytest.mark.parametrize("size", [(60, 40), (16, 24), (224, 224), (57, 200)])
def test_the_evaluation_crop_equals_timms(size, crop):
    image = Image.fromarray(RandomState(0).randint(0, 256, (91, 67, 3), np.uint8))
    transform = EvalTransform(size=size, crop=crop)
    if size[0] == size[1]:
        assert transform == EvalTransform(size=size[0], crop=crop)
        return
    steps = [ResizeKeepRatio(transform.resize, interpolation="bicubic"), CenterCrop(size), PILToTensor()]

    class OneImage:
        def image(self, index):
            return image

    assert transform.resize == (int(size[0] / crop), int(size[1] / crop))
    assert torch.equal(transform(OneImage(), 0), Compose(steps)(image))


def test_the_fast_decoder_takes_the_same_crop():
    images = open_set("tiny:", "train")
    exact, fast = (EvalTransform(size=SIZE, decode=decode)(images, 0).float() for decode in ("exact", "fast"))
    assert exact.shape == fast.shape == (3, *SIZE) and (exact - fast).abs().max() <= 2


def test_random_crops_keep_the_aspect_ratio():
    """Windows have the network's aspect ratio, up to the usual range."""
    crop = RandomResizedCrop(size=SIZE, interpolation="bilinear", draws=GeneratorDraws(RandomState(0)))
    windows = np.array([crop.window(2000, 1000) for _ in range(400)])
    ratios = (windows[:, 2] - windows[:, 0]) / (windows[:, 3] - windows[:, 1]) / 2.5
    assert 0.74 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.35
    assert crop(Image.new("RGB", (100, 90))).size == SIZE[::-1]


def test_features_equal_those_of_the_cropped_images(export, tmp_path):
    space = workspace(tmp_path, "tiny:")
    images, kind = open_set("tiny:", "val"), FeatureKind("cls")
    transform = transform_of(export, space)
    features = extract(export, images, [kind], space)
    assert transform.name == "resize18x45-bicubic_crop16x40_exact" == features.facts["transform"]
    pixels = torch.stack([transform(images, index) for index in range(4)]).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (export.mean, export.std))
    expected = export.build()((pixels - mean) / std)[0][:, 0]
    assert torch.allclose(torch.from_numpy(features[kind][:4].copy()), expected.detach(), atol=1e-5)


@pytest.mark.parametrize(
    "task",
    [
        Knn(k=(5,)),
        Linear(lrs=(1.0,), readouts=("avg",), epochs=1, batch=32),
        Linear(lrs=(1.0,), readouts=("cls2",), epochs=1, batch=32, augment=False),
        LOWSHOT["lowshot@bench"].task,
    ],
    ids=["knn", "linear augmented", "linear cached", "low-shot"],
)
def test_every_frozen_probe_accepts_them(task, export, tmp_path):
    outcome = task.run(export, workspace(tmp_path, "tiny:", limit=40))
    assert outcome.facts["val"]["transform"].endswith("crop16x40_exact")
    assert all(np.isfinite(value) for value in outcome.numbers.values())


def test_fine_tuning_refuses_them_and_names_the_option(export, tmp_path):
    with pytest.raises(ValueError, match=r"16 x 40 px .* image_size=40"):
        FINETUNE["finetune@smoke"].task.run(export, workspace(tmp_path, "tiny:"))
