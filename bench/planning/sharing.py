"""Work that tasks of one run do together, such as the pass for frozen features, is counted once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.tasks import Task, Workspace
from engine.work import Part, Work


@dataclass(kw_only=True)
class Shares:
    """What the tasks of one export and image set have done so far."""

    done: dict[str, float] = field(default_factory=dict)  # what is read -> units done

    def left(self, work: Work, keys: Mapping[str, str]) -> Work:
        """The work that is left of a task's, which then counts as done. keys: `of` of a part -> what is read."""
        return replace(work, parts=tuple(self._left(part, keys) for part in work.parts))

    def _left(self, part: Part, keys: Mapping[str, str]) -> Part:
        key = keys.get(part.of, "")
        if not key:
            return part
        before = self.done.get(key, 0.0)
        self.done[key] = max(before, part.count)
        return replace(part, count=max(part.count - before, 0.0))


def shared_keys(task: Task, parts: Iterable[Part], export: Any, space: Workspace) -> dict[str, str]:
    """`of` of each part that other tasks may do as well -> what is read, the same text in all of them.

    Features are shared where `Task.features` names the transform, augmented images where a task's `stream` names the
    stream; both are empty for tasks that read their images themselves.
    """
    transforms = ",".join(task.features(export, space))
    stream = task.stream(export, space)
    inside = f" of {getattr(space, 'data', '')}"
    source = {
        "features": transforms and transforms + inside,
        "crops": stream and stream + inside,
        "libraries": "process",
    }
    return {part.of: f"{part.of} by {source[part.kind]}" for part in parts if part.of and source.get(part.kind)}
