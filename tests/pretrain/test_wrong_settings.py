"""Settings and encoders that a method cannot be trained with are refused by name and value."""

import math
from dataclasses import fields, replace
from typing import Any, Literal, get_origin, get_type_hints

import pytest
import torch
from refusals import refusal

from checkpoints.vit import skip_init
from engine.extensions import load_extension, source_files
from pretrain.methods.extrema import AVERAGE, CLASS_ATTENTION, CLASS_TOKEN
from pretrain.recipe import RELATIVE, SINCOS, VIT_SMOKE

METHODS = list(source_files("methods"))
# The first is unused without local crops, which the smoke recipes do not have; the second may be empty.
LESS_STRICT = {"local_size", "projector_hidden"}
MASKS = dict(num_mask_patches=[16, 0], max_mask_patches_per_block=[0], min_mask_patches_per_block=[17])

# Values that are refused in addition to those that every setting refuses (below).
REFUSED: dict[str, dict[str, list]] = {
    "beit": {**MASKS, **dict(codes=[1], layer_scale_start=[0.0], drop_path=[1.0])},
    "byol": dict(projector_width=[0], teacher_momentum=[1.5], blur=[(0.5, 2.0)], crop_scale=[(0.5, 0.2)]),
    "cae": dict(codes=[1], num_mask_patches=[16], decoder_width=[18], decoder_heads=[3], regressor_depth=[0])
    | dict(decoder_depth=[0], target_momentum=[1.1], layer_scale_start=[0.0], drop_path=[1.0], crop_scale=[(0.5, 0.1)]),
    "can": dict(mask_ratio=[1.0], noise_dims=[7, 2], projector_layers=[0], projector_width=[0], temperature=[0.0])
    | dict(decoder_heads=[3], crop_scale=[(0.5, 0.2)]),
    "data2vec": {**MASKS, **dict(target_layers=[(1, 4), (-1,)], l1_beta=[0.0], ema_decay=[1.5], attn_drop=[1.0])}
    | dict(layer_scale_start=[0.0], drop_path=[1.0]),
    "dinov2": dict(masked_crops=[3], mask_ratio=[(0.5, 0.1)], patch_prototypes=[0], blur_kernel=[4, -1])
    | dict(koleo_images=[1]),
    "dino": dict(prototypes=[0], head_layers=[0], teacher_temperature=[0.0], teacher_momentum=[1.5], drop_path=[1.0])
    | dict(blur=[(0.5, 2.0, 0.5), (0.5, 0.5)], local_scale=[(0.4, 0.05)]),
    "extrema": dict(masks=[6, 0], mask_ratio=[0.95, 1.0, -0.1], crop_scale=[(0.0, 1.0)], temperature=[0.0])
    | dict(teacher_momentum=[1.5], drop_path=[1.0], projector_hidden=[0], projector_width=[0]),
    "ibot": dict(mask_ratios=[(0.3,), (0.0, 1.2)], patch_temperature=[0.0]),
    "ijepa": dict(predictor_width=[30], target_blocks=[0], target_scale=[(0.3, 0.2)], min_keep=[30]),
    "lejepa": dict(sigreg_weight=[1.5], projector_hidden=[(0,)], points=[1], t_max=[0.0], directions=[0])
    | dict(interpolation=["lanczos"], blur_kernel=[2]),
    "lut": dict(mask_ratio=[0.4, 1.0], decoder_heads=[3], crop_padding=[16], head_hidden=[0], teacher_momentum=[1.5]),
    "mae": dict(mask_ratio=[0.0, 0.95, 1.0], crop_scale=[(0.5, 0.2)], colour_jitter=[1.5], decoder_depth=[0])
    | dict(decoder_width=[18], decoder_heads=[3]),
    "maskfeat": dict(mask_ratio=[0.0, 1.0], hog_cell=[3], hog_bins=[0], hog_window=[5, 1], crop_scale=[(0.0, 1.0)]),
    "moca": dict(image_weight=[1.5], teacher_momentum=[2.0], kappa=[0.0], crop_scale=[(0.5, 0.2)], blur=[(2.0, 0.0)])
    | dict(early_layers=[(4,)], new_words=[5], border=[2], inv_delta=[0.0], mask_ratios=[(0.5,), (0.99, 0.75)])
    | dict(decoder_heads=[0, 5], decoder_width=[0, 30]),
    "mocov3": dict(temperature=[0.0]),
    "msn": dict(focal_size=[16, 6], random_views=[0], mask_ratio=[0.99, 1.0], temperature=[0.0], sharpening=[0.0])
    | dict(random_scale=[(1.0, 0.3)]),
    "mst": dict(mask_chance=[1.5], low_fraction=[0.0, 0.05], decoder_width=[0]),
    "nepa": dict(rescale=[0.5]),
    "simdino": dict(eps=[0.0], covariance_images=[-1]),
    "simmim": dict(mask_ratio=[0.0, 0.99], mask_patch=[16, 6, 12, 0], head_depth=[0], drop_path=[1.0])
    | dict(layer_scale_start=[0.0], crop_scale=[(0.0, 1.0)]),
    "supervised": dict(policy=["v0"], repeated=[0], smoothing=[1.0], crop_scale=[(0.0, 1.0)]),
}

