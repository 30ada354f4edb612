"""Can catch: an answer supervised without its end of turn, with the template's own text behind it
or with a part of the prompt; thinking text that a template drops from the history and training with
it; a mask that does not decode to the answer."""

import pytest
from tiny import tiny_tokenizer

from eagle4.training.dialects import Conversation
from eagle4.training.templates import supervised, template_fingerprint

CONVERSATION = Conversation(
    [
        {"role": "system", "content": "w0"},
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w3 w4"},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w6"},
    ]
)
MARKED = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' </s> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant' }}{% endif %}"
)
# As Qwen3's: thoughts of earlier turns leave the history, and the prompt may open one.
THINKING = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ 'w90 ' + (m['thinking'] or '') + ' w91 ' }}"
    "{% endif %}{{ m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
OPENED = THINKING.replace("'<s> assistant '", "'<s> assistant w90 w91 '")


@pytest.fixture
def tokenizer():
    return tiny_tokenizer(vocab=120)


def texts(tokenizer, tokens):
    """Decoded supervised spans of a sequence."""
    spans, last = [], False
    for token, is_own in zip(tokens.ids, tokens.mask, strict=True):
        if is_own and not last:
            spans.append([])
        if is_own:
            spans[-1].append(token)
        last = is_own
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("marked", [False, True])
def test_answers_with_their_end_of_turn_and_nothing_else(tokenizer, marked):
    if marked:
        tokenizer.chat_template = MARKED
    (found,) = supervised(tokenizer, CONVERSATION, [tokenizer.eos_token_id])
    assert texts(tokenizer, found) == ["w3 w4 </s>", "w6 </s>"]
    whole = tokenizer.apply_chat_template(CONVERSATION.messages, tokenize=False)
    assert tokenizer.decode(found.ids) == whole.strip()


def test_text_behind_the_end_of_turn_is_the_templates(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(" </s> ", " </s> w99 ")
    (found,) = supervised(tokenizer, CONVERSATION, [tokenizer.eos_token_id])
    assert texts(tokenizer, found) == ["w3 w4 </s>", "w6 </s>"]


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_thinking_is_kept_by_one_sequence_per_turn(tokenizer, template):
    tokenizer.chat_template = template
    messages = [dict(message) for message in CONVERSATION.messages]
    messages[2]["thinking"], messages[4]["thinking"] = "w70", "w71"
    first, second = supervised(tokenizer, Conversation(messages), [tokenizer.eos_token_id])
    thoughts = [texts(tokenizer, found)[0] for found in (first, second)]
    assert thoughts[0].endswith("w70 w91 w3 w4 </s>")
    assert thoughts[1].endswith("w71 w91 w6 </s>")
    assert "w70" not in tokenizer.decode(second.ids)


def test_a_conversation_without_answers_teaches_nothing(tokenizer):
    assert supervised(tokenizer, Conversation(CONVERSATION.messages[:2]), []) == []


def test_text_that_the_tokenizer_loses_is_refused(tokenizer):
    messages = [CONVERSATION.messages[1], {"role": "assistant", "content": "never seen"}]
    with pytest.raises(ValueError, match="file:9: an answer does not survive"):
        supervised(tokenizer, Conversation(messages), [], "file:9")


def test_a_template_that_rewrites_the_question_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{{ messages | length }} {% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="rewrites the prompt of turn 2"):
        supervised(tokenizer, Conversation(CONVERSATION.messages[1:3]), [])


def test_templates_have_identities(tokenizer):
    before = template_fingerprint(tokenizer)
    tokenizer.chat_template = MARKED
    assert before != template_fingerprint(tokenizer)
    assert template_fingerprint(tiny_tokenizer(chat=False)) is None
