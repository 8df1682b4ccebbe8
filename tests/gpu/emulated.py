"""A GPU on a machine that has none: tensors that say they are on cuda:0, whose values CPU tensors hold.

Inside `emulated_gpu()` everything that asks for the device "cuda" gets such tensors, and code runs on them to its end,
with real numbers. What CUDA refuses is refused: operators on tensors of two devices, `.numpy()`, a CPU generator for
random numbers of the GPU. So a test that runs a training step finds a forgotten `.to(device)` without a GPU, and its
numbers have to be those of the CPU.

What is not like CUDA: kernels, their rounding and speed, streams, memory, pinned memory, several processes. Autocast
casts what a CPU's casts. Compiled operators of other libraries see the CPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Where the tests of this folder run: "cuda", "emulated" or "cpu".
KIND = os.environ.get("BENCH_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "emulated")
ATEN = torch.ops.aten
FACTORIES = (
    "zeros",
    "ones",
    "full",
    "empty",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "logspace",
    "eye",
    "tensor",
    "as_tensor",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "empty_strided",
)
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
JOINED = {ATEN.cat.default, ATEN.stack.default}  # which want all on one device, numbers too
COPIES = {ATEN.copy_.default, ATEN._to_copy.default}  # between devices
BY_INDEX = {
    ATEN.index.Tensor,
    ATEN.index_put.default,
    ATEN.index_put_.default,
    ATEN._index_put_impl_.default,
    ATEN._unsafe_index.Tensor,
}


def tree_leaves(value: Any) -> Iterator[Any]:
    """What stands in lists, tuples and dictionaries, as operators nest their arguments."""
    if type(value) in (list, tuple, dict):
        for each in value.values() if type(value) is dict else value:
            yield from tree_leaves(each)
    else:
        yield value


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nest with every leaf changed. torch's own takes half of the time of an emulated training."""
    if type(value) is dict:
        return {key: tree_map(change, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(tree_map(change, each) for each in value)
    return change(value)


class OnGpu(Tensor):
    """A tensor of the emulated GPU. held: its values, on the CPU; views share them as tensors share memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGpu":
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CPU
        )
        made.held = held.detach()
        return made

    def __init__(self, held: Tensor) -> None:
        """All is done in __new__, as torch asks."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def numpy(self, **_: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self, **_: Any) -> Tensor:
        return moved(self, CPU)

    def pin_memory(self, *_: Any) -> None:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with Emulation.inside_operator(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Moved(torch.autograd.Function):
    """A copy on the other device; gradients come back to this one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.held.clone() if isinstance(tensor, OnGpu) else OnGpu(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Moved.apply(gradient)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` itself where it is there already, else a copy."""
    return tensor if isinstance(tensor, OnGpu) == (device.type == "cuda") else Moved.apply(tensor)


def dispatched(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator on tensors of the emulated GPU, computed on what they hold."""
    check_devices(func, args, kwargs)
    holders = {id(each.held): each for each in tree_leaves((args, kwargs)) if isinstance(each, OnGpu)}
    found = func(*tree_map(held, args), **tree_map(held, kwargs))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = holders.get(id(value))  # operators in place return what they were given
        if known is None:
            return value if func is ATEN.copy_.default else OnGpu(value)
        if known.shape != value.shape or known.stride() != value.stride():  # squeeze_, t_, ...
            known.data = OnGpu(value)
        return known

    return tree_map(wrapped, found)


def held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def check_devices(func: Any, args: tuple, kwargs: dict) -> None:
    """RuntimeError for tensors of two devices, as CUDA raises it; numbers without a dimension may be on the CPU."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if func in COPIES:
        return
    given = args
    if func in BY_INDEX and isinstance(args[0], OnGpu):
        given = (args[0], *args[2:])  # CPU indices may index a tensor of the GPU
    strangers = [x for x in tree_leaves((given, kwargs)) if isinstance(x, Tensor) and not isinstance(x, OnGpu)]
    if strangers and (func in JOINED or any(stranger.ndim for stranger in strangers)):
        shapes = [tuple(stranger.shape) for stranger in strangers]
        raise RuntimeError(f"{func}: expected all tensors on cuda:0, but found some on the CPU, of {shapes}")


class Emulation(TorchDispatchMode):
    """Notices tensors that torch's own C++ code makes for a calculation on the GPU."""

    depth = 0  # of torch functions called on tensors of the GPU
    asked = 0  # of calls that say themselves where their tensor is to be

    @classmethod
    @contextmanager
    def inside_operator(cls) -> Iterator[None]:
        cls.depth += 1
        try:
            yield
        finally:
            cls.depth -= 1

    @classmethod
    @contextmanager
    def as_asked(cls) -> Iterator[None]:
        cls.asked += 1
        try:
            yield
        finally:
            cls.asked -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(isinstance(each, OnGpu) for each in tensors):
            return dispatched(func, args, kwargs)
        found = func(*args, **kwargs)
        own = not tensors and isinstance(found, Tensor) and self.depth and not self.asked
        return OnGpu(found) if own else found


def at_device(make: Callable) -> Callable:
    """A factory of tensors that knows the emulated GPU."""

    @wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        like = next((each for each in tree_leaves(args[:1]) if isinstance(each, Tensor)), None)
        device = kwargs.pop("device", None)
        if device is None and like is not None:
            device = like.device
        if device is None:
            with Emulation.as_asked():
                return make(*args, **kwargs)
        wanted = torch.device(device)
        if wanted.type not in ("cpu", "cuda"):
            return make(*args, **kwargs, device=device)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != wanted.type:
            raise RuntimeError(f"Expected a '{wanted.type}' device type for generator but found another")
        with Emulation.as_asked():
            found = make(*tree_map(held, args), **kwargs, device=CPU)
        return OnGpu(found) if wanted.type == "cuda" else found

    return placed


def to_device(convert: Callable) -> Callable:
    """Tensor.to that knows the emulated GPU."""

    @wraps(convert)
    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if any(isinstance(each, OnGpu) for each in (*args, *kwargs.values())):
            device = GPU
        found = tensor
        if device is not None and device.type in ("cpu", "cuda"):
            found = moved(tensor, device)
        elif device is not None:
            found = convert(found, device)
        found = found if dtype is None else convert(found, dtype)
        found = found if memory_format is None else found.contiguous(memory_format=memory_format)
        return found.clone() if copy and found is tensor else found

    return to


class Autocast(torch.autocast):
    """torch.autocast, the GPU's by the CPU's casts."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """A block in which there is a device "cuda"."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for owner, names in ((torch, FACTORIES + LIKE), (Tensor, NEW)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, at_device(getattr(owner, name))))
        stack.enter_context(mock.patch.object(Tensor, "to", to_device(Tensor.to)))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor, *_, **__: moved(tensor, GPU)))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(mock.patch.object(torch, "autocast", Autocast))
        # Inference mode has rules of its own for tensors that hold others.
        no_gradients = lambda mode: torch.set_grad_enabled(not mode)  # noqa: E731
        stack.enter_context(mock.patch.object(torch._C, "_InferenceMode", no_gradients))
        for name, value in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the objects that they are
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        stack.enter_context(Emulation())
        yield


# What torch.cuda answers.
CUDA = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_current_stream_capturing": False,
    "get_device_name": "emulated GPU",
    "manual_seed": None,
    "set_device": None,
    "synchronize": None,
    "max_memory_allocated": 0,
    "reset_peak_memory_stats": None,
}
