"""Resolve a checkpoint reference, as a user types it, to a ViTExport.

FOLDER            an export, a timm folder, or a folder of Hugging Face transformers
timm:NAME         a pretrained timm model; hf-hub:ID and local-dir:FOLDER likewise (timm:PATH is a file)
IMPORTER:PATH     a foreign file, read by the importer of that name
PATH              a foreign file whose format is found from its keys; a folder of torch.distributed.checkpoint, or of
                  a file in several parts with their index
pixels:SIDE       no network: the image itself, resized to SIDE pixels
module:PACKAGE:FUNCTION   a network of the user's own, for frozen evaluation alone; its code runs

And from a module that a Python program holds: `of_module`.
"""

import copy
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from torch import nn

from checkpoints.dotted import split
from checkpoints.export import ViTExport, digest_of_tensors, is_export
from checkpoints.folders import (
    is_distributed,
    is_in_parts,
    is_transformers,
    read_distributed,
    read_folder,
    read_parts,
    transformers_snapshot,
)
from checkpoints.frozen import SCHEME, Forward, FrozenExport, held_network, own_network
from checkpoints.import_options import TIMM_SCHEMES, ImportOptions, check_reference, file_importers
from checkpoints.importing import ASSUMED_STATISTICS, import_file, leaves_unknown_tensors, prefix_advice
from checkpoints.reading import ForeignFile, read_foreign
from checkpoints.recognition import unsupported_reason
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.extensions import extension_of, load_extension, load_extensions, warn_of

MAX_SIDE = 48  # 6912 values an image, nine times a ViT-B's: 35 GB for ImageNet


def pixels(side: int) -> ViTExport:
    """Raw pixels as an export: its feature is the normalised image (3, S, S), resized to S and flattened.

    The baseline of every leaderboard, evaluated by the same code as a network: the whole image is one patch, whose
    embedding is its D = 3 S S pixels, channel by channel; there are no weights. ValueError unless the side is 1 to
    MAX_SIDE.
    """
    if not 1 <= side <= MAX_SIDE:
        raise ValueError(f"pixels: give a side of 1 to {MAX_SIDE} pixels, as in pixels:32")
    spec = ViTSpec(
        architecture="pixels",
        image_size=side,
        patch_size=side,
        width=3 * side * side,
        depth=1,
        heads=1,
        mlp_hidden=1,
        class_token=False,
        class_position=False,
        qkv_bias=False,
        position="none",
        position_resize="fixed",
        final_norm="none",
        pool="avg",
    )
    facts = {"name": f"pixels-{side}", "method": "pixels", "recipe": f"{side} px", "licence": "Apache-2.0"}
    return ViTExport.make(spec, Preparation(crop=1.0), {}, facts=facts)


def load_frozen(reference: str | Path, options: ImportOptions | None = None) -> FrozenExport:
    """The checkpoint that a reference names, for evaluation of frozen features.

    Takes all that `load` takes, and module:PACKAGE:FUNCTION, a network of the user's own, whose code is run.
    """
    if not str(reference).startswith(f"{SCHEME}:"):
        return load(reference, options)
    _check_no_options(SCHEME, options)
    return own_network(str(reference))


def of_module(network: nn.Module, options: ImportOptions, forward: Forward | None = None) -> FrozenExport:
    """A checkpoint made from a copy of a module in memory.

    A ViT of timm, of transformers or of this project becomes an export if the importers support it. Any other module,
    and every module that comes with a `forward` to read its features, becomes a frozen network. The module itself is
    not changed; DataParallel, DistributedDataParallel and torch.compile wrappers are removed from the copy. Raises a
    one-line ValueError for options that do not apply and for modules that the importers or `held_network` refuse.
    """
    while isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        network = network.module
    network = getattr(network, "_orig_mod", network)
    kind = getattr(getattr(network, "config", None), "model_type", None)
    if forward is None and isinstance(network, ViT):
        facts = {} if options.statistics else {"assumed": [ASSUMED_STATISTICS]}
        return ViTExport.from_vit(copy.deepcopy(network).cpu().float().eval(), options.preparation, facts)
    if forward is None and kind in load_extension("importers", "transformers").KINDS:
        tensors = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
        facts = split({"config": json.loads(network.config.to_json_string(use_diff=False))})[1]
        file = ForeignFile(Path(type(network).__name__), digest_of_tensors(tensors), tensors, facts)
        return import_file(load_extension("importers", "transformers"), file, options)
    importer = load_extension("importers", "timm")
    if forward is None and importer.is_importable(network):
        plain = copy.deepcopy(network).cpu().float()
        model = importer.timm_model(plain, network.pretrained_cfg["architecture"])
        if options.statistics:
            asked = options.preparation
            model = replace(model, preparation=replace(model.preparation, mean=asked.mean, std=asked.std))
        return import_file(importer, model, replace(options, statistics=None))
    if replace(options, image_size=None, statistics=None) != ImportOptions():
        raise ValueError(
            f"{type(network).__name__} is evaluated frozen: leave all options of imports but --image-size and "
            "--statistics"
        )
    return held_network(network, forward, options.image_size, options.preparation if options.statistics else None)


