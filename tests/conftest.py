"""For all tests: no network, no test without cases, and the order of tests in several processes."""

import os
from collections.abc import Iterator
from itertools import groupby, islice

import pytest

from engine.errors import on_command_line

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that is parametrized over nothing: pytest would skip it, as if recorded outputs were not missing."""
    if any(mark.kwargs.get("reason", "").startswith("got empty parameter set") for mark in item.iter_markers("skip")):
        golden = os.environ.get("GOLDEN_ROOT", "tests/golden")
        pytest.fail(
            f"{item.nodeid}: there is no case to test; if its cases are recorded, look in {golden}", pytrace=False
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file of golden tests whose recordings, under another GOLDEN_ROOT, have an option that it cannot express.

    The reason is the error's last line, which names the option. Under tests/golden the file fails.
    """
    report = yield
    if report.failed and "GOLDEN_ROOT" in os.environ and collector.name.endswith("_golden.py"):
        reason = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
        report.outcome, report.longrepr = (
            "skipped",
            (str(collector.path), 0, f"cannot express the recordings: {reason}"),
        )
    return report


@pytest.hookimpl
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one more than there are cores, because some tests only wait for their processes."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`: deal out the modules with slow tests evenly, so that each process begins with its share of them.

    pytest-xdist's worksteal gives each process an equal part of the list. One that has finished takes over half of what
    remains at the end of another's part, which consists of many quick tests.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1:
        return
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    slow = [tests for tests in modules if any(item.get_closest_marker("slow") for item in tests)]
    quick = (item for tests in modules if tests not in slow for item in tests)
    ordered: list[pytest.Item] = []
    for number in range(count):
        share = [item for tests in slow[number::count] for item in tests]
        ordered += [*share, *islice(quick, max(0, len(items) // count - len(share)))]
    items[:] = [*ordered, *quick]


@pytest.fixture
def on_terminal():
    """Lines are printed, and errors name options, as on the command line."""
    with on_command_line():
        yield
