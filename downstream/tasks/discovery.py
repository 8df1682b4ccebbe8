"""Object discovery: the box of one object per image, found without labels from the keys of the last block.

Nothing is trained; the methods are LOST and TokenCut. CorLoc is the share of images whose box has an IoU of 0.5 or more
with any object's box; images without objects do not count. Images keep their size. Both methods read the same keys,
which a run computes once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.ndimage import label
from torch import Tensor
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec, vit_spec
from downstream.data.scenes import SceneSet, scene_image
from downstream.frozen.task import (
    IMAGENET,
    FrozenTask,
    UsableScenes,
    backbone_of,
    check_features,
    evaluation_work,
    map_across_processes,
    normalise,
    pad_to_patches,
    round_up_to_patch,
)
from engine.errors import option
from engine.settings import PositiveFloat, PositiveInt, ProperFraction, ReadIf
from engine.tasks import Metric, Outcome, Protocol, Shared, Workspace, smoke_protocol
from engine.work import Scale, Work

# L = h x w patches in raster order, D width; boxes are x1, y1, x2, y2 in pixels.

IMAGE_SIZE = (375, 500)  # height and width of most of VOC's images, as plans assume
MIN_IOU = 0.5  # of a correct box with an object's


def lost_seed(keys: Tensor, k: int) -> tuple[int, Tensor, Tensor]:
    """LOST's seed and the foreground that grows from it.

    Two patches are similar if the inner product of their keys is positive.

    Args:
        keys: (L, D).
        k: candidates: the k patches with the fewest similar patches.

    Returns:
        The seed, which is the patch with the fewest similar patches; the candidates (m,) that are similar to it; and a
        mask (L,), True for foreground. Of equals the first are seed and candidates: the source's sort is not stable
        (object_discovery.py:76), so that both its seed and its cut after k depend on the machine.
    """
    products = keys @ keys.T
    degree = (products > 0).fill_diagonal_(False).sum(1)
    order = degree.argsort(stable=True)
    candidates = order[:k]
    similar = candidates[products[order[0], candidates] > 0]
    return int(order[0]), similar, products[similar].sum(0) > 0


def tokencut_seed(keys: Tensor, tau: float, eps: float) -> tuple[int, np.ndarray, np.ndarray]:
    """TokenCut's seed and foreground, by the second eigenvector of (D - W) x = l D x; D holds the row sums of W.

    Args:
        keys: (L, D).
        tau: cosine above which two patches are similar.
        eps: weight in W of patches that are not similar; similar ones have weight 1.

    Returns:
        The seed, which is the patch with the largest absolute entry; a mask (L,), True for patches on the seed's side
        of the mean; and the eigenvector (L,).
    """
    unit = torch.nn.functional.normalize(keys, dim=1)
    weights = torch.where(unit @ unit.T > tau, 1.0, eps).double().cpu().numpy()
    degrees = np.diag(weights.sum(1))
    vector = eigh(degrees - weights, degrees, subset_by_index=[1, 1])[1][:, 0]
    seed, foreground = int(np.abs(vector).argmax()), vector > vector.mean()
    return seed, foreground if foreground[seed] else ~foreground, vector


def connected_component(foreground: np.ndarray, seed: int) -> np.ndarray:
    """The connected part (h, w) of a mask (h, w) that holds patch `seed`; diagonal neighbours are not connected."""
    parts, _ = label(foreground)
    return parts == parts.flat[seed]


def bounding_box(mask: np.ndarray, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Box (4,) around the True patches of a mask (h, w), clipped to an image of `size` (height, width)."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    x2, y2 = patch * (columns[-1] + 1), patch * (rows[-1] + 1)
    return np.array([patch * columns[0], patch * rows[0], min(x2, size[1]), min(y2, size[0])], np.float64)


def box_ious(box: np.ndarray, boxes: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """Intersection over union (B,) of a box (4,) with each of `boxes` (B, 4), with the source's epsilon."""
    boxes, epsilon = np.asarray(boxes, np.float64).reshape(-1, 4), 1e-7  # datasets.py:282
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    intersection = sides.clip(min=0).prod(1)
    area = (box[2] - box[0]) * (box[3] - box[1] + epsilon)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1] + epsilon)
    return intersection / (area + areas - intersection + epsilon)


