"""What users of this field type for keys that are spelled otherwise here, and what is known but has no reader.

Three tables and nothing else: names that moved, values that are refused, keys without a reader. `config_loading` looks
them up before it guesses by similarity.
"""

from __future__ import annotations

from typing import Final

__all__ = ["REFUSED_VALUES", "RENAMED_NAMES", "RENAMED_PATHS", "SFT_PLACES", "UNREAD_NAMES", "UNREAD_SECTIONS"]

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_MULTI_TURN: Final = f"{_ROLLOUT}.multi_turn"
_AGENT: Final = f"{_ROLLOUT}.agent"
_ACTOR: Final = "actor_rollout_ref.actor"

RENAMED_PATHS: Final[dict[str, str]] = {
    "agent_loop": f"{_AGENT}.default_agent_loop",
    f"{_ROLLOUT}.agent_loop": f"{_AGENT}.default_agent_loop",
    f"{_ROLLOUT}.backend": f"{_ROLLOUT}.name",
    "rollout.backend": f"{_ROLLOUT}.name",
    "backend": f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.tool_kwargs": f"{_MULTI_TURN}.tool_config_path",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.val_kwargs.num_samples": f"{_ROLLOUT}.val_kwargs.n",
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.lora.target_modules": "actor_rollout_ref.model.target_modules",
    "actor_rollout_ref.model.lora.exclude_modules": "actor_rollout_ref.model.exclude_modules",
    "actor_rollout_ref.model.lora.adapter_path": "actor_rollout_ref.model.lora_adapter_path",
    f"{_ACTOR}.fsdp_config.offload_policy": f"{_ACTOR}.fsdp_config.param_offload",
    f"{_ACTOR}.ulysses_sequence_parallel_size": f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    "critic.cliprange": "critic.cliprange_value",
    "critic.clip_range": "critic.cliprange_value",
    "custom_reward_function": "reward.custom_reward_function",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.max_rpm": "reward.max_rpm",
    "reward_model.max_concurrent": "reward.num_workers",
    "reward.max_concurrent": "reward.num_workers",
    "reward.reward_model.enable": "reward.reward_model.url",
    "model_path": "actor_rollout_ref.model.path",
    "seed": "trainer.seed",
    "ray_init": "ray_kwargs.ray_init",
    "tokenizer": "actor_rollout_ref.model.path",
    "data.tokenizer": "actor_rollout_ref.model.path",
}
"""Full path as written -> full path here. A prefix matches too, the longest first."""

