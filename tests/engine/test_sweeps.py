"""Values that a sweep chose at an edge of its grid."""

from engine.sweeps import edge_warnings


def grid(scores: dict, **others) -> list[dict]:
    return [{"lr": lr, **others} | ({} if score is None else {"top1": score}) for lr, score in scores.items()]


def test_an_edge_that_is_clearly_better_than_the_value_next_to_it_is_named():
    tried = grid({0.1: 60.0, 0.01: 55.0, 0.001: 40.0})
    (line,) = edge_warnings(tried, tried[0], "top1")
    assert line.startswith("lr=0.1 was chosen, the largest of 3, by 5.0 points over 0.01: larger")
    assert edge_warnings(tried, tried[0], "top1", images=500) and not edge_warnings(tried, tried[0], "top1", images=300)
    (line,) = edge_warnings(grid({1: 60.0, 2: 61.0, 4: 63.5}), {"lr": 4, "top1": 63.5}, "top1")
    assert "largest of 3" in line
    (line,) = edge_warnings(grid({0.5: 62.0, 2: 61.0, 4: 63.5}), {"lr": 0.5, "top1": 62.0}, "top1")
    assert "smallest of 3" in line


def test_other_choices_are_not():
    for scores, best in (
        ({0.1: 60.0, 0.01: 65.0, 0.001: 40.0}, 0.01),  # inside
        ({0.1: 60.0, 0.01: 59.5, 0.001: 40.0}, 0.1),  # nearly level
        ({0.1: 60.0, 0.01: 40.0}, 0.1),  # one of two is always an edge
        ({0.0: 60.0, 0.01: 50.0, 0.1: 40.0}, 0.0),  # nothing is below 0
        ({1: 60.0, 2: 50.0, 4: 40.0}, 1),  # nor a count below 1
        ({1.0: None, 0.1: 60.0, 0.01: 50.0}, 0.1),  # the larger one diverged
    ):
        assert edge_warnings(grid(scores), {"lr": best, "top1": scores[best]}, "top1") == [], scores


def test_values_are_compared_at_the_chosen_values_of_the_other_settings():
    tried = grid({0.1: 60.0, 0.01: 65.0, 0.001: 40.0}, decay=0.1) + grid({0.1: 70.0, 0.01: 50.0, 0.001: 1.0}, decay=0.0)
    (line,) = edge_warnings(tried, tried[3], "top1")
    assert line.startswith("lr=0.1")
