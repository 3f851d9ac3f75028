"""Data of training: one data set per member, samples by row numbers, sparse matrices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import sparse
from torch import Tensor

from training_toys import COUNTS, CPU, SHORT, TRUE, X, count_member, equal_to_rounding, member, same_bits
from vaerdict.core import DataError, SettingError
from vaerdict.noise import seeded
from vaerdict.training import IWAE, VAE, WW, loop, train
from vaerdict.training.data import PerMemberRows, ResampledRows, SharedRows, SparseRows


# -------------------------------------------------------------------------------------------- one data set per member
def data_sets(n: int) -> Tensor:
    return torch.stack([TRUE.simulate(n, generator=seeded(10 + i))[0] for i in range(3)])


@pytest.mark.parametrize("joint", [False, True])
def test_members_with_separate_data_learn_what_they_learn_alone(joint):
    members = [member(recipe, i) for i, recipe in enumerate((IWAE, VAE, WW))]
    x_train, x_valid, settings = data_sets(200), data_sets(60), replace(SHORT, joint=joint)
    fits = train(members, x_train, x_valid, settings, per_member=True)
    for i, fit in enumerate(fits):
        (alone,) = train([members[i]], x_train[i], x_valid[i], settings)
        assert equal_to_rounding(fit, alone)
        assert fit.history[-1][1] == pytest.approx(alone.history[-1][1], abs=1e-9)
    (other,) = train([members[0]], x_train[1], x_valid[1], settings)
    assert not equal_to_rounding(fits[0], other)


def test_batches_are_taken_from_each_members_data_set():
    x = torch.arange(24.0).reshape(2, 4, 3)
    data, index = PerMemberRows(x), torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(data.take(index), torch.stack([x[0, [3, 0]], x[1, [1, 1]]]))
    assert torch.equal(data.block(slice(1, 3), 2), x[:, 1:3])
    assert (data.n, data.shape) == (4, (3,))
    single = data.of([1])
    assert isinstance(single, SharedRows)
    assert torch.equal(single.x, x[1])
    assert torch.equal(data.of([1, 0]).tensors()[0], x.flip(0))


@pytest.mark.parametrize("n_members", [1, 2])
def test_resampled_rows_train_like_copies_of_them(n_members):
    """A bootstrap by row numbers gives the result of the copied rows, in a stack and alone."""
    rows = torch.stack([torch.randint(len(X), (60,), generator=seeded(i)) for i in range(n_members)])
    members = [member(IWAE, seed=i) for i in range(n_members)]
    valid = X[:30].expand(n_members, -1, -1)
    copied, resampled = (train(members, x, valid, SHORT, per_member=True) for x in (X[rows], ResampledRows(X, rows)))
    assert all(equal_to_rounding(a, b) for a, b in zip(copied, resampled, strict=True))


def test_the_numbers_of_data_sets_and_members_must_agree():
    with pytest.raises(
        DataError, match=r"x_train has shape \(3, 50, 5\); one data set per member is \(2, n, features\)"
    ):
        train([member(IWAE, i) for i in range(2)], data_sets(50), data_sets(50)[:2], SHORT, per_member=True)
    bad = data_sets(50)
    bad[2, 0, 0] = torch.nan
    with pytest.raises(DataError, match="x_valid holds 1 non-finite"):
        train([member(IWAE, i) for i in range(3)], data_sets(50), bad, SHORT, per_member=True)


def test_a_checkpoint_distinguishes_the_order_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 3600.0).__next__))
    members, x = [member(IWAE, i) for i in range(3)], data_sets(60)
    train(members, x, x, SHORT, per_member=True, checkpoint=tmp_path)
    train(members, x, x, SHORT, per_member=True, checkpoint=tmp_path)
    with pytest.raises(SettingError, match="another run"):
        train(members, x.flip(0), x, SHORT, per_member=True, checkpoint=tmp_path)


# ------------------------------------------------------------------------------------------------------ sparse rows
@pytest.mark.parametrize("n_members", [1, 2])
def test_sparse_rows_train_like_dense_ones(n_members, tmp_path):
    members = [count_member(i) for i in range(n_members)]
    matrix = sparse.csr_matrix(COUNTS.numpy())
    dense = train(members, COUNTS[:100], COUNTS[100:], SHORT)
    from_sparse = train(members, matrix[:100], matrix[100:], SHORT, checkpoint=tmp_path)
    for a, b in zip(dense, from_sparse, strict=True):
        assert same_bits(a, b)
        assert a.history == b.history


def test_count_models_train_with_a_constant_gene():
    x = COUNTS.clone()
    x[:, 4] = 0
    (fit,) = train([count_member(0)], x, x, SHORT)
    assert fit.model.log_joint(x, torch.zeros(1, 120, 2)).isfinite().all()


def test_rows_of_a_sparse_matrix_are_made_dense():
    data = SparseRows(sparse.csr_matrix(COUNTS.numpy()), CPU)
    index = torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(data.take(index), COUNTS[index])
    assert torch.equal(data.block(slice(2, 5)), COUNTS[2:5])
    assert torch.equal(data.block(slice(2, 5), 3), COUNTS[2:5].expand(3, 3, 15))
    assert (data.n, data.shape) == (120, (15,))


def test_invalid_sparse_observations_are_refused():
    matrix, members = sparse.csr_matrix(COUNTS.numpy()), [count_member(0)]
    with pytest.raises(SettingError, match="x_train is sparse, which all members share"):
        train(members, matrix, matrix, SHORT, per_member=True)
    with pytest.raises(DataError, match=r"x_valid of shape \(0, 15\) is empty"):
        train(members, matrix, matrix[:0], SHORT)
    matrix.data[0] = float("nan")
    with pytest.raises(DataError, match="x_train holds values that are not finite"):
        train(members, matrix, matrix, SHORT)
