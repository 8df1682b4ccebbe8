"""timm: any VisionTransformer or Beit by name (`timm:NAME`, `hf-hub:ID`, `local-dir:FOLDER`) or file (`timm:PATH`).

Nothing is downloaded unless the reference names the hub or a pretrained timm model. Weights of files, folders and hub
repositories go through reading.py like every foreign file; those of timm's own names are fetched and read by timm.
A file is a state dict, alone or as timm's train.py saves it; its head count and image statistics are the user's to say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import timm
import torch
from huggingface_hub import constants, get_session, hf_hub_download, list_repo_files
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer

from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.importing import TRUNK, Branch, Conversion, plain_vit, relative_vit
from checkpoints.reading import ForeignFile, read_foreign
from checkpoints.spec import Preparation, ViTSpec

SOURCE = "huggingface/pytorch-image-models 1.0.31"
BRANCHES = {"model": ("", "state_dict."), "ema": ("state_dict_ema.",)}
CLASSIFIER = ("head.weight", "head.bias")
DROPPED = {
    r"(state_dict(_ema)?\.)?head\.(weight|bias)": "classifier",
    r"attn_pool\..*": "pooling head",
}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # timm's order of preference, models/_hub.py:262-303
AGREEMENT = 1e-5  # of the largest value, in float32


@dataclass(frozen=True)
class TimmModel(ForeignFile):
    """A timm model laid out like a file, with the facts that timm knows of it and what it computes."""

    spec: ViTSpec
    preparation: Preparation
    tokens: torch.Tensor  # forward_features of the synthetic image, (1, P+L, D)


def recognise(file: ForeignFile) -> bool:
    """A plain ViT with a classifier, at the root or under `state_dict`. Without one it could be of many sources."""
    for prefix in BRANCHES["model"]:
        names = {name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)}
        if names >= {*CLASSIFIER, "patch_embed.proj.weight"}:
            return all(TRUNK.fullmatch(name) for name in names if name not in CLASSIFIER)
    return False


def open_model(reference: str) -> TimmModel:
    """The model that timm calls `reference`, with its pretrained weights. ValueError says what cannot be had."""
    kind, _, place = reference.partition(":")
    try:
        if kind == "local-dir":
            model = _filled(reference, Path(place) / _in_folder(place))
        else:
            with cache_alone_if_unreachable():
                if kind == "hf-hub":
                    model = _filled(reference, _from_hub(place))
                else:
                    model = timm.create_model(reference, pretrained=True)
    except (RuntimeError, OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"timm cannot load {reference!r}: {reason}") from error
    model.eval()
    if type(model) not in (VisionTransformer, Beit):
        raise ValueError(f"{reference} is a {type(model).__name__}; timm's VisionTransformer and Beit can be imported")
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    spec = _spec(model, reference)
    with torch.inference_mode():
        tokens = model.forward_features(synthetic_image(spec.image_size).float())
    return TimmModel(
        path=Path(reference),
        sha256=digest_of_tensors(tensors),
        tensors=tensors,
        facts={"licence": model.pretrained_cfg.get("license")},
        spec=spec,
        preparation=_preparation(model),
        tokens=tokens.clone(),
    )


@contextmanager
def cache_alone_if_unreachable() -> Iterator[None]:
    """Where there is no way to the hub, only what its cache holds is taken: its client would try for minutes.

    Raises ConnectionError for what is not there.
    """
    if constants.HF_HUB_OFFLINE or _is_reachable():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"there is no connection to {constants.ENDPOINT}, and its cache {constants.HF_HUB_CACHE} does not hold the "
            "weights; connect, or name a file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of any type: they are those of the hub's own client
        return False
    return True


def _filled(reference: str, weights: Path) -> torch.nn.Module:
    model = timm.create_model(reference, pretrained=False)
    model.load_state_dict(read_foreign(weights).tensors, strict=True)
    return model


def _in_folder(folder: str) -> str:
    found = next((name for name in WEIGHTS if (Path(folder) / name).exists()), None)
    if found is None:
        raise ValueError(f"there is no {' or '.join(WEIGHTS)} in {folder}")
    return found


def _from_hub(repository: str) -> Path:
    """Download the weights of a hub repository, `user/name` or `user/name@revision`."""
    name, _, revision = repository.partition("@")
    files = list_repo_files(name, revision=revision or None)
    found = next((weights for weights in WEIGHTS if weights in files), None)
    if found is None:
        raise ValueError(f"there is no {' or '.join(WEIGHTS)} in the repository")
    return Path(hf_hub_download(name, found, revision=revision or None))


def convert(branch: Branch) -> Conversion:
    tensors = branch.take_trunk()
    if isinstance(branch.file, TimmModel):
        return Conversion(spec=branch.file.spec, tensors=tensors, preparation=branch.file.preparation)
    if branch.options.statistics is None:
        raise ValueError(
            f"{branch.file.path}: no tensor tells the image statistics, which differ between timm's models; use bench "
            "import with --statistics imagenet (as DeiT) or half (as timm's own ImageNet-21k weights)"
        )
    return Conversion(spec=_spec_of_file(branch, tensors), tensors=tensors)


def _spec_of_file(branch: Branch, tensors: dict[str, torch.Tensor]) -> ViTSpec:
    """Sizes and switches as far as tensors show them; for the others, timm's defaults."""
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        return relative_vit(branch, tensors)
    class_token, rows = "cls_token" in tensors, tensors["pos_embed"].shape[1] if "pos_embed" in tensors else 0
    return plain_vit(
        branch,
        tensors,
        class_token=class_token,
        class_position=class_token and isqrt(rows) ** 2 != rows,  # no_embed_class: positions of patches alone
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        position_resize="bicubic_antialias",
        pool="cls" if class_token else "avg",
    )


