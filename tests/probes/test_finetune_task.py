"""Fine-tuning on image sets so small that a training takes a second."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from timm.data import create_transform
from toy_exports import coloured_folder, export_of_size, workspace

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.extensions import load_extension
from engine.seeding import seeded
from engine.training import interruptions
from imagesets.augmentation import posterize
from imagesets.decoding import UnreadableImage
from imagesets.sets import open_set
from imagesets.transforms import Photo
from probes.finetune import trainer
from probes.finetune.classifier import Classifier
from probes.finetune.settings import FinetuneSettings
from probes.finetune.trainer import Training
from probes.finetune.training_groups import GroupPlan, MixedGroups, training_transform
from probes.tasks.finetune import PROTOCOLS, Finetune

QUICK = Finetune(lr=1e-3, lr_rule="absolute", batch=32, epochs=2, warmup_epochs=1, drop_path=0.0, mixed_together=16)


def relative_export() -> ViTExport:
    """A random two-block BEiT with a shared table of relative positions."""
    spec = ViTSpec(
        architecture="beit_base_patch16_224",
        image_size=16,
        patch_size=4,
        width=32,
        depth=2,
        heads=2,
        mlp_hidden=64,
        position="none",
        class_position=False,
        relative_position="shared",
        layer_scale=True,
        position_resize="relative_spline",
    )
    torch.manual_seed(0)
    vit = ViT(spec)
    torch.nn.init.normal_(vit.trunk.rel_pos_bias.relative_position_bias_table)
    return ViTExport.from_vit(vit, Preparation())


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The outcome of QUICK on 100 digits, 16 images at a time, without loader processes."""
    return QUICK.run(export_of_size(16), quick_space(tmp_path_factory.mktemp("quick")))


def quick_space(folder: Path, **settings):
    return workspace(folder, "digits:", **{"limit": 100, "batch_size": 16, "workers": 0, **settings})


def history(outcome) -> list[float]:
    return [entry["loss"] for entry in outcome.facts["history"]]


def groups_of(task: Finetune, images: int = 100, size: int = 16) -> MixedGroups:
    train = open_set("digits:", "train").limited(images)
    return MixedGroups(
        image_set=train,
        plan=GroupPlan(count=len(train), batch=task.batch, group=task.mixed_together, seed=0),
        steps=range(6),
        groups=range(task.batch // task.mixed_together),
        settings=task,
        transform=training_transform(task, size, (0.5,) * 3, (0.5,) * 3),
    )


def test_an_epoch_shows_every_image_once_and_drops_the_rest():
    plan = GroupPlan(count=70, batch=32, group=8, seed=0)
    assert (plan.steps_per_epoch, plan.groups) == (2, 4)
    epochs = [
        np.array([index for step in steps for group in range(4) for index, _ in plan.images(step, group)])
        for steps in ((0, 1), (2, 3))
    ]
    assert all(len(np.unique(epoch)) == 64 for epoch in epochs) and (epochs[0] != epochs[1]).any()


def test_repeats_of_an_image_are_in_different_groups():
    plan = GroupPlan(count=60, batch=30, group=10, seed=0, repeats=3)
    groups = [plan.images(step, group) for step in range(2) for group in range(3)]
    assert all(len({index for index, _ in group}) == 10 for group in groups)
    draws = [draw for group in groups for draw in group]  # (image, repeat)
    assert len(draws) == len(set(draws)) == 60 and len({index for index, _ in draws}) == 20


def test_augmentation_depends_on_the_index_alone():
    groups = groups_of(QUICK)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, other = groups[3], groups[1]
    again = groups_of(QUICK)[3]
    assert torch.equal(first.images, again.images) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.images, other.images)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was advanced"


def test_mixed_targets_are_smoothed_probabilities():
    mixed = groups_of(QUICK)[0]
    assert mixed.images.shape == (16, 3, 16, 16) and mixed.targets.shape == (16, 10)
    assert torch.allclose(mixed.targets.sum(dim=1), torch.ones(16)) and mixed.targets.min() >= 0.1 / 10 - 1e-6
    plain = groups_of(replace(QUICK, mixup=0.0, cutmix=0.0, smoothing=0.0))[0]
    assert sorted(plain.targets.unique().tolist()) == [0.0, 1.0]


