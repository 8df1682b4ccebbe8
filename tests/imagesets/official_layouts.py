"""Tiny sets in the official layouts that torchvision.datasets reads, and what folders of their classes would hold.

write(NAME, ROOT, monkeypatch) -> split -> CLASS/IMAGE -> bytes of the file. Where torchvision compares MD5 sums with
those of the official files, they are replaced by those of the tiny ones.
"""

import bz2
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

Splits = dict[str, dict[str, bytes]]
COLOURS = ("blue", "red")


def picture(name: str, kind: str = "JPEG") -> bytes:
    """A small image, different for every name."""
    random = np.random.RandomState(int(hashlib.md5(name.encode()).hexdigest()[:6], 16))
    file = io.BytesIO()
    Image.fromarray(random.randint(0, 256, (random.randint(4, 9), 5, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def put(path: Path, content: bytes | str = b"") -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content or picture(str(path)[-60:])
    path.write_bytes(content)
    return content


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def food(root: Path, _) -> Splits:
    splits: Splits = {}
    for split, name in (("train", "train"), ("val", "test")):
        images_by_class = {colour: [f"{colour}/{split}{n}" for n in (2, 1)] for colour in ("red", "blue")}
        put(root / f"food-101/meta/{name}.json", json.dumps(images_by_class))
        images = [f"{name}.jpg" for names in images_by_class.values() for name in names]
        splits[split] = {image: put(root / "food-101/images" / image) for image in images}
    return splits


def pets(root: Path, _) -> Splits:
    """Numbered by the list: the Abyssinian is 1, the American Bulldog 2."""
    base, splits = root / "oxford-iiit-pet", {}
    for split, name in (("train", "trainval"), ("val", "test")):
        rows = [
            (breed, f"{breed}_{n}{split}", label)
            for label, breed in ((2, "american_bulldog"), (1, "Abyssinian"))
            for n in (10, 9)
        ]
        put(base / f"annotations/{name}.txt", "".join(f"{image} {label} 1 1\n" for _, image, label in rows))
        titles = {"american_bulldog": "American Bulldog", "Abyssinian": "Abyssinian"}
        splits[split] = {f"{titles[breed]}/{image}.jpg": put(base / f"images/{image}.jpg") for breed, image, _ in rows}
    return splits


def flowers(root: Path, patch) -> Splits:
    base, classes, splits = root / "flowers-102", datasets.Flowers102.classes, {"train": {}, "val": {}}
    ids = np.arange(1, 307)
    parts = {"trnid": ids[::3], "valid": ids[1::3], "tstid": ids[2::3]}
    labels = (ids - 1) // 3 + 1
    base.mkdir()
    savemat(base / "imagelabels.mat", {"labels": labels[None]})
    savemat(base / "setid.mat", {name: part[None] for name, part in parts.items()})
    for name, part in parts.items():
        for number in part:
            image = f"image_{number:05d}.jpg"
            content = put(base / "jpg" / image)
            splits["val" if name == "tstid" else "train"][f"{classes[labels[number - 1] - 1]}/{image}"] = content
    files = {"label": "imagelabels.mat", "setid": "setid.mat"}
    sums = {key: (name, md5(base / name)) for key, name in files.items()}
    patch.setattr(datasets.Flowers102, "_file_dict", datasets.Flowers102._file_dict | sums)
    return splits


def textures(root: Path, _) -> Splits:
    splits: Splits = {"train": {}, "val": {}}
    for name in ("train", "val", "test"):
        images = [f"{colour}/{colour}_{name}{n}.jpg" for colour in COLOURS for n in (1, 2)]
        put(root / f"dtd/dtd/labels/{name}1.txt", "\n".join(images))
        splits["val" if name == "test" else "train"] |= {
            image: put(root / "dtd/dtd/images" / image) for image in images
        }
    return splits


def aircraft(root: Path, _) -> Splits:
    base, splits = root / "fgvc-aircraft-2013b/data", {}
    put(base / "variants.txt", "F/A-18\n707-320\n")
    for split, name in (("train", "trainval"), ("val", "test")):
        rows = [
            (f"{number}{len(split)}", variant) for number, variant in ((31, "F/A-18"), (12, "707-320"), (20, "707-320"))
        ]
        put(base / f"images_variant_{name}.txt", "".join(f"{image} {variant}\n" for image, variant in rows))
        splits[split] = {f"{v.replace('/', '_')}/{image}.jpg": put(base / f"images/{image}.jpg") for image, v in rows}
    return splits


def cars(root: Path, _) -> Splits:
    base, splits, classes = root / "stanford_cars", {}, ["Ram C/V Van 2012", "Acura TL 2012"]
    (base / "devkit").mkdir(parents=True)
    savemat(base / "devkit/cars_meta.mat", {"class_names": np.array(classes, object)})
    kind = [("class", "O"), ("fname", "O")]
    for split, path in (("train", "devkit/cars_train_annos.mat"), ("val", "cars_test_annos_withlabels.mat")):
        folder = "cars_train" if split == "train" else "cars_test"
        rows = [(1, "00002.jpg"), (2, "00001.jpg"), (2, "00003.jpg")]
        savemat(base / path, {"annotations": np.array(rows, kind)})
        splits[split] = {f"{classes[c - 1].replace('/', '_')}/{name}": put(base / folder / name) for c, name in rows}
    return splits


def scenes(root: Path, _) -> Splits:
    """Two images of each class are in no list."""
    base, splits = root / "SUN397", {}
    put(base / "ClassName.txt", "/a/abbey\n/a/airport/outside\n")
    for split, name in (("train", "Training_01.txt"), ("val", "Testing_01.txt")):
        images = [f"/a/{kind}/sun_{split}{n}.jpg" for kind in ("abbey", "airport/outside") for n in (2, 1)]
        put(base / "Partitions" / name, "\r\n".join(images))
        splits[split] = {}
        for path in images:
            scene, image = path.removeprefix("/a/").rsplit("/", 1)
            splits[split][f"{scene.replace('/', '_')}/{image}"] = put(base / path[1:])
            put(base / path[1:].replace("sun_", "sun_other_"))
    return splits


def caltech(root: Path, _) -> Splits:
    """Splits are drawn: all images are under "all"."""
    base, contents = root / "caltech101/101_ObjectCategories", {}
    for name, count in (("BACKGROUND_Google", 33), ("accordion", 32), ("Faces", 31)):
        images = [f"{name}/image_{number:04d}.jpg" for number in range(1, count + 1)]
        contents |= {image: put(base / image) for image in images}
    put(base / "BACKGROUND_Google/tmp", "no image")
    return {"all": contents}


def satellite(root: Path, _) -> Splits:
    images = [f"{kind}/{kind}_{n}.jpg" for kind in ("Forest", "River") for n in range(1, 11)]
    return {"all": {image: put(root / "eurosat/2750" / image) for image in images}}


def objects(root: Path, _) -> Splits:
    """Images that show several classes; the result holds their labels, such as b"1 0 -1", in place of their bytes."""
    base, splits = root / "VOCdevkit/VOC2007", {}
    labels = {"train": ["1 -1 -1", "0 1 -1", "-1 -1 1", "1 1 1"], "val": ["1 -1 0", "-1 1 -1", "-1 0 1"]}
    for split, name in (("train", "trainval"), ("val", "test")):
        numbers = [f"{number}{len(name)}" for number in (30, 10, 20, 40)[: len(labels[split])]]
        put(base / f"ImageSets/Main/{name}.txt", "\n".join(numbers))
        for column, kind in enumerate(("aeroplane", "bicycle", "bird")):
            lines = [f"{number} {row.split()[column]:>2}" for number, row in zip(numbers, labels[split], strict=True)]
            put(base / f"ImageSets/Main/{kind}_{name}.txt", "\n".join(lines))
        for number in numbers:
            put(base / f"JPEGImages/{number}.jpg")
        splits[split] = {f"{number}.jpg": row.encode() for number, row in zip(numbers, labels[split], strict=True)}
    return splits


def trees(*folders: str, ending: str = ".jpg", classes: Iterable[str] = COLOURS) -> Callable[..., Splits]:
    """Class folders in several folders, of which the last is val."""

    def write_set(root: Path, _) -> Splits:
        splits: Splits = {"train": {}, "val": {}}
        for folder in folders:
            images = [f"{name}/{Path(folder).name}_{n}{ending}" for name in classes for n in (1, 0)]
            splits["val" if folder == folders[-1] else "train"] |= {
                image: put(root / folder / image) for image in images
            }
        return splits

    return write_set


def listed_species(year: str) -> Callable[..., Splits]:
    def write_set(root: Path, _) -> Splits:
        splits: Splits = {}
        for split in ("train", "val"):
            images = [f"Aves/{kind}/{split}{n}.jpg" for kind in range(2) for n in (1, 0)]
            entries = [{"id": n, "file_name": f"train_val{year}/{image}"} for n, image in enumerate(images)]
            put(root / f"{split}{year}.json", json.dumps({"images": entries}))
            splits[split] = {image.replace("Aves/", "Aves_"): put(root / year / image) for image in images}
        return splits

    return write_set


def places(kind: str) -> Callable[..., Splits]:
    def write_set(root: Path, patch) -> Splits:
        put(root / "categories_places365.txt", "/a/airfield 0\n/b/bar 1\n")
        train = [
            (f"/{name[2:]}/0000{n}.jpg", name, label)
            for name, label in (("a_a/airfield", 0), ("b_b/bar", 1))
            for n in (2, 1)
        ]
        val = [("Places365_val_00000002.jpg", "a_a/airfield", 0), ("Places365_val_00000001.jpg", "b_b/bar", 1)]
        splits, meta = {}, {}
        lists = (
            ("train", "train-standard", "places365_train_standard.txt", train),
            ("val", "val", "places365_val.txt", val),
        )
        for split, key, name, rows in lists:
            put(root / name, "".join(f"{path} {label}\n" for path, _, label in rows))
            meta[key] = (name, md5(root / name))
            folder = root / (f"data_{kind}_standard" if split == "train" else f"val_{kind}")
            splits[split] = {
                f"{c.replace('/', '_')[2:]}/{path.split('/')[-1]}": put(folder / path.lstrip("/"))
                for path, c, _ in rows
            }
        categories = ("categories_places365.txt", md5(root / "categories_places365.txt"))
        patch.setattr(datasets.Places365, "_CATEGORIES_META", categories)
        patch.setattr(datasets.Places365, "_FILE_LIST_META", meta)
        return splits

    return write_set


def signs(root: Path, _) -> Splits:
    base, splits = root / "gtsrb", {"train": {}, "val": {}}
    for sign in range(43):
        image = f"{sign:05d}/00000_00001.ppm"
        splits["train"][image] = put(base / "GTSRB/Training" / image, picture(image, "PPM"))
        name = f"{42 - sign:05d}.ppm"
        splits["val"][f"{sign:05d}/{name}"] = put(base / "GTSRB/Final_Test/Images" / name, picture(name, "PPM"))
    rows = "".join(f"{42 - sign:05d}.ppm;5;5;0;0;4;4;{sign}\n" for sign in range(43))
    put(base / "GT-final_test.csv", f"Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n{rows}")
    return splits


def numbered(classes: Iterable[str], labels: Iterable[int], pixels: np.ndarray) -> dict[str, bytes]:
    """PPM and PGM files of pixels (N, H, W, 3) or (N, H, W), as Pillow writes them."""
    contents, names = {}, [name.replace("/", "_") for name in classes]
    for number, (label, image) in enumerate(zip(labels, pixels, strict=True)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PPM")
        contents[f"{names[label]}/{number:06d}.{'ppm' if image.ndim == 3 else 'pgm'}"] = file.getvalue()
    return contents


def pixels_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape, np.uint8)


def cifar(
    name: str, files: dict[str, list[str]], key: str, label_key: str, classes: list[str]
) -> Callable[..., Splits]:
    def write_set(root: Path, patch) -> Splits:
        kind, splits = getattr(datasets, name), {}
        base = root / kind.base_folder
        base.mkdir()
        for number, (split, batches) in enumerate(files.items()):
            labels = [label for label in range(len(classes)) for _ in batches]
            pixels = pixels_of(number, len(labels), 32, 32, 3)
            splits[split] = numbered(classes, labels, pixels)
            rows = np.array_split(np.arange(len(labels)), len(batches))
            for batch, batch_rows in zip(batches, rows, strict=True):
                data = pixels[batch_rows].transpose(0, 3, 1, 2).reshape(len(batch_rows), -1)
                content = {"data": data, label_key: [labels[row] for row in batch_rows]}
                (base / batch).write_bytes(pickle.dumps(content, protocol=2))
        (base / kind.meta["filename"]).write_bytes(pickle.dumps({key: classes}, protocol=2))
        patch.setattr(kind, "train_list", [[batch, md5(base / batch)] for batch in files["train"]])
        patch.setattr(kind, "test_list", [[batch, md5(base / batch)] for batch in files["val"]])
        patch.setattr(kind, "meta", kind.meta | {"md5": md5(base / kind.meta["filename"])})
        return splits

    return write_set


def stl(root: Path, patch) -> Splits:
    base, splits, classes = root / "stl10_binary", {}, ["airplane", "bird"]
    put(base / "class_names.txt", "airplane\nbird\n")
    for split, name in (("train", "train"), ("val", "test")):
        pixels, labels = pixels_of(len(name), 4, 96, 96, 3), [1, 0, 0, 1]
        put(base / f"{name}_X.bin", pixels.transpose(0, 3, 2, 1).tobytes())  # columns first
        put(base / f"{name}_y.bin", bytes(label + 1 for label in labels))
        splits[split] = numbered(classes, labels, pixels)
    for split in ("train", "test"):
        patch.setattr(
            datasets.STL10, f"{split}_list", [[f"{split}_{x}.bin", md5(base / f"{split}_{x}.bin")] for x in "Xy"]
        )
    return splits


def house_numbers(root: Path, patch) -> Splits:
    splits, files = {}, dict(datasets.SVHN.split_list)
    for split, name in (("train", "train"), ("val", "test")):
        pixels, labels = pixels_of(len(name), 10, 32, 32, 3), np.arange(10)[::-1]
        path = root / f"{name}_32x32.mat"
        savemat(path, {"X": pixels.transpose(1, 2, 3, 0), "y": np.where(labels == 0, 10, labels)[:, None]})
        files[name] = [files[name][0], path.name, md5(path)]
        splits[split] = numbered(map(str, range(10)), labels, pixels)
    patch.setattr(datasets.SVHN, "split_list", files)
    return splits


def post(root: Path, _) -> Splits:
    splits = {}
    for split, name in (("train", "usps.bz2"), ("val", "usps.t.bz2")):
        labels, pixels = list(range(10)), np.zeros((10, 16, 16), np.uint8)
        pixels[:, 3, 4] = 255
        rows = [
            f"{label + 1} " + " ".join(f"{n + 1}:{value / 127.5 - 1:g}" for n, value in enumerate(image.ravel()))
            for label, image in zip(labels, pixels, strict=True)
        ]
        (root / name).write_bytes(bz2.compress("\n".join(rows).encode()))
        splits[split] = numbered(map(str, range(10)), labels, pixels)
    return splits


def mnist(name: str) -> Callable[..., Splits]:
    def write_set(root: Path, _) -> Splits:
        splits, classes = {}, getattr(datasets, name).classes
        for split, part in (("train", "train"), ("val", "t10k")):
            pixels, labels = pixels_of(len(part), 20, 28, 28), [*range(10), *range(10)]
            put(root / f"{name}/raw/{part}-images-idx3-ubyte", struct.pack(">4I", 0x803, 20, 28, 28) + pixels.tobytes())
            put(root / f"{name}/raw/{part}-labels-idx1-ubyte", struct.pack(">2I", 0x801, 20) + bytes(labels))
            splits[split] = numbered(classes, labels, pixels)
        return splits

    return write_set


BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "val": ["test_batch"]}
CIFAR10 = ("label_names", "labels", ["airplane", "automobile", "bird"])
CIFAR100 = ("fine_label_names", "fine_labels", ["zebra", "apple"])
MOODS = ("negative", "positive")
SPECIES = ("00000_Animalia_Annelida_a_b_c_d_e", "00001_Animalia_Annelida_a_b_c_d_f")
WNIDS = ("n01440764", "n02102040")
WRITERS: dict[str, Callable[..., Splits]] = {
    "CIFAR10": cifar("CIFAR10", BATCHES, *CIFAR10),
    "CIFAR100": cifar("CIFAR100", {"train": ["train"], "val": ["test"]}, *CIFAR100),
    "Food101": food,
    "OxfordIIITPet": pets,
    "Flowers102": flowers,
    "DTD": textures,
    "FGVCAircraft": aircraft,
    "StanfordCars": cars,
    "SUN397": scenes,
    "Caltech101": caltech,
    "INaturalist": trees("2021_train", "2021_valid", classes=SPECIES),
    "INaturalistMini": trees("2021_train_mini", "2021_valid", classes=SPECIES),
    "INaturalist2018": listed_species("2018"),
    "INaturalist2019": listed_species("2019"),
    "Places365": places("256"),
    "Places365Large": places("large"),
    "VOC2007": objects,
    "EuroSAT": satellite,
    "GTSRB": signs,
    "Country211": trees("country211/train", "country211/valid", "country211/test"),
    "RenderedSST2": trees(
        *(f"rendered-sst2/{part}" for part in ("train", "valid", "test")), ending=".png", classes=MOODS
    ),
    "Imagenette": trees("imagenette2/train", "imagenette2/val", ending=".JPEG", classes=WNIDS),
    "STL10": stl,
    "SVHN": house_numbers,
    "USPS": post,
    "MNIST": mnist("MNIST"),
    "FashionMNIST": mnist("FashionMNIST"),
    "KMNIST": mnist("KMNIST"),
}


def write(name: str, root: Path, patch) -> Splits:
    """Write the set below a new folder."""
    root.mkdir(parents=True, exist_ok=True)
    return WRITERS[name](root, patch)
