"""The page of `bench report`: leaders and shared ranks, escaped content, and its behaviour in a browser."""

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import EVIL, made_checkpoint, made_leaderboard, save_result
from shown_results import Elements, report_of, result, shown
from small_exports import make_export

from bench.reports.contents import Gain, compared_with_pixels, headline, provenance, verdict
from bench.reports.details import image_details
from bench.reports.leaderboard import cell_text, leaderboard_with_ties, read_leaderboard
from bench.reports.page import contents_of, packed, page_of, report_page
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed, Result, TrainingCost
from bench.results.store import comparable_results
from bench.statistics.paired import compare_images
from bench.statistics.significance import paired_tests
from checkpoints.export import ViTExport, spec_in
from checkpoints.flops import forward_flops
from imagesets.sets import open_set

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page(results, ties=None) -> str:
    return page_of(report_of(results, ties))


def level_of(*checkpoints: CheckpointUsed) -> dict:
    return {("digits/knn@dino", "top1"): frozenset((checkpoint.name, checkpoint.digest) for checkpoint in checkpoints)}


def test_tied_checkpoints_share_a_rank_and_are_bold():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc", 1))
    raw_pixels = made_checkpoint("raw", 4, method="pixels")
    results = [result(c, 60.0), result(a, 80.0), result(b, 79.5), result(raw_pixels, 70.0)]
    (table,) = report_of(results, level_of(a, b)).tables
    assert shown(table) == [
        ("a", "measured", "1-2", True),
        ("b", "measured", "1-2", True),
        ("raw (floor)", "floor", "", False),
        ("c", "measured", "3", False),
    ]
    assert table.leaders == ["a", "b"] and verdict(table).startswith("a and b lead on 500 images; a paired test")
    (table,) = report_of(results, level_of(a)).tables
    assert [row[2] for row in shown(table)] == ["1", "2", "", "3"] and verdict(table).startswith("a leads on 500")
    (table,) = report_of(results[:1]).tables
    assert verdict(table) == "c is the only trained network measured on 500 images."


def test_a_network_alone_has_neither_rank_nor_shade():
    a, b = (made_checkpoint(name, number) for number, name in enumerate("ab"))
    for results, count in (([result(a, 80.0)], 0), ([result(a, 80.0), result(b, 80.0)], 2)):
        (table,) = report_of(results, level_of(a, b) if count else {}).tables
        assert len(table.shades) == len(table.ranks) == count


def test_shades_follow_the_distance_in_units_of_intervals():
    """Intervals are 4 wide, so numbers half a point apart look alike."""
    shades = []
    for distance in (0.5, 40.0):
        values = (80.0, 80.0 - distance)
        results = [result(made_checkpoint(f"n{number}", number), value) for number, value in enumerate(values)]
        (table,) = report_of(results).tables
        shades.append(list(table.shades.values()))
    assert shades == [[10, 9], [10, 0]]


def test_the_lowest_number_leads_where_lower_is_better():
    quick, slow = made_checkpoint("quick", 1), made_checkpoint("slow", 2)
    metrics = {"seconds": MetricRecord(value=3.0, unit="s", higher_is_better=False)}
    results = [
        result(slow, 1.0, metrics={"seconds": replace(metrics["seconds"], value=9.0)}),
        result(quick, 1.0, metrics=metrics),
    ]
    (table,) = report_of(results).tables
    assert [row[0] for row in shown(table)] == ["quick", "slow"]
    assert "no paired test" in verdict(table)


def test_the_headline_claims_only_what_paired_tests_support():
    a, b = made_checkpoint("a", 1), made_checkpoint("b", 2)
    other_data = DataUsed(name="cifar10", url="cifar10:x")
    results = [result(a, 80.0), result(b, 70.0), result(a, 50.0, data=other_data), result(b, 60.0, data=other_data)]
    tied = frozenset((checkpoint.name, checkpoint.digest) for checkpoint in (a, b))
    ties = level_of(a) | {("cifar10/knn@dino", "top1"): tied}
    text = headline(report_of(results, ties))
    assert text.startswith(
        "Best or tied with the best in 2 protocols: a in 2 (significantly better than all others in 1)"
    )
    assert text.endswith(" One training each: seeds can change the order.")
    text = headline(report_of(results, dict.fromkeys(ties, tied)))
    assert ": a in 2; b in 2." in text
    report = report_of(results[:1])
    assert "nothing to rank" in headline(report)


