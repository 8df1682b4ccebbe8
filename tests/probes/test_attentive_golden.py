"""Attentive heads against recordings of CAPI's, V-JEPA 2's and efficient probing's own code, in float64; CAE's and
AIM's against torch's own attention."""

import re
from ast import literal_eval

import numpy as np
import pytest
import torch
from recordings import ROOT, absent, facts, tensors, under
from torch.nn import functional as F

from engine.training.schedules import CosineAhead, CosineToTheEnd, TrainProgress, WarmupCosine
from probes.linear.attention import (
    AIM_WIDTH,
    CAPI_WIDTH,
    AimHead,
    AttentiveHeads,
    CaeHead,
    CapiHead,
    Vjepa2Head,
    cae_optimizer,
    capi_optimizer,
    ep_head,
    ep_optimizer,
    torch_adamw,
)
from probes.linear.heads import Head

VALUES, WEIGHTS = 1e-9, 1e-7  # tolerances of the recordings' README: losses and logits; gradients and trained weights


class LinearHead(torch.nn.Module):
    """CAPI's head on one vector per image, which shares an optimiser with those on patches."""

    def __init__(self, width, classes):
        super().__init__()
        self.linear = torch.nn.Linear(width, classes)

    def forward(self, tokens):
        return self.linear(tokens.flatten(1))


def cases(family):
    return [f"attentive/{path.name}" for path in sorted((ROOT / "attentive").glob(f"{family}*.safetensors"))]


def for_each_case(family):
    return pytest.mark.parametrize("path", cases(family) or [None])


def recording(path):
    return (tensors(path), facts(path)) if path else absent("attentive heads")


def assert_close(ours, recorded, limit):
    torch.testing.assert_close(ours, recorded.double(), rtol=0, atol=limit * max(1.0, recorded.abs().max().item()))


def assert_weights_close(module, recorded, limit=WEIGHTS):
    """Without the biases of keys, whose gradient is 0."""
    for name, value in module.state_dict().items():
        ours, expected = value, recorded[name]
        if re.search(r"(^|\.)q?kv\.bias$", name):
            parts = 3 if "qkv" in name else 2
            ours, expected = (
                torch.cat([*bias.chunk(parts)[: parts - 2], bias.chunk(parts)[-1]]) for bias in (ours, expected)
            )
        if ours.is_floating_point():
            assert (ours - expected).norm() <= limit * max(1.0, expected.norm().item()), name


def load_initial_weights(heads, data, prefix="head{}.init."):
    for index, module in heads.modules.items():
        module.double().load_state_dict(under(data, prefix.format(index)))
    return heads


def assert_gradients_close(module, recorded):
    for name, value in module.named_parameters():
        if name in recorded and not re.search(r"kv\.bias$", name):
            assert (value.grad - recorded[name]).norm() <= WEIGHTS * max(1e-3, recorded[name].norm().item()), name


@for_each_case("capi")
def test_capi_trains_a_grid_and_selects_the_recorded_heads(path):
    data, config = recording(path)
    entries = [literal_eval(name) for name in config["heads"]]
    scale = config["batch_size"] * config["world_size"] / 256
    grid = [Head(readout=source, lr=lr * scale, weight_decay=decay) for source, (lr, decay) in entries]

    def make(source):
        kind = CapiHead if source in ("patch", "obj", "reg") else LinearHead
        return kind(config["dim"] * (2 if source == "cls_avg_patch" else 1), config["classes"])

    def read(split, rows):
        cls, patch = (data[f"in.{split}.{name}"][rows].double() for name in ("cls", "patch"))
        patch, objects = patch.flatten(1, 2), data[f"in.{split}.obj"][rows].double()
        mean = patch.mean(dim=1)
        vectors = {"cls": cls, "avg_patch": mean, "cls_avg_patch": torch.cat([cls, mean], dim=1)}
        return {name: value[:, None] for name, value in vectors.items()} | {
            "patch": patch,
            "obj": objects,
            "reg": objects,
        }

    schedule = CosineToTheEnd(warmup=config["warmup_iters"])
    heads = AttentiveHeads(grid, make, capi_optimizer, schedule, sources=1)
    load_initial_weights(heads, data)
    for name, value in under(data, "").items():
        if match := re.fullmatch(r"head(\d+)\.logits0", name):
            assert_close(heads.logits(read("train", data["batches"][0]))[:, int(match[1])], value, VALUES)
    for number, rows in enumerate(data["batches"]):
        progress = TrainProgress(step=number, steps_per_epoch=1, epochs=config["n_iters"])
        assert schedule.at(1.0, progress) == pytest.approx(float(data["schedule"][number]), abs=1e-12)
        losses = heads.step(read("train", rows), data["in.train.labels"][rows], progress)
        assert_close(losses.mean(), data["loss"][number], VALUES)
        if not number:
            for index, module in heads.modules.items():
                assert_gradients_close(module, under(data, f"head{index}.grad0."))
    for index, module in heads.modules.items():
        assert_weights_close(module, under(data, f"head{index}.end."))
    order = np.random.default_rng(42).permutation(config["n_train"])
    held_out = data["split.val"]
    assert order[-len(held_out) :].tolist() == held_out.tolist()
    hits = heads.hits(read("train", held_out), data["in.train.labels"][held_out]).double() / len(held_out)
    torch.testing.assert_close(hits, data["val.acc"].double(), rtol=0, atol=1e-12)
    chosen = [
        max((p for p, head in enumerate(grid) if head.readout == source), key=lambda p: (hits[p], -p))
        for source in dict.fromkeys(head.readout for head in grid)
    ]
    assert chosen == torch.nonzero(data["val.best"])[:, 0].tolist()
    test = heads.hits(read("test", slice(None)), data["in.test.labels"]).double() / config["n_test"]
    accuracies = {str(entries[index]): float(test[index]) for index in chosen}
    assert [accuracies[name] for name in config["selected"]] == pytest.approx(data["test.acc"].tolist(), abs=1e-12)


