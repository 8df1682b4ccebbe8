"""`--device`: the device that a text names, checked before anything is loaded."""

import os

import torch

from engine.compiling import check_compiler


def ready_device(text: str, compiled: bool) -> str:
    """`chosen_device`, where a compiler is needed with one. ValueError says what is missing."""
    device = chosen_device(text)
    if compiled:
        check_compiler(device)
    return device


def chosen_device(text: str) -> str:
    """`auto` -> "cuda" or "cpu"; otherwise `text` itself. ValueError for a device that is not here."""
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device {text}: choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {text}: choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {text}: torch sees no GPU here; use --device cpu, or see `bench doctor`")
    if device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--device {text}: each process takes the GPU of its local rank; use --device cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {text}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return text
