"""ViTExport: a folder that timm, Hugging Face users and every probe here can load. Layout: docs/export-format.md.

config.json           timm's hub layout; our facts under the root key `vit_export`
model.safetensors     the trunk under timm's names, float32
extra.safetensors     only if needed: class-attention blocks, a projector
cost.json             for our own pretrainings: time and FLOPs. A file of its own, as equal trainings differ in it
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
from engine.files import digest, folder_atomic, read_regular, write_atomic

FORMAT = 1
SHOWN = 6  # items that an error lists before "and N more"
DESCRIPTIONS = ("tag", "license")  # keys of pretrained_cfg that do not affect the network
ABSENT = "absent"
COST = "cost.json"  # the fact "cost"
FILES = {"config.json", "model.safetensors", "extra.safetensors", COST}
CARD, EVALUATIONS = "README.md", ".eval_results"  # written by `bench card` for the Hub
CARD_MARK = "<!-- written by bench card; delete this line to keep your changes -->"
CLASS_ATTENTION = ("class_query", "class_attention.")
SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"
# Relative position tables for further training: "shared": one table for all blocks, as in the export; "per_block": a
# copy of it in every block; "fresh": the same, and tables of zeros for a network without any.
Tables = Literal["per_block", "shared", "fresh"]


MAX_CONFIG = 64 << 20  # bytes of a config.json, which holds recorded activations


class Misfit(ValueError):
    """Raised if the tensors are not those of the network that a spec describes.

    problems: tuples of what is wrong, the tensor's name and its shapes, such as ("missing ", "norm.weight", "").
    """

    def __init__(self, spec: ViTSpec, problems: Sequence[tuple[str, str, str]]) -> None:
        super().__init__(spec, problems)  # both, as processes send each other their errors
        self.spec, self.problems = spec, tuple(problems)

    def __str__(self) -> str:
        return self.message()

    def message(self, named: Callable[[str], str] = str) -> str:
        """The problems in one line. named: our name of a tensor -> its name in the file."""
        sizes = f"{self.spec.label}, depth {self.spec.depth} and width {self.spec.width}"
        problems = [f"{what}{named(name)}{shapes}" for what, name, shapes in self.problems]
        return f"the tensors do not fit {sizes}: {some(problems, '; ')}"


@dataclass(frozen=True, kw_only=True)
class ViTExport(PreparesImages):
    """A checkpoint in the one format.

    tensors: timm name -> float32 tensor of the trunk. extra: tensors that are not part of timm's trunk, such as
    `class_query` and `class_attention.*`. facts: provenance as JSON (method, recipe, branch, source, importer, dropped
    keys, data, epochs, licence, cost). fingerprint: see fingerprint.py; computed when the export is made.
    """

    spec: ViTSpec
    preparation: Preparation
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        spec: ViTSpec,
        preparation: Preparation,
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> "ViTExport":
        """Check every tensor against the network that `spec` describes, then compute the fingerprint.

        Raises ValueError for tensors that do not fit, are not floating-point or are not finite.
        """
        for name, tensor in {**tensors, **(extra or {})}.items():
            if tensor.is_complex():
                raise ValueError(f"tensor {name} holds complex numbers, which no ViT has: the checkpoint is broken")
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {name} holds {tensor.dtype}: quantised weights cannot be read without scales")
        plain = {name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}
        plain_extra = {name: tensor.detach().float().contiguous() for name, tensor in (extra or {}).items()}
        for name, tensor in (plain | plain_extra).items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name} holds NaN or infinite values: the checkpoint is broken")
        export = cls(spec=spec, preparation=preparation, tensors=plain, extra=plain_extra, facts=facts or {})
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
        used = [*self.tensors.values(), *(t for name, t in self.extra.items() if name.startswith(CLASS_ATTENTION))]
        return sum(tensor.numel() for tensor in used)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over spec, preparation and every tensor: equal digests compute equal features."""
        facts = digest([self.spec.to_json(), asdict(self.preparation)])
        return digest([facts, digest_of_tensors(self.tensors), digest_of_tensors(self.extra)])

    def difference(self, other: "ViTExport") -> str:
        """How `other` differs but for this tool's version and what was assumed; empty where it is the same export."""
        if self.digest != other.digest:
            return f"digest {self.digest[:12]}, not {other.digest[:12]}"
        keys = [key for key in {**self.facts, **other.facts} if key not in ("importer_version", "assumed")]
        keys = [key for key in keys if self.facts.get(key) != other.facts.get(key)]
        return some([f"{key} {self.facts.get(key)!r}, not {other.facts.get(key)!r}" for key in keys])

    def build(self, drop_path: float = 0.0) -> ViT:
        """The network with these weights. ValueError names every tensor that is missing, unknown or misshapen."""
        with torch.device("meta"), skip_init():  # neither time nor memory until the shapes are known to fit
            vit = ViT(self.spec, drop_path, initialise=False)
        blocks = {name: t for name, t in self.extra.items() if name.startswith(CLASS_ATTENTION)}
        stored = {f"trunk.{name}": tensor for name, tensor in self.tensors.items()} | blocks
        expected = vit.state_dict()
        problems = [("missing ", name, "") for name in expected if name not in stored]
        problems += [("unknown ", name, "") for name in stored if name not in expected]
        problems += [
            ("", name, f" is {tuple(stored[name].shape)}, not {tuple(expected[name].shape)}")
            for name in expected
            if name in stored and stored[name].shape != expected[name].shape
        ]
        if problems:
            raise Misfit(self.spec, [(what, name.removeprefix("trunk."), shapes) for what, name, shapes in problems])
        for module in vit.modules():
            if hasattr(module, "init_non_persistent_buffers"):  # timm's: what a state dict does not hold
                module.to_empty(device="cpu", recurse=False)
                module.init_non_persistent_buffers()
        vit.load_state_dict({name: tensor.clone() for name, tensor in stored.items()}, strict=True, assign=True)
        return vit.eval()

    def at_size(self, image_size: int | tuple[int, int]) -> "ViTExport":
        """The same network with its position tables resized, by the spec's rule, for another native image size.

        image_size: side in pixels, or height and width."""
        spec = replace(self.spec, image_size=image_size)
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if name == "pos_embed":
                rows = tensor.shape[1] - self.spec.grid[0] * self.spec.grid[1]
                tensors[name] = resize_positions(tensor, self.spec.grid, spec.grid, spec.position_resize, prefix=rows)
            elif name.endswith("relative_position_bias_table"):
                tensors[name] = resize_relative(tensor, self.spec.grid, spec.grid)
        facts = dict(self.facts) | {"resized_from": self.spec.image_size}
        return ViTExport.make(spec, self.preparation, tensors, self.extra, facts)

    def with_tables(self, tables: Tables) -> "ViTExport":
        """The same function with relative position tables that train otherwise. ValueError where blocks take none."""
        spec, tensors = self.spec, dict(self.tensors)
        if fresh := spec.relative_position == "none" and tables == "fresh":
            offsets = (2 * spec.grid[0] - 1) * (2 * spec.grid[1] - 1) + 3  # three of the class token
            table, spec, tensors = torch.zeros(offsets, spec.heads), *self._as_beit()
        elif spec.relative_position == "shared" and tables != "shared":
            table, spec = tensors.pop(SHARED_TABLE), replace(spec, relative_position="per_block")
        else:
            return self
        for block in range(spec.depth):
            tensors[f"blocks.{block}.attn.relative_position_bias_table"] = table.clone()
        export = replace(self, spec=spec, tensors=tensors, fingerprint={})
        if fresh:
            before = self.fingerprint or fingerprint(self.build(), self.preparation)
            before = {name: point for name, point in before.items() if name.startswith("block")}
            try:
                after = fingerprint(export.build(), self.preparation)
                is_beit = not fingerprint_differences(before, {name: after[name] for name in before})
            except Misfit:
                is_beit = False
            if not is_beit:
                raise ValueError(f"{self.spec.architecture}: its blocks are not BEiT's; use tables=per_block")
        return export

    def _as_beit(self) -> tuple[ViTSpec, dict[str, Tensor]]:
        """Spec and tensors of BEiT's names, without the keys' bias, which a softmax over keys does not see."""
        check_tables(self.spec, "fresh")
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.endswith("attn.qkv.bias"):
                queries, _, values = tensor.chunk(3)
                tensors |= {name.replace("qkv.bias", "q_bias"): queries, name.replace("qkv.bias", "v_bias"): values}
            else:
                tensors[re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name)] = tensor
        return replace(self.spec, architecture="beit_base_patch16_224", relative_position="per_block"), tensors

    def save(self, folder: Path | str) -> Path:
        """Write the folder in one step; an older export there is replaced, anything else is not."""
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
                "input_size": [3, *self.spec.size],
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
    def load(cls, folder: Path | str, unchanged: bool = True) -> "ViTExport":
        """Read a folder that `save` wrote. ValueError if a file is missing, broken or, if it must be `unchanged`,
        holds other weights or settings than were written."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            own, of_timm = dict(config["vit_export"]), read_by_timm(config)
            if own.pop("format") != FORMAT:
                raise ValueError(f"{folder}: written by another version of the format; update this tool")
            spec = ViTSpec(**own.pop("spec"))
            prepared = own.pop("preparation")
            preparation = Preparation(**prepared | {key: tuple(prepared[key]) for key in ("mean", "std")})
            recorded, stored = own.pop("digest"), _checked_fingerprint(own.pop("fingerprint"))
            if (folder / COST).exists():
                own["cost"] = json.loads((folder / COST).read_text(encoding="utf-8"))
        except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder} is not a ViT-export ({type(error).__name__}: {error})") from error
        tensors = _read(folder / "model.safetensors")
        extra = _read(folder / "extra.safetensors") if (folder / "extra.safetensors").exists() else {}
        export = cls(spec=spec, preparation=preparation, tensors=tensors, extra=extra, facts=own, fingerprint=stored)
        if unchanged and export.digest != recorded:
            raise ValueError(f"{folder}: weights or settings changed since the export was written; import it again")
        if unchanged and (changed := export.difference_for_timm(of_timm)):
            raise ValueError(f"{folder}/config.json: what timm reads was changed: {changed}; import it again")
        # Earlier versions left an architecture its own layer scale where the spec has none.
        scaled = any(re.fullmatch(r"blocks\.0\.(ls1\.gamma|gamma_1)", name) for name in tensors)
        return replace(export, spec=replace(spec, layer_scale=True)) if scaled and not spec.layer_scale else export

    def difference_for_timm(self, settings: Mapping[str, Any]) -> str:
        """Which `settings`, as `read_by_timm` gives them, are not those of this export; empty where all are."""
        own = read_by_timm(self._config())
        keys = [key for key in {**own, **settings} if own.get(key, ABSENT) != settings.get(key, ABSENT)]
        return some([f"{key} is {settings.get(key, ABSENT)}, not {own.get(key, ABSENT)}" for key in keys], "; ")

    def verify(self) -> list[str]:
        """Recompute the fingerprint; one line for each point that differs from the stored one, empty if proven."""
        return fingerprint_differences(self.fingerprint, fingerprint(self.build(), self.preparation))


def check_tables(spec: ViTSpec, tables: Tables) -> None:
    """ValueError for a network whose blocks cannot get relative position tables that it has not."""
    is_plain = spec.family == "vit" and spec.class_token and not spec.registers and not spec.class_attention
    if tables == "fresh" and spec.relative_position == "none" and not is_plain:
        raise ValueError(
            f"{spec.label}: relative position tables need a plain ViT with a class token; use tables=per_block"
        )


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hex SHA-256 over names, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return total.hexdigest()


def some(words: Sequence[str], separator: str = ", ") -> str:
    """A list for an error: the first SHOWN, and how many more there are."""
    rest = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return separator.join(words[:SHOWN]) + rest


def read_by_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """What timm reads of a config.json, flat, as JSON values; without what describes and decides nothing."""
    settings = {key: config.get(key) for key in ("architecture", "num_classes", "num_features", "global_pool")}
    for part in ("model_args", "pretrained_cfg"):
        settings |= {f"{part}.{key}": value for key, value in config[part].items() if key not in DESCRIPTIONS}
    return json.loads(json.dumps(settings))


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds an export and nothing beside it but the card that was written for it."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    known = FILES | ({CARD, EVALUATIONS} if is_card(folder / CARD) else set())
    return not names or (names <= known and is_export(folder))


def is_card(path: Path) -> bool:
    """Whether a file is a card as `bench card` wrote it, which may be written anew."""
    try:
        return CARD_MARK in path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return False


def is_export(folder: Path | str) -> bool:
    """Whether a folder is in this format, whatever its version."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vit_export" in config


def spec_in(folder: Path | str, digest: str) -> ViTSpec | None:
    """Architecture of the export with this digest in a folder, whose tensors are not read; None where there is none."""
    try:
        own = json.loads(read_regular(Path(folder) / "config.json", MAX_CONFIG))["vit_export"]
        return ViTSpec(**own["spec"]) if own["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checked_fingerprint(stored: Any) -> Fingerprint:
    """ValueError unless `stored` has the form that fingerprint() gives."""
    points = stored.values() if isinstance(stored, dict) else [None]
    for point in points:
        numbers = [point["mean"], point["std"], *point["probes"]] if isinstance(point, dict) else []
        if len(numbers) != 2 + PROBES or not all(isinstance(number, float) for number in numbers):
            raise TypeError("malformed fingerprint")
    return stored


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or import the export again") from error
