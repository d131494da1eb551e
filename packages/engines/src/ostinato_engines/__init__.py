"""Inference engines behind one contract: token ids in, token ids and honest logprobs out."""
