"""What MAE, SimMIM, LUT, MST and CAN rebuild of patches that they do not see, from the folders of their pretrainings.

Exports hold encoders alone; decoders are in the states of a training, which stay when it ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image

from bench.reporting.panels import Block, Panel, Picture, arranged
from bench.reporting.visualize import PictureRequest, Viewer, as_image, central_square, image_panel, method_views
from checkpoints.export import is_export
from imagesets.transforms import FILTERS
from pretrain.loop.exporting import epochs_done, identity_in, is_run, progress_after, trained_method
from pretrain.method import Method
from pretrain.method import Reconstruction as ReconstructedPixels
from pretrain.parts.masking import patchify
from pretrain.parts.views import Tensors


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """The folder of a pretraining that a checkpoint names."""

    checkpoint: Viewer

    @cached_property
    def folder(self) -> Path:
        """The folder of the checkpoint's pretraining. ValueError for another checkpoint, with what to name instead."""
        reference = self.checkpoint.reference
        path = Path(reference).expanduser()
        if is_run(path):
            return path
        runs = [parent for parent in (path.absolute().parent, path.absolute().parent.parent) if is_run(parent)]
        where = f"name {runs[0]}" if runs else "name the folder of its training, --out of bench pretrain"
        what = "is an export, which" if is_export(path) else "is no folder of a pretraining; a checkpoint"
        raise ValueError(f"--checkpoint {reference}: this {what} holds the encoder alone: {where}")

    @cached_property
    def trained(self) -> tuple[Method, int]:
        """The method in evaluation mode, and the updates that it has done. ValueError where there is no state."""
        method, state = trained_method(self.folder)
        return method.eval().requires_grad_(False), state.facts["step"]

    @property
    def method(self) -> Method:
        return self.trained[0]

    @cached_property
    def name(self) -> str:
        """The given name, else recipe and epochs: `mae-32px, epoch 5`."""
        if self.checkpoint.given_name:
            return self.checkpoint.given_name
        identity = identity_in(self.folder)
        epoch = epochs_done(progress_after(identity, self.trained[1]))
        return f"{identity.get('name', identity['method'])}, epoch {epoch}"


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """The picture has no settings."""

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images; columns are what each network sees, and what it makes of it."""
        runs = [TrainedRun(checkpoint) for checkpoint in request.viewers()]
        blocks = [(run.name, [self.block(run, request, place) for place in range(len(request.images))]) for run in runs]
        squares = [image_panel(central_square(image.image)) for image in request.images]
        yield arranged(
            "reconstruction",
            squares,
            blocks,
            note="Hidden patches are grey. The error is the root mean square over the pixels that a network predicts, "
            "of 255 grey levels. Where it predicts normalised ones, a patch is drawn with its true mean and deviation.",
        )

    def block(self, run: TrainedRun, request: PictureRequest, place: int) -> Block:
        """One row: the masked image, and the rebuilt one."""
        preparation, grid = run.method.preparation, run.method.spec.grid
        rebuilt = rebuilt_image(run, request.images[place].image, request.seed, place)
        hidden = rebuilt.hidden[0].reshape(grid).numpy()
        seen, drawn = as_image(rebuilt.images[0], preparation, hidden), as_image(rebuilt.prediction[0], preparation)
        error = pixel_error(rebuilt, run.method)
        return [
            [
                Panel(values=seen, size=seen.shape[:2], title="seen", caption=f"{hidden.mean():.0%} hidden"),
                Panel(values=drawn, size=drawn.shape[:2], title="rebuilt", caption=f"error {error:.1f}"),
            ]
        ]


@torch.no_grad()
def rebuilt_image(run: TrainedRun, image: Image.Image, *seeds: int) -> ReconstructedPixels:
    """The middle of an image as a run's method rebuilds it, with masks drawn by the seeds."""
    method = run.method
    side = method.spec.side
    square = central_square(image).resize((side, side), FILTERS[method.preparation.interpolation])
    views = {name: values[:1] for name, values in method_views(method, square, *seeds).items()}
    rebuilt = method.reconstruct(Tensors(method.preparation)(square)[None], views)
    if rebuilt is None:
        raise ValueError(
            f"--checkpoint {run.checkpoint.reference}: {run.name} rebuilds no pixels: MAE, SimMIM, LUT, MST and CAN do"
        )
    return rebuilt


def pixel_error(rebuilt: ReconstructedPixels, method: Method) -> float:
    """Root mean square error over the predicted patches, in grey levels from 0 to 255."""
    deviation = torch.tensor(method.preparation.std).view(1, 3, 1, 1)
    errors = patchify(255 * deviation * (rebuilt.prediction - rebuilt.images), method.spec.patch_size)
    return float(errors[rebuilt.predicted].square().mean().sqrt())
