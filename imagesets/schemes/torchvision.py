"""torchvision:NAME:ROOT, a classification set of torchvision.datasets, as its class finds it below ROOT.

torchvision reads lists, labels and arrays, and its own checks of files stay on: CIFAR's pickles are loaded after their
MD5 sums were compared with those of the official files, so no other pickle ever is. Nothing is downloaded, but by
`bench data get NAME`. Images in files are read as those of a folder are; those in arrays count as PPM files, whose
bytes are a header and the pixels.

Splits are those that papers report on: all official training images, those for validation included, and as val the
official test images. Classes are in the order of their names, so that the set is the one that folders would be. N
images, K classes.
"""

import glob
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.printing import did_you_mean
from imagesets.listing import images_below, require_folder
from imagesets.names import PackedNames
from imagesets.schemes.imagenet import check_mats
from imagesets.selection import stratified_sample
from imagesets.sets import FileImages, ImageSet, ReportedMetric, Split
from imagesets.stored import StoredImages, stored_set

VOC_LABELS = {"1": 1, "-1": 0, "0": -1}  # as its lists say it -> as ImageSet.labels do
SEED = 0  # of the splits that are drawn here, which never change

Options = Mapping[str, Any]  # arguments of torchvision's class, beside ROOT


@dataclass(frozen=True, kw_only=True)
class OfficialImages:
    """Some images of a set. images: N paths, or pixels (N, H, W, 3) or (N, H, W) uint8."""

    classes: Sequence[str]
    labels: np.ndarray  # (N,) int64, indices into `classes`, or (N, K) as ImageSet's
    images: Sequence[str] | np.ndarray

    def take(self, rows: np.ndarray) -> "OfficialImages":
        images = self.images[rows] if isinstance(self.images, np.ndarray) else [self.images[row] for row in rows]
        return replace(self, labels=self.labels[rows], images=images)


Read = Callable[[Any], OfficialImages]  # an object of torchvision's class -> what it holds
Divide = Callable[[str, Split, OfficialImages], np.ndarray]  # ROOT, split, all images -> rows of the split


@dataclass(frozen=True, kw_only=True)
class OfficialSet:
    """How a set is read. train, val: arguments of torchvision's class; the images of several objects are one split."""

    needs: tuple[str, ...]  # what must lie below ROOT
    split: str  # what train and val are, for people; with the source where the set itself says nothing
    read: Read
    train: tuple[Options, ...] = ({"split": "train"},)
    val: tuple[Options, ...] = ({"split": "test"},)
    divide: Divide | None = None  # what finds a split's images where torchvision's class cannot
    reports: ReportedMetric = "top1"
    dataset: str = ""  # torchvision's class; "": it has the set's name
    advice: str = ""  # how to get files that torchvision does not download


def read_with_loader(data: Any) -> OfficialImages:
    """Sets whose class takes a loader, which gives the path here."""
    rows = [data[row] for row in range(len(data))]
    labels = np.array([label for _, label in rows], np.int64)
    classes = data.all_categories if hasattr(data, "all_categories") else data.classes  # those are iNaturalist's
    return OfficialImages(classes=classes, labels=labels, images=[path for path, _ in rows])


def arrays(data: Any) -> OfficialImages:
    """Sets in memory. Digits have no names of classes."""
    pixels, labels = np.asarray(data.data), data.targets if hasattr(data, "targets") else data.labels
    pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
    classes = getattr(data, "classes", [str(digit) for digit in range(10)])
    return OfficialImages(classes=classes, labels=np.asarray(labels, np.int64), images=pixels)


def samples(data: Any, classes: Sequence[str] | None = None) -> OfficialImages:
    """Sets that keep (path, label)."""
    paths, labels = zip(*data._samples, strict=True)
    return OfficialImages(classes=classes or data.wnids, labels=np.array(labels, np.int64), images=paths)


