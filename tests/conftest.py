"""For all tests: no network, whatever a test asks for; and a test without cases fails."""

import os
from itertools import islice

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
    """With `-n`: every process begins with its share of the modules that have slow tests; quick tests are easily shared
    at the end. pytest-xdist hands the list out in as many equal parts as there are processes."""
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    slow = [tests for tests in modules.values() if any(item.get_closest_marker("slow") for item in tests)]
    quick = iter([item for tests in modules.values() if tests not in slow for item in tests])
    found: list[pytest.Item] = []
    for number in range(parts):
        share = [item for tests in slow[number::parts] for item in tests]
        found += [*share, *islice(quick, max(0, len(items) // parts - len(share)))]
    items[:] = [*found, *quick]
