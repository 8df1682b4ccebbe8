"""Print what a checkpoint is and where it is from."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench inspect`."""
    parser.add_argument(
        "checkpoint", metavar="X", help="export folder, checkpoint file, folder of a training, timm:NAME or hf-hub:ID"
    )


def run(arguments: argparse.Namespace) -> int:
    """Always 0: inspecting judges nothing."""
    from bench.candidates import opened
    from bench.description import described

    _, export = opened(arguments.checkpoint)
    print(arguments.checkpoint)
    print("\n".join(described(export)))
    problems = export.verify()
    print(f"  {'verified':12} {'no: ' + problems[0] if problems else 'the recorded activations come out again'}")
    return 0
