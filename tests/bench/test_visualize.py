"""`bench visualize`: contents of its pictures, and equal bytes for equal input."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bench.reports.kinds import KINDS
from bench.reports.kinds.attention import Attention
from bench.reports.kinds.norms import Norms
from bench.reports.kinds.pca import Pca, at_border, in_lab, is_foreground, principal_components
from bench.reports.kinds.predictions import PROTOCOLS as PREDICTIONS
from bench.reports.kinds.predictions import DepthDrawer
from bench.reports.kinds.retrieval import Retrieval
from bench.reports.pictures import Box, Panel, Picture, encoded
from bench.reports.visualize import PictureRequest, Viewer, chosen_kind, points_at
from bench.results.store import read_results
from checkpoints.export import ViTExport
from checkpoints.resolve import load
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from downstream.data.scenes import open_scenes, scene_depth
from downstream.metrics.scores import scene_mious, scores_of_totals
from downstream.tasks import correspondence
from downstream.tasks.depth_linear import PROTOCOLS as DEPTH
from engine.tasks import Workspace
from imagesets.selection import evenly_spaced
from imagesets.sets import open_set

TINY = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=24, depth=2, heads=3, mlp_hidden=48
)
EXTREMA = replace(TINY, class_token=False, class_position=False, class_attention=2, final_norm="class")


def saved(folder: Path, spec: ViTSpec) -> Path:
    torch.manual_seed(0)
    vit = ViT(spec)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.uniform_(-0.4, 0.4)
    return ViTExport.from_vit(vit, Preparation()).save(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("visualize") / "tiny", TINY)


@pytest.fixture(scope="module")
def extrema(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("visualize") / "extrema", EXTREMA)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A wide, a high and a square image of noise."""
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, (width, height) in {"wide": (90, 40), "high": (33, 71), "square": (50, 50)}.items():
        pixels = generator.integers(0, 256, (height // 10, width // 10, 3), np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / f"{name}.png")
    return folder


def request_of(checkpoint: Path, *sources: str | Path, **options) -> PictureRequest:
    return PictureRequest(references=(str(checkpoint),), sources=tuple(map(str, sources)), **options)


def viewer_of(request: PictureRequest) -> Viewer:
    return request.viewers[0]


def fused_output(attention: torch.nn.Module, run) -> torch.Tensor:
    """The output of a module of fused attention during `run()`."""
    assert attention.fused_attn
    outputs: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    run()
    handle.remove()
    return outputs[0]


class TestAttention:
    def test_maps_sum_to_one_and_reproduce_the_output_of_fused_attention(self, tiny, photos):
        request = request_of(tiny, photos)
        viewer, kind = viewer_of(request), Attention(layer=1, at=(0.1, 0.9, 0.99, 0.5))
        vit, block = viewer.backbone.vit, viewer.backbone.vit.trunk.blocks[1]
        for image in request.images:
            maps, (rows, columns) = kind.maps(viewer, image.image)
            assert maps.shape == (3, 2, 1 + rows * columns)
            assert torch.allclose(maps.sum(dim=-1), torch.ones(3, 2), atol=1e-6)
            tensor = viewer.tensor(image.image)
            with torch.inference_mode():
                fused = fused_output(block.attn, lambda tensor=tensor: vit(tensor))[0]
                tokens = block.norm1(vit(tensor, layers=(0,), norm=False)[0])
                values = block.attn.qkv(tokens).reshape(-1, 3, 3, 8)[:, 2].transpose(0, 1)  # (H, N, d)
                mixed = block.attn.proj((maps @ values).transpose(0, 1).flatten(1))
            queries = [1 + int(0.9 * rows) * columns + int(0.1 * columns), 1 + rows // 2 * columns + columns - 1]
            assert torch.allclose(mixed, fused[queries], atol=1e-5)

    def test_the_mean_of_the_heads_is_drawn(self, tiny, photos):
        request = request_of(tiny, photos, limit=1)
        viewer = viewer_of(request)
        maps, (rows, columns) = Attention().maps(viewer, request.images[0].image)
        (row,) = Attention().block(viewer, request.images[0])
        head_rows = Attention(heads="all").block(viewer, request.images[0])
        assert np.array_equal(row[1].values, maps[:, 1, 1:].mean(dim=0).reshape(rows, columns).numpy())
        assert np.allclose(row[1].values, np.mean([head_row[1].values for head_row in head_rows], axis=0), atol=1e-7)

    def test_images_keep_their_aspect_ratio(self, tiny, photos):
        request = request_of(tiny, photos, image_size=64)
        grids = {image.name: Attention().maps(viewer_of(request), image.image)[1] for image in request.images}
        assert grids == {"high": (17, 8), "square": (8, 8), "wide": (8, 18)}


class TestClassAttention:
    def test_maps_reproduce_the_output_of_class_attention_blocks(self, extrema, photos):
        request = request_of(extrema, photos)
        viewer = viewer_of(request)
        vit, image = viewer.backbone.vit, request.images[0].image
        maps, (rows, columns) = Attention(tokens="class", layer=1).maps(viewer, image)
        assert maps.shape == (3, 1, 1 + rows * columns)
        assert torch.allclose(maps.sum(dim=-1), torch.ones(3, 1), atol=1e-6)
        first, second = vit.class_attention
        tensor = viewer.tensor(image)
        with torch.inference_mode():
            fused = fused_output(second.attn, lambda: vit(tensor))[0]
            patches = vit(tensor, norm=False)[0][:, 1:]
            query = first(patches, vit.class_query)
            values = second.attn.v(second.norm1(torch.cat([query, patches], dim=1))).reshape(-1, 3, 8).transpose(0, 1)
            mixed = second.attn.proj((maps @ values).flatten()[None])
        assert torch.allclose(mixed, fused, atol=1e-5)

    def test_map_of_a_class_token_is_its_row_of_the_attention(self, tiny, photos):
        request = request_of(tiny, photos)
        viewer, image = viewer_of(request), request.images[0].image
        maps, _ = Attention(tokens="class", layer=0).maps(viewer, image)
        with torch.inference_mode():
            assert torch.equal(maps, viewer.backbone.vit.attention(viewer.tensor(image), 0)[0, :, :1])


class TestPca:
    def test_components_equal_a_singular_value_decomposition(self):
        tokens = np.random.default_rng(0).normal(size=(50, 6)) * [9, 5, 3, 1, 1, 1]
        components, shares = principal_components(tokens)
        centred = tokens - tokens.mean(axis=0)
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        assert np.allclose(np.abs(components), np.abs(left[:, :3] * values[:3]))
        assert np.allclose(shares, (values**2 / (values**2).sum())[:3])
        assert np.array_equal(principal_components(np.ones((6, 5)))[1], np.zeros(3))  # of a collapsed network

    def test_equal_features_have_the_same_colour_in_all_images(self):
        things = np.random.default_rng(0).normal(size=(2, 5))
        maps = [things[np.array([[0, 1, 1], [0, 0, 1]])], things[np.array([[1], [0], [0], [1]])]]
        first, second = Pca().coloured(maps)[0]
        assert np.array_equal(first[0, 0], second[1, 0]) and np.array_equal(first[0, 1], second[0, 0])
        assert not np.array_equal(first[0, 0], first[0, 1])

    def test_the_foreground_is_the_side_away_from_the_border(self):
        inner = np.zeros((6, 6))
        inner[2:4, 1:5] = 1
        for sign in (1, -1):
            noisy = sign * inner.ravel() + np.random.default_rng(0).normal(scale=0.05, size=36)
            assert np.array_equal(is_foreground(noisy, at_border((6, 6))), inner.ravel() == 1)

    def test_lightness_follows_the_first_component(self):
        values = np.random.default_rng(0).uniform(size=(500, 3))
        grey = in_lab(values) @ [0.2126, 0.7152, 0.0722]
        assert np.corrcoef(values[:, 0], grey)[0, 1] > 0.95


class TestNorms:
    def test_patches_above_the_cutoff_are_counted(self, tiny, tmp_path):
        """Norms are those before the final norm layer; a cutoff between the two largest leaves one of 16 patches."""
        for name, seed in (("a", 0), ("b", 1)):
            Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)).save(
                tmp_path / f"{name}.png"
            )
        request = request_of(tiny, tmp_path)
        viewer, image = viewer_of(request), request.images[0].image
        with torch.inference_mode():
            expected = viewer.backbone.views(viewer.tensor(image), [(-1, False)])[-1, False].patches[0].norm(dim=-1)
        second, first = np.sort(expected.ravel())[-2:]
        cutoff = float(first + second) / 2
        (((panel,),), _) = Norms(cutoff=cutoff).blocks(viewer, request)
        assert panel.values == pytest.approx(expected.numpy(), rel=1e-5)
        assert panel.caption == f"{panel.values.min():.3g} to {first:.3g}, 6.2% above {cutoff:.3g}"
        assert panel.low is None  # the darkest colour is the lowest norm
        (((panel,),), _) = Norms().blocks(viewer, request)
        maps = [np.linalg.norm(viewer.patches(image.image, -1, False), axis=-1) for image in request.images]
        assert panel.caption.endswith(f" above {5 * np.median(maps):.3g}")


class TestRetrieval:
    def test_neighbours_have_the_largest_cosines(self):
        generator = np.random.default_rng(0)
        maps = [
            generator.normal(size=(rows, columns, 5)).astype(np.float32) for rows, columns in ((2, 3), (4, 2), (3, 3))
        ]
        unit = [tokens.reshape(-1, 5) / np.linalg.norm(tokens.reshape(-1, 5), axis=1)[:, None] for tokens in maps]
        queries = generator.normal(size=(2, 5)).astype(np.float32)
        for query, row in zip(queries, Retrieval(neighbours=2).nearest(queries, maps), strict=True):
            best = {n: (tokens @ query / np.linalg.norm(query)).max() for n, tokens in enumerate(unit)}
            expected = sorted(best, key=best.__getitem__, reverse=True)[:2]
            assert [neighbour.image for neighbour in row] == expected, "one neighbour of an image"
            assert np.allclose([neighbour.similarity for neighbour in row], [best[n] for n in expected], atol=1e-6)
            assert all(unit[n.image][n.patch] @ query > 0.999 * best[n.image] * np.linalg.norm(query) for n in row)

    @pytest.mark.parametrize("tokens", ["patches", "class"])
    def test_queries_are_validation_images_and_neighbours_training_images(self, tokens, tiny):
        """A single query suffices, and its own copy among the neighbours would be an image of the other split."""
        request = request_of(tiny, "tiny:", limit=1)
        kind = Retrieval(tokens=tokens, gallery=6, neighbours=3)
        (((query, *neighbours),),) = kind.blocks(viewer_of(request), request, request.gallery(kind.gallery))
        train = open_set("tiny:", "train")
        images = [np.asarray(image.image) for image in request.gallery(6)]
        expected = [np.asarray(train.limited(6).image(number)) for number in range(6)]
        assert all((first == second).all() for first, second in zip(images, expected, strict=True))
        assert len(neighbours) == 3 and query.caption.startswith("query")
        if tokens == "class":
            viewer = viewer_of(request)
            token = viewer.class_token(request.images[0].image, -1)
            cosines = [token.ravel() @ viewer.class_token(image.image, -1).ravel() for image in request.gallery(6)]
            norms = [np.linalg.norm(viewer.class_token(image.image, -1)) for image in request.gallery(6)]
            best = int(np.argmax(np.array(cosines) / norms))
            assert (neighbours[0].values == images[best]).all()

    def test_a_patch_finds_its_copy_and_is_shown_with_its_context(self, tiny, tmp_path):
        """With pixels as features, so that no position or other patch has an influence."""
        pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
        copied = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)
        copied[24:, :8] = pixels[8:16, 16:24]
        for name, values in (("a", pixels), ("b", copied)):
            Image.fromarray(values).save(tmp_path / f"{name}.png")
        request = request_of(tiny, tmp_path)
        viewer, kind = viewer_of(request), Retrieval(at=(0.6, 0.3), context=1)
        rows = [np.asarray(image.image).reshape(4, 8, 4, 8, 3).swapaxes(1, 2) for image in request.images]
        maps = [row.reshape(4, 4, -1) - 127.0 for row in rows]
        ((near, *_),) = kind.nearest(maps[0][1, 2][None], maps[1:])
        assert near.image == 0 and near.patch == 3 * 4 and near.similarity == pytest.approx(1)
        panel = kind.panel(request.images[1], (4, 4), near.patch, points_at(kind.at)[0])
        assert np.array_equal(panel.values, copied[8:, :24])
        assert panel.boxes == (Box(left=0, right=1 / 3, top=2 / 3, bottom=1),)
        captions = [panel.caption[:6] for panel in kind.blocks(viewer, request)[0][0]]
        assert captions == ["query ", "cosine"]


