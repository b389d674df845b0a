"""The tokens that end a text: those of three files together, and what happens to files that name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import purestep as ps
import pytest
from kit.http import running
from kit.protocols import CHATS, PATHS, body_of, read_plain
from purestep.model.loading import model_folder
from purestep.serving.engine import Engine, EngineLimits

PAD = "<｜▁pad▁｜>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of its own, whose files are links but for those that a test writes."""
    for file in model_folder("tiny").iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [
        ({}, {}, (1,)),
        ({"eos_token_id": 5}, {}, (1, 5)),
        ({"eos_token_id": [7, 1, 5]}, {"eos_token": None}, (1, 7, 5)),
        ({"eos_token_id": None}, {"eos_token": PAD}, (1, 2)),
        ({"eos_token_id": 5}, {"eos_token": {"content": PAD}}, (1, 5, 2)),
    ],
)
def test_all_files_count(folder: Path, generation: Any, tokenizer: Any, expected: tuple[int, ...]) -> None:
    """Whichever files name end tokens, the model has them all, each once."""
    write(folder, "generation_config.json", **generation)
    write(folder, "tokenizer_config.json", **tokenizer)
    assert ps.load_model(folder).config.eos_token_id == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", '{"eos_token_id": "five"}'),
        ("generation_config.json", '{"eos_token_id": [1, true]}'),
        ("generation_config.json", '{"eos_token_id": 1536}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
        ("generation_config.json", "[]"),
        ("generation_config.json", "{"),
        ("tokenizer_config.json", '{"eos_token": "<none such>"}'),
        ("tokenizer_config.json", '{"eos_token": 3}'),
    ],
)
def test_files_that_name_no_token(folder: Path, name: str, text: str) -> None:
    """A file that is no JSON object, or names what is no token of the vocabulary, is complained about by its name."""
    (folder / name).write_text(text)
    with pytest.raises(ps.CheckpointError, match="expected"):
        ps.load_model(folder)


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    """Without a tokenizer its config is not looked at."""
    (folder / "tokenizer.json").unlink()
    write(folder, "tokenizer_config.json", eos_token="<none such>")
    assert ps.load_model(folder).config.eos_token_id == (1,)


def test_any_of_them_ends_a_reply(folder: Path) -> None:
    """Each of the ids ends replies of every endpoint, free at once and constrained when the JSON is whole."""
    write(folder, "generation_config.json", eos_token_id=5)
    write(folder, "tokenizer_config.json", eos_token=PAD)
    model = ps.load_model(folder, dtype="float32")
    limits = EngineLimits(running=4, tokens=4096, context=700)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    with running(model, lambda: Engine(model, limits), context=700) as server:
        for end in (1, 2, 5):
            wanted = {"logit_bias": {str(end): 100}, "temperature": 0}
            for protocol, path in PATHS.items():
                (said,) = read_plain(protocol, server.post(path, body_of(protocol, **wanted)))
                assert (said.text, said.reason, said.counts[2]) == ("", "stop", 1)
            for protocol in CHATS:
                body = body_of(protocol, schema=schema, limit=120, **wanted)
                (said,) = read_plain(protocol, server.post(PATHS[protocol], body))
                assert said.reason == "stop"
                assert json.loads(said.text)["n"] in (1, 2)
                assert said.text.endswith("}")
