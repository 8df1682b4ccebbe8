"""I-JEPA against recorded steps of its official code (facebookresearch/ijepa 52c1ae9), and its masks, in float64."""

import re
from dataclasses import replace

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, case_classes, count, doubled
from recordings import facts, tensors, under

from pretrain.method import TrainProgress
from pretrain.methods.ijepa import METHOD, RECIPES, Settings, block_size, blocks_at, free_blocks, ids_of
from pretrain.recipe import SINCOS
from pretrain.schedules import CosineTo, CountedCosine

DATA, CONFIG = doubled(tensors("ijepa/golden.safetensors")), facts("ijepa/config.json")
NAMES = {
    r"predictor\.predictor_(embed|blocks|norm)": r"predictor.\1",
    r"predictor\.predictor_proj": "features",
    r"predictor\.predictor_pos_embed": None,
    r"(encoder|target)\.": r"\1.trunk.",
}
PARTS = ("encoder", "predictor", "target")


class RecordedIJepa(RecordedTraining):
    method = METHOD
    design = SINCOS | dict(class_token=False, class_position=False, pool="avg")
    LOSS, NORM, END = 1e-9, 1e-8, 1e-7
    start, end, norm, gradient = "model0/", "model_end/", "gradnorm{}/", "grad{}/"
    losses = {"loss": "step{}/loss"}
    unrecorded = r".*pos_embed"
    test_decayed_parameters = None

    def __init_subclass__(cls) -> None:
        config, recorded = CONFIG["cases"][cls.case], under(DATA, f"{cls.case}/")
        cls.config = config | {"batch": config["B"], "wd": config["wd"][0], "wd_end": config["wd"][1]}
        cls.steps, cls.steps_per_epoch = config["steps"], config["ipe"]
        for when in ("0", "_end"):
            for part in PARTS:
                recorded |= under(recorded, f"{part}{when}/", f"model{when}/{part}.")
        for step in range(cls.steps):
            for kind in ("grad", "gradnorm"):
                recorded |= under(recorded, f"step{step}/{kind}/", f"{kind}{step}/")
        cls.data = recorded

    def our_name(self, official):
        for pattern, ours in NAMES.items():
            if re.match(pattern, official):
                official = None if ours is None else re.sub(pattern, ours, official)
                break
        return official

    def settings(self):
        config, masks = self.config, self.config["mask"]
        return Settings(
            **mask_settings(masks),
            predictor_width=config["pdim"],
            predictor_depth=config["pdepth"],
            teacher_momentum=config["ema"][0],
            teacher_momentum_end=config["ema"][1],
            momentum_stretch=config["ipe_scale"],
        )

    def schedule(self):
        config = self.config
        start = config["start_lr"] / config["lr"]
        return CountedCosine(
            warmup=config["warmup"], start=start, floor=config["final_lr"], stretch=config["ipe_scale"]
        )

    def recipe(self):
        decay = CosineTo(end=self.config["wd_end"], stretch=self.config["ipe_scale"], first=1)
        return replace(super().recipe(), weight_decay_schedule=decay)

    def build(self, recipe):
        method = super().build(recipe)
        method.block_ids = lambda noise: self.ids
        return method

    def first_state(self, method):
        return method.state_dict() | self.named(self.start)

    def progress(self, step):
        config = self.config
        return TrainProgress(step=config["first"] + step, steps_per_epoch=config["ipe"], epochs=config["epochs"])

    def views(self, forward):
        """Also set the recorded ids of the blocks."""
        blocks = {kind: count(self.data, f"step{forward}/{kind}{{}}") for kind in ("enc", "pred")}
        self.ids = tuple(
            torch.stack([self.data[f"step{forward}/{kind}{number}"] for number in range(numbers)])
            for kind, numbers in blocks.items()
        )
        return {"image": self.data[f"step{forward}/images"], "noise": torch.zeros(())}

    def outputs(self, method, step):
        images = self.views(step)["image"]
        yield f"step{step}/prediction", method.predict(images, *self.ids), self.NORM
        yield f"step{step}/target", method.target_features(images, self.ids[1], len(self.ids[0])), self.NORM

    def check_rates(self, updates, progress, step):
        rate, decay = updates.rates(progress)
        assert_close(rate, self.data[f"step{step}/lr"], EXACT, f"rate {step}")
        assert_close(decay, self.data[f"step{step}/wd"], EXACT, f"weight decay {step}")

    def test_momentum(self, monkeypatch):
        recorded = self.data["sched/momentum"]
        assert_close(self.teacher_momenta(monkeypatch, len(recorded)), recorded, EXACT, "momentum")


def mask_settings(masks):
    return dict(
        target_blocks=masks["npred"],
        target_scale=tuple(masks["pred_mask_scale"]),
        target_aspect=tuple(masks["aspect_ratio"]),
        context_blocks=masks["nenc"],
        context_scale=tuple(masks["enc_mask_scale"]),
        context_overlaps=masks["allow_overlap"],
        min_keep=masks["min_keep"],
    )


globals().update(case_classes(RecordedIJepa, CONFIG["cases"]))


MASKS = [(case, batch) for case, c in enumerate(CONFIG["collators"]) for batch in range(c["batches"])]


@pytest.mark.parametrize(("case", "batch"), MASKS)
def test_blocks_equal_the_recorded_ones(case, batch):
    """Sizes for the recorded number of the batch, blocks at the recorded places, and the remaining patches."""
    options, data = CONFIG["collators"][case], under(DATA, f"masks/case{case}/batch{batch}/")
    masks, side = options["args"], options["args"]["input_size"] // options["args"]["patch_size"]
    settings, grid = Settings(**mask_settings(masks)), (side, side)
    smoke = RECIPES["smoke"]
    method = METHOD(replace(smoke.spec, image_size=4 * side), replace(smoke.settings, **mask_settings(masks)))
    method.before_forward(TrainProgress(step=batch, steps_per_epoch=100, epochs=1))
    assert_close(torch.tensor(method.uniform, dtype=torch.float64), data["uniform"], EXACT, "uniform numbers")
    sizes = [
        block_size(grid, settings.target_scale, settings.target_aspect, method.uniform[0]),
        block_size(grid, settings.context_scale, (1.0, 1.0), method.uniform[1]),
    ]
    assert sizes == [tuple(size) for size in data["sizes"].tolist()]
    places = ((data["draws"][:, 2] + 0.5) / data["draws"][:, 1]).view(-1, 2)  # (draws, 2)
    targets, contexts = [], []
    for _ in range(options["B"]):
        target_places, places = places.tensor_split([settings.target_blocks])
        targets.append(blocks_at(target_places[None], sizes[0], grid))
        for _ in range(settings.context_blocks):
            tries = blocks_at(places[None], sizes[1], grid)[:, None]
            free, first = free_blocks(
                tries, targets[-1][:, :0] if settings.context_overlaps else targets[-1], settings.min_keep
            )
            contexts.append(free)
            places = places[int(first) + 1 :]
    assert not len(places)
    blocks_by_kind = {
        "pred": torch.cat(targets),
        "enc": torch.cat(contexts).view(options["B"], settings.context_blocks, -1),
    }
    for kind, blocks in blocks_by_kind.items():
        for number, ids in enumerate(ids_of(blocks)):
            assert torch.equal(ids, data[f"{kind}{number}"]), f"{kind} {number}"
