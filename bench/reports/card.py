"""A model card: what an export is, how it was trained, how to load it with timm, and its results.

A card is a function of the export's config.json and of results, so the same input gives the same bytes. Folders of this
machine are removed. Results are in the text and, for the Hugging Face Hub, as `model-index` in the card's header
(modelcard.md of huggingface/hub-docs).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from bench.options import check_writable
from bench.reports.leaderboard import Cell, cell_text, leaderboard_of
from bench.results.record import CheckpointUsed, Result, TrainingCost, pixels_text
from bench.results.store import comparable_results
from bench.run.checkpoints import default_name, describe, epochs_of
from checkpoints.export import CARD, CARD_MARK, COST, ViTExport, is_card, is_export
from checkpoints.runs import EXPORT, is_run
from checkpoints.spec import ViTSpec
from engine.errors import UserError
from engine.files import digest, read_json, write_atomic
from engine.printing import in_markdown, markdown_table, millions, printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

# The Hub's names of licences that are common for ViT weights (docs/hub/repositories-licenses); others become `other`.
LICENCES = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "openrail", "gpl-3.0", "agpl-3.0"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}
UNKNOWN = "unknown"
HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"


def spdx_name(text: str) -> str:
    """A licence in SPDX's spelling: `Apache-2.0` for `apache-2.0`. ValueError if SPDX lacks it."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        raise UserError(
            "licence",
            "not an SPDX licence; write an identifier from spdx.org/licenses, such as apache-2.0, "
            "or LicenseRef-NAME for a licence of your own",
            text,
        ) from None


def hub_names(licence: str) -> dict[str, str]:
    """A licence as fields of the card's header: `license`, and `license_name` for one that the Hub does not list."""
    known = licence.lower() in LICENCES or not licence
    return {"license": licence.lower() or UNKNOWN} if known else {"license": "other", "license_name": hub_text(licence)}


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Facts about a publication that only the author knows. UserError for one that the Hub would not understand."""

    model_id: str = ""  # on the Hub, ORG/NAME
    source: str = ""  # URL under which results and logs are published
    licence: str = ""  # SPDX identifier of the weights' licence

    def __post_init__(self) -> None:
        if self.model_id and not re.fullmatch(HUB_ID, self.model_id):
            raise UserError("model_id", "write ORG/NAME, such as me/mae-s", self.model_id)
        if self.source and not re.fullmatch(r"https?://\S+", self.source):
            raise UserError("source", "write a URL, such as https://github.com/me/results", self.source)
        if self.licence:
            spdx_name(self.licence)


class Number(NamedTuple):
    """A number of a card."""

    result: Result  # the newest that it is from
    metric: str
    cell: Cell  # mean over seeds

    @property
    def protocol(self) -> str:
        """`knn@dino[limit=100]`: the group without its image set."""
        return self.result.group.removeprefix(f"{self.result.data.name}/")


def numbers_of(results: Iterable[Result]) -> tuple[list[Number], list[str]]:
    """The numbers of one checkpoint's results, by group and without deviations, and reasons to doubt them."""
    good = sorted((result for result in results if result.status == "ok"), key=lambda result: result.date)
    newest, leaderboard = {result.group: result for result in good}, leaderboard_of(good)
    assert len(leaderboard.rows) <= 1, "results of several checkpoints"
    numbers = [
        Number(newest[group], metric, cells[group, metric])
        for cells in leaderboard.rows.values()
        for group, metrics in leaderboard.groups.items()
        for metric in metrics
        if cells[group, metric].higher_is_better is not None
    ]
    return numbers, leaderboard.notes


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


def hub_text(text: object) -> str:
    """A text as the Hub's schemas require it: one line and not empty; without folders of this machine."""
    return printable(without_folders(str(text))) or "unnamed"


TAGS = ["image-feature-extraction", "timm", "transformers", "vision-transformer"]
TIMM_KEYS = ("mean", "std", "interpolation", "crop_pct")


