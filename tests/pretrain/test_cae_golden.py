"""CAE against recorded steps of its official training loops (lxtGH/CAE d725971, Atten4Vis/CAE a7fd162), in float64."""

import random
import re

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, recording
from recordings import matches, under
from torch import nn

from checkpoints.positions import sincos_positions
from pretrain.methods.cae import METHOD, SCALED, Settings
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import patchify
from pretrain.schedules import TableCosine

NAMES = (
    (r"^encoder\.", "vit.trunk."),
    (r"^teacher\.", "teacher.trunk."),
    (r"(trunk\.blocks\.\d+\.)gamma_([12])$", r"\1ls\2.gamma"),
    (r"(trunk\.blocks\.\d+\.attn\.)[qv]_bias$", r"\1qkv.bias"),  # with a third for the keys, which softmax ignores
    (r"^mask_token$", "regressor.mask_token"),
    (r"^encoder_to_decoder\.", "embed.0."),
    (r"^encoder_to_decoder_norm\.", "embed.1."),
    (r"^pretext_neck\.norm\.", "regressor.norm."),
    (r"^pretext_neck\.norm2\.", "decoder.norm."),
    (r"^pretext_neck\.head\.", "decoder.head."),
    (r"^pretext_neck\.(regressor|decoder)_blocks\.", r"\1.blocks."),
    (r"\.norm1_([qkv])\.", r".norm_\1."),
    (r"\.norm2_cross\.", ".norm2."),
    (r"\.(cross_attn)\.", ".attn."),
    (r"\.mlp_cross\.", ".mlp."),
    (r"\.(gamma_[12])_cross$", r".\1"),
)
THIRDS = {"q_bias": 0, "v_bias": 2}  # of a trunk's joint bias
DATA, CONFIG = recording("cae/cae_step.safetensors")
VARIANTS, CONFIGS = recording("cae/cae_variants.safetensors")
COMMON = {name: CONFIG[name] for name in ("betas", "eps")}
DECAYED = [name for name, config in {"step": CONFIG, **CONFIGS}.items() if "decay" in config]


