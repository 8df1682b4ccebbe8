"""`bench data get` fetches sets from a local server that offers tiny archives in the official layout."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
import urllib.request
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from official_layouts import write
from small_exports import make_export
from torchvision import datasets
from torchvision.datasets import utils

from bench.__main__ import main
from bench.commands import data
from downstream.layouts import voc, vocboxes
from imagesets.schemes.torchvision import SETS


def pack(kind: str, files: dict[str, Path]) -> bytes:
    """An archive. files: name in it -> file or folder."""
    archive = io.BytesIO()
    if kind == ".zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for name, path in files.items():
                for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
                    zipped.write(file, os.path.join(name, file.relative_to(path)) if path.is_dir() else name)
        return archive.getvalue()
    with tarfile.open(fileobj=archive, mode="w" if kind == ".tar" else "w:gz") as tar:
        for name, path in files.items():
            tar.add(path, name)
    return archive.getvalue()


# Set -> archive -> name in it -> path in the layout. A path instead of names: the file itself, gzipped if named .gz.
PACKED: dict[str, dict[str, dict[str, str] | str]] = {
    "CIFAR10": {"cifar-10-python.tar.gz": {"cifar-10-batches-py": "cifar-10-batches-py"}},
    "CIFAR100": {"cifar-100-python.tar.gz": {"cifar-100-python": "cifar-100-python"}},
    "Food101": {"food-101.tar.gz": {"food-101": "food-101"}},
    "OxfordIIITPet": {f"{part}.tar.gz": {part: f"oxford-iiit-pet/{part}"} for part in ("images", "annotations")},
    "Flowers102": {
        "102flowers.tgz": {"jpg": "flowers-102/jpg"},
        "imagelabels.mat": "flowers-102/imagelabels.mat",
        "setid.mat": "flowers-102/setid.mat",
    },
    "DTD": {"dtd-r1.0.1.tar.gz": {"dtd": "dtd/dtd"}},
    "FGVCAircraft": {"fgvc-aircraft-2013b.tar.gz": {"fgvc-aircraft-2013b": "fgvc-aircraft-2013b"}},
    "INaturalist": {"train.tar.gz": {"train": "2021_train"}, "val.tar.gz": {"val": "2021_valid"}},
    "INaturalistMini": {"train_mini.tar.gz": {"train_mini": "2021_train_mini"}, "val.tar.gz": {"val": "2021_valid"}},
    **{
        f"Places365{kind}": {
            "filelist_places365-standard.tar": {
                name: name for name in ("categories_places365.txt", "places365_train_standard.txt", "places365_val.txt")
            },
            f"train_{side}places365standard.tar": {f"data_{side.rstrip('_')}": f"data_{side.rstrip('_')}_standard"},
            f"val_{side.rstrip('_')}.tar": {f"val_{side.rstrip('_')}": f"val_{side.rstrip('_')}"},
        }
        for kind, side in (("", "256_"), ("Large", "large_"))
    },
    "VOC2007": {f"VOC{part}_06-Nov-2007.tar": {"VOCdevkit": "VOCdevkit"} for part in ("trainval", "test")},
    "VOC2012": {"VOCtrainval_11-May-2012.tar": {"VOCdevkit": "VOCdevkit"}},
    "EuroSAT": {"EuroSAT.zip": {"2750": "eurosat/2750"}},
    "GTSRB": {
        "GTSRB-Training_fixed.zip": {"GTSRB/Training": "gtsrb/GTSRB/Training"},
        "GTSRB_Final_Test_Images.zip": {"GTSRB/Final_Test": "gtsrb/GTSRB/Final_Test"},
        "GTSRB_Final_Test_GT.zip": {"GT-final_test.csv": "gtsrb/GT-final_test.csv"},
    },
    "Country211": {"country211.tgz": {"country211": "country211"}},
    "RenderedSST2": {"rendered-sst2.tgz": {"rendered-sst2": "rendered-sst2"}},
    "Imagenette": {"imagenette2.tgz": {"imagenette2": "imagenette2"}},
    "STL10": {"stl10_binary.tar.gz": {"stl10_binary": "stl10_binary"}},
    "SVHN": {name: name for name in ("train_32x32.mat", "test_32x32.mat")},
    "USPS": {name: name for name in ("usps.bz2", "usps.t.bz2")},
    **{
        name: {
            f"{part}-{kind}-ubyte.gz": f"{name}/raw/{part}-{kind}-ubyte"
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        }
        for name in ("MNIST", "FashionMNIST", "KMNIST")
    },
}


def archives_of(name: str, root: Path, patch) -> dict[str, bytes]:
    """The archives of a tiny set, by the names that they have on the official servers."""
    if name == "VOC2012":
        for split in ("train", "val"):
            voc.write_tiny(root / "VOCdevkit/VOC2012", split)
            vocboxes.write_tiny(root / "VOCdevkit/VOC2012", split)
        lists = root / "VOCdevkit/VOC2012/ImageSets/Segmentation"
        (lists / "trainval.txt").write_text("".join((lists / f"{split}.txt").read_text() for split in ("train", "val")))
    else:
        write(name, root, patch)
    if name == "VOC2007":
        for split in ("train", "val"):
            vocboxes.write_tiny(root / "VOCdevkit/VOC2007", split)
    if name == "Caltech101":
        inner = root / "101_ObjectCategories.tar.gz"
        inner.write_bytes(pack(".gz", {inner.name.partition(".")[0]: root / "caltech101/101_ObjectCategories"}))
        return {"caltech-101.zip": pack(".zip", {f"caltech-101/{inner.name}": inner})}
    archives = {}
    for archive, files in PACKED[name].items():
        if isinstance(files, str):
            content = (root / files).read_bytes()
            archives[archive] = gzip.compress(content) if archive.endswith(".gz") else content
        else:
            archives[archive] = pack(Path(archive).suffix, {member: root / path for member, path in files.items()})
    return archives


class Server:
    """A local stand-in for the official servers: serves archives by the last part of their URL.

    requested: names of archives, in order. truncated: those whose next transfer breaks off in the middle.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requested: list[str] = []
        self.truncated: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                if name not in server.files:
                    return self.send_error(404)
                content = server.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if "Method" in self.headers:  # torchvision looks for redirections first
                    return None
                server.requested.append(name)
                if name in server.truncated:
                    server.truncated.remove(name)
                    content = content[: len(content) // 2]
                self.wfile.write(content)

            def log_message(self, *_) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    """A local server in place of all others; its archives pass torchvision's comparison of MD5 sums."""
    local = Server()

    class ToLocal(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, request):
            name = request.selector.rpartition("/")[2]
            request.full_url = f"http://127.0.0.1:{local.http.server_port}/{name}"
            return super().http_open(request)

        https_open = http_open

    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(ToLocal))
    official_check = utils.check_md5

    def check_md5(path, md5) -> bool:
        return Path(path).read_bytes() in local.files.values() or official_check(path, md5)

    monkeypatch.setattr(utils, "check_md5", check_md5)
    yield local
    local.http.shutdown()
    local.http.server_close()


