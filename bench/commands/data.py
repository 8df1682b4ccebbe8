"""Check an image set, bench data check URL, or download a public one, bench data get NAME."""

import os
import shlex
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.cli.options import CommandOptions, Positional
from bench.cli.output import in_one_line
from engine.files import locked, sync_folder
from engine.optional import require
from engine.printing import did_you_mean, say

MOST = 20  # problems of scenes that are listed; a wrong classes.txt is one in each of them
EPILOG = """examples:
  bench data check folder:/data/cifar10
  bench data check imagenet:/data/ILSVRC --list-only
  bench data get                                       the sets that can be downloaded, with sizes and licences
  bench data get OxfordIIITPet --out /data             into /data/OxfordIIITPet
  bench data get hf:uoft-cs/cifar10 --out /data        a set of the Hugging Face Hub

exit codes: 0 the set can be used as it is; 1 there is something to fix; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench data`."""

    # check: counts, classes, unreadable files, what to fix; get: download, after size and licence were said
    action: Positional[Literal["check", "get"]]
    # URL: to check, such as folder:PATH; schemes: bench list imagesets, bench list layouts. To get: a name of the list,
    # or hf:NAME
    url: Positional[str | None] = None
    out: Path | None = None  # DIR: get: the set goes into DIR/NAME
    list_only: bool = False  # do not decode the images


def run(options: Options) -> int:
    """0: the set can be used as it is; 1: there is something to fix."""
    if options.action == "get":
        return get(options.url, options.out)
    if not options.url or options.out:
        raise ValueError("bench data check URL: give one image set, and no --out")
    from downstream.data.scenes import layout_of, scene_schemes
    from engine.progress import Progress
    from imagesets.check import check_image_set, render
    from imagesets.sets import parse_url

    if layout_of(options.url):
        return check_scenes(options.url, read_all=not options.list_only)
    parse_url(options.url, scene_schemes())
    with ExitStack() as stack:
        shown: list[Progress] = []
        report = check_image_set(
            options.url,
            read_all=not options.list_only,
            start=lambda total: shown.append(stack.enter_context(Progress("decoding", total, "images"))),
            advance=lambda count: shown[0].advance(count),
        )
    say(*render(report).split("\n"))
    return 0 if report.ok else 1


def get(name: str | None, out: Path | None) -> int:
    """Say size, licence and what `--data` will take, download, and say it again; without a name, list the sets."""
    from bench.cli.names import check_writable

    if name is None:
        for offered, (megabytes, licence, page) in OFFERED.items():
            say(f"{offered:16} {size_of(megabytes):>8}  {licence:27}{page}")
        return 0
    folder = folder_of(name, out or Path())
    if out is None:
        raise ValueError(f"bench data get {name} --out DIR: say where to")
    check_writable(out)
    ready = f"bench run --data {' or '.join(forms(name, folder))}"
    say(f"{name}: {terms(name)}", f"  then: {ready}")
    download(name, folder)
    columns = "; where its columns have other names, '?image=NAME&label=NAME'" if name.startswith("hf:") else ""
    say(f"{folder} is whole: {ready}{columns}")
    return 0


def check_scenes(url: str, read_all: bool) -> int:
    """The same for labelled scenes: every mask or size against its image. A split that cannot be opened, as a mask
    lacks, is a problem like others."""
    from downstream.data.scenes import decode_scenes, open_scenes, parse_scene_url
    from engine.progress import Progress
    from imagesets.sets import SPLITS

    problems: list[str] = []
    parse_scene_url(url)
    say(url)
    with tempfile.TemporaryDirectory() as folder:
        for split in SPLITS:
            try:
                scenes = open_scenes(url, split, Path(folder))
            except ValueError as error:
                problems += [str(error)] if str(error) not in problems else []  # both splits may lack one folder
                continue
            classes = f", {len(scenes.classes)} classes" if scenes.classes else ""
            say(f"  {split}: {len(scenes):,} scenes{classes}")
            say(f"    fingerprint {scenes.fingerprint[:16]}", *(f"    note: {note}" for note in scenes.notes))
            if read_all:
                with Progress(f"reading {split}", len(scenes)) as progress:
                    unreadable, pixels = decode_scenes(scenes, progress.advance)
                problems += unreadable.values()
                if pixels:
                    say(*(f"    note: {line}" for line in pixels.lines()))
                    try:
                        pixels.check()
                    except ValueError as error:
                        problems.append(str(error))
    say(*(f"  FIX: {problem}" for problem in problems[:MOST]), *([] if problems else ["  no problems found"]))
    if len(problems) > MOST:
        say(f"  and {len(problems) - MOST} more scenes with problems")
    return 1 if problems else 0


