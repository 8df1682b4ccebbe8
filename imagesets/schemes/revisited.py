"""revisited:FOLDER, revisited Oxford and Paris (Radenovic et al. 2018): train is the database, val has the queries.

Images are FOLDER/jpg/*.jpg. FOLDER/gnd_NAME.json holds `imlist` and `qimlist`, the names of database and query images
without .jpg, and `gnd`, for each query its box `bbx` and the indices in imlist of its `easy`, `hard` and `junk` images.
The published file is a pickle, which could run code when read, so its content has to be converted to JSON once.
"""

import glob
import json
import os
from typing import Any

import numpy as np

from imagesets.listing import images_below, require_folder
from imagesets.sets import ImageSet, Split

PLACE = "FOLDER"
SPLITS = ("train", "val")
GROUPS = ("easy", "hard", "junk")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. Raises ValueError for missing or invalid ground truth, and for missing images."""
    url = f"revisited:{place}"
    require_folder(place, url)
    truth, path = ground_truth(place)
    images, _ = images_below(os.path.join(place, "jpg"), ["."])
    index_of = {os.path.splitext(os.path.basename(name))[0]: index for index, name in enumerate(images.names)}
    names = truth["imlist" if split == "train" else "qimlist"]
    if missing := [name for name in names if name not in index_of]:
        raise ValueError(
            f"{url}: {path} names {len(missing)} images that jpg/ lacks, {missing[0]!r} first; unpack all of them"
        )
    return ImageSet(
        url=url,
        split=split,
        classes=("landmark",),
        labels=np.zeros(len(names), np.int64),
        images=images.take(np.array([index_of[name] for name in names])),
        notes=(f"{len(truth['imlist'])} images of the database, {len(truth['qimlist'])} queries, by {path}",),
        reports="retrieval",
    )


def ground_truth(place: str) -> tuple[dict[str, Any], str]:
    """The content of FOLDER/gnd_*.json, and its path. Raises ValueError if it is missing or invalid."""
    paths = sorted(glob.glob(os.path.join(glob.escape(place), "gnd_*.json")))
    if not paths:
        raise ValueError(
            f"revisited:{place}: no gnd_*.json; convert gnd_NAME.pkl of revisitop once, in a place where its code may "
            "run: json.dump(pickle.load(open(pkl, 'rb')), open(out, 'w'), default=lambda array: array.tolist())"
        )
    with open(paths[0], encoding="utf-8") as file:
        truth = json.load(file)
    try:
        count, entries = len(truth["imlist"]), truth["gnd"]
        indices = [index for entry in entries for group in GROUPS for index in entry[group]]
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"revisited:{place}: {paths[0]} has another form ({reason}); convert it again") from error
    if len(entries) != len(truth["qimlist"]) or any(not 0 <= index < count for index in indices):
        raise ValueError(
            f"revisited:{place}: {paths[0]} is of {len(entries)} queries and its list has {len(truth['qimlist'])}, or "
            f"it names images beyond the {count} of the database: it belongs to another set; convert it again"
        )
    return truth, paths[0]
