"""`bench pretrain`: what it prints, writes and refuses, and that online probes do not change the training."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from small_trainings import in_shards
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written import lines_of

import bench as bench_api
from bench.pretraining.run import training_precision
from bench.results.record import read_result
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from imagesets.sets import open_set
from pretrain.methods import mae

SMALL = ("batch=16", "depth=1", "width=16", "heads=2", "mlp_hidden=32", "decoder_width=16")
CHANGED = "smoke with batch=16 decoder_width=16 width=16 depth=1 heads=2 mlp_hidden=32"
MAE_SPEC = mae.RECIPES["smoke"].spec
WORDS = ("mae", "--recipe", "smoke", "--images", "tiny:", "--workers", "0", "--set", *SMALL)


@pytest.fixture
def pretrain(bench, tmp_path):
    """Call `bench pretrain` on the tiny images: `code, out, err = pretrain("--resume")`; --out is a new folder."""

    def call(*words: object, out: Path = tmp_path / "run") -> tuple[int, str, str]:
        return bench("pretrain", *WORDS, "--out", out, *words)

    return call


@pytest.fixture
def refused_pretrain(refused, tmp_path):
    """The same of a `bench pretrain` that must be refused: `refused_pretrain("--set", "lr=0", named="lr")`."""

    def call(*words: object, named: str, out: Path = tmp_path / "run") -> str:
        return refused("pretrain", *WORDS, "--out", out, *words, named=named)

    return call


def test_a_training_ends_with_an_export_and_the_command_to_evaluate_it(pretrain, bench, tmp_path):
    code, out, _ = pretrain()
    assert code == 0 and out.startswith(f"mae, recipe {CHANGED}: ours")
    export = ViTExport.load(tmp_path / "run/export")
    assert (export.spec.width, export.spec.depth, export.facts["epochs"]) == (16, 1, 2.0)
    assert export.facts["recipe"] == CHANGED
    finished, command = out.splitlines()[-2:]
    assert finished == f"finished after 8 updates; the encoder is in {tmp_path / 'run/export'}"
    assert re.search(r"^it took [\d.e-]+ (s|min), .* GFLOP an image, [\d.]+ GiB on 1 x CPU, ", out, flags=re.MULTILINE)
    code, inspected, _ = bench("inspect", tmp_path / "run/export")
    assert code == 0 and re.search(r"^  cost +[\d.e-]+ (s|min), .* on 1 x CPU, ", inspected, flags=re.MULTILINE)
    words = shlex.split(command.removeprefix("evaluate it: bench "))
    assert words[words.index("--data") + 1] == "tiny=tiny:"
    words[words.index("frozen")], words[-1] = "knn@dino", tmp_path / "results"
    code, out, _ = bench(*words)
    assert code == 0 and "mae-smoke: mae, ViT-16x1/4" in out


def test_a_training_starts_from_the_encoder_of_another_training(pretrain, refused_pretrain, tmp_path):
    assert pretrain()[0] == 0
    first = ViTExport.load(tmp_path / "run/export")
    code, out, _ = pretrain("--init", tmp_path / "run", "--freeze-first-epochs", 1, out=tmp_path / "on")
    assert code == 0 and "smoke from mae-smoke" in out and "other parameters are drawn" in out
    start = ViTExport.load(tmp_path / "on/start")
    assert start.digest == first.digest and start.facts["init"]["digests"] == [first.digest]
    assert ViTExport.load(tmp_path / "on/export").digest != first.digest
    refused_pretrain("--init", tmp_path / "run", "--set", "width=32", out=tmp_path / "wide", named="--init | width=16")


def test_assumptions_on_the_checkpoint_are_printed(pretrain, tmp_path):
    facts = {"assumed": ["the image statistics of ImageNet"]}
    ViTExport.from_vit(ViT(MAE_SPEC), Preparation(), facts).save(tmp_path / "imported")
    sizes = ("--set", "width=64", "depth=4", "heads=4", "mlp_hidden=256", "--dry-run")
    code, out, _ = pretrain("--init", tmp_path / "imported", *sizes)
    assert code == 0 and "  assumed   the image statistics of ImageNet\n" in out


def test_options_of_an_import_are_advised_for_bench_import(refused_pretrain, tmp_path):
    """A training has no --statistics."""
    weights = {name.removeprefix("trunk."): tensor for name, tensor in ViT(MAE_SPEC).state_dict().items()}
    torch.save(weights, tmp_path / "vit.pth")
    reference = f"timm:{tmp_path / 'vit.pth'}"
    refused_pretrain("--init", reference, named=f"bench import {reference} --statistics")


def test_a_name_like_an_option_of_an_import_is_no_advice(tmp_path):
    reference = str(tmp_path / "heads-of-mine" / "branch")
    message = refusal(bench_api.pretrain, "mae", "smoke", "tiny:", tmp_path / "run", init=reference)
    assert reference in message and "option of imports" not in message


def test_a_dry_run_prints_the_whole_plan_and_writes_nothing(pretrain, tmp_path):
    code, out, _ = pretrain("--dry-run", "--micro-batch", "4", "--knn-every", "5", "--set", "mask_ratio=0.5", "clip=3")
    assert code == 0 and list(tmp_path.iterdir()) == []
    values = {"lr": "0.00025", "lr_batch": "0", "betas": "0.9,0.95", "clip": "3.0", "schedule.warmup": "0.5"}
    for name, value in (values | {"mask_ratio": "0.5", "width": "16"}).items():
        assert f"    {name} = {value}\n" in out
    assert "  encoder   ViT-16x1/4 at 16 px, " in out
    assert "  images    64 of tiny:; synthetic shapes" in out
    assert "  updates   8: 2 epochs of 4, 16 images in each update; 0 images of each epoch are left out\n" in out
    assert "  forward   micro-batches of 4 images; 4 x 1 of these (micro-batches x processes) make an update" in out
    assert f"  exports   {tmp_path / 'run/export'} (encoder)\n" in out and "  note  " not in out
    assert out.endswith("nothing was trained or written (--dry-run)\n")


def test_notes_name_settings_that_do_not_do_what_their_values_say(bench, tmp_path):
    words = ("pretrain", "ibot", "--recipe", "smoke", "--images", "tiny:", "--out", tmp_path / "run", "--dry-run")
    code, out, _ = bench(*words, "--micro-batch", "16", "--set", "head_norm=bn", "batch=64")
    assert code == 0 and "  note      teacher_warmup=30 is longer than the training of 2 epochs" in out
    assert "  note      the loss depends on the other images of a forward pass, here 16 of a batch of 64: " in out


def test_a_folder_of_other_files_is_refused(refused_pretrain, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").touch()
    refused_pretrain(named="holds other files")


MULTISTEP = ("schedule=Multistep", "schedule.start=0")
WRONG = [
    (["mea"], "'mea' | did you mean 'mae'?"),
    (["mae"], "--recipe | mae | vit_b, "),
    (["mae", "--recipe", "smoky"], "--recipe: | 'smoky' | did you mean 'smoke'? | vit_b, "),
    (["--set", "epoch=1"], "did you mean 'epochs'? | bench list mae"),
    (["--set", "epochs"], "--set epochs: | FIELD=VALUE | epochs=10"),
    (["--set", "epochs=0"], "--set epochs=0: | at least 1"),
    (["--set", "epochs=2", "schedule.warmup=2"], "--set: | schedule.warmup=2.0 | epochs=2"),
    (["--set", "source=me"], "--set source: | no such setting"),
    (["--set", "schedule=3"], "--set schedule=3: | WarmupCosine, TableCosine, Multistep, CosineTo, Constant"),
    (["--set", "schedule=Multistep"], "--set schedule=Multistep: | schedule.milestones"),
    (["--set", *MULTISTEP, "schedule.milestones=1,3"], "--set: | schedule.milestones=(1.0, 3.0) | epochs=2"),
    (["--set", *MULTISTEP, "schedule.start=-1", "schedule.milestones=1"], "--set schedule.start=-1: | from 0 to 1"),
    (["--set", "schedule=Constant", "schedule.floor=1"], "--set schedule.floor=1: | Constant | 'floor'"),
    (["--set", "weight_decay_schedule=CosineTo"], "CosineTo: | weight_decay_schedule.end"),
    (["--set", "width=90", "heads=4"], "--set: | heads=4 | width=90"),
    (["--set", "patch_size=5"], "--set: | image_size=16 | patch_size=5"),
    (["--set", "mask_ratio=0.99"], "mae smoke: | mask_ratio=0.99 | 0 of 16"),
    (["--set", "decoder_heads=3"], "mae smoke: | decoder_heads=3 | decoder_width="),
    (["--set", "batch=65"], "mae smoke: | batch=65 | tiny: | --set batch=64"),
    (["--precision", "float16"], "--precision float16: | CPU"),
    (["--save-minutes", "0"], "--save-minutes: '0' | above 0"),
    (["--images", "digitz:"], "--images digitz:: | unknown scheme"),
    (["--knn-data", "digits:", "--knn-k", "5"], "--knn-data: | --knn-every 1"),
    (["--health-limit", "9"], "--health-limit: | --health-every 1"),
    (["--knn-every", "1", "--knn-data", "folder:/nowhere"], "--knn-data folder:/nowhere: no folder /nowhere"),
]


@pytest.mark.parametrize("url", ["folder:{}", "{}"])
def test_a_folder_without_labels_is_refused_with_the_scheme_for_it(url, refused, tmp_path):
    words = ("pretrain", *WORDS, "--out", tmp_path / "run", "--images", url.format(tmp_path))
    refused(*words, named=f"labels | images:{tmp_path} ")


@pytest.mark.parametrize(("words", "named"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_wrong_request_is_refused_in_one_line_before_anything_is_written(words, named, refused, tmp_path):
    recipe = [] if words[0].startswith("m") else ["mae", "--recipe", "smoke"]
    images = [] if "--images" in words else ["--images", "tiny:"]
    refused("pretrain", *recipe, *words, *images, "--out", tmp_path / "run", named=named)
    assert list(tmp_path.iterdir()) == []


def test_missing_wandb_is_reported_before_anything_is_written(refused_pretrain, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused_pretrain("--wandb", "project", named="pip install 'ssl-vit-bench[wandb]'")
    assert list(tmp_path.iterdir()) == []


def test_precision_follows_the_device():
    chosen = [training_precision("auto", device) for device in ("cpu", "cuda", "cuda:1")]
    assert chosen == ["float32", "bfloat16", "bfloat16"]
    assert training_precision("float16", "cuda") == "float16"
    assert training_precision("bfloat16", "cpu") == "bfloat16"


def test_fast_decoding_is_recorded_and_never_mixed_with_exact(pretrain, refused_pretrain, tmp_path):
    for decode, other in (("fast", "exact"), ("exact", "fast")):
        out = tmp_path / decode
        assert pretrain("--decode", decode, out=out)[0] == 0
        for facts in (json.loads((out / "run.json").read_text()), ViTExport.load(out / "export").facts):
            assert facts.get("decode", "exact") == decode
        refused_pretrain("--resume", "--decode", other, out=out, named="holds another run: decode is ")
    digests = [ViTExport.load(tmp_path / decode / "export").digest for decode in ("exact", "fast")]
    assert digests[0] != digests[1]


def test_shards_sorted_by_class_are_warned_about(pretrain, tmp_path):
    """Shards of one class each are advised against; shards packed in random order are not."""
    images = open_set("tiny:", "train").limited(32)
    by_class = images.subset(np.argsort(images.labels, kind="stable"), "by-class")
    for name, image_set, shuffled in (("mixed", images, True), ("sorted", by_class, False)):
        url = in_shards(tmp_path / name, 8, image_set, shuffled=shuffled)
        code, out, _ = pretrain("--images", url, "--shuffle-window", 2, "--dry-run")
        (line,) = (line for line in out.splitlines() if line.startswith("  order "))
        assert code == 0 and "2 of 8 shards" in line and "8 images" in line
        assert ("pack the shards in random order" in line) is not shuffled


def test_resume_starts_a_new_training_and_leaves_a_finished_one_alone(pretrain, refused_pretrain, tmp_path):
    (tmp_path / "run").mkdir()
    assert pretrain("--resume", "--set", "clip=3", "mask_ratio=0.5")[0] == 0
    written = (tmp_path / "run/log.jsonl").read_text()
    refused_pretrain("--set", "clip=3", "mask_ratio=0.5", named="holds this run already | --resume | --out")
    code, out, _ = pretrain("--resume", "--set", "mask_ratio=0.5", "clip=3")  # the same changes in another order
    assert code == 0 and "finished after 8 updates" in out
    assert (tmp_path / "run/log.jsonl").read_text() == written
    words = ("--resume", "--set", "clip=3", "mask_ratio=0.5", "lr=0.5")
    refused_pretrain(*words, named="settings.lr is 0.00025, asked for 0.5 | --out")


def test_a_schedule_is_chosen_by_name(pretrain, tmp_path):
    """SimMIM's schedule for MAE: settings of both schedules keep their values, whatever the order of the changes."""
    words = ("schedule.milestones=1", "schedule=Multistep", "schedule.start=0.1")
    decay = ("weight_decay_schedule=CosineTo", "weight_decay_schedule.end=0.2")
    code, out, _ = pretrain("--dry-run", "--set", *words, *decay)
    assert code == 0 and "with batch=16 schedule.start=0.1 schedule.milestones=1.0" in out
    values = {"schedule": "Multistep", "schedule.warmup": "0.5", "schedule.factor": "0.1"}
    for name, value in (values | {"weight_decay_schedule.end": "0.2"}).items():
        assert f"    {name} = {value}\n" in out
    assert pretrain("--set", *words)[0] == 0
    rates = [line["lr"] for line in lines_of(tmp_path / "run")]
    assert rates[-1] == pytest.approx(0.1 * 0.00025) and max(rates) == 0.00025
    settings = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert settings["schedule"]["name"] == "Multistep" and settings["weight_decay_schedule"] == {"name": "Constant"}


