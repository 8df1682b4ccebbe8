"""MOCA against recorded steps of its official code (valeoai/MOCA), in float64.

The recording is float32. Its README measures 1e-6 for an independent implementation and allows more for gradients and
for weights after several steps, which ours does not need: all differences are below 1e-6.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import in_two_processes
from recorded import close, recording, under
from recorded_moca import (
    CASES,
    MISC,
    TINY,
    TRAIN,
    choices,
    images,
    method,
    noise,
    our_name,
    recipe,
    run_settings,
    settings,
)

from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.moca import RECIPES
from pretrain.parts.masking import MaskRounds

ONE = TrainProgress(step=0, steps_per_epoch=1, epochs=1)
TEACHER, _ = recording("moca/teacher_common.safetensors")
TINY_SIZES = {name: getattr(settings(CASES["cases"]["cond_1mask"]["config"]), name)
              for name in ("words", "new_words", "early_layers", "decoder_width", "decoder_heads")}  # fmt: skip
LIMIT = 1e-6
LIMITS = {torch.float64: LIMIT, torch.float32: 5 * LIMIT}


def case_views(data, dtype=torch.float64):
    rounds = under(data, "draw.mask_noise.").values()
    draws = [data[f"draw.{name}"] for name in ("update_view", "randperm", "interior_token")]
    found = {
        **images(0),
        "noise": noise(*rounds),
        "choices": choices(draws[0], draws[1][0], draws[2][0]),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES["cases"])
def test_recorded_case(name, dtype):
    case, (data, _) = CASES["cases"][name], recording(f"moca/case_{name}.safetensors")
    limit, config = LIMITS[dtype], case["config"]
    ours = method(settings(config), "avg" if config["avg_pooling"] else "cls", dtype)
    words, views = ours.codebook.words.clone(), case_views(data, dtype)

    step = ours(views, ONE)
    step.loss.backward()
    close(step.loss, data["loss.total"], limit, "loss")
    close(step.logs["loss_img"], data["loss.img"], limit, "loss_img")
    close(step.logs["loss_loc"], data["loss.loc"], limit, "loss_loc")
    check_gradients(ours, case, under(data, "grad."), limit)
    check_state(ours, data, limit)
    check_rounds(ours, data, views, words, limit)


def check_gradients(ours, case, gradients, limit):
    found = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert set(found) == {our_name(name) for name in case["grad_norms"]}
    for name, norm in case["grad_norms"].items():
        if norm > 1e-5:
            close(found[our_name(name)].norm(), norm, limit, f"gradient norm of {name}")
    for name, gradient in gradients.items():
        close(found[our_name(name)], gradient, limit, f"gradient of {name}")


def check_state(ours, data, limit):
    state = ours.state_dict()
    for name, tensor in under(TEACHER, "teacher_after_ema.").items():
        close(state[our_name(name)], tensor, limit, name)
    for name, tensor in {**under(data, "codebook_after."), **under(data, "bn_after.")}.items():
        official = f"bow_extractor.bow_extractor.0.{name}" if name.startswith("_") else name
        theirs = state[our_name(official)]
        close(theirs, tensor.reshape(theirs.shape), limit, name)


@torch.no_grad()
def check_rounds(ours, data, views, words, limit):
    pictures = torch.cat([views["first"], views["second"]])
    orders, rounds = ours.rounds.orders(views["noise"]), ours.look(pictures, views["noise"])
    for number, (order, seen) in enumerate(zip(orders, rounds, strict=True)):
        assert torch.equal(order, data[f"mask.{number}.ids_shuffle"].long())
        recorded = under(data, f"student.{number}.")
        close(seen.embedding, recorded["x_cls"], limit, "x_cls")
        prototypes = ours.generator(words)
        close(3.0 * seen.embedding @ prototypes.T, recorded["img_logits"], limit, "img_logits")
        if not ours.predictions:
            continue
        assert seen.visible == data[f"mask.{number}.len_keep"].item()
        assert torch.equal(seen.ids, data[f"mask.{number}.ids_pred"].long())
        prediction = ours.predictions[0]
        decoded = prediction.decode(seen.embedding, seen.early[0], seen.ids).flatten(0, 1)
        logits = 3.0 * decoded @ prediction.target.generator(words).T
        theirs = recorded.get("loc_logits", recorded.get("loc_logits.head16"))
        close(logits[: len(theirs)], theirs, limit, "loc_logits")
        if "decoder_out" in recorded:
            close(decoded, recorded["decoder_out"], limit, "decoder_out")
            close(seen.early[0], recorded["x_intermediate"][:, 1:], limit, "x_intermediate")
            close(prototypes, data["student.W_enc"], limit, "W_enc")
            close(prediction.target.generator(words), data["student.W_dec"], limit, "W_dec")


def test_teacher_targets():
    """After the teacher's move: features, assignments and their means over the inner patches."""
    ours = method(settings(CASES["cases"]["cond_1mask"]["config"]))
    data, _ = recording("moca/case_cond_1mask.safetensors")
    ours(case_views(data), ONE)
    pictures = torch.cat(list(images(0).values()))
    fresh = method(ours.settings)
    tokens = ours.teach(pictures)
    assignments = fresh.codebook.assign(tokens)
    for view in (0, 1):
        recorded = under(TEACHER, f"teacher.view{view + 1}.")
        close(tokens[view], recorded["features"][:, 1:], LIMIT, "features")
        close(assignments.shares[view], recorded["codes"], LIMIT, "codes")
        close(fresh.codebook.pooled(assignments.shares)[view], recorded["bow"], LIMIT, "bow")


