"""What pretraining methods show their networks: crops, colours and masks, of a recipe, without weights.

Read off each method's own views and forward pass, with its initial weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.pretraining.recipes import choose_recipe
from bench.reporting.network_inputs import GivenView, as_image, given_views, method_views
from bench.reporting.panels import Panel, PanelRow, Picture
from bench.reporting.viewers import PictureRequest
from checkpoints.spec import Preparation
from engine import checks
from engine.extensions import load_extension, source_files
from engine.printing import did_you_mean
from pretrain.loop.trainer import build

ACROSS = 8  # panels beside an image; further ones stand below


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Settings of the picture."""

    methods: tuple[str, ...] = ()  # such as mae,lut; all, where none is named
    recipe: str = ""  # of all these methods, such as 32px; the first recipe of each, where none is named
    views: int | None = None  # of each network, student and teacher, at most; all, where no number is named

    def __post_init__(self) -> None:
        checks.annotations(self)
        checks.counts(self, "views")
        for name in self.methods:
            if name not in (known := list(source_files("methods"))):
                raise ValueError(f"methods={name}: there is no such method{did_you_mean(name, known)}")

    def pictures(self, shown: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are methods and images, columns what their networks see."""
        rows = []
        for name in self.methods or sorted(source_files("methods")):
            recipe = self.recipe or next(iter(load_extension("methods", name).RECIPES))
            chosen = choose_recipe(name, recipe, ())
            method = build(chosen.module, chosen.recipe, shown.seed)
            for number, image in enumerate(shown.images):
                views = given_views(method, method_views(method, image.image, shown.seed, number))
                panels = self.panels(views, method.preparation)
                rows += panel_rows(image.panel(), panels, f"{name} {recipe}")
        yield Picture(
            name="masks",
            rows=tuple(rows),
            note="What the networks of each method are given; hidden patches are grey. Only students get gradients.",
        )

    def panels(self, views: list[GivenView], preparation: Preparation) -> list[Panel]:
        """The students' views, then the teachers'; of each network the first ones, and how many are not shown."""
        found = []
        for network in ("student", "teacher"):
            own = [view_panel(view, preparation) for view in views if view.network == network]
            chosen = own[: self.views]
            if more := len(own) - len(chosen):
                chosen[-1] = replace(chosen[-1], caption=f"{more} more are not shown")
            found += chosen
        return found


def panel_rows(image: Panel, panels: list[Panel], label: str) -> list[PanelRow]:
    """The image, and its panels in as many rows of ACROSS as they need."""
    parts = [panels[start : start + ACROSS] for start in range(0, len(panels), ACROSS)]
    return [
        PanelRow(panels=(None if number else image, *part), label="" if number else label)
        for number, part in enumerate(parts)
    ]


def view_panel(view: GivenView, preparation: Preparation) -> Panel:
    """What a network sees of one view."""
    colours = as_image(view.pixels, preparation, view.hidden)
    share = view.hidden.mean()
    title = f"{view.network}, {colours.shape[1]} px" + (f", {share:.0%} hidden" if share else "")
    return Panel(values=colours, size=colours.shape[:2], title=title)
