"""Heads that pool tokens by attention in front of a linear layer, and how each source trains them.

Q queries attend to T tokens, each with one or several attention heads. Keys and values are never computed token by
token: a query is folded into the key weights, (q W_k) x instead of q (W_k x), and values are projected once the tokens
are averaged, W_v (sum a x) instead of sum a (W_v x). The result is the same to rounding at about 1/64 of the products,
so that dozens of heads fit beside one forward pass of the backbone. A key's bias adds the same to all tokens, so the
softmax does not see it, and its gradient is exactly 0.

Names of parameters are those of the sources. B images of a batch, T tokens, D width, C classes, H rows of attention
(queries times attention heads), h heads of a sweep that this process trains.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block
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
INIT = 0.02  # standard deviation of initial weights in every source
LAYER_NORM_EPS = 1e-6  # of CAE's norms (models/modeling_finetune.py); V-JEPA 2 has torch's 1e-5


def attended(tokens: Tensor, asked: Tensor, value: Tensor) -> Tensor:
    """Tokens (B, T, D), averaged by the softmax of their products with `asked` (H, D), and projected by the rows of
    `value` (O, D), an H-th for each average -> (B, O)."""
    weights = (tokens @ asked.T).softmax(dim=1)
    pooled = weights.transpose(1, 2) @ tokens  # (B, H, D)
    return torch.einsum("bhd,hwd->bhw", pooled, value.unflatten(0, (len(asked), -1))).flatten(1)


def folded(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """A query (D,) of some attention heads, scaled and multiplied into the key weights (D, D) -> (heads, D)."""
    query, key = query.unflatten(0, (heads, -1)), key.unflatten(0, (heads, -1))
    return torch.einsum("hw,hwd->hd", query, key) * query.shape[1] ** -0.5


class CapiHead(nn.Module):
    """A learned query, keys and values with a bias, heads of width 64, linear (capi eval_classification.py:203-243)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        if width % CAPI_WIDTH:
            raise ValueError(f"attention heads of {CAPI_WIDTH} numbers do not divide tokens of {width}")
        self.query_token = nn.Parameter(torch.empty(width))
        self.kv, self.linear = nn.Linear(width, 2 * width), nn.Linear(width, classes)
        for weight in (self.query_token, self.kv.weight, self.linear.weight):
            nn.init.trunc_normal_(weight, std=INIT)
        for layer in (self.kv, self.linear):
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        key, value = self.kv.weight.chunk(2)
        asked = folded(self.query_token, key, len(key) // CAPI_WIDTH)
        return self.linear(attended(tokens, asked, value) + self.kv.bias.chunk(2)[1])


class CrossAttentionBlock(nn.Module):
    """One query attends to all tokens, behind a norm; MLP. The query itself is not normalised before attention, and
    there is no projection behind it (vjepa2 src/models/utils/modules.py, with its output projection commented out)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.xattn = nn.ModuleDict({"q": nn.Linear(width, width), "kv": nn.Linear(width, 2 * width)})
        self.mlp = Mlp(width, 4 * width)

    def forward(self, query: Tensor, tokens: Tensor) -> Tensor:
        """query (D,), tokens (B, T, D) -> (B, D)."""
        key, value = self.xattn["kv"].weight.chunk(2)
        asked = folded(self.xattn["q"](query), key, self.heads)
        query = query + attended(self.norm1(tokens), asked, value) + self.xattn["kv"].bias.chunk(2)[1]
        return query + self.mlp(self.norm2(query))


class Vjepa2Head(nn.Module):
    """Blocks of self-attention over all tokens, one of cross-attention with one query, linear (vjepa2
    src/models/attentive_pooler.py). depth: blocks in all."""

    def __init__(self, width: int, classes: int, depth: int, heads: int, std: float = INIT) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention_heads={heads} do not divide tokens of {width}")
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
    """Q queries of full width and no keys; the values are cut into Q parts, one for each query's weights
    (efficient-probing poolings/ep.py)."""

    def __init__(self, width: int, queries: int, shrink: int = 1) -> None:
        """shrink: how many times narrower the values are than the tokens."""
        super().__init__()
        if width // shrink % queries:
            raise ValueError(f"queries={queries} do not divide values of {width // shrink} numbers")
        self.cls_token = nn.Parameter(INIT * torch.randn(1, queries, width))
        self.v = nn.Linear(width, width // shrink, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D / shrink)."""
        return attended(tokens, self.cls_token[0] * tokens.shape[2] ** -0.5, self.v.weight)


def ep_head(width: int, classes: int, queries: int, shrink: int = 1) -> nn.Sequential:
    """Efficient probing: pooling, batch norm without gain, linear (efficient-probing probe_heads.py)."""
    norm = nn.BatchNorm1d(width // shrink, affine=False, eps=1e-6)
    return nn.Sequential(EfficientPooling(width, queries, shrink), norm, nn.Linear(width // shrink, classes))


class CaeHead(nn.Module):
    """Cross-attention of one query with norms of its own for query, keys and values, projection, batch norm without
    gain, linear (CAE models/modeling_finetune.py:141-256, :385-399; tools/run_attentive.py)."""

    def __init__(self, width: int, classes: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention_heads={heads} do not divide tokens of {width}")
        self.heads = heads
        self.query_token = nn.Parameter(torch.zeros(width))
        self.norm_q, self.norm_k, self.norm_v = (nn.LayerNorm(width, eps=LAYER_NORM_EPS) for _ in range(3))
        self.q, self.v, self.proj = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)
        self.fc_norm, self.head = nn.BatchNorm1d(width, affine=False), nn.Linear(width, classes)
        for layer in (self.q, self.k, self.v, self.proj):
            nn.init.trunc_normal_(layer.weight, std=INIT)
        nn.init.normal_(self.head.weight, std=0.01)
        for layer in (self.q, self.v, self.proj, self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        plain = F.layer_norm(tokens, tokens.shape[2:], eps=LAYER_NORM_EPS)
        asked = folded(self.q(self.norm_q(self.query_token)), self.k.weight, self.heads) * self.norm_k.weight
        values = attended(plain, asked, self.v.weight * self.norm_v.weight) + self.v(self.norm_v.bias)
        return self.head(self.fc_norm(self.proj(values)))


class AimHead(nn.Module):
    """Batch norm without gain of all tokens, cross-attention of one query with heads of width 128, linear; no biases
    (ml-aim aim-v1/aim/v1/torch/layers.py, AttentionPoolingClassifier)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        if width % AIM_WIDTH:
            raise ValueError(f"attention heads of {AIM_WIDTH} numbers do not divide tokens of {width}")
        self.bn = nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.cls_token = nn.Parameter(INIT * torch.randn(width))
        self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.linear = nn.Linear(width, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.bn(tokens.flatten(0, 1)).view_as(tokens)
        asked = folded(self.cls_token, self.k.weight, len(self.cls_token) // AIM_WIDTH)
        return self.linear(attended(tokens, asked, self.v.weight))


def capi_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """AdamW with a second beta of 0.95; nothing whose name has "bias" decays (eval_classification.py:405-431)."""
    named = list(head.named_parameters())
    decayed = {"params": [value for name, value in named if "bias" not in name], "weight_decay": weight_decay}
    plain = {"params": [value for name, value in named if "bias" in name], "weight_decay": 0.0}
    return AdamW([decayed, plain], lr, betas=(0.9, 0.95))


def cae_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """SGD with momentum (scripts/cae_base_800e.sh: --opt sgd --momentum 0.9)."""
    return SGD(head.parameters(), lr, momentum=0.9, weight_decay=weight_decay)


def torch_adamw(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """AdamW as torch has it, AIM's; everything decays (vjepa2 evals/image_classification_frozen/eval.py, init_opt)."""
    return AdamW(head.parameters(), lr, weight_decay=weight_decay)


def ep_optimizer(head: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """LARS; the queries have three dimensions and are scaled, biases are not (efficient-probing util/lars.py)."""
    return Lars(head.parameters(), lr, weight_decay=weight_decay)


class AttentiveHeads:
    """Heads with an optimiser each, trained together on the same tokens: what `probes.linear.heads.Heads` is to linear
    ones, with the same `own`, `diverged`, `hits`, `alone`, `state` and `load`.

    A head's initial weights depend on its place and the seed alone. sources: of CAPI's loss, which is the mean over the
    heads of so many sources of features, of which these are one, and divides every gradient by their number; 0: each
    head has a loss of its own. clip: largest norm of a head's gradient; 0: any.
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
        """make: a head of a readout, on the CPU."""
        self.heads, self.own = tuple(heads), range(len(heads)) if own is None else own
        self.make, self.optimizer, self.schedule = make, optimizer, schedule
        self.clip = clip
        self.share = 1 / (sources * len(heads)) if sources else 1.0
        self.readouts = tuple(dict.fromkeys(heads[place].readout for place in self.own))
        self.modules: dict[int, nn.Module] = {}
        for place in self.own:
            with seeded(START, seed, place):
                self.modules[place] = make(heads[place].readout).to(device)
        self.optimizers = {
            place: optimizer(module, heads[place].lr, heads[place].weight_decay)
            for place, module in self.modules.items()
        }
        self.steps = 0
        self.diverged = torch.full((len(self.own),), -1, dtype=torch.int64, device=device)

    def step(self, tokens: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> Tensor:
        """One step of every own head on tokens (B, T, D) of its readout and labels (B,) -> losses (h,) before it."""
        losses = torch.stack([self._step(place, tokens, labels, progress) for place in self.own])
        self.diverged = torch.where(~losses.isfinite() & (self.diverged < 0), self.steps, self.diverged)
        self.steps += 1
        return losses

    def _step(self, place: int, tokens: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> Tensor:
        head, module, optimizer = self.heads[place], self.modules[place].train(), self.optimizers[place]
        for group in optimizer.param_groups:
            group["lr"] = (head.schedule or self.schedule).at(head.lr, progress)
            if head.decay:
                group["weight_decay"] = head.decay.at(head.weight_decay, progress)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(module(tokens[head.readout]), labels)
        (loss * self.share).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def logits(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Tokens (B, T, D) of every readout -> logits (B, h, C); batch norms use their running statistics."""
        return torch.stack([self.modules[place].eval()(tokens[self.heads[place].readout]) for place in self.own], dim=1)

    def hits(self, tokens: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Number of images that each own head gets right (h,) int64."""
        return (self.logits(tokens).argmax(dim=2) == labels[:, None]).sum(dim=0)

    def alone(self, place: int) -> "AttentiveHeads":
        """A copy of one of the own heads, without its optimiser's state."""
        copied = AttentiveHeads([self.heads[place]], self.make, self.optimizer, self.schedule)
        copied.modules[0].to(self.diverged.device).load_state_dict(self.modules[place].state_dict())
        return copied

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by head and name: the same however heads are divided."""
        tensors = {"steps": torch.tensor(self.steps)}
        for number, (place, module) in enumerate(self.modules.items()):
            entries = module.state_dict() | optimizer_tensors(self.optimizers[place])
            tensors |= {f"{place}.{name}": value for name, value in entries.items()}
            tensors[f"{place}.diverged"] = self.diverged[number]
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state` of heads of the same arguments, or of all processes' shares of them."""
        whole = State(tensors=state)
        for number, (place, module) in enumerate(self.modules.items()):
            entries = whole.under(f"{place}.")
            self.diverged[number] = entries.pop("diverged")
            load_optimizer(self.optimizers[place], State(tensors=entries))
            module.load_state_dict({name: value for name, value in entries.items() if not name.startswith(OPTIMIZER)})
        self.steps = int(state["steps"])
