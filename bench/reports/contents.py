"""The contents of a report: its tables, with ranks, gains and caveats, and what it says in sentences.

They depend on result files alone, so that the same results give the same page.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import floor, log10
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from bench.reports.leaderboard import Cell, Leaderboard, leaderboard_with_ties, order_of, with_published
from bench.results.record import CheckpointUsed, Result, images_seen, interval_decimals, suffix
from bench.results.store import StoredResult
from bench.statistics.compare import interval_text
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, is_comparable
from bench.statistics.paired import PairedTest, holm_of_networks
from bench.statistics.significance import Column, Key, PairedTestCache
from checkpoints.export import spec_in
from checkpoints.flops import forward_flops
from engine.extensions import opening_paragraphs, source_files
from engine.files import digest
from engine.printing import counted, in_words

SHADES = 10  # steps of lightness of one hue, which colour-blind readers can tell apart
SUPERVISED = "supervised"  # the method that reads labels
MAX_NAMED = 3  # networks that a sentence names
SEED = re.compile(r"-seed(\d+)")  # in the name of a further training of the network that is called the same without it
# Protocols in words: of the task, and of the source, the first word after the @ unless two would be called the same.
TASKS = {
    "knn": "k-NN",
    "knn_online": "k-NN",
    "dense_knn": "dense k-NN",
    "linear_sgd": "linear",
    "linear_lars": "linear",
    "logreg": "logistic regression",
    "lowshot": "few-shot",
    "semi": "few-shot, fine-tuned",
    "finetune": "fine-tuning",
    "ood": "outliers",
    "upernet": "UperNet",
    "maskrcnn": "Mask R-CNN",
    "cascade": "Cascade Mask R-CNN",
}
POOLED = {"cls": "class token", "avg": "patches"}  # setting `pool` of a k-NN -> the tokens that it reads
SPELLED = "AIM BEiT CAE CAPI DINO DINOv2 DINOv3 DeiT ExtreMA LOST LUT MAE MIEB MOCA MSN MST MoCov3 SimMIM TokenCut iBOT"
SOURCES = {name.lower(): name for name in SPELLED.split()} | {"vjepa2": "V-JEPA 2", "maskfeat": "MaskFeat"}


Baseline = Literal["start", "pixels"]
BASELINES: dict[Baseline, str] = {"start": "their initial weights", "pixels": "raw pixels"}
OWN = {role: BASELINES[role].replace("their", "its") for role in reversed(BASELINES)}  # said of one network


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A network's number compared with those of its own initial weights and of raw pixels by paired tests.

    Differences are positive if the network is better. p: corrected by Holm over all such tests of a column.
    """

    tests: Mapping[Baseline, tuple[PairedTest, float]]  # test and corrected p
    unit: str = "%"
    sign: int = 1  # -1 if lower is better

    @property
    def text(self) -> str:
        """`+15.6`: the gain over the initial weights; "" if they were not measured."""
        if "start" not in self.tests:
            return ""
        difference = self.tests["start"][0].difference
        return f"{self.sign * difference:+.{interval_decimals(difference, self.unit)}f}"

    @property
    def marks(self) -> str:
        """`s p`: significantly better than initial weights and than raw pixels; `-s`, `-p`: worse."""
        signs = {1: "", -1: "-"}
        return " ".join(f"{signs[sign]}{role[0]}" for role in BASELINES if (sign := self.significant(role)))

    def significant(self, baseline: Baseline) -> int:
        """1 if the network is significantly better than a baseline, -1 if worse, 0 if neither or not compared."""
        test, p = self.tests.get(baseline, (None, 1.0))
        return self.sign * (1 if test.difference > 0 else -1) if test and p <= LEVEL else 0

    def in_words(self, baseline: Baseline) -> str:
        """`by 53.1 points [46.2, 60.0]`: how much better, or worse, than a baseline, with its interval."""
        test, unit = self.tests[baseline][0], " points" if self.unit == "%" else suffix(self.unit)
        sign = 1 if test.difference > 0 else -1
        low, high = sorted((sign * test.low, sign * test.high))
        digits = interval_decimals(test.difference, self.unit)
        return f"by {abs(test.difference):.{digits}f}{unit} {interval_text(low, high, digits)}"

    @property
    def sentences(self) -> list[str]:
        """`better than raw pixels by 53.1 points [46.2, 60.0]`, or `not told apart from raw pixels`, for each."""
        words = {1: "better than", -1: "worse than"}
        return [
            f"{words[sign]} {OWN[role]} {self.in_words(role)}"
            if (sign := self.significant(role))
            else f"not told apart from {OWN[role]}"
            for role in self.tests
        ]


