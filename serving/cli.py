"""The command line: generate, score, info, plan, convert, make-tiny, kernels, profile, record, diff, trace, serve,
chat, bench, bench-serve.

Standard output carries what was asked for and nothing else; progress, statistics and complaints go to standard error.

========= ===============================================================================================
exit code meaning
========= ===============================================================================================
0         done
1         it went wrong while running, or nobody reads the output any more; ``diff``: the runs differ;
          ``kernels --self-test``: a kernel is wrong
2         something that cannot be done was asked for
130       interrupted
========= ===============================================================================================
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import attrs
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers.decoders import DecodeStream
from typer.core import TyperGroup

from ..model.checkpoint import CheckpointNote, read_config
from ..model.loading import load_model, model_folder
from ..model.model import Model
from ..model.shards import CONFIG_FILE
from ..model.stages import STAGES
from ..model.streaming import SUMS_FILE
from ..ops.ascend.providers import installed_schemas
from ..state.errors import ConfigError, PurestepError, RequestError
from ..state.kv import CACHE_FORMS, CacheForm
from ..state.numerics import Numerics
from ..state.parallel import Parallel
from ..state.released import RELEASED
from ..state.sampling import SamplingParams
from ..step.compare import compare_runs
from ..step.compiled import CompiledStep, compile_step
from ..step.generate import generate_tokens, prompt_ids
from ..step.run_files import save_run
from ..step.selfcheck import check_output
from .address import check_address
from .bench_decode import bench_table, draw_timings, time_decode
from .checkpoint_tools import convert as convert_checkpoint
from .checkpoint_tools import make_tiny as make_tiny_checkpoint
from .checkpoint_tools import parse_layers
from .chips import CHIPS
from .costs import cache_costs
from .info import info_tables, pairs_table, show_bytes
from .kernel_report import kernel_device, kernel_table_view, machine_facts, report_fields, run_checks, verdict_table
from .kernel_table import kernel_rows, load_packages, usable_providers
from .load_plan import Endpoint, draw_arrivals, draw_prompts, read_prompts, read_tokenizer
from .load_stats import load_tables, summarise
from .plan_step import plan_step
from .plan_table import plan_tables
from .processes import join_processes, rank_here
from .profile import filled_state, profile_step, profile_table, write_trace
from .records import diff_tables, read_pairs, read_run, record_run, row_independent
from .score import Score, score_text
from .terminal import INTERRUPTED, STDIN, decode_text, progress_bar, read_text, table_console, write_text
from .trace_page import trace_page
from .trace_run import history_prompts, parse_histories, token_texts, trace_run
from .trace_text import batch_table, pool_table, stage_table

__all__ = ["app", "main"]

_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""What every complaint about arguments is; typer does not export it."""


class _Commands(TyperGroup):
    """The commands, with every expected error as one message on standard error and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and end the process with its exit code."""
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except _USAGE_ERROR as error:
            code = _complain(_usage_message(error), 2)
        except PurestepError as error:
            code = _complain(str(error), 1 if isinstance(error, RuntimeError) else 2)
        except (OSError, RuntimeError, MemoryError) as error:
            code = _complain(f"{type(error).__name__}: {error}", 1)
        if code == INTERRUPTED:
            typer.echo(err=True)
        sys.exit(code or 0)


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)

ModelName = Annotated[str, typer.Option("--model", help='"tiny", or the folder of a checkpoint.')]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; default the checkpoint's own.")]
Kernels = Annotated[str | None, typer.Option(help="reference, fused or ascend; default the fastest that fits.")]
Chip = Annotated[str | None, typer.Option(help="a2, a3 or a5; with Ascend kernels.")]


NumericsName = Annotated[
    str | None,
    typer.Option(
        "--numerics",
        help="Whose roundings: plain, official, transformers, sglang, vllm-ascend or vllm-ascend-newest; default plain "
        "in float32, official in bfloat16.",
    ),
]
Caches = Annotated[
    str | None,
    typer.Option(help="Form of the caches: plain, online, fp8, fp8-online, fp4, fp4-online; default plain."),
]


