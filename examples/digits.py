"""Classify digits from 200 labels, none of them a nine, and find the nines (extra `sklearn`)."""

import numpy as np
from sklearn.datasets import load_digits

import vaerdict as vd

X, digit = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(X))
X, digit = X[order] / 16, digit[order]
train, test = slice(1200), slice(1200, None)

y = np.full(len(digit[train]), -1)  # -1: no label
labelled = np.flatnonzero(digit[train] != 9)[:200]
y[labelled] = digit[labelled]

classifier = vd.SelectiveClassifier(alpha=0.1, random_state=0).fit(X[train], y)
decisions = classifier.decide(X[test])
rejected, nine = decisions.action == -1, digit[test] == 9
correct = decisions.label == digit[test]
print(f"digits 0-8: {correct[~nine].mean():.1%} correct, {correct[~nine & ~rejected].mean():.1%} of those not rejected")
print(f"rejected: {rejected[nine].mean():.0%} of the nines, {rejected[~nine].mean():.0%} of the others")

found = classifier.novel(X[test], fdr=0.1)
print(f"called novel: {found.novel.sum()} rows, {nine[found.novel].sum()} of the {nine.sum()} nines among them")

classifier.set_params(cost=0.1, alpha=None, estimator="corrected").fit(X[train], y)
certified = classifier.decide(X[test][:100])  # p(c | x) by importance sampling, with its evidence
print(f"verdicts: {(certified.evidence.verdict == vd.Verdict.OK).mean():.0%} OK")
