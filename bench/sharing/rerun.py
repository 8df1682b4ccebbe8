"""The commands that would make the results of a board again, from what the results say.

A record holds neither weights nor images: the script begins with a variable for each checkpoint and each image set,
whose place its reader gives.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.cli.settings import setting_text
from bench.results.record import DataUsed, Result
from bench.sharing.card import CardSubject
from bench.sharing.redaction import without_folders
from bench.statistics.significance import Key, key_of
from engine.printing import printable

HEADER = """#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
"""
Place = tuple[str, str, tuple[tuple[str, str], ...]]  # name, URL and fingerprints of an image set
PUBLIC = ("timm", "hf-hub", "pixels")  # schemes of checkpoints that every reader has
CHECK = """
for place in {names}; do
  [ -n "${{!place}}" ] || {{ echo "commands.sh: say at its top where $place is" >&2; exit 2; }}
done
set -e
"""


def rerun_script(results: Iterable[Result], subjects: Mapping[Key, CardSubject]) -> str:
    """A shell script. subjects: checkpoint -> what is known of it."""
    results = list(results)
    keys = dict.fromkeys(key_of(result.checkpoint) for result in results)
    checkpoints = {key: f"CHECKPOINT_{number}" for number, key in enumerate(keys, 1)}
    sets = dict.fromkeys(_place_of(result.data) for result in results)
    images = {each: f"IMAGES_{number}" for number, each in enumerate(sets, 1)}
    by_call: dict[str, dict[str, None]] = {}
    for result in results:
        words = _words(result, checkpoints[key_of(result.checkpoint)], images[_place_of(result.data)])
        by_call.setdefault(words, {})[result.protocol.name] = None
    lines = [HEADER + "#", *_places(checkpoints, images, subjects)]
    lines.append(CHECK.format(names=" ".join([*checkpoints.values(), *images.values()])))
    lines += [f"{words} {_quoted(['--suite', ','.join(names)])} --out results" for words, names in by_call.items()]
    return "\n".join(lines) + "\n"


def _places(
    checkpoints: Mapping[Key, str], images: Mapping[Place, str], subjects: Mapping[Key, CardSubject]
) -> Iterator[str]:
    """Every variable with what it is the place of."""
    for key, variable in checkpoints.items():
        place = _reference(subjects[key])
        yield from _asked(variable, _described(subjects[key]), place, place.partition(":")[0] in PUBLIC)
    for (name, url, prints), variable in images.items():
        known = ", ".join(f"{split} {digest[:12]}" for split, digest in prints)
        what = f"images {name}{': fingerprints ' if known else ''}{known}"
        yield from _asked(variable, what, url, url.endswith(":"))  # generated, or of a library


def _place_of(data: DataUsed) -> Place:
    return data.name, data.url, tuple(sorted(data.fingerprints.items()))


def _asked(variable: str, what: str, place: str, is_public: bool) -> list[str]:
    """A comment and a variable, which is empty where the place is one of the machine that measured."""
    measured = "" if is_public else f" (measured from {place})"
    value = shlex.quote(printable(place)) if is_public else "''"
    return [f"# {printable(without_folders(what + measured))}", f"{variable}=${{{variable}:-{value}}}"]


def _described(subject: CardSubject) -> str:
    used, facts = subject.used, subject.facts
    sums = f", file with SHA-256 {facts['source_sha256']}" if facts.get("source_sha256") else ""
    trained = f", trained by {used.method}, recipe {used.recipe}" if used.recipe and not used.is_floor else ""
    return f"checkpoint {used.name}: digest {used.digest}{sums}{trained}"


def _words(result: Result, checkpoint: str, images: str) -> str:
    """The command without its protocols, quoted for a shell, with the variables of its checkpoint and images."""
    words = ["--seed", str(result.seed)]
    words += ["--limit", str(result.limit)] if result.limit is not None else []
    words += ["--precision", result.precision] if result.precision != "float32" else []
    words += ["--decode", result.decode] if result.decode != "exact" else []
    words += ["--skip-bad"] if result.skip_bad else []
    changes = [
        f"{result.protocol.name}.{name}={setting_text(value)}" for name, value in result.protocol.changes.items()
    ]
    words += ["--set", *changes] if changes else []
    start = f'bench run --checkpoint "${checkpoint}" --name {_quoted([result.checkpoint.name])}'
    return f'{start} --data {_quoted([result.data.name])}="${images}" {_quoted(words)}'


def _quoted(words: Sequence[str]) -> str:
    return shlex.join(printable(without_folders(word)) for word in words)


def _reference(subject: CardSubject) -> str:
    """What `--checkpoint` took, or the file that it was imported from with its importer's name."""
    importer, file = subject.facts.get("importer"), subject.facts.get("source_file")
    is_file = importer and file and ":" not in str(file) and importer not in ("timm", "transformers")
    return f"{importer}:{file}" if is_file else subject.used.source or subject.used.name
