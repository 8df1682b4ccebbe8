"""Search against the sorted product of all pairs, votes against a loop of the formula; ties, blocks, GPUs, errors."""

import sys

import numpy as np
import pytest
import torch
from meeting import run_in_threads
from refusals import refusal

from engine import neighbours
from engine.neighbours import search, unit_rows
from probes.tasks import knn
from probes.tasks.knn import predict_classes, vote

BACKENDS = ("faiss", "torch")
torch_search = neighbours._torch


def points(count, width=16, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((count, width)))


def sorted_product(gallery, queries, k):
    similarities = queries.astype(np.float64) @ gallery.T.astype(np.float64)
    indices = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarities, indices, axis=1), indices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "queries_count", "k"), [(500, 90, 200), (300, 7, 1), (64, 33, 64)])
def test_search_is_exact(backend, count, queries_count, k):
    gallery, queries = points(count), points(queries_count, seed=1)
    _, similarities, indices = search(gallery, queries, k, backend)
    expected, expected_indices = sorted_product(gallery, queries, k)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(similarities, expected, atol=1e-6)
    assert similarities.dtype == np.float32 and indices.dtype == np.int64


def test_our_faiss_search_equals_its_flat_index():
    faiss = pytest.importorskip("faiss")
    gallery, queries = points(2000), points(100, seed=1)
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    similarities, indices = index.search(queries, 50)
    ours = search(gallery, queries, 50)[1:]
    np.testing.assert_array_equal(ours[0], similarities)
    np.testing.assert_array_equal(ours[1], indices)