RENAMED_NAMES: Final[dict[str, str]] = {
    "group_size": f"{_ROLLOUT}.n",
    "num_generations": f"{_ROLLOUT}.n",
    "num_generations_per_prompt": f"{_ROLLOUT}.n",
    "n_samples_per_prompt": f"{_ROLLOUT}.n",
    "num_return_sequences": f"{_ROLLOUT}.n",
    "tools_config_file": f"{_MULTI_TURN}.tool_config_path",
    "tool_config_file": f"{_MULTI_TURN}.tool_config_path",
    "tools_config_path": f"{_MULTI_TURN}.tool_config_path",
    "max_turns": f"{_MULTI_TURN}.max_assistant_turns",
    "max_tool_calling_iterations": f"{_MULTI_TURN}.max_assistant_turns",
    "tool_parser": f"{_MULTI_TURN}.format",
    "tool_call_parser": f"{_MULTI_TURN}.format",
    "completion_callback": f"{_AGENT}.default_agent_loop",
    "default_agent": f"{_AGENT}.default_agent_loop",
    "num_agent_workers": f"{_AGENT}.num_workers",
    "tp_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "use_vllm": f"{_ROLLOUT}.name",
    "mem_fraction_static": f"{_ROLLOUT}.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "enable_chunked_prefill": f"{_ROLLOUT}.engine_kwargs.vllm",
    "vllm_kwargs": f"{_ROLLOUT}.engine_kwargs.vllm",
    "sglang_kwargs": f"{_ROLLOUT}.engine_kwargs.sglang",
    "context_length": f"{_ROLLOUT}.max_model_len",
    "max_new_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "rollout_batch_size": "data.train_batch_size",
    "num_prompts_per_step": "data.train_batch_size",
    "prompt_data": "data.train_files",
    "max_samples": "data.train_max_samples",
    "max_train_samples": "data.train_max_samples",
    "max_eval_samples": "data.val_max_samples",
    "dataset_num_proc": "data.filter_overlong_prompts_workers",
    "preprocessing_num_workers": "data.filter_overlong_prompts_workers",
    "train_data": "data.train_files",
    "input_key": "data.prompt_key",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "model_name_or_path": "actor_rollout_ref.model.path",
    "pretrained_model_name_or_path": "actor_rollout_ref.model.path",
    "custom_chat_template": "actor_rollout_ref.model.chat_template",
    "learning_rate": f"{_ACTOR}.optim.lr",
    "actor_learning_rate": f"{_ACTOR}.optim.lr",
    "adam_betas": f"{_ACTOR}.optim.betas",
    "warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    "warmup_steps": f"{_ACTOR}.optim.lr_warmup_steps",
    "lr_warmup_steps_ratio": f"{_ACTOR}.optim.lr_warmup_steps",
    "max_grad_norm": f"{_ACTOR}.grad_clip",
    "clip_grad": f"{_ACTOR}.grad_clip",
    "epsilon": f"{_ACTOR}.clip_ratio",
    "eps_clip": f"{_ACTOR}.clip_ratio",
    "cliprange": f"{_ACTOR}.clip_ratio",
    "value_clip": "critic.cliprange_value",
    "eps_clip_value": "critic.cliprange_value",
    "critic_pretrain": "critic.model.path",
    "critic_learning_rate": "critic.optim.lr",
    "critic_lr": "critic.optim.lr",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "lora_target_modules": "actor_rollout_ref.model.target_modules",
    "freezing_actor_steps": "trainer.critic_warmup",
    "num_critic_only_steps": "trainer.critic_warmup",
    "epsilon_low": f"{_ACTOR}.clip_ratio_low",
    "ratio_clip_min": f"{_ACTOR}.clip_ratio_low",
    "epsilon_high": f"{_ACTOR}.clip_ratio_high",
    "eps_clip_high": f"{_ACTOR}.clip_ratio_high",
    "ratio_clip_max": f"{_ACTOR}.clip_ratio_high",
    "eps_clip_c": f"{_ACTOR}.clip_ratio_c",
    "delta": f"{_ACTOR}.clip_ratio_c",
    "mini_batch_size": f"{_ACTOR}.ppo_mini_batch_size",
    "ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "per_device_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "max_tokens_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "max_tokens_per_mb": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "token_budget": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "use_dynamic_batch_size": f"{_ACTOR}.use_dynamic_bsz",
    "num_iterations": f"{_ACTOR}.ppo_epochs",
    "beta": f"{_ACTOR}.kl_loss_coef",
    "entropy_coef": f"{_ACTOR}.entropy_coeff",
    "advantage_estimator": "algorithm.adv_estimator",
    "gae_lambda": "algorithm.lam",
    "lambd": "algorithm.lam",
    "normalize_advantages": "algorithm.whiten_advantages",
    "advantage_batch_normalize": "algorithm.whiten_advantages",
    "kl_target": "algorithm.kl_ctrl.target_kl",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "use_tis": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "policy_loss_type": f"{_ACTOR}.policy_loss.loss_mode",
    "sapo_temperature_pos": f"{_ACTOR}.tau_pos",
    "sapo_temperature_neg": f"{_ACTOR}.tau_neg",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "grpo_std_normalization": "algorithm.norm_adv_by_std_in_grpo",
    "max_staleness_steps": "trainer.max_staleness",
    "max_off_policy_steps": "trainer.max_staleness",
    "max_steps_off_policy": "trainer.max_staleness",
    "max_off_policy_threshold": "trainer.max_staleness",
    "max_head_offpolicyness": "trainer.max_staleness",
    "max_trajectory_age_steps": "trainer.max_staleness",
    "dynamic_sampling": "algorithm.filter_groups.enable",
    "use_dynamic_sampling": "algorithm.filter_groups.enable",
    "dynamic_sampling_max_gen_batches": "algorithm.filter_groups.max_num_gen_batches",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "save_interval": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "eval_interval": "trainer.test_freq",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "output_dir": "trainer.default_local_dir",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "max_ckpts_to_keep": "trainer.max_ckpt_to_keep",
    "metric_for_best_model": "trainer.best_metric",
    "resume_from_checkpoint": "trainer.resume_from_path",
    "resume_path": "trainer.resume_from_path",
    "load_path": "trainer.resume_from_path",
    "num_gpus": "trainer.n_gpus_per_node",
    "num_nodes": "trainer.nnodes",
    "loss_type": f"{_ACTOR}.loss_agg_mode",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "bf16": f"{_ACTOR}.dtype",
    "fp16": f"{_ACTOR}.dtype",
    "torch_dtype": f"{_ACTOR}.dtype",
    "param_dtype": f"{_ACTOR}.dtype",
    "micro_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "generate_max_len": "data.max_response_length",
    "prompt_max_len": "data.max_prompt_length",
    "max_len": f"{_ROLLOUT}.max_model_len",
    "init_kl_coef": f"{_ACTOR}.kl_loss_coef",
    "warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps",
    "adam_beta1": f"{_ACTOR}.optim.betas",
    "adam_beta2": f"{_ACTOR}.optim.betas",
    "adam_epsilon": f"{_ACTOR}.optim.eps",
    "reward_funcs": "reward.custom_reward_function.path",
    "remote_rm_url": "reward.reward_model.url",
    "overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_weights": "reward.combine",
    "max_resp_len": "data.max_response_length",
    "reward_fn": "reward.custom_reward_function.path",
    "agent_func_path": f"{_AGENT}.agent_loop_config_path",
    "dataset_name": "data.train_files",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "pretrain": "actor_rollout_ref.model.path",
    "save_path": "trainer.default_local_dir",
    "ckpt_path": "trainer.default_local_dir",
    "use_wandb": "trainer.logger",
    "wandb_project": "trainer.project_name",
}
"""Last name of a key, wherever it was written -> full path here."""

