"""Folders of Hugging Face transformers are imported with the library's features, or refused."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from random_networks import randomise
from recordings import facts, tensors, under
from refusals import refusal
from safetensors.torch import save_file

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.positions import sincos_positions
from checkpoints.resolve import load, of_module
from checkpoints.spec import CLIP_MEAN, HALF, IMAGENET_MEAN
from pretrain.methods.nepa import CausalViT

library = pytest.importorskip("transformers")
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
MLP = dict(intermediate_size=48)
MODELS = {
    "ViT": dict(MLP),
    "Dinov2": dict(mlp_ratio=2),
    "Dinov2, SwiGLU": dict(mlp_ratio=2, use_swiglu_ffn=True),
    "Dinov2WithRegisters": dict(mlp_ratio=2, num_register_tokens=3),
    "DINOv3ViT": dict(MLP, num_register_tokens=2),
    "DINOv3ViT, gated": dict(MLP, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False),
    "DINOv3ViT, key bias": dict(MLP, key_bias=True, rope_theta=50.0),
    "IJepa": dict(MLP),
    "Pixio": dict(mlp_ratio=2, n_cls_tokens=4),
    "Beit": dict(MLP, use_relative_position_bias=True),
    "Beit, shared": dict(MLP, use_shared_relative_position_bias=True, use_absolute_position_embeddings=True),
    "Data2VecVision": dict(MLP, use_shared_relative_position_bias=True),
    "CLIPVision": dict(MLP),
    "CLIPVision, gelu": dict(MLP, hidden_act="gelu"),
    "SiglipVision": dict(MLP),
    "Aimv2Vision": dict(MLP, is_native=False),
    "Aimv2Vision, eps": dict(MLP, is_native=False, rms_norm_eps=0.1),
}
PREPARATION = {
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
    "resample": 2,
    "do_center_crop": True,
    "size": {"shortest_edge": 40},
}


def random_model(key: str) -> torch.nn.Module:
    """A model of the library with random parameters."""
    kind = key.partition(",")[0]
    config = getattr(library, f"{kind}Config")(**SIZES | MODELS[key])
    pooled = {"add_pooling_layer": True} if kind in ("Beit", "Data2VecVision") else {}
    return randomise(getattr(library, f"{kind}Model")(config, **pooled).eval())


def save(model: torch.nn.Module, folder, **options) -> None:
    model.save_pretrained(folder, **options)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))


@pytest.mark.parametrize("key", MODELS)
def test_features_equal_the_librarys(key, tmp_path):
    model = random_model(key)
    save(model, tmp_path)
    export = load(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = model(images)
        normed, raw = (export.build()(images, norm=norm)[0] for norm in (True, False))
    assert_close(raw if key.startswith(("Beit", "Data2Vec", "CLIP")) else normed, theirs.last_hidden_state)
    if key.startswith("CLIP"):
        assert_close(normed[:, 0], theirs.pooler_output)
    if key == "Pixio":
        assert_close(Backbone(export).views(images, [(-1, True)])[-1, True].cls, theirs.pooler_output)
    if key.startswith(("Beit", "Data2Vec")):
        assert_close(Backbone(export).views(images, [(-1, True)])[-1, True].avg, theirs.pooler_output)
    assert export.facts["method"] == "transformers"
    assert (export.mean, export.std, export.interpolation, export.crop) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        "bilinear",
        0.8,
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1 and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 2e-6 * theirs.abs().max()


def test_mae_is_imported_without_its_decoder(tmp_path):
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    config = library.ViTMAEConfig(**SIZES, **MLP, **decoder, decoder_intermediate_size=16, mask_ratio=0.0)
    model = randomise(library.ViTMAEForPreTraining(config).eval())
    model.vit.embeddings.position_embeddings.data = sincos_positions((4, 4), 32, "column", prefix=1)
    save(model, tmp_path)
    export = load(tmp_path)
    assert export.spec.position == "sincos_column_first" and export.facts["dropped"] == {"decoder": 24}
    images, order = torch.randn(2, 3, 32, 32), torch.arange(16.0).expand(2, -1)
    with torch.no_grad():
        assert_close(export.build()(images)[0], model.vit(images, noise=order).last_hidden_state)


@pytest.mark.parametrize("case", ["base", "swiglu"])
def test_nepa_has_the_recorded_outputs_if_its_attention_is_causal(case, tmp_path):
    recorded, config = tensors("nepa/golden.safetensors"), facts("nepa/config.json")["cases"][case]["model"]
    model = {name: tensor.float().contiguous() for name, tensor in under(recorded, f"{case}/model0/").items()}
    config |= dict(model_type="vit_nepa", rope_theta=100.0, qkv_bias=True, is_causal=True)
    save_file(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    export = load(tmp_path)
    assert export.mean == HALF and any("causal" in text for text in export.facts["assumed"])
    vit = CausalViT(export.spec).double()
    vit.load_state_dict(export.build().state_dict())
    vit.causal_factor = recorded[f"{case}/step0/coords"][-1, 0].item() / 0.75 if case == "swiglu" else 1.0
    with torch.no_grad():
        output = vit(recorded[f"{case}/step0/images"].double())[0]
    expected = recorded[f"{case}/step0/output"]
    assert (output - expected).abs().max() < 1e-6 * expected.abs().max()


def test_models_with_a_task_head_and_in_several_files_are_imported(tmp_path):
    config = library.ViTConfig(**SIZES, **MLP, num_labels=5)
    model = randomise(library.ViTForImageClassification(config).eval())
    save(model, tmp_path / "single")
    save(model, tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = load(tmp_path / "single"), load(f"transformers:{tmp_path / 'sharded'}")
    assert single.digest == sharded.digest and single.facts["dropped"] == {"classifier or token head": 2}
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(single.build()(images)[0], model.vit(images).last_hidden_state)
    with pytest.raises(ValueError, match="the index of a checkpoint in several files; name its folder"):
        load(tmp_path / "sharded" / "model.safetensors.index.json")
    next((tmp_path / "sharded").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="which is not there; download it as well"):
        load(tmp_path / "sharded")


def test_a_repository_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--lab--vit" / "snapshots" / ("0" * 40)
    save(random_model("ViT"), snapshot)
    (tmp_path / "models--lab--vit" / "refs").mkdir()
    (tmp_path / "models--lab--vit" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load("hf-hub:lab/vit").digest == load(snapshot).digest
    with pytest.raises(ValueError, match="timm cannot load 'hf-hub:lab/other'"):
        load("hf-hub:lab/other")


@pytest.mark.parametrize("tower", ["CLIP", "Siglip"])
def test_the_vision_tower_of_a_two_tower_model_is_imported(tower, tmp_path):
    text = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    config = getattr(library, f"{tower}Config")(text_config=text, vision_config=SIZES | MLP)
    model = randomise(getattr(library, f"{tower}Model")(config).eval())
    save(model, tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = model.vision_model(images).last_hidden_state
        assert_close(load(tmp_path).build()(images, norm=tower == "Siglip")[0], theirs)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "swin"}, {}, "config.json says 'swin'; models of vit, vit_mae, dinov2"),
        ({"hidden_act": "relu"}, {}, "hidden_act='relu': a model of this kind is read with gelu"),
        ({"num_attention_heads": 4}, {"heads": 2}, "config.json says 4 heads, not 2"),
        ({"hidden_size": None}, {}, "config.json has no hidden_size"),
        ({"num_hidden_layers": 3}, {}, r"missing .*layer\.2\.attention\.output\.dense\.weight"),
        ({"image_size": 40}, {}, r"embeddings\.position_embeddings is \(1, 17, 32\), not \(1, 26, 32\)"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, options, message, tmp_path):
    save(random_model("ViT"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert re.search(message, refusal(load, tmp_path, ImportOptions(**options)))


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("ViT", "qkv_bias", False),
        ("DINOv3ViT", "query_bias", False),
        ("DINOv3ViT", "key_bias", True),
        ("DINOv3ViT, gated", "value_bias", True),
        ("DINOv3ViT", "proj_bias", False),
        ("DINOv3ViT", "mlp_bias", False),
        ("DINOv3ViT", "num_register_tokens", 3),
        ("Dinov2WithRegisters", "num_register_tokens", 0),
        ("Aimv2Vision", "qkv_bias", True),
        ("Pixio", "n_cls_tokens", 2),
        ("Beit", "layer_scale_init_value", 0.0),
        ("Beit", "use_absolute_position_embeddings", True),
        ("Beit", "use_relative_position_bias", False),
        ("Beit, shared", "use_shared_relative_position_bias", False),
    ],
)
def test_configs_that_contradict_the_tensors_are_refused(key, name, value, tmp_path):
    """The library would leave tensors out, or draw them anew."""
    save(random_model(key), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    assert f"config.json says {name}={value}" in refusal(load, tmp_path)


def test_a_folder_with_an_adapter_is_refused(tmp_path):
    save(random_model("ViT"), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    for reference in (tmp_path, f"transformers:{tmp_path}"):
        assert "adapter_config.json" in refusal(load, reference)


def test_a_model_without_its_final_norm_is_refused(tmp_path):
    config = library.Data2VecVisionConfig(**SIZES, **MODELS["Data2VecVision"])
    save(library.Data2VecVisionModel(config, add_pooling_layer=False), tmp_path)
    with pytest.raises(ValueError, match=r"no norm behind its blocks: .* take the official file"):
        load(tmp_path)


STATISTICS = {
    **dict.fromkeys(("Dinov2", "Dinov2WithRegisters", "DINOv3ViT"), IMAGENET_MEAN),
    **dict.fromkeys(("CLIPVision", "Aimv2Vision"), CLIP_MEAN),
    **dict.fromkeys(("Beit", "SiglipVision"), HALF),
}


@pytest.mark.parametrize("key", STATISTICS)
def test_statistics_of_a_known_type_are_assumed_with_a_note(key, tmp_path):
    random_model(key).save_pretrained(tmp_path)
    export = load(tmp_path)
    assert export.mean == STATISTICS[key]
    (note,) = export.facts["assumed"]
    assert "--statistics" in note and json.loads((tmp_path / "config.json").read_text())["model_type"] in note
    with_option = load(tmp_path, ImportOptions(statistics="0.1,0.2,0.3,0.4,0.5,0.6"))
    assert with_option.mean == (0.1, 0.2, 0.3) and "assumed" not in with_option.facts


@pytest.mark.parametrize("key", ["ViT", "IJepa", "Data2VecVision"])
def test_statistics_are_required_where_published_models_of_the_type_differ(key, tmp_path):
    random_model(key).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json .* use statistics='imagenet', half or clip"):
        load(tmp_path)
    assert load(tmp_path, ImportOptions(statistics="half")).mean == (0.5, 0.5, 0.5)


def test_statistics_are_read_from_a_processor_of_images_and_texts(tmp_path):
    random_model("CLIPVision").save_pretrained(tmp_path)
    processor = {"image_processor": PREPARATION, "processor_class": "CLIPProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    export = load(tmp_path)
    assert (export.mean, export.crop) == ((0.1, 0.2, 0.3), 0.8) and "assumed" not in export.facts


@pytest.mark.parametrize(
    "changes",
    [
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"rescale_factor": "1/255"},
        {"resample": 0},
        {"resample": "nearest"},
        {"image_mean": [123.7, 116.3, 103.5], "image_std": [58.4, 57.1, 57.4]},
        {"image_std": [0, 0, 0]},
        {"image_mean": [0.5]},
        {"image_mean": ["a", "b", "c"]},
    ],
    ids=str,
)
def test_a_processor_whose_images_cannot_be_prepared_is_refused(changes, tmp_path):
    save(random_model("ViT"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARATION | changes))
    message = refusal(load, tmp_path)
    assert all(f"{name}={value}" in message for name, value in changes.items()) and "statistics=" in message
    assert load(tmp_path, ImportOptions(statistics="half")).mean == HALF


def test_a_filter_that_the_processor_does_not_state_is_noted(tmp_path):
    """That of ViTImageProcessor would be bilinear, that of BitImageProcessor bicubic."""
    save(random_model("ViT"), tmp_path)
    processor = {name: value for name, value in PREPARATION.items() if name != "resample"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    export = load(tmp_path)
    assert export.interpolation == "bicubic" and "`resample`" in export.facts["assumed"][0]


@pytest.mark.parametrize("options", [ImportOptions(), ImportOptions(statistics="half")], ids=["", "statistics"])
def test_a_processor_of_bgr_images_is_refused(options, tmp_path):
    save(random_model("ViT"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARATION | {"do_flip_channel_order": True}))
    assert "do_flip_channel_order=True" in refusal(load, tmp_path, options)


def test_the_processors_normalisation_and_filter_are_kept(tmp_path):
    save(random_model("ViT"), tmp_path)
    processor = {"do_normalize": False, "do_rescale": True, "rescale_factor": 0.00392156862745098, "resample": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARATION | processor))
    export = load(tmp_path)
    assert (export.mean, export.std, export.interpolation) == ((0.0,) * 3, (1.0,) * 3, "lanczos")
    assert "assumed" not in export.facts


@pytest.mark.parametrize("key", MODELS)
def test_a_module_in_memory_gives_the_export_of_its_folder(key, tmp_path):
    model, options = random_model(key), ImportOptions(statistics="half")
    model.save_pretrained(tmp_path)
    assert of_module(model, options).digest == load(tmp_path, options).digest
    if key in ("Dinov2", "DINOv3ViT", "CLIPVision"):
        export = of_module(model, ImportOptions())
        assert export.digest == load(tmp_path).digest and export.facts["assumed"] == load(tmp_path).facts["assumed"]


def test_modules_with_heads_and_sizes_beyond_whole_patches_are_compared():
    sizes, text = dict(SIZES, image_size=36), dict(hidden_size=16, num_attention_heads=2, vocab_size=9)
    options = ImportOptions(statistics="half", image_size=48)
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    siglip = library.SiglipConfig(text_config=text | {"num_hidden_layers": 1}, vision_config=sizes | MLP)
    for model in (
        library.ViTForImageClassification(library.ViTConfig(**sizes, **MLP)),
        library.ViTMAEForPreTraining(library.ViTMAEConfig(**sizes, **MLP, **decoder, decoder_intermediate_size=16)),
        library.SiglipModel(siglip),
        library.Dinov2Model(library.Dinov2Config(**sizes, mlp_ratio=2)).bfloat16(),
    ):
        assert of_module(randomise(model), options).spec.grid == (6, 6)
    for size in (16, 48):  # without a position table
        assert of_module(random_model("DINOv3ViT"), replace(options, image_size=size)).spec.image_size == size


class Shifted(library.Dinov2Model):
    """A model with a forward pass of its own."""

    def forward(self, *arguments, **settings):
        output = super().forward(*arguments, **settings)
        output.last_hidden_state = output.last_hidden_state.roll(1, dims=-1)
        return output


def test_a_module_that_computes_otherwise_than_its_config_says_is_refused():
    model = random_model("Dinov2")
    shifted = Shifted(model.config).eval()
    shifted.load_state_dict(model.state_dict())
    assert "Shifted: its features differ" in refusal(of_module, shifted, ImportOptions())
    model.embeddings.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert "give `forward`" in refusal(of_module, model, ImportOptions())
    shifted.forward = None
    assert "Shifted fails on images" in refusal(of_module, shifted, ImportOptions())


class Doubled(torch.nn.Module):
    """A module of the user's own around a model of the library, whose configuration it takes over."""

    image_size, mean, std = 32, (0.5,) * 3, (0.5,) * 3

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * self.model(pixel_values=images).last_hidden_state[:, 0]


