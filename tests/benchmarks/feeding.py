"""Cost of feeding a network with JPEG photos: `python tests/benchmarks/feeding.py --images FOLDER` (a minute).

CPU time of one thread, medians of rounds in which the stages alternate, so that other work on the machine hardly
counts. The last column: cores that keep a GPU of --gpu images/s busy; with fewer it waits.
"""

import argparse
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize_image

from checkpoints.spec import Preparation
from imagesets.decoding import decode_rgb, read_bytes
from imagesets.sets import ImageSet, open_set
from imagesets.transforms import EvalTransform, Photo, decode_fast, image_to_tensor
from pretrain.parts.colours import Colours
from pretrain.parts.views import crop, multi_crop, view
from probes.features.extract import Reader
from probes.linear.train_transform import MultiTransform, TrainTransform

BATCH = 32
WINDOW = (20, 20, 320, 320)  # a crop of about the usual area


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder with JPEG files")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", type=float, default=10_000, help="images/s of the GPU to feed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    paths = sorted(path for path in arguments.images.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train/photo").mkdir(parents=True)
        for path in paths[: arguments.count]:
            shutil.copy(path, Path(folder) / "train/photo")
        measure(open_set(f"folder:{folder}", "train"), arguments.rounds, arguments.gpu)


def measure(images: ImageSet, rounds: int, gpu: float) -> None:
    work = stages(images)
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, stage in work.items():
            started = time.process_time()
            for index in range(len(images)):
                stage(index)
            times[name].append((time.process_time() - started) / len(images))
    size = np.mean([len(images.encoded(index) or b"") for index in range(len(images))])
    print(f"{len(images)} photos of {size / 1e3:.0f} kB")
    print(f"| stage | ms of a core | images/s | cores for {gpu:g}/s |\n|---|---:|---:|---:|")
    seconds = {name: statistics.median(of_stage) for name, of_stage in times.items()}
    seconds[f"handing over, batches of {BATCH}: the taking process"] = handing_over(images)
    for name, value in seconds.items():
        print(f"| {name} | {1e3 * value:.2f} | {1 / value:.0f} | {gpu * value:.1f} |")


def stages(images: ImageSet) -> dict[str, Callable[[int], object]]:
    """Work on the image of an index, by name of the stage."""
    encoded = [images.encoded(index) or b"" for index in range(len(images))]
    decoded = [decode_rgb(data, "") for data in encoded]
    pixels = [decode_fast(data, "").expand(3, -1, -1) for data in encoded]
    small = [image.resize((224, 224)) for image in decoded]
    epoch = dict(interpolation="bilinear", rule="torchvision", seed=0, image_numbers=np.arange(len(images)))
    left, top, right, bottom = WINDOW

    def bare(index: int) -> np.ndarray:
        image = Image.open(io.BytesIO(read_bytes(images.path(index)))).convert("RGB")
        short = 256 / min(image.size)
        image = image.resize((int(image.width * short), int(image.height * short)), Image.Resampling.BICUBIC)
        return np.asarray(image.crop((0, 0, 224, 224)))

    def train(count: int, decode: str, together: bool = False) -> Callable[[int], object]:
        crops = [TrainTransform(size=224, epoch=number, decode=decode, **epoch) for number in range(count)]
        if together:
            crops = [MultiTransform(transforms=crops)]
        return lambda index: [transform(images, index) for transform in crops]

    colours = Colours(blur=0.5)
    large = view([*crop(224, (0.25, 1.0)), colours], Preparation())
    local = view([*crop(96, (0.05, 0.25)), colours], Preparation())
    one = multi_crop([view(crop(224, (0.2, 1.0)), Preparation())])
    two, ten = multi_crop((large,) * 2), multi_crop((large,) * 2, (local,) * 8)
    return {
        "read": lambda index: read_bytes(images.path(index)),
        "decode, libjpeg-turbo by torchvision": lambda index: decode_fast(encoded[index], ""),
        "decode, Pillow": lambda index: decode_rgb(encoded[index], ""),
        "decode at 1/2, Pillow": lambda index: decode_rgb(encoded[index], "", 2),
        "crop and resize, Pillow": lambda index: decoded[index].crop(WINDOW).resize((224, 224), Image.BICUBIC),
        "crop and resize, torchvision": lambda index: resize_image(
            pixels[index][:, top:bottom, left:right], [224, 224], InterpolationMode.BICUBIC, antialias=True
        ),
        "colours and blur of a view": lambda index: view([colours], Preparation())(small[index]),
        "to tensor": lambda index: image_to_tensor(small[index]),
        "evaluation, Pillow bare": bare,
        "evaluation, exact": lambda index: EvalTransform()(images, index),
        "evaluation, fast": lambda index: EvalTransform(decode="fast")(images, index),
        "linear stream, exact": train(1, "exact"),
        "linear stream, fast": train(1, "fast"),
        "three linear streams, exact": train(3, "exact"),
        "three linear streams, fast": train(3, "fast"),
        "linear stream of 3 crops, exact": train(3, "exact", together=True),
        "linear stream of 3 crops, fast": train(3, "fast", together=True),
        **{
            f"pretraining, {name}, {decode}": lambda index, make=make, decode=decode: make(
                Photo(images, index).pil_image(decode)
            )
            for name, make in (
                ("1 plain crop", one),
                ("1 plain crop finished on a GPU", one.unfinished),
                ("2 crops", two),
                ("2 crops finished on a GPU", two.unfinished),
                ("2 + 8 crops", ten),
                ("2 + 8 crops finished on a GPU", ten.unfinished),
            )
            for decode in ("exact", "fast")
        },
    }


def handing_over(images: ImageSet) -> float:
    """Seconds per image that receiving batches costs the process that reads from a loader process."""
    spans = {number: range(min(BATCH, len(images))) for number in range(16)}
    loader = DataLoader(Reader(images, EvalTransform(decode="fast"), spans, False), batch_size=None, num_workers=1)
    started = time.process_time()
    count = sum(len(pixels) for _, pixels, _ in loader)
    return (time.process_time() - started) / count


if __name__ == "__main__":
    main()
