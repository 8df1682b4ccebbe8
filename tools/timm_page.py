"""`python -m tools.timm_page` writes docs/timm.md: which ViTs of timm can be imported, and why others cannot."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import timm
import torch
from torch import nn

from checkpoints.importers.timm import VIT_MODULES, spec_of
from checkpoints.spec import ViTSpec
from checkpoints.vit import skip_init
from engine.errors import on_command_line
from engine.files import write_atomic
from engine.printing import say

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/timm.md")
INTRODUCTION = """# timm's Vision Transformers

`bench run --checkpoint timm:ARCHITECTURE.WEIGHTS` accepts every name of the second table with any of its weights. The
test `tests/checkpoints/test_timm_names.py` builds each of them small, draws all its parameters, saves, imports and
exports it. Features of the import, of the export read by plain timm, and timm's own agree to 1e-6 of the largest value.
Classifiers and attention-pooling heads are dropped by name; "pooled" is the representation that timm evaluates without
them. If the patches do not cover an image (378 of 384 pixels), the import crops the remaining pixels.

The tables hold every name of `timm.list_pretrained()` in these files of timm: {family}.
They are {names} names of {architectures} architectures; {imported} names are imported. timm's other transformers are
hierarchical (Swin, MViT, Hiera), built of other blocks (CaiT, XCiT, VOLO, CrossViT), or parts of language models that
take any number of patches (Qwen, Gemma, DeepSeek); `bench import` refuses each with its reason.

`python -m tools.timm_page` writes this page from timm {version}: do not edit it by hand.
"""


def pretrained_names() -> dict[str, list[str]]:
    """Architecture of timm's ViT files that has weights -> the tags of these weights."""
    tags: dict[str, list[str]] = {}
    family = set(timm.list_models(module=VIT_MODULES))
    for name in timm.list_pretrained():
        architecture, _, tag = name.partition(".")
        if architecture in family:
            tags.setdefault(architecture, []).append(tag)
    return tags


def timm_page() -> str:
    """The text of docs/timm.md. Builds every architecture without memory for its weights, which takes a minute."""
    names = pretrained_names()
    outcomes = {architecture: spec_or_reason(architecture) for architecture in names}
    refused = {name: reason for name, reason in outcomes.items() if isinstance(reason, str)}
    imported = {name: spec for name, spec in outcomes.items() if isinstance(spec, ViTSpec)}
    introduction = INTRODUCTION.format(
        family=", ".join(f"`{module}.py`" for module in sorted({_file(name) for name in names})),
        names=sum(map(len, names.values())),
        architectures=len(names),
        imported=sum(len(names[name]) for name in imported),
        version=timm.__version__,
    )
    tables = [
        *_table("Refused", "reason", {n: (names[n], reason) for n, reason in refused.items()}),
        *_table(
            "Imported", "what it is", {name: (names[name], description_of(spec)) for name, spec in imported.items()}
        ),
    ]
    return "\n".join([introduction, *tables])


@lru_cache(maxsize=1)
def model_without_weights(architecture: str) -> nn.Module:
    """timm's model of an architecture, without memory for its weights (on the meta device)."""
    with torch.device("meta"), skip_init():
        return timm.create_model(architecture)


def spec_or_reason(architecture: str) -> ViTSpec | str:
    """The spec of timm's model of an architecture, or the reason why it cannot be imported."""
    try:
        return spec_of(model_without_weights(architecture), architecture)
    except ValueError as error:
        return str(error).removeprefix(architecture).removeprefix(" cannot be imported:").strip()


def description_of(spec: ViTSpec) -> str:
    """One line: size of the network and of images, and the representation that timm evaluates."""
    return f"{spec.label}, {spec.size_text}, {'class token' if spec.pool == 'cls' else 'pooled patches'}"


def _file(architecture: str) -> str:
    return timm.model_entrypoint(architecture).__module__.rpartition(".")[2]


def _table(title: str, column: str, rows: dict[str, tuple[list[str], str]]) -> Iterator[str]:
    yield f"## {title}\n"
    yield from (f"| timm's architecture | weights | {column} |", "|---|---|---|")
    for name, (tags, text) in rows.items():
        yield f"| `{name}` | {', '.join(f'`{tag}`' for tag in tags)} | {text} |"
    yield ""


if __name__ == "__main__":
    write_atomic(ROOT / PAGE, timm_page())
    with on_command_line():
        say(f"written: {PAGE}")
