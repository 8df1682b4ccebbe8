"""Every importer reproduces the official activations, and no tensor can be lost, swapped or guessed unnoticed.

Expected values were computed by the official code (examples.py). A mutation is caught if the import is refused or the
recorded activations are missed.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import recorded_example
import torch
from examples import EXAMPLES, Example
from mutations import WITHOUT_EFFECT, mutations_of, redrawn

from checkpoints.export import ViTExport
from checkpoints.fingerprint import fingerprint, fingerprint_differences
from checkpoints.import_options import ImportOptions
from checkpoints.importing import HEADS, BranchTensors, import_file
from checkpoints.resolve import detect, load
from checkpoints.spec import ViTSpec
from engine.extensions import load_extension, source_files

TOLERANCE = 1e-6  # relative to the largest recorded value; unmutated imports stay under 5e-7, the rounding of float32


def imported(example: Example, **changes) -> ViTExport:
    return import_file(load_extension("importers", example.importer), example.file(**changes), example.options)


@torch.no_grad()
def deviation(example: Example, export: ViTExport) -> float:
    """Largest difference to the recording, relative to its largest value; infinite for NaN and other shapes."""
    worst = 0.0
    for ours, official in example.recorded(export):
        if ours.shape != official.shape:
            return float("inf")
        worst = max(worst, float(((ours - official).abs().max() / official.abs().max()).nan_to_num(nan=float("inf"))))
    return worst


def is_caught(example: Example, **changes) -> bool:
    try:
        return deviation(example, imported(example, **changes)) > TOLERANCE
    except ValueError:
        return True


def test_every_importer_has_an_example():
    covered = {make().importer for make in EXAMPLES.values()}
    # timm and transformers have libraries to compare with: test_timm_names.py, test_transformers.py
    assert covered | {"timm", "transformers"} == set(source_files("importers"))


@pytest.mark.parametrize("key", EXAMPLES)
def test_imports_compute_the_official_activations(key):
    """From a file whose format is detected and whose tensors are all used or dropped for a known reason."""
    example = EXAMPLES[key]()
    assert detect(example.file()) == example.importer
    export = imported(example)
    assert deviation(example, export) < TOLERANCE
    assert export.facts["used_tensors"] + sum(export.facts["dropped"].values()) == len(example.tree)


@cache
def used_tensors(key: str) -> list[str]:
    """Names of the tensors whose change changes the export's tensors; no network is run."""
    example = EXAMPLES[key]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ViTExport, "build", lambda export: None)
        patch.setattr("checkpoints.export.fingerprint", lambda network, preparation: {})
        digest = imported(example).digest
        return [name for name, tensor in example.tree.items() if digest_with(example, name, tensor + 1) != digest]


def digest_with(example: Example, name: str, tensor: torch.Tensor) -> str:
    try:
        return imported(example, **{name: tensor}).digest
    except ValueError:
        return "refused"


