"""A prior for fold changes, learned from cells and genes that are not compared.

`vaerdict.de.prior.prediction` says what a prediction of fold changes is, `profile` predicts from clusters of other
cells, `vaerdict.de.model.prediction` by a model of counts, and `learned` turns a prediction into a posterior.
"""
