"""`bench explain`: which settings of two results differ, and how much of their difference each setting explains.

Each setting gets its Shapley value: the change of the number when this setting is changed, averaged over the orders in
which the settings of A can be turned into those of B. All orders are used for up to MAX_IN_ALL_ORDERS settings,
otherwise one order and its reverse. The values add up to the whole difference; as averages of differences on the same
images they have paired intervals.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from bench.cli.options import EvaluationOptions
from bench.cli.output import table
from bench.effects.variations import (
    RUN_SETTINGS,
    difference_text,
    evaluate_variations,
    main_metric,
    mean_score,
    paired_test,
    protocols_in,
    score_of,
)
from bench.results.record import Result, check_folder, read_result, short, suffix
from bench.results.store import StoredResult, read_results
from bench.statistics.paired import PairedTest
from engine.printing import did_you_mean
from engine.tasks import settings_of

MAX_IN_ALL_ORDERS = 4  # settings; 4 need 16 runs, one for each subset
Changes = Mapping[str, tuple[Any, Any]]  # name of a setting or fact -> its values in A and B


def find_result(word: str, out: Path | None, checkpoint: str | None = None) -> StoredResult:
    """Find a result by its file, or in a folder by its group, protocol, variant or file stem.

    checkpoint: only results of this one. ValueError, with suggestions, if there is no such result or there are several.
    """
    if word.endswith(".json") and Path(word).is_file():
        return StoredResult(path=Path(word), result=read_result(Path(word)))
    if not out:
        raise ValueError(f"{word}: no such result file; give one, or --out DIR and the name of a result in it")
    check_folder(out)
    matches, groups, checkpoints = [], set(), set()
    for stored in read_results(out)[0]:
        used, group = stored.result.checkpoint, stored.result.group
        checkpoints |= {used.name, used.unique_name}
        if checkpoint not in (None, used.name, used.unique_name):
            continue
        groups.add(group)
        names = (group, group.partition("/")[2], " ".join(stored.result.variant), stored.path.stem)
        if word in names and stored.result.status == "ok":
            matches.append(stored)
    if len(matches) == 1:
        return matches[0]
    if matches:
        paths = " ".join(str(stored.path) for stored in matches)
        raise ValueError(f"{word!r} is the name of {len(matches)} results: give --name NAME, or one of {paths}")
    if word in checkpoints:
        raise ValueError(
            f"{word!r} is a checkpoint: name two of its results and --name {word}; bench compare compares checkpoints"
        )
    raise ValueError(f"{out} has no result {word!r}{did_you_mean(word, sorted(groups))}")


def differences(first: Result, second: Result) -> tuple[Changes, Changes]:
    """The differences between two results of one task.

    Returns:
        Differences in settings, whose effect `explain` can measure; and in other facts, such as library versions.

    Raises:
        ValueError: for results of different tasks.
    """
    if first.task != second.task:
        raise ValueError(f"{first.task} and {second.task} are different tasks; `explain` takes two results of one task")
    first_settings, second_settings = (
        _all_settings(result) | {name: getattr(result, name) for name in RUN_SETTINGS} for result in (first, second)
    )
    settings = _unequal(first_settings, second_settings)
    if first.checkpoint.digest != second.checkpoint.digest:
        settings["checkpoint"] = (first.checkpoint.unique_name, second.checkpoint.unique_name)
    if not (first.random or second.random):
        settings.pop("seed", None)
    facts = _unequal(_other_facts(first), _other_facts(second))
    if first.protocol.name != second.protocol.name:
        facts.pop("protocol version", None)
    return settings, facts


def _unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> both values, for values of `first` that differ in `second` (None where it has none)."""
    return {name: (value, second.get(name)) for name, value in first.items() if value != second.get(name)}


def _other_facts(result: Result) -> dict[str, Any]:
    """Facts, other than settings that a run can change, on which a number may depend."""
    facts: dict[str, Any] = {f"{split} images": digest[:8] for split, digest in result.data.fingerprints.items()}
    facts |= {name: getattr(result, name) for name in ("limit", "skipped", "device", "compiled")}
    facts |= {f"version of {name}": version for name, version in result.versions.items()}
    return facts | {"protocol version": result.protocol.version}


