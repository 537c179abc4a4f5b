"""Benchmarks of the ops: `python -m benchmarks` measures; --write writes results/*.json and docs/benchmarks.md."""
