"""ExtreMA against recorded passes and updates of its official modules (microsoft/ExtreMA bf30b64), in float64.

The recorded cases are float32, the trajectory is float64.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from elsewhere import in_processes
from recorded import EXACT, close, close_norm, close_states, doubled, fill
from recordings import facts, matches, steps_per_epoch, tensors, under
from small_trainings import forward_pass
from torch import Tensor, nn

from checkpoints.positions import sincos_positions
from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import Method, TrainProgress
from pretrain.methods.extrema import CLASS_ATTENTION, METHOD, RECIPES, Settings, visible
from pretrain.parts.masking import kept
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine

META = facts("extrema/meta.json")
DATA, WEIGHTS = (doubled(tensors(f"extrema/{name}.safetensors")) for name in ("cases", "weights"))
MODELS = [name for name, entry in META.items() if isinstance(entry, dict) and "patch" in entry]
RANKED = [name for name in META["cases"] if f"{name}/loss_per_rank" in DATA]  # several processes
CASES = [name for name in META["cases"] if name not in RANKED]
# The cases are float32. Its README measures 2e-6 forward and 4e-7 in losses, and allows 1e-5 for both. Gradients and
# what the teacher moved to have its limits: at other sizes float32 is 8e-6 off the gradients in float64.
FORWARD, LOSS, GRADIENT, MOVED = 2e-6, 1e-6, 5e-5, 1e-6
FLOAT32 = 1e-5  # of ours in float32 as well: its limit, forward and in losses
# Its README allows 1e-9 for the trajectory and measures 3e-15. Adam makes 1e-12 of the rounding noise in the keys'
# biases, which the norms include.
TRAJECTORY, NORMS = 1e-12, 1e-9


def our_name(official: str) -> str:
    """Official parameter name -> ours."""
    branch, _, name = official.partition(".")
    if branch == "predictor":
        return official
    for pattern, ours in (("cls_token", "class_query"), (r"blocks_token\.", "class_attention.")):
        name = re.sub(rf"^{pattern}", ours, name)
    branch = {"base_encoder": "online", "momentum_encoder": "momentum"}[branch]
    if name.startswith("head."):
        return f"{branch}.{name.replace('head', 'projector', 1)}"
    return f"{branch}.vit.{name}" if name.startswith("class_") else f"{branch}.vit.trunk.{name}"


def method_of(case: dict, model: str, **changes) -> Method:
    """The method with a recorded case's options, in the recorded state."""
    size = META[model]
    design = CLASS_ATTENTION | {"class_attention": size["ca"]}
    hidden = len(WEIGHTS[f"{model}/base_encoder.blocks.0.mlp.fc1.weight"])
    spec = replace(VIT_SMOKE, image_size=size["img"], patch_size=size["patch"], width=size["dim"], depth=size["depth"],
                   heads=size["heads"], mlp_hidden=hidden, **design)  # fmt: skip
    settings = Settings(
        mask_ratio=case["ratio"], masks=case["masks"], replacement=not case.get("disjoint", True),
        loss=case.get("loss", "infonce" if case.get("T") else "byol"), temperature=case.get("T") or 1.0,
        projector_hidden=size["mlp_dim"], projector_width=size["proj"],
        teacher_momentum=case.get("ema", META["trajectory"]["ema_momentum"]),
        drop_path=max(case.get("drop_path_rates", [0.0])), **changes,
    )  # fmt: skip
    method = METHOD(spec, settings).double()
    fill(method, {our_name(name): tensor for name, tensor in under(WEIGHTS, f"{model}/").items()})
    return method


def model_of(name: str) -> str:
    """The model that a case begins with, or else the first one."""
    return next((model for model in MODELS if name.startswith(model)), MODELS[0])


def pixels(images: Tensor) -> Tensor:
    return images.double() / 64 - 2


def views_of(name: str) -> dict[str, Tensor]:
    model = model_of(name)
    views = {"student": pixels(DATA[f"{model}/images1_u8"]), "noise": DATA[f"{name}/noise"].transpose(0, 1)}
    if META["cases"][name]["views"] == 2:
        views["teacher"] = pixels(DATA[f"{model}/images2_u8"])
    return views


def start(parts: int = 1) -> TrainProgress:
    return TrainProgress(step=0, steps_per_epoch=1, epochs=1, micro_batches=parts)


def listen(method: Method) -> dict[str, Tensor]:
    """What the modules give, by recorded name, once the method has run."""
    heard: dict[str, Tensor] = {}

    def note(module: nn.Module, name: str) -> None:
        module.register_forward_hook(lambda module, inputs, output: heard.__setitem__(name, output.detach()))

    for branch, network in (("student", method.online), ("teacher", method.momentum)):
        trunk, class_attention = network.vit.trunk, network.vit.class_attention
        for number, block in enumerate(trunk.blocks[:-1]):
            note(block, f"{branch}/block{number}")
        for number, block in enumerate(class_attention):
            note(block, f"{branch}/ca{number}")
        note(class_attention[-1], f"{branch}/instance_prenorm")
        note(trunk.blocks[-1], f"{branch}/distributed")
        note(trunk.norm, f"{branch}/instance")
        note(network.projector, f"{branch}/projection")
    trunk = method.online.vit.trunk
    trunk.blocks[0].register_forward_pre_hook(lambda module, inputs: heard.__setitem__("student/tokens_in", inputs[0]))
    note(method.predictor, "student/prediction")
    return heard


