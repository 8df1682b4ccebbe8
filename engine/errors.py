"""Errors that a user can cause, in one line that names the argument, and commands, as their reader writes them.

The same function serves Python and the command line, so texts name arguments by `option`: `--skip-bad` on the command
line, `skip_bad=True` in Python.
"""

import errno
import resource
import traceback
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import join, quote
from typing import Any, TypeVar

from engine.printing import heard_by, print_lines, printable

T = TypeVar("T")
# Arguments whose options have other names; in all others, underscores become hyphens. And options by their arguments.
OPTIONS = {"settings": "set", "compiled": "compile", "names": "name", "formats": "format"}
ARGUMENTS = {"set": "settings", "micro_batch": "batch_size"}
_on_command_line = False
_positional: frozenset[str] = frozenset()  # arguments of the running command that have no option


class UserError(ValueError):
    """A mistake of the user's: the argument, the value that was given if it helps to see it, and what to do instead."""

    def __init__(self, argument: str, text: str, value: Any = None) -> None:
        super().__init__(argument, text, value)
        self.argument, self.text, self.value = argument, text, value

    def __str__(self) -> str:
        return f"{option(self.argument, self.value)}: {self.text}"


def option(name: str, value: Any = None) -> str:
    """An argument, with a value if one is given, in the terms of the reader: `--select val` or `select='val'`.

    Settings are a mapping or a text `NAME=VALUE`: `--set k=5` or `settings={'k': 5}`.
    """
    if not _on_command_line:
        name = ARGUMENTS.get(name, name)
        if name == "settings" and isinstance(value, str) and "=" in value:
            key, _, text = map(str.strip, value.partition("="))
            try:
                value = {key: literal_eval(text)}
            except (ValueError, SyntaxError):  # a word
                value = {key: text}
        return name if value is None else f"{name}={(str(value) if isinstance(value, Path) else value)!r}"
    if name in _positional:
        return name.upper() if value is None else str(value)
    flag = f"--{OPTIONS.get(name, name).replace('_', '-')}"
    if value is None or value is True:
        return flag
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        values = [f"{key}={','.join(map(str, new)) if isinstance(new, tuple) else new}" for key, new in value.items()]
    return " ".join([flag, *(quote(text) if " " in text else text for text in map(str, values))])


def spelled(command: str, call: T) -> str | T:
    """The `command` on the command line, the `call` in Python."""
    return command if _on_command_line else call


@contextmanager
def on_command_line(positional: Collection[str] = ()) -> Iterator[None]:
    """A block that prints its lines, and whose errors and advice are written for the command line, not for Python.

    positional: arguments of the command that have no option.
    """
    global _on_command_line, _positional
    before = _on_command_line, _positional
    _on_command_line, _positional = True, frozenset(positional)
    try:
        with heard_by(print_lines):
            yield
    finally:
        _on_command_line, _positional = before


def command(*words: object, **options: object) -> list[str]:
    """The words of `bench WORDS --OPTION VALUE ...`; None, False, "" and () leave an option out, True is a switch."""
    line = ["bench", *map(str, words)]
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        if value is True:
            line.append(f"--{name.replace('_', '-')}")
        elif value is not False and value not in (None, "", (), []):
            line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


def command_line(*words: object, **options: object) -> str:
    """The same, quoted for a shell."""
    return join(command(*words, **options))


ADVICE = {
    errno.ENOSPC: "free some space and run the same command again to continue",
    errno.EDQUOT: "free some of your quota and run the same command again to continue",
    errno.EACCES: "choose a path that you have access to, or change its permissions",
    errno.EPERM: "choose a path that you have access to, or change its permissions",
    errno.EROFS: "choose a path on a writable file system",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "it has to be a folder",
    errno.EISDIR: "it has to be a file",
}


def in_one_line(error: BaseException) -> str:
    """An exception as one printable line for the user.

    A ValueError carries a complete message of ours; for any other exception the type is part of the message.
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if error.errno in ADVICE:
            text += f"; {ADVICE[error.errno]}"
    elif isinstance(error, ImportError) and "failed to map segment" in str(error):
        text = f"not enough memory to load {error}".removesuffix(": failed to map segment from shared object")
        text += f"; {memory_limit() or 'free some memory'}"
    elif isinstance(error, ImportError):
        text = f"{error}; `bench doctor` shows what is missing and how to install it"
    elif isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        text = f"a process that loads images was killed, as happens for lack of memory or of /dev/shm ({error}); fewer "
        text += "--workers need less of both; run the same command again to continue (a pretraining with --resume)"
    elif isinstance(error, ValueError) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return printable(" ".join(text.split()))


def memory_limit() -> str:
    """The ulimit on this process's memory, and advice to raise it; "" if there is none."""
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return f"the limit is {limit / 1e9:.1f} GB (ulimit {option}): raise it, torch's libraries take 6 GB"
    return ""


def traceback_of(error: BaseException) -> list[str]:
    """The lines of an exception's traceback; the second and later lines of a message are indented."""
    lines = []
    for part in traceback.format_exception(error):
        is_frame = part.startswith(("Traceback", " ", "\n"))  # otherwise the type of an exception and its message
        line = part.removesuffix("\n")
        lines.append(line if is_frame else line.replace("\n", "\n    "))
    return "\n".join(lines).split("\n")
