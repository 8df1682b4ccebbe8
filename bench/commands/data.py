"""Check an image set, bench data check URL, or download a public one, bench data get NAME."""

import os
import shlex
import shutil
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.options import CommandOptions, Positional
from engine.errors import UserError, in_one_line
from engine.files import locked, sync_folder
from engine.printing import did_you_mean, say, size

if TYPE_CHECKING:
    from engine.tasks import Task

MAX_PROBLEMS = 20  # problems of scenes that are listed; a wrong classes.txt causes one in every scene
EPILOG = """examples:
  bench data check folder:/data/cifar10
  bench data check imagenet:/data/ILSVRC --list-only
  bench data get                                       the sets that can be downloaded, with sizes and licences
  bench data get OxfordIIITPet --out /data             into /data/OxfordIIITPet

exit codes: 0 the set can be used as it is; 1 there is something to fix; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench data`."""

    # check: counts, classes, unreadable files, what to fix; get: print size and licence, then download
    action: Positional[Literal["check", "get"]]
    # URL: for check: an image set, such as folder:PATH (bench list imagesets, bench list layouts); for get: one of the
    # names that bench data get prints
    url: Positional[str | None] = None
    out: Path | None = None  # DIR: for get: download into DIR/NAME
    list_only: bool = False  # for check: do not decode the images


def run(options: Options) -> int:
    """0: the set can be used as it is; 1: there is something to fix."""
    if options.action == "get":
        return get(options.url, options.out)
    if options.out:
        raise UserError("out", "it is for bench data get")
    if not options.url:
        raise UserError("url", "give that of an image set, such as folder:/data/cifar10")
    from downstream.data.scenes import layout_of, scene_schemes
    from engine.progress import Progress
    from imagesets.check import check_image_set, render
    from imagesets.sets import parse_url

    if layout_of(options.url):
        return check_scenes(options.url, read_all=not options.list_only)
    parse_url(options.url, scene_schemes())
    with ExitStack() as stack:
        bars: list[Progress] = []
        report = check_image_set(
            options.url,
            read_all=not options.list_only,
            start=lambda total: bars.append(stack.enter_context(Progress("decoding", total, "images"))),
            advance=lambda count: bars[0].advance(count),
        )
    say(*render(report).split("\n"))
    return 0 if report.ok else 1


def get(name: str | None, out: Path | None) -> int:
    """Download a set, after printing its size, its licence and its `--data` URLs; without a name, list the sets."""
    from bench.options import check_writable

    if name is None:
        for set_name, (megabytes, licence, page) in OFFERED.items():
            say(f"{set_name:16} {size(1e6 * megabytes):>8}  {licence:27}{page}")
        return 0
    folder = folder_of(name, out or Path())
    if out is None:
        raise UserError("out", f"give the folder to download {name} into")
    check_writable(out)
    usage = f"bench run --data {' or '.join(urls_of(name, folder))}"
    megabytes, licence, page = OFFERED[name]
    say(f"{name}: {size(1e6 * megabytes)} to download; licence: {licence} ({page})", f"  then: {usage}")
    download(name, folder)
    say(f"{folder} is complete: {usage}")
    return 0


def check_scenes(url: str, read_all: bool) -> int:
    """Check labelled scenes: every mask or size against its image; 1 if there is something to fix."""
    from bench.run.suites import catalogue
    from downstream.data.check import one_of_each_kind, problems_of
    from downstream.data.scenes import serves

    @cache
    def tasks() -> "list[Task]":
        return [chosen.task for chosen in catalogue(["downstream"]).protocols.values() if serves(url, chosen.layout)]

    problems = problems_of(url, tasks, read_all)
    lines = one_of_each_kind(problems)
    say(*(f"  FIX: {line}" for line in lines[:MAX_PROBLEMS]), *([] if problems else ["  no problems found"]))
    if len(lines) > MAX_PROBLEMS:
        say(f"  and {len(lines) - MAX_PROBLEMS} more problems")
    return 1 if problems else 0


# Size of the archives in megabytes (10^6 bytes); licence; the page that states the licence or should.
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
# Sets that require an account or the acceptance of a licence, or that torchvision does not have.
ON_THEIR_SITES = ("imagenet", "ade20k", "cityscapes", "coco", "nyu", "davis", "spair", "copydays", "revisited")
URLS = {  # URLs of sets that are read by other schemes than torchvision's; {} is the folder
    "VOC2007": ("torchvision:VOC2007:{}", "vocboxes:{}"),
    "VOC2012": ("voc:{}", "vocboxes:{}"),
}
ARCHIVES = (".tar", ".gz", ".tgz", ".zip", ".bz2", ".mat")
# MD5 of archives that torchvision does not verify if they exist: Aircraft's, for which it has no checksum, and USPS's.
MD5 = {
    "fgvc-aircraft-2013b.tar.gz": "d4acdd33327262359767eeaa97a4f732",
    "usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197",
    "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118",
}
SILENCE = 60.0  # seconds without a byte after which a server is given up; torchvision itself would wait for ever
UNPACKED = 2.2  # disk space for archives and their contents, as a multiple of the archives' size


