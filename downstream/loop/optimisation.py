"""Learning rates of dense training as its sources compute them: by layer (groups) and by step (rates).

The sources run mmcv 1, whose warm-up multiplies the rate that already falls; mmengine's LinearLR followed by PolyLR is
another schedule, off by up to 9 % in the first hundred of 800 steps. Written here after mmcv 1.7 runner/hooks/
lr_updater.py and rstrudel/segmenter segm/optim/scheduler.py; both recorded in tests/golden/lr_sched.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from engine.layer_decay import is_decayed, layer_of

TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rate of every optimiser step, as a function of the rate that a group starts from.

    steps: of the whole training. poly: (1 - step / steps)^power down to `floor`. step: a tenth from each of
    `milestones` (steps) on. warmup: steps over which the rate rises from `start` times what it would be.
    """

    steps: int
    family: Literal["poly", "step"] = "poly"
    power: float = 1.0
    floor: float = 0.0
    milestones: tuple[int, ...] = ()
    warmup: int = 0
    start: float = 1e-6

    def at(self, step: int, rate: float) -> float:
        """Rate of step 0..steps-1 for a group whose rate is `rate`."""
        if self.family == "poly":
            full = (rate - self.floor) * (1 - step / self.steps) ** self.power + self.floor
        else:
            full = rate * 0.1 ** sum(step >= milestone for milestone in self.milestones)
        if step >= self.warmup:
            return full
        return full * (1 - (1 - step / self.warmup) * (1 - self.start))


def optimizer_groups(
    model: nn.Module, depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Parameters that train -> optimiser groups with keys params, names, lr and weight_decay.

    Of L blocks the rate is decay^(L + 1 - layer), necks and heads are layer L + 1. decay_tokens: the mm codebases
    exempt pos_embed and cls_token by their bare names, which never match behind "backbone.", so that they do decay
    them (iBOT, BEiT and CAE segmentation; mmseg: layer_decay_optimizer_constructor.py).
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.removeprefix(TRUNK) if name.startswith(TRUNK) else f"head.{name}"
        layer, decayed = layer_of(own, depth), is_decayed(own, parameter, decay_tokens)
        fresh = {
            "params": [],
            "names": [],
            "lr": rate * decay ** (depth + 1 - layer),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        group = groups.setdefault((layer, decayed), fresh)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
