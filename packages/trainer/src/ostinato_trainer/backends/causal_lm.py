"""`CausalLM`: a Hugging Face causal language model that answers flat batches, and its folder on disk.

Invariant: what it says of a token depends on the tokens before it in its own sequence only, never on how sequences
are laid out or grouped. The layout is `ostinato_trainer.backends.packing`'s. It knows no loss and no optimizer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ostinato_trainer.backends.base import EntropyMode
from ostinato_trainer.backends.model_folder import GENERATION_FILE, copy_generation_config, copy_tokenizer
from ostinato_trainer.backends.packing import FlatModel, Layout
from ostinato_trainer.backends.sequence_ranks import SequenceRanks
from ostinato_trainer.backends.token_log_probs import chosen_log_probs
from ostinato_trainer.batch import Batch, moved
from ostinato_trainer.errors import BackendError
from ostinato_trainer.heartbeat import beat
from ostinato_trainer.home_paths import home_path

_logger = logging.getLogger(__name__)


class CausalLM:
    """Wraps a model in evaluation mode (no dropout, so that old and new log-probabilities are those of one
    function)."""

    def __init__(
        self,
        model: Any,
        *,
        autocast: torch.dtype | None = None,
        remove_padding: bool = True,
        compiled: bool = False,
        recomputed: bool = False,
        sequence_ranks: SequenceRanks | None = None,
    ) -> None:
        """
        Args:
            model: A `transformers` causal language model, on its device.
            autocast: Type to compute in where it is not the parameters' own.
            remove_padding: Pack sequences where the model can; see `FlatModel`.
            compiled: Let torch.compile fuse the layers, and what happens to logits.
            recomputed: Keep only each layer's inputs for the backward pass; such a model cannot be copied.
            sequence_ranks: With whom packed rows are shared; all are asked the same.

        Raises:
            BackendError: rows cannot be shared.
        """
        self._ranks = sequence_ranks
        self.model: nn.Module = model.eval()
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._autocast = autocast
        self._head: nn.Module | None = model.get_output_embeddings()
        self._backbone: nn.Module = model.base_model
        self._chunked = self._head is not None and self._backbone is not model and self._head_is_all(self._head)
        self._compiled = compiled
        self._flat = FlatModel(
            self._backbone if self._chunked else model,
            output="last_hidden_state" if self._chunked else "logits",
            remove_padding=remove_padding,
            compute_dtype=autocast,
            compiled=compiled,
            recomputed=recomputed,
            sequence_ranks=sequence_ranks,
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def layout(self) -> Layout:
        """How sequences stand in the model's input."""
        return self._flat.layout

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(self.model.parameters()).dtype

    def log_probs(
        self, batch: Batch, wanted: Tensor, *, temperature: float, entropy: EntropyMode = EntropyMode.OFF
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of chosen tokens of a batch that lies on the model's device.

        Args:
            batch: The sequences.
            wanted: bool [T]; never True at the start of a sequence. On the host, so that nobody waits for the device.
            temperature: Above 0.
            entropy: See `EntropyMode`.

        Returns:
            Vectors [T], 0 without a gradient where not wanted; the second is None where it was not asked for.
        """
        tokens, states = self._states_before(batch, wanted)
        with self._precision():
            chosen, spread = chosen_log_probs(
                states,
                batch.token_ids[tokens],
                self._head if self._chunked and self._head is not None else _as_it_is,
                vocab_size=self.vocab_size,
                temperature=temperature,
                entropy=entropy,
                compiled=self._compiled,
            )
        return self._at(tokens, chosen, batch), None if spread is None else self._at(tokens, spread, batch)

    def values(self, batch: Batch, wanted: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """What a head says of the chosen tokens, by the hidden states that they are predicted from: [T], 0 without a gradient elsewhere.

        Args:
            batch: As in `log_probs`.
            wanted: As in `log_probs`.
            head: From states [S, hidden] to numbers [S].

        Raises:
            BackendError: the model does not expose its hidden states.
        """
        if not self._chunked:
            raise BackendError(
                f"the model must expose its hidden states, got {type(self.model).__name__}, which does not; use another"
            )
        tokens, states = self._states_before(batch, wanted)
        return self._at(tokens, head(states), batch)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters (tied ones once) and persistent buffers by name, in the model's order."""
        return persistent_tensors(self.model)

    def save_hf(self, directory: Path, *, tokenizer_source: str | Path | None, weights: Mapping[str, Tensor]) -> None:
        """Writes the model as `transformers` does, and unchanged what the folder that it came from says of the tokenizer and of sampling.

        Args:
            directory: Made where absent.
            tokenizer_source: Folder or hub id that it came from.
            weights: `named_tensors`, or copies of them: the model's own may be others for a while, or nowhere.
        """
        from transformers import GenerationConfig

        directory.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        of_sampling, model.generation_config = model.generation_config, GenerationConfig()
        try:
            model.save_pretrained(directory, state_dict=dict(weights))
        finally:
            model.generation_config = of_sampling
        config = copy.deepcopy(model.config)
        config.dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
        config.save_pretrained(directory)
        if tokenizer_source is None or not copy_generation_config(tokenizer_source, directory):
            of_sampling.to_json_file(directory / GENERATION_FILE, keys_to_pop=["compile_config"])
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, directory)

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)

    def _states_before(self, batch: Batch, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The flat positions of chosen tokens (int64 [S]), of those that this rank answers for where rows are shared, and the states that they are
        predicted from, [S, hidden]."""
        tokens = wanted.nonzero().squeeze(-1)
        places = tokens - 1
        if self._ranks is not None:
            tokens, places = self._ranks.predicted_here(tokens, batch.num_tokens)
        states = self._flat(batch).index_select(0, moved(places, batch.token_ids.device))
        beat()
        return moved(tokens, batch.token_ids.device), states

    def _at(self, tokens: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """[T]: `values` at `tokens`, with those of the other ranks where rows are shared; 0 elsewhere."""
        placed = values.new_zeros(batch.num_tokens).index_copy(0, tokens, values)
        return placed if self._ranks is None else self._ranks.whole(placed)

    def _head_is_all(self, head: nn.Module) -> bool:
        """Whether the logits are the output layer's and nothing more: some models scale or cap them afterwards.

        Large numbers stand in for the layer's answer, so that what happens to logits shows however small a new model's are.
        """
        probe = torch.arange(min(4, self.vocab_size), device=self.device).unsqueeze(0)
        asked: list[Tensor] = []
        stand_ins: list[Tensor] = []

        def stand_in(_: nn.Module, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
            asked.append(inputs[0])
            stand_ins.append(torch.linspace(-1e3, 1e3, answer.numel(), device=answer.device).view_as(answer).to(answer))
            return stand_ins[-1]

        hook = head.register_forward_hook(stand_in)
        try:
            with torch.no_grad(), self._precision():
                logits = self.model(input_ids=probe, use_cache=False).logits
                states = self._backbone(input_ids=probe, use_cache=False).last_hidden_state
        except (AttributeError, TypeError, RuntimeError) as error:
            _logger.warning("The model does not expose its hidden states (%s); whole logits are kept in memory", error)
            return False
        finally:
            hook.remove()
        alike = len(asked) == 1 and _alike(asked[0], states) and _alike(stand_ins[0], logits)
        if not alike:
            _logger.warning("The model changes its logits after the output layer; whole logits are kept in memory")
        return alike


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers by name, in the model's order."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return tensors


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.float(), right.float(), rtol=1e-3, atol=1e-4)


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    key: str = "actor_rollout_ref.model.path",
    needs_head: bool = True,
) -> Any:
    """A `transformers` causal language model from a folder or a hub id.

    Args:
        path: Of the folder, or a hub id.
        dtype: What its parameters become.
        device: Where they go.
        key: What messages say to change.
        needs_head: Whether the output layer's weights must be there; of all others none may be missing.

    Raises:
        BackendError: there is no such folder, it holds no model that `transformers` can load, or not all of one.
    """
    from transformers import AutoModelForCausalLM

    folder = home_path(path, key, BackendError)
    looks_local = (
        folder.exists() or folder.is_absolute() or str(path).startswith(("./", "../", "~")) or str(path).count("/") > 1
    )
    if looks_local and not (folder / "config.json").is_file():
        found = (
            "no such folder" if not folder.exists() else "a folder without config.json" if folder.is_dir() else "a file"
        )
        raise BackendError(
            f"model path must be a Hugging Face model folder or a hub id, got {str(path)!r} ({found}); fix {key}"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder) if looks_local else str(path), dtype=dtype, output_loading_info=True
        )
    except (
        Exception
    ) as error:  # transformers, huggingface_hub and safetensors each raise their own: here they become one message
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BackendError(
            f"model path must hold a causal language model, got {str(path)!r}: {reason}; check {key}"
        ) from error
    model, report = loaded
    _check_tensors(model, report, path, key, needs_head=needs_head)
    return model.to(device)


def _check_tensors(model: Any, report: Mapping[str, Any], path: str | Path, key: str, *, needs_head: bool) -> None:
    """Raises BackendError where `transformers` has found too few tensors, two for one, or a head that is not read; see `load_causal_lm`."""
    missing = sorted(set(report["missing_keys"]) - (set() if needs_head else _head_names(model)))
    if missing:  # transformers fills them with random numbers
        raise BackendError(
            f"model path must hold all weights of a {type(model).__name__}, got {str(path)!r} without {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}; fetch it again, or check {key}"
        )
    head, declared = model.get_output_embeddings(), getattr(model, "_tied_weights_keys", None)
    is_tied = bool(declared) and model.config.get_text_config().tie_word_embeddings
    if needs_head and is_tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        raise BackendError(  # transformers computes with both; engines do not
            "model path must hold one tensor as the embedding and the output layer, which config.json ties, got two that differ in "
            f"{str(path)!r}; check {key}"
        )
    is_readable = needs_head or "score.weight" not in report["unexpected_keys"]
    if not is_readable and not any(model_folder(path, key).glob("*.safetensors")):
        raise BackendError(
            f"a scalar head must be stored in safetensors to be read, got {str(path)!r} with a head and without such files; "
            f"convert it, or change {key}"
        )


def model_folder(path: str | Path, key: str) -> Path:
    """The folder of a model; of a hub id the one that the hub's client keeps, which it has once the model has been loaded.

    Args:
        path: Folder or hub id.
        key: What messages say to change.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = home_path(path, key, BackendError)
    if folder.exists() or folder.is_absolute() or str(path).count("/") > 1:
        return folder
    kept = try_to_load_from_cache(str(path), "config.json")
    return Path(kept).parent if isinstance(kept, str) else folder


def _head_names(model: Any) -> set[str]:
    """Names of the output layer's parameters."""
    head = model.get_output_embeddings()
    own = [] if head is None else list(head.parameters())
    return {name for name, value in model.named_parameters() if any(value is each for each in own)}
