"""The example of docs/your-own-network.md, run as it stands: evaluated, named, and refused where a ViT is needed."""

import json
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/your-own-network.md").read_text()


def test_the_example_of_the_page_runs(bench, tmp_path, monkeypatch):
    """With fewer pixels and random weights: no network is there to fetch others."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    words = re.search(r"```\n(bench run .*?)\n```", PAGE, re.DOTALL)[1].split()[1:]
    quick = code.replace("224", "32").replace('weights="IMAGENET1K_V1"', "")
    assert quick != code
    (tmp_path / "mynets.py").write_text(quick + "\n\nimport torch\n\ntorch.manual_seed(0)\n")
    monkeypatch.chdir(tmp_path)
    words[words.index("--suite") + 1] = "knn@dino,finetune@smoke"
    refusal = "finetune@smoke: module:mynets:resnet18 is a frozen network of your own, and fine-tuning trains the"
    words[words.index("--suite") + 1] = "finetune@smoke"
    for command in ("run", "plan"):
        exit_code, _, err = bench(command, *words[1:])
        assert exit_code == 2 and f"--suite: none of the chosen protocols can evaluate resnet18; {refusal}" in err
    assert not Path("results/results").exists()
    words[words.index("--suite") + 1] = "knn@dino,finetune@smoke"
    exit_code, out, _ = bench(*words, "--limit", 24)
    assert exit_code == 0 and "1 done, 0 skipped, 0 failed" in out and f"resnet18 is evaluated without {refusal}" in out
    results = [json.loads(path.read_text()) for path in Path("results").rglob("*.json") if "knn" in path.name]
    (checkpoint,) = [found["checkpoint"] for found in results if found.get("status") == "ok"]
    assert (checkpoint["name"], checkpoint["method"], checkpoint["architecture"]) == ("resnet18", "module", "LastStage")
    assert re.fullmatch(r"module:mynets:resnet18 \(mynets.py [0-9a-f]{12}\)", checkpoint["source"])
    assert checkpoint["parameters"] == 11_176_512 and len(checkpoint["digest"]) == 64
    assert not Path("results/exports").exists()


def test_one_vector_of_an_image_is_evaluated_without_dense_tasks(bench, tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "mynets.py").write_text(code.replace("224", "32").replace('weights="IMAGENET1K_V1"', ""))
    monkeypatch.chdir(tmp_path)
    words = ("--checkpoint", "module:mynets:vectors", "--suite", "knn@moca,segmenter_linear@smoke", "--limit", 24)
    data = ("--data", "digits=digits:", "city=tiny-cityscapes:", "--out", "results")
    exit_code, out, err = bench("run", *words, *data)
    assert exit_code == 0 and "vectors is evaluated without segmenter_linear@smoke" in out, out + err
    (path,) = Path("results/results").rglob("knn@moca*.json")
    found = json.loads(path.read_text())
    assert found["facts"]["read_instead"] == {"avg": "cls"} and found["checkpoint"]["architecture"] == "ResNet"
