"""Keys that users of this field know but that nothing here reads, each with the reason, and values that are refused: tables and nothing else."""

from __future__ import annotations

from typing import Final

__all__ = ["REFUSED_VALUES", "UNREAD_NAMES", "UNREAD_SECTIONS"]

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_MULTI_TURN: Final = f"{_ROLLOUT}.multi_turn"
_AGENT: Final = f"{_ROLLOUT}.agent"
_ACTOR: Final = "actor_rollout_ref.actor"

_AHEAD: Final = "how far ahead of training is sampled is trainer.max_staleness, counted in policy versions"
_EVERY_STEP: Final = "weights go to the engine after every step"
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
_FUSED: Final = f"logits are made in chunks, and {_ACTOR}.use_torch_compile fuses layers"
_CHUNKS: Final = "logits and entropy are always made in chunks, and again for the backward pass"
_SCHEDULE: Final = f"the schedule is {_ACTOR}.optim.lr_scheduler_type, which ends at zero unless it is constant"
_SHARDED: Final = (
    f"how weights are sharded is {_ACTOR}.fsdp_config.reshard_after_forward, param_offload and optimizer_offload"
)
_REPLICAS: Final = (
    f"a replica has {_ROLLOUT}.tensor_model_parallel_size devices, and there are as many replicas as devices allow"
)
_WEIGHTS: Final = "how weights travel follows from where trainer and engine are"
_NO_PROFILER: Final = "there is no profiler here; `timing_s/*` in metrics.jsonl has the seconds of each phase"
_LOSSES: Final = f"losses are those of {_ACTOR}.policy_loss.loss_mode, or a function of your own"
_NOT_RESAMPLED: Final = "trajectories are not drawn again by their rewards"
_ONE_TOKEN: Final = "models that predict several tokens at once are neither trained nor sampled from so"
_TURNS_END: Final = "a turn ends with the stop tokens of its chat template"
_ADAMW: Final = "the optimizer is AdamW"
_ONE_TRAINER: Final = "there is one trainer, and trainer.executor says where it runs"
_REJECTED: Final = (
    "what is too far from the engine's distribution is rejected by algorithm.rollout_correction.rollout_rs"
)
_PENALTIES: Final = f"the one penalty that all engines know is {_ROLLOUT}.repetition_penalty"
_MODEL_FOLDER: Final = "tokenizer and configuration are those in the folder actor_rollout_ref.model.path"
_VALUES: Final = "values are computed critic.ppo_max_token_len_per_gpu tokens at a time"
_REWARD_SERVER: Final = "a reward model is a server that is asked over HTTP; see reward.reward_model.url"

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
    "use_liger": _FUSED,
    "use_fused_kernels": _FUSED,
    "impl_backend": _FUSED,
    "entropy_from_logits_with_chunking": _CHUNKS,
    "entropy_checkpointing": _CHUNKS,
    "loss_scale_factor": "seq-mean-token-sum-norm divides by data.max_response_length",
    "min_lr_ratio": _SCHEDULE,
    "num_cycles": _SCHEDULE,
    "optimizer": _ADAMW,
    "optimizer_impl": _ADAMW,
    "override_optimizer_config": _ADAMW,
    "fsdp_size": "weights are sharded over all ranks",
    "model_dtype": f"weights stay float32; what computes is {_ACTOR}.dtype",
    "forward_prefetch": _SHARDED,
    "use_orig_params": _SHARDED,
    "min_num_params": _SHARDED,
    "external_lib": f"code of your own is named where it is used, as by {_AGENT}.agent_loop_config_path or reward.custom_reward_function",
    "ignore_eos": _TURNS_END,
    "stop": _TURNS_END,
    "stop_token_ids": _TURNS_END,
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled from",
    "data_parallel_size": _REPLICAS,
    "expert_parallel_size": _REPLICAS,
    "freeze_vision_tower": "images are refused for now",
    "use_prefix_grouper": "each sequence is computed by itself",
    "update_weights_bucket_megabytes": _WEIGHTS,
    "skip_tokenizer_init": "engines get and give token ids",
    "use_pf_ppo": _NOT_RESAMPLED,
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
    "limit_images": "images are refused for now",
    "tokenizer_path": _MODEL_FOLDER,
    "hf_config_path": _MODEL_FOLDER,
    "load_weight": "a model begins with the weights in its folder",
    "forward_only": "the policy is always trained",
    "calculate_sum_pi_squared": "no estimator here reads it",
    "sum_pi_squared_checkpointing": "no estimator here reads it",
    "multi_stage_wake_up": f"whether engines give their memory back meanwhile is {_ROLLOUT}.free_cache_engine",
    "layered_summon": _WEIGHTS,
    "cast_to_rollout_dtype": _WEIGHTS,
    "quantization": "engines sample with the weights that are trained",
    "quantization_config_file": "engines sample with the weights that are trained",
    "skip_dump_dir": "every step samples",
    "enable_rollout_routing_replay": "experts are routed anew in training",
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "rollout_token_veto_threshold": _REJECTED,
    "rollout_is_veto_threshold": _REJECTED,
    "del_local_ckpt_after_load": "how many checkpoints stay is trainer.max_ckpt_to_keep",
    "esi_redundant_time": "a run is not told when its machine ends; trainer.save_freq saves often enough",
    "use_legacy_worker_impl": _ONE_TRAINER,
    "use_v1": _ONE_TRAINER,
    "profile_steps": _NO_PROFILER,
    "controller_nsight_options": _NO_PROFILER,
    "worker_nsight_options": _NO_PROFILER,
    "timeline_json_file": _NO_PROFILER,
}
"""Last name of a key that is known in the field but has no reader here -> why."""

