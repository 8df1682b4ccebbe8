"""revisited:FOLDER, revisited Oxford and Paris (Radenovic et al. 2018): train is the database, val are the queries.

FOLDER/jpg/*.jpg and FOLDER/gnd_NAME.json: `imlist` and `qimlist`, names of the images without .jpg, and `gnd`, of each
query its `bbx` and the places in imlist of its `easy`, `hard` and `junk` images. The published file is a pickle, which
could run code when it is read; its content as JSON is what is read here.
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
    """Open one split. ValueError for a folder without images or ground truth, and for names that have no image."""
    url = f"revisited:{place}"
    require_folder(place, url)
    truth, path = ground_truth(place)
    images, _ = images_below(os.path.join(place, "jpg"), ["."])
    files = {os.path.splitext(os.path.basename(name))[0]: number for number, name in enumerate(images.names)}
    names = truth["imlist" if split == "train" else "qimlist"]
    if missing := [name for name in names if name not in files]:
        raise ValueError(
            f"{url}: {path} names {len(missing)} images that jpg/ lacks, {missing[0]!r} first; unpack all of them"
        )
    return ImageSet(
        url=url,
        split=split,
        classes=("landmark",),
        labels=np.zeros(len(names), np.int64),
        images=images.take(np.array([files[name] for name in names])),
        notes=(f"{len(truth['imlist'])} images of the database, {len(truth['qimlist'])} queries, by {path}",),
        reports="retrieval",
    )


def ground_truth(place: str) -> tuple[dict[str, Any], str]:
    """The content of FOLDER/gnd_*.json, and its path. ValueError where there is none, or one of another form."""
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
        places = [image for entry in entries for group in GROUPS for image in entry[group]]
    except (KeyError, TypeError) as error:
        why = f"{type(error).__name__} {error}"
        raise ValueError(f"revisited:{place}: {paths[0]} has another form ({why}); convert it again") from error
    if len(entries) != len(truth["qimlist"]) or any(not 0 <= image < count for image in places):
        raise ValueError(
            f"revisited:{place}: {paths[0]} is of {len(entries)} queries and its list has {len(truth['qimlist'])}, or "
            f"it names images beyond the {count} of the database: it belongs to another set; convert it again"
        )
    return truth, paths[0]
