"""For all tests: no network, whatever a test asks for; and a test without cases fails."""

import os
from itertools import groupby, islice

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest skips a test that is parametrised over nothing; one of recorded outputs would then seem to pass."""
    if any(mark.kwargs.get("reason", "").startswith("got empty parameter set") for mark in item.iter_markers("skip")):
        golden = os.environ.get("GOLDEN_ROOT", "tests/golden")
        pytest.fail(
            f"{item.nodeid}: there is no case to test; if its cases are recorded, look in {golden}", pytrace=False
        )


@pytest.hookimpl
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one more than there are cores, since some tests wait for processes of theirs."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`: modules that have tests marked slow come first in every process's share, one after the other in turn.

    pytest-xdist's worksteal gives each process an equal run of the list. One that has done its own takes over half of
    what is left at the end of another's, where there are now many quick tests.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1:
        return
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    slow = [tests for tests in modules if any(item.get_closest_marker("slow") for item in tests)]
    quick = (item for tests in modules if tests not in slow for item in tests)
    ordered: list[pytest.Item] = []
    for number in range(count):
        own = [item for tests in slow[number::count] for item in tests]
        ordered += [*own, *islice(quick, max(0, len(items) // count - len(own)))]
    items[:] = [*ordered, *quick]
