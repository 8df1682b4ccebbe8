"""Scenes of COCO's layout as mmdet's dataset, with the pipelines of the detection papers: its own transforms."""

from collections.abc import Sequence
from typing import Any

from mmcv.transforms import LoadImageFromFile, RandomChoice, RandomChoiceResize, RandomResize
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import FilterAnnotations, LoadAnnotations, PackDetInputs, RandomCrop, RandomFlip, Resize

from downstream.data.reading import ReadImage, Results, Transform
from downstream.data.scenes import SceneSet
from downstream.detection_settings import DetectionSettings

PACKED = 500  # from this number of images on, annotations are serialised, so that loader processes share them
META = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
FLIPPED = (*META, "flip", "flip_direction")


class CocoScenes(CocoDataset):
    """mmdet's dataset of a SceneSet, in the same order; it reads no annotation file."""

    def __init__(self, scenes: SceneSet, **settings: Any) -> None:
        self.scenes = scenes
        super().__init__(metainfo={"classes": scenes.classes}, data_prefix={"img": str(scenes.root)}, **settings)

    def load_data_list(self) -> list[Results]:
        listing = self.scenes.instances
        self.cat_ids = list(listing.categories)
        self.cat2label = {number: label for label, number in enumerate(self.cat_ids)}
        return [
            self.parse_data_info(
                {"raw_img_info": entry | {"img_id": entry["id"], "file_name": name}, "raw_ann_info": own}
            )
            for name, entry, own in zip(listing.images, listing.entries, listing.objects, strict=True)
        ]


def detection_training_images(scenes: SceneSet, sizes: DetectionSettings, masks: bool = True) -> CocoScenes:
    """Augmented training images with their objects. masks: with outlines in addition to boxes."""
    load = [ReadImage(LoadImageFromFile(), scenes.instances), LoadAnnotations(with_bbox=True, with_mask=masks)]
    return _dataset(scenes, [*load, RandomFlip(prob=sizes.flip), *_resized(sizes), PackDetInputs(meta_keys=FLIPPED)])


def detection_validation_images(scenes: SceneSet, sizes: DetectionSettings) -> CocoScenes:
    """Validation images, resized to fit `sizes.val`."""
    load = [ReadImage(LoadImageFromFile(), scenes.instances), Resize(scale=sizes.val, keep_ratio=True)]
    return _dataset(scenes, [*load, PackDetInputs(meta_keys=META)], test_mode=True)


def _resized(sizes: DetectionSettings) -> list[Transform]:
    if sizes.augment == "jitter":
        return [
            RandomResize(scale=(sizes.long, sizes.long), ratio_range=sizes.jitter, resize_type=Resize, keep_ratio=True),
            RandomCrop((sizes.long, sizes.long), "absolute_range", allow_negative_crop=True, recompute_bbox=True),
            FilterAnnotations(min_gt_bbox_wh=(0.01, 0.01), keep_empty=False),
        ]
    whole = _one_of(sizes.short, sizes.long)
    if sizes.augment == "scales":
        return [whole]
    window = RandomCrop(crop_size=sizes.crop, crop_type="absolute_range", allow_negative_crop=True)
    return [RandomChoice([[whole], [_one_of(sizes.crop_short, sizes.long), window, _one_of(sizes.short, sizes.long)]])]


def _one_of(short: Sequence[int], long: int) -> Transform:
    return RandomChoiceResize([(long, side) for side in short], resize_type=Resize, keep_ratio=True)


def _dataset(scenes: SceneSet, pipeline: Sequence[Transform], test_mode: bool = False) -> CocoScenes:
    packed = len(scenes) >= PACKED  # packing collects garbage first, which takes longer than a small training
    return CocoScenes(scenes, pipeline=list(pipeline), test_mode=test_mode, serialize_data=packed)
