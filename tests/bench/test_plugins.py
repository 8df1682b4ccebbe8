"""Plugins: extensions of other packages replace none of ours, break nothing, and are named in what they produced."""

import json

import pytest
import torch
from small_exports import make_foreign
from toy_packages import TOYS, install

from bench.run.suites import catalogue
from checkpoints.resolve import load
from engine.extensions import (
    FOLDERS,
    Extension,
    extensions,
    import_extension,
    load_extension,
    load_extensions,
    refused_plugins,
)

LAYOUT = '''"""Files of one more layout: a plain ViT under `other.`."""
from checkpoints.importing import Conversion, plain_vit

SOURCE, BRANCHES, DROPPED = "a repository", {"model": ("other.",)}, {}


def recognise(file):
    return "other.patch_embed.proj.weight" in file.tensors


def convert(branch):
    tensors = branch.take_trunk()
    return Conversion(spec=plain_vit(branch, tensors), tensors=tensors)
'''
FEATURES = """def shares(self, export, space):
        raise LookupError("no features")

    def run"""
FILES = {
    "layout": LAYOUT,
    "blind": LAYOUT.replace("def recognise", "def recognize"),
    "touchy": LAYOUT.replace('"other.patch_embed.proj.weight" in file.tensors', 'file.tensors["nowhere"]'),
    "clumsy": LAYOUT.replace("take_trunk()", "nothing").replace('"other.', '"clumsy.'),
    "renamed": LAYOUT.replace('{"model": ("other.",)}, {}', '{"teacher": ("teacher.",), "student": ("student.",)}, {}')
    .replace("def recognise", 'FIRST = ("patchify.weight",)\n\n\ndef recognise')
    .replace('"other.patch_embed.proj.weight"', '"student.patchify.weight"')
    .replace("take_trunk()", 'take_trunk({r"^patchify\\.": "patch_embed.proj."})'),
    "leaving": "raise SystemExit(3)",
    "mine": "from pretrain.methods.mae import METHOD, RECIPES\n",
    "toy": TOYS.format(key="toy", cost=1).replace("def run", FEATURES),
    "bare": TOYS.format(key="bare", cost=1).replace("(Task)", ""),
    "thief": TOYS.format(key="thief", cost=1).replace("thief@two", "knn@dino"),
    "undecorated": (
        TOYS.format(key="undecorated", cost=1)
        .replace("@dataclass(frozen=True, kw_only=True)\n", "")
        .replace("Toy(k=(5,))", "Toy()")
    ),
    "untyped": TOYS.format(key="untyped", cost=1).replace("    mode:", "    steps = 3\n    mode:"),
    "text": TOYS.format(key="text", cost=1).replace('"toys": (', '"one": "text@one", "toys": ('),
    "vague": TOYS.format(key="vague", cost=1).replace('"toys": (', '"toys": ("vague@three", '),
}
IMPORTERS = ("layout", "blind", "touchy", "clumsy", "renamed")
TASKS = ("toy", "bare", "thief", "undecorated", "untyped", "text", "vague", "leaving")
POINTS = {
    "bench.importers": {key: f"others.{key}" for key in IMPORTERS} | {"mae": "others.layout"},
    "bench.probes": {key: f"others.{key}" for key in TASKS} | {"knn": "others.toy"},
    "bench.downstream": {"lowshot": "others.thief"},
    "bench.imagesets": {"coco": "others.toy", "odd": "others.toy", "both": "others.toy"},
    "bench.layouts": {"digits": "others.toy", "both": "others.toy"},
    "bench.methods": {"simsiam": "no.such.module", "mine": "others.mine"},
}
TAKEN = "bench has one of that name; it needs another name in the entry points of others 2.1"
TWICE = "others 2.1 has one of that name too; uninstall one of the packages"
BARE = "the task of its protocol 'bare@one' is not an engine.tasks.Task; derive it from Task"
LEFT_OUT = {
    "importer 'mae' of others 2.1": TAKEN,
    "importer 'blind' of others 2.1": "does not define recognise; rename recognize",
    "task 'knn' of others 2.1": TAKEN,
    "task 'leaving' of others 2.1": "cannot be imported: SystemExit: 3 (leaving.py, line 1)",
    "task 'bare' of others 2.1": BARE,
    "task 'thief' of others 2.1": "the task 'knn' already has a protocol 'knn@dino'",
    "task 'undecorated' of others 2.1": (
        "Toy is not a dataclass, so k is not a setting; write @dataclass(frozen=True, kw_only=True) above class Toy"
    ),
    "task 'untyped' of others 2.1": "Toy.steps has no type, so it is not a setting; write steps: TYPE = 3",
    "task 'text' of others 2.1": ("its SUITES['one'] is 'text@one'; write a tuple of names, such as ('text@one',)"),
    "task 'vague' of others 2.1": "its SUITES contain 'vague@three', which is not in its PROTOCOLS",
    "task 'lowshot' of others 2.1": (
        "the task of its protocol 'thief@one' has the LAYOUT ''; "
        "dense tasks name the layout of their scenes, probes none"
    ),
    "image set 'both' of others 2.1": TWICE,
    "image set 'coco' of others 2.1": TAKEN,  # the name of a layout of ours
    "image set 'odd' of others 2.1": "does not define PLACE, SPLITS, open_split",
    "scene layout 'both' of others 2.1": TWICE,
    "scene layout 'digits' of others 2.1": TAKEN,
    "method 'simsiam' of others 2.1": "cannot be imported: ModuleNotFoundError: No module named 'no'",
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    root = tmp_path_factory.mktemp("plugins")
    install(root, "others", "2.1", FILES, POINTS)
    return root


@pytest.fixture
def plugins(packages, use_packages):
    return use_packages(packages)


def test_two_plugins_of_the_same_name_are_both_left_out(plugins, tmp_path, use_packages):
    install(tmp_path, "rivals", "0.1", {"toy": FILES["toy"]}, {"bench.probes": {"toy": "rivals.toy"}})
    use_packages(tmp_path)
    assert "toy" not in extensions("probes")
    refused = refused_plugins("probes")
    reasons = {extension.plugin: reason for extension, reason in refused.items() if extension.key == "toy"}
    assert reasons == {
        "others 2.1": "rivals 0.1 has one of that name too; uninstall one of the packages",
        "rivals 0.1": "others 2.1 has one of that name too; uninstall one of the packages",
    }


def test_plugins_that_cannot_be_used_are_left_out_with_the_reason(plugins):
    left_out = {plugin: reason for kind in FOLDERS for plugin, reason in refused_plugins(kind).items()}
    left_out |= {task: reason for task, reason in catalogue().broken.items() if task.plugin}
    usable = []
    for plugin in [plugin for kind in FOLDERS for plugin in extensions(kind).values() if plugin.plugin]:
        try:
            import_extension(plugin)
            usable += [] if plugin in left_out else [plugin.title]
        except ValueError as error:
            left_out.setdefault(plugin, str(error))
    assert {plugin.title: reason for plugin, reason in left_out.items()} == LEFT_OUT
    assert {*usable} == {
        *(f"importer {key!r} of others 2.1" for key in ("clumsy", "layout", "renamed", "touchy")),
        *("task 'toy' of others 2.1", "method 'mine' of others 2.1"),
    }


def test_list_shows_plugins_with_their_packages(plugins, bench):
    code, out, err = bench("list", "importers")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.split()[0] == "layout")
    assert line.endswith("Files of one more layout: a plain ViT under `other.`.  [plugin: others 2.1]")
    assert next(line for line in out.splitlines() if line.split()[0] == "cae").endswith(".")
    assert "bench: warning: importer 'mae' of others 2.1 is left out: bench has one of that name" in err


