"""Check an image set: bench data check URL."""

import argparse
from contextlib import ExitStack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench data`."""
    parser.add_argument("action", choices=("check",), help="check: counts, classes, unreadable files, what to fix")
    parser.add_argument("url", metavar="URL", help="folder:PATH, imagenet:ROOT, cifar10:PATH, images:PATH, ...")
    parser.add_argument("--list-only", action="store_true", help="do not decode the images")


def run(arguments: argparse.Namespace) -> int:
    """0: the set can be used as it is; 1: there is something to fix."""
    from engine.progress import Progress
    from imagesets.check import check, render
    from imagesets.sets import parse_url

    parse_url(arguments.url)
    with ExitStack() as stack:
        shown: list[Progress] = []
        report = check(
            arguments.url,
            read_all=not arguments.list_only,
            start=lambda total: shown.append(stack.enter_context(Progress("decoding", total, "images"))),
            advance=lambda count: shown[0].advance(count),
        )
    print(render(report))
    return 0 if report.ok else 1
