"""Fallbacks for networks that lack the features of a protocol.

Without a class token, a probe reads the mean of the patches after the same blocks; of a network that returns a single
vector per image, it reads this vector. If a protocol reads more blocks than the network has, or class tokens of more
blocks than have one (in class-attention models only the last), the probe reads those that exist. The settings of the
protocol do not change. The result records the fallback under `read_instead`, with a warning, so that its number can be
listed with those of other networks.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from checkpoints.frozen import FrozenSpec
from engine.tasks import Outcome
from probes.features.kinds import Readout

WithPool = TypeVar("WithPool")


def with_supported_pool(task: WithPool, spec: FrozenSpec) -> WithPool:
    """The task with a `pool` that the network supports: avg if it has no class token, cls if it has no patch tokens."""
    if spec.has_class_token and spec.has_patches:
        return task
    return replace(task, pool="cls" if spec.has_class_token else "avg")  # type: ignore[type-var]


def supported_readout(text: str, spec: FrozenSpec) -> str:
    """The readout that a network supports in place of `text`: avg for cls4+avg, if it has one block and no class
    token."""
    readout = Readout.parse(text)
    if not spec.has_patches:
        readout = readout._replace(pool="cls", with_average=False)
    if readout.pool == "cls" and spec.class_attention:
        return str(readout._replace(blocks=1, block=0))
    existing = readout._replace(blocks=min(readout.blocks, spec.depth), block=min(readout.block, spec.depth))
    # Mean patches replace the class tokens; that of the last block is one of them, so +avg is dropped.
    return str(existing if spec.has_class_token else Readout("avg", existing.blocks, False, existing.block))


def record_fallback(outcome: Outcome, read: Mapping[str, str], spec: FrozenSpec) -> Outcome:
    """The outcome with its fallbacks recorded. read: pool or readout of the protocol -> the one that was read."""
    fallbacks = {asked: used for asked, used in read.items() if used != asked}
    if not fallbacks:
        return outcome
    replaced = {used: [asked for asked in fallbacks if fallbacks[asked] == used] for used in fallbacks.values()}
    replacements = "; ".join(f"{used} was read for {', '.join(asked)}" for used, asked in replaced.items())
    warning = f"the model has {_missing(fallbacks, spec)}: {replacements}"
    facts = {"read_instead": fallbacks, "warnings": [*outcome.facts.get("warnings", ()), warning]}
    return replace(outcome, facts=dict(outcome.facts) | facts)


def _missing(readouts: Iterable[str], spec: FrozenSpec) -> str:
    """What the network lacks or has too little of for these pools or readouts: "no class token and 12 blocks"."""
    reasons = [] if spec.has_class_token else ["no class token"]
    reasons += [] if spec.has_patches else ["no patch tokens"]
    if spec.class_attention:
        reasons.append("a class token only after its last block")
    elif any(int(blocks) > spec.depth for text in readouts for blocks in re.findall(r"\d+", text)):
        reasons.append(f"{spec.depth} block{'s' if spec.depth > 1 else ''}")
    return " and ".join(reasons)
