"""For all tests: no network, whatever a test asks for; and a test without cases fails."""

import os

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
