"""`--select` decides for all tasks of a run which images choose heads and epochs."""

from written import rows_of

from bench.results.record import read_result
from bench.run.suites import catalogue, changed_protocols, choose_protocols

SWEPT = ("linear_sgd@ibot", "linear_sgd@ibot_base_cached", "finetune@mae", "semi@ibot_1percent")
UNSWEPT = ("knn@dino", "lowshot@bench", "logreg@dinov2")


def changes(*texts: str, select: str) -> dict[str, dict]:
    """Changed settings by protocol."""
    selected = choose_protocols(",".join(SWEPT + UNSWEPT), catalogue())
    return {chosen.name: dict(chosen.changes) for chosen in changed_protocols(selected, texts, select)}


def test_val_changes_every_task_that_selects_on_images():
    expected = {name: {"select": "val"} for name in SWEPT} | {name: {} for name in UNSWEPT}
    assert changes(select="val") == expected


def test_holdout_changes_no_protocol_that_holds_out_already():
    assert not any(changes(select="holdout").values())
    by_val = changed_protocols(choose_protocols(",".join(SWEPT), catalogue()), [], "val")
    assert {chosen.protocol.task.select for chosen in by_val} == {"val"}


def test_without_the_option_protocols_keep_their_own_selection():
    """So a protocol that selects as its paper does is unmodified; `--select holdout` modifies it."""
    names = "finetune@mae_paper,linear_lars@mae_paper,semi@ibot_1percent_paper,linear_lars@mae"
    for select, expected in ((None, {}), ("holdout", {"select": "holdout"})):
        protocols = changed_protocols(choose_protocols(names, catalogue()), [], select)
        by_protocol = {chosen.name: chosen.changes for chosen in protocols}
        assert by_protocol.pop("linear_lars@mae") == {} and all(changes == expected for changes in by_protocol.values())


def test_set_overrides_select_for_one_task():
    by_protocol = changes("linear_sgd@ibot.select=holdout", "finetune.select=holdout", select="val")
    assert by_protocol["linear_sgd@ibot"] == {} and by_protocol["finetune@mae"] == {"select": "holdout"}
    assert by_protocol["linear_sgd@ibot_base_cached"] == by_protocol["semi@ibot_1percent"] == {"select": "val"}


def test_result_and_leaderboard_name_selection_on_val(bench, exports, tmp_path):
    name = "linear_sgd@ibot_base_cached"
    words = ["run", "--checkpoint", exports[0], "--suite", name, "--data", "digits=digits:", "--limit", "100"]
    words += ["--set", "linear.epochs=2", "--out", tmp_path]
    assert bench(*words)[0] == bench(*words, "--select", "val")[0] == 0
    by_select = {read_result(path).facts["selection"]: read_result(path) for path in tmp_path.rglob("linear*.json")}
    assert by_select["holdout"].protocol.changes == {"epochs": 2}
    assert by_select["val"].protocol.changes == {"epochs": 2, "select": "val"}
    (row,) = rows_of(tmp_path)
    version = f"v{by_select['val'].protocol.version}"
    for changes in ("epochs=2 select=val", "epochs=2"):
        assert row[f"digits/{name}[{version} {changes} limit=100]:top1"]
    assert "Chosen on the validation images" in (tmp_path / "leaderboard.md").read_text()
