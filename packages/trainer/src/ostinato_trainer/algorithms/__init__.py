"""Advantages, policy losses, divergences and corrections as pure functions, each with its formula and source."""
