"""Scene sets with masks as mmseg's dataset, with the augmentations of the segmentation papers by mmseg's transforms."""

from collections.abc import Sequence
from typing import Any

from mmcv.transforms import RandomFlip, RandomResize, Resize
from mmseg.datasets import BaseSegDataset
from mmseg.datasets.transforms import PackSegInputs, PhotoMetricDistortion, RandomCrop

from downstream.data.reading import ReadImage, Results, Transform
from downstream.data.scenes import SceneSet, scene_mask

# A crop is redrawn, up to ten times, while one class covers a larger share of it: mmseg configs/_base_/datasets/
# ade20k.py cat_max_ratio.
MAX_CLASS_SHARE = 0.75


class ReadMask:
    """Transform that adds the mask's classes to an image that was read. Raises ValueError if the mask does not fit."""

    def __init__(self, scenes: SceneSet) -> None:
        self.scenes = scenes

    def __call__(self, results: Results) -> Results:
        classes = scene_mask(self.scenes, results["sample_idx"], results["ori_shape"][:2])
        return results | {"gt_seg_map": classes, "seg_fields": ["gt_seg_map"]}


class MaskedScenes(BaseSegDataset):
    """A SceneSet with masks as mmseg's dataset, in the same order."""

    def __init__(self, scenes: SceneSet, **settings: Any) -> None:
        self.scenes = scenes
        super().__init__(metainfo={"classes": scenes.classes}, **settings)

    def load_data_list(self) -> list[Results]:
        return [{"img_path": str(self.scenes.image_path(index))} for index in range(len(self.scenes))]


def segmentation_training_images(
    scenes: SceneSet, crop: int, scale: tuple[int, int], ratios: tuple[float, float]
) -> BaseSegDataset:
    """Training images and masks with random scale, crop, flip and colours.

    Source: mmseg configs/_base_/datasets/ade20k.py, rstrudel/segmenter segm/data/config/cityscapes.py.

    Args:
        crop: side of the crops in pixels.
        scale: longer and shorter side, in pixels, that images are resized to fit, times a random factor.
        ratios: lowest and highest factor.
    """
    transforms = [
        RandomResize(scale=scale, ratio_range=ratios, resize_type=Resize, keep_ratio=True),
        RandomCrop(crop_size=(crop, crop), cat_max_ratio=MAX_CLASS_SHARE),
        RandomFlip(prob=0.5),
        PhotoMetricDistortion(),
    ]
    return _dataset(scenes, [ReadImage(scenes.listing), ReadMask(scenes), *transforms])


def segmentation_validation_images(scenes: SceneSet, scale: tuple[int, int] | None) -> BaseSegDataset:
    """Validation images, resized to fit `scale` (longer and shorter side in pixels) unless it is None, with masks of
    the original size."""
    resize = [Resize(scale=scale, keep_ratio=True)] if scale else []
    return _dataset(scenes, [ReadImage(scenes.listing), *resize, ReadMask(scenes)], test_mode=True)


def _dataset(scenes: SceneSet, pipeline: Sequence[Transform], test_mode: bool = False) -> BaseSegDataset:
    # Not serialized: that collects garbage first, which takes longer than a small training.
    return MaskedScenes(scenes, pipeline=[*pipeline, PackSegInputs()], test_mode=test_mode, serialize_data=False)
