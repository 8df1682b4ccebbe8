"""How a checkpoint file is imported: choose a branch, convert it, and account for every tensor on both sides.

An importer (one file in importers/) defines
    SOURCE           the official code whose tensor names it reads
    BRANCHES         branch -> prefixes under which its trunk may lie; the first branch is the default
    DROPPED          pattern of full tensor names -> why they are not part of an export
    recognise(file)  whether a file was written by that code
and, if the trunk has timm's names,
    VIT(branch, tensors) -> ViTSpec, by default `plain_vit`
    EPOCH            what the file's `epoch` is: the number of "finished" epochs, or the index of the "last" one; may be
                     absent
or, for any other trunk,
    convert(branch)  -> Conversion
No tensor of the network may be missing: no source needs exceptions, so none can be declared. An importer whose trunks
do not begin with timm's patch embedding lists the tensors that they begin with in FIRST.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import isqrt
from types import ModuleType
from typing import Any

from torch import Tensor

from checkpoints.dotted import LIGHTNING, UNFOLD, without_wrappers
from checkpoints.export import Misfit, ViTExport, some
from checkpoints.import_options import ImportOptions
from checkpoints.reading import ForeignFile
from checkpoints.recognition import TRUNK, beyond, table_kind
from checkpoints.spec import Preparation, ViTSpec
from engine.extensions import Extension, extension_of

# What training code stores in a checkpoint besides weights; never part of a network.
TRAINING_STATE = {
    r"(optimizer|optim|opt|optimizer_states?)\..*": "optimiser state",
    r"(scaler|scaler_state|fp16_scaler|loss_scaler|amp|lr_scheduler|lr_schedulers)\..*": "training state",
}
PATCHES = ("patch_embed.proj.weight",)
ASSUMED_STATISTICS = "ImageNet's mean and std (--statistics)"
# width -> heads of the published models: ViT-Ti/S/B/L, LUT's M (512), MAE's and I-JEPA's H (1280), I-JEPA's g (1408),
# DINOv2's g (1536), Web-SSL's 2B to 7B (2688 and wider)
HEADS = {
    192: 3,
    384: 6,
    512: 8,
    768: 12,
    1024: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    2688: 21,
    3072: 24,
    3584: 28,
    4096: 32,
}
# width -> the timm name whose other defaults an export builds on; every size is overridden
ARCHITECTURES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of an importer: the network's spec, and its tensors under timm's names."""

    spec: ViTSpec
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    preparation: Preparation | None = None  # None: that of the options
    epochs: int | None = None  # finished epochs; None: unknown
    check: Callable[[ViTExport], None] | None = None  # a final comparison with the source; raises ValueError


