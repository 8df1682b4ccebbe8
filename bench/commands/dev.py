"""For developers: record the protocols after a change, and write the pages that are made from code."""

import argparse

from engine.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench dev`."""
    parser.add_argument(
        "action",
        choices=("protocols", "timm"),
        help="protocols: record new or changed ones in tests/golden/protocols.json, refusing other settings under the "
        "same version, and write docs/protocols.md from the code; timm: write docs/timm.md from the installed timm's "
        "list of models",
    )


def run(arguments: argparse.Namespace) -> int:
    """0: record and pages are those of the code."""
    if arguments.action == "timm":
        return _timm()
    from bench.development.protocols import (
        PAGE,
        RECORD,
        ROOT,
        own_tasks,
        protocol_page,
        protocol_versions,
        update_record,
    )
    from engine.files import write_atomic

    tasks = own_tasks()
    lines = update_record(ROOT, protocol_versions(tasks))
    write_atomic(ROOT / PAGE, protocol_page(tasks))
    say(*lines, *([] if lines else ["no protocol changed"]), f"written: {RECORD}, {PAGE}")
    return 0


def _timm() -> int:
    from bench.development.protocols import ROOT
    from bench.development.timm_page import PAGE, timm_page
    from engine.files import write_atomic

    write_atomic(ROOT / PAGE, timm_page())
    say(f"written: {PAGE}")
    return 0
