"""Operators with hand-written gradients, as another kernel table for the same model.

What the reader learns: a kernel author replaces operators, never the model. Each function here has the name, signature
and values of the plain operator, and an ``autograd.Function`` that keeps less and computes its gradient in fewer
passes;
``main`` checks values and gradients against the plain ones. They serve reverse-mode gradients only: ``vmap`` and
``jvp`` need the plain table.
"""

from __future__ import annotations

import attrs
import torch
from purestep.ops.attention import attend as plain_attend
from purestep.ops.dispatch import DIFFERENTIABLE
from purestep.ops.experts import experts_dense
from purestep.ops.streams import join_streams as plain_join
from purestep.ops.streams import sinkhorn as plain_sinkhorn
from purestep.ops.streams import update_streams as plain_update
from torch import Tensor
from torch.nn import functional as F


class Sinkhorn(torch.autograd.Function):
    """The rounds as two vectors r and c that scale the fixed first matrix: ``C = r K c``, divisors with eps alike."""

    @staticmethod
    def forward(logits: Tensor, n_iters: int, eps: float) -> tuple[Tensor, ...]:
        soft = logits.softmax(-1).movedim((-2, -1), (0, 1)).contiguous()
        k = soft + eps
        r, c = torch.ones_like(k[0]), (k.sum(0) + eps).reciprocal()
        rs, cs = [r], [c]
        for _ in range(n_iters - 1):
            r = r / (r * (k * c.unsqueeze(0)).sum(1) + eps)
            c = c / (c * (k * r.unsqueeze(1)).sum(0) + eps)
            rs.append(r)
            cs.append(c)
        out = (k * r.unsqueeze(1) * c.unsqueeze(0)).movedim((0, 1), (-2, -1))
        return out, soft, torch.stack(rs), torch.stack(cs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, soft, rs, cs = output
        ctx.eps = inputs[2]
        ctx.mark_non_differentiable(soft, rs, cs)
        ctx.save_for_backward(soft, rs, cs)

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            soft, rs, cs = ctx.saved_tensors
            eps, k = ctx.eps, soft + ctx.eps
            grad = grad.movedim((-2, -1), (0, 1)).contiguous()
            through = grad * k
            grad_k = grad * rs[-1].unsqueeze(1) * cs[-1].unsqueeze(0)
            grad_r = (through * cs[-1].unsqueeze(0)).sum(1)
            grad_c = (through * rs[-1].unsqueeze(1)).sum(0)
            for i in range(len(cs) - 1, 0, -1):
                # c' = c / (c s + eps), s = sum_j K r:  dc'/ds = -c'^2,  dc'/dc = eps (c'/c)^2; the same for r.
                ds = grad_c * cs[i].square()
                grad_r = grad_r - (k * ds.unsqueeze(0)).sum(1)
                grad_k -= rs[i].unsqueeze(1) * ds.unsqueeze(0)
                dr = grad_r * rs[i].square()
                grad_c = grad_c * eps * (cs[i] / cs[i - 1]).square() - (k * dr.unsqueeze(1)).sum(0)
                grad_k -= dr.unsqueeze(1) * cs[i - 1].unsqueeze(0)
                grad_r = grad_r * eps * (rs[i] / rs[i - 1]).square()
            grad_k -= (grad_c * cs[0].square()).unsqueeze(0)
            out = soft * (grad_k - (grad_k * soft).sum(1, keepdim=True))
            return out.movedim((0, 1), (-2, -1)), None, None


class JoinStreams(torch.autograd.Function):
    """``x = sum_i w_i R_i`` without the batched one-row products."""

    @staticmethod
    def forward(streams: Tensor, weights: Tensor) -> Tensor:
        out = streams.select(-2, 0) * weights[..., 0:1]
        for i in range(1, streams.shape[-2]):
            out.addcmul_(streams.select(-2, i), weights[..., i : i + 1])
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            streams, weights = ctx.saved_tensors
            return weights.unsqueeze(-1) * grad.unsqueeze(-2), (streams @ grad.unsqueeze(-1)).squeeze(-1)


class UpdateStreams(torch.autograd.Function):
    """``R'_k = post_k y + sum_j C_jk R_j``, stream by stream."""

    @staticmethod
    def forward(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        out = post.unsqueeze(-1) * y.unsqueeze(-2)
        for k in range(streams.shape[-2]):
            for j in range(streams.shape[-2]):
                out.select(-2, k).addcmul_(streams.select(-2, j), comb[..., j, k : k + 1])
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            streams, y, post, comb = ctx.saved_tensors
            n = streams.shape[-2]
            to_streams = torch.zeros_like(streams)
            for j in range(n):
                for k in range(n):
                    to_streams.select(-2, j).addcmul_(grad.select(-2, k), comb[..., j, k : k + 1])
            to_y = JoinStreams.forward(grad, post)
            rows = torch.cat((streams, y.unsqueeze(-2)), dim=-2)
            products = rows @ grad.transpose(-1, -2)
            return to_streams, to_y, products[..., n, :], products[..., :n, :]


class Attend(torch.autograd.Function):
    """Attention with a sink that keeps the probabilities and nothing else of that size."""

    @staticmethod
    def forward(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, ...]:
        n_heads, sink = q.shape[-2], sink.unsqueeze(-1)
        scores = (q.flatten(-3, -2) @ keys.transpose(-1, -2)).mul_(scale).unflatten(-2, (-1, n_heads))
        scores.masked_fill_(~mask.unsqueeze(-2), -torch.inf)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights, rest = scores.sub_(top).exp_(), (sink - top).exp()
        total = weights.sum(-1, keepdim=True) + rest
        weights.div_(total)
        out = (weights.flatten(-3, -2) @ keys).unflatten(-2, (-1, n_heads))
        return out, weights, rest / total

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, keys, _mask, _sink, ctx.scale = inputs
        out, weights, rest = output
        ctx.mark_non_differentiable(weights, rest)
        ctx.save_for_backward(q, keys, out, weights, rest)

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            q, keys, out, weights, rest = ctx.saved_tensors
            delta = (grad * out).sum(-1, keepdim=True)
            flat = grad.flatten(-3, -2)
            scores = (flat @ keys.transpose(-1, -2)).unflatten(-2, (-1, q.shape[-2])).sub_(delta).mul_(weights)
            scores = scores.flatten(-3, -2).mul_(ctx.scale)
            to_q = (scores @ keys).unflatten(-2, (-1, q.shape[-2]))
            to_keys = weights.flatten(-3, -2).transpose(-1, -2) @ flat + scores.transpose(-1, -2) @ q.flatten(-3, -2)
            to_sink = -(rest * delta).squeeze(-1).flatten(0, -2).sum(0)
            return to_q, to_keys, None, to_sink, None


class Experts(torch.autograd.Function):
    """Only the experts that were hit, forward and backward, on rows sorted by expert."""

    @staticmethod
    def forward(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> tuple[Tensor, ...]:
        flat = x.flatten(0, -2)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=len(w13))
        rows, scale = flat[order // ids.shape[-1]], weights.flatten()[order].unsqueeze(-1)
        parts = rows.split(counts.tolist())
        hidden = torch.cat([part @ w.mT for part, w in zip(parts, w13, strict=True)])
        gate, up = hidden.chunk(2, dim=-1)
        active = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        parts = (active * scale).split(counts.tolist())
        y = torch.cat([part @ w.mT for part, w in zip(parts, w2, strict=True)])
        out = torch.zeros_like(flat).index_add_(0, order // ids.shape[-1], y)
        return out.view(x.shape), rows, scale, hidden, active, order, counts

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _x, ctx_ids, _weights, w13, w2, ctx.limit = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.ids_shape, ctx.x_shape = ctx_ids.shape, output[0].shape
        ctx.save_for_backward(w13, w2, *output[1:])

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            w13, w2, rows, scale, hidden, active, order, counts = ctx.saved_tensors
            sizes, limit, token = counts.tolist(), ctx.limit, order // ctx.ids_shape[-1]
            grad_y = grad.flatten(0, -2)[token]
            by_expert = grad_y.split(sizes)
            to_w2 = torch.stack([g.mT @ a for g, a in zip(by_expert, (active * scale).split(sizes), strict=True)])
            grad_h = torch.cat([g @ w for g, w in zip(by_expert, w2, strict=True)])
            to_weights = torch.empty(len(order)).scatter_(0, order, (grad_h * active).sum(-1))
            grad_h *= scale
            gate, up = hidden.chunk(2, dim=-1)
            gate_c, up_c = gate.clamp(max=limit), up.clamp(-limit, limit)
            sig = gate_c.sigmoid()
            to_gate = grad_h * up_c * sig * (1 + gate_c * (1 - sig)) * (gate <= limit)
            to_up = grad_h * gate_c * sig * (up.abs() <= limit)
            parts = torch.cat((to_gate, to_up), dim=-1).split(sizes)
            to_w13 = torch.stack([g.mT @ r for g, r in zip(parts, rows.split(sizes), strict=True)])
            to_rows = torch.cat([g @ w for g, w in zip(parts, w13, strict=True)])
            to_x = torch.zeros_like(grad.flatten(0, -2)).index_add_(0, token, to_rows)
            return to_x.view(ctx.x_shape), None, to_weights.view(ctx.ids_shape), to_w13, to_w2, None


def sinkhorn(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    """See ``purestep.ops.streams.sinkhorn``."""
    return Sinkhorn.apply(logits, n_iters, eps)[0]


def mix_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``purestep.ops.streams.mix_weights``."""
    n, flat = streams.shape[-2], streams.flatten(-2)
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixed.split((n, n, n * n), dim=-1)
    base_pre, base_post, base_comb = base.split((n, n, n * n))
    pre = (pre * scale[0] + base_pre).sigmoid() + eps
    post = (post * scale[1] + base_post).sigmoid() * 2
    return pre, post, sinkhorn((comb * scale[2] + base_comb).unflatten(-1, (n, n)), n_iters, eps)


def enter_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``purestep.ops.streams.enter_streams``."""
    pre, post, comb = mix_weights(streams, fn, base, scale, n_iters=n_iters, eps=eps, norm_eps=norm_eps)
    return JoinStreams.apply(streams, pre), post, comb


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, *, scale: float, rounding: bool) -> Tensor:
    """See ``purestep.ops.attention.attend``; float32 without rounding."""
    assert not rounding, "training is in plain float32"
    return Attend.apply(q, keys, mask, sink, scale)[0]


def experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """See ``purestep.ops.experts.experts_dense``."""
    return Experts.apply(x, ids, weights, w13, w2, limit)[0]


TRAINING = attrs.evolve(
    DIFFERENTIABLE,
    name="training",
    enter_streams=enter_streams,
    join_streams=JoinStreams.apply,
    update_streams=UpdateStreams.apply,
    attend=attend,
    experts=experts,
)
"""The kernel table to train with."""


def worst_difference(one, other, arguments: tuple[Tensor, ...]) -> float:
    """Compare two versions of an operator: values, and gradients of a random projection."""
    learnt = [a.requires_grad_() for a in arguments if a.is_floating_point()]
    results = [f(*arguments) for f in (one, other)]
    weights = torch.linspace(-1, 1, results[0].numel()).view(results[0].shape)
    grads = [torch.autograd.grad((r * weights).sum(), learnt) for r in results]
    pairs = [(results[0], results[1]), *zip(*grads, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def main() -> None:
    """Check every operator against the plain one."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    mask = torch.ones(2, 5, 7, dtype=torch.bool).tril(2)
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(18)]).view(2, 9, 2)
    options = {"scale": 0.35, "rounding": False}
    worst = {
        "sinkhorn": worst_difference(
            lambda x: sinkhorn(x, 20, 1e-6), lambda x: plain_sinkhorn(x, 20, 1e-6), (draw(2, 5, 4, 4),)
        ),
        "join": worst_difference(JoinStreams.apply, plain_join, (draw(2, 5, 4, 8), draw(2, 5, 4))),
        "update": worst_difference(
            UpdateStreams.apply, plain_update, (draw(2, 5, 4, 8), draw(2, 5, 8), draw(2, 5, 4), draw(2, 5, 4, 4))
        ),
        "attend": worst_difference(
            lambda q, k, s: attend(q, k, mask, s, **options),
            lambda q, k, s: plain_attend(q, k, mask, s, **options),
            (draw(2, 5, 3, 8), draw(2, 7, 8), draw(3)),
        ),
        "experts": worst_difference(
            lambda x, w, a, b: experts(x, ids, w, a, b, 1.0),
            lambda x, w, a, b: experts_dense(x, ids, w, a, b, 1.0),
            (draw(2, 9, 6), draw(2, 9, 2), draw(4, 10, 6), draw(4, 6, 5)),
        ),
    }
    assert max(worst.values()) < 1e-4, worst
    print("largest difference of values and gradients:", {name: f"{d:.1e}" for name, d in worst.items()})


if __name__ == "__main__":
    main()
