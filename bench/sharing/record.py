"""A record: the results, logs and commands of a board in a folder that can be published, with what follows from them.

    record.json               what the user said of it, and the tool's version
    results/                  result files, their arrays and logs, as below OUT/results
    checkpoints/NAME-DIGEST/  config.json and cost.json of each export, without weights; log.jsonl and run.json of the
                              pretraining that it lies in
    leaderboard.*             made of results/
    cards/NAME-DIGEST/        model cards with .eval_results/, made of results/ and checkpoints/
    every_eval_ever/data/     the results in that form
    commands.sh, README.md    how to make them again, and how to check the record
    SHA256SUMS                of all other files, for `sha256sum -c`; SHA256SUMS.sig where it was signed

The first three are copied, without the folders of the machine (redaction.py); all others are functions of them. So a
check can make them again and compare bytes.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench.board.files import TEXT_FORMATS, Standing
from bench.results.board import board_of
from bench.results.environment import installed
from bench.results.record import CheckpointUsed, read_result, result_files
from bench.sharing.card import CardSubject, card_files, read_config
from bench.sharing.contradictions import contradictions
from bench.sharing.every_eval_ever import TOOL, every_eval_records
from bench.sharing.groups import Publication
from bench.sharing.redaction import without_folders
from bench.sharing.rerun import rerun_script
from bench.statistics.matching import Measured
from bench.statistics.significance import KeptTests, Key, key_of, level_with_best
from checkpoints.export import COST, is_export
from engine.files import folder_atomic, sha256_of_file, write_atomic
from engine.printing import printable
from pretrain.loop.exporting import EXPORT, RUN, is_run
from pretrain.loop.records import LOG

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
| `every_eval_ever/` | the results in the form of Every Eval Ever |
| `commands.sh` | the commands that make the results again |
| `SHA256SUMS` | of every file: `sha256sum -c SHA256SUMS` |

`bench record --check .` makes the tables, cards and commands from `results/` and `checkpoints/` again, and says whether
they are those that lie here.
"""


def write_record(out: Path, folder: Path, publication: Publication, key: Path | None = None) -> Publication:
    """Write the record of OUT, in one step; an older record there is replaced, anything else is not.

    key: of ssh, which signs the sums.
    """
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something that is no record: choose a new folder for --to")
    with folder_atomic(folder) as temporary:
        for name, content in copied_files(out, publication):
            write_atomic(temporary / name, content)
        for name, text in derived_files(temporary).items():
            write_atomic(temporary / name, text)
        write_atomic(temporary / SUMS, _sums(temporary))
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
    about = {"format": 1, "tool": TOOL, "version": installed(TOOL), "publication": asdict(publication)}
    yield ABOUT, _json(about)
    used: dict[Key, CheckpointUsed] = {}
    for path in result_files(out):
        result = _readable(path, out)
        used[key_of(result.checkpoint)] = result.checkpoint
        for each in (path, path.with_suffix(".npz"), path.with_suffix(".log")):
            if each.exists():
                yield str(each.relative_to(out)), _shared(each)
    for checkpoint in used.values():
        if source := _export_of(out, checkpoint):
            for path in (*(source / name for name in KEPT[:2]), *_of_training(source)):
                if path.is_file():
                    yield f"checkpoints/{checkpoint.unique_name}/{path.name}", _shared(path)


def derived_files(folder: Path) -> dict[str, str]:
    """Path in the record -> text, of what follows from what was copied there."""
    publication = publication_of(folder)
    measured = [Measured(path=path, result=read_result(path)) for path in result_files(folder)]
    found = {name: text_of(_standing(folder, measured)) for name, text_of in TEXT_FORMATS.values()}
    subjects = {}
    for key, results in _by_checkpoint(measured).items():
        place = results[-1].checkpoint.unique_name
        subjects[key] = subject = _subject(results[-1].checkpoint, folder / "checkpoints" / place)
        if subject.used.is_floor:
            continue
        found |= {f"cards/{place}/{name}": text for name, text in card_files(subject, results, publication).items()}
        records = every_eval_records(subject.used, results, publication)
        found |= {f"every_eval_ever/{name}": text for name, text in records.items()}
    found["commands.sh"] = rerun_script([each.result for each in measured], subjects)
    return found | {"README.md": README}


