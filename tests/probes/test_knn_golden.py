"""k-NN through FAISS and through torch against recorded accuracies of the official DINO, DINOv2 and MOCA codes."""

from functools import cache

import numpy as np
import pytest
from recordings import facts, tensors

from engine.neighbours import search, unit_rows
from probes.tasks.knn import vote

DATA = {name: tensor.numpy() for name, tensor in tensors("knn/data.safetensors").items()}
RECORDED = facts("knn/results.json")
BACKENDS = ("faiss", "torch")
# Official codes with one gallery of L2-normalised features; DINOv2's also has parts of it.
WITH_FULL_GALLERY = [name for name in RECORDED if name.startswith("dino_") or name in ("dino", "moca_cosine")]


@cache
def votes(backend: str, rows: str = ""):
    """Hits of every recorded k and T, and neighbours' labels, from one search in the gallery or in the named rows."""
    chosen = DATA[rows] if rows else np.arange(len(DATA["train_labels"]))
    entries = [entry for name in (*WITH_FULL_GALLERY, "dinov2") for entry in RECORDED[name]]
    ks = sorted({entry["k"] for entry in entries if entry["k"] <= len(chosen)})
    temperatures = sorted({entry["T"] for entry in entries})
    gallery, queries = unit_rows(DATA["train_features"][chosen]), unit_rows(DATA["test_features"])
    _, similarities, indices = search(gallery, queries, max(ks), backend)
    labels = DATA["train_labels"][chosen]
    return vote(similarities, labels[indices], DATA["test_labels"], ks, temperatures), labels[indices]


def percent(hits):
    return 100 * np.count_nonzero(hits) / len(hits)


def rows_of(entry):
    """The name of the tensor with the rows of a partial gallery; empty for the full one."""
    part = entry.get("n_per_class", "full")  # or "5 per class"
    return "" if part == "full" else f"dinov2_{part.replace(' ', '')}_try{entry['try']}_indices"


def title(entry):
    return "-".join(f"{key}{entry[key]}" for key in ("k", "T", "n_per_class", "try") if key in entry)


def well_defined(labels, k):
    """Whether every query has five classes among its k neighbours: else the sort order decides the top five."""
    return all(len(set(row[:k])) >= 5 for row in labels)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", WITH_FULL_GALLERY)
def test_accuracies_of_every_k_and_temperature(backend, source):
    assert RECORDED[source]
    hits, labels = votes(backend)
    for entry in RECORDED[source]:
        ours = hits[entry["k"], entry["T"]]
        assert percent(ours.top1) == pytest.approx(entry["top1"], abs=1e-9), entry
        if well_defined(labels, entry["k"]):
            assert percent(ours.top5) == pytest.approx(entry["top5"], abs=1e-9), entry


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entry", RECORDED["dinov2"], ids=title)
def test_accuracies_of_dinov2(backend, entry):
    hits, labels = votes(backend, rows_of(entry))
    ours = hits[entry["k"], entry["T"]]
    assert percent(ours.top1) == pytest.approx(entry["micro"]["top-1"], abs=1e-4)  # float32 in torchmetrics
    assert percent(ours.top5) == pytest.approx(entry["top5_counting_positive_weight_classes_only"], abs=1e-4)
    if well_defined(labels, entry["k"]):
        assert percent(ours.top5) == pytest.approx(entry["micro"]["top-5"], abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_temperature_of_mocas_sweep(backend):
    hits, _ = votes(backend)
    for k, best in RECORDED["moca_cosine_sweep"].items():
        accuracies = {entry["T"]: percent(hits[int(k), entry["T"]].top1) for entry in RECORDED["moca_cosine"]}
        assert max(accuracies.values()) == pytest.approx(best["best_top1"])
        assert accuracies[best["best_T"]] == pytest.approx(best["best_top1"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in DATA if name.endswith("_hit1")])
def test_correctness_of_every_image(backend, name):
    k, temperature = name.removesuffix("_hit1").removeprefix("k").split("_T")
    hits, labels = votes(backend)
    ours = hits[int(k), float(temperature)]
    np.testing.assert_array_equal(ours.top1, DATA[name].astype(bool))
    defined = np.array([len(set(row[: int(k)])) >= 5 for row in labels])
    np.testing.assert_array_equal(ours.top5[defined], DATA[name.replace("hit1", "hit5")].astype(bool)[defined])
