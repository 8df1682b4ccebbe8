"""Prototypes made of a codebook's words, and the loss of a student that predicts assignments with them.

The codebook changes at every step, so the student's prototypes are generated from its words: MOCA section 3.2.1 and
C.1, valeoai/MOCA models_moca.py:204-218, 263-338. K words, D their width, d the student's width.
"""

from torch import Tensor, nn

from pretrain.parts.losses import l2_normalize, to_float32
from pretrain.parts.weights import xavier_


class WeightGenerator(nn.Module):
    """Words (K, D) -> prototypes (K, d) of length one. hidden: width of the layer between.

    The batch norm goes over the K words, which are the same in every process. Where d is not D the skip connection is
    a layer too, of which the paper says nothing.
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
    q W (..., d) are needed: the sum over k of q_k times a logit is kappa z (q W). So nobody gathers, keeps or goes back
    through (..., K) assignments for each round of masks.
    """
    logits = to_float32(kappa * tokens @ prototypes.T)
    return logits.logsumexp(dim=-1) - kappa * (to_float32(tokens) * to_float32(targets)).sum(dim=-1) - entropies
