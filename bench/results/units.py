"""How a number is written in its unit: percentages as the field does, others with three digits that count."""

from math import floor, log10


def decimals(value: float, unit: str) -> int:
    """Digits behind the point: of a percentage 2, below 1 % 4; otherwise as many as show three digits."""
    if value == 0:
        return 2
    if unit == "%":
        return 2 if abs(value) >= 1 else 4
    return max(0, 2 - floor(log10(abs(value))))


def number_text(value: float, unit: str) -> str:
    """`97.20` for a percentage, `0.0123 s`, `1412 MB`, `0.731` without a unit."""
    return f"{value:.{decimals(value, unit)}f}{suffix(unit)}"


def suffix(unit: str) -> str:
    """What follows a number; a percentage stands alone."""
    return f" {unit}" if unit not in ("%", "") else ""


def interval_decimals(value: float, unit: str) -> int:
    """Digits behind the point of the ends of the interval around a value: of percentages and points 1."""
    return 1 if unit == "%" else decimals(value, unit)