class Outcomes(NamedTuple):
    """How many networks are significantly better than a baseline, worse, and compared with it."""

    better: int
    worse: int
    of: int


def outcomes(baseline: Baseline, gains: Iterable[Gain]) -> Outcomes:
    signs = [gain.significant(baseline) for gain in gains if baseline in gain.tests]
    return Outcomes(signs.count(1), signs.count(-1), len(signs))


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """One group of the leaderboard: a protocol on an image set."""

    board: Leaderboard
    group: str
    title: str  # the protocol in words
    result: Result  # any result of the group, for its protocol, settings and image set
    checkpoints: tuple[CheckpointUsed, ...]  # the best by the main metric first
    starts: Mapping[Key, CheckpointUsed]  # network -> its initial weights
    gains: Mapping[Key, Gain]  # in the main metric
    caveats: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return slug(self.group)

    @property
    def about(self) -> str:
        """Description of the task; "" if it is not installed."""
        return about_task(self.result.task)

    @property
    def lower_is_better(self) -> bool:
        return any(cell.higher_is_better is False for cell in self.cells.values())

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.board.groups[self.group]

    @property
    def main(self) -> Column:
        """The column of the main metric."""
        return self.group, self.metrics[0]

    @cached_property
    def cells(self) -> dict[CheckpointUsed, Cell]:
        """The numbers of the main metric."""
        return {
            used: self.board.rows[used][self.main] for used in self.checkpoints if self.main in self.board.rows[used]
        }

    @cached_property
    def networks(self) -> list[CheckpointUsed]:
        """Trained networks with a number, the best first."""
        return [used for used in self.cells if self.board.kinds[used] == "measured"]

    @cached_property
    def leaders(self) -> list[str]:
        """Names of the best network and of all that a paired test cannot tell from it; without tests of the best."""
        level = [used for used in self.networks if self.board.is_best(used, self.main)] or self.networks[:1]
        return [self.board.names[used] for used in level]

    @cached_property
    def ranks(self) -> dict[Key, str]:
        return self.board.ranks(self.main)

    @property
    def doubted(self) -> int:
        """How many trained networks have a number that the task doubts; they are not ranked."""
        return sum(self.cells[used].is_doubtful for used in self.networks)

    @property
    def all_tested(self) -> bool:
        """Whether every trained network has a rank, unless the task doubts its number."""
        return len(self.ranks) + self.doubted == len(self.networks)

    @cached_property
    def has_intervals(self) -> bool:
        """Whether the main metric can be drawn and shaded as one that says who is better: RankMe cannot."""
        return any(cell.interval and cell.higher_is_better is not None for cell in self.cells.values())

    @property
    def unit(self) -> str:
        return next((cell.unit for cell in self.cells.values()), "%")

    @property
    def images(self) -> str:
        """`2,500 of 10,000 images`: those that were evaluated, of all; "" if unknown."""
        data, limit = self.result.data, self.result.limit
        if "val" not in data.images:
            return ""
        seen, count = images_seen(data, limit), data.images["val"]
        return f"{seen:,} images" if seen == count else f"{seen:,} of {count:,} images"

    @cached_property
    def shades(self) -> dict[CheckpointUsed, int]:
        """Checkpoint -> shade of its number by its distance from the best network's; empty for fewer than two networks.

        The scale spans at least twice the widest interval, so that numbers whose differences are noise look alike.
        """
        if len(self.networks) < 2 or not self.has_intervals:
            return {}
        orders = [order_of(self.cells[used]) for used in self.networks]
        intervals = [interval for used in self.networks if (interval := self.cells[used].interval)]
        scale = max([max(orders) - min(orders), *(2 * (high - low) for low, high in intervals)])
        behind = {used: (order_of(cell) - min(orders)) / scale if scale else 0.0 for used, cell in self.cells.items()}
        return {used: round(SHADES * (1 - min(max(share, 0.0), 1.0))) for used, share in behind.items()}

    @cached_property
    def axis(self) -> tuple[float, float, list[float]]:
        """Both ends of an axis for all numbers and intervals, and its ticks, two to seven round numbers."""
        ends = [end for cell in self.cells.values() for end in (cell.interval or (cell.mean, cell.mean))]
        low, high = min(ends), max(ends)
        span = (high - low) or abs(high) or 1.0
        step = 10.0 ** floor(log10(span / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) < 7)
        ticks = [step * number for number in range(floor(low / step) + 1, floor(high / step) + 1)]
        return low - span / 50, high + span / 50, ticks


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """The contents of a whole page."""

    board: Leaderboard  # with several trainings of a network in one row
    tables: tuple[ReportTable, ...]
    overview: tuple[CheckpointUsed, ...]  # all checkpoints, by mean rank; those that are not ranked come last
    trainings: Mapping[tuple[str, Key], int]  # group and checkpoint -> number of trainings behind its numbers
    unlabelled_tables: tuple[ReportTable, ...]  # without the supervised baseline; () if there is none
    mean_ranks: Mapping[Key, float]  # over the protocols with paired tests that all networks have
    checkpoints: tuple[Mapping[str, Any], ...]  # facts
    results: Sequence[Result]
    sources: Mapping[
        tuple[str, Key], Sequence[int]
    ]  # group and checkpoint -> indices of the results behind its numbers


