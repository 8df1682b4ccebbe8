"""Which patches and heads a picture asks for, as users write them."""

import re
from collections.abc import Sequence

from torch import Tensor

from bench.pictures.pictures import Spot

QUARTERS = (0.25, 0.25, 0.75, 0.25, 0.25, 0.75, 0.75, 0.75)  # four patches, as in ExtreMA's figure 1
HEADS = re.compile(r"mean|all|\d+(,\d+)*")


def check_places(at: Sequence[float]) -> None:
    """ValueError unless these are pairs of shares."""
    if not at or len(at) % 2 or not all(0 <= value <= 1 for value in at):
        raise ValueError(f"at={','.join(map(str, at))}: give x,y of each patch, as shares of the image from 0 to 1")


def points_at(at: Sequence[float]) -> tuple[Spot, ...]:
    """Numbered points of x1,y1,x2,y2,..."""
    pairs = zip(at[::2], at[1::2], strict=True)
    return tuple(Spot(x=x, y=y, number=number) for number, (x, y) in enumerate(pairs))


def patches_at(points: Sequence[Spot], grid: tuple[int, int]) -> list[int]:
    """The number, row by row, of the patch in which each point lies."""
    rows, columns = grid
    return [min(int(p.y * rows), rows - 1) * columns + min(int(p.x * columns), columns - 1) for p in points]


def check_heads(heads: str) -> None:
    """ValueError unless this names heads."""
    if not HEADS.fullmatch(heads):
        raise ValueError(f"heads={heads}: write mean, all, or numbers from 0 such as 0,3")


def of_heads(maps: Tensor, heads: str) -> dict[str, Tensor]:
    """Maps (H, ...) -> title -> map (...): the mean, untitled, or one head each. ValueError for a head that is not
    there."""
    if heads == "mean":
        return {"": maps.mean(dim=0)}
    chosen = range(len(maps)) if heads == "all" else [int(number) for number in heads.split(",")]
    if wrong := [number for number in chosen if number >= len(maps)]:
        raise ValueError(f"heads={heads}: there is no head {wrong[0]}, they are numbered 0 to {len(maps) - 1}")
    return {f"head {number}": maps[number] for number in chosen}


def block_text(layer: int) -> str:
    """A block for people: `the last block`, `block 3`."""
    return "the last block" if layer == -1 else f"block {layer}"


def heads_text(heads: str) -> str:
    """What is drawn of the heads, for people: `, the mean of all heads`."""
    return ", the mean of all heads" if heads == "mean" else ""
