"""The files of the quickstart that belong to the user: they are copied beside the run, to be read and changed."""
