"""What is kept of results and tests saves time and changes nothing: boards and verdicts have the bytes that they have
without it, whatever came, went or was damaged meanwhile."""

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from test_compare import IMAGES, save

from bench.leaderboards.files import write_leaderboard
from bench.results import store
from bench.results.record import CheckpointUsed, MetricRecord, Result, read_result, record, result_files, write_result
from bench.statistics import matching
from bench.statistics.compare import compare
from bench.statistics.paired import PairedTest
from bench.statistics.significance import PairedTestCache


def right(count: int) -> np.ndarray:
    return (np.arange(IMAGES) < count).astype(np.float32)


def thirds(seed: int) -> np.ndarray:
    """Correctness averaged over three splits, of which the test is a bootstrap."""
    return np.random.default_rng(seed).integers(0, 4, IMAGES).astype(np.float32) / 3


@pytest.fixture
def folder(tmp_path):
    """Four checkpoints, two of them level, on two image sets, one of which has fractions."""
    for name, top1 in (("a", 200), ("b", 249), ("c", 250), ("d", 248)):
        save(tmp_path, name, top1)
    digits = read_result(next(result_files(tmp_path))).data
    for seed, name in enumerate("abc"):
        save(tmp_path, name, 0, values=thirds(seed), data=replace(digits, name="other"))
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """Files read, arrays opened and p values made since it was cleared."""
    counts = Counter()

    def count(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **b: (counts.update([name]), original(*a, **b))[1])

    count(store, "read_result")
    count(store, "read_arrays")
    count(matching, "paired_p_value")
    count(matching, "compare_images")
    return counts


def board_bytes(out) -> tuple[bytes, bytes]:
    write_leaderboard(out)
    return (out / "leaderboard.csv").read_bytes(), (out / "leaderboard.md").read_bytes()


def from_nothing(out) -> tuple[bytes, bytes]:
    shutil.rmtree(out / "cache", ignore_errors=True)
    return board_bytes(out)


def path_of(out, name, data="digits"):
    return next(path for path in result_files(out) if path.parts[-3].startswith(f"{name}-") and path.parts[-2] == data)


def a_new_checkpoint(out):
    save(out, "e", 150)


def a_new_leader(out):
    save(out, "f", 390)


def another_seed(out):
    save(out, "c", 251, seed=1)


def a_result_made_again(out):
    save(out, "b", 300)


def a_failure(out):
    failed = replace(read_result(path_of(out, "a")), status="failed", metrics={}, message="out of memory")
    record(path_of(out, "a"), failed, {}, "a log")


def a_removed_leader(out):
    path = path_of(out, "c")
    path.unlink(), path.with_suffix(".npz").unlink()


def lost_arrays(out):
    path_of(out, "b").with_suffix(".npz").unlink()


def other_arrays(out):
    np.savez(path_of(out, "d").with_suffix(".npz"), top1=right(248)[::-1])


def a_damaged_result(out):
    path_of(out, "a", "other").write_text("{")


def other_settings(out):
    path = path_of(out, "d")
    write_result(path, replace(read_result(path), settings={"k": [10]}), {"top1": right(248)})