def main() -> None:
    """Run the command that the arguments name."""
    try:
        app()
    finally:
        # What is pressed while the process ends changes nothing.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Show it.")] = False
) -> None:
    """DeepSeek-V4 decode as pure functions over immutable values."""
    if show_version:
        typer.echo(f"purestep {version('purestep')}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help='Text to continue; "-" or nothing: standard input, as it is.')
    ] = None,
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    numerics: NumericsName = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens from this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repeated tokens less likely.")] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="Taken off once for each time it was said.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off once if it was said.")] = 0.0,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End after this token; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at a stop token.")] = False,
    min_new_tokens: Annotated[int, typer.Option(help="Do not end before this many tokens.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="End after this many tokens.")] = 200,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text; drawn when not given.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts, speeds and the seed at the end.")] = False,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Write the prompt first.")] = False,
) -> None:
    """Continue a text, writing it as it comes."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    text = _prompt_text(STDIN if prompt is None else prompt)
    loaded = _load(model, dtype, kernels, chip, numerics)
    ids = _prompt_ids(loaded, text)
    if echo:
        write_text(text)
    rows = _stream(loaded, ids, params)
    if sys.stdout.isatty():
        typer.echo()
    if stats:
        Console(stderr=True).print(pairs_table("Statistics", [*rows, ("seed", str(params.seed))]))


@app.command()
def score(
    files: Annotated[list[str], typer.Argument(help='Texts in UTF-8; "-" is standard input.')],
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    numerics: NumericsName = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a window; default 512, or all of the model's.")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from window to window; default half a window.")] = None,
    batch: Annotated[int, typer.Option(help="Windows that run together.")] = 4,
    by_token: Annotated[
        bool, typer.Option("--by-token", help="Decode token by token instead of chunk by chunk.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write a line of JSON after the table.")] = False,
) -> None:
    """Measure how many bits a byte of text costs under the model, through the caches that decode uses."""
    texts = [(name, read_text(name)) for name in files]
    loaded = _load(model, dtype, kernels, chip, numerics)
    context = min(512, loaded.config.max_position_embeddings) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    scores = []
    for name, text in texts:
        with progress_bar(name) as report:
            scores.append(
                score_text(
                    loaded, text, context=context, stride=stride, batch=batch, by_token=by_token, progress=report
                )
            )
    total = sum(scores, Score(0, 0, 0.0))
    table_console().print(_score_table([*zip(files, scores, strict=True), *[("total", total)][: len(files) - 1]]))
    if as_json:
        found = {"model": model, "context": context, "stride": stride, "total": _score_fields(total)}
        found["files"] = [{"file": name, **_score_fields(one)} for name, one in zip(files, scores, strict=True)]
        typer.echo(json.dumps(found))


@app.command()
def info(
    model: Annotated[str, typer.Argument(help='"tiny", or a folder with a config.json.')] = "tiny",
    context: Annotated[int | None, typer.Option(help="Tokens a request; default 4096, or all of the model's.")] = None,
    requests: Annotated[int, typer.Option(help="Requests that a state has room for.")] = 1,
    caches: Caches = None,
) -> None:
    """Show a model's configuration, layers, parameters, files, cache sizes and the memory that it needs."""
    form = "plain" if caches is None else _form(caches)
    for table in info_tables(_folder(model), context=context, requests=requests, form=form):
        table_console().print(table)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option("--model", help='"flash", "pro", "tiny", or a folder with a config.json.')
    ] = "flash",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks in all.")] = 16,
    dp: Annotated[int, typer.Option(min=1, help="Replicas of the attention; the others of a replica share it.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Deal whole experts to the ranks instead of slices.")] = False,
    dcp: Annotated[bool, typer.Option("--dcp", help="Deal the caches to the ranks of a replica.")] = False,
    dp_lm_head: Annotated[bool, typer.Option("--dp-lm-head", help="Split the head over a replica only.")] = False,
    lm_head_all_to_all: Annotated[
        bool, typer.Option("--lm-head-all-to-all", help="Exchange logits; where every rank is a replica.")
    ] = False,
    chip: Annotated[str, typer.Option(help="What a rank runs on: 910c (one die), h100 or h200.")] = "910c",
    requests: Annotated[int, typer.Option(min=1, help="Requests that every replica decodes.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 131072,
    weights: Annotated[str, typer.Option(help="released (FP8 and FP4 with scales) or bf16.")] = "released",
) -> None:
    """Show what a decode step costs over many ranks, from a run on tensors without content."""
    if chip not in CHIPS:
        raise ConfigError(f"chip: expected one of {', '.join(CHIPS)}, got {chip!r}", field="chip")
    if ranks % dp:
        raise ConfigError(f"ranks: expected a multiple of dp = {dp}, got {ranks}", field="ranks")
    config = RELEASED[model] if model in RELEASED else read_config(_folder(model))
    parallel = Parallel(
        tp=ranks // dp,
        dp=dp,
        ep=ranks if ep else 1,
        moe="ep" if ep else "tp",
        dcp=ranks // dp if dcp else 1,
        dp_lm_head=dp_lm_head,
        lm_head_all_to_all=lm_head_all_to_all,
    )
    found = plan_step(config, parallel, requests=requests, context=context, weights=weights)
    for table in plan_tables(found, config, CHIPS[chip], chip):
        table_console().print(table)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write to; an interrupted conversion goes on.")],
    form: Annotated[str | None, typer.Option(help="fp4, fp8, bf16 or f32; default the one that it has.")] = None,
    names: Annotated[str, typer.Option(help="official or transformers.")] = "official",
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Start a new file before one gets bigger.")] = 5 * 10**9,
) -> None:
    """Write a checkpoint in another form or under other names, with checksums, one tensor in memory at a time."""
    with progress_bar("converting") as report:
        convert_checkpoint(
            _folder(source), out, form=form, names=names, max_shard_bytes=max_shard_bytes, progress=report
        )
    typer.echo(f"{out}: written; check it with: sha256sum -c {SUMS_FILE}", err=True)