def _all_settings(result: Result) -> dict[str, Any]:
    """All settings of a result; settings that the task gained later have their defaults."""
    task = protocols_in(result.protocol.name)[0].task
    defaults = {entry.name: entry.default for entry in fields(task) if entry.default is not MISSING}
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return as_json | dict(result.settings)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one setting in the difference between two results."""

    name: str
    values: tuple[Any, Any]  # of A and of B
    share: PairedTest  # the Shapley value
    alone: float  # change of the number if A gets this setting only
    last: float  # change of the number if all other settings are B's already


def explain(
    options: EvaluationOptions, changed: Changes, references: Sequence[str] = ()
) -> tuple[list[Share], PairedTest]:
    """Measure the share of each changed setting in the difference B - A.

    Args:
        options: the evaluation of A (`options_matching`).
        changed: setting -> values of A and B, from `differences`.
        references: of the networks of A and B, if these differ.

    Returns:
        The shares, the largest first, and the whole difference as measured.

    Raises:
        ValueError: if a run fails.
    """
    texts = {name: f"{name}={_as_text(after)}" for name, (_, after) in changed.items()}
    if "checkpoint" in texts:
        if len(references) != 2:
            raise ValueError("the two results are of different weights: give --checkpoint A B")
        texts["checkpoint"] = f"checkpoint={references[1]}"
    names = sorted(changed)
    orders = list(permutations(names)) if len(names) <= MAX_IN_ALL_ORDERS else [tuple(names), tuple(reversed(names))]
    # Subsets of settings that have B's values: those met in an order, each setting alone, and all but each.
    subsets = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    subsets |= {frozenset({name}) for name in names} | {frozenset(names) - {name} for name in names}
    variations = {subset: tuple(sorted(texts[name] for name in subset)) for subset in sorted(subsets, key=sorted)}
    results, problems = evaluate_variations(options, variations.values())
    if missing := [variation for variation in variations.values() if variation not in results]:
        problem = problems[0] if problems else "it has no result"
        raise ValueError(f"{' '.join(missing[0]) or 'the settings of A'}: {problem}")
    stored = {subset: next(iter(results[variation].values())) for subset, variation in variations.items()}
    scores = {subset: score_of(result) for subset, result in stored.items()}
    settings_of_a, settings_of_b = frozenset[str](), frozenset(names)
    result_of_a = stored[settings_of_a].result
    shares = []
    for name in names:
        before = [frozenset(order[: order.index(name)]) for order in orders]
        score_before = mean_score([scores[subset] for subset in before])
        score_after = mean_score([scores[subset | {name}] for subset in before])
        shares.append(
            Share(
                name=name,
                values=changed[name],
                share=paired_test(score_after, score_before, result_of_a),
                alone=scores[frozenset({name})].value - scores[settings_of_a].value,
                last=scores[settings_of_b].value - scores[settings_of_b - {name}].value,
            )
        )
    shares.sort(key=lambda share: -abs(share.share.difference))
    return shares, paired_test(scores[settings_of_b], scores[settings_of_a], result_of_a)


def options_matching(first: Result, options: EvaluationOptions) -> EvaluationOptions:
    """The options with the protocol, settings, seed, precision, decoder and limit of a result."""
    (protocol,) = protocols_in(first.protocol.name)
    defaults = settings_of(protocol.task, complete=True)
    changes = tuple(
        f"{protocol.name}.{name}={_as_text(value)}"
        for name, value in _all_settings(first).items()
        if value != defaults[name]
    )
    run_options: dict[str, Any] = {name: getattr(first, name) for name in (*RUN_SETTINGS, "limit")}
    return replace(options, suite=protocol.name, set=changes, name=(first.checkpoint.name,), **run_options)


def _as_text(value: Any) -> str:
    """A JSON value in the syntax of `--set`."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def difference_lines(first: Result, second: Result, settings: Changes, facts: Changes) -> list[str]:
    """Lines with both numbers and all differences. settings, facts: from `differences`."""
    lines = []
    for letter, result in (("A", first), ("B", second)):
        name, metric = main_metric(result)
        lines.append(f"{letter}: {result.checkpoint.unique_name}, {result.group}, seed {result.seed}: {name} {metric}")
    lines += [f"differs: {name}: {short(before)} -> {short(after)}" for name, (before, after) in settings.items()]
    lines += [
        f"also differs, not measured here: {name}: {short(before)} -> {short(after)}"
        for name, (before, after) in facts.items()
    ]
    return lines if settings or facts else [*lines, "no difference that a number could depend on"]


def measuring_command(first: StoredResult, second: StoredResult, changed: Changes) -> str:
    """The command that measures the share of each difference."""
    sources = [first.result.checkpoint.source]
    if "checkpoint" in changed:
        sources.append(second.result.checkpoint.source)
    data = f"{first.result.data.name}={first.result.data.url}"
    words = ["bench", "explain", str(first.path), str(second.path), "--checkpoint", *sources, "--data", data]
    return shlex.join(words)


def share_lines(first: Result, second: Result, shares: Sequence[Share], whole: PairedTest) -> list[str]:
    """A table of shares in B - A, and the part that is not explained."""
    stored_difference = main_metric(second)[1].value - main_metric(first)[1].value
    unit = suffix(main_metric(first)[1].unit) or " points"
    rows: list[tuple[str, ...]] = [("difference", "A", "B", "explains [95 %]", "alone", "as the last")]
    for share in shares:
        before, after = map(short, share.values)
        rows.append(
            (share.name, before, after, difference_text(share.share), f"{share.alone:+.2f}", f"{share.last:+.2f}")
        )
    rows.append(("all", "", "", difference_text(whole), "", ""))
    unexplained = round(stored_difference - whole.difference, 2) + 0.0  # + 0.0 turns -0.0 into 0.0
    return [
        *table(rows),
        "",
        f"B - A: {stored_difference:+.2f}{unit} in the results, {whole.difference:+.2f} measured; not explained: "
        f"{unexplained:+.2f}",
    ]
