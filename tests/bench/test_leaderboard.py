"""The leaderboard: one row per checkpoint, comparable results in each column, caveats beside its tables."""

import csv
import io
from dataclasses import replace

import pytest
from made_results import made_metrics, made_result, save_result

from bench.reports import leaderboard
from bench.reports.leaderboard import leaderboard_of, text_table, to_csv, to_markdown, to_terminal, write_leaderboard
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed, Result, TrainingCost
from bench.statistics.significance import Ties

A = CheckpointUsed(name="alpha", digest="a" * 64, method="dino", architecture="vit_small", parameters=21665664)
B = CheckpointUsed(name="beta", digest="b" * 64, method="mae", architecture="vit_base", parameters=85798656)
KNN = ProtocolUsed(name="knn@dino", version=1)
WARNING = {"warnings": ["top1_k20: nothing was fitted"]}


def result(checkpoint=A, top1=90.0, interval=None, **fields) -> Result:
    metrics = {
        "top1_k20": MetricRecord(value=top1, interval=interval),
        "loss": MetricRecord(value=100 - top1, unit="", higher_is_better=False),
    }
    return made_result(checkpoint, fields.pop("metrics", metrics), **fields)


def rows_of(results) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(leaderboard_of(results)))))


def test_one_row_per_checkpoint_sorted_by_name():
    rows = rows_of([result(B, 80.25), result(A, 90.5)])
    assert [row["name"] for row in rows] == ["alpha", "beta"]
    assert list(rows[0]) == [
        *("name", "method", "architecture", "parameters", "digest"),
        *("digits/knn@dino:top1_k20", "digits/knn@dino:loss", "failed"),
    ]
    assert (rows[1]["digits/knn@dino:top1_k20"], rows[1]["parameters"], rows[1]["failed"]) == ("80.25", "85798656", "")


def test_checkpoints_of_one_name_have_a_row_each():
    twin = replace(A, digest="c" * 64)
    rows = rows_of([result(A, 1.0), result(twin, 2.0)])
    assert [(row["name"], row["digest"][0], row["digits/knn@dino:top1_k20"]) for row in rows] == [
        ("alpha", "a", "1.0"),
        ("alpha", "c", "2.0"),
    ]
    assert "alpha (aaaaaaaa)" in to_terminal(leaderboard_of([result(A), result(twin)]), 80)


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"limit": 100}, "digits/knn@dino[limit=100]"),
        ({"protocol": replace(KNN, version=2)}, "digits/knn@dino[v2]"),
        ({"protocol": replace(KNN, modified=True, changes={"k": [5, 10]})}, "digits/knn@dino[k=5+10]"),
        ({"precision": "bfloat16"}, "digits/knn@dino[bfloat16]"),
        ({"decode": "fast"}, "digits/knn@dino[fast]"),
        ({"data": DataUsed(name="cars", url="x")}, "cars/knn@dino"),
    ],
)
def test_incomparable_results_have_a_column_each(fields, column):
    (row,) = rows_of([result(A, 90.0), result(A, 10.0, **fields)])
    assert row["digits/knn@dino:top1_k20"] == "90.0"
    assert row[f"{column}:top1_k20"] == "10.0"


def test_seeds_and_intervals_have_columns_of_their_own():
    """The ends of an interval are means over seeds, if all seeds have an interval."""
    first, without_interval = result(A, 90.0, interval=(88.0, 92.0)), result(A, 92.0, seed=1)
    column, ends = "digits/knn@dino:top1_k20", ("", ":low", ":high", ":std", ":n")
    rows = rows_of([first, result(A, 92.0, interval=(90.0, 93.0), seed=1), result(B, 50.0)])
    assert [rows[0][column + end] for end in ends] == ["91.0", "89.0", "92.5", "1.4142135623730951", "2"]
    assert [rows[1][column + end] for end in ends] == ["50.0", "", "", "0.0", "1"]
    assert "digits/knn@dino:loss:low" not in rows[0]
    (row,) = rows_of([first, without_interval])
    assert f"{column}:low" not in row and row[column] == "91.0"
    (row,) = rows_of([first])
    assert (row[f"{column}:low"], row[f"{column}:high"]) == ("88.0", "92.0") and f"{column}:n" not in row


