"""MOCA against recorded steps of its official code (valeoai/MOCA), in float64.

The recording is float32. Its README measures 1e-6 for an independent implementation and allows more.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
import torch
from elsewhere import in_processes
from recorded import EXACT, RecordedTraining, assert_close, converted, doubled
from recordings import facts, matches, steps_per_epoch, tensors, under
from small_trainings import forward_pass
from torch import Tensor

from checkpoints.vit import ViT, skip_init
from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.moca import METHOD, RECIPES, Settings
from pretrain.parts.masking import MaskRounds
from pretrain.parts.weights import xavier_vit
from pretrain.recipe import SINCOS
from pretrain.schedules import Constant, CosineTo, WarmupCosine

TINY, CASES = (facts("moca/cases.json")[name] for name in ("tiny_config", "cases"))
TRAIN, MISC = facts("moca/train.json"), facts("moca/misc.json")
INITIAL, INPUTS = (doubled(tensors(f"moca/{name}.safetensors")) for name in ("init_state", "inputs"))
TEACHER = doubled(tensors("moca/teacher_common.safetensors"))
ONE = TrainProgress(step=0, steps_per_epoch=1, epochs=1)
DRAWS = ("update_view", "randperm", "interior_token")
LIMIT = 1e-6
# The README allows 1e-5 and 1e-4: at other sizes float32 is 8e-7 and 3e-6 off the float64 that is compared here.
OUTPUT, GRADIENT = 2e-6, 1e-5
SLACK = {torch.float64: 1, torch.float32: 5}  # factor on the limits, larger if ours is float32 too
# Runs of one process, and of several: "ddp2_rank0" and "ddp2_rank1" are two processes of ddp2.
ALONE = [name for name in TRAIN if not matches(r".+_rank\d+", [name])]
SHARED = sorted({match[1] for match in matches(r"(.+)_rank\d+", TRAIN)})
# The first case with both losses, for tests that need any such case.
BOTH = next(case["config"] for case in CASES.values() if 0 < case["config"]["img_weight"] < 1)
NAMES = (
    (r"encoder_teacher\.", "teacher.trunk."),
    (r"encoder\.", "student.trunk."),
    (r"encoder_pred\.layers_w\.0\.", "generator."),
    (r"decoder_pred\.layers_w\.0\.", "predictions.0.target.generator."),
    (r"norm_cls_pt\.", "predictions.0.norm."),
    (r"mask_token_cls_pt", "predictions.0.decoder.mask_token"),
    (r"decoder_(embed|blocks|norm)_cls_pt\.", r"predictions.0.decoder.\1."),
    (r"bow_extractor\.bow_extractor\.0\._embedding_ptr", "codebook.oldest"),
    (r"bow_extractor\.bow_extractor\.0\._embedding", "codebook.words"),
    (r"bow_extractor\.bow_extractor\.0\._dist_norm_prev", "codebook.mu_of_update"),
    (r"bow_extractor\.bow_extractor\.0\._dist_norm", "codebook.mu"),
)
LAYERS = {"generator.b0_fc": "layers.0", "generator.b0_bn": "layers.1", "generator.b0_last_layer": "layers.3"}


def our_name(official: str) -> str | None:
    """Official name of a parameter or buffer -> ours, or None if ours has no such tensor (constants, a counter)."""
    for pattern, ours in NAMES:
        if re.match(pattern, official):
            name = re.sub(pattern, ours, official, count=1)
            for theirs, layer in LAYERS.items():
                name = name.replace(theirs, layer)
            return None if name.endswith(".scale") else name
    return None


def images(batch: int) -> dict[str, Tensor]:
    """A recorded batch of two views."""
    return {"first": INPUTS[f"batch{batch}.x1"], "second": INPUTS[f"batch{batch}.x2"]}


def noise(*rounds: Tensor) -> Tensor:
    """Noise of each drawn round (V*B, L) -> ours (B, rounds, V, L)."""
    return torch.stack([values.unflatten(0, (2, -1)).transpose(0, 1) for values in rounds], dim=1)


def choices(view: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
    """The view 1 or 2, a permutation of the images and an inner token for the first of them -> numbers (B, 3)."""
    grid = TINY["img_size"] // TINY["patch_size"] - 2 * TINY["skip_offset"]
    numbers = torch.full((len(order), 3), 0.75 if view.item() == 2 else 0.25, dtype=torch.float64)
    order, tokens = order.long(), tokens.long()
    numbers[order, 1] = torch.arange(len(order), dtype=torch.float64) / len(order)
    numbers[order[: len(tokens)], 2] = (tokens.double() + 0.5) / grid**2
    return numbers


def views_of(batch, rounds, drawn):
    """Our views of a recorded batch, with the noise of its rounds and the draws for the codebook."""
    return {**images(batch), "noise": noise(*rounds), "choices": choices(*drawn)}


class RecordedMoca(RecordedTraining):
    """Options and initial state that cases and runs share; `config` has the official options of one."""

    method, start = METHOD, "initial."
    data = under(INITIAL, "", "initial.")
    changes = {}  # of the settings
    ROUNDING = 1e-5  # the README's limit for gradient norms

    def __init__(self, config, **changes):
        names = {"img": "img_size", "patch": "patch_size", "dim": "embed_dim", "depth": "depth", "heads": "num_heads"}
        sizes = {name: TINY[official] for name, official in names.items()}
        # A case is not a training, so these values do not matter.
        training = {"epochs": 1, "lr": 1.0, "wd": 0.0, "batch": 1, "alpha": TINY["momentum"], "alpha_cos": False}
        self.config, self.changes = training | sizes | config, changes

    @property
    def design(self):
        return SINCOS | {"pool": "avg" if self.config.get("avg_pooling", True) else "cls", "norm_eps": TINY["ln_eps"]}

    def our_name(self, official):
        name = our_name(official)
        return None if name is None or self.left_out(name) else name

    def left_out(self, name: str) -> bool:
        """Whether our name belongs to a loss without weight, whose parts our method does not build."""
        weight = self.config["img_weight"]
        return (weight == 0 and name.startswith("generator.")) or (weight == 1 and name.startswith("predictions."))

    def computed(self) -> list[str]:
        """Losses that our method computes; the official code leaves out only "loc" without weight."""
        return [kind for kind, name in (("img", "generator."), ("loc", "predictions.")) if not self.left_out(name)]

    def settings(self):
        config = self.config
        settings = Settings(
            words=TINY["num_words"],
            new_words=TINY["num_new_words"],
            border=TINY["skip_offset"],
            inv_delta=TINY["inv_delta"],
            mask_ratios=tuple(config["mask_ratio"]),
            decoder_mask_ratios=tuple(config["dec_mask_ratio"]),
            image_weight=config["img_weight"],
            early_layers=(config.get("early_layer", TINY["early_layer"]),),
            decoder_width=TINY["decoder_embed_dim"],
            decoder_depth=TINY["decoder_depth"],
            decoder_heads=TINY["decoder_num_heads"],
            kappa=TINY["kappa"],
            generator_ratio=TINY["pred_mlp_ratio"],
            teacher_momentum=config["alpha"],
            teacher_momentum_end=1.0 if config["alpha_cos"] else config["alpha"],
        )
        return replace(settings, **self.changes)

    def schedule(self):
        return Constant()

    def first_state(self, method):
        expected = method.state_dict()
        return {name: tensor.reshape(expected[name].shape) for name, tensor in self.named(self.start).items()}


class RecordedRun(RecordedMoca):
    """A training of which this process has the given `rank`; `runs` are the records of all processes.

    With accumulation teacher and codebook move in the last part of an update, mu in all of them.
    """

    NORM = END = RATE = LIMIT
    end = "final."
    unrecorded = ".*"  # the end has some tensors, and statistics of all weights

    def __init__(self, runs, data, rank=0, **changes):
        self.records, self.record = runs, runs[rank]
        args, order = self.record["args"], self.record["batch_order"]
        rates = {"generator_lr": args["lr_wgen"], "generator_weight_decay": args["weight_decay_wgen"]}
        training = {"batch": args["batch_size"] * len(runs), "epochs": args["max_epochs"], "wd": args["weight_decay"]}
        super().__init__(args | training | {"clip": args["clip_grad"]}, **rates, **changes)
        self.parts, self.batches = args["accum_iter"], [batch for epoch in order for batch in epoch]
        self.steps = len(self.batches) // self.parts
        # Number of update and length of the epoch, for every update.
        lengths = [len(batches) // self.parts for batches in order]
        self.clocks = [
            (epoch * length + step, length) for epoch, length in enumerate(lengths) for step in range(length)
        ]
        self.losses = {"loss": "loss{}"} | {f"loss_{kind}": f"loss_{kind}{{}}" for kind in self.computed()}
        self.data = self.data | data | self.figures()

    def figures(self):
        """Values of all steps by name. The loss is a mean over the processes; its parts are of one process."""
        norms = enumerate(self.record["grad_norm_before_clip"])
        figures = {f"gradnorm{step}.total": norm for step, norm in norms}
        for forward, step in enumerate(self.record["steps"]):
            figures[f"loss{forward}"] = mean(record["steps"][forward]["loss_total"] for record in self.records)
            figures |= {f"loss_{kind}{forward}": step[f"loss_{kind}"] for kind in self.computed()}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}

    def our_name(self, official):
        return super().our_name(re.sub(r"^codebook\.", "bow_extractor.bow_extractor.0.", official))

    def schedule(self):
        return WarmupCosine(warmup=self.config["warmup_epochs"], stretch=self.config["lr_epochs_mul"])

    def recipe(self):
        end = self.config["weight_decay_end"]
        return replace(super().recipe(), weight_decay_schedule=CosineTo(end=end) if end else Constant())

    def progress(self, step):
        number, length = self.clocks[step]
        epochs = self.config["epochs"]
        return TrainProgress(step=number, steps_per_epoch=length, epochs=epochs, micro_batches=self.parts)

    def views(self, forward):
        drawn = [self.data[f"draw.{kind}"][forward // self.parts] for kind in DRAWS]
        masks = self.data["draw.mask_noise"]  # (V*B, L) of every round of every forward pass
        rounds = masks.reshape(len(self.batches), -1, *masks.shape[-2:])[forward]
        return views_of(self.batches[forward], rounds, drawn)

    def check_rates(self, updates, progress, step):
        """Rates of all groups are compared after the update."""

    def check_update(self, updates, logs, step):
        """Compare all that is recorded after the update."""
        method, recorded = updates.method, self.record["steps"][(step + 1) * self.parts - 1]
        for rate, name in (("lr", "lr"), ("weight_decay", "wd")):
            ours = torch.tensor([group[rate] for group in updates.optimizer.param_groups])
            assert_close(ours, torch.tensor(recorded[name]), self.RATE, f"{rate} {step}")
        assert_close(method.alpha(self.progress(step)), recorded["momentum"], EXACT, "momentum")
        codebook = method.codebook
        assert_close(codebook.mu, recorded["dist_norm_after"], LIMIT, "mu")
        assert_close(codebook.mu_of_update, recorded["dist_norm_prev_after"], LIMIT, "mu of the update")
        assert codebook.oldest.item() == recorded["ptr_after"]
        check_statistics(codebook.words, recorded["codebook_stat_after"], "codebook")
        for name, statistics in recorded.get("teacher_stat_after_ema", {}).items():
            check_statistics(method.get_parameter(f"teacher.trunk.{name}"), statistics, f"teacher's {name}")
        check_if_recorded(codebook.words, self.data, f"codebook_after_step.{step}", LIMIT)

    def check_end(self, method):
        """Compare some weights, the codebook, and statistics of all weights."""
        super().check_end(method)
        for name, (_, absolutes, norm) in self.record.get("final_param_stat_sum_abssum_l2", {}).items():
            if (ours := self.our_name(name)) and not name.endswith("attn.qkv.bias"):
                weight = method.state_dict()[ours].double()
                statistics = torch.tensor([absolutes, norm], dtype=torch.float64)
                assert_close(torch.stack([weight.abs().sum(), weight.norm()]), statistics, LIMIT, name)


def check_statistics(tensor, recorded, what):
    """Compare sum, sum of absolute values and norm."""
    ours = torch.stack([tensor.sum(), tensor.abs().sum(), tensor.norm()])
    assert_close(ours, torch.tensor(recorded, dtype=torch.float64), LIMIT, what)


def check_if_recorded(tensor, recorded, name, limit):
    """Compare a tensor that only some cases have."""
    if name in recorded:
        assert_close(tensor, recorded[name], limit, name)


@pytest.mark.parametrize("name", ALONE)
def test_runs_repeat_the_recorded_ones(name):
    case = RecordedRun([TRAIN[name]], doubled(tensors(f"moca/train_{name}.safetensors")))
    case.run(case.begin())


def run_one_process(name: str, world: World, folder: Path) -> None:
    """Run one of the processes: each writes other words, and the next step begins with those of the first process."""
    runs = [TRAIN[f"{name}_rank{rank}"] for rank in range(world.size)]
    data = under(doubled(tensors(f"moca/train_{name}.safetensors")), f"rank{world.rank}.")
    case = RecordedRun(runs, data, world.rank, new_words=TINY["num_new_words"] // world.size)
    case.run(case.begin(world=world))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_processes_repeat_the_recorded_runs(name, tmp_path):
    in_processes(len(matches(rf"{name}_rank\d+", TRAIN)), partial(run_one_process, name), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_passes_repeat_the_recorded_cases(name, dtype):
    case, data = RecordedMoca(CASES[name]["config"]), doubled(tensors(f"moca/case_{name}.safetensors"))
    slack, ours = SLACK[dtype], case.begin(dtype).method
    drawn = [data[f"draw.{kind}"][0] for kind in DRAWS]
    views = converted(views_of(0, under(data, "draw.mask_noise.").values(), drawn), dtype)
    words = ours.codebook.words.clone()

    step = forward_pass(ours, views, ONE)
    step.loss.backward()
    ours.observe(step.observed, ONE)
    assert_close(step.loss, data["loss.total"], slack * OUTPUT, "loss")
    for kind in case.computed():
        assert_close(step.logs[f"loss_{kind}"], data[f"loss.{kind}"], slack * OUTPUT, f"loss_{kind}")
    case.check_pass(ours, CASES[name]["grad_norms"], slack * GRADIENT)
    for official, gradient in under(data, "grad.").items():
        assert_close(ours.get_parameter(case.our_name(official)).grad, gradient, slack * GRADIENT, official)
    check_state(case, ours, data, slack * LIMIT)
    check_rounds(ours, data, views, words, slack * OUTPUT)


def check_state(case, ours, data, limit):
    state = ours.state_dict()
    for name, tensor in under(TEACHER, "teacher_after_ema.").items():
        assert_close(state[case.our_name(name)], tensor, limit, name)
    for name, tensor in {**under(data, "codebook_after."), **under(data, "bn_after.")}.items():
        official = f"bow_extractor.bow_extractor.0.{name}" if name.startswith("_") else name
        if our_name := case.our_name(official):
            assert_close(state[our_name], tensor.reshape(state[our_name].shape), limit, name)


@torch.no_grad()
def check_rounds(ours, data, views, words, limit):
    pictures = torch.cat([views["first"], views["second"]])
    orders, rounds = ours.rounds.orders(views["noise"]), ours.student_rounds(pictures, views["noise"])
    for number, (order, masked_round) in enumerate(zip(orders, rounds, strict=True)):
        assert torch.equal(order, data[f"mask.{number}.ids_shuffle"].long())
        recorded = under(data, f"student.{number}.")
        assert_close(masked_round.embedding, recorded["x_cls"], limit, "x_cls")
        if ours.generator is not None:
            prototypes = ours.generator(words)
            assert_close(
                TINY["kappa"] * masked_round.embedding @ prototypes.T, recorded["img_logits"], limit, "img_logits"
            )
            check_if_recorded(prototypes, data, "student.W_enc", limit)
        if ours.predictions:
            assert masked_round.visible == data[f"mask.{number}.len_keep"].item()
            assert torch.equal(masked_round.ids, data[f"mask.{number}.ids_pred"].long())
            check_prediction(ours, masked_round, recorded, data, words, limit)


def check_prediction(ours, masked_round, recorded, data, words, limit):
    (prediction,), (before,) = ours.predictions, ours.early_layers
    prototypes = prediction.target.generator(words)
    check_if_recorded(prototypes, data, "student.W_dec", limit)
    decoded = prediction.decode(masked_round.embedding, masked_round.early[0], masked_round.ids).flatten(0, 1)
    # All rows, or the first ones.
    (rows,) = (recorded[match[0]] for match in matches(r"loc_logits(\.head\d+)?", recorded))
    assert_close(TINY["kappa"] * decoded[: len(rows)] @ prototypes.T, rows, limit, "loc_logits")
    check_if_recorded(decoded, recorded, "decoder_out", limit)
    if before and "x_intermediate" in recorded:  # ours applies the final norm after the last block
        assert_close(masked_round.early[0], recorded["x_intermediate"][:, 1:], limit, "x_intermediate")


def test_teacher_targets_equal_the_recorded_ones():
    """Features, assignments and their means over the inner patches after the teacher's move, recorded for all cases."""
    ours, fresh = (RecordedMoca(BOTH).begin().method for _ in range(2))
    ours.before_forward(ONE)
    pictures = torch.cat(list(images(0).values()))
    tokens = ours.teacher_targets(pictures)[0]
    shares = fresh.codebook.assign(tokens)[0]
    for view in (0, 1):
        recorded = under(TEACHER, f"teacher.view{view + 1}.")
        assert_close(tokens[view], recorded["features"][:, 1:], OUTPUT, "features")
        assert_close(shares[view], recorded["codes"], OUTPUT, "codes")
        assert_close(fresh.codebook.pooled(shares)[view], recorded["bow"], OUTPUT, "bow")


