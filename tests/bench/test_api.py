"""`import bench`: the code of docs/python.md runs, results equal those of the command line, errors are one line."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import bench as api
from bench.cli import parsed
from bench.results.record import read_result, result_files
from bench.results.table import Results
from checkpoints.export import ViTExport
from engine.training.interruptions import Stopped
from probes.features.kinds import FeatureKind

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "checkpoints", "matplotlib", "rich", "jinja2"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_code_of_docs_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/python.md").read_text()
    names: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(code, "docs/python.md", "exec"), names)
    printed, _ = capsys.readouterr()
    assert printed.startswith("ViT-64x2/4 16 px")
    assert "mae, knn@dino on digits: top1_k10 " in printed
    assert "did you mean 'knn@dino'" in printed.splitlines()[-1]
    assert names["own"].score(names["val"].features, names["val"].labels) > 0.5
    assert names["result"].data.name == "digits" and names["short"].settings["k"] == [5]
    assert names["sample"].features.shape == (100, 64)
    assert [result.checkpoint.name for result in names["results"]] == ["pixels", "mae", "initial"]
    assert names["again"].digest == names["encoder"].digest != ViTExport.load("runs/mae/start").digest
    records = {row["checkpoint"]: row for row in names["board"].records if row["metric"] == "top1_k20"}
    assert records["mae"]["value"] == names["results"][1].numbers["top1_k20"] and records["mae"]["low"] > 0
    assert names["page"].read_text().startswith("<!")
    html = names["board"]._repr_html_()
    assert html.startswith("<iframe") and all(checkpoint.name in html for checkpoint in names["board"].rows)


def test_python_and_command_line_share_results(bench, exports, tmp_path):
    words = ("--checkpoint", exports[0], "--data", "digits=digits:", "--limit", 60, "--out", tmp_path)
    code, _, err = bench("run", *words, "--suite", "knn@dino")
    assert code == 0, err
    (path,) = result_files(tmp_path)
    export = api.load(exports[0])
    result = api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path)
    assert result == read_result(path)  # its date too: nothing was measured again
    api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path, settings={"k": (5, 7)})
    code, output, _ = bench("run", *words, "--suite", "knn", "--set", "knn@dino.k=5,7")
    assert code == 0 and "knn@dino on digits with k=5+7: exists, skipped" in output
    assert api.evaluate(exports[0], "knn@dino", "digits:", limit=60, out=tmp_path, rerun=True).date >= result.date


def test_extract_returns_the_features_that_a_run_cached(exports, tmp_path):
    export = api.load(exports[0])
    api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path)
    val = api.extract(exports[0], "digits:", limit=60, out=tmp_path)
    assert val.forwards == 0 and val.features.shape == (60, 12) and val.labels.shape == (60,)
    patches = api.extract(export, "mine=digits:", "val", pool="avg", layer=0, norm=False, limit=60, out=tmp_path)
    assert list(patches.arrays) == [FeatureKind("avg", 0, False)] and patches.forwards == 60
    assert not np.array_equal(patches.features, val.features)


def test_an_export_keeps_its_name_when_it_is_saved_elsewhere(exports, tmp_path):
    assert api.load(exports[0]).facts["name"] == "first"
    assert api.load("pixels:16").facts["name"] == "pixels-16"
    saved = api.load(exports[0]).save(tmp_path / "other")
    assert api.load(saved).facts["name"] == "first"


GREY = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8) // 4 + 60 * (np.arange(60) % 3)[:, None, None]
CLASSES = [["dark", "grey", "light"][number % 3] for number in range(60)]


def small_network() -> torch.nn.Module:
    """One vector (B, 6) of an image, as a CNN without its classifier gives it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 6, 4, stride=4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


def test_a_module_and_arrays_are_evaluated_in_one_call(tmp_path):
    network = small_network().train()
    settings = dict(images=GREY.astype(np.uint8), labels=CLASSES, image_size=16, statistics="half", out=tmp_path)
    first = api.evaluate(network, "knn@dino", "greys", **settings)
    assert (first.checkpoint.name, first.data.name) == ("Sequential", "greys")
    assert first.data.images == {"train": 48, "val": 12}
    assert first.metrics["top1_k10"].value == 100 and network.training
    # Same weights and code: nothing is measured again, as the date shows.
    assert api.evaluate(small_network(), "knn@dino", "greys", **settings) == first
    with torch.no_grad():
        network[0].weight[0] += 1
    assert api.evaluate(network, "knn@dino", "greys", **settings).checkpoint.digest != first.checkpoint.digest
    settings["forward"] = lambda network, images: network(images)[:, :3]
    other = api.evaluate(network, "knn@dino", "greys", **settings)
    assert len({path.parent for path in result_files(tmp_path)}) == 3 and other.metrics["top1_k10"].value == 100


