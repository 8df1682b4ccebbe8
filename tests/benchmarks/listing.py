"""Cost of opening an image set: `python tests/benchmarks/listing.py` (a minute and 1.3 million files on two cores).

Empty files in class folders are made below --folder and removed at the end. First: their listing, fingerprint and the
listing's file included. Again: in a new process, from the kept listing. Limited: 2000 images of it and their
fingerprint. Peak: memory of the process, that of Python and the libraries in it (a set of ten images) included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from measuring import peak

from imagesets.sets import open_set

COLUMNS = ("images", "", "open s", "CPU s", "fingerprint s", "limited s", "peak MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10, 50_000, 1_281_000])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the files are made (a temporary folder)")
    parser.add_argument("--open", help="internal: the set that this process opens")
    arguments = parser.parse_args()
    if arguments.open:
        measure(arguments.open)
        return
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    print("{:>10} {:>6} {:>8} {:>8} {:>14} {:>10} {:>9}".format(*COLUMNS))
    for count in arguments.images:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            make(Path(folder) / "set", count, min(arguments.classes, count))
            time.sleep(2.5)  # a listing of folders that have just changed is not kept
            for name in ("first", "again"):
                measured = open_in_process(folder)
                row = "{open:8.2f} {cpu:8.2f} {fingerprint:14.3f} {limited:10.3f} {peak:9.0f}".format(**measured)
                print(f"{measured['count']:10} {name:>6} {row}", flush=True)


def make(root: Path, count: int, classes: int) -> None:
    """Create `count` empty files, spread evenly over the classes."""
    for number in range(classes):
        folder = root / "train" / f"n{number:08d}"
        folder.mkdir(parents=True)
        for image in range(number, count, classes):
            os.close(os.open(f"{folder}/n{number:08d}_{image}.JPEG", os.O_CREAT | os.O_WRONLY))


def open_in_process(folder: str) -> dict[str, float]:
    """Measurements of a process of its own, which keeps its listings in the folder."""
    command = [sys.executable, __file__, "--open", f"{folder}/set"]
    environment = os.environ | {"XDG_CACHE_HOME": folder}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def measure(root: str) -> None:
    times = [time.perf_counter()]
    before = time.process_time()
    image_set = open_set(f"folder:{root}", "train")
    cpu = time.process_time() - before
    times.append(time.perf_counter())
    assert image_set.fingerprint
    times.append(time.perf_counter())
    assert image_set.limited(2000).fingerprint
    times.append(time.perf_counter())
    names = ("open", "fingerprint", "limited")
    spent = dict(zip(names, (later - earlier for earlier, later in pairwise(times)), strict=True))
    print(json.dumps({"count": len(image_set), "cpu": cpu, **spent, "peak": peak() / 2**20}))


if __name__ == "__main__":
    main()
