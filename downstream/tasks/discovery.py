"""Discovery: the box of one object in an image, found without labels by the keys of the last block. LOST and TokenCut.

Nothing is trained. CorLoc is the share of the images whose box overlaps that of any object by half or more; images
without objects do not count. Images keep their size. Both methods read the same keys, which a run computes once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
    normalised,
    shared_out,
    to_whole_patches,
    whole_patches,
    work_of_images,
)
from engine.settings import PositiveFloat, PositiveInt, ProperFraction
from engine.tasks import Metric, Outcome, Protocol, Workspace, smoke_protocol
from engine.work import Kind, Scale, Work, seconds_of

# L = h x w patches in raster order, D width; boxes are x1, y1, x2, y2 in pixels.

SHAPE = (375, 500)  # of most of VOC's images, by which the work is counted
OVERLAP = 0.5  # of a box with an object's, from which on it counts
TIMED = 2  # images that a plan times


def lost_seed(keys: Tensor, k: int) -> tuple[int, Tensor, Tensor]:
    """Keys (L, D) -> the patch that is like the fewest others, those of the k fewest that are like it, and whether each
    patch is foreground (L,).

    Of equals the first is the seed; the source's sort leaves it open.
    """
    alike = keys @ keys.T
    degree = (alike > 0).fill_diagonal_(False).sum(1)
    order = degree.argsort(stable=True)
    candidates = order[:k]
    similar = candidates[alike[order[0], candidates] > 0]
    return int(order[0]), similar, alike[similar].sum(0) > 0


def tokencut_seed(keys: Tensor, tau: float, eps: float) -> tuple[int, np.ndarray, np.ndarray]:
    """Keys (L, D) -> the patch with the largest entry of the second eigenvector, whether each patch is on its side of
    the mean (L,), and that eigenvector (L,), of (D - W) x = l D x."""
    unit = torch.nn.functional.normalize(keys, dim=1)
    weights = torch.where(unit @ unit.T > tau, 1.0, eps).double().cpu().numpy()
    degrees = np.diag(weights.sum(1))
    vector = eigh(degrees - weights, degrees, subset_by_index=[1, 1])[1][:, 0]
    seed, foreground = int(np.abs(vector).argmax()), vector > vector.mean()
    return seed, foreground if foreground[seed] else ~foreground, vector


def component(foreground: np.ndarray, seed: int) -> np.ndarray:
    """Foreground (h, w) bool -> the part (h, w) bool of it that holds patch `seed`; diagonal neighbours are apart."""
    parts, _ = label(foreground)
    return parts == parts.flat[seed]


def box_of(part: np.ndarray, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Patches (h, w) bool of an image of `size` (height, width), which may end within the last -> their box (4,)."""
    rows, columns = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
    x2, y2 = patch * (columns[-1] + 1), patch * (rows[-1] + 1)
    return np.array([patch * columns[0], patch * rows[0], min(x2, size[1]), min(y2, size[0])], np.float64)