# Settings that contradict each other, and words of the message.
CONTRADICTIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("beit", dict(num_mask_patches=12, min_mask_patches_per_block=10), ("min_mask_patches_per_block=10",)),
    ("beit", dict(num_mask_patches=3, min_mask_patches_per_block=4), ("num_mask_patches=3",)),
    ("beit", dict(max_mask_patches_per_block=1, min_mask_patches_per_block=2), ("max_mask_patches_per_block=1",)),
    ("capi", dict(predicted_share=0.05), ("predicted_share=0.05", "10 hidden", "0.1")),
    ("capi", dict(mask_ratio=0.01), ("predicted_share=0.5", "0 hidden")),
    ("cae", dict(decoder_width=18, decoder_heads=2), ("decoder_heads=2", "multiple of 4")),
    ("dino", dict(local_crops=2, local_size=6), ("local_size=6", "patch_size=4")),
    ("dino", dict(local_crops=2, local_size=0), ("local_size=0",)),
    ("dinov2", dict(cls_weight=0.0, patch_weight=0.0), ("cls_weight=0", "patch_weight=0")),
    ("dinov2", dict(gram_weight=1.0, gram_size=10), ("gram_size=10",)),
    ("extrema", dict(masks=5, mask_ratio=0.75), ("masks=5", "16", "masks=4")),
    ("extrema", dict(mask_ratio=0.0, masks=2), ("masks=2", "16")),
    ("extrema", dict(colour="shared", crop="independent"), ("colour='shared'", "crop='independent'")),
    ("ibot", dict(mask_ratios=(0.1, 0.3), mask_spreads=(0.2, 0.2)), ("0.1", "0.2")),
    ("ibot", dict(cls_weight=0.0, patch_weight=0.0), ("cls_weight", "patch_weight")),
    ("lejepa", dict(global_crops=1, local_crops=0), ("global_crops=1",)),
    ("lejepa", dict(local_crops=1, local_size=10), ("local_size=10",)),
    ("lejepa", dict(local_crops=1, local_size=8, blur_kernel=23), ("local_size=8", "blur_kernel=23", "11")),
    ("dinov2", dict(local_crops=1, local_size=4, blur_kernel=9), ("local_size=4", "blur_kernel=9")),
    ("lut", dict(w_mim=0.0, w_bc=0.0), ("w_mim=0", "w_bc=0")),
    ("lut", dict(layer_scale_start=3.0), ("layer_scale_start=3.0", "base='simmim'", "'mae'", "0.1")),
    ("lut", dict(mask_patch=4), ("mask_patch=4", "base='simmim'")),
    ("lut", dict(drop_path=0.0), ("drop_path=0.0", "base='simmim'")),
    ("lut", dict(seen="all"), ("seen=all", "base='simmim'")),
    ("lut:smoke_simmim", dict(norm_pixels=False), ("norm_pixels=False", "base='mae'", "'simmim'")),
    ("lut:smoke_simmim", dict(decoder_depth=2), ("decoder_depth=2", "base='mae'")),
    ("lut:smoke_simmim", dict(mask_ratio=0.4), ("mask_ratio=0.4", "9 of 16")),
    ("lut:smoke_simmim", dict(mask_patch=6), ("mask_patch=6",)),
    ("lut:smoke_simmim", dict(layer_scale_start=-3.0), ("layer_scale_start=-3.0",)),
    ("lut:smoke_simmim", dict(drop_path=1.0), ("drop_path=1.0",)),
    ("mae", dict(sampling="grid", mask_ratio=0.5), ("mask_ratio=0.5", "sampling='grid'")),
    ("moca", dict(mask_ratios=(), decoder_mask_ratios=()), ("mask_ratios=()",)),
    ("moca", dict(mask_ratios=(0.3, 0.75)), ("mask_ratios=(0.3, 0.75)", "decoder_mask_ratios")),
    ("moca", dict(mask_ratios=(0.5, 0.5), decoder_mask_ratios=(0.25, 0.25)), ("complementary=False",)),
    ("mst", dict(inst_weight=0.0, restore_weight=0.0), ("inst_weight", "restore_weight")),
    ("mst", dict(inst_weight=0.0, local_crops=3), ("local_crops=3",)),
    ("mst", dict(sampling="none", restore="masked"), ("restore=masked", "sampling=none")),
]

