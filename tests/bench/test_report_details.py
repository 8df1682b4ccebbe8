"""Details of a report: hard images, neighbours and pictures."""

from dataclasses import replace

import numpy as np
import pytest
from made_results import made_checkpoint, save_result
from shown_results import result

from bench.reports.details import details_of, predictions_of
from bench.reports.page import report_page
from bench.results.record import DataUsed
from bench.results.store import comparable_results
from imagesets.sets import open_set


@pytest.fixture
def board(tmp_path):
    """k-NN results of a network and of raw pixels on the digits: both take nines for fours."""
    images = {split: open_set("digits:", split) for split in ("train", "val")}
    fingerprints = {split: image_set.fingerprint for split, image_set in images.items()}
    data = DataUsed(name="digits", url="digits:", fingerprints=fingerprints, images={"train": 1297, "val": 500})
    labels, query_images = images["val"].labels, np.array([3, 400])
    neighbours = (
        np.flatnonzero(images["train"].labels == labels[3])[:2],
        np.flatnonzero(images["train"].labels != labels[400])[:2],
    )
    for number, method in ((1, "mae"), (2, "pixels")):
        predicted = np.where((labels == 9) & (np.arange(500) % number == 0), 4, labels).astype(np.int32)
        correct = predicted == labels
        arrays = {"predicted": predicted, "confidence": np.full(500, 0.9, np.float16), "neighbours_of": query_images}
        arrays |= {"neighbours": np.stack(neighbours), "similarities": np.full((2, 2), 0.5, np.float32)}
        checkpoint = made_checkpoint(f"c{number}", number, method=method, source=f"/imports/c{number}")
        facts = {"predictions": "1shot of split 0"}
        measured = result(checkpoint, 90 + number, data=data, arrays=tuple(arrays), facts=facts)
        save_result(tmp_path, measured, {**arrays, "top1": np.where(correct, 1, 1 / 3) if number == 2 else correct})
    return tmp_path


def test_the_page_shows_neighbours_and_mistakes(board):
    text = report_page(board)
    assert "c2 (floor): 2 of 2 of its class" in text and "c2 (floor): 0 of 2 of its class" in text
    assert "with the predictions of c1 (1shot of split 0)" in text, "of the best network, also where raw pixels lead"
    assert "9, predicted as 4" in text and "0.333 of 2 right" in text
    assert text == report_page(board), "the same results give the same bytes"
    assert "Neighbours of some images" not in report_page(board, pictures=False)


def test_images_with_several_labels_have_no_details(board):
    measured, _ = comparable_results(board)
    images = open_set("digits:", "val")
    assert predictions_of(measured[0], images.limited(100)) is None, "other images than those measured"
    multi_label = replace(images, labels=np.eye(10, dtype=np.int64)[images.labels])
    by_name = {stored.result.checkpoint.name: stored for stored in measured}
    assert any(details_of(by_name, ["top1"], lambda result, split: images, board).values())
    assert not any(details_of(by_name, ["top1"], lambda result, split: multi_label, board).values())
