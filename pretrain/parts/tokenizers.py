"""Tokenizers, which assign one of K codes to each patch of a picture, and the base class of BEiT and CAE, which predict
these visual tokens.

A picture is the tokenizer's view of an image, in which a token covers 8 x 8 pixels. `DalleEncoder` is the tokenizer of
both papers; its weights are a file that the user provides. `PatchCodebook` replaces it without that file.
B pictures, L = h w tokens, K codes, N patches of d = 3 x 8 x 8 values.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms.functional import to_tensor

from checkpoints.reading import read_foreign
from checkpoints.spec import ViTSpec
from engine.precision import to_float32
from pretrain.method import Method, Views
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import normalised, patchify
from pretrain.parts.views import ImageViews, TwoSizes, even_jitter, view

SIDE = 8  # side of a token in pixels: 112 px for 14 x 14 tokens (run_beit_pretraining.py, second_input_size)
GROUPS = 4  # groups of DALL-E's encoder, with max pooling between them (dall_e/encoder.py:43)
LAPLACE_EPS = 0.1  # openai/DALL-E dall_e/utils.py:6, map_pixels
PATCHES_PER_CODE = 40  # number of patches, per code, that k-means is fitted to; FAISS warns below 39
KMEANS_ITERATIONS = 10
MAX_PATCHES_AT_ONCE = 4096  # whose distances to all codes are in memory together
# The classes in OpenAI's encoder.pkl, a pickled module. Only its tensors are read; no class is instantiated.
MODULES = (
    "dall_e.encoder.Encoder",
    "dall_e.encoder.EncoderBlock",
    "dall_e.utils.Conv2d",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.linear.Identity",
)


class Tokenizer(nn.Module):
    """Base of the tokenizers, which have no trainable parameters."""

    codes: int  # K
    label: str  # its name in the facts of exports
    fitted_on = 0  # pictures that `fit` needs; 0: it is not fitted

    @torch.no_grad()
    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (B, 3, 8h, 8w) in [0, 1] -> tokens (B, L) in raster order, computed in float32 or float64."""
        with torch.autocast(pictures.device.type, enabled=False):
            return self.tokens(to_float32(pictures))

    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures (B, 3, 8h, 8w), float32 or float64 -> tokens (B, L)."""
        raise NotImplementedError

    def fit(self, pictures: Iterable[Tensor]) -> None:
        """Fit to batches of pictures (B, 3, 8h, 8w)."""


class PatchCodebook(Tokenizer):
    """Our tokenizer: the k-means centre nearest to each normalised patch. Centres are random until it is fitted."""

    def __init__(self, codes: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.codes = codes
        self.label = f"k-means of {codes} codes among patches of the training images; not the paper's"
        self.fitted_on = ceil(codes * PATCHES_PER_CODE / (grid[0] * grid[1]))
        self.register_buffer("centres", torch.randn(codes, 3 * SIDE**2))

    def tokens(self, pictures: Tensor) -> Tensor:
        patches = normalised(patchify(pictures, SIDE))
        return nearest(patches.flatten(0, 1), self.centres)[0].unflatten(0, patches.shape[:2])

    def fit(self, pictures: Iterable[Tensor]) -> None:
        """Fit the centres, on the CPU for the same bits everywhere. Raises ValueError for fewer patches than codes."""
        patches = torch.cat([normalised(patchify(batch.cpu(), SIDE)).flatten(0, 1) for batch in pictures])
        if len(patches) < self.codes:
            raise ValueError(f"codes={self.codes} is more than the {len(patches)} patches to fit them to; lower codes")
        self.centres.copy_(k_means(patches[: self.codes * PATCHES_PER_CODE], self.codes))


def k_means(points: Tensor, count: int) -> Tensor:
    """Points (N, d) -> centres (count, d), by Lloyd's algorithm from evenly spaced points. Centres without points move
    to the points farthest from their own centres."""
    centres = points[torch.arange(count) * len(points) // count]
    for _ in range(KMEANS_ITERATIONS):
        ids, distances = nearest(points, centres)
        sizes = torch.bincount(ids, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, ids, points)
        centres = sums / sizes.clamp(min=1).unsqueeze(1)
        empty = sizes == 0
        centres[empty] = points[distances.topk(min(int(empty.sum()), len(points))).indices]
    return centres


def nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Points (N, d), centres (K, d) -> the number of each point's nearest centre (N,), and the squared distance to it
    (N,)."""
    # |x - c|^2 = |x|^2 - 2 (x c - |c|^2 / 2), smallest where the bracket is largest.
    half_squares = centres.square().sum(1) / 2  # |c|^2 / 2 (K,)
    maxima = [(part @ centres.T - half_squares).max(dim=1) for part in points.split(MAX_PATCHES_AT_ONCE)]
    ids = torch.cat([part.indices for part in maxima])
    brackets = torch.cat([part.values for part in maxima])
    return ids, points.square().sum(1) - 2 * brackets


