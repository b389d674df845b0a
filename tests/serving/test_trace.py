"""``purestep trace``: what it prints and writes, and a page that shows any text and runs none of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import attrs
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import examples, ids_of
from purestep.serving.cli import app
from purestep.serving.trace_page import trace_page
from purestep.serving.trace_run import trace_run
from purestep.serving.trace_text import batch_table, pool_table, request_name, stage_table
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)><!--\u2028"]}\\'
TRACES = trace_run(tiny_model(), [ids_of(n, seed=n) for n in (10, 7, 126)], steps=3, page_size=4)


ELEMENTS = [
    *("html", "head", "meta", "meta", "title", "style", "body", "header", "div", "h1", "div", "div", "div", "main"),
    *("nav", "div", "noscript", "script", "script"),
]
"""Of the page before it draws itself."""


class Reader(HTMLParser):
    """Checks that tags close in order; keeps elements, attributes and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", text))


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, args)], prog_name="purestep")


def printed(table: Table, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def rendered(page: str, folder: Path, asked: str = "") -> str:
    """Return the document after a browser has run the page."""
    if BROWSER is None:
        pytest.skip("needs chromium or chrome")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", file.as_uri() + asked]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=True).stdout


def test_command_walks_the_three_requests(tmp_path: Path) -> None:
    """Without arguments the command shows the histories of 10, 7 and 20 tokens, and writes a page and JSON of them."""
    page, data = tmp_path / "trip.html", tmp_path / "trip.json"
    result = run("--html", page, "--json", data)
    assert (result.exit_code, result.stderr) == (0, "")
    for expected in ("Step 1:", "Step 4:", "10 -> 11", "slot 22 + 1", "new page 11", "1.attn.compress", "relay: A 1="):
        assert expected in result.stdout
    traces = json.loads(data.read_text(encoding="utf-8"))
    assert [len(traces), *(r["len_before"] for r in traces[0]["requests"])] == [4, 10, 7, 20]
    assert [r["out_full_loc"] for r in traces[0]["requests"]] == [[14], [23], [44]]
    assert traces[1]["requests"][0]["input_ids"] == [traces[0]["requests"][0]["sampled"]]
    Reader(page.read_text(encoding="utf-8"))


def test_command_takes_prompts() -> None:
    """Prompts take the place of the histories; one row each."""
    result = run("And God said", "Let there be [bold]light[/bold]", "--steps", 1, "--page-size", 8)
    assert result.exit_code == 0
    assert "Step 1: 2 tokens of 2 requests, pages of 8" in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--histories", "10,x"), 2, "histories: expected positive numbers"),
        (("--histories", "0"), 2, "histories: expected positive numbers"),
        (("--page-size", 6), 2, "multiple of 4"),
        (("--steps", 0), 2, "--steps"),
        (("--steps", 1, "--html", "/nowhere/at/all.html"), 2, "a folder that exists"),
    ],
)
def test_command_says_what_is_wrong(args: tuple[object, ...], code: int, message: str) -> None:
    """What cannot be done is one message and an exit code."""
    result = run(*args)
    assert result.exit_code == code
    assert message in result.stderr


def test_page_needs_nothing_else() -> None:
    """The page names no address, loads nothing, and holds every trace as data."""
    page = trace_page(TRACES)
    reader = Reader(page)
    assert "http" not in page
    assert not {"link", "img", "iframe", "object"} & set(reader.seen)
    assert not {name for name, _ in reader.attributes} & {"src", "href", "srcset", "action"}
    assert "url(" not in page and "@import" not in page  # noqa: PT018
    (data,) = (text for tag, text in reader.texts if tag == "script" and text.startswith("{"))
    assert json.loads(data)["traces"] == json.loads(json.dumps([attrs.asdict(trace) for trace in TRACES]))


@examples(20)
@given(text=st.just(HOSTILE) | st.text(max_size=40) | st.sampled_from(["]]>", "<!--<script>", "</SCRIPT >", "{title}"]))
def test_texts_stay_texts(text: str) -> None:
    """Whatever tokens, the title and the sentence say, no element is added, and the data holds it to the letter."""
    reader = Reader(trace_page(TRACES[:1], title=text, about=text, token_text=lambda _: text))
    assert reader.seen == ELEMENTS
    (data,) = (content for tag, content in reader.texts if tag == "script" and content.startswith("{"))
    assert set(json.loads(data)["texts"].values()) == {text}


def test_tables_show_texts_as_they_are() -> None:
    """Markup in a token is printed, not obeyed."""
    shown = printed(batch_table(TRACES[0], 1, lambda _: "[red]x[/red]"))
    assert "'[red]x[/red]'" in shown


def test_tables_answer() -> None:
    """The tables name slots, pages, choices, and where rows change hands."""
    stages, pools = printed(stage_table(TRACES[0])), printed(pool_table(TRACES[0]))
    for expected in ("2.attn.read", "expert -> token", "[T,M,H] > [T,H]", "experts 0", f"3x{VOCAB}", "swa: A"):
        assert expected in stages
    full = TRACES[0].pools[0]
    assert f"{full.n_free_before} -> {full.n_free_after}" in pools


def test_requests_have_names() -> None:
    """Requests are named by letters, and by numbers after Z."""
    assert [request_name(i) for i in (0, 25, 26)] == ["A", "Z", "#26"]


def test_steps_without_rows_are_shown() -> None:
    """A step in which nothing runs is a page and tables like any other."""
    model = tiny_model()
    state = ps.init_state(model, ps.Capacity(requests=1, tokens=8, context=8), page_size=4)
    _, _, trace = ps.trace_step(model, state)
    Reader(trace_page([trace]))
    assert "0 tokens" in printed(batch_table(trace, 1, str))
    assert printed(stage_table(trace))


def test_page_draws_itself(tmp_path: Path) -> None:
    """A browser shows the step: who runs, every position's slot, what is written, and the stage that was asked for."""
    page = rendered(
        trace_page(TRACES, token_text=lambda token: f"word{token}"), tmp_path, "#step=2&stage=2.attn.compress"
    )
    for expected in ("The batch", "Window pool (SWA)", "C128 entries and the sidecar", "From sample to next input"):
        assert expected in page
    request = TRACES[1].running[2]
    assert f"position {request.positions[0]}: full slot {request.out_full_loc[0]}" in page
    assert 'aria-current="true"><span>attn.compress' in page
    assert f"word{request.sampled}" in page
    assert page.count('class="cell w"') >= 4


def test_page_runs_no_text(tmp_path: Path) -> None:
    """Markup in tokens is shown by a browser as text and changes nothing."""
    page = rendered(trace_page(TRACES[:1], title="quiet", token_text=lambda _: HOSTILE), tmp_path)
    assert "<title>quiet</title>" in page
    assert "<img" not in page.split("<main>")[1].split("<script")[0]
    assert "onerror" in page
