"""ViTExport: the one format of checkpoints here, a folder that timm can load as well. Layout: docs/export-format.md.

config.json           timm's hub layout, with this project's facts under the key `vit_export`
model.safetensors     the trunk under timm's names, float32
extra.safetensors     only if needed: class-attention blocks, a projector
cost.json             time and FLOPs of a pretraining; a separate file, because identical trainings differ in it
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.fingerprint import PROBES, Fingerprint, fingerprint, fingerprint_differences
from checkpoints.positions import resize_positions, resize_relative
from checkpoints.spec import Preparation, PreparesImages, ViTSpec
from checkpoints.vit import ViT, skip_init
from engine.files import digest, folder_atomic, open_regular, read_json, read_text, write_atomic

FORMAT = 1
MAX_LISTED = 6  # items that an error lists before "and N more"
MAX_CONFIG_BYTES = 64 << 20  # of a config.json, which holds the fingerprint
DESCRIPTIVE_KEYS = ("tag", "license")  # of pretrained_cfg; they do not affect the network
ABSENT = "absent"
# Facts: image size and centre crop of the source's published evaluation, if others than those of the digest.
EVALUATION_SIZE, EVALUATION_CROP = EVALUATION_FACTS = ("evaluation_size", "evaluation_crop")
IMPORTER_FACTS = ("importer_version", "assumed", *EVALUATION_FACTS)  # which another version of an importer may change
COST = "cost.json"  # holds the fact "cost"
FILES = {"config.json", "model.safetensors", "extra.safetensors", COST}
CARD = "README.md"  # written by `bench card` for the Hub
CARD_MARK = "<!-- written by bench card; delete this line to keep your changes -->"
CLASS_ATTENTION = ("class_query", "class_attention.")  # beginnings of names of tensors
SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"
# Relative position tables for further training. "shared": one table for all blocks, as in the export; "per_block": a
# copy of it in each block; "fresh": the same, or tables of zeros if the network has none.
Tables = Literal["per_block", "shared", "fresh"]


class Misfit(ValueError):
    """Raised if the tensors are not those of the network that a spec describes.

    problems: tuples of what is wrong, the tensor's name and its shapes, such as ("missing ", "norm.weight", "").
    """

    def __init__(self, spec: ViTSpec, problems: Sequence[tuple[str, str, str]]) -> None:
        super().__init__(spec, problems)  # sets `args`, so that the error survives pickling between processes
        self.spec, self.problems = spec, tuple(problems)

    def __str__(self) -> str:
        return self.message()

    def message(self, name_in_file: Callable[[str], str] = str) -> str:
        """The problems in one line. name_in_file: timm's name of a tensor -> its name in the file."""
        sizes = f"{self.spec.label}, depth {self.spec.depth} and width {self.spec.width}"
        problems = [f"{problem}{name_in_file(name)}{shapes}" for problem, name, shapes in self.problems]
        return f"the tensors do not fit {sizes}: {short_text(problems, '; ')}"


