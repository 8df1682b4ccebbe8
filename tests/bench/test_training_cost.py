"""What a pretraining took, as people read it."""

import pytest

from bench.results.record import TrainingCost, time_text


def test_short_trainings_are_told_in_seconds_and_minutes():
    assert TrainingCost(hours=0.0002201, devices="1 x CPU").text == "0.792 s on 1 x CPU"
    assert TrainingCost(hours=0.5, seconds_per_epoch=722).text == "30 min, 722 s an epoch"
    assert TrainingCost(hours=60.2).text == "60.2 h" and TrainingCost().text == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.4, "59.4 s"), (60, "1 min"), (96.84, "1.61 min"), (3600, "1 h"), (36e6, "10,000 h"), (0, "0 s")],
)
def test_a_time_is_told_in_the_largest_unit_of_which_it_has_one(seconds, text):
    assert time_text(seconds / 3600) == text