@pytest.mark.parametrize(("name", "momentum"), [("vit_b", "momentum_0p994"), ("vit_b_v0.9", "momentum_0p99")])
def test_schedules_of_the_recipes_equal_the_recorded_ones(name, momentum):
    recipe = RECIPES[name]
    momenta = {field: getattr(recipe.settings, field) for field in ("teacher_momentum", "teacher_momentum_end")}
    updates = Updates(RecordedMoca(BOTH, **momenta).begin().method, recipe)
    per_epoch = steps_per_epoch(point["epoch"] for point in MISC["schedules"])
    for point in MISC["schedules"]:
        progress = TrainProgress(
            step=round(per_epoch * point["epoch"]), steps_per_epoch=per_epoch, epochs=recipe.epochs
        )
        lr, decay = updates.rates(progress)
        assert_close(lr, point["lr_of_1p2e3"], EXACT, f"lr at {point['epoch']}")
        assert_close(decay, point["wd_0p05_to_0p20"] if name == "vit_b" else 0.05, EXACT, f"decay at {point['epoch']}")
        assert_close(updates.method.alpha(progress), point[momentum], EXACT, f"momentum at {point['epoch']}")


def test_parameter_groups_equal_the_recorded_ones():
    ours = RecordedMoca(BOTH).begin().groups
    assert len(ours) == len(MISC["param_groups_tiny"])
    for group, recorded in zip(ours, MISC["param_groups_tiny"], strict=True):
        assert list(group.parameters) and set(group.parameters) == {our_name(name) for name in recorded["names"]}
        assert (group.lr is not None) == recorded["is_wgen"]
        assert (group.weight_decay == 0.0) == (not recorded["use_wd"])


