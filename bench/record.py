"""A record: the results, logs and commands of a board in a folder that can be published, with what follows from them.

    record.json               what the user stated about it, and the tool's version
    results/                  result files, their arrays and logs, as below OUT/results
    checkpoints/NAME-DIGEST/  config.json and cost.json of each export, without weights; log.jsonl and run.json of the
                              pretraining that it lies in
    leaderboard.*             made from results/
    cards/NAME-DIGEST/        model cards with .eval_results/, made from results/ and checkpoints/
    CITATION.cff, paper/      for a paper: BibTeX of everything used (from references.bib), and how the numbers were
                              measured
    commands.sh, README.md    how to reproduce the results, and how to check the record
    SHA256SUMS                of all other files, for `sha256sum -c`; SHA256SUMS.sig if it was signed

The first three are copied, without the folders of the machine; all others are derived from them. So a check can derive
them again and compare bytes. If another version of the tool wrote the record, its wording may differ; then only numbers
and names are compared (`numbers_in`).

commands.sh repeats the runs of a board from the facts in its results. A record holds neither weights nor images, so the
script begins with a variable for the location of each checkpoint and image set, which its reader fills in.
"""

import csv
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bench.recomputed import differences
from bench.reports.card import CardSubject, Publication, card_files, read_config, without_folders
from bench.reports.files import TEXT_FORMATS, in_latex
from bench.reports.tables import leaderboard_of, with_ties
from bench.results.record import CheckpointUsed, DataUsed, Result, images_seen, read_result, result_files
from bench.results.store import StoredResult
from bench.settings import setting_text
from bench.statistics.paired import MOST_IMAGES
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import CARD, COST, is_export
from engine.files import (
    folder_atomic,
    open_regular,
    read_json,
    read_regular,
    refuse_irregular_files,
    sha256_of_file,
    write_atomic,
)
from engine.machine import git_commit, installed
from engine.printing import counted, in_words, printable
from pretrain.loop.exporting import EXPORT, RUN, is_run
from pretrain.loop.records import LOG

TOOL = "ssl-vit-bench"  # name of the package
TABLE = Path(__file__).parent / "references.bib"
BY_NAME = ("timm", "transformers")  # importers of many methods; the name of the model tells which
PAIRED = (
    "Bold numbers are the best of a column and all that a paired test on the same images cannot tell from it: "
    "McNemar's exact test of right and wrong, otherwise a paired bootstrap{t}; 5 \\%, corrected over the column by "
    "Holm's method"
)
PAIRED_T = f" or, where more than {MOST_IMAGES} images have different values, a paired t test"


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


def cite(words: Iterable[str]) -> str:
    """`~\\cite{wu2018knn,caron2021dino}`; "" if no entry has any of the words as a keyword."""
    keys = cited(words)
    return rf"~\cite{{{','.join(keys)}}}" if keys else ""


def paper_files(results: Sequence[Result], publication: Publication) -> dict[str, str]:
    """The files for a paper: path in the record -> content; none without a successful result."""
    done = [result for result in results if result.status == "ok"]
    if not done:
        return {}
    measured = how_measured(done)
    keys = dict.fromkeys(key for keys in re.findall(r"\\cite{([^}]*)}", measured) for key in keys.split(","))
    return {
        "CITATION.cff": citation(done, publication),
        "paper/references.bib": "\n".join(bibtex_entries()[key][0] for key in keys),
        "paper/measured.tex": measured,
    }


def citation(results: Sequence[Result], publication: Publication) -> str:
    """CITATION.cff, in the Citation File Format 1.2.0, as far as the record has the facts."""
    import yaml

    checkpoints = {result.checkpoint.key for result in results}
    protocols = {result.protocol.name for result in results}
    sets = sorted({result.data.name for result in results})
    fields = {
        "cff-version": "1.2.0",
        "message": "Cite this record, the tool, and the papers of paper/references.bib.",
        "type": "dataset",
        "title": f"{counted(len(checkpoints), 'checkpoint')} measured by {counted(len(protocols), 'protocol')} on "
        f"{in_words(sets)}",
        "authors": [{"name": publication.organization or "unknown: bench record --organization says it"}],
        "date-released": max(result.date for result in results)[:10],
        **({"url": publication.source} if publication.source else {}),
        "references": [
            {
                "type": "software",
                "title": TOOL,
                "authors": [{"name": f"The {TOOL} developers"}],
                "version": in_words(sorted({str(result.versions.get(TOOL, "unknown")) for result in results})),
                "license": "Apache-2.0",
            }
        ],
    }
    return yaml.safe_dump({key: value for key, value in fields.items() if value}, sort_keys=False, width=10**6)


