"""The table of published numbers is complete, has sources and names what exists; comparison with measured numbers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_leaderboard, made_metrics, made_result

from bench.api import branch_of
from bench.published import values
from bench.published.values import (
    LOG,
    PRETRAINED_ON,
    SETS,
    TABLES,
    against_published,
    published_values,
    set_name,
    tolerance_of,
    values_of,
)
from bench.reports.leaderboard import to_terminal, with_published, write_leaderboard
from bench.reports.reproduce import protocol_of, unmeasured, untrained
from bench.results.record import CheckpointUsed, DataUsed, ProtocolUsed, Result, result_path, write_result
from checkpoints.export import ViTExport
from downstream.metrics.scores import AP_THRESHOLDS, scores
from downstream.tasks.depth_linear import METRICS as DEPTH_METRICS
from downstream.tasks.video_propagation import mean_scores
from engine.extensions import load_extension, source_files
from engine.tasks import Workspace
from probes.finetune.model_selection import ModelSelection
from probes.shifted import FOLDERS

VALUES = published_values()
MEASURED = [value for value in VALUES if value.protocol not in ("", LOG)]
USED = CheckpointUsed(name="mine", digest="d" * 64, method="moca")
IMAGENET = DataUsed(name="in1k", url="imagenet:/data", images=SETS["imagenet"].images)


def test_every_table_has_values_and_every_value_a_table():
    assert set(TABLES) == {value.table for value in VALUES}
    assert sum(len(values_of(table)) for table in TABLES) == len(VALUES)
    of_papers = [value for value in VALUES if value.table.partition(":")[0] in ("extrema", "lut", "mst", "moca")]
    assert len(of_papers) == 463  # all that the four papers print
    with pytest.raises(ValueError, match="did you mean 'moca:table5j'"):
        values_of("moca:table5jj")


def test_every_value_has_its_source_and_images():
    for value in VALUES:
        assert value.source.split()[0].lower() == value.table.split(":")[0], value
        table = value.table.split(":")[1].removeprefix("table").removeprefix("section")
        assert table.lower() in value.source.lower() or "A.2" in value.source, value
        assert value.images in PRETRAINED_ON or not value.pretraining, value
        assert value.data in SETS or (value.protocol == LOG and not value.data)
        assert set(value.digest) <= set("0123456789abcdef") and len(value.digest) in (0, *range(8, 65))


def test_each_checkpoint_name_stands_for_one_network():
    facts: dict[str, set] = {}
    for value in VALUES:
        description = (value.model, value.architecture, value.epochs, value.images, value.pretraining, value.importer)
        facts.setdefault(value.checkpoint, set()).add(description)
    assert {name: descriptions for name, descriptions in facts.items() if len(descriptions) > 1} == {}
    trained = {value.pretraining: value.checkpoint for value in VALUES if value.pretraining and not value.network}
    assert max(Counter(trained.values()).values()) == 1  # no network has two names


def test_protocols_and_settings_exist():
    for value in {(value.protocol, value.settings): value for value in MEASURED}.values():
        assert unmeasured(value) == "", value
        layout = SETS[value.data].url.partition(":")[0]
        module = load_extension("layouts", layout) if layout in source_files("layouts") else None
        assert protocol_of(value).layout in (layout if module else "", *getattr(module, "SERVES", ())), value


def test_methods_recipes_and_changes_exist():
    for value in {value.pretraining: value for value in VALUES if value.pretraining}.values():
        assert untrained(value) == "", value


def test_importers_and_networks_exist():
    for value in VALUES:
        key = value.importer.partition(" ")[0]
        assert not key or key in source_files("importers")
        if value.network not in ("", "start"):
            assert value.network in list(load_extension("importers", key).BRANCHES)[1:]


@pytest.mark.parametrize("task", sorted({protocol_of(value).key for value in MEASURED}))
def test_metrics_exist(task, exports, tmp_path):
    """As the code of the task names them, with settings that are cheap where they do not change names."""
    export = ViTExport.load(exports[0])
    for value in {(value.protocol, value.metric): value for value in MEASURED}.values():
        protocol = protocol_of(value)
        if protocol.key == task:
            assert value.metric in metrics_of(protocol, export, tmp_path, value.metric), (value.protocol, value.metric)


def metrics_of(protocol, export, cache, metric) -> set[str]:
    space, task = Workspace(cache=cache, data="tiny:"), protocol.task
    if protocol.key == "knn":
        k = int(metric.split("_")[1].removeprefix("k"))
        assert k in task.k
        return {name.replace("k1", f"k{k}") for name in replace(task, k=(1,)).run(export, space).metrics}
    if protocol.key == "lowshot":
        own = set(replace(task, tolerance=0.1, lists="", solver="lbfgs").run(export, space).metrics)
        return own | {name.replace("top1", "per_class") for name in own} | {"mAP"}  # as image sets ask for them
    if protocol.key == "linear":
        cheap = dict(epochs=1, warmup_epochs=0, augment=False, lrs=task.lrs[:1], readouts=task.readouts[:1], batch=16)
        return set(replace(task, **cheap).run(export, space).metrics)
    if protocol.key == "attentive":
        cheap = dict(epochs=1, warmup_epochs=0, lrs=task.lrs[:1], weight_decays=task.weight_decays[:1], batch=16)
        return set(replace(task, **cheap, head="ep", queries=1).run(export, space).metrics)
    if protocol.key in ("robustness", "robustness_finetune"):
        return {"c_mce"} | {f"{name}_top1" for name in ("real", *FOLDERS)}
    if protocol.key == "discovery":
        return set(task.run(export, replace(space, data="tiny-trainval:")).metrics)
    if protocol.key == "copydays":
        return {"map_strong"}
    if protocol.key == "depth_linear":
        return set(DEPTH_METRICS)
    if protocol.key == "video_propagation":
        return set(mean_scores(np.zeros((1, 6)), np.zeros(1, int), np.ones((1, 1))))
    if protocol.key in ("finetune", "semi"):
        arrays = {f"{epoch}_{top}": np.ones(4) for epoch in ("best", "last") for top in ("top1", "top5", "nll")}
        selection = ModelSelection(select=task.select, val=None, held_out=None, mean=(), std=())
        return set(selection.metrics(arrays))
    if protocol.layout == "coco":
        return {f"{kind}_{name}" for kind in ("box", "mask") for name in AP_THRESHOLDS}
    return set(scores(np.ones((2, 3, 3), np.int64)))


DIGESTS = ["e" * 64, "f" * 64]


def measured(value: float, metric: str = "top1_k20_bestT", used: CheckpointUsed = USED, **others) -> Result:
    fields = {"protocol": ProtocolUsed(name="knn@moca", version=1), "data": IMAGENET} | others
    return made_result(used, made_metrics({metric: value}), **fields)


def of_digest(digest: str, **others):
    value = next(value for value in VALUES if (value.table, value.checkpoint) == ("moca:table9", "moca-b"))
    return replace(value, digest=digest, **others)


def test_weights_of_a_known_digest_are_compared_with_the_published_number():
    (line,) = against_published(measured(76.1), DIGESTS, values=[of_digest("ffffffff")])
    parts = ("NOT AS PUBLISHED: top1_k20_bestT", " 77.2 in moca:table9", "difference -1.10", "tolerance of 0.5 (ours")
    assert all(part in line for part in parts), line
    (line,) = against_published(measured(77.4), DIGESTS, values=[of_digest("e" * 64)])
    assert line.startswith("as published: ") and "difference +0.20, within" in line


def test_the_tolerance_is_twice_a_published_deviation():
    assert tolerance_of(of_digest("", tolerance=0.1))[0] == pytest.approx(0.25)
    (line,) = against_published(measured(76.9), DIGESTS, values=[of_digest("ffffffff", tolerance=0.1)])
    assert line.startswith("NOT AS") and "twice the source's deviation of 0.1" in line


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (measured(1.0), of_digest("")),
        (measured(1.0), of_digest("abababab")),
        (measured(1.0, "top1_k10_bestT"), of_digest("ffffffff")),
        (measured(1.0), of_digest("ffffffff", settings="k=20")),
        (measured(1.0, limit=100), of_digest("ffffffff")),
        (measured(1.0, facts={"val": {"skipped": ["a.png"]}}), of_digest("ffffffff")),
        (measured(1.0), of_digest("ffffffff", network="student")),
        (measured(1.0, data=DataUsed(name="imagenet", url="x")), of_digest("ffffffff")),
        (measured(1.0, protocol=ProtocolUsed(name="knn@dino", version=1)), of_digest("f" * 8)),
    ],
)
def test_other_quantities_are_not_compared(result, value):
    assert list(against_published(result, DIGESTS, values=[value])) == []
    assert list(against_published(measured(1.0), DIGESTS, "student", [of_digest("ffffffff")])) == []


def test_a_run_reports_a_number_that_is_not_as_published(bench, exports, tmp_path, monkeypatch):
    export = ViTExport.load(exports[0])
    monkeypatch.setitem(SETS, "imagenet", replace(SETS["imagenet"], images={"train": 64, "val": 32}, classes=None))
    monkeypatch.setattr(values, "published_values", lambda: (of_digest(export.digest[:12], value=-50.0),))
    words = ("--checkpoint", exports[0], "--suite", "knn@moca", "--data", "any=tiny:", "--out", tmp_path)
    code, out, _ = bench("run", *words)
    assert code == 0 and "NOT AS PUBLISHED: top1_k20_bestT is -50 in moca:table9, difference +" in out


@pytest.mark.parametrize(
    ("facts", "branch"),
    [
        ({"importer": "moca", "branch": "teacher"}, ""),
        ({"importer": "moca", "branch": "student"}, "student"),
        ({"method": "moca", "branch": "teacher"}, ""),
        ({}, ""),
    ],
)
def test_a_branch_is_named_unless_it_is_the_first_of_its_importer(facts, branch):
    assert branch_of(facts) == branch


def test_published_rows_are_shown_beside_measured_ones_and_are_never_best():
    results = [measured(70.0), measured(60.0, used=replace(USED, name="other", digest="e" * 64))]
    column = ("in1k/knn@moca", "top1_k20_bestT")
    board = with_published(made_leaderboard(results))
    cells = {checkpoint.name: row[column].mean for checkpoint, row in board.rows.items()}
    assert cells["moca-b"] == 77.2 and cells["msn-b"] == 73.4 and "moca-b-100-lambda1" not in cells
    assert board.best[column] == 70.0
    text = to_terminal(board, 120)
    assert "moca-b (published)" in text and "moca-b is MOCA, ViT-B/16, 200 epochs of ImageNet-1k (moca:table5j" in text


def test_a_network_has_the_number_of_its_own_paper():
    """MoCa's table 10 gives MAE's ViT-L 75.1, MAE's own code 76.0."""
    protocol = ProtocolUsed(name="linear_lars@mae_L_paper", version=2)
    board = with_published(made_leaderboard([measured(70.0, "top1", protocol=protocol)]))
    (cells,) = [cells for used, cells in board.rows.items() if used.name == "mae-l"]
    assert [cell.mean for cell in cells.values()] == [76.0]


