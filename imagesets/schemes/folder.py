"""folder:PATH, images in class folders, or images with tables of labels.

Class folders are those of torchvision's ImageFolder: PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE. PATH/test is used
if there is no PATH/val, with a note. Tables (imagesets/label_tables.py) are metadata.csv as in Hugging Face's
imagefolder, labels.csv, train.csv and similar ones.
"""

import os
from dataclasses import replace

from imagesets.label_tables import find_tables, labelled_files
from imagesets.listing import open_tree, require_folder, short_list, subfolders
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
    if domains := note_on_domains(image_set):
        return replace(image_set, notes=(*image_set.notes, domains))
    return image_set


def note_on_domains(image_set: ImageSet) -> str:
    """A note if all class folders hold the same two or more folders, as domains hold classes in PACS; "" if not."""
    assert isinstance(image_set.images, FileImages)
    folders = subfolders(os.path.join(image_set.images.root, image_set.classes[0]))
    paths = (os.path.join(image_set.images.root, name) for name in image_set.classes[1:])
    if len(folders) < 2 or len(image_set.classes) < 2 or any(subfolders(path) != folders for path in paths):
        return ""
    return (
        f"each of the classes {short_list(image_set.classes)} holds the same folders, {short_list(folders)}, which are "
        f"not read as classes; if they are, give one domain: folder:{image_set.images.root}/{image_set.classes[0]}"
    )