def check(export: ViTExport, file: ForeignFile) -> None:
    """ValueError unless our network computes what timm's did: a model may have settings that no tensor shows."""
    if not isinstance(file, TimmModel):
        return  # a state dict alone can be compared with nothing
    with torch.inference_mode():
        ours = export.build()(synthetic_image(export.spec.image_size).float())[0]
    worst = (ours - file.tokens).abs().max() / file.tokens.abs().max()
    if not worst < AGREEMENT:
        raise ValueError(
            f"{file.path}: features differ from timm's by {worst:.2g}: it has settings beyond those of "
            f"{export.spec.architecture} (another activation, say), which an export cannot carry"
        )


def _spec(model: VisionTransformer | Beit, reference: str) -> ViTSpec:
    height, width = model.patch_embed.img_size
    patch, across = model.patch_embed.patch_size
    if height != width or patch != across:
        raise ValueError(f"{reference}: only square images and patches can be imported, not {height} x {width} px")
    block, beit = model.blocks[0], isinstance(model, Beit)
    normed = not isinstance(model.norm, torch.nn.Identity)
    pooled = not isinstance(model.fc_norm, torch.nn.Identity)
    class_token = model.cls_token is not None
    rows = 0 if model.pos_embed is None else model.pos_embed.shape[1] - model.patch_embed.num_patches
    relative = "none"
    if beit:
        relative = "shared" if model.rel_pos_bias is not None else "per_block"
    return ViTSpec(
        architecture=model.pretrained_cfg["architecture"],
        image_size=height,
        patch_size=patch,
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        mlp_hidden=block.mlp.fc1.out_features,
        class_token=class_token,
        registers=getattr(model, "num_reg_tokens", 0),
        qkv_bias=block.attn.qkv.bias is not None or getattr(block.attn, "q_bias", None) is not None,
        layer_scale=getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma"),
        norm_eps=block.norm1.eps,
        position="none" if model.pos_embed is None else "learned",
        class_position=rows > 0,
        relative_position=relative,
        position_resize="relative_spline" if beit else "bicubic_antialias",
        final_norm="all" if normed else "pooled" if pooled else "none",
        pool="cls" if class_token and model.global_pool in ("token", "", "map") else "avg",
    )


def _preparation(model: VisionTransformer | Beit) -> Preparation:
    given = model.pretrained_cfg
    return Preparation(
        mean=tuple(given["mean"]), std=tuple(given["std"]), interpolation=given["interpolation"], crop=given["crop_pct"]
    )
