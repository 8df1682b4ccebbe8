"""A record: the results, logs and commands of a board in a folder that can be published, with what follows from them.

    record.json               what the user said of it, and the tool's version
    results/                  result files, their arrays and logs, as below OUT/results
    checkpoints/NAME-DIGEST/  config.json and cost.json of each export, without weights; log.jsonl and run.json of the
                              pretraining that it lies in
    leaderboard.*             made of results/
    cards/NAME-DIGEST/        model cards with .eval_results/, made of results/ and checkpoints/
    CITATION.cff, paper/      what a paper says of it: BibTeX of what was used (of references.bib), how the numbers were
                              measured
    commands.sh, README.md    how to make them again, and how to check the record
    SHA256SUMS                of all other files, for `sha256sum -c`; SHA256SUMS.sig where it was signed

The first three are copied, without the folders of the machine; all others are functions of them. So a check can make
them again and compare bytes. Where another version of the tool wrote the record, whose sentences may be others, the
numbers and names in them are compared (`numbers_in`).

commands.sh makes the results of a board again, from what the results say. A record holds neither weights nor images, so
the script begins with a variable for each checkpoint and each image set, whose place its reader gives.
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

from bench.cli.settings import setting_text
from bench.leaderboards.files import TEXT_FORMATS, in_latex
from bench.leaderboards.tables import leaderboard_of, with_ties
from bench.results.record import CheckpointUsed, DataUsed, Result, images_seen, read_result, result_files
from bench.results.store import StoredResult
from bench.sharing.card import CardSubject, Publication, card_files, read_config, without_folders
from bench.sharing.contradictions import contradictions
from bench.statistics.paired import MOST_IMAGES
from bench.statistics.significance import Key, PairedTestCache
from checkpoints.export import CARD, COST, is_export
from engine.files import folder_atomic, sha256_of_file, write_atomic
from engine.machine import git_commit, installed
from engine.printing import printable
from pretrain.loop.exporting import EXPORT, RUN, is_run
from pretrain.loop.records import LOG

TOOL = "ssl-vit-bench"  # the package
TABLE = Path(__file__).parent / "references.bib"
BY_NAME = ("timm", "transformers")  # importers whose models say their method in their name alone
PAIRED = (
    "Bold numbers are the best of a column and all that a paired test on the same images cannot tell from it: "
    "McNemar's exact test of right and wrong, otherwise a paired bootstrap{t}; 5 \\%, corrected over the column by "
    "Holm's method"
)
PAIRED_T = f" or, where more than {MOST_IMAGES} images have different values, a paired t test"


@cache
def entries() -> dict[str, tuple[str, frozenset[str]]]:
    """Key of each BibTeX entry -> its text, and the words that it is cited for."""
    table = {}
    for text in re.split(r"^(?=@)", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        words = re.search(r"keywords = {(.*)}", text)
        assert words, text
        table[text.partition("{")[2].partition(",")[0]] = text.rstrip() + "\n", frozenset(words[1].split(", "))
    return table


def cited(words: Iterable[str]) -> list[str]:
    """Keys of the entries for any of the words, in the order of the table."""
    return [key for key, (_, keywords) in entries().items() if keywords & set(words)]


def cite(words: Iterable[str]) -> str:
    """`~\\cite{wu2018knn,caron2021dino}`; "" where no entry fits."""
    keys = cited(words)
    return rf"~\cite{{{','.join(keys)}}}" if keys else ""


def paper_files(results: Sequence[Result], publication: Publication) -> dict[str, str]:
    """Path in a record -> text."""
    done = [result for result in results if result.status == "ok"]
    if not done:
        return {}
    measured = how_measured(done)
    keys = dict.fromkeys(key for keys in re.findall(r"\\cite{([^}]*)}", measured) for key in keys.split(","))
    return {
        "CITATION.cff": citation(done, publication),
        "paper/references.bib": "\n".join(entries()[key][0] for key in keys),
        "paper/measured.tex": measured,
    }


def citation(results: Sequence[Result], publication: Publication) -> str:
    """The Citation File Format 1.2.0, as far as the record knows."""
    import yaml

    checkpoints = {result.checkpoint.key for result in results}
    protocols = {result.protocol.name for result in results}
    sets = sorted({result.data.name for result in results})
    fields = {
        "cff-version": "1.2.0",
        "message": "Cite this record, the tool, and the papers of paper/references.bib.",
        "type": "dataset",
        "title": f"{count(len(checkpoints), 'checkpoint')} measured by {count(len(protocols), 'protocol')} on "
        f"{listed(sets)}",
        "authors": [{"name": publication.organization or "unknown: bench record --organization says it"}],
        "date-released": max(result.date for result in results)[:10],
        **({"url": publication.source} if publication.source else {}),
        "references": [
            {
                "type": "software",
                "title": TOOL,
                "authors": [{"name": f"The {TOOL} developers"}],
                "version": listed(sorted({str(result.versions.get(TOOL, "unknown")) for result in results})),
                "license": "Apache-2.0",
            }
        ],
    }
    return yaml.safe_dump({key: value for key, value in fields.items() if value}, sort_keys=False, width=10**6)


def how_measured(results: Sequence[Result]) -> str:
    """The paragraph of a paper, in LaTeX: what was measured of what on which images, and how sure it is."""
    libraries = dict.fromkeys(name for result in results for name in result.versions)
    versions = {name: sorted({str(r.versions[name]) for r in results if name in r.versions}) for name in libraries}
    tool, used = " ".join([TOOL, *versions.pop(TOOL, ())]), {r.checkpoint.key: r.checkpoint for r in results}
    were = "was" if len(used) == 1 else "were"
    sentences = [
        "% How the numbers of leaderboard.tex were measured; made by bench record of the results alone.",
        f"{count(len(used), 'checkpoint')} {were} measured by {in_latex(tool)}{cite(['bench'])}: "
        f"{listed(list(map(described, used.values())))}.",
    ]
    for name, images in sorted({(r.data.name, tuple(r.data.images.items())) for r in results}):
        counts = listed([f"{number} of {split}" for split, number in images])
        sentences.append(f"Images of {in_latex(name)}: {counts}.")
    for group in sorted({result.group for result in results}):
        own = [result for result in results if result.group == group]
        version, changes = f"version {own[0].protocol.version}", own[0].variant[own[0].protocol.version > 1 :]
        seeds = sorted({result.seed for result in own}) if own[0].random else []
        details = [version, *map(in_latex, changes), *([f"seeds {listed(list(map(str, seeds)))}"] if seeds else [])]
        name = in_latex(group.partition("[")[0])
        words = [f"task-{own[0].task}", own[0].protocol.name.partition("@")[2].split("_")[0]]
        sentences.append(rf"\texttt{{{name}}}: {', '.join(details)}{cite(words)}.")
    for method in sorted({result.interval_method for result in results} - {""}):
        words = [f"interval-{kind}" for kind in ("binomial", "percentiles") if kind in method]
        sentences.append(f"Intervals: {in_latex(method)}{cite(words)}.")
    if len(used) > 1:
        has_many = any(images_seen(result.data, result.limit) > MOST_IMAGES for result in results)
        sentences.append(f"{PAIRED.format(t=PAIRED_T if has_many else '')}{cite(['paired'])}.")
    chosen = {r.protocol.name for r in results if any(metric.chosen_on_val for metric in r.metrics.values())}
    if chosen:
        protocols = listed([in_latex(name) for name in sorted(chosen)])
        sentences.append(f"Chosen on the validation images that they are reported on, at least in part: {protocols}.")
    software = [f"{name} {listed(numbers)}" for name, numbers in versions.items() if name != "git"]
    sentences.append(f"Software: {in_latex(', '.join(software))}{cite(['timm'])}.")
    sentences.append(f"Run on: {listed(sorted({in_latex(gpu_or_cpu(result)) for result in results}))}.")
    return "\n".join(sentences) + "\n"


def described(used: CheckpointUsed) -> str:
    """`mae-s (ViT-S/16, mae vit_s, 3f2a91bc)~\\cite{he2022mae}`; a name at timm or on the Hub says the method."""
    words = [used.method, *(re.findall("[a-z0-9]+", used.source.lower()) if used.method in BY_NAME else ())]
    facts = [used.architecture, f"{used.method} {used.recipe}".strip() if not used.is_floor else "", used.digest[:8]]
    return f"{in_latex(used.name)} ({', '.join(map(in_latex, filter(None, facts)))}){cite(words)}"


def gpu_or_cpu(result: Result) -> str:
    """`8 x NVIDIA H100`, or the processor."""
    gpus = result.hardware.get("gpus") or ()
    if result.device.startswith("cuda") and gpus:
        return f"{result.processes} x {gpus[0]}"
    return str(result.hardware.get("cpu") or "unknown")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


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
    keys = dict.fromkeys(result.checkpoint.key for result in results)
    checkpoints = {key: f"CHECKPOINT_{number}" for number, key in enumerate(keys, 1)}
    sets = dict.fromkeys(_place_of(result.data) for result in results)
    images = {place: f"IMAGES_{number}" for number, place in enumerate(sets, 1)}
    by_call: dict[str, dict[str, None]] = {}
    for result in results:
        words = _words(result, checkpoints[result.checkpoint.key], images[_place_of(result.data)])
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


FORMAT = 2  # of a record; 1 has no CITATION.cff and no paper/
ABOUT, SUMS, SIGNATURE = "record.json", "SHA256SUMS", "SHA256SUMS.sig"
KEPT = ("config.json", COST, RUN, LOG)  # of a checkpoint: of its export, then of its training
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
{paper}| `commands.sh` | the commands that make the results again |
| `SHA256SUMS` | of every file: `sha256sum -c SHA256SUMS` |

`bench record --check .` makes the tables, cards and commands from `results/` and `checkpoints/` again, and says whether
they are those that lie here. Of another version of the tool it compares the numbers, not the wording.
"""
PAPER = (
    "| `CITATION.cff`, `paper/` | for a paper: BibTeX of every protocol and method used, and how the numbers were "
    "measured |\n"
)


