"""The benchmark of weight syncs runs where there is no accelerator, and says what it is asked for."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from benchmarks import weight_sync
from benchmarks.weight_digests import digests_of


@pytest.mark.slow
def test_the_whole_benchmark_at_a_tiny_size(tmp_path, capsys):
    """One FSDP2 rank and an engine on the CPU: the engine has the trainer's bits before and after an optimizer step, samples what the trainer
    computes, and every way gives a figure."""
    arguments = ["--repeats", "1", "--way-repeats", "1", "--directory", str(tmp_path)]
    assert weight_sync.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["equal"] is found["equal_after_step"] is found["agrees"] is True
    assert found["changed_by_step"] == found["parameters"] > 0
    assert found["seconds"] > 0
    assert found["seconds_over_bound"] == pytest.approx(found["seconds"] - found["copy_seconds"], abs=1e-3)
    assert set(found["ways"]) == set(weight_sync.WAYS)
    assert all(way["seconds"] > 0 for way in found["ways"].values())
    assert found["sleep"]["agrees"] is found["ways"]["lora"]["agrees"] is True
    assert 0 < found["ways"]["lora"]["sent_tensors"] < found["tensors"]
    assert not list(tmp_path.iterdir())


def test_what_vllm_keeps_together_is_hashed_together():
    """Parameters that vLLM fuses have the digest of their bytes one after the other, under vLLM's name."""
    import torch

    parts = {
        name: torch.randn(3, 2, generator=torch.Generator().manual_seed(place)) for place, name in enumerate("qkv")
    }
    named = [(f"layers.0.self_attn.{name}_proj.weight", tensor) for name, tensor in parts.items()]
    whole = [("layers.0.self_attn.qkv_proj.weight", torch.cat(list(parts.values())))]
    assert digests_of(named, fused=True) == digests_of(whole, fused=False)
    assert digests_of(named[::-1], fused=True) != digests_of(whole, fused=False)


def test_an_unknown_way_is_refused(capsys):
    """A misspelt way ends the program before anything starts."""
    with pytest.raises(SystemExit):
        weight_sync.parsed(["--ways", "local,telepathy"])
    assert "telepathy" in capsys.readouterr().err
