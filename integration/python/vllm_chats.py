"""Prints the variables that vLLM passes to chat templates.

    vllm_chats.py < requests > results

Each line of requests is the JSON of a chat completion request. Each line of results is {"error"} or {"text"}. A template that shows
all variables renders the text. The script needs the environment of `make real-vllm`.
"""
import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_kwargs

TEMPLATE = ("{{ messages|tojson }}\n{{ tools|tojson }}\n{{ documents }} {{ add_generation_prompt }} {{ enable_thinking }} {{ q }}\n"
            "{% for m in messages %}{{ m.content|trim }};{% endfor %}")
CONTINUED = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim if trim else m.content }}</>{% endfor %}{{ q }}"


def render(line):
    request = ChatCompletionRequest(model="m", **json.loads(line))
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(None, "string").with_defaults({"tools": tools, "tokenize": False})
    config = MagicMock(multimodal_config=None, enable_prompt_embeds=False)
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format="string")
    kwargs = params.get_apply_chat_template_kwargs()
    for name in ("chat_template", "return_dict", "tokenize"):
        kwargs.pop(name, None)
    template = CONTINUED if request.continue_final_message else TEMPLATE
    tokenizer = SimpleNamespace(apply_chat_template=lambda conversation, tools=None, documents=None,
                                add_generation_prompt=False, continue_final_message=False: None)
    tools = kwargs.pop("tools", None)
    kwargs = resolve_chat_template_kwargs(tokenizer, template, kwargs)
    rendered, _ = render_jinja_template(conversations=[conversation], tools=tools, chat_template=template, **kwargs)
    return rendered[0]


for line in sys.stdin.buffer.read().split(b"\n")[:-1]:
    try:
        result = {"text": render(line)}
    except Exception as e:
        result = {"error": f"{type(e).__name__}: {e}"[:300]}
    print(json.dumps(result))
