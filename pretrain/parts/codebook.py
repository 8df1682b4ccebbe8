"""MOCA's codebook of the teacher's tokens, and what a student predicts assignments to its words with.

MOCA sections 3.1, 3.2.1 and C.1, after OBoW (Gidaris et al. 2021); valeoai/MOCA models_moca.py:31-151, 204-338.
The dense branch decodes visible and masked patches. Its condenser (section 3.3, appendix B) sees the patches of an
earlier block beside the image's one embedding, so that the embedding has to carry the layout; the default decoder sees
the last block's (models_moca.py:591-656).
Letters: V views, B images of this process, L patches on an h x w grid, D width, K words, k new words in a step,
d the student's or the decoder's width. Of the dense branch: B views, k visible and m decoded patches, p patch side.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from engine.distributed import current_world
from engine.precision import l2_normalize, to_float32
from pretrain.parts.decoders import TokenDecoder
from pretrain.parts.masking import normalised, patchify, take
from pretrain.parts.weights import xavier_

NewWords = Literal["token", "avg_token", "farthest"]
MU_DECAY, MU_START = 0.99, 0.5  # models_moca.py:57, 66


class Assignments(NamedTuple):
    """q_T of each patch: shares (V, B, L, K) that sum to 1, and their entropies (V, B, L).

    contrasts (V,): between the nearest word and the mean one, a mean over the view's patches; mu follows them.
    """

    shares: Tensor
    entropies: Tensor
    contrasts: Tensor


class Codebook(nn.Module):
    """Words (K, D) of length one, and the mean contrast mu by which assignments are sharpened.

    new_words: k of a step. border: rows and columns of patches on each side that neither count nor become words.
    kind: what a new word is, a random token, the mean over an image or, inferred (the paper, A.2, gives no details),
    the tokens that are farthest from all words. inv_delta: temperature of the assignments is mu / inv_delta.
    """

    def __init__(
        self,
        *,
        words: int,
        new_words: int,
        width: int,
        grid: tuple[int, int],
        border: int,
        inv_delta: float,
        kind: NewWords,
    ) -> None:
        super().__init__()
        if not 0 < new_words <= words or words % new_words or words < 2:
            raise ValueError(f"new_words={new_words} must divide words={words}, which must be 2 or more")
        if not 0 <= 2 * border < min(grid):
            raise ValueError(f"border={border} leaves nothing of {grid[0]} x {grid[1]} patches; lower it, 0 for none")
        self.new_words, self.grid, self.border, self.inv_delta, self.kind = new_words, grid, border, inv_delta, kind
        self.register_buffer("words", l2_normalize(torch.randn(words, width).clamp(min=0)))  # half of a normal, :61-62
        self.register_buffer("oldest", torch.zeros((), dtype=torch.int64))  # the word that is replaced next
        self.register_buffer("mu", torch.tensor(MU_START))
        self.register_buffer("mu_of_update", torch.tensor(MU_START))  # mu when words were last replaced
        numbers = torch.arange(grid[0] * grid[1]).reshape(grid)
        self.register_buffer("inner", self.within(numbers.unsqueeze(-1)).flatten(), persistent=False)

    def within(self, cells: Tensor) -> Tensor:
        """(..., h, w, x) without the border."""
        (height, width), border = self.grid, self.border
        return cells[..., border : height - border, border : width - border, :]

    @torch.no_grad()
    def assign(self, tokens: Tensor) -> Assignments:
        """Softly assign the teacher's patches (V, B, L, D).

        The temperature is mu / inv_delta as in the code (:150-151): the paper's 1 / (10 mu) would turn its effect
        round. It is that of the last update, so the same for all views.
        """
        tokens = l2_normalize(tokens)
        cosines = to_float32(tokens @ self.words.T)
        # The mean of the similarities is the similarity to the mean word: a pass over K numbers less.
        contrast = cosines.amax(dim=-1) - tokens @ self.words.mean(dim=0)
        logarithms = cosines.mul_(self.inv_delta / self.mu_of_update).log_softmax(dim=-1)
        shares = logarithms.exp()
        return Assignments(shares, -logarithms.mul_(shares).sum(dim=-1), contrast.mean(dim=(1, 2)).to(self.mu))

    @torch.no_grad()
    def follow(self, contrasts: Tensor) -> None:
        """Move mu towards the contrasts (V,) of all processes, once for each view."""
        world = current_world()
        world.add_up(contrasts)
        for contrast in contrasts / world.size:
            self.mu.lerp_(contrast, 1.0 - MU_DECAY)

    def pooled(self, shares: Tensor) -> Tensor:
        """Shares (V, B, L, K) -> reduced assignments y_T (V, B, K), the mean within the border; they sum to 1."""
        return self.within(shares.unflatten(2, self.grid)).mean(dim=(2, 3))

    @torch.no_grad()
    def candidates(self, tokens: Tensor, choices: Tensor) -> Tensor:
        """Tokens (V, B, L, D) -> k new words (k, D) of length one, of k images, all from one of two views.

        choices (B, 3) in [0, 1): which view, of which the first image's counts; the order of the images, of which the
        first k are taken; which token of the image. ValueError for fewer than k images.
        """
        if len(choices) < self.new_words:
            raise ValueError(f"new_words={self.new_words} is more than the {len(choices)} images of a forward pass")
        return l2_normalize(self._chosen(tokens, choices)).to(self.words)

    @torch.no_grad()
    def replace_oldest(self, words: Tensor) -> None:
        """Put new words (k, D) in the place of the k oldest.

        Each process adds words of its own images, but the next forward pass begins with the codebook of the first
        process, as DDP does in the source: k words count, whatever the number of processes.
        """
        places = (self.oldest + torch.arange(self.new_words, device=words.device)) % len(self.words)
        self.words.index_copy_(0, places, words)
        self.oldest.add_(self.new_words).remainder_(len(self.words))
        self.mu_of_update.copy_(self.mu)

    def _chosen(self, tokens: Tensor, choices: Tensor) -> Tensor:
        """Tokens (V, B, L, D) -> k new words (k, D)."""
        view = (choices[:1, 0] >= 0.5).long()  # (1,), as an index of no dimension would wait for the GPU
        images = choices[:, 1].argsort()[: self.new_words]
        if self.kind == "avg_token":
            return tokens[view, images][:, self.inner].mean(dim=1)
        drawn = self.inner[(choices[:, 2] * len(self.inner)).long()]
        if self.kind == "token":
            return tokens[view, images, drawn[images]]
        one_each = l2_normalize(tokens[view, torch.arange(len(choices), device=view.device), drawn])
        return one_each[farthest(one_each, self.words, self.new_words)]


def farthest(candidates: Tensor, words: Tensor, count: int) -> Tensor:
    """Farthest-point sampling: ids (count,) of unit vectors (B, D), each farthest from `words` and those before it."""
    nearest = (candidates @ words.T).amax(dim=1)
    chosen = []
    for _ in range(count):
        chosen.append(nearest.argmin())
        nearest = torch.maximum(nearest, candidates @ candidates[chosen[-1]])
    return torch.stack(chosen)


class WeightGenerator(nn.Module):
    """Words (K, D) -> prototypes (K, d) of length one. hidden: width of the layer between.

    The batch norm goes over the K words, which are the same in every process. Where d is not D the skip connection is
    a layer too, which the paper does not mention.
    """

    def __init__(self, width_in: int, hidden: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width_in, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
        self.skip = nn.Identity() if width == width_in else nn.Linear(width_in, width)
        xavier_(self)

    def forward(self, words: Tensor) -> Tensor:
        words = l2_normalize(words)
        return l2_normalize(self.layers(words) + self.skip(words))


def divergences(tokens: Tensor, prototypes: Tensor, targets: Tensor, entropies: Tensor, kappa: float) -> Tensor:
    """KL(q || softmax(kappa z W^T)) of each token, MOCA Eq. 2 and 5: the cross-entropy less the target's entropy.

    tokens z (..., d), prototypes W (K, d), entropies (...) of the assignments q (..., K), of which only the targets
    q W (..., d) are needed: the sum over k of q_k times a logit is kappa z (q W). So no round of
    masks has to gather or keep (..., K) assignments.
    """
    logits = to_float32(kappa * tokens @ prototypes.T)
    return logits.logsumexp(dim=-1) - kappa * (to_float32(tokens) * to_float32(targets)).sum(dim=-1) - entropies


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
