# The project's commands; each is one line that can be typed without just.

# Everything into .venv
setup:
    uv sync

# Format and mend what can be mended
fmt:
    uv run ruff check --fix
    uv run ruff format

# Lint, types, import contracts
check:
    uv lock --check
    uv run ruff check
    uv run ruff format --check
    uv run pyright
    uv run lint-imports

# The default tests (about twenty minutes on two cores)
test *ARGS:
    uv run pytest {{ARGS}}

# The tests that take minutes each
slow *ARGS:
    uv run pytest -m slow {{ARGS}}

# Each wheel alone in an empty environment, with its own tests
isolate *PACKAGES:
    uv run python .ci/isolate.py {{PACKAGES}}

# One benchmark by name, or all; each prints one JSON line last
bench *NAMES:
    uv run python -m benchmarks {{NAMES}}

# Environments of their own for the peers that benchmarks compare with and for frameworks whose agents are trained
peers:
    uv run python -m benchmarks.peers

# What learns and what must not: every recipe of the quickstart and the controls, from three seeds (half an hour on two cores)
learn *ARGS:
    uv run python -m benchmarks.learning --write docs/results/learning.md {{ARGS}}
