"""How a method of ours is put into a recorded state, and how close what it then does must come to the recording."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from recordings import ELSEWHERE, absent, facts, tensors, under
from torch import Tensor, nn

from pretrain.loop.updates import EACH_EPS, Updates
from pretrain.method import TrainProgress

# A gradient norm below it that was recorded in float32 is rounding: in exact arithmetic the gradient is zero, as that
# of a key's bias, which adds a constant to all logits of a softmax.
ROUNDING = 1e-6
TOTALS = ("total_before_clip", "total")  # what recordings call the norm of all gradients
EXACT = 1e-12  # for what both sides compute in float64: rates, momenta


def recording(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, floating ones in float64, and the configuration of one file, "mae/mae_step.safetensors" say."""
    return doubled(tensors(path)), facts(path)


def doubled(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}


def fill(network: nn.Module, recorded: Mapping[str, Tensor]) -> None:
    """Load `recorded`, which must be all of the network's tensors and nothing else."""
    network.load_state_dict(dict(recorded), strict=True)


def progress(step: int, config: Mapping[str, Any], steps_per_epoch: int, parts: int = 1) -> TrainProgress:
    """The progress `step` updates after the beginning of the recorded epoch."""
    return TrainProgress(
        step=config.get("epoch", 0) * steps_per_epoch + step,
        steps_per_epoch=steps_per_epoch,
        epochs=config["epochs"],
        micro_batches=parts,
    )


def count(names: Mapping[str, Any], pattern: str) -> int:
    """How many of `pattern` with 0, 1, ... in place of its {} there are."""
    number = 0
    while pattern.format(number) in names:
        number += 1
    return number


def close(ours: Tensor | float, theirs: Tensor | float, limit: float, what: str = "") -> None:
    """Assert a relative L2 difference of at most `limit`, with the figure in the message."""
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (ours, theirs))
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, recorded {tuple(theirs.shape)}"
    difference = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()
    assert difference <= limit, f"{what}: relative difference {difference:.2e} is above {limit:.0e}"


def close_norm(gradient: Tensor, norm: Tensor | float, limit: float, what: str, rounding: float = ROUNDING) -> None:
    """The same of a gradient's norm, unless both are below `rounding`; where the recorded one is 0, so is ours. For
    recordings elsewhere it may be rounding: that of attention among one token, say."""
    ours, what = gradient.norm().item(), f"gradient norm of {what}"
    if norm == 0:
        assert ours <= (EXACT if ELSEWHERE else 0), f"{what}: {ours:.2e}, recorded 0"
    elif norm < rounding:
        assert ours < rounding, f"{what}: {ours:.2e}, recorded {float(norm):.2e}"
    else:
        close(ours, norm, limit, what)


def close_gradients(method: nn.Module, recorded: Mapping[str, Tensor], limit: float) -> None:
    """The gradients of all trained parameters; recorded: of these and no others, by our names."""
    trained = {name: parameter for name, parameter in method.named_parameters() if parameter.requires_grad}
    assert trained.keys() == (recorded or absent("gradients")).keys()
    for name, parameter in trained.items():
        close(parameter.grad, recorded[name], limit, f"gradient of {name}")


def close_norms(
    updates: Updates,
    recorded: Mapping[str, Tensor],
    limit: float,
    step: int,
    named: Callable[[str], str] = str,
    rounding: float = ROUNDING,
) -> None:
    """The norm of all gradients before the last update clipped them, and of each parameter's; recorded: "gradnormN.*".
    named: recorded name -> ours."""
    norms, clip = under(recorded, f"gradnorm{step}."), updates.recipe.clip
    (total,) = (norms.pop(name) for name in TOTALS if name in norms)
    close(updates.norm, total, limit, f"gradient norm {step}")
    scale = max(1.0, (updates.norm + EACH_EPS) / clip) if clip else 1.0
    assert norms
    for name, norm in norms.items():
        gradient = updates.method.get_parameter(named(name)).grad * scale
        close_norm(gradient, norm, limit, f"{name}, step {step}", rounding)


def check_decay(updates: Updates, decayed: Iterable[str], plain: Iterable[str], named: Callable[[str], str]) -> None:
    """Which parameters have weight decay, and which have none; named: recorded name -> ours."""
    ours = {name: group.weight_decay is None for group in updates.groups for name in group.parameters}
    assert ours == dict.fromkeys(map(named, decayed), True) | dict.fromkeys(map(named, plain), False)


def close_states(
    ours: Mapping[str, Tensor], recorded: Mapping[str, Tensor], limit: float, named: Callable[[str], str] = str
) -> None:
    """Weights after updates by Adam. named: recorded name -> ours.

    Of a joint projection's bias the keys' third is left out: its gradient is zero in exact arithmetic, and what Adam
    makes of it is rounding.
    """
    for name, end in recorded.items():
        close(without_keys(ours[named(name)], name), without_keys(end, name), limit, name)


def without_keys(bias: Tensor, name: str) -> Tensor:
    """A joint projection's bias (3 D,) without its keys; other tensors as they are."""
    if not name.endswith("attn.qkv.bias"):
        return bias
    queries, _, values = bias.chunk(3)
    return torch.cat([queries, values])