@app.command()
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    source: Annotated[str | None, typer.Option(help="Take a part of this checkpoint; default random weights.")] = None,
    like: Annotated[
        str, typer.Option(help="Shape of random weights: toy, flash, pro, or a folder with a config.json.")
    ] = "toy",
    layers: Annotated[str | None, typer.Option(help="Layers to keep, such as 0,2-3; default all.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Routed experts to keep; default all.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens to keep; default all.")] = None,
    form: Annotated[str | None, typer.Option(help="fp4, fp8, bf16 or f32; default the source's, or fp4.")] = None,
    names: Annotated[str, typer.Option(help="official or transformers.")] = "official",
    draft: Annotated[bool, typer.Option("--draft", help="Draw a draft block too.")] = False,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Start a new file before one gets bigger.")] = 5 * 10**9,
) -> None:
    """Write a small checkpoint: some layers, experts and tokens of a real one, or random weights of its shape."""
    with progress_bar("writing") as report:
        config = make_tiny_checkpoint(
            out,
            source=None if source is None else _folder(source),
            like=like,
            layers=None if layers is None else parse_layers(layers),
            experts=experts,
            vocab=vocab,
            form=form,
            names=names,
            draft=draft,
            seed=seed,
            max_shard_bytes=max_shard_bytes,
            progress=report,
        )
    typer.echo(f"{out}: layers: {config.num_hidden_layers}, experts: {config.n_routed_experts}", err=True)


