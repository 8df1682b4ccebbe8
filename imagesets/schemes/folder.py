"""folder:PATH, images in class folders, or images with tables of labels.

Class folders are those of torchvision's ImageFolder: PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE. PATH/test is used
if there is no PATH/val, with a note. Tables (imagesets/label_tables.py) are metadata.csv as in Hugging Face's
imagefolder, labels.csv, train.csv and similar ones.
"""

import os
from dataclasses import replace
from itertools import product

import numpy as np

from imagesets.label_tables import find_tables, labelled_files
from imagesets.listing import open_tree, require_folder, short_list
from imagesets.sets import FileImages, ImageSet, Split

PLACE = "PATH"
SPLITS = ("train", "val")
OPTIONS = ("labels", "image", "label", "separator")


def open_split(
    place: str, split: Split, labels: str = "", image: str = "", label: str = "", separator: str = ""
) -> ImageSet:
    """Open one split below `place`. Raises ValueError for other layouts than those above.

    labels: file names of tables, separated by commas. image, label: names of their columns. separator: between several
    labels of an image.
    """
    url = f"folder:{place}"
    require_folder(place, url)
    if tables := find_tables(url, place, labels):
        return labelled_files(url, place, split, tables, image, label, separator)
    image_set = open_tree(url, place, split)
    assert isinstance(image_set.images, FileImages)
    names, first = image_set.images.names, image_set.classes[0]
    inner = {name.split("/")[1] for name in names.take(np.flatnonzero(image_set.labels == 0)) if name.count("/") > 1}
    if len(inner) < 2 or {tuple(name.split("/")[:2]) for name in names} != set(product(image_set.classes, inner)):
        return image_set
    note = (
        f"each class, such as {first!r}, holds the folders {short_list(sorted(inner))}, which are not read as classes; "
        f"if they are and it is a domain, give one domain: folder:{os.path.join(image_set.images.root, first)}"
    )
    return replace(image_set, notes=(*image_set.notes, note))
