"""A record: the results and logs of a board in a folder that can be published (README, below, lists them).

Results and descriptions of checkpoints are copied, without the folders of the machine; all other files are derived from
them. A check compares the sums, computes every metric and interval from the arrays again, and compares leaderboard.csv.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from bench.reports.card import read_config, without_folders
from bench.reports.leaderboard import TEXT_FORMATS, leaderboard_of, leaderboard_with_ties
from bench.results.record import (
    BY_NAME,
    CheckpointUsed,
    MetricRecord,
    Result,
    images_seen,
    npz_of,
    read_arrays,
    read_result,
    result_files,
)
from bench.results.store import StoredResult, regrouped
from bench.run.suites import catalogue
from bench.statistics import intervals
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import COST, is_export
from checkpoints.runs import EXPORT, RUN, is_run
from downstream.metrics.scores import weighted_ap, weighted_scores
from engine.errors import UserError, in_one_line
from engine.files import (
    folder_atomic,
    read_json,
    read_regular,
    refuse_irregular_files,
    sha256_of_file,
    write_atomic,
)
from engine.machine import git_commit, installed
from engine.printing import counted
from engine.tasks import Score, resampled
from pretrain.loop.records import LOG

TOOL = "ssl-vit-bench"  # name of the package
ABOUT, SUMS = "record.json", "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"  # made by ssh-keygen -Y sign
CHECKPOINTS = "checkpoints"  # the folder of their descriptions
OF_EXPORT, OF_RUN = ("config.json", COST), (RUN, LOG)  # files of an export and of its pretraining that are copied
LOG_LINES = 40  # enough to draw a curve; the logs of long trainings would be most of a record
LEFT_OUT = "confidence"  # of Result.arrays: no number, table or page needs it, and it is half of a k-NN result's size
README = """# Record of a leaderboard

Made by `bench record`. Every number of [leaderboard.md](leaderboard.md) comes from a file of `results/`, which says
what was measured how. `path-3f2a91bc/cifar10` stands for a folder of the measuring machine whose name has that digest.

| file | what |
|---|---|
| `leaderboard.md`, `.csv`, `.tex` | the tables |
| `results/` | a JSON file for each result, with its values for every image (`.npz`) and the log of a failure (`.log`) |
| `checkpoints/` | what each checkpoint is, and the log of its pretraining (at most 40 losses); no weights |
| `references.bib` | BibTeX of every protocol and method used |
| `SHA256SUMS` | of every file: `sha256sum -c SHA256SUMS` |

