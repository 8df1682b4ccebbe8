"""How mmseg, mmdet, mmengine and mmcv are brought in: with operators in place, and without what they print.

They take four seconds and print notes about optional packages. Everything here that imports them is imported inside
`with quiet_libraries():` by a task that runs, never by listing tasks.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from downstream.models import operators
from engine.optional import OPTIONAL, require

PACKAGES = ("mmengine", "mmcv", "mmseg", "mmdet")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """A block in which the mm libraries find operators and print nothing, nor do loggers that they make in it."""
    require(*PACKAGES, "faster_coco_eval")
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operators.install()
        yield


def libraries_used() -> dict[str, str]:
    """Package -> version, and which operators mmcv computes with, as facts of a result."""
    found = {"mmcv operators": str(operators.which())}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[OPTIONAL[package][0]] = version(OPTIONAL[package][0])
    return found
