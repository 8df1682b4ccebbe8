"""Linear probes against recordings of MAE's, ExtreMA's and MOCA's own code: losses, trained heads, features read."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from checkpoints.backbone import Backbone
from checkpoints.importing import ImportOptions, import_file
from checkpoints.reading import ForeignFile
from engine.extensions import load_extension
from probes.features.kinds import rows_of
from probes.features.readouts import joined, kinds_of
from probes.linear.heads import Head, Heads, Recipe

GOLDEN = Path(os.environ.get("GOLDEN_ROOT", Path(__file__).parents[1] / "golden"))


def recording(path):
    with safe_open(GOLDEN / path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def heads_from(weight, recipe, lr, weight_decay=0.0):
    """One head (C, D) as recorded before training, on a readout called x."""
    classes, width = weight.shape
    head = Head(readout="x", lr=lr, weight_decay=weight_decay)
    heads = Heads([head], {"x": width}, classes, recipe, batch=4)
    heads.groups[0].parameters["weight"].copy_(weight.T)
    return heads


def test_mae_two_lars_steps_with_batch_norm_and_weight_decay():
    data, metadata = recording("mae/mae_finetune.safetensors")
    config = json.loads(metadata["config"])
    recipe = Recipe(optimizer="lars", entry="batch_norm", eps=1e-6)
    heads = heads_from(data["lin.head0.1.weight"], recipe, config["lars_lr"], config["lars_wd"])
    heads.groups[0].parameters["bias"].copy_(data["lin.head0.1.bias"])
    heads.running["x"][0].copy_(data["lin.head0.0.running_mean"])
    heads.running["x"][1].copy_(data["lin.head0.0.running_var"])
    for step in range(int(data["lin.head2.0.num_batches_tracked"] - data["lin.head0.0.num_batches_tracked"])):
        loss = heads.step({"x": data["cls.out.features"]}, data["lin.target"], 1.0)
        torch.testing.assert_close(loss[0], data[f"lin.loss{step}"], rtol=0, atol=1e-6)
    parameters = heads.groups[0].parameters
    torch.testing.assert_close(parameters["weight"].T, data["lin.head2.1.weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters["bias"], data["lin.head2.1.bias"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(heads.running["x"][0], data["lin.head2.0.running_mean"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(heads.running["x"][1], data["lin.head2.0.running_var"], rtol=1e-5, atol=1e-7)


def test_extrema_three_sgd_steps_with_batch_norm_at_changing_rates():
    data, _ = recording("extrema/cases.safetensors")
    features, labels = {"x": data["linear/features"]}, data["linear/labels"].long()
    heads = heads_from(data["linear/head_init.weight"], Recipe(entry="batch_norm", eps=1e-5), lr=1.0)
    for lr, loss in zip(data["linear/lr"].tolist(), data["linear/loss"], strict=True):
        torch.testing.assert_close(heads.step(features, labels, lr)[0], loss, rtol=0, atol=1e-5)
    parameters = heads.groups[0].parameters
    torch.testing.assert_close(parameters["weight"].T, data["linear/head_final.weight"], rtol=5e-5, atol=1e-5)
    torch.testing.assert_close(parameters["bias"], data["linear/head_final.bias"], rtol=5e-5, atol=1e-5)
    torch.testing.assert_close(heads.running["x"][0], data["linear/bn_running_mean"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(heads.running["x"][1], data["linear/bn_running_var"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(heads.logits(features)[:, 0], data["linear/eval_logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("mode", "form"), [(0, "cls{}"), (1, "avg"), (2, "cls{}+avg")])
def test_moca_readouts(blocks, mode, form):
    tensors, _ = recording("moca/init_state.safetensors")
    images, _ = recording("moca/inputs.safetensors")
    features, _ = recording("moca/eval.safetensors")
    config = json.loads((GOLDEN / "moca/cases.json").read_text())["tiny_config"]
    tree = {f"model.{name}": value for name, value in tensors.items()}
    file = ForeignFile(path=Path("moca.pth"), sha256="0" * 64, tensors=tree, facts={})
    export = import_file(load_extension("importers", "moca"), file, ImportOptions(heads=config["num_heads"]))
    kinds = kinds_of(form.format(blocks), norm=True)
    ours = joined(rows_of(Backbone(export), images["batch0.x1"].float(), kinds), kinds, slice(None))
    recorded = features[f"linear.n{blocks}.avgpool{mode}"]
    torch.testing.assert_close(torch.from_numpy(ours), recorded, rtol=1e-5, atol=1e-5)
