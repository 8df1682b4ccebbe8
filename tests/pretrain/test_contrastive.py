"""InfoNCE against its formula."""

import torch

from pretrain.parts.losses import contrastive

GENERATOR = torch.Generator().manual_seed(0)
QUERIES, KEYS = torch.randn(4, 8, generator=GENERATOR), torch.randn(6, 8, generator=GENERATOR)


def written_out(positives: list[int], keys: torch.Tensor) -> torch.Tensor:
    """- 2 T log (exp(cos(q, its key) / T) / sum of exp(cos(q, key) / T)), mean over the queries; T = 0.2."""
    losses = []
    for query, positive in zip(QUERIES, positives, strict=True):
        ratios = (torch.cosine_similarity(query, keys) / 0.2).exp()
        losses.append(-2 * 0.2 * (ratios[positive] / ratios.sum()).log())
    return torch.stack(losses).mean()


def test_keys_in_the_queries_order():
    torch.testing.assert_close(
        contrastive(QUERIES, KEYS[:4], 0.2, torch.arange(4)), written_out([0, 1, 2, 3], KEYS[:4])
    )


def test_given_keys_among_more():
    found = contrastive(QUERIES, KEYS, 0.2, torch.tensor([2, 3, 2, 5]))
    torch.testing.assert_close(found, written_out([2, 3, 2, 5], KEYS))


def test_autocast_does_not_reach_the_similarities():
    with torch.autocast("cpu", torch.bfloat16):
        rounded = contrastive(QUERIES, KEYS[:4], 0.2, torch.arange(4))
    assert torch.equal(rounded, contrastive(QUERIES, KEYS[:4], 0.2, torch.arange(4)))
