"""`bench pretrain`: makes a trainer of a recipe and images, describes what it will do, trains, and reports the end.

During the training, k-NN accuracy and health of the encoder can be logged, with the tasks of `bench run`; their
features are not kept.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from bench.options import PretrainOptions, argv_of, example, ready_device
from bench.pretraining.continuing import FROZEN_FROM, recipe_for
from bench.pretraining.recipes import (
    ChosenRecipe,
    bare_name,
    choose_recipe,
    method_file,
    names_by_path,
    values_by_path,
)
from bench.results.record import TrainingCost
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from engine.distributed import World, start_world
from engine.errors import UserError, in_one_line, option, spelled
from engine.extensions import extension_of
from engine.optional import require
from engine.printing import millions, say
from engine.settings import setting_text, unread_paths
from engine.tasks import OpenedSets, Outcome, Task, Workspace
from engine.training.interruptions import Stopped
from imagesets.sets import ImageSet, open_set, splits_of
from imagesets.stored import StoredImages
from pretrain.loop.initial_weights import initial_weights
from pretrain.loop.records import cost_of
from pretrain.loop.run_folder import FORWARD_IMAGES, check_resume
from pretrain.loop.trainer import Run, Trainer
from pretrain.loop.updates import Precision
from pretrain.method import TrainProgress
from probes.splits import open_splits
from probes.tasks.health import MAX_RANK_IMAGES, Health
from probes.tasks.knn import Knn

K = 20  # neighbours as reported by the papers: the best of DINO's four values, and MOCA's only one


@dataclass(frozen=True, kw_only=True)
class OnlineProbe:
    """Base of monitors for pretrain.loop.trainer.Run, which all processes call together, to share the work.

    `space.cache` holds the features of one call, and is deleted after it.
    """

    ARGUMENT: ClassVar[str]  # the argument that names the images
    space: Workspace

    def check(self) -> None:
        """ValueError, before anything is trained, if the probe cannot be computed on these images."""
        raise NotImplementedError

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """Values for the log, by name; `warnings` is a list of lines."""
        raise NotImplementedError

    def outcome(self, task: Task, export: ViTExport) -> Outcome:
        """The outcome of a task for the encoder, computed in an empty cache."""
        world = self.space.world
        world.on_rank0(self.clear)  # remove what a killed run left behind
        try:
            return task.run(export, self.space)
        finally:
            if world.is_rank0:
                self.clear()

    def clear(self) -> None:
        """Delete the features."""
        shutil.rmtree(self.space.cache, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class OnlineKnn(OnlineProbe):
    """k-NN accuracy of the encoder on `space.data`.

    The gallery is a `fraction` of the training images, stratified by class and always drawn with seed 0; queries are
    the validation images. The features are those that the method's source evaluates (class token or mean of patches).
    """

    ARGUMENT = "knn_data"
    k: int = K
    fraction: float = 1.0

    def check(self) -> None:
        open_splits(self.space)

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """`knn_top1` and `knn_top5` in percent."""
        # torch instead of FAISS, which may be missing and is not worth it for a single search
        task = Knn(k=(self.k,), fraction=self.fraction, pool=export.spec.pool, backend="torch")
        numbers = self.outcome(task, export).numbers
        return {f"knn_{name.partition('_')[0]}": value for name, value in numbers.items() if name.startswith("top")}


@dataclass(frozen=True, kw_only=True)
class OnlineHealth(OnlineProbe):
    """Health of the encoder's features of the validation images of `space.data`, or of all images without labels."""

    ARGUMENT = "health_data"

    def check(self) -> None:
        self.space.images("val", lambda url, split: open_set(url, split if split in splits_of(url) else "train"))

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """`health_rankme`, `health_alpha_req`, ..., and a warning if the features have collapsed."""
        self.check()
        outcome = self.outcome(Health(pool=export.spec.pool), export)
        warnings = [f"{line} (health@val on {self.space.data})" for line in outcome.facts["warnings"]]
        return {f"health_{name}": value for name, value in outcome.numbers.items()} | {"warnings": warnings}


# From this ratio of the variance of class shares on, a warning: at 10.6 (sorted by class), 14 points of k-NN accuracy
# were lost (docs/images.md).
UNMIXED = 1.5


def training_precision(text: Precision | Literal["auto"], device: str) -> Precision:
    """The precision of a training: `auto` is bfloat16 on a GPU, float32 on a CPU. ValueError for float16 on a CPU."""
    on_cpu = torch.device(device).type == "cpu"
    if text == "auto":
        return "float32" if on_cpu else "bfloat16"
    if on_cpu and text == "float16":
        raise UserError("precision", "a CPU computes it over 100 times slower; use float32 or bfloat16", "float16")
    return text


