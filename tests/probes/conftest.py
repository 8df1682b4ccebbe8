"""For all tests of probes: one small network."""

import pytest
from toy_exports import export_of_size

from checkpoints.export import ViTExport


@pytest.fixture(scope="session")
def export() -> ViTExport:
    return export_of_size(16)