def contents(
    leaderboard: Leaderboard,
    cache: PairedTestCache | None = None,
    starts: Mapping[str, str] | None = None,
    updates: Mapping[str, int] | None = None,
) -> ReportContents:
    """The contents of a report on a leaderboard and the results behind it.

    Args:
        leaderboard: it; several trainings of a network (`SEED`) become one row with mean and deviation.
        cache: of paired tests; None for none against initial weights and raw pixels.
        starts: name of a network -> name of its initial weights, if they are not in the folder beside it.
        updates: name of a network -> updates of its pretraining.
    """
    measured = leaderboard.results
    merged, trainings = with_trainings_as_seeds(measured) if cache else measured, defaultdict(set)
    for before, after in zip(measured, merged, strict=True):
        if before.result.status == "ok":
            trainings[after.result.group, after.result.checkpoint.key].add(before.result.checkpoint.key)
    if cache and any(len(own) > 1 for own in trainings.values()):
        board = leaderboard_with_ties(merged, cache, leaderboard.problems, leaderboard.folder)
        leaderboard = with_published(board) if leaderboard.published else board
    sources: dict[tuple[str, Key], list[int]] = defaultdict(list)
    for index, stored in enumerate(merged):
        if stored.result.status == "ok":
            sources[stored.result.group, stored.result.checkpoint.key].append(index)
    good = [stored.result for stored in merged if stored.result.status == "ok"]
    by_group = {result.group: result for result in reversed(good)}
    titles = {group: protocol_in_words(result) for group, result in by_group.items()}
    groups = [group for group in leaderboard.groups if not is_shown_elsewhere(leaderboard, by_group[group], good)]
    counts = Counter((by_group[group].data.name, titles[group]) for group in groups)
    start_of = initial_weights(leaderboard, starts or {})
    tables = []
    for group in groups:
        rows, column, result = leaderboard.rows, (group, leaderboard.groups[group][0]), by_group[group]
        checkpoints = sorted(leaderboard.checkpoints_in(group), key=lambda used: order_of(rows[used].get(column)))
        is_unique = counts[result.data.name, titles[group]] == 1
        tables.append(
            ReportTable(
                board=leaderboard,
                group=group,
                title=titles[group] if is_unique else group.removeprefix(f"{result.data.name}/"),
                result=result,
                checkpoints=tuple(checkpoints),
                starts=start_of,
                gains=gains(leaderboard, column, start_of, cache) if cache else {},
                caveats=leaderboard.caveats[group],
            )
        )
    means = mean_ranks(leaderboard)
    order = ("measured", "floor", "published", "initial").index

    def place(used: CheckpointUsed) -> tuple[int, float, str]:
        return order(leaderboard.kinds[used]), means.get(used.key, float("inf")), leaderboard.names[used]

    return ReportContents(
        board=leaderboard,
        tables=tuple(tables),
        unlabelled_tables=unlabelled(tables, merged, cache) if cache else (),
        overview=tuple(sorted(leaderboard.rows, key=place)),
        trainings={key: len(own) for key, own in trainings.items()},
        mean_ranks=means,
        checkpoints=tuple(checkpoint_facts(leaderboard, used, updates or {}) for used in leaderboard.rows),
        results=[stored.result for stored in measured],
        sources=sources,
    )