UNREAD_SECTIONS: Final[dict[str, str]] = {
    "algorithm.rollout_correction.loss_type": (
        f"the loss is {_ACTOR}.policy_loss.loss_mode, where ppo_clip is called vanilla and reinforce gpg"
    ),
    "data.sampler": "the order of rows is set by data.shuffle and data.seed; data.custom_cls may give out other rows",
    "data.datagen": "rows come from files; data.custom_cls may make them",
    f"{_ACTOR}.checkpoint": "a checkpoint holds all that a run needs to go on",
    f"{_ACTOR}.profiler": _NO_PROFILER,
    "global_profiler": _NO_PROFILER,
    f"{_ROLLOUT}.profiler": _NO_PROFILER,
    "critic.profiler": _NO_PROFILER,
    "trainer.npu_profile": _NO_PROFILER,
    "trainer.v1": _ONE_TRAINER,
    "transfer_queue": "trajectories go straight to the trainer",
    "distillation": "nothing is learned from a teacher",
    "actor_rollout_ref.model.override_config": "the model's config.json decides, and transformers chooses the attention",
    "actor_rollout_ref.model.lora": _PLAIN_LORA,
    "actor_rollout_ref.model.mtp": _ONE_TOKEN,
    f"{_ROLLOUT}.mtp": _ONE_TOKEN,
    "actor_rollout_ref.model.tiled_mlp": f"how many tokens a pass holds is {_ACTOR}.ppo_max_token_len_per_gpu",
    "critic.model.tiled_mlp": "how many tokens a pass holds is critic.ppo_max_token_len_per_gpu",
    f"{_ROLLOUT}.prometheus": "metrics go to trainer.logger",
    f"{_ROLLOUT}.engine_kwargs.trtllm": "no adapter for it exists",
    f"{_ROLLOUT}.over_sample_rate": "every trajectory of a step is awaited",
    f"{_ACTOR}.router_replay": "experts are routed anew in training",
    f"{_ROLLOUT}.pipeline_model_parallel_size": _REPLICAS,
    f"{_ROLLOUT}.checkpoint_engine": _WEIGHTS,
    f"{_ROLLOUT}.skip": "every step samples",
    f"{_ROLLOUT}.skip_rollout": "every step samples",
    f"{_ACTOR}.policy_loss.clip_cov_ratio": _LOSSES,
    f"{_ACTOR}.policy_loss.clip_cov_lb": _LOSSES,
    f"{_ACTOR}.policy_loss.clip_cov_ub": _LOSSES,
    f"{_ACTOR}.policy_loss.kl_cov_ratio": _LOSSES,
    f"{_ACTOR}.policy_loss.ppo_kl_coef": _LOSSES,
    "algorithm.pf_ppo": _NOT_RESAMPLED,
    "critic.enable": "a critic is trained exactly where algorithm.adv_estimator needs values",
    "critic.rollout_n": "a step's trajectories are the same for policy and critic",
    "critic.strategy": "the critic is trained by the strategy of the actor",
    "critic.forward_max_token_len_per_gpu": _VALUES,
    "critic.forward_micro_batch_size": _VALUES,
    "critic.forward_micro_batch_size_per_gpu": _VALUES,
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
    f"{_ACTOR}.megatron.override_mcore_model_config": "the model's config.json decides",
    f"{_ACTOR}.megatron.use_megatron_fsdp": f"{_ACTOR}.strategy=fsdp2 shards weights",
    f"{_ACTOR}.megatron.context_parallel_size": _ONE_RANK_A_SEQUENCE,
    f"{_ACTOR}.megatron.expert_model_parallel_size": "models with experts are not mapped",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "models with experts are not mapped",
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "each rank has one stage of the pipeline",
    f"{_ACTOR}.megatron.param_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.grad_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.optimizer_offload": _NOT_OFFLOADED,
    f"{_ACTOR}.megatron.seed": "nothing random is done: dropout is off",
    "reward_model": _REWARD_SERVER,
    "reward.reward_model.enable_resource_pool": _REWARD_SERVER,
    "reward.reward_model.model_path": _REWARD_SERVER,
    "reward.reward_model.n_gpus_per_node": _REWARD_SERVER,
    "reward.reward_model.nnodes": _REWARD_SERVER,
    "reward.reward_model.rollout": _REWARD_SERVER,
    "reward.sandbox_fusion": _SCORED,
    "reward_model.reward_manager": _SCORED,
    "reward_model.launch_reward_fn_async": _SCORED,
    "reward.reward_manager": _SCORED,
    "reward_manager": _SCORED,
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
