"""Expert-parallel dispatch and combine, for every rank of a communicator in one process.

A ``Group`` is a value that holds what every rank puts in, so each rank's call can be answered in turn::

    group = Group(x=(x0, x1), expert_ids=(ids0, ids1))
    with simulate(groups={"ep": group}):
        received = [torch.ops.npu.npu_moe_distribute_dispatch_v2(group.x[r], group.expert_ids[r], "ep", 2, r, 8)
                    for r in range(2)]
    group = attrs.evolve(group, outputs=tuple(run_experts(*received[r]) for r in range(2)))
    with simulate(groups={"ep": group}):
        sums = [torch.ops.npu.npu_moe_distribute_combine_v2(group.outputs[r], ...) for r in range(2)]

A communicator without a ``Group`` has one rank. Rules: kernel sheet 7.3, and the shape functions of torch-npu 2.13.0.
Rows come expert by expert, then rank by rank, then in order of token; what no row was sent to is undefined there and
poisoned here. The operands that only carry the way back are opaque: they must come from the same dispatch.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from ascend_sim.products import quantise_rows
from ascend_sim.routing import poison
from ascend_sim.rules import Kernel, SimulatorError, Site
from torch import Tensor

__all__ = ["KERNELS", "Group"]

_FLOATS = (torch.bfloat16, torch.float16)
_ASSIST = 128


@attrs.frozen(eq=False, kw_only=True)
class Group:
    """What every rank of one communicator puts in.

    Attributes:
        x: rows of each rank.
        expert_ids: of the rows, i32[T,K].
        outputs: what each rank gives to combine: the rows it received, after its experts.
        active: truth mask over the rows, per rank, or nothing.
    """

    x: tuple[Tensor, ...]
    expert_ids: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    active: tuple[Tensor, ...] = ()

    def live(self, rank: int) -> int:
        """Count the rows of a rank that take part."""
        return int(self.active[rank].sum()) if self.active else len(self.x[rank])


@attrs.frozen(eq=False, kw_only=True)
class _Way:
    """One row's way: the place where it arrives and what it is."""

    expert: int
    rank: int
    row: int
    choice: int


def _arrivals(group: Group, rank: int, n_local: int) -> list[_Way]:
    """List what a rank receives, in order."""
    first = rank * n_local
    return [
        _Way(expert=expert, rank=source, row=row, choice=choice)
        for expert in range(first, first + n_local)
        for source in range(len(group.x))
        for row in range(group.live(source))
        for choice, wanted in enumerate(group.expert_ids[source][row].tolist())
        if wanted == expert
    ]


def _assist(ways: list[_Way], capacity: int) -> Tensor:
    """Write the ways down in a form that only combine reads: i32[A*128]."""
    out = poison((capacity, _ASSIST), torch.int32)
    for place, way in enumerate(ways):
        out[place, :3] = torch.tensor([way.rank, way.row, way.choice], dtype=torch.int32)
    return out.flatten()


def _counts(ways: list[_Way], first: int, n_local: int, n_ranks: int) -> Tensor:
    """Sum up what arrived, expert by expert and rank by rank: i32[experts*ranks]."""
    table = torch.zeros(n_local, n_ranks, dtype=torch.int32)
    for way in ways:
        table[way.expert - first, way.rank] += 1
    return table.flatten().cumsum(0).int()


_FIXED = {
    "expert_shard_type": 0,
    "shared_expert_rank_num": 0,
    "zero_expert_num": 0,
    "copy_expert_num": 0,
    "const_expert_num": 0,
    "group_tp": "",
    "tp_rank_id": 0,
    "comm_alg": "",
}


