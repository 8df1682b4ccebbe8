"""CITATION.cff, BibTeX and the paragraph on the measurement in a record; the table of BibTeX entries."""

import re
from dataclasses import replace

import yaml
from made_results import made_checkpoint, made_metrics, made_result

from bench.record import TABLE, bibtex_entries, cited, paper_files
from bench.reports.card import Publication
from bench.reports.leaderboard import in_latex
from bench.results.record import DataUsed, ProtocolUsed
from bench.run.suites import catalogue
from engine.extensions import source_files

OURS = {
    "bench",
    "cached",
    "layers",
    "smoke",
    "val",
    "knn",
}  # after @ where a protocol follows no paper of its own


def results_of_three():
    """Of a timm network, one pretrained here and raw pixels: changed settings, and two seeds of a limited run."""
    data = {"cifar": DataUsed(name="cifar_10", url="cifar10:/data", images={"train": 50000, "val": 10000})}
    timm = made_checkpoint("dino_s", 1, source="vit_small_patch16_224.dino", method="timm", architecture="ViT-S/16")
    mae = made_checkpoint("mae", 2, method="mae", recipe="vit_s", architecture="ViT-S/16")
    raw_pixels = made_checkpoint("pixels-32", 3, method="pixels", architecture="raw pixels")
    knn = ProtocolUsed(name="knn@dinov2", version=1, modified=True, changes={"k": [5, 10], "views": 3})
    linear = ProtocolUsed(name="linear_sgd@moca", version=3)
    shared = dict(
        data=data["cifar"], date="2026-03-01T10:00:00+00:00", versions={"ssl-vit-bench": "0.1.0", "torch": "2.11"}
    )
    method = "95 % over validation images: exact binomial bootstrap, inverted (mid-P)"
    for checkpoint in (timm, mae, raw_pixels):
        metrics = made_metrics({"top1": 50.0})
        yield made_result(checkpoint, metrics, protocol=knn, task="knn", random=False, interval_method=method, **shared)
        for seed in (0, 1):
            yield made_result(checkpoint, metrics, protocol=linear, task="linear", seed=seed, limit=500, **shared)


def test_every_protocol_method_and_importer_has_a_bibtex_entry():
    """If this fails, add the paper to bench/references.bib, with the name as a keyword."""
    missing = []
    for name, chosen in catalogue().protocols.items():
        source = name.partition("@")[2].split("_")[0]
        is_ours = source in OURS and (cited({f"task-{chosen.key}"}) or "ours" in chosen.protocol.source)
        missing += [] if cited({source}) or is_ours else [name]
    missing += [name for kind in ("methods", "importers") for name in source_files(kind) if not cited({name})]
    assert missing == []


def test_the_references_are_valid_bibtex():
    keys = re.findall(r"^@\w+{(\w+),$", TABLE.read_text(), re.M)
    assert keys == list(bibtex_entries()) and len(set(keys)) == len(keys)
    for key, (text, words) in bibtex_entries().items():
        fields = dict(re.findall(r"^  (\w+) = {(.*)},$", text, re.M))
        assert len(fields) == len(text.splitlines()) - 2 and text.isascii(), key
        assert {"title", "author", "keywords"} <= fields.keys() and words, key
        assert all(value.count("{") == value.count("}") for value in fields.values()), key
        assert re.fullmatch(r"\d{4}\.\d{5}|", fields.get("eprint", "")) and ("eprint" in fields) == (
            "archiveprefix" in fields
        )


def test_paragraph_describes_the_measurement_and_cites_exactly_its_entries():
    results = list(results_of_three())
    files = paper_files(results, Publication(organization="Some Lab", source="https://example.org/board"))
    text, bib = files["paper/measured.tex"], files["paper/references.bib"]
    for part in (
        "ssl-vit-bench 0.1.0",
        r"dino\_s (ViT-S/16, ",
        "mae vit\\_s, ",
        r"Images of cifar\_10: 50000 of train and 10000 of val.",
        r"\texttt{cifar\_10/knn@dinov2}: version 1, k=5+10, views=3~",
        r"\texttt{cifar\_10/linear\_sgd@moca}: version 3, limit=500, seeds 0 and 1~",
        "exact binomial bootstrap, inverted (mid-P)~",
        "Holm's method",
        "torch 2.11",
    ):
        assert part in text, part
    cited_keys = {key for keys in re.findall(r"\\cite{([^}]*)}", text) for key in keys.split(",")}
    assert cited_keys == set(re.findall(r"^@\w+{(\w+),$", bib, re.M))
    expected = {"wu2018knn", "oquab2024dinov2", "gidaris2024moca", "caron2021dino", "he2022mae", "holm1979"}
    expected |= {"carpenter1999inversion", "mcnemar1947", "sslvitbench"}
    assert expected <= cited_keys and not {"zhou2022ibot", "sun2022ood"} & cited_keys
    citation = yaml.safe_load(files["CITATION.cff"])
    assert {"cff-version", "message", "title"} <= citation.keys() and citation["authors"] == [{"name": "Some Lab"}]
    assert citation["title"] == "3 checkpoints measured by 2 protocols on cifar_10"
    assert (citation["date-released"], citation["url"]) == ("2026-03-01", "https://example.org/board")
    assert paper_files(results[::-1], Publication())["paper/references.bib"]
    assert paper_files([replace(results[0], status="failed")], Publication()) == {}


def test_names_of_checkpoints_are_escaped_in_latex():
    used = made_checkpoint(r"\input{x}%", 1)
    text = paper_files([made_result(used, made_metrics({"top1": 1.0}))], Publication())["paper/measured.tex"]
    assert in_latex(r"\input{x}%") in text and r"\input" not in text.replace(r"\textbackslash{}input", "")
