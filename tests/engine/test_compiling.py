"""Blocks compiled in place keep names, numbers and random draws; a missing compiler is an error of one line."""

import importlib.util
import os
import sysconfig
from dataclasses import replace

import pytest
import torch
from small_trainings import batches, plan, progress, same, small_recipe, trainer, updates

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine import precision
from engine.precision import check_compiler, compile_blocks
from engine.work import count_flops

TINY = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_hidden=64
)


def test_compiled_updates_and_states_equal_uncompiled_ones():
    """Graphs captured but computed by torch itself: bit for bit, with drop path, gradients and a moving teacher."""
    recipe = small_recipe("dino")
    recipe = replace(recipe, settings=replace(recipe.settings, drop_path=0.5))
    plain, compiled = (updates("dino", recipe) for _ in range(2))
    assert compile_blocks(compiled.method, "cpu", backend="eager") == 2 * recipe.spec.depth
    views = batches(plain.method, plan())
    for step in range(2):
        assert compiled.run(views, progress(plan(), step)) == plain.run(views, progress(plan(), step))
    names, compiled_names = ([name for name, _ in run.method.named_modules()] for run in (plain, compiled))
    assert names == compiled_names and list(plain.method.state_dict()) == list(compiled.method.state_dict())
    assert same(plain.method.state_dict(), compiled.method.state_dict())


def test_flops_of_a_compiled_update_are_counted():
    """A compiled block shows the counter no operators, so the uncompiled one has to be counted."""
    plain, compiled = (updates("mae", small_recipe("mae")) for _ in range(2))
    compile_blocks(compiled.method, "cpu", backend="eager")
    views = batches(plain.method, plan())
    flops, compiled_flops = (
        count_flops(lambda run=run: run.run(views, progress(plan())))[1] for run in (plain, compiled)
    )
    assert flops == compiled_flops > 0


def test_a_compiled_training_is_recorded_as_such(tmp_path, monkeypatch):
    """In run.json and the exports, whose tensors keep their names; resuming it uncompiled is refused."""
    compile_with = precision.compile_blocks
    monkeypatch.setattr(
        "pretrain.loop.updates.compile_blocks", lambda *arguments: compile_with(*arguments, backend="eager")
    )
    plain, compiled = trainer("mae", tmp_path / "plain"), trainer("mae", tmp_path / "compiled", compiled=True)
    assert [run.train() for run in (plain, compiled)] == ["finished"] * 2
    first, second = (ViTExport.load(tmp_path / name / "export") for name in ("plain", "compiled"))
    assert same(first.tensors, second.tensors) and second.facts["compiled"] and "compiled" not in first.facts
    with pytest.raises(ValueError, match="compiled is True"):
        trainer("mae", tmp_path / "compiled", resume=True).train()


def test_compiled_features_equal_uncompiled_ones(monkeypatch):
    """Kernels of Inductor take minutes to compile on a CPU: tests/gpu has them."""
    compile_with = precision.compile_blocks
    monkeypatch.setattr(
        "checkpoints.backbone.compile_blocks", lambda *arguments: compile_with(*arguments, backend="aot_eager")
    )
    torch.manual_seed(0)
    export = ViTExport.from_vit(ViT(TINY), Preparation())
    images = torch.randn(4, 3, 16, 16)
    plain, compiled = (Backbone(export, compiled=flag).views(images, [(-1, True)])[-1, True] for flag in (False, True))
    torch.testing.assert_close(compiled.cls, plain.cls, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled.patches, plain.patches, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("device", "missing"), [("cpu", "g++, clang++ or c++"), ("cuda", "gcc, clang or cc")])
def test_a_missing_compiler_is_named(device, missing, monkeypatch, tmp_path):
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=f"^compiled needs a compiler[^\n]*{missing.replace('+', '.')}[^\n]*$"):
        check_compiler(device)
    compiler = tmp_path / "compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv({"cpu": "CXX", "cuda": "CC"}[device], os.fspath(compiler))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: os.fspath(tmp_path))
    with pytest.raises(ValueError, match="Python's headers"):
        check_compiler(device)