_AHEAD: Final = "how far ahead of training is sampled is trainer.max_staleness, counted in policy versions"
_EVERY_STEP: Final = "weights go to the engine after every step"
SFT_PLACES: Final[dict[str, str]] = {
    "actor_rollout_ref.model": "model",
    f"{_ACTOR}.optim": "optim",
    f"{_ACTOR}.grad_clip": "optim.grad_clip",
    f"{_ACTOR}.dtype": "model.dtype",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "data.max_token_len_per_gpu",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "data.max_token_len_per_gpu",
    "data.micro_batch_size_per_gpu": "data.max_token_len_per_gpu",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "optim.clip_grad": "optim.grad_clip",
}
"""A key or section of a run -> its place in the tree of `ostinato sft`."""

_LOG_PROB: Final = f"log-probabilities are computed {_ACTOR}.ppo_max_token_len_per_gpu tokens at a time"
_SCORED: Final = (
    "each trajectory is scored as soon as it ends; a scorer of your own is reward.custom_reward_function, its weight among "
    "others reward.combine"
)
_ONE_RANK_A_SEQUENCE: Final = (
    f"each sequence's attention stays on one rank of the data; {_ACTOR}.strategy=fsdp2 can share sequences"
)
_NOT_OFFLOADED: Final = f"nothing is kept in the host's memory with Megatron; {_ACTOR}.strategy=fsdp2 can"
_PLAIN_LORA: Final = "adapters are plain LoRA; see actor_rollout_ref.model.lora_rank"
_ENGINES: Final = (
    f"an engine is in this process or under {_ROLLOUT}.engine_python; with trainer.executor=ray there is one for every "
    f"{_ROLLOUT}.tensor_model_parallel_size devices"
)