def test_published_numbers_have_the_direction_of_the_measured():
    (value,) = {value.metric: value for value in MEASURED if value.metric == "rmse"}.values()
    used = DataUsed(name="rooms", url="nyu:/data", images=SETS[value.data].images, classes=SETS[value.data].classes)
    metrics = made_metrics({"rmse": 0.298}, unit="m", higher_is_better=False)
    one = made_result(USED, metrics, protocol=ProtocolUsed(name=value.protocol, version=1), data=used)
    board = with_published(made_leaderboard([one]))
    cells = [row[one.group, "rmse"] for row in board.rows.values()]
    assert len(cells) > 1 and {cell.higher_is_better for cell in cells} == {False}


@pytest.mark.parametrize(
    "others",
    [
        {"limit": 100},
        {"data": DataUsed(name="imagenet", url="x", images={"train": 64, "val": 32})},
        {"protocol": ProtocolUsed(name="knn@moca", version=1, modified=True, changes={"k": [20]})},
        {"precision": "bfloat16"},
    ],
)
def test_published_rows_are_shown_for_the_same_protocol_and_images_alone(others):
    leaderboard = made_leaderboard([measured(70.0, **others)])
    assert with_published(leaderboard) == leaderboard


def test_published_rows_of_changed_settings_are_shown_beside_results_of_the_same_settings():
    changes = {"norm": False, "batch": 4096}
    used = ProtocolUsed(name="linear_lars@mae_paper", version=2, modified=True, changes=changes)
    board = with_published(made_leaderboard([measured(70.0, "top1", protocol=used)]))
    (group,) = board.groups
    assert {checkpoint.name: cells[group, "top1"].mean for checkpoint, cells in board.rows.items()}["mae-b"] == 67.78
    assert not any(checkpoint.name == "dinov3-b" for checkpoint in board.rows)  # LP behind the final norm
    assert any(
        "mae-b is MAE" in line and "the best epoch on the validation images" in line for line in board.caveats[group]
    )


