"""Scene sets: images with masks of classes, objects, depth maps or pairs, named by a URL and read from its folder.

    LAYOUT:ROOT      a folder as downloaded; a layout is a file of downstream/layouts/, or a plugin. `?NAME=VALUE&...`
                     at its end sets options of the layout
    tiny-LAYOUT:     scenes of scikit-learn's digits in the same layout, drawn into the cache

Opening a set lists its files and decodes no image. N images, K classes, H x W pixels.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from downstream.data.listing import IGNORED, DepthMaps, ImagePairs, Instances, Listing, PairAnnotation, Videos
from downstream.data.reading import check_lossless, check_values, named_in_errors
from engine.distributed import World
from engine.errors import option
from engine.extensions import extensions, load_extension
from engine.files import folder_atomic, open_regular, read_json, read_regular
from engine.machine import run_on_core_threads
from engine.printing import did_you_mean, say
from engine.progress import Progress
from engine.tasks import Workspace
from imagesets.check import ImageFacts, image_facts
from imagesets.decoding import MAX_BYTES, decode_rgb, load_as_stored, open_image
from imagesets.sets import (
    SPLITS,
    URL_OPTIONS,
    MissingSplit,
    Split,
    content_digest,
    contents_digest,
    image_size,
    parse_options,
    read_head,
    warnings_of_pages,
)
from imagesets.walk import size_and_change

TINY = "tiny-"
TINY_VERSION = 1  # raise it when a tiny set's files would have other pixels under the same names
TEXTS = (".json", ".xml", ".txt")  # endings of annotations that are read as a whole when a set is opened
MAX_NAMED_CLASSES = 8  # classes without pixels that a warning names
MAX_COUNTED_MASKS = 2000  # masks of a split in which a run counts the pixels of each class before it trains

Colour = tuple[int, ...]  # red, green and blue
GREY_OF_TWO_CLASSES = (1, 255)  # number and grey in palettes of 0 as black and 1 as white, whose numbers are classes
GREY_STEPS = {"L;2": 85, "L;4": 17}  # Pillow's modes of grey PNGs of 2 and 4 bits -> grey that the number 1 is read as
SAVE_NUMBERS = "save them as 8-bit PNG in grey"
NUMBERS_ARE_CLASSES = (
    f"the numbers are read as classes; {SAVE_NUMBERS}, or list the classes with their colours in classes.txt of "
    "masks:ROOT"
)

ROOM_DEPTH = 1.0  # metres, less than the farthest depth in a set of rooms
FARTHEST_DEPTH = 10.0  # metres, the largest depth that protocols of depth_linear predict

Kind = TypeVar("Kind", Listing, Instances, DepthMaps, ImagePairs, Videos)


@dataclass(frozen=True, kw_only=True)
class SceneSet:
    """One split of a scene set.

    root: its folder. listing: its files, and what their annotations mean. palette: video ("" if there are none) and
    number in a mask -> its colours in the palettes of the masks read so far, by this set or its subsets, and the first
    mask by name with each.
    """

    url: str
    split: Split
    root: Path
    listing: Listing | Instances | DepthMaps | ImagePairs
    palette: dict[tuple[str, int], dict[Colour, Path]] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.listing.images)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.listing.classes

    @property
    def notes(self) -> tuple[str, ...]:
        return self.listing.notes

    @property
    def mask_listing(self) -> Listing:
        """The listing, if it is one of masks; otherwise raises ValueError."""
        return self._listing_of_kind(Listing, "ade20k")

    @property
    def instances(self) -> Instances:
        """The listing, if it is one of objects; otherwise raises ValueError."""
        return self._listing_of_kind(Instances, "coco")

    @property
    def image_pairs(self) -> ImagePairs:
        """The listing, if it is one of image pairs; otherwise raises ValueError."""
        return self._listing_of_kind(ImagePairs, "spair")

    @cached_property
    def videos(self) -> dict[str, list[int]]:
        """Name of each video, the folder of its frames -> their indices. ValueError if the listing is not of videos."""
        images = self._listing_of_kind(Videos, "davis").images
        folders = groupby(range(len(images)), lambda index: images[index].split("/")[-2])
        return {name: list(frames) for name, frames in folders}

    @property
    def depth_maps(self) -> DepthMaps:
        """The listing, if it is one of depth maps; otherwise raises ValueError."""
        return self._listing_of_kind(DepthMaps, "nyu")

    def _listing_of_kind(self, kind: type[Kind], example: str) -> Kind:
        if not isinstance(self.listing, kind):
            raise ValueError(
                f"{self.url}: it holds {self.listing.HOLDS}, no {kind.HOLDS}; give a set with them, such as "
                f"{example}:ROOT"
            )
        return self.listing

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for users about images and annotations, a line each."""
        pages = warnings_of_pages(self.split, len(self), lambda index: open_regular(self.image_path(index)))
        return (*self.listing.warnings, *pages)

    @property
    def facts(self) -> dict[str, Any]:
        """What results record about the set."""
        return {"url": self.url, "images": len(self), "fingerprint": self.fingerprint}

    def image_path(self, index: int) -> Path:
        return self.root / self.listing.images[index]

    def mask_path(self, index: int) -> Path:
        return self.root / self.mask_listing.masks[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over names and sizes of images and annotation files, and over classes that the set defines.

        It does not depend on where the folder is.
        """
        state = hashlib.sha256()
        for name, size in zip(self.listing.files, self.file_stats[:, 0].tolist(), strict=True):
            state.update(f"{name} {size}\n".encode(errors="surrogateescape"))
        if isinstance(self.listing, Listing) and self.listing.own_classes:
            state.update(repr((self.listing.classes, self.listing.classes_of, self.listing.colours)).encode())
        state.update(self.listing.meaning.encode())
        return state.hexdigest()

    @cached_property
    def file_stats(self) -> np.ndarray:
        """(F, 3) int64: size in bytes, modification time in ns and inode of each image and annotation file.

        BROKEN_LINK_SIZE, 0, 0 for a broken link.
        """
        rows = [size_and_change(self.root / name) for name in self.listing.files]
        return np.array(rows, np.int64).reshape(-1, 3)

    @cached_property
    def contents(self) -> str:
        """Digests that tell sets with the same fingerprint apart, as ImageSet.contents."""
        files = self.listing.files
        texts = dict.fromkeys(str(self.root / name) for name in files if name.lower().endswith(TEXTS))
        return contents_digest(self.file_stats[:, 1:], lambda index: read_head(self.root / files[index]), texts)

    @cached_property
    def unusable(self) -> dict[int, str]:
        """Indices of the scenes that cannot be used -> the reason, for runs with --skip-bad.

        Decodes every file, once for all tasks of a run.
        """
        with Progress(f"checking scenes of {self.url} {self.split}", len(self)) as progress:
            return decode_scenes(self, progress.advance).problems

    @cached_property
    def pixels(self) -> "ClassPixels":
        """Pixels of each class in at most MAX_COUNTED_MASKS masks, evenly spaced; counted once for all tasks of a run.

        Raises ValueError, naming the file, if a mask cannot be used.
        """
        masks, counts = min(len(self), MAX_COUNTED_MASKS), []
        with Progress(f"reading masks of {self.split}", masks, "masks") as progress:

            def count(index: int) -> None:
                counts.append(count_pixels(scene_mask(self, index), len(self.classes)))
                progress.advance(1)

            run_on_core_threads(count, (np.arange(masks) * len(self) // masks).tolist())
        return ClassPixels(self, np.sum(counts, axis=0), masks)

    def subset(self, indices: Sequence[int] | np.ndarray, name: str) -> "SceneSet":
        """The scenes at `indices` (M,), in that order; `name` is appended to the URL."""
        return replace(self, url=f"{self.url}#{name}", listing=self.listing.take(indices))

    def limited(self, count: int) -> "SceneSet":
        """At most `count` scenes, evenly spaced; of videos, about as many frames, in whole videos.

        Raises ValueError if count is below 1.
        """
        if count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"{self.url}: a limit of {count} images leaves none; give 1 or more")
        if not isinstance(self.listing, Videos):
            return self.subset(np.arange(count) * len(self) // count, f"limited-{count}")
        names = list(self.videos)
        number = max(1, count * len(names) // len(self))
        chosen = [names[index] for index in np.arange(number) * len(names) // number]
        frames = [index for name in chosen for index in self.videos[name]]
        notes = (*self.notes, f"limited to {number} of {len(names)} videos: {', '.join(chosen)}")
        return replace(self, listing=replace(self.listing, notes=notes)).subset(frames, f"limited-{count}")


def open_scenes(url: str, split: Split, cache: Path) -> SceneSet:
    """One split of the set that `url` names; a tiny set is first drawn into `cache` if it is not there.

    Raises:
        ValueError: unknown scheme, missing folder, empty split, or images without annotations.
    """
    layout, place, options = parse_scene_url(url)
    tiny = url.startswith(TINY)
    root = tiny_folder(layout, cache) if tiny else Path(place)
    module = load_extension("layouts", layout)
    try:
        if not tiny:
            if not root.is_dir():
                raise ValueError(f"no folder {root}")
            root = module.recognised(root)
        listing = module.listed(root, split, **options)
    except MissingSplit as error:
        raise MissingSplit(f"{url}: {error}") from error
    except OSError as error:
        raise ValueError(f"{url}: {error.filename}: {error.strerror}; is it a broken link?") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    if not listing.images:
        raise ValueError(f"{url}: the {split} split is empty; it needs images in {root / module.IMAGES[split]}")
    return SceneSet(url=url, split=split, root=root, listing=listing)


def in_both_warnings(train: SceneSet, val: SceneSet) -> list[str]:
    """A warning if files of images are in both splits, which a task would train on and score."""
    same = sorted({*train.listing.images} & {*val.listing.images})
    if not same or nothing_trained(val.url):
        return []
    return [
        f"{len(same)} of the {len(val)} validation images are training images too, such as {same[0]}; take them out of "
        "one of the lists"
    ]


def nothing_trained(url: str) -> bool:
    """Whether no task trains on sets of the URL's layout, so that an image may be in both splits."""
    return getattr(load_extension("layouts", layout_of(url)), "NOTHING_TRAINED", False)


def tiny_folder(layout: str, cache: Path) -> Path:
    """The folder of a layout's tiny set, which is drawn at its first use."""
    folder = cache / f"{TINY}{layout}-{TINY_VERSION}"
    if not folder.is_dir():
        with folder_atomic(folder) as root:
            for split in SPLITS:
                load_extension("layouts", layout).write_tiny(root, split)
    return folder


def scene_schemes() -> dict[str, str]:
    """Schemes of the URLs of scene sets -> what follows the colon."""
    layouts = extensions("layouts")
    return dict.fromkeys(layouts, "ROOT") | {TINY + layout: "" for layout in layouts}


def draw_tiny_sets(urls: Iterable[str], cache: Path, world: World) -> None:
    """Let the first process draw the tiny sets among `urls`, before the other processes look for them."""
    if layouts := [layout_of(url) for url in urls if url.startswith(TINY)]:
        world.on_rank0(lambda: [tiny_folder(layout, cache) for layout in layouts if layout])


def open_both(space: Workspace, splits: Sequence[Split] = SPLITS) -> list[SceneSet]:
    """Training and validation scenes of the workspace's set, or those of other `splits`.

    Every process reads the annotations itself: COCO's take seconds to parse, but would be gigabytes to send.
    """
    draw_tiny_sets([space.data], space.cache, space.world)
    opener = partial(open_scenes, cache=space.cache)
    return space.world.on_all_ranks(lambda: [space.images(split, opener) for split in splits])


def layout_of(url: str) -> str:
    """The layout that a URL's scheme names; "" if the URL does not name a scene set."""
    layout = url.partition(":")[0].removeprefix(TINY)
    return layout if layout in extensions("layouts") else ""


def serves(url: str, layout: str) -> bool:
    """Whether tasks for scenes of `layout` can run on the set that `url` names."""
    own = layout_of(url)
    return own == layout or (bool(own) and layout in served_layouts(own))


def check_workspace(space: Workspace, layout: str) -> None:
    """Raise ValueError unless tasks for scenes of `layout` can run on the workspace's set, and decode it exactly."""
    url = space.data
    parse_scene_url(url)
    if not serves(url, layout):
        raise ValueError(f"{url}: this task needs {layout}:ROOT or tiny-{layout}:")
    if space.decode != "exact":
        raise ValueError(f"{url}: dense tasks read images exactly; run them without {option('decode', space.decode)}")


def served_layouts(layout: str) -> tuple[str, ...]:
    """Other layouts whose tasks can also run on sets of `layout`; empty if it has tasks of its own."""
    return tuple(getattr(load_extension("layouts", layout), "SERVES", ()))


def parse_scene_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Layout, folder, with ~ expanded, and options of a URL; "" for the folder of a tiny set.

    Raises:
        ValueError: the scheme or an option is unknown, the folder is missing, or a tiny set has one.
    """
    scheme, colon, place = URL_OPTIONS.sub("", url).partition(":")
    layout = scheme.removeprefix(TINY)
    if not colon or layout not in extensions("layouts"):
        urls = {name: f"{name}:{place}" for name, place in scene_schemes().items()}
        raise ValueError(f"{url!r} is no set of labelled scenes{did_you_mean(scheme, urls, rest=f':{place}')}")
    if scheme.startswith(TINY) and place:
        raise ValueError(f"{url}: the tiny set is drawn and takes no path; write {scheme}:")
    if not scheme.startswith(TINY) and not place:
        raise ValueError(f"{url}: give the folder, {scheme}:/data/{scheme}")
    return layout, os.path.expanduser(place), parse_options(url, "layouts", layout)


def scene_image(scenes: SceneSet, index: int) -> Image.Image:
    """A scene's image in RGB. Raises ValueError, naming the file, if it cannot be read."""
    path = scenes.image_path(index)
    with named_in_errors(path):
        return decode_rgb(read_regular(path, MAX_BYTES), str(path))


def scene_mask(scenes: SceneSet, index: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """Class of each pixel of a scene, (H, W) uint8; IGNORED for pixels without a class.

    Raises:
        ValueError: the mask, which the message names, cannot be read, holds a value or colour of no class, or does not
            fit an image of `size` (height, width).
    """
    path, listing = scenes.mask_path(index), scenes.mask_listing
    coloured = bool(listing.colours)
    with named_in_errors(path):
        mask = open_image(read_regular(path, MAX_BYTES))
        check_values(mask, coloured)
        step = GREY_STEPS.get(str(mask.tile[0][3])) if mask.tile else None
        values = np.asarray(mask.convert("RGB") if coloured else mask, np.uint8)
    if mask.mode == "P" and not coloured:
        record_palette(scenes, path, mask)
    if step and not coloured:
        check_few_bits(listing, path, values, step)
    if size and values.shape[:2] != tuple(size):
        raise ValueError(
            f"{path}: the mask is {' x '.join(map(str, values.shape[:2]))} pixels and its image {size[0]} x {size[1]}; "
            "take both from the same download"
        )
    try:
        return listing.to_classes(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_few_bits(listing: Listing, path: Path, values: np.ndarray, step: int) -> None:
    """Raise ValueError if a mask of 2 or 4 bits, whose numbers are read as multiples of `step`, may hold numbers that
    are classes themselves."""
    numbers = np.unique(values // step)
    if numbers.any() and {*listing.known_values}.issuperset(numbers.tolist()):
        raise ValueError(
            f"{path}: a PNG of fewer than 8 bits, perhaps by an optimiser, whose number {numbers[-1]} is read as grey "
            f"{numbers[-1] * step}, while {numbers[-1]} is a class too; {SAVE_NUMBERS}"
        )


def record_palette(scenes: SceneSet, path: Path, mask: Image.Image) -> None:
    """Keep the colours of a mask's palette for `check_palettes`.

    Raises ValueError if all are greys that are classes too: then these, and not the numbers, are the classes.
    """
    palette = list(zip(*[iter(mask.getpalette() or [])] * 3, strict=False))
    used = {number: palette[number] for number, count in enumerate(mask.histogram()[: len(palette)]) if count}
    is_video = isinstance(scenes.listing, Videos)
    greys = {number: colour[0] for number, colour in used.items() if number != IGNORED}
    if not is_video and all(len(set(colour)) == 1 for colour in palette):
        others = [pair for pair in greys.items() if pair[0] != pair[1] and pair != GREY_OF_TWO_CLASSES]
        if others and {*scenes.mask_listing.known_values}.issuperset(greys.values()):
            number, grey = others[0]
            raise ValueError(f"{path}: its palette shows the number {number} as grey {grey}; {NUMBERS_ARE_CLASSES}")
    for number, colour in used.items():
        masks = scenes.palette.setdefault((path.parent.name if is_video else "", number), {})
        masks[colour] = min(path, masks.get(colour, path))


def check_palettes(*splits: SceneSet, video: str | None = None) -> None:
    """Raise ValueError if masks that were read, of a set or of a video, show a number in different colours.

    Tools that make a palette for each file number the colours by their frequency, so that the numbers are neither
    classes nor objects. video: check this one alone.
    """
    colours: dict[tuple[str, int], dict[Colour, Path]] = {}
    for scenes in splits:
        for key, masks in scenes.palette.items():
            colours[key] = {**masks, **colours.get(key, {})}
    for (name, number), masks in sorted(colours.items()):
        if len(masks) > 1 and video in (None, name):
            (first, first_path), (second, second_path) = sorted(masks.items(), key=lambda entry: entry[1])[:2]
            advice = f"the numbers are read as objects; {SAVE_NUMBERS}" if name else NUMBERS_ARE_CLASSES
            raise ValueError(
                f"{second_path}: its palette shows the number {number} as {' '.join(map(str, second))} (red, green, "
                f"blue), and that of {first_path} as {' '.join(map(str, first))}; {advice}"
            )


def warn_of_masks(space: Workspace, *splits: SceneSet) -> dict[str, list[str]]:
    """Split -> warnings on ignored pixels and absent classes in its masks, which are also printed; none of tiny sets.

    Raises ValueError if a split's masks hold fewer than two classes or cannot be read, or if palettes of masks differ.
    """

    def read() -> dict[str, list[str]]:
        for scenes in splits:
            scenes.pixels.check()
        check_palettes(*splits)
        return {scenes.split: [] if scenes.url.startswith(TINY) else scenes.pixels.warnings() for scenes in splits}

    warnings = space.world.on_rank0(read)
    if space.world.is_rank0:
        say(*(f"{space.data}: {line}" for lines in warnings.values() for line in lines), errors=True)
    return warnings


def scene_depth(scenes: SceneSet, index: int, size: tuple[int, int]) -> np.ndarray:
    """Depth of each pixel of a scene in metres, (H, W) float32; 0 where nothing was measured.

    Raises:
        ValueError: the file, which the message names, cannot be used for an image of `size` (height, width).
    """
    listing = scenes.depth_maps
    path = scenes.root / listing.depths[index]
    with named_in_errors(path):
        opened = open_image(read_regular(path, MAX_BYTES))
        check_lossless(opened)
        image = load_as_stored(opened)
        values = np.asarray(image.convert("RGB") if image.mode == "P" else image)  # numbers in a palette are no depth
    try:
        return listing.metres(values, size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def depth_warnings(scenes: SceneSet, farthest: Sequence[float], limit: float = FARTHEST_DEPTH) -> list[str]:
    """A warning if depth maps seem to be in another unit: all end nearer than walls of rooms, or half beyond `limit`.

    farthest: largest depths, in metres, of some or all maps. limit: largest depth that a task predicts.
    """
    maps, per_metre = f"{len(farthest)} depth maps of {scenes.split}", scenes.depth_maps.per_metre
    if max(farthest) < ROOM_DEPTH:
        return [
            f"{maps} end at {max(farthest):g} m; if they show rooms, they are in another unit (?unit=cm): save "
            f"{per_metre:g} for each metre"
        ]
    if (median := float(np.median(farthest))) > limit:
        return [
            f"{maps} end at {median:g} m in the median, beyond the {limit:g} m that are predicted; if that is too far, "
            f"a metre has another value than {per_metre:g}: give it, such as ?scale=5000"
        ]
    return []


def check_video(scenes: SceneSet, frames: Sequence[int]) -> None:
    """Raise ValueError, naming the file, unless frames and masks have one size and the first mask shows an object."""
    paths = [path for index in frames for path in (scenes.image_path(index), scenes.mask_path(index))]
    first = image_size(paths[0])
    for path in paths:
        if (size := image_size(path)) != first:
            raise ValueError(f"{path}: {size} pixels, and the first frame of the video {first}; all need one size")
    mask = scene_mask(scenes, frames[0])
    if not ((mask > 0) & (mask != IGNORED)).any():
        raise ValueError(f"{paths[1]}: the first frame shows no object to follow; give its mask")


def scene_pair(scenes: SceneSet, number: int, sizes: Mapping[int, tuple[int, int]]) -> PairAnnotation:
    """The annotation of a pair, checked against those of its images whose sizes are given.

    Args:
        number: index of the pair.
        sizes: index of an image -> its width and height in pixels.

    Raises:
        ValueError: the file, which the message names, cannot be read or does not fit the images.
    """
    path = scenes.root / scenes.image_pairs.pairs[number]
    pair: PairAnnotation = read_json(path, MAX_BYTES, PairAnnotation)
    try:
        if len(pair.src_kps) != len(pair.trg_kps):
            raise ValueError(f"{len(pair.src_kps)} keypoints of the source and {len(pair.trg_kps)} of the target")
        for end, index in enumerate(scenes.image_pairs.ends[number].tolist()):
            if index in sizes:
                pair.check_end(end, sizes[index])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return pair


def count_pixels(mask: np.ndarray, classes: int) -> np.ndarray:
    """Number of pixels (K+1,) of each class in a mask of classes (H, W); the last count is of ignored pixels."""
    counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)
    return np.append(counts[:classes], counts[IGNORED])


class CheckedScene(NamedTuple):
    """Facts about a scene that can be used.

    annotation: digest of its classes, depths or objects; that of nothing for a frame or an image of pairs. pixels:
    `count_pixels` of its mask, or None if it has none of classes. farthest: its largest depth in metres, or 0.
    """

    image: ImageFacts
    annotation: int
    pixels: np.ndarray | None
    farthest: float


def check_scene(scenes: SceneSet, index: int) -> CheckedScene:
    """Decode a scene's image and annotations.

    Raises:
        ValueError, OSError: the scene cannot be used.
    """
    with named_in_errors(scenes.image_path(index)):
        data = read_regular(scenes.image_path(index), MAX_BYTES)
        image = decode_rgb(data, str(scenes.image_path(index)))
    (width, height), annotation, pixels, farthest = image.size, b"", None, 0.0
    if isinstance(scenes.listing, Videos):
        scene_mask(scenes, index, (height, width))
        frames = scenes.videos[scenes.image_path(index).parent.name]
        check_video(scenes, [frames[0], index])
    elif isinstance(scenes.listing, Listing):
        mask = scene_mask(scenes, index, (height, width))
        annotation, pixels = mask.tobytes(), count_pixels(mask, len(scenes.classes))
    elif isinstance(scenes.listing, Instances):
        scenes.listing.check_size(index, height, width)
        objects = [entry | {"image_id": 0} for entry in scenes.listing.objects[index]]  # without the image's number
        annotation = repr(objects).encode()
    elif isinstance(scenes.listing, DepthMaps):
        depths = scene_depth(scenes, index, (height, width))
        annotation, farthest = depths.tobytes(), float(depths.max())
    else:
        for number in np.flatnonzero((scenes.listing.ends == index).any(1)).tolist():
            scene_pair(scenes, number, {index: (width, height)})
    return CheckedScene(image_facts(image, data), content_digest(annotation), pixels, farthest)


class DecodedScenes(NamedTuple):
    """Result of `decode_scenes`.

    problems: index of each scene that cannot be used -> the reason, naming the file. pixels: of each class, or None if
    no mask was read. scenes: index of each other scene -> facts.
    """

    problems: dict[int, str]
    pixels: "ClassPixels | None"
    scenes: dict[int, CheckedScene]


def decode_scenes(scenes: SceneSet, advance: Callable[[int], None] = lambda count: None) -> DecodedScenes:
    """Decode all images and annotations."""
    problems: dict[int, str] = {}
    checked: dict[int, CheckedScene] = {}
    for index in range(len(scenes)):
        try:
            checked[index] = check_scene(scenes, index)
        except ValueError as error:
            problems[index] = str(error)
        except OSError as error:
            problems[index] = f"{scenes.image_path(index)}: {error}"
        advance(1)
    counts = [scene.pixels for scene in checked.values() if scene.pixels is not None]
    pixels = ClassPixels(scenes, np.sum(counts, axis=0), len(counts)) if counts else None
    return DecodedScenes(problems, pixels, checked)


class ClassPixels:
    """Number of pixels of each class in `masks` masks of a set. counts: (K+1,), the last of ignored pixels."""

    def __init__(self, scenes: SceneSet, counts: np.ndarray, masks: int) -> None:
        self.scenes, self.counts, self.masks = scenes, counts, masks

    @property
    def ignored(self) -> float:
        """Share of the ignored pixels."""
        return float(self.counts[-1] / self.counts.sum())

    @property
    def absent(self) -> list[str]:
        """Names of the classes without a pixel."""
        return [name for name, count in zip(self.scenes.classes, self.counts[:-1], strict=True) if not count]

    def warnings(self) -> list[str]:
        """A line if there are ignored pixels, and a line if there are classes without a pixel."""
        split, class_count, absent = self.scenes.split, len(self.scenes.classes), self.absent
        masks = f"the masks of {split}"
        if self.masks < len(self.scenes):
            masks = f"{self.masks} of the {len(self.scenes)} masks of {split}"
        lines = []
        if self.ignored:
            share = "less than 0.1" if self.ignored < 0.001 else f"{100 * self.ignored:.1f}"
            lines.append(f"{share} % of the pixels in {masks} are of no class: neither loss nor score counts them")
        if absent:
            names = ", ".join(absent[:MAX_NAMED_CLASSES])
            if len(absent) > MAX_NAMED_CLASSES:
                names += f" and {len(absent) - MAX_NAMED_CLASSES} more"
            lines.append(f"without a pixel in {masks}: {len(absent)} of {class_count} classes, {names}")
        return lines

    def check(self) -> None:
        """Raise ValueError if fewer than two classes occur, because a score over one class means nothing."""
        present = [name for name in self.scenes.classes if name not in self.absent]
        if len(present) < 2:
            raise ValueError(
                f"{self.scenes.url}: the masks of {self.scenes.split} hold {', '.join(present) or 'no class'} alone, "
                f"and {100 * self.ignored:.1f} % of their pixels are of no class; a score needs two classes. If 255 is "
                "a class, list the classes with their values: '0 background' and '255 cell' in classes.txt"
            )
