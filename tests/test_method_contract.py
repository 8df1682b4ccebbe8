"""Contract of every pretraining method, parametrised by the extension folder: what the one trainer relies on."""

import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from small_trainings import (
    BATCH,
    EPOCHS,
    IMAGES,
    batches,
    digits,
    forward_pass,
    plan,
    progress,
    same,
    small_recipe,
    trainer,
    updates,
)
from torch import nn

import bench
from checkpoints.export import ViTExport
from checkpoints.vit import skip_init
from engine.extensions import load_extension, source_files
from engine.seeding import AUGMENT, seeded
from engine.settings import ReadIf, annotations, meanings
from pretrain.loop.exporting import exports_in
from pretrain.loop.images import MicroBatches, load_micro_batches
from pretrain.loop.learning import Learning
from pretrain.loop.records import cost_of
from pretrain.method import Method, TrainProgress
from pretrain.methods.extrema import AVERAGE, CLASS_TOKEN
from pretrain.recipe import Recipe
from pretrain.schedules import Constant

# By default the contract is tested for one method of each kind; `-m ""` or `tox -e all` takes the others too.
REPRESENTATIVES = {
    "mae": "pixels from a decoder; no teacher",
    "dino": "a momentum teacher, its centre, heads, crops of two sizes",
    "moca": "a momentum teacher whose features are the words of a growing vocabulary, several rounds of masks",
    "beit": "a frozen tokenizer, one network for masked and visible patches",
    "ijepa": "a predictor of latent blocks, masks of several lengths",
    "supervised": "labels, and batches whose images are mixed",
}
# Each is like one of these; a method that is in neither is new, and its contract is tested by default.
OTHERS = {
    *("byol", "cae", "can", "capi", "data2vec", "dinov2", "extrema", "ibot", "lejepa", "lut", "maskfeat", "mocov3"),
    *("msn", "mst", "nepa", "simdino", "simdinov2", "simmim"),
}
NAMES = list(source_files("methods"))
METHODS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in OTHERS), id=name) for name in NAMES]


