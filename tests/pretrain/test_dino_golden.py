"""DINO against two recorded steps of its official training loop (facebookresearch/dino 7c446df), in float64."""

import pytest
import torch
from recorded import EXACT, assert_close, assert_norm_close, converted, fill
from recorded_distillation import RecordedDino, crop_major
from recordings import matches, under

from pretrain.method import TrainProgress
from pretrain.parts.heads import PrototypeHead
from pretrain.schedules import TableCosine

DATA, FLOAT64 = RecordedDino.data, RecordedDino.LOSS
FLOAT32 = 1e-5
ENDS = 2e-4  # weights in float32 after more than two updates: Adam makes steps of rounding, 8e-5 after four


class TestDino(RecordedDino):
    def outputs(self, method, step):
        views = self.views(step)
        method.before_forward(self.progress(step))
        teacher = method.teacher({"global": views["global"]})["global"]
        student = torch.cat([crop_major(logits) for logits in method.student(views).values()])
        yield f"step{step}/student_out", student
        yield f"step{step}/teacher_out", crop_major(teacher)
        if step:
            return
        probes = matches(r"probe/(student|teacher)_(cls|last_attention)_of_crop(\d+)", self.data)
        assert probes
        for probe in probes:
            network, crops = getattr(method, probe[1]), self.data[f"step0/crop{probe[3]}"]
            tokens = (
                network.class_tokens(crops.unsqueeze(1))[:, 0] if probe[2] == "cls" else network.vit.attention(crops)
            )
            yield probe[0], tokens

    def test_updates_in_float32(self):
        """The README's own float32 run differs by up to 2e-5 of a tensor's largest value; ours was within 3e-6."""
        updates = self.begin(torch.float32)
        for step in range(self.steps):
            logs = updates.run([converted(self.views(step), torch.float32)], self.progress(step))
            assert_close(logs["loss"], self.data[f"step{step}/loss"], FLOAT32, f"loss {step}")
            assert_close(
                updates.method.centre.center, self.data[f"step{step}/center_after"][0], FLOAT32, f"centre {step}"
            )
        self.variant(END=FLOAT32 if self.steps <= 2 else ENDS).check_end(updates.method)

    def test_frozen_prototypes_have_no_optimiser_steps(self):
        updates = self.begin()
        prototypes, frozen = updates.method.student.head.last_layer.weight_v, updates.method.settings.freeze_prototypes
        before = prototypes.detach().clone()
        for step in range(self.steps):
            updates.run([self.views(step)], self.progress(step))
            if self.progress(step).epoch < frozen:
                assert torch.equal(prototypes, before) and prototypes not in updates.optimizer.state
        counted = sum(self.progress(step).epoch >= frozen for step in range(self.steps))
        assert updates.optimizer.state[prototypes].get("step", 0) == counted


@pytest.mark.parametrize("example", [match[0] for match in matches(r"sched/example_.*", DATA)])
def test_learning_rates_equal_the_recorded_examples(example):
    (match,) = matches(r"sched/example_warmup(.+)_ep(.+)_it(.+)_base(.+)_final(.+)", [example])
    warmup, epochs, iterations, peak, floor = map(float, match.groups())
    for step, rate in enumerate(DATA[example]):
        progress = TrainProgress(step=step, steps_per_epoch=int(iterations), epochs=int(epochs))
        assert_close(TableCosine(warmup=warmup, floor=floor).at(peak, progress), rate, EXACT, f"rate {step}")


def test_a_head_with_batch_norms_equals_the_recorded_one():
    before, after = under(DATA, "bnhead_before/"), under(DATA, "bnhead_after/")
    hidden, width_in = before["mlp.0.weight"].shape
    count, bottleneck = before["last_layer.weight_v"].shape
    layers = sum(name.startswith("mlp.") and tensor.ndim == 2 for name, tensor in before.items())
    fixed = "last_layer.weight_g" not in under(DATA, "bnhead/gradnorm/")
    head = PrototypeHead([width_in, *[hidden] * (layers - 1), bottleneck], count, norm="bn", fixed=fixed).double()
    fill(head, before)
    inputs = DATA["bnhead/input"].requires_grad_()
    output = head(inputs)
    assert_close(output, DATA["bnhead/output_train"], FLOAT64, "output")
    (output * DATA["bnhead/cotangent"]).sum().backward()
    assert_close(inputs.grad, DATA["bnhead/input_grad"], FLOAT64, "gradient of the input")
    for name, norm in under(DATA, "bnhead/gradnorm/").items():
        assert_norm_close(head.get_parameter(name).grad, norm, FLOAT64, name, EXACT)
    for name, buffer in after.items():
        assert_close(head.get_buffer(name), buffer, FLOAT64, name)
    assert_close(head.eval()(DATA["bnhead/input"]), DATA["bnhead/output_eval_after"], FLOAT64, "output in eval mode")
