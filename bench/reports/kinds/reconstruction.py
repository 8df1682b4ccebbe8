"""Hidden patches as reconstructed by MAE, SimMIM, LUT, MST and CAN, from the folders of their pretrainings.

Exports contain only encoders; decoders are in the states of a training, which stay in its folder when it ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image

from bench.reports.pictures import Block, Panel, Picture, arranged
from bench.reports.visualize import PictureRequest, Viewer, as_image, central_square, image_panel, method_views
from checkpoints.export import is_export
from checkpoints.runs import identity_in, is_run
from engine.errors import UserError
from imagesets.transforms import FILTERS
from pretrain.loop.exporting import epochs_done, progress_after, trained_method
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
        fix = f"name {runs[0]}" if runs else "name the folder of its training, --out of bench pretrain"
        problem = "is an export, which" if is_export(path) else "is no folder of a pretraining; a checkpoint"
        raise UserError("checkpoint", f"this {problem} contains only the encoder: {fix}", reference)

    @cached_property
    def trained(self) -> tuple[Method, int]:
        """The method in evaluation mode, and the number of its updates. ValueError if the folder has no state."""
        method, state = trained_method(self.folder)
        return method.eval().requires_grad_(False), state.facts["step"]

    @property
    def method(self) -> Method:
        return self.trained[0]

    @cached_property
    def name(self) -> str:
        """The name that the user gave, or recipe and epochs: `mae-32px, epoch 5`."""
        if self.checkpoint.given_name:
            return self.checkpoint.given_name
        identity = identity_in(self.folder)
        epoch = epochs_done(progress_after(identity, self.trained[1]))
        return f"{identity.get('name', identity['method'])}, epoch {epoch}"


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """The picture has no settings."""

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images; columns are the masked image and the reconstruction of each checkpoint."""
        runs = [TrainedRun(checkpoint) for checkpoint in request.viewers()]
        blocks = [
            (run.name, [self.block(run, request, number) for number in range(len(request.images))]) for run in runs
        ]
        squares = [image_panel(central_square(image.image)) for image in request.images]
        yield arranged(
            "reconstruction",
            squares,
            blocks,
            note="Hidden patches are grey. The error is the root mean square over the pixels that a network predicts, "
            "of 255 grey levels. If it predicts normalised pixels, a patch is drawn with its true mean and deviation.",
        )

    def block(self, run: TrainedRun, request: PictureRequest, number: int) -> Block:
        """One row for image `number`: the masked image, and its reconstruction."""
        preparation, grid = run.method.preparation, run.method.spec.grid
        pixels = reconstructed(run, request.images[number].image, request.seed, number)
        hidden = pixels.hidden[0].reshape(grid).numpy()
        masked, prediction = (
            as_image(pixels.images[0], preparation, hidden),
            as_image(pixels.prediction[0], preparation),
        )
        error = pixel_error(pixels, run.method)
        return [
            [
                Panel(values=masked, size=masked.shape[:2], title="seen", caption=f"{hidden.mean():.0%} hidden"),
                Panel(values=prediction, size=prediction.shape[:2], title="rebuilt", caption=f"error {error:.1f}"),
            ]
        ]


@torch.no_grad()
def reconstructed(run: TrainedRun, image: Image.Image, *seeds: int) -> ReconstructedPixels:
    """The central square of an image as reconstructed by the method of a run.

    seeds: of the masks. ValueError if the method predicts no pixels.
    """
    method = run.method
    side = method.spec.side
    square = central_square(image).resize((side, side), FILTERS[method.preparation.interpolation])
    views = {name: values[:1] for name, values in method_views(method, square, *seeds).items()}
    pixels = method.reconstruct(Tensors(method.preparation)(square)[None], views)
    if pixels is None:
        raise UserError(
            "checkpoint", f"{run.name} predicts no pixels: MAE, SimMIM, LUT, MST and CAN do", run.checkpoint.reference
        )
    return pixels


def pixel_error(pixels: ReconstructedPixels, method: Method) -> float:
    """Root mean square error over the predicted patches, in grey levels from 0 to 255."""
    std = torch.tensor(method.preparation.std).view(1, 3, 1, 1)
    errors = patchify(255 * std * (pixels.prediction - pixels.images), method.spec.patch_size)
    return float(errors[pixels.predicted].square().mean().sqrt())
