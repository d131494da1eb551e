"""Tools for language-model agents: typed tools, an executor under policies, and parsers from sampled text to tool calls."""
