"""Print what a checkpoint is and where it is from."""

import argparse

from bench.cli.settings import REFERENCES, add_import_options, import_options

EPILOG = """examples:
  bench inspect dino_deitsmall16_pretrain.pth      its format, sizes, where it is from, its digest
  bench inspect runs/mae                           the encoder of a training, finished or not
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench inspect`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", metavar="X", help=REFERENCES)
    add_import_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Always 0: inspecting verifies nothing."""
    from checkpoints.import_options import check_reference

    check_reference(arguments.checkpoint)  # before torch is imported
    from bench.cli.output import export_lines
    from bench.run.checkpoints import opened
    from engine.printing import say

    _, export = opened(arguments.checkpoint, import_options(arguments))
    say(arguments.checkpoint)
    say(*export_lines(export))
    problems = export.verify()
    say(f"  {'verified':12} {'no: ' + problems[0] if problems else 'the recorded activations come out again'}")
    return 0