@pytest.mark.parametrize(
    ("device", "k", "gpus"), [("cpu", 5, []), ("cuda", 5, [3]), ("cuda:1", 5, [1]), ("cuda", 7, [])]
)
def test_faiss_with_gpus_searches_on_the_gpu_of_this_process(device, k, gpus, monkeypatch):
    """Not on GPUs of other processes, nor with `--device cpu`, nor for a larger k than FAISS supports on a GPU."""
    faiss = pytest.importorskip("faiss")
    gallery, queries, used = points(100), points(9, seed=1), []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 4, raising=False)
    monkeypatch.setattr(neighbours, "gpu_memory", lambda: "memory")
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda memory, number, index: (used.append(number), index)[1], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(neighbours, "MAX_GPU_NEIGHBOURS", 6)
    monkeypatch.setattr(neighbours, "_torch", lambda gallery, k, device: torch_search(gallery, k, "cpu"))
    indices = search(gallery, queries, k, device=device).indices
    np.testing.assert_array_equal(indices, sorted_product(gallery, queries, k)[1])
    assert used == gpus


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_neighbours_are_in_the_order_of_the_gallery(backend):
    gallery = np.repeat(points(10), 4, axis=0)
    indices = search(gallery, gallery, 8, backend).indices
    for row in indices:
        assert list(row) == [*range(row[0], row[0] + 4), *range(row[4], row[4] + 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_merge_to_the_result_of_one_search(backend, monkeypatch):
    gallery, queries = points(503), points(41, seed=2)
    expected = search(gallery, queries, 60, backend)
    monkeypatch.setattr(neighbours, "TORCH_ROWS", 17)
    monkeypatch.setattr(neighbours, "TILE_ROWS", 37)  # fewer rows than k in every tile
    monkeypatch.setattr(neighbours, "TILE_QUERIES", 23)
    advanced = []
    monkeypatch.setattr(neighbours.Progress, "advance", lambda bar, count: advanced.append((bar.label, bar.total)))
    parts = search(gallery, queries, 60, backend, label="tiles")
    np.testing.assert_array_equal(parts.indices, expected.indices)
    np.testing.assert_allclose(parts.similarities, expected.similarities, atol=1e-6)
    assert advanced == [("tiles", 14 * 2)] * (14 * 2)


def test_faiss_in_blocks_has_the_bits_of_one_search(monkeypatch):
    """FAISS multiplies 1024 rows at once, so blocks of a multiple of them have the same products."""
    gallery, queries = points(5000, width=48), points(300, width=48, seed=1)
    expected = search(gallery, queries, 120)
    assert neighbours.TILE_ROWS % 1024 == 0
    monkeypatch.setattr(neighbours, "TILE_ROWS", 2048)
    parts = search(gallery, queries, 120)
    np.testing.assert_array_equal(parts.similarities, expected.similarities)
    np.testing.assert_array_equal(parts.indices, expected.indices)


@pytest.mark.parametrize("size", [2, 3, 5, 40])
def test_processes_share_the_tiles_and_agree_with_one(size, monkeypatch):
    monkeypatch.setattr(neighbours, "TILE_ROWS", 50)
    monkeypatch.setattr(neighbours, "TILE_QUERIES", 23)
    gallery, queries = np.repeat(points(130), 4, axis=0), points(100, seed=2)  # each row four times, for ties
    expected = search(gallery, queries, 61)
    parts = run_in_threads(size, lambda world: search(gallery, queries, 61, world=world))
    assert sorted(np.concatenate([part.places for part in parts])) == list(range(100))
    for part in parts:
        np.testing.assert_array_equal(part.similarities, expected.similarities[part.places])
        np.testing.assert_array_equal(part.indices, expected.indices[part.places])


def test_an_error_in_one_process_is_raised_in_all():
    gallery = np.ones((30, 4), np.float32)
    gallery[21, 1] = np.nan

    def work(world):
        with pytest.raises(ValueError, match="row 21 "):
            search(gallery, points(9, 4), 3, prepare=unit_rows, world=world)
        return True

    assert run_in_threads(2, work) == [True, True]


@pytest.mark.parametrize("k", [0, 11])
def test_k_must_fit_the_gallery(k):
    with pytest.raises(ValueError, match=f"k={k} neighbours from a gallery of 10 images"):
        search(points(10), points(2), k)


def test_without_faiss_the_error_names_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    message = refusal(search, points(10), points(2), 3)
    assert "ssl-vit-bench[cpu]" in message and "ssl-vit-bench[gpu]" in message
    assert search(points(10), points(2), 3, "torch").indices.shape == (2, 3)


def test_unit_rows_equal_torchs_normalize(monkeypatch):
    monkeypatch.setattr(neighbours, "NORMALISED_ROWS", 5)
    features = np.random.default_rng(3).standard_normal((23, 8)).astype(np.float32)
    features[4] = 0
    expected = torch.nn.functional.normalize(torch.from_numpy(features), dim=1)
    np.testing.assert_allclose(unit_rows(features), expected.numpy(), atol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_refused_with_their_row(value, monkeypatch):
    monkeypatch.setattr(neighbours, "NORMALISED_ROWS", 5)
    features = np.ones((20, 4), np.float32)
    features[13, 2] = value
    with pytest.raises(ValueError, match="row 13 "):
        unit_rows(features)


def class_weights(similarities, neighbour_labels, temperature):
    """The weight of each class among the neighbours of one query by the formula, largest first, summed by rank."""
    difference = similarities.astype(np.float64) - similarities[0]
    weights, totals = torch.from_numpy(difference / temperature).clamp(min=-700).exp().tolist(), {}
    for label, weight in zip(neighbour_labels.tolist(), weights, strict=True):
        totals[label] = totals.get(label, 0.0) + weight
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


@pytest.mark.parametrize("spread", ["uniform", "all equal", "few values", "wide"])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_votes_equal_the_formula(spread, classes, monkeypatch):
    """In blocks of seven queries; the product leaves out classes that cannot win."""
    monkeypatch.setattr(knn, "BLOCK", 7)
    random = np.random.default_rng(classes)
    drawn = -np.sort(-random.uniform(0, 1, (60, 50)), axis=1)
    values = {"uniform": drawn, "all equal": 0 * drawn, "few values": np.round(4 * drawn), "wide": 1000 * drawn}[spread]
    similarities, neighbour_labels = values.astype(np.float32), random.integers(0, classes, (60, 50))
    labels = np.where(random.random(60) < 0.5, neighbour_labels[:, 3], random.integers(0, classes, 60))
    for (k, temperature), hits in vote(similarities, neighbour_labels, labels, (50, 1, 7), (1e-3, 0.07, 1e12)).items():
        predicted, confidence = predict_classes(similarities[:, :k], neighbour_labels[:, :k], temperature)
        for query, label in enumerate(labels):
            weights = class_weights(similarities[query, :k], neighbour_labels[query, :k], temperature)
            order = list(weights)
            assert (hits.top1[query], hits.top5[query]) == (order[0] == label, label in order[:5])
            assert predicted[query] == order[0]
            assert confidence[query] == pytest.approx(weights[order[0]] / sum(weights.values()), rel=1e-6)


def test_equal_scores_rank_by_class_and_absent_classes_never_count():
    similarities = np.full((3, 2), 0.5, np.float32)
    neighbour_labels = np.array([[8, 3]] * 3)
    hits = vote(similarities, neighbour_labels, np.array([3, 8, 0]), (2,), (0.07,))[2, 0.07]
    assert hits.top1.tolist() == [True, False, False]
    assert hits.top5.tolist() == [True, True, False]
    predicted, confidence = predict_classes(similarities, neighbour_labels, 0.07)
    assert predicted.tolist() == [3, 3, 3] and confidence.tolist() == [0.5, 0.5, 0.5]
