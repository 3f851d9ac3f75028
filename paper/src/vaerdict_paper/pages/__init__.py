"""Tables, claims, figures and pages of the experiments and benchmarks."""
