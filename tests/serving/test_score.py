"""Scoring: windows that count every token once, through the caches, against the model without any."""

from __future__ import annotations

import math

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.configs import tiny_config
from purestep.model.checkpoint import init_params
from purestep.model.loading import build_model
from purestep.serving.score import Score, score_text, score_tokens
from purestep.state.config_reading import config_from_dict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

CONFIG = config_from_dict(tiny_config((0, 4), vocab=40, index_topk=512, max_positions=200))
MODEL = build_model(CONFIG, init_params(CONFIG, torch.Generator().manual_seed(3), torch.float32))
TOLERANCE = 1e-4
"""Bits; logits are of scale 1 and computed in F32 along two routes."""


def direct_bits(ids: list[int], context: int, stride: int) -> list[float]:
    """Compute every token's bits from whole sequences: the token's window is the first that reaches beyond it."""
    bits, logits = [], {}
    for at, token in enumerate(ids):
        start = max(0, -(-(at - context + 1) // stride)) * stride
        if start not in logits:
            logits[start] = ps.forward_sequence(MODEL, torch.tensor([0, *ids[start : start + context - 1]]))
        bits.append(-logits[start][at - start].log_softmax(-1)[token].item() / math.log(2))
    return bits


@settings(max_examples=25)
@given(st.data())
def test_score_equals_the_model_without_a_cache(data: st.DataObject) -> None:
    """Any windows, batches and ways of feeding give the bits that whole sequences give, each token's once."""
    ids = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=60), label="ids")
    context = data.draw(st.integers(1, 70), label="context")
    stride = data.draw(st.integers(max(1, context // 3), context), label="stride")
    batch = data.draw(st.integers(1, 5), label="batch")
    by_token = data.draw(st.booleans(), label="by_token")
    calls: list[tuple[int, int]] = []
    bits = score_tokens(
        MODEL,
        ids,
        context=context,
        stride=stride,
        batch=batch,
        by_token=by_token,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert bits.dtype == torch.float64
    assert torch.allclose(bits, torch.tensor(direct_bits(ids, context, stride), dtype=torch.float64), atol=TOLERANCE)
    assert calls == sorted(calls)
    assert calls[-1] == (len(ids), len(ids))


def test_score_chunks_change_nothing() -> None:
    """A window longer than a chunk, and pages that it crosses, give the bits of the whole sequence."""
    ids = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = torch.tensor(direct_bits(ids, 140, 50), dtype=torch.float64)
    for by_token in (False, True):
        bits = score_tokens(MODEL, ids, context=140, stride=50, batch=2, by_token=by_token)
        assert torch.allclose(bits, expected, atol=TOLERANCE)


def test_score_adds_and_divides() -> None:
    """Scores add up field by field; what follows from them is arithmetic."""
    total = Score(10, 4, 20.0) + Score(6, 4, 12.0)
    assert total == Score(16, 8, 32.0)
    assert (total.bits_per_byte, total.bits_per_token, total.perplexity) == (2.0, 4.0, 16.0)
    assert Score(1, 1, 5000.0).perplexity == math.inf


@pytest.mark.parametrize(
    ("ids", "numbers", "named"),
    [
        ([], {}, "text tokens"),
        ([1], {"context": 0}, "context"),
        ([1], {"context": 201}, "context"),
        ([1], {"stride": 0}, "stride"),
        ([1], {"stride": 11}, "stride"),
        ([1], {"batch": 0}, "batch"),
        ([1, 40], {}, "token ids"),
        ([-1, 1], {}, "token ids"),
    ],
)
def test_score_refuses_what_it_cannot_do(ids: list[int], numbers: dict[str, int], named: str) -> None:
    """No tokens, foreign tokens and numbers out of range are refused by name."""
    with pytest.raises(ps.RequestError, match=named):
        score_tokens(MODEL, ids, **({"context": 10, "stride": 5} | numbers))


def test_score_refuses_a_text_that_the_tokenizer_changes() -> None:
    """Bits of other characters than the text's are not reported as the text's."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    model = attrs.evolve(MODEL, tokenizer=tokenizer)
    assert score_text(model, "a", context=10, stride=5).n_tokens == 1
    with pytest.raises(ps.RequestError, match="unchanged"):
        score_text(model, "b", context=10, stride=5)


def test_score_needs_a_bos() -> None:
    """A model without BOS has nothing to predict the first token from."""
    config = attrs.evolve(CONFIG, bos_token_id=None)
    with pytest.raises(ps.ConfigError, match="bos_token_id"):
        score_tokens(attrs.evolve(MODEL, config=config), [1], context=10, stride=5)


def test_score_needs_a_tokenizer_for_text() -> None:
    """A text cannot be scored by a model that came without a tokenizer."""
    with pytest.raises(ps.ConfigError, match=r"tokenizer\.json"):
        score_text(MODEL, "x", context=10, stride=5)
