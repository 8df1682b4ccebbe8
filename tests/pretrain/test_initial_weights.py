"""`--init`: encoders start from a checkpoint's weights, each branch from the same one; all other weights are drawn."""

from dataclasses import replace

import pytest
import torch
from small_trainings import digits, same, small_recipe, trainer
from toys import SMALL, picture
from written import lines_of

from checkpoints.export import ViTExport
from checkpoints.positions import sincos_positions
from checkpoints.spec import HALF, Preparation
from checkpoints.vit import ViT
from engine.distributed import World
from engine.extensions import load_extension, source_files
from pretrain.loop.exporting import exports_in
from pretrain.loop.initial_weights import SIZES, InitialWeights, encoders_of, initial_weights
from pretrain.loop.trainer import Run, Trainer, build
from pretrain.recipe import VIT_SMOKE


@pytest.fixture(scope="module")
def dino_run(tmp_path_factory):
    """The folder of a finished training whose student and teacher differ."""
    training = trainer("dino", tmp_path_factory.mktemp("dino"))
    assert training.train() == "finished"
    return training.run.out


def started_from(export: ViTExport, **settings) -> InitialWeights:
    return InitialWeights(reference="x", trained=export, averaged=export, **settings)


def export_of(spec, preparation=None) -> ViTExport:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return ViTExport.from_vit(ViT(spec), preparation or Preparation())


def test_every_method_begins_with_the_checkpoints_encoder():
    """Including moving averages and frozen copies."""
    for name in source_files("methods"):
        recipe, module = small_recipe(name), load_extension("methods", name)
        init = started_from(export_of(recipe.spec, Preparation(mean=HALF, std=HALF)))
        method = build(module, init.recipe(recipe), seed=0)
        init.load_into(method)
        expected, encoders = init.trained.build().state_dict(), encoders_of(method)
        assert all(same(vit.state_dict(), expected) for vit in encoders), name
        assert {id(encoder.vit) for encoder in method.encoders().values()} <= {id(vit) for vit in encoders}, name
        assert method.preparation.mean == HALF
        other_vits = [vit for vit in method.modules() if isinstance(vit, ViT) and vit not in encoders]
        assert all(vit.spec != method.spec for vit in other_vits), name


ANY_POSITIONS = ["dino", "ibot", "mst", "msn", "moca", "mocov3", "byol", "lejepa", "dinov2", "simdino", "simdinov2"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("dino", "moca") else pytest.mark.exhaustive) for name in ANY_POSITIONS],
)
def test_methods_of_whole_images_train_a_dinov3_encoder(name, tmp_path, monkeypatch):
    """With rotary positions, registers, layer scale, keys without bias. The first of three updates may have rate 0."""
    monkeypatch.setattr("pretrain.loop.trainer.is_counted", lambda out: True)
    recipe = small_recipe(name, epochs=1)
    spec = replace(
        recipe.spec,
        architecture="vit_small_patch16_dinov3",
        position="none",
        class_position=False,
        registers=4,
        layer_scale=True,
        key_bias=False,
        rotary="centred",
        rotary_base=100.0,
        rotary_rounding="bfloat16",
    )
    init = started_from(export_of(spec))
    adopted = init.recipe(recipe)
    run = Run(out=tmp_path, workers=0, init=init)
    training = Trainer(name, load_extension("methods", name), adopted, digits(), run, World())
    assert training.train() == "finished"
    (_, export), *_ = exports_in(tmp_path)
    assert export.spec == spec and not same(export.tensors, init.trained.tensors)


@pytest.mark.parametrize("name", ANY_POSITIONS)
def test_methods_start_from_a_patch_embedding_without_bias(name):
    """As every CLIP model has."""
    recipe = small_recipe(name)
    spec = replace(recipe.spec, architecture="vit_base_patch16_clip_quickgelu_224", position="learned", registers=0)
    init = started_from(export_of(spec))
    method = build(load_extension("methods", name), init.recipe(recipe), seed=0)
    init.load_into(method)
    vit = next(iter(method.encoders().values())).vit
    assert vit.trunk.patch_embed.proj.bias is None and same(vit.state_dict(), init.trained.build().state_dict())


