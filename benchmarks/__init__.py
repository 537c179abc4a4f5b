"""Benchmarks of the ops: `python -m benchmarks` measures, writes results/*.json and renders docs/benchmarks.md."""
