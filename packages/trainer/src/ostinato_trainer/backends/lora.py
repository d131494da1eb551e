"""Low-rank adapters (LoRA, arXiv:2106.09685): small matrices beside a frozen model's linear layers; the only place that knows peft.

Invariants: the base weights never change, not by a bit; without its adapters the model is the one that was loaded, so it is its own reference;
and what leaves is either the adapters alone or `W + alpha / rank * B A` in new tensors under the base model's own names, so whoever takes
weights need not know that there are adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ostinato_engines import WeightManifest
from ostinato_trainer.backends.state import check_matches
from ostinato_trainer.config.actor import ModelConfig
from ostinato_trainer.errors import BackendError, CheckpointError, MissingExtraError
from ostinato_trainer.home_paths import home_path

ALL_LINEAR: Final = "all-linear"
"""Every linear layer but the output layer."""

LORA_FOLDER: Final = "lora_adapter"
"""Name of the adapters' folder in a model folder."""

_NAME: Final = "default"
_BASE: Final = ".base_layer"
_WEIGHTS_FILE: Final = "adapter_model.safetensors"
_CONFIG_FILE: Final = "adapter_config.json"
_FILE_PREFIX: Final = "base_model.model."
_KEY: Final = "actor_rollout_ref.model"
_PLAIN_KEYS: Final = frozenset(
    (
        *(
            "task_type",
            "peft_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
        ),
        *("r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "qalora_group_size"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)
"""Of peft's configuration: what any adapters may have. Whatever else is set is more than plain LoRA."""
_PLAIN_STARTS: Final = ("gaussian", "orthogonal")
"""First values that leave the model's own weights as they are."""


class LoraOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which adapters a model gets; names follow `actor_rollout_ref.model`."""

    rank: int = 0
    """Of each update, at least 1; with `adapter_path` that of the folder, or 0."""
    alpha: float = 16
    """The update is scaled by `alpha / rank`."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """`all-linear`, names of modules or the ends of their names, or one regular expression for whole names."""
    exclude_modules: str | Sequence[str] | None = None
    """In the same forms, without `all-linear`."""
    adapter_path: str | None = None
    """Folder of adapters in peft's format to go on from; they decide rank, alpha and modules."""
    seed: int = 0
    """Of the adapters' first values."""
    section: str = _KEY
    """Of the configuration, whose keys messages name."""


def lora_options(model: ModelConfig, *, seed: int, section: str = _KEY) -> LoraOptions | None:
    """What a configuration asks for; None where all weights are trained. `section` is where in it `model` stands.

    Raises:
        MissingExtraError: It asks for adapters and peft is not installed.
    """
    if not model.lora_rank and model.lora_adapter_path is None:
        return None
    if find_spec("peft") is None:
        raise MissingExtraError(
            f"peft must be installed for {section}.lora_rank; run: pip install 'ostinato-trainer[lora]'"
        )
    return LoraOptions(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        adapter_path=model.lora_adapter_path,
        seed=seed,
        section=section,
    )


class LoraAdapters:
    """The adapters of one model.

    Args:
        model: A `transformers` model on its device; it is changed in place: its own parameters are frozen.
        options: See `LoraOptions`.
        config: Of the same adapters on another copy of the model: they are made after its pattern, and whoever made them gives them their values.

    Raises:
        ImportError: peft is not installed; `lora_options` says so before.
        BackendError: no such modules, or modules that cannot have adapters; the message lists those that can.
        CheckpointError: `adapter_path` holds no adapters, or those of another model.
    """

    def __init__(self, model: nn.Module, options: LoraOptions, *, config: Any = None) -> None:
        peft = _peft()
        self._model, self._section = model, options.section
        from_folder = config is None and bool(options.adapter_path)
        if config is None:
            config = _stored_config(options) if from_folder else _new_config(model, options)
        self.config = config
        """As peft keeps it; it can be pickled."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
        self._modules = _adapted_modules(model)
        other = next((name for name, module in self._modules.items() if not _is_linear(module.base_layer)), None)
        if other is not None:
            raise BackendError(
                f"{options.section}.target_modules must name linear layers only, got {other}, to which peft gives adapters of another kind; "
                "name attention layers, such as [q_proj,k_proj,v_proj,o_proj]"
            )
        if from_folder:
            self._read(home_path(str(options.adapter_path), f"{options.section}.lora_adapter_path", CheckpointError))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' own parameters by their names in the model; nothing else is trained."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model is the base model."""
        for module in self._modules.values():
            module.enable_adapters(False)
        try:
            yield
        finally:
            for module in self._modules.values():
                module.enable_adapters(True)

    def base_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base model's tensors under its own names, out of all those of the model, in their order."""
        return {_ordinary(name, self._modules): tensor for name, tensor in tensors.items() if not _is_adapter(name)}

    def merged(
        self, tensors: Mapping[str, Tensor], adapters: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """As `base_tensors`, one after the other, adapted weights with their update added, each in a new tensor.

        Args:
            tensors: All those of the model.
            adapters: Copies of `parameters` to take in place of the model's own.
        """
        source = tensors if adapters is None else adapters
        for name, tensor in self.base_tensors(tensors).items():
            yield name, self.merge(name, tensor.detach(), {part: source[part] for part in self.parts_of(name)})

    def manifest_of(self, manifest: WeightManifest, fingerprint: str) -> WeightManifest:
        """The manifest of all tensors with what it says of those that never change: which they are, and of which model."""
        return manifest.resting_on(fingerprint, [spec.name for spec in manifest.tensors if self.parts_of(spec.name)])

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Names of the two matrices that update a tensor of the base model, named as there; none where it has no adapters."""
        module = name.removesuffix(".weight")
        if module == name or module not in self._modules:
            return ()
        return tuple(f"{module}.{part}.{_NAME}.weight" for part in ("lora_A", "lora_B"))

    def merge(self, name: str, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """A tensor of the base model with its update, in a new tensor where it has any.

        Args:
            name: As in the base model.
            weight: Its value.
            parts: The values of `parts_of` it.
        """
        names = self.parts_of(name)
        if not names:
            return weight
        module = self._modules[name.removesuffix(".weight")]
        down, up = (parts[part].detach().to(weight) for part in names)
        update = up @ down * module.scaling[_NAME]
        return weight + (update.T if module.fan_in_fan_out else update)

    def save(self, directory: Path, adapters: Mapping[str, Tensor] | None = None) -> None:
        """Writes the adapters as peft does, so that `PeftModel.from_pretrained` reads them.

        Args:
            directory: Made where absent.
            adapters: Copies of `parameters` to write in place of the model's own.

        Raises:
            OSError, SafetensorError: the folder cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        found = self.parameters() if adapters is None else adapters
        tensors = {_file_name(name): value.detach().cpu().contiguous() for name, value in found.items()}
        save_file(tensors, directory / _WEIGHTS_FILE, metadata={"format": "pt"})
        self.config.save_pretrained(str(directory))

    def _read(self, folder: Path) -> None:
        try:
            stored = load_file(folder / _WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._section}.lora_adapter_path must hold a whole {_WEIGHTS_FILE}, got {folder}: {error}; name another folder"
            ) from error
        parameters = {_file_name(name): value for name, value in self.parameters().items()}
        check_matches(folder, stored, {name: tuple(value.shape) for name, value in parameters.items()})
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(stored[name])


def _peft() -> Any:
    import peft

    return peft


def _new_config(model: Any, options: LoraOptions) -> Any:
    if options.rank < 1 or not options.alpha > 0:
        raise BackendError(
            f"lora_rank must be at least 1 and lora_alpha above 0, got {options.rank} and {options.alpha}; 16 and 32 are usual"
        )
    targets, excluded = options.target_modules, options.exclude_modules
    candidates = _linear_modules(model)
    for key, wanted in (("target_modules", targets), ("exclude_modules", excluded)):
        if wanted is not None and wanted != ALL_LINEAR:
            _check_names(f"{options.section}.{key}", wanted, candidates, model)
    chosen = [name for name in candidates if targets == ALL_LINEAR or _matches(name, targets)]
    if not [name for name in chosen if excluded is None or not _matches(name, excluded)]:
        raise BackendError(
            f"{options.section}.target_modules must leave a module that {options.section}.exclude_modules does not name, got none; "
            f"choose among {_choices(candidates)}"
        )
    written = _as_written(candidates, model) if targets == ALL_LINEAR else targets
    return _peft().LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if float(options.alpha).is_integer() else options.alpha,
        target_modules=written if isinstance(written, str) else list(written),
        exclude_modules=excluded if excluded is None or isinstance(excluded, str) else list(excluded),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _stored_config(options: LoraOptions) -> Any:
    key = f"{options.section}.lora_adapter_path"
    folder = home_path(str(options.adapter_path), key, CheckpointError)
    peft = _peft()
    try:
        if not (folder / _CONFIG_FILE).is_file():
            raise FileNotFoundError(f"no {_CONFIG_FILE} there")  # peft would look for it on the hub
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (
        Exception
    ) as error:  # peft raises whatever reading JSON and making its config raises: here it becomes one message
        raise CheckpointError(
            f"{key} must hold adapters as peft writes them, got {folder}: {' '.join(str(error).split())[:200]}; "
            f"name a folder with {_CONFIG_FILE}"
        ) from error
    special = _beyond_plain_lora(config)
    if special:
        raise CheckpointError(
            f"{key} must hold plain LoRA, got {folder} with {', '.join(special)}; merge those adapters into the model first"
        )
    if options.rank not in (0, config.r):
        raise CheckpointError(
            f"{options.section}.lora_rank must be that of the adapters in {folder}, {config.r}, or 0, got {options.rank}; leave it out"
        )
    config.inference_mode = False
    config.init_lora_weights = True  # of whatever kind they were, the folder's values replace them
    return config


def _beyond_plain_lora(config: Any) -> list[str]:
    """What adapters have that `W + alpha / rank * B A` does not say, such as trained biases, other scales, or a base that is not the model's."""
    lora = _peft().LoraConfig
    if not isinstance(config, lora):
        return [f"peft_type={getattr(config.peft_type, 'value', config.peft_type)}"]
    plain = lora().to_dict()
    return [
        f"{name}={value}"
        for name, value in config.to_dict().items()
        if name not in _PLAIN_KEYS
        and value
        and value != plain.get(name)
        and not (name == "init_lora_weights" and value in _PLAIN_STARTS)
    ]


def _linear_modules(model: Any) -> list[str]:
    """Full names of the layers that can have adapters: linear ones, but for the output layer. Experts that are one tensor are none."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if _is_linear(module) and module is not head]


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _as_written(names: Sequence[str], model: nn.Module) -> list[str]:
    """`names` by their last parts, which hold for every layer, or in full where these would mean other modules too.

    Peft's own `all-linear` also takes routers and experts of some models, by rules that change from version to version.
    """
    parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    known = set(names)
    exact = not any(_matches(name, parts) for name, _ in model.named_modules() if name not in known)
    return parts if exact else list(names)


def _matches(name: str, wanted: str | Sequence[str]) -> bool:
    """Peft's rule: one regular expression for the whole name, or names of which one is the whole or its end."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in wanted)


def _check_names(key: str, wanted: str | Sequence[str], candidates: Sequence[str], model: nn.Module) -> None:
    """Every name that was written must be that of a linear layer, and nothing else may be meant by it."""
    try:
        missing = [
            each
            for each in ([wanted] if isinstance(wanted, str) else wanted)
            if not any(_matches(name, each if isinstance(wanted, str) else [each]) for name in candidates)
        ]
    except re.error as error:
        raise BackendError(
            f"{key} must be a regular expression or a list of names, got {wanted!r} ({error}); write {key}=[q_proj,v_proj]"
        ) from error
    if missing or not wanted:
        got = repr(missing[0]) if missing else "none"
        raise BackendError(
            f"{key} must name linear layers of the model, got {got}; choose among {_choices(candidates)}, "
            f"or write {ALL_LINEAR}"
        )
    others = set(candidates)
    wrong = next((name for name, _ in model.named_modules() if name not in others and _matches(name, wanted)), None)
    if wrong is not None and key.endswith(".target_modules"):
        raise BackendError(
            f"{key} must name linear layers only, and not the output layer, got {wrong}; choose among {_choices(candidates)}"
        )


def _choices(candidates: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in candidates))


def _adapted_modules(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _is_adapter(name: str) -> bool:
    return f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name


def _ordinary(name: str, modules: Mapping[str, Any]) -> str:
    """The base model's name of a tensor: without what wrapping its layer put into it."""
    module, separator, rest = name.rpartition(f"{_BASE}.")
    return f"{module}.{rest}" if separator and module in modules else name


def _file_name(name: str) -> str:
    """A parameter's name in peft's files."""
    return f"{_FILE_PREFIX}{name.replace(f'.{_NAME}.', '.')}"