def test_broken_plugins_do_not_stop_an_import_and_results_name_the_plugins_used(plugins, bench, tmp_path):
    path, out = make_foreign(tmp_path / "tiny.pth", "other"), tmp_path / "out"
    words = ("run", "--checkpoint", path, "--suite", "toy@one,knn@dino", "--data", "tiny=tiny:", "--out", out)
    code, output, err = bench(*words)
    assert code == 0 and "2 done" in output
    assert "importer 'touchy' of others 2.1 is left out: recognise() fails: KeyError: 'nowhere'" in err
    results = [json.loads(path.read_text()) for path in (out / "results").rglob("*.json")]
    protocols = {result["protocol"]["name"]: result["protocol"]["plugin"] for result in results}
    assert protocols == {"toy@one": "others 2.1", "knn@dino": ""}
    checkpoints = {(result["checkpoint"]["method"], result["checkpoint"]["plugin"]) for result in results}
    assert checkpoints == {("layout", "others 2.1")}


def test_branches_are_recognised_by_the_name_in_FIRST_of_their_importer(plugins, tmp_path, monkeypatch):
    tensors = torch.load(make_foreign(tmp_path / "teacher.pth", "teacher"))
    tensors |= torch.load(make_foreign(tmp_path / "student.pth", "student"))
    path = tmp_path / "both.pth"
    torch.save({name.replace("patch_embed.proj", "patchify"): tensor for name, tensor in tensors.items()}, path)
    export = load(path)
    assert export.facts["importer"] == "renamed" and export.facts["branch"] == "teacher"
    assert export.facts["dropped"] == {"branch student": len(tensors) // 2}
    torch.save({name: tensor for name, tensor in torch.load(path).items() if name.startswith("student")}, path)
    with pytest.raises(ValueError, match=r"teacher\.patchify\.weight; it holds the branches: student"):
        load(path)
    monkeypatch.setattr(load_extension("importers", "renamed"), "BRANCHES", {"teacher": ("teacher.module.",)})
    with pytest.raises(ValueError, match=r"names are read without wrappers: write 'teacher\.' in BRANCHES of renamed"):
        load(f"renamed:{path}")


def test_results_on_a_network_trained_by_a_plugin_name_the_plugin(plugins, bench, tmp_path):
    words = ("--recipe", "smoke", "--images", "tiny:", "--set", "epochs=1", "schedule.warmup=0")
    assert bench("pretrain", "mine", *words, "--out", tmp_path / "run")[0] == 0
    words = ("--checkpoint", tmp_path / "run" / "export", "--suite", "toy@one", "--data", "tiny=tiny:")
    assert bench("run", *words, "--out", tmp_path / "out")[0] == 0
    (result,) = (json.loads(path.read_text()) for path in (tmp_path / "out" / "results").rglob("*.json"))
    assert (result["checkpoint"]["method"], result["checkpoint"]["plugin"]) == ("mine", "others 2.1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["import", "blind:{}"], "importer 'blind' of others 2.1 | recognise"),
        (["import", "clumsy:{}"], "tiny.pth as clumsy: | importer 'clumsy' of others 2.1 | AttributeError: "),
        (["pretrain", "simsiam", "--images", "tiny:"], "method 'simsiam' of others 2.1 | ModuleNotFoundError"),
        (
            ["run", "--checkpoint", "{}", "--suite", "leaving", "--data", "tiny=tiny:"],
            "--suite: | task 'leaving' of others 2.1 | SystemExit: 3",
        ),
    ],
)
def test_a_request_for_a_broken_plugin_is_refused_in_one_line(words, named, plugins, refused, tmp_path):
    path = make_foreign(tmp_path / "tiny.pth", "clumsy")
    refused(*(word.format(path) for word in words), "--out", tmp_path / "out", named=named)
    assert not (tmp_path / "out").exists()


