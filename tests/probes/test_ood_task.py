"""Out-of-distribution detection: images of other sets differ from validation images in their neighbours."""

import numpy as np
import pytest
from sklearn.metrics import roc_curve
from toy_exports import varied_export

from engine.tasks import Workspace
from probes.tasks.ood import Ood, detection_rates


def test_rates_equal_those_of_the_roc_curve():
    random = np.random.RandomState(0)
    known, foreign = random.normal(1, 1, 400), random.normal(0, 1, 300)
    auroc, fpr = detection_rates(known, foreign)
    false, true, _ = roc_curve(np.r_[np.ones(400), np.zeros(300)], np.r_[known, foreign], drop_intermediate=False)
    assert fpr == pytest.approx(100 * false[np.argmax(true >= 0.95)])
    pairs = (known[:, None] > foreign).mean()  # second opinion: the fraction of pairs in the right order
    assert auroc == pytest.approx(100 * pairs)
    assert detection_rates(known, known) == (pytest.approx(50), pytest.approx(95))


def test_digits_are_detected_among_shapes_and_several_sets_are_averaged(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    single = Ood(k=5, sets=("digits:",)).run(varied_export(), space)
    assert single.numbers["auroc"] > 80 and single.numbers["fpr95"] < 80
    double = Ood(k=5, sets=("digits:", "noisydigits:")).run(varied_export(), space)
    values = [double.numbers[f"auroc_set{number}"] for number in (1, 2)]
    assert values[0] == single.numbers["auroc"] and double.numbers["auroc"] == pytest.approx(np.mean(values))


def test_the_evaluated_set_itself_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tiny:: .* settings=.*ood.sets"):
        Ood(sets=("tiny:",)).run(varied_export(), Workspace(cache=tmp_path, data="tiny:"))
