"""Who runs in the next step, as a pure function: no clock, no model, no device.

``schedule`` takes what has happened since the last step (events) and what the pools hold (a view), and returns the
next scheduler state and a plan: which requests are fed how many tokens. A view is a value too: opening, closing or
retracting a request gives another view, so the scheduler finds out whether a step fits by asking for it.

Policy
    Every running request decodes one token a step; what is left of the step's token budget goes to prompts, to each at
    most half of what is left (but at least 128 tokens). The oldest comes first, so that every prompt moves on in its
    turn; then those with at most 128 tokens to go, so that long ones, however many, keep no short one waiting; then
    the others; each kind in order of arrival. A request that waits may be passed by about ``MOST_PASSES`` later ones
    (those of one step count together, so by fewer than ``MOST_PASSES + running``); then nobody is admitted before it.
    When pages run out, points of reuse go first, least recently used first; then requests are retracted, those with the
    fewest outputs first, among equals the longest prompt (decode-path sheet 1.6), and wait at their place in order of
    arrival.

    Points of reuse are held where a prompt ends, where it parts from another one that is known (running, waiting or
    held), and where a reply has got to. A request whose prefix is just being fed for another one waits for that point
    instead of feeding it again, so of many requests that begin alike one feeds the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypeAlias

import attrs

__all__ = [
    "UNIT",
    "Arrived",
    "Cancelled",
    "Event",
    "Job",
    "Limits",
    "Plan",
    "Point",
    "Progress",
    "SchedulerState",
    "Stepped",
    "View",
    "schedule",
]

MOST_PASSES: Final = 16
"""Later requests that may be admitted before one that does not fit yet."""

UNIT: Final = 128
"""Prompt tokens are fed in multiples of this, but for the last ones."""


@attrs.frozen(kw_only=True)
class Limits:
    """What the scheduler may do.

    Attributes:
        running: requests that may own rows at once.
        budget: tokens that a step feeds at most; at least ``running + 128``.
        points: points of reuse that may be held; 0 switches reuse off.
        unit: tokens between points of reuse.
    """

    running: int
    budget: int
    points: int
    unit: int


@attrs.frozen(eq=False, kw_only=True)
class Job:
    """One request as the scheduler knows it.

    Attributes:
        key: the server's number of it, in order of arrival.
        prompt: its tokens.
        n_passed: later requests that were admitted before it.
        may_reuse: whether it may begin on a prefix of another request.
        n_cached: prompt tokens that were taken over from a point of reuse.
        is_open: whether the pools know it; it is so from its admission on, also while it waits after a retraction.
    """

    key: int
    prompt: tuple[int, ...]
    may_reuse: bool = True
    n_passed: int = 0
    n_cached: int = 0
    is_open: bool = False


@attrs.frozen(eq=False, kw_only=True)
class Point:
    """A prefix that is held for reuse.

    Attributes:
        key: the pools' name of it.
        ids: its tokens, which alone decide who may use it.
        used: when it was used last, in steps.
        reply_of: whose reply it ends in, until another request uses it; that job holds one such point, its last.
    """

    key: int
    ids: tuple[int, ...]
    used: int
    reply_of: int | None = None


@attrs.frozen(eq=False, kw_only=True)
class SchedulerState:
    """Everything that the scheduler remembers.

    Attributes:
        limits: what it may do.
        running: jobs that own rows, in order of arrival.
        waiting: jobs that do not, in order of arrival.
        points: held prefixes.
        next_point: key of the next point; points have negative keys.
        steps: steps planned so far.
        n_retracted: retractions so far.
    """

    limits: Limits
    running: tuple[Job, ...] = ()
    waiting: tuple[Job, ...] = ()
    points: tuple[Point, ...] = ()
    next_point: int = -1
    steps: int = 0
    n_retracted: int = 0


@attrs.frozen(eq=False, kw_only=True)
class Arrived:
    """A request has come; ``key`` grows from one to the next."""

    key: int
    prompt: tuple[int, ...]
    may_reuse: bool = True


@attrs.frozen(kw_only=True)
class Cancelled:
    """A request is not wanted any more; one that is unknown or over already is left alone."""

    key: int


@attrs.frozen(kw_only=True)
class Stepped:
    """A step has been made; these requests ended in it."""

    finished: tuple[int, ...]


Event: TypeAlias = Arrived | Cancelled | Stepped


@attrs.frozen(kw_only=True)
class Progress:
    """How far a request is.

    Attributes:
        n_tokens: its tokens.
        n_cached: those of them that are in the caches.
        n_outputs: those of them that were sampled.
    """

    n_tokens: int
    n_cached: int
    n_outputs: int


Rows: TypeAlias = tuple[tuple[int, int], ...]
"""(key, tokens to feed at most) of every row of a step."""


class View(Protocol):
    """The pools as a value; every change returns another view and leaves this one as it was."""

    def open(self, key: int, prompt: Sequence[int], point: int | None) -> Self | None:
        """Give a request a row and its prompt, on a point of reuse if one is named; None where there is no row."""

    def close(self, key: int) -> Self:
        """Give back everything that a request or a point holds."""

    def retract(self, key: int) -> Self:
        """Give back everything but a request's tokens."""

    def keep(self, point: int, key: int, n: int) -> Self | None:
        """Hold a request's first n tokens as a point; None where that takes a recomputation or there is no room."""

    def fits(self, rows: Rows) -> bool:
        """Tell whether a step of these rows finds rows and pages."""

    def progress(self, key: int) -> Progress:
        """Tell how far a request is."""

    def tokens(self, key: int, n: int) -> tuple[int, ...]:
        """Return the first n tokens of a request."""


