"""`bench reproduce --plan today`: its commands, what is missing, and published beside measured numbers."""

import shlex
from dataclasses import replace

import pytest
import timm

from bench import today
from bench.cli import parsed
from bench.published.values import published_values
from bench.reproduce import Measurement, Setup
from bench.run.calibration import machine
from bench.run.suites import catalogue, changed_protocols, choose_protocols
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import of_module
from engine.extensions import source_files

TINY = {"imagenet": "digits:", "ade20k": "tiny-ade20k:", "nyu": "tiny-nyu:"}
QUICK = "knn@dino,depth_linear@smoke"


def setup_of(out, **others) -> Setup:
    return Setup(**{"checkpoints": {}, "data": {}, "out": out, **others})


def test_the_networks_are_published_ones():
    for name, network in today.NETWORKS.items():
        scheme, _, model = network.reference.partition(":")
        assert timm.is_model_pretrained(model) if scheme == "timm" else scheme in source_files("importers"), name
        assert timm.is_model(network.timm or model.partition(".")[0]) and len(network.sha256) in (0, 64)


@pytest.mark.parametrize("name", today.NETWORKS)
def test_all_commands_of_the_plan_parse(name, tmp_path):
    """Those of the six protocols, and of variants for which the networks have published values."""
    setup, run = setup_of(tmp_path, processes=8), set()
    imported, network = [], today.NETWORKS[name]
    for words in today.commands(name, today.SUITE, setup):
        if words[:2] == ["bench", "import"]:
            arguments = parsed(words[1:])[1]
            assert arguments.image_size == network.image_size and words[2] == network.reference
            imported.append(str(arguments.out))
            continue
        assert words[:5] == ["torchrun", "--nproc-per-node", "8", "--no-python", "bench"]
        arguments = parsed(words[5:])[1]
        selected = changed_protocols(choose_protocols(arguments.suite, catalogue()), arguments.set)
        layouts = {protocol.layout or "imagenet" for protocol in selected}
        assert {data.partition("=")[0] for data in arguments.data} == layouts
        on_scenes = {bool(protocol.layout) for protocol in selected}
        assert arguments.name == (name,) and len(on_scenes) == 1
        assert list(arguments.checkpoint) == (imported if imported and on_scenes == {False} else [network.reference])
        run |= {(protocol.name, tuple(sorted(map(str, protocol.changes.items())))) for protocol in selected}
    assert len(imported) == bool(network.image_size)
    assert {(protocol, ()) for protocol in today.SUITE.split(",")} <= run
    values = today.published_of(name, today.SUITE)
    assert {value.protocol for value in values} <= {protocol for protocol, _ in run}
    assert all(value.checkpoint == name and value.data in today.IMAGES for value in values)


def test_work_is_counted_without_weights():
    export = today.sized_export("", "vit_tiny_patch16_224", 112)
    real = of_module(timm.create_model("vit_tiny_patch16_224"), ImportOptions(image_size=112))
    assert replace(export.spec, table_size=real.spec.table_size) == real.spec and not export.tensors


def test_the_time_depends_on_the_machine(tmp_path):
    setup = setup_of(tmp_path)
    eight, one = (
        list(today.forecasts("dino-s16", today.SUITE, setup, machine("h100", gpus, None, "bfloat16")))
        for gpus in (8, 1)
    )
    assert {job.job.protocol.name for job in eight} >= set(today.SUITE.split(","))
    assert not any(job.problem for job in eight)
    seconds = [sum(job.seconds for job in jobs) for jobs in (eight, one)]
    assert 3600 < seconds[0] < seconds[1] < 8 * seconds[0]
    assert today.total_cost(eight).startswith("about ") and "GB of disk" in today.total_cost(eight)


@pytest.fixture
def two(monkeypatch, exports):
    """Limit the plan to two networks, with random weights."""
    networks = {name: today.NETWORKS[name] for name in ("dino-b", "dinov2-s")}
    monkeypatch.setattr(today, "NETWORKS", networks)
    return dict(zip(networks, map(str, exports), strict=True))


