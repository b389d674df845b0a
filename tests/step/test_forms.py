"""Forms of caches: sizes, who may use which, files and transfer, and online pooling against the oracle."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model, feed_in_chunks, random_ids
from kit.models import form_numerics, rounded_model, tiny_model
from kit.steps import ENDLESS, ids_of
from oracle.model import oracle_logits
from purestep.state.config import Config
from purestep.state.config_reading import config_from_dict
from purestep.state.kv import CACHE_FORMS, CacheForm, KVLayout, row_specs

OWN_FORMS: tuple[CacheForm, ...] = CACHE_FORMS[:-1]


def released(name: str) -> Config:
    """Give the numbers of Flash or Pro that the caches depend on."""
    pattern = [0, 0, *[4, 128] * 20, 4] if name == "flash" else [128, 128, *[4, 128] * 29, 4]
    raw = tiny_config(tuple(pattern), head_dim=512, rope_dim=64, index_dim=128, window=128)
    return config_from_dict(raw)


def per_token(config: Config, form: CacheForm) -> Fraction:
    """Add up what one token of context costs in entries and index keys, by rows as they are allocated."""
    bytes_of = {name: width * kind.itemsize for name, (width, kind) in row_specs(config, form, torch.bfloat16).items()}
    ratios = config.compress_ratios
    c4, c128 = ratios.count(4), ratios.count(128)
    return Fraction(c4 * (bytes_of["c4"] + bytes_of["index"]), 4) + Fraction(c128 * bytes_of["c128"], 128)


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        ("flash", "plain", 6880),
        ("flash", "fp8", 3850.25),
        ("flash", "fp4", 3514.25),
        ("pro", "plain", 9848),
        ("pro", "fp8", 5511.4375),
        ("pro", "fp4", 5031.4375),
    ],
)
def test_bytes_per_token_are_those_of_the_table(name: str, form: CacheForm, expected: float) -> None:
    """Entries and keys of a token of context take the bytes of the published arithmetic, online or not."""
    assert per_token(released(name), form) == Fraction(expected)
    online: Any = "online" if form == "plain" else f"{form}-online"
    assert per_token(released(name), online) == Fraction(expected)


def test_rows_have_the_sizes_of_the_table() -> None:
    """An FP8 entry has 584 bytes, keys have 132 and 68, and an online state 6 KiB instead of 512 KiB a layer."""
    config = released("flash")
    specs = {form: row_specs(config, form, torch.bfloat16) for form in OWN_FORMS}
    assert specs["fp8"]["swa"] == specs["fp4"]["c128"] == (584, torch.uint8)
    assert specs["fp8"]["index"] == (132, torch.uint8)
    assert specs["fp4"]["index"] == (68, torch.uint8)
    sizes = ps.init_state(tiny_model(), ps.Capacity(1, 128, 128)).table.sizes
    for form, expected in (("plain", 524_288), ("online", 6_144), ("fp4-online", 6_144)):
        layout = KVLayout.of(config, sizes, form)  # type: ignore[arg-type]
        width, kind = specs[form]["c128_state"]  # type: ignore[index]
        assert layout.c128_ring * width * kind.itemsize == expected
    fixed = 128 * 584 * len(config.compress_ratios)
    assert fixed == 74_752 * 43


def test_a_model_has_the_forms_that_hold_what_it_computes() -> None:
    """FP8 rows need rounded entries, FP8 and FP4 keys keys rounded so, online pooling pooling in float32."""
    expected: dict[Any, tuple[str, ...]] = {
        ps.Numerics.plain(): ("plain", "online"),
        ps.Numerics.official(): ("plain", "fp4", "online", "fp4-online"),
        ps.Numerics.sglang(): ("plain", "fp8", "online", "fp8-online"),
        ps.Numerics.transformers(): ("plain",),
        ps.Numerics.vllm_ascend(): ("plain", "online"),
        ps.Numerics.vllm_ascend(newest=True): ("plain", "fp8", "online", "fp8-online"),
        ps.Numerics(kv_qdq=True): ("plain", "online"),
        ps.Numerics(indexer_qdq=True): ("plain", "online"),
    }
    for numerics, forms in expected.items():
        model = rounded_model(numerics=numerics)
        assert model.cache_forms == forms
        for form in CACHE_FORMS:
            if form in forms:
                assert ps.init_state(model, ps.Capacity(1, 8, 8), caches=form).kv.layout.form == form
            else:
                with pytest.raises(
                    ps.ConfigError, match=f"caches: expected the form {' or '.join(forms)}, .*got '{form}'"
                ):
                    ps.init_state(model, ps.Capacity(1, 8, 8), caches=form)


@pytest.mark.parametrize("form", OWN_FORMS)
def test_files_and_transfer_keep_a_form(form: CacheForm, tmp_path: Path) -> None:
    """Saved, moved and forked within open groups, a request goes on alike, and only into a state of the same form."""
    model = rounded_model(numerics=form_numerics(form, torch.bfloat16, invariant=True))
    state = ps.init_state(model, ps.Capacity(2, 600, 300), page_size=8, caches=form)
    state, a = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(model, state, {a: ids_of(150)})
    ps.save_state(state, tmp_path)
    restored = ps.restore_state(model, tmp_path)
    assert restored.kv.layout == state.kv.layout
    assert ps.invariants.digest(restored) == ps.invariants.digest(state)
    exported = ps.export_request(state, a)
    other = ps.init_state(model, ps.Capacity(2, 600, 300), page_size=128, caches=form)
    other, b = ps.import_request(other, exported)
    forked, c = ps.fork_request(other, b)
    more = ids_of(110, seed=1)  # closes the group of 128 that is open
    runs = ((state, a), (restored, a), (other, b), (forked, c))
    rows = [ps.extend_step(model, one, {request: more}, logits="all")[1].logits for one, request in runs]
    assert all(torch.equal(rows[0], row) for row in rows)
    elsewhere = next(one for one in model.cache_forms if one != form)
    with pytest.raises(ps.CheckpointError, match=f"caches of the {form} form"):
        ps.import_request(ps.init_state(model, ps.Capacity(2, 600, 300), caches=elsewhere), exported)


def test_a_file_of_a_form_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """Caches that were saved in a form that does not fit are refused, by name of what differs."""
    model = rounded_model(numerics=ps.Numerics.official())
    ps.save_state(ps.init_state(model, ps.Capacity(1, 8, 8), caches="fp4"), tmp_path)
    with pytest.raises(ps.CheckpointError, match="other numerics"):
        ps.restore_state(rounded_model(numerics=attrs.evolve(ps.Numerics.official(), kv_qdq=False)), tmp_path)


def test_online_pooling_follows_the_oracle() -> None:
    """Chunked and decoded over online pooling, logits equal those of the plain oracle past several closed groups."""
    config = tiny_config((128, 4, 128), index_topk=512)
    tensors = random_tensors(config, seed=3)
    model = engine_model(config, tensors)
    ids = random_ids(300, config["vocab_size"])
    expected = oracle_logits(config, tensors, ids)
    for chunks in ([300], [127, 1, 2, 128, *[1] * 42], [1] * 10 + [200] + [1] * 90):
        state = ps.init_state(model, ps.Capacity(1, 300, 300), page_size=32, caches="online")
        got = feed_in_chunks(model, ids, chunks, state=state)
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("form", ["online", "fp4-online"])
def test_a_cut_begins_its_group_anew(form: CacheForm) -> None:
    """After rewinds to either side of a border of 128 the open group has nothing of what was cut."""
    model = rounded_model(numerics=form_numerics(form, torch.bfloat16, invariant=True))
    text = ids_of(280)
    whole = ps.init_state(model, ps.Capacity(1, 300, 300), caches=form)
    whole, a = ps.open_request(whole, ENDLESS)
    _, out = ps.extend_step(model, whole, {a: text}, sample=False, logits="all")
    for cut in (1, 127, 128, 129, 256):
        state = ps.init_state(model, ps.Capacity(1, 300, 300), page_size=32, caches=form)
        state, a = ps.open_request(state, ENDLESS)
        state, _ = ps.extend_step(model, state, {a: [*text[:cut], *ids_of(272 - cut, seed=9)]}, sample=False)
        state = ps.rewind_request(state, a, cut)
        _, again = ps.extend_step(model, state, {a: text[cut:]}, sample=False, logits="all")
        assert torch.equal(again.logits, out.logits[-len(again.logits) :])
