"""Reinforcement learning of language-model agents: data, rewards, algorithms, the training loop and the ostinato command."""