@dataclass(frozen=True, kw_only=True)
class ViTExport(PreparesImages):
    """A checkpoint in the one format.

    Attributes:
        spec: Architecture.
        preparation: How its images are prepared.
        tensors: timm's name -> float32 tensor of the trunk.
        extra: Tensors outside of timm's trunk, such as `class_query`, `class_attention.*` and `projector.*`.
        facts: Provenance as JSON values (method, recipe, branch, source, importer, dropped tensors, data, epochs,
            licence, cost).
        fingerprint: See fingerprint.py; computed by `make`.
    """

    spec: ViTSpec
    preparation: Preparation
    tensors: Mapping[str, Tensor] = field(repr=False)
    extra: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        spec: ViTSpec,
        preparation: Preparation,
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> "ViTExport":
        """An export of checked tensors, converted to float32, with its fingerprint.

        Raises ValueError for tensors that do not fit the spec, are not floating-point or are not finite.
        """
        for name, tensor in {**tensors, **(extra or {})}.items():
            if tensor.is_complex():
                raise ValueError(f"tensor {name} holds complex numbers, which no ViT has: the checkpoint is broken")
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {name} holds {tensor.dtype}: quantised weights cannot be read without scales")
        tensors = {name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}
        extra = {name: tensor.detach().float().contiguous() for name, tensor in (extra or {}).items()}
        for name, tensor in (tensors | extra).items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name} holds NaN or infinite values: the checkpoint is broken")
        export = cls(spec=spec, preparation=preparation, tensors=tensors, extra=extra, facts=facts or {})
        return replace(export, fingerprint=fingerprint(export.build(), preparation))

    @classmethod
    def from_vit(cls, vit: ViT, preparation: Preparation, facts: Mapping[str, Any] | None = None) -> "ViTExport":
        """Export of a network in memory, for example at the end of a pretraining."""
        trunk = {name: tensor.cpu().clone() for name, tensor in vit.trunk.state_dict().items()}
        extra = {name: t.cpu().clone() for name, t in vit.state_dict().items() if name.startswith(CLASS_ATTENTION)}
        return cls.make(vit.spec, preparation, trunk, extra, facts)

    @property
    def parameters(self) -> int:
        """Number of values in the trunk and the class-attention blocks, position tables included."""
        return sum(tensor.numel() for tensor in {**self.tensors, **self._class_attention_tensors()}.values())

    def _class_attention_tensors(self) -> dict[str, Tensor]:
        """The tensors of class-attention blocks in `extra`, which are part of the network, unlike a projector."""
        return {name: tensor for name, tensor in self.extra.items() if name.startswith(CLASS_ATTENTION)}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over spec, preparation and all tensors: exports with equal digests compute equal features."""
        facts = digest([self.spec.to_json(), asdict(self.preparation)])
        return digest([facts, digest_of_tensors(self.tensors), digest_of_tensors(self.extra)])

    def difference(self, other: "ViTExport") -> str:
        """How `other` differs from this export, for messages; "" if they differ at most in version, assumptions and the
        size of the published evaluation."""
        if self.digest != other.digest:
            return f"digest {self.digest[:12]}, not {other.digest[:12]}"
        keys = [key for key in {**self.facts, **other.facts} if key not in IMPORTER_FACTS]
        keys = [key for key in keys if self.facts.get(key) != other.facts.get(key)]
        return short_text([f"{key} {self.facts.get(key)!r}, not {other.facts.get(key)!r}" for key in keys])

    def build(self, drop_path: float = 0.0, any_size: bool = False) -> ViT:
        """The network with these weights, in evaluation mode. Raises Misfit for missing, unknown and misshapen ones.

        any_size: for frozen networks that get images of several sizes: keep the position tables as they are stored
            (except relative ones of each block), so that they are resized once, from there, for every image.
        """
        if any_size and self.spec.relative_position != "per_block":
            return replace(self, spec=self.spec.stored).build(drop_path)
        with torch.device("meta"), skip_init():  # takes no memory, and hardly any time, before the shapes are checked
            vit = ViT(self.spec, drop_path, initialise=False)
        stored = {f"trunk.{name}": tensor for name, tensor in self._resized_tensors().items()}
        stored |= self._class_attention_tensors()
        expected = vit.state_dict()
        problems = [("missing ", name, "") for name in expected if name not in stored]
        problems += [("unknown ", name, "") for name in stored if name not in expected]
        problems += [
            ("", name, f" is {tuple(stored[name].shape)}, not {tuple(expected[name].shape)}")
            for name in expected
            if name in stored and stored[name].shape != expected[name].shape
        ]
        if problems:
            problems = [(problem, name.removeprefix("trunk."), shapes) for problem, name, shapes in problems]
            raise Misfit(self.spec, problems)
        for module in vit.modules():
            if hasattr(module, "init_non_persistent_buffers"):  # timm's buffers that are in no state dict
                module.to_empty(device="cpu", recurse=False)
                module.init_non_persistent_buffers()
        vit.load_state_dict({name: tensor.clone() for name, tensor in stored.items()}, strict=True, assign=True)
        return vit.eval()

    def at_size(self, image_size: int | tuple[int, int]) -> "ViTExport":
        """The same network for another native image size. Its position tables stay those of the source.

        They are resized by the spec's rule when a network is built, once, however often the size is changed.
        image_size: side in pixels, or height and width. Raises ValueError if the tables cannot be resized.
        """
        source = self.spec.stored.image_size
        spec = replace(self.spec, image_size=image_size, table_size=source)
        facts = {name: value for name, value in self.facts.items() if name not in ("resized_from", EVALUATION_SIZE)}
        facts |= {"resized_from": source} if spec.image_size != source else {}
        return ViTExport.make(spec, self.preparation, self.tensors, self.extra, facts)

    @property
    def evaluation_size(self) -> int | tuple[int, int]:
        """Image size at which the network is evaluated by default: that of its source's published evaluation."""
        size = self.facts.get(EVALUATION_SIZE, self.spec.image_size)
        return tuple(size) if isinstance(size, list) else size

    @property
    def crop(self) -> float:
        """Centre crop of its source's published evaluation, as a share of the resized short side."""
        return self.facts.get(EVALUATION_CROP, self.preparation.crop)

    def evaluated_at(self, image_size: int | tuple[int, int]) -> "ViTExport":
        """The same network for evaluation on images of this size; without a fingerprint, and made once for each size.

        Raises ValueError as `at_size`.
        """
        spec = replace(self.spec, image_size=image_size, table_size=self.spec.stored.image_size)
        if spec == self.spec:
            return self
        if spec not in self._at_sizes:
            export = replace(self, spec=spec, fingerprint={})
            export._resized_tensors()  # raises an error now rather than at the first image
            self._at_sizes[spec] = export
        return self._at_sizes[spec]

    @cached_property
    def _at_sizes(self) -> dict[ViTSpec, "ViTExport"]:
        return {}

    def _resized_tensors(self) -> dict[str, Tensor]:
        """The trunk's tensors, with position tables for the spec's image size."""
        spec, source, tensors = self.spec, self.spec.stored.grid, dict(self.tensors)
        for name, tensor in tensors.items() if source != spec.grid else ():
            if name == "pos_embed":
                prefix = tensor.shape[1] - source[0] * source[1]
                tensors[name] = resize_positions(tensor, source, spec.grid, spec.position_resize, prefix=prefix)
            elif name.endswith("relative_position_bias_table"):
                tensors[name] = resize_relative(tensor, source, spec.grid)
        return tensors

    def with_patch_size(self, patch_size: int) -> "ViTExport":
        """The same network on patches of another size; without a fingerprint.

        Patch embeddings of larger patches are those of the source on the patches before enlargement: the pseudo-inverse
        resize of FlexiViT (Beyer et al. 2023, section 3.4).
        """
        from timm.layers import resample_patch_embed

        name = "patch_embed.proj.weight"
        weight = resample_patch_embed(self.tensors[name], [patch_size, patch_size])
        spec, tensors = self.spec.with_patch_size(patch_size), {**self.tensors, name: weight}
        return replace(self, spec=spec, tensors=tensors, fingerprint={})

    def with_tables(self, tables: Tables) -> "ViTExport":
        """The same network with relative position tables in each block, to train them; it computes the same features.

        Raises ValueError if blocks that are not BEiT's would need new tables.
        """
        spec, tensors = self.spec, dict(self.tensors)
        needs_new_tables = spec.relative_position == "none" and tables == "fresh"
        if needs_new_tables:
            height, width = (2 * side - 1 for side in spec.stored.grid)
            table = torch.zeros(height * width + 3, spec.heads)  # offsets of patches, and 3 for the class token
            spec, tensors = self._as_beit()
        elif spec.relative_position == "shared" and tables != "shared":
            table = tensors.pop(SHARED_TABLE)
            spec = replace(spec, relative_position="per_block")
        else:
            return self
        for block in range(spec.depth):
            tensors[f"blocks.{block}.attn.relative_position_bias_table"] = table.clone()
        export = replace(self, spec=spec, tensors=tensors, fingerprint={})
        if needs_new_tables and not export._blocks_agree_with(self):
            raise ValueError(f"{self.spec.architecture}: its blocks are not BEiT's; use tables=per_block")
        return export

    def _blocks_agree_with(self, other: "ViTExport") -> bool:
        """Whether each block computes the same as that of `other`, by the fingerprints."""
        expected = other.fingerprint or fingerprint(other.build(), other.preparation)
        expected = {name: point for name, point in expected.items() if name.startswith("block")}
        try:
            computed = fingerprint(self.build(), other.preparation)
        except Misfit:
            return False
        return not fingerprint_differences(expected, {name: computed[name] for name in expected})

    def _as_beit(self) -> tuple[ViTSpec, dict[str, Tensor]]:
        """Spec and tensors of a BEiT. The bias of keys is dropped, because it does not change a softmax over keys."""
        check_tables(self.spec, "fresh")
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.endswith("attn.qkv.bias"):
                query_bias, _, value_bias = tensor.chunk(3)
                tensors[name.replace("qkv.bias", "q_bias")] = query_bias
                tensors[name.replace("qkv.bias", "v_bias")] = value_bias
            else:
                tensors[re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name)] = tensor
        return replace(self.spec, architecture="beit_base_patch16_224", relative_position="per_block"), tensors

    def save(self, folder: Path | str) -> Path:
        """Write the export as a folder, atomically. An older export there is replaced.

        Raises ValueError if the folder holds anything else, or the files cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not _is_replaceable(folder):
            raise ValueError(f"{folder} holds something that is not an export: choose a new folder")
        with folder_atomic(folder) as temporary:
            try:
                save_file(dict(self.tensors), temporary / "model.safetensors", metadata={"format": "pt"})
                if self.extra:
                    save_file(dict(self.extra), temporary / "extra.safetensors", metadata={"format": "pt"})
            except SafetensorError as error:
                raise ValueError(f"{folder}: the export cannot be written ({error}); free some space") from error
            if "cost" in self.facts:
                write_atomic(temporary / COST, json.dumps(self.facts["cost"], indent=2) + "\n")
            write_atomic(temporary / "config.json", json.dumps(self._config(), indent=2) + "\n")
        return folder

    def _config(self) -> dict[str, Any]:
        """The content of config.json."""
        args, preparation = self.spec.timm_args(), self.preparation
        return {
            "architecture": self.spec.architecture,
            "num_classes": 0,
            "num_features": self.spec.width,
            "global_pool": args["global_pool"],
            "model_args": args,
            "pretrained_cfg": {
                "tag": str(self.facts.get("method", "")),
                "custom_load": False,
                "input_size": [3, *self.spec.stored.size],
                "fixed_input_size": True,
                "interpolation": preparation.interpolation,
                "crop_pct": preparation.crop,
                "crop_mode": "center",
                "mean": list(preparation.mean),
                "std": list(preparation.std),
                "num_classes": 0,
                "pool_size": None,
                "first_conv": "patch_embed.proj",
                "classifier": "head",
                "license": str(self.facts.get("licence", "unknown")),
            },
            "vit_export": {
                "format": FORMAT,
                "digest": self.digest,
                "spec": self.spec.to_json(),
                "preparation": asdict(preparation),
                **{name: value for name, value in self.facts.items() if name != "cost"},
                "fingerprint": self.fingerprint,
            },
        }

    @classmethod
    def load(cls, folder: Path | str) -> "ViTExport":
        """Read a folder that `save` wrote.

        Raises ValueError if a file is missing or broken, or holds other weights or settings than were written.
        """
        folder = Path(folder)
        try:
            config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
            stored, timm_settings = dict(config["vit_export"]), settings_for_timm(config)
            if stored.pop("format") != FORMAT:
                raise ValueError(f"{folder}: written by another version of the format; update this tool")
            spec = ViTSpec(**stored.pop("spec"))
            fields = stored.pop("preparation")
            preparation = Preparation(**fields | {key: tuple(fields[key]) for key in ("mean", "std")})
            stored_digest = stored.pop("digest")
            stored_fingerprint = _checked_fingerprint(stored.pop("fingerprint"))
            facts = stored  # all other keys
            if (folder / COST).exists():
                facts["cost"] = read_json(folder / COST, MAX_CONFIG_BYTES)
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder} is not a ViT-export ({type(error).__name__}: {error})") from error
        tensors = read_tensors(folder / "model.safetensors")
        extra = read_tensors(folder / "extra.safetensors") if (folder / "extra.safetensors").exists() else {}
        export = cls(
            spec=spec,
            preparation=preparation,
            tensors=tensors,
            extra=extra,
            facts=facts,
            fingerprint=stored_fingerprint,
        )
        if export.digest != stored_digest:
            raise ValueError(f"{folder}: weights or settings changed since the export was written; import it again")
        if changes := export.difference_for_timm(timm_settings):
            raise ValueError(f"{folder}/config.json: what timm reads was changed: {changes}; import it again")
        # Earlier versions kept an architecture's own layer scale even if the spec has none.
        has_layer_scale = any(re.fullmatch(r"blocks\.0\.(ls1\.gamma|gamma_1)", name) for name in tensors)
        if has_layer_scale and not spec.layer_scale:
            return replace(export, spec=replace(spec, layer_scale=True))
        return export

    def difference_for_timm(self, settings: Mapping[str, Any]) -> str:
        """How `settings`, from `settings_for_timm`, differ from this export's, for messages; "" if they do not."""
        own = settings_for_timm(self._config())
        keys = [key for key in {**own, **settings} if own.get(key, ABSENT) != settings.get(key, ABSENT)]
        return short_text([f"{key} is {settings.get(key, ABSENT)}, not {own.get(key, ABSENT)}" for key in keys], "; ")

    def verify(self) -> list[str]:
        """One line for each point of the recomputed fingerprint that differs from the stored one; [] if none does."""
        return fingerprint_differences(self.fingerprint, fingerprint(self.build(), self.preparation))


