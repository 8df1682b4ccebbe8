"""The image size of an evaluation: its default, `--image-size`, and what tables and tests make of two sizes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import made_checkpoint, made_metrics, made_result, save_result
from shown_results import report_of

import bench
from bench.__main__ import main
from bench.reports.leaderboard import leaderboard_of, read_leaderboard, to_csv
from bench.reports.page import contents_of
from bench.results.record import read_result, result_files
from bench.results.store import StoredResult
from bench.statistics.matching import match_results
from checkpoints.flops import forward_flops
from checkpoints.importing import card_size
from engine.errors import UserError
from tests.probes.toy_exports import export_of_size

GROUP = "digits/knn@dino[limit=60]"


def run(out, folder, *words) -> int:
    shared = ("--suite", "knn@dino", "--data", "digits=digits:", "--limit", "60", "--name", "toy", "--out", str(out))
    return main(["run", "--checkpoint", str(folder), *shared, *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An export with positions for 32 px whose source evaluates it on images of 16 px."""
    export = export_of_size(32)
    return replace(export, facts={"evaluation_size": 16}).save(tmp_path_factory.mktemp("exports") / "toy")


@pytest.fixture(scope="module")
def out(tmp_path_factory, folder):
    """Results at the size of the source's evaluation, at that of the positions and at a size with two sides."""
    out = tmp_path_factory.mktemp("out")
    assert run(out, folder) == run(out, folder, "--image-size", "32") == run(out, folder, "--image-size", "16x24") == 0
    return out


def test_a_size_is_a_choice_of_the_evaluation(out, folder, capsys):
    results = {path.stem: read_result(path) for path in result_files(out)}
    sizes = {name: (result.image_size, result.group) for name, result in results.items()}
    assert sizes == {
        "knn@dino-limit60-16px-seed0": (16, GROUP),
        "knn@dino-limit60-seed0": (32, "digits/knn@dino[limit=60 32px]"),  # the path of earlier versions
        "knn@dino-limit60-16x24px-seed0": ((16, 24), "digits/knn@dino[limit=60 16x24px]"),
    }
    checkpoints = {result.checkpoint for result in results.values()}
    assert len({used.digest for used in checkpoints}) == 1
    assert {(used.image_size, used.table_size) for used in checkpoints} == {(16, 32)}
    assert "_crop16_" in results["knn@dino-limit60-16px-seed0"].facts["val"]["transform"]
    resized = bench.load(str(folder), image_size=16)  # an export of its own at this size has the same features
    capsys.readouterr()
    same = bench.evaluate(resized, "knn@dino", "digits=digits:", limit=60, out=out / "resized")
    assert same.numbers == results["knn@dino-limit60-16px-seed0"].numbers
    assert same.image_size == 16 and not same.chosen_size


def test_the_size_is_printed_with_its_cost_before_anything_is_computed(out, folder, capsys):
    cost = f"{forward_flops(export_of_size(16).spec) / 1e9:.3g} GFLOP"
    for words in (["inspect", str(folder)], ["run", "--dry-run"]):
        capsys.readouterr()
        assert (main(words) if words[0] == "inspect" else run(out, folder, "--dry-run", "--rerun")) == 0
        printed = capsys.readouterr().out
        assert "16 px" in printed and cost in printed and "32 px" in printed


def test_sizes_that_do_not_fit_and_pixels(out, folder, capsys):
    with pytest.raises(UserError, match="whole patches are 24") as refused:
        bench.evaluate(str(folder), "knn@dino", "digits=digits:", image_size=23, out=out)
    assert refused.value.argument == "image_size"
    pixels = bench.evaluate("pixels:8", "knn@dino", "digits=digits:", image_size=32, limit=60, out=out / "pixels")
    assert pixels.image_size == 8 and not pixels.chosen_size


def test_results_without_a_size_are_those_of_the_positions(out, tmp_path):
    for path in result_files(out):
        if "24px" not in path.stem:
            result = json.loads(path.read_text())
            if path.stem == "knn@dino-limit60-seed0":  # as earlier versions wrote it
                del result["image_size"], result["checkpoint"]["image_size"], result["checkpoint"]["table_size"]
            target = tmp_path / path.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(result))
    assert {*read_leaderboard(tmp_path).groups} == {GROUP, "digits/knn@dino[limit=60 32px]"}


def test_two_default_sizes_share_a_table_that_shows_them(tmp_path):
    metrics = made_metrics({"top1": 50.0})
    for number, size in enumerate((224, 518), start=1):
        used = made_checkpoint(f"at{size}", number, image_size=size)
        save_result(tmp_path, made_result(used, metrics, image_size=size))
    board = read_leaderboard(tmp_path)
    (caveat,) = board.caveats["digits/knn@dino"]
    assert "at224 224 px" in caveat and "at518 518 px" in caveat
    header, *rows = [line.split(",") for line in to_csv(board).splitlines()]
    assert [row[header.index("image_size")] for row in rows] == ["224", "518"]


