"""Calls of tools over HTTP: asked for, rendered, and answered as the API has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from router.openai_api.schema import parse_chat
from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.fakes.tokenizers import CALL, CHATML, CHATML_TOKENS, HERMES, a_tokenizer
from tests.fakes.tools import WEATHER, a_router
from tests.fuzz_bodies import GOOD, mutated
from tests.http_server import HttpServer, scripted_server


def prompt_of(router: RouterUnderTest) -> str:
    text: str = router.tokenizer.decode(list(router.calls.requests[-1][1].token_ids))
    return text


async def test_tools_are_rendered_and_calls_read_back() -> None:
    async with a_router("Let me see.\n", CALL[:20], CALL[20:], "\n") as router:
        answer = (await router.chat("Weather?", tools=[WEATHER])).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"place": "Zürich"}'}
        assert '"description": "The weather at a place."' in prompt_of(router)


async def test_the_prompt_is_that_of_apply_chat_template() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"place": "Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    async with a_router("It is sunny.") as router:
        body = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "It is sunny."
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        function = {"name": "weather", "arguments": {"place": "Ulm"}}
        rendered = router.tokenizer.apply_chat_template(
            [
                messages[0],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "content": "sunny"},
            ],
            tools=[WEATHER],
            add_generation_prompt=True,
            tokenize=False,
        )
        assert prompt_of(router) == rendered
        assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}' in rendered


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=str)
async def test_an_earlier_call_reaches_templates_that_write_calls_of_null_contents(
    content: dict[str, Any],
) -> None:
    """As DeepSeek V3's does: the model was told of the answer to a call, and not of the call."""
    shape = (
        "{% for message in messages %}[{{ message.role }}]"
        "{% if message.role == 'assistant' and message.content is none %}"
        "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    function = {"name": "weather", "arguments": '{"place": "Ulm"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            **content,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    async with a_router("ok", template=shape) as router:
        answer = await router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert answer.status_code == 200
        assert prompt_of(router) == (
            '[user]Weather?[assistant]{"name": "weather", "arguments": {"place": "Ulm"}}[tool]sunny'
        )


async def test_none_keeps_the_prompt_and_reads_no_calls() -> None:
    """The same prefix as in the turns before is in the cache; its answer is text."""
    async with a_router(CALL) as router:
        await router.chat("x", tools=[WEATHER])
        auto = prompt_of(router)
        choice = (await router.chat("x", tools=[WEATHER], tool_choice="none")).json()["choices"][0]
        assert prompt_of(router) == auto
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in choice["message"]


async def test_without_tools_no_calls_are_looked_for() -> None:
    async with a_router(CALL) as router:
        choice = (await router.chat("x", tools=[])).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}


