"""The importer of a file is recognised by its tensors; files that no importer reads are refused with the reason."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from examples import EXAMPLES
from random_networks import randomise
from refusals import refusal
from timm.models._helpers import load_state_dict
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.positions import sincos_positions
from checkpoints.resolve import load

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=0)
State = dict[str, Tensor]
LAYOUTS: dict[str, Callable[[State], dict]] = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state},
    "model": lambda state: {"model": state, "epoch": 3},
    "module": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "module.backbone": lambda state: {f"module.backbone.{name}": tensor for name, tensor in state.items()},
    "state_dict.backbone": lambda state: {"state_dict": {f"backbone.{name}": t for name, t in state.items()}},
}


def state_of(name: str, **changes) -> State:
    torch.manual_seed(0)
    return timm.create_model(name, **TINY | changes).state_dict()


def save(state: dict, folder: Path) -> Path:
    torch.save(state, folder / "vit.pth")
    return folder / "vit.pth"


def load_refusal(path: Path | str, options: ImportOptions | None = None) -> str:
    message = refusal(load, path, options)
    assert "vit.pth" in message
    return message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_vit_is_read_in_every_layout(layout, tmp_path):
    state = state_of("vit_base_patch16_224")
    path = save(LAYOUTS[layout](state), tmp_path)
    assert "could come from dino or ibot or timm: say dino:" in load_refusal(path)
    export = load(f"dino:{path}", ImportOptions(heads=4))
    assert all(torch.equal(export.tensors[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_any_precision_are_read_as_they_are(dtype, tmp_path):
    state = {name: tensor.to(dtype) for name, tensor in state_of("vit_base_patch16_224").items()}
    export = load(f"dino:{save(state, tmp_path)}", ImportOptions(heads=4))
    assert all(torch.equal(export.tensors[name], tensor.float()) for name, tensor in state.items())


def test_a_network_in_other_training_code_is_read_by_its_prefix(tmp_path):
    """A user's LightningModule with a student and a teacher."""
    state = state_of("vit_base_patch16_224")
    weights = {f"net.{branch}.module.vit.{name}": t for branch in ("student", "teacher") for name, t in state.items()}
    path = save({"state_dict": weights | {"centre": torch.zeros(3)}, "pytorch-lightning_version": "2.4"}, tmp_path)
    command = f"bench.load('IMPORTER:{path}', prefix='state_dict.net.teacher.vit.')"
    assert load_refusal(path).endswith(f"state_dict.net.student.vit.: say which with prefix, as in {command}")
    assert "prefix='state_dict.net.teacher.vit.'" in load_refusal(f"dino:{path}", ImportOptions(prefix="teacher.vit"))
    export = load(f"dino:{path}", ImportOptions(prefix="state_dict.net.teacher.module.vit", heads=4))
    assert all(torch.equal(export.tensors[name], tensor) for name, tensor in state.items())
    assert export.facts["branch"] == "state_dict.net.teacher.vit"
    assert export.facts["assumed"][0] == "ImageNet's mean and std (--statistics)"
    assert export.facts["dropped"] == {"outside state_dict.net.teacher.vit.": len(state) + 1}


@pytest.mark.parametrize(
    ("name", "changes", "candidates"),
    [
        ("vit_base_patch14_dinov2", {}, "dinov2 or timm"),
        ("vit_base_patch14_reg4_dinov2", {}, "as timm: no tensor tells the image statistics"),
        ("eva_large_patch14_196", {"num_classes": 5}, "as timm: no tensor tells the image statistics"),
        ("beit_base_patch16_224", {}, "as timm: no tensor tells"),
    ],
)
@pytest.mark.parametrize("layout", ["bare", "model"])
def test_only_importers_that_can_read_it_are_named(name, changes, candidates, layout, tmp_path):
    message = load_refusal(save(LAYOUTS[layout](state_of(name, **changes)), tmp_path))
    assert candidates in message
    assert not any(f"{other}:" in message for other in ("dino", "ibot", "mae", "moca"))


BEYOND = {
    "vit_base_patch16_xp_224": "blocks with parallel parts",
    "vit_small_patch16_18x2_224": "blocks with parallel parts",
    "vit_dwee_patch16_reg1_gap_256": "differential attention",
    "vit_relpos_small_patch16_224": "relative positions of another kind",
}
NAMED = {
    "eva02_tiny_patch14_224": "EVA's kind",
    "eva02_base_patch14_224": "separate projections of queries, keys and values",
    "vit_small_patch16_dinov3": "no position table",
    "vit_small_patch16_rope_mixed_ape_224": "rotary positions",
    "beit3_base_patch16_224": "norms inside attention and MLP",
    "aimv2_large_patch14_224": "a gated MLP",
}


