"""folder:PATH, images in the folders of their classes, or with a table of labels.

Class folders are torchvision's ImageFolder: PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE; PATH/test stands in for a
missing PATH/val, and the set's notes say so. Tables (imagesets/label_tables.py) are metadata.csv as in Hugging Face's
imagefolder, labels.csv, train.csv and the like.
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
    """Open one split below `place`. ValueError for whatever is none of the layouts above.

    labels: names of tables, with commas between. image, label: their columns. separator: between labels of one image.
    """
    url = f"folder:{place}"
    require_folder(place, url)
    if tables := find_tables(url, place, labels):
        return labelled_files(url, place, split, tables, image, label, separator)
    return open_tree(url, place, split)
