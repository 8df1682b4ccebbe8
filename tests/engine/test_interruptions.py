"""What a training does at a signal: one flag is set, loader processes hear nothing, all processes stop together."""

import multiprocessing
import os
import pickle
import signal
import threading

import pytest
from torch.utils.data import DataLoader, Dataset

from bench.cli.output import in_one_line
from engine.training.interruptions import SIGNALS, Stopped, StopRequest, listening
from engine.training.loading import ignore_signals, loaded_by


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_ends_nothing(number):
    before, request = signal.getsignal(number), StopRequest()
    with listening(request.ask):
        assert not request.asked
        signal.raise_signal(number)
        assert request.asked
    assert signal.getsignal(number) is before


def test_a_thread_beside_the_main_one_trains_without_listening():
    """Python would refuse it a handler."""
    request, heard = StopRequest(), []

    def work():
        with listening(request.ask):
            heard.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [signal.getsignal(signal.SIGTERM)]


class Signalled:
    """Numbers, in whose making the process is sent every signal that is meant for the training."""

    def __len__(self):
        return 2

    def __getitem__(self, place):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        return place


def test_loader_processes_go_on():
    loader = DataLoader(Signalled(), batch_size=None, num_workers=1, worker_init_fn=ignore_signals)
    assert [int(place) for place in loader] == [0, 1]


class Killing(Dataset):
    """The second of two processes is killed while the first is busy."""

    def __len__(self):
        return 8

    def __getitem__(self, place):
        if place == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return place


def test_no_loader_process_outlives_one_that_was_killed():
    """Although the error, and with it the loader's frames, is kept."""
    errors = []
    try:
        list(loaded_by(DataLoader(Killing(), batch_size=None, num_workers=2, worker_init_fn=ignore_signals)))
    except RuntimeError as error:
        errors.append(error)
    assert errors and not multiprocessing.active_children()
    assert "fewer --workers" in in_one_line(errors[0])


def test_the_line_that_says_how_to_go_on(tmp_path):
    stopped = pickle.loads(pickle.dumps(Stopped.after(3, 8, "fine-tuning", tmp_path)))
    assert stopped.reported_by == 0 and str(stopped) == (
        f"stopped by a signal after step 3 of 8 of fine-tuning, state saved in {tmp_path}; to continue, run the "
        "same command again"
    )
