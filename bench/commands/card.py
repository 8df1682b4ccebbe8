"""Write the model card of an export, with its results, for the Hugging Face Hub; works offline."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions

EPILOG = """README.md describes what the export is, how it was trained, how timm loads it and what was measured. Its
header has the numbers as model-index, which the Hub shows. Nothing is uploaded; to upload: hf upload ORG/NAME DIR.

examples:
  bench card --checkpoint runs/mae/export --out results
  bench card --checkpoint runs/mae/export --out results --model-id me/mae-s --licence apache-2.0
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench card`."""

    checkpoint: Path  # EXPORT: folder of an export
    out: Path | None = None  # DIR: folder that `bench run` wrote to; without it the card has no results
    to: Path | None = None  # DIR: where to write (the export's folder)
    model_id: str = ""  # ORG/NAME: id of the model on the Hub
    source: str = ""  # URL: where results and logs are published
    # SPDX: licence of the weights if their source names none: apache-2.0, mit, ... (spdx.org/licenses)
    licence: str = ""
    # also the results of --limit, --set and --image-size, which are left out because others would take them for the
    # protocol's
    all: bool = False


def run(options: Options) -> int:
    """0: the card is written."""
    from bench.reports.card import Publication, results_on, subject_of, write_card
    from bench.results.record import check_folder
    from engine.printing import counted, say

    publication = Publication(model_id=options.model_id, source=options.source, licence=options.licence)
    subject = subject_of(options.checkpoint, options.out)
    if options.out:
        check_folder(options.out)
    measured = results_on(options.out, subject) if options.out else []
    changed = [result for result in measured if result.limit or result.protocol.modified or result.chosen_size]
    results = [result for result in measured if options.all or result not in changed]
    if left_out := len(measured) - len(results):
        text = "with --limit, --set or --image-size left out; --all adds them"
        say(f"{counted(left_out, 'result')} {text}", errors=True)
    if options.out and not measured:
        say(f"{options.out} has no results for digest {subject.used.digest[:12]}: the card has none", errors=True)
    folder = options.to or options.checkpoint
    say(f"written: {write_card(folder, subject, results, publication)}")
    if not subject.licence(publication):
        say("licence: unknown, as the card states; give it by --licence, such as --licence apache-2.0", errors=True)
    return 0