@pytest.mark.parametrize("name", BEYOND | NAMED)
def test_parts_that_no_tensor_identifies_are_named(name, tmp_path):
    path = save({f"module.backbone.{key}": tensor for key, tensor in state_of(name).items()}, tmp_path)
    for reference in (path, f"dino:{path}", f"timm:{path}"):
        message = load_refusal(reference, ImportOptions(heads=4, statistics="half"))
        assert (BEYOND | NAMED)[name] in message
        assert ("with bench import --architecture NAME" in message) == (name in NAMED)


def test_networks_for_videos_are_refused_as_such(tmp_path):
    state = {name: t for name, t in state_of("vit_tiny_patch16_224").items() if name != "cls_token"}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].unsqueeze(2).repeat(1, 1, 2, 1, 1)
    trunk = {f"module.backbone.{name}": tensor for name, tensor in state.items()}
    assert "videos" in load_refusal(save({"encoder": trunk, "target_encoder": trunk}, tmp_path))  # V-JEPA 2's layout


def test_a_distilled_deit_is_read_with_its_second_token(tmp_path):
    path = save(state_of("deit_tiny_distilled_patch16_224", num_classes=5), tmp_path)
    options = ImportOptions(heads=4, statistics="imagenet")
    export = load(path, options)
    assert (export.spec.registers, export.facts["dropped"]) == (1, {"classifier": 4})
    assert "it has a distillation token (dist_token)" in load_refusal(f"dino:{path}", options)


def test_moco_v3s_trunk_is_recognised_by_its_position_table(tmp_path):
    """As its convert_to_deit.py writes it."""
    example = EXAMPLES["mocov3"]()
    start = "state_dict.base_encoder."
    trunk = {name.removeprefix(start): t for name, t in example.tree.items() if name.startswith(start)}
    path = save({"model": {name: t for name, t in trunk.items() if not name.startswith("head.")}}, tmp_path)
    assert load(path, example.options).facts["importer"] == "mocov3"


@pytest.mark.parametrize("learned", [True, False])
def test_a_fine_tuned_vit_is_recognised_as_mae_by_its_position_table(learned, tmp_path):
    state = state_of("vit_base_patch16_224", num_classes=5, global_pool="avg")
    if not learned:  # moved by fine-tuning, and still near sines and cosines
        fixed = sincos_positions((4, 4), 32, "column", prefix=1)
        state["pos_embed"] = fixed + 0.1 * torch.randn(fixed.shape)
    path = save({"model": state, "epoch": 99}, tmp_path)
    if learned:
        assert "as timm: no tensor tells the image statistics" in load_refusal(path)
        assert "table is learned, but that of mae is sincos" in load_refusal(f"mae:{path}", ImportOptions(heads=4))
    else:
        assert load(path, ImportOptions(heads=4)).facts["importer"] == "mae"


