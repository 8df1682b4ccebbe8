"""Both solvers against recorded optima and predictions of cyanure 0.22 and 1.2.2 and of a float64 solver."""

from functools import cache

import numpy as np
import pytest
import torch
from recordings import facts, matches, tensors

from probes.lowshot import cyanure_solver, logistic
from probes.lowshot.blocks import prepare_rows
from probes.lowshot.fitting import predictions

DATA = {name: tensor.numpy() for name, tensor in tensors("lowshot/data.safetensors").items()}
RECORDED = facts("lowshot/results.json")
CASES = RECORDED["cases"]
((AGGREGATE,),) = (match.groups() for match in matches(r"(aggregate_over_\d+_splits)", RECORDED))
PREPROCESS = {"msn": "centre_and_normalise", "moca": "centre_and_normalise", "ibot": "normalise"}
GAP, AGREEMENT = 1e-3, 0.99  # tolerances of the recording's README
IMAGES = len(DATA["test_labels"])
STRAY = max(1, IMAGES // 200)  # by which the number of correct images may differ: its 0.5 points, 2 of 400
SOLVERS = ("lbfgs", "cyanure")


@cache
def fit_of(name, solver):
    case = CASES[name]
    rows = DATA[f"{name}/indices"]
    features = torch.from_numpy(prepare_rows(DATA["pool_features"][rows], PREPROCESS[case["mode"]])[0])
    labels = torch.from_numpy(DATA["pool_labels"][rows])
    problem = (features, labels, RECORDED["n_classes"], case["lambda_effective"])
    if solver == "cyanure":
        return cyanure_solver.fit_cyanure(*problem, algorithm=case["solver"])
    return logistic.fit_lbfgs(*problem)


def predictions_of(name, solver):
    queries, _ = prepare_rows(DATA["test_features"], PREPROCESS[CASES[name]["mode"]])
    return predictions(torch.from_numpy(queries), fit_of(name, solver).weights)


def count_correct(name, solver):
    return np.count_nonzero(predictions_of(name, solver) == DATA["test_labels"])


def test_preprocessing_equals_cyanures():
    ours, shapeless = prepare_rows(DATA["test_features"], "centre_and_normalise")
    np.testing.assert_allclose(ours, DATA["test_features_preprocessed"], rtol=0, atol=2e-7)
    assert shapeless == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_optimum_is_reached(solver):
    for name in CASES:
        optimum = CASES[name]["optimum_f64"]
        assert fit_of(name, solver).objective == pytest.approx(optimum["objective"], rel=GAP)
        agreeing = np.count_nonzero(predictions_of(name, solver) == DATA[f"{name}/pred_opt"])
        assert agreeing >= AGREEMENT * IMAGES
        assert abs(count_correct(name, solver) - round(optimum["test_acc"] * IMAGES)) <= STRAY


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_certified_gap_is_an_upper_bound(solver):
    """No solver is further from the recorded optimum than its gap; 1e-7 is for features rounded to float32."""
    for name in CASES:
        fit = fit_of(name, solver)
        distance = fit.objective / CASES[name]["optimum_f64"]["objective"] - 1
        assert -1e-7 < distance <= fit.gap + 1e-7
        assert fit.gap <= {"lbfgs": 1e-6, "cyanure": 1e-3}[solver]


def test_our_solver_is_closer_to_the_optimum_than_the_papers():
    for name in CASES:
        recorded = CASES[name]["rel_gap_to_optimum"]
        distance = fit_of(name, "lbfgs").objective / CASES[name]["optimum_f64"]["objective"] - 1
        assert distance <= max(recorded["old"], 1e-6)


def splits_of(shots):
    """The cases of one aggregate: those that differ only in the split and have the recorded accuracies."""
    groups, recorded = {}, RECORDED[AGGREGATE][f"{shots}-shot/optimum_f64"]["values"]
    for match in matches(rf"(.+_shots{shots})_split\d+", sorted(CASES)):
        groups.setdefault(match[1], []).append(match[0])
    for cases in groups.values():
        if [100 * CASES[name]["optimum_f64"]["test_acc"] for name in cases] == pytest.approx(recorded):
            return cases
    raise AssertionError(f"no cases of {shots} shots have the recorded accuracies")


@pytest.mark.parametrize("shots", sorted({name.partition("-")[0] for name in RECORDED[AGGREGATE]}))
@pytest.mark.parametrize("solver", SOLVERS)
def test_mean_and_deviation_over_splits(shots, solver):
    recorded, points = RECORDED[AGGREGATE][f"{shots}-shot/optimum_f64"], 100 * STRAY / IMAGES
    values = [100 * count_correct(name, solver) / IMAGES for name in splits_of(shots)]
    assert values == pytest.approx(recorded["values"], abs=points + 1e-9)
    assert np.mean(values) == pytest.approx(recorded["mean"], abs=points + 1e-9)
    assert np.std(values) == pytest.approx(recorded["std_population_ddof0"], abs=points + 1e-9)