@attrs.frozen(eq=False, kw_only=True)
class Plan:
    """What is to be done next.

    Attributes:
        view: the pools after everything but the step itself.
        rows: (key, tokens to feed at most) of the step; nothing runs without rows.
        cancelled: jobs that ended because they were cancelled.
        failed: jobs that do not fit even alone.
    """

    view: Any
    rows: Rows
    cancelled: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


def schedule(state: SchedulerState, events: Sequence[Event], view: View) -> tuple[SchedulerState, Plan]:
    """Plan the next step.

    Args:
        state: after the last plan.
        events: what has happened since, in order.
        view: the pools after the step of the last plan.
    Returns:
        (state, plan).
    """
    state, view, cancelled = _take_in(state, events, view)
    progress = {job.key: view.progress(job.key) for job in state.running}
    state, view = _keep_points(state, view, progress)
    failed: list[int] = []
    while True:
        state, view, decodes, hopeless = _make_room(state, view, progress)
        failed += hopeless
        state, view, rows = _add_prompts(state, view, decodes)
        if rows or not (state.running or state.waiting):
            break
        state, view, hopeless = _give_way(state, view)
        failed += hopeless
    state = attrs.evolve(state, steps=state.steps + 1)
    return state, Plan(view=view, rows=rows, cancelled=cancelled, failed=tuple(failed))


def _give_way(state: SchedulerState, view: View) -> tuple[SchedulerState, View, tuple[int, ...]]:
    """Free something where nothing can run: a point, else the youngest running job, else give the last one up."""
    if state.points:
        return *_drop_point(state, view), ()
    if len(state.running) > 1:
        youngest = state.running[-1]
        return _wait(state, youngest), view.retract(youngest.key), ()
    job = (*state.running, *state.waiting)[0]
    view = view.close(job.key) if job.is_open else view
    running, waiting = (tuple(one for one in jobs if one is not job) for jobs in (state.running, state.waiting))
    return attrs.evolve(state, running=running, waiting=waiting), view, (job.key,)


def _take_in(
    state: SchedulerState, events: Sequence[Event], view: View
) -> tuple[SchedulerState, View, tuple[int, ...]]:
    """Apply what has happened: new jobs wait, jobs that are over or unwanted give back what they hold."""
    cancelled: list[int] = []
    for event in events:
        if isinstance(event, Arrived):
            job = Job(key=event.key, prompt=event.prompt, may_reuse=event.may_reuse)
            state = attrs.evolve(state, waiting=(*state.waiting, job))
            continue
        gone = event.finished if isinstance(event, Stepped) else (event.key,)
        for job in (*state.running, *state.waiting):
            if job.key not in gone:
                continue
            if isinstance(event, Stepped):
                state, view = _keep_last(state, view, job)
            else:
                cancelled.append(job.key)
            view = view.close(job.key) if job.is_open else view
        running, waiting = (
            tuple(job for job in jobs if job.key not in gone) for jobs in (state.running, state.waiting)
        )
        state = attrs.evolve(state, running=running, waiting=waiting)
    return state, view, tuple(cancelled)


def _keep_last(state: SchedulerState, view: View, job: Job) -> tuple[SchedulerState, View]:
    """Hold the last point of reuse of a request that has ended, its outputs included."""
    n = view.progress(job.key).n_cached // state.limits.unit * state.limits.unit
    return _keep(state, view, job, n)


