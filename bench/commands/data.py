"""Check an image set, bench data check URL, or download a public one, bench data get NAME."""

import argparse
from contextlib import ExitStack
from pathlib import Path

from engine.printing import say

MOST = 20  # problems of scenes that are listed; a wrong classes.txt is one in each of them
EPILOG = """examples:
  bench data check folder:/data/cifar10
  bench data check imagenet:/data/ILSVRC --list-only
  bench data get                                       the sets that can be downloaded, with sizes and licences
  bench data get OxfordIIITPet --out /data             into /data/OxfordIIITPet
  bench data get hf:uoft-cs/cifar10 --out /data        a set of the Hugging Face Hub

exit codes: 0 the set can be used as it is; 1 there is something to fix; 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench data`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "action",
        choices=("check", "get"),
        help="check: counts, classes, unreadable files, what to fix; get: download, after size and licence were said",
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="to check, such as folder:PATH; schemes: bench list imagesets, bench list layouts. To get: a name of the "
        "list, or hf:NAME",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="get: the set goes into DIR/NAME")
    parser.add_argument("--list-only", action="store_true", help="do not decode the images")


def run(arguments: argparse.Namespace) -> int:
    """0: the set can be used as it is; 1: there is something to fix."""
    if arguments.action == "get":
        return get(arguments.url, arguments.out)
    if not arguments.url or arguments.out:
        raise ValueError("bench data check URL: give one image set, and no --out")
    from downstream.data.scenes import layout_of, scene_schemes
    from engine.progress import Progress
    from imagesets.check import check_image_set, render
    from imagesets.sets import parse_url

    if layout_of(arguments.url):
        return check_scenes(arguments.url, read_all=not arguments.list_only)
    parse_url(arguments.url, scene_schemes())
    with ExitStack() as stack:
        shown: list[Progress] = []
        report = check_image_set(
            arguments.url,
            read_all=not arguments.list_only,
            start=lambda total: shown.append(stack.enter_context(Progress("decoding", total, "images"))),
            advance=lambda count: shown[0].advance(count),
        )
    say(*render(report).split("\n"))
    return 0 if report.ok else 1


def get(name: str | None, out: Path | None) -> int:
    """Say size, licence and what `--data` will take, download, and say it again; without a name, list the sets."""
    from bench import downloads
    from bench.cli.settings import check_writable

    if name is None:
        say(*downloads.offers())
        return 0
    if out is None:
        raise ValueError(f"bench data get {name} --out DIR: say where to")
    folder = downloads.folder_of(name, out)
    check_writable(out)
    ready = f"bench run --data {' or '.join(downloads.forms(name, folder))}"
    say(f"{name}: {downloads.terms(name)}", f"  then: {ready}")
    downloads.get(name, folder)
    columns = "; where its columns have other names, '?image=NAME&label=NAME'" if name.startswith("hf:") else ""
    say(f"{folder} is whole: {ready}{columns}")
    return 0


def check_scenes(url: str, read_all: bool) -> int:
    """The same for labelled scenes: every mask or size against its image. A split that cannot be opened, as a mask
    lacks, is a problem like others."""
    import tempfile
    from pathlib import Path

    from downstream.data.scenes import decode_scenes, open_scenes, parse_scene_url
    from engine.progress import Progress
    from imagesets.sets import SPLITS

    problems: list[str] = []
    parse_scene_url(url)
    say(url)
    with tempfile.TemporaryDirectory() as folder:
        for split in SPLITS:
            try:
                scenes = open_scenes(url, split, Path(folder))
            except ValueError as error:
                problems += [str(error)] if str(error) not in problems else []  # both splits may lack one folder
                continue
            classes = f", {len(scenes.classes)} classes" if scenes.classes else ""
            say(f"  {split}: {len(scenes):,} scenes{classes}")
            say(f"    fingerprint {scenes.fingerprint[:16]}", *(f"    note: {note}" for note in scenes.notes))
            if read_all:
                with Progress(f"reading {split}", len(scenes)) as progress:
                    unreadable, pixels = decode_scenes(scenes, progress.advance)
                problems += unreadable
                if pixels:
                    say(*(f"    note: {line}" for line in pixels.lines()))
                    try:
                        pixels.check()
                    except ValueError as error:
                        problems.append(str(error))
    say(*(f"  FIX: {problem}" for problem in problems[:MOST]), *([] if problems else ["  no problems found"]))
    if len(problems) > MOST:
        say(f"  and {len(problems) - MOST} more scenes with problems")
    return 1 if problems else 0
