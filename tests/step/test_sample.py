"""One sampling step: state in, state and ids out."""

from __future__ import annotations

import copy
import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle.ops import oracle_draw, penalised_logits
from purestep.state.errors import DtypeError, RequestError, ShapeError
from purestep.state.sampling import (
    SamplingParams,
    SamplingState,
    add_row,
    count_history,
    fork_row,
    observe_outputs,
    observe_prompt,
    row_of,
)
from purestep.step.sample import logprobs_of, sample
from torch.utils._python_dispatch import TorchDispatchMode

SOME = settings(max_examples=settings.default.max_examples // 3)  # each example is a batch
VOCAB = 37
WORDS = 2
EOS = (1, 36)
MARGIN = 1e-4  # penalties and bias are f32 here and f64 in the oracle
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "aten.equal", "_to_cpu")

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 4, 10**9]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    min_new_tokens=st.sampled_from([0, 0, 2]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
)


@attrs.frozen
class Case:
    """One request at one step."""

    params: SamplingParams
    logits: list[float]
    prompt: list[int]
    output: list[int]
    position: int
    allowed: frozenset[int] | None


TOKEN = st.integers(0, VOCAB - 1)
SAID = st.lists(st.integers(0, 5), max_size=5)  # the first six tokens are the likeliest, so that history matters
LOGITS = st.lists(st.floats(-8, 8, width=16), min_size=VOCAB, max_size=VOCAB).map(
    lambda row: [x + 6 * (token < 6) for token, x in enumerate(row)]
)
CASES = st.builds(
    Case,
    params=PARAMS,
    logits=LOGITS,
    prompt=SAID,
    output=SAID,
    position=st.integers(0, 10**6),
    allowed=st.none() | st.frozensets(TOKEN, min_size=1),
)


def pack(allowed):
    bits = np.zeros(WORDS * 32, bool)
    bits[list(allowed)] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4").copy())


def open_row(sampling, request_id, params, prompt=(), output=()):
    sampling = add_row(sampling, request_id, params, base_seed=99, vocab_size=VOCAB)
    sampling = observe_prompt(sampling, request_id, prompt)
    for token in output:
        sampling = observe_outputs(sampling, (request_id,), torch.tensor([token]))
    return sampling


def run(cases, order=None):
    """Open request i for case i, sample those in ``order``; return states, ids and the step's other arguments."""
    sampling = SamplingState()
    for request_id, case in cases.items():
        sampling = open_row(sampling, request_id, case.params, case.prompt, case.output)
    order = tuple(cases) if order is None else tuple(order)
    # Not in the rows' order: a mask belongs to its request, wherever it stands in the mapping.
    masked = [request_id for request_id in reversed(order) if cases[request_id].allowed]
    mask = {request_id: pack(cases[request_id].allowed) for request_id in masked}
    logits = torch.tensor([cases[request_id].logits for request_id in order])
    positions = torch.tensor([cases[request_id].position for request_id in order])
    after, ids = sample(logits, sampling, order, positions, stop_token_ids=EOS, mask=mask)
    return sampling, after, dict(zip(order, ids.tolist(), strict=True))


def expected_draw(case, seed):
    """The same step by the sequential sampler."""
    params = case.params
    counts = {token: case.output.count(token) for token in range(VOCAB)}
    held_back = {*EOS, *params.stop_token_ids} if len(case.output) < params.min_new_tokens else ()
    row = penalised_logits(
        case.logits,
        counts=counts,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        banned=held_back,
    )
    row = penalised_logits(
        row,
        counts={token: counts[token] + (token in case.prompt) for token in counts},
        repetition_penalty=params.repetition_penalty,
        allowed=case.allowed,
        logit_bias=dict(params.logit_bias),
    )
    assume(max(row) > -math.inf)
    limits = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return oracle_draw(row, **limits, seed=seed, position=case.position), row


def greedy_case(**changes):
    case = Case(SamplingParams(temperature=0), [0.0] * VOCAB, [], [], 3, None)
    return attrs.evolve(case, **changes)


@given(st.lists(CASES, min_size=1, max_size=4))
@SOME
def test_each_row_gets_what_a_sequential_sampler_gives_it(rows):
    """Penalties, held-back stops, mask, bias and choice of every row equal a plain sampler's, in this order."""
    cases = dict(enumerate(rows))
    before, _, ids = run(cases)
    for request_id, case in cases.items():
        expected, row = expected_draw(case, row_of(before, request_id).seed)
        assert 0 <= ids[request_id] < VOCAB
        assert row[ids[request_id]] > -math.inf
        if expected.margin > MARGIN:
            assert ids[request_id] == expected.token_id


