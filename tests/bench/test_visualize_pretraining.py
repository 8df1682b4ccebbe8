"""Pictures of pretrainings: inputs of the networks with their masks, and reconstructions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_trainings import digits, trainer
from test_method_contract import METHODS

from bench.reports.kinds.masks import Masks, encoder_inputs, input_panel, panel_rows, visible_patches
from bench.reports.kinds.reconstruction import TrainedRun, pixel_error, reconstructed
from bench.reports.visualize import PictureRequest, as_image, method_views
from engine.extensions import load_extension
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
    @pytest.mark.parametrize("name", METHODS)
    def test_inputs_of_every_method_are_drawn_reproducibly(self, name, photo):
        method = smoke(name)
        views = encoder_inputs(method, method_views(method, photo, 0, 0))
        assert any(view.network == "student" for view in views)
        repeated = encoder_inputs(method, method_views(method, photo, 0, 0))
        assert all(view.same_as(again) for view, again in zip(views, repeated, strict=True))

    @pytest.mark.parametrize("name", ["mae", "simmim", "extrema"])
    def test_hidden_patches_follow_from_the_noise(self, name, photo):
        method = smoke(name)
        views = method_views(method, photo, 0, 0)
        order = order_of(views["noise"].reshape(1, -1))[0].numpy()
        student_views = [view for view in encoder_inputs(method, views) if view.network == "student"]
        if name == "extrema":
            expected = [order[part * method.keep : (part + 1) * method.keep] for part in range(method.settings.masks)]
        elif name == "simmim":
            expected = [method.predictor.blocks[order[: method.predictor.visible]].flatten().numpy()]
        else:
            expected = [order[: method.autoencoder.visible]]
        visible = [np.flatnonzero(~view.hidden) for view in student_views]
        assert len(visible) == len(expected) and all(map(np.array_equal, visible, map(np.sort, expected)))

    def test_hidden_patches_are_grey_and_others_unchanged(self, photo):
        method = smoke("mae")
        views = method_views(method, photo, 0, 0)
        (view,) = encoder_inputs(method, views)
        drawn, image = input_panel(view, method.preparation).values, as_image(views["image"][0], method.preparation)
        hidden = np.kron(view.hidden, np.ones((4, 4), bool))
        assert (drawn[hidden] == 127).all() and np.array_equal(drawn[~hidden], image[~hidden])

    def test_visible_patches_are_located_by_their_tokens(self):
        tokens = torch.randn(1, 6, 4)
        selected = torch.stack([tokens[0, [4, 1]], tokens[0, [0, 5]]])
        assert [row.nonzero().flatten().tolist() for row in visible_patches(tokens, selected, None)] == [[1, 4], [0, 5]]

    def test_all_views_are_drawn_unless_limited(self, photo):
        """Global and local crops of DINO's student, and the global crops of its teacher, in rows of eight."""
        method = smoke("dino")
        views = encoder_inputs(method, method_views(method, photo, 0, 0))
        panels = Masks().panels(views, method.preparation)
        assert len(panels) == len(views) and panels[-1].title.startswith("teacher")
        rows = panel_rows(panels[0], [panels[0]] * 11, "dino")
        assert [len(row.panels) for row in rows] == [9, 4] and [row.label for row in rows] == ["dino", ""]
        assert rows[0].panels[0] and rows[1].panels[0] is None
        limited = Masks(views=1).panels(views, method.preparation)
        assert [panel.title[:7] for panel in limited] == ["student", "teacher"]
        students = sum(view.network == "student" for view in views)
        assert limited[0].caption == f"{students - 1} more are not shown"

    def test_unknown_methods_are_refused(self):
        with pytest.raises(ValueError, match="methods=mea: there is no such method; did you mean 'mae'"):
            Masks(methods=("mea",))

    def test_the_command_needs_no_checkpoint(self, photo, bench, tmp_path):
        photo.save(tmp_path / "photo.png")
        words = ("--images", tmp_path / "photo.png", "--set", "methods=mae,msn", "recipe=smoke", "views=1")
        code, output, _ = bench("visualize", "masks", *words, "--out", tmp_path / "out", "--format", "svg")
        text = Path(tmp_path / "out/masks.svg").read_text()
        assert code == 0 and "masks.svg" in output
        assert "mae smoke" in text and "student, 16 px, 75% hidden" in text and "2 more are not shown" in text


class TestReconstruction:
    @pytest.mark.parametrize("name", ["mae", "simmim", "lut", "mst", "can"])
    def test_error_of_a_reconstruction_equals_the_loss(self, name, photo):
        """`reconstruct` on the first view, compared with the forward pass of the method on the same views."""
        method = smoke(name).eval()
        views = method_views(method, photo, 0, 0)
        images = views.get("image", views.get("view1", views.get("global")))
        with torch.no_grad():
            step = method(views)
            reconstruction = method.reconstruct(images if images.ndim == 4 else images[:, 0], views)
        predicted, target = (patchify(values, 4) for values in (reconstruction.prediction, reconstruction.images))
        assert torch.equal(predicted[~reconstruction.predicted], target[~reconstruction.predicted])
        assert reconstruction.hidden.any() or name == "mst"  # MST hides one patch in 160
        errors = (predicted - target)[reconstruction.predicted]
        if name in ("mae", "lut", "can"):  # in standard deviations of each patch
            deviations = (target.var(dim=-1, keepdim=True) + 1e-6).sqrt().expand_as(target)
            errors = errors / deviations[reconstruction.predicted]
        loss = {"mae": step.loss, "simmim": step.loss, "lut": step.logs.get("mim")}.get(name)
        mean = errors.abs().mean() if name == "simmim" else errors.square().mean()
        if loss is not None:  # losses of MST and CAN are over two views
            assert mean.item() == pytest.approx(loss.item(), rel=1e-4)

    def test_the_error_falls_with_training(self, tmp_path, bench, refused):
        """From before the first update to after the last."""
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
        refused(*words, named=f"contains only the encoder: name {tmp_path / 'run'}")

    def test_a_method_that_predicts_no_pixels_is_refused(self, tmp_path, refused):
        trainer("dino", tmp_path / "run", recipe={"epochs": 1}).train()
        words = ("--checkpoint", tmp_path / "run", "--images", "digits:", "--out", tmp_path / "out")
        refused("visualize", "reconstruction", *words, named="dino, epoch 1 predicts no pixels | MAE, SimMIM")