def unlabelled(
    tables: Iterable[ReportTable], results: Sequence[StoredResult], cache: PairedTestCache
) -> tuple[ReportTable, ...]:
    """The tables without networks of the method `supervised`, and ties among the others; () if there are no such."""
    kept = [stored for stored in results if stored.result.checkpoint.method != SUPERVISED]
    if len(kept) == len(results):
        return ()
    board = leaderboard_with_ties(kept, cache)
    return tuple(
        replace(table, board=board, checkpoints=tuple(used for used in table.checkpoints if used in board.rows))
        for table in tables
        if table.group in board.groups
    )


def is_shown_elsewhere(leaderboard: Leaderboard, result: Result, others: Iterable[Result]) -> bool:
    """Whether the group of a result has only raw pixels, whose numbers also stand beside networks at a chosen size."""
    return all(leaderboard.kinds[used] == "floor" for used in leaderboard.checkpoints_in(result.group)) and any(
        other.chosen_size and is_comparable(result, other) for other in others
    )


def with_trainings_as_seeds(results: Sequence[StoredResult]) -> Sequence[StoredResult]:
    """The results, those of NAME-seed1, NAME-seed2, ... as further seeds of NAME, if it was trained by the same method
    and recipe: its number is then a mean over trainings."""
    by_name = {stored.result.checkpoint.name: stored.result.checkpoint for stored in results}
    merged = []
    for stored in results:
        used = stored.result.checkpoint
        match = SEED.search(used.name)
        first = by_name.get(SEED.sub("", used.name)) if match else None
        if match and first and is_same_training(used, first):
            seed = stored.result.seed + 1000 * int(match[1])
            stored = replace(stored, result=replace(stored.result, checkpoint=first, seed=seed, random=True))
        merged.append(stored)
    return merged


def is_same_training(one: CheckpointUsed, other: CheckpointUsed) -> bool:
    """Whether two checkpoints were trained alike, seeds and numbers of updates apart."""
    return (one.method, one.recipe, one.architecture) == (other.method, other.recipe, other.architecture)


def initial_weights(leaderboard: Leaderboard, starts: Mapping[str, str]) -> dict[Key, CheckpointUsed]:
    """Network -> its initial weights: by name in `starts`, or in the folder of the same pretraining."""
    initial = [used for used, kind in leaderboard.kinds.items() if kind == "initial"]
    by_name = {used.name: used for used in initial}
    by_folder = {PurePath(used.source).parent: used for used in initial}
    by_network = {}
    for used, kind in leaderboard.kinds.items():
        if kind == "measured":
            beside = by_folder.get(PurePath(used.source).parent)  # a folder may hold other networks, too
            own = beside if beside and is_same_training(used, beside) else None
            if start := by_name.get(starts.get(used.name, "")) or own:
                by_network[used.key] = start
    return by_network


