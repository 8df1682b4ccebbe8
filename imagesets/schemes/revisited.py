"""revisited:FOLDER, revisited Oxford and Paris (Radenovic et al. 2018): train is the database, val has the queries.

Images are FOLDER/jpg/*.jpg. FOLDER/gnd_NAME.json holds `imlist` and `qimlist`, the names of database and query images
without .jpg, and `gnd`, for each query its box `bbx` and the indices in imlist of its `easy`, `hard` and `junk` images.
The published file is a pickle, which could run code when read, so its content has to be converted to JSON once.
"""

import glob
import os
from collections import Counter
from typing import Annotated, TypedDict

import numpy as np
from msgspec import Meta

from engine.files import MAX_TEXT, read_json
from imagesets.listing import images_below, require_folder, short_list
from imagesets.sets import ImageSet, Split

PLACE = "FOLDER"
SPLITS = ("train", "val")
Index = Annotated[int, Meta(ge=0)]  # of an image in imlist


class Groups(TypedDict):
    """Images of the database that show a query's landmark, by difficulty."""

    easy: list[Index]
    hard: list[Index]
    junk: list[Index]


class GroundTruth(TypedDict):
    """The content of gnd_NAME.json; `bbx` is not read."""

    imlist: list[str]
    qimlist: list[str]
    gnd: list[Groups]


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. Raises ValueError for missing or invalid ground truth, and for missing images."""
    url = f"revisited:{place}"
    require_folder(place, url)
    truth, path = ground_truth(place)
    images, _ = images_below(os.path.join(place, "jpg"), ["."])
    stems = [os.path.splitext(os.path.basename(name))[0] for name in images.names]
    index_of = {stem: index for index, stem in enumerate(stems)}
    names = truth["imlist" if split == "train" else "qimlist"]
    listed, counts = {*truth["imlist"], *truth["qimlist"]}, Counter(stems)
    if same := [images.names[i] for i, stem in enumerate(stems) if counts[stem] > 1 and stem in listed]:
        raise ValueError(f"{url}: {short_list(same)} in jpg/ have the same name; keep one of each")
    if missing := [name for name in names if name not in index_of]:
        raise ValueError(
            f"{url}: {path} names {len(missing)} images that jpg/ lacks, {missing[0]!r} first; unpack all of them"
        )
    repeated = [name for name, count in Counter(truth["qimlist"]).items() if count > 1]
    return ImageSet(
        url=url,
        split=split,
        classes=("landmark",),
        labels=np.zeros(len(names), np.int64),
        images=images.take(np.array([index_of[name] for name in names])),
        notes=(
            f"{len(truth['imlist'])} images of the database, {len(truth['qimlist'])} queries, by {path}",
            *([f"{short_list(repeated)} listed more than once among the queries"] if repeated else []),
        ),
        reports="retrieval",
    )


def ground_truth(place: str) -> tuple[GroundTruth, str]:
    """The content of FOLDER/gnd_*.json, and its path. Raises ValueError if it is missing or invalid."""
    paths = sorted(glob.glob(os.path.join(glob.escape(place), "gnd_*.json")))
    if not paths:
        raise ValueError(
            f"revisited:{place}: no gnd_*.json; convert gnd_NAME.pkl of revisitop once, in a place where its code may "
            "run: json.dump(pickle.load(open(pkl, 'rb')), open(out, 'w'), default=lambda array: array.tolist())"
        )
    if len(paths) > 1:
        raise ValueError(f"revisited:{place}: which of {short_list(paths)} is its ground truth? keep one")
    try:
        truth: GroundTruth = read_json(paths[0], MAX_TEXT, GroundTruth)
        check_truth(truth)
    except (OSError, ValueError) as error:
        reason = str(error).removeprefix(f"{paths[0]}: ")
        raise ValueError(f"revisited:{place}: {paths[0]} has another form ({reason}); convert it again") from error
    return truth, paths[0]


def check_truth(truth: GroundTruth) -> None:
    """Raise ValueError if the lists do not fit each other, or if no query has positives."""
    count, queries = len(truth["imlist"]), truth["gnd"]
    if len(queries) != len(truth["qimlist"]):
        raise ValueError(f"`gnd` is of {len(queries)} queries, and `qimlist` has {len(truth['qimlist'])}")
    if repeated := [name for name, times in Counter(truth["imlist"]).items() if times > 1]:
        raise ValueError(f"`imlist` has {short_list(repeated)} more than once")
    index_of = {name: index for index, name in enumerate(truth["imlist"])}
    for number, groups in enumerate(queries):
        indices = [*groups["easy"], *groups["hard"], *groups["junk"]]
        if max(indices, default=0) >= count:
            raise ValueError(f"`gnd[{number}]` names image {max(indices)}, beyond the {count} of `imlist`")
        if len(set(indices)) < len(indices):
            raise ValueError(f"`gnd[{number}]` names image {Counter(indices).most_common(1)[0][0]} twice")
        query, is_scored = truth["qimlist"][number], groups["easy"] or groups["hard"]
        if is_scored and query in index_of and index_of[query] not in groups["junk"]:
            raise ValueError(
                f"the query {query!r} is in `imlist` too, so that it finds itself first; name its index there, "
                f"{index_of[query]}, in `junk` of `gnd[{number}]`"
            )
    if not any(groups["easy"] or groups["hard"] for groups in queries):
        raise ValueError("no query has an easy or hard image, so there is nothing to score")