LATER_BLOCK = re.compile(r"(block|layer)\w*\.[1-9]")
# Absolute positions and two branches, relative positions and tokens, rotary positions and registers, and a class token
# of its own; the other importers read files of these kinds.
SAMPLE = ("dino", "beit", "dinov3", "extrema")
SAMPLED = [pytest.param(key, marks=() if key in SAMPLE else pytest.mark.exhaustive) for key in EXAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "all_mutations"),
    [(key, False) for key in SAMPLE] + [pytest.param(key, True, marks=pytest.mark.exhaustive) for key in EXAMPLES],
)
def test_a_change_of_any_used_tensor_is_caught(key, all_mutations, monkeypatch):
    """By default one kind of change, in turn, for tensors outside of blocks and in first blocks of a few files."""
    example = EXAMPLES[key]()
    names = used_tensors(key)
    assert len(names) == imported(example).facts["used_tensors"]
    built = []  # networks of the imports; without fingerprints, so that only the recording can catch a change
    monkeypatch.setattr("checkpoints.export.fingerprint", lambda network, preparation: built.append(network) or {})
    monkeypatch.setattr(recorded_example, "BUILT", built)
    assert deviation(example, imported(example)) < TOLERANCE
    uncaught = []
    if not all_mutations:  # importers treat all blocks alike
        names = [name for name in names if not LATER_BLOCK.search(name)]
    for index, name in enumerate(names):
        mutations = list(mutations_of(name, example.tree[name]).items())
        chosen = mutations if all_mutations else [mutations[index % len(mutations)]]
        uncaught += [f"{name} {kind}" for kind, changes in chosen if not is_caught(example, **changes)]
    assert not uncaught


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_renamed_tensor_is_refused(step):
    """Used or dropped, in the branch that is imported; importers treat all blocks alike. By default each fourth."""
    for key in EXAMPLES:
        example = EXAMPLES[key]()
        importer = load_extension("importers", example.importer)
        chosen = example.options.branch or next(iter(importer.BRANCHES))
        others = tuple(p for branch, prefixes in importer.BRANCHES.items() for p in prefixes if branch != chosen and p)
        unchecked = (".decoder.", ".head.") if example.importer == "mst" else ()  # whose official names are unknown
        for name in list(example.tree)[::step]:
            is_checked = not name.startswith(others or ("nothing",)) and not any(part in name for part in unchecked)
            if is_checked and not LATER_BLOCK.search(name):
                with pytest.raises(ValueError):
                    imported(example, **{name: None, f"{name}_old": example.tree[name]})


def swapped_thirds(export: ViTExport, order: tuple[int, int, int]) -> ViTExport:
    """The q, k and v rows of every projection in another order; separate biases are reordered alike."""
    tensors = dict(export.tensors)
    for name, tensor in export.tensors.items():
        if ".attn.qkv." in name:
            thirds = tensor.chunk(3)
            tensors[name] = torch.cat([thirds[i] for i in order])
        for kind, other in zip("qkv", order, strict=True):
            if f".{kind}_proj." in name:
                tensors[name] = export.tensors[name.replace(f"{kind}_proj", f"{'qkv'[other]}_proj")]
    return replace(export, tensors=tensors)


def other_heads(spec: ViTSpec) -> int:
    """Another number of heads that divides the width, twice as many if possible."""
    allowed = [heads for heads in range(1, spec.width + 1) if spec.width % heads == 0 and heads != spec.heads]
    return min(allowed, key=lambda heads: abs(heads - 2 * spec.heads))


def other_eps(spec: ViTSpec) -> float:
    return 1e-6 if spec.norm_eps == 1e-5 else 1e-5


CONVENTIONS = {
    "keys before queries": lambda export: swapped_thirds(export, (1, 0, 2)),
    "values before keys": lambda export: swapped_thirds(export, (0, 2, 1)),
    "another LayerNorm eps": lambda export: replace(export, spec=replace(export.spec, norm_eps=other_eps(export.spec))),
    "other heads": lambda export: replace(export, spec=replace(export.spec, heads=other_heads(export.spec))),
}


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias"])
def test_a_wrong_position_rule_misses_the_official_local_crop(rule):
    example = EXAMPLES["dino_student"]()
    export = imported(example)
    assert deviation(example, replace(export, spec=replace(export.spec, position_resize=rule))) > 1e-3