def test_a_doubted_number_is_not_among_those_that_a_leader_must_beat():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc", 1))
    doubted = result(c, 20.0, facts={"warnings": ["top1: nothing was fitted"]})
    report = report_of([result(a, 80.0), result(b, 70.0), doubted], level_of(a))
    assert "a in 1 (significantly better than all others in 1)" in headline(report)
    assert "better than every other" in verdict(report.tables[0])
    assert verdict(report.tables[0]).endswith(" Not compared: 1 network whose number is doubted.")


def test_a_page_names_the_protocols_in_which_the_smallest_share_beats_raw_pixels():
    """By share and not by number, and it says nothing of the others but how many there are."""
    networks = [made_checkpoint(f"n{number}", number) for number in range(4)]
    pairs = np.ones((2, 100), np.float32)
    pairs[1, :30] = 0
    better = compare_images(*pairs)

    def text_of(shares: dict[str, tuple[int, int]]) -> str:
        results = [result(used, 60.0, data=DataUsed(name=data, url=data)) for data in shares for used in networks]
        report = report_of(results, level_of(networks[0]))
        tables = []
        for table in report.tables:
            beat, of = shares[table.result.data.name]
            gains = {
                used.key: Gain(tests={"pixels": (better, 0.001 if number < beat else 1.0)})
                for number, used in enumerate(networks[:of])
            }
            tables.append(replace(table, gains=gains))
        return compared_with_pixels(replace(report, tables=tuple(tables)))

    text = text_of({"digits": (3, 3), "second": (2, 4), "third": (0, 2), "fourth": (3, 4)})
    assert re.findall(r"(\d of \d) in \S+ \S+ on (\w+)", text.partition("raw pixels")[2]) == [
        ("0 of 2", "third"),
        ("2 of 4", "second"),
        ("3 of 4", "fourth"),
    ]
    assert text.endswith("; 1 other protocol compared.")
    assert "other" not in text_of({"digits": (0, 4), "second": (0, 4)}).partition("raw pixels")[2]


def correct_on(tmp_path: Path, used: CheckpointUsed, right: int, images: int = 100, **fields) -> None:
    """Save a result that is right on the first images."""
    data = fields.pop("data", DataUsed(name="digits", url="digits:"))
    data = replace(data, images={"train": 10, "val": images}, fingerprints={"val": "aa"})
    metrics = {"top1": MetricRecord(value=100 * right / images, array="top1", interval=(0.0, 100.0))}
    save_result(tmp_path, result(used, 1.0, metrics=metrics, data=data, **fields), {"top1": np.arange(images) < right})


def test_gains_over_initial_weights_and_raw_pixels(tmp_path):
    """By paired tests: of `late` the gain over its start is significant, but not that over pixels."""
    run = {"source": "/runs/late/export"}, {"source": "/runs/late/start"}
    correct_on(tmp_path, made_checkpoint("late", 1, **run[0]), 60)
    correct_on(tmp_path, made_checkpoint("late-start", 2, **run[1]), 20)
    correct_on(tmp_path, made_checkpoint("raw", 3, method="pixels"), 62)
    report = contents_of(read_leaderboard(tmp_path))
    (table,) = report.tables
    (gain,) = table.gains.values()
    assert (gain.text, gain.marks, gain.significant("pixels")) == ("+40.0", "s", 0)
    html = page_of(report)
    assert "<small>+40.0 s</small>" in html and 'class="start"' in html and "Rows of initial weights (1)" in html
    correct_on(tmp_path, made_checkpoint("raw", 3, method="pixels"), 30)
    report = contents_of(read_leaderboard(tmp_path))
    assert headline(report).startswith("late beats raw pixels by 30.0 points [") and "p" in html
    assert verdict(report.tables[0]).startswith("late beats raw pixels by 30.0 points [")
    correct_on(tmp_path, made_checkpoint("raw-16", 4, method="pixels"), 10)
    other = DataUsed(name="other", url="digits:")
    correct_on(tmp_path, made_checkpoint("early", 5), 90, data=other)
    correct_on(tmp_path, made_checkpoint("raw", 3, method="pixels"), 40, data=other)
    text = headline(contents_of(read_leaderboard(tmp_path)))
    assert "early beats raw pixels by 50.0 points [" in text and "on other" in text, "each network has its own gains"
    assert "late beats raw pixels by 30.0 points [" in text, "the better of two raw pixels counts"


