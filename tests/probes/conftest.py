"""Fixtures that the tests of probes share."""

import pytest
from toy_exports import export_of_size

from checkpoints.export import ViTExport


@pytest.fixture(scope="session")
def export() -> ViTExport:
    """A random two-block ViT for images of 16 px."""
    return export_of_size(16)
