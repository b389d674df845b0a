"""The token log against a plain list."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from purestep.state.errors import RequestError
from purestep.state.tokens import TokenLog
from torch.utils import _pytree as pytree

CHUNK = 64
LENGTHS = st.one_of(st.integers(0, 5), st.sampled_from([62, 63, 64, 65, 127, 128, 129, 700]), st.integers(0, 700))


def _ids(n, start=0):
    return [(start + i) * 7919 % 129280 for i in range(n)]


class TokenLogMachine(RuleBasedStateMachine):
    """Grows, cuts and rewrites a log beside a plain list, and goes back to older versions."""

    def __init__(self):
        super().__init__()
        self.log, self.model, self.versions = TokenLog(), [], []

    @rule(token_id=st.integers(0, 2**40))
    def append(self, token_id):
        self.log, self.model = self.log.append(token_id), [*self.model, token_id]

    @rule(n=LENGTHS, as_array=st.booleans())
    def extend(self, n, as_array):
        ids = _ids(n, len(self.model))
        self.log = self.log.extend(np.array(ids, np.int32) if as_array else ids)
        self.model = self.model + ids

    @precondition(lambda self: self.model)
    @rule(token_id=st.integers(0, 2**40))
    def replace_last(self, token_id):
        self.log, self.model = self.log.replace_last(token_id), [*self.model[:-1], token_id]

    @rule(data=st.data())
    def truncate(self, data):
        n = data.draw(st.integers(0, len(self.model)))
        self.log, self.model = self.log.truncate(n), self.model[:n]

    @rule()
    def hold(self):
        self.versions.append((self.log, list(self.model)))

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def go_back(self, data):
        self.log, model = data.draw(st.sampled_from(self.versions))
        self.model = list(model)

    @invariant()
    def contents_agree(self):
        for log, model in [*self.versions, (self.log, self.model)]:
            assert len(log) == len(model)
            assert log.tolist() == model
            assert log == TokenLog.of(model)
            assert hash(log) == hash(TokenLog.of(model))


TestTokenLog = TokenLogMachine.TestCase
TestTokenLog.settings = settings(max_examples=40, stateful_step_count=20)


@given(n=LENGTHS, data=st.data())
def test_log_is_indexed_like_a_list(n, data):
    """Index, slice and iteration follow Python's rules, slices as new int64 arrays that torch accepts."""
    ids, bound = _ids(n), st.none() | st.integers(-n - 2, n + 2)
    log = TokenLog.of(ids)
    at = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, 300, -1, -3])))
    part = log[at]
    assert part.tolist() == ids[at]
    assert part.dtype == np.int64
    assert torch.from_numpy(part).tolist() == ids[at]
    assert list(log) == ids
    for i in data.draw(st.lists(st.integers(-n, n - 1), max_size=5)) if n else ():
        assert log[i] == ids[i]
        assert type(log[i]) is int
    for i in (n, -n - 1):
        with pytest.raises(IndexError):
            log[i]


@given(n=LENGTHS)
def test_log_handed_out_can_be_written_without_changing_the_log(n):
    """Arrays that come out, and the array that went in, share nothing with the log."""
    given_ids = np.array(_ids(n), np.int64)
    log = TokenLog.of(given_ids)
    given_ids[:] = -1
    log.numpy()[:] = -2
    for start in range(0, n, CHUNK):
        log[start : start + CHUNK][:] = -3
    assert log.tolist() == _ids(n)
    assert all(not chunk.flags.writeable for chunk in log.chunks)


def test_appending_copies_no_chunk():
    """A log grown from another shares its chunks, holds fewer than a chunk of ids beside them, and keeps no more."""
    log = TokenLog.of(_ids(3 * CHUNK - 1))
    assert all(chunk.base is None for chunk in log.chunks)
    for token_id in range(2 * CHUNK):
        longer = log.append(token_id)
        assert all(a is b for a, b in zip(log.chunks, longer.chunks, strict=False))
        assert len(longer.tail) < CHUNK
        log = longer
    assert all(a is b for a, b in zip(log.extend(_ids(600)).chunks, log.chunks, strict=False))
    assert all(a is b for a, b in zip(log.truncate(2 * CHUNK + 9).chunks, log.chunks, strict=False))


@given(n=LENGTHS)
def test_log_survives_pickle_and_copy(n):
    """A pickle brings an equal log with read-only chunks, a copy is the log itself, and a pytree sees one leaf."""
    log = TokenLog.of(_ids(n))
    loaded = pickle.loads(pickle.dumps(log))
    assert loaded == log
    assert all(not chunk.flags.writeable for chunk in loaded.chunks)
    assert copy.deepcopy(log) is log
    assert copy.copy(log) is log
    assert pytree.tree_leaves((log,)) == [log]


@given(n=st.integers(1, 600), data=st.data())
def test_logs_differ_when_any_token_differs(n, data):
    """One other id, or one id fewer, makes another log; so does another type."""
    ids, i = _ids(n), data.draw(st.integers(0, n - 1))
    other = [*ids[:i], ids[i] + 1, *ids[i + 1 :]]
    assert TokenLog.of(ids) != TokenLog.of(other)
    assert TokenLog.of(ids) != TokenLog.of(ids[:-1])
    assert TokenLog.of(ids) != ids


def test_log_shows_its_length_and_end():
    """A log is shown in one short line, however long it is."""
    assert repr(TokenLog()) == "TokenLog(len=0, last=[])"
    assert repr(TokenLog.of(range(1000))) == "TokenLog(len=1000, last=[996, 997, 998, 999])"


def test_log_refuses_what_it_never_held():
    """A cut beyond the end, a cut below 0 and a replacement in an empty log are request errors."""
    log = TokenLog.of((1, 2, 3))
    for n in (4, -1):
        with pytest.raises(RequestError, match=rf"expected 0\.\.3, got {n}; "):
            log.truncate(n)
    with pytest.raises(RequestError, match="at least one token, got an empty log"):
        log.truncate(0).replace_last(5)
    with pytest.raises(TypeError):
        log.append(1.5)
