"""Training on augmented images: the crops, their independence of workers, and what the heads are given."""

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
from imagesets import sets
from imagesets.decoding import UnreadableImage, decode_rgb
from imagesets.random_crops import GeneratorDraws, RandomResizedCrop
from imagesets.sets import open_set
from imagesets.stored import shards_of
from probes.features.kinds import kinds_of
from probes.linear import stream
from probes.linear.batches import EpochPlan
from probes.linear.stream import Chunk, ChunkGatherer, FeatureStream
from probes.linear.train_transform import Augmentation, TrainTransform
from probes.splits import held_out
from probes.tasks.linear import Linear

SMALL = Linear(lrs=(1.0, 10.0), readouts=("avg", "cls2"), epochs=4, batch=64)
PLAIN = Augmentation(rule="torchvision", interpolation="bilinear")
TORCHVISION = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@pytest.mark.parametrize("interpolation", TORCHVISION)
def test_pixels_are_torchvisions_of_the_same_window(interpolation):
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
    """A consumer of the stream that records its batches."""

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
    """The consumers after an epoch of one stream."""
    features = stream_of(export, images or open_set("digits:", "train"), **settings)
    features.run(epoch, consumers, lambda: None)
    return consumers


def equal(one, other, rtol=0.0, atol=0.0):
    """Whether two consumers were given the same batches."""
    for (features, labels), (others, others_labels) in zip(one.batches, other.batches, strict=True):
        assert torch.equal(labels, others_labels)
        for name, value in features.items():
            torch.testing.assert_close(value, others[name], rtol=rtol, atol=atol)


def test_heads_are_given_every_image_once_in_windows_of_shards(export, tmp_path):
    """In an order of which theirs is a part; alone, from the midst of an epoch, and with more threads."""
    images = open_set(in_shards(tmp_path / "shards", images=digits(60)), "train")
    settings = dict(images=images, shuffle_window=2, epoch=1)
    rows = np.arange(0, 60, 2)
    part, whole = after_epoch(export, Recorder(rows), Recorder(np.arange(60)), **settings)
    everything = joined_order(windowed(shards_of(images), 2, 0, 1), 2)
    assert sorted(everything) == list(range(60)) and list(everything) != list(shuffled(60, 0, 1))
    for consumer, order in ((part, everything[everything % 2 == 0]), (whole, everything)):
        assert torch.cat([labels for _, labels in consumer.batches]).tolist() == images.labels[order].tolist()
    (alone,) = after_epoch(export, Recorder(rows), workers=2, **settings)
    equal(alone, part, rtol=1e-4, atol=1e-5)
    (rest,) = after_epoch(export, Recorder(np.arange(60), iteration=1), **settings)
    whole.batches = whole.batches[1:]
    equal(rest, whole, rtol=1e-4, atol=1e-5)


def test_tasks_of_other_windows_train_beside_each_other(export, tmp_path):
    """Each on an order of its own, as it does alone; shards that were packed otherwise are another training."""
    splits = {split: open_set("digits:", split).limited(60) for split in ("train", "val")}
    for name, shards in (("one", 6), ("other", 3)):
        for split, images in splits.items():
            in_shards(tmp_path / name, shards, images, split)
    space = workspace(tmp_path, f"wds:{tmp_path / 'one'}")
    tasks = [replace(SMALL, shuffle_window=window, batch=20, epochs=2) for window in (0, 2, 3)]
    together = dict(SMALL.together(tasks, export, space))
    alone = {number: task.run(export, workspace(tmp_path / "alone", space.data)) for number, task in enumerate(tasks)}
    losses = [outcome.metrics["nll"].value for outcome in alone.values()]
    assert len({round(loss, 6) for loss in losses}) == 3
    assert [together[number].metrics["nll"].value for number in range(3)] == pytest.approx(losses, rel=1e-3)
    packed = [
        [task.probe(export, workspace(tmp_path, f"wds:{tmp_path / name}")).key.get("shards") for task in tasks]
        for name in ("one", "other")
    ]
    assert packed[0] == [None, packed[0][1], packed[0][1]] and packed[1] == [None, packed[1][1], packed[1][1]]
    assert len({None, packed[0][1], packed[1][1]}) == 3


