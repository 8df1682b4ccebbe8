"""Linear probes on augmented images: crops, their independence of workers, and the batches that heads receive."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from small_trainings import digits, in_shards
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import hflip, pil_to_tensor, resized_crop
from toy_exports import coloured_folder, workspace

from checkpoints.backbone import Backbone
from engine.distributed import World
from engine.seeding import joined_order, shuffled, windowed
from engine.tasks import Workspace
from engine.work import Scale
from imagesets import sets
from imagesets.decoding import UnreadableImage, decode_rgb
from imagesets.random_crops import GeneratorDraws, RandomResizedCrop
from imagesets.sets import open_set
from imagesets.stored import shards_of
from probes.features.kinds import kinds_of
from probes.linear import stream
from probes.linear.batches import EpochPlan
from probes.linear.probe import train_together
from probes.linear.stream import Chunk, ChunkGatherer, FeatureStream
from probes.linear.train_transform import Augmentation, TrainTransform
from probes.tasks.linear import Linear

SMALL = Linear(lrs=(1.0, 10.0), readouts=("avg", "cls2"), epochs=4, batch=64)
PLAIN = Augmentation(rule="torchvision", interpolation="bilinear")
TORCHVISION = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@pytest.mark.parametrize("interpolation", TORCHVISION)
def test_crops_equal_torchvisions_of_the_same_window(interpolation):
    images = open_set("tiny:", "train")
    numbers = np.arange(len(images))
    transform = TrainTransform(
        size=16, interpolation=interpolation, rule="torchvision", seed=3, epoch=2, image_numbers=numbers
    )
    flipped = 0
    for index in range(20):
        image = images.image(index)
        draws = GeneratorDraws(np.random.RandomState([3, 2, index]))
        crop = RandomResizedCrop(size=16, interpolation=interpolation, draws=draws)
        left, top, right, bottom = crop.window(*image.size)
        expected = resized_crop(image, top, left, bottom - top, right - left, [16, 16], TORCHVISION[interpolation])
        ours, plain, mirrored = transform(images, index), pil_to_tensor(expected), pil_to_tensor(hflip(expected))
        assert torch.equal(ours, plain) or torch.equal(ours, mirrored)
        flipped += not torch.equal(ours, plain)
    assert 3 < flipped < 17


class Recorder:
    """A consumer of the feature stream that records its batches."""

    readouts = MappingProxyType({name: kinds_of(name, norm=True) for name in ("avg", "cls2")})
    kinds = tuple(dict.fromkeys(kind for kinds in readouts.values() for kind in kinds))

    def __init__(self, rows, size=20, iteration=0, drop_last=False, augmentation=PLAIN):
        self.train_indices, self.iteration, self.augmentation = rows, iteration, augmentation
        self.plan = EpochPlan(images=len(rows), requested_batch=size, drop_last=drop_last, seed=0)
        self.skipped, self.stream_forwards, self.augmented_forwards, self.batches = {}, 0, 0, []

    def step(self, number, features, labels):
        self.batches.append((features, labels))


def stream_of(export, images, workers=1, seed=0, skip_bad=False, shuffle_window=0):
    space = Workspace(cache=Path("nowhere"), data=images.url, seed=seed, skip_bad=skip_bad, workers=workers)
    return FeatureStream(
        image_set=images, backbone=Backbone(export), space=space, chunk=7, shuffle_window=shuffle_window
    )


def after_epoch(export, *consumers, epoch=0, images=None, **settings):
    """The consumers, after one epoch of a stream that they share."""
    features = stream_of(export, images or open_set("digits:", "train"), **settings)
    features.run(epoch, consumers, lambda: None)
    return consumers


def assert_same_batches(consumer, expected, rtol=0.0, atol=0.0):
    for (features, labels), (expected_features, expected_labels) in zip(
        consumer.batches, expected.batches, strict=True
    ):
        assert torch.equal(labels, expected_labels)
        for name, value in features.items():
            torch.testing.assert_close(value, expected_features[name], rtol=rtol, atol=atol)


def test_heads_receive_every_image_once_in_windows_of_shards(export, tmp_path):
    """The order of a subset is a part of the full order; also alone, resumed within an epoch, and with more threads."""
    images = open_set(in_shards(tmp_path / "shards", images=digits(60)), "train")
    settings = dict(images=images, shuffle_window=2, epoch=1)
    rows = np.arange(0, 60, 2)
    subset, full = after_epoch(export, Recorder(rows), Recorder(np.arange(60)), **settings)
    full_order = joined_order(windowed(shards_of(images), 2, 0, 1), 2)
    assert sorted(full_order) == list(range(60)) and list(full_order) != list(shuffled(60, 0, 1))
    for consumer, order in ((subset, full_order[full_order % 2 == 0]), (full, full_order)):
        assert torch.cat([labels for _, labels in consumer.batches]).tolist() == images.labels[order].tolist()
    (alone,) = after_epoch(export, Recorder(rows), workers=2, **settings)
    assert_same_batches(alone, subset, rtol=1e-4, atol=1e-5)
    (resumed,) = after_epoch(export, Recorder(np.arange(60), iteration=1), **settings)
    full.batches = full.batches[1:]
    assert_same_batches(resumed, full, rtol=1e-4, atol=1e-5)


def test_tasks_with_different_windows_train_together_as_alone(export, tmp_path):
    """Each in the order that it has alone; the training of differently packed shards has another key."""
    splits = {split: open_set("digits:", split).limited(60) for split in ("train", "val")}
    for name, shards in (("one", 6), ("other", 3)):
        for split, images in splits.items():
            in_shards(tmp_path / name, shards, images, split)
    space = workspace(tmp_path, f"wds:{tmp_path / 'one'}")
    tasks = [replace(SMALL, shuffle_window=window, batch=20, epochs=2) for window in (0, 2, 3)]
    together = dict(train_together(tasks, export, space))
    alone = {number: task.run(export, workspace(tmp_path / "alone", space.data)) for number, task in enumerate(tasks)}
    losses = [outcome.metrics["nll"].value for outcome in alone.values()]
    assert len({round(loss, 6) for loss in losses}) == 3
    assert [together[number].metrics["nll"].value for number in range(3)] == pytest.approx(losses, rel=1e-3)
    keys = [
        [task.probe(export, workspace(tmp_path, f"wds:{tmp_path / name}")).key.get("shards") for task in tasks]
        for name in ("one", "other")
    ]
    assert all(key == [None, key[1], key[1]] for key in keys)
    assert len({None, keys[0][1], keys[1][1]}) == 3


def test_impossible_windows_are_refused(export, tmp_path):
    with pytest.raises(ValueError, match=r"^a shuffle window of 2 shards: digits: [^\n]*$"):
        replace(SMALL, shuffle_window=2).run(export, workspace(tmp_path, "digits:"))


def test_heads_receive_every_image_once_in_the_order_of_the_epoch(export):
    images = open_set("digits:", "train")
    rows = np.arange(0, 100, 2)
    (consumer,) = after_epoch(export, Recorder(rows), epoch=3)
    full_order = np.random.RandomState([0, 3]).permutation(len(images))
    order = full_order[np.isin(full_order, rows)]
    assert sorted(order) == list(rows) and list(order) != list(rows)
    assert [len(labels) for _, labels in consumer.batches] == [20, 20, 10]
    assert torch.cat([labels for _, labels in consumer.batches]).tolist() == images.labels[order].tolist()
    transform = TrainTransform(
        size=16, interpolation="bilinear", rule="torchvision", seed=0, epoch=3, image_numbers=np.arange(len(images))
    )
    pixels = torch.stack([transform(images, index) for index in order])
    backbone = Backbone(export)
    layers = backbone.views(backbone.prepare(pixels), [(-1, True), (-2, True)])
    last, second_last = layers[-1, True], layers[-2, True]
    received = {name: torch.cat([features[name] for features, _ in consumer.batches]) for name in Recorder.readouts}
    torch.testing.assert_close(received["avg"], last.avg, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(received["cls2"], torch.cat([second_last.cls, last.cls], dim=1), rtol=1e-4, atol=1e-5)


def test_workers_change_no_bit(export):
    (one_worker,), (three_workers,) = (
        after_epoch(export, Recorder(np.arange(60)), workers=workers) for workers in (1, 3)
    )
    assert_same_batches(one_worker, three_workers)


def test_consumers_share_forward_passes_and_receive_the_same_batches_as_alone(export):
    """Consumers differ in held-out images, in batch size and in whether they drop incomplete batches."""

    def consumers():
        return [Recorder(np.arange(100)), Recorder(np.arange(3, 90), 32, drop_last=True), Recorder(np.arange(0, 99, 4))]

    together = after_epoch(export, *consumers(), workers=2)
    assert [consumer.stream_forwards for consumer in together] == [100, 100, 100]
    assert [consumer.augmented_forwards for consumer in together] == [34, 33, 33]
    for consumer, shared in zip(consumers(), together, strict=True):
        (alone,) = after_epoch(export, consumer)
        assert alone.augmented_forwards == len(alone.train_indices) - 23 * alone.plan.drop_last
        assert_same_batches(alone, shared, rtol=1e-5, atol=1e-6)


def test_augmentations_share_decoded_images_and_change_nothing(export, tmp_path, monkeypatch):
    """Each consumer receives what it does alone, and each image is decoded once."""
    images = open_set(coloured_folder(tmp_path, 12), "train")
    decoded = []
    monkeypatch.setattr(sets, "decode_rgb", lambda data, path: decoded.append(path) or decode_rgb(data, path))

    def consumers():
        mae = Augmentation(rule="mae", interpolation="bicubic")
        policy = replace(PLAIN, policy="rand-m9", erase=0.5)
        recorders = [Recorder(np.arange(30), augmentation=augmentation) for augmentation in (PLAIN, mae, policy)]
        return [*recorders, Recorder(np.arange(5, 36), augmentation=mae, iteration=1)]

    together = after_epoch(export, *consumers(), images=images, workers=2)
    assert sorted(decoded) == sorted(images.path(index) for index in range(len(images)))
    assert [consumer.stream_forwards for consumer in together] == [36, 36, 36, 36]
    assert sum(consumer.augmented_forwards for consumer in together) == 108
    for consumer, shared in zip(consumers(), together, strict=True):
        (alone,) = after_epoch(export, consumer, images=images)
        assert_same_batches(alone, shared, rtol=1e-5, atol=1e-6)


def test_a_resumed_epoch_has_the_same_bits(export):
    """A consumer that is behind receives its own batches; chunks that all have received are not computed again."""
    rows = np.arange(100)
    uninterrupted, _ = after_epoch(export, Recorder(rows), Recorder(rows, 50))
    resumed, finished = after_epoch(export, Recorder(rows, iteration=3), Recorder(rows, 50, iteration=2))
    uninterrupted.batches, forwards_left = uninterrupted.batches[3:], 100 - 60 + 60 % 7
    assert_same_batches(uninterrupted, resumed)
    assert finished.batches == [] and resumed.stream_forwards == forwards_left
    (done,) = after_epoch(export, Recorder(rows, iteration=5))
    assert done.batches == [] and done.stream_forwards == 0


def test_slow_heads_make_extraction_wait(monkeypatch):
    """While the heads are busy, MAX_WAITING_CHUNKS chunks may wait; the thread with one more waits. None is lost."""
    monkeypatch.setattr(stream, "MAX_WAITING_CHUNKS", 2)
    busy, resume, consumed = threading.Event(), threading.Event(), []

    def consume(positions, rows, bad):
        busy.set()
        assert resume.wait(60)
        consumed.append((positions, rows[:, 0, 0].tolist()))

    spans = {number: range(5 * number, 5 * number + 5) for number in range(4)}
    gatherer = ChunkGatherer(spans, (1, 2), consume, World(), torch.device("cpu"))
    chunks = [Chunk(number, torch.full((5, 1, 2), number), {}) for number in spans]
    with ThreadPoolExecutor() as pool:
        heads = pool.submit(gatherer.add, chunks[0])
        assert busy.wait(60)
        gatherer.add(chunks[1])
        gatherer.add(chunks[2])
        last = pool.submit(gatherer.add, chunks[3])
        with pytest.raises(TimeoutError):
            last.result(timeout=0.2)
        resume.set()
        heads.result(timeout=60)
        last.result(timeout=60)
    assert consumed == [(span, [number] * 5) for number, span in spans.items()]


def test_a_separable_set_is_solved(export, tmp_path):
    outcome = SMALL.run(export, workspace(tmp_path, coloured_folder(tmp_path / "set", train=20)))
    assert outcome.numbers["top1"] == 100.0
    assert (outcome.facts["training_images"], outcome.facts["selection_images"]) == (54, 6)
    assert outcome.cost["augmented_forwards"] == 4 * 54
    work = SMALL.cost(Scale(spec=export.spec, images={"train": 60, "val": 24}, classes=2))
    assert work.iterations == SMALL.epochs * outcome.facts["steps_per_epoch"]
    assert work.images == outcome.cost["augmented_forwards"] + outcome.cost["forwards"]


def test_an_unreadable_image_is_an_error_or_left_out(export, tmp_path):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set", train=20))
    task = replace(SMALL, select="val")
    broken = sorted((tmp_path / "set" / "train").rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UnreadableImage, match=broken.name):
        task.run(export, space)
    outcome = task.run(export, replace(space, skip_bad=True))
    assert outcome.numbers["top1"] == 100.0
    assert outcome.cost["augmented_forwards"] == 4 * 60
    assert list(outcome.facts["train"]["skipped"]) == [str(broken)]
