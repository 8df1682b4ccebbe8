"""The commands that would make the results of a board again, from what the results say."""

import shlex
from collections.abc import Iterable, Mapping

from bench.cli.settings import setting_text
from bench.results.record import Result
from bench.sharing.card import CardSubject
from bench.sharing.redaction import without_folders
from bench.statistics.significance import Key, key_of
from engine.printing import printable

HEADER = """#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
# A path is path-<digest of its folder>/<name>: put your own in its place. Checkpoints are known by the digest above
# them, image sets by the fingerprints in the result files.
set -e
"""


def rerun_script(results: Iterable[Result], subjects: Mapping[Key, CardSubject]) -> str:
    """A shell script. subjects: checkpoint -> what is known of it."""
    by_call: dict[tuple[Key, tuple[str, ...]], dict[str, None]] = {}
    for result in results:
        key = key_of(result.checkpoint)
        words = _words(result, _reference(subjects[key]))
        by_call.setdefault((key, words), {})[result.protocol.name] = None
    lines, shown = [HEADER], None
    for (key, words), protocols in by_call.items():
        lines += [f"# {_described(subjects[key])}"] if key != shown else []
        shown = key
        suite = ["--suite", ",".join(protocols)]
        lines.append(shlex.join(printable(without_folders(word)) for word in [*words, *suite, "--out", "results"]))
    return "\n".join(lines) + "\n"


def _described(subject: CardSubject) -> str:
    used, facts = subject.used, subject.facts
    sums = f", file with SHA-256 {facts['source_sha256']}" if facts.get("source_sha256") else ""
    trained = f", trained by {used.method}, recipe {used.recipe}" if used.recipe and not used.is_floor else ""
    return printable(without_folders(f"{used.name}: digest {used.digest}{sums}{trained}"))


def _words(result: Result, reference: str) -> tuple[str, ...]:
    words = ["bench", "run", "--checkpoint", reference, "--name", result.checkpoint.name]
    words += ["--data", f"{result.data.name}={result.data.url}", "--seed", str(result.seed)]
    words += ["--limit", str(result.limit)] if result.limit is not None else []
    words += ["--precision", result.precision] if result.precision != "float32" else []
    words += ["--decode", result.decode] if result.decode != "exact" else []
    words += ["--skip-bad"] if result.skip_bad else []
    changes = [
        f"{result.protocol.name}.{name}={setting_text(value)}" for name, value in result.protocol.changes.items()
    ]
    return (*words, *(["--set", *changes] if changes else []))


def _reference(subject: CardSubject) -> str:
    """What `--checkpoint` took, or the file that it was imported from with its importer's name."""
    importer, file = subject.facts.get("importer"), subject.facts.get("source_file")
    is_file = importer and file and ":" not in str(file) and importer not in ("timm", "transformers")
    return f"{importer}:{file}" if is_file else subject.used.source or subject.used.name