class DalleEncoder(Tokenizer):
    """The encoder of DALL-E's discrete VAE (Ramesh et al. 2021; openai/DALL-E dall_e/encoder.py): a convolution, four
    groups of residual blocks with max pooling between them, which halves the side three times, and logits of the codes.

    Args:
        width: channels of the first group; each of the others has twice as many as the one before.
        codes: K.
        blocks: residual blocks in each group.
        source: the file of the weights, for the facts of exports.
    """

    def __init__(self, width: int, codes: int, blocks: int, source: str = "") -> None:
        super().__init__()
        self.codes, self.label = codes, f"DALL-E's encoder, {source}"
        layers: dict[str, nn.Module] = {"input": nn.Conv2d(3, width, 7, padding=3)}
        channels_in = width
        for group in range(1, GROUPS + 1):
            channels = width * 2 ** (group - 1)
            group_layers: dict[str, nn.Module] = {}
            for number in range(1, blocks + 1):
                group_layers[f"block_{number}"] = DalleBlock(channels_in, channels, GROUPS * blocks)
                channels_in = channels
            if group < GROUPS:
                group_layers["pool"] = nn.MaxPool2d(2)
            layers[f"group_{group}"] = named(group_layers)
        layers["output"] = named({"relu": nn.ReLU(), "conv": nn.Conv2d(channels_in, codes, 1)})
        self.blocks = named(layers)
        self.requires_grad_(False)

    def logits(self, pictures: Tensor) -> Tensor:
        """Pictures (B, 3, 8h, 8w) in [0, 1] -> logits of the codes (B, K, h, w)."""
        return self.blocks(map_pixels(pictures))

    def tokens(self, pictures: Tensor) -> Tensor:
        return self.logits(pictures).argmax(dim=1).flatten(1)


class DalleBlock(nn.Module):
    """Residual block x + f(x) / blocks^2; f is four convolutions with a ReLU before each (dall_e/encoder.py:12-37).

    blocks: number of blocks in the whole encoder.
    """

    def __init__(self, channels_in: int, channels: int, blocks: int) -> None:
        super().__init__()
        hidden = channels // 4
        widths = (channels_in, hidden, hidden, hidden, channels)
        layers: dict[str, nn.Module] = {}
        for number, kernel in enumerate((3, 3, 3, 1), start=1):
            layers[f"relu_{number}"] = nn.ReLU()
            layers[f"conv_{number}"] = nn.Conv2d(widths[number - 1], widths[number], kernel, padding=kernel // 2)
        self.gain = 1 / blocks**2
        self.id_path = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()
        self.res_path = named(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.id_path(x) + self.gain * self.res_path(x)


def named(layers: Mapping[str, nn.Module]) -> nn.Sequential:
    """An nn.Sequential of named layers."""
    return nn.Sequential(OrderedDict(layers))


def map_pixels(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] -> [0.1, 0.9], the input range of DALL-E's encoder."""
    return (1 - 2 * LAPLACE_EPS) * pictures + LAPLACE_EPS


def read_dalle(path: Path) -> DalleEncoder:
    """Read the encoder from OpenAI's encoder.pkl, or from a file of its state dict such as OpenMMLab's
    dalle_encoder.pth.

    Runs no code of the file. Raises ValueError for any other file.
    """
    try:
        file = read_foreign(path, MODULES)
    except ValueError as error:
        raise ValueError(f"tokenizer: {error}; give the file of DALL-E's encoder, encoder.pkl") from error
    tensors = {}
    for name, tensor in file.tensors.items():
        plain = re.sub(r"(^|\.)_(modules|parameters)(?=\.)", "", name).lstrip(".")
        if match := re.search(r"(blocks\..*)\.([wb])$", plain):
            tensors[f"{match[1]}.{'weight' if match[2] == 'w' else 'bias'}"] = tensor.float()
    try:
        blocks = max(int(match[1]) for name in tensors for match in re.finditer(r"block_(\d+)", name))
        width, codes = len(tensors["blocks.input.weight"]), len(tensors["blocks.output.conv.weight"])
        encoder = DalleEncoder(width, codes, blocks, f"{path.name} sha256 {file.sha256[:12]}")
        encoder.load_state_dict(tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"tokenizer={path}: not DALL-E's encoder ({reason}); give its file encoder.pkl") from error
    return encoder


class TokenPrediction(Method):
    """Base of BEiT and CAE: a tokenizer, and views for encoder and tokenizer.

    Views: "image" (B, 3, H, W); "picture" (B, 3, 8h, 8w), the same crop for the tokenizer; "mask" (B, L), True for
    hidden patches. settings: with the fields `tokenizer`, `codes`, `colour_jitter` and `crop_scale`.
    """

    def __init__(self, spec: ViTSpec, settings: Any, draw_mask: BlockMask) -> None:
        super().__init__(spec, settings)
        self.draw_mask = draw_mask
        file = settings.tokenizer
        self.tokenizer = read_dalle(Path(file)) if file else PatchCodebook(settings.codes, spec.grid)
        self.fitted_on = self.tokenizer.fitted_on

    def views(self) -> Views:
        """Colour jitter, a flip and a crop at two sizes (BEiT datasets.py, CAE furnace/datasets.py)."""
        crop = TwoSizes(self.spec.side, self.spec.grid[0] * SIDE, self.settings.crop_scale)
        views_by_name = {
            "image": view([itemgetter(0)], self.preparation),
            "picture": transforms.Compose([itemgetter(1), to_tensor]),
        }
        steps = [even_jitter(self.settings.colour_jitter), transforms.RandomHorizontalFlip(), crop]
        return transforms.Compose([*steps, ImageViews(views_by_name, {"mask": self.draw_mask})])

    def fit(self, views: Iterable[Mapping[str, Tensor]]) -> None:
        self.tokenizer.fit(batch["picture"] for batch in views)

    def facts(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.label}

    def baseline_loss_of_tokens(self, views: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of predicting the frequencies of the codes in the batch for all patches."""
        tokens = self.tokenizer(views["picture"])
        shares = torch.bincount(tokens.flatten(), minlength=self.tokenizer.codes) / tokens.numel()
        return torch.special.entr(shares).sum()
