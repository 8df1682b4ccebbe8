"""`bench import`, `inspect`, `verify` and `data check`, and how `bench run` imports a file."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch

from checkpoints import importing
from checkpoints.export import ViTExport
from downstream.data.scenes import tiny_folder


@pytest.fixture
def dino_file(exports, tmp_path) -> Path:
    """A full DINO checkpoint of the tiny network: student and teacher, head and optimiser."""
    trunk = ViTExport.load(exports[0]).tensors
    backbone = {f"backbone.{name}": tensor for name, tensor in trunk.items()}
    head = {"head.mlp.0.weight": torch.ones(2, 12), "head.mlp.0.bias": torch.ones(2)}
    head["head.last_layer.weight_v"] = torch.ones(2, 2)
    student = {f"module.{name}": 2 * tensor for name, tensor in (backbone | head).items()}
    path = tmp_path / "dino_tiny.pth"
    torch.save({"student": student, "teacher": backbone | head, "epoch": 3}, path)
    return path


@pytest.fixture
def known_heads(monkeypatch) -> None:
    """Importing knows that networks of width 12 have 3 heads, so that no --heads is needed."""
    monkeypatch.setitem(importing.HEADS, 12, 3)


def test_a_checkpoint_becomes_an_export(output_of, dino_file, tmp_path):
    out = output_of("import", dino_file, "--out", tmp_path / "export", "--heads", "3", "--name", "tiny")
    assert f"{dino_file}: recognised as dino" in out
    assert "dino_tiny.pth, sha256 " in out and "dropped: " in out and "depth 2, width 12, 3 heads" in out
    assert f"written and verified: {tmp_path / 'export'}" in out
    assert "activations are reproduced" in output_of("inspect", tmp_path / "export")
    assert ViTExport.load(tmp_path / "export").facts["name"] == "tiny"


def test_inspect_takes_the_options_of_import(output_of, refused, dino_file):
    out = output_of("inspect", dino_file, "--heads", "3", "--branch", "student")
    assert "branch       student" in out and "3 heads" in out
    assert "assumed      ImageNet's mean and std (--statistics)" in out
    out = output_of("inspect", dino_file, "--heads", "3", "--statistics", "0.49,0.48,0.45,0.25,0.24,1")
    assert "mean 0.49 0.48 0.45, std 0.25 0.24 1\n" in out and "(--statistics)" not in out
    for wrong in ("clp", "0.5,0.5,0.5", "125,123,114,63,62,67", "0.5,0.5,0.5,0.2,0.2,0"):
        refused("inspect", dino_file, "--heads", "3", "--statistics", wrong, named=f"{wrong}: | imagenet, half, clip")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at width 12; give it: bench import "),
        (["--heads", "3", "--branch", "online"], "no branch 'online'; choose one of"),
        (["--heads", "5"], "heads=5 does not divide width=12"),
        (["--heads", "3", "--name", "a b"], "--name 'a b': use ASCII letters"),
    ],
)
def test_a_wrong_import_is_one_line_and_writes_nothing(words, message, refused, dino_file, tmp_path):
    refused("import", dino_file, "--out", tmp_path / "export", *words, named=message)
    assert not (tmp_path / "export").exists()


def test_a_folder_without_an_export_is_not_overwritten(refused, dino_file, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    refused("import", dino_file, "--out", tmp_path, "--heads", "3", named=f"--out {tmp_path}: | not an export")
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_run_saves_the_export_of_a_file_in_place_of_which_it_can_be_given(
    output_of, toys, known_heads, dino_file, tmp_path
):
    out = tmp_path / "out"
    options = ("--suite", "toy@one", "--data", "tiny=tiny:", "--out", out)
    output_of("run", "--checkpoint", dino_file, *options, "--dry-run")
    assert not out.exists()
    output_of("run", "--checkpoint", dino_file, *options)
    (saved,) = (out / "exports").iterdir()
    assert saved.name == f"dino_tiny-{ViTExport.load(saved).digest[:8]}"
    assert "0 done, 1 skipped" in output_of("run", "--checkpoint", saved, *options)


@pytest.mark.parametrize("saved", [True, False])
def test_another_run_may_save_the_same_import_first(saved, bench, toys, known_heads, dino_file, tmp_path, monkeypatch):
    save = ViTExport.save

    def save_too_late(export, folder):
        if saved:
            save(export, folder)
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(ViTExport, "save", save_too_late)
    words = ["run", "--checkpoint", dino_file, "--suite", "toy@one", "--data", "tiny=tiny:", "--out", tmp_path / "out"]
    assert bench(*words)[0] == (0 if saved else 2)


def test_inspect_shows_architecture_preparation_origin_and_digest(output_of, exports):
    out = output_of("inspect", exports[0])
    for text in ("ViT-12x2/16", "0.485 0.456 0.406", "bicubic", "random.pth", "7 decoder", "student"):
        assert text in out
    assert ViTExport.load(exports[0]).digest in out
    assert "recorded activations are reproduced" in out


def changed_copy(export: Path, folder: Path, change) -> Path:
    """A copy of the export in `folder`, its config changed by `change(config)`."""
    shutil.copytree(export, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shift_block(config: dict) -> None:
    config["vit_export"]["fingerprint"]["block 1"]["mean"] += 1.0


def shift_statistics(config: dict) -> None:
    config["vit_export"]["preparation"]["mean"] = [0.5, 0.5, 0.5]


def test_a_changed_export_is_refused(bench, refused, toys, exports, tmp_path):
    shifted = changed_copy(exports[0], tmp_path / "shifted", shift_block)
    code, out, _ = bench("inspect", shifted)
    assert code == 1 and "NO, it differs first at block 1: differs by 1" in out
    refused("inspect", changed_copy(exports[0], tmp_path / "changed", shift_statistics), named="changed since")
    options = ("--suite", "toys", "--data", "tiny=tiny:", "--out", tmp_path / "o")
    for folder in ("shifted", "changed"):
        refused("run", "--checkpoint", tmp_path / folder, *options, named="import it again")


TIMM_SETTINGS = {
    "architecture": "vit_small_patch16_224",
    "num_features": 13,
    "global_pool": "avg",
    "model_args.num_heads": 6,
    "model_args.mlp_ratio": 4.0,
    "model_args.act_layer": "relu",
    "pretrained_cfg.mean": [0.5, 0.5, 0.5],
    "pretrained_cfg.std": [0.5, 0.5, 0.5],
    "pretrained_cfg.interpolation": "bilinear",
    "pretrained_cfg.crop_pct": 0.9,
    "pretrained_cfg.crop_mode": "squash",
    "pretrained_cfg.input_size": [3, 64, 64],
    "pretrained_cfg.test_crop_pct": 1.0,
}


def with_timm_setting(export: Path, folder: Path, key: str, value: object) -> Path:
    part, _, name = key.rpartition(".")
    return changed_copy(export, folder, lambda config: (config[part] if part else config).update({name: value}))


@pytest.mark.parametrize("key", TIMM_SETTINGS)
def test_settings_that_timm_reads_are_verified(key, refused, exports, tmp_path):
    folder = with_timm_setting(exports[0], tmp_path / "changed", key, TIMM_SETTINGS[key])
    refused("inspect", folder, named=f"{key} is {TIMM_SETTINGS[key]}, not  | import it again")


@pytest.mark.parametrize("key", ["model_args", "pretrained_cfg"])
def test_a_config_without_the_settings_of_timm_is_no_export(key, refused, exports, tmp_path):
    refused("inspect", with_timm_setting(exports[0], tmp_path / "changed", key, None), named="is not a ViT-export")


class TestImportIntoAnExport:
    """Only the same export is accepted without --force."""

    @pytest.fixture
    def import_file(self, output_of, dino_file, tmp_path) -> tuple:
        """The words of an import, which has run."""
        words = ("import", dino_file, "--out", tmp_path / "export", "--heads", "3")
        output_of(*words)
        return words

    @pytest.mark.parametrize("options", [(), ("--statistics", "imagenet")])  # the latter are assumed if not given
    def test_the_same_export_is_verified_and_not_written(self, options, import_file, output_of, tmp_path):
        before = (tmp_path / "export" / "config.json").stat().st_mtime_ns
        out = output_of(*import_file, *options)
        assert f"now verified: {tmp_path / 'export'}" in out
        assert (tmp_path / "export" / "config.json").stat().st_mtime_ns == before

    @pytest.mark.parametrize(
        ("options", "difference"),
        [(["--branch", "student"], "holds another export (digest "), (["--name", "b"], "(name None, not 'b')")],
    )
    def test_another_export_needs_force(self, options, difference, import_file, bench, output_of, tmp_path):
        before = (tmp_path / "export" / "config.json").read_bytes()
        code, _, err = bench(*import_file, *options)
        assert code == 2 and err.count("\n") == 1 and difference in err and "--force" in err
        assert (tmp_path / "export" / "config.json").read_bytes() == before
        output_of(*import_file, *options, "--force")
        assert (tmp_path / "export" / "config.json").read_bytes() != before

    def test_a_damaged_export_needs_force(self, import_file, bench, output_of, tmp_path):
        (tmp_path / "export" / "model.safetensors").write_bytes(b"lost")
        code, _, err = bench(*import_file)
        assert code == 2 and "cannot be read" in err and "--force" in err
        output_of(*import_file, "--force")
        output_of("inspect", tmp_path / "export")


def test_data_check_decodes_images_unless_told_to_list_them_only(bench, output_of, tmp_path):
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            (tmp_path / split / label / "x.png").write_bytes(b"no image")
    code, out, _ = bench("data", "check", f"folder:{tmp_path}")
    assert code == 1 and "FIX: 4 unreadable images" in out
    assert "listed, not decoded" in output_of("data", "check", f"folder:{tmp_path}", "--list-only")


def test_an_unknown_scheme_is_refused_with_all_schemes(refused, exports, tmp_path):
    run = ("run", "--checkpoint", exports[0], "--suite", "smoke", "--out", tmp_path, "--data")
    for words in (("data", "check", "ade20:/data"), (*run, "x=ade20:/data")):
        err = refused(*words, named="did you mean 'ade20k:/data'?")
        for scheme in ("images:PATH", "ade20k:ROOT", "cityscapes:ROOT", "coco:ROOT", "tiny-ade20k:", "tiny-coco:"):
            assert f" {scheme}" in err


def test_problems_of_one_kind_are_one_line_and_at_most_20_kinds_are_listed(bench, monkeypatch):
    """Where a line of classes.txt is missing, every mask has the same problem."""
    wrong = dict(enumerate([f"/set/{number}.png: the mask holds the value {number}" for number in range(15)]))
    wrong |= {100 + number: f"/set/a.png: {chr(97 + number)}" for number in range(25)}
    monkeypatch.setattr("downstream.data.check.decode_scenes", lambda scenes, advance: (wrong, None, {}))
    code, out, _ = bench("data", "check", "tiny-masks:")
    assert code == 1 and out.count("  FIX: ") == 20 and out.endswith("  and 6 more problems\n")
    assert "  FIX: /set/0.png: the mask holds the value 0 (and 29 more like this)\n" in out


def test_a_folder_without_scenes_is_one_problem(bench, tmp_path):
    code, out, err = bench("data", "check", f"masks:{tmp_path}")
    assert code == 1 and not err and out.count("FIX: ") == 1
    assert f"  FIX: masks:{tmp_path}: no folder images/ there; put images into images/train" in out


def test_categories_in_another_order_are_found_before_a_run(bench, tmp_path):
    coco = tiny_folder("coco", tmp_path)
    path = coco / "annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    first, second, *_ = content["categories"]
    first["name"], second["name"] = second["name"], first["name"]
    path.write_text(json.dumps(content))
    code, out, _ = bench("data", "check", f"coco:{coco}", "--list-only")
    assert code == 1 and "FIX: " in out and "instances_train2017.json and" in out and "number 2" in out


def test_run_takes_statistics_for_files_that_have_none(output_of, refused, toys, exports, tmp_path):
    options = ("--suite", "toys", "--out", tmp_path / "out", "--data", "tiny=tiny:")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    file = f"timm:{tmp_path / 'mine.pth'}"
    refused("run", "--checkpoint", file, *options, named="--statistics imagenet (as DeiT), half ")
    output_of("run", "--checkpoint", file, *options, "--statistics", "half")
    (export,) = (tmp_path / "out" / "exports").iterdir()
    assert ViTExport.load(export).mean == (0.5, 0.5, 0.5)
    assert "mean 0.481455 0.457827 0.408211" in output_of("inspect", file, "--statistics", "clip")
    named = "is an export already: only its image size can change"
    refused("run", "--checkpoint", exports[0], *options, "--statistics", "half", named=named)