def check_tables(spec: ViTSpec, tables: Tables) -> None:
    """Raise ValueError if `tables` need new relative position tables and the network's blocks cannot have them."""
    is_plain = spec.family == "vit" and spec.class_token and not spec.registers and not spec.class_attention
    if tables == "fresh" and spec.relative_position == "none" and not is_plain:
        raise ValueError(
            f"{spec.label}: relative position tables need a plain ViT with a class token; use tables=per_block"
        )


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, types, shapes and values of tensors on the CPU."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha256.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return sha256.hexdigest()


def short_text(items: Sequence[str], separator: str = ", ") -> str:
    """The first MAX_LISTED items, joined, and the number of others, for an error."""
    others = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return separator.join(items[:MAX_LISTED]) + others


def settings_for_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a config.json that affect timm's network, as a flat dictionary of JSON values."""
    settings = {key: config.get(key) for key in ("architecture", "num_classes", "num_features", "global_pool")}
    for part in ("model_args", "pretrained_cfg"):
        settings |= {f"{part}.{key}": value for key, value in config[part].items() if key not in DESCRIPTIVE_KEYS}
    return json.loads(json.dumps(settings))


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds only an export and a card that `bench card` wrote."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    known = FILES | ({CARD} if is_card(folder / CARD) else set())
    return not names or (names <= known and is_export(folder))