def _keep_points(state: SchedulerState, view: View, progress: Mapping[int, Progress]) -> tuple[SchedulerState, View]:
    """Hold the points of every prompt, and then of its reply, that has just come to one.

    A reply's points are held while it goes on, because its end may be where their window pages are gone already.
    """
    for job in state.running:
        n = progress[job.key].n_cached
        if n % state.limits.unit == 0 and (n >= _last_point(state, job) or n in _partings(state, job)):
            state, view = _keep(state, view, job, n)
    return state, view


def _partings(state: SchedulerState, job: Job) -> set[int]:
    """Find where a prompt's points come to lie before its last one: where it parts from others that are known."""
    if not state.limits.points:
        return set()
    prompts = (other.prompt for other in (*state.running, *state.waiting) if other is not job)
    return {_shared(state, job, ids) for ids in (*prompts, *(point.ids for point in state.points))} - {0}


def _shared(state: SchedulerState, job: Job, ids: Sequence[int]) -> int:
    """Return the last point of a prompt up to which these ids are the same."""
    unit, n = state.limits.unit, 0
    most = min(_last_point(state, job), len(ids))
    while n + unit <= most and job.prompt[n : n + unit] == ids[n : n + unit]:
        n += unit
    return n


def _is_on_its_way(state: SchedulerState, view: View, job: Job) -> bool:
    """Tell whether a longer prefix than any held one is being fed for another job, and will be held."""
    if job.is_open or not job.may_reuse or not state.limits.points or job.n_passed >= MOST_PASSES:
        return False
    point = _longest_point(state, job)
    n_held = 0 if point is None else len(point.ids)
    shared = ((other, _shared(state, job, other.prompt)) for other in state.running)
    return any(n > n_held and view.progress(other.key).n_cached < n for other, n in shared)


def _last_point(state: SchedulerState, job: Job) -> int:
    """Return the last multiple of the unit before the prompt's last token, which a repeated prompt must feed anew."""
    return (len(job.prompt) - 1) // state.limits.unit * state.limits.unit


def _keep(state: SchedulerState, view: View, job: Job, n: int) -> tuple[SchedulerState, View]:
    if not n or not state.limits.points:
        return state, view
    ids = view.tokens(job.key, n)
    if any(point.ids == ids for point in state.points):
        return state, view
    reply_of = job.key if n > _last_point(state, job) else None
    for earlier in state.points:
        if reply_of is not None and earlier.reply_of == reply_of:
            state, view = _drop(state, view, earlier)
    if len(state.points) >= state.limits.points:
        state, view = _drop_point(state, view)
    kept = view.keep(state.next_point, job.key, n)
    if kept is None:
        return state, view
    point = Point(key=state.next_point, ids=ids, used=state.steps, reply_of=reply_of)
    return attrs.evolve(state, points=(*state.points, point), next_point=state.next_point - 1), kept


def _drop_point(state: SchedulerState, view: View) -> tuple[SchedulerState, View]:
    """Give up the point that was used least recently."""
    return _drop(state, view, min(state.points, key=lambda point: (point.used, -point.key)))


def _drop(state: SchedulerState, view: View, point: Point) -> tuple[SchedulerState, View]:
    points = tuple(other for other in state.points if other is not point)
    return attrs.evolve(state, points=points), view.close(point.key)


def _make_room(
    state: SchedulerState, view: View, progress: Mapping[int, Progress]
) -> tuple[SchedulerState, View, Rows, tuple[int, ...]]:
    """Choose the rows that decode; points and then requests give way until their step fits.

    How far the running jobs are is given, since nothing that happens here changes it for those that go on running.
    """
    failed: list[int] = []
    while True:
        decodes = tuple([(job.key, UNIT) for job in state.running if _is_decoding(progress[job.key])])
        if view.fits(decodes):
            return state, view, decodes, tuple(failed)
        if state.points:
            state, view = _drop_point(state, view)
            continue
        # A prompt that is being fed holds pages as well, and has no outputs yet, so it goes before those that decode.
        victim = min(state.running, key=lambda job: (progress[job.key].n_outputs, -len(job.prompt)))
        if len(state.running) == 1:
            failed.append(victim.key)
            state, view = attrs.evolve(state, running=()), view.close(victim.key)
        else:
            state, view = _wait(state, victim), view.retract(victim.key)