class TestCommand:
    @pytest.mark.parametrize(
        "kind",
        [
            "pca",
            *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("attention", "retrieval")),
        ],
    )
    def test_the_same_input_gives_the_same_bytes(self, kind, tiny, extrema, photos, bench, tmp_path):
        limit = 2 if kind == "retrieval" else 1
        words = ("visualize", kind, "--checkpoint", tiny, extrema, "--images", photos, "--limit", limit)
        settings = {
            "attention": ("at=0.5,0.5",),
            "retrieval": ("neighbours=1",),
        }
        words = (*words, *(("--set", *settings[kind]) if kind in settings else ()))
        forms = ("png", "svg") if kind in ("attention", "pca") else ("png",)
        assert all(bench(*words, "--format", *forms, "--out", tmp_path / out)[0] == 0 for out in ("a", "b"))
        for form in forms:
            first, second = ((tmp_path / out / f"{kind}.{form}").read_bytes() for out in ("a", "b"))
            assert first == second
        assert Image.open(tmp_path / "a" / f"{kind}.png").info["Title"].startswith(f"{kind}: ")
        if "svg" in forms:
            assert b"extrema" in first and b"tiny" in first and b"<dc:date>" not in first

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("pcs",), "pcs | 'pca'"),
            (("pca", "--set", "layers=1"), "no setting 'layers'; did you mean 'layer'?"),
            (("attention", "--set", "at=0.5"), "give x,y of each patch"),
            (("attention", "--set", "heads=7"), "tiny: heads=7: there is no head 7, they are numbered 0 to 2"),
            (("attention", "--set", "layer=5"), "tiny: layer 5: the model has 2 blocks"),
            (("pca", "--images", "/nowhere"), "--images /nowhere"),
            (("pca", "--images", "digits:", "--name", "a", "b"), "--name: 2 names for 1 checkpoints"),
            (("pca", "--name", "ViT-S/14"), "--name ViT-S/14"),
            (("pca", "--size", "9000"), "is more than 128 patches of 8 a side"),
            (("retrieval", "--limit", "1"), "--images: neighbours come from other images"),
            (("pca", "--format", "pdf"), "--format | pdf"),
        ],
    )
    def test_wrong_requests_are_refused_in_one_line(self, words, message, tiny, photos, refused, tmp_path):
        images = () if "--images" in words else ("--images", photos)
        refused("visualize", *words, "--checkpoint", tiny, *images, "--out", tmp_path, named=message)

    def test_a_checkpoint_is_needed(self, photos, refused, tmp_path):
        refused("visualize", "pca", "--images", photos, "--out", tmp_path, named="--checkpoint")


