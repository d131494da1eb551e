"""The whole configuration as one typed tree: `Config`.

Frozen structs with unknown fields forbidden; each node is defined where it is read and composed here. Loading, with
its messages for unknown and renamed keys, is `config.loading`; what cannot run in this version is `config.checks`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ostinato_trainer.config.actor import ActorConfig, ModelConfig, OptimConfig, PolicyLossConfig
from ostinato_trainer.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from ostinato_trainer.config.critic import CriticConfig, CriticModelConfig, CriticOptimConfig
from ostinato_trainer.config.data import CustomClassConfig, DataConfig
from ostinato_trainer.config.ray import RayConfig, RayInitConfig
from ostinato_trainer.config.resuming import ResumeConfig
from ostinato_trainer.config.reward import (
    CombineConfig,
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardModelConfig,
)
from ostinato_trainer.config.rollout import (
    AgentConfig,
    CustomServerConfig,
    EngineKwargsConfig,
    LogProbCheckConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValidationSamplingConfig,
)
from ostinato_trainer.config.sampling import FilterGroupsConfig, WatchdogConfig
from ostinato_trainer.home_paths import home_path

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CombineConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "CustomClassConfig",
    "CustomRewardConfig",
    "CustomServerConfig",
    "DataConfig",
    "EngineKwargsConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "LogProbCheckConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "RayConfig",
    "RayInitConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "TrainerConfig",
    "ValidationSamplingConfig",
    "WatchdogConfig",
]


class ActorRolloutRefConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy in its two roles, trained and sampled (`actor_rollout_ref`)."""

    model: ModelConfig = ModelConfig()
    """The policy's files."""
    actor: ActorConfig = ActorConfig()
    """The update of the policy."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of trajectories."""
    nccl_timeout: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds that a training rank may wait for the others in one exchange before the run ends with an error; a whole call may take six times
    that. Read where the strategy has ranks."""


class TrainerConfig(ResumeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run (`trainer`)."""

    total_epochs: Annotated[int, Meta(ge=1)] = 30
    """Passes over the training rows, unless total_training_steps ends the run earlier or later."""
    total_training_steps: Annotated[int, Meta(ge=1)] | None = None
    """Steps of the run; null follows from total_epochs."""
    max_staleness: Annotated[int, Meta(ge=0)] = 0
    """Policy versions that the oldest token of a trajectory may be behind when it is trained on. 0 samples and trains in turn; 1 samples a
    step ahead while the policy is trained; more samples further ahead."""
    min_group_size: Annotated[int, Meta(ge=1)] | None = None
    """Trajectories of a group that must have ended without a failure; with fewer the group is dropped and another prompt sampled. null: two,
    since one alone has no baseline, or one where `rollout.n` is 1."""
    max_reruns: Annotated[int, Meta(ge=0)] = 0
    """How often a trajectory that failed is done again, each time with another seed."""
    max_failed_batches: Annotated[int, Meta(ge=0)] = 1
    """Groups that one step may drop for failures before the run ends with an error, in batches of data.train_batch_size; for each step that is
    sampled at that time, where max_staleness lets several be."""
    save_freq: Annotated[int, Meta(ge=-1)] = -1
    """Steps between checkpoints; -1 saves only after the last step, 0 never."""
    test_freq: Annotated[int, Meta(ge=-1)] = -1
    """Steps between validations; -1 or 0 validates only where val_before_train says so."""
    val_before_train: bool = True
    """Validate before the first step, where `data.val_files` gives rows."""
    critic_warmup: Annotated[int, Meta(ge=0)] = 0
    """Steps at the beginning in which only the critic is trained and the policy stays as it is."""
    val_only: bool = False
    """Validate once, the model or a checkpoint of the run, and end: nothing is trained or saved; the numbers go to val_only.jsonl."""
    log_val_generations: Annotated[int, Meta(ge=0)] = 0
    """Prompts whose first sample is shown in the loggers with every validation."""
    validation_data_dir: str | None = None
    """Folder for all that validations sample, a file of JSON lines each; null writes none."""
    rollout_data_dir: str | None = None
    """Folder for all that is sampled for training, a file of JSON lines a step; null writes none."""
    executor: Literal["local", "ray"] = "local"
    """Where the run's parts are: local has them in this process, ray as actors of a cluster (`ray_kwargs`): engine replicas, agent workers,
    and the ranks of training where the strategy has any."""
    nnodes: Annotated[int, Meta(ge=1)] = 1
    """Machines of the run."""
    n_gpus_per_node: Annotated[int, Meta(ge=1)] = 1
    """Devices on each machine; on CPUs, ranks. With executor=ray, engines share these devices unless `rollout.nnodes` gives them their own."""
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    """How often a run whose training ranks or actors were lost goes on by itself, from its newest checkpoint; then it ends with all causes."""
    logger: tuple[Literal["console", "jsonl", "tensorboard", "mlflow", "wandb", "trackio"], ...] = ("console", "jsonl")
    """Where metrics go: console, jsonl (metrics.jsonl in default_local_dir), tensorboard, mlflow, wandb, trackio; any at once."""
    project_name: str = "ostinato"
    """Name of the project in loggers and paths."""
    experiment_name: str = "default"
    """Name of this run in loggers and paths."""
    default_local_dir: str | None = None
    """Folder of checkpoints and metrics; null means checkpoints/PROJECT_NAME/EXPERIMENT_NAME."""
    best_metric: str | None = None
    """A metric by its name, such as val-core/SOURCE/acc/mean@1: the checkpoint with the highest value is kept too."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in the host's memory, three times the weights; false waits for each, as strategies
    with ranks do."""
    seed: int = 1
    """Seed of the run; data and rollout take theirs from it where they have none."""
    device: str | None = None
    """Device to train on, as torch writes it; null picks the best one present."""
    callbacks: tuple[str, ...] = ()
    """Classes of your own that are told what the run does, as module:Class or file.py:Class; see `TrainerCallback`."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """What is done when nothing happens."""

    def good_per_group(self, n: int) -> int:
        """Trajectories without a failure that a group of `n` needs: `min_group_size`."""
        return min(n, 2) if self.min_group_size is None else self.min_group_size

    @property
    def local_dir(self) -> str:
        """`default_local_dir`, or the folder that follows from project and experiment."""
        folder = self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"
        return str(home_path(folder, "trainer.default_local_dir"))


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that `ostinato train` reads."""

    data: DataConfig = DataConfig()
    """Rows, prompts and batches."""
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    """The policy, its update and its sampling."""
    critic: CriticConfig = CriticConfig()
    """The value model, where the advantage estimator needs one."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From rewards to advantages."""
    reward: RewardConfig = RewardConfig()
    """Scoring of finished trajectories."""
    trainer: TrainerConfig = TrainerConfig()
    """The run."""
    ray_kwargs: RayConfig = RayConfig()
    """The cluster of a run with `trainer.executor=ray`."""

    @property
    def data_seed(self) -> int:
        """The seed of the order of rows."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def num_training_devices(self) -> int:
        """Devices that the policy is trained on."""
        trainer = self.trainer
        return 1 if self.actor_rollout_ref.actor.strategy == "local" else trainer.nnodes * trainer.n_gpus_per_node

    @property
    def engines_sleep(self) -> bool:
        """Whether engines and training take turns on devices: engines sleep while the policy is trained."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        if rollout.nnodes or trainer.max_staleness:
            return False
        return trainer.executor == "ray" if rollout.free_cache_engine is None else rollout.free_cache_engine

    @property
    def rollout_seed(self) -> int:
        """The seed of sampling."""
        seed = self.actor_rollout_ref.rollout.seed
        return self.trainer.seed if seed is None else seed
