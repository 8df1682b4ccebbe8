"""MOCA's dense branch: a decoder over visible and masked patches, and what it predicts of each.

The condenser (section 3.3, appendix B) sees the patches of an earlier block beside the image's one embedding, so that
this has to carry the layout; the default decoder sees the last block's. valeoai/MOCA models_moca.py:591-656.
B views, k visible patches, m decoded ones, L patches, D width, d decoder width, K words, p patch side.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from engine.precision import l2_normalize
from pretrain.parts.codebook import WeightGenerator, divergences
from pretrain.parts.decoders import TokenDecoder
from pretrain.parts.masking import normalised, patchify, take
from pretrain.parts.weights import xavier_

LocalTarget = Literal["assignments", "pixels", "embeddings"]


class StudentOutput(NamedTuple):
    """What the student makes of one round of masks. embedding: of the image, AVG or CLS token (B, D). early: patches
    (B, k, D) for each decoder. ids (B, m): the patches to decode, the k visible ones first."""

    embedding: Tensor
    early: Sequence[Tensor]
    ids: Tensor

    @property
    def visible(self) -> int:
        """k."""
        return self.early[0].shape[1]


class TeacherTargets(NamedTuple):
    """What there is to predict of V*B views: images (V*B, 3, H, W), the teacher's patches (V*B, L, D), their shares
    (V*B, L, K) of the codebook's words (K, D) and the entropies (V*B, L) of these. reduced: y_T of each view (V, B, K).
    """

    images: Tensor
    tokens: Tensor
    shares: Tensor
    entropies: Tensor
    reduced: Tensor
    words: Tensor


class AssignmentTarget(nn.Module):
    """The teacher's assignments of the same view (Eq. 2-4), of visible and masked patches alike."""

    def __init__(self, generator: WeightGenerator, kappa: float) -> None:
        super().__init__()
        self.generator, self.kappa = generator, kappa

    def forward(
        self, decoded: Sequence[Tensor], rounds: Sequence[StudentOutput], targets: TeacherTargets
    ) -> list[Tensor]:
        prototypes = self.generator(targets.words)  # W^d
        mixed = targets.shares @ prototypes  # q W (V*B, L, d), for all rounds
        losses = []
        for tokens, student in zip(decoded, rounds, strict=True):
            entropies = targets.entropies.gather(1, student.ids)
            losses.append(divergences(tokens, prototypes, take(mixed, student.ids), entropies, self.kappa).mean())
        return losses


class PixelTarget(nn.Module):
    """MAE's loss on the masked patches (section 4.2, tables 3 and 8; which patches is inferred from MAE)."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.pixels = xavier_(nn.Linear(width, patch**2 * 3))

    def forward(
        self, decoded: Sequence[Tensor], rounds: Sequence[StudentOutput], targets: TeacherTargets
    ) -> list[Tensor]:
        patches = patchify(targets.images, self.patch)
        losses = []
        for tokens, student in zip(decoded, rounds, strict=True):
            masked = slice(student.visible, None)
            target = normalised(take(patches, student.ids[:, masked]))
            losses.append((self.pixels(tokens[:, masked]) - target).square().mean())
        return losses


class EmbeddingTarget(nn.Module):
    """Cosine distance to the teacher's tokens (section 4.2, table 3; of the patches that assignments are predicted for,
    which is inferred)."""

    def __init__(self, width: int, width_out: int) -> None:
        super().__init__()
        self.tokens = xavier_(nn.Linear(width, width_out))

    def forward(
        self, decoded: Sequence[Tensor], rounds: Sequence[StudentOutput], targets: TeacherTargets
    ) -> list[Tensor]:
        return [
            1.0
            - (l2_normalize(self.tokens(tokens)) * l2_normalize(take(targets.tokens, student.ids))).sum(dim=-1).mean()
            for tokens, student in zip(decoded, rounds, strict=True)
        ]


class LocalPrediction(nn.Module):
    """One decoder with its loss. The patches have a norm of their own, the image's embedding has had its one."""

    def __init__(self, decoder: TokenDecoder, target: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder, self.target = decoder, target

    def forward(self, rounds: Sequence[StudentOutput], number: int, targets: TeacherTargets) -> Tensor:
        """The loss of decoder `number`, a mean over the rounds."""
        decoded = [self.decode(student.embedding, student.early[number], student.ids) for student in rounds]
        return torch.stack(self.target(decoded, rounds, targets)).mean()

    def decode(self, embedding: Tensor, patches: Tensor, ids: Tensor) -> Tensor:
        """Embedding (B, D), visible patches (B, k, D), ids (B, m) -> (B, m, d)."""
        tokens = torch.cat([embedding.unsqueeze(1), self.norm(patches)], dim=1)
        return self.decoder(tokens, ids)


def local_prediction(
    target: LocalTarget, decoder: TokenDecoder, spec: ViTSpec, generator_hidden: int, kappa: float
) -> LocalPrediction:
    """`decoder`, for patches of the encoder `spec`, with what it is to predict."""
    width = decoder.norm.normalized_shape[0]
    if target == "pixels":
        return LocalPrediction(decoder, PixelTarget(width, spec.patch_size), spec.width)
    if target == "embeddings":
        return LocalPrediction(decoder, EmbeddingTarget(width, spec.width), spec.width)
    generator = WeightGenerator(spec.width, generator_hidden, width)
    return LocalPrediction(decoder, AssignmentTarget(generator, kappa), spec.width)
