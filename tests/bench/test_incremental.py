"""The cache of results and tests: leaderboards and comparisons equal those without it after any change of files."""

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_compare import IMAGES, first_correct, save

from bench.reports.leaderboard import write_leaderboard
from bench.results import store
from bench.results.record import CheckpointUsed, MetricRecord, Result, read_result, record, result_files, write_result
from bench.statistics import matching, significance
from bench.statistics.compare import compare
from bench.statistics.paired import PairedTest, compare_images, compare_resamples
from bench.statistics.significance import PairedTestCache


def thirds(seed: int) -> np.ndarray:
    """Correctness averaged over three splits; the test of such fractions is a bootstrap."""
    return np.random.default_rng(seed).integers(0, 4, IMAGES).astype(np.float32) / 3


@pytest.fixture
def folder(tmp_path):
    """Results of four checkpoints, two of them level, on digits, and of three with fractions on another image set."""
    for name, top1 in (("a", 200), ("b", 249), ("c", 250), ("d", 248)):
        save(tmp_path, name, top1)
    digits = read_result(next(result_files(tmp_path))).data
    for seed, name in enumerate("abc"):
        save(tmp_path, name, 0, values=thirds(seed), data=replace(digits, name="other"))
    return tmp_path


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often results and arrays were read and tests computed since the counter was cleared."""
    counter = Counter()

    def count(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **b: (counter.update([name]), original(*a, **b))[1])

    count(store, "read_result")
    count(store, "read_arrays")
    count(matching, "compare_images")
    return counter


def board_bytes(out) -> tuple[bytes, bytes]:
    write_leaderboard(out)
    return (out / "leaderboard.csv").read_bytes(), (out / "leaderboard.md").read_bytes()


def board_bytes_without_cache(out) -> tuple[bytes, bytes]:
    shutil.rmtree(out / "cache", ignore_errors=True)
    return board_bytes(out)


def path_of(out, name, data="digits"):
    return next(path for path in result_files(out) if path.parts[-3].startswith(f"{name}-") and path.parts[-2] == data)


def add_checkpoint(out):
    save(out, "e", 150)


def add_leader(out):
    save(out, "f", 390)


def add_seed(out):
    save(out, "c", 251, seed=1)


def replace_result(out):
    save(out, "b", 300)


def record_failure(out):
    failed = replace(read_result(path_of(out, "a")), status="failed", metrics={}, message="out of memory")
    record(path_of(out, "a"), failed, {}, "a log")


def remove_leader(out):
    path = path_of(out, "c")
    path.unlink(), path.with_suffix(".npz").unlink()


def remove_arrays(out):
    path_of(out, "b").with_suffix(".npz").unlink()


def replace_arrays(out):
    write_result(path_of(out, "d"), read_result(path_of(out, "d")), {"top1": first_correct(248)[::-1]})


def damage_result(out):
    path_of(out, "a", "other").write_text("{")


def change_settings(out):
    path = path_of(out, "d")
    write_result(path, replace(read_result(path), settings={"k": [10]}), {"top1": first_correct(248)})


CHANGES = (
    *(add_checkpoint, add_leader, add_seed, replace_result, record_failure),
    *(remove_leader, remove_arrays, replace_arrays, damage_result, change_settings),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_leaderboard_has_the_bytes_of_one_made_without_cache(folder, change):
    before = board_bytes(folder)
    change(folder)
    after = board_bytes(folder)
    assert after == board_bytes(folder) == board_bytes_without_cache(folder)
    assert before != after or change is replace_arrays


def test_only_changed_results_are_read_and_tested(folder, calls):
    write_leaderboard(folder)
    assert calls["read_result"] == 7 and calls["read_arrays"] == 7 and calls["compare_images"] == 5
    calls.clear()
    write_leaderboard(folder)
    assert not calls
    save(folder, "e", 150)
    write_leaderboard(folder)  # against c, the leader of its column
    assert calls == {"read_result": 1, "read_arrays": 2, "compare_images": 1}


def test_comparisons_are_computed_once(folder, calls):
    first = compare(folder, ["a", "b", "c"])
    assert calls["compare_images"] == 6
    calls.clear()
    assert compare(folder, ["a", "b", "c"]) == first and not calls
    assert compare(folder, ["b", "a", "c"]) != first and calls["compare_images"] == 2  # of b and a
    remove_arrays(folder)
    assert any("cannot be read" in line for line in compare(folder, ["a", "b"]).left_out)


@pytest.mark.parametrize("name", ("results.json", "paired-tests.json"))
@pytest.mark.parametrize(
    "content", (b"", b"{", b"[1]", b'{"version": 0}', b'{"version": 1, "tests": {"a": {"b": "c"}}}')
)
def test_damaged_files_of_the_cache_are_written_again(folder, name, content):
    board, comparisons = board_bytes(folder), compare(folder, ["a", "b"])
    undamaged = (folder / "cache" / name).read_bytes()
    (folder / "cache" / name).write_bytes(content)
    assert board_bytes(folder) == board and compare(folder, ["a", "b"]) == comparisons
    assert json.loads((folder / "cache" / name).read_bytes()) == json.loads(undamaged)


def test_comparing_works_where_no_cache_can_be_written(folder):
    (folder / "cache").write_text("no folder")
    assert len(compare(folder, ["a", "b", "c"]).found) == 6


def test_results_cached_by_another_version_are_read_again(folder, calls, monkeypatch):
    write_leaderboard(folder)
    calls.clear()
    monkeypatch.setattr(store, "_version", lambda: "of a later version")
    write_leaderboard(folder)
    assert calls["read_result"] == 7


def test_cached_results_equal_those_of_the_files(folder):
    write_result(folder / "results/odd.json", odd_result(folder), {})
    first, _ = store.read_results(folder)
    again, _ = store.read_results(folder)
    assert again == first and [stored.path for stored in again] == list(result_files(folder))
    assert [stored.result for stored in again] == [read_result(stored.path) for stored in again]


def odd_result(folder) -> Result:
    facts = {"big": 2**62, "small": 1e-300, "one": 1.0, "text": "\u2028\N{SNOWMAN}", "deep": {"list": [None, True, []]}}
    metric = MetricRecord(value=0.1 + 0.2, interval=(-0.0, 1e22))
    checkpoint = CheckpointUsed(name="odd", digest="0" * 64)
    return replace(read_result(path_of(folder, "a")), facts=facts, metrics={"top1": metric}, checkpoint=checkpoint)


def test_results_are_listed_in_the_order_of_paths(tmp_path):
    for name in ("a-b/x/1.json", "a/x/1.json", "a/x-y/1.json", "a/x/1.failed.json", "b.json", ".c/d.json", "a/x/1.npz"):
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [tmp_path / "results" / name for name in store.stamps(tmp_path)] == list(result_files(tmp_path))


def test_the_last_of_concurrent_writers_leaves_the_leaderboard_of_all_results(tmp_path):
    def work(number: int) -> None:
        for top1 in (100, 150, 200):
            save(tmp_path, f"model{number}", top1 + 5 * number)
            write_leaderboard(tmp_path)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    written = (tmp_path / "leaderboard.csv").read_bytes(), (tmp_path / "leaderboard.md").read_bytes()
    assert written == board_bytes(tmp_path) == board_bytes_without_cache(tmp_path)


@pytest.fixture
def tests_of(monkeypatch):
    """A function that looks up the test of two results in a cache, where it is computed as given."""

    def get(cache, first, second, **numbers):
        monkeypatch.setattr(significance, "paired_test", lambda match, metric: made_test(**numbers))
        return cache.get(SimpleNamespace(identities=[[first], [second]]), "top1")

    return get


def made_test(p=1.0, **numbers):
    unset = dict(first_only=None, second_only=None, effect=None)
    numbers = dict(first=1.0, second=1.0, difference=0.0, low=0.0, high=0.0) | numbers
    return PairedTest(images=9, **numbers, **unset, test="bootstrap over images", p=p, effect_name="Cohen's d_z")


def test_caches_are_merged_and_tests_of_removed_results_dropped(tmp_path, tests_of):
    first, second = (PairedTestCache(tmp_path / "p.json") for _ in range(2))
    assert tests_of(first, "a", "b", p=0.5).p == tests_of(first, "a", "b", p=0.1).p == 0.5
    assert tests_of(second, "a", "c", p=0.25).p == 0.25
    tests_of(second, "a", "gone")
    for cache in (first, second):
        cache.save({"a", "b", "c"})
    kept = PairedTestCache(tmp_path / "p.json").tests
    assert kept == {"a|b": {"top1": made_test(p=0.5)}, "a|c": {"top1": made_test(p=0.25)}}


@pytest.mark.parametrize(("images", "unit"), [(100, "correct"), (100, "loss"), (6000, "loss"), (6000, "resampled")])
def test_tests_of_every_kind_are_cached(tmp_path, monkeypatch, images, unit):
    """With the numbers that numpy gives them: exact, by bootstrap, by the t test, and of resamples."""
    values = np.random.default_rng(0).random((2, images))
    if unit == "resampled":
        computed = compare_resamples((values[0].mean(), values[1].mean()), values, 40)
    else:
        computed = compare_images(*(values > 0.5 if unit == "correct" else values).astype(np.float32), resamples=50)
    monkeypatch.setattr(significance, "paired_test", lambda match, metric: computed)
    cache = PairedTestCache(tmp_path / "tests.json")
    cache.get(SimpleNamespace(identities=[["a"], ["b"]]), "top1")
    cache.save({"a", "b"})
    assert PairedTestCache(tmp_path / "tests.json").tests == {"a|b": {"top1": computed}}


def test_tests_of_results_without_a_digest_are_not_cached(tests_of):
    tests = PairedTestCache()
    assert [tests_of(tests, "", "b", p=p).p for p in (0.5, 0.25)] == [0.5, 0.25]


def test_numbers_that_json_lacks_are_not_cached(tests_of):
    tests = PairedTestCache()
    assert tests_of(tests, "a", "b", low=float("nan"), high=float("inf")).p == 1.0 and not tests.tests