@pytest.fixture
def get(server, tmp_path, monkeypatch, capsys):
    """`code, out, err = get(NAME)`: bench data get NAME into tmp_path/data, from archives of the tiny set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    free_disk(monkeypatch, 10**13)

    def call(name: str) -> tuple[int, str, str]:
        server.files = server.files or archives_of(name, tmp_path / "official", monkeypatch)
        capsys.readouterr()
        return main(["data", "get", name, "--out", str(tmp_path / "data")]), *capsys.readouterr()

    return call


def free_disk(monkeypatch, count: int) -> None:
    """Pretend that this number of bytes is free."""
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: SimpleNamespace(free=count))


def test_every_set_that_torchvision_downloads_is_offered():
    assert set(data.OFFERED) == {"VOC2012"} | {name for name in SETS if not SETS[name].advice}
    assert set(PACKED) | {"Caltech101"} == set(data.OFFERED)


# One packed by each tool, one of several archives, one of bare files, and one that three layouts read.
SAMPLE = ("CIFAR10", "OxfordIIITPet", "Caltech101", "EuroSAT", "USPS", "MNIST", "VOC2012")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.exhaustive) for name in data.OFFERED]
)
def test_a_set_is_downloaded_once_and_opens(name, get, server, tmp_path):
    """Licence and URL of the set are printed before the download, the URL again at the end."""
    code, out, err = get(name)
    assert code == 0, err
    licence_line, url_line, last = out.splitlines()
    _, licence, page = data.OFFERED[name]
    assert f"{licence} ({page})" in licence_line and str(tmp_path / "data" / name) in url_line
    for argument in data.urls_of(name, tmp_path / "data" / name):
        assert argument in url_line and argument in last
        assert main(["data", "check", argument.partition("=")[2]]) in (0, 1)  # 1: tiny sets may repeat an image
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [f".{name}.lock", name]
    assert sorted(set(server.requested)) == sorted(server.files)
    server.requested.clear()
    assert get(name)[0] == 0 and not server.requested, "a set that exists is not fetched again"


def test_the_printed_argument_works_in_bench_run(get, tmp_path, capsys):
    _, out, _ = get("OxfordIIITPet")
    command = out.splitlines()[-1].partition(": bench ")[2].split()
    command += ["--checkpoint", str(make_export(tmp_path / "export", 0)), "--suite", "knn@dino", "--out"]
    assert main([*command, str(tmp_path / "results")]) == 0, capsys.readouterr().err
    assert list((tmp_path / "results").rglob("oxfordiiitpet/knn@dino-seed0.json"))


def test_a_broken_download_resumes_with_the_missing_archive(get, server, tmp_path):
    """After a broken transfer of the second archive, the same command fetches that archive alone."""
    server.truncated = {"annotations.tar.gz"}
    code, _, err = get("OxfordIIITPet")
    assert code == 2 and "run the same command again" in err and not (tmp_path / "data/OxfordIIITPet").exists()
    server.requested.clear()
    assert get("OxfordIIITPet")[0] == 0 and server.requested == ["annotations.tar.gz"]


@pytest.mark.parametrize("name", ["FGVCAircraft", "USPS"])
def test_a_truncated_archive_is_refused_where_torchvision_compares_no_sum(name, get, server, tmp_path):
    server.truncated = {next(iter(PACKED[name]))}
    code, _, err = get(name)
    assert code == 2 and not (tmp_path / "data" / name).exists(), err
    assert get(name)[0] == 0
    server.requested.clear()


def test_another_file_under_the_official_name_is_refused(get, server, tmp_path, monkeypatch):
    server.files = archives_of("FGVCAircraft", tmp_path / "official", monkeypatch)
    monkeypatch.setattr(utils, "check_md5", lambda path, md5: hashlib.md5(Path(path).read_bytes()).hexdigest() == md5)
    code, _, err = get("FGVCAircraft")
    assert code == 2 and "fgvc-aircraft-2013b.tar.gz is not the official file" in err
    assert not (tmp_path / "data/FGVCAircraft").exists()


def test_a_partly_unpacked_set_is_unpacked_again(get, server, tmp_path):
    assert get("Food101")[0] == 0
    complete = sorted(path.relative_to(tmp_path) for path in (tmp_path / "data/Food101").rglob("*"))
    partial = tmp_path / "data/.Food101.partial"
    (tmp_path / "data/Food101").rename(partial)  # as if killed while unpacking a complete archive
    (partial / "food-101.tar.gz").write_bytes(server.files["food-101.tar.gz"])
    next(partial.rglob("*.jpg")).unlink()
    server.requested.clear()
    assert get("Food101")[0] == 0 and not server.requested
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "data/Food101").rglob("*")) == complete


def test_names_that_cannot_be_downloaded_are_refused(get, server, tmp_path, monkeypatch, capsys):
    for name, message in (
        ("Food", "did you mean 'Food101'"),
        ("ImageNet", "docs/data.md"),
        ("SUN397", "Partitions.zip"),
        ("StanfordCars", "official site is gone"),
        ("uoft-cs/cifar10", "--data NAME=hf:USER/NAME"),
    ):
        server.files = {"": b""}
        code, out, err = get(name)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
    assert main(["data", "get", "DTD"]) == 2 and "--out: " in capsys.readouterr().err
    assert main(["data", "get", "ImageNet"]) == 2 and "docs/data.md" in capsys.readouterr().err
    assert main(["data", "check"]) == 2
    free_disk(monkeypatch, 10**6)
    code, _, err = get("Food101")
    assert code == 2 and "0.0 GB are free, and 11.0 GB are needed" in err and not server.requested
    (tmp_path / "data/CIFAR10").mkdir()
    code, _, err = get("CIFAR10")
    assert code == 2 and "exists but cannot be used as CIFAR10" in err and "move it away" in err


def test_without_a_name_all_sets_are_listed(capsys):
    assert main(["data", "get"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(data.OFFERED)


def test_a_silent_server_is_given_up_with_one_line(tmp_path, monkeypatch, capsys):
    class Silent(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            released.wait(30)

        def log_message(self, *_):
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/usps.bz2"
    monkeypatch.setattr(datasets.USPS, "split_list", {key: [url, "usps.bz2", "0" * 32] for key in ("train", "test")})
    monkeypatch.setattr(data, "SILENCE", 0.3)
    try:
        assert main(["data", "get", "USPS", "--out", str(tmp_path)]) == 2
    finally:
        released.set()
        server.shutdown()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "bench: error" in line]
    assert "timed out" in line and "USPS" in line
