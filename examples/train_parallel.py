"""Train on several processes, GPUs or machines: torchrun --nproc-per-node 2 examples/train_parallel.py.

The same file runs as one process with `python`. Every rank is given the same data and the same starting points.
"""

import torch

import vaerdict as vd
from vaerdict.models import CountModel
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import Member, Settings, train
from vaerdict.training.parallel import joined

with joined() as group:  # on GPUs joined("cuda"), and device="cuda" below
    generator = vd.seeded(0)
    rate = 5 * torch.rand(2, 20, generator=generator)
    x = torch.poisson(rate[torch.arange(200) % 2], generator=generator)
    x[:, 0] += 1  # no cell is empty

    model = CountModel.start(x, 2, generator=generator, hidden=(16,))
    proposal = OfCounts(Normal()).make(x, 2, hidden=(16,), generator=generator)
    (fit,) = train([Member(model, proposal, vd.IWAE, 0)], x[:160], x[160:], Settings(n_particles=8, epochs=20))

    if group.rank == 0:
        bounds = [bound for _, bound in fit.history]
        print(
            f"{group.size} ranks: held-out bound from {bounds[0]:.2f} to {max(bounds):.2f} nats in {fit.epochs} epochs"
        )
        print("OK")
