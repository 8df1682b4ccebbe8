"""Import a checkpoint file: choose a branch, convert it, and account for every tensor of the file and of the network.

An importer (one file in importers/) defines
    SOURCE           the official code whose tensor names it reads
    BRANCHES         branch -> prefixes that its trunk may have in a file; the first branch is the default
    DROPPED          pattern of full tensor names -> why these are not part of an export
    recognise(file)  whether a file was written by that code
and, if the trunk has timm's names,
    VIT(branch, tensors) -> ViTSpec, by default `plain_vit`
    EPOCH            meaning of the file's `epoch`: the number of "finished" epochs, or the index of the "last" one;
                     optional
or, for any other trunk,
    convert(branch)  -> Conversion
and, optionally,
    check(file)      raises ValueError for a file of that code that is not read
No tensor of the network may be missing; an importer cannot declare exceptions, because no source needs them. If trunks
do not have timm's patch embedding, FIRST lists the tensors that identify them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch import Tensor

from checkpoints.dotted import LIGHTNING, UNFOLD, without_wrappers
from checkpoints.export import EVALUATION_CROP, EVALUATION_SIZE, Misfit, ViTExport, short_text
from checkpoints.import_options import ImportOptions
from checkpoints.reading import ForeignFile
from checkpoints.recognition import TRUNK, table_kind, unsupported_reason
from checkpoints.sniffing import DOWNLOAD_AGAIN
from checkpoints.spec import MAX_GRID, Preparation, ViTSpec
from engine.errors import command_line, option, spelled
from engine.extensions import Extension, extension_of

# Pattern of full tensor names -> what training code stores under them; never part of a network.
TRAINING_STATE = {
    r"(optimizer|optim|opt|optimizer_states?)\..*": "optimiser state",
    r"(scaler|scaler_state|fp16_scaler|loss_scaler|amp|lr_scheduler|lr_schedulers)\..*": "training state",
}
PATCH_EMBEDDING = ("patch_embed.proj.weight",)  # default of an importer's FIRST
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
Fits = Callable[[int, int, int], bool]  # of rows before the patches, and rows and columns of patches
IMAGE_SIZE = re.compile(r"(.*\.)?(image_size|img_size|input_size)")  # names of settings for the size of images
HEAD_COUNT = re.compile(r"(.*\.)?(num_heads|n_heads|nhead|heads|num_attention_heads)")  # of settings
# Of features from those of the library's own model, as a share of the largest value; both in float32.
MAX_DIFFERENCE = 1e-5
# width -> timm name of a plain ViT; fields of the spec override all its sizes
ARCHITECTURES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Result of an importer."""

    spec: ViTSpec
    tensors: Mapping[str, Tensor]  # of the trunk, under timm's names
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # of class-attention blocks and projectors
    preparation: Preparation | None = None  # None: that of the options
    epochs: int | None = None  # finished epochs; None: unknown
    check: Callable[[ViTExport], None] | None = None  # final comparison with the source; raises ValueError
    # Height and width of the images of the published evaluation, and its centre crop; None: by `card_size`.
    evaluation_size: int | tuple[int, int] | None = None
    evaluation_crop: float | None = None


