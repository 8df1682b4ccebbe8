"""Networks of the user's own: what their functions may return, what names them, and what is refused."""

import sys
import time
from functools import partial

import pytest
import torch
from own_networks import write_networks

from checkpoints.backbone import Backbone
from checkpoints.frozen import OwnExport
from checkpoints.resolve import load, load_frozen
from engine.machine import run_on_core_threads
from probes.features.kinds import FeatureKind


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """Write a module of networks into the working folder; each text is imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it knows a text by its second
    monkeypatch.syspath_prepend(str(tmp_path))

    yield partial(write_networks, tmp_path)
    sys.modules.pop("toynets", None)


def opened(name: str) -> OwnExport:
    export = load_frozen(f"module:toynets:{name}")
    assert isinstance(export, OwnExport)
    return export


def test_patches_come_in_three_forms(nets):
    nets()
    images = torch.randint(0, 256, (3, 3, 32, 16), dtype=torch.uint8)
    features = {}
    for name in ("maps", "rows", "last"):
        backbone = Backbone(opened(name))
        features[name] = backbone.views(backbone.prepare(images), [(-1, True), (-1, False)])[-1, True]
        assert features[name].patches.shape == (3, 4, 2, 12)
    assert all(torch.equal(features[name].patches, features["maps"].patches) for name in features)
    assert features["maps"].cls is None
    assert torch.allclose(features["rows"].cls, features["rows"].avg, atol=1e-6)


def test_one_vector_is_the_class_token_of_a_network_without_patches(nets):
    nets()
    export = opened("vector")
    assert (export.spec.patch_size, export.spec.grid, export.spec.prefix, export.spec.width) == (0, (0, 0), 1, 12)
    backbone = Backbone(export)
    images = backbone.prepare(torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8))
    features, of_maps = (Backbone(opened(name)).views(images, [(-1, True)])[-1, True] for name in ("vector", "maps"))
    assert torch.equal(features.cls, of_maps.avg) and features.patches.shape == (3, 0, 0, 12)
    assert FeatureKind("cls").exists_in(export.spec) and not FeatureKind("avg").exists_in(export.spec)
    with pytest.raises(ValueError, match=r"no patch tokens at layer -1; add --set knn\.pool=cls"):
        FeatureKind("avg").check(export.spec, "knn")


def test_the_spec_says_what_the_network_does(nets):
    nets()
    export = opened("rows")
    spec = export.spec
    assert (spec.size, spec.patch_size, spec.grid, spec.width) == ((16, 24), 8, (2, 3), 12)
    assert (spec.has_class_token, spec.prefix, spec.depth, spec.label) == (True, 1, 1, "Patches")
    assert (export.mean, export.std, export.crop) == ((0.5,) * 3, (0.25,) * 3, 0.875)
    assert spec.parameters == 12 * 3 * 64 + 12 and spec.flops == 2 * 6 * 12 * 3 * 64


def test_the_digest_is_of_weights_buffers_preparation_and_code(nets):
    nets()
    first = opened("maps")
    assert first.digest == opened("maps").digest
    digests = {first.digest}
    for change in (
        "network.project.weight.data[0, 0, 0, 0] += 1e-6",
        "network.shift[0] += 1",
        "network.std = (1, 1, 1)",
    ):
        nets(f"\n\ndef other():\n    network = Patches()\n    {change}\n    return network\n")
        digests.add(opened("other").digest)
    nets("# another line\n")
    digests.add(opened("maps").digest)
    assert len(digests) == 5


def test_facts_name_the_code(nets):
    nets()
    facts = opened("maps").facts
    assert facts["method"] == "module" and facts["plugin"] == ""
    assert facts["source"].startswith("module:toynets:maps (toynets.py ")


def changed(line: str) -> str:
    """Code of a function `other` that changes the network before it returns it."""
    return f"def other():\n    network = Patches()\n    {line}\n    return network\n"


RANDOM = (
    "class R(Patches):\n    def forward(self, x): return super().forward(x + torch.rand(()))\ndef other(): return R()"
)
WRONG = {
    "def other(): return 3": "returns a int; it has to return an nn.Module",
    "def other(): raise KeyError('weights')": "raised an error: KeyError: 'weights'",
    "def other(): return nn.Linear(3, 3)": "the network has no attribute image_size, mean, std; set image_size",
    changed("network.mean = (0.5,)"): "mean=(0.5,), std=(0.25, 0.25, 0.25): give whole pixels and three numbers each",
    changed("network.crop = 2.0"): "crop=2.0: must be a number above 0 and up to 1",
    changed("network.image_size = 21"): "give another image_size",
    changed(
        "network.forward = lambda x: x"
    ): "returns a Tensor (1, 3, 16, 24) for 1 images; it has to return one vector",
    changed("network.forward = lambda x: (None, x, (1, 1))"): "not, or doubly, on a grid of 1 x 1",
    changed("network.forward = lambda x: (None, x, None)"): "it has to return one vector",
    changed("network.forward = lambda x: 1 / 0"): "fails on images (1, 3, 16, 24): ZeroDivision",
    RANDOM: "other features when asked twice",
    "other = 5": "has no function 'other'",
    "import nowhere": "toynets cannot be imported (ModuleNotFoundError: No module named 'nowhere')",
}


@pytest.mark.parametrize("code", WRONG)
def test_what_is_wrong_is_one_line(code, nets):
    nets(code)
    with pytest.raises(ValueError) as error:
        opened("other")
    assert WRONG[code] in str(error.value) and "module:toynets:other" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reference", ["module:", "module:toynets", "module:toynets:", "module::maps"])
def test_a_reference_of_another_form_says_how_to_write_it(reference):
    with pytest.raises(ValueError, match="write module:PACKAGE:FUNCTION"):
        load_frozen(reference)


def test_images_of_other_sizes_and_layers_are_refused_in_one_line(nets):
    nets(changed("network.forward = lambda x, old=network.forward: old(x[..., :16, :24])"))
    network = opened("other").build()
    with pytest.raises(ValueError, match=r"returns \(6, 12\) tokens on a grid of \(2, 3\) for images of \(32, 32\) px"):
        network(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="only one layer: use layer=-1"):
        network(torch.zeros(1, 3, 16, 24), layers=(-2,))


def test_what_needs_a_vit_does_not_take_it(nets):
    nets()
    with pytest.raises(ValueError, match="frozen evaluation alone takes it, this needs a ViT"):
        load("module:toynets:maps")
    with pytest.raises(AttributeError, match="is a network of your own, without the tensors of a ViT-export"):
        _ = opened("maps").tensors


def test_threads_take_turns(nets):
    """A network that keeps something of a pass for the next line of the same pass."""
    nets(
        "\n\ndef keeping():\n    return Keeping()\n\n\nclass Keeping(Patches):\n    def forward(self, images):\n"
        "        import time\n        self.kept = images\n        time.sleep(0.002)\n"
        "        return super().forward(self.kept)\n"
    )
    network, found = opened("keeping").build(), {}
    images = {number: torch.full((1, 3, 16, 24), float(number)) for number in range(8)}

    def work(number: int) -> None:
        found[number] = network(images[number])[0]

    started = time.perf_counter()
    run_on_core_threads(work, list(images), threads=4)
    assert all(torch.equal(found[number], network(images[number])[0]) for number in images)
    assert time.perf_counter() - started < 10


def test_weights_that_every_call_draws_anew_are_said(nets):
    nets(
        """
import torch
def fresh(): return drawn(Patches())
def drawn(network):
    torch.nn.init.normal_(network.project.weight)
    return network
def seeded():
    torch.manual_seed(3)
    return drawn(Patches())
"""
    )
    assert "called again" in opened("fresh").assumed[0]
    for same in ("maps", "seeded"):
        assert opened(same).assumed == ()
