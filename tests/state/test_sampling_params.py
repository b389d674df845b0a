"""Parameters are checked when built; rows are pure values that count what a request read and said."""

from __future__ import annotations

import copy
import json
import math
import pickle

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from purestep.state.errors import RequestError
from purestep.state.sampling import (
    SamplingParams,
    SamplingState,
    add_row,
    check_vocabulary,
    count_history,
    derive_seed,
    drop_row,
    fork_row,
    observe_outputs,
    observe_prompt,
    replace_output,
    row_of,
)
from torch.utils import _pytree as pytree

SOME = settings(max_examples=settings.default.max_examples // 3)  # each example is a batch
VOCAB = 11
PENALTIES = SamplingParams(repetition_penalty=1.2)

REFUSED = [
    *[("temperature", bad) for bad in (-1e-9, -1, math.nan, math.inf, "1", None, True, 10**400)],
    *[("top_k", bad) for bad in (-2, 1.0, "5", None, True)],
    *[("top_p", bad) for bad in (0, 0.0, -0.1, 1.0000001, math.nan, "0.5", None, True)],
    *[("min_p", bad) for bad in (-1e-9, 1.0000001, math.nan, None, False)],
    *[("repetition_penalty", bad) for bad in (0, -1, math.nan, math.inf, "1")],
    *[("frequency_penalty", bad) for bad in (-2.1, 2.1, math.nan, math.inf, None)],
    *[("presence_penalty", bad) for bad in (-2.1, 2.1, math.nan, -math.inf, [])],
    *[("logit_bias", {key: 1.0}) for key in ("191222", -1, "AI", "1.5", 1.5, True, None)],
    *[("logit_bias", {0: bad}) for bad in (math.nan, math.inf, "x", 10**9, 100.001, None, True)],
    *[("logit_bias", bad) for bad in (None, 3, "3", [1, 2], ((1, 0.5), (1, 0.6)))],
    *[("seed", bad) for bad in (-1, 2**64, 1.0, "7", True)],
    *[("max_new_tokens", bad) for bad in (0, -1, 1.5, "4", True)],
    *[("min_new_tokens", bad) for bad in (-1, 0.5, None, True)],
    *[("stop_token_ids", bad) for bad in (3, "3", None, (-1,), (1.5,), ("a",), (True,), {1: 2})],
    *[("ignore_eos", bad) for bad in (0, 1, None, "no")],
    *[("logprobs", bad) for bad in (-1, 21, 1.0, True, "5")],
]


@st.composite
def legal_params(draw):
    return SamplingParams(
        temperature=draw(st.floats(0, 1e300)),
        top_k=draw(st.integers(-1, 10**12)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(1e-300, 1e300)),
        frequency_penalty=draw(st.floats(-2, 2)),
        presence_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=4)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        max_new_tokens=draw(st.none() | st.integers(9, 100)),
        min_new_tokens=draw(st.integers(0, 9)),
        stop_token_ids=draw(st.lists(st.integers(0, 10**6), max_size=3)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


def opened(*request_ids, params=PENALTIES):
    sampling = SamplingState()
    for request_id in request_ids:
        sampling = add_row(sampling, request_id, params, base_seed=5, vocab_size=VOCAB)
    return sampling


def assert_history(row, history):
    assert row.n_outputs == history.n_outputs
    assert torch.equal(row.output_counts, history.output_counts)
    assert torch.equal(row.prompt_seen, history.prompt_seen)
    assert (row.output_counts.dtype, row.prompt_seen.dtype) == (torch.int32, torch.bool)


@pytest.mark.parametrize(("field", "bad"), REFUSED, ids=lambda x: repr(x)[:30])
def test_params_refuse_an_illegal_value_by_name(field, bad):
    """A value that cannot be honoured raises a RequestError with the field's name, whatever the other fields are."""
    with pytest.raises(RequestError, match=f"SamplingParams.{field}: expected .*, got ") as caught:
        SamplingParams(**{field: bad})
    assert caught.value.field == field


def test_params_refuse_more_required_than_allowed_tokens():
    """min_new_tokens above max_new_tokens is a RequestError; equal is fine."""
    assert SamplingParams(max_new_tokens=3, min_new_tokens=3).min_new_tokens == 3
    with pytest.raises(RequestError, match="min_new_tokens: expected at most max_new_tokens = 3, got 4"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)


@given(legal_params())
@SOME
def test_params_are_values(params):
    """Legal parameters hash, pickle, deep-copy and evolve to something equal."""
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), attrs.evolve(params)):
        assert other == params
        assert hash(other) == hash(params)


def test_params_do_not_follow_the_callers_mapping():
    """A later change of the caller's dict or list does not reach the parameters, and they cannot be assigned to."""
    bias, stops = {4: 1.0, 2: -100}, [7]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[4] = 9.0
    stops.append(8)
    assert params.logit_bias == ((2, -100.0), (4, 1.0))
    assert SamplingParams(logit_bias=json.loads(json.dumps(params.logit_bias))).logit_bias == params.logit_bias
    assert params.stop_token_ids == (7,)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        params.temperature = 0.5


