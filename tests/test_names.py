"""One meaning for each public name: no class or function at the top of two files of the product has the same name."""

import ast
from collections import defaultdict

from test_architecture import FILES, ROOT

# What every file of an extension folder defines, and means the same in all of them.
INTERFACE = {
    "bench": {"compare", "extract", "load", "pretrain", "report"},  # bench/api.py: the same under the same name
    "bench/commands": {"add_arguments", "run"},
    "checkpoints/importers": {"convert", "recognise"},
    "downstream/layouts": {"listed", "recognised", "write_tiny"},
    "imagesets/schemes": {"open_split"},
    "pretrain/methods": {"Settings"},
}


def definitions() -> dict[str, list[str]]:
    """Public name -> files that define it, without those that an interface asks for."""
    found = defaultdict(list)
    for path in FILES:
        file = path.relative_to(ROOT)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name] += [str(file)] if node.name not in INTERFACE.get(str(file.parent), ()) else []
    return found


def test_no_public_name_has_two_meanings():
    several = {name: files for name, files in sorted(definitions().items()) if len(files) > 1}
    assert not several, f"rename all but one, or make them one: {several}"
