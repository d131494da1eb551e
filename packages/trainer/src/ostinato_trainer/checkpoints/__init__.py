"""The state of a run on disk: written whole or not at all, and taken up again."""
