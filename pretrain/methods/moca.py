"""MOCA (Gidaris et al. 2024): predict the teacher's codebook assignments of masked patches, and of the other view.

Figure 2 of the paper, sections 3.1, 3.2.1 and C.1, after OBoW (Gidaris et al. 2021); valeoai/MOCA models_moca.py,
main_pretrain.py, util/misc.py. Where the paper and the released code differ, this follows the code, and a comment notes
it. The dense branch decodes visible and masked patches. Its condenser (section 3.3, appendix B) gets the patches of an
earlier block and the single embedding of the image, so that the embedding has to carry the layout; the default decoder
gets the patches of the last block instead (models_moca.py:591-656).

V = 2 views, B images, L patches on an h x w grid, k visible ones, m decoded ones, D width, d width of the student or
the decoder, K words of the codebook C, n new words per update, p patch side. The paper's symbols: q_T the teacher's
assignments of patches, y_T their mean over a view, W^b and W^d the prototypes for image and patch predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.distributed import current_world
from engine.precision import l2_normalize, to_float32
from engine.settings import (
    AreaRange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, Views, check_encoder, decay_groups
from pretrain.parts.decoders import TokenDecoder
from pretrain.parts.losses import BASELINE_IMAGES, assignment_baseline
from pretrain.parts.masking import MaskRounds, normalised, patchify, take
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import two_views
from pretrain.parts.weights import xavier_, xavier_vit
from pretrain.recipe import SINCOS, VIT_B, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import Constant, CosineTo, WarmupCosine, cosine

LocalTarget = Literal["assignments", "pixels", "embeddings"]
MU_DECAY, MU_START = 0.99, 0.5  # momentum and first value of the running mean mu (models_moca.py:57, 66)
DIRECTIONS = 2  # losses are sums over both directions, Eq. 3 and 6; the code's factor (models_moca.py:641, 653)
CHOICES = 3  # random numbers of an image for the codebook's update, see `Codebook.candidates`


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of the final models. The encoder's `pool` decides the image embedding: avg, or cls
    (table 2f)."""

    words: PositiveInt = 4096  # K, words of the codebook
    new_words: PositiveInt = 4  # number of words that an update replaces
    border: NonNegativeInt = 2  # rows and columns on each side whose patches do not count in y_T and never become words
    inv_delta: PositiveFloat = 10.0  # the temperature of assignments is mu / inv_delta
    # new words: random patch tokens, mean tokens of images, or the tokens farthest from all words (inferred)
    new_word: Literal["token", "avg_token", "farthest"] = "token"
    # share of patches hidden from the student in each round (tables 1b, 2e)
    mask_ratios: tuple[UnitInterval, ...] = (0.55, 0.75)
    # share of patches that the decoder neither sees nor predicts, in each round (table 2e)
    decoder_mask_ratios: tuple[UnitInterval, ...] = (0.35, 0.55)
    complementary: bool = True  # rounds hide complementary patches, as in the code; independent in the paper
    # lambda of Eq. 1, the weight of the image loss (table 2g); 0 and 1 leave out one loss and its networks
    image_weight: UnitInterval = 0.5
    # a decoder for each value, which gets the patches of that many blocks before the last: 4 is the condenser of a
    # ViT-B (tables 2c, 2h), 0 the default decoder, 4,0 both with their losses added (table 8, inferred)
    early_layers: tuple[int, ...] = (4,)
    decoder_width: PositiveInt = 512  # token width of each decoder
    decoder_depth: PositiveInt = 2  # blocks of each decoder (table 2d)
    decoder_heads: PositiveInt = 16  # attention heads of each decoder
    target: LocalTarget = "assignments"  # what decoders predict (table 3); pixels and embeddings (table 8) are inferred
    kappa: PositiveFloat = 3.0  # 1 / tau_b = 1 / tau_d of Eq. 2 and 5
    generator_ratio: PositiveFloat = 2.0  # hidden width of the weight generators, divided by D
    # constant learning rate of the weight generators, neither scaled with the batch nor warmed up (code)
    generator_lr: PositiveFloat = 1e-4
    generator_weight_decay: NonNegativeFloat = 0.05  # constant weight decay of the weight generators (code)
    teacher_momentum: UnitInterval = 0.994  # alpha, EMA momentum of the teacher, at the start
    teacher_momentum_end: UnitInterval = 1.0  # alpha at the end, reached along half a cosine
    crop_scale: AreaRange = (0.2, 1.0)  # least and largest share of the image's area in a view
    # probability of Gaussian blur in the first and second view (C.4)
    blur: tuple[UnitInterval, UnitInterval] = (1.0, 0.1)
    solarise: UnitInterval = 0.2  # probability of solarisation in the second view (C.4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_weight < 1 and not self.early_layers:
            raise ValueError("early_layers is empty: name a decoder, or set image_weight=1 to train without any")


