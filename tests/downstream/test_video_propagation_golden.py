"""Mask propagation and DAVIS scores against recordings of the official codes: tests/golden/video_propagation."""

from collections import deque

import numpy as np
import pytest
import torch
from PIL import Image
from recordings import ROOT, facts, tensors
from scipy.ndimage import binary_dilation
from sklearn.metrics import jaccard_score

from downstream.tasks import video_propagation as official

FOLDER = "video_propagation"
FILES = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES)
def test_propagated_masks_of_every_frame(path):
    recorded, config = tensors(path), facts(path)
    annotation, grid = recorded["annotation"].numpy(), tuple(config["grid"])
    first = official.first_masks(annotation[0], grid)
    assert torch.equal(first, recorded["first.onehot"][0].long())
    features = recorded["features"].double()
    near = official.neighbourhood_mask(grid, config["size_mask_neighborhood"])
    queue: deque = deque(maxlen=config["n_last_frames"])
    for frame, target in enumerate(features[1:]):
        context, masks = zip((features[0], first), *queue, strict=True)
        soft = official.propagate(context, masks, target, near, config["topk"], config["temperature"])
        assert torch.allclose(soft, recorded["soft"][frame], rtol=0, atol=1e-9), frame
        labels = official.masks_to_labels(soft, config["patch"], tuple(config["original"]))
        assert np.array_equal(labels, recorded["prediction"][frame + 1]), frame
        queue.append((target, soft))


@pytest.mark.parametrize("path", FILES)
def test_resized_and_normalised_frames(path):
    recorded, config = tensors(path), facts(path)
    size = official.frame_size(*config["original"], config["short_side"], config["patch"])
    assert [side // config["patch"] for side in size] == config["grid"]
    bgr = recorded["frame1.image_bgr"].numpy()
    frame = Image.fromarray(official.resize_like_opencv(bgr[..., ::-1], size))
    frame = official.normalised_tensor(frame, official.MEAN, official.STD)
    assert torch.allclose(frame, recorded["frame1.normalised"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", FILES)
def test_scores(path):
    recorded, config = tensors(path), facts(path)
    predicted, truth = recorded["prediction"].numpy(), recorded["annotation"].numpy()
    scores = official.frame_scores(predicted, truth)
    means = []
    for name, frame_scores in zip("JF", scores, strict=True):
        assert np.allclose(frame_scores, recorded[name], rtol=0, atol=1e-9)
        statistics = official.statistics(frame_scores)
        assert np.allclose(statistics, recorded[f"{name}.statistics"], rtol=0, atol=1e-9)
        means.append(statistics[:, 0].mean())
    assert np.mean(means) == pytest.approx(config["J_and_F"], abs=1e-9)


def contour_accuracy_by_dilation(predicted, truth, radius):
    """F from boundaries dilated by a disk."""
    rows, columns = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    disk = rows**2 + columns**2 <= radius**2
    edges = official.boundary(predicted), official.boundary(truth)
    dilated = [binary_dilation(edge, disk) for edge in edges]
    precision, recall = (edges[0] & dilated[1]).sum() / edges[0].sum(), (edges[1] & dilated[0]).sum() / edges[1].sum()
    return 2 * precision * recall / (precision + recall)


def test_scores_equal_those_of_scipy_and_scikit_learn():
    random = np.random.RandomState(0)
    truth = np.zeros((40, 60), bool)
    truth[10:30, 20:45] = True
    predicted = np.roll(truth, (3, -4), (0, 1)) & (random.rand(40, 60) < 0.97)
    j = official.region_similarity(predicted, truth)
    assert j == pytest.approx(jaccard_score(truth.ravel(), predicted.ravel()), abs=1e-12)
    assert official.contour_accuracy(predicted, truth, 0.05) == pytest.approx(
        contour_accuracy_by_dilation(predicted, truth, 4), abs=1e-12
    )
    empty = np.zeros_like(truth)
    assert official.region_similarity(empty, empty) == official.contour_accuracy(empty, empty) == 1
    assert official.region_similarity(truth, empty) == official.contour_accuracy(truth, empty) == 0


def test_masks_follow_a_shifted_frame():
    """Orthogonal patch features: each patch is similar only to itself."""
    features, masks = 50 * torch.eye(12, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.float64)
    masks[0, :, :2], masks[1, :, 2:] = 1, 1
    moved = features[torch.arange(12).view(3, 4).roll(1, 1).flatten()]
    soft = official.propagate([features], [masks], moved, official.neighbourhood_mask((3, 4), 0), k=1, temperature=0.1)
    assert torch.allclose(soft, masks.roll(1, 2), rtol=0, atol=1e-12)
    unchanged = official.propagate(
        [features], [masks], features, official.neighbourhood_mask((3, 4), 1), k=1, temperature=0.01
    )
    assert torch.allclose(unchanged, masks, rtol=0, atol=1e-12)
