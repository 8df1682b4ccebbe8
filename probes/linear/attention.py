"""Which heads pool patch tokens by attention before a linear layer, and how does each source train them?

Q queries attend to T tokens, each query with one or several attention heads. Keys and values are not computed for each
token: a query is multiplied into the key weights, (q W_k) x instead of q (W_k x), and values are projected after
averaging the tokens, W_v (sum a x) instead of sum a (W_v x). The result is the same up to rounding, with about 1/64 of
the products, so dozens of heads cost little beside the backbone's forward pass. A bias of the keys would add the same
number to the scores of all tokens, which changes no softmax, so it is left out of the computation; its gradient is
exactly 0.

Parameters have the names of the sources. B images of a batch, T tokens, D width, C classes, A attention maps (queries
times attention heads), h heads of a sweep that this process trains.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from engine.optimisers import Lars
from engine.seeding import START, seeded
from engine.training.schedules import Schedule, TrainProgress
from engine.training.states import OPTIMIZER, State, load_optimizer, optimizer_tensors
from probes.linear.heads import Head

CAPI_WIDTH = 64  # of an attention head (capi eval_classification.py:203-243)
AIM_WIDTH = 128  # of an attention head, in every size of AIM (ml-aim aim-v1/aim/v1/torch/models.py)
INIT_STD = 0.02  # standard deviation of initial weights in every source
LAYER_NORM_EPS = 1e-6  # of CAE's norms (models/modeling_finetune.py); V-JEPA 2 has torch's 1e-5


def attention_pool(tokens: Tensor, queries: Tensor, value: Tensor) -> Tensor:
    """Average tokens by attention, then project the averages.

    Args:
        tokens: (B, T, D).
        queries: (A, D) of each attention map, already multiplied into the key weights; the softmax over tokens of their
            products with the tokens are the weights of the average.
        value: (O, D) value weights; the a-th of A equal parts of its rows projects the a-th average.

    Returns:
        (B, O).
    """
    weights = (tokens @ queries.T).softmax(dim=1)  # (B, T, A)
    pooled = weights.transpose(1, 2) @ tokens  # (B, A, D)
    return torch.einsum("bhd,hwd->bhw", pooled, value.unflatten(0, (len(queries), -1))).flatten(1)


def query_times_keys(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """A query (D,), split into attention heads, scaled and multiplied into the key weights (D, D) -> (heads, D)."""
    query, key = query.unflatten(0, (heads, -1)), key.unflatten(0, (heads, -1))
    return torch.einsum("hw,hwd->hd", query, key) * query.shape[1] ** -0.5


class CapiHead(nn.Module):
    """Tokens (B, T, D) -> logits (B, C): attention of one learned query in heads of width 64, keys and values with a
    bias, linear layer (capi eval_classification.py:203-243)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        if width % CAPI_WIDTH:
            raise ValueError(f"tokens of width {width} cannot be split into attention heads of width {CAPI_WIDTH}")
        self.query_token = nn.Parameter(torch.empty(width))
        self.kv, self.linear = nn.Linear(width, 2 * width), nn.Linear(width, classes)
        for weight in (self.query_token, self.kv.weight, self.linear.weight):
            nn.init.trunc_normal_(weight, std=INIT_STD)
        for layer in (self.kv, self.linear):
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        key, value = self.kv.weight.chunk(2)
        queries = query_times_keys(self.query_token, key, len(key) // CAPI_WIDTH)
        return self.linear(attention_pool(tokens, queries, value) + self.kv.bias.chunk(2)[1])


class CrossAttentionBlock(nn.Module):
    """One query attends to all tokens after a norm; then an MLP. The query is not normalised before attention, and its
    output is not projected (vjepa2 src/models/utils/modules.py, where the output projection is commented out)."""

    def __init__(self, width: int, heads: int) -> None:
        from timm.layers import Mlp

        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.xattn = nn.ModuleDict({"q": nn.Linear(width, width), "kv": nn.Linear(width, 2 * width)})
        self.mlp = Mlp(width, 4 * width)

    def forward(self, query: Tensor, tokens: Tensor) -> Tensor:
        """query (D,), tokens (B, T, D) -> (B, D)."""
        key, value = self.xattn["kv"].weight.chunk(2)
        queries = query_times_keys(self.xattn["q"](query), key, self.heads)
        query = query + attention_pool(self.norm1(tokens), queries, value) + self.xattn["kv"].bias.chunk(2)[1]
        return query + self.mlp(self.norm2(query))


class Vjepa2Head(nn.Module):
    """Tokens (B, T, D) -> logits (B, C): blocks of self-attention over all tokens, one block of cross-attention with
    one query, linear layer (vjepa2 src/models/attentive_pooler.py). depth: blocks, with that of cross-attention."""

    def __init__(self, width: int, classes: int, depth: int, heads: int, std: float = INIT_STD) -> None:
        from timm.models.vision_transformer import Block

        super().__init__()
        if width % heads:
            raise ValueError(f"attention_heads={heads} must divide the tokens' width {width}")
        query = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=std))
        blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(depth - 1))
        self.pooler = nn.ModuleDict({"blocks": blocks, "cross_attention_block": CrossAttentionBlock(width, heads)})
        self.pooler.register_parameter("query_tokens", query)
        self.linear = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for number, block in enumerate(blocks, 1):
                for layer in (block.attn.proj, block.mlp.fc2):
                    layer.weight.div_(math.sqrt(2 * number))
            self.pooler["cross_attention_block"].mlp.fc2.weight.div_(math.sqrt(2 * max(1, depth - 1)))

    def pooled(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D)."""
        for block in self.pooler["blocks"]:
            tokens = block(tokens)
        return self.pooler["cross_attention_block"](self.pooler.query_tokens[0, 0], tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.pooled(tokens))


class EfficientPooling(nn.Module):
    """Attention of Q queries of full width without keys; values are split into Q parts, one for each query
    (efficient-probing poolings/ep.py)."""

    def __init__(self, width: int, queries: int, shrink: int = 1) -> None:
        """shrink: width of the tokens divided by that of the values."""
        super().__init__()
        if width // shrink % queries:
            raise ValueError(f"queries={queries} must divide the values' width {width // shrink}")
        self.cls_token = nn.Parameter(INIT_STD * torch.randn(1, queries, width))
        self.v = nn.Linear(width, width // shrink, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D / shrink)."""
        return attention_pool(tokens, self.cls_token[0] * tokens.shape[2] ** -0.5, self.v.weight)


