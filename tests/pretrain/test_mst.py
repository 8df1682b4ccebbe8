"""MST has no official code: without masks it must equal DINO's recording, otherwise follow the paper's appendix."""

import pytest
import torch
from recorded_distillation import RecordedDino
from small_trainings import forward_pass
from test_dino import progress, random_views
from torch import nn
from toy_dino import recipe

from pretrain.methods.mst import METHOD, Mst, Settings

PATCHES = 16
PLAIN = {"head_norm": "none", "decoder": "linear"}  # no batch statistics


def mst(**changes) -> Mst:
    torch.manual_seed(0)
    training = recipe(Settings, **{"low_fraction": 0.5, "decoder_width": 8, **changes})
    return METHOD(training.spec, training.settings).double()


NO_MASKS = [{"mask_chance": 0.0}, {"sampling": "none"}, {"sampling": "random", "mask_chance": 0.0}]


class WithoutMasks(RecordedDino):
    """MST on DINO's recorded crops, with noise for masks."""

    method, options = METHOD, Settings

    def views(self, forward):
        config, generator = self.config, torch.Generator().manual_seed(forward)
        patches = (config["img"] // config["patch"]) ** 2
        return super().views(forward) | {"noise": torch.rand(config["B"], 2, 3, patches, generator=generator)}


# Masks by attention need a second block.
@pytest.mark.parametrize("changes", NO_MASKS[RecordedDino.config["depth"] < 2 :])
def test_without_masks_and_restoration_mst_equals_dino(changes):
    case = WithoutMasks().variant(changes={"restore_weight": 0.0, "low_fraction": 0.5, **changes})
    case.run(case.begin())


class TestMasks:
    noise = torch.rand(2000, 3, PATCHES, generator=torch.Generator().manual_seed(0))
    attention = torch.rand(2000, PATCHES, generator=torch.Generator().manual_seed(1))

    def test_masks_lie_where_attention_is_lowest(self):
        method = mst(low_fraction=0.25, mask_chance=0.3)
        hidden = method.draw_mask(self.attention, self.noise)
        lowest = self.attention.argsort(dim=1).argsort(dim=1) < 4
        assert not (hidden & ~lowest).any()
        assert hidden.float().mean().item() == pytest.approx(0.25 * 0.3, abs=0.005)
        assert torch.equal(mst(low_fraction=0.25, mask_chance=1.0).draw_mask(self.attention, self.noise), lowest)

    def test_masks_may_be_drawn_per_image(self):
        hidden = mst(mask_chance=0.3, per="image").draw_mask(self.attention, self.noise)
        assert set(hidden.sum(dim=1).tolist()) == {0, PATCHES // 2}
        assert hidden.any(dim=1).float().mean().item() == pytest.approx(0.3, abs=0.03)

    def test_random_masks_need_no_attention(self):
        hidden = mst(sampling="random", mask_chance=0.3).draw_mask(None, self.noise)
        assert torch.equal(hidden, self.noise[:, 0] < 0.3)

    def test_hidden_patches_may_be_replaced_as_in_bert(self):
        method = mst(replace="bert")
        nn.init.ones_(method.mask_token)
        # No patch has the mask token's value, 1.
        patches = torch.arange(2.0, 2.0 + PATCHES).view(1, -1, 1).expand(2000, -1, 32)
        all_hidden = torch.ones(2000, PATCHES, dtype=torch.bool)
        replaced = method.replace_hidden(patches, all_hidden, self.noise)[..., 0]
        shares = [(replaced == 1).float().mean(), (replaced == patches[..., 0]).float().mean()]
        assert shares[0].item() == pytest.approx(0.8, abs=0.01)
        assert shares[1].item() == pytest.approx(0.1 + 0.1 / PATCHES, abs=0.01)  # one in L is replaced by itself
        assert torch.equal(method.replace_hidden(patches, ~all_hidden, self.noise), patches)

    def test_mask_tokens_hide_the_patch_and_keep_its_position(self):
        method = mst(mask_chance=1.0, low_fraction=1.0)
        nn.init.normal_(method.mask_token)
        crops = random_views()["global"]
        all_hidden = torch.ones(8, PATCHES, dtype=torch.bool)
        tokens = method.encode_masked(crops, all_hidden, self.noise[:8])
        assert torch.equal(tokens[0], tokens[5]) and not torch.isclose(tokens[0, 1], tokens[0, 2]).all()
        unmasked = method.encode_masked(crops, ~all_hidden, self.noise[:8])
        torch.testing.assert_close(unmasked, method.student.vit(crops.flatten(0, 1))[0])

    def test_masks_follow_the_attention_of_the_teachers_last_block(self):
        method, crops = mst(), random_views()["global"]
        with torch.no_grad():
            nn.init.normal_(method.teacher.vit.trunk.cls_token)
            _, attention = method.teacher_outputs(crops)
            expected = method.teacher.vit.attention(crops.flatten(0, 1))[:, :, 0, 1:].mean(dim=1)
        torch.testing.assert_close(attention, expected)


class TestRestoration:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    crop = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    hidden = torch.rand(3, PATCHES, generator=torch.Generator().manual_seed(2)) < 0.3

    @pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("pixel", 3), ("image", 3 * 32 * 32)])
    def test_the_loss_may_be_of_all_pixels(self, reduction, scale):
        loss = mst(reduction=reduction).pixel_loss(self.images, self.crop, self.hidden)
        torch.testing.assert_close(loss, scale * (self.images - self.crop).abs().mean())

    def test_the_loss_may_be_of_hidden_patches(self):
        self.hidden[1] = False  # counts as 0
        loss = mst(restore="masked").pixel_loss(self.images, self.crop, self.hidden)
        losses = []
        for image in range(3):
            pixels = self.hidden[image].view(4, 4).repeat_interleave(8, 0).repeat_interleave(8, 1)
            errors = (self.images - self.crop).abs().sum(dim=1)[image][pixels]
            losses.append(errors.mean() if len(errors) else errors.sum())
        torch.testing.assert_close(loss, torch.stack(losses).mean())

    def test_without_hidden_patches_the_loss_is_zero(self):
        method = mst(restore="masked", sampling="random", mask_chance=0.0)
        step = forward_pass(method, random_views(), progress(0))
        step.loss.backward()
        assert step.logs["restore"] == 0 and all(p.grad.isfinite().all() for p in method.decoder.parameters())

    @pytest.mark.parametrize("decoder", ["conv", "linear"])
    def test_decoders_restore_a_patch_in_its_place(self, decoder):
        """A token changes its own patch and, by convolutions, the neighbourhood."""
        method = mst(decoder=decoder, decoder_norm=False)
        patches = torch.zeros(8, PATCHES, 32, dtype=torch.float64)
        maps = patches.mT.unflatten(2, (4, 4))
        plain = method.decoder(maps)
        assert plain.shape == (8, 3, 32, 32)
        patches[:, 6] = 10.0  # row 1, column 2
        changed = (method.decoder(maps) - plain).abs().amax(dim=(0, 1))
        assert changed[8:16, 16:24].mean() > 3 * changed.mean() and changed[24:, :8].max() == 0


