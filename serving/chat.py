"""Conversations: the glue between requests, DeepSeek's own encoder of prompts, and the constraints on replies.

deepseek-recipe converts requests of every protocol to one conversation and encodes it; what a reply may look like,
which it leaves to its user, is decided here for all protocols alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

import attrs
import deepseek_recipe as recipe

from ..model.model import Model
from ..state.config import Config
from .asks import Mask
from .constraints import Grammars, ToolSpec, tools_rule
from .protocol import ApiError, bad_request

__all__ = ["ChatModel", "ToolChoice", "chat_model", "convert", "encode", "fresh_mask"]

_MARKER: Final = "｜DSML｜"
_FRAME: Final = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", _MARKER)


class _Convertible(Protocol):
    def convert(self, options: recipe.ConversionOptions) -> recipe.ConversationRequest: ...


_Request = TypeVar("_Request", bound=_Convertible)


@attrs.frozen(eq=False, kw_only=True)
class ChatModel:
    """What turns conversations into token ids and replies into messages, for one model.

    Attributes:
        name: that requests call the model by.
        config: of the model.
        context: tokens that a request may have in all.
        thinking: whether requests that do not say think.
        tokenizer: of the model, as deepseek-recipe reads it.
        grammars: compiles constraints.
        marker: id of the token that marks the tags of tool calls.
    """

    name: str
    config: Config
    context: int
    thinking: bool
    tokenizer: recipe.Tokenizer
    grammars: Grammars
    marker: int

    @property
    def encoding(self) -> recipe.DeepseekV4Encoding:
        """The encoder of prompts."""
        return recipe.DeepseekV4Encoding().with_tokenizer(self.tokenizer)

    @property
    def options(self) -> recipe.ConversionOptions:
        """How requests are converted."""
        options = recipe.ConversionOptions().with_default_thinking_mode(self.thinking)
        return options.with_model_versions_by_name({self.name: recipe.ModelVersion.DeepseekV4Pro})


def chat_model(model: Model, *, name: str, context: int, thinking: bool) -> ChatModel | None:
    """Prepare a model for chats.

    Args:
        model: the model, with a tokenizer.
        name: that requests call it by.
        context: tokens that a request may have in all.
        thinking: whether requests that do not say think.
    Returns:
        None where the tokenizer lacks the tokens that frame turns.
    """
    frame = {token: model.tokenizer.token_to_id(token) for token in _FRAME}
    if None in frame.values():
        return None
    return ChatModel(
        name=name,
        config=model.config,
        context=context,
        thinking=thinking,
        tokenizer=recipe.Tokenizer.from_str(model.tokenizer.to_str()),
        grammars=Grammars(
            model.tokenizer, model.config.vocab_size, model.config.eos_token_id, end_of_thinking=frame["</think>"]
        ),
        marker=frame[_MARKER],
    )


@attrs.frozen
class ToolChoice:
    """Whether and which tools are to be called.

    Attributes:
        mode: "auto", "none", "required".
        name: the one tool that may be called; None for any.
        is_single: whether one call is the most.
    """

    mode: str = "auto"
    name: str | None = None
    is_single: bool = False


def convert(
    make: Callable[[str], _Request], body: Mapping[str, Any], model: ChatModel, *, param: str, format_param: str
) -> recipe.ConversationRequest:
    """Convert a request to a conversation.

    Args:
        make: the class of the request's protocol.
        body: what deepseek-recipe is to read of it.
        model: that is asked.
        param: the field that holds the conversation.
        format_param: the field that holds the format of replies.
    Raises:
        ApiError: the request is not one, or its earlier calls cannot be framed.
    """
    try:
        call = make(json.dumps(body)).convert(model.options)
    except recipe.ConversionError as error:
        raise _conversion_error(error, param, format_param) from error
    except ValueError as error:
        raise ApiError(str(error), param=param, code="invalid_value") from error
    _check_history(call.conversation, param)
    return call


def encode(call: recipe.ConversationRequest, model: ChatModel) -> tuple[int, ...]:
    """Return the token ids of a conversation's prompt."""
    return tuple(model.encoding.encode(call.conversation))


def fresh_mask(
    model: ChatModel, conversation: recipe.Conversation, rules: str | None, choice: ToolChoice, *, param: str
) -> Callable[[], Mask] | None:
    """Compile what a reply must look like.

    Args:
        model: that replies.
        conversation: that is replied to.
        rules: of a reply's format; None leaves it free.
        choice: of its tools.
        param: the field that asked for the format.
    Returns:
        A function that makes a mask for one reply; None leaves replies free.
    Raises:
        ApiError: it cannot be enforced.
    """
    tools = [_tool(one) for one in conversation.tools]
    if choice.mode != "none" and (tools or choice.mode != "auto"):
        if rules is not None:
            bad_request(
                f"{param}: expected none beside tools that may be called; leave one of them out",
                param,
                "unsupported_constraint",
            )
        rules, param = _tool_rules(tools, choice, model.marker), "tools"
    if rules is None:
        return None
    return model.grammars.compile(rules, thinking=conversation.thinking_mode, param=param)


def _conversion_error(error: recipe.ConversionError, param: str, format_param: str) -> ApiError:
    """Say what deepseek-recipe refused; it names no fields, so that its words have to tell them apart."""
    try:
        said = json.loads(error.body)["error"]
    except (ValueError, KeyError, TypeError):
        said = {"message": error.body}
    if re.match("Invalid json schema", said["message"]):
        param = format_param
    elif re.search("function '|tools\\[|[Tt]ool names|custom tool", said["message"]):
        param = "tools"
    return ApiError(said["message"], status=error.status_code, param=param, code="invalid_value")


def _check_history(conversation: recipe.Conversation, param: str) -> None:
    """Refuse earlier calls that the markup of calls cannot hold: it has no escapes."""
    for at, message in enumerate(conversation.messages):
        for call in message.tool_calls or ():
            if _MARKER in call.name or _MARKER in _unescaped(call.arguments):
                where = f"{param}[{at}].tool_calls"
                bad_request(
                    f"{where}: expected a name and arguments without {_MARKER!r}, which is the markup of calls itself",
                    where,
                    "invalid_value",
                )


def _unescaped(arguments: str) -> str:
    """Write arguments as the prompt has them, where they are the JSON that they should be."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _tool(tool: recipe.ToolDefinition) -> ToolSpec:
    parameters = tool.parameters if isinstance(tool.parameters, Mapping) else {}
    return ToolSpec(name=tool.name, parameters=parameters, is_strict=bool(tool.strict))


def _tool_rules(tools: list[ToolSpec], choice: ToolChoice, marker: int) -> str:
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
    if not tools:
        bad_request("tool_choice: expected one of the tools given, got another", "tool_choice", "invalid_value")
    return tools_rule(tools, marker, is_forced=choice.mode == "required", is_single=choice.is_single)
