"""Boards of real numbers: what lies in records/ agrees with itself, and tools/board.py makes one that resumes."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_results import made_checkpoint, made_metrics, made_result, save_result
from PIL import Image

from bench.reports.record import check_record
from bench.results.record import DataUsed, ProtocolUsed
from imagesets.schemes.cifar10 import CLASSES
from imagesets.sets import open_set
from tools import board, real

BOARDS = sorted(path.parent for path in (Path(__file__).parents[1] / "records").glob("*/record.json"))
SMALLEST = "real"


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, id=folder.name, marks=() if folder.name == SMALLEST else pytest.mark.exhaustive)
        for folder in BOARDS
    ],
)
def test_published_boards_agree_with_their_results(folder):
    assert not list(check_record(folder))
    page = real.page if folder.name == "real" else board.page
    assert board.companion_file(folder, "md").read_text() == page(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 12e6


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Noise in the layout of CIFAR-10, 40 training and 10 validation images a class; the URL of it."""
    monkeypatch.setattr(board, "PER_CLASS", 40)
    pixels = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 10)):
        for name in CLASSES:
            (tmp_path / "cifar" / split / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(pixels.integers(0, 256, (32, 32, 3), np.uint8))
                picture.save(tmp_path / "cifar" / split / name / f"{number}.png")
    return f"cifar10:{tmp_path / 'cifar'}"


def test_smaller_parts_lie_in_larger_ones_and_none_holds_held_out_images(cifar, tmp_path):
    made = board.Board(cifar, tmp_path / "out", tflop=1.0)
    small, large = (open_set(made.training_subset(images), "train") for images in (100, 200))
    held_out = open_set(f"{cifar}?val={board.HELD_OUT}&seed=0", "val")
    names = [{images.images.path(index) for index in range(len(images))} for images in (small, large, held_out)]
    assert [len(paths) for paths in names] == [100, 200, 40]
    assert names[0] < names[1]
    assert not names[1] & names[2]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_board_is_made_resumed_and_recorded(cifar, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(board, "METHODS", ["mae", "lut", "supervised"])
    monkeypatch.setattr(board, "NETWORK", {"patch_size": 8, "batch": 16, "depth": 1})
    monkeypatch.setattr(board, "RATES", (1.0, 3.0))
    monkeypatch.setitem(board.SETTINGS, "linear.epochs", 4)
    words = ["board", "--images", cifar, "--transfer", cifar, "--out", str(tmp_path / "out"), "--budget", "0.02"]
    words += ["--evaluate", "knn@dino", board.LINEAR, "--record", str(tmp_path / "made")]
    monkeypatch.setattr("sys.argv", [*words, "--methods", "mae"])
    board.main()
    assert "Not in this record: lut, supervised." in (tmp_path / "made.md").read_text()
    monkeypatch.setattr("sys.argv", [*words, "--methods", "mae", "lut"])
    trained = (tmp_path / "out").glob("**/mae*/log.jsonl")
    before = {path: path.read_bytes() for path in trained}
    board.main()
    assert before == {path: path.read_bytes() for path in before}  # nothing of MAE was trained again

    folder = tmp_path / "made"
    assert not list(check_record(folder))
    about = json.loads((tmp_path / "made.json").read_text())
    assert about["starts"] == {"mae": "mae-start", "lut": "mae-start"}  # one encoder, drawn from one seed
    assert {len(rates) for rates in about["search"].values()} == {len(board.RATES)}
    for run in (tmp_path / "out" / "runs").iterdir():  # the budget, to half an update an epoch
        spent = json.loads((run / "run.json").read_text())
        update = json.loads((run / "export" / "cost.json").read_text())["gflop_per_image"] * 16
        epochs, updates = spent["settings"]["epochs"], spent["data"]["images"] // 16
        assert updates > 1
        assert abs(updates * epochs * update - 20.0) <= epochs * update / 2
    before = (folder / "leaderboard.csv").read_text(), board.companion_file(folder, "json").read_text()
    elsewhere = [str(tmp_path / "elsewhere") if word == str(tmp_path / "out") else word for word in words]
    monkeypatch.setattr("sys.argv", [*elsewhere, "--methods", "mae", "lut"])
    board.main()  # on another machine, which has the record alone
    assert before == ((folder / "leaderboard.csv").read_text(), board.companion_file(folder, "json").read_text())
    assert not (tmp_path / "elsewhere" / "runs").exists() and not list(check_record(folder))
    assert board.Record(folder=folder).curve("mae")[0], "logs of trainings are kept"
    with pytest.raises(ValueError, match=r"tflop 0\.02, and this board 1"):
        board.Board(cifar, tmp_path / "out", tflop=1.0).take_up(folder)
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["board", "--table", str(folder)])
    board.main()
    printed = capsys.readouterr().out
    assert printed in (tmp_path / "made.md").read_text()
    assert sorted(line.split("|")[1].strip() for line in printed.splitlines()[2:]) == ["lut", "mae", board.PIXELS]
    assert {"k-NN, class token", "linear", "CIFAR-100, k-NN"} < {cell.strip() for cell in printed.split("|")}
    made = board.Record(folder=folder)
    assert made.number("mae-start", board.KNN), "evaluated, for the gains in the table"
    shares, accuracies = made.curve("mae")
    assert len(shares) == len(accuracies) > 1
    assert shares[-1] == 1.0
    drawn = [[axis.get_title() for axis in figure.axes if axis.axison] for figure in (made.figure(), made.curves())]
    assert drawn == [
        ["k-NN, class token, %", "linear, %", "CIFAR-100, linear, %"],
        [name for name in made.names if name != board.PIXELS],
    ]
    for option in ("--figure", "--curves"):
        monkeypatch.setattr("sys.argv", ["board", option, str(folder), str(tmp_path / f"{option}.png")])
        board.main()
        assert (tmp_path / f"{option}.png").stat().st_size > 0


def test_another_rate_is_chosen_only_if_it_is_clearly_better():
    assert board.chosen_rate({"0.33": 30.0, "1": 29.5, "3": 20.0}) == "1"
    assert board.chosen_rate({"0.33": 30.0, "1": 28.5, "3": 31.0}) == "3"
    assert board.chosen_rate({"0.33": 31.5, "1": 29.5}) == "1", "the margin itself is not clearly better"
    assert board.chosen_rate({"0.33": 30.0, "1": 29.5}, margin=0.0) == "0.33"


def test_a_board_shows_what_its_networks_have(tmp_path):
    """Without k-NN, and with initial weights whose network is not evaluated yet, as after a kill."""
    folder = tmp_path / "made"
    for number, (name, data) in enumerate((("mae", "cifar10"), ("mae-start", "cifar10"), ("mae-start", "cifar100"))):
        used = DataUsed(name=data, url=f"{data}:x", images={"train": 90, "val": 10})
        protocol = ProtocolUsed(name=board.LINEAR, version=1, source="x")
        result = made_result(made_checkpoint(name, number), made_metrics({"top1": 60.0}), data=used, protocol=protocol)
        save_result(folder, result, {})
    board.companion_file(folder, "json").write_text(json.dumps({"starts": {"mae": "mae-start"}}))
    made = board.Record(folder=folder)
    assert [(column.data, column.protocol) for column in made.columns] == [("cifar10", board.LINEAR)]
    assert "| mae | 60.0 |" in made.table() and made.gains == {}


def test_several_seeds_are_averaged_in_the_columns_that_all_of_them_have(tmp_path):
    folder = tmp_path / "made"
    data = DataUsed(name="cifar10", url="cifar10:x", images={"train": 90, "val": 10})
    protocol = ProtocolUsed(name=board.LINEAR, version=1, source="x")
    for seed, (start, value) in enumerate(((20.0, 40.0), (22.0, 46.0), (21.0, 43.0))):
        for kind, top1 in (("", value), ("-start", start)):
            used = made_checkpoint(f"{board.label('mae', seed)}{kind}", 2 * seed + bool(kind))
            save_result(folder, made_result(used, made_metrics({"top1_k20": top1}), data=data), {})
            if not seed:
                save_result(folder, made_result(used, made_metrics({"top1": top1}), data=data, protocol=protocol), {})
    names = [board.label("mae", seed) for seed in range(3)]
    about = {"starts": {name: f"{name}-start" for name in names}}
    board.companion_file(folder, "json").write_text(json.dumps(about))
    made = board.Record(folder=folder)
    assert [column.header for column in made.columns] == ["k-NN, class token", "linear"]
    header, _, row = made.seeds().splitlines()[-3:]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["method", "trainings", "k-NN, class token"]
    low, high = 22 - 4.302653 * 2 / 3**0.5, 22 + 4.302653 * 2 / 3**0.5  # Student's t at 97.5 % with two degrees
    assert row == f"| mae | 3 | 43.0 \u00b1 3.0, +22.0 [{low:.1f}, {high:.1f}] |"
    assert "| mae | 40.0 | 40.0 |" in made.table(), "the first table has one training of each method"
    strokes = [line.get_xdata().item() for line in made.figure().axes[0].lines if line.get_marker() == "|"]
    assert strokes == [46.0, 43.0]


def test_two_trainings_under_one_name_are_refused(tmp_path):
    data = DataUsed(name="cifar10", url="cifar10:x")
    for number in (1 << 250, 2 << 250):  # digests whose first digits differ
        result = made_result(made_checkpoint("mae", number), made_metrics({"top1": 60.0}), data=data)
        save_result(tmp_path / "made", result, {})
    with pytest.raises(ValueError, match="a second result of mae cifar10"):
        board.Record(folder=tmp_path / "made").results  # noqa: B018
