"""Classify digits from 200 labels, none of them a nine, and reject uncertain ones. Needs scikit-learn."""

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

classifier = vd.SelectiveClassifier(cost=0.1, random_state=0).fit(X[train], y)
print(f"selected {classifier.selection_[0].model}; the {classifier.estimator_} p(c | x) decides")
print(classifier.agreement_.message)

decided = classifier.decide(X[test])
rejected, nine = decided.action == -1, digit[test] == 9
right = decided.label == digit[test]
print(f"digits 0-8: {right[~nine].mean():.1%} right, {right[~nine & ~rejected].mean():.1%} of those not rejected")
print(f"rejected: {rejected[nine].mean():.0%} of the nines, {rejected[~nine].mean():.0%} of the others")
print(f"verdicts: {(decided.verdict == vd.Verdict.OK).mean():.0%} OK")