def follow(name, clocks, parts):
    """A recorded run through Updates, checked after every forward pass. Returns its data and our method."""
    run, (data, _) = TRAIN[name], recording(f"moca/train_{name}.safetensors")
    chosen = run_settings(run["args"])
    updates = Updates(method(chosen), recipe(run["args"], chosen, batch=3 * parts))
    order = [number for epoch in run["batch_order"] for number in epoch]
    for update, progress in enumerate(clocks):
        drawn = [data[f"draw.{kind}"][update] for kind in ("update_view", "randperm", "interior_token")]
        batches = []
        for part in range(update * parts, (update + 1) * parts):
            batches.append({**images(order[part]), "noise": noise(data["draw.mask_noise"][part]),
                            "choices": choices(*drawn)})  # fmt: skip
        logs = updates.run(batches, progress)
        steps = run["steps"][update * parts : (update + 1) * parts]
        for kind, key in (("loss", "total"), ("loss_img", "img"), ("loss_loc", "loc")):
            close(logs[kind], sum(step[f"loss_{key}"] for step in steps) / parts, LIMIT, f"{kind} {update}")
        close(logs["grad_norm"], run["grad_norm_before_clip"][update], LIMIT, f"gradient norm {update}")
        check_step(updates, steps[-1], progress)
    return run, data, updates.method


def check_step(updates, step, progress):
    book, groups = updates.method.codebook, updates.optimizer.param_groups
    close(torch.tensor([group["lr"] for group in groups]), torch.tensor(step["lr"]), LIMIT, "lr")
    close(torch.tensor([group["weight_decay"] for group in groups]), torch.tensor(step["wd"]), LIMIT, "weight decay")
    close(updates.method.alpha(progress), step["momentum"], 1e-12, "momentum")
    close(book.mu, step["dist_norm_after"], LIMIT, "mu")
    close(book.mu_of_update, step["dist_norm_prev_after"], LIMIT, "mu of the update")
    assert book.oldest.item() == step["ptr_after"]
    stat = torch.stack([book.words.sum(), book.words.abs().sum(), book.words.norm()])
    close(stat, torch.tensor(step["codebook_stat_after"], dtype=torch.float64), LIMIT, "codebook")
    for name, recorded in step.get("teacher_stat_after_ema", {}).items():
        weight = updates.method.state_dict()[f"teacher.trunk.{name}"]
        stat = torch.stack([weight.sum(), weight.abs().sum(), weight.norm()])
        close(stat, torch.tensor(recorded, dtype=torch.float64), LIMIT, f"teacher's {name}")


def check_end(ours, run, data):
    state = ours.state_dict()
    for name, tensor in under(data, "final.").items():
        official = f"bow_extractor.bow_extractor.0.{name.removeprefix('codebook.')}" if "codebook" in name else name
        close(without_keys(state[our_name(official)], name), without_keys(tensor, name), LIMIT, name)
    for name, (_, absolutes, norm) in run["final_param_stat_sum_abssum_l2"].items():
        if (ours_name := our_name(name)) and not name.endswith("attn.qkv.bias"):
            stat = torch.stack([state[ours_name].double().abs().sum(), state[ours_name].double().norm()])
            close(stat, torch.tensor([absolutes, norm], dtype=torch.float64), LIMIT, name)


def without_keys(bias, name):
    """The keys' gradient is zero: what Adam makes of it is rounding noise."""
    width = len(bias) // 3
    return torch.cat([bias[:width], bias[2 * width :]]) if name.endswith("attn.qkv.bias") else bias


