"""What a pretraining costs: counted work against closed forms, a cost that survives restarts, equal bits with and
without it."""

import json
from dataclasses import replace

import pytest
import torch
from small_trainings import BATCH, EPOCHS, IMAGES, trainer
from torch import nn
from torch.nn import functional as F

from checkpoints.export import ViTExport
from engine.work import count_flops
from pretrain.loop.exporting import exports_in
from pretrain.loop.records import cost_of


def test_a_layer_costs_two_operations_a_multiply_add():
    """Forward, and back to its weights and its input."""
    layer, inputs = nn.Linear(5, 7), torch.randn(3, 5, requires_grad=True)
    loss, operations = count_flops(lambda: layer(inputs).sum())
    assert operations == 2 * 3 * 5 * 7
    assert count_flops(loss.backward)[1] == 2 * 2 * 3 * 5 * 7


def test_fused_attention_on_a_cpu_counts():
    """Two products forward, five back: their four gradients, and the weights once more."""
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 4 * 16 * 16 * 8
    found, forward = count_flops(lambda: F.scaled_dot_product_attention(query, key, value))
    assert forward == 2 * product
    assert count_flops(found.sum().backward)[1] == 5 * product


def test_the_log_and_the_exports_say_what_it_took(tmp_path):
    training = trainer("simmim", tmp_path)
    training.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["seconds_per_epoch"] > 0 and line["memory_gib"] > 0.05 for line in lines] == [True] * EPOCHS
    assert ["gflop_per_image" in line for line in lines] == [True, False]
    cost = ViTExport.load(tmp_path / "export").facts["cost"]
    seconds = sum(BATCH * line["updates"] / line["images_per_second"] for line in lines)
    assert cost["hours"] == pytest.approx(seconds / 3600, rel=1e-3)
    assert cost["images_per_second"] == pytest.approx(EPOCHS * IMAGES / seconds, rel=1e-3)
    assert cost["seconds_per_epoch"] == pytest.approx(seconds / EPOCHS, rel=1e-3)
    assert cost["gflop_per_image"] == pytest.approx(lines[0]["gflop_per_image"], rel=1e-3)
    assert cost["devices"].startswith("1 x CPU, ")
    assert "cost" not in ViTExport.load(tmp_path / "start").facts


def test_work_of_an_image_is_the_same_in_any_micro_batches(tmp_path):
    """Of a method whose images do not meet: MAE."""
    found = []
    for size in (8, 2):
        training = trainer("mae", tmp_path / str(size), micro_batch=size, recipe={"epochs": 1})
        training.train()
        found.append(cost_of(tmp_path / str(size), training.identity())["gflop_per_image"])
    assert found[0] == found[1] > 0


def test_a_stopped_training_goes_on_with_its_cost(tmp_path):
    first = trainer("mae", tmp_path, monitor=lambda export, progress: first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped"
    (_, unfinished), *_ = exports_in(tmp_path)
    assert unfinished.facts["unfinished"]["step"] == first.step
    before = cost_of(tmp_path, first.identity())
    assert unfinished.facts["cost"] == before
    training = trainer("mae", tmp_path, resume=True)
    assert training.train() == "finished"
    after = cost_of(tmp_path, training.identity())
    assert after["hours"] > before["hours"] and after["gflop_per_image"] == before["gflop_per_image"]
    assert (tmp_path / "log.jsonl").read_text().count("gflop_per_image") == 1


def test_timings_leave_an_export_and_its_config_as_they_are(tmp_path):
    """They have a file of their own, so that two runs of one training write the same bytes elsewhere."""
    for name in ("a", "b"):
        trainer("mae", tmp_path / name).train()
    one, other = (ViTExport.load(tmp_path / name / "export") for name in ("a", "b"))
    assert one.facts["cost"] != other.facts["cost"] and one.digest == other.digest
    config, again = ((tmp_path / name / "export/config.json").read_bytes() for name in ("a", "b"))
    assert config == again
    bare = replace(one, facts={key: value for key, value in one.facts.items() if key != "cost"})
    assert not (bare.save(tmp_path / "bare") / "cost.json").exists()
    (tmp_path / "a/export/cost.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a ViT-export \(JSONDecodeError[^\n]*\)$"):
        ViTExport.load(tmp_path / "a/export")