def how_measured(results: Sequence[Result]) -> str:
    """A paragraph for a paper, in LaTeX: checkpoints, images, protocols, seeds, intervals, tests and software."""
    libraries = dict.fromkeys(name for result in results for name in result.versions)
    versions = {name: sorted({str(r.versions[name]) for r in results if name in r.versions}) for name in libraries}
    tool, used = " ".join([TOOL, *versions.pop(TOOL, ())]), {r.checkpoint.key: r.checkpoint for r in results}
    were = "was" if len(used) == 1 else "were"
    sentences = [
        "% How the numbers of leaderboard.tex were measured; made by bench record of the results alone.",
        f"{counted(len(used), 'checkpoint')} {were} measured by {in_latex(tool)}{cite(['bench'])}: "
        f"{in_words(list(map(checkpoint_text, used.values())))}.",
    ]
    for name, images in sorted({(r.data.name, tuple(r.data.images.items())) for r in results}):
        counts = in_words([f"{number} of {split}" for split, number in images])
        sentences.append(f"Images of {in_latex(name)}: {counts}.")
    for group in sorted({result.group for result in results}):
        sentences.append(_protocol_sentence([result for result in results if result.group == group]))
    for method in sorted({result.interval_method for result in results} - {""}):
        words = [f"interval-{kind}" for kind in ("binomial", "percentiles") if kind in method]
        sentences.append(f"Intervals: {in_latex(method)}{cite(words)}.")
    if len(used) > 1:
        has_many = any(images_seen(result.data, result.limit) > MOST_IMAGES for result in results)
        sentences.append(f"{PAIRED.format(t=PAIRED_T if has_many else '')}{cite(['paired'])}.")
    chosen = {r.protocol.name for r in results if any(metric.chosen_on_val for metric in r.metrics.values())}
    if chosen:
        protocols = in_words([in_latex(name) for name in sorted(chosen)])
        sentences.append(f"Chosen on the validation images that they are reported on, at least in part: {protocols}.")
    software = [f"{name} {in_words(numbers)}" for name, numbers in versions.items() if name != "git"]
    sentences.append(f"Software: {in_latex(', '.join(software))}{cite(['timm'])}.")
    sentences.append(f"Run on: {in_words(sorted({in_latex(gpu_or_cpu(result)) for result in results}))}.")
    return "\n".join(sentences) + "\n"


def _protocol_sentence(results: Sequence[Result]) -> str:
    """The protocol of a group of results in LaTeX: its name, version, changed settings and seeds."""
    first = results[0]
    version, changes = f"version {first.protocol.version}", first.variant[first.protocol.version > 1 :]
    seeds = sorted({result.seed for result in results}) if first.random else []
    details = [version, *map(in_latex, changes), *([f"seeds {in_words(list(map(str, seeds)))}"] if seeds else [])]
    name = in_latex(first.group.partition("[")[0])
    words = [f"task-{first.task}", first.protocol.name.partition("@")[2].split("_")[0]]
    return rf"\texttt{{{name}}}: {', '.join(details)}{cite(words)}."


def checkpoint_text(used: CheckpointUsed) -> str:
    """A checkpoint in LaTeX: `mae-s (ViT-S/16, mae vit_s, 3f2a91bc)~\\cite{he2022mae}`."""
    words = [used.method, *(re.findall("[a-z0-9]+", used.source.lower()) if used.method in BY_NAME else ())]
    facts = [used.architecture, f"{used.method} {used.recipe}".strip() if not used.is_floor else "", used.digest[:8]]
    return f"{in_latex(used.name)} ({', '.join(map(in_latex, filter(None, facts)))}){cite(words)}"


def gpu_or_cpu(result: Result) -> str:
    """The hardware of a result: `8 x NVIDIA H100`, or the model of the CPU."""
    gpus = result.hardware.get("gpus") or ()
    if result.device.startswith("cuda") and gpus:
        return f"{result.processes} x {gpus[0]}"
    return str(result.hardware.get("cpu") or "unknown")


