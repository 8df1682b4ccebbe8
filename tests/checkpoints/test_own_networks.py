"""Networks of a user's module: what their functions may return, spec, digest, facts and refusals."""

import sys
import time
from argparse import Namespace
from functools import partial

import pytest
import torch
from own_networks import write_networks
from refusals import refusal
from torch import nn
from torchvision.models import resnet18

from checkpoints.backbone import Backbone
from checkpoints.frozen import Forward, OwnExport, held_network
from checkpoints.resolve import load, load_frozen
from checkpoints.spec import Preparation
from engine.machine import run_on_core_threads
from probes.features.kinds import FeatureKind


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A function that writes a module of networks into the working folder, to be imported again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # bytecode is matched by seconds, within which tests write new text
    monkeypatch.syspath_prepend(str(tmp_path))

    yield partial(write_networks, tmp_path)
    sys.modules.pop("toynets", None)


def load_own(name: str) -> OwnExport:
    export = load_frozen(f"module:toynets:{name}")
    assert isinstance(export, OwnExport)
    return export


def test_patches_may_be_returned_in_three_forms(nets):
    nets()
    images = torch.randint(0, 256, (3, 3, 32, 16), dtype=torch.uint8)
    features = {}
    for name in ("maps", "rows", "last"):
        backbone = Backbone(load_own(name))
        features[name] = backbone.views(backbone.prepare(images), [(-1, True), (-1, False)])[-1, True]
        assert features[name].patches.shape == (3, 4, 2, 12)
    assert all(torch.equal(features[name].patches, features["maps"].patches) for name in features)
    assert features["maps"].cls is None
    assert torch.allclose(features["rows"].cls, features["rows"].avg, atol=1e-6)


def test_a_single_vector_is_taken_as_class_token(nets):
    nets()
    export = load_own("vector")
    assert (export.spec.patch_size, export.spec.grid, export.spec.prefix, export.spec.width) == (0, (0, 0), 1, 12)
    backbone = Backbone(export)
    images = backbone.prepare(torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8))
    features, of_maps = (Backbone(load_own(name)).views(images, [(-1, True)])[-1, True] for name in ("vector", "maps"))
    assert torch.equal(features.cls, of_maps.avg) and features.patches.shape == (3, 0, 0, 12)
    assert FeatureKind("cls").exists_in(export.spec) and not FeatureKind("avg").exists_in(export.spec)
    with pytest.raises(ValueError, match=r"no patch tokens at layer -1; add settings=.*knn\.pool"):
        FeatureKind("avg").check(export.spec, "knn")


def test_the_spec_describes_the_network(nets):
    nets()
    export = load_own("rows")
    spec = export.spec
    assert (spec.size, spec.patch_size, spec.grid, spec.width) == ((16, 24), 8, (2, 3), 12)
    assert (spec.has_class_token, spec.prefix, spec.depth, spec.label) == (True, 1, 1, "Patches")
    assert (export.mean, export.std, export.crop) == ((0.5,) * 3, (0.25,) * 3, 0.875)
    assert spec.parameters == 12 * 3 * 64 + 12 and spec.flops == 2 * 6 * 12 * 3 * 64


def test_the_digest_depends_on_weights_buffers_preparation_and_code(nets):
    nets()
    first = load_own("maps")
    assert first.digest == load_own("maps").digest
    digests = {first.digest}
    for change in (
        "network.project.weight.data[0, 0, 0, 0] += 1e-6",
        "network.shift[0] += 1",
        "network.std = (1, 1, 1)",
    ):
        nets(f"\n\ndef other():\n    network = Patches()\n    {change}\n    return network\n")
        digests.add(load_own("other").digest)
    nets("# another line\n")
    digests.add(load_own("maps").digest)
    assert len(digests) == 5


SCALE = 1.0


