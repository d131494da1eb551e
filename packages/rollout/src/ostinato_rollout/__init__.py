"""Token-exact conversations with a policy served by many replicas."""
