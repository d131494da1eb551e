"""A model answers flat batches as it would answer each sequence alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.causal_lm import CausalLM, load_causal_lm
from ostinato_trainer.backends.packing import Layout
from ostinato_trainer.batch import Batch
from ostinato_trainer.errors import BackendError
from ostinato_trainer.heartbeat import num_beats
from ostinato_trainer.segments import Segment

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, initializer_range=0.3))


def granite():
    """Divides its logits after the output layer."""
    return GraniteForCausalLM(GraniteConfig(**SHAPE, num_key_value_heads=1, initializer_range=0.3, logits_scaling=3.0))


def gpt2():
    """Learned positions and no rotary embedding."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    )


def batch_of(lengths, positions=None):
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
    return Batch.from_segments(
        [
            Segment(row[:1], row[1:], [1] * (len(row) - 1), None, "g", f"t{place}", 0.0, positions and positions[place])
            for place, row in enumerate(ids)
        ]
    )


def alone(model, batch, temperature, positions=None):
    """Log-probabilities of each sequence on its own, from whole logits."""
    result = []
    for place in range(batch.num_sequences):
        ids = batch.token_ids[int(batch.cu_seqlens[place]) : int(batch.cu_seqlens[place + 1])]
        extra = {} if positions is None else {"position_ids": torch.tensor([positions[place]])}
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **extra).logits[
            0
        ]
        table = (logits / temperature).log_softmax(-1)
        result += [torch.zeros(1, dtype=table.dtype), table[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(result)


@pytest.mark.parametrize("make", [llama, granite, gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padding_changes_nothing(make, temperature):
    """In float64, sequences of unlike length in one padded batch get what each gets alone, whatever the architecture does at its end."""
    torch.manual_seed(0)
    model = make().double().eval()
    batch = batch_of([9, 2, 5, 1])
    log_probs, entropy = CausalLM(model).log_probs(
        batch, batch.loss_mask, temperature=temperature, entropy=EntropyMode.VALUE
    )
    assert torch.allclose(log_probs, alone(model, batch, temperature), rtol=0, atol=1e-12)
    assert entropy is not None
    assert (entropy[batch.loss_mask] > 0).all()
    assert not entropy[~batch.loss_mask].any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("make", [llama, granite, gpt2])
def test_sixteen_bits_stay_near_whatever_the_layout(make, packed):
    """Computing in bfloat16 keeps parameters and answers in float32, near the float32 answers, and the gradients too."""
    torch.manual_seed(0)
    model = make().eval()
    batch = batch_of([9, 2, 5, 1])
    results = []
    for autocast in (None, torch.bfloat16):
        lm = CausalLM(model, autocast=autocast, remove_padding=packed)
        assert lm.layout is (Layout.PACKED if packed else Layout.PADDED)
        log_probs, _ = lm.log_probs(batch, batch.loss_mask, temperature=1.0)
        assert log_probs.dtype == torch.float32
        gradients = torch.autograd.grad(log_probs.sum(), list(model.parameters()), allow_unused=True)
        assert all(gradient is None or gradient.dtype == torch.float32 for gradient in gradients)
        flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        results.append((log_probs.detach(), flat))
    (exact, exact_gradient), (rough, rough_gradient) = results
    assert (exact - rough).norm() <= 0.03 * exact.norm()
    assert (exact_gradient - rough_gradient).norm() <= 0.06 * exact_gradient.norm()
    assert not torch.equal(exact, rough)


def test_a_cap_on_logits_is_kept_once_they_have_grown():
    """A new model's logits are too small for their cap to show; it holds when training has made them large."""
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=5.0)
    model = Gemma2ForCausalLM(config).double()
    wrapped, batch = CausalLM(model), batch_of([6, 3])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(200)
        found, _ = wrapped.log_probs(batch, batch.loss_mask, temperature=1.0)
        assert torch.allclose(found, alone(model, batch, 1.0), rtol=0, atol=1e-12)


def test_own_positions_are_used():
    """Position ids that the batch brings reach the model instead of 0, 1, 2, ..."""
    torch.manual_seed(0)
    model = llama().double().eval()
    positions = [[0, 1, 2, 7, 8, 9], [0, 5, 6]]
    batch = batch_of([6, 3], positions)
    got, _ = CausalLM(model).log_probs(batch, batch.loss_mask, temperature=1.0)
    assert torch.allclose(got, alone(model, batch, 1.0, positions), rtol=0, atol=1e-12)
    assert not torch.allclose(got, alone(model, batch, 1.0), rtol=0, atol=1e-6)


def test_only_wanted_tokens_are_computed_and_carry_gradients():
    """Tokens outside `wanted` are exactly 0 and no gradient reaches the model through them."""
    torch.manual_seed(0)
    model = llama().double()
    batch = batch_of([6])
    wanted = torch.zeros_like(batch.loss_mask)
    wanted[3] = True
    log_probs, _ = CausalLM(model).log_probs(batch, wanted, temperature=1.0)
    assert log_probs.nonzero().tolist() == [[3]]
    log_probs[[0, 1, 2, 4, 5]].sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_each_pass_is_a_heartbeat():
    """Whoever computes with the model for hours is seen to be at work, pass by pass."""
    batch, before = batch_of([4, 3]), num_beats()
    wanted = torch.ones_like(batch.loss_mask)
    wanted[batch.cu_seqlens[:-1]] = False
    lm = CausalLM(llama())
    lm.log_probs(batch, wanted, temperature=1.0)
    lm.values(batch, wanted, lambda states: states.sum(-1))
    assert num_beats() == before + 2


def test_tied_weights_are_listed_once_and_cover_the_model():
    """Names are the model's own; a tied output layer does not appear a second time."""
    config = LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)
    names = set(CausalLM(LlamaForCausalLM(config)).named_tensors())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_an_output_layer_beside_the_embedding_that_it_should_be_is_refused(tmp_path):
    """Where config.json ties them and both are stored, they are alike, or nobody can say which an engine computes with."""
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    rows = stored["model.embed_tokens.weight"]
    save_file({**stored, "lm_head.weight": rows.clone()}, file, metadata={"format": "pt"})
    load_causal_lm(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    save_file({**stored, "lm_head.weight": rows + 1.0}, file, metadata={"format": "pt"})
    with pytest.raises(
        BackendError, match=r"which config\.json ties, got two that differ.*actor_rollout_ref\.model\.path"
    ):
        load_causal_lm(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "damaged"])
def test_a_path_that_is_no_model_is_named(tmp_path, kind):
    """A missing path, a folder without a model, a file, and a damaged model: one message each with path and key."""
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "damaged":
        (path / "config.json").write_text('{"model_type": "llama"}')
        (path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(BackendError, match=r"model path must .*model.*actor_rollout_ref\.model\.path"):
        load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"))