@app.command()
def kernels(
    chip: Annotated[str, typer.Option(help="a2 (910B), a3 (910C) or a5 (950).")] = "a3",
    self_test: Annotated[bool, typer.Option("--self-test", help="Run every kernel against the reference.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
) -> None:
    """Show what runs each operator on an Ascend chip, or check the kernels of this machine."""
    packages = load_packages()
    installed = installed_schemas()
    rows = kernel_rows(chip, installed)
    providers = usable_providers(chip, installed) if self_test else None
    if self_test and providers is None:
        raise ConfigError(
            "kernels: expected some Ascend operators to check, got none registered; see 'purestep kernels'"
        )
    device = kernel_device()
    facts = machine_facts(packages, chip, device)
    verdicts = () if providers is None else run_checks(providers, device)
    if as_json:
        typer.echo(json.dumps(report_fields(facts, rows, verdicts), indent=2))
    else:
        for table in (pairs_table("Machine", facts.items()), kernel_table_view(rows)):
            table_console().print(table)
        if verdicts:
            table_console().print(verdict_table(verdicts))
    if any(one.verdict in ("fails", "error") for one in verdicts):
        raise typer.Exit(1)


@app.command()
def profile(
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU; default torch's own choice.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write every operator of one step, for chrome://tracing or Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one line of JSON instead of the table.")] = False,
) -> None:
    """Show where the time of a decode step goes, stage by stage."""
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = _load(model, dtype, kernels, chip)
    with progress_bar("prompts") as report:
        state = filled_state(loaded, batch, context, room=steps + 4, progress=report)
    found = profile_step(loaded, state, steps)
    if trace is not None:
        write_trace(loaded, state, trace)
        typer.echo(f"wrote {trace}; open it in https://ui.perfetto.dev", err=True)
    if as_json:
        typer.echo(json.dumps(attrs.asdict(found)))
    else:
        table_console().print(profile_table(found))


@app.command()
def bench(
    case: Annotated[str, typer.Option(help="tiny, small or flash-slice.")] = "small",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of a step; repeat it. Default 1, 4, 16, 32.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens before them; repeat it. Default 128, 1024, 8192.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each engine.")] = 12,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU; default torch's own choice.")] = None,
    kernels: Kernels = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Step by compiled graphs, and eagerly beside them.")
    ] = True,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Measure beside transformers.")] = True,
    pool_scale: Annotated[int, typer.Option(min=1, help="Also step in pools so many times larger.")] = 1,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the curves with floor and peer: a name ending in .png or .svg.")
    ] = None,
) -> None:
    """Measure decode steps beside transformers and beside what the machine allows; JSON lines on standard output."""
    if threads is not None:
        torch.set_num_threads(threads)
    found = []
    with progress_bar("measuring") as report:
        timings = time_decode(
            case,
            dtype,
            batches=batch or (1, 4, 16, 32),
            contexts=context or (128, 1024, 8192),
            rounds=rounds,
            kernels=kernels,
            is_compiled=compiled,
            has_peer=peer,
            pool_scale=pool_scale,
            progress=report,
        )
        for timing in timings:
            found.append(timing)
            typer.echo(json.dumps(attrs.asdict(timing)))
    Console(stderr=True, width=None if sys.stderr.isatty() else 160).print(
        bench_table(found, torch.get_num_threads(), rounds)
    )
    if picture is not None:
        draw_timings(found, picture)
        typer.echo(f"wrote {picture}", err=True)


