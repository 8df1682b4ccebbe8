"""A tiny export for tests of the command line, and a tiny network in a file of somebody else."""

from pathlib import Path


def make_export(folder: Path, seed: int) -> Path:
    import torch

    from checkpoints.export import ViTExport
    from checkpoints.spec import Preparation, ViTSpec
    from checkpoints.vit import ViT

    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=32, patch_size=16, width=12, depth=2, heads=3, mlp_hidden=24
    )
    torch.manual_seed(seed)
    vit = ViT(spec)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.uniform_(-0.5, 0.5)
    facts = {"method": "random", "branch": "student", "source_file": "random.pth", "dropped": {"decoder": 7}}
    return ViTExport.from_vit(vit, Preparation(), facts).save(folder)


def make_foreign(path: Path, prefix: str, key: str = "") -> Path:
    """A file of a tiny plain ViT whose tensors' names begin with a prefix; key: under which they lie."""
    import torch

    from checkpoints.spec import ViTSpec
    from checkpoints.vit import ViT

    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=16, patch_size=8, width=192, depth=1, heads=3, mlp_hidden=8
    )
    tensors = {f"{prefix}.{name}": tensor for name, tensor in ViT(spec).trunk.state_dict().items()}
    torch.save({key: tensors} if key else tensors, path)
    return path