@pytest.mark.parametrize("key", SAMPLED)
def test_a_wrong_convention_changes_the_activations_and_the_fingerprint(key):
    example = EXAMPLES[key]()
    export = imported(example)
    assert export.verify() == []
    wrong = [change(export) for name, change in CONVENTIONS.items() if name != "other heads"]
    # Relative positions, and rotary ones of the kind "unit", fix the number of heads.
    if export.spec.relative_position == "none" and export.spec.rotary != "unit":
        wrong.append(CONVENTIONS["other heads"](export))
    assert all(deviation(example, mutant) > TOLERANCE for mutant in wrong)
    if export.spec.relative_position == "none" and export.spec.position != "none":
        others = {"bilinear", "bicubic", "bicubic_antialias", "bicubic_offset"} - {export.spec.position_resize}
        if export.spec.grid == (3, 3):  # half of it is one patch, which both rules take from the middle
            others -= {"bilinear", "bicubic"}
        wrong += [replace(export, spec=replace(export.spec, position_resize=rule)) for rule in others]
    wrong += [
        replace(export, preparation=replace(export.preparation, **{name: values}))
        for name, values in (("mean", (0.5, 0.5, 0.5)), ("std", (0.5, 0.5, 0.5)), ("mean", export.mean[::-1]))
    ]
    assert all(mutant.verify() for mutant in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("key", SAMPLED)
def test_a_changed_weight_of_an_export_changes_the_fingerprint(key):
    export = imported(EXAMPLES[key]())
    network = export.build().double()
    weights = network.state_dict()
    assert weights.keys() >= {f"trunk.{name}" for name in export.tensors}
    for name, tensor in weights.items():
        if not name.startswith("trunk.") and name.endswith(WITHOUT_EFFECT):
            continue
        before = tensor.clone()
        tensor.copy_(redrawn(before))
        assert fingerprint_differences(export.fingerprint, fingerprint(network, export.preparation)), name
        tensor.copy_(before)
    assert not fingerprint_differences(export.fingerprint, fingerprint(network, export.preparation))


@pytest.mark.parametrize("key", SAMPLED)
def test_saved_files_with_wrapped_names_are_imported(key, tmp_path):
    """Saved by torch.save under DistributedDataParallel's names, with optimiser state."""
    example = EXAMPLES[key]()
    nested: dict = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}
    for name, tensor in example.tree.items():
        top, _, rest = name.partition(".")
        if any(other != name and other.startswith(f"{top}.") for other in example.tree) and top in (
            *("student", "teacher", "encoder", "target_encoder", "state_dict", "model", "model_ema", "model_state"),
        ):
            nested.setdefault(top, {})[f"module.{rest}"] = tensor
        else:
            nested[name] = tensor
    for name, value in example.facts.items():
        top, _, rest = name.partition(".")
        nested.update({top: nested.get(top, {}) | {rest: value}} if rest else {top: value})
    torch.save(nested, tmp_path / "checkpoint.pth")
    export = load(tmp_path / "checkpoint.pth", example.options)
    assert export.digest == imported(example).digest
    assert export.facts["source_file"] == "checkpoint.pth"


def trunk_of(key: str, prefix: str) -> dict[str, torch.Tensor]:
    """The trunk of an example without all other tensors, as people save it."""
    example = EXAMPLES[key]()
    names = {name: tensor for name, tensor in example.tree.items() if name.startswith(prefix)}
    trunk = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return {name: tensor for name, tensor in trunk.items() if "head." not in name and "fc." not in name}


@pytest.mark.parametrize("container", [None, "state_dict", "model"])
def test_a_trunk_with_another_kind_of_position_table_is_refused(container, tmp_path):
    """MoCo-v3's ViT-S has twice the heads of DINO's and the same tensors: only its fixed table distinguishes it."""
    trunk = trunk_of("mocov3", "state_dict.base_encoder.")
    torch.save({container: trunk} if container else trunk, tmp_path / "vit.pth")
    with pytest.raises(ValueError):
        load(tmp_path / "vit.pth")
    for method in ("dino", "ibot", "mae", "moca"):
        with pytest.raises(ValueError):
            load(f"{method}:{tmp_path / 'vit.pth'}", EXAMPLES["mocov3"]().options)


