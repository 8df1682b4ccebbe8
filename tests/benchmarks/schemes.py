"""Image sets in several forms: `python tests/benchmarks/schemes.py` (minutes on two cores, 3 GB of disk).

Throughput: the same JPEG files, generated or those of --images, as folder:, torchvision:, parquet:, wds: and hf:, read
in turn, --rounds times; the best round counts, and its ratio to folder:'s. "order": encoded bytes in the set's order,
as an evaluation reads them. "random": in random order, as training does. "decoded": RGB images, in random order.

Memory: peak of a process that opens a set of --rows tiny entries and takes its fingerprint, libraries in it ("ten rows"
of the same form) included; first, when its index is made, and again, when it is kept.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from measuring import peak
from PIL import Image

from imagesets.sets import ImageSet, open_set

Row = tuple[str, int, bytes]  # name, label, bytes
CLASSES = tuple(f"{number:05d}_a_b_c_d_e_f_g" for number in range(10))  # named as iNaturalist's
SHARDS = 8  # files of a form
GROUP = 100  # rows of a Parquet row group, as Hugging Face's datasets writes them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of class folders (default: generated images)")
    parser.add_argument("--count", type=int, default=2000, help="number of generated images (2000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where files are made (a temporary folder)")
    parser.add_argument("--open", help="internal: the set that this process opens")
    arguments = parser.parse_args()
    if arguments.open:
        measure(arguments.open)
        return
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "HF_DATASETS_CACHE": f"{folder}/hf-cache", "HF_HUB_OFFLINE": "1"}
        throughput(arguments, Path(folder))
        memory(arguments.rows, Path(folder))


def throughput(arguments: argparse.Namespace, root: Path) -> None:
    rows = list(files_of(arguments.images) if arguments.images else generated_images(arguments.count))
    for name, label, data in rows:
        path = root / "2021_train" / CLASSES[label] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for link in ("folder/train", "2021_valid"):  # torchvision's names of the same folder
        (root / link).parent.mkdir(exist_ok=True)
        (root / link).symlink_to(root / "2021_train")
    urls = {"folder": f"folder:{root}/folder", "torchvision": f"torchvision:INaturalist:{root}"}
    urls |= {name: f"{name}:{write(root / name, rows)}" for name, write in FORMS.items()}
    sets = {name: open_set(url, "train") for name, url in urls.items()}
    assert len({image_set.fingerprint for image_set in sets.values()}) == 1
    ways = {"order": in_order, "random": at_random, "decoded": decoded}
    best = {(name, way): 0.0 for name in sets for way in ways}
    for _ in range(arguments.rounds):
        for way, read in ways.items():
            for name, image_set in sets.items():
                best[name, way] = max(best[name, way], per_second(read, image_set))
    print(
        f"{len(rows)} images of {np.mean([len(data) for *_, data in rows]) / 1024:.0f} KiB; images/s, ratio to folder:"
    )
    print(f"{'':12}" + "".join(f"{way:>10} {'ratio':>6}" for way in ways))
    for name in sets:
        cells = (f"{best[name, way]:10.0f} {best[name, way] / best['folder', way]:6.2f}" for way in ways)
        print(f"{name:12}" + "".join(cells), flush=True)


def per_second(read: Callable[[ImageSet], None], image_set: ImageSet) -> float:
    started = time.perf_counter()
    read(image_set)
    return len(image_set) / (time.perf_counter() - started)


def in_order(image_set: ImageSet) -> None:
    for index in range(len(image_set)):
        image_set.encoded(index)


def at_random(image_set: ImageSet) -> None:
    for index in np.random.RandomState(0).permutation(len(image_set)).tolist():
        image_set.encoded(index)


def decoded(image_set: ImageSet) -> None:
    for index in np.random.RandomState(0).permutation(len(image_set)).tolist():
        image_set.image(index)


def files_of(folder: Path) -> Iterator[Row]:
    for label, class_folder in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())[: len(CLASSES)]):
        yield from ((path.name, label, path.read_bytes()) for path in sorted(class_folder.iterdir()) if path.is_file())


def generated_images(count: int) -> Iterator[Row]:
    """JPEGs of 500 x 375 pixels and about 35 KiB."""
    random = np.random.RandomState(0)
    for number in range(count):
        coarse = Image.fromarray(random.randint(0, 256, (75, 100, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=75)
        yield f"{number:08d}.jpg", number % len(CLASSES), file.getvalue()


def memory(count: int, root: Path) -> None:
    print("{:12} {:>9} {:>6} {:>8} {:>9}".format("", "rows", "", "open s", "peak MiB"))
    for name, write in FORMS.items():
        for rows in (10, count):
            place = write(root / f"{name}-{rows}", tiny(rows))
            for time_of in ("first", "again"):
                command = [sys.executable, __file__, "--open", f"{name}:{place}"]
                measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                print(f"{name:12} {rows:9} {time_of:>6} {measured['open']:8.2f} {measured['peak']:9.0f}", flush=True)


def measure(url: str) -> None:
    started = time.perf_counter()
    image_set = open_set(url, "train")
    assert image_set.fingerprint
    print(json.dumps({"open": time.perf_counter() - started, "peak": peak() / 2**20}))


def tiny(count: int) -> Iterator[Row]:
    return ((f"n{number % 10:08d}_{number}.JPEG", number % 10, b"%16d" % number) for number in range(count))


def shards(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Blocks of a few thousand rows, each with the number of its file."""
    block: list[Row] = []
    for number, row in enumerate(rows):
        block.append(row)
        if len(block) == 10 * GROUP:
            yield number // (10 * GROUP) % SHARDS, block
            block = []
    if block:
        yield 0, block


def as_parquet(root: Path, rows: Iterable[Row]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root.mkdir()
    names = {"info": {"features": {"label": {"_type": "ClassLabel", "names": list(CLASSES)}}}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.int64())], {b"huggingface": json.dumps(names).encode()})
    writers = [pq.ParquetWriter(root / f"train-{number:05d}.parquet", schema) for number in range(SHARDS)]
    for shard, block in shards(rows):
        images = [{"bytes": data, "path": name} for name, _, data in block]
        table = pa.table({"image": pa.array(images, image), "label": [label for _, label, _ in block]}, schema)
        writers[shard].write_table(table, row_group_size=GROUP)
    for writer in writers:
        writer.close()
    return root


def as_shards(root: Path, rows: Iterable[Row]) -> Path:
    root.mkdir()
    (root / "classes.txt").write_text("\n".join(CLASSES))
    with ExitStack() as opened:
        names = (root / f"train-{number:05d}.tar" for number in range(SHARDS))
        archives = [opened.enter_context(tarfile.open(name, "w")) for name in names]
        for shard, block in shards(rows):
            for name, label, data in block:
                for part, content in ((f"{Path(name).stem}.cls", str(label).encode()), (name, data)):
                    entry = tarfile.TarInfo(part)
                    entry.size = len(content)
                    archives[shard].addfile(entry, io.BytesIO(content))
            archives[shard].members = []  # tarfile would keep an object for every file
    return root


def as_arrow(root: Path, rows: Iterable[Row]) -> Path:
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    listed = list(rows)
    images = [{"bytes": data, "path": name} for name, _, data in listed]
    dataset = datasets.Dataset.from_dict(
        {"image": images, "label": [label for _, label, _ in listed]}, features=features
    )
    datasets.DatasetDict({"train": dataset}).save_to_disk(root)
    return root


FORMS: dict[str, Callable[[Path, Iterable[Row]], Path]] = {"parquet": as_parquet, "wds": as_shards, "hf": as_arrow}


if __name__ == "__main__":
    main()