def test_the_page_lists_every_setting_with_its_default():
    page = (Path(__file__).parents[2] / "docs/visualize.md").read_text()
    for kind in KINDS:
        section = page.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        documented = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE))
        settings = vars(chosen_kind(kind, []))
        assert section and documented.keys() == settings.keys(), kind
        for name, default in settings.items():
            if documented[name].startswith("`"):
                value = documented[name].strip("`")
                assert chosen_kind(kind, [f"{name}={value}"]) == chosen_kind(kind, []), (kind, name)
            else:
                assert not default or name == "at"


def test_depth_is_predicted_by_the_head_that_a_run_trained(tiny, tmp_path):
    """With the errors of the run, and without another training."""
    task, cache = DEPTH["depth_linear@smoke"].task, tmp_path / "cache"  # of a run with --out tmp_path
    space = Workspace(cache=cache, data="tiny-nyu:")
    errors = task.run(load(tiny), space).metrics["rmse"].per_image
    states = {path: path.stat().st_mtime_ns for path in cache.rglob("step-*")}
    kind = chosen_kind("predictions", ["protocol=depth_linear@smoke", f"results={tmp_path}"])
    (picture,) = kind.pictures(request_of(tiny, "tiny-nyu:", limit=3))
    captions = [row[2].caption for row in picture.rows]
    assert captions == [f"RMSE {errors[index]:.2f} m" for index in evenly_spaced(len(errors), 3)]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("step-*")} == states
    scenes = open_scenes("tiny-nyu:", "val", cache)
    drawer = DepthDrawer(task, scenes)
    for arrays in ({}, {"errors": np.array([[2.0], [1.0]])}):
        drawer.load(load(tiny), space, arrays)
    assert drawer.ranked() == []  # the second network's errors rank nothing for the first
    depth = scene_depth(scenes, int(evenly_spaced(len(errors), 3)[0]), picture.rows[0][1].values.shape[:2])
    colours = picture.rows[0][1].values
    assert (colours[depth == 0] == 127).all() and len(np.unique(colours[depth == depth.max()], axis=0)) == 1
    with pytest.raises(ValueError, match="depth_linear@dinov3"):
        chosen_kind("predictions", ["protocol=depth_linear@dinov9"])
    with pytest.raises(ValueError, match="this task needs nyu:ROOT"):
        next(kind.pictures(request_of(tiny, "tiny-ade20k:")))