async def test_parallel_calls_can_be_switched_off() -> None:
    async with a_router(CALL, CALL) as router:
        choice = (await router.chat("x", tools=[WEATHER], parallel_tool_calls=False)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1


def changed(**function: Any) -> list[dict[str, Any]]:
    return [{**WEATHER, "function": {**WEATHER["function"], **function}}]


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: Any) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required", "tools": []}, "tool_choice", "invalid_value"),
    ({"tool_choice": named("other")}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "unsupported_parameter"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "invalid_value"),
    ({"tool_choice": allowed("none", "weather")}, "tool_choice.allowed_tools", "invalid_value"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools", "invalid_value"),
    ({"tool_choice": allowed("auto", 5)}, "tool_choice.allowed_tools.tools[0]", "invalid_value"),
    ({"tool_choice": allowed("auto", "other")}, "tool_choice", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {}}, "tool_choice", "invalid_value"),
    ({"tools": {}}, "tools", "invalid_value"),
    ({"tools": [WEATHER] * 129}, "tools", "invalid_value"),
    ({"tools": ["weather"]}, "tools[0]", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": changed(name="")}, "tools[0].function.name", "invalid_value"),
    ({"tools": changed(name="a b")}, "tools[0].function.name", "invalid_value"),
    ({"tools": changed(name="x" * 65)}, "tools[0].function.name", "invalid_value"),
    ({"tools": changed(description=1)}, "tools[0].function.description", "invalid_value"),
    ({"tools": changed(parameters="x")}, "tools[0].function.parameters", "invalid_value"),
    ({"tools": changed(strict="yes")}, "tools[0].function.strict", "invalid_value"),
    (
        {"tools": changed(strict=True, parameters={"type": "array"})},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    (
        {"tools": changed(strict=True, parameters={"properties": {"x": {"not": {}}}})},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    (
        {"tool_choice": "required", "tools": changed(parameters={"properties": {"x": {"type": "objct"}}})},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    ({"tools": [WEATHER], "guided_choice": ["a", "b"]}, "guided_choice", "unsupported_parameter"),
    ({"tool_choice": "required", "guided_choice": ["a"]}, "guided_choice", "unsupported_parameter"),
    (
        {"tool_choice": named("weather"), "guided_grammar": 'root ::= "x"'},
        "guided_grammar",
        "unsupported_parameter",
    ),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
async def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    async with a_router("x") as router:
        answer = await router.chat("x", **{"tools": [WEATHER], **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert not router.calls.requests


async def test_what_is_forced_or_strict_becomes_a_structure_and_nothing_else_does() -> None:
    strict = changed(strict=True)
    asked: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"tool_choice": "none", "tools": strict}, False),
        ({"tools": strict}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": named("weather")}, True),
        ({"tool_choice": allowed("auto", "weather")}, True),
        ({"guided_json": {}}, True),
    ]
    async with a_router("x") as router:
        prompts = set()
        for fields, is_held in asked:
            await router.chat("x", **{"tools": [WEATHER], **fields})
            sent = router.calls.requests[-1][1]
            assert (sent.structure is not None) is is_held, fields
            prompts.add(bytes(sent.token_ids))
        assert len(prompts) == 1  # whatever is asked of calls, the prefix stays in the cache
        assert router.metric("warmpath_structured_requests_total", kind="calls") == 5


async def test_a_call_with_half_a_surrogate_pair_can_be_sent_back() -> None:
    """JSON can spell it, so models write it; it was a 400 for every turn after the call."""
    call = '<tool_call>{"name": "weather", "arguments": {"place": "Ulm\\ud83d, \\ud83c\\udf0a"}}</tool_call>'
    async with a_router(call) as router:
        first = (await router.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        (made,) = first["tool_calls"]
        assert made["function"]["arguments"] == '{"place": "Ulm\\ud83d, \\ud83c\\udf0a"}'
        messages = [
            {"role": "user", "content": "Weather?"},
            first,
            {"role": "tool", "tool_call_id": made["id"], "content": "sunny"},
        ]
        body = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
        assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert '{"place": "Ulm?, 🌊"}' in prompt_of(router)


@pytest.mark.parametrize("special", ["<tool_call>", "</tool_call>"])
async def test_calls_whose_tags_no_text_has_are_refused(special: str) -> None:
    """Some tokenizers mark the tags as special: texts are without them, and no call was ever found."""
    added = (*CHATML_TOKENS, AddedToken(special, special=True, normalized=False))
    tokenizer = a_tokenizer("bytes", added, template=HERMES)
    async with RouterUnderTest(tokenizer=tokenizer, max_model_len=4096) as router:
        for choice in ("auto", "required"):
            answer = await router.chat(tools=[WEATHER], tool_choice=choice)
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "tools"
        assert (await router.chat(tools=[WEATHER], tool_choice="none")).status_code == 200


def called(arguments: Any, role: str = "assistant", **call: Any) -> dict[str, Any]:
    entry = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **call}
    return {"role": role, "content": None, "tool_calls": [entry]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (called(5), "messages[0].tool_calls[0].function.arguments"),
        (called(["x"]), "messages[0].tool_calls[0].function.arguments"),
        (called("{}", id=5), "messages[0].tool_calls[0].id"),
        (called("{}", function={}), "messages[0].tool_calls[0].function.name"),
        (called("{}", function=None), "messages[0].tool_calls[0]"),
        (called("{}", role="user"), "messages[0].tool_calls"),
        ({"role": "assistant", "content": 5}, "messages[0].content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
    ],
)
async def test_a_turn_with_calls_is_checked(message: dict[str, Any], param: str) -> None:
    async with a_router("x") as router:
        body = {"model": MODEL, "messages": [message], "tools": [WEATHER]}
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        *(
            (wrong, {})
            for wrong in ("", " ", "null", "[1]", "nonsense", '{"x": ', '{"x": NaN}', '{"x": 1e400}', None)
        ),
        *((wrong, {}) for wrong in ('{"x": "\\ud83d"', '["\\ud83d"]', '{"x": ' + "[" * 100_000)),
    ],
)
def test_a_conversation_goes_on_after_a_call_gone_wrong(arguments: Any, expected: object) -> None:
    """Clients send back what a model wrote, which is no JSON now and then."""
    (message,) = parse_chat({"model": MODEL, "messages": [called(arguments)]}).messages
    assert message.tool_calls[0].function.arguments == expected


@pytest.mark.parametrize("role", ["assistant", "tool"])
async def test_null_is_no_text_where_there_need_not_be_any(role: str) -> None:
    prompts = []
    async with a_router("x") as router:
        for content in (None, ""):
            messages = [{"role": "user", "content": "q"}, {"role": role, "content": content}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 1}
            answer = await router.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            prompts.append(answer.json()["usage"]["prompt_tokens"])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("template", "choice", "status"),
    [
        (CHATML, "auto", 400),
        (CHATML, "none", 400),
        ("{% if tools %}{{ tools }}{% endif %}" + CHATML, "auto", 400),  # calls in a format of its own
        ("{% if tools %}{{ tools }}{% endif %}" + CHATML, "none", 200),
    ],
)
async def test_a_template_that_cannot_do_it_is_told(template: str, choice: str, status: int) -> None:
    async with a_router("x", template=template) as router:
        answer = await router.chat("x", tools=[WEATHER], tool_choice=choice)
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["error"]["code"] == "unsupported_parameter"
            assert answer.json()["error"]["param"] == "tools"


async def test_mutated_tools_and_calls_are_answered_or_refused() -> None:
    """Whatever reaches the template or the reader: never a 5xx, and the next request is fine."""
    bodies = [(path, body) for path, body in GOOD if body.get("tools")]
    statuses = []
    async with a_router("Let me see.\n", CALL) as router:
        for path, content in mutated(400, seed=4, bodies=bodies):
            answer = await router.client.post(path, content=content)
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            statuses.append(answer.status_code)
        assert (await router.chat("x", tools=[WEATHER])).status_code == 200
        assert router.calls.running == 0
    assert statuses.count(200) > 50
    assert statuses.count(400) > 50


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with scripted_server(a_router("Let me see.\n", CALL[:20], CALL[20:], "\n", CALL)) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_the_openai_client_reads_the_calls(server: HttpServer, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "Weather?"}]
    options: Any = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        if stream:
            with client.chat.completions.stream(**options) as events:
                completion: Any = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**options)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"place": "Zürich"}
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
