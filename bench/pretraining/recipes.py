"""The choice of a pretraining recipe, and changes of its nested settings by `--set FIELD=VALUE`.

A recipe's values have paths: lr, schedule.warmup, spec.width, settings.mask_ratio. Users write these without `spec.`
and `settings.`; the resulting names are unique within a method (tests/test_method_contract.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from engine.errors import UserError
from engine.extensions import load_extension, source_files
from engine.printing import did_you_mean
from engine.settings import alternatives, changed, meanings, read_changes, setting_text, types_of
from pretrain.recipe import Recipe

if TYPE_CHECKING:
    from pretrain.loop.initial_weights import InitialWeights

FIXED = ("source",)  # fields that cannot be set
ALIASES = {"batch_size": "batch"}  # the name in most codes; for images in a forward pass there is --micro-batch
ORDER = {"settings": 1, "spec": 2}  # order of lists: the recipe's own values first, then the method's, the encoder's


@dataclass(frozen=True, kw_only=True)
class ChosenRecipe:
    """One of a method's recipes, with the user's changes applied."""

    method: str
    module: ModuleType  # the method's file
    name: str
    recipe: Recipe
    changes: Mapping[str, Any]  # changed setting -> its new value
    init: "InitialWeights | None" = None  # checkpoint that the encoder starts from

    @property
    def label(self) -> str:
        """The recipe with init and changes: `smoke`, `smoke from vit_base_patch16_dinov3 with epochs=1 width=32`."""
        changes = " ".join(f"{name}={setting_text(value)}" for name, value in self.changes.items())
        name = f"{self.name} from {self.init.name}" if self.init else self.name
        return f"{name} with {changes}" if changes else name


def choose_recipe(method: str, name: str | None, texts: Sequence[str]) -> ChosenRecipe:
    """The recipe `name` of `method`, changed by every `FIELD=VALUE` of `texts`. ValueError for an unknown name."""
    module = method_file(method)
    recipe = published_recipe(method, module, name)
    return chosen_recipe(method, module, str(name), changed_recipe(recipe, texts, method))


def method_file(method: str) -> ModuleType:
    """The file of a method. ValueError for an unknown method, or a file that is not what the trainer needs."""
    if method not in (methods := source_files("methods")):
        raise UserError("method", f"no such method{did_you_mean(method, list(methods))}", method)
    module = load_extension("methods", method)
    check_method_file(method, module)
    return module


def published_recipe(method: str, module: ModuleType, name: str | None) -> Recipe:
    """The recipe `name` as the method's file defines it. UserError if there is none of that name."""
    if name is None or name not in module.RECIPES:
        problem = f"{method} has no recipe {name!r}" if name else f"missing: which recipe of {method}"
        raise UserError("recipe", f"{problem}{did_you_mean(name or '', list(module.RECIPES))}")
    return module.RECIPES[name]


def chosen_recipe(method: str, module: ModuleType, name: str, recipe: Recipe) -> ChosenRecipe:
    """The recipe `name` of `method` in a changed form, with what differs from the method's file."""
    before, after = values_by_path(module.RECIPES[name]), values_by_path(recipe)
    names = names_by_path(recipe)
    changes = {names[path]: value for path, value in after.items() if path not in before or value != before[path]}
    return ChosenRecipe(method=method, module=module, name=name, recipe=recipe, changes=changes)


def check_method_file(method: str, module: ModuleType) -> None:
    """Raise ValueError if METHOD or RECIPES of a method's file are not what the trainer needs."""
    from pretrain.method import Method

    if not (isinstance(module.METHOD, type) and issubclass(module.METHOD, Method)):
        raise ValueError(
            f"method {method!r}: its METHOD is {module.METHOD!r}, not a subclass of pretrain.method.Method"
        )
    for name, recipe in module.RECIPES.items():
        if not isinstance(recipe, Recipe):
            raise ValueError(f"method {method!r}: its RECIPES[{name!r}] is {recipe!r}, not a pretrain.recipe.Recipe")


def recipe_summary(recipe: Recipe) -> str:
    """A recipe in numbers: `ViT-B/16 at 224 px, 800 epochs, batch 4096, peak learning rate 0.0024`."""
    spec = recipe.spec
    return (
        f"{spec.label} at {spec.side} px, {recipe.epochs} epochs, batch {recipe.batch}, "
        f"peak learning rate {recipe.peak:.3g}"
    )


def changed_recipe(recipe: Recipe, texts: Sequence[str], method: str) -> Recipe:
    """The recipe with changes `FIELD=VALUE`, applied at once, so that their order does not matter.

    ValueError, with the command that lists the settings of `method`, for an unknown setting.
    """
    return changed(recipe, changes_by_path(recipe, texts, method))


def changes_by_path(recipe: Recipe, texts: Sequence[str], method: str) -> dict[str, str]:
    """Path -> `FIELD=VALUE`, as the user wrote it. ValueError for unknown settings."""
    changes = read_changes(texts, "FIELD=VALUE", "epochs=10")
    exchanged = changes.keys() & alternatives(recipe).keys()  # schedules of another class, which has other fields
    return {path_of(name, recipe, method, exchanged): change for name, change in changes.items()}


def path_of(name: str, recipe: Recipe, method: str, exchanged: Collection[str] = ()) -> str:
    """The path of the setting that users call `name`. ValueError if there is none.

    exchanged: fields whose dataclass another one replaces, so that names below these are not those of the recipe.
    """
    names, name = names_by_path(recipe), bare_name(name)
    if name.partition(".")[0] in exchanged:
        return name
    if paths := [path for path in names if name in (path, names[path])]:
        return paths[0]
    hint = did_you_mean(name, list(names.values()), f"`bench list {method}`")
    raise UserError("settings", f"no such setting{hint}", name)


def names_by_path(recipe: Recipe) -> dict[str, str]:
    """Path -> the name that users write, which is the path without `spec.` and `settings.`."""
    return {path: bare_name(path) for path in types_by_path(recipe)}


def bare_name(name: str) -> str:
    """A setting's name without the dataclass that holds it, and without aliases."""
    name = name.removeprefix("spec.").removeprefix("settings.")
    return ALIASES.get(name, name)


def types_by_path(recipe: Recipe) -> dict[str, Any]:
    """Path -> annotated type of every setting: the recipe's own, the method's, the encoder's."""
    types = {path: hint for path, hint in types_of(recipe).items() if path not in FIXED}
    types |= {name: Literal[tuple(kinds)] for name, kinds in alternatives(recipe).items()}
    return {path: types[path] for path in sorted(types, key=lambda path: ORDER.get(path.partition(".")[0], 0))}


def meanings_of(recipe: Recipe) -> dict[str, str]:
    """Name of a setting, as in `--set` -> its meaning; settings without a comment are omitted."""
    texts = {}
    for path, name in names_by_path(recipe).items():
        *parents, field = path.split(".")
        texts[name] = meanings(type(reduce(getattr, parents, recipe))).get(field, "")
    return {name: text for name, text in texts.items() if text}


def values_by_path(recipe: Recipe) -> dict[str, Any]:
    """Path -> value of every setting, in the order of `types_by_path`; for an alternative the name of its class."""
    values = {path: reduce(getattr, path.split("."), recipe) for path in types_by_path(recipe)}
    return values | {name: type(values[name]).__name__ for name in alternatives(recipe)}
