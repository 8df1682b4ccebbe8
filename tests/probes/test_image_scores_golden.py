"""Scores that need no training against recordings of the official codes, in float64: label-free health, retrieval on
revisited sets, copy detection, and ImageNet's shifted test sets."""

import numpy as np
import pytest
import torch
from recordings import ROOT, absent, facts, matches, tensors, under
from scipy.linalg import sqrtm
from scipy.stats import entropy
from torch.nn import functional as F

from probes import label_free, retrieved, shifted

EXACT = 1e-9  # tolerance of the recordings' READMEs
FITTED = 1e-6  # of reptrix, whose regression weights are float32


def recording(path):
    return (tensors(path), facts(path)) if (ROOT / path).exists() else absent(path)


def double(data, name):
    return data[name].double().numpy()


def test_rankme_of_stable_pretraining_and_of_the_paper():
    data, config = recording("label_free/label_free.safetensors")
    for case, options in config["cases"].items():
        features = double(data, f"case{case}.features")
        recorded = float(data[f"case{case}.rankme"])
        assert label_free.rankme(features, 1e-5) == pytest.approx(recorded, rel=EXACT)
        assert label_free.rankme(features) == pytest.approx(float(data[f"ours.case{case}.rankme_paper"]), rel=EXACT)
        ranks = options["alpha_first"], options["alpha_last"]
        alpha = label_free.alpha_req(features, ranks, weighted=False)
        assert alpha == pytest.approx(float(data[f"ours.case{case}.alpha"]), rel=EXACT)
        by_gram = np.exp(
            entropy(np.linalg.eigvalsh(features.T @ features).clip(0) ** 0.5)
        )  # entropy normalises its argument
        assert label_free.rankme(features, eps=0.0) == pytest.approx(by_gram, rel=1e-5)


