"""Runs inside SGLang's processes, which load it as a plugin: what is sampled, and its logprob, become those of our contract.

SGLang's environment need not hold our package: this folder is copied beside it, so that nothing here imports the rest.
"""

from .lifeline import watch_parent


def register() -> None:
    """SGLang calls this in each of its processes before it reads its arguments.

    A failure leaves our sampling backend unregistered, on which SGLang refuses to start.
    """
    watch_parent()
    # Loads SGLang, which only its own processes have.
    from .hooks import install

    install()