def trainer_run(options: PretrainOptions, device: str, precision: Precision, world: World) -> Run:
    """The trainer's options. ValueError for options of an online probe that is not switched on."""
    for probe in ("knn", "health"):
        names = [field.name for field in fields(options) if field.name.startswith(f"{probe}_")]
        every = f"{probe}_every"
        unused_names = [name for name in names if name != every and getattr(options, name) is not None]
        if unused_names and not getattr(options, every):
            raise UserError(unused_names[0], f"say every how many epochs it is evaluated, such as {option(every, 1)}")
    space = Workspace(
        cache=options.out / "online-features",
        data=options.knn_data or options.images,
        device=device,
        precision="float32" if precision == "float32" else "bfloat16",  # the training's, or close to it
        limit=options.knn_limit,
        skip_bad=options.skip_bad,
        world=world,
    )
    knn = OnlineKnn(space=space, k=options.knn_k or K, fraction=options.knn_fraction or 1.0)
    health_space = replace(
        space, data=options.health_data or options.images, limit=options.health_limit or MAX_RANK_IMAGES
    )
    return Run(
        out=options.out,
        device=device,
        precision=precision,
        compiled=options.compiled,
        decode=options.decode,
        seed=options.seed,
        shuffle_window=options.shuffle_window,
        workers=options.workers,
        micro_batch=options.batch_size,
        skip_bad=options.skip_bad,
        resume=options.resume,
        save_minutes=options.save_minutes,
        export_every=options.export_every,
        monitor_every=options.knn_every,
        monitor=knn if options.knn_every else None,
        health_every=options.health_every,
        health=OnlineHealth(space=health_space) if options.health_every else None,
        wandb=options.wandb,
    )


def run_pretraining(options: PretrainOptions) -> None:
    """Pretrain. ValueError for invalid options. Raises Stopped if a signal stopped it, with its state saved."""
    device = ready_device(options.device, options.compiled)
    precision = training_precision(options.precision or "auto", device)
    with start_world(device) as world:
        run = trainer_run(options, device, precision, world)
        chosen, images = world.first_on_each_machine(lambda: _recipe_and_images(options, run))
        trainer = world.on_all_ranks(lambda: make_trainer(chosen, images, run, world))
        if options.dry_run:
            if world.is_rank0:
                say(*training_lines(chosen, trainer, settings=True))
            return
        ending = trainer.train(begun=lambda: say(*training_lines(chosen, trainer, settings=False)))
        run, progress = trainer.run, trainer.progress()
        if world.is_rank0:
            warnings = trainer.learning.warnings.values()
            say(*(f"warning: epoch {progress.epoch}: {warning}" for warning in warnings), errors=True)
        if ending != "finished":
            again = spelled("run the same command again with --resume", "call it again with resume=True")
            raise Stopped(
                f"stopped by a signal after update {progress.step} of {progress.steps}, state saved in "
                f"{run.out / 'states'}; `bench import {shlex.quote(str(run.out))} --out DIR` writes its encoder; to "
                f"continue, {again}"
            )
        if world.is_rank0:
            _say_ending(trainer)


def check_request(options: PretrainOptions) -> None:
    """Check a training before it is submitted. ValueError for invalid options, or if `out` holds another run."""
    default: Precision = "bfloat16" if options.gpus else "float32"
    precision = options.precision or "auto"
    run = trainer_run(options, "cpu", default if precision == "auto" else precision, World())
    chosen, images = _recipe_and_images(options, run)
    trainer = make_trainer(chosen, images, run, World())
    identity = json.loads(json.dumps(trainer.identity()))
    identity.pop(FORWARD_IMAGES, None)  # of this process alone, while the submitted ones share a forward pass
    check_resume(options.out, identity, options.resume, trainer.recipe.defaults())


def _recipe_and_images(options: PretrainOptions, run: Run) -> tuple[ChosenRecipe, ImageSet]:
    """Recipe and images. ValueError for a recipe or images that do not exist, or that a probe cannot be computed on."""
    if run.wandb:
        require("wandb")
    chosen = None if options.init else recipe_of(options)  # with --init it may depend on the number of images
    probes = [probe for probe in (run.monitor, run.health) if isinstance(probe, OnlineProbe)]
    try:
        opened_sets = next((probe.space.opened for probe in probes), OpenedSets())
        images = opened_sets.get(options.images, "train", open_set)
    except ValueError as error:
        needs_labels = method_file(options.method).METHOD.needs_labels
        hint = "" if needs_labels else _hint_at_unlabelled_images(options.images)
        text = _without_prefix(options.images, error) + hint
        raise UserError("images", text, options.images) from error
    for probe in probes:
        try:
            probe.check()
        except ValueError as error:
            url = probe.space.data
            hint = f"; or name other images with {option(probe.ARGUMENT)}" if url == options.images else ""
            raise UserError(probe.ARGUMENT, f"{_without_prefix(url, error)}{hint}", url) from error
    return chosen or recipe_of(options, len(images)), images


