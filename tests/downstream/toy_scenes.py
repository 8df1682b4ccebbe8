"""Toy exports of every architecture that dense tasks support, workspaces, refusals and kills of tasks."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import torch
from refusals import refusal

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace

PLAIN = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_hidden=64
)
BEIT = replace(
    PLAIN,
    architecture="beit_base_patch16_224",
    position="none",
    class_position=False,
    relative_position="per_block",
    position_resize="relative_spline",
    layer_scale=True,
)
SPECS = {
    "plain": PLAIN,
    "registers": replace(PLAIN, registers=2, position_resize="bicubic_offset"),
    "relative": BEIT,
    "shared": replace(BEIT, relative_position="shared"),
    "class attention": replace(PLAIN, class_token=False, class_position=False, class_attention=2, final_norm="class"),
}
# Position embeddings of EVA-02 and DINOv3.
ROTARY = {
    "eva02": replace(
        PLAIN, architecture="eva02_base_patch14_224", width=24, rotary="axial", rotary_grid=4, key_bias=False
    ),
    "dinov3": replace(
        PLAIN,
        architecture="vit_base_patch16_dinov3",
        position="none",
        class_position=False,
        registers=2,
        layer_scale=True,
        rotary="centred",
        rotary_base=100.0,
        rotary_pairs="halves",
        rotary_rounding="bfloat16",
        key_bias=False,
    ),
}


def export_of(spec: ViTSpec = PLAIN, seed: int = 0) -> ViTExport:
    """An export of random weights, also for position tables."""
    torch.manual_seed(seed)
    vit = ViT(spec)
    for name, parameter in vit.named_parameters():
        if "relative_position_bias_table" in name or "pos_embed" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return ViTExport.from_vit(vit, Preparation())


def task_refusal(task, data: str, folder, spec: ViTSpec = PLAIN, **settings) -> str:
    """The one line with which a task refuses its scenes, its network or its settings."""
    return refusal(task.run, export_of(spec), workspace(folder, data, **settings))


def workspace(folder, data: str, **settings) -> Workspace:
    """A workspace in `folder`, limited to eight scenes."""
    return Workspace(cache=folder / "cache", data=data, **{"limit": 8, **settings})


def kill_at_call(owner: type, method: str, count: int, work: Callable[[], object]) -> None:
    """Do `work` in a forked process that is killed at the `count`th call of a method, before the call."""
    child = os.fork()
    if not child:
        calls, original = 0, getattr(owner, method)

        def count_calls(self, *arguments, **settings):
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments, **settings)

        setattr(owner, method, count_calls)
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
