"""Readouts that a network lacks, and features that are equal: what is read, which the result records with a warning."""

from dataclasses import replace

import pytest
import torch
from own_networks import write_networks
from toy_exports import coloured_folder, export_of_size, workspace

from checkpoints.export import ViTExport
from checkpoints.resolve import load, load_frozen
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from probes.features.fallbacks import supported_readout
from probes.tasks.knn import Knn
from probes.tasks.linear import Linear
from probes.tasks.lowshot import LowShot

HEADLESS = dict(class_token=False, class_position=False)
KNN = Knn(k=(1, 5))
LOWSHOT = LowShot(shots=(1,), fractions=(), splits=1, pool="cls")
LINEAR = Linear(lrs=(0.1, 1.0), readouts=("cls1+avg",), epochs=3, batch=12, augment=False)


def export_with(**facts) -> ViTExport:
    torch.manual_seed(0)
    return ViTExport.from_vit(ViT(replace(export_of_size(16).spec, **facts)), Preparation())


@pytest.fixture(scope="module")
def headless():
    return export_with(**HEADLESS, pool="avg")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two classes with random labels, 12 training and 8 validation images each."""
    return coloured_folder(tmp_path_factory.mktemp("set"), classes=2, shuffled=True)


def test_supported_readouts_of_a_network_of_two_blocks():
    for facts, readout, read in [
        ({}, "cls1+avg", "cls1+avg"),
        ({}, "cls2", "cls2"),
        ({}, "cls4+avg", "cls2+avg"),
        ({}, "avg4", "avg2"),
        (HEADLESS, "cls1", "avg"),
        (HEADLESS, "cls1+avg", "avg"),
        (HEADLESS, "cls2", "avg2"),
        (HEADLESS, "cls4+avg", "avg2"),
        (HEADLESS, "avg", "avg"),
        (HEADLESS | {"class_attention": 2}, "cls4", "cls1"),
        (HEADLESS | {"class_attention": 2}, "cls4+avg", "cls1+avg"),
        (HEADLESS | {"class_attention": 2}, "avg2", "avg2"),
    ]:
        spec = replace(export_of_size(16).spec, pool="avg", **facts)
        assert supported_readout(readout, spec) == read


def test_supported_readouts_of_a_network_with_one_output_vector(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_networks(tmp_path)
    spec = load_frozen("module:toynets:vector").spec
    read = {readout: supported_readout(readout, spec) for readout in ("avg", "cls4+avg", "avg4", "cls@1")}
    assert read == {"avg": "cls1", "cls4+avg": "cls1", "avg4": "cls1", "cls@1": "cls@1"}


@pytest.mark.parametrize(
    ("task", "changes", "read"),
    [
        (KNN, {"pool": "avg"}, {"cls": "avg"}),
        (LOWSHOT, {"pool": "avg"}, {"cls": "avg"}),
        (LINEAR, {"readouts": ("avg",)}, {"cls1+avg": "avg"}),
        (replace(LINEAR, augment=True), {"readouts": ("avg",)}, {"cls1+avg": "avg"}),
    ],
    ids=["knn", "lowshot", "linear", "augmented"],
)
def test_without_a_class_token_the_mean_patch_is_read_with_a_warning(headless, data, tmp_path, task, changes, read):
    space = workspace(tmp_path, data)
    outcome, by_hand = task.run(headless, space), replace(task, **changes).run(headless, space)
    assert outcome.metrics == by_hand.metrics and outcome.facts["read_instead"] == read
    assert "read_instead" not in by_hand.facts
    *warnings, warning = outcome.facts["warnings"]
    assert warnings == by_hand.facts.get("warnings", []) and f"avg was read for {next(iter(read))}" in warning


def test_fewer_blocks_are_read_from_a_shallow_network(data, tmp_path):
    export, space = export_of_size(16), workspace(tmp_path, data)
    outcome = replace(LINEAR, readouts=("cls4", "avg")).run(export, space)
    by_hand = replace(LINEAR, readouts=("cls2", "avg")).run(export, space)
    assert outcome.metrics == by_hand.metrics and outcome.facts["read_instead"] == {"cls4": "cls2"}
    assert "cls2 was read for cls4" in outcome.facts["warnings"][-1]


def test_the_last_block_is_read_for_a_missing_one(headless, data, tmp_path):
    export, space = export_of_size(16), workspace(tmp_path, data)
    outcome = replace(LINEAR, readouts=("avg@8",)).run(export, space)
    by_hand = replace(LINEAR, readouts=("avg@2",)).run(export, space)
    assert outcome.metrics == by_hand.metrics and outcome.facts["read_instead"] == {"avg@8": "avg@2"}
    assert by_hand.metrics == replace(LINEAR, readouts=("avg",)).run(export, space).metrics
    assert supported_readout("cls@1", headless.spec) == "avg@1" and supported_readout("cls@1", export.spec) == "cls@1"


def test_readouts_with_the_same_fallback_are_trained_once(data, tmp_path):
    task = replace(LINEAR, readouts=("cls1", "cls1+avg", "cls4", "cls4+avg"))
    outcome = task.run(load("pixels:4"), workspace(tmp_path, data))
    assert [row["readout"] for row in outcome.facts["grid"]] == ["avg"] * len(task.lrs)
    assert "avg was read for cls1, cls1+avg, cls4, cls4+avg" in outcome.facts["warnings"][-1]


@pytest.mark.parametrize(("task", "key"), [(KNN, "knn"), (LOWSHOT, "lowshot")])
def test_a_missing_layer_is_an_error_that_names_the_option(data, tmp_path, task, key):
    """With class-attention blocks there is a class token after the last block only."""
    export = export_with(**HEADLESS, class_attention=1, final_norm="class")
    space = workspace(tmp_path, data)
    early = replace(task, layer=0)
    with pytest.raises(ValueError, match=f"no class token at layer 0; add settings=.*{key}.pool"):
        early.run(export, space)
    assert replace(early, pool="avg").run(export, space).metrics
    with pytest.raises(ValueError, match=f"layer -3: the model has 2 blocks; the last: settings=.*{key}.layer"):
        replace(task, layer=-3).run(export, space)
    assert task.run(export, space).facts.get("read_instead") is None


@pytest.mark.parametrize("task", [KNN, replace(LOWSHOT, norm=True), LINEAR], ids=["knn", "lowshot", "linear"])
def test_features_of_a_collapsed_network_are_a_warning(task, data, tmp_path):
    export = export_with()
    export.tensors["norm.weight"] = torch.zeros_like(export.tensors["norm.weight"])
    warnings = task.run(export, workspace(tmp_path, data)).facts["warnings"]
    assert any("are the same for all images: nothing can be learnt" in line for line in warnings)
