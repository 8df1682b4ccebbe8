"""Two processes connected by gloo give the numbers of one with the same batch, and end together with one message."""

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import together
from PIL import Image
from small_trainings import BATCH, EPOCHS, IMAGES, digits, in_shards, same, trainer
from torch import Tensor
from written import lines_of

from engine.distributed import World
from engine.extensions import source_files
from engine.training.states import states
from imagesets.sets import open_set
from pretrain.loop.images import MicroBatch, batch_plan

pytestmark = pytest.mark.slow

METHODS = list(source_files("methods"))
# By default a teacher, a decoder, a codebook, and labels whose images are mixed; all others in `tox -e all`.
SAMPLE = ["mae", "dino", "moca", "supervised"]
OTHERS = [name for name in METHODS if name not in SAMPLE]
GROUPS = [SAMPLE, *(pytest.param(OTHERS[number::4], marks=pytest.mark.exhaustive) for number in range(4))]
STEPS = EPOCHS * IMAGES // BATCH
BROKEN = batch_plan(IMAGES, BATCH, 2, None, seed=0).places(step=1, rank=1, micro_batch=0)[0]  # read by the second


@pytest.fixture(autouse=True)
def float32_afterwards():
    yield
    torch.set_default_dtype(torch.float32)


def in_double(part: MicroBatch) -> MicroBatch:
    views = {name: view.double() if view.is_floating_point() else view for name, view in part.views.items()}
    return MicroBatch(views, part.unreadable)