def overlaps(box: np.ndarray, boxes: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """Intersection over union (B,) of a box (4,) with each of `boxes` (B, 4)."""
    boxes, tiny = np.asarray(boxes, np.float64).reshape(-1, 4), 1e-7  # datasets.py:282
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared = sides.clip(min=0).prod(1)
    areas = [(each[:, 2] - each[:, 0]) * (each[:, 3] - each[:, 1] + tiny) for each in (box[None], boxes)]
    return shared / (areas[0] + areas[1] - shared + tiny)


@dataclass(frozen=True, kw_only=True)
class Discovery(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # an image at four times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "trainval"
    KEY: ClassVar[str] = "discovery"

    method: Literal["lost", "tokencut"] = "lost"  # how the object's patches are found
    k: PositiveInt = 100  # of LOST: patches with the fewest similar ones, from which the object grows
    tau: ProperFraction = 0.2  # of TokenCut: cosine from which on two patches are similar
    eps: PositiveFloat = 1e-5  # of TokenCut: weight between patches that are not

    def check_network(self, spec: FrozenSpec) -> None:
        super().check_network(spec)
        if vit_spec(spec, f"{self.KEY} reads keys of its last block").family == "pixels":
            raise ValueError(f"raw pixels have no keys, which {self.KEY} reads; name a network")

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        rows, columns = (whole_patches(side, spec) // spec.patch_size for side in SHAPE)
        return {"images": images["val"], "patches of 375 x 500": rows * columns}

    def cost(self, scale: Scale) -> Work:
        pairs = float(self.summary(scale.spec, scale.images)["patches of 375 x 500"]) ** 2
        area = math.prod(whole_patches(side, scale.spec) for side in SHAPE)
        similarities = 8.0 * pairs * (3 if self.method == "tokencut" else 1)
        side = whole_patches(round(area**0.5), scale.spec)
        return work_of_images(scale, side, 2.0 * scale.spec.width * pairs, similarities)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of an image, from reading to its box."""
        _, val = self.opened(export, space)
        few, backbone = val.places[:TIMED].tolist(), backbone_of(export, space)
        timed = seconds_of(lambda: [boxes_of([self], backbone, val.scenes, index) for index in few], seconds)
        return {"evaluation": timed / len(few)}

    def stream(self, export: FrozenExport, space: Workspace) -> str:
        return "keys"

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        ((_, outcome),) = self.together([self], export, space)
        assert isinstance(outcome, Outcome)
        return outcome

    @classmethod
    def together(
        cls, tasks: Sequence["Discovery"], export: FrozenExport, space: Workspace
    ) -> Iterator[tuple[int, Outcome | Exception]]:
        _, val = tasks[0].opened(export, space)
        scenes, backbone = val.scenes, backbone_of(export, space)
        boxes = shared_out(
            val.places,
            lambda index: boxes_of(tasks, backbone, scenes, index),
            space,
            f"discovering objects of {scenes.url}",
        )
        for place in range(len(tasks)):
            yield place, outcome_of(val, {index: found[place] for index, found in boxes.items()})

    def box(self, keys: torch.Tensor, patch: int, size: tuple[int, int]) -> np.ndarray:
        """Keys (h, w, D) of the patches of an image of `size` (height, width) -> the box (4,) of its object."""
        flat, grid = keys.flatten(0, 1), (keys.shape[0], keys.shape[1])
        if len(flat) == 1:  # the image is one patch, and cannot be cut
            seed, foreground = 0, np.ones(1, bool)
        elif self.method == "lost":
            seed, _, similar = lost_seed(flat, self.k)
            foreground = similar.cpu().numpy()
        else:
            seed, foreground, _ = tokencut_seed(flat, self.tau, self.eps)
        return box_of(component(foreground.reshape(grid), seed), patch, size)


def boxes_of(tasks: Sequence[Discovery], backbone: Backbone, scenes: SceneSet, index: int) -> list[np.ndarray]:
    """The box (4,) that each task finds in an image, which goes through the network once."""
    image, patch = scene_image(scenes, index), backbone.spec.patch_size
    scenes.instances.check_size(index, image.height, image.width)
    pixels = to_whole_patches(normalised(vision.pil_to_tensor(image), *IMAGENET)[None], patch)
    keys = backbone.keys(pixels.to(backbone.mean.device))[0]
    check_features(keys, scenes.image_path(index))
    return [task.box(keys, patch, (image.height, image.width)) for task in tasks]


def object_boxes(scenes: SceneSet, index: int) -> np.ndarray:
    """Boxes (B, 4) of an image's objects in whole pixels, without crowds."""
    objects = [entry["bbox"] for entry in scenes.instances.objects[index] if not entry["iscrowd"]]
    corners = np.array(objects, np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return np.round(corners)


def outcome_of(images: UsableScenes, boxes: Mapping[int, np.ndarray]) -> Outcome:
    """Outcome of the boxes (4,) that a method finds in the usable images, by place."""
    scenes = images.scenes
    found, whole = np.full((2, len(scenes)), np.nan)  # whether the box, and that of the image, overlap an object
    for index, box in boxes.items():
        entry, objects = scenes.instances.entries[index], object_boxes(scenes, index)
        if len(objects):
            own = np.array([0, 0, entry["width"], entry["height"]], np.float64)
            found[index], whole[index] = (overlaps(one, objects).max() >= OVERLAP for one in (box, own))
    if np.isnan(found).all():
        raise ValueError(f"{scenes.url}: no image of {scenes.split} has an object's box; raise --limit")
    array = np.full((len(scenes), 4), np.nan)
    array[list(boxes)] = list(boxes.values())
    return Outcome(
        metrics={"CorLoc": Metric(value=100 * float(np.nanmean(found)), per_image=found)},
        arrays={"boxes": array},
        facts={
            "val": images.facts,
            "notes": list(scenes.notes),
            "images with objects": int(np.isfinite(found).sum()),
            "floor": {"prediction": "the whole image", "metrics": {"CorLoc": 100 * float(np.nanmean(whole))}},
        },
        random=False,
    )


PROTOCOLS = {
    "discovery@smoke": smoke_protocol(Discovery(k=10), "seconds on tiny-trainval:"),
    "discovery@lost": Protocol(
        task=Discovery(),
        version=1,
        source="LOST (valeoai/LOST fcedbec) main_lost.py, difficult objects count; of patches with equally few similar "
        "ones the first is the seed, which the source leaves open",
    ),
    "discovery@tokencut": Protocol(
        task=Discovery(method="tokencut"),
        version=1,
        source="TokenCut (YangtaoWANG95/TokenCut fed52cd) main_tokencut.py",
    ),
}
DENSE = ("discovery@lost", "discovery@tokencut")
SUITES = {"smoke": ("discovery@smoke",), "dense": DENSE, "full": DENSE, "everything": DENSE}