def test_augmentation_equals_timms():
    """The whole chain of transforms, bit for bit."""
    ours, image = training_transform(QUICK, 16, (0.5,) * 3, (0.5,) * 3), open_set("tiny:", "train").image(0)
    theirs = create_transform(
        16,
        is_training=True,
        scale=(QUICK.crop_scale, 1.0),
        hflip=QUICK.flip,
        color_jitter=None,
        auto_augment=QUICK.policy,
        interpolation="bicubic",
        re_prob=QUICK.erase,
        re_mode="pixel",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    for number in range(20):
        augmented = []
        for transform in (ours, theirs):
            with seeded(0, number):
                augmented.append(transform(image))
        assert torch.equal(*augmented)


def test_randaugment_works_at_magnitude_ten():
    """The recipes' magnitude of 9 +- 0.5 sometimes posterizes to no bits, which Pillow 13 refuses."""
    image = Image.new("RGB", (4, 4), (200, 100, 50))
    assert posterize(image, 0).getpixel((0, 0)) == (0, 0, 0) and posterize(image, 1).getpixel((0, 0)) == (128, 0, 0)
    strong = training_transform(replace(QUICK, policy="rand-m10-inc1-n8"), 16, (0.5,) * 3, (0.5,) * 3)
    for _ in range(20):
        assert strong(open_set("digits:", "train").image(0)).isfinite().all()


def test_the_fast_decoder_takes_the_same_crops(tmp_path):
    """Windows, flips and policies equal those of exact decoding, and pixels differ as decoders do, also if a JPEG is
    decoded at a quarter of its size."""
    (tmp_path / "train/a").mkdir(parents=True)
    waves = np.add.outer(np.sin(np.arange(300) / 20), np.cos(np.arange(400) / 30))
    pixels = np.stack([60 * waves + shift for shift in (120, 128, 134)], -1).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "train/a/1.jpg", quality=95)
    photo = Photo(open_set(f"folder:{tmp_path}", "train"), 0)
    task = replace(QUICK, erase=0.0, policy="rand-m1-n1")
    for size in (32, 160):
        transform, differences = training_transform(task, size, (0.0,) * 3, (1.0,) * 3), []
        for number in range(20):
            with seeded(0, number):
                expected = transform(photo.image)
            with seeded(0, number):
                differences.append(255 * (transform(photo.pil_image("fast")) - expected).abs())
        assert 0 < torch.stack(differences).mean() < 1.5
        assert max(difference.quantile(0.9) for difference in differences) < 5


def test_the_number_of_accumulated_parts_does_not_change_the_training(export, tmp_path, quick):
    many_parts = QUICK.run(export, quick_space(tmp_path, batch_size=4))
    assert [outcome.facts["batch"]["accumulated"] for outcome in (quick, many_parts)] == [2, 8]
    assert history(many_parts) == pytest.approx(history(quick), rel=1e-5)


def test_loader_processes_change_no_bit(export, tmp_path, quick):
    with_workers = QUICK.run(export, quick_space(tmp_path, workers=2))
    assert history(quick) == history(with_workers) and quick.metrics == with_workers.metrics


@pytest.mark.slow
@pytest.mark.parametrize("select", [pytest.param("last", marks=pytest.mark.exhaustive), "holdout", "val"])
def test_the_chosen_epoch_is_reported(export, tmp_path, select):
    task = replace(PROTOCOLS["finetune@smoke"].task, epochs=3, select=select, holdout=0.2)
    outcome = task.run(export, workspace(tmp_path, "digits:", limit=200))
    facts, selection = outcome.facts, "holdout" if select == "holdout" else "val"
    scores = [entry[selection] for entry in facts["history"]]
    assert facts["best_epoch"] == 1 + int(np.argmax(scores)) and facts["last_epoch"] == 3
    assert facts["epoch"] == (3 if select == "last" else facts["best_epoch"])
    assert outcome.numbers["top1"] == pytest.approx(100 * outcome.metrics["top1"].per_image.mean())
    labels = open_set("digits:", "val").limited(200).labels
    assert np.array_equal(outcome.arrays["predicted"] == labels, outcome.metrics["top1"].per_image == 1)
    assert set(outcome.metrics) == {"top1", "top5", "top1_last", "top5_last", "nll"} and facts["warnings"] == []
    chosen = {name for name, metric in outcome.metrics.items() if metric.chosen_on_val}
    assert chosen == ({"top1", "top5", "nll"} if select == "val" else set())
    assert facts["train"]["images"] == (160 if select == "holdout" else 200)
    if select != "holdout":
        assert outcome.numbers["top1_last"] == pytest.approx(scores[-1])
        assert outcome.numbers["top1"] == pytest.approx(scores[-1] if select == "last" else max(scores))