def check_record(folder: Path, out: Path | None = None) -> Iterator[str]:
    """A line for each difference between a record and what follows from it, or from the results of OUT; none: it holds.

    ValueError where the folder is no record.
    """
    publication = publication_of(folder)
    yield from _changed(folder)
    yield from filter(None, signer(folder)[1:])
    try:
        derived = derived_files(folder)
    except ValueError as error:
        yield f"{error}".replace(f"{folder}/", "")
        return
    measured = [Measured(path=path, result=read_result(path)) for path in result_files(folder)]
    yield from contradictions(folder, measured)  # before the tables, which differ because of it
    for name, text in derived.items():
        if not (folder / name).is_file():
            yield f"{name}: missing"
        elif (folder / name).read_bytes() != text.encode():
            yield f"{name}: not what the results give{_first_difference((folder / name).read_bytes(), text)}"
    expected = {ABOUT, SUMS, SIGNATURE, *derived}
    for each in measured:
        beside = [each.path.with_suffix(suffix) for suffix in (".json", ".npz", ".log")]
        kept = [folder / "checkpoints" / each.result.checkpoint.unique_name / name for name in KEPT]
        expected |= {str(path.relative_to(folder)) for path in (*beside, *kept)}
    yield from (f"{name}: follows from no result" for name in sorted(_files(folder) - expected))
    if out is not None:
        yield from _against(folder, out, publication)


def publication_of(folder: Path) -> Publication:
    """What the user said of a record. ValueError where the folder is none."""
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} is no record: it holds no {ABOUT}; bench record OUT --to DIR makes one")
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        return msgspec.convert(about["publication"], Publication)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no record of bench record ({type(error).__name__}: {error})") from error


def written_by(folder: Path) -> str:
    """What to say of a record of another version of this tool, whose tables may look otherwise; "" of the same."""
    there, here = json.loads((folder / ABOUT).read_bytes()).get("version"), installed(TOOL)
    return "" if there == here else f"; version {there} wrote it, and this is {here}"


def _standing(folder: Path, measured: list[Measured]) -> Standing:
    # Nothing is kept in the folder, and nothing that was kept is believed.
    board = board_of(each.result for each in measured)
    level = level_with_best(board, measured, KeptTests[float](Path(os.devnull), float))
    return Standing(board=board, shown=board, level=level, measured=measured, results=folder / "results")


def _by_checkpoint(measured: Iterable[Measured]) -> dict[Key, list[Any]]:
    found: dict[Key, list[Any]] = {}
    for each in measured:
        found.setdefault(key_of(each.result.checkpoint), []).append(each.result)
    return dict(sorted(found.items()))


def _subject(used: CheckpointUsed, folder: Path) -> CardSubject:
    return CardSubject(used=used, config=read_config(folder) if (folder / "config.json").is_file() else None)


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


def _sums(folder: Path) -> str:
    return "".join(f"{sha256_of_file(folder / name)}  {name}\n" for name in sorted(_files(folder) - {SUMS}))


def _changed(folder: Path) -> Iterator[str]:
    """Against the sums that were written with it."""
    if not (folder / SUMS).is_file():
        yield f"{SUMS}: missing"
        return
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    known = {name: total for total, _, name in (line.partition("  ") for line in lines)}
    there = _files(folder) - {SUMS, SIGNATURE}
    for name in sorted(known.keys() | there):
        if name not in there:
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


def _first_difference(found: bytes, expected: str) -> str:
    lines = [text.split("\n") for text in (found.decode("utf-8", "replace"), expected)]
    pairs = zip(*lines, strict=False)  # of what the shorter text has: beyond its end no line differs, one is missing
    at = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 0)
    return f", first in line {at}" if at else ""
