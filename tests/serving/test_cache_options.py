"""Forms of caches and numerics on the command line, in sizes and in the engine."""

from __future__ import annotations

from math import prod
from typing import Any

import purestep as ps
import pytest
import torch
from kit.models import form_numerics, rounded_model
from kit.serving import greedy, heard, serve
from kit.steps import ids_of
from purestep.serving.asks import Ask
from purestep.serving.cli import app
from purestep.serving.costs import cache_costs, pool_bytes
from purestep.serving.engine import Engine, EngineLimits
from purestep.state.kv import CACHE_FORMS, CacheForm
from typer.testing import CliRunner

OWN_FORMS: tuple[CacheForm, ...] = CACHE_FORMS[:-1]


def form_model(form: CacheForm) -> ps.Model:
    """Make a model whose numerics a form holds."""
    return rounded_model(numerics=form_numerics(form, torch.bfloat16, invariant=True), torch_dtype="bfloat16")


@pytest.mark.parametrize("form", OWN_FORMS)
def test_sizes_are_those_that_are_allocated(form: CacheForm) -> None:
    """What ``info`` sizes is what a state takes, and quantised rows take no more than others."""
    model = form_model(form)
    capacity = ps.Capacity(requests=2, tokens=300, context=150)
    handle = ps.init_state(model, capacity, caches=form).kv.handle
    found = {name: prod(handle.spec(name)[0]) * handle.spec(name)[1].itemsize for name in handle.names}
    sizes = pool_bytes(model.config, capacity, form)
    if form in ("fp8", "fp4"):
        plain = cache_costs(model.config)
        assert all(cost.fixed <= plain[name].fixed for name, cost in cache_costs(model.config, form=form).items())
    assert sizes == found


def test_online_pooling_is_counted() -> None:
    """The pooling state of C128 is one row of three vectors instead of 128 of two."""
    config = form_model("plain").config
    ring, online = (cache_costs(config, form=form)["pooling state"].fixed for form in ("plain", "online"))
    n_c128 = config.compress_ratios.count(128)
    assert ring - online == n_c128 * (128 * 2 - 3) * config.head_dim * 4


@pytest.mark.parametrize("form", ["fp4-online", "fp8"])
def test_an_engine_serves_over_its_form(form: Any) -> None:
    """Replies over quantised caches, with a prefix that is reused, equal the solo run of the same form."""
    model, prompt = form_model(form), ids_of(140)
    limits = EngineLimits(running=2, tokens=1000, context=300, page_size=8, budget=256, points=2, caches=form)

    async def talk(engine: Engine) -> list[list[int]]:
        assert engine._pool.state.kv.layout.form == form
        return [(await heard(engine.submit(Ask(prompt_ids=tuple(prompt), params=greedy(6)))))[0] for _ in range(2)]

    replies = serve(model, limits, talk)
    state = ps.init_state(model, ps.Capacity(1, 200, 200), page_size=32, caches=form)
    state, request = ps.open_request(state, greedy(6))
    state, out = ps.extend_step(model, state, {request: prompt})
    solo = [*out.next_token_ids]
    while not out.finished:
        state, out = ps.decode_step(model, state)
        solo += out.next_token_ids
    assert replies == [solo, solo]


def test_commands_take_forms_and_numerics() -> None:
    """``info`` shows the sizes of a form, ``generate`` runs under any numerics, and unknown names are one line."""
    runner = CliRunner()
    shown = runner.invoke(app, ["info", "tiny", "--caches", "fp4-online"])
    assert shown.exit_code == 0
    assert "fp4-online" in shown.stdout
    words = ["generate", "In the", "--max-new-tokens", "3", "--seed", "1", "--numerics"]
    assert runner.invoke(app, [*words, "vllm-ascend-newest"]).exit_code == 0
    for wrong in (
        [*words, "nobody"],
        ["info", "tiny", "--caches", "fp2"],
        ["serve", "--port", "0", "--caches", "fp2"],
    ):
        refused = runner.invoke(app, wrong)
        assert refused.exit_code == 2
        assert "expected one of" in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", ps.Numerics()),
        ("official", ps.Numerics.official()),
        ("transformers", ps.Numerics.transformers()),
        ("sglang", ps.Numerics.sglang()),
        ("vllm-ascend", ps.Numerics.vllm_ascend()),
        ("vllm-ascend-newest", ps.Numerics.vllm_ascend(newest=True)),
    ],
)
def test_numerics_have_names(name: str, expected: ps.Numerics) -> None:
    """Every set of choices is found by its name."""
    assert ps.Numerics.named(name) == expected