@given(st.lists(CASES, min_size=2, max_size=4), st.randoms(use_true_random=False))
@SOME
def test_a_row_is_the_same_in_any_company(rows, random):
    """Alone, in another order, or with some requests left out, each request gets the same token."""
    cases = dict(enumerate(rows))
    _, _, together = run(cases)
    some = random.sample(list(cases), random.randint(1, len(cases)))
    before, after, ids = run(cases, some)
    assert ids == {request_id: together[request_id] for request_id in some}
    for request_id in cases:
        # An unseeded request's seed follows its id, so alone it must keep its id.
        assert run({request_id: cases[request_id]})[2][request_id] == together[request_id]
        if request_id not in some:
            assert row_of(after, request_id) is row_of(before, request_id)


@given(st.lists(CASES, min_size=1, max_size=3))
@SOME
def test_sampling_counts_its_tokens_and_changes_nothing_else(rows):
    """The new state counts one more token a row; the inputs, the old state and the generators are untouched."""
    cases = dict(enumerate(rows))
    before, _, _ = run(cases)
    logits = torch.tensor([case.logits for case in rows])
    positions = torch.tensor([case.position for case in rows])
    mask = {request_id: pack(case.allowed) for request_id, case in cases.items() if case.allowed}
    held = copy.deepcopy((before, logits, positions, mask))
    generator = torch.get_rng_state()
    after, ids = sample(logits, before, tuple(cases), positions, stop_token_ids=EOS, mask=mask)
    again, same_ids = sample(logits, before, tuple(cases), positions, stop_token_ids=EOS, mask=mask)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(ids, same_ids)
    assert ids.dtype == torch.int64
    assert torch.equal(logits, held[1])
    assert torch.equal(positions, held[2])
    assert all(torch.equal(mask[request_id], held[3][request_id]) for request_id in mask)
    for request_id, case in cases.items():
        outputs = [*case.output, ids[request_id].item()]
        for row, history in (
            (row_of(before, request_id), count_history(case.prompt, case.output, vocab_size=VOCAB)),
            (row_of(after, request_id), count_history(case.prompt, outputs, vocab_size=VOCAB)),
            (row_of(again, request_id), count_history(case.prompt, outputs, vocab_size=VOCAB)),
        ):
            assert row.params is case.params
            assert row.n_outputs == history.n_outputs
            if case.params.has_penalties:
                assert torch.equal(row.output_counts, history.output_counts)
                assert torch.equal(row.prompt_seen, history.prompt_seen)
            else:
                assert row.output_counts is row.prompt_seen is None


class NoHostReads(TorchDispatchMode):
    """Refuse every operator whose result the host waits for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in HOST_READS), f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


def test_sampling_never_reads_a_tensor_on_the_host():
    """No operator of a step with every rule switched on hands a tensor's content to Python."""
    everything = SamplingParams(
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias={2: 1.0},
        min_new_tokens=3,
        logprobs=2,
    )
    sampling = open_row(open_row(SamplingState(), 1, everything, [4], [5]), 2, SamplingParams(temperature=0))
    logits, mask = torch.zeros(2, VOCAB), {1: pack({3, 4, 5})}
    with NoHostReads():
        after, ids = sample(logits, sampling, (1, 2), torch.tensor([4, 5]), stop_token_ids=EOS, mask=mask)
        logprobs_of(logits, ids, after, (1, 2))
        with pytest.raises(AssertionError, match="reads a tensor"):
            bool(ids[0])


def test_plain_greedy_rows_ignore_everything_else():
    """All-greedy rows take the lowest largest id, whatever their temperature's size, seed, position or mates."""
    row = [1.0, 3.0, 3.0, 2.0] + [0.0] * (VOCAB - 4)
    for seed in (None, 0, 2**64 - 1):
        for temperature in (0.0, 1e-8):
            params = SamplingParams(temperature=temperature, seed=seed, top_k=5)
            cases = {request_id: greedy_case(params=params, logits=row, position=request_id) for request_id in range(3)}
            assert run(cases)[2] == {0: 1, 1: 1, 2: 1}
            mixed = cases | {9: greedy_case(params=SamplingParams(top_k=5), logits=row)}
            assert run(mixed)[2] | {9: 0} == {0: 1, 1: 1, 2: 1, 9: 0}


