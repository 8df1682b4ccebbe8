"""A model card: what an export is, how it was trained, how to load it with timm, and its results.

A card is a function of the export's config.json and of results, so the same input gives the same bytes. Folders of this
machine are removed. Results appear in the two formats of the Hugging Face Hub: `model-index` in the card's header, and
files in `.eval_results/` (modelcard.md and eval_results.yaml of huggingface/hub-docs; docs/sharing.md describes both).
The Hub's parsers ignore unknown keys and accept any value; tests check what is written here against strict schemas.

`Publication` holds what only the user knows; `SharedGroup` holds the results of a checkpoint in one group.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from bench.checkpoints import default_name, describe
from bench.cli.names import check_writable
from bench.cli.output import epochs_of
from bench.cli.settings import named_values
from bench.published.values import SETS
from bench.reports.tables import Cell, cell_text, leaderboard_of
from bench.results.record import CheckpointUsed, DataUsed, Result, TrainingCost
from bench.results.store import comparable_results
from checkpoints.export import CARD, CARD_MARK, COST, EVALUATIONS, ViTExport, is_card, is_export
from checkpoints.spec import ViTSpec
from engine.files import digest, read_json, write_atomic
from engine.printing import in_markdown, markdown_table, millions, printable
from pretrain.loop.exporting import EXPORT, is_run

# The Hub's names of licences that are common for ViT weights (docs/hub/repositories-licenses); others become `other`.
LICENCES = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "openrail", "gpl-3.0", "agpl-3.0"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}
UNKNOWN = "unknown"


def spdx_name(text: str, option: str) -> str:
    """A licence in SPDX's spelling: `Apache-2.0` for `apache-2.0`. ValueError, naming `option`, if SPDX lacks it."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        raise ValueError(
            f"{option} {text}: not an SPDX licence; write an identifier from spdx.org/licenses, such as apache-2.0, or "
            "LicenseRef-NAME for a licence of your own"
        ) from None


def licence_of(facts: Mapping[str, Any], user_licence: str) -> str:
    """The licence of an export; "" if it is unknown. ValueError if the user and the source of the weights disagree.

    facts: of the export. user_licence: from --licence; "" if not given.
    """
    source = str(facts.get("licence") or "")
    source = "" if source == UNKNOWN else source
    if source and user_licence and source.lower() != user_licence.lower():
        raise ValueError(f"--licence {user_licence}: the source of these weights says {source}; leave the option out")
    return user_licence or source


def hub_names(licence: str) -> dict[str, str]:
    """A licence as fields of the card's header: `license`, and `license_name` for one that the Hub does not list."""
    known = licence.lower() in LICENCES or not licence
    return {"license": licence.lower() or UNKNOWN} if known else {"license": "other", "license_name": licence}


IMAGENET = "ILSVRC/imagenet-1k"  # on the Hub
HUB_ID, HUB_FORM = r"[A-Za-z0-9][\w.-]*/[\w.-]+", "NAME=ORG/NAME, such as cifar10=uoft-cs/cifar10"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Facts about a publication that only the user knows."""

    models: Mapping[str, str] = field(default_factory=dict)  # name of a checkpoint -> its id on the Hub, ORG/NAME
    datasets: Mapping[str, str] = field(default_factory=dict)  # name of an image set -> its id on the Hub
    source: str = ""  # URL under which results, logs and commands are published
    organization: str = ""  # who made the evaluation
    licences: Mapping[str, str] = field(default_factory=dict)  # name of a checkpoint -> SPDX identifier of its licence
    # Name of a checkpoint -> URL at which its authors confirm the numbers.
    verified_by: Mapping[str, str] = field(default_factory=dict)

    def dataset(self, data: DataUsed) -> str:
        """Id of an image set on the Hub: the user's, or ImageNet's if the counts are ImageNet's; "" if unknown."""
        known = IMAGENET if dict(data.images) == dict(SETS["imagenet"].images) else ""
        return self.datasets.get(data.name, known)


