"""What the official codes' steps cost, in floating-point operations of an image, by arithmetic from their structure.

For methods whose official step was not timed on this kind of machine: networks, tokens and heads are those of the files
named, at the sizes of `pretraining.py`: a ViT-S/16 at 224 px. Twice the multiply-adds of matrix products, convolutions
and attention; a backward pass costs two forward passes. Norms, softmax, masks, optimisers and moving averages are left
out, as torch's counter leaves them out. N tokens, D width.
"""

from itertools import pairwise

WIDTH, DEPTH, PATCHES, PIXELS = 384, 12, 196, 3 * 16 * 16
WHOLE, LOCAL = 1 + PATCHES, 1 + 36  # tokens of a view of 224 and of one of 96 px
TRAINED, FROZEN = 3, 1  # passes: forward and twice as much back, or forward alone


def blocks(tokens: int, width: int = WIDTH, depth: int = DEPTH, passes: int = TRAINED) -> float:
    """Blocks with an MLP of four times the width."""
    return passes * depth * (24 * tokens * width**2 + 4 * tokens**2 * width)


def linear(rows: int, *widths: int, passes: int = TRAINED) -> float:
    """Linear layers one after the other."""
    return passes * sum(2 * rows * inside * outside for inside, outside in pairwise(widths))


def encoder(tokens: int, passes: int = TRAINED, patches: int = PATCHES) -> float:
    """A ViT-S that embeds `patches` and sees `tokens`; no gradient goes back to the image."""
    return blocks(tokens, passes=passes) + linear(patches, PIXELS, WIDTH, passes=min(passes, 2))


def convolution(side: int, inside: int, outside: int, kernel: int) -> float:
    return 2 * side**2 * inside * outside * kernel**2


def dalle() -> float:
    """DALL-E's encoder of a picture of 112 px (dall_e/encoder.py:13-93): four groups of two residual blocks."""
    total, side, inside = convolution(112, 3, 256, 7), 112, 256
    for group in range(4):
        outside = 256 << group
        hidden = outside // 4
        for _ in range(2):
            total += convolution(side, inside, hidden, 3) + 2 * convolution(side, hidden, hidden, 3)
            total += convolution(side, hidden, outside, 1)
            total += convolution(side, inside, outside, 1) if inside != outside else 0.0
            inside = outside
        side = side // 2 if group < 3 else side
    return total + convolution(side, inside, 8192, 1)


def codebook() -> float:
    """Distances of the patches of 8 x 8 pixels to 8192 centres: ours, in place of DALL-E's encoder."""
    return linear(PATCHES, 3 * 8 * 8, 8192, passes=FROZEN)


def ibot() -> float:
    """main_ibot.py, models/head.py: one head for the class tokens and all patches of both networks."""
    head = (WIDTH, 2048, 2048, 256, 8192)
    student = 2 * encoder(WHOLE) + 10 * encoder(LOCAL, patches=36) + linear(2 * WHOLE + 10, *head)
    return student + 2 * encoder(WHOLE, FROZEN) + linear(2 * WHOLE, *head, passes=FROZEN)


def msn() -> float:
    """src/msn_train.py, src/deit.py: one target, one anchor without 15 % of its patches, ten small ones."""
    head = (WIDTH, 2048, 2048, 256, 1024)
    anchors = encoder(1 + int(PATCHES * 0.85)) + 10 * encoder(LOCAL, patches=36) + linear(11, *head)
    return anchors + encoder(WHOLE, FROZEN) + linear(1, *head, passes=FROZEN)


def siamese(*projector: int) -> float:
    """moco/builder.py: two views through both networks; the patch embedding is frozen."""
    view = blocks(WHOLE) + blocks(WHOLE, passes=FROZEN) + linear(2 * PATCHES, PIXELS, WIDTH, passes=FROZEN)
    heads = linear(1, *projector) + linear(1, *projector, passes=FROZEN) + linear(1, 256, 4096, 256)
    return 2 * (view + heads)


def beit() -> float:
    """beit/modeling_pretrain.py: logits of the hidden patches alone."""
    return encoder(WHOLE) + linear(75, WIDTH, 8192)


def cae() -> float:
    """models/modeling_cae.py, modeling_cae_helper.py: half of the patches for each encoder; four blocks of 768 in
    the regressor, whose 98 queries meet 196 keys, and in the decoder."""
    hidden, width = PATCHES // 2, 768
    latents = encoder(1 + hidden) + encoder(1 + hidden, FROZEN) + linear(hidden, WIDTH, width)
    latents += linear(hidden, WIDTH, width, passes=FROZEN)
    queries, keys = hidden * (1 + 1 + 8) * 2 * width**2, PATCHES * 2 * 2 * width**2  # q, proj and MLP; k and v
    regressor = TRAINED * 4 * (queries + keys + 4 * hidden * PATCHES * width)
    return latents + regressor + blocks(hidden, width, 4) + linear(hidden, width, 8192)