class TestArchitecture:
    """The name of a timm model gives what its tensors do not show."""

    def test_a_file_of_a_named_vit_equals_timms(self, tmp_path):
        torch.manual_seed(0)
        model = timm.create_model("test_vit2").eval()  # registers with positions, layer scale, norm after the mean
        path = save(model.state_dict(), tmp_path)
        assert "give architecture NAME" in load_refusal(path, ImportOptions(statistics="clip"))
        export = load(path, ImportOptions(statistics="clip", architecture="test_vit2"))
        assert export.mean == (0.48145466, 0.4578275, 0.40821073)
        images = torch.randn(1, 3, 160, 160)
        with torch.no_grad():
            assert (export.build()(images)[0] - model.forward_features(images)).abs().max() < 1e-5

    @pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3_qkvb"])
    def test_a_file_of_a_named_eva_equals_timms(self, name, tmp_path):
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=64 if "16" in name else 56).eval()
        path = save(model.state_dict(), tmp_path)
        export = load(f"timm:{path}", ImportOptions(statistics="clip", architecture=name))
        images = torch.randn(1, 3, *model.patch_embed.img_size)
        with torch.no_grad():
            assert (export.build()(images)[0] - model.forward_features(images)).abs().max() < 1e-5

    def test_the_architecture_is_read_from_timms_training_checkpoints(self, tmp_path):
        state = timm.create_model("test_vit2").state_dict()
        path = save({"state_dict": state, "arch": "test_vit2", "epoch": 9, "version": 2}, tmp_path)
        export = load(path, ImportOptions(statistics="half"))
        assert (export.spec.architecture, export.facts["epochs"]) == ("test_vit2", 10)

    @pytest.mark.parametrize(
        "arguments", [{"num_heads": 4}, {"act_layer": "relu"}, {"drop_path_rate": 0.1, "weight_init": "jax"}]
    )
    def test_arguments_of_the_training_that_change_the_model_are_refused(self, arguments, tmp_path):
        model = randomise(timm.create_model("test_vit", num_classes=0, **arguments))
        content = {"state_dict": model.state_dict(), "arch": "test_vit", "args": Namespace(model_kwargs=arguments)}
        path, options = f"timm:{save(content, tmp_path)}", ImportOptions(statistics="half")
        if "drop_path_rate" not in arguments:
            ((name, value),) = arguments.items()
            assert f"{name}={value}" in load_refusal(path, options)
        if "act_layer" not in arguments:
            options = replace(options, heads=arguments.get("num_heads"))
            for named in (options, replace(options, architecture="test_vit")):
                assert difference(model, load(path, named)) < 1e-4

    @pytest.mark.parametrize("arguments", [{"gp": "max"}, {"model_kwargs": {"global_pool": "avgmax"}}])
    def test_a_pool_that_an_export_does_not_have_is_noted(self, arguments, tmp_path):
        state = timm.create_model("test_vit", num_classes=0).state_dict()
        path = save({"state_dict": state, "arch": "test_vit", "args": Namespace(**arguments)}, tmp_path)
        export = load(f"timm:{path}", ImportOptions(statistics="half"))
        assert any("global_pool=" in text for text in export.facts["assumed"])

    @pytest.mark.parametrize(
        ("importer", "name", "message"),
        [
            ("timm", "vit_tiny_patch16_224", "width of the tensors is 64, that of vit_tiny_patch16_224 is 192"),
            (
                "timm",
                "test_vit22",
                "no model 'test_vit22'; did you mean 'test_vit2'? docs/timm.md lists them all",
            ),
            ("timm", "vit_relpos_small_patch16_224", "is a VisionTransformerRelPos, which has relative positions that"),
            ("dino", "test_vit2", "architecture is for files of timm's models"),
        ],
    )
    def test_a_wrong_architecture_is_refused(self, importer, name, message, tmp_path):
        path = save(timm.create_model("test_vit2").state_dict(), tmp_path)
        assert message in load_refusal(f"{importer}:{path}", ImportOptions(statistics="half", architecture=name))


def test_another_number_of_heads_in_a_files_settings_is_refused(tmp_path):
    network = randomise(VisionTransformer(**TINY | dict(embed_dim=192, num_heads=6)))
    weights = {"teacher": {"backbone": network.state_dict()}}
    path = f"dino:{save(weights | {'hyper_parameters': {'num_heads': 6}}, tmp_path)}"
    assert "hyper_parameters.num_heads=6" in load_refusal(path)
    assert difference(network, load(path, ImportOptions(heads=6))) < 1e-4
    (folder := tmp_path / "agrees").mkdir()
    settings = {"hyper_parameters": {"num_heads": 3, "decoder": {"num_heads": 6}}}
    assert load(f"dino:{save(weights | settings, folder)}").spec.heads == 3


def rectangular(size: tuple[int, int], **changes) -> VisionTransformer:
    """timm's network for images of this height and width in patches of 8 px, with random weights."""
    return randomise(VisionTransformer(**TINY | dict(img_size=size) | changes)).eval()


def difference(network: VisionTransformer, export: ViTExport) -> float:
    """Largest difference of the patch tokens from the network's."""
    images = torch.randn(1, 3, *network.patch_embed.img_size)
    with torch.no_grad():
        tokens = export.build()(images)[0]
        return float((tokens - network.forward_features(images)[:, -tokens.shape[1] :]).abs().max())