@pytest.mark.parametrize("name", ["beit", "simmim", "data2vec"])
def test_methods_of_relative_positions_train_attention_without_biases(name):
    recipe = small_recipe(name)
    method = build(load_extension("methods", name), replace(recipe, spec=replace(recipe.spec, qkv_bias=False)), seed=0)
    assert next(iter(method.encoders().values())).vit.trunk.blocks[0].attn.q_bias is None
    method([picture(seed, 20, 20) for seed in range(4)]).loss.backward()


def test_student_and_teacher_start_from_student_and_teacher(dino_run, tmp_path):
    exports = {export.facts["branch"]: export for _, export in exports_in(dino_run)}
    assert exports["teacher"].digest != exports["student"].digest
    init = initial_weights(str(dino_run))
    continued = trainer("dino", tmp_path, init=init)
    for branch, encoder in continued.method.encoders().items():
        assert same(encoder.vit.state_dict(), exports[branch].build().state_dict())
    student_only = initial_weights(str(dino_run / "export-student"))
    assert student_only.trained.digest == student_only.averaged.digest == exports["student"].digest


def test_both_branches_of_a_file_are_read(tmp_path):
    wide = replace(VIT_SMOKE, width=384, depth=1, heads=6, mlp_hidden=64)  # a width with a published number of heads
    exports = {branch: ViTExport.from_vit(ViT(wide), Preparation()) for branch in ("student", "teacher")}
    tensors = {
        branch: {f"backbone.{name}": t for name, t in export.tensors.items()} for branch, export in exports.items()
    }
    torch.save(tensors, tmp_path / "checkpoint.pth")
    init = initial_weights(f"dino:{tmp_path / 'checkpoint.pth'}")
    assert same(init.trained.tensors, exports["student"].tensors) and same(
        init.averaged.tensors, exports["teacher"].tensors
    )


def test_positions_are_resized_to_the_recipes_grid():
    export = export_of(replace(SMALL, image_size=32))
    recipe = replace(small_recipe("simmim"), spec=SMALL)
    init = started_from(export)
    assert init.recipe(recipe).spec == replace(export.spec, image_size=SMALL.image_size)
    method = build(load_extension("methods", "dino"), init.recipe(replace(small_recipe("dino"), spec=SMALL)), seed=0)
    init.load_into(method)
    assert same(method.student.vit.state_dict(), export.at_size(16).build().state_dict())
    assert init.facts(method)["resized_from"] == 32


def test_the_architecture_is_taken_from_the_checkpoint():
    export = export_of(replace(SMALL, registers=3, layer_scale=True))
    init = started_from(export)
    recipe = replace(small_recipe("dino"), spec=SMALL)
    assert (init.recipe(recipe).spec.registers, init.recipe(recipe).spec.layer_scale) == (3, True)
    with pytest.raises(ValueError, match=r"settings=.*registers.: 3"):
        init.recipe(replace(recipe, spec=replace(SMALL, registers=1)), ["registers"])
    with pytest.raises(ValueError, match=r"settings=.*width.: 32, .depth.: 2"):
        init.recipe(small_recipe("dino"))


def test_no_method_trains_an_encoder_with_several_class_tokens():
    """As Pixio's, of which methods would read the first alone."""
    spec = replace(SMALL, registers=3, class_tokens=4)
    for name in source_files("methods"):
        recipe = small_recipe(name)
        sized = {size: getattr(recipe.spec, size) for size in SIZES}
        if recipe.spec.family == "vit" and recipe.spec.class_token:
            init = started_from(export_of(replace(spec, **sized, image_size=recipe.spec.image_size)))
            with pytest.raises(ValueError, match="4 class tokens cannot be trained"):
                init.recipe(recipe)


def test_the_pooling_of_the_encoder_may_be_set():
    """timm's DINOv3 has pool=avg, and DINO trains the class token; --set pool=cls was refused."""
    init = started_from(export_of(replace(SMALL, pool="avg")))
    recipe = replace(small_recipe("dino"), spec=SMALL)
    assert init.recipe(recipe).spec.pool == "avg"
    with_pool = init.recipe(recipe, ["pool"])
    assert with_pool.spec.pool == "cls"
    method = build(load_extension("methods", "dino"), with_pool, seed=0)
    init.load_into(method)
    assert same(method.teacher.vit.state_dict(), init.trained.build().state_dict())


