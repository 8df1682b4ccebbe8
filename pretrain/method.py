"""What a pretraining method is: a module that turns views into a loss, with hooks that the trainer calls.

A method file in methods/ defines `METHOD`, a subclass of `Method` that is built as METHOD(spec, settings), and
`RECIPES`, name -> Recipe, "smoke" among them. Everything random about an image is drawn where its views are made:
crops and colours, and the uniform numbers (noise) from which `forward` takes masks and choices. So `forward` is a
function of weights, buffers and views: it draws nothing but drop path and dropout, and changes nothing but the running
statistics of batch norms. What moves beside the student's weights (a teacher, a centre, a codebook) moves in the hooks.

Letters: B images of this process in one forward pass, V views, L patches, D width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import default_collate

from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.training.schedules import TrainProgress

# RGB image -> tensors of one image by name, for torch's default collation; draws from the global generators.
Views = Callable[[Image.Image], dict[str, Tensor]]


class Step(NamedTuple):
    """What one forward pass returns."""

    loss: Tensor  # scalar, for the backward pass
    logs: Mapping[str, Tensor]  # detached scalars for the log, read after all forward passes of the update
    observed: Mapping[str, Tensor] = MappingProxyType({})  # detached tensors for `Method.observe`


class Reconstruction(NamedTuple):
    """Pixels that a method predicts, for people to look at. Images are normalised, (B, 3, H, W)."""

    images: Tensor  # the targets
    prediction: Tensor  # the images themselves where it predicts nothing
    hidden: Tensor  # (B, L) bool, True where the network does not see a patch
    predicted: Tensor  # (B, L) bool, True where it predicts the pixels of a patch


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A network to export."""

    vit: ViT
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # such as `projector.*` for semi-supervised fine-tuning


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with the same rates."""

    parameters: Mapping[str, Parameter]  # by name
    lr: float | None = None  # a constant; None: the recipe's schedule
    weight_decay: float | None = None  # a constant; None: the recipe's schedule
    lr_scale: float = 1.0  # on the recipe's schedule
    zero_lr_epochs: int = 0  # at the start, in which the rate is 0 while AdamW's moments fill
    clipped: bool = True  # whether the recipe's `clip` counts and scales their gradients
    clipped_with: str = ""  # groups with the same name are clipped by their common norm


class Method(nn.Module):
    """Base of every method. spec: of the encoder. settings: the method's own frozen dataclass."""

    preparation = Preparation()  # how evaluation prepares images for the exported encoder
    sync_batch_norm = False  # whether the source synchronises batch norms over several processes
    # Whether an image's loss depends on the others of its forward pass (batch norms, negatives, a codebook). If so,
    # accumulation changes the numbers, and so do several processes that share nothing.
    batch_statistics = False
    # Whether `forward` gets the images' labels as views["label"] (B,) int64, from 0 to below the setting `classes`. If
    # so, images without labels, or with another number of classes, are refused.
    needs_labels = False
    repeats = 1  # how often an image occurs in an epoch, which then shows fewer images
    min_batch = 1  # images that a forward pass needs
    min_batch_setting = ""  # the setting that needs them, as a user writes it
    remedy = ""  # what helps besides another rate where nothing is learned; the end of a sentence
    fitted_on = 0  # images whose views `fit` gets; 0 where nothing is fitted

    def __init__(self, spec: ViTSpec, settings: Any) -> None:
        super().__init__()
        self.spec, self.settings = spec, settings

    def views(self) -> Views:
        """Makes views and noise from an image. It is sent to loader processes, so it must not hold the network."""
        raise NotImplementedError(f"method {type(self).__name__} does not define views()")

    def batch(self, images: Sequence[Image.Image], labels: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Views of RGB images, drawn from the global generators, as `forward` takes them: name -> (B, ...).

        labels: of the images, for a method that needs them; ValueError where they are missing.
        """
        if self.needs_labels and labels is None:
            raise ValueError("the method learns from labels: give method.batch(images, labels)")
        make = self.views()
        views = default_collate([make(image) for image in images])
        views |= {"label": torch.tensor(labels)} if labels is not None else {}
        device = next(self.parameters()).device
        return {name: tensor.to(device) for name, tensor in views.items()}

    def __call__(self, views: Mapping[str, Tensor] | Sequence[Image.Image]) -> Step:
        """`forward` on views, or on those that `batch` draws of RGB images."""
        return super().__call__(views if isinstance(views, Mapping) else self.batch(views))

    def fit(self, views: Iterable[Mapping[str, Tensor]]) -> None:
        """Before the first update, in the first process: fit what then stays as it is, such as a tokenizer.

        views: micro-batches of `fitted_on` images, fewer where the set has fewer. What is fitted is kept in buffers,
        which the other processes and a resumed training get.
        """

    def facts(self) -> dict[str, str]:
        """Facts for the exports, beside those of run.json."""
        return {}

    def before_forward(self, progress: TrainProgress) -> None:
        """Called before each forward pass. A teacher that follows the last update's student moves here."""

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        """One forward pass: tensors (B, ...) of `views` -> loss, the mean over the images."""
        raise NotImplementedError(f"method {type(self).__name__} does not define forward()")

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Called after each backward pass with the `observed` of its forward pass: moves a centre or a codebook."""

    def baseline_loss(self, views: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        """Name of a log -> that loss on these views for the best prediction that ignores the image.

        Empty where there is no such number. Called once an epoch, without gradient, by one process alone.
        """
        return {}

    def reconstruct(self, images: Tensor, views: Mapping[str, Tensor]) -> Reconstruction | None:
        """Predicted pixels of normalised images (B, 3, H, W), of which the noise in `views` hides patches; None for
        methods that predict no pixels."""
        return None

    def groups(self) -> list[Group]:
        """Parameters for the optimiser."""
        return decay_groups(self.named_parameters())

    def before_update(self, progress: TrainProgress) -> None:
        """Called with clipped gradients, before the optimiser moves."""

    def after_update(self, progress: TrainProgress) -> None:
        """Called when the optimiser has moved; `progress` is still that of the update."""

    def encoders(self) -> dict[str, Encoder]:
        """Branch (student, teacher, ...) -> network; the first is the one that the source evaluates frozen."""
        raise NotImplementedError(f"method {type(self).__name__} does not define encoders()")


def check_encoder(spec: ViTSpec, **needed: Any) -> None:
    """ValueError for an encoder with other values than the needed ones."""
    wrong = {name: value for name, value in needed.items() if getattr(spec, name) != value}
    if wrong:
        listed = ", ".join(f"{name}={value}" for name, value in wrong.items())
        present = ", ".join(f"{name}={getattr(spec, name)}" for name in wrong)
        raise ValueError(f"the encoder needs {listed}; it has {present}")


def decay_groups(
    parameters: Iterable[tuple[str, Parameter]], undecayed: Sequence[str] = (), weight_decay: float | None = None
) -> list[Group]:
    """Two groups of the trainable parameters, decayed and not: vectors, biases and the names `undecayed` are not.

    The rule of timm's add_weight_decay, which MAE, LUT, ExtreMA, MOCA and, by another way, DINO and SimMIM use.
    """
    decayed: dict[str, Parameter] = {}
    plain: dict[str, Parameter] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            is_plain = parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed
            (plain if is_plain else decayed)[name] = parameter
    groups = [Group(parameters=plain, weight_decay=0.0), Group(parameters=decayed, weight_decay=weight_decay)]
    return [group for group in groups if group.parameters]
