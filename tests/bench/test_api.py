"""`import bench`: the page's code as it stands, the same results as the command line's, and errors of one line."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bench as api
from bench.results.record import read_result, result_files
from checkpoints.export import ViTExport
from engine.training.interruptions import Stopped
from probes.features.kinds import FeatureKind

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "engine", "checkpoints", "matplotlib"}


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/python.md").read_text()
    names: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(code, "docs/python.md", "exec"), names)
    said, _ = capsys.readouterr()
    assert said.startswith("ViT-64x2/4 16 px")
    assert "mae, knn@dino on digits: top1_k10 " in said
    assert "did you mean 'knn@dino'" in said.splitlines()[-1]
    assert names["own"].score(names["val"].features, names["val"].labels) > 0.5
    assert (names["result"].data.name, names["short"].settings["k"], names["sample"].features.shape) == (
        "digits", [5], (100, 64)
    )  # fmt: skip
    assert [each.checkpoint.name for each in names["results"]] == ["pixels", "mae", "initial"]
    assert names["again"].digest == names["encoder"].digest != ViTExport.load("runs/mae/start").digest
    records = {each["checkpoint"]: each for each in names["board"].records if each["metric"] == "top1_k20"}
    assert records["mae"]["value"] == names["results"][1].numbers["top1_k20"] and records["mae"]["low"] > 0
    assert names["page"].read_text().startswith("<!")
    assert names["board"]._repr_markdown_().startswith("# Leaderboard")


def test_results_of_both_ways_in_are_the_same(bench, exports, tmp_path):
    words = ("--checkpoint", exports[0], "--data", "digits=digits:", "--limit", 60, "--out", tmp_path)
    code, _, err = bench("run", *words, "--suite", "knn@dino")
    assert code == 0, err
    (path,) = result_files(tmp_path)
    export = api.load(exports[0])
    found = api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path)
    assert found == read_result(path)  # its date too: nothing was measured again
    api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path, settings={"k": (5, 7)})
    code, said, _ = bench("run", *words, "--suite", "knn", "--set", "knn@dino.k=5,7")
    assert code == 0 and "knn@dino on digits with k=5+7: exists, skipped" in said
    assert api.evaluate(exports[0], "knn@dino", "digits:", limit=60, out=tmp_path, rerun=True).date >= found.date


def test_features_are_those_of_the_run(exports, tmp_path):
    export = api.load(exports[0])
    api.evaluate(export, "knn@dino", "digits:", limit=60, out=tmp_path)
    val = api.extract(exports[0], "digits:", limit=60, out=tmp_path)
    assert val.forwards == 0 and val.features.shape == (60, 12) and val.labels.shape == (60,)
    patches = api.extract(export, "mine=digits:", "val", pool="avg", layer=0, norm=False, limit=60, out=tmp_path)
    assert list(patches.arrays) == [FeatureKind("avg", 0, False)] and patches.forwards == 60
    assert not np.array_equal(patches.features, val.features)


def test_no_function_hides_a_package():
    folders = {path.parent.name for path in Path(api.__file__).parent.glob("*/__init__.py")}
    assert not folders & set(api.__all__)


def test_one_name_for_one_checkpoint(exports, tmp_path):
    assert api.load(exports[0]).facts["name"] == "first"
    assert api.load("pixels:16").facts["name"] == "pixels-16"
    saved = api.load(exports[0]).save(tmp_path / "other")
    assert api.load(saved).facts["name"] == "first"


NETWORK = """
import torch

class Stripes(torch.nn.Conv2d):
    image_size, mean, std = 16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def forward(self, images):
        maps = super().forward(images)
        return None, maps, maps.shape[-2:]

def stripes():
    torch.manual_seed(0)
    return Stripes(3, 8, 4, stride=4)
"""


def test_a_network_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stripes.py").write_text(NETWORK)
    network = api.load("module:stripes:stripes")
    assert api.extract(network, "digits:", limit=60).features.shape == (60, 8)
    result = api.evaluate(network, "knn@dino", "digits:", limit=60)
    assert (result.checkpoint.name, result.checkpoint.digest) == ("stripes", network.digest)
    assert not (tmp_path / "bench-results/exports").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda export: api.load("nothing.pth"), "no checkpoint 'nothing.pth': no such file or folder, nor timm:NAME"),
        (lambda export: api.evaluate(export, "knn@dyno", "digits:"), "did you mean 'knn@dino'"),
        (lambda export: api.evaluate(export, "knn", "digits:"), "'knn' means [0-9]+ protocols, such as 'knn@dino'"),
        (lambda export: api.evaluate(export, "knn@dino", "x=digit:"), "--data x=digit:: "),
        (lambda export: api.evaluate(export, "knn@dino", "/no/where"), "--data where=/no/where: "),
        (lambda export: api.evaluate(export, "knn@dino", "digits:", settings={"q": 1}), "has no setting 'q'"),
        (lambda export: api.evaluate(export, "knn@dino", "digits:", options=api.Options(device="tpu")), "--device tpu"),
        (lambda export: api.evaluate_suite([export], "knn@dino", ["a=digits:"], names=["b", "c"]), "2 names for 1"),
        (lambda export: api.extract(export, "digits:", options=api.Options(precision="float16")), "it is for pretrain"),
        (
            lambda export: api.pretrain("mae", "smoke", "digits:", "runs/a", options=api.Options(decode="fast")),
            "--decode fast: it is for evaluations",
        ),
        (lambda export: api.extract(export, "digits:", layer=7), "layer 7: the model has 2 blocks"),
        (lambda export: api.extract(export, "digit:"), "digit"),
        (lambda export: api.compare("first", "second"), "holds no results"),
        (lambda export: api.leaderboard("nowhere"), "nowhere holds no results"),
        (lambda export: api.leaderboard(formats=["tex"]), "no format 'tex'; did you mean 'latex'"),
        (lambda export: api.report("nowhere"), "nowhere holds no results"),
        (lambda export: api.pretrain("mae", "smok", "digits:", "runs/a"), "mae has no recipe 'smok'; did you mean"),
        (lambda export: api.pretrain("mae", "smoke", "digits:", "runs/a", settings={"q": 1}), "--set q: no such"),
    ],
)
def test_mistakes_are_one_line(call, message, exports, tmp_path, monkeypatch):
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


def test_a_stopped_training_says_how_to_go_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("bench.pretraining.run.run_pretraining", lambda request: asked.append(request) or 75)
    with pytest.raises(Stopped, match="call it again with resume=True"):
        api.pretrain("mae", "smoke", "digits:", tmp_path, settings={"epochs": 3, "crop": (0.5, 1.0)}, knn_every=2)
    (request,) = asked
    assert request.changes == ("epochs=3", "crop=0.5,1.0")
    assert (request.run.monitor_every, request.run.monitor.space.data) == (2, "digits:")


def test_the_import_is_light_and_runs_no_module_of_the_user(tmp_path):
    (tmp_path / "engine.py").write_text("raise SystemExit('the user\\'s own module ran')\n")
    code = f"""import sys
import bench
assert not {HEAVY!r} & sys.modules.keys()
try:
    bench.load("pixels:16")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"'{tmp_path / 'engine.py'}' hides the package 'engine' of bench"), done.stderr


def test_functions_keep_their_names_beside_packages(tmp_path):
    from bench.board.files import rewrite
    from bench.report_page.page import report_page

    assert callable(rewrite) and callable(report_page)
    assert (api.leaderboard.__module__, api.report.__module__) == ("bench.api", "bench.api")
