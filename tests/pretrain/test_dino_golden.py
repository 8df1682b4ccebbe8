"""DINO against two recorded steps of its official training loop (facebookresearch/dino 7c446df), in float64.

The first step is in the epoch that freezes the prototypes, the second after it. Large tensors are recorded in float32.
"""

import pytest
import torch
from recorded import close, fill, progress, under
from recorded_dino import CONFIG, DATA, FLOAT64, STEPS, Watched, close_weights, prepared, recipe, run_recorded, views
from torch import Tensor

from pretrain.method import TrainProgress
from pretrain.methods.dino import METHOD
from pretrain.parts.heads import PrototypeHead
from pretrain.parts.self_distillation import DistillationSettings as Settings
from pretrain.parts.teachers import Temperature
from pretrain.schedules import CosineTo, TableCosine, cosine

FLOAT32 = 1e-5


@pytest.fixture
def updates() -> Watched:
    return prepared(METHOD, recipe(Settings))


def crop_major(logits: Tensor) -> Tensor:
    """(B, V, K) -> (V B, K), the recording's order."""
    return logits.transpose(0, 1).flatten(0, 1)


def test_recorded_updates(updates):
    run_recorded(updates, FLOAT64)
    close_weights(updates.method, FLOAT64)


def test_forward_pass(updates):
    method, crops = updates.method, views(0)
    student, teacher = method.student(crops), method.teacher({"global": crops["global"]})
    close(torch.cat([crop_major(logits) for logits in student.values()]), DATA["step0/student_out"], FLOAT64)
    close(crop_major(teacher["global"]), DATA["step0/teacher_out"], FLOAT64)
    close(method.teacher.class_tokens(crops["global"])[:, 0], DATA["probe/teacher_cls_of_crop0"], FLOAT64)
    close(method.student.class_tokens(crops["local"])[:, 0], DATA["probe/student_cls_of_crop2"], FLOAT64)
    attention = method.teacher.vit.attention(crops["global"][:, 0])
    close(attention, DATA["probe/teacher_last_attention_of_crop0"], FLOAT64)


def test_float32():
    """The README's own float32 run differs by up to 2e-5 of a tensor's largest value; ours was within 3e-6."""
    updates = prepared(METHOD, recipe(Settings), torch.float32)
    for step in range(STEPS):
        logs = updates.run([views(step, torch.float32)], progress(step, CONFIG, 1))
        close(logs["loss"], DATA[f"step{step}/loss"], FLOAT32, f"loss {step}")
        close(updates.method.centre.center, DATA[f"step{step}/center_after"][0], FLOAT32, f"centre {step}")
    close_weights(updates.method, FLOAT32)


def test_frozen_prototypes_do_not_count_in_the_optimiser(updates):
    prototypes = updates.method.student.head.last_layer.weight_v
    before = prototypes.detach().clone()
    updates.run([views(0)], progress(0, CONFIG, 1))
    assert torch.equal(prototypes, before) and prototypes not in updates.optimizer.state
    updates.run([views(1)], progress(1, CONFIG, 1))
    assert updates.optimizer.state[prototypes]["step"] == 1


def test_schedules():
    wanted = TableCosine(warmup=CONFIG["warm"], floor=1e-6)
    peak = recipe(Settings).peak
    temperature = recipe(Settings).settings
    ramp = Temperature(start=temperature.teacher_temperature_start, end=temperature.teacher_temperature,
                       warmup=temperature.teacher_warmup)  # fmt: skip
    for step in range(CONFIG["epochs"]):
        now = progress(step, CONFIG, 1)
        close(max(wanted.at(peak, now), CONFIG["lr0"]), DATA["sched/lr"][step], 1e-12)
        close(CosineTo(end=0.4).at(0.04, now), DATA["sched/wd"][step], 1e-12)
        close(cosine(CONFIG["mom"], 1.0, now.step / now.steps), DATA["sched/momentum"][step], 1e-12)
        close(ramp.at(now.epoch), DATA["sched/teacher_temp"][step], 1e-12)
    longer = DATA["sched/example_warmup3_ep10_it4_base0.0005_final1e-6"]
    for step, rate in enumerate(longer):
        now = TrainProgress(step=step, steps_per_epoch=4, epochs=10)
        close(TableCosine(warmup=3, floor=1e-6).at(5e-4, now), rate, 1e-12)


def test_head_with_batch_norms():
    before, after = under(DATA, "bnhead_before/"), under(DATA, "bnhead_after/")
    width_in, hidden = before["mlp.0.weight"].shape[1], before["mlp.0.weight"].shape[0]
    count, bottleneck = before["last_layer.weight_v"].shape
    head = PrototypeHead(
        width_in, count, hidden=hidden, bottleneck=bottleneck, layers=3, norm="bn", fixed=True
    ).double()  # fmt: skip
    fill(head, before)
    given = DATA["bnhead/input"].requires_grad_()
    output = head(given)
    close(output, DATA["bnhead/output_train"], FLOAT64, "output")
    (output * DATA["bnhead/cotangent"]).sum().backward()
    close(given.grad, DATA["bnhead/input_grad"], FLOAT64, "gradient of the input")
    for name, norm in under(DATA, "bnhead/gradnorm/").items():
        gradient = head.get_parameter(name).grad.norm()
        if norm < 1e-12:  # of a bias that a batch norm takes off again
            assert gradient < 1e-12
        else:
            close(gradient, norm, FLOAT64, name)
    for name, buffer in after.items():
        close(head.get_buffer(name), buffer, FLOAT64, name)
    close(head.eval()(DATA["bnhead/input"]), DATA["bnhead/output_eval_after"], FLOAT64, "output in eval mode")
