"""Results as files hold them, for tests of what is shown of them."""

from made_results import made_result

from bench.results.record import CheckpointUsed, MetricRecord, Result


def result(checkpoint: CheckpointUsed, top1: float, **others) -> Result:
    """An accuracy, with what it was taken from, and a time."""
    metrics = {
        "top1": MetricRecord(value=top1, interval=(top1 - 2, top1 + 2), array="top1"),
        "seconds": MetricRecord(value=100 - top1, unit="s", higher_is_better=False),
    }
    return made_result(checkpoint, others.pop("metrics", metrics), **others)