def data2vec() -> float:
    """beit/modeling_cyclical.py: the teacher sees all; the layer behind the student, hidden patches alone."""
    return encoder(WHOLE) + encoder(WHOLE, FROZEN) + linear(120, WIDTH, WIDTH)


def can() -> float:
    """Mishra et al. 2022, figure 2: MAE's encoder and decoder on two views, half of whose patches are hidden."""
    decoder = linear(WHOLE // 2 + 1, WIDTH, 512) + blocks(WHOLE, 512, 8) + linear(PATCHES, 512, PIXELS)
    return 2 * (encoder(1 + PATCHES // 2) + decoder + linear(1, WIDTH, 4096, 4096, 128))


def capi() -> float:
    """train_capi.py, model.py, without drop path: of 256 patches of 14 px 90 are visible and 8 predicted by 12 blocks,
    which read them and 16 registers; the teacher sees all, and clusters pass no gradient on to it."""
    patches, context, predicted, pixels, clusters = 256, 16 + 90, 8, 3 * 14 * 14, 16384
    student = blocks(context) + linear(patches, pixels, WIDTH, passes=2) + linear(predicted, WIDTH, clusters)
    reading = 20 * predicted * WIDTH**2 + 4 * context * WIDTH**2 + 4 * predicted * context * WIDTH
    teacher = blocks(16 + patches, passes=FROZEN) + linear(patches, pixels, WIDTH, passes=FROZEN)
    return student + TRAINED * 12 * reading + teacher + linear(patches, WIDTH, clusters, passes=2)


def lejepa() -> float:
    """rbalestr-lab/lejepa README.md: two global and six local crops, no teacher; the directions get no gradient."""
    heads = linear(8, WIDTH, 512, 2048, 2048, 512) + linear(8, 512, 1024, passes=2)
    return 2 * encoder(WHOLE) + 6 * encoder(LOCAL, patches=36) + heads


def nepa() -> float:
    """nepa models/vit_nepa.py: 256 patches of 14 px and a class token; averaged weights see no image."""
    return blocks(1 + 256) + linear(256, 3 * 14 * 14, WIDTH, passes=2)


def simdino() -> float:
    """RobinWu218/SimDINO simdino/main_dino.py: DINO's crops, heads without prototypes, Z^T Z of both global crops."""
    head = (WIDTH, 2048, 2048, 256)
    student = 2 * encoder(WHOLE) + 10 * encoder(LOCAL, patches=36) + linear(12, *head) + linear(2, 256, 256)
    return student + 2 * encoder(WHOLE, FROZEN) + linear(2, *head, passes=FROZEN)


def dinov2(crops: int, registers: int, drop_path: float, *head: int) -> float:
    """dinov2/train/ssl_meta_arch.py, layers/block.py: each residual branch of the student works on the images that drop
    path keeps, of a batch of 16; heads on class tokens and the masked patches: 10 to 50 % of one global crop's."""
    kept = [int(16 * views * (1 - drop_path)) / 16 for views in (2, crops)]
    tokens, masked = (WHOLE + registers, LOCAL + registers), 0.3 * PATCHES
    student = sum(views * blocks(count) for views, count in zip(kept, tokens, strict=True))
    student += linear(2 * PATCHES + crops * 36, PIXELS, WIDTH, passes=2) + linear(2 + crops + masked, *head)
    teacher = 2 * (blocks(tokens[0], passes=FROZEN) + linear(PATCHES, PIXELS, WIDTH, passes=FROZEN))
    return student + teacher + linear(2 + masked, *head, passes=FROZEN)


STEPS = {
    "ibot": ibot,
    "msn": msn,
    "mocov3": lambda: siamese(WIDTH, 4096, 4096, 256),
    "byol": lambda: siamese(WIDTH, 4096, 256),
    "supervised": lambda: encoder(WHOLE) + linear(1, WIDTH, 1000),
    "beit": lambda: beit() + codebook(),
    "beit dall-e": lambda: beit() + dalle(),
    "cae": lambda: cae() + codebook(),
    "cae dall-e": lambda: cae() + dalle(),
    "data2vec": data2vec,
    "maskfeat": lambda: encoder(WHOLE) + linear(WHOLE, WIDTH, 108),
    "can": can,
    "capi": capi,
    "lejepa": lejepa,
    "nepa": nepa,
    "simdino": simdino,
    "dinov2": lambda: dinov2(8, 0, 0.3, WIDTH, 2048, 2048, 256, 65536),
    "simdinov2": lambda: dinov2(10, 4, 0.2, WIDTH, 2048, 2048, 256),
}


def official_flops(row: str) -> float | None:
    """Operations of an image in one step, forward and back; None for a row whose official step was timed itself."""
    return STEPS[row]() if row in STEPS else None
