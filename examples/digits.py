"""Classify digits from 200 labels, none of them a nine, and reject what is uncertain (extra `sklearn`)."""

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
print(f"selected {classifier.selection_[0].model}; decides by the {classifier.estimator_} estimate of p(c | x)")
print(classifier.agreement_.message)

decisions = classifier.decide(X[test])
rejected, nine = decisions.action == -1, digit[test] == 9
correct = decisions.label == digit[test]
print(f"digits 0-8: {correct[~nine].mean():.1%} correct, {correct[~nine & ~rejected].mean():.1%} of those not rejected")
print(f"rejected: {rejected[nine].mean():.0%} of the nines, {rejected[~nine].mean():.0%} of the others")
print(f"verdicts: {(decisions.verdict == vd.Verdict.OK).mean():.0%} OK")