def test_tables_show_intervals_where_they_fit():
    metrics = made_metrics({"top1": 90.0, "top5": 99.0}, {"top1": (88.04, 91.96), "top5": (98.0, 99.5)})
    board = leaderboard_of([result(A, metrics=metrics)])
    assert "| alpha | 90.00 [88.0, 92.0] | 99.00 [98.0, 99.5] |" in to_markdown(board)
    assert "  alpha       90.00 [88.0, 92.0]  99.00 [98.0, 99.5]" in to_terminal(board, 52)
    assert "  alpha       90.00 [88.0, 92.0]  99.00" in to_terminal(board, 51).splitlines()


def test_failures_are_listed_and_leave_their_cells_empty():
    results = [result(A, status="failed", metrics={}, message="out of memory"), result(B)]
    rows = rows_of(results)
    assert rows[0]["failed"] == "digits/knn@dino seed 0"
    assert rows[0]["digits/knn@dino:top1_k20"] == ""
    board = leaderboard_of(results)
    assert "failed: alpha: digits/knn@dino seed 0: out of memory" in to_terminal(board, 80)
    assert "- failed: alpha: digits/knn@dino seed 0: out of memory" in to_markdown(board)


def test_a_damaged_file_is_reported_and_left_out(tmp_path):
    save_result(tmp_path, result(A))
    path = tmp_path / "results" / "x" / "broken.json"
    path.parent.mkdir()
    path.write_text('{"schema": 1, "status"')
    board = write_leaderboard(tmp_path)
    assert [checkpoint.name for checkpoint in board.rows] == ["alpha"]
    assert str(path) in board.problems[0]
    assert str(path) in (tmp_path / "leaderboard.md").read_text()


def test_a_result_saved_while_the_leaderboard_is_written_is_included(tmp_path, monkeypatch):
    save_result(tmp_path, result(A))
    read_leaderboard = leaderboard.read_leaderboard

    def read_before_another_process_saves(out, published):
        leaderboard = read_leaderboard(out, published)
        if len(leaderboard.rows) == 1:
            save_result(out, result(B))
        return leaderboard

    monkeypatch.setattr(leaderboard, "read_leaderboard", read_before_another_process_saves)
    assert len(write_leaderboard(tmp_path).rows) == 2
    assert "beta" in (tmp_path / "leaderboard.csv").read_text()


def test_the_best_network_and_those_tied_with_it_are_bold_and_share_a_rank():
    """But not raw pixels, nor a number that the task doubts, nor anything in a column without paired tests."""
    raw_pixels = CheckpointUsed(name="raw", digest="f" * 64, method="pixels")
    others = [result(B, 80.0), result(raw_pixels, 95.0)]
    for facts, alpha, beta in (
        ({}, "| alpha | 1-2 | **90.00** | 10.0 |", "| beta | 1-2 | **80.00** | 20.0 |"),
        (WARNING, "| alpha |  | 90.00 ? | 10.0 |", "| beta | 1 | **80.00** | 20.0 |"),
    ):
        board = leaderboard_of([result(A, 90.0, facts=facts), *others])
        everyone = frozenset(used.key for used in board.rows)
        text = to_markdown(replace(board, ties={("digits/knn@dino", "top1_k20"): Ties(everyone, everyone)}))
        assert alpha in text and beta in text and "| raw (floor) |  | 95.00 | 5.00 |" in text
        assert "**" not in to_markdown(board)
    lower = leaderboard_of([result(A, 90.0), result(B, 80.0)])
    assert lower.best == {("digits/knn@dino", "top1_k20"): 90.0, ("digits/knn@dino", "loss"): 10.0}
    assert leaderboard_of([result(A, 90.0), result(raw_pixels, 95.0)]).best == {}


