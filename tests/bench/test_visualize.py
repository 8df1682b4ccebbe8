"""Pictures of what checkpoints see: what is in them, and that the same input gives the same bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bench.visualize.components import in_lab, is_foreground, principal_components
from bench.visualize.drawing import KINDS, chosen_kind
from bench.visualize.kinds.attention import Attention
from bench.visualize.kinds.class_attention import ClassAttention
from bench.visualize.kinds.pca import Pca, at_border
from bench.visualize.pictures import Panel, PanelRow, Picture, encoded
from bench.visualize.shown import Shown, Viewer, checkpoints_of
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

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


def shown(checkpoint: Path, photos: Path, **more) -> Shown:
    return Shown(checkpoints=checkpoints_of([str(checkpoint)], None), sources=(str(photos),), **more)


def viewer_of(found: Shown) -> Viewer:
    return Viewer(found.checkpoints[0], found)


def fused_output(attention: torch.nn.Module, run) -> torch.Tensor:
    """What a module of fused attention gives while `run` runs."""
    assert attention.fused_attn
    seen: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda module, taken, given: seen.append(given))
    run()
    handle.remove()
    return seen[0]


class TestAttention:
    def test_maps_sum_to_one_and_mix_the_values_as_the_fused_computation_does(self, tiny, photos):
        found = shown(tiny, photos)
        viewer, kind = viewer_of(found), Attention(layer=1, at=(0.1, 0.9, 0.99, 0.5))
        vit, block = viewer.backbone.vit, viewer.backbone.vit.trunk.blocks[1]
        for image in found.images:
            maps, (rows, columns) = kind.maps(viewer, image.image)
            assert maps.shape == (3, 2, 1 + rows * columns)
            assert torch.allclose(maps.sum(dim=-1), torch.ones(3, 2), atol=1e-6)
            tensor = viewer.tensor(image.image)
            with torch.inference_mode():
                given = fused_output(block.attn, lambda tensor=tensor: vit(tensor))[0]
                tokens = block.norm1(vit(tensor, layers=(0,), norm=False)[0])
                values = block.attn.qkv(tokens).reshape(-1, 3, 3, 8)[:, 2].transpose(0, 1)  # (H, N, d)
                mixed = block.attn.proj((maps @ values).transpose(0, 1).flatten(1))
            queries = [1 + int(0.9 * rows) * columns + int(0.1 * columns), 1 + rows // 2 * columns + columns - 1]
            assert torch.allclose(mixed, given[queries], atol=1e-5)

    def test_the_mean_of_the_heads_is_drawn(self, tiny, photos):
        found = shown(tiny, photos, limit=1)
        viewer = viewer_of(found)
        maps, (rows, columns) = Attention().maps(viewer, found.images[0].image)
        (row,) = Attention().block(viewer, found.images[0])
        every = Attention(heads="all").block(viewer, found.images[0])
        assert np.array_equal(row[1].values, maps[:, 1, 1:].mean(dim=0).reshape(rows, columns).numpy())
        assert np.allclose(row[1].values, np.mean([each[1].values for each in every], axis=0), atol=1e-7)

    def test_images_keep_their_shape(self, tiny, photos):
        found = shown(tiny, photos, size=64)
        grids = {image.name: Attention().maps(viewer_of(found), image.image)[1] for image in found.images}
        assert grids == {"high": (17, 8), "square": (8, 8), "wide": (8, 18)}


class TestClassAttention:
    def test_of_class_attention_blocks(self, extrema, photos):
        found = shown(extrema, photos)
        viewer = viewer_of(found)
        vit, image = viewer.backbone.vit, found.images[0].image
        maps, (rows, columns) = ClassAttention(layer=1).maps(viewer, image)
        assert maps.shape == (3, 1 + rows * columns)
        assert torch.allclose(maps.sum(dim=-1), torch.ones(3), atol=1e-6)
        first, second = vit.class_attention
        tensor = viewer.tensor(image)
        with torch.inference_mode():
            given = fused_output(second.attn, lambda: vit(tensor))[0]
            patches = vit(tensor, norm=False)[0][:, 1:]
            query = first(patches, vit.class_query)
            values = second.attn.v(second.norm1(torch.cat([query, patches], dim=1))).reshape(-1, 3, 8).transpose(0, 1)
            mixed = second.attn.proj((maps[:, None] @ values).flatten()[None])
        assert torch.allclose(mixed, given, atol=1e-5)

    def test_of_a_class_token_it_is_its_row_of_the_attention(self, tiny, photos):
        found = shown(tiny, photos)
        viewer, image = viewer_of(found), found.images[0].image
        maps, _ = ClassAttention(layer=0).maps(viewer, image)
        with torch.inference_mode():
            assert torch.equal(maps, viewer.backbone.vit.attention(viewer.tensor(image), 0)[0, :, 0])


class TestPca:
    def test_components_are_those_of_a_singular_value_decomposition(self):
        tokens = np.random.default_rng(0).normal(size=(50, 6)) * [9, 5, 3, 1, 1, 1]
        found, shares = principal_components(tokens)
        centred = tokens - tokens.mean(axis=0)
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        assert np.allclose(np.abs(found), np.abs(left[:, :3] * values[:3]))
        assert np.allclose(shares, (values**2 / (values**2).sum())[:3])

    def test_the_same_thing_has_the_same_colour_in_all_images(self):
        things = np.random.default_rng(0).normal(size=(2, 5))
        maps = [things[np.array([[0, 1, 1], [0, 0, 1]])], things[np.array([[1], [0], [0], [1]])]]
        first, second = Pca().coloured(maps)[0]
        assert np.array_equal(first[0, 0], second[1, 0]) and np.array_equal(first[0, 1], second[0, 0])
        assert not np.array_equal(first[0, 0], first[0, 1])

    def test_the_foreground_is_what_keeps_away_from_the_border(self):
        inner = np.zeros((6, 6))
        inner[2:4, 1:5] = 1
        for sign in (1, -1):
            noisy = sign * inner.ravel() + np.random.default_rng(0).normal(scale=0.05, size=36)
            assert np.array_equal(is_foreground(noisy, at_border((6, 6))), inner.ravel() == 1)

    def test_in_grey_the_first_component_is_seen(self):
        values = np.random.default_rng(0).uniform(size=(500, 3))
        grey = in_lab(values) @ [0.2126, 0.7152, 0.0722]
        assert np.corrcoef(values[:, 0], grey)[0, 1] > 0.95


class TestCommand:
    @pytest.mark.parametrize("kind", ["attention", "class-attention", "pca"])
    def test_the_same_input_gives_the_same_bytes(self, kind, tiny, extrema, photos, bench, tmp_path):
        words = ("visualize", kind, "--checkpoint", tiny, extrema, "--images", photos, "--limit", 1)
        words = (*words, "--format", "png", "svg")
        assert all(bench(*words, "--out", tmp_path / out)[0] == 0 for out in ("a", "b"))
        for form in ("png", "svg"):
            first, second = ((tmp_path / out / f"{kind}.{form}").read_bytes() for out in ("a", "b"))
            assert first == second
        assert b"extrema" in first and b"tiny" in first and b"<dc:date>" not in first

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("pcs",), "no kind of picture is called 'pcs'; did you mean 'pca'?"),
            (("pca", "--set", "layers=1"), "Pca has no setting 'layers'; did you mean 'layer'?"),
            (("attention", "--set", "at=0.5"), "give x,y of each patch"),
            (("attention", "--set", "heads=7"), "tiny: heads=7: there is no head 7, they are numbered 0 to 2"),
            (("attention", "--set", "layer=5"), "tiny: layer 5: the model has 2 blocks"),
            (("pca", "--images", "/nowhere"), "--images /nowhere: /nowhere does not exist"),
            (("pca", "--images", "digits:", "--name", "a", "b"), "--name: 2 names for 1 checkpoints"),
            (("pca", "--size", "9000"), "is more than 128 patches of 8 a side"),
        ],
    )
    def test_mistakes_get_one_line(self, words, message, tiny, photos, bench, tmp_path):
        images = () if "--images" in words else ("--images", photos)
        code, _, error = bench("visualize", *words, "--checkpoint", tiny, *images, "--out", tmp_path)
        assert code == 2 and message in error and error.count("\n") == 1

    def test_a_checkpoint_is_needed(self, photos, bench, tmp_path):
        code, _, error = bench("visualize", "pca", "--images", photos, "--out", tmp_path)
        assert code == 2 and "--checkpoint is missing" in error

    def test_every_kind_is_listed(self, bench):
        code, text, _ = bench("visualize", "--help")
        assert code == 0 and all(f"  {kind} " in text for kind in KINDS)
        assert all(chosen_kind(kind, []) for kind in KINDS)


def test_names_are_no_formulas_and_hold_no_markup():
    name = "$x_1$ <b>&\x1b[0m \u202e" + "long " * 40
    panel = Panel(values=np.zeros((2, 2), np.float32), size=(2, 2), title=name, caption=name)
    picture = Picture(name="x", rows=(PanelRow(panels=(panel, None), label=name),), headings=((name, 2),), note=name)
    text = encoded(picture, "svg").decode()
    assert "$x_1$ &lt;b&gt;&amp;\\x1b[0m" in text and "\u202e" not in text and "\x1b" not in text
