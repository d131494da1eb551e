"""Sequences in one row, or in a row each: same numbers, and none sees another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2Model,
    Lfm2Config,
    Lfm2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

from ostinato_trainer.backends import packed_attention as packed_attention_module
from ostinato_trainer.backends.packed_attention import PACKED_ATTENTION, packed_attention
from ostinato_trainer.backends.packing import FlatModel, Layout
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.segments import Segment

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
PACKED = {
    "llama": lambda: LlamaModel(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2Model(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SHAPE, head_dim=8)),
    "window": lambda: MistralModel(MistralConfig(**SHAPE, sliding_window=3)),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
}
PADDED = {
    "conv": (lambda: Lfm2Model(Lfm2Config(**SHAPE, full_attn_idxs=[1])), "layers of kind conv"),
    "own attention": (lambda: BloomModel(BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)), "contract"),
    "capped scores": (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)).model, "got softcap"),
}


def make(build):
    torch.manual_seed(0)
    return build().double().eval()


def batch_of(lengths, *, positions=False):
    generator = torch.Generator().manual_seed(3)
    segments = []
    for place, length in enumerate(lengths):
        ids = torch.randint(0, 40, (length,), generator=generator).tolist()
        own = [3 * place + step for step in range(length)] if positions else None
        segments.append(Segment(ids[:1], ids[1:], [1] * (length - 1), None, "g", f"t{place}", 0.0, own))
    return Batch.from_segments(segments)


def alone(model, batch):
    """States of each sequence in a row of its own, by the attention that transformers chose."""
    if model.config._attn_implementation == PACKED_ATTENTION:
        model.set_attn_implementation("sdpa")
    states = []
    for place in range(batch.num_sequences):
        one = batch.select([place])
        extra = {} if one.position_ids is None else {"position_ids": one.position_ids[None]}
        states.append(model(input_ids=one.token_ids[None], use_cache=False, **extra).last_hidden_state[0])
    return torch.cat(states)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_row_answers_as_each_sequence_alone(name, positions):
    """In float64, models of plain and of windowed attention are packed and give each sequence what it gets alone."""
    model = make(PACKED[name])
    flat = FlatModel(model)
    assert flat.layout is Layout.PACKED, flat.reason
    batch = batch_of([9, 1, 5, 2, 12], positions=positions)
    got = flat(batch)
    assert torch.allclose(got, alone(model, batch), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", PACKED)
def test_no_gradient_crosses_from_one_sequence_to_another(name):
    """The gradient of one sequence's states by every other sequence's input embeddings is exactly 0, and by its own it is not."""
    model = make(PACKED[name])
    flat = FlatModel(model)
    batch = batch_of([4, 6, 1, 5])
    embedded = []
    layer = model.get_input_embeddings()
    hook = layer.register_forward_hook(lambda *call: embedded.append(call[-1]))
    states = flat(batch)
    hook.remove()
    for place in range(batch.num_sequences):
        own = batch.token_sequence == place
        gradient = torch.autograd.grad(states[own].pow(2).sum(), embedded[0], retain_graph=True)[0][0]
        assert not gradient[~own].any()
        assert gradient[own].any()


@pytest.mark.parametrize("name", PADDED)
def test_a_model_that_cannot_be_packed_is_padded_and_says_why(name, caplog):
    """Convolutions, attention of a model's own and capped scores are padded, right, with a warning, and the model keeps its attention."""
    build, why = PADDED[name]
    model = make(build)
    before = model.config._attn_implementation
    flat = FlatModel(model)
    assert flat.layout is Layout.PADDED
    assert why in flat.reason
    assert f"runs padded: {flat.reason}" in caplog.text
    assert model.config._attn_implementation == before
    batch = batch_of([9, 1, 5])
    assert torch.allclose(flat(batch), alone(model, batch), rtol=0, atol=1e-11)


def test_a_model_whose_packed_answers_differ_is_padded(monkeypatch):
    """A model that hands over its attention and mixes neighbours elsewhere is found by the probe and left as it was."""
    model = make(PACKED["llama"])
    plain = model.layers[0].mlp.forward
    monkeypatch.setattr(model.layers[0].mlp, "forward", lambda states: plain(states + states.roll(1, dims=1)))
    flat = FlatModel(model)
    assert flat.layout is Layout.PADDED
    assert "answers differ by" in flat.reason
    assert model.config._attn_implementation == "sdpa"


