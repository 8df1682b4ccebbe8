"""Checkpoint files of every kind of container are read with the right tensor names and facts."""

import argparse
import json
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from yacs.config import CfgNode

from checkpoints.dotted import LONGEST_LIST, LONGEST_TEXT
from checkpoints.reading import read_foreign
from engine.files import sha256_of_file


def trunk(prefix: str = "") -> OrderedDict:
    """A state dict as `state_dict()` gives it, with its `_metadata` attribute."""
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "head": torch.nn.Linear(4, 2)})
    state = model.state_dict()
    renamed = OrderedDict((prefix + name, tensor) for name, tensor in state.items())
    renamed._metadata = state._metadata
    return renamed


def names(prefix: str) -> set[str]:
    return {prefix + name for name in trunk()}


def optimizer_state() -> dict:
    """AdamW after one step: tensors and numbers under integer keys, and settings in a list."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


ARGUMENTS = argparse.Namespace(arch="vit_small", patch_size=16, lr=5e-4, output_dir=Path("/out/run"), dist=None)
NODE = CfgNode({"MODEL": {"TYPE": "vit", "VIT": {"DEPTHS": [2, 2]}}, "AMP": True})
ADAM = {f"optimizer.state.{i}.{name}" for i in range(2) for name in ("step", "exp_avg", "exp_avg_sq")}

# Container, names of the tensors, some of the facts. Sources: the save sites named in the methods' own repositories.
OFFICIAL = {
    "mae": (
        {"model": trunk(), "args": ARGUMENTS, "epoch": 399},
        names("model."),
        {"args.arch": "vit_small", "epoch": 399},
    ),
    "simmim": (
        {"model": trunk("encoder."), "optimizer": optimizer_state(), "config": NODE, "max_accuracy": np.float64(0.5)},
        names("model.encoder.") | ADAM,
        {"config.MODEL.TYPE": "vit", "config.MODEL.VIT.DEPTHS": [2, 2], "config.AMP": True, "max_accuracy": 0.5},
    ),
    "dino": (
        {
            "student": trunk("module.backbone."),
            "teacher": trunk("backbone."),
            "optimizer": optimizer_state(),
            "epoch": 100,
            "args": ARGUMENTS,
            "dino_loss": {"center": torch.zeros(1, 8)},
            "fp16_scaler": {"scale": 65536.0, "growth_interval": 2000},
        },
        names("student.backbone.") | names("teacher.backbone.") | ADAM | {"dino_loss.center"},
        {
            "args.output_dir": "/out/run",
            "args.dist": None,
            "fp16_scaler.scale": 65536.0,
            "optimizer.param_groups.0.lr": 0.5,
        },
    ),
    "msn": (
        {"target_encoder": trunk("module."), "prototypes": torch.ones(3, 4), "loss": 1.5, "batch_size": 64},
        names("target_encoder.") | {"prototypes"},
        {"loss": 1.5, "batch_size": 64},
    ),
    "deepspeed": (
        {
            "module": trunk(),
            "sparse_tensor_module_names": {"b", "a"},
            "param_shapes": [OrderedDict(w=torch.Size((4, 2)))],
        },
        names(""),
        {"sparse_tensor_module_names": ["a", "b"], "param_shapes.0.w": [4, 2]},
    ),
    "lightning": (
        {
            "pytorch-lightning_version": "2.1.0",
            "state_dict": trunk("model._orig_mod."),
            "lr_schedulers": [{"milestones": Counter([30])}],
            "hyper_parameters": {"root": Path("/data")},
        },
        names("state_dict."),
        {"hyper_parameters.root": "/data", "lr_schedulers.0.milestones.30": 1},
    ),
    "flat": (trunk(), names(""), {}),
}


def mmengine_container() -> dict:
    from mmengine.logging import HistoryBuffer

    history = HistoryBuffer()
    history.update(1.5)
    return {
        "meta": {"epoch": 3, "seed": np.int64(7), "time": np.str_("now")},
        "state_dict": trunk("backbone."),
        "message_hub": {"log_scalars": OrderedDict(loss=history), "runtime_info": OrderedDict(best=np.bool_(True))},
    }


@pytest.mark.parametrize("method", OFFICIAL)
def test_official_containers_are_read(method, tmp_path):
    for zipped in [True, False]:
        container, expected, facts = OFFICIAL[method]
        path = tmp_path / "checkpoint.pth"
        torch.save(container, path, _use_new_zipfile_serialization=zipped)
        file = read_foreign(str(path))
        assert set(file.tensors) == expected
        assert facts.items() <= file.facts.items()
        assert json.loads(json.dumps(file.facts, allow_nan=False)) == file.facts
        assert (file.path, file.sha256) == (path, sha256_of_file(path))
        original = _tensors(container)
        assert len(original) == len(file.tensors)
        assert all(torch.equal(a, b) for a, b in zip(original, file.tensors.values(), strict=True))


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in inside for tensor in _tensors(item)]


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "legacy"])
def test_mmengine_files_are_read(zipped, tmp_path):
    torch.save(mmengine_container(), tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    file = read_foreign(tmp_path / "a.pth")
    assert set(file.tensors) == names("state_dict.backbone.")
    assert file.facts["meta.seed"] == 7 and file.facts["meta.time"] == "now"
    assert file.facts["message_hub.runtime_info.best"] is True


def test_safetensors_are_read(tmp_path):
    save_file({"module.norm.weight": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "a.bin", {"format": "pt"})
    file = read_foreign(tmp_path / "a.bin")
    assert file.tensors["norm.weight"].dtype == torch.bfloat16
    assert file.facts == {"__metadata__.format": "pt"}


def test_values_and_dtypes_of_tensors_are_kept(tmp_path):
    wide = torch.arange(1000.0)
    saved = {
        "view": wide[3:9:2],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "alias": wide[3:9:2],
        "flag": torch.tensor([True, False]),
        "index": torch.arange(3, dtype=torch.int64),
        "half": torch.ones(2, dtype=torch.float16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "list": [torch.zeros(1), torch.ones(1)],
    }
    torch.save(saved, tmp_path / "a.pt")
    tensors = read_foreign(tmp_path / "a.pt").tensors
    list_items = {"list.0": saved["list"][0], "list.1": saved["list"][1]}
    for name, tensor in ({key: value for key, value in saved.items() if key != "list"} | list_items).items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
        assert type(tensors[name]) is torch.Tensor and not tensors[name].requires_grad


def test_facts_are_small_json_values(tmp_path):
    saved = {
        "w": torch.ones(1),
        "long_list": list(range(LONGEST_LIST + 1)),
        "list": list(range(LONGEST_LIST)),
        "long_text": "x" * (LONGEST_TEXT + 1),
        "text": "x" * LONGEST_TEXT,
        "nan": float("nan"),
        "dtype": torch.float16,
        "device": torch.device("cuda:1"),
        "bytes": b"abc",
        "array": np.arange(3),
        "default": defaultdict(list, a=1),
        "nested": [{"lr": 0.5}, (1, 2)],
    }
    torch.save(saved, tmp_path / "a.pt")
    assert read_foreign(tmp_path / "a.pt").facts == {
        "list": saved["list"],
        "text": saved["text"],
        "dtype": "torch.float16",
        "device": "cuda:1",
        "default.a": 1,
        "nested.0.lr": 0.5,
        "nested.1": [1, 2],
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.a", "model.b.c"], ["state_dict.a", "state_dict.b.c"]),
        (["model.a.b", "ema.a.b"], ["state_dict.model.a.b", "state_dict.ema.a.b"]),
        (["model"], ["state_dict.model"]),
    ],
)
def test_lightnings_attribute_is_removed_only_if_all_weights_share_it(keys, expected, tmp_path):
    state = {key: torch.ones(1) for key in keys}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.0"}, tmp_path / "a.ckpt")
    assert list(read_foreign(tmp_path / "a.ckpt").tensors) == expected
    torch.save({"state_dict": state}, tmp_path / "b.ckpt")
    assert list(read_foreign(tmp_path / "b.ckpt").tensors) == [f"state_dict.{key}" for key in keys]


def test_archives_are_memory_mapped(tmp_path):
    torch.save({"w": torch.zeros(25_000_000)}, tmp_path / "a.pt")
    before = _resident()
    file = read_foreign(tmp_path / "a.pt")
    assert file.tensors["w"].shape == (25_000_000,) and _resident() - before < 50_000_000


def _resident() -> int:
    """Bytes of private memory of this process."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