def test_a_network_alone_is_said_to_beat_baselines_and_where_it_does_not(tmp_path):
    for name, right, pixels in (("digits", 70, 30), ("other", 20, 30)):
        data = DataUsed(name=name, url=f"{name}:")
        correct_on(tmp_path, made_checkpoint("mae", 1), right, data=data)
        correct_on(tmp_path, made_checkpoint("raw", 3, method="pixels"), pixels, data=data)
    report = contents_of(read_leaderboard(tmp_path))
    place = "k-NN (DINO) on other"
    assert headline(report) == f"mae beats raw pixels in 1 of 2 protocols, not in {place}."
    (gain,) = report.tables[1].gains.values()
    assert gain.sentences[0].startswith("worse than raw pixels by 10.0 points [")


def test_the_headline_names_the_best_networks_apart_from_a_supervised_baseline(tmp_path):
    """They are compared with one another, so that it hides none."""
    for number, (name, right) in enumerate((("mae", 70), ("dino", 50), ("byol", 48)), 1):
        correct_on(tmp_path, made_checkpoint(name, number, method=name), right)
    assert "Apart" not in headline(contents_of(read_leaderboard(tmp_path)))
    correct_on(tmp_path, made_checkpoint("deit", 4, method="supervised"), 95)
    text = headline(contents_of(read_leaderboard(tmp_path)))
    assert text.startswith("Best or tied with the best in 1 protocol: deit in 1 (significantly better than all others")
    assert "Apart from the supervised baseline: mae in 1 (significantly better than all others in 1)." in text


def test_gains_are_over_all_seeds_and_the_weights_of_the_same_pretraining(tmp_path):
    """Raw pixels have one seed; a folder may hold initial weights of another network."""
    start = made_checkpoint("start", 1, method="dino", source="/weights/start")
    correct_on(tmp_path, start, 20)
    for number, (name, right) in enumerate((("mae", 60), ("mae-seed1", 70)), 2):
        correct_on(tmp_path, made_checkpoint(name, number, method="mae", source=f"/weights/{name}"), right)
    correct_on(tmp_path, made_checkpoint("mae-seed2", 4, method="mae", recipe="longer"), 90)
    correct_on(tmp_path, made_checkpoint("raw", 5, method="pixels"), 40)
    (table,) = contents_of(read_leaderboard(tmp_path)).tables
    other, mae = table.networks
    assert (other.name, mae.name, table.cells[mae].mean) == ("mae-seed2", "mae", 65.0)
    assert table.gains[mae.key].tests["pixels"][0].difference == 25.0 and table.gains[mae.key].text == ""


def test_further_trainings_of_a_network_are_its_seeds(tmp_path):
    """Mean, deviation and number of trainings stand in the cell, and provenance names each."""
    for number, (name, right) in enumerate((("a", 60), ("a-seed1", 70), ("b", 50))):
        correct_on(tmp_path, made_checkpoint(name, number, method="mae"), right)
    report = contents_of(read_leaderboard(tmp_path))
    (table,) = report.tables
    assert [cell_text(cell, False) for cell in table.cells.values()] == ["65.00 +- 7.07 (n=2)", "50.00"]
    assert " 1 network with one training: seeds can change the order. The tests resample images" in headline(report)
    failed = result(made_checkpoint("b-seed1", 9, method="mae"), 1.0, status="failed")
    save_result(tmp_path, failed, {})
    assert contents_of(read_leaderboard(tmp_path)).trainings[table.group, table.networks[1].key] == 1
    for number, name in enumerate(("a", "b")):
        correct_on(tmp_path, made_checkpoint(name, 2 * number, method="mae"), 40, data=DataUsed(name="other", url="x:"))
    text = headline(contents_of(read_leaderboard(tmp_path)))
    assert " 1 to 2 networks with one training: seeds can change the order. The tests resample images" in text
    a = table.networks[0]
    names = [report.results[index].checkpoint.name for index in report.sources[table.group, a.key]]
    assert names == ["a", "a-seed1"] and "65.00 +- 7.07 (n=2)" in page_of(report)


