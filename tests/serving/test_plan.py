"""Plans of the released models: they agree with the sizes of their files, with counted FLOPs, and with real steps."""

from __future__ import annotations

import purestep as ps
import pytest
import torch
from kit.rank_plan import CONTEXT, REQUESTS, watched_step
from kit.ranks import rank_pool
from purestep.model.layout import parameter_count
from purestep.serving.chips import CHIPS
from purestep.serving.cli import app
from purestep.serving.costs import cache_costs
from purestep.serving.plan_step import StepPlan, plan_step, step_seconds, tokens_that_fit
from purestep.state.released import RELEASED
from typer.testing import CliRunner

FLASH, PRO = RELEASED["flash"], RELEASED["pro"]


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, int, int, str], StepPlan]:
    return {
        (name, tp, dp, moe): plan_step(
            RELEASED[name], ps.Parallel(tp=tp, dp=dp, moe=moe, ep=tp * dp if moe == "ep" else 1)
        )
        for name in ("flash", "pro")
        for tp, dp, moe in ((1, 1, "tp"), (16, 1, "tp"), (4, 4, "ep"))
    }


def test_the_released_numbers_are_the_releases() -> None:
    """Parameters of the two models are those of the sheet: 284,332,240,471 and 1,572,997,201,763."""
    assert [parameter_count(config) for config in (FLASH, PRO)] == [284_332_240_471, 1_572_997_201_763]


@pytest.mark.parametrize(
    ("name", "total", "draft"),
    [("flash", 159_609_485_896, 3_593_787_756), ("pro", 864_704_792_696, 13_956_587_692)],
)
def test_weights_are_those_of_the_files(
    plans: dict[tuple[str, int, int, str], StepPlan], name: str, total: int, draft: int
) -> None:
    """One rank's weights in released formats are the files without the draft block; 16 ranks hold little twice."""
    assert plans[name, 1, 1, "tp"].weights == total - draft
    for layout in ((16, 1, "tp"), (4, 4, "ep")):
        assert total - draft < 16 * plans[name, *layout].weights < 1.4 * total


@pytest.mark.parametrize(
    ("name", "context", "gflop"),
    [
        *(("flash", t, g) for t, g in ((2048, 28.9), (8192, 29.5), (131072, 42.6), (1048576, 140.3))),
        *(("pro", t, g) for t, g in ((8192, 109.3), (131072, 132.2))),
    ],
)
def test_flops_are_those_of_the_sheet(name: str, context: int, gflop: float) -> None:
    """A token's FLOPs agree with the sheet's arithmetic within 3 percent, at every length."""
    found = plan_step(RELEASED[name], ps.Parallel(), requests=1, context=context)
    assert found.flops / 1e9 == pytest.approx(gflop, rel=0.03)


def test_caches_grow_as_the_sheet_says(plans: dict[tuple[str, int, int, str], StepPlan]) -> None:
    """A token of context takes 6,880 and 9,848 bytes in bfloat16; pools hold that, rounded up to pages."""
    assert plans["flash", 16, 1, "tp"].per_token == 6880
    assert plans["pro", 16, 1, "tp"].per_token == 9848
    for (name, *_), plan in plans.items():
        costs = cache_costs(RELEASED[name], torch.bfloat16).values()
        least = plan.requests * sum(cost.per_token * plan.context + cost.fixed for cost in costs)
        assert least < sum(plan.caches.values()) < 1.2 * least


def test_a_step_of_tensor_parallel_ranks_exchanges_what_its_layers_say(
    plans: dict[tuple[str, int, int, str], StepPlan],
) -> None:
    """Flash over 16: embedding, 43 attentions, 21 index scores, 43 expert sums are reduced, one head is gathered."""
    plan = plans["flash", 16, 1, "tp"]
    reduces, (gather,) = (
        [one for one in plan.collectives if one.name == name] for name in ("all-reduce", "all-gather")
    )
    assert [one.count for one in reduces] == [1 + 43 + 21 + 43]
    rows = 8 * 4096
    assert reduces[0].operand == rows * 2 * (1 + 43) + rows * 4 * 43 + 21 * 8 * 32768 * 4
    assert (gather.count, gather.operand) == (1, 8 * 129280 // 16 * 4)
    assert plans["flash", 1, 1, "tp"].collectives == ()


def test_work_is_shared(plans: dict[tuple[str, int, int, str], StepPlan]) -> None:
    """16 ranks of one replica compute far less than one rank; what is read at 16 is a share of what one reads."""
    for name in ("flash", "pro"):
        one, many = plans[name, 1, 1, "tp"], plans[name, 16, 1, "tp"]
        assert one.flops / 16 < many.flops < one.flops / 6
        assert one.weights_read / 16 < many.weights_read < one.weights_read / 6
        assert many.scratch < one.scratch


def test_bytes_read_are_those_of_the_sheet(plans: dict[tuple[str, int, int, str], StepPlan]) -> None:
    """With 8 requests a step reads 33.2 GB of Flash's weights and 124.1 GB of Pro's."""
    assert plans["flash", 1, 1, "tp"].weights_read / 1e9 == pytest.approx(33.2, rel=0.01)
    assert plans["pro", 1, 1, "tp"].weights_read / 1e9 == pytest.approx(124.1, rel=0.01)


def test_what_fits_follows_from_the_chip(plans: dict[tuple[str, int, int, str], StepPlan]) -> None:
    """Where weights exceed the memory nothing fits; more memory fits more, up to the model's positions."""
    die, gpu = CHIPS["910c"], CHIPS["h200"]
    assert tokens_that_fit(plans["flash", 1, 1, "tp"], die, FLASH) == 0
    plan = plans["pro", 16, 1, "tp"]
    few, many = (tokens_that_fit(plan, chip, PRO) for chip in (die, gpu))
    assert 0 < few < many <= PRO.max_position_embeddings
    used = plan.weights + plan.scratch + plan.requests * (few * plan.per_token + 8_000_000 + 18_710_528)
    assert used <= die.memory + 1e9
    compute, read, sent = step_seconds(plan, die)
    assert 0 < compute < read
    assert sent > 0


def test_the_plan_is_the_step_that_runs() -> None:
    """What a plan of a tiny model counts is what real ranks exchange in a real step, call by call and byte by byte."""
    tiny = ps.load_model("tiny").config
    with rank_pool(2) as pool:
        for parallel in (ps.Parallel(tp=2), ps.Parallel(dp=2), ps.Parallel(dp=2, ep=2, moe="ep", capacity=2)):
            found = pool.same(watched_step, parallel)
            planned = plan_step(tiny, parallel, requests=REQUESTS, context=CONTEXT).collectives
            assert found == [planned] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chip", "abacus"], "expected one of 910c"),
        (["--ranks", "16", "--dp", "3"], "multiple of dp"),
        (["--ranks", "3"], "evenly"),
        (["--weights", "gold"], "expected one of bf16, released"),
        (["--context", "2000000"], "expected 2 to 1048576"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments: list[str], words: str) -> None:
    """Unknown chips and formats, and layouts that the model cannot be cut for, are wrong arguments."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_the_command_shows_a_plan() -> None:
    """``purestep plan`` prints weights, caches, collectives and times of the layout asked for."""
    done = CliRunner().invoke(app, ["plan", "--ranks", "16", "--dp", "4", "--ep", "--chip", "910c"])
    assert done.exit_code == 0
    for words in ("tp=4 dp=4 ep=16", "12,869,917,468", "all-to-all", "context that fits", "reading memory"):
        assert words in done.output