UNREAD_NAMES: Final[dict[str, str]] = {
    "staleness_threshold": _AHEAD,
    "partial_rollout": f"turns under way go on after new weights have come; see {_ROLLOUT}.pool.sync_pause",
    "parameter_sync_step": _EVERY_STEP,
    "trigger_parameter_sync_step": _EVERY_STEP,
    "weight_sync_steps": _EVERY_STEP,
    "load_format": "the engine loads the model's files, and then the trainer's weights",
    "vllm_mode": _ENGINES,
    "vllm_num_engines": _ENGINES,
    "async_train": _AHEAD,
    "importance_sampling_level": "ratios are of tokens",
    "mask_truncated_completions": "a truncated answer is scored like any other",
    "gradient_accumulation_steps": (
        f"how often gradients add up follows from {_ACTOR}.ppo_mini_batch_size and {_ACTOR}.ppo_micro_batch_size_per_gpu"
    ),
    "attn_implementation": "transformers chooses the attention",
    "flash_attn": "transformers chooses the attention",
    "balance_batch": "ranks always get shares of like cost",
    "zero_stage": f"{_ACTOR}.strategy=fsdp2 shards parameters, gradients and moments",
    "lora_dropout": "adapters have no dropout, so that old and new log-probabilities are those of one function",
    "use_dora": _PLAIN_LORA,
    "use_rslora": _PLAIN_LORA,
    "trust_remote_code": "code that comes with a model is never run",
    "dataloader_num_workers": "rows are read in this process",
    "use_shm": "rows are read from their files",
    "validation_shuffle": "every validation takes all its rows",
    "gen_batch_size": "a step has data.train_batch_size prompts, and more are sampled where groups are dropped",
    "return_raw_input_ids": "agents work on messages",
    "return_full_prompt": "agents work on messages",
    "image_patch_size": "images are refused for now",
    "mm_processor_kwargs": "images are refused for now",
    "logging_steps": "every step is logged",
    "push_to_hub": "checkpoints stay in trainer.default_local_dir",
    "save_contents": "a checkpoint holds all that a run needs to go on",
    "load_contents": "a run goes on with all that its checkpoint holds",
    "default_hdfs_dir": "checkpoints stay in trainer.default_local_dir",
    "calculate_log_probs": "log-probabilities of sampled tokens are always recorded",
    "log_prob_micro_batch_size": _LOG_PROB,
    "log_prob_micro_batch_size_per_gpu": _LOG_PROB,
    "log_prob_use_dynamic_bsz": _LOG_PROB,
    "log_prob_max_token_len_per_gpu": _LOG_PROB,
    "val_batch_size": "all validation rows go to the engine at once",
    "num_repeat_rollouts": "the number of trajectories of a prompt is actor_rollout_ref.rollout.n",
    "reward_manager": _SCORED,
    "launch_reward_fn_async": _SCORED,
    "max_tpm": "the rate is counted in calls; see reward.max_rpm",
    "reward_fn_key": "rewards are chosen by the column data_source",
    "image_key": "images are refused for now",
    "video_key": "videos are refused for now",
}
"""Last name of a key that is known in the field but has no reader here -> why."""

