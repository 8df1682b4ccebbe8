"""Contract of every probe and dense task, parametrised by the extension folders: what any evaluation must do."""

import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_networks import write_networks
from PIL import Image
from slow_clock import slow_clock

from bench.run.index import FILE, write_index
from bench.run.outcomes import checked
from bench.run.suites import catalogue
from checkpoints.export import ViTExport
from checkpoints.resolve import load, load_frozen
from engine.extensions import load_extension, source_files
from engine.settings import changed, meanings, setting_text
from engine.tasks import Outcome, Task, Workspace, resamples_of, settings_of
from engine.work import Scale
from imagesets.sets import open_set
from tests.probes.toy_exports import varied_export
from tools.protocols import PAGE, RECORD, ROOT, own_tasks, protocol_versions, update_page, update_record

TASKS = {key: load_extension(kind, key) for kind in ("probes", "downstream") for key in source_files(kind)}
PROTOCOLS = {name: protocol for module in TASKS.values() for name, protocol in module.PROTOCOLS.items()}
# Dense tasks evaluate on labelled scenes, not on classes of images: tests/downstream has their share of this contract.
SMOKE = [
    name
    for module in TASKS.values()
    for name in module.SUITES.get("smoke", ())
    if name in PROTOCOLS and not getattr(PROTOCOLS[name].task, "LAYOUT", "")
]
# By default every protocol is run once, and these are run again: neighbours, a fit, and a search on other images.
REPRESENTATIVES = ("knn@dino", "lowshot@bench", "ood@knn")
# Each is like one of these or has tests of its own; a protocol that is in neither is new, and run again by default.
OTHERS = (
    *("attentive@smoke", "finetune@smoke", "health@val", "linear_sgd@ibot_base_cached", "locality@extrema"),
    *("retrieval@dino_oxford", "robustness@smoke", "robustness_finetune@smoke", "semi@smoke"),
)
REPEATED = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in OTHERS)) for name in SMOKE]
FEW = 80  # images of a split that are enough for some tests
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0), "white": (255, 255, 255)}


@pytest.fixture(scope="module")
def export() -> ViTExport:
    return varied_export()


@pytest.fixture(scope="module")
def coloured(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("coloured"), shuffled=False)


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("shuffled"), shuffled=True)


@pytest.fixture(scope="module")
def solve(export, coloured, tmp_path_factory) -> Callable[[str], Outcome]:
    """A function from the name of a protocol to its outcome on the true colours, without ten seconds of silence."""

    @cache
    def outcome_of(name: str) -> Outcome:
        with slow_clock():
            return run(name, export, coloured, tmp_path_factory.mktemp("cache"))

    return outcome_of


@pytest.fixture(params=SMOKE)
def solved(request, solve) -> tuple[str, Outcome]:
    """The name of a protocol, and its outcome."""
    return request.param, solve(request.param)


