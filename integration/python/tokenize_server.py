"""Serves /tokenize like vLLM, with Jinja2 and the tokenizers library of Hugging Face.

    tokenize_server.py tokenizer.json chat_template.jinja [bos_token]

The script prints the port of the server.
"""
import http.server
import json
import sys

import render_chats
from tokenizers import Tokenizer

TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def content(value):
    if isinstance(value, list):
        return "\n".join(part["text"] for part in value)
    return value or ""


def message(given):
    made = {"role": given["role"], "content": content(given.get("content"))}
    calls = given.get("tool_calls")
    if calls:
        made["tool_calls"] = [{"id": c["id"], "function": {"arguments": json.loads(c["function"]["arguments"] or "{}"),
                                                           "name": c["function"]["name"]}, "type": c["type"]}
                              for c in calls]
    reasoning = given.get("reasoning") or given.get("reasoning_content")
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = reasoning
    for name in ("tool_call_id", "name"):
        if name in given:
            made[name] = given[name]
    return made


def render(request, template, bos):
    variables = {"tools": None, "documents": None, "bos_token": bos, **request.get("chat_template_kwargs", {}),
                 "messages": [message(m) for m in request["messages"]],
                 "add_generation_prompt": request.get("add_generation_prompt", True)}
    if request.get("tools"):
        variables["tools"] = request["tools"]
    going_on = request.get("continue_final_message", False)
    if going_on:
        variables["messages"][-1]["content"] += TAG
    text = render_chats.compiled(template).render(**variables)
    if not going_on:
        return text
    at = text.rindex(TAG.strip())
    return text[:at] if text[at:].startswith(TAG) else text[:at].rstrip()


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    with open(sys.argv[2]) as f:
        template = f.read()
    bos = sys.argv[3] if len(sys.argv) > 3 else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                if "messages" in request:
                    ids = tokenizer.encode(render(request, template, bos), add_special_tokens=False).ids
                else:
                    ids = tokenizer.encode(request["prompt"]).ids
                status, answer = 200, {"count": len(ids), "max_model_len": 1 << 20, "tokens": ids}
            except Exception as e:
                status, answer = 400, {"error": {"message": f"{type(e).__name__}: {e}"}}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


main()
