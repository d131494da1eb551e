"""Training over several processes: what one rank holds, where ranks run, and the group that the training loop talks to."""
