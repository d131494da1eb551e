"""The programs that agents run, and the workers that run thousands of them."""
