"""Refusals of wrong arguments: ValueErrors of one line."""

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
    """The line with which an image set is refused; it begins with the URL."""
    message = refusal(open_set, url, split)
    assert message.startswith(url), message
    return message
