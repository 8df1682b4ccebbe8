"""One update of a method's weights: forward and backward passes, clipping, the optimiser.

The trainer repeats it; parity tests call it with a recorded batch in place of images.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from engine.distributed import World
from engine.errors import UserError
from engine.optimisers import Lars, layer_of
from engine.precision import autocast, compile_blocks, fit_attention
from engine.seeding import DROP, seeded
from engine.training.schedules import MAX_SHOWN_LOSSES, check_finite
from pretrain.method import Group, Method, TrainProgress
from pretrain.recipe import Recipe

Precision = Literal["float32", "bfloat16", "float16"]
CLIP_EPS = 1e-6  # added to norms in DINO's clipping (utils.py:138) and in torch's clip_grad_norm_


class Updates:
    """A method and its optimiser. Processes share every batch equally.

    Args:
        method: the network to train.
        recipe: its learning rates, optimiser and clipping.
        device: cpu, cuda or cuda:N.
        precision: of matrix products.
        compiled: compile transformer blocks with torch.compile.
        seed: of drop path and dropout.
        world: the processes; None: this one alone.
        frozen_epochs: first epochs, in which the encoder's weights do not change.

    Raises:
        ValueError: frozen_epochs are given for a method that trains only the encoder.
    """

    def __init__(
        self,
        method: Method,
        recipe: Recipe,
        *,
        device: str = "cpu",
        precision: Precision = "float32",
        compiled: bool = False,
        seed: int = 0,
        world: World | None = None,
        frozen_epochs: int = 0,
    ) -> None:
        self.method, self.recipe, self.world = method.to(device), recipe, world or World()
        self.device, self.precision, self.seed = device, precision, seed
        fit_attention(method, device, precision)
        if compiled:
            compile_blocks(method, device)
        self.groups = split_by_layer(method, recipe.layer_decay)
        self.optimizer = _optimizer(self.groups, recipe)
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=precision == "float16")
        self.network: nn.Module = method
        if self.world.size > 1:
            # Buffers (MOCA's codebook, statistics of batch norms) are copied from the first process, as in the sources.
            self.network = DistributedDataParallel(method, broadcast_buffers=True, gradient_as_bucket_view=True)
        self.frozen_epochs = frozen_epochs
        encoders = method.encoders().values()
        self.encoder_parameters = {parameter for encoder in encoders for parameter in encoder.vit.parameters()}
        trained = {parameter for group in self.groups for parameter in group.parameters.values()}
        if frozen_epochs and trained <= self.encoder_parameters:
            raise UserError(
                "freeze_first_epochs",
                "this method trains only the encoder, so nothing would change in these epochs; leave the option out",
                frozen_epochs,
            )
        self.losses: deque[float] = deque(maxlen=MAX_SHOWN_LOSSES)
        self.clip = recipe.clip  # of the current update
        self.norm = math.nan  # of the last gradient, before clipping

    def run(
        self,
        micro_batches: Iterable[Mapping[str, Tensor]],
        progress: TrainProgress,
        requests: Callable[[], Mapping[str, bool]] = dict,
    ) -> dict[str, float]:
        """One update on the micro-batches of this process.

        Args:
            micro_batches: views of each micro-batch, name -> (B, ...).
            progress: of the training.
            requests: called once the gradients are computed; name -> whether this process requests it, such as to stop
                or to save.

        Returns:
            The logs: the loss, a mean over all processes; for each request, the number of processes that made it;
            grad_norm; and the method's own logs in this process.

        Raises:
            ValueError: in every process, before the optimiser changes a weight, if loss or gradient are not finite.
        """
        self.set_rates(progress)
        self.optimizer.zero_grad(set_to_none=True)
        micro_batch_logs = [
            self.backward(views, replace(progress, micro_batch=number)) for number, views in enumerate(micro_batches)
        ]
        logs = _means(micro_batch_logs)
        logs |= self.reduce(logs["loss"], requests())
        self.check("loss", logs["loss"], progress)
        if progress.time < self.frozen_epochs:
            for parameter in self.encoder_parameters:
                parameter.grad = None  # the optimiser skips it, weight decay and moments included
        self.scaler.unscale_(self.optimizer)
        logs["grad_norm"] = self.clip_gradients()
        if not self.scaler.is_enabled():  # a scaler skips this update and lowers its scale instead
            self.check("gradient norm", logs["grad_norm"], progress)
        self.losses.append(logs["loss"])
        self.norm = logs["grad_norm"]
        last_progress = replace(progress, micro_batch=progress.micro_batches - 1)
        self.method.before_update(last_progress)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.method.after_update(last_progress)
        return logs

    def set_rates(self, progress: TrainProgress) -> None:
        """Set the clipping, and learning rate and weight decay of every group, for the update at `progress`."""
        self.clip = self.recipe.clip_at(progress)
        lr, decay = self.rates(progress)
        for optimizer_group, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            optimizer_group["lr"] = lr * group.lr_scale if group.lr is None else group.lr
            if progress.epoch < group.zero_lr_epochs:
                optimizer_group["lr"] = 0.0
            optimizer_group["weight_decay"] = decay if group.weight_decay is None else group.weight_decay

    def rates(self, progress: TrainProgress) -> tuple[float, float]:
        """Learning rate and weight decay at `progress`, of the groups without values of their own."""
        recipe = self.recipe
        return (
            recipe.schedule.at(recipe.peak, progress),
            recipe.weight_decay_schedule.at(recipe.weight_decay, progress),
        )

    def backward(self, views: Mapping[str, Tensor], progress: TrainProgress) -> dict[str, Tensor]:
        """Forward and backward pass of one micro-batch; gradients add up over them. Returns its logs."""
        views = {name: tensor.to(self.device, non_blocking=True) for name, tensor in views.items()}
        self.method.before_forward(progress)
        place = (progress.step, progress.micro_batch, self.world.rank)
        with nullcontext() if progress.is_last_micro_batch or self.world.size == 1 else self.network.no_sync():
            with seeded(DROP, self.seed, *place, device=self.device), autocast(self.device, self.precision):
                loss, logs, observed = self.network(views)
            self.scaler.scale(loss / progress.micro_batches).backward()
        self.method.observe(observed, progress)
        return {"loss": loss.detach(), **logs}

    def reduce(self, loss: float, requests: Mapping[str, bool]) -> dict[str, float]:
        """Mean loss over the processes, and the number of processes with each request."""
        values = torch.tensor([loss / self.world.size, *map(float, requests.values())], dtype=torch.float64)
        self.world.all_reduce(values)
        return dict(zip(["loss", *requests], values.tolist(), strict=True))

    def check(self, what: str, value: float, progress: TrainProgress) -> None:
        """Raise ValueError in every process if `value`, which is the same in all of them, is not finite."""
        if math.isfinite(value):
            return
        rate = self.rates(progress)[0]
        where = (
            f"step {progress.step} of {progress.steps} (epoch {progress.time:.2f}, learning rate {rate:.3g}, "
            f"last gradient norm {self.norm:.3g})"
        )
        advice = "lower lr, or use --precision float32 if the precision was lower"
        self.world.on_all_ranks(lambda: check_finite(value, what, where, self.losses, advice))

    def clip_gradients(self) -> float:
        """Clip the gradients according to recipe and groups. Returns their 2-norm before clipping.

        Groups without gradients, whose weights are all frozen in this epoch, are skipped.
        """
        parts: dict[str, list[Tensor]] = defaultdict(list)  # gradients that are clipped by a common norm
        unclipped: list[Tensor] = []
        for group in self.groups:
            gradients = [p.grad for p in group.parameters.values() if p.grad is not None]
            (parts[group.clipped_with] if group.clipped else unclipped).extend(gradients)
        norms = [self.clip_together(gradients) for gradients in parts.values() if gradients]
        norms += torch._foreach_norm(unclipped) if unclipped else []
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return total.item()

    def clip_together(self, gradients: list[Tensor]) -> Tensor:
        """Clip gradients by their common norm, or each by its own, as the recipe says; returns their common norm."""
        norms = torch._foreach_norm(gradients)
        total = torch.linalg.vector_norm(torch.stack(norms))
        clip = self.clip
        if clip and self.recipe.clip_each:
            torch._foreach_mul_(gradients, [(clip / (norm + CLIP_EPS)).clamp(max=1.0) for norm in norms])
        elif clip:
            torch._foreach_mul_(gradients, (clip / (total + CLIP_EPS)).clamp(max=1.0))
        return total


def split_by_layer(method: Method, decay: float) -> list[Group]:
    """The method's groups, with layer-wise learning rate decay: a factor `decay` for every layer between a parameter
    and the encoder's output.

    Parameters after the encoder keep their rates; a mask token at the encoder's input has the rate of the embeddings.
    """
    if decay == 1.0:
        return method.groups()
    depth, vits = method.spec.depth, [encoder.vit for encoder in method.encoders().values()]
    layers = {parameter: layer_of(name, depth) for vit in vits for name, parameter in vit.trunk.named_parameters()}
    for module in method.modules():
        token = getattr(module, "mask_token", None)
        if token is not None and any(vit in module.modules() for vit in vits):
            layers[token] = 0
    groups = []
    for group in method.groups():
        parts: dict[int, dict[str, Parameter]] = defaultdict(dict)
        for name, parameter in group.parameters.items():
            parts[layers.get(parameter, depth + 1)][name] = parameter
        for layer, parameters in parts.items():
            scale = group.lr_scale * decay ** (depth + 1 - layer)
            groups.append(replace(group, parameters=parameters, lr_scale=scale))
    return groups


def _means(logs: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means of the logs over several micro-batches. Only here does an update wait for the GPU's forward passes."""
    rows = torch.stack([torch.stack([value.detach().double() for value in part.values()]) for part in logs])
    return dict(zip(logs[0], rows.mean(dim=0).tolist(), strict=True))


def _optimizer(groups: list[Group], recipe: Recipe) -> torch.optim.Optimizer:
    parameters = [{"params": list(group.parameters.values())} for group in groups]
    if recipe.optimizer == "lars":
        return Lars(parameters, lr=recipe.peak, momentum=recipe.momentum)
    return torch.optim.AdamW(parameters, lr=recipe.peak, betas=recipe.betas, fused=True)
