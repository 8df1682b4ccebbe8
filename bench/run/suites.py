"""The protocols of all task files in the extension folders, their choice by `--suite` and changes by `--set`.

Cheap tasks run first, in the order of their `COST`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from bench.run.index import TASK_KINDS, is_stored, tasks_by_word
from engine.errors import UserError, in_one_line
from engine.extensions import Extension, extensions, import_extension, refused_plugins
from engine.printing import did_you_mean
from engine.settings import changed, check_fields, read_changes
from engine.tasks import AS_REPORTED, Protocol, SelectOn, Task, settings_of, with_reported

LAYOUT_IS = "dense tasks name the layout of their scenes, probes none"
LISTED_BY = "`bench list protocols`"


@dataclass(frozen=True, kw_only=True)
class ChosenProtocol:
    """One protocol to run, with the settings that the user changed."""

    key: str  # of the task file
    name: str  # of the protocol
    protocol: Protocol  # with the changed settings
    plugin: str = ""  # package that provides the task, `benchtoys 1.0`; "" for ours
    changes: Mapping[str, Any] = field(default_factory=dict)  # changed setting -> its new JSON value

    @property
    def task(self) -> Task:
        return self.protocol.task

    @property
    def family(self) -> str:
        """The part of the name before the @, `upernet` of `upernet@mae`; a task file may have several families."""
        return self.name.partition("@")[0]

    @property
    def words(self) -> tuple[str, str, str]:
        """The names by which `--suite` and `--set` may select it: task file, family, protocol."""
        return self.key, self.family, self.name

    @property
    def layout(self) -> str:
        """The layout of the labelled scenes that a dense task evaluates on; "" for tasks on image sets."""
        return self.task.LAYOUT


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All protocols and suites of this installation."""

    protocols: Mapping[str, ChosenProtocol]  # by name, with unchanged settings, cheap ones first
    suites: Mapping[str, tuple[str, ...]]  # suite -> protocol names
    broken: Mapping[Extension, str]  # task file that cannot be used -> why

    def names(self) -> list[str]:
        """All names that `--suite` accepts."""
        keys = dict.fromkeys(word for chosen in self.protocols.values() for word in (chosen.key, chosen.family))
        return [*self.suites, *keys, *self.protocols]


def catalogue(kinds: Sequence[str] = TASK_KINDS, suite: str = "") -> Catalogue:
    """Import task files. Those that fail are left out, with the reason in `broken`.

    suite: the value of `--suite`: only the files that it names are imported, and those that the index does not
    describe, such as plugins. Importing all takes seconds.
    """
    protocols: dict[str, ChosenProtocol] = {}
    suites: dict[str, tuple[str, ...]] = {}
    broken = {extension: reason for kind in kinds for extension, reason in refused_plugins(kind).items()}
    files = [extension for kind in kinds for extension in extensions(kind).values()]
    tasks, words = tasks_by_word(), [word.strip() for word in suite.split(",") if word.strip()]
    if words and all(word in tasks for word in words):
        keys = set().union(*(tasks[word] for word in words))
        files = [extension for extension in files if extension.key in keys or not is_stored(extension)]
    for extension in sorted(files, key=lambda extension: bool(extension.plugin)):  # ours first: they keep their names
        try:
            module = import_extension(extension)
            added, files_suites = _protocols(extension, module), dict(module.SUITES)
            _check_names(extension, added, files_suites, protocols)
        except Exception as error:  # a plugin may raise anything; the other files must stay usable
            broken[extension] = in_one_line(error)
            continue
        protocols |= added
        for name, members in files_suites.items():
            suites[name] = suites.get(name, ()) + tuple(members)
    ordered = dict(sorted(protocols.items(), key=lambda item: item[1].task.COST))
    return Catalogue(protocols=ordered, suites=suites, broken=broken)


def _protocols(extension: Extension, module: ModuleType) -> dict[str, ChosenProtocol]:
    """The protocols of a task file by name, with the variants NAME_paper. ValueError for one that cannot be run."""
    for name, value in module.PROTOCOLS.items():
        if not isinstance(value, Protocol) or not isinstance(value.task, Task):
            raise ValueError(f"the task of its protocol {name!r} is not an engine.tasks.Task; derive it from Task")
        check_fields(type(value.task))
        if not isinstance(value.task.COST, int | float) or not isinstance(value.task.LAYOUT, str):
            raise ValueError(f"the task of its protocol {name!r} needs a number as COST and a string as LAYOUT")
        if bool(value.task.LAYOUT) != (extension.kind == "downstream"):
            raise ValueError(f"the task of its protocol {name!r} has the LAYOUT {value.task.LAYOUT!r}; {LAYOUT_IS}")
    return {
        name: ChosenProtocol(key=extension.key, name=name, protocol=value, plugin=extension.plugin)
        for name, value in with_reported(module.PROTOCOLS).items()
    }


