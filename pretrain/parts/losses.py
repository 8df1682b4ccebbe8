"""Losses between a student's predictions and its teacher's targets, in float32 at least, and their baselines.

A baseline is the loss of the best prediction that is the same whatever the image: a training that learns falls below
it. It is estimated from a batch, to which the constant is fitted: the fewer the targets, the further it lies below that
of all images.

Letters: B images of this process, M predictions of each (masks, views), N images of all processes, L patches,
d projected width.
"""

from functools import partial
from math import log
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from engine.distributed import current_world
from engine.precision import l2_normalize, to_float32


def byol_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """BYOL's loss (Grill et al. 2020, Eq. 2): mean of |p - t|^2 = 2 - 2 cos(p, t) over unit vectors.

    predictions (..., B, d), targets (B, d); every prediction of an image has the image's one target.
    """
    difference = l2_normalize(predictions) - l2_normalize(targets)
    return difference.square().sum(dim=-1).mean()


def info_nce(predictions: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """InfoNCE of (M, B, d) predictions: each finds its image's target among the (N, d) of all processes.

    As in MoCo-v3 builder.py:63-73, the other processes' targets come without gradient. The M predictions of an image
    are M problems, not each other's negatives.
    """
    masks, batch, _ = predictions.shape
    own = current_world().rank * batch + torch.arange(batch, device=predictions.device)
    keys = gathered(to_float32(targets))
    return contrastive(to_float32(predictions).flatten(0, 1), keys, temperature, own.repeat(masks))


def contrastive(queries: Tensor, keys: Tensor, temperature: float, positives: Tensor) -> Tensor:
    """(B, d) queries, (N, d) keys -> mean cross-entropy of finding its key for each query; cosine similarities.

    positives: (B,) number of each query's key. The factor 2 * temperature of MoCo-v3's builder.py:63-73 keeps the
    gradient's size independent of temperature. Autocast is off for the product: similarities of half precision are too
    coarse once they are divided by the temperature.
    """
    with torch.autocast(queries.device.type, enabled=False):
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, positives) * 2 * temperature


def nt_xent(projections: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Chen et al. 2020, Eq. 1) of (2B, d) projections: the first views of B images, then the second.

    Each of the 2N of all processes finds its image's other view among all but itself, by cosine similarity. The keys
    of other processes pass their gradient on, so that processes together have the gradient of one.
    """
    count, world = len(projections), current_world()
    own = l2_normalize(projections)
    keys = GatheredRows.apply(own) if world.size > 1 else own
    places = torch.arange(count, device=own.device)
    with torch.autocast(own.device.type, enabled=False):
        logits = own @ keys.T / temperature
    itself = torch.zeros_like(logits, dtype=torch.bool)
    itself[places, world.rank * count + places] = True
    positives = world.rank * count + (places + count // 2) % count
    return F.cross_entropy(logits.masked_fill(itself, -torch.inf), positives)


def dino_loss(views: Tensor, others: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of every view's softmax(logits / temperature) to the targets of all views but itself.

    views (B, G, K): logits of the views that have targets. others (B, N, K): of views that have none.
    targets (B, G, K): probabilities. DINO (Caron et al. 2021) Eq. 3, main_dino.py:380-404: G (G - 1 + N) pairs.
    Cross-entropy is linear in the target, and a distribution sums to one: each view meets the sum of its targets once.
    """
    pairs = views.shape[1] - 1  # of each target
    views, everything = to_float32(views) / temperature, targets.sum(dim=1)
    loss = pairs * views.logsumexp(dim=-1).sum() - ((everything.unsqueeze(1) - targets) * views).sum()
    if others is not None:
        pairs += others.shape[1]
        others = to_float32(others) / temperature
        loss = loss + views.shape[1] * others.logsumexp(dim=-1).sum() - (everything * others.sum(dim=1)).sum()
    return loss / (len(views) * views.shape[1] * pairs)


