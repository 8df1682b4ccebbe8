"""Judging a 1000-class head on a shifted test set, against extracting the same features alone:
`python tests/benchmarks/shifted.py --images DIR` (a folder with any JPEGs; about 3 minutes on two cores).

ViT-S/16 at 224 px with random weights, float32. The set is laid out as ImageNet-V2, a folder for each class.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from extraction import Subject
from measuring import seconds

from engine.tasks import Workspace
from imagesets.transforms import EvalTransform
from probes.features.extract import FeatureSet, extract
from probes.features.kinds import FeatureKind
from probes.shifted import FOLDERS, ShiftedSets, Shifts

CLASSES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder with JPEG files, repeated as needed")
    parser.add_argument("--count", type=int, default=320, help="images of the shifted set")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    subject = Subject(arguments.images, arguments.count, "float32", "exact")
    kinds = [FeatureKind("cls"), FeatureKind("avg")]
    head = torch.randn(subject.export.spec.width, CLASSES, generator=torch.Generator().manual_seed(0))

    def logits(features: FeatureSet) -> torch.Tensor:
        return torch.tensor(features.features) @ head

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, FOLDERS["v2"])
        for number in range(arguments.count):
            file = root / str(number % CLASSES) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(Path(subject.images.path(number)).resolve())
        transform, bare, judged = EvalTransform(), [], []
        for number in range(arguments.rounds):
            space = Workspace(cache=Path(folder, str(number)), data=f"imagenet:{folder}")
            shifted = ShiftedSets(
                shifts=Shifts(corruptions=()),
                export=subject.export,
                kinds=kinds,
                transform=transform,
                space=space,
                classes=[str(name) for name in range(CLASSES)],
                val=subject.images,
                logits=logits,
            )
            bare.append(seconds(lambda space=space: extract(subject.export, subject.images, kinds, space, transform)))
            judged.append(seconds(lambda shifted=shifted: list(shifted.evaluated_sets(folder))))
    rates = [arguments.count / statistics.median(times) for times in (bare, judged)]
    print("extraction {:.1f} images/s, judged {:.1f} images/s, ratio {:.3f}".format(*rates, rates[1] / rates[0]))


if __name__ == "__main__":
    main()
