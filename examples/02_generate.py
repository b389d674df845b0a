"""Text from a prompt, twice: with ``generate``, and with the steps that it is made of.

What the reader learns: how little lies between the convenience and the steps. A prompt is fed by ``extend_step``, which
samples the first token; ``decode_step`` feeds the token sampled last and samples the next. The seed alone decides the
text, so both ways write the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import purestep as ps

PROMPT = "And God said,"
PARAMS = ps.SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_new_tokens=40)


def sampled_tokens(model: ps.Model, prompt_ids: list[int]) -> Iterator[int]:
    """Yield the tokens of one request, step by step."""
    room = len(prompt_ids) + 40
    state = ps.init_state(model, ps.Capacity(requests=1, tokens=room, context=room))
    state, a = ps.open_request(state, PARAMS)
    state, out = ps.extend_step(model, state, {a: prompt_ids})
    yield out.next_token_ids[0]
    while not out.finished:
        state, out = ps.decode_step(model, state)
        yield out.next_token_ids[0]


def main() -> None:
    """Write a continuation as it comes, then find the same tokens with the steps."""
    model = ps.load_model("tiny")

    print(PROMPT, end="", flush=True)
    pieces = []
    for piece in ps.generate(model, PROMPT, PARAMS):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()

    prompt_ids = [model.config.bos_token_id, *model.tokenizer.encode(PROMPT).ids]
    tokens = list(sampled_tokens(model, prompt_ids))
    text = model.tokenizer.decode(tokens)

    # A piece is held back until its characters are whole; the last one may be cut off inside a character.
    assert text.startswith("".join(pieces))
    assert text.removeprefix("".join(pieces)).strip("\ufffd") == ""
    print(f"{len(tokens)} steps wrote the same {len(text)} characters as generate did.")


if __name__ == "__main__":
    main()
