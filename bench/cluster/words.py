"""Parsed options back into the words of a command line, with some of them replaced: the command of one job."""

import argparse
from collections.abc import Mapping
from typing import Any

from bench.cli.main import add_shared_arguments, command_module
from bench.cluster.options import PREFIX

NOT_OF_A_JOB = ("help", "cluster", "command")


def words_of(command: str, arguments: argparse.Namespace, replaced: Mapping[str, Any]) -> list[str]:
    """`command` and its options, without defaults and without those of `--cluster`.

    replaced: name that argparse keeps an option under -> another value.
    """
    parser = argparse.ArgumentParser()
    command_module(command).add_arguments(parser)
    add_shared_arguments(parser)
    words, positional = [], [command]
    for action in parser._actions:  # argparse has no other way to list them
        if action.dest in NOT_OF_A_JOB or action.dest.startswith(PREFIX):
            continue
        value = replaced.get(action.dest, getattr(arguments, action.dest))
        if not action.option_strings:
            positional.append(str(value))
        elif value != action.default:
            words += _option(action, value)
    return positional + words


def _option(action: argparse.Action, value: Any) -> list[str]:
    name = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [name, *map(str, value)] if value else []
    return [f"{name}={value}"]