def gains(
    leaderboard: Leaderboard, column: Column, starts: Mapping[Key, CheckpointUsed], cache: PairedTestCache
) -> dict[Key, Gain]:
    """Each network's comparisons with its initial weights and raw pixels in a column, where they can be tested."""
    good = [stored for stored in leaderboard.results if stored.result.status == "ok"]
    groups = {stored.result.group: (stored.result.data.name, stored.result.protocol.name) for stored in good}
    by_key: dict[Key, list[StoredResult]] = defaultdict(list)  # under the protocol, also at other sizes
    for stored in good:
        if groups[stored.result.group] == groups.get(column[0]):
            by_key[stored.result.checkpoint.key].append(stored)

    def comparable(key: Key, network: StoredResult) -> tuple[StoredResult, ...]:
        """All seeds of a checkpoint, as in the numbers shown; those of the column's group, if it has any there."""
        seeds = [stored for stored in by_key[key] if is_comparable(stored.result, network.result)]
        return tuple([stored for stored in seeds if stored.result.group == column[0]] or seeds)

    rows, cells = leaderboard.rows, leaderboard.candidates.get(column, {})
    floors = [used for used, kind in leaderboard.kinds.items() if kind == "floor" and column in rows[used]]
    pixels = min(floors, key=lambda used: order_of(rows[used][column]), default=None)  # of all sizes
    tests: dict[tuple[Key, Baseline], PairedTest] = {}
    for key in cells:
        own = tuple(stored for stored in by_key[key] if stored.result.group == column[0])
        compared_with: dict[Baseline, CheckpointUsed | None] = {"start": starts.get(key), "pixels": pixels}
        for role, baseline in compared_with.items():
            other = comparable(baseline.key, own[0]) if baseline else ()
            if other and comparable(key, own[0]) == own:
                with suppress(ValueError):  # if no paired test is possible
                    tests[key, role] = cache.get(Match(group=column[0], first=own, second=other), column[1])
    for stored in (stored for own in by_key.values() for stored in own):
        stored.forget_arrays()
    p_values = {(key, role): test.p for (key, role), test in tests.items()}
    corrected = holm_of_networks(p_values, network=lambda test: (test[0][1], test[1]))
    compared: dict[Key, dict[Baseline, tuple[PairedTest, float]]] = defaultdict(dict)
    for (key, role), test in tests.items():
        compared[key][role] = test, corrected[key, role]
    signs = {key: -1 if cell.higher_is_better is False else 1 for key, cell in cells.items()}
    return {key: Gain(tests=roles, unit=cells[key].unit, sign=signs[key]) for key, roles in compared.items()}


def mean_ranks(leaderboard: Leaderboard) -> dict[Key, float]:
    """Network -> mean rank over the main metrics that all networks have and paired tests compare.

    Those that share ranks have the middle one. Empty for fewer than two networks, or without such a metric.
    """
    networks = [used.key for used, kind in leaderboard.kinds.items() if kind == "measured"]
    columns = [leaderboard.ranks((group, metrics[0])) for group, metrics in leaderboard.groups.items()]
    columns = [ranks for ranks in columns if len(ranks) == len(networks) > 1]
    middles = {
        rank: sum(map(int, rank.split("-"))) / len(rank.split("-")) for ranks in columns for rank in ranks.values()
    }
    return {key: sum(middles[ranks[key]] for ranks in columns) / len(columns) for key in networks if columns}


def checkpoint_facts(leaderboard: Leaderboard, used: CheckpointUsed, updates: Mapping[str, int]) -> dict[str, Any]:
    """Name, anchor and origin of a checkpoint as shown; `cost` holds its costs as numbers."""
    saved = (leaderboard.folder.parent / "exports").glob(f"*-{used.digest[:8]}")
    specs = (spec_in(folder, used.digest) for folder in (*map(str, saved), used.source) if folder)
    spec, cost = next(filter(None, specs), None), used.training_cost
    costs = {
        "parameters, M": used.parameters / 1e6,
        "GFLOP an image": spec and forward_flops(replace(spec, image_size=used.image_size or spec.image_size)) / 1e9,
        "training, TFLOP": cost.tflop,
        "images seen": cost.images,
        "updates": updates.get(leaderboard.names[used]),
    }
    facts = {
        field: getattr(used, field) for field in ("method", "recipe", "branch", "architecture", "digest", "source")
    }
    return {
        "name": leaderboard.names[used],
        "anchor": slug(*used.key),
        "cost": {name: value for name, value in costs.items() if value},
        "facts": {name: value for name, value in (facts | {"trained on": cost.devices}).items() if value},
    }


def slug(*words: str) -> str:
    """An anchor that depends on these words alone: `digits-knn@dino-3f2a91bc`."""
    readable = re.sub(r"[^A-Za-z0-9._@-]+", "-", words[0]).strip("-.")[:60]
    return f"{readable}-{digest(list(words))[:8]}"


