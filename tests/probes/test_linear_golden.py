"""Linear probes against recordings of MAE's, ExtreMA's and MOCA's code: losses, trained heads, readouts."""

from pathlib import Path

import pytest
import torch
from recordings import facts, matches, tensors, under

from checkpoints.backbone import Backbone
from checkpoints.import_options import ImportOptions
from checkpoints.importing import import_file
from checkpoints.reading import ForeignFile
from engine.extensions import load_extension
from probes.features.kinds import feature_rows, joined, kinds_of
from probes.linear.heads import Head, Heads, HeadSettings

# Tolerances of the READMEs of MAE and ExtreMA for the rounding of float32 recordings.
LOSS = 1e-5  # of losses and outputs
END = 5e-5  # of trained weights


def heads_from(weight, recipe, lr, rows, weight_decay=0.0):
    """A head with the recorded initial weight (C, D), in float64, on a readout x; a step has `rows` rows of it."""
    classes, width = weight.shape
    head = Head(readout="x", lr=lr, weight_decay=weight_decay)
    heads = Heads([head], {"x": width}, classes, recipe, batch=rows, dtype=torch.float64)
    heads.groups[0].parameters["weight"].copy_(weight.T)
    return heads


def assert_close(ours, recorded, limit):
    """Relative to the largest value of a tensor; absolute for a loss, which may be near zero."""
    largest = recorded.abs().max().item() if recorded.ndim else 1.0
    torch.testing.assert_close(ours, recorded.double(), rtol=0, atol=limit * largest)


def test_lars_with_batch_norm_and_weight_decay_trains_as_mae():
    data, config = tensors("mae/mae_finetune.safetensors"), facts("mae/mae_finetune.safetensors")
    first, *_, last = sorted({int(match[1]) for match in matches(r"lin\.head(\d+)\..*", data)})
    before, after = under(data, f"lin.head{first}."), under(data, f"lin.head{last}.")
    features, recipe = data["cls.out.features"].double(), HeadSettings(optimizer="lars", entry="batch_norm", eps=1e-6)
    heads = heads_from(before["1.weight"], recipe, config["lars_lr"], len(features), config["lars_wd"])
    heads.groups[0].parameters["bias"].copy_(before["1.bias"])
    for running, kind in zip(heads.running_statistics["x"], ("mean", "var"), strict=True):
        running.copy_(before[f"0.running_{kind}"])
    for step in range(int(after["0.num_batches_tracked"] - before["0.num_batches_tracked"])):
        assert_close(heads.step({"x": features}, data["lin.target"], 1.0)[0], data[f"lin.loss{step}"], LOSS)
    parameters = heads.groups[0].parameters
    assert_close(parameters["weight"].T, after["1.weight"], END)
    assert_close(parameters["bias"], after["1.bias"], END)
    for running, kind in zip(heads.running_statistics["x"], ("mean", "var"), strict=True):
        assert_close(running, after[f"0.running_{kind}"], LOSS)


def test_sgd_with_batch_norm_and_a_schedule_trains_as_extrema():
    data = under(tensors("extrema/cases.safetensors"), "linear/")
    features, labels = {"x": data["features"].double()}, data["labels"].long()
    heads = heads_from(data["head_init.weight"], HeadSettings(entry="batch_norm", eps=1e-5), lr=1.0, rows=len(labels))
    for lr, loss in zip(data["lr"].tolist(), data["loss"], strict=True):
        assert_close(heads.step(features, labels, lr)[0], loss, LOSS)
    parameters = heads.groups[0].parameters
    assert_close(parameters["weight"].T, data["head_final.weight"], END)
    assert_close(parameters["bias"], data["head_final.bias"], END)
    for running, kind in zip(heads.running_statistics["x"], ("mean", "var"), strict=True):
        assert_close(running, data[f"bn_running_{kind}"], LOSS)
    assert_close(heads.logits(features)[:, 0], data["eval_logits"], LOSS)


FORMS = ("cls{}", "avg", "cls{}+avg")  # of MOCA's modes 0, 1 and 2, for some last blocks
FEATURES = tensors("moca/eval.safetensors")


@pytest.mark.parametrize("readout", [match.groups() for match in matches(r"linear\.n(\d+)\.avgpool(\d+)", FEATURES)])
def test_readouts_equal_mocas(readout):
    blocks, mode = map(int, readout)
    tree = under(tensors("moca/init_state.safetensors"), "", "model.")
    images = tensors("moca/inputs.safetensors")["batch0.x1"]
    file = ForeignFile(path=Path("moca.pth"), sha256="0" * 64, tensors=tree, facts={})
    options = ImportOptions(heads=facts("moca/cases.json")["tiny_config"]["num_heads"])
    export = import_file(load_extension("importers", "moca"), file, options)
    kinds = kinds_of(FORMS[mode].format(blocks), norm=True)
    ours = joined(feature_rows(Backbone(export), images.float(), kinds), kinds, slice(None))
    recorded = FEATURES[f"linear.n{blocks}.avgpool{mode}"]
    torch.testing.assert_close(torch.from_numpy(ours), recorded, rtol=1e-5, atol=1e-5)