# Encoders that a method is not defined for, and words of the message.
PLAIN = {name: getattr(VIT_SMOKE, name) for name in RELATIVE} | SINCOS
ENCODERS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("beit", PLAIN, ("relative_position=shared", "relative_position=none")),
    ("capi", dict(rotary="centred", query_norm=True), ("rotary=unit", "query_norm=False")),
    ("capi", dict(registers=6), ("registers=6", "multiple of 4")),
    ("cae", SINCOS, ("position=sincos_row_first", "position=sincos_column_first")),
    ("data2vec", PLAIN, ("relative_position=shared", "relative_position=none")),
    ("dino", dict(position="sincos_column_first"), ("position=learned",)),
    ("dino", dict(final_norm="none"), ("final_norm=all", "final_norm=none")),
    ("extrema", dict(final_norm="all"), ("final_norm='all'", "class_attention=2")),
    ("extrema", CLASS_TOKEN | dict(class_position=True), ("class_position=True", "class_position=False")),
    ("extrema", AVERAGE | dict(final_norm="all"), ("final_norm=pooled",)),
    ("extrema", dict(position="learned"), ("position=sincos_column_first",)),
    ("extrema", dict(class_attention=-1), ("class_attention=-1",)),
    ("extrema", dict(registers=-1), ("registers=-1",)),
    ("lut", RELATIVE, ("position=sincos_column_first", "position=none")),
    ("lut:smoke_simmim", PLAIN, ("relative_position='shared'",)),
    ("mae", dict(position="learned"), ("position=sincos_column_first", "position=learned")),
    ("mae", dict(class_token=False, class_position=False, pool="avg"), ("class_token=True", "class_token=False")),
    ("maskfeat", dict(position="none", class_position=False), ("position=learned", "position=none")),
    ("maskfeat", dict(registers=1), ("registers=0", "registers=1")),
    ("moca", CLASS_ATTENTION, ("class_attention=0", "class_attention=2")),
    ("moca", dict(final_norm="pooled"), ("final_norm=all", "final_norm=pooled")),
    ("moca", RELATIVE, ("relative_position=none", "relative_position=shared")),
    ("mocov3", dict(final_norm="none"), ("final_norm=all",)),
    ("mocov3", RELATIVE, ("relative_position=none", "relative_position=shared")),
    ("msn", dict(position="sincos_column_first"), ("position=learned",)),
    ("nepa", dict(registers=1), ("registers=0", "registers=1")),
    ("simmim", PLAIN, ("relative_position='shared'",)),
]


def method_refusal(name: str, settings: dict[str, Any] | None = None, spec: dict[str, Any] | None = None) -> str:
    """Message with which a method refuses changes of its smoke recipe, or of RECIPE in "METHOD:RECIPE"."""
    name, _, key = name.partition(":")
    module = load_extension("methods", name)
    recipe = module.RECIPES[key or "smoke"]

    def build() -> None:
        module.METHOD(replace(recipe.spec, **spec or {}), replace(recipe.settings, **settings or {}))

    with torch.device("meta"), skip_init():
        return refusal(build)


def impossible_values(value: Any, hint: Any) -> list:
    """Values that a setting with this value and annotation cannot have."""
    if get_origin(hint) is Literal:
        return ["neither"]
    if isinstance(value, bool | str):
        return []
    if isinstance(value, tuple):
        return [(), *((*value[:-1], wrong) for wrong in impossible_values(value[-1], None))]
    return [-1.0, math.nan, math.inf] if isinstance(value, float) else [-1]


@pytest.mark.parametrize("name", METHODS)
def test_values_out_of_range_are_refused(name):
    """Unknown choices, negative and infinite numbers, and what REFUSED lists. nan passes most comparisons."""
    settings = load_extension("methods", name).RECIPES["smoke"].settings
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        for wrong in impossible_values(getattr(settings, field.name), hints[field.name]):
            if field.name not in LESS_STRICT:
                assert field.name in method_refusal(name, {field.name: wrong}), wrong
    for field, values in REFUSED.get(name, {}).items():
        for wrong in values:
            message = method_refusal(name, {field: wrong})
            assert f"{field}={wrong!r}" in message or f"{field}={wrong}" in message, message


def test_contradictory_settings_are_refused():
    for name, changes, words in CONTRADICTIONS:
        message = method_refusal(name, changes)
        assert all(word in message for word in words), (name, changes, message)


def test_encoders_that_do_not_fit_the_method_are_refused():
    for name, spec, words in ENCODERS:
        message = method_refusal(name, spec=spec)
        assert all(word in message for word in words), (name, spec, message)


@pytest.mark.parametrize(
    ("name", "spec", "settings", "words"),
    [
        ("beit", {}, dict(tokenizer="nowhere.pkl"), ("nowhere.pkl",)),
        ("dino", dict(position_resize="fixed"), dict(local_crops=2), ("position_resize=fixed",)),
        ("mae", dict(image_size=12), dict(sampling="grid"), ("3 x 3",)),
        ("mst", dict(image_size=48, patch_size=12), dict(local_size=24), ("patch_size=12", "linear")),
    ],
)
def test_encoders_that_do_not_fit_the_settings_are_refused(name, spec, settings, words):
    message = method_refusal(name, settings, spec)
    assert all(word in message for word in words), message
