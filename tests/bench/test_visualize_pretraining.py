"""Pictures of pretrainings: what methods show their networks, and what these rebuild."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bench.visualize.inputs import as_image, given_views, method_views, visible_patches
from bench.visualize.kinds.masks import Masks, view_panel
from engine.extensions import load_extension, source_files
from pretrain.loop.trainer import build
from pretrain.method import Method
from pretrain.parts.masking import order_of


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 28, 3), np.uint8))


def smoke(name: str) -> Method:
    module = load_extension("methods", name)
    return build(module, module.RECIPES["smoke"], seed=0)


class TestMasks:
    @pytest.mark.parametrize("name", source_files("methods"))
    def test_every_method_shows_what_its_networks_get(self, name, photo):
        method = smoke(name)
        views = given_views(method, method_views(method, photo, 0, 0))
        assert any(view.network == "student" for view in views)
        again = given_views(method, method_views(method, photo, 0, 0))
        assert len(views) == len(again) and all(map(lambda one, other: one.same_as(other), views, again))

    @pytest.mark.parametrize("name", ["mae", "simmim", "extrema"])
    def test_what_is_hidden_is_what_the_noise_says(self, name, photo):
        method = smoke(name)
        views = method_views(method, photo, 0, 0)
        order = order_of(views["noise"].reshape(1, -1))[0].numpy()
        seen = [view for view in given_views(method, views) if view.network == "student"]
        if name == "extrema":
            expected = [order[part * method.keep : (part + 1) * method.keep] for part in range(method.settings.masks)]
        elif name == "simmim":
            expected = [method.predictor.blocks[order[: method.predictor.visible]].flatten().numpy()]
        else:
            expected = [order[: method.autoencoder.visible]]
        found = [np.flatnonzero(~view.hidden) for view in seen]
        assert len(found) == len(expected) and all(map(np.array_equal, found, map(np.sort, expected)))

    def test_hidden_patches_are_grey_and_the_others_the_view(self, photo):
        method = smoke("mae")
        views = method_views(method, photo, 0, 0)
        (view,) = given_views(method, views)
        shown, whole = view_panel(view, method.preparation).values, as_image(views["image"][0], method.preparation)
        hidden = np.kron(view.hidden, np.ones((4, 4), bool))
        assert (shown[hidden] == 127).all() and np.array_equal(shown[~hidden], whole[~hidden])

    def test_patches_are_told_by_position_where_a_part_was_taken(self):
        whole = torch.randn(1, 6, 4)
        parts = torch.stack([whole[0, [4, 1]], whole[0, [0, 5]]])
        assert [row.nonzero().flatten().tolist() for row in visible_patches(whole, parts, None)] == [[1, 4], [0, 5]]

    def test_methods_that_are_not_there_are_named(self):
        with pytest.raises(ValueError, match="methods=mea: there is no such method; did you mean 'mae'"):
            Masks(methods=("mea",))

    def test_the_command_needs_no_checkpoint(self, photo, bench, tmp_path):
        photo.save(tmp_path / "photo.png")
        words = ("--images", tmp_path / "photo.png", "--set", "methods=mae,msn", "recipe=smoke", "views=2")
        code, said, _ = bench("visualize", "masks", *words, "--out", tmp_path / "out", "--format", "svg")
        text = Path(tmp_path / "out/masks.svg").read_text()
        assert code == 0 and "masks.svg" in said
        assert "mae smoke" in text and "student, 16 px, 75% hidden" in text and "2 more are not shown" in text
