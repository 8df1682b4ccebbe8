"""The command line: finds the command, imports its file of bench/commands/ and no other, runs it, and turns errors that
a user can cause into one line.

A command is a file of bench/commands/ (`import_.py` is `bench import`) that defines `Options`, a dataclass derived
from `CommandOptions`, and `run(options) -> int`; its docstring is its help, followed by its EPILOG. A command's file
must not import heavy libraries at its top.

Exit codes: 0 success, 1 a task failed or a check found a difference, 2 wrong usage or a problem of the machine (disk,
memory, connection), 75 a signal stopped a training after it had saved its state, 130 interrupted.
"""

import argparse
import gc
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from bench.options import flags_of, is_positional, options_from
from engine.errors import in_one_line, on_command_line, traceback_of
from engine.extensions import one_line
from engine.machine import keep_memory, sleep_at_barriers
from engine.printing import did_you_mean, say
from engine.progress import Progress, process_age
from engine.settings import annotations, from_text, meanings, plain_type, union_members
from engine.training.interruptions import STOPPED, Stopped

COMMANDS = {path.stem.rstrip("_"): path for path in sorted((Path(__file__).with_name("commands")).glob("[!_]*.py"))}
METAVAR = re.compile(r"([A-Z][A-Z0-9/.=]*): (.*)")  # a comment that begins with the placeholder of the value
PATIENCE = 1.0  # seconds for another process to print its error: torchrun ends all processes when the first one ends
PURPOSE = "Measures how good a self-supervised Vision Transformer is."
EPILOG = """examples:
  bench demo                                                       no data, no network
  bench run --checkpoint X --suite smoke --out results             X: export folder, file, timm:NAME, hf-hub:ID
  bench run --checkpoint X --suite frozen --data cifar10=folder:/data/cifar10 --out results
  bench pretrain mae --recipe smoke --images digits: --out runs/mae
  bench doctor                                                     what is installed, what is missing
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition("unrecognized arguments: ")
        if words and not kind:  # unknown options were refused before, so this is a word without an option
            message = f"{words}: one word too many, or one that has to stand before the options"
        raise ValueError(f"{message} (see {self.prog} --help)")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """ValueError for an unknown option, before argparse complains that the option it was meant to be is missing."""
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for option in options[: options.index("--") if "--" in options else None]:
            if option not in known:
                raise ValueError(f"no option {option}{did_you_mean(option, known, f'`{self.prog} --help`')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = with_dashes(sys.argv[1:] if argv is None else argv)
    with on_command_line(positional_of(words)):
        code = run_command(words, process_age() if argv is None else 0.0)  # imports of a busy machine are silent, too
    if argv is None:
        gc.freeze()  # torch's 180,000 objects die with the process: looking for circles among them takes it seconds
    return code


def run_command(argv: Sequence[str], spent: float = 0.0) -> int:
    """Run one command and return its exit code; errors that a user can cause are printed in one line.

    spent: seconds that it has taken already.
    """
    try:
        command, options = parsed(argv)
        keep_memory()  # has to be set before torch allocates
        sleep_at_barriers()  # and before it is imported
        with Progress(f"bench {argv[0]}", None, spent=spent):
            return command.run(options)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except Stopped as stop:
        if prints_error(stop):
            say(str(stop), errors=True)
        return STOPPED
    except KeyboardInterrupt:
        say("", "interrupted; run the same command again to continue", errors=True)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `bench list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print_error(error, in_one_line(error), argv)
        return 2
    except (RuntimeError, MemoryError) as error:  # such as torch's: GPU out of memory, lost connection to a process
        print_error(error, f"{in_one_line(error)}; --debug shows where", argv)
        return 2


def print_error(error: Exception, line: str, argv: Sequence[str]) -> None:
    """Print `line`, after the traceback with --debug, unless another process of torchrun prints the same error."""
    if not prints_error(error):
        return
    if "--debug" in argv:
        say(*traceback_of(error), errors=True)
    say(f"bench: error: {line}", errors=True)


def prints_error(error: Exception) -> bool:
    """Whether this process should print the error. If not, wait, to give the process that should the time for it."""
    rank = os.environ.get("RANK", "0")
    if str(getattr(error, "reported_by", rank)) == rank:
        return True
    time.sleep(PATIENCE)
    return False


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Arguments with hyphens in option names, `--batch_size=8` -> `--batch-size=8`; values are unchanged."""
    words = []
    for word in argv:
        option, equals, value = word.partition("=")
        words.append(option.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def parsed(argv: Sequence[str]) -> tuple[ModuleType, Any]:
    """The module of the command that `argv` names, and its options."""
    arguments = parser_for(argv).parse_args(argv)
    module = command_module(arguments.command)
    return module, options_from(arguments, module.Options)


def positional_of(argv: Sequence[str]) -> list[str]:
    """The arguments without an option of the command that `argv` names."""
    if not argv or argv[0] not in COMMANDS:
        return []
    return [name for name, hint in annotations(command_module(argv[0]).Options).items() if is_positional(hint)]


def parser_for(argv: Sequence[str]) -> Parser:
    """A parser for the command that `argv` names, with its options.

    No other command is imported; the other files are read, for the overview, only if `argv` does not begin with a
    command.
    """
    begins_with_command = bool(argv) and argv[0] in COMMANDS
    paths = {argv[0]: COMMANDS[argv[0]]} if begins_with_command else COMMANDS
    lines = [] if begins_with_command else [f"  {name:12} {one_line(path)}" for name, path in COMMANDS.items()]
    parser = Parser(
        prog="bench",
        description="\n".join([PURPOSE, "", "commands:", *lines]) if lines else "",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ssl-vit-bench {version('ssl-vit-bench')}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, help="COMMAND --help shows its options"
    )
    requested = next((word for word in argv if not word.startswith("-")), None)
    if requested is not None and requested not in COMMANDS:
        raise ValueError(f"no command {requested!r}{did_you_mean(requested, list(COMMANDS), '`bench --help`')}")
    for name, path in paths.items():
        command = commands.add_parser(
            name, description=one_line(path), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == requested:
            command.epilog = getattr(command_module(name), "EPILOG", "")
            add_options(command, command_module(name).Options)
            command.refuse_unknown(argv[argv.index(name) + 1 :])
    return parser


def command_module(name: str) -> ModuleType:
    """Import the file of bench/commands/ that defines a command."""
    return importlib.import_module(f"bench.commands.{COMMANDS[name].stem}")


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the fields of a dataclass as options; those that a base class with a GROUP defines are grouped under it."""
    hints, texts = annotations(kind), meanings(kind)
    remaining = {field.name: field for field in fields(kind)}
    for ancestor in kind.__mro__:
        group = parser.add_argument_group(vars(ancestor)["GROUP"]) if "GROUP" in vars(ancestor) else parser
        for name in vars(ancestor).get("__annotations__", {}):
            if field := remaining.pop(name, None):
                group.add_argument(*flags_of(field, hints[name]), **_keywords(field, hints[name], texts.get(name, "")))


def _keywords(field: Field, hint: Any, text: str) -> dict[str, Any]:
    """The arguments of argparse's `add_argument` for a field with this annotated type and comment."""
    with_metavar, is_required = METAVAR.fullmatch(text), field.default is MISSING
    keywords: dict[str, Any] = {"help": (with_metavar[2] if with_metavar else text).replace("%", "%%")}
    if not is_required:
        keywords["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if is_positional(hint):
        hint = hint.__origin__
        keywords |= {} if is_required else {"nargs": "?"}
    else:
        keywords |= {"dest": field.name, "required": is_required}
    hint = Union[tuple(kind for kind in union_members(hint) if kind is not NoneType)]  # noqa: UP007
    if get_origin(hint) is tuple and ... in get_args(hint):
        hint = get_args(hint)[0]
        keywords |= {"nargs": "+", "action": "extend"}
    if hint is bool:
        keywords["action"] = "store_true"
    elif get_origin(hint) is Literal:
        keywords["choices"] = get_args(hint)
        if "dest" not in keywords:  # argparse's messages would name the field
            keywords["metavar"] = f"{{{','.join(get_args(hint))}}}"
    else:
        metavar = with_metavar[1] if with_metavar else field.name.upper()
        keywords |= {"type": option_type(hint), "metavar": metavar}
    if "joined" in field.metadata:
        keywords |= {"nargs": "+", "action": JoinedByCommas}
    if "parse" in field.metadata:
        keywords |= {"type": reported(field.metadata["parse"])}
    return keywords


def option_type(hint: Any) -> Callable[[str], Any]:
    """A parser of values of the annotated type, for argparse's `type`; pairs may be written `4x4` instead of `4,4`."""
    is_size = any(plain_type(kind) is tuple for kind in union_members(hint))

    return reported(lambda text: from_text(re.sub(r"^(\d+)[xX](\d+)$", r"\1,\2", text) if is_size else text, hint))


def reported(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function for argparse's `type`, whose ValueErrors argparse then reports as they are."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return reading


class JoinedByCommas(argparse.Action):
    """Joins the values of an option, which may be repeated, by commas: `a,b c` -> `a,b,c`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, ",".join([*([earlier] if earlier else []), *values]))
