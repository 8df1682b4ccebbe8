"""timm models imported, exported, loaded by plain timm again and run through Backbone; folders that are refused."""

import json
import math
import os
import time
import zipfile

import pytest
import timm
import torch
from huggingface_hub import constants
from refusals import refusal
from timm.models import save_for_hf

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.importers import timm as timm_importer
from checkpoints.resolve import load, of_module
from checkpoints.spec import IMAGENET_MEAN, Preparation, ViTSpec
from checkpoints.vit import ViT

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
MODELS = {
    "plain": ("vit_base_patch16_224", TINY),
    "average": ("vit_base_patch16_224", TINY | dict(class_token=False, global_pool="avg")),
    "positions of registers": (
        "vit_base_patch16_224",
        TINY | dict(class_token=False, reg_tokens=2, global_pool="avg"),
    ),
    "registers": ("vit_base_patch14_reg4_dinov2", TINY),
    "quick gelu, pre-norm, eps 1e-5": ("vit_base_patch16_clip_quickgelu_224", TINY),
    "query and key norms": ("vit_base_patch16_224", TINY | dict(qk_norm=True)),
    "beit": ("beit_base_patch16_224", TINY),
    "beit, fine-tuned head": ("beit_base_patch16_224", TINY | dict(num_classes=5)),
}


def save_model(folder, architecture: str, arguments: dict) -> torch.nn.Module:
    """A random timm model, also saved in `folder` as timm writes it for the hub."""
    torch.manual_seed(0)
    model = timm.create_model(
        architecture,
        pretrained_cfg_overlay=dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), custom_load=False),
        **({"num_classes": 0} | arguments),
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_for_hf(model, folder, model_args={"num_classes": 0} | arguments, safe_serialization=True)
    return model


@pytest.mark.parametrize("key", MODELS)
def test_features_survive_timm_to_export_to_timm(key, tmp_path):
    model = save_model(tmp_path / "source", *MODELS[key])
    if key == "query and key norms":
        with pytest.raises(ValueError, match="q_norm"):  # no timm architecture has these norms
            load(f"timm:local-dir:{tmp_path / 'source'}")
        return
    export = load(f"timm:local-dir:{tmp_path / 'source'}")
    assert (export.mean, export.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    export.save(tmp_path / "export")
    reloaded_model = timm.create_model(f"local-dir:{tmp_path / 'export'}", pretrained=True).eval()
    assert reloaded_model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, reloaded_features = model.forward_features(images), reloaded_model.forward_features(images)
    features = Backbone(ViTExport.load(tmp_path / "export")).views(images, [(-1, True)])[-1, True]
    patches = features.patches.flatten(1, 2)
    assert (reloaded_features - expected).abs().max() < 1e-6
    assert (patches - expected[:, -patches.shape[1] :]).abs().max() < 1e-6
    if features.cls is not None:
        assert (features.cls - expected[:, 0]).abs().max() < 1e-6


@pytest.mark.exhaustive  # the other tests of this file compare small networks of the same architectures
@pytest.mark.parametrize("architecture", ["vit_small_patch16_224", "beit_base_patch16_224"])
def test_full_size_models_agree_to_1e_6(architecture, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(architecture, num_classes=0).eval()
    save_for_hf(model, tmp_path / "source", model_args=dict(num_classes=0), safe_serialization=True)
    export = load(tmp_path / "source")
    export.save(tmp_path / "export")
    reloaded_model = timm.create_model(f"local-dir:{tmp_path / 'export'}", pretrained=True).eval()
    images = torch.randn(1, 3, 224, 224)
    features = Backbone(export).views(images, [(-1, True)])[-1, True]
    with torch.no_grad():
        expected = reloaded_model.forward_features(images)
    assert (expected - model.forward_features(images)).abs().max() < 1e-6
    assert (features.patches.flatten(1, 2) - expected[:, 1:]).abs().max() < 1e-6
    assert (features.cls - expected[:, 0]).abs().max() < 1e-6


@pytest.mark.parametrize(("name", "values"), [("mean", [123.675, 116.28, 103.53]), ("std", [58.395, 57.12, 57.375])])
def test_statistics_of_pixels_up_to_255_are_refused(name, values, tmp_path):
    model = save_model(tmp_path, "vit_base_patch16_224", TINY)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"][name] = values
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{name}={tuple(values)}" in refusal(load, tmp_path)
    model.pretrained_cfg = model.pretrained_cfg | {name: values}
    assert f"{name}={tuple(values)}" in refusal(of_module, model, ImportOptions())


@pytest.mark.parametrize("activation", ["relu", "quick_gelu"])
def test_activations_other_than_the_architectures_are_refused(activation, tmp_path):
    save_model(tmp_path / "source", "vit_base_patch16_224", TINY | dict(act_layer=activation))
    with pytest.raises(ValueError, match="settings beyond those of vit_base_patch16_224"):
        load(tmp_path / "source")


@pytest.mark.parametrize(
    "make", [lambda: {"x": [os.system]}, lambda: nested_tuples(2_000_000)], ids=["os.system", "nested tuples"]
)
def test_malicious_weights_in_a_folder_are_refused(make, tmp_path):
    """The weights in a folder are read with the same guard as a single file."""
    save_model(tmp_path, *MODELS["plain"])
    (tmp_path / "model.safetensors").unlink()
    payload = make()
    if isinstance(payload, bytes):
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", payload)
            archive.writestr("archive/version", "3\n")
    else:
        torch.save(payload, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="timm cannot load") as error:
        load(tmp_path)
    # torch's own message advises weights_only=False, which would run the file's code: ours must not repeat it.
    assert "weights_only=False" not in str(error.value) and "\n" not in str(error.value)


def nested_tuples(levels: int) -> bytes:
    """A pickle of tuples nested `levels` deep as a dictionary's key, whose hash crashes Python."""
    return b"\x80\x02}" + b")" + b"\x85" * levels + b"K\x01s."


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"timm cannot load .*there is no model.safetensors or pytorch_model.bin"):
        load(tmp_path)


def test_statistics_of_an_export_override_timms_default(tmp_path):
    """timm's default mean of this architecture is 0.5."""
    spec = ViTSpec(
        architecture="vit_small_patch16_224", image_size=32, patch_size=8, width=32, depth=1, heads=2, mlp_hidden=64
    )
    ViTExport.from_vit(ViT(spec), Preparation()).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pretrained_cfg"]["mean"] == list(IMAGENET_MEAN)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert tuple(timm.data.resolve_model_data_config(model)["mean"]) == IMAGENET_MEAN
    assert math.isclose(timm.data.resolve_model_data_config(model)["crop_pct"], 0.875)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet18", "resnet18 is a ResNet; timm's VisionTransformer, Beit and Eva can be imported"),
        ("timm:samvit_base_patch16.sa1b", "is a VisionTransformerSAM, which attends within"),
        ("timm:vit_base_r50_s16_224.orig_in21k", "its patch embedding is timm's HybridEmbed"),
        ("timm:vit_base_patch16_none", "timm has no model 'vit_base_patch16_none'; did you mean 'vit_base_patch16_"),
        ("timm:vit_smal_patch16_224.dino", "did you mean 'vit_small_patch16_224.dino'"),
        ("timm:no/such/file.pth", "no/such/file.pth cannot be read: No such file"),
        ("local-dir:/nowhere", "there is no model.safetensors or pytorch_model.bin in /nowhere"),
    ],
)
def test_names_that_cannot_be_imported_are_refused_without_a_download(name, message, monkeypatch):
    monkeypatch.setattr(timm_importer, "offline_if_unreachable", None)  # a connection would be an error
    assert message in refusal(load, name)


