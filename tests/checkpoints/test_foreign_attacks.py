"""`read_foreign` refuses files that try to run code, to crash it or to exhaust its memory."""

import os
import pickle
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import malicious
import pytest
import torch

from checkpoints import dotted
from checkpoints.import_options import ImportOptions
from checkpoints.reading import read_foreign
from checkpoints.resolve import load
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT


@pytest.fixture
def attack_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder for the file; checks afterwards that no other file and no change of environment or torch remains."""
    registered = set(torch.serialization.get_safe_globals())
    environment = dict(os.environ)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "file"
    assert not list((tmp_path / "here").iterdir())
    assert not (tmp_path / "marker").exists()
    assert {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"} == {
        key: value for key, value in environment.items() if key != "PYTEST_CURRENT_TEST"
    }
    assert set(torch.serialization.get_safe_globals()) == registered


def refusal(path: Path) -> str:
    """The message with which a file is refused; it has to be one printable line that starts with the path."""
    with pytest.raises(ValueError) as caught:
        read_foreign(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable(), message
    return message


def test_payloads_run_in_an_unguarded_load(tmp_path):
    """An unguarded load of the same values runs the code, so the refusals below are not vacuous."""
    markers = {name: tmp_path / name for name in malicious.CALLS}
    for name, marker in markers.items():
        torch.save(malicious.CALLS[name](marker), tmp_path / "live.pth")
        try:
            torch.load(tmp_path / "live.pth", weights_only=False)  # unguarded on purpose, of a file made here
        except Exception as error:  # many payloads break after they have run
            assert not isinstance(error, ImportError)
    deadline = time.monotonic() + 5
    while not all(marker.exists() for marker in markers.values()) and time.monotonic() < deadline:
        time.sleep(0.01)  # Popen does not wait
    assert [name for name, marker in markers.items() if not marker.exists()] == []


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "legacy"])
def test_payloads_are_refused(zipped, attack_folder):
    marker = attack_folder.parent / "marker"
    for name, call in malicious.CALLS.items():
        payload = {"model": {"weight": torch.ones(2)}, "extra": call(marker)}
        torch.save(payload, attack_folder / "a.pth", _use_new_zipfile_serialization=zipped)
        assert " wants " in refusal(attack_folder / "a.pth"), name
        assert not marker.exists(), name


@pytest.mark.parametrize("container", malicious.CONTAINERS)
def test_payloads_are_refused_in_every_pickle_protocol(container, attack_folder):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps({"extra": malicious.touch(attack_folder.parent / "marker")}, protocol)
        malicious.CONTAINERS[container](pickled, attack_folder / "a.pth")
        assert "wants posix.system " in refusal(attack_folder / "a.pth"), protocol


@pytest.mark.slow
@pytest.mark.parametrize("container", malicious.CONTAINERS)
def test_bombs_and_invalid_pickles_are_refused(container, attack_folder, monkeypatch):
    monkeypatch.setattr(dotted, "MAX_VALUES", 10_000)  # of a million, which takes seconds to count
    for name, raw in malicious.RAW.items():
        malicious.CONTAINERS[container](raw(), attack_folder / "a.pth")
        started = time.monotonic()
        refusal(attack_folder / "a.pth")
        assert time.monotonic() - started < 20, name


def test_two_records_of_one_name_are_refused(attack_folder):
    """Readers differ in which of the two they read, so a scan could check the other one."""
    malicious.as_archive(pickle.dumps({"model": 1}, 2), attack_folder / "a.pth")
    with zipfile.ZipFile(attack_folder / "a.pth", "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data.pkl", pickle.dumps(malicious.touch(attack_folder.parent / "marker"), 2))
    assert "two records of the same name" in refusal(attack_folder / "a.pth")


def test_an_archive_in_an_archive_is_not_read(attack_folder):
    """Only the outer archive's own pickle is read."""
    malicious.as_archive(pickle.dumps(malicious.touch(attack_folder.parent / "marker"), 2), attack_folder / "inner.pth")
    malicious.as_archive(malicious.under_key(malicious.small_tensor()), attack_folder / "a.pth")
    with zipfile.ZipFile(attack_folder / "a.pth", "a") as archive:
        archive.write(attack_folder / "inner.pth", "archive/inner/data.pkl")
    assert list(read_foreign(attack_folder / "a.pth").tensors) == ["model", "weight"]
    with zipfile.ZipFile(attack_folder / "b.pth", "w") as archive:
        archive.write(attack_folder / "inner.pth", "archive/data.pkl")
    refusal(attack_folder / "b.pth")
    with zipfile.ZipFile(attack_folder / "a.pth", "a") as archive:
        archive.writestr("other/data.pkl", pickle.dumps(malicious.touch(attack_folder.parent / "marker"), 2))
    refusal(attack_folder / "a.pth")