def _check_ranks(site: Site, rows: int, ids: Tensor, name: str, size: int, rank: int, n_experts: int, o: Any) -> None:
    """Require what dispatch and combine have in common."""
    for option, only in _FIXED.items():
        site.fixed(**{option: (o[option], only)})
    site.absent(elastic_info=o["elastic_info"], performance_info=o["performance_info"])
    site.require(o["tp_world_size"] in (0, 1), "no tensor-parallel ranks", o["tp_world_size"])
    site.require(0 < len(name) < 128, "group_ep the name of a communicator", name)
    lowest = 2 if site.rules.strict_sizes else 1
    site.require(lowest <= size <= 768, f"{lowest} to 768 ranks", size)
    site.require(0 <= rank < size, f"a rank below {size}", rank)
    site.require(0 < n_experts <= 1024, "1 to 1024 experts", n_experts)
    site.require(n_experts % size == 0, "as many experts on every rank", (n_experts, size))
    site.dtype("expert_ids", ids, torch.int32)
    site.require(ids.dim() == 2 and len(ids) == rows, f"expert_ids of shape [{rows},K]", tuple(ids.shape))
    site.require(ids.shape[1] <= min(16, n_experts), f"K in 1..{min(16, n_experts)}", ids.shape[1])
    inside = bool(((ids >= 0) & (ids < n_experts)).all())
    site.require(inside, f"expert ids below {n_experts}", ids.tolist())
    ordered = ids.sort(-1).values
    repeats = bool((ordered[:, 1:] == ordered[:, :-1]).any())
    site.require(not repeats, "no expert twice in a row", ids.tolist())
    most = 256 if site.rules.chip == "a2" else 512
    site.require(rows <= most, f"at most {most} rows", rows)


def _mask(site: Site, active: Tensor | None, rows: int) -> int:
    if active is None:
        return rows
    site.tensor("x_active_mask", active, torch.bool, (rows,))
    count = int(active.sum())
    site.require(bool(active[:count].all()), "x_active_mask with its true values first", active.tolist())
    return count


def _group(site: Site, name: str, size: int, rank: int, ids: Tensor, n_live: int, alone: Group) -> Group:
    """Find the communicator; require that it holds this rank's operands."""
    group: Group = site.rules.ranks.get(name, alone)
    site.require(len(group.x) == size, f"the {len(group.x)} ranks of communicator {name!r}", size)
    same = torch.equal(group.expert_ids[rank], ids) and group.live(rank) == n_live
    site.require(same, f"the ids and mask that communicator {name!r} holds for rank {rank}", "others")
    return group


def _capacity(site: Site, group: Group, size: int, global_bs: int, n_local: int, k: int) -> int:
    """Work out how many rows a rank may receive."""
    sizes = [len(x) for x in group.x]
    if len(set(sizes)) > 1:
        site.require(global_bs == max(sizes) * size, f"global_bs={max(sizes) * size}, as ranks differ", global_bs)
    site.require(global_bs in (0, max(sizes) * size), f"global_bs 0 or {max(sizes) * size}", global_bs)
    return max(sizes) * size * min(n_local, k)


def _dispatch(
    site: Site,
    *,
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: Tensor | None,
    expert_scales: Tensor | None,
    quant_mode: int,
    global_bs: int,
    expert_token_nums_type: int,
    **o: Any,
) -> tuple[Tensor, ...]:
    site.absent(**{name: o[name] for name in ("scales", "y_dtype", "x_dtype", "scales_dtype")})
    site.dtype("x", x, *_FLOATS)
    site.require(x.dim() == 2, "x of shape [T,H]", tuple(x.shape))
    site.require(not site.rules.strict_sizes or 1024 <= x.shape[1] <= 8192, "H in 1024..8192", x.shape[1])
    site.require(quant_mode in (0, 2), "quant_mode 0 or 2", quant_mode)
    site.require(expert_token_nums_type in (0, 1), "expert_token_nums_type 0 or 1", expert_token_nums_type)
    _check_ranks(site, len(x), expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, o)
    if site.rules.chip == "a2" or expert_scales is not None:
        site.tensor("expert_scales", expert_scales, torch.float32, expert_ids.shape)
    n_live = _mask(site, x_active_mask, len(x))
    masks = () if x_active_mask is None else (x_active_mask,)
    alone = Group(x=(x,), expert_ids=(expert_ids,), active=masks)
    group = _group(site, group_ep, ep_world_size, ep_rank_id, expert_ids, n_live, alone)
    site.require(torch.equal(group.x[ep_rank_id], x), f"the rows that {group_ep!r} holds for this rank", "others")
    n_local = moe_expert_num // ep_world_size
    capacity = _capacity(site, group, ep_world_size, global_bs, n_local, expert_ids.shape[1])
    ways = _arrivals(group, ep_rank_id, n_local)
    rows = torch.stack([group.x[way.rank][way.row] for way in ways]) if ways else x[:0]
    scales = poison((capacity,), torch.float32)
    if quant_mode == 2:
        rows, scales[: len(ways)] = quantise_rows(rows)
    received = poison((capacity, x.shape[1]), rows.dtype)
    received[: len(ways)] = rows
    first = ep_rank_id * n_local
    tokens = torch.tensor([sum(way.expert == first + e for way in ways) for e in range(n_local)])
    return (
        received,
        scales,
        _assist(ways, capacity),
        tokens if expert_token_nums_type else tokens.cumsum(0),
        _counts(ways, first, n_local, ep_world_size),
        torch.zeros(o["tp_world_size"], dtype=torch.int32),
        poison((0 if expert_scales is None else capacity,), torch.float32),
    )


