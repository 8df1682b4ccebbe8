"""An emulated GPU: tensors that report the device cuda:0 and compute on CPU tensors.

Inside `emulated_gpu()` the device "cuda" is available. What CUDA refuses raises an error: operators on tensors of two
devices, `.numpy()`, a CPU generator for random numbers on the GPU. So a test of a training step finds a forgotten
`.to(device)` without a GPU, and its numbers equal those of the CPU.

Not emulated: kernels with their rounding and speed, streams, memory, pinned memory, several processes. Autocast uses
the CPU's casts. Compiled operators of other libraries see CPU tensors.
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
# The device of the tests of this folder: "cuda", "emulated" or "cpu".
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
JOINED = {ATEN.cat.default, ATEN.stack.default}  # need all inputs on one device, scalar tensors too
COPIES = {ATEN.copy_.default, ATEN._to_copy.default}  # between devices
BY_INDEX = {
    ATEN.index.Tensor,
    ATEN.index_put.default,
    ATEN.index_put_.default,
    ATEN._index_put_impl_.default,
    ATEN._unsafe_index.Tensor,
}


def tree_leaves(value: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dictionaries."""
    if type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from tree_leaves(item)
    else:
        yield value


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every leaf changed. Not torch's tree_map, which takes half of the time of an emulated training."""
    if type(value) is dict:
        return {key: tree_map(change, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(tree_map(change, item) for item in value)
    return change(value)


class OnGpu(Tensor):
    """A tensor on the emulated GPU. cpu_values: the CPU tensor that it computes on; views share its memory."""

    cpu_values: Tensor

    @staticmethod
    def __new__(cls, cpu_values: Tensor) -> "OnGpu":
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            cpu_values.shape,
            strides=cpu_values.stride(),
            storage_offset=cpu_values.storage_offset(),
            dtype=cpu_values.dtype,
            device=CPU,
        )
        wrapper.cpu_values = cpu_values.detach()
        return wrapper

    def __init__(self, cpu_values: Tensor) -> None:
        """torch wants everything done in __new__."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def numpy(self, **_: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu_values.tolist()

    def cpu(self, **_: Any) -> Tensor:
        return move(self, CPU)

    def pin_memory(self, *_: Any) -> None:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.cpu_values})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with Emulation.inside_operator(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Move(torch.autograd.Function):
    """Copy to the other device; gradients are copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.cpu_values.clone() if isinstance(tensor, OnGpu) else OnGpu(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Move.apply(gradient)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` if it is on `device`, else a copy there."""
    return tensor if isinstance(tensor, OnGpu) == (device.type == "cuda") else Move.apply(tensor)


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute an operator on the CPU values of its arguments."""
    check_devices(func, args, kwargs)
    wrapper_of = {id(leaf.cpu_values): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnGpu)}
    result = func(*tree_map(to_cpu_values, args), **tree_map(to_cpu_values, kwargs))

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wrapper = wrapper_of.get(id(value))  # in-place operators return an argument
        if wrapper is None:
            return value if func is ATEN.copy_.default else OnGpu(value)
        if wrapper.shape != value.shape or wrapper.stride() != value.stride():  # squeeze_, t_, ...
            wrapper.data = OnGpu(value)
        return wrapper

    return tree_map(wrap, result)


def to_cpu_values(value: Any) -> Any:
    return value.cpu_values if isinstance(value, OnGpu) else value


def check_devices(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError for tensors of two devices, as CUDA does. Scalar tensors may be on the CPU."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if func in COPIES:
        return
    operands = args
    if func in BY_INDEX and isinstance(args[0], OnGpu):
        operands = (args[0], *args[2:])  # CPU indices may index a GPU tensor
    tensors = [leaf for leaf in tree_leaves((operands, kwargs)) if isinstance(leaf, Tensor)]
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
    if on_cpu and (func in JOINED or any(tensor.ndim for tensor in on_cpu)):
        shapes = [tuple(tensor.shape) for tensor in on_cpu]
        raise RuntimeError(f"{func}: expected all tensors on cuda:0, but found some on the CPU, of {shapes}")


class Emulation(TorchDispatchMode):
    """Moves tensors that torch's C++ code creates within an operator on GPU tensors to the emulated GPU."""

    depth = 0  # of nested torch functions on GPU tensors
    explicit = 0  # depth of calls that name the device of the tensor they create

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
    def explicit_device(cls) -> Iterator[None]:
        cls.explicit += 1
        try:
            yield
        finally:
            cls.explicit -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, OnGpu) for leaf in tensors):
            return dispatch(func, args, kwargs)
        result = func(*args, **kwargs)
        created_on_gpu = not tensors and isinstance(result, Tensor) and self.depth and not self.explicit
        return OnGpu(result) if created_on_gpu else result


def with_device(make: Callable) -> Callable:
    """Wrap a tensor factory so that it accepts the emulated GPU."""

    @wraps(make)
    def make_on_device(*args: Any, **kwargs: Any) -> Any:
        like = next((leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)), None)
        device = kwargs.pop("device", None)
        if device is None and like is not None:
            device = like.device
        if device is None:
            with Emulation.explicit_device():
                return make(*args, **kwargs)
        target = torch.device(device)
        if target.type not in ("cpu", "cuda"):
            return make(*args, **kwargs, device=device)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != target.type:
            raise RuntimeError(f"Expected a '{target.type}' device type for generator but found another")
        with Emulation.explicit_device():
            tensor = make(*tree_map(to_cpu_values, args), **kwargs, device=CPU)
        return OnGpu(tensor) if target.type == "cuda" else tensor

    return make_on_device


def to_device(convert: Callable) -> Callable:
    """Wrap Tensor.to so that it accepts the emulated GPU."""

    @wraps(convert)
    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if any(isinstance(argument, OnGpu) for argument in (*args, *kwargs.values())):
            device = GPU
        result = tensor
        if device is not None and device.type in ("cpu", "cuda"):
            result = move(tensor, device)
        elif device is not None:
            result = convert(result, device)
        result = result if dtype is None else convert(result, dtype)
        result = result if memory_format is None else result.contiguous(memory_format=memory_format)
        return result.clone() if copy and result is tensor else result

    return to


class Autocast(torch.autocast):
    """torch.autocast, with the CPU's casts for the GPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """A context in which the device "cuda" is available."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for owner, names in ((torch, FACTORIES + LIKE), (Tensor, NEW)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, with_device(getattr(owner, name))))
        stack.enter_context(mock.patch.object(Tensor, "to", to_device(Tensor.to)))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor, *_, **__: move(tensor, GPU)))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(mock.patch.object(torch, "autocast", Autocast))
        # Inference mode has special rules for wrapper subclasses.
        no_gradients = lambda mode: torch.set_grad_enabled(not mode)  # noqa: E731
        stack.enter_context(mock.patch.object(torch._C, "_InferenceMode", no_gradients))
        for name, value in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        torch.__future__.set_swap_module_params_on_conversion(True)  # parameters remain the same objects
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        stack.enter_context(Emulation())
        yield


# Return values of functions of torch.cuda.
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