def pets(data: Any) -> OfficialImages:
    """Oxford-IIIT Pets."""
    return OfficialImages(
        classes=data.classes, labels=np.array(data._labels, np.int64), images=[*map(str, data._images)]
    )


def caltech(data: Any) -> OfficialImages:
    """Caltech-101 with its background, which torchvision leaves out and papers count: 102 classes."""
    classes = sorted([*data.categories, "BACKGROUND_Google"])
    paths = [sorted(Path(data.root, "101_ObjectCategories", name).glob("*.jpg")) for name in classes]
    labels = np.repeat(np.arange(len(classes)), [len(of_class) for of_class in paths])
    return OfficialImages(classes=classes, labels=labels, images=[str(path) for of_class in paths for path in of_class])


def voc(data: Any) -> OfficialImages:
    """Pascal VOC: a list for each class, which says 1 of an image that shows it, -1 of one that does not, and 0 of one
    with nothing but objects marked as difficult, which its development kit leaves out of the evaluation."""
    lists = Path(data.root, "VOCdevkit", f"VOC{data.year}", "ImageSets", "Main")
    classes = sorted(path.name.removesuffix(f"_{data.image_set}.txt") for path in lists.glob(f"*_{data.image_set}.txt"))
    if not classes:
        raise ValueError(f"no lists *_{data.image_set}.txt of classes in {lists}")
    columns = []
    for name in classes:
        lines = (lists / f"{name}_{data.image_set}.txt").read_text(encoding="utf-8").split()
        shows = dict(zip(lines[::2], lines[1::2], strict=True))
        columns.append([VOC_LABELS[shows[Path(path).stem]] for path in data.images])
    return OfficialImages(classes=classes, labels=np.array(columns, np.int64).T, images=data.images)