def train_in_float64(
    world: World, name: str, out: Path, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Parameters and buffers at the end, and whether each process has separate statistics of its batch."""
    torch.set_default_dtype(torch.float64)
    # Two updates by default, since prototypes are frozen in the first epoch.
    training = trainer(name, out, world=world, **(settings or {"images": digits(BATCH)}))
    parts = training.micro_batches
    training.micro_batches = lambda *arguments: (in_double(part) for part in parts(*arguments))
    with pytest.MonkeyPatch.context() as patch:
        # Counting operations, which test_cost.py tests, takes as long as all updates.
        patch.setattr("pretrain.loop.trainer.is_counted", lambda out: True)
        assert training.train() == "finished"
    method = training.method
    parameters = {key: parameter.detach() for key, parameter in method.named_parameters()}
    buffers = {key: tensor for key, tensor in method.state_dict().items() if key not in parameters}
    return parameters, buffers, method.batch_statistics and not method.sync_batch_norm


def train_all(world: World, names: Sequence[str], out: Path) -> list[tuple]:
    return [train_in_float64(world, name, out / name) for name in names]


@pytest.mark.parametrize("names", GROUPS, ids=",".join)
def test_two_processes_train_as_one(names, tmp_path):
    """Both have the same parameters, equal to those of one process to 1e-6 unless batch statistics are separate.

    Two processes train several methods one after the other, since starting them takes longer than a training.
    """
    firsts, seconds = together(train_all, names, tmp_path / "two")
    for name, first, second in zip(names, firsts, seconds, strict=True):
        parameters, buffers, separate_statistics = train_in_float64(World(), name, tmp_path / "one" / name)
        assert same(first[0], second[0]), name
        assert first[0].keys() == parameters.keys() and first[1].keys() == buffers.keys(), name
        if separate_statistics:
            continue
        assert same(first[1], second[1]), name
        ours = {**first[0], **first[1]}
        for key, tensor in {**parameters, **buffers}.items():
            assert torch.allclose(ours[key].double(), tensor.double(), rtol=1e-6, atol=1e-9), f"{name} {key}"


@pytest.mark.exhaustive
def test_two_processes_train_as_one_in_windows_of_shards(tmp_path):
    settings = {"images": open_set(in_shards(tmp_path / "shards"), "train"), "shuffle_window": 6}
    first, second = together(train_in_float64, "mae", tmp_path / "two", settings)
    parameters, _, _ = train_in_float64(World(), "mae", tmp_path / "one", settings)
    assert same(first[0], second[0])
    assert all(torch.allclose(first[0][name], tensor, rtol=1e-6, atol=1e-9) for name, tensor in parameters.items())


def stop_and_resume(world: World, out: Path) -> tuple[int, dict[str, Tensor]]:
    """Stop after the first epoch and resume; the step of the stop, and the weights at the end."""
    first = trainer("mae", out, world=world, monitor=lambda export, progress: first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped"
    second = trainer("mae", out, world=world, resume=True)
    assert second.train() == "finished"
    return first.step, dict(second.method.state_dict())


def train_uninterrupted(world: World, out: Path) -> dict[str, Tensor]:
    training = trainer("mae", out, world=world)
    training.train()
    return dict(training.method.state_dict())


@pytest.mark.exhaustive  # by default two processes train, and are stopped, with one state
def test_two_resumed_processes_equal_uninterrupted_ones(tmp_path):
    expected, _ = together(train_uninterrupted, tmp_path / "uninterrupted")
    (stopped, first), (_, second) = together(stop_and_resume, tmp_path / "run")
    assert stopped == IMAGES // BATCH + 1 and same(first, expected) and same(second, expected)


def signal_one_process(world: World, out: Path) -> tuple[str, int]:
    """Send the signal to the second process alone."""
    training = trainer("mae", out, world=world, recipe={"epochs": 1000})
    update = training.update

    def update_with_signal(*arguments):
        if not world.is_rank0 and training.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*arguments)

    training.update = update_with_signal
    return training.train(), training.step


def test_a_signal_to_one_process_stops_both_with_one_state(tmp_path):
    assert together(signal_one_process, tmp_path) == [("stopped", 6)] * 2
    assert [path.name[:14] for path in states(tmp_path / "states")] == ["step-000000006"]


def diverge_in_one_process(world: World, out: Path) -> None:
    """Train with a loss that is not finite in the fourth update of the second process."""
    training = trainer("mae", out, world=world)
    forward = training.method.forward

    def diverging_forward(views):
        step = forward(views)
        return step._replace(loss=step.loss * float("nan")) if training.step == 3 and not world.is_rank0 else step

    training.method.forward = diverging_forward
    training.train()


def test_a_loss_that_is_not_finite_in_one_process_stops_both(tmp_path):
    first, second = together(diverge_in_one_process, tmp_path)
    assert first == second and first[0] == "error" and first[2] == 0, "both raise the error and the first reports it"
    assert first[1].startswith(f"the loss is nan in step 3 of {STEPS}") and "losses before: 1." in first[1]
    lines = lines_of(tmp_path)
    assert lines[-1]["step"] == 3


def read_broken_image(world: World, out: Path, folder: Path, skip_bad: bool) -> tuple[dict, dict]:
    """Train an epoch on a folder with a broken image; facts of the export and of the state."""
    images = open_set(f"folder:{folder}", "train")
    training = trainer("mae", out, world=world, images=images, skip_bad=skip_bad, workers=1, recipe={"epochs": 1})
    training.train()
    return dict(training.first_export().facts), training.state().facts


@pytest.fixture
def folder_with_broken_image(tmp_path) -> Path:
    for number in range(IMAGES):
        for split in ("train", "val"):
            path = tmp_path / "images" / split / "class" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16, 3), number, np.uint8)).save(path)
    (tmp_path / f"images/train/class/{BROKEN:02}.png").write_bytes(b"no image")
    return tmp_path / "images"


def test_an_unreadable_image_of_one_process_ends_both_with_one_message(folder_with_broken_image, tmp_path):
    first, second = together(read_broken_image, tmp_path / "run", folder_with_broken_image, False)
    assert first[0] == second[0] == "error" and first[2] == second[2]
    assert f"{BROKEN:02}.png: cannot be read as an image" in (first, second)[first[2]][1]


def test_skipped_images_are_counted_in_every_process(folder_with_broken_image, tmp_path):
    (facts, state), (others, _) = together(read_broken_image, tmp_path / "run", folder_with_broken_image, True)
    assert facts["skipped_images"] == others["skipped_images"] == 1 and list(state["unreadable"]) == [str(BROKEN)]


def train_on_a_full_disk(world: World, out: Path) -> None:
    training = trainer("mae", out, world=world)

    def state():
        raise OSError(errno.ENOSPC, "No space left on device")

    training.state = state
    training.train()


@pytest.mark.exhaustive
def test_a_full_disk_ends_both_with_one_message(tmp_path):
    first, second = together(train_on_a_full_disk, tmp_path)
    assert first[0] == second[0] == "error" and first[2] == second[2] == 0
    assert "No space left on device" in first[1] and "another process" in second[1]
