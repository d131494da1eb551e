"""What the package offers for tests and for a look at a template says what is so."""

import os
import subprocess
import sys

import pytest
import tokenizers

from ostinato_tokenization import ChatTokenizer
from ostinato_tokenization.testing import (
    SAMPLE_TEMPLATES,
    TINY_CHAT_TEMPLATE,
    TokenizerKind,
    Verdict,
    check_template,
    sample_chat_tokenizer,
    tiny_chat_tokenizer,
    tiny_tokenizer,
)
from ostinato_tokenization.testing import template_check as checked_module


def verdicts(report):
    return {result.kind: result.verdict for result in report.results}


def test_a_well_behaved_template_is_exact_in_every_kind():
    """ChatML with tools: every kind of conversation is exact, and the report reads so."""
    report = check_template(tiny_chat_tokenizer())
    assert set(verdicts(report).values()) == {Verdict.EXACT}
    text = str(report)
    assert "a turn ends with   '<|im_end|>'" in text
    assert "rewrites history   no" in text
    assert "parallel tools     exact" in text


@pytest.mark.parametrize("kind", [TokenizerKind.BYTE_LEVEL, TokenizerKind.PREPEND])
@pytest.mark.parametrize("name", sorted(SAMPLE_TEMPLATES))
def test_every_sample_template_can_be_continued(kind, name):
    """No sample template is continued wrongly with any kind of tokenizer, and plain turns are not refused."""
    report = check_template(sample_chat_tokenizer(kind, name))
    assert report.ok, str(report)
    assert verdicts(report)["question, answer"] in (Verdict.EXACT, Verdict.APPENDED)
    assert report.rewrites_history == (name in ("forgets_reasoning", "opens_reasoning"))


def test_what_a_template_does_not_do_is_said():
    """Refused roles are absent, reasoning that is forgotten is appended behind, newest-first is refused."""
    found = verdicts(check_template(sample_chat_tokenizer(TokenizerKind.BYTE_LEVEL, "alternates")))
    assert found["system text"] == found["parallel tools"] == Verdict.ABSENT
    newest_first = TINY_CHAT_TEMPLATE.replace("in messages", "in messages | reverse")
    report = check_template(ChatTokenizer(tiny_tokenizer(), newest_first))
    assert verdicts(report)["question, answer"] == Verdict.REFUSED
    assert report.ok
    found = verdicts(check_template(ChatTokenizer(tiny_tokenizer(), "{% for m in messages %}<|im_start|>{% endfor %}")))
    assert found["question, answer"] == Verdict.ABSENT


def test_a_wrong_continuation_is_found(monkeypatch):
    """Where tokens are appended that the template does not write, the verdict is wrong."""

    class Broken(checked_module.ContinuousTokens):
        def _append_context(self, ledger, ids):
            super()._append_context(ledger, [*ids, *ids[-1:]] if ledger.num_sampled else ids)

    monkeypatch.setattr(checked_module, "ContinuousTokens", Broken)
    report = check_template(tiny_chat_tokenizer())
    assert not report.ok
    assert "question, answer   wrong: what is appended is" in str(report)


def test_a_tokenizer_of_transformers_is_compared_with_its_own_rendering():
    """A fast tokenizer of transformers is taken as it is, and ids other than those of apply_chat_template are wrong."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tiny_tokenizer().to_str()),
        chat_template=TINY_CHAT_TEMPLATE,
        eos_token="<|im_end|>",
    )
    assert set(verdicts(check_template(reference)).values()) == {Verdict.EXACT}
    right = reference.apply_chat_template
    reference.apply_chat_template = lambda *args, **options: [*right(*args, **options), 0]
    assert not check_template(reference).ok


def test_strategies_name_what_they_need():
    """Without hypothesis the package and its testing module import, and the strategies say what to install."""
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import ostinato_tokenization.testing\n"
        "try:\n    import ostinato_tokenization.testing.strategies\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "ostinato-tokenization[testing]" in done.stdout
