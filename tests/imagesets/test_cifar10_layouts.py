"""cifar10:PATH as class folders and as the official pickles; other pickles are refused without running their code."""

import os
import pickle
import struct
from collections import OrderedDict

import numpy as np
import pytest
from refusals import set_refusal

from imagesets.schemes.cifar10 import CLASSES, load_cifar_pickle
from imagesets.sets import open_set

PER_BATCH = 4


def batch(number: int) -> dict:
    random = np.random.RandomState(number)
    return {
        "batch_label": f"batch {number}",
        "labels": random.randint(0, 10, PER_BATCH).tolist(),
        "data": random.randint(0, 256, (PER_BATCH, 3072), np.uint8),
        "filenames": [f"image_{number}_{index}.png" for index in range(PER_BATCH)],
    }


@pytest.fixture(params=[2, 4])
def batches(request, tmp_path):
    """cifar-10-batches-py with four images a batch; protocol 2 is the official files'."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], 1):
        (folder / name).write_bytes(pickle.dumps(batch(number), protocol=request.param))
    meta = {"num_cases_per_batch": PER_BATCH, "label_names": list(CLASSES), "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=request.param))
    return folder


def cifar_refusal(root, split="train") -> str:
    return set_refusal(f"cifar10:{root}", split)


@pytest.mark.parametrize("above", [False, True])
def test_batches_give_the_written_images_and_labels(batches, above):
    root = batches.parent if above else batches
    train, val = open_set(f"cifar10:{root}", "train"), open_set(f"cifar10:{root}", "val")
    assert (len(train), len(val)) == (20, 4) and train.classes == CLASSES
    for image_set, numbers in ((train, range(1, 6)), (val, (6,))):
        sources = [batch(number) for number in numbers]
        assert image_set.labels.tolist() == [label for source in sources for label in source["labels"]]
        rows = np.concatenate([source["data"] for source in sources])
        for index, row in enumerate(rows):
            assert np.array_equal(np.array(image_set.image(index)), row.reshape(3, 32, 32).transpose(1, 2, 0))
    assert train.path(5) == "cifar-10-batches-py/data_batch_2:image_2_1.png"


def python_2(value) -> bytes:
    """Pickle as Python 2 wrote the official files: text as byte strings, arrays by numpy.core.multiarray."""
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()  # SHORT_BINSTRING
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python_2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python_2(part) for item in value.items() for part in item) + b"u"
    rows, columns = value.shape
    kind = b"cnumpy\ndtype\n(" + python_2("u1") + python_2(0) + python_2(1) + b"tR(" + python_2(3) + python_2("|")
    kind += b"NNN" + python_2(-1) + python_2(-1) + python_2(0) + b"tb"
    raw = b"T" + struct.pack("<i", value.size) + value.tobytes()  # BINSTRING
    start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + python_2(0) + b"t" + python_2("b") + b"tR("
    return start + python_2(1) + b"(" + python_2(rows) + python_2(columns) + b"t" + kind + b"\x89" + raw + b"tb"


def test_batches_written_by_python_2_are_read(batches):
    by_python_3 = open_set(f"cifar10:{batches}", "train").fingerprint
    for number in range(1, 6):
        (batches / f"data_batch_{number}").write_bytes(b"\x80\x02" + python_2(batch(number)) + b".")
    assert open_set(f"cifar10:{batches}", "train").fingerprint == by_python_3


def test_class_folders_must_be_those_of_cifar10(tree, tmp_path):
    names = [f"{split}/{name}/{number}.jpg" for split in ("train", "test") for name in CLASSES for number in (1, 2)]
    val = open_set(f"cifar10:{tree(tmp_path / 'tree', *names)}", "val")
    assert val.classes == CLASSES and len(val) == 20 and any("test is used as val" in note for note in val.notes)
    assert "use folder:" in cifar_refusal(tree(tmp_path / "pets", "train/cat/1.jpg", "test/cat/1.jpg"))


class CallOnLoad:
    """Calls a function when pickle.load reads it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def attacks(witness):
    command = f"touch {witness}"
    return {
        "os.system": CallOnLoad(os.system, command),
        "eval": CallOnLoad(eval, f"__import__('os').system({command!r})"),
        "getattr": CallOnLoad(getattr, "", "upper"),
        "open": CallOnLoad(open, str(witness), "w"),
        "ordered dict": OrderedDict(a=1),
        "object array": np.array([CallOnLoad(os.system, command)], dtype=object),
        "float array": np.zeros(3),
        "in a batch": {**batch(1), "filenames": [CallOnLoad(os.system, command)]},
        "numpy function": CallOnLoad(np.fromfile, str(witness)),
    }


