"""Negative log-likelihood, compared with scikit-learn's, and in the outcomes of probes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
from toy_exports import one_block_export

from engine.tasks import Workspace
from engine.training.states import load_state, newest_intact, save_state
from probes.scores import hits_of, nll_metric
from probes.tasks.finetune import Finetune
from probes.tasks.linear import Linear


def test_likelihood_equals_scikit_learns_and_ignores_skipped_images():
    logits, labels = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 7
    hits, indices = hits_of(logits, labels), np.arange(50) + (np.arange(50) > 20)
    metric = nll_metric(hits.nll, indices, 51)
    assert metric.value == pytest.approx(log_loss(labels, logits.double().softmax(dim=1)), rel=1e-6)
    assert np.flatnonzero(np.isnan(metric.per_image)).tolist() == [21]


def test_probes_report_it_unless_the_training_is_of_an_earlier_version(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    linear = Linear(lrs=(0.1,), augment=False, epochs=2, batch=16).run(one_block_export(), space)
    task = Finetune(lr=1e-3, lr_rule="absolute", batch=16, epochs=2, warmup_epochs=1, mixed_together=16)
    finetuned = task.run(one_block_export(), space)
    for outcome in (linear, finetuned):  # for correct images it is minus the logarithm of the confidence
        correct = outcome.metrics["top1"].per_image == 1
        confidence = outcome.arrays["confidence"].astype(np.float64)[correct]
        assert outcome.metrics["nll"].per_image[correct] == pytest.approx(-np.log(confidence), abs=1e-3)
        assert correct.any()
    (training,) = (path for path in (tmp_path / "finetune").iterdir() if path.is_dir())
    state = load_state(newest_intact(training))
    tensors = {name: value for name, value in state.tensors.items() if not name.endswith("_nll")}
    save_state(training, 8, type(state)(tensors=tensors, facts=state.facts), kept=1)
    without_nll = task.run(one_block_export(), space).numbers
    assert without_nll == {name: value for name, value in finetuned.numbers.items() if name != "nll"}