`bench record --check .` compares the sums, computes every number again from its values for the images, and compares
`leaderboard.csv` with them.
"""


def write_record(out: Path, folder: Path) -> None:
    """Write the record of the results in `out` to `folder`, atomically.

    ValueError if `folder` holds anything but an older record.
    """
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("to", "the folder holds something that is not a record: choose a new one", folder)
    with folder_atomic(folder) as temporary:
        for name, content in copied_files(out):
            write_atomic(temporary / name, content)
        for name, text in derived_files(temporary).items():
            write_atomic(temporary / name, text)
        sums = {name: sha256_of_file(temporary / name) for name in sorted(_files(temporary))}
        write_atomic(temporary / SUMS, "".join(f"{total}  {name}\n" for name, total in sums.items()))


def take_up_record(folder: Path, out: Path) -> None:
    """Copy the results of a record to `out`, where they count as done, with the descriptions of their checkpoints.

    What `out` has already stays, so a record of `out` contains the numbers of both. ValueError if `folder` is not a
    record, or not what its sums say.
    """
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} is not a record, as it has no {ABOUT}")
    refuse_irregular_files(folder)
    if problems := list(_sum_differences(folder)):
        raise ValueError(f"{folder}: {problems[0]}; `bench record --check` lists all")
    names = [str(path.relative_to(folder)) for path in result_files(folder)]
    for name in names:
        if (out / name).exists():
            continue
        for ending in (".npz", ".log", ".json"):  # the .json last, as a result without its arrays would count as done
            file = Path(name).with_suffix(ending)
            if (folder / file).exists():
                write_atomic(out / file, read_regular(folder / file))
    for name in sorted(_files(folder)):
        if name.startswith(f"{CHECKPOINTS}/") and not (out / name).exists():
            write_atomic(out / name, read_regular(folder / name))


def copied_files(out: Path) -> Iterator[tuple[str, bytes]]:
    """(path in the record, content) of each copied file, and of record.json. ValueError for an unreadable result."""
    yield ABOUT, json_of({"format": 2, "tool": TOOL, "version": _version()})
    used: dict[Key, CheckpointUsed] = {}
    for path in result_files(out):
        try:
            result = read_result(path)
        except ValueError as error:
            raise ValueError(f"{error}; repair or delete it") from error
        used[result.checkpoint.key] = result.checkpoint
        left_out = LEFT_OUT if LEFT_OUT in result.arrays else ""
        for file in (path, path.with_suffix(".npz"), path.with_suffix(".log")):
            if file.exists():
                yield str(file.relative_to(out)), _public_content(file, left_out, result.arrays_sha256)
    for checkpoint in used.values():
        for path in _files_of_checkpoint(out, checkpoint):
            yield f"{CHECKPOINTS}/{checkpoint.unique_name}/{path.name}", _public_content(path)


def _files_of_checkpoint(out: Path, used: CheckpointUsed) -> list[Path]:
    """OF_EXPORT and OF_RUN of its export in OUT/exports, at the path in the result if its digest is still the same, or
    of an earlier record in OUT."""
    recorded = out / CHECKPOINTS / used.unique_name
    for folder in (out / "exports" / used.unique_name, Path(used.source), recorded):
        if is_export(folder) and read_config(folder)["vit_export"].get("digest") == used.digest:
            is_trained_here = folder.name.startswith(EXPORT) and is_run(folder.parent)
            run = folder if folder == recorded else folder.parent if is_trained_here else None
            files = [folder / name for name in OF_EXPORT] + [run / name for name in OF_RUN if run]
            return [path for path in files if path.is_file()]
    return []


def _public_content(path: Path, left_out: str = "", arrays_sha256: str = "") -> bytes:
    """A file's content without the folders of this machine; arrays are unchanged, and one of a result may be left out.

    Logs of trainings are thinned, and exports lack the activations by which they are checked, which need the weights.
    ValueError for arrays that are not those of the result (`Result.arrays_sha256`).
    """
    if path.suffix == ".json":
        content = without_folders(read_json(path))
        content.get("vit_export", {}).pop("fingerprint", None)
        if left_out:
            content["arrays"].remove(left_out)
            content["arrays_sha256"] = ""
        return json_of(content)
    if path.suffix == ".npz":
        arrays = read_arrays(path.with_suffix(".json"), arrays_sha256) if left_out or arrays_sha256 else {}
        kept = {name: values for name, values in arrays.items() if name != left_out}
        return npz_of(kept) if left_out else read_regular(path)
    text = read_regular(path).decode("utf-8", "replace")
    return without_folders(thinned_log(text) if path.name == LOG else text).encode()


def thinned_log(text: str) -> str:
    """The log of a training with at most LOG_LINES lines of losses, evenly spaced, and all other lines.

    The last line of losses, which has the number of updates, and lines with warnings are kept. Numbers have 4 digits.
    """
    lines = text.splitlines(keepends=True)
    of_losses = [number for number, line in enumerate(lines) if '"updates"' in line and '"warnings"' not in line]
    every = ceil(len(of_losses) / LOG_LINES) or 1
    left_out = set(of_losses) - set(of_losses[::-every])
    kept = "".join(line for number, line in enumerate(lines) if number not in left_out)
    return re.sub(r"(?<=: )\d+\.\d{3,}(e-?\d+)?", lambda number: f"{float(number[0]):.4g}", kept)


def json_of(value: Any) -> bytes:
    """Indented JSON, in which a list or object of plain values takes one line. Strings have no line breaks in JSON."""
    text = json.dumps(value, indent=1)
    inner = r"([\[{])\n *([^\[\]{}]*?)\n *([\]}])"
    return (re.sub(inner, lambda match: match[1] + re.sub(r"\n *", " ", match[2]) + match[3], text) + "\n").encode()


def _files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names - {SUMS, SIGNATURE}


def stored_results(folder: Path) -> list[StoredResult]:
    """The results of a record. ValueError for a file that cannot be read."""
    return [StoredResult(path=path, result=read_result(path)) for path in result_files(folder)]


def recorded_results(folder: Path) -> tuple[list[StoredResult], list[str]]:
    """The results of a record as `regrouped`, and a line for each that does not count as it is. ValueError as above."""
    return regrouped(stored_results(folder))


def _version() -> str:
    """`0.1.0`, in a checkout with its commit."""
    return f"{installed(TOOL)}, git {commit}" if (commit := git_commit()) else str(installed(TOOL))


def derived_files(folder: Path) -> dict[str, str]:
    """Path in the record -> content of each file that is derived from its results and the other copied files."""
    results, lines = recorded_results(folder)
    # No cache is written into the record, and none in it is trusted.
    leaderboard = leaderboard_with_ties(results, PairedTestCache(), [line.replace(f"{folder}/", "") for line in lines])
    files = {name: text_of(leaderboard) for name, text_of in TEXT_FORMATS.values()}
    return files | {"references.bib": references(stored.result for stored in results), "README.md": README}


def check_record(folder: Path) -> Iterator[str]:
    """Check that a record agrees with its sums, arrays and results; a line for each difference.

    ValueError if the folder is not a record.
    """
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} is not a record, as it has no {ABOUT}; bench record OUT --to DIR makes one")
    yield from _sum_differences(folder)
    try:
        refuse_irregular_files(folder)
        results = stored_results(folder)
    except ValueError as error:
        yield f"{error}".replace(f"{folder}/", "")
        return
    yield from number_differences(folder, results)  # before the table, which differs because of it
    name, text_of = TEXT_FORMATS["csv"]
    text = text_of(leaderboard_of(stored.result for stored in regrouped(results)[0]))
    if (folder / name).is_file() and read_regular(folder / name) != text.encode():
        yield f"{name}: not what the results give"


def _sum_differences(folder: Path) -> Iterator[str]:
    """A line for each file that is missing, added or changed according to SHA256SUMS."""
    if not (folder / SUMS).is_file():
        yield f"{SUMS}: missing"
        return
    lines = read_regular(folder / SUMS).decode("utf-8", "replace").splitlines()
    sums = {name: total for total, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder)
    for name in sorted(sums.keys() | present):
        if name not in present:
            yield f"{name}: missing"
        elif name not in sums:
            yield f"{name}: added later ({SUMS} does not list it)"
        elif sha256_of_file(folder / name) != sums[name]:
            yield f"{name}: changed later ({SUMS} has another digest)"


MALFORMED = (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, IndexError)  # raised by odd values


def number_differences(folder: Path, results: Sequence[StoredResult]) -> Iterator[str]:
    """A line for each metric or interval that the arrays of its result do not give, beginning with the result's path.

    Every result that `bench run` writes passes, so a line means an edited or damaged file.
    """
    for stored in results:
        result, lines = stored.result, []
        try:
            arrays = stored.arrays if stored.path.with_suffix(".npz").exists() else {}
            for name, metric in result.metrics.items():
                lines += [f"{name} {problem}"] if (problem := _difference(result, metric, arrays)) else []
            if not result.protocol.plugin:  # whose arrays of these names may mean anything
                lines += _dense_differences(result, arrays)
        except MALFORMED as error:
            lines.append(f"its parts do not fit together ({type(error).__name__}: {in_one_line(error)})")
        yield from (f"{stored.path.relative_to(folder)}: {line}" for line in lines)
        stored.forget_arrays()


def _near(values: Any, others: Any) -> bool:
    """Whether these are the same numbers, maybe from another processor or version of a library."""
    return np.shape(values) == np.shape(others) and np.allclose(values, others, 1e-6, 1e-6, equal_nan=True)


def _difference(result: Result, metric: MetricRecord, arrays: Mapping[str, np.ndarray]) -> str:
    """How a metric differs from what its array gives; "" if it does not, or has no array."""
    interval, images = None, images_seen(result.data, result.limit)
    if metric.array and metric.array_over == "images":
        values = arrays[metric.array]
        if values.shape != (images,) or not intervals.averages_to(values, metric.value, metric.unit):
            return f"is not the mean of its values for {counted(images, 'image')}"
        interval = intervals.of_mean(values, metric.unit)[0]
    elif metric.array and not np.isnan(arrays[metric.array]).all():
        interval = intervals.of_resampled(arrays[metric.array], metric.resampled_units or images)[0]
    return "" if _near(interval or (), metric.interval or ()) else f"has another interval than its values, {interval}"


def _dense_differences(result: Result, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Check dense metrics, and their values on resamples, against the areas or detections of the images."""
    images = images_seen(result.data, result.limit)
    areas = [values for name, values in arrays.items() if re.fullmatch(r"areas(_\d+)?", name)]
    score: Score
    if areas:
        protocol = catalogue(suite=result.protocol.name).protocols.get(result.protocol.name)
        own = getattr(protocol.task, "weighted_metrics", None) if protocol else None  # such as 0 for absent classes
        score = partial(own, *areas) if own else partial(weighted_scores, areas)
    elif "box_hits" in arrays:
        score = partial(weighted_ap, arrays)
    else:
        return
    whole = score(np.ones((1, images)))
    lengths = [len(values) for name, values in arrays.items() if name.endswith("_resampled")]
    drawn = resampled(score, images, most=max(lengths, default=1))
    for name in whole.keys() & result.metrics.keys():
        given = arrays.get(f"{name}_resampled", drawn[name])
        if not _near(whole[name][0], result.metrics[name].value) or not _near(given, drawn[name]):
            yield f"{name} is not what the areas or detections give, {float(whole[name][0]):.4f}"


