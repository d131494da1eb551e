"""TRL's GRPO update in TRL's own environment: `python trainer_peer.py`.

Not a benchmark: `benchmarks.trainer` starts it and asks it, a JSON line at a time, to load a model and a recorded batch (`load`) and
to make an optimizer step on it (`step`). The step is TRL's own: `GRPOTrainer.training_step`, gradient clipping by its
accelerator, its optimizer. Only generation is left out: the batch is what it would have sampled.
"""

import json
import os
import sys
import tempfile
import time
import traceback

import torch


class Trl:
    """A `GRPOTrainer` that is handed its batch."""

    def __init__(self, request):
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        torch.set_num_threads(request["threads"])
        with open(request["batch"], encoding="utf-8") as file:
            rows = json.load(file)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        options = request["options"]
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            num_generations=request["group_size"],
            steps_per_generation=1,
            loss_type="dapo",
            beta=options["kl_loss_coef"],
            epsilon=options["clip_ratio"],
            learning_rate=options["lr"],
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=options["grad_clip"],
            max_steps=10**6,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
        )
        self.trainer = GRPOTrainer(
            model=request["model"],
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
            processing_class=tokenizer,
        )
        self.trainer._prepare_inputs = lambda inputs: inputs
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.create_optimizer()
        self.model, self.trainer.optimizer = self.trainer.accelerator.prepare(
            self.trainer.model, self.trainer.optimizer
        )
        self.model.train()
        self.inputs = inputs_of(rows)

    def step(self):
        """Seconds of one optimizer step, and its loss."""
        started = time.perf_counter()
        loss = self.trainer.training_step(self.model, self.inputs, None)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - started, "loss": float(loss)}


def inputs_of(rows):
    """The batch as `_generate_and_score_completions` returns it: prompts padded on the left, completions on the right."""
    width = max(len(row["prompt_ids"]) for row in rows)
    depth = max(len(row["response_ids"]) for row in rows)

    def left(values, filler=0):
        return [filler] * (width - len(values)) + values

    def right(values, filler=0):
        return values + [filler] * (depth - len(values))

    return {
        "prompt_ids": torch.tensor([left(row["prompt_ids"]) for row in rows]),
        "prompt_mask": torch.tensor([left([1] * len(row["prompt_ids"])) for row in rows]),
        "completion_ids": torch.tensor([right(row["response_ids"]) for row in rows]),
        "completion_mask": torch.tensor([right([1] * len(row["response_ids"])) for row in rows]),
        "tool_mask": torch.tensor([right(row["response_mask"]) for row in rows]),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "old_per_token_logps": torch.tensor([right(row["old_log_probs"], 0.0) for row in rows]),
        "ref_per_token_logps": torch.tensor([right(row["ref_log_probs"], 0.0) for row in rows]),
        "num_items_in_batch": torch.tensor(float(sum(sum(row["response_mask"]) for row in rows))),
    }


def main():
    """Answers until its input ends. Whatever the peer prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                peer, answer = Trl(request["load"]), {}
            else:
                assert peer is not None
                answer = peer.step()
        except Exception as error:  # a peer may fail as it likes; the benchmark then says why
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