def test_networks_tied_with_the_best_share_a_mean_rank():
    a, b, c = (made_checkpoint(name, number) for number, name in enumerate("abc", 1))
    report = report_of([result(a, 80.0), result(b, 79.5), result(c, 60.0)], level_of(a, b))
    assert report.mean_ranks == {a.key: 1.5, b.key: 1.5, c.key: 3.0} and report.overview == (a, b, c)


def test_a_metric_without_a_paired_test_has_no_winner(tmp_path):
    metrics = [{"rankme": MetricRecord(value=value, unit="")} for value in (9.0, 3.0)]
    results = [result(made_checkpoint(name, number), 1.0, metrics=metrics[number]) for number, name in enumerate("ab")]
    leaderboard = leaderboard_with_ties(made_leaderboard(results).results, paired_tests(tmp_path))
    assert leaderboard.best and leaderboard.ties == {}
    report = report_of(results)
    assert report.mean_ranks == {} and report.tables[0].shades == {} and not report.tables[0].has_intervals
    assert "no paired test" in verdict(report.tables[0]) and "nothing to rank" in headline(report)


def test_raw_pixels_and_initial_weights_never_win():
    a, b = made_checkpoint("a", 1), made_checkpoint("b", 2)
    start = made_checkpoint("a-start", 3, source="/runs/a/start")
    raw_pixels = made_checkpoint("raw", 4, method="pixels")
    results = [result(a, 60.0), result(b, 50.0), result(start, 70.0), result(raw_pixels, 80.0)]
    report = report_of(results, level_of(raw_pixels, start))
    assert [row[1] for row in shown(report.tables[0])] == ["floor", "initial", "measured", "measured"]
    assert not any(row[3] for row in shown(report.tables[0]) if row[1] != "measured")
    assert report.overview == (a, b, raw_pixels, start)
    text = headline(report) + verdict(report.tables[0])
    assert "raw (floor)" not in text and "a-start" not in text
    report = report_of([result(raw_pixels, 80.0), result(start, 70.0)], level_of(raw_pixels))
    assert "nothing to rank" in headline(report) and verdict(report.tables[0]).startswith("No trained network")


def test_all_networks_are_drawn_at_their_places_with_their_names():
    results = [result(made_checkpoint(f"n{number}", number), 40.0 + number / 2) for number in range(60)]
    html = page(results)
    (drawing,) = re.findall(r'<svg class="dots" viewBox.*?</svg>', html, re.DOTALL)
    bars = re.findall(r'<path d="M([\d.]+) [\d.]+H([\d.]+)"/><circle cx="([\d.]+)"', drawing)
    low, high, _ = report_of(results).tables[0].axis
    assert low < 38.0 and high > 71.5 and len(bars) == 60
    for number, places in enumerate(bars):  # the best first
        value = 40.0 + (59 - number) / 2
        expected = [124 + 228 * (end - low) / (high - low) for end in (value - 2, value + 2, value)]
        assert [float(place) for place in places] == pytest.approx(expected, abs=0.06)
        assert f">n{number}</text>" in drawing


def evil_results() -> list[Result]:
    results = []
    for number, text in enumerate(EVIL):
        cost = TrainingCost(hours=number + 1.0)
        checkpoint = made_checkpoint(text, number, source=text, recipe=text, training_cost=cost)
        results.append(
            result(
                checkpoint,
                50.0 + number,
                protocol=ProtocolUsed(name="knn@dino", version=1, source=text),
                settings={text: text},
                facts={"warnings": [text]},
            )
        )
    return [*results, result(made_checkpoint("broken"), 1.0, status="failed", metrics={}, message=EVIL[0])]


