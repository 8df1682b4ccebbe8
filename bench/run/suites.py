"""The protocols that `--suite` and `--set` ask for, among those of all task files in the extension folders.

Cheap tasks run first, by the `COST` that they state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from bench.cli.output import in_one_line
from bench.cli.settings import changed, read_changes
from engine.extensions import Extension, extensions, loaded, refused
from engine.printing import did_you_mean
from engine.tasks import Protocol, SelectOn, Task, settings_of

KINDS = ("probes", "downstream")
LAYOUT_IS = "dense tasks name that of their scenes, probes none"
AS_REPORTED = "_paper"  # ending of protocols that need what few have; a task's name leaves them out
LISTED_BY = "`bench list --protocols`"


@dataclass(frozen=True, kw_only=True)
class ChosenProtocol:
    """One protocol to run, with the settings that the user changed."""

    key: str  # the task file
    name: str  # the protocol
    protocol: Protocol  # with the changed settings
    plugin: str = ""  # package that brings the task, `benchtoys 1.0`; "" for ours
    changes: Mapping[str, Any] = field(default_factory=dict)  # setting -> JSON value that differs from the protocol

    @property
    def task(self) -> Task:
        return self.protocol.task

    @property
    def family(self) -> str:
        """`upernet` of `upernet@mae`: one task file may hold several."""
        return self.name.partition("@")[0]

    @property
    def words(self) -> tuple[str, str, str]:
        """What `--suite` and `--set` call it: task file, family, protocol."""
        return self.key, self.family, self.name

    @property
    def layout(self) -> str:
        """Of the labelled scenes that a dense task evaluates on; "" for tasks on image sets."""
        return self.task.LAYOUT


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Everything that can be run."""

    protocols: Mapping[str, ChosenProtocol]  # protocol name -> itself, unchanged, cheap ones first
    suites: Mapping[str, tuple[str, ...]]  # suite -> protocol names
    broken: Mapping[Extension, str]  # task file that is left out -> why

    def names(self) -> list[str]:
        """All words that `--suite` knows."""
        keys = dict.fromkeys(word for chosen in self.protocols.values() for word in (chosen.key, chosen.family))
        return [*self.suites, *keys, *self.protocols]


def catalogue(kinds: Sequence[str] = KINDS, words: str = "") -> Catalogue:
    """Import every task file. Those that fail are left out; `broken` says why.

    words: of `--suite`; where all are protocols of task files with their name, as `knn@dino` is of knn.py, these files
    alone are imported.
    """
    protocols: dict[str, ChosenProtocol] = {}
    suites: dict[str, tuple[str, ...]] = {}
    broken = {extension: reason for kind in kinds for extension, reason in refused(kind).items()}
    files = [extension for kind in kinds for extension in extensions(kind).values()]
    asked = [word.strip() for word in words.split(",") if word.strip()]
    named = {word.partition("@")[0] for word in asked}
    if asked and all("@" in word for word in asked) and named <= {extension.key for extension in files}:
        files = [extension for extension in files if extension.key in named]
    for extension in sorted(files, key=lambda extension: bool(extension.plugin)):  # ours keep their names
        try:
            module = loaded(extension)
            added, files_suites = _protocols(extension, module), dict(module.SUITES)
            _check_names(extension, added, files_suites, protocols)
        except Exception as error:  # a plugin may raise anything; the other files must stay usable
            broken[extension] = in_one_line(error)
            continue
        protocols |= added
        for suite, names in files_suites.items():
            suites[suite] = suites.get(suite, ()) + tuple(names)
    ordered = dict(sorted(protocols.items(), key=lambda item: item[1].task.COST))
    return Catalogue(protocols=ordered, suites=suites, broken=broken)


