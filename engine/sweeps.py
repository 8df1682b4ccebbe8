"""Is the value that a sweep chose at an edge of its grid, where better ones may lie beyond?"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

EDGE_GAIN = 1.0  # points over the value next to it from which on an edge is worth a warning


def edge_warnings(
    tried: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], score: str, images: int = 0
) -> list[str]:
    """A line for each number that was chosen at an edge of three or more, clearly better than the one next to it.

    tried: settings and, unless a training diverged, their score in percent under the name `score`; chosen: the settings
    of one of them that were swept. Only those that differ in one of these are compared. The least 0 and the least count
    1 are no edges. images: number whose accuracy the score is, of which few need a larger gain, about three standard
    deviations; 0 for other scores.
    """
    least_gain = max(EDGE_GAIN, 100 / sqrt(images) if images else 0.0)
    warnings, names = [], [name for name, value in chosen.items() if name != score]
    for name in names:
        row: dict[Any, Any] = {
            other[name]: other.get(score)
            for other in tried
            if all(other[rest] == chosen[rest] for rest in names if rest != name)
        }
        if len(row) < 3 or isinstance(chosen[name], str):
            continue
        values = sorted(row)
        for edge, inner, kind in ((values[0], values[1], "smallest"), (values[-1], values[-2], "largest")):
            ends_there = kind == "smallest" and (edge == 0 or (edge == 1 and isinstance(edge, int)))
            if chosen[name] != edge or ends_there or row[inner] is None:
                continue
            if (gain := row[edge] - row[inner]) >= least_gain:
                warnings.append(
                    f"{name}={edge:g} was chosen, the {kind} of {len(values)}, by {gain:.1f} points over {inner:g}: "
                    f"{'smaller' if kind == 'smallest' else 'larger'} values may be better still"
                )
    return warnings