def test_text_of_results_never_becomes_markup_or_script():
    harmless, hostile = Elements(), Elements()
    hostile.feed(page(evil_results()))
    results = enumerate(evil_results())
    named = [replace(evil, checkpoint=replace(evil.checkpoint, name=f"n{number}")) for number, evil in results]
    harmless.feed(page(named))
    assert hostile.names.count("script") == harmless.names.count("script") == 2
    assert not {"img", "iframe", "object"} & set(hostile.names)
    assert {name for name, _ in hostile.attributes if name.startswith("on")} == set()
    text = page(evil_results())
    assert all(character not in text for character in ("\x1b", "\x00", "\u202e", "\udcff"))
    json.loads(re.search(r'id="results">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("count", [0, 1, 60])
def test_the_same_results_give_the_same_bytes(count):
    results = [result(made_checkpoint(f"c{number}", number), 40.0 + number / 2) for number in range(count)]
    first = page(results)
    assert first == page(list(results)) and first.encode() and "</html>" in first
    assert ("There are no results yet" in first) == (count == 0)


def test_missing_metrics_leave_empty_cells():
    complete, partial = result(made_checkpoint("a", 1), 80.0), result(made_checkpoint("b", 2), 70.0)
    partial = replace(partial, metrics={"top1": partial.metrics["top1"]})
    rows = re.findall(r'<tr class="measured".*?</tr>', page([complete, partial]), re.DOTALL)
    assert "20.0 s" in rows[-2] and rows[-1].endswith('<td class="number more"></td></tr>')


def test_provenance_names_source_protocol_and_images():
    details = provenance(result(made_checkpoint("a", 1, source="/runs/a"), 80.0, limit=100, seed=3))
    assert details["from"] == "/runs/a" and details["limit"] == 100 and details["seed"] == 3
    assert details["protocol"] == "knn@dino, version 1" and "digits=digits:" in details["images"]


def test_flops_are_counted_from_the_export_of_the_same_digest(tmp_path):
    folder = make_export(tmp_path / "export", 0)
    small_export = ViTExport.load(folder)
    assert spec_in(folder, small_export.digest) == small_export.spec
    assert spec_in(folder, "0" * 64) is None and spec_in(tmp_path, small_export.digest) is None
    checkpoints = [made_checkpoint(name, number, source=str(folder)) for number, name in enumerate("ab")]
    report = report_of([result(replace(checkpoints[0], digest=small_export.digest), 1.0), result(checkpoints[1], 2.0)])
    costs = [row["cost"].get("GFLOP an image") for row in report.checkpoints]
    assert sorted(costs, key=bool) == [None, forward_flops(small_export.spec) / 1e9]


@pytest.fixture
def board(tmp_path):
    """Results of two checkpoints on the digits: the first is wrong on images 7 and 300, the second on all."""
    images = open_set("digits:", "val")
    fingerprints = {split: open_set("digits:", split).fingerprint for split in ("train", "val")}
    data = DataUsed(name="digits", url="digits:", fingerprints=fingerprints, images={"val": len(images)})
    all_but_two = np.ones(len(images), bool)
    all_but_two[[7, 300]] = False
    for number, correct in ((1, all_but_two), (2, np.zeros(len(images), bool))):
        value = 100 * float(correct.mean())
        arrays = {"predicted": np.where(correct, images.labels, 9 - images.labels).astype(np.int32)}
        arrays |= {"confidence": np.full(len(images), 0.75, np.float16), "neighbours_of": np.arange(2)}
        arrays |= {"neighbours": np.arange(6).reshape(2, 3), "similarities": np.full((2, 3), 0.5, np.float32)}
        measured = result(made_checkpoint(f"c{number}", number), value, data=data, arrays=tuple(arrays))
        save_result(tmp_path, measured, {**arrays, "top1": correct})
    return tmp_path


def test_the_hardest_images_and_classes_are_those_most_often_wrong(board):
    measured, _ = comparable_results(board)
    images = open_set("digits:", "val")
    by_name = {stored.result.checkpoint.name: stored for stored in measured}
    details = image_details(by_name, "top1", images)
    assert [image["path"] for image in details["hardest"][:2]] == [images.path(7), images.path(300)]
    assert [image["right"] for image in details["hardest"]] == [0, 0, *[1] * 10]
    assert {image["of"] for image in details["hardest"]} == {2}
    assert len(details["classes"]) == details["all_classes"] == 10 and details["classes"][0]["accuracies"][1] == 0
    wrong_labels = {images.labels[7], images.labels[300]}
    assert {entry["name"] for entry in details["classes"] if entry["accuracies"][0] < 100} == {
        images.classes[label] for label in wrong_labels
    }
    assert image_details(by_name, "top1", images.limited(100)) is None, "other images than those measured"
    assert image_details(by_name, "seconds", images) is None


def test_a_report_is_one_file_with_or_without_pictures(board, bench):
    assert bench("report", "--out", board)[0] == 0
    text = (board / "report.html").read_text()
    assert 'src="data:image/jpeg;base64,' in text and "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", text)
    assert bench("report", "--out", board, "--no-pictures", "--to", board / "b.html")[0] == 0
    assert "data:image" not in (board / "b.html").read_text().replace("img-src data:", "")


def test_the_policy_allows_only_the_pages_own_script_and_style(board):
    """By their hashes, so that no script in the name of a result can run."""
    text = report_page(board)
    assert 'style="' not in text and "unsafe-inline" not in text
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert f"style-src '{hash_of(style)}';" in policy and text.count("<style") == 1
    assert f"script-src '{hash_of(script)}';" in policy and not re.search(r"<[^>]* on\w+=", text.replace(script, ""))


DRIVER = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
</script>
"""


STEPS = """
<script>
(async () => {
  const found = {};
  const [overview, table] = document.querySelectorAll("table");
  const rows = () => [...table.tBodies[0].rows];
  const names = () => rows().filter((row) => !row.hidden).map((row) => row.dataset.name);
  const heads = [...table.querySelectorAll("thead button")];
  const press = (text) => heads.find((button) => button.textContent === text).click();
  found.before = names();
  press("top1"); found.falling = names();
  press("top1"); found.rising = names();
  press("checkpoint"); found.named = names();
  const main = [...overview.querySelectorAll("thead button")].find((button) => button.textContent.includes("top1"));
  main.click(); main.click(); found.overview = [...overview.tBodies[0].rows].map((row) => row.dataset.name);
  overview.querySelector("[data-note] button").focus();
  found.note = document.getElementById("note").hidden ? "" : document.getElementById("note").textContent;
  found.sort = table.querySelector("th[aria-sort]").getAttribute("aria-sort");
  const filter = document.getElementById("filter");
  if (filter) {  // on a page of six checkpoints or more
    filter.value = "SCRIPT"; filter.dispatchEvent(new Event("input")); found.filtered = names();
    filter.value = ""; filter.dispatchEvent(new Event("input"));
  }
  document.querySelector("button[data-results]").click();
  found.open = document.getElementById("provenance").open;
  found.provenance = document.getElementById("provenance-body").textContent;
  document.getElementById("provenance").close();
  const ground = () => getComputedStyle(document.body).backgroundColor;
  found.light = ground(); document.getElementById("theme").click(); found.dark = ground();
  found.wide = document.documentElement.scrollWidth > innerWidth;
  found.requests = performance.getEntriesByType("resource").filter((entry) => !entry.name.startsWith("data:")).length;
  for (const part of document.querySelectorAll("details")) part.open = true;
  found.wideOpen = document.documentElement.scrollWidth > innerWidth;
  found.pictures = document.images.length;
  if (window.axe) {
    const serious = [];
    for (const scheme of ["light", "dark"]) {
      document.documentElement.dataset.theme = scheme;
      const answer = await axe.run(document, { resultTypes: ["violations"] });
      const bad = answer.violations.filter((each) => ["serious", "critical"].includes(each.impact));
      serious.push(...bad.map((each) => `${scheme}: ${each.id} ${each.nodes[0].html}`));
    }
    found.axe = serious;
  }
  found.errors = errors;
  found.at = innerWidth;
  parent.postMessage([location.pathname.split("/").pop(), found], "*");
})();
</script>
"""


FRAMES = """<!doctype html>
<style>body { margin: 0; display: flex; } iframe { border: 0; flex: none; height: 900px; }</style>
<script>
const answers = {};
addEventListener("message", ({ data: [name, found] }) => {
  answers[name] = found;
  if (Object.keys(answers).length < document.querySelectorAll("iframe").length) return;
  const answer = document.createElement("pre");
  answer.id = "answer"; answer.textContent = JSON.stringify(answers);
  document.body.append(answer);
});
</script>
"""


def hash_of(script: str) -> str:
    """The name of a script in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def in_browser(folder: Path, pages: dict[str, tuple[int, str]]) -> dict[str, dict]:
    """What STEPS find on pages of the given widths in a headless browser; frames, as windows have a minimum width."""
    spec = importlib.util.find_spec("axe_core_python")
    axe = (Path(spec.origin).parent / "axe.min.js").read_text() if spec else ""
    frames = FRAMES
    for name, (width, text) in pages.items():
        head, body = text.split("<body>", 1)
        scripts = [script.removeprefix("\n<script>").removesuffix("</script>\n") for script in (DRIVER, STEPS)]
        allowed = " ".join(f"'{hash_of(script)}'" for script in (*scripts, axe))
        head = head.replace("script-src ", f"script-src {allowed} ")
        steps = f"<script>{axe}</script>{STEPS}</body>"
        (folder / name).write_text(head + "<body>" + DRIVER + body.replace("</body>", steps))
        frames += f'<iframe src="{name}" style="width: {width}px"></iframe>'
    (folder / "frames.html").write_text(frames)
    window = sum(width for width, _ in pages.values())
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={window},900", "--dump-dom"]
    run = subprocess.run(
        [*command, "--virtual-time-budget=20000", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = re.search(r'<pre id="answer">(.*?)</pre>', run.stdout, re.DOTALL)
    assert answer, run.stderr[-2000:]
    return json.loads(answer[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM, reason="no chromium; apt-get install chromium")
def test_in_a_browser(board, tmp_path):
    """On a wide screen, a narrow one and a small phone; and a page with hostile names."""
    text = report_page(board)
    pages = {f"{width}.html": (width, text) for width in (1280, 500, 360)}
    answers = in_browser(tmp_path, {**pages, "hostile.html": (800, page(evil_results()))})
    hostile = answers.pop("hostile.html")
    assert hostile["errors"] == [] and hostile["requests"] == 0
    assert sorted(hostile["filtered"]) == sorted(name for name in hostile["before"] if "script" in name)
    assert len(hostile["filtered"]) == 2
    for name, answer in answers.items():
        assert answer["at"] == pages[name][0]
        assert answer["before"] == answer["falling"] == ["c1", "c2"] and answer["rising"] == ["c2", "c1"]
        assert answer["named"] == ["c1", "c2"] and answer["sort"] == "ascending" and "filtered" not in answer
        assert answer["overview"] == ["c2", "c1"] and "c2, digits/knn@dino top1: 0.00 [" in answer["note"]
        assert "500 images" in answer["note"] and answer["open"] and "knn@dino, version 1" in answer["provenance"]
        assert answer["light"] == "rgb(255, 255, 255)" != answer["dark"]
        assert not answer["wide"] and not answer["wideOpen"], f"{name} is wider than its screen"
        assert answer["requests"] == 0 and answer["errors"] == []
        assert answer["pictures"] == 2 + 6 + 12, "two asked for, three neighbours of each, the hardest"
        assert answer.get("axe", []) == [], name
    assert len(answers) == 3


def test_provenance_stores_each_text_once():
    rows = [{"a": "x", "b": "y"}, {"a": "x", "b": "x"}]
    assert packed(rows) == {"names": ["a", "b"], "texts": ["x", "y"], "rows": [[0, 1], [0, 0]]}
    assert packed([]) == {"names": [], "texts": [], "rows": []}
