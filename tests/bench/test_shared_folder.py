"""A folder of results that others use or own."""

import pytest

pytestmark = pytest.mark.usefixtures("toys")


@pytest.fixture
def run(bench, exports, tmp_path):
    """`code, out, err = run()` evaluates the first export in tmp_path/out."""
    words = ("--suite", "toy@one", "--data", "tiny=tiny:", "--out", tmp_path / "out")
    return lambda *more: bench("run", "--checkpoint", exports[0], *words, *more)


def test_what_another_run_made_meanwhile_is_not_made_again(run, tmp_path, monkeypatch):
    run()
    monkeypatch.setattr("bench.run.prepare.job_state", lambda *_: "new")  # as when both runs were planned together
    code, said, _ = run()
    assert code == 0 and "toy@one on tiny: made by another run meanwhile, skipped" in said
    runs = tmp_path / "out/cache/runs.txt"
    assert "0 done, 1 skipped" in said and len(runs.read_text().splitlines()) == 1
    assert run("--rerun")[0] == 0 and len(runs.read_text().splitlines()) == 2


def test_a_board_that_cannot_be_written_is_shown(run, bench, tmp_path):
    run()
    (tmp_path / "out/leaderboard.csv").unlink()
    (tmp_path / "out/leaderboard.csv").mkdir()
    code, said, err = bench("leaderboard", "--out", tmp_path / "out")
    assert code == 2 and "tiny/toy@one" in said and "leaderboard.csv" in err and err.count("\n") == 1