def _check_names(
    extension: Extension,
    added: Mapping[str, ChosenProtocol],
    suites: Mapping[str, Sequence[str]],
    known: Mapping[str, ChosenProtocol],
) -> None:
    """ValueError if an earlier task file uses one of the names, or a suite names a protocol that its file lacks."""
    if duplicates := sorted(added.keys() & known.keys()):
        raise ValueError(f"the task {known[duplicates[0]].key!r} already has a protocol {duplicates[0]!r}")
    if any(chosen.key == extension.key for chosen in known.values()):
        raise ValueError(f"there is another task {extension.key!r} already")
    for suite, names in suites.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"its SUITES[{suite!r}] is {names!r}; write a tuple of names, such as ({names!r},)")
    if unknown := sorted({name for names in suites.values() for name in names} - added.keys()):
        raise ValueError(f"its SUITES contain {unknown[0]!r}, which is not in its PROTOCOLS")


def choose_protocols(text: str, known: Catalogue) -> list[ChosenProtocol]:
    """The protocols that `--suite` selects by a comma-separated list of names, cheap ones first.

    A name is that of a suite (`smoke`), of a protocol (`knn@dino`), or of a task or family (`knn`), which selects all
    its protocols but the variants NAME_paper. ValueError for an unknown name.
    """
    names: set[str] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        default = [chosen for name, chosen in known.protocols.items() if not name.endswith(AS_REPORTED)]
        of_task = {chosen.name for chosen in default if word in (chosen.key, chosen.family)}
        if word in known.suites:
            names |= set(known.suites[word])
        elif word in known.protocols:
            names.add(word)
        elif of_task:
            names |= of_task
        elif reasons := [f"{file.title}: {reason}" for file, reason in known.broken.items() if file.key == word]:
            raise UserError("suite", reasons[0])
        else:
            of_family = [name for name in known.protocols if name.startswith(f"{word.partition('@')[0]}@")]
            hint = did_you_mean(word, of_family or known.names(), LISTED_BY)
            raise UserError("suite", f"no suite, task or protocol {word!r}{hint}")
    if not names:
        raise UserError("suite", f"it is empty{did_you_mean('', known.names(), LISTED_BY)}")
    return [chosen for name, chosen in known.protocols.items() if name in names]


def changed_protocols(
    selected: Sequence[ChosenProtocol], texts: Sequence[str], select: SelectOn | None = None
) -> list[ChosenProtocol]:
    """Change the settings of protocols: by `select`, if given, and by TASK.FIELD=VALUE in `texts`.

    TASK is a task file, a family or a protocol. All changes of a protocol apply together; a change for the protocol
    overrides one for its family, and that one for its task file. ValueError for an invalid change.
    """
    changes = read_changes(texts, "TASK.FIELD=VALUE", "knn.k=10,20")
    targets = list(dict.fromkeys(word for chosen in selected for word in chosen.words))
    fields = {change: _target_and_field(change, targets) for change in changes.values()}
    protocols = []
    for chosen in selected:
        changes_of_task: dict[str, str] = {}
        for word in chosen.words:
            changes_of_task |= {field: change for change, (target, field) in fields.items() if target == word}
        task = changed(chosen.task.selecting(select) if select else chosen.task, changes_of_task, f"{chosen.name}: ")
        before, after = settings_of(chosen.task, complete=True), settings_of(task, complete=True)
        different = {name: value for name, value in after.items() if value != before[name]}
        protocols.append(replace(chosen, protocol=replace(chosen.protocol, task=task), changes=different))
    return protocols


def _target_and_field(change: str, targets: Sequence[str]) -> tuple[str, str]:
    """TASK and FIELD of `TASK.FIELD=VALUE`. ValueError for another form, or if TASK is not one of `targets`."""
    target, dot, field = change.partition("=")[0].rpartition(".")
    if not (dot and target and field):
        raise UserError("settings", "write TASK.FIELD=VALUE, for example knn.k=10,20", change)
    if target not in targets:
        raise UserError(
            "settings", f"{target!r} is not part of this run{did_you_mean(target, targets, LISTED_BY)}", change
        )
    return target, field