def urls_of(name: str, folder: Path) -> list[str]:
    """The values of `--data`, `NAME=URL`, for a downloaded set in its folder, quoted for a shell."""
    key, templates = name.lower(), URLS.get(name, (f"torchvision:{name}:{{}}",))
    return [shlex.quote(f"{key}={template.format(folder)}") for template in templates]


def folder_of(name: str, out: Path) -> Path:
    """The folder that a set is downloaded into. ValueError for a set that `bench data get` cannot download."""
    from imagesets.schemes.torchvision import SETS

    if name in SETS and name not in OFFERED:
        raise UserError("url", f"torchvision cannot download all of it; {SETS[name].advice}", name)
    if name.lower() in ON_THEIR_SITES:
        raise UserError("url", "get it from its own site; docs/data.md lists the files that are read", name)
    if name not in OFFERED:
        hub = "; sets of the Hub need no download: --data NAME=hf:USER/NAME" if "/" in name else ""
        raise UserError("url", f"no such set{did_you_mean(name, list(OFFERED))}{hub}", name)
    return out / name


def download(name: str, folder: Path) -> None:
    """Download a set into its folder; if the folder exists, only check that the set can be opened.

    The set is assembled in a hidden folder next to its own and moved there in one step, once both of its splits could
    be opened. Until then, completed archives stay in the hidden folder, so that the same command continues after a
    kill; everything is unpacked anew. torchvision verifies the archives by the MD5 sums that it knows.

    ValueError if the disk is too small, the set cannot be downloaded, or the folder holds something else.
    """
    if folder.exists():
        try:
            check_set(name, folder)
        except ValueError as error:
            raise UserError("out", f"{folder} exists but cannot be used as {name}: {error}; move it away") from error
        return
    needed = UNPACKED * 1e6 * OFFERED[name][0]
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise UserError("out", f"{free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} GB are needed", folder.parent)
    partial = folder.parent / f".{folder.name}.partial"  # holds an unfinished download
    with locked(folder.parent / f".{folder.name}.lock", f"download of {name}"):
        if folder.exists():  # another process made it meanwhile
            return
        partial.mkdir(exist_ok=True)
        try:
            from_torchvision(name, partial)
        except Exception as error:  # torchvision's RuntimeError, network errors, errors that damaged archives cause
            text = f"{in_one_line(error)}; run the same command again: it keeps the complete archives in {partial}"
            raise UserError("url", text, name) from error
        check_set(name, partial)
        os.replace(partial, folder)
        sync_folder(folder.parent)


def from_torchvision(name: str, partial: Path) -> None:
    """Download and unpack by torchvision's classes, then remove the archives that are not needed any more.

    name: a set of torchvision, or VOC2012, whose scenes are segmented.
    """
    from torchvision import datasets

    from imagesets.schemes.torchvision import SETS

    entry = SETS.get(name)
    if entry:
        dataset, splits = entry.dataset or name, (*entry.train, *entry.val)
    else:
        dataset, splits = "VOCSegmentation", ({"year": "2012", "image_set": "trainval"},)
    remove_unpacked(partial)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    try:
        for split in splits:
            getattr(datasets, dataset)(str(partial), download=True, **split)
    finally:
        socket.setdefaulttimeout(timeout)
    for path in archives_below(partial):
        if not is_official(path):
            raise ValueError(f"{path.name} is not the official file: its MD5 sum differs")
        if not entry or str(path.relative_to(partial)) not in entry.required_paths:
            path.unlink()


def archives_below(folder: Path) -> list[Path]:
    """All archives in a folder and its subfolders."""
    return [path for path in folder.rglob("*") if path.name.endswith(ARCHIVES) and path.is_file()]


def is_official(path: Path) -> bool:
    """Whether an archive has its official MD5 sum, if it is one that torchvision does not verify; True for others."""
    from torchvision.datasets.utils import check_integrity

    return check_integrity(path, MD5.get(path.name))


def remove_unpacked(partial: Path) -> None:
    """Remove what an earlier attempt unpacked, perhaps incompletely, and archives with wrong MD5 sums."""
    archives = {path for path in archives_below(partial) if is_official(path)}
    for path in sorted(partial.rglob("*"), reverse=True):  # a folder comes after its contents
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in archives:
            path.unlink()


def check_set(name: str, folder: Path) -> None:
    """ValueError if a split of the set in `folder` cannot be opened."""
    from downstream.data.scenes import layout_of, open_scenes
    from imagesets.sets import open_set

    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    for named_url in urls_of(name, folder):
        url = shlex.split(named_url)[0].partition("=")[2]
        with tempfile.TemporaryDirectory() as cache:
            for split in splits:
                open_scenes(url, split, Path(cache)) if layout_of(url) else open_set(url, split)