OPTIONS = ImportOptions(heads=4, statistics="half")


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({}, 1), ({"reg_tokens": 4}, 5), ({"no_embed_class": True}, 0), ({"no_embed_class": True, "reg_tokens": 4}, 0)],
)
@pytest.mark.parametrize("size", [(32, 48), (104, 120)])
def test_a_table_is_taken_as_it_is_if_the_stated_size_fits(size, changes, rows, tmp_path):
    """1 + 4 x 6 and 1 + 13 x 15 rows are squares."""
    network = rectangular(size, **changes)
    path = save(network.state_dict(), tmp_path)
    export = load(f"timm:{path}", replace(OPTIONS, image_size=size))
    assert export.spec.size == size and export.spec.class_position == (rows > 0)
    assert difference(network, export) < 1e-6 and "taken as it is" in export.facts["assumed"][0]
    (folder := tmp_path / "with settings").mkdir()  # the weights of the other file are still mapped into memory
    settings = {"args": {"img_size": None, "input_size": [3, *size]}}
    path = save({"model": network.state_dict()} | settings, folder)
    assert load(f"timm:{path}", OPTIONS).digest == export.digest


@pytest.mark.parametrize("size", [(32, 48), (64, 96), (104, 120)])
@pytest.mark.parametrize("importer", ["timm", "dino"])
def test_a_table_that_can_be_read_in_two_ways_is_refused(importer, size, tmp_path):
    path = save(rectangular(size).state_dict(), tmp_path)
    assert f"image_size={size}" in load_refusal(f"{importer}:{path}", OPTIONS)


@pytest.mark.parametrize("importer", ["timm", "dino"])
def test_a_square_of_patches_is_recorded_as_assumed(importer, tmp_path):
    path = save(rectangular((64, 256)).state_dict(), tmp_path)
    export = load(f"{importer}:{path}", OPTIONS)
    assert export.spec.grid == (16, 16) and any("square grid" in text for text in export.facts["assumed"])
    assert "assumed" not in load(f"{importer}:{path}", replace(OPTIONS, image_size=128)).facts


@pytest.mark.parametrize("is_fine_tuned", [False, True])
@pytest.mark.parametrize("size", [(32, 48), (48, 32), (64, 256)])
def test_sines_and_cosines_show_their_grid(size, is_fine_tuned, tmp_path):
    network = rectangular(size, fc_norm=is_fine_tuned, global_pool="avg" if is_fine_tuned else "token")
    table = sincos_positions((size[0] // 8, size[1] // 8), 32, "column", prefix=1)
    network.pos_embed.data = table + 0.2 * is_fine_tuned * torch.randn(table.shape)
    export = load(f"mae:{save({'model': network.state_dict()}, tmp_path)}", OPTIONS)
    assert export.spec.size == size and "assumed" not in export.facts and difference(network, export) < 1e-5


def test_a_named_model_is_read_at_the_stated_size(tmp_path):
    torch.manual_seed(0)
    name = "deit_tiny_distilled_patch16_224"
    network = timm.create_model(name, img_size=(64, 96), num_classes=0).eval()
    path, named = save(network.state_dict(), tmp_path), ImportOptions(architecture=name, statistics="half")
    assert difference(network, load(f"timm:{path}", replace(named, image_size=(64, 96)))) < 1e-5
    assert "image_size=(64, 96)" in load_refusal(f"timm:{path}", named)


def test_relative_tables_are_read_at_the_stated_size(tmp_path):
    network = randomise(Beit(**TINY | dict(img_size=(32, 48)), use_abs_pos_emb=False, use_rel_pos_bias=True)).eval()
    path = save(network.state_dict(), tmp_path)
    assert difference(network, load(f"timm:{path}", replace(OPTIONS, heads=None, image_size=(32, 48)))) < 1e-4
    message = load_refusal(f"timm:{path}", replace(OPTIONS, heads=None))
    assert "image_size=(32, 48)" in message and "image_size=(48, 32)" in message


def test_averaged_weights_of_timm_come_first_as_in_timm(tmp_path):
    weights, average = state_of("vit_base_patch16_224"), rectangular((32, 32)).state_dict()
    path = save({"state_dict": weights, "state_dict_ema": average}, tmp_path)
    export = load(f"timm:{path}", OPTIONS)
    expected = load_state_dict(str(path), use_ema=True)
    assert all(torch.equal(export.tensors[name], tensor) for name, tensor in expected.items())
    assert export.facts["branch"] == "ema" and "also holds model" in export.facts["assumed"][0]
    export = load(f"timm:{path}", replace(OPTIONS, branch="model"))
    assert torch.equal(export.tensors["cls_token"], weights["cls_token"])
    (folder := tmp_path / "alone").mkdir()
    only = load(f"timm:{save({'state_dict': weights}, folder)}", OPTIONS)
    assert only.digest == export.digest and only.facts["branch"] == "model"
