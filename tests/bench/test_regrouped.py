"""Numbers share a column only if they are of the same images, and each checkpoint and seed counts once."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_checkpoint, made_result, save_result

from bench.reports.contents import headline, verdict
from bench.reports.leaderboard import leaderboard_of, read_leaderboard, to_csv, to_markdown, to_terminal
from bench.reports.page import contents_of
from bench.reports.record import check_record, write_record
from bench.reports.site import site_page
from bench.results.record import DataUsed, MetricRecord
from bench.statistics.compare import compare
from bench.statistics.paired import holm_of_networks

IMAGES = 400
PETS = DataUsed(
    name="pets", url="folder:pets", fingerprints={"train": "aa", "val": "bb"}, images={"train": 800, "val": IMAGES}
)
COLUMN = "pets/knn@dino", "top1"


def save(out, name, correct, **fields):
    """Save a result whose first `correct` images are right."""
    values = (np.arange(IMAGES) < correct).astype(np.float32)
    metrics = {"top1": MetricRecord(value=float(100 * values.mean()), array="top1")}
    used = made_checkpoint(name, fields.pop("number", sum(name.encode())))
    return save_result(out, made_result(used, metrics, **dict(data=PETS) | fields), {"top1": values}).path


@pytest.mark.parametrize("change", [{"fingerprints": {"train": "aa", "val": "cc"}}, {"contents": {"val": "1-2-3"}}])
def test_results_on_other_images_of_the_same_name_have_a_table_of_their_own(tmp_path, change):
    out, record = tmp_path / "out", tmp_path / "record"
    before = replace(PETS, contents={"val": "4-5-6"})
    save(out, "a", 380, data=before, date="2026-01-01")
    save(out, "b", 300, data=replace(before, **change), date="2026-01-02")
    board = read_leaderboard(out)
    other, group = sorted(board.groups)
    assert group == "pets/knn@dino" and other.startswith("pets-") and other.endswith("/knn@dino")
    assert [used.name for used in board.checkpoints_in(group)] == ["b"], "the newest has the name"
    (problem,) = board.problems
    assert problem.startswith("pets: val ") and problem.endswith(f" {other.partition('/')[0]}")
    assert problem in to_terminal(board, 120, [group])
    assert "better than every other" not in " ".join(map(verdict, contents_of(board).tables))
    assert compare(out, ["a", "b"]).left_out[0] == problem
    write_record(out, record)
    assert not [line for line in check_record(record) if line.startswith("leaderboard")]
    assert f"## {other}" in (record / "leaderboard.md").read_text()
    assert "every other" not in site_page(record)


def test_a_result_that_lies_twice_in_a_folder_counts_once(tmp_path):
    """As after `cp -r` of another machine's results into a folder that has them already."""
    out = tmp_path / "out"
    older = save(out, "a", 380, date="2026-01-01")
    shutil.copytree(out / "results", tmp_path / "kept")
    save(out, "a", 200, date="2026-01-02")
    shutil.copytree(tmp_path / "kept", out / "results" / "results")
    board = read_leaderboard(out)
    (cells,) = board.rows.values()
    assert (cells[COLUMN].mean, cells[COLUMN].seeds) == (50.0, 1)
    copy = out / "results" / "results" / older.relative_to(out / "results")
    assert board.problems == (f"{copy}: not counted, as {older} has the same checkpoint, protocol and seed",)


def test_a_network_without_a_paired_test_has_no_rank(tmp_path):
    for name, correct in (("a", 380), ("b", 300), ("c", 379)):
        path = save(tmp_path, name, correct)
    path.with_suffix(".npz").unlink()
    board = read_leaderboard(tmp_path)
    assert {name: rank for (name, _), rank in board.ranks(COLUMN).items()} == {"a": "1", "b": "2"}
    report = contents_of(board)
    assert "every other" not in verdict(report.tables[0]) and "1 of the 2 others" in verdict(report.tables[0])
    assert "significantly better than all others" not in headline(report)
    save(tmp_path, "c", 379)
    assert sorted(read_leaderboard(tmp_path).ranks(COLUMN).values()) == ["1-2", "1-2", "3"]


def test_notes_say_which_networks_are_one_and_that_seeds_differ(tmp_path):
    for seed in range(3):
        save(tmp_path, "a", 380, seed=seed)
    save(tmp_path, "b", 300)
    save(tmp_path, "c", 300, number=sum(b"b"))
    text = to_markdown(read_leaderboard(tmp_path))
    assert "> b and c have the same weights." in text
    assert "(a: 0, 1, 2; b and c: 0)" in text
    save(tmp_path / "other", "a", 380)
    save(tmp_path / "other", "b", 300)
    assert not read_leaderboard(tmp_path / "other").caveats["pets/knn@dino"]


def test_results_of_a_protocol_changed_under_the_same_version_have_a_note(tmp_path):
    save(tmp_path, "a", 380, settings={"k": [20], "added": 1})
    save(tmp_path, "b", 300, settings={"k": [20.0]})
    assert not read_leaderboard(tmp_path).caveats["pets/knn@dino"]
    save(tmp_path, "c", 300, settings={"k": [5, 10]})
    (note,) = read_leaderboard(tmp_path).caveats["pets/knn@dino"]
    assert "Not comparable" in note and "k is 20 of a and b; 5+10 of c" in note


def test_copies_of_a_network_change_no_rank_of_another(tmp_path):
    """p of b against a is 0.03125, which Holm's correction over two tests would double."""
    for name, correct, digest in (("a", 200, "a"), ("a-copy", 200, "a"), ("b", 194, "b"), ("b-copy", 194, "b")):
        save(tmp_path, name, correct, number=ord(digest))
    board = read_leaderboard(tmp_path)
    ranks = {name: rank for (name, _), rank in board.ranks(COLUMN).items()}
    assert ranks == {"a": "1-2", "a-copy": "1-2", "b": "3", "b-copy": "3"}
    for name in ("b", "b-copy"):
        shutil.rmtree(next((tmp_path / "results").glob(f"{name}-0*")))
    assert {*read_leaderboard(tmp_path).ranks(COLUMN).values()} == {"1-2"}
    save(tmp_path, "a-copy", 100, number=ord("a"))  # as at another image size
    save(tmp_path, "b", 194, number=ord("b"))
    assert {name: rank for (name, _), rank in read_leaderboard(tmp_path).ranks(COLUMN).items()}["a-copy"] == "3"
    p = {("b", "start"): 0.03, ("c", "start"): 0.03, ("b", "pixels"): 0.03, ("d", "start"): 0.2}
    corrected = holm_of_networks(p, network=lambda test: (test[0].replace("c", "b"), test[1]))
    assert list(corrected.values()) == pytest.approx([0.09, 0.09, 0.09, 0.2])


def test_doubted_numbers_are_marked_in_the_csv(tmp_path):
    a, b = (made_checkpoint(name, number) for number, name in enumerate("ab"))
    metrics = {"top1": MetricRecord(value=80.0)}
    doubted = made_result(a, metrics, facts={"warnings": ["top1: nothing was fitted"]})
    text = to_csv(leaderboard_of([doubted, made_result(b, metrics)]))
    header, *rows = (line.split(",") for line in text.splitlines())
    assert [row[header.index("digits/knn@dino:top1:doubtful")] for row in rows] == ["1", "0"]
    assert "doubtful" not in to_csv(leaderboard_of([made_result(b, metrics)]))
