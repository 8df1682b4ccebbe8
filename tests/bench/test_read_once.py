"""A run reads image sets, checkpoints and result files from disk once."""

from collections import Counter
from dataclasses import replace

import pytest
from small_exports import make_foreign

from bench.reports.leaderboard import write_leaderboard
from bench.run.prepare import open_data
from downstream.data.scenes import open_both
from engine import files
from engine.tasks import Workspace

PROBES = ("--suite", "knn@dino,lowshot@bench", "--data", "tiny=tiny:")


@pytest.fixture
def counted(monkeypatch):
    """Wrap `owner.name` to count its calls by the label of their arguments."""

    def call(owner, name: str, label=lambda *values: None) -> Counter:
        calls, original = Counter(), getattr(owner, name)

        def counting(*values, **options):
            calls[label(*values)] += 1
            return original(*values, **options)

        monkeypatch.setattr(owner, name, counting)
        return calls

    return call


@pytest.mark.parametrize(("limit", "fingerprints"), [((), {64: 1, 32: 1}), (("--limit", "24"), {24: 2})])
def test_a_run_opens_and_fingerprints_every_split_once(limit, fingerprints, bench, exports, counted, tmp_path):
    import imagesets.schemes.tiny
    from imagesets.sets import MemoryImages

    opened = counted(imagesets.schemes.tiny, "open_split", lambda place, split: split)
    fingerprinted = counted(MemoryImages, "facts", lambda images: len(images.pixels))
    assert bench("run", "--checkpoint", *exports, *PROBES, *limit, "--out", tmp_path)[0] == 0
    assert opened == {"train": 1, "val": 1}
    assert {size: fingerprinted[size] for size in fingerprints} == fingerprints  # others are low-shot's subsets


def test_dense_tasks_reuse_the_scenes_that_the_run_opened(counted, tmp_path):
    from downstream.layouts import coco

    listed = counted(coco, "listed", lambda root, split: split)
    space = Workspace(cache=tmp_path, data="")
    used = open_data("scenes", "tiny-coco:", space)
    for limit in (None, 8, None, 8):
        train, val = open_both(replace(space, data="tiny-coco:", limit=limit))
    assert (len(train), len(val), used.images["train"]) == (8, 8, 64)
    assert listed == {"train": 1, "val": 1}


def test_probes_refuse_scenes_that_the_run_opened(tmp_path):
    from probes.splits import open_splits

    space = Workspace(cache=tmp_path, data="tiny-ade20k:")
    open_data("scenes", space.data, space)
    with pytest.raises(ValueError, match="tiny-ade20k"):
        open_splits(space)


def test_online_knn_shares_the_images_that_are_trained_on(bench, counted, tmp_path):
    import imagesets.schemes.tiny

    opened = counted(imagesets.schemes.tiny, "open_split", lambda place, split: split)
    words = ("pretrain", "simmim", "--recipe", "smoke", "--images", "tiny:", "--knn-every", "1", "--dry-run")
    assert bench(*words, "--out", tmp_path / "run")[0] == 0
    assert opened == {"train": 1, "val": 1}


def test_a_checkpoint_is_imported_and_fingerprinted_once(bench, counted, tmp_path):
    import checkpoints.export
    import checkpoints.resolve

    imported = counted(checkpoints.resolve, "import_file")
    fingerprinted = counted(checkpoints.export, "fingerprint")
    loaded = counted(checkpoints.export, "load_file")
    reference, out = f"dino:{make_foreign(tmp_path / 'tiny.pth', 'backbone', 'teacher')}", tmp_path / "out"
    assert bench("run", "--checkpoint", reference, *PROBES, "--out", out)[0] == 0
    assert (imported.total(), fingerprinted.total(), loaded.total()) == (1, 1, 0)
    (saved,) = (out / "exports").iterdir()
    assert bench("run", "--checkpoint", saved, *PROBES, "--out", out, "--rerun")[0] == 0
    assert (imported.total(), fingerprinted.total(), loaded.total()) == (1, 2, 1)  # an export is verified


def reads_of_results(counted) -> Counter:
    return counted(files, "read_regular", lambda path, *_: path.name if "results" in path.parts else "")


@pytest.mark.usefixtures("toys")
def test_a_run_reads_each_result_three_times_and_a_later_run_once(bench, exports, counted, tmp_path):
    """To plan, before its job (another run may have made it) and for the leaderboard; the second run to plan."""
    words = ("run", "--checkpoint", exports[0], "--suite", "toy", "--data", "tiny=tiny:", "--out", tmp_path)
    for times in (3, 1):
        read = reads_of_results(counted)
        assert bench(*words)[0] == 0
        assert [read[name] for name in ("toy@one-seed0.json", "toy@two-v2-seed0.json")] == [times, times]
    read.clear()
    write_leaderboard(tmp_path)
    assert not read["toy@one-seed0.json"] and not read["toy@two-v2-seed0.json"]
