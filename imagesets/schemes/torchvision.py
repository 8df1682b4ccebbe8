"""torchvision:NAME:ROOT, a classification set of torchvision.datasets, with its files below ROOT.

torchvision reads lists, labels and arrays. Its own checks of files stay on: a pickle of CIFAR is loaded only if its MD5
sum is that of the official file. Nothing is downloaded here; `bench data get NAME` does that. Images in files are read
like those of folders; images in arrays are presented as PPM or PGM files, a header and the pixels.

Splits are those that papers report on: train has all official training images, including those for validation, and val
the official test images. Classes are sorted by name, so that the set equals one in class folders.

Shapes: N images, K classes.
"""

import glob
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.files import read_json, read_text, refuse_irregular_files
from engine.printing import did_you_mean
from imagesets.listing import images_below, require_folder
from imagesets.names import PackedNames
from imagesets.schemes.imagenet import check_mats
from imagesets.selection import stratified_sample
from imagesets.sets import FileImages, ImageSet, ReportedMetric, Split
from imagesets.stored import StoredImages, stored_set
from imagesets.walk import EXTENSIONS

VOC_LABELS = {"1": 1, "-1": 0, "0": -1}  # in VOC's lists -> in ImageSet.labels
SPLIT_SEED = 0  # of the random splits of sets that have no official one; they never change

Arguments = Mapping[str, Any]  # of torchvision's class, besides ROOT


@dataclass(frozen=True, kw_only=True)
class OfficialImages:
    """Images of a set, with labels, as torchvision's class has them."""

    classes: Sequence[str]
    labels: np.ndarray  # (N,) int64, indices into `classes`, or (N, K) as in ImageSet
    images: Sequence[str] | np.ndarray  # N paths, or pixels (N, H, W, 3) or (N, H, W) uint8

    def take(self, indices: np.ndarray) -> "OfficialImages":
        if isinstance(self.images, np.ndarray):
            return replace(self, labels=self.labels[indices], images=self.images[indices])
        return replace(self, labels=self.labels[indices], images=[self.images[index] for index in indices])


@dataclass(frozen=True, kw_only=True)
class OfficialSet:
    """How a set of torchvision.datasets is read."""

    required_paths: tuple[str, ...]  # below ROOT
    split_note: str  # what train and val are, for users; with the source if the set has no official split
    read: Callable[[Any], OfficialImages]  # takes the object of torchvision's class
    train: tuple[Arguments, ...] = ({"split": "train"},)  # of the objects whose images form the split
    val: tuple[Arguments, ...] = ({"split": "test"},)
    # (ROOT, split, all images) -> indices of the split, for sets that torchvision's class does not divide
    split_indices: Callable[[str, Split, OfficialImages], np.ndarray] | None = None
    reports: ReportedMetric = "top1"
    dataset: str = ""  # name of torchvision's class, if it is not that of the set
    advice: str = ""  # how to get the files, if torchvision does not download them


def read_with_loader(data: Any) -> OfficialImages:
    """Images of a class that takes a `loader`. `_read_official` passes `str`, so items are (path, label)."""
    items = [data[index] for index in range(len(data))]
    labels = np.array([label for _, label in items], np.int64)
    classes = data.all_categories if hasattr(data, "all_categories") else data.classes  # the former: iNaturalist
    return OfficialImages(classes=classes, labels=labels, images=[path for path, _ in items])


def read_arrays(data: Any) -> OfficialImages:
    """Images of a class that holds all pixels. Classes without names are the ten digits."""
    pixels, labels = np.asarray(data.data), data.targets if hasattr(data, "targets") else data.labels
    pixels = pixels.transpose(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
    classes = getattr(data, "classes", [str(digit) for digit in range(10)])
    return OfficialImages(classes=classes, labels=np.asarray(labels, np.int64), images=pixels)


def read_samples(data: Any, classes: Sequence[str] | None = None) -> OfficialImages:
    """Images of a class that holds pairs (path, label) in `_samples`."""
    paths, labels = zip(*data._samples, strict=True)
    return OfficialImages(classes=classes or data.wnids, labels=np.array(labels, np.int64), images=paths)


def read_pets(data: Any) -> OfficialImages:
    """Oxford-IIIT Pets."""
    return OfficialImages(
        classes=data.classes, labels=np.array(data._labels, np.int64), images=[*map(str, data._images)]
    )


def read_caltech101(data: Any) -> OfficialImages:
    """Caltech-101 with 102 classes: torchvision omits the background class, but papers count it."""
    classes = sorted([*data.categories, "BACKGROUND_Google"])
    paths_by_class = [sorted(Path(data.root, "101_ObjectCategories", name).glob("*.jpg")) for name in classes]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in paths_by_class])
    images = [str(path) for paths in paths_by_class for path in paths]
    return OfficialImages(classes=classes, labels=labels, images=images)