def test_pickles_that_are_not_cifars_are_refused_without_running(batches, tmp_path):
    for name in list(attacks("x")):
        witness = tmp_path / "witness"
        (batches / "data_batch_3").write_bytes(pickle.dumps(attacks(witness)[name], protocol=2))
        assert "data_batch_3 is refused" in cifar_refusal(batches)
        assert not witness.exists()


def test_hand_written_opcodes_are_refused(tmp_path):
    for opcodes in [
        b"cposix\nsystem\n(S'touch WITNESS'\ntR.",
        b"(S'touch WITNESS'\niposix\nsystem\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0dtouch WITNESS\x85R.",
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cimagesets.schemes.cifar10\nstand_ins.__globals__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x13ndarray.__init_subclass__\x93.",
        b"Pidentity\n.",
        b"\x82\x01.",
    ]:
        witness = tmp_path / "w"
        (tmp_path / "attack").write_bytes(opcodes.replace(b"WITNESS", str(witness).encode()))
        with pytest.raises(ValueError, match="attack is refused") as error:
            load_cifar_pickle("cifar10:x", tmp_path / "attack")
        assert "\n" not in str(error.value) and not witness.exists()


def test_nesting_that_crashes_python_is_refused(tmp_path):
    """Hashing such a key crashes Python."""
    levels = 300_000
    (tmp_path / "attack").write_bytes(b"\x80\x02})" + b"\x85" * levels + b"Ns.")
    with pytest.raises(ValueError, match=r"attack is refused .*more than 100 levels deep"):
        load_cifar_pickle("cifar10:x", tmp_path / "attack")


def test_a_pickle_cannot_change_how_the_next_one_is_read(tmp_path):
    """The opcode BUILD sets attributes, also of a function that the file may name."""
    opcodes = b"cnumpy.core.multiarray\n_reconstruct\n(N}S'mark'\nNstb."
    (tmp_path / "attack").write_bytes(opcodes)
    assert hasattr(load_cifar_pickle("cifar10:x", tmp_path / "attack"), "mark")
    (tmp_path / "next").write_bytes(b"cnumpy.core.multiarray\n_reconstruct\n.")
    assert not hasattr(load_cifar_pickle("cifar10:x", tmp_path / "next"), "mark")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_2", b"", "is refused"),
        ("data_batch_2", pickle.dumps([1, 2]), "not a CIFAR-10 batch"),
        ("data_batch_2", pickle.dumps({**batch(1), "labels": [1, 2, 3, 10]}), "do not fit together"),
        ("data_batch_2", pickle.dumps({**batch(1), "data": np.zeros((4, 99), np.uint8)}), "not a CIFAR-10 batch"),
        ("batches.meta", pickle.dumps({"label_names": ["cat"]}), "does not name CIFAR-10's classes"),
    ],
)
def test_damaged_batches_are_refused(batches, name, content, message):
    (batches / name).write_bytes(content)
    assert message in cifar_refusal(batches) and name in cifar_refusal(batches)


@pytest.mark.parametrize("name", ["data_batch_5", "batches.meta"])
def test_a_missing_batch_is_named(batches, name):
    (batches / name).unlink()
    assert f"no {name} in {batches}" in cifar_refusal(batches)