HEADER = """#!/usr/bin/env bash
# The commands that make the results of this record again, one after another.
#
# First say where your checkpoints and images are: between the quotes, or by variables of the environment, as in
# `CHECKPOINT_1=dino:/data/a.pth bash commands.sh`. `bench inspect X` shows the digest of a checkpoint.
"""
ImageSetKey = tuple[str, str, tuple[tuple[str, str], ...]]  # name, URL and fingerprints of an image set
PUBLIC = ("timm", "hf-hub", "pixels")  # schemes of checkpoints that everyone can load
CHECK = """
for place in {names}; do
  [ -n "${{!place}}" ] || {{ echo "commands.sh: say at its top where $place is" >&2; exit 2; }}
done
set -e
"""


def rerun_script(results: Iterable[Result], subjects: Mapping[Key, CardSubject]) -> str:
    """A shell script that repeats the runs behind these results; runs that differ only in protocol become one command.

    subjects: checkpoint -> the subject of its card.
    """
    results = list(results)
    keys = dict.fromkeys(result.checkpoint.key for result in results)
    checkpoints = {key: f"CHECKPOINT_{number}" for number, key in enumerate(keys, 1)}
    sets = dict.fromkeys(_image_set(result.data) for result in results)
    images = {image_set: f"IMAGES_{number}" for number, image_set in enumerate(sets, 1)}
    protocols: dict[str, dict[str, None]] = {}  # command without its protocols -> names of these
    for result in results:
        command = _command(result, checkpoints[result.checkpoint.key], images[_image_set(result.data)])
        protocols.setdefault(command, {})[result.protocol.name] = None
    lines = [HEADER + "#", *_variables(checkpoints, images, subjects)]
    lines.append(CHECK.format(names=" ".join([*checkpoints.values(), *images.values()])))
    lines += [
        f"{command} {_quoted(['--suite', ','.join(names)])} --out results" for command, names in protocols.items()
    ]
    return "\n".join(lines) + "\n"


def _variables(
    checkpoints: Mapping[Key, str], images: Mapping[ImageSetKey, str], subjects: Mapping[Key, CardSubject]
) -> Iterator[str]:
    """Lines that set a variable for each checkpoint and image set, below a comment that identifies it."""
    for key, variable in checkpoints.items():
        reference = _reference(subjects[key])
        is_public = reference.partition(":")[0] in PUBLIC
        yield from _variable_lines(variable, _checkpoint_line(subjects[key]), reference, is_public)
    for (name, url, fingerprints), variable in images.items():
        digests = ", ".join(f"{split} {digest[:12]}" for split, digest in fingerprints)
        description = f"images {name}{': fingerprints ' if digests else ''}{digests}"
        yield from _variable_lines(variable, description, url, url.endswith(":"))  # generated, or part of a library


def _image_set(data: DataUsed) -> ImageSetKey:
    return data.name, data.url, tuple(sorted(data.fingerprints.items()))


def _variable_lines(variable: str, description: str, reference: str, is_public: bool) -> list[str]:
    """A comment, and an assignment whose default is the reference, or empty if only the measuring machine has it."""
    measured = "" if is_public else f" (measured from {reference})"
    value = shlex.quote(printable(reference)) if is_public else "''"
    return [f"# {printable(without_folders(description + measured))}", f"{variable}=${{{variable}:-{value}}}"]


def _checkpoint_line(subject: CardSubject) -> str:
    """The comment above a checkpoint's variable."""
    used, facts = subject.used, subject.facts
    sums = f", file with SHA-256 {facts['source_sha256']}" if facts.get("source_sha256") else ""
    trained = f", trained by {used.method}, recipe {used.recipe}" if used.recipe and not used.is_floor else ""
    return f"checkpoint {used.name}: digest {used.digest}{sums}{trained}"


def _command(result: Result, checkpoint: str, images: str) -> str:
    """The command of a result without its protocol, quoted for a shell, with variables for checkpoint and images."""
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
    """The value of `--checkpoint`; of an imported file the file, after its importer's name."""
    importer, file = subject.facts.get("importer"), subject.facts.get("source_file")
    is_file = importer and file and ":" not in str(file) and importer not in ("timm", "transformers")
    return f"{importer}:{file}" if is_file else subject.used.source or subject.used.name


