"""Label-free health as a task: a collapsed network differs from a healthy one, and features are shared."""

from dataclasses import replace

import numpy as np
import pytest
from toy_exports import varied_export

from engine.tasks import Workspace
from probes.tasks.health import Health, spectrum_metrics, view_metrics
from probes.tasks.knn import Knn

TASK = Health(images=6, views=3)


def test_a_collapsed_network_has_low_ranks_and_a_warning(tmp_path):
    healthy, collapsed = (
        TASK.run(varied_export(is_collapsed), Workspace(cache=tmp_path, data="tiny:")) for is_collapsed in (False, True)
    )
    assert collapsed.numbers["rankme"] < 1.1 < 5 < healthy.numbers["rankme"]
    assert collapsed.numbers["uniformity"] > healthy.numbers["uniformity"]
    assert any("have collapsed" in line for line in collapsed.facts["warnings"]) and not healthy.facts["warnings"]
    assert healthy.numbers["lidar"] > 1 and 0 <= healthy.numbers["alignment"] < 2


def test_numbers_of_all_blocks_include_those_of_the_last(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    last, all_blocks = TASK.run(varied_export(), space), replace(TASK, layers="all").run(varied_export(), space)
    assert last.numbers.items() <= all_blocks.numbers.items()
    assert all_blocks.numbers["rankme_block1"] != all_blocks.numbers["rankme"]


def test_features_of_other_tasks_are_reused(tmp_path):
    space, network = Workspace(cache=tmp_path, data="tiny:"), varied_export()
    Knn().run(network, space)
    assert TASK.run(network, space).cost["forwards"] == TASK.images * TASK.views
    assert TASK.run(network, space).cost["forwards"] == 0


def test_constant_features_have_rank_one_and_no_undefined_metrics():
    metrics = dict(spectrum_metrics(np.ones((20, 8), np.float32)))
    assert metrics["rankme"].value == pytest.approx(1, abs=1e-4) and metrics["dead_dimensions"].value == 100
    assert "rankme_variance" not in metrics and "alpha_req" not in metrics
    assert "lidar" not in dict(view_metrics(np.ones((5, 3, 8), np.float32)))
