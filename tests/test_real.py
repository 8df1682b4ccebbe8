"""tools/real.py makes a record that resumes and names what is missing; README quotes the figures of records/real."""

from pathlib import Path

from small_exports import make_export

from bench.reports.record import check_record, stored_results
from bench.reports.site import site_page, starts_of
from tools import real
from tools.board import companion_file


def test_readme_quotes_the_record():
    """README has rows of the record's table, and so its figures."""
    root = Path(__file__).parents[1]
    rows = [row.rpartition("| ")[0] + "|" for row in real.table(root / "records/real").splitlines()]  # without counts
    lines = (root / "README.md").read_text().splitlines()
    quoted = [line for line in lines if line.startswith(tuple(f"| {name} |" for name in real.SETS))]
    assert quoted and set(quoted) <= set(rows)
    assert {entry.result.status for entry in stored_results(root / "records/real")} == {"ok"}


def test_its_page_has_raw_pixels_beside_networks_at_a_chosen_size_and_gains_over_initial_weights():
    record = Path(__file__).parents[1] / "records/real"
    assert "cifar10/knn@dino[limit=2500 98px]" in site_page(record)
    assert starts_of(record) == {"vits14": "vits14-start"}


def test_a_record_is_made_resumed_and_names_what_is_missing(tmp_path, monkeypatch):
    jobs = [real.Job(images=name, protocols=["knn@dino"], minutes=1, limit=60) for name in ("digits", "absent")]
    monkeypatch.setattr(real, "SETS", {"digits": "digits:", "absent": "digits:"})
    monkeypatch.setattr(real, "JOBS", jobs)
    checkpoint, sets = make_export(tmp_path / "vit", 1), tmp_path / "sets"
    out, folder = tmp_path / "out", tmp_path / "made"
    (sets / "digits").mkdir(parents=True)
    words = ["real", str(checkpoint), str(sets), "--out", str(out), "--record", str(folder)]
    monkeypatch.setattr("sys.argv", words)
    real.main()
    assert not list(check_record(folder))
    page = companion_file(folder, "md").read_text()
    assert [line.partition(", minutes")[0] for line in page.splitlines() if line.startswith("- absent")] == [
        f"- absent, knn@dino: {kind}" for kind in ("raw pixels", "network", "initial weights")
    ]
    (row,) = [line.split(" | ") for line in page.splitlines() if line.startswith("| digits")]
    assert row[-1] == "60 of 1297 / 60 of 500 |" and all("[" in cell for cell in row[2:-1])  # intervals
    made = {path: path.read_bytes() for path in out.glob("results/**/*.*")}
    assert len(made) == 6  # a JSON file and its arrays for each of three networks
    (sets / "absent").mkdir()
    real.main()
    assert made == {path: path.read_bytes() for path in made}  # nothing of the first job was computed again
    assert "Nothing." in companion_file(folder, "md").read_text()