@pytest.mark.parametrize(
    ("protocol", "url", "caption"),
    [
        ("video_propagation@smoke", "tiny-davis:", r"J&F \d+\.\d of the video"),
        ("correspondence@smoke", "tiny-spair:", r"\d of [345] found"),
        ("discovery@smoke", "tiny-trainval:", r"IoU 0\.\d\d"),
    ],
)
def test_predictions_are_drawn_beside_the_labels(protocol, url, caption, tiny, tmp_path):
    kind = chosen_kind("predictions", [f"protocol={protocol}", f"results={tmp_path}"])
    (picture,) = kind.pictures(request_of(tiny, url, limit=3))
    assert len(picture.rows) == 3 and picture.name == f"predictions-{protocol.partition('@')[0]}"
    for row in picture.rows:
        image, truth, predicted = row
        assert image.size and truth.size == predicted.size and re.fullmatch(caption, predicted.caption)
        assert len(truth.points) == len(predicted.points) == len(image.points)
        assert (len(predicted.boxes), len(truth.boxes) > 1) == ((1, True) if url == "tiny-trainval:" else (0, False))
        assert url != "tiny-davis:" or (truth.values != image.values).any(2).mean() == pytest.approx(2 / 13.5, abs=0.03)
    assert encoded(picture, "png")


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param("segmentation_linear@smoke", marks=pytest.mark.exhaustive),
        *("segmentation_linear@capi_smoke", "dense_knn@smoke"),
    ],
)
def test_masks_are_drawn_of_the_worst_and_the_median_image_first(protocol, tiny, bench, tmp_path, monkeypatch):
    """Those of a stored result, without computing anything; without one the task runs, with the same masks."""
    task, out = PREDICTIONS[protocol].task, tmp_path / "results"
    words = ("--checkpoint", tiny, "--suite", protocol, "--data", "d=tiny-ade20k:", "--limit", "10", "--out", out)
    assert bench("run", *words)[0] == 0
    arrays = read_results(out)[0][0].arrays
    mious = scene_mious(arrays["areas"])
    worst, median = arrays["ranked_of"].tolist()
    assert mious[worst] == mious.min() and (mious < mious[median]).sum() <= 4
    totals = scores_of_totals(arrays["areas"])["mIoU"]
    assert mious == pytest.approx(totals)
    with monkeypatch.context() as patch:
        patch.setattr(type(task), "run", None)
        kind = chosen_kind("predictions", [f"protocol={protocol}", f"results={out}"])
        (picture,) = kind.pictures(request_of(tiny, "tiny-ade20k:", limit=3))
    assert [row[0].title for row in picture.rows] == ["worst for tiny", "median for tiny", ""]
    captions = [row[2].caption for row in picture.rows]
    assert captions[:2] == [f"worst: mIoU {mious[worst]:.1f}", f"median: mIoU {mious[median]:.1f}"]
    assert len(picture.legend) > 1 and encoded(picture, "png")
    outcome = task.run(load(tiny), Workspace(cache=tmp_path / "cache", data="tiny-ade20k:", limit=10))
    assert all((outcome.arrays[name] == arrays[name]).all() for name in arrays if name.startswith(("shown", "ranked")))


