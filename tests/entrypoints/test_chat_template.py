"""The Jinja environment of chat templates: helpers, sandbox and bounds."""

import re

import pytest

from atom.entrypoints.openai.chat_template import ChatTemplate, load_chat_template
from atom.entrypoints.openai.context import make_context
from atom.errors import ConfigError, RequestError
from tests.helpers.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]


def test_helpers_of_model_templates():
    source = (
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ [1] | tojson(indent=2) }}{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% break %}{% endfor %}"
    )
    text = ChatTemplate(source, tokens={"bos_token": "<s>"}).render([*USER, *USER])
    assert re.fullmatch(r'<s>\{"a": "<é>"\}\[\n  1\n\]20\d\dhi', text)


def test_blocks_leave_no_blank_lines():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert ChatTemplate(source).render(USER) == "hi\n"


def test_raise_exception_is_a_request_error():
    with pytest.raises(RequestError, match="chat template: no tools, please") as info:
        ChatTemplate("{{ raise_exception('no tools, please') }}").render(USER)
    assert info.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages[0].content.format.__func__.x }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_may_not_do_fails_the_request_alone(source):
    with pytest.raises(RequestError, match="chat template: "):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source, words",
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "longer than 0.2 s",
        ),
        ("{% for i in range(99999) %}{{ 'aaaaaaaaaa' * 100 }}{% endfor %}", "more than 1000000 characters"),
        ("{{ 'a' * (10 ** 9) }}", "may not compute"),
        ("{{ 'a' * 1000000000 }}", "may not compute"),
        ("{{ range(1000000) }}", "Range too big"),
    ],
)
def test_rendering_is_bounded(source, words):
    with pytest.raises(RequestError, match=re.escape(words)):
        ChatTemplate(source).render(USER, max_seconds=0.2, max_chars=1_000_000)


def test_allowed_kwargs_are_the_variables_of_the_template():
    source = (
        "{% if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}"
        "{% set local = 1 %}{{ local }}{{ enable_thinking }}{{ budget | default(0) }}{{ messages | length }}"
        "{{ tools }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source)
    assert template.kwargs_allowed == {"enable_thinking", "budget"}
    assert template.render(USER, kwargs={"enable_thinking": True}) == "1True01NoneTrue"
    for name in ("messages", "tools", "add_generation_prompt", "local", "bos_token", "strftime_now"):
        with pytest.raises(RequestError, match=name):
            template.render(USER, kwargs={name: 1})


def test_request_kwargs_win_over_the_servers():
    template = ChatTemplate("{{ a }}{{ b }}", default_kwargs={"a": 1, "b": 2})
    assert template.render(USER, kwargs={"b": 3}) == "13"
    with pytest.raises(ConfigError, match="'c'"):
        ChatTemplate("{{ a }}", default_kwargs={"c": 1})


def test_option_is_a_path_or_jinja(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert load_chat_template(str(path), "model's") == "{{ messages }}"
    assert load_chat_template("{{ x }}", None) == "{{ x }}"
    assert load_chat_template(None, "model's") == "model's"
    assert load_chat_template(None, None) is None
    with pytest.raises(ConfigError, match="no-such-file"):
        load_chat_template(str(tmp_path / "no-such-file"), None)


def test_broken_templates(caplog):
    with pytest.raises(ConfigError, match="does not compile"):
        make_context(FakeEngine(), chat_template="{% if %}")
    # The model's own template must not keep completions from being served.
    context = make_context(FakeEngine(chat_template="{% if %}"))
    assert context.chat_template is None and "does not compile" in caplog.text
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        make_context(FakeEngine(chat_template=None), default_chat_template_kwargs={"a": 1})
