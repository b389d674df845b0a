"""Many mixed requests at once: nothing is left over in the server, and greedy replies are those of solo runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import attrs
import purestep as ps
import pytest
import torch
from kit.http import Server, running
from kit.models import tiny_model
from kit.serving import require_only_points
from kit.steps import run_alone
from purestep.model.loading import build_model
from purestep.serving.engine import Engine, EngineLimits


def small_model() -> ps.Model:
    """A model of a few milliseconds a step that speaks the embedded model's tokens; rows do not touch each other."""
    spoken = ps.load_model("tiny")
    drawn = tiny_model(vocab=spoken.config.vocab_size)
    config = attrs.evolve(
        drawn.config, bos_token_id=spoken.config.bos_token_id, eos_token_id=spoken.config.eos_token_id
    )
    model = build_model(config, drawn.params, dtype=torch.float32, numerics=ps.Numerics(invariant=True), kernels=None)
    return attrs.evolve(model, tokenizer=spoken.tokenizer)


MODEL = small_model()
# Twelve rows for 32 clients, and pages for about half of what those rows would like: requests wait and are retracted.
LIMITS = EngineLimits(running=12, waiting=40, tokens=1280, context=512, page_size=32, budget=12 + 256, points=4)
CLIENTS = 32
NEW = 16
"""Most tokens of a reply."""

Ids = tuple[int, ...]
Ask = Callable[["Client"], Awaitable[None]]