def test_params_keep_the_published_order_and_defaults():
    """The fields come in the published order, so that positional use keeps its meaning."""
    names = " ".join(field.name for field in attrs.fields(SamplingParams))
    assert names == (
        "temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty logit_bias seed "
        "max_new_tokens min_new_tokens stop_token_ids ignore_eos logprobs"
    )
    assert SamplingParams() == SamplingParams(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, {}, None, None, 0, (), False, None)
    assert SamplingParams(np.float32(0.5), np.int64(3)) == SamplingParams(temperature=0.5, top_k=3)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=9.9e-7), True),
        (SamplingParams(temperature=1e-6), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=-1), False),
    ],
)
def test_params_below_the_limit_are_greedy(params, greedy):
    """A temperature below 1e-6, or top_k = 1, means the likeliest token."""
    assert params.is_greedy is greedy


def test_vocabulary_check_names_the_token_that_is_missing():
    """Bias and stop ids must exist, and holding back every token is refused."""
    check_vocabulary(SamplingParams(logit_bias={10: 1}, stop_token_ids=(10,), min_new_tokens=1), VOCAB)
    with pytest.raises(RequestError, match=r"logit_bias: .*below the vocabulary size 11, got 11"):
        check_vocabulary(SamplingParams(logit_bias={11: 1}), VOCAB)
    with pytest.raises(RequestError, match=r"stop_token_ids: .*below the vocabulary size 11, got 12"):
        check_vocabulary(SamplingParams(stop_token_ids=(1, 12)), VOCAB)
    with pytest.raises(RequestError, match="every token"):
        check_vocabulary(SamplingParams(stop_token_ids=range(VOCAB), min_new_tokens=1), VOCAB)
    with pytest.raises(RequestError, match="below the vocabulary size"):
        opened(1, params=SamplingParams(logit_bias={11: 1}))