@app.command()
def record(
    prompts: Annotated[list[str], typer.Argument(help="Texts that run together as requests 0, 1, ...")],
    out: Annotated[Path, typer.Argument(help="Folder that the run is written to.")],
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    invariant: Annotated[bool, typer.Option("--invariant", help="Compute every row alone, bit for bit.")] = False,
    stages: Annotated[
        str | None, typer.Option(help="Stages to keep, like attn.input,3.ffn.output; default all of all layers.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that every request samples.")] = 8,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request fed at once.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Sample with it; default always the likeliest token.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is in the folder.")] = False,
) -> None:
    """Run prompts as one batch and write what every step computes, for "purestep diff"."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"OUT: expected a folder to write to, got the file {out}", field="out", got=out)
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise RequestError(
            f"OUT: expected a new or empty folder, got {out}, which holds files; choose another, or replace the "
            "run in it with --overwrite",
            field="out",
            got=out,
        )
    texts = [_prompt_text(prompt) for prompt in prompts]
    loaded = _load(model, dtype, kernels, chip)
    if invariant:
        loaded = row_independent(loaded, kernels)
    ids = [_prompt_ids(loaded, text) for text in texts]
    names = STAGES if stages is None else stages.split(",")
    with progress_bar("steps") as report:
        run = record_run(loaded, ids, stages=names, new_tokens=new_tokens, chunk=chunk, seed=seed, progress=report)
    save_run(run, out)
    typer.echo(f"{out}: requests: {len(ids):,}, steps: {len(run):,}", err=True)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="Folder of the first run.")],
    b: Annotated[str, typer.Argument(help="Folder of the second run.")],
    atol: Annotated[float, typer.Option(help="Numbers agree up to this difference ...")] = 0.0,
    rtol: Annotated[float, typer.Option(help="... plus this share of the larger of them.")] = 0.0,
    pairs: Annotated[
        list[str] | None,
        typer.Option("--map", help="Compare request 0 of A with 1 of B: 0:1; may be repeated."),
    ] = None,
) -> None:
    """Show the first step, layer, stage and number in which two recorded runs differ; exit code 1 if they do."""
    runs = read_run(a), read_run(b)
    found = compare_runs(*runs, atol=atol, rtol=rtol, requests=read_pairs(pairs or ()))
    for table in diff_tables((a, b), runs, found):
        table_console().print(table)
    if found.difference is not None:
        raise typer.Exit(1)
    typer.echo("no difference")


@app.command()
def trace(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to start from, in place of --histories.")] = None,
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    histories: Annotated[str, typer.Option(help="Tokens that every request has at the start.")] = "10,7,20",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to trace.")] = 4,
    page_size: Annotated[int, typer.Option(help="Tokens per page, a multiple of 4.")] = 4,
    all_stages: Annotated[
        bool, typer.Option("--all-stages", help="Show the stages of every step, not of the first alone.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that draws the steps.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
) -> None:
    """Show what decode steps do: which request, which position, which slot is read, which is written."""
    for name, file in (("html", html), ("json", as_json)):
        if file is not None and not file.parent.is_dir():
            raise RequestError(f"{name}: expected a file in a folder that exists, got {file}", field=name, got=file)
    texts, lengths = [_prompt_text(prompt) for prompt in prompts or ()], parse_histories(histories)
    loaded = _load(model, dtype, kernels, chip)
    ids = [_prompt_ids(loaded, text) for text in texts] or history_prompts(loaded, lengths)
    with progress_bar("steps") as report:
        traces = trace_run(loaded, ids, steps=steps, page_size=page_size, progress=report)
    token_text = token_texts(loaded)
    if html is not None:
        about = f"{model}: {steps} decode steps of {len(ids)} requests, pages of {page_size} tokens"
        html.write_text(trace_page(traces, about=about, token_text=token_text), encoding="utf-8")
    if as_json is not None:
        as_json.write_text(json.dumps([attrs.asdict(one) for one in traces]), encoding="utf-8")
    for number, one in enumerate(traces, 1):
        tables = [batch_table(one, number, token_text), pool_table(one)]
        for table in [*tables, stage_table(one)] if all_stages or number == 1 else tables:
            table_console().print(table)


@app.command()
def serve(
    model: ModelName = "tiny",
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model; default --model as given.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all, others than this machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="PURESTEP_API_KEY", help="Requests must carry it as a bearer token.")
    ] = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    numerics: NumericsName = None,
    caches: Caches = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share one replica's attention; tp * dp in all.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Replicas of the attention, with requests of their own.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that whole experts are dealt to: all of them, or 1.")] = 1,
    dcp: Annotated[int, typer.Option(min=1, help="Ranks that caches are dealt to: all of a replica, or 1.")] = 1,
    dp_lm_head: Annotated[bool, typer.Option("--dp-lm-head", help="Split the head over a replica only.")] = False,
    lm_head_all_to_all: Annotated[
        bool, typer.Option("--lm-head-all-to-all", help="Exchange logits where rows are equal; tp 1.")
    ] = False,
    sync_token_ids: Annotated[
        bool,
        typer.Option(envvar="SYNC_TOKEN_IDS_ACROSS_TP", help="Let a replica's ranks agree on every token."),
    ] = False,
    rank_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a rank waits for the others.")] = 60.0,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Compute every row alone, bit for bit, whatever it is batched with.")
    ] = False,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 8,
    max_queued_requests: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 64,
    max_total_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the caches hold; default what all running requests need.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens a request; default 4096, or all of the model's.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens per page, a multiple of 4.")] = 128,
    chunked_prefill_size: Annotated[int, typer.Option(min=1, help="Tokens that a step feeds at most.")] = 512,
    max_reused_prefixes: Annotated[int, typer.Option(min=0, help="Prefixes kept for reuse; 0 keeps none.")] = 8,
    compile_for: Annotated[
        list[str] | None,
        typer.Option(
            "--compile",
            metavar="ROWSxTOKENS",
            help="Compile decode steps of so many requests, each of so many tokens at most; repeat it. Takes a minute "
            "each the first time, seconds later, and needs a C++ compiler.",
        ),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Whether chats that do not say think.")
    ] = False,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Of a request; more gets 413.")] = 4 * 1024 * 1024,
    stall_seconds: Annotated[float, typer.Option(min=0.1, help="Without progress, then /health fails.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="For running requests to end at shutdown.")] = 30.0,
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="A line of JSON for every request.")
    ] = True,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Put prompts into the log.")] = False,
    debug_invariants: Annotated[
        bool, typer.Option("--debug-invariants", help="Check the whole state after every step; slow.")
    ] = False,
) -> None:
    """Serve a model over HTTP, with the endpoints of OpenAI's interface; over several ranks, under torchrun."""
    startup, site, engine = (_optional(name) for name in ("startup", "protocol_site", "engine"))
    parallel = Parallel(
        tp=tp,
        dp=dp,
        ep=ep,
        moe="ep" if ep > 1 else "tp",
        dcp=dcp,
        dp_lm_head=dp_lm_head,
        lm_head_all_to_all=lm_head_all_to_all,
        sync_token_ids=sync_token_ids,
        timeout_s=rank_timeout,
    )
    if rank_here() == 0:
        check_address(host, port)
    join_processes(parallel)
    loaded = _load(model, dtype, kernels, chip, numerics, parallel)
    if invariant:
        loaded = row_independent(loaded, kernels)
    longest = loaded.config.max_position_embeddings
    context = min(4096, longest) if context_length is None else context_length
    limits = engine.EngineLimits(
        running=max_running_requests,
        waiting=max_queued_requests,
        tokens=max_running_requests * context if max_total_tokens is None else max_total_tokens,
        context=context,
        page_size=page_size,
        caches=None if caches is None else _form(caches),
        budget=chunked_prefill_size,
        points=max_reused_prefixes,
        checks_invariants=debug_invariants,
    )
    compiled = _compiled(loaded, compile_for, limits.page_size, limits.caches) if compile_for else None
    if loaded.ranks.world.rank:
        _optional("rank_engine").serve_rank(loaded, limits)
        return
    for field, given in (("api_key", api_key), ("served_model_name", served_model_name)):
        if given == "":
            raise RequestError(f"{field}: expected some text, got none; leave it out to have none", field=field)
    settings = site.Settings(
        name=model if served_model_name is None else served_model_name,
        context=min(context, limits.tokens),
        thinking=thinking,
        api_key=api_key,
        most_generations=limits.running + limits.waiting,
        body_bytes=max_body_bytes,
        stall_seconds=stall_seconds,
        drain_seconds=drain_seconds,
        log=startup.log_line if log_requests or log_prompts else None,
        log_prompts=log_prompts,
    )
    show = Console(stderr=True).print
    asyncio.run(startup.run_server(loaded, limits, settings, host=host, port=port, show=show, compiled=compiled))


