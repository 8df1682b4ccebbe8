"""Raw pixels as an export: its feature is the image."""

import pytest
import torch

from checkpoints.backbone import Backbone
from checkpoints.resolve import load


def test_feature_is_the_normalised_image():
    export = load("pixels:8")
    backbone = Backbone(export)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    prepared = backbone.prepare(images)
    torch.testing.assert_close(backbone(prepared)[0].avg, prepared.flatten(1))
    assert export.verify() == []


@pytest.mark.parametrize("reference", ["pixels:0", "pixels:49", "pixels:big"])
def test_other_sides_are_one_line(reference):
    with pytest.raises(ValueError, match="give a side of 1 to 48 pixels"):
        load(reference)
