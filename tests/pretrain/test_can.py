"""CAN beyond its recorded steps: precision and edge cases of the contrast, effects of settings, views."""

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


def test_similarities_do_not_depend_on_autocast():
    torch.manual_seed(0)
    rows = torch.randn(6, 5)
    for loss in (lambda: nt_xent(rows, 0.2), lambda: contrastive(rows[:3], rows[3:], 0.2, torch.arange(3))):
        exact = loss()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(), exact)


def test_one_image_has_no_negatives():
    assert nt_xent(torch.randn(2, 5), 0.2) == 0 and METHOD.min_batch == 2


def test_each_setting_changes_only_its_loss():
    views = views_of(method_of())
    default_logs = logs_of(method_of(), views)
    for changes, losses in (
        ({"noisy_target": True}, {"pixels"}),
        ({"norm_pixels": False}, {"pixels"}),
        ({"pooled": "all"}, {"contrast"}),
        ({"temperature": 0.5}, {"contrast"}),
    ):
        logs = logs_of(method_of(**changes), views)
        assert {name for name in default_logs if not torch.isclose(logs[name], default_logs[name], rtol=1e-9)} == losses
    noiseless = logs_of(method_of(noise_std=0.0), views)
    assert not torch.isclose(noiseless["noise"], default_logs["noise"])
    assert torch.equal(noiseless["pixels"], logs_of(method_of(noise_std=0.0, noisy_target=True), views)["pixels"])


def test_views_of_an_image_differ_in_all_that_is_drawn():
    for name, pairs in views_of(method_of()).items():
        assert pairs.shape[:2] == (6, 2)
        assert all(not torch.equal(first, second) for first, second in pairs), name