@for_each_case("capi")
def test_heads_of_one_source_train_the_same_without_the_others(path):
    """Heads of different sources share nothing but the loss, which is their mean."""
    data, config = recording(path)
    entries = [literal_eval(name) for name in config["heads"]]
    scale, sources = config["batch_size"] * config["world_size"] / 256, len({source for source, _ in entries})
    indices = [index for index, (source, _) in enumerate(entries) if source == "patch"]
    grid = [
        Head(readout="patch", lr=lr * scale, weight_decay=wd) for lr, wd in (entries[index][1] for index in indices)
    ]
    schedule = CosineToTheEnd(warmup=config["warmup_iters"])

    def make(source):
        return CapiHead(config["dim"], config["classes"])

    heads = AttentiveHeads(grid, make, capi_optimizer, schedule, sources=sources)
    for module, index in zip(heads.modules.values(), indices, strict=True):
        module.double().load_state_dict(under(data, f"head{index}.init."))
    for number, rows in enumerate(data["batches"]):
        progress = TrainProgress(step=number, steps_per_epoch=1, epochs=config["n_iters"])
        tokens = data["in.train.patch"][rows].double().flatten(1, 2)
        heads.step({"patch": tokens}, data["in.train.labels"][rows], progress)
        if not number:
            for module, index in zip(heads.modules.values(), indices, strict=True):
                assert_gradients_close(module, under(data, f"head{index}.grad0."))
    for module, index in zip(heads.modules.values(), indices, strict=True):
        assert_weights_close(module, under(data, f"head{index}.end."))


@for_each_case("vjepa2")
def test_vjepa2_trains_heads_at_separate_rates(path):
    data, config = recording(path)
    for number, settings in enumerate(config["optimisers"]):

        def make(readout):
            return Vjepa2Head(config["dim"], config["classes"], config["num_probe_blocks"], config["num_heads"])

        schedule = CosineAhead(warmup=settings["warmup"], start=settings["start_lr"], floor=settings["final_lr"])
        decay = CosineAhead(floor=settings["final_wd"])
        head = Head(readout="tokens", lr=settings["ref_lr"], weight_decay=settings["ref_wd"], decay=decay)
        heads = AttentiveHeads([head], make, torch_adamw, schedule)
        load_initial_weights(heads, under(data, f"head{number}.", "head0."))
        module = heads.modules[0]
        assert_close(module.pooled(data["in.tokens"][0].double()), data[f"head{number}.pooled0"], VALUES)
        assert_close(
            heads.logits({"tokens": data["in.tokens"][0].double()})[:, 0], data[f"head{number}.logits0"], VALUES
        )
        for step, (tokens, labels) in enumerate(zip(data["in.tokens"].double(), data["in.labels"], strict=True)):
            progress = TrainProgress(step=step, steps_per_epoch=config["iterations_per_epoch"], epochs=config["epochs"])
            right = 100 * heads.hits({"tokens": tokens}, labels).double() / len(labels)
            assert float(right) == pytest.approx(float(data["acc"][step, number]), abs=1e-9)
            loss = heads.step({"tokens": tokens}, labels, progress)
            assert_close(loss[0], data["loss"][step, number], VALUES)
            (group,) = heads.optimizers[0].param_groups
            assert group["lr"] == pytest.approx(float(data["lr"][step, number]), abs=1e-12)
            assert group["weight_decay"] == pytest.approx(float(data["wd"][step, number]), abs=1e-12)
            if not step:
                assert_gradients_close(module, under(data, f"head{number}.grad0."))
        assert_weights_close(module, under(data, f"head{number}.end."))


