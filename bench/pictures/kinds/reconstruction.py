"""What MAE, SimMIM, LUT, MST and CAN rebuild of patches that they do not see, from the folders of their pretrainings.

Exports hold encoders alone; decoders are in the states of a training, which stay when it ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image

from bench.pictures.arrangement import Block, arranged
from bench.pictures.inputs import as_image, method_views
from bench.pictures.pictures import Panel, Picture
from bench.pictures.runs import ShownRun
from bench.pictures.shown import Shown, middle, required
from imagesets.transforms import FILTERS
from pretrain.method import Method, Rebuilt
from pretrain.parts.masking import patchify
from pretrain.parts.views import Tensors


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """The picture has no settings."""

    def pictures(self, shown: Shown) -> Iterator[Picture]:
        """One picture: rows are images; columns are what each network sees, and what it makes of it."""
        runs = [ShownRun(checkpoint) for checkpoint in required(shown.checkpoints)]
        blocks = [(run.name, [self.block(run, shown, place) for place in range(len(shown.images))]) for run in runs]
        squares = [image.panel(middle(image.image)) for image in shown.images]
        yield arranged(
            "reconstruction",
            squares,
            blocks,
            note="Hidden patches are grey. The error is the root mean square over the pixels that a network is to say, "
            "of 255 grey levels. Where it says normalised ones, a patch is drawn with its true mean and deviation.",
        )

    def block(self, run: ShownRun, shown: Shown, place: int) -> Block:
        """One row: the masked image, and the rebuilt one."""
        preparation, grid = run.method.preparation, run.method.spec.grid
        found = rebuilt_image(run, shown.images[place].image, shown.seed, place)
        hidden = found.hidden[0].reshape(grid).numpy()
        seen, drawn = as_image(found.images[0], preparation, hidden), as_image(found.said[0], preparation)
        error = pixel_error(found, run.method)
        return [
            [
                Panel(values=seen, size=seen.shape[:2], title="seen", caption=f"{hidden.mean():.0%} hidden"),
                Panel(values=drawn, size=drawn.shape[:2], title="rebuilt", caption=f"error {error:.1f}"),
            ]
        ]


@torch.no_grad()
def rebuilt_image(run: ShownRun, image: Image.Image, *seeds: int) -> Rebuilt:
    """The middle of an image as a run's method rebuilds it, with masks drawn by the seeds."""
    method = run.method
    square = middle(image).resize((method.spec.side, method.spec.side), FILTERS[method.preparation.interpolation])
    views = {name: values[:1] for name, values in method_views(method, square, *seeds).items()}
    found = method.rebuilt(Tensors(method.preparation)(square)[None], views)
    if found is None:
        raise ValueError(
            f"--checkpoint {run.checkpoint.reference}: {run.name} rebuilds no pixels: MAE, SimMIM, LUT, MST and CAN do"
        )
    return found


def pixel_error(found: Rebuilt, method: Method) -> float:
    """Root mean square error over the asked patches, in grey levels from 0 to 255."""
    deviation = torch.tensor(method.preparation.std).view(1, 3, 1, 1)
    errors = patchify(255 * deviation * (found.said - found.images), method.spec.patch_size)
    return float(errors[found.asked].square().mean().sqrt())
