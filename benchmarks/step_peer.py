"""TRL's side of `benchmarks.step`: `GRPOTrainer` with vLLM in its process, and a tool, in TRL's own environment.

Not a benchmark: `benchmarks.step` starts it. It loads what it needs, waits for a line, trains, and prints one JSON line. The step is TRL's own, from
prompts to weights; its methods are timed from outside, and so that time goes to what took it, the device is waited for around them.
"""

import asyncio
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.step_run import DeviceWatch
from benchmarks.step_task import LATENCY, WORK

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How an answer of the benchmark's template is read, in the words of transformers."""


async def lookup(key: str) -> str:
    """Look a value up.

    Args:
        key: Of the value.
    """
    await asyncio.sleep(float(os.environ[LATENCY]))
    return f"{key} is 17"


def reward(completions, **_):
    """A number between 0 and 1 for each answer, that follows from its length."""
    return [sum(len(message["content"]) for message in completion) % 97 / 96 for completion in completions]


class Clock:
    """Seconds of each step by what was called in it."""

    def __init__(self, synchronize):
        self.synchronize = synchronize
        self.begins = []
        self.seconds = []
        self.counts = []

    def begin(self):
        """A step ends where the next one begins."""
        self.synchronize()
        self.begins.append(time.perf_counter())
        self.seconds.append({})
        self.counts.append({"tokens": 0, "sampled": 0})

    def watch(self, owner, method, name):
        """Count the calls of a method."""
        called = getattr(owner, method)

        @functools.wraps(called)
        def timed(*arguments, **named):
            self.synchronize()
            began = time.perf_counter()
            try:
                return called(*arguments, **named)
            finally:
                self.synchronize()
                self.add(name, time.perf_counter() - began)

        setattr(owner, method, timed)

    def add(self, name, seconds):
        """To the step that is under way."""
        if self.seconds:
            self.seconds[-1][name] = self.seconds[-1].get(name, 0.0) + seconds


def build(folder, work, options, clock, watch):
    """The trainer, with its engine started."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    more = {"enforce_eager": options["eager"], **options["vllm_args"]}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **more)
    on_device = torch.cuda.is_available()
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=not on_device,
        bf16=on_device,
        torch_compile=options["compile_trl"],
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=options["sleep"] and on_device,
        vllm_gpu_memory_utilization=options["gpu_memory_utilization"],
        vllm_max_model_length=work.max_prompt_tokens + work.max_response_tokens,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.num_trajectories // work.micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.max_response_tokens,
        max_tool_calling_iterations=1,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=work.num_steps,
        shuffle_dataset=False,
        disable_tqdm=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
    )

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **named):
            step = state.global_step + 1
            os.environ[LATENCY] = str(work.latency_of(step))
            watch.phase = "step" if step > work.warm_up else "start"
            clock.begin()

        def on_train_end(self, args, state, control, **named):
            clock.begin()

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.response_template = RESPONSE
    rows = load_dataset(
        "parquet", data_files=str(folder / "rows.parquet"), split="train", cache_dir=str(folder / "trl")
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=rows.select_columns(["prompt"]),
        processing_class=tokenizer,
        tools=[lookup],
        callbacks=[Steps()],
    )
    timed(trainer, clock)
    return trainer


def timed(trainer, clock):
    """Time what a step is made of, and count its tokens."""
    engine = trainer.vllm_generation
    clock.watch(trainer, "_generate_and_score_completions", "all_before_update")
    clock.watch(trainer, "_generate", "gen")
    clock.watch(trainer, "_tool_call_loop", "tool_loop")
    clock.watch(engine, "sync_weights", "update_weights")
    clock.watch(engine.llm, "generate", "engine")
    clock.watch(engine.llm, "sleep", "sleep")
    clock.watch(engine.llm, "wake_up", "wake")
    generate = trainer._generate

    def counted(*arguments, **named):
        prompt_ids, completion_ids, tool_mask, *rest = generate(*arguments, **named)
        counts = clock.counts[-1]
        counts["tokens"] += sum(map(len, prompt_ids)) + sum(map(len, completion_ids))
        counts["sampled"] += sum(map(sum, tool_mask))
        return prompt_ids, completion_ids, tool_mask, *rest

    trainer._generate = counted


def figures(clock, watch, work):
    """Medians over the steps that count."""
    steps = [later - begin for begin, later in zip(clock.begins, clock.begins[1:], strict=False)]
    first = work.warm_up + work.with_latency
    waiting, rest = range(work.warm_up, first), range(first, work.num_steps)

    def median(values):
        return round(statistics.median(values), 4)

    def phases(chosen):
        names = {name: None for k in chosen for name in clock.seconds[k]}
        found = {name: median([clock.seconds[k].get(name, 0.0) for k in chosen]) for name in names}
        update = median([steps[k] - clock.seconds[k].get("all_before_update", 0.0) for k in chosen])
        return found | {"update_actor": update}

    counted = [*waiting, *rest]
    return {
        "step_s": median([steps[k] for k in waiting]),
        "step_s_without_latency": median([steps[k] for k in rest]),
        "steps_s": [round(step, 4) for step in steps],
        "phases_s": phases(waiting),
        "phases_s_without_latency": phases(rest),
        "sampled_tokens": median([clock.counts[k]["sampled"] for k in counted]),
        "tokens": median([clock.counts[k]["tokens"] for k in counted]),
        "memory_gib": {phase: round(most, 1) for phase, most in watch.most.items()},
    }


def main():
    """One run, told by the arguments; its figures are the last line of the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, shape, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.environ[LATENCY] = "0"
    import torch
    import transformers
    import trl
    import vllm
    from trl import GRPOTrainer  # noqa: F401  imported lazily otherwise

    if not sys.stdin.readline():
        return  # whoever has started this is gone
    began = time.perf_counter()
    watch = DeviceWatch()
    clock = Clock(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    trainer = build(folder, WORK[shape], options, clock, watch)
    start_s = time.perf_counter() - began
    watch.start()
    trainer.train()
    watch.stop()
    versions = {module.__name__: module.__version__ for module in (trl, vllm, torch, transformers)}
    found = figures(clock, watch, WORK[shape])
    print(json.dumps(found | {"start_s": round(start_s, 1), "versions": versions}), file=answers, flush=True)


if __name__ == "__main__":
    main()