@dataclass(kw_only=True)
class BranchTensors:
    """The tensors under one prefix of a file. `take` and `take_trunk` record which were used."""

    file: ForeignFile
    importer: str
    name: str
    prefix: str
    options: ImportOptions
    used: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)  # our name of a tensor that was taken -> its name in the file
    assumed: set[str] = field(default_factory=set)  # facts that neither the file nor the user stated

    @property
    def names(self) -> list[str]:
        return [full[len(self.prefix) :] for full in self.file.tensors if full.startswith(self.prefix)]

    def take(self, pattern: str, replacement: str, biased: bool = True) -> dict[str, Tensor]:
        """All tensors of the branch whose names match `pattern`, renamed by `replacement`.

        If `biased`, every layer must have both a weight and a bias of matching shapes; ValueError otherwise.
        """
        names = [name for name in self.names if re.fullmatch(pattern, name)]
        paired = [name for name in names if name.endswith((".weight", ".bias"))] if biased else []
        for layer in {name.rpartition(".")[0] for name in paired}:
            pair = [self.file.tensors.get(f"{self.prefix}{layer}.{kind}") for kind in ("weight", "bias")]
            if pair[0] is None or pair[1] is None or pair[0].shape[:1] != pair[1].shape[:1]:
                raise ValueError(f"{self.file.path}: weight and bias of {self.prefix}{layer} do not fit each other")
        return self._take((name, re.sub(pattern, replacement, name)) for name in names)

    def take_trunk(self, renames: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """All tensors that, after the `renames` (pattern -> replacement), have a name of timm's trunk."""
        pairs = []
        for name in self.names:
            new = name
            for pattern, replacement in (renames or {}).items():
                new = re.sub(pattern, replacement, new)
            if TRUNK.fullmatch(new):
                pairs.append((name, new))
        return self._take(pairs)

    def _take(self, pairs: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
        taken: dict[str, Tensor] = {}
        for old, new in pairs:
            if new in taken:
                raise ValueError(f"{self.file.path}: two tensors would become {new}, {self.prefix}{old} is one")
            taken[new] = self.file.tensors[self.prefix + old]
            self.used.add(self.prefix + old)
            self.sources[new] = self.prefix + old
        return taken

    def own_name(self, name: str) -> str:
        """The file's name of a tensor; of a missing one the name it should have, as inferred from other blocks."""
        if name in self.sources:
            return self.sources[name]
        _, number, rest = [*name.split(".", 2), "", ""][:3]
        for new, old in self.sources.items():
            other = re.fullmatch(rf"blocks\.(\d+)\.{re.escape(rest)}", new)
            if other and name.startswith("blocks.") and old.count(f".{other[1]}.") == 1:
                return old.replace(f".{other[1]}.", f".{number}.")
        return self.prefix + name if self.prefix + PATCHES[0] in self.file.tensors else name

    def epochs(self, last: bool = False) -> int | None:
        """Number of finished epochs, from the file's `epoch`, which is that number or, if `last`, one less.

        None if the file has no epoch, or was written by Lightning, whose number depends on when it was saved.
        """
        stored = self.file.facts.get("epoch")
        if type(stored) is not int or stored < 0 or LIGHTNING in self.file.facts:
            return None
        return stored + 1 if last else stored

    def heads(self, width: int, table: Mapping[int, int] = HEADS) -> int:
        """Number of attention heads: the requested one, else that of the published model of this width.

        No tensor determines it. Raises ValueError for an unknown width if none was requested.
        """
        heads = self.options.heads or table.get(width)
        if heads is None:
            raise ValueError(
                f"{self.file.path}: no tensor determines the number of heads at width {width}; give it: "
                f"{import_command(self.importer, self.file)} --heads N"
            )
        if not self.options.heads:
            self.assumed.add(f"{heads} heads, as published models of width {width} have (bench import --heads)")
        return heads


def plain_vit(
    branch: BranchTensors, tensors: Mapping[str, Tensor], heads: Mapping[int, int] = HEADS, **facts: Any
) -> ViTSpec:
    """Spec of a plain VisionTransformer: sizes from its `tensors`, conventions from the importer's `facts`.

    In a fine-tuned file (fc_norm instead of norm) the norm is applied after the average over patches.
    """
    sizes = sizes_in(branch, tensors)
    table = _need(branch, tensors, "pos_embed", 3)
    tokens = int(facts.get("class_token", True)) + facts.get("registers", 0)
    prefix = tokens if facts.get("class_position", True) else 0
    rows = table.shape[1] - prefix
    side = square(branch, rows, f"the position table has {table.shape[1]} rows: {prefix} before the patches")
    fine_tuned = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    if fine_tuned:
        facts |= {"final_norm": "pooled", "pool": "avg"}
    if (kind := table_kind(table, rows, fine_tuned)) != facts.get("position", "learned"):
        raise ValueError(
            f"{branch.file.path}: its position table is {kind}, but that of {branch.importer} is "
            f"{facts.get('position', 'learned')}; it is a file of another method"
        )
    return ViTSpec(
        architecture=facts.pop("architecture", ARCHITECTURES.get(sizes["width"], "vit_base_patch16_224")),
        image_size=side * sizes["patch_size"],
        heads=branch.heads(sizes["width"], heads),
        **sizes,
        **facts,
    )


def relative_vit(branch: BranchTensors, tensors: Mapping[str, Tensor], **facts: Any) -> ViTSpec:
    """Spec of the BEiT family: relative position bias, shared or per block; q and v biases; optional layer scale."""
    sizes = sizes_in(branch, tensors)
    shared = "rel_pos_bias.relative_position_bias_table" in tensors
    name = "rel_pos_bias.relative_position_bias_table" if shared else "blocks.0.attn.relative_position_bias_table"
    rows, heads = _need(branch, tensors, name, 2).shape
    if branch.options.heads not in (None, heads):
        raise ValueError(f"{branch.file.path}: {name} is for {heads} heads, not {branch.options.heads}")
    # (2 side - 1)^2 offsets and three rows for the class token
    offsets = square(branch, rows - 3, f"{name} has {rows} rows: 3 for the class token")
    pooled = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    facts = {"position": "learned" if "pos_embed" in tensors else "none"} | facts
    return ViTSpec(
        architecture="beit_base_patch16_224",
        image_size=(offsets + 1) // 2 * sizes["patch_size"],
        heads=heads,
        layer_scale="blocks.0.gamma_1" in tensors,
        class_position="pos_embed" in tensors,
        relative_position="shared" if shared else "per_block",
        position_resize="relative_spline",
        final_norm="pooled" if pooled else "all",
        pool="avg",
        **sizes,
        **facts,
    )


def sizes_in(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes of a plain trunk, read from its tensors."""
    return shown_sizes(branch, tensors) | {"mlp_hidden": _need(branch, tensors, "blocks.0.mlp.fc1.bias", 1).shape[0]}


def shown_sizes(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Those that the tensors of any trunk show."""
    patch = _need(branch, tensors, "patch_embed.proj.weight", 4)
    return {
        "patch_size": patch.shape[-1],
        "width": patch.shape[0],
        "depth": 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")), default=-1),
    }


def _need(branch: BranchTensors, tensors: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{branch.file.path}: no {name} under {branch.prefix!r}; the file is not complete")
    one = name != "pos_embed" or tensors[name].shape[:1] == (1,)
    if tensors[name].ndim != axes or not tensors[name].numel() or not one:
        raise ValueError(f"{branch.file.path}: {name} is {tuple(tensors[name].shape)}, which is no ViT's")
    return tensors[name]


def square(branch: BranchTensors, rows: int, where: str) -> int:
    """Patches a side of a square grid of `rows` patches. ValueError, which begins with `where`, if it is none."""
    side = isqrt(max(rows, 0))
    if side**2 != rows or not side:
        raise ValueError(
            f"{branch.file.path}: {where} and {rows} for patches, which is no square; it is a file of another method"
        )
    return side


def named_vit(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> ViTSpec:
    """The spec that a file itself names, field by field, under `spec`."""
    stored = {name[5:]: value for name, value in branch.file.facts.items() if name.startswith("spec.")}
    try:
        return ViTSpec(**stored)
    except TypeError as error:
        raise ValueError(f"{branch.file.path}: its `spec` is not one of this version ({error})") from error


def import_file(importer: ModuleType, file: ForeignFile, options: ImportOptions) -> ViTExport:
    """Run one importer over a file and prove that nothing was lost. ValueError names what does not add up."""
    extension = extension_of("importers", importer)
    key = extension.key
    if options.architecture and key != "timm":
        raise ValueError(f"{file.path} as {key}: --architecture is for files of timm's models; say timm:{file.path}")
    branch = _branch(key, importer, file, options)
    try:
        conversion = _converted(importer, extension, branch)
        dropped, unknown = _account(importer, branch)
        if unknown:
            raise ValueError(f"tensors that are neither used nor known to be dropped: {some(unknown)}")
        _check_sizes(branch)
        export = ViTExport.make(
            conversion.spec, conversion.preparation or options.preparation, conversion.tensors, conversion.extra
        )
    except ValueError as error:
        table = file.tensors.get(f"{branch.prefix}pos_embed")
        known = options.architecture is not None or (not extension.plugin and importer.recognise(file))
        message = error.message(branch.own_name) if isinstance(error, Misfit) else str(error)
        reason = beyond(branch.names, table, named=known) or message.removeprefix(f"{file.path}: ")
        raise ValueError(f"{file.path} as {key}: {reason}") from error
    facts = {
        "method": key,
        "branch": branch.name,
        "importer": key,
        "importer_version": version("ssl-vit-bench"),
        "official_code": importer.SOURCE,
        "source_file": file.path.name,
        "source_sha256": file.sha256,
        "source_tensors": len(file.tensors),
        "used_tensors": len(branch.used),
        "dropped": dropped,
        "epochs": conversion.epochs,
        "recipe": file.facts.get("recipe"),
        "data": file.facts.get("data"),
        "licence": file.facts.get("licence"),
    }
    if not conversion.preparation and not options.statistics:
        branch.assumed.add(ASSUMED_STATISTICS)
    facts |= {"assumed": sorted(branch.assumed)} if branch.assumed else {}
    facts |= {"plugin": extension.plugin} if extension.plugin else {}
    export = replace(export, facts=facts)
    if conversion.check:
        conversion.check(export)
    size = options.image_size
    return export if size in (None, conversion.spec.image_size) else export.at_size(size)


def _converted(importer: ModuleType, extension: Extension, branch: BranchTensors) -> Conversion:
    """What the importer makes of the branch. ValueError for whatever a plugin fails with, and for tensors of shapes for
    which an importer's arithmetic fails."""
    try:
        return importer.convert(branch) if hasattr(importer, "convert") else _declared(importer, branch)
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        message = f"{type(error).__name__}: " + str(error).partition("\n")[0]
        if extension.plugin:
            raise ValueError(f"{branch.file.path}: {extension.title} fails: {message}") from error
        if not isinstance(error, (RuntimeError, IndexError)):
            raise
        raise ValueError(
            f"its tensors do not fit each other as those of {extension.key} do ({message}); the file is broken or of "
            "another method"
        ) from error


def _declared(importer: ModuleType, branch: BranchTensors) -> Conversion:
    """What an importer's VIT and EPOCH say of a trunk under timm's names."""
    tensors, epoch = branch.take_trunk(), getattr(importer, "EPOCH", None)
    spec = getattr(importer, "VIT", plain_vit)(branch, tensors)
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs(epoch == "last") if epoch else None)


def _branch(key: str, importer: ModuleType, file: ForeignFile, options: ImportOptions) -> BranchTensors:
    name = options.branch or next(iter(importer.BRANCHES))
    if name not in importer.BRANCHES:
        raise ValueError(f"{file.path}: no branch {name!r}; choose one of {', '.join(importer.BRANCHES)}")
    prefixes = [without_wrappers(options.prefix)] if options.prefix else importer.BRANCHES[name]
    for prefix in prefixes:
        if _holds(file, [prefix], getattr(importer, "FIRST", PATCHES)):
            name = options.branch or prefix.rstrip(".") if options.prefix else name
            return BranchTensors(file=file, importer=key, name=name, prefix=prefix, options=options)
    places = ", ".join(map(repr, prefixes))
    branches = [other for other, prefixes in importer.BRANCHES.items() if _holds(file, prefixes)]
    advice = f"it holds the branches: {', '.join(branches)}" if branches and not options.prefix else ""
    advice = advice or beyond(file.tensors) or trunks_elsewhere(key, file) or f"it is not a file of {key}"
    raise ValueError(f"{file.path}: no patch embedding for branch {name!r} under {places}; {advice}")


def trunks_elsewhere(key: str, file: ForeignFile) -> str:
    """Where a file holds ViTs that timm's names show, and how to import one; empty where it shows none."""
    places = [name.removesuffix(PATCHES[0]) for name in file.tensors if name.endswith(f".{PATCHES[0]}")]
    if not places:
        return ""
    named = "a ViT lies" if len(places) == 1 else "ViTs lie"
    command = f"{import_command(key, file)} --prefix {places[0]}"
    return f"{named} under {', '.join(places[:4])}: say which with --prefix, as in {command}"


def import_command(key: str, file: ForeignFile) -> str:
    """How a user imports the file, as typed."""
    return f"bench import {shlex.quote(f'{key}:{file.path}')} --out FOLDER"


def _holds(file: ForeignFile, prefixes: Iterable[str], first: tuple[str, ...] = PATCHES) -> bool:
    return any(prefix + name in file.tensors for prefix in prefixes for name in first)


def _other_branches(importer: ModuleType, branch: BranchTensors) -> dict[str, str]:
    """Patterns of the tensors under the branches that were not asked for."""
    return {
        re.escape(prefix) + ".*": f"branch {name}"
        for name, prefixes in importer.BRANCHES.items()
        for prefix in prefixes
        if name != branch.name and prefix and not branch.prefix.startswith(prefix) and _holds(branch.file, [prefix])
    }


def _account(importer: ModuleType, branch: BranchTensors) -> tuple[dict[str, int], list[str]]:
    """Tensors that were not used: reason -> how many are dropped for it, and the names that no pattern knows."""
    patterns = _other_branches(importer, branch) | importer.DROPPED | TRAINING_STATE
    if branch.options.prefix:
        patterns |= {f"(?!{re.escape(branch.prefix)}).*": f"outside {branch.prefix}"}
    reasons: dict[str, int] = {}
    unknown = []
    for name in branch.file.tensors:
        if name in branch.used:
            continue
        reason = next((why for pattern, why in patterns.items() if re.fullmatch(pattern, name)), None)
        if reason is None:
            unknown.append(name)
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    return reasons, unknown


def leaves_unknown_tensors(importer: ModuleType, file: ForeignFile) -> bool:
    """Whether the file has tensors that the importer neither uses nor drops. False where it cannot convert the file."""
    extension = extension_of("importers", importer)
    options = ImportOptions(heads=1, statistics="imagenet")  # any will do: only the names of tensors count
    try:
        branch = _branch(extension.key, importer, file, options)
        _converted(importer, extension, branch)
    except ValueError:
        return False
    return bool(_account(importer, branch)[1])


def _check_sizes(branch: BranchTensors) -> None:
    """ValueError where the tensors in use hold more values than are stored: views that repeat the same memory."""
    used = [branch.file.tensors[name] for name in branch.used]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in used}
    values, stored = sum(tensor.numel() for tensor in used), sum(storages.values())
    if values > stored:
        raise ValueError(f"its tensors are views that make {values} values of {stored} bytes; {UNFOLD}")
