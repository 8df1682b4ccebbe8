"""What a report shows of a table besides its numbers: images, mistakes, neighbours and learning curves."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report_page.contents import ReportContents, ShownTable
from bench.report_page.figures import in_unit, lines_figure
from bench.report_page.images import ImageView, image_view
from bench.report_page.mistakes import Mistakes, mistakes_of
from bench.report_page.neighbours import Asked, neighbours_of
from bench.report_page.pictures import Opened, on_this_machine
from bench.report_page.scenes import SceneView, scene_view
from bench.results.board import group_of
from bench.results.record import Result
from bench.statistics.matching import Measured
from downstream.data.scenes import layout_of

BEST = 8  # checkpoints of a table that are looked at, and the floor


@dataclass(frozen=True, kw_only=True)
class TableView:
    """Beside one table. Each of the first seed of its best checkpoints; None or empty where nothing is kept."""

    images: ImageView | None = None
    mistakes: Mistakes | None = None
    neighbours: tuple[Asked, ...] = ()
    scenes: SceneView | None = None
    learning: str = ""  # SVG

    @property
    def is_empty(self) -> bool:
        return not (self.images or self.mistakes or self.neighbours or self.scenes or self.learning)


def views_of(
    report: ReportContents, measured: Sequence[Measured], cache: Path, pictures: bool = True
) -> dict[str, TableView]:
    """Anchor of a table -> what can be seen beside it. pictures: also what needs the images themselves. cache: where
    tiny sets are drawn."""
    by_place: dict[tuple[str, str], Measured] = {}
    for each in measured:
        if each.result.status == "ok":
            by_place.setdefault((group_of(each.result), each.result.checkpoint.digest), each)
    digests = {each["name"]: str(each["digest"]) for each in report.checkpoints}
    opened, found = on_this_machine(), {}
    for table in report.tables:
        own = {name: by_place[table.group, digests[name]] for name in looked_at(table)}
        view = view_of(own, table.metrics, opened if pictures else None, cache)
        if not view.is_empty:
            found[table.anchor] = view
        for each in own.values():
            each.forget_arrays()
    return found


def looked_at(table: ShownTable) -> list[str]:
    """Names of the best BEST checkpoints of a table, the best first, and of the floors."""
    rows = [row for row in table.rows if row.kind != "published"]
    return [row.name for place, row in enumerate(rows) if place < BEST or row.kind == "floor"]


def view_of(measured: Mapping[str, Measured], metrics: Sequence[str], opened: Opened | None, cache: Path) -> TableView:
    """What the named results of one table say; opened: None where no image may be opened."""
    metric = metrics[0]
    curves = {name: learning_curve(each.result, metric) for name, each in measured.items()}
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not measured:
        return TableView()
    first = next(iter(measured.values())).result
    unit = first.metrics[metric].unit if metric in first.metrics else ""
    along = "step" if layout_of(first.data.url) else "epoch"
    learning = lines_figure(curves, along, in_unit(metric, unit), "learning curves of the probes") if curves else ""
    if opened is None:
        return TableView(learning=learning)
    if layout_of(first.data.url):
        return TableView(scenes=scene_view(measured, cache), learning=learning)
    images = opened(first, "val")
    if images is None or images.has_several_labels:  # what an image was taken for is one class
        return TableView(learning=learning)
    by_image = (image_view(measured, each, images) for each in metrics)
    return TableView(
        images=next(filter(None, by_image), None),  # of the first metric that is kept for each image
        mistakes=mistakes_of(measured, images),
        neighbours=neighbours_of(_best_and_floor(measured), opened),
        learning=learning,
    )


def _best_and_floor(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    names = list(measured)
    floors = [name for name in names[1:] if measured[name].result.checkpoint.is_floor]
    return {name: measured[name] for name in [*names[:1], *floors[:1]]}


def learning_curve(result: Result, metric: str) -> list[tuple[float, float]]:
    """Epoch or step, and what a probe's training reached there on the images that it was watched on; empty where that
    was not kept, or is not what our tasks keep."""
    for read in (_of_heads, _of_epochs, partial(_of_scenes, metric=metric)):
        with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # facts may hold any JSON
            if points := read(result.facts):
                return points
    return []


def _of_heads(facts: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(epoch + 1, float(value)) for epoch, value in enumerate(facts["chosen_history"])]


def _of_epochs(facts: Mapping[str, Any]) -> list[tuple[float, float]]:
    watched = "holdout" if "holdout" in facts["history"][0] else "val"
    return [(float(entry["epoch"]), float(entry[watched])) for entry in facts["history"]]


def _of_scenes(facts: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    return sorted((float(step), float(metrics[metric])) for step, metrics in facts["evaluations"][0].items())
