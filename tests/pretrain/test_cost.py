"""The cost of a pretraining: counted operations equal closed forms, and the recorded cost survives restarts."""

from dataclasses import replace

import pytest
import torch
from small_trainings import BATCH, EPOCHS, IMAGES, trainer
from torch import nn
from torch.nn import functional as F
from written import lines_of

from checkpoints.export import ViTExport
from engine.work import count_flops
from pretrain.loop.exporting import exports_in
from pretrain.loop.records import cost_of


def test_a_multiply_add_counts_as_two_operations():
    """Forward, and back to its weights and its input."""
    layer, inputs = nn.Linear(5, 7), torch.randn(3, 5, requires_grad=True)
    loss, operations = count_flops(lambda: layer(inputs).sum())
    assert operations == 2 * 3 * 5 * 7
    assert count_flops(loss.backward)[1] == 2 * 2 * 3 * 5 * 7


def test_fused_attention_on_a_cpu_is_counted():
    """Two products forward, five backward: their four gradients, and the attention weights again."""
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 4 * 16 * 16 * 8
    output, forward = count_flops(lambda: F.scaled_dot_product_attention(query, key, value))
    assert forward == 2 * product
    assert count_flops(output.sum().backward)[1] == 5 * product


def test_the_log_and_the_exports_record_the_cost(tmp_path):
    training = trainer("simmim", tmp_path)
    training.train()
    lines = lines_of(tmp_path)
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


def test_operations_per_image_do_not_depend_on_micro_batches(tmp_path):
    """In MAE, which computes nothing across images."""
    gflops = []
    for size in (8, 2):
        training = trainer("mae", tmp_path / str(size), micro_batch=size, recipe={"epochs": 1})
        training.train()
        gflops.append(cost_of(tmp_path / str(size), training.identity())["gflop_per_image"])
    assert gflops[0] == gflops[1] > 0


def test_a_resumed_training_adds_to_its_cost(tmp_path):
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


def test_timings_do_not_change_the_digest_and_config_of_an_export(tmp_path):
    """They are in a separate file, so that two runs of one training write the same other files."""
    for name in ("a", "b"):
        trainer("mae", tmp_path / name).train()
    first, second = (ViTExport.load(tmp_path / name / "export") for name in ("a", "b"))
    assert first.facts["cost"] != second.facts["cost"] and first.digest == second.digest
    first_config, second_config = ((tmp_path / name / "export/config.json").read_bytes() for name in ("a", "b"))
    assert first_config == second_config
    without_cost = replace(first, facts={key: value for key, value in first.facts.items() if key != "cost"})
    assert not (without_cost.save(tmp_path / "bare") / "cost.json").exists()
    (tmp_path / "a/export/cost.json").write_text("{")
    with pytest.raises(ValueError, match=r"a/export/cost.json: [^\n]*truncated$"):
        ViTExport.load(tmp_path / "a/export")