def publication_from(
    models: Sequence[str],
    datasets: Sequence[str],
    source: str,
    organization: str = "",
    licences: Sequence[str] = (),
    verified_by: Sequence[str] = (),
) -> Publication:
    """The publication described by command-line options. ValueError names the wrong option and what to write."""
    if source and not re.fullmatch(r"https?://\S+", source):
        raise ValueError(f"--source {source}: write a URL, such as https://github.com/me/results")
    spdx = named_values(licences, "--licence", "NAME=SPDX, such as mae-s=apache-2.0", "[^=]+")
    return Publication(
        models=named_values(models, "--model-id", HUB_FORM, HUB_ID),
        datasets=named_values(datasets, "--hub-dataset", HUB_FORM, HUB_ID),
        source=source,
        organization=organization,
        licences={name: spdx_name(licence, "--licence") for name, licence in spdx.items()},
        verified_by=named_values(
            verified_by, "--verified-by", "NAME=URL, such as mae-s=https://doi.org/10.5281/...", r"https?://\S+"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """The results of one checkpoint in one group of the board."""

    name: str  # `digits/knn@dino[limit=100]`
    results: tuple[Result, ...]  # one for each seed
    cells: Mapping[str, Cell]  # metric -> mean over seeds; without deviations
    caveats: tuple[str, ...]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def main(self) -> str:
        """The main metric, which is the task's first."""
        return next(iter(self.cells))

    @property
    def date(self) -> str:
        """When the newest of the results ended."""
        return max(result.date for result in self.results)

    @property
    def is_plain(self) -> bool:
        """Whether this is the unmodified protocol on all images, so that others' numbers are comparable."""
        return self.first.variant in ((), (f"v{self.first.protocol.version}",))


def shared_groups(results: Iterable[Result]) -> list[SharedGroup]:
    """One checkpoint's successful results by group; an unmodified protocol comes before its variants."""
    good = [result for result in results if result.status == "ok" and result.metrics]
    leaderboard = leaderboard_of(good)
    assert len(leaderboard.rows) <= 1, "results of several checkpoints"
    groups = []
    for group, metrics in leaderboard.groups.items():
        (row,) = leaderboard.rows.values()
        cells = {metric: row[group, metric] for metric in metrics}
        cells = {metric: cell for metric, cell in cells.items() if cell.higher_is_better is not None}
        if cells:
            own = sorted((result for result in good if result.group == group), key=lambda result: result.seed)
            groups.append(SharedGroup(name=group, results=tuple(own), cells=cells, caveats=leaderboard.caveats[group]))
    return sorted(groups, key=lambda group: (group.first.data.name, group.first.protocol.name, not group.is_plain))


# An absolute path of two parts or more; not the path of a URL, and not the second half of a word, as in ViT-S/16.
ABSOLUTE = re.compile(r"(?<![\w/~.\\-])/(?!/)(?:[^\s/:'\"`,;|()<>\[\]{}?&]+/)+[^\s/:'\"`,;|()<>\[\]{}?&]*")
LOCAL = re.compile(r"file://(?=/)")


def without_folders(value: Any) -> Any:
    """A JSON value with absolute paths reduced to their last part: `path-3f2a91bc/cifar10`.

    The eight digits are from the SHA-256 of the removed folder, so that different folders stay distinguishable.
    """
    if isinstance(value, str):
        return ABSOLUTE.sub(_shortened, LOCAL.sub("", value))
    if isinstance(value, dict):
        return {without_folders(key): without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return value


def _shortened(match: re.Match[str]) -> str:
    path = PurePosixPath(match[0])
    return f"path-{digest(str(path.parent))[:8]}/{path.name}"


TAGS = ["image-feature-extraction", "timm", "transformers", "vision-transformer"]
TIMM_KEYS = ("mean", "std", "interpolation", "crop_pct")


@dataclass(frozen=True, kw_only=True)
class CardSubject:
    """The model that a card describes. config: the export's config.json; None if there is no export."""

    used: CheckpointUsed
    config: Mapping[str, Any] | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.config["vit_export"] if self.config else {}

    def licence(self, publication: Publication) -> str:
        """Licence of the weights; "" if unknown. ValueError if the user and the source of the weights disagree."""
        return licence_of(self.facts, publication.licences.get(self.used.name, ""))


def card_files(subject: CardSubject, results: Iterable[Result], publication: Publication) -> dict[str, str]:
    """Path in the export's folder -> content: the card and the files of `.eval_results/`."""
    groups = shared_groups(results)
    files = eval_files(groups, publication)
    return {CARD: _card(subject, groups, publication)} | {
        f"{EVALUATIONS}/{name}": _yaml(entries) for name, entries in files.items()
    }


def read_config(folder: Path) -> dict[str, Any]:
    """An export's config.json, with the contents of cost.json. ValueError if the folder is not an export."""
    try:
        config = read_json(folder / "config.json")
        cost = folder / COST
        if cost.exists():
            config["vit_export"]["cost"] = read_json(cost)
        ViTSpec(**config["vit_export"]["spec"])
        if not all(key in config["pretrained_cfg"] for key in TIMM_KEYS):
            raise ValueError(f"pretrained_cfg lacks one of {', '.join(TIMM_KEYS)}")
        return config
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is not an export ({type(error).__name__}: {error})") from error


def _card(subject: CardSubject, groups: Sequence[SharedGroup], publication: Publication) -> str:
    """The text of README.md."""
    used, facts = subject.used, subject.facts
    hub_id = publication.models.get(used.name)
    trained = f", trained by {used.method}" + (" with labels" if facts.get("uses_labels") else "")
    rows = [
        (group.first.data.name, _protocol(group), group.first.protocol.version, metric, cell_text(cell))
        for group in groups
        for metric, cell in group.cells.items()
    ]
    newest = max(groups, key=lambda group: group.date).first if groups else None
    return _template().render(
        used=used,
        facts=facts,
        millions=millions,
        header=Markup(_yaml(_header(subject, groups, publication)).rstrip()),
        mark=Markup(CARD_MARK),
        training=trained if used.method else "",
        model=_table(("fact", "value"), _model(subject)),
        provenance=_table(("fact", "value"), _training(subject)),
        reference=f"hf-hub:{hub_id}" if hub_id else "local-dir:.",
        is_on_hub=bool(hub_id),
        has_class_attention=bool(subject.config and ViTSpec(**facts["spec"]).class_attention),
        numbers=_table(("images", "protocol", "version", "metric", "value"), rows),
        notes=list(dict.fromkeys(f"{group.name}: {caveat}" for group in groups for caveat in group.caveats)),
        newest=newest,
        tool=f"ssl-vit-bench {newest.versions.get('ssl-vit-bench', '')}".rstrip() if newest else "",
        source=Markup(publication.source),
        licence=subject.licence(publication),
    )


@cache
def _template() -> Template:
    """The template of a card, which escapes every value for Markdown except Markup."""
    return Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else _escaped(value),
    ).from_string((Path(__file__).parent / "card.md.jinja").read_text(encoding="utf-8"))


def _header(subject: CardSubject, groups: Sequence[SharedGroup], publication: Publication) -> dict[str, Any]:
    """The card's metadata for the Hub, which precede its text."""
    licence = {key: hub_text(name) for key, name in hub_names(subject.licence(publication)).items()}
    index = model_index(subject.used.name, groups, publication)
    return {
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": TAGS,
        **licence,
        **({"model-index": index} if index else {}),
    }


def _model(subject: CardSubject) -> Iterator[tuple[str, object]]:
    """Facts about the network and how images are prepared for it."""
    used = subject.used
    yield "architecture", used.architecture
    yield "parameters", f"{used.parameters:,}"
    if subject.config:
        spec, cfg = ViTSpec(**subject.facts["spec"]), subject.config["pretrained_cfg"]
        yield "timm's class of networks, sizes changed where they differ", spec.architecture
        yield "image, patch", f"{spec.size_text}, patches of {spec.patch_size} px"
        yield "representation", {"cls": "class token", "avg": "mean of the patches"}[spec.pool]
        yield "mean, std", f"{cfg['mean']}, {cfg['std']}"
        yield "preparation", f"{cfg['interpolation']}, centre crop {cfg['crop_pct']}"
    yield "digest", used.digest


def _training(subject: CardSubject) -> Iterator[tuple[str, object]]:
    """Facts about where the weights come from."""
    facts, used = subject.facts, subject.used
    yield "method", used.method
    yield "recipe", used.recipe
    yield "network", used.branch
    yield "data", facts.get("data")
    yield "epochs", epochs_of(facts)
    yield "cost", used.training_cost.text or TrainingCost.of(facts).text
    yield "recipe's source" if facts.get("recipe") else "code", facts.get("official_code")
    yield "file", facts.get("source_file") if subject.config else used.source
    yield "SHA-256 of the file", facts.get("source_sha256")
    yield "imported by", " ".join(str(facts[key]) for key in ("importer", "importer_version") if facts.get(key))
    yield "plugin", used.plugin
    yield "warnings", "; ".join(map(str, facts.get("warnings") or ()))


def _protocol(group: SharedGroup) -> str:
    """`knn@dino[limit=100]`: a group's name without its image set."""
    return group.name.removeprefix(f"{group.first.data.name}/")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A Markdown table of the rows whose last value is known."""
    return Markup(
        "\n".join(markdown_table([header, *(map(_escaped, row) for row in rows if row[-1] not in (None, ""))]))
    )


def _escaped(value: object) -> str:
    return in_markdown(without_folders(str(value)))


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, width=10**6)


def subject_of(folder: Path) -> CardSubject:
    """The export in a folder, as the subject of a card. ValueError if it is not an export, or was changed since."""
    if is_run(folder) and is_export(folder / EXPORT):
        raise ValueError(f"{folder} is the folder of a pretraining; name its export, {folder / EXPORT}")
    if not is_export(folder):
        raise ValueError(f"{folder} is not an export; bench import makes one from a checkpoint")
    export = ViTExport.load(folder)
    used = describe(export, default_name(export, str(folder.resolve())), str(folder))
    if used.is_floor:
        raise ValueError(f"{folder} holds raw pixels, not a network: there is nothing to share")
    return CardSubject(used=used, config=read_config(folder))


def results_on(out: Path, subject: CardSubject) -> list[Result]:
    """The results of exactly these weights in a folder, under any name; the newest for each group and seed."""
    newest: dict[tuple[str, int], Result] = {}
    for stored in comparable_results(out)[0]:
        result, key = stored.result, (stored.result.group, stored.result.seed)
        is_own = result.checkpoint.digest == subject.used.digest and result.status == "ok"
        if is_own and (key not in newest or newest[key].date < result.date):
            newest[key] = replace(result, checkpoint=subject.used)
    return list(newest.values())


def write_card(
    folder: Path, subject: CardSubject, results: Sequence[Result], publication: Publication, force: bool = False
) -> Iterator[Path]:
    """Write the card and the files of `.eval_results/`; yields their paths.

    ValueError if the folder holds a README.md that is not an unedited card of `bench card`, unless `force`.
    """
    card = folder / CARD
    if card.exists() and not is_card(card) and not force:
        raise ValueError(f"{card}: not written by bench card, or edited since; --force replaces it")
    check_writable(folder)
    files = card_files(subject, results, publication)
    for old in (folder / EVALUATIONS).glob("*.yaml"):
        if f"{EVALUATIONS}/{old.name}" not in files:
            old.unlink()
    for name, text in files.items():
        write_atomic(folder / name, text)
        yield folder / name


# Start of a metric's name -> the Hub's names of the task (a pipeline tag) and of the metric (in `evaluate`).
TASKS = {
    "top": ("image-classification", "accuracy"),
    "mIoU": ("image-segmentation", "mean_iou"),
    "AP": ("object-detection", "AP"),
}
OTHER_TASK = "image-feature-extraction"


def model_index(name: str, groups: Sequence[SharedGroup], publication: Publication) -> list[dict[str, Any]]:
    """The value of `model-index`: every number of every group, by task and image set; empty without results."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for group in groups:
        task, dataset = hub_terms(group.main)[0], _dataset(group, publication)
        entry: dict[str, Any] = {"task": {"type": task}, "dataset": dataset, "metrics": []}
        if publication.source:
            entry["source"] = {"url": publication.source, "name": "results, logs and commands"}
        entry = results.setdefault((task, str(sorted(dataset.items(), key=str))), entry)
        entry["metrics"] += [_metric(group, metric, cell) for metric, cell in group.cells.items()]
    return [{"name": hub_text(name), "results": list(results.values())}] if results else []


def eval_files(groups: Sequence[SharedGroup], publication: Publication) -> dict[str, list[dict[str, Any]]]:
    """File of `.eval_results/` -> its entries: the main number of every unmodified protocol, by dataset on the Hub.

    Variants (changed settings, limits, skipped images) are left out, as the Hub's leaderboards would rank them together
    with the protocol itself.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        dataset = publication.dataset(group.first.data)
        if dataset and group.is_plain:
            files.setdefault(f"{dataset.replace('/', '_')}.yaml", []).append(_entry(group, dataset, publication))
    return files


def hub_terms(metric: str) -> tuple[str, str]:
    """The Hub's names of a main metric's task and of the metric: `image-classification`, `accuracy`."""
    return next((terms for start, terms in TASKS.items() if metric.startswith(start)), (OTHER_TASK, metric))


def notes_of(group: SharedGroup) -> str:
    """Notes that qualify a number: `top1_k20, knn@dino version 1, 95 % interval [71.2, 79.0], mean of 3 seeds`."""
    cell, protocol = group.cells[group.main], group.first.protocol
    parts = [f"{group.main}{f' in {cell.unit}' if cell.unit else ''}", f"{protocol.name} version {protocol.version}"]
    parts += ["95 % interval [{:.4g}, {:.4g}]".format(*cell.interval)] if cell.interval else []
    parts += [f"mean of {cell.seeds} seeds, deviation {cell.std:.2g}"] if cell.seeds > 1 else []
    parts += [caveat.rstrip(".") for caveat in group.caveats]
    return hub_text("; ".join(parts))


def _entry(group: SharedGroup, dataset: str, publication: Publication) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "dataset": {"id": dataset, "task_id": hub_text(group.first.protocol.name)},
        "value": group.cells[group.main].mean,
    }
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", group.date):
        entry["date"] = group.date
    entry |= {"source": {"url": publication.source}} if publication.source else {}
    return entry | {"notes": notes_of(group)}


def _dataset(group: SharedGroup, publication: Publication) -> dict[str, Any]:
    data = group.first.data
    hub_id = publication.dataset(data)
    args: dict[str, str | int] = {"fingerprint": data.fingerprints["val"]} if "val" in data.fingerprints else {}
    args |= {"images": data.images["val"]} if "val" in data.images else {}
    kind = hub_id or hub_text(data.url.partition(":")[0] or data.name)
    return {"name": hub_text(data.name), "type": kind, "split": "validation"} | ({"args": args} if args else {})


def _metric(group: SharedGroup, metric: str, cell: Cell) -> dict[str, Any]:
    return {
        "type": hub_text(hub_terms(metric)[1]),
        "value": cell.mean,
        "name": hub_text(f"{_protocol(group)} {metric}: {cell_text(cell)}"),
        "args": dict(_arguments(group, cell)),
    }


def _arguments(group: SharedGroup, cell: Cell) -> Iterator[tuple[str, Any]]:
    yield "protocol", hub_text(group.first.protocol.name)
    yield "version", group.first.protocol.version
    if cell.unit:
        yield "unit", hub_text(cell.unit)
    if cell.interval:
        yield "interval_95", list(cell.interval)
    yield "seeds", cell.seeds
    if cell.seeds > 1:
        yield "standard_deviation", cell.std
    if not group.is_plain:
        yield "variant", [hub_text(change) for change in group.first.variant]


def hub_text(text: object) -> str:
    """A text as the Hub's schemas require it: one line and not empty; without folders of this machine."""
    return printable(without_folders(str(text))) or "unnamed"