def test_a_warning_about_several_checkpoints_is_one_caveat():
    warned = [result(checkpoint, facts={"warnings": ["no class token"]}) for checkpoint in (A, B)]
    unlike = [
        result(A, seed=1, facts={"warnings": ["no class token", "unlike others"]}),
        result(replace(A, name="gamma", digest="c" * 64)),
    ]
    assert leaderboard_of([*warned, *unlike]).caveats["digits/knn@dino"] == (
        f"{A.name} and {B.name}: no class token.",
        f"{A.name}: unlike others.",
        f"Networks were evaluated with different seeds ({A.name}: 0, 1; {B.name} and gamma: 0).",
    )
    assert leaderboard_of(warned).caveats["digits/knn@dino"] == ("all checkpoints: no class token.",)


def test_limits_and_modified_protocols_have_a_caveat():
    changed = replace(KNN, modified=True, changes={"k": [5]})
    text = to_markdown(leaderboard_of([result(A, protocol=changed, limit=8)]))
    assert "> 8 of 1,297 train and 8 of 500 val images (--limit 8)." in text
    assert "> Modified protocol: k = [5]." in text


def test_a_terminal_table_fits_the_width():
    metrics = made_metrics({f"top1_k{k}": float(k) for k in range(30)})
    text = to_terminal(leaderboard_of([result(A, metrics=metrics), result(B, metrics=metrics)]), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "more columns in leaderboard.csv" in text


def test_the_narrowest_table_shows_one_column():
    assert text_table([["name", "x", "y"], ["a", "1", "2"]], 1) == [
        "  name  x",
        "  a     1",
        "  ... 1 more column in leaderboard.csv",
    ]


def test_an_empty_folder_is_an_empty_board(tmp_path):
    leaderboard = write_leaderboard(tmp_path)
    assert not leaderboard.rows and not leaderboard.results
    assert to_terminal(leaderboard, 80) == "no results yet"


def test_warnings_of_a_task_are_caveats_of_its_table():
    board = leaderboard_of([result(A, facts=WARNING), result(A, seed=1), result(B), result(B, seed=1)])
    assert board.caveats["digits/knn@dino"] == (f"{A.name}: top1_k20: nothing was fitted.",)
    assert f"> {A.name}: top1_k20: nothing was fitted." in to_markdown(board)
    text = to_terminal(board, width=80)
    assert text.count("nothing was fitted") == 1 and text.count(" ?") == 1  # the number itself is marked


def test_a_warning_names_the_digest_of_a_checkpoint_whose_name_is_shared():
    board = leaderboard_of([result(A, facts=WARNING), result(replace(A, digest="c" * 64))])
    assert board.caveats["digits/knn@dino"] == ("alpha (aaaaaaaa): top1_k20: nothing was fitted.",)
    marked = [line.split(" ?")[0] for line in to_terminal(board, width=80).splitlines() if " ?" in line]
    assert len(marked) == 1 and "aaaaaaaa" in marked[0]


@pytest.mark.parametrize("value", [40.0, 40.12])
def test_dense_results_are_compared_with_a_constant_prediction(value):
    floor = {"prediction": "cell everywhere", "metrics": {"mIoU": 40.12, "aAcc": 80.24}}
    facts = {"floor": floor, "masks": {"train": ["a"], "val": ["8.1 % of the pixels are of no class"]}}
    metrics = {"mIoU": MetricRecord(value=value), "aAcc": MetricRecord(value=81.0)}
    ignored, constant, below = leaderboard_of([result(A, metrics=metrics, facts=facts)]).caveats["digits/knn@dino"]
    assert ignored == "8.1 % of the pixels are of no class."
    assert "cell everywhere" in constant and "mIoU 40.12, aAcc 80.24" in constant
    assert A.name in below and "not above the floor" in below
    metrics = {"mIoU": MetricRecord(value=40.13), "aAcc": MetricRecord(value=81.0)}
    assert len(leaderboard_of([result(A, metrics=metrics, facts=facts)]).caveats["digits/knn@dino"]) == 2


def test_raw_pixels_are_marked_as_the_floor():
    floor = CheckpointUsed(name="pixels-32", digest="f" * 64, method="pixels", architecture="raw pixels")
    facts = {"read_instead": {"cls": "avg"}, "warnings": ["the model has no class token: avg was read for cls"]}
    board = leaderboard_of([result(A), result(floor, 40.0, facts=facts)])
    assert list(board.groups) == ["digits/knn@dino"]
    caveat = "pixels-32: the model has no class token: avg was read for cls."
    for text in (to_markdown(board), to_terminal(board, 80)):
        assert "pixels-32 (floor)" in text and caveat in text and "alpha (floor)" not in text
    assert [row["name"] for row in rows_of([result(A), result(floor)])] == ["alpha", "pixels-32"]


def test_deviations_and_numbers_of_different_units_have_no_best():
    spreads = [made_metrics({"spread": value}, higher_is_better=None, deviation_of="top1") for value in (1.0, 2.0)]
    times = [made_metrics({"time": 2.0}, unit="s"), made_metrics({"time": 3.0})]
    board = leaderboard_of([result(A, metrics=spreads[0] | times[0]), result(B, metrics=spreads[1] | times[1])])
    assert not {("digits/knn@dino", name) for name in ("spread", "time")} & board.best.keys()
    assert " 2.00 s |" in to_markdown(board) and " 3.00 |" in to_markdown(board)


def test_seeds_of_a_deterministic_task_show_no_spread():
    equal = [result(A, seed=seed, random=False) for seed in range(3)]
    (row,) = rows_of(equal)
    assert not [column for column in row if column.endswith((":std", ":n"))]
    assert "+-" not in to_terminal(leaderboard_of(equal), 80)
    different = result(A, 91.0, seed=1, random=False)  # by rounding
    assert "(n=2)" in to_terminal(leaderboard_of([equal[0], different]), 80)


def test_results_without_unreadable_images_have_a_caveat_and_a_column_of_their_own():
    facts = {"train": {"skipped": {"a.png": "no image"}}, "val": {"skipped": {"b.png": "no image"}}}
    facts |= {"sets": [{"skipped": {"c.png": "no image"}}], "shifted": {"c": {"skipped": {"d.png": "no image"}}}}
    board = leaderboard_of([result(A, skip_bad=True, facts=facts), result(B, skip_bad=True)])
    assert list(board.groups) == ["digits/knn@dino", "digits/knn@dino[skipped=4]"]
    assert "4 unreadable images left out" in board.caveats["digits/knn@dino[skipped=4]"][0]
    assert board.caveats["digits/knn@dino"] == ()


def test_a_number_chosen_on_the_validation_images_has_a_caveat():
    metrics = made_metrics({"best": 90.0}, chosen_on_val=True) | made_metrics({"fixed": 89.0})
    (caveat,) = leaderboard_of([result(A, metrics=metrics)]).caveats["digits/knn@dino"]
    assert "validation images" in caveat and caveat.endswith(": best.")


def test_costs_of_pretraining_have_columns_where_they_are_known():
    """As in ExtreMA table 8 and MOCA table 5k."""
    cost = TrainingCost(hours=60.25, images_per_second=2.0, gflop_per_image=35.0, devices="8 x V100")
    trained = replace(A, training_cost=cost)
    rows = rows_of([result(trained), result(B)])
    costs = [(row["hours"], row["gflop_per_image"], row["devices"]) for row in rows]
    assert costs == [("60.25", "35.0", "8 x V100"), ("", "", "")]
    assert "memory_gib" not in rows[0] and rows[0]["digits/knn@dino:top1_k20"] == "90.0"
    text = to_markdown(leaderboard_of([result(trained), result(B)]))
    assert "| alpha | 15,200 | 434,000 | 35 |  |  | 8 x V100 |" in text and "| beta |  |" not in text
    assert "Cost of pretraining" not in to_markdown(leaderboard_of([result(A)]))
    assert "hours" not in rows_of([result(A)])[0]


@pytest.mark.parametrize("cost", [None, [], {"hours": "long", "devices": None}, {"hours": True}, {"more": 1.0}])
def test_costs_of_another_form_are_ignored(cost):
    assert TrainingCost.of({"cost": cost}) == TrainingCost()
