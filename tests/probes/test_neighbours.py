"""Search against the whole product sorted; votes against a loop that reads like the formula; ties, blocks, errors."""

import sys

import numpy as np
import pytest
import torch
from meeting import together

from engine import neighbours
from engine.distributed import World
from engine.neighbours import search, tiles_of, unit_rows
from probes.tasks import knn
from probes.tasks.knn import predict_classes, vote

BACKENDS = ("faiss", "torch")
by_torch = neighbours._torch


def points(count, width=16, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((count, width)))


def sorted_product(gallery, queries, k):
    similarities = queries.astype(np.float64) @ gallery.T.astype(np.float64)
    indices = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarities, indices, axis=1), indices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "queries", "k"), [(500, 90, 200), (300, 7, 1), (64, 33, 64)])
def test_search_is_exact(backend, count, queries, k):
    gallery, asked = points(count), points(queries, seed=1)
    _, similarities, indices = search(gallery, asked, k, backend)
    expected, places = sorted_product(gallery, asked, k)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_allclose(similarities, expected, atol=1e-6)
    assert similarities.dtype == np.float32 and indices.dtype == np.int64


def test_our_faiss_search_is_that_of_its_flat_index():
    faiss = pytest.importorskip("faiss")
    gallery, asked = points(2000), points(100, seed=1)
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    similarities, indices = index.search(asked, 50)
    ours = search(gallery, asked, 50)[1:]
    np.testing.assert_array_equal(ours[0], similarities)
    np.testing.assert_array_equal(ours[1], indices)


