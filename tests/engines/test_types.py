"""What crosses the border checks itself and travels."""

import pickle

import msgspec
import pytest

from ostinato_engines import (
    EngineError,
    EngineInputError,
    ManifestError,
    SamplingParams,
    SamplingParamsError,
    StopReason,
    TensorSpec,
    TokenOutput,
    WeightManifest,
    as_token_output,
    errors,
)


def test_unset_parameters_are_neutral():
    """What a request leaves out changes nothing: temperature 1, no filter, no penalty."""
    params = SamplingParams.from_mapping({"temperature": 1})
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, -1, 0.0, 1.0)
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": 1e31}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-31}, "repetition_penalty"),
        ({"repetition_penalty": 1e31}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"tempertaure": 1}, "did you mean 'temperature'"),
        ({"max_new_tokens": 1}, "use max_tokens"),
        ({"frobnicate": 1}, "known are"),
        ({3: 1}, "got 3"),
        ([("temperature", 1)], "mapping"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(params, named):
    """Unknown keys, wrong types and values out of range each raise an error that names them."""
    with pytest.raises(SamplingParamsError, match=named):
        SamplingParams.from_mapping(params)


def test_stop_ids_may_come_as_a_list():
    """A list of stop ids becomes a tuple, from a mapping and from code alike."""
    assert SamplingParams.from_mapping({"stop_token_ids": [3, 4]}).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_bare_ids_have_no_logprobs():
    """A third party's list of ids becomes an output whose logprobs are absent."""
    assert as_token_output([5, 6]) == TokenOutput([5, 6], None, StopReason.STOP)
    whole = TokenOutput([1], [-0.5], StopReason.LENGTH)
    assert as_token_output(whole) is whole


@pytest.mark.parametrize("raw", ["text", None, [1.5], [True], [-1], {"token_ids": []}])
def test_other_answers_are_refused(raw):
    """What is neither an output nor ids is an error, not an empty answer."""
    with pytest.raises(EngineInputError, match="generate must return"):
        as_token_output(raw)


def test_logprobs_match_tokens():
    """An output with more or fewer logprobs than tokens cannot be built."""
    with pytest.raises(EngineInputError, match="one entry per token"):
        TokenOutput([1, 2], [-0.1], StopReason.STOP)


def test_outputs_travel():
    """Outputs and parameters survive pickle and msgspec."""
    out = TokenOutput([1, 2], [-0.1, -0.2], StopReason.STOP, 2)
    assert pickle.loads(pickle.dumps(out)) == out
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=TokenOutput) == out
    params = SamplingParams(seed=3, stop_token_ids=(1,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_manifest_describes_tensors():
    """A manifest is made from anything with shape and dtype, and its version cannot be negative."""

    class Thing:
        shape = (2, 3)
        dtype = "torch.float32"

    assert WeightManifest.from_tensors(1, [("w", Thing())]).tensors == (TensorSpec("w", (2, 3), "float32"),)
    with pytest.raises(ManifestError, match="version"):
        WeightManifest(-1, ())


LEAVES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, EngineError) and value is not EngineError
]


@pytest.mark.parametrize("leaf", LEAVES)
def test_errors_are_standard_and_picklable(leaf):
    """Every error is also a standard exception and survives pickle with its message."""
    standard = [
        base
        for base in leaf.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    assert standard
    again = pickle.loads(pickle.dumps(leaf("x must be y, got z; do w")))
    assert (type(again), str(again)) == (leaf, "x must be y, got z; do w")
