"""The command `bench`, and `python -m bench`.

For `python -m`, unlike for a command, Python searches the working folder before installed packages. A file such as
engine.py there would be imported in place of our package; instead of running it, we report it as an error.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("checkpoints", "downstream", "engine", "imagesets", "pretrain", "probes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 if another module hides one of our packages."""
    if path := hiding_module():
        sys.stderr.write(f"bench: error: {str(path)!r} hides the package {path.stem!r} of bench; {advice(path)}\n")
        return 2
    from bench.cli.main import run_command

    return run_command(argv)


def hiding_module() -> Path | None:
    """The file or folder that would be imported in place of one of our packages, or None; nothing is imported."""
    for name in PACKAGES:
        spec = find_spec(name)
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        if spec and not any(place.samefile(ROOT / name) for place in places if place.exists()):
            return places[0] if places else Path(str(spec.origin))
    return None


def advice(path: Path) -> str:
    """What to do about `path`, which lies in the working folder or on PYTHONPATH."""
    if str(path.parent) == sys.path[0]:
        return "run `bench` in place of `python -m bench`, and under torchrun `torchrun --no-python bench ...`"
    return f"rename it, or take {str(path.parent)!r} off PYTHONPATH"


if __name__ == "__main__":
    sys.exit(main())
