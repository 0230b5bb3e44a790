"""What a body's answer has to be, and how it is read: free text, a structure, calls of functions, or either.

Knows bodies, templates and structures; knows neither generations nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial

from cache.structure import Structure, StructureKind
from router.errors import UnsupportedParameter
from router.limits import Limits
from router.openai_api.call_grammar import CallRules, arguments_of, calls_of
from router.openai_api.channels import ChannelReader, has_channels
from router.openai_api.pieces import Reader
from router.openai_api.schema import ChatBody, CompletionBody
from router.openai_api.structure_check import CheckStatistics, StructureChecker
from router.openai_api.thoughts import THOUGHT_TAGS, ThoughtReader, ends_in_thought, thinks
from router.openai_api.tool_calls import CLOSE, OPEN, ToolFormat, format_of, reader_for, renders_tools
from router.openai_api.tools import Calling, Tool
from router.prompts.chat import json_chars
from router.prompts.prompt import OFFLOAD_CHARS, PromptEncoder

_SCHEMA_CHARS = 4  # that are written as a structure in the time in which a character is tokenized
_TAG_TOKENS = 16  # at a prompt's end, among which the tag of a thought is, with white space behind it


class Layout(Enum):
    """How thoughts and what is for the user are told apart in an answer."""

    PLAIN = "all of it is for the user"
    THOUGHT = "it may begin with a thought"
    CHANNELS = "it is messages in channels, calls too"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    structure: Structure | None = None  # None = anything
    calls: ToolFormat | None = None  # how calls in its text are written; None = none are looked for
    is_parallel: bool = True  # False: only the first call counts
    layout: Layout = Layout.PLAIN
    is_held: bool = False  # the structure lets nothing but calls follow a call's tag

    @property
    def skips_special_tokens(self) -> bool:
        """Whether its text is to be without them; else its reader needs them."""
        return self.layout is not Layout.CHANNELS


class FormKind(StrEnum):
    """What an answer that is not free has to be."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # a list of choices too
    CALLS = "calls"  # or text or a structure around them


@dataclass(frozen=True, slots=True)
class FormStatistics:
    requests: Mapping[FormKind, int]  # whose answer is not free
    checks: CheckStatistics