def test_unlabelled_images_are_trained_on_but_not_probed(pretrain, refused, refused_pretrain, tmp_path):
    images = open_set("tiny:", "train")
    for index in range(32):
        folder = tmp_path / "pile" / str(index % 3)
        folder.mkdir(parents=True, exist_ok=True)
        images.image(index).save(folder / f"{index}.png")
    url = f"images:{tmp_path / 'pile'}"
    code, out, _ = pretrain("--images", url)
    assert code == 0 and f"32 of {url}; no labels: for pretraining alone" in out
    assert "--data NAME=folder:PATH" in out
    export = tmp_path / "run/export"
    words = ("run", "--checkpoint", export, "--suite", "knn", "--data", f"x={url}", "--out", tmp_path / "r")
    refused(*words, named="these images have no labels")
    message = f"--knn-data {url}: these images have no labels | other images with --knn-data"
    refused_pretrain("--images", url, "--knn-every", "1", out=tmp_path / "other", named=message)
    (tmp_path / "pile/0/0.png").write_bytes(b"")
    code, _, err = pretrain("--images", url, out=tmp_path / "other")
    assert code == 2 and f"{tmp_path / 'pile/0/0.png'}: cannot be read as an image (empty file" in err
    code, out, _ = pretrain("--images", url, "--skip-bad", out=tmp_path / "third")
    assert code == 0 and "1 unreadable images were replaced by their neighbours" in out
    assert ViTExport.load(tmp_path / "third/export").facts["skipped_images"] == 1


