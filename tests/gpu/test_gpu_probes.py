"""Probes on a GPU give the CPU's features, neighbours, optima and metrics."""

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
SAMPLE = ("knn@dino", "finetune@smoke", "augmented")  # by default features, a network and heads; all in `tox -e all`
FEATURE_TOLERANCE = 1e-4 if KIND == "cuda" else 0.0  # in float32


def two_epochs(task):
    """The task with two epochs, if it trains in epochs."""
    return replace(task, epochs=2) if hasattr(task, "epochs") else task


def test_features_equal_the_cpus(tmp_path, on_gpu):
    export, images = export_of_size(16), open_set("digits:", "val").limited(30)
    kinds = [FeatureKind("cls"), FeatureKind("avg", layer=0)]
    on_cpu = extract(export, images, kinds, workspace(tmp_path / "cpu", "digits:"))
    with on_gpu() as device:
        on_device = extract(export, images, kinds, workspace(tmp_path / "gpu", "digits:", device=device, workers=0))
    for kind in kinds:
        np.testing.assert_allclose(on_device[kind], on_cpu[kind], rtol=FEATURE_TOLERANCE, atol=FEATURE_TOLERANCE)


@pytest.mark.gpu
def test_bfloat16_features_are_as_accurate_as_the_cpus():
    export, images = export_of_size(16), torch.randn(64, 3, 16, 16)
    exact = Backbone(export).views(images, [(-1, True)])[-1, True].cls
    cpu_features = Backbone(export, "cpu", "bfloat16").views(images, [(-1, True)])[-1, True].cls
    gpu_features = Backbone(export, "cuda", "bfloat16").views(images.cuda(), [(-1, True)])[-1, True].cls.cpu()
    assert (gpu_features - exact).norm() <= 3 * (cpu_features - exact).norm()


@pytest.mark.gpu
def test_compiled_features_equal_plain_ones():
    export, images = export_of_size(16), torch.randn(64, 3, 16, 16, device="cuda")
    plain, compiled = (Backbone(export, "cuda", compiled=is_compiled) for is_compiled in (False, True))
    first, second = (backbone.views(images, [(-1, True)])[-1, True] for backbone in (plain, compiled))
    torch.testing.assert_close(second.cls, first.cls, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", pytest.param("faiss", marks=pytest.mark.gpu)])
def test_neighbours_equal_the_cpus(backend, on_gpu):
    if backend == "faiss" and not getattr(pytest.importorskip("faiss"), "get_num_gpus", lambda: 0)():
        pytest.skip("a FAISS without GPUs is installed: pip install faiss-gpu")
    random = np.random.default_rng(0)
    gallery, queries = (unit_rows(random.standard_normal((count, 24))) for count in (3000, 500))
    gallery[1000:2000] = gallery[:1000]  # equal similarities must stay in the order of the gallery
    on_cpu = search(gallery, queries, 20, "torch")
    with on_gpu() as device:
        on_device = search(gallery, queries, 20, backend, device)
    np.testing.assert_allclose(on_device.similarities, on_cpu.similarities, atol=1e-6)
    assert (on_device.indices == on_cpu.indices).mean() > 0.999
    tied = on_device.similarities[:, 1:] == on_device.similarities[:, :-1]
    assert tied.any() and (on_device.indices[:, 1:] > on_device.indices[:, :-1])[tied].all()


@pytest.mark.parametrize("penalty", [1e-5, 1e-2])
def test_logistic_regression_has_the_cpus_optimum(penalty, on_gpu):
    torch.manual_seed(0)
    features, labels = torch.randn(60, 16), torch.randint(0, 5, (60,))
    on_cpu = fit_lbfgs(features, labels, 5, penalty)
    with on_gpu() as device:
        on_device = fit_lbfgs(features.to(device), labels.to(device), 5, penalty)
        weights = on_device.weights.cpu()
    assert on_device.gap <= 1e-6 and on_device.objective == pytest.approx(on_cpu.objective, rel=2e-6)
    torch.testing.assert_close(weights, on_cpu.weights, rtol=1e-2, atol=1e-2)


def test_logistic_regression_in_blocks_has_the_cpus_optimum(on_gpu, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 16)
    torch.manual_seed(0)
    features, labels = torch.randn(60, 16), torch.randint(0, 5, (60,))
    on_cpu = fit_lbfgs(features, labels, 5, 1e-3)
    with on_gpu() as device:
        source = PreparedRows(features=features.numpy(), preprocess="none", device=device)
        rows = blocks.BlockedRows(source=source, rows=np.arange(60), labels=labels.to(device), world=World())
        on_device = blocks.fit_in_blocks(rows, 5, 1e-3)
        weights = on_device.weights.cpu()
    assert on_device.gap <= 1e-6 and on_device.objective == pytest.approx(on_cpu.objective, rel=2e-6)
    torch.testing.assert_close(weights, on_cpu.weights, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.exhaustive) for name in [*SMOKE, "augmented"]],
)
def test_probes_give_the_cpus_metrics(name, tmp_path, on_gpu):
    task, export = two_epochs(AUGMENTED if name == "augmented" else SMOKE[name]), export_of_size(16)
    settings = {"limit": 80, "batch_size": 8}
    on_cpu = task.run(export, workspace(tmp_path / "cpu", "digits:", **settings))
    with on_gpu() as device:
        on_device = task.run(export, workspace(tmp_path / "gpu", "digits:", device=device, workers=0, **settings))
    tolerance = 100 * 2 / 80 if KIND == "cuda" else 0.0  # two images, in percent
    assert {key: metric.value for key, metric in on_device.metrics.items()} == pytest.approx(
        {key: metric.value for key, metric in on_cpu.metrics.items()}, abs=tolerance
    )