class StudentOutput(NamedTuple):
    """The student's output for one round of masks."""

    embedding: Tensor  # image embedding (V*B, D): the AVG or the CLS token
    early: Sequence[Tensor]  # visible patches (V*B, k, D) for each decoder
    ids: Tensor  # patches to decode (V*B, m), the k visible ones first

    @property
    def visible(self) -> int:
        """Number k of visible patches."""
        return self.early[0].shape[1]


class TeacherTargets(NamedTuple):
    """The teacher's targets for V views of B images."""

    images: Tensor  # (V*B, 3, H, W)
    tokens: Tensor  # patch tokens (V*B, L, D)
    q_T: Tensor  # soft assignments of the patches to the words (V*B, L, K)
    entropies: Tensor  # entropies of q_T (V*B, L)
    y_T: Tensor  # mean assignments of each view (V, B, K)
    words: Tensor  # the codebook (K, D)


class Moca(Method):
    """Views: "first" and "second" (B, 3, H, W), "noise" (B, drawn rounds, V, L) and "choices" (B, 3)."""

    batch_statistics = True  # new words come from one process's forward pass, and mu is a mean over it

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        # `encode_masked` encodes only the visible patches, and normalises all tokens of the last block.
        check_encoder(spec, class_attention=0, final_norm="all", relative_position="none")
        for before in settings.early_layers:
            if not 0 <= before < spec.depth:
                raise ValueError(f"early_layers={settings.early_layers}: must be from 0 to {spec.depth - 1}")
        self.rounds = MaskRounds(
            patches=spec.grid[0] * spec.grid[1],
            mask_ratios=settings.mask_ratios,
            decoder_mask_ratios=settings.decoder_mask_ratios,
            complementary=settings.complementary,
        )
        self.student = xavier_vit(ViT(spec))
        self.teacher = frozen_copy(self.student)
        self.codebook = Codebook(settings, spec.width, spec.grid)
        self.min_batch, self.min_batch_setting = settings.new_words, f"new_words={settings.new_words}"
        hidden = int(settings.generator_ratio * spec.width)
        self.generator = WeightGenerator(spec.width, hidden, spec.width) if settings.image_weight > 0 else None
        self.early_layers = settings.early_layers if settings.image_weight < 1 else ()
        self.predictions = nn.ModuleList(self.new_prediction(hidden) for _ in self.early_layers)

    def new_prediction(self, generator_hidden: int) -> "LocalPrediction":
        """A decoder with fresh weights and the target that it predicts."""
        s, width = self.settings, self.spec.width
        decoder = TokenDecoder(self.spec, s.decoder_width, s.decoder_depth, s.decoder_heads)
        if s.target == "pixels":
            return LocalPrediction(decoder, PixelTarget(s.decoder_width, self.spec.patch_size), width)
        if s.target == "embeddings":
            return LocalPrediction(decoder, EmbeddingTarget(s.decoder_width, width), width)
        generator = WeightGenerator(width, generator_hidden, s.decoder_width)
        return LocalPrediction(decoder, AssignmentTarget(generator, s.kappa), width)

    def views(self) -> Views:
        settings = self.settings
        pair = two_views(self.spec.side, settings.crop_scale, settings.blur, settings.solarise, self.preparation)
        masks = partial(torch.rand, self.rounds.drawn, 2, self.rounds.patches)
        return replace(pair, samplers={"noise": masks, "choices": partial(torch.rand, CHOICES)})

    def before_forward(self, progress: TrainProgress) -> None:
        """Move the teacher towards the student of the last update (models_moca.py:548-560)."""
        if progress.is_last_micro_batch:
            ema_update(self.teacher, self.student, self.alpha(progress))

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = torch.cat([views["first"], views["second"]])  # (V*B, 3, H, W)
        tokens, contrasts, targets = self.teacher_targets(images)  # tokens (V, B, L, D)
        rounds = self.student_rounds(images, views["noise"])

        image_loss, local_loss = images.new_zeros(()), images.new_zeros(())
        if self.generator is not None:
            image_loss = DIRECTIONS * self.image_loss(rounds, targets)  # L_IMG, Eq. 6
        if self.predictions:
            local_loss = DIRECTIONS * self.local_loss(rounds, targets)  # L_LOC, Eq. 3
        weight = self.settings.image_weight  # lambda
        loss = weight * image_loss + (1.0 - weight) * local_loss  # Eq. 1

        logs = {"loss_img": image_loss.detach(), "loss_loc": local_loss.detach(), "mu": self.codebook.mu}
        new_words = self.codebook.candidates(tokens, views["choices"])  # (n, D)
        return Step(loss, logs, {"contrasts": contrasts, "words": new_words})

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Move mu after every forward pass, and replace the oldest words once per update."""
        self.codebook.follow(observed["contrasts"])
        if progress.is_last_micro_batch:
            self.codebook.replace_oldest(observed["words"])

    @torch.no_grad()
    def teacher_targets(self, images: Tensor) -> tuple[Tensor, Tensor, TeacherTargets]:
        """Images (V*B, 3, H, W) -> the teacher's patch tokens (V, B, L, D), their mean contrasts with the codebook
        (V,), and the targets."""
        tokens = self.teacher(images)[0][:, self.spec.prefix :].unflatten(0, (2, -1))
        q_T, entropies, contrasts = self.codebook.assign(tokens)
        y_T = self.codebook.pooled(q_T)
        targets = TeacherTargets(
            images, tokens.flatten(0, 1), q_T.flatten(0, 1), entropies.flatten(0, 1), y_T, self.codebook.words
        )
        return tokens, contrasts, targets

    def student_rounds(self, images: Tensor, noise: Tensor) -> list[StudentOutput]:
        """Images (V*B, 3, H, W), noise (B, drawn rounds, V, L) -> the student's output in each round of masks.

        The patches are embedded once for all rounds.
        """
        patches = self.student.add_positions(self.student.project(images), self.spec.grid)
        orders, rounds = self.rounds.orders(noise), self.rounds
        return [
            self.encode_masked(patches, order[:, :decoded], visible)
            for order, visible, decoded in zip(orders, rounds.visible, rounds.decoded, strict=True)
        ]

    def encode_masked(self, patches: Tensor, ids: Tensor, visible: int) -> StudentOutput:
        """Encode the patches (V*B, L, D), with positions, that the first `visible` of the ids (V*B, m) name."""
        layers = [-1, *(-1 - before for before in self.early_layers)]
        last, *early = self.student.encode(patches, keep=ids[:, :visible], layers=layers, norm=False)
        last, prefix = self.student.normalise(last), self.spec.prefix
        embedding = last[:, prefix:].mean(dim=1) if self.spec.pool == "avg" else last[:, 0]
        # As in the code: earlier blocks come without the final norm, the last block with it. `LocalPrediction`
        # normalises both, so that the last block is normalised twice.
        early = [tokens if before else last for tokens, before in zip(early, self.early_layers, strict=True)]
        return StudentOutput(embedding, [tokens[:, prefix:] for tokens in early], ids)

    def image_loss(self, rounds: list[StudentOutput], targets: TeacherTargets) -> Tensor:
        """L_IMG of one direction (Eq. 5 and 6): each masked view predicts y_T of the other view."""
        w_b = self.generator(targets.words)  # W^b (K, D)
        other_y_T = targets.y_T.flip(0).flatten(0, 1)  # (V*B, K)
        embeddings = torch.stack([student.embedding for student in rounds])  # (rounds, V*B, D)
        entropies = torch.special.entr(other_y_T).sum(dim=-1)  # (V*B,)
        return divergences(embeddings, w_b, other_y_T @ w_b, entropies, self.settings.kappa).mean()

    def local_loss(self, rounds: list[StudentOutput], targets: TeacherTargets) -> Tensor:
        """L_LOC of one direction (Eq. 3 and 4), summed over the decoders: each masked view predicts the targets of its
        own patches."""
        losses = [prediction(rounds, number, targets) for number, prediction in enumerate(self.predictions)]
        return torch.stack(losses).sum()

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses of predicting the batch's mean assignment everywhere; none for targets that are not assignments."""
        images = torch.cat([views[name][:BASELINE_IMAGES] for name in ("first", "second")])
        _, _, targets = self.teacher_targets(images)
        baselines = {}
        if self.generator is not None:
            baselines["loss_img"] = DIRECTIONS * assignment_baseline(targets.y_T.flatten(0, 1))
        if self.predictions and self.settings.target == "assignments":
            baseline = assignment_baseline(targets.q_T.flatten(0, 1))
            baselines["loss_loc"] = DIRECTIONS * len(self.predictions) * baseline
        return baselines

    def alpha(self, progress: TrainProgress) -> float:
        """The teacher's momentum in this update (util/misc.py:462-474)."""
        settings = self.settings
        return cosine(settings.teacher_momentum, settings.teacher_momentum_end, progress.step / progress.steps)

    def groups(self) -> list[Group]:
        """The weight generators have groups of their own, with constant learning rate and weight decay
        (main_pretrain.py:90, 163; util/misc.py:498-511)."""
        prefixes = {f"{name}." for name, module in self.named_modules() if isinstance(module, WeightGenerator)}
        generators = {name: p for name, p in self.named_parameters() if name.startswith(tuple(prefixes))}
        trunk_and_heads = [(name, p) for name, p in self.named_parameters() if name not in generators]
        generator_groups = decay_groups(generators.items(), weight_decay=self.settings.generator_weight_decay)
        generator_groups = [replace(group, lr=self.settings.generator_lr) for group in generator_groups]
        return decay_groups(trunk_and_heads) + generator_groups

    def encoders(self) -> dict[str, Encoder]:
        return {"teacher": Encoder(vit=self.teacher), "student": Encoder(vit=self.student)}


