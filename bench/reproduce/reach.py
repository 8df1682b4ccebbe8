"""By what a published value can be measured here: names alone, names with changed settings, or nothing; and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

from bench.pretraining.recipes import changed_recipe
from bench.published.values import LOG, PublishedValue
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols
from engine.extensions import load_extension, source_files, warn_of

Way = Literal["named", "set", "none"]
WAYS: tuple[Way, ...] = ("named", "set", "none")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What there is to measure with."""

    protocols: Mapping[str, ChosenProtocol]
    methods: Mapping[str, ModuleType]
    importers: Mapping[str, ModuleType]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """evaluation: of weights that are there. training: of such weights. unmeasured, untrained: what is not here for
    each, a phrase; "" for nothing."""

    evaluation: Way
    training: Way
    unmeasured: str = ""
    untrained: str = ""

    @property
    def lacking(self) -> list[str]:
        """Both phrases, as far as there are any."""
        return [phrase for phrase in (self.unmeasured, self.untrained) if phrase]


@cache
def known() -> Known:
    """Protocols, methods and importers of this installation."""
    found = catalogue()
    warn_of(found.broken)
    methods, importers = (
        {key: load_extension(kind, key) for key in source_files(kind)} for kind in ("methods", "importers")
    )
    return Known(protocols=found.protocols, methods=methods, importers=importers)


def reach(value: PublishedValue, there: Known) -> Reach:
    """By what `value` can be measured with what is `there`."""
    training, untrained = _training(value, there)
    evaluation: Way
    if value.protocol == LOG:
        evaluation, unmeasured = ("none", untrained) if training == "none" else ("named", "")
    else:
        evaluation, unmeasured = _evaluation(value, there)
    return Reach(evaluation=evaluation, training=training, unmeasured=unmeasured, untrained=untrained)


def chosen(value: PublishedValue, there: Known) -> ChosenProtocol:
    """The protocol of a value, with its settings. ValueError where there is no such protocol or setting."""
    if value.protocol not in there.protocols:
        raise ValueError(
            f"there is no protocol {value.protocol}" if value.protocol else "no protocol here is that of its source"
        )
    texts = [f"{value.protocol}.{change}" for change in value.settings.split()]
    return changed_protocols([there.protocols[value.protocol]], texts)[0] if texts else there.protocols[value.protocol]


def _evaluation(value: PublishedValue, there: Known) -> tuple[Way, str]:
    try:
        chosen(value, there)
    except ValueError as error:
        return "none", str(error)
    return ("set" if value.settings else "named"), ""


def _training(value: PublishedValue, there: Known) -> tuple[Way, str]:
    method, recipe, changes = trained_by(value)
    if not method:
        return "none", "no method here trains these weights"
    if method not in there.methods:
        return "none", f"there is no method {method}"
    recipes: Mapping[str, Any] = there.methods[method].RECIPES
    if recipe not in recipes:
        return "none", f"{method} has no recipe {recipe}"
    try:
        changed_recipe(recipes[recipe], changes, method)
    except ValueError as error:
        return "none", str(error)
    return ("set" if changes else "named"), ""


def trained_by(value: PublishedValue) -> tuple[str, str, Sequence[str]]:
    """Method, recipe and changes; empty where nothing here trains it."""
    method, recipe, *changes = [*value.pretraining.split(), "", ""]
    return method, recipe, list(filter(None, changes))
