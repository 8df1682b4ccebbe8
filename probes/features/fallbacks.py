"""Pooling fallbacks: what a probe reads of a network that lacks the features of its protocol.

A network without a class token is read by the mean of its patches, after the same blocks; one that gives a single
vector per image, by that vector. Where a protocol reads more blocks than the network has, or more than have a class
token (in class-attention models only the last one has), the blocks that exist are read. The protocol's settings stay
as they are; the result records the fallback under `read_instead`, with a warning, so that its number can stand beside
the others'.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.settings import Fraction
from engine.tasks import Outcome, Task, Workspace
from probes.features.extract import transform_of
from probes.features.kinds import FeatureKind, Readout

WithPool = TypeVar("WithPool")


def with_supported_pool(task: WithPool, spec: FrozenSpec) -> WithPool:
    """The task with a `pool` the network supports: avg if it has no class token, cls if it has no patch tokens."""
    if spec.has_class_token and spec.has_patches:
        return task
    return replace(task, pool="cls" if spec.has_class_token else "avg")  # type: ignore[type-var]


def supported_readout(text: str, spec: FrozenSpec) -> str:
    """The readout that a network supports in place of `text`: avg for cls4+avg, with one block and no class token."""
    readout = Readout.parse(text)
    if not spec.has_patches:
        readout = readout._replace(pool="cls", with_average=False)
    if readout.pool == "cls" and spec.class_attention:
        return str(readout._replace(blocks=1, block=0))
    existing = readout._replace(blocks=min(readout.blocks, spec.depth), block=min(readout.block, spec.depth))
    # The mean patch of the last block is then the last of those that stand in for class tokens.
    return str(existing if spec.has_class_token else Readout("avg", existing.blocks, False, existing.block))


def record_fallback(outcome: Outcome, read: Mapping[str, str], spec: FrozenSpec) -> Outcome:
    """The outcome with its fallbacks recorded. read: pool or readout of the protocol -> the one that was read."""
    fallbacks = {asked: pool for asked, pool in read.items() if pool != asked}
    if not fallbacks:
        return outcome
    replaced = {pool: [asked for asked in fallbacks if fallbacks[asked] == pool] for pool in fallbacks.values()}
    said = "; ".join(f"{pool} was read for {', '.join(asked)}" for pool, asked in replaced.items())
    warnings = [*outcome.facts.get("warnings", ()), f"the model has {_missing(fallbacks, spec)}: {said}"]
    return replace(outcome, facts=dict(outcome.facts) | {"read_instead": fallbacks, "warnings": warnings})


def _missing(asked: Iterable[str], spec: FrozenSpec) -> str:
    """Why these pools or readouts cannot be read."""
    reasons = [] if spec.has_class_token else ["no class token"]
    reasons += [] if spec.has_patches else ["no patch tokens"]
    if spec.class_attention:
        reasons.append("a class token after its last block alone")
    elif any(int(blocks) > spec.depth for text in asked for blocks in re.findall(r"\d+", text)):
        reasons.append(f"{spec.depth} block{'s' if spec.depth > 1 else ''}")
    return " and ".join(reasons)


@dataclass(frozen=True, kw_only=True)
class PooledTask(Task):
    """Base of probes that read one vector of each frozen image, by the pooling that the network has."""

    pool: Literal["cls", "avg"] = "cls"  # the feature: class token or mean of the patches
    crop: Fraction = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # of that resizing

    @property
    def kind(self) -> FeatureKind:
        """The feature."""
        return FeatureKind(self.pool)

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        """All features that are read of an image, `kind` first."""
        return (self.kind,)

    def check_network(self, spec: FrozenSpec) -> None:
        with_supported_pool(self, spec).kind.check(spec, type(self).__module__.rpartition(".")[2])

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[FeatureKind, ...]]:
        return {transform_of(export, space, self).name: with_supported_pool(self, export.spec).kinds(export.spec)}

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        task = with_supported_pool(self, export.spec)
        return record_fallback(task.evaluate(export, space), {self.pool: task.pool}, export.spec)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        """`run` on a feature that the network has."""
        raise NotImplementedError
