"""Training states: exact, on disk before older ones are deleted, and checked before they are loaded."""

import errno
import os
import stat
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.files import sha256_of_file
from engine.training import states as state_files
from engine.training.states import (
    KEPT_STATES,
    WRITING,
    State,
    load_state,
    newest_intact,
    newest_state,
    save_state,
    states,
)

STATE = State(
    tensors={
        "a.weight": torch.randn(3, 4).t(),  # not contiguous
        "a.count": torch.tensor(7),
        "b.half": torch.randn(5).bfloat16(),
        "b.flag": torch.tensor([True, False]),
    },
    facts={"step": 3, "norm": float("inf"), "losses": [0.1, 1 / 3], "unreadable": {"5": "no image"}},
)


def test_a_state_is_loaded_as_it_was_saved(tmp_path):
    loaded = load_state(save_state(tmp_path, 3, STATE))
    assert loaded.facts == STATE.facts and loaded.tensors.keys() == STATE.tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor) and loaded.tensors[name].dtype == tensor.dtype
    assert loaded.under("a.").keys() == {"weight", "count"}


def test_the_newest_states_are_kept(tmp_path):
    paths = [save_state(tmp_path, step, STATE) for step in (9, 10, 100)]
    assert states(tmp_path) == paths[:0:-1] and len(states(tmp_path)) == KEPT_STATES
    assert newest_intact(tmp_path) == paths[-1]


def test_a_state_is_on_disk_before_an_older_one_is_deleted(tmp_path, monkeypatch):
    """First its bytes under a temporary name, then the folder after the rename: a power cut leaves a complete state."""
    save_state(tmp_path, 1, STATE), save_state(tmp_path, 2, STATE)
    synced = []

    def fsync(handle: int) -> None:
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append(("folder" if folder else "file", [path.name.split("-")[1] for path in states(tmp_path)]))

    monkeypatch.setattr(os, "fsync", fsync)
    save_state(tmp_path, 3, STATE)
    one, two, three = (f"{step:09d}" for step in (1, 2, 3))
    assert synced == [("file", [two, one]), ("folder", [three, two, one])] and len(states(tmp_path)) == KEPT_STATES


def test_a_missing_folder_has_no_state(tmp_path):
    assert newest_intact(tmp_path / "nowhere") is None


def test_every_flipped_bit_is_detected(tmp_path):
    path = save_state(tmp_path, 1, STATE)
    content = path.read_bytes()
    for position in range(0, len(content), 37):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(ValueError, match="all 1 training states are broken"):
            newest_intact(tmp_path)
    path.write_bytes(content)
    assert newest_intact(tmp_path) == path


def test_a_broken_state_is_deleted_and_the_one_before_it_is_kept(tmp_path, capsys):
    older, newest = save_state(tmp_path, 1, STATE), save_state(tmp_path, 2, STATE)
    newest.write_bytes(b"")
    assert newest_intact(tmp_path) == older and states(tmp_path) == [older]
    assert capsys.readouterr().err.count("\n") == 1
    save_state(tmp_path, 2, STATE)
    assert older in states(tmp_path)


def test_a_failed_read_deletes_no_state(tmp_path, monkeypatch):
    first, second = (save_state(tmp_path, step, STATE) for step in (1, 2))

    def fail_once(path):
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(state_files, "sha256_of_file", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        newest_intact(tmp_path)
    assert states(tmp_path) == [second, first] and newest_intact(tmp_path) == second


def test_the_remains_of_a_killed_save_are_deleted(tmp_path):
    torn = tmp_path / f"{WRITING}abc"
    torn.write_bytes(b"part of a state")
    assert newest_intact(tmp_path) is None
    save_state(tmp_path, 1, STATE)
    assert not torn.exists()


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space")])
def test_a_write_that_fails_leaves_nothing(error, tmp_path, monkeypatch):
    saved = save_state(tmp_path, 1, STATE)

    def fail(tensors, path, metadata):
        raise error

    monkeypatch.setattr(state_files, "save_file", fail)
    with pytest.raises((ValueError, OSError), match="No space"):
        save_state(tmp_path, 2, STATE)
    assert list(tmp_path.iterdir()) == [saved]


def test_the_newest_state_is_read_while_another_process_replaces_it(tmp_path, monkeypatch):
    """Both states of the first listing are deleted before they are read."""
    for step in (1, 2):
        save_state(tmp_path, step, STATE)
    checked, is_intact = [], state_files.is_intact

    def replace_before_first_check(path):
        checked.append(path)
        if len(checked) == 1:
            for step in (3, 4):
                save_state(tmp_path, step, replace(STATE, facts={"step": step}))
        return is_intact(path)

    monkeypatch.setattr(state_files, "is_intact", replace_before_first_check)
    state = newest_state(tmp_path, "a.")
    assert state.facts == {"step": 4} and state.tensors.keys() == {"weight", "count"} and len(checked) == 3
    assert newest_state(tmp_path / "nowhere", "") is None


@pytest.mark.parametrize("metadata", [None, {"step": "3"}, {"facts": "[1]"}, {"facts": "{"}])
def test_a_file_that_is_no_state_is_refused_in_one_line(metadata, tmp_path):
    """Even if its name holds the digest of its content."""
    save_file({"a": torch.ones(2)}, tmp_path / "made", metadata=metadata)
    name = f"step-000000003-{sha256_of_file(tmp_path / 'made')[:16]}.safetensors"
    (tmp_path / "made").rename(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is not a training state \(\w+\)$"):
        newest_state(tmp_path, "")


def test_reading_deletes_no_broken_state(tmp_path):
    older, newest = save_state(tmp_path, 1, STATE), save_state(tmp_path, 2, replace(STATE, facts={}))
    newest.write_bytes(b"")
    assert newest_state(tmp_path, "").facts == STATE.facts and states(tmp_path) == [newest, older]
    older.write_bytes(b"")
    with pytest.raises(ValueError, match="all 2 training states are broken"):
        newest_state(tmp_path, "")
