"""Mean rank of networks over the protocols that all of them have, with an interval from resamples of the images; and
how well numbers that need no labels rank networks.

A resample draws the same validation images for every network and, where protocols share an image set, for every
protocol (engine/tasks.py), so that what makes an image hard for all does not widen the interval.
C networks, N images, R resamples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from bench.leaderboards.tables import Leaderboard
from bench.results.store import StoredResult
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import array_of
from bench.statistics.paired import holm
from bench.statistics.significance import Column, Key
from engine.tasks import resampled

RESAMPLES = 1000
NETWORKS = 100  # up to which there is an interval: the values of every image of every network are read for it


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanRanks:
    """means: network -> mean rank of its numbers, from 1 on. columns: how many protocols. drawn (R, C): mean ranks on
    resamples, networks in the order of `means`; None where values of images are not kept."""

    means: Mapping[Key, float] = field(default_factory=dict)
    columns: int = 0
    drawn: np.ndarray | None = None

    def text(self, key: Key) -> str:
        """`1.40 [1.20, 2.00]`, or nothing."""
        if key not in self.means:
            return ""
        if self.drawn is None:
            return f"{self.means[key]:.2f}"
        ranks = self.drawn[:, list(self.means).index(key)]
        low, high = np.quantile(ranks, (LEVEL / 2, 1 - LEVEL / 2))
        return f"{self.means[key]:.2f} [{low:.2f}, {high:.2f}]"

    def sentence(self, names: Mapping[Key, str]) -> str:
        """Whether the network with the lowest mean rank is first overall: lower than each other one on so many
        resamples that chance is ruled out (5 %, Bonferroni)."""
        if len(self.means) < 2:
            return ""
        keys = list(self.means)
        best = min(range(len(keys)), key=lambda at: self.means[keys[at]])
        over = f"over the {self.columns} protocol{'s' if self.columns > 1 else ''} that all networks have"
        if self.drawn is None:
            return f"{names[keys[best]]} has the lowest mean rank {over}; whether by chance was not tested."
        others = np.delete(self.drawn, best, axis=1)
        not_lower = (self.drawn[:, best, None] >= others).mean(0)
        if not_lower.max() <= LEVEL / 2 / len(others[0]):
            return f"{names[keys[best]]} has the lowest mean rank {over}, beyond chance (5 %, resampled images)."
        return f"No network has the lowest mean rank {over} beyond chance: no overall winner is claimed."


def mean_ranks(networks: Leaderboard) -> MeanRanks:
    """Mean ranks over the main metrics that all networks of a leaderboard have and that paired tests compare, if there
    are two such networks. RankMe, a number of all images together, is none of them."""
    keys = [used.key for used in networks.rows]
    columns = [
        (group, metrics[0])
        for group, metrics in networks.groups.items()
        if (group, metrics[0]) in networks.ties and len(networks.columns[group, metrics[0]]) == len(keys)
    ]
    if len(keys) < 2 or not columns:
        return MeanRanks()
    cells = {used.key: row for used, row in networks.rows.items()}
    signs = [-1 if cells[keys[0]][column].higher_is_better else 1 for column in columns]
    numbers = [np.array([[cells[key][column].mean for key in keys]]) for column in columns]
    means = dict(zip(keys, _mean_rank(numbers, signs)[0].tolist(), strict=True))
    drawn = None
    if len(keys) <= NETWORKS:
        by_place: dict[tuple[str, Key], list[StoredResult]] = defaultdict(list)
        for stored in networks.results:
            if stored.result.status == "ok":
                by_place[stored.result.group, stored.result.checkpoint.key].append(stored)
        try:
            values = [_drawn_values([by_place[column[0], key] for key in keys], column) for column in columns]
            fewest = min(map(len, values))
            drawn = _mean_rank([column[:fewest] for column in values], signs)
        except ValueError:  # a number alone was kept, or of other images
            drawn = None
    return MeanRanks(means=means, columns=len(columns), drawn=drawn)


def _mean_rank(columns: Sequence[np.ndarray], signs: Sequence[int]) -> np.ndarray:
    """Mean over columns, each (R, C), of the ranks in each row -> (R, C)."""
    from scipy.stats import rankdata

    return np.mean([rankdata(sign * values, axis=1) for values, sign in zip(columns, signs, strict=True)], axis=0)


def _drawn_values(results: Sequence[Sequence[StoredResult]], column: Column) -> np.ndarray:
    """The metric of each network, mean over its seeds, on resamples of the images -> (R, C). ValueError where it is
    not kept."""
    arrays = []
    for seeds in results:
        if any(stored.result.metrics[column[1]].array is None for stored in seeds):
            raise ValueError(f"{column[1]}: kept as a number alone")
        arrays.append(np.mean([array_of(stored, column[1]).astype(np.float64) for stored in seeds], axis=0))
        for stored in seeds:
            stored.forget_arrays()
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"{column[1]}: of other images")
    values = np.stack(arrays)
    if results[0][0].result.metrics[column[1]].array_over == "resamples":
        return values[:, :RESAMPLES].T
    seen = ~np.isnan(values)
    filled = np.where(seen, values, 0.0)
    return resampled(lambda weights: {"mean": weights @ filled.T / (weights @ seen.T)}, values.shape[1], RESAMPLES)[
        "mean"
    ]


FEWEST = 5  # networks of a rank correlation: with four no order has p < 0.05
EXACT = 8  # networks up to which all orders are tried, 40 320
ORDERS = 50_000  # random ones of more networks


class RankCorrelation(NamedTuple):
    """Of a number without labels with linear accuracy, over networks. p: two-sided, by permutation, after Holm over the
    metrics of a set."""

    data: str
    metric: str
    probe: str  # protocol of the accuracy
    networks: int
    rho: float
    p: float


def health_correlations(networks: Leaderboard) -> list[RankCorrelation]:
    """How well each metric of `health` ranks trained networks by linear accuracy on the same images (Spearman), where
    FEWEST networks have both. Of several such protocols of a set, the two that the most networks share."""
    of_set: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for group, result in {stored.result.group: stored.result for stored in networks.results}.items():
        of_set[result.data.name][result.task].append(group)
    correlations = []
    for data, groups in of_set.items():
        pairs = [pair for pair in product(groups["health"], groups["linear"]) if set(pair) <= networks.groups.keys()]
        columns = {pair: _shared_columns(networks, *pair) for pair in pairs}
        (_, probe), chosen = max(
            columns.items(), key=lambda item: max(map(len, item[1].values()), default=0), default=(("", ""), {})
        )
        tested = {metric: spearman(*np.array(values).T) for metric, values in chosen.items()}
        corrected = holm([p for _, p in tested.values()])
        correlations += [
            RankCorrelation(data, metric, probe.partition("/")[2], len(chosen[metric]), rho, p)
            for (metric, (rho, _)), p in zip(tested.items(), corrected, strict=True)
        ]
    return correlations


def _shared_columns(networks: Leaderboard, health: str, probe: str) -> dict[str, list[tuple[float, float]]]:
    """Metric of the last block -> its value and the accuracy of each network with both, where there are enough and they
    differ."""
    main = probe, networks.groups[probe][0]
    shared = {
        metric: [
            (cells[health, metric].mean, cells[main].mean)
            for cells in networks.rows.values()
            if (health, metric) in cells and main in cells
        ]
        for metric in networks.groups[health]
        if "_block" not in metric
    }
    return {
        metric: values
        for metric, values in shared.items()
        if len(values) >= FEWEST and all(len(set(side)) > 1 for side in zip(*values, strict=True))
    }


def spearman(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Spearman's correlation of (C,) and (C,), ties at their mean rank, and its two-sided p: the share of orders of `y`
    with one as large or larger, of all for EXACT values at most, else of ORDERS random ones."""
    from scipy.stats import rankdata

    first, second = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    if len(x) <= EXACT:
        orders = np.array(list(permutations(range(len(x)))))
    else:
        random = np.random.default_rng(0).permuted(np.tile(np.arange(len(x)), (ORDERS - 1, 1)), axis=1)
        orders = np.vstack([np.arange(len(x)), random])
    products = second[orders] @ first
    share = (np.abs(products) >= abs(first @ second) - 1e-9).mean()
    return float(first @ second / np.sqrt(first @ first * (second @ second))), float(share)