def read_voc(data: Any) -> OfficialImages:
    """Pascal VOC, labels (N, K).

    It has a list for each class: 1 for an image that shows it, -1 for one that does not, and 0 if all its objects of
    the class are marked as difficult, which the development kit excludes from the evaluation.
    """
    folder = Path(data.root, "VOCdevkit", f"VOC{data.year}", "ImageSets", "Main")
    ending = f"_{data.image_set}.txt"
    classes = sorted(path.name.removesuffix(ending) for path in folder.glob(f"*{ending}"))
    if not classes:
        raise ValueError(f"no lists *{ending} of classes in {folder}")
    columns = []
    for name in classes:
        words = read_text(folder / f"{name}{ending}").split()
        label_of = dict(zip(words[::2], words[1::2], strict=True))
        columns.append([VOC_LABELS[label_of[Path(path).stem]] for path in data.images])
    return OfficialImages(classes=classes, labels=np.array(columns, np.int64).T, images=data.images)


def random_split(
    root: str, split: Split, official: OfficialImages, train_counts: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Indices of a split: train is a random part of each class, val the rest.

    train_counts: images of each class (K,) -> how many of them are train.
    """
    order = np.array(
        sorted(range(len(official.labels)), key=lambda index: (official.labels[index], official.images[index]))
    )
    counts = np.bincount(official.labels, minlength=len(official.classes))
    train = order[stratified_sample(official.labels[order], train_counts(counts), SPLIT_SEED)]
    return train if split == "train" else np.setdiff1d(order, train)


def sun397_split(root: str, split: Split, official: OfficialImages) -> np.ndarray:
    """Indices of a split by SUN397's first partition, whose lists hold paths after ROOT/SUN397.

    Raises ValueError if the list is missing, or names images that are.
    """
    name = "Training_01.txt" if split == "train" else "Testing_01.txt"
    candidates = [os.path.join(root, folder, name) for folder in ("SUN397/Partitions", "SUN397", "Partitions")]
    path = next((candidate for candidate in candidates if os.path.isfile(candidate)), "")
    if not path:
        raise ValueError(
            f"torchvision:SUN397:{root}: no {candidates[0]}; unpack there "
            "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip, which torchvision does not fetch"
        )
    names = set(read_text(path).split())
    return listed_indices(path, names, official, os.path.join(root, "SUN397"))


def inaturalist_split(root: str, split: Split, official: OfficialImages, year: str) -> np.ndarray:
    """Indices of a split by iNaturalist's lists of 2018 and 2019.

    In their paths the first folder has another name than in torchvision's layout, ROOT/YEAR. Raises ValueError if the
    list names images that are missing.
    """
    path = os.path.join(root, f"{split}{year}.json")
    file_names = [image["file_name"] for image in read_json(path)["images"]]
    names = {name[name.index("/") :] for name in file_names}
    return listed_indices(path, names, official, os.path.join(root, year))


def listed_indices(list_path: str, names: set[str], official: OfficialImages, base: str) -> np.ndarray:
    """Indices of the images whose paths, after the folder `base`, are in the `names` of a list file.

    Raises ValueError if images are missing.
    """
    indices = [index for index, path in enumerate(official.images) if path[len(base) :] in names]
    if len(indices) < len(names):
        missing = len(names) - len(indices)
        raise ValueError(f"{list_path}: {missing} of the {len(names)} images that it names are not in {base}")
    return np.array(indices, np.int64)


TRAIN_FLAG: dict[str, Any] = {"train": ({"train": True},), "val": ({"train": False},)}
NO_ARGUMENTS: dict[str, Any] = {"train": ({},), "val": ({},)}
WITH_VAL: dict[str, Any] = {"train": ({"split": "train"}, {"split": "val"})}
OFFICIAL_SPLIT = "the official split"
TRAINVAL = "train and val of the official split together against test, as in Kornblith et al. 2019"
MNIST_FILES = tuple(
    f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
INATURALIST_ADVICE = (
    "https://github.com/visipedia/inat_comp has the images and lists of {0}: unpack them as {0}, train{0}.json and "
    "val{0}.json"
)

# Splits and metrics are those of Kornblith et al. 2019 (CVPR), table 1, for the sets in it.
SETS: dict[str, OfficialSet] = {
    "CIFAR10": OfficialSet(
        required_paths=("cifar-10-batches-py",), split_note=OFFICIAL_SPLIT, read=read_arrays, **TRAIN_FLAG
    ),
    "CIFAR100": OfficialSet(
        required_paths=("cifar-100-python",), split_note=OFFICIAL_SPLIT, read=read_arrays, **TRAIN_FLAG
    ),
    "Food101": OfficialSet(
        required_paths=("food-101/meta", "food-101/images"), split_note=OFFICIAL_SPLIT, read=read_with_loader
    ),
    "OxfordIIITPet": OfficialSet(
        required_paths=("oxford-iiit-pet/images", "oxford-iiit-pet/annotations"),
        split_note=OFFICIAL_SPLIT,
        read=read_pets,
        train=({"split": "trainval"},),
        reports="mean per class",
    ),
    "Flowers102": OfficialSet(
        required_paths=("flowers-102/jpg", "flowers-102/imagelabels.mat", "flowers-102/setid.mat"),
        split_note=TRAINVAL,
        read=read_with_loader,
        reports="mean per class",
        **WITH_VAL,
    ),
    "DTD": OfficialSet(
        required_paths=("dtd/dtd",),
        split_note=f"{TRAINVAL}: the first of ten splits",
        read=read_with_loader,
        **WITH_VAL,
    ),
    "FGVCAircraft": OfficialSet(
        required_paths=("fgvc-aircraft-2013b/data",),
        split_note="the official trainval and test, 100 variants",
        read=read_with_loader,
        train=({"split": "trainval"},),
        reports="mean per class",
    ),
    "StanfordCars": OfficialSet(
        required_paths=tuple(
            f"stanford_cars/{part}" for part in ("devkit", "cars_train", "cars_test", "cars_test_annos_withlabels.mat")
        ),
        split_note=OFFICIAL_SPLIT,
        read=read_with_loader,
        advice="its official site is gone: get the archives elsewhere and unpack them under these names",
    ),
    "SUN397": OfficialSet(
        required_paths=("SUN397/ClassName.txt",),
        split_note="the first of the official partitions, 50 and 50 images a class",
        read=read_with_loader,
        split_indices=sun397_split,
        advice="torchvision.datasets.SUN397(ROOT, download=True) fetches the images; the lists are in "
        "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip: unpack them into SUN397/Partitions",
        **NO_ARGUMENTS,
    ),
    "Caltech101": OfficialSet(
        required_paths=("caltech101/101_ObjectCategories/BACKGROUND_Google",),
        split_note="no official split: 30 images a class, drawn once, against the rest, as in Kornblith et al. 2019; "
        "102 classes with the background",
        read=read_caltech101,
        split_indices=partial(random_split, train_counts=lambda counts: np.full(len(counts), 30)),
        reports="mean per class",
        **NO_ARGUMENTS,
    ),
    "INaturalist": OfficialSet(
        required_paths=("2021_train", "2021_valid"),
        split_note="the official train and val of 2021",
        read=read_with_loader,
        train=({"version": "2021_train"},),
        val=({"version": "2021_valid"},),
    ),
    "INaturalistMini": OfficialSet(
        required_paths=("2021_train_mini", "2021_valid"),
        split_note="the official train mini and val of 2021",
        read=read_with_loader,
        train=({"version": "2021_train_mini"},),
        val=({"version": "2021_valid"},),
        dataset="INaturalist",
    ),
    **{
        f"INaturalist{year}": OfficialSet(
            required_paths=(year, f"train{year}.json", f"val{year}.json"),
            split_note=f"the official train and val of {year}",
            read=read_with_loader,
            train=({"version": year},),
            val=({"version": year},),
            split_indices=partial(inaturalist_split, year=year),
            dataset="INaturalist",
            advice=INATURALIST_ADVICE.format(year),
        )
        for year in ("2018", "2019")
    },
    **{
        f"Places365{kind}": OfficialSet(
            required_paths=("categories_places365.txt", f"data_{side}_standard", f"val_{side}"),
            split_note=f"the official standard train and val, {what}",
            read=read_with_loader,
            train=({"split": "train-standard", "small": side == "256"},),
            val=({"split": "val", "small": side == "256"},),
            dataset="Places365",
        )
        for kind, side, what in (("", "256", "of 256 x 256 pixels"), ("Large", "large", "of 512 pixels and more"))
    },
    "VOC2007": OfficialSet(
        required_paths=("VOCdevkit/VOC2007/JPEGImages", "VOCdevkit/VOC2007/ImageSets/Main/test.txt"),
        split_note="the official trainval and test; images with difficult objects of a class alone are not judged on "
        "it",
        read=read_voc,
        train=({"year": "2007", "image_set": "trainval"},),
        val=({"year": "2007", "image_set": "test"},),
        reports="mAP",
        dataset="VOCDetection",
    ),
    "EuroSAT": OfficialSet(
        required_paths=("eurosat/2750",),
        split_note="no official split: 80 % of each class, drawn once, against 20 %, as in Helber et al. 2019",
        read=read_with_loader,
        split_indices=partial(random_split, train_counts=lambda counts: np.rint(0.8 * counts).astype(np.int64)),
        **NO_ARGUMENTS,
    ),
    "GTSRB": OfficialSet(
        required_paths=("gtsrb/GTSRB/Training", "gtsrb/GTSRB/Final_Test/Images", "gtsrb/GT-final_test.csv"),
        split_note=OFFICIAL_SPLIT,
        read=partial(read_samples, classes=[f"{sign:05d}" for sign in range(43)]),
    ),
    "Country211": OfficialSet(
        required_paths=("country211/train", "country211/valid", "country211/test"),
        split_note="train and valid of the official split together against test",
        read=read_with_loader,
        train=({"split": "train"}, {"split": "valid"}),
    ),
    "RenderedSST2": OfficialSet(
        required_paths=("rendered-sst2/train", "rendered-sst2/valid", "rendered-sst2/test"),
        split_note="train and val of the official split together against test",
        read=read_with_loader,
        **WITH_VAL,
    ),
    "Imagenette": OfficialSet(
        required_paths=("imagenette2",), split_note=OFFICIAL_SPLIT, read=read_samples, val=({"split": "val"},)
    ),
    "STL10": OfficialSet(
        required_paths=("stl10_binary", "stl10_binary/class_names.txt"), split_note=OFFICIAL_SPLIT, read=read_arrays
    ),
    "SVHN": OfficialSet(
        required_paths=("train_32x32.mat", "test_32x32.mat"), split_note=OFFICIAL_SPLIT, read=read_arrays
    ),
    "USPS": OfficialSet(
        required_paths=("usps.bz2", "usps.t.bz2"), split_note=OFFICIAL_SPLIT, read=read_arrays, **TRAIN_FLAG
    ),
    **{
        name: OfficialSet(
            required_paths=tuple(f"{name}/raw/{file}" for file in MNIST_FILES),
            split_note=OFFICIAL_SPLIT,
            read=read_arrays,
            **TRAIN_FLAG,
        )
        for name in ("MNIST", "FashionMNIST", "KMNIST")
    },
}


PLACE = "NAME:ROOT"
SPLITS = ("train", "val")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split of NAME:ROOT. Raises ValueError for an unknown NAME, and for missing or unofficial files."""
    url = f"torchvision:{place}"
    name, _, root = place.partition(":")
    if name not in SETS:
        raise ValueError(f"{url}: no set {name!r}{did_you_mean(name, list(SETS))}")
    if not root:
        raise ValueError(f"{url}: no folder after the name; write torchvision:{name}:/path/to/folder")
    root, entry = os.path.abspath(os.path.expanduser(root)), SETS[name]
    require_folder(root, url)
    if missing := [path for path in entry.required_paths if not os.path.exists(os.path.join(root, path))]:
        raise ValueError(f"{url}: {root} lacks {', '.join(missing)}; {_how_to_get(name)}")
    parts = entry.train if split == "train" else entry.val
    official = _concatenate([_read_official(url, name, root, arguments) for arguments in parts])
    if entry.split_indices:
        official = official.take(entry.split_indices(root, split, official))
    classes, labels, images = official.classes, official.labels, official.images
    if labels.ndim == 1:  # sort the classes by their names as folders
        folder_names = [class_name.strip("/").replace("/", "_") for class_name in classes]
        order = sorted(range(len(folder_names)), key=folder_names.__getitem__)
        classes, labels = [folder_names[index] for index in order], np.argsort(order)[labels]
    return stored_set(
        url=url,
        split=split,
        classes=classes,
        labels=labels,
        images=pixel_images(f"torchvision:{name}", images)
        if isinstance(images, np.ndarray)
        else file_images(url, images),
        notes=(entry.split_note,),
        reports=entry.reports,
    )


def _read_official(url: str, name: str, root: str, arguments: Arguments) -> OfficialImages:
    """The images of one object of torchvision's class. Raises ValueError for damaged or missing files."""
    from torchvision import datasets

    entry = SETS[name]
    loader = {"loader": str} if entry.read is read_with_loader else {}  # returns the path, not the image
    try:
        refuse_irregular_files(root, EXTENSIONS)  # images are read by this project
        if name == "StanfordCars":  # for other sets with .mat files, torchvision compares their MD5 sums
            check_mats(glob.glob(f"{glob.escape(root)}/stanford_cars/**/*.mat", recursive=True))
        return entry.read(getattr(datasets, entry.dataset or name)(root, **arguments, **loader))
    except Exception as error:  # torchvision's RuntimeError, or any type for a damaged list
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{url}: torchvision cannot read it ({reason}); {_how_to_get(name)}") from error


def _how_to_get(name: str) -> str:
    """Advice for users whose set is incomplete."""
    return SETS[name].advice or f"bench data get {name} --out DIR downloads it into DIR/{name}"


def _concatenate(parts: Sequence[OfficialImages]) -> OfficialImages:
    """The images of all parts; of several parts, all have paths."""
    if len(parts) == 1:
        return parts[0]
    labels = np.concatenate([part.labels for part in parts])
    return OfficialImages(
        classes=parts[0].classes, labels=labels, images=[path for part in parts for path in part.images]
    )


def file_images(url: str, paths: Sequence[str]) -> FileImages:
    """The image files at N paths, with their base names for fingerprints. Raises ValueError if some are missing."""
    base = os.path.commonpath([os.path.dirname(path) for path in paths])
    row_of = {path[len(base) + 1 :]: row for row, path in enumerate(paths)}
    listing, _ = images_below(base, ["."]) if os.path.isdir(base) else (None, None)
    indices = np.full(len(paths), -1)  # into the listing
    for index, name in enumerate(listing.names if listing else ()):
        if (row := row_of.get(name)) is not None:
            indices[row] = index
    if listing is None or (indices < 0).any():
        first = paths[int((indices < 0).argmax())]
        raise ValueError(
            f"{url}: {(indices < 0).sum()} of its {len(paths)} images are missing, {first} first; unpack again"
        )
    return listing.take_renamed(indices, PackedNames.pack(map(os.path.basename, paths)))


@dataclass(frozen=True, eq=False)
class PixelStore:
    """An ImageStore that presents pixels as PPM or PGM files, which decode to exactly these pixels."""

    pixels: np.ndarray  # (N, H, W, 3) or (N, H, W) uint8

    def read(self, index: int) -> bytes:
        return self.header + np.ascontiguousarray(self.pixels[index]).tobytes()

    @property
    def header(self) -> bytes:
        """The header of a PPM (colour) or PGM (grey) file, as Pillow writes it."""
        height, width = self.pixels.shape[1:3]
        return b"P%d\n%d %d\n255\n" % (6 if self.pixels.ndim == 4 else 5, width, height)


def pixel_images(where: str, pixels: np.ndarray) -> StoredImages:
    """Images (N, H, W, 3) or (N, H, W) uint8, named by their index. where: text before their names in messages."""
    store, ending = PixelStore(pixels), "ppm" if pixels.ndim == 4 else "pgm"
    return StoredImages(
        store=store,
        where=where,
        names=PackedNames.pack(f"{number:06d}.{ending}" for number in range(len(pixels))),
        sizes=np.full(len(pixels), len(store.header) + pixels[:1].size),
        store_indices=np.arange(len(pixels)),
        changed=np.array([(0, zlib.crc32(image.tobytes())) for image in pixels], np.int64).reshape(-1, 2),
    )