def recipe_of(options: PretrainOptions, images: int | None = None) -> ChosenRecipe:
    """The recipe of a training of so many images (None: unknown), with the encoder of --init if there is one.

    ValueError if there is no such recipe, or it fits neither the checkpoint nor the images.
    """
    if not options.init:
        if options.freeze_first_epochs:
            text = f"it is for {option('init')} CHECKPOINT: add the checkpoint whose weights to freeze"
            raise UserError("freeze_first_epochs", text, options.freeze_first_epochs)
        return choose_recipe(options.method, options.recipe, options.set)

    def corrected(settings: Mapping[str, Any]) -> str:
        kept = [text for text in options.set if bare_name(text.partition("=")[0].strip()) not in settings]
        texts = (*kept, *(f"{name}={setting_text(value)}" for name, value in settings.items()))
        line = shlex.join(["bench", *argv_of("pretrain", replace(options, set=texts), on_cluster=True)])
        return spelled(f"run: {line}", f"add {option('settings', dict(settings))}")

    try:
        init = initial_weights(options.init)
        chosen = recipe_for(options.method, options.recipe, options.set, init, images, corrected)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        text = _without_prefix(options.init, error)
        raise UserError("init", text + _hint_at_import(options.init, text), options.init) from error
    epochs, frozen = chosen.recipe.epochs, options.freeze_first_epochs
    if frozen is None:
        frozen = int(not options.recipe and epochs >= FROZEN_FROM)
    if frozen >= epochs:
        text = f"with epochs={epochs}: the encoder would never train; give fewer"
        raise UserError("freeze_first_epochs", text, frozen)
    return replace(chosen, init=replace(init, frozen_epochs=frozen))


def _without_prefix(url: str, error: Exception) -> str:
    """The message of an error without the URL that it begins with."""
    return str(error).removeprefix(f"{url}: ")


def _hint_at_import(reference: str, text: str) -> str:
    """How to give an option of an import that a message advises, since a training has none of these; else ""."""
    names = [field.name for field in fields(ImportOptions) if field.name != "image_size"]  # a setting of trainings, too
    for name in names:
        if re.search(spelled(rf"{option(name)}(?![\w-])", rf"\b{name}="), text):
            imported = f"`bench import {shlex.quote(reference)} {option(name)} ... --out DIR`"
            loaded = f"bench.load({reference!r}, {name}=...).save(DIR)"
            return (
                f"; {option(name)} is an option of imports: {spelled(imported, loaded)}, then {option('init', 'DIR')}"
            )
    return ""


def _hint_at_unlabelled_images(url: str) -> str:
    """Advice to use `images:`, if the URL is of a folder without labels; else ""."""
    folder = url.removeprefix("folder:")
    is_folder = folder and Path(folder).is_dir()
    return f"; labels are not needed here: images:{folder} takes every image below it" if is_folder else ""


def make_trainer(chosen: ChosenRecipe, images: ImageSet, run: Run, world: World) -> Trainer:
    """Make the trainer; nothing is written yet. ValueError for a recipe that contradicts the images or itself."""
    start = f"-from-{chosen.init.name}" if chosen.init else ""
    facts = {"name": f"{chosen.method}-{chosen.name}{start}", "recipe": chosen.label}
    if plugin := extension_of("methods", chosen.module).plugin:
        facts["plugin"] = plugin
    try:
        return Trainer(
            chosen.method, chosen.module, chosen.recipe, images, replace(run, facts=facts, init=chosen.init), world
        )
    except ValueError as error:
        encoder = f" (the encoder is that of {option('init', chosen.init.reference)})" if chosen.init else ""
        raise ValueError(f"{chosen.method} {chosen.name}: {in_one_line(error)}{encoder}") from error