@pytest.mark.slow
def test_the_script_can_be_repeated_and_ends_with_a_record_and_a_table(bench, two, tmp_path):
    options = ["--checkpoints", *(f"{name}={path}" for name, path in two.items())]
    options += ["--data", *(f"{name}={url}" for name, url in TINY.items()), "--out", tmp_path / "out"]
    code, text, _ = bench("reproduce", "--plan", "today", "--suite", QUICK, *options)
    lines = [line for line in text.splitlines() if line.startswith("bench ")]
    assert code == 0 and "set -euo pipefail" in text and text.count("# dino") == 2 and len(lines) == 1 + 2 * 2 + 2
    times = []
    for _ in range(2):
        for line in lines:
            words = shlex.split(line.partition(" | ")[0])
            code, out, err = bench(*words[1:])
            assert code == 0, (line, err)
        results = sorted((tmp_path / "out").rglob("*seed0.json"))
        times.append([path.stat().st_mtime_ns for path in results])
    assert len(times[0]) == 4 and times[0] == times[1], "results are not measured again"
    assert bench("record", "--check", f"{tmp_path}/out-record")[0] == 0
    rows = [[cell.strip() for cell in line.split(" | ")] for line in out.splitlines() if line.startswith("| d")]
    for value in published_values():
        if value.checkpoint in two and value.protocol == "knn@dino" and value.table.startswith("dino:"):
            (row,) = [row for row in rows if row[1:4] == ["knn@dino", value.metric, f"{value.value:g}"]][-1:]
            assert "on other images" in row[4] and row[5].startswith("-") and float(row[6]) < -1
    assert [row[:2] for row in rows if row[1] == "depth_linear@smoke"] == [
        [f"| {name}", "depth_linear@smoke"] for name in two
    ]
    assert any("not measured" in row for row in rows)


def test_differences_are_given_in_points_and_standard_errors():
    value = replace(next(value for value in published_values() if value.metric == "top1"), value=75.0)
    measured = Measurement(number=76.0, interval=(76 - 1.959964 * 0.4, 76 + 1.959964 * 0.4), remarks=("elsewhere",))
    text, difference, errors = today.differences(value, measured)
    assert (text, difference, errors) == ("76.00 [75.2, 76.8]; elsewhere", "+1.00", "+2.5")
    assert today.differences(value, Measurement(number=76.0))[2] == ""
    assert today.differences(value, None)[0] == "not measured"


def test_missing_weights_and_data_are_reported_before_anything_runs(bench, two, tmp_path, monkeypatch):
    data = TINY | {"imagenet": f"imagenet:{tmp_path}/none"}
    sets = ["--data", *(f"{name}={url}" for name, url in data.items())]
    weights = ["--checkpoints", f"dino-b={tmp_path}/none.pth"]
    code, out, _ = bench("reproduce", "today", "--check", *sets, *weights, "--out", tmp_path / "out")
    missing = [line for line in out.splitlines() if line.startswith("missing: ")]
    assert code == 1 and len(missing) == 2 and "imagenet: " in missing[0] and f"{tmp_path}/none.pth" in missing[1]
    assert sum(line.startswith("note: ") for line in out.splitlines()) == 2  # the tiny sets differ from the published
    other_weights = tmp_path / "model.safetensors"
    other_weights.write_bytes(b"other weights")
    monkeypatch.setattr(today, "cached_file", lambda network: other_weights)
    monkeypatch.setattr(today, "NETWORKS", {"dino-b": replace(today.NETWORKS["dino-b"], sha256="0" * 64)})
    sets = ["--data", *(f"{name}={url}" for name, url in TINY.items())]
    code, out, _ = bench("reproduce", "today", "--check", *sets, "--out", tmp_path / "out")
    assert code == 1 and f"{other_weights} is not the published file" in out
    monkeypatch.setattr(today, "cached_file", lambda network: None)
    assert bench("reproduce", "today", "--check", *sets, "--out", tmp_path / "out")[0] == 0


def test_options_of_the_plan_are_refused_elsewhere(refused):
    refused("reproduce", "moca:table9", "--check", named="--check | today")
    refused("reproduce", "moca:table9", "--suite", "knn", named="--suite | today")
    refused("reproduce", "--plan", "today", "--assume", "h1000", named="h1000 | h100")
