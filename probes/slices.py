"""A long array, a few rows at a time."""

from collections.abc import Iterator


def row_slices(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows, 1 or more, that cover range(count); the last one may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
