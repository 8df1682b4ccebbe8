"""From a kind of picture and what to show to files. Every file of bench/reporting/kinds/ is a kind."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.cli.settings import changed, read_changes
from bench.reporting.panels import Format, encoded
from bench.reporting.saved_pictures import PictureRecord
from bench.reporting.viewers import PictureRequest
from engine.files import write_atomic
from engine.printing import did_you_mean

KINDS = {path.stem.replace("_", "-"): path for path in sorted((Path(__file__).parent / "kinds").glob("[!_]*.py"))}


def kind_module(kind: str) -> ModuleType:
    """The file of a kind. ValueError gives the choices."""
    if kind not in KINDS:
        raise ValueError(f"no kind of picture is called {kind!r}{did_you_mean(kind, list(KINDS))}")
    return importlib.import_module(f"bench.reporting.kinds.{KINDS[kind].stem}")


def settings_class(kind: str) -> type:
    """The frozen dataclass of a kind's settings, which has `pictures(shown)`: the one that its file defines."""
    module = kind_module(kind)
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return next(each for each in own if hasattr(each, "pictures"))


def chosen_kind(kind: str, texts: Sequence[str]) -> Any:
    """The kind's settings with every `NAME=VALUE` of `texts`. ValueError for one that does not fit."""
    changes = read_changes(texts, "NAME=VALUE", "layer=-2")
    return changed(settings_class(kind)(), {change.name: change for change in changes})


def draw_pictures(kind: Any, shown: PictureRequest, out: Path, forms: Sequence[Format]) -> Iterator[Path]:
    """Draw the pictures of a kind's settings into `out`, each in every format; the paths of the files, as written."""
    for picture in kind.pictures(shown):
        digests = {each.export.digest: each.name for each in shown.checkpoints}
        record = PictureRecord(kind=picture.name, note=picture.note, checkpoints=digests)
        for form in forms:
            path = out / f"{picture.name}.{form}"
            write_atomic(path, encoded(picture, form, record))
            yield path