def low_shot(name: str, value: float, checkpoint: CheckpointUsed = USED, **data) -> Result:
    """16 shots on a set of CIFAR's counts."""
    used = DataUsed(name=name, url="folder:/d", images=SETS["cifar10"].images, **data)
    metrics = made_metrics({"top1_16shot": value}) | made_metrics({"top1_16shot_std": 0.5}, higher_is_better=None)
    return made_result(checkpoint, metrics, protocol=ProtocolUsed(name="lowshot@mieb", version=1), data=used)


def test_the_few_shot_accuracies_of_mieb_are_those_of_its_results():
    of_sets = {value.data: value for value in VALUES if value.checkpoint == "dinov2-s" and value.table[:5] == "mieb:"}
    published = {name: (value.value, value.std) for name, value in of_sets.items()}
    assert published.items() >= {"cifar10": (92.95, 0.66), "cifar100": (77.02, 0.30), "pets": (92.01, 0.40)}.items()
    assert published.items() >= {"caltech101": (88.58, 0.70), "flowers-mieb": (99.51, 0.07)}.items()
    assert len(published) == 21 and sum(value.table.startswith("mieb:") for value in VALUES) == 42 * 21
    assert tolerance_of(of_sets["cifar10"])[0] == pytest.approx(2 * 0.66 * np.sqrt(2 / 5) + 0.05)


