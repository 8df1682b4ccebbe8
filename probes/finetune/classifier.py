"""How does an export become a classifier for end-to-end training? Which tokens does its head read, and after which
norm?

    avg   mean of the patch tokens -> a new LayerNorm -> head; the pretrained final norm is not used
          (MAE models_vit.py:23-53, MOCA --use_fc_norm, LUT; BEiT, SimMIM and ExtreMA modeling_finetune.py:204-276),
          except that `pooled_norm` can start the new one from its weights (CAE tools/run_class_finetuning.py:371-377)
    cls   class token after the pretrained final norm -> head (iBOT --use_cls)

Class-attention blocks (ExtreMA) are removed under "avg" and trained under "cls". Position tables are trained, too, even
sine tables, unless `train_positions` is false. The first layer of the pretrained projector can precede the head
(SimCLR-v2's semi-supervised recipe).

B images of a batch, D width of the backbone, or of the projector layer if there is one, C classes.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from checkpoints.export import CLASS_ATTENTION, ViTExport
from engine.errors import option
from probes.finetune.settings import FinetuneSettings, PooledNorm

RELU_METHODS = ("mocov3", "byol")  # methods with ReLU in the projector; the others have GELU


class Classifier(nn.Module):
    """Prepared images (B, 3, H, W) -> logits (B, C). Raises ValueError if the export lacks what the head reads."""

    def __init__(self, export: ViTExport, classes: int, settings: FinetuneSettings, seed: int) -> None:
        super().__init__()
        export = export.with_tables(settings.tables)
        self.pool = settings.pool
        if settings.pool == "avg":
            export = with_pooled_norm(export, settings.pooled_norm)
        else:
            check_class_token(export)
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
        """Images (B, 3, H, W) -> features (B, D) that the head reads."""
        tokens = self.vit(images)[0]
        if self.pool == "cls":
            return self.entry(self.vit.spec.class_feature(tokens))
        return self.entry(self.vit.trunk.fc_norm(tokens[:, self.vit.spec.prefix :].mean(dim=1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def timm_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained, with timm's names."""
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        return [(name.removeprefix("vit.").removeprefix("trunk."), parameter) for name, parameter in trained]


def with_pooled_norm(export: ViTExport, start: PooledNorm = "fresh") -> ViTExport:
    """The export with a norm after the mean of the patch tokens in place of the final norm, without class attention.

    start: weights of this norm: 1 and bias 0, or those of the final norm. Raises ValueError if there is no final norm.
    """
    spec = replace(export.spec, pool="avg", final_norm="pooled", class_attention=0)
    norm = {name: tensor for name, tensor in export.tensors.items() if name.startswith(("norm.", "fc_norm."))}
    tensors = {name: tensor for name, tensor in export.tensors.items() if name not in norm}
    if start == "fresh":
        norm = {"weight": torch.ones(spec.width)}
        is_rms_norm = "blocks.0.norm1.weight" in tensors and "blocks.0.norm1.bias" not in tensors
        if not is_rms_norm:
            norm["bias"] = torch.zeros(spec.width)
    elif not norm:
        raise ValueError(
            f"the model has no final norm to start from: add {option('settings', {'finetune.pooled_norm': 'fresh'})}"
        )
    tensors |= {f"fc_norm.{name.rpartition('.')[2]}": tensor for name, tensor in norm.items()}
    extra = {name: tensor for name, tensor in export.extra.items() if not name.startswith(CLASS_ATTENTION)}
    return replace(export, spec=spec, tensors=tensors, extra=extra, fingerprint={})


def check_class_token(export: ViTExport) -> None:
    """ValueError unless the export has a class token to which its final norm applies."""
    spec = export.spec
    if not spec.has_class_token:
        raise ValueError(
            f"the model has no class token: add {option('settings', {'finetune.pool': 'avg'})}, or semi.pool=avg"
        )
    if spec.final_norm == "pooled":
        raise ValueError(
            f"the model's final norm is for the mean of its patches: add "
            f"{option('settings', {'finetune.pool': 'avg'})}, or semi.pool=avg"
        )


def projector_layer(export: ViTExport) -> nn.Sequential:
    """The first linear layer of the pretrained projector, its norm if there is one, and its activation.

    ExtreMA builder.py:31-73, iBOT eval_cls.py:207-256, MoCo-v3 builder.py:36-61. A batch norm (MSN, MoCo-v3) is fused
    into the linear layer with its statistics from pretraining, so that an image does not depend on others of its batch
    (ours). Raises ValueError for an export without a projector.
    """
    for linear, norm in (("projector.mlp.0", "projector.mlp.1"), ("projector.0", "projector.1")):
        if f"{linear}.weight" in export.extra:
            weight, has_bias = export.extra[f"{linear}.weight"], f"{linear}.bias" in export.extra
            layer = load_layer(nn.Linear(*reversed(weight.shape), bias=has_bias), export, linear)
            activation = nn.ReLU() if export.facts.get("method") in RELU_METHODS else nn.GELU()
            if f"{norm}.running_mean" in export.extra:
                batch_norm = load_layer(nn.BatchNorm1d(len(weight)), export, norm)
                fused = fuse_linear_bn_eval(layer.double().eval(), batch_norm.double().eval())
                return nn.Sequential(fused.float(), activation)
            has_norm = f"{norm}.weight" in export.extra
            norms = [load_layer(nn.LayerNorm(len(weight)), export, norm)] if has_norm else []
            return nn.Sequential(layer, *norms, activation)
    raise ValueError(
        "the export contains no projector, whose first layer the head reads: import a full training checkpoint of "
        f"ExtreMA, iBOT, DINO, MSN or MoCo-v3, or add {option('settings', {'semi.projector': 'false'})}"
    )


def load_layer(layer: nn.Module, export: ViTExport, name: str) -> nn.Module:
    """The layer with its tensors of the export. Exports leave out a batch norm's number of updates."""
    exported = [key for key in layer.state_dict() if key != "num_batches_tracked"]
    layer.load_state_dict({**layer.state_dict(), **{key: export.extra[f"{name}.{key}"] for key in exported}})
    return layer