def protocol_in_words(result: Result) -> str:
    """`linear (iBOT)` for `linear_sgd@ibot_base_cached`, `k-NN, patches (MOCA)` for `knn@moca`."""
    task, _, source = result.protocol.name.partition("@")
    first = source.partition("_")[0]
    title = TASKS.get(task, task.replace("_", " "))
    if title == "k-NN" and (tokens := POOLED.get(str(result.settings.get("pool")))):
        title += f", {tokens}"
    return title + (f" ({SOURCES.get(first, first)})" if first else "")


@cache
def about_task(task: str) -> str:
    """The first two paragraphs of the docstring of a task's file; "" if the task is not installed."""
    files = source_files("probes") | source_files("downstream")
    return opening_paragraphs(files[task]) if task in files else ""


def provenance(result: Result) -> dict[str, object]:
    """The provenance of a number, for people: what was evaluated, how, on which images and where."""
    used, data = result.checkpoint, result.data
    warnings = result.facts.get("warnings", ())
    return {
        "checkpoint": f"{used.name}, {used.architecture}, {used.parameters:,} parameters",
        "checkpoint digest": used.digest,
        "from": used.source,
        "trained by": " ".join(filter(None, (used.known_method, used.recipe, used.branch))),
        "protocol": f"{result.protocol.name}, version {result.protocol.version}",
        "source of the protocol": result.protocol.source,
        "changed settings": ", ".join(f"{key}={value}" for key, value in result.protocol.changes.items()) or "none",
        "images": f"{data.name}={data.url}",
        "number of images": ", ".join(f"{count} {split}" for split, count in data.images.items()),
        "fingerprints": ", ".join(f"{split} {digest[:16]}" for split, digest in data.fingerprints.items()),
        "limit": result.limit or "none",
        "intervals": result.interval_method or "none",
        "seed": result.seed,
        "precision, decoder": f"{result.precision}, {result.decode}",
        "measured": f"{result.date}, {result.seconds:.1f} s on {result.processes} x {result.device}",
        "machine": ", ".join(f"{key} {value}" for key, value in result.hardware.items() if value not in ([], "", None)),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "warnings": "; ".join(map(str, warnings)) if isinstance(warnings, list | tuple) and warnings else "none",
    }


def headline(report: ReportContents) -> str:
    """What paired tests show over all tables, and whether other trainings could change it."""
    ranked = [table for table in report.tables if table.ranks]
    if not ranked:
        return gains_in_words(report) or (
            "No protocol has measured and tested two trained networks yet, so there is nothing to rank."
        )
    text = f"Best or tied with the best in {counted(len(ranked), 'protocol')}: {leaders_in_words(ranked)}."
    if unlabelled := [table for table in report.unlabelled_tables if table.ranks]:
        text += f" Apart from the supervised baseline: {leaders_in_words(unlabelled)}."
    counts = [[report.trainings[table.group, used.key] for used in table.networks] for table in ranked]
    once = [own.count(1) for own in counts]  # networks of each protocol with one training
    is_each = all(number == len(own) for number, own in zip(once, counts, strict=True))
    span = counted(max(once), "network") if min(once) == max(once) else f"{min(once)} to {max(once)} networks"
    if any(once):
        text += f" {'One training each' if is_each else f'{span} with one training'}: seeds can change the order."
    if not is_each:
        text += " The tests resample images, not trainings, so they do not cover variation between trainings."
    return text


def compared_with_pixels(report: ReportContents) -> str:
    """Sentence on how many networks beat raw pixels, in the protocols with the smallest share; "" if none is ranked."""
    counts = [(outcomes("pixels", table.gains.values()), table) for table in report.tables]
    compared = sorted((pair for pair in counts if pair[0].of), key=lambda pair: pair[0].better / pair[0].of)
    if not compared or not any(table.ranks for table in report.tables):
        return ""
    named = []
    for (better, worse, of), table in compared[:MAX_NAMED]:
        of_all = f"{better} of {of}" + (f" ({worse} worse)" if worse else "")
        named.append(f"{of_all} in {table.title} on {table.result.data.name}")
    others = len(compared) - len(named)
    rest = f"; {counted(others, 'other protocol')} compared" if others else ""
    return f"Networks shown to be better than raw pixels, fewest first: {', '.join(named)}{rest}."