def test_online_probes_equal_bench_run_and_do_not_change_the_training(pretrain, bench, tmp_path):
    """k-NN every epoch and health every second one."""
    code, _, err = pretrain("--knn-every", "1", "--health-every", "2")
    assert code == 0 and pretrain(out=tmp_path / "plain")[0] == 0
    watched, plain = tmp_path / "run", tmp_path / "plain"
    assert [path.name for path in watched.glob("states/*")] == [path.name for path in plain.glob("states/*")]
    assert ViTExport.load(watched / "export").digest == ViTExport.load(plain / "export").digest
    knn_lines = [line for line in lines_of(watched) if "knn_top1" in line]
    assert f"epoch 2: knn_top1 {knn_lines[-1]['knn_top1']:.2f}, knn_top5 " in err
    assert [line["step"] for line in knn_lines] == [4, 8] and not any("knn_top1" in line for line in lines_of(plain))
    board = EventAccumulator(str(watched / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("knn_top1")] == [4, 8]
    assert board.Scalars("knn_top1")[-1].value == pytest.approx(knn_lines[-1]["knn_top1"])
    assert not (watched / "online-features").exists()
    (health,) = [line for line in lines_of(watched) if "health_rankme" in line]
    assert health["step"] == 8 and f"health_rankme {health['health_rankme']:.2f}" in err
    pool = f"health.pool={ViTExport.load(watched / 'export').spec.pool}"
    words = ("--suite", "knn@dino,health@val", "--set", pool, "--data", "tiny=tiny:", "--out", tmp_path / "results")
    assert bench("run", "--checkpoint", watched / "export", *words)[0] == 0
    metrics = {
        path.name.partition("@")[0]: json.loads(path.read_text())["metrics"]
        for path in (tmp_path / "results/results").rglob("*.json")
    }
    assert all(metrics["knn"][f"{top}_k20"]["value"] == knn_lines[-1][f"knn_{top}"] for top in ("top1", "top5"))
    assert metrics["health"].keys() == {name.removeprefix("health_") for name in health} - {"step", "warnings"}
    assert all(metric["value"] == health[f"health_{name}"] for name, metric in metrics["health"].items())


def test_a_collapse_is_reported_in_one_warning(pretrain, tmp_path):
    """On unlabelled images of nearly one colour, which have no held-out split."""
    folder = tmp_path / "alike"
    folder.mkdir()
    for number in range(40):
        Image.new("RGB", (16, 16), (90, 20, number % 2)).save(folder / f"{number}.png")
    code, _, err = pretrain("--health-every", "2", "--health-data", f"images:{folder}")
    warnings = [line for line in err.splitlines() if "collapsed" in line]
    assert code == 0 and len(warnings) == 1 and "epoch 2" in warnings[0] and f"images:{folder}" in warnings[0]
    (line,) = [line for line in lines_of(tmp_path / "run") if "health_rankme" in line]
    assert line["health_rankme"] < 1.5 and len(line["warnings"]) == 1


def test_online_knn_has_the_options_of_the_protocol(pretrain, bench, tmp_path):
    """ExtreMA's figures 4 and 5 have k=200 on 10 % of the training images; here k=7 on half of 50 digits."""
    options = ("--knn-data", "digits:", "--knn-limit", "50", "--knn-k", "7", "--knn-fraction", "0.5")
    code, out, _ = pretrain("--knn-every", "2", *options)
    assert code == 0 and "  k-NN      k=7 on 0.5 of digits:, every 2 epochs\n" in out
    (line,) = [line for line in lines_of(tmp_path / "run") if "knn_top1" in line]
    words = ("--suite", "knn_online@extrema", "--set", "knn.k=7", "knn.fraction=0.5", "--data", "digits=digits:")
    words = (*words, "--limit", 50, "--out", tmp_path / "results")
    assert bench("run", "--checkpoint", tmp_path / "run/export", *words)[0] == 0
    (path,) = (tmp_path / "results").rglob("knn_online@extrema*.json")
    assert line["step"] == 8 and read_result(path).numbers["top1_k7"] == line["knn_top1"]
