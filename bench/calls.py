"""What the functions of `import bench` share: options, names of checkpoints and images, output that is kept back."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from checkpoints.frozen import FrozenExport, FrozenSpec
    from engine.tasks import Workspace


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how networks run; the defaults are those of the command line."""

    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # Of forward passes. None: float32, but bfloat16 for pretraining on a GPU. float16 is for pretraining alone.
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    compiled: bool = False  # transformer blocks by torch.compile
    decode: Literal["exact", "fast"] = "exact"  # PIL as in the papers, or torchvision on uint8 tensors
    skip_bad: bool = False  # count unreadable images instead of stopping
    batch_size: int | None = None  # images in a forward pass of a process, at most; None: by the device
    workers: int | None = None  # loader workers; None: by the machine


@contextmanager
def commands() -> Iterator[None]:
    """Our packages, where no module of the user's hides one; what commands say to people on standard output is kept
    back."""
    from bench.__main__ import hiding_module

    if path := hiding_module():
        raise ImportError(
            f"{str(path)!r} hides the package {path.stem!r} of bench; rename it, or start Python elsewhere"
        )
    with redirect_stdout(io.StringIO()):
        yield


def workspace(out: Path, options: Options | None, seed: int, limit: int | None) -> "Workspace":
    """Where tasks run whose results are in `out`; the runner names the data."""
    from bench.cli.devices import ready_device
    from engine.tasks import Workspace

    options = options or Options()
    if options.precision == "float16":
        raise ValueError("--precision float16: it is for pretraining; choose float32 or bfloat16")
    return Workspace(
        cache=out / "cache",
        data="",
        device=ready_device(options.device, options.compiled),
        precision=options.precision or "float32",
        compiled=options.compiled,
        decode=options.decode,
        seed=seed,
        limit=limit,
        skip_bad=options.skip_bad,
        batch_size=options.batch_size,
        workers=options.workers,
    )


def reference_to(checkpoint: "FrozenExport | str | Path", out: Path) -> str:
    """What names a checkpoint in a request: an export in memory is kept in `out`/exports, as imports of a run are.

    A network of the user's own is not: its function is asked for it again."""
    if isinstance(checkpoint, str | Path):
        return str(checkpoint)
    from bench.run.checkpoints import checked_name, kept_export, save_once
    from checkpoints.export import ViTExport

    if not isinstance(checkpoint, ViTExport):
        return checkpoint.spec.reference
    folder = kept_export(out, checked_name(str(checkpoint.facts.get("name") or "checkpoint"), "name"), checkpoint)
    if not folder.exists():
        save_once(checkpoint, folder)
    return str(folder)


def source_pool(spec: "FrozenSpec") -> Literal["cls", "avg"]:
    """What the checkpoint's source evaluates; of a network of the user's own the class token, where it has one."""
    from checkpoints.spec import ViTSpec

    if isinstance(spec, ViTSpec):
        return spec.pool
    return "cls" if spec.has_class_token else "avg"


def named_url(data: str) -> str:
    """`NAME=URL`, as it is; a URL alone is named after the last part of its path, or its scheme."""
    from bench.run.checkpoints import SAFE_NAME
    from bench.run.plan import name_from

    name, equals, _ = data.partition("=")
    return data if equals and SAFE_NAME.fullmatch(name) else f"{name_from(data)}={data}"