FORMAT = 2  # of a record
ABOUT, SUMS, SIGNATURE = "record.json", "SHA256SUMS", "SHA256SUMS.sig"
CHECKPOINT_FILES = ("config.json", COST, RUN, LOG)  # two of its export, and two of its pretraining
README = """# Record of a leaderboard

Made by `bench record`. Every number of [leaderboard.md](leaderboard.md) comes from a file of `results/`; its text says
the checkpoint's digest, the image set's fingerprint, the protocol with its version and settings, the seed, the machine
and the library versions. Folders of that machine are left out: `path-3f2a91bc/cifar10` stands for a folder whose name
has that digest.

| file | what |
|---|---|
| `leaderboard.md`, `.csv`, `.tex`, `.html` | the tables |
| `results/` | a JSON file for each result, with its values for every image (`.npz`) and the log of a failure (`.log`) |
| `checkpoints/` | what each checkpoint is, and the log of its pretraining where it was done here; no weights |
| `cards/` | a model card for each, with `.eval_results/`, for the Hugging Face Hub |
| `CITATION.cff`, `paper/` | for a paper: BibTeX of every protocol and method used, and how the numbers were measured |
| `commands.sh` | the commands that make the results again |
| `SHA256SUMS` | of every file: `sha256sum -c SHA256SUMS` |

`bench record --check .` makes the tables, cards and commands from `results/` and `checkpoints/` again, and says whether
they are those that lie here. Of another version of the tool it compares the numbers, not the wording.
"""


def write_record(out: Path, folder: Path, publication: Publication, key: Path | None = None) -> None:
    """Write the record of the results in `out` to `folder`, atomically.

    key: a private ssh key that signs SHA256SUMS. ValueError if `folder` holds anything but an older record, or if
    signing fails.
    """
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something that is not a record: choose a new folder for --to")
    with folder_atomic(folder) as temporary:
        for name, content in copied_files(out, publication):
            write_atomic(temporary / name, content)
        for name, text in derived_files(temporary, stored_results(temporary)).items():
            write_atomic(temporary / name, text)
        sums = {name: sha256_of_file(temporary / name) for name in sorted(_files(temporary))}
        write_atomic(temporary / SUMS, "".join(f"{total}  {name}\n" for name, total in sums.items()))
        if key and (problem := _ssh("sign", "-f", str(key), str(temporary / SUMS))[1]):
            raise ValueError(f"--sign {key}: {problem}")


def signer(folder: Path) -> tuple[str, str]:
    """The key that signed a record, as ssh-keygen prints it, and a problem with the signature; "" for each if none."""
    if not (folder / SIGNATURE).is_file():
        return "", ""
    output, problem = _ssh("check-novalidate", "-s", str(folder / SIGNATURE), read=folder / SUMS)
    return output.partition("signature with ")[2], f"{SIGNATURE}: not of {SUMS} ({problem})" if problem else ""


def _ssh(action: str, *arguments: str, read: Path | None = None) -> tuple[str, str]:
    """Run `ssh-keygen -Y` with the file `read` as its input; returns its output, and the reason of a failure or ""."""
    try:
        with open_regular(read) if read else open(os.devnull, "rb") as file:
            completed = subprocess.run(
                ["ssh-keygen", "-Y", action, "-n", "bench-record", *arguments],
                stdin=file,
                capture_output=True,
                text=True,
            )
    except OSError as error:
        return "", f"{error.filename}: {error.strerror}"
    problem = printable(completed.stderr.strip() or "refused") if completed.returncode else ""
    return printable(completed.stdout.strip()), problem


def copied_files(out: Path, publication: Publication) -> Iterator[tuple[str, bytes]]:
    """(path in the record, content) of each copied file, and of record.json. ValueError for an unreadable result."""
    about = {"format": FORMAT, "tool": TOOL, "version": tool_version(), "publication": asdict(publication)}
    yield ABOUT, _json(about)
    used: dict[Key, CheckpointUsed] = {}
    for path in result_files(out):
        result = _read(path, out)
        used[result.checkpoint.key] = result.checkpoint
        for file in (path, path.with_suffix(".npz"), path.with_suffix(".log")):
            if file.exists():
                yield str(file.relative_to(out)), _public_content(file)
    if unknown := publication.verified_by.keys() - {checkpoint.name for checkpoint in used.values()}:
        names = ", ".join(checkpoint.name for checkpoint in used.values())
        raise ValueError(f"--verified-by {min(unknown)}: this checkpoint has no results; choose one of {names}")
    for checkpoint in used.values():
        if source := _export_of(out, checkpoint):
            files = [source / name for name in CHECKPOINT_FILES[:2]]
            if source.name.startswith(EXPORT) and is_run(source.parent):  # else it was not trained here
                files += [source.parent / name for name in CHECKPOINT_FILES[2:]]
            for path in files:
                if path.is_file():
                    yield f"checkpoints/{checkpoint.unique_name}/{path.name}", _public_content(path)


