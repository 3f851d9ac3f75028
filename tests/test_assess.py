"""The assessment of weighted particles against closed forms."""

from __future__ import annotations

import math

import torch

from vaerdict.inference.assess import assess


def test_the_error_between_randomisations_of_equal_weight_is_that_of_their_mean(generator):
    """Of R means it is their standard deviation over the root of R, however the draws of each vary."""
    f = torch.randn(5, 40, 3, generator=generator, dtype=torch.double)
    f = f + 3 * torch.randn(5, 1, 3, generator=generator, dtype=torch.double)
    replicate = torch.arange(5).repeat_interleave(40)
    answer = assess(f.flatten(0, 1), torch.zeros(200, 3, dtype=torch.double), replicate=replicate)
    torch.testing.assert_close(answer.mcse, f.mean(1).std(0) / math.sqrt(5))


def test_the_error_of_the_evidence_between_randomisations_is_that_of_its_logarithm(generator):
    log_w = 0.1 * torch.randn(5, 40, 3, generator=generator, dtype=torch.double)
    f, replicate = torch.randn(200, 3, generator=generator, dtype=torch.double), torch.arange(5).repeat_interleave(40)
    evidence = log_w.exp().mean(1)
    answer = assess(f, log_w.flatten(0, 1), replicate=replicate)
    torch.testing.assert_close(answer.log_evidence_se, evidence.std(0) / evidence.mean(0) / math.sqrt(5))
