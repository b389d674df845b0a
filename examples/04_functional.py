"""The model as a function: gradients, directional derivatives, and many sequences at once.

What the reader learns: ``forward_sequence`` is a plain function of the weights (a pytree of frozen values) and the
token ids, so the transforms of ``torch.func`` apply to it as they are; and it says what the paged steps say, so what is
learnt from the one holds for the other.
"""

from __future__ import annotations

import attrs
import purestep as ps
import torch
from purestep.model.leaves import leaves_from_params, params_from_leaves
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

TEXTS = ("The LORD is my shepherd; I shall not want.", "In the beginning was the Word, and the Word was with God")
LENGTH = 12
TOLERANCE = 1e-3


def main() -> None:
    """Differentiate the loss of two sentences and check every result another way."""
    model = ps.load_model("tiny", dtype="float32")
    ids = torch.tensor([model.tokenizer.encode(text).ids[:LENGTH] for text in TEXTS])
    leaves = leaves_from_params(model.params)
    # The expert tables of hash layers are integers; everything else is a weight.
    weights = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}

    def logits_of(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        params = params_from_leaves({**leaves, **weights})
        return ps.forward_sequence(attrs.evolve(model, params=params), ids)

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(weights, ids)[:-1], ids[1:])

    gradient = grad(loss)(weights, ids[0])
    size = torch.stack([g.norm() for g in gradient.values()]).norm()
    print(f"grad   {len(gradient)} tensors, norm {size:.4f}, loss {loss(weights, ids[0]):.4f}")

    # Along its own direction, the slope of the loss is the gradient's norm.
    direction = {path: g / size for path, g in gradient.items()}
    _, slope = jvp(lambda w: loss(w, ids[0]), (weights,), (direction,))
    print(f"jvp    slope along the gradient {slope:.4f}")

    losses = vmap(loss, in_dims=(None, 0))(weights, ids)
    one_by_one = torch.stack([loss(weights, row) for row in ids])
    print("vmap   losses of both sentences", [round(x, 4) for x in losses.tolist()])

    state = ps.init_state(model, ps.Capacity(requests=len(TEXTS), tokens=256, context=LENGTH))
    rows = {}
    for row in ids:
        state, request_id = ps.open_request(state)
        rows[request_id] = row
    _, out = ps.extend_step(model, state, rows, sample=False, logits="all")
    paged = out.logits.unflatten(0, tuple(ids.shape))
    gap = (paged - vmap(logits_of, in_dims=(None, 0))(weights, ids)).abs().max()
    print(f"paged  logits differ by {gap:.1e} at most")

    assert abs(slope - size) < TOLERANCE * size
    assert torch.allclose(losses, one_by_one, atol=TOLERANCE)
    assert gap < TOLERANCE
    print("grad, jvp and vmap of the cache-free model agree with each other and with the paged steps.")


if __name__ == "__main__":
    main()
