"""What a pretraining method is: a module that turns views into a loss, and says what the one trainer cannot know.

A method file in methods/ defines `METHOD`, a subclass of `Method` that is built as METHOD(spec, settings), and
`RECIPES`, name -> Recipe, "smoke" among them. Everything random about an image is drawn where its views are made:
crops and colours, and the uniform numbers (noise) from which `forward` takes masks and choices. So `forward` is a
function of weights, buffers and views: it draws nothing but drop path, and changes nothing but the running statistics
of batch norms. What moves beside the student's weights (a teacher, a centre, a codebook) moves in the hooks.

Letters: B images of this process in one forward pass, V views, L patches, D width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor, nn
from torch.nn import Parameter

from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

# RGB image -> tensors of one image by name, for torch's default collation; draws from the global generators.
Views = Callable[[Image.Image], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """Where a training stands. step: updates done. micro_batch: forward pass of this update, from 0 to
    micro_batches - 1 (accumulation)."""

    step: int
    steps_per_epoch: int
    epochs: int
    micro_batch: int = 0
    micro_batches: int = 1

    @property
    def steps(self) -> int:
        """Updates of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self.step // self.steps_per_epoch

    @property
    def time(self) -> float:
        """Epochs done, fractional, at the start of this update."""
        return self.step / self.steps_per_epoch

    @property
    def is_first_micro_batch(self) -> bool:
        return self.micro_batch == 0

    @property
    def is_last_micro_batch(self) -> bool:
        return self.micro_batch == self.micro_batches - 1


class Step(NamedTuple):
    """What one forward pass gives.

    loss: scalar to go back from. logs: detached scalars, for the log, which are read when the update's passes are done.
    observed: detached tensors by which `Method.observe` moves the method's own state.
    """

    loss: Tensor
    logs: Mapping[str, Tensor]
    observed: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A network to export. extra: tensors beside it, such as `projector.*` for semi-supervised fine-tuning."""

    vit: ViT
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters by name that are optimised alike. lr, weight_decay: constants of their own; None: the recipe's."""

    parameters: Mapping[str, Parameter]
    lr: float | None = None
    weight_decay: float | None = None


class Method(nn.Module):
    """Base of every method. spec: of the encoder. settings: the method's own frozen dataclass.

    preparation: how evaluation has to prepare images for the exported encoder.
    sync_batch_norm: whether the source turns batch norms into synchronised ones when there are several processes.
    batch_statistics: whether an image's loss depends on the others of its forward pass (batch norms, negatives, a
    codebook), so that accumulation changes the numbers, and processes do where nothing is shared between them.
    needs_labels: whether `forward` gets the images' labels, as views["label"] (B,) int64 from 0 to below the setting
    `classes`; a set of images without labels, or with another number of classes, is then refused.
    repeats: how often an image occurs in an epoch, which then shows fewer images.
    min_batch: images that a forward pass needs, because of the setting `min_batch_setting`, written as a user would.
    remedy: what helps besides another rate where nothing is learned; the end of a sentence.
    """

    preparation = Preparation()
    sync_batch_norm = False
    batch_statistics = False
    needs_labels = False
    repeats = 1
    min_batch = 1
    min_batch_setting = ""
    remedy = ""

    def __init__(self, spec: ViTSpec, settings: Any) -> None:
        super().__init__()
        self.spec, self.settings = spec, settings

    def views(self) -> Views:
        """What makes views and noise of an image; it is sent to loader processes, so it must not hold the network."""
        raise NotImplementedError

    def before_forward(self, progress: TrainProgress) -> None:
        """Before each forward pass. A teacher that follows the student of the update before moves here."""

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        """One forward pass: tensors (B, ...) of `views` -> loss, the mean over the images."""
        raise NotImplementedError

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """After each backward pass, with the `observed` of its forward pass: a centre or a codebook follows the
        data."""

    def trivial(self, views: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        """Name of a log -> what that loss comes to on these views for a prediction that ignores the image.

        Empty where nothing can be said. Called once an epoch, without gradient; it meets no other process.
        """
        return {}

    def groups(self) -> list[Group]:
        """Parameters for the optimiser."""
        return decay_groups(self.named_parameters())

    def before_update(self, progress: TrainProgress) -> None:
        """Gradients are clipped, the optimiser has not moved yet."""

    def after_update(self, progress: TrainProgress) -> None:
        """The optimiser has moved; `progress` is still that of the update."""

    def encoders(self) -> dict[str, Encoder]:
        """Branch (student, teacher, ...) -> network; the first is the one that the source evaluates frozen."""
        raise NotImplementedError


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
