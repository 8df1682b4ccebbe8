"""Checkpoints in several files: torch.distributed.checkpoint's, parts with an index, DeepSpeed's; and wrapped names."""

import json
import os
import pickle
import time
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
from checkpoints.folders import _check_boxes, read_distributed
from checkpoints.import_options import ImportOptions
from checkpoints.reading import read_foreign
from checkpoints.resolve import load

FRANCA = EXAMPLES["franca"]()
TREE = {name.removeprefix("teacher."): tensor for name, tensor in FRANCA.tree.items()}


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """Of the export that one whole file gives."""
    path = tmp_path_factory.mktemp("whole") / "franca.pth"
    torch.save({"teacher": TREE}, path)
    return load(path, FRANCA.options).digest


def distributed(state: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(state, checkpoint_id=folder)
    return folder


def cut(name: str, tensor: Tensor, folder: Path) -> tuple[official.TensorStorageMetadata, dict]:
    """A matrix in two pieces of rows, as two processes save it: each piece at some place of a file."""
    half = len(tensor) // 2
    chunks, places = [], {}
    for first, piece in ((0, tensor[:half]), (half, tensor[half:])):
        path = folder / f"__{bool(first):d}_0.distcp"
        offset = path.stat().st_size if path.exists() else 0
        with open(path, "ab") as file:
            torch.save(piece.clone(), file)
        start = torch.Size((first, *[0] * (tensor.ndim - 1)))
        chunks.append(official.ChunkStorageMetadata(offsets=start, sizes=piece.shape))
        info = _StorageInfo(relative_path=path.name, offset=offset, length=path.stat().st_size - offset)
        places[official.MetadataIndex(name, start)] = info
    properties = official.TensorProperties(dtype=tensor.dtype)
    return official.TensorStorageMetadata(properties=properties, size=tensor.shape, chunks=chunks), places


def in_pieces(folder: Path, **changes) -> Path:
    """All matrices of the example in two pieces; `changes` of the first one's entry."""
    folder.mkdir()
    stored, places = {}, {}
    for name, tensor in {f"teacher.{name}": tensor for name, tensor in TREE.items()}.items():
        stored[name], found = cut(name, tensor if len(tensor) > 1 else tensor.reshape(-1), folder)
        stored[name] = replace(stored[name], **changes) if not places else stored[name]
        places |= found
    whole = official.Metadata(state_dict_metadata=stored, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    return folder


def test_a_distributed_folder_beside_is_read_as_timms(tmp_path, monkeypatch):
    """`timm:NAME` is the folder of that name where it holds a checkpoint, as a refusal advises."""
    monkeypatch.chdir(tmp_path)
    distributed(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).state_dict(), Path("dcp_folder"))
    for reference in ("dcp_folder", "timm:dcp_folder"):
        with pytest.raises(ValueError, match=r"^dcp_folder as timm: no tensor tells .* --statistics imagenet"):
            load(reference)
        assert load(reference, ImportOptions(statistics="imagenet")).spec.image_size == 32
    with pytest.raises(ValueError, match="timm has no model 'nowhere'"):
        load("timm:nowhere")


def test_a_distributed_checkpoint_is_put_together(tmp_path, digest):
    state = {"teacher": TREE, "optimizer": {"state": {"a": torch.ones(3)}}, "iteration": 7}
    export = load(distributed(state, tmp_path / "step_7"), FRANCA.options)
    assert export.digest == digest and export.facts["method"] == "franca"
    assert export.facts["dropped"]["optimiser state"] == 1


def test_pieces_of_several_processes_are_put_together(tmp_path):
    tensors = read_distributed(in_pieces(tmp_path / "pieces")).tensors
    for name, tensor in TREE.items():
        assert torch.equal(tensors[f"teacher.{name}"].reshape(tensor.shape), tensor), name


def many_pieces(folder: Path, count: int, overlap: bool = False, claimed: int = 0) -> Path:
    """A vector in pieces of one value. overlap: the last piece lies where the first does. claimed: length of each."""
    folder.mkdir()
    starts = [*range(count - 1), 0 if overlap else count - 1]
    chunks = [official.ChunkStorageMetadata(offsets=torch.Size((at,)), sizes=torch.Size((1,))) for at in starts]
    places = {}
    with open(folder / "__0_0.distcp", "wb") as file:
        for at in range(count):
            begin = file.tell()
            torch.save(torch.full((1,), float(at)), file)
            info = _StorageInfo(relative_path="__0_0.distcp", offset=begin, length=claimed or file.tell() - begin)
            places[official.MetadataIndex("w", torch.Size((at,)))] = info
    properties = official.TensorProperties(dtype=torch.float32)
    stored = official.TensorStorageMetadata(properties=properties, size=torch.Size((count,)), chunks=chunks)
    whole = official.Metadata(state_dict_metadata={"w": stored}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    return folder


def test_many_pieces_are_put_together(tmp_path):
    assert torch.equal(read_distributed(many_pieces(tmp_path / "many", 300)).tensors["w"], torch.arange(300.0))
    for wrong, message in (
        (dict(overlap=True), "the pieces of w do not make"),
        (dict(claimed=10**9), "its pieces are"),
    ):
        with pytest.raises(ValueError, match=message):
            read_distributed(many_pieces(tmp_path / message, 4, **wrong))


def test_checking_pieces_takes_a_time_that_grows_as_they_do():
    """To compare all pairs of so many takes minutes."""
    boxes = [((row, column), (1, 1)) for row in range(200) for column in range(100)]
    began = time.process_time()
    _check_boxes("w", (200, 100), boxes)
    with pytest.raises(ValueError, match="the pieces of w do not make"):
        _check_boxes("w", (200, 100), [*boxes[:-1], boxes[0]])
    assert time.process_time() - began < 10


def test_what_is_wrong_with_a_distributed_checkpoint_is_one_line(tmp_path):
    gone = distributed({"teacher": TREE}, tmp_path / "gone")
    (gone / "__0_0.distcp").unlink()
    torn = distributed({"teacher": TREE}, tmp_path / "torn")
    content = (torn / "__0_0.distcp").read_bytes()
    (torn / "__0_0.distcp").write_bytes(content[: len(content) // 2])
    evil = distributed({"teacher": TREE}, tmp_path / "evil")
    (evil / ".metadata").write_bytes(pickle.dumps(malicious.Call(Path.touch, tmp_path / "ran")))
    elsewhere = distributed({"teacher": TREE}, tmp_path / "elsewhere")
    known = (elsewhere / ".metadata").read_bytes()
    (elsewhere / ".metadata").write_bytes(known.replace(b"__0_0.distcp", b"../../passwd"))
    pipe = distributed({"teacher": TREE}, tmp_path / "pipe")
    (pipe / "__0_0.distcp").unlink()
    os.mkfifo(pipe / "__0_0.distcp")
    messages = {
        pipe: "its files of 0",
        gone: "__0_0.distcp (No such file or directory); copy the whole folder",
        torn: "distributed checkpoint that cannot be read",
        evil: "which is not allowed",
        elsewhere: "or elsewhere ('../../passwd')",
        in_pieces(tmp_path / "hole", size=torch.Size((99, 9))): "do not make a tensor of (99, 9)",
    }
    for folder, message in messages.items():
        with pytest.raises(ValueError) as error:
            load(folder)
        assert message in str(error.value) and "\n" not in str(error.value)
        assert "dcp_to_torch" in str(error.value) or folder == gone
    assert not (tmp_path / "ran").exists()


def test_names_of_a_part_say_what_to_name(tmp_path):
    folder = distributed({"teacher": TREE}, tmp_path / "step_7")
    for path, message in (
        (folder / "__0_0.distcp", f"a part of a distributed checkpoint; name its folder: {folder}"),
        (folder / ".metadata", f"a part of a distributed checkpoint; name its folder: {folder}"),
        (tmp_path, f"a folder of distributed checkpoints; name one of them: {folder}"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path)


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
def test_wrappers_change_nothing(chain, tmp_path, digest):
    """Around the whole network, around every block, and around both."""
    inside = {name.replace("blocks.0.", f"blocks.0.{chain}."): tensor for name, tensor in TREE.items()}
    for number, state in enumerate((TREE, inside)):
        for prefix in ("", f"{chain}."):
            path = tmp_path / f"{number}{bool(prefix)}.pth"
            torch.save({"teacher": {f"{prefix}{name}": tensor for name, tensor in state.items()}}, path)
            assert load(path, FRANCA.options).digest == digest


def deepspeed(tensors: dict[str, Tensor]) -> dict:
    """mp_rank_00_model_states.pt, as DeepSpeedEngine._save_checkpoint writes it."""
    return {
        "module": {"teacher." + name: tensor for name, tensor in tensors.items()},
        "optimizer": None,
        "ds_version": "0.15.0",
        "ds_config": {"zero_optimization": {"stage": 2}},
        "buffer_names": [],
    }


def test_deepspeeds_states(tmp_path, digest):
    torch.save(deepspeed(TREE), tmp_path / "mp_rank_00_model_states.pt")
    assert load(tmp_path / "mp_rank_00_model_states.pt", FRANCA.options).digest == digest
    (tmp_path / "zero_to_fp32.py").write_text("")
    with pytest.raises(ValueError, match=r"a folder of DeepSpeed; name its mp_rank_00_model_states.pt .*zero_to_fp32"):
        load(tmp_path)
    torch.save(deepspeed({name: torch.empty(0) for name in TREE}), tmp_path / "empty.pt")
    with pytest.raises(ValueError, match=r"without values, as DeepSpeed's ZeRO stage 3 .*zero_to_fp32\.py FOLDER"):
        load(tmp_path / "empty.pt")
    state = malicious.under_key(malicious.name("deepspeed.runtime.fp16.loss_scaler LossScaler"))
    malicious.as_archive(state, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"is a state of DeepSpeed's .*zero_to_fp32\.py FOLDER"):
        read_foreign(tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
