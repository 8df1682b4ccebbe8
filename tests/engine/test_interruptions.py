"""Signals during a training: a stop is requested, loader processes ignore them and end together."""

import errno
import multiprocessing
import os
import pickle
import signal
import threading

import pytest
from torch.utils.data import DataLoader, Dataset

from engine.errors import in_one_line
from engine.training.interruptions import SIGNALS, Stopped, StopRequest, listening
from engine.training.loading import SHARED_MEMORY, ignore_signals, loaded_by


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_requests_a_stop_and_ends_nothing(number):
    before, request = signal.getsignal(number), StopRequest()
    with listening(request.ask):
        assert not request.asked
        signal.raise_signal(number)
        assert request.asked
    assert signal.getsignal(number) is before


def test_training_outside_the_main_thread_installs_no_handler():
    """Python allows signal handlers in the main thread alone."""
    request, handlers = StopRequest(), []

    def work():
        with listening(request.ask):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


class SignallingDataset:
    """A dataset that sends its process every stop signal while it makes an item."""

    def __len__(self):
        return 2

    def __getitem__(self, place):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        return place


def test_loader_processes_ignore_stop_signals():
    loader = DataLoader(SignallingDataset(), batch_size=None, num_workers=1, worker_init_fn=ignore_signals)
    assert [int(place) for place in loader] == [0, 1]


class KillingDataset(Dataset):
    """A dataset whose fourth item kills the loader process that makes it."""

    def __len__(self):
        return 8

    def __getitem__(self, place):
        if place == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return place


def test_loader_processes_end_when_one_is_killed():
    """Also while the error is kept, and with it the frames that hold the loader."""
    errors, before = [], {*multiprocessing.active_children()}
    try:
        list(loaded_by(DataLoader(KillingDataset(), batch_size=None, num_workers=2, worker_init_fn=ignore_signals)))
    except RuntimeError as error:
        errors.append(error)
    assert errors and {*multiprocessing.active_children()} <= before
    assert "fewer --workers" in in_one_line(errors[0])


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.ENOSPC])
def test_shared_memory_without_locks_is_an_error_that_names_the_option(monkeypatch, number):
    """/dev/shm that is missing, read-only or full. torch's iterator is not begun: it would print a traceback."""

    def fail():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing, "Lock", fail)
    with pytest.raises(ValueError, match=rf"{SHARED_MEMORY} \({os.strerror(number)}\).*workers=0"):
        list(loaded_by(DataLoader(KillingDataset(), batch_size=None, num_workers=2)))
    assert list(loaded_by(DataLoader(range(3), batch_size=None))) == [0, 1, 2]


def test_the_stop_message_survives_pickling_and_says_how_to_resume(tmp_path):
    stopped = pickle.loads(pickle.dumps(Stopped.after(3, 8, "fine-tuning", tmp_path)))
    assert stopped.reported_by == 0
    assert all(text in str(stopped) for text in ("step 3 of 8 of fine-tuning", str(tmp_path), "same command"))
