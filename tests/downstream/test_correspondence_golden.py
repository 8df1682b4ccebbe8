"""Keypoint matching against a recording of Probe3D's code: tests/golden/correspondence."""

import numpy as np
import pytest
import torch
from PIL import Image
from recordings import ROOT, facts, matches, tensors
from scipy.spatial.distance import cdist

from downstream.tasks import correspondence as official

FOLDER = "correspondence"
FILES = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.safetensors"))


def keypoint_errors(recorded, config, pair):
    """(K, K) errors of a recorded pair."""
    side, (source, target) = config["image_size"], recorded[f"{pair}.features"]
    points = [recorded[f"{pair}.keypoints_{image}"].long() for image in ("source", "target")]
    best = official.match_keypoints(source, target, points[0][:, :2], side)
    visible = points[0][:, 2] > 0
    assert torch.equal(best[visible], recorded[f"{pair}.heatmap_argmax"][visible])
    scale = config["annotations"][pair]["thresh_scale"]
    return official.keypoint_errors(*points, best, tuple(config["patch_grid"]), side, scale)


@pytest.mark.parametrize("path", FILES)
def test_keypoints_and_thresholds(path):
    recorded, config = tensors(path), facts(path)
    for pair, annotation in config["annotations"].items():
        if not config["use_bbox"]:
            for image in ("source", "target"):
                recorded_facts = annotation[image]
                points = official.scale_keypoints(
                    list(recorded_facts["kps"].values()), max(recorded_facts["size"]), config["image_size"]
                )
                assert torch.equal(points, recorded[f"{pair}.keypoints_{image}"].long()), pair
            scale = official.threshold_scale(annotation["target"]["bndbox"], annotation["target"]["size"])
            assert scale == pytest.approx(annotation["thresh_scale"], abs=1e-6)


@pytest.mark.parametrize("path", FILES)
def test_errors_and_recall(path):
    recorded, config = tensors(path), facts(path)
    errors, nearest = {}, []
    for pair in config["annotations"]:
        pair_errors = keypoint_errors(recorded, config, pair)
        same = recorded[f"{pair}.index_same"]
        errors[pair] = pair_errors.diagonal()[same].numpy()
        assert np.allclose(errors[pair], recorded[f"{pair}.error_same"], rtol=0, atol=1e-5)
        closest = pair_errors[same].min(1)
        assert torch.allclose(closest.values, recorded[f"{pair}.error_nearest"], rtol=0, atol=1e-5)
        assert torch.equal(closest.indices, recorded[f"{pair}.index_nearest"])
        nearest += zip(same.tolist(), closest.indices.tolist(), strict=True)
    confusion = np.zeros(recorded["confusion"].shape)
    np.add.at(confusion, tuple(np.array(nearest).T), 1)
    assert np.array_equal(confusion, recorded["confusion"])
    for match in matches(r"recall\.(.+)", recorded):
        recall = official.pck(list(errors.values()), float(match[1]))["point"]
        assert recall == pytest.approx(recorded[match[0]].item(), abs=1e-5)
    for match in matches(r"per_image\.(.+)", recorded):
        by_image = official.pck(list(errors.values()), float(match[1]))["image"]
        assert by_image == pytest.approx(100 * recorded[match[0]].mean().item(), abs=1e-9)


@pytest.mark.parametrize("path", FILES)
def test_padded_and_normalised_images(path):
    recorded, config = tensors(path), facts(path)
    image = official.pad_to_square(Image.fromarray(recorded["in.image"].numpy()), config["image_size"])
    values = np.asarray(image, np.float32) / 255
    values = (values - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    assert np.allclose(values.transpose(2, 0, 1), recorded["out.image"], rtol=0, atol=1e-5)


def test_keypoint_errors_are_scipys_distances():
    random = torch.Generator().manual_seed(0)
    best, side, shape = torch.randint(0, 5, (6, 2), generator=random), 70, (5, 7)
    points = torch.cat([torch.randint(0, 70, (6, 2), generator=random), torch.ones(6, 1, dtype=torch.long)], dim=1)
    errors = official.keypoint_errors(points, points, best, shape, side, 0.25)
    expected = cdist(best.numpy() / np.array([7, 5]), points[:, :2].numpy() / side) / 0.25
    assert np.allclose(errors, expected, rtol=0, atol=1e-6)


def test_a_keypoint_matches_its_own_patch_in_the_same_image():
    """Orthogonal patch features."""
    features = torch.eye(16, dtype=torch.float64).view(16, 4, 4)
    positions = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    points = (positions.double() * 90 / 3).long()
    assert torch.equal(official.match_keypoints(features, features, points, 90), positions)
