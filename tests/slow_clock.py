"""A clock in which images, layers and steps take seconds, for tests that work is never silent for ten of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import Block
from torch.optim.optimizer import register_optimizer_step_post_hook

from downstream.frozen import capi
from engine import neighbours, printing, progress
from probes.lowshot.fitting import Fitter

# Seconds, each below the two that are left of ten after a HEARTBEAT.
BLOCK_OF_IMAGE, STEP, FIT, EVALUATION, TILE = 0.02, 0.3, 1.5, 0.1, 1.0


class SlowClock:
    """now: the time. lines: times at which something was printed."""

    def __init__(self) -> None:
        self.now, self.lines, self._lock = 0.0, [0.0], threading.Lock()

    def pass_by(self, seconds: float) -> None:
        """Let time pass, after which the thread of the innermost progress looks whether a line is due."""
        with self._lock:
            self.now += seconds
            if progress._open:
                progress._open[-1].advance(0)

    def check(self) -> None:
        """Check that no ten seconds passed without a line, and that the work took long enough to say so."""
        assert self.now > 10, "work that the test does not slow down"
        assert max(after - before for before, after in pairwise([*self.lines, self.now])) <= 10


@contextmanager
def slow_clock(file: float = 0.3, pace: float = 1.0) -> Iterator[SlowClock]:
    """A context in which the clock of progress moves by the seconds of the work that is done, and must be told of.

    file: seconds that an image takes to open. pace: factor of the seconds of blocks and updates.
    """
    clock = SlowClock()

    def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            clock.pass_by(seconds)
            return function(*arguments, **options)

        return run

    def block(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Block):
            clock.pass_by(pace * BLOCK_OF_IMAGE * len(inputs[0]))

    def printed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            clock.lines.append(clock.now)
            return function(*arguments, **options)

        return run

    def minimise(objective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return minimize(slowed(objective, EVALUATION), *arguments, **options)

    minimize = capi.minimize
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(block),
        register_optimizer_step_post_hook(lambda *_: clock.pass_by(pace * STEP)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "clock", lambda: clock.now)
        patch.setattr(progress, "LOOK_EVERY", 3600.0)
        patch.setattr(progress.Progress, "_write", printed(progress.Progress._write))
        patch.setattr(printing, "print_lines", printed(printing.print_lines))
        patch.setattr(Image, "open", slowed(Image.open, file))
        patch.setattr(capi, "minimize", minimise)
        patch.setattr(neighbours, "order_ties", slowed(neighbours.order_ties, TILE))
        patch.setattr(Fitter, "minimise", slowed(Fitter.minimise, FIT))
        try:
            yield clock
            clock.check()
        finally:
            for hook in hooks:
                hook.remove()