def test_a_folder_of_another_library_is_refused(tmp_path):
    save_model(tmp_path, *MODELS["plain"])
    (tmp_path / "config.json").write_text('{"embed_dim": 768}')
    with pytest.raises(ValueError, match=r"its config\.json has no 'architecture', so it is another library's"):
        load(tmp_path)


@pytest.mark.parametrize("width", [64, 2**20])
def test_weights_that_do_not_fit_the_config_are_named(width, tmp_path):
    save_model(tmp_path, *MODELS["plain"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"]["embed_dim"] = width
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="size mismatch for cls_token: copying a param"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 200_000}, r"depth=200000, and model\.safetensors holds 29 tensors"),
        ({"depth": 10**12}, "depth=1000000000000, "),
        ({"depth": 1e300}, "depth=1e"),
        ({"img_size": 8 * 10**5, "pos_embed": "none"}, "at most 256 x 256 can be computed"),
        ({"patch_size": 0}, "timm cannot load"),
    ],
)
def test_a_config_of_a_huge_network_is_refused_at_once(settings, message, tmp_path):
    save_model(tmp_path, "vit_base_patch16_224", TINY | dict(pos_embed="none"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.monotonic()
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and time.monotonic() - start < 20


def test_without_a_connection_a_download_is_refused_at_once(monkeypatch, caplog):
    """Nothing listens on this port; the hub's client by itself would wait, retry and log."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for name in ("timm:vit_small_patch16_224.dino", "hf-hub:nobody/nothing"):
        with pytest.raises(ValueError, match=r"there is no connection to http://127\.0\.0\.1:9") as error:
            load(name)
        assert "\n" not in str(error.value)
    assert not waits and not caplog.records and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet10t", {}, "is a resnet10t; timm's VisionTransformer, Beit and Eva can be imported"),
        ("vit_base_patch16_18x2_224", TINY, "its block is timm's ParallelThingsBlock"),
        ("vit_base_patch16_xp_224", TINY, "its block is timm's ParallelScalingBlock"),
        ("vit_dwee_patch16_reg1_gap_256", TINY, "its attention is timm's DiffAttention"),
        ("test_vit3", {}, "it pools registers together with patches"),
        ("vit_base_patch16_224", TINY | {"patch_size": (8, 16)}, "only square patches can be imported, not 8 x 16 px"),
    ],
)
def test_other_timm_networks_are_refused(name, arguments, message, tmp_path):
    arguments = {"num_classes": 0} | arguments
    model = timm.create_model(name, **arguments)
    save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    with pytest.raises(ValueError, match=message) as error:
        load(f"local-dir:{tmp_path}")
    assert "\n" not in str(error.value)


def test_options_that_the_config_answers_are_refused(tmp_path):
    save_model(tmp_path, *MODELS["plain"])
    for options in (dict(heads=2), dict(statistics="half"), dict(architecture="vit_base_patch16_224")):
        with pytest.raises(ValueError, match="leave these options"):
            load(tmp_path, ImportOptions(**options))


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "naflexvit_base_patch16_gap", "eva02_base_patch14_224"])
@pytest.mark.parametrize("pool", ["max", "avgmax", "avg"])
def test_a_pool_that_an_export_does_not_have_is_noted(name, pool):
    sizes = dict(embed_dim=32, depth=2, num_heads=4) | ({} if "naflex" in name else dict(img_size=32, patch_size=8))
    model = timm.create_model(name, num_classes=0, global_pool=pool, **sizes)
    size = 32 if "naflex" in name else None
    export = of_module(model, ImportOptions(image_size=size))
    noted = [text for text in export.facts.get("assumed", ()) if f"global_pool={pool!r}" in text]
    assert export.spec.pool == "avg" and len(noted) == (pool != "avg")
