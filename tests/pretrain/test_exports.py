"""The export of a method equals the import of the official code's file with the same weights."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from small_trainings import small_recipe
from torch import Tensor, nn

from checkpoints.import_options import ImportOptions
from checkpoints.importing import import_file
from checkpoints.reading import ForeignFile
from engine.extensions import load_extension
from pretrain.loop.exporting import exports_of
from pretrain.loop.trainer import build
from pretrain.method import Method

Tensors = dict[str, Tensor]


def under(prefix: str, tensors: Mapping[str, Tensor] | nn.Module) -> Tensors:
    """Tensors with `prefix` before their names."""
    tensors = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {prefix + name: tensor for name, tensor in tensors.items()}


def beit(method: Method) -> Tensors:
    state = method.state_dict()
    rest = {name: state[name] for name in ("mask_token", "lm_head.weight", "lm_head.bias")}
    return under("model.", method.vit.trunk) | under("model.", rest)


def cae(method: Method) -> Tensors:
    trunk = dict(method.vit.trunk.state_dict())
    for name in [name for name in trunk if name.endswith("attn.qkv.bias")]:
        queries, keys, values = trunk.pop(name).chunk(3)
        assert (keys == 0).all()
        trunk |= {name.replace("qkv.bias", "q_bias"): queries, name.replace("qkv.bias", "v_bias"): values}
    trunk = {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): tensor for name, tensor in trunk.items()}
    rest = under("model.pretext_neck.head.", method.decoder.head) | {"model.mask_token": method.regressor.mask_token}
    return under("model.encoder.", trunk) | rest


def data2vec(method: Method) -> Tensors:
    trunks = under("model.", method.student.trunk) | under("model_ema.", method.teacher.trunk)
    return trunks | under("model.lm_head.", method.lm_head)


def extrema(method: Method) -> Tensors:
    tree = {}
    for branch, official in (("online", "base_encoder"), ("momentum", "momentum_encoder")):
        for name, tensor in method.get_submodule(branch).state_dict().items():
            name = name.removeprefix("vit.").removeprefix("trunk.").replace("class_query", "cls_token")
            name = name.replace("class_attention", "blocks_token").replace("projector", "head")
            tree[f"state_dict.{official}.{name}"] = tensor
    return tree


def lut(method: Method) -> Tensors:
    return under("model.", method.base.vit.trunk) | under("model_ema.ema.", method.teacher["vit"].trunk)


def mae(method: Method) -> Tensors:
    return under("model.", method.autoencoder.vit.trunk)


def simmim(method: Method) -> Tensors:
    network = method.predictor
    rest = {"encoder.mask_token": network.mask_token, **under("decoder.0.", network.pixels[0])}
    return under("model.encoder.", network.vit.trunk) | under("model.", rest)


def lut_on_simmim(method: Method) -> Tensors:
    """LUT's code has no file of SimMIM; the conventions are SimMIM's."""
    return under("model.encoder.", method.base.vit.trunk)


# Method, its recipe, the importer, the branch, the official file's tensors.
CASES: list[tuple[str, str, str, str, Callable[[Method], Tensors]]] = [
    ("beit", "smoke", "beit", "encoder", beit),
    ("cae", "smoke", "cae", "encoder", cae),
    ("data2vec", "smoke", "data2vec", "student", data2vec),
    ("data2vec", "smoke", "data2vec", "teacher", data2vec),
    ("extrema", "smoke", "extrema", "momentum", extrema),
    ("lut", "smoke", "lut", "student", lut),
    ("lut", "smoke", "lut", "teacher", lut),
    ("lut", "smoke_simmim", "simmim", "student", lut_on_simmim),
    ("mae", "smoke", "mae", "encoder", mae),
    ("simmim", "smoke", "simmim", "encoder", simmim),
]


@pytest.mark.parametrize(("name", "key", "importer", "branch", "official"), CASES)
def test_an_export_equals_the_import_of_the_official_file(name, key, importer, branch, official, tmp_path):
    method = build(load_extension("methods", name), small_recipe(name, key), seed=0)
    with torch.no_grad():  # so that the branches differ
        for parameter_name, parameter in method.named_parameters():
            if not parameter_name.endswith("pos_embed"):
                parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1))
    facts = {"args.imagenet_default_mean_and_std": True} if name == "beit" else {}
    tensors = {parameter_name: tensor.detach() for parameter_name, tensor in official(method).items()}
    file = ForeignFile(path=tmp_path, sha256="0" * 64, tensors=tensors, facts=facts)
    exports = {export.facts["branch"]: export for _, export in exports_of(method, {})}
    export = exports[branch]
    has_branches = "teacher" in dict(method.named_children()) and importer == name
    options = ImportOptions(
        heads=None if export.spec.relative_position != "none" else export.spec.heads,
        branch=branch if has_branches else None,
    )
    imported = import_file(load_extension("importers", importer), file, options)
    assert replace(imported.spec, architecture=export.spec.architecture) == export.spec
    assert imported.preparation == export.preparation
    assert imported.tensors.keys() == export.tensors.keys()
    assert all(torch.equal(tensor, export.tensors[name]) for name, tensor in imported.tensors.items())
    assert all(torch.equal(tensor, export.extra[name]) for name, tensor in imported.extra.items())
