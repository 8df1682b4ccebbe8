"""All that a run or a pretraining leaves, bit for bit, to compare one that was disturbed with one that was not."""

from pathlib import Path

from safetensors.torch import load_file

from bench.results.record import read_arrays, read_result


def numbers_of(out: Path) -> dict:
    """Result file -> its metrics, facts and arrays, all in full. AssertionError where a task failed."""
    found = {}
    for path in (out / "results").rglob("*.json"):
        result = read_result(path)
        assert result.status == "ok", result.message
        arrays = {name: values.tobytes() for name, values in read_arrays(path).items()}
        found[str(path.relative_to(out))] = (result.metrics, result.facts, arrays)
    return found


def tensors_of(out: Path) -> dict:
    """Name of each tensor of a pretraining's export -> its bytes."""
    tensors = load_file(out / "export" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
