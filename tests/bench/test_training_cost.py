"""What a pretraining took, as people read it."""

from bench.results.record import TrainingCost


def test_short_trainings_are_told_in_seconds_and_minutes():
    assert TrainingCost(hours=0.0002201, devices="1 x CPU").text == "0.7924 s on 1 x CPU"
    assert TrainingCost(hours=0.5, seconds_per_epoch=722).text == "30 min, 722 s an epoch"
    assert TrainingCost(hours=60.2).text == "60.2 hours" and TrainingCost().text == ""