# Settings that a smoke recipe does not have and for which a method runs other code; "spec" changes the encoder,
# "recipe" names another recipe.
ONE_ROUND = dict(mask_ratios=(0.5,), decoder_mask_ratios=(0.25,))
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "byol": [dict(freeze_patches=False)],
    "cae": [dict(target="current", target_momentum=0.75), dict(rescaled=True)],
    "can": [dict(pooled="all", projector_norm="ln"), dict(noisy_target=True)],
    "capi": [
        dict(sinkhorn_by_position=False, cluster_bias=False, rotary_lr=0.1, mask_shape="random"),
        dict(spec=dict(registers=2, register_place="corner", register_box="image"), mask_shape="block"),
    ],
    "data2vec": [dict(target_batch_norm=True, target_layer_norm_last=False), dict(l2_loss=True, var_w0=0.5)],
    "dino": [dict(local_crops=2, fixed_prototypes=False), dict(head_norm="bn"), dict(head_norm="ln")],
    "extrema": [
        dict(loss="infonce"),
        dict(spec=CLASS_TOKEN),
        dict(spec=CLASS_TOKEN, loss="infonce"),
        dict(spec=AVERAGE),
        dict(spec=AVERAGE, loss="infonce", replacement=True),
    ],
    "ibot": [
        dict(local_crops=2, cls_weight=0.5, patch_weight=2.0),
        dict(shared_head=False, shared_head_teacher=False, head_norm="bn"),
        dict(shared_head=False, head_norm="ln", mask_shape="random"),
    ],
    "dinov2": [
        dict(local_crops=2, sinkhorn=True, separate_head=True, patch_prototypes=32),
        dict(spec=dict(registers=2), koleo_weight=0.0, masked_crops=2, freeze_prototypes=1),
        dict(gram_weight=2.0, gram_start=0, gram_size=32),
        dict(gram_weight=1.0, gram_copies=0, gram_start=0),
        dict(koleo_images=4, blur=(0.0, 0.9, 0.5), blur_kernel=7),
    ],
    "ijepa": [dict(context_blocks=2), dict(context_overlaps=True, target_blocks=1)],
    "lejepa": [dict(local_crops=2, sigreg_over="all", convex=False), dict(local_crops=2, centre="all")],
    "nepa": [dict(query_norm_trained="gain", spec=dict(mlp="gated")), dict(query_norm_trained="all")],
    "simdino": [
        dict(local_crops=2, expansion_of="student", gather_covariance=False),
        dict(covariance_images=4),
    ],
    "simdinov2": [
        dict(local_crops=2, koleo_weight=0.1),
        dict(covariance_images=4, koleo_weight=0.1, koleo_images=8),
        dict(separate_head=True, eps_end=0.5, compression_weight_end=2.0, end_epoch=1),
    ],
    "lut": [
        dict(recipe="smoke_simmim"),
        dict(head_norm="ln"),
        dict(recipe="smoke_simmim", head_norm="ln"),
        dict(projector_depth=0, predictor_depth=0),
        dict(crop="random"),
    ],
    "mae": [dict(encoder_mask_tokens=True), dict(sampling="block"), dict(sampling="grid"), dict(crop="centre")],
    "maskfeat": [dict(hog_window=4)],
    "moca": [
        dict(spec=dict(pool="cls")),
        ONE_ROUND,
        dict(complementary=False),
        dict(mask_ratios=(0.5, 0.5, 0.75), decoder_mask_ratios=(0.25, 0.0, 0.5)),
        dict(early_layers=(0,)),
        dict(early_layers=(2, 0)),
        dict(image_weight=1.0),
        dict(image_weight=0.0),
        dict(image_weight=0.0, spec=dict(pool="cls")),
        dict(target="pixels"),
        dict(target="embeddings"),
        dict(new_word="avg_token"),
        dict(new_word="farthest"),
        dict(border=0),
        dict(decoder_width=64),
    ],
    "mocov3": [dict(freeze_patches=False)],
    "msn": [dict(focal_views=0), dict(head_norm="ln"), dict(head_norm="none", random_views=2)],
    "mst": [
        dict(local_crops=2, head_norm="none", decoder="linear"),
        dict(sampling="random", replace="bert", restore="masked", mask_chance=0.5),
        dict(replace="bert", mask_chance=0.5),
        dict(per="image", mask_chance=0.5, local_norm="running", local_crops=2),
    ],
    "simmim": [dict(sampling="block"), dict(sampling="square", head_depth=2), dict(loss_area="all")],
    "supervised": [dict(repeated=1, mixup=0.0, cutmix=0.0)],
}
# What is never trained: teachers, fixed positions, and what a recipe's settings fix.
TEACHERS = ("teacher.", "momentum.", "target.", "gram_teacher.")
FIXED = (
    r".*(pos_embed|last_layer2?\.weight_g|patch_embed\.proj\.(weight|bias)|decoder\.mask_token|"
    r"attn\.[qk]_norm\.(weight|bias))"
)
# CAPI's last norms have gains of 1, and its rotary positions rates that only the setting rotary_lr trains.
OWN_FIXED = {"capi": r"(vit\.trunk|predictor)\.(norm\.weight|rope\.freqs\.\d+)"}