def load(reference: str | Path, options: ImportOptions | None = None) -> ViTExport:
    """The export that `reference` names, imported if necessary. Raises a one-line ValueError on failure."""
    options = options or ImportOptions()
    reference = str(reference)
    scheme, colon, rest = reference.partition(":")
    of_hub = rest.partition(":")[0] in TIMM_SCHEMES
    is_file = False
    if scheme == "timm" and not of_hub:
        path = Path(rest)
        is_file = "/" in rest or path.is_file() or is_distributed(path) or is_in_parts(path)
    if colon and scheme in TIMM_SCHEMES and not is_file:
        return _from_timm(rest if scheme == "timm" else reference, options)
    if colon and scheme == "pixels":
        _check_no_options(scheme, options)
        return pixels(int(rest) if rest.isdecimal() else 0)
    if colon and scheme == SCHEME:
        raise ValueError(f"{reference} is a network of your own; frozen evaluation alone takes it, this needs a ViT")
    if colon and scheme in file_importers():
        return import_file(load_extension("importers", scheme), _foreign(Path(rest).expanduser()), options)
    path = Path(reference).expanduser()
    if path.is_dir() and is_transformers(path):
        return import_file(load_extension("importers", "transformers"), read_folder(path), options)
    if path.is_dir() and (path / "config.json").exists():
        return _own(path, options) if is_export(path) else _from_timm(f"local-dir:{path.resolve()}", options)
    check_reference(reference)
    file = _foreign(path)
    return import_file(load_extension("importers", detect(file)), file, options)


def _check_no_options(scheme: str, options: ImportOptions | None) -> None:
    if (options or ImportOptions()) != ImportOptions():
        raise ValueError(f"{scheme}: names no file, so that options of imports do not apply; leave them out")


def _foreign(path: Path) -> ForeignFile:
    """Read a foreign file, or a folder that holds one checkpoint in several files."""
    if path.is_dir() and is_transformers(path):
        return read_folder(path)
    if path.is_dir() and is_distributed(path):
        return read_distributed(path)
    return read_parts(path) if is_in_parts(path) else read_foreign(path)


def detect(file: ForeignFile) -> str:
    """Key of the one importer that recognises the file and knows all its tensors. ValueError if none or several do."""
    importers = load_extensions("importers")
    keys = [key for key, importer in importers.items() if _recognises(importer, file)]
    if len(keys) > 1:
        keys = [key for key in keys if not leaves_unknown_tensors(importers[key], file)] or keys
    if not keys and all(name.startswith(("method.", "optimizer.")) for name in file.tensors):
        run = file.path.parent.parent
        raise ValueError(
            f"{file.path} is a training state; bench run and bench inspect take {run}, the training's "
            f"folder, and `bench export {run}` writes its encoder"
        )
    if not keys and (reason := unsupported_reason(file.tensors)):
        raise ValueError(f"{file.path}: {reason}")
    if not keys:
        examples = ", ".join(list(file.tensors)[:3])
        advice = (
            f"say IMPORTER:{file.path} with one of {', '.join(file_importers())}; a network that is no ViT is "
            "evaluated frozen, as module:PACKAGE:FUNCTION (docs/your-own-network.md)"
        )
        raise ValueError(
            f"{file.path}: no importer recognises its tensors ({examples}, ...); if you know the format, "
            f"{prefix_advice('IMPORTER', file) or advice}"
        )
    if len(keys) > 1:
        choices = " or ".join(shlex.quote(f"{key}:{file.path}") for key in keys)
        raise ValueError(f"{file.path} could come from {' or '.join(keys)}: say {choices}")
    return keys[0]


def _recognises(importer: ModuleType, file: ForeignFile) -> bool:
    """Whether an importer recognises the file. False, with a warning, if a plugin's recognise() fails."""
    extension = extension_of("importers", importer)
    try:
        return bool(importer.recognise(file))
    except Exception as error:
        if not extension.plugin:
            raise
        warn_of({extension: f"recognise() fails: {type(error).__name__}: {error}"})
        return False


def _own(folder: Path, options: ImportOptions) -> ViTExport:
    export = ViTExport.load(folder)
    if replace(options, image_size=None) != ImportOptions():
        raise ValueError(f"{folder} is an export already: only its image size can change")
    if options.image_size in (None, export.spec.image_size):
        return export
    return export.at_size(options.image_size)


def _from_timm(reference: str, options: ImportOptions) -> ViTExport:
    kind, colon, place = reference.partition(":")
    if colon and kind == "hf-hub" and (folder := transformers_snapshot(place)):
        return import_file(load_extension("importers", "transformers"), read_folder(folder), options)
    importer = load_extension("importers", "timm")
    return import_file(importer, importer.open_model(reference), options)