def test_seeded_request_does_not_notice_its_mates():
    """A seeded request follows the same tokens alone and beside unseeded, seeded, penalised and constrained ones."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    mates = (
        SamplingParams(),
        SamplingParams(seed=7, top_k=3),
        SamplingParams(frequency_penalty=2, seed=5),
        SamplingParams(temperature=0, repetition_penalty=1.5),
    )

    def follow(place, n_mates):
        sampling, order = SamplingState(), [*range(n_mates)]
        order.insert(place, 50)
        for request_id in order:
            params = SamplingParams(seed=7, top_p=0.95) if request_id == 50 else mates[request_id]
            sampling = open_row(sampling, request_id, params, [1, 2])
        tokens = []
        for step in range(12):
            rows = torch.stack([logits[4] if request_id == 50 else logits[request_id] for request_id in order])
            positions = torch.full((len(order),), 10 + step)
            mask = {0: pack(range(5))} if n_mates else None
            sampling, ids = sample(rows, sampling, tuple(order), positions, stop_token_ids=EOS, mask=mask)
            tokens.append(ids[place].item())
        return tokens

    alone = follow(0, 0)
    assert len(set(alone)) > 3
    assert all(follow(place, n_mates) == alone for n_mates in range(1, 5) for place in range(n_mates + 1))


def test_forks_with_other_seeds_are_other_streams():
    """Four choices with seeds of their own differ, come back the same, and the first one is the plain request."""
    logits = torch.zeros(4, VOCAB)

    def follow(n):
        sampling = open_row(SamplingState(), 0, SamplingParams(seed=7))
        for choice in range(1, n):
            sampling = fork_row(sampling, 0, choice, seed=7 + choice)
        rows = []
        for step in range(20):
            positions = torch.full((n,), step)
            sampling, ids = sample(logits[:n], sampling, tuple(range(n)), positions, stop_token_ids=EOS)
            rows.append(tuple(ids.tolist()))
        return list(zip(*rows, strict=True))

    four = follow(4)
    assert four == follow(4)
    assert four[0] == follow(1)[0]
    assert len(set(four)) == 4


@given(CASES.filter(lambda case: case.allowed), st.floats(0, 100))
@SOME
def test_bias_cannot_undo_the_mask(case, bias):
    """A masked token is never chosen, however large its bias, nor where held-back stops leave nothing else."""
    everything = {token: bias for token in range(VOCAB) if token not in case.allowed}
    case = attrs.evolve(case, params=attrs.evolve(case.params, logit_bias=everything))
    assert run({0: case})[2][0] in case.allowed


@given(CASES, st.integers(1, 4))
@SOME
def test_stop_tokens_wait_for_the_minimum(case, minimum):
    """Before min_new_tokens no stop token comes, the model's or the request's own; afterwards it may."""
    favoured = [20.0 if token in (*EOS, 3) else x for token, x in enumerate(case.logits)]
    params = SamplingParams(temperature=case.params.temperature, min_new_tokens=minimum, stop_token_ids=(3,))
    stops = {*EOS, 3}
    early = attrs.evolve(case, params=params, logits=favoured, output=[5] * (minimum - 1), allowed=None)
    late = attrs.evolve(early, output=[5] * minimum)
    assert run({0: early})[2][0] not in stops
    if params.temperature < 0.5:
        assert run({0: late})[2][0] in stops


def test_mask_wins_over_held_back_stops():
    """Where the mask allows stop tokens only, the lowest of them is chosen even before min_new_tokens."""
    case = greedy_case(params=SamplingParams(min_new_tokens=5), allowed=frozenset(EOS))
    assert run({0: case})[2][0] == EOS[0]


def test_penalties_touch_their_own_row_only():
    """In a batch of requests of different length, one with penalties, the others choose as without it."""
    row = [float(token % 7) for token in range(VOCAB)]
    plain = {0: greedy_case(logits=row, prompt=[6]), 1: greedy_case(logits=row, prompt=[6] * 9, output=[6] * 4)}
    penalised = greedy_case(logits=row, params=SamplingParams(temperature=0, presence_penalty=2), output=[6, 13])
    ids = run(plain | {2: penalised})[2]
    assert ids == {0: 6, 1: 6, 2: 20}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"request_ids": (0, 5)}, RequestError, "open requests .* got 5"),
        ({"request_ids": (0, 0)}, RequestError, "every request once"),
        ({"logits": torch.zeros(2, VOCAB, dtype=torch.bfloat16)}, DtypeError, r"logits\): expected f32\[B,V\], got"),
        ({"logits": torch.zeros(3, VOCAB)}, ShapeError, r"with B = 2.*got \(3, 37\)"),
        ({"logits": torch.zeros(VOCAB)}, ShapeError, r"got \(37,\)"),
        ({"logits": torch.zeros(2, VOCAB + 1)}, ShapeError, "with V = 37, as request 1 was opened with"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, DtypeError, r"positions\): expected i64\[B\]"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ShapeError, r"positions\): .*got \(3,\)"),
        (
            {"mask": {7: torch.zeros(WORDS, dtype=torch.int32)}},
            RequestError,
            r"mask\): expected request ids among \(0, 1\)",
        ),
        ({"mask": {0: torch.zeros(WORDS, dtype=torch.int64)}}, DtypeError, r"mask\[0\]\): expected i32"),
        ({"mask": {0: torch.zeros(WORDS + 1, dtype=torch.int32)}}, ShapeError, r"\(2,\) or \(1, 2\), got \(3,\)"),
        ({"mask": {1: torch.zeros(2, WORDS, dtype=torch.int32)}}, ShapeError, r"got \(2, 2\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, error, message):
    """Wrong shapes, dtypes and request ids raise an error that names the argument, before anything is computed."""
    sampling = open_row(SamplingState(), 0, SamplingParams(temperature=0))
    sampling = open_row(sampling, 1, SamplingParams(temperature=0, presence_penalty=1))
    arguments = {"logits": torch.zeros(2, VOCAB), "request_ids": (0, 1), "positions": torch.tensor([0, 1]), **changes}
    with pytest.raises(error, match=message):
        sample(sampling=sampling, stop_token_ids=EOS, **arguments)


def test_mask_may_have_a_batch_axis():
    """A mask of one row and a flat one mean the same; a request without one may choose freely."""
    sampling = open_row(open_row(SamplingState(), 0, SamplingParams(temperature=0)), 1, SamplingParams(temperature=0))
    logits, words = torch.arange(2.0 * VOCAB).view(2, VOCAB), pack({2, 34})
    for mask in ({0: words}, {0: words[None]}):
        _, ids = sample(logits, sampling, (0, 1), torch.tensor([0, 1]), stop_token_ids=EOS, mask=mask)
        assert ids.tolist() == [34, VOCAB - 1]


def test_no_rows_no_tokens():
    """A step without rows samples nothing."""
    after, ids = sample(torch.zeros(0, VOCAB), SamplingState(), (), torch.zeros(0).long(), stop_token_ids=EOS)
    assert after.rows == ()
    assert ids.shape == (0,)


def test_logprobs_come_to_those_who_ask():
    """None if nobody asks; else those of the unmodified distribution, as many as the most that a row asked for."""
    biased = SamplingParams(temperature=0, logit_bias={5: 100}, logprobs=2)
    sampling = open_row(open_row(SamplingState(), 0, SamplingParams()), 1, biased)
    sampling = open_row(sampling, 2, attrs.evolve(biased, logprobs=0))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 5] = -20.0
    _, ids = sample(logits, sampling, (0, 1, 2), torch.tensor([0, 1, 2]), stop_token_ids=EOS)
    assert ids[1] == 5
    assert logprobs_of(logits[:1], ids[:1], sampling, (0,)) is None
    only_chosen = logprobs_of(logits[2:], ids[2:], sampling, (2,))
    assert (only_chosen.top_ids.shape, only_chosen.counts) == ((1, 0), (0,))
    both = logprobs_of(logits, ids, sampling, (0, 1, 2))
    plain = torch.log(torch.softmax(logits.double(), -1)).float()
    assert both.counts == (None, 2, 0)
    assert both.top_ids.tolist() == plain.argsort(descending=True)[:, :2].tolist()
    torch.testing.assert_close(both.token_logprobs, plain.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both.top_logprobs, plain.gather(1, both.top_ids), rtol=1e-5, atol=1e-5)
    assert torch.equal(both.token_logprobs[2:], only_chosen.token_logprobs)


@pytest.mark.parametrize("request_ids", [(7,), (0, 0)])
def test_logprobs_refuse_strange_requests_also_when_nobody_asked(request_ids):
    """A request that is unknown or named twice is an error, whether or not any open one wants log-probabilities."""
    sampling = open_row(SamplingState(), 0, SamplingParams())
    logits, ids = torch.zeros(len(request_ids), VOCAB), torch.zeros(len(request_ids), dtype=torch.int64)
    with pytest.raises(RequestError):
        logprobs_of(logits, ids, sampling, request_ids)