HUB = "hf:"
# Megabytes (10^6 bytes) of the archives; licence; the page that states it or should.
OFFERED: dict[str, tuple[int, str, str]] = {
    "CIFAR10": (170, "none stated", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "CIFAR100": (169, "none stated", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "Food101": (4996, "scientific fair use", "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/"),
    "OxfordIIITPet": (811, "CC BY-SA 4.0", "https://www.robots.ox.ac.uk/~vgg/data/pets/"),
    "Flowers102": (345, "none stated", "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"),
    "DTD": (625, "for research", "https://www.robots.ox.ac.uk/~vgg/data/dtd/"),
    "FGVCAircraft": (2753, "non-commercial research", "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/"),
    "Caltech101": (137, "CC BY 4.0", "https://data.caltech.edu/records/mzrjq-6wc02"),
    "INaturalist": (232000, "non-commercial research", "https://github.com/visipedia/inat_comp/tree/master/2021"),
    "INaturalistMini": (50000, "non-commercial research", "https://github.com/visipedia/inat_comp/tree/master/2021"),
    "Places365": (26696, "non-commercial research", "http://places2.csail.mit.edu/download.html"),
    "Places365Large": (115000, "non-commercial research", "http://places2.csail.mit.edu/download.html"),
    "VOC2007": (911, "Flickr's terms of use", "http://host.robots.ox.ac.uk/pascal/VOC/voc2007/"),
    "VOC2012": (2000, "Flickr's terms of use", "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/"),
    "EuroSAT": (94, "MIT", "https://huggingface.co/datasets/torchgeo/eurosat"),
    "GTSRB": (277, "not known", "https://benchmark.ini.rub.de/"),
    "Country211": (11000, "Creative Commons, by photo", "https://github.com/openai/CLIP/blob/main/data/country211.md"),
    "RenderedSST2": (131, "none stated", "https://github.com/openai/CLIP/blob/main/data/rendered-sst2.md"),
    "Imagenette": (1557, "Apache-2.0", "https://github.com/fastai/imagenette"),
    "STL10": (2640, "none stated", "https://cs.stanford.edu/~acoates/stl10/"),
    "SVHN": (246, "non-commercial use", "http://ufldl.stanford.edu/housenumbers/"),
    "USPS": (8, "not known", "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"),
    "MNIST": (12, "CC BY-SA 3.0", "https://keras.io/api/datasets/mnist/"),
    "FashionMNIST": (31, "MIT", "https://github.com/zalandoresearch/fashion-mnist"),
    "KMNIST": (21, "CC BY-SA 4.0", "https://github.com/rois-codh/kmnist"),
}
# Sets that ask for an account or a licence to be accepted, or that torchvision does not know.
ON_THEIR_SITES = ("imagenet", "ade20k", "cityscapes", "coco", "nyu", "davis", "spair", "copydays", "revisited")
FORMS = {  # what --data takes, where it is not torchvision's scheme alone; {} is the folder
    "VOC2007": ("torchvision:VOC2007:{}", "vocboxes:{}"),
    "VOC2012": ("voc:{}", "vocboxes:{}"),
}
ARCHIVES = (".tar", ".gz", ".tgz", ".zip", ".bz2", ".mat")
# MD5 of archives that torchvision takes as they lie there: Aircraft's, which it has no sum of, and USPS's.
SUMS = {
    "fgvc-aircraft-2013b.tar.gz": "d4acdd33327262359767eeaa97a4f732",
    "usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197",
    "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118",
}
UNPACKED = 2.2  # disk for archives and what is in them, in sizes of the archives


def forms(name: str, folder: Path) -> list[str]:
    """What `--data NAME=` takes of a set in its folder, quoted for a shell."""
    key = name.removeprefix(HUB).rpartition("/")[2].lower()
    templates = (f"{HUB}{{}}",) if name.startswith(HUB) else FORMS.get(name, (f"torchvision:{name}:{{}}",))
    return [shlex.quote(f"{key}={template.format(folder)}") for template in templates]


def size_of(megabytes: int) -> str:
    """`170 MB`, `5.0 GB`"""
    return f"{megabytes / 1000:.1f} GB" if megabytes > 999 else f"{megabytes} MB"


def folder_of(name: str, out: Path) -> Path:
    """The folder that holds a set, whole. ValueError for a set that cannot be downloaded here."""
    from imagesets.schemes.torchvision import SETS

    if name.startswith(HUB):
        require("datasets")
        if not name.removeprefix(HUB) or os.path.exists(name.removeprefix(HUB)):
            raise ValueError(f"bench data get {name}: give a set of the Hub, such as hf:uoft-cs/cifar10")
        return out / name.removeprefix(HUB).replace("/", "--")
    if name in SETS and name not in OFFERED:
        raise ValueError(f"bench data get {name}: torchvision cannot download all of it; {SETS[name].advice}")
    if name.lower() in ON_THEIR_SITES:
        raise ValueError(f"bench data get {name}: get it from its own site; docs/data.md says which files are read")
    if name not in OFFERED:
        raise ValueError(
            f"bench data get {name}: no such set{did_you_mean(name, list(OFFERED))}; {HUB}NAME for the Hub"
        )
    return out / name


def terms(name: str) -> str:
    """Size and licence of a set, with the page that states it; of the Hub's as their cards say."""
    if not name.startswith(HUB):
        megabytes, licence, page = OFFERED[name]
        return f"{size_of(megabytes)} to download; licence: {licence} ({page})"
    from huggingface_hub import HfApi

    repository = name.removeprefix(HUB)
    try:
        info = HfApi().dataset_info(repository, files_metadata=True)
    except Exception as error:  # the library's own kinds, and those of the network
        raise ValueError(f"bench data get {name}: the Hub does not answer for it: {in_one_line(error)}") from error
    size = sum(file.size or 0 for file in info.siblings or ()) / 1e6
    licence = (info.card_data.get("license") if info.card_data else None) or "none stated"
    return f"{size_of(max(1, round(size)))} to download; licence: {licence} ({info.id} on the Hub)"


def download(name: str, folder: Path) -> None:
    """Download a set into its folder; one that is there already is only opened.

    A set is made in a hidden folder beside its own and moved there, whole, when both of its splits could be opened.
    Archives whose download ended stay in the hidden folder until then, so that the same command goes on after a kill;
    whatever was unpacked is unpacked anew. torchvision compares MD5 sums of archives with those that it knows.

    ValueError for a disk that is too small, what cannot be downloaded, and a folder that holds something else.
    """
    if folder.exists():
        try:
            check_set(name, folder)
        except ValueError as error:
            raise ValueError(f"--out: {folder} is there and cannot be used as {name}: {error}; move it away") from error
        return
    needed = UNPACKED * 1e6 * OFFERED.get(name, (0,))[0]
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise ValueError(f"--out {folder.parent}: {free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} GB are needed")
    partial = folder.parent / f".{folder.name}.partial"
    with locked(folder.parent / f".{folder.name}.lock", f"download of {name}"):
        if folder.exists():  # another process made it meanwhile
            return
        partial.mkdir(exist_ok=True)
        try:
            whole = from_hub(name, partial) if name.startswith(HUB) else from_torchvision(name, partial)
        except Exception as error:  # torchvision's RuntimeError, network errors, what a damaged archive leads to
            raise ValueError(
                f"bench data get {name}: {in_one_line(error)}; the same command goes on with what is whole in {partial}"
            ) from error
        if not name.startswith(HUB):  # of the Hub's, the user says which columns hold images and labels
            check_set(name, whole)
        os.replace(whole, folder)
        sync_folder(folder.parent)
    shutil.rmtree(partial, ignore_errors=True)


def from_torchvision(name: str, partial: Path) -> Path:
    """Download and unpack by torchvision's classes; archives that nobody reads are then removed."""
    from torchvision import datasets

    from imagesets.schemes.torchvision import SETS

    known = SETS.get(name)
    dataset = (known.dataset if known else "VOCSegmentation") or name
    parts: tuple[Any, ...] = (*known.train, *known.val) if known else ({"year": "2012", "image_set": "trainval"},)
    keep_archives(partial)
    for part in parts:
        getattr(datasets, dataset)(str(partial), download=True, **part)
    for path in archives_below(partial):
        if not as_official(path):
            raise ValueError(f"{path.name} is not the official file")
        if not known or str(path.relative_to(partial)) not in known.needs:
            path.unlink()
    return partial


def archives_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(ARCHIVES) and path.is_file()]


def as_official(path: Path) -> bool:
    """Whether an archive that torchvision does not compare has the official sum; True of all others."""
    from torchvision.datasets.utils import check_integrity

    return check_integrity(path, SUMS.get(path.name))


def keep_archives(partial: Path) -> None:
    """Remove all that an earlier attempt unpacked, as it may be half of it, and archives that are half."""
    archives = {path for path in archives_below(partial) if as_official(path)}
    for path in sorted(partial.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in archives:
            path.unlink()


def from_hub(name: str, partial: Path) -> Path:
    """Download by the library datasets, which goes on with its own partial files, and save as one folder."""
    import datasets

    whole = partial / "set"
    shutil.rmtree(whole, ignore_errors=True)
    datasets.load_dataset(name.removeprefix(HUB), cache_dir=str(partial / "cache")).save_to_disk(whole)
    return whole


def check_set(name: str, folder: Path) -> None:
    """ValueError where a split of the set in `folder` cannot be opened."""
    from downstream.data.scenes import layout_of, open_scenes
    from imagesets.sets import open_set

    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    for form in forms(name, folder):
        url = shlex.split(form)[0].partition("=")[2]
        with tempfile.TemporaryDirectory() as cache:
            for split in splits:
                open_scenes(url, split, Path(cache)) if layout_of(url) else open_set(url, split)