def test_sets_of_equal_counts_are_told_apart_by_their_classes():
    results = [low_shot("ten", 90.0, classes=10), low_shot("hundred", 70.0, classes=100), low_shot("old", 90.0)]
    board = with_published(made_leaderboard(results))
    (row,) = [row for checkpoint, row in board.rows.items() if checkpoint.name == "dinov2-s"]
    assert {column: cell.mean for column, cell in row.items()} == {
        ("ten/lowshot@mieb", "top1_16shot"): 92.95,
        ("ten/lowshot@mieb", "top1_16shot_std"): 0.66,
        ("hundred/lowshot@mieb", "top1_16shot"): 77.02,
        ("hundred/lowshot@mieb", "top1_16shot_std"): 0.30,
    }
    (line,) = [line for line in board.caveats["old/lowshot@mieb"] if "published" in line]
    assert "cifar10 or cifar100" in line
    named = {
        url: set_name(DataUsed(name="x", url=url, images=SETS[key].images, classes=10))
        for key, url in (("mnist", "folder:/mnist"), ("mnist", "torchvision:MNIST:/d"), ("cifar10", "cifar10:/d"))
    }
    assert named == {"folder:/mnist": "", "torchvision:MNIST:/d": "mnist", "cifar10:/d": "cifar10"}


def test_a_comparison_shows_the_published_numbers_of_the_architecture():
    results = [low_shot("ten", 90.0, replace(USED, architecture=name), classes=10) for name in ("ViT-S/14", "ViT-T/9")]
    column = ("ten/lowshot@mieb", "top1_16shot")
    assert "dinov2-s 92.95 +- 0.66 (mieb:" in values.published_lines(results[:1], {column})[column]
    assert not values.published_lines(results[:1], set()) and not values.published_lines(results[1:], {column})


def test_published_depth_errors_are_compared_to_the_centimetre():
    value = next(value for value in VALUES if (value.table, value.metric) == ("dinov3:card", "rmse"))
    on_nyu = DataUsed(name="rooms", url="nyu:/data", images=SETS["nyu"].images)
    result = measured(value.value + 0.02, "rmse", protocol=ProtocolUsed(name=value.protocol, version=1), data=on_nyu)
    (line,) = against_published(result, [value.digest + "0" * 56])
    assert line.startswith("NOT AS PUBLISHED: rmse") and "tolerance of 0.01" in line


def test_token_predicting_methods_are_trained_with_the_tokenizer_of_their_papers():
    predicting = [value for value in VALUES if value.pretraining.split()[:1] in (["beit"], ["cae"])]
    assert predicting and all(value.pretraining.endswith(" tokenizer=encoder.pkl") for value in predicting)


def test_a_leaderboard_without_published_numbers_says_so(bench, tmp_path):
    write_result(result_path(tmp_path, USED, "in1k", "knn@moca-seed0"), measured(70.0, limit=100), {})
    code, out, err = bench("leaderboard", "--out", tmp_path, "--published")
    assert code == 0 and "(published)" not in out
    assert "no published number was measured by these protocols" in err


def test_published_rows_are_not_in_the_csv(bench, tmp_path):
    write_result(result_path(tmp_path, USED, "in1k", "knn@moca-seed0"), measured(70.0), {})
    code, out, _ = bench("leaderboard", "--out", tmp_path, "--published")
    assert code == 0 and "moca-b (published)" in out
    assert "moca-b (published)" in (tmp_path / "leaderboard.md").read_text()
    assert "moca-b" not in (tmp_path / "leaderboard.csv").read_text()
    write_leaderboard(tmp_path)
    assert "published" not in (tmp_path / "leaderboard.md").read_text()