@app.command()
def chat(
    model: ModelName = "tiny",
    dtype: Dtype = None,
    kernels: Kernels = None,
    chip: Chip = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Whether the model thinks before it replies.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens from this share of the likeliest.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="End a reply after this many tokens; default when the context is full.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same replies; drawn when not given.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the whole chat; default 4096, or all of the model's.")
    ] = None,
) -> None:
    """Chat in the terminal; in a pipe every line is what the user says next."""
    terminal, engine = (_optional(name) for name in ("talk_terminal", "engine"))
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_tokens,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    if system:
        system = decode_text("system", os.fsencode(system))
    loaded = _load(model, dtype, kernels, chip)
    longest = loaded.config.max_position_embeddings
    context = min(4096, longest) if context_length is None else context_length
    # Room for a chat, and for the reusable prefixes of what it said before.
    limits = engine.EngineLimits(running=1, tokens=2 * context, context=context)
    if not terminal.run_chat(loaded, limits, params, system=system, thinking=thinking):
        raise typer.Exit(1)


@app.command("bench-serve")
def bench_serve(
    base_url: Annotated[
        str | None, typer.Option(help="Server to load; default one of its own, which ends with the test.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Whom to ask; default the server's first. Own server: what it serves.")
    ] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="Where requests go.")] = Endpoint.COMPLETIONS,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests; default 100, or all of the dataset.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "--max-concurrency", min=1, help="Closed loop: so many clients; default 8."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: requests a second, a Poisson process.")
    ] = None,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens of a random prompt.")
    ] = 128,
    output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", min=1, help="Tokens of a reply at most.")
    ] = 64,
    shared_prefix_len: Annotated[
        int,
        typer.Option(
            "--shared-prefix-len", "--random-prefix-len", min=0, help="Tokens before them, the same in all prompts."
        ),
    ] = 0,
    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", "--dataset-path", help='Lines of JSON: {"prompt": ..., "max_tokens": ...}.'),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help='Whose tokens random prompts are counted in: "tiny", or a folder.')
    ] = "tiny",
    temperature: Annotated[float, typer.Option(min=0.0, help="Of all requests.")] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for replies of full length, which not every server can; default with an own server.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts and arrivals.")] = 0,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests sent first and not measured.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one line of JSON; tables go to standard error.")
    ] = False,
) -> None:
    """Load a server with requests and measure how fast it answers."""
    run, client = (_optional(name) for name in ("load_run", "load_client"))
    if concurrency is not None and request_rate is not None:
        raise RequestError("request_rate: expected this or concurrency, got both; leave one out", field="request_rate")
    drawn = draw_prompts(
        read_tokenizer(model_folder(tokenizer)),
        num_warmups + (num_prompts or 100),
        input_len=input_len,
        output_len=output_len,
        shared_prefix_len=shared_prefix_len,
        seed=seed,
    )
    warmups, prompts = drawn[:num_warmups], drawn[num_warmups:]
    if dataset is not None:
        prompts = read_prompts(dataset, num_prompts, output_len=output_len)
    clients = (concurrency or 8) if request_rate is None else None
    server = None
    if base_url is None:
        model, longest = model or "tiny", shared_prefix_len + input_len + output_len
        server = run.server_arguments(
            model, running=clients or 32, waiting=len(prompts), tokens=longest if dataset is None else None
        )
    target = client.Target(
        base_url=(base_url or "").rstrip("/").removesuffix("/v1"),
        model=model or "",
        endpoint=endpoint,
        temperature=temperature,
        ignore_eos=server is not None if ignore_eos is None else ignore_eos,
        api_key=api_key,
        timeout_s=timeout,
    )
    with progress_bar("requests") as report:
        target, outcomes = run.run_bench(
            target,
            prompts,
            warmups,
            concurrency=clients,
            arrivals=None if request_rate is None else draw_arrivals(len(prompts), rate=request_rate, seed=seed),
            server=server,
            progress=report,
        )
    found = summarise(outcomes)
    shown = Console(stderr=True) if as_json else table_console()
    for table in load_tables(found, outcomes):
        shown.print(table)
    if as_json:
        asked = {"endpoint": endpoint.value, "concurrency": clients, "request_rate_per_s": request_rate}
        asked |= {"base_url": target.base_url, "model": target.model, "requests": len(prompts), "seed": seed}
        typer.echo(json.dumps(asked | found))
    if not found["completed_requests"]:
        raise typer.Exit(1)


