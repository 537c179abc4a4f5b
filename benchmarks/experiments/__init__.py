"""The experiments of docs/science.md, and whole trainings on a GPU: `python -m benchmarks.experiments.science`."""
