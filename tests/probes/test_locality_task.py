"""The locality probe: boxes and mosaics; it beats chance with good features, and not with shuffled crops."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Outcome, Workspace
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform
from probes.mosaics import Mosaics, candidate_boxes, centre_tiles, tile_numbers, tile_overlaps
from probes.tasks import locality
from probes.tasks.locality import PROTOCOLS

TASK = PROTOCOLS["locality@extrema"].task
SPEC = ViTSpec(
    architecture="vit_tiny_patch16_224",
    image_size=8,
    patch_size=8,
    width=9,
    depth=1,
    heads=1,
    mlp_hidden=9,
    class_token=False,
    class_position=False,
    position="none",
    final_norm="none",
    pool="avg",
)


def one_patch(weights: np.ndarray, biases: np.ndarray) -> ViTExport:
    """An encoder whose only patch is the whole image and whose block adds nothing: 9 linear functions of its pixels."""
    vit = ViT(SPEC)
    with torch.no_grad():
        for layer in (vit.trunk.blocks[0].attn.proj, vit.trunk.blocks[0].mlp.fc2):
            layer.weight.zero_()
            layer.bias.zero_()
        vit.trunk.patch_embed.proj.weight.copy_(torch.tensor(weights).reshape(9, 3, 8, 8))
        vit.trunk.patch_embed.proj.bias.copy_(torch.tensor(biases))
    return ViTExport.from_vit(vit, Preparation(mean=(0.5,) * 3, std=(0.5,) * 3, crop=1.0))


@pytest.fixture(scope="module")
def tints(tmp_path_factory) -> str:
    """The URL of four classes of faint tints, under random gradients of brightness that are alike in all classes."""
    folder, generator = tmp_path_factory.mktemp("tints"), np.random.default_rng(0)
    colours = {"red": (14, -7, -7), "green": (-7, 14, -7), "blue": (-7, -7, 14), "grey": (0, 0, 0)}
    for split, count in (("train", 60), ("val", 40)):
        for number in range(count * len(colours)):
            name = list(colours)[number % len(colours)]
            across = np.linspace(*generator.uniform(-70, 70, 2), 8)[:, None]
            pixels = 128 + across + np.array(colours[name]) + generator.normal(0, 12, (8, 8, 3))
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / split / name / f"{number}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def trained(tints) -> ViTExport:
    """An encoder of the three linear discriminants of the training images."""
    images = open_set(tints, "train")
    pixels = np.stack([np.asarray(images.image(index)) for index in range(len(images))])
    rows = (pixels / 255 - 0.5).transpose(0, 3, 1, 2).reshape(len(images), -1) / 0.5
    fit = LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.5).fit(rows, images.labels)
    weights = np.zeros((9, 192))
    weights[:3] = fit.scalings_[:, :3].T
    return one_patch(weights, -weights @ rows.mean(axis=0))


def run_task(export: ViTExport, data: str, cache: Path) -> Outcome:
    return TASK.run(export, Workspace(cache=cache, data=data))


def test_a_trained_encoder_beats_chance_and_an_untrained_one(trained, tints, tmp_path):
    """Three standard deviations of an accuracy near 25 % of 160 images are 10 points, of the mean overlap 4."""
    outcome = run_task(trained, tints, tmp_path)
    generator = np.random.default_rng(0)
    untrained = run_task(one_patch(generator.normal(size=(9, 192)), generator.normal(size=9)), tints, tmp_path)
    chance, bound = outcome.facts["chance"], outcome.facts["at_most"]
    assert chance["top1"] == 25.0 and chance["iou"] + 20 < bound["iou"] < bound["top1"]
    assert bound["top1"] > outcome.numbers["top1"] > 70 and untrained.numbers["top1"] < 25 + 20
    assert outcome.numbers["iou"] > chance["iou"] + 10


def test_shuffled_crops_are_at_chance(trained, tints, tmp_path, monkeypatch):
    """The same features, with those of each mosaic's boxes in random order."""

    def shuffled(gallery, queries, search, boxes):
        order = np.random.default_rng(0).permuted(np.tile(np.arange(boxes), (len(gallery) // boxes, 1)), axis=1)
        crops = np.take_along_axis(gallery.reshape(-1, boxes, gallery.shape[1]), order[..., None], axis=1)
        return similarities(crops.reshape(gallery.shape), queries, search, boxes)

    similarities = locality.query_box_similarities
    monkeypatch.setattr(locality, "query_box_similarities", shuffled)
    outcome = run_task(trained, tints, tmp_path)
    assert abs(outcome.numbers["top1"] - 25) < 10
    assert abs(outcome.numbers["iou"] - outcome.facts["chance"]["iou"]) < 4


@pytest.mark.parametrize("count", [8, 10])
def test_mosaics_show_each_image_once_and_several_classes(count):
    labels = np.arange(count) % 5
    tiles = tile_numbers(labels, 4)
    assert tiles.shape == (-(-count // 4), 4) and set(tiles.ravel()) == set(range(count))
    assert all(len(set(labels[row])) >= (4 if count == 8 else 3) for row in tiles)


def test_boxes_are_inside_and_have_the_requested_sizes():
    boxes = candidate_boxes(50, (40, 40), (8, 8), (0.2, 0.5, 1.0), 3, seed=1)
    assert boxes.shape == (50, 9, 4) and set(boxes[..., 2].ravel()) == {8, 20, 40}
    assert boxes[..., :2].min() == 0 and (boxes[..., :2] + boxes[..., 2:]).max() == 40
    assert np.array_equal(boxes, candidate_boxes(50, (40, 40), (8, 8), (0.2, 0.5, 1.0), 3, seed=1))
    assert not np.array_equal(boxes, candidate_boxes(50, (40, 40), (8, 8), (0.2, 0.5, 1.0), 3, seed=2))
    wide = candidate_boxes(50, (90, 40), (8, 8), (0.5,), 3, seed=1)
    assert set(wide[..., 2:].ravel()) == {20} and 60 < wide[..., 0].max() <= 70 and wide[..., 1].max() <= 20


@pytest.mark.parametrize("tile", [(8, 8), (12, 8)])
def test_overlaps_equal_counted_pixels(tile):
    width, height = tile
    boxes = candidate_boxes(20, (2 * width, 2 * height), tile, (0.2, 0.65), 4, seed=0)
    overlaps, centres = tile_overlaps(boxes, tile, 2), centre_tiles(boxes, tile, 2)
    sheet = np.arange(2 * width) // width + 2 * (np.arange(2 * height) // height)[:, None]  # each pixel's tile
    for index in np.ndindex(20, 8):
        left, top, box_width, box_height = boxes[index]
        inside = np.zeros(sheet.shape, bool)
        inside[top : top + box_height, left : left + box_width] = True
        counted = [(inside & (sheet == tile)).sum() / (inside | (sheet == tile)).sum() for tile in range(4)]
        assert np.allclose(overlaps[index], counted)
        assert sheet[top + box_height // 2, left + box_width // 2] == centres[index]


def test_a_box_of_one_tile_shows_its_image():
    digits = open_set("digits:", "val").limited(10)
    tiles, boxes = tile_numbers(digits.labels, 4), np.array([[[0, 8, 8, 8], [8, 0, 8, 8]]] * 3)
    mosaics = Mosaics(source=digits, transform=EvalTransform(size=8, crop=1.0), tiles=tiles, boxes=boxes)
    crops = mosaics.image_set("boxes")
    assert len(crops) == 6
    assert np.array_equal(crops.image(2), digits.image(tiles[1, 2])) and np.array_equal(
        crops.image(5), digits.image(tiles[2, 1])
    )
    subset = crops.subset(np.array([5, 2]), "subset")
    assert np.array_equal(subset.image(1), crops.image(2)) and subset.fingerprint != crops.fingerprint


def test_the_mosaic_of_an_unreadable_image_is_left_out(tmp_path):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(12):
            path = tmp_path / "set" / split / "abc"[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    (tmp_path / "set/val/a/3.png").write_bytes(b"no image")
    export = one_patch(generator.normal(size=(9, 192)), np.zeros(9))
    space = Workspace(cache=tmp_path / "cache", data=f"folder:{tmp_path / 'set'}", skip_bad=True)
    outcome = TASK.run(export, space)
    left_out = np.isnan(outcome.metrics["top1"].per_image)
    assert left_out.sum() == 4 and left_out[1]  # a/3.png is the second image of the first class
    with pytest.raises(ValueError, match=r"mosaic 1 of folder:.*3\.png: not an image"):
        TASK.run(export, Workspace(cache=tmp_path / "other", data=space.data))