def _optional(name: str) -> ModuleType:
    """Import a module that needs more than the base installation."""
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command: expected the libraries of the server, got none named {error.name!r}; "
            'install them, in the folder of the repository, with: pip install ".[serving]"',
            field="serve",
        ) from error


def _stream(model: Model, ids: list[int], params: SamplingParams) -> list[tuple[str, str]]:
    """Write a continuation as it comes; return what is to be said about the run."""
    decoder = DecodeStream(skip_special_tokens=True)
    began = time.perf_counter()
    with progress_bar("prompt") as report:
        outputs = generate_tokens(model, ids, params, progress=report)
        first = next(outputs)
    prefilled = time.perf_counter()
    n_new, finished = 0, first.finished
    for out in chain((first,), outputs):
        write_text(decoder.step(model.tokenizer, out.next_token_ids[0]) or "")
        n_new, finished = n_new + 1, out.finished
    ended = time.perf_counter()
    # The token sampled last is not fed any more.
    n_fed = len(ids) + n_new - 1
    cache = sum(cost.fixed + cost.per_token * n_fed for cost in cache_costs(model.config, model.dtype).values())
    return [
        ("prompt tokens", f"{len(ids):,}"),
        ("prefill tokens/s", f"{len(ids) / (prefilled - began):,.1f}"),
        ("new tokens", f"{n_new:,}"),
        ("decode tokens/s", f"{(n_new - 1) / (ended - prefilled):,.1f}" if n_new > 1 else "-"),
        ("finish reason", finished[first.request_ids[0]]),
        (f"cache bytes of {n_fed:,} tokens", show_bytes(cache)),
    ]