@pytest.mark.parametrize("container", ["archive", "legacy"])
def test_a_dict_cannot_hide_its_items_behind_an_attribute(container, attack_folder):
    """A file may give an OrderedDict attributes, which hide methods of the class."""
    model = malicious.name("collections OrderedDict") + b")R" + malicious.text("bias") + malicious.small_tensor() + b"s"
    attribute = b"}" + malicious.text("items") + malicious.name("torch Size") + b"sb"
    malicious.CONTAINERS[container](malicious.under_key(model + attribute), attack_folder / "a.pth")
    assert list(read_foreign(attack_folder / "a.pth").tensors) == ["model.bias", "weight"]


@pytest.mark.parametrize("unsafe", ["0", "1"])
def test_torchs_environment_variable_does_not_disable_the_guard(unsafe, attack_folder, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", unsafe)
    torch.save(malicious.touch(attack_folder.parent / "marker"), attack_folder / "a.pth")
    refusal(attack_folder / "a.pth")
    monkeypatch.undo()


@pytest.mark.parametrize("registered", [os.system, (os.system, "argparse.Namespace")])
def test_globals_registered_with_torch_are_not_allowed(registered, attack_folder):
    torch.save({"a": torch.ones(1), "b": malicious.touch(attack_folder.parent / "marker")}, attack_folder / "a.pth")
    torch.save({"a": torch.ones(1), "b": malicious.argparse.Namespace(c=1)}, attack_folder / "b.pth")
    with torch.serialization.safe_globals([registered]):
        refusal(attack_folder / "a.pth")
        assert read_foreign(attack_folder / "b.pth").facts == {"b.c": 1}


TRUNK = dict(
    architecture="vit_base_patch16_224", image_size=32, patch_size=8, width=32, depth=1, heads=2, mlp_hidden=64
)


def trunk() -> dict[str, torch.Tensor]:
    return {f"teacher.backbone.{name}": t for name, t in ViT(ViTSpec(**TRUNK)).trunk.state_dict().items()}


class TestSizes:
    """A small file cannot make its reader allocate too much memory: sizes are checked first."""

    @pytest.mark.parametrize("zipped", [True, False], ids=["archive", "legacy"])
    @pytest.mark.parametrize("name", ["pos_embed", "blocks.0.attn.qkv.weight"])
    def test_a_huge_expanded_tensor_is_refused(self, name, zipped, attack_folder):
        expanded = torch.zeros(1, 1, 1).expand(1, 90_000**2 + 1, 32)  # a terabyte
        tree = trunk() | {f"teacher.backbone.{name}": expanded}
        torch.save(tree, attack_folder / "a.pth", _use_new_zipfile_serialization=zipped)
        assert f"'teacher.backbone.{name}' that repeats 1 values up to" in refusal(attack_folder / "a.pth")

    def test_a_small_expanded_tensor_is_read(self, attack_folder):
        torch.save({"mask": torch.zeros(1, 1).expand(100, 100)}, attack_folder / "a.pth")
        assert read_foreign(attack_folder / "a.pth").tensors["mask"].shape == (100, 100)

    def test_many_blocks_in_the_same_memory_are_refused(self, attack_folder):
        tree = trunk()
        block = {name: tensor for name, tensor in tree.items() if ".blocks." in name}
        for number in range(1, 50):
            tree |= {name.replace("blocks.0", f"blocks.{number}"): tensor for name, tensor in block.items()}
        torch.save(tree, attack_folder / "a.pth")
        with pytest.raises(ValueError, match=r"its tensors are views that make \d+ values of \d+ bytes; save clones"):
            load(f"dino:{attack_folder / 'a.pth'}", ImportOptions(heads=2))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 10**6, "heads": 1}, "pos_embed is .*, not .1, 17, 1000000"),
            ({"depth": 10**9}, "at most 256 blocks"),
            ({"image_size": 8 * 10**6}, "a grid of 1000000 x 1000000 patches: at most 256 x 256"),
            ({"registers": 10**9}, "missing .*reg_token"),
            ({"architecture": "hf-hub:nobody/nothing"}, "must be timm's name of a model"),
            ({"architecture": "eva02_tiny_patch14_224"}, "is timm's Eva|timm cannot build"),
            ({"norm_eps": "small"}, "norm_eps='small': must be a number"),
            ({"class_token": "yes"}, "class_token='yes': must be true or false"),
        ],
    )
    def test_impossible_specs_of_a_file_are_refused(self, changes, message, attack_folder):
        names = {name.replace("teacher.backbone", "online.trunk"): tensor for name, tensor in trunk().items()}
        torch.save({"method": "byol", "spec": TRUNK | changes, "model": names}, attack_folder / "a.pth")
        with pytest.raises(ValueError, match=message) as caught:
            load(attack_folder / "a.pth")
        assert "\n" not in str(caught.value)
