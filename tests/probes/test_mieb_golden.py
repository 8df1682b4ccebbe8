"""MIEB's few-shot classification against recordings of mteb: drawn images, fits, predictions, scores."""

import numpy as np
import pytest
import torch
from recordings import facts, tensors

from probes.lowshot.mieb import SEED, TOLERANCE, draw, fit_sklearn

CASES = facts("mieb/config.json")["cases"]
OPTIONS = facts("mieb/config.json")["classifier"]
EXPRESSED = {"C": 1.0, "class_weight": None, "fit_intercept": True, "solver": "lbfgs", "tol": TOLERANCE}
RUNS = [(name, version) for name, case in CASES.items() for version in case["versions"]]
SAME_SOLVER = 1e-8, 1e-3  # of decisions relative to the largest, and where the solver stopped early: their README


@pytest.fixture(scope="module", autouse=True)
def classifier():
    for option, value in EXPRESSED.items():
        if OPTIONS[option] != value:
            pytest.skip(f"the classifier's {option}={OPTIONS[option]} is not an option here")


def generators(name, version):
    """The generator of each experiment: that of the task's seed, which version 1 follows by its own 42."""
    case = CASES[name]
    first = np.random.RandomState(case["seed"])
    first.random_sample(case.get("consume", 0))
    later = SEED if version == "v1" else case["seed"]
    return [first, *(np.random.RandomState(later) for _ in range(case["n_experiments"] - 1))]


@pytest.mark.parametrize(("name", "version"), RUNS)
def test_the_drawn_images_are_equal(name, version):
    recorded, case = tensors(f"mieb/{name}.safetensors"), CASES[name]
    drawn = draw(recorded["train.labels"].numpy(), case["samples_per_label"], generators(name, version))
    np.testing.assert_array_equal(drawn, recorded[f"{version}.selected"].numpy())


@pytest.mark.parametrize(("name", "version"), RUNS)
def test_fits_and_scores_are_equal(name, version):
    """Of every experiment: weights, and the predictions and accuracies that follow from them."""
    recorded = tensors(f"mieb/{name}.safetensors")
    classes = recorded[f"{version}.classes"].numpy()
    number = {label: index for index, label in enumerate(classes)}
    features, queries = (with_ones(recorded[f"{part}.features"]) for part in ("train", "test"))
    labels = np.array([number[label] for label in recorded["train.labels"].numpy() if label in number])
    accuracies = []
    for experiment, rows in enumerate(recorded[f"{version}.selected"].long()):
        penalty = 1 / len(rows)
        fit = fit_sklearn(
            features[rows],
            torch.from_numpy(labels[rows]),
            len(classes),
            penalty,
            max_iterations=OPTIONS["max_iter"],
            intercept=True,
        )
        decisions = (queries.double() @ fit.weights).numpy()
        expected = recorded[f"{version}.decision"][experiment].numpy()
        ours = decisions[:, 1] - decisions[:, 0] if len(classes) == 2 else decisions
        stopped = int(recorded[f"{version}.n_iter"][experiment]) >= OPTIONS["max_iter"]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=SAME_SOLVER[stopped] * np.abs(expected).max())
        predicted = classes[decisions.argmax(axis=1)]
        np.testing.assert_array_equal(predicted, recorded[f"{version}.predictions"][experiment].numpy())
        accuracies.append((predicted == recorded["test.labels"].numpy()).mean())
    np.testing.assert_allclose(accuracies, recorded[f"{version}.accuracy"].numpy(), rtol=0, atol=1e-12)
    assert np.mean(accuracies) == pytest.approx(float(recorded[f"{version}.main_score"]), abs=1e-12)


def with_ones(features):
    return torch.nn.functional.pad(features, (0, 1), value=1.0)