def _is_decoding(progress: Progress) -> bool:
    return progress.n_tokens - progress.n_cached == 1 and progress.n_outputs > 0


def _wait(state: SchedulerState, job: Job) -> SchedulerState:
    """Send a running job back to its place among those that wait."""
    return attrs.evolve(
        state,
        running=tuple(other for other in state.running if other is not job),
        waiting=tuple(sorted((*state.waiting, job), key=lambda other: other.key)),
        n_retracted=state.n_retracted + 1,
    )


def _add_prompts(state: SchedulerState, view: View, rows: Rows) -> tuple[SchedulerState, View, Rows]:
    """Spend what is left of the budget on prompts, and admit jobs for that."""
    left, may_admit = state.limits.budget - len(rows), True
    for key in _prompts(state, view, {key for key, _ in rows}):
        if left <= 0:
            break
        job = next(job for job in (*state.running, *state.waiting) if job.key == key)
        is_waiting = job in state.waiting
        if is_waiting and not (may_admit and len(state.running) < state.limits.running):
            continue
        if is_waiting and _is_on_its_way(state, view, job):
            continue
        found = _feed(state, view, job, rows, left)
        if found is not None:
            state, view, rows, spent = found
            left -= spent
        elif not is_waiting or job.n_passed >= MOST_PASSES:
            may_admit = False  # later ones would take the pages that it waits for
    return state, view, rows


def _prompts(state: SchedulerState, view: View, decoding: set[int]) -> list[int]:
    """Order the keys of jobs with a prompt to be fed: the oldest and those passed too often, short ones, the others."""
    jobs = sorted((job for job in (*state.running, *state.waiting) if job.key not in decoding), key=lambda job: job.key)

    def rank(job: Job) -> int:
        if job is jobs[0] or job.n_passed >= MOST_PASSES:
            return 0
        progress = view.progress(job.key) if job.is_open else None
        n_unfed = len(job.prompt) if progress is None else progress.n_tokens - progress.n_cached
        return 1 if n_unfed <= UNIT else 2

    return [job.key for job in sorted(jobs, key=rank)]


def _feed(
    state: SchedulerState, view: View, job: Job, rows: Rows, left: int
) -> tuple[SchedulerState, View, Rows, int] | None:
    """Add a prompt's next tokens to a step: (state, view, rows, tokens spent), or None where that does not fit."""
    if not job.is_open:
        found = _open(state, view, job)
        if found is None:
            return None
        opened, state, view = found
    else:
        opened = job
    progress = view.progress(job.key)
    n_unfed = progress.n_tokens - progress.n_cached
    most = min(left, max(UNIT, left // 2 // UNIT * UNIT))
    if n_unfed > most and left < UNIT:
        return None
    limit = min(n_unfed, most)
    if state.limits.points:  # stop where a point can be held
        stops = [n - progress.n_cached for n in (_last_point(state, opened), *_partings(state, opened))]
        limit = min([limit, *(n for n in stops if n > 0)])
    row = (job.key, max(limit, UNIT))
    if not view.fits((*rows, row)):
        return None
    passed = [attrs.evolve(o, n_passed=o.n_passed + (o.key < job.key)) for o in state.waiting if o.key != job.key]
    running = tuple(opened if other.key == job.key else other for other in state.running)
    if all(other.key != job.key for other in running):
        running = tuple(sorted((*running, opened), key=lambda other: other.key))
        state = attrs.evolve(state, waiting=tuple(passed))
    return attrs.evolve(state, running=running), view, (*rows, row), limit


def _open(state: SchedulerState, view: View, job: Job) -> tuple[Job, SchedulerState, View] | None:
    """Admit a job on top of the longest held prefix of its prompt."""
    point = _longest_point(state, job)
    opened = view.open(job.key, job.prompt, None if point is None else point.key)
    if opened is None:
        return None
    if point is not None:
        renewed = attrs.evolve(point, used=state.steps, reply_of=None)
        state = attrs.evolve(state, points=tuple(renewed if one is point else one for one in state.points))
    n_cached = 0 if point is None else len(point.ids)
    return attrs.evolve(job, is_open=True, n_cached=n_cached), state, opened


def _longest_point(state: SchedulerState, job: Job) -> Point | None:
    """Find the longest held prefix that a prompt begins with and does not end with."""
    points = state.points if job.may_reuse else ()
    usable = [one for one in points if len(one.ids) < len(job.prompt) and job.prompt[: len(one.ids)] == one.ids]
    return max(usable, key=lambda one: len(one.ids), default=None)