class TestCae(RecordedTraining):
    data, config, method = DATA, CONFIG, METHOD
    NORM, END, ROUNDING = 1e-6, 1e-6, EXACT  # everything is recorded in float64
    losses = {name: f"{name}{{}}" for name in ("loss", "loss_main", "loss_align")}
    unrecorded = r".*pos_embed"  # fixed positions
    design = SCALED | {"layer_scale": CONFIG["init"] > 0}

    def case(self, name):
        """The main recording or a variant, with the start and data of the main one unless the variant has its own.

        A variant with `keys`, which rename tensors, is of Atten4Vis/CAE: its target encoder is the encoder itself,
        without a momentum.
        """
        if name == "step":
            return self
        config, data = COMMON | CONFIGS[name], under(VARIANTS, f"{name}.")
        if "table" not in data:
            shared = {name: tensor for name, tensor in DATA.items() if re.match(r"in\d|model0|table|lr\d", name)}
            data = shared | data
        changes = {"design": SCALED | {"layer_scale": config["init"] > 0}}
        return self.variant(data=data, config=config, **changes)

    def our_name(self, official):
        for pattern, ours in NAMES:
            official = re.sub(pattern, ours, official)
        return official

    def part(self, official, ours):
        kind = official.rpartition(".")[2]
        joint = kind in THIRDS and self.our_name(official).endswith("qkv.bias")
        return ours.chunk(3)[THIRDS[kind]] if joint else ours

    def first_state(self, method):
        """Biases of queries and values are one tensor in the trunk, and separate as officially in the other blocks."""
        official = under(self.data, self.start)
        state = {self.our_name(name): tensor for name, tensor in official.items()}
        for name, values in official.items():
            if name.endswith("v_bias") and self.our_name(name).endswith("qkv.bias"):
                queries = official[name.replace("v_bias", "q_bias")]
                state[self.our_name(name)] = torch.cat([queries, torch.zeros_like(queries), values])
        return state

    def settings(self):
        config, newer = self.config, "keys" in self.config
        return Settings(
            codes=config["vocab"],
            num_mask_patches=config["n_mask"],
            min_mask_patches_per_block=config["min_blk"],
            decoder_width=config["ddim"],
            decoder_heads=config["dheads"],
            regressor_depth=config["rdepth"],
            decoder_depth=config["ddepth"],
            decoder_layer_scale_start=config["dinit"],
            align_weight=config["align"],
            target_momentum=0.0 if newer else config["momentum"],
            drop_path=0.0,
            **({"target": "current"} if newer else {}),
        )

    def schedule(self):
        return TableCosine(warmup=self.config["warmup"], floor=self.config["min_lr"])

    def build(self, recipe):
        """With the recorded table, and a tokenizer that returns its input, since the views hold tokens as pictures."""
        method = super().build(recipe)
        method.tokenizer, method.positions = nn.Identity(), self.data["table"][None, 1:]
        return method

    def views(self, forward):
        image, tokens, mask = (self.data[f"in{forward}.{name}"] for name in ("image", "tokens", "mask"))
        return {"image": image, "picture": tokens.flatten(1), "mask": mask.flatten(1).bool()}

    def outputs(self, method, step):
        """The target of every step and all activations of the first one."""
        image, mask = self.data[f"in{step}.image"], self.views(step)["mask"]
        visible, hidden = method.split(mask)
        if f"out{step}.latent_target" in self.data:
            yield f"out{step}.latent_target", method.target(image, hidden)
        activations = under(self.data, "act0.")
        if step or not activations:
            return
        trunk = method.vit.trunk
        modules = {f"block{n}": block for n, block in enumerate(trunk.blocks)} | {"encoder": trunk.norm}
        modules |= {f"regressor{n}": block for n, block in enumerate(method.regressor.blocks)}
        modules |= {f"decoder{n}": block for n, block in enumerate(method.decoder.blocks)}
        ours = {"patch_embed": method.vit.project(image)}
        trunk.blocks[0].register_forward_pre_hook(lambda _, inputs: ours.setdefault("embed", inputs[0]))
        for name, module in modules.items():
            module.register_forward_hook(lambda _, __, output, name=name: ours.setdefault(name, output))
        latent = method.regress(image, visible, hidden)
        logits = method.decoder(latent, method.positions_of(hidden))
        assert ours.keys() == activations.keys()
        for name, output in ours.items():
            yield f"act0.{name}", output
        yield "out0.latent", latent
        yield "out0.logits", logits.flatten(0, 1)

    def check_end(self, method):
        if "keys" not in self.config or under(self.data, self.end):  # the newer code's end may not be recorded
            super().check_end(method)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_updates_of_variants(self, name):
        case = self.case(name)
        case.run(case.begin())

    @pytest.mark.parametrize("name", [match[1] for match in matches(r"(.+)\.out0\.latent_target", VARIANTS)])
    def test_outputs_of_variants(self, name):
        self.case(name).test_outputs()

    @pytest.mark.parametrize("name", DECAYED)
    def test_decayed_parameters(self, name):
        case = self.case(name)
        super(TestCae, case).test_decayed_parameters()
        parameters = case.begin().method.named_parameters()
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        assert frozen == case.names(case.config["frozen"])

    def test_position_tables_equal_the_recorded_ones(self):
        fresh = super().build(self.recipe())
        assert_close(fresh.positions[0], self.data["table"][1:], self.LOSS, "of regressor and decoder")
        table = self.data["model0.encoder.pos_embed"].reshape(1, -1, self.config["dim"])
        assert_close(fresh.vit.trunk.pos_embed, table, self.LOSS, "encoder's")

    def test_each_encoder_uses_only_its_patches(self):
        method, mask = self.begin().method, self.views(0)["mask"]
        visible, hidden = method.split(mask)
        for ids, used in ((visible, ~mask), (hidden, mask)):
            image = self.data["in0.image"].clone().requires_grad_()
            method.encode(method.vit, image, ids).square().sum().backward()
            assert torch.equal(patchify(image.grad, self.config["patch"]).abs().sum(-1) > 0, used)


@pytest.mark.parametrize("table", matches(r"sincos\.d(\d+)g(\d+)", DATA), ids=lambda match: match[0])
def test_sine_cosine_tables_equal_the_recorded_ones(table):
    """The official table is computed in float32."""
    width, side = int(table[1]), int(table[2])
    ours = sincos_positions((side, side), width, "row", prefix=1, dtype=torch.float64)
    assert_close(ours.reshape(DATA[table[0]].shape), DATA[table[0]], TestCae.LOSS, "table")


MASKS = matches(r"maskgen\.(\d+)_(\d+)_(\d+)_(\d+|none)", DATA)


@pytest.mark.parametrize("masks", MASKS, ids=lambda match: match[0])
def test_masks_equal_the_recorded_ones(masks):
    side, hidden, least = (int(masks[number]) for number in (1, 2, 3))
    draw = BlockMask((side, side), hidden, least, None if masks[4] == "none" else int(masks[4]), exact=True)
    random.seed(CONFIG["mask_seed"])
    for mask in DATA[masks[0]]:
        drawn = draw()
        assert torch.equal(drawn, mask.flatten().bool()) and int(drawn.sum()) == hidden
