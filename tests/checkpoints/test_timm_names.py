"""Every pretrained ViT-family name of timm is imported with timm's features, or refused as docs/timm.md says.

Networks are timm's architectures in small (32 channels, 2 blocks, 4 x 4 patches) with random parameters.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from random_networks import randomise
from timm.models import save_for_hf
from timm.models.naflexvit import NaFlexVit

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load
from tools.timm_page import description_of, model_without_weights, pretrained_names, spec_or_reason

NAMES = pretrained_names()
PAGE = (Path(__file__).parents[2] / "docs/timm.md").read_text()
ROWS = {
    name: (tags, description) for name, tags, description in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE, re.M)
}
QUICK = (
    "eva02_base_patch14_224",  # SwiGLU with a norm inside, axial positions scaled to another grid
    "eva02_enormous_patch14_clip_224",  # norms after attention and MLP
    "vit_pe_core_base_patch16_224",  # both kinds of positions, an offset, a norm before the blocks, a pooling head
    "vit_small_patch16_rope_mixed_ape_224",
    "vit_huge_plus_patch16_dinov3_qkvb",
    "vit_base_patch16_sapiens2",  # not square, fewer heads of keys, RMS norms, norms of queries and keys
    "vit_mediumd_patch16_rope_reg1_gap_256",  # registers and no class token
    "deit_tiny_distilled_patch16_224",
    "aimv2_large_patch14_224",
    "beit3_base_patch16_224",
    "naflexvit_base_patch16_parfac_gap",  # positions of rows and of columns, registers
    "naflexvit_base_patch16_radio_v3",  # positions resized with aligned corners, no final norm
    "vit_so400m_patch14_siglip_384",  # patches of 14 px leave 6 of 384 px out
)
PLAIN = (bool, int, float, str, tuple, list, type(None))
NAFLEX_SIZE = (64, 48)  # of images, in pixels
SIDES = {"vit_so400m_patch14_siglip_384": 58}


def small_arguments(architecture: str) -> dict:
    """timm's arguments for a small network of the same kind."""
    model = model_without_weights(architecture)
    if isinstance(model, NaFlexVit):
        return dict(num_classes=3, embed_dim=32, depth=2, num_heads=4)
    patch, (rows, columns) = model.patch_embed.patch_size[0], model.patch_embed.grid_size
    size = (4 * patch, 4 * patch if rows == columns else 3 * patch)
    sizes: dict = dict(img_size=SIDES.get(architecture, size), num_classes=3)
    if "sapiens2" in architecture:  # each of its blocks has its own number of key heads
        return sizes | dict(embed_dim=4 * model.blocks[0].attn.num_heads)
    return sizes | dict(embed_dim=32, depth=2, num_heads=4)


def structure(model: torch.nn.Module) -> str:
    """What distinguishes a network's computation: modules, their plain attributes, shapes and buffers."""
    lines = []
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN)}
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
        buffers = {key: value.tolist() for key, value in module.named_buffers(recurse=False) if value is not None}
        lines.append(f"{name} {type(module).__qualname__} {module.extra_repr()} {attributes} {shapes} {buffers}")
    return "\n".join(lines)


def features(model: torch.nn.Module, images: torch.Tensor) -> Iterator[torch.Tensor]:
    """All tokens after timm's last block, and the patches after the first block with the final norm."""
    yield model.forward_features(images)
    yield model.forward_intermediates(images, indices=[0], norm=True, intermediates_only=True, output_fmt="NLC")[0]


checked: set[str] = set()  # structures of compared networks; many names differ only in their sizes


def assert_same_features(architecture: str, folder) -> None:
    """Save timm's network, import and export it, and compare the export's features here and in plain timm."""
    arguments = small_arguments(architecture)
    model = timm.create_model(architecture, **arguments)
    if (model_structure := structure(model)) in checked:
        return
    checked.add(model_structure)
    randomise(model)
    save_for_hf(model, folder / "timm", model_args=arguments, safe_serialization=True)
    options = ImportOptions(image_size=NAFLEX_SIZE) if isinstance(model, NaFlexVit) else ImportOptions()
    load(f"timm:local-dir:{folder / 'timm'}", options).save(folder / "export")
    export = ViTExport.load(folder / "export")
    size = NAFLEX_SIZE if isinstance(model, NaFlexVit) else model.patch_embed.img_size
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covered_images = images[..., : export.spec.size[0], : export.spec.size[1]]
    model.double()
    timm_model = timm.create_model(f"local-dir:{folder / 'export'}", pretrained=True).eval().double()
    assert timm_model.num_classes == 0 and not hasattr(timm_model.head, "weight")
    with torch.no_grad():
        expected = list(features(model, images))
        first, last = export.build().double()(covered_images, layers=(0, -1))
        ours = [last, first[:, export.spec.prefix :]]
        timm_features = list(features(timm_model, covered_images))
    for official, features_here, features_by_timm in zip(expected, ours, timm_features, strict=True):
        assert official.std() > 0.1
        # In float64, up to tables of sines that are float32 by definition: most differ by nothing at all.
        assert (features_here - official).abs().max() < 1e-7 * official.abs().max()
        assert (features_by_timm - official).abs().max() < 1e-7 * official.abs().max()


@pytest.mark.parametrize("architecture", QUICK)
def test_selected_architectures_have_timms_features(architecture, tmp_path):
    assert_same_features(architecture, tmp_path)


def test_the_documentation_lists_every_name():
    """When this fails, run `python -m tools.timm_page`."""
    assert {name: [tag.strip("`") for tag in tags.split(", ")] for name, (tags, _) in ROWS.items()} == NAMES


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", NAMES)
def test_every_architecture_is_as_the_documentation_says(architecture, tmp_path):
    description = ROWS[architecture][1]
    spec = spec_or_reason(architecture)
    if isinstance(spec, str):  # the reason why it cannot be imported
        assert spec == description
    else:
        assert description_of(spec) == description
        assert_same_features(architecture, tmp_path)
