"""data2vec against recorded steps of its official loop (facebookresearch/data2vec_vision af9a363), in float64."""

import torch
from recorded import RecordedTraining, assert_close, recording
from recordings import under

from pretrain.methods.data2vec import METHOD, Settings
from pretrain.recipe import RELATIVE
from pretrain.schedules import TableCosine

DATA, CONFIG = recording("data2vec/data2vec_step.safetensors")
# Beside the encoder; the official teacher does not use its own.
BESIDE = ("mask_token", "lm_head.weight", "lm_head.bias")


class TestData2vec(RecordedTraining):
    """The recording is float32. Losses and outputs are as close as its README measures; other limits are its own."""

    data, config = DATA | under(DATA, "ema0.", "student0.ema.") | under(DATA, "ema_end.", "model_end.ema."), CONFIG
    method, design = METHOD, RELATIVE | {"layer_scale": CONFIG["init_values"] > 0}
    dtypes = [torch.float64, torch.float32]
    start = "student0."
    RATE = 1e-6  # rates and decays of the teacher are kept in float32

    def our_name(self, official):
        network = "teacher" if official.startswith("ema.") else "student"
        name = official.removeprefix("ema.")
        if name.endswith("relative_position_index") or (network == "teacher" and name in BESIDE):
            return None  # the index is made from the window size
        return name if name in BESIDE else f"{network}.trunk.{name}"

    def settings(self):
        config = self.config
        return Settings(
            target_layers=tuple(config["layers"]),
            post_target_layer_norm=config["post_ln"],
            l1_beta=config["beta"],
            ema_decay=config["ema"],
            ema_decay_init=config["ema_init"],
            ema_start_at=config["ema_start_at"],
            num_mask_patches=config["n_mask"],
            min_mask_patches_per_block=config["min_blk"],
            max_mask_patches_per_block=config["max_blk"] or config["n_mask"],
            layer_scale_start=config["init_values"] or Settings.layer_scale_start,
            drop_path=0.0,
            attn_drop=0.0,
        )

    def schedule(self):
        return TableCosine(warmup=self.config["warmup"], floor=self.config["min_lr"])

    def views(self, forward):
        return {"image": self.data[f"in{forward}.image"], "mask": self.data[f"in{forward}.mask"].flatten(1)}

    def outputs(self, method, step):
        if step == 0:
            image, mask = self.data["in0.image"], self.data["in0.mask"].flatten(1).bool()
            layers = method.settings.target_layers
            outputs = method.teacher(image, layers=layers, norm=False)
            for layer, tokens in zip(layers, outputs, strict=True):
                yield f"out0.teacher_block{layer}", tokens[:, 1:]
            yield "out0.student_masked", method.predict(image, mask)

    def check_rates(self, updates, progress, step):
        super().check_rates(updates, progress, step)
        assert_close(
            updates.method.momentum(progress), self.data[f"ema_decay{step}"], self.RATE, f"teacher's decay {step}"
        )
