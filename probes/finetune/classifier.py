"""An export with a classifier on top for end-to-end training: which tokens the head reads, behind which norm.

    avg   mean of the patches -> a fresh LayerNorm -> head; the pretrained final norm is thrown away
          (MAE models_vit.py:23-53, MOCA --use_fc_norm, LUT; BEiT, SimMIM and ExtreMA modeling_finetune.py:204-276),
          unless `pooled_norm` keeps its weights for the new one (CAE tools/run_class_finetuning.py:371-377)
    cls   class token behind the pretrained final norm -> head (iBOT --use_cls)

Class-attention blocks (ExtreMA) are left out under "avg" and trained under "cls". Position tables are trained too, even
sine tables, unless `train_positions` is false. The first layer of the pretrained projector may precede the head
(SimCLR-v2's semi-supervised recipe).
B images of a batch, D width or the projector layer's, C classes.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from checkpoints.export import CLASS_ATTENTION, ViTExport
from probes.finetune.settings import FinetuneSettings, PooledNorm

WITH_RELU = ("mocov3", "byol")  # methods whose projector has ReLU where the others have GELU


class Classifier(nn.Module):
    """(B, 3, H, W) prepared images -> logits (B, C). Raises ValueError where the export lacks what the head reads."""

    def __init__(self, export: ViTExport, classes: int, settings: FinetuneSettings, seed: int) -> None:
        super().__init__()
        export = export.with_tables(settings.tables)
        self.pool = settings.pool
        export = averaged(export, settings.pooled_norm) if settings.pool == "avg" else with_class(export)
        self.vit = export.build(settings.drop_path)
        if self.vit.trunk.pos_embed is not None:
            self.vit.trunk.pos_embed.requires_grad_(settings.train_positions)
        self.entry = projector_layer(export) if settings.projector else nn.Identity()
        self.head = nn.Linear(self.entry[0].out_features if settings.projector else export.spec.width, classes)
        generator = torch.Generator().manual_seed(seed)
        nn.init.trunc_normal_(self.head.weight, std=settings.head_std, generator=generator)
        with torch.no_grad():
            self.head.weight.mul_(settings.head_scale)
        nn.init.zeros_(self.head.bias)

    def features(self, images: Tensor) -> Tensor:
        """(B, D) that the head reads."""
        tokens = self.vit(images)[0]
        if self.pool == "cls":
            return self.entry(tokens[:, 0])
        return self.entry(self.vit.trunk.fc_norm(tokens[:, self.vit.spec.prefix :].mean(dim=1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def timm_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters that train, under timm's names."""
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        return [(name.removeprefix("vit.").removeprefix("trunk."), parameter) for name, parameter in trained]


def averaged(export: ViTExport, norm: PooledNorm = "fresh") -> ViTExport:
    """The trunk alone. A norm after the mean over patches replaces the final one: fresh (weight 1, bias 0), or with the
    pretrained weights. ValueError where there are none."""
    spec = replace(export.spec, pool="avg", final_norm="pooled", class_attention=0)
    final = {name: t for name, t in export.tensors.items() if name.startswith(("norm.", "fc_norm."))}
    tensors = {name: tensor for name, tensor in export.tensors.items() if name not in final}
    if norm == "fresh":
        is_rms_norm = "blocks.0.norm1.weight" in tensors and "blocks.0.norm1.bias" not in tensors
        bias = {} if is_rms_norm else {"bias": torch.zeros(spec.width)}
        final = {"weight": torch.ones(spec.width), **bias}
    elif not final:
        raise ValueError("the model has no final norm to start from: add --set finetune.pooled_norm=fresh")
    tensors |= {f"fc_norm.{name.rpartition('.')[2]}": tensor for name, tensor in final.items()}
    extra = {name: t for name, t in export.extra.items() if not name.startswith(CLASS_ATTENTION)}
    return replace(export, spec=spec, tensors=tensors, extra=extra, fingerprint={})


def with_class(export: ViTExport) -> ViTExport:
    """The export, if its final norm applies to a class token. ValueError otherwise."""
    spec = export.spec
    if not spec.has_class_token:
        raise ValueError("the model has no class token: add --set finetune.pool=avg, or semi.pool=avg")
    if spec.final_norm == "pooled":
        raise ValueError(
            "the model's final norm is for the mean of its patches: add --set finetune.pool=avg, or semi.pool=avg"
        )
    return export


def projector_layer(export: ViTExport) -> nn.Sequential:
    """The first linear layer of the pretrained projector, its norm if it has one, and its activation.

    ExtreMA builder.py:31-73, iBOT eval_cls.py:207-256, MoCo-v3 builder.py:36-61. A batch norm (MSN, MoCo-v3) becomes
    part of the linear layer, with the statistics of pretraining, so that no image depends on others of its batch; that
    is ours. ValueError for an export without a projector.
    """
    for linear, norm in (("projector.mlp.0", "projector.mlp.1"), ("projector.0", "projector.1")):
        if f"{linear}.weight" in export.extra:
            weight, has_bias = export.extra[f"{linear}.weight"], f"{linear}.bias" in export.extra
            layer = from_export(nn.Linear(*reversed(weight.shape), bias=has_bias), export, linear)
            activation = nn.ReLU() if export.facts.get("method") in WITH_RELU else nn.GELU()
            if f"{norm}.running_mean" in export.extra:
                batch_norm = from_export(nn.BatchNorm1d(len(weight)), export, norm)
                fused = fuse_linear_bn_eval(layer.double().eval(), batch_norm.double().eval())
                return nn.Sequential(fused.float(), activation)
            has_norm = f"{norm}.weight" in export.extra
            norms = [from_export(nn.LayerNorm(len(weight)), export, norm)] if has_norm else []
            return nn.Sequential(layer, *norms, activation)
    raise ValueError(
        "the export carries no projector, whose first layer the head is to read: import a full training checkpoint of "
        "ExtreMA, iBOT, DINO, MSN or MoCo-v3, or add --set semi.projector=false"
    )


def from_export(layer: nn.Module, export: ViTExport, name: str) -> nn.Module:
    """The layer with its tensors of the export, but for a batch norm's count of updates, which exports leave out."""
    kinds = [kind for kind in layer.state_dict() if kind != "num_batches_tracked"]
    layer.load_state_dict({**layer.state_dict(), **{kind: export.extra[f"{name}.{kind}"] for kind in kinds}})
    return layer
