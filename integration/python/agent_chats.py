"""Prints the tokens of vLLM's own renderers for chats, Responses and Messages, from the wheel and without torch.

    agent_chats.py WHEEL TOKENIZER.JSON TEMPLATE [BOS] < requests > results

Each line of requests is {"api": "chat", "responses" or "messages", "request"}. Each line of results is {"tokens", "text"}
or {"error"}. With "convert": true, a result is {"messages", "tools", "kwargs", "special"}: the chat that vLLM makes from
the request. The renderers are those of /v1/messages/render and /v1/responses/render.
"""
import asyncio
import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

logging.disable(logging.WARNING)
import transformers.utils.chat_template_utils  # noqa: E402: before the wheel's stubs
from pydantic_core import core_schema  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import wheel  # noqa: E402

CHAT_UTILS = "vllm.renderers.chat_utils"
REAL = {
    "vllm.config.utils", "vllm.envs", "vllm.exceptions", "vllm.utils.async_utils", "vllm.utils.func_utils",
    "vllm.utils.collection_utils", "vllm.inputs", "vllm.inputs.engine", "vllm.inputs.llm", "vllm.renderers",
    "vllm.renderers.params", "vllm.renderers.hf", "vllm.renderers.base", "vllm.renderers.online_renderer",
    "vllm.renderers.inputs", "vllm.renderers.inputs.preprocess", "vllm.renderers.inputs.tokenize", CHAT_UTILS,
    CHAT_UTILS + ".chat_message", CHAT_UTILS + ".content_parser", CHAT_UTILS + ".item_tracker", CHAT_UTILS + ".types",
    CHAT_UTILS + ".chat_template", CHAT_UTILS + ".tool_call", "vllm.tool_parsers.utils",
    "vllm.entrypoints.anthropic.serving", "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.openai.responses.protocol", "vllm.entrypoints.openai.responses.utils",
    "vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.generate.base.protocol", "vllm.entrypoints.serve.engine.protocol",
    "vllm.transformers_utils.chat_templates", "vllm.transformers_utils.chat_templates.registry",
}
wheel.STUBBED -= {"transformers", "huggingface_hub", "requests", "regex", "urllib3", "PIL"}
# pydantic accepts any value for a stub.
wheel.Stub.__get_pydantic_core_schema__ = classmethod(lambda cls, source, handler: core_schema.any_schema())
wheel.open_wheel(sys.argv[1], REAL)

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, DisabledThinkingEffortResolver  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts  # noqa: E402
from vllm.renderers import hf  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402
from vllm.utils.async_utils import make_async  # noqa: E402

hf.is_mistral_tokenizer = sys.modules["vllm.renderers.online_renderer"].is_mistral_tokenizer = lambda tokenizer: False


class Parser:
    """A parser of tools. vLLM rejects tools without a parser. Parsers change only the sampling."""
    tool_parser_cls, reasoning_parser_cls, always_adjust_request = object, None, False

    def __init__(self, *args, **kwargs):
        pass

    def set_prompt_token_ids(self, ids):
        pass

    def adjust_request(self, request):
        return request


def make_renderer():
    with open(sys.argv[3]) as f:
        template = f.read()
    special = {"bos_token": sys.argv[4]} if len(sys.argv) > 4 else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[2], clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template, tokenizer.max_chars_per_token = template, 1 << 20
    config = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, revision=None, code_revision=None, trust_remote_code=False,
        max_model_len=1 << 24, hf_config=SimpleNamespace(model_type="m"), is_encoder_decoder=False, model="m",
        renderer_num_workers=1)
    renderer = hf.HfRenderer.__new__(hf.HfRenderer)
    pool = ThreadPoolExecutor(1)
    renderer.__dict__.update(
        model_config=config, config=None, tokenizer=tokenizer, mm_processor=None, use_unified_vision_chunk=False,
        _apply_chat_template_async=make_async(hf.safe_apply_chat_template, executor=pool),
        _tokenize_prompt_async=make_async(renderer._tokenize_prompt, executor=pool))
    online = OnlineRenderer.__new__(OnlineRenderer)
    online.__dict__.update(
        model_config=config, renderer=renderer, request_logger=None, parser=Parser,
        use_harmony=False, chat_template=template, chat_template_content_format="auto", default_chat_template_kwargs={},
        reasoning_effort_map={}, trust_request_chat_template=False, trust_request_mm_kwargs=False,
        enable_auto_tools=True, exclude_tools_when_tool_choice_none=False)
    return online


online = make_renderer()
merge = AnthropicServingMessages._should_merge_inline_system(online)
efforts = DisabledThinkingEffortResolver(online)


async def chat_of_messages(request):
    request = AnthropicMessagesRequest(**request)
    effort = await efforts.resolve_for(request)
    return AnthropicServingMessages.to_chat_completion_request(
        request, merge_inline_system=merge, disabled_thinking_effort=effort)


def plain_part(part):
    if part["type"] == "input_text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return dict(part)


def plain(message):
    """Returns a message with the fields for renderers. Parts of Responses become parts of chats, and arguments become values."""
    made = {k: message[k] for k in ("role", "content", "reasoning", "tool_call_id") if k in message}
    if "content" in made and not isinstance(made["content"], str):
        made["content"] = [plain_part(part) for part in made["content"]]
    if message.get("tool_calls"):
        made["tool_calls"] = [{"id": c["id"], "type": c["type"], "name": c["function"]["name"],
                               "arguments": arguments(c["function"]["arguments"])} for c in message["tool_calls"]]
    return made


def arguments(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


async def convert(api, given):
    if api == "responses":
        request = ResponsesRequest(model="m", **given)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
    else:
        request = await chat_of_messages({"model": "m", "max_tokens": 100_000, **given})
        messages = request.messages
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    kwargs = online.effective_chat_template_kwargs(request)
    special = request.build_tok_params(online.model_config).add_special_tokens
    return {"messages": [plain(m) for m in messages], "tools": tools, "kwargs": kwargs, "special": special}


async def render(api, given):
    if api == "responses":
        result = await online.render_responses(ResponsesRequest(model="m", **given), skip_mm_cache=True)
        made = result.engine_input if hasattr(result, "engine_input") else None
    else:
        if api == "chat":
            request = ChatCompletionRequest(model="m", **given)
        else:
            request = await chat_of_messages({"model": "m", "max_tokens": 100_000, **given})
        result = await online.render_chat(request, skip_mm_cache=True)
        made = result[1][0] if isinstance(result, tuple) else None
    if made is None:
        return {"error": str(result)[:300]}
    return {"tokens": list(made["prompt_token_ids"]), "text": made.get("prompt")}


async def main():
    for line in sys.stdin.buffer.read().split(b"\n")[:-1]:
        case = json.loads(line)
        try:
            do = convert if case.get("convert") else render
            result = await do(case["api"], case["request"])
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e}"[:600]}
        print(json.dumps(result), flush=True)


asyncio.run(main())
