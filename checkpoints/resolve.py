"""Load a checkpoint by its reference, as users type it; or make one from a module in memory (`of_module`).

FOLDER            an export, a timm folder, or a folder of Hugging Face transformers
timm:NAME         a pretrained timm model; likewise hf-hub:ID and local-dir:FOLDER (timm:PATH is a file)
IMPORTER:PATH     a foreign file, read by the importer of that name
PATH              a foreign file, whose importer is found from its tensors; or a folder of torch.distributed.checkpoint
                  or of a checkpoint in several files with an index
pixels:SIDE       no network: the image itself, resized to SIDE pixels
module:PACKAGE:FUNCTION   a network of the user's own, only for frozen evaluation; its code is run
"""

import copy
import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from torch import nn

from checkpoints.export import ViTExport, is_export
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
from checkpoints.recognition import unsupported_reason, video_reason
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.errors import option
from engine.extensions import extension_of, load_extension, load_extensions, warn_of

MAX_SIDE = 48  # of raw pixels: 6912 values per image, nine times those of a ViT-B; 35 GB for ImageNet


def pixels(side: int) -> ViTExport:
    """Raw pixels as an export, whose feature is the normalised image (3, S, S), resized to S pixels and flattened.

    This is the baseline of every leaderboard, evaluated by the same code as networks: the whole image is one patch, and
    its embedding the D = 3 S S pixels, channel by channel. There are no weights. Raises ValueError unless S is 1 to
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
    """The checkpoint that a reference names, for frozen evaluation.

    Accepts the references of `load`, and module:PACKAGE:FUNCTION, a network of the user's own, whose code is run.
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
    one-line ValueError for options that do not apply and for modules that the importers or `held_network` refuse, or
    that compute other features than their configuration says.
    """
    while isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        network = network.module
    network = getattr(network, "_orig_mod", network)
    if forward is None and isinstance(network, ViT):
        facts = {} if options.statistics else {"assumed": [ASSUMED_STATISTICS]}
        return ViTExport.from_vit(copy.deepcopy(network).cpu().float().eval(), options.preparation, facts)
    importer = load_extension("importers", "transformers")
    model_type = getattr(getattr(network, "config", None), "model_type", None)
    if forward is None and model_type in importer.KINDS and hasattr(network, "base_model_prefix"):
        export = import_file(importer, importer.file_of(network), options)
        importer.compare_features(export, network)
        return export
    importer = load_extension("importers", "timm")
    if forward is None and importer.is_importable(network):
        name = network.pretrained_cfg["architecture"]
        model = importer.timm_model(copy.deepcopy(network).cpu().float(), name, options.image_size)
        if options.statistics:
            mean, std = options.preparation.mean, options.preparation.std
            model = replace(model, preparation=replace(model.preparation, mean=mean, std=std))
        return import_file(importer, model, replace(options, statistics=None))
    if replace(options, image_size=None, statistics=None) != ImportOptions():
        raise ValueError(
            f"{type(network).__name__} is evaluated frozen: leave all options of imports but {option('image_size')} "
            f"and "
            f"{option('statistics')}"
        )
    return held_network(network, forward, options.image_size, options.preparation if options.statistics else None)


def load(reference: str | Path, options: ImportOptions | None = None) -> ViTExport:
    """The export that a reference names, imported if necessary. Raises a one-line ValueError on failure."""
    options = options or ImportOptions()
    reference = str(reference)
    scheme, colon, rest = reference.partition(":")
    is_file = False
    if scheme == "timm" and rest.partition(":")[0] not in TIMM_SCHEMES:  # not timm:hf-hub:ID
        path = Path(rest)
        is_file = "/" in rest or path.is_file() or is_distributed(path) or is_in_parts(path)
    if colon and scheme in TIMM_SCHEMES and not is_file:
        return _load_timm(rest if scheme == "timm" else reference, options)
    if colon and scheme == "pixels":
        _check_no_options(scheme, options)
        return pixels(int(rest) if rest.isdecimal() else 0)
    if colon and scheme == SCHEME:
        raise ValueError(f"{reference} is a network of your own; frozen evaluation alone takes it, this needs a ViT")
    if colon and scheme in file_importers():
        return import_file(load_extension("importers", scheme), _read_file(Path(rest).expanduser()), options)
    path = Path(reference).expanduser()
    if path.is_dir() and is_transformers(path):
        return import_file(load_extension("importers", "transformers"), read_folder(path), options)
    if path.is_dir() and (path / "config.json").exists():
        return _load_export(path, options) if is_export(path) else _load_timm(f"local-dir:{path.resolve()}", options)
    check_reference(reference)
    file = _read_file(path)
    return import_file(load_extension("importers", detect(file)), file, options)


def _check_no_options(scheme: str, options: ImportOptions | None) -> None:
    """Raise ValueError if there are options for imports, which do not apply to a scheme."""
    if (options or ImportOptions()) != ImportOptions():
        raise ValueError(f"{scheme}: names no file, so that options of imports do not apply; leave them out")


def _read_file(path: Path) -> ForeignFile:
    """A foreign checkpoint: a file, or a folder that holds it in several files."""
    if path.is_dir() and is_transformers(path):
        return read_folder(path)
    if path.is_dir() and is_distributed(path):
        return read_distributed(path)
    return read_parts(path) if is_in_parts(path) else read_foreign(path)


def detect(file: ForeignFile) -> str:
    """Key of the only importer that recognises a file, or the only one of these that knows all its tensors.

    Raises ValueError if there is none, or more than one.
    """
    importers = load_extensions("importers")
    keys = [key for key, importer in importers.items() if _recognises(importer, file)]
    if len(keys) > 1:
        keys = [key for key in keys if not leaves_unknown_tensors(importers[key], file)] or keys
    if not keys and all(name.startswith(("method.", "optimizer.")) for name in file.tensors):
        run = file.path.parent.parent
        raise ValueError(
            f"{file.path} is a training state; bench run and bench inspect take {run}, the training's "
            f"folder, and `bench import {run} --out FOLDER` writes its encoder"
        )
    if not keys and (reason := video_reason(file.tensors) or unsupported_reason(file.tensors)):
        raise ValueError(f"{file.path}: {reason}")
    if not keys:
        examples = ", ".join(list(file.tensors)[:3])
        advice = prefix_advice("IMPORTER", file, importers.values()) or (
            f"say IMPORTER:{file.path} with one of {', '.join(file_importers())}; a network that is no ViT is "
            "evaluated frozen, as module:PACKAGE:FUNCTION (docs/your-own-network.md)"
        )
        raise ValueError(
            f"{file.path}: no importer recognises its tensors ({examples}, ...); if you know the format, {advice}"
        )
    if len(keys) > 1:
        choices = " or ".join(shlex.quote(f"{key}:{file.path}") for key in keys)
        raise ValueError(f"{file.path} could come from {' or '.join(keys)}: say {choices}")
    return keys[0]


def _recognises(importer: ModuleType, file: ForeignFile) -> bool:
    """Whether an importer recognises a file. False, with a warning, if a plugin's recognise() fails."""
    extension = extension_of("importers", importer)
    try:
        return bool(importer.recognise(file))
    except Exception as error:
        if not extension.plugin:
            raise
        warn_of({extension: f"recognise() fails: {type(error).__name__}: {error}"})
        return False


def _load_export(folder: Path, options: ImportOptions) -> ViTExport:
    """The export in a folder, at the requested image size. Raises ValueError for any other option."""
    export = ViTExport.load(folder)
    if replace(options, image_size=None) != ImportOptions():
        raise ValueError(f"{folder} is an export already: only its image size can change")
    if options.image_size in (None, export.spec.image_size):
        return export
    return export.at_size(options.image_size)


def _load_timm(reference: str, options: ImportOptions) -> ViTExport:
    """The export of a timm model (NAME, hf-hub:ID, local-dir:FOLDER), or of a transformers repository hf-hub:ID."""
    scheme, colon, place = reference.partition(":")
    if colon and scheme == "hf-hub" and (folder := transformers_snapshot(place)):
        return import_file(load_extension("importers", "transformers"), read_folder(folder), options)
    importer = load_extension("importers", "timm")
    return import_file(importer, importer.open_model(reference, options.image_size), options)
