"""Model cards and the Hub's formats of results: the Hub's own parsers read them, whatever text results contain."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from made_results import EVIL, any_board, harmless, made_checkpoint, made_metrics, made_result, save_result
from markdown_it import MarkdownIt
from PIL import Image

from bench.reports.card import (
    CardSubject,
    Publication,
    card_of,
    hub_names,
    numbers_of,
    read_config,
    spdx_name,
    subject_of,
    without_folders,
)
from bench.results.record import CheckpointUsed, ProtocolUsed
from checkpoints.export import CARD_MARK, EVALUATION_SIZE, ViTExport
from checkpoints.resolve import pixels

KNOWN = Publication(model_id="me/alpha", source="https://example.org/r")


@pytest.fixture
def export(exports, tmp_path) -> Path:
    return Path(shutil.copytree(exports[0], tmp_path / "alpha"))


def measured(checkpoint: CheckpointUsed) -> list:
    """Three seeds of k-NN, and one of a limited run."""
    values = [
        made_metrics({"top1_k10": 80.0 + seed, "top1_k20": 70.0}, {"top1_k10": (75.0, 85.0)}) for seed in range(3)
    ]
    results = [made_result(checkpoint, metrics, seed=seed) for seed, metrics in enumerate(values)]
    versioned = ProtocolUsed(name="linear@mae", version=2, source="main_linprobe.py")
    results.append(made_result(checkpoint, made_metrics({"top1": 60.0}), protocol=versioned, task="linear"))
    return [*results, made_result(checkpoint, made_metrics({"top1": 10.0}), limit=8, protocol=versioned)]


def header_of(text: str) -> dict:
    """The YAML header of a card; its keys must be the Hub's, and the Hub's parser must keep all numbers."""
    header = yaml.safe_load(text.split("---\n")[1])
    required = {"library_name", "pipeline_tag", "tags", "license"}
    assert required <= header.keys() <= required | {"license_name", "model-index"} and None not in header.values()
    assert json.dumps(header, allow_nan=False)
    if "model-index" in header:
        assert eval_results_to_model_index(*model_index_to_eval_results(header["model-index"])) == header["model-index"]
    assert ModelCard(text).data.license == header["license"]
    return header


def test_a_card_shows_the_measured_results(bench, export, tmp_path):
    out, checkpoint = tmp_path / "out", subject_of(export).used
    for result in measured(replace(checkpoint, name="named-otherwise")):
        save_result(out, result)
    other_size = {"image_size": 48, "seed": 7}  # 48 px were chosen, the network's own are 32
    save_result(out, made_result(checkpoint, made_metrics({"top1_k10": 20.0}), **other_size))
    names = ("--model-id", "me/alpha", "--licence", "mit")
    words = ("card", "--checkpoint", export, "--out", out, *names)
    code, output, err = bench(*words)
    assert code == 0 and err.startswith("2 results with --limit") and output.count("written: ") == 1
    text = (export / "README.md").read_text()
    assert "limit=8" not in text and "48px" not in text and "+-" in text
    words = (*words, "--all")
    code, output, err = bench(*words)
    assert code == 0 and err == "" and output.count("written: ") == 1
    text = (export / "README.md").read_text()
    for line in (
        "| digits | knn@dino | 1 | top1_k10 | 81.00 [75.0, 85.0] +- 1.00 (n=3) |",
        "| digits | linear@mae[v2] | 2 | top1 | 60.00 |",
        "| digits | knn@dino[48px] | 1 | top1_k10 | 20.00 |",
        "- digits/linear@mae[v2 limit=8]\\: 8 of 1,297 train and 8 of 500 val images (--limit 8).",
        "| image, patch | 32 px, patches of 16 px |",
        f"| digest | {checkpoint.digest} |",
        'model = timm.create_model("hf-hub:me/alpha", pretrained=True).eval()',
    ):
        assert line in text.split("\n"), line
    assert bench(*words)[0] == 0 and (export / "README.md").read_text() == text
    assert header_of(text)["license"] == "mit" and "as the author of this card says: MIT." in text
    (line,) = bench("card", "--checkpoint", export, "--out", out, "--all")[2].splitlines()
    assert line.startswith("licence: unknown, as the card states; give it by --licence")
    assert ViTExport.load(export).verify() == []


def test_a_card_says_what_is_known_of_an_imported_network(export):
    """An importer of networks of many methods names none; results are on images of the published evaluation's size."""
    imported = ViTExport.load(export)
    facts = {**imported.facts, "method": "transformers", EVALUATION_SIZE: 16}
    shutil.rmtree(export)
    replace(imported, facts=facts).save(export)
    text = card_of(subject_of(export), [], Publication())
    assert "trained by" not in text and "| method |" not in text
    assert "| image, patch | 32 px, patches of 16 px |" in text and "| 16 px |" in text


def test_the_hubs_parsers_read_every_number(export):
    subject = subject_of(export)
    text = card_of(subject, measured(subject.used), KNOWN)
    assert len(header_of(text)["model-index"]) == 1
    card = ModelCard(text)
    assert card.data.library_name == "timm" and card.data.license == "unknown"
    assert [result.metric_value for result in card.data.eval_results] == [81.0, 70.0, 10.0, 60.0]
    assert {(result.dataset_type, result.source_url) for result in card.data.eval_results} == {("digits", KNOWN.source)}


