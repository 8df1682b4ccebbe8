"""Write the model card of an export, with its results, for the Hugging Face Hub; no network."""

import argparse
from pathlib import Path

from bench.cli.settings import add_publication

EPILOG = """README.md says what the export is, how it was trained, how timm loads it and what was measured. Its header
has the numbers as model-index. .eval_results/ has those on image sets of the Hub: ImageNet-1k is known, others are
named by --hub-dataset. Nothing is uploaded: hf upload ORG/NAME DIR does that.

examples:
  bench card --checkpoint runs/mae/export --out results
  bench card --checkpoint runs/mae/export --out results --model-id me/mae-s --licence apache-2.0
  bench card --checkpoint exports/dino --out results --model-id me/dino-s --hub-dataset cifar10=uoft-cs/cifar10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench card`."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="EXPORT", help="folder of an export")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder that `bench run` wrote to; without it no results"
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (the export's folder)")
    parser.add_argument("--model-id", metavar="ORG/NAME", help="of the model on the Hub")
    parser.add_argument(
        "--licence",
        metavar="SPDX",
        help="of the weights, where their source names none: apache-2.0, mit, ... (spdx.org/licenses)",
    )
    add_publication(parser)
    parser.add_argument("--force", action="store_true", help="replace a README.md that bench card did not write")


def run(arguments: argparse.Namespace) -> int:
    """0: the card is written."""
    from bench.results.record import check_folder
    from bench.sharing.card import publication_from, results_on, shared_groups, subject_of, without_dataset, write_card
    from engine.printing import say

    subject = subject_of(arguments.checkpoint)
    if arguments.out:
        check_folder(arguments.out)
    results = results_on(arguments.out, subject) if arguments.out else []
    models = [f"{subject.used.name}={arguments.model_id}"] if arguments.model_id else []
    licences = [f"{subject.used.name}={arguments.licence}"] if arguments.licence else []
    publication = publication_from(models, arguments.hub_dataset, arguments.source, licences=licences)
    groups = shared_groups(results)
    if arguments.out and not groups:
        say(f"{arguments.out} has no results of digest {subject.used.digest[:12]}: the card has none", errors=True)
    folder = arguments.to or arguments.checkpoint
    for path in write_card(folder, subject, results, publication, arguments.force):
        say(f"written: {path}")
    if not subject.licence(publication):
        say("licence: unknown, and the card says so; name it by --licence, such as --licence apache-2.0", errors=True)
    for name in without_dataset(groups, publication):
        say(f"{name}: not in .eval_results, as it has no id on the Hub; --hub-dataset {name}=ORG/NAME", errors=True)
    return 0
