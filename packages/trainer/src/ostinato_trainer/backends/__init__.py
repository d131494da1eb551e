"""What holds a model under training: layout, precision, optimizer, log-probabilities; the loop sees protocols only."""
