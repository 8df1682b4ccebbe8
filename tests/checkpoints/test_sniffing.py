"""A path without a readable checkpoint is refused with what it is and what to do."""

import gzip
import os
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import malicious
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from checkpoints.reading import read_foreign


def write_zip(record: str, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(record, b"x")


def write_numpy(save_array: Callable, path: Path) -> None:
    with open(path, "wb") as file:
        save_array(file, np.ones(2))


def write_sharded(path: Path) -> None:
    malicious.as_archive(malicious.under_key(malicious.name("torch.distributed.tensor DTensor")), path)


def write_tar(path: Path) -> None:
    (path.parent / "inner").write_bytes(b"x")
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent / "inner", "inner")


def write_repacked(path: Path) -> None:
    torch.save({"w": torch.ones(3)}, path.parent / "inner")
    with zipfile.ZipFile(path.parent / "inner") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record))


def write_part(fraction: float, zipped: bool, path: Path) -> None:
    torch.save({"w": torch.ones(3000)}, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])


def write_flipped(path: Path) -> None:
    torch.save({"w": torch.ones(3000)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_short_safetensors(path: Path) -> None:
    save_file({"w": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:-7])


def write_distributed(path: Path) -> None:
    save_distributed({"w": torch.ones(3)}, checkpoint_id=path)


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "last.pth").write_bytes(b"x")


def write_exports(path: Path) -> None:
    (path / "mae").mkdir(parents=True)
    (path / "mae/config.json").write_text("{}")


def write_training(path: Path) -> None:
    (path / "export").mkdir(parents=True)
    (path / "export/config.json").write_text("{}")


def write_unfinished(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text("{}")


def write_sparse(path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, path)


def write_quantised(path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, path)


def save(value: object, path: Path, **options: object) -> None:
    torch.save(value, path, **options)


def write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


REFUSED = {
    "missing": (lambda path: None, "No such file"),
    "below_a_file": (lambda path: None, "cannot be read"),
    "empty": (partial(write, b""), "is empty"),
    "web_page": (partial(write, b"\n<!DOCTYPE html><html>404"), "web page"),
    "lfs_pointer": (partial(write, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    "text": (partial(write, b"hello, this is a log\n"), "text file that starts with 'hello"),
    "noise": (partial(write, bytes(range(7, 256)) * 9), "not a checkpoint of a known kind"),
    "jpeg": (partial(write, b"\xff\xd8\xff\xe0\x00\x10JFIF"), "JPEG"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"x")), "gzip"),
    "tar": (write_tar, "tar archive"),
    "hdf5": (partial(write, b"\x89HDF\r\n\x1a\n" + bytes(9)), "HDF5"),
    "numpy": (partial(write_numpy, np.save), "numpy array"),
    "npz": (partial(write_numpy, np.savez), ".npz"),
    "keras": (partial(write_zip, "model.weights.h5"), "Keras"),
    "zip": (partial(write_zip, "readme.txt"), "torch.save did not write"),
    "empty_zip": (lambda path: zipfile.ZipFile(path, "w").close(), "torch.save did not write"),
    "repacked": (write_repacked, "packed anew"),
    "flipped_bit": (write_flipped, "checksum"),
    "torchscript": (lambda path: torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), path), "TorchScript"),
    "truncated_archive": (partial(write_part, 0.7, True), "truncated"),
    "archive_head": (partial(write_part, 0.01, True), "truncated"),
    "truncated_legacy": (partial(write_part, 0.7, False), "damaged"),
    "legacy_head": (partial(write_part, 0.005, False), "download it again"),
    "truncated_safetensors": (write_short_safetensors, "damaged safetensors"),
    "index": (partial(write, b'{"metadata": {}, "weight_map": {"w": "model-1.safetensors"}}'), "several files"),
    "json": (partial(write, b'{"lr": 1}'), "JSON"),
    "folder": (write_folder, "name a file inside it: last.pth"),
    "folder_of_exports": (write_exports, "a folder of checkpoints; name one of them: "),
    "training": (write_training, "name its export: "),
    "unfinished_training": (write_unfinished, "the folder of a pretraining; `bench import "),
    "distributed_folder": (write_distributed, "dcp_to_torch"),
    "no_tensors": (partial(save, {"epoch": 3}), "holds no torch tensors"),
    "bare_pickle": (partial(write, b"\x80\x02}."), "torch.save did not write"),
    "protocol_4": (partial(save, {"w": torch.ones(1)}, pickle_protocol=4), "pickle protocol 4"),
    "whole_model": (partial(save, torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear"),
    "sparse": (write_sparse, "sparse"),
    "quantised": (write_quantised, "quantised"),
    "meta": (partial(save, {"w": torch.ones(2, device="meta")}), "meta"),
    "complex": (partial(save, {"w": torch.ones(2, dtype=torch.complex64)}), "complex64"),
    "fsdp": (partial(save, {"model": {"_fsdp_wrapped_module._flat_param": torch.ones(9)}}), "full_state_dict=True"),
    "sharded": (write_sharded, "get_model_state_dict"),
    "fairscale": (partial(save, {"_fsdp_wrapped_module.flat_param_0": torch.ones(9)}), "flattened"),
    "collision": (partial(save, {"module.w": torch.ones(1), "w": torch.ones(1)}), "'module.w' and 'w'"),
    "same_path": (partial(save, {"a.w": torch.ones(1), "a": {"w": torch.ones(1)}}), "two tensors named 'a.w'"),
}


def test_paths_without_a_checkpoint_are_refused_with_the_reason(tmp_path):
    for case, (make, reason) in REFUSED.items():
        path = tmp_path / case / "a.pth"
        path.parent.mkdir()
        if case == "below_a_file":
            path.write_bytes(b"x")
            path = path / "b.pth"
        make(path)
        files = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError) as caught:
            read_foreign(path)
        message = str(caught.value)
        assert reason in message and message.startswith(str(path)) and message.isprintable(), message
        assert sorted(tmp_path.rglob("*")) == files


def test_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "zero.pth").symlink_to("/dev/zero")
    for name in ("pipe.pth", "zero.pth"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_foreign(tmp_path / name)
