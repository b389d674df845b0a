"""The scheduler over real pools and no model: everything ends, once, in bounded time, and nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import purestep as ps
from hypothesis import event, given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.steps import examples, ids_of
from purestep.serving.pool import Pool
from purestep.serving.scheduler import (
    MOST_PASSES,
    Arrived,
    Cancelled,
    Job,
    Limits,
    Plan,
    SchedulerState,
    Stepped,
    schedule,
)
from purestep.state.sampling import observe_outputs
from torch import full

MODEL = tiny_model((4, 128), window=16)
PAGE = 8


@attrs.define
class Wish:
    """A request of a test.

    Attributes:
        prompt: its tokens.
        n_new: tokens that it samples.
        arrives: turn in which it comes.
        cancelled: turns after that in which it is not wanted any more, or None; said twice.
    """

    prompt: tuple[int, ...]
    n_new: int
    arrives: int
    cancelled: int | None = None


def stepped(pool: Pool, plan: Plan) -> tuple[Pool, tuple[int, ...]]:
    """Make the step of a plan without its forward, every row that may sample samples token 5: (pool, finished keys)."""
    if not plan.rows:
        return pool, ()
    state, batch = ps.prepare_extend(pool.state, pool.chunks(plan.rows), limit=pool.limits(plan.rows))
    ids = full((len(batch.sample_ids),), 5)
    state = attrs.evolve(state, sampling=observe_outputs(state.sampling, batch.sample_ids, ids))
    state, finished = ps.commit(ps.relay(state, batch, ids), ids)
    keys = {request: key for key, request in pool.ids.items()}
    return pool.stepped(state, plan.rows), tuple(keys[request] for request in finished)


@attrs.define
class Outcome:
    """What a run of the scheduler led to: how each request ended and when, and what was left."""

    ends: dict[int, str]
    turns: dict[int, int]
    pool: Pool
    state: SchedulerState
    cached: dict[int, int]
    admitted: dict[int, int]


def require_order_of_retraction(before: SchedulerState, pool: Pool, after: SchedulerState, plan: Plan) -> None:
    """Decode-path 1.6: who gives way for those that decode has the fewest outputs, among equals the longest prompt."""
    stayed = [job for job in before.running if any(job.key == other.key for other in after.running)]
    gone = [job for job in before.running if any(job.key == other.key for other in after.waiting)]
    if gone:
        assert not after.points, "points of reuse go first"
    if any(plan.view.progress(key).n_outputs for key, _ in plan.rows):

        def worth(job: Job) -> tuple[int, int]:
            return pool.progress(job.key).n_outputs, -len(job.prompt)

        assert all(worth(one) <= worth(other) for one in gone for other in stayed)


def require_fairness(out: Outcome, wishes: Sequence[Wish], running: int) -> None:
    """Nobody is passed by more than the stated number, nor waits longer than the work admitted before it takes."""
    for key, turn in out.admitted.items():
        earlier = {other for other, at in out.admitted.items() if at < turn}
        assert sum(other > key for other in earlier) < MOST_PASSES + running
        work = [
            -(-len(wishes[other].prompt) // 128) + 1 + wishes[other].n_new
            for other in earlier
            if out.turns[other] >= wishes[key].arrives
        ]
        assert out.state.n_retracted or turn - wishes[key].arrives <= sum(work)


def run(wishes: Sequence[Wish], capacity: ps.Capacity, limits: Limits, most_turns: int = 4000) -> Outcome:
    """Let requests come and go until all have ended, checking every promise on the way."""
    state, turn, events = SchedulerState(limits=limits), 0, []
    pool = Pool(state=ps.init_state(MODEL, capacity, page_size=PAGE))
    params = {
        key: ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=wish.n_new)
        for key, wish in enumerate(wishes)
    }
    pool = attrs.evolve(pool, params=params)
    out = Outcome({}, {}, pool, state, {}, {})
    while len(out.ends) < len(wishes):
        assert turn < most_turns, f"no end after {turn} turns: {sorted(out.ends)}"
        for key, wish in enumerate(wishes):
            if wish.arrives == turn:
                events.append(Arrived(key=key, prompt=wish.prompt))
            if wish.cancelled is not None and turn == wish.arrives + wish.cancelled:
                events += [Cancelled(key=key), Cancelled(key=key)]
        before = (state, pool.state)
        again = schedule(state, events, pool)
        state, plan = schedule(state, events, pool)
        assert (again[1].rows, again[1].cancelled, again[1].failed) == (plan.rows, plan.cancelled, plan.failed)
        assert before[1] is pool.state
        assert len(state.running) <= limits.running
        assert len(state.points) <= limits.points
        assert plan.rows or not (state.running or state.waiting), "some step is made as long as somebody waits"
        require_order_of_retraction(before[0], pool, state, plan)
        events = []
        for job in state.running:
            out.cached.setdefault(job.key, job.n_cached)
            out.admitted.setdefault(job.key, turn)
        for reason, keys in (("cancelled", plan.cancelled), ("failed", plan.failed)):
            for key in keys:
                assert key not in out.ends, f"{key} ended twice"
                out.ends[key], out.turns[key] = reason, turn
        assert sum(min(pool_need(plan, key), most) for key, most in plan.rows) <= limits.budget
        pool, finished = stepped(plan.view, plan)
        assert ps.invariants.check(pool.state) == ()
        for key in finished:
            assert key not in out.ends, f"{key} ended twice"
            out.ends[key], out.turns[key] = "finished", turn
        events.append(Stepped(finished=finished))
        turn += 1
    state, plan = schedule(state, events, pool)
    assert not state.running
    assert not state.waiting
    assert not plan.rows
    out.pool, out.state = plan.view, state
    require_fairness(out, wishes, limits.running)
    return out


def pool_need(plan: Plan, key: int) -> int:
    progress = plan.view.progress(key)
    return progress.n_tokens - progress.n_cached


def require_nothing_left(out: Outcome, capacity: ps.Capacity) -> None:
    """Every page is free or held by a point; without the points every page is free."""
    pool = out.pool
    assert set(pool.ids) == {point.key for point in out.state.points}
    for key in list(pool.ids):
        pool = pool.close(key)
    table, empty = pool.state.table, ps.init_state(MODEL, capacity, page_size=PAGE).table
    for name in ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages"):
        assert len(getattr(table, name)) == len(getattr(empty, name))


LENGTHS = (1, 5, 100, 128, 129, 140, 257, 400)
TEXTS = tuple(tuple(ids_of(600, seed=seed)) for seed in range(3))


@st.composite
def wishes(draw: st.DrawFn, longest: int = 400) -> list[Wish]:
    """Draw requests in order of arrival, some of them with a common prefix, some cancelled."""

    def prompt() -> tuple[int, ...]:
        beginning, rest = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(TEXTS))
        parting, length = draw(st.sampled_from((0, 140, 256))), draw(st.sampled_from(LENGTHS))
        return (beginning[:parting] + rest[parting:])[: min(length, longest)]

    asked = [
        Wish(
            prompt=prompt(),
            n_new=draw(st.integers(1, 40)),
            arrives=draw(st.integers(0, 12)),
            cancelled=draw(st.none() | st.none() | st.none() | st.integers(0, 25)),
        )
        for _ in range(draw(st.integers(1, 9)))
    ]
    return sorted(asked, key=lambda wish: wish.arrives)


@examples(25)
@given(
    asked=wishes(),
    tokens=st.sampled_from((440, 440, 520, 4000)),
    running=st.sampled_from((4, 3, 2, 1)),
    budget=st.sampled_from((140, 256, 512)),
    points=st.sampled_from((0, 2)),
)
def test_everything_ends_once_and_nothing_leaks(
    asked: list[Wish], tokens: int, running: int, budget: int, points: int
) -> None:
    """Progress, exactly one end for each request, no leak, with and without pressure, reuse and cancelling."""
    capacity = ps.Capacity(running + points, tokens, 440)
    out = run(asked, capacity, Limits(running=running, budget=budget, points=points, unit=128))
    event(f"retracted: {out.state.n_retracted > 0}, reused: {any(out.cached.values())}")
    for key, wish in enumerate(asked):
        assert out.ends[key] in ("finished", "cancelled")
        assert wish.cancelled is not None or out.ends[key] == "finished"
    require_nothing_left(out, capacity)


def test_small_requests_pass_a_long_prompt() -> None:
    """No head-of-line blocking: short requests that come behind a long prompt end long before it."""
    asked = [Wish(TEXTS[0][:400], 2, 0), *(Wish((7, 8, 9), 2, 1) for _ in range(3))]
    out = run(asked, ps.Capacity(4, 4000, 440), Limits(running=4, budget=160, points=0, unit=128))
    assert max(out.turns[key] for key in (1, 2, 3)) < out.turns[0]


@examples(12)
@given(
    lengths=st.lists(st.integers(257, 400), min_size=1, max_size=5),
    n_small=st.integers(1, 128),
    arrives=st.integers(0, 4),
    budget=st.sampled_from((264, 320, 512)),
)
def test_long_prompts_however_many_keep_no_short_one_waiting(
    lengths: list[int], n_small: int, arrives: int, budget: int
) -> None:
    """A prompt of one unit is fed whole in the step in which it comes, beside any number of long ones before it."""
    asked = [*(Wish(TEXTS[0][:n], 3, 0) for n in lengths), Wish(TEXTS[1][:n_small], 1, arrives)]
    out = run(asked, ps.Capacity(6, 4000, 440), Limits(running=6, budget=budget, points=0, unit=128))
    assert out.turns[len(lengths)] == arrives


@examples(3)
@given(n_small=st.integers(40, 60), n_new=st.integers(8, 12))
def test_large_requests_do_not_starve(n_small: int, n_new: int) -> None:
    """A request that finds no room beside a stream of small ones is passed by a bounded number of them, then runs."""
    small = [Wish((i % 30 + 2,) * 60, n_new, i) for i in range(n_small)]
    asked = [*small[:9], Wish(TEXTS[0][:400], 3, 8), *small[9:]]
    out = run(asked, ps.Capacity(8, 440, 440), Limits(running=8, budget=512, points=0, unit=128))
    assert 0 < sum(out.admitted[key] < out.admitted[9] for key in range(10, len(asked))) < MOST_PASSES + 8


def test_a_request_that_never_fits_fails_and_the_next_is_served() -> None:
    """KVA-03: what does not fit even alone fails at once, and the next small request runs."""
    asked = [Wish(TEXTS[0][:100], 3, 0), Wish((1, 2, 3), 2, 0)]
    out = run(asked, ps.Capacity(3, 64, 200), Limits(running=3, budget=256, points=0, unit=128))
    assert out.ends == {0: "failed", 1: "finished"}


def test_retraction_order() -> None:
    """Decode-path 1.6: when pages run out, the request with the fewest outputs goes first, among equals the longest."""
    asked = [Wish(TEXTS[0][:40], 60, 0), Wish(TEXTS[1][:56], 60, 0), Wish(TEXTS[2][:24], 60, 0)]
    out = run(asked, ps.Capacity(3, 200, 200), Limits(running=3, budget=512, points=0, unit=128))
    assert out.state.n_retracted > 0
    assert out.turns[1] > max(out.turns[0], out.turns[2])


def test_a_repeated_prompt_takes_over_its_prefix() -> None:
    """PFX-01, PFX-03: the second request takes over whole units, and counts say how many; 128 is the smallest."""
    for n, expected in ((400, 384), (129, 128), (128, 0), (5, 0)):
        asked = [Wish(TEXTS[0][:n], 2, 0), Wish(TEXTS[0][:n], 2, 40)]
        out = run(asked, ps.Capacity(4, 4000, 440), Limits(running=2, budget=512, points=2, unit=128))
        assert [out.cached[0], out.cached[1]] == [0, expected]


@examples(15)
@given(texts=st.lists(st.integers(0, 3), min_size=1, max_size=9), most=st.integers(1, 3))
def test_points_are_given_up_least_recently_used_first(texts: list[int], most: int) -> None:
    """A prompt is taken over exactly if its point is among the ones used last, as many as may be held."""
    asked = [Wish((text + 2,) * 200, 1, 4 * turn) for turn, text in enumerate(texts)]
    out = run(asked, ps.Capacity(2 + most, 4000, 440), Limits(running=2, budget=512, points=most, unit=128))
    recent: list[int] = []
    for key, text in enumerate(texts):
        assert out.cached[key] == (128 if text in recent else 0)
        recent = [*(one for one in recent if one != text), text][-most:]
    assert {point.ids[0] - 2 for point in out.state.points} == set(recent)


@examples(15)
@given(n=st.integers(1, 140), n_new=st.sampled_from((1, 30, 120, 128, 129, 200, 260)))
def test_a_whole_conversation_is_taken_over(n: int, n_new: int) -> None:
    """The last point of a request that has ended is held, wherever its reply ended, with the prompt's and no other."""
    prompt = TEXTS[0][:n]
    following = Wish((*prompt, *(5,) * n_new, 7), 1, n_new + 10)
    out = run(
        [Wish(prompt, n_new, 0), following],
        ps.Capacity(6, 4000, 440),
        Limits(running=2, budget=512, points=4, unit=128),
    )
    assert out.cached[1] == (n + n_new - 1) // 128 * 128
    lengths = (n - 1, n + n_new - 1, n + n_new, n + n_new + 1)
    assert {len(point.ids) for point in out.state.points} == {one // 128 * 128 for one in lengths} - {0}


def test_a_point_of_a_reply_that_others_use_stays() -> None:
    """A request gives up its reply's earlier point for a later one, but not where another has begun there meanwhile."""
    prompt = TEXTS[0][:100]
    other = Wish((*prompt, *(5,) * 28, 9, 9), 1, 40)
    late = Wish((*prompt, *(5,) * 28, 8), 1, 240)
    out = run(
        [Wish(prompt, 200, 0), other, late],
        ps.Capacity(8, 4000, 440),
        Limits(running=3, budget=512, points=4, unit=128),
    )
    assert (out.cached[1], out.cached[2]) == (128, 128)