def test_windows_that_cannot_be(export, tmp_path):
    with pytest.raises(ValueError, match=r"^shuffle_window=2 is for heads that train on random crops"):
        replace(SMALL, shuffle_window=2, augment=False)
    with pytest.raises(ValueError, match=r"^a shuffle window of 2 shards: digits: is not stored in shards[^\n]*$"):
        replace(SMALL, shuffle_window=2).run(export, workspace(tmp_path, "digits:"))


def test_heads_are_given_every_image_once_in_the_order_of_the_epoch(export):
    images = open_set("digits:", "train")
    rows = np.arange(0, 100, 2)
    (consumer,) = after_epoch(export, Recorder(rows), epoch=3)
    everything = np.random.RandomState([0, 3]).permutation(len(images))
    order = everything[np.isin(everything, rows)]
    assert sorted(order) == list(rows) and list(order) != list(rows)
    assert [len(labels) for _, labels in consumer.batches] == [20, 20, 10]
    assert torch.cat([labels for _, labels in consumer.batches]).tolist() == images.labels[order].tolist()
    transform = TrainTransform(
        size=16, interpolation="bilinear", rule="torchvision", seed=0, epoch=3, image_numbers=np.arange(len(images))
    )
    pixels = torch.stack([transform(images, index) for index in order])
    backbone = Backbone(export)
    layers = backbone.views(backbone.prepare(pixels), [(-1, True), (-2, True)])
    last, before = layers[-1, True], layers[-2, True]
    found = {name: torch.cat([features[name] for features, _ in consumer.batches]) for name in Recorder.readouts}
    torch.testing.assert_close(found["avg"], last.avg, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["cls2"], torch.cat([before.cls, last.cls], dim=1), rtol=1e-4, atol=1e-5)


def test_workers_change_no_bit(export):
    (one,), (three,) = (after_epoch(export, Recorder(np.arange(60)), workers=workers) for workers in (1, 3))
    equal(one, three)


def test_company_changes_nothing_but_roundings_and_every_image_is_computed_once(export):
    """Other images held out, other batches, incomplete ones left out."""

    def consumers():
        return [Recorder(np.arange(100)), Recorder(np.arange(3, 90), 32, drop_last=True), Recorder(np.arange(0, 99, 4))]

    together = after_epoch(export, *consumers(), workers=2)
    assert [each.stream_forwards for each in together] == [100, 100, 100]
    assert [each.augmented_forwards for each in together] == [34, 33, 33]
    for one, other in zip(consumers(), together, strict=True):
        (alone,) = after_epoch(export, one)
        assert alone.augmented_forwards == len(alone.train_indices) - 23 * (alone.plan.drop_last)
        equal(alone, other, rtol=1e-5, atol=1e-6)


def test_augmentations_share_what_is_decoded_and_change_nothing(export, tmp_path, monkeypatch):
    """Each consumer is given what it is given alone, and of each image there is one decoding."""
    images = open_set(coloured_folder(tmp_path, 12), "train")
    decoded = []
    monkeypatch.setattr(sets, "decode_rgb", lambda data, path: decoded.append(path) or decode_rgb(data, path))

    def consumers():
        mae = Augmentation(rule="mae", interpolation="bicubic")
        policy = replace(PLAIN, policy="rand-m9", erase=0.5)
        kinds = [Recorder(np.arange(30), augmentation=each) for each in (PLAIN, mae, policy)]
        return [*kinds, Recorder(np.arange(5, 36), augmentation=mae, iteration=1)]

    together = after_epoch(export, *consumers(), images=images, workers=2)
    assert sorted(decoded) == sorted(images.path(index) for index in range(len(images)))
    assert [each.stream_forwards for each in together] == [36, 36, 36, 36] and sum(
        each.augmented_forwards for each in together
    ) == 108
    for one, other in zip(consumers(), together, strict=True):
        (alone,) = after_epoch(export, one, images=images)
        equal(alone, other, rtol=1e-5, atol=1e-6)