@pytest.mark.parametrize(
    ("device", "k", "places"), [("cpu", 5, []), ("cuda", 5, [3]), ("cuda:1", 5, [1]), ("cuda", 7, [])]
)
def test_a_faiss_with_gpus_searches_on_that_of_this_process(device, k, places, monkeypatch):
    """Not on all, which other processes use; not at all with `--device cpu`, nor for more than it finds there."""
    faiss = pytest.importorskip("faiss")
    gallery, asked, used = points(100), points(9, seed=1), []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 4, raising=False)
    monkeypatch.setattr(neighbours, "gpu_memory", lambda: "memory")
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda memory, number, index: (used.append(number), index)[1], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(neighbours, "MAX_GPU_NEIGHBOURS", 6)
    monkeypatch.setattr(neighbours, "_torch", lambda gallery, k, device: by_torch(gallery, k, "cpu"))
    found = search(gallery, asked, k, device=device)
    np.testing.assert_array_equal(found.indices, sorted_product(gallery, asked, k)[1])
    assert used == places


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_neighbours_come_in_the_order_of_the_gallery(backend):
    gallery = np.repeat(points(10), 4, axis=0)
    indices = search(gallery, gallery, 8, backend).indices
    for row in indices:
        assert list(row) == [*range(row[0], row[0] + 4), *range(row[4], row[4] + 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_merge_to_the_whole(backend, monkeypatch):
    gallery, asked = points(503), points(41, seed=2)
    whole = search(gallery, asked, 60, backend)
    monkeypatch.setattr(neighbours, "TORCH_ROWS", 17)
    monkeypatch.setattr(neighbours, "TILE_ROWS", 37)  # fewer rows than k in every tile
    monkeypatch.setattr(neighbours, "TILE_QUERIES", 23)
    shown = []
    monkeypatch.setattr(neighbours.Progress, "advance", lambda bar, count: shown.append((bar.label, bar.total)))
    parts = search(gallery, asked, 60, backend, label="tiles")
    np.testing.assert_array_equal(parts.indices, whole.indices)
    np.testing.assert_allclose(parts.similarities, whole.similarities, atol=1e-6)
    assert shown == [("tiles", 14 * 2)] * (14 * 2)


def test_faiss_in_blocks_of_its_own_size_has_the_bits_of_one_search(monkeypatch):
    """FAISS multiplies 1024 rows at once, so its products do not change where a block ends after a multiple of them."""
    gallery, asked = points(5000, width=48), points(300, width=48, seed=1)
    whole = search(gallery, asked, 120)
    monkeypatch.setattr(neighbours, "TILE_ROWS", 2048)
    parts = search(gallery, asked, 120)
    np.testing.assert_array_equal(parts.similarities, whole.similarities)
    np.testing.assert_array_equal(parts.indices, whole.indices)
    assert 1 << 18 == 256 * 1024  # the real block


@pytest.mark.parametrize("size", [2, 3, 5, 40])
def test_processes_share_the_tiles_and_find_what_one_finds(size, monkeypatch):
    monkeypatch.setattr(neighbours, "TILE_ROWS", 50)
    monkeypatch.setattr(neighbours, "TILE_QUERIES", 23)
    gallery, asked = np.repeat(points(130), 4, axis=0), points(100, seed=2)  # each row four times: ties everywhere
    whole = search(gallery, asked, 61)
    parts = together(size, lambda world: search(gallery, asked, 61, world=world))
    assert sorted(np.concatenate([part.places for part in parts])) == list(range(100))
    for part in parts:
        np.testing.assert_array_equal(part.similarities, whole.similarities[part.places])
        np.testing.assert_array_equal(part.indices, whole.indices[part.places])


@pytest.mark.parametrize(("gallery", "queries", "size"), [(1_281_167, 50_000, 8), (1000, 100, 3), (600_000, 9000, 2)])
def test_every_tile_has_one_process_and_all_have_as_many(gallery, queries, size):
    shares = [tiles_of(gallery, queries, World(rank=rank, size=size)) for rank in range(size)]
    tiles = [(rows.start, number) for share in shares for rows, numbers in share for number in numbers]
    blocks, across = -(-gallery // (1 << 18)), -(-queries // 2048)
    assert tiles == [(block << 18, number) for block in range(blocks) for number in range(across)]
    counts = [sum(len(numbers) for _, numbers in share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(rows.stop <= gallery for share in shares for rows, _ in share)


def test_an_error_in_one_process_is_raised_in_all():
    gallery = np.ones((30, 4), np.float32)
    gallery[21, 1] = np.nan

    def work(world):
        with pytest.raises(ValueError, match="row 21 "):
            search(gallery, points(9, 4), 3, prepare=unit_rows, world=world)
        return True

    assert together(2, work) == [True, True]


@pytest.mark.parametrize("k", [0, 11])
def test_k_must_fit_the_gallery(k):
    with pytest.raises(ValueError, match=f"k={k} neighbours from a gallery of 10 images"):
        search(points(10), points(2), k)


def test_without_faiss_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError) as caught:
        search(points(10), points(2), 3)
    text = str(caught.value)
    assert "ssl-vit-bench[cpu]" in text and "ssl-vit-bench[gpu]" in text and "\n" not in text
    assert search(points(10), points(2), 3, "torch").indices.shape == (2, 3)


def test_normalised_is_torchs_normalize(monkeypatch):
    monkeypatch.setattr(neighbours, "NORMALISED_ROWS", 5)
    features = np.random.default_rng(3).standard_normal((23, 8)).astype(np.float32)
    features[4] = 0
    expected = torch.nn.functional.normalize(torch.from_numpy(features), dim=1)
    np.testing.assert_allclose(unit_rows(features), expected.numpy(), atol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_features_are_refused_with_their_row(value, monkeypatch):
    monkeypatch.setattr(neighbours, "NORMALISED_ROWS", 5)
    features = np.ones((20, 4), np.float32)
    features[13, 2] = value
    with pytest.raises(ValueError, match="row 13 "):
        unit_rows(features)


def ranked(similarities, near, temperature):
    """The formula: class -> its weight among the neighbours of one query, largest first; each is summed by rank."""
    lead = similarities.astype(np.float64) - similarities[0]
    weights, found = torch.from_numpy(lead / temperature).clamp(min=-700).exp().tolist(), {}
    for name, weight in zip(near.tolist(), weights, strict=True):
        found[name] = found.get(name, 0.0) + weight
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@pytest.mark.parametrize("spread", ["uniform", "all equal", "few values", "wide"])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_votes_are_the_formula(spread, classes, monkeypatch):
    """In blocks of seven queries, and though classes that cannot win are left out."""
    monkeypatch.setattr(knn, "BLOCK", 7)
    random = np.random.default_rng(classes)
    drawn = -np.sort(-random.uniform(0, 1, (60, 50)), axis=1)
    values = {"uniform": drawn, "all equal": 0 * drawn, "few values": np.round(4 * drawn), "wide": 1000 * drawn}[spread]
    similarities, near = values.astype(np.float32), random.integers(0, classes, (60, 50))
    labels = np.where(random.random(60) < 0.5, near[:, 3], random.integers(0, classes, 60))
    for (k, temperature), hits in vote(similarities, near, labels, (50, 1, 7), (1e-3, 0.07, 1e12)).items():
        predicted, confidence = predict_classes(similarities[:, :k], near[:, :k], temperature)
        for query, label in enumerate(labels):
            weights = ranked(similarities[query, :k], near[query, :k], temperature)
            order = list(weights)
            assert (hits.top1[query], hits.top5[query]) == (order[0] == label, label in order[:5])
            assert predicted[query] == order[0]
            assert confidence[query] == pytest.approx(weights[order[0]] / sum(weights.values()), rel=1e-6)


def test_equal_scores_rank_by_class_and_absent_classes_never_count():
    similarities = np.full((3, 2), 0.5, np.float32)
    near = np.array([[8, 3]] * 3)
    hits = vote(similarities, near, np.array([3, 8, 0]), (2,), (0.07,))[2, 0.07]
    assert hits.top1.tolist() == [True, False, False]
    assert hits.top5.tolist() == [True, True, False]
    predicted, confidence = predict_classes(similarities, near, 0.07)
    assert predicted.tolist() == [3, 3, 3] and confidence.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_neither_overflow_nor_vanish(temperature):
    similarities = np.array([[1.0, 0.9, 0.8, -1.0]], np.float32)
    hits = vote(similarities, np.array([[0, 1, 1, 2]]), np.array([0]), (1, 4), (temperature,))
    assert hits[1, temperature].top1.all()
    assert hits[4, temperature].top1.all() == (temperature < 1)
    assert vote(similarities, np.array([[0, 1, 1, 2]]), np.array([2]), (4,), (temperature,))[4, temperature].top5.all()
