"""How `bench pretrain --init` fits a recipe to a checkpoint, and makes one for it without `--recipe`.

With `--recipe`, everything that does not fit is refused in one message, with the corrected command. Without, the
method's recipe of the nearest size is adapted by the rules of `continued`; docs/pretraining.md has their sources.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import log, log2, sqrt
from typing import Any

from bench.pretraining.recipes import (
    ChosenRecipe,
    changes_by_path,
    chosen_recipe,
    method_file,
    names_by_path,
    published_recipe,
    values_by_path,
)
from checkpoints.spec import ViTSpec
from engine.errors import UserError
from engine.printing import in_words
from engine.settings import changed, replaced, setting_text, setting_value, types_of
from pretrain.loop.initial_weights import SIZES, InitialWeights
from pretrain.recipe import Begins, Recipe, Rises, marked

SLOWER = 10  # divisor of the learning rate, of the epochs on ImageNet-1k, and of the epochs for those of the warm-up
IMAGENET = 1_281_167  # training images
EPOCHS = 100  # the most, for a small set
UPDATES = 4  # the least of an epoch, for which the batch is lowered
MANY = 10**9  # epochs, more than any warm-up
FROZEN_FROM = 10  # epochs from which on the encoder is frozen in the first one, while new heads are random
CHUNKS = ("koleo_images", "covariance_images")  # images that a loss takes together, which divide a batch; 0: all
# Sides of crops, in whole patches -> the setting that switches these crops off with 0.
CROPS = {"local_size": "local_crops", "focal_size": "focal_views", "gram_size": "gram_weight"}

Values = dict[str, Any]  # by path, such as settings.local_size


def recipe_for(
    method: str,
    name: str | None,
    texts: Sequence[str],
    init: InitialWeights,
    images: int | None,
    corrected: Callable[[Mapping[str, Any]], str],
) -> ChosenRecipe:
    """A recipe that trains `method` from a checkpoint: the recipe `name`, or, without, the one of the nearest size,
    adapted.

    Args:
        texts: changes by the user, `FIELD=VALUE`.
        images: number of training images; None: unknown.
        corrected: settings by name -> advice to use these as well, for the message.

    Raises:
        UserError: there is no such recipe or setting, or some do not fit the checkpoint or the images.
    """
    module, spec = method_file(method), init.trained.spec
    base = name or nearest_recipe(module.RECIPES, spec)
    published = published_recipe(method, module, base)
    sizes, side = {f"spec.{size}": getattr(spec, size) for size in SIZES}, init.trained.evaluation_size
    start = replaced(
        published, sizes | {"epochs": MANY, "spec.image_size": side if isinstance(side, int) else spec.side}
    )
    changes = changes_by_path(start, texts, method)
    # Read apart from these, the other changes contradict no size and no number of epochs: all misfits are told at once.
    free = {path: text for path, text in changes.items() if path in (*sizes, "spec.image_size", "epochs")}
    recipe = changed(start, {path: text for path, text in changes.items() if path not in free})
    values, from_recipe = values_by_path(recipe), values_by_path(published)
    values |= {path: from_recipe[path] for path in (*sizes, "spec.image_size") if name} | {"epochs": published.epochs}
    values |= {path: setting_value(text, path, types_of(start)) for path, text in free.items()}
    if isinstance(values["spec.image_size"], tuple):
        raise UserError("settings", "give one number, the side of square images", changes["spec.image_size"])
    if not name:
        values = continued(values, published, images, changes)
    encoder_fields = [path.removeprefix("spec.") for path in changes if path.startswith("spec.")]
    fitting = {path: size for path, size in sizes.items() if values[path] != size}
    fitting |= {f"spec.{field}": value for field, value in init.conflicts(recipe.spec, encoder_fields).items()}
    fitting |= fitting_values(values, type(published.settings), spec.patch_size, images)
    names = names_by_path(recipe)
    if wrong := {path: value for path, value in fitting.items() if name or path in changes}:
        needed = [f"{names[p]}={setting_text(v)} instead of {setting_text(values[p])}" for p, v in wrong.items()]
        count = "" if images is None else f" {images} images and"
        advice = corrected({names[path]: value for path, value in wrong.items()})
        text = f"a {spec.label},{count} {values['epochs']} epochs need {in_words(needed)}; {advice}"
        raise UserError("init", text, init.reference)
    values |= fitting
    before = values_by_path(recipe)
    recipe = replaced(recipe, {path: value for path, value in values.items() if value != before[path]})
    if not name:
        recipe = replace(recipe, source=f"{recipe.source}; ours: adapted to the checkpoint (docs/pretraining.md)")
    chosen = chosen_recipe(method, module, base, recipe)
    return replace(chosen, recipe=init.recipe(recipe, encoder_fields), init=init)


def nearest_recipe(recipes: Mapping[str, Recipe], spec: ViTSpec) -> str:
    """Name of the recipe whose encoder has the nearest number of weights, the first of several."""
    sizes = {name: recipe.spec.width**2 * recipe.spec.depth for name, recipe in recipes.items()}
    return min(recipes, key=lambda name: abs(log(sizes[name] / (spec.width**2 * spec.depth))))


def continued(values: Values, published: Recipe, images: int | None, kept: Collection[str]) -> Values:
    """The values of a recipe by the rules for continued training, except at the paths `kept`."""
    values = dict(values)

    def choose(path: str, value: Any) -> None:
        if path in values and path not in kept:
            values[path] = value

    choose("epochs", max(1, min(EPOCHS, round(published.epochs / SLOWER * IMAGENET / (images or IMAGENET)))))
    if images and images < UPDATES * published.batch:
        choose("batch", small_batch(images))
    for path in [f"settings.{name}" for name in CHUNKS if hasattr(published.settings, name)]:
        choose(path, 0 if values[path] and values["batch"] % values[path] else values[path])
    peak = published.peak / SLOWER * sqrt(values["batch"] / published.batch)
    choose("lr", float(f"{peak:.3g}"))
    choose("lr_batch", 0)  # lr is the peak
    choose("schedule.floor", getattr(published.schedule, "floor", 0.0) / SLOWER)
    choose("schedule.warmup", values["epochs"] / SLOWER)
    share = values["epochs"] / published.epochs  # of the recipe's epochs
    choose("schedule.milestones", tuple(share * time for time in getattr(published.schedule, "milestones", ())))
    kind, own = type(published.settings), of_method(values)
    for name in (*marked(kind, own, Begins), *marked(kind, own, Rises)):
        time = own[name]
        choose(f"settings.{name}", round(share * time) if isinstance(time, int) else share * time)
    scale = values["spec.image_size"] / published.spec.side
    for path in [f"settings.{name}" for name in CROPS if hasattr(published.settings, name)]:
        choose(path, round(scale * values[path]))
    return values


def fitting_values(values: Values, kind: type, patch: int, images: int | None) -> Values:
    """Path -> value that fits patches of this side, the number of images and the epochs, for all values that do not.

    kind: class of the method's settings.
    """
    whole_patches = range(patch, 4 * max(patch, values["spec.image_size"]) + 1, patch)
    side = min(whole_patches, key=lambda size: abs(size - values["spec.image_size"]))
    choices: dict[str, Sequence[int]] = {}
    choices |= {name: whole_patches for name, switch in CROPS.items() if values.get(f"settings.{switch}")}
    if values.get("settings.base", "simmim") == "simmim":  # SimMIM, LUT
        choices["mask_patch"] = [size for size in whole_patches if side % size == 0]
    choices["hog_cell"] = [size for size in range(2, patch + 1) if patch % size == 0]  # MaskFeat
    fitting: Values = {} if side == values["spec.image_size"] else {"spec.image_size": side}
    for path, sizes in {f"settings.{name}": sizes for name, sizes in choices.items()}.items():
        if (size := values.get(path)) and size not in sizes:
            fitting[path] = min(sizes, key=lambda fit: abs(fit - size))
    if values.get("settings.decoder") == "conv" and patch & (patch - 1):  # MST's doubles the side in each stage
        fitting["settings.decoder"] = "linear"
    if images and values["batch"] > images:
        fitting["batch"] = small_batch(images)
    if values.get("schedule.warmup", 0) >= values["epochs"]:
        fitting["schedule.warmup"] = values["epochs"] / SLOWER
    milestones = values.get("schedule.milestones", ())
    if milestones and max(milestones) >= values["epochs"]:
        fitting["schedule.milestones"] = tuple(time for time in milestones if time < values["epochs"])
    own, share = of_method(values), values["epochs"] / SLOWER
    for name in marked(kind, own, Begins):
        if own[name] >= values["epochs"]:
            fitting[f"settings.{name}"] = int(share) if isinstance(own[name], int) else share
    return fitting


def of_method(values: Values) -> Values:
    """The settings of the method among a recipe's values, by name."""
    return {path.removeprefix("settings."): value for path, value in values.items() if path.startswith("settings.")}


def small_batch(images: int) -> int:
    """The largest power of two with which an epoch has at least UPDATES updates; 1 for fewer images."""
    return 2 ** int(log2(max(1, images / UPDATES)))
