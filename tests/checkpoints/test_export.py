"""Export folders are complete or absent, load strictly, and are refused when changed; ViT and Backbone of an export."""

import json
import pickle
from dataclasses import replace

import pytest
import timm
import torch
from random_networks import randomise
from safetensors.torch import load_file, save_file

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

BEIT = dict(architecture="beit_base_patch16_224", position_resize="relative_spline", pool="avg")
PLAIN = dict(architecture="vit_base_patch16_224", image_size=32, patch_size=8, width=16, depth=2, heads=2)
SPECS = {
    "plain": ViTSpec(**PLAIN, mlp_hidden=40),
    "no class token": ViTSpec(**PLAIN, mlp_hidden=40, class_token=False, class_position=False, pool="avg"),
    "class attention": ViTSpec(
        **PLAIN, mlp_hidden=40, class_token=False, class_position=False, class_attention=2, final_norm="class"
    ),
    "shared bias": ViTSpec(
        **PLAIN | {"architecture": "beit_base_patch16_224"},
        mlp_hidden=40,
        layer_scale=True,
        position="none",
        class_position=False,
        relative_position="shared",
        position_resize="relative_spline",
    ),
}


def export(key: str = "plain") -> ViTExport:
    torch.manual_seed(0)
    return ViTExport.from_vit(ViT(SPECS[key]), Preparation(), {"method": "test", "licence": "Apache-2.0"})


@pytest.mark.parametrize("key", SPECS)
def test_save_and_load(key, tmp_path):
    original = export(key)
    original.save(tmp_path / "export")
    again = load(tmp_path / "export")
    assert (again.spec, again.preparation, again.digest) == (original.spec, original.preparation, original.digest)
    assert again.facts == {"method": "test", "licence": "Apache-2.0"}
    assert again.verify() == []
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == sorted(
        ["config.json", "model.safetensors"] + ["extra.safetensors"] * (key == "class attention")
    )


@pytest.mark.parametrize(
    "family",
    [
        dict(architecture="vit_giant_patch14_dinov2"),
        dict(architecture="vit_base_patch16_dinov3", rotary="centred", position="none", class_position=False),
    ],
)
def test_a_spec_without_layer_scale_has_no_gammas(family, tmp_path):
    """Even if the architecture has layer scale; folders of an earlier version that kept it load with it."""
    spec = replace(SPECS["plain"], layer_scale=True, **family)
    scaled = randomise(ViT(spec))
    gammas = [name for name in scaled.state_dict() if "gamma" in name]
    plain = ViT(replace(spec, layer_scale=False)).state_dict()
    assert len(gammas) == 4 and plain.keys() == scaled.state_dict().keys() - set(gammas)
    earlier = replace(ViTExport.from_vit(scaled, Preparation()), spec=replace(spec, layer_scale=False))
    earlier.save(tmp_path / "export")
    again = load(tmp_path / "export")
    assert again.spec == spec and again.verify() == []


def test_a_save_replaces_only_exports(tmp_path):
    export().save(tmp_path / "a")
    export("no class token").save(tmp_path / "a")
    assert load(tmp_path / "a").spec == SPECS["no class token"]
    for name, existing in (("b", []), ("c", ["config.json"]), ("d", ["config.json", "model.safetensors"])):
        (tmp_path / name).mkdir()
        for file_name in existing:  # another tool's model, with one of our file names
            (tmp_path / name / file_name).write_text('{"architecture": "vit_base_patch16_224"}')
        (tmp_path / name / "thesis.tex").write_text("years of work")
        with pytest.raises(ValueError, match="holds something that is not an export"):
            export().save(tmp_path / name)
        assert (tmp_path / name / "thesis.tex").read_text() == "years of work"
    export().save(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something"):
        export().save(tmp_path / "a")


def test_a_failed_save_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(ViTExport, "_config", lambda self: {"not json": object()})
    with pytest.raises(TypeError):
        export().save(tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["vit_export"])
    (folder / "config.json").write_text(json.dumps(config))


def edit_root(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))


