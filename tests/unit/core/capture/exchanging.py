"""A mixture of experts on fake ranks, small enough to read: rows go to ranks that data decide."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.utils.checkpoint import checkpoint

from graph_trainer.core.capture.capture import capture
from graph_trainer.testing import fake_mesh

RANKS = 4
ROWS = 10


class Mixture(nn.Module):
    """Layers that send each row to a rank, compute there and send it back.

    Args:
        change: for tests of what is refused: changes the two lists of splits, or the counts that
            the second one is made of.
        checkpointed: options of torch.utils.checkpoint, to recompute every layer in backward.
        dropout: of what the router reads.
    """

    def __init__(self, mesh, layers=1, change=None, checkpointed=None, dropout=0.0):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(4, RANKS) for _ in range(layers))
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.mesh, self.change = mesh, change
        self.checkpointed, self.dropout = checkpointed, dropout

    def forward(self, x):
        for router, expert in zip(self.routers, self.experts, strict=True):
            if self.checkpointed is None:
                x = x + self.mixed(x, router, expert)
            else:
                options = {"use_reentrant": False, **self.checkpointed}
                x = x + checkpoint(self.mixed, x, router, expert, **options)
        return x

    def mixed(self, x, router, expert):
        scores = router(F.dropout(x, self.dropout) if self.dropout else x)
        order = scores.argmax(-1).argsort(stable=True)
        counts = torch.zeros_like(scores).scatter(1, scores.argmax(-1, keepdim=True), 1.0)
        counts = counts.sum(0).long().view(RANKS, 1)
        arrived = torch.ops._c10d_functional.wait_tensor(
            all_to_all_single(counts, None, None, self.mesh)
        )
        sent, received = counts.sum(dim=1).tolist(), arrived.sum(dim=1).tolist()
        if self.change is not None:
            sent, received = self.change(counts, sent, received)
        rows = all_to_all_single(x[order], received, sent, self.mesh)
        back = all_to_all_single(expert(rows).relu(), sent, received, self.mesh)
        return torch.zeros_like(x).index_put((order,), back) * scores.amax(-1, keepdim=True)


def exchanging(layers=1, rank=0, **of_model):
    """The captured step of a mixture, as one of RANKS fake ranks has it."""
    mesh = fake_mesh(RANKS, rank)
    torch.manual_seed(0)
    model = Mixture(mesh, layers, **of_model)
    return capture(model, lambda m, x: m(x).square().mean(), (torch.ones(ROWS, 4),))
