"""Results in the form of Every Eval Ever, a shared collection of evaluations of any tool: schema 0.3.0.

One JSON file for each checkpoint and image set, under `data/BENCHMARK/DEVELOPER/MODEL/UUID.json`, as its repository
keeps them (evaleval/every_eval_ever, every_eval_ever/schemas/eval.schema.json). Every record is checked before it is
written (every_eval_schema.py). Names, times and identifiers are functions of the results.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from bench.results.board import Cell
from bench.results.record import CheckpointUsed, DataUsed, Result
from bench.sharing.every_eval_schema import SCHEMA_VERSION, checked_record
from bench.sharing.groups import Publication, SharedGroup, shared_groups
from bench.sharing.hub import word_of
from bench.sharing.redaction import without_folders
from bench.statistics.intervals import LEVEL
from engine.files import digest
from engine.printing import printable

TOOL = "ssl-vit-bench"
UNITS = {"%": "percent", "s": "seconds", "MB": "megabytes"}


def every_eval_records(used: CheckpointUsed, results: Iterable[Result], publication: Publication) -> dict[str, str]:
    """Path -> JSON, a file for each image set that one checkpoint was measured on."""
    by_set: dict[str, list[SharedGroup]] = {}
    for group in shared_groups(results):
        by_set.setdefault(group.first.data.name, []).append(group)
    found = {}
    for name, groups in sorted(by_set.items()):
        record = without_folders(_record(used, name, groups, publication))
        checked_record(record)
        developer, _, model = record["model_info"]["id"].partition("/")
        place = "/".join(map(_file_name, (name, developer, model)))
        uuid = UUID(bytes=bytes.fromhex(digest(record))[:16], version=4)
        found[f"data/{place}/{uuid}.json"] = json.dumps(record, indent=2, allow_nan=False) + "\n"
    return found


def _record(used: CheckpointUsed, name: str, groups: list[SharedGroup], publication: Publication) -> dict[str, Any]:
    newest = max(groups, key=lambda group: group.date)
    model = _model_info(used, publication)
    organization = publication.organization
    moment = str(_epoch(newest.date))
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{_file_name(name)}/{model['id']}/{moment}",
        "evaluation_timestamp": printable(newest.date),
        "retrieved_timestamp": moment,  # the record is made of its results alone
        "source_metadata": {
            "source_name": TOOL,
            "source_type": "evaluation_run",
            "source_organization_name": word_of(organization or "unknown"),
            "evaluator_relationship": _relationship(organization, model["id"], used.name in publication.models),
            **({"additional_details": {"url": publication.source}} if publication.source else {}),
        },
        "eval_library": {
            "name": TOOL,
            "version": word_of(newest.first.versions.get(TOOL) or "unknown"),
            "additional_details": _texts(newest.first.versions),
        },
        "model_info": model,
        "evaluation_results": [
            _evaluation(group, metric, cell, publication) for group in groups for metric, cell in group.cells.items()
        ],
    }


def _relationship(organization: str, model: str, is_named: bool) -> str:
    if not organization or not is_named:
        return "other"
    return "first_party" if model.startswith(f"{organization}/") else "third_party"


def _model_info(used: CheckpointUsed, publication: Publication) -> dict[str, Any]:
    facts: dict[str, str | int | None] = {
        "digest": used.digest,
        "method": used.method,
        "recipe": used.recipe,
        "network": used.branch,
    }
    facts |= {"architecture": used.architecture, "parameters": used.parameters, "source": used.source}
    named = publication.models.get(used.name)
    return {
        "name": word_of(used.name),
        "id": named or f"unknown/{_file_name(used.name)}-{_file_name(used.digest[:8])}",
        "inference_engine": {"name": TOOL},
        "additional_details": {
            "deployment_type": "self_deployed",
            "model_availability": "open_weights" if named else "unknown",
            **_texts(facts),
        },
    }


def _evaluation(group: SharedGroup, metric: str, cell: Cell, publication: Publication) -> dict[str, Any]:
    protocol = group.first.protocol
    score: dict[str, Any] = {"score": cell.mean, "details": _texts(_seeds(group, cell))}
    if cell.interval:
        score["uncertainty"] = _uncertainty(group, cell.interval)
    return {
        "evaluation_result_id": digest([group.name, metric])[:16],
        "evaluation_name": word_of(group.name),
        "source_data": _source_data(group.first.data, publication),
        "evaluation_timestamp": printable(group.date),
        "metric_config": {
            "evaluation_description": word_of(f"{protocol.name}, version {protocol.version}: {protocol.source}"),
            "metric_id": word_of(f"{TOOL}.{protocol.name}.{metric}"),
            "metric_name": word_of(metric),
            "metric_unit": word_of(UNITS.get(cell.unit, cell.unit) or "points"),
            "lower_is_better": cell.higher_is_better is False,
            **({"score_type": "continuous", "min_score": 0.0, "max_score": 100.0} if cell.unit == "%" else {}),
            "additional_details": _texts({"settings": group.first.settings, "notes": list(group.caveats)}),
        },
        "score_details": score,
    }


def _uncertainty(group: SharedGroup, interval: tuple[float, float]) -> dict[str, Any]:
    low, high = interval
    ends = {"lower": low, "upper": high, "confidence_level": 1 - LEVEL}
    method = {"method": word_of(group.first.interval_method)} if group.first.interval_method else {}
    count = {"num_samples": group.images} if group.images is not None else {}
    return {"confidence_interval": ends | method, **count}


def _seeds(group: SharedGroup, cell: Cell) -> dict[str, Any]:
    seeds = {"seeds": [result.seed for result in group.results], "files": len(group.results)}
    return seeds | ({"standard_deviation_over_seeds": cell.std} if cell.seeds > 1 else {})


def _source_data(data: DataUsed, publication: Publication) -> dict[str, Any]:
    details = {"fingerprint": data.fingerprints.get("val", ""), "url": data.url, "images": dict(data.images)}
    found: dict[str, Any] = {"dataset_name": word_of(data.name)}
    if repository := publication.dataset(data):
        found |= {"source_type": "hf_dataset", "hf_repo": repository, "hf_split": "val"}
        found |= {"samples_number": data.images["val"]} if "val" in data.images else {}
    else:
        found |= {"source_type": "other"}
    return found | {"additional_details": _texts(details)}


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as the schema wants them: every value a text; what is empty is left out."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    empty = ("", "[]", "{}", "null")
    return {printable(name): printable(text) for name, text in texts.items() if text not in empty}


def _epoch(date: str) -> int:
    """Seconds since 1970 of an ISO 8601 date, of UTC where it names no zone; 0 where it is none."""
    try:
        moment = datetime.fromisoformat(date)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return 0


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text) or "_"
