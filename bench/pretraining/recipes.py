"""Which pretraining recipe the command line means, and `--set field=value` on its nested settings.

A recipe's values have paths: lr, schedule.warmup, spec.width, settings.mask_ratio. Without `spec.` and `settings.` they
are the names that people write; no two of a method are the same (tests/test_method_contract.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from bench.cli.settings import alternatives, changed, read_changes, setting_text, types_of
from engine.extensions import load_extension, source_files
from engine.printing import did_you_mean
from pretrain.recipe import Recipe

if TYPE_CHECKING:
    from pretrain.loop.initial_weights import InitialWeights

FIXED = ("source",)  # what a change cannot make true
ORDER = {"settings": 1, "spec": 2}  # in lists, after what is the recipe's own


@dataclass(frozen=True, kw_only=True)
class ChosenRecipe:
    """A method's file, and one of its recipes with the user's `changes`: name -> value that differs. init: the
    checkpoint that its encoder is of."""

    method: str
    module: ModuleType
    name: str
    recipe: Recipe
    changes: Mapping[str, Any]
    init: "InitialWeights | None" = None

    @property
    def label(self) -> str:
        """`smoke`, `smoke with epochs=1 width=32`, `smoke from vit_base_patch16_dinov3 with epochs=1`"""
        changes = " ".join(f"{name}={setting_text(value)}" for name, value in self.changes.items())
        name = f"{self.name} from {self.init.name}" if self.init else self.name
        return f"{name} with {changes}" if changes else name


def choose_recipe(method: str, name: str | None, texts: Sequence[str]) -> ChosenRecipe:
    """The recipe `name` of `method` with every `field=value` of `texts`. ValueError gives the choices."""
    if method not in (methods := source_files("methods")):
        raise ValueError(f"no method {method!r}{did_you_mean(method, list(methods))}")
    module = load_extension("methods", method)
    if name is None or name not in module.RECIPES:
        problem = (
            f"--recipe: {method} has no recipe {name!r}" if name else f"--recipe is missing: which one of {method}"
        )
        raise ValueError(f"{problem}{did_you_mean(name or '', list(module.RECIPES))}")
    recipe = module.RECIPES[name]
    changed = changed_recipe(recipe, texts, method)
    before, after = values_by_path(recipe), values_by_path(changed)
    names = names_by_path(changed)
    changes = {names[path]: value for path, value in after.items() if path not in before or value != before[path]}
    return ChosenRecipe(method=method, module=module, name=name, recipe=changed, changes=changes)


def costs(recipe: Recipe) -> str:
    """What a training takes: `ViT-B/16 at 224 px, 800 epochs, batch 4096, peak learning rate 0.0024`"""
    spec = recipe.spec
    return (
        f"{spec.label} at {spec.side} px, {recipe.epochs} epochs, batch {recipe.batch}, "
        f"peak learning rate {recipe.peak:.3g}"
    )


def changed_recipe(recipe: Recipe, texts: Sequence[str], method: str) -> Recipe:
    """All changes at once, so that values which depend on each other may come in any order. ValueError in one line,
    which names the command that lists the settings of `method`."""
    changes = read_changes(texts, "FIELD=VALUE", "epochs=10")
    anew = changes.keys() & alternatives(recipe).keys()  # schedules, whose parts may be others
    return changed(recipe, {path_of(name, recipe, method, anew): change for name, change in changes.items()})


def unused(recipe: Recipe) -> set[str]:
    """The recipe's own settings of optimisers that it does not use."""
    own = {"adamw": ("betas",), "lars": ("momentum",)}
    return {name for optimizer, names in own.items() if optimizer != recipe.optimizer for name in names}


def path_of(name: str, recipe: Recipe, method: str, anew: Collection[str] = ()) -> str:
    """The path that `name` stands for. anew: fields of which another alternative is chosen."""
    names = names_by_path(recipe)
    if name.partition(".")[0] in anew:
        return name
    if paths := [path for path in names if name in (path, names[path])]:
        return paths[0]
    likely = did_you_mean(name, list(names.values()), f"`bench list {method}`")
    raise ValueError(f"--set {name}: no such setting{likely}")


def names_by_path(recipe: Recipe) -> dict[str, str]:
    """Path -> what people write: the path without `spec.` and `settings.`."""
    return {path: path.removeprefix("spec.").removeprefix("settings.") for path in types_by_path(recipe)}


def types_by_path(recipe: Recipe) -> dict[str, Any]:
    """Path -> annotated type of everything that can be set: the recipe's own, the method's, the encoder's."""
    types = {path: hint for path, hint in types_of(recipe).items() if path not in FIXED}
    types |= {name: Literal[tuple(kinds)] for name, kinds in alternatives(recipe).items()}
    return {path: types[path] for path in sorted(types, key=lambda path: ORDER.get(path.partition(".")[0], 0))}


def values_by_path(recipe: Recipe) -> dict[str, Any]:
    """Path -> value of the same, in the same order; of an alternative its name."""
    values = {path: reduce(getattr, path.split("."), recipe) for path in types_by_path(recipe)}
    return values | {name: type(values[name]).__name__ for name in alternatives(recipe)}
