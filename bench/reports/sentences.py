"""What a report says in sentences: which networks lead, on what evidence, and with which caveats."""

from collections import Counter
from collections.abc import Sequence

from bench.reports.contents import BLOCK, ReportContents, ReportTable, competing, sweep_of
from engine.printing import in_words

MAX_NAMED = 3  # networks that a sentence names
MAX_LISTED = 8  # networks whose best block is listed, and notes that are listed


def headline(report: ReportContents) -> str:
    """A few sentences on what paired tests show over all tables."""
    contested = [table for table in report.tables if len(competing(table)) > 1 and table.is_tested]
    if not contested:
        return "No protocol has measured and tested two trained networks yet, so there is nothing to rank."
    total = f"of {len(contested)} protocol{'s' if len(contested) > 1 else ''}"
    leaders = [leaders_of(table) for table in contested]
    names = dict.fromkeys(name for tied in leaders for name in tied)
    times_first = {name: sum(name in tied for tied in leaders) for name in names}
    times_alone = {name: sum(tied == [name] for tied in leaders) for name in names}
    if not any(times_alone.values()):
        sentences = [f"No network is significantly better than all others in any {total}."]
    else:
        winners = sorted((name for name in names if times_alone[name]), key=lambda name: -times_alone[name])
        parts = [f"{name} in {times_alone[name]}" for name in winners[:MAX_NAMED]]
        parts += ["others elsewhere"] if len(winners) > MAX_NAMED else []
        sentences = [f"Significantly better than every other network: {', '.join(parts)} {total}."]
    most = max(times_first.values())
    if most > max(times_alone.values()):
        best = sorted(name for name in names if times_first[name] == most)
        names_of_best = in_words(best) if len(best) <= MAX_NAMED else f"{len(best)} networks"
        sentences.append(f"Best or tied with the best most often: {names_of_best}, in {most}.")
    beaten = [table.beats_pixels for table in report.tables if table.beats_pixels is not None]
    if not all(beaten):
        unbeaten = f"{beaten.count(False)} of {len(beaten)} protocol{'s' if len(beaten) > 1 else ''}"
        sentences.append(f"No network is shown to be better than raw pixels in {unbeaten} that measured them.")
    return " ".join(sentences)


def leaders_of(table: ReportTable) -> list[str]:
    """Names of the best network of a table and of all networks tied with it."""
    rows = competing(table)
    return [row.name for row in rows if row.numbers[0].is_best] or [row.name for row in rows[:1]]


def evidence(report: ReportContents) -> list[str]:
    """Sentences on what the headline is based on, and on what it does not cover."""
    if not any(len(competing(table)) > 1 for table in report.tables):
        return []
    sentences = [
        "Tied means that a paired test on the same validation images finds no difference (5 %, Holm's correction)."
    ]
    chosen = sum(any(metric.chosen_on_val for metric in table.result.metrics.values()) for table in report.tables)
    if chosen:
        sentences.append(
            f"{chosen} of {len(report.tables)} tables report numbers that were chosen on the validation images and are "
            "therefore too good; these tables say so."
        )
    else:
        sentences.append("No number was chosen on the images that it is reported on.")
    if any(len(row.numbers[0].results) == 1 for table in report.tables for row in competing(table)):
        sentences.append(
            "Intervals cover the choice of validation images, not that of the training seed: another training run may "
            "rank differently."
        )
    return sentences


def common_notes(tables: Sequence[ReportTable]) -> list[str]:
    """Notes that several tables share, with the number of these tables; the most frequent ones first."""
    counts = Counter(note for table in tables for note in table.caveats)
    return [
        f"{'All' if count == len(tables) else f'{count} of'} {len(tables)} tables: {note}"
        for note, count in counts.most_common(MAX_LISTED)
        if count > 1
    ]


def verdict(table: ReportTable) -> str:
    """A sentence or two on which network leads a table, and on the evidence."""
    rows, leaders = competing(table), leaders_of(table)
    images = f"on {table.images} validation images" if table.images else "on the validation images"
    if not rows:
        return "No trained network was measured."
    if len(rows) == 1:
        sentence = f"{leaders[0]} is the only trained network measured {images}."
    elif not table.is_tested:
        sentence = f"{leaders[0]} has the best number {images}; there is no paired test of this metric."
    elif len(leaders) == 1:
        sentence = (
            f"{leaders[0]} leads {images}: better than every other by a paired test on the same images (5 %, Holm)."
        )
    elif len(leaders) == len(rows):
        sentence = f"None of the differences between the {len(leaders)} networks is significant {images}."
    else:
        sentence = (
            f"{in_words(leaders)} lead {images}; a paired test on the same images does not tell them apart (5 %, Holm)."
        )
    pixels = "None is shown to be better than raw pixels." if table.beats_pixels is False else ""
    return " ".join(filter(None, (sentence, pixels, best_blocks(table))))


def best_blocks(table: ReportTable) -> str:
    """A sentence with the best block of each leading network; "" for a protocol that reads only the last block."""
    parts = []
    for row in competing(table)[:MAX_LISTED]:
        if points := sweep_of(row, table, BLOCK):
            values = {block: number.value or 0.0 for block, number in points}
            best = (max if table.higher_is_better else min)(values, key=values.__getitem__)
            last = points[-1][0]
            loss = "the last" if best == last else f"the last is {abs(values[best] - values[last]):.3g} worse"
            parts.append(f"{row.name} {best:.0f} of {last:.0f} ({loss})")
    return f"Best block, chosen on these images: {', '.join(parts)}." if parts else ""