TABLE = Path(__file__).parents[1] / "references.bib"


@cache
def bibtex_entries() -> dict[str, tuple[str, frozenset[str]]]:
    """Key of each BibTeX entry -> its text, and the keywords for which it is cited."""
    table = {}
    for text in re.split(r"^(?=@)", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        words = re.search(r"keywords = {(.*)}", text)
        assert words, text
        table[text.partition("{")[2].partition(",")[0]] = text.rstrip() + "\n", frozenset(words[1].split(", "))
    return table


def cited(words: Iterable[str]) -> list[str]:
    """Keys of the BibTeX entries that have any of the words as a keyword, in the order of references.bib."""
    return [key for key, (_, keywords) in bibtex_entries().items() if keywords & set(words)]


def references(results: Iterable[Result]) -> str:
    """BibTeX entries of this tool and of the protocols, methods, intervals and tests behind these results."""
    words = {"bench", "timm", "paired", "interval-binomial", "interval-percentiles"}
    for result in results:
        used = result.checkpoint
        words |= {f"task-{result.task}", result.protocol.name.partition("@")[2].split("_")[0], used.method}
        words |= set(re.findall("[a-z0-9]+", used.source.lower())) if used.method in BY_NAME else set()
    return "\n".join(bibtex_entries()[key][0] for key in cited(words))