def test_what_cannot_be_drawn_is_said_before_anything_is_computed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Viewer, "loaded", None)
    for protocol in ("upernet@ibot", "maskrcnn@mae", "knn@dino"):
        with pytest.raises(ValueError, match=f"protocol={protocol}: not drawable here"):
            chosen_kind("predictions", [f"protocol={protocol}"])
    kind = chosen_kind("predictions", ["protocol=dense_knn@smoke"])
    with pytest.raises(ValueError, match=r"this task needs ade20k:ROOT.*depth_linear@smoke"):
        next(kind.pictures(request_of(tiny, "tiny-nyu:")))


def test_keypoints_predicted_in_the_padding_are_counted_but_not_drawn(tiny, tmp_path, monkeypatch):
    def match_pair(self, scenes, number, patches):
        return np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]]), np.zeros(3)

    monkeypatch.setattr(correspondence.Correspondence, "match_pair", match_pair)
    kind = chosen_kind("predictions", ["protocol=correspondence@smoke", f"results={tmp_path}"])
    (picture,) = kind.pictures(request_of(tiny, "tiny-spair:", limit=1))
    predicted = picture.rows[0][2]
    assert [(spot.x, spot.y) for spot in predicted.points] == [(0.0, 0.0)]
    assert predicted.caption == "3 of 3 found\n2 in the padding"


def test_names_are_escaped_and_not_read_as_formulas():
    name = "$x_1$ <b>&\x1b[0m \u202e" + "long " * 40
    panel = Panel(values=np.zeros((2, 2), np.float32), size=(2, 2), title=name, caption=name)
    picture = Picture(name="x", rows=((panel, None),), headings=((name, 2),), note=name)
    text = encoded(picture, "svg").decode()
    assert "<title>x: $x_1$ &lt;b&gt;" in text and "$x_1$ &lt;b&gt;&amp;\\x1b[0m" in text
    assert "\u202e" not in text and "\x1b" not in text
