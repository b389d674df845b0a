"""From logits to token ids on plain tensors, against a sequential sampler in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle.ops import gumbel_noise as oracle_noise
from oracle.ops import murmur_hash, oracle_draw, penalised_logits
from purestep.ops.noise import gumbel_noise, hash_columns
from purestep.ops.sampling import (
    apply_bias,
    apply_mask,
    apply_penalties,
    ban_tokens,
    choose,
    filter_distribution,
    map_rows,
    pick_greedy,
    probs_from_logits,
    sample_tokens,
    token_logprobs,
    truncate_ranks,
    unpack_mask,
)

SOME = settings(max_examples=settings.default.max_examples // 3)  # each example is a batch
MARGIN = 1e-9  # the oracle sums in another order; a decision nearer than this may fall either way
PENALTY_TOLERANCE = 1e-5  # relative: penalties are f32 here and f64 in the oracle
CHI_SQUARE_LIMIT = 45.0  # a fair sampler with 4 degrees of freedom exceeds it once in 10**8 runs
N_DRAWS = 100_000

LOGITS = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -1.0, -math.inf])


@st.composite
def row_cases(draw, vocab):
    """One row: logits with some finite one, and the arguments of a draw."""
    logits = draw(st.lists(LOGITS, min_size=vocab, max_size=vocab))
    assume(max(logits) > -math.inf)
    return logits, {
        "temperature": draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.3, 1.0, 2.0, 100.0])),
        "top_k": draw(st.sampled_from([-1, 0, 1, 2, 3, 7, 10**9])),
        "top_p": draw(st.sampled_from([1e-9, 0.1, 0.5, 0.8, 0.95, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "position": draw(st.integers(0, 2**20)),
    }


@st.composite
def batch_cases(draw):
    vocab = draw(st.integers(2, 20))
    return draw(st.lists(row_cases(vocab), min_size=1, max_size=4))


def sample_cases(cases):
    names = {"seeds": "seed", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    return sample_tokens(
        torch.tensor([logits for logits, _ in cases]),
        torch.tensor([arguments["position"] for _, arguments in cases]),
        **{ours: [arguments[theirs] for _, arguments in cases] for ours, theirs in names.items()},
    ).tolist()


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def pack(allowed):
    """Pack bool[B,V] lowest bit first, by numpy's own packing."""
    padded = np.zeros((allowed.shape[0], (allowed.shape[1] + 31) // 32 * 32), bool)
    padded[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())


def test_noise_matches_published_vectors():
    """Hash and noise of seed 42 are those of the engine that the noise comes from."""
    seed, columns = torch.tensor([42, 42]), torch.arange(4)
    hashes = hash_columns(seed, torch.tensor([10, 11]), columns)
    assert hashes.tolist() == [
        [1048545926, 3546308741, 3704516605, 1923181660],
        [2568551998, 75424980, 3806322901, 2735251251],
    ]
    noise = gumbel_noise(seed[:1], torch.tensor([10]), columns)
    expected = f64(-0.343618, 1.652676, 1.911279, 0.218824)[None]
    torch.testing.assert_close(noise, expected, rtol=0, atol=5e-7)
    picked = choose(f64(0.5, 0.25, 0.15, 0.1).expand(2, 4), seed, torch.tensor([10, 11]))
    assert picked.tolist() == [1, 2]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1)), max_size=4), st.integers(1, 19))
@SOME
def test_noise_is_a_function_of_seed_position_and_column(rows, n_columns):
    """Each number is the hash of its own three inputs, in any shape of call."""
    seed, position = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).unbind(1)
    columns = torch.arange(n_columns) * 1_000_003
    hashes, noise = hash_columns(seed, position, columns), gumbel_noise(seed, position, columns)
    assert noise.isfinite().all()
    for at, (s, p) in enumerate(rows):
        for column in range(n_columns):
            words = (s & 0xFFFFFFFF, s >> 32 & 0xFFFFFFFF, p, column * 1_000_003)
            assert hashes[at, column] == murmur_hash(words)
            assert noise[at, column].item() == pytest.approx(oracle_noise(*(s, p, words[3])), rel=1e-12)
    shuffled = torch.randperm(n_columns, generator=torch.Generator().manual_seed(1))
    by_row = columns[shuffled].expand(len(rows), n_columns)
    assert torch.equal(gumbel_noise(seed, position, by_row), noise[:, shuffled])


