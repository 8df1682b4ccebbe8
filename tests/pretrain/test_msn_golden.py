"""MSN against two recorded steps of its official training loop (facebookresearch/msn 4388dc1), in float64.

Large tensors are recorded in float32. Left out of the end states is what has no gradient in exact arithmetic, of whose
rounding Adam makes steps: keys' biases, and constants in front of a batch norm, with the running means that follow.
"""

from dataclasses import replace

import pytest
import torch
from recorded import EXACT, close, close_norm, count, doubled, fill, progress, without_keys
from recordings import facts, matches, tensors, under
from torch import Tensor

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.msn import METHOD, POSITIONS, STRETCH, Msn, Settings
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.parts.teachers import sinkhorn
from pretrain.recipe import Recipe
from pretrain.schedules import CosineTo, CountedCosine

DATA, CONFIG = doubled(tensors("msn/golden.safetensors")), facts("msn/config.json")
FLOAT64 = 1e-6
ROUNDING = 1e-12
STEPS = count(DATA, "step{}/loss")
# Of the momenta there is one more than the stretched training has updates.
PER_EPOCH = next(n for n in range(1, 1000) if int(n * CONFIG["epochs"] * STRETCH) + 1 == len(DATA["sched/momentum"]))
WITH_NORMS = "encoder0/fc.bn1.weight" in DATA
LAYERS = (
    ("fc1", "bn1", "gelu1", "fc2", "bn2", "gelu2", "fc3") if WITH_NORMS else ("fc1", "gelu1", "fc2", "gelu2", "fc3")
)
NOISE = ("norm.bias", "head.0.bias", "head.3.bias", "head.1.running_mean", "head.4.running_mean") if WITH_NORMS else ()
FLOOR, DECAY = 1e-6, (0.04, 0.4)  # of the official configuration, which the recording keeps
VIEWS = CONFIG["rand_views"] + CONFIG["focal_views"]


class Watched(Updates):
    """Keeps all gradients, and the norm of those that are clipped, before they are."""

    def clipped(self) -> float:
        self.before = {name: p.grad.clone() for name, p in self.method.named_parameters() if p.requires_grad}
        self.norm_of_clipped = torch.stack([gradient.norm() for gradient in self.gradients_of(clipped=True)]).norm()
        return super().clipped()


def our_name(name: str) -> str:
    """Official name within an encoder -> ours within a network."""
    if not name.startswith("fc."):
        return f"vit.trunk.{name}"
    _, layer, kind = name.split(".")
    return f"head.{LAYERS.index(layer)}.{kind}"


def network(prefix: str) -> dict[str, Tensor]:
    """Tensors recorded under `prefix`, by our names."""
    found = {our_name(name): tensor for name, tensor in under(DATA, prefix).items()}
    assert found, prefix
    return found


def settings(**changes) -> Settings:
    given = dict(
        prototypes=CONFIG["K"],
        head_hidden=CONFIG["hidden"],
        head_width=CONFIG["out"],
        head_norm="bn" if WITH_NORMS else "none",
        mask_ratio=CONFIG["patch_drop"],
        random_views=CONFIG["rand_views"],
        focal_views=CONFIG["focal_views"],
        focal_size=CONFIG["loc"],
        temperature=CONFIG["tau"],
        sharpening=CONFIG["start_T"],
        sharpening_end=CONFIG["final_T"],
        sinkhorn=CONFIG["sinkhorn"],
        memax_weight=CONFIG["memax_w"],
        entropy_weight=CONFIG["ent_w"],
        teacher_momentum=CONFIG["start_m"],
    )
    return Settings(**given | changes)


