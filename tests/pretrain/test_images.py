"""The images of a training: every image once an epoch, the same for any number of processes, parts and loaders."""

import os
import signal
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_trainings import in_shards
from torchvision import transforms

from checkpoints.spec import Preparation
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, open_set
from imagesets.stored import shards_of, with_shuffle_window
from pretrain.loop.images import (
    PIECE_IMAGES,
    BatchPlan,
    MicroBatches,
    batch_plan,
    load_micro_batches,
    steps_with_shards,
)
from pretrain.parts.colours import Colours
from pretrain.parts.views import crop, view

SIZE = 32


class OneView:
    """A crop with colours. error: raised instead. count_file: grows by a byte with every view."""

    def __init__(self, error: Exception | None = None, count_file: Path | None = None) -> None:
        self.view = view([*crop(SIZE, (0.2, 1.0)), Colours(blur=0.5)], Preparation())
        self.error, self.count_file = error, count_file

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        if self.error:
            raise self.error
        if self.count_file:
            with open(self.count_file, "ab") as file:
                file.write(b".")
        return {"image": self.view(image), "loader": torch.tensor(os.getpid())}


def parts_of(
    images: ImageSet, steps: range, plan: BatchPlan, size: int = PIECE_IMAGES, decode: Any = "exact", **view: Any
) -> MicroBatches:
    return MicroBatches(
        image_set=images, views=OneView(**view), plan=plan, rank=0, steps=steps, size=size, decode=decode
    )


def save_images(folder: Path, *images: Image.Image | bytes) -> ImageSet:
    """Save a set of these images in this order."""
    for split in ("train", "val"):
        (folder / split / "class").mkdir(parents=True)
        for number, image in enumerate(images):
            path = folder / split / "class" / f"{number:02}.png"
            if isinstance(image, bytes):
                path.write_bytes(image)
            else:
                image.save(path, "TIFF" if image.mode == "CMYK" else "PNG")
    return open_set(f"folder:{folder}", "train")


def test_a_view_is_normalised_as_by_torchvision_bit_for_bit():
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.7)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    image = Image.fromarray(pixels)
    expected = transforms.functional.normalize(transforms.functional.to_tensor(image), mean, std)
    assert torch.equal(view([], Preparation(mean=mean, std=std))(image), expected)


def test_an_epoch_shows_every_image_once_in_another_order():
    plan = BatchPlan(count=50, batch=16, processes=2, micro_batches=2, seed=0)
    assert (plan.steps_per_epoch, plan.micro_batch_size) == (3, 4)
    epochs = [
        [plan.places(step, rank, part) for step in steps for rank in range(2) for part in range(2)]
        for steps in (range(3), range(3, 6))
    ]
    first, second = (np.concatenate(epoch) for epoch in epochs)
    assert len(set(first)) == len(set(second)) == 48 and (first != second).any()


@pytest.mark.parametrize(("world", "max_images"), [(1, 2), (2, None), (2, 3), (4, 1)])
def test_a_batch_does_not_depend_on_processes_and_micro_batches(world, max_images):
    single = batch_plan(50, 16, 1, None, seed=3)
    plan = batch_plan(50, 16, world, max_images, seed=3)
    for step in (0, 4):
        places = [plan.places(step, rank, part) for rank in range(world) for part in range(plan.micro_batches)]
        assert list(chain(*places)) == single.places(step, 0, 0)


def windowed_plan(world: int = 1, max_images: int | None = None, seed: int = 0) -> BatchPlan:
    """60 images in ten shards of six, batches of 12, six shards at a time."""
    shards = np.split(np.random.RandomState(1).permutation(60), 10)
    return replace(batch_plan(60, 12, world, max_images, seed), shards=shards, window=6)


def places_of(plan: BatchPlan, step: int, rank: int) -> list[int]:
    return [place for part in range(plan.micro_batches) for place in plan.places(step, rank, part)]


