"""Continued pretraining: recipes made for a checkpoint, and everything that does not fit refused at once."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench as api
from bench.pretraining.continuing import IMAGENET, recipe_for
from bench.pretraining.recipes import values_by_path
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from engine.errors import UserError
from engine.extensions import load_extension, source_files
from pretrain.loop.initial_weights import InitialWeights
from pretrain.loop.trainer import build
from pretrain.recipe import VIT_S, Recipe


def init_of(spec, evaluation_size=None) -> InitialWeights:
    export = SimpleNamespace(spec=spec, facts={"name": "small"}, evaluation_size=evaluation_size or spec.image_size)
    return InitialWeights(reference="x", trained=export, averaged=export)


def chosen(method, spec, *texts, recipe=None, images=100):
    return recipe_for(method, recipe, texts, init_of(spec), images, lambda settings: f"corrected: {settings}")


def numbers(recipe: Recipe, *names: str) -> list:
    values = {path.rpartition(".")[2]: value for path, value in values_by_path(recipe).items()}
    return [values[name] for name in names]


def test_every_method_gets_a_recipe_for_patches_of_another_size():
    """Crops, masks and histograms follow the patch; each method is built."""
    for name in source_files("methods"):
        spec = replace(load_extension("methods", name).RECIPES["smoke"].spec, image_size=28, patch_size=7)
        recipe = chosen(name, spec).recipe
        assert recipe.spec == spec and recipe.batch == 16, name
        build(load_extension("methods", name), recipe, seed=0)


def test_the_rules_of_continued_training():
    vit_s14 = replace(VIT_S, patch_size=14, layer_scale=True)
    names = ("epochs", "batch", "lr", "warmup", "floor", "local_size", "image_size")
    made = chosen("dino", vit_s14)
    assert made.name == "vit_s" and made.recipe.spec == vit_s14
    assert numbers(made.recipe, *names) == [100, 16, 1.77e-5, 10, 1e-7, 98, 224]
    assert numbers(chosen("dino", vit_s14, images=IMAGENET).recipe, *names[:4]) == [10, 512, 1e-4, 1]
    dinov2s = init_of(replace(vit_s14, image_size=518), evaluation_size=224)
    assert recipe_for("dino", None, (), dinov2s, 100, str).recipe.spec == vit_s14
    ours = ("epochs=5", "batch_size=32", "image_size=112", "lr=1e-3")
    assert numbers(chosen("dino", vit_s14, *ours).recipe, *names) == [5, 32, 1e-3, 0.5, 1e-7, 42, 112]
    assert numbers(chosen("dino", vit_s14, "lr=2e-7").recipe, "lr", "floor") == [2e-7, 1e-7]
    dinov2_spec = replace(vit_s14, width=1024, depth=24, heads=16)
    dinov2 = chosen("dinov2", dinov2_spec, images=200).recipe
    assert numbers(dinov2, "koleo_images", "teacher_warmup", "freeze_prototypes") == [0, 30, 1]
    assert numbers(chosen("dino", vit_s14, "freeze_prototypes=7").recipe, "freeze_prototypes") == [7]
    anchored = chosen("dinov2", dinov2_spec, "gram_weight=2", "gram_rise=20", "epochs=20").recipe
    assert numbers(anchored, "gram_start", "gram_rise", "teacher_warmup") == [0, 20, 6]
    simmim = chosen("simmim", load_extension("methods", "simmim").RECIPES["vit_b"].spec, "epochs=80").recipe
    assert numbers(simmim, "milestones") == [(70,)]


def test_everything_that_does_not_fit_is_refused_at_once():
    spec = replace(VIT_S, patch_size=14)
    with pytest.raises(UserError) as refusal:
        chosen("dino", spec, "epochs=5", "batch_size=128", "registers=4", recipe="vit_s", images=97)
    corrected = str({"patch_size": 14, "registers": 0, "local_size": 98, "batch": 16, "schedule.warmup": 0.5})
    assert refusal.value.argument == "init" and refusal.value.text.endswith(corrected)
    with pytest.raises(UserError) as refusal:
        chosen("dino", VIT_S, "epochs=5", "schedule.warmup=1", "freeze_prototypes=7", "batch_size=16", recipe="vit_s")
    assert refusal.value.text.endswith(str({"freeze_prototypes": 0}))
    with pytest.raises(UserError) as refusal:
        chosen("dino", spec, "local_size=96", "image_size=100")
    assert refusal.value.text.endswith(str({"image_size": 98, "local_size": 98}))


def test_the_corrected_command_is_complete(bench, refused, tmp_path):
    spec = replace(load_extension("methods", "dino").RECIPES["smoke"].spec, image_size=28, patch_size=7)
    torch.manual_seed(0)
    ViTExport.from_vit(ViT(spec), Preparation()).save(tmp_path / "small")
    words = ("--init", tmp_path / "small", "--images", "tiny:", "--out", tmp_path / "run", "--dry-run")
    changes = ("--set", "batch_size=256", "local_crops=2", "schedule.warmup=3")
    message = refused("pretrain", "dino", "--recipe", "smoke", *words, *changes, named="--init")
    command = shlex.split(message.partition("run: bench ")[2])
    code, out, err = bench(*command)
    assert code == 0 and "    schedule.warmup = 0.2\n" in out, err
    assert api.method("dino", None, settings={"batch_size": 8}, init=tmp_path / "small", seed=1).spec.patch_size == 7
    code, out, _ = bench("pretrain", "dino", *words, "--set", "batch_size=8")
    assert code == 0 and "    image_size = 28\n" in out and "    batch = 8\n" in out and "frozen for 1 epoch" in out
