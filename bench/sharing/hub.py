"""Results in the two forms of the Hugging Face Hub: `model-index` in a card's header, and files of `.eval_results/`.

Hub documentation: modelcard.md and eval_results.yaml of huggingface/hub-docs; docs/sharing.md says what goes where.

The parsers of huggingface_hub 2.4.0 (repocard_data.py, _eval_results.py) pass over unknown keys and take any value;
tests/bench/test_sharing.py holds what is written here against strict forms of both.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.leaderboards.tables import Cell, cell_text
from bench.sharing.groups import Publication, SharedGroup, without_folders
from engine.printing import printable

# First letters of a main metric -> the Hub's name of the task (its pipeline tags) and its metric (of evaluate).
TASKS = {
    "top": ("image-classification", "accuracy"),
    "mIoU": ("image-segmentation", "mean_iou"),
    "AP": ("object-detection", "AP"),
}
OTHER_TASK = "image-feature-extraction"


def model_index(name: str, groups: Sequence[SharedGroup], publication: Publication) -> list[dict[str, Any]]:
    """The value of `model-index`: every number of every group, those of one image set together; empty without any."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for group in groups:
        task, dataset = task_type(group), _dataset(group, publication)
        entry: dict[str, Any] = {"task": {"type": task}, "dataset": dataset, "metrics": []}
        if publication.source:
            entry["source"] = {"url": publication.source, "name": "results, logs and commands"}
        entry = results.setdefault((task, str(sorted(dataset.items(), key=str))), entry)
        entry["metrics"] += [_metric(group, metric, cell) for metric, cell in group.cells.items()]
    return [{"name": word_of(name), "results": list(results.values())}] if results else []


def eval_files(groups: Sequence[SharedGroup], publication: Publication) -> dict[str, list[dict[str, Any]]]:
    """Name of each file of `.eval_results/` -> its content: the main number of every plain protocol on sets of the Hub.

    Variants (changed settings, limits, images left out) are no entries, as a benchmark's leaderboard would rank them
    beside the protocol itself.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        dataset = publication.dataset(group.first.data)
        if dataset and group.is_plain:
            files.setdefault(f"{dataset.replace('/', '_')}.yaml", []).append(_entry(group, dataset, publication))
    return files


def without_dataset(groups: Sequence[SharedGroup], publication: Publication) -> list[str]:
    """Names of the image sets that have no id on the Hub, and so no file of `.eval_results/`."""
    return sorted({group.first.data.name for group in groups if not publication.dataset(group.first.data)})


def task_type(group: SharedGroup) -> str:
    """`image-classification` and the like, by the task's main metric."""
    return next((task for start, (task, _) in TASKS.items() if group.main.startswith(start)), OTHER_TASK)


def notes_of(group: SharedGroup) -> str:
    """What a bare number leaves out: `top1_k20, knn@dino version 1, 95 % interval [71.2, 79.0], mean of 3 seeds`."""
    cell, protocol = group.cells[group.main], group.first.protocol
    parts = [f"{group.main}{f' in {cell.unit}' if cell.unit else ''}", f"{protocol.name} version {protocol.version}"]
    parts += ["95 % interval [{:.4g}, {:.4g}]".format(*cell.interval)] if cell.interval else []
    parts += [f"mean of {cell.seeds} seeds, deviation {cell.std:.2g}"] if cell.seeds > 1 else []
    parts += [caveat.rstrip(".") for caveat in group.caveats]
    return word_of("; ".join(parts))


def _entry(group: SharedGroup, dataset: str, publication: Publication) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "dataset": {"id": dataset, "task_id": word_of(group.first.protocol.name)},
        "value": group.cells[group.main].mean,
    }
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", group.date):
        entry["date"] = group.date
    entry |= {"source": {"url": publication.source}} if publication.source else {}
    return entry | {"notes": notes_of(group)}


def _dataset(group: SharedGroup, publication: Publication) -> dict[str, Any]:
    data = group.first.data
    known = publication.dataset(data)
    args: dict[str, str | int] = {"fingerprint": data.fingerprints["val"]} if "val" in data.fingerprints else {}
    args |= {"images": data.images["val"]} if "val" in data.images else {}
    kind = known or word_of(data.url.partition(":")[0] or data.name)
    return {"name": word_of(data.name), "type": kind, "split": "validation"} | ({"args": args} if args else {})


def _metric(group: SharedGroup, metric: str, cell: Cell) -> dict[str, Any]:
    kinds = {start: kind for start, (_, kind) in TASKS.items()}
    kind = next((kind for start, kind in kinds.items() if metric.startswith(start)), metric)
    args = dict(_arguments(group, cell))
    name = f"{group.name.removeprefix(f'{group.first.data.name}/')} {metric}"
    return {
        "type": word_of(kind),
        "value": cell.mean,
        "name": word_of(f"{name}: {cell_text(cell)}"),
        "args": args,
    }


def _arguments(group: SharedGroup, cell: Cell) -> Iterator[tuple[str, Any]]:
    yield "protocol", word_of(group.first.protocol.name)
    yield "version", group.first.protocol.version
    if cell.unit:
        yield "unit", word_of(cell.unit)
    if cell.interval:
        yield "interval_95", list(cell.interval)
    yield "seeds", cell.seeds
    if cell.seeds > 1:
        yield "standard_deviation", cell.std
    if not group.is_plain:
        yield "variant", [word_of(change) for change in group.first.variant]


def word_of(text: object) -> str:
    """A text that the schemas take: one line, without folders of this machine, and not empty."""
    return printable(without_folders(str(text))) or "unnamed"