@dataclass(frozen=True, kw_only=True)
class CardSubject:
    """The export that a card describes. config: its config.json."""

    used: CheckpointUsed
    config: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.config["vit_export"]

    def licence(self, publication: Publication) -> str:
        """Licence of the weights; "" if unknown. ValueError if the user and the source of the weights disagree."""
        users, source = publication.licence, str(self.facts.get("licence") or UNKNOWN)
        if source == UNKNOWN:
            return users and spdx_name(users)
        if users and source.lower() != users.lower():
            raise UserError("licence", f"the source of these weights says {source}; leave the option out", users)
        return source


def read_config(folder: Path) -> dict[str, Any]:
    """An export's config.json, with the contents of cost.json. ValueError if the folder is not an export."""
    try:
        config = read_json(folder / "config.json")
        if (folder / COST).exists():
            config["vit_export"]["cost"] = read_json(folder / COST)
        ViTSpec(**config["vit_export"]["spec"])
        if not all(key in config["pretrained_cfg"] for key in TIMM_KEYS):
            raise ValueError(f"pretrained_cfg lacks one of {', '.join(TIMM_KEYS)}")
        return config
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is not an export ({type(error).__name__}: {error})") from error


def subject_of(folder: Path, out: Path | None = None) -> CardSubject:
    """The export in a folder, as the subject of a card. UserError if it is not an export, or was changed since.

    out: folder of results, among whose exports the message looks for one of this name.
    """
    if is_run(folder) and is_export(folder / EXPORT):
        raise UserError("checkpoint", f"the folder of a pretraining; name its export, {folder / EXPORT}", folder)
    if not is_export(folder):
        places = [path for path in (out / "exports").glob(f"{folder.name}-*") if is_export(path)] if out else []
        text = "bench import makes one from a checkpoint, and bench run keeps those that it imported in OUT/exports"
        if places:
            text = f"name its folder, {' or '.join(map(str, sorted(places)))}"
        raise UserError("checkpoint", f"not the folder of an export; {text}", folder)
    try:
        export = ViTExport.load(folder)
        config = read_config(folder)
    except ValueError as error:
        raise UserError("checkpoint", str(error).removeprefix(f"{folder}: "), folder) from error
    used = describe(export, default_name(export, str(folder.resolve())), str(folder))
    if used.is_raw_pixels:
        raise UserError("checkpoint", "raw pixels, not a network: there is nothing to share", folder)
    return CardSubject(used=used, config=config)


def results_on(out: Path, subject: CardSubject) -> list[Result]:
    """The results of exactly these weights in a folder, under any name; the newest for each group and seed."""
    newest = {
        (stored.result.group, stored.result.seed): replace(stored.result, checkpoint=subject.used)
        for stored in sorted(comparable_results(out)[0], key=lambda stored: stored.result.date)
        if stored.result.checkpoint.digest == subject.used.digest and stored.result.status == "ok"
    }
    return list(newest.values())


def write_card(folder: Path, subject: CardSubject, results: Sequence[Result], publication: Publication) -> Path:
    """Write the card into a folder, and return its path.

    UserError if the folder holds a README.md that is not an unedited card of `bench card`.
    """
    card = folder / CARD
    if card.exists() and not is_card(card):
        raise UserError(
            "to", f"{card} was not written by bench card, or edited since: move it, or choose another folder"
        )
    check_writable(folder)
    write_atomic(card, card_of(subject, results, publication))
    return card


