"""The recorded outputs of the official codes: files of tests/golden, or of another folder of its layout in GOLDEN_ROOT.

Tests take every size, option and name of a case from what lies there, so that other recordings pass through them too.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any, NoReturn

import pytest
from safetensors import safe_open
from torch import Tensor

OURS = Path(__file__).parent / "golden"
ROOT = Path(os.environ.get("GOLDEN_ROOT", OURS))
ELSEWHERE = "GOLDEN_ROOT" in os.environ  # recordings of other sizes and options than those of tests/golden


def file_of(path: str) -> Path:
    """The file of a recording; ours of a kind that another GOLDEN_ROOT has none of."""
    return (ROOT if (ROOT / path).parent.is_dir() else OURS) / path


@cache
def tensors(path: str) -> dict[str, Tensor]:
    """All tensors of a file such as "mae/mae_step.safetensors". They are shared: do not write to them."""
    with safe_open(file_of(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


@cache
def facts(path: str) -> Any:
    """Options and numbers of a recording: a JSON file, or the JSON in the metadata of a file of tensors."""
    if path.endswith(".json"):
        return json.loads(file_of(path).read_text())
    with safe_open(file_of(path), "pt") as file:
        return json.loads(file.metadata()["config"])


def under(recorded: Mapping[str, Tensor], prefix: str, new: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, with `new` in its place."""
    return {new + name.removeprefix(prefix): tensor for name, tensor in recorded.items() if name.startswith(prefix)}


def matches(pattern: str, names: Iterable[str]) -> list[re.Match[str]]:
    """Matches of the names that fit the whole pattern: tests find their cases by the names in a recording."""
    return [match for name in names if (match := re.fullmatch(pattern, name))]


def absent(recording: str) -> NoReturn:
    """Skip the test under another GOLDEN_ROOT, which may lack recordings; fail it under ours, which may not."""
    message = f"{recording}: not recorded in {ROOT}"
    pytest.skip(message) if ELSEWHERE else pytest.fail(message)


def depth_of(names: Iterable[str]) -> int:
    """Blocks of a network with parameters `blocks.N.*` of these names."""
    return 1 + max(int(match[1]) for match in matches(r"(?:.*[./])?blocks\.(\d+)\..*", names))


def steps_per_epoch(epochs: Iterable[float]) -> int:
    """The fewest steps for which every one of these fractional epochs begins with a step."""
    return lcm(*(Fraction(epoch).limit_denominator(10_000).denominator for epoch in epochs))
