"""The base class of pretraining methods: a module that turns views into a loss, with hooks that the trainer calls.

A method file in methods/ defines `METHOD`, a subclass of `Method` that is built as METHOD(spec, settings), and
`RECIPES`, name -> Recipe, including "smoke" and "32px". Everything random about an image is drawn when its views are
made: crops and colours, and the uniform numbers (noise) from which `forward` derives masks and choices. So `forward` is
a function of weights, buffers and views: it draws nothing but drop path and dropout, and changes nothing but the
running statistics of batch norms. State other than the student's weights (a teacher, a centre, a codebook) is updated
in the hooks.

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
from engine.errors import option
from engine.training.schedules import TrainProgress

# RGB image -> tensors of one image by name, for torch's default collation; draws from the global generators.
Views = Callable[[Image.Image], dict[str, Tensor]]


class Step(NamedTuple):
    """The result of one forward pass."""

    loss: Tensor  # scalar, for the backward pass
    logs: Mapping[str, Tensor]  # detached scalars to log, read after all forward passes of the update
    observed: Mapping[str, Tensor] = MappingProxyType({})  # detached tensors for `Method.observe`


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A network to export."""

    vit: ViT
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # such as `projector.*` for semi-supervised fine-tuning


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with the same learning rate and weight decay."""

    parameters: Mapping[str, Parameter]  # by name
    lr: float | None = None  # a constant; None: the recipe's schedule
    weight_decay: float | None = None  # a constant; None: the recipe's schedule
    lr_scale: float = 1.0  # factor on the recipe's schedule
    zero_lr_epochs: int = 0  # first epochs, in which the learning rate is 0 while AdamW's moments accumulate
    clipped: bool = True  # whether the recipe's `clip` applies to their gradients
    clipped_with: str = ""  # groups with the same name are clipped by their common norm


class Method(nn.Module):
    """Base class of every method. spec: the encoder's. settings: the method's own frozen dataclass."""

    preparation = Preparation()  # how evaluation prepares images for the exported encoder
    sync_batch_norm = False  # whether the source synchronises batch norms over all processes
    # Whether an image's loss depends on the other images of its forward pass (batch norms, negatives, a codebook). If
    # so, gradient accumulation changes the numbers, and so do several processes that do not communicate. The run then
    # records its images in a forward pass, and resumes with as many.
    batch_statistics = False
    # Whether `forward` gets the images' labels as views["label"] (B,) int64, in [0, classes) by the setting `classes`.
    # If so, images without labels, or with another number of classes, are refused.
    needs_labels = False
    repeats = 1  # how often an image occurs in an epoch, which then shows fewer different images
    min_batch = 1  # least images that a forward pass needs
    min_batch_setting = ""  # the setting that requires them, as a user writes it
    chunks: Mapping[str, int] = MappingProxyType({})  # setting -> images that it takes together, see check_chunks
    remedy = ""  # advice in addition to another learning rate if nothing is learned; completes a sentence
    fitted_on = 0  # number of images whose views `fit` gets; 0: nothing is fitted

    def __init__(self, spec: ViTSpec, settings: Any) -> None:
        super().__init__()
        self.spec, self.settings = spec, settings

    def views(self) -> Views:
        """A function that makes views and noise from an image.

        It is sent to loader processes, so it must not hold the network.
        """
        raise NotImplementedError(f"method {type(self).__name__} does not define views()")

    def batch(self, images: Sequence[Image.Image], labels: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Views of RGB images as `forward` takes them, name -> (B, ...), drawn from the global generators.

        labels: the images' labels, for a method that needs them. Raises ValueError if it does and they are missing.
        """
        if self.needs_labels and labels is None:
            raise ValueError("the method learns from labels: give method.batch(images, labels)")
        make = self.views()
        views = default_collate([make(image) for image in images])
        views |= {"label": torch.tensor(labels)} if labels is not None else {}
        device = next(self.parameters()).device
        return {name: tensor.to(device) for name, tensor in views.items()}

    def __call__(self, views: Mapping[str, Tensor] | Sequence[Image.Image]) -> Step:
        """`forward` on views, or on RGB images, whose views `batch` draws."""
        return super().__call__(views if isinstance(views, Mapping) else self.batch(views))

    def fit(self, views: Iterable[Mapping[str, Tensor]]) -> None:
        """Fit what stays fixed during training, such as a tokenizer: called once, in rank 0, before the first update.

        views: micro-batches of `fitted_on` images, or of all if the set has fewer. Keep the result in buffers, which
        are sent to the other processes and restored when a training resumes.
        """

    def facts(self) -> dict[str, str]:
        """Facts to store in the exports, in addition to those of run.json."""
        return {}

    def before_forward(self, progress: TrainProgress) -> None:
        """Called before each forward pass: the place to update a teacher from the student of the last update."""

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        """One forward pass: tensors (B, ...) of `views` -> the loss, a mean over the images."""
        raise NotImplementedError(f"method {type(self).__name__} does not define forward()")

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Called after each backward pass with `Step.observed` of its forward pass: updates a centre or a codebook."""

    def baseline_loss(self, views: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        """Name of a logged loss -> its value on these views for the best prediction that ignores the image.

        Empty if there is no such number. Called once an epoch, without gradient, in one process only.
        """
        return {}

    def groups(self) -> list[Group]:
        """Parameter groups for the optimiser."""
        return decay_groups(self.named_parameters())

    def before_update(self, progress: TrainProgress) -> None:
        """Called before the optimiser's step, when gradients are clipped."""

    def after_update(self, progress: TrainProgress) -> None:
        """Called after the optimiser's step; `progress` is still that of this update."""

    def encoders(self) -> dict[str, Encoder]:
        """Branch (student, teacher, ...) -> network; the first is the one that the source evaluates."""
        raise NotImplementedError(f"method {type(self).__name__} does not define encoders()")


def check_chunks(images: int, chunks: Mapping[str, int]) -> None:
    """Raise ValueError if the images of a forward pass are not whole chunks. chunks: setting -> size; 0: any size."""
    if wrong := [f"{setting}={size}" for setting, size in chunks.items() if size and images % size]:
        raise ValueError(
            f"{wrong[0]} does not divide a forward pass of {images} images; change {option('micro_batch')} or it"
        )


def check_encoder(spec: ViTSpec, **needed: Any) -> None:
    """Raise ValueError if the encoder's spec has other values than the needed ones."""
    wrong = {name: value for name, value in needed.items() if getattr(spec, name) != value}
    if wrong:
        listed = ", ".join(f"{name}={value}" for name, value in wrong.items())
        present = ", ".join(f"{name}={getattr(spec, name)}" for name in wrong)
        raise ValueError(f"the encoder needs {listed}; it has {present}")


def decay_groups(
    parameters: Iterable[tuple[str, Parameter]], undecayed: Sequence[str] = (), weight_decay: float | None = None
) -> list[Group]:
    """The trainable parameters in two groups, without and with weight decay.

    Vectors, biases and the parameters named in `undecayed` have none: the rule of timm's add_weight_decay, which MAE,
    LUT, ExtreMA and MOCA use; DINO and SimMIM implement the same.
    """
    decayed: dict[str, Parameter] = {}
    plain: dict[str, Parameter] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            is_plain = parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed
            (plain if is_plain else decayed)[name] = parameter
    groups = [Group(parameters=plain, weight_decay=0.0), Group(parameters=decayed, weight_decay=weight_decay)]
    return [group for group in groups if group.parameters]