class Chosen(nn.Module):
    """One of two features with the same weights, code and operations."""

    image_size, mean, std = 4, (0.5,) * 3, (0.5,) * 3

    def __init__(self, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        return SCALE * (flat, flat.flip(1))[self.layer]


def test_the_digest_depends_on_values_that_the_code_reads(nets, monkeypatch):
    """Otherwise the second network would get the first one's features and results."""
    layers = [lambda network, images, layer=layer: network(images)[:, layer:][:, :8] for layer in (0, 1)]
    closures = [bound_to(layer) for layer in (0, 1)]
    partials = [partial(read_from, layer=layer) for layer in (0, 1)]
    exports = [held_network(Chosen(layer)) for layer in (0, 1)]
    exports += [held_network(Chosen(), forward) for forward in (*layers, *closures, *partials)]
    for layer in (0, 1):
        configured = Chosen()
        configured.settings = Namespace(layer=layer)
        exports.append(held_network(configured, lambda network, images: network(images)[:, network.settings.layer :]))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    exports += [held_network(Chosen()), held_network(Chosen(), closures[0])]
    assert len({export.digest for export in exports}) == len(exports)
    assert held_network(Chosen()).digest == exports[-2].digest
    nets(changed_network("network.scale = 3"))
    digests = {load_own("other").digest}
    nets("\n".join(["import os", changed_network("network.scale = int(os.environ['SCALE'])")]))
    for scale in ("3", "4", "3"):
        monkeypatch.setenv("SCALE", scale)
        digests.add(load_own("other").digest)
    assert len(digests) == 3


def hooked_resnet(layer: str) -> tuple[nn.Module, Forward]:
    """A network of torchvision whose layer leaves its output in a dictionary, from which it is read."""
    torch.manual_seed(0)
    network, outputs = resnet18(), {}
    network.get_submodule(layer).register_forward_hook(lambda module, inputs, output: outputs.update(maps=output))

    def read(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
        network(images)
        return outputs["maps"].mean((2, 3))[:, :64]

    return network, read


def test_outputs_that_hooks_leave_belong_to_their_images():
    """Of a network that is known to be thread-safe, too: a hook makes threads exchange their features."""
    half = Preparation(mean=(0.5,) * 3, std=(0.5,) * 3)
    exports = [held_network(*hooked_resnet(layer), 32, half) for layer in ("layer1", "layer2", "layer1.1")]
    assert len({export.digest for export in exports}) == 3
    network, read = hooked_resnet("layer2")
    export = held_network(network, read, 32, half)
    backbone = Backbone(export)
    batches = torch.randint(0, 256, (12, 2, 3, 32, 32), dtype=torch.uint8)
    alone = [backbone.views(backbone.prepare(batch), [(-1, True)])[-1, True].cls for batch in batches]
    together = {}

    def compute(number: int) -> None:
        together[number] = backbone.views(backbone.prepare(batches[number]), [(-1, True)])[-1, True].cls

    run_on_core_threads(compute, range(12), 4)
    assert all(torch.equal(together[number], alone[number]) for number in range(12))
    assert held_network(network, read, 32, half).digest == export.digest, "with what the passes left"


def bound_to(layer: int) -> Forward:
    return lambda network, images: read_from(network, images, layer)


def read_from(network: nn.Module, images: torch.Tensor, layer: int) -> torch.Tensor:
    return network(images)[:, layer:][:, :8]


def changed_network(line: str) -> str:
    """Code of a function `other` that changes the network before it returns it."""
    return f"def other():\n    network = Patches()\n    {line}\n    return network\n"


RANDOM = (
    "class R(Patches):\n    def forward(self, x): return super().forward(x + torch.rand(()))\ndef other(): return R()"
)
WRONG = {
    "def other(): return 3": "returns a int; it has to return an nn.Module",
    "def other(): raise KeyError('weights')": "raised an error: KeyError: 'weights'",
    "def other(): return nn.Linear(3, 3)": "the network has no attribute image_size, mean, std; set image_size",
    changed_network(
        "network.mean = (0.5,)"
    ): "mean=(0.5,), std=(0.25, 0.25, 0.25): give whole pixels and three numbers each",
    changed_network("network.mean = (123.675, 116.28, 103.53)"): "103.5299",
    changed_network("network.std = (58.395, 57.12, 57.375)"): "57.375",
    changed_network("network.crop = 2.0"): "crop=2.0: must be a number above 0 and up to 1",
    changed_network("network.image_size = 21"): "give another image_size",
    changed_network(
        "network.forward = lambda x: x"
    ): "returns a Tensor (1, 3, 16, 24) for 1 images; it has to return one vector",
    changed_network("network.forward = lambda x: (None, x, (1, 1))"): "not, or doubly, on a grid of 1 x 1",
    changed_network("network.forward = lambda x: (None, x, None)"): "it has to return one vector",
    changed_network("network.forward = lambda x: 1 / 0"): "fails on images (1, 3, 16, 24): ZeroDivision",
    changed_network("network.image_size = 10**6"): "image_size=1000000",
    changed_network("network.image_size = 24.5"): "image_size=24.5",
    changed_network("network.forward = lambda x: x.new_zeros(len(x), 0)"): "returns (1, 0) values",
    changed_network("network.forward = lambda x: x.mean((2, 3)) * 1j"): "torch.complex64",
    changed_network("network.forward = lambda x: (None, x[..., :2, :2] * 1j, (2, 2))"): "torch.complex64",
    RANDOM: "other features when asked twice",
    changed_network(
        "network.project = nn.Sequential(network.project, nn.BatchNorm2d(12, track_running_stats=False))"
    ): "they must not depend on the batch",
    "other = 5": "has no function 'other'",
    "import nowhere": "toynets cannot be imported (ModuleNotFoundError: No module named 'nowhere')",
}


@pytest.mark.parametrize("code", WRONG)
def test_wrong_functions_and_networks_are_refused(code, nets):
    nets(code)
    message = refusal(load_own, "other")
    assert WRONG[code] in message and "module:toynets:other" in message


@pytest.mark.parametrize("reference", ["module:", "module:toynets", "module:toynets:", "module::maps"])
def test_an_incomplete_reference_is_refused_with_its_form(reference):
    with pytest.raises(ValueError, match="write module:PACKAGE:FUNCTION"):
        load_frozen(reference)


def test_images_and_layers_that_the_network_cannot_take_are_refused(nets):
    nets(changed_network("network.forward = lambda x, old=network.forward: old(x[..., :16, :24])"))
    network = load_own("other").build()
    with pytest.raises(ValueError, match=r"returns \(6, 12\) tokens on a grid of \(2, 3\) for images of \(32, 32\) px"):
        network(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="only one layer: use layer=-1"):
        network(torch.zeros(1, 3, 16, 24), layers=(-2,))


def test_uses_that_need_a_vit_refuse_own_networks(nets):
    nets()
    with pytest.raises(ValueError, match="frozen evaluation alone takes it, this needs a ViT"):
        load("module:toynets:maps")
    with pytest.raises(AttributeError, match="is a network of your own, without the tensors of a ViT-export"):
        _ = load_own("maps").tensors


def test_passes_of_several_threads_do_not_overlap(nets):
    """The network keeps state between two lines of one pass."""
    nets(
        "\n\ndef keeping():\n    return Keeping()\n\n\nclass Keeping(Patches):\n    def forward(self, images):\n"
        "        import time\n        self.kept = images\n        time.sleep(0.002)\n"
        "        return super().forward(self.kept)\n"
    )
    network, features = load_own("keeping").build(), {}
    images = {number: torch.full((1, 3, 16, 24), float(number)) for number in range(8)}

    def encode(number: int) -> None:
        features[number] = network(images[number])[0]

    started = time.perf_counter()
    run_on_core_threads(encode, list(images), threads=4)
    assert all(torch.equal(features[number], network(images[number])[0]) for number in images)
    assert time.perf_counter() - started < 10


def test_weights_that_every_call_draws_again_are_noted(nets):
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
    assert "called again" in load_own("fresh").assumed[0]
    for name in ("maps", "seeded"):
        assert load_own(name).assumed == ()


def test_an_output_that_seems_to_be_a_classifiers_is_noted(nets):
    nets(
        """
class Classifier(Patches):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 5)
    def forward(self, images):
        return self.fc(super().forward(images)[1].mean((2, 3)))
def classes():
    torch.manual_seed(3)
    return Classifier()
"""
    )
    export = load_own("classes")
    assert export.spec.width == 5 and "fc (12 -> 5)" in export.assumed[0]