def training_lines(chosen: ChosenRecipe, trainer: Trainer, settings: bool) -> Iterator[str]:
    """Lines about a training: recipe, images, updates, sizes, exports. settings: list all settings of the recipe."""
    recipe, run, plan, method = trainer.recipe, trainer.run, trainer.plan, trainer.method
    encoders = method.encoders()
    yield f"{chosen.method}, recipe {chosen.label}: {recipe.source}"
    if settings:
        names = names_by_path(recipe)
        never_read = unread_paths(recipe)
        values = {names[path]: value for path, value in values_by_path(recipe).items() if path not in never_read}
        yield from (f"    {name} = {setting_text(value)}" for name, value in values.items())
    sizes = [sum(p.numel() for p in network.parameters()) for network in (next(iter(encoders.values())).vit, method)]
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    yield f"  encoder   {recipe.spec.label} at {recipe.spec.side} px, {millions(sizes[0])}"
    yield f"  method    {millions(sizes[1])}, of which {millions(trained)} are trained"
    yield from (f"  {name:<9} {fact}" for name, fact in method.facts().items())
    if chosen.init:
        yield f"  init      {chosen.init.summary(method)}"
        yield from (f"  assumed   {text}" for text in chosen.init.assumed)
    left_out = plan.count - plan.steps_per_epoch * plan.batch
    notes = "".join(f"; {note}" for note in trainer.images.notes)
    yield f"  images    {plan.count} of {trainer.images.url}{notes}"
    if plan.window:
        yield f"  order     {order_summary(trainer)}"
    if method.needs_labels:
        yield f"  labels    of {len(trainer.images.classes)} classes are used for training"
    each_epoch = f"{left_out} images of each epoch are left out"
    if plan.repeats > 1:
        each_epoch = f"an image occurs {plan.repeats} times in an epoch that it is in"
    yield (
        f"  updates   {recipe.epochs * plan.steps_per_epoch}: {recipe.epochs} epochs of {plan.steps_per_epoch}, "
        f"{plan.batch} images in each update; {each_epoch}"
    )
    yield (
        f"  forward   micro-batches of {plan.micro_batch_size} images; {plan.micro_batches} x {trainer.world.size} of "
        f"these (micro-batches x processes) make an update; {run.precision} on {run.device}"
    )
    if method.batch_statistics and plan.micro_batches > 1:
        yield (
            f"  note      the loss depends on the other images of a forward pass, here {trainer.forward_images} of a "
            f"batch of {plan.batch}: another {option('micro_batch')} changes the results"
        )
    yield from (f"  note      {note}" for note in recipe.notes())
    if isinstance(run.monitor, OnlineKnn):
        knn = run.monitor
        part = f"{knn.fraction:g} of " if knn.fraction < 1 else ""
        yield f"  k-NN      k={knn.k} on {part}{knn.space.data}, every {_epochs(run.monitor_every)}"
    if isinstance(run.health, OnlineProbe):
        yield f"  health    of {run.health.space.data}, every {_epochs(run.health_every)}"
    folders = ["export", *(f"export-{branch}" for branch in list(encoders)[1:])]
    exports = (f"{run.out / folder} ({branch})" for folder, branch in zip(folders, encoders, strict=True))
    yield f"  exports   {', '.join(exports)}"
    if settings:
        yield "nothing was trained or written (--dry-run)"


def order_summary(trainer: Trainer) -> str:
    """The shuffling of images in windows of shards: the memory that it needs, and how well it mixes classes."""
    plan, images = trainer.plan, trainer.images
    assert isinstance(images.images, StoredImages)
    share = plan.window / len(plan.shards)
    text = (
        f"shuffled among {plan.window} of {len(plan.shards)} shards at a time, {share * plan.count:.0f} images; the "
        f"page cache should hold twice their {share * images.images.sizes.sum() / 2**30:.2g} GiB"
    )
    if len(images.classes) < 2 or images.has_several_labels:
        return text
    spread = plan.class_spread(images.labels)
    advice = ": pack the shards in random order, or raise the window" if spread > UNMIXED else ""
    return (
        f"{text}; class shares in a batch have {spread:.2f} times the variance that a full shuffle would give{advice}"
    )


def _epochs(count: int) -> str:
    """A number of epochs after `every`: `epoch`, `5 epochs`."""
    return "epoch" if count == 1 else f"{count} epochs"


def _say_ending(trainer: Trainer) -> None:
    """Print what a finished training cost, and how to evaluate its encoder."""
    run = trainer.run
    if trainer.unreadable:
        say(f"{len(trainer.unreadable)} unreadable images were replaced by their neighbours")
    spent = TrainingCost.of({"cost": cost_of(run.out, trainer.identity())})
    say(f"it took {spent.text}")
    labelled = run.monitor.space.data if isinstance(run.monitor, OnlineKnn) else trainer.images.url
    export = run.out / "export"
    say(f"finished after {trainer.progress().steps} updates; the encoder is in {shlex.quote(str(export))}")
    say(evaluation_command(export, labelled))


def evaluation_command(export: Path, url: str) -> str:
    """The command that evaluates an export, on the images of its training if these have labels."""
    data = "NAME=folder:PATH" if url.startswith("images:") else shlex.quote(example(url))
    return f"evaluate it: bench run --checkpoint {shlex.quote(str(export))} --suite frozen --data {data} --out results"