class Codebook(nn.Module):
    """Words (K, D) of unit length, and mu, the running mean of the contrast, which sets the assignments' temperature.

    The contrast of a patch is its largest cosine similarity to a word minus its mean similarity (section 3.1).
    """

    def __init__(self, settings: Settings, width: int, grid: tuple[int, int]) -> None:
        super().__init__()
        words, self.new_words, self.border = settings.words, settings.new_words, settings.border
        if words % self.new_words or words < 2:
            raise ValueError(f"new_words={self.new_words} must divide words={words}, which must be 2 or more")
        if 2 * self.border >= min(grid):
            raise ValueError(
                f"border={self.border} leaves nothing of {grid[0]} x {grid[1]} patches; lower it, 0 for none"
            )
        self.grid, self.inv_delta, self.kind = grid, settings.inv_delta, settings.new_word
        # Negative numbers become 0 (models_moca.py:61-62).
        self.register_buffer("words", l2_normalize(torch.randn(words, width).clamp(min=0)))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.int64))  # number of the word that is replaced next
        self.register_buffer("mu", torch.tensor(MU_START))
        self.register_buffer("mu_of_update", torch.tensor(MU_START))  # mu when words were last replaced
        ids = torch.arange(grid[0] * grid[1]).reshape(grid)
        self.register_buffer("inner", self.without_border(ids.unsqueeze(-1)).flatten(), persistent=False)

    def without_border(self, cells: Tensor) -> Tensor:
        """(..., h, w, x) -> (..., h - 2 border, w - 2 border, x)."""
        (height, width), border = self.grid, self.border
        return cells[..., border : height - border, border : width - border, :]

    @torch.no_grad()
    def assign(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's patches (V, B, L, D) -> their assignments q_T (V, B, L, K), which sum to 1, the entropies of
        q_T (V, B, L), and the mean contrast of each view (V,).

        q_T = softmax(cos(patch, words) / tau_T), section 3.1. tau_T is mu / inv_delta as in the code
        (models_moca.py:150-151); the paper's 1 / (10 mu) would reverse the effect of mu. mu is that of the last update,
        and so the same for all views.
        """
        tokens = l2_normalize(tokens)
        cosines = to_float32(tokens @ self.words.T)
        # The mean of the similarities is the similarity to the mean word, which saves a pass over K numbers.
        contrasts = cosines.amax(dim=-1) - tokens @ self.words.mean(dim=0)
        log_q_T = cosines.mul_(self.inv_delta / self.mu_of_update).log_softmax(dim=-1)
        q_T = log_q_T.exp()
        return q_T, -log_q_T.mul_(q_T).sum(dim=-1), contrasts.mean(dim=(1, 2)).to(self.mu)

    @torch.no_grad()
    def follow(self, contrasts: Tensor) -> None:
        """Move mu towards the contrasts (V,), averaged over all processes, one view after the other."""
        world = current_world()
        world.all_reduce(contrasts)
        for contrast in contrasts / world.size:
            self.mu.lerp_(contrast, 1.0 - MU_DECAY)

    def pooled(self, q_T: Tensor) -> Tensor:
        """Assignments q_T (V, B, L, K) -> y_T (V, B, K), their mean over the patches within the border; sums to 1."""
        return self.without_border(q_T.unflatten(2, self.grid)).mean(dim=(2, 3))

    @torch.no_grad()
    def candidates(self, tokens: Tensor, choices: Tensor) -> Tensor:
        """Tokens (V, B, L, D) -> n new words of unit length (n, D), from n different images of one of the two views.

        choices (B, 3) in [0, 1) decide: the view, by the first image's number; the n images, those with the smallest
        numbers; and the token of each image. Raises ValueError for fewer than n images.
        """
        if len(choices) < self.new_words:
            raise ValueError(f"new_words={self.new_words} is more than the {len(choices)} images of a forward pass")
        view = (choices[:1, 0] >= 0.5).long()  # (1,): indexing with a scalar would wait for the GPU
        images = choices[:, 1].argsort()[: self.new_words]
        token_ids = self.inner[(choices[:, 2] * len(self.inner)).long()]  # (B,)
        if self.kind == "avg_token":
            words = tokens[view, images][:, self.inner].mean(dim=1)
        elif self.kind == "token":
            words = tokens[view, images, token_ids[images]]
        else:  # farthest; inferred, as the paper's A.2 gives no details
            token_per_image = l2_normalize(tokens[view, torch.arange(len(choices), device=view.device), token_ids])
            words = token_per_image[farthest(token_per_image, self.words, self.new_words)]
        return l2_normalize(words).to(self.words)

    @torch.no_grad()
    def replace_oldest(self, words: Tensor) -> None:
        """Replace the n oldest words with new ones (n, D).

        Each process adds words of its own images, but the next forward pass begins with the codebook of the first
        process, as with DDP in the source: an update adds n words, whatever the number of processes.
        """
        places = (self.oldest + torch.arange(self.new_words, device=words.device)) % len(self.words)
        self.words.index_copy_(0, places, words)
        self.oldest.add_(self.new_words).remainder_(len(self.words))
        self.mu_of_update.copy_(self.mu)


def farthest(candidates: Tensor, words: Tensor, count: int) -> Tensor:
    """Farthest-point sampling: candidates (B, D) and words (K, D), unit vectors -> ids (count,) of candidates, each the
    farthest from the words and from the candidates chosen before it."""
    similarities = (candidates @ words.T).amax(dim=1)  # to the nearest word or chosen candidate
    chosen = []
    for _ in range(count):
        chosen.append(similarities.argmin())
        similarities = torch.maximum(similarities, candidates @ candidates[chosen[-1]])
    return torch.stack(chosen)


class WeightGenerator(nn.Module):
    """Words (K, D) -> prototypes (K, d) of unit length, section 3.2.1. hidden: width of the hidden layer.

    The batch norm is over the K words, which are the same in every process. If d differs from D, the skip connection is
    a linear layer, which the paper does not mention.
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


def divergences(
    embeddings: Tensor, prototypes: Tensor, mean_prototypes: Tensor, entropies: Tensor, kappa: float
) -> Tensor:
    """KL(q || softmax(kappa z W^T)) of each embedding (Eq. 2 and 5): the cross-entropy minus the target's entropy.

    The assignments q (..., K) enter only by their mean prototypes and entropies, as the sum over k of q_k times logit k
    is kappa z (q W): no round of masks has to gather (..., K) numbers.

    Args:
        embeddings: z (..., d).
        prototypes: W (K, d).
        mean_prototypes: q W (..., d).
        entropies: of q (...).
        kappa: inverse temperature.
    """
    logits = to_float32(kappa * embeddings @ prototypes.T)
    target_logits = kappa * (to_float32(embeddings) * to_float32(mean_prototypes)).sum(dim=-1)
    return logits.logsumexp(dim=-1) - target_logits - entropies


class AssignmentTarget(nn.Module):
    """The teacher's assignments of the same view (Eq. 2 to 4), for visible and masked patches."""

    def __init__(self, generator: WeightGenerator, kappa: float) -> None:
        super().__init__()
        self.generator, self.kappa = generator, kappa

    def prepare(self, targets: TeacherTargets) -> tuple[Tensor, Tensor, Tensor]:
        """W^d (K, d), q_T W^d of all patches (V*B, L, d), and the entropies of q_T (V*B, L)."""
        w_d = self.generator(targets.words)
        return w_d, targets.q_T @ w_d, targets.entropies

    def loss(self, decoded: Tensor, student: StudentOutput, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean divergence of the decoded patches (V*B, m, d). prepared: from `prepare`."""
        w_d, mean_prototypes, entropies = prepared
        entropies = entropies.gather(1, student.ids)
        return divergences(decoded, w_d, take(mean_prototypes, student.ids), entropies, self.kappa).mean()


class PixelTarget(nn.Module):
    """MAE's loss on the masked patches (section 4.2, tables 3 and 8; that only masked patches count is inferred)."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.pixels = xavier_(nn.Linear(width, patch**2 * 3))

    def prepare(self, targets: TeacherTargets) -> Tensor:
        """Pixels of all patches (V*B, L, 3pp)."""
        return patchify(targets.images, self.patch)

    def loss(self, decoded: Tensor, student: StudentOutput, patches: Tensor) -> Tensor:
        """Mean squared error of the masked ones of the decoded patches (V*B, m, d). patches: from `prepare`."""
        masked = slice(student.visible, None)
        predictions = self.pixels(decoded[:, masked])
        targets = normalised(take(patches, student.ids[:, masked]))
        return (predictions - targets).square().mean()


class EmbeddingTarget(nn.Module):
    """Cosine distance to the teacher's tokens (section 4.2, table 3), for the patches whose assignments would be
    predicted, which is inferred."""

    def __init__(self, width: int, width_out: int) -> None:
        super().__init__()
        self.tokens = xavier_(nn.Linear(width, width_out))

    def prepare(self, targets: TeacherTargets) -> Tensor:
        """The teacher's patch tokens (V*B, L, D)."""
        return targets.tokens

    def loss(self, decoded: Tensor, student: StudentOutput, tokens: Tensor) -> Tensor:
        """Mean cosine distance of the decoded patches (V*B, m, d). tokens: from `prepare`."""
        predictions, targets = self.tokens(decoded), take(tokens, student.ids)
        cosines = (l2_normalize(predictions) * l2_normalize(targets)).sum(dim=-1)
        return 1.0 - cosines.mean()


class LocalPrediction(nn.Module):
    """One decoder with its loss. Patch tokens are normalised here; the image embedding is normalised already."""

    def __init__(self, decoder: TokenDecoder, target: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder, self.target = decoder, target

    def forward(self, rounds: Sequence[StudentOutput], number: int, targets: TeacherTargets) -> Tensor:
        """The mean loss over the rounds. number: of this decoder."""
        prepared = self.target.prepare(targets)  # the same in all rounds
        losses = []
        for student in rounds:
            decoded = self.decode(student.embedding, student.early[number], student.ids)  # (V*B, m, d)
            losses.append(self.target.loss(decoded, student, prepared))
        return torch.stack(losses).mean()

    def decode(self, embedding: Tensor, patches: Tensor, ids: Tensor) -> Tensor:
        """Image embeddings (V*B, D), visible patches (V*B, k, D), ids (V*B, m) -> decoded patches (V*B, m, d)."""
        tokens = torch.cat([embedding.unsqueeze(1), self.norm(patches)], dim=1)
        return self.decoder(tokens, ids)


METHOD = Moca

_VIT_B = Recipe(
    source="valeoai/MOCA README and main_pretrain.py, v1.0: teacher momentum 0.994 and rising weight decay, where "
    "Gidaris et al. 2024, table 11, has 0.99 and 0.05",
    spec=replace(VIT_B, **SINCOS, pool="avg"),
    settings=Settings(),
    epochs=200,
    batch=2048,
    lr=1.5e-4,  # per 256 images, so 1.2e-3; the paper's section 4 calls 1.5e-4 the peak, its table 11 the base
    schedule=WarmupCosine(warmup=30, stretch=1.25),  # ends at 12 % of the peak; not in the paper
    weight_decay=0.05,
    weight_decay_schedule=CosineTo(end=0.2),
    clip=0.1,  # not in the paper
)
_VIT_B_PAPER = replace(
    _VIT_B,
    source="Gidaris et al. 2024, table 11, with the released code's schedule, clipping and masks (v0.9)",
    settings=Settings(teacher_momentum=0.99),
    weight_decay_schedule=Constant(),
)
# For small grids: a border of one patch, no blur, one decoder block on the patches of the third block of four.
_SMALL = dict(border=1, early_layers=(1,), decoder_depth=1, generator_lr=1e-3, crop_scale=(0.4, 1.0), blur=(0.0, 0.0))
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_v0.9": _VIT_B_PAPER,
    "vit_b_400": replace(_VIT_B_PAPER, source="Gidaris et al. 2024, table 9; else as v0.9", epochs=400),
    "vit_b_100": replace(_VIT_B_PAPER, source="Gidaris et al. 2024, table 1b (100 epochs, two rounds)", epochs=100),
    "vit_b_ablation": replace(
        _VIT_B_PAPER,
        source="Gidaris et al. 2024, section 4.1: 100 epochs, one round; the base of table 2",
        settings=Settings(teacher_momentum=0.99, mask_ratios=(0.65,), decoder_mask_ratios=(0.45,)),
        epochs=100,
    ),
    "vit_b_ablation_200": replace(
        _VIT_B_PAPER,
        source="Gidaris et al. 2024, tables 3 and 4: 200 epochs, one round as in section 4.1",
        settings=Settings(teacher_momentum=0.99, mask_ratios=(0.65,), decoder_mask_ratios=(0.45,)),
    ),
    "vit_l": replace(
        _VIT_B_PAPER,
        source="Gidaris et al. 2024, table 9; early_layers is the code's default, the paper does not say",
        spec=replace(VIT_L, **SINCOS, pool="avg"),
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(**_SMALL, words=512, decoder_width=96, decoder_heads=3, teacher_momentum=0.99),
        source="ours: the ViT-B recipe on images of 32 px, for two cores: few epochs of small updates",
        epochs=2,
        batch=64,
        schedule=WarmupCosine(warmup=0.1),
        weight_decay_schedule=Constant(),
        clip=1.0,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(**_SMALL, words=64, decoder_width=32, decoder_heads=2, teacher_momentum=0.9, solarise=0.0),
        schedule=WarmupCosine(warmup=0.5),
        weight_decay_schedule=Constant(),
        clip=1.0,
    ),
}