def test_numbers_of_tokens_equal_the_recorded_ones():
    for key in MISC["mask_lengths_keep_dec"]:
        patches, ratios, decoder_ratios = key[1:].split("_")
        rounds = MaskRounds(
            patches=int(patches),
            mask_ratios=tuple(map(float, ratios[1:-1].split(","))),
            decoder_mask_ratios=tuple(map(float, decoder_ratios[1:-1].split(","))),
            complementary=False,
        )
        lengths = [list(pair) for pair in zip(rounds.visible, rounds.decoded, strict=True)]
        assert lengths == MISC["mask_lengths_keep_dec"][key]


def test_parameters_of_vit_b_are_those_of_the_official_model():
    """Names, sizes and number of parameters; the official model has constants besides."""
    recipe = RECIPES["vit_b"]
    with torch.device("meta"), skip_init():
        method = METHOD(recipe.spec, recipe.settings)
    ours = {name: (list(p.shape), p.requires_grad) for name, p in method.named_parameters()}
    theirs = {our_name(name): tuple(facts) for name, facts in MISC["vit_base_param_shapes_requires_grad"].items()}
    constants = theirs.pop(None)
    assert ours == theirs and constants
    counts = MISC["vit_base_param_counts"]
    assert sum(p.numel() for p in method.parameters() if p.requires_grad) == counts["trainable"]
    assert sum(p.numel() for p in method.teacher.parameters()) == counts["encoder"]


@pytest.mark.parametrize("key", MISC["pos_embed"])
def test_position_tables_equal_the_recorded_ones(key):
    width, side = map(int, key.split("x"))
    sizes = dict(width=width, heads=1, image_size=16 * side, patch_size=16, depth=1, mlp_hidden=4)
    table = xavier_vit(ViT(replace(RECIPES["smoke"].spec, **sizes))).trunk.pos_embed[0].double()
    recorded = MISC["pos_embed"][key]
    assert [table.sum().item(), table.abs().sum().item(), table.norm().item()] == pytest.approx(recorded["stat"], 1e-6)
    for row, name in ((1, "row1"), (2, "row2"), (1 + side, "rowG1")):
        assert table[row, :8].tolist() == pytest.approx(recorded[name], abs=1e-6)
