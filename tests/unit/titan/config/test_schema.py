"""The JSON schema that editors read: current, and right about every shipped config."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from graph_trainer.cli import main as cli
from graph_trainer.titan.config.build import settable_keys
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.schema import toml_schema
from graph_trainer.titan.config.write_toml import config_to_toml
from tests.unit.titan.config.test_config_errors import BASE

ROOT = Path(__file__).resolve().parents[4]
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*/*.toml") if p.parent.name != "hardware")
DIRECTIVE = "#:schema "
"""How Taplo and Even Better TOML name a file's schema, in its first line."""


@pytest.fixture(scope="module")
def schema():
    return toml_schema()


@pytest.fixture(scope="module")
def validator(schema):
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def errors(validator, text):
    return [f"{e.json_path}: {e.message}" for e in validator.iter_errors(tomllib.loads(text))]


def test_the_file_that_editors_read_is_current(schema):
    kept = json.loads((ROOT / "configs/schema.json").read_text())
    assert kept == schema, "run: graph-trainer config --schema > configs/schema.json"


def test_the_command_prints_it_and_nothing_else(schema, capsys):
    assert cli.main(["config", "--schema"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == schema and err == ""
    assert out == (ROOT / "configs/schema.json").read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_points_to_the_schema_and_fits_it(path, validator):
    text = path.read_text()
    first = text.splitlines()[0]
    assert first.startswith(DIRECTIVE)
    named = (path.parent / first.removeprefix(DIRECTIVE)).resolve()
    assert named == ROOT / "configs/schema.json"
    assert errors(validator, text) == []


@pytest.mark.parametrize("size", ["debugmodel", "8b"])
def test_every_resolved_config_fits_it(size, validator):
    assert errors(validator, config_to_toml(load_config(["--config", size]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[training]\nsteps = 1\n",
        'base = "llama3_debug"\n',
        'module = "graph_trainer.llama3"\nbase = "llama3_8c"\n',
        "base = 3\n",
        BASE + "[training]\nstepz = 3\n",
        BASE + '[training]\nsteps = "ten"\n',
        BASE + "[optimizer]\nbetas = [0.9]\n",
        BASE + '[compile]\nmode = "jit"\n',
        BASE + '[compile]\npasses = ["rematerialise"]\n',
        BASE + "[[optimizer.param_groups]]\noptimizer_name = 'Adam'\n",
    ],
)
def test_a_wrong_base_key_type_or_choice_does_not_fit(text, validator):
    assert errors(validator, text)


@pytest.mark.parametrize(
    "text",
    [
        'module = "my.models"\nbase = "mine"\n',
        BASE + 'unset = ["activation_checkpoint"]\n',
        BASE + '[debug]\nunset = ["seed"]\n',
        BASE + "[training]\nmax_norm = 1\n",
        BASE + "[lr_scheduler]\nmin_lr_factor = 0\n",
        BASE + '[activation_checkpoint]\ntype = "none"\n',
        BASE + '[dataloader]\ntype = "my_components:Mine.Config"\nextra = 7\n',
        BASE + '[validator.dataloader]\ntype = "huggingface"\ndataset = "c4"\n',
        BASE + "[dataloader]\nseed = 4\n",
        BASE + '[override]\nimports = ["a.b", ["c.d", {"x" = 1}]]\n',
    ],
)
def test_a_near_miss_fits(text, validator):
    assert errors(validator, text) == []


def properties_of(schema, key):
    """Every place where the schema describes `section.key`: one for each component."""
    found = [schema]
    for part in key.split("."):
        tables = [leaf for each in found for leaf in tables_of(schema, each)]
        found = [t["properties"][part] for t in tables if part in t.get("properties", {})]
    return found


def tables_of(schema, each):
    if "$ref" in each:
        return tables_of(schema, schema["$defs"][each["$ref"].removeprefix("#/$defs/")])
    return [t for choice in each.get("anyOf", []) for t in tables_of(schema, choice)] or [each]


def test_it_knows_every_key_that_can_be_set_and_documents_ours_and_most_others(schema):
    keys = list(settable_keys(load_config(["--activation_checkpoint.type", "full"])))
    described = {
        key: any("description" in each for each in properties_of(schema, key)) for key in keys
    }
    assert not [key for key in keys if not properties_of(schema, key)]
    ours = [key for key in keys if key.split(".")[0] in ("compile", "tokenizer")]
    assert len(ours) > 6 and all(described[key] for key in ours), described
    assert sum(described.values()) >= 0.9 * len(keys)
    for name in ("base", "module"):
        assert schema["properties"][name]["description"]


def test_the_passes_that_it_offers_are_those_that_there_are(schema):
    from graph_trainer.core.passes.catalogue import registered_passes

    (passes,) = properties_of(schema, "compile.passes")
    names, own = passes["items"]["anyOf"]
    assert names["enum"] == ["default", *registered_passes()] and own["pattern"] == ":"
