"""The reproduction of *Decision-Making with Auto-Encoding Variational Bayes*: experiments, theory, benchmarks."""