def stored_results(folder: Path) -> list[StoredResult]:
    """The results of a record. ValueError for a file that cannot be read."""
    return [StoredResult(path=path, result=read_result(path)) for path in result_files(folder)]


def derived_files(folder: Path, results: Sequence[StoredResult]) -> dict[str, str]:
    """Path in the record -> content of each file that is derived from its results and the other copied files."""
    publication = publication_of(folder)
    leaderboard = leaderboard_of(stored.result for stored in results)
    # No cache is written into the record, and none in it is trusted.
    leaderboard = with_ties(leaderboard, results, PairedTestCache[float](Path(os.devnull), float))
    files = {name: text_of(leaderboard) for name, text_of in TEXT_FORMATS.values()}
    subjects = {}
    for used in leaderboard.rows:
        own = [stored.result for stored in results if stored.result.checkpoint.key == used.key]
        checkpoint = folder / "checkpoints" / used.unique_name
        config = read_config(checkpoint) if (checkpoint / "config.json").is_file() else None
        subjects[used.key] = subject = CardSubject(used=used, config=config)
        if not used.is_floor:
            cards = card_files(subject, own, publication)
            files |= {f"cards/{used.unique_name}/{name}": text for name, text in cards.items()}
    files["commands.sh"] = rerun_script([stored.result for stored in results], subjects)
    files |= paper_files([stored.result for stored in results], publication)
    return files | {"README.md": README}


def check_record(folder: Path, out: Path | None = None) -> Iterator[str]:
    """Check that a record agrees with itself, and with the results in `out` if given; a line for each difference.

    ValueError if the folder is not a record.
    """
    publication, is_same_version = publication_of(folder), _is_written_by_this_version(folder)
    yield from _checksum_differences(folder)
    yield from filter(None, signer(folder)[1:])
    try:
        refuse_irregular_files(folder)
        results = stored_results(folder)
        derived = derived_files(folder, results)
    except ValueError as error:
        yield f"{error}".replace(f"{folder}/", "")
        return
    yield from differences(folder, results)  # before the tables, which differ because of it
    for name, text in derived.items():
        if not (folder / name).is_file():
            yield f"{name}: missing"
            continue
        content = read_regular(folder / name).decode("utf-8", "replace")
        if content == text:
            continue
        if is_same_version:
            yield f"{name}: not what the results give{_first_difference(content, text)}"
        elif numbers_in(name, content) != numbers_in(name, text):
            yield f"{name}: its numbers are not those of the results"
    expected = {ABOUT, SUMS, SIGNATURE, *derived}
    for stored in results:
        own = [stored.path.with_suffix(suffix) for suffix in (".json", ".npz", ".log")]
        checkpoint = folder / "checkpoints" / stored.result.checkpoint.unique_name
        own += [checkpoint / name for name in CHECKPOINT_FILES]
        expected |= {str(path.relative_to(folder)) for path in own}
    yield from (f"{name}: follows from no result" for name in sorted(_files(folder) - expected))
    if out is not None:
        yield from _differences_from(folder, out, publication)


def publication_of(folder: Path) -> Publication:
    """What the user stated when the record was written. ValueError if the folder is not a record."""
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} is not a record, as it has no {ABOUT}; bench record OUT --to DIR makes one")
    try:
        return msgspec.convert(_about(folder)["publication"], Publication)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a record of `bench record` ({type(error).__name__}: {error})") from error


def tool_version() -> str:
    """`0.1.0`, in a checkout with its commit: versions may differ in wording."""
    return f"{installed(TOOL)}, git {commit}" if (commit := git_commit()) else str(installed(TOOL))


