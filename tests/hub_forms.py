"""Strict forms of what `bench card` writes for the Hugging Face Hub: known keys, finite numbers, dates of ISO 8601.

A signature is `verifyToken` in a file, and `verify_token` in Python alone.
"""

from math import isfinite
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Word = Annotated[str, Meta(min_length=1)]
HubId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$", max_length=96)]
Link = Annotated[str, Meta(pattern=r"^https?://\S+$")]
Moment = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d))?$")]


class Strict(Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True, kw_only=True):
    """A mapping with these keys alone."""


class EvalDataset(Strict, frozen=True):
    """A benchmark on the Hub."""

    id: HubId
    task_id: Word
    revision: Word | UnsetType = UNSET


class EvalSource(Strict, frozen=True):
    """Where a number comes from."""

    url: Link
    name: Word | UnsetType = UNSET
    user: Word | UnsetType = UNSET
    org: Word | UnsetType = UNSET


class EvalEntry(Strict, frozen=True, rename={"verify_token": "verifyToken"}):
    """One number of a file of `.eval_results/`."""

    dataset: EvalDataset
    value: float
    verify_token: Word | UnsetType = UNSET
    date: Moment | UnsetType = UNSET
    source: EvalSource | UnsetType = UNSET
    notes: Word | UnsetType = UNSET


class IndexedTask(Strict, frozen=True):
    """What the model does on the images."""

    type: Word
    name: Word | UnsetType = UNSET


class IndexedDataset(Strict, frozen=True):
    """The images."""

    name: Word
    type: Word
    config: Word | UnsetType = UNSET
    split: Word | UnsetType = UNSET
    revision: Word | UnsetType = UNSET
    args: dict[str, Any] | UnsetType = UNSET


class IndexedMetric(Strict, frozen=True, rename={"verify_token": "verifyToken"}):
    """One number of a model-index."""

    type: Word
    value: float
    name: Word | UnsetType = UNSET
    config: Word | UnsetType = UNSET
    args: dict[str, Any] | UnsetType = UNSET
    verified: bool | UnsetType = UNSET
    verify_token: Word | UnsetType = UNSET


class IndexedSource(Strict, frozen=True):
    """Where the numbers come from."""

    url: Link
    name: Word | UnsetType = UNSET


class IndexedResult(Strict, frozen=True):
    """The numbers of one task on one image set."""

    task: IndexedTask
    dataset: IndexedDataset
    metrics: Annotated[list[IndexedMetric], Meta(min_length=1)]
    source: IndexedSource | UnsetType = UNSET


class IndexedModel(Strict, frozen=True):
    """A model and all its numbers."""

    name: Word
    results: list[IndexedResult]


class CardHeader(Strict, frozen=True, rename={"model_index": "model-index"}):
    """The YAML header of a model card."""

    library_name: Word
    pipeline_tag: Word
    tags: list[Word]
    license: Word
    license_name: Word | UnsetType = UNSET
    model_index: Annotated[list[IndexedModel], Meta(min_length=1, max_length=1)] | UnsetType = UNSET


EvalFile = Annotated[list[EvalEntry], Meta(min_length=1)]  # of .eval_results/


def checked(value: Any, form: Any) -> Any:
    """A value of JSON or YAML that is a CardHeader or an EvalFile, as mappings and lists without keys that are not set.

    ValueError, one line, says where it is not of that form.
    """
    _refuse_infinite(value, "$")
    return msgspec.to_builtins(msgspec.convert(value, form))


def _refuse_infinite(value: Any, place: str) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{value} is no number - at `{place}`")
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        _refuse_infinite(part, f"{place}.{key}" if isinstance(value, dict) else f"{place}[{key}]")