@dataclass(kw_only=True)
class BranchTensors:
    """The tensors of a file whose names begin with one prefix. `take` and `take_trunk` record which were used."""

    file: ForeignFile
    importer: str  # key
    name: str  # of the branch
    prefix: str
    options: ImportOptions
    used: set[str] = field(default_factory=set)  # names in the file
    sources: dict[str, str] = field(default_factory=dict)  # new name of a used tensor -> its name in the file
    assumed: set[str] = field(default_factory=set)  # facts that neither the file nor the user stated

    @property
    def names(self) -> list[str]:
        """Names of the branch's tensors, without the prefix."""
        return [name[len(self.prefix) :] for name in self.file.tensors if name.startswith(self.prefix)]

    def take(self, pattern: str, replacement: str, biased: bool = True) -> dict[str, Tensor]:
        """All tensors of the branch whose names match `pattern`, renamed by `replacement`.

        Raises ValueError if two get the same name or, if `biased`, a layer lacks its weight or its bias or these have
        different lengths.
        """
        names = [name for name in self.names if re.fullmatch(pattern, name)]
        layer_names = [name for name in names if name.endswith((".weight", ".bias"))] if biased else []
        for layer in {name.rpartition(".")[0] for name in layer_names}:
            weight, bias = (self.file.tensors.get(f"{self.prefix}{layer}.{part}") for part in ("weight", "bias"))
            if weight is None or bias is None or weight.shape[:1] != bias.shape[:1]:
                raise ValueError(f"{self.file.path}: weight and bias of {self.prefix}{layer} do not fit each other")
        return self._take((name, re.sub(pattern, replacement, name)) for name in names)

    def take_trunk(self, renames: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """All tensors of the branch that have a name in timm's trunk after the `renames` (pattern -> replacement).

        Raises ValueError if two get the same name.
        """
        pairs = []
        for name in self.names:
            new_name = name
            for pattern, replacement in (renames or {}).items():
                new_name = re.sub(pattern, replacement, new_name)
            if TRUNK.fullmatch(new_name):
                pairs.append((name, new_name))
        return self._take(pairs)

    def _take(self, pairs: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
        """Tensors under new names, from pairs (name in the branch, new name); records them as used."""
        tensors: dict[str, Tensor] = {}
        for name, new_name in pairs:
            if new_name in tensors:
                raise ValueError(f"{self.file.path}: two tensors would become {new_name}, {self.prefix}{name} is one")
            tensors[new_name] = self.file.tensors[self.prefix + name]
            self.used.add(self.prefix + name)
            self.sources[new_name] = self.prefix + name
        return tensors

    def name_in_file(self, name: str) -> str:
        """The name in the file of our tensor `name`; that of a missing tensor is inferred from other blocks."""
        if name in self.sources:
            return self.sources[name]
        _, block, rest = [*name.split(".", 2), "", ""][:3]
        for new_name, source in self.sources.items():
            match = re.fullmatch(rf"blocks\.(\d+)\.{re.escape(rest)}", new_name)
            if match and name.startswith("blocks.") and source.count(f".{match[1]}.") == 1:
                return source.replace(f".{match[1]}.", f".{block}.")
        return self.prefix + name if self.prefix + PATCH_EMBEDDING[0] in self.file.tensors else name

    def epochs(self, last: bool = False) -> int | None:
        """Number of finished epochs, from the file's `epoch`.

        last: `epoch` is the index of the last epoch, one less than that number. None if the file has no epoch, or was
        written by Lightning, whose number depends on when it was saved.
        """
        epoch = self.file.facts.get("epoch")
        if type(epoch) is not int or epoch < 0 or LIGHTNING in self.file.facts:
            return None
        return epoch + 1 if last else epoch

    def heads(self, width: int, table: Mapping[int, int] = HEADS) -> int:
        """Number of attention heads: that of the options, else that of published models of this width, in `table`.

        Tensors do not show it. Raises ValueError for an unknown width without an option, and as `check_heads`.
        """
        heads = self.options.heads or table.get(width)
        if heads is None:
            raise ValueError(
                f"{self.file.path}: no tensor determines the number of heads at width {width}; give it: "
                f"{import_command(self.importer, self.file, 'heads', 'N')}"
            )
        if not self.options.heads:
            self.check_heads(heads, f"published models of width {width} have")
            self.assumed.add(f"{heads} heads, as published models of width {width} have (bench import --heads)")
        return heads

    def check_heads(self, heads: int, source: str) -> None:
        """Raise ValueError if the settings of the training in the file tell only other numbers of heads.

        source: who has `heads`, as in "published models have".
        """
        facts = self.file.facts.items()
        stated = {name: value for name, value in facts if HEAD_COUNT.fullmatch(name) and type(value) is int}
        if stated and heads not in stated.values():
            texts = [f"{name}={value}" for name, value in stated.items()]
            raise ValueError(
                f"{self.file.path}: its settings have {short_text(texts)}, but {source} {heads}; give the number of "
                f"heads: {import_command(self.importer, self.file, 'heads', 'N')}"
            )


def plain_vit(
    branch: BranchTensors, tensors: Mapping[str, Tensor], heads: Mapping[int, int] = HEADS, **facts: Any
) -> ViTSpec:
    """Spec of a plain VisionTransformer.

    In a fine-tuned file (fc_norm instead of norm) the norm is applied after the average over patches.

    Args:
        branch: The branch that is imported.
        tensors: Its trunk under timm's names, which shows the sizes.
        heads: width -> number of heads of the source's models.
        facts: Fields of the spec that the tensors do not show. class_position=None: as the number of rows shows.

    Raises:
        ValueError: Tensors are missing or of other shapes, or the position table is of another kind than `facts` say,
            or could be read in two ways.
    """
    sizes = trunk_and_mlp_sizes(branch, tensors)
    table = _require_tensor(branch, tensors, "pos_embed", 3)
    patch_size, rows, has_class_position = sizes["patch_size"], table.shape[1], facts.get("class_position", True)
    tokens = int(facts.get("class_token", True)) + facts.get("registers", 0)
    prefixes = (tokens, 0) if has_class_position is None else (tokens * has_class_position,)
    is_fine_tuned = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    if is_fine_tuned:
        facts |= {"final_norm": "pooled", "pool": "avg"}
    expected_kind = facts.get("position", "learned")
    kind, grid = table_kind(table, rows - prefixes[0], is_fine_tuned)
    if kind != expected_kind:
        raise ValueError(
            f"{branch.file.path}: its position table is {kind}, but that of {branch.importer} is {expected_kind}; it "
            "is a file of another method"
        )
    prefix, height, width = (prefixes[0], *grid) if grid else read_grid(branch, patch_size, absolute(rows), prefixes)
    facts["class_position"] = prefix > 0
    return ViTSpec(
        architecture=facts.pop("architecture", ARCHITECTURES.get(sizes["width"], "vit_base_patch16_224")),
        image_size=(height * patch_size, width * patch_size),
        heads=branch.heads(sizes["width"], heads),
        **sizes,
        **facts,
    )


def split_class_tokens(branch: BranchTensors, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fields of a ViTSpec for several class tokens (1, P, D), of which all but the first become registers in place."""
    tokens = _require_tensor(branch, tensors, "cls_token", 3)
    tensors |= {"cls_token": tokens[:, :1], "reg_token": tokens[:, 1:]}
    return {"class_tokens": tokens.shape[1], "registers": tokens.shape[1] - 1}


def relative_vit(branch: BranchTensors, tensors: Mapping[str, Tensor], **facts: Any) -> ViTSpec:
    """Spec of the BEiT family: relative position bias, shared or per block; query and value biases; layer scale or not.

    Args and Raises as in `plain_vit`; the tensors show the number of heads.
    """
    sizes = trunk_and_mlp_sizes(branch, tensors)
    is_shared = "rel_pos_bias.relative_position_bias_table" in tensors
    name = "rel_pos_bias.relative_position_bias_table" if is_shared else "blocks.0.attn.relative_position_bias_table"
    rows, heads = _require_tensor(branch, tensors, name, 2).shape
    if branch.options.heads not in (None, heads):
        raise ValueError(f"{branch.file.path}: {name} is for {heads} heads, not {branch.options.heads}")
    is_fine_tuned = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    facts = {"position": "learned" if "pos_embed" in tensors else "none"} | facts
    patches = _require_tensor(branch, tensors, "pos_embed", 3).shape[1] - 1 if "pos_embed" in tensors else None

    def fits(prefix: int, height: int, width: int) -> bool:
        # The table has a row for each offset between two patches, and three for the class token.
        return (2 * height - 1) * (2 * width - 1) + prefix == rows and patches in (None, height * width)

    patch_size = sizes["patch_size"]
    _, height, width = read_grid(branch, patch_size, fits, prefixes=(3,))
    return ViTSpec(
        architecture="beit_base_patch16_224",
        image_size=(height * patch_size, width * patch_size),
        heads=heads,
        layer_scale="blocks.0.gamma_1" in tensors,
        class_position="pos_embed" in tensors,
        relative_position="shared" if is_shared else "per_block",
        position_resize="relative_spline",
        final_norm="pooled" if is_fine_tuned else "all",
        pool="avg",
        **sizes,
        **facts,
    )


def trunk_and_mlp_sizes(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a ViTSpec with the sizes of a trunk with plain MLPs, from its tensors."""
    fc1_bias = _require_tensor(branch, tensors, "blocks.0.mlp.fc1.bias", 1)
    return trunk_sizes(branch, tensors) | {"mlp_hidden": fc1_bias.shape[0]}


def trunk_sizes(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of a ViTSpec with the sizes that tensors of any trunk show: patch_size, width, depth."""
    patch_embedding = _require_tensor(branch, tensors, "patch_embed.proj.weight", 4)
    blocks = {int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")}
    return {
        "patch_size": patch_embedding.shape[-1],
        "width": patch_embedding.shape[0],
        "depth": 1 + max(blocks, default=-1),
    }


def _require_tensor(branch: BranchTensors, tensors: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """The tensor `name`. Raises ValueError if it is missing, empty, or has another number of axes."""
    if name not in tensors:
        raise ValueError(
            f"{branch.file.path}: no {name} under {branch.prefix!r}; the file is not complete, or has other names"
        )
    tensor = tensors[name]
    is_batch_of_one = name != "pos_embed" or tensor.shape[:1] == (1,)
    if tensor.ndim != axes or not tensor.numel() or not is_batch_of_one:
        raise ValueError(f"{branch.file.path}: {name} is {tuple(tensor.shape)}, which is no ViT's")
    return tensor


def size_from(value: Any) -> tuple[int, int] | None:
    """Height and width in pixels from a setting: a side, or a list that ends with the two; None for anything else."""
    sides = value[-2:] if isinstance(value, list | tuple) else [value, value]
    return (sides[0], sides[1]) if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides) else None


def absolute(rows: int) -> Fits:
    """Which readings have an absolute position table of `rows` rows."""
    return lambda prefix, height, width: prefix + height * width == rows


def read_grid(
    branch: BranchTensors, patch_size: int, fits: Fits, prefixes: Sequence[int], own: Any = None
) -> tuple[int, int, int]:
    """Rows of a position table before the patches, and rows and columns of patches, where its values do not show them.

    The reading by an image size in transformers' config.json, else by --image-size, by other settings of the file, or
    by `own`, the size of the model that the user named; else as a square, which is recorded as assumed.

    fits: Whether a table of a reading has the rows of this one. prefixes: Possible numbers of rows before the patches,
    the usual one first. Raises ValueError if no reading fits, or several do and nothing decides.
    """
    sides, p = range(1, MAX_GRID + 1), patch_size
    readings = [(prefix, h, w) for prefix in prefixes for h in sides for w in sides if fits(prefix, h, w)]
    settings = {name: value for name, value in branch.file.facts.items() if IMAGE_SIZE.fullmatch(name)}
    config = [value for name, value in settings.items() if name.startswith("config.")]
    for values in (config, [branch.options.image_size], settings.values(), [own]):
        grids = [(size[0] // p, size[1] // p) for size in map(size_from, values) if size]
        if known := [reading for reading in readings if reading[1:] in grids]:
            break
    choices = sorted(known or readings, key=lambda reading: abs(reading[1] - reading[2]))
    if len(choices) == 1:
        _, height, width = choices[0]
        if height != width and size_from(branch.options.image_size) == (height * p, width * p):
            branch.assumed.add(f"position table of {height} x {width} patches, taken as it is (--image-size)")
        return choices[0]
    squares = [reading for reading in choices if reading[1] == reading[2]]
    likely_prefixes = [prefix for prefix, h, w in choices if h == w or min(h, w) > 1]
    if len(squares) == 1 and not known and {squares[0][0]} in ({prefixes[0]}, {*likely_prefixes}):
        branch.assumed.add(f"square grid, {squares[0][1]} x {squares[0][1]} patches (--image-size HxW)")
        return squares[0]
    if not choices:
        raise ValueError(f"{branch.file.path}: its position table fits no grid of patches; it is of another method")
    behind = " behind {} other tokens" if len(prefixes) > 1 else ""
    sizes = {(h, w): option("image_size", spelled(f"{h * p}x{w * p}", (h * p, w * p))) for _, h, w in choices}
    texts = [f"{h} x {w} patches{behind.format(n)} ({sizes[h, w]})" for n, h, w in choices]
    raise ValueError(
        f"{branch.file.path}: its position table fits {short_text(texts, ' or ')}: give the size of the images that it "
        "was made for"
    )


def named_vit(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> ViTSpec:
    """The spec that a file holds, field by field, under `spec`. Raises ValueError if fields are missing or unknown, or
    the user states another number of heads."""
    prefix = "spec."
    fields = {name[len(prefix) :]: value for name, value in branch.file.facts.items() if name.startswith(prefix)}
    try:
        spec = ViTSpec(**fields)
    except TypeError as error:
        raise ValueError(f"{branch.file.path}: its `spec` is not one of this version ({error})") from error
    if branch.options.heads not in (None, spec.heads):
        raise ValueError(f"{branch.file.path}: its `spec` has {spec.heads} heads, not {branch.options.heads}")
    return spec


CARD_CROP = 224 / 256  # of the evaluations that `card_size` is about


def card_size(spec: ViTSpec) -> int | tuple[int, int]:
    """Image size at which the model cards of DINOv2 and DINOv3 evaluate classification; of other networks their own.

    DINOv2 ends with training at 518 px, for which its files have positions, but classifies at 224 (MODEL_CARD.md;
    eval/linear.py, Resize(256) and CenterCrop(224)). DINOv3 does the same; timm's settings for it have 256 px.
    """
    is_dinov2 = spec.patch_size == 14 and spec.image_size == 518
    is_dinov3 = spec.rotary == "centred" and spec.image_size == 256
    return 224 if is_dinov2 or is_dinov3 else spec.image_size


def import_file(importer: ModuleType, file: ForeignFile, options: ImportOptions) -> ViTExport:
    """Convert a file by one importer, and check that every tensor is used or known not to be needed.

    Raises ValueError for a missing branch, missing, unknown or misshapen tensors, and options that do not apply.
    """
    extension = extension_of("importers", importer)
    key = extension.key
    if options.architecture and key != "timm":
        raise ValueError(
            f"{file.path} as {key}: {option('architecture')} is for files of timm's models; say timm:{file.path}"
        )
    if hasattr(importer, "check"):
        importer.check(file)
    branch = _choose_branch(key, importer, file, options)
    try:
        conversion = _convert(importer, extension, branch)
        dropped, unknown = _unused_tensors(importer, branch)
        if unknown:
            raise ValueError(f"tensors that are neither used nor known to be dropped: {short_text(unknown)}")
        _check_storage(branch)
        _check_zeros(conversion.tensors)
        if conversion.evaluation_size is None and (of_card := card_size(conversion.spec)) != conversion.spec.image_size:
            conversion = replace(conversion, evaluation_size=of_card, evaluation_crop=CARD_CROP)
        published = replace(conversion.spec, image_size=conversion.evaluation_size or conversion.spec.image_size)
        export = ViTExport.make(
            conversion.spec, conversion.preparation or options.preparation, conversion.tensors, conversion.extra
        )
    except ValueError as error:
        table = file.tensors.get(f"{branch.prefix}pos_embed")
        is_known = options.architecture is not None or (not extension.plugin and importer.recognise(file))
        message = error.message(branch.name_in_file) if isinstance(error, Misfit) else str(error)
        reason = unsupported_reason(branch.names, table, is_known) or message.removeprefix(f"{file.path}: ")
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
    if options.image_size is None and published.image_size != conversion.spec.image_size:
        facts[EVALUATION_SIZE] = published.image_size
    if conversion.evaluation_crop not in (None, export.preparation.crop):
        facts[EVALUATION_CROP] = conversion.evaluation_crop
    if branch.assumed:
        facts["assumed"] = sorted(branch.assumed)
    if extension.plugin:
        facts["plugin"] = extension.plugin
    export = replace(export, facts=facts)
    if conversion.check:
        conversion.check(export)
    size = options.image_size
    return export if size in (None, conversion.spec.image_size) else export.at_size(size)


def _convert(importer: ModuleType, extension: Extension, branch: BranchTensors) -> Conversion:
    """The importer's conversion of a branch.

    Raises ValueError instead of any exception of a plugin, and if shapes make an importer's arithmetic fail.
    """
    try:
        return importer.convert(branch) if hasattr(importer, "convert") else _convert_timm_trunk(importer, branch)
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


def _convert_timm_trunk(importer: ModuleType, branch: BranchTensors) -> Conversion:
    """Conversion of a trunk under timm's names by the importer's VIT and EPOCH."""
    tensors, epoch = branch.take_trunk(), getattr(importer, "EPOCH", None)
    spec = getattr(importer, "VIT", plain_vit)(branch, tensors)
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs(epoch == "last") if epoch else None)


def _choose_branch(key: str, importer: ModuleType, file: ForeignFile, options: ImportOptions) -> BranchTensors:
    """The requested branch, or the importer's default. Raises ValueError if the file does not hold it."""
    defaults = getattr(importer, "DEFAULTS", None) or [next(iter(importer.BRANCHES))]
    present = [other for other, prefixes in importer.BRANCHES.items() if _has_trunk(importer, file, prefixes)]
    name = options.branch or next((name for name in defaults if name in present), defaults[-1])
    if name not in importer.BRANCHES:
        raise ValueError(f"{file.path}: no branch {name!r}; choose one of {', '.join(importer.BRANCHES)}")
    prefixes = [without_wrappers(options.prefix)] if options.prefix else importer.BRANCHES[name]
    for prefix in prefixes:
        if _has_trunk(importer, file, [prefix]):
            if options.prefix:
                name = options.branch or prefix.rstrip(".")
            branch = BranchTensors(file=file, importer=key, name=name, prefix=prefix, options=options)
            if len(present) > 1 and not (options.branch or options.prefix):
                others = ", ".join(other for other in present if other != name)
                branch.assumed.add(f"branch {name}; the file also holds {others} (--branch)")
            return branch
    first = getattr(importer, "FIRST", PATCH_EMBEDDING)
    expected = " or ".join(prefix + name for prefix in prefixes for name in first)
    wrapped = [prefix for prefix in prefixes if without_wrappers(prefix) != prefix and prefix]
    if wrapped:
        advice = f"names are read without wrappers: write {without_wrappers(wrapped[0])!r} in BRANCHES of {key}"
    elif present and not options.prefix:
        advice = f"it holds the branches: {', '.join(present)}"
    else:
        other_source = f"it is not a file of {key}; its tensors are {short_text(list(file.tensors))}"
        advice = unsupported_reason(file.tensors) or prefix_advice(key, file, [importer]) or other_source
    raise ValueError(f"{file.path}: no patch embedding for branch {name!r}: {expected}; {advice}")


def prefix_advice(key: str, file: ForeignFile, importers: Collection[ModuleType]) -> str:
    """Under which prefixes a file holds ViTs with timm's names, and how to import one; "" if there are none.

    importers: those that may read it, whose default branches are named first.
    """
    ending = PATCH_EMBEDDING[0]
    prefixes = [name.removesuffix(ending) for name in file.tensors if name.endswith(f".{ending}")]
    if not prefixes:
        return ""
    prefixes.sort(key=lambda prefix: -sum(next(iter(importer.BRANCHES)) in prefix for importer in importers))
    subject = "a ViT lies" if len(prefixes) == 1 else "ViTs lie"
    command = import_command(key, file, "prefix", prefixes[0])
    return f"{subject} under {', '.join(prefixes[:4])}: say which with {option('prefix')}, as in {command}"


def import_command(key: str, file: ForeignFile, name: str, value: str) -> str:
    """The command, or the call, by which a user imports the file with an importer and an option."""
    source = f"{key}:{file.path}"
    call = f"bench.load({source!r}, {name}={value if value == 'N' else repr(value)})"
    return spelled(f"{command_line('import', source, out='FOLDER')} --{name} {value}", call)


def _has_trunk(importer: ModuleType, file: ForeignFile, prefixes: Iterable[str]) -> bool:
    """Whether a file has the importer's patch embedding under one of the prefixes."""
    first = getattr(importer, "FIRST", PATCH_EMBEDDING)
    return any(prefix + name in file.tensors for prefix in prefixes for name in first)


def _other_branches(importer: ModuleType, branch: BranchTensors) -> dict[str, str]:
    """Pattern of the names of tensors in other branches of the file -> reason to drop them."""
    patterns = {}
    for name, prefixes in importer.BRANCHES.items():
        for prefix in prefixes:
            is_other = name != branch.name and prefix and not branch.prefix.startswith(prefix)
            if is_other and _has_trunk(importer, branch.file, [prefix]):
                patterns[re.escape(prefix) + ".*"] = f"branch {name}"
    return patterns


def _unused_tensors(importer: ModuleType, branch: BranchTensors) -> tuple[dict[str, int], list[str]]:
    """Tensors of the file that were not used: reason to drop them -> how many; and the names without a reason."""
    patterns = _other_branches(importer, branch) | importer.DROPPED | TRAINING_STATE
    if branch.options.prefix:
        patterns |= {f"(?!{re.escape(branch.prefix)}).*": f"outside {branch.prefix}"}
    known_prefixes = [prefix for prefixes in importer.BRANCHES.values() for prefix in prefixes]
    dropped: dict[str, int] = {}
    unknown = []
    for name in branch.file.tensors:
        if name in branch.used:
            continue
        names = [name]  # and, below a prefix of the user's, under those of the importer, which its patterns expect
        if branch.options.prefix and name.startswith(branch.prefix):
            names += [prefix + name.removeprefix(branch.prefix) for prefix in known_prefixes]
        matches = (reason for pattern, reason in patterns.items() if any(re.fullmatch(pattern, name) for name in names))
        reason = next(matches, None)
        if reason is None:
            unknown.append(name)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    return dropped, unknown


def leaves_unknown_tensors(importer: ModuleType, file: ForeignFile) -> bool:
    """Whether a file has tensors that the importer neither uses nor drops. False if it cannot convert the file."""
    extension = extension_of("importers", importer)
    options = ImportOptions(heads=1, statistics="imagenet")  # any values, because only names of tensors matter
    try:
        branch = _choose_branch(extension.key, importer, file, options)
        _convert(importer, extension, branch)
    except ValueError:
        return False
    _, unknown = _unused_tensors(importer, branch)
    return bool(unknown)


def _check_storage(branch: BranchTensors) -> None:
    """Raise ValueError if the used tensors have more values than stored bytes, being views that repeat memory."""
    used = [branch.file.tensors[name] for name in branch.used]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in used}
    values, stored_bytes = sum(tensor.numel() for tensor in used), sum(storages.values())
    if values > stored_bytes:
        raise ValueError(f"its tensors are views that make {values} values of {stored_bytes} bytes; {UNFOLD}")


def _check_zeros(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a weight matrix of zeros alone: parts of a file that a broken download left out.

    The last layers of attention and MLP may be zero, because some codes begin a training with that.
    """
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or not name.endswith(".weight") or name.endswith(("attn.proj.weight", "fc2.weight")):
            continue
        parts = tensor.chunk(3) if name.endswith("attn.qkv.weight") else (tensor,)  # files may have these three apart
        if not all(part.any() for part in parts):
            raise ValueError(f"{name} holds only zeros: the file is not complete; {DOWNLOAD_AGAIN}")
