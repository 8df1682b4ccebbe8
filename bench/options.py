"""Where and how networks run: options that the command line and `import bench` share.

Imports nothing but the standard library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how networks run; the defaults are those of the command line."""

    device: str = "auto"  # auto, cpu, cuda or cuda:N (auto)
    # precision of forward passes (auto: float32, but bfloat16 for pretraining on a GPU); float16 only for pretraining
    precision: Literal["auto", "float32", "bfloat16", "float16"] | None = "auto"
    # compile transformer blocks by torch.compile, which needs a compiler and a minute or two, and rounds differently
    compiled: bool = field(default=False, metadata={"flags": ("--compile",)})
    # how images are decoded and resized: exact: PIL, as in the papers; fast: torchvision on uint8 tensors (exact)
    decode: Literal["exact", "fast"] = "exact"
    skip_bad: bool = False  # count unreadable images instead of stopping
    batch_size: int | None = None  # at most this many images in a forward pass of a process (by device)
    workers: int | None = None  # processes that load images (by machine)

    def __post_init__(self) -> None:
        check("Options.", **{name: getattr(self, name) for name in ("device", "precision", "decode")})
        check("Options.", batch_size=self.batch_size, workers=self.workers)


def is_whole_number(value: Any, minimum: int) -> bool:
    """Whether `value` is an integer, not a bool, of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


# Argument -> a check of its value, and what to give instead. engine.settings cannot be used here: none of our packages
# may be imported before `bench.api.commands` has looked for user modules that hide them.
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("protocol", "suite", "kind", "method", "recipe"), (lambda value: isinstance(value, str), "a text")
    ),
    **dict.fromkeys(("name", "statistics"), (lambda value: isinstance(value, str | None), "a text")),
    "settings": (lambda value: isinstance(value, Mapping | None), "a dictionary, such as {'k': (10, 20)}"),
    "options": (lambda value: isinstance(value, Options | None), "bench.Options(...)"),
    "select": (lambda value: value in (None, "holdout", "val"), "'holdout' or 'val'"),
    **dict.fromkeys(
        ("seed", "freeze_first_epochs", "shuffle_window", "export_every", "knn_every", "health_every"),
        (lambda value: is_whole_number(value, 0), "a whole number from 0 on"),
    ),
    "limit": (lambda value: value is None or is_whole_number(value, 1), "a whole number from 1 on"),
    "device": (lambda value: isinstance(value, str), "'auto', 'cpu', 'cuda' or 'cuda:N'"),
    "precision": (
        lambda value: value in (None, "auto", "float32", "bfloat16", "float16"),
        "'auto', 'float32', 'bfloat16' or 'float16'",
    ),
    "decode": (lambda value: value in ("exact", "fast"), "'exact' or 'fast'"),
    "batch_size": (lambda value: value is None or is_whole_number(value, 1), "a whole number from 1 on"),
    "workers": (lambda value: value is None or is_whole_number(value, 0), "a whole number from 0 on"),
}


def check(prefix: str = "", **arguments: Any) -> None:
    """Check arguments of the Python API by name; ValueError, in one line, for the first with an invalid value."""
    for name, value in arguments.items():
        is_right, expected = EXPECTED[name]
        if not is_right(value):
            raise ValueError(f"{prefix}{name}={value!r}: give {expected}")