@pytest.mark.slow
def test_averaged_weights_are_evaluated(export, tmp_path):
    """With a decay of nearly one they stay at their initial values, whatever the training learns."""
    task, space = replace(PROTOCOLS["finetune@smoke"].task, epochs=3), workspace(tmp_path, "digits:", limit=250)
    plain, frozen = task.run(export, space), replace(task, average=1 - 1e-9).run(export, space)
    assert history(plain) == history(frozen)
    (start,) = {entry["val"] for entry in frozen.facts["history"]}
    assert start < plain.numbers["top1"] - 10


def test_bfloat16_trains(export, tmp_path, quick):
    bfloat16 = QUICK.run(export, quick_space(tmp_path, precision="bfloat16"))
    assert history(bfloat16) != history(quick) and history(bfloat16) == pytest.approx(history(quick), rel=0.02)


def test_rates_decay_by_layer(export):
    space = workspace(Path("unused"), "digits:")
    plan, micro_batch_size = QUICK.plan(100, space)
    classifier = Classifier(export, 10, QUICK, seed=0)
    training = Training(classifier, QUICK, space, plan=plan, micro_batch_size=micro_batch_size, folder=Path())
    training.step = 3
    training.update(iter([groups_of(QUICK)[0], groups_of(QUICK)[1]]))
    rates = {name: group["lr"] for group in training.optimizer.param_groups for name in group["names"]}
    peak = training.schedule.at(QUICK.peak, replace(training.progress, step=3))
    assert rates["head.weight"] == peak and rates["fc_norm.bias"] == peak
    assert rates["blocks.1.mlp.fc1.weight"] == pytest.approx(peak * 0.65)
    assert rates["pos_embed"] == pytest.approx(peak * 0.65**3)


def test_the_initial_head_has_the_sources_deviation(export):
    mae = Classifier(export, 1000, FinetuneSettings(head_std=2e-5), seed=0).head
    beit = Classifier(export, 1000, FinetuneSettings(head_std=0.02, head_scale=1e-3), seed=0).head
    for head in (mae, beit):
        assert head.weight.std().item() == pytest.approx(2e-5, rel=0.03) and not head.bias.any()
    again = Classifier(export, 1000, FinetuneSettings(head_std=2e-5), seed=1).head
    assert not torch.equal(mae.weight, again.weight)


def test_relative_position_tables_are_copied_or_shared():
    export, images = relative_export(), torch.randn(2, 3, 16, 16)
    copied, shared = (
        Classifier(export, 5, FinetuneSettings(tables=tables), seed=0).eval() for tables in ("per_block", "shared")
    )
    assert torch.allclose(copied.features(images), shared.features(images), atol=1e-5)
    tables = [name for name, _ in copied.timm_parameters() if name.endswith("bias_table")]
    assert tables == [f"blocks.{block}.attn.relative_position_bias_table" for block in range(2)]
    assert [name for name, _ in shared.timm_parameters() if name.endswith("bias_table")] == [
        "rel_pos_bias.relative_position_bias_table"
    ]


def test_a_network_with_rmsnorm_gets_an_rmsnorm_after_pooling():
    spec = load_extension("methods", "capi").RECIPES["smoke"].spec
    classifier = Classifier(ViTExport.from_vit(ViT(spec), Preparation()), 5, FinetuneSettings(), seed=0).eval()
    images = torch.randn(2, 3, 16, 16)
    patches = classifier.vit(images)[0][:, spec.registers :].mean(dim=1)
    assert [name for name, _ in classifier.timm_parameters() if "fc_norm" in name] == ["fc_norm.weight"]
    expected = torch.nn.functional.rms_norm(patches, (spec.width,), eps=spec.norm_eps)
    torch.testing.assert_close(classifier.features(images), expected)


def test_a_missing_projector_is_an_error_that_names_the_option(export, tmp_path):
    with pytest.raises(ValueError, match=r"no projector.* settings=.*semi\.projector"):
        replace(QUICK, pool="cls", projector=True).run(export, workspace(tmp_path, "digits:", limit=100))


def test_training_and_evaluation_have_separate_interpolations(export, tmp_path, quick):
    """The recorded transform is that of evaluation, and it does not change the training."""
    space = quick_space(tmp_path)
    bilinear_evaluation = replace(QUICK, interpolation="bilinear").run(export, space)
    assert bilinear_evaluation.facts["transform"] == "resize18-bilinear_crop16_exact" != quick.facts["transform"]
    assert history(bilinear_evaluation) == history(quick)
    assert history(replace(QUICK, train_interpolation="bilinear").run(export, space)) != history(quick)


