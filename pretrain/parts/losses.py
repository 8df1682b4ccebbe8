"""Losses between a student's predictions and its teacher's targets, in float32 or higher precision, and their
baselines.

A baseline is the loss of the best prediction that ignores the image: a training that learns falls below it. It is
estimated by fitting a constant to one batch, so the fewer targets the batch has, the more it underestimates the
baseline over all images.

Letters: B images of this process, M predictions per image (masks, views), N images of all processes, L patches, D
width, d projected width, K prototypes or words; G global and N local crops in the losses of DINO's family.
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
from pretrain.method import check_chunks


def byol_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """BYOL's loss (Grill et al. 2020, Eq. 2): mean of |p - t|^2 = 2 - 2 cos(p, t) over unit vectors p and t.

    predictions: (..., B, d). targets: (B, d); all predictions of an image share its target.
    """
    difference = l2_normalize(predictions) - l2_normalize(targets)
    return difference.square().sum(dim=-1).mean()


def info_nce(predictions: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """InfoNCE: each prediction (M, B, d) identifies its image's target among the targets of all processes.

    targets: (B, d), of this process; gathered without gradient, as in MoCo-v3 builder.py:63-73. The M predictions of an
    image are M separate problems, not negatives of each other.
    """
    masks, batch, _ = predictions.shape
    positives = current_world().rank * batch + torch.arange(batch, device=predictions.device)
    keys = gathered(to_float32(targets))
    return contrastive(to_float32(predictions).flatten(0, 1), keys, temperature, positives.repeat(masks))


def contrastive(queries: Tensor, keys: Tensor, temperature: float, positives: Tensor) -> Tensor:
    """Mean cross-entropy of identifying the key of each query by cosine similarity, times 2 * temperature.

    queries: (B, d). keys: (N, d). positives: (B,), the row of each query's key. The factor, from MoCo-v3's
    builder.py:63-73, keeps the size of the gradient independent of the temperature. Autocast is off for the product:
    half-precision similarities are too coarse once they are divided by the temperature.
    """
    with torch.autocast(queries.device.type, enabled=False):
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, positives) * 2 * temperature


def nt_xent(projections: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Chen et al. 2020, Eq. 1) of projections (2B, d): the first views of B images, then the second.

    Each of the 2N projections of all processes identifies the other view of its image among all projections but itself,
    by cosine similarity. Gradients also flow to the keys of other processes, so that several processes together have
    the gradient of a single one.
    """
    count, world = len(projections), current_world()
    queries = l2_normalize(projections)
    keys = GatheredRows.apply(queries) if world.size > 1 else queries
    rows = torch.arange(count, device=queries.device)
    with torch.autocast(queries.device.type, enabled=False):
        logits = queries @ keys.T / temperature
    is_self = torch.zeros_like(logits, dtype=torch.bool)
    is_self[rows, world.rank * count + rows] = True
    positives = world.rank * count + (rows + count // 2) % count
    return F.cross_entropy(logits.masked_fill(is_self, -torch.inf), positives)


def dino_loss(global_logits: Tensor, local_logits: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy between softmax(logits / temperature) of every crop and the targets of all global crops but
    itself (DINO, Caron et al. 2021, Eq. 3; main_dino.py:380-404).

    global_logits: (B, G, K). local_logits: (B, N, K), of crops without targets, or None. targets: (B, G, K),
    probabilities of the global crops.

    These are G (G - 1 + N) pairs. Cross-entropy is linear in the target and a target sums to one, so each crop is
    compared once, with the sum of its targets.
    """
    crops_per_target = global_logits.shape[1] - 1
    global_logits, target_sum = to_float32(global_logits) / temperature, targets.sum(dim=1)
    log_partitions = crops_per_target * global_logits.logsumexp(dim=-1).sum()
    loss = log_partitions - ((target_sum.unsqueeze(1) - targets) * global_logits).sum()
    if local_logits is not None:
        crops_per_target += local_logits.shape[1]
        local_logits = to_float32(local_logits) / temperature
        log_partitions = global_logits.shape[1] * local_logits.logsumexp(dim=-1).sum()
        loss = loss + log_partitions - (target_sum * local_logits.sum(dim=1)).sum()
    return loss / (len(global_logits) * global_logits.shape[1] * crops_per_target)


def masked_patch_loss(logits: Tensor, targets: Tensor, masks: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softmax(logits / temperature) of the masked patches and their targets, averaged as in
    `masked_mean` (iBOT, Zhou et al. 2022, Eq. 3; main_ibot.py:540-546).

    logits, targets: (m, K), of the masked patches in the order of `masks`; targets are probabilities. masks: (B, G, L)
    bool, True for masked patches.
    """
    logits = to_float32(logits) / temperature
    losses = logits.logsumexp(dim=-1) - (targets * logits).sum(dim=-1)  # (m,)
    return masked_mean(losses, masks)


def masked_mean(losses: Tensor, masks: Tensor) -> Tensor:
    """Losses (m,) of the masked patches -> each crop's mean, 0 for a crop without masked patches, then the mean over
    crops. masks: (B, G, L) bool, True for masked patches."""
    weights = masks.to(losses.dtype)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1)
    return (losses * weights[masks]).sum() / masks[..., 0].numel()


def koleo_loss(vectors: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean -log distance from each normalised vector to its nearest neighbour among the vectors (B, D) of this process:
    Kozachenko and Leonenko's entropy estimator (Sablayrolles et al. 2019, Eq. 3; DINOv2 loss/koleo_loss.py)."""
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = F.normalize(to_float32(vectors), dim=-1, eps=eps)
        cosines = (vectors @ vectors.mT).detach().fill_diagonal_(-1)  # -1: no vector is its own neighbour
        distances = F.pairwise_distance(vectors, vectors[cosines.argmax(dim=1)], eps=eps)  # (B,)
        return -(distances + eps).log().mean()


Negatives = Literal["keep", "drop", "drop_teacher"]


def gram_loss(student: Tensor, teacher: Tensor, negatives: Negatives = "keep", unit: bool = True) -> Tensor:
    """Gram anchoring (Simeoni et al. 2025, section 4): mean squared difference of the Gram matrices of the student's
    and the teacher's patch tokens, both (..., L, D).

    negatives: whether to keep negative entries ("keep"), set them to 0 in both matrices ("drop"), or in the teacher's
    only ("drop_teacher"). unit: normalise the tokens first.
    """
    with torch.autocast(student.device.type, enabled=False):
        pair = [l2_normalize(tokens) if unit else to_float32(tokens) for tokens in (student, teacher)]
        student_gram, teacher_gram = (tokens @ tokens.mT for tokens in pair)
    student_gram = student_gram.clamp(min=0) if negatives == "drop" else student_gram
    teacher_gram = teacher_gram if negatives == "keep" else teacher_gram.clamp(min=0)
    return (student_gram - teacher_gram).square().mean()


def mean_entropy_loss(probabilities: Tensor) -> Tensor:
    """log K - H(mean p), MSN's me-max regulariser (Assran et al. 2022, Eq. 1; src/losses.py): 0 if all K classes are
    used equally.

    probabilities: p (..., K); the mean is over all leading dimensions and all processes.
    """
    mean, world = to_float32(probabilities).flatten(0, -2).mean(dim=0), current_world()
    if world.size > 1:
        mean = all_reduce(mean / world.size)
    return log(mean.numel()) - torch.special.entr(mean).sum()


@torch.no_grad()
def gathered(rows: Tensor) -> Tensor:
    """Rows (B, d) of every process -> (N, d), ordered by rank, without gradient. B is the same in all processes."""
    world = current_world()
    if world.size == 1:
        return rows.detach()
    return torch.cat(world.gather_tensors(rows.contiguous()))


class GatheredRows(torch.autograd.Function):
    """`gathered` with gradients: each row receives the sum of its gradients over the losses of all processes."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return gathered(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        world = current_world()
        gradient = gradient.contiguous()
        world.all_reduce(gradient)
        return gradient.chunk(world.size)[world.rank]


def in_chunks(rows: Tensor, size: int, setting: str) -> Tensor:
    """Vectors of G crops (B, G, d) -> (C, G, size, d), chunks of images in place of the source's GPUs: of this process,
    or if it does not hold whole chunks of all processes, with gradients. size: 0 for one chunk of this process."""
    rows = GatheredRows.apply(rows) if size and len(rows) % size else rows
    check_chunks(len(rows), {setting: size})
    return rows.unflatten(0, (-1, size or len(rows))).transpose(1, 2)


BASELINE_IMAGES = 64  # images of a batch that a baseline of patches is fitted to


def patch_baseline(targets: Tensor, loss: str = "l2", beta: float = 1.0) -> Tensor:
    """Loss of predicting the same patch everywhere: the mean or the median of all targets, whichever is better.

    targets: (B, L, d), pixels or features. loss: "l1", "l2" or "smooth_l1". beta: of "smooth_l1".
    """
    patches = to_float32(targets[:BASELINE_IMAGES]).flatten(0, 1)  # (n, d)
    constants = torch.stack([patches.mean(dim=0), patches.median(dim=0).values])
    loss_of = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": partial(F.smooth_l1_loss, beta=beta)}[loss]
    return torch.stack([loss_of(constant.expand_as(patches), patches) for constant in constants]).amin()


def direction_baseline(targets: Tensor) -> Tensor:
    """`byol_loss` of predicting the mean direction of the targets (B, d), with |mean|^2 estimated without bias."""
    count = len(targets)
    squared_mean = l2_normalize(targets).mean(dim=0).square().sum()
    unbiased = ((count * squared_mean - 1.0) / max(1, count - 1)).clamp(min=0.0)
    return 2.0 - 2.0 * unbiased.sqrt()


def assignment_baseline(assignments: Tensor) -> Tensor:
    """Assignments q (n, K), which sum to 1 -> mean KL(q || mean q), the loss of always predicting their mean."""
    mean = assignments.mean(dim=0)
    return torch.special.entr(mean).sum() - torch.special.entr(assignments).sum(dim=1).mean()