class AnswerForms:
    """Finds bodies' forms, and whether they can be followed. Owner: the router's event loop; long schemas are
    written as structures on a prompt's thread."""

    def __init__(
        self,
        encoder: PromptEncoder,
        checker: StructureChecker,
        limits: Limits,
        *,
        separates_reasoning: bool = True,
    ) -> None:
        """separates_reasoning: thoughts are told apart from answers, where the model is one that thinks."""
        self._separates_reasoning = separates_reasoning
        self._encoder = encoder
        self._checker = checker
        self._limits = limits
        self._requests = dict.fromkeys(FormKind, 0)

    def statistics(self) -> FormStatistics:
        return FormStatistics(dict(self._requests), self._checker.statistics())

    def close(self) -> None:
        """Check no structure any more. Idempotent."""
        self._checker.close()

    async def of_completion(self, body: CompletionBody, tenant: str = "") -> AnswerForm:
        """tenant: who asks. Raises InvalidField for what no replica could follow, before it is queued."""
        return self._counted(AnswerForm(await self._own_structure(body, tenant)))

    async def of_chat(self, body: ChatBody, tenant: str = "") -> AnswerForm:
        """Raises InvalidField, UnsupportedParameter where the model's calls cannot be read, and PromptsBusy.

        tenant: who asks.
        """
        written = self._format(body)
        answer = await self._own_structure(body, tenant)
        # What is held from its first token on has no thought, and nothing in it may be taken for one.
        is_free = answer is None and body.tool_choice.calling is not Calling.REQUIRED
        layout = self._layout(body) if is_free else Layout.PLAIN
        if written is not None and layout is Layout.CHANNELS:
            _refuse_held_calls(body)
        structure = answer if written is None else await self._calls(body, answer, tenant)
        is_held = written is not None and structure is not None and _has_no_tag(answer, body)
        return self._counted(
            AnswerForm(structure, written, body.parallel_tool_calls, layout, is_held=is_held)
        )

    def readers(self, form: AnswerForm, prompt: Sequence[int]) -> Callable[[], Reader]:
        """Makes a new reader for each answer to the prompt."""
        if form.layout is Layout.CHANNELS:
            return partial(ChannelReader, finds_calls=form.calls is not None, is_parallel=form.is_parallel)
        plain = partial(reader_for, form.calls, is_parallel=form.is_parallel, is_held=form.is_held)
        if form.layout is Layout.PLAIN:
            return plain
        is_open = ends_in_thought(self._encoder.decode(prompt[-_TAG_TOKENS:]))
        return lambda: ThoughtReader(plain(), is_open=is_open)

    def _counted(self, form: AnswerForm) -> AnswerForm:
        if form.structure is not None:
            kind = FormKind(form.structure.kind.value) if form.calls is None else FormKind.CALLS
            self._requests[kind] += 1
        return form

    async def _own_structure(self, body: ChatBody | CompletionBody, tenant: str) -> Structure | None:
        if body.structure is None:
            return None
        name, structure = body.structure
        await self._checker.check(structure, name, tenant)
        return structure

    async def _calls(self, body: ChatBody, answer: Structure | None, tenant: str) -> Structure | None:
        """Answers with calls; None where nothing is asked of them: then the model writes what it likes."""
        choice = body.tool_choice
        allowed = choice.allows(body.tools)
        is_required = choice.calling is Calling.REQUIRED
        is_held = is_required or choice.names is not None or answer is not None
        if not (is_held or any(tool.is_strict for _, tool in allowed)):
            return None
        if answer is not None and answer.kind is StructureKind.GRAMMAR:
            assert body.structure is not None
            name = body.structure[0]
            raise UnsupportedParameter(
                name,
                f"'{name}' is not supported together with 'tools' where it is a grammar or a list of "
                "choices: name a JSON schema or a regular expression, or set 'tool_choice' to \"none\".",
            )
        rules = CallRules(is_required, choice.is_named or not body.parallel_tool_calls, answer)
        arguments, structure = await self._encoder.soon(
            _size(allowed), tenant, lambda: _structures_of(allowed, rules, self._limits)
        )
        for (index, _), each in zip(allowed, arguments, strict=True):
            await self._checker.check(each, f"tools[{index}].function.parameters", tenant)
        await self._checker.check(structure, "tools", tenant)
        return structure

    def _layout(self, body: ChatBody) -> Layout:
        """Of an answer in which the model writes what it likes."""
        template = self._encoder.chat_template(has_tools=bool(body.tools))
        if has_channels(template):
            return Layout.CHANNELS
        has_tags = not any(map(self._encoder.leaves_out, THOUGHT_TAGS))  # in its text
        return Layout.THOUGHT if self._separates_reasoning and has_tags and thinks(template) else Layout.PLAIN

    def _format(self, body: ChatBody) -> ToolFormat | None:
        """How to read calls in the answer; None: not at all.

        With `tool_choice` "none" the tools are rendered all the same: the conversation's prefix stays what
        it was in the turns before, and is found in the cache. Raises UnsupportedParameter.
        """
        if not body.tools:
            return None
        template = self._encoder.chat_template(has_tools=True)
        if not renders_tools(template):
            raise UnsupportedParameter(
                "tools", "'tools' is not supported: this model's chat template has no place for them."
            )
        if body.tool_choice.calling is Calling.NONE:
            return None
        # Where answers are messages in channels, forced calls alone are text: as grammars have them.
        found = ToolFormat.HERMES if has_channels(template) else format_of(template)
        # Tokens that are marked special are in no text: without its tags no call can be told from it.
        if found is None or any(self._encoder.leaves_out(tag) for tag in (OPEN, CLOSE)):
            raise UnsupportedParameter(
                "tools",
                "'tools' is not supported: this server cannot read the calls that this model writes.",
            )
        return found


def _structures_of(
    functions: Sequence[tuple[int, Tool]], rules: CallRules, limits: Limits
) -> tuple[list[Structure], Structure]:
    """What each function's arguments have to be, and the answer with its calls.

    functions: with their places in the body. Raises InvalidField. On any thread: a hundred large schemas take
    half a second.
    """
    arguments = [arguments_of(tool, f"tools[{index}]", limits) for index, tool in functions]
    names = [tool.name for _, tool in functions]
    return arguments, calls_of(list(zip(names, arguments, strict=True)), rules)


def _size(functions: Sequence[tuple[int, Tool]]) -> int:
    """Characters that take as long to tokenize as these functions' structures to write."""
    enough = _SCHEMA_CHARS * (OFFLOAD_CHARS + 1)  # to know that they are long
    return json_chars([tool.parameters for _, tool in functions], enough) // _SCHEMA_CHARS


def _has_no_tag(answer: Structure | None, body: ChatBody) -> bool:
    """Whether what looks like a call's beginning is one: the answer that may come in its place has none.

    Within JSON it has not, since a string's quotes are escaped there; a regular expression may say anything.
    """
    is_required = body.tool_choice.calling is Calling.REQUIRED
    return is_required or answer is None or answer.kind is StructureKind.JSON_SCHEMA


def _refuse_held_calls(body: ChatBody) -> None:
    """Raises UnsupportedParameter for what would hold calls in messages of their own to anything.

    A grammar is over text, and the tokens that begin such a call are in none.
    """
    choice = body.tool_choice
    only = "is not supported with this model unless 'tool_choice' is \"required\" or names a function."
    if choice.names is not None:
        raise UnsupportedParameter("tool_choice", f"'tool_choice' with functions that are allowed {only}")
    for index, tool in choice.allows(body.tools):
        if tool.is_strict:
            at = f"tools[{index}].function.strict"
            raise UnsupportedParameter(at, f"'{at}' {only}")
