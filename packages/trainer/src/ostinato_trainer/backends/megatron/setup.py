"""From the configuration to the ranks of `actor_rollout_ref.actor.strategy=megatron`: what cannot run, and the factory of what can.

Read in the controller, before anything starts; imports neither Megatron nor torch's distributed parts.
"""

from __future__ import annotations

from typing import Final

from ostinato_trainer.algorithms.advantages import needs_critic
from ostinato_trainer.backends.adamw import AdamWOptions
from ostinato_trainer.backends.local import LocalBackendOptions
from ostinato_trainer.backends.megatron.options import MegatronOptions, MegatronRankFactory, is_megatron_installed
from ostinato_trainer.backends.megatron.shape import DecoderShape, MegatronLayout
from ostinato_trainer.config import Config
from ostinato_trainer.errors import AlgorithmError, BackendError
from ostinato_trainer.home_paths import home_path

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"


def layout_of(config: Config) -> MegatronLayout:
    """How the ranks of a run share the model."""
    megatron = config.actor_rollout_ref.actor.megatron
    return MegatronLayout(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
    )


def megatron_problems(config: Config) -> list[str]:
    """Sentences about what keeps a run from training with Megatron; empty where nothing does or another strategy trains."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.strategy != "megatron":
        return []
    problems = []
    if not is_megatron_installed():
        problems.append(
            f"{_ACTOR}.strategy must be local or fsdp2 where megatron.core is not installed, got megatron; "
            "run `pip install 'ostinato-trainer[megatron]'` under Python 3.12"
        )
    if model.lora_rank or model.lora_adapter_path is not None:
        problems.append(
            f"{_MODEL}.lora_rank must be 0 with {_ACTOR}.strategy=megatron, which trains all weights, got adapters; "
            f"write {_ACTOR}.strategy=fsdp2 or local, or remove them"
        )
    if actor.use_torch_compile:
        problems.append(
            f"{_ACTOR}.use_torch_compile must be false with {_ACTOR}.strategy=megatron, got true; write {_ACTOR}.use_torch_compile=false"
        )
    if not model.use_remove_padding:
        problems.append(
            f"{_MODEL}.use_remove_padding must be true with {_ACTOR}.strategy=megatron, which packs sequences, got false; "
            f"write {_MODEL}.use_remove_padding=true"
        )
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    models = [(f"{_MODEL}.path", model.path, "the model")]
    if config.critic.model.path not in (None, model.path) and _has_critic(config):
        models.append(("critic.model.path", config.critic.model.path, "the critic"))
    for key, path, name in models:
        try:
            if path is not None and home_path(path, key, BackendError).is_dir():
                layout_of(config).check(DecoderShape.from_folder(path, key=key), num_ranks, of=name)
        except BackendError as error:
            if str(error) not in problems:  # of the ranks, whichever model
                problems.append(str(error))
    return problems


def _has_critic(config: Config) -> bool:
    """Whether one is trained; where there is no such estimator, which others say, none is."""
    try:
        return needs_critic(config.algorithm.adv_estimator)
    except AlgorithmError:
        return False


def megatron_factory(
    config: Config,
    options: LocalBackendOptions,
    *,
    enable_gradient_checkpointing: bool,
    critic: tuple[str, LocalBackendOptions] | None = None,
) -> MegatronRankFactory:
    """What builds the ranks of a run.

    Args:
        config: Without `megatron_problems`.
        options: What any strategy needs to know.
        enable_gradient_checkpointing: Keep layers' inputs alone for the backward pass.
        critic: Folder or hub id of a critic that the ranks hold beside the policy, and what any strategy needs to know of it.
    """

    def split(options: LocalBackendOptions) -> MegatronOptions:
        return MegatronOptions(
            **{name: getattr(options, name) for name in AdamWOptions.__struct_fields__},
            layout=layout_of(config),
            dtype=options.dtype,
            keep_reference=options.keep_reference,
            engine=options.engine,
            enable_gradient_checkpointing=enable_gradient_checkpointing,
        )

    return MegatronRankFactory(
        path=str(config.actor_rollout_ref.model.path),
        options=split(options),
        critic=None if critic is None else (critic[0], split(critic[1])),
    )
