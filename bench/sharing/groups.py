"""What is shared of one checkpoint: its results, a group for each image set, protocol and setting; its licence; and
texts without the folders of this machine.

Licences of weights are named by SPDX, as the source of the weights names them or as the user does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from bench.leaderboards.tables import Cell, leaderboard_of
from bench.published.values import SETS
from bench.results.record import DataUsed, Result
from engine.files import digest

# The Hub's names of licences that weights of ViTs have (docs/hub/repositories-licenses); others are `other`.
LICENCES = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "openrail", "gpl-3.0", "agpl-3.0"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}
UNKNOWN = "unknown"


def spdx_name(text: str, option: str) -> str:
    """A licence as SPDX spells it: `apache-2.0` is `Apache-2.0`. ValueError, with the `option`, for other names."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        raise ValueError(
            f"{option} {text}: SPDX knows no such licence; write a name of spdx.org/licenses, such as apache-2.0, or "
            "LicenseRef-NAME for one of your own"
        ) from None


def licence_of(facts: Mapping[str, Any], given: str) -> str:
    """The licence of an export; "" where it is unknown. ValueError where the source of the weights says another one.

    facts: of the export. given: what the user says; "": nothing.
    """
    source = str(facts.get("licence") or "")
    source = "" if source == UNKNOWN else source
    if source and given and source.lower() != given.lower():
        raise ValueError(f"--licence {given}: the source of these weights says {source}; leave the option out")
    return given or source


def hub_names(licence: str) -> dict[str, str]:
    """What the Hub's header says of a licence: `license`, and `license_name` of those that it does not know."""
    known = licence.lower() in LICENCES or not licence
    return {"license": licence.lower() or UNKNOWN} if known else {"license": "other", "license_name": licence}


IMAGENET = "ILSVRC/imagenet-1k"  # on the Hub
HUB_ID, HUB_FORM = r"[A-Za-z0-9][\w.-]*/[\w.-]+", "ORG/NAME, such as cifar10=uoft-cs/cifar10"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What only the user knows of what is published."""

    models: Mapping[str, str] = field(default_factory=dict)  # name of a checkpoint -> its id on the Hub, ORG/NAME
    datasets: Mapping[str, str] = field(default_factory=dict)  # name of an image set -> its id on the Hub
    source: str = ""  # URL of where results, logs and commands are published
    organization: str = ""  # who evaluated
    licences: Mapping[str, str] = field(default_factory=dict)  # name of a checkpoint -> SPDX's name of its licence
    verified_by: Mapping[str, str] = field(default_factory=dict)  # name of a checkpoint -> where its authors confirm it

    def dataset(self, data: DataUsed) -> str:
        """Id on the Hub: as the user says, or of images that are known by their numbers; "" where there is none."""
        known = IMAGENET if dict(data.images) == dict(SETS["imagenet"].images) else ""
        return self.datasets.get(data.name, known)


def publication_from(
    models: Sequence[str],
    datasets: Sequence[str],
    source: str,
    organization: str = "",
    licences: Sequence[str] = (),
    verified_by: Sequence[str] = (),
) -> Publication:
    """What options say. ValueError names the option and what to write."""
    if source and not re.fullmatch(r"https?://\S+", source):
        raise ValueError(f"--source {source}: write a URL, such as https://github.com/me/results")
    return Publication(
        models=_named(models, "--model-id", HUB_FORM, HUB_ID),
        datasets=_named(datasets, "--hub-dataset", HUB_FORM, HUB_ID),
        source=source,
        organization=organization,
        licences={
            name: spdx_name(licence, "--licence")
            for name, licence in _named(licences, "--licence", "SPDX, such as mae-s=apache-2.0", "[^=]+").items()
        },
        verified_by=_named(
            verified_by, "--verified-by", "URL, such as mae-s=https://doi.org/10.5281/...", r"https?://\S+"
        ),
    )


def _named(texts: Sequence[str], option: str, form: str, pattern: str) -> dict[str, str]:
    """NAME=VALUE texts. ValueError, with the form to write, for a value that does not match the pattern."""
    values = {}
    for text in texts:
        match = re.fullmatch(f"(.+?)=({pattern})", text)
        if not match:
            raise ValueError(f"{option} {text}: write NAME={form}")
        values[match[1]] = match[2]
    return values


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """The results of one checkpoint in one group of the board."""

    name: str  # `digits/knn@dino[limit=100]`
    results: tuple[Result, ...]  # one for each seed
    cells: Mapping[str, Cell]  # metric -> mean over seeds; without deviations
    caveats: tuple[str, ...]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def main(self) -> str:
        """The metric that the task names first."""
        return next(iter(self.cells))

    @property
    def date(self) -> str:
        """When the newest of the results ended."""
        return max(result.date for result in self.results)

    @property
    def is_plain(self) -> bool:
        """Whether it is the protocol as it is, on all images: a number to hold against others'."""
        return self.first.variant in ((), (f"v{self.first.protocol.version}",))


def shared_groups(results: Iterable[Result]) -> list[SharedGroup]:
    """The groups of one checkpoint's results that did not fail, a protocol itself before its variants."""
    good = [result for result in results if result.status == "ok" and result.metrics]
    leaderboard = leaderboard_of(good)
    assert len(leaderboard.rows) <= 1, "results of several checkpoints"
    groups = []
    for group, metrics in leaderboard.groups.items():
        (row,) = leaderboard.rows.values()
        cells = {metric: row[group, metric] for metric in metrics}
        cells = {metric: cell for metric, cell in cells.items() if cell.higher_is_better is not None}
        if cells:
            own = sorted((result for result in good if result.group == group), key=lambda result: result.seed)
            groups.append(SharedGroup(name=group, results=tuple(own), cells=cells, caveats=leaderboard.caveats[group]))
    return sorted(groups, key=lambda group: (group.first.data.name, group.first.protocol.name, not group.is_plain))


# An absolute path of two parts or more; not the path of a URL, and not the second half of a word, as in ViT-S/16.
ABSOLUTE = re.compile(r"(?<![\w/~.\\-])/(?!/)(?:[^\s/:'\"`,;|()<>\[\]{}?&]+/)+[^\s/:'\"`,;|()<>\[\]{}?&]*")
LOCAL = re.compile(r"file://(?=/)")


def without_folders(value: Any) -> Any:
    """A JSON value in which only the last part of absolute paths is kept: `path-3f2a91bc/cifar10`.

    The eight digits are of the SHA-256 of the folder before it, so that different folders stay different.
    """
    if isinstance(value, str):
        return ABSOLUTE.sub(_shortened, LOCAL.sub("", value))
    if isinstance(value, dict):
        return {without_folders(key): without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return value


def _shortened(match: re.Match[str]) -> str:
    path = PurePosixPath(match[0])
    return f"path-{digest(str(path.parent))[:8]}/{path.name}"
