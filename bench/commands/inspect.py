"""Print what a checkpoint is and where it comes from, and verify that it computes what was recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.options import CommandOptions, Positional, options_from
from checkpoints.import_options import ImportOptions, check_reference
from engine.printing import table

if TYPE_CHECKING:
    from checkpoints.export import ViTExport

EPILOG = """examples:
  bench inspect dino_deitsmall16_pretrain.pth      its format, sizes, origin and digest
  bench inspect runs/mae                           the encoder of a training, finished or not

exit codes: 0 the network computes what it computed when it was exported; 1 it does not; 2 an error, such as files that
changed since
"""


@dataclass(frozen=True, kw_only=True)
class Options(ImportOptions, CommandOptions):
    """Options of `bench inspect`."""

    # X: export folder, checkpoint file, folder of a pretraining, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE
    checkpoint: Positional[str]


def run(options: Options) -> int:
    """0: the recorded activations are reproduced; 1: they are not, first at the place that is printed."""
    check_reference(options.checkpoint)  # before torch is imported
    from bench.run.checkpoints import load_export
    from engine.printing import say

    _, export = load_export(options.checkpoint, options_from(options, ImportOptions))
    say(options.checkpoint)
    say(*export_lines(export))
    problems = export.verify()
    reproduced = f"yes, {len(export.fingerprint)} recorded activations are reproduced"
    say(f"  {'verified':12} {f'NO, it differs first at {problems[0]}' if problems else reproduced}")
    return int(bool(problems))


def export_lines(export: "ViTExport") -> Iterator[str]:
    """Lines that describe the network, the origin of its weights, and which tensors of the source were used."""
    from bench.results.record import TrainingCost
    from bench.run.checkpoints import epochs_of
    from checkpoints.flops import forward_flops
    from engine.printing import millions

    spec = export.spec
    evaluated = export.evaluated_at(export.evaluation_size).spec
    yield from _rows(
        network=f"{spec.label}: depth {spec.depth}, width {spec.width}, {spec.heads} heads, "
        f"{millions(export.parameters)}",
        image=f"{spec.size_text}, patches of {spec.patch_size} px, {spec.grid[0]} x {spec.grid[1]} of them",
        evaluation=f"images of {evaluated.size_text}, {forward_flops(evaluated) / 1e9:.3g} GFLOP each",
        tokens=_tokens(export),
        positions=_positions(export),
        norm=f"{'RMSNorm' if spec.rms_norm else 'LayerNorm'} eps {spec.norm_eps:g}, final norm on {spec.final_norm}",
        statistics=f"mean {_numbers(export.mean)}, std {_numbers(export.std)}",
        preparation=f"{export.interpolation}, centre crop {export.crop:g} of the resized short side",
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
        digest=export.digest,
    )


def _rows(**rows: str) -> list[str]:
    return table([(f"{name:11}", text) for name, text in rows.items() if text], indent=2)


def _tokens(export: "ViTExport") -> str:
    spec = export.spec
    kinds = ["class token"] if spec.class_token else []
    kinds = [f"the mean of {spec.class_tokens} class tokens"] if spec.class_tokens > 1 else kinds
    registers = spec.registers + 1 - spec.class_tokens
    kinds += [f"{registers} registers"] if registers else []
    kinds += [f"{spec.class_attention} class-attention blocks"] if spec.class_attention else []
    return f"{', '.join([*kinds, 'patches'])}; evaluated by its source with pool {spec.pool!r}"


def _positions(export: "ViTExport") -> str:
    spec = export.spec
    relative = f", relative position bias {spec.relative_position}" if spec.relative_position != "none" else ""
    rotary = f", rotary ({spec.rotary}, base {spec.rotary_base:g})" if spec.rotary != "none" else ""
    rule = f", resized by {spec.position_resize}"
    if spec.table_size:
        rule = f" for {spec.stored.size_text}{rule} to {spec.size_text}"
    return f"{spec.position}{relative}{rotary}{rule}"


def _tensors(export: "ViTExport") -> str:
    dropped = export.facts.get("dropped") or {}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    used, total = export.facts.get("used_tensors"), export.facts.get("source_tensors")
    count = f"{used} of {total} in the source used" if used and total else f"{len(export.tensors) + len(export.extra)}"
    return count + (f"; dropped: {reasons}" if reasons else "; none dropped" if total else "")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
