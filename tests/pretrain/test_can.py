"""CAN beside its recordings: precision and edges of its contrast, what settings change, and its views."""

from dataclasses import replace

import torch
from small_trainings import forward_pass
from toys import SMALL, progress, views_of

from pretrain.method import Method
from pretrain.methods.can import METHOD, RECIPES
from pretrain.parts.losses import contrastive, nt_xent
from pretrain.recipe import SINCOS

SPEC = replace(SMALL, **SINCOS)
SETTINGS = RECIPES["smoke"].settings


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def logs_of(method: Method, views: dict) -> dict:
    return dict(forward_pass(method, views, progress()).logs)


def test_autocast_does_not_reach_the_similarities():
    torch.manual_seed(0)
    rows = torch.randn(6, 5)
    for loss in (lambda: nt_xent(rows, 0.2), lambda: contrastive(rows[:3], rows[3:], 0.2, torch.arange(3))):
        exact = loss()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(), exact)


def test_one_image_has_no_negatives():
    assert nt_xent(torch.randn(2, 5), 0.2) == 0 and METHOD.min_batch == 2


def test_what_the_settings_change():
    """Only the loss that they are about."""
    views = views_of(method_of())
    plain = logs_of(method_of(), views)
    for changes, touched in (
        ({"noisy_target": True}, {"pixels"}),
        ({"norm_pixels": False}, {"pixels"}),
        ({"pooled": "all"}, {"contrast"}),
        ({"temperature": 0.5}, {"contrast"}),
    ):
        found = logs_of(method_of(**changes), views)
        assert {name for name in plain if not torch.isclose(found[name], plain[name], rtol=1e-9)} == touched
    silent = logs_of(method_of(noise_std=0.0), views)
    assert not torch.isclose(silent["noise"], plain["noise"])
    assert torch.equal(silent["pixels"], logs_of(method_of(noise_std=0.0, noisy_target=True), views)["pixels"])


def test_views_of_an_image_differ_in_all_that_is_drawn():
    for name, both in views_of(method_of()).items():
        assert both.shape[:2] == (6, 2)
        assert all(not torch.equal(first, second) for first, second in both), name
