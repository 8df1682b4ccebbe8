"""For all tests: no network, no test without cases, no process left, what this Python lacks, and the tests' order."""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, islice

import pytest

from engine.errors import on_command_line
from engine.optional import UP_TO_312

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork, and a forked process waits for ever for OpenMP's threads
# Packages without wheels for Python 3.13, and those that come with them.
LACKING = {*UP_TO_312, "cv2"} if sys.version_info >= (3, 13) else set()


def lacking(error: BaseException | None) -> str | None:
    """The reason to skip a test that failed because this Python has no wheels of a package; None for other errors.

    The test or a process of it imported the package, or the program refused to do without it.
    """
    missing = re.search(r"No module named '(\w+)", str(error))
    if missing and missing[1] in LACKING:
        return f"needs {missing[1]}, which Python 3.13 does not have"
    refusal = re.search(r"Python 3\.\d+ does not have [\w-]+", str(error))
    return refusal[0] if refusal and LACKING else None


@contextmanager
def skipped_where_lacking() -> Iterator[None]:
    """A block of a test or its fixtures: a need of what this Python lacks skips the test."""
    try:
        yield
    except Exception as error:
        if reason := lacking(error):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Fail a test that is parametrized over nothing: pytest would skip it, as if recorded outputs were not missing."""
    try:
        with skipped_where_lacking():
            return (yield)
    except pytest.skip.Exception as skipped:
        if not str(skipped).startswith("got empty parameter set"):
            raise
        golden = os.environ.get("GOLDEN_ROOT", "tests/golden")
        pytest.fail(
            f"{item.nodeid}: there is no case to test; if its cases are recorded, look in {golden}", pytrace=False
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file that needs what this Python lacks, and one of golden tests whose recordings it cannot express.

    The latter have, under another GOLDEN_ROOT, an option that the error's last line names. Under tests/golden the file
    fails.
    """
    report = yield
    if not report.failed:
        return report
    error = report.call.excinfo.value
    reason = lacking(error.__cause__ or error)
    if reason is None and "GOLDEN_ROOT" in os.environ and collector.name.endswith("_golden.py"):
        last_line = str(report.longrepr).strip().splitlines()[-1]
        reason = f"cannot express the recordings: {last_line.removeprefix('E').strip()}"
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with skipped_where_lacking():
        return (yield)


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


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fail a test that leaves a process running: a loader's processes end with what reads them, also after an error."""
    before = {*multiprocessing.active_children()}
    yield
    left = {*multiprocessing.active_children()} - before
    for process in left:
        process.join(60)  # one that was killed needs a moment
    assert not any(process.is_alive() for process in left)


@pytest.fixture
def on_terminal():
    """Lines are printed, and errors name options, as on the command line."""
    with on_command_line():
        yield
