"""Which protocols `--suite` and `--set` ask for: suites, protocol names and task files found in the extension folders.

A task file may state `COST`, its price in passes over the image set (1 when it says nothing); cheap tasks run first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

from bench.cli.messages import in_one_line
from bench.cli.settings import Change, changed, meant, read_changes, settings_of
from engine.extensions import Extension, extensions, loaded, refused
from engine.tasks import Protocol, Task

KINDS = ("probes", "downstream")
LISTED_BY = "`bench list --protocols`"
Select = Literal["holdout", "val"]


@dataclass(frozen=True, kw_only=True)
class ChosenProtocol:
    """One protocol to run, with the settings that the user changed."""

    key: str  # the task file
    name: str  # the protocol
    protocol: Protocol
    cost: float = 1.0
    plugin: str = ""  # package that brings the task, `benchtoys 1.0`; "" for ours
    layout: str = ""  # of the labelled scenes that a dense task evaluates on; "" for tasks on image sets
    changes: Mapping[str, Any] = field(default_factory=dict)  # setting -> JSON value that differs from the protocol

    @property
    def task(self) -> Task:
        return self.protocol.task


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Everything that can be run."""

    protocols: Mapping[str, ChosenProtocol]  # protocol name -> itself, unchanged, cheap ones first
    suites: Mapping[str, tuple[str, ...]]  # suite -> protocol names
    broken: Mapping[Extension, str]  # task file that is left out -> why

    def names(self) -> list[str]:
        """All words that `--suite` knows."""
        keys = dict.fromkeys(chosen.key for chosen in self.protocols.values())
        return [*self.suites, *keys, *self.protocols]


def catalogue(kinds: Sequence[str] = KINDS) -> Catalogue:
    """Import every task file. One that cannot be imported is left out, with its reason in `broken`."""
    protocols: dict[str, ChosenProtocol] = {}
    suites: dict[str, tuple[str, ...]] = {}
    broken = {extension: reason for kind in kinds for extension, reason in refused(kind).items()}
    found = [extension for kind in kinds for extension in extensions(kind).values()]
    for extension in sorted(found, key=lambda extension: bool(extension.plugin)):  # ours first: they keep their names
        try:
            module = loaded(extension)
            added, files_suites = _protocols(extension, module), dict(module.SUITES)
            _check_names(extension, added, files_suites, protocols)
        except Exception as error:  # a stranger's file: whatever it does must not take the others with it
            broken[extension] = in_one_line(error)
            continue
        protocols |= added
        for suite, names in files_suites.items():
            suites[suite] = suites.get(suite, ()) + tuple(names)
    ordered = dict(sorted(protocols.items(), key=lambda item: item[1].cost))
    return Catalogue(protocols=ordered, suites=suites, broken=broken)


def _protocols(extension: Extension, module: ModuleType) -> dict[str, ChosenProtocol]:
    shared = {
        "key": extension.key,
        "plugin": extension.plugin,
        "cost": float(getattr(module, "COST", 1.0)),
        "layout": getattr(module, "LAYOUT", ""),
    }
    for name, value in module.PROTOCOLS.items():
        if not isinstance(getattr(value, "task", None), Task):
            raise ValueError(f"the task of its protocol {name!r} is no engine.tasks.Task; derive it from that class")
    return {name: ChosenProtocol(name=name, protocol=value, **shared) for name, value in module.PROTOCOLS.items()}


def _check_names(
    extension: Extension,
    added: Mapping[str, ChosenProtocol],
    suites: Mapping[str, Sequence[str]],
    known: Mapping[str, ChosenProtocol],
) -> None:
    """ValueError for names of another task file, which a later one does not take over, and for names of nothing."""
    if twice := sorted(added.keys() & known.keys()):
        raise ValueError(f"the protocol {twice[0]!r} is one of {known[twice[0]].key!r} already")
    if any(chosen.key == extension.key for chosen in known.values()):
        raise ValueError(f"there is another task {extension.key!r} already")
    if unknown := sorted({name for names in suites.values() for name in names} - added.keys()):
        raise ValueError(f"its SUITES name {unknown[0]!r}, which its PROTOCOLS lack")


def choose(text: str, found: Catalogue) -> list[ChosenProtocol]:
    """The protocols that `smoke`, `knn`, `knn@dino` or a comma-separated list of such words stand for, cheap first."""
    wanted: set[str] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        keyed = {name for name, chosen in found.protocols.items() if chosen.key == word}
        if word in found.suites:
            wanted |= set(found.suites[word])
        elif word in found.protocols:
            wanted.add(word)
        elif keyed:
            wanted |= keyed
        elif reasons := [f"{each.title} {why}" for each, why in found.broken.items() if each.key == word]:
            raise ValueError(f"--suite: {reasons[0]}")
        else:
            raise ValueError(f"--suite: no suite, task or protocol {word!r}{meant(word, found.names(), LISTED_BY)}")
    if not wanted:
        raise ValueError(f"--suite is empty{meant('', found.names(), LISTED_BY)}")
    return [chosen for name, chosen in found.protocols.items() if name in wanted]


def with_changes(
    selected: Sequence[ChosenProtocol], texts: Sequence[str], select: Select = "holdout"
) -> list[ChosenProtocol]:
    """Apply `select` to all, and every TASK.FIELD=VALUE to the protocols whose name or file TASK is.

    All changes of a protocol apply together. Where both the file and the protocol itself are named, the protocol wins.
    """
    changes = read_changes(texts, "TASK.FIELD=VALUE", "knn.k=10,20")
    known = list(dict.fromkeys(word for chosen in selected for word in (chosen.key, chosen.name)))
    fields = {change: _target_and_field(change, known) for change in changes}
    found = []
    for chosen in selected:
        given = {}
        for named in (chosen.key, chosen.name):
            given |= {field: change for change, (target, field) in fields.items() if target == named}
        task = changed(selecting(chosen.task, select), given, f"{chosen.name}: ")
        found.append(_with_task(chosen, task))
    return found


def _target_and_field(change: Change, known: Sequence[str]) -> tuple[str, str]:
    target, dot, field = change.name.rpartition(".")
    if not (dot and target and field):
        raise ValueError(f"--set {change}: write TASK.FIELD=VALUE, for example knn.k=10,20")
    if target not in known:
        raise ValueError(f"--set {change}: {target!r} is not part of this run{meant(target, known, LISTED_BY)}")
    return target, field


def selecting(task: Task, select: Select) -> Task:
    """The task with its choice, if its settings have a `select`, made on these images.

    "val" is asked of every task that offers it. "holdout" replaces "val" alone: a recipe under which nothing chooses
    (fine-tuning's "last" epoch) trains on all images and stays as it is.
    """
    now, offered = getattr(task, "select", None), get_args(get_type_hints(type(task)).get("select"))
    if select in offered and (select == "val" or now == "val"):
        return replace(task, select=select)
    return task


def _with_task(chosen: ChosenProtocol, task: Task) -> ChosenProtocol:
    before, after = settings_of(chosen.task), settings_of(task)
    changes = {name: value for name, value in after.items() if value != before[name]}
    return replace(chosen, protocol=replace(chosen.protocol, task=task), changes=changes)
