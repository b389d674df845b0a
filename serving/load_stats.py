"""What a load test found: one outcome for every request, and the figures of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
from rich.markup import escape
from rich.table import Table

__all__ = ["Outcome", "load_tables", "percentile", "summarise"]

LATENCIES: Final = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "end-to-end latency",
}
"""Short name in JSON -> what it is; ``itl`` is between pieces of text as they arrive, ``tpot`` a request's mean."""

RATES: Final = {
    "completed_requests": "requests completed",
    "failed_requests": "requests failed",
    "duration_s": "seconds",
    "input_tokens": "input tokens",
    "cached_tokens": "of these cached",
    "output_tokens": "output tokens",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
}
"""Name in JSON -> what people read."""

FIGURES: Final = ("mean", "p50", "p90", "p99")


@attrs.frozen(kw_only=True)
class Outcome:
    """How one request went; all times are seconds since the test began.

    Attributes:
        began: when it was sent.
        ended: when its stream ended, or it failed.
        texts: when its pieces of text came.
        text: all of it.
        input_tokens: of its prompt, as the server counts; None where it does not say.
        cached_tokens: of these, taken over from earlier requests; None where the server does not say.
        output_tokens: of its reply, as the server counts; else its pieces.
        failure: the kind of what went wrong; None where nothing did.
        detail: what exactly went wrong.
    """

    began: float
    ended: float
    texts: tuple[float, ...] = ()
    text: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    failure: str | None = None
    detail: str = ""

    def latencies(self) -> Iterator[tuple[str, float]]:
        """Yield (name, seconds) of everything that can be told of it."""
        yield "e2el", self.ended - self.began
        if self.texts:
            yield "ttft", self.texts[0] - self.began
            for before, after in zip(self.texts, self.texts[1:], strict=False):
                yield "itl", after - before
        if len(self.texts) > 1 and self.output_tokens > 1:
            yield "tpot", (self.texts[-1] - self.texts[0]) / (self.output_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which so many percent lie, on the straight line between the two next to it.

    Args:
        values: at least one.
        percent: 0 to 100.
    """
    return float(np.percentile(values, percent))


def summarise(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the figures of a test; latencies and rates are those of the requests that succeeded.

    A figure that nothing is known of is None.
    """
    found = list(outcomes)
    done = [one for one in found if one.failure is None]
    duration = max((one.ended for one in found), default=0.0) - min((one.began for one in found), default=0.0)
    output = sum(one.output_tokens for one in done)
    counted = {"input_tokens": _total(one.input_tokens for one in done), "output_tokens": output}
    counted["cached_tokens"] = _total(one.cached_tokens for one in done)
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for outcome in done:
        for name, seconds in outcome.latencies():
            values[name].append(seconds)
    return {
        "duration_s": duration,
        "completed_requests": len(done),
        "failed_requests": len(found) - len(done),
        "failures_by_kind": dict(Counter(one.failure for one in found if one.failure is not None)),
        **counted,
        "requests_per_s": len(done) / duration if duration else None,
        "output_tokens_per_s": output / duration if duration else None,
        **{f"{figure}_{name}_ms": _figure(figure, seconds) for name, seconds in values.items() for figure in FIGURES},
    }


def load_tables(found: Mapping[str, Any], outcomes: Iterable[Outcome]) -> Iterator[Table]:
    """Show counts and rates, latencies, and failures where there are any.

    Args:
        found: from ``summarise``.
        outcomes: that it is of.
    """
    rates = _table("Load", "what", "value")
    for name, words in RATES.items():
        rates.add_row(words, _shown(found[name]))
    yield rates
    latencies = _table("Latencies (ms)", "what", *FIGURES)
    for name, words in LATENCIES.items():
        latencies.add_row(words, *(_shown(found[f"{figure}_{name}_ms"]) for figure in FIGURES))
    yield latencies
    if found["failures_by_kind"]:
        failures = _table("Failures", "kind", "requests")
        failures.add_column("for example", overflow="fold")
        examples = {one.failure: one.detail for one in outcomes}
        for kind, count in found["failures_by_kind"].items():
            failures.add_row(kind, _shown(count), escape(examples[kind]))
        yield failures


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _total(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(one for one in known if one is not None)


def _figure(name: str, seconds: Sequence[float]) -> float | None:
    if not seconds:
        return None
    found = sum(seconds) / len(seconds) if name == "mean" else percentile(seconds, float(name[1:]))
    return found * 1e3


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
