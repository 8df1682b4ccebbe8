"""Segmentation by neighbours against recordings of Hummingbird's and CAPI's codes: tests/golden/dense_knn."""

import numpy as np
import pytest
import torch
from recordings import ROOT, facts, tensors
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import jaccard_score

from downstream.frozen.capi import fit_logistic, mean_and_std
from downstream.frozen.patches import most_frequent, patchify_labels, unpatchify_labels
from downstream.frozen.task import class_areas
from downstream.tasks import dense_knn as official

FOLDER = "dense_knn"
HUMMINGBIRD = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("hummingbird*.safetensors"))
CAPI = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("capi*.safetensors"))


@pytest.mark.parametrize("path", HUMMINGBIRD)
def test_memory_and_labels_of_hummingbird(path):
    recorded, config = tensors(path), facts(path)
    classes, patch, grid, ignored = (config[name] for name in ("classes", "patch", "grid", "ignore_index"))
    features = recorded["in.train.features"].numpy()
    labels = np.where(recorded["in.train.labels"] == ignored, 0, recorded["in.train.labels"])[:, 0]
    labels = np.tile(labels, (len(features) // len(labels), 1, 1))
    pixels = np.stack([patchify_labels(image, patch) for image in labels])
    patch_indices = [np.arange(grid * grid)] * len(pixels)
    if config["memory_size"] is not None:
        count = config["memory_size"] // len(pixels)
        uniform = recorded["sample.uniform"].numpy()
        patch_indices = [
            official.rare_patches(labels, draws, classes, count) for labels, draws in zip(pixels, uniform, strict=True)
        ]
        assert np.array_equal(patch_indices, recorded["sample.indices"])
    bank = np.concatenate([rows[indices] for rows, indices in zip(features, patch_indices, strict=True)])
    bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    bank_pixels = np.concatenate([rows[indices] for rows, indices in zip(pixels, patch_indices, strict=True)])
    assert np.allclose(bank, recorded["memory.features"], rtol=0, atol=1e-5)
    assert np.allclose(official.class_shares(bank_pixels, classes), recorded["memory.labels"], rtol=0, atol=1e-5)

    val_features = recorded["in.val.features"].numpy()
    queries = val_features.reshape(-1, val_features.shape[2])
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    nearest = np.argsort(-(unit @ bank.T), axis=1)[:, : config["neighbours"]]
    assert np.array_equal(np.sort(nearest), np.sort(recorded["search.indices"]))
    cosines = np.take_along_axis(unit @ bank.T, nearest, axis=1)
    shares = official.attend_labels(cosines, bank_pixels[nearest], classes, config["beta"])
    assert np.allclose(shares.reshape(recorded["label_hat"].shape), recorded["label_hat"], rtol=0, atol=1e-5)

    truth = recorded["in.val.labels"][:, 0].numpy()
    grids = torch.from_numpy(shares).view(len(truth), grid, grid, classes)
    predicted = np.stack([official.upsample_labels(grid_shares, truth.shape[1:]) for grid_shares in grids])
    counts = official.confusion_matrix(predicted, truth, classes, [ignored])
    mapping = official.match_classes(counts)
    assert np.array_equal(counts, recorded["confusion"]) and np.array_equal(mapping, recorded["mapping"])
    matched = mapping[predicted]
    assert np.array_equal(matched[truth != ignored], recorded["prediction"])
    intersection, predicted_area, label_area = class_areas(matched, truth, classes, [ignored]).T
    assert np.array_equal(
        [intersection, predicted_area - intersection, label_area - intersection], recorded["tp_fp_fn"]
    )
    iou = intersection / np.maximum(predicted_area + label_area - intersection, 1)
    assert iou.mean() == pytest.approx(config["miou"], abs=1e-6)
    labelled = truth != ignored
    sklearn_miou = jaccard_score(
        truth[labelled], matched[labelled], labels=np.arange(classes), average="macro", zero_division=0
    )
    assert sklearn_miou == pytest.approx(config["miou"], abs=1e-6)


def scores_of(predicted: np.ndarray, labels: np.ndarray, ignored: list[int]) -> tuple[float, float]:
    """CAPI's mIoU and accuracy, from areas of the values 0 to 255."""
    intersection, predicted_area, label_area = class_areas(predicted, labels, 256, ignored).T
    occurs = predicted_area + label_area > 0
    iou = intersection[occurs] / (predicted_area + label_area - intersection)[occurs]
    return iou.mean(), intersection.sum() / label_area.sum()


def load_patches(path: str) -> tuple[np.ndarray, ...]:
    """Training features (N, D), label pixels, mask (N,) of held-out patches; test features and label pixels."""
    recorded, config = tensors(path), facts(path)
    train, test = (recorded[f"in.{split}.features"].numpy() for split in ("train", "test"))
    pixels, test_pixels = (recorded[f"in.{split}.labels"].numpy() for split in ("train", "test"))
    order, patch_count = recorded["permutation"].numpy(), train.shape[1] * train.shape[2]
    held_out = np.repeat(np.isin(np.arange(len(train)), order[: len(train) // 10]), patch_count)
    return train.reshape(-1, config["dim"]), pixels.reshape(-1, pixels.shape[-1]), held_out, test, test_pixels


def vote(bank: np.ndarray, pixels: np.ndarray, queries: np.ndarray, k: int, distance: str) -> np.ndarray:
    distances = np.square(queries[:, None].astype(np.float64) - bank).sum(-1)
    if distance == "cosine":
        unit, unit_bank = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, bank))
        distances = -(unit.astype(np.float64) @ unit_bank.T)
    return most_frequent(pixels[np.argsort(distances, axis=1, kind="stable")[:, :k]], axis=1)


@pytest.mark.parametrize("path", CAPI)
def test_knn_votes_of_capi(path):
    recorded, config = tensors(path), facts(path)
    train, pixels, held_out, test, test_pixels = load_patches(path)
    ignored, results = config["ignore_labels"], config["results"]
    kept = ~np.isin(most_frequent(pixels, axis=1), ignored)
    mean, spread = mean_and_std(train, np.flatnonzero(~held_out))
    scaled = ((train - mean) / spread).astype(np.float32)
    mious = {}
    for k in config["num_neighbors"]:
        for distance in config["distance"]:
            predicted = vote(scaled[~held_out & kept], pixels[~held_out & kept], scaled[held_out], k, distance)
            mious[k, distance] = scores_of(predicted, pixels[held_out], ignored)[0]
            name = f"hparam_fitting.knn.mIoU_num_neighbors={k}_distance={distance}"
            assert mious[k, distance] == pytest.approx(results[name], abs=1e-6), name
    k, distance = max(mious, key=mious.__getitem__)
    selected = config["selected"]["knn"]
    assert (k, distance) == (selected["num_neighbors"], selected["distance"])
    queries = (test.reshape(-1, config["dim"]) - mean) / spread
    predicted = vote(scaled[kept], pixels[kept], queries.astype(np.float32), k, distance)
    assert np.array_equal(predicted, recorded["prediction.knn"])
    miou, accuracy = scores_of(predicted, test_pixels.reshape(predicted.shape), ignored)
    assert miou == pytest.approx(results["labels_knn_mIoU"], abs=1e-6)
    assert accuracy == pytest.approx(results["labels_knn_acc"], abs=1e-6)


@pytest.mark.parametrize("path", CAPI)
def test_logistic_regressions_of_capi(path):
    """Also against scikit-learn's solver at the selected strength."""
    recorded, config = tensors(path), facts(path)
    train, pixels, held_out, test, test_pixels = load_patches(path)
    ignored, results = config["ignore_labels"], config["results"]
    labels = most_frequent(pixels, axis=1)
    kept = ~np.isin(labels, ignored)
    mean, spread = mean_and_std(train, np.flatnonzero(~held_out))
    scaled = ((train - mean) / spread).astype(np.float32)

    def fit(rows: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, class_indices = np.unique(labels[rows], return_inverse=True)
        features = torch.from_numpy(scaled[rows])
        return values, *fit_logistic(features, torch.from_numpy(class_indices), len(values), strength)

    mious = {}
    for name in (name for name in results if "logreg.mIoU_C=" in name):
        strength = float(name.partition("C=")[2].partition("_")[0])
        values, weights, biases = fit(~held_out & kept, strength)
        predicted = values[(scaled[held_out] @ weights.T + biases).argmax(1)]
        pixel_predictions = np.repeat(predicted[:, None], pixels.shape[1], axis=1)
        mious[strength] = scores_of(pixel_predictions, pixels[held_out], ignored)[0]
        assert mious[strength] == pytest.approx(results[name], abs=1e-6), name
    strength = max(mious, key=mious.__getitem__)
    assert strength == config["selected"]["logreg"]["C"]
    values, weights, biases = fit(kept, strength)
    assert np.array_equal(values, recorded["logreg.classes"])
    assert np.allclose(weights, recorded["logreg.coef"], rtol=0, atol=1e-4)
    assert np.allclose(biases, recorded["logreg.intercept"], rtol=0, atol=1e-4)
    queries = ((test.reshape(-1, config["dim"]) - mean) / spread).astype(np.float32)
    predicted = np.repeat(values[(queries @ weights.T + biases).argmax(1)][:, None], pixels.shape[1], axis=1)
    assert np.array_equal(predicted, recorded["prediction.logreg"])
    miou, accuracy = scores_of(predicted, test_pixels.reshape(predicted.shape), ignored)
    assert miou == pytest.approx(results["labels_logreg_mIoU"], abs=1e-6)
    assert accuracy == pytest.approx(results["labels_logreg_acc"], abs=1e-6)
    sklearn_fit = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(
        scaled[kept].astype(np.float64), labels[kept]
    )
    assert np.allclose(weights, sklearn_fit.coef_, rtol=0, atol=1e-4)


def test_most_frequent_takes_the_smallest_of_tied_labels():
    """As np.bincount does; torch.mode does not promise it."""
    labels = np.random.RandomState(0).randint(0, 4, (500, 12)).astype(np.uint8)
    expected = [np.bincount(row).argmax() for row in labels]
    assert np.array_equal(most_frequent(labels, axis=1), expected)


def test_patchified_labels_are_restored():
    labels = np.arange(6 * 10).reshape(6, 10)
    pixels = patchify_labels(labels, 2)
    assert pixels.shape == (15, 4) and pixels[0].tolist() == [0, 1, 10, 11]
    assert np.array_equal(unpatchify_labels(pixels, (3, 5)), labels)
