"""folder:PATH, a torchvision ImageFolder per split: PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE.

PATH/test stands in for a missing PATH/val, and the set's notes say so.
"""

from imagesets.listing import open_tree
from imagesets.sets import ImageSet, Split

PLACE = "PATH"
SPLITS = ("train", "val")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split below `place`. Raises ValueError for whatever is not the layout above."""
    return open_tree(f"folder:{place}", place, split)