def ids_of(n: int, seed: int) -> Ids:
    """Random tokens without the control tokens, which are the first ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(300, MODEL.config.vocab_size) for _ in range(n))


SHARED = ids_of(140, 0)
PROMPTS = [SHARED + ids_of(3 + 5 * i, i) for i in range(5)] + [
    ids_of(n, n) for n in (1, 7, 60, 127, 128, 129, 257, 300)
]
TALKS = ["Who made the heaven and the earth?", "What did he say? " * 20, "And then?"]
RULES = [
    {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "regex", "regex": "[0-9]{2,4}"},
    {"type": "choice", "choice": ["heaven", "earth"]},
]
BROKEN = [
    ({"prompt": list(ids_of(512, 9)), "max_tokens": 1}, 400),
    ({"prompt": [10**6]}, 400),
    ({"prompt": "x", "temperature": -1}, 400),
    ({"prompt": "x", "model": "other"}, 404),
    ({"prompt": "x", "n": 0}, 400),
    ({}, 400),
    (b"{not json", 400),
]


class Client:
    """Sends requests and keeps what must be compared in the end.

    Args:
        server: that is asked.
        session: of aiohttp.
        seed: of everything that is drawn.
    """

    def __init__(self, server: Server, session: aiohttp.ClientSession, seed: int) -> None:
        self.server, self.session, self.draw = server, session, random.Random(seed)
        self.greedy: dict[Ids, list[Ids]] = {}
        self.sampled: dict[str, list[Any]] = {}
        self.n_refused = 0
        self.kinds: Counter[str] = Counter()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Send a body and return status and reply; what the full queue refuses is asked again."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            async with self.session.post(f"{self.server.url}{path}", data=raw, headers=_JSON) as answer:
                text = await answer.text()
            if answer.status != 429:
                return answer.status, json.loads(text)
            assert int(answer.headers["Retry-After"]) >= 0
            self.n_refused += 1
            await asyncio.sleep(0.05)

    async def pieces(self, path: str, body: Any, most: int | None = None) -> list[dict[str, Any]] | None:
        """Return the choices of a stream, or hang up after some messages and return None."""
        while True:
            async with self.session.post(f"{self.server.url}{path}", json=body | {"stream": True}) as answer:
                if answer.status == 429:
                    self.n_refused += 1
                    await asyncio.sleep(0.05)
                    continue
                assert answer.status == 200, await answer.text()
                found = []
                async for line in answer.content:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return found
                    if data:
                        found += json.loads(data)["choices"]
                    if most is not None and len(found) > most:
                        return None
                raise AssertionError("the stream ended without its end")

    async def plain_completion(self) -> None:
        """Greedy, with the log-probabilities of some."""
        body = self._completion() | ({"logprobs": 2} if self.draw.random() < 0.3 else {})
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        self._keep(reply["choices"][0], body["max_tokens"])

    async def streamed_completion(self) -> None:
        """Greedy, piece by piece."""
        body = self._completion()
        found = await self.pieces("/v1/completions", body)
        joined = [token_id for piece in found for token_id in piece["token_ids"]]
        self._keep(found[-1] | {"token_ids": joined}, body["max_tokens"])

    async def stopped_completion(self) -> None:
        """Greedy, with stop strings that nearly every reply meets."""
        body = self._completion() | {"stop": ["e", "th"]}
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        choice = reply["choices"][0]
        assert "e" not in choice["text"], choice
        self._keep(choice, None)

    async def plain_chat(self) -> None:
        """Greedy, thinking or not."""
        body = self._chat()
        status, reply = await self.post("/v1/chat/completions", body)
        assert status == 200, reply
        self._keep(reply["choices"][0], None)

    async def streamed_chat(self) -> None:
        """Greedy, piece by piece."""
        found = await self.pieces("/v1/chat/completions", self._chat())
        joined = [token_id for piece in found for token_id in piece.get("token_ids", ())]
        self._keep(found[-1] | {"token_ids": joined}, None)

    async def several(self) -> None:
        """Three sampled choices of one seed: the same ones whenever the same is asked."""
        prompt, seed = self.draw.choice(PROMPTS), self.draw.randrange(3)
        body = {
            "model": "tiny",
            "prompt": prompt,
            "n": 3,
            "seed": seed,
            "max_tokens": 6,
            "temperature": 1.2,
            "top_p": 0.9,
        }
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        self.sampled.setdefault(json.dumps(body), []).append(reply["choices"])

    async def constrained(self) -> None:
        """A reply of a shape, which is valid wherever it had the room to end."""
        rule = self.draw.choice(RULES)
        body = self._chat() | {"response_format": rule, "max_tokens": 24, "thinking": {"type": "disabled"}}
        status, reply = await self.post("/v1/chat/completions", body)
        assert status == 200, reply
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop":
            text = choice["message"]["content"]
            assert rule["type"] != "json_schema" or isinstance(json.loads(text)["a"], bool)
            assert rule["type"] != "regex" or (text.isdigit() and 2 <= len(text) <= 4)
            assert rule["type"] != "choice" or text in rule["choice"]

    async def broken(self) -> None:
        """What cannot be done is refused."""
        body, expected = self.draw.choice(BROKEN)
        body = {"model": "tiny"} | body if isinstance(body, dict) else body
        status, reply = await self.post("/v1/completions", body)
        assert (status, set(reply)) == (expected, {"error"}), reply

    async def hung_up(self) -> None:
        """A client that leaves in the middle of a stream."""
        await self.pieces("/v1/completions", self._completion() | {"max_tokens": 100}, most=self.draw.randrange(4))

    async def gave_up(self) -> None:
        """A client that leaves before its reply has come."""
        body = self._completion() | {"max_tokens": 100}
        try:
            async with asyncio.timeout(self.draw.random()):
                await self.post("/v1/completions", body)
        except TimeoutError:
            pass

    def _completion(self) -> dict[str, Any]:
        fields = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return fields | {"prompt": self.draw.choice(PROMPTS), "max_tokens": self.draw.randint(1, NEW)}

    def _chat(self) -> dict[str, Any]:
        thinking = {"type": self.draw.choice(["enabled", "disabled"])}
        message = {"role": "user", "content": self.draw.choice(TALKS)}
        fields = {"model": "tiny", "temperature": 0, "return_token_ids": True}
        return fields | {"messages": [message], "thinking": thinking, "max_tokens": NEW}

    def _keep(self, choice: dict[str, Any], n_expected: int | None) -> None:
        ids = tuple(choice["token_ids"])
        assert n_expected is None or len(ids) == n_expected, choice
        self.greedy.setdefault(tuple(choice["prompt_token_ids"]), []).append(ids)


PRESSURES = ("num_preemptions", "prefix_cache_hits", "request_aborts")
_JSON = {"Content-Type": "application/json"}
MIX = (
    *((Client.plain_completion, 5), (Client.streamed_completion, 5), (Client.stopped_completion, 2)),
    *((Client.plain_chat, 2), (Client.streamed_chat, 2), (Client.several, 2), (Client.constrained, 3)),
    *((Client.broken, 2), (Client.hung_up, 2), (Client.gave_up, 2)),
)


async def load(server: Server, n_requests: int, seed: int) -> Client:
    """Send so many requests, some at a time, and wait until the server has nothing to do."""
    kinds, weights = zip(*MIX, strict=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client, left = Client(server, session, seed), list(range(n_requests))

        async def work() -> None:
            while left:
                left.pop()
                (kind,) = client.draw.choices(kinds, weights)
                client.kinds[kind.__name__] += 1
                await kind(client)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(work())
    return client


def gauges(server: Server) -> dict[str, float]:
    """The metrics of a server without labels."""
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in (line.split() for line in lines)}


def soak(n_requests: int) -> None:
    """Serve them and look at what is left."""
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(MODEL, LIMITS))
        return engines[0]

    with running(MODEL, make, context=LIMITS.context) as server:
        client = asyncio.run(asyncio.wait_for(load(server, n_requests, seed=7), 3600))
        found = gauges(server)
        # Those who hung up are noticed within two steps.
        for _ in range(100):
            if found["purestep_num_requests_running"] == found["purestep_num_requests_waiting"] == 0:
                break
            found = gauges(server)
        assert found["purestep_num_requests_running"] == found["purestep_num_requests_waiting"] == 0
        assert n_requests < 500 or all(found[f"purestep_{name}_total"] > 0 for name in PRESSURES), found
        assert server.get("/health").status == 200
    asyncio.run(require_only_points(engines[0]))
    for prompt, replies in client.greedy.items():
        longest = max(map(len, replies))
        alone = tuple(run_alone(MODEL, list(prompt), longest - 1, context=512)[0])
        assert all(ids == alone[: len(ids)] for ids in replies), (prompt[:8], alone, set(replies))
    for choices in client.sampled.values():
        assert all(one == choices[0] for one in choices)


def test_mixed_requests_leave_nothing_over() -> None:
    """Fifty mixed requests of 32 clients: pages free or cached, gauges at zero, greedy replies as alone."""
    soak(50)


@pytest.mark.slow
def test_two_thousand_mixed_requests_leave_nothing_over() -> None:
    """The same with 2,000."""
    soak(2000)
