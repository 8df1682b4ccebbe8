"""Object discovery against recordings of LOST's and TokenCut's codes: tests/golden/discovery."""

import numpy as np
import pytest
import torch
from recordings import ROOT, facts, matches, tensors
from torchvision.ops import box_iou

from downstream.tasks import discovery as official

FOLDER = "discovery"
FILES = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.safetensors"))
IMAGES = [(path, match[1]) for path in FILES for match in matches(r"(im\d+)\.features", tensors(path))]


def assert_box(recorded, config, image, method, component):
    """The box of a component, its IoUs and its hit are the recorded ones."""
    box = official.bounding_box(component, config[image]["patch_size"], tuple(config[image]["image"]))
    assert np.array_equal(box, recorded[f"{image}.{method}.box"])
    iou = official.box_ious(box, recorded[f"{image}.gt"].numpy())
    assert np.allclose(iou, recorded[f"{image}.{method}.iou"], rtol=0, atol=1e-6)
    assert (iou >= 0.5).any() == config[f"corloc_{method}"][int(image.removeprefix("im"))]


@pytest.mark.parametrize("path, image", IMAGES)
def test_lost(path, image):
    recorded, config = tensors(path), facts(path)
    image_facts, keys = config[image], recorded[f"{image}.features"][0].double()
    seed, similar, foreground = official.lost_seed(keys, config["k_patches"])
    scores = recorded[f"{image}.lost.scores"]
    assert scores[seed] == scores[recorded[f"{image}.lost.seed"]]
    if image_facts["ties_of_seed_degree"] == 1:
        assert seed == recorded[f"{image}.lost.seed"]
        border = sorted(scores.tolist(), reverse=True)[config["k_patches"] - 1 : config["k_patches"] + 1]
        if len(set(border)) == len(border):
            assert set(similar.tolist()) == set(recorded[f"{image}.lost.similars"].tolist())
    component = official.connected_component(foreground.view(image_facts["grid"]).numpy(), seed)
    assert_box(recorded, config, image, "lost", component)


def test_losts_ties_are_cut_in_the_order_of_the_patches():
    """48 patches, each similar to the 15 others of its group: all are level, and the cut after 20 divides a group."""
    keys = torch.eye(3, dtype=torch.float64)[torch.arange(48) % 3]
    seed, similar, foreground = official.lost_seed(keys, 20)
    assert seed == 0 and similar.tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert torch.equal(foreground, torch.arange(48) % 3 == 0)


@pytest.mark.parametrize("path, image", IMAGES)
def test_tokencut(path, image):
    recorded, config = tensors(path), facts(path)
    image_facts, keys = config[image], recorded[f"{image}.features"][0].double()
    seed, foreground, vector = official.tokencut_seed(keys, config["tau"], config["eps"])
    expected = recorded[f"{image}.tokencut.eigenvector"].flatten().numpy()
    assert np.allclose(vector * np.sign(vector @ expected), expected, rtol=0, atol=1e-7)
    assert abs(abs(expected[seed]) - abs(expected[recorded[f"{image}.tokencut.seed"]])) <= 1e-9
    component = official.connected_component(foreground.reshape(image_facts["grid"]), seed)
    assert np.array_equal(component, recorded[f"{image}.tokencut.mask"])
    assert_box(recorded, config, image, "tokencut", component)


def test_ious_equal_torchvisions():
    boxes = torch.rand(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    boxes[:, 2:] += boxes[:, :2] + 1
    assert np.allclose(official.box_ious(boxes[0].numpy(), boxes.numpy()), box_iou(boxes[:1], boxes)[0], atol=1e-6)


def test_tokencut_separates_two_groups_of_patches():
    """The eigenvector is constant in each group, with opposite signs and a larger value in the smaller group."""
    keys = torch.zeros(12, 2, dtype=torch.float64)
    small_group = torch.tensor([4, 5, 8])
    keys[:, 0] = 1
    keys[small_group] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    seed, foreground, vector = official.tokencut_seed(keys, tau=0.2, eps=1e-5)
    assert seed in small_group and np.array_equal(np.flatnonzero(foreground), small_group)
    inside, outside = vector[small_group], np.delete(vector, small_group)
    assert np.ptp(inside) < 1e-9 and np.ptp(outside) < 1e-9
    degrees = 3 + 9e-5, 9 + 3e-5
    assert inside[0] * 3 * degrees[0] == pytest.approx(-outside[0] * 9 * degrees[1])  # D-orthogonal to the constant