# Conventions of each source, from its code: position table, resize rule, pooling, published number of heads by width.
OFFICIAL = {
    "dino": ("learned", "bicubic_offset", "cls", {384: 6, 768: 12}),
    "dinov2": ("learned", "bicubic_offset", "cls", {384: 6, 1536: 24}),
    "ibot": ("learned", "bicubic_offset", "cls", {384: 6, 1024: 16}),
    "msn": ("learned", "bicubic", "cls", {384: 6, 1024: 16}),
    "mocov3": ("sincos_row_first", "bicubic", "cls", {384: 12, 768: 12}),
    "mae": ("sincos_column_first", "bicubic", "cls", {768: 12, 1280: 16}),
    "can": ("sincos_column_first", "bicubic", "cls", {768: 12}),
    "cae": ("sincos_row_first", "bicubic", "cls", {384: 12, 768: 12, 1024: 16}),
    "cae_finetuned": ("sincos_row_first", "relative_spline", "avg", {}),
    "maskfeat": ("learned", "bilinear", "avg", {768: 12, 1024: 16}),
    "maskfeat_finetuned": ("learned", "bilinear", "avg", {}),
    "lut": ("sincos_column_first", "bicubic", "cls", {512: 8, 768: 12}),
    "moca": ("sincos_column_first", "bicubic", "avg", {768: 12, 1024: 16}),
    "extrema": ("sincos_column_first", "bicubic", "cls", {384: 6, 768: 12}),
    "simmim": ("none", "relative_spline", "avg", {}),
    "data2vec": ("none", "relative_spline", "avg", {}),
    "beit": ("none", "relative_spline", "avg", {}),
    "mst": ("learned", "bicubic_offset", "cls", {384: 6}),
    "franca": ("learned", "bicubic_offset", "cls", {768: 12, 1536: 24}),
    "ijepa": ("sincos_column_first", "bicubic", "avg", {1280: 16, 1408: 16}),
}


@pytest.mark.parametrize("key", OFFICIAL)
def test_conventions_are_those_of_the_source(key):
    example = EXAMPLES[key]()
    export = imported(example)
    position, rule, pool, heads = OFFICIAL[key]
    assert (export.spec.position, export.spec.position_resize, export.spec.pool) == (position, rule, pool)
    assert (export.mean, export.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (export.spec.norm_eps, export.crop, export.interpolation) == (1e-6, 0.875, "bicubic")
    published = getattr(load_extension("importers", example.importer), "HEADS", HEADS)
    branch = BranchTensors(file=example.file(), importer=key, name="", prefix="", options=ImportOptions())
    assert {width: branch.heads(width, published) for width in heads} == heads


# Their codes store the index of the last finished epoch.
LAST_EPOCH = ("mae", "can", "cae", "maskfeat", "moca", "lut", "simmim", "beit", "data2vec")
# These store the number of finished epochs.
FINISHED_EPOCHS = ("dino", "ibot", "msn", "mocov3", "extrema", "mst", "byol", "ijepa")


def test_epochs_are_counted_as_the_official_code_does(monkeypatch):
    monkeypatch.setattr("checkpoints.export.fingerprint", lambda network, preparation: {})
    for key, epochs in [(k, 800) for k in LAST_EPOCH] + [(k, 799) for k in FINISHED_EPOCHS]:
        example = EXAMPLES[key]()
        assert imported_epochs(example, epoch=799) == epochs
        assert imported_epochs(example) is None
    # Lightning counts differently.
    assert imported_epochs(example, **{"epoch": 799, "pytorch-lightning_version": "2.1.0"}) is None
    assert [imported_epochs(example, epoch=epoch) for epoch in ("799", -1, True, [799])] == [None] * 4


def imported_epochs(example: Example, **facts) -> int | None:
    return imported(replace(example, facts=example.facts | facts)).facts["epochs"]


def test_ambiguous_files_are_refused_with_the_candidates(tmp_path):
    trunk = {name: t for name, t in EXAMPLES["mae"]().tree.items() if "decoder" not in name and "mask" not in name}
    path = tmp_path / "vit.pth"
    torch.save({"model": {name.removeprefix("model."): tensor for name, tensor in trunk.items()}}, path)
    with pytest.raises(ValueError, match=r"mae or moca: say mae:.*vit.pth or moca:.*vit.pth"):
        load(path)
    options = EXAMPLES["mae"]().options
    assert load(f"mae:{path}", options).facts["method"] == "mae"
    assert load(f"moca:{path}", options).spec.pool == "avg"


def test_an_importer_that_does_not_know_all_tensors_is_no_candidate(monkeypatch):
    """A trunk under `backbone.` beside a queue could be DINO's by its names, but DINO has no queue."""
    tree = {f"backbone.{name}": tensor for name, tensor in trunk_of("dino", "teacher.backbone.").items()}
    file = replace(EXAMPLES["dino"](), tree=tree | {"queue": torch.randn(4, 8)}).file()
    with pytest.raises(ValueError, match="could come from dino or ibot or timm"):  # none of which knows the queue
        detect(file)
    monkeypatch.setitem(load_extension("importers", "ibot").DROPPED, "queue", "negatives")
    assert detect(file) == "ibot"


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("dino", {"branch": "momentum"}, "no branch 'momentum'; choose one of teacher, student"),
        (
            "dino",
            {"heads": None},
            "heads at width {width}; give it: bench.load\\(.*, heads=N",
        ),
        ("dino", {"heads": 1000}, "heads=1000 does not divide width={width}"),
        ("beit", {"statistics": None}, "use statistics='half' .* or statistics='imagenet'"),
        ("beit", {"heads": 1000}, "is for {heads} heads, not 1000"),
        ("byol", {"heads": 1000}, "has {heads} heads, not 1000"),
    ],
)
def test_missing_or_wrong_options_are_refused(key, changes, message):
    example = EXAMPLES[key]()
    spec = imported(example).spec
    with pytest.raises(ValueError, match=message.format(width=spec.width, heads=spec.heads)) as error:
        imported(replace(example, options=replace(example.options, **changes)))
    assert "\n" not in str(error.value)


