"""MST's global image decoder: from the tokens of all patches, hidden ones among them, back to the image.

The published text says "CNN-based" and no more: the layers are inferred. B images, D width, h x w grid, p patch side.
"""

from torch import nn

WIDTH, LAST = 256, 32  # channels of the first stage; each of the others has half as many, down to the last


def convolutional(width: int, patch: int, first: int = WIDTH, norm: bool = True) -> nn.Sequential:
    """(B, D, h, w) -> (B, 3, h*p, w*p): transposed convolutions that double the side, p = 2^stages.

    first: channels of the first stage. norm: a batch norm in each stage. Initial weights are torch's.
    """
    stages = patch.bit_length() - 1
    if 2**stages != patch:
        raise ValueError(
            f"decoder=conv doubles the side at each stage, which never gives patch_size={patch}: use linear"
        )
    layers: list[nn.Module] = []
    for stage in range(stages):
        channels = max(first >> stage, min(first, LAST))
        layers.append(nn.ConvTranspose2d(width, channels, kernel_size=4, stride=2, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.Conv2d(width, 3, kernel_size=3, padding=1))


def linear(width: int, patch: int) -> nn.Sequential:
    """(B, D, h, w) -> (B, 3, h*p, w*p): each token becomes its patch's pixels."""
    return nn.Sequential(nn.Conv2d(width, 3 * patch**2, kernel_size=1), nn.PixelShuffle(patch))
