"""DINO against two recorded steps of its official training loop (facebookresearch/dino 7c446df), in float64.

The first step is in the epoch that freezes the prototypes, the second after it. Large tensors are recorded in float32.
"""

import pytest
import torch
from recorded import EXACT, close, close_norm, fill
from recorded_distillation import DINO, FLOAT64, ROUNDING, Watched
from recordings import matches, under
from torch import Tensor

from pretrain.method import TrainProgress
from pretrain.methods.dino import METHOD
from pretrain.parts.heads import PrototypeHead
from pretrain.parts.self_distillation import DistillationSettings as Settings
from pretrain.parts.teachers import Temperature
from pretrain.schedules import TableCosine, cosine

DATA, CONFIG = DINO.data, DINO.config
FLOAT32 = 1e-5
ENDS = 2e-4  # of weights in float32 after more than two updates: Adam makes steps of rounding, 8e-5 after four


@pytest.fixture
def updates() -> Watched:
    return DINO.prepared(METHOD, DINO.recipe(Settings))


def crop_major(logits: Tensor) -> Tensor:
    """(B, V, K) -> (V B, K), the recording's order."""
    return logits.transpose(0, 1).flatten(0, 1)


def test_recorded_updates(updates):
    DINO.run(updates, FLOAT64)
    DINO.close_weights(updates.method, FLOAT64)


def test_forward_pass(updates):
    method, crops = updates.method, DINO.views(0)
    student, teacher = method.student(crops), method.teacher({"global": crops["global"]})
    close(torch.cat([crop_major(logits) for logits in student.values()]), DATA["step0/student_out"], FLOAT64)
    close(crop_major(teacher["global"]), DATA["step0/teacher_out"], FLOAT64)
    probes = matches(r"probe/(student|teacher)_(cls|last_attention)_of_crop(\d+)", DATA)
    assert probes
    for probe in probes:
        network, crop = getattr(method, probe[1]), DATA[f"step0/crop{probe[3]}"]
        ours = network.class_tokens(crop.unsqueeze(1))[:, 0] if probe[2] == "cls" else network.vit.attention(crop)
        close(ours, DATA[probe[0]], FLOAT64, probe[0])


def test_float32():
    """The README's own float32 run differs by up to 2e-5 of a tensor's largest value; ours was within 3e-6."""
    updates = DINO.prepared(METHOD, DINO.recipe(Settings), torch.float32)
    for step in range(DINO.steps):
        logs = updates.run([DINO.views(step, torch.float32)], DINO.now(step))
        close(logs["loss"], DATA[f"step{step}/loss"], FLOAT32, f"loss {step}")
        close(updates.method.centre.center, DATA[f"step{step}/center_after"][0], FLOAT32, f"centre {step}")
    DINO.close_weights(updates.method, FLOAT32 if DINO.steps <= 2 else ENDS)


def test_frozen_prototypes_do_not_count_in_the_optimiser(updates):
    prototypes, frozen = updates.method.student.head.last_layer.weight_v, updates.method.settings.freeze_prototypes
    before = prototypes.detach().clone()
    for step in range(DINO.steps):
        updates.run([DINO.views(step)], DINO.now(step))
        if DINO.now(step).epoch < frozen:
            assert torch.equal(prototypes, before) and prototypes not in updates.optimizer.state
    counted = sum(DINO.now(step).epoch >= frozen for step in range(DINO.steps))
    assert updates.optimizer.state[prototypes].get("step", 0) == counted


def test_schedules():
    wanted = TableCosine(warmup=CONFIG["warm"], floor=1e-6)
    chosen = DINO.recipe(Settings)
    temperature = Temperature(
        start=chosen.settings.teacher_temperature_start,
        end=chosen.settings.teacher_temperature,
        warmup=chosen.settings.teacher_warmup,
    )
    for step, rate in enumerate(DATA["sched/lr"]):
        at = DINO.now(step)
        close(max(wanted.at(chosen.peak, at), CONFIG["lr0"]), rate, EXACT, f"rate {step}")
        decay = chosen.weight_decay_schedule.at(chosen.weight_decay, at)
        close(decay, DATA["sched/wd"][step], EXACT, f"weight decay {step}")
        close(cosine(CONFIG["mom"], 1.0, at.step / at.steps), DATA["sched/momentum"][step], EXACT, f"momentum {step}")
        close(temperature.at(at.epoch), DATA["sched/teacher_temp"][at.epoch], EXACT, f"temperature {step}")


@pytest.mark.parametrize("example", [found[0] for found in matches(r"sched/example_.*", DATA)])
def test_schedule_of_the_learning_rate(example):
    (found,) = matches(r"sched/example_warmup(.+)_ep(.+)_it(.+)_base(.+)_final(.+)", [example])
    warmup, epochs, iterations, peak, floor = map(float, found.groups())
    for step, rate in enumerate(DATA[example]):
        at = TrainProgress(step=step, steps_per_epoch=int(iterations), epochs=int(epochs))
        close(TableCosine(warmup=warmup, floor=floor).at(peak, at), rate, EXACT, f"rate {step}")


def test_head_with_batch_norms():
    before, after = under(DATA, "bnhead_before/"), under(DATA, "bnhead_after/")
    hidden, width_in = before["mlp.0.weight"].shape
    count, bottleneck = before["last_layer.weight_v"].shape
    layers = sum(name.startswith("mlp.") and tensor.ndim == 2 for name, tensor in before.items())
    fixed = "last_layer.weight_g" not in under(DATA, "bnhead/gradnorm/")
    head = PrototypeHead(
        width_in, count, hidden=hidden, bottleneck=bottleneck, layers=layers, norm="bn", fixed=fixed
    ).double()  # fmt: skip
    fill(head, before)
    given = DATA["bnhead/input"].requires_grad_()
    output = head(given)
    close(output, DATA["bnhead/output_train"], FLOAT64, "output")
    (output * DATA["bnhead/cotangent"]).sum().backward()
    close(given.grad, DATA["bnhead/input_grad"], FLOAT64, "gradient of the input")
    for name, norm in under(DATA, "bnhead/gradnorm/").items():
        close_norm(head.get_parameter(name).grad, norm, FLOAT64, name, ROUNDING)
    for name, buffer in after.items():
        close(head.get_buffer(name), buffer, FLOAT64, name)
    close(head.eval()(DATA["bnhead/input"]), DATA["bnhead/output_eval_after"], FLOAT64, "output in eval mode")
