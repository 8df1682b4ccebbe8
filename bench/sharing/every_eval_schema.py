"""What a record of Every Eval Ever may hold, strictly: the keys that this tool writes, and their values.

Facts of schema 0.3.0 (evaleval/every_eval_ever, every_eval_ever/schemas/eval.schema.json), which allows more keys and
leaves most of them open. Where its package is installed, the tests hold the same records against that file too.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from bench.sharing.hub import HubId, Strict, Word, checked_as

SCHEMA_VERSION = "0.3.0"
Texts = dict[str, str]  # all values of "additional details" are texts
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
ModelId = Annotated[str, Meta(pattern=r"^[^/]+/[^/]+$")]


class RecordOrigin(Strict, frozen=True):
    """Who measured, and what the record is made of."""

    source_type: Literal["documentation", "evaluation_run"]
    source_organization_name: Word
    evaluator_relationship: Literal["first_party", "third_party", "collaborative", "other"]
    source_name: Word | UnsetType = UNSET
    additional_details: Texts | UnsetType = UNSET


class RecordLibrary(Strict, frozen=True):
    """The tool."""

    name: Word
    version: Word
    additional_details: Texts | UnsetType = UNSET


class RecordEngine(Strict, frozen=True):
    """What computed the features."""

    name: Word


class RecordModel(Strict, frozen=True):
    """The checkpoint."""

    name: Word
    id: ModelId
    inference_engine: RecordEngine
    additional_details: Texts

    def __post_init__(self) -> None:
        choices = {
            "deployment_type": ("self_deployed", "externally_managed", "unknown"),
            "model_availability": ("open_weights", "closed_weights", "unknown"),
        }
        for name, allowed in choices.items():
            if self.additional_details.get(name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}")


class RecordImages(Strict, frozen=True):
    """The image set: one of the Hub, or another."""

    dataset_name: Word
    source_type: Literal["hf_dataset", "other"]
    hf_repo: HubId | UnsetType = UNSET
    hf_split: Literal["train", "val", "test"] | UnsetType = UNSET
    samples_number: Count | UnsetType = UNSET
    additional_details: Texts | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.source_type == "hf_dataset") != (self.hf_repo is not UNSET):
            raise ValueError("hf_repo belongs to source_type hf_dataset")


class RecordMetric(Strict, frozen=True):
    """What a number is."""

    lower_is_better: bool
    metric_id: Word
    metric_name: Word
    metric_unit: Word
    evaluation_description: Word
    score_type: Literal["continuous"] | UnsetType = UNSET
    min_score: float | UnsetType = UNSET
    max_score: float | UnsetType = UNSET
    additional_details: Texts | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.score_type is not UNSET and UNSET in (self.min_score, self.max_score):
            raise ValueError("a continuous score needs min_score and max_score")


class RecordInterval(Strict, frozen=True):
    """Where another draw of the images would put the number."""

    lower: float
    upper: float
    confidence_level: Share
    method: Word | UnsetType = UNSET


class RecordUncertainty(Strict, frozen=True):
    """The interval, and of how many images."""

    confidence_interval: RecordInterval
    num_samples: Count | UnsetType = UNSET


class RecordScore(Strict, frozen=True):
    """A number."""

    score: float
    details: Texts
    uncertainty: RecordUncertainty | UnsetType = UNSET


class RecordResult(Strict, frozen=True):
    """A number, what it is, and of what images."""

    evaluation_result_id: Word
    evaluation_name: Word
    evaluation_timestamp: str
    source_data: RecordImages
    metric_config: RecordMetric
    score_details: RecordScore


class EveryEvalRecord(Strict, frozen=True):
    """A file: all numbers of one checkpoint on one image set."""

    schema_version: Literal["0.3.0"]
    evaluation_id: Annotated[str, Meta(pattern=r"^.+/[^/]+/[^/]+/\d+$")]
    evaluation_timestamp: str
    retrieved_timestamp: Annotated[str, Meta(pattern=r"^\d+$")]
    source_metadata: RecordOrigin
    eval_library: RecordLibrary
    model_info: RecordModel
    evaluation_results: Annotated[list[RecordResult], Meta(min_length=1)]


def checked_record(value: Any) -> EveryEvalRecord:
    """A record as its file has it. ValueError, one line, says where it is not of that form."""
    return checked_as(value, EveryEvalRecord)
