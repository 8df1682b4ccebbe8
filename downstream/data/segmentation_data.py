"""Scenes as mmseg's datasets, with the pipelines of the segmentation papers: mmseg's and mmcv's own transforms."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mmcv.transforms import LoadImageFromFile, RandomFlip, RandomResize, Resize
from mmseg.datasets import BaseSegDataset
from mmseg.datasets.transforms import LoadAnnotations, PackSegInputs, PhotoMetricDistortion, RandomCrop

from downstream.data.reading import Reading, Results, Transform, check_pixels, check_values, read_colours
from downstream.data.scenes import SceneSet, classes_of_mask

MAX_CLASS_SHARE = 0.75  # a crop is drawn again, up to ten times, while one class has more than this of it
READ_IMAGE = Reading(LoadImageFromFile(), "img_path", check_pixels)


class AsClasses:
    """Values of a mask's file -> classes of the set, after mmseg has read it; ValueError if they do not fit."""

    def __init__(self, scenes: SceneSet) -> None:
        self.listing = scenes.masked

    def __call__(self, results: Results) -> Results:
        size, path = results["ori_shape"][:2], results["seg_map_path"]
        return results | {"gt_seg_map": classes_of_mask(results["gt_seg_map"], size, self.listing, path)}


class MaskedScenes(BaseSegDataset):
    """mmseg's dataset of the scenes that it is given, in their order. Values of masks are left to AsClasses."""

    def __init__(self, scenes: SceneSet, **settings: Any) -> None:
        self.scenes = scenes
        super().__init__(metainfo={"classes": scenes.classes}, **settings)

    def load_data_list(self) -> list[Results]:
        facts = {"label_map": None, "reduce_zero_label": self.reduce_zero_label}
        return [
            {"img_path": str(self.scenes.image(i)), "seg_map_path": str(self.scenes.mask(i)), "seg_fields": [], **facts}
            for i in range(len(self.scenes))
        ]


def segmentation_training_images(
    scenes: SceneSet, crop: int, scale: tuple[int, int], ratios: tuple[float, float]
) -> BaseSegDataset:
    """Random scale, crop, flip and colour (mmseg configs/_base_/datasets/ade20k.py, rstrudel/segmenter
    segm/data/config/cityscapes.py).

    crop: side in pixels. scale: longer and shorter side that images fit, times a random factor from `ratios`.
    """
    return _dataset(
        scenes,
        [
            READ_IMAGE,
            read_mask(scenes),
            AsClasses(scenes),
            RandomResize(scale=scale, ratio_range=ratios, resize_type=Resize, keep_ratio=True),
            RandomCrop(crop_size=(crop, crop), cat_max_ratio=MAX_CLASS_SHARE),
            RandomFlip(prob=0.5),
            PhotoMetricDistortion(),
            PackSegInputs(),
        ],
    )


def segmentation_validation_images(scenes: SceneSet, scale: tuple[int, int] | None) -> BaseSegDataset:
    """Images that fit `scale`, or in their own size; labels as they are."""
    resize = [Resize(scale=scale, keep_ratio=True)] if scale else []
    load = [READ_IMAGE, *resize, read_mask(scenes), AsClasses(scenes), PackSegInputs()]
    return _dataset(scenes, load, test_mode=True)


def read_mask(scenes: SceneSet) -> Reading:
    """Values or colours of a mask as its file holds them."""
    if scenes.masked.colours:
        return Reading(read_colours, "seg_map_path", partial(check_values, coloured=True))
    return Reading(LoadAnnotations(), "seg_map_path", check_values)


def _dataset(scenes: SceneSet, pipeline: Sequence[Transform], test_mode: bool = False) -> BaseSegDataset:
    # Unpacked: packing collects garbage first, which takes longer than a small training.
    return MaskedScenes(scenes, pipeline=list(pipeline), test_mode=test_mode, serialize_data=False)
