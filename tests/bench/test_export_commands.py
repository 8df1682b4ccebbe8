"""`bench import`, `inspect`, `verify` and `data check`, as a user calls them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints.export import ViTExport


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


def test_a_checkpoint_becomes_an_export(bench, dino_file, tmp_path):
    code, out, _ = bench("import", dino_file, "--out", tmp_path / "export", "--heads", "3", "--name", "tiny")
    assert code == 0
    assert f"{dino_file}: recognised as dino" in out
    assert "dino_tiny.pth, sha256 " in out and "dropped: " in out and "depth 2, width 12, 3 heads" in out
    assert f"written and verified: {tmp_path / 'export'}" in out
    code, out, _ = bench("verify", tmp_path / "export")
    assert code == 0 and "activations agree" in out
    assert ViTExport.load(tmp_path / "export").facts["name"] == "tiny"


def test_inspect_takes_the_options_of_imports(bench, refused, dino_file, tmp_path):
    code, out, _ = bench("inspect", dino_file, "--heads", "3", "--branch", "student")
    assert code == 0 and "branch       student" in out and "3 heads" in out
    assert "assumed      ImageNet's mean and std (--statistics)" in out
    code, out, _ = bench("inspect", dino_file, "--heads", "3", "--statistics", "0.49,0.48,0.45,0.25,0.24,1")
    assert code == 0 and "mean 0.49 0.48 0.45, std 0.25 0.24 1\n" in out and "assumed" not in out
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


def test_a_folder_of_somebody_else_is_not_overwritten(refused, dino_file, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    refused("import", dino_file, "--out", tmp_path, "--heads", "3", named=f"--out {tmp_path}: | not an export")
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_foreign_file_is_imported_once_by_run(bench, toys, exports, dino_file, tmp_path, monkeypatch):
    from checkpoints import importing

    monkeypatch.setitem(importing.HEADS, 12, 3)
    out = tmp_path / "out"
    words = ["run", "--checkpoint", dino_file, "--suite", "toy@one", "--data", "tiny=tiny:", "--out", out]
    assert bench(*words, "--dry-run")[0] == 0
    assert not out.exists()
    assert bench(*words)[0] == 0
    (saved,) = (out / "exports").iterdir()
    digest = ViTExport.load(saved).digest
    assert saved.name == f"dino_tiny-{digest[:8]}"
    words[2] = saved  # the saved export stands for the file that it came from
    code, said, _ = bench(*words)
    assert code == 0 and "0 done, 1 skipped" in said


@pytest.mark.parametrize("saved", [True, False])
def test_another_run_may_save_the_same_import_first(saved, bench, toys, dino_file, tmp_path, monkeypatch):
    from checkpoints import importing

    monkeypatch.setitem(importing.HEADS, 12, 3)
    save = ViTExport.save

    def save_too_late(export, folder):
        if saved:
            save(export, folder)
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(ViTExport, "save", save_too_late)
    words = ["run", "--checkpoint", dino_file, "--suite", "toy@one", "--data", "tiny=tiny:", "--out", tmp_path / "out"]
    assert bench(*words)[0] == (0 if saved else 2)


def test_inspect_shows_what_there_is_to_know(bench, exports):
    code, out, _ = bench("inspect", exports[0])
    assert code == 0
    for text in ("ViT-12x2/16", "0.485 0.456 0.406", "bicubic", "random.pth", "7 decoder", "student"):
        assert text in out
    assert ViTExport.load(exports[0]).digest in out
    assert "the recorded activations are reproduced" in out


def altered(export: Path, folder: Path, change) -> Path:
    """A copy of the export whose config was changed."""
    shutil.copytree(export, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shift_block(config: dict) -> None:
    config["vit_export"]["fingerprint"]["block 1"]["mean"] += 1.0


def shift_statistics(config: dict) -> None:
    config["vit_export"]["preparation"]["mean"] = [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift_block, "DIFFERS, first at block 1: differs by 1"),
        (shift_statistics, "DIFFERS, first at block 0"),
    ],
)
def test_an_export_that_changed_is_found(change, message, bench, toys, exports, tmp_path):
    folder = altered(exports[0], tmp_path / "changed", change)
    code, out, _ = bench("verify", folder)
    assert code == 1 and message in out
    code, _, err = bench(
        "run", "--checkpoint", folder, "--suite", "toys", "--data", "tiny=tiny:", "--out", tmp_path / "o"
    )
    assert code == 2 and "import it again" in err


TIMM_HALF = {
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
    return altered(export, folder, lambda config: (config[part] if part else config).update({name: value}))


@pytest.mark.parametrize("key", TIMM_HALF)
def test_what_timm_reads_is_part_of_the_proof(key, bench, exports, tmp_path):
    folder = with_timm_setting(exports[0], tmp_path / "changed", key, TIMM_HALF[key])
    code, out, _ = bench("verify", folder)
    assert code == 1 and f"what timm reads was changed: {key} is {TIMM_HALF[key]}, not " in out
    code, _, err = bench("inspect", folder)
    assert code == 2 and key in err and "import it again" in err


@pytest.mark.parametrize(("key", "value"), [("pretrained_cfg.license", "MIT"), ("pretrained_cfg.tag", "a"), ("hub", 1)])
def test_what_only_describes_is_not_part_of_the_proof(key, value, bench, exports, tmp_path):
    assert bench("verify", with_timm_setting(exports[0], tmp_path / "changed", key, value))[0] == 0


@pytest.mark.parametrize("key", ["model_args", "pretrained_cfg"])
def test_a_config_without_timms_half_is_no_export(key, bench, exports, tmp_path):
    folder = with_timm_setting(exports[0], tmp_path / "changed", key, None)
    code, out, _ = bench("verify", folder)
    assert code == 1 and "is not a ViT-export" in out


class TestImportIntoAnExport:
    """An export is replaced by the same one, or when asked."""

    def test_the_same_again_is_said(self, bench, dino_file, tmp_path):
        """Also where the statistics that were assumed are given: exports of earlier versions do not say them."""
        words = ["import", dino_file, "--out", tmp_path / "export", "--heads", "3"]
        assert bench(*words)[0] == 0
        written = (tmp_path / "export" / "config.json").stat().st_mtime_ns
        for more in ((), ("--statistics", "imagenet")):
            code, out, _ = bench(*words, *more)
            assert code == 0 and f"the same export was there already, now verified: {tmp_path / 'export'}" in out
            assert (tmp_path / "export" / "config.json").stat().st_mtime_ns == written

    @pytest.mark.parametrize(
        ("words", "difference"),
        [(["--branch", "student"], "holds another export (digest "), (["--name", "b"], "(name None, not 'b')")],
    )
    def test_another_one_is_kept_without_force(self, words, difference, bench, dino_file, tmp_path):
        common = ["import", dino_file, "--out", tmp_path / "export", "--heads", "3"]
        assert bench(*common)[0] == 0
        before = (tmp_path / "export" / "config.json").read_bytes()
        code, _, err = bench(*common, *words)
        assert code == 2 and err.count("\n") == 1 and difference in err and "add --force" in err
        assert (tmp_path / "export" / "config.json").read_bytes() == before
        assert bench(*common, *words, "--force")[0] == 0
        assert (tmp_path / "export" / "config.json").read_bytes() != before

    def test_a_damaged_one_is_kept_without_force(self, bench, dino_file, tmp_path):
        common = ["import", dino_file, "--out", tmp_path / "export", "--heads", "3"]
        assert bench(*common)[0] == 0
        (tmp_path / "export" / "model.safetensors").write_bytes(b"lost")
        code, _, err = bench(*common)
        assert code == 2 and "cannot be read" in err and "add --force" in err
        assert bench(*common, "--force")[0] == 0 and bench("verify", tmp_path / "export")[0] == 0


def test_verify_names_the_exports_of_a_training(bench, refused, exports, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    refused("verify", tmp_path, named="one of its exports: none yet | bench export")
    for name in ("export", "export-teacher"):
        (tmp_path / name).symlink_to(exports[0])
    refused("verify", tmp_path, named=f"{tmp_path / 'export'}, {tmp_path / 'export-teacher'}")
    assert bench("verify", tmp_path / "export")[0] == 0


def test_data_check_finds_what_to_fix(bench, tmp_path):
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            (tmp_path / split / label / "x.png").write_bytes(b"no image")
    code, out, _ = bench("data", "check", f"folder:{tmp_path}")
    assert code == 1 and "FIX: 4 unreadable images" in out
    code, out, _ = bench("data", "check", f"folder:{tmp_path}", "--list-only")
    assert code == 0 and "listed, not decoded" in out


def test_an_unknown_scheme_names_the_sets_of_scenes_too(refused, exports, tmp_path):
    run = ("run", "--checkpoint", exports[0], "--suite", "smoke", "--out", tmp_path, "--data")
    for words in (("data", "check", "ade20:/data"), (*run, "x=ade20:/data")):
        err = refused(*words, named="did you mean 'ade20k:/data'?")
        for scheme in ("images:PATH", "ade20k:ROOT", "cityscapes:ROOT", "coco:ROOT", "tiny-ade20k:", "tiny-coco:"):
            assert f" {scheme}" in err


def test_an_export_below_a_file_is_refused_before_the_import(refused, dino_file, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "export"
    refused("import", dino_file, "--out", out, "--heads", "3", named=f"--out: Not a directory: {out};")


@pytest.mark.parametrize("content", [b"5", b"[]", b"\xff\xfe", b"{"])
@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("import", "--out", "OUT"), ("run", "--suite", "knn")])
def test_a_folder_with_a_strange_config_is_one_line_that_names_it(content, command, refused, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_bytes(content)
    first, *more = [tmp_path / "o" if word == "OUT" else word for word in command]
    given = ("--checkpoint", folder, "--data", "tiny=tiny:", "--out", tmp_path / "o") if first == "run" else (folder,)
    assert str(folder) in refused(first, *given, *more)


def test_not_all_bad_scenes_are_listed(bench, monkeypatch):
    """A classes.txt that lacks a line is a problem of every mask."""
    wrong = dict.fromkeys(range(15), "wrong")
    monkeypatch.setattr("downstream.data.scenes.decode_scenes", lambda scenes, advance: (wrong, None))
    code, out, _ = bench("data", "check", "tiny-masks:")
    assert code == 1 and out.count("  FIX: wrong\n") == 20 and out.endswith("  and 10 more scenes with problems\n")


def test_scenes_that_are_not_there_are_one_thing_to_fix(bench, tmp_path):
    code, out, err = bench("data", "check", f"masks:{tmp_path}")
    assert code == 1 and not err and out.count("FIX: ") == 1
    assert f"  FIX: masks:{tmp_path}: no folder images/ there; put images into images/train" in out


def test_statistics_of_a_file_that_names_none(bench, toys, exports, tmp_path):
    """As `bench import` and `bench inspect` take them; whatever names its own is not asked."""
    import timm

    def run(*words: object, checkpoint=exports[0]) -> tuple[int, str, str]:
        options = ("--out", tmp_path / "out", "--data", "tiny=tiny:")
        return bench("run", "--checkpoint", checkpoint, "--suite", "toys", *options, *words)

    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    mine = f"timm:{tmp_path / 'mine.pth'}"
    code, _, err = run(checkpoint=mine)
    assert code == 2 and "; use --statistics imagenet (as DeiT), half " in err.splitlines()[-1]
    assert run("--statistics", "half", checkpoint=mine)[0] == 0
    (export,) = (tmp_path / "out" / "exports").iterdir()
    assert ViTExport.load(export).mean == (0.5, 0.5, 0.5)
    code, said, _ = bench("inspect", mine, "--statistics", "clip")
    assert code == 0 and "mean 0.481455 0.457827 0.408211" in said
    code, _, err = run("--statistics", "half")
    assert code == 2 and "is an export already: only its image size can change" in err.splitlines()[-1]
