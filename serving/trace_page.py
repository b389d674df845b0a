"""A run of traced steps as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

import attrs

from ..step.trace_values import Trace
from .trace_drawings import DRAWINGS
from .trace_script import SCRIPT
from .trace_style import STYLE
from .trace_text import TokenText

__all__ = ["trace_page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<div class="spread"><h1>{title}</h1><div class="soft">{about}</div></div>
<div class="group" id="steps"></div>
<div class="group" id="requests"></div>
</header>
<main>
<nav id="stages" aria-label="stages"></nav>
<div id="content"><noscript>This page draws itself and needs JavaScript for that.</noscript></div>
</main>
<script type="application/json" id="data">{data}</script>
<script>"use strict";{script}</script>
</body>
</html>
"""


def trace_page(
    traces: Sequence[Trace],
    *,
    title: str = "One token's trip",
    about: str = "",
    token_text: TokenText | None = None,
) -> str:
    """Write traced steps as a page.

    Args:
        traces: consecutive steps.
        title: of the page.
        about: a sentence below it; what was run.
        token_text: what a token id says; without it the page shows ids alone.
    Returns:
        HTML; any text in it, whatever it contains, is shown and never becomes markup.
    """
    shown = {token for trace in traces for token in _shown_tokens(trace)}
    texts = {} if token_text is None else {token: token_text(token) for token in sorted(shown)}
    # Inside a script element only "<" can end it; as an escape it is still JSON.
    data = json.dumps({"traces": [attrs.asdict(trace) for trace in traces], "texts": texts}).replace("<", "\\u003c")
    return _PAGE.format(title=escape(title), about=escape(about), style=STYLE, data=data, script=DRAWINGS + SCRIPT)


def _shown_tokens(trace: Trace) -> list[int]:
    sampled = [request.sampled for request in trace.requests if request.sampled is not None]
    return sampled + [token for request in trace.requests for token in request.input_ids]
