"""Files of Web-SSL, AIMv2's native encoder and Franca, read by importers that test_importers.py tests."""

from dataclasses import replace

import pytest
import torch
from recent_examples import IMAGES, aimv2, aimv2_native, franca, web_dino, web_mae
from recorded_example import Example

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.importing import HEADS, import_file
from checkpoints.resolve import detect
from checkpoints.spec import CLIP_MEAN, IMAGENET_MEAN
from engine.extensions import load_extension

MAKE = {"Web-DINO": web_dino, "Web-MAE": web_mae, "AIMv2 native": aimv2_native}


def imported(example: Example, options: ImportOptions | None = None) -> ViTExport:
    return import_file(load_extension("importers", example.importer), example.file(), options or example.options)


@pytest.mark.parametrize("name", MAKE)
def test_files_are_recognised_and_equal_the_reference_network(name):
    example = MAKE[name]()
    assert detect(example.file()) == example.importer
    export = imported(example)
    ((ours, expected),) = example.recorded(export)
    assert ours.shape == expected.shape and (ours - expected).abs().max() < 1e-6 * expected.abs().max()
    facts = export.facts
    assert facts["used_tensors"] + sum(facts["dropped"].values()) == len(example.tree)


def test_published_widths_have_their_number_of_heads():
    """facebookresearch/webssl, dinov2/vision_transformer.py and mae/mae.py."""
    assert {width: HEADS[width] for width in (1024, 1536, 2688, 3072, 3584, 4096)} == {
        1024: 16,
        1536: 24,
        2688: 21,
        3072: 24,
        3584: 28,
        4096: 32,
    }


def test_aimv2_uses_clips_statistics_and_heads_of_128_channels():
    export = imported(aimv2())
    assert export.mean == CLIP_MEAN and export.crop == 1.0 and export.spec.norm_eps == 1e-5
    assert imported(aimv2(), ImportOptions(heads=2, statistics="imagenet")).mean == IMAGENET_MEAN
    by_default = imported(aimv2(), ImportOptions())
    assert by_default.spec.heads == 1  # the example's width is below 128
    notes = " ".join(by_default.facts["assumed"])
    assert "1 heads" in notes
    assert "'clip'" in notes
    assert "assumed" not in imported(aimv2(), ImportOptions(heads=2, statistics="clip", image_size=16)).facts


def test_aimv2s_native_encoder_is_imported_for_one_image_size():
    export = imported(aimv2_native(), ImportOptions(heads=2, image_size=(16, 24)))
    assert (export.spec.grid, export.spec.position) == ((4, 6), "sincos_column_first")
    assert imported(aimv2_native(), ImportOptions(heads=2)).spec.size == (224, 224)
    with pytest.raises(ValueError, match="the position table is for a 4 x 6 grid and its rule is 'fixed'"):
        export.at_size(32)


def test_a_rasa_head_or_a_bare_teacher_is_recognised_as_franca():
    example = franca()
    without_head = {name: None for name in example.tree if "rasa" in name}
    in_backbone = {name.replace("teacher.", "teacher.backbone."): tensor for name, tensor in example.tree.items()}
    assert detect(example.file(**without_head)) == detect(replace(example, tree=in_backbone).file()) == "franca"
    without_head_in_backbone = {name: None for name in in_backbone if "rasa" in name}
    plain = replace(example, tree=in_backbone).file(**without_head_in_backbone)
    assert detect(plain) == "dinov2"
    as_dinov2 = import_file(load_extension("importers", "dinov2"), plain, example.options)
    with torch.no_grad():
        assert torch.equal(as_dinov2.build()(IMAGES.float())[0], imported(example).build()(IMAGES.float())[0])
