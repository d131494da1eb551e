"""The laptop run: a tiny model learns to use a calculator, through the very classes of a GPU run.

`task` makes the problems, `dialogues` the demonstrations for the warm start, `tiny_model` the model and its tokenizer, `run` puts them
together and trains. `files` holds the two files that a user would write: the tools and the reward.
"""
