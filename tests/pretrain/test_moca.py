"""MOCA beyond its recorded steps: options, kinds of words and targets, initial state."""

import math
from dataclasses import replace

import pytest
import torch
from small_trainings import forward_pass
from torch.nn import functional as F

import pretrain.methods.moca as module
from pretrain.loop.trainer import build
from pretrain.method import TrainProgress
from pretrain.methods.moca import RECIPES, Codebook, Settings, farthest
from pretrain.parts.masking import MaskRounds, normalised, patchify

SMOKE = RECIPES["smoke"]
NOW = TrainProgress(step=0, steps_per_epoch=2, epochs=1)
IMAGES = 6


def moca(pool="avg", **changes):
    recipe = replace(SMOKE, spec=replace(SMOKE.spec, pool=pool), settings=replace(SMOKE.settings, **changes))
    return build(module, recipe, seed=0).double()


def views(method, images=IMAGES):
    torch.manual_seed(1)
    size, rounds = method.spec.image_size, method.rounds
    first, second = torch.randn(2, images, 3, size, size, dtype=torch.float64)
    return {
        "first": first,
        "second": second,
        "noise": torch.rand(images, rounds.drawn, 2, rounds.patches),
        "choices": torch.rand(images, 3),
    }


ONE_ROUND = dict(mask_ratios=(0.5,), decoder_mask_ratios=(0.25,))


def test_fewer_images_than_new_words_are_refused():
    ours = moca()
    with pytest.raises(ValueError, match="new_words=4 is more than the 3 images"):
        ours(views(ours, images=3))


def test_complementary_rounds_may_have_different_lengths():
    """7 x 7 patches: 9 are predicted in the first round, 10 in the second, of which one is visible in neither."""
    rounds = MaskRounds(patches=49, mask_ratios=(0.55, 0.75), decoder_mask_ratios=(0.35, 0.55), complementary=True)
    first, second = (order[0].tolist() for order in rounds.orders(torch.rand(1, 1, 2, 49)))
    assert second[12:21] == first[22:31] and second[21] in first[31:] and second[21] not in second[:12]


def codebook(**changes):
    torch.manual_seed(0)
    plain = dict(words=8, new_words=2, border=1, inv_delta=10.0, new_word="token")
    return Codebook(Settings(**plain | changes), width=16, grid=(5, 5)).double()


def test_every_inner_token_can_become_a_word():
    book, places = codebook(words=64, new_words=1), set()
    tokens = torch.randn(2, 1, 25, 16, dtype=torch.float64)
    for number in torch.linspace(0, 1 - 2**-24, 9):
        book.replace_oldest(book.candidates(tokens, torch.tensor([[0.75, 0.0, number]])))
        places.add((F.normalize(tokens[1, 0], dim=1) @ book.words[book.oldest - 1]).argmax().item())
    assert len(places) >= 8 and {6, 18} <= places


def test_the_mean_of_an_image_may_become_a_word():
    book = codebook(new_word="avg_token")
    tokens = torch.randn(2, 4, 25, 16, dtype=torch.float64)
    book.replace_oldest(
        book.candidates(tokens, torch.tensor([[0.2, 0.9, 0.0], [0.9, 0.1, 0.0], [0.9, 0.8, 0.0], [0.9, 0.3, 0.0]]))
    )
    for word, image in ((0, 1), (1, 3)):
        mean = tokens[0, image].reshape(5, 5, 16)[1:4, 1:4].mean(dim=(0, 1))
        assert torch.allclose(book.words[word], F.normalize(mean, dim=0))


def test_the_farthest_directions_are_chosen():
    """By hand: two of four directions that are farthest from the word at 0 degrees and from each other."""
    angles = torch.tensor([10.0, 170.0, 175.0, 80.0]).deg2rad()
    candidates = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert farthest(candidates, torch.tensor([[1.0, 0.0]]), 2).tolist() == [2, 3]


def test_losses_of_two_decoders_are_added():
    both, parts = moca(early_layers=(1, 0)), []
    inputs = views(both)
    total = forward_pass(both, inputs, NOW).logs["loss_loc"].item()
    for number, early in enumerate((1, 0)):
        single = moca(early_layers=(early,))
        state = dict(moca(early_layers=(1, 0)).state_dict())
        for name in single.state_dict():
            state[name] = state[name.replace("predictions.0.", f"predictions.{number}.")]
        single.load_state_dict({name: state[name] for name in single.state_dict()})
        parts.append(forward_pass(single, inputs, NOW).logs["loss_loc"].item())
    assert total == pytest.approx(sum(parts)) and parts[0] != pytest.approx(parts[1])


def test_the_pixel_loss_is_that_of_the_masked_patches():
    ours = moca(target="pixels", image_weight=0.0, **ONE_ROUND)
    inputs = views(ours)
    loss = forward_pass(ours, inputs, NOW).loss.item()
    images = torch.cat([inputs["first"], inputs["second"]])
    (masked_round,) = ours.student_rounds(images, inputs["noise"])
    prediction = ours.predictions[0]
    reconstruction = prediction.target.pixels(
        prediction.decode(masked_round.embedding, masked_round.early[0], masked_round.ids)
    )
    patches = normalised(patchify(images, ours.spec.patch_size))
    errors = [
        (reconstruction[row, position] - patches[row, masked_round.ids[row, position]]).square().mean().item()
        for row in range(2 * IMAGES)
        for position in range(8, 12)
    ]
    assert (masked_round.visible, masked_round.ids.shape[1]) == (8, 12)
    assert loss == pytest.approx(2 * sum(errors) / len(errors))


def test_the_embedding_loss_is_that_of_cosines():
    ours = moca(target="embeddings", image_weight=0.0, **ONE_ROUND)
    inputs = views(ours)
    loss = forward_pass(ours, inputs, NOW).loss.item()
    images = torch.cat([inputs["first"], inputs["second"]])
    (masked_round,) = ours.student_rounds(images, inputs["noise"])
    prediction, tokens = ours.predictions[0], ours.teacher_targets(images)[0].flatten(0, 1)
    predicted = prediction.target.tokens(
        prediction.decode(masked_round.embedding, masked_round.early[0], masked_round.ids)
    )
    cosines = [
        F.cosine_similarity(predicted[row], tokens[row][masked_round.ids[row]]).mean() for row in range(2 * IMAGES)
    ]
    assert loss == pytest.approx(2 * (1 - torch.stack(cosines).mean().item()))


def test_the_initial_state_follows_the_official_code():
    ours = moca()
    for name, value in ours.teacher.state_dict().items():
        assert torch.equal(value, ours.student.state_dict()[name])
    words = ours.codebook.words
    assert (words >= 0).all() and (words == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    assert torch.allclose(words.norm(dim=1), torch.ones(len(words)).double())
    assert ours.generator.layers[3].bias.eq(0).all()
    bound = math.sqrt(6 / (64 + 128))
    assert 0.9 * bound < ours.generator.layers[0].weight.abs().max() <= bound
