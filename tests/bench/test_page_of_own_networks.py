"""The example of docs/your-own-network.md, run as it stands: evaluated, named, and refused where a ViT is needed."""

import json
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/your-own-network.md").read_text()


@pytest.fixture(autouse=True)
def example(tmp_path, monkeypatch):
    """The page's mynets.py in the current folder, for fewer pixels and without pretrained weights to download."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    offline = code.replace("224", "32").replace('weights="IMAGENET1K_V1"', "")
    assert offline != code
    (tmp_path / "mynets.py").write_text(offline + "\n\nimport torch\n\ntorch.manual_seed(0)\n")
    monkeypatch.chdir(tmp_path)


def test_the_example_of_the_page_runs(bench, refused):
    words = re.search(r"```\n(bench run .*?)\n```", PAGE, re.DOTALL)[1].split()[1:]
    suite = words.index("--suite") + 1
    words[suite] = "finetune@smoke"
    refusal = "finetune@smoke: module:mynets:resnet18 is a frozen network of your own, and fine-tuning trains the"
    for command in ("run", "plan"):
        refused(command, *words[1:], named=f"--suite: | resnet18; {refusal}")
    assert not Path("results/results").exists()
    words[suite] = "knn@dino,finetune@smoke"
    code, out, _ = bench(*words, "--limit", 24)
    assert code == 0 and "1 done, 0 skipped, 0 failed" in out and f"resnet18 is evaluated without {refusal}" in out
    results = [json.loads(path.read_text()) for path in Path("results").rglob("*.json") if "knn" in path.name]
    (checkpoint,) = [result["checkpoint"] for result in results if result.get("status") == "ok"]
    assert (checkpoint["name"], checkpoint["method"], checkpoint["architecture"]) == ("resnet18", "module", "LastStage")
    code = r"mynets.py [0-9a-f]{12}, structure [0-9a-f]{12}"
    assert re.fullmatch(rf"module:mynets:resnet18 \({code}\)", checkpoint["source"])
    assert checkpoint["parameters"] == 11_176_512 and len(checkpoint["digest"]) == 64
    assert not Path("results/exports").exists()


def test_a_network_of_one_vector_per_image_is_evaluated_without_dense_tasks(bench):
    words = ("--checkpoint", "module:mynets:vectors", "--suite", "knn@moca,segmenter_linear@smoke", "--limit", 24)
    data = ("--data", "digits=digits:", "city=tiny-cityscapes:", "--out", "results")
    code, out, err = bench("run", *words, *data)
    assert code == 0 and "vectors is evaluated without segmenter_linear@smoke" in out, out + err
    (path,) = Path("results/results").rglob("knn@moca*.json")
    result = json.loads(path.read_text())
    assert result["facts"]["read_instead"] == {"avg": "cls"} and result["checkpoint"]["architecture"] == "ResNet"