def test_an_epoch_in_windows_shows_every_image_once():
    """The order depends on seed and epoch. The images of one lane come from few shards, one after the other."""
    plan = windowed_plan()
    orders = [
        [place for step in range(5 * epoch, 5 * epoch + 5) for place in places_of(windowed_plan(seed=seed), step, 0)]
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3
    shard_of = {image: number for number, shard in enumerate(plan.shards) for image in shard}
    shards = np.array([shard_of[image] for image in orders[0]]).reshape(10, 6)
    for lane in shards.T:  # ten images of at most three shards, each in one run
        assert len(set(lane)) == 1 + np.count_nonzero(np.diff(lane)) <= 3
    images_of_first_shard = [image for image in orders[0] if shard_of[image] == shards[0, 0]]
    assert images_of_first_shard != [image for image in plan.shards[shards[0, 0]] if image in images_of_first_shard]


@pytest.mark.parametrize(("world", "max_images"), [(1, 2), (2, None), (2, 3), (3, None), (3, 2), (6, 1)])
def test_processes_share_an_update_and_read_no_shard_twice(world, max_images):
    single, plan = windowed_plan(), windowed_plan(world, max_images)
    readers: dict[int, set[int]] = {}
    for rank in range(world):
        parts = list(plan.shards_of(rank, range(5)))
        assert [step for step, _ in parts] == sorted(step for step, _ in parts)
        loaded: set[int] = set()
        for step in range(5):
            loaded |= {int(image) for first, images in parts if first <= step for image in images}
            assert set(places_of(plan, step, rank)) <= loaded
        for image in loaded:
            readers.setdefault(image, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in readers.values()) and len(readers) == 60
    for step in (0, 4, 7):
        shares = [places_of(plan, step, rank) for rank in range(world)]
        assert {len(share) for share in shares} == {12 // world}
        assert sorted(chain(*shares)) == sorted(places_of(single, step, 0))
    shared_shards = sum(len({min(readers[image]) for image in shard}) > 1 for shard in plan.shards)
    assert shared_shards <= plan.window - 1


def test_windows_that_processes_cannot_share_are_refused(tmp_path):
    images = open_set(in_shards(tmp_path / "shards"), "train")
    with pytest.raises(
        ValueError, match=r"^a shuffle window of 4 shards cannot be shared equally by 3 processes[^\n]*$"
    ):
        with_shuffle_window(images, 4, 3)


def test_a_resumed_epoch_reads_only_shards_with_remaining_images():
    plan = windowed_plan()
    parts = list(plan.shards_of(0, range(3, 7)))
    images = set(np.concatenate([images for _, images in parts]).tolist())
    needed = {place for step in range(3, 7) for place in places_of(plan, step, 0)}
    assert needed <= images and parts[0][0] <= 3 and len(parts) < len(list(plan.shards_of(0, range(10))))


def test_class_spread_measures_how_well_windows_mix_classes():
    """Four shards of one class each: windows of four mix all classes equally, windows of two mix two."""
    labels = np.arange(400) // 100
    plan = replace(batch_plan(400, 20, 1, None, 0), shards=np.split(np.arange(400), 4), window=4)
    assert plan.class_spread(labels) == 0
    plan = replace(plan, window=2)
    assert plan.class_spread(labels) == pytest.approx(20 * 4 * 0.25**2 / 0.75)
    mixed = np.random.RandomState(0).permutation(labels)
    assert plan.class_spread(mixed) == pytest.approx(1, abs=0.5)


def read_bytes() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_shards_are_read_ahead_once(tmp_path):
    images = with_shuffle_window(open_set(in_shards(tmp_path / "shards"), "train"), 2)
    shards = shards_of(images)
    plan = replace(batch_plan(24, 4, 1, None, 0), shards=shards, window=2)
    spans = [images.images.store.span(images.images.store_indices[shard]) for shard in shards]
    total, before, end = sum(end - start for _, start, end in spans), read_bytes(), time.monotonic() + 60
    for step in steps_with_shards(parts_of(images, range(6), plan)):
        if step == 0:
            assert total / 3 <= read_bytes() - before < total / 2, "the two shards of the first update"
        while step == 5 and read_bytes() - before < total:
            assert time.monotonic() < end, "the other shards are not read"
            time.sleep(0.01)
    assert read_bytes() - before < 1.5 * total


@pytest.mark.parametrize(
    ("batch", "world", "message"),
    [(51, 1, "more than the 50 images of the set"), (10, 4, "set batch=8"), (2, 4, "set batch=4")],
)
def test_batches_that_cannot_be_divided_are_refused(batch, world, message):
    with pytest.raises(ValueError, match=message):
        batch_plan(50, batch, world, None, seed=0)


def test_loaders_work_ahead_and_in_order(tmp_path):
    """While one batch is trained on, each of two loaders prepares two more."""
    images, plan = open_set("tiny:", "train"), batch_plan(64, 16, 1, None, seed=0)
    loading = load_micro_batches(
        parts_of(images, range(12), plan, count_file=tmp_path / "count"), 2, "cpu", skip_bad=False
    )
    parts, end = [next(loading)], time.monotonic() + 60
    while (tmp_path / "count").stat().st_size < (1 + 2 * 2) * 16:
        assert time.monotonic() < end, "the loaders do not work ahead"
        time.sleep(0.01)
    parts += [next(loading) for _ in range(3)]
    loading.close()
    loaders = [part.views.pop("loader")[0].item() for part in parts]
    assert loaders[0] == loaders[2] != loaders[1] == loaders[3] and os.getpid() not in loaders
    expected = parts_of(images, range(12), plan)
    for number, part in enumerate(parts):
        assert torch.equal(part.views["image"], expected[number].views["image"])


@pytest.mark.parametrize(
    ("size", "workers", "decode"),
    [(1, 0, "exact"), (24, 0, "exact"), (5, 2, "exact"), (5, 2, "fast")],
)
def test_a_part_does_not_depend_on_the_size_of_pieces(size, workers, decode):
    images, plan = open_set("tiny:", "train"), batch_plan(64, 24, 1, None, seed=0)
    parts = parts_of(images, range(1, 3), plan, size, decode)
    loaded = list(load_micro_batches(parts, workers, "cpu", skip_bad=False))
    expected = parts_of(images, range(1, 3), plan, size=64, decode=decode)
    assert [len(part.views["loader"]) for part in loaded] == [24, 24]
    assert all(torch.equal(part.views["image"], expected[number].views["image"]) for number, part in enumerate(loaded))


def test_loaders_ignore_a_schedulers_signals_and_end_with_the_stream():
    images, plan = open_set("tiny:", "train"), batch_plan(64, 16, 1, None, seed=0)
    loading = load_micro_batches(parts_of(images, range(40), plan), 1, "cpu", skip_bad=False)
    loader = next(loading).views["loader"][0].item()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(loader, number)
    assert all(next(loading).views["loader"][0].item() == loader for _ in range(5))
    loading.close()
    with pytest.raises(ProcessLookupError):
        os.kill(loader, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(workers, tmp_path):
    images = save_images(tmp_path, *[Image.new("RGB", (8, 8))] * 3, b"no image")
    with pytest.raises(UnreadableImage, match=r"03[.]png: cannot be read as an image"):
        list(
            load_micro_batches(parts_of(images, range(1), batch_plan(4, 4, 1, None, 0)), workers, "cpu", skip_bad=False)
        )


@pytest.mark.parametrize(("size", "decode"), [(1, "exact"), (16, "exact"), (1, "fast")])
def test_an_unreadable_image_may_be_skipped(size, decode, tmp_path):
    """The next readable image replaces it, with the views drawn for its place."""
    colours = [Image.new("RGB", (8, 8), (60 * number, 0, 0)) for number in range(3)]
    images = save_images(tmp_path, colours[0], b"", b"no image", colours[2])
    plan = batch_plan(4, 4, 1, None, 0)
    (part,) = load_micro_batches(parts_of(images, range(1), plan, size, decode), 0, "cpu", skip_bad=True)
    assert part.unreadable == {1: "empty file, 0 bytes", 2: "not an image that Pillow knows"}
    assert part.views["image"].shape == (4, 3, SIZE, SIZE)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_without_a_readable_image_is_refused(workers, tmp_path):
    images = save_images(tmp_path, b"", b"")
    with pytest.raises(ValueError, match="none of the 2 images of train can be read") as error:
        list(
            load_micro_batches(parts_of(images, range(1), batch_plan(2, 2, 1, None, 0)), workers, "cpu", skip_bad=True)
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [ValueError("what is wrong"), OSError(24, "Too many open files")])
def test_an_error_in_a_loader_is_raised_unchanged(error):
    images, plan = open_set("tiny:", "train"), batch_plan(64, 16, 1, None, seed=0)
    with pytest.raises(type(error)) as raised:
        list(load_micro_batches(parts_of(images, range(1), plan, error=error), 1, "cpu", skip_bad=False))
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "CMYK", "P", "1", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (1, 400)])
def test_images_of_any_mode_and_size_are_loaded(mode, size, tmp_path):
    images = save_images(tmp_path, Image.new(mode, size))
    (part,) = load_micro_batches(parts_of(images, range(1), batch_plan(1, 1, 1, None, 0)), 0, "cpu", skip_bad=False)
    assert part.views["image"].shape == (1, 3, SIZE, SIZE) and part.views["image"].isfinite().all()