def test_recorded_trajectory():
    clocks = [TrainProgress(step=step, steps_per_epoch=3, epochs=4) for step in range(3)]
    clocks += [TrainProgress(step=2 + step, steps_per_epoch=2, epochs=4) for step in range(2)]
    run, data, ours = follow("trajectory", clocks, parts=1)
    check_end(ours, run, data)


def test_recorded_accumulation():
    """Teacher and codebook move in the last of two parts, mu in both."""
    clocks = [TrainProgress(step=step, steps_per_epoch=2, epochs=4, parts=2) for step in range(2)]
    run, data, ours = follow("accum2", clocks, parts=2)
    check_end(ours, run, data)


def member(world: World, folder: Path) -> None:
    """One of two processes: each writes words of its own, the next step begins with those of the first one."""
    run, both = TRAIN[f"ddp2_rank{world.rank}"], [TRAIN[f"ddp2_rank{rank}"]["steps"] for rank in range(world.size)]
    data = under(recording("moca/train_ddp2.safetensors")[0], f"rank{world.rank}.")
    chosen = run_settings(run["args"], new_words=TINY["num_new_words"] // world.size)
    updates = Updates(method(chosen), recipe(run["args"], chosen, batch=6), world=world)
    for step, number in enumerate(run["batch_order"][0]):
        drawn = [data[f"draw.{kind}"][step] for kind in ("update_view", "randperm", "interior_token")]
        views = {**images(number), "noise": noise(data["draw.mask_noise"][step]), "choices": choices(*drawn)}
        progress = TrainProgress(step=step, steps_per_epoch=2, epochs=4)
        logs = updates.run([views], progress)
        close(logs["loss"], sum(steps[step]["loss_total"] for steps in both) / 2, LIMIT, f"loss {step}")
        close(logs["loss_loc"], run["steps"][step]["loss_loc"], LIMIT, f"loss_loc {step}")
        close(logs["grad_norm"], run["grad_norm_before_clip"][step], LIMIT, f"gradient norm {step}")
        check_step(updates, run["steps"][step], progress)
        close(updates.method.codebook.words, data[f"codebook_after_step.{step}"], LIMIT, f"words {step}")
    for name, tensor in under(data, "final.").items():
        close(updates.method.state_dict()[our_name(name)], tensor, LIMIT, name)


def test_recorded_pair_of_processes(tmp_path):
    in_two_processes(member, tmp_path)


@pytest.mark.parametrize(("name", "recorded"), [("vit_b", "momentum_0p994"), ("vit_b_v0.9", "momentum_0p99")])
def test_schedules_of_the_recipes(name, recorded):
    chosen = RECIPES[name]
    ours = method(replace(chosen.settings, **TINY_SIZES))
    updates = Updates(ours, chosen)
    for point in MISC["schedules"]:
        progress = TrainProgress(step=round(1000 * point["epoch"]), steps_per_epoch=1000, epochs=chosen.epochs)
        lr, decay = updates.rates(progress)
        close(lr, point["lr_of_1p2e3"], 1e-12, f"lr at {point['epoch']}")
        close(decay, point["wd_0p05_to_0p20"] if name == "vit_b" else 0.05, 1e-12, f"decay at {point['epoch']}")
        close(ours.alpha(progress), point[recorded], 1e-12, f"momentum at {point['epoch']}")


def test_groups():
    ours = method(settings(CASES["cases"]["cond_1mask"]["config"])).groups()
    assert len(ours) == len(MISC["param_groups_tiny"])
    for group, recorded in zip(ours, MISC["param_groups_tiny"], strict=True):
        assert list(group.parameters) and set(group.parameters) == {our_name(name) for name in recorded["names"]}
        assert (group.lr is not None) == recorded["is_wgen"]
        assert (group.weight_decay == 0.0) == (not recorded["use_wd"])


@pytest.mark.parametrize("key", MISC["mask_lengths_keep_dec"])
def test_token_counts(key):
    patches, ratios, decoder_ratios = key[1:].split("_")
    rounds = MaskRounds(patches=int(patches), mask_ratios=tuple(map(float, ratios[1:-1].split(","))),
                        decoder_mask_ratios=tuple(map(float, decoder_ratios[1:-1].split(","))),
                        complementary=False)  # fmt: skip
    lengths = [list(pair) for pair in zip(rounds.visible, rounds.decoded, strict=True)]
    assert lengths == MISC["mask_lengths_keep_dec"][key]