def case_recipe(name: str, changes: Mapping[str, Any], **others: Any) -> Recipe:
    """The method's small recipe with changed settings and the `others` of the recipe."""
    settings = dict(changes)
    recipe = small_recipe(name, settings.pop("recipe", "smoke"), **others)
    spec = replace(recipe.spec, **settings.pop("spec", {}))
    return replace(recipe, spec=spec, settings=replace(recipe.settings, **settings))


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(request, tmp_path_factory):
    """A training that nothing interrupted and whose operations are not counted, of every method."""
    training = trainer(request.param, tmp_path_factory.mktemp("undisturbed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.loop.trainer.is_counted", lambda out: True)
        assert training.train() == "finished" and training.step == EPOCHS * IMAGES // BATCH
    return training


def test_every_file_defines_what_a_method_file_must():
    modules = {name: load_extension("methods", name) for name in NAMES}
    wrong = [
        name
        for name, module in modules.items()
        if not (issubclass(module.METHOD, Method) and {"smoke", "32px"} <= set(module.RECIPES))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", METHODS)
def test_every_recipe_builds(name):
    """On the meta device, where a ViT-L needs no memory."""
    module = load_extension("methods", name)
    for recipe in module.RECIPES.values():
        with torch.device("meta"), skip_init():
            assert module.METHOD(recipe.spec, recipe.settings).groups()


def test_every_recipe_has_a_source_and_meanings():
    """A meaning is the comment beside a field or above it. All names of settings differ: `--set` uses bare ones."""
    wrong = {}
    for name in NAMES:
        for key, recipe in load_extension("methods", name).RECIPES.items():
            parts = (recipe, recipe.settings, recipe.spec, recipe.schedule, recipe.weight_decay_schedule)
            names = Counter(field.name for part in parts[:3] for field in fields(part))
            requirements = {
                "source": len(recipe.source) > 10,
                "frozen": is_dataclass(recipe.settings) and type(recipe.settings).__dataclass_params__.frozen,
                "json": bool(json.dumps(recipe.to_json())),
                "names": max(names.values()) == 1,
                "meanings": all({field.name for field in fields(part)} == known(type(part)) for part in parts),
            }
            lacking = [requirement for requirement, is_met in requirements.items() if not is_met]
            if lacking:
                wrong[f"{name} {key}"] = lacking
    assert wrong == {}


@cache
def known(kind: type) -> set[str]:
    return set(meanings(kind))


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_refuses_what_is_of_another_type(name):
    recipe = load_extension("methods", name).RECIPES["smoke"]
    for part in (recipe, recipe.settings, recipe.spec, recipe.schedule, recipe.weight_decay_schedule):
        for field in fields(part):
            if field.name not in ("settings", "schedule", "weight_decay_schedule"):  # of a type that the method chooses
                with pytest.raises(ValueError, match=rf"{field.name}="):
                    replace(part, **{field.name: object()})


@pytest.mark.slow
def changes_of(settings: Any, name: str) -> list[Any]:
    """The settings with other values of `name`, as far as they are valid."""
    value, hint = getattr(settings, name), annotations(type(settings))[name]
    choices = [get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    values = choices[0] if choices else (tuple(number / 2 for number in value),) if isinstance(value, tuple) else ()
    changes = []
    for other in values or (False, True, 0, 1, 2, 48, 0.5):
        with suppress(ValueError):
            changes += [replace(settings, **{name: other})] if other != value else []
    return changes


@pytest.mark.parametrize("name", METHODS)
def test_settings_that_are_never_read_change_nothing(name):
    """What `--set` refuses, although it may be valid. Without a file of DALL-E's, its tokenizer is not switched on."""
    recipe = small_recipe(name)

    def trained(settings: Any) -> Mapping[str, torch.Tensor]:
        training = updates(name, replace(recipe, settings=settings))
        logs = training.run(batches(training.method, plan()), progress(plan()))
        return training.method.state_dict() | {log: torch.tensor(value) for log, value in logs.items()}

    for setting, hint in annotations(type(recipe.settings)).items():
        for mark in (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, ReadIf)):
            states = [recipe.settings, *changes_of(recipe.settings, mark.setting)]  # KeyError: no such setting
            off = next((state for state in states if not mark.holds(getattr(state, mark.setting))), None)
            if off and (changes := changes_of(off, setting)):
                assert same(trained(off), trained(changes[0])), f"{setting} with {mark.setting} switched off"


@pytest.mark.parametrize("name", METHODS)
def test_views_are_the_same_however_many_processes_make_them(name):
    recipe = small_recipe(name)
    views = updates(name, recipe).method.views()
    assert len(pickle.dumps(views)) < 10_000, "views hold the network"
    views_by_workers = []
    for workers in (0, 2):
        torch.manual_seed(workers)
        parts = MicroBatches(image_set=digits(), views=views, plan=plan(), rank=0, steps=range(2, 5))
        views_by_workers.append([part.views for part in load_micro_batches(parts, workers, "cpu", skip_bad=False)])
    assert all(same(first, second) for first, second in zip(*views_by_workers, strict=True))
    assert not same(views_by_workers[0][0], views_by_workers[0][1])


@pytest.mark.parametrize("name", METHODS)
def test_views_that_the_device_finishes_are_those_of_the_loader(name):
    views, views_by_place = updates(name, small_recipe(name)).method.views(), []
    for on_device in (False, True):
        parts = MicroBatches(image_set=digits(), views=views, plan=plan(), rank=0, steps=range(2), unfinished=on_device)
        views_by_place.append([part.views for part in load_micro_batches(parts, 0, "cpu", skip_bad=False)])
    assert all(same(first, second) for first, second in zip(*views_by_place, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_views_of_images_that_are_decoded_fast_have_the_same_draws(name):
    """Noise is the same to the bit, and pixels are within what decoders differ by."""
    views = updates(name, small_recipe(name)).method.views()
    exact, fast = (
        MicroBatches(image_set=digits(), views=views, plan=plan(), rank=0, steps=range(1), decode=decode)[0].views
        for decode in ("exact", "fast")
    )
    assert exact.keys() == fast.keys()
    for key, view in exact.items():
        if view.ndim > 3 and view.is_floating_point() and key != "gauss":
            assert (view - fast[key]).abs().mean() < 0.05, key
        else:
            assert torch.equal(view, fast[key]), key


@pytest.mark.parametrize("name", METHODS)
def test_a_forward_pass_gives_a_loss_and_gradients_to_all_that_is_trained(name, double):
    """In float64, so that no method names a precision; nothing is drawn, so that processes do not matter."""
    for changes in ({}, *VARIANTS.get(name, ())):
        check_forward(name, changes)


def check_forward(name: str, changes: Mapping[str, Any]) -> None:
    method = updates(name, case_recipe(name, changes)).method
    (views,) = batches(method, plan())
    before = torch.random.get_rng_state()
    loss, logs, _ = forward_pass(method, views, progress(plan()))
    assert torch.equal(torch.random.get_rng_state(), before), "forward draws random numbers"
    assert loss.ndim == 0 and loss.dtype == torch.float64 and loss.isfinite()
    assert all(torch.as_tensor(value).numel() == 1 for value in logs.values())
    assert not any(torch.is_tensor(value) and value.requires_grad for value in logs.values())
    assert not {"loss", "grad_norm", "step", "updates"} & set(logs)
    loss.backward()
    for path, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, path
        assert not (parameter.requires_grad and path.startswith(TEACHERS)), path
        is_fixed = re.fullmatch(FIXED, path) or re.fullmatch(OWN_FIXED.get(name, ""), path)
        assert parameter.requires_grad or path.startswith(TEACHERS) or is_fixed, path
    optimised = Counter(id(p) for group in method.groups() for p in group.parameters.values())
    assert optimised == Counter({id(p): 1 for p in method.parameters() if p.requires_grad})


@pytest.mark.parametrize("name", METHODS)
def test_baseline_losses_are_named_as_logged_losses_and_computing_them_changes_nothing(name):
    """After a forward pass, so that what a method may keep of one is there."""
    method = updates(name, small_recipe(name)).method
    (views,) = batches(method, plan())
    loss, logs, _ = forward_pass(method, views, progress(plan()))
    before = {path: value.clone() for path, value in method.state_dict().items()}
    modes, random = [module.training for module in method.modules()], torch.random.get_rng_state()
    learning = Learning(means={name: value.item() for name, value in {"loss": loss, **logs}.items()})
    measured = learning.assess(method, small_recipe(name), views, progress(plan()), "float32")
    assert torch.equal(torch.random.get_rng_state(), random) and same(method.state_dict(), before)
    assert [module.training for module in method.modules()] == modes
    baselines = {key.removeprefix("trivial_"): value for key, value in measured.items() if key.startswith("trivial_")}
    assert baselines or type(method).baseline_loss is Method.baseline_loss, "it is empty: leave baseline_loss out"
    assert baselines.keys() <= learning.means.keys() and all(0 < value < math.inf for value in baselines.values())
    assert 0 < measured["feature_spread"] <= 1 <= measured["feature_rank"] < BATCH


@pytest.mark.parametrize("name", METHODS)
def test_parts_of_a_batch_add_up_to_it(name, double):
    """Two micro-batches make one update; it is the same, up to rounding, if an image's loss depends on it alone."""
    recipe, ends = small_recipe(name), []
    if hasattr(recipe.settings, "local_crops"):
        recipe = replace(recipe, settings=replace(recipe.settings, local_crops=2))
    for parts in (1, 2):
        training = updates(name, recipe)
        for step in range(2):
            training.run(batches(training.method, plan(parts), step), progress(plan(parts), step))
        ends.append(training.method.state_dict())
        assert all(entry["step"] == 2 for entry in training.optimizer.state_dict()["state"].values())
    norms = [module for module in training.method.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert training.method.batch_statistics or not norms, "batch norms are statistics of a batch"
    if not training.method.batch_statistics:
        for path, value in ends[0].items():
            assert torch.allclose(ends[1][path].double(), value.double(), rtol=1e-6, atol=1e-9), path


@pytest.mark.parametrize("variants", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", METHODS)
def test_updates_lower_the_loss_of_their_batch(name, variants):
    """With a low learning rate and fixed targets: the hook that moves teacher and centre is switched off."""
    for changes in VARIANTS.get(name, ()) if variants else ({},):
        training = updates(name, case_recipe(name, changes, lr=1e-4, schedule=Constant()))
        training.method.after_update = lambda progress: None
        views = batches(training.method, plan())
        losses = [training.run(views, progress(plan(), step))["loss"] for step in range(4)]
        assert losses[-1] < losses[0], (changes, losses)


def digests(exports) -> dict[str, str]:
    return {name: export.digest for name, export in exports}


@pytest.mark.slow
def test_a_resumed_training_equals_an_uninterrupted_one(undisturbed, tmp_path):
    """Weights, teachers, buffers and the optimiser, to the last bit. Stopped in the middle of the second epoch.

    The resumed one counts the operations of its first update, which changes nothing.
    """
    first = trainer(undisturbed.name, tmp_path, monitor=lambda export, progress: first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped" and first.step == IMAGES // BATCH + 1
    assert digests(exports_in(tmp_path)) == digests(first.exports()), "the state on disk is another training's"
    torch.manual_seed(1)
    second = trainer(undisturbed.name, tmp_path, resume=True)
    assert second.train() == "finished"
    assert same(undisturbed.state().tensors, second.state().tensors)
    assert undisturbed.state().facts == second.state().facts
    assert cost_of(tmp_path, second.identity())["gflop_per_image"] > 0
    assert "gflop_per_image" not in cost_of(undisturbed.run.out, undisturbed.identity())


def test_exports_verify(undisturbed):
    """Every network is exported with its activations. That exports can be evaluated is the tasks' contract."""
    folders = [folder for folder in undisturbed.run.out.iterdir() if folder.name.startswith("export")]
    assert {folder.name for folder in folders} == set(digests(undisturbed.exports()))
    for folder in folders:
        export = ViTExport.load(folder)
        assert (
            export.verify() == []
            and export.spec == undisturbed.recipe.spec
            and export.facts["method"] == undisturbed.name
        )


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_gives_nearly_the_same_loss(name):
    """An equal loss would mean that autocast did not run. `abs` is for losses of cosines, which begin near 0."""
    recipe, losses = small_recipe(name), []
    for precision in ("float32", "bfloat16"):
        training = updates(name, recipe, precision=precision)
        losses.append(training.run(batches(training.method, plan()), progress(plan()))["loss"])
        assert all(parameter.dtype == torch.float32 for parameter in training.method.parameters())
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_in_a_loop_of_plain_pytorch(name):
    """`bench.method` takes images, or the views that `batch` makes of them, with the same loss; one update."""
    method = bench.method(name, "smoke", seed=3)
    images, labels = [digits().image(place) for place in range(6)], [0, 1, 2, 3, 4, 5] if method.needs_labels else None
    with seeded(AUGMENT, 0):
        views = method.batch(images, labels)
    first_update = TrainProgress(step=0, steps_per_epoch=1, epochs=1)
    method.before_forward(first_update)
    if labels is None:
        method.eval()
        with seeded(AUGMENT, 0):
            assert torch.equal(method(images).loss, method(views).loss)
        method.train()
    else:
        with pytest.raises(ValueError, match="labels"):
            method(images)
    optimizer = torch.optim.AdamW([p for p in method.parameters() if p.requires_grad], lr=1e-3)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    step = method(views)
    step.loss.backward()
    method.observe(step.observed, first_update)
    method.before_update(first_update)
    optimizer.step()
    method.after_update(first_update)
    assert not same(before, method.state_dict()) and torch.isfinite(step.loss)