def test_a_suite_takes_several_checkpoints_and_torch_datasets(exports, tmp_path):
    class Greys(torch.utils.data.Dataset):
        def __init__(self, indices):
            self.indices = indices

        def __len__(self):
            return len(self.indices)

        def __getitem__(self, position):
            index = self.indices[position]
            return torch.from_numpy(GREY[index]).float()[None] / 255, index % 3

    pair = (Greys(range(40)), Greys(range(40, 60)))
    network = api.load(small_network(), image_size=16, statistics="half")
    results = api.evaluate_suite([network, exports[0]], "knn@dino", {"a": pair, "b": "digits:"}, limit=30, out=tmp_path)
    names = [(result.checkpoint.name, result.data.name) for result in results]
    assert names == [("Sequential", "a"), ("Sequential", "b"), ("first", "a"), ("first", "b")]
    assert api.extract(network, pair, "train", out=tmp_path).features.shape == (40, 6)
    frame = results.to_pandas()
    assert len(frame) == sum(len(result.metrics) for result in results)
    top1 = results[0].metrics["top1_k10"]
    assert (frame.value[0], frame.low[0]) == (top1.value, top1.interval[0])
    assert Results(results[2:3])._repr_html_().count("<tr>") == 1 + len(results[2].metrics)
    board = api.leaderboard(tmp_path).to_pandas()
    assert set(board.checkpoint) == {"Sequential", "first"}


def test_timm_networks_in_memory_are_loaded():
    network = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=3).train()
    export = api.load(network, statistics="half")
    assert isinstance(export, ViTExport) and export.mean == (0.5, 0.5, 0.5) and network.training
    assert export.facts["name"] == "vit_tiny_patch16_224" and export.facts["dropped"] == {"classifier": 2}
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(export.build()(images)[0], network.eval().forward_features(images), atol=1e-5)
    assert api.load(export) is export
    cnn = timm.create_model("resnet18", num_classes=7)
    frozen = api.load(cnn, image_size=32)
    with torch.no_grad():
        pooled = cnn.eval().forward_head(cnn.forward_features(images), pre_logits=True)
    assert torch.allclose(frozen.build()(images)[0][:, 0], pooled, atol=1e-5)
    assert (frozen.spec.size, frozen.facts["name"]) == ((32, 32), "resnet18")
    assert frozen.mean == pytest.approx((0.485, 0.456, 0.406))


def test_a_layer_that_looks_like_a_classifier_is_reported(capsys):
    class Net(torch.nn.Module):
        image_size, mean, std = 16, (0.5,) * 3, (0.5,) * 3

        def __init__(self):
            super().__init__()
            self.body, self.fc = small_network(), torch.nn.Linear(6, 10)

        def forward(self, images):
            return self.fc(self.body(images))

    assert "fc (6 -> 10)" in api.load(Net()).facts["assumed"][0]
    assert "Net: assumed: its layer fc (6 -> 10)" in capsys.readouterr().err
    net = Net()
    net.fc = torch.nn.Identity()
    assert "assumed" not in api.load(net).facts


def test_progress_is_heard_by_a_function_alone(exports, tmp_path, capsys):
    heard = []
    api.evaluate(exports[0], "knn@dino", "digits:", limit=30, out=tmp_path, progress=heard.append)
    assert "knn@dino on digits" in "\n".join(heard)
    api.evaluate(exports[0], "knn@dino", "digits:", limit=30, out=tmp_path, rerun=True)
    assert capsys.readouterr().out == ""


def test_visualize_and_the_version(exports, tmp_path):
    (path,) = api.visualize("pca", exports[0], "digits:", tmp_path, limit=2, image_size=32)
    assert path == tmp_path / "pca.png" and path.read_bytes()[:4] == b"\x89PNG"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", api.__version__)


