"""What a probe reads of a network that lacks what its protocol reads, so that the number stands beside the others'.

A network without a class token is read by its mean patches, after the same blocks, and one that gives a single vector
of an image by that vector. Of more blocks than there are, or
than give a class token (of class-attention models the last one alone), those that there are. The settings stay the
protocol's own; the result records what was read under `read_instead`, with a warning.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from checkpoints.frozen import FrozenSpec
from engine.tasks import Outcome
from probes.features.readouts import Readout

Suited = TypeVar("Suited")


def suited(task: Suited, spec: FrozenSpec) -> Suited:
    """A task with a setting `pool`, which becomes avg where the network has no class token, cls where no patches."""
    if spec.has_class_token and spec.has_patches:
        return task
    return replace(task, pool="cls" if spec.has_class_token else "avg")  # type: ignore[type-var]


def readout_of(text: str, spec: FrozenSpec) -> str:
    """What a network has of a readout: of a single block without a class token, cls4+avg is avg."""
    asked = Readout.parse(text)
    if not spec.has_patches:
        asked = asked._replace(pool="cls", with_average=False)
    if asked.pool == "cls" and spec.class_attention:
        return str(asked._replace(blocks=1, block=0))
    there = asked._replace(blocks=min(asked.blocks, spec.depth), block=min(asked.block, spec.depth))
    # The mean patch of the last block is then the last of those that stand in for class tokens.
    return str(there if spec.has_class_token else Readout("avg", there.blocks, False, there.block))


def noted(outcome: Outcome, read: Mapping[str, str], spec: FrozenSpec) -> Outcome:
    """The outcome with a record of what was read instead. read: pool or readout of the protocol -> what was read."""
    others = {asked: found for asked, found in read.items() if found != asked}
    if not others:
        return outcome
    by_found = {found: [asked for asked in others if others[asked] == found] for found in others.values()}
    what = "; ".join(f"{found} was read for {', '.join(asked)}" for found, asked in by_found.items())
    warnings = [*outcome.facts.get("warnings", ()), f"the model has {_lack(others, spec)}: {what}"]
    return replace(outcome, facts=dict(outcome.facts) | {"read_instead": others, "warnings": warnings})


def _lack(asked: Iterable[str], spec: FrozenSpec) -> str:
    # Why these cannot be read.
    found = [] if spec.has_class_token else ["no class token"]
    found += [] if spec.has_patches else ["no patch tokens"]
    if spec.class_attention:
        found.append("a class token after its last block alone")
    elif any(int(blocks) > spec.depth for text in asked for blocks in re.findall(r"\d+", text)):
        found.append(f"{spec.depth} block{'s' if spec.depth > 1 else ''}")
    return " and ".join(found)
