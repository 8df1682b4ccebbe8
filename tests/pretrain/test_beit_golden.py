"""BEiT against recorded steps of its official training loop (microsoft/unilm 768a3c8, beit/), in float64."""

import torch
from recorded import RecordedTraining, recording
from torch import nn

from pretrain.methods.beit import METHOD, Settings
from pretrain.recipe import RELATIVE
from pretrain.schedules import TableCosine


class TestBeit(RecordedTraining):
    """The recording is float32. Losses and outputs are as close as its README measures; other limits are its own."""

    data, config = recording("beit/beit_step.safetensors")
    method, design = METHOD, RELATIVE | {"layer_scale": config["init_values"] > 0}
    dtypes = [torch.float64, torch.float32]

    def our_name(self, official):
        if official.endswith("relative_position_index"):
            return None
        return official if official.startswith(("mask_token", "lm_head.")) else f"vit.trunk.{official}"

    def settings(self):
        return Settings(
            codes=self.config["vocab"],
            num_mask_patches=self.config["n_mask"],
            min_mask_patches_per_block=self.config["min_blk"],
            max_mask_patches_per_block=self.config["max_blk"] or self.config["n_mask"],
            drop_path=0.0,
        )

    def schedule(self):
        return TableCosine(warmup=self.config["warmup"], floor=self.config["min_lr"])

    def build(self, recipe):
        """With a tokenizer that returns its input, since the views hold tokens as pictures."""
        method = super().build(recipe)
        method.tokenizer = nn.Identity()
        return method

    def views(self, forward):
        image, mask = self.data[f"in{forward}.image"], self.data[f"in{forward}.mask"]
        return {"image": image, "picture": self.data[f"out{forward}.tokens"], "mask": mask.flatten(1)}

    def outputs(self, method, step):
        if step == 0:
            yield "out0.logits_masked", method.predict(self.data["in0.image"], self.data["in0.mask"].flatten(1).bool())