@for_each_case("ep")
def test_efficient_probing_trains_queries_by_lars(path):
    data, config = recording(path)
    head = Head(readout="patches", lr=config["lr"], weight_decay=config["weight_decay"])
    schedule = WarmupCosine(warmup=config["warmup_epochs"])

    def make(readout):
        return ep_head(config["dim"], config["classes"], config["queries"], config["d_out"])

    heads = load_initial_weights(AttentiveHeads([head], make, ep_optimizer, schedule), data, "init.")
    module = heads.modules[0]
    first = data["in.tokens"][0].double()
    assert_close(module[0](first), data["pooled0"], VALUES)
    for step, (tokens, labels) in enumerate(zip(data["in.tokens"].double(), data["in.labels"], strict=True)):
        progress = TrainProgress(step=step, steps_per_epoch=config["iterations_per_epoch"], epochs=config["epochs"])
        loss = heads.step({"patches": tokens}, labels, progress)
        assert_close(loss[0], data["loss"][step], VALUES)
        assert heads.optimizers[0].param_groups[0]["lr"] == pytest.approx(float(data["lr"][step]), abs=1e-12)
        if not step:
            assert_gradients_close(module, under(data, "grad0."))
    assert_weights_close(module, under(data, "end."))
    assert_close(heads.logits({"patches": first})[:, 0], data["eval.logits"], VALUES)


def test_capi_and_cae_heads_equal_torch_attention():
    """torch's attention on keys and values of every token as a second opinion."""
    torch.manual_seed(0)
    width, heads, tokens = 2 * CAPI_WIDTH, 2, torch.randn(3, 7, 2 * CAPI_WIDTH, dtype=torch.float64)
    capi, cae = CapiHead(width, 5).double(), CaeHead(width, 5, heads).double().eval()
    for parameter in (*capi.parameters(), *cae.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)

    def split(values):
        return values.unflatten(-1, (heads, -1)).transpose(1, 2)

    def attention(query, keys, values):
        pooled = F.scaled_dot_product_attention(split(query.expand(3, 1, -1)), split(keys), split(values))
        return pooled.transpose(1, 2).flatten(2)[:, 0]

    plain = capi.linear(attention(capi.query_token, *capi.kv(tokens).chunk(2, dim=2)))
    torch.testing.assert_close(capi(tokens), plain, rtol=0, atol=1e-12)
    query = cae.q(cae.norm_q(cae.query_token))
    values = attention(query, cae.k(cae.norm_k(tokens)), cae.v(cae.norm_v(tokens)))
    torch.testing.assert_close(cae(tokens), cae.head(cae.fc_norm(cae.proj(values))), rtol=0, atol=1e-12)


def test_aim_attends_to_normalised_tokens():
    torch.manual_seed(0)
    tokens, head = torch.randn(3, 7, 2 * AIM_WIDTH, dtype=torch.float64), AimHead(2 * AIM_WIDTH, 5).double()
    torch.nn.init.normal_(head.cls_token)
    normal = (tokens - tokens.mean(dim=(0, 1))) / (tokens.var(dim=(0, 1), correction=0) + 1e-6).sqrt()
    query, keys, values = (
        values.unflatten(-1, (2, AIM_WIDTH)).transpose(1, 2)
        for values in (head.cls_token.expand(3, 1, -1), head.k(normal), head.v(normal))
    )
    pooled = F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(1)
    torch.testing.assert_close(head.train()(tokens), head.linear(pooled), rtol=0, atol=1e-12)


def test_gradients_are_clipped_head_by_head():
    tokens = {"patches": 100 * torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(0))}
    grid = [Head(readout="patches", lr=lr) for lr in (1.0, 2.0)]
    heads = AttentiveHeads(grid, lambda readout: CaeHead(8, 8, 2), cae_optimizer, CosineAhead(), clip=1e-3)
    before = [torch.nn.utils.parameters_to_vector(module.parameters()).clone() for module in heads.modules.values()]
    progress = TrainProgress(step=0, steps_per_epoch=1, epochs=10)
    heads.step(tokens, torch.arange(8), progress)
    for head, module, old in zip(grid, heads.modules.values(), before, strict=True):
        moved = torch.nn.utils.parameters_to_vector(module.parameters()) - old
        assert moved.norm().item() == pytest.approx(1e-3 * CosineAhead().at(head.lr, progress), rel=1e-3)


@pytest.mark.parametrize("optimizer", [capi_optimizer, cae_optimizer, ep_optimizer, torch_adamw])
def test_a_resumed_state_has_the_same_bits_for_any_division_of_heads(optimizer):
    grid = [Head(readout="patches", lr=lr, weight_decay=0.01) for lr in (0.01, 0.03, 0.1)]
    schedule = CosineToTheEnd(warmup=1)

    def trained(own, steps, state=None):
        heads = AttentiveHeads(grid, lambda readout: ep_head(8, 3, 2), optimizer, schedule, own=own, sources=1)
        if state:
            heads.load(state)
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens, labels = torch.randn(6, 5, 8, generator=generator), torch.arange(6) % 3
            heads.step({"patches": tokens}, labels, TrainProgress(step=step, steps_per_epoch=2, epochs=2))
        return heads.state()

    uninterrupted = trained(range(3), range(4))
    saved = {name: value.clone() for name, value in trained(range(3), range(2)).items()}
    first, second = (trained(own, range(2, 4), saved) for own in (range(1), range(1, 3)))
    resumed = first | second
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in uninterrupted.items())