@dataclass(frozen=True, kw_only=True)
class Discovery(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # an image at four times the pixels of 224 x 224
    is_random: ClassVar[bool] = False
    LAYOUT: ClassVar[str] = "trainval"
    KEY: ClassVar[str] = "discovery"

    method: Literal["lost", "tokencut"] = "lost"  # how the object's patches are found
    # LOST: patches with the fewest similar ones, from which the object grows
    k: Annotated[PositiveInt, ReadIf("method", "lost")] = 100
    # TokenCut: cosine above which two patches are similar
    tau: Annotated[ProperFraction, ReadIf("method", "tokencut")] = 0.2
    # TokenCut: weight of two patches that are not similar
    eps: Annotated[PositiveFloat, ReadIf("method", "tokencut")] = 1e-5

    def check_network(self, spec: FrozenSpec) -> None:
        super().check_network(spec)
        if vit_spec(spec, f"{self.KEY} reads keys of its last block").family == "pixels":
            raise ValueError(f"raw pixels have no keys, which {self.KEY} reads; name a network")

    def cost(self, scale: Scale) -> Work:
        sides = [round_up_to_patch(side, scale.spec) for side in scale.size or IMAGE_SIZE]
        pairs = (math.prod(sides) / scale.spec.patch_size**2) ** 2
        similarities = 8.0 * pairs * (3 if self.method == "tokencut" else 1)
        side = round_up_to_patch(round(math.prod(sides) ** 0.5), scale.spec)
        return evaluation_work(scale, side, 2.0 * scale.spec.width * pairs, similarities)

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        return Shared(together=discover_together, stream="keys")

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        ((_, outcome),) = discover_together([self], export, space)
        return outcome

    def find_box(self, keys: Tensor, patch: int, size: tuple[int, int]) -> np.ndarray:
        """The box (4,) of the object in an image of `size` (height, width) from the keys (h, w, D) of its patches."""
        flat, grid = keys.flatten(0, 1), (keys.shape[0], keys.shape[1])
        if len(flat) == 1:  # the image is one patch, and cannot be cut
            seed, foreground = 0, np.ones(1, bool)
        elif self.method == "lost":
            seed, _, mask = lost_seed(flat, self.k)
            foreground = mask.cpu().numpy()
        else:
            seed, foreground, _ = tokencut_seed(flat, self.tau, self.eps)
        return bounding_box(connected_component(foreground.reshape(grid), seed), patch, size)


def discover_together(
    tasks: Sequence[Discovery], export: FrozenExport, space: Workspace
) -> Iterator[tuple[int, Outcome]]:
    """The index and the outcome of each task; every image goes through the network once for all of them."""
    _, val = tasks[0].load_scenes(export, space)
    scenes, backbone = val.scenes, backbone_of(export, space)
    boxes = map_across_processes(
        val.indices,
        lambda index: discover_boxes(tasks, backbone, scenes, index),
        space,
        f"discovering objects of {scenes.url}",
    )
    for number in range(len(tasks)):
        yield number, corloc_outcome(val, {index: of_tasks[number] for index, of_tasks in boxes.items()})


def discover_boxes(tasks: Sequence[Discovery], backbone: Backbone, scenes: SceneSet, index: int) -> list[np.ndarray]:
    """The box (4,) that each task finds in an image, which goes through the network once."""
    image, patch = scene_image(scenes, index), backbone.spec.patch_size
    scenes.instances.check_size(index, image.height, image.width)
    pixels = pad_to_patches(normalise(vision.pil_to_tensor(image), *IMAGENET)[None], patch)
    keys = backbone.keys(pixels.to(backbone.mean.device))[0]
    check_features(keys, scenes.image_path(index))
    return [task.find_box(keys, patch, (image.height, image.width)) for task in tasks]


def object_boxes(scenes: SceneSet, index: int) -> np.ndarray:
    """Boxes (B, 4) of an image's objects, without crowds, rounded to whole pixels."""
    boxes = [annotation["bbox"] for annotation in scenes.instances.objects[index] if not annotation["iscrowd"]]
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]  # from width and height
    return np.round(corners)


def corloc_outcome(images: UsableScenes, boxes: Mapping[int, np.ndarray]) -> Outcome:
    """Outcome of a task from the box (4,) that it found in each usable image, by index."""
    scenes = images.scenes
    # For each image with objects 1 if the box is correct, else 0; and the same for the box of the whole image.
    correct, floor = np.full((2, len(scenes)), np.nan)
    for index, box in boxes.items():
        entry, objects = scenes.instances.entries[index], object_boxes(scenes, index)
        if len(objects):
            whole_image = np.array([0, 0, entry["width"], entry["height"]], np.float64)
            correct[index] = box_ious(box, objects).max() >= MIN_IOU
            floor[index] = box_ious(whole_image, objects).max() >= MIN_IOU
    if np.isnan(correct).all():
        raise ValueError(f"{scenes.url}: no image of {scenes.split} has an object's box; raise {option('limit')}")
    array = np.full((len(scenes), 4), np.nan)
    array[list(boxes)] = list(boxes.values())
    return Outcome(
        metrics={"CorLoc": Metric(value=100 * float(np.nanmean(correct)), per_image=correct)},
        arrays={"boxes": array},
        facts={
            "val": images.facts,
            "notes": list(scenes.notes),
            "images with objects": int(np.isfinite(correct).sum()),
            "floor": {"prediction": "the whole image", "metrics": {"CorLoc": 100 * float(np.nanmean(floor))}},
        },
    )


PROTOCOLS = {
    "discovery@smoke": smoke_protocol(Discovery(k=10), "seconds on tiny-trainval:"),
    "discovery@lost": Protocol(
        task=Discovery(),
        version=1,
        source="LOST (valeoai/LOST fcedbec) main_lost.py, difficult objects count; of patches with equally few similar "
        "ones the first are the seed and, at the cut, among the 100, both of which the source leaves open",
    ),
    "discovery@tokencut": Protocol(
        task=Discovery(method="tokencut"),
        version=1,
        source="TokenCut (YangtaoWANG95/TokenCut fed52cd) main_tokencut.py",
    ),
}
DENSE = ("discovery@lost", "discovery@tokencut")
SUITES = {"smoke": ("discovery@smoke",), "dense": DENSE, "full": DENSE, "everything": DENSE}
