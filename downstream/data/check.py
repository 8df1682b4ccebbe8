"""`bench data check URL` of labelled scenes: every mask or size against its image."""

import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from downstream.data.listing import DepthMaps, Videos, unread_files
from downstream.data.scenes import (
    CheckedScene,
    SceneSet,
    check_palettes,
    decode_scenes,
    depth_warnings,
    nothing_trained,
    open_scenes,
    parse_scene_url,
)
from engine.printing import say
from engine.progress import Progress
from engine.tasks import Task, Workspace
from imagesets.check import (
    REMOVE_ONE,
    in_both_text,
    note_on_copies,
    notes_on_pixels,
    problems_of_pixels,
    same_contents,
)
from imagesets.sets import SPLITS, MissingSplit


def problems_of(url: str, tasks: Callable[[], Sequence[Task]], read_all: bool) -> list[str]:
    """Print what is in the splits of a set; what has to be fixed.

    A split that cannot be opened, for example because a mask is missing, is a problem like any other. tasks: those that
    evaluate on such scenes; importing them takes seconds, and only some sets need them. read_all: decode the scenes.
    """
    problems: list[str] = []
    is_whole = True  # whether all splits that are there could be opened
    splits: list[SceneSet] = []
    checked: list[dict[int, CheckedScene]] = []
    parse_scene_url(url)
    say(url)
    with tempfile.TemporaryDirectory() as folder:
        space = Workspace(cache=Path(folder), data=url)
        for split in SPLITS:
            try:
                scenes = space.images(split, partial(open_scenes, cache=space.cache))
            except MissingSplit as error:
                if split == "val" or all(task.NEEDS_TRAIN for task in tasks()):
                    problems.append(str(error))
                else:
                    say(f"    note: {split}: {error}; the tasks for these scenes do not need it")
                continue
            except ValueError as error:
                problems += [str(error)] if str(error) not in problems else []  # both splits may miss the same folder
                is_whole = False
                continue
            splits.append(scenes)
            kinds = f", {len(scenes.classes)} classes" if scenes.classes else ""
            kinds = f", {len(scenes.videos)} videos" if isinstance(scenes.listing, Videos) else kinds
            say(f"  {split}: {len(scenes):,} scenes{kinds}")
            say(f"    fingerprint {scenes.fingerprint[:16]}", *(f"    note: {note}" for note in scenes.notes))
            problems += scenes.listing.warnings
            if read_all:
                with Progress(f"reading {split}", len(scenes)) as progress:
                    unreadable, pixels, readable = decode_scenes(scenes, progress.advance)
                checked.append(readable)
                problems += unreadable.values()
                facts = [scene.image for scene in readable.values()]
                deep_maxima = np.array([image.deep_maximum for image in facts], np.int16)
                problems += problems_of_pixels(split, np.array([image.pages for image in facts], int), deep_maxima)
                notes = notes_on_pixels(deep_maxima, sum(image.is_turned for image in facts))
                notes += note_on_copies(
                    np.array([*readable], int),
                    np.array([image.digest for image in facts], np.uint64),
                    np.array([scene.annotation for scene in readable.values()], np.uint64),
                    scenes.image_path,
                    "annotation",
                )
                if readable and isinstance(scenes.listing, DepthMaps):
                    notes += depth_warnings(scenes, [scene.farthest for scene in readable.values()])
                if pixels:
                    notes += pixels.warnings()
                    try:
                        pixels.check()
                    except ValueError as error:
                        problems.append(str(error))
                say(*(f"    note: {line}" for line in notes))
        try:
            if len(splits) == 2:
                splits[0].listing.check_with(splits[1].listing)
            check_palettes(*splits)
        except ValueError as error:
            problems.append(str(error))
        if len(checked) == 2 and not nothing_trained(url):
            digests = [{index: scene.image.digest for index, scene in readable.items()} for readable in checked]
            pairs = [(splits[0].image_path(i), splits[1].image_path(j)) for i, j in same_contents(*digests)]
            problems += [f"{in_both_text(pairs)}: {REMOVE_ONE}"] if pairs else []
        if splits and is_whole:
            files = [file for scenes in splits for file in scenes.listing.files]
            say(*(f"  note: {note}" for note in unread_files(splits[0].root, files)))
        problems += [] if problems or not read_all else refusals(tasks(), space)
    return problems


def one_of_each_kind(problems: Sequence[str]) -> list[str]:
    """The first of the problems that differ only in their file and in numbers, with how many they are.

    A problem is FILE: TEXT; the text may quote the file again.
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"'.*'|\".*\"|\S*/\S*|\d+", "", problem.partition(": ")[2]), []).append(problem)
    return [f"{first}{f' (and {len(others)} more like this)' if others else ''}" for first, *others in kinds.values()]


def refusals(tasks: Sequence[Task], space: Workspace) -> list[str]:
    """Why all tasks that read a set would refuse it before a run; empty if one would not."""
    reasons: dict[str, str] = {}
    for task in tasks:
        try:
            task.check_images(space)
        except ValueError as error:
            reasons[str(error)] = ""
        else:
            return []
    return list(reasons)
