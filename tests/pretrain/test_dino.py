"""DINO beyond its recorded steps: stochastic depth, views, exports."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_dino import SIZES, SPEC, recipe
from toys import picture

from pretrain.loop.exporting import exports_of
from pretrain.method import TrainProgress
from pretrain.methods.dino import METHOD
from pretrain.methods.dino import DistillationSettings as Settings
from pretrain.methods.mst import METHOD as Mst
from pretrain.methods.mst import Settings as MstSettings
from pretrain.parts.heads import class_token
from probes.finetune.classifier import Classifier
from probes.finetune.settings import FinetuneSettings

IMAGES = 4


def random_views(images: int = IMAGES, patches: int = 16) -> dict[str, Tensor]:
    """Views for DINO, and noise for MST."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"global": (2, SPEC.image_size), "local": (SIZES["local_crops"], SIZES["local_size"])}
    views = {
        name: torch.randn(images, crops, 3, side, side, generator=generator).double()
        for name, (crops, side) in sizes.items()
    }
    return {**views, "noise": torch.rand(images, 2, 3, patches, generator=generator).double()}


def progress(step: int, parts: int = 1) -> TrainProgress:
    """One update an epoch, so that the second update moves the prototypes."""
    return TrainProgress(step=step, steps_per_epoch=1, epochs=6, micro_batches=parts)


def test_the_student_drops_paths_and_the_teacher_does_not():
    training = recipe(Settings)
    method = METHOD(training.spec, replace(training.settings, drop_path=0.5)).double()
    crops = random_views()["global"]
    assert torch.equal(method.teacher.class_tokens(crops), method.teacher.class_tokens(crops))
    assert not torch.equal(method.student.class_tokens(crops), method.student.class_tokens(crops))


def test_views_have_the_sizes_of_the_settings():
    method = METHOD(recipe(Settings).spec, recipe(Settings).settings)
    image = picture(0, 50, 40)
    views = method.views()(image)
    sizes = {name: tuple(tensor.shape) for name, tensor in views.items()}
    assert sizes == {"global": (2, 3, 32, 32), "local": (3, 3, 16, 16)}
    assert not any(torch.equal(crops[0], crops[1]) for crops in views.values())
    global_views = METHOD(method.spec, replace(method.settings, local_crops=0)).views()(image)
    assert list(global_views) == ["global"]


@pytest.mark.parametrize("method", [METHOD, Mst])
@torch.no_grad()
def test_exports_keep_the_projector_for_semi_supervised_recipes(method):
    """The classifier's features are those of the head's first layer in the trained network."""
    settings = Settings if method is METHOD else MstSettings
    trained = method(SPEC, settings(**SIZES))
    images = torch.randn(2, 3, SPEC.image_size, SPEC.image_size, generator=torch.Generator().manual_seed(0))
    for (_, export), branch in zip(
        exports_of(trained, {"method": "dino"}), (trained.teacher, trained.student), strict=True
    ):
        classifier = Classifier(export, 3, FinetuneSettings(pool="cls", projector=True, drop_path=0.0), seed=0).eval()
        layer = branch.eval().head.mlp[:3] if method is Mst else branch.eval().head.mlp[:2]
        official = layer(class_token(branch.vit, images))
        torch.testing.assert_close(classifier.features(images), official, atol=1e-5, rtol=1e-5)