BROKEN = {
    "a changed weight": (lambda f: edit_tensors(f, lambda t: t["norm.weight"].add_(1e-6)), "changed since"),
    "a missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop("norm.weight")), "changed since"),
    "another eps": (lambda f: edit_config(f, lambda c: c["spec"].update(norm_eps=1e-5)), "changed since"),
    "other statistics": (lambda f: edit_config(f, lambda c: c["preparation"].update(mean=[0, 0, 0])), "changed since"),
    "an unknown fact": (lambda f: edit_config(f, lambda c: c["spec"].update(colour="red")), "not a ViT-export"),
    "another version": (lambda f: edit_config(f, lambda c: c.update(format=99)), "another version of the format"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "cannot be read"),
    "truncated weights": (lambda f: (f / "model.safetensors").write_bytes(b"\x10\0\0\0"), "cannot be read"),
    "broken config": (lambda f: (f / "config.json").write_text('{"vit_export": '), "timm cannot load.*config.json"),
    "no object": (lambda f: edit_root(f, lambda c: 5), "timm cannot load"),
    "no bytes of a text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "timm cannot load"),
    "a list of facts": (lambda f: edit_root(f, lambda c: c | {"vit_export": []}), "not a ViT-export"),
    "no fingerprint": (lambda f: edit_config(f, lambda c: c.update(fingerprint={"block 0": {}})), "not a ViT-export"),
}


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_folder_is_refused(key, tmp_path):
    folder = export().save(tmp_path / "export")
    change, message = BROKEN[key]
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_tensors_that_do_not_fit_are_named():
    original = export()
    tensors = dict(original.tensors)
    tensors["norm.weight"] = torch.zeros(3)
    tensors["head.weight"] = tensors.pop("blocks.1.norm2.bias")
    with pytest.raises(ValueError) as error:
        replace(original, tensors=tensors).build()
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert "depth 2 and width 16: " in str(error.value) and "trunk." not in str(error.value)
    for text in ("missing blocks.1.norm2.bias", "unknown head.weight", "norm.weight is (3,), not (16,)"):
        assert text in str(error.value)


BEIT = {"architecture": "beit_base_patch16_224", "relative_position": "shared", "pool": "avg"}


def test_specs_that_do_not_fit_are_refused():
    for changes, message in [
        ({"heads": 3}, "heads=3 does not divide width=16"),
        ({"image_size": 33}, "image_size=33 is not a multiple of patch_size=8"),
        ({"position_resize": "nearest"}, "choose one of bilinear, bicubic"),
        ({"depth": 0}, "must be a whole number of at least 1"),
        ({"class_token": False, "class_position": False}, "pool='cls' needs a class token"),
        ({"relative_position": "shared"}, "does not fit 'vit_base_patch16_224'"),
        ({**BEIT, "class_token": False}, "'beit_base_patch16_224' needs class_token=True, registers=0"),
        ({**BEIT, "registers": 1}, "'beit_base_patch16_224' needs class_token=True, registers=0"),
        ({"class_token": False, "pool": "avg"}, "class_position=True needs class_token=True"),
        ({"class_attention": 2}, "set class_token=False"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(SPECS["plain"], **changes)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="timm cannot build 'vit_of_next_year'"):
        ViT(replace(SPECS["plain"], architecture="vit_of_next_year"))


@pytest.mark.parametrize(
    ("width", "depth", "label"), [(384, 12, "ViT-S/8"), (1280, 32, "ViT-H/8"), (64, 4, "ViT-64x4/8")]
)
def test_labels_name_the_size_and_patch(width, depth, label):
    assert replace(SPECS["plain"], width=width, depth=depth).label == label


class TestViT:
    @pytest.mark.parametrize("key", SPECS)
    def test_layers_and_attention_have_the_documented_shapes(self, key):
        spec, images = SPECS[key], torch.randn(2, 3, 32, 32)
        vit = ViT(spec).eval()
        tokens = 16 + spec.prefix
        first, last = vit(images, layers=(0, -1))
        assert first.shape == (2, tokens, 16)
        assert last.shape == (2, tokens + (spec.class_attention > 0), 16)
        attention = vit.attention(images, layer=1)
        assert attention.shape == (2, 2, tokens, tokens)
        assert torch.allclose(attention.sum(dim=-1), torch.ones(()), atol=1e-6)

    def test_keeping_all_patches_equals_the_full_encoding(self):
        vit, images = ViT(SPECS["plain"]).eval(), torch.randn(2, 3, 32, 32)
        patches = vit.add_positions(vit.project(images), (4, 4))
        all_patches = torch.arange(16).expand(2, -1)
        assert torch.equal(vit.encode(patches, keep=all_patches)[0], vit(images)[0])
        kept = vit.encode(patches, keep=torch.tensor([[3, 1], [0, 15]]))[0]
        assert kept.shape == (2, 3, 16)

    def test_images_of_other_sizes_are_encoded(self):
        images = torch.randn(1, 3, 16, 48)
        for key in SPECS:
            assert ViT(SPECS[key]).eval()(images)[0].shape[1] >= 12

    def test_wrong_sizes_layers_and_patches_are_refused(self):
        vit, bias = ViT(SPECS["plain"]), ViT(SPECS["shared bias"])
        with pytest.raises(ValueError, match="must be multiples of 8"):
            vit(torch.randn(1, 3, 30, 32))
        with pytest.raises(ValueError, match="the model has 2 blocks"):
            vit(torch.randn(1, 3, 32, 32), layers=(2,))
        with pytest.raises(ValueError, match="encodes all patches"):
            bias.encode(torch.randn(1, 16, 16), keep=torch.zeros(1, 2, dtype=torch.long))
        with pytest.raises(ValueError, match="12 patches are not a 3 x 3 grid"):
            bias.encode(torch.randn(1, 12, 16))


class TestBackbone:
    def test_a_backbone_is_frozen_and_stays_in_evaluation_mode(self):
        backbone = Backbone(export())
        backbone.train()
        assert not backbone.training and not backbone.vit.training
        assert not any(parameter.requires_grad for parameter in backbone.parameters())
        assert not backbone.views(torch.randn(1, 3, 32, 32), [(-1, True)])[-1, True].cls.requires_grad

    def test_images_are_prepared_with_the_statistics_of_the_export(self):
        original = replace(export(), preparation=Preparation(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)))
        prepared = Backbone(original).prepare(torch.full((1, 3, 2, 2), 51, dtype=torch.uint8))
        assert torch.allclose(prepared[0, :, 0, 0], torch.tensor([0.25, 0.0, -1 / 6]), atol=1e-6)

    def test_bfloat16_gives_float32_features_near_the_exact_ones(self):
        original, images = export(), torch.randn(4, 3, 32, 32)
        both = (Backbone(original), Backbone(original, precision="bfloat16"))
        exact, quick = (backbone.views(images, [(-1, True)])[-1, True] for backbone in both)
        assert quick.cls.dtype == torch.float32
        assert 0 < (quick.cls - exact.cls).abs().max() < 0.1