@pytest.mark.parametrize(
    ("seed", "column", "hashed", "noise"), [(2054, 1473153, 0, -709.7827), (1031, 159219, 2**32 - 1, 22.18071)]
)
def test_noise_is_finite_at_both_ends_of_the_hash(seed, column, hashed, noise):
    """The smallest and the largest hash, found by running the hash backwards, give finite noise."""
    arguments = torch.tensor([seed]), torch.tensor([0]), torch.tensor([column])
    assert hash_columns(*arguments).item() == hashed
    assert gumbel_noise(*arguments).item() == pytest.approx(noise, rel=1e-6)


@given(st.integers(1, 70), st.integers(1, 3), st.randoms(use_true_random=False))
@SOME
def test_mask_unpacks_what_was_packed(vocab, n_rows, random):
    """Bits come back lowest first; disallowed logits become minus infinity and the others keep their bits."""
    allowed = np.array([[random.random() < 0.5 for _ in range(vocab)] for _ in range(n_rows)])
    allowed[:, random.randrange(vocab)] = True
    packed = pack(allowed)
    assert np.array_equal(unpack_mask(packed, vocab).numpy(), allowed)
    logits = torch.arange(n_rows * vocab, dtype=torch.float32).view(n_rows, vocab) - 7
    masked = apply_mask(logits, packed)
    assert torch.equal(masked, logits.masked_fill(~torch.from_numpy(allowed), -math.inf))


def test_mask_outranks_the_other_bans():
    """Where a mask leaves only banned tokens, its lowest one is chosen; an empty mask leaves id 0."""
    allowed = np.zeros((2, 40), bool)
    allowed[0, [35, 37]] = True
    logits = torch.full((2, 40), 3.0)
    logits[0, [35, 37]] = -math.inf
    masked = apply_mask(logits, pack(allowed))
    assert pick_greedy(masked).tolist() == [35, 0]
    parameters = {"temperature": [1.0] * 2, "top_k": [5] * 2, "top_p": [0.9] * 2, "min_p": [0.1] * 2}
    for seed in range(20):
        assert sample_tokens(masked, torch.tensor([3, 4]), seeds=[seed] * 2, **parameters).tolist() == [35, 0]


def test_bias_cannot_bring_a_banned_token_back():
    """Bias adds to its own pairs only, and minus infinity stays."""
    logits = ban_tokens(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([1, 2]))
    rows, ids = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])
    biased = apply_bias(logits, rows, ids, torch.tensor([100.0, -100.0, 0.5]))
    assert biased.tolist() == [[0.0, -math.inf, -100.0], [0.5, 0.0, -math.inf]]


@given(
    st.lists(st.tuples(st.floats(-30, 30, width=32), st.integers(0, 4), st.booleans()), min_size=1, max_size=9),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.25, 4),
)
@SOME
def test_penalties_equal_the_plain_formula(tokens, frequency, presence, repetition):
    """Additive penalties count the output; the repetition penalty also covers the prompt; unseen tokens keep theirs."""
    logits, counts, seen = zip(*tokens, strict=True)
    output = dict(enumerate(counts))
    both = {token: max(count, prompt) for (token, count), prompt in zip(output.items(), seen, strict=True)}
    expected = penalised_logits(logits, counts=output, frequency_penalty=frequency, presence_penalty=presence)
    expected = penalised_logits(expected, counts=both, repetition_penalty=repetition)
    one = [torch.tensor([number], dtype=torch.float32) for number in (frequency, presence, repetition)]
    got = apply_penalties(torch.tensor([logits]), torch.tensor([counts], dtype=torch.int32), torch.tensor([seen]), *one)
    # The sign test of the repetition penalty is exact, but f32 may land on the other side of zero.
    assume(all(abs(x) > 1e-4 or x == 0 for x in expected))
    torch.testing.assert_close(got, torch.tensor([expected]), rtol=PENALTY_TOLERANCE, atol=PENALTY_TOLERANCE)
    unseen = torch.tensor([not (count or prompt) for _, count, prompt in tokens])
    assert torch.equal(got[0, unseen], torch.tensor(logits)[unseen])


@pytest.mark.parametrize("repetition", [1e-38, 1e38])
def test_extreme_penalties_stay_finite(repetition):
    """No penalty turns a finite logit into an infinity, and a banned one stays banned."""
    logits = torch.tensor([[3e38, 5.0, 0.0, -5.0, -3e38, -math.inf]])
    seen = torch.ones(1, 6, dtype=torch.bool)
    one = torch.ones(1)
    got = apply_penalties(logits, torch.ones(1, 6, dtype=torch.int32), seen, one, one, one * repetition)
    assert got[:, :5].isfinite().all()
    assert got[0, 5] == -math.inf


