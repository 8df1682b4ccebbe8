"""The card of one export, from its folder and the results about it, written beside its weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cli.outputs import check_writable
from bench.results.board import group_of
from bench.results.record import Result
from bench.run.checkpoints import default_name, describe
from bench.sharing.card import CardSubject, card_files, read_config
from bench.sharing.groups import Publication
from bench.statistics.matching import read_measured
from checkpoints.export import CARD, EVALUATIONS, ViTExport, is_card, is_export
from engine.files import write_atomic
from pretrain.loop.exporting import EXPORT, is_run


def subject_of(folder: Path) -> CardSubject:
    """What a card says of an export. ValueError where it is none, or not what was exported."""
    if is_run(folder) and is_export(folder / EXPORT):
        raise ValueError(f"{folder} is the folder of a pretraining; name its export, {folder / EXPORT}")
    if not is_export(folder):
        raise ValueError(f"{folder} is not an export; bench import makes one of a checkpoint")
    export = ViTExport.load(folder)
    name = str(export.facts.get("name") or default_name(str(folder.resolve()), export.digest))
    used = describe(export, name, str(folder))
    if used.is_floor:
        raise ValueError(f"{folder} holds raw pixels, no network: there is nothing to share")
    return CardSubject(used=used, config=read_config(folder))


def results_on(out: Path, subject: CardSubject) -> list[Result]:
    """The results of a folder that are of these very weights, under whatever name; of one seed the newest."""
    newest: dict[tuple[str, int], Result] = {}
    for each in read_measured(out)[0]:
        result, place = each.result, (group_of(each.result), each.result.seed)
        is_own = result.checkpoint.digest == subject.used.digest and result.status == "ok"
        if is_own and (place not in newest or newest[place].date < result.date):
            newest[place] = replace(result, checkpoint=subject.used)
    return list(newest.values())


def write_card(
    folder: Path, subject: CardSubject, results: Sequence[Result], publication: Publication, force: bool = False
) -> Iterator[Path]:
    """Write the card and the files of `.eval_results/`; gives their paths.

    ValueError where a README.md is there that is no card of ours, unless `force`.
    """
    card = folder / CARD
    if card.exists() and not is_card(card) and not force:
        raise ValueError(f"{card}: bench card did not write it, or it was changed since; --force replaces it")
    check_writable(folder)
    files = card_files(subject, results, publication)
    for old in (folder / EVALUATIONS).glob("*.yaml"):
        if f"{EVALUATIONS}/{old.name}" not in files:
            old.unlink()
    for name, text in files.items():
        write_atomic(folder / name, text)
        yield folder / name
