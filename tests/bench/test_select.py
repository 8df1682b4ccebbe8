"""`--select`: which images choose heads and epochs, for all tasks of a run at once."""

import csv

from bench.results.record import read_result
from bench.run.suites import catalogue, changed_protocols, choose_protocols

SWEPT = ("linear_sgd@ibot", "linear_sgd@ibot_base_cached", "finetune@mae", "semi@ibot_1percent")
UNSWEPT = ("knn@dino", "lowshot@bench", "logreg@dinov2")


def changes(*texts: str, select: str) -> dict[str, dict]:
    """Protocol -> what differs from its recipe."""
    selected = choose_protocols(",".join(SWEPT + UNSWEPT), catalogue())
    return {chosen.name: dict(chosen.changes) for chosen in changed_protocols(selected, texts, select)}


def test_val_is_a_change_of_every_task_with_a_choice():
    expected = {name: {"select": "val"} for name in SWEPT} | {name: {} for name in UNSWEPT}
    assert changes(select="val") == expected


def test_holdout_changes_no_recipe_but_undoes_val():
    assert not any(changes(select="holdout").values())
    by_val = [
        chosen.protocol.task for chosen in changed_protocols(choose_protocols(",".join(SWEPT), catalogue()), [], "val")
    ]
    assert {task.select for task in by_val} == {"val"}


def test_without_the_option_every_protocol_keeps_its_own():
    """So a run that reports as a paper does is not a modified one; `--select holdout` makes it one."""
    names = "finetune@mae_paper,linear_lars@mae_paper,semi@ibot_1percent_paper,linear_lars@mae"
    for select, changes in ((None, {}), ("holdout", {"select": "holdout"})):
        found = changed_protocols(choose_protocols(names, catalogue()), [], select)
        told = {chosen.name: dict(chosen.changes) for chosen in found}
        assert told.pop("linear_lars@mae") == {} and all(each == changes for each in told.values())


def test_set_wins_for_one_task():
    found = changes("linear_sgd@ibot.select=holdout", "finetune.select=holdout", select="val")
    assert found["linear_sgd@ibot"] == {} and found["finetune@mae"] == {"select": "holdout"}
    assert found["linear_sgd@ibot_base_cached"] == found["semi@ibot_1percent"] == {"select": "val"}


def test_result_and_leaderboard_say_val(bench, exports, tmp_path):
    name = "linear_sgd@ibot_base_cached"
    words = ["run", "--checkpoint", exports[0], "--suite", name, "--data", "digits=digits:", "--limit", "100"]
    words += ["--set", "linear.epochs=2", "--out", tmp_path]
    assert bench(*words)[0] == bench(*words, "--select", "val")[0] == 0
    by_select = {read_result(path).facts["selection"]: read_result(path) for path in tmp_path.rglob("linear*.json")}
    assert by_select["holdout"].protocol.changes == {"epochs": 2}
    assert by_select["val"].protocol.changes == {"epochs": 2, "select": "val"}
    with open(tmp_path / "leaderboard.csv") as file:
        (row,) = csv.DictReader(file)
    version = f"v{by_select['val'].protocol.version}"
    for changes in ("epochs=2 select=val", "epochs=2"):
        assert row[f"digits/{name}[{version} {changes} limit=100]:top1"]
    assert "Chosen on the validation images" in (tmp_path / "leaderboard.md").read_text()
