"""A weight update is checked before the first byte and complete after the last."""

import weakref

import pytest

from ostinato_engines import ManifestError, TensorSpec, WeightManifest, WeightUpdateError

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


def test_a_stream_may_come_in_shards_and_in_any_order(make_model):
    """Shards one after the other, each made when it is its turn, in an order that is not the manifest's, fill the model."""
    model, other = make_model(), make_model(seed=1)
    manifest = WeightManifest.from_tensors(1, other.named_parameters())
    names = [spec.name for spec in manifest.tensors]
    wanted = dict(other.named_parameters())
    shards = [names[start::3] for start in (2, 0, 1)]
    stream = ((name, wanted[name].detach().clone()) for shard in shards for name in shard)
    WeightWriter(model).write(manifest, stream, cancelled=never)
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


def test_one_tensor_of_the_stream_lives_at_a_time(make_model):
    """The writer lets each tensor go before it takes the next, so that a stream that makes them costs one."""
    model = make_model()
    live, counts = weakref.WeakSet(), []

    def stream():
        for name, parameter in make_model(seed=1).named_parameters():
            tensor = parameter.detach().clone()
            live.add(tensor)
            counts.append(len(live))
            yield name, tensor
            del tensor

    WeightWriter(model).write(WeightManifest.from_tensors(1, model.named_parameters()), stream(), cancelled=never)
    assert set(counts) == {1}


class WithBuffers(torch.nn.Module):
    """A model with a parameter, a persistent and a temporary buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value))
        self.register_buffer("scale", torch.full((3,), value))
        self.register_buffer("steps", torch.tensor(int(value)))
        self.register_buffer("angles", torch.full((4,), value), persistent=False)


def test_buffers_come_with_the_weights_or_stay():
    """Persistent buffers are written where they are sent and left as they are where not; others are no weights."""
    model, other = WithBuffers(0.0), WithBuffers(5.0)
    writer = WeightWriter(model)
    for tensors, scale in ((dict(other.named_parameters()), 0.0), (other.state_dict(), 5.0)):
        manifest = WeightManifest.from_tensors(1, tensors.items())
        writer.check(manifest)
        writer.write(manifest, tensors.items(), cancelled=never)
        assert (model.weight.tolist(), model.scale.tolist(), model.steps.item()) == ([5.0] * 2, [scale] * 3, int(scale))
    assert model.angles.tolist() == [0.0] * 4
    with pytest.raises(ManifestError, match="angles"):
        writer.check(WeightManifest.from_tensors(1, [*other.state_dict().items(), ("angles", other.angles)]))
    with pytest.raises(ManifestError, match=r"without weight"):
        writer.check(WeightManifest.from_tensors(1, [("scale", other.scale)]))


@pytest.mark.parametrize(
    ("own", "sent", "allowed"),
    [
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", True),
        ("float16", "float64", True),
        ("float32", "int32", False),
        ("int64", "float32", False),
        ("int64", "int32", False),
        ("float32", "complex64", False),
        ("float32", "Tensor", False),
    ],
)
def test_casting_is_between_floating_types_and_only_where_asked(own, sent, allowed):
    """Another floating type needs cast=True in either direction; anything else is refused with it, too."""
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.ones(2, dtype=getattr(torch, own)), requires_grad=False))
    manifest = WeightManifest(1, (TensorSpec("w", (2,), sent),))
    with pytest.raises(ManifestError, match=f"w must have dtype {own}, got {sent}"):
        WeightWriter(model).check(manifest)
    writer = WeightWriter(model, cast=True)
    if not allowed:
        with pytest.raises(ManifestError, match=f"w must have dtype {own}, got {sent}"):
            writer.check(manifest)
        return
    writer.check(manifest)
    third = torch.full((2,), 1 / 3, dtype=getattr(torch, sent))
    writer.write(manifest, [("w", third)], cancelled=never)
    assert torch.equal(model.w, third.to(getattr(torch, own)))


def test_tied_weights_may_be_nan(make_model):
    """Equal means the same numbers under both names, NaN included: what the values are worth is not asked here."""
    model = make_model()
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in model.state_dict().items()}
    WeightWriter(model).write(WeightManifest.from_tensors(1, tensors.items()), tensors.items(), cancelled=never)
    assert model.lm_head.weight.isnan().all()