def test_lidar_of_stable_pretraining():
    data, config = recording("label_free/label_free.safetensors")
    for name in [match[1] for match in matches(r"(lidar\d+)", config)]:
        options, features = config[name], double(data, f"{name}.features")
        size = options["samples_per_class"]
        groups = min(options["n_classes"], len(features) // size)
        views = features[: groups * size].reshape(groups, size, -1)
        value, eigenvalues = label_free.lidar(views, options["delta"], options["epsilon"])
        assert value == pytest.approx(float(data[f"{name}.lidar"]), rel=1e-9)
        assert eigenvalues[0] == pytest.approx(float(data[f"{name}.top_eigenvalue"]), rel=1e-8)


def test_outlying_norms_equal_the_recorded_ones():
    data, config = recording("label_free/label_free.safetensors")
    norms = np.linalg.norm(double(data, "norm.features"), axis=-1)
    outliers = label_free.norm_outliers(norms, config["norm"]["cutoff"])
    assert outliers == {name: pytest.approx(float(data[f"ours.norm.{name}"]), rel=EXACT) for name in outliers}
    assert len(outliers) == len(under(data, "ours.norm."))


def test_alpha_req_and_rankme_of_reptrix():
    data, config = recording("label_free/reptrix.safetensors")
    features = double(data, "features")
    for name, ranks in (("alpha", config["fit_ranks"]), ("alpha_other_range", config["other_ranks"])):
        assert label_free.alpha_req(features, tuple(ranks)) == pytest.approx(float(data[name]), rel=FITTED)
    assert label_free.rankme_of_variances(features) == pytest.approx(float(data["rankme"]), rel=FITTED)
    first, last = label_free.FIT_RANKS
    with pytest.raises(ValueError, match=f"eigenvalues {first} to {last}"):
        label_free.alpha_req(features[: last // 2])
    views, delta = (
        double(data, "lidar.features"),
        config["lidar_delta"],
    )  # its LiDAR has sums for means, and takes the matrix for samples
    centred = views.mean(axis=1) - views.mean(axis=(0, 1))
    spread = (views - views.mean(axis=1, keepdims=True)).reshape(-1, views.shape[2])
    root = np.linalg.inv(sqrtm(spread.T @ spread + delta * np.eye(views.shape[2])))
    ratio = label_free.rankme_of_variances(root @ centred.T @ centred @ root)
    assert ratio == pytest.approx(float(data["lidar"]), rel=FITTED)


def test_uniformity_and_alignment_equal_closed_forms():
    corners = np.concatenate([np.eye(4), -np.eye(4)])  # squared distances are 2, and 4 between opposite corners
    assert label_free.uniformity(3 * corners) == pytest.approx(np.log((24 * np.exp(-4) + 4 * np.exp(-8)) / 28))
    views = np.stack([np.eye(4), np.roll(np.eye(4), 1, axis=0), np.eye(4)], axis=1)
    assert label_free.alignment(views) == pytest.approx((2 + 2 + 0) / 3)
    assert label_free.dead_dimensions(np.column_stack([np.arange(5.0), np.ones(5)])) == 50
    assert label_free.dead_dimensions(np.ones((5, 3))) == 100


@pytest.mark.parametrize("level", retrieved.LEVELS)
def test_retrieval_scores_of_every_level(level):
    data, config = recording("retrieval/retrieval.safetensors")
    database, queries = (F.normalize(data[name].double(), dim=1) for name in ("db", "queries"))
    order = (-(database @ queries.T)).argsort(dim=0).numpy()
    assert (order == data["ranks"].numpy()).all()
    scores = retrieved.level_scores(order, config["gnd"], level, config["kappas"])
    recorded = under(data, f"{level}.")
    for ours, name in ((scores.average, "aps"), (scores.at, "prs")):
        defined = ~np.isnan(ours)
        np.testing.assert_allclose(ours[defined], recorded[name].numpy()[defined], rtol=0, atol=EXACT)
    assert (np.isnan(recorded["aps"].numpy()) == np.isnan(scores.average)).all()
    assert np.nanmean(scores.average) == pytest.approx(float(recorded["map"]), abs=EXACT)
    np.testing.assert_allclose(np.nanmean(scores.at, axis=0), recorded["mpr"].numpy(), rtol=0, atol=EXACT)


def test_copy_detection():
    data, config = recording("retrieval/copy.safetensors")
    tokens = data["tokens"].double()
    features = retrieved.copy_descriptor(tokens[:, 0], tokens[:, 1:])
    torch.testing.assert_close(features, data["features"].double(), rtol=0, atol=EXACT)
    ours = retrieved.whiten(features.numpy(), double(data, "whitening.features"))
    recorded = double(data, "whitened")
    limit = 1e-9 * np.abs(recorded).max() ** 2
    np.testing.assert_allclose(ours @ ours.T, recorded @ recorded.T, rtol=0, atol=limit)  # axes have no sign
    unit = label_free.normalised(ours)
    np.testing.assert_allclose(unit @ unit.T, double(data, "similarity"), rtol=0, atol=EXACT)
    for ranks, positives, recorded_ap in zip(config["ranks"], config["positives"], data["ap"].tolist(), strict=True):
        assert retrieved.average_precision(np.array(ranks, int), positives) == pytest.approx(recorded_ap, abs=EXACT)

    def encode(images):
        return images.mean(dim=(2, 3)) + images.amax(dim=(2, 3))

    images = data["multiscale.image"].double()
    features = retrieved.multiscale(encode, images, config["multiscale"])
    torch.testing.assert_close(features, data["multiscale.out"].double(), rtol=0, atol=EXACT)


def test_accuracy_on_imagenet_a_r_and_real():
    data, _ = recording("robustness/robustness.safetensors")
    sets = facts("robustness/facts.json")
    logits = data["logits"].numpy()
    ranked = logits.argsort(axis=1)[:, ::-1]
    for name in ("a", "r"):
        ranked_in_set = logits[:, sets[f"imagenet_{name}"]["indices_in_1000"]].argsort(axis=1)[:, ::-1]
        for k in (1, 5):
            right = shifted.any_match(ranked_in_set[:, :k], data[f"{name}.labels"].numpy()[:, None])
            assert right.mean() == pytest.approx(float(data[f"{name}.top{k}"]), abs=1e-6)
    for k in (1, 5):
        right = shifted.any_match(ranked[:, :k], data["real.labels"].numpy())
        assert np.nanmean(right) == pytest.approx(float(data[f"real.top{k}"]), abs=1e-6)
    assert np.nanmean(shifted.any_match(ranked[:, :1], data["real.labels"].numpy())) == pytest.approx(
        float(data["real.top1_capi"]), abs=1e-6
    )


def test_objectnet_guesses_without_a_counterpart_are_wrong():
    data, _ = recording("robustness/robustness.safetensors")
    mapping = facts("robustness/facts.json")["objectnet"]["mapping_imagenet_to_objectnet"]
    ranked = data["logits"].numpy().argsort(axis=1)[:, ::-1][:, :5]
    ours = shifted.map_classes(ranked, {int(key): value for key, value in mapping.items()})
    assert (ours == data["objectnet.mapped_top5"].numpy()).all()
    for k in (1, 5):
        right = shifted.any_match(ours[:, :k], data["objectnet.labels"].numpy()[:, None])
        assert right.mean() == pytest.approx(float(data[f"objectnet.top{k}"]), abs=1e-6)


def test_mean_corruption_errors_equal_the_recorded_ones():
    data, config = recording("robustness/robustness.safetensors")
    imagenet_c = facts("robustness/facts.json")["imagenet_c"]
    order = [name.lower() for name in config["order_of_corruptions"]]
    assert {name.lower(): tuple(values) for name, values in imagenet_c["alexnet_top1_error"].items()} == shifted.ALEXNET
    assert tuple(name.lower() for name in imagenet_c["corruptions_15"]) == shifted.BENCHMARK
    errors = dict(zip(order, (1 - data["c.accuracy"].double()).tolist(), strict=True))
    assert shifted.mce({name: errors[name] for name in shifted.BENCHMARK}) == pytest.approx(
        float(data["c.mce_15"]), abs=1e-6
    )
    assert shifted.mce(errors) == pytest.approx(float(data["c.mce_19"]), abs=1e-6)
    right = (data["c.stream.logits"].argmax(dim=1) == data["c.stream.target"][:, 0]).double().numpy()
    corruption, level = data["c.stream.target"][:, 1].numpy(), data["c.stream.target"][:, 2].numpy()
    streamed = {
        name: [1 - right[(corruption == number) & (level == severity)].mean() for severity in np.unique(level)]
        for number, name in enumerate(order)
    }
    assert shifted.mce(streamed) == pytest.approx(float(data["c.stream.mce"]), abs=1e-5)
