"""The complete results of a run or of a pretraining, to compare an interrupted one with an undisturbed one."""

from pathlib import Path

from safetensors.torch import load_file

from bench.results.record import read_arrays, read_result


def numbers_of(out: Path) -> dict:
    """Result file -> its metrics, facts and the bytes of its arrays. AssertionError if a task failed."""
    numbers = {}
    for path in (out / "results").rglob("*.json"):
        result = read_result(path)
        assert result.status == "ok", result.message
        arrays = {name: values.tobytes() for name, values in read_arrays(path).items()}
        numbers[str(path.relative_to(out))] = (result.metrics, result.facts, arrays)
    return numbers


def tensors_of(out: Path) -> dict:
    """Name -> bytes of each tensor of the export of a pretraining."""
    tensors = load_file(out / "export" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
