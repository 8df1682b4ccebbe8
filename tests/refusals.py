"""Refusals of what a user gave: ValueErrors of one line."""

from collections.abc import Callable
from typing import Any

import pytest

from imagesets.sets import open_set


def refusal(work: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """The one line with which a call refuses its arguments."""
    with pytest.raises(ValueError) as error:
        work(*arguments, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def set_refusal(url: str, split: str = "train") -> str:
    """The same of opening an image set; the line begins with its URL."""
    told = refusal(open_set, url, split)
    assert told.startswith(url), told
    return told