def masked_patch_loss(logits: Tensor, targets: Tensor, masks: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of masked patches' softmax(logits / temperature) to their targets: each view's mean over its masked
    patches, 0 where it has none, then the mean over views (iBOT, Zhou et al. 2022, Eq. 3; main_ibot.py:540-546).

    logits, targets (m, K): of the masked patches in order; targets are probabilities. masks (B, G, L) bool.
    """
    logits = to_float32(logits) / temperature
    return masked_mean(logits.logsumexp(dim=-1) - (targets * logits).sum(dim=-1), masks)


def masked_mean(losses: Tensor, masks: Tensor) -> Tensor:
    """Losses (m,) of the patches that the masks (B, G, L) hide -> each view's mean, 0 where nothing is hidden, then the
    mean over views."""
    weights = masks.to(losses.dtype)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1)
    return (losses * weights[masks]).sum() / masks[..., 0].numel()


def koleo_loss(vectors: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean of -log of the distance from each of the unit vectors x / |x| to its nearest neighbour, for vectors
    (B, D) of this process: the estimator of the entropy by Kozachenko and Leonenko (Sablayrolles et al. 2019, Eq. 3;
    DINOv2 loss/koleo_loss.py)."""
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = F.normalize(to_float32(vectors), dim=-1, eps=eps)
        nearest = (vectors @ vectors.mT).detach().fill_diagonal_(-1).argmax(dim=1)
        return -(F.pairwise_distance(vectors, vectors[nearest], eps=eps) + eps).log().mean()


Negatives = Literal["keep", "drop", "drop_teacher"]


def gram_loss(student: Tensor, teacher: Tensor, negatives: Negatives = "keep", unit: bool = True) -> Tensor:
    """Mean squared difference of two Gram matrices, of patch tokens (..., L, D): Gram anchoring (Simeoni et al. 2025,
    section 4).

    negatives: whether negative entries become 0, in neither, both, or the teacher's. unit: of tokens of length one.
    """
    with torch.autocast(student.device.type, enabled=False):
        pair = [l2_normalize(tokens) if unit else to_float32(tokens) for tokens in (student, teacher)]
        ours, theirs = (tokens @ tokens.mT for tokens in pair)
    ours = ours.clamp(min=0) if negatives == "drop" else ours
    theirs = theirs if negatives == "keep" else theirs.clamp(min=0)
    return (ours - theirs).square().mean()


def mean_entropy_loss(probabilities: Tensor) -> Tensor:
    """log K - H(mean p), 0 where all K are used alike: MSN's me-max (Assran et al. 2022, Eq. 1; src/losses.py).

    probabilities (..., K); the mean is over those of all processes.
    """
    mean, world = to_float32(probabilities).flatten(0, -2).mean(dim=0), current_world()
    if world.size > 1:
        mean = all_reduce(mean / world.size)
    return log(mean.numel()) - torch.special.entr(mean).sum()


@torch.no_grad()
def gathered(rows: Tensor) -> Tensor:
    """(B, d) of every process -> (N, d), in the order of ranks, without gradient. The same B everywhere."""
    world = current_world()
    if world.size == 1:
        return rows.detach()
    return torch.cat(world.gather_tensors(rows.contiguous()))


class GatheredRows(torch.autograd.Function):
    """`gathered`, with gradients: those of every process's loss are summed in the process that a row is from."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return gathered(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        world = current_world()
        gradient = gradient.contiguous()
        world.all_reduce(gradient)
        return gradient.chunk(world.size)[world.rank]


# Images of a batch whose patches or tokens are enough for a baseline.
BASELINE_IMAGES = 64


def patch_baseline(targets: Tensor, loss: str = "l2", beta: float = 1.0) -> Tensor:
    """Targets (B, L, d), pixels or features -> the loss ("l1", "l2", "smooth_l1") of one patch in place of all, the
    better one of mean and median. beta: of "smooth_l1"."""
    rows = to_float32(targets[:BASELINE_IMAGES]).flatten(0, 1)
    guesses = torch.stack([rows.mean(dim=0), rows.median(dim=0).values])
    losses = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": partial(F.smooth_l1_loss, beta=beta)}
    return torch.stack([losses[loss](guess.expand_as(rows), rows) for guess in guesses]).amin()


def direction_baseline(targets: Tensor) -> Tensor:
    """Targets (B, d) -> losses.byol_loss of their mean direction; without the bias of |mean|^2."""
    count = len(targets)
    squared = l2_normalize(targets).mean(dim=0).square().sum()
    return 2.0 - 2.0 * ((count * squared - 1.0) / max(1, count - 1)).clamp(min=0.0).sqrt()


def assignment_baseline(shares: Tensor) -> Tensor:
    """Shares (N, K), which sum to 1 -> mean KL(q || mean q)."""
    mean = shares.mean(dim=0)
    return torch.special.entr(mean).sum() - torch.special.entr(shares).sum(dim=1).mean()
