"""`--set` converts text to the types that dataclasses declare, and refuses anything else in one line."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bench.pretraining.recipes import choose_recipe
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from engine.printing import MAX_LISTED, did_you_mean
from engine.settings import ReadIf, annotations, changed, read_changes
from engine.tasks import ADDED, Protocol, Task, settings_of


@dataclass(frozen=True, kw_only=True)
class Toy(Task):
    k: tuple[int, ...] = (1,)
    layers: int = 3
    rate: float = 0.5
    depth: int | None = None
    label: str | None = None
    folder: Path = Path("here")

    def __post_init__(self):
        super().__post_init__()
        if self.layers < 1:
            raise ValueError("layers must be 1 or more")
        if self.layers > 8 and not self.label:
            raise ValueError(f"layers={self.layers} and label={self.label}: label many layers")


BAD = [
    ("layers", "1.5", "settings={'layers': 1.5}: must be a whole number"),
    ("layers", "0", "settings: toy: layers must be 1 or more"),
    ("layer", "1", "did you mean 'layers'? there are: k, layers"),
]


def with_settings(toy: Toy, **texts: str) -> Toy:
    return changed(toy, {name: f"{name}={text}" for name, text in texts.items()}, "toy: ")


@pytest.mark.parametrize(("field", "text", "message"), BAD)
def test_a_wrong_text_is_refused_in_one_line(field, text, message):
    with pytest.raises(ValueError) as error:
        with_settings(Toy(), **{field: text})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["knn.k", "=1", ""])
def test_a_change_has_a_name_and_a_value(text):
    with pytest.raises(ValueError, match=r"settings=.*: write TASK\.FIELD=VALUE, for example knn\.k=10,20"):
        read_changes([text], "TASK.FIELD=VALUE", "knn.k=10,20")


def test_values_may_contain_equals_signs():
    assert read_changes(["knn@dino.k = a=b.c"], "", "") == {"knn@dino.k": "knn@dino.k=a=b.c"}


CHOSEN = ChosenProtocol(key="toy", name="toy@one", protocol=Protocol(task=Toy(), version=1, source="a paper"))


@pytest.mark.parametrize("text", ["k=1", "toy.=1", ".k=1"])
def test_a_change_of_a_task_names_task_and_field(text):
    with pytest.raises(ValueError, match=r"write TASK\.FIELD=VALUE"):
        changed_protocols([CHOSEN], [text])


@pytest.mark.parametrize(
    ("texts", "changes"),
    [
        (["toy.layers=9", "toy.label=nine"], {"layers": 9, "label": "nine"}),  # each needs the other
        (["toy.label=nine", "toy.layers=9"], {"layers": 9, "label": "nine"}),
        (["toy.k=1", "toy@one.k=2"], {"k": [2]}),  # a protocol's value takes precedence over its task's
        (["toy@one.k=2", "toy.k=1"], {"k": [2]}),
        (["toy.k=x", "toy.rate=1", "toy.k=2"], {"k": [2], "rate": 1.0}),  # the last value counts
    ],
)
def test_changes_of_a_protocol(texts, changes):
    assert changed_protocols([CHOSEN], texts)[0].changes == changes


def test_changes_of_a_protocol_are_checked_together():
    with pytest.raises(ValueError, match=r"^settings: toy@one: layers=9 and label=None: label many layers$"):
        changed_protocols([CHOSEN], ["toy.rate=1", "toy.layers=9"])


def test_similar_names_are_suggested_and_long_lists_left_out():
    words = [f"word{number}" for number in range(MAX_LISTED + 1)]
    assert did_you_mean("word03", words, "`bench list`") == "; did you mean 'word3'? `bench list` lists them all"
    assert did_you_mean("scatter", ["cae"]) == "; there are: cae"  # three letters in common are not similar
    assert did_you_mean("nothing", words, "`bench list`") == "; `bench list` lists them all"
    assert did_you_mean("nothing", words[1:3], "`bench list`") == "; there are: word1, word2"


@dataclass(frozen=True, kw_only=True)
class Grown(Task):
    k: int = 1
    train_positions: bool = field(default=True, metadata=ADDED)


def test_a_setting_added_later_is_recorded_unless_it_has_its_default():
    """So digests of old protocols stay valid; changes away from the default and back to it are recorded."""
    assert settings_of(Grown()) == {"k": 1} and settings_of(Grown(), complete=True) == {"k": 1, "train_positions": True}
    assert settings_of(Grown(train_positions=False)) == {"k": 1, "train_positions": False}
    for start in (True, False):
        protocol = Protocol(task=Grown(train_positions=start), version=1, source="a test")
        chosen = replace(CHOSEN, name="toy@grown", protocol=protocol)
        (changed_one,) = changed_protocols([chosen], [f"toy.train_positions={not start}"])
        assert changed_one.changes == {"train_positions": not start}


def test_settings_are_json():
    settings = settings_of(Toy())
    assert settings["k"] == [1]
    assert settings["depth"] is None
    assert settings["folder"] == "here"


def protocol_with(suite: str, *texts: str) -> ChosenProtocol:
    (chosen,) = changed_protocols(choose_protocols(suite, catalogue(suite=suite)), texts)
    return chosen


def test_a_change_of_a_setting_that_is_never_read_is_refused():
    """It would change no number, and mark the result as that of a modified protocol."""
    with pytest.raises(ValueError, match=r"^settings=.*blocks.*: attentive@capi: .*read only with head=vjepa2: "):
        protocol_with("attentive@capi", "attentive.blocks=2")
    with pytest.raises(ValueError, match=r"read only with policy: "):
        protocol_with("attentive@capi", "attentive.erase=0.25")
    with pytest.raises(ValueError, match=r"read only with select=holdout: "):
        protocol_with("segmentation_linear@dinov3_paper", "segmentation_linear.holdout=0.2")
    for texts in (["attentive.blocks=2", "attentive.head=vjepa2"], ["attentive.blocks=1"], ["attentive.sources=2"]):
        protocol_with("attentive@capi", *texts)
    with pytest.raises(ValueError, match=r"local_size.*read only with local_crops: "):
        choose_recipe("dino", "smoke", ["local_size=48"])
    with pytest.raises(ValueError, match=r"momentum.*read only with optimizer=lars: "):
        choose_recipe("dino", "smoke", ["momentum=0.5"])
    with pytest.raises(ValueError, match=r"start.*read only with warmup: "):
        choose_recipe("mae", "smoke", ["schedule.start=0.5", "schedule.warmup=0"])
    assert choose_recipe("dino", "smoke", ["local_size=8", "local_crops=2"]).recipe.settings.local_size == 8


def test_settings_that_others_depend_on_exist():
    for chosen in catalogue().protocols.values():
        for name, hint in annotations(type(chosen.task)).items():
            for mark in (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, ReadIf)):
                assert hasattr(chosen.task, mark.setting), f"{chosen.name}: {name} depends on {mark.setting}"


@pytest.mark.parametrize("method", ["mae", "simmim", "msn"])
def test_a_warm_up_from_above_the_peak_is_refused(method):
    with pytest.raises(ValueError, match="from 0 to 1"):
        choose_recipe(method, "smoke", ["schedule.start=5"])
