"""How names become passes: built-in ones, the default list, and those of a user's own."""

import sys
from dataclasses import dataclass

import pytest

import graph_trainer as gt
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.catalogue import load_pass, registered_passes, resolve_passes
from graph_trainer.errors import PassError
from graph_trainer.testing import Builder, targets
from tests.unit.graphs import aten

DEFAULT = [
    "normalize_views",
    "functionalize_writes",
    "eliminate_dead_code",
    "deduplicate_unshards",
    "eliminate_round_trips",
    "fuse_chained_all_gathers",
    "plan_memory",
    "tag_activations",
    "tag_fsdp_unshards",
    "rematerialize",
    "offload_activations",
    "tag_buckets",
    "bucket_collectives",
    "schedule_overlap",
]
CHANGE_SUMS = {"fuse_chained_reduce_scatters", "bucket_collectives"}


def names(passes, disable_passes=()):
    return [p.name for p in resolve_passes(passes, disable_passes)]


def refused(*words, passes=("default",), disable_passes=()):
    with pytest.raises(gt.PassError) as caught:
        resolve_passes(passes, disable_passes)
    for word in words:
        assert word in str(caught.value)


def test_passes_and_the_default_list_are_in_stage_order():
    known = registered_passes()
    assert names(["default"]) == [n for n, p in known.items() if p.default] == DEFAULT
    stages = [p.stage for p in known.values()]
    assert stages == sorted(stages)
    assert all(p.summary and p.function.__doc__ for p in known.values())
    assert {n for n, p in known.items() if p.changes_sums} == CHANGE_SUMS


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"passes": ["rematerialise"]},
            ["'rematerialise'", "did you mean 'rematerialize'?", *DEFAULT],
        ),
        ({"passes": ["quite_else"]}, ["'quite_else'", "Known passes"]),
        (
            {"disable_passes": ["rematerialyze"]},
            ["disable_passes", "did you mean 'rematerialize'?"],
        ),
        ({"passes": ["default", "rematerialize"]}, ["'rematerialize'", "twice"]),
        (
            {"passes": ["rematerialize", "eliminate_dead_code"]},
            ["'eliminate_dead_code'", "CLEANUP", "'rematerialize'", "REMATERIALIZE"],
        ),
        ({"passes": "rematerialize"}, ["lists of names", "'rematerialize'"]),
        ({"disable_passes": "rematerialize"}, ["lists of names", "'rematerialize'"]),
        ({"passes": [len]}, ["neither a name nor a Pass"]),
    ],
)
def test_a_list_that_cannot_be_run_is_refused(how, words):
    refused(*words, **how)


def test_a_pass_beside_the_default_list_joins_it_at_its_stage():
    beside = [n for n, p in registered_passes().items() if not p.default]
    assert beside, "or this tests nothing"
    for name in beside:
        selected = names(["default", name])
        assert [n for n in selected if n != name] == DEFAULT
        assert selected == [n for n in registered_passes() if n in selected]
        assert selected == names([name, "default"])


# --- passes of a user's own --------------------------------------------------------------------

FILE = """
from dataclasses import dataclass

import torch

import graph_trainer as gt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    factor: float = 3.0


@gt.graph_pass(stage=gt.Stage.TAG, summary="Scale the products", options_type=ScaleOptions)
def scale_products(joint, options, context):
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        node.args = (node.args[0], options.factor)


@gt.graph_pass(stage=gt.Stage.CLEANUP, summary="Another pass of the same name")
def rematerialize(joint, options, context):
    pass


number = 1
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a package in a temporary folder, with a module that has passes."""
    (tmp_path / "a_users_package").mkdir()
    (tmp_path / "a_users_package" / "passes.py").write_text(FILE)
    (tmp_path / "a_users_package" / "broken.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_users_package"
    for name in [name for name in sys.modules if name.startswith("a_users_package")]:
        del sys.modules[name]


def test_a_pass_with_an_option_runs_by_module_and_name(mine):
    entry = f"{mine}.passes:scale_products"
    found = load_pass(entry)
    assert (found.name, found.section) == ("scale_products", "scale_products")
    assert found.options_type().factor == 3.0
    for given, factor in (({}, 3.0), ({found.name: found.options_type(factor=5.0)}, 5.0)):
        b = Builder()
        joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, b.input("x", 4), 2)))
        gt.run_passes(joint, gt.PassConfig(passes=["default", entry], options=given))
        assert joint.history[DEFAULT.index("tag_fsdp_unshards") + 1] == "scale_products"
        assert targets(joint)[0] is aten.mul.Tensor
        assert next(n for n in joint.graph.nodes if n.op == "call_function").args[1] == factor
    assert names([entry, "default"]).index("scale_products") == DEFAULT.index("plan_memory")
    assert names(["default", entry], ["scale_products"]) == DEFAULT
    refused("stage TAG", passes=["rematerialize", entry])


def test_an_entry_that_is_no_pass_names_entry_and_remedy(mine):
    for entry, *words in (
        ("nowhere.at_all:some_pass", "no module 'nowhere'", "PYTHONPATH"),
        (f"{mine}.nothing:some_pass", f"no module '{mine}.nothing'", "package.module:name"),
        (f"{mine}.broken:some_pass", "importing", "not_there_at_all"),
        (f"{mine}.passes:scale_product", "scale_products, rematerialize"),
        (f"{mine}.passes:number", "int and not a pass", "@graph_pass"),
        (f"{mine}.passes:rematerialize", "'rematerialize', as a built-in", "another name"),
    ):
        refused(f"PassConfig.passes: '{entry}'", *words, passes=["default", entry])


@pytest.mark.parametrize("text", [":x", ".a:x", "m:", "a. b:x", "a:b c"])
def test_an_entry_that_is_not_two_names_is_refused(text):
    with pytest.raises(PassError, match="without spaces"):
        load_pass(text)


def test_options_that_cannot_be_made_are_refused():
    @dataclass(frozen=True)
    class Needs:
        value: int

    for kind in (Needs, int):
        with pytest.raises(PassError, match="fields all have defaults"):
            graph_pass(stage=Stage.TAG, summary="no", options_type=kind)(lambda *_: None)


def test_a_function_that_no_pipeline_can_call_is_no_pass():
    with pytest.raises(PassError, match=r"'short' cannot be called with \(joint, options, context"):

        @graph_pass(stage=Stage.CLEANUP, summary="lacks the context")
        def short(joint, options): ...


def test_a_module_without_a_name_is_told_how_to_write_it():
    refused(
        "there is no pass 'my_package.passes': ",
        "package.module:name",
        passes=["my_package.passes"],
    )
