"""Collect results, logs and commands of a board in a folder to publish, or check that such a record is consistent."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from bench.options import Positional, PublicationOptions

EPILOG = """A record holds everything that the numbers are based on except weights and images: result files with their
values for every image, logs, descriptions of the checkpoints, commands, tables, and model cards with the Hugging Face
Hub's metadata files. Paths of this machine are removed from all texts. The same results give the same bytes. If another
version wrote the record, --check compares numbers and names but not the wording, and reports that.

examples:
  bench record results --to published
  bench record --check published            make tables, cards and commands again and compare them
  bench record results --check published    also compare with the results in the folder `results`
  bench record results --to published --sign ~/.ssh/id_ed25519

exit codes of --check: 0 everything agrees; 1 it does not, with a line for each difference
"""


@dataclass(frozen=True, kw_only=True)
class Options(PublicationOptions):
    """Options of `bench record`."""

    out: Positional[Path | None] = None  # OUT: folder that `bench run` wrote to
    to: Path | None = None  # DIR: write the record there; an older record is replaced
    check: Path | None = None  # DIR: check a record
    model_id: tuple[str, ...] = ()  # NAME=ORG/NAME: a checkpoint's id on the Hub
    # NAME=SPDX: licence of a checkpoint's weights if their source names none, such as mae-s=apache-2.0
    licence: tuple[str, ...] = ()
    # NAME=URL: where the authors of a checkpoint confirm its numbers, such as their comment, commit or DOI
    verified_by: tuple[str, ...] = ()
    # KEY: sign the record with an ssh key, by ssh-keygen; --check reports the key that signed it
    sign: Path | None = None
    organization: str = ""  # ORG: who made the evaluation


def run(options: Options) -> int:
    """0: written, or everything agrees; 1: a check found a difference."""
    from bench.record import check_record, comparison_scope, signer, write_record
    from bench.reports.card import publication_from
    from bench.results.record import check_folder
    from engine.printing import counted, say

    if options.out:
        check_folder(options.out)
    if bool(options.to) == bool(options.check):
        raise ValueError("--to DIR writes a record, --check DIR checks one: give one of them")
    if options.check:
        differences = 0
        for line in check_record(options.check, options.out):
            say(line)
            differences += 1
        signature = f"; signed with {key}" if (key := signer(options.check)[0]) else ""
        agrees = f"board and records agree{signature}"
        say(f"compared: {comparison_scope(options.check)}")
        say(counted(differences, "difference") if differences else agrees)
        return int(differences > 0)
    if not options.out or not options.to:
        raise ValueError("which results? give the folder of results that `bench run` wrote: bench record OUT --to DIR")
    publication = publication_from(
        options.model_id,
        options.hub_dataset,
        options.source,
        options.organization,
        options.licence,
        options.verified_by,
    )
    write_record(options.out, options.to, publication, options.sign)
    say(f"written: {options.to}; check it by: bench record --check {shlex.quote(str(options.to))}")
    return 0
