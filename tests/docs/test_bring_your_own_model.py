"""The decoder of docs/bring_your_own_model.md; its commands run as those of other pages."""

from __future__ import annotations

import pytest
import torch

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.load import load_config
from tests.docs.pages import PAGES, workplace


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(workplace(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["--module", "mydecoder", "--config", "small"]


def test_it_predicts_from_earlier_tokens_alone(words):
    model = load_config(words).model_spec.model.build()
    model.init_states()
    tokens = torch.arange(16)[None]
    other = tokens.clone()
    other[0, 8:] += 100
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


@pytest.mark.parametrize(
    "flag",
    [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.context_parallel_degree=2",
        "--parallelism.document_mask",
    ],
)
def test_what_would_not_act_on_it_is_refused(words, flag):
    with pytest.raises(ConfigError, match="takes data parallelism alone"):
        load_config([*words, flag])


def test_the_extra_is_named_before_the_commands_that_need_it():
    _, _, part = PAGES["bring_your_own_model.md"].text.partition("## A model of Hugging Face")
    assert 0 < part.find("-e '.[transformers]'") < part.index("```")
