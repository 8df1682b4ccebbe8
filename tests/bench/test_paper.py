"""The table of BibTeX entries, and those that a record cites."""

import re

from made_results import made_checkpoint, made_metrics, made_result

from bench.reports.record import TABLE, bibtex_entries, cited, references
from bench.results.record import ProtocolUsed
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


def results_of_two():
    """Of a timm network and one pretrained here, each by a k-NN and a linear protocol."""
    checkpoints = [
        made_checkpoint("dino_s", 1, source="vit_small_patch16_224.dino", method="timm"),
        made_checkpoint("mae", 2, method="mae", recipe="vit_s"),
    ]
    for checkpoint in checkpoints:
        for task, name in (("knn", "knn@dinov2"), ("linear", "linear_sgd@moca")):
            protocol = ProtocolUsed(name=name, version=1)
            yield made_result(checkpoint, made_metrics({"top1": 50.0}), protocol=protocol, task=task)


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


def test_a_record_cites_the_papers_of_its_protocols_and_methods():
    text = references(results_of_two())
    assert [key for key in bibtex_entries() if f"{{{key}," in text] == re.findall(r"^@\w+{(\w+),$", text, re.M)
    keys = set(re.findall(r"^@\w+{(\w+),$", text, re.M))
    assert keys >= {"wu2018knn", "oquab2024dinov2", "gidaris2024moca", "caron2021dino", "he2022mae", "sslvitbench"}
    assert not {"zhou2022ibot", "sun2022ood"} & keys