def test_raw_pixels_stand_beside_networks_at_chosen_sizes():
    floor = made_checkpoint("pixels", 1, image_size=32, method="pixels")
    network = made_checkpoint("network", 2, image_size=224)

    def result(used, size, top1, **fields):
        return made_result(used, made_metrics({"top1": top1}), image_size=size, **fields)

    raw, default, small = result(floor, 32, 30.0), result(network, 224, 60.0), result(network, 98, 50.0)
    other = result(network, 98, 45.0, limit=5)  # raw pixels were not evaluated with this limit
    board = leaderboard_of([raw, default, small, other])
    numbers = {
        used.name: {group: cell.mean for (group, _), cell in cells.items()} for used, cells in board.rows.items()
    }
    assert numbers["pixels"] == {default.group: 30.0, small.group: 30.0}
    assert numbers["network"] == {default.group: 60.0, small.group: 50.0, other.group: 45.0}
    assert [table.group for table in report_of([raw, small]).tables] == [small.group], "raw pixels are shown once"
    assert len(report_of([raw]).tables) == 1 and len(report_of([raw, other]).tables) == 2
    elsewhere = replace(raw, data=replace(raw.data, name="others"))
    assert len(report_of([raw, elsewhere]).tables) == 2, "equal numbers of other images"
    stored = [StoredResult(path=Path("result.json"), result=each) for each in (raw, default, small, other)]
    matches, _ = match_results(stored[1:], stored[:1], ("network", "pixels"))
    assert [match.group for match in matches] == [default.group, small.group]


def test_raw_pixels_and_initial_weights_are_baselines_at_a_chosen_size(tmp_path):
    """Raw pixels of their one size; initial weights of the size that was chosen, or whose own size it is."""
    right = np.random.RandomState(0).rand(3, 400) < np.array([[0.3], [0.5], [0.8]])
    floor = made_checkpoint("pixels", 1, image_size=32, method="pixels")
    start = made_checkpoint("start", 2, image_size=98, source="runs/a/start")
    network = made_checkpoint("network", 3, image_size=224, source="runs/a/export")
    for used, size, values in zip((floor, start, network), (32, 98, 98), right, strict=True):
        metrics = made_metrics({"top1": 100 * values.mean()}, array="top1", array_over="images")
        save_result(tmp_path, made_result(used, metrics, image_size=size), {"top1": values})
    report = contents_of(read_leaderboard(tmp_path))
    gains = {table.group: table.gains for table in report.tables}
    gain = gains["digits/knn@dino[98px]"][network.key]
    assert gain.marks == "s p" and not gains["digits/knn@dino"]
    for baseline, test in zip(right, (gain.tests["pixels"], gain.tests["start"]), strict=False):
        assert test[0].difference == pytest.approx(100 * (right[2].mean() - baseline.mean()))


def test_a_size_that_is_the_others_own_is_comparable():
    """A network of 98 px and one evaluated with --image-size 98 saw the same images; other sizes are no pairs."""
    small, large = made_checkpoint("small", 1, image_size=98), made_checkpoint("large", 2, image_size=224)

    def result(used, size, **fields):
        made = made_result(used, made_metrics({"top1": 50.0}), image_size=size, **fields)
        return StoredResult(path=Path("result.json"), result=made)

    own, chosen, default = result(small, 98), result(large, 98), result(large, 224)
    for sides in (([own], [chosen, default]), ([chosen, default], [own])):
        matches, reasons = match_results(*sides, ("a", "b"))
        assert [match.group for match in matches] == ["digits/knn@dino", "digits/knn@dino[98px]"] and not reasons
        assert [match.sides[sides[0] == [own]] for match in matches] == [(default,), (chosen,)]
    for other in (result(large, 112), result(large, 98, limit=5)):
        assert not match_results([own], [other], ("a", "b"))[0]


def test_the_cards_size_is_for_the_networks_of_the_card():
    plain = export_of_size(224).spec
    sizes = {
        518: replace(plain, image_size=518, patch_size=14),
        256: replace(plain, image_size=256, architecture="vit_base_patch16_dinov3", rotary="centred"),
    }
    assert {card_size(spec) for spec in sizes.values()} == {224}
    assert [card_size(replace(spec, image_size=112)) for spec in sizes.values()] == [112, 112]
    assert card_size(replace(plain, image_size=256)) == 256