def write_record(out: Path, folder: Path, publication: Publication, key: Path | None = None) -> Publication:
    """Write the record of OUT, in one step; an older record there is replaced, anything else is not.

    key: of ssh, which signs the sums.
    """
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something that is not a record: choose a new folder for --to")
    with folder_atomic(folder) as temporary:
        for name, content in copied_files(out, publication):
            write_atomic(temporary / name, content)
        for name, text in derived_files(temporary).items():
            write_atomic(temporary / name, text)
        sums = {name: sha256_of_file(temporary / name) for name in sorted(_files(temporary))}
        write_atomic(temporary / SUMS, "".join(f"{total}  {name}\n" for name, total in sums.items()))
        if key and (problem := _ssh("sign", "-f", str(key), str(temporary / SUMS))[1]):
            raise ValueError(f"--sign {key}: {problem}")
    return publication


def signer(folder: Path) -> tuple[str, str]:
    """By which key a record is signed, as ssh-keygen says it, or what is wrong with the signature; "" for neither."""
    if not (folder / SIGNATURE).exists():
        return "", ""
    said, problem = _ssh("check-novalidate", "-s", str(folder / SIGNATURE), read=folder / SUMS)
    return said.partition("signature with ")[2], f"{SIGNATURE}: not of {SUMS} ({problem})" if problem else ""


