"""The file of what backward keeps: written by a plan, edited by a user, and checked when read."""

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graph_trainer as gt
from graph_trainer.core.passes.memory_table import KeptOp, MemoryTable
from graph_trainer.titan.memory_table_file import (
    from_ranges,
    in_ranges,
    memory_table_of,
    memory_table_to_toml,
)
from tests.examples import examples

ROW = "[[activation]]\nmodule = 'a'\nop = 'b'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "activation: Field required"),
        ("[[activations]]\nx = 1", "activations = .*did you mean activation?"),
        (ROW + "nth = 0\nkeep_on = []", "activation.0.keep_on = .*did you mean keep_in?"),
        (ROW + "keep_in = []", "activation.0.nth: Field required"),
        (ROW + "keep_in = []\nnth = -1", "activation.0.nth = -1: .*greater than or equal to 0"),
        (ROW + "nth = 0\nkeep_in = 'layers.0'", "activation.0.keep_in = \"layers.0\": .*list"),
        (ROW + "nth = 0\nkeep_in = []\n[[offload_inputs_of]]", "offload_inputs_of.0 = {}: "),
        (ROW + "nth = 0\nkeep_in = []\nmilliseconds = nan", "milliseconds = nan: .*finite"),
        (2 * (ROW + "nth = 0\nkeep_in = []\n"), "activation.1 is the same op as activation.0"),
        *(
            (f"{ROW}nth = 0\nkeep_in = ['{name}']", f"keep_in = .*'{re.escape(name)}' is not")
            for name in ("layers.5-2", "layers.*", "layers", "layers.0-99999999999")
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(text, said):
    with pytest.raises(gt.ConfigError, match=f"a file.*{said}"):
        memory_table_of(tomllib.loads(text), "a file")


ROWS = st.tuples(st.text(), st.text(), st.sets(st.integers(0, 30)))


@given(st.lists(ROWS, unique_by=lambda row: row[:2]))
@examples(100)
def test_any_name_survives_its_file(ops):
    rows = [KeptOp(m, op, 0, tuple(f"{m}.{n}" for n in sorted(kept))) for m, op, kept in ops]
    names = tuple(m for m, *_ in ops)
    table = MemoryTable(tuple(rows), names, tuple(f"{m}.1" for m in names))
    assert memory_table_of(tomllib.loads(memory_table_to_toml(table)), "a file") == table


def test_names_of_blocks_are_written_as_ranges():
    names = ["layers.0", "layers.1", "layers.2", "layers.5", "enc.blocks.7", "enc.blocks.8", "3"]
    names += ["layers.00", "layers.01", "layers.09", "layers.10", "a-b.9", "a-b.10"]
    written = ["layers.0-2", "layers.5", "enc.blocks.7-8", "3", "layers.00", "layers.01"]
    assert in_ranges(names) == [*written, "layers.09", "layers.10", "a-b.9-10"]
    assert from_ranges(in_ranges(names)) == names
