"""Discovery end to end on generated scenes: keys, the extraction shared by methods, metrics, image sets, errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import box_iou
from toy_scenes import PLAIN, ROTARY, SPECS, export_of, workspace

from checkpoints.backbone import Backbone
from checkpoints.resolve import load
from downstream.data.scenes import open_scenes, tiny_folder
from downstream.frozen.task import backbone_of
from downstream.tasks.discovery import PROTOCOLS, discover_together
from engine.tasks import Outcome

LOST = PROTOCOLS["discovery@smoke"].task
TOKENCUT = PROTOCOLS["discovery@tokencut"].task


def run_task(folder, url="tiny-trainval:", task=LOST, **settings) -> Outcome:
    return task.run(export_of(), workspace(folder, url, **{"limit": None, **settings}))


@pytest.mark.parametrize("spec", SPECS | ROTARY)
def test_keys_are_the_key_projection_of_the_last_block(spec, tmp_path):
    """As in the official codes, which read them by a hook; here at another size than the network's own."""
    backbone = backbone_of(export_of((SPECS | ROTARY)[spec]), workspace(tmp_path, "tiny-trainval:"))
    images = torch.randn(2, 3, 40, 24, generator=torch.Generator().manual_seed(0))
    keys = backbone.keys(images)
    assert keys.shape[:3] == (2, 5, 3)
    network, inputs_of_block = backbone.for_images(images).vit, []
    attention = network.trunk.blocks[-1].attn
    attention.register_forward_pre_hook(lambda module, inputs: inputs_of_block.append(inputs[0]))
    with torch.no_grad():
        network(images)
        patches = inputs_of_block[0][:, -15:]
        expected = attention.k_proj(patches) if attention.qkv is None else attention.qkv(patches).chunk(3, dim=-1)[1]
    assert torch.allclose(keys.flatten(1, 2), expected, atol=1e-5)


def test_methods_share_the_pass_over_the_images(tmp_path, monkeypatch):
    alone = [run_task(tmp_path, task=task, limit=6) for task in (LOST, TOKENCUT)]
    calls, keys = [], Backbone.keys
    monkeypatch.setattr(Backbone, "keys", lambda self, images: calls.append(1) or keys(self, images))
    together = dict(discover_together([LOST, TOKENCUT], export_of(), workspace(tmp_path, "tiny-trainval:", limit=6)))
    assert len(calls) == 6
    for place, result in together.items():
        assert dict(result.metrics) == dict(alone[place].metrics) and result.facts == alone[place].facts
    assert not np.array_equal(alone[0].arrays["boxes"], alone[1].arrays["boxes"])


def test_corloc_follows_from_the_boxes(tmp_path):
    """Difficult objects count; images without objects do not."""
    scenes, result = open_scenes("tiny-trainval:", "val", tmp_path / "cache"), run_task(tmp_path)
    hits = []
    for box, objects in zip(result.arrays["boxes"], scenes.listing.objects, strict=True):
        corners = torch.tensor([entry["bbox"] for entry in objects]).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        hits.append(float(box_iou(torch.tensor(box)[None].float(), corners).max() >= 0.5) if len(objects) else np.nan)
    assert np.array_equal(result.metrics["CorLoc"].per_image, hits, equal_nan=True) and np.isnan(hits).sum() == 1
    assert result.numbers["CorLoc"] == pytest.approx(100 * np.nanmean(hits))
    assert result.facts["floor"]["metrics"]["CorLoc"] == 0 and result.facts["images with objects"] == 23


def test_a_square_of_different_keys_is_discovered():
    keys = torch.full((8, 12, 3), -1.0)
    keys[2:5, 6:9] = 1.0
    for task in (LOST, TOKENCUT):
        assert task.find_box(keys, 8, (64, 96)).tolist() == [48, 16, 72, 40]


def test_sets_in_the_layouts_of_voc_and_coco(tmp_path):
    voc, coco = tiny_folder("trainval", tmp_path), tiny_folder("coco", tmp_path)
    xml = next(path for path in sorted((voc / "Annotations").iterdir()) if "<object>" in path.read_text())
    xml.write_text(xml.read_text().replace("</bndbox>", "</bndbox><difficult>1</difficult>"))
    difficult = open_scenes(f"trainval:{voc}", "val", tmp_path)
    assert not any(entry["iscrowd"] for objects in difficult.listing.objects for entry in objects)
    with pytest.raises(ValueError, match=r"COCO 20k, put coco_20k_filenames.txt"):
        open_scenes(f"trainval:{coco}", "val", tmp_path)
    lines = [f"train2014/COCO_train2014_{number:012d}.jpg" for number in (3, 9, 1)]
    (coco / "coco_20k_filenames.txt").write_text("\n".join(lines) + "\n")
    scenes = open_scenes(f"trainval:{coco}", "val", tmp_path)
    assert scenes.listing.images == tuple(f"train2017/{number:012d}.jpg" for number in (1, 3, 9))
    assert any(entry["iscrowd"] for objects in scenes.listing.objects for entry in objects)
    assert run_task(tmp_path, f"trainval:{coco}").arrays["boxes"].shape == (3, 4)
    (coco / "coco_20k_filenames.txt").write_text("COCO_train2014_000000009999.jpg\n")
    with pytest.raises(ValueError, match=r"lacks 1 of 1 images of coco_20k_filenames.txt: 9999"):
        open_scenes(f"trainval:{coco}", "val", tmp_path)
    (voc / "ImageSets/Main/trainval.txt").unlink()
    with pytest.raises(ValueError, match=r"trainval\.txt"):
        open_scenes(f"trainval:{voc}", "val", tmp_path)


def test_raw_pixels_and_images_of_another_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no keys"):
        LOST.check_network(load("pixels:8").spec)
    voc = tiny_folder("trainval", tmp_path)
    xml = sorted((voc / "Annotations").iterdir())[2]
    xml.write_text(xml.read_text().replace("<width>96", "<width>97"))
    with pytest.raises(ValueError, match=f"{xml.stem}.jpg: the image is 96 x 64 pixels") as error:
        run_task(tmp_path, f"trainval:{voc}")
    assert "\n" not in str(error.value)
    result = run_task(tmp_path, f"trainval:{voc}", skip_bad=True)
    assert np.isnan(result.arrays["boxes"][2]).all() and len(result.facts["val"]["skipped"]) == 1


def test_non_finite_features_are_named(tmp_path):
    export = export_of()
    export.tensors["blocks.2.attn.qkv.weight"].fill_(float("nan"))
    with pytest.raises(ValueError, match=r"000000\.jpg: its features are not finite") as error:
        LOST.run(export, workspace(tmp_path, "tiny-trainval:"))
    assert "\n" not in str(error.value)


def test_boxes_of_padded_images_end_at_the_image_border(tmp_path):
    result = LOST.run(
        export_of(replace(PLAIN, patch_size=14, image_size=28)), workspace(tmp_path, "tiny-trainval:", limit=4)
    )
    assert (result.arrays["boxes"][:, 2:] <= [96, 64]).all()
