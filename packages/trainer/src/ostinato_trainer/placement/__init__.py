"""Where the parts of a run are: in this process, or as actors of a cluster (`trainer.executor`)."""