def _ssh(action: str, *words: str, read: Path = Path(os.devnull)) -> tuple[str, str]:
    """What `ssh-keygen -Y` says, and why it failed; "" where it did not."""
    try:
        with open(read, "rb") as file:
            done = subprocess.run(
                ["ssh-keygen", "-Y", action, "-n", "bench-record", *words], stdin=file, capture_output=True, text=True
            )
    except OSError as error:
        return "", f"{error.filename}: {error.strerror}"
    return printable(done.stdout.strip()), printable(done.stderr.strip() or "refused") if done.returncode else ""


def copied_files(out: Path, publication: Publication) -> Iterator[tuple[str, bytes]]:
    """Path in the record -> content, of what is copied from OUT. ValueError for a result file that cannot be read."""
    about = {"format": FORMAT, "tool": TOOL, "version": tool_version(), "publication": asdict(publication)}
    yield ABOUT, _json(about)
    used: dict[Key, CheckpointUsed] = {}
    for path in result_files(out):
        result = _readable(path, out)
        used[result.checkpoint.key] = result.checkpoint
        for file in (path, path.with_suffix(".npz"), path.with_suffix(".log")):
            if file.exists():
                yield str(file.relative_to(out)), _shared(file)
    if unknown := publication.verified_by.keys() - {checkpoint.name for checkpoint in used.values()}:
        names = ", ".join(checkpoint.name for checkpoint in used.values())
        raise ValueError(f"--verified-by {min(unknown)}: no result is of this checkpoint; choose one of {names}")
    for checkpoint in used.values():
        if source := _export_of(out, checkpoint):
            for path in (*(source / name for name in KEPT[:2]), *_of_training(source)):
                if path.is_file():
                    yield f"checkpoints/{checkpoint.unique_name}/{path.name}", _shared(path)


