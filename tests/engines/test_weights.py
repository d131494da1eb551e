"""A weight update is checked before the first byte and complete after the last."""

import pytest

from ostinato_engines import ManifestError, WeightManifest, WeightUpdateError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ostinato_engines.weights import WeightWriter  # noqa: E402


def never():
    """Nobody cancels."""
    return False


def test_tied_weights_come_under_any_name(make_model):
    """A tied tensor may be sent under one of its names or, equal, under both; unequal is an error."""
    model, other = make_model(), make_model(seed=1)
    writer = WeightWriter(model)
    for tensors in (dict(other.named_parameters()), dict(other.state_dict())):
        manifest = WeightManifest.from_tensors(1, tensors.items())
        writer.check(manifest)
        writer.write(manifest, tensors.items(), cancelled=never)
        assert torch.equal(model.lm_head.weight, other.lm_head.weight)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    only_head = {("lm_head.weight" if n == "model.embed_tokens.weight" else n): t for n, t in other.named_parameters()}
    writer.check(WeightManifest.from_tensors(1, only_head.items()))
    unequal = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    unequal["lm_head.weight"] += 1
    with pytest.raises(WeightUpdateError, match="ties it"):
        writer.write(WeightManifest.from_tensors(1, unequal.items()), unequal.items(), cancelled=never)


def test_untied_weights_need_both(make_model):
    """Without tying, a manifest without the output embeddings is incomplete."""
    model = make_model(tied=False)
    tensors = {name: tensor for name, tensor in model.named_parameters() if name != "lm_head.weight"}
    with pytest.raises(ManifestError, match=r"without lm_head\.weight"):
        WeightWriter(model).check(WeightManifest.from_tensors(1, tensors.items()))


def test_another_dtype_needs_leave(make_model):
    """Float32 weights for a bfloat16 model are refused, and rounded where casting was asked for."""
    source = make_model()
    model = make_model(seed=1).to(torch.bfloat16)
    tensors = dict(source.named_parameters())
    manifest = WeightManifest.from_tensors(1, tensors.items())
    with pytest.raises(ManifestError, match="cast_weights"):
        WeightWriter(model).check(manifest)
    writer = WeightWriter(model, cast=True)
    writer.check(manifest)
    writer.write(manifest, tensors.items(), cancelled=never)
    assert torch.equal(model.lm_head.weight, source.lm_head.weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: [*pairs, pairs[0]], "twice"),
        (lambda pairs: [("no.such", pairs[0][1]), *pairs[1:]], "beyond it"),
        (lambda pairs: [(pairs[0][0], pairs[0][1][:1]), *pairs[1:]], "as in the manifest"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].double()), *pairs[1:]], "as in the manifest"),
        (lambda pairs: pairs[:-1], "1 missing"),
        (lambda pairs: [None, *pairs], "TypeError"),
    ],
)
def test_a_stream_keeps_to_its_manifest(make_model, spoil, message):
    """A tensor twice, unknown, of another shape or type, or missing breaks the update with its name."""
    model = make_model()
    pairs = list(make_model(seed=1).named_parameters())
    writer = WeightWriter(model)
    with pytest.raises(WeightUpdateError, match=message):
        writer.write(WeightManifest.from_tensors(1, pairs), spoil(pairs), cancelled=never)