def test_an_epoch_goes_on_with_the_same_bits(export):
    """A consumer behind the others is given its own batches, and chunks that all have had are not computed again."""
    rows = np.arange(100)
    whole, _ = after_epoch(export, Recorder(rows), Recorder(rows, 50))
    rest, over = after_epoch(export, Recorder(rows, iteration=3), Recorder(rows, 50, iteration=2))
    whole.batches, behind = whole.batches[3:], 100 - 60 + 60 % 7
    equal(whole, rest)
    assert over.batches == [] and rest.stream_forwards == behind
    (done,) = after_epoch(export, Recorder(rows, iteration=5))
    assert done.batches == [] and done.stream_forwards == 0


def test_slow_heads_hold_the_cores_back(monkeypatch):
    """While the heads are busy, MAX_WAITING_CHUNKS chunks may wait; the core that brings one more waits itself. None is
    lost."""
    monkeypatch.setattr(stream, "MAX_WAITING_CHUNKS", 2)
    busy, go_on, consumed = threading.Event(), threading.Event(), []

    def consume(places, rows, bad):
        busy.set()
        assert go_on.wait(60)
        consumed.append((places, rows[:, 0, 0].tolist()))

    spans = {number: range(5 * number, 5 * number + 5) for number in range(4)}
    gatherer = ChunkGatherer(spans, (1, 2), consume, World(), torch.device("cpu"))
    chunks = [Chunk(number, torch.full((5, 1, 2), number), {}) for number in spans]
    with ThreadPoolExecutor() as pool:
        heads = pool.submit(gatherer.add, chunks[0])
        assert busy.wait(60)
        gatherer.add(chunks[1])
        gatherer.add(chunks[2])
        held_back = pool.submit(gatherer.add, chunks[3])
        with pytest.raises(TimeoutError):
            held_back.result(timeout=0.2)
        go_on.set()
        heads.result(timeout=60)
        held_back.result(timeout=60)
    assert consumed == [(span, [number] * 5) for number, span in spans.items()]


def test_epochs_and_seeds_differ(export):
    rows = np.arange(20)
    values = {
        (seed, epoch): float(after_epoch(export, Recorder(rows), epoch=epoch, seed=seed)[0].batches[0][0]["avg"][0, 0])
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(values.values())) == 4


def test_a_separable_set_is_solved(export, tmp_path):
    outcome = SMALL.run(export, workspace(tmp_path, coloured_folder(tmp_path / "set", train=20)))
    assert outcome.numbers["top1"] == 100.0
    assert (outcome.facts["training_images"], outcome.facts["selection_images"]) == (54, 6)
    assert outcome.cost["augmented_forwards"] == 4 * 54
    sizes = SMALL.summary(export.spec, {"train": 60, "val": 24})
    assert sizes["steps"] == SMALL.epochs * outcome.facts["steps_per_epoch"] and sizes["epochs"] == SMALL.epochs
    assert sizes["heads"] == len(outcome.facts["grid"]) and sizes["batch"] == outcome.facts["batch"]
    assert sizes["forward passes"] == outcome.cost["augmented_forwards"] + outcome.cost["forwards"]


def test_an_unreadable_image_stops_or_is_left_out(export, tmp_path):
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


def test_unreadable_images_that_choose_are_counted_too(export, tmp_path):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set", train=20), skip_bad=True)
    train = open_set(space.data, "train")
    held = held_out(train, SMALL.holdout, space.seed)
    trained_on = np.setdiff1d(np.arange(len(train)), held)
    broken = [train.path(index) for index in (trained_on[7], held[1])]
    for path in map(Path, broken):
        path.write_bytes(path.read_bytes()[:60])
    assert list(SMALL.run(export, space).facts["train"]["skipped"]) == broken


def test_the_fast_decoder_trains_on_crops_of_its_own_and_says_so(export, tmp_path):
    """Beside the exact training in one cache; on JPEG files, where the two differ."""
    data = coloured_folder(tmp_path / "images")
    outcomes = [SMALL.run(export, workspace(tmp_path, data, decode=decode)) for decode in ("exact", "fast", "fast")]
    transforms = [outcome.facts["train"]["transform"] for outcome in outcomes]
    assert transforms == [f"torchvision-crop-bilinear-flip_{decode}" for decode in ("exact", "fast", "fast")]
    exact, fast, again = (outcome.metrics["nll"].value for outcome in outcomes)
    assert abs(exact - fast) < 0.1 and fast == again
    assert outcomes[1].cost["augmented_forwards"] > 0
