"""Result files of schema 1, which hold metrics as plain numbers: what these are follows from their names.

The one place where a name means something. Numbers are in percent. `_std`: a deviation. `loss`, `error`: better when
lower. `_bestT`: the best of several temperatures on the validation images.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

LOWER_IS_BETTER = ("loss", "error")
CHOSEN_ON_VAL = "_bestT"
DEVIATION = "_std"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a file of schema 1 says of its metrics.

    per_image: names of the arrays over images in the `.npz` file, of which some are metrics. resampled: metrics whose
    values on resampled images are there, as `<metric>_resampled`.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    per_image: tuple[str, ...] = ()
    resampled: tuple[str, ...] = ()


def as_schema_2(value: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a schema 1 file as that of schema 2. ValueError, with the field, for a wrong type."""
    numbers = msgspec.convert(value, Numbers)
    metrics = {name: _metric(name, numbers) for name in numbers.metrics}
    others = [name for name in numbers.per_image if name not in metrics]
    return {**value, "schema": 2, "metrics": metrics, "arrays": others}


def _metric(name: str, numbers: Numbers) -> dict[str, Any]:
    is_deviation = name.endswith(DEVIATION)
    found = {
        "value": numbers.metrics[name],
        "unit": "%",
        "higher_is_better": None if is_deviation else not name.endswith(LOWER_IS_BETTER),
        "interval": numbers.intervals.get(name),
        "chosen_on_val": name.endswith(CHOSEN_ON_VAL),
        "deviation_of": name.removesuffix(DEVIATION) if is_deviation else None,
    }
    if name in numbers.resampled:
        return found | {"array": f"{name}_resampled", "array_over": "resamples"}
    return found | {"array": name} if name in numbers.per_image else found
