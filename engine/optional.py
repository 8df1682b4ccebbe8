"""Optional packages: the features that need each, the extra of pyproject.toml that installs it, and the error if it is
missing."""

import sys
from importlib.util import find_spec

# Import name -> (package, extra, what needs it).
OPTIONAL = {
    "mmengine": ("onedl-mmengine", "dense", "dense tasks"),
    "mmcv": ("onedl-mmcv", "dense", "dense tasks"),
    "mmseg": ("onedl-mmsegmentation", "dense", "dense tasks"),
    "mmdet": ("onedl-mmdetection", "dense", "detection"),
    "pycocotools": ("pycocotools", "dense", "masks of COCO's layout"),
    "faster_coco_eval": ("faster-coco-eval", "dense", "detection"),
    "imagecorruptions": ("imagecorruptions-imaug", "dense", "the corruption frost, whose pictures it holds,"),
    "matplotlib": ("matplotlib", "figures", "bench visualize and bench report"),
    "submitit": ("submitit", "cluster", "--cluster"),
    "tensorboard": ("tensorboard", "tensorboard", "curves of bench pretrain for TensorBoard"),
    "cyanure": ("cyanure", "cyanure", "lowshot.solver=cyanure"),
    "pyarrow": ("pyarrow", "tables", "parquet: image sets and --format parquet"),
    "datasets": ("datasets", "tables", "hf: image sets"),
    "pandas": ("pandas", "tables", "to_pandas()"),
    "wandb": ("wandb", "wandb", "bench pretrain --wandb"),
}
# Import names of packages without wheels for Python 3.13 and later, as in pyproject.toml.
UP_TO_312 = {"mmengine", "mmcv", "mmseg", "mmdet", "imagecorruptions", "cyanure"}


def install_command(name: str) -> str:
    """The command that installs an optional package, which is given by its import name."""
    return f"pip install 'ssl-vit-bench[{OPTIONAL[name][1]}]'"


def is_lacking(name: str) -> bool:
    """Whether this Python has no wheels of an optional package (import name)."""
    return name in UP_TO_312 and sys.version_info >= (3, 13)


def require(*names: str) -> None:
    """Check that optional packages (import names) are installed. ValueError with the install command if one is not."""
    for name in names:
        if sys.modules.get(name) is None and find_spec(name) is None:
            package, _, feature = OPTIONAL[name]
            if is_lacking(name):
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                raise ValueError(f"Python {version} does not have {package}, for {feature.strip(',')}: use Python 3.12")
            raise ValueError(f"{package} is not installed, and {feature} needs it: {install_command(name)}")
