"""Prints the prompts of vLLM for chats with gpt-oss.

    harmony_chats.py TOKENIZER.JSON < requests > results

Each line of requests is the JSON of a chat completion request. Each line of results has "text", the tokens of the prompt as text, or
"error". "tools" has the tools as a chat template receives them. The date is 2026-01-02. The script needs the environment of
`make real-vllm`. The library oss-harmony normally downloads a vocabulary. Here the script writes the vocabulary from tokenizer.json of
the model, and the library checks the SHA-256.
"""
import base64
import json
import os
import sys
import tempfile

folder = tempfile.TemporaryDirectory()
os.environ.update(TIKTOKEN_ENCODINGS_BASE=folder.name, VLLM_SYSTEM_START_DATE="2026-01-02")


def write_vocabulary(path):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    with open(path) as f:
        ids = json.load(f)["model"]["vocab"]
    with open(os.path.join(folder.name, "o200k_base.tiktoken"), "wb") as out:
        for token, id in sorted(ids.items(), key=lambda item: item[1]):
            if id < 199_998:
                out.write(base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % id)


write_vocabulary(sys.argv[1])

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402: the import reads the environment
from vllm.entrypoints.openai.parser import harmony_utils as harmony  # noqa: E402


def prompt(request):  # like OnlineRenderer._make_request_with_harmony
    instructions, messages = harmony.extract_instructions_from_messages(list(request.messages))
    made = harmony.build_harmony_preamble(instructions=instructions, tools=request.tools, reasoning_effort=request.reasoning_effort,
                                          with_custom_tools=request.tools is not None)
    made.extend(harmony.parse_chat_inputs_to_harmony_messages(messages))
    return harmony.get_encoding().decode(harmony.render_for_completion(made))


for line in sys.stdin.buffer.read().split(b"\n")[:-1]:
    result = {}
    try:
        request = ChatCompletionRequest(model="m", **json.loads(line))
        result["tools"] = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        result["text"] = prompt(request)
    except Exception as e:
        result["error"] = f"{type(e).__name__}: {e}"[:300]
    print(json.dumps(result))