def test_the_code_of_a_card_runs(export, monkeypatch):
    text = card_of(subject_of(export), [], Publication())
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(export)
    names: dict = {}
    exec(code, names)
    tokens = names["model"].forward_features(names["transform"](Image.new("RGB", (40, 50)))[None])
    assert tokens.shape == (1, 5, 12) and "None yet." in text


def test_licences_are_names_of_spdx_and_the_hub():
    assert hub_names(spdx_name("cc-by-nc-4.0")) == {"license": "cc-by-nc-4.0"}
    assert hub_names("LicenseRef-Mine") == {"license": "other", "license_name": "LicenseRef-Mine"}
    weights = CardSubject(used=made_checkpoint("a"), config={"vit_export": {"licence": "unknown"}})
    assert hub_names(weights.licence(Publication())) == {"license": "unknown"}
    assert weights.licence(Publication(licence="apache-2.0")) == "Apache-2.0"
    with pytest.raises(ValueError, match="licence='apache': "):
        Publication(licence="apache")
    weights = replace(weights, config={"vit_export": {"licence": "CC-BY-NC-4.0"}})
    with pytest.raises(ValueError, match=r"licence=.* the source of these weights says CC-BY-NC-4.0; leave the"):
        weights.licence(Publication(licence="MIT"))


def cards_of(leaderboard) -> list[tuple[CardSubject, list]]:
    by_checkpoint: dict = {}
    for stored in leaderboard.results:
        by_checkpoint.setdefault(stored.result.checkpoint, []).append(stored.result)
    return [(CardSubject(used=used, config={}), results) for used, results in by_checkpoint.items()]


def test_hostile_text_in_results_does_not_break_cards(export):
    config = read_config(export)
    evil = {key: EVIL[number % len(EVIL)] for number, key in enumerate(("method", "data", "licence", "official_code"))}
    config["vit_export"] |= evil
    for seed in range(20):
        leaderboard = any_board(Random(seed))
        for subject, results in cards_of(leaderboard):
            text = harmless(card_of(replace(subject, config=config), results, KNOWN))
            assert header_of(text)
            body = text.split("---\n", 2)[2].replace(CARD_MARK, "").replace(f"<{KNOWN.source}>", "")
            tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
            kinds = {token.type for token in tokens} | {
                child.type for token in tokens for child in token.children or ()
            }
            assert not {"html_block", "html_inline", "link_open", "image"} & kinds


def test_deviations_are_not_shared_as_scores():
    spread = made_metrics({"top1_std": 1.0}, higher_is_better=None, deviation_of="top1")
    assert numbers_of([made_result(made_checkpoint(), spread)])[0] == []


def test_a_card_written_by_hand_is_kept(bench, refused, export, tmp_path):
    (export / "README.md").write_text("# Mine\n")
    refused("card", "--checkpoint", export, named="README.md")
    with pytest.raises(ValueError, match="holds something that is not an export"):
        ViTExport.load(export).save(export)
    assert bench("card", "--checkpoint", export, "--to", tmp_path / "card")[0] == 0
    (export / "README.md").unlink()
    assert bench("card", "--checkpoint", export)[0] == 0
    ViTExport.load(export).save(export)  # the generated card of the old export goes
    assert not (export / "README.md").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model-id", "alpha"), "--model-id alpha: write ORG/NAME"),
        (("--source", "here"), "--source here: write a URL"),
        (("--out", "nowhere"), "nowhere does not exist"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(refused, export, words, named):
    refused("card", "--checkpoint", export, *words, named=named)


def test_folders_without_a_network_get_no_card(refused, exports, tmp_path):
    """The message names the exports that a run kept under this name."""
    refused("card", "--checkpoint", tmp_path, named=f"{tmp_path} | bench import")
    kept = shutil.copytree(exports[0], tmp_path / "exports" / "mine-01234567")
    refused("card", "--checkpoint", "mine", "--out", tmp_path, named=f"--checkpoint mine | {kept}")
    refused("card", "--checkpoint", pixels(32).save(tmp_path / "pixels"), named="raw pixels, not a network")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("folder:/data/cifar10", "folder:path-81ce9ab8/cifar10"),
        ("folder:/data/cifar10/", "folder:path-81ce9ab8/cifar10"),
        ("https://example.org/a/b.pth", "https://example.org/a/b.pth"),
        ("ViT-S/16 on digits/knn@dino", "ViT-S/16 on digits/knn@dino"),
        ('File "/home/al/b.py", line 3', 'File "path-d3f95885/b.py", line 3'),
        ("file:///home/al/b.py", "path-d3f95885/b.py"),
        ("hf:/data/x?labels=/home/al/b.py&val=.2", "hf:path-81ce9ab8/x?labels=path-d3f95885/b.py&val=.2"),
        ({"/home/al/b.py": ["x=/home/al/b.py", 3, None]}, {"path-d3f95885/b.py": ["x=path-d3f95885/b.py", 3, None]}),
    ],
)
def test_folders_are_replaced_by_digests_of_their_paths(text, expected):
    assert without_folders(text) == expected == without_folders(expected)