def written(folder: Path, shuffled: bool) -> str:
    """240 training and 120 validation images of four colours with noise; class names true or drawn at random."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 30)):
        for number in range(count * len(COLOURS)):
            name = list(COLOURS)[number % len(COLOURS)]
            pixels = np.clip(np.array(COLOURS[name]) + generator.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            label = generator.choice(list(COLOURS)) if shuffled else name
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    return f"folder:{folder}"


def run(name: str, export: ViTExport, data: str, cache: Path, **options: Any) -> Outcome:
    """The outcome of a protocol, checked as in `bench run`."""
    return checked(PROTOCOLS[name].task.run(export, Workspace(cache=cache, data=data, **options)))


def accuracies(outcome: Outcome) -> dict[str, float]:
    """The top-1 accuracies of an outcome by name; empty for a task that is no classifier."""
    metrics = outcome.metrics.items()
    return {name: metric.value for name, metric in metrics if name.startswith("top1") and not metric.deviation_of}


def test_every_file_defines_what_a_task_file_must():
    assert not catalogue().broken, catalogue().broken
    for key, module in TASKS.items():
        assert module.PROTOCOLS and "smoke" in module.SUITES, f"{key}: SUITES lacks a suite `smoke`"
    for name, protocol in PROTOCOLS.items():
        assert protocol.version >= 1, f"{name}: versions begin at 1"
        assert len(protocol.source) > 10, f"{name}: source={protocol.source!r}; name paper or code, or say `ours: ...`"
        with pytest.raises(FrozenInstanceError):
            setattr(protocol.task, fields(protocol.task)[0].name, None)


def test_every_generated_file_is_up_to_date_and_changed_protocols_have_a_new_version():
    """The test writes files that are out of date, so that the next run passes: commit them."""
    tasks = own_tasks()
    differences = update_record(ROOT, protocol_versions(tasks))  # an error if the version has to be raised
    page, index = update_page(ROOT, tasks), write_index()
    written = {str(RECORD): bool(differences), str(PAGE): page, f"bench/{FILE.name}": index}
    assert not any(written.values()), f"written now, commit: {', '.join(name for name in written if written[name])}"


# Protocol -> field -> values that its task refuses whatever the other settings are.
REFUSED: dict[str, dict[str, list]] = {
    "finetune@smoke": dict(lr=[0.0], layer_decay=[0.0], schedule=["cosine"], crop_scale=[0.0], holdout=[1.0])
    | dict(average=[1.0], policy=["augmix"], mixed_together=[0]),
    "attentive@smoke": dict(blocks=[0], queries=[0], start_lr=[-1.0], head=["moca"], readout=["cls4"], lrs=[()]),
    "health@val": dict(images=[0], views=[1], layers=["first"]),
    "knn@dino": dict(k=[(), (0, 5), (5, 5)], temperature=[(0.0,)], fraction=[0.0]),
    "linear_sgd@ibot_base_cached": dict(lrs=[(), (0.1, 0.1), (0.0,)], weight_decays=[()], crop_rule=["timm"])
    | dict(holdout=[1.0]),
    "locality@extrema": dict(tiles=[6, 1], scales=[(0.5, 1.5)]),
    "lowshot@bench": dict(shots=[(0,), (1, 1)], fractions=[(0.0,), (1.5,)], splits=[0], lambdas=[(), (0.1, 0.0)])
    | dict(lambda_convention=["per class"], preprocess=["whiten"], solver=["newton"], holdout=[1.0])
    | dict(tolerance=[0.0], max_iterations=[0]),
    "maskrcnn@smoke": dict(lr=[0.0], milestones=[(12,), (3, 2)], short=[()], batch=[0], jitter=[(2.0, 1.0)], flip=[2.0])
    | dict(warmup=[-1], drop_path=[1.0]),
    "retrieval@dino_paris": dict(size=[0], scales=["two"], pool=["max"]),
    "ood@knn": dict(sets=[(), ("digits:", "digits:")], k=[0]),
    "robustness@cached": dict(corruptions=[("spatter",), ("contrast", "contrast")], images=[0]),
    "segmenter_mask@smoke": dict(lr=[(), (1e-6,)], splits=[()], judge_every=[0], drop_path=[1.0]),
    "upernet@smoke": dict(lr=[0.0], ratios=[(2.0, 1.0)], crop=[0]),
}
CONTRADICTIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("finetune@smoke", dict(epochs=5, warmup_epochs=5.0), ("warmup_epochs=5.0", "epochs=5")),
    ("attentive@smoke", dict(epochs=2, warmup_epochs=2), ("warmup_epochs=2", "epochs=2")),
    ("attentive@vjepa2", dict(start_lr=1.0), ("start_lr=1.0", "lrs=")),
    ("linear_sgd@ibot_base_cached", dict(epochs=5, warmup_epochs=5), ("warmup_epochs=5", "epochs=5")),
    ("linear_sgd@ibot_base_cached", dict(readouts=("cls",)), ("'cls'", "clsN")),
    ("linear_sgd@ibot_base_cached", dict(entry="layer_norm"), ("entry=layer_norm", "optimizer=sgd")),
    ("lowshot@bench", dict(shots=(), fractions=()), ("shots=",)),
    ("lowshot@bench", dict(intercept=True, solver="cyanure"), ("intercept=True", "solver=lbfgs", "cyanure")),
    ("upernet@smoke", dict(steps=10, warmup=11), ("warmup=11", "steps=10")),
    ("depth_linear@dinov3", dict(steps=20), ("warmup=12800", "steps=20")),
    ("depth_linear@smoke", dict(kept=61), ("kept=61", "steps=60")),
    ("segmentation_linear@dinov3", dict(steps=20), ("warmup=1500", "steps=20")),
]


def refusal(name: str, **changes: Any) -> str:
    """The line with which the task of a protocol refuses changed settings."""
    with pytest.raises(ValueError) as error:
        replace(PROTOCOLS[name].task, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_values_out_of_range(name):
    for field, values in REFUSED[name].items():
        for wrong in values:
            assert f"{field}={wrong!r}" in refusal(name, **{field: wrong})


def test_settings_that_contradict_each_other():
    for name, changes, words in CONTRADICTIONS:
        message = refusal(name, **changes)
        assert all(word in message for word in words), message


def test_every_setting_has_a_meaning():
    """The comment beside the field, or above it; `bench list` shows it."""
    kinds = {type(protocol.task) for protocol in PROTOCOLS.values()}
    comments = {kind: meanings(kind) for kind in kinds}
    lacking = {
        f"{kind.__name__}.{field.name}"
        for kind in kinds
        for field in fields(kind)
        if len(comments[kind].get(field.name, "")) <= 3
    }
    assert not lacking, "settings without a comment beside or above them"


def test_every_setting_refuses_what_is_of_another_type():
    for module in TASKS.values():
        task = next(iter(module.PROTOCOLS.values())).task
        for field in fields(task):
            with pytest.raises(ValueError, match=f"^{field.name}="):
                replace(task, **{field.name: object()})


def test_every_setting_goes_through_text_and_back():
    wrong = []
    for name, protocol in PROTOCOLS.items():
        for field in fields(protocol.task):
            change = f"{field.name}={setting_text(getattr(protocol.task, field.name))}"
            if changed(protocol.task, {field.name: change}) != protocol.task:
                wrong.append((name, field.name))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_the_same_export_and_seed_give_the_same_numbers(name, solve, export, coloured, tmp_path):
    first = solve(name)
    before = ViTExport(spec=export.spec, preparation=export.preparation, tensors=export.tensors).digest
    second = run(name, export, coloured, tmp_path)
    assert dict(first.metrics) == dict(second.metrics)
    after = ViTExport(spec=export.spec, preparation=export.preparation, tensors=export.tensors).digest
    assert after == before, "the task changed the export's tensors"


def test_numbers_are_finite_and_agree_with_their_arrays(solved):
    _, outcome = solved
    assert outcome.metrics
    for name, metric in outcome.metrics.items():
        assert np.isfinite(metric.value)
        if metric.per_image is not None:
            scale = 100 if metric.unit == "%" else 1
            assert metric.per_image.shape == (120,), f"{name}: per_image has one value for each validation image"
            assert metric.value == pytest.approx(scale * np.nanmean(metric.per_image))
        if metric.resampled is not None:
            assert metric.resampled.shape == (resamples_of(120),), f"{name}: take the values of engine.tasks.resampled"
            middle, spread = np.median(metric.resampled), np.std(metric.resampled)
            assert abs(metric.value - middle) <= 10 * spread + 1e-3 * abs(middle), f"{name}: resampled in another unit"


@pytest.mark.parametrize("name", REPEATED)
def test_an_unreadable_image_is_left_out_and_keeps_its_place(name, export, coloured, tmp_path):
    """With --skip-bad, `per_image` has a value for every validation image, which is NaN for the unreadable one."""
    folder = Path(shutil.copytree(coloured.removeprefix("folder:"), tmp_path / "set"))
    data = f"folder:{folder}"
    broken = open_set(data, "val").path(7)
    Path(broken).write_bytes(Path(broken).read_bytes()[:60])
    outcome = run(name, export, data, tmp_path / "cache", skip_bad=True)
    for metric in outcome.metrics.values():
        if metric.per_image is not None:
            assert metric.per_image.shape == (120,), "probes.scores.spread_out puts values at their images' places"
            assert np.isnan(metric.per_image[7])


def test_measured_counts_match_the_forecast(solved, export):
    """Image sets of equal classes, where shares are exact: forward passes, or the training's steps and images."""
    (name, outcome), images, counts = solved, {"train": 240, "val": 120}, dict[str, float]()
    task = PROTOCOLS[name].task
    if type(task).cost is Task.cost:
        pytest.skip("it does not count its work")
    work = task.cost(Scale(spec=export.spec, images=images, classes=len(COLOURS)))
    for part in work.parts:
        counts[part.kind] = counts.get(part.kind, 0) + part.count
    if "forwards" in outcome.cost:
        assert outcome.cost["forwards"] == counts["features"] + counts.get("crops", 0)
    else:
        steps, batch = outcome.facts["steps"], outcome.facts["batch"]["images"]
        assert work.iterations == steps and counts["training"] == steps * batch
        assert counts["evaluation"] == len(outcome.facts["history"]) * 120


def test_separable_images_are_solved_by_a_classifier(solved):
    _, outcome = solved
    values = accuracies(outcome)  # call a metric top1... only if it is the accuracy of a classifier
    assert not values or max(values.values()) > 98, values


@pytest.mark.parametrize("name", REPEATED)
def test_raw_pixels_are_evaluated_like_a_network(name, coloured, tmp_path):
    """An export of raw pixels has no class token, blocks or weights; every protocol evaluates it, as a baseline."""
    outcome = run(name, load("pixels:8"), coloured, tmp_path, limit=FEW)
    # Below 98 where a task centres each row of features: a white image is then zero.
    assert max(accuracies(outcome).values(), default=100) > 70
    reads_class = "cls" in str(settings_of(PROTOCOLS[name].task))
    assert ("read_instead" in outcome.facts) == reads_class


@pytest.mark.parametrize("network", ["last", pytest.param("vector", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [*REPEATED, "finetune@smoke"])
def test_a_network_of_the_users_own_is_evaluated_or_refused(name, network, coloured, tmp_path, monkeypatch):
    """Tasks on frozen features evaluate any network, with patches or one vector; tasks that train one refuse it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write_networks(tmp_path)
    export, protocol = load_frozen(f"module:toynets:{network}"), PROTOCOLS[name]
    if name.startswith(("finetune", "semi", "robustness_finetune")):
        calls = (
            lambda: run(name, export, "none:", tmp_path),
            lambda: protocol.task.check_network(export.spec),
        )
        for call in calls:
            with pytest.raises(
                ValueError, match=f"toynets:{network} is a frozen network of your own, and fine-tuning trains"
            ):
                call()
        return
    protocol.task.check_network(export.spec)
    outcome = run(name, export, coloured, tmp_path / "cache", limit=FEW)
    assert max(accuracies(outcome).values(), default=100) > 70
    assert outcome.facts["val"]["transform"].endswith("_crop16x24_exact")


@pytest.mark.parametrize("name", REPEATED)
def test_shuffled_labels_give_a_classifier_chance(name, export, shuffled, tmp_path):
    """25 % of 120: three standard deviations of a binomial are 12 points."""
    outcome = run(name, export, shuffled, tmp_path)
    assert all(13 < value < 37 for value in accuracies(outcome).values())
