"""What a report says first: who leads a table and the whole board, and why that can be trusted, or how far."""

from collections import Counter
from collections.abc import Sequence

from bench.report_page.contents import ReportContents, ShownRow, ShownTable

NOT_NETWORKS = {"floor": "raw pixels", "initial": "initial weights"}  # kinds that a trained network should beat


def verdict(table: ShownTable) -> str:
    """One sentence on who leads a table, and what that rests on."""
    rows, leaders = competing(table), leaders_of(table)
    over = f"on {table.images} validation images" if table.images else "on the validation images"
    if len(rows) == 1:
        return f"{leaders[0]} alone was measured, {over}."
    if not table.tested:
        return f"{leaders[0]} has the best number {over}; there is no paired test of this metric."
    if len(leaders) == 1:
        return f"{leaders[0]} leads {over}: better than every other by a paired test on the same images (5 %, Holm)."
    if len(leaders) == len(rows):
        return f"No difference between the {len(leaders)} is significant {over}."
    return f"{in_words(leaders)} lead {over}; a paired test on the same images does not tell them apart (5 %, Holm)."


def competing(table: ShownTable) -> list[ShownRow]:
    """Rows with a measured number, the best first."""
    return [row for row in table.rows if row.kind != "published" and row.numbers[0].value is not None]


def leaders_of(table: ShownTable) -> list[str]:
    """Names of the best of a table and of all that are level with it."""
    rows = competing(table)
    return [row.name for row in rows if row.numbers[0].first] or [rows[0].name]


def best_checkpoints(report: ReportContents) -> tuple[list[str], int, int]:
    """Who leads, or is level with the leader, in the most tables with two checkpoints or more; in how many, of how
    many. Raw pixels are no checkpoint."""
    contested = [table for table in report.tables if len(competing(table)) > 1]
    floors = {row.name for table in contested for row in table.rows if row.kind == "floor"}
    wins = Counter(name for table in contested for name in leaders_of(table) if name not in floors)
    most = max(wins.values(), default=0)
    return sorted(name for name, count in wins.items() if count == most), most, len(contested)


def unbeaten_floor(report: ReportContents) -> int:
    """In how many of these tables nothing is better than raw pixels, if in as many as the best checkpoints lead."""
    floors = sum("floor" in _kinds_of_leaders(table) for table in report.tables if len(competing(table)) > 1)
    return floors if floors >= best_checkpoints(report)[1] else 0


def headline(report: ReportContents) -> str:
    """One sentence or two on the whole board."""
    names, most, contested = best_checkpoints(report)
    if not contested:
        return "Nothing was measured under one protocol for two checkpoints yet, so there is nothing to compare."
    tables = f"of {contested} table{'s' if contested > 1 else ''}"
    floor = unbeaten_floor(report)
    found = [f"Nothing is better than raw pixels in {floor} {tables}."] if floor else []
    if len(names) == 1:
        found.append(f"{names[0]} is the best checkpoint: best, or level with the best, in {most} {tables}.")
    elif names:
        which = f"{in_words(names)} are the best checkpoints"
        found.append(f"{which}: each is best, or level with the best, in {most} {tables}.")
    return " ".join(found)


def grounds(report: ReportContents) -> list[str]:
    """Sentences on why the headline can be trusted, and on what it does not cover."""
    names, _, contested = best_checkpoints(report)
    if not contested:
        return []
    found = []
    if unbeaten_floor(report):
        found.append("Where nothing is better than raw pixels, a protocol does not see what the networks have learnt.")
    found += [beaten for kind in NOT_NETWORKS if (beaten := _beaten(report.tables, names, kind))]
    found.append("Level: a paired test on the same validation images does not tell two apart (5 %, Holm's correction).")
    chosen = sum(table.on_val for table in report.tables)
    found.append(
        f"{chosen} of {len(report.tables)} tables report numbers that were chosen on the validation images, which are "
        "too good; they say so."
        if chosen
        else "No number was chosen on the images that it is reported on."
    )
    found.append("Before an evaluation, an export's weights must compute what was recorded when it was made.")
    if any(seeds_of(row) == 1 for table in report.tables for row in competing(table)):
        found.append("Intervals cover another draw of images, not another training: few seeds can rank otherwise.")
    return found


def _beaten(tables: Sequence[ShownTable], names: Sequence[str], kind: str) -> str:
    """In how many tables the named are better than the rows of a kind, by the paired test; "" where none has both."""
    both = []
    for table in tables:
        kinds = {row.name: row.kind for row in competing(table)}
        others = {each for name, each in kinds.items() if name not in names}
        both += [table] if table.tested and set(names) <= set(kinds) and kind in others else []
    if not both or not names:
        return ""
    won = sum(set(names) <= set(leaders_of(table)) and kind not in _kinds_of_leaders(table) for table in both)
    who = "It is" if len(names) == 1 else "They are"
    return f"{who} significantly better than {NOT_NETWORKS[kind]} in {won} of {len(both)} tables that have both."


def _kinds_of_leaders(table: ShownTable) -> set[str]:
    leaders = leaders_of(table)
    return {row.kind for row in table.rows if row.name in leaders}


def seeds_of(row: ShownRow) -> int:
    """Results behind a row's first number."""
    return len(row.numbers[0].results)


def in_words(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