def test_a_learned_table_of_sines_and_cosines_is_accepted_by_mae():
    mae = small_recipe("mae")
    learned = export_of(replace(mae.spec, position="learned"))
    table = sincos_positions(mae.spec.grid, mae.spec.width, "column", 1)
    copied = replace(learned, tensors={**learned.tensors, "pos_embed": table})
    assert started_from(copied).recipe(mae).spec.position == mae.spec.position
    assert started_from(learned).recipe(mae).spec.position == "learned"  # which MAE then refuses


def test_a_frozen_encoder_does_not_change_while_the_rest_is_trained(tmp_path):
    recipe = {"epochs": 3, "weight_decay": 0.1}
    init = started_from(export_of(small_recipe("mae").spec), frozen_epochs=2)
    training = trainer("mae", tmp_path, init=init, recipe=recipe, export_every=2)
    before = {name: tensor.clone() for name, tensor in training.method.state_dict().items()}
    exported = {}
    training.export = lambda: exported.update(
        {training.step: {name: tensor.clone() for name, tensor in training.method.state_dict().items()}}
    )
    assert training.train() == "finished"
    frozen, last = exported[6], exported[9]
    encoder = [name for name in before if ".vit." in name]
    assert all(torch.equal(frozen[name], before[name]) for name in encoder)
    assert not torch.equal(frozen["autoencoder.pixels.weight"], before["autoencoder.pixels.weight"])
    moved = [name for name in encoder if not torch.equal(last[name], before[name])]
    assert any(name.endswith("attn.qkv.weight") for name in moved)


def test_a_resumed_run_needs_the_same_init_and_equals_an_uninterrupted_one(dino_run, tmp_path):
    init = initial_weights(str(dino_run))
    uninterrupted = trainer("dino", tmp_path / "whole", init=init)
    uninterrupted.train()
    first = trainer("dino", tmp_path / "parts", init=init)
    first.run = replace(first.run, monitor_every=1, monitor=lambda *_: first.stop() or {})
    assert first.train() == "stopped"
    with pytest.raises(ValueError, match="init"):
        trainer("dino", tmp_path / "parts", resume=True).train()
    second = trainer("dino", tmp_path / "parts", init=init, resume=True)
    assert second.train() == "finished"
    assert same(second.method.state_dict(), uninterrupted.method.state_dict())


def test_the_monitor_starts_with_the_checkpoint_and_warns_of_a_fall(tmp_path, capsys):
    recipe = small_recipe("mae")
    init = started_from(export_of(recipe.spec))
    accuracies = iter([60.0, 59.5, 40.0])
    monitored = []

    def monitor(export, progress):
        monitored.append((progress.step, export.digest))
        return {"knn_top1": next(accuracies)}

    trainer("mae", tmp_path, init=init, monitor=monitor, monitor_every=1).train()
    assert [step for step, _ in monitored] == [0, 3, 6]
    assert monitored[0][1] == ViTExport.load(tmp_path / "start").digest
    lines = lines_of(tmp_path)
    assert [line["knn_top1"] for line in lines if "knn_top1" in line] == [60.0, 59.5, 40.0]
    warnings = [line for line in "".join(capsys.readouterr()).splitlines() if "warning" in line]
    assert len(warnings) == 1 and "40.00" in warnings[0] and "60.00" in warnings[0]


def test_assumptions_of_the_import_are_recorded(tmp_path):
    export = export_of(small_recipe("mae").spec)
    init = started_from(replace(export, facts={**export.facts, "assumed": ["the image statistics"]}))
    training = trainer("mae", tmp_path, init=init)
    assert training.train() == "finished"
    assert ViTExport.load(tmp_path / "export").facts["init"]["assumed"] == ["the image statistics"]


def test_exports_keep_the_checkpoints_statistics(tmp_path):
    """Also those of an unfinished run, whose method is built again from run.json."""
    init = started_from(export_of(small_recipe("mae").spec, Preparation(mean=HALF, std=HALF)))
    training = trainer("mae", tmp_path, init=init)
    training.run = replace(training.run, monitor_every=1, monitor=lambda *_: training.stop() or {})
    assert training.train() == "stopped"
    _, export = next(exports_in(tmp_path))
    assert export.preparation.mean == HALF and export.facts["init"]["digests"] == [init.trained.digest]
