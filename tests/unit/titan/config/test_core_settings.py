"""What messages of the core call a setting, and the key that a config has for it."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import graph_trainer.core
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.errors import MemoryLimitError, PassError
from graph_trainer.titan.config.core_settings import (
    config_keys_in_errors,
    key_and_problem,
    with_config_keys,
)


def names_in_the_core():
    """Every setting and option that a text of the core names: a class and a field."""
    for path in Path(graph_trainer.core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"\b(PassConfig|[A-Z]\w+Options)\.(\w+)", node.value)


def test_every_setting_that_the_core_names_is_there_and_has_a_key():
    classes = {pass_.options_type.__name__: pass_.options_type
               for pass_ in registered_passes().values()}  # fmt: skip
    classes["PassConfig"] = PassConfig
    of_machine = {"device_memory", "other_memory"}  # of which a docstring speaks, and no config
    named = {(kind, name) for kind, name in names_in_the_core() if name not in of_machine}
    assert len(named) > 10
    for kind, name in named:
        assert name in {field.name for field in fields(classes[kind])}, (kind, name)
        assert with_config_keys(f"{kind}.{name}") != f"{kind}.{name}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'Raise PassConfig.memory_limit_gib to 5, or set PassConfig.activation_policy = "full".',
            'Raise compile.memory_limit_gib to 5, or set activation_checkpoint.type = "full".',
        ),
        ("PassConfig.bitwise = True keeps it", "compile.bitwise = true keeps it"),
        ("BucketCollectivesOptions.cap_mib is 0", "compile.bucketing.cap_mib is 0"),
        ("with OtherMemory.expert_imbalance = 1.5", "with compile.expert_imbalance = 1.5"),
        ("MyPassConfig.passes", "MyPassConfig.passes"),
    ],
)
def test_a_message_gets_the_keys_of_a_config(text, expected):
    assert with_config_keys(text) == expected
    with pytest.raises(MemoryLimitError) as error, config_keys_in_errors():
        raise MemoryLimitError(text)
    assert str(error.value) == expected


def test_an_error_is_taken_apart_for_the_line_of_its_key():
    error = PassError('PassConfig.disable_passes: needed for PassConfig.activation_policy = "full"')
    assert key_and_problem(error) == (
        "compile.disable_passes",
        'needed for activation_checkpoint.type = "full"',
        ("activation_checkpoint.type",),
    )
    assert key_and_problem(PassError("it failed")) == ("compile.passes", "it failed", ())
