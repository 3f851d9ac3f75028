"""Cell types for a query data set from a labelled reference."""
