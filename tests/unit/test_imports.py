"""What each module of the package may import, and what the core may name, read from the source.

Imports point down only, from cli over planner, train, titan and core to errors, without a cycle
between modules or between folders, the core's own included; imports for type checkers and imports
inside functions count. The core imports torch and the standard library, and one file the solver of
scipy, inside a function. Private names of torch are in core/torch_private.py and the files that
begin so, so that few files depend on a release of torch.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import networkx

PACKAGE = Path(__file__).resolve().parents[2] / "graph_trainer"
TORCH_PRIVATE = (
    "graph_trainer.core.torch_private",
    "graph_trainer.core.torch_private_compile",
    "graph_trainer.core.torch_private_groups",
    "graph_trainer.core.torch_private_inductor",
    "graph_trainer.core.torch_private_pipelining",
)

OTHERS = {
    "graph_trainer.core.passes.plan_memory.solver": "scipy",
}
"""What else a file of the core may import."""

# From the bottom up. "" is graph_trainer/__init__.py, "<model>" every folder of a model family.
# train is one rank of a run, which knows no planner: a plan to hold to is an observer that the
# planner's own rank module gives it.
LAYERS = [
    "errors",
    "core",
    "",
    "testing",
    "titan",
    "<model>",
    "train",
    "planner",
    "cli",
    "__main__",
]

# Modules whose __init__.py has code beside its docstring.
WITH_CODE = {
    "graph_trainer",  # the public names
    "graph_trainer.titan",  # torchtitan binds its device when it is first imported
}


def sources():
    """Every module of the package by its dotted name; a package by its folder's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imported(tree, module):
    """Every import of a module: the dotted name, and the name that it is bound to."""
    is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or ""
                if not alias.asname:
                    first = alias.name.partition(".")[0]
                    yield first, first
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), alias.asname or alias.name
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), ""


def attributes(tree, bound):
    """Every dotted name that is read below an imported one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in bound and rest.replace(".", "").isidentifier():
                yield f"{bound[first]}.{rest}"


def layer(module, modules):
    top = module.split(".")[1] if "." in module else ""
    is_model = f"graph_trainer.{top}.config_registry" in modules
    return LAYERS.index("<model>" if is_model else top)


def folder(module):
    """A module's folder: of the core one of its folders, or core for the files beside them."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["core"] and len(parts) > 3 else 2])


def within(name, *roots):
    return any(name == root or name.startswith(root + ".") for root in roots)


def is_private_torch(name):
    """Whether a part of a dotted name of torch starts with an underscore.

    The names of aten's ops do not count: aten._unsafe_view is part of the graph's vocabulary.
    """
    parts = name.split(".")
    return (
        within(name, "torch")
        and not within(name, "torch.ops.aten")
        and any(part.startswith("_") and not part.startswith("__") for part in parts)
    )


def violations():
    trees = sources()
    modules = set(trees)
    graph = networkx.DiGraph()
    found = set()
    for module, tree in trees.items():
        in_core = (
            within(module, "graph_trainer.core", "graph_trainer.errors", "graph_trainer.testing")
            or module == "graph_trainer"
        )
        imports = list(imported(tree, module))
        names = {name for name, _ in imports}
        for name in names:
            root = name.partition(".")[0]
            if root == "graph_trainer":
                target = name if name in modules else name.rpartition(".")[0]
                assert target in modules, f"{module} imports {name}, which is no module"
                graph.add_edge(module, target)
                if layer(target, modules) > layer(module, modules):
                    found.add(f"{module} imports {target}: up")
            elif root == OTHERS.get(module):
                continue
            elif in_core and root not in sys.stdlib_module_names and root != "torch":
                found.add(f"{module} imports {root}: neither torch nor the standard library")
        names |= set(attributes(tree, {bound: name for name, bound in imports}))
        for name in names:
            if within(name, "torchtitan.experiments"):
                found.add(f"{module} reads {name}")
            if is_private_torch(name) and module not in TORCH_PRIVATE:
                found.add(f"{module} reads {name}: private names belong in {TORCH_PRIVATE[0]}")
    folders = networkx.DiGraph()
    for module, target in graph.edges:
        if module != "graph_trainer" and folder(module) != folder(target):
            folders.add_edge(folder(module), folder(target))
    for imports in (graph, folders):
        for cycle in networkx.strongly_connected_components(imports):
            if len(cycle) > 1:
                found.add("cycle: " + ", ".join(sorted(cycle)))
    return found


def test_imports_point_down_and_stay_where_they_belong():
    assert violations() == set()


def test_every_package_says_what_lives_there_and_has_no_code():
    packages = {path.parent for path in PACKAGE.rglob("*.py")}
    trees = sources()
    for package in packages:
        name = ".".join(package.relative_to(PACKAGE.parent).parts)
        assert (package / "__init__.py").exists(), name
        docstring = ast.get_docstring(trees[name]) or ""
        # A title, then what may not live there; of the public names the title is enough.
        assert len(docstring.splitlines()) >= (1 if name == "graph_trainer" else 3), name
        assert len(trees[name].body) == 1 or name in WITH_CODE, name


def test_every_module_of_the_core_imports_without_torchtitan():
    """No reading of the source shows an import whose name is made at run time."""
    modules = [m for m in sources() if within(m, "graph_trainer.core", "graph_trainer.errors")]
    program = (
        "import sys, importlib\n"
        "sys.modules['torchtitan'] = None\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print(sys.modules['graph_trainer'].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == PACKAGE / "__init__.py"


CONFIG_KEY = re.compile(
    r"\b(training|parallelism|activation_checkpoint|(?<!utils\.)checkpoint|(?<!torch\.)compile)\.[a-z_]+"
)


def test_the_core_names_no_key_of_a_config():
    """It names its own settings; `titan.config.core_settings` puts keys in their place."""
    for module, tree in sources().items():
        if not within(module, "graph_trainer.core"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                key = CONFIG_KEY.search(node.value)
                assert key is None, f"{module}, line {node.lineno}, names {key[0]}"