def _protocols(extension: Extension, module: ModuleType) -> dict[str, ChosenProtocol]:
    for name, value in module.PROTOCOLS.items():
        if not isinstance(value, Protocol) or not isinstance(value.task, Task):
            raise ValueError(f"the task of its protocol {name!r} is no engine.tasks.Task; derive it from that class")
        if not isinstance(value.task.COST, int | float) or not isinstance(value.task.LAYOUT, str):
            raise ValueError(f"the task of its protocol {name!r} needs a number as its COST, a text as its LAYOUT")
        if bool(value.task.LAYOUT) != (extension.kind == "downstream"):
            raise ValueError(f"the task of its protocol {name!r} has the LAYOUT {value.task.LAYOUT!r}; {LAYOUT_IS}")
    return {
        name: ChosenProtocol(key=extension.key, name=name, protocol=value, plugin=extension.plugin)
        for name, value in module.PROTOCOLS.items()
    }


def _check_names(
    extension: Extension,
    added: Mapping[str, ChosenProtocol],
    suites: Mapping[str, Sequence[str]],
    known: Mapping[str, ChosenProtocol],
) -> None:
    """ValueError where a name is taken by an earlier task file, and where a suite names no protocol of its file."""
    if twice := sorted(added.keys() & known.keys()):
        raise ValueError(f"the protocol {twice[0]!r} is one of {known[twice[0]].key!r} already")
    if any(chosen.key == extension.key for chosen in known.values()):
        raise ValueError(f"there is another task {extension.key!r} already")
    if unknown := sorted({name for names in suites.values() for name in names} - added.keys()):
        raise ValueError(f"its SUITES name {unknown[0]!r}, which its PROTOCOLS lack")


def choose_protocols(text: str, found: Catalogue) -> list[ChosenProtocol]:
    """The protocols meant by `smoke`, `knn`, `knn@dino` or a comma-separated list of such words, cheap ones first.

    A word for several protocols is a suite, a task or what stands before the @ of their names.
    """
    names: set[str] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        plain = [chosen for name, chosen in found.protocols.items() if not name.endswith(AS_REPORTED)]
        keyed = {chosen.name for chosen in plain if word in (chosen.key, chosen.family)}
        if word in found.suites:
            names |= set(found.suites[word])
        elif word in found.protocols:
            names.add(word)
        elif keyed:
            names |= keyed
        elif reasons := [f"{file.title}: {why}" for file, why in found.broken.items() if file.key == word]:
            raise ValueError(f"--suite: {reasons[0]}")
        else:
            raise ValueError(
                f"--suite: no suite, task or protocol {word!r}{did_you_mean(word, found.names(), LISTED_BY)}"
            )
    if not names:
        raise ValueError(f"--suite is empty{did_you_mean('', found.names(), LISTED_BY)}")
    return [chosen for name, chosen in found.protocols.items() if name in names]


def changed_protocols(
    selected: Sequence[ChosenProtocol], texts: Sequence[str], select: SelectOn | None = None
) -> list[ChosenProtocol]:
    """Apply `select`, where it is given, to all protocols, and every TASK.FIELD=VALUE to those whose name, what stands
    before its @, or task file is TASK.

    All changes of a protocol apply together. A change of the protocol overrides one of several.
    """
    changes = read_changes(texts, "TASK.FIELD=VALUE", "knn.k=10,20")
    known = list(dict.fromkeys(word for chosen in selected for word in chosen.words))
    fields = {change: _target_and_field(change, known) for change in changes.values()}
    changed_ones = []
    for chosen in selected:
        changes_of_task: dict[str, str] = {}
        for named in chosen.words:
            changes_of_task |= {field: change for change, (target, field) in fields.items() if target == named}
        task = changed(chosen.task.selecting(select) if select else chosen.task, changes_of_task, f"{chosen.name}: ")
        before, after = settings_of(chosen.task, complete=True), settings_of(task, complete=True)
        different = {name: value for name, value in after.items() if value != before[name]}
        changed_ones.append(replace(chosen, protocol=replace(chosen.protocol, task=task), changes=different))
    return changed_ones


def _target_and_field(change: str, known: Sequence[str]) -> tuple[str, str]:
    target, dot, field = change.partition("=")[0].rpartition(".")
    if not (dot and target and field):
        raise ValueError(f"--set {change}: write TASK.FIELD=VALUE, for example knn.k=10,20")
    if target not in known:
        raise ValueError(f"--set {change}: {target!r} is not part of this run{did_you_mean(target, known, LISTED_BY)}")
    return target, field
