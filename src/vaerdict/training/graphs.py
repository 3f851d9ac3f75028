"""A training step as one launch: on a GPU recorded once as a CUDA graph and replayed, elsewhere called as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Step = Callable[..., Tensor]
"""A step that takes tensors, changes state in place and returns a tensor; no host round trip inside."""

_WARM_UPS = 3


def recorded(step: Step, example: Sequence[Tensor], generators: Sequence[torch.Generator], state: list[Tensor]) -> Step:
    """The step as a CUDA graph, or itself where `example` is not on a GPU.

    Warming up and recording run the step for real; `state`, every tensor it changes in place, and the generators are
    put back afterwards, so that recorded and plain steps start alike.
    """
    if example[0].device.type != "cuda":
        return step
    kept, seeds = [t.clone() for t in state], [g.get_state() for g in generators]
    inputs = [t.clone() for t in example]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        output = step(*inputs)
    with torch.no_grad():
        for tensor, old in zip(state, kept, strict=True):
            tensor.copy_(old)
    for generator, seed in zip(generators, seeds, strict=True):
        generator.set_state(seed)

    def replay(*arguments: Tensor) -> Tensor:
        for target, value in zip(inputs, arguments, strict=True):
            target.copy_(value)
        graph.replay()
        return output

    return replay


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Matrix products of networks in TF32 on a GPU (ten bits of mantissa, float32 range), and as before afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