def is_card(path: Path) -> bool:
    """Whether a file is a card that `bench card` wrote and the user did not claim, so that it may be overwritten."""
    try:
        return CARD_MARK in read_text(path).split("\n")
    except (OSError, ValueError):
        return False


def is_export(folder: Path | str) -> bool:
    """Whether a folder is an export, in any version of the format."""
    try:
        config = read_json(Path(folder) / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vit_export" in config


def spec_in(folder: Path | str, digest: str) -> ViTSpec | None:
    """Spec of the export in a folder, without reading its tensors; None if there is no export with this digest."""
    try:
        stored = read_json(Path(folder) / "config.json", MAX_CONFIG_BYTES)["vit_export"]
        return ViTSpec(**stored["spec"]) if stored["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checked_fingerprint(stored: Any) -> Fingerprint:
    """A stored fingerprint. Raises TypeError unless it has the form of those that fingerprint() returns."""
    points = stored.values() if isinstance(stored, dict) else [None]
    for point in points:
        numbers = [point["mean"], point["std"], *point["probes"]] if isinstance(point, dict) else []
        if len(numbers) != 2 + PROBES or not all(isinstance(number, float) for number in numbers):
            raise TypeError("malformed fingerprint")
    return stored


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError if it cannot be read."""
    try:
        with open_regular(path):  # raises ValueError for a pipe, which would block
            return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or import the export again") from error
