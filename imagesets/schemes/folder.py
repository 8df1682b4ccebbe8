"""folder:PATH, images in class folders, or images with tables of labels.

Class folders are those of torchvision's ImageFolder: PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE. PATH/test is used
if there is no PATH/val, with a note. Tables (imagesets/label_tables.py) are metadata.csv as in Hugging Face's
imagefolder, labels.csv, train.csv and similar ones.
"""

from imagesets.label_tables import find_tables, labelled_files
from imagesets.listing import open_tree, require_folder
from imagesets.sets import ImageSet, Split

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
    return open_tree(url, place, split)
