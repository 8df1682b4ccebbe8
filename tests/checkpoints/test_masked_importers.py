"""Files of CAE, MaskFeat, CAN and their families in other official layouts, and refusals."""

import re
from dataclasses import replace

import pytest
import torch
from examples import EXAMPLES
from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.importing import import_file
from checkpoints.resolve import detect, load
from engine.extensions import load_extension

NECK = (
    (r"pretext_neck\.regressor_blocks\.", "regresser.regressor_blocks."),
    (r"pretext_neck\.norm\.", "regresser.norm."),
    (r"pretext_neck\.norm2\.", "decoder.norm."),
    (r"pretext_neck\.", "decoder."),
)


def imported(key: str, tree: dict[str, Tensor] | None = None, **options) -> ViTExport:
    example = EXAMPLES[key]()
    example = replace(example, tree=tree or example.tree, options=replace(example.options, **options))
    return import_file(load_extension("importers", example.importer), example.file(), example.options)


def same_network(first: ViTExport, second: ViTExport) -> bool:
    equal = (torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    return first.spec == second.spec and first.tensors.keys() == second.tensors.keys() and all(equal)


def newer_cae_names(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """CAE's names in Atten4Vis/CAE a7fd162 (tests/golden/cae/README.md): the file keeps a copy of the encoder."""
    renamed = {}
    for name, tensor in tree.items():
        for old, new in NECK:
            name = re.sub(rf"^model\.{old}", f"model.{new}", name)
        renamed[name] = tensor
    copies = {name: tensor for name, tensor in tree.items() if name.startswith("model.encoder.")}
    renamed |= {
        name.replace("model.encoder.", "model.alignment_encoder."): tensor + 1 for name, tensor in copies.items()
    }
    return renamed | {"model.rd_pos_embed": torch.zeros(1, 4, 8)}


def test_both_repositories_of_cae_are_read():
    tree = newer_cae_names(EXAMPLES["cae"]().tree)
    assert "model.regresser.norm.weight" in tree and "model.decoder.norm.weight" in tree
    assert detect(replace(EXAMPLES["cae"](), tree=tree).file()) == "cae"
    assert same_network(imported("cae", tree), imported("cae"))


def test_cae_may_have_a_projection_and_no_layer_scale():
    """As trained with another width of the decoder and init_values=0."""
    tree = {name: tensor for name, tensor in EXAMPLES["cae"]().tree.items() if "gamma" not in name}
    width = len(tree["model.encoder.norm.bias"])
    for name in ("encoder_to_decoder", "encoder_to_decoder_norm"):
        tree |= {f"model.{name}.weight": torch.zeros(8, width), f"model.{name}.bias": torch.zeros(8)}
    spec = imported("cae", tree).spec
    assert not spec.layer_scale and imported("cae").spec == replace(spec, layer_scale=True)


@pytest.mark.parametrize("key", ["beit", "data2vec", "simmim"])
def test_beits_family_may_have_no_layer_scale(key):
    """As trained with layer_scale_init_value=0 (run_beit_pretraining.py, run_cyclical.py)."""
    tree = {name: tensor for name, tensor in EXAMPLES[key]().tree.items() if "gamma" not in name}
    assert imported(key, tree).spec == replace(imported(key).spec, layer_scale=False)
    tree |= {name: tensor for name, tensor in EXAMPLES[key]().tree.items() if name.endswith("blocks.1.gamma_2")}
    with pytest.raises(ValueError, match=r"blocks\.1\.gamma_2") as error:
        imported(key, tree)
    assert "\n" not in str(error.value)


def test_the_statistics_of_batch_norms_in_ibots_head_are_kept():
    """With norm_in_head=bn (models/head.py:65-105). Without them fine-tuning would compute a layer norm."""
    tree = {
        re.sub(r"(head\.mlp)\.(2|4)\.", lambda at: f"{at[1]}.{int(at[2]) * 3 // 2}.", name): tensor
        for name, tensor in EXAMPLES["ibot"]().tree.items()
    }
    kinds = ("weight", "bias", "running_mean", "running_var")
    norms = {
        f"mlp.{number}.{kind}": torch.rand(len(tree["teacher.head.mlp.0.bias"])) for number in (1, 4) for kind in kinds
    }
    extra = imported("ibot", tree | {f"teacher.head.{name}": tensor for name, tensor in norms.items()}).extra
    assert all(torch.equal(extra[f"projector.{name}"], tensor) for name, tensor in norms.items())
    assert len(extra) == 2 * 3 + len(norms)


@pytest.mark.parametrize("change", ["missing", "shorter"])
def test_a_bias_of_values_that_does_not_fit_is_refused(change):
    tree, name = dict(EXAMPLES["cae"]().tree), "model.encoder.blocks.0.attn.v_bias"
    tree = {n: t for n, t in tree.items() if n != name} | ({name: tree[name][1:]} if change == "shorter" else {})
    with pytest.raises(
        ValueError, match=r"^cae.pth as cae: blocks.0.attn.q_bias and its v_bias do not fit each other$"
    ):
        imported("cae", tree)


def test_an_encoder_of_can_alone_is_recognised_by_its_name_only():
    """Without its other networks its tensors are those of MAE."""
    dropped = ("model.mask_token", "model.projection_head", "model.noise_pe_mlp", "model.decoder")
    tree = {name: tensor for name, tensor in EXAMPLES["can"]().tree.items() if not name.startswith(dropped)}
    assert same_network(imported("can", tree), imported("can"))
    with pytest.raises(ValueError, match="mae or moca"):
        detect(replace(EXAMPLES["can"](), tree=tree).file())


def test_a_slowfast_file_with_its_optimiser_is_imported(tmp_path):
    """As utils/checkpoint.py:113-145 writes it, with mixed precision: the file's suffix is .pyth."""
    example = EXAMPLES["maskfeat"]()
    state = {name.removeprefix("model_state."): tensor for name, tensor in example.tree.items()}
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}
    saved = {
        "epoch": 299,
        "model_state": state,
        "optimizer_state": optimizer,
        "cfg": "TASK: ssl\n",
        "scaler_state": {"scale": 1024.0, "_growth_tracker": torch.tensor(2)},
    }
    torch.save(saved, tmp_path / "ssl_checkpoint_epoch_00300.pyth")
    export = load(tmp_path / "ssl_checkpoint_epoch_00300.pyth", example.options)
    assert same_network(export, imported("maskfeat")) and export.facts["epochs"] == 300


@pytest.mark.parametrize("name", ["decoder_embed.weight", "blocks.0.attn.pool_q.weight", "pos_embed_spatial"])
def test_other_networks_of_slowfast_are_refused(name):
    """MAE and video models of the same code."""
    tree = EXAMPLES["maskfeat"]().tree | {f"model_state.{name}": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match="neither used nor known to be dropped"):
        imported("maskfeat", tree)