@pytest.mark.parametrize(
    ("probs", "top_k", "top_p", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0, 0.79, [0, 1]),
        ([0.05, 0.15, 0.3, 0.5], 0, 0.79, [2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 1, 0.79, [0]),
        ([0.5, 0.3, 0.15, 0.05], -1, 1.0, [0, 1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 10, 1e-9, [0]),
        ([0.25, 0.25, 0.25, 0.25], 3, 1.0, [0, 1, 2]),
        ([0.25, 0.25, 0.25, 0.25], 0, 0.25, [0, 1]),
        ([0.1, 0.4, 0.1, 0.4], 3, 1.0, [0, 1, 3]),
    ],
)
def test_truncation_keeps_the_stated_ranks(probs, top_k, top_p, kept):
    """A rank stays if it is below k and the mass strictly before it is at most p; equals rank by id."""
    out = truncate_ranks(f64(*probs)[None], torch.tensor([top_k]), f64(top_p), n_ranks=4)[0]
    assert out.nonzero().flatten().tolist() == kept
    assert out[kept].tolist() == [probs[token] for token in kept]


def test_temperature_comes_before_truncation():
    """Logits [3,2,1] at T = 0.5 and top_p = 0.8 keep the first token only; truncated first they would keep two."""
    kept = filter_distribution(torch.tensor([[3.0, 2.0, 1.0]]), f64(0.5), torch.tensor([0]), f64(0.8), f64(0))
    assert kept.nonzero().tolist() == [[0, 0]]


@given(batch_cases())
@SOME
def test_distribution_equals_the_plain_sampler(cases):
    """Kept tokens and their probabilities are those of the sequential sampler; rejected ones are exactly 0."""
    cases = [(logits, {**arguments, "temperature": arguments["temperature"] or 0.5}) for logits, arguments in cases]
    columns = {name: [arguments[name] for _, arguments in cases] for name in cases[0][1]}
    probs = filter_distribution(
        torch.tensor([logits for logits, _ in cases]),
        f64(*columns["temperature"]),
        torch.tensor(columns["top_k"]),
        f64(*columns["top_p"]),
        f64(*columns["min_p"]),
    )
    for row, (logits, arguments) in zip(probs, cases, strict=True):
        expected = oracle_draw(logits, **arguments)
        if expected.margin > MARGIN:
            kept = {token: math.exp(expected.logprobs[token]) for token in expected.kept}
            assert set(row.nonzero().flatten().tolist()) == set(kept)
            assert row[list(kept)].tolist() == pytest.approx(list(kept.values()), rel=1e-9)


@given(batch_cases())
@SOME
def test_sampled_tokens_equal_the_plain_sampler(cases):
    """Greedy, free and truncated rows mixed in one batch each choose what the sequential sampler chooses."""
    for got, (logits, arguments) in zip(sample_cases(cases), cases, strict=True):
        expected = oracle_draw(logits, **arguments)
        assert logits[got] > -math.inf
        if expected.margin > MARGIN or arguments["temperature"] == 0:
            assert got == expected.token_id


@given(batch_cases(), st.randoms(use_true_random=False))
@SOME
def test_rows_do_not_see_each_other(cases, random):
    """A row chooses the same token alone, in any place and beside any rows."""
    together = sample_cases(cases)
    assert together == [sample_cases([case])[0] for case in cases]
    order = random.sample(range(len(cases)), len(cases))
    assert sample_cases([cases[at] for at in order]) == [together[at] for at in order]


def test_mixed_limits_each_keep_their_own():
    """Greedy, small and huge top-k, top-p, min-p and free rows in one batch each draw what they draw alone."""
    logits = torch.linspace(1, 0, 20).tolist()
    limits = [{"temperature": 0.0}, {"top_k": 2}, {"top_k": 12}, {"top_k": 10**9}, {"top_p": 0.8}, {"min_p": 0.5}, {}]
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for position in range(40):
        cases = [(logits, {**plain, **limit, "seed": 3, "position": position}) for limit in limits]
        assert sample_cases(cases) == [oracle_draw(row, **arguments).token_id for row, arguments in cases]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("vocab", [5, 129, 1001, 129280])
def test_rows_keep_their_bits_in_any_batch(vocab, n_threads):
    """Probabilities and noise of a row are the same bits alone and in a batch, for any width and number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        n_rows = 5 if vocab < 10_000 else 2
        logits = torch.randn(n_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
        seeds, positions = torch.arange(n_rows) * 77, torch.arange(n_rows) + 3
        limits = (f64(0.3, 1, 1, 2, 1), torch.tensor([0, 3, 0, 50, 0]), f64(0.9, 1, 0.5, 1, 1), f64(0, 0, 0.01, 0, 0))
        limits = tuple(limit[:n_rows] for limit in limits)
        probs = filter_distribution(logits, *limits)
        noise = gumbel_noise(seeds, positions, torch.arange(vocab))
        chosen, top_ids, top_logprobs = token_logprobs(logits, pick_greedy(logits), 3)
        for row in range(n_rows):
            one = slice(row, row + 1)
            alone = filter_distribution(logits[one].clone(), *(limit[one] for limit in limits))
            assert torch.equal(alone, probs[one])
            assert torch.equal(gumbel_noise(seeds[one], positions[one], torch.arange(vocab)), noise[one])
            for single, batched in zip(
                token_logprobs(logits[one], pick_greedy(logits[one]), 3), (chosen, top_ids, top_logprobs), strict=True
            ):
                assert torch.equal(single, batched[one])
    finally:
        torch.set_num_threads(before)


@given(st.lists(st.lists(st.sampled_from([-2.0, 0.0, 1.5]), min_size=9, max_size=9), min_size=1, max_size=4))
@SOME
def test_greedy_takes_the_lowest_id_on_a_tie(rows):
    """The largest logit wins and the lowest id breaks a tie, beside stochastic rows too."""
    expected = [row.index(max(row)) for row in rows]
    assert pick_greedy(torch.tensor(rows)).tolist() == expected
    greedy = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.0, "seed": 1, "position": 2}
    mixed = [case for row in rows for case in ((row, greedy), (row, {**greedy, "temperature": 2.0}))]
    assert sample_cases(mixed)[::2] == expected
    assert sample_cases([(row, {**greedy, "temperature": 1.0, "top_k": 1}) for row in rows]) == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 0.3, 2.0, 100.0, 1e300])
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_any_temperature_stays_finite(temperature, scale):
    """Beside a banned token and with huge logits every temperature gives a distribution; tiny ones give the argmax."""
    row = [-1.0 * scale, 2.0 * scale, 1.9 * scale, -math.inf, -3.0 * scale]
    logits = torch.tensor([row])
    if temperature:
        probs = probs_from_logits(logits, f64(temperature))
        assert probs.isfinite().all()
        assert probs[0, 3] == 0
    case = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": 5}
    ids = sample_cases([(row, {**case, "seed": seed}) for seed in range(200)])
    assert 3 not in ids
    if temperature <= 1e-4:
        assert set(ids) == {1}


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_p": 0.8}, [1, 2, 4]),
        ({"min_p": 0.3}, [1, 4]),
        ({"temperature": 0.5, "top_k": 4, "top_p": 0.95, "min_p": 0.01}, [1, 2, 4]),
    ],
)
def test_frequencies_follow_the_distribution(limits, kept):
    """Over 10**5 positions rejected tokens never come and the others come as often as their probability says."""
    row = torch.tensor([0.1, 1.5, 0.5, -0.4, 2.0])
    case = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    ids = sample_tokens(
        row.expand(N_DRAWS, 5),
        torch.arange(N_DRAWS),
        seeds=[7] * N_DRAWS,
        **{name: [number] * N_DRAWS for name, number in case.items()},
    )
    probs = [math.exp(x / case["temperature"]) if token in kept else 0.0 for token, x in enumerate(row.tolist())]
    expected = f64(*probs) / sum(probs) * N_DRAWS
    counts = ids.bincount(minlength=5)
    assert [token for token in range(5) if counts[token]] == kept
    chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
    assert chi_square < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("rows", [[], [0, 1, 2], [2, 0, 1], [2, 0], [1]])
def test_chosen_rows_reach_their_operator_in_order(rows):
    """The operator sees the named rows in the order they are named, and the others stay."""
    addend = torch.tensor(rows)[:, None] * 10.0
    out = map_rows(torch.arange(3.0)[:, None], rows, lambda some: some + addend)
    assert out.flatten().tolist() == [row * 11.0 if row in rows else row for row in range(3)]


def test_different_seeds_give_different_streams():
    """Streams of different seeds, and successive positions of one, agree no more often than chance."""
    probs = torch.full((1, 100), 0.01, dtype=torch.float64).expand(4000, 100)
    positions = torch.arange(4000)
    one, other = (choose(probs, torch.full((4000,), seed), positions) for seed in (7, 8))
    assert (one == other).double().mean() < 0.02
    assert (one[1:] == one[:-1]).double().mean() < 0.02


def test_padding_tokens_are_no_tokens():
    """The width of the logits is the vocabulary: no id at or beyond it, and log-probabilities normalise over it."""
    logits = torch.full((50, 129), -5.0)
    cases = {"temperature": [100.0] * 50, "top_k": [10**9] * 50, "top_p": [1.0] * 50, "min_p": [0.0] * 50}
    assert sample_tokens(logits, torch.arange(50), seeds=range(50), **cases).max() < 129
    chosen, _, _ = token_logprobs(logits, torch.zeros(50, dtype=torch.int64), 0)
    torch.testing.assert_close(chosen, torch.full((50,), -math.log(129)))


def test_broken_rows_stay_in_the_vocabulary_and_alone():
    """A row of NaN, plus or minus infinity yields some id of the vocabulary and leaves its neighbours alone."""
    good = [0.3, 2.0, -1.0]
    case = {"top_p": 0.9, "min_p": 0.1, "seed": 3, "position": 4}
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
        arguments = {**case, "temperature": temperature, "top_k": top_k}
        rows = [good, [math.nan, 1.0, 2.0], good, [-math.inf] * 3, [math.inf, 0.0, 0.0], [1.0, math.nan, 2.0]]
        ids = sample_cases([(row, arguments) for row in rows])
        assert ids[0] == ids[2] == sample_cases([(good, arguments)])[0]
        assert ids[3] == 0
        assert all(0 <= token < 3 for token in ids)


def test_logprobs_are_the_models_own():
    """They equal a plain log-softmax; ties go by id; minus infinity and NaN stay in their row."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf], [0.0, 0.0, 0.0, 0.0], [math.nan, 0.0, 1.0, 2.0]])
    chosen, top_ids, top_logprobs = token_logprobs(logits, torch.tensor([3, 1, 1]), 4)
    total = math.log(math.e + 2 * math.e**3)
    assert chosen[0] == -math.inf
    assert top_ids[:2].tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    assert top_logprobs[0].tolist() == pytest.approx([3 - total, 3 - total, 1 - total, -math.inf], abs=1e-6)
    assert top_logprobs[1].tolist() == pytest.approx([-math.log(4)] * 4)
    assert chosen[:2].isnan().logical_not().all()
    assert chosen[2].isnan()
    assert [part.shape[1] for part in token_logprobs(logits, torch.tensor([0, 0, 0]), 0)[1:]] == [0, 0]


def test_operators_leave_their_inputs_alone():
    """No operator writes to what it is given, and an empty batch goes through."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    counts, seen, one = torch.ones(3, 40, dtype=torch.int32), torch.ones(3, 40, dtype=torch.bool), torch.ones(3)
    words = torch.full((3, 2), 0x0F0F0F0F, dtype=torch.int32)
    pair = torch.tensor([0, 1])
    inputs = [counts, seen, one, words, pair]
    saved = [x.clone() for x in inputs]
    apply_penalties(logits, counts, seen, one, one, one * 2)
    apply_mask(logits, words)
    apply_bias(logits, pair, pair, torch.ones(2))
    ban_tokens(logits, pair, pair)
    map_rows(logits, [1], lambda row: row + 1)
    filter_distribution(logits, one.double(), torch.tensor([1, 2, 0]), one.double() / 2, one.double() / 4)
    some = {"temperature": [1] * 3, "top_k": [3, 0, 1], "top_p": [1] * 3, "min_p": [0, 0.1, 0]}
    sample_tokens(logits, torch.arange(3), seeds=[1] * 3, **some)
    token_logprobs(logits, torch.arange(3), 4)
    assert torch.equal(logits, kept)
    assert all(torch.equal(x, y) for x, y in zip(inputs, saved, strict=True))
    nothing = {"seeds": [], "temperature": [], "top_k": [], "top_p": [], "min_p": []}
    assert sample_tokens(logits[:0], torch.arange(0), **nothing).shape == (0,)