def test_a_divergence_is_an_error_and_the_training_resumes_before_it(export, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(interruptions, "SAVE_SHARE", 1e9)
    forward = Classifier.forward
    steps = iter(range(100))
    monkeypatch.setattr(
        Classifier, "forward", lambda self, x: forward(self, x) * (float("nan") if next(steps) > 7 else 1)
    )
    space = workspace(tmp_path, "digits:", limit=100, batch_size=4)
    message = refusal(QUICK.run, export, space)
    assert re.search(r"the loss is nan in step 1 of 6 .*losses before: \d.*lower lr", message)
    monkeypatch.setattr(Classifier, "forward", forward)
    resumed = QUICK.run(export, space)
    undisturbed = QUICK.run(export, replace(space, cache=tmp_path / "other"))
    assert history(resumed) == history(undisturbed)


def test_a_gradient_that_is_not_finite_is_an_error_after_the_last_step_too(export, tmp_path, monkeypatch):
    forward, last = Classifier.forward, QUICK.epochs * 100 // QUICK.batch - 1

    def breaking_last(self, images):
        logits = forward(self, images)
        if logits.requires_grad and next(steps) >= last:
            logits.register_hook(lambda gradient: gradient * float("nan"))
        return logits

    steps = iter(range(100))
    monkeypatch.setattr(Classifier, "forward", breaking_last)
    task = replace(QUICK, mixed_together=32)  # one forward pass a step
    message = refusal(task.run, export, workspace(tmp_path, "digits:", limit=100, batch_size=32))
    assert f"the gradient norm is nan in step {last} of {last + 1}" in message


def test_unreadable_images_are_errors_or_replaced_and_recorded(export, tmp_path):
    task = replace(QUICK, batch=40, mixed_together=40)
    space = workspace(tmp_path, coloured_folder(tmp_path / "set", train=20, val=6, classes=2))
    broken = [sorted((tmp_path / "set" / split).rglob("*.png"))[3] for split in ("train", "val")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UnreadableImage, match=broken[0].name):
        task.run(export, space)
    outcome = task.run(export, replace(space, skip_bad=True))
    assert [list(outcome.facts[split]["skipped"]) for split in ("train", "val")] == [[str(path)] for path in broken]
    assert np.flatnonzero(np.isnan(outcome.metrics["top1"].per_image)).tolist() == [3]
    again = task.run(export, replace(space, skip_bad=True))
    assert again.facts == outcome.facts, "a finished training must remember what was skipped"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 128}, "settings={'finetune.batch': 64}"),
        ({"batch": 25, "mixed_together": 25}, "25 images"),
    ],
)
def test_impossible_batches_are_refused(export, tmp_path, settings, message):
    assert message in refusal(replace(QUICK, **settings).run, export, workspace(tmp_path, "digits:", limit=100))


def test_a_model_without_class_token_is_pooled_by_the_mean_patch(tmp_path):
    spec = replace(export_of_size(16).spec, class_token=False, class_position=False, pool="avg")
    export = ViTExport.from_vit(ViT(spec), Preparation())
    space = workspace(tmp_path, "digits:", limit=100)
    outcome, by_hand = (replace(QUICK, pool=pool).run(export, space) for pool in ("cls", "avg"))
    assert outcome.metrics == by_hand.metrics and outcome.facts["read_instead"] == {"cls": "avg"}
    (warning,) = outcome.facts["warnings"]
    assert "avg was read for cls" in warning


def test_rates_above_the_peak_are_warnings(export, tmp_path):
    space = workspace(tmp_path, "digits:")
    for changes in ({"schedule": "simmim", "start": 1.0}, {"floor": 1.0}, {}):
        task = replace(QUICK, **changes)
        lines = [line for line in task.warnings(export, task.plan(100, space)[0]) if "peak rate" in line]
        assert [line.partition("=")[0] for line in lines] == list(changes)[-1:]


def test_a_norm_of_the_mean_patch_is_not_applied_to_the_class_token(tmp_path):
    export = ViTExport.from_vit(ViT(replace(export_of_size(16).spec, final_norm="pooled")), Preparation())
    with pytest.raises(ValueError, match=r"add settings=.*finetune.pool"):
        replace(QUICK, pool="cls").run(export, workspace(tmp_path, "digits:", limit=100))