def recorded_drops(method: Method, draws: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """timm's drop path takes the recorded draws, in order; returns those that are left."""
    left = list(draws)

    def drop_path(x: Tensor, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True) -> Tensor:
        if not (drop_prob and training):
            return x
        keep = 1 - drop_prob
        return x * ((keep + left.pop(0)).floor() / keep).view(-1, 1, 1)

    monkeypatch.setattr("timm.layers.drop.drop_path", drop_path)
    return left


def heard_close(heard: dict[str, Tensor], name: str, limit: float) -> None:
    """What the modules gave against all that is recorded of them."""
    compared = [part for part in under(DATA, f"{name}/") if part.startswith(("student/", "teacher/"))]
    assert len(compared) >= 6
    for part in compared:
        theirs = DATA[f"{name}/{part}"]
        close(heard[part].reshape(theirs.shape), theirs, limit, part)


@pytest.mark.parametrize("name", CASES)
def test_recorded_pass(name, monkeypatch):
    case, model = META["cases"][name], model_of(name)
    method = method_of(case, model)
    heard, views = listen(method), views_of(name)
    left = recorded_drops(method, DATA.get(f"{name}/droppath_rand", torch.empty(0)), monkeypatch)

    assert torch.equal(visible(views["noise"], case["masks"], method.keep).transpose(0, 1), DATA[f"{name}/keep_ids"])
    step = forward_pass(method, views, start())
    step.loss.backward()

    assert not left
    heard_close(heard, name, FORWARD)
    close(step.loss, DATA[f"{name}/loss"][0], LOSS, "loss")
    predictions = heard["student/prediction"].unflatten(0, (case["masks"], -1))
    by_mask = [method.loss(predictions[i : i + 1], heard["teacher/projection"]) for i in range(case["masks"])]
    close(torch.stack(by_mask), DATA[f"{name}/loss_per_mask"], LOSS, "loss of each mask")
    check_gradients(method, name, case)
    after = under(WEIGHTS, f"{model}_after_ema/")
    for official, theirs in after.items():
        close(method.get_parameter(our_name(official)), theirs, MOVED, official)
    for official, norm in META[f"{model}_after_ema_norms"].items():
        close(method.get_parameter(our_name(f"momentum_encoder.{official}")).norm(), norm, MOVED, official)


def check_gradients(method: Method, name: str, case: dict) -> None:
    """Norms for all parameters, some gradients in full, none where none was recorded."""
    norms = {our_name(official): norm for official, norm in META["grad_norms"][name].items()}
    trained = {parameter: p.grad for parameter, p in method.named_parameters() if p.grad is not None}
    assert trained.keys() == norms.keys()
    for parameter, gradient in trained.items():
        close_norm(gradient, norms[parameter], GRADIENT, parameter)
    total = torch.stack([gradient.norm() for gradient in trained.values()]).norm()
    close(total, case["total_grad_norm"], GRADIENT, "gradient norm")
    for official, theirs in under(DATA, f"{name}/grad/").items():
        ours = trained[our_name(official)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=GRADIENT * theirs.abs().max().item(), msg=official)


@pytest.mark.parametrize("name", CASES)
def test_recorded_pass_in_float32(name, monkeypatch):
    case = META["cases"][name]
    method = method_of(case, model_of(name)).float()
    heard = listen(method)
    recorded_drops(method, DATA.get(f"{name}/droppath_rand", torch.empty(0)).float(), monkeypatch)
    step = forward_pass(method, {part: tensor.float() for part, tensor in views_of(name).items()}, start())
    step.loss.backward()
    heard_close(heard, name, FLOAT32)
    close(step.loss, DATA[f"{name}/loss"][0], FLOAT32, "loss")
    for official, theirs in under(DATA, f"{name}/grad/").items():
        close(method.get_parameter(our_name(official)).grad, theirs, GRADIENT, official)


def recipe(method: Method) -> Recipe:
    """That of the recorded trajectory."""
    given = META["trajectory"]
    batch = DATA["trajectory/noise"].shape[1]
    schedule = WarmupCosine(warmup=given["warmup_epochs"], floor=given["min_lr"])
    return Recipe(
        source="recorded", spec=method.spec, settings=method.settings, epochs=given["epochs"], batch=batch,
        lr=given["lr"], lr_batch=0, schedule=schedule, weight_decay=given["weight_decay"], betas=tuple(given["betas"]),
    )  # fmt: skip


def test_trajectory():
    given, data = META["trajectory"], under(DATA, "trajectory/")
    method = method_of(given, MODELS[0])
    updates = Updates(method, recipe(method))
    for step in range(len(data["loss"])):
        progress = TrainProgress(step=step, steps_per_epoch=given["iters_per_epoch"], epochs=given["epochs"])
        close(updates.rates(progress)[0], data["lr"][step], TRAJECTORY, f"learning rate {step}")
        momentum = method.teacher_momentum.at(method.settings.teacher_momentum, progress)
        close(momentum, data["ema"][step], TRAJECTORY, f"momentum {step}")
        views = {"student": pixels(data["images_u8"][step]), "noise": data["noise"][step].unsqueeze(1)}
        logs = updates.run([views], progress)
        close(logs["loss"], data["loss"][step], TRAJECTORY, f"loss {step}")
        close(logs["grad_norm"], data["grad_norm"][step], TRAJECTORY, f"gradient norm {step}")
    final = under(data, "final/")
    assert final
    for official, theirs in final.items():
        limit = NORMS if official.endswith("attn.k.bias") else TRAJECTORY
        close_states(method.state_dict(), {official: theirs}, limit, our_name)
    norms = {our_name(official): norm for official, norm in given["final_norms"].items()}
    assert norms.keys() == dict(method.named_parameters()).keys()
    for name, norm in norms.items():
        close(method.get_parameter(name).norm(), norm, NORMS, name)


def test_decayed_parameters():
    plain, decayed = method_of(META["trajectory"], MODELS[0]).groups()
    assert (plain.weight_decay, decayed.weight_decay) == (0.0, None)
    for group, recorded in ((plain, "no_decay"), (decayed, "decay")):
        assert set(group.parameters) == {our_name(name) for name in META["optimizer_groups"][recorded]}


def test_schedules_of_the_released_recipe():
    released, teacher = RECIPES["vit_b"], method_of(META["trajectory"], MODELS[0]).teacher_momentum
    epochs, rates, momenta = (DATA[f"schedule/{name}"].tolist() for name in ("epoch", "lr", "ema"))
    per_epoch = steps_per_epoch(epochs)
    for epoch, lr, momentum in zip(epochs, rates, momenta, strict=True):
        progress = TrainProgress(step=round(epoch * per_epoch), steps_per_epoch=per_epoch, epochs=released.epochs)
        assert progress.time == pytest.approx(epoch, abs=1e-12)
        assert released.schedule.at(released.peak, progress) == pytest.approx(lr, rel=1e-6, abs=1e-18)
        assert teacher.at(released.settings.teacher_momentum, progress) == pytest.approx(momentum, rel=1e-12)


@pytest.mark.parametrize("table", [found.groups() for found in matches(r"pos_embed_(\d+)_g(\d+)/rows", DATA)], ids=str)
def test_position_table(table):
    width, side = map(int, table)
    ours = sincos_positions((side, side), width, "column")[0]
    recorded = under(DATA, f"pos_embed_{width}_g{side}/")
    torch.testing.assert_close(ours[recorded["rows"].long()].double(), recorded["values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("counts", [found[0] for found in matches(r"mask_view_size_\d+", META)])
def test_kept_patches(counts):
    patches = int(counts.rpartition("_")[2])
    for ratio, number in META[counts].items():
        assert kept(patches, float(ratio)) == number


def views_of_ranks(name: str, ranks: slice) -> dict[str, Tensor]:
    data = under(DATA, f"{name}/")
    return {
        "student": pixels(data["images_u8"][ranks].flatten(0, 1)),
        "noise": data["noise"][ranks].flatten(0, 1).unsqueeze(1),
    }


def one_pass(name: str, world: World, views: dict[str, Tensor], path: Path) -> None:
    """Loss of this process and gradients after one pass, to a file."""
    method = method_of(META["cases"][name], model_of(name))
    logs = Updates(method, recipe(method), world=world).back_from(views, start())
    found = {name: p.grad for name, p in method.named_parameters() if p.requires_grad}
    torch.save(found | {"loss": logs["loss"]}, path)


def share(name: str, world: World, folder: Path) -> None:
    one_pass(name, world, views_of_ranks(name, slice(world.rank, world.rank + 1)), folder / str(world.rank))


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_processes_share_their_keys(name, tmp_path):
    data = under(DATA, f"{name}/")
    ranks = len(data["loss_per_rank"])
    in_processes(ranks, partial(share, name), tmp_path)
    one_pass(name, World(), views_of_ranks(name, slice(None)), tmp_path / "whole")
    found = [torch.load(tmp_path / str(rank)) for rank in range(ranks)]
    close(torch.stack([rank["loss"] for rank in found]), data["loss_per_rank"], LOSS, "losses")
    gradients = under(data, "ddp_grad/")
    assert gradients
    for official, theirs in gradients.items():
        ours = [rank[our_name(official)] for rank in found]
        assert all(torch.equal(ours[0], other) for other in ours)
        close(ours[0], theirs, GRADIENT, official)
    whole = torch.load(tmp_path / "whole")  # one process with all images
    close(torch.stack([rank["loss"] for rank in found]).mean(), whole["loss"], EXACT, "loss")
    for parameter, gradient in found[0].items():
        if parameter != "loss" and not parameter.endswith("attn.k.bias"):  # in exact arithmetic it is zero
            close(gradient, whole[parameter], 1e-9, parameter)
