"""Checkpoints in several files (torch.distributed.checkpoint, parts with an index, DeepSpeed) and wrapped names."""

import json
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import malicious
import pytest
import timm
import torch
from examples import EXAMPLES
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as official
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

from checkpoints.dotted import WRAPPERS
from checkpoints.folders import read_distributed
from checkpoints.import_options import ImportOptions
from checkpoints.reading import read_foreign
from checkpoints.resolve import load

FRANCA = EXAMPLES["franca"]()
TREE = {name.removeprefix("teacher."): tensor for name, tensor in FRANCA.tree.items()}


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """Digest of the export of the same weights in one file."""
    path = tmp_path_factory.mktemp("one_file") / "franca.pth"
    torch.save({"teacher": TREE}, path)
    return load(path, FRANCA.options).digest


def save_distributed(state: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(state, checkpoint_id=folder)
    return folder


def save_in_two_pieces(name: str, tensor: Tensor, folder: Path) -> tuple[official.TensorStorageMetadata, dict]:
    """Save a matrix in two pieces of rows, as two processes do, each at an offset in a file."""
    half = len(tensor) // 2
    chunks, storage = [], {}
    for first_row, piece in ((0, tensor[:half]), (half, tensor[half:])):
        path = folder / f"__{bool(first_row):d}_0.distcp"
        offset = path.stat().st_size if path.exists() else 0
        with open(path, "ab") as file:
            torch.save(piece.clone(), file)
        start = torch.Size((first_row, *[0] * (tensor.ndim - 1)))
        chunks.append(official.ChunkStorageMetadata(offsets=start, sizes=piece.shape))
        info = _StorageInfo(relative_path=path.name, offset=offset, length=path.stat().st_size - offset)
        storage[official.MetadataIndex(name, start)] = info
    properties = official.TensorProperties(dtype=tensor.dtype)
    return official.TensorStorageMetadata(properties=properties, size=tensor.shape, chunks=chunks), storage


def save_in_pieces(folder: Path, **changes) -> Path:
    """Save all matrices of the example in two pieces; `changes` are made to the first one's entry."""
    folder.mkdir()
    stored, storage = {}, {}
    for name, tensor in {f"teacher.{name}": tensor for name, tensor in TREE.items()}.items():
        stored[name], piece_storage = save_in_two_pieces(
            name, tensor if len(tensor) > 1 else tensor.reshape(-1), folder
        )
        stored[name] = replace(stored[name], **changes) if not storage else stored[name]
        storage |= piece_storage
    metadata = official.Metadata(state_dict_metadata=stored, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_a_local_distributed_folder_is_read_for_a_timm_reference(tmp_path, monkeypatch):
    """`timm:NAME` reads a local folder of that name if it holds a checkpoint."""
    monkeypatch.chdir(tmp_path)
    save_distributed(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).state_dict(), Path("dcp_folder"))
    for reference in ("dcp_folder", "timm:dcp_folder"):
        with pytest.raises(ValueError, match=r"^dcp_folder as timm: no tensor tells .* statistics='imagenet'"):
            load(reference)
        assert load(reference, ImportOptions(statistics="imagenet")).spec.image_size == 32
    with pytest.raises(ValueError, match="timm has no model 'nowhere'"):
        load("timm:nowhere")


def test_a_distributed_checkpoint_is_assembled(tmp_path, digest):
    state = {"teacher": TREE, "optimizer": {"state": {"a": torch.ones(3)}}, "iteration": 7}
    export = load(save_distributed(state, tmp_path / "step_7"), FRANCA.options)
    assert export.digest == digest and export.facts["method"] == "franca"
    assert export.facts["dropped"]["optimiser state"] == 1


def test_pieces_of_several_processes_are_assembled(tmp_path):
    tensors = read_distributed(save_in_pieces(tmp_path / "pieces")).tensors
    for name, tensor in TREE.items():
        assert torch.equal(tensors[f"teacher.{name}"].reshape(tensor.shape), tensor), name


def save_vector_in_pieces(folder: Path, count: int, overlap: bool = False, claimed: int = 0) -> Path:
    """Save a vector in pieces of one value. overlap: the last piece overwrites the first. claimed: length of each."""
    folder.mkdir()
    starts = [*range(count - 1), 0 if overlap else count - 1]
    chunks = [official.ChunkStorageMetadata(offsets=torch.Size((start,)), sizes=torch.Size((1,))) for start in starts]
    storage = {}
    with open(folder / "__0_0.distcp", "wb") as file:
        for number in range(count):
            offset = file.tell()
            torch.save(torch.full((1,), float(number)), file)
            info = _StorageInfo(relative_path="__0_0.distcp", offset=offset, length=claimed or file.tell() - offset)
            storage[official.MetadataIndex("w", torch.Size((number,)))] = info
    properties = official.TensorProperties(dtype=torch.float32)
    stored = official.TensorStorageMetadata(properties=properties, size=torch.Size((count,)), chunks=chunks)
    metadata = official.Metadata(state_dict_metadata={"w": stored}, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_many_pieces_are_assembled_and_checked(tmp_path):
    assert torch.equal(
        read_distributed(save_vector_in_pieces(tmp_path / "many", 300)).tensors["w"], torch.arange(300.0)
    )
    for options, message in (
        (dict(overlap=True), "the pieces of w do not make"),
        (dict(claimed=10**9), "its pieces are"),
    ):
        with pytest.raises(ValueError, match=message):
            read_distributed(save_vector_in_pieces(tmp_path / message, 4, **options))


def test_damaged_and_malicious_distributed_checkpoints_are_refused(tmp_path):
    missing = save_distributed({"teacher": TREE}, tmp_path / "missing")
    (missing / "__0_0.distcp").unlink()
    truncated = save_distributed({"teacher": TREE}, tmp_path / "truncated")
    content = (truncated / "__0_0.distcp").read_bytes()
    (truncated / "__0_0.distcp").write_bytes(content[: len(content) // 2])
    malicious_metadata = save_distributed({"teacher": TREE}, tmp_path / "malicious")
    (malicious_metadata / ".metadata").write_bytes(pickle.dumps(malicious.Call(Path.touch, tmp_path / "ran")))
    outside = save_distributed({"teacher": TREE}, tmp_path / "outside")
    metadata = (outside / ".metadata").read_bytes()
    (outside / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../passwd"))
    pipe = save_distributed({"teacher": TREE}, tmp_path / "pipe")
    (pipe / "__0_0.distcp").unlink()
    os.mkfifo(pipe / "__0_0.distcp")
    messages = {
        pipe: "its files of 0",
        missing: "__0_0.distcp (No such file or directory); copy the whole folder",
        truncated: "distributed checkpoint that cannot be read",
        malicious_metadata: "which is not allowed",
        outside: "or elsewhere ('../../passwd')",
        save_in_pieces(tmp_path / "hole", size=torch.Size((99, 9))): "do not make a tensor of (99, 9)",
    }
    for folder, message in messages.items():
        with pytest.raises(ValueError) as error:
            load(folder)
        assert message in str(error.value) and "\n" not in str(error.value)
        assert "dcp_to_torch" in str(error.value) or folder == missing
    assert not (tmp_path / "ran").exists()


def test_parts_with_an_index_are_one_checkpoint(tmp_path, digest):
    halves = [dict(list(FRANCA.tree.items())[part::2]) for part in (0, 1)]
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for half, name in zip(halves, names, strict=True):
        save_file({key: tensor.contiguous() for key, tensor in half.items()}, tmp_path / name)
    index = {key: name for half, name in zip(halves, names, strict=True) for key in half}
    with pytest.raises(ValueError, match="is one of 2 parts; name their folder, with the index"):
        load(tmp_path / names[0])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert load(path, FRANCA.options).digest == digest


CHAINS = [*sorted(WRAPPERS), "module._orig_mod", "_orig_mod.module", "_fsdp_wrapped_module._checkpoint_wrapped_module"]


@pytest.mark.parametrize("chain", CHAINS)
def test_names_of_wrappers_are_removed(chain, tmp_path, digest):
    """Around the whole network, around every block, and around both."""
    inside = {name.replace("blocks.0.", f"blocks.0.{chain}."): tensor for name, tensor in TREE.items()}
    for number, state in enumerate((TREE, inside)):
        for prefix in ("", f"{chain}."):
            path = tmp_path / f"{number}{bool(prefix)}.pth"
            torch.save({"teacher": {f"{prefix}{name}": tensor for name, tensor in state.items()}}, path)
            assert load(path, FRANCA.options).digest == digest


def deepspeed_state(tensors: dict[str, Tensor]) -> dict:
    """mp_rank_00_model_states.pt, as DeepSpeedEngine._save_checkpoint writes it."""
    return {
        "module": {"teacher." + name: tensor for name, tensor in tensors.items()},
        "optimizer": None,
        "ds_version": "0.15.0",
        "ds_config": {"zero_optimization": {"stage": 2}},
        "buffer_names": [],
    }


def test_deepspeeds_files(tmp_path, digest):
    torch.save(deepspeed_state(TREE), tmp_path / "mp_rank_00_model_states.pt")
    assert load(tmp_path / "mp_rank_00_model_states.pt", FRANCA.options).digest == digest
    (tmp_path / "zero_to_fp32.py").write_text("")
    with pytest.raises(ValueError, match=r"a folder of DeepSpeed; name its mp_rank_00_model_states.pt .*zero_to_fp32"):
        load(tmp_path)
    torch.save(deepspeed_state({name: torch.empty(0) for name in TREE}), tmp_path / "empty.pt")
    with pytest.raises(ValueError, match=r"without values, as DeepSpeed's ZeRO stage 3 .*zero_to_fp32\.py FOLDER"):
        load(tmp_path / "empty.pt")
    state = malicious.under_key(malicious.name("deepspeed.runtime.fp16.loss_scaler LossScaler"))
    malicious.as_archive(state, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"is a state of DeepSpeed's .*zero_to_fp32\.py FOLDER"):
        read_foreign(tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