def test_a_built_in_extension_that_fails_is_named_with_file_and_line(tmp_path, monkeypatch):
    """Also when all importers are loaded: without one of them, a checkpoint might be recognised as another source's."""
    path = tmp_path / "failing_importer.py"
    path.write_text('"""An importer."""\n\nSOURCE = nowhere\n')
    monkeypatch.syspath_prepend(tmp_path)
    failing = Extension(kind="importers", key="failing", module=path.stem, path=path)
    monkeypatch.setattr("engine.extensions.extensions", lambda kind: {"failing": failing})
    for load_it in (lambda: load_extension("importers", "failing"), lambda: load_extensions("importers")):
        with pytest.raises(ValueError, match=r"importer 'failing': .* 'nowhere' .*\(failing_importer\.py, line 3\)"):
            load_it()


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        ("imagesets", 'PLACE, SPLITS, open_split = "PATH", 5, print', "SPLITS"),
        ("imagesets", 'PLACE, SPLITS, open_split = "PATH", ("val",), 7', "open_split"),
        ("layouts", "IMAGES, recognised, listed, write_tiny = {}, print, None, print", "listed"),
        ("layouts", "IMAGES, recognised, listed, write_tiny, SERVES = {}, print, print, print, 7", "SERVES"),
        ("methods", "METHOD, RECIPES = None, 5", "RECIPES"),
        ("probes", "PROTOCOLS, SUITES = {}, 3", "SUITES"),
    ],
)
def test_names_of_another_type_are_refused(kind, text, name, tmp_path, monkeypatch):
    path = tmp_path / f"typed_{kind}_{name}.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"its {name} is "):
        import_extension(Extension(kind=kind, key="typed", module=path.stem, path=path))


def test_built_in_extensions_define_what_plugins_must_define():
    for kind in FOLDERS:
        assert [import_extension(extension) for extension in extensions(kind).values()]