def test_a_broken_weight_is_refused():
    example = EXAMPLES["dino"]()
    name = "teacher.backbone.norm.weight"
    with pytest.raises(ValueError, match=r"holds torch.int8: quantised weights"):
        imported(example, **{name: example.tree[name].to(torch.int8)})
    with pytest.raises(ValueError, match="holds NaN"):
        imported(example, **{name: example.tree[name] * float("nan")})
    name = "teacher.backbone.blocks.0.attn.qkv.weight"
    whole, weight = torch.zeros_like(example.tree[name]), example.tree[name]
    queries = torch.cat([whole[: len(whole) // 3], weight[len(whole) // 3 :]])
    for broken in (whole, queries):
        with pytest.raises(ValueError, match=r"attn\.qkv\.weight holds only zeros"):
            imported(example, **{name: broken})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("dino", "teacher.backbone.cls_token"),
        ("dino", "teacher.backbone.pos_embed"),
        ("dino", "teacher.backbone.patch_embed.proj.weight"),
        ("dino", "teacher.backbone.blocks.0.mlp.fc1.bias"),
        ("extrema", "state_dict.momentum_encoder.head.0.bias"),
        ("data2vec", "model.lm_head.weight"),
        ("simmim", "model.encoder.rel_pos_bias.relative_position_bias_table"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(key, name):
    example = EXAMPLES[key]()
    assert name in example.tree
    for shape in [(), (0,), (1, 1, 1), (1, 2, 3, 4, 5), (0, 1000)]:
        changes = {name: torch.ones(shape)}
        with pytest.raises(ValueError) as error:
            detect(example.file(**changes))
            imported(example, **changes)
            raise ValueError("this tensor is not used")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["dino", "simmim"])
def test_imports_may_be_at_another_image_size(key):
    example = EXAMPLES[key]()
    export = imported(example)
    larger = imported(replace(example, options=replace(example.options, image_size=2 * export.spec.image_size)))
    images = torch.randn(1, 3, larger.spec.image_size, larger.spec.image_size, dtype=torch.float64)
    difference = larger.build().double()(images)[0] - export.build().double()(images)[0]
    assert difference.abs().max() < 1e-5
    assert larger.facts["resized_from"] == export.spec.image_size
