"""Tiny models, made on the spot."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB = 96


@pytest.fixture(scope="session")
def vocab_size():
    """Ids of the tiny models."""
    return VOCAB


@pytest.fixture
def make_model():
    """A function that builds a tiny random model; the same seed gives the same weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)

    def make(kind="qwen3", *, seed=0, tied=True, max_len=128, **overrides):
        shape = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": max_len,
            "tie_word_embeddings": tied,
            "initializer_range": 0.2,
        }
        if kind == "qwen3":
            config = transformers.Qwen3Config(**{**shape, "head_dim": 8, **overrides})
        elif kind == "llama":
            config = transformers.LlamaConfig(**{**shape, **overrides})
        elif kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=max_len,
                initializer_range=0.2,
                **overrides,
            )
        elif kind == "mistral":
            config = transformers.MistralConfig(**{**shape, **overrides})
        else:
            raise AssertionError(kind)
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    return make


@pytest.fixture
def forward_of():
    """Turns a model into ids -> float64 logits [n, vocab] of a plain forward, on weights copied now."""
    torch = pytest.importorskip("torch")
    import copy

    def wrap(model):
        frozen = copy.deepcopy(model)

        def forward(ids):
            with torch.no_grad():
                return frozen(input_ids=torch.tensor([list(ids)])).logits[0].double().numpy()

        return forward

    return wrap