CHANGES = (
    *(a_new_checkpoint, a_new_leader, another_seed, a_result_made_again, a_failure),
    *(a_removed_leader, lost_arrays, other_arrays, a_damaged_result, other_settings),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_board_has_the_bytes_of_one_made_from_nothing(folder, change):
    before = board_bytes(folder)
    change(folder)
    after = board_bytes(folder)
    assert after == board_bytes(folder) == from_nothing(folder)
    assert before != after or change is other_arrays


def test_many_changes_in_a_row(folder):
    order = np.random.default_rng(0).permutation(len(CHANGES))
    for change in [CHANGES[place] for place in order if CHANGES[place] not in (a_removed_leader, a_damaged_result)]:
        change(folder)
        kept = board_bytes(folder)
        cache = (folder / "cache").rename(folder / "aside")
        assert kept == board_bytes(folder)
        shutil.rmtree(folder / "cache")
        cache.rename(folder / "cache")


def test_only_what_changed_is_read_and_tested(folder, counted):
    write_leaderboard(folder)
    assert counted["read_result"] == 7 and counted["read_arrays"] == 7 and counted["paired_p_value"] == 5
    counted.clear()
    write_leaderboard(folder)
    assert not counted
    save(folder, "e", 150)
    write_leaderboard(folder)  # against c, the leader of its column
    assert counted == {"read_result": 1, "read_arrays": 2, "paired_p_value": 1}


def test_comparisons_are_made_once(folder, counted):
    first = compare(folder, ["a", "b", "c"])
    assert counted["compare_images"] == 6
    counted.clear()
    assert compare(folder, ["a", "b", "c"]) == first and not counted
    assert compare(folder, ["b", "a", "c"]) != first and counted["compare_images"] == 2  # of b and a
    lost_arrays(folder)
    assert any("cannot be read" in line for line in compare(folder, ["a", "b"]).left_out)


@pytest.mark.parametrize("name", ("results.json", "p-values.json", "comparisons.json"))
@pytest.mark.parametrize(
    "content", (b"", b"{", b"[1]", b'{"version": 0}', b'{"version": 1, "tests": {"a": {"b": "c"}}}')
)
def test_damaged_files_are_made_again(folder, name, content):
    expected, compared = board_bytes(folder), compare(folder, ["a", "b"])
    sound = (folder / "cache" / name).read_bytes()
    (folder / "cache" / name).write_bytes(content)
    assert board_bytes(folder) == expected and compare(folder, ["a", "b"]) == compared
    assert json.loads((folder / "cache" / name).read_bytes()) == json.loads(sound)


def test_a_folder_of_somebody_else_is_read_all_the_same(folder):
    (folder / "cache").write_text("no folder")
    assert len(compare(folder, ["a", "b", "c"]).found) == 6


def test_what_another_type_of_result_wrote_is_read_again(folder, counted, monkeypatch):
    write_leaderboard(folder)
    counted.clear()
    monkeypatch.setattr(store, "_version", lambda: "of a later version")
    write_leaderboard(folder)
    assert counted["read_result"] == 7


def test_what_is_read_from_the_index_is_what_was_read_from_the_files(folder):
    write_result(folder / "results/odd.json", odd_result(folder), {})
    first, _ = store.read_results(folder)
    again, _ = store.read_results(folder)
    assert again == first and [stored.path for stored in again] == list(result_files(folder))
    assert [stored.result for stored in again] == [read_result(stored.path) for stored in again]


def odd_result(folder) -> Result:
    facts = {"big": 2**62, "small": 1e-300, "one": 1.0, "text": "\u2028\N{SNOWMAN}", "deep": {"list": [None, True, []]}}
    metric = MetricRecord(value=0.1 + 0.2, interval=(-0.0, 1e22))
    used = CheckpointUsed(name="odd", digest="0" * 64)
    return replace(read_result(path_of(folder, "a")), facts=facts, metrics={"top1": metric}, checkpoint=used)


def test_files_in_the_order_of_paths(tmp_path):
    for name in ("a-b/x/1.json", "a/x/1.json", "a/x-y/1.json", "a/x/1.failed.json", "b.json", ".c/d.json", "a/x/1.npz"):
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [tmp_path / "results" / name for name in store.stamps(tmp_path)] == list(result_files(tmp_path))


def test_writers_at_the_same_time(tmp_path):
    """Each writes its results and the board after each; the last board is that of all results."""

    def work(number: int) -> None:
        for top1 in (100, 150, 200):
            save(tmp_path, f"model{number}", top1 + 5 * number)
            write_leaderboard(tmp_path)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    written = (tmp_path / "leaderboard.csv").read_bytes(), (tmp_path / "leaderboard.md").read_bytes()
    assert written == board_bytes(tmp_path) == from_nothing(tmp_path)


def test_tests_of_results_that_are_gone_are_dropped(tmp_path):
    ours, others = (PairedTestCache(tmp_path / "p.json", float) for _ in range(2))
    assert ours.get([["a"], ["b"]], "top1", lambda: 0.5) == 0.5
    assert others.get([["a"], ["c"]], "top1", lambda: 0.25) == 0.25
    assert others.get([["a"], ["gone"]], "top1", lambda: 0.75) == 0.75
    for each in (ours, others):
        each.save({"a", "b", "c"})
    again = PairedTestCache(tmp_path / "p.json", float)
    assert again.tests == {"a|b": {"top1": 0.5}, "a|c": {"top1": 0.25}}


def test_without_an_identity_nothing_is_kept(tmp_path):
    tests = PairedTestCache(tmp_path / "p.json", float)
    assert [tests.get([[""], ["b"]], "top1", lambda p=p: p) for p in (0.5, 0.25)] == [0.5, 0.25]


def test_numbers_that_json_lacks_are_not_kept(tmp_path):
    numbers = dict(first=1.0, second=1.0, difference=0.0, low=float("nan"), high=float("inf"))
    empty = dict(first_only=None, second_only=None, effect=None, odds_ratio=None)
    odd = PairedTest(images=9, **numbers, **empty, test="bootstrap over images", p=1.0, effect_name="Cohen's d_z")
    tests = PairedTestCache(tmp_path / "tests.json", PairedTest)
    assert tests.get([["a"], ["b"]], "miou", lambda: odd) is odd and not tests.tests
