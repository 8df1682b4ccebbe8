"""Log-likelihood beside accuracy: as scikit-learn computes it, and in the outcomes of probes."""

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


def test_the_likelihood_is_scikit_learns_and_skipped_images_do_not_count():
    logits, labels = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 7
    hits, indices = hits_of(logits, labels), np.arange(50) + (np.arange(50) > 20)
    metric = nll_metric(hits.nll, indices, 51)
    assert metric.value == pytest.approx(log_loss(labels, logits.double().softmax(dim=1)), rel=1e-6)
    assert np.flatnonzero(np.isnan(metric.per_image)).tolist() == [21]


def test_probes_report_it_and_a_training_of_an_earlier_version_does_not(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    linear = Linear(lrs=(0.1,), augment=False, epochs=2, batch=16).run(one_block_export(), space)
    task = Finetune(lr=1e-3, lr_rule="absolute", batch=16, epochs=2, warmup_epochs=1, mixed_together=16)
    tuned = task.run(one_block_export(), space)
    for outcome in (linear, tuned):  # of an image that is right, minus the logarithm of the confidence
        right = outcome.metrics["top1"].per_image == 1
        sure = outcome.arrays["confidence"].astype(np.float64)[right]
        assert outcome.metrics["nll"].per_image[right] == pytest.approx(-np.log(sure), abs=1e-3) and right.any()
    (training,) = (path for path in (tmp_path / "finetune").iterdir() if path.is_dir())
    state = load_state(newest_intact(training))
    tensors = {name: value for name, value in state.tensors.items() if not name.endswith("_nll")}
    save_state(training, 8, type(state)(tensors=tensors, facts=state.facts), kept=1)
    again = task.run(one_block_export(), space).numbers
    assert again == {name: value for name, value in tuned.numbers.items() if name != "nll"}
