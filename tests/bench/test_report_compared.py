"""Comparisons in a report: ties and mean ranks follow from paired tests; sites of records."""

import csv
import json
import re
import shutil
from types import SimpleNamespace

import pytest
from made_results import made_checkpoint
from shown_results import Elements

from bench.reports.contents import outcomes, verdict
from bench.reports.leaderboard import read_leaderboard, write_leaderboard
from bench.reports.page import contents_of
from bench.reports.record import check_record, write_record
from bench.reports.site import site_page, write_site
from bench.statistics.compare import compare
from bench.statistics.intervals import LEVEL
from bench.statistics.paired import holm


def test_the_overview_shows_the_numbers_of_the_leaderboard(compared):
    write_leaderboard(compared)
    (header, *lines) = csv.reader((compared / "leaderboard.csv").read_text().splitlines())
    report = contents_of(read_leaderboard(compared))
    for line in lines:
        cells = dict(zip(header, line, strict=True))
        (used,) = [used for used in report.overview if used.name == cells["name"]]
        expected = [float(cells[f"{table.group}:{table.metrics[0]}"]) for table in report.tables]
        assert [table.cells[used].mean for table in report.tables] == expected
    assert len(lines) == len(report.overview) == 5 and report.board.kinds[report.overview[-1]] == "floor"


def test_ties_equal_those_of_bench_compare(compared):
    """Among networks alone, although raw pixels lead; Holm over the comparisons with the leader."""
    report = contents_of(read_leaderboard(compared))
    for table in report.tables:
        leader, *others = [used.name for used in table.networks]
        protocol = table.result.protocol.name
        p_values = [compare(compared, [leader, name], protocol=protocol).found[0].paired.p for name in others]
        tied = {leader} | {name for name, p in zip(others, holm(p_values), strict=True) if p > LEVEL}
        assert {*table.leaders} == tied and {"n0", "n1"} <= tied and not {"n2", "n3"} & tied
        pixels = [compare(compared, [used.name, "n4"], protocol=protocol).found[0].paired for used in table.networks]
        for used, test, p in zip(table.networks, pixels, holm([test.p for test in pixels]), strict=True):
            gain = table.gains[used.key]
            assert gain.tests["pixels"] == (test, p) and gain.marks == "-p" * (p <= LEVEL)
            assert gain.significant("pixels") < 1
        assert outcomes("pixels", table.gains.values())[::2] == (0, 4) and "0 of 4" in verdict(table)
    names = {key[0]: mean for key, mean in report.mean_ranks.items()}
    assert names == {"n0": 1.5, "n1": 1.5, "n2": 3.0, "n3": 4.0}


@pytest.fixture(scope="module")
def record(compared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "mine"
    write_record(compared, folder)
    assert list(check_record(folder)) == []
    return folder


def test_the_site_of_a_record_has_no_broken_links_and_makes_no_requests(record, bench, tmp_path):
    """Anchors of each checkpoint and protocol, and the same bytes twice."""
    for _ in range(2):  # an older site is replaced
        assert bench("site", record, "--out", tmp_path / "a", "--title", "Our <ViTs>")[::2] == (0, "")
    text, elements = (tmp_path / "a" / "index.html").read_text(), Elements()
    elements.feed(text)
    assert "<h1>Our &lt;ViTs&gt;</h1>" in text and 'style="' not in text and "unsafe-inline" not in text
    links = {value for name, value in elements.attributes if name in ("href", "src") and value}
    anchors = {f"#{value}" for name, value in elements.attributes if name == "id"}
    assert links <= anchors and len([link for link in links if re.fullmatch(r"#\S+-[0-9a-f]{8}", link)]) == 5 + 2
    assert "near@x" in text
    assert site_page(record, "Our <ViTs>") == text


def test_each_record_has_a_page_of_its_own(compared, record, tmp_path):
    """Named after it, with the title and first paragraph of the text beside it, and a way back."""
    second = tmp_path / "again"
    write_record(compared, second)
    second.with_suffix(".md").write_text("# Other ViTs\n\nAs in [the text](text.md),\nagain.\n\nMore.\n")
    mine, again = write_site([record, second], tmp_path / "site", back="../boards.html")
    assert (mine.name, again.name) == ("mine.html", "again.html")
    assert "<h1>mine</h1>" in mine.read_text() and "<h1>Other ViTs</h1>" in again.read_text()
    assert '<p>As in the text, again. <a href="../boards.html#again">' in again.read_text()
    with pytest.raises(ValueError, match="rename"):
        write_site([record, record], tmp_path / "site")


def test_a_changed_record_or_a_foreign_folder_is_refused(record, refused, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(record, changed)
    (changed / "leaderboard.md").write_text("better numbers")
    refused("site", changed, "--out", tmp_path / "site", named="leaderboard.md | --check")
    assert not (tmp_path / "site").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("x")
    refused("site", record, "--out", tmp_path / "mine", named="site")
    assert (tmp_path / "mine" / "index.html").read_text() == "x"


@pytest.mark.exhaustive
def test_the_documentation_shows_the_numbers_of_records(record, monkeypatch, tmp_path):
    """Pages of methods show numbers and curves of records, with links to a site built from them."""
    pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install -e '.[dev]'")
    from tools import site

    monkeypatch.setattr(site, "RECORDS", tmp_path / "records")
    without = site.reference_pages()
    assert "## Measured" not in without["methods/mae.md"] and site.pretraining_boards() == []
    mine = tmp_path / "records" / "mine"
    shutil.copytree(record, mine)
    site.on_post_build(SimpleNamespace(site_dir=tmp_path / "site"))
    pages = site.reference_pages()
    links = re.findall(r'href="(?:\.\./)?([^"]*)"', pages["methods/mae.md"] + "".join(site.board_links()))
    assert len(links) == 2 and all((tmp_path / "site" / link).is_file() for link in links)
    leaderboard = {line["name"]: line for line in csv.DictReader((mine / "leaderboard.csv").read_text().splitlines())}
    for task in ("near", "linear"):
        (row,) = [text for text in pages["methods/mae.md"].splitlines() if f"| {task} (x) on digits, top1 |" in text]
        for name in ("n0", "n1", "n2", "n3"):
            assert f"| {float(leaderboard[name][f'digits/{task}@x:top1']):.2f} [" in row
    published = pages["methods/moca.md"].partition("## Published")[2]
    assert "knn@moca" in published and "GB" not in published and "minutes_per_epoch" not in published
    assert "<svg" not in pages["methods/mae.md"] and "## Measured" not in pages["methods/dino.md"]
    log = "".join(json.dumps({"step": step, "epoch": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3))
    folder = mine / "checkpoints" / made_checkpoint("n0", 0).unique_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text(log)
    (folder / "run.json").write_text(json.dumps({"settings": {"batch": 8}}))
    assert "<svg" in site.reference_pages()["methods/mae.md"]
    with pytest.raises(Exception, match="bench record --check"):  # the log is not part of the record
        site.on_post_build(SimpleNamespace(site_dir=tmp_path / "site"))
