"""A prior for fold changes, learned from cells and genes that are not compared.

`prediction` says what a prediction of fold changes is; `profile` predicts from clusters of other cells, and
`vaerdict.de.model.prediction` by a model of counts. `replicates` tells how far chance moves a prediction, `learned`
turns it into a posterior, and `stage` does all of it for a contrast.
"""