def recipe() -> Recipe:
    sizes = dict(image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"], depth=CONFIG["depth"])
    hidden = len(DATA["encoder0/blocks.0.mlp.fc1.weight"])
    return Recipe(
        source="recorded",
        spec=replace(VIT_SMOKE, **sizes, heads=CONFIG["heads"], mlp_hidden=hidden, **POSITIONS),
        settings=settings(),
        epochs=CONFIG["epochs"],
        batch=CONFIG["B"],
        lr=CONFIG["lr"],
        lr_batch=0,
        schedule=CountedCosine(warmup=CONFIG["warm"], start=CONFIG["start_lr"] / CONFIG["lr"], floor=FLOOR),
        weight_decay=DECAY[0],
        weight_decay_schedule=CosineTo(end=DECAY[1], stretch=STRETCH, first=1),
        clip=CONFIG["clip"],
    )


@pytest.fixture
def updates() -> Watched:
    chosen = recipe()
    method = METHOD(chosen.spec, chosen.settings)
    state = {f"anchor.{name}": tensor for name, tensor in network("encoder0/").items()}
    state |= {f"target.{name}": tensor for name, tensor in network("target0/").items()}
    fill(method, state | {"prototypes": DATA["prototypes0"]})
    return Watched(method.double(), chosen)


def now(step: int) -> TrainProgress:
    return progress(step, CONFIG, PER_EPOCH)


def views(step: int) -> dict[str, Tensor]:
    """The recorded views; the permutation of the patches as noise with that order, for every image."""
    target, *anchors = (DATA[f"step{step}/view{number}"] for number in range(1 + VIEWS))
    found = {"target": target, "random": torch.stack(anchors[: CONFIG["rand_views"]], dim=1)}
    if CONFIG["focal_views"]:
        found["focal"] = torch.stack(anchors[CONFIG["rand_views"] :], dim=1)
    patches = (CONFIG["img"] // CONFIG["patch"]) ** 2
    order = DATA.get(f"step{step}/patch_perm", torch.arange(patches))
    noise = order.argsort().double() / patches
    return found | {"noise": noise.expand(len(target), CONFIG["rand_views"], patches)}


def view_major(vectors: Tensor) -> Tensor:
    """(B, V, d) -> (V B, d), the recording's order."""
    return vectors.transpose(0, 1).flatten(0, 1)


def test_recorded_updates(updates):
    for step in range(STEPS):
        recorded, limit = under(DATA, f"step{step}/"), FLOAT64
        logs = updates.run([views(step)], now(step))
        close(logs["loss"], recorded["loss"], limit, f"loss {step}")
        for name in ("ce", "memax", "entropy"):
            close(logs[name], recorded[f"loss_{name}"], limit, f"loss {name} {step}")
        assert logs["prototypes_used"] == recorded["num_targets_used"]
        close_gradients(updates, step)
        close(updates.norm_of_clipped, recorded["encoder_total_gradnorm_before_clip"], limit, f"norm {step}")
        if "prototypes_after" in recorded:
            close(updates.method.prototypes, recorded["prototypes_after"], limit, f"prototypes {step}")
    close_weights(updates.method)


def close_gradients(updates: Watched, step: int) -> None:
    anchor = {name.removeprefix("anchor."): grad for name, grad in updates.before.items() if name != "prototypes"}
    norms = network(f"step{step}/gradnorm/")
    assert norms.keys() == anchor.keys()
    for name, norm in norms.items():
        close_norm(anchor[name], norm, FLOAT64, f"{name}, step {step}", ROUNDING)
    recorded = {our_name(name): gradient for name, gradient in under(DATA, f"step{step}/grad/").items()}
    for name, gradient in recorded.items():
        if norms[name] > ROUNDING:
            close(anchor[name], gradient, FLOAT64, f"gradient of {name}")
    close(updates.before["prototypes"], DATA[f"step{step}/prototypes_grad"], FLOAT64, f"of prototypes, step {step}")


def close_weights(method: Msn) -> None:
    """Buffers too: they follow each network's own passes."""
    for branch, official in (("anchor", "encoder"), ("target", "target")):
        state, recorded = getattr(method, branch).state_dict(), network(f"{official}{STEPS}/")
        assert state.keys() == recorded.keys()
        for name, end in recorded.items():
            if name.removeprefix("vit.trunk.") not in NOISE:
                close(without_keys(state[name], name), without_keys(end, name), FLOAT64, f"{branch}, {name}")
    close(method.prototypes, DATA[f"prototypes{STEPS}"], FLOAT64, "prototypes")


def test_forward_pass(updates):
    method, seen = updates.method, views(0)
    method.before_forward(now(0))
    with torch.no_grad():
        vectors, target = method.anchor_vectors(seen), method.target(seen["target"])
        shares = method.similarities(vectors).softmax(dim=-1)
    close(view_major(vectors), DATA["step0/anchor_z"], FLOAT64, "anchors")
    close(view_major(shares), DATA["step0/anchor_probs"], FLOAT64, "predictions")
    close(target, DATA["step0/target_h"], FLOAT64, "target")
    close(method.targets(seen["target"]), DATA["step0/targets"], FLOAT64, "targets")
    method.settings = settings(sinkhorn=False)
    close(method.targets(seen["target"]), DATA["step0/targets_sharpened"], FLOAT64, "sharpened targets")


@pytest.mark.parametrize("found", matches(r"sinkhorn/output(\d+)", DATA), ids=lambda found: found[0])
def test_sinkhorn(found):
    close(sinkhorn(DATA["sinkhorn/input"], int(found[1])), DATA[found[0]], FLOAT64, found[0])


def test_schedules(updates):
    chosen = updates.recipe
    for step in range(STEPS):
        lr, decay = updates.rates(now(step))
        close(lr, DATA[f"step{step}/lr_used"], EXACT, f"rate {step}")
        close(decay, DATA[f"step{step}/wd_used"], EXACT, f"weight decay {step}")
    for step in range(CONFIG["epochs"] * PER_EPOCH):
        updates.method.before_forward(now(step))
        close(updates.method.sharpening, DATA["sched/sharpen_T"][step], EXACT, f"sharpening {step}")
        close(updates.method.momentum(now(step)), DATA["sched/momentum"][step], EXACT, f"momentum {step}")
    assert chosen.peak == CONFIG["lr"]


EXAMPLES = matches(r"sched/example_(lr|wd)_(?:warm(\d+)_)?T(\d+)_(\d+)steps", DATA)


@pytest.mark.parametrize("found", EXAMPLES, ids=lambda found: found[0])
def test_examples_of_schedules(found):
    """With the rates and decays of the official configuration, in epochs of one update."""
    kind, warmup, end, steps = found[1], float(found[2] or 0), int(found[3]), int(found[4])
    rates = CountedCosine(warmup=warmup, start=0.2, floor=FLOOR, stretch=end / steps)
    decays = CosineTo(end=DECAY[1], stretch=end / steps, first=1)
    schedule, peak = (rates, 1e-3) if kind == "lr" else (decays, DECAY[0])
    for step, value in enumerate(DATA[found[0]]):
        at = TrainProgress(step=step, steps_per_epoch=1, epochs=steps)
        close(schedule.at(peak, at), value, EXACT, f"{kind} {step}")