def test_padding_may_be_asked_for():
    """With remove_padding off a model is padded, and its numbers are those of the packed one."""
    model, batch = make(PACKED["qwen3"]), batch_of([9, 1, 5])
    padded = FlatModel(model, remove_padding=False)
    assert padded.layout is Layout.PADDED
    assert "use_remove_padding is false" in padded.reason
    expected = padded(batch)
    assert torch.allclose(FlatModel(model)(batch), expected, rtol=0, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), seed=st.integers(0, 99))
def test_order_and_company_change_no_state(lengths, seed):
    """Whatever sequences share a row, and in whichever order, each one's states are the same."""
    model = make(PACKED["qwen3"])
    flat, batch = FlatModel(model), batch_of(lengths)
    with torch.no_grad():
        whole = flat(batch)
        order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
        half = order[: 1 + len(order) // 2]
        for chosen in (order, half):
            got = flat(batch.select(chosen))
            assert torch.allclose(got, whole[batch.token_positions(chosen)], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["qwen3", "window"])
def test_other_callers_of_a_packed_model_get_what_they_got_before(name):
    """Padded rows with a mask, whole rows, and the exported configuration are as they were before the model was packed."""
    model = make(PACKED[name])
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    calls = ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}, {"input_ids": ids[:1]})
    with torch.no_grad():
        before = [model(**call, use_cache=False).last_hidden_state for call in calls]
        stored = model.config.to_json_string()
        assert FlatModel(model).layout is Layout.PACKED
        after = [model(**call, use_cache=False).last_hidden_state for call in calls]
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert model.config.to_json_string() == stored
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        seen = mask.bool() if place == 0 else torch.ones_like(calls[place]["input_ids"], dtype=torch.bool)
        assert torch.allclose(one[seen], other[seen], rtol=0, atol=1e-12)


def test_a_packed_model_goes_through_a_folder(tmp_path):
    """save_pretrained writes nothing of the packing, so that anyone can load the folder."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    assert FlatModel(model.model).layout is Layout.PACKED
    model.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in (tmp_path / "config.json").read_text()


def test_an_attention_that_is_not_plain_is_refused_by_name():
    """Sinks, capped scores, dropout and attention that is not causal are named; None counts as not asked for."""
    states = torch.randn(1, 2, 3, 4)
    starts, module = torch.tensor([0, 3], dtype=torch.int32), torch.nn.Identity()
    lengths = {"cu_seq_lens_q": starts, "max_length_q": 3}
    out, weights = packed_attention(module, states, states, states, None, softcap=None, position_ids=starts, **lengths)
    assert out.shape == (1, 3, 2, 4)
    assert weights is None
    for bad in ({"softcap": 30.0}, {"s_aux": states}, {"dropout": 0.1}, {"is_causal": False}):
        with pytest.raises(BackendError, match=f"plain causal attention, got {next(iter(bad))}"):
            packed_attention(module, states, states, states, None, **lengths, **bad)


def test_rotations_that_depend_on_the_longest_sequence_are_said(caplog):
    """Positions whose frequencies change with a neighbour's length are warned about, plain ones are not."""
    moving = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    FlatModel(make(lambda: LlamaModel(LlamaConfig(**SHAPE, rope_parameters=moving))))
    assert "rotary positions of kind dynamic" in caplog.text
    caplog.clear()
    FlatModel(make(PACKED["llama"]))
    assert "rotary" not in caplog.text


@pytest.mark.parametrize("kind", ["qwen3", "window"])
def test_where_key_heads_cannot_be_shared_each_head_has_its_own(monkeypatch, kind):
    """As on CUDA outside flash attention, torch is handed as many key heads as heads; answers and gradients are the same."""
    batch, attention = batch_of([6, 2, 5]), packed_attention_module.functional.scaled_dot_product_attention

    def answer():
        model, seen = make(PACKED[kind]), []
        flat = FlatModel(model)

        def spy(query, key, value, **options):
            seen.append((key.shape[1] == value.shape[1] == query.shape[1], options["enable_gqa"]))
            return attention(query, key, value, **options)

        with monkeypatch.context() as patch:
            patch.setattr(packed_attention_module.functional, "scaled_dot_product_attention", spy)
            states = flat(batch)
        states.square().sum().backward()
        return [states.detach(), *(value.grad for value in model.parameters())], set(seen)

    shared, seen = answer()
    assert seen == {(False, True)}
    monkeypatch.setattr(packed_attention_module, "CUDA", "cpu")
    own, seen = answer()
    assert seen == {(True, False)}
    torch.testing.assert_close(own, shared, rtol=1e-12, atol=1e-12)
