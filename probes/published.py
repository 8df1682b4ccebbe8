"""Published recipes of a task that trains: what their sources set, and protocols that report as they do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from engine.tasks import Protocol, Task


class Published(NamedTuple):
    """settings: those that differ from the task's defaults. source: paper or code, and what is ours."""

    settings: Mapping[str, Any]
    source: str
    version: int = 1


def protocols_of(kind: type[Task], published: Mapping[str, Published]) -> dict[str, Protocol]:
    """Protocols of the task `kind`, by name."""
    return {
        name: Protocol(task=kind(**recipe.settings), version=recipe.version, source=recipe.source)
        for name, recipe in published.items()
    }


def changed_protocol(protocol: Protocol, version: int, source: str, **settings: Any) -> Protocol:
    """The protocol with other settings, under a source and version of its own."""
    return Protocol(task=replace(protocol.task, **settings), version=version, source=source)


def as_reported(protocols: Mapping[str, Protocol], version: int = 1, **settings: Any) -> dict[str, Protocol]:
    """`NAME_paper` of each protocol: what its source reports, where ours holds images out or keeps the last epoch.

    That is training on all images, and the epoch (and head) that does best on the validation images: numbers that are
    too good, marked as such in results. version: of these. settings: what else is the source's own.
    """
    changes = {"select": "val", **settings}
    said = ", ".join(f"{name}={value}" for name, value in changes.items())
    return {
        f"{name}_paper": changed_protocol(
            protocol, version, f"{name} as its source reports it ({said}): {protocol.source}", **changes
        )
        for name, protocol in protocols.items()
    }
