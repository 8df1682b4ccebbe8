"""Check an image set: bench data check URL."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench data`."""
    parser.add_argument("action", choices=("check",), help="what to do")
    parser.add_argument("url", metavar="URL", help="folder:PATH, imagenet:ROOT, cifar10:PATH, digits: or tiny:")


def run(arguments: argparse.Namespace) -> int:
    """0: the set can be used as it is; 1: there is something to fix."""
    from imagesets.check import check, render

    report = check(arguments.url)
    print(render(report))
    return 1 if report.problems else 0