def leaders_in_words(tables: Sequence[ReportTable]) -> str:
    """`mae in 3 (significantly better than all others in 2); dino in 1`: the networks that lead most of the tables."""
    first = Counter(name for table in tables for name in table.leaders)
    alone = Counter(table.leaders[0] for table in tables if len(table.leaders) == 1 and table.all_tested)
    order = sorted(first, key=lambda name: (-first[name], -alone[name], name))
    least = first[order[:MAX_NAMED][-1]]
    leading = [name for name in order if first[name] >= least]  # with all that are first as often as the last of them
    leading = leading if len(leading) <= 2 * MAX_NAMED else order[:MAX_NAMED]
    named = [
        f"{name} in {first[name]}" + f" (significantly better than all others in {alone[name]})" * (name in alone)
        for name in leading
    ]
    named += [counted(len(order) - len(leading), "other network")] if order[len(leading) :] else []
    return "; ".join(named)


def gains_in_words(report: ReportContents) -> str:
    """Where each network beats raw pixels and its initial weights, and where not; "" if none beats any."""
    sentences = []
    for used, name in report.board.names.items():
        gains = {
            f"{table.title} on {table.result.data.name}": table.gains[used.key]
            for table in report.tables
            if used.key in table.gains
        }
        for role, baseline in OWN.items():
            compared = {place: gain for place, gain in gains.items() if role in gain.tests}
            missed = [place for place, gain in compared.items() if gain.significant(role) <= 0]
            if len(compared) > 1:
                text = f"{name} beats {baseline} in {len(compared) - len(missed)} of {len(compared)} protocols"
                more = [counted(len(missed) - MAX_NAMED, "other")] if missed[MAX_NAMED:] else []
                sentences.append(text + (f", not in {in_words([*missed[:MAX_NAMED], *more])}." if missed else "."))
            elif compared.keys() - missed:
                ((place, gain),) = compared.items()
                sentences.append(f"{name} beats {baseline} {gain.in_words(role)} in {place}.")
    return " ".join(sentences)


def verdict(table: ReportTable) -> str:
    """A sentence or two on which network leads a table, and on the evidence."""
    leaders, on = table.leaders, f"on {table.images or 'the validation images'}"
    if not leaders:
        return "No trained network was measured."
    if len(table.networks) == 1:
        return alone(leaders[0], table.gains.get(table.networks[0].key, Gain(tests={})), on)
    if not table.ranks:
        text = f"There is no paired test of {table.metrics[0]}, so the networks are not ranked."
    elif len(leaders) == 1:
        tested, others = len(table.ranks) - 1, len(table.networks) - 1
        than = "every other" if table.all_tested else f"{tested} of the {others} others, which could be tested,"
        text = f"{leaders[0]} leads {on}: better than {than} by a paired test on the same images (5 %, Holm)."
        if table.all_tested and table.doubted:
            text += f" Not compared: {counted(table.doubted, 'network')} whose number is doubted."
    elif len(leaders) == len(table.networks):
        text = f"None of the differences between the {len(leaders)} networks is significant {on}."
    else:
        text = f"{in_words(leaders)} lead {on}; a paired test on the same images does not tell them apart (5 %, Holm)."
    counts = {name: outcomes(role, table.gains.values()) for role, name in BASELINES.items()}
    better = [f"{count.better} of {count.of} than {name}" for name, count in counts.items() if count.of]
    return text + (f" Shown to be better: {', '.join(better)}." if better else "")


def alone(name: str, gain: Gain, on: str) -> str:
    """The sentence on the only trained network of a table."""
    beaten = [f"{words} {gain.in_words(role)}" for role, words in OWN.items() if gain.significant(role) > 0]
    if beaten:
        return f"{name} beats {' and '.join(beaten)} {on}."
    unclear = [words for role, words in OWN.items() if role in gain.tests]
    text = f"{name} is the only trained network measured {on}."
    return text + (f" It is not shown to be better than {' or '.join(unclear)}." if unclear else "")
