"""Encoders of the published recipes, and the two small ones on which things are tried."""

from dataclasses import replace

from checkpoints.spec import ViTSpec

_PLAIN = dict(patch_size=16, image_size=224)
VIT_S = ViTSpec(architecture="vit_small_patch16_224", width=384, depth=12, heads=6, mlp_hidden=1536, **_PLAIN)
VIT_M = ViTSpec(architecture="vit_base_patch16_224", width=512, depth=12, heads=8, mlp_hidden=2048, **_PLAIN)  # LUT's
VIT_B = ViTSpec(architecture="vit_base_patch16_224", width=768, depth=12, heads=12, mlp_hidden=3072, **_PLAIN)
VIT_L = ViTSpec(architecture="vit_large_patch16_224", width=1024, depth=24, heads=16, mlp_hidden=4096, **_PLAIN)
VIT_H = ViTSpec(
    architecture="vit_huge_patch14_224",
    image_size=224,
    patch_size=14,
    width=1280,
    depth=32,
    heads=16,
    mlp_hidden=5120,
)

# 8 x 8 patches of CIFAR-10's images, and of enlarged digits: for two cores.
VIT_32PX = replace(VIT_S, image_size=32, patch_size=4, width=128, depth=4, heads=4, mlp_hidden=512)
# 4 x 4 patches of scikit-learn's digits: for tests and the demo.
VIT_SMOKE = replace(VIT_S, image_size=16, patch_size=4, width=64, depth=4, heads=4, mlp_hidden=256)
SINCOS = dict(position="sincos_column_first", position_resize="bicubic")
SINCOS_ROWS = SINCOS | dict(position="sincos_row_first")  # MoCo-v3's and CAE's
# SimMIM's, BEiT's and data2vec's trunk: positions by a shared relative bias alone, layer scale.
RELATIVE = dict(
    architecture="beit_base_patch16_224", layer_scale=True, position="none", class_position=False,
    relative_position="shared", position_resize="relative_spline", pool="avg",
)  # fmt: skip
