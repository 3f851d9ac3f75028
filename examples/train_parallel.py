"""Train on several processes, GPUs or machines: torchrun --nproc-per-node 2 examples/train_parallel.py [cuda].

Run by `python` it is a single process. Every rank gets the same data and the same starting points.
"""

import sys

import torch

import vaerdict as vd
from vaerdict.models import CountModel
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import Member, Settings, train
from vaerdict.training.parallel import process_group

device = "cuda" if "cuda" in sys.argv[1:] else "cpu"
with process_group(device) as group:
    generator = vd.seeded(0)
    rate = 5 * torch.rand(2, 20, generator=generator)
    x = torch.poisson(rate[torch.arange(200) % 2], generator=generator)
    x[:, 0] += 1  # no cell is empty

    model = CountModel.start(x, 2, generator=generator, hidden=(16,))
    proposal = OfCounts(Normal()).make(x, 2, hidden=(16,), generator=generator)
    settings = Settings(n_particles=8, epochs=20)
    (fit,) = train([Member(model, proposal, vd.IWAE, 0)], x[:160], x[160:], settings, device=device)

    if group.rank == 0:
        backend = f" by {torch.distributed.get_backend()}" if torch.distributed.is_initialized() else ""
        bounds = [bound for _, bound in fit.history]
        print(f"{group.size} ranks on {device}{backend}: {fit.epochs} epochs")
        print(f"held-out bound from {bounds[0]:.2f} to {max(bounds):.2f} nats")
        print("OK")
