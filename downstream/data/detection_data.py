"""Scene sets with objects as mmdet's dataset, with the augmentations of the detection papers by mmdet's transforms."""

from collections.abc import Sequence
from typing import Any

from mmcv.transforms import RandomChoice, RandomChoiceResize, RandomResize
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import FilterAnnotations, LoadAnnotations, PackDetInputs, RandomCrop, RandomFlip, Resize

from downstream.data.reading import ReadImage, Results, Transform
from downstream.data.scenes import SceneSet
from downstream.detection_settings import DetectionSettings

MIN_SERIALIZED = 500  # with fewer images annotations are not serialized, which lets loader processes share them
# Keys of the samples' metadata: of validation images, and of training images, which may be flipped.
META_KEYS = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
TRAIN_META_KEYS = (*META_KEYS, "flip", "flip_direction")


class CocoScenes(CocoDataset):
    """A SceneSet as mmdet's dataset, in the same order. It takes the annotations from the listing, not from a file."""

    def __init__(self, scenes: SceneSet, **settings: Any) -> None:
        self.scenes = scenes
        super().__init__(metainfo={"classes": scenes.classes}, data_prefix={"img": str(scenes.root)}, **settings)

    def load_data_list(self) -> list[Results]:
        listing = self.scenes.instances
        self.cat_ids = list(listing.categories)
        self.cat2label = {category: label for label, category in enumerate(self.cat_ids)}
        data_list = []
        for path, entry, annotations in zip(listing.images, listing.entries, listing.objects, strict=True):
            image_info = entry | {"img_id": entry["id"], "file_name": path}
            data_list.append(self.parse_data_info({"raw_img_info": image_info, "raw_ann_info": annotations}))
        return data_list


def detection_training_images(scenes: SceneSet, settings: DetectionSettings, masks: bool = True) -> CocoScenes:
    """Augmented training images with boxes, and with masks of the objects if `masks`."""
    load = [ReadImage(scenes.instances), LoadAnnotations(with_bbox=True, with_mask=masks)]
    augment = [RandomFlip(prob=settings.flip), *_resize_and_crop(settings)]
    return _dataset(scenes, [*load, *augment, PackDetInputs(meta_keys=TRAIN_META_KEYS)])


def detection_validation_images(scenes: SceneSet, settings: DetectionSettings) -> CocoScenes:
    """Validation images without annotations, resized to fit `settings.val`."""
    load = [ReadImage(scenes.instances), Resize(scale=settings.val, keep_ratio=True)]
    return _dataset(scenes, [*load, PackDetInputs(meta_keys=META_KEYS)], test_mode=True)


def _resize_and_crop(settings: DetectionSettings) -> list[Transform]:
    """The transforms that `settings.augment` describes."""
    long = settings.long
    if settings.augment == "jitter":
        return [
            RandomResize(scale=(long, long), ratio_range=settings.jitter, resize_type=Resize, keep_ratio=True),
            RandomCrop((long, long), "absolute_range", allow_negative_crop=True, recompute_bbox=True),
            FilterAnnotations(min_gt_bbox_wh=(0.01, 0.01), keep_empty=False),
        ]
    if settings.augment == "scales":
        return [_resize_randomly(settings.short, long)]
    crop = RandomCrop(crop_size=settings.crop, crop_type="absolute_range", allow_negative_crop=True)
    whole = [_resize_randomly(settings.short, long)]
    cropped = [_resize_randomly(settings.crop_short, long), crop, _resize_randomly(settings.short, long)]
    return [RandomChoice([whole, cropped])]


def _resize_randomly(short: Sequence[int], long: int) -> Transform:
    """Resize to fit a shorter side that is drawn from `short` and the longer side `long`, in pixels."""
    return RandomChoiceResize([(long, side) for side in short], resize_type=Resize, keep_ratio=True)


def _dataset(scenes: SceneSet, pipeline: Sequence[Transform], test_mode: bool = False) -> CocoScenes:
    # Serializing collects garbage first, which takes longer than a training on a small set.
    serialize = len(scenes) >= MIN_SERIALIZED
    return CocoScenes(scenes, pipeline=list(pipeline), test_mode=test_mode, serialize_data=serialize)
