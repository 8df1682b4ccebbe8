"""Tokenizers: DALL-E's encoder against recorded outputs and in files, k-means, and the tokenizer of a training."""

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from recorded import assert_close, recording
from recordings import under
from safetensors.torch import save_file
from small_trainings import trainer
from torch import nn
from toys import SMALL, picture

from bench.commands.inspect import export_lines
from checkpoints.export import ViTExport
from engine.seeding import AUGMENT, seeded
from pretrain.methods.beit import METHOD, Settings
from pretrain.parts.masking import normalised, patchify
from pretrain.parts.tokenizers import (
    SIDE,
    PatchCodebook,
    k_means,
    map_pixels,
    nearest,
    read_dalle,
)
from pretrain.recipe import RELATIVE

DATA, CONFIG = recording("cae/cae_dalle.safetensors")
WEIGHTS = {name: tensor.float() for name, tensor in under(DATA, "dalle.").items()}
SPEC = SMALL.__class__(**{**SMALL.to_json(), **RELATIVE})
MASK = dict(num_mask_patches=6, min_mask_patches_per_block=2)
# Recorded in float32; ours is float64.
LIMIT = 1e-6


class Conv2d(nn.Module):
    """OpenAI's layer, with parameters w and b."""

    def __init__(self, w: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(w, requires_grad=False), nn.Parameter(b, requires_grad=False)
        self.use_float16, self.device = True, torch.device("cpu")


class EncoderBlock(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.post_gain = 1 / 64
        for name, part in parts.items():
            setattr(self, name, part)


class Encoder(EncoderBlock):
    pass


@pytest.fixture
def openai(monkeypatch):
    """Modules under the names that OpenAI's file imports."""
    package, encoder, utilities = ModuleType("dall_e"), ModuleType("dall_e.encoder"), ModuleType("dall_e.utils")
    encoder.Encoder, encoder.EncoderBlock, utilities.Conv2d = Encoder, EncoderBlock, Conv2d
    for kind, module in ((Encoder, encoder), (EncoderBlock, encoder), (Conv2d, utilities)):
        monkeypatch.setattr(kind, "__module__", module.__name__)
    for module in (package, encoder, utilities):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def module_of(tensors: dict[str, torch.Tensor], depth: int = 0) -> nn.Module:
    """The pickled module that holds these tensors: nested Sequentials, residual blocks and convolutions."""
    if tensors.keys() == {"w", "b"}:
        return Conv2d(**tensors)
    parts = {name.partition(".")[0]: None for name in tensors}
    inner = {part: module_of(under(tensors, f"{part}."), depth + 1) for part in parts}
    if depth == 0:
        return Encoder(**inner)
    if "res_path" in inner:
        return EncoderBlock(**{"id_path": nn.Identity(), **inner})
    first = {"relu": nn.ReLU(), "pool": nn.MaxPool2d(2)} if "conv" in inner else {}
    return nn.Sequential(OrderedDict({**first, **inner}))


def save(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.pkl"
    if kind == "safetensors":
        save_file(WEIGHTS, path)
    elif kind == "state dict":
        torch.save({"state_dict": WEIGHTS}, path)
    else:
        torch.save(module_of(WEIGHTS), path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "state dict", "module"])
def test_dalle_is_read_from_every_kind_of_file_with_the_recorded_outputs(kind, tmp_path, openai):
    path = save(kind, tmp_path)
    for name in ("dall_e", "dall_e.encoder", "dall_e.utils"):
        del sys.modules[name]  # the package must not be needed
    encoder = read_dalle(path).double()
    assert not any(name.startswith("dall_e") for name in sys.modules)
    pixels = DATA["in.image01"]
    assert_close(map_pixels(pixels), DATA["out.mapped"], 1e-7, "mapped")
    assert_close(encoder.logits(pixels), DATA["out.logits"], LIMIT, "logits")
    assert torch.equal(encoder(pixels), DATA["out.tokens"].flatten(1))
    assert encoder.codes == CONFIG["vocab"] and encoder.label.startswith(f"DALL-E's encoder, {path.name} sha256 ")
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_files_without_dalles_encoder_are_refused(tmp_path):
    save_file({name: tensor for name, tensor in WEIGHTS.items() if "group_2" not in name}, tmp_path / "less")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "module")
    for name, message in (
        ("less", "not DALL-E's encoder"),
        ("other", "not DALL-E's encoder"),
        ("module", "wants torch.nn.modules.linear.Linear to be loaded, which could run code and is refused"),
        ("none", "^tokenizer: .*none cannot be read: No such file or directory; give the file of DALL-E's encoder"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            METHOD(SPEC, Settings(tokenizer=str(tmp_path / name), **MASK))
        assert "\n" not in str(error.value)


def test_a_method_predicts_the_codes_of_its_tokenizer(tmp_path):
    path = save("safetensors", tmp_path)
    method = METHOD(SPEC, Settings(tokenizer=str(path), **MASK))
    assert method.lm_head.out_features == CONFIG["vocab"] and method.fitted_on == 0
    assert method.facts() == {"tokenizer": method.tokenizer.label}


def test_k_means_ends_with_cluster_means_and_no_empty_cluster():
    torch.manual_seed(0)
    points = torch.randn(300, 2).double()
    points[::3] = points[0]  # many first centres lie at one place
    centres = k_means(points, 9)
    ids, distances = nearest(points, centres)
    assert torch.equal(ids.unique(), torch.arange(9))
    means = torch.stack([points[ids == number].mean(0) for number in range(9)])
    assert (means - centres).norm() < 0.1 * centres.norm()
    assert distances.sum() < 0.5 * nearest(points, points[:9])[1].sum()
    assert k_means(points[:3], 6).shape == (6, 2)  # fewer points than centres


def test_codes_are_the_nearest_centres_of_normalised_patches():
    torch.manual_seed(0)
    codebook = PatchCodebook(5, (2, 2)).double()
    pictures = torch.rand(40, 3, 2 * SIDE, 2 * SIDE).double()
    before = codebook(pictures)
    codebook.fit([pictures[:20].float(), pictures[20:].float()])
    patches = normalised(patchify(pictures, SIDE))
    expected = torch.cdist(patches, codebook.centres.expand(40, -1, -1)).argmin(-1)
    assert torch.equal(codebook(pictures), expected) and not torch.equal(before, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codebook(pictures), expected)


def test_more_codes_than_patches_are_refused():
    """Many more codes raised an error of shapes, and a few more gave one code per patch."""
    for codes in (9, 50):
        with pytest.raises(ValueError, match=rf"^codes={codes} is more than the 8 patches[^\n]*$"):
            PatchCodebook(codes, (2, 2)).fit([torch.rand(2, 3, 2 * SIDE, 2 * SIDE)])


def test_picture_and_image_show_the_same_crop():
    make_views = METHOD(SPEC, Settings(codes=8, crop_scale=(0.2, 1.0), colour_jitter=0.0, **MASK)).views()
    image = picture(0)
    with seeded(AUGMENT, 1):
        views = make_views(image)
    assert views["picture"].shape == (3, 4 * SIDE, 4 * SIDE) and 0 <= views["picture"].amin() < views["picture"].amax()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (METHOD.preparation.mean, METHOD.preparation.std))
    shrunk = nn.functional.avg_pool2d(views["picture"][None], 4 * SIDE // SPEC.image_size)[0]
    assert (shrunk - (views["image"] * std + mean)).abs().mean() < 0.02
    assert views["mask"].shape == (16,) and 0 < int(views["mask"].sum()) <= 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    training = trainer("beit", tmp_path_factory.mktemp("beit"))
    assert training.train() == "finished"
    return training


def test_a_training_fits_its_tokenizer_once_before_the_first_update(trained, tmp_path, monkeypatch):
    """A resumed training keeps the fitted tokenizer."""
    first = trainer("beit", tmp_path, monitor=lambda export, progress: first.stop() or {}, monitor_every=1)
    random = first.method.tokenizer.centres.clone()
    assert first.train() == "stopped"
    fitted = first.method.tokenizer.centres
    assert torch.equal(fitted, trained.method.tokenizer.centres) and not torch.equal(fitted, random)
    monkeypatch.setattr(PatchCodebook, "fit", None)
    second = trainer("beit", tmp_path, resume=True)
    assert second.train() == "finished" and torch.equal(second.method.tokenizer.centres, fitted)


def test_every_export_names_its_tokenizer(trained):
    label = "k-means of 64 codes among patches of the training images; not the paper's"
    for folder in ("start", "export"):
        export = ViTExport.load(trained.run.out / folder)
        assert export.facts["tokenizer"] == label and f"  tokenizer    {label}" in list(export_lines(export))
