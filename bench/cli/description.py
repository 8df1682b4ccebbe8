"""What `bench import` and `bench inspect` say about an export."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.cli.messages import millions
from checkpoints.export import ViTExport
from checkpoints.training_cost import TrainingCost


def export_lines(export: ViTExport) -> Iterator[str]:
    """Lines: the network, where its weights come from, and what of the source was used."""
    spec, preparation = export.spec, export.preparation
    yield from _rows(
        network=f"{spec.label}: depth {spec.depth}, width {spec.width}, {spec.heads} heads, "
        f"{millions(export.parameters)}",
        image=f"{spec.size_text}, patches of {spec.patch_size} px, {spec.grid[0]} x {spec.grid[1]} of them",
        tokens=_tokens(export),
        positions=_positions(export),
        norm=f"LayerNorm eps {spec.norm_eps:g}, final norm on {spec.final_norm}",
        statistics=f"mean {_numbers(preparation.mean)}, std {_numbers(preparation.std)}",
        preparation=f"{preparation.interpolation}, centre crop {preparation.crop:g}",
        assumed="; ".join(export.facts.get("assumed") or ()),
    )
    facts = export.facts
    source = [str(facts[key]) for key in ("source_file", "source") if facts.get(key)]
    yield from _rows(
        method=", ".join(str(facts[key]) for key in ("method", "recipe") if facts.get(key)),
        branch=str(facts.get("branch") or ""),
        source=" ".join(source[:1]) + (f", sha256 {facts['source_sha256'][:12]}" if facts.get("source_sha256") else ""),
        importer=" ".join(str(facts[key]) for key in ("importer", "importer_version") if facts.get(key)),
        plugin=str(facts.get("plugin") or ""),
        data=str(facts.get("data") or ""),
        tokenizer=str(facts.get("tokenizer") or ""),
        epochs=epochs_of(facts),
        cost=TrainingCost.of(facts).text,
        warnings="; ".join(facts.get("warnings") or ()),
        licence=str(facts.get("licence") or "unknown"),
        tensors=_tensors(export),
        fingerprint=f"{len(export.fingerprint)} activations recorded",
        digest=export.digest,
    )


def epochs_of(facts: Mapping[str, Any]) -> str:
    """`5.0`, or how far a training was; empty where nothing is known."""
    if unfinished := facts.get("unfinished"):
        done, of = f"{round(facts['epochs'], 2):.6g}", unfinished["epochs"]
        return f"{done} of {of}, not finished (update {unfinished['step']} of {unfinished['steps']})"
    return str(facts.get("epochs") or "")


def _rows(**rows: str) -> Iterator[str]:
    for name, text in rows.items():
        if text:
            yield f"  {name:12} {text}"


def _tokens(export: ViTExport) -> str:
    spec = export.spec
    found = ["class token"] if spec.class_token else []
    found += [f"{spec.registers} registers"] if spec.registers else []
    found += [f"{spec.class_attention} class-attention blocks"] if spec.class_attention else []
    return f"{', '.join([*found, 'patches'])}; evaluated by its source with pool {spec.pool!r}"


def _positions(export: ViTExport) -> str:
    spec = export.spec
    relative = f", relative position bias {spec.relative_position}" if spec.relative_position != "none" else ""
    rotary = f", rotary ({spec.rotary}, base {spec.rotary_base:g})" if spec.rotary != "none" else ""
    return f"{spec.position}{relative}{rotary}, resized by {spec.position_resize}"


def _tensors(export: ViTExport) -> str:
    dropped = export.facts.get("dropped") or {}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    used, total = export.facts.get("used_tensors"), export.facts.get("source_tensors")
    count = f"{used} of {total} in the source used" if used and total else f"{len(export.tensors) + len(export.extra)}"
    return count + (f"; dropped: {reasons}" if reasons else "; none dropped" if total else "")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
