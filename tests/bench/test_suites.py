"""The suites: `full` is one of each kind, `paper:NAME` what `bench reproduce` measures a paper's own networks by."""

import pytest

from bench.about import about
from bench.cli.names import refuse_unknown
from bench.published.values import LOG, published_values
from bench.run.suites import catalogue, changed_protocols, choose_protocols

# Paper -> its method, the size of network and the images that most of its tables are about.
PAPERS = {
    "extrema": ("ExtreMA", "ViT-B/16", "ImageNet-1k"),
    "lut": ("LUT", "ViT-B/16", "ImageNet-1k"),
    "moca": ("MOCA", "ViT-B/16", "ImageNet-1k"),
    "mst": ("MST", "ViT-S/16", "ImageNet-1k"),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_the_suite_of_a_paper_is_what_its_tables_are_measured_by(paper):
    of_paper = [value for value in published_values() if value.table.startswith(f"{paper}:")]
    of_network = [each for each in of_paper if (each.model, each.architecture, each.images) == PAPERS[paper]]
    assert set(catalogue().suites[f"paper:{paper}"]) == {each.protocol for each in of_network} - {LOG}


def test_every_paper_has_a_suite():
    assert {f"paper:{paper}" for paper in PAPERS} == {name for name in catalogue().suites if ":" in name}
    assert set(PAPERS) <= {value.table.partition(":")[0] for value in published_values()}


def test_full_has_one_protocol_of_each_probe_and_decoder_of_each_dense_task_and_all_on_frozen_patches():
    chosen, dense = choose_protocols("full", catalogue()), set(catalogue().suites["dense"])
    assert dense <= {each.name for each in chosen}
    others = [each for each in chosen if each.name not in dense]
    kinds = [(each.key, getattr(each.task, "head", getattr(each.task, "decoder", ""))) for each in others]
    assert len(set(kinds)) == len(kinds)
    # Attentive probes are in `today`, at a pass over the images an epoch; robustness is that of linear heads; copydays
    # has images of its own.
    left_out = {"toy", "dear", "attentive", "robustness_finetune", "copydays"}
    # A new probe may be in `smoke` alone, as the page docs/extending/probe.md shows it.
    names = {name for suite, of_suite in catalogue().suites.items() if suite != "smoke" for name in of_suite}
    assert {each.key for each in chosen} == {catalogue().protocols[name].key for name in names} - left_out
    assert {each.task.augment for each in chosen if each.key == "linear"} == {True}


def test_suites_with_a_colon_go_beside_other_words():
    chosen = {each.name for each in choose_protocols("paper:mst,finetune@mae", catalogue())}
    assert chosen == {"knn@mst", "linear@dino_paper", "linear_sgd@mst_paper", "finetune@mae"}


def test_everything_holds_what_full_holds_but_for_the_head_without_a_projector():
    suites = catalogue().suites
    assert set(suites["full"]) - set(suites["everything"]) == {"semi@extrema_cls_1percent"}
    with pytest.raises(ValueError, match="paper:moca"):
        choose_protocols("paper:mocca", catalogue())


def test_what_stands_before_the_at_names_protocols_of_one_kind():
    """README says `for upernet and ade_linear`; the task file of both is called upernet_ade20k."""
    chosen = changed_protocols(choose_protocols("ade_linear", catalogue()), ["ade_linear.batch=3"])
    assert chosen and {each.family for each in chosen} == {"ade_linear"} and {each.task.batch for each in chosen} == {3}
    assert not any(each.name.endswith("_paper") for each in choose_protocols("linear_sgd", catalogue()))
    assert next(about("ade_linear")).startswith("task upernet_ade20k, on scenes")


def test_every_word_of_a_suite_is_known_before_torch_is():
    found = catalogue()
    refuse_unknown(",".join([*found.names(), *found.protocols]))
    for word in ("knnn", "knn@dnio", "paper:mist", "semi@"):
        with pytest.raises(ValueError, match=word):
            refuse_unknown(f"smoke,{word}")


def test_protocols_by_the_names_of_their_files_import_these_alone():
    """As `knn@dino`; other words need all files, whose suites and families they may name."""
    chosen = catalogue(suite="knn@dino, locality@smoke").protocols.values()
    assert {each.key for each in chosen} == {"knn", "locality"}
    assert catalogue(suite="knn@dino,smoke").protocols.keys() == catalogue().protocols.keys()
    assert catalogue(suite="upernet@mae").protocols.keys() == catalogue().protocols.keys()
    with pytest.raises(ValueError, match="knn@dino"):
        choose_protocols("knn@dinno", catalogue(suite="knn@dinno"))


def test_an_unknown_protocol_of_a_known_family_is_answered_with_the_protocols_of_the_family():
    with pytest.raises(ValueError, match=r"'knn@smoke'; .*there are: knn@dino, .*knn@mst") as caught:
        choose_protocols("knn@smoke", catalogue())
    assert "maskrcnn" not in str(caught.value)