def _fake_dispatch(
    site: Site,
    *,
    x: Tensor,
    expert_ids: Tensor,
    ep_world_size: int,
    moe_expert_num: int,
    quant_mode: int,
    global_bs: int,
    tp_world_size: int,
    expert_scales: Tensor | None,
    **_: object,
) -> tuple[Tensor, ...]:
    n_local, k = moe_expert_num // ep_world_size, expert_ids.shape[1]
    capacity = (global_bs or x.shape[0] * ep_world_size) * min(n_local, k)
    return (
        x.new_empty((capacity, x.shape[1]), dtype=torch.int8 if quant_mode else x.dtype),
        x.new_empty((capacity,), dtype=torch.float32),
        x.new_empty((capacity * _ASSIST,), dtype=torch.int32),
        x.new_empty((n_local,), dtype=torch.int64),
        x.new_empty((n_local * ep_world_size,), dtype=torch.int32),
        x.new_empty((tp_world_size,), dtype=torch.int32),
        x.new_empty((0 if expert_scales is None else capacity,), dtype=torch.float32),
    )


def _combine(
    site: Site,
    *,
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: Tensor | None,
    global_bs: int,
    comm_quant_mode: int,
    **o: Any,
) -> Tensor:
    unused = ("expand_scales", "shared_expert_x", "ori_x", "const_expert_alpha_1", "const_expert_alpha_2")
    site.absent(**{name: o[name] for name in (*unused, "const_expert_v", "tp_send_counts")})
    site.fixed(comm_quant_mode=(comm_quant_mode, 0))
    site.dtype("expand_x", expand_x, *_FLOATS)
    _check_ranks(site, len(expert_ids), expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, o)
    site.tensor("expert_scales", expert_scales, torch.float32, expert_ids.shape)
    n_live = _mask(site, x_active_mask, len(expert_ids))
    masks = () if x_active_mask is None else (x_active_mask,)
    alone = Group(x=(expert_ids,), expert_ids=(expert_ids,), outputs=(expand_x,), active=masks)
    group = _group(site, group_ep, ep_world_size, ep_rank_id, expert_ids, n_live, alone)
    if not group.outputs:
        raise SimulatorError(site.operator, f"outputs of every rank in communicator {group_ep!r}", "none")
    n_local = moe_expert_num // ep_world_size
    capacity = _capacity(site, group, ep_world_size, global_bs, n_local, expert_ids.shape[1])
    site.shape("expand_x", expand_x, (capacity, expand_x.shape[-1]))
    mine = _arrivals(group, ep_rank_id, n_local)
    known = torch.equal(assist_info_for_combine, _assist(mine, capacity))
    site.require(known, "assist_info_for_combine of the same dispatch", "another")
    counts = _counts(mine, ep_rank_id * n_local, n_local, ep_world_size)
    site.require(torch.equal(ep_send_counts, counts), "ep_send_counts of the same dispatch", ep_send_counts.tolist())
    same = torch.equal(group.outputs[ep_rank_id][: len(mine)], expand_x[: len(mine)])
    site.require(same, f"the output that {group_ep!r} holds for this rank", "another")
    out = torch.zeros(len(expert_ids), expand_x.shape[1])
    for rank in range(ep_world_size):
        for place, way in enumerate(_arrivals(group, rank, n_local)):
            if way.rank == ep_rank_id:
                out[way.row] += expert_scales[way.row, way.choice] * group.outputs[rank][place].float()
    out[n_live:] = float("nan")
    return out.to(expand_x.dtype)


def _fake_combine(site: Site, *, expand_x: Tensor, expert_ids: Tensor, **_: object) -> Tensor:
    return expand_x.new_empty((expert_ids.shape[0], expand_x.shape[1]))


KERNELS = {
    "npu::npu_moe_distribute_dispatch_v2": Kernel(run=_dispatch, fake=_fake_dispatch),
    "npu::npu_moe_distribute_combine_v2": Kernel(run=_combine, fake=_fake_combine),
}
