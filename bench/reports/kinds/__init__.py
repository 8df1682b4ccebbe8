"""The kinds of pictures that `bench visualize` draws of images: each file of this folder defines one."""

from pathlib import Path

# Kind as on the command line -> its file.
KINDS = {path.stem.replace("_", "-"): path for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
