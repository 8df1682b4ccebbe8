"""Probes on a GPU: features, k-NN, heads, logistic regression and fine-tuning as on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated import KIND
from toy_exports import export_of_size, workspace

from checkpoints.backbone import Backbone
from engine.distributed import World
from engine.extensions import load_extension, source_files
from engine.neighbours import search, unit_rows
from imagesets.sets import open_set
from probes.features.extract import extract
from probes.features.kinds import FeatureKind
from probes.lowshot import blocks
from probes.lowshot.blocks import PreparedRows
from probes.lowshot.logistic import fit_lbfgs
from probes.tasks.linear import Linear

PROBES = {key: load_extension("probes", key) for key in source_files("probes")}
SMOKE = {name: module.PROTOCOLS[name].task for module in PROBES.values() for name in module.SUITES["smoke"]}
AUGMENTED = Linear(lrs=(0.1, 1.0), readouts=("cls1", "avg"), epochs=2, batch=32, augment=True)
NEAR = 1e-4 if KIND == "cuda" else 0.0  # of features in float32


def few(task):
    """The task in two epochs, where it trains in epochs."""
    return replace(task, epochs=2) if hasattr(task, "epochs") else task


def test_features_are_the_cpus(tmp_path, on_gpu):
    export, images = export_of_size(16), open_set("digits:", "val").limited(30)
    kinds = [FeatureKind("cls"), FeatureKind("avg", layer=0)]
    here = extract(export, images, kinds, workspace(tmp_path / "cpu", "digits:"))
    with on_gpu() as device:
        there = extract(export, images, kinds, workspace(tmp_path / "gpu", "digits:", device=device, workers=0))
    for kind in kinds:
        np.testing.assert_allclose(there[kind], here[kind], rtol=NEAR, atol=NEAR)


@pytest.mark.gpu
def test_features_in_bfloat16_are_as_near_as_the_cpus():
    export, images = export_of_size(16), torch.randn(64, 3, 16, 16)
    exact = Backbone(export).views(images, [(-1, True)])[-1, True].cls
    near = Backbone(export, "cpu", "bfloat16").views(images, [(-1, True)])[-1, True].cls
    found = Backbone(export, "cuda", "bfloat16").views(images.cuda(), [(-1, True)])[-1, True].cls.cpu()
    assert (found - exact).norm() <= 3 * (near - exact).norm()


@pytest.mark.gpu
def test_compiled_features_are_the_networks_to_rounding():
    export, images = export_of_size(16), torch.randn(64, 3, 16, 16, device="cuda")
    plain, compiled = (Backbone(export, "cuda", compiled=each) for each in (False, True))
    first, second = (each.views(images, [(-1, True)])[-1, True] for each in (plain, compiled))
    torch.testing.assert_close(second.cls, first.cls, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", pytest.param("faiss", marks=pytest.mark.gpu)])
def test_neighbours_are_the_cpus(backend, on_gpu):
    if backend == "faiss" and not getattr(pytest.importorskip("faiss"), "get_num_gpus", lambda: 0)():
        pytest.skip("a FAISS without GPUs is installed: pip install faiss-gpu")
    random = np.random.default_rng(0)
    gallery, asked = (unit_rows(random.standard_normal((count, 24))) for count in (3000, 500))
    gallery[1000:2000] = gallery[:1000]  # equal similarities, which come in the order of the gallery
    here = search(gallery, asked, 20, "torch")
    with on_gpu() as device:
        there = search(gallery, asked, 20, backend, device)
    np.testing.assert_allclose(there.similarities, here.similarities, atol=1e-6)
    assert (there.indices == here.indices).mean() > 0.999
    tied = there.similarities[:, 1:] == there.similarities[:, :-1]
    assert tied.any() and (there.indices[:, 1:] > there.indices[:, :-1])[tied].all()


@pytest.mark.parametrize("penalty", [1e-5, 1e-2])
def test_logistic_regression_has_the_cpus_optimum(penalty, on_gpu):
    torch.manual_seed(0)
    features, labels = torch.randn(60, 16), torch.randint(0, 5, (60,))
    here = fit_lbfgs(features, labels, 5, penalty)
    with on_gpu() as device:
        there = fit_lbfgs(features.to(device), labels.to(device), 5, penalty)
        weights = there.weights.cpu()
    assert there.gap <= 1e-6 and there.objective == pytest.approx(here.objective, rel=2e-6)
    torch.testing.assert_close(weights, here.weights, rtol=1e-2, atol=1e-2)


def test_logistic_regression_in_blocks_has_the_cpus_optimum(on_gpu, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 16)
    torch.manual_seed(0)
    features, labels = torch.randn(60, 16), torch.randint(0, 5, (60,))
    here = fit_lbfgs(features, labels, 5, 1e-3)
    with on_gpu() as device:
        source = PreparedRows(features=features.numpy(), preprocess="none", device=device)
        rows = blocks.BlockedRows(source=source, rows=np.arange(60), labels=labels.to(device), world=World())
        there = blocks.fit_in_blocks(rows, 5, 1e-3)
        weights = there.weights.cpu()
    assert there.gap <= 1e-6 and there.objective == pytest.approx(here.objective, rel=2e-6)
    torch.testing.assert_close(weights, here.weights, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMOKE, "augmented"])
def test_a_probe_gives_the_cpus_numbers(name, tmp_path, on_gpu):
    task, export = few(AUGMENTED if name == "augmented" else SMOKE[name]), export_of_size(16)
    settings = {"limit": 80, "batch_size": 8}
    here = task.run(export, workspace(tmp_path / "cpu", "digits:", **settings))
    with on_gpu() as device:
        there = task.run(export, workspace(tmp_path / "gpu", "digits:", device=device, workers=0, **settings))
    allowed = 100 * 2 / 80 if KIND == "cuda" else 0.0  # two images, in percent
    assert {key: metric.value for key, metric in there.metrics.items()} == pytest.approx(
        {key: metric.value for key, metric in here.metrics.items()}, abs=allowed
    )
