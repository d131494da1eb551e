"""Rows of data files as prompts for agents: read, checked, counted, ordered."""
