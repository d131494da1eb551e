"""A run that teaches nothing is said to."""

import pytest

from ostinato_trainer.metrics.learning_watch import PATIENCE, LearningWatch


def measured(**changed: float) -> dict[str, float]:
    """Metrics of a step that trained, as far as they are looked at."""
    metrics = {
        "training/num_loss_tokens": 10.0,
        "actor/num_empty_mini_batches": 0.0,
        "actor/grad_norm": 0.5,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
    }
    return metrics | {name.replace("__", "/"): value for name, value in changed.items()}


def test_steps_without_a_gradient_are_said_once_after_some(caplog: pytest.LogCaptureFixture) -> None:
    """Equal rewards in a few steps are common and say nothing; where they go on, one sentence names steps, scores and what to change."""
    watch = LearningWatch()
    still = measured(actor__grad_norm=0.0, critic__score__max=0.0)
    for step in range(1, PATIENCE):
        watch.observe(step, still)
    watch.observe(PATIENCE, measured())
    assert not caplog.records
    for step in range(11, 11 + 3 * PATIENCE):
        watch.observe(step, still)
    assert len(caplog.records) == 1
    assert f"steps 11 to {10 + PATIENCE} had no gradient" in caplog.text
    assert "between 0 and 0" in caplog.text
    assert "reward function" in caplog.text


def test_a_step_without_a_trained_token_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """An agent that returns nothing sampled is told at its first step."""
    watch = LearningWatch()
    nothing = measured(training__num_loss_tokens=0.0, actor__num_empty_mini_batches=1.0)
    del nothing["actor/grad_norm"]
    for step in range(1, 3 * PATIENCE):
        watch.observe(step, nothing)
    assert [record.getMessage()[:35] for record in caplog.records] == ["step 1: no token is trained on, so "]


def test_steps_of_the_critic_alone_say_nothing_of_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    """Where the policy is not trained, it has no gradient to speak of."""
    watch = LearningWatch()
    for step in range(1, 3 * PATIENCE):
        watch.observe(step, {"training/num_loss_tokens": 0.0, "critic/grad_norm": 0.0})
    assert not caplog.records