def derived_files(folder: Path) -> dict[str, str]:
    """Path in the record -> text, of what follows from what was copied there."""
    publication, is_first = publication_of(folder), _about(folder).get("format") == 1
    results = [StoredResult(path=path, result=read_result(path)) for path in result_files(folder)]
    leaderboard = leaderboard_of(stored.result for stored in results)
    # Nothing is kept in the folder, and nothing that was kept is believed.
    leaderboard = with_ties(leaderboard, results, PairedTestCache[float](Path(os.devnull), float))
    files = {name: text_of(leaderboard) for name, text_of in TEXT_FORMATS.values()}
    subjects = {}
    for used in leaderboard.rows:
        own = [stored.result for stored in results if stored.result.checkpoint.key == used.key]
        kept = folder / "checkpoints" / used.unique_name
        config = read_config(kept) if (kept / "config.json").is_file() else None
        subjects[used.key] = subject = CardSubject(used=used, config=config)
        if not used.is_floor:
            cards = card_files(subject, own, publication)
            files |= {f"cards/{used.unique_name}/{name}": text for name, text in cards.items()}
    files["commands.sh"] = rerun_script([stored.result for stored in results], subjects)
    files |= {} if is_first else paper_files([stored.result for stored in results], publication)
    return files | {"README.md": README.format(paper="" if is_first else PAPER)}


def check_record(folder: Path, out: Path | None = None) -> Iterator[str]:
    """A line for each difference between a record and what follows from it, or from the results of OUT; none: it holds.

    ValueError where the folder is not a record.
    """
    publication, is_same_version = publication_of(folder), _about(folder).get("version") == tool_version()
    yield from _changed(folder)
    yield from filter(None, signer(folder)[1:])
    try:
        derived = derived_files(folder)
    except ValueError as error:
        yield f"{error}".replace(f"{folder}/", "")
        return
    results = [StoredResult(path=path, result=read_result(path)) for path in result_files(folder)]
    yield from contradictions(folder, results)  # before the tables, which differ because of it
    for name, text in derived.items():
        if not (folder / name).is_file():
            yield f"{name}: missing"
            continue
        content = (folder / name).read_bytes().decode("utf-8", "replace")
        if is_same_version and content != text:
            yield f"{name}: not what the results give{_first_difference(content, text)}"
        elif numbers_in(name, content) != numbers_in(name, text):
            yield f"{name}: its numbers are not those of the results"
    expected = {ABOUT, SUMS, SIGNATURE, *derived}
    for stored in results:
        beside = [stored.path.with_suffix(suffix) for suffix in (".json", ".npz", ".log")]
        kept = [folder / "checkpoints" / stored.result.checkpoint.unique_name / name for name in KEPT]
        expected |= {str(path.relative_to(folder)) for path in (*beside, *kept)}
    yield from (f"{name}: follows from no result" for name in sorted(_files(folder) - expected))
    if out is not None:
        yield from _against(folder, out, publication)


