"""Pictures of pretrainings: what methods show their networks, and what these rebuild."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_trainings import digits, trainer

from bench.reporting.kinds.masks import Masks, encoder_inputs, input_panel, panel_rows, visible_patches
from bench.reporting.kinds.reconstruction import TrainedRun, pixel_error, reconstructed
from bench.reporting.visualize import PictureRequest, as_image, method_views
from engine.extensions import load_extension, source_files
from pretrain.loop.trainer import build
from pretrain.method import Method
from pretrain.parts.masking import order_of, patchify


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
        views = encoder_inputs(method, method_views(method, photo, 0, 0))
        assert any(view.network == "student" for view in views)
        again = encoder_inputs(method, method_views(method, photo, 0, 0))
        assert len(views) == len(again) and all(map(lambda one, other: one.same_as(other), views, again))

    @pytest.mark.parametrize("name", ["mae", "simmim", "extrema"])
    def test_what_is_hidden_is_what_the_noise_says(self, name, photo):
        method = smoke(name)
        views = method_views(method, photo, 0, 0)
        order = order_of(views["noise"].reshape(1, -1))[0].numpy()
        seen = [view for view in encoder_inputs(method, views) if view.network == "student"]
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
        (view,) = encoder_inputs(method, views)
        shown, whole = input_panel(view, method.preparation).values, as_image(views["image"][0], method.preparation)
        hidden = np.kron(view.hidden, np.ones((4, 4), bool))
        assert (shown[hidden] == 127).all() and np.array_equal(shown[~hidden], whole[~hidden])

    def test_patches_are_told_by_position_where_a_part_was_taken(self):
        whole = torch.randn(1, 6, 4)
        parts = torch.stack([whole[0, [4, 1]], whole[0, [0, 5]]])
        assert [row.nonzero().flatten().tolist() for row in visible_patches(whole, parts, None)] == [[1, 4], [0, 5]]

    def test_no_view_is_left_out_unless_asked(self, photo):
        """DINO's two global and many local crops, and the teacher's two, in rows of eight."""
        method = smoke("dino")
        views = encoder_inputs(method, method_views(method, photo, 0, 0))
        panels = Masks().panels(views, method.preparation)
        assert len(panels) == len(views) and panels[-1].title.startswith("teacher")
        rows = panel_rows(panels[0], [panels[0]] * 11, "dino")
        assert [len(row.panels) for row in rows] == [9, 4] and [row.label for row in rows] == ["dino", ""]
        assert rows[0].panels[0] and rows[1].panels[0] is None
        few = Masks(views=1).panels(views, method.preparation)
        assert [panel.title[:7] for panel in few] == ["student", "teacher"]
        students = sum(view.network == "student" for view in views)
        assert few[0].caption == f"{students - 1} more are not shown"

    def test_methods_that_are_not_there_are_named(self):
        with pytest.raises(ValueError, match="methods=mea: there is no such method; did you mean 'mae'"):
            Masks(methods=("mea",))

    def test_the_command_needs_no_checkpoint(self, photo, bench, tmp_path):
        photo.save(tmp_path / "photo.png")
        words = ("--images", tmp_path / "photo.png", "--set", "methods=mae,msn", "recipe=smoke", "views=1")
        code, said, _ = bench("visualize", "masks", *words, "--out", tmp_path / "out", "--format", "svg")
        text = Path(tmp_path / "out/masks.svg").read_text()
        assert code == 0 and "masks.svg" in said
        assert "mae smoke" in text and "student, 16 px, 75% hidden" in text and "2 more are not shown" in text


class TestReconstruction:
    @pytest.mark.parametrize("name", ["mae", "simmim", "lut", "mst", "can"])
    def test_what_is_drawn_has_the_error_that_the_loss_says(self, name, photo):
        """`reconstruct` of the first view, against the method's own forward pass on the same views."""
        method = smoke(name).eval()
        views = method_views(method, photo, 0, 0)
        images = views.get("image", views.get("view1", views.get("global")))
        with torch.no_grad():
            step = method(views)
            found = method.reconstruct(images if images.ndim == 4 else images[:, 0], views)
        said, whole = (patchify(values, 4) for values in (found.prediction, found.images))
        assert torch.equal(said[~found.predicted], whole[~found.predicted])
        assert found.hidden.any() or name == "mst"  # it hides one patch of 160
        errors = (said - whole)[found.predicted]
        if name in ("mae", "lut", "can"):  # in deviations of each patch
            errors = errors / (whole.var(dim=-1, keepdim=True) + 1e-6).sqrt().expand_as(whole)[found.predicted]
        loss = {"mae": step.loss, "simmim": step.loss, "lut": step.logs.get("mim")}.get(name)
        mean = errors.abs().mean() if name == "simmim" else errors.square().mean()
        if loss is not None:  # those of MST and CAN are on two views
            assert mean.item() == pytest.approx(loss.item(), rel=1e-4)

    def test_the_error_falls_with_training(self, tmp_path, bench, photo):
        """A run's own states: before the first update and after the last."""
        trainer("mae", tmp_path / "run", recipe={"epochs": 12}).train()
        run = TrainedRun(*PictureRequest(references=(str(tmp_path / "run"),), sources=()).checkpoints)
        assert run.name == "mae, epoch 12"
        images = [digits().image(index) for index in range(6)]
        after = np.mean([pixel_error(reconstructed(run, image, 0, 0), run.method) for image in images])
        run.method.load_state_dict(smoke("mae").state_dict())
        before = np.mean([pixel_error(reconstructed(run, image, 0, 0), run.method) for image in images])
        assert after < 0.9 * before
        words = ("--checkpoint", tmp_path / "run", "--images", "digits:", "--limit", "1", "--out", tmp_path / "out")
        assert bench("visualize", "reconstruction", *words, "--format", "svg")[0] == 0
        text = (tmp_path / "out/reconstruction.svg").read_text()
        assert "mae, epoch 12" in text and "75% hidden" in text and "error " in text
        words = ("visualize", "reconstruction", "--checkpoint", tmp_path / "run/export", *words[2:])
        code, _, error = bench(*words)
        assert code == 2 and f"contains only the encoder: name {tmp_path / 'run'}" in error

    def test_a_method_without_pixels_says_so(self, tmp_path, bench):
        trainer("dino", tmp_path / "run", recipe={"epochs": 1}).train()
        words = ("--checkpoint", tmp_path / "run", "--images", "digits:", "--out", tmp_path / "out")
        code, _, error = bench("visualize", "reconstruction", *words)
        assert code == 2 and "dino, epoch 1 predicts no pixels: MAE, SimMIM, LUT, MST and CAN do" in error
