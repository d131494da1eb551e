"""One module per figure that the project claims: `uv run python -m benchmarks.NAME`. Each prints one JSON line last."""
