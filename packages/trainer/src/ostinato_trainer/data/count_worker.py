"""A process that counts prompts: reads pickles from standard input, writes pickles to standard output, ends with its input.

The first is a `PromptLength`; every further one is a list of (messages, tools), answered by a list of `count_or_refusal`.
Both ends are this package's own; started by `count_workers`, never by hand.
"""

from __future__ import annotations

import os
import pickle
import sys

from ostinato_trainer.data.prompt_length import PromptLength, count_or_refusal

__all__ = ["main"]


def main() -> None:
    """Answer until the input ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints must not get between the replies
    length: PromptLength = pickle.load(requests)
    while True:
        try:
            prompts = pickle.load(requests)
        except EOFError:
            return
        pickle.dump([count_or_refusal(length, messages, tools) for messages, tools in prompts], replies)
        replies.flush()


if __name__ == "__main__":
    main()
