"""Suites: `full` has a protocol of each kind, `paper:NAME` those of a paper's tables; families; unknown words."""

import pytest

from bench.commands.list import about
from bench.published.values import LOG, published_values
from bench.run.index import refuse_unknown
from bench.run.suites import catalogue, changed_protocols, choose_protocols

# Paper -> method, architecture and pretraining images of most of its tables.
PAPERS = {
    "extrema": ("ExtreMA", "ViT-B/16", "ImageNet-1k"),
    "lut": ("LUT", "ViT-B/16", "ImageNet-1k"),
    "moca": ("MOCA", "ViT-B/16", "ImageNet-1k"),
    "mst": ("MST", "ViT-S/16", "ImageNet-1k"),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_the_suite_of_a_paper_has_the_protocols_of_its_tables(paper):
    of_paper = [value for value in published_values() if value.table.startswith(f"{paper}:")]
    of_network = [value for value in of_paper if (value.model, value.architecture, value.images) == PAPERS[paper]]
    assert set(catalogue().suites[f"paper:{paper}"]) == {value.protocol for value in of_network} - {LOG}


def test_every_paper_has_a_suite():
    assert {f"paper:{paper}" for paper in PAPERS} == {name for name in catalogue().suites if ":" in name}
    assert set(PAPERS) <= {value.table.partition(":")[0] for value in published_values()}


def test_full_has_one_protocol_of_each_probe_and_all_of_dense():
    chosen, dense = choose_protocols("full", catalogue()), set(catalogue().suites["dense"])
    assert dense <= {protocol.name for protocol in chosen}
    probes = [protocol for protocol in chosen if protocol.name not in dense]
    kinds = [(probe.key, getattr(probe.task, "head", getattr(probe.task, "decoder", ""))) for probe in probes]
    assert len(set(kinds)) == len(kinds)
    # Attentive probes cost a pass over the images an epoch and are in `today`; `full` measures robustness by linear
    # heads; copydays needs images of its own.
    left_out = {"toy", "dear", "attentive", "robustness_finetune", "copydays"}
    # A new probe may be in `smoke` alone, as the page docs/extending/probe.md shows it.
    names = {name for suite, of_suite in catalogue().suites.items() if suite != "smoke" for name in of_suite}
    assert {protocol.key for protocol in chosen} == {catalogue().protocols[name].key for name in names} - left_out
    assert {protocol.task.augment for protocol in chosen if protocol.key == "linear"} == {True}


def test_suites_of_papers_combine_with_protocols():
    chosen = {protocol.name for protocol in choose_protocols("paper:mst,finetune@mae", catalogue())}
    assert chosen == {"knn@mst", "linear@dino_paper", "linear_sgd@mst_paper", "finetune@mae"}


def test_everything_contains_full_except_the_head_without_a_projector():
    suites = catalogue().suites
    assert set(suites["full"]) - set(suites["everything"]) == {"semi@extrema_cls_1percent"}
    with pytest.raises(ValueError, match="paper:moca"):
        choose_protocols("paper:mocca", catalogue())


def test_the_name_before_the_at_selects_a_family_of_protocols():
    """README says `for upernet and ade_linear`; the task file of both is called upernet_ade20k."""
    chosen = changed_protocols(choose_protocols("ade_linear", catalogue()), ["ade_linear.batch=3"])
    assert {(protocol.family, protocol.task.batch) for protocol in chosen} == {("ade_linear", 3)}
    assert not any(protocol.name.endswith("_paper") for protocol in choose_protocols("linear_sgd", catalogue()))
    assert next(about("ade_linear")).startswith("task upernet_ade20k, on scenes")


def test_unknown_words_of_a_suite_are_refused_before_tasks_are_imported():
    known = catalogue()
    refuse_unknown(",".join([*known.names(), *known.protocols]))
    for word in ("knnn", "knn@dnio", "paper:mist", "semi@"):
        with pytest.raises(ValueError, match=word):
            refuse_unknown(f"smoke,{word}")


def test_only_the_files_that_a_suite_names_are_imported():
    for suite, files in (("knn@dino, logreg@dinov2", {"knn", "lowshot"}), ("upernet@mae", {"upernet_ade20k"})):
        assert {protocol.key for protocol in catalogue(suite=suite).protocols.values()} == files
    for suite in ("quick", "smoke", "knn", "logreg,paper:moca", "frozen"):
        assert choose_protocols(suite, catalogue(suite=suite)) == choose_protocols(suite, catalogue()), suite
    with pytest.raises(ValueError, match="knn@dino"):
        choose_protocols("knn@dinno", catalogue(suite="knn@dinno"))


def test_an_unknown_protocol_of_a_known_family_is_refused_with_those_of_the_family():
    with pytest.raises(ValueError, match=r"'knn@smoke'; .*there are: knn@dino, .*knn@mst") as caught:
        choose_protocols("knn@smoke", catalogue())
    assert "maskrcnn" not in str(caught.value)