def _form(name: str) -> CacheForm:
    for form in CACHE_FORMS:
        if form == name:
            return form
    names = ", ".join(CACHE_FORMS)
    raise ConfigError(f"caches: expected one of {names}, got {name!r}", field="caches", expected=names, got=name)


def _load(
    name: str,
    dtype: str | None,
    kernels: str | None,
    chip: str | None,
    numerics: str | None = None,
    parallel: Parallel | None = None,
) -> Model:
    _folder(name)
    chosen = None if numerics is None else Numerics.named(numerics)
    with warnings.catch_warnings(record=True) as notes, progress_bar("loading") as report:
        warnings.simplefilter("always", CheckpointNote)
        model = load_model(
            name, dtype=dtype, numerics=chosen, kernels=kernels, chip=chip, parallel=parallel, progress=report
        )
        check_output(model)
    for note in notes:
        typer.echo(f"note: {note.message}", err=True)
    return model


def _compiled(model: Model, given: Sequence[str], page_size: int, caches: CacheForm | None) -> CompiledStep:
    """Compile the decode step for buckets that are written as ROWSxTOKENS."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", one) for one in given]
    if None in found:
        raise ConfigError(
            f"compile: expected ROWSxTOKENS such as 16x2048, got {', '.join(given)}; repeat --compile for several",
            field="compile",
            expected="ROWSxTOKENS",
            got=list(given),
        )
    buckets = [(int(one[1]), int(one[2])) for one in found if one is not None]
    typer.echo(f"compiling decode steps for {', '.join(given)}", err=True)
    with progress_bar("compiling") as report:
        return compile_step(model, buckets, page_size=page_size, caches=caches, progress=report)


def _folder(name: str) -> Path:
    folder = model_folder(name)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f'model: expected "tiny" or a folder with a {CONFIG_FILE}, got {name!r}, which has none', field="model"
        )
    return folder


def _prompt_ids(model: Model, text: str) -> list[int]:
    ids, most = prompt_ids(model, text), model.config.max_position_embeddings
    if len(ids) > most:
        raise RequestError(
            f"prompt: expected at most the model's {most} positions, got {len(ids)} tokens; shorten it",
            field="prompt",
            expected=f"<= {most} tokens",
            got=len(ids),
        )
    return ids


def _prompt_text(prompt: str) -> str:
    return read_text(STDIN) if prompt == STDIN else decode_text("prompt", os.fsencode(prompt))


def _score_table(rows: Iterable[tuple[str, Score]]) -> Table:
    table = Table()
    table.add_column("file", overflow="fold")
    for column in ("bytes", "tokens", "bits per byte", "bits per token", "perplexity"):
        table.add_column(column, justify="right")
    for name, one in rows:
        fields = (f"{one.n_bytes:,}", f"{one.n_tokens:,}", f"{one.bits_per_byte:.4f}", f"{one.bits_per_token:.4f}")
        table.add_row(escape(name), *fields, f"{one.perplexity:.4f}")
    return table


def _score_fields(one: Score) -> dict[str, Any]:
    derived = ("bits_per_byte", "bits_per_token", "perplexity")
    return {**attrs.asdict(one), **{name: getattr(one, name) for name in derived}}


def _usage_message(error: Any) -> str:
    """Put a complaint about arguments into one line, with the command whose help explains them."""
    command = error.ctx.command_path if error.ctx else "purestep"
    return f"{' '.join(error.format_message().split()).rstrip('.')}; see '{command} --help'"


def _complain(message: str, code: int) -> int:
    typer.echo(message, err=True)
    return code