def test_a_module_around_a_model_is_a_network_of_its_own():
    model, image = random_model("ViT").eval(), torch.rand(1, 3, 32, 32)
    export = of_module(Doubled(model), ImportOptions())
    with torch.inference_mode():
        expected = 2 * model(pixel_values=image).last_hidden_state[:, 0]
        assert torch.allclose(export.build()(image)[0][:, 0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [None, b"[" * 10**5])
def test_pipes_and_broken_json_are_refused_in_one_line(name, content, tmp_path):
    random_model("ViT").save_pretrained(tmp_path)
    if name == "model.safetensors.index.json":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    assert str(tmp_path) in refusal(load, tmp_path)


@pytest.mark.parametrize(
    ("key", "size"),
    [("ViT", (24, 40)), ("ViT", (32, 128)), ("Dinov2", (24, 40)), ("DINOv3ViT", (24, 40)), ("IJepa", (32, 128))],
)
def test_sizes_that_are_not_square_are_those_of_the_config(key, size, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "image_size", list(size))
    model = random_model(key)
    model.save_pretrained(tmp_path)
    export = load(tmp_path, ImportOptions(statistics="half"))
    assert export.spec.size == size and export.spec.table_size is None and "assumed" not in export.facts
    if key != "Dinov2":  # of which the library computes only square grids
        images = torch.randn(1, 3, *size)
        with torch.no_grad():
            expected = model(images).last_hidden_state
        assert (export.build()(images)[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("key", "size"), [("Beit", (24, 40)), ("Dinov2", (32, 128))])
def test_sizes_at_which_the_library_mistakes_positions_are_refused(key, size, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "image_size", list(size))
    random_model(key).save_pretrained(tmp_path)
    rows, columns = size[0] // 8, size[1] // 8
    assert f"other than {rows} x {columns}" in refusal(load, tmp_path, ImportOptions(statistics="half"))


def test_the_processors_size_is_that_of_the_evaluation(tmp_path):
    save(random_model("Dinov2"), tmp_path)
    own = load(tmp_path)
    processor = {"do_center_crop": True, "size": {"shortest_edge": 40}, "crop_size": {"height": 19, "width": 19}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARATION | processor))
    processed, chosen = load(tmp_path), load(tmp_path, ImportOptions(image_size=own.spec.image_size))
    assert (own.evaluation_size, processed.evaluation_size) == (own.spec.image_size, 16)  # whole patches
    assert processed.digest == own.digest and processed.spec.image_size == own.spec.image_size
    assert chosen.evaluation_size == own.spec.image_size
    assert (own.crop, processed.crop, processed.digest) == (own.preparation.crop, 19 / 40, own.digest)
    stored = ViTExport.load(processed.save(tmp_path / "export"))
    assert (stored.evaluation_size, stored.crop) == (16, 19 / 40)
