"""Mean rank of networks over the protocols that all of them have, with an interval from resampled images.

A resample draws the same validation images for every network and, if protocols share an image set, for every
protocol (engine/tasks.py), so that images that are hard for all networks do not widen the interval.
C networks, N images, R resamples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.reports.leaderboard import Leaderboard
from bench.results.store import StoredResult
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import array_of
from bench.statistics.significance import Column, Key
from engine.printing import counted
from engine.tasks import resampled

RESAMPLES = 1000
NETWORKS = 100  # no intervals for more networks: they need the values of every image of every network


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanRanks:
    """Mean ranks over protocols, and their distribution over resamples.

    means: network -> mean rank of its numbers; 1 is the best, and those tied with a column's best share the mean of its
    first ranks. columns: number of protocols. drawn (R, C): mean ranks of the numbers on resamples, networks in the
    order of `means`; None if the values of single images are not kept.
    """

    means: Mapping[Key, float] = field(default_factory=dict)
    columns: int = 0
    drawn: np.ndarray | None = None

    def text(self, key: Key) -> str:
        """`1.40 [1.20, 2.00]`; "" for a network without a rank."""
        if key not in self.means:
            return ""
        if self.drawn is None:
            return f"{self.means[key]:.2f}"
        ranks = self.drawn[:, list(self.means).index(key)]
        ends = np.quantile(ranks, (LEVEL / 2, 1 - LEVEL / 2))
        low, high = min(ends[0], self.means[key]), max(ends[1], self.means[key])  # which ties may move beyond them
        return f"{self.means[key]:.2f} [{low:.2f}, {high:.2f}]"

    def sentence(self, names: Mapping[Key, str]) -> str:
        """A sentence that states whether there is an overall winner: a network whose mean rank is lower than that of
        each other one on enough resamples to rule out chance (5 %, Bonferroni)."""
        if len(self.means) < 2:
            return ""
        keys = list(self.means)
        best = min(range(len(keys)), key=lambda index: self.means[keys[index]])
        over = f"over the {counted(self.columns, 'protocol')} that all networks have"
        if self.drawn is None:
            return f"{names[keys[best]]} has the lowest mean rank {over}; whether by chance was not tested."
        others = np.delete(self.drawn, best, axis=1)
        not_lower = (self.drawn[:, best, None] >= others).mean(0)
        if not_lower.max() <= LEVEL / 2 / len(others[0]):
            return f"{names[keys[best]]} has the lowest mean rank {over}, beyond chance (5 %, resampled images)."
        return f"No network has the lowest mean rank {over} beyond chance: no overall winner is claimed."


def mean_ranks(networks: Leaderboard) -> MeanRanks:
    """Mean ranks over the main metrics that all networks of a leaderboard have and that paired tests compare.

    Metrics of all images together, such as RankMe, have no paired test and are left out. Empty for fewer than two
    networks, or if they share no such metric.
    """
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
    tied = [np.array([key in networks.ties[column] for key in keys]) for column in columns]
    shared = [_shared_ranks(sign * values[0], level) for values, sign, level in zip(numbers, signs, tied, strict=True)]
    means = dict(zip(keys, np.mean(shared, axis=0).tolist(), strict=True))
    drawn = None
    if len(keys) <= NETWORKS:
        by_group_and_key: dict[tuple[str, Key], list[StoredResult]] = defaultdict(list)
        for stored in networks.results:
            if stored.result.status == "ok":
                by_group_and_key[stored.result.group, stored.result.checkpoint.key].append(stored)
        try:
            values = [_drawn_values([by_group_and_key[column[0], key] for key in keys], column) for column in columns]
            fewest = min(map(len, values))
            drawn = _mean_rank([column[:fewest] for column in values], signs)
        except ValueError:  # only the number was kept, or the images differ
            drawn = None
    return MeanRanks(means=means, columns=len(columns), drawn=drawn)


def _shared_ranks(values: np.ndarray, tied: np.ndarray) -> np.ndarray:
    """Ranks of values (C,), the lowest first, of which the `tied` (C,) bool share the mean of the first ranks."""
    from scipy.stats import rankdata

    ranks, count = np.full(len(values), (1 + tied.sum()) / 2), tied.sum()
    ranks[~tied] = count + rankdata(values[~tied])
    return ranks


def _mean_rank(columns: Sequence[np.ndarray], signs: Sequence[int]) -> np.ndarray:
    """Mean over `columns`, each (R, C), of the ranks within each row -> (R, C). signs: -1 if higher is better."""
    from scipy.stats import rankdata

    return np.mean([rankdata(sign * values, axis=1) for values, sign in zip(columns, signs, strict=True)], axis=0)


def _drawn_values(results: Sequence[Sequence[StoredResult]], column: Column) -> np.ndarray:
    """The metric of each network, averaged over its seeds, on resamples of the images -> (R, C).

    results: those of each network, one per seed. ValueError if the values of images were not kept, or if the networks
    were evaluated on different images.
    """
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
    is_valid = ~np.isnan(values)
    filled = np.where(is_valid, values, 0.0)
    images = values.shape[1]
    means = resampled(lambda weights: {"mean": weights @ filled.T / (weights @ is_valid.T)}, images, RESAMPLES)
    return means["mean"]