def test_a_table_without_pandas_is_one_line(exports, tmp_path, monkeypatch):
    result = api.evaluate(exports[0], "knn@dino", "digits:", limit=30, out=tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for to_pandas in (Results([result]).to_pandas, api.leaderboard(tmp_path).to_pandas):
        with pytest.raises(ValueError, match=r"pandas is not installed.*\[tables\]") as caught:
            to_pandas()
        assert "\n" not in str(caught.value)


def evaluate(*images, **settings):
    """A call that evaluates an export under `knn@dino`."""
    return lambda export: api.evaluate(export, "knn@dino", *images, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda export: api.load(small_network()), r"image_size, mean, std; .*bench.load\(network, image_size="),
        (lambda export: api.load(small_network(), image_size=16, statistics="imagnet"), "^statistics='imagnet': give"),
        (lambda export: api.load(small_network(), image_size=16, heads=3), "image_size"),
        (lambda export: api.load(3), "type int; give"),
        (lambda export: api.load(export, forward=len), "^forward: it is for a torch.nn.Module"),
        (lambda export: api.load("nothing.pth"), "'nothing.pth': no such file .*timm:NAME"),
        (lambda export: api.evaluate(export, None, "digits:"), "^protocol: must be a text"),
        (lambda export: api.evaluate(export, "knn@dyno", "digits:"), "did you mean 'knn@dino'"),
        (lambda export: api.evaluate(export, "knn", "digits:"), "'knn': [0-9]+ protocols, such as"),
        (evaluate("digits:", settings={"q": 1}), "no setting 'q'"),
        (lambda export: api.pretrain("mae", "smoke", "digits:", "out", knn_every=-1), "^knn_every=-1: must"),
        (evaluate("digits:", select="test"), "^select='test': must be one of holdout"),
        (evaluate("digits:", options={}), "^options={}: must be"),
        (lambda export: evaluate("digits:", options=api.Options(device="tpu"))(export), "^device='tpu': "),
        (evaluate(), "which images"),
        (evaluate(images=GREY), "^images: give it with labels"),
        (evaluate(images=(GREY, GREY), labels=CLASSES), "each as a pair"),
        (evaluate([1, 2]), "memory:images/train/0: TypeError"),
        (evaluate({"train": (GREY, CLASSES), "test": (GREY, CLASSES)}), "^data: 2 image sets, train, test: give one"),
        (evaluate("x=digit:"), "^data='x=digit:': "),
        (evaluate("/no/where"), "^data='where=/no/where': "),
        (lambda export: api.evaluate_suite([export], "knn@dino", ["a=digits:"], names=["b", "c"]), "2 names for 1"),
        (lambda export: api.evaluate(export, "knn@dino", "digits:", name="b/c"), "name='b/c': "),
        (lambda export: api.extract("pixels:8", "digits:", pool="cls"), "layer -1; add pool='avg'"),
        (lambda export: api.extract(export, "digits:", layer=7), "layer 7: the model has 2 blocks"),
        (lambda export: api.extract(export, "digits:", options=api.Options(precision="float16")), "pretrain"),
        (lambda export: api.visualize("pcb", export, "digits:"), "^kind='pcb': .*'pca'"),
        (lambda export: api.visualize("pca", export, "digits:", formats=["jpg"]), "^formats='jpg': "),
        (lambda export: api.visualize("pca", export, "digits:", image_size="big"), "image_size='big'"),
        (lambda export: api.visualize("pca", export, "digits:", precision="half"), "precision='half'"),
        (lambda export: api.compare("first", "second"), "bench-results does not exist"),
        (lambda export: api.leaderboard("nowhere"), "nowhere does not exist"),
        (lambda export: api.leaderboard(formats=["tex"]), "'tex'; did you mean 'latex'"),
        (lambda export: api.pretrain("mae", "smoke", "digits:", "runs/a", settings={"q": 1}), "^settings='q': no such"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_result(call, message, exports, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        call(exports[0])
    assert "\n" not in str(caught.value)
    assert not list(result_files(tmp_path / "bench-results"))


def test_an_error_of_a_task_is_raised_and_recorded(exports, tmp_path, monkeypatch):
    def fails(task, export, space):
        raise RuntimeError("no neighbours")

    monkeypatch.setattr("probes.tasks.knn.Knn.run", fails)
    with pytest.raises(RuntimeError, match="no neighbours"):
        api.evaluate(exports[0], "knn@dino", "digits:", limit=60, out=tmp_path)
    (path,) = result_files(tmp_path)
    assert "no neighbours" in str(read_result(path))


def test_a_stopped_training_says_how_to_resume(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(
        "pretrain.loop.trainer.Trainer.train", lambda trainer, **_: trained.append(trainer) or "stopped"
    )
    with pytest.raises(Stopped, match="call it again with resume=True"):
        api.pretrain("mae", "smoke", "digits:", tmp_path, settings={"epochs": 3, "crop_scale": (0.5, 1.0)}, knn_every=2)
    (trainer,) = trained
    assert (trainer.recipe.epochs, trainer.run.monitor_every) == (3, 2)


def test_import_loads_nothing_heavy():
    code = f"import sys, bench; assert not {HEAVY!r} & sys.modules.keys(), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_module_has_the_name_of_a_function():
    for name in api.__all__:
        assert find_spec(f"bench.{name}") is None, f"importing bench/{name} would put it in the place of bench.{name}()"


def test_options_have_the_values_and_defaults_of_the_command_line():
    words = ["run", "--checkpoint", "pixels:8", "--suite", "knn", "--out", "results"]
    arguments = parsed(words)[1]
    for name in ("device", "precision", "decode", "skip_bad", "batch_size", "workers"):
        assert getattr(api.Options(), name) == getattr(arguments, name), name
    for word in ("auto", "float32", "bfloat16"):
        assert api.Options(precision=word).precision == parsed([*words, "--precision", word])[1].precision
