"""MST, which has no official code: it must equal DINO's recording where it is DINO; elsewhere, keep to its appendix."""

from dataclasses import replace

import pytest
import torch
from recorded_distillation import RecordedDino
from small_trainings import forward_pass
from test_dino import progress, random_views
from torch import nn
from toy_dino import recipe

from pretrain.methods.mst import METHOD, RECIPES, Mst, Settings

PATCHES = 16
PLAIN = {"head_norm": "none", "decoder": "linear"}  # no batch statistics


def mst(**changes) -> Mst:
    torch.manual_seed(0)
    chosen = recipe(Settings, **{"low_fraction": 0.5, "decoder_width": 8, **changes})
    return METHOD(chosen.spec, chosen.settings).double()


NO_MASKS = [{"mask_chance": 0.0}, {"sampling": "none"}, {"sampling": "random", "mask_chance": 0.0}]


class WithoutMasks(RecordedDino):
    """MST on DINO's recorded crops, with noise for masks."""

    method, options = METHOD, Settings

    def views(self, forward):
        config, generator = self.config, torch.Generator().manual_seed(forward)
        patches = (config["img"] // config["patch"]) ** 2
        return super().views(forward) | {"noise": torch.rand(config["B"], 2, 3, patches, generator=generator)}


# Attention is that of a second block.
@pytest.mark.parametrize("changes", NO_MASKS[RecordedDino.config["depth"] < 2 :])
def test_without_masks_and_restoration_it_is_dino(changes):
    case = WithoutMasks().variant(changes={"restore_weight": 0.0, "low_fraction": 0.5, **changes})
    case.run(case.begin())


class TestMasks:
    noise = torch.rand(2000, 3, PATCHES, generator=torch.Generator().manual_seed(0))
    attention = torch.rand(2000, PATCHES, generator=torch.Generator().manual_seed(1))

    def test_lie_where_attention_is_lowest(self):
        method = mst(low_fraction=0.25, mask_chance=0.3)
        hidden = method.draw_mask(self.attention, self.noise)
        lowest = self.attention.argsort(dim=1).argsort(dim=1) < 4
        assert not (hidden & ~lowest).any()
        assert hidden.float().mean().item() == pytest.approx(0.25 * 0.3, abs=0.005)
        assert torch.equal(mst(low_fraction=0.25, mask_chance=1.0).draw_mask(self.attention, self.noise), lowest)

    def test_of_ties_are_as_many(self):
        hidden = mst(mask_chance=1.0).draw_mask(torch.ones(5, PATCHES), self.noise[:5])
        assert (hidden.sum(dim=1) == PATCHES // 2).all()

    def test_of_whole_images(self):
        hidden = mst(mask_chance=0.3, per="image").draw_mask(self.attention, self.noise)
        assert set(hidden.sum(dim=1).tolist()) == {0, PATCHES // 2}
        assert hidden.any(dim=1).float().mean().item() == pytest.approx(0.3, abs=0.03)

    def test_at_random_need_no_attention(self):
        hidden = mst(sampling="random", mask_chance=0.3).draw_mask(None, self.noise)
        assert torch.equal(hidden, self.noise[:, 0] < 0.3)

    def test_at_random_need_no_second_block(self):
        chosen = recipe(Settings, sampling="random")
        method = METHOD(replace(chosen.spec, depth=1), chosen.settings).double()
        assert forward_pass(method, random_views(), progress(0)).loss.isfinite()

    def test_replace_as_bert_does(self):
        method = mst(replace="bert")
        nn.init.ones_(method.mask_token)
        patches = torch.arange(2.0, 2.0 + PATCHES).view(1, -1, 1).expand(2000, -1, 32)  # nowhere the mask token's 1
        everywhere = torch.ones(2000, PATCHES, dtype=torch.bool)
        found = method.replace_hidden(patches, everywhere, self.noise)[..., 0]
        shares = [(found == 1).float().mean(), (found == patches[..., 0]).float().mean()]
        assert shares[0].item() == pytest.approx(0.8, abs=0.01)
        assert shares[1].item() == pytest.approx(0.1 + 0.1 / PATCHES, abs=0.01)  # one of L is drawn for itself
        assert torch.equal(method.replace_hidden(patches, ~everywhere, self.noise), patches)

    def test_hide_the_patch_and_keep_its_position(self):
        method = mst(mask_chance=1.0, low_fraction=1.0)
        nn.init.normal_(method.mask_token)
        crops = random_views()["global"]
        everywhere = torch.ones(8, PATCHES, dtype=torch.bool)
        tokens = method.encode_masked(crops, everywhere, self.noise[:8])
        assert torch.equal(tokens[0], tokens[5]) and not torch.isclose(tokens[0, 1], tokens[0, 2]).all()
        seen = method.encode_masked(crops, ~everywhere, self.noise[:8])
        torch.testing.assert_close(seen, method.student.vit(crops.flatten(0, 1))[0])

    def test_follow_the_teachers_last_block(self):
        method, crops = mst(), random_views()["global"]
        with torch.no_grad():
            nn.init.normal_(method.teacher.vit.trunk.cls_token)
            _, found = method.teacher_outputs(crops)
            wanted = method.teacher.vit.attention(crops.flatten(0, 1))[:, :, 0, 1:].mean(dim=1)
        torch.testing.assert_close(found, wanted)


class TestRestoration:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    crop = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    hidden = torch.rand(3, PATCHES, generator=torch.Generator().manual_seed(2)) < 0.3

    @pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("pixel", 3), ("image", 3 * 32 * 32)])
    def test_of_the_whole_image(self, reduction, scale):
        found = mst(reduction=reduction).pixel_loss(self.images, self.crop, self.hidden)
        torch.testing.assert_close(found, scale * (self.images - self.crop).abs().mean())

    def test_of_hidden_patches(self):
        self.hidden[1] = False  # counts as 0
        found = mst(restore="masked").pixel_loss(self.images, self.crop, self.hidden)
        each = []
        for image in range(3):
            pixels = self.hidden[image].view(4, 4).repeat_interleave(8, 0).repeat_interleave(8, 1)
            errors = (self.images - self.crop).abs().sum(dim=1)[image][pixels]
            each.append(errors.mean() if len(errors) else errors.sum())
        torch.testing.assert_close(found, torch.stack(each).mean())

    def test_of_no_hidden_patch_is_zero(self):
        method = mst(restore="masked", sampling="random", mask_chance=0.0)
        step = forward_pass(method, random_views(), progress(0))
        step.loss.backward()
        assert step.logs["restore"] == 0 and all(p.grad.isfinite().all() for p in method.decoder.parameters())

    @pytest.mark.parametrize("decoder", ["conv", "linear"])
    def test_image_comes_back_in_its_place(self, decoder):
        """What a token holds shows in its own patch and, through the convolutions, around it."""
        method = mst(decoder=decoder, decoder_norm=False)
        patches = torch.zeros(8, PATCHES, 32, dtype=torch.float64)
        maps = patches.mT.unflatten(2, (4, 4))
        plain = method.decoder(maps)
        assert plain.shape == (8, 3, 32, 32)
        patches[:, 6] = 10.0  # row 1, column 2
        changed = (method.decoder(maps) - plain).abs().amax(dim=(0, 1))
        assert changed[8:16, 16:24].mean() > 3 * changed.mean() and changed[24:, :8].max() == 0

    def test_is_of_each_view_by_itself(self):
        method, seen = mst(**PLAIN), random_views()
        patches, hidden = torch.randn(8, PATCHES, 32, dtype=torch.float64), torch.zeros(8, PATCHES, dtype=torch.bool)
        found = method.restoration_loss(patches, seen["global"], hidden)
        images = method.decoder(patches.mT.unflatten(2, (4, 4)))
        torch.testing.assert_close(found, 3 * (images - seen["global"].flatten(0, 1)).abs().mean())

    def test_is_weighted(self):
        method = mst(restore_weight=0.6, inst_weight=0.5)
        step = forward_pass(method, random_views(), progress(0))
        torch.testing.assert_close(step.loss, 0.5 * step.logs["instance"] + 0.6 * step.logs["restore"])


class TestBatchNorms:
    @pytest.mark.parametrize("local_norm", ["batch", "running"])
    def test_run_over_the_global_crops_one_by_one(self, local_norm):
        method, seen = mst(local_norm=local_norm, mask_chance=0.0), random_views()
        alone = mst(local_norm=local_norm, mask_chance=0.0)
        tokens = alone.student.class_tokens(seen["global"])
        for view in tokens.unbind(1):
            alone.student.head.embed(view)
        for view in alone.teacher.class_tokens(seen["global"]).unbind(1):
            alone.teacher.head.embed(view)
        forward_pass(method, seen, progress(0))
        for branch in ("student", "teacher"):
            wanted = dict(getattr(alone, branch).named_buffers())
            for name, buffer in getattr(method, branch).named_buffers():
                if not name.endswith("num_batches_tracked"):  # nothing reads it
                    torch.testing.assert_close(buffer, wanted[name], msg=f"{branch} {name}")
        assert all(module.training for module in method.modules())

    def test_take_one_local_crop_at_a_time(self):
        method, seen = mst(), random_views()
        tokens = method.student.class_tokens(seen["local"])
        together = method.embed(method.student.head, tokens)
        for number, view in enumerate(tokens.unbind(1)):
            torch.testing.assert_close(together[:, number], method.student.head.embed(view))

    def test_say_that_images_depend_on_each_other(self):
        assert mst().batch_statistics and mst(decoder="linear").batch_statistics
        assert mst(head_norm="none").batch_statistics and not mst(**PLAIN).batch_statistics
        assert not mst(head_norm="none", restore_weight=0.0).batch_statistics


ROWS = {name: RECIPES[name].settings for name in ("vit_s_mlm", "vit_s_mlm_dino", "vit_s_bert", "vit_s")}


def test_rows_of_table_4():
    found = [(row.sampling, row.replace, row.restore, row.inst_weight) for row in ROWS.values()]
    assert found == [
        ("random", "bert", "masked", 0.0),
        ("random", "bert", "masked", 1.0),
        ("attention", "bert", "all", 1.0),
        ("attention", "mask", "all", 1.0),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_table_4_reach_what_they_train(name):
    row = ROWS[name]
    method = mst(sampling=row.sampling, replace=row.replace, restore=row.restore, mask_chance=0.5)
    if not row.inst_weight:
        method = METHOD(method.spec, replace(method.settings, inst_weight=0.0, local_crops=0)).double()
    step = forward_pass(
        method, {n: t for n, t in random_views().items() if n != "local" or row.inst_weight}, progress(0)
    )
    step.loss.backward()
    for parameter_name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
    assert method.mask_token.grad.any() and ("instance" in step.logs) == bool(row.inst_weight)