def card_of(subject: CardSubject, results: Iterable[Result], publication: Publication) -> str:
    """The text of README.md."""
    used, facts = subject.used, subject.facts
    numbers, notes = numbers_of(results)
    trained = f", trained by {used.method}" + (" with labels" if facts.get("uses_labels") else "")
    rows = [
        (
            number.result.data.name,
            number.protocol,
            number.result.protocol.version,
            number.metric,
            cell_text(number.cell),
        )
        for number in numbers
    ]
    newest = max((number.result for number in numbers), key=lambda result: result.date, default=None)
    return _template().render(
        used=used,
        facts=facts,
        millions=millions,
        header=Markup(_yaml(_header(subject, numbers, publication)).rstrip()),
        mark=Markup(CARD_MARK),
        training=trained if used.known_method else "",
        model=_table(("fact", "value"), _model(subject)),
        provenance=_table(("fact", "value"), _training(subject)),
        reference=f"hf-hub:{publication.model_id}" if publication.model_id else "local-dir:.",
        is_on_hub=bool(publication.model_id),
        has_class_attention=bool(ViTSpec(**facts["spec"]).class_attention),
        numbers=_table(("images", "protocol", "version", "metric", "value"), rows),
        notes=notes,
        has_intervals=any(number.cell.interval for number in numbers),
        has_seeds=any(number.cell.seeds > 1 for number in numbers),
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


def _model(subject: CardSubject) -> Iterator[tuple[str, object]]:
    """Facts about the network and how images are prepared for it."""
    used, spec, cfg = subject.used, ViTSpec(**subject.facts["spec"]), subject.config["pretrained_cfg"]
    yield "architecture", used.architecture
    yield "parameters", f"{used.parameters:,}"
    yield "timm's class of networks, sizes changed where they differ", spec.architecture
    yield "image, patch", f"{spec.size_text}, patches of {spec.patch_size} px"
    yield "representation", {"cls": "class token", "avg": "mean of the patches"}[spec.pool]
    yield "mean, std", f"{cfg['mean']}, {cfg['std']}"
    yield "preparation", f"{cfg['interpolation']}, centre crop {cfg['crop_pct']}"
    if used.table_size:
        yield "images of its published evaluation", f"{pixels_text(used.image_size)} px"
    yield "digest", used.digest


def _training(subject: CardSubject) -> Iterator[tuple[str, object]]:
    """Facts about where the weights come from."""
    facts, used = subject.facts, subject.used
    yield "method", used.known_method
    yield "recipe", used.recipe
    yield "network", used.branch
    yield "data", facts.get("data")
    yield "epochs", epochs_of(facts)
    yield "cost", used.training_cost.text or TrainingCost.of(facts).text
    yield "recipe's source" if facts.get("recipe") else "code", facts.get("official_code")
    yield "file", facts.get("source_file")
    yield "SHA-256 of the file", facts.get("source_sha256")
    yield "imported by", " ".join(str(facts[key]) for key in ("importer", "importer_version") if facts.get(key))
    yield "plugin", used.plugin
    yield "warnings", "; ".join(map(str, facts.get("warnings") or ()))


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


# Start of a metric's name -> the Hub's names of the task (a pipeline tag) and of the metric (in `evaluate`).
TASKS = {
    "top": ("image-classification", "accuracy"),
    "mIoU": ("image-segmentation", "mean_iou"),
    "AP": ("object-detection", "AP"),
}
OTHER_TASK = "image-feature-extraction"


def _hub_terms(metric: str) -> tuple[str, str]:
    """The Hub's names of a main metric's task and of the metric: `image-classification`, `accuracy`."""
    return next((terms for start, terms in TASKS.items() if metric.startswith(start)), (OTHER_TASK, metric))


def _header(subject: CardSubject, numbers: Sequence[Number], publication: Publication) -> dict[str, Any]:
    """The card's metadata for the Hub, which precede its text."""
    from huggingface_hub import ModelCardData

    results = [_eval_result(number, publication) for number in numbers]
    return ModelCardData(
        library_name="timm",
        pipeline_tag=OTHER_TASK,
        tags=TAGS,
        **hub_names(subject.licence(publication)),
        model_name=hub_text(subject.used.name) if results else None,
        eval_results=results or None,
    ).to_dict()


def _eval_result(number: Number, publication: Publication) -> "EvalResult":
    """One number for `model-index`."""
    from huggingface_hub import EvalResult

    result, cell = number.result, number.cell
    data, protocol = result.data, result.protocol
    return EvalResult(
        task_type=_hub_terms(next(iter(result.metrics)))[0],
        dataset_type=hub_text(data.name),
        dataset_name=hub_text(data.name),
        dataset_split="validation",
        dataset_args={"fingerprint": data.fingerprints.get("val"), "images": data.images.get("val")},
        metric_type=hub_text(_hub_terms(number.metric)[1]),
        metric_value=cell.mean,
        metric_name=hub_text(f"{number.protocol} {number.metric}: {cell_text(cell)}"),
        metric_args={
            "protocol": hub_text(protocol.name),
            "version": protocol.version,
            "interval_95": list(cell.interval) if cell.interval else None,
            "seeds": cell.seeds,
        },
        source_name="results and logs" if publication.source else None,
        source_url=publication.source or None,
    )
