"""The official clients against a server with the real engine on the embedded model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import purestep as ps
import pytest
import torch
from kit.http import Server, running
from purestep.serving.engine import Engine, EngineLimits

# Row-independent arithmetic, so that a reply does not depend on what it was batched with.
MODEL = ps.load_model("tiny", dtype="float32", numerics=ps.Numerics(invariant=True))
PROMPT = "In the beginning God created"
USER = {"role": "user", "content": "Who made the heaven and the earth?"}
LONG = "And God said, " * 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = EngineLimits(running=4, waiting=32, tokens=4096, context=512, budget=132 + 128, checks_invariants=True)
    with running(MODEL, lambda: Engine(MODEL, limits), context=512) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def greedy(n: int) -> str:
    """What the steps say after the prompt, without any server."""
    return "".join(ps.generate(MODEL, PROMPT, ps.SamplingParams(temperature=0, max_new_tokens=n)))


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model="tiny", **{"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": [USER], "max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(model="tiny", **fields)


def test_completions(client: openai.OpenAI) -> None:
    """A greedy completion is what the steps say, streamed and plain, alone and among others."""
    expected = greedy(12)
    assert complete(client).choices[0].text == expected
    assert "".join(event.choices[0].text for event in complete(client, stream=True)) == expected
    with ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(complete, client, prompt=f"{n} And", temperature=1, n=2, max_tokens=9) for n in range(5)]
        assert complete(client).choices[0].text == expected
        assert all(len(one.result().choices) == 2 for one in busy)


def test_replies_can_be_made_again(client: openai.OpenAI) -> None:
    """The seed that a reply reports makes the same reply again, choice by choice."""
    first = complete(client, temperature=1, n=3)
    assert len({choice.text for choice in first.choices}) > 1
    for choice in first.choices:
        again = complete(client, temperature=1, seed=choice.seed)
        assert again.choices[0].text == choice.text
        assert again.system_fingerprint == first.system_fingerprint


def test_scores_of_a_prompt(client: openai.OpenAI) -> None:
    """With echo and no tokens to sample, the reply is the prompt with the log-probabilities of its tokens."""
    reply = complete(client, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert reply.text == PROMPT
    ids = [0, *MODEL.tokenizer.encode(PROMPT).ids]
    rows = ps.forward_sequence(MODEL, torch.tensor(ids)).log_softmax(-1)
    expected = [rows[at, token_id].item() for at, token_id in enumerate(ids[1:])]
    report = reply.logprobs
    assert report.token_logprobs[0] is None
    assert report.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert [len(top) for top in report.top_logprobs[1:]] == [2] * len(expected)
    pieces = [PROMPT[a:b] for a, b in zip(report.text_offset, [*report.text_offset[1:], None], strict=True)]
    assert pieces[1:] == report.tokens[1:]
    streamed = list(complete(client, echo=True, logprobs=2, max_tokens=3, stream=True))
    plain = complete(client, echo=True, logprobs=2, max_tokens=3).choices[0]
    assert "".join(event.choices[0].text for event in streamed) == plain.text
    joined = [
        one for event in streamed if event.choices[0].logprobs for one in event.choices[0].logprobs.token_logprobs
    ]
    assert joined == plain.logprobs.token_logprobs


def test_chats(client: openai.OpenAI) -> None:
    """A chat says the same streamed and plain, with log-probabilities and thinking where asked for."""
    plain = chat(client, logprobs=True, top_logprobs=2)
    assert plain.choices[0].finish_reason in ("stop", "length")
    assert "".join(event.choices[0].delta.content or "" for event in chat(client, stream=True)) == (
        plain.choices[0].message.content
    )
    report = plain.choices[0].logprobs.content
    assert all(math.isfinite(one.logprob) and len(one.top_logprobs) == 2 for one in report)
    thought = chat(client, extra_body={"thinking": {"type": "enabled"}})
    assert thought.choices[0].message.reasoning_content
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage == plain.usage


def test_tools_and_formats(client: openai.OpenAI) -> None:
    """On the embedded model, which has never seen either, forced calls and JSON come out sound."""
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    with pytest.raises(openai.BadRequestError, match="maximum context"):
        chat(client, tools=[tool], tool_choice="required", messages=[USER | {"content": LONG}])
    formed = chat(client, response_format=shape, max_tokens=100).choices[0]
    assert formed.finish_reason == "stop"
    assert formed.message.content.replace(" ", "").replace("\n", "") in ('{"n":1}', '{"n":2}')


def test_prefixes_are_reused_and_counted(client: openai.OpenAI) -> None:
    """A prompt asked twice is taken over in part the second time, the count says so, and the reply stays the same."""
    first, second = (complete(client, prompt=LONG) for _ in range(2))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens > 130
    assert second.usage.prompt_tokens_details.cached_tokens >= 128
    assert first.choices[0].text == second.choices[0].text


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """Wrong requests raise the error that the client has for them, with the name of the field."""
    with pytest.raises(openai.BadRequestError) as found:
        complete(client, extra_body={"top_k": -7})
    assert found.value.param == "top_k"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    assert client.models.retrieve("tiny").id == "tiny"


def test_clients_that_leave_free_their_pages(client: openai.OpenAI, server: Server) -> None:
    """After a client has closed its stream, the engine still answers others as ever."""
    stream = complete(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while server.log[-1]["status"] != 499 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.log[-1]["status"] == 499
    assert complete(client).choices[0].text == greedy(12)
