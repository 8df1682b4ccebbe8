"""The encoders of a training as exports: from a method in memory, or from the folder of a run.

Reading a folder changes nothing in it, needs no images and runs no code of its files (JSON and safetensors). So it also
works while another process or another machine continues the training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.export import ViTExport, is_export
from checkpoints.runs import EXPORT, RUN, finished_export, identity_in
from checkpoints.spec import ViTSpec
from engine.extensions import load_extension
from engine.seeding import START, seeded
from engine.training.states import State, newest_state
from pretrain.loop.records import cost_of
from pretrain.method import Method, TrainProgress


def exports_of(method: Method, facts: Mapping[str, Any]) -> Iterator[tuple[str, ViTExport]]:
    """Folder name and export of each of the method's networks; the first is the one that its source evaluates."""
    facts = {**facts, **method.facts()}
    for number, (branch, encoder) in enumerate(method.encoders().items()):
        export = ViTExport.from_vit(encoder.vit, method.preparation, {**facts, "branch": branch})
        if encoder.extra:
            copies = {name: tensor.detach().cpu().clone() for name, tensor in encoder.extra.items()}
            extra = {**export.extra, **copies}
            export = ViTExport.make(export.spec, export.preparation, export.tensors, extra, export.facts)
        yield EXPORT if number == 0 else f"{EXPORT}-{branch}", export


def facts_of(
    identity: Mapping[str, Any],
    step: int,
    skipped: int = 0,
    warnings: Sequence[str] = (),
    cost: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Facts for the exports of a run after `step` updates.

    Before the end of the training, they include `unfinished` (updates done, updates and epochs in all), and the name
    has the epochs done as a suffix.

    Args:
        identity: of the run's run.json.
        step: updates done.
        skipped: unreadable images that were replaced.
        warnings: of the last epoch.
        cost: see `cost_of`.
    """
    progress, settings, data = progress_after(identity, step), identity["settings"], identity["data"]
    facts = {key: value for key, value in identity.items() if key not in ("settings", "data")}
    facts |= {
        "official_code": settings["source"],
        "epochs": progress.time,
        "data": data["url"],
        "data_fingerprint": data["fingerprint"],
        "skipped_images": skipped,
    }
    if warnings:
        facts["warnings"] = list(warnings)
    if cost:
        facts["cost"] = dict(cost)
    if step < progress.steps:
        facts["unfinished"] = {"step": step, "steps": progress.steps, "epochs": progress.epochs}
        if "name" in facts:
            facts["name"] += f"-epoch{epochs_done(progress)}of{progress.epochs}"
    return facts


def progress_after(identity: Mapping[str, Any], step: int) -> TrainProgress:
    """The progress of the run after `step` updates."""
    settings = identity["settings"]
    steps_per_epoch = identity["data"]["images"] // settings["batch"]
    return TrainProgress(step=step, steps_per_epoch=steps_per_epoch, epochs=settings["epochs"])


def epochs_done(progress: TrainProgress) -> str:
    """Epochs with at most two decimals: `12.25`."""
    return f"{round(progress.time, 2):.6g}"


def exports_in(folder: Path) -> Iterator[tuple[str, ViTExport]]:
    """Folder name and export of each network of a run: the saved exports if the run is finished, otherwise those of its
    newest state.

    Raises ValueError if the run has no state, or its files do not fit this version.
    """
    if finished_export(folder):
        for path in sorted(path for path in folder.glob(f"{EXPORT}*") if is_export(path)):
            yield path.name, ViTExport.load(path)
        return
    identity = identity_in(folder)
    method, state = trained_method(folder)
    warnings = state.facts.get("learning", {}).get("warnings", {})
    step, skipped = state.facts["step"], len(state.facts["unreadable"])
    cost = cost_of(folder, identity)
    yield from exports_of(method, facts_of(identity, step, skipped, tuple(warnings.values()), cost))


def trained_method(folder: Path) -> tuple[Method, State]:
    """The complete method of a run, decoders included, with the weights of its newest state, and that state. Raises
    ValueError as `exports_in` does."""
    identity, state = identity_in(folder), newest_state(folder / "states", "method.")
    if state is None:
        raise ValueError(
            f"{folder} has no training state yet: one is written every --save-minutes, and when the training stops; "
            f"{folder / 'start'} is the encoder before training"
        )
    method = method_of(identity, folder)
    try:
        state.facts["step"], len(state.facts["unreadable"])  # raises an error if they are missing
        method.load_state_dict(state.tensors)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}: its states do not fit {identity['method']} in this version") from error
    return method, state


def method_of(identity: Mapping[str, Any], folder: Path) -> Method:
    """The method that run.json describes, with initial weights. Raises ValueError if this version of the method has
    other settings."""
    module, settings = load_extension("methods", identity["method"]), identity["settings"]
    kind = type(next(iter(module.RECIPES.values())).settings)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings["settings"].items()}
    try:
        with seeded(START, 0):
            method = module.METHOD(ViTSpec(**settings["spec"]), kind(**values))
        if init := identity.get("init"):
            method.preparation = replace(method.preparation, mean=tuple(init["mean"]), std=tuple(init["std"]))
        return method
    except TypeError as error:
        raise ValueError(f"{folder / RUN} has other settings than this version of {identity['method']}") from error
