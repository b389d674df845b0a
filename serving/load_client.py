"""The client of a load test: sends requests to any server with OpenAI's interface and times what streams back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import aiohttp
import attrs

from ..state.errors import PurestepError
from .load_plan import Endpoint, Prompt
from .load_stats import Outcome

__all__ = ["LoadError", "Target", "first_model", "run_load"]

_PATHS: Final = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}
_SPOKEN: Final = ("content", "reasoning_content", "reasoning")
"""Fields of a message's delta whose text was generated."""


class LoadError(PurestepError, RuntimeError):
    """A load test that cannot begin, or a request of it that failed.

    Args:
        kind: of the failure, in a word.
        message: what went wrong.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message, field=kind)
        self.kind = kind


@attrs.frozen(kw_only=True)
class Target:
    """Who is asked, and how.

    Attributes:
        base_url: of the server, without the ``/v1`` of its paths.
        model: that is asked.
        endpoint: where requests go.
        temperature: of all requests.
        ignore_eos: whether replies go on to their full length; a field that not every server takes.
        api_key: sent as a bearer token.
        timeout_s: that a request may take in all.
    """

    base_url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    temperature: float = 0.0
    ignore_eos: bool = False
    api_key: str | None = attrs.field(default=None, repr=False)
    timeout_s: float = 600.0


async def first_model(base_url: str, *, api_key: str | None = None) -> str:
    """Ask a server for the name of its first model.

    Raises:
        LoadError: it does not answer, or names none.
    """
    url = f"{base_url}/v1/models"
    try:
        async with _session(api_key, timeout_s=30) as session, session.get(url) as response:
            if response.status != 200:
                raise LoadError(f"http_{response.status}", f"{url}: expected a list of models, got {response.status}")
            found: Any = await response.json(content_type=None)
            name: str = found["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError("connect", f"{url}: expected a server, got none: {error}; is it running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise LoadError("invalid", f"{url}: expected a list of models, got none; name one with --model") from error
    return name


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Send every prompt and return how each went, in their order.

    Args:
        target: who is asked.
        prompts: what is sent.
        concurrency: closed loop: so many clients, each of which sends its next request when its last has ended.
        arrivals: open loop: seconds at which requests are sent, whether earlier ones have ended or not.
        progress: called as (requests that ended, requests).
    """
    began = time.perf_counter()
    found: dict[int, Outcome] = {}
    waiting = iter(list(enumerate(prompts)))

    async with _session(target.api_key, timeout_s=target.timeout_s) as session:

        async def send(at: int, prompt: Prompt) -> None:
            found[at] = await _send(session, target, prompt, lambda: time.perf_counter() - began)
            if progress is not None:
                progress(len(found), len(prompts))

        async def client() -> None:
            for at, prompt in waiting:
                await send(at, prompt)

        async def arrive(at: int, prompt: Prompt, start: float) -> None:
            await asyncio.sleep(start - (time.perf_counter() - began))
            await send(at, prompt)

        async with asyncio.TaskGroup() as group:
            if arrivals is None:
                for _ in range(concurrency or 1):
                    group.create_task(client())
            else:
                for (at, prompt), start in zip(waiting, arrivals, strict=True):
                    group.create_task(arrive(at, prompt, start))
    return [found[at] for at in range(len(prompts))]


@attrs.define
class _Heard:
    """What a stream has said so far."""

    texts: list[float] = attrs.Factory(list)
    text: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    is_complete: bool = False

    def take(self, event: Any, now: float) -> None:
        """Take the data of an event."""
        if not isinstance(event, dict) or event.get("error"):
            said = event.get("error") if isinstance(event, dict) else event
            raise LoadError("error_event", f"the stream brought an error: {said}")
        for choice in event.get("choices") or ():
            text = choice.get("text") or "".join((choice.get("delta") or {}).get(name) or "" for name in _SPOKEN)
            if text:
                self.texts.append(now)
                self.text += text
            self.is_complete |= choice.get("finish_reason") is not None
        counts = event.get("usage") or {}
        self.input_tokens = counts.get("prompt_tokens", self.input_tokens)
        self.output_tokens = counts.get("completion_tokens", self.output_tokens)
        self.cached_tokens = (counts.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached_tokens)


async def _send(session: aiohttp.ClientSession, target: Target, prompt: Prompt, clock: Callable[[], float]) -> Outcome:
    """Send one request, follow its stream, and tell how it went; nothing that a server does raises."""
    began, heard = clock(), _Heard()
    failure: LoadError | None = None
    try:
        async with session.post(target.base_url + _PATHS[target.endpoint], json=_body(target, prompt)) as response:
            if response.status != 200:
                said = (await response.text(errors="replace"))[:500]
                raise LoadError(f"http_{response.status}", said)
            async for data in _events(response.content):
                if data == "[DONE]":
                    heard.is_complete = True
                else:
                    heard.take(json.loads(data), clock())
        if not heard.is_complete:
            raise LoadError("truncated", "the stream ended before the reply did")
    except LoadError as error:
        failure = error
    except TimeoutError:
        failure = LoadError("timeout", f"the reply took more than {target.timeout_s:g} seconds")
    except aiohttp.ClientConnectorError as error:
        failure = LoadError("connect", str(error))
    except (aiohttp.ClientError, OSError) as error:
        failure = LoadError("disconnect", f"{type(error).__name__}: {error}")
    except (ValueError, AttributeError, TypeError) as error:
        failure = LoadError("invalid_stream", f"the stream is not one of OpenAI's interface: {error}")
    return Outcome(
        began=began,
        ended=clock(),
        texts=tuple(heard.texts),
        text=heard.text,
        input_tokens=heard.input_tokens,
        cached_tokens=heard.cached_tokens,
        output_tokens=len(heard.texts) if heard.output_tokens is None else heard.output_tokens,
        failure=None if failure is None else failure.kind,
        detail="" if failure is None else str(failure),
    )


def _body(target: Target, prompt: Prompt) -> dict[str, Any]:
    if target.endpoint is Endpoint.CHAT:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]}
    else:
        asked = {"prompt": prompt.text}
    asked |= {"ignore_eos": True} if target.ignore_eos else {}
    return asked | {
        "model": target.model,
        "max_tokens": prompt.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yield the data of server-sent events, however they are cut on their way."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode("utf-8")


def _session(api_key: str | None, *, timeout_s: float) -> aiohttp.ClientSession:
    # Proxies of the environment are left alone: what is measured is the server.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )
