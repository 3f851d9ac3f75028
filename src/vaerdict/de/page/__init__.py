"""The page of a differential expression."""