def publication_of(folder: Path) -> Publication:
    """What the user said of a record. ValueError where the folder is none."""
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} is not a record, as it has no {ABOUT}; bench record OUT --to DIR makes one")
    try:
        return msgspec.convert(_about(folder)["publication"], Publication)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a record of `bench record` ({type(error).__name__}: {error})") from error


def tool_version() -> str:
    """`0.1.0`, with the commit in a checkout: other versions may write other sentences."""
    return f"{installed(TOOL)}, git {commit}" if (commit := git_commit()) else str(installed(TOOL))


def compared(folder: Path) -> str:
    """What `check_record` compares, for people."""
    theirs, ours = _about(folder).get("version"), tool_version()
    if theirs == ours:
        return "results by their values; tables, cards and texts byte by byte"
    files = "numbers and names in leaderboard.*, in the headers of cards, in .eval_results and in commands.sh"
    return f"results by their values; {files}, not their wording: version {theirs} wrote it, and this is {ours}"


def numbers_in(name: str, text: str) -> Any:
    """What a file of a record says of results, without its wording; None of a file that is wording alone."""
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
    """A YAML value without texts of several words."""
    if isinstance(value, dict):
        return {key: _without_sentences(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_sentences(inner) for inner in value]
    return None if isinstance(value, str) and " " in value else value


def _about(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / ABOUT).read_bytes()))


def _export_of(out: Path, used: CheckpointUsed) -> Path | None:
    """The export of a checkpoint: below OUT/exports, or where the result says that it was, if it is still that."""
    for folder in (out / "exports" / used.unique_name, Path(used.source)):
        if is_export(folder) and read_config(folder)["vit_export"].get("digest") == used.digest:
            return folder
    return None


def _shared(path: Path) -> bytes:
    """A file's content without the folders of this machine; arrays as they are."""
    if path.suffix == ".npz":
        return path.read_bytes()
    if path.suffix == ".json":
        return _json(without_folders(json.loads(path.read_bytes())))
    return without_folders(path.read_text(encoding="utf-8", errors="replace")).encode()


def _of_training(export: Path) -> list[Path]:
    """Log and settings of the pretraining that wrote an export; none of what its folder holds beside that."""
    is_end = export.name.startswith(EXPORT) and is_run(export.parent)
    return [export.parent / name for name in (RUN, LOG)] if is_end else []


def _readable(path: Path, out: Path) -> Any:
    try:
        return read_result(path)
    except ValueError as error:
        advice = f"bench results rm --out {out} --status unreadable moves such files away"
        raise ValueError(f"{error}; {advice}") from error


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _changed(folder: Path) -> Iterator[str]:
    """Against the sums that were written with it."""
    if not (folder / SUMS).is_file():
        yield f"{SUMS}: missing"
        return
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    known = {name: total for total, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder) - {SUMS, SIGNATURE}
    for name in sorted(known.keys() | present):
        if name not in present:
            yield f"{name}: missing"
        elif name not in known:
            yield f"{name}: added later ({SUMS} does not name it)"
        elif sha256_of_file(folder / name) != known[name]:
            yield f"{name}: changed later ({SUMS} has another digest)"


def _against(folder: Path, out: Path, publication: Publication) -> Iterator[str]:
    """What was copied, against the results as they are now."""
    copied = {name for name in _files(folder) if name.startswith(("results/", "checkpoints/"))}
    for name, content in copied_files(out, publication):
        if name == ABOUT:
            continue
        if name not in copied:
            yield f"{name}: not in the record, but in {out}"
        elif (folder / name).read_bytes() != content:
            yield f"{name}: another one than in {out}"
        copied.discard(name)
    yield from (f"{name}: no longer in {out}" for name in sorted(copied))


def _first_difference(content: str, expected: str) -> str:
    pairs = zip(
        content.split("\n"), expected.split("\n"), strict=False
    )  # of what the shorter text has: beyond its end no line differs, one is missing
    at = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 0)
    return f", first in line {at}" if at else ""
