"""CAPI beside its recordings: positions of registers, masks, processes, what each loss trains, resuming, mistakes."""

import random
from dataclasses import replace

import pytest
import torch
from elsewhere import together
from small_trainings import forward_pass, same, trainer
from torch import Tensor
from torch.nn import functional as F
from toys import progress

from checkpoints.vit import ViT
from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.methods.capi import METHOD, RECIPES, Capi, shared_out
from pretrain.parts.mask_shapes import SeenAndPredicted, one_block

SMOKE = RECIPES["smoke"]


def capi(**changes) -> Capi:
    torch.manual_seed(0)
    return METHOD(SMOKE.spec, replace(SMOKE.settings, **changes)).double()


def views(method: Capi, images: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    pictures = torch.randn(images, 3, 16, 16, dtype=torch.float64)
    return {"image": pictures, "ids": torch.stack([method.mask() for _ in range(images)])}


def test_registers_stand_around_what_is_visible():
    rope = ViT(SMOKE.spec).trunk.rope
    whole = [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert rope.positions((4, 4))[:4].tolist() == whole
    keep = torch.tensor([[5, 10], [4, 7]])  # rows 1 and 2, columns 1 and 2; row 1, columns 0 and 3
    third = torch.tensor(1 / 3)
    boxes = rope.positions((4, 4), keep)[:, :4]
    torch.testing.assert_close(boxes[0], third + third * torch.tensor(whole))
    torch.testing.assert_close(boxes[1], torch.tensor([[1.0, 0], [1, 0], [1, 1], [1, 1]]) * torch.tensor([third, 1]))
    image = ViT(replace(SMOKE.spec, register_box="image")).trunk.rope.positions((4, 4), keep)
    assert image[:, :4].tolist() == [whole] * 2 and torch.equal(image[:, 4:], rope.positions((4, 4), keep)[:, 4:])
    corner = ViT(replace(SMOKE.spec, register_place="corner")).trunk.rope.positions((4, 4), keep)
    assert (corner[0, :4] == third).all()


@pytest.mark.parametrize("count", [1, 6, 15])
def test_a_block_is_connected_across_the_edges(count):
    for roll in (False, True):
        for _ in range(50):
            block = one_block((4, 4), count, roll)
            assert block.sum() == count
            rows, columns = (block.any(dim=axis).nonzero().flatten() for axis in (1, 0))
            if not roll:
                assert rows[-1] - rows[0] < len(rows) and columns[-1] - columns[0] < len(columns)


def test_predicted_patches_are_hidden_ones():
    draw = SeenAndPredicted(shape="inverse_block", grid=(8, 8), hidden=41, predicted=10, roll=True)
    visible, predicted = draw().split([draw.seen, draw.predicted])
    assert draw.seen == 23 and len(set(visible.tolist()) | set(predicted.tolist())) == 33


def test_clusters_are_used_alike_at_each_position():
    scores = torch.randn(3, 24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = shared_out(5 * scores, 200)
    torch.testing.assert_close(shares.sum(dim=1), torch.full((3, 4), 6.0, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(3, 24, dtype=torch.float64))


def test_each_loss_trains_its_own():
    method = capi()
    step = forward_pass(method, views(method), progress())
    step.loss.backward()
    gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    method.zero_grad()
    targets, clustering = method.assign(views(method)["image"])
    assert not targets.requires_grad
    clustering.backward()
    of_clusters = {name for name, p in method.named_parameters() if p.grad is not None}
    assert of_clusters == {"clusters.weight", "clusters.bias"}
    assert all(torch.equal(method.get_parameter(name).grad, gradients[name]) for name in of_clusters)
    torch.testing.assert_close(step.loss.detach(), step.logs["prediction"] + step.logs["clustering"])


def test_a_mask_token_sees_the_visible_patches_and_no_other_mask_token():
    method = capi(predictor_depth=2)
    batch = views(method)
    visible, predicted = batch["ids"].tensor_split([method.mask.seen], dim=1)
    tokens = method.predict(batch["image"], visible, predicted)
    alone = method.predict(batch["image"], visible, predicted[:, 1:2])
    torch.testing.assert_close(tokens[:, 1:2], alone)
    hidden = F.one_hot(visible, 16).sum(dim=1).view(4, 1, 4, 4).repeat_interleave(4, -1).repeat_interleave(4, -2) == 0
    torch.testing.assert_close(method.predict(batch["image"] + hidden, visible, predicted), tokens)


def updated(world: World, **changes) -> dict[str, Tensor]:
    """After three updates with the process's share of one batch."""
    recipe = replace(SMOKE, settings=replace(SMOKE.settings, **changes))
    updates = Updates(capi(**changes), recipe, world=world)
    share = slice(2 * world.rank, 2 * world.rank + 2) if world.size > 1 else slice(None)
    batch = {name: tensor[share] for name, tensor in views(updates.method).items()}
    for step in range(3):
        updates.run([batch], replace(progress(), step=step + 1, epochs=4))
    return {name: tensor.detach() for name, tensor in updates.method.state_dict().items()}


def updated_both(world: World) -> list[dict[str, Tensor]]:
    return [updated(world), updated(world, sinkhorn_by_position=False)]


def test_two_processes_train_as_one():
    for first, second, one in zip(*together(updated_both), updated_both(World()), strict=True):
        assert same(first, second)
        for name, tensor in one.items():
            torch.testing.assert_close(first[name], tensor, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.slow
def test_a_training_with_stochastic_depth_goes_on_exactly(tmp_path):
    recipe = {"settings": replace(SMOKE.settings, drop_path=0.3)}
    whole = trainer("capi", tmp_path / "whole", recipe=recipe)
    whole.train()
    part = trainer("capi", tmp_path / "part", recipe=recipe, monitor=lambda *_: part.stop() or {}, monitor_every=1)
    assert part.train() == "stopped"
    rest = trainer("capi", tmp_path / "part", recipe=recipe, resume=True)
    assert rest.train() == "finished" and same(rest.state().tensors, whole.state().tensors)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ({"rotary": "centred", "query_norm": True}, {}, "the encoder needs rotary=unit, query_norm=False"),
        ({}, {"predicted_share": 0.05}, "predicted_share=0.05 of 10 hidden patches is none .* raise it to 0.1"),
        ({}, {"mask_ratio": 0.01}, "predicted_share=0.5 of 0 hidden patches is none"),
        ({"registers": 6}, {}, "registers=6: a border of four sides needs a multiple of 4"),
    ],
)
def test_mistakes_are_named(spec, settings, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        METHOD(replace(SMOKE.spec, **spec), replace(SMOKE.settings, **settings))