TABLES = {
    "offset": dict(position_resize="bicubic_offset"),
    "not square": dict(image_size=(48, 80)),
    "registers": dict(registers=2, position_resize="bicubic_antialias"),
    "shared": BEIT | dict(relative_position="shared", position="none", class_position=False),
    "per block": BEIT | dict(relative_position="per_block"),
}


@pytest.mark.parametrize("key", TABLES)
def test_each_use_resizes_the_tables_of_the_source_once(key, tmp_path):
    """An export made for 32 px from tables for 64 px, and used at 56 and 40 px, equals the source used there."""
    spec = ViTSpec(**PLAIN | dict(image_size=64, mlp_hidden=40) | TABLES[key])
    source = ViTExport.from_vit(randomise(ViT(spec)), Preparation())
    folder = source.at_size(32).save(tmp_path / "export")
    small = load(folder)
    assert small.verify() == [] and small.spec.grid == (4, 4) and small.spec.stored.size == spec.size
    assert load(folder, ImportOptions(image_size=56)).digest == source.at_size(56).digest != small.digest
    assert small.at_size(spec.image_size).digest == source.digest
    images = torch.randn(1, 3, 40, 40)
    if spec.relative_position != "per_block":
        ours, expected = (Backbone(export).views(images, [(-1, True)])[-1, True] for export in (small, source))
        assert torch.equal(ours.patches, expected.patches)
    from downstream.models.backbone import dense_network

    for tables in ("shared", "per_block"):
        ours, expected = (dense_network(export, 40, 0.0, tables).eval()(images)[0] for export in (small, source))
        assert torch.equal(ours, expected)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(1, 3, *spec.size)
    assert (model.forward_features(images) - source.build()(images)[0]).abs().max() < 1e-5
    again = ViTExport.from_vit(small.build(), Preparation())
    assert again.spec == replace(small.spec, table_size=None), "a training goes on with tables of its own size"


def test_specs_from_before_tables_of_another_size_keep_their_digests():
    spec = SPECS["plain"]
    assert "table_size" not in spec.to_json() and replace(spec, table_size=spec.image_size) == spec
    rotary = replace(SPECS["no class token"], position="none", image_size=48, table_size=24)
    assert rotary.table_size is None, "there is no table to resize"
