"""Updates of the tensors that can have changed, for engines that have the rest; whoever does not have it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato_engines import ManifestError, SamplingParams, TensorSpec, WeightManifest, WeightUpdateError
from ostinato_engines.weight_blocks import block_of, whole_blocks

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("input_layernorm", "self_attn.q_norm")),
    *(f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkvo"),
    *(f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up", "down")),
    *(f"model.layers.2.mlp.experts.{number}.{part}_proj.weight" for number in range(3) for part in ("gate", "up")),
    "model.layers.2.mlp.gate.weight",
    "model.norm.weight",
    "lm_head.weight",
]
MANIFEST = WeightManifest(4, tuple(TensorSpec(name, (2, 2), "float32") for name in NAMES))


@given(st.lists(st.sampled_from(NAMES), unique=True))
@settings(max_examples=60, deadline=None)
def test_what_engines_join_changes_as_a_whole(names):
    """With a tensor go all of its block and no other's, in the model's order; what is whole stays as it is."""
    found = whole_blocks(names, NAMES)
    assert set(names) <= set(found)
    assert {block_of(name) for name in found} == {block_of(name) for name in names}
    assert list(found) == [name for name in NAMES if name in found]
    assert whole_blocks(found, NAMES) == found
    joined = [{"q", "k", "v"}, {"gate", "up"}]
    for each in joined:
        for layer in range(2):
            there = {
                part
                for part in each
                if any(name.startswith(f"model.layers.{layer}.") and f".{part}_proj" in name for name in found)
            }
            assert there in (set(), each)
    assert sum("experts" in name for name in found) in (0, 6)


def test_a_manifest_says_what_cannot_have_changed():
    """The rest has a name that depends on the model and on what changes, and not on the version; a part holds only what changes."""
    manifest = MANIFEST.resting_on("abc", ["model.layers.1.self_attn.v_proj.weight"])
    assert manifest.tensors == MANIFEST.tensors
    part = manifest.partial()
    assert part is not None
    assert [spec.name for spec in part.tensors] == list(part.changing)
    assert set(part.changing) == {name for name in NAMES if name.startswith("model.layers.1.self_attn.")}
    assert part.is_partial
    assert (part.version, part.base) == (4, manifest.base)
    later = WeightManifest(5, MANIFEST.tensors).resting_on("abc", [part.changing[0]])
    assert later.base == manifest.base
    assert MANIFEST.resting_on("abd", [part.changing[0]]).base != manifest.base
    rounded = WeightManifest(4, tuple(TensorSpec(name, (2, 2), "bfloat16") for name in NAMES))
    assert rounded.resting_on("abc", [part.changing[0]]).base != manifest.base
    assert MANIFEST.resting_on("abc", ["model.layers.0.mlp.up_proj.weight"]).base != manifest.base


def test_where_everything_may_change_there_is_no_part():
    """Without adapters, with adapters nowhere or everywhere, the whole model is sent; a part without a base is refused."""
    assert MANIFEST.partial() is None
    assert MANIFEST.resting_on("abc", []) == MANIFEST
    assert MANIFEST.resting_on("abc", NAMES).partial() is None
    for wrong in ({"base": "x"}, {"changing": ("a",)}, {"is_partial": True}):
        with pytest.raises(ManifestError, match="base must be given"):
            WeightManifest(1, (), **wrong)


torch = pytest.importorskip("torch")


def pairs_of(model, names=None):
    """Copies of the model's parameters, or of some."""
    return [
        (name, tensor.detach().clone()) for name, tensor in model.named_parameters() if names is None or name in names
    ]


def changed(model, names, by):
    """The model with some tensors moved."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name in names:
                tensor += by
    return model


@pytest.fixture
def parts(make_model):
    """A model whose first layer's attention changes, the manifest of that, and a function that gives the part of a version and its tensors."""
    pytest.importorskip("transformers")
    model = make_model(seed=3)
    manifest = WeightManifest.from_tensors(1, pairs_of(model)).resting_on(
        "base", ["model.layers.0.self_attn.q_proj.weight"]
    )

    def part(version):
        partial = manifest.partial()
        assert partial is not None
        partial = WeightManifest(version, partial.tensors, partial.changing, partial.base, True)
        return partial, pairs_of(changed(model, partial.changing, 0.25), partial.changing)

    return model, manifest, part


async def logprobs_of(server):
    """What the engine gives a greedy continuation."""
    output = await server.generate([5, 6, 7], SamplingParams(max_tokens=6, temperature=0), "ask")
    return output.token_ids, output.logprobs


async def test_a_part_gives_what_the_whole_would(make_model, parts):
    """After a whole update two parts in a row leave the engine with the bits of the whole model, and its version moves with each."""
    from ostinato_engines.transformers_server import TransformersServer

    model, manifest, part = parts
    own = make_model(seed=0)
    async with TransformersServer(own) as server:
        assert server.capabilities().partial_updates
        await server.update_weights(manifest, iter(pairs_of(model)))
        for version in (2, 3):
            await server.update_weights(*part(version))
            assert server.policy_version == version
            expected = dict(pairs_of(model))
            assert all(torch.equal(tensor, expected[name]) for name, tensor in own.named_parameters())
        found = await logprobs_of(server)
    async with TransformersServer(model) as cold:
        assert (await logprobs_of(cold))[0] == found[0]


async def test_an_engine_without_the_rest_refuses_a_part(make_model, parts):
    """A part is refused before a tensor is read by an engine that is new, that slept without its weights, whose last update failed, or that
    holds another base; the whole model brings it back."""
    from ostinato_engines.transformers_server import TransformersServer

    model, manifest, part = parts

    def unread():
        raise AssertionError("read")
        yield

    async def refuses(server):
        before = server.policy_version
        with pytest.raises(ManifestError, match="send the whole model"):
            await server.update_weights(part(9)[0], unread())
        assert server.policy_version == before

    async with TransformersServer(make_model(seed=0)) as server:
        await refuses(server)
        await server.update_weights(WeightManifest.from_tensors(1, pairs_of(model)), iter(pairs_of(model)))
        await refuses(server)  # whose rest nobody has named
        await server.update_weights(manifest, iter(pairs_of(model)))
        await server.update_weights(*part(2))
        await server.sleep(2)
        await server.wake_up()
        await refuses(server)
        await server.update_weights(manifest, iter(pairs_of(model)))
        partial, tensors = part(3)
        with pytest.raises(WeightUpdateError):
            await server.update_weights(partial, iter(tensors[:1]))
        await refuses(server)
        await server.update_weights(manifest, iter(pairs_of(model)))
        await server.sleep(1)
        await server.wake_up()
        await server.update_weights(*part(4))
        others = WeightManifest.from_tensors(5, pairs_of(model)).resting_on("another", [manifest.changing[0]])
        await server.update_weights(others, iter(pairs_of(model)))
        await refuses(server)