class TestBatchNorms:
    @pytest.mark.parametrize("local_norm", ["batch", "running"])
    def test_global_crops_are_normalised_one_by_one(self, local_norm):
        method, views = mst(local_norm=local_norm, mask_chance=0.0), random_views()
        expected_method = mst(local_norm=local_norm, mask_chance=0.0)
        tokens = expected_method.student.class_tokens(views["global"])
        for view in tokens.unbind(1):
            expected_method.student.head.embed(view)
        for view in expected_method.teacher.class_tokens(views["global"]).unbind(1):
            expected_method.teacher.head.embed(view)
        forward_pass(method, views, progress(0))
        for branch in ("student", "teacher"):
            expected = dict(getattr(expected_method, branch).named_buffers())
            for name, buffer in getattr(method, branch).named_buffers():
                if not name.endswith("num_batches_tracked"):  # unused
                    torch.testing.assert_close(buffer, expected[name], msg=f"{branch} {name}")
        assert all(module.training for module in method.modules())

    def test_local_crops_are_normalised_one_by_one(self):
        method, views = mst(), random_views()
        tokens = method.student.class_tokens(views["local"])
        together = method.embed(method.student.head, tokens)
        for number, view in enumerate(tokens.unbind(1)):
            torch.testing.assert_close(together[:, number], method.student.head.embed(view))