def drawn_split(
    root: str, split: Split, official: OfficialImages, share: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """A random part of each class as train, the rest as val. share: images of each class (K,) -> those of train."""
    order = np.array(sorted(range(len(official.labels)), key=lambda row: (official.labels[row], official.images[row])))
    counts = np.bincount(official.labels, minlength=len(official.classes))
    train = order[stratified_sample(official.labels[order], share(counts), SEED)]
    return train if split == "train" else np.setdiff1d(order, train)


def partition(root: str, split: Split, official: OfficialImages) -> np.ndarray:
    """SUN397's first partition. Its lines begin with the slash behind SUN397."""
    name = "Training_01.txt" if split == "train" else "Testing_01.txt"
    paths = [os.path.join(root, folder, name) for folder in ("SUN397/Partitions", "SUN397", "Partitions")]
    path = next((place for place in paths if os.path.isfile(place)), "")
    if not path:
        raise ValueError(
            f"torchvision:SUN397:{root}: no {paths[0]}; unpack there "
            "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip, which torchvision does not fetch"
        )
    names = set(Path(path).read_text(encoding="utf-8").split())
    return rows_named(path, names, official, os.path.join(root, "SUN397"))


def by_json(root: str, split: Split, official: OfficialImages, year: str) -> np.ndarray:
    """iNaturalist's lists of 2018 and 2019. Their names begin with the folder that torchvision calls by the year."""
    path = os.path.join(root, f"{split}{year}.json")
    listed = json.loads(Path(path).read_bytes())["images"]
    names = {image["file_name"][image["file_name"].index("/") :] for image in listed}
    return rows_named(path, names, official, os.path.join(root, year))


def rows_named(path: str, names: set[str], official: OfficialImages, base: str) -> np.ndarray:
    """Rows of the images that a list names by what follows `base`. ValueError where some are missing."""
    rows = [row for row, image in enumerate(official.images) if image[len(base) :] in names]
    if len(rows) < len(names):
        raise ValueError(f"{path}: {len(names) - len(rows)} of the {len(names)} images that it names are not in {base}")
    return np.array(rows, np.int64)


FLAG: dict[str, Any] = {"train": ({"train": True},), "val": ({"train": False},)}
WHOLE: dict[str, Any] = {"train": ({},), "val": ({},)}
WITH_VAL: dict[str, Any] = {"train": ({"split": "train"}, {"split": "val"})}
OFFICIAL = "the official split"
TRAINVAL = "train and val of the official split together against test, as in Kornblith et al. 2019"
MNISTS = tuple(f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
INAT = (
    "https://github.com/visipedia/inat_comp has the images and lists of {0}: unpack them as {0}, train{0}.json and "
    "val{0}.json"
)

# Splits and metrics are those of Kornblith et al. 2019 (CVPR), table 1, for the sets that it has.
SETS: dict[str, OfficialSet] = {
    "CIFAR10": OfficialSet(needs=("cifar-10-batches-py",), split=OFFICIAL, read=arrays, **FLAG),
    "CIFAR100": OfficialSet(needs=("cifar-100-python",), split=OFFICIAL, read=arrays, **FLAG),
    "Food101": OfficialSet(needs=("food-101/meta", "food-101/images"), split=OFFICIAL, read=read_with_loader),
    "OxfordIIITPet": OfficialSet(
        needs=("oxford-iiit-pet/images", "oxford-iiit-pet/annotations"),
        split=OFFICIAL,
        read=pets,
        train=({"split": "trainval"},),
        reports="mean per class",
    ),
    "Flowers102": OfficialSet(
        needs=("flowers-102/jpg", "flowers-102/imagelabels.mat", "flowers-102/setid.mat"),
        split=TRAINVAL,
        read=read_with_loader,
        reports="mean per class",
        **WITH_VAL,
    ),
    "DTD": OfficialSet(
        needs=("dtd/dtd",), split=f"{TRAINVAL}: the first of ten splits", read=read_with_loader, **WITH_VAL
    ),
    "FGVCAircraft": OfficialSet(
        needs=("fgvc-aircraft-2013b/data",),
        split="the official trainval and test, 100 variants",
        read=read_with_loader,
        train=({"split": "trainval"},),
        reports="mean per class",
    ),
    "StanfordCars": OfficialSet(
        needs=tuple(
            f"stanford_cars/{part}" for part in ("devkit", "cars_train", "cars_test", "cars_test_annos_withlabels.mat")
        ),
        split=OFFICIAL,
        read=read_with_loader,
        advice="its official site is gone: get the archives elsewhere and unpack them under these names",
    ),
    "SUN397": OfficialSet(
        needs=("SUN397/ClassName.txt",),
        split="the first of the official partitions, 50 and 50 images a class",
        read=read_with_loader,
        divide=partition,
        advice="torchvision.datasets.SUN397(ROOT, download=True) fetches the images; the lists are in "
        "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip: unpack them into SUN397/Partitions",
        **WHOLE,
    ),
    "Caltech101": OfficialSet(
        needs=("caltech101/101_ObjectCategories/BACKGROUND_Google",),
        split="no official split: 30 images a class, drawn once, against the rest, as in Kornblith et al. 2019; "
        "102 classes with the background",
        read=caltech,
        divide=partial(drawn_split, share=lambda counts: np.full(len(counts), 30)),
        reports="mean per class",
        **WHOLE,
    ),
    "INaturalist": OfficialSet(
        needs=("2021_train", "2021_valid"),
        split="the official train and val of 2021",
        read=read_with_loader,
        train=({"version": "2021_train"},),
        val=({"version": "2021_valid"},),
    ),
    "INaturalistMini": OfficialSet(
        needs=("2021_train_mini", "2021_valid"),
        split="the official train mini and val of 2021",
        read=read_with_loader,
        train=({"version": "2021_train_mini"},),
        val=({"version": "2021_valid"},),
        dataset="INaturalist",
    ),
    **{
        f"INaturalist{year}": OfficialSet(
            needs=(year, f"train{year}.json", f"val{year}.json"),
            split=f"the official train and val of {year}",
            read=read_with_loader,
            train=({"version": year},),
            val=({"version": year},),
            divide=partial(by_json, year=year),
            dataset="INaturalist",
            advice=INAT.format(year),
        )
        for year in ("2018", "2019")
    },
    **{
        f"Places365{kind}": OfficialSet(
            needs=("categories_places365.txt", f"data_{side}_standard", f"val_{side}"),
            split=f"the official standard train and val, {what}",
            read=read_with_loader,
            train=({"split": "train-standard", "small": side == "256"},),
            val=({"split": "val", "small": side == "256"},),
            dataset="Places365",
        )
        for kind, side, what in (("", "256", "of 256 x 256 pixels"), ("Large", "large", "of 512 pixels and more"))
    },
    "VOC2007": OfficialSet(
        needs=("VOCdevkit/VOC2007/JPEGImages", "VOCdevkit/VOC2007/ImageSets/Main/test.txt"),
        split="the official trainval and test; images with difficult objects of a class alone are not judged on it",
        read=voc,
        train=({"year": "2007", "image_set": "trainval"},),
        val=({"year": "2007", "image_set": "test"},),
        reports="mAP",
        dataset="VOCDetection",
    ),
    "EuroSAT": OfficialSet(
        needs=("eurosat/2750",),
        split="no official split: 80 % of each class, drawn once, against 20 %, as in Helber et al. 2019",
        read=read_with_loader,
        divide=partial(drawn_split, share=lambda counts: np.rint(0.8 * counts).astype(np.int64)),
        **WHOLE,
    ),
    "GTSRB": OfficialSet(
        needs=("gtsrb/GTSRB/Training", "gtsrb/GTSRB/Final_Test/Images", "gtsrb/GT-final_test.csv"),
        split=OFFICIAL,
        read=partial(samples, classes=[f"{sign:05d}" for sign in range(43)]),
    ),
    "Country211": OfficialSet(
        needs=("country211/train", "country211/valid", "country211/test"),
        split="train and valid of the official split together against test",
        read=read_with_loader,
        train=({"split": "train"}, {"split": "valid"}),
    ),
    "RenderedSST2": OfficialSet(
        needs=("rendered-sst2/train", "rendered-sst2/valid", "rendered-sst2/test"),
        split="train and val of the official split together against test",
        read=read_with_loader,
        **WITH_VAL,
    ),
    "Imagenette": OfficialSet(needs=("imagenette2",), split=OFFICIAL, read=samples, val=({"split": "val"},)),
    "STL10": OfficialSet(needs=("stl10_binary", "stl10_binary/class_names.txt"), split=OFFICIAL, read=arrays),
    "SVHN": OfficialSet(needs=("train_32x32.mat", "test_32x32.mat"), split=OFFICIAL, read=arrays),
    "USPS": OfficialSet(needs=("usps.bz2", "usps.t.bz2"), split=OFFICIAL, read=arrays, **FLAG),
    **{
        name: OfficialSet(needs=tuple(f"{name}/raw/{file}" for file in MNISTS), split=OFFICIAL, read=arrays, **FLAG)
        for name in ("MNIST", "FashionMNIST", "KMNIST")
    },
}


PLACE = "NAME:ROOT"
SPLITS = ("train", "val")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. ValueError for an unknown NAME, and for files that are missing or not the official ones."""
    url = f"torchvision:{place}"
    name, _, root = place.partition(":")
    if name not in SETS:
        raise ValueError(f"{url}: no set {name!r}{did_you_mean(name, list(SETS))}")
    if not root:
        raise ValueError(f"{url}: no folder after the name; write torchvision:{name}:/path/to/folder")
    root, known = os.path.abspath(os.path.expanduser(root)), SETS[name]
    require_folder(root, url)
    parts = known.train if split == "train" else known.val
    if lacking := [path for path in known.needs if not os.path.exists(os.path.join(root, path))]:
        raise ValueError(f"{url}: {root} lacks {', '.join(lacking)}; {_remedy(name)}")
    official = _joined([_official(url, name, root, options) for options in parts])
    if known.divide:
        official = official.take(known.divide(root, split, official))
    classes, labels, images = official.classes, official.labels, official.images
    if labels.ndim == 1:  # classes in the order of their names as folders
        names = [name.strip("/").replace("/", "_") for name in classes]
        order = sorted(range(len(names)), key=names.__getitem__)
        classes, labels = [names[number] for number in order], np.argsort(order)[labels]
    source = in_memory(f"torchvision:{name}", images) if isinstance(images, np.ndarray) else in_files(url, images)
    return stored_set(
        url=url, split=split, classes=classes, labels=labels, images=source, notes=(known.split,), reports=known.reports
    )


def _official(url: str, name: str, root: str, options: Options) -> OfficialImages:
    from torchvision import datasets

    known = SETS[name]
    loader = {"loader": str} if known.read is read_with_loader else {}  # paths in place of images
    try:
        if name == "StanfordCars":  # torchvision compares the sums of other sets' .mat files
            check_mats(glob.glob(f"{glob.escape(root)}/stanford_cars/**/*.mat", recursive=True))
        return known.read(getattr(datasets, known.dataset or name)(root, **options, **loader))
    except Exception as error:  # torchvision's RuntimeError, and whatever a damaged list leads to
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{url}: torchvision cannot read it ({why}); {_remedy(name)}") from error


def _remedy(name: str) -> str:
    """How to get what is missing."""
    return SETS[name].advice or f"bench data get {name} --out DIR downloads it into DIR/{name}"


def _joined(parts: Sequence[OfficialImages]) -> OfficialImages:
    if len(parts) == 1:
        return parts[0]
    labels = np.concatenate([part.labels for part in parts])
    return OfficialImages(
        classes=parts[0].classes, labels=labels, images=[path for part in parts for path in part.images]
    )


def in_files(url: str, paths: Sequence[str]) -> FileImages:
    """Files, called by their own names, with sizes. ValueError where some are missing."""
    base = os.path.commonpath([os.path.dirname(path) for path in paths])
    row_of = {path[len(base) + 1 :]: row for row, path in enumerate(paths)}
    files, _ = images_below(base, ["."]) if os.path.isdir(base) else (None, None)
    indices = np.full(len(paths), -1)
    for index, name in enumerate(files.names if files else ()):
        if (row := row_of.get(name)) is not None:
            indices[row] = index
    if files is None or (indices < 0).any():
        first = paths[int((indices < 0).argmax())]
        raise ValueError(
            f"{url}: {(indices < 0).sum()} of its {len(paths)} images are missing, {first} first; unpack again"
        )
    return files.take_renamed(indices, PackedNames.pack(map(os.path.basename, paths)))


@dataclass(frozen=True, eq=False)
class PixelStore:
    """Pixels (N, H, W, 3) or (N, H, W) uint8 as the bytes of PPM or PGM files, which decode to just these pixels."""

    pixels: np.ndarray

    def read(self, place: int) -> bytes:
        return self.header + np.ascontiguousarray(self.pixels[place]).tobytes()

    @property
    def header(self) -> bytes:
        height, width = self.pixels.shape[1:3]
        return b"P%d\n%d %d\n255\n" % (6 if self.pixels.ndim == 4 else 5, width, height)  # as Pillow writes it


def in_memory(where: str, pixels: np.ndarray) -> StoredImages:
    """Images by their numbers in the official order. where: what stands before their names in messages."""
    store, ending = PixelStore(pixels), "ppm" if pixels.ndim == 4 else "pgm"
    return StoredImages(
        store=store,
        where=where,
        names=PackedNames.pack(f"{number:06d}.{ending}" for number in range(len(pixels))),
        sizes=np.full(len(pixels), len(store.header) + pixels[:1].size),
        places=np.arange(len(pixels)),
        changed=np.array([(0, zlib.crc32(image.tobytes())) for image in pixels], np.int64).reshape(-1, 2),
    )