UNREAD_SECTIONS: Final[dict[str, str]] = {
    "algorithm.rollout_correction.loss_type": (
        f"the loss is {_ACTOR}.policy_loss.loss_mode, where ppo_clip is called vanilla and reinforce gpg"
    ),
    "data.sampler": "the order of rows is set by data.shuffle and data.seed; data.custom_cls may give out other rows",
    "data.datagen": "rows come from files; data.custom_cls may make them",
    "critic.enable": "a critic is trained exactly where algorithm.adv_estimator needs values",
    "critic.rollout_n": "a step's trajectories are the same for policy and critic",
    "critic.strategy": "the critic is trained by the strategy of the actor",
    "critic.forward_max_token_len_per_gpu": "values are computed critic.ppo_max_token_len_per_gpu tokens at a time",
    "critic.fsdp": f"the critic is sharded as {_ACTOR}.fsdp_config says",
    "critic.fsdp_config": f"the critic is sharded as {_ACTOR}.fsdp_config says",
    "critic.model.fsdp_config": f"the critic is sharded as {_ACTOR}.fsdp_config says",
    "critic.ulysses_sequence_parallel_size": f"it shares tokens as {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size says",
    "critic.megatron": f"the critic is split as {_ACTOR}.megatron says",
    "actor_rollout_ref.ref": "the reference policy is a frozen copy of the starting weights and has no settings",
    "actor_rollout_ref.hybrid_engine": f"engines share the devices of training, unless {_ROLLOUT}.nnodes gives them machines of their own",
    f"{_ACTOR}.megatron.use_distributed_optimizer": "the optimizer is always distributed",
    f"{_ACTOR}.megatron.use_dist_checkpointing": "checkpoints are whole tensors, which any layout reads",
    f"{_ACTOR}.megatron.dist_checkpointing_path": "actor_rollout_ref.model.path is a folder in the Hugging Face format",
    f"{_ACTOR}.megatron.use_mbridge": "models are mapped by this package",
    f"{_ACTOR}.megatron.vanilla_mbridge": "models are mapped by this package",
    f"{_ACTOR}.megatron.override_ddp_config": "gradients add up in float32 and are reduced once a step",
    f"{_ACTOR}.megatron.use_remove_padding": "sequences are packed",
    f"{_ACTOR}.megatron.dtype": "actor_rollout_ref.actor.dtype decides",
    f"{_ACTOR}.megatron.override_transformer_config": (
        "the model's config.json decides; actor_rollout_ref.model.enable_gradient_checkpointing computes layers again"
    ),
    f"{_ACTOR}.megatron.context_parallel_size": _ONE_RANK_A_SEQUENCE,
    f"{_ACTOR}.megatron.expert_model_parallel_size": "models with experts are not mapped",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "models with experts are not mapped",
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "each rank has one stage of the pipeline",
    f"{_ACTOR}.megatron.param_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.grad_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.optimizer_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.seed": "nothing random is done: dropout is off",
    "reward_model": "a reward model is a server that is asked over HTTP; see reward.reward_model.url",
    "reward_model.reward_manager": _SCORED,
    "reward_model.launch_reward_fn_async": _SCORED,
    "reward.reward_manager": _SCORED,
    "reward.overlong_buffer.log": "the punishment is always recorded",
    "async_training": _AHEAD,
}
"""Whole sections without a reader -> why."""

REFUSED_VALUES: Final[dict[tuple[str, object], str]] = {
    (f"{_ROLLOUT}.mode", "sync"): (
        "must be async, got sync: a synchronous engine waits for the slowest conversation in every turn, and agents "
        f"cannot call tools while it does; write {_ROLLOUT}.mode=async, which is the default"
    ),
    (f"{_ROLLOUT}.name", "trtllm"): (
        "must be transformers, vllm or sglang, got trtllm: no adapter for it exists that returns the sampled ids with "
        f"their log-probabilities; write {_ROLLOUT}.name=transformers, or bring a server of your own by "
        f"{_AGENT}.custom_async_server.path"
    ),
    (f"{_ROLLOUT}.name", "hf"): f"must be transformers, vllm or sglang, got hf; write {_ROLLOUT}.name=transformers",
    ("data.return_raw_chat", False): (
        "must be true, got false: agents work on messages, and token ids rendered in the dataset would have to be "
        "tokenized a second time; write data.return_raw_chat=true, which is the default"
    ),
    (_MULTI_TURN, True): f"must be a mapping, got true; write {_MULTI_TURN}.enable=true",
    (_MULTI_TURN, False): f"must be a mapping, got false; write {_MULTI_TURN}.enable=false",
    (f"{_ACTOR}.strategy", "fsdp"): (
        f"must be local, fsdp2 or megatron, got fsdp: only its second version is here; write {_ACTOR}.strategy=fsdp2"
    ),
}
"""(path, value) -> the rest of the message that follows the path."""
