"""Building networks without drawing initial weights that nobody will see: those of a file take their place."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

DRAWS = {Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_}
SCALES = {Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_}  # what makes a truncated normal of them


class skip_init(TorchFunctionMode):
    """`with skip_init():` leaves parameters as torch.empty makes them, and the random generators as they are.

    Constants are still set, and buffers computed. On the device "meta", where there are no values, torch would work out
    the shape of each draw in Python: it takes up to four fifths of the time of building.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in DRAWS:
            return args[0] if args else given["tensor"]
        if func in SCALES and args[0].is_meta:
            return args[0]
        return func(*args, **given)