def _is_written_by_this_version(folder: Path) -> bool:
    """Whether this very commit wrote the record. A version that names no commit may be any of its development."""
    version = str(_about(folder).get("version"))
    return version == tool_version() and ", git " in version


def comparison_scope(folder: Path) -> str:
    """A sentence that states what `check_record` compares."""
    theirs, ours = _about(folder).get("version"), tool_version()
    if _is_written_by_this_version(folder):
        return "results by their values; tables, cards and texts byte by byte"
    files = "numbers and names in leaderboard.*, in the headers of cards, in .eval_results and in commands.sh"
    return f"results by their values; {files}, not their wording: version {theirs} wrote it, and this is {ours}"


def numbers_in(name: str, text: str) -> Any:
    """The numbers and names in a file of a record, without its wording; None for a file of text alone."""
    import yaml

    try:
        if name.endswith(".csv"):
            return list(csv.reader(text.splitlines()))
        if name.startswith("leaderboard."):
            return re.findall(r"\d+\.\d+", text)
        if name == "commands.sh":
            return [line for line in text.splitlines() if line.startswith("bench ")]
        if name.startswith("cards/"):
            return _without_sentences(yaml.safe_load(text.split("---\n")[1] if name.endswith(CARD) else text))
    except (yaml.YAMLError, csv.Error, IndexError):
        return text
    return None


def _without_sentences(value: Any) -> Any:
    """A YAML value in which texts of several words are replaced by None."""
    if isinstance(value, dict):
        return {key: _without_sentences(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_sentences(inner) for inner in value]
    return None if isinstance(value, str) and " " in value else value


def _about(folder: Path) -> dict[str, Any]:
    return read_json(folder / ABOUT, type=dict[str, Any])


def _export_of(out: Path, used: CheckpointUsed) -> Path | None:
    """The export of a checkpoint: in OUT/exports, or at the path in the result if the digest is still the same."""
    for folder in (out / "exports" / used.unique_name, Path(used.source)):
        if is_export(folder) and read_config(folder)["vit_export"].get("digest") == used.digest:
            return folder
    return None


def _public_content(path: Path) -> bytes:
    """A file's content without the folders of this machine; arrays are unchanged."""
    if path.suffix == ".npz":
        return read_regular(path)
    if path.suffix == ".json":
        return _json(without_folders(read_json(path)))
    return without_folders(read_regular(path).decode("utf-8", "replace")).encode()


def _read(path: Path, out: Path) -> Any:
    """The result in a file. ValueError, with the command that moves it away, if it cannot be read."""
    try:
        return read_result(path)
    except ValueError as error:
        advice = f"bench results rm --out {out} --status unreadable moves unreadable files away"
        raise ValueError(f"{error}; {advice}") from error


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _checksum_differences(folder: Path) -> Iterator[str]:
    """A line for each file that is missing, added or changed according to SHA256SUMS."""
    if not (folder / SUMS).is_file():
        yield f"{SUMS}: missing"
        return
    lines = read_regular(folder / SUMS).decode("utf-8", "replace").splitlines()
    sums = {name: total for total, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder) - {SUMS, SIGNATURE}
    for name in sorted(sums.keys() | present):
        if name not in present:
            yield f"{name}: missing"
        elif name not in sums:
            yield f"{name}: added later ({SUMS} does not list it)"
        elif sha256_of_file(folder / name) != sums[name]:
            yield f"{name}: changed later ({SUMS} has another digest)"


def _differences_from(folder: Path, out: Path, publication: Publication) -> Iterator[str]:
    """A line for each copied file that differs from the current results in `out`."""
    copied = {name for name in _files(folder) if name.startswith(("results/", "checkpoints/"))}
    for name, content in copied_files(out, publication):
        if name == ABOUT:
            continue
        if name not in copied:
            yield f"{name}: not in the record, but in {out}"
        elif read_regular(folder / name) != content:
            yield f"{name}: differs from that in {out}"
        copied.discard(name)
    yield from (f"{name}: no longer in {out}" for name in sorted(copied))


def _first_difference(content: str, expected: str) -> str:
    """`, first in line 4`; "" if one text is the beginning of the other."""
    pairs = zip(content.split("\n"), expected.split("\n"), strict=False)
    number = next((number for number, (line, expected_line) in enumerate(pairs, 1) if line != expected_line), 0)
    return f", first in line {number}" if number else ""
