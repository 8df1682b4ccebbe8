"""What a paper says of a record: CITATION.cff, the BibTeX entries of what was used, and how the numbers were measured.

All are functions of the record's results and of what the user said of it; references.bib is the table of all entries.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from bench.leaderboards.files import in_latex
from bench.results.record import CheckpointUsed, Result, images_seen
from bench.sharing.groups import Publication
from bench.statistics.paired import MOST_IMAGES

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


def protocol_words(result: Result) -> set[str]:
    """Its task, and what stands behind the @ of its protocol."""
    return {f"task-{result.task}", result.protocol.name.partition("@")[2].split("_")[0]}


def weights_words(used: CheckpointUsed) -> set[str]:
    """The method of the weights; of timm's and the Hub's models, the parts of their names."""
    return {used.method, *(re.findall("[a-z0-9]+", used.source.lower()) if used.method in BY_NAME else ())}


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
    versions = {
        name: sorted({str(r.versions[name]) for r in results if name in r.versions}) for name in names_of(results)
    }
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
        sentences.append(rf"\texttt{{{name}}}: {', '.join(details)}{cite(protocol_words(own[0]))}.")
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
    """`mae-s (ViT-S/16, mae vit_s, 3f2a91bc)~\\cite{he2022mae}`"""
    facts = [used.architecture, f"{used.method} {used.recipe}".strip() if not used.is_floor else "", used.digest[:8]]
    return f"{in_latex(used.name)} ({', '.join(map(in_latex, filter(None, facts)))}){cite(weights_words(used))}"


def names_of(results: Iterable[Result]) -> dict[str, None]:
    """Names of libraries of which results know the version, in their order."""
    return dict.fromkeys(name for result in results for name in result.versions)


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
