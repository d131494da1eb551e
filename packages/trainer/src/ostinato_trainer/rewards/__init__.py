"""From a finished trajectory to its score: functions, ready scorers, reward models, and the parts of a score."""