def ep_head(width: int, classes: int, queries: int, shrink: int = 1) -> nn.Sequential:
    """Tokens (B, T, D) -> logits (B, C), efficient probing: pooling, batch norm without gain, linear layer
    (efficient-probing probe_heads.py)."""
    norm = nn.BatchNorm1d(width // shrink, affine=False, eps=1e-6)
    return nn.Sequential(EfficientPooling(width, queries, shrink), norm, nn.Linear(width // shrink, classes))


class CaeHead(nn.Module):
    """Tokens (B, T, D) -> logits (B, C): attention of one query with separate norms for query, keys and values,
    projection, batch norm without gain, linear layer (CAE models/modeling_finetune.py:141-256, :385-399;
    tools/run_attentive.py)."""

    def __init__(self, width: int, classes: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention_heads={heads} must divide the tokens' width {width}")
        self.heads = heads
        self.query_token = nn.Parameter(torch.zeros(width))
        self.norm_q, self.norm_k, self.norm_v = (nn.LayerNorm(width, eps=LAYER_NORM_EPS) for _ in range(3))
        self.q, self.v, self.proj = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)
        self.fc_norm, self.head = nn.BatchNorm1d(width, affine=False), nn.Linear(width, classes)
        for layer in (self.q, self.k, self.v, self.proj):
            nn.init.trunc_normal_(layer.weight, std=INIT_STD)
        nn.init.normal_(self.head.weight, std=0.01)
        for layer in (self.q, self.v, self.proj, self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        # Keys' and values' norms differ in gain and bias alone: their gains go into the weights, the bias of the keys
        # changes no softmax, and that of the values is added after averaging.
        normed = F.layer_norm(tokens, tokens.shape[2:], eps=LAYER_NORM_EPS)
        queries = (
            query_times_keys(self.q(self.norm_q(self.query_token)), self.k.weight, self.heads) * self.norm_k.weight
        )
        values = attention_pool(normed, queries, self.v.weight * self.norm_v.weight) + self.v(self.norm_v.bias)
        return self.head(self.fc_norm(self.proj(values)))


class AimHead(nn.Module):
    """Tokens (B, T, D) -> logits (B, C): batch norm of the tokens without gain, attention of one query in heads of
    width 128, linear layer; no biases (ml-aim aim-v1/aim/v1/torch/layers.py, AttentionPoolingClassifier)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        if width % AIM_WIDTH:
            raise ValueError(f"tokens of width {width} cannot be split into attention heads of width {AIM_WIDTH}")
        self.bn = nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.cls_token = nn.Parameter(INIT_STD * torch.randn(width))
        self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.linear = nn.Linear(width, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.bn(tokens.flatten(0, 1)).view_as(tokens)
        queries = query_times_keys(self.cls_token, self.k.weight, len(self.cls_token) // AIM_WIDTH)
        return self.linear(attention_pool(tokens, queries, self.v.weight))


def capi_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """AdamW with a second beta of 0.95, without weight decay of biases (capi eval_classification.py:405-431)."""
    parameters = list(head.named_parameters())
    decayed = {"params": [value for name, value in parameters if "bias" not in name], "weight_decay": weight_decay}
    biases = {"params": [value for name, value in parameters if "bias" in name], "weight_decay": 0.0}
    return AdamW([decayed, biases], lr, betas=(0.9, 0.95))


def cae_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """SGD with momentum (scripts/cae_base_800e.sh: --opt sgd --momentum 0.9)."""
    return SGD(head.parameters(), lr, momentum=0.9, weight_decay=weight_decay)


def torch_adamw(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """torch's AdamW, with weight decay of all parameters: that of V-JEPA 2 (evals/image_classification_frozen/eval.py,
    init_opt) and AIM."""
    return AdamW(head.parameters(), lr, weight_decay=weight_decay)


def ep_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """LARS, which scales all parameters but the biases (efficient-probing util/lars.py)."""
    return Lars(head.parameters(), lr, weight_decay=weight_decay)


class AttentiveHeads:
    """Heads with an optimizer each, trained on the same tokens. Has the methods and attributes of
    `probes.linear.heads.Heads` that a sweep uses.

    A head's initial weights depend only on its index and the seed.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        make: Callable[[str], nn.Module],
        optimizer: Callable[[nn.Module, float, float], Optimizer],
        schedule: Schedule,
        *,
        sources: int = 0,
        clip: float = 0.0,
        seed: int = 0,
        device: str = "cpu",
        own: range | None = None,
    ) -> None:
        """
        Args:
            heads: All heads of the sweep.
            make: Name of a readout -> a new module on the CPU: tokens (B, T, D) -> logits (B, C).
            optimizer: (module, learning rate, weight decay) -> its optimizer.
            schedule: Of the learning rate of heads without a schedule of their own.
            sources: Number of CAPI's sources of features. Its loss is the mean over the heads of all sources, so every
                gradient is divided by the number of these heads. 0: each head has a loss of its own.
            clip: Largest gradient norm of a head; 0: no clipping.
            own: Indices of the heads that this process trains; all if None.
        """
        self.heads, self.own = tuple(heads), range(len(heads)) if own is None else own
        self.make, self.optimizer, self.schedule = make, optimizer, schedule
        self.clip = clip
        self.loss_weight = 1 / (sources * len(heads)) if sources else 1.0
        self.readouts = tuple(dict.fromkeys(heads[index].readout for index in self.own))
        self.modules: dict[int, nn.Module] = {}  # index of an own head -> module
        for index in self.own:
            with seeded(START, seed, index):
                self.modules[index] = make(heads[index].readout).to(device)
        self.optimizers = {
            index: optimizer(module, heads[index].lr, heads[index].weight_decay)
            for index, module in self.modules.items()
        }
        self.steps = 0
        self.diverged = torch.full((len(self.own),), -1, dtype=torch.int64, device=device)

    def step(self, tokens: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> Tensor:
        """One step of every own head on tokens (B, T, D) of its readout, labels (B,) -> losses (h,) before the step."""
        losses = torch.stack([self._step_head(index, tokens, labels, progress) for index in self.own])
        self.diverged = torch.where(~losses.isfinite() & (self.diverged < 0), self.steps, self.diverged)
        self.steps += 1
        return losses

    def _step_head(self, index: int, tokens: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> Tensor:
        head, module, optimizer = self.heads[index], self.modules[index].train(), self.optimizers[index]
        for group in optimizer.param_groups:
            group["lr"] = (head.schedule or self.schedule).at(head.lr, progress)
            if head.decay:
                group["weight_decay"] = head.decay.at(head.weight_decay, progress)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(module(tokens[head.readout]), labels)
        (loss * self.loss_weight).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def logits(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Tokens (B, T, D) of every readout -> logits (B, h, C); batch norms use their running statistics."""
        return torch.stack([self.modules[index].eval()(tokens[self.heads[index].readout]) for index in self.own], dim=1)

    def hits(self, tokens: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """For each own head, how many images it classifies correctly (h,) int64."""
        return (self.logits(tokens).argmax(dim=2) == labels[:, None]).sum(dim=0)

    def copy_head(self, index: int) -> "AttentiveHeads":
        """A copy of one of the own heads, without its optimizer's state."""
        copy = AttentiveHeads([self.heads[index]], self.make, self.optimizer, self.schedule)
        copy.modules[0].to(self.diverged.device).load_state_dict(self.modules[index].state_dict())
        return copy

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of a copy of one head."""
        return self.modules[0].state_dict()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, named by head: those of all processes together are one state."""
        tensors = {"steps": torch.tensor(self.steps)}
        for number, (index, module) in enumerate(self.modules.items()):
            head_tensors = module.state_dict() | optimizer_tensors(self.optimizers[index])
            tensors |= {f"{index}.{name}": value for name, value in head_tensors.items()}
            tensors[f"{index}.diverged"] = self.diverged[number]
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the own heads' tensors from a `state`, of this process or of all together."""
        all_heads = State(tensors=state)
        for number, (index, module) in enumerate(self.modules.items()):
            tensors = all_heads.under(f"{index}.")
            self.diverged[number] = tensors.pop("diverged")
            load_optimizer(self.optimizers[index], State(tensors=tensors))
            module.load_state_dict({name: value for name, value in tensors.items() if not name.startswith(OPTIMIZER)})
        self.steps = int(state["steps"])