def test_derived_seeds_are_splitmix64():
    """Derived seeds are the published splitmix64 stream of the base seed, less the lowest bit."""
    assert derive_seed(0, 0) == 0xE220A8397B1DCDAF >> 1
    assert derive_seed(0, 1) == 0x6E789E6AA1B965F4 >> 1
    seeds = {derive_seed(base, request) for base in range(30) for request in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rows_come_in_order_of_opening_and_leave_their_input_alone():
    """Rows keep their order through opening and closing; the state given stays as it was."""
    three = opened(4, 2, 9)
    two = drop_row(three, 2)
    assert [row.request_id for row in three.rows] == [4, 2, 9]
    assert [row.request_id for row in two.rows] == [4, 9]
    assert [row.request_id for row in add_row(two, 2, PENALTIES, base_seed=0, vocab_size=VOCAB).rows] == [4, 9, 2]
    assert row_of(three, 2).seed == derive_seed(5, 2)
    assert row_of(opened(2, params=SamplingParams(seed=2**64 - 1)), 2).seed == 2**64 - 1


def test_rows_refuse_unknown_and_doubled_requests():
    """Every function that names a request refuses one without a row, and opening refuses one with a row."""
    sampling = opened(1)
    for call in (
        lambda: row_of(sampling, 3),
        lambda: drop_row(sampling, 3),
        lambda: observe_prompt(sampling, 3, [1]),
        lambda: replace_output(sampling, 3, 1, 2),
        lambda: fork_row(sampling, 3, 4),
    ):
        with pytest.raises(RequestError, match=r"expected one of the open requests \(1,\), got 3"):
            call()
    for call in (lambda: opened(1, 1), lambda: fork_row(sampling, 1, 1)):
        with pytest.raises(RequestError, match="without a row, got 1"):
            call()


def test_rows_hold_tensors_only_with_penalties():
    """A row without penalties holds no tensor, and every tensor of a state is a leaf of its tree."""
    bare = opened(1, params=SamplingParams(temperature=0.5, logit_bias={1: 1}))
    bare = observe_prompt(observe_outputs(bare, (1,), torch.tensor([3])), 1, [2])
    assert row_of(bare, 1).n_outputs == 1
    assert not [leaf for leaf in pytree.tree_leaves(bare) if isinstance(leaf, torch.Tensor)]
    for field in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        counted = opened(1, params=SamplingParams(**{field: 0.5}))
        assert len([leaf for leaf in pytree.tree_leaves(counted) if isinstance(leaf, torch.Tensor)]) == 2


TOKEN = st.integers(0, VOCAB - 1)
EVENTS = st.lists(st.tuples(st.sampled_from(["prompt", "output", "replace"]), st.lists(TOKEN, max_size=4), TOKEN))


@given(EVENTS)
@SOME
def test_history_equals_a_recount(events):
    """However prompt chunks, sampled tokens and replacements alternate, the counts equal a count from scratch."""
    sampling, prompt, output = opened(7, 8), [], []
    for kind, chunk, token in events:
        before, frozen = sampling, copy.deepcopy(row_of(sampling, 7))
        if kind == "prompt":
            ids = np.array(chunk, np.int64)
            ids.setflags(write=False)
            sampling = observe_prompt(sampling, 7, ids)
            prompt += chunk
        elif kind == "output":
            sampling = observe_outputs(sampling, (7,), torch.tensor([token]))
            output.append(token)
        elif output:
            sampling = replace_output(sampling, 7, output[-1], token)
            output[-1] = token
        assert_history(row_of(before, 7), frozen)
    assert_history(row_of(sampling, 7), count_history(prompt, np.array(output, np.int64), vocab_size=VOCAB))
    assert_history(row_of(sampling, 8), count_history((), (), vocab_size=VOCAB))


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_history_refuses_tokens_outside_the_vocabulary(bad):
    """No id outside the vocabulary is counted, in whichever way it comes."""
    sampling = observe_outputs(opened(1), (1,), torch.tensor([3]))
    for call in (
        lambda: observe_prompt(sampling, 1, [0, bad]),
        lambda: replace_output(sampling, 1, 3, bad),
        lambda: count_history((bad,), (), vocab_size=VOCAB),
        lambda: count_history((), (bad,), vocab_size=VOCAB),
    ):
        with pytest.raises(RequestError, match=f"below {VOCAB}, got {bad}"):
            call()


def test_replacement_needs_a_sampled_token():
    """There is nothing to replace before the first sampled token."""
    with pytest.raises(RequestError, match="sample one first"):
        replace_output(opened(1), 1, 0, 1)


@pytest.mark.parametrize("params", [PENALTIES, SamplingParams(min_new_tokens=5)])
def test_resumed_row_goes_on_counting(params):
    """A row opened with a history continues as the one that was closed."""
    held = observe_outputs(observe_prompt(opened(1, params=params), 1, [4, 5]), (1,), torch.tensor([3]))
    history = count_history((4, 5), (3,), vocab_size=VOCAB)
    resumed = add_row(SamplingState(), 1, params, base_seed=5, vocab_size=VOCAB, history=history)
    assert row_of(resumed, 1).n_outputs == 1
    assert row_of(resumed, 1).seed == row_of(held, 1).seed
    if params.has_penalties:
        assert_history(row_of(resumed, 1), row_of(held, 1))
    else:
        assert row_of(resumed, 1).output_counts is row_of(resumed, 1).prompt_seen is None


def test_fork_inherits_everything_unless_told_otherwise():
    """A fork has the parent's parameters, seed and counts; its later life leaves the parent's alone."""
    sampling = observe_outputs(observe_prompt(opened(1), 1, [4, 5]), (1,), torch.tensor([3]))
    sampling = fork_row(sampling, 1, 2)
    parent, child = sampling.rows
    assert (child.request_id, child.params, child.seed) == (2, parent.params, parent.seed)
    assert_history(child, parent)
    sampling = observe_outputs(sampling, (2,), torch.tensor([6]))
    assert_history(row_of(sampling, 1), count_history((4, 5), (3,), vocab_size=VOCAB))
    assert_history(row_of(sampling, 2), count_history((4, 5), (3, 6), vocab_size=VOCAB))


def test_fork_takes_the_nearest_seed():
    """The seed argument wins over the one in the new parameters, and that one over the parent's."""
    sampling = opened(1)
    parent_seed = row_of(sampling, 1).seed
    assert row_of(fork_row(sampling, 1, 2, attrs.evolve(PENALTIES, top_k=3)), 2).seed == parent_seed
    assert row_of(fork_row(sampling, 1, 2, attrs.evolve(PENALTIES, seed=8)), 2).seed == 8
    assert row_of(fork_row(sampling, 1, 2, attrs.evolve(PENALTIES, seed=8), 9), 2).seed == 9
    seeded = fork_row(opened(1, params=SamplingParams(seed=7)), 1, 2, seed=9)
    assert row_of(fork_row(seeded, 2, 3), 3).seed == 9
    with pytest.raises(RequestError, match="seed: expected"):
        fork_row(sampling, 1, 2, seed=-1)


def test_fork_with_new_penalties_needs_the_history():
    """Counts that the parent never kept are asked for, taken if given, and dropped where no penalty uses them."""
    bare = observe_outputs(opened(1, params=SamplingParams()), (1,), torch.tensor([3]))
    with pytest.raises(RequestError, match="history=count_history"):
        fork_row(bare, 1, 2, PENALTIES)
    earlier = count_history((4,), (), vocab_size=VOCAB)
    assert_history(row_of(fork_row(bare, 1, 2, PENALTIES, history=earlier), 2), earlier)
    freed = row_of(fork_row(opened(1), 1, 2, SamplingParams()), 2)
    assert freed.output_counts is None
    assert freed.prompt_seen is None
